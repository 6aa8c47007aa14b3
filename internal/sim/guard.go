// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/headgate/headgate/internal/guard/roster"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/mutation"
	"github.com/headgate/headgate/internal/sim/check"
)

// serving is one attempt at work at a guard.
type serving struct {
	key    lease.Key
	guard  *guard
	conn   *conn
	engine *engine
	serial int
	job    string
	wrote  int  // chunks
	errAt  int  // the chunk that is an error event, 0: none
	over   bool // the guard is done with it
}

// guard is one life of a guard's process. A bare one is no guard: what an engine
// without one does.
type guard struct {
	process
	n       *node
	bare    bool
	inc     lease.Incarnation
	name    string
	serving []*serving
	serials int
	peer    *gateway // of the newest session, nil: none
	session uint64
	line    *node // whose control stream it answers on: its own node's, but for an alias
	armed   time.Duration
	roster  *roster.Roster
}

func (n *node) startGuard() {
	g := &guard{process: process{w: n.w}, n: n, line: n, bare: n.set.Bare}
	g.inc = lease.Incarnation{Guard: fmt.Sprintf("guard-%d", n.i), Start: lease.Boottime(n.boottime()), Boot: fmt.Sprintf("boot-%d.%d", n.i, n.boot)}
	g.name = g.inc.String()
	g.roster = roster.New(g.inc, n.w.plan.Terms.TTL)
	n.guards = append(n.guards, g)
	g.beat()
}

func (g *guard) fact(what check.What, key lease.Key) {
	g.w.fact(check.Fact{What: what, Request: string(key.Request), N: key.N, Guard: g.name, Clock: g.n.boottime()})
}

// beat sends a heartbeat, and goes on.
func (g *guard) beat() {
	if g.bare {
		return
	}
	if session := g.session; g.peer != nil {
		hb := lease.Heartbeat{G: g.n.told(), Guard: g.inc, Alone: g.n.set.Lock}
		g.tell(func(l *link) { l.heartbeat(session, hb) })
	}
	next := g.n.clock.when(g.n.boottime() + int64(g.w.plan.Terms.Heartbeat))
	g.w.at(next, func() { g.do(g.beat) })
}

// connect begins a session: the guard says what it believes.
func (g *guard) connect(session uint64, who lease.Gateway, from *gateway) {
	if !g.roster.Hello(g.n.told(), who) || from == g.peer && session <= g.session {
		return
	}
	g.peer, g.session = from, session
	list := g.roster.List(who.ID)
	hb := lease.Heartbeat{G: g.n.told(), Guard: g.inc, Alone: g.n.set.Lock}
	g.tell(func(l *link) {
		l.heartbeat(session, hb)
		l.resync(g.inc, list)
	})
}

// dispatch takes an attempt's request.
func (g *guard) dispatch(c *conn, grant lease.Grant) {
	if !g.bare {
		if why := g.roster.Admit(g.n.told(), grant); why != "" {
			if len(c.serving) == 0 { // else it is a copy, and its sender has an answer
				c.up(func(f *flight) { f.refused(c, why) })
			}
			return
		}
		g.fact(check.Started, grant.Key)
		g.arm()
	}
	if g.n.engine.dead || g.w.chance(g.n.set.Busy) {
		busy := !g.n.engine.dead
		if !g.bare {
			g.roster.Finish(grant.Key, lease.Finished)
			g.w.fact(check.Fact{What: check.Declared, Request: string(grant.Request), N: grant.N, Guard: g.name})
		}
		c.up(func(f *flight) { f.engineSaid(c, busy) })
		return
	}
	g.serials++
	s := &serving{key: grant.Key, guard: g, conn: c, engine: g.n.engine, serial: 1000*len(g.n.guards) + g.serials}
	if g.w.chance(g.n.set.Err) {
		s.errAt = 1 + g.w.rnd.IntN(max(c.tokens-1, 1))
	}
	c.serving = append(c.serving, s)
	g.serving = append(g.serving, s)
	s.engine.submit(s)
}

// publish lets one chunk pass, or not. Between check and write nothing else
// happens to the guard: that is the attempt's lock.
func (g *guard) publish(s *serving, last bool) {
	if s.over {
		return
	}
	if !g.bare {
		if !g.roster.Check(g.n.told(), s.key) {
			g.tick()
			return
		}
		g.fact(check.Checked, s.key)
	}
	if g.w.chance(g.w.plan.Net.Split) {
		g.hold(g.w.between(10*time.Microsecond, 3*time.Millisecond), func() { g.write(s, last) })
		return
	}
	g.write(s, last)
}

func (g *guard) write(s *serving, last bool) {
	if !g.bare {
		g.fact(check.Written, s.key)
	}
	if s.wrote++; s.wrote == s.errAt && !last {
		status := []int{0, 400, 500}[g.w.rnd.IntN(3)]
		s.conn.up(func(f *flight) { f.errorEvent(s.conn, status) })
	} else {
		s.conn.up(func(f *flight) { f.chunk(s.conn, last) })
	}
	if s.conn.reset && !s.conn.hole {
		g.after(s.conn.noticed(), func() { g.closed(s) })
	}
	if g.bare {
		s.over = s.over || last
		g.forget()
		return
	}
	if g.roster.Wrote(g.n.told(), s.key, 10) {
		g.fact(check.CountedLate, s.key)
	}
	if last {
		g.roster.Finish(s.key, lease.Finished)
		s.over = true
		g.forget()
	}
	g.tick()
}

// forget drops what is done with.
func (g *guard) forget() {
	kept := g.serving[:0]
	for _, s := range g.serving {
		if !s.over {
			kept = append(kept, s)
		}
	}
	g.serving = kept
}

// closed: the gateway's end of a data connection is gone.
func (g *guard) closed(s *serving) {
	if s.over {
		return
	}
	if g.bare {
		g.abort(s)
		return
	}
	if end, ok := g.roster.Finish(s.key, lease.Closed); ok {
		g.declare(end)
		g.abort(s)
	}
}

// declare tells the gateway that an attempt has ended.
func (g *guard) declare(end lease.End) {
	g.fact(check.Declared, end.Key)
	g.tell(func(l *link) { l.ended(end) })
}

// abort ends the engine's work and the connection, which both take a while: what
// the engine still makes comes to publish.
func (g *guard) abort(s *serving) {
	took := g.w.between(time.Millisecond, g.n.set.Abort)
	s.engine.abort(s, took, func() {
		g.do(func() {
			s.over = true
			g.roster.EngineStopped(s.key, lease.StoppedYes)
			g.forget()
		})
	})
	s.conn.up(func(f *flight) { f.closed(s.conn, false) })
}

func (g *guard) abortAll(key lease.Key) {
	for _, s := range slices.Clone(g.serving) {
		if s.key == key {
			g.abort(s)
		}
	}
}

// tick ends what is past its deadline.
func (g *guard) tick() {
	for _, end := range g.roster.Tick(g.n.told()) {
		g.declare(end)
		g.abortAll(end.Key)
	}
	g.arm()
}

// arm waits for the next deadline.
func (g *guard) arm() {
	next, ok := g.roster.Next()
	if !ok || g.line != g.n {
		return
	}
	at := g.n.clock.when(int64(next))
	if mutation.MonotonicClock {
		at += g.n.lag
	}
	at = max(at, g.w.now+time.Microsecond)
	if g.armed <= g.w.now || at < g.armed {
		g.armed = at
		g.w.at(at, func() { g.do(g.tick) })
	}
}

// renew takes a batch of renewals.
func (g *guard) renew(grants []lease.Grant) {
	for _, grant := range grants {
		g.roster.Renew(g.n.told(), grant)
	}
	g.arm()
}

// revoke takes a batch of revokes and acknowledges each.
func (g *guard) revoke(batch []lease.Revoke) {
	for _, v := range batch {
		end, abort := g.roster.Revoke(g.n.told(), v)
		g.declare(end)
		if abort {
			g.abortAll(v.Key)
		}
	}
	g.arm()
}

// engineExited: nothing that the engine left in a buffer is published after.
func (g *guard) engineExited(dead *engine) {
	for _, end := range g.roster.EngineExited() {
		g.declare(end)
	}
	for _, s := range slices.Clone(g.serving) {
		if s.engine == dead {
			s.over = true
			s.conn.up(func(f *flight) { f.closed(s.conn, true) })
		}
	}
	g.forget()
}

// hangUp ends the control stream.
func (g *guard) hangUp() {
	session := g.session
	g.tell(func(l *link) {
		if l.session == session {
			l.Close(session)
			l.g.after(l.g.w.between(time.Millisecond, 30*time.Millisecond), l.connect)
		}
	})
}

// crash ends the guard's process. Its connections are closed by the kernel, or
// not at all if the host went down; its engine notices.
func (g *guard) crash(silently bool) {
	g.kill()
	g.w.fact(check.Fact{What: check.GuardDied, Guard: g.name})
	if !silently {
		g.hangUp()
	}
	if session, to := g.session, g.peer; to != nil { // what the old stream still holds
		hb := lease.Heartbeat{G: g.n.told(), Guard: g.inc, Alone: g.n.set.Lock}
		line := g.line.i
		g.w.at(g.w.now+g.w.between(0, 2*g.w.plan.Terms.TTL), func() { to.do(func() { to.links[line].heartbeat(session, hb) }) })
	}
	for _, s := range g.serving {
		s.engine.abort(s, g.w.between(time.Millisecond, 50*time.Millisecond), func() {})
		if !silently {
			s.conn.up(func(f *flight) { f.closed(s.conn, true) })
		}
	}
}
