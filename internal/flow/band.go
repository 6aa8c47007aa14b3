// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
)

// flowsMax bounds the flows of a band that are remembered. Past it those that
// wait for nothing are forgotten, and while all wait, new fairness ids share one
// flow.
const flowsMax = 4096

// idleMax is how many flows of a band are remembered that owe nothing and have
// nothing to do, so that they need not be made anew for every request.
const idleMax = 64

// overflow is the fairness id of that flow. A NUL can't be in a header.
const overflow = "\x00"

// never is a time on the queue's clock that does not come.
const never = time.Duration(math.MaxInt64)

// band is the flows of one priority.
type band struct {
	limits Band
	flows  map[string]*flow
	ready  heap[*flow] // that have requests to look at, the least served first
	bulk   heap[*flow] // that have requests, the most tokens first
	idle   heap[*flow] // that have none, waiting or dispatched, the least served first

	requests int
	bytes    int64
	work     float64 // prefill in seconds

	floor  float64 // how much the flow had been served that was served last
	credit float64 // tokens that the reserve is owed
	born   uint64
	counts Counts
}

// flow is the requests of one fairness id in a band.
type flow struct {
	id      string
	band    *band
	n       uint64  // breaks ties
	guessed float64 // of served, for answers under way that nothing was known of
	answer  float64 // tokens of its last answers, on average; 0: none has ended
	served  float64 // tokens
	key     float64 // served, and what the pump under way has passed over
	next    heap[*Request]
	count   int // waiting
	work    float64
	tokens  float64
	out     int // dispatched

	oldest, newest *Request // by arrival, without those that were dispatched before

	inReady, inBulk, inIdle int
}

func byKey(a, b *flow) bool {
	if a.key != b.key {
		return a.key < b.key
	}
	return a.n < b.n
}

// band finds the band of a priority, or makes it.
func (q *Queue) band(priority int) *band {
	at, found := slices.BinarySearchFunc(q.bands, priority, func(b *band, p int) int { return p - b.limits.Priority })
	if found {
		return q.bands[at]
	}
	b := &band{
		limits: Band{Priority: priority},
		flows:  map[string]*flow{},
		ready:  heap[*flow]{less: byKey, moved: func(f *flow, at int) { f.inReady = at }},
		bulk: heap[*flow]{
			less:  func(a, b *flow) bool { return a.tokens > b.tokens || a.tokens == b.tokens && a.n < b.n },
			moved: func(f *flow, at int) { f.inBulk = at },
		},
		idle: heap[*flow]{
			less:  func(a, b *flow) bool { return a.served < b.served || a.served == b.served && a.n < b.n },
			moved: func(f *flow, at int) { f.inIdle = at },
		},
	}
	q.bands = slices.Insert(q.bands, at, b)
	return b
}

// dropBands forgets bands that nobody configured and that have no flow.
func (q *Queue) dropBands() {
	q.bands = slices.DeleteFunc(q.bands, func(b *band) bool {
		return len(b.flows) == 0 && !slices.ContainsFunc(q.config.Bands, func(c Band) bool { return c.Priority == b.limits.Priority })
	})
}

// flow finds the flow of a fairness id, or makes it.
func (b *band) flow(id string) *flow {
	f := b.flows[id]
	if f == nil && len(b.flows) >= flowsMax {
		if b.idle.len() > 0 {
			b.forget(b.idle.top())
		} else {
			id = overflow
			f = b.flows[id]
		}
	}
	if f == nil {
		b.born++
		f = &flow{
			id: id, band: b, n: b.born, inReady: -1, inBulk: -1, inIdle: -1,
			next: heap[*Request]{less: before, moved: func(r *Request, at int) { r.inFlow = at }},
		}
		b.flows[id] = f
	}
	return f
}

// before orders the requests of a flow.
func before(a, b *Request) bool {
	switch {
	case a.returned != b.returned:
		return a.returned
	case a.due != b.due:
		return a.due < b.due
	}
	return a.seq < b.seq
}

func (b *band) forget(f *flow) {
	if f.inIdle >= 0 {
		b.idle.remove(f.inIdle)
	}
	delete(b.flows, f.id)
}

// settle puts a flow that has nothing to do among the idle, and forgets some of
// those that owe nothing: they would begin where a new one does.
func (f *flow) settle() {
	b := f.band
	if f.count == 0 && f.out == 0 && f.inIdle < 0 && b.flows[f.id] == f {
		b.idle.push(f)
	}
	for b.idle.len() > idleMax && b.idle.top().served <= b.floor {
		b.forget(b.idle.top())
	}
}

// level is how much a flow has been served, as far as that is more than a guess. A
// newcomer that began level with a guess would wait for what it turns out too high.
func (f *flow) level() float64 { return f.served - f.guessed }

// wake starts a flow level with the others: whoever asked for nothing has saved
// nothing up.
func (f *flow) wake() {
	b := f.band
	if f.inIdle >= 0 {
		b.idle.remove(f.inIdle)
	}
	level := b.floor
	if b.ready.len() > 0 {
		level = b.ready.top().level()
	}
	f.served = max(f.served, level)
	f.key = f.served
}

// serve adds to what a flow has been given; less than nothing is a correction.
func (f *flow) serve(tokens float64) {
	f.served += tokens
	f.key += tokens
	if f.inReady >= 0 {
		f.band.ready.fix(f.inReady)
	}
	if f.inIdle >= 0 {
		f.band.idle.fix(f.inIdle)
	}
}

// push makes a request wait.
func (q *Queue) push(at time.Duration, r *Request) {
	b := q.band(r.Priority)
	f := r.flow
	if f == nil || f.band != b || b.flows[f.id] != f {
		f = b.flow(r.Fairness)
		r.flow = f
	}
	if f.count == 0 {
		f.wake()
	}
	if q.requests == 0 {
		q.pace.rest()
	}
	r.state, r.came = waiting, at
	r.due = float64(r.seq)
	if q.config.EarliestDeadline {
		r.due = q.deadline(r).Seconds()
	}
	q.add(r, 1)
	f.next.push(r)
	if f.inReady < 0 {
		b.ready.push(f)
	}
	q.ends.push(r)
	if !r.returned {
		r.older, f.newest = f.newest, r
		if r.older != nil {
			r.older.newer = r
		} else {
			f.oldest = r
		}
	}
}

// deadline is when a request should be served, for the order within a flow. What a
// target grows by with the prompt is time to compute it and not to wait.
func (q *Queue) deadline(r *Request) time.Duration {
	at := q.clock(r.Ask.Arrived)
	switch {
	case !r.Deadline.IsZero():
		return q.clock(r.Deadline)
	case r.Ask.TTFT.Base > 0:
		return at + r.Ask.TTFT.Base
	}
	return at + cmp.Or(q.config.Horizon, HorizonDefault)
}

// pop takes a waiting request out of everything.
func (q *Queue) pop(r *Request) {
	f := r.flow
	b := f.band
	f.next.remove(r.inFlow)
	q.add(r, -1)
	if f.next.len() == 0 && f.inReady >= 0 {
		b.ready.remove(f.inReady)
	}
	if b.requests == 0 {
		b.credit = min(b.credit, 0)
	}
	q.ends.remove(r.inEnds)
	if !r.returned {
		if r.older != nil {
			r.older.newer = r.newer
		} else {
			f.oldest = r.newer
		}
		if r.newer != nil {
			r.newer.older = r.older
		} else {
			f.newest = r.older
		}
		r.older, r.newer = nil, nil
	}
}

// add counts a request in, or out.
func (q *Queue) add(r *Request, n int) {
	f, sign := r.flow, float64(n)
	b := f.band
	for _, count := range []*int{&q.requests, &b.requests, &f.count} {
		*count += n
	}
	q.bytes += int64(n) * r.Bytes
	b.bytes += int64(n) * r.Bytes
	q.weighIn(r, sign*r.work, sign*r.tokens)
}

// weighIn changes the sums of what waits. A sum of nothing is 0 and no rest of
// roundings.
func (q *Queue) weighIn(r *Request, work, tokens float64) {
	f := r.flow
	b := f.band
	q.work, b.work, f.work, f.tokens = q.work+work, b.work+work, f.work+work, f.tokens+tokens
	if q.requests == 0 {
		q.work = 0
	}
	if b.requests == 0 {
		b.work = 0
	}
	if f.count == 0 {
		f.work, f.tokens = 0, 0
	}
	switch {
	case f.count == 0 && f.inBulk >= 0:
		b.bulk.remove(f.inBulk)
	case f.count > 0 && f.inBulk < 0:
		b.bulk.push(f)
	case f.inBulk >= 0:
		b.bulk.fix(f.inBulk)
	}
}

// refuse takes a waiting request out with an error.
func (q *Queue) refuse(r *Request, err *inference.Error) {
	q.pop(r)
	r.flow.band.counts.refused(err.Code)
	q.out = append(q.out, Decision{Request: r, Err: err})
	q.release(r)
}
