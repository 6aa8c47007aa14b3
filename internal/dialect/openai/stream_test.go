// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
	"github.com/headgate/headgate/internal/dialect/dialecttest"
)

// event is a dialect.Event with bytes of its own.
type event = dialecttest.Event

var (
	feed   = dialecttest.Feed
	joined = dialecttest.Bytes
)

// judge feeds text to a new stream in reads of several sizes, which must not
// matter.
func judge(t *testing.T, o dialect.StreamOptions, choices int, text string) ([]event, dialect.Stream) {
	t.Helper()
	return judgeRequest(t, o, &dialect.Request{Choices: choices, Prompts: 1}, text)
}

func judgeRequest(t *testing.T, o dialect.StreamOptions, r *dialect.Request, text string) ([]event, dialect.Stream) {
	t.Helper()
	return dialecttest.Judge(t, func() dialect.Stream { return Chat.NewStream(r, o) }, text)
}

// single judges one event with data.
func single(t *testing.T, data string) event {
	t.Helper()
	events, _ := judge(t, dialect.StreamOptions{}, 1, "data: "+data+"\n\n")
	if len(events) != 1 {
		t.Fatalf("%s: %d events", data, len(events))
	}
	return events[0]
}

func choice(fields string) string { return `{"choices":[{"index":0,` + fields + `}]}` }

func TestPreambleIsNotOutput(t *testing.T) {
	for _, data := range []string{
		choice(`"delta":{"role":"assistant"}`),
		choice(`"delta":{"role":"assistant","content":null}`),
		choice(`"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null`),
		choice(`"delta":{"content":"","reasoning_content":null,"reasoning":"","tool_calls":[],"function_call":null,"refusal":null,"audio":{ }}`),
		choice(`"delta":{"role":"assistant","index":0}`),
		choice(`"delta":{}`), choice(`"delta":null`), choice(`"text":""`),
		choice(`"delta":{"content":""},"logprobs":{"content":[]}`),
		choice(`"delta":{"content":""},"logprobs":{"content":null}`),
		choice(`"delta":{},"finish_reason":"stop"`), // a legal empty answer (STR-4)
		`{"choices":[],"usage":{"prompt_tokens":1}}`,
		`{"usage":{"prompt_tokens":1}}`,
		`{"choices":[],"prompt_filter_results":[]}`,
		`{"choices":[{"delta":{"role":"assistant"}}],"usage":null}`,
		`null`, // the first event of llama.cpp's completions
	} {
		if e := single(t, data); e.Output || e.Tokens != 0 || e.Failure != nil || e.Bytes != "data: "+data+"\n\n" {
			t.Errorf("%s: %+v", data, e)
		}
	}
}

func TestOutput(t *testing.T) {
	for data, tokens := range map[string]int{
		choice(`"delta":{"content":"a"}`):                                                       1,
		choice(`"delta":{"content":" "}`):                                                       1,
		choice(`"delta":{"\u0063ontent":"a"}`):                                                  1,
		choice(`"delta":{"content":[{"type":"text"}]}`):                                         1,
		choice(`"delta":{"reasoning_content":"a"}`):                                             1,
		choice(`"delta":{"reasoning":"a"}`):                                                     1,
		choice(`"delta":{"refusal":"no"}`):                                                      1,
		choice(`"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":""}}]}`):   1,
		choice(`"delta":{"function_call":{"name":"f"}}`):                                        1,
		choice(`"delta":{"audio":{"data":"AAAA"}}`):                                             1,
		choice(`"delta":{"something_new":"x"}`):                                                 1,
		choice(`"delta":{"content":"a"},"finish_reason":"stop"`):                                1,
		choice(`"text":"a"`):                                                                    1,
		choice(`"message":{"content":"a"}`):                                                     1,
		choice(`"delta":{"content":"ab"},"logprobs":{"content":[{"token":"a"},{"token":"b"}]}`): 2,
		choice(`"delta":{"content":""},"logprobs":{"content":[{"token":"","logprob":NaN}]}`):    1,
		choice(`"delta":{},"logprobs":{"refusal":[{},{}],"content":null}`):                      2,
		choice(`"text":"abc","logprobs":{"tokens":["a","b","c"],"token_logprobs":[1,2,3]}`):     3,
		choice(`"delta":{"content":"abc"},"token_ids":[1,2,3,4]`):                               4,
		`{"choices":[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":"b"}}]}`: 2,
		`{"choices":[{"index":0,"delta":{"role":"x"}},{"index":1,"delta":{"content":"b"}}]}`:    1,
		`{"choices":{"0":"?"}}`:                                                                 0,
		`{"choices":["?"]}`:                                                                     0,
		`{"id":"x"}`:                                                                            0,
		`{}`:                                                                                    0,
		`[1]`:                                                                                   0,
		`"text"`:                                                                                0,
		`{"type":"response.created"}`:                                                           0,
	} {
		if e := single(t, data); !e.Output || e.Tokens != tokens || e.Failure != nil {
			t.Errorf("%s: %+v", data, e)
		}
	}
}

func TestUnknownEventsCountAsOutputAndPingDoesNot(t *testing.T) {
	for text, output := range map[string]bool{
		"event: surprise\ndata: {}\n\n":                               true,
		"event: surprise\ndata: not json\n\n":                         true,
		"event: surprise\ndata: [1]\n\n":                              true,
		"event: ping\ndata: {}\n\n":                                   false,
		"event: ping\ndata: x\n\n":                                    false,
		"event: message\ndata: {}\n\n":                                true,
		"event: chunk\ndata: " + choice(`"delta":{}`) + "\n\n":        false,
		"event: c\ndata: " + choice(`"delta":{"content":1}`) + "\n\n": false,
	} {
		events, s := judge(t, dialect.StreamOptions{}, 1, text)
		if len(events) != 1 || events[0].Output != output || events[0].Failure != nil || joined(events) != text {
			t.Errorf("%q: %+v", text, events)
		}
		if (s.Outputs() == 1) != output {
			t.Errorf("%q: %d outputs", text, s.Outputs())
		}
	}
}

// SSE-5: what carries no data breaks the decoders of several SDKs, except
// comments, and those too once an id was sent.
func TestEventsWithoutDataAreWithheldExceptComments(t *testing.T) {
	text := ": c\n\nretry: 5\n\ndata:\n\ndata: \n\ndata\n\n: d\n\nid: 1\n\n: e\n\n"
	events, s := judge(t, dialect.StreamOptions{HideUsage: true, Model: "m"}, 1, text)
	for _, e := range events {
		if e.Output || e.Done || e.Failure != nil {
			t.Errorf("%+v", e)
		}
	}
	if got, want := joined(events), ": c\n\n: d\n\n"; got != want || s.Outputs() != 0 {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestBytesThatAreNotTextAreAFailure(t *testing.T) {
	events, s := judge(t, dialect.StreamOptions{}, 1, "\xff\xfe\x00garbage\n\n")
	if len(events) != 1 || events[0].Failure == nil || !events[0].Withheld || s.Complete() {
		t.Errorf("%+v", events)
	}
}

func TestErrorsAreFailures(t *testing.T) {
	for _, tt := range []struct {
		text string
		want dialect.Failure
	}{
		{`data: {"error":{"message":"boom","type":"T","code":"bad"}}`, dialect.Failure{Message: "boom", Code: "bad", Type: "T"}},
		{`data: {"error":{"message":"too long","type":"exceed_context_size_error","code":400}}`, dialect.Failure{Status: 400, Message: "too long", Code: "400", Type: "exceed_context_size_error"}},
		{`data: {"error":{"message":"x","code":"404"}}`, dialect.Failure{Status: 404, Message: "x", Code: "404"}},
		{`data: {"error":{"message":"x","status":503,"code":null}}`, dialect.Failure{Status: 503, Message: "x"}},
		{`data: {"error":{"message":"x","code":1001}}`, dialect.Failure{Message: "x", Code: "1001"}},
		{`data: {"error":{"message":{"a":1}}}`, dialect.Failure{Message: `{"a":1}`}},
		{`data: {"error":{}}`, dialect.Failure{}},
		{`data: {"error":{"message":"x"},"code":429}`, dialect.Failure{Status: 429, Message: "x"}},
		{`data: {"error":"boom"}`, dialect.Failure{Message: "boom"}},
		{`data: {"error":true}`, dialect.Failure{Message: "true"}},
		{`data: {"\u0065rror":"boom"}`, dialect.Failure{Message: "boom"}},
		{`data: {"object":"error","message":"gone","type":"NotFoundError","param":null,"code":404}`, dialect.Failure{Status: 404, Message: "gone", Code: "", Type: "NotFoundError"}},
		{`data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"error"}],"error":{"message":"m"}}`, dialect.Failure{Message: "m"}},
		{`data: {"error":null,"error":"m"}`, dialect.Failure{Message: "m"}},
		{"event: error\ndata: {\"error\":{\"message\":\"m\",\"code\":500}}", dialect.Failure{Status: 500, Message: "m", Code: "500"}},
		{"event: error\ndata: {\"message\":\"m\",\"type\":\"T\",\"code\":422}", dialect.Failure{Status: 422, Message: "m", Type: "T"}},
		{"event: error\ndata: out of memory", dialect.Failure{Message: "out of memory"}},
		{"event: error\ndata: [DONE]", dialect.Failure{Message: "[DONE]"}},
		{"data: <html><body>502</body></html>", dialect.Failure{Message: "undecodable event"}},
		{`data: {"choices":[{"index":0,"delta":{"content":"x"}}`, dialect.Failure{Message: "undecodable event"}},
		{`data: {"choices":[]} {"choices":[]}`, dialect.Failure{Message: "undecodable event"}},
	} {
		events, s := judge(t, dialect.StreamOptions{}, 1, tt.text+"\n\n")
		if len(events) != 1 || events[0].Failure == nil {
			t.Errorf("%s: %+v", tt.text, events)
			continue
		}
		if diff := cmp.Diff(tt.want, *events[0].Failure); diff != "" {
			t.Errorf("%s: %s", tt.text, diff)
		}
		if events[0].Output || events[0].Finish || events[0].Tokens != 0 || s.Complete() || s.Outputs() != 0 {
			t.Errorf("%s: %+v, complete %v", tt.text, events[0], s.Complete())
		}
	}
}

func TestErrorsThatAreNoneAreLeft(t *testing.T) {
	for _, data := range []string{`{"error":"","choices":[]}`, `{"error":false,"choices":[]}`, `{"error":0,"choices":[]}`, `{"choices":[{"error":{"m":1}}]}`} {
		if e := single(t, data); e.Failure != nil || e.Bytes != "data: "+data+"\n\n" {
			t.Errorf("%s: %+v", data, e)
		}
	}
}

func TestFailureTextIsBoundedUTF8(t *testing.T) {
	long := strings.Repeat("x", body.MessageMax-1) + "漢字"
	e := single(t, `{"error":"`+long+`"}`)
	if want := long[:body.MessageMax-1]; e.Failure.Message != want {
		t.Errorf("%d bytes, want %d", len(e.Failure.Message), len(want))
	}
	if e := single(t, "{\"error\":\"a\xffb\"}"); e.Failure.Message != "a\uFFFDb" {
		t.Errorf("%q", e.Failure.Message)
	}
}

func TestNullErrorIsRemoved(t *testing.T) {
	for data, want := range map[string]string{
		`{"error":null}`:                                  `{}`,
		`{"error":null,"choices":[]}`:                     `{"choices":[]}`,
		`{"choices":[],"error":null}`:                     `{"choices":[]}`,
		`{"id":1,"error":null,"choices":[]}`:              `{"id":1,"choices":[]}`,
		`{ "id":1 , "error" : null , "choices":[] }`:      `{ "id":1  , "choices":[] }`,
		`{ "error" : null , "choices":[] }`:               `{  "choices":[] }`,
		`{"error":null,"error":null}`:                     `{}`,
		`{"error":null,"choices":[],"error":null}`:        `{"choices":[]}`,
		`{"error":null,"error":null,"choices":[]}`:        `{"choices":[]}`,
		`{"\u0065rror":null,"choices":[]}`:                `{"choices":[]}`,
		`{"choices":[{"error":null}],"x":{"error":null}}`: `{"choices":[{"error":null}],"x":{"error":null}}`,
	} {
		e := single(t, data)
		if e.Failure != nil || e.Bytes != "data: "+want+"\n\n" {
			t.Errorf("%s: %s", data, e.Bytes)
		}
		if !json.Valid([]byte(strings.TrimPrefix(e.Bytes, "data: "))) {
			t.Errorf("%s: not JSON: %s", data, e.Bytes)
		}
	}
}

func TestDataOnManyLinesIsPatched(t *testing.T) {
	text := "id: 7\ndata: {\"choices\":[],\ndata:\"error\":null,\r\ndata: \"model\":\"x\"}\nevent: message\n\n"
	events, _ := judge(t, dialect.StreamOptions{Model: "public"}, 1, text)
	if want := "id: 7\ndata: {\"choices\":[],\ndata: \"model\":\"public\"}\nevent: message\n\n"; joined(events) != want {
		t.Errorf("%q", joined(events))
	}
	events, _ = judge(t, dialect.StreamOptions{}, 1, strings.ReplaceAll(text, "error", "e"))
	if want := strings.ReplaceAll(text, "error", "e"); joined(events) != want {
		t.Errorf("%q", joined(events))
	}
}

// PAY-12: the client's name in every chunk, and nowhere but at the top level.
func TestModelIsRestored(t *testing.T) {
	text := "data: {\"model\":\"/data/x.gguf\",\"choices\":[{\"delta\":{\"content\":\"\\\"model\\\":\\\"/data/x.gguf\\\"\"},\"model\":\"/data/x.gguf\"}]}\r\n\r\n" +
		"data:{\"choices\":[],\"model\": \"public\"}\n\ndata: {\"choices\":[],\"model\":null}\n\ndata: [DONE]\n\n"
	events, _ := judge(t, dialect.StreamOptions{Model: "public"}, 1, text)
	if want := strings.Replace(text, `"/data/x.gguf"`, `"public"`, 1); joined(events) != want {
		t.Errorf("%s\nwant %s", joined(events), want)
	}
}

// PAY-3: the usage that only the gateway asked for is read and not shown.
func TestUsageOnlyEventIsWithheld(t *testing.T) {
	for _, usage := range []string{
		`{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`,
		`{"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":4}},"choices":[ ]}`,
		`{"usage":{"completion_tokens":2,"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}`,
	} {
		for _, hide := range []bool{true, false} {
			first := "data: " + choice(`"delta":{"content":"a"},"finish_reason":"stop"`) + "\n\n"
			text := first + "data: " + usage + "\n\n" + "data: [DONE]\n\n"
			events, s := judge(t, dialect.StreamOptions{HideUsage: hide}, 1, text)
			want := text
			if hide {
				want = first + "data: [DONE]\n\n"
			}
			if joined(events) != want || events[1].Withheld != hide || events[1].Output {
				t.Errorf("hide %v: %+v", hide, events)
			}
			if u, ok := s.Usage(); !ok || u != (inference.Usage{Prompt: 5, Completion: 2, Cached: 4}) {
				t.Errorf("%+v, %v", u, ok)
			}
		}
	}
}

// SSE-4: usage in any event, before or without the end marker; the last counts.
func TestLastUsageCounts(t *testing.T) {
	text := "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1}}\n\n" +
		"data: {\"choices\":[{\"delta\":{\"content\":\"b\"}}],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2,\"prompt_tokens_details\":null}}\n\n" +
		"data: {\"choices\":[{\"delta\":{\"content\":\"c\"}}],\"usage\":null}\n\n"
	events, s := judge(t, dialect.StreamOptions{HideUsage: true}, 1, text)
	if joined(events) != text {
		t.Error("usage beside choices must stay")
	}
	if u, ok := s.Usage(); !ok || u != (inference.Usage{Prompt: 5, Completion: 2, Cached: -1}) {
		t.Errorf("%+v, %v", u, ok)
	}
	_, s = judge(t, dialect.StreamOptions{}, 1, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":\"many\",\"completion_tokens\":1.5}}\n\n")
	if u, _ := s.Usage(); u != (inference.Usage{Prompt: -1, Completion: -1, Cached: -1}) {
		t.Errorf("%+v", u)
	}
	if _, ok := Chat.NewStream(&dialect.Request{}, dialect.StreamOptions{}).Usage(); ok {
		t.Error("usage before any event")
	}
}

// llama.cpp reports each choice by itself, vLLM all of them at the end.
func TestUsageOfSeveralChoicesIsTheirSum(t *testing.T) {
	usage := func(choices string, prompt, completion int) string {
		return fmt.Sprintf("data: {\"choices\":[%s],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d}}\n\n", choices, prompt, completion)
	}
	const end0, end1, more = `{"index":0,"finish_reason":"stop"}`, `{"index":1,"finish_reason":"stop"}`, `{"index":1,"text":"a"}`
	for _, tt := range []struct {
		name, text         string
		prompts            int
		prompt, completion int
	}{
		{"two usage-only events, n = 2", usage("", 9, 3) + usage("", 9, 4), 1, 9, 7},
		{"two usage-only events, two prompts", usage("", 9, 3) + usage("", 5, 4), 2, 14, 7},
		{"beside the finish_reason", usage(end1, 9, 3) + usage(end0, 9, 4), 1, 9, 7},
		{"running, then a total", usage(more, 9, 1) + usage(end0, 9, 3) + usage(end1, 9, 4) + usage("", 9, 7), 1, 9, 7},
	} {
		s := Completions.NewStream(&dialect.Request{Choices: 2, Prompts: tt.prompts}, dialect.StreamOptions{})
		if _, err := feed(s, tt.text, 1000); err != nil {
			t.Fatal(err)
		}
		if u, ok := s.Usage(); !ok || u != (inference.Usage{Prompt: tt.prompt, Completion: tt.completion, Cached: -1}) {
			t.Errorf("%s: %+v", tt.name, u)
		}
	}
}

// PAY-5 and I4: complete is when every choice has a finish_reason.
func TestComplete(t *testing.T) {
	finish := func(index any, reason string) string {
		return fmt.Sprintf("data: {\"choices\":[{\"index\":%v,\"delta\":{},\"finish_reason\":%s}]}\n\n", index, reason)
	}
	for _, tt := range []struct {
		name     string
		choices  int
		text     string
		complete bool
	}{
		{"nothing", 1, "", false},
		{"null", 1, finish(0, `null`), false},
		{"empty", 1, finish(0, `""`), false},
		{"stop", 1, finish(0, `"stop"`), true},
		{"vendor reason", 1, finish(0, `"eos_token"`), true},
		{"no index", 1, `data: {"choices":[{"text":"","finish_reason":"length"}]}` + "\n\n", true},
		{"only [DONE]", 1, "data: [DONE]\n\n", false}, // STR-4
		{"one of two", 2, finish(0, `"stop"`), false},
		{"the same twice", 2, finish(0, `"stop"`) + finish(0, `"stop"`), false},
		{"two of two", 2, finish(1, `"stop"`) + finish(0, `"length"`), true},
		{"two in one event", 2, `data: {"choices":[{"index":0,"finish_reason":"stop"},{"index":1,"finish_reason":"stop"}]}` + "\n\n", true},
		{"odd indexes", 1, finish(-1, `"stop"`) + finish(1<<40, `"stop"`) + finish(`"0x"`, `null`), false},
		{"error later", 1, finish(0, `"stop"`) + "data: {\"error\":\"x\"}\n\n", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, s := judge(t, dialect.StreamOptions{}, tt.choices, tt.text)
			if s.Complete() != tt.complete {
				t.Errorf("complete %v", s.Complete())
			}
		})
	}
}

func TestEndMarkerIsSeen(t *testing.T) {
	for _, text := range []string{"data: [DONE]\n\n", "data:[DONE]\r\n\r\n", "data: [DONE] \n\n", "event: done\ndata: [DONE]\n\n"} {
		events, s := judge(t, dialect.StreamOptions{}, 1, text)
		if !s.Done() || !events[0].Done || events[0].Output || joined(events) != text {
			t.Errorf("%q: %+v", text, events)
		}
	}
}

// STR-1: what was cut is not shown; what only lacks its blank line is, with it.
func TestLastEventWithoutBlankLine(t *testing.T) {
	whole := `data: {"choices":[{"delta":{"content":"a"}}]}`
	for text, want := range map[string]string{
		whole:                                    whole + "\n\n",
		whole + "\n":                             whole + "\n\n",
		whole + "\r\n":                           whole + "\r\n\n",
		whole + "\r":                             whole + "\r\n\n", // CR LF is one line end
		whole + "\n\r":                           whole + "\n\r",
		"data: [DONE]":                           "data: [DONE]\n\n",
		"id: 1\ndata: [DONE]\nid":                "id: 1\ndata: [DONE]\nid\n\n",
		whole[:len(whole)-1]:                     "",
		"data: [DON":                             "",
		"data:":                                  "",
		": comment":                              "",
		"event: error\ndata: half a mess":        "",
		"event: surprise\ndata: half a mess":     "",
		"data: {\"a\":1,\ndata: \"error\":null}": "data: {\"a\":1}\n\n",
		"data: {\"a\":1,\"error\":null}":         "data: {\"a\":1}\n\n",
		"d":                                      "",
		"":                                       "",
	} {
		events, _ := judge(t, dialect.StreamOptions{}, 1, text)
		if got := joined(events); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	events, _ := judge(t, dialect.StreamOptions{HideUsage: true}, 1, `data: {"choices":[],"usage":{}}`)
	if len(events) != 1 || !events[0].Withheld {
		t.Errorf("%+v", events)
	}
}

// SSE-1: a bound that is passed is an error, never a quiet end.
func TestEventOverTheBoundIsAnError(t *testing.T) {
	big := "data: {\"choices\":[{\"delta\":{\"content\":\"" + strings.Repeat("x", 2<<20) + "\"}}]}\n\n"
	s := Chat.NewStream(&dialect.Request{}, dialect.StreamOptions{EventMax: 1 << 20})
	if _, err := feed(s, big, 64<<10); !errors.Is(err, dialect.ErrEventTooLarge) {
		t.Errorf("%v", err)
	}
	events, err := feed(Chat.NewStream(&dialect.Request{}, dialect.StreamOptions{}), big, 64<<10)
	if err != nil || joined(events) != big || !events[0].Output {
		t.Errorf("%v, %d events", err, len(events))
	}
}

func TestStreamDoesNotAllocatePerEvent(t *testing.T) {
	s := Chat.NewStream(&dialect.Request{Choices: 1}, dialect.StreamOptions{HideUsage: true, Model: "public"})
	run := func() {
		s.Filled(copy(s.Buffer(), chunk240))
		for ok := true; ok; _, ok, _ = s.Next() {
		}
	}
	run()
	if n := testing.AllocsPerRun(200, run); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzStream(f *testing.F) {
	files, _ := filepath.Glob("testdata/*/answer.sse")
	for _, file := range files {
		text, _ := os.ReadFile(file)
		f.Add(text, uint16(5))
	}
	f.Add([]byte("data: {\"choices\":[{\"index\":1,\"finish_reason\":\"stop\"}],\"error\":null}\n\ndata: [DONE]"), uint16(1))
	f.Fuzz(func(t *testing.T, text []byte, size uint16) {
		r := &dialect.Request{Choices: 2}
		plain := Chat.NewStream(r, dialect.StreamOptions{EventMax: 1 << 16})
		want, err := feed(plain, string(text), 1<<20)
		got, err2 := feed(Chat.NewStream(r, dialect.StreamOptions{EventMax: 1 << 16}), string(text), 1+int(size))
		if diff := cmp.Diff(want, got); diff != "" || !errors.Is(err2, err) {
			t.Fatalf("%v, %v: %s", err, err2, diff)
		}
		withheld := slices.ContainsFunc(want, func(e event) bool { return e.Withheld })
		if err == nil && !withheld && !bytes.Contains(text, []byte("error")) && !bytes.Contains(text, []byte(`\u`)) {
			// Nothing is patched; only a last event may be dropped or completed.
			all := joined(want)
			if !strings.HasPrefix(all, string(text)) && !strings.HasPrefix(string(text), all) || len(all) > len(text)+2 {
				t.Fatalf("%q became %q", text, all)
			}
		}
		patched, _ := feed(Chat.NewStream(r, dialect.StreamOptions{EventMax: 1 << 16, HideUsage: true, Model: "m"}), string(text), 1<<20)
		if len(patched) != len(want) {
			t.Fatalf("%d events, without options %d", len(patched), len(want))
		}
		for i, e := range patched {
			w := want[i]
			if e.Output != w.Output || e.Finish != w.Finish || e.Done != w.Done || e.Tokens != w.Tokens || (e.Failure == nil) != (w.Failure == nil) {
				t.Fatalf("options change %+v to %+v", w, e)
			}
			if e.Withheld && (e.Output || e.Finish) {
				t.Fatalf("withheld: %+v", e)
			}
			again, _ := feed(Chat.NewStream(r, dialect.StreamOptions{EventMax: 1 << 17, HideUsage: true, Model: "m"}), e.Bytes, 1<<20)
			if !e.Withheld && (len(again) != 1 || again[0].Bytes != e.Bytes || again[0].Output != e.Output || again[0].Tokens != e.Tokens) {
				t.Fatalf("patched %q reads as %+v, was %+v", e.Bytes, again, e)
			}
		}
	})
}

var chunk240 = "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1764000000,\"model\":\"Qwen/Qwen3-8B\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n"

func BenchmarkStream(b *testing.B) {
	logprobs := "data: " + choice(`"delta":{"content":" token"},"logprobs":{"content":[{"token":" token","logprob":-0.25,"bytes":[32,116],"top_logprobs":[`+strings.Repeat(`{"token":"a","logprob":-1.5,"bytes":[97]},`, 19)+`{"token":"b","logprob":-2.5,"bytes":[98]}]}]}`) + "\n\n"
	for _, bb := range []struct {
		name string
		text string
		o    dialect.StreamOptions
	}{
		{"240B", chunk240, dialect.StreamOptions{}},
		{"240B-model", chunk240, dialect.StreamOptions{Model: "public"}},
		{"logprobs", logprobs, dialect.StreamOptions{}},
		{"16KiB-arguments", "data: " + choice(`"delta":{"tool_calls":[{"index":0,"function":{"arguments":"`+strings.Repeat(`\"key\": 1, `, 1500)+`"}}]}`) + "\n\n", dialect.StreamOptions{}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			s := Chat.NewStream(&dialect.Request{Choices: 1}, bb.o)
			b.SetBytes(int64(len(bb.text)))
			b.ReportAllocs()
			for b.Loop() {
				for left := bb.text; left != ""; {
					n := copy(s.Buffer(), left)
					s.Filled(n)
					left = left[n:]
					for ok := true; ok; _, ok, _ = s.Next() {
					}
				}
			}
		})
	}
}
