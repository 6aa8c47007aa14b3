// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds waits for things that happen; nothing waits it out.
const patience = time.Minute

// peer is one accepted connection of a scripted engine.
type peer struct {
	*net.TCPConn
	t  *testing.T
	br *bufio.Reader
	n  int // ordinal of the connection, from 0
}

// request reads one request with its body; nil when there is none.
func (p *peer) request() (*http.Request, []byte) {
	req, err := http.ReadRequest(p.br)
	if err != nil {
		return nil, nil
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, nil
	}
	return req, body
}

// say writes bytes, and does not mind a client that is gone.
func (p *peer) say(s string) { io.WriteString(p, s) }

// reset aborts the connection with RST.
func (p *peer) reset() {
	p.SetLinger(0)
	p.Close()
}

// untilClosed waits for the client to close.
func (p *peer) untilClosed() { io.Copy(io.Discard, p.br) }

// engine listens on loopback and runs script for every connection, which is
// closed when script returns. Everything is joined when the test ends.
func engine(t *testing.T, script func(*peer)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	wg.Go(func() {
		for n := 0; ; n++ {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			wg.Go(func() {
				defer c.Close()
				script(&peer{TCPConn: c.(*net.TCPConn), t: t, br: bufio.NewReader(c), n: n})
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return "http://" + ln.Addr().String()
}

// pool makes a Pool for addr that is closed, and must be without running
// exchanges, when the test ends.
func pool(t testing.TB, addr string, change ...func(*Config)) *Pool {
	t.Helper()
	u, err := url.Parse(addr)
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{URL: u}
	for _, f := range change {
		f(&cfg)
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Close()
		if s := p.Stats(); s.Active != 0 || s.Idle != 0 {
			t.Errorf("after Close: %+v", s)
		}
	})
	return p
}

func post(body ...string) *Request {
	req := &Request{Method: "POST", Target: "/v1/chat/completions",
		Header: []Field{{"Content-Type", "application/json"}}}
	for _, s := range body {
		req.Body = append(req.Body, []byte(s))
	}
	return req
}

func get() *Request { return &Request{Method: "GET", Target: "/"} }

// do does one exchange to its end. Whatever happened comes back as an End.
func do(t testing.TB, p *Pool, req *Request) (*Response, string, *End) {
	t.Helper()
	resp, end := p.Do(t.Context(), req)
	if end != nil {
		return nil, "", end
	}
	body, err := io.ReadAll(resp)
	if err != nil && !errors.As(err, new(*End)) {
		t.Fatalf("Read returned %T, want *End", err)
	}
	resp.Close()
	return resp, string(body), resp.End()
}

// mustDo is do for an exchange that has to be complete.
func mustDo(t testing.TB, p *Pool, req *Request) (*Response, string) {
	t.Helper()
	resp, body, end := do(t, p, req)
	if end.Cause != Complete {
		t.Fatalf("exchange ended: %v %+v", end, end)
	}
	return resp, body
}

// reply is an answer with a Content-Length.
func reply(body string) string {
	return "HTTP/1.1 200 OK\r\nContent-Length: " + itoa(len(body)) + "\r\n\r\n" + body
}

// stream is a chunked answer.
func stream(chunks ...string) string {
	return "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(chunks...) + "0\r\n\r\n"
}

func chunked(chunks ...string) string {
	var b strings.Builder
	for _, c := range chunks {
		b.WriteString(hex(len(c)) + "\r\n" + c + "\r\n")
	}
	return b.String()
}

func await(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatalf("%s: nothing for %v", what, patience)
	}
}

// canned is a connection whose peer's bytes are fixed. What is written to it
// is thrown away.
type canned struct {
	pieces []string // one per Read, at most
	end    error    // after them; nil means io.EOF
}

func (c *canned) Read(p []byte) (int, error) {
	for len(c.pieces) > 0 && c.pieces[0] == "" {
		c.pieces = c.pieces[1:]
	}
	if len(c.pieces) == 0 {
		if c.end != nil {
			return 0, c.end
		}
		return 0, io.EOF
	}
	n := copy(p, c.pieces[0])
	c.pieces[0] = c.pieces[0][n:]
	return n, nil
}

func (c *canned) Write(p []byte) (int, error)      { return len(p), nil }
func (c *canned) Close() error                     { return nil }
func (c *canned) LocalAddr() net.Addr              { return nil }
func (c *canned) RemoteAddr() net.Addr             { return nil }
func (c *canned) SetDeadline(time.Time) error      { return nil }
func (c *canned) SetReadDeadline(time.Time) error  { return nil }
func (c *canned) SetWriteDeadline(time.Time) error { return nil }

// dialed makes every dial return c.
func dialed(c net.Conn, err error) func(*Config) {
	return func(cfg *Config) {
		cfg.Dial = func(context.Context, string, string) (net.Conn, error) { return c, err }
	}
}

// cannedPool answers its one exchange with pieces.
func cannedPool(t testing.TB, pieces ...string) *Pool {
	return pool(t, "http://engine.test", dialed(&canned{pieces: pieces}, nil))
}

// An End must never be taken for the end of a whole body.
func TestCutBodyIsNotEOF(t *testing.T) {
	for name, head := range map[string]string{
		"length": "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
		"chunks": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
		"head":   "HTTP/1.1 200",
	} {
		res, _, end := do(t, pool(t, engine(t, func(p *peer) { p.request(); p.say(head); p.Close() })), post("x"))
		if end == nil || end.Cause != ClosedFIN || errors.Is(end, io.EOF) {
			t.Errorf("%s: %+v, end %v", name, res, end)
		}
	}
}
