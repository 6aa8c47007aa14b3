// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"math"
	"time"

	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule"
)

// localQueue is how much prefill may be pending on an engine while the queue sends
// it more. It should be no less than one full step of the engine takes.
const localQueue = 250 * time.Millisecond

// late is Headgate's choice with its queue: the real one, pumped as a gateway
// pumps it. All requests are one flow of one priority.
type late struct {
	*ours
	desk  desk
	queue *flow.Queue
	stir  bool // something has changed since the last pump
}

// ticket is a request as the queue knows it.
type ticket struct {
	flow.Request
	place *schedule.Reservation
}

// newLate makes the policy. Past refuseAt of their target requests are refused; 0:
// they never are.
func newLate(refuseAt float64) func(*view, desk) queue {
	return func(v *view, d desk) queue {
		return &late{ours: bookOf(v, schedule.Limits{Prefill: localQueue}), desk: d, queue: flow.New(flow.Config{RefuseAt: refuseAt})}
	}
}

func (p *late) arrive(now float64, q *flight) {
	t := &ticket{Request: flow.Request{Ask: p.ask(q), Owner: q}}
	q.bookkeeper = t
	round := p.book.Begin(clock(now), p.pool)
	err := p.queue.Arrive(clock(now), &t.Request, round)
	p.end(now, round)
	if err != nil {
		p.desk.refuse(now, q)
	}
}

// end pumps, ends the round and carries out what was decided.
func (p *late) end(now float64, round *schedule.Round) {
	list := p.queue.Pump(clock(now), round)
	round.End()
	p.stir = false
	for _, d := range list {
		q := d.Request.Owner.(*flight)
		if d.Place == nil {
			p.desk.refuse(now, q)
			continue
		}
		q.bookkeeper.(*ticket).place = d.Place
		p.desk.send(now, q, p.at[d.Place.Endpoint.ID])
	}
}

func (p *late) due() float64 {
	if p.stir {
		return 0
	}
	at, ok := p.queue.Next()
	if !ok {
		return math.Inf(1)
	}
	return at.Sub(epoch).Seconds()
}

func (p *late) wake(now float64) { p.end(now, p.book.Begin(clock(now), p.pool)) }

func (p *late) sent(_ float64, q *flight) { q.bookkeeper.(*ticket).place.Accepted() }

func (p *late) first(now float64, q *flight) {
	q.bookkeeper.(*ticket).place.FirstOutput(clock(now))
	p.stir = true
}

func (p *late) token(_ float64, q *flight) { q.bookkeeper.(*ticket).place.Tokens(q.tokens) }

func (p *late) ended(now float64, q *flight) {
	t := q.bookkeeper.(*ticket)
	t.place.Finished(clock(now), usage(q))
	t.place.Accepted()
	t.place.Release()
	p.queue.Done(&t.Request, q.In-q.cached, q.Out)
	p.stir = true
}
