// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// Response is one answer, and the rest of the exchange that brings it. All its
// methods belong to one goroutine, except Interrupt.
type Response struct {
	Status int
	Reason string
	// Header is as received, connection fields included: whoever forwards it
	// removes those (RFC 9110 §7.6.1).
	Header         http.Header
	ContentLength  int64       // as declared, also where no body follows (HEAD, 304); -1 is none
	Chunked        bool        // the body comes in chunks
	CloseDelimited bool        // the body ends where the connection does, so an orderly cut looks whole
	Last           bool        // the connection ends with this exchange
	Trailer        http.Header // set once Read has returned io.EOF, if there were trailers
	Reused         bool        // it came on a kept connection
	RequestWritten bool        // all of the request was written before the final head came

	pool    *Pool
	ctx     context.Context // the exchange's, asked for its cause only
	unwatch func() bool     // stops the watch on ctx; may be nil

	head    bool // the request was HEAD
	old     bool // HTTP/1.0
	started bool // a byte of the answer was seen
	whole   bool // the head is complete

	framing framing
	chunk   chunkState
	left    int64 // bytes left of the body, or of the chunk
	excess  int64 // chunk overhead beyond what honest senders have

	end     *End // how the exchange ended; nil while it runs
	ended   End  // end's memory
	timeout End  // what a passed deadline returns

	// mu guards the hand-over of c: whoever holds it may close c.raw, and an
	// exchange that has let go of its connection can't close it for the next.
	mu          sync.Mutex
	c           *conn // nil once the exchange is over
	interrupted error // why, once Interrupt was called
}

// exchange writes req and reads the final head.
func (r *Response) exchange(req *Request) *End {
	c := r.c
	c.wake(req.HeadBy)
	size := req.size()
	out := req.appendHead(c.out[:0], r.pool.host, size, r.pool.idleMax > 0)
	c.out = out

	var werr, rerr error
	if size <= inlineMax {
		if werr = c.write(out, req.Body, size); werr != nil {
			// The peer may have said why it does not listen: hear it out.
			c.hearOut(req.HeadBy)
		}
		rerr = r.readHead()
	} else {
		written := make(chan error, 1)
		go func() {
			err := c.write(out, req.Body, size)
			if err != nil && !isTimeout(err) {
				c.hearOut(req.HeadBy)
			}
			written <- err
		}()
		rerr = r.readHead()
		select {
		case werr = <-written:
		default:
			c.raw.SetWriteDeadline(longAgo)
			if werr = <-written; werr == nil {
				// All was written, only the goroutine had not said so: the next
				// request on this connection must not meet the deadline.
				c.raw.SetWriteDeadline(time.Time{})
			}
		}
	}
	r.RequestWritten = werr == nil
	if werr != nil {
		r.Last = true
	}
	if c.broken.Swap(false) {
		c.armed = longAgo // whatever hearOut set: the next read looks at want
	}
	if rerr != nil {
		return r.breakOff(rerr, werr)
	}

	r.whole = true
	if r.framing == bodyless || r.framing == byLength && r.left == 0 {
		r.finish(Complete, nil)
	}
	return nil
}

// readHead reads heads up to the final one.
func (r *Response) readHead() error {
	c, budget := r.c, r.pool.headMax
	var scan headScan
	for {
		b := c.unread()
		if err := checkStart(b); err != nil {
			return err
		}
		n, err := scan.scan(b)
		switch {
		case err != nil:
			return err
		case n > budget || n == 0 && len(b) >= budget:
			return malformed("head is too long")
		case n == 0:
			if len(b) == len(c.buf) {
				c.grow()
			}
			if err := c.fill(); err != nil {
				return err
			}
			r.started = true
			continue
		}

		if err := r.parseHead(string(b[:n])); err != nil {
			return err
		}
		c.r += n
		budget -= n
		switch {
		case r.Status == http.StatusSwitchingProtocols:
			return malformed("101 without an upgrade")
		case r.Status >= 200:
			return r.frame()
		}
		// An interim answer; its fields are not for the final one.
		scan = headScan{}
	}
}

// Read reads the body with its framing removed. It returns io.EOF exactly when
// the framing says that the body is whole; every other error is an *End. It
// returns what has arrived and waits only when nothing has.
//
// After a Timeout the exchange goes on: set another deadline and read. Any
// other error, io.EOF too, ends it and gives up the connection.
func (r *Response) Read(p []byte) (int, error) {
	if r.end != nil {
		return 0, r.result()
	}
	if len(p) == 0 {
		return 0, nil
	}
	var n int
	var err error
	if r.framing == byChunks {
		n, err = r.readChunks(p)
	} else {
		n, err = r.readPlain(p)
	}
	if err != nil {
		return n, r.fail(err)
	}
	if n == 0 {
		return 0, r.result()
	}
	return n, nil
}

// fail turns an I/O or framing error into what Read returns.
func (r *Response) fail(err error) error {
	if isTimeout(err) {
		r.timeout = r.evidence(Timeout, err)
		return &r.timeout
	}
	r.breakOff(err, nil)
	return r.result()
}

// result is what Read returns once the exchange is over.
func (r *Response) result() error {
	if r.end.Cause == Complete {
		return io.EOF
	}
	return r.end
}

// SetReadDeadline makes a Read that waits at t fail with Timeout; zero is no
// deadline. Moving a deadline later, or away, costs no timer operation, so it
// may be done for every chunk. Deadlines live in the connection's poller.
func (r *Response) SetReadDeadline(t time.Time) {
	if r.c != nil {
		r.c.limit(t)
	}
}

// Close is done with the answer. It never waits: if the rest of the body has
// been received already, the connection is kept, otherwise it is closed and
// the exchange ends as Interrupted. After the end it does nothing. Its error
// is always nil; it is there to make a Response an io.ReadCloser.
func (r *Response) Close() error {
	switch {
	case r.end != nil:
	case r.skipReceived():
		r.finish(Complete, nil)
	default:
		r.finish(Interrupted, errInterrupted)
	}
	return nil
}

// Interrupt ends the exchange from any goroutine: a pending or later Read
// returns at once with Cause Interrupted, unless the body was already whole.
func (r *Response) Interrupt() { r.interrupt(errInterrupted) }

// Detach stops the context from ending the exchange: for a caller that wants the
// last bytes of an answer after whoever asked for it has left.
func (r *Response) Detach() {
	if r.unwatch != nil {
		r.unwatch()
	}
}

func (r *Response) interruptByContext() { r.interrupt(context.Cause(r.ctx)) }

func (r *Response) interrupt(why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.c == nil || r.interrupted != nil {
		return
	}
	r.interrupted = why
	// The socket, not TLS over it: a goodbye could wait for a full send buffer.
	r.c.raw.Close()
}

// End is how the exchange ended, or nil while it goes on.
func (r *Response) End() *End { return r.end }

// evidence never holds io.EOF, which errors.Is would find in an End and take
// for the end of a whole body.
func (r *Response) evidence(cause Cause, err error) End {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return End{Cause: cause, Err: err, Reused: r.Reused, RequestWritten: r.RequestWritten,
		ResponseStarted: r.started, HeadComplete: r.whole}
}

// breakOff ends an exchange whose connection failed.
func (r *Response) breakOff(rerr, werr error) *End {
	e := r.evidence(Failed, nil)
	cause, err := brokenCause(&e, rerr, werr)
	if cause == Stale {
		r.pool.noteClosed(r.c, r.c.idleFor)
	}
	return r.finish(cause, err)
}

// finish ends the exchange, once.
func (r *Response) finish(cause Cause, err error) *End {
	r.mu.Lock()
	c, why := r.c, r.interrupted
	r.c = nil
	r.mu.Unlock()
	if r.unwatch != nil {
		r.unwatch()
	}

	// A body that is whole stays whole, but its socket is closed.
	if why != nil && cause != Complete {
		cause, err = Interrupted, why
	}
	r.ended = r.evidence(cause, err)
	r.end = &r.ended
	r.pool.active.Add(-1)
	if cause == Complete && why == nil && !r.Last {
		r.pool.put(c, r.Chunked)
	} else {
		c.close()
	}
	return r.end
}
