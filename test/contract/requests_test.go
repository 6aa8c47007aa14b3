// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"crypto/sha256"
	"fmt"
	"io"
	"strings"
	"testing"
)

// patched says what was inserted into or replaced in a text, given that it is
// one place: the texts before and after that differ. Equal texts give "", "".
func patched(was, is string) (old, now string) {
	i := 0
	for i < len(was) && i < len(is) && was[i] == is[i] {
		i++
	}
	j := 0
	for j < len(was)-i && j < len(is)-i && was[len(was)-1-j] == is[len(is)-1-j] {
		j++
	}
	return was[i : len(was)-j], is[i : len(is)-j]
}

// bodies that are awkward to carry.
var bodies = map[string]struct{ path, body string }{
	"PAY-6 numbers and escapes": {chat, `{ "model" : "m" ,  "seed":9007199254740993,"x":1e400,"y":0.1,"z":-0,"big":123456789012345678901234567890,"messages":[{"role":"user","content":"< > & \u003c \ud83d\ude00 \/ é 世界"}] }`},
	"PAY-8 unknown fields":      {chat, `{"messages":[{"role":"user","content":"hi","name":null}],"chat_template_kwargs":{"enable_thinking":false},"top_k":5,"min_p":0.05,"max_completion_tokens":9,"cache_salt":"s","priority":-3,"invented":{"a":[{"model":"inner"},null]},"nothing":null,"model":"m"}` + "\n"},
	"PAY-9 prompt string":       {"/v1/completions", `{"model":"m","prompt":"hi"}`},
	"PAY-9 prompt list":         {"/v1/completions", `{"model":"m","prompt":["hi","ho"]}`},
	"PAY-9 prompt ids":          {"/v1/completions", `{"model":"m","prompt":[1,2,3,99999]}`},
	"PAY-9 prompt id lists":     {"/v1/completions", `{"model":"m","prompt":[[1,2,3],[1,2,4]]}`},
	"PAY-11 tool calls":         {chat, `{"model":"m","messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"model\":\"inner\"}"}}]},{"role":"tool","tool_call_id":"1","content":""}]}`},
	"PAY-11 no content":         {chat, `{"model":"m","messages":[{"role":"assistant"},{"role":"user","content":[]}]}`},
	"PAY-11 parts":              {chat, `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}},{"type":"input_audio","input_audio":{"data":"","format":"wav"}},{"type":"hologram","x":1}]}]}`},
	"white space":               {chat, "\r\n\t{\n  \"messages\": [\n    {\"role\": \"user\", \"content\": \"hi\"}\n  ],\n  \"model\": \"m\"\n}\n\n"},
	"explicit no stream":        {chat, `{"model":"m","stream":false,"messages":[{"role":"user","content":"hi"}]}`},
	"escaped model":             {chat, `{"\u006dodel":"\u006d","messages":[{"role":"user","content":"hi"}]}`},
	"response format":           {chat, `{"model":"m","messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"type":"object","properties":{"model":{"type":"string"}},"additionalProperties":false}}}}`},
}

// PAY-6, PAY-8, PAY-9, PAY-11: request bodies reach the engine untouched.
func TestRequestBodyReachesTheEngineUntouched(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := start(t, "routes: [{match: {model: m}, backends: [{pool: p}]}]\npools:\n"+pool("p", "", e))
	for name, c := range bodies {
		t.Run(name, func(t *testing.T) {
			if a := g.post(t, c.path, c.body); a.status != 200 {
				t.Fatalf("%d %s", a.status, a.body)
			}
			x := e.last(t)
			if x.body != c.body {
				t.Errorf("sent %q\ngot  %q", c.body, x.body)
			}
			if x.target != c.path || x.method != "POST" {
				t.Errorf("%s %s", x.method, x.target)
			}
		})
	}
}

// The same with a model rewrite: only the model's value differs.
func TestModelRewriteChangesNothingElse(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil, "org/Back-End \"7B\"")
	g := start(t, `routes: [{match: {model: m}, backends: [{pool: p}], rewrite: {model: 'org/Back-End "7B"'}}]`+"\npools:\n"+pool("p", "", e))
	for name, c := range bodies {
		t.Run(name, func(t *testing.T) {
			if a := g.post(t, c.path, c.body); a.status != 200 {
				t.Fatalf("%d %s", a.status, a.body)
			}
			want := c.body
			for _, value := range []string{`"model":"m"`, `"model" : "m"`, `"model": "m"`, `"\u006dodel":"\u006d"`} {
				if strings.Contains(want, value) {
					key := value[:strings.LastIndex(value, ":")+1]
					if strings.Contains(value, ": ") {
						key += " "
					}
					want = strings.Replace(want, value, key+`"org/Back-End \"7B\""`, 1)
					break
				}
			}
			if got := e.last(t).body; got != want {
				t.Errorf("want %q\ngot  %q", want, got)
			}
		})
	}
}

// Streams get stream_options.include_usage, by the smallest patch that there is.
func TestStreamedRequestOnlyGainsIncludeUsage(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	squeeze := strings.NewReplacer(" ", "", "\n", "", "\t", "").Replace
	const hi = `"messages":[{"role":"user","content":"hi \u003c"}]`
	for _, c := range []struct{ name, body, old, now string }{
		{"none", `{"model":"m",` + hi + `,"stream":true,"seed":9007199254740993}`, "", `"stream_options":{"include_usage":true}`},
		{"none, white space", "{\n \"model\": \"m\", \"stream\" : true,\n " + hi + "\n}\n", "", `"stream_options":{"include_usage":true}`},
		{"asked for", `{"model":"m",` + hi + `,"stream":true,"stream_options":{"include_usage":true}}`, "", ""},
		{"asked for, with white space", `{"model":"m",` + hi + `,"stream":true,"stream_options": { "include_usage" : true , "x":1e2} }`, "", ""},
		{"declined", `{"model":"m",` + hi + `,"stream":true,"stream_options":{"include_usage":false,"x":0.10}}`, "false", "true"},
		{"another key", `{"model":"m",` + hi + `,"stream":true,"stream_options":{"continuous_usage_stats":true}}`, "", `"include_usage":true`},
		{"empty", `{"model":"m",` + hi + `,"stream":true,"stream_options":{}}`, "", `"include_usage":true`},
		{"null", `{"model":"m",` + hi + `,"stream":true,"stream_options":null}`, "null", `{"include_usage":true}`},
		{"not streamed", `{"model":"m",` + hi + `,"stream":false}`, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if a := g.post(t, chat, c.body); a.status != 200 {
				t.Fatalf("%d %s", a.status, a.body)
			}
			got := e.last(t).body
			old, now := patched(c.body, got)
			// A patch may share letters with what stands beside it: false → true
			// shows as fals → tru. Compare the whole then.
			want := func() bool {
				if c.old == "" {
					if got := squeeze(now); got == c.now || strings.Trim(got, ",") == c.now {
						return old == ""
					}
					// The common prefix may have swallowed part of the insertion.
					return old == "" && len(squeeze(got))-len(squeeze(c.body)) <= len(c.now)+1 && strings.Contains(squeeze(got), c.now)
				}
				return got == strings.Replace(c.body, c.old, c.now, 1)
			}
			if !want() {
				t.Errorf("want %q → %q, got %q → %q\n%s\n%s", c.old, c.now, old, now, c.body, got)
			}
		})
	}
}

func TestCompletionsStreamsGainIncludeUsageToo(t *testing.T) {
	t.Parallel()
	e := newEngine(t, func(x *exchange) {
		x.stream()
		x.chunk(`data: {"id":"c1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a","finish_reason":null}]}` + "\n\n")
		x.chunk(`data: {"id":"c1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"","finish_reason":"stop"}]}` + "\n\n")
		if strings.Contains(x.body, "include_usage") {
			x.chunk(usage)
		}
		x.chunk(done)
		x.end()
	})
	g := serve(t, e, "")
	a := g.post(t, "/v1/completions", `{"model":"m","prompt":"hi","stream":true}`)
	if a.status != 200 || strings.Contains(a.body, "usage") || !strings.HasSuffix(a.body, done) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if got := e.last(t).body; !strings.Contains(strings.ReplaceAll(got, " ", ""), `"stream_options":{"include_usage":true}`) {
		t.Errorf("the engine got %s", got)
	}
}

// LIM-1: all sizes up to the limit, by length and by chunks, arrive whole.
func TestBodiesOfAllSizesArriveWhole(t *testing.T) {
	t.Parallel()
	const limit = 12 << 20
	e := newEngine(t, nil)
	g := start(t, "listeners: [{name: main, address: 127.0.0.1:0, max_body: 12MiB}]\npools:\n"+pool("p", "", e))
	const frame = `{"model":"m","messages":[{"role":"user","content":"` + `"}]}`
	for _, n := range []int{1 << 10, 32769, 131073, 1<<20 + 1, 10 << 20, limit - 1, limit, limit + 1} {
		body := strings.Replace(frame, `"content":"`, `"content":"`+strings.Repeat("aB3 ", n/4+1)[:n-len(frame)], 1)
		for _, way := range []string{"length", "chunked"} {
			t.Run(fmt.Sprintf("%d %s", n, way), func(t *testing.T) {
				var r io.Reader = strings.NewReader(body)
				if way == "chunked" {
					r = io.MultiReader(r) // hides the length
				}
				before := len(e.requests())
				a := within(t, "answer", func() answer {
					res, err := g.begin(t, "POST", chat, r)
					if err != nil {
						return answer{err: err}
					}
					return whole(res)
				})
				got := e.requests()[before:]
				if n > limit {
					if len(got) > 0 {
						t.Error("it reached the engine")
					}
					a.refusal(t, 413, "request_too_large", false)
					g.stillServes(t)
					return
				}
				if a.status != 200 || a.err != nil || len(got) != 1 {
					t.Fatalf("%d %s %v; %d requests at the engine", a.status, a.body, a.err, len(got))
				}
				if sha256.Sum256([]byte(got[0].body)) != sha256.Sum256([]byte(body)) {
					t.Error("another body at the engine")
				}
			})
		}
	}
}

func TestQueryReachesTheEngine(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	const query = "?a=b%20c&d=%2F&e"
	if a := g.post(t, chat+query, plainChat); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if got := e.last(t).target; got != chat+query {
		t.Errorf("the engine got %s", got)
	}
}

// EPT-8.
func TestEngineOnIPv6(t *testing.T) {
	t.Parallel()
	if !hasIPv6() {
		t.Skip("no [::1] on this machine")
	}
	e := newEngineAt(t, "[::1]:0", nil)
	g := start(t, "listeners: [{name: main, address: '127.0.0.1:0', debug_headers: true}]\npools:\n"+pool("p", "", e))
	a := g.post(t, chat, plainChat)
	if a.status != 200 || a.body != plain {
		t.Fatalf("%d %s", a.status, a.body)
	}
	addr := e.ln.Addr().String()
	if got := a.header.Get("Headgate-Endpoint"); !strings.Contains(got, addr) {
		t.Errorf("Headgate-Endpoint: %q, want %s", got, addr)
	}
	if got := e.last(t).header["host"]; len(got) != 1 || got[0] != addr {
		t.Errorf("Host: %q, want %s", got, addr)
	}
	if text := g.metrics(t); !strings.Contains(text, addr+`"`) {
		t.Errorf("no endpoint %s in the metrics", addr)
	}
}
