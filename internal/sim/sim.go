// SPDX-License-Identifier: Apache-2.0

// Package sim plays the life of a gateway, its guards and its engines in one
// thread and virtual time, with faults, and has internal/sim/check judge it by
// all that was true, not by what anybody believed.
//
// The decisions are the real ones: attempt.Request, attempt.Gate, lease.Link,
// schedule.Book, roster.Roster and simengine/model. What the simulator owns is
// everything between them: a network that delays, loses, repeats and reorders,
// and is cut in one direction or both; processes that crash, stand still and go
// on; clocks that run fast or slow within the drift that the terms allow. Its
// gateway and guard are shells like the ones on sockets, cut down to what the
// cores need.
//
// A Plan says everything that is decided before a run, and a seed in it draws
// the rest, so that a plan, or the seed that makes one, replays a run exactly.
// Its callers are its tests.
package sim

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/sim/check"
)

// Result is one run.
type Result struct {
	Facts      []check.Fact
	Violations []check.Violation
	Events     int
}

// Run plays a plan.
func Run(plan *Plan) Result {
	w := newWorld(plan)
	for len(w.queue) > 0 && w.queue[0].at <= plan.until() {
		e := heap.Pop(&w.queue).(*event)
		w.now = e.at
		w.events++
		e.do()
	}
	w.now = plan.until()
	w.inventory()
	return Result{Facts: w.facts, Violations: check.World(w.facts, plan.rules()), Events: w.events}
}

// world is one run under way.
type world struct {
	plan   *Plan
	rnd    *rand.Rand
	now    time.Duration // true time
	queue  queue
	seq    int
	events int
	facts  []check.Fact
	calm   bool // faults are over

	journalDown int // how many faults say so

	gateway *gateway
	nodes   []*node
	clients []*client
	journal map[inference.RequestID]*record // survives the gateway
	records []inference.RequestID           // its keys, in order
}

func newWorld(plan *Plan) *world {
	w := &world{plan: plan, rnd: rand.New(rand.NewPCG(plan.Seed, 0x51)), journal: map[inference.RequestID]*record{}}
	for i := range plan.Nodes {
		w.nodes = append(w.nodes, newNode(w, i))
	}
	w.gateway = newGateway(w, 1)
	for i := range plan.Requests {
		c := &client{w: w, i: i, ask: &plan.Requests[i]}
		w.clients = append(w.clients, c)
		w.at(c.ask.At, c.send)
	}
	for i := range plan.Faults {
		f := &plan.Faults[i]
		w.at(f.At, func() { w.strike(f) })
	}
	w.at(plan.Calm, w.becalm)
	return w
}

// at runs do at a true time, later than everything planned for it before.
func (w *world) at(t time.Duration, do func()) {
	w.seq++
	heap.Push(&w.queue, &event{at: max(t, w.now), seq: w.seq, do: do})
}

func (w *world) fact(f check.Fact) {
	f.At = w.now
	w.facts = append(w.facts, f)
}

// chance draws whether something with that probability happens. Nothing bad
// does once faults are over.
func (w *world) chance(p float64) bool { return !w.calm && p > 0 && w.rnd.Float64() < p }

// between draws a duration.
func (w *world) between(low, high time.Duration) time.Duration {
	if high <= low {
		return low
	}
	return low + time.Duration(w.rnd.Int64N(int64(high-low)))
}

// inventory lists what is left when everything should be over.
func (w *world) inventory() {
	leak := func(n int, what string) {
		if n != 0 {
			w.fact(check.Fact{What: check.Leaked, Word: fmt.Sprintf("%d %s", n, what)})
		}
	}
	leak(len(w.gateway.flights), "flights")
	for i, l := range w.gateway.links {
		leak(l.Held(), fmt.Sprintf("leases of guard %d", i))
	}
	for _, s := range w.gateway.book.Status(w.gateway.now(), &w.gateway.pool) {
		leak(s.InFlight, "places on "+string(s.Endpoint))
	}
	for _, n := range w.nodes {
		leak(len(n.engine.jobs), "jobs of engine "+n.engine.name)
		if g := n.guard(); !g.bare {
			leak(g.roster.Requests(), "requests in the roster of "+g.name)
		}
	}
}

// event is work at a moment.
type event struct {
	at  time.Duration
	seq int
	do  func()
}

type queue []*event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(*event)) }
func (q *queue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return e
}

// process is one life of a program. It may stand still: then what comes to it
// waits, and what it was about to do is done first when it goes on.
type process struct {
	w       *world
	dead    bool
	still   int  // how many faults hold it
	busy    bool // between two moments that nothing may come between
	urgent  []func()
	backlog []func()
}

// do hands the process something to do.
func (p *process) do(fn func()) {
	switch {
	case p.dead:
	case p.still > 0 || p.busy || len(p.backlog) > 0:
		p.backlog = append(p.backlog, fn)
	default:
		fn()
	}
}

// after does something later, by true time.
func (p *process) after(d time.Duration, fn func()) { p.w.at(p.w.now+d, func() { p.do(fn) }) }

// hold makes the process busy for a while and then does fn: whatever happens in
// between waits. Standing still stretches the while.
func (p *process) hold(d time.Duration, fn func()) {
	p.busy = true
	end := func() {
		p.busy = false
		fn()
		p.work()
	}
	p.w.at(p.w.now+d, func() {
		switch {
		case p.dead:
		case p.still > 0:
			p.urgent = append(p.urgent, end)
		default:
			end()
		}
	})
}

func (p *process) stop() { p.still++ }

func (p *process) resume() {
	if p.still--; p.still > 0 || p.dead {
		return
	}
	urgent := p.urgent
	p.urgent = nil
	for _, fn := range urgent {
		fn()
	}
	p.work()
}

func (p *process) work() {
	for len(p.backlog) > 0 && p.still == 0 && !p.busy && !p.dead {
		fn := p.backlog[0]
		p.backlog = p.backlog[1:]
		fn()
	}
}

func (p *process) kill() {
	p.dead = true
	p.urgent, p.backlog = nil, nil
}

// clock runs fast or slow.
type clock struct {
	base  int64
	since time.Duration
	ppm   int64
}

const million = 1_000_000

func (c clock) at(now time.Duration) int64 {
	return c.base + int64(now-c.since)*(million+c.ppm)/million
}

// when is the first moment of true time at which the clock shows that much.
func (c clock) when(local int64) time.Duration {
	return c.since + time.Duration(((local-c.base)*million+million+c.ppm-1)/(million+c.ppm))
}
