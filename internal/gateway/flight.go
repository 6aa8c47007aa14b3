// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/schedule"
)

// flight is one routed request under way: its state machine, and what is needed
// to carry out the machine's effects. One goroutine runs it.
type flight struct {
	g       *Gateway
	ex      Exchange
	meter   *metered
	id      inference.RequestID
	d       dialect.Dialect
	req     *dialect.Request
	pool    *pool
	model   string // the client's name
	served  string // the engines' name
	restore string // the client's name, if the route rewrote it
	arrived time.Time

	target string // path and query for engines
	header []headerField
	body   [][]byte // segments, kept for every attempt

	aim     aim
	machine *attempt.Request
	trace   *traced
	gate    attempt.Gate
	ticket  ticket
	waited  time.Duration // for places, in all
	place   *schedule.Reservation
	engine  *engine // at the endpoint reserved
	try     *try
	leased  *leased // of the last attempt; nil if it needs no fence by a guard
	fresh   int     // prompt tokens that the engine computed, as it reports; -1: it does not

	ctx     context.Context // done when the client left or draining cut us off
	release func()          // of ctx

	keyed bool
	tape  *taped // of a keyed request, for repeats
	err   *inference.Error
	ended bool // the end marker was missing and written

	fenced    int // the last attempt whose fence the journal was told of
	lastWrite time.Time
	leaked    bool // only ever set where gateless is
}

// newFlight makes the flight of an admitted request, after prior attempts of it
// if it was opened again.
func (g *Gateway) newFlight(a *admission, keyed bool, prior *journal.Record) *flight {
	spec := attempt.Spec{ID: a.id, Policy: a.pool.policy, Keyed: keyed}
	if prior != nil {
		spec.Prior, spec.PriorCharged = prior.Attempt, prior.Charged()
	}
	f := &flight{
		g: g, ex: a.ex, meter: a.ex, id: a.id, d: a.d, req: a.req, pool: a.pool, keyed: keyed,
		model: a.req.Model, served: a.found.Model, arrived: a.arrived,
		target:  a.ex.Head().target(),
		header:  engineHeader(a.ex.Head().Header, a.pool, a.id),
		machine: attempt.NewRequest(spec),
		trace:   g.tracer.begin(spec),
		aim:     newAim(a),
		fresh:   -1,
	}
	f.ticket.Request = flow.Request{
		Owner: &f.ticket, Priority: a.treatment.priority, Fairness: a.treatment.fairness,
		Bytes: int64(len(a.body)), Deadline: a.treatment.deadline, ShedAt: a.treatment.shedAt,
		Output: a.req.OutputMax(),
	}
	if keyed {
		f.tape = &taped{Exchange: a.ex, tape: journal.Tape{Max: g.journal.AnswerMax()}}
		f.ex = f.tape
	}
	if a.found.Model != a.req.Model {
		f.restore = a.req.Model
	}
	f.body, _ = dialect.Apply(a.body, a.d.RequestEdits(a.req, a.body, a.found.Model, a.req.Stream))

	ctx, cancel := context.WithCancelCause(a.ex.Gone())
	unwatch := context.AfterFunc(g.cut, func() { cancel(errDraining) })
	f.ctx = ctx
	f.release = func() { unwatch(); cancel(nil) }
	return f
}

// run takes the request to its terminal outcome. Each turn of the loop hands
// the machine one event and carries out what it decides; when that yields no
// event of its own, the current attempt goes on until it does.
func (f *flight) run() {
	f.pool.sleep.come()
	defer f.pool.sleep.leave()
	defer f.end()
	event := f.reserve(schedule.Ask{})
	for f.machine.Phase() != inference.Terminal {
		switch {
		case event != nil:
		case f.fencing():
			event = f.silence()
		default:
			event = f.next()
		}
		event = f.carryOut(f.step(event))
	}
}

// step hands the machine an event.
func (f *flight) step(event attempt.Event) []attempt.Effect {
	now := time.Now()
	f.trace.event(now, event)
	return f.machine.Step(now, event)
}

// end lets go of everything, whatever happened. A panic is a bug of ours: it
// ends this request, loudly, and no other.
func (f *flight) end() {
	if v := recover(); v != nil {
		f.g.log.Error("request panicked", "request", f.id, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
		err := inference.Errorf(inference.Internal, "internal error")
		f.last(func(attempt.Counters) {
			if f.machine.FirstDeltaSent() {
				f.ex.Abort()
			} else {
				writeError(f.ex, f.id, f.d, err)
			}
		})
		f.noteOutcome(attempt.Finish{Outcome: inference.Failed, Code: inference.Internal})
		f.g.record.Request(f.pool.name, f.model, inference.Failed, inference.Internal)
	}
	f.cancel()
	f.release()
	if f.fencing() {
		f.g.running.Go(f.settle)
		return
	}
	f.letGo()
}

// letGo gives back what is left when nothing more is to come.
func (f *flight) letGo() {
	f.unlease()
	f.vacate()
	f.checkOut()
	if late := f.gate.Counters().Late; late > 0 {
		f.g.record.LateChunks(late)
	}
}

// carryOut performs effects in order. An effect whose result the machine must
// know yields an event; what would follow it is dropped, because the machine
// decides anew.
func (f *flight) carryOut(effects []attempt.Effect) attempt.Event {
	for _, effect := range effects {
		if event := f.perform(effect); event != nil {
			return event
		}
	}
	return nil
}

func (f *flight) perform(effect attempt.Effect) attempt.Event {
	f.trace.effect(effect)
	switch e := effect.(type) {
	case attempt.Dispatch:
		f.cancel()
		f.gate.Open(e.N)
		f.try = newTry(f.ctx, f.engine, e)
		leased := f.grant(e.N)
		if event := f.noteDispatch(e.N); event != nil {
			return event
		}
		if !leased {
			return attempt.Evidence{N: e.N, Kind: attempt.EndpointGone}
		}
	case attempt.Resend:
		f.resend(e)
	case attempt.Revoke:
		f.revoke()
	case attempt.Silent:
		f.silent(e)
	case attempt.Commit:
		return f.commit(e.N)
	case attempt.Complete:
		return f.complete(e)
	case attempt.CloseGate:
		f.gate.Close(e.N)
		f.noteFailure(e.N)
	case attempt.Cancel:
		f.cancel()
	case attempt.Report:
		f.report(e)
	case attempt.AskRetry:
		return f.askRetry(e)
	case attempt.Requeue:
		f.g.record.Retry(f.pool.name, f.lastAttempt().Verdict)
		f.unlease()
		if f.place != nil {
			f.giveBack() // whoever waits comes after it
		}
		if f.neverBegan() {
			e.Exclude = nil // what comes to its address is another engine
		}
		return f.reserve(schedule.Ask{Exclude: e.Exclude, PreferRevision: e.PreferRevision, Retry: true})
	case attempt.Respond:
		f.err = e.Err
		f.last(func(attempt.Counters) { writeError(f.ex, f.id, f.d, e.Err) })
		if e.Err.Code == inference.Internal {
			f.g.log.Error("request failed", "request", f.id, "error", e.Err)
		}
	case attempt.PassThrough:
		f.last(func(attempt.Counters) { _ = f.writeAnswer(f.try.answer) })
	case attempt.EndStream:
		f.err = e.Err
		f.last(func(sent attempt.Counters) { f.writeErrorEvent(e.Err, sent) })
	case attempt.Abort:
		f.last(func(attempt.Counters) { f.ex.Abort() })
	case attempt.Finish:
		// Whoever hears that a request ended must find nothing of it in flight.
		f.cancel()
		if !e.Fencing {
			f.unlease()
			f.vacate()
		}
		f.checkOut()
		f.finish(e)
	}
	return nil
}

// cancel ends the current attempt's exchange with its engine.
func (f *flight) cancel() {
	if f.try != nil {
		f.try.close(f)
	}
}

func (f *flight) lastAttempt() attempt.Attempt {
	all := f.machine.Attempts()
	return all[len(all)-1]
}

func (f *flight) report(e attempt.Report) {
	now := time.Now()
	f.pool.book.Report(now, schedule.Outcome{
		Endpoint: e.Endpoint, Verdict: e.Verdict, RetryAfter: e.RetryAfter, Took: now.Sub(f.try.dispatched),
	})
	if f.neverBegan() {
		f.pool.lost(e.Endpoint, f.engine)
	}
	if !f.fencing() { // silent tells of those, with their proof
		f.g.record.Attempt(f.pool.name, e.Verdict, f.lastAttempt().Proof)
	}
}

func (f *flight) askRetry(e attempt.AskRetry) attempt.Event {
	var exclude []inference.EndpointID
	for _, a := range f.machine.Attempts() {
		exclude = append(exclude, a.Endpoint)
	}
	err := f.pool.book.Retry(time.Now(), f.pool.now.Load().fleet, schedule.Ask{Model: f.served, Exclude: exclude, Retry: true}, f.req.PromptTokens)
	if err != nil && err.Code == inference.NoEndpoints && f.neverBegan() {
		err = nil // it waits for an engine like others, and nothing is computed twice
	}
	if err != nil {
		f.g.record.RetryDenied(f.pool.name, err.Code)
	}
	return attempt.RetryAnswer{Err: err}
}

// commit makes attempt n the answer: from here nothing is ever repeated.
func (f *flight) commit(n int) attempt.Event {
	t, computed := f.try, time.Now() // by the engine; a client may be slow to take it
	t.engine.forget(t)
	if gateless && f.leaked {
		return nil
	}
	if event := f.noteFirstDelta(n); event != nil {
		return event
	}
	f.began(computed)
	f.writing(computed)
	err := f.gate.Commit(n, func() (attempt.Counters, error) {
		sent := attempt.Counters{Events: t.heldEvents, Tokens: t.heldTokens}
		if t.mode == whole {
			sent.Events = 1
			return sent, f.writeAnswer(t.answer)
		}
		f.writeHead(t.answer.status, t.answer.header)
		n, err := f.ex.Write(t.held)
		sent.Bytes = int64(n)
		return sent, err
	})
	t.held, t.committed, f.body = nil, true, nil
	f.lastWrite = time.Now()
	f.wrote(f.lastWrite)
	f.g.record.FirstOutput(f.pool.name, f.model, f.lastWrite.Sub(f.arrived))
	if predicted := f.ticket.Predicted(); predicted > 0 {
		f.g.record.Predicted(f.pool.name, predicted, computed.Sub(f.arrived))
	}
	if f.req.Stream {
		f.pool.book.FirstOutput(f.req.PromptTokens, computed.Sub(t.dispatched))
	}
	return f.written(n, err)
}

// complete writes what the engine left out, and claims delivery only when every
// byte was handed to the kernel.
func (f *flight) complete(e attempt.Complete) attempt.Event {
	f.ended = e.AddMarker
	f.completed()
	var marker []byte
	if e.AddMarker {
		marker = f.d.EndMarker()
	}
	f.keepStream(marker)
	if event := f.publish(marker, 0, 0); event != nil {
		return event
	}
	f.last(func(attempt.Counters) {})
	f.note(journal.Event{Kind: journal.Ended, Attempt: e.N, Verdict: inference.Finished})
	return attempt.Delivered{N: e.N}
}

// publish writes one chunk of the current attempt through the gate.
func (f *flight) publish(chunk []byte, events, tokens int) attempt.Event {
	if len(chunk) == 0 {
		return nil
	}
	if gateless {
		_, err := f.ex.Write(chunk)
		return f.written(f.try.n, err)
	}
	f.progressed(tokens)
	f.writing(time.Now())
	err := f.gate.Publish(f.try.n, f.ex, chunk, events, tokens)
	now := time.Now()
	f.wrote(now)
	if tokens > 0 {
		f.g.record.Gap(f.pool.name, f.model, now.Sub(f.lastWrite))
		f.lastWrite = now
	}
	return f.written(f.try.n, err)
}

// written turns the result of a write into what the machine must know of it.
func (f *flight) written(n int, err error) attempt.Event {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, attempt.ErrGateClosed), errors.Is(err, attempt.ErrNotCommitted):
		return attempt.Broken{Reason: err.Error()}
	}
	return attempt.WriteFailed{N: n}
}

// last runs what ends the answer; after it nobody can write. Whether the client
// is still there to read it changes nothing any more.
func (f *flight) last(write func(sent attempt.Counters)) {
	_ = f.gate.Seal(func(sent attempt.Counters) error { write(sent); return nil })
}

func (f *flight) writeErrorEvent(err *inference.Error, sent attempt.Counters) {
	_, _ = f.ex.Write(f.d.ErrorEvent(err, dialect.ErrorDetail{
		RequestID: f.id, Partial: true, Tokens: sent.Tokens, Events: sent.Events, Retryable: err.Code.Info().Retryable,
	}))
}

// answer is a whole answer of an engine, ready for the client.
type answer struct {
	status   int
	header   http.Header
	segments [][]byte
	length   int64
}

func (f *flight) writeAnswer(a answer) error {
	h := f.clientHeader(a.header)
	if a.status != http.StatusNoContent && a.status != http.StatusNotModified {
		h["Content-Length"] = []string{strconv.FormatInt(a.length, 10)}
	}
	f.ex.WriteHead(a.status, h)
	_, err := f.ex.Write(bytes.Join(a.segments, nil))
	return err
}

func (f *flight) writeHead(status int, engine http.Header) {
	f.ex.WriteHead(status, f.clientHeader(engine))
}

func (f *flight) clientHeader(engine http.Header) http.Header {
	h := clientHeader(engine, f.id)
	if f.ex.Head().Debug && f.place != nil {
		h["Headgate-Endpoint"] = []string{string(f.place.Endpoint.ID)}
		h["Headgate-Attempts"] = []string{strconv.Itoa(f.try.n)}
		to := "pool=" + f.pool.name
		if f.served != f.model {
			to += " model=" + f.served
		}
		h["Headgate-Route"] = []string{to + " " + f.place.Why()}
		h["Headgate-Queue-Ms"] = []string{strconv.FormatInt(f.waited.Milliseconds(), 10)}
	}
	return h
}

func (f *flight) finish(e attempt.Finish) {
	f.bill(e.Outcome)
	f.noteOutcome(e)
	f.g.record.Request(f.pool.name, f.model, e.Outcome, e.Code)
	if !f.g.log.Enabled(f.ctx, slog.LevelDebug) {
		return
	}
	f.g.log.Debug("request ended", "request", f.id, "pool", f.pool.name, "outcome", e.Outcome.String(),
		"code", e.Code, "attempts", len(f.machine.Attempts()), "tokens", f.gate.Counters().Tokens,
		"took", time.Since(f.arrived))
}
