// SPDX-License-Identifier: Apache-2.0

package real

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Direction is which way bytes go through a relay.
type Direction int

// Directions.
const (
	ToEngine Direction = iota
	ToGateway
)

func (d Direction) String() string { return [...]string{"to the engine", "to the gateway"}[d] }

// Ending is how one side of a connection ended it.
type Ending string

// Endings. FIN says that no more comes; RST that what was sent may be lost.
const (
	Open Ending = ""
	FIN  Ending = "FIN"
	RST  Ending = "RST"
)

// Relay is a wire between the gateway and one engine that remembers what went
// over it. It knows nothing of HTTP.
type Relay struct {
	engine    string
	listener  net.Listener
	accepting sync.WaitGroup
	running   sync.WaitGroup // of connections; grows only while accepting

	state // of what follows
	conns []*Conn
	hold  *Hold
}

// NewRelay listens for the gateway in front of an engine's address.
func NewRelay(listen, engine string) (*Relay, error) {
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, err
	}
	r := &Relay{engine: engine, listener: l}
	r.accepting.Go(r.accept)
	return r, nil
}

// Addr is where the gateway connects.
func (r *Relay) Addr() string { return r.listener.Addr().String() }

// Refuse makes new connections be refused, as they are where no process
// listens. What is connected stays.
func (r *Relay) Refuse() { r.listener.Close() }

// Close ends every connection and returns when nothing runs.
func (r *Relay) Close() {
	r.Refuse()
	r.accepting.Wait()
	for _, c := range r.Conns() {
		c.Cut(FIN)
	}
	r.running.Wait()
}

// Conns are the connections that the gateway has made, in order.
func (r *Relay) Conns() []*Conn {
	var conns []*Conn
	r.read(func() { conns = slices.Clone(r.conns) })
	return conns
}

// Hold arms a hold. Several relays may share one; the first connection that has
// bytes in its direction is caught, and only that one.
func (r *Relay) Hold(h *Hold) { r.update(func() { r.hold = h }) }

func (r *Relay) accept() {
	for {
		gateway, err := r.listener.Accept()
		if err != nil {
			return
		}
		engine, err := net.DialTimeout("tcp", r.engine, 5*time.Second)
		if err != nil {
			reset(gateway)
			continue
		}
		c := &Conn{relay: r, Began: time.Now()}
		c.side[ToEngine] = side{from: gateway, to: engine}
		c.side[ToGateway] = side{from: engine, to: gateway}
		r.update(func() { r.conns = append(r.conns, c) })
		r.running.Go(func() { c.pump(ToEngine) })
		r.running.Go(func() { c.pump(ToGateway) })
	}
}

// A Hold catches one connection and holds back its bytes in one direction.
type Hold struct {
	Direction Direction

	// Pass says how many of the bytes since the connection was caught may go on;
	// nil lets none through.
	Pass func(since []byte) int

	state // of what follows
	conn  *Conn
}

// Caught waits until the hold holds a connection's bytes back.
func (h *Hold) Caught(ctx context.Context) (*Conn, error) {
	err := h.await(ctx, func() bool { return h.conn != nil })
	return h.conn, err
}

// claim catches a connection if the hold has caught none.
func (h *Hold) claim(c *Conn) (mine bool) {
	h.update(func() {
		if mine = h.conn == nil; mine {
			h.conn = c
		}
	})
	return mine
}

// Conn is one connection of the gateway through a relay.
type Conn struct {
	Began time.Time

	relay   *Relay
	writing [2]sync.Mutex // per direction; taken before the state's lock
	state                 // of what follows
	side    [2]side
}

// side is one direction of a connection.
type side struct {
	from, to net.Conn // never change
	record   []byte   // what came
	passed   int      // how much of it went on
	end      Ending   // how from ended

	holding *Hold
	since   int // where in the record the hold began
}

func (c *Conn) pump(d Direction) {
	from := c.side[d].from
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			c.take(d, buf[:n])
			c.forward(d)
		}
		if err != nil {
			c.ended(d, err)
			return
		}
	}
}

func (c *Conn) take(d Direction, p []byte) {
	var hold *Hold
	c.relay.read(func() { hold = c.relay.hold })
	mine := hold != nil && hold.Direction == d && hold.claim(c)
	c.update(func() {
		s := &c.side[d]
		if mine {
			s.holding, s.since = hold, len(s.record)
		}
		s.record = append(s.record, p...)
	})
}

// forward writes what may go on.
func (c *Conn) forward(d Direction) {
	c.writing[d].Lock()
	defer c.writing[d].Unlock()
	var p []byte
	c.update(func() {
		s := &c.side[d]
		until := len(s.record)
		if s.holding != nil {
			until = s.since
			if s.holding.Pass != nil {
				until += min(s.holding.Pass(s.record[s.since:]), len(s.record)-s.since)
			}
		}
		if until > s.passed {
			p = s.record[s.passed:until]
			s.passed = until
		}
	})
	if len(p) > 0 {
		_, _ = c.side[d].to.Write(p) // the reader of that side learns that it is gone
	}
}

// ended passes the end of one side on to the other, unless bytes before it are
// held back.
func (c *Conn) ended(d Direction, err error) {
	if errors.Is(err, net.ErrClosed) {
		return // the other direction has closed both
	}
	end, held := FIN, false
	if errors.Is(err, syscall.ECONNRESET) {
		end = RST
	}
	c.update(func() {
		c.side[d].end = end
		held = c.side[d].holding != nil
	})
	if !held {
		c.pass(d, end)
		c.side[d].from.Close()
	}
}

func (c *Conn) pass(d Direction, end Ending) {
	to := c.side[d].to
	if end == RST {
		reset(to)
	} else {
		to.Close()
	}
}

// reset closes a connection so that its peer gets a RST.
func reset(c net.Conn) {
	_ = c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// Release ends a hold: what was held back goes on, the end of the side too.
func (c *Conn) Release() {
	for d := range c.side {
		end := Open
		c.update(func() {
			if c.side[d].holding != nil {
				c.side[d].holding = nil
				end = c.side[d].end
			}
		})
		c.forward(Direction(d))
		if end != Open {
			c.pass(Direction(d), end)
			c.side[d].from.Close()
		}
	}
}

// Cut ends the connection on both sides. What was held back is never sent.
func (c *Conn) Cut(end Ending) {
	c.pass(ToGateway, end)
	c.pass(ToEngine, end)
}

// Bytes are what came in a direction, and how many of them went on.
func (c *Conn) Bytes(d Direction) (record []byte, passed int) {
	c.read(func() { record, passed = c.side[d].record, c.side[d].passed })
	return record, passed
}

// AwaitBytes waits until what came in a direction is as wanted.
func (c *Conn) AwaitBytes(ctx context.Context, d Direction, holds func(record []byte) bool) error {
	return c.await(ctx, func() bool { return holds(c.side[d].record) })
}

// AwaitEnd waits until the side that sends in a direction has ended the
// connection.
func (c *Conn) AwaitEnd(ctx context.Context, d Direction) (end Ending, err error) {
	err = c.await(ctx, func() bool { end = c.side[d].end; return end != Open })
	return end, err
}
