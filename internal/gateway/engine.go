// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/control"
	"github.com/headgate/headgate/internal/health"
	"github.com/headgate/headgate/internal/upstream"
)

// errEngineLost is the cause of attempts that were given up because nothing can
// be reached at their endpoint's address any more.
var errEngineLost = errors.New("endpoint is gone")

// engine is one endpoint as the gateway reaches it: its connections, its probes,
// its metrics and the attempts that wait there for a first output.
type engine struct {
	conn    *upstream.Pool
	aside   *upstream.Pool          // for questions about models: requests never meet a connection that was kept from them
	guard   string                  // as configured; "" for none
	line    *control.Line           // to the guard, nil if there is none
	metrics *upstream.Pool          // for scraping; nil if it is not scraped
	listed  atomic.Pointer[listing] // its models; nil until it told them
	scraped scraped
	known   atomic.Bool   // probes have said something of it
	refused chan struct{} // tells the probes that nothing was found at its address
	changed chan struct{} // tells whoever lists its models that they may be others

	mu      sync.Mutex
	lost    bool
	retired bool
	left    bool // retired, and let go of
	waiting map[*try]context.CancelCauseFunc
	stop    context.CancelFunc // of the watches; nil if there are none
	watches sync.WaitGroup
}

func newEngine(conn, aside *upstream.Pool) *engine {
	return &engine{conn: conn, aside: aside, waiting: map[*try]context.CancelCauseFunc{}, refused: make(chan struct{}, 1), changed: make(chan struct{}, 1)}
}

// watch starts what is to be known of the engine all the time. Each of them runs
// until halt.
func (e *engine) watch(each ...func(context.Context)) {
	ctx, stop := context.WithCancel(context.Background())
	e.mu.Lock()
	e.stop = stop
	e.mu.Unlock()
	for _, run := range each {
		e.watches.Go(func() { run(ctx) })
	}
}

// probe probes the engine until ctx is done. report is told each change of state.
func (e *engine) probe(ctx context.Context, c health.Config, header []upstream.Field, report func(inference.Health)) {
	health.Probe(ctx, health.Engine{Conn: e.conn, Header: header, Permit: e.permit(), Lost: e.refused}, c, func(h inference.Health) {
		// Attempts come with the report that it is there, and must not find it lost.
		if h != inference.Gone {
			e.setLost(false)
		}
		report(h)
		if h == inference.Gone {
			e.setLost(true)
		}
	})
}

// lostGrace is how long attempts are left to themselves when nothing answers at
// their address any more. The kernel of a dead process refuses connections a
// moment before it closes those that are open, and their end says more.
const lostGrace = 100 * time.Millisecond

// setLost gives up the attempts that wait for a first output at an address
// where nothing answers. Slow engines answer probes or at least accept them;
// attempts that have output are left to their own limits.
func (e *engine) setLost(lost bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lost = lost; lost {
		time.AfterFunc(lostGrace, e.giveUp)
	}
}

func (e *engine) giveUp() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.lost {
		return
	}
	for _, cancel := range e.waiting {
		cancel(errEngineLost)
	}
}

// await enters an attempt that waits for its first output.
func (e *engine) await(t *try, cancel context.CancelCauseFunc) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.waiting[t] = cancel
	if e.lost {
		cancel(errEngineLost)
	}
}

// forget takes an attempt out again.
func (e *engine) forget(t *try) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.waiting, t)
	e.leaveLocked()
}

// leaveLocked lets go of a retired engine on which nobody waits any more. Its
// running exchanges keep their connections.
func (e *engine) leaveLocked() {
	if !e.retired || len(e.waiting) > 0 || e.left {
		return
	}
	e.left = true
	if e.stop != nil {
		e.stop()
	}
	e.conn.Close()
	if e.line != nil {
		e.line.Retire()
	}
}

// retiredProbes find out soon whether an endpoint that left its pool is still
// there: requests that wait on it would otherwise wait for their own limit.
var retiredProbes = health.Config{
	Path: "/health", Interval: 500 * time.Millisecond, Timeout: time.Second, UnhealthyAfter: 2, HealthyAfter: 1,
}

// retire is for an endpoint that left its pool: it takes no new request, and is
// probed only as long as some wait there. close waits for that.
func (e *engine) retire() {
	e.halt()
	e.mu.Lock()
	waiting := len(e.waiting) > 0
	e.mu.Unlock()
	if waiting {
		e.watch(func(ctx context.Context) { e.probe(ctx, retiredProbes, nil, func(inference.Health) {}) })
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.retired = true
	e.leaveLocked()
}

// halt ends the watches.
func (e *engine) halt() {
	e.mu.Lock()
	stop := e.stop
	e.stop = nil
	e.mu.Unlock()
	if stop != nil {
		stop()
		e.watches.Wait()
	}
	e.aside.Close()
	if e.metrics != nil {
		e.metrics.Close()
	}
}
