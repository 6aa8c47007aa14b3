// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/wake"
	"github.com/headgate/headgate/internal/waker"
)

// sleep is what a pool is known by that may have no engines.
type sleep struct {
	waker   atomic.Pointer[waker.Waker] // nil: requests don't wait for engines
	flights atomic.Int64                // requests that are not over
	active  atomic.Int64                // when one last came or ended, in Unix nanoseconds
	shut    bool                        // nothing is dispatched; the queue's lock guards it
}

// come counts a request in. It is before the request joins the queue.
func (s *sleep) come() {
	s.flights.Add(1)
	s.active.Store(time.Now().UnixNano())
}

// leave counts a request out.
func (s *sleep) leave() {
	s.active.Store(time.Now().UnixNano())
	s.flights.Add(-1)
}

// awaits reports whether requests wait for engines while there are none.
func (s *sleep) awaits() bool { return s.waker.Load() != nil }

// neverBegan reports whether the last attempt found no engine, in a pool that may
// have none.
func (f *flight) neverBegan() bool {
	return f.pool.sleep.awaits() && f.lastAttempt().Verdict == inference.NotStarted
}

// wakeBy puts the settings of a configuration in force.
func (m *members) wakeBy(name string, c config.ScaleFromZero) {
	w := m.sleep.waker.Load()
	switch {
	case c.Wait() == 0:
		m.sleep.waker.Store(nil)
		m.putToBed(w)
	case w != nil:
		w.Configure(c)
	default:
		m.sleep.waker.Store(waker.New(waker.Config{
			Name: name, Gateway: m.g.self.ID, Pool: sleeper{m}, Log: m.g.log,
			Record: func(event string, ok bool) { m.g.record.Woke(name, event, ok) },
		}, c))
	}
}

// putToBed ends a waker once no request needs the engine that it started.
func (m *members) putToBed(w *waker.Waker) {
	if w == nil {
		return
	}
	w.Retire()
	m.g.mu.Lock()
	defer m.g.mu.Unlock()
	m.g.retired = append(slices.DeleteFunc(m.g.retired, (*waker.Waker).Ended), w)
}

// sleeper is a pool as its Waker knows it.
type sleeper struct{ *members }

func (s sleeper) View() wake.View {
	set := s.now.Load()
	v := wake.View{Waiting: int(s.queue.waiting.Load()), Active: time.Unix(0, s.sleep.active.Load())}
	v.Running = max(int(s.sleep.flights.Load())-v.Waiting, 0)
	for _, e := range set.engines {
		if !e.known.Load() {
			v.Unknown++
		}
	}
	round := s.book.Begin(time.Now(), set.fleet)
	v.Ready = round.Load().Endpoints
	round.End()
	return v
}

func (s sleeper) Shut() bool {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	if s.sleep.flights.Load() > 0 {
		return false
	}
	s.sleep.shut = true
	for id := range s.now.Load().engines {
		s.book.SetHealth(id, inference.Gone)
	}
	return true
}

func (s sleeper) Gone() {
	s.queue.mu.Lock()
	s.sleep.shut = false
	s.queue.mu.Unlock()
	for id, e := range s.now.Load().engines {
		s.lost(id, e)
	}
}

// lost notes that nothing was found at an endpoint's address. Its probes, which
// begin anew, may know better.
func (m *members) lost(id inference.EndpointID, e *engine) {
	if m.now.Load().engines[id] != e {
		return // it has left
	}
	m.book.SetHealth(id, inference.Gone)
	select {
	case e.refused <- struct{}{}:
	default: // they were told
	}
	m.sleep.waker.Load().Look()
}

// found takes what probes say of an endpoint. Of one that may not be there yet it
// looks first what it serves: requests that wait would be sent to it at once.
func (m *members) found(ctx context.Context, id inference.EndpointID, e *engine, how *reach, h inference.Health) {
	if how.health.Starts && h == inference.Healthy {
		look, cancel := context.WithTimeout(ctx, modelsTime)
		e.forgetModels()
		m.modelsOf(look, id, e, how.authorization)
		m.revisionOf(look, id, e, how.authorization)
		cancel()
	}
	m.queue.mu.Lock()
	if m.sleep.shut {
		h = inference.Gone
	}
	m.book.SetHealth(id, h)
	m.queue.mu.Unlock()
	if log := m.g.log.With("pool", m.now.Load().fleet.Name, "endpoint", string(id), "health", h.String()); h != inference.Healthy {
		log.Warn("endpoint is not to be used")
	} else if e.known.Load() {
		log.Info("endpoint can be used again")
	}
	e.known.Store(true)
	m.pump()
	m.sleep.waker.Load().Look()
}
