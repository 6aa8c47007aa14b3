// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/mutation"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/sim/check"
)

// gateway is one life of the gateway's process.
type gateway struct {
	process
	self    lease.Gateway
	clock   clock
	pool    fleet.Pool
	book    *schedule.Book
	links   []*link
	flights map[inference.RequestID]*flight
}

func newGateway(w *world, generation uint64) *gateway {
	g := &gateway{
		process: process{w: w}, self: lease.Gateway{ID: "gw", Generation: generation},
		clock:   clock{base: int64(time.Hour), ppm: w.plan.Gateway},
		flights: map[inference.RequestID]*flight{},
		book: schedule.NewBook(schedule.Config{Retry: schedule.BudgetConfig{Ratio: budget.Ratio, MinPerSecond: budget.MinPerSecond}},
			rand.New(rand.NewPCG(w.plan.Seed, generation))),
	}
	for _, n := range w.nodes {
		g.pool.Endpoints = append(g.pool.Endpoints, inference.Endpoint{ID: n.id})
		g.links = append(g.links, &link{Link: lease.NewLink(w.plan.Terms, g.self), g: g, n: n})
	}
	g.inherit()
	for _, l := range g.links {
		if !l.n.set.Bare {
			l.connect()
			l.watch()
		}
	}
	return g
}

// inherit fences what the life before left unfinished.
func (g *gateway) inherit() {
	for _, id := range g.w.records {
		r := g.w.journal[id]
		if r.outcome != inference.NoOutcome || r.n == 0 || r.fence != inference.FenceLease || r.fenced {
			continue
		}
		l := g.links[r.node]
		if mutation.RestartNaive {
			r.fenced = true
			continue
		}
		l.Inherit(lease.Key{Request: id, N: r.n}, r.guard, g.now())
		l.arm()
	}
}

func (g *gateway) now() time.Time { return time.Unix(0, g.clock.at(g.w.now)) }

// later runs fn when the gateway's clock shows now and d more.
func (g *gateway) later(d time.Duration, fn func()) {
	g.w.at(g.clock.when(g.clock.at(g.w.now)+int64(d)), func() { g.do(fn) })
}

func sortedIDs[V any](m map[inference.RequestID]V) []inference.RequestID {
	return slices.Sorted(maps.Keys(m))
}

// link is the gateway's end of one control stream.
type link struct {
	*lease.Link
	g       *gateway
	n       *node
	session uint64
	heard   time.Time // newest heartbeat
	waited  time.Time // when it began to wait for what it received last
	armed   time.Duration
}

// connect opens a new session, whatever became of the old one.
func (l *link) connect() {
	l.session++
	l.Open(l.session)
	l.heard, l.waited = l.g.now(), l.g.now()
	session, self, from := l.session, l.g.self, l.g
	l.order(func(g *guard) { g.connect(session, self, from) })
}

// watch replaces a stream that is silent, and suspects attempts that are too.
func (l *link) watch() {
	terms := l.g.w.plan.Terms
	if l.g.now().Sub(l.heard) > 3*terms.Heartbeat+terms.Heartbeat/2 {
		for _, id := range sortedIDs(l.g.flights) {
			f := l.g.flights[id]
			if f.conn != nil && f.conn.n == l.n && l.g.now().Sub(f.moved) > 3*terms.Heartbeat {
				f.step(attempt.Evidence{N: f.n, Kind: attempt.GuardLost})
			}
		}
		l.connect()
	}
	l.g.later(terms.Heartbeat, l.watch)
}

// heartbeat takes one, renews what may be renewed and repeats what was not
// acknowledged.
func (l *link) heartbeat(session uint64, hb lease.Heartbeat) {
	now := l.g.now()
	received := now
	if mutation.TBeforeReceive {
		received = l.waited
	}
	l.waited = now
	heard := l.Heartbeat(received, session, hb)
	if heard.Ignored != lease.OldSession && heard.Ignored != lease.OtherGuard {
		l.heard = now
	}
	for _, p := range heard.Fenced {
		l.proved(p, attempt.GuardReplaced)
	}
	if grants := l.Renewals(now); len(grants) > 0 {
		for _, g := range grants {
			l.g.granted(g)
		}
		l.order(func(g *guard) { g.renew(grants) })
	}
	if revokes := l.Revokes(); len(revokes) > 0 {
		l.order(func(g *guard) { g.revoke(revokes) })
	}
	l.arm()
}

func (g *gateway) granted(grant lease.Grant) {
	f := check.Fact{What: check.Granted, Request: string(grant.Request), N: grant.N, Guard: grant.Guard.String(), Clock: int64(grant.NotAfter)}
	if grant.NotAfter == 0 {
		f.Clock = math.MaxInt64
	}
	if grant.Guard == (lease.Incarnation{}) {
		f.Guard = ""
	}
	g.w.fact(f)
}

func (l *link) ended(end lease.End) {
	if p, ok := l.Ended(end); ok {
		l.proved(p, attempt.EngineExited)
	}
	l.arm()
}

func (l *link) resync(inc lease.Incarnation, list []lease.Listed) {
	proved, revoke := l.Resync(inc, list)
	for _, p := range proved {
		l.proved(p, attempt.EngineExited)
	}
	if len(revoke) > 0 {
		l.order(func(g *guard) { g.revoke(revoke) })
	}
	l.arm()
}

// arm waits for the next expiry.
func (l *link) arm() {
	next, ok := l.NextExpiry()
	if !ok {
		return
	}
	at := l.g.clock.when(next.UnixNano())
	if at <= l.g.w.now || l.armed <= l.g.w.now || at < l.armed {
		l.armed = at
		l.g.w.at(at, func() { l.g.do(l.expire) })
	}
}

func (l *link) expire() {
	for _, p := range l.Expire(l.g.now()) {
		l.proved(p, attempt.GuardLost)
	}
	l.arm()
}

// proved tells the attempt's request, or the journal if the request is not ours.
func (l *link) proved(p lease.Proved, death attempt.Kind) {
	if f := l.g.flights[p.Request]; f != nil && p.N > f.prior {
		switch p.Proof {
		case inference.ProofLeaseExpired:
			f.step(attempt.LeaseExpired{N: p.N})
		case inference.ProofDead:
			f.step(attempt.Evidence{N: p.N, Kind: death})
		default:
			f.step(attempt.CancelAck{N: p.N})
		}
		return
	}
	if r := l.g.w.journal[p.Request]; r.n == p.N {
		r.fenced = true
		l.g.w.fact(check.Fact{What: check.Silenced, Request: string(p.Request), N: p.N, Word: p.Proof.String()})
	}
}

// record is what the journal has of a request.
type record struct {
	keyed      bool
	n          int // the newest attempt that was, or is about to be, dispatched
	resent     int // how many were resends
	node       int
	guard      lease.Incarnation
	fence      inference.FenceLevel
	fenced     bool
	firstDelta bool
	since      time.Duration // when the newest attempt was dispatched
	before     *record       // what was known until then, where mutation.JournalAfterDispatch is
	outcome    inference.Outcome
}

// client sends one request, and a keyed one again if its connection breaks.
type client struct {
	w    *world
	i    int
	ask  *Ask
	gone bool
	f    *flight
}

func (c *client) id() inference.RequestID {
	return inference.RequestID("req_" + string(rune('a'+c.i)))
}

func (c *client) send() {
	if c.gone {
		return
	}
	g := c.w.gateway
	c.w.at(c.w.now+time.Millisecond, func() { g.do(func() { g.accept(c) }) })
	if c.ask.Leaves > 0 && c.w.now == c.ask.At {
		c.w.at(c.w.now+c.ask.Leaves, c.leave)
	}
}

func (c *client) leave() {
	c.gone = true
	if f := c.f; f != nil {
		f.g.after(c.w.between(time.Millisecond, 20*time.Millisecond), func() {
			if f.machine.Phase() != inference.Terminal {
				c.w.fact(check.Fact{What: check.ClientLeft, Request: string(f.id)})
				f.step(attempt.ClientGone{})
			}
		})
	}
}

// disconnected: the gateway's process is gone. Only a keyed request may be sent
// again: it is the same one.
func (c *client) disconnected() {
	c.f = nil
	if c.ask.Keyed && !c.gone {
		c.w.at(c.w.now+c.w.between(50*time.Millisecond, 400*time.Millisecond), c.send)
	}
}

// accept takes a request, or a keyed one that was sent before.
func (g *gateway) accept(c *client) {
	id := c.id()
	r := g.w.journal[id]
	switch {
	case r == nil:
		r = &record{keyed: c.ask.Keyed}
		g.w.journal[id] = r
		g.w.records = append(g.w.records, id)
	case r.outcome != inference.NoOutcome || g.flights[id] != nil:
		return
	case r.firstDelta:
		g.closeRecord(id, inference.Interrupted)
		return
	case r.n-r.resent >= g.w.plan.Attempts:
		g.closeRecord(id, inference.Failed) // attempts_exhausted
		return
	case r.n > 0 && r.fence == inference.FenceLease && !r.fenced:
		g.w.at(g.w.now+200*time.Millisecond, c.send) // 409 until the old attempt is fenced
		return
	}
	g.w.fact(check.Fact{What: check.Arrived, Request: string(id), Max: g.w.plan.Attempts})
	f := &flight{g: g, w: g.w, c: c, id: id, record: r, prior: r.n, machine: attempt.NewRequest(attempt.Spec{
		ID: id, Keyed: c.ask.Keyed, Prior: r.n, PriorCharged: r.n - r.resent, Policy: attempt.Policy{MaxAttempts: g.w.plan.Attempts, AllowTransportFence: g.w.plan.Loose},
	})}
	c.f = f
	g.flights[id] = f
	if c.gone {
		c.leave()
	}
	f.step(attempt.Queued{})
	f.reserve(schedule.Ask{}, g.now().Add(2*time.Second))
}

func (g *gateway) closeRecord(id inference.RequestID, o inference.Outcome) {
	g.w.journal[id].outcome = o
	g.w.fact(check.Fact{What: check.Delivered, Request: string(id), Bytes: check.ErrorBytes})
	g.w.fact(check.Fact{What: check.Outcome, Request: string(id), Word: o.String()})
}
