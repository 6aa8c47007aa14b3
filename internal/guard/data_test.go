// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/guard/guardpb"
	"github.com/headgate/headgate/internal/guard/roster"
	"github.com/headgate/headgate/internal/lease"
)

// An answer's bytes and its framing are the engine's; what it does not say is not
// said for it. The one field that is added can't be forged.
func TestAnswersPassAsTheyAre(t *testing.T) {
	const none, chunked, closed = "none", "chunked", "closed"
	for name, row := range map[string]struct {
		method string
		answer string // the engine's
		close  bool   // the engine closes after it

		status  int
		header  http.Header // without the guard's own
		framing string      // or a number, that of Content-Length
		body    string
	}{
		"chunked": {
			method: "POST", answer: chunkedHead + "3\r\nabc\r\n5\r\nde\x00\xff\n\r\n0\r\n\r\n",
			status: 200, header: http.Header{"Content-Type": {"text/event-stream"}}, framing: chunked, body: "abcde\x00\xff\n",
		},
		"a length": {
			method: "POST", answer: "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd",
			status: 200, framing: "4", body: "abcd",
		},
		"no body": {
			method: "POST", answer: "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
			status: 200, framing: "0",
		},
		"until the close": {
			method: "POST", answer: "HTTP/1.1 200 OK\r\n\r\nabcd", close: true,
			status: 200, framing: closed, body: "abcd",
		},
		"HEAD": {
			method: "HEAD", answer: "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n",
			status: 200, framing: "4",
		},
		"204": {
			method: "POST", answer: "HTTP/1.1 204 No Content\r\n\r\n",
			status: 204, framing: none,
		},
		"an engine's refusal": {
			method: "POST", answer: "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nRetry-After: 7\r\n\r\n{}",
			status: 429, header: http.Header{"Retry-After": {"7"}}, framing: "2", body: "{}",
		},
		"fields of the engine's": {
			method: "POST",
			answer: "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Request-Id: 1\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n" +
				"Date: Mon, 01 Jan 2024 00:00:00 GMT\r\nServer: uvicorn\r\nContent-Encoding: gzip\r\n\r\n",
			status: 200, framing: "0",
			header: http.Header{
				"X-Request-Id": {"1"}, "Set-Cookie": {"a", "b"},
				"Date": {"Mon, 01 Jan 2024 00:00:00 GMT"}, "Server": {"uvicorn"}, "Content-Encoding": {"gzip"},
			},
		},
		"fields of one connection": {
			method: "POST",
			answer: "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n" +
				"Proxy-Connection: close\r\nUpgrade: h2c\r\n\r\n",
			status: 200, framing: "0",
		},
		"a forged origin": {
			method: "POST",
			answer: "HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\nHeadgate-Guard: origin=guard\r\nheadgate-reason: stale_epoch\r\n\r\n",
			status: 409, framing: "0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, withoutLease)
			for _, leased := range []bool{true, false} {
				var fields []string
				if leased {
					fields = []string{lease.Header + ": " + r.grant("req_1", 1).String()}
				}
				c := r.dial()
				c.send(row.method, fields...)
				x := r.engine.next()
				x.write(row.answer)
				if row.close {
					x.closeConn()
				}
				x.finish()
				res := c.head(row.method)
				body, err := io.ReadAll(res.Body)
				if err != nil || string(body) != row.body || res.StatusCode != row.status {
					t.Errorf("leased %v: got %d %q, %v", leased, res.StatusCode, body, err)
				}
				want := maps.Clone(row.header)
				if want == nil {
					want = http.Header{}
				}
				want["Headgate-Guard"] = []string{"origin=engine"}
				got := res.Header
				framing := none
				switch {
				case len(res.TransferEncoding) == 1:
					framing = res.TransferEncoding[0]
				case res.ContentLength >= 0 && got.Get("Content-Length") != "":
					framing = fmt.Sprint(res.ContentLength)
				case res.StatusCode != 204:
					framing = closed
				}
				got.Del("Content-Length")
				if row.close {
					got.Del("Connection")
				}
				if framing != row.framing {
					t.Errorf("leased %v: framed %s, want %s", leased, framing, row.framing)
				}
				if fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("leased %v: header\n%v\nwant\n%v", leased, got, want)
				}
			}
		})
	}
}

// Each chunk passes when it comes, not when there are more.
func TestChunksPassAtOnce(t *testing.T) {
	r := newRig(t)
	for i, answer := range []string{chunkedHead, "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n"} {
		c := r.post(r.grant("req_1", i+1))
		x := r.engine.next()
		x.write(answer)
		res := c.head("POST")
		for _, text := range []string{"ab", "cd", "ef"} {
			if answer == chunkedHead {
				x.chunk(text)
			} else {
				x.write(text)
			}
			reads(t, res.Body, text)
		}
		x.closeConn()
		x.finish()
	}
}

// What an engine did not end by its framing must not look whole to the gateway:
// the seed of every later decision is whether the answer was complete.
func TestCutAnswersStayCut(t *testing.T) {
	const reset, closed = true, false
	for name, row := range map[string]struct {
		answer string
		reset  bool
	}{
		"chunked, closed":           {chunkedHead + "3\r\nabc\r\n", closed},
		"chunked, reset":            {chunkedHead + "3\r\nabc\r\n", reset},
		"chunked, within a chunk":   {chunkedHead + "5\r\nabc", closed},
		"chunked, not in order":     {chunkedHead + "3\r\nabc\r\nxyz\r\n", closed},
		"a length, closed":          {"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc", closed},
		"a length, reset":           {"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc", reset},
		"until the close, reset":    {"HTTP/1.1 200 OK\r\n\r\nabc", reset},
		"before the body":           {chunkedHead, closed},
		"within the head":           {"HTTP/1.1 200 OK\r\nContent-Le", closed},
		"no head":                   {"", closed},
		"no head, reset":            {"", reset},
		"something that is no head": {"hello\r\n\r\n", closed},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			l, _ := r.attach(gateway, 1)
			g := r.grant("req_1", 1)
			c := r.post(g)
			x := r.engine.next()
			x.write(row.answer)
			head, part, hasBody := strings.Cut(row.answer, "\r\n\r\n")
			var body io.Reader
			if strings.HasPrefix(head, "HTTP") && hasBody {
				body = c.head("POST").Body
				if part != "" {
					reads(t, body, "abc") // a reset would throw away what was not read
				}
			} else {
				body = c.r
			}
			if row.reset {
				x.reset()
			} else {
				x.closeConn()
			}
			x.finish()
			rest, err := io.ReadAll(body)
			if len(rest) != 0 {
				t.Errorf("the gateway got %q", rest)
			}
			if err == nil && body != io.Reader(c.r) {
				t.Error("the cut answer looks whole")
			}
			if e := l.end(g.Key); e.Reason == guardpb.Reason_REASON_FINISHED || e.EngineStopped == guardpb.Stopped_STOPPED_NO {
				t.Errorf("told %v", e)
			}
			r.until("nothing is in flight", func() bool { return r.guard.Counts().InFlight == 0 })
		})
	}
}

// An answer that is framed by the close of its connection can be told from a cut
// one only by how the connection ends.
func TestCutIsAReset(t *testing.T) {
	r := newRig(t)
	c := r.post(r.grant("req_1", 1))
	x := r.engine.next()
	x.write("HTTP/1.1 200 OK\r\n\r\nabc")
	reads(t, c.head("POST").Body, "abc")
	x.reset()
	x.finish()
	if _, err := c.r.ReadByte(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v", err)
	}
}

// The end of an answer that was relayed whole is told, and proves no more than that.
func TestFinishedIsTold(t *testing.T) {
	r := newRig(t)
	l, _ := r.attach(gateway, 1)
	g := r.grant("req_1", 1)
	c := r.post(g)
	x := r.engine.next()
	x.write(chunkedHead + "3\r\nabc\r\n0\r\n\r\n")
	x.finish()
	if body, err := io.ReadAll(c.head("POST").Body); string(body) != "abc" || err != nil {
		t.Errorf("%q, %v", body, err)
	}
	e := l.end(g.Key)
	if e.Reason != guardpb.Reason_REASON_FINISHED || e.PublishedBytes != 3 || e.Gateway != gateway.ID || e.EngineStopped != guardpb.Stopped_STOPPED_YES {
		t.Errorf("told %v", e)
	}
}

// The engine gets the gateway's request and nothing of what is between gateway
// and guard.
func TestRequestsReachTheEngineUnchanged(t *testing.T) {
	r := newRig(t)
	c := r.post(r.grant("req_1", 2), "Headgate-Attempt: 2", "Content-Type: application/json", "X-Many: a", "X-Many: b",
		"Connection: X-Hop", "X-Hop: 1", "Te: trailers", "Idempotency-Key: k")
	x := r.engine.next()
	if x.Method != "POST" || x.RequestURI != "/v1/chat/completions?a=%2f" || string(x.body) != askBody || x.Host != "pool" {
		t.Errorf("the engine got %s %s for %s: %s", x.Method, x.RequestURI, x.Host, x.body)
	}
	if len(x.TransferEncoding) != 0 || x.ContentLength != int64(len(askBody)) {
		t.Errorf("framed %v, %d", x.TransferEncoding, x.ContentLength)
	}
	for name, want := range map[string]string{
		"Headgate-Attempt": "[2]", "Content-Type": "[application/json]", "X-Many": "[a b]",
		lease.Header: "[]", "Connection": "[close]", "X-Hop": "[]", "Te": "[]", "Idempotency-Key": "[k]",
	} {
		if got := fmt.Sprint(x.Header.Values(name)); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	x.write("HTTP/1.1 204 No Content\r\n\r\n")
	x.finish()
	c.head("POST")

	// The connection serves the next attempt too.
	c.send("POST", lease.Header+": "+r.grant("req_1", 3).String())
	x = r.engine.next()
	x.write("HTTP/1.1 204 No Content\r\n\r\n")
	x.finish()
	c.head("POST")
}

// Of what a guard refuses the engine has seen nothing.
func TestRefusals(t *testing.T) {
	other := func(edit func(g *lease.Grant)) func(*rig) []string {
		return func(r *rig) []string {
			g := r.grant("req_1", 2)
			edit(&g)
			return []string{lease.Header + ": " + g.String()}
		}
	}
	same := other(func(*lease.Grant) {})
	raw := func(value string) func(*rig) []string {
		return func(*rig) []string { return []string{lease.Header + ": " + value} }
	}
	// ran lets an attempt of the same request come and go.
	ran := func(n int) func(*rig) {
		return func(r *rig) {
			c := r.post(r.grant("req_1", n))
			x := r.engine.next()
			x.write("HTTP/1.1 204 No Content\r\n\r\n")
			x.finish()
			c.head("POST")
		}
	}
	for name, row := range map[string]struct {
		before func(*rig)
		lease  func(*rig) []string
		status int
		reason roster.Refusal
	}{
		"an older attempt":       {ran(3), same, 409, roster.StaleEpoch},
		"the same attempt":       {ran(2), same, 409, roster.Duplicate},
		"another life":           {nil, other(func(g *lease.Grant) { g.Guard.Start-- }), 412, roster.WrongIncarnation},
		"another boot":           {nil, other(func(g *lease.Grant) { g.Guard.Boot = "boot-2" }), 412, roster.WrongIncarnation},
		"another guard":          {nil, other(func(g *lease.Grant) { g.Guard.Guard = "h" }), 412, roster.WrongIncarnation},
		"a lease that is over":   {nil, other(func(g *lease.Grant) { g.NotAfter = g.NotAfter.Add(-ttl - 1) }), 410, roster.Expired},
		"a lease that ends now":  {nil, other(func(g *lease.Grant) { g.NotAfter = g.NotAfter.Add(-ttl) }), 410, roster.Expired},
		"an older life":          {func(r *rig) { r.attach(gateway, 1) }, other(func(g *lease.Grant) { g.Gateway.Generation-- }), 412, roster.StaleGeneration},
		"nonsense":               {nil, raw("yes"), 400, BadLease},
		"an empty lease":         {nil, raw(""), 400, BadLease},
		"two leases":             {nil, func(r *rig) []string { return append(same(r), same(r)...) }, 400, BadLease},
		"no lease":               {nil, func(*rig) []string { return nil }, 428, roster.Required},
		"a guard that is to end": {func(r *rig) { r.guard.Drain() }, same, 503, Draining},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			if row.before != nil {
				row.before(r)
			}
			was := r.engine.received.Load()
			c := r.dial()
			c.send("POST", row.lease(r)...)
			res := c.head("POST")
			if res.StatusCode != row.status || res.Header.Get("Headgate-Guard") != "origin=guard" || res.Header.Get("Headgate-Reason") != string(row.reason) {
				t.Errorf("got %d %v", res.StatusCode, res.Header)
			}
			if _, err := io.Copy(io.Discard, res.Body); err != nil {
				t.Error(err)
			}
			if n := r.engine.received.Load() - was; n != 0 {
				t.Errorf("the engine got %d requests", n)
			}
			if n := r.guard.Counts().Refused[row.reason]; n != 1 {
				t.Errorf("counted %d", n)
			}
			r.until("nothing is in flight", func() bool { return r.guard.Counts().InFlight == 0 })
		})
	}
}

// Without a lease nothing that could start work passes, unless that is wanted.
func TestWithoutLease(t *testing.T) {
	for _, row := range []struct {
		method  string
		require bool
		status  int
	}{
		{"GET", true, 200},
		{"HEAD", true, 200},
		{"POST", true, 428},
		{"PUT", true, 428},
		{"DELETE", true, 428},
		{"PATCH", true, 428},
		{"GET", false, 200},
		{"POST", false, 200},
	} {
		t.Run(fmt.Sprint(row.method, row.require), func(t *testing.T) {
			r := newRig(t, func(s *setup) { s.config.RequireLease = row.require })
			c := r.dial()
			c.send(row.method)
			if row.status == 200 {
				x := r.engine.next()
				x.write("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
				x.finish()
			}
			if res := c.head(row.method); res.StatusCode != row.status {
				t.Errorf("got %d %v", res.StatusCode, res.Header)
			}
			if n := r.engine.received.Load(); (n == 1) != (row.status == 200) {
				t.Errorf("the engine got %d requests", n)
			}
		})
	}
}

// An engine that refuses the connection has started nothing, and the gateway may
// know it; the attempt's epoch is taken all the same.
func TestUnreachableEngine(t *testing.T) {
	r := newRig(t)
	l, _ := r.attach(gateway, 1)
	r.engine.listener.Close()
	g := r.grant("req_1", 1)
	for _, want := range []string{"503 origin=guard engine_unreachable", "409 origin=guard duplicate_attempt"} {
		res := r.post(g).head("POST")
		got := fmt.Sprintf("%d %s %s", res.StatusCode, res.Header.Get("Headgate-Guard"), res.Header.Get("Headgate-Reason"))
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	if e := l.end(g.Key); e.EngineStopped != guardpb.Stopped_STOPPED_YES || e.PublishedBytes != 0 {
		t.Errorf("told %v", e)
	}
}

// A gateway that closes its connection cancels the engine's work, and the guard
// says that the attempt is over.
func TestGatewayClosesItsConnection(t *testing.T) {
	for name, begun := range map[string]bool{"before the answer": false, "within the answer": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			l, _ := r.attach(gateway, 1)
			g := r.grant("req_1", 1)
			c := r.post(g)
			x := r.engine.next()
			if begun {
				x.write(chunkedHead)
				x.chunk("abc")
				reads(t, c.head("POST").Body, "abc")
			}
			c.conn.Close()
			x.awaitGone()
			if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_CLOSED {
				t.Errorf("told %v", e)
			}
		})
	}
}

// A body that is too large is refused before the attempt starts.
func TestBodyBound(t *testing.T) {
	r := newRig(t, func(s *setup) { s.config.MaxBody = 4 })
	c := r.post(r.grant("req_1", 1))
	if res := c.head("POST"); res.StatusCode/100 != 4 || res.Header.Get("Headgate-Guard") != "origin=guard" {
		t.Errorf("got %d %v", res.StatusCode, res.Header)
	}
	if n := r.engine.received.Load(); n != 0 {
		t.Errorf("the engine got %d requests", n)
	}
}

// No chunk passes at the deadline or after it, and nobody has to say so.
func TestDeadlineIsTheGuardsOwn(t *testing.T) {
	r := newRig(t)
	l, _ := r.attach(gateway, 1)
	g := r.grant("req_1", 1)
	c := r.post(g)
	x := r.engine.next()
	x.write(chunkedHead)
	x.chunk("abc")
	res := c.head("POST")
	reads(t, res.Body, "abc")
	r.clock.advance(ttl - 1)
	x.chunk("def")
	reads(t, res.Body, "def")
	r.written(g.Key, 6) // until then the write's end is before the guard, and can be late
	r.clock.advance(1)
	x.chunk("ghi") // races with the guard's timer; neither lets it through
	if rest, err := io.ReadAll(res.Body); len(rest) != 0 || err == nil {
		t.Errorf("the gateway got %q, %v", rest, err)
	}
	x.awaitGone()
	if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_EXPIRED || e.PublishedBytes != 6 {
		t.Errorf("told %v", e)
	}
	if n := r.guard.Counts().LateWrites; n != 0 {
		t.Errorf("counted %d late writes", n)
	}
	r.until("nothing is in flight", func() bool { return r.guard.Counts().InFlight == 0 })
}

// An engine that says nothing, before its head or after, is let go at the deadline
// all the same.
func TestDeadlineOfASilentEngine(t *testing.T) {
	for name, begun := range map[string]bool{"before the head": false, "after it": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			l, _ := r.attach(gateway, 1)
			g := r.grant("req_1", 1)
			c := r.post(g)
			x := r.engine.next()
			if begun {
				x.write(chunkedHead)
				c.head("POST")
			}
			r.clock.advance(ttl)
			x.awaitGone()
			if rest, err := io.ReadAll(c.r); len(rest) != 0 {
				t.Errorf("the gateway got %q, %v", rest, err)
			}
			if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_EXPIRED {
				t.Errorf("told %v", e)
			}
		})
	}
}

// A renewal extends a lease; one that comes after its end revives nothing.
func TestRenewals(t *testing.T) {
	r := newRig(t)
	l, _ := r.attach(gateway, 1)
	g := r.grant("req_1", 1)
	c := r.post(g)
	x := r.engine.next()
	x.write(chunkedHead)
	res := c.head("POST")
	for range 3 {
		r.clock.advance(ttl / 2)
		g.NotAfter = r.grant("req_1", 1).NotAfter
		l.say(renew(g))
		l.sync()
		x.chunk("abc")
		reads(t, res.Body, "abc")
	}
	r.clock.advance(ttl)
	g.NotAfter = r.grant("req_1", 1).NotAfter
	l.say(renew(g))
	x.awaitGone()
	if rest, err := io.ReadAll(res.Body); len(rest) != 0 || err == nil {
		t.Errorf("the gateway got %q, %v", rest, err)
	}
	if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_EXPIRED || e.PublishedBytes != 9 {
		t.Errorf("told %v", e)
	}
}

// pausing is a writer whose process is stopped between the check of a chunk and
// its write.
type pausing struct {
	http.ResponseWriter
	pause func()
}

func (p pausing) Unwrap() http.ResponseWriter { return p.ResponseWriter }

func (p pausing) Write(b []byte) (int, error) {
	p.pause()
	return p.ResponseWriter.Write(b)
}

// A pause between check and write can't be prevented. It is noticed, counted,
// told, and the attempt is over.
func TestLateWrites(t *testing.T) {
	var r *rig
	r = newRig(t, func(s *setup) {
		s.writer = func(w http.ResponseWriter) http.ResponseWriter {
			return pausing{w, func() { r.clock.advance(ttl) }}
		}
	})
	l, _ := r.attach(gateway, 1)
	g := r.grant("req_1", 1)
	c := r.post(g)
	x := r.engine.next()
	x.write(chunkedHead)
	x.chunk("abc")
	_, _ = io.ReadAll(c.r)
	x.awaitGone()
	if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_EXPIRED {
		t.Errorf("told %v", e)
	}
	l.sync()
	if n := r.guard.Counts(); n.LateWrites != 1 || l.beat.LateWrites != 1 {
		t.Errorf("counted %+v, told %v", n, l.beat)
	}
}

// An answer of which the gateway reads nothing holds up neither its revoke nor
// its deadline.
func TestBlockedWrites(t *testing.T) {
	for name, end := range map[string]func(*rig, *line, lease.Grant){
		"revoked":       func(_ *rig, l *line, g lease.Grant) { l.say(revoke(g)) },
		"expired":       func(r *rig, _ *line, _ lease.Grant) { r.clock.advance(ttl) },
		"engine exited": func(r *rig, _ *line, _ lease.Grant) { r.guard.EngineExited(true) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			l, _ := r.attach(gateway, 1)
			g := r.grant("req_1", 1)
			c := r.post(g)
			x := r.engine.next()
			x.write(chunkedHead)
			c.head("POST")
			// The engine can write no more once everything between it and the
			// gateway is full.
			chunk := fmt.Sprintf("%x\r\n%s\r\n", 1<<16, strings.Repeat("x", 1<<16))
			for blocked := false; !blocked; {
				_ = x.conn.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
				_, err := io.WriteString(x.conn, chunk)
				blocked = err != nil
			}
			end(r, l, g)
			e := l.end(g.Key)
			// Nothing is published after the acknowledgement: what the gateway can
			// still read was in the kernel by then, and the connection is cut.
			got, err := io.Copy(io.Discard, c.r)
			if got > e.PublishedBytes+e.PublishedBytes/16+(1<<17) {
				t.Errorf("read %d bytes, told of %d (%v)", got, e.PublishedBytes, err)
			}
			x.closeConn()
			r.until("nothing is in flight", func() bool { return r.guard.Counts().InFlight == 0 })
		})
	}
}

// What ends an answer is published under the lease too: once it is over or was
// revoked, the answer must not become whole.
func TestTheEndOfAnAnswerIsChecked(t *testing.T) {
	r := newRig(t)
	l, _ := r.attach(gateway, 1)
	g := r.grant("req_1", 1)
	_, x, body := r.begin(g)
	r.clock.advance(ttl)
	x.write("0\r\n\r\n")
	if rest, err := io.ReadAll(body); len(rest) != 0 || err == nil {
		t.Errorf("the gateway got %q, %v", rest, err)
	}
	if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_EXPIRED {
		t.Errorf("told %v", e)
	}
}

// stuck is a writer that gives up only when the test lets it.
type stuck struct {
	http.ResponseWriter
	writing, release chan struct{}
}

func (s stuck) Unwrap() http.ResponseWriter { return s.ResponseWriter }

func (s stuck) Write([]byte) (int, error) {
	close(s.writing)
	<-s.release
	return 3, nil
}

// A session that begins while a write is under way is not told that its attempt
// has ended: an end says that nothing more is published.
func TestListWaitsForWrites(t *testing.T) {
	writing, release := make(chan struct{}), make(chan struct{})
	r := newRig(t, func(s *setup) {
		s.writer = func(w http.ResponseWriter) http.ResponseWriter { return stuck{w, writing, release} }
	})
	g := r.grant("req_1", 1)
	r.post(g)
	x := r.engine.next()
	x.write(chunkedHead)
	x.chunk("abc")
	<-writing
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		r.guard.EngineExited(true)
	}()
	r.until("the attempt is over", func() bool {
		r.guard.mu.Lock()
		defer r.guard.mu.Unlock()
		return r.guard.process.GetExited()
	})
	l := r.open(r.stub())
	l.say(hello(gateway, 1))
	r.until("the session has begun, or waits", func() bool {
		if r.guard.settling.TryRLock() {
			r.guard.settling.RUnlock()
			return r.guard.Counts().Sessions != 0
		}
		return true
	})
	if n := r.guard.Counts().Sessions; n != 0 {
		t.Error("the list was made while a write was under way")
	}
	close(release)
	<-exited
	if list := l.begun(); len(list) != 1 || list[0].End.GetPublishedBytes() != 3 {
		t.Errorf("listed %v", list)
	}
}
