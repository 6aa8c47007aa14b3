// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// twoModels serves qwen-7b and llama-70b from two pools, and nothing else.
func twoModels(t *testing.T) (*gateway, *engine) {
	e := newEngine(t, nil, "qwen-7b", "llama-70b", "m")
	return start(t, `routes:
- {match: {model: qwen-7b}, backends: [{pool: a}]}
- {match: {model: llama-70b}, backends: [{pool: b}]}
- {match: {model: m}, backends: [{pool: a}]}
pools:
`+pool("a", "", e)+pool("b", "", e)), e
}

// Contract, "Errors": each input that can't be understood has its code, and
// none reaches an engine or hurts the next request.
func TestBadRequestIsRefusedInTheContractsShape(t *testing.T) {
	t.Parallel()
	g, e := twoModels(t)
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write([]byte(plainChat))
	z.Close()

	for _, c := range []struct {
		name, path, body string
		header           []string
		status           int
		code             string
	}{
		{"not JSON", chat, "hello", nil, 400, "invalid_json"},
		{"empty body", chat, "", nil, 400, "invalid_json"},
		{"blank body", chat, " \n", nil, 400, "invalid_json"},
		{"cut JSON", chat, plainChat[:len(plainChat)-5], nil, 400, "invalid_json"},
		{"something after the object", chat, plainChat + "x", nil, 400, "invalid_json"},
		{"two objects", chat, plainChat + plainChat, nil, 400, "invalid_json"},
		{"trailing comma", chat, `{"model":"m",}`, nil, 400, "invalid_json"},
		{"single quotes", chat, `{'model':'m'}`, nil, 400, "invalid_json"},
		{"byte order mark", chat, "\ufeff" + plainChat, nil, 400, "invalid_json"},
		{"NUL between tokens", chat, "{\x00\"model\":\"m\"}", nil, 400, "invalid_json"},
		{"raw control character in a string", chat, "{\"model\":\"m\",\"a\":\"\n\"}", nil, 400, "invalid_json"},
		{"number with leading zero", chat, `{"model":"m","n":01}`, nil, 400, "invalid_json"},
		{"NaN", chat, `{"model":"m","n":NaN}`, nil, 400, "invalid_json"},
		{"bad escape", chat, `{"model":"m","a":"\x"}`, nil, 400, "invalid_json"},
		{"list", chat, `[]`, nil, 400, "invalid_request"},
		{"string", chat, `"x"`, nil, 400, "invalid_request"},
		{"number", chat, `1`, nil, 400, "invalid_request"},
		{"null", chat, `null`, nil, 400, "invalid_request"},
		{"no model", chat, `{"messages":[]}`, nil, 400, "missing_model"},
		{"model only below", chat, `{"a":{"model":"m"},"messages":[]}`, nil, 400, "missing_model"},
		{"empty model", chat, `{"model":"","messages":[]}`, nil, 400, "missing_model"},
		{"model in a header only", chat, `{"messages":[]}`, []string{"X-Model", "m"}, 400, "missing_model"},
		{"unknown model", chat, `{"model":"gpt-9","messages":[]}`, nil, 404, "model_not_found"},
		{"model in another case", chat, `{"model":"M","messages":[]}`, nil, 404, "model_not_found"},
		{"gzip", chat, zipped.String(), []string{"Content-Encoding", "gzip"}, 415, "unsupported_media_type"},
		{"unknown coding", chat, plainChat, []string{"Content-Encoding", "snappy"}, 415, "unsupported_media_type"},
		{"text", chat, plainChat, []string{"Content-Type", "text/plain"}, 415, "unsupported_media_type"},
		{"form", chat, "model=m", []string{"Content-Type", "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"},
		{"unknown path", "/v1/nothing", plainChat, nil, 404, "not_found"},
		{"root", "/", plainChat, nil, 404, "not_found"},
		{"below a known path", chat + "/more", plainChat, nil, 404, "not_found"},
		{"trailing slash", chat + "/", plainChat, nil, 404, "not_found"},
		{"long path", "/v1/" + strings.Repeat("a", 20<<10), plainChat, nil, 404, "not_found"},
		{"key without a journal", chat, plainChat, []string{"Idempotency-Key", "k1"}, 400, "idempotency_unavailable"},
		{"adapter loading", "/v1/load_lora_adapter", `{"lora_name":"x"}`, nil, 404, "not_found"},
		{"sleep", "/sleep", "", nil, 404, "not_found"},
		{"wake up", "/wake_up", "", nil, 404, "not_found"},
		{"profile", "/start_profile", "", nil, 404, "not_found"},
		{"reset", "/reset_prefix_cache", "", nil, 404, "not_found"},
		{"flush", "/flush_cache", "", nil, 404, "not_found"},
		{"slots", "/slots/0?action=erase", "", nil, 404, "not_found"},
		{"double slash", "/" + chat, plainChat, nil, 404, "not_found"},
		{"double slash inside", "/v1//chat/completions", plainChat, nil, 404, "not_found"},
		{"dot segments", "/v1/./chat/completions", plainChat, nil, 404, "not_found"},
		{"capitals", "/V1/Chat/Completions", plainChat, nil, 404, "not_found"},
		{"dot segments to an admin path", "/v1/chat/../../sleep", "", nil, 404, "not_found"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := len(e.requests())
			a := g.post(t, c.path, c.body, c.header...)
			a.refusal(t, c.status, c.code, false)
			if got := e.requests(); len(got) != before {
				t.Errorf("the engine got %q", got[before].head)
			}
			g.stillServes(t)
		})
	}
}

// PAY-11, ERR-1: a model that is no string is refused; which of the two codes
// for it is right the contract leaves open.
func TestModelOfAnotherTypeIsRefused(t *testing.T) {
	t.Parallel()
	g, e := twoModels(t)
	for _, model := range []string{`1`, `null`, `true`, `{"a":"m"}`, `["m"]`} {
		t.Run(model, func(t *testing.T) {
			a := g.post(t, chat, `{"model":`+model+`,"messages":[]}`)
			code := "invalid_request"
			if a.header.Get("Headgate-Reason") == "missing_model" {
				code = "missing_model"
			}
			a.refusal(t, 400, code, false)
		})
	}
	if got := e.requests(); len(got) > 0 {
		t.Errorf("the engine got %q", got[0].head)
	}
}

func TestUnknownModelIsAnsweredWithNearNames(t *testing.T) {
	t.Parallel()
	g, _ := twoModels(t)
	e := g.post(t, chat, `{"model":"qwen-7","messages":[]}`).refusal(t, 404, "model_not_found", false)
	if !strings.Contains(e.Message, "qwen-7b") {
		t.Errorf("the message does not name qwen-7b: %q", e.Message)
	}
	// A name that is long or full of control characters is no way to fill
	// answers and logs.
	name := strings.Repeat("x", 1<<20)
	if a := g.post(t, chat, `{"model":"`+name+`","messages":[]}`); a.status != 404 || len(a.body) > 8<<10 {
		t.Errorf("1 MiB of model name: %d, %d bytes", a.status, len(a.body))
	}
	g.post(t, chat, `{"model":"a\u0000\r\nX-Evil: 1","messages":[]}`).refusal(t, 404, "model_not_found", false)
}

func TestWrongMethodIs405(t *testing.T) {
	t.Parallel()
	g, e := twoModels(t)
	for _, c := range []struct{ method, path string }{
		{"GET", chat}, {"PUT", chat}, {"DELETE", chat}, {"PATCH", "/v1/completions"},
		{"GET", "/v1/embeddings"}, {"GET", "/v1/messages"}, {"POST", "/v1/models"}, {"DELETE", "/v1/models/m"},
	} {
		t.Run(c.method+" "+c.path, func(t *testing.T) {
			a := g.do(t, c.method, c.path, "")
			a.refusal(t, 405, "method_not_allowed", false)
			if a.header.Get("Allow") == "" {
				t.Error("no Allow header") // RFC 9110, 15.5.6
			}
		})
	}
	g.stillServes(t)
	if got := e.requests(); len(got) != 1 {
		t.Errorf("the engine got %d requests", len(got))
	}
}

// PAY-11: odd bodies are answered, 200 or 400, and the process and the other
// streams live.
func TestOddBodiesNeverHurt(t *testing.T) {
	t.Parallel()
	next := make(chan struct{})
	e := newEngine(t, func(x *exchange) {
		if strings.Contains(x.body, "bystander") {
			x.stream()
			x.chunk(role + delta("a"))
			select {
			case <-next:
			case <-x.done:
			}
			x.chunk(delta("b") + finish + done)
			x.end()
			return
		}
		x.usual()
	})
	g := start(t, "routes: [{match: {model: m}, backends: [{pool: p}]}]\npools:\n"+pool("p", "", e))
	bystander, err := g.begin(t, "POST", chat, strings.NewReader(`{"model":"m","user":"bystander","stream":true,"messages":[{"role":"user","content":"hi"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer bystander.Body.Close()
	if _, err := readUntil(bystander.Body, `"a"`); err != nil {
		t.Fatal(err)
	}

	with := func(fields string) string { return `{"model":"m",` + fields + `}` }
	const hi = `"messages":[{"role":"user","content":"hi"}]`
	deep := strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000)
	veryDeep := strings.Repeat(`{"a":`, 1_000_000) + "1" + strings.Repeat("}", 1_000_000)
	for _, c := range []struct {
		name, body string
		good       bool // else 400 is right as well
	}{
		{"content null with tool calls", with(`"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]}]`), true},
		{"content missing", with(`"messages":[{"role":"assistant"}]`), true},
		{"content empty list", with(`"messages":[{"role":"user","content":[]}]`), true},
		{"unknown parts", with(`"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}},{"type":"hologram"},7,null]}]`), true},
		{"stream null", with(hi + `,"stream":null`), true},
		{"tools null", with(hi + `,"tools":null,"functions":7`), true},
		{"max_tokens negative", with(hi + `,"max_tokens":-1`), true},
		{"max_tokens huge", with(hi + `,"max_tokens":1e999`), true},
		{"n a string", with(hi + `,"n":"2"`), false},
		{"escaped key", `{"\u006dodel":"m",` + hi + `}`, true},
		{"escaped model", `{"model":"\u006d",` + hi + `}`, true},
		{"lone surrogate", with(hi + `,"a":"\ud800"`), true},
		{"no messages", with(`"messages":[]`), false},
		{"messages missing", `{"model":"m"}`, false},
		{"messages null", with(`"messages":null`), false},
		{"messages a number", with(`"messages":7`), false},
		{"messages of scalars", with(`"messages":[1,null,"x",[]]`), false},
		{"stream a string", with(hi + `,"stream":"yes"`), false},
		{"stream options a number", with(hi + `,"stream":true,"stream_options":7`), false},
		{"duplicate model, same", with(hi + `,"model":"m"`), false},
		{"duplicate model, other", with(hi + `,"model":"other"`), false},
		{"duplicate stream", with(hi + `,"stream":true,"stream":false`), false},
		{"escaped duplicate", with(hi + `,"\u006dodel":"other"`), false},
		{"invalid UTF-8", with(hi + ",\"a\":\"\xff\xfe\""), false},
		{"deep nesting", with(hi + `,"a":` + deep), false},
		{"very deep nesting", with(hi + `,"a":` + veryDeep), false},
		{"unclosed nesting", `{"model":"m",` + hi + `,"a":` + strings.Repeat("[", 1_000_000), false},
		{"many keys", with(hi + strings.Repeat(`,"k":1`, 300_000)), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := len(e.requests())
			a := g.post(t, chat, c.body)
			got := e.requests()[before:]
			switch a.status {
			case http.StatusOK:
				if len(got) != 1 {
					t.Errorf("%d requests reached the engine", len(got))
				}
			case http.StatusBadRequest:
				if c.good {
					t.Errorf("a legal body was refused: %s", a.body)
				}
				a.refusal(t, 400, a.header.Get("Headgate-Reason"), false)
				if len(got) != 0 {
					t.Errorf("the refused body reached the engine")
				}
			default:
				t.Errorf("%d %s", a.status, a.body)
			}
			g.stillServes(t)
		})
	}

	close(next)
	rest, err := io.ReadAll(bystander.Body)
	if err != nil || !strings.HasSuffix(string(rest), delta("b")+finish+done) {
		t.Errorf("the stream beside them: %q %v", rest, err)
	}
}

// What one reader of JSON takes and another takes differently must not pass:
// the gateway would route by one model and the engine run the other.
func TestDuplicateModelNeverRoutesByOneAndRunsTheOther(t *testing.T) {
	t.Parallel()
	g, e := twoModels(t)
	for _, body := range []string{
		`{"model":"qwen-7b","model":"llama-70b","messages":[{"role":"user","content":"hi"}]}`,
		`{"model":"llama-70b","model":"qwen-7b","messages":[{"role":"user","content":"hi"}]}`,
		`{"model":"qwen-7b","\u006dodel":"llama-70b","messages":[{"role":"user","content":"hi"}]}`,
	} {
		a := g.post(t, chat, body)
		a.refusal(t, 400, a.header.Get("Headgate-Reason"), false)
	}
	if n := len(e.requests()); n != 0 {
		t.Errorf("the engine got %d of them", n)
	}
}

// Contract: request_too_large is answered "before it is read whole".
func TestTooLargeBodyIsRefusedBeforeItIsSent(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	w := g.dial(t)
	w.send("POST " + chat + " HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: 104857600\r\n\r\n")
	w.answer("POST").refusal(t, 413, "request_too_large", false)
	if n := len(e.requests()); n != 0 {
		t.Errorf("the engine got %d requests", n)
	}
	g.stillServes(t)
}

func TestTooLargeChunkedBodyIsRefusedOnTheWay(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := start(t, "listeners: [{name: main, address: 127.0.0.1:0, max_body: 1MiB}]\npools:\n"+pool("p", "", e))
	w := g.dial(t)
	sent := make(chan int, 1)
	go func() {
		chunk := "10000\r\n" + strings.Repeat(" ", 1<<16) + "\r\n"
		n := 0
		defer func() { sent <- n }()
		if _, err := io.WriteString(w, "POST "+chat+" HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"); err != nil {
			return
		}
		for n < 100<<20 {
			if _, err := io.WriteString(w, chunk); err != nil {
				return
			}
			n += 1 << 16
		}
	}()
	w.answer("POST").refusal(t, 413, "request_too_large", false)
	w.Close()
	if n := <-sent; n >= 100<<20 {
		t.Error("the whole body was taken")
	}
	if n := len(e.requests()); n != 0 {
		t.Errorf("the engine got %d requests", n)
	}
	g.stillServes(t)
}

// The same for a body that is so small that an HTTP server would rather wait
// for all of it than close: "first against the largest max_body of the pools".
func TestSlightlyTooLargeBodyIsRefusedBeforeItIsSent(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "max_body: 64KiB")
	for _, n := range []int{64<<10 + 1, 200 << 10, 300 << 10} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			w := g.dial(t)
			_ = w.SetDeadline(time.Now().Add(patience / 4))
			w.send(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", chat, n))
			w.answer("POST").refusal(t, 413, "request_too_large", false)
		})
	}
	if n := len(e.requests()); n != 0 {
		t.Errorf("the engine got %d requests", n)
	}
	g.stillServes(t)
}

// A pool's own max_body counts once the model is known.
func TestPoolsOwnMaxBodyCounts(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := start(t, `routes:
- {match: {model: small}, backends: [{pool: small}]}
- {match: {model: large}, backends: [{pool: large}]}
pools:
`+pool("small", "max_body: 4KiB", e)+pool("large", "max_body: 64KiB", e))
	body := func(model string, n int) string {
		b := `{"model":"` + model + `","messages":[],"a":""}`
		return strings.Replace(b, `""`, `"`+strings.Repeat("x", n-len(b))+`"`, 1)
	}
	if a := g.post(t, chat, body("small", 4<<10)); a.status != 200 {
		t.Errorf("at the limit: %d %s", a.status, a.body)
	}
	g.post(t, chat, body("small", 4<<10+1)).refusal(t, 413, "request_too_large", false)
	if a := g.post(t, chat, body("large", 64<<10)); a.status != 200 {
		t.Errorf("the larger pool: %d %s", a.status, a.body)
	}
	if n := len(e.requests()); n != 2 {
		t.Errorf("the engine got %d requests, want 2", n)
	}
}

func TestTooLargeHeadersAre431(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	for name, lines := range map[string]string{
		"one value of 128 KiB":   "X-Big: " + strings.Repeat("a", 128<<10),
		"20000 headers":          strings.Repeat("X-A: b\r\n", 20_000) + "X-B: c",
		"one name of 128 KiB":    strings.Repeat("n", 128<<10) + ": v",
		"headers of 64 KiB each": strings.Repeat("X-Big: "+strings.Repeat("a", 64<<10)+"\r\n", 4) + "X-B: c",
	} {
		t.Run(name, func(t *testing.T) {
			w := g.dial(t)
			go func() { _, _ = io.WriteString(w, rawPost(chat, plainChat, lines)) }()
			w.answer("POST").refusal(t, 431, "headers_too_large", false)
			if n := len(e.requests()); n != 0 {
				t.Errorf("the engine got %d requests", n)
			}
		})
	}
	g.stillServes(t)
}

// So long a head is cut off before anybody has read it; the status is what can
// be had.
func TestHeadersOfMegabytesAre431(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	w := g.dial(t)
	go func() { _, _ = io.WriteString(w, rawPost(chat, plainChat, "X-Big: "+strings.Repeat("a", 4<<20))) }()
	if a := w.answer("POST"); a.status != 431 {
		t.Errorf("%d %s", a.status, a.body)
	}
	g.stillServes(t)
}

func TestVeryLongURLIsRefused(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	w := g.dial(t)
	go func() { _, _ = io.WriteString(w, rawPost("/v1/"+strings.Repeat("a", 2<<20), plainChat)) }()
	if a := w.answer("POST"); a.status != 431 && a.status != 414 && a.status != 404 {
		t.Errorf("2 MiB of path: %d", a.status)
	}
	// A query is no part of what is routed by.
	if a := g.post(t, chat+"?"+strings.Repeat("a", 8<<10), plainChat); a.status != 200 {
		t.Errorf("8 KiB of query: %d %s", a.status, a.body)
	}
	g.stillServes(t)
}

// A body that stops short is never handed on as if it were whole.
func TestCutBodyNeverReachesTheEngine(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	half := plainChat[:20]
	for name, text := range map[string]string{
		"length":                      fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(plainChat), half),
		"chunked":                     fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(half), half),
		"chunked, whole but unended":  fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(plainChat), plainChat),
		"chunked, in a chunk":         fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s", len(plainChat), half),
		"length, one byte is missing": fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(plainChat)+1, plainChat),
	} {
		t.Run(name, func(t *testing.T) {
			w := g.dial(t)
			w.send("POST " + chat + " HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n" + text)
			_ = w.Conn.(interface{ CloseWrite() error }).CloseWrite()
			// An answer is welcome; that the connection ends is a must.
			rest, ended := w.rest(patience)
			if !ended {
				t.Error("the connection stays open")
			}
			if rest != "" && !strings.HasPrefix(rest, "HTTP/1.1 400 ") {
				t.Errorf("answered %q", rest)
			}
			g.stillServes(t)
			for _, x := range e.requests() {
				if x.body != plainChat {
					t.Errorf("the engine got %q", x.body)
				}
			}
		})
	}
}

// LIM-1: a body may come slowly.
func TestSlowBodyIsServed(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	w := g.dial(t)
	text := rawPost(chat, plainChat)
	i := len(text) - len(plainChat)
	w.send(text[:i])
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ; i < len(text); i++ {
		<-tick.C
		w.send(text[i : i+1])
	}
	same(t, w.answer("POST"), 200, plain)
	if got := e.last(t).body; got != plainChat {
		t.Errorf("the engine got %q", got)
	}
}

// What is right for JSON is not refused for how it is spelt.
func TestSpellingsOfJSONsMediaType(t *testing.T) {
	t.Parallel()
	g := serve(t, newEngine(t, nil), "")
	for _, ct := range []string{"application/json; charset=utf-8", "application/json;charset=UTF-8", "Application/JSON", "application/json ;  charset=\"utf-8\""} {
		if a := g.post(t, chat, plainChat, "Content-Type", ct); a.status != 200 {
			t.Errorf("%s: %d %s", ct, a.status, a.body)
		}
	}
	if a := g.post(t, chat, plainChat, "Content-Encoding", "identity"); a.status != 200 {
		t.Errorf("identity: %d %s", a.status, a.body)
	}
}

// A body that stops coming harms nobody else and holds no engine.
func TestStalledBodyHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	for range 50 {
		w := g.dial(t)
		w.send(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{", chat, len(plainChat)))
	}
	g.stillServes(t)
	if n := len(e.requests()); n != 1 {
		t.Errorf("the engine got %d requests, want 1", n)
	}
}

// The head of a request must come within 10 seconds.
func TestSlowHeadIsCut(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 10 seconds")
	}
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	for name, text := range map[string]string{
		"head":         "POST " + chat + " HTTP/1.1\r\nHost: gate",
		"request line": "POST " + chat,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := g.dial(t)
			begun := time.Now()
			_ = w.SetDeadline(begun.Add(40 * time.Second))
			w.send(text)
			over := make(chan struct{})
			go func() { // one byte a second keeps it alive
				defer close(over)
				tick := time.NewTicker(time.Second)
				defer tick.Stop()
				for range tick.C {
					if _, err := w.Write([]byte("a")); err != nil {
						return
					}
				}
			}()
			if _, ended := w.rest(30 * time.Second); !ended {
				t.Error("30 seconds later the connection is still open")
			}
			w.Close()
			<-over
			if took := time.Since(begun); took < 5*time.Second {
				t.Errorf("cut after %v already", took)
			}
		})
	}
}

// A panic in one request would show here as a cut connection: the process and
// the connection's next request live.
func TestManyBadRequestsOnOneConnection(t *testing.T) {
	t.Parallel()
	g, _ := twoModels(t)
	w := g.dial(t)
	for range 100 {
		w.send(rawPost(chat, `{"model":`))
		if a := w.answer("POST"); a.status != 400 {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	w.send(rawPost(chat, plainChat))
	if a := w.answer("POST"); a.status != 200 || a.body != plain {
		t.Errorf("%d %s", a.status, a.body)
	}
}
