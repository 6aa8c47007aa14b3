// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/dialecttest"
)

// typedEvent judges one event of a Responses stream.
func typedEvent(t *testing.T, data string) event {
	t.Helper()
	start := func() dialect.Stream {
		return Responses.NewStream(&dialect.Request{}, dialect.StreamOptions{})
	}
	events, _ := dialecttest.Judge(t, start, "data: "+data+"\n\n")
	if len(events) != 1 {
		t.Fatalf("%s: %d events", data, len(events))
	}
	return events[0]
}

func TestPreambleOfResponsesIsNotOutput(t *testing.T) {
	for _, data := range []string{
		`{"type":"response.created","response":{"error":null,"output":[]}}`,
		`{"type":"response.in_progress","response":{}}`,
		`{"type":"response.queued","response":{}}`,
		`{"type":"keepalive","sequence_number":3}`, `{"type":"ping"}`,
		`{"type":"response.output_item.added","item":{"type":"message","role":"assistant","content":[]}}`,
		`{"type":"response.output_item.added","item":{"type":"reasoning","summary":[],"content":null}}`,
		`{"type":"response.content_part.added","part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}}`,
		`{"type":"response.reasoning_summary_part.added","part":{"type":"summary_text","text":""}}`,
		`{"type":"response.output_text.delta","delta":"","logprobs":[],"obfuscation":"x8d"}`,
		`{"type":"response.function_call_arguments.delta","delta":""}`,
		`{"type":"response.output_text.done","text":""}`,
	} {
		if e := typedEvent(t, data); e.Output || e.Tokens != 0 || e.Finish || e.Done || e.Failure != nil || e.Bytes != "data: "+data+"\n\n" {
			t.Errorf("%s: %+v", data, e)
		}
	}
}

func TestOutputOfResponses(t *testing.T) {
	for data, tokens := range map[string]int{
		`{"type":"response.output_text.delta","delta":"a"}`:                                                 1,
		`{"delta":"a","type":"response.output_text.delta"}`:                                                 1,
		`{"type":"response.output_text.delta","delta":"ab","logprobs":[{"token":"a"},{"token":"b"}]}`:       2,
		`{"type":"response.output_text.delta","delta":"","logprobs":[{"token":"a"}]}`:                       1,
		`{"type":"response.reasoning_text.delta","delta":"a"}`:                                              1,
		`{"type":"response.reasoning_summary_text.delta","delta":"a"}`:                                      1,
		`{"type":"response.reasoning.delta","delta":{"content":"a"}}`:                                       1,
		`{"type":"response.refusal.delta","delta":"no"}`:                                                    1,
		`{"type":"response.audio.delta","delta":"AAAA"}`:                                                    1,
		`{"type":"response.function_call_arguments.delta","delta":"{"}`:                                     1,
		`{"type":"response.mcp_call_arguments.delta","delta":"{"}`:                                          1,
		`{"type":"response.output_item.added","item":{"type":"function_call","name":"pay","arguments":""}}`: 0,
		`{"type":"response.output_item.added","item":{"type":"web_search_call","status":"in_progress"}}`:    0,
		`{"type":"response.output_item.done","item":{"type":"message","content":[{"type":"output_text"}]}}`: 0,
		`{"type":"response.content_part.added","part":{"type":"output_text","text":"a"}}`:                   0,
		`{"type":"response.output_text.done","text":"all at once"}`:                                         0,
		`{"type":"response.web_search_call.searching"}`:                                                     0,
		`{"type":"response.image_generation_call.partial_image","partial_image_b64":"AAAA"}`:                0,
		`{"type":"invented"}`: 0, `{}`: 0, `[1]`: 0,
	} {
		if e := typedEvent(t, data); !e.Output || e.Tokens != tokens || e.Failure != nil || e.Bytes != "data: "+data+"\n\n" {
			t.Errorf("%s: %+v", data, e)
		}
	}
}

func TestFailuresOfResponses(t *testing.T) {
	for data, want := range map[string]dialect.Failure{
		`{"type":"error","code":"server_error","message":"m","param":null}`:                            {Code: "server_error", Message: "m", Type: "error"},
		`{"type":"error","error":{"type":"t","code":"rate_limit","message":"m"}}`:                      {Code: "rate_limit", Message: "m", Type: "t"},
		`{"type":"response.failed","response":{"status":"failed","error":{"code":"c","message":"m"}}}`: {Code: "c", Message: "m"},
		`{"type":"response.failed","response":{"status":"failed","error":null}}`:                       {Type: "response.failed"},
		`{"error":{"message":"m","type":"t","code":404}}`:                                              {Status: 404, Code: "404", Message: "m", Type: "t"},
		`{"object":"error","message":"m","type":"t","code":500}`:                                       {Status: 500, Code: "500", Message: "m", Type: "t"},
		`{"type":"response.output_text.delta","delta":`:                                                {Message: "undecodable event"},
	} {
		e := typedEvent(t, data)
		if e.Failure == nil || e.Output || e.Done {
			t.Errorf("%s: %+v", data, e)
			continue
		}
		if diff := cmp.Diff(want, *e.Failure); diff != "" {
			t.Errorf("%s: %s", data, diff)
		}
	}
}

// STR-6: an answer is whole with its last event, and with nothing else.
func TestResponsesAreCompleteWithTheirLastEvent(t *testing.T) {
	const delta = `data: {"type":"response.output_text.delta","delta":"a"}` + "\n\n"
	for text, complete := range map[string]bool{
		"": false, delta: false, "data: [DONE]\n\n": false, delta + "data: [DONE]\n\n": false,
		delta + `data: {"type":"response.output_text.done","text":"a"}` + "\n\n":                                               false,
		delta + `data: {"type":"response.completed","response":{"status":"completed","error":null}}` + "\n\n":                  true,
		delta + "event: response.completed\ndata: {\"response\":{}}\n\n":                                                       true,
		delta + `data: {"type":"response.incomplete","response":{"incomplete_details":{"reason":"content_filter"}}}`:           true,
		delta + `data: {"type":"response.completed","response":{"sta`:                                                          false,
		delta + `data: {"type":"error","message":"m"}` + "\n\n" + `data: {"type":"response.completed","response":{}}` + "\n\n": false,
	} {
		start := func() dialect.Stream {
			return Responses.NewStream(&dialect.Request{}, dialect.StreamOptions{})
		}
		if _, s := dialecttest.Judge(t, start, text); s.Complete() != complete {
			t.Errorf("%s: complete %v", text, s.Complete())
		}
	}
}

func TestWhatLivesInOneEngineIsRefused(t *testing.T) {
	for body, field := range map[string]string{
		`{"model":"m","input":"a","background":true}`:                     "background",
		`{"model":"m","input":"a","background":"yes"}`:                    "background",
		`{"model":"m","input":"a","previous_response_id":"resp_1"}`:       "previous_response_id",
		`{"model":"m","input":"a","conversation":"conv_1"}`:               "conversation",
		`{"model":"m","input":"a","conversation":{"id":"conv_1"}}`:        "conversation",
		`{"model":"m","input":"a","previous_response_id":1}`:              "previous_response_id",
		`{"model":"m","input":"a","input":"b"}`:                           "input",
		`{"model":"m","input":"a","background":false,"background":false}`: "background",
	} {
		_, err := Responses.Inspect("", []byte(body))
		e, ok := errors.AsType[*inference.Error](err)
		if !ok || e.Code != inference.InvalidRequest || !strings.HasPrefix(e.Message, field+":") {
			t.Errorf("%s: %v", body, err)
		}
	}
	for _, body := range []string{
		`{"model":"m","input":"a","background":false,"previous_response_id":null,"conversation":null}`,
		`{"model":"m","input":"a","store":true}`, `{"model":"m","input":"a","store":false,"previous_response_id":""}`,
	} {
		if _, err := Responses.Inspect("", []byte(body)); err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
}

// The one shape that openai-node, openai-python, openai-go and the AI SDK all
// read: a type and a message for those that know the API, and error for those
// that look for errors in any stream.
func TestErrorEventOfResponses(t *testing.T) {
	e := inference.Errorf(inference.DecodeInterrupted, "a\nb")
	text := string(Responses.ErrorEvent(e, dialect.ErrorDetail{RequestID: "req_1", Partial: true, Tokens: 3, Events: 7}))
	data, ok := strings.CutPrefix(text, "event: error\ndata: ")
	if !ok || !strings.HasSuffix(text, "}\n\n") {
		t.Fatalf("%q", text)
	}
	var got map[string]any
	if err := json.Unmarshal([]byte(data), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"type": "error", "sequence_number": 7.0, "code": "upstream_decode_interrupted", "message": "a\nb", "param": nil,
		"error": map[string]any{
			"message": "a\nb", "type": "upstream_error", "param": nil, "code": "upstream_decode_interrupted",
			"request_id": "req_1", "partial_output": true, "delivered_output_tokens": 3.0, "retryable": false,
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if e := typedEvent(t, strings.TrimSpace(data)); e.Failure == nil || e.Failure.Code != "upstream_decode_interrupted" {
		t.Errorf("read back as %+v", e)
	}
	if Responses.EndMarker() != nil {
		t.Error("an end marker")
	}
}

func TestWholeResponses(t *testing.T) {
	body := `{"id":"resp_1","object":"response","error":null,"status":"completed","model":"engine/name","output":[{"type":"message","content":[{"text":"x"}]}],"usage":{"input_tokens":9,"output_tokens":3,"input_tokens_details":{"cached_tokens":8}}}`
	a, err := Responses.Answer(nil, []byte(body), "public")
	if err != nil || a.Failure != nil || a.Choices != 1 || a.Usage != (inference.Usage{Prompt: 9, Completion: 3, Cached: 8}) {
		t.Fatalf("%+v, %v", a, err)
	}
	// A null error is a documented field here, and no SDK stumbles over it.
	if got, want := edited(body, a.Edits), strings.Replace(body, "engine/name", "public", 1); got != want {
		t.Errorf("%s", got)
	}
	for body, want := range map[string]dialect.Failure{
		`{"status":"failed","error":{"code":"server_error","message":"m"}}`: {Code: "server_error", Message: "m"},
		`{"status":"failed","error":null}`:                                  {Message: "the response failed"},
		`{"error":{"message":"m","code":500}}`:                              {Message: "m", Code: "500", Status: 500},
	} {
		if a, err := Responses.Answer(nil, []byte(body), ""); err != nil || a.Failure == nil || *a.Failure != want {
			t.Errorf("%s: %+v, %v", body, a, err)
		}
	}
	if a, err := Responses.Answer(nil, []byte(`{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"},"error":null}`), ""); err != nil || a.Failure != nil {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestTypedStreamDoesNotAllocatePerEvent(t *testing.T) {
	s := Responses.NewStream(&dialect.Request{}, dialect.StreamOptions{Model: "public"})
	run := func() {
		s.Filled(copy(s.Buffer(), "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\",\"item_id\":\"x\"}\n\n"))
		for ok := true; ok; _, ok, _ = s.Next() {
		}
	}
	run()
	if n := testing.AllocsPerRun(200, run); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// recorded reads the answers or requests of the cases.
func recorded(f *testing.F, pattern string) (texts []string) {
	f.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		f.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		texts = append(texts, string(text))
	}
	return texts
}

func FuzzResponsesStream(f *testing.F) {
	dialecttest.FuzzStream(f, Responses, &dialect.Request{}, recorded(f, "testdata/*responses*/answer.sse")...)
}

func FuzzResponses(f *testing.F) {
	dialecttest.FuzzJSON(f, Responses, append(recorded(f, "testdata/*responses*/request.json"), recorded(f, "testdata/*responses*/answer.json")...)...)
}
