// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

var errGone = errors.New("client is gone")

// TestInterruptedInEveryState ends the context while the exchange is in the
// state that the row's engine keeps it in. The engine reports when it is there.
func TestInterruptedInEveryState(t *testing.T) {
	for _, tt := range []struct {
		name   string
		body   string
		script func(p *peer, there chan<- struct{})
		dial   func(ctx context.Context, there chan<- struct{}) (net.Conn, error)
		want   End
	}{
		{name: "dial", dial: func(ctx context.Context, there chan<- struct{}) (net.Conn, error) {
			there <- struct{}{}
			<-ctx.Done()
			return nil, ctx.Err()
		}, want: End{Cause: Interrupted}},
		{name: "write", body: strings.Repeat("x", 20<<20), script: func(p *peer, there chan<- struct{}) {
			p.br.Peek(1)
			there <- struct{}{}
		}, want: End{Cause: Interrupted}},
		{name: "head", body: "{}", script: func(p *peer, there chan<- struct{}) {
			p.request()
			there <- struct{}{}
			p.untilClosed()
		}, want: End{Cause: Interrupted, RequestWritten: true}},
		{name: "interim head", body: "{}", script: func(p *peer, there chan<- struct{}) {
			p.request()
			p.say("HTTP/1.1 100 Continue\r\n\r\n")
			there <- struct{}{}
			p.untilClosed()
		}, want: End{Cause: Interrupted, RequestWritten: true}},
		{name: "body", body: "{}", script: func(p *peer, there chan<- struct{}) {
			p.request()
			p.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
			there <- struct{}{}
			p.untilClosed()
		}, want: End{Cause: Interrupted, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			there, done := make(chan struct{}, 1), make(chan struct{})
			addr := "http://engine.test"
			if tt.script != nil {
				addr = engine(t, func(p *peer) {
					defer p.Close()
					tt.script(p, there)
					if tt.name == "write" {
						<-done // holds the connection open and reads nothing
					}
				})
			}
			p := pool(t, addr, func(cfg *Config) {
				if tt.dial != nil {
					cfg.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) { return tt.dial(ctx, there) }
				}
			})
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			var got *End
			go func() {
				defer close(done)
				resp, end := p.Do(ctx, post(tt.body))
				if end == nil {
					_, err := io.ReadAll(resp)
					errors.As(err, &end)
				}
				got = end
			}()
			await(t, "engine", there)
			cancel(errGone)
			await(t, "exchange", done)
			if got == nil || !errors.Is(got, errGone) {
				t.Fatalf("got %v, want the context's cause", got)
			}
			end := *got
			end.Err = nil
			if tt.name == "interim head" {
				end.ResponseStarted = false // it may not have reached us
			}
			if tt.name == "body" {
				end.ResponseStarted, end.HeadComplete = true, true // nor this
			}
			if end != tt.want {
				t.Errorf("got %+v, want %+v", end, tt.want)
			}
		})
	}
}

func TestInterruptFromAnotherGoroutine(t *testing.T) {
	closed := make(chan struct{})
	p := pool(t, engine(t, func(p *peer) {
		p.request()
		p.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
		p.untilClosed()
		close(closed)
	}))
	resp, end := p.Do(t.Context(), post("{}"))
	if end != nil {
		t.Fatal(end)
	}
	if n, err := io.ReadFull(resp, make([]byte, 5)); n != 5 {
		t.Fatal(err)
	}
	go resp.Interrupt()
	n, err := resp.Read(make([]byte, 5))
	if n != 0 || !errors.As(err, &end) || end.Cause != Interrupted {
		t.Fatalf("Read: %d, %v", n, err)
	}
	await(t, "engine sees the close", closed)
	resp.Interrupt()
	resp.Close()
}

// An exchange that is over has no power over the connection's next exchange.
func TestLateInterruptHarmsNobody(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		for req, _ := p.request(); req != nil; req, _ = p.request() {
			p.say(reply("hello"))
		}
	}))
	ctx, cancel := context.WithCancel(t.Context())
	first, end := p.Do(ctx, post("{}"))
	if end != nil {
		t.Fatal(end)
	}
	io.ReadAll(first)

	second, end := p.Do(t.Context(), post("{}"))
	if end != nil || !second.Reused {
		t.Fatal(end, "not reused")
	}
	cancel()
	first.Interrupt()
	if body, err := io.ReadAll(second); string(body) != "hello" || err != nil {
		t.Fatalf("body %q, %v", body, err)
	}
}

func TestInterruptRacesWithEverything(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		for req, _ := p.request(); req != nil; req, _ = p.request() {
			p.say(stream("hello", "world"))
		}
	}))
	for range 300 {
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		resp, end := p.Do(ctx, post("{}"))
		if end == nil {
			go resp.Interrupt()
			body, err := io.ReadAll(resp)
			if err == nil && string(body) != "helloworld" {
				t.Fatalf("whole body %q", body)
			}
			end = resp.End()
			resp.Close()
		}
		if end.Cause != Interrupted && end.Cause != Complete {
			t.Fatalf("got %v", end)
		}
	}
}

func TestHeadByBoundsWriteAndWait(t *testing.T) {
	for _, body := range []string{"{}", strings.Repeat("x", 60<<10), strings.Repeat("x", 20<<20)} {
		done := make(chan struct{})
		p := pool(t, engine(t, func(p *peer) { p.br.Peek(1); <-done }))
		req := post(body)
		req.HeadBy = time.Now().Add(30 * time.Millisecond)
		_, _, end := do(t, p, req)
		close(done)
		if end.Cause != Timeout || end.ResponseStarted || end.RequestWritten != (len(body) < 1<<20) {
			t.Errorf("%d bytes: got %+v", len(body), end)
		}
	}
}

// A head that drips in is bounded too, not only silence.
func TestHeadByBoundsASlowHead(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		p.request()
		p.say("HTTP/1.1 200 OK\r\n")
		for {
			if _, err := io.WriteString(p, "X: y\r\n"); err != nil {
				return
			}
			time.Sleep(time.Millisecond) // the drip is the subject
		}
	}))
	req := post("{}")
	req.HeadBy = time.Now().Add(30 * time.Millisecond)
	_, _, end := do(t, p, req)
	if end.Cause != Timeout || !end.ResponseStarted || end.HeadComplete {
		t.Errorf("got %+v", end)
	}
}

func TestReadGoesOnAfterATimeout(t *testing.T) {
	proceed := make(chan struct{})
	p := pool(t, engine(t, func(p *peer) {
		for req, _ := p.request(); req != nil; req, _ = p.request() {
			p.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe")
			<-proceed
			p.say("llo\r\n0\r\n\r\n")
		}
	}))
	for range 2 {
		req := post("{}")
		req.HeadBy = time.Now().Add(time.Hour)
		resp, end := p.Do(t.Context(), req)
		if end != nil {
			t.Fatal(end)
		}
		buf := make([]byte, 100)
		if n, err := resp.Read(buf); string(buf[:n]) != "he" || err != nil {
			t.Fatalf("%q, %v", buf[:n], err)
		}
		for range 3 {
			resp.SetReadDeadline(time.Now().Add(time.Millisecond))
			_, err := resp.Read(buf)
			if !errors.As(err, &end) || end.Cause != Timeout || resp.End() != nil {
				t.Fatalf("got %v, End %v", err, resp.End())
			}
		}
		// Later than the deadline that fired, and then none: neither sets a timer.
		resp.SetReadDeadline(time.Now().Add(time.Hour))
		resp.SetReadDeadline(time.Time{})
		proceed <- struct{}{}
		if body, err := io.ReadAll(resp); string(body) != "llo" || err != nil {
			t.Fatalf("%q, %v", body, err)
		}
	}
	if s := p.Stats(); s.Dialed != 1 || s.Reused != 1 {
		t.Errorf("%+v", s)
	}
}

// A deadline that moves later for every chunk fires when the last one passed,
// not the first.
func TestDeadlineThatMovesLater(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		p.request()
		p.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		p.untilClosed()
	}))
	resp, end := p.Do(t.Context(), post("{}"))
	if end != nil {
		t.Fatal(end)
	}
	defer resp.Close()
	start := time.Now()
	for i := range 5 {
		resp.SetReadDeadline(start.Add(time.Duration(i+1) * 10 * time.Millisecond))
	}
	_, err := resp.Read(make([]byte, 1))
	if !errors.As(err, &end) || end.Cause != Timeout || time.Since(start) < 50*time.Millisecond {
		t.Fatalf("%v after %v", err, time.Since(start))
	}
}

// What has arrived whole stays whole, but the interrupted connection is not
// kept.
func TestInterruptOfAWholeBody(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		p.request()
		p.say(stream("hello"))
		p.untilClosed()
	}))
	resp, end := p.Do(t.Context(), post("{}"))
	if end != nil {
		t.Fatal(end)
	}
	buf := make([]byte, 1)
	resp.Read(buf) // one write of the engine, one read here: all of it is buffered
	resp.Interrupt()
	body, err := io.ReadAll(resp)
	if string(buf)+string(body) != "hello" || err != nil || resp.End().Cause != Complete {
		t.Errorf("%q, %v, %v", body, err, resp.End())
	}
	if s := p.Stats(); s.Idle != 0 {
		t.Errorf("%+v", s)
	}
}

// deaf is a connection whose writes fail and whose peer says nothing.
type deaf struct{ net.Conn }

var errDeaf = errors.New("no buffer space")

func (deaf) Write([]byte) (int, error) { return 0, errDeaf }

// After a failed write the peer's last words are awaited, not for ever.
func TestFailedWriteDoesNotWaitForEver(t *testing.T) {
	for _, size := range []int{2, 20 << 10, 1 << 20} {
		synctest.Test(t, func(t *testing.T) {
			ours, theirs := net.Pipe()
			defer theirs.Close()
			p := pool(t, "http://engine.test", dialed(deaf{ours}, nil))
			start := time.Now()
			_, _, end := do(t, p, post(strings.Repeat("x", size)))
			if end.Cause != Unwritten || !errors.Is(end, errDeaf) || end.RequestWritten {
				t.Errorf("%d bytes: got %+v", size, end)
			}
			if waited := time.Since(start); waited != lastWords {
				t.Errorf("%d bytes: waited %v", size, waited)
			}
		})
	}
}

func TestDetachedExchangeOutlivesItsContext(t *testing.T) {
	release := make(chan struct{})
	addr := engine(t, func(p *peer) {
		p.request()
		p.say("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
		<-release
		p.say("cd")
		p.untilClosed()
	})
	ctx, cancel := context.WithCancel(t.Context())
	res, end := pool(t, addr).Do(ctx, get())
	if end != nil {
		t.Fatal(end)
	}
	res.Detach()
	cancel()
	close(release)
	if body, err := io.ReadAll(res); err != nil || string(body) != "abcd" {
		t.Errorf("got %q, %v", body, err)
	}
}
