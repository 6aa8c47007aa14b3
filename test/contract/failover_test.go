// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
)

// pair is two engines; the one that is asked first behaves as the test says,
// and the other one as a good engine.
func pair(t *testing.T, extra string, first func(*exchange)) (*gateway, *engine) {
	t.Helper()
	var asked atomic.Bool
	e := newEngine(t, func(x *exchange) {
		if asked.CompareAndSwap(false, true) {
			first(x)
			return
		}
		x.usual()
	})
	return start(t, "pools:\n"+pool("p", extra, e, twin(t, e))), e
}

// failover.md 3, row by row, without a guard.
func TestFailureBeforeOutput(t *testing.T) {
	t.Parallel()
	status := func(n int) func(*exchange) {
		return func(x *exchange) { x.json(n, `{"error":"x"}`) }
	}
	begun := func(end func(*exchange)) func(*exchange) {
		return func(x *exchange) {
			x.stream()
			x.chunk(strings.ReplaceAll(role, "c1", "dropped"))
			end(x)
		}
	}
	for _, c := range []struct {
		name, extra, request string
		first                func(*exchange)
		attempts, status     int
		code                 string // of Headgate; "" for an engine's answer
		retryable            bool
	}{
		{"500", "", plainChat, status(500), 2, 200, "", false},
		{"503", "", plainChat, status(503), 2, 200, "", false},
		{"429", "", plainChat, status(429), 2, 200, "", false},
		{"502", "", plainChat, status(502), 1, 503, "source_not_fenced", true},
		{"504", "", streamed, status(504), 1, 503, "source_not_fenced", true},
		{"502, transport fence allowed", "failover: {allow_transport_fence: true}", plainChat, status(502), 2, 200, "", false},
		{"400", "", plainChat, status(400), 1, 400, "", false},
		{"422", "", streamed, status(422), 1, 422, "", false},
		{"RST before the head", "", plainChat, (*exchange).reset, 2, 200, "", false},
		{"FIN before the head", "", streamed, (*exchange).fin, 2, 200, "", false},
		{"FIN in the head", "", streamed, func(x *exchange) { x.write("HTTP/1.1 200 OK\r\nConte"); x.fin() }, 2, 200, "", false},
		{"RTY-3 RST after the role", "", streamed, begun((*exchange).reset), 2, 200, "", false},
		{"RTY-3 end marker after the role", "", streamed, begun(func(x *exchange) { x.chunk(done); x.end() }), 2, 200, "", false},
		{"error event after the role", "", streamed, begun(func(x *exchange) { x.chunk("data: {\"error\":{\"message\":\"boom\",\"code\":500}}\n\n"); x.end() }), 2, 200, "", false},
		{"HTML", "", plainChat, func(x *exchange) { x.json(200, "<html></html>", "Content-Type: text/html") }, 2, 200, "", false},
		{"no HTTP", "", plainChat, func(x *exchange) { x.write("SSH-2.0-OpenSSH_9\r\n"); x.fin() }, 2, 200, "", false},
		{"cut plain body", "", plainChat, func(x *exchange) { x.write("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"); x.fin() }, 2, 200, "", false},
		{"one attempt only", "failover: {before_first_delta: {max_attempts: 1}}", plainChat, (*exchange).reset, 1, 502, "upstream_failed", true},
		{"no budget", "failover: {retry_budget: {ratio: 0, min_per_second: 0}}", plainChat, (*exchange).reset, 1, 503, "retry_budget_exhausted", true},
		{"tools, RST", "executes_tools: true", plainChat, (*exchange).reset, 1, 400, "tool_effects_unknown", false},
		{"tools, 500", "executes_tools: true", plainChat, status(500), 1, 400, "tool_effects_unknown", false},
		{"tools, 502", "executes_tools: true", plainChat, status(502), 1, 400, "tool_effects_unknown", false},
		{"tools, RST after the role", "executes_tools: true", streamed, begun((*exchange).reset), 1, 400, "tool_effects_unknown", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, e := pair(t, c.extra, c.first)
			a := g.post(t, chat, c.request)
			switch {
			case c.code != "":
				a.refusal(t, c.status, c.code, c.retryable)
			case c.status == 200 && c.request == plainChat:
				same(t, a, 200, plain)
			case c.status == 200:
				same(t, a, 200, role+delta("a")+delta("b")+finish+done)
			default:
				same(t, a, c.status, `{"error":"x"}`)
			}
			got := e.requests()
			if len(got) != c.attempts {
				t.Fatalf("%d attempts, want %d", len(got), c.attempts)
			}
			if len(got) == 2 { // RTY-6, RTY-8
				if got[0].body != got[1].body || len(got[0].body) == 0 {
					t.Errorf("other bodies: %q, %q", got[0].body, got[1].body)
				}
				if got[0].header["host"][0] == got[1].header["host"][0] {
					t.Error("the same engine again")
				}
				if a, b := got[0].header["x-request-id"], got[1].header["x-request-id"]; len(a) != 1 || len(b) != 1 || a[0] != b[0] {
					t.Errorf("x-request-id: %q, %q", a, b)
				}
			}
		})
	}
}

// "500 before output: retry once elsewhere"; all of them fail.
func TestAttemptsExhausted(t *testing.T) {
	t.Parallel()
	for status, code := range map[int]string{500: "upstream_failed", 429: "", 503: ""} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			e := newEngine(t, func(x *exchange) { x.json(status, `{"error":"x"}`, "Retry-After: 77") })
			g := start(t, "pools:\n"+pool("p", "", e, twin(t, e)))
			a := g.post(t, chat, plainChat)
			if code != "" {
				a.refusal(t, 502, code, true)
			} else {
				same(t, a, status, `{"error":"x"}`)
				if v := a.header.Get("Retry-After"); v != "30" {
					t.Errorf("Retry-After: %q", v)
				}
			}
			if n := len(e.requests()); n != 2 {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// "error event before output inside a 200: numeric 4xx code: refused".
func TestClientsErrorInsideA200IsNotRetried(t *testing.T) {
	t.Parallel()
	const event = `data: {"error":{"message":"the prompt is too long","type":"BadRequestError","code":400}}` + "\n\n"
	g, e := pair(t, "", func(x *exchange) {
		x.stream()
		x.chunk(event + done)
		x.end()
	})
	a := g.post(t, chat, streamed)
	if n := len(e.requests()); n != 1 {
		t.Errorf("%d attempts", n)
	}
	if !strings.Contains(a.body, "the prompt is too long") {
		t.Errorf("%d %q", a.status, a.body)
	}
}

// failover.md 2: complete is a finish_reason on every choice.
func TestOneUnfinishedChoiceIsAnInterruption(t *testing.T) {
	t.Parallel()
	text := role + strings.Replace(role, `"index":0`, `"index":1`, 1) + delta("a") + strings.Replace(delta("b"), `"index":0`, `"index":1`, 1) + finish
	g, e := pair(t, "", func(x *exchange) {
		x.stream()
		x.chunk(text)
		x.chunk(done)
		x.end()
	})
	if got := g.post(t, chat, strings.Replace(streamed, `"stream"`, `"n":2,"stream"`, 1)).interrupted(t); got != text {
		t.Errorf("%q", got)
	}
	if n := len(e.requests()); n != 1 {
		t.Errorf("%d attempts", n)
	}
}

// failover.md 2: what counts as a first output commits the answer.
func TestEveryKindOfOutputCommits(t *testing.T) {
	t.Parallel()
	put := func(field string) string { return strings.Replace(delta(""), `"content":""`, field, 1) }
	for name, event := range map[string]string{
		"content":        put(`"content":"a"`),
		"blank content":  put(`"content":" "`),
		"reasoning":      put(`"reasoning_content":"a"`),
		"reasoning, too": put(`"reasoning":"a"`),
		"tool name":      put(`"tool_calls":[{"index":0,"id":"1","type":"function","function":{"name":"f","arguments":""}}]`),
		"refusal":        put(`"refusal":"no"`),
		"audio":          put(`"audio":{"data":"AA"}`),
		"logprobs":       strings.Replace(delta(""), `"finish_reason"`, `"logprobs":{"content":[{"token":"a","logprob":-1}]},"finish_reason"`, 1),
		"unknown event":  `data: {"surprise":1}` + "\n\n",
	} {
		t.Run(name, func(t *testing.T) {
			g, e := pair(t, "", func(x *exchange) {
				x.stream()
				x.chunk(role + event)
				x.reset()
			})
			a := g.post(t, chat, streamed)
			i := strings.LastIndex(a.body, `data: {"error":`)
			if i < 0 || a.body[:i] != role+event {
				t.Errorf("%d %q", a.status, a.body)
			}
			if n := len(e.requests()); n != 1 {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// Preamble is held back up to 64 KiB; past it the answer is committed.
func TestPreambleIsHeldBackWithinBounds(t *testing.T) {
	t.Parallel()
	long := ": " + strings.Repeat("x", 1020) + "\n\n"
	for _, n := range []int{40, 200} {
		t.Run(fmt.Sprint(n, " KiB"), func(t *testing.T) {
			g, e := pair(t, "", func(x *exchange) {
				x.stream()
				x.chunk(role + strings.Repeat(long, n))
				x.reset()
			})
			a := g.post(t, chat, streamed)
			if n == 40 {
				same(t, a, 200, role+delta("a")+delta("b")+finish+done)
				return
			}
			if len(e.requests()) != 1 || a.status != 200 || !strings.HasPrefix(a.body, role+long) || !strings.Contains(a.body, "upstream_decode_interrupted") {
				t.Errorf("%d attempts, %d %.300q … %.600q", len(e.requests()), a.status, a.body, a.body[max(0, len(a.body)-600):])
			}
		})
	}
}

// An engine that breaks HTTP's rules harms the one request, if any: what it
// left on a connection is never another request's answer.
func TestUnrulyEngineNeverSpoilsAnotherAnswer(t *testing.T) {
	t.Parallel()
	const ok = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
	poison := ok + "Content-Length: 9\r\n\r\n{\"p\":\"X\"}"
	length := fmt.Sprintf("Content-Length: %d\r\n", len(plain))
	for name, text := range map[string]string{
		"another answer behind it":   ok + length + "\r\n" + plain + poison,
		"garbage behind it":          ok + length + "\r\n" + plain + "garbage",
		"length and chunked":         ok + length + fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(plain), plain) + poison,
		"two lengths":                ok + length + "Content-Length: 5\r\n\r\n" + plain,
		"length is no number":        ok + "Content-Length: abc\r\n\r\n" + plain,
		"xchunked":                   ok + "Transfer-Encoding: xchunked\r\n\r\n" + plain,
		"folded header":              ok + "X-A: b\r\n c\r\n" + length + "\r\n" + plain,
		"NUL in a header":            ok + "X-A: b\x00c\r\n" + length + "\r\n" + plain,
		"CR in a header":             ok + "X-A: b\rX-Evil: 1\r\n" + length + "\r\n" + plain,
		"status of four digits":      "HTTP/1.1 2000 OK\r\n" + length + "\r\n" + plain,
		"status 0":                   "HTTP/1.1 000 OK\r\n" + length + "\r\n" + plain,
		"status 99":                  "HTTP/1.1 99 OK\r\n" + length + "\r\n" + plain,
		"101":                        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n" + plain,
		"header of 8 MiB":            ok + "X-Big: " + strings.Repeat("a", 8<<20) + "\r\n" + length + "\r\n" + plain,
		"100000 headers":             ok + strings.Repeat("X-A: b\r\n", 100_000) + length + "\r\n" + plain,
		"a thousand interim answers": strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 1000) + ok + length + "\r\n" + plain,
		"bare LF":                    strings.ReplaceAll(ok+length+"\r\n", "\r\n", "\n") + plain,
		"headers that are ours":      ok + "Headgate-Reason: shed\r\nHeadgate-Guard: origin=engine\r\n" + length + "\r\n" + plain,
	} {
		t.Run(name, func(t *testing.T) {
			sent := make(chan struct{}, 9)
			e := newEngine(t, func(x *exchange) {
				if strings.Contains(x.head, "X-Bad") {
					x.write(text)
					sent <- struct{}{}
					if !strings.Contains(name, "behind") {
						x.fin()
					}
					return
				}
				x.usual()
			})
			g := serve(t, e, "failover: {before_first_delta: {max_attempts: 1}}")
			a := g.post(t, chat, plainChat, "X-Bad", "1")
			receive(t, "the engine's answer", sent)
			switch {
			case a.status == 200 && a.err == nil && a.body == plain:
			case a.status >= 500 && a.header.Get("Headgate-Reason") != "":
			default:
				t.Errorf("%d %v %.300q", a.status, a.err, a.body)
			}
			for _, n := range []string{"X-Evil", "Headgate-Guard", "Headgate-Reason"} {
				if a.status == 200 && a.header.Get(n) != "" {
					t.Errorf("%s: %q", n, a.header.Get(n))
				}
			}
			for range 3 {
				if b := g.post(t, chat, plainChat); b.status == 200 && b.body != plain || b.status != 200 && b.header.Get("Headgate-Reason") == "" {
					t.Errorf("the next answer: %d %q", b.status, b.body)
				}
			}
		})
	}
}
