// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
)

func inspect(t *testing.T, d dialect.Dialect, body string) *dialect.Request {
	t.Helper()
	r, err := d.Inspect("", []byte(body))
	if err != nil {
		t.Fatalf("%.200s: %v", body, err)
	}
	return r
}

// code is the error code with which Inspect refuses body, "" if it does not.
func code(d dialect.Dialect, body string) (inference.Code, string) {
	_, err := d.Inspect("", []byte(body))
	if err == nil {
		return "", ""
	}
	var e *inference.Error
	if !errors.As(err, &e) {
		return "no *inference.Error", err.Error()
	}
	return e.Code, e.Message
}

func prompt(r *dialect.Request, body string) []string {
	var all []string
	for _, s := range r.Prompt {
		all = append(all, body[s.Start:s.End])
	}
	return all
}

func edited(body string, edits []dialect.Edit) string {
	segments, _ := dialect.Apply([]byte(body), edits)
	return string(bytes.Join(segments, nil))
}

func TestInspectFindsWhatRoutingNeeds(t *testing.T) {
	body := `{"model":"m\u002d1","stream":true,"n":3,"max_tokens":5,"max_completion_tokens":7,
		"messages":[{"role":"system","content":"be brief"},{"role":"user","content":[{"type":"text","text":"look"},{"type":"image_url","image_url":{"url":"data:x"}}]}],
		"tools":[{"type":"function"}],"response_format":{"type":"json_schema","json_schema":{"type":"x"}},
		"stream_options":{"include_usage":true},"user":"u","session_id":"s","prompt_cache_key":"k","cache_salt":"c"}`
	r := inspect(t, Chat, body)
	if got := body[r.ModelSpan.Start:r.ModelSpan.End]; got != `"m\u002d1"` {
		t.Errorf("model span %s", got)
	}
	if got := body[r.Object.Start:r.Object.End]; got != body {
		t.Errorf("object span %s", got)
	}
	got := fmt.Sprintln(r.Model, r.Stream, r.Choices, r.MaxTokens, r.Tools, r.ResponseFormat, r.IncludeUsage, r.User, r.SessionID, r.PromptCacheKey, r.CacheSalt)
	if want := "m-1 true 3 7 true json_schema true u s k c\n"; got != want {
		t.Errorf("%swant %s", got, want)
	}
	if diff := cmp.Diff([]string{"be brief", "look"}, prompt(r, body)); diff != "" {
		t.Error(diff)
	}
	if got := body[r.ToolsSpan.Start:r.ToolsSpan.End]; got != `[{"type":"function"}]` {
		t.Errorf("tools span %s", got)
	}
	if r.Text != (dialect.Text{Bytes: 8 + 4 + 21}) || r.PromptTokens != (inference.Tokens{N: 8}) {
		t.Errorf("%+v, %+v", r.Text, r.PromptTokens)
	}
}

func TestInspectTakesDefaultsForNullAndAbsent(t *testing.T) {
	for _, body := range []string{
		`{"model":"m","messages":[]}`,
		`{"model":"m","messages":[],"stream":null,"n":null,"max_tokens":null,"tools":null,"functions":[ ],"response_format":null,"stream_options":null,"user":null}`,
		`{"model":"m","messages":[],"max_tokens":-1,"tools":[],"user":7,"session_id":{},"response_format":"x","functions":{}}`,
		"\r\n\t {\"model\":\"m\",\"messages\":[]} \n",
	} {
		r := inspect(t, Chat, body)
		if r.Stream || r.Choices != 1 || r.MaxTokens != 0 || r.Tools || r.ResponseFormat != "" || r.IncludeUsage || r.User != "" || r.PromptTokens.N != 0 {
			t.Errorf("%s: %+v", body, r)
		}
	}
}

// PAY-8, PAY-6: what is not ours is not read, whatever it is.
func TestInspectPassesUnknownFieldsAndOddValues(t *testing.T) {
	for _, field := range []string{
		`"chat_template_kwargs":{"enable_thinking":false}`, `"top_k":40`, `"min_p":0.05`, `"priority":-3`, `"x":{"y":[{"z":null}]}`, `"nothing":null`,
		`"seed":9007199254740993`, `"big":1e400`, `"f":0.1`, `"text":"< > & \ud83d\ude00 \ud800"`, `"top_k":1,"top_k":2`, `"temperature":"hot"`, `"prompt":5`,
		`"max_tokens":"many"`, `"max_tokens":1.5`, `"max_tokens":1e3`, `"tool_choice":"none"`, `"Model":"x"`, `"MESSAGES":3`,
	} {
		body := `{"model":"m","messages":[],` + field + `}`
		inspect(t, Chat, body)
	}
}

// PAY-11: every shape of a message is for the engine to judge.
func TestInspectPassesAnyMessage(t *testing.T) {
	for messages, want := range map[string][]string{
		`[]`:                               nil,
		`[{"role":"user"}]`:                nil,
		`[{"role":"user","content":null}]`: nil,
		`[{"role":"user","content":[]}]`:   nil,
		`[{"role":"user","content":{}}]`:   nil,
		`[{"role":"user","content":7}]`:    nil,
		`[{"role":"user","content":""}]`:   {""},
		`[null,1,"x",[],{}]`:               nil,
		`[{"content":["a",{"text":"b"},{"text":null},{"type":"audio","input_audio":{"data":"AAAA"}},{"type":"?"},7,null]}]`:                       {"a", "b"},
		`[{"role":"assistant","content":null,"tool_calls":[{"id":"c","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","content":"ok"}]`: {`[{"id":"c","function":{"name":"f","arguments":"{}"}}]`, "ok"},
		`[{"content":"a","tool_calls":[]},{"content":"b\n\u6f22","tool_calls":null}]`:                                                             {"a", `b\n\u6f22`},
	} {
		body := `{"model":"m","messages":` + messages + `}`
		r := inspect(t, Chat, body)
		if diff := cmp.Diff(want, prompt(r, body)); diff != "" {
			t.Errorf("%s: %s", messages, diff)
		}
	}
}

// PAY-9: the four shapes of a prompt, and odd ones.
func TestInspectCountsPromptsAndTokenIDs(t *testing.T) {
	for _, tt := range []struct {
		prompt  string
		choices int // with n = 2
		spans   []string
		tokens  inference.Tokens
	}{
		{`"four"`, 2, []string{"four"}, inference.Tokens{N: 1}},
		{`["four","more"]`, 4, []string{"four", "more"}, inference.Tokens{N: 2}},
		{`[1, 2,3]`, 2, []string{"[1, 2,3]"}, inference.Tokens{N: 3, Source: inference.Counted}},
		{`[[1,2],[3]]`, 4, []string{"[1,2]", "[3]"}, inference.Tokens{N: 3, Source: inference.Counted}},
		{`[]`, 2, nil, inference.Tokens{}},
		{`[[]]`, 2, []string{"[]"}, inference.Tokens{}},
		{`""`, 2, []string{""}, inference.Tokens{}},
		{`["four",[1,2]]`, 4, []string{"four", "[1,2]"}, inference.Tokens{N: 3}},
		{`[{"prompt_string":"x"},"four"]`, 4, []string{"four"}, inference.Tokens{N: 1}},
		{`null`, 2, nil, inference.Tokens{}},
		{`{"a":1}`, 2, nil, inference.Tokens{}},
	} {
		body := `{"model":"m","n":2,"prompt":` + tt.prompt + `}`
		r := inspect(t, Completions, body)
		if r.Choices != tt.choices || r.PromptTokens != tt.tokens {
			t.Errorf("%s: %d choices, %+v", tt.prompt, r.Choices, r.PromptTokens)
		}
		if diff := cmp.Diff(tt.spans, prompt(r, body)); diff != "" {
			t.Errorf("%s: %s", tt.prompt, diff)
		}
	}
	if r := inspect(t, Completions, `{"model":"m","messages":{}}`); r.Choices != 1 {
		t.Errorf("no prompt: %d choices", r.Choices)
	}
}

func TestInspectListsABoundedNumberOfPieces(t *testing.T) {
	body := `{"model":"m","prompt":["four"` + strings.Repeat(`,"four"`, 99999) + `]}`
	r := inspect(t, Completions, body)
	if len(r.Prompt) != 8192 || r.Choices != 100000 || r.PromptTokens.N != 100000 {
		t.Errorf("%d pieces, %d choices, %d tokens", len(r.Prompt), r.Choices, r.PromptTokens.N)
	}
}

func TestInspectEstimatesCJKByCharacter(t *testing.T) {
	for _, body := range []string{`"漢字漢字漢字"`, `"\u6f22\u5b57\u6f22\u5b57\u6f22\u5b57"`} {
		if r := inspect(t, Completions, `{"model":"m","prompt":`+body+`}`); r.PromptTokens.N != 4 {
			t.Errorf("%s: %d tokens", body, r.PromptTokens.N)
		}
	}
}

func TestInspectRefuses(t *testing.T) {
	deep := strings.Repeat("[", 10000) + strings.Repeat("]", 10000)
	for _, tt := range []struct {
		body    string
		code    inference.Code
		message string // a part of it
	}{
		{``, inference.InvalidJSON, "byte 0 (line 1)"},
		{`{`, inference.InvalidJSON, "unexpected end"},
		{"{\n\"model\":\n}", inference.InvalidJSON, "byte 11 (line 3): expected a value"},
		{`{"model":"m","messages":[]} x`, inference.InvalidJSON, "byte 28"},
		{`{"model":"m","messages":[]}{}`, inference.InvalidJSON, "unexpected text"},
		{`{"model":"m","messages":[],}`, inference.InvalidJSON, "expected a key"},
		{`{'model':'m'}`, inference.InvalidJSON, "expected a key"},
		{"{\"model\":\"m\",\"messages\":[],\"x\":\"a\xff\"}", inference.InvalidJSON, "not UTF-8"},
		{"{\"model\":\"m\",\"messages\":[],\"x\":\"a\nb\"}", inference.InvalidJSON, "control character"},
		{`{"model":"m","messages":[],"x":` + deep + `}`, inference.InvalidJSON, "nested too deeply"},
		{strings.Repeat(`{"a":`, 1000000), inference.InvalidJSON, "nested too deeply"},
		{`[]`, inference.InvalidRequest, "must be a JSON object"},
		{`"x"`, inference.InvalidRequest, "must be a JSON object"},
		{`null`, inference.InvalidRequest, "must be a JSON object"},
		{`{"messages":[]}`, inference.MissingModel, "model"},
		{`{"model":"","messages":[]}`, inference.MissingModel, "model"},
		{`{"model":null,"messages":[]}`, inference.MissingModel, "model"},
		{`{"model":["m"],"messages":[]}`, inference.InvalidRequest, "model: must be a string"},
		{`{"model":"m"}`, inference.InvalidRequest, "messages: is missing"},
		{`{"model":"m","messages":null}`, inference.InvalidRequest, "messages: must be an array"},
		{`{"model":"m","messages":"hi"}`, inference.InvalidRequest, "messages: must be an array"},
		{`{"model":"m","messages":[],"stream":"true"}`, inference.InvalidRequest, "stream: must be"},
		{`{"model":"m","messages":[],"stream":1}`, inference.InvalidRequest, "stream: must be"},
		{`{"model":"m","messages":[],"n":0}`, inference.InvalidRequest, "n: must be"},
		{`{"model":"m","messages":[],"n":-1}`, inference.InvalidRequest, "n: must be"},
		{`{"model":"m","messages":[],"n":129}`, inference.InvalidRequest, "n: must be"},
		{`{"model":"m","messages":[],"n":1.5}`, inference.InvalidRequest, "n: must be"},
		{`{"model":"m","messages":[],"n":99999999999999999999}`, inference.InvalidRequest, "n: must be"},
		{`{"model":"m","messages":[],"n":"2"}`, inference.InvalidRequest, "n: must be"},
		{`{"model":"m","messages":[],"stream_options":true}`, inference.InvalidRequest, "stream_options: must be"},
		{`{"model":"m","messages":[],"stream_options":{"include_usage":"yes"}}`, inference.InvalidRequest, "stream_options.include_usage: must be"},
		{`{"model":"m","messages":[],"stream_options":{"include_usage":true,"include_usage":false}}`, inference.InvalidRequest, "include_usage: is written twice"},
		{`{"model":"m","messages":[],"stream":0}x`, inference.InvalidJSON, "unexpected text"}, // syntax first
	} {
		got, message := code(Chat, tt.body)
		if got != tt.code || !strings.Contains(message, tt.message) {
			t.Errorf("%.80q: %s %q, want %s %q", tt.body, got, message, tt.code, tt.message)
		}
	}
}

func TestInspectRefusesKeysThatAreWrittenTwice(t *testing.T) {
	for _, key := range []string{"model", "stream", "stream_options", "messages", "n", "max_tokens", "max_completion_tokens",
		"tools", "functions", "response_format", "user", "session_id", "prompt_cache_key", "cache_salt", "prompt"} {
		for _, second := range []string{key, fmt.Sprintf(`\u%04x%s`, key[0], key[1:])} {
			body := fmt.Sprintf(`{"model":"m","messages":[],"%s":null,"%s":null}`, key, second)
			got, message := code(Chat, body)
			if got != inference.InvalidRequest || key != "messages" && !strings.Contains(message, key+": is written twice") {
				t.Errorf("%s: %s %q", body, got, message)
			}
		}
	}
}

// PAY-6, PAY-8: a rewrite changes the value of model and nothing else.
func TestModelIsRewrittenInPlace(t *testing.T) {
	body := `{ "seed":9007199254740993, "x":1e400,"f":0.1, "mod\u0065l" : "old\n" ,"messages":[{"content":"model \"model\":\"old\" < > & \ud83d\ude00"}],"n":null}`
	r := inspect(t, Chat, body)
	got := edited(body, Chat.RequestEdits(r, []byte(body), "org/<new> \"漢\"", false))
	if want := strings.Replace(body, `"old\n"`, `"org/<new> \"漢\""`, 1); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	for _, model := range []string{"", "old\n"} {
		if edits := Chat.RequestEdits(r, []byte(body), model, false); len(edits) > 0 {
			t.Errorf("%q: %v", model, edits)
		}
	}
}

// PAY-3: usage is asked for over absence, null and an explicit false.
func TestUsageIsAskedFor(t *testing.T) {
	for _, tt := range []struct{ body, want string }{
		{`{"model":"m","stream":true}`, `{"stream_options":{"include_usage":true},"model":"m","stream":true}`},
		{` { "model":"m","stream":true}`, ` {"stream_options":{"include_usage":true}, "model":"m","stream":true}`},
		{`{"model":"m","stream":true,"stream_options": null }`, `{"model":"m","stream":true,"stream_options": {"include_usage":true} }`},
		{`{"model":"m","stream":true,"stream_options":{ }}`, `{"model":"m","stream":true,"stream_options":{"include_usage":true }}`},
		{`{"model":"m","stream":true,"stream_options":{"a":1}}`, `{"model":"m","stream":true,"stream_options":{"include_usage":true,"a":1}}`},
		{`{"stream_options":{"a":1,"include_usage": false },"model":"m","stream":true}`, `{"stream_options":{"a":1,"include_usage": true },"model":"m","stream":true}`},
		{`{"model":"m","stream":true,"stream_options":{"include_usage":null}}`, `{"model":"m","stream":true,"stream_options":{"include_usage":true}}`},
		{`{"model":"m","stream":true,"stream_options":{"include_usage":true}}`, ``},
		{`{"model":"m","stream":false}`, ``},
		{`{"model":"m"}`, ``},
	} {
		r := inspect(t, Completions, tt.body)
		if tt.want == "" {
			tt.want = tt.body
		}
		got := edited(tt.body, Completions.RequestEdits(r, []byte(tt.body), "", true))
		if got != tt.want {
			t.Errorf("%s: %s", tt.body, got)
		}
		both := edited(tt.body, Completions.RequestEdits(r, []byte(tt.body), "new", true))
		if want := strings.Replace(tt.want, `"m"`, `"new"`, 1); both != want {
			t.Errorf("%s: %s", tt.body, both)
		}
	}
}

var bodies = []string{
	`{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`,
	`{"mod\u0065l":"\ud83d\ude00\ud800","messages":[{"content":[{"text":"a"},"b"]}],"stream_options":{"include_usage":null},"n":2}`,
	`{"model":"m","prompt":["a",[1,2],3],"stream":true,"stream_options":{"x":1}}`,
	`{"model":"m","model":"n","messages":null}`,
	`{"model":"漢字","messages":[],"tools":[{}],"stream_options":null,"max_tokens":1}`,
	`[]`, `{"a":[[[{}]]]}`,
}

// FuzzInspect compares with encoding/json, which must agree on what is JSON, on
// the model, and on what the edits change.
func FuzzInspect(f *testing.F) {
	for _, body := range bodies {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		valid := json.Valid(body) && utf8.Valid(body)
		for _, d := range []dialect.Dialect{Chat, Completions} {
			r, err := d.Inspect("", body)
			if err != nil {
				var e *inference.Error
				if !errors.As(err, &e) {
					t.Fatalf("%T", err)
				}
				if (e.Code == inference.InvalidJSON) == valid {
					t.Fatalf("valid %v, but %v", valid, err)
				}
				continue
			}
			if !valid {
				t.Fatal("invalid JSON passes")
			}
			checkRequest(t, d, r, body)
		}
	})
}

func checkRequest(t *testing.T, d dialect.Dialect, r *dialect.Request, body []byte) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(body, &fields); err != nil {
		t.Fatal(err)
	}
	var model string
	if err := json.Unmarshal(fields["model"], &model); err != nil || model != r.Model {
		t.Fatalf("model %q, want %q (%v)", r.Model, model, err)
	}
	if got := string(r.ModelSpan.Of(body)); got != string(fields["model"]) {
		t.Fatalf("model span %q", got)
	}
	var stream *bool
	if err := json.Unmarshal(fields["stream"], &stream); fields["stream"] != nil && (err != nil || r.Stream != (stream != nil && *stream)) {
		t.Fatalf("stream %v, want %s", r.Stream, fields["stream"])
	}
	for _, s := range r.Prompt {
		s.Of(body)
	}
	if r.Choices < 1 || r.PromptTokens.N < 0 || r.Text.Bytes < 0 || r.Text.CJK < 0 {
		t.Fatalf("%+v", r)
	}
	after := map[string]json.RawMessage{}
	if err := json.Unmarshal([]byte(edited(string(body), d.RequestEdits(r, body, "new", true))), &after); err != nil {
		t.Fatalf("edited body: %v", err)
	}
	if string(after["model"]) != `"new"` && model != "new" {
		t.Fatalf("model %s after the edit", after["model"])
	}
	if r.Stream {
		var options struct {
			Include bool `json:"include_usage"`
		}
		if err := json.Unmarshal(after["stream_options"], &options); err != nil || !caseTwin(after["stream_options"]) && !options.Include {
			t.Fatalf("stream_options %s (%v)", after["stream_options"], err)
		}
	}
	delete(fields, "model")
	delete(fields, "stream_options")
	delete(after, "model")
	delete(after, "stream_options")
	if diff := cmp.Diff(fields, after); diff != "" {
		t.Fatal(diff)
	}
}

// caseTwin reports whether encoding/json, which ignores case, might read
// another key as include_usage.
func caseTwin(options []byte) bool {
	var m map[string]json.RawMessage
	_ = json.Unmarshal(options, &m)
	for key := range m {
		if key != "include_usage" && strings.EqualFold(key, "include_usage") {
			return true
		}
	}
	return false
}

func chatBody(bytes int, text string) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"Qwen/Qwen3-8B","stream":true,"temperature":0.7,"messages":[{"role":"system","content":"You are helpful."}`)
	for b.Len() < bytes {
		b.WriteString(`,{"role":"user","content":"` + strings.Repeat(text, 1+4000/len(text)) + `"}`)
	}
	b.WriteString(`],"max_tokens":512}`)
	return []byte(b.String())
}

func BenchmarkInspect(b *testing.B) {
	const ascii, code, cjk = "The quick brown fox jumps over the lazy dog. ", `if x == nil {\n\treturn \"none\"\n}\n`, "漢字かなカナ"
	ids := []byte(`{"model":"m","prompt":[` + strings.Repeat("12345,", 36000) + `1]}`)
	for _, bb := range []struct {
		name string
		d    dialect.Dialect
		body []byte
	}{
		{"1KB", Chat, chatBody(1<<10, "short ")}, {"220KB", Chat, chatBody(220<<10, ascii)}, {"4MB", Chat, chatBody(4<<20, ascii)},
		{"220KB-code", Chat, chatBody(220<<10, code)}, {"220KB-cjk", Chat, chatBody(220<<10, cjk)}, {"220KB-ids", Completions, ids},
	} {
		b.Run(bb.name, func(b *testing.B) {
			b.SetBytes(int64(len(bb.body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := bb.d.Inspect("", bb.body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
