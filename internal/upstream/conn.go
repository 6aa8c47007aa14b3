// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// bufSize holds any ordinary head, and a burst of streamed events.
	bufSize = 8 << 10
	// A request with a body up to coalesceMax is copied together and written
	// by one plain write, over TLS as one record.
	coalesceMax = 8 << 10
	// A body up to inlineMax fits into the socket buffers of both sides, so
	// writing it can't keep us from seeing an early answer.
	inlineMax = 64 << 10
	// How long a peer that broke off the upload may take to be heard out. What
	// it said is already on its way.
	lastWords = time.Second
)

var buffers = sync.Pool{New: func() any { return new([bufSize]byte) }}

// longAgo is a deadline that has passed.
var longAgo = time.Unix(1, 0)

// conn is one connection. One goroutine uses it at a time, except that raw may
// be closed by any, and that write runs beside reads.
type conn struct {
	raw  net.Conn // the socket
	rw   net.Conn // the socket, or TLS over it
	tls  *tlsSocket
	peek *peeker

	buf  []byte // read buffer; buf[r:w] is unread
	r, w int
	own  *[bufSize]byte // buf's memory while it has its usual size
	out  []byte         // scratch for the request's head
	vec  net.Buffers    // scratch for writev

	// The read deadline asked for, and the one set on the socket. A deadline
	// that moves later is only noted; the earlier one moves it when it fires.
	// That makes an idle limit free in a stream.
	want, armed time.Time
	// broken: the write failed, and the read deadline is for last words.
	broken atomic.Bool

	reused    bool
	idleFor   time.Duration // before this use
	idleSince time.Time
	streamed  bool // the last answer was chunked
}

// dial opens a connection and, for https, does the handshake.
func (p *Pool) dial(ctx context.Context) (*conn, *End) {
	dctx, cancel := context.WithTimeout(ctx, p.connectTimeout)
	defer cancel()
	raw, err := p.dialFunc(dctx, "tcp", p.addr)
	if err != nil {
		return nil, dialEnd(ctx, dialCause(ctx, err), err)
	}
	c := &conn{raw: raw, rw: raw, peek: newPeeker(raw)}
	if p.tls == nil {
		return c, nil
	}

	c.tls = &tlsSocket{Conn: raw}
	tc := tls.Client(c.tls, p.tls)
	err = tc.HandshakeContext(dctx)
	if proto := tc.ConnectionState().NegotiatedProtocol; err == nil && proto != "" && proto != "http/1.1" {
		err = errors.New("peer chose protocol " + proto)
	}
	if err != nil {
		raw.Close()
		cause := TLSFailed
		if ctx.Err() != nil {
			cause = Interrupted
		}
		return nil, dialEnd(ctx, cause, err)
	}
	c.rw = tc
	return c, nil
}

func dialEnd(ctx context.Context, cause Cause, err error) *End {
	if cause == Interrupted {
		err = context.Cause(ctx)
	}
	return &End{Cause: cause, Err: err}
}

// tlsSocket notes an end of the stream that TLS did not announce. crypto/tls
// takes a FIN between records for a close_notify; for a body delimited by
// close that would let anyone on the path cut it unnoticed (RFC 9112 §9.8).
type tlsSocket struct {
	net.Conn
	cut bool
}

func (s *tlsSocket) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	if err == io.EOF {
		s.cut = true
	}
	return n, err
}

// unread is what was received and not yet consumed.
func (c *conn) unread() []byte { return c.buf[c.r:c.w] }

// fill reads once into the buffer, after what is unread. There is room: no
// caller waits for more than a buffer holds.
func (c *conn) fill() error {
	if c.r == c.w {
		c.r, c.w = 0, 0
	} else if c.w == len(c.buf) {
		c.w = copy(c.buf, c.buf[c.r:c.w])
		c.r = 0
	}
	n, err := c.read(c.buf[c.w:])
	c.w += n
	return err
}

// grow doubles the buffer, for a long head.
func (c *conn) grow() {
	buf := make([]byte, 2*len(c.buf))
	c.w = copy(buf, c.unread())
	c.r = 0
	c.buf = buf
	if c.own != nil {
		buffers.Put(c.own)
		c.own = nil
	}
}

// read reads at least one byte, or fails.
func (c *conn) read(p []byte) (int, error) {
	for range 100 {
		n, err := c.rw.Read(p)
		switch {
		case n > 0:
			// An error beside data comes again at the next read.
			return n, nil
		case err == nil:
			continue
		case isTimeout(err) && !c.broken.Load() && c.postpone():
			continue
		case err == io.EOF && c.tls != nil && c.tls.cut:
			return 0, io.ErrUnexpectedEOF
		}
		return 0, err
	}
	return 0, io.ErrNoProgress
}

// postpone moves a read deadline that fired to where it is wanted; false means
// it is due.
func (c *conn) postpone() bool {
	if !c.want.IsZero() && !time.Now().Before(c.want) {
		return false
	}
	c.arm(c.want)
	return true
}

// limit sets the read deadline; zero is none.
func (c *conn) limit(t time.Time) {
	c.want = t
	// An armed deadline that is not later than t postpones itself.
	if c.armed.IsZero() && !t.IsZero() || !t.IsZero() && t.Before(c.armed) {
		c.arm(t)
	}
}

func (c *conn) arm(t time.Time) {
	c.armed = t
	c.raw.SetReadDeadline(t)
}

// write hands a request to the kernel. It leaves body as it is: the caller may
// need it for another attempt.
func (c *conn) write(head []byte, body [][]byte, size int64) error {
	if size <= coalesceMax {
		for _, seg := range body {
			head = append(head, seg...)
		}
		c.out = head
		_, err := c.rw.Write(head)
		return err
	}
	segs := append(append(c.vec[:0], head), body...)
	c.vec = segs
	// WriteTo consumes c.vec, and clears what it wrote: an idle connection
	// keeps no body alive.
	_, err := c.vec.WriteTo(c.rw)
	c.vec = segs[:0]
	return err
}

// hearOut limits the reading after a failed write.
func (c *conn) hearOut(by time.Time) {
	t := time.Now().Add(lastWords)
	if !by.IsZero() && by.Before(t) {
		t = by
	}
	c.broken.Store(true)
	c.raw.SetReadDeadline(t)
}

// wake readies an idle or new connection for an exchange.
func (c *conn) wake(by time.Time) {
	c.own = buffers.Get().(*[bufSize]byte)
	c.buf, c.r, c.w = c.own[:], 0, 0
	if !by.IsZero() {
		c.want, c.armed = by, by
		c.raw.SetDeadline(by)
	}
}

// rest readies a connection for idling. It reports whether the connection is
// fit for reuse: bytes that follow a complete answer belong to no request.
func (c *conn) rest() bool {
	clean := c.r == c.w && !c.hidden()
	c.release()
	if !c.armed.IsZero() {
		c.want, c.armed = time.Time{}, time.Time{}
		c.raw.SetDeadline(time.Time{})
	}
	if cap(c.out) > 2*coalesceMax {
		c.out = nil
	}
	return clean
}

func (c *conn) release() {
	if c.own != nil {
		buffers.Put(c.own)
	}
	c.own, c.buf, c.r, c.w = nil, nil, 0, 0
}

// hidden reports bytes that TLS has decrypted and we have not asked for; a
// peek at the socket can't see them.
func (c *conn) hidden() bool {
	if c.tls == nil {
		return false
	}
	c.armed = longAgo // rest clears it
	c.raw.SetReadDeadline(longAgo)
	var b [1]byte
	n, err := c.rw.Read(b[:])
	return n > 0 || !isTimeout(err)
}

// close ends the connection without ceremony.
func (c *conn) close() {
	c.release()
	c.raw.Close()
}

// closeIdle ends a connection on which nothing is under way, with TLS's
// goodbye.
func (c *conn) closeIdle() {
	c.release()
	c.rw.Close()
}

// state is what a probe finds on an idle connection.
type state uint8

const (
	quiet  state = iota // open, nothing received
	spoken              // received bytes that nobody asked for
	gone                // closed or broken
)

// probe looks at an idle connection without taking anything from it.
func (c *conn) probe() state {
	if c.peek.known() {
		return c.peek.look()
	}
	// No socket to peek at: a short read. A byte that it takes is no loss, the
	// connection is dropped then.
	c.raw.SetReadDeadline(time.Now().Add(100 * time.Microsecond))
	defer c.raw.SetReadDeadline(time.Time{})
	var b [1]byte
	switch n, err := c.raw.Read(b[:]); {
	case n > 0:
		return spoken
	case isTimeout(err):
		return quiet
	}
	return gone
}
