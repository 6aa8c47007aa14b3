// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/headgate/headgate/test/real"
)

// both runs a test for streamed and for whole answers.
func both(t *testing.T, test func(t *testing.T, stream bool)) {
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprintf("stream=%v", stream), func(t *testing.T) { test(t, stream) })
	}
}

// The engine reads a long prompt when it is killed: not one byte of an answer's
// body has left it. llama-server sends 200 and the head of a stream before it
// begins to read, which proves nothing and must bind nobody.
func TestKillDuringPrefill(t *testing.T) {
	both(t, func(t *testing.T, stream bool) {
		r := newRig(t, "slow")
		wait := r.start(ask{stream: stream, usage: true, tokens: 20, prompt: longPrompt})
		first, other := r.busy()
		if stream {
			r.must(first.Conns()[0].AwaitBytes(r.ctx, real.ToGateway, func(b []byte) bool {
				return bytes.HasPrefix(b, []byte("HTTP/1.1 200 OK\r\n"))
			}))
		}
		first.kill()
		last := r.wantWhole(wait(), 2)
		if died := first.Posts(); len(died) != 1 || len(died[0].Body) != 0 {
			t.Errorf("%s was killed too late: %d POSTs, it answered %d %q", first.Name, len(died), died[0].Status, died[0].Body)
		}
		if last.Relay != other.Relay || len(r.posts()) != 2 {
			t.Errorf("%d POSTs reached the fleet, the last one %s", len(r.posts()), last.Relay.Addr())
		}
		r.wantTasks(other, 1, 20)
	})
}

// The engine has computed its first tokens, written them to its socket and
// then dies; nobody has read them.
func TestTokenComputedAndNotSent(t *testing.T) {
	for _, c := range []struct {
		name   string
		end    real.Ending
		pass   func([]byte) int // what of the answer still gets through
		usage  bool
		before int // bytes of the body that the gateway saw
	}{
		{name: "FIN", end: real.FIN},
		{name: "RST, with usage", end: real.RST, usage: true},
		{name: "FIN after the head", end: real.FIN, pass: throughHead(0)},
		{name: "RST within the first event", end: real.RST, pass: throughHead(60), before: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, "slow")
			h := r.hold(&real.Hold{Direction: real.ToGateway, Pass: c.pass})
			wait := r.start(ask{stream: true, usage: c.usage, tokens: 200})
			conn, err := h.Caught(r.ctx)
			r.must(err)
			r.must(conn.AwaitBytes(r.ctx, real.ToGateway, hasTokens(3)))
			first, other := r.holding(conn)
			first.kill()
			conn.Cut(c.end)

			got := wait()
			last := r.wantWhole(got, 2)
			r.wantTasks(other, 1, 200)
			lost := first.Posts()[0]
			if events, _ := real.Events(lost.Body); real.Text(events) == "" {
				t.Fatalf("%s had computed nothing: %q", first.Name, lost.Body)
			} else if bytes.Contains(got.body, []byte(events[0].ID)) {
				t.Errorf("a scrap of %s reached the client", first.Name)
			}
			if len(lost.Passed) < c.before || last.Relay != other.Relay {
				t.Errorf("the gateway saw %q of the lost answer", lost.Passed)
			}
		})
	}
}

// throughHead is a hold's Pass that lets the head of an answer go by, and some
// bytes of the body.
func throughHead(more int) func([]byte) int {
	return func(b []byte) int {
		head, _, ok := bytes.Cut(b, []byte("\r\n\r\n"))
		if !ok {
			return len(b)
		}
		return len(head) + 4 + more
	}
}

// The first delta is out when the engine is killed. Nothing is held back: what
// it had sent by then is what the client must have.
func TestKillAfterFirstDelta(t *testing.T) {
	for _, usage := range []bool{false, true} {
		t.Run(fmt.Sprintf("usage=%v", usage), func(t *testing.T) {
			r := newRig(t, "slow")
			got := r.open(r.ctx, ask{stream: true, usage: usage, tokens: 1500})
			got.readUntil(hasTokens(1))
			first, other := r.busy()
			first.kill()
			got.rest()
			r.wantInterrupted(got)
			r.wantUntouched(other)
		})
	}
}

// The same at exact places, within events too: part of an event is never seen.
func TestKillAtExactPlaces(t *testing.T) {
	for _, c := range []struct {
		name   string
		end    real.Ending
		tokens int // that get through
		more   int // bytes that follow them
	}{
		{"FIN after one token", real.FIN, 1, 0},
		{"RST after two tokens", real.RST, 2, 0},
		{"FIN within a chunk's length", real.FIN, 3, 3},
		{"RST within an event", real.RST, 3, 40},
		{"FIN before an event's last byte", real.FIN, 5, 216},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, "slow")
			h := r.hold(&real.Hold{Direction: real.ToGateway, Pass: throughTokens(c.tokens, c.more)})
			got := r.open(r.ctx, ask{stream: true, tokens: 1500})
			conn, err := h.Caught(r.ctx)
			r.must(err)
			// The engine is further than what gets through.
			r.must(conn.AwaitBytes(r.ctx, real.ToGateway, hasTokens(c.tokens+2)))
			got.readUntil(hasTokens(c.tokens))
			first, other := r.holding(conn)
			first.kill()
			conn.Cut(c.end)
			got.rest()
			only := r.wantInterrupted(got)
			if sent, _ := real.Events(only.Body); len(sent) <= c.tokens {
				t.Errorf("%s had sent %d events: none was held back", first.Name, len(sent))
			}
			r.wantUntouched(other)
		})
	}
}

// A whole answer is held until it is whole: a death in the middle of it, of the
// work or of the body, is still before the first byte.
func TestKillInTheMiddleOfAWholeAnswer(t *testing.T) {
	t.Run("of the work", func(t *testing.T) {
		r := newRig(t, "slow")
		wait := r.start(ask{tokens: 400})
		first, other := r.busy()
		for decoded := 0; decoded < 10; {
			slots, err := first.Slots() // waits for a token by itself
			r.must(err)
			decoded = 0
			for _, s := range slots {
				if s.Busy && len(s.Next) > 0 {
					decoded = s.Next[0].Decoded
				}
			}
		}
		first.kill()
		r.wantWhole(wait(), 2)
		r.wantTasks(other, 1, 400)
	})
	t.Run("of the body", func(t *testing.T) {
		r := newRig(t, "slow")
		h := r.hold(&real.Hold{Direction: real.ToGateway, Pass: throughHead(100)})
		wait := r.start(ask{tokens: 50})
		conn, err := h.Caught(r.ctx)
		r.must(err)
		first, other := r.holding(conn)
		r.must(first.AwaitReleases(r.ctx, 1))
		first.kill()
		conn.Cut(real.FIN)
		r.wantWhole(wait(), 2)
		if lost := first.Posts()[0]; len(lost.Passed) == 0 || lost.Whole && len(lost.Passed) == len(lost.Body) {
			t.Errorf("the gateway saw %d bytes of %d", len(lost.Passed), len(lost.Body))
		}
		r.wantTasks(other, 1, 50)
	})
}

// The request is lost on its way: the engine never begins it.
func TestRequestLostOnTheWay(t *testing.T) {
	both(t, func(t *testing.T, stream bool) {
		r := newRig(t, "fast")
		h := r.hold(&real.Hold{Direction: real.ToEngine})
		wait := r.start(ask{stream: stream, tokens: 20})
		conn, err := h.Caught(r.ctx)
		r.must(err)
		r.must(conn.AwaitBytes(r.ctx, real.ToEngine, func(b []byte) bool { return bytes.HasSuffix(b, []byte("}")) }))
		first, other := r.holding(conn)
		conn.Cut(real.RST)
		r.wantWhole(wait(), 2)
		r.wantTasks(first, 0, 0)
		r.wantTasks(other, 1, 20)
	})
}

// An idle connection of a plain answer is closed by the engine at the moment at
// which the gateway uses it again: the request is sent once more, and the
// engine works once.
func TestStaleConnection(t *testing.T) {
	r := newRig(t, "fast")
	// One engine only, so that the connection is used again.
	r.replicas[1].kill()
	r.wantWhole(r.do(ask{tokens: 5}), 1)
	before := r.replicas[0].Tasks()

	h := r.hold(&real.Hold{Direction: real.ToEngine})
	wait := r.start(ask{tokens: 6})
	conn, err := h.Caught(r.ctx)
	r.must(err)
	kept := conn == r.replicas[0].Conns()[0]
	conn.Cut(real.FIN)
	if !kept {
		t.Fatal("the gateway did not use the connection of the plain answer again")
	}
	got := wait()
	if got.status != 200 || !strings.Contains(string(got.body), `"finish_reason":"length"`) {
		t.Fatalf("status %d: %s", got.status, got.body)
	}
	list := r.of(got.request)
	if len(list) != 2 || list[0].Status != 0 || string(list[1].Body) != string(got.body) {
		t.Errorf("%d POSTs for %s: %+v", len(list), got.request, list)
	}
	if n := r.replicas[0].Tasks() - before; n != 1 {
		t.Errorf("the engine began %d requests, want 1", n)
	}
}
