// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"sync"
	"time"
)

// Engine answers chat completions at the pace that each request asks for and
// stamps what it sends. It does as little else as it can. Start one with
// StartEngine, end it with Close.
type Engine struct {
	listener net.Listener
	running  sync.WaitGroup
	closed   chan struct{}

	// mu guards what follows.
	mu      sync.Mutex
	conns   map[net.Conn]bool
	hurry   chan struct{} // closed while answers hurry
	hurried bool
}

// StartEngine serves a listener until Close.
func StartEngine(l net.Listener) *Engine {
	e := &Engine{listener: l, closed: make(chan struct{}), conns: map[net.Conn]bool{}, hurry: make(chan struct{})}
	e.running.Go(e.accept)
	return e
}

// Addr is where the engine listens.
func (e *Engine) Addr() string { return e.listener.Addr().String() }

// Hurry makes answers go on without a pace until Calm, so that a run can end
// without cutting any of them.
func (e *Engine) Hurry() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.hurried {
		close(e.hurry)
		e.hurried = true
	}
}

// Calm makes answers that begin now keep their pace.
func (e *Engine) Calm() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.hurried {
		e.hurry = make(chan struct{})
		e.hurried = false
	}
}

// Close cuts every connection and returns when the engine's goroutines are gone.
func (e *Engine) Close() {
	close(e.closed)
	e.listener.Close()
	e.mu.Lock()
	for c := range e.conns {
		c.Close()
	}
	e.mu.Unlock()
	e.Hurry() // an answer that waits for its next token must find its connection closed
	e.running.Wait()
}

func (e *Engine) accept() {
	for {
		c, err := e.listener.Accept()
		if err != nil {
			return
		}
		e.mu.Lock()
		e.conns[c] = true
		e.mu.Unlock()
		e.running.Go(func() {
			e.serve(c)
			c.Close()
			e.mu.Lock()
			delete(e.conns, c)
			e.mu.Unlock()
		})
	}
}

func (e *Engine) serve(c net.Conn) {
	select {
	case <-e.closed: // accepted while Close went through the others
		return
	default:
	}
	in := &incoming{conn: c, buf: make([]byte, 4<<10)}
	var body, out []byte
	for {
		head, err := in.head()
		if err != nil {
			return
		}
		if bytes.HasPrefix(head.line, []byte("GET ")) {
			_, err = c.Write(whole200([]byte(`{"object":"list","data":[{"id":"bench","object":"model"}]}`)))
		} else {
			body = body[:0]
			if err = in.body(head, func(p []byte, _ int64) error { body = append(body, p...); return nil }); err == nil {
				out, err = e.answer(c, body, out, now())
			}
		}
		if err != nil {
			return
		}
	}
}

func whole200(body []byte) []byte {
	return append(fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(body)), body...)
}

// answer writes the answer to one request. out is scratch.
func (e *Engine) answer(c net.Conn, body, out []byte, received int64) ([]byte, error) {
	id, shape, prompt, err := readRequest(body)
	if err != nil {
		_, err = fmt.Fprintf(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s", len(err.Error()), err)
		return out, err
	}
	if !shape.Stream {
		s := &script{id: id, tokens: shape.Tokens}
		_, err = c.Write(whole200(s.whole(received, now(), prompt)))
		return out, err
	}
	e.mu.Lock()
	hurry := e.hurry
	e.mu.Unlock()

	s := newScript(id, shape)
	pace := pacer{interval: s.interval, due: received, hurry: hurry}
	defer pace.stop()
	event := s.first(received)
	crc := crc32.Checksum(event, castagnoli)
	out = append(out[:0], "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"...)
	out = appendChunk(out, event)
	for k := range s.tokens {
		event = s.token(k, pace.wait())
		crc = crc32.Update(crc, castagnoli, event)
		out = appendChunk(out, event)
		if _, err := c.Write(out); err != nil {
			return out, err
		}
		out = out[:0]
	}
	event = s.finish(prompt, crc)
	out = appendChunk(out, event)
	out = appendChunk(out, s.usage)
	out = appendChunk(out, []byte(endMarker))
	_, err = c.Write(append(out, "0\r\n\r\n"...))
	return out, err
}

// pacer says when each token is sent. The first is due at once.
type pacer struct {
	interval time.Duration
	due      int64
	hurry    <-chan struct{}
	hurried  bool
	timer    *time.Timer
}

// wait returns at the time of the next token and says which time that is. When
// the last write blocked past it, it is the time at which the token should have
// been sent: a proxy that does not read makes tokens late, not rare.
func (p *pacer) wait() int64 {
	t := now()
	if p.interval == 0 || p.hurried {
		return t
	}
	due := p.due
	p.due += int64(p.interval)
	if t >= due+int64(p.interval) {
		return due
	}
	if d := time.Duration(due - t); d > 0 {
		if p.timer == nil {
			p.timer = time.NewTimer(d)
		} else {
			p.timer.Reset(d)
		}
		select {
		case <-p.timer.C:
		case <-p.hurry:
			p.hurried = true
		}
	}
	return now()
}

func (p *pacer) stop() {
	if p.timer != nil {
		p.timer.Stop()
	}
}

func appendChunk(b, p []byte) []byte {
	const hex = "0123456789abcdef"
	n := len(p)
	for shift := 12; shift >= 0; shift -= 4 {
		if n>>shift != 0 {
			b = append(b, hex[n>>shift&15])
		}
	}
	b = append(b, "\r\n"...)
	b = append(b, p...)
	return append(b, "\r\n"...)
}

var errMessage = errors.New("not an HTTP/1.1 message of the kind that is understood here")
