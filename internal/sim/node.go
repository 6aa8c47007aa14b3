// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/mutation"
	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine/model"
)

// node is one host: a clock, an engine, and the guard at its address.
type node struct {
	w       *world
	i       int
	set     *Node
	id      inference.EndpointID
	clock   clock
	boot    int
	lag     time.Duration // how long the host was suspended in this boot
	guards  []*guard      // every life; the last one is at the address
	engine  *engine
	lives   int // of the engine
	cutUp   int
	cutDown int
	heldUp  []func() // by the cut, of connections that hang
	heldDn  []func()
	slow    time.Duration // everything is held for up to so long
	alias   int           // how many faults send its control messages elsewhere
	conns   []*conn       // data connections that are open somewhere
}

func newNode(w *world, i int) *node {
	n := &node{w: w, i: i, set: &w.plan.Nodes[i], id: inference.EndpointID(fmt.Sprintf("http://node-%d:80", i))}
	n.start()
	return n
}

// start boots the host.
func (n *node) start() {
	n.boot++
	n.lag = 0
	up := n.w.between(5*time.Second, 100*time.Second)
	if n.boot > 1 {
		up = n.w.between(time.Second, 5*time.Second)
	}
	n.clock = clock{base: int64(up), since: n.w.now, ppm: n.set.Clock}
	n.startEngine()
	n.startGuard()
}

func (n *node) guard() *guard { return n.guards[len(n.guards)-1] }

// boottime is CLOCK_BOOTTIME.
func (n *node) boottime() int64 { return n.clock.at(n.w.now) }

// told is what the guard reads.
func (n *node) told() lease.Boottime {
	b := lease.Boottime(n.boottime())
	if mutation.MonotonicClock {
		b = b.Add(-n.lag)
	}
	return b
}

// engine is one life of an engine's process.
type engine struct {
	process
	n     *node
	name  string
	model *model.Engine
	jobs  map[string]*serving
	next  time.Duration // when pump is due
}

func (n *node) startEngine() {
	n.lives++
	n.engine = &engine{
		process: process{w: n.w}, n: n, name: fmt.Sprintf("engine-%d.%d", n.i, n.lives), jobs: map[string]*serving{},
		model: model.New(model.Params{
			StepBase: n.set.Token, Token: 200 * time.Microsecond, Decode: time.Millisecond, Blocks: 1024, RunningMax: 3,
		}),
	}
}

func (e *engine) submit(s *serving) {
	e.do(func() {
		s.job = fmt.Sprintf("%s#%d", s.key, s.serial)
		if e.model.Submit(e.w.now, model.Job{ID: s.job, PromptTokens: s.conn.prompt, MaxNew: s.conn.tokens}) != nil {
			return
		}
		e.jobs[s.job] = s
		e.w.fact(check.Fact{What: check.EngineBegan, Request: string(s.key.Request), N: s.key.N, Engine: e.name})
		e.pump()
	})
}

// pump takes what the engine has made and waits for more.
func (e *engine) pump() {
	for {
		at, ok := e.model.Next()
		if !ok {
			return
		}
		if at > e.w.now {
			if e.next != at {
				e.next = at
				e.w.at(at, func() {
					e.do(func() {
						e.next = 0
						e.pump()
					})
				})
			}
			return
		}
		for _, ev := range e.model.Step(e.w.now) {
			s := e.jobs[ev.Job]
			switch {
			case s == nil:
			case ev.Kind == model.Token:
				last := ev.N == s.conn.tokens
				s.guard.after(50*time.Microsecond, func() { s.guard.publish(s, last) })
			case ev.Kind == model.Finished:
				e.ended(s)
			}
		}
	}
}

func (e *engine) ended(s *serving) {
	if e.jobs[s.job] == nil {
		return
	}
	delete(e.jobs, s.job)
	e.w.fact(check.Fact{What: check.EngineEnded, Request: string(s.key.Request), N: s.key.N, Engine: e.name})
}

// abort ends a job, a while after it is asked to.
func (e *engine) abort(s *serving, after time.Duration, then func()) {
	e.after(after, func() {
		e.model.Cancel(e.w.now, s.job)
		e.ended(s)
		e.pump()
		then()
	})
}

// crash ends the engine and all that it computed.
func (e *engine) crash() {
	e.kill()
	for _, id := range sortedKeys(e.jobs) {
		e.ended(e.jobs[id])
	}
}

// serving is one attempt at work at a guard.
type serving struct {
	key    lease.Key
	guard  *guard
	conn   *conn
	engine *engine
	serial int
	job    string
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
	roster  *guardRoster
}

func (n *node) startGuard() {
	g := &guard{process: process{w: n.w}, n: n, line: n, bare: n.set.Bare}
	g.inc = lease.Incarnation{Guard: fmt.Sprintf("guard-%d", n.i), Start: lease.Boottime(n.boottime()), Boot: fmt.Sprintf("boot-%d.%d", n.i, n.boot)}
	g.name = g.inc.String()
	g.roster = newRoster(g.inc, n.w.plan.Terms.TTL)
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
	if !g.roster.Hello(who) || from == g.peer && session <= g.session {
		return
	}
	g.peer, g.session = from, session
	list := g.roster.List()
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
	s.conn.up(func(f *flight) { f.chunk(s.conn, last) })
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
	for _, s := range append([]*serving(nil), g.serving...) {
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
	for _, s := range append([]*serving(nil), g.serving...) {
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
	for _, s := range g.serving {
		s.engine.abort(s, g.w.between(time.Millisecond, 50*time.Millisecond), func() {})
		if !silently {
			s.conn.up(func(f *flight) { f.closed(s.conn, true) })
		}
	}
}
