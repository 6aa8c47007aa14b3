// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"errors"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/mutation"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/sim/check"
)

// flight is one request at the gateway: it carries out what the machine decides.
type flight struct {
	g       *gateway
	w       *world
	c       *client
	id      inference.RequestID
	record  *record
	machine *attempt.Request
	gate    attempt.Gate
	prior   int
	n       int // current attempt
	conn    *conn
	place   *schedule.Reservation
	placeN  int       // the attempt that has it
	moved   time.Time // when something of the current attempt was seen last

	held      int  // chunks that are not written yet
	committed bool // the current attempt's first write is done
	waiting   bool // for the journal, with the first delta
	queue     []func()
	fencing   bool // a guard is to prove that the current attempt is silent
	leaked    bool // only ever set where mutation.BitAfterWrite is
}

var errGone = errors.New("the client is gone")

func (f *flight) step(event attempt.Event) { f.carryOut(f.machine.Step(f.g.now(), event)) }

// carryOut performs effects in order, until one yields an event: then the
// machine decides anew.
func (f *flight) carryOut(effects []attempt.Effect) {
	for i, effect := range effects {
		if c, ok := effect.(attempt.Commit); ok && f.record.keyed && !f.leaked {
			f.await(c.N, effects[i+1:])
			return
		}
		if event := f.perform(effect); event != nil {
			f.step(event)
			return
		}
	}
}

// await makes the first delta durable before it is written. Whatever happens
// meanwhile is not held up, but what comes from the attempt itself is.
func (f *flight) await(n int, rest []attempt.Effect) {
	f.waiting = true
	f.g.after(f.w.between(time.Millisecond, 40*time.Millisecond), func() {
		f.waiting = false
		if f.w.journalDown > 0 {
			// Whether the bit is on disk, nobody knows.
			f.record.firstDelta = f.w.rnd.IntN(2) == 0
			f.step(attempt.CommitLost{N: n})
			return
		}
		f.record.firstDelta = true
		if event := f.commit(n); event != nil {
			f.step(event)
		} else {
			f.carryOut(rest)
		}
		for len(f.queue) > 0 && !f.waiting {
			next := f.queue[0]
			f.queue = f.queue[1:]
			next()
		}
	})
}

func (f *flight) perform(effect attempt.Effect) attempt.Event {
	switch e := effect.(type) {
	case attempt.Dispatch:
		f.dispatch(e.N)
	case attempt.Resend:
		f.resend()
	case attempt.Commit:
		return f.commit(e.N)
	case attempt.Complete:
		return f.complete(e.N)
	case attempt.CloseGate:
		f.gate.Close(e.N)
	case attempt.Cancel:
		f.hangUp()
	case attempt.Revoke:
		f.revoke(e.N)
	case attempt.Silent:
		f.silenced(e.Proof)
		f.record.fenced = true
		f.vacate()
		if f.machine.Settled() {
			delete(f.g.flights, f.id)
		}
	case attempt.Report:
		f.g.book.Report(f.g.now(), schedule.Outcome{Endpoint: e.Endpoint, Verdict: e.Verdict})
	case attempt.AskRetry:
		return attempt.RetryAnswer{Err: f.g.book.Retry(f.g.now(), &f.g.pool, f.ask(schedule.Ask{Retry: true}), inference.Tokens{})}
	case attempt.Requeue:
		f.release()
		f.vacate()
		f.reserve(schedule.Ask{Exclude: e.Exclude, Retry: true}, f.g.now().Add(2*time.Second))
	case attempt.Respond, attempt.EndStream:
		f.last(check.ErrorBytes)
	case attempt.PassThrough:
		f.last(check.PassedOn)
	case attempt.Abort:
		_ = f.gate.Seal(func(attempt.Counters) error { return nil })
	case attempt.Finish:
		f.finish(e)
	}
	return nil
}

// ask leaves out what can't be fenced now: an endpoint whose guard is not heard
// is no candidate.
func (f *flight) ask(a schedule.Ask) schedule.Ask {
	for _, l := range f.g.links {
		if !l.n.set.Bare && !l.Candidate(f.g.now()) {
			a.Exclude = append(a.Exclude, l.n.id)
		}
	}
	return a
}

// pick leaves one endpoint of those that may be asked for, by chance: what holds
// must hold wherever a policy sends a request, and a scenario that was found
// stays one when policies change.
func (f *flight) pick(a schedule.Ask) schedule.Ask {
	var left []inference.EndpointID
	for _, e := range f.g.pool.Endpoints {
		if !slices.Contains(a.Exclude, e.ID) {
			left = append(left, e.ID)
		}
	}
	if len(left) > 1 {
		at := f.w.rnd.IntN(len(left))
		a.Exclude = append(slices.Clone(a.Exclude), slices.Delete(left, at, at+1)...)
	}
	return a
}

// reserve asks for a place, for a while.
func (f *flight) reserve(a schedule.Ask, until time.Time) {
	if f.machine.Phase() == inference.Terminal {
		return
	}
	place, err := f.g.book.Reserve(f.g.now(), &f.g.pool, f.pick(f.ask(a)))
	switch {
	case err != nil && f.g.now().Before(until):
		f.g.later(100*time.Millisecond, func() { f.reserve(a, until) })
	case err != nil:
		f.step(attempt.Unplaced{Err: err})
	default:
		f.place = place
		placed := attempt.Placed{Endpoint: place.Endpoint.ID}
		if !f.node().set.Bare {
			placed.Fence = inference.FenceLease
		}
		f.step(placed)
	}
}

func (f *flight) node() *node {
	for _, n := range f.w.nodes {
		if n.id == f.place.Endpoint.ID {
			return n
		}
	}
	return nil
}

func (f *flight) key() lease.Key { return lease.Key{Request: f.id, N: f.n} }

func (f *flight) link() *link { return f.g.links[f.record.node] }

// vacate gives the place back.
func (f *flight) vacate() {
	if f.place != nil {
		f.place.Release()
		f.place = nil
		f.freed()
	}
}

func (f *flight) silenced(p inference.Proof) {
	f.fencing = false
	f.w.fact(check.Fact{What: check.Silenced, Request: string(f.id), N: f.n, Word: p.String()})
}

func (f *flight) freed() {
	if f.placeN > 0 {
		f.w.fact(check.Fact{What: check.PlaceFreed, Request: string(f.id), N: f.placeN})
		f.placeN = 0
	}
}

// release drops the lease of an attempt that needs no more fencing.
func (f *flight) release() {
	if f.n > f.prior && f.record.fence == inference.FenceLease {
		f.link().Release(f.key())
		f.record.fenced = true
		if f.fencing {
			f.silenced(inference.NoProof) // or so it believes
		}
	}
}

func (f *flight) dispatch(n int) {
	f.hangUp()
	f.n, f.held, f.committed = n, 0, false
	f.gate.Open(n)
	at := f.node()
	grant, leased := f.g.links[at.i].Dispatch(f.g.now(), f.key())
	r := f.record
	if mutation.JournalAfterDispatch {
		before := *r
		r.before, r.since = &before, f.w.now
	}
	r.n, r.node, r.guard, r.fence, r.fenced = n, at.i, grant.Guard, inference.FenceTransport, false
	if leased {
		r.fence = inference.FenceLease
		f.g.links[at.i].arm()
	}
	f.freed() // a resend keeps the place of the attempt before
	f.placeN = n
	f.w.fact(check.Fact{What: check.PlaceTaken, Request: string(f.id), N: n})
	sent := check.Fact{What: check.Dispatched, Request: string(f.id), N: n, Leased: leased}
	if a, _ := f.machine.Attempt(n); a.Resent {
		sent.Word = check.Resent
		r.resent++
	}
	f.w.fact(sent)
	f.send(at, grant)
	f.limits(n)
}

// limits are of the attempt, on the gateway's clock.
func (f *flight) limits(n int) {
	idle := func() {}
	idle = func() {
		if f.n != n || !f.machineAt(n) {
			return
		}
		limit := firstOutputLimit
		if f.committed {
			limit = idleLimit
		}
		if rest := limit - f.g.now().Sub(f.moved); rest > 0 {
			f.g.later(rest, idle)
			return
		}
		kind := attempt.FirstOutputLimit
		if f.committed {
			kind = attempt.IdleLimit
		}
		f.step(attempt.Evidence{N: n, Kind: kind})
	}
	if !f.c.ask.Whole {
		f.g.later(firstOutputLimit, idle)
	}
	f.g.later(totalLimit, func() { f.step(attempt.Evidence{N: n, Kind: attempt.TotalLimit}) })
}

func (f *flight) machineAt(n int) bool {
	a, ok := f.machine.Attempt(n)
	return ok && (a.State == attempt.Dispatched || a.State == attempt.Publishing)
}

// send puts the request on a connection.
func (f *flight) send(at *node, grant lease.Grant) {
	if !at.set.Bare {
		f.g.granted(grant)
	}
	c := &conn{f: f, n: at, key: f.key(), prompt: f.c.ask.Prompt, tokens: f.c.ask.Tokens}
	f.conn, f.moved = c, f.g.now()
	at.conns = append(at.conns, c)
	arrives := func() {
		c.down(func() {
			g := at.guard()
			g.do(func() { g.dispatch(c, grant) })
		})
	}
	a, _ := f.machine.Attempt(f.n)
	if !a.Again && f.w.chance(f.w.plan.Net.Stale) {
		// The connection was closed already, or while the request was on it.
		if f.w.rnd.IntN(2) == 0 {
			arrives()
		}
		c.reset = true
		f.g.after(f.w.between(time.Millisecond, 400*time.Millisecond), func() {
			if !c.closed {
				f.fromAttempt(func() { f.step(attempt.Evidence{N: c.key.N, Kind: attempt.StaleConnection}) })
			}
		})
		return
	}
	arrives()
	if f.w.chance(f.w.plan.Net.Repeat) {
		arrives() // something between us sent it twice
	}
}

func (f *flight) resend() {
	at := f.conn.n
	f.hangUp()
	grant, ok := f.link().First(f.key())
	if !ok {
		f.g.after(0, func() { f.step(attempt.LeaseExpired{N: f.n}) })
		return
	}
	f.send(at, grant)
}

func (f *flight) hangUp() {
	if f.conn != nil {
		f.conn.close()
		f.conn = nil
	}
}

func (f *flight) revoke(n int) {
	f.fencing = true
	f.w.fact(check.Fact{What: check.FencingBegan, Request: string(f.id), N: n})
	l := f.link()
	v, ok := l.Fence(f.key())
	if !ok {
		f.g.after(0, func() { f.step(attempt.LeaseExpired{N: n}) })
		return
	}
	l.order(func(g *guard) { g.revoke([]lease.Revoke{v}) })
}

// deliver hands bytes to the client's kernel.
func (f *flight) deliver(n int, what check.Bytes) error {
	if f.c.gone && f.w.rnd.IntN(2) == 0 {
		return errGone
	}
	f.w.fact(check.Fact{What: check.Delivered, Request: string(f.id), N: n, Bytes: what})
	return nil
}

func (f *flight) last(what check.Bytes) {
	_ = f.gate.Seal(func(attempt.Counters) error { return f.deliver(f.n, what) })
}

func (f *flight) commit(n int) attempt.Event {
	if f.leaked {
		return nil
	}
	err := f.gate.Commit(n, func() (attempt.Counters, error) {
		return attempt.Counters{Events: f.held}, f.deliver(n, check.Output)
	})
	f.committed, f.held = true, 0
	return f.written(n, err)
}

func (f *flight) written(n int, err error) attempt.Event {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, attempt.ErrGateClosed), errors.Is(err, attempt.ErrNotCommitted):
		return attempt.Broken{Reason: err.Error()}
	}
	return attempt.WriteFailed{N: n}
}

// Write is the client's side of the gate.
func (f *flight) Write(chunk []byte) (int, error) {
	if err := f.deliver(int(chunk[0]), check.Output); err != nil {
		return 0, err
	}
	return len(chunk), nil
}

func (f *flight) complete(n int) attempt.Event {
	var err error
	if sealed := f.gate.Seal(func(attempt.Counters) error {
		err = f.deliver(n, check.LastOutput)
		return nil
	}); sealed != nil {
		return nil
	}
	if err != nil {
		return attempt.WriteFailed{N: n}
	}
	return attempt.Delivered{N: n}
}

func (f *flight) finish(e attempt.Finish) {
	f.record.outcome = e.Outcome
	f.w.fact(check.Fact{What: check.Outcome, Request: string(f.id), Word: e.Outcome.String()})
	f.hangUp()
	// What still waits for the journal must not be written any more.
	_ = f.gate.Seal(func(attempt.Counters) error { return nil })
	if !e.Fencing {
		f.release()
		f.vacate()
		delete(f.g.flights, f.id)
		return
	}
	if mutation.SlotEarly {
		f.vacate()
	}
}
