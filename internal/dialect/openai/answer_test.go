// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
)

func TestAnswer(t *testing.T) {
	body := `{"id":"x","model":"/data/x.gguf","error":null,"choices":[{"index":0,"message":{"role":"assistant","content":"\"error\":null"},"finish_reason":"stop","model":"/data/x.gguf"},{"index":1}],
		"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":8}}}`
	a, err := Chat.Answer(nil, []byte(body), "public")
	if err != nil {
		t.Fatal(err)
	}
	if a.Failure != nil || a.Choices != 2 || !a.HasUsage || a.Usage != (inference.Usage{Prompt: 9, Completion: 3, Cached: 8}) {
		t.Errorf("%+v", a)
	}
	want := strings.Replace(strings.Replace(body, `"/data/x.gguf"`, `"public"`, 1), `"error":null,`, ``, 1)
	if got := edited(body, a.Edits); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	if a, _ := Chat.Answer(nil, []byte(`{"model":"m","choices":[]}`), ""); len(a.Edits) != 0 || a.HasUsage || a.Choices != 0 {
		t.Errorf("%+v", a)
	}
}

func TestAnswerWithAnErrorIsAFailure(t *testing.T) {
	for body, want := range map[string]dialect.Failure{
		`{"error":{"message":"m","type":"t","code":400}}`:                 {Status: 400, Message: "m", Code: "400", Type: "t"},
		`{"object":"error","message":"m","type":"BadRequest","code":400}`: {Status: 400, Message: "m", Type: "BadRequest"},
		`{"error":"m"}`: {Message: "m"},
	} {
		a, err := Completions.Answer(nil, []byte(body), "")
		if err != nil || a.Failure == nil {
			t.Errorf("%s: %+v, %v", body, a, err)
			continue
		}
		if diff := cmp.Diff(want, *a.Failure); diff != "" {
			t.Errorf("%s: %s", body, diff)
		}
	}
}

func TestWhatIsNoAnswerIsAnError(t *testing.T) {
	for _, body := range []string{``, ` `, `<html>`, `null`, `[]`, `"x"`, `{"choices":[`, `{"choices":[]}}`, "data: {}\n\n"} {
		if a, err := Chat.Answer(nil, []byte(body), "m"); err == nil {
			t.Errorf("%s: %+v", body, a)
		}
	}
}

func TestErrorsHaveTheOneShapeThatAllSDKsRead(t *testing.T) {
	e := inference.Errorf(inference.DecodeInterrupted, "a \"quoted\"\nline \u2028 < > &\r\n\ndata: x")
	d := dialect.ErrorDetail{RequestID: "req_1", Partial: true, Tokens: 37}
	text := string(Chat.ErrorEvent(e, d))
	data, ok := strings.CutPrefix(text, `data: {"error":{`)
	if !ok || !strings.HasSuffix(text, "}}\n\n") || strings.ContainsAny(strings.TrimSuffix(data, "\n\n"), "\n\r") {
		t.Fatalf("%q", text)
	}
	body := strings.TrimSuffix(strings.TrimPrefix(text, "data: "), "\n\n")
	if got := string(Completions.ErrorBody(e, d)); got != body {
		t.Errorf("body %s", got)
	}
	var got map[string]map[string]any
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]map[string]any{"error": {
		"message": e.Message, "type": "upstream_error", "param": nil, "code": "upstream_decode_interrupted",
		"request_id": "req_1", "partial_output": true, "delivered_output_tokens": 37.0, "retryable": false,
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	events, s := judge(t, dialect.StreamOptions{}, 1, text)
	if len(events) != 1 || events[0].Failure == nil || events[0].Failure.Code != "upstream_decode_interrupted" || s.Done() {
		t.Errorf("read back as %+v", events)
	}
	if events, _ := judge(t, dialect.StreamOptions{}, 1, string(Chat.EndMarker())); !events[0].Done {
		t.Errorf("end marker read as %+v", events)
	}
}

func TestEveryCodeHasAnErrorBody(t *testing.T) {
	for _, c := range inference.Codes() {
		body := Chat.ErrorBody(inference.Errorf(c, "x\xff"), dialect.ErrorDetail{Retryable: c.Info().Retryable})
		if !json.Valid(body) {
			t.Errorf("%s: %s", c, body)
		}
	}
}

func TestHeadOfALargeAnswerIsEditedAsFarAsItGoes(t *testing.T) {
	body := []byte(`{"id":"x","error":null,"model":"engine/name","choices":[{"message":{"content":"cut in the midd`)
	segments, _ := dialect.Apply(body, Chat.AnswerHead(nil, body, "public"))
	want := `{"id":"x","model":"public","choices":[{"message":{"content":"cut in the midd`
	if got := string(bytes.Join(segments, nil)); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add([]byte(`{"model":"m","error":null,"choices":[{"index":0,"message":{"content":"a"}}],"usage":{"prompt_tokens":1}}`))
	f.Add([]byte(`{"error":null,"error":null,"a":1,"error":{"code":"404"}}`))
	f.Add([]byte(`{"object":"error","message":"m"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		a, err := Chat.Answer(nil, body, "public")
		var fields map[string]json.RawMessage
		jsonErr := json.Unmarshal(body, &fields)
		if err != nil {
			if jsonErr == nil && fields != nil {
				t.Fatalf("an object is no answer: %v", err)
			}
			return
		}
		var after map[string]json.RawMessage
		if err := json.Unmarshal([]byte(edited(string(body), a.Edits)), &after); err != nil && jsonErr == nil {
			t.Fatalf("edited answer: %v", err)
		}
		if jsonErr != nil {
			return // NaN, which passes
		}
		if raw, ok := after["error"]; ok && string(raw) == "null" {
			t.Fatal("a null error is left")
		}
		if raw := after["model"]; len(raw) > 0 && raw[0] == '"' && string(raw) != `"public"` {
			t.Fatalf("model %s", raw)
		}
		for key, raw := range fields {
			if key != "model" && key != "error" && string(after[key]) != string(raw) {
				t.Fatalf("%s: %s became %s", key, raw, after[key])
			}
		}
	})
}
