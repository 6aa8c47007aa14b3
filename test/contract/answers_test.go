// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
)

// relay gets one answer through a gateway without routes.
func relay(t *testing.T, body string, respond func(*exchange)) (answer, *gateway, *engine) {
	t.Helper()
	e := newEngine(t, respond)
	g := serve(t, e, "")
	return g.post(t, chat, body), g, e
}

func same(t *testing.T, a answer, status int, want string) {
	t.Helper()
	if a.status != status || a.err != nil {
		t.Errorf("%d, %v", a.status, a.err)
	}
	if a.body != want {
		old, now := patched(want, a.body)
		t.Errorf("of %d bytes (want %d) these differ: %.300q → %.300q", len(a.body), len(want), old, now)
	}
}

// Every stream that ends well arrives byte for byte.
func TestStreamArrivesByteForByte(t *testing.T) {
	t.Parallel()
	asked := strings.Replace(streamed, "}]", "}]"+`,"stream_options":{"include_usage":true}`, 1)
	big := func(n int) string {
		return strings.Replace(delta(""), `"content":""`, `"content":"`+strings.Repeat("x", n-len(delta(""))+2)+`"`, 1)
	}
	for _, c := range []struct {
		name    string
		request string
		events  []string // one chunk each
	}{
		{"plain", streamed, []string{role, delta("a"), finish, done}},
		{"all in one chunk", streamed, []string{role + delta("a") + finish + done}},
		{"PAY-1 usage asked for", asked, []string{role, delta("a"), finish, usage, done}},
		{"usage on every chunk", asked, []string{role, strings.Replace(delta("a"), `"choices"`, `"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4},"choices"`, 1), finish, usage, done}},
		{"empty choices without usage", streamed, []string{`data: {"id":"","object":"","created":0,"model":"","choices":[],"prompt_filter_results":[{"prompt_index":0}]}` + "\n\n", role, delta("a"), finish, done}},
		{"usage beside choices, not asked for", streamed, []string{role, delta("a"), strings.Replace(finish, `"choices"`, `"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4},"choices"`, 1), done}},
		{"comments", streamed, []string{": hello\n\n", role, ":\n\n", delta("a"), ": keep-alive\n\n: again\n\n", finish, done}},
		{"ids and names", streamed, []string{"id: 1\n" + role, "event: message\nid: 2\n" + delta("a"), ": inside\n" + delta("b"), "event: ping\ndata: {}\n\n", finish, done}},
		{"SSE-7 no space after the colon", streamed, []string{strings.Replace(role, "data: ", "data:", 1), strings.Replace(delta("a"), "data: ", "data:", 1), strings.Replace(finish, "data: ", "data:", 1), "data:[DONE]\n\n"}},
		{"CRLF", streamed, []string{strings.ReplaceAll(role+delta("a")+finish+done, "\n", "\r\n")}},
		{"CR", streamed, []string{strings.ReplaceAll(role+delta("a")+finish+done, "\n", "\r")}},
		{"data over two lines", streamed, []string{role, "data: {\"id\":\"c1\",\ndata: \"object\":\"chat.completion.chunk\",\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n", finish, done}},
		{"byte order mark", streamed, []string{"\ufeff" + role, delta("a"), finish, done}},
		{"SSE-1 big lines", streamed, []string{role, delta("s1"), big(65535), delta("s2"), big(65537), delta("s3"), big(300 << 10), delta("s4"), big(2 << 20), delta("s5"), big(12 << 20), delta("s6"), finish, done}},
		{"unknown fields and spacing", streamed, []string{`data: { "choices" : [ { "delta" : { "content" : "a" , "x": 1.0e0 } , "index":0 } ] , "nvext":{"a":[]} }` + "\n\n", finish, done}},
		{"reasoning and tools", streamed, []string{role, strings.Replace(delta("a"), `"content"`, `"reasoning_content"`, 1), strings.Replace(delta("a"), `"content":"a"`, `"tool_calls":[{"index":0,"id":"1","type":"function","function":{"name":"f","arguments":""}}]`, 1), strings.Replace(finish, "stop", "tool_calls", 1), done}},
		{"nested error null stays", streamed, []string{role, strings.Replace(delta("a"), `"finish_reason":null`, `"error":null,"finish_reason":null`, 1), finish, done}},
		{"the text of an error stays", streamed, []string{role, delta(`\"error\":null`), finish, done}},
		{"two choices", strings.Replace(streamed, `"stream"`, `"n":2,"stream"`, 1), []string{role, strings.Replace(role, `"index":0`, `"index":1`, 1), delta("a"), strings.Replace(delta("b"), `"index":0`, `"index":1`, 1), finish, strings.Replace(finish, `"index":0`, `"index":1`, 1), done}},
		{"events after the end marker", streamed, []string{role, delta("a"), finish, done, ": bye\n\n"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, _, _ := relay(t, c.request, func(x *exchange) {
				x.stream()
				for _, ev := range c.events {
					x.chunk(ev)
				}
				x.end()
			})
			want := strings.Join(c.events, "")
			if c.name == "events after the end marker" && a.body == strings.TrimSuffix(want, ": bye\n\n") {
				return // the answer is over there
			}
			same(t, a, 200, want)
			if ct := a.header.Get("Content-Type"); ct != "text/event-stream; charset=utf-8" {
				t.Errorf("Content-Type: %q", ct)
			}
			if a.header.Get("Content-Length") != "" {
				t.Error("a stream with Content-Length")
			}
			if !requestID.MatchString(a.header.Get("x-request-id")) {
				t.Errorf("x-request-id: %q", a.header.Get("x-request-id"))
			}
		})
	}
}

// SSE-5: events without data break the decoders of two SDKs once an id was
// seen. The contract lets every byte of the engine pass, so what may be left
// out here is whole events without data, and nothing else.
func TestEventsWithoutDataAreTheOnlyOnesLeftOut(t *testing.T) {
	t.Parallel()
	sent := []string{
		": hello\n\n", "retry: 3000\n\n", "id: 1\n" + role, "retry: 3000\n\n", "id: 2\n" + delta("a"), ":\n\n", ": keep-alive\ndata:\n\n", "id: 3\n\n", "data\n\n",
		"event: x\n\n", delta("b"), "event: ping\ndata: {}\n\n", "id\ndata:\n\n", finish, ": end\n\n", done,
	}
	a, _, _ := relay(t, streamed, func(x *exchange) {
		x.stream()
		for _, ev := range sent {
			x.chunk(ev)
		}
		x.end()
	})
	rest := a.body
	for _, ev := range sent {
		after, ok := strings.CutPrefix(rest, ev)
		switch {
		case ok:
			rest = after
		case strings.Contains(ev, "{") || ev == done:
			t.Fatalf("instead of %q comes %q", ev, rest)
		}
	}
	if rest != "" || a.status != 200 || a.err != nil {
		t.Errorf("%d %v, and %q at the end", a.status, a.err, rest)
	}
}

// SSE-2: characters cut at packet borders stay whole.
func TestStreamWrittenByteByByteArrivesWhole(t *testing.T) {
	t.Parallel()
	text := role + delta("é世界😀ñ") + delta("\u2028\u0000"[:3]) + finish + done
	a, _, _ := relay(t, streamed, func(x *exchange) {
		_ = x.Conn.(*net.TCPConn).SetNoDelay(true)
		x.stream()
		for i := range len(text) {
			for _, b := range []byte(fmt.Sprintf("1\r\n%s\r\n", text[i:i+1])) {
				x.write(string([]byte{b}))
			}
		}
		x.end()
	})
	same(t, a, 200, text)
}

// A stream that the engine does not chunk ends with its connection or length.
func TestStreamInOtherFramings(t *testing.T) {
	t.Parallel()
	text := role + delta("a") + finish + done
	t.Run("until close", func(t *testing.T) {
		a, _, _ := relay(t, streamed, func(x *exchange) {
			x.write("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + text)
			x.fin()
		})
		same(t, a, 200, text)
	})
	t.Run("HTTP/1.0", func(t *testing.T) {
		a, _, _ := relay(t, streamed, func(x *exchange) {
			x.write("HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + text)
			x.fin()
		})
		same(t, a, 200, text)
	})
	t.Run("with a length", func(t *testing.T) {
		a, _, _ := relay(t, streamed, func(x *exchange) {
			x.json(200, text, "Content-Type: text/event-stream")
		})
		same(t, a, 200, text)
		if n := a.header.Get("Content-Length"); n != "" && n != fmt.Sprint(len(text)) {
			t.Errorf("Content-Length: %s", n)
		}
	})
	t.Run("interim answers first", func(t *testing.T) {
		a, _, _ := relay(t, streamed, func(x *exchange) {
			x.write("HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
			x.events(role, delta("a"), finish)
		})
		same(t, a, 200, text)
	})
}

// HTP-7: each delta is at the client before the engine sends the next one.
func TestEachDeltaArrivesBeforeTheNextIsSent(t *testing.T) {
	t.Parallel()
	for _, ct := range []string{"text/event-stream", "text/event-stream; charset=utf-8", "application/json", "text/plain"} {
		for _, coding := range []string{"", "gzip"} {
			if coding != "" && ct != "text/event-stream" {
				continue
			}
			t.Run(ct+" "+coding, func(t *testing.T) {
				arrived := make(chan struct{})
				e := newEngine(t, func(x *exchange) {
					lines := []string{"Content-Type: " + ct}
					write := func(s string) { x.chunk(s) }
					if coding == "gzip" { // HTP-5
						lines = append(lines, "Content-Encoding: gzip")
						var out bytes.Buffer
						z := gzip.NewWriter(&out)
						write = func(s string) {
							_, _ = io.WriteString(z, s)
							if s == done {
								z.Close()
							} else {
								z.Flush()
							}
							x.chunk(out.String())
							out.Reset()
						}
					}
					x.stream(lines...)
					write(role)
					for i := range 20 {
						write(delta(fmt.Sprintf("d%d.", i)))
						select {
						case <-arrived:
						case <-x.done:
							x.ended = true
							return
						}
					}
					write(finish)
					write(done)
					x.end()
				})
				g := serve(t, e, "")
				got := within(t, "every delta, one by one", func() string {
					res, err := g.begin(t, "POST", chat, strings.NewReader(streamed), "Accept-Encoding", "gzip")
					if err != nil {
						return err.Error()
					}
					defer res.Body.Close()
					var r io.Reader = res.Body
					if res.Header.Get("Content-Encoding") == "gzip" {
						if r, err = gzip.NewReader(res.Body); err != nil {
							return err.Error()
						}
					}
					var all strings.Builder
					for i := range 20 {
						part, err := readUntil(r, fmt.Sprintf("d%d.", i))
						all.WriteString(part)
						if err != nil {
							return all.String() + err.Error()
						}
						arrived <- struct{}{}
					}
					rest, err := io.ReadAll(r)
					if err != nil {
						return all.String() + err.Error()
					}
					return all.String() + string(rest)
				})
				want := role
				for i := range 20 {
					want += delta(fmt.Sprintf("d%d.", i))
				}
				if want += finish + done; got != want {
					t.Errorf("got %q", got)
				}
			})
		}
	}
}

// HTP-5: a coding that nobody here knows passes, or is an engine's error
// (failover.md 3: undecodable content-coding); it is never a quiet empty answer.
func TestUnknownContentCodingIsNeverAnEmptyAnswer(t *testing.T) {
	t.Parallel()
	const body = "\x0b\x02\x80not really brotli\x03"
	a, _, _ := relay(t, streamed, func(x *exchange) {
		x.stream("Content-Encoding: br")
		x.chunk(body)
		x.end()
	})
	if a.status == 502 {
		a.refusal(t, 502, "upstream_failed", true)
		return
	}
	same(t, a, 200, body)
	if a.header.Get("Content-Encoding") != "br" {
		t.Errorf("%v", a.header)
	}
}

func TestGarbageInsteadOfGzipIsAnEnginesError(t *testing.T) {
	t.Parallel()
	a, _, _ := relay(t, streamed, func(x *exchange) {
		x.stream("Content-Encoding: gzip")
		x.chunk(role + delta("a") + finish + done)
		x.end()
	})
	a.refusal(t, 502, "upstream_failed", true)
}

// PAY-3: usage that the client did not ask for is not shown to it.
func TestUsageChunkNotAskedForIsLeftOut(t *testing.T) {
	t.Parallel()
	for name, options := range map[string]string{
		"no options": ``, "declined": `,"stream_options":{"include_usage":false}`,
		"another key": `,"stream_options":{"continuous_usage_stats":false}`, "null": `,"stream_options":null`,
	} {
		t.Run(name, func(t *testing.T) {
			a, g, e := relay(t, strings.Replace(streamed, `"stream":true`, `"stream":true`+options, 1), nil)
			same(t, a, 200, role+delta("a")+delta("b")+finish+done)
			if !strings.Contains(strings.ReplaceAll(e.last(t).body, " ", ""), `"include_usage":true`) {
				t.Errorf("the engine was not asked: %s", e.last(t).body)
			}
			_ = g
		})
	}
	t.Run("one chunk holds it and its neighbours", func(t *testing.T) {
		a, _, _ := relay(t, streamed, func(x *exchange) {
			x.stream()
			x.chunk(role + delta("a") + finish + usage + done)
			x.end()
		})
		same(t, a, 200, role+delta("a")+finish+done)
	})
	t.Run("cut anywhere", func(t *testing.T) {
		a, _, _ := relay(t, streamed, func(x *exchange) {
			x.stream()
			for _, b := range []byte(role + delta("a") + finish + usage + done) {
				x.chunk(string([]byte{b}))
			}
			x.end()
		})
		same(t, a, 200, role+delta("a")+finish+done)
	})
}

// Contract: a top-level "error":null is left out, and nothing else.
func TestTopLevelErrorNullIsLeftOut(t *testing.T) {
	t.Parallel()
	for name, put := range map[string]func(string) string{
		"first":       func(s string) string { return strings.Replace(s, `{"id"`, `{"error":null,"id"`, 1) },
		"in between":  func(s string) string { return strings.Replace(s, `"model"`, `"error":null,"model"`, 1) },
		"last":        func(s string) string { i := strings.LastIndex(s, "}"); return s[:i] + `,"error":null` + s[i:] },
		"white space": func(s string) string { return strings.Replace(s, `"model"`, `"error" : null , "model"`, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			for _, c := range []struct{ request, was string }{{streamed, role + delta("a") + finish + done}, {plainChat, plain}} {
				events := strings.SplitAfter(c.was, "\n\n")
				a, _, _ := relay(t, c.request, func(x *exchange) {
					if c.request == plainChat {
						x.json(200, put(plain))
						return
					}
					x.stream()
					for _, ev := range events {
						if strings.Contains(ev, "{") {
							ev = put(ev)
						}
						if ev != "" {
							x.chunk(ev)
						}
					}
					x.end()
				})
				squeeze := strings.NewReplacer(" ", "", "\n", "").Replace
				if a.status != 200 || a.err != nil || squeeze(a.body) != squeeze(c.was) {
					t.Errorf("%d %v\ngot  %q\nwant %q", a.status, a.err, a.body, c.was)
				}
				if n := a.header.Get("Content-Length"); n != "" && n != fmt.Sprint(len(a.body)) {
					t.Errorf("Content-Length: %s of %d", n, len(a.body))
				}
			}
		})
	}
}

// PAY-12: the client's name is restored, in both modes, wherever packets end.
func TestModelIsRestoredAfterARewrite(t *testing.T) {
	t.Parallel()
	const trap = `the \"model\":\"backend\" and {\"model\":\"backend\"}`
	text := role + delta(trap) + finish + done
	body := strings.Replace(plain, `"ab"`, `"`+trap+`","model":"backend"`, 1)
	for _, reported := range []string{"backend", "/models/org/backend-7B.gguf", "public"} {
		named := func(s string) string { return strings.ReplaceAll(s, `"model":"m"`, `"model":"`+reported+`"`) }
		want := func(s string) string { return strings.ReplaceAll(s, `"model":"m"`, `"model":"public"`) }
		e := newEngine(t, func(x *exchange) {
			switch {
			case strings.Contains(x.head, "X-Cut"):
				x.stream()
				for _, b := range []byte(named(text)) {
					x.chunk(string([]byte{b}))
				}
				x.end()
			case x.streams():
				x.stream()
				x.chunk(named(text))
				x.end()
			default:
				x.json(200, named(body))
			}
		}, "backend")
		g := start(t, "routes: [{match: {model: public}, backends: [{pool: p}], rewrite: {model: backend}}]\npools:\n"+pool("p", "", e))
		t.Run(reported, func(t *testing.T) {
			a := g.post(t, chat, strings.Replace(plainChat, `"m"`, `"public"`, 1))
			same(t, a, 200, want(body))
			if n := a.header.Get("Content-Length"); n != "" && n != fmt.Sprint(len(a.body)) { // HTP-2
				t.Errorf("Content-Length: %s of %d", n, len(a.body))
			}
			same(t, g.post(t, chat, strings.Replace(streamed, `"m"`, `"public"`, 1)), 200, want(text))
			same(t, g.post(t, chat, strings.Replace(streamed, `"m"`, `"public"`, 1), "X-Cut", "1"), 200, want(text))
			if got := e.last(t).body; !strings.Contains(got, `"model":"backend"`) {
				t.Errorf("the engine got %s", got)
			}
		})
	}
}

// Without a rewrite the engine's own name stays, whatever it is.
func TestModelOfTheEngineStaysWithoutARewrite(t *testing.T) {
	t.Parallel()
	body := strings.Replace(plain, `"model":"m"`, `"model":"elsewhere"`, 1)
	a, _, _ := relay(t, plainChat, func(x *exchange) { x.json(200, body) })
	same(t, a, 200, body)
}

// PAY-5: finish reasons and what vendors add to them arrive unchanged.
func TestFinishReasonsArriveUnchanged(t *testing.T) {
	t.Parallel()
	for _, reason := range []string{"stop", "length", "tool_calls", "content_filter", "function_call", "abort"} {
		t.Run(reason, func(t *testing.T) {
			last := strings.Replace(finish, `"delta":{},"finish_reason":"stop"`, `"delta":{"content":"z"},"finish_reason":"`+reason+`","stop_reason":"</s>","matched_stop":2`, 1)
			text := role + delta("a") + last + done
			a, _, _ := relay(t, streamed, func(x *exchange) {
				x.stream()
				x.chunk(text)
				x.end()
			})
			same(t, a, 200, text)
			body := strings.Replace(plain, `"finish_reason":"stop"`, `"finish_reason":"`+reason+`","stop_reason":null`, 1)
			a, _, _ = relay(t, plainChat, func(x *exchange) { x.json(200, body) })
			same(t, a, 200, body)
		})
	}
}

// Only the end marker is missing: Headgate writes it, once.
func TestMissingEndMarkerIsAdded(t *testing.T) {
	t.Parallel()
	text := role + delta("a") + finish
	t.Run("clean end", func(t *testing.T) {
		a, _, _ := relay(t, streamed, func(x *exchange) {
			x.stream()
			x.chunk(text)
			x.end()
		})
		same(t, a, 200, text+done)
	})
	t.Run("half an event at the end", func(t *testing.T) {
		a, _, _ := relay(t, streamed, func(x *exchange) {
			x.stream()
			x.chunk(text + "data: [DONE]")
			x.end()
		})
		if a.status != 200 || a.err != nil || strings.Count(a.body, "[DONE]") != 1 || !strings.HasPrefix(a.body, text) {
			t.Errorf("%d %v %q", a.status, a.err, a.body)
		}
	})
}

// HTP-1: nothing of the engine's connection reaches the client's.
func TestHopByHopHeadersStayBehind(t *testing.T) {
	t.Parallel()
	lines := []string{
		"Connection: keep-alive, X-Hop", "Keep-Alive: timeout=5", "X-Hop: 1", "Proxy-Connection: keep-alive", "Proxy-Authenticate: Basic",
		"Trailer: X-T", "TE: trailers", "Upgrade: h2c", "X-Kept: 1", "Server: engine", "Date: Mon, 01 Jan 2024 00:00:00 GMT",
	}
	e := newEngine(t, func(x *exchange) {
		if x.streams() {
			x.stream(lines...)
			x.chunk(role + delta("a") + finish + done)
			x.write("0\r\nX-T: late\r\n\r\n")
			return
		}
		x.json(200, plain, lines...)
	})
	g := serve(t, e, "")
	for _, body := range []string{plainChat, streamed} {
		for _, proto := range []string{"HTTP/1.1", "HTTP/2.0"} {
			t.Run(proto, func(t *testing.T) {
				c := g.client
				if proto == "HTTP/2.0" {
					c = h2c(t)
				}
				res := roundTrip(t, c, "http://"+g.addr+chat, body)
				a := whole(res)
				if a.status != 200 || a.err != nil || res.Proto != proto {
					t.Fatalf("%s %d %v", res.Proto, a.status, a.err)
				}
				for _, name := range []string{"Keep-Alive", "X-Hop", "Proxy-Connection", "Proxy-Authenticate", "Te", "Upgrade", "Connection", "X-T"} {
					if v := a.header.Values(name); v != nil {
						t.Errorf("%s: %v", name, v)
					}
				}
				if d := a.header.Values("Date"); len(d) != 1 {
					t.Errorf("Date: %q", d)
				}
				if a.header.Get("X-Kept") != "1" {
					t.Error("X-Kept is lost")
				}
				if body == streamed && res.ContentLength >= 0 {
					t.Errorf("a stream of length %d", res.ContentLength)
				}
			})
		}
	}
}

// HTP-2 and the contract: an engine's 4xx passes byte for byte.
func TestEnginesOwn4xxPassesByteForByte(t *testing.T) {
	t.Parallel()
	for status, body := range map[int]string{
		400: `{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}`,
		401: `{"error":"unauthorized"}`,
		404: `{"error":{"message":"The model does not exist.","type":"NotFoundError","param":"model","code":404}}`,
		413: "too large", 422: `{"detail":[{"loc":["body"],"msg":"x"}]}`, 418: "",
	} {
		for _, request := range []string{plainChat, streamed} {
			t.Run(fmt.Sprint(status), func(t *testing.T) {
				a, _, e := relay(t, request, func(x *exchange) { x.json(status, body, "X-Engine: 1") })
				same(t, a, status, body)
				if ct := a.header.Get("Content-Type"); ct != "application/json" || a.header.Get("X-Engine") != "1" {
					t.Errorf("%v", a.header)
				}
				if n := a.header.Get("Content-Length"); n != "" && n != fmt.Sprint(len(body)) {
					t.Errorf("Content-Length: %s of %d", n, len(body))
				}
				if n := len(e.requests()); n != 1 {
					t.Errorf("%d attempts", n)
				}
			})
		}
	}
}

// HTP-2: an engine that sends less than it promised has failed. A plain answer
// is complete "when its framing is complete" (failover.md 2), even if what came
// of it reads like a whole one.
func TestShortEngineBodyIsAFailure(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{"cut JSON": plain[:100], "whole JSON": plain} {
		for framing, head := range map[string]string{"length": "Content-Length: 1000\r\n\r\n" + body, "chunked": fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(body), body)} {
			t.Run(name+", "+framing, func(t *testing.T) {
				a, _, _ := relay(t, plainChat, func(x *exchange) {
					x.write("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + head)
					x.fin()
				})
				a.refusal(t, 502, "upstream_failed", true)
			})
		}
	}
}

// HTP-2: 204 is passed on without a body, or is no answer to a chat request at
// all; it never has a length or spoils the connection.
func TestNoContentIsPassedOnOrAnError(t *testing.T) {
	t.Parallel()
	a, g, _ := relay(t, plainChat, func(x *exchange) {
		if strings.Contains(x.head, "X-Empty: no") {
			x.usual()
			return
		}
		x.write("HTTP/1.1 204 No Content\r\n\r\n")
	})
	if a.status == 502 {
		a.refusal(t, 502, "upstream_failed", true)
	} else {
		same(t, a, 204, "")
		if a.header.Get("Content-Length") != "" || a.header.Get("Transfer-Encoding") != "" {
			t.Errorf("%v", a.header)
		}
	}
	if b := g.post(t, chat, plainChat, "X-Empty", "no"); b.status != 200 {
		t.Errorf("afterwards: %d", b.status)
	}
}

// Plain answers of all framings arrive whole.
func TestPlainAnswersArriveByteForByte(t *testing.T) {
	t.Parallel()
	odd := "\n{ \"id\":\"é\\u00e9 \",\"n\":1.0e0,\"choices\":[{\"index\":0,\"message\":{\"content\":\"<&>\"},\"finish_reason\":\"stop\"}], \"x\":9007199254740993}\n\n"
	for name, respond := range map[string]func(*exchange){
		"length": func(x *exchange) { x.json(200, odd) },
		"chunked": func(x *exchange) {
			x.stream("Content-Type: application/json")
			x.chunk(odd[:9])
			x.chunk(odd[9:])
			x.end()
		},
		"until close": func(x *exchange) {
			x.write("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + odd)
			x.fin()
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, _, _ := relay(t, plainChat, respond)
			same(t, a, 200, odd)
		})
	}
	t.Run("gzip", func(t *testing.T) {
		var out bytes.Buffer
		z := gzip.NewWriter(&out)
		_, _ = io.WriteString(z, plain)
		z.Close()
		e := newEngine(t, func(x *exchange) { x.json(200, out.String(), "Content-Encoding: gzip") })
		g := serve(t, e, "")
		a := g.post(t, chat, plainChat, "Accept-Encoding", "gzip")
		if a.header.Get("Content-Encoding") == "gzip" {
			r, err := gzip.NewReader(strings.NewReader(a.body))
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(r)
			a.body = string(b)
		}
		same(t, a, 200, plain)
	})
}

// failover.md 6: what a stream that failed after its first delta looks like.
func TestStreamThatFailsAfterADeltaEndsWithTheErrorEvent(t *testing.T) {
	t.Parallel()
	begun := role + delta("a") + delta("b")
	for name, end := range map[string]func(*exchange){
		"STR-1 FIN":        (*exchange).fin,
		"STR-1 proper end": (*exchange).end,
		"STR-1 RST":        (*exchange).reset,
		"half an event":    func(x *exchange) { x.chunk(delta("c")[:30]); x.fin() },
		"end marker alone": func(x *exchange) { x.chunk(done); x.end() },
		"broken chunk":     func(x *exchange) { x.write("zz\r\n"); x.fin() },
		"an error event":   func(x *exchange) { x.chunk(`data: {"error":{"message":"boom","code":500}}` + "\n\n"); x.end() },
		"an error event, vllm's": func(x *exchange) {
			x.chunk(`data: {"object":"error","message":"boom","code":500}` + "\n\n" + done)
			x.end()
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, _, e := relay(t, streamed, func(x *exchange) {
				x.stream()
				x.chunk(begun)
				end(x)
			})
			if a.status != 200 {
				t.Fatalf("%d %s", a.status, a.body)
			}
			got := a.interrupted(t)
			if got != begun {
				t.Errorf("before the error event: %q", got)
			}
			if n := len(e.requests()); n != 1 {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// Before the first delta nothing was sent, so it is an HTTP error.
func TestStreamThatFailsBeforeADeltaIsAnHTTPError(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*exchange){
		"FIN":              (*exchange).fin,
		"RST":              (*exchange).reset,
		"STR-4 only DONE":  func(x *exchange) { x.chunk(done); x.end() },
		"only an end":      (*exchange).end,
		"error event":      func(x *exchange) { x.chunk(`data: {"error":{"message":"boom","code":500}}` + "\n\n"); x.end() },
		"garbage":          func(x *exchange) { x.chunk("<html>oh no</html>"); x.end() },
		"usage and a DONE": func(x *exchange) { x.chunk(usage + done); x.end() },
	} {
		t.Run(name, func(t *testing.T) {
			a, _, _ := relay(t, streamed, func(x *exchange) {
				x.stream()
				if name != "garbage" {
					x.chunk(role)
				}
				end(x)
			})
			a.refusal(t, 502, "upstream_failed", true)
			if strings.Contains(a.body, "assistant") {
				t.Errorf("preamble of the dropped attempt: %s", a.body)
			}
		})
	}
	t.Run("STR-4 a legal empty answer", func(t *testing.T) {
		a, _, e := relay(t, streamed, func(x *exchange) { x.events(role, finish) })
		same(t, a, 200, role+finish+done)
		if n := len(e.requests()); n != 1 {
			t.Errorf("%d attempts", n)
		}
	})
}

// A JSON answer to a streamed request, with status 200, is an answer.
func TestPlainAnswerToAStreamedRequestPasses(t *testing.T) {
	t.Parallel()
	a, _, _ := relay(t, streamed, func(x *exchange) { x.json(http.StatusOK, plain) })
	if a.status == 502 {
		a.refusal(t, 502, "upstream_failed", true) // no output that a stream reader knows
		return
	}
	same(t, a, 200, plain)
}

// collect_max: an answer over it is committed and passed on; when the engine
// dies then, the body is cut and nobody is asked again.
func TestCollectMax(t *testing.T) {
	t.Parallel()
	large := strings.Replace(plain, `"ab"`, `"`+strings.Repeat("a", 1<<20)+`"`, 1)
	t.Run("a larger answer passes", func(t *testing.T) {
		e := newEngine(t, func(x *exchange) { x.json(200, large) })
		g := serve(t, e, "collect_max: 64KiB")
		same(t, g.post(t, chat, plainChat), 200, large)
	})
	t.Run("20 MiB pass by default", func(t *testing.T) {
		huge := strings.Replace(plain, `"ab"`, `"`+strings.Repeat("a", 20<<20)+`"`, 1)
		e := newEngine(t, func(x *exchange) { x.json(200, huge) })
		same(t, serve(t, e, "").post(t, chat, plainChat), 200, huge)
	})
	t.Run("nothing is held back at 0", func(t *testing.T) {
		e := newEngine(t, func(x *exchange) { x.json(200, plain) })
		g := serve(t, e, "collect_max: 0")
		same(t, g.post(t, chat, plainChat), 200, plain)
	})
	for _, framing := range []string{"length", "chunked"} {
		t.Run("cut after the commit, "+framing, func(t *testing.T) {
			half := make(chan struct{})
			a := newEngine(t, func(x *exchange) {
				if framing == "length" {
					x.write(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(large), large[:512<<10]))
				} else {
					x.stream("Content-Type: application/json")
					x.chunk(large[:512<<10])
				}
				select {
				case <-half:
				case <-x.done:
				}
				x.reset()
			})
			g := start(t, "pools:\n"+pool("p", "collect_max: 64KiB", a, twin(t, a)))
			res, err := g.begin(t, "POST", chat, strings.NewReader(plainChat))
			if err != nil {
				t.Fatal(err)
			}
			first := make([]byte, 100<<10)
			within(t, "the committed part", func() error { _, err := io.ReadFull(res.Body, first); return err })
			close(half)
			rest := within(t, "the end", func() answer { return whole(res) })
			if rest.err == nil {
				t.Errorf("a cut answer of %d bytes ended cleanly", len(first)+len(rest.body))
			}
			if !strings.HasPrefix(large, string(first)+rest.body) {
				t.Error("the part is not the engine's")
			}
			if n := len(a.requests()); n != 1 {
				t.Errorf("%d attempts", n)
			}
		})
	}
	t.Run("cut before the commit", func(t *testing.T) {
		var failed atomic.Bool
		e := newEngine(t, func(x *exchange) {
			if failed.CompareAndSwap(false, true) {
				x.write(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(large), large[:32<<10]))
				x.fin()
				return
			}
			x.json(200, large)
		})
		g := start(t, "pools:\n"+pool("p", "collect_max: 64KiB", e, twin(t, e)))
		same(t, g.post(t, chat, plainChat), 200, large)
		if n := len(e.requests()); n != 2 {
			t.Errorf("%d attempts", n)
		}
	})
}
