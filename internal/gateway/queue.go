// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/schedule"
)

// queue is where the requests of a pool wait. Whoever changes something that
// waiting requests may have waited for pumps it, in its own goroutine: a hand-over
// to a goroutine of the queue's own would cost more than the decision.
type queue struct {
	// waiting counts those that wait, and those that are about to find out
	// whether they must. While it is 0 nobody needs a pump.
	waiting atomic.Int64

	mu    sync.Mutex // guards what is below, and is taken before the book's
	flow  *flow.Queue
	timer *time.Timer // calls pump when the queue wants it; nil until it does
	ended bool        // timer is not to be set any more
}

// ticket is one request's turn in a queue. The queue's lock guards it until ready
// is closed.
type ticket struct {
	flow.Request
	ready  chan struct{} // closed once it is decided; nil while it did not have to wait
	over   bool          // decided
	place  *schedule.Reservation
	engine *engine
	err    *inference.Error
}

// join gives a request its turn, or puts one back that was dispatched before. If
// it is not decided at once, ready is made.
func (m *members) join(t *ticket, again bool) {
	m.queue.waiting.Add(1)
	m.queue.mu.Lock()
	defer m.queue.mu.Unlock()
	t.ready, t.over, t.place, t.engine, t.err = nil, false, nil, nil, nil
	m.turn(t, again)
	if !t.over {
		t.ready = make(chan struct{})
	}
}

// pump lets those go who can.
func (m *members) pump() {
	if m.queue.waiting.Load() == 0 {
		return
	}
	m.queue.mu.Lock()
	defer m.queue.mu.Unlock()
	m.turn(nil, false)
}

// turn takes a request in, or back if it was dispatched before, and pumps. The
// queue is locked; t is nil for a pump alone.
func (m *members) turn(t *ticket, again bool) {
	now, set := time.Now(), m.now.Load()
	for _, d := range m.round(now, set, t, again) {
		m.settle(d.Request.Owner.(*ticket), d, set)
	}
	next, wanted := m.queue.flow.Next()
	switch {
	case !wanted || m.queue.ended:
	case m.queue.timer == nil:
		m.queue.timer = time.AfterFunc(next.Sub(now), m.pump)
	default:
		m.queue.timer.Reset(next.Sub(now))
	}
}

func (m *members) round(now time.Time, set *endpoints, t *ticket, again bool) []flow.Decision {
	round := m.book.Begin(now, set.fleet)
	defer round.End()
	switch {
	case t == nil:
	case again:
		m.queue.flow.Return(now, &t.Request)
	default:
		if err := m.queue.flow.Arrive(now, &t.Request, round); err != nil {
			m.settle(t, flow.Decision{Err: err}, nil)
		}
	}
	return m.queue.flow.Pump(now, round)
}

// settle tells a request what was decided.
func (m *members) settle(t *ticket, d flow.Decision, set *endpoints) {
	t.over, t.place, t.err = true, d.Place, d.Err
	if d.Place != nil {
		t.engine = set.engines[d.Place.Endpoint.ID]
	}
	m.queue.waiting.Add(-1)
	if t.ready != nil {
		close(t.ready)
	}
}

// limitQueue puts other limits in force.
func (m *members) limitQueue(c flow.Config) {
	m.queue.mu.Lock()
	defer m.queue.mu.Unlock()
	m.queue.flow.Configure(c)
	m.turn(nil, false)
}

// queueStatus describes the queue, with the busiest flows of each band.
func (m *members) queueStatus() flow.Status {
	m.queue.mu.Lock()
	defer m.queue.mu.Unlock()
	round := m.book.Begin(time.Now(), m.now.Load().fleet)
	load := round.Load()
	round.End()
	return m.queue.flow.Status(load, flowsShown)
}

// flowsShown is how many flows of a band operators are shown.
const flowsShown = 20

// leave takes a request out whose client is gone. It reports false if the
// request was decided before.
func (m *members) leave(t *ticket) bool {
	m.queue.mu.Lock()
	defer m.queue.mu.Unlock()
	if !m.queue.flow.Leave(&t.Request) {
		return false
	}
	m.queue.waiting.Add(-1)
	return true
}

// done tells the queue what a request came to.
func (m *members) done(t *ticket, fresh, output int) {
	m.queue.mu.Lock()
	defer m.queue.mu.Unlock()
	m.queue.flow.Done(&t.Request, fresh, output)
}

// endQueue refuses everybody who waits, and everybody who comes, with a code.
func (m *members) endQueue(code inference.Code) {
	m.queue.mu.Lock()
	defer m.queue.mu.Unlock()
	m.queue.flow.Close(code)
	m.turn(nil, false)
}

// stopQueue ends what would pump by itself.
func (m *members) stopQueue() {
	m.queue.mu.Lock()
	defer m.queue.mu.Unlock()
	if m.queue.ended = true; m.queue.timer != nil {
		m.queue.timer.Stop()
	}
}

// reserve waits for a place on an endpoint.
func (f *flight) reserve(ask schedule.Ask) attempt.Event {
	t := &f.ticket
	t.Ask = f.aim.ask(ask)
	began := time.Now()
	f.pool.join(t, ask.Retry)
	if t.ready != nil {
		if event := f.wait(); event != nil {
			return event
		}
		f.waited += time.Since(began)
	}
	if t.err != nil {
		return attempt.Unplaced{Err: t.err}
	}
	f.g.record.Waited(f.pool.name, t.Priority, f.waited)
	f.place, f.engine = t.place, t.engine
	placed := attempt.Placed{Endpoint: f.place.Endpoint.ID, Revision: f.place.Endpoint.Revision}
	if f.engine.line != nil {
		placed.Fence = inference.FenceLease
	}
	return placed
}

// wait returns once the ticket is decided, or with what ended the wait.
func (f *flight) wait() attempt.Event {
	f.step(attempt.Queued{})
	f.note(journal.Event{Kind: journal.Queued})
	f.pool.sleep.waker.Load().Waits(f.served)
	select {
	case <-f.ticket.ready:
		return nil
	case <-f.ctx.Done():
	}
	if !f.pool.leave(&f.ticket) {
		// It was decided at this very moment.
		if f.place = f.ticket.place; f.place != nil {
			f.vacate()
		}
	}
	if errors.Is(context.Cause(f.ctx), errDraining) {
		return stopped()
	}
	return attempt.ClientGone{}
}

// vacate gives the place on the endpoint back, and lets the next one have it.
func (f *flight) vacate() {
	if f.place != nil {
		f.giveBack()
		f.pool.pump()
	}
}

// giveBack gives the place on the endpoint back.
func (f *flight) giveBack() {
	f.place.Release()
	f.place = nil
}

// checkOut tells the queue what the request came to, once it is over.
func (f *flight) checkOut() {
	f.pool.done(&f.ticket, f.fresh, f.aim.sent)
}
