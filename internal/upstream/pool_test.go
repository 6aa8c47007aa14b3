// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestRequestBytes(t *testing.T) {
	seen := make(chan string, 1)
	addr := engine(t, func(p *peer) {
		var b strings.Builder
		for {
			line, err := p.br.ReadString('\n')
			b.WriteString(line)
			if line == "\r\n" || err != nil {
				break
			}
		}
		rest := make([]byte, p.br.Buffered())
		io.ReadFull(p.br, rest)
		seen <- b.String() + string(rest)
		p.say(reply(""))
	})
	host := strings.TrimPrefix(addr, "http://")
	noKeep := func(cfg *Config) { cfg.IdleMax = -1 }
	for _, tt := range []struct {
		pool *Pool
		req  *Request
		want string
	}{
		{pool(t, addr), &Request{Method: "GET", Target: "/v1/models?x=1", Header: []Field{{"b", "2"}, {"A", "1"}, {"A", ""}}},
			"GET /v1/models?x=1 HTTP/1.1\r\nHost: " + host + "\r\nb: 2\r\nA: 1\r\nA: \r\n\r\n"},
		{pool(t, addr), post("{", "", "}"),
			"POST /v1/chat/completions HTTP/1.1\r\nHost: " + host + "\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"},
		{pool(t, addr, noKeep), &Request{Method: "POST", Target: "/", Host: "engine.test"},
			"POST / HTTP/1.1\r\nHost: engine.test\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"},
	} {
		mustDo(t, tt.pool, tt.req)
		if got := <-seen; got != tt.want {
			t.Errorf("got  %q\nwant %q", got, tt.want)
		}
		tt.pool.Close()
	}
}

func TestNewRefusesWhatIsNotAnEndpoint(t *testing.T) {
	for _, s := range []string{"", "engine:8000", "ftp://engine", "http://", "http://u:p@engine", "http://engine/v1", "http://engine?x=1"} {
		u, err := url.Parse(s)
		if err != nil {
			u = nil
		}
		if _, err := New(Config{URL: u}); err == nil {
			t.Errorf("%q accepted", s)
		}
	}
	for in, want := range map[string][2]string{
		"http://engine":           {"engine:80", "engine"},
		"https://engine/":         {"engine:443", "engine"},
		"http://[::1]:8000":       {"[::1]:8000", "[::1]:8000"},
		"http://[fe80::1%25eth0]": {"[fe80::1%eth0]:80", "[fe80::1]"},
	} {
		u, err := url.Parse(in)
		if err != nil {
			t.Fatal(err)
		}
		p, err := New(Config{URL: u})
		if err != nil || p.addr != want[0] || p.host != want[1] {
			t.Errorf("%s: %v, addr %q, host %q", in, err, p.addr, p.host)
		}
	}
}

func TestConnectionsAreReusedLastFirst(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		for req, _ := p.request(); req != nil; req, _ = p.request() {
			p.say(reply(itoa(p.n)))
		}
	}), func(cfg *Config) { cfg.IdleMax = 2 })

	// Three at once, ended in the order 0, 1, 2: the last finds no room.
	var running []*Response
	for range 3 {
		resp, end := p.Do(t.Context(), post("{}"))
		if end != nil {
			t.Fatal(end)
		}
		running = append(running, resp)
	}
	if s := p.Stats(); s.Active != 3 || s.Dialed != 3 {
		t.Fatalf("%+v", s)
	}
	var names []string
	for _, resp := range running {
		body, _ := io.ReadAll(resp)
		names = append(names, string(body))
	}
	if s := p.Stats(); s.Idle != 2 || s.Active != 0 {
		t.Fatalf("%+v", s)
	}
	if resp, body := mustDo(t, p, post("{}")); body != names[1] || !resp.Reused {
		t.Errorf("connection %s, want %s", body, names[1])
	}
	fresh := post("{}")
	fresh.Fresh = true
	if resp, _ := mustDo(t, p, fresh); resp.Reused || p.Stats().Dialed != 4 {
		t.Errorf("Fresh was reused, %+v", p.Stats())
	}
}

func TestConnectionsThatEndAreNotKept(t *testing.T) {
	for _, answer := range []string{
		"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
		"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi" + reply("forged"),
		stream("hi") + "x",
	} {
		p := pool(t, engine(t, func(p *peer) {
			if req, _ := p.request(); req != nil {
				p.say(answer)
				p.untilClosed()
			}
		}))
		if _, body := mustDo(t, p, post("{}")); body != "hi" {
			t.Errorf("body %q", body)
		}
		if s := p.Stats(); s.Idle != 0 {
			t.Errorf("%q: kept", answer)
		}
	}
}

// Bytes that come while a connection is idle answer no request.
func TestSpokenOnConnectionsAreDropped(t *testing.T) {
	proceed, said := make(chan struct{}), make(chan struct{})
	p := pool(t, engine(t, func(p *peer) {
		p.request()
		p.say(reply("first"))
		if p.n == 0 {
			<-proceed
			p.say(reply("forged"))
			close(said)
		}
		p.untilClosed()
	}))
	mustDo(t, p, post("{}"))
	close(proceed)
	await(t, "forged answer", said)
	if resp, body := mustDo(t, p, post("{}")); resp.Reused || body != "first" || p.Stats().Dropped != 1 {
		t.Errorf("reused %t, body %q, %+v", resp.Reused, body, p.Stats())
	}
}

func TestCloseKeepsWhatHasArrivedWhole(t *testing.T) {
	for _, tt := range []struct {
		answer string
		want   Cause
		idle   int
	}{
		{stream("data: x\n\n", "data: [DONE]\n\n"), Complete, 1},
		{strings.TrimSuffix(stream("data: x\n\n"), "\r\n"), Interrupted, 0},
		{reply("hello"), Complete, 1},
		{strings.TrimSuffix(reply("hello"), "o"), Interrupted, 0},
		{"HTTP/1.1 200 OK\r\n\r\nhello", Interrupted, 0},
	} {
		p := pool(t, engine(t, func(p *peer) {
			p.request()
			p.say(tt.answer)
			p.untilClosed()
		}))
		resp, end := p.Do(t.Context(), post("{}"))
		if end != nil {
			t.Fatal(end)
		}
		resp.Read(make([]byte, 1))
		resp.Close()
		if got := resp.End(); got.Cause != tt.want || p.Stats().Idle != tt.idle {
			t.Errorf("%q: %v, %+v", tt.answer, got, p.Stats())
		}
		if _, err := resp.Read(make([]byte, 1)); (err == io.EOF) != (tt.want == Complete) {
			t.Errorf("%q: Read after Close: %v", tt.answer, err)
		}
	}
}

func TestClosedPoolBeginsNothing(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		p.request()
		p.say(reply("hello"))
		p.untilClosed()
	}))
	resp, end := p.Do(t.Context(), post("{}"))
	if end != nil {
		t.Fatal(end)
	}
	p.Close()
	if body, err := io.ReadAll(resp); string(body) != "hello" || err != nil {
		t.Errorf("running exchange: %q, %v", body, err)
	}
	if s := p.Stats(); s.Idle != 0 {
		t.Errorf("%+v", s)
	}
	if _, _, end := do(t, p, post("{}")); end.Cause != Interrupted || !errors.Is(end, ErrClosed) {
		t.Errorf("got %v", end)
	}
}

// RTY-4: the engine closes kept connections. Goal: every one of 500 requests is
// answered and the engine has seen exactly 500 bodies, each once. Method: the
// engine closes after each answer and says so, then the next request goes out.
func TestClosedIdleConnectionsLoseNothing(t *testing.T) {
	for _, how := range []string{"FIN", "RST"} {
		var mu sync.Mutex
		seen := map[string]int{}
		closed, taken := make(chan struct{}, 1), make(chan struct{}, 1)
		p := pool(t, engine(t, func(p *peer) {
			_, body := p.request()
			mu.Lock()
			seen[string(body)]++
			mu.Unlock()
			p.say(reply("ok"))
			if how == "RST" {
				// Not before the answer was taken, a reset may overtake it.
				<-taken
				p.reset()
			} else {
				p.Close()
			}
			closed <- struct{}{}
		}))
		for i := range 500 {
			mustDo(t, p, post(itoa(i)))
			taken <- struct{}{}
			if how == "FIN" {
				<-taken
			}
			<-closed
		}
		for i := range 500 {
			if seen[itoa(i)] != 1 {
				t.Errorf("%s: body %d seen %d times", how, i, seen[itoa(i)])
			}
		}
		if s := p.Stats(); len(seen) != 500 || s.Dropped != 499 {
			t.Errorf("%s: %d bodies, %+v", how, len(seen), s)
		}
	}
}

// RTY-4, racing: the engine closes at any moment. Goal: an exchange is complete
// or Stale, and what the engine has read in full is never more than what was
// sent. Method: closes and requests race freely; whoever wins, the sums hold.
func TestClosesThatRaceWithRequests(t *testing.T) {
	var read atomic.Int64
	p := pool(t, engine(t, func(p *peer) {
		if req, _ := p.request(); req == nil {
			return
		}
		read.Add(1)
		p.say(reply("ok"))
		timer := time.AfterFunc(time.Duration(p.n%7)*20*time.Microsecond, func() { p.Close() })
		defer timer.Stop()
		if req, _ := p.request(); req != nil {
			read.Add(1)
			p.say(reply("ok"))
		}
	}))
	complete, stale := 0, 0
	for range 500 {
		_, _, end := do(t, p, post("{}"))
		switch end.Cause {
		case Complete:
			complete++
		case Stale:
			stale++
		case ClosedFIN, ClosedRST: // the close cut an answer
			if !end.ResponseStarted {
				t.Fatalf("got %+v", end)
			}
		default:
			t.Fatalf("got %+v", end)
		}
	}
	if n := int(read.Load()); n < complete || n > 500 {
		t.Errorf("engine read %d bodies, %d complete, %d stale", n, complete, stale)
	}
}

// RTY-4, reader variant: the engine takes the whole second request and closes
// without a byte. That is Stale, RequestWritten tells it apart, and the engine
// has seen the body once: nothing was sent again.
func TestStaleIsReportedNotRepeated(t *testing.T) {
	for _, how := range []string{"FIN", "RST"} {
		var seen atomic.Int64
		p := pool(t, engine(t, func(p *peer) {
			p.request()
			p.say(reply("ok"))
			if req, _ := p.request(); req != nil {
				seen.Add(1)
			}
			if how == "RST" {
				p.reset()
			}
		}))
		mustDo(t, p, post("{}"))
		_, _, end := do(t, p, post("{}"))
		if end.Cause != Stale || !end.Reused || !end.RequestWritten || end.ResponseStarted {
			t.Errorf("%s: got %+v", how, end)
		}
		if seen.Load() != 1 || p.Stats().Dialed != 1 {
			t.Errorf("%s: engine saw %d bodies, %+v", how, seen.Load(), p.Stats())
		}
	}
}

// llama.cpp: advertises keep-alive, closes after every stream.
func TestEndpointsThatCloseAfterStreamsAreLearned(t *testing.T) {
	closed := make(chan struct{}, 1)
	p := pool(t, engine(t, func(p *peer) {
		for req, _ := p.request(); req != nil; req, _ = p.request() {
			if req.URL.Path != "/stream" {
				p.say(reply("ok"))
				continue
			}
			p.say(stream("hello"))
			p.Close()
			closed <- struct{}{}
			return
		}
	}))
	streamed := &Request{Method: "POST", Target: "/stream"}

	mustDo(t, p, streamed)
	<-closed
	if s := p.Stats(); s.Idle != 1 || s.StreamsClose {
		t.Fatalf("before it is known: %+v", s)
	}
	mustDo(t, p, get())
	if s := p.Stats(); !s.StreamsClose || s.Dropped != 1 {
		t.Fatalf("once it is known: %+v", s)
	}
	// Connections are kept after other answers, and none after a stream.
	if resp, _ := mustDo(t, p, streamed); !resp.Reused {
		t.Error("not reused")
	}
	<-closed
	if s := p.Stats(); s.Idle != 0 {
		t.Errorf("kept after a stream: %+v", s)
	}

	p.mu.Lock()
	p.streamsCloseUntil = time.Now()
	p.mu.Unlock()
	mustDo(t, p, streamed)
	<-closed
	if s := p.Stats(); s.Idle != 1 || s.StreamsClose {
		t.Errorf("not forgotten: %+v", s)
	}
}

func TestStaleAfterAStreamIsLearned(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		p.request()
		p.say(stream("hello"))
		p.request()
	}))
	mustDo(t, p, post("{}"))
	if _, _, end := do(t, p, post("{}")); end.Cause != Stale || !p.Stats().StreamsClose {
		t.Fatalf("%v, %+v", end, p.Stats())
	}
}

// A connection that idles out is an ordinary close and teaches nothing; nobody
// has to come by for it to be given up.
func TestIdleConnectionsAgeOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ends := make(chan net.Conn, 10)
		p := pool(t, "http://engine.test", func(cfg *Config) {
			cfg.IdleTimeout = 10 * time.Second
			cfg.Dial = func(context.Context, string, string) (net.Conn, error) {
				ours, theirs := net.Pipe()
				ends <- theirs
				return ours, nil
			}
		})
		answer := func(c net.Conn) {
			c.Read(make([]byte, 4096))
			io.WriteString(c, stream("hello"))
		}
		served := make(chan struct{})
		go func() { answer(<-ends); close(served) }()
		mustDo(t, p, post("{}"))
		<-served
		time.Sleep(9 * time.Second)
		if s := p.Stats(); s.Idle != 1 {
			t.Errorf("too early: %+v", s)
		}
		time.Sleep(2 * time.Second)
		if s := p.Stats(); s.Idle != 0 || s.StreamsClose {
			t.Errorf("kept: %+v", s)
		}
	})
}

// An engine that closes idle connections after some seconds says nothing about
// streams, even if the last answer was one.
func TestOrdinaryIdleClosesTeachNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pool(t, "http://engine.test", func(cfg *Config) {
			cfg.Dial = func(context.Context, string, string) (net.Conn, error) {
				ours, theirs := net.Pipe()
				go func() {
					theirs.Read(make([]byte, 4096))
					io.WriteString(theirs, stream("hello"))
					time.Sleep(5 * time.Second)
					theirs.Close()
				}()
				return ours, nil
			}
		})
		for range 2 {
			if resp, _ := mustDo(t, p, post("{}")); resp.Reused {
				t.Error("a closed connection was reused")
			}
			time.Sleep(6 * time.Second)
		}
		if s := p.Stats(); s.StreamsClose || s.Dropped != 1 {
			t.Errorf("%+v", s)
		}
	})
}

// RTY-6: the second attempt sends what the first one sent.
func TestABodyCanBeSentAgain(t *testing.T) {
	for _, size := range []int{1 << 10, 300 << 10, 20 << 20} {
		seg := size / 3
		text := strings.Repeat("0123456789abcdef", size/16)
		req := post(text[:seg], "", text[seg:2*seg], text[2*seg:])
		want := fmt.Sprintf("%x", sha256.Sum256([]byte(text)))

		broken := pool(t, engine(t, func(p *peer) { p.br.Peek(1); p.reset() }))
		if _, _, end := do(t, broken, req); end.Cause == Complete {
			t.Fatal(end)
		}
		busy := pool(t, engine(t, func(p *peer) {
			p.br.Peek(1)
			p.say("HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
		}))
		if resp, _ := mustDo(t, busy, req); resp.Status != 503 {
			t.Fatal(resp.Status)
		}
		good := pool(t, engine(t, func(p *peer) {
			for req, body := p.request(); req != nil; req, body = p.request() {
				p.say(reply(fmt.Sprintf("%x", sha256.Sum256(body))))
			}
		}))
		for range 2 {
			if _, got := mustDo(t, good, req); got != want {
				t.Errorf("%d bytes: hash %s, want %s", size, got, want)
			}
		}
	}
}

// EPT-6, LIM-6: an engine that is not read from is not read ahead of.
func TestUnreadBodiesHoldTheEngineBack(t *testing.T) {
	var sent atomic.Int64
	p := pool(t, engine(t, func(p *peer) {
		p.SetWriteBuffer(32 << 10)
		p.request()
		p.say("HTTP/1.1 200 OK\r\n\r\n")
		buf := make([]byte, 64<<10)
		for range 3200 {
			n, err := p.Write(buf)
			sent.Add(int64(n))
			if err != nil {
				return
			}
		}
	}))
	resp, end := p.Do(t.Context(), post("{}"))
	if end != nil {
		t.Fatal(end)
	}
	// It has stopped once a look a moment later finds no more.
	for last := int64(-1); ; {
		now := sent.Load()
		if now == last {
			break
		}
		last = now
		time.Sleep(50 * time.Millisecond) // nothing happens when a writer blocks: there is no event
	}
	if n := sent.Load(); n > 32<<20 {
		t.Errorf("%d bytes taken of an unread body", n)
	}
	resp.Close()
}

func TestManyAtOnce(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		for req, body := p.request(); req != nil; req, body = p.request() {
			p.say(stream(string(body), string(body)))
		}
	}))
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			for i := range 50 {
				text := fmt.Sprintf("%d/%d", w, i)
				if _, body, end := do(t, p, post(text)); end.Cause != Complete || body != text+text {
					t.Errorf("%s: %v, %q", text, end, body)
				}
			}
		})
	}
	wg.Wait()
	if s := p.Stats(); s.Active != 0 || s.Dialed+s.Reused != 800 {
		t.Errorf("%+v", s)
	}
}

// tardy is a connection on which a large write, done as it is, returns only
// when it is told to stop.
type tardy struct {
	net.Conn
	stop chan struct{}
}

func (c tardy) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if len(p) > inlineMax {
		<-c.stop
	}
	return n, err
}

func (c tardy) SetWriteDeadline(t time.Time) error {
	if t.Equal(longAgo) {
		c.stop <- struct{}{}
	}
	return c.Conn.SetWriteDeadline(t)
}

// An answer may overtake the writer's return. The request was written all the
// same, and the connection works for the next one.
func TestAnswerThatOvertakesTheWriter(t *testing.T) {
	addr := engine(t, func(p *peer) {
		for req, _ := p.request(); req != nil; req, _ = p.request() {
			p.say(reply("ok"))
		}
	})
	p := pool(t, addr, func(cfg *Config) {
		cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, addr)
			return tardy{c, make(chan struct{}, 1)}, err
		}
	})
	for i := range 3 {
		resp, _ := mustDo(t, p, post(strings.Repeat("x", inlineMax+1)))
		if !resp.RequestWritten || resp.Reused != (i > 0) {
			t.Errorf("written %t, reused %t", resp.RequestWritten, resp.Reused)
		}
	}
}
