// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// How serving one request or connection can end early.
var (
	errGone  = errors.New("the client is gone")
	errCut   = errors.New("a fault ended the connection")
	errEnded = errors.New("a fault ended the answer; the connection lives")
)

// readBuffer is also how many pipelined bytes a client may send behind a
// request and still have its departure noticed while the answer runs.
const readBuffer = 64 << 10

// drainMax bounds how long a connection half-closed by the engine waits for
// the client to close its side.
const drainMax = 5 * time.Second

// conn is one accepted connection: the goroutine that serves it and, while an
// answer runs, a second one that watches for the client's departure.
type conn struct {
	l   *life
	id  uint64
	net net.Conn
	in  *bufio.Reader
	// inbound is under in and bounds request heads.
	inbound *inbound
	// draining: the engine has sent FIN, what still comes in is thrown away.
	draining bool
	// closedBy says who ended the connection first, for the log.
	closedBy atomic.Pointer[string]
}

func newConn(l *life, nc net.Conn) *conn {
	in := &inbound{r: nc, left: math.MaxInt64}
	return &conn{l: l, net: nc, inbound: in, in: bufio.NewReaderSize(in, readBuffer)}
}

// inbound fails once more than left bytes were asked of it.
type inbound struct {
	r    io.Reader
	left int64
}

func (in *inbound) Read(p []byte) (int, error) {
	if in.left <= 0 {
		return 0, errHeadTooLong
	}
	n, err := in.r.Read(p)
	in.left -= int64(n)
	return n, err
}

// headMax bounds a request head; read buffering makes it approximate.
const headMax = 1 << 20

var errHeadTooLong = errors.New("the request head is too long")

func (c *conn) record(e Entry) {
	e.Conn = c.id
	c.l.record(e)
}

func (c *conn) blame(who string) { c.closedBy.CompareAndSwap(nil, &who) }

func (c *conn) serve() {
	c.record(Entry{Event: EventAccepted, Detail: c.net.RemoteAddr().String()})
	if c.accepted() == nil {
		for silence := time.Duration(0); c.next(silence) == nil; silence = c.l.e.cfg.IdleTimeout {
		}
	}
	if c.draining {
		c.drain()
	}
	_ = c.net.Close()
	c.l.mu.Lock()
	delete(c.l.conns, c)
	c.l.mu.Unlock()
	c.blame("engine")
	c.record(Entry{Event: EventConnClosed, Detail: *c.closedBy.Load()})
}

// accepted carries out the faults that need no request.
func (c *conn) accepted() error {
	name := c.l.e.cfg.Name
	for _, f := range c.l.e.faults.take(func(f Fault) bool {
		return f.Point.Name == "accept" && (f.Engine == "" || f.Engine == name)
	}) {
		c.record(Entry{Event: EventFault, Detail: f.String()})
		switch f.Kind {
		case "stall":
			if err := c.watched(func(gone <-chan struct{}) error { return c.stall(f, gone) }); err != nil {
				return err
			}
		default:
			return c.end(f)
		}
	}
	return nil
}

// next serves one request, for which it waits as long as silence says, or for
// ever if that is 0. An error ends the connection.
func (c *conn) next(silence time.Duration) error {
	if silence > 0 {
		_ = c.net.SetReadDeadline(time.Now().Add(silence))
	}
	if _, err := c.in.Peek(1); err != nil {
		if timeout(err) {
			c.blame("engine: idle")
			c.fin()
		} else {
			c.blame("client")
		}
		return errGone
	}
	_ = c.net.SetReadDeadline(time.Time{})
	c.inbound.left = headMax
	req, err := http.ReadRequest(c.in)
	c.inbound.left = math.MaxInt64
	if err != nil {
		c.record(Entry{Event: EventRefused, N: http.StatusBadRequest, Detail: "bad request head: " + err.Error()})
		c.blame("engine: bad request")
		_ = c.write([]byte("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"))
		c.fin()
		return errCut
	}
	if !strings.HasPrefix(req.URL.Path, "/sim/") && !c.l.running() {
		return errCut
	}
	x := &exchange{conn: c, req: req, id: req.Header.Get("X-Request-Id")}
	err = x.serve()
	switch {
	case errors.Is(err, errEnded):
		err = nil
	case err != nil && c.l.dead():
		c.blame("engine")
	case errors.Is(err, errGone):
		c.blame("client")
	}
	if err == nil && x.close {
		c.blame("engine: close")
		c.fin()
		return errCut
	}
	return err
}

// exchange is one request and its answer.
type exchange struct {
	*conn
	req     *http.Request
	body    []byte
	id      string // X-Request-Id
	attempt int
	script  script
	close   bool // after the answer
	gone    <-chan struct{}
	headOut bool // the response head was handed to the kernel

	toolCalls int  // tools executed by the engine itself
	settled   bool // its end is in the log
}

func (x *exchange) record(e Entry) {
	switch e.Event {
	case EventFinished, EventRefused, EventAborted, EventCut:
		x.settled = true
	}
	e.Request, e.Attempt = x.id, x.attempt
	x.conn.record(e)
}

func (x *exchange) serve() error {
	x.close = x.req.Close
	if strings.HasPrefix(x.req.URL.Path, "/sim/") {
		return x.admin()
	}
	err := x.receive()
	if err == nil {
		err = x.watched(func(gone <-chan struct{}) error {
			x.gone = gone
			if err := x.reach(Point{Name: "head"}); err != nil {
				return err
			}
			return x.route()
		})
	}
	if err != nil && inference(x.req.URL.Path) {
		x.lost(err, 0)
	}
	return err
}

// lost logs that the answer did not get to its end, unless its end is known.
func (x *exchange) lost(err error, computed int) {
	if x.settled {
		return
	}
	event := EventCut
	if errors.Is(err, errGone) && !x.l.dead() {
		event = EventAborted
	}
	x.record(Entry{Event: event, N: computed, Detail: err.Error()})
}

// receive logs the request, finds its script, and reads its body.
func (x *exchange) receive() error {
	seen := 1
	if inference(x.req.URL.Path) {
		seen = x.l.e.meet(x.id)
	}
	x.attempt = seen
	if n, err := strconv.Atoi(x.req.Header.Get("Headgate-Attempt")); err == nil && n > 0 {
		x.attempt = n
	}
	x.record(Entry{Event: EventReceived, Method: x.req.Method, Path: x.req.URL.RequestURI(), Seen: seen,
		Header: x.header(), Flagged: flagged(x.req.Header), Length: x.req.ContentLength})

	faults, err := ParseFaults(x.req.Header.Get("X-Sim-Fault"))
	if err != nil {
		x.close = true // the body is unread
		return x.refuse(http.StatusBadRequest, "BadRequestError", "X-Sim-Fault: "+err.Error())
	}
	if at := slices.IndexFunc(faults, Fault.atConnection); at >= 0 {
		x.close = true
		return x.refuse(http.StatusBadRequest, "BadRequestError", "X-Sim-Fault: too late for "+faults[at].String())
	}
	to := target{engine: x.l.e.cfg.Name, request: x.id, attempt: x.attempt, path: x.req.URL.Path}
	for _, f := range faults {
		// In a header, times counts the visits of this request to this engine.
		if f.applies(to) && (f.Times == Forever || seen <= f.Times || f.Attempt > 0) {
			x.script = append(x.script, f)
		}
	}
	x.script = append(x.script, x.l.e.faults.take(func(f Fault) bool {
		return !f.atConnection() && f.applies(to)
	})...)
	return x.readBody()
}

func (x *exchange) header() http.Header {
	h := x.req.Header.Clone()
	h["Host"] = []string{x.req.Host} // net/http keeps it, and the framing, apart
	if x.req.TransferEncoding != nil {
		h["Transfer-Encoding"] = x.req.TransferEncoding
	}
	return h
}

// readBody reads the request body, stopping for the faults that strike in it.
func (x *exchange) readBody() error {
	if strings.EqualFold(x.req.Header.Get("Expect"), "100-continue") {
		if err := x.write([]byte("HTTP/1.1 100 Continue\r\n\r\n")); err != nil {
			return err
		}
	}
	sum := sha256.New()
	limit := x.l.e.cfg.BodyBytes
	for _, p := range x.script.bodyPoints() {
		if err := x.readTo(int64(p.K), sum); err != nil {
			return err
		}
		if len(x.body) < p.K {
			break // the body is shorter
		}
		if err := x.watched(func(gone <-chan struct{}) error { x.gone = gone; return x.reach(p) }); err != nil {
			return err
		}
	}
	if err := x.readTo(limit+1, sum); err != nil {
		return err
	}
	if int64(len(x.body)) > limit {
		x.close = true // the rest is unread
		return x.refuse(http.StatusRequestEntityTooLarge, "BadRequestError", "the body is too long")
	}
	x.record(Entry{Event: EventBody, N: len(x.body), SHA256: hex.EncodeToString(sum.Sum(nil))})
	return nil
}

// readTo reads until the body has n bytes or ends.
func (x *exchange) readTo(n int64, sum io.Writer) error {
	more, err := io.ReadAll(io.LimitReader(x.req.Body, n-int64(len(x.body))))
	_, _ = sum.Write(more)
	x.body = append(x.body, more...)
	if err != nil {
		x.record(Entry{Event: EventAborted, Detail: fmt.Sprintf("in the body, after %d bytes: %v", len(x.body), err)})
		return errGone
	}
	return nil
}

// watched runs f with a channel that is closed when the client is gone: it
// closed its side (a half-close counts, as at vLLM) or the connection broke.
func (c *conn) watched(f func(gone <-chan struct{}) error) error {
	gone := make(chan struct{})
	var stopped atomic.Bool
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for {
			// Bytes of a next request stay in the buffer.
			_, err := c.in.Peek(c.in.Buffered() + 1)
			switch {
			case err == nil:
			case errors.Is(err, bufio.ErrBufferFull), stopped.Load() && timeout(err):
				return
			default:
				close(gone)
				return
			}
		}
	})
	err := f(gone)
	stopped.Store(true)
	_ = c.net.SetReadDeadline(time.Unix(1, 0))
	watcher.Wait()
	_ = c.net.SetReadDeadline(time.Time{})
	select {
	case <-gone:
		if err == nil {
			// The answer was written before its client left; a next request
			// cannot come.
			c.blame("client")
			err = errGone
		}
	default:
	}
	return err
}

func timeout(err error) bool {
	var nerr net.Error
	return errors.As(err, &nerr) && nerr.Timeout()
}

// write hands bytes to the kernel, all or an error.
func (c *conn) write(b []byte) error {
	if !c.l.running() {
		return errCut
	}
	if _, err := c.net.Write(b); err != nil {
		return errGone
	}
	return nil
}

// linger0 makes Close send RST instead of FIN.
func (c *conn) linger0() {
	if tcp, ok := c.net.(interface{ SetLinger(int) error }); ok {
		_ = tcp.SetLinger(0)
	}
}

// rst resets the connection. Bytes not yet delivered may be lost with it.
func (c *conn) rst() {
	c.linger0()
	_ = c.net.Close()
}

// fin closes the engine's side. The connection's goroutine then waits for the
// client to close its own: closing outright would send RST when bytes of the
// client were unread.
func (c *conn) fin() {
	c.draining = true
	if half, ok := c.net.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		return
	}
	_ = c.net.Close()
}

func (c *conn) drain() {
	_ = c.net.SetReadDeadline(time.Now().Add(drainMax))
	_, _ = io.Copy(io.Discard, c.net)
}

// end carries out a fault that ends the connection.
func (c *conn) end(f Fault) error {
	c.blame("fault: " + f.String())
	switch f.Kind {
	case "fin":
		c.fin()
	case "exit":
		c.l.e.exit(c.l)
	default: // rst, refuse
		c.rst()
	}
	return errCut
}

// stall does nothing until the client is gone, the engine ends or the time is
// over.
func (c *conn) stall(f Fault, gone <-chan struct{}) error {
	var over <-chan time.Time
	if d := f.duration(0, 0); d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-over:
		return nil
	case <-gone:
		return errGone
	case <-c.l.ctx.Done():
		return errCut
	}
}
