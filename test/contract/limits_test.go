// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// timed gets one answer under these timeouts, and how long it took.
func timed(t *testing.T, timeouts, body string, respond func(*exchange)) (answer, time.Duration, *engine) {
	t.Helper()
	e := newEngine(t, respond)
	g := serve(t, e, "timeouts: {"+timeouts+"}")
	begun := time.Now()
	a := g.post(t, chat, body)
	return a, time.Since(begun), e
}

// LIM-3: the three limits of a stream are separate. Where one must strike, the
// others are far away.
func TestFirstOutputLimit(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]func(*exchange){
		"nothing at all": func(*exchange) {},
		"a head":         func(x *exchange) { x.stream() },
		"a role":         func(x *exchange) { x.stream(); x.chunk(role) },
		"comments without end": func(x *exchange) {
			x.stream()
			for x.chunk(": still here\n\n") {
				x.sleep(20 * time.Millisecond)
				select {
				case <-x.done:
					return
				default:
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			gone := make(chan bool, 1)
			a, took, e := timed(t, "first_output: 400ms, idle: 60s, total: 60s", streamed, func(x *exchange) {
				before(x)
				gone <- x.gone()
			})
			a.refusal(t, 504, "upstream_timeout", true)
			if took < 400*time.Millisecond {
				t.Errorf("after %v already", took)
			}
			if !receive(t, "the engine is told", gone) {
				t.Error("the engine's connection stays open")
			}
			if n := len(e.requests()); n != 1 {
				t.Errorf("%d attempts: latency is never a reason for a second one", n)
			}
		})
	}
}

func TestSlowFirstOutputIsNoIdleness(t *testing.T) {
	t.Parallel()
	for _, begun := range []string{"", "head", "role"} {
		t.Run("after "+begun, func(t *testing.T) {
			t.Parallel()
			a, _, _ := timed(t, "first_output: 60s, idle: 200ms, total: 60s", streamed, func(x *exchange) {
				if begun != "" {
					x.stream()
				}
				if begun == "role" {
					x.chunk(role)
				}
				x.sleep(700 * time.Millisecond)
				if begun == "" {
					x.stream()
				}
				if begun != "role" {
					x.chunk(role)
				}
				x.chunk(delta("a") + finish + done)
				x.end()
			})
			same(t, a, 200, role+delta("a")+finish+done)
		})
	}
}

func TestIdleLimitEndsAStreamWithTheErrorEvent(t *testing.T) {
	t.Parallel()
	gone := make(chan bool, 1)
	a, took, _ := timed(t, "first_output: 60s, idle: 400ms, total: 60s", streamed, func(x *exchange) {
		x.stream()
		x.chunk(role + delta("a"))
		gone <- x.gone()
	})
	if got := a.interrupted(t); got != role+delta("a") || took < 400*time.Millisecond {
		t.Errorf("after %v: %q", took, got)
	}
	if !receive(t, "the engine is told", gone) {
		t.Error("the engine's connection stays open")
	}
}

// LIM-7: any byte of the engine ends idleness, comments and half events too.
func TestAnyByteEndsIdleness(t *testing.T) {
	t.Parallel()
	for name, b := range map[string]string{"comments": ": still here\n\n", "half an event": " "} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var sent strings.Builder
			a, _, _ := timed(t, "first_output: 60s, idle: 1s, total: 60s", streamed, func(x *exchange) {
				send := func(s string) { sent.WriteString(s); x.chunk(s) }
				x.stream()
				send(role + delta("a"))
				last := delta("b")
				if b == " " {
					send(last[:5]) // data:
					last = last[5:]
				}
				for range 12 {
					x.sleep(150 * time.Millisecond)
					send(b)
				}
				send(last + finish + done)
				x.end()
			})
			same(t, a, 200, sent.String())
		})
	}
}

// LIM-7: a client that is slow to read is no idle engine.
func TestSlowReaderIsNoIdleEngine(t *testing.T) {
	t.Parallel()
	text := role + strings.Repeat(delta(strings.Repeat("x", 64<<10)), 400) + finish + done // 25 MiB, more than sockets hold
	e := newEngine(t, func(x *exchange) {
		x.stream()
		for _, ev := range strings.SplitAfter(text, "\n\n") {
			if ev != "" {
				x.chunk(ev)
			}
		}
		x.end()
	})
	// Buffers that are full make the kernel drop and resend, which takes some
	// hundred milliseconds now and then.
	g := serve(t, e, "timeouts: {idle: 1500ms}")
	res, err := g.begin(t, "POST", chat, strings.NewReader(streamed))
	if err != nil {
		t.Fatal(err)
	}
	first := within(t, "the first delta", func() string { s, _ := readUntil(res.Body, "xxx"); return s })
	<-time.After(3 * time.Second) // the client's pause is the stimulus
	a := within(t, "the rest", func() answer { return whole(res) })
	a.body = first + a.body
	same(t, a, 200, text)
}

func TestTotalLimit(t *testing.T) {
	t.Parallel()
	t.Run("before output", func(t *testing.T) {
		t.Parallel()
		gone := make(chan bool, 1)
		a, took, _ := timed(t, "total: 400ms", streamed, func(x *exchange) { gone <- x.gone() })
		a.refusal(t, 504, "upstream_timeout", true)
		if took < 400*time.Millisecond || !receive(t, "the engine is told", gone) {
			t.Errorf("after %v", took)
		}
	})
	t.Run("in the stream", func(t *testing.T) {
		t.Parallel()
		a, took, _ := timed(t, "total: 500ms", streamed, func(x *exchange) {
			x.stream()
			x.chunk(role)
			for x.chunk(delta("a")) {
				x.sleep(20 * time.Millisecond)
				select {
				case <-x.done:
					return
				default:
				}
			}
			x.ended = true
		})
		a.interrupted(t)
		if took < 500*time.Millisecond {
			t.Errorf("after %v", took)
		}
	})
	t.Run("LIM-4 not streamed", func(t *testing.T) {
		t.Parallel()
		gone := make(chan bool, 1)
		a, took, e := timed(t, "total: 400ms", plainChat, func(x *exchange) { gone <- x.gone() })
		a.refusal(t, 504, "upstream_timeout", true)
		if took < 400*time.Millisecond || !receive(t, "the engine is told", gone) {
			t.Errorf("after %v", took)
		}
		if n := len(e.requests()); n != 1 {
			t.Errorf("%d attempts", n)
		}
	})
	t.Run("not streamed, half a body", func(t *testing.T) {
		t.Parallel()
		a, _, _ := timed(t, "total: 400ms", plainChat, func(x *exchange) {
			x.write(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(plain), plain[:50]))
			x.gone()
		})
		a.refusal(t, 504, "upstream_timeout", true)
	})
}

// LIM-4: only the total limit holds for an answer that is not streamed.
func TestStreamLimitsDoNotHoldForPlainAnswers(t *testing.T) {
	t.Parallel()
	a, _, _ := timed(t, "first_output: 150ms, idle: 150ms, total: 60s", plainChat, func(x *exchange) {
		x.sleep(500 * time.Millisecond)
		x.write(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(plain), plain[:50]))
		x.sleep(500 * time.Millisecond)
		x.write(plain[50:])
	})
	same(t, a, 200, plain)
}

// "0s turns one off".
func TestZeroTurnsALimitOff(t *testing.T) {
	t.Parallel()
	a, _, _ := timed(t, "connect: 0s, first_output: 0s, idle: 0s, total: 0s, after_finish: 0s", streamed, func(x *exchange) {
		x.sleep(200 * time.Millisecond)
		x.stream()
		x.chunk(role + delta("a"))
		x.sleep(200 * time.Millisecond)
		x.chunk(finish)
		x.sleep(200 * time.Millisecond)
		x.chunk(done)
		x.end()
	})
	same(t, a, 200, role+delta("a")+finish+done)
}

// STR-5: after the finish reason silence is an end, not a failure.
func TestSilenceAfterTheFinishIsAnEnd(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]func(*exchange){
		"silence": func(*exchange) {},
		"comments": func(x *exchange) {
			for x.chunk(": still here\n\n") {
				x.sleep(50 * time.Millisecond)
				select {
				case <-x.done:
					return
				default:
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			gone := make(chan bool, 1)
			a, took, _ := timed(t, "after_finish: 300ms, idle: 60s, total: 60s", streamed, func(x *exchange) {
				x.stream()
				x.chunk(role + delta("a") + finish)
				then(x)
				gone <- x.gone()
			})
			text := role + delta("a") + finish
			if a.status != 200 || a.err != nil || !strings.HasPrefix(a.body, text) || !strings.HasSuffix(a.body, done) || strings.Contains(a.body, "error") {
				t.Errorf("%d %v %q", a.status, a.err, a.body)
			}
			if took < 300*time.Millisecond {
				t.Errorf("after %v already", took)
			}
			if !receive(t, "the engine's connection ends", gone) {
				t.Error("the engine's connection stays open")
			}
		})
	}
	t.Run("usage in time", func(t *testing.T) {
		t.Parallel()
		asked := strings.Replace(streamed, `"stream":true`, `"stream":true,"stream_options":{"include_usage":true}`, 1)
		a, _, _ := timed(t, "after_finish: 1s", asked, func(x *exchange) {
			x.stream()
			x.chunk(role + delta("a") + finish)
			x.sleep(200 * time.Millisecond)
			x.chunk(usage)
			x.sleep(200 * time.Millisecond)
			x.chunk(done)
			x.end()
		})
		same(t, a, 200, role+delta("a")+finish+usage+done)
	})
}

// CAN-1, CAN-2: the engine is told when the client leaves, whatever was sent
// so far, and nobody is asked again.
func TestClientThatLeavesCancelsTheEngine(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body  string
		begin func(*exchange)
	}{
		"plain, no head":           {plainChat, func(*exchange) {}},
		"plain, half a body":       {plainChat, func(x *exchange) { x.write("HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{") }},
		"stream, no head":          {streamed, func(*exchange) {}},
		"stream, a head":           {streamed, func(x *exchange) { x.stream() }},
		"stream, a role":           {streamed, func(x *exchange) { x.stream(); x.chunk(role) }},
		"stream, a delta":          {streamed, func(x *exchange) { x.stream(); x.chunk(role + delta("a")) }},
		"stream, after the finish": {streamed, func(x *exchange) { x.stream(); x.chunk(role + delta("a") + finish) }},
	} {
		for _, way := range []string{"FIN", "RST", "half-close", "pipelined bytes, then FIN"} {
			t.Run(name+", "+way, func(t *testing.T) {
				begun, gone := make(chan struct{}, 9), make(chan bool, 9)
				e := newEngine(t, func(x *exchange) {
					c.begin(x)
					begun <- struct{}{}
					gone <- x.gone()
				})
				g := start(t, "pools:\n"+pool("p", "timeouts: {after_finish: 60s}", e, twin(t, e)))
				w := g.dial(t)
				w.send(rawPost(chat, c.body))
				receive(t, "the request at the engine", begun)
				tcp := w.Conn.(interface {
					CloseWrite() error
					SetLinger(int) error
				})
				switch way {
				case "FIN":
					w.Close()
				case "RST":
					_ = tcp.SetLinger(0)
					w.Close()
				case "half-close":
					_ = tcp.CloseWrite()
				default:
					w.send("GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n")
					w.Close()
				}
				if !receive(t, "the engine is told", gone) {
					t.Error("the engine's connection stays open")
				}
				w.Close()
				eventually(t, "nothing in flight", func() bool { return g.inflight(t) == 0 })
				if n := len(e.requests()); n != 1 {
					t.Errorf("%d attempts", n)
				}
			})
		}
	}
}

// LIM-6: a client that reads nothing holds the engine back, not memory.
func TestReaderThatStopsHoldsTheEngineBack(t *testing.T) {
	t.Parallel()
	const total = 400 << 20
	big := delta(strings.Repeat("x", 1<<20))
	written := make(chan int, 1)
	blocked := make(chan struct{})
	e := newEngine(t, func(x *exchange) {
		x.stream()
		x.chunk(role)
		n := 0
		for n < total {
			_ = x.SetWriteDeadline(time.Now().Add(time.Second)) // a second without room is held back
			if !x.chunk(big) {
				break
			}
			n += len(big)
		}
		written <- n
		x.ended = true
		<-blocked
	})
	g := serve(t, e, "")
	w := g.dial(t)
	w.send(rawPost(chat, streamed))
	if n := receive(t, "the engine is held back", written); n >= 64<<20 {
		t.Errorf("the engine could write %d MiB to a client that reads nothing", n>>20)
	}
	g2 := within(t, "another request", func() string { return g.get(t, "/healthz").body })
	if g2 == "" {
		t.Error("no answer for others")
	}
	w.Close()
	close(blocked)
}

// EPT-6: an engine that accepts nothing more is found out by the connect limit
// or refuses at once; the client gets its answer from the other one.
func TestEngineThatIsNotThereIsNoDelay(t *testing.T) {
	t.Parallel()
	dead := newEngine(t, nil)
	dead.ln.Close()
	e := newEngine(t, nil)
	g := start(t, "pools:\n"+pool("p", "timeouts: {connect: 1s}", dead, e))
	for range 10 {
		same(t, g.post(t, chat, plainChat), http.StatusOK, plain)
	}
	res, err := g.begin(t, "POST", chat, strings.NewReader(streamed))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(res.Body); err != nil || !strings.HasSuffix(string(b), done) {
		t.Errorf("%v %q", err, b)
	}
	res.Body.Close()
}
