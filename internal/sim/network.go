// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"maps"
	"slices"
	"time"

	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/mutation"
)

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// delay is how long a message is under way.
func (n *node) delay() time.Duration {
	d := n.w.between(100*time.Microsecond, n.w.plan.Net.Delay)
	if n.w.chance(n.w.plan.Net.Hold) {
		d += n.w.between(0, n.w.plan.Net.HoldMax)
	}
	if n.slow > 0 && !n.w.calm {
		d += n.w.between(0, n.slow)
	}
	return d
}

// control sends one message of a control stream. Streams are replaced when they
// break, and what was in them may be lost, come late, or, sent again by its
// owner, come twice: so any message may.
func (n *node) control(up bool, deliver func()) {
	cut := n.cutDown
	if up {
		cut = n.cutUp
	}
	if n.w.chance(n.w.plan.Net.Lose) || cut > 0 && !n.w.chance(0.3) {
		return
	}
	if cut > 0 {
		n.held(up, func() { n.w.at(n.w.now+n.delay(), deliver) })
		return
	}
	n.w.at(n.w.now+n.delay(), deliver)
	if n.w.chance(n.w.plan.Net.Repeat) {
		n.w.at(n.w.now+n.delay(), deliver)
	}
}

// held keeps a message until the cut heals.
func (n *node) held(up bool, send func()) {
	if up {
		n.heldUp = append(n.heldUp, send)
	} else {
		n.heldDn = append(n.heldDn, send)
	}
}

// tell sends a message from the guard to the gateway of its session.
func (g *guard) tell(what func(l *link)) {
	if n, to := g.line, g.peer; to != nil {
		n.control(true, func() { to.do(func() { what(to.links[n.i]) }) })
	}
}

// order sends a message to the guard that is at the node's address when it comes,
// or, where a name leads elsewhere, to another node's.
func (l *link) order(what func(g *guard)) {
	n, from := l.n, l.g
	n.control(false, func() {
		to := n
		if n.alias > 0 {
			to = n.w.nodes[(n.i+1)%len(n.w.nodes)]
		}
		g := to.guard()
		if g.bare {
			return
		}
		if to == n {
			if mutation.RevokeUnlocked && g.busy && g.still == 0 {
				what(g)
				return
			}
			g.do(func() { what(g) })
			return
		}
		g.do(func() {
			what(&guard{process: process{w: g.w}, n: to, line: n, inc: g.inc, name: g.name, roster: g.roster, peer: from})
			g.arm()
		})
	})
}

// conn is one data connection of an attempt.
type conn struct {
	f       *flight
	n       *node
	key     lease.Key
	prompt  int
	tokens  int
	reset   bool // in the middle: nothing passes any more
	hole    bool // and nobody says so
	closed  bool // the gateway is done with it
	last    time.Duration
	serving []*serving // more than one only if the request was repeated
}

// up sends something to the gateway, after all that was sent before.
func (c *conn) up(what func(f *flight)) {
	if c.reset {
		return
	}
	if c.n.cutUp > 0 {
		c.n.held(true, func() { c.up(what) })
		return
	}
	c.last = max(c.last, c.n.w.now+c.n.delay())
	c.n.w.at(c.last, func() {
		if !c.closed && !c.f.g.dead {
			// What was read is in the relay's hands, whatever happens then.
			c.f.g.after(c.f.w.between(0, 2*time.Millisecond), func() { what(c.f) })
		}
	})
}

// close ends the gateway's side; the guard hears of it, or it does not.
func (c *conn) close() {
	if c.closed {
		return
	}
	c.closed = true
	c.leave()
	if c.reset {
		return
	}
	c.down(func() {
		for _, s := range c.serving {
			s.guard.do(func() { s.guard.closed(s) })
		}
	})
}

func (c *conn) down(deliver func()) {
	if c.n.cutDown > 0 {
		c.n.held(false, func() { c.down(deliver) })
		return
	}
	c.n.w.at(c.n.w.now+c.n.delay(), deliver)
}

func (c *conn) leave() {
	if i := slices.Index(c.n.conns, c); i >= 0 {
		c.n.conns = slices.Delete(c.n.conns, i, i+1)
	}
}

// noticed is how long one end takes to hear of a reset.
func (c *conn) noticed() time.Duration { return c.n.w.between(time.Millisecond, 300*time.Millisecond) }

// breakOff is a reset by something in the middle. The gateway hears of it; the
// guard when it writes next, or by and by.
func (c *conn) breakOff() {
	c.reset = true
	c.f.g.after(c.noticed(), func() {
		if !c.closed {
			c.f.closed(c, true)
		}
	})
	for _, s := range c.serving {
		s.guard.after(c.noticed()+c.n.w.between(0, 2*time.Second), func() { s.guard.closed(s) })
	}
}
