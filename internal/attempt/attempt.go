// SPDX-License-Identifier: Apache-2.0

// Package attempt decides the life of one logical request and its attempts:
// when an attempt is dispatched, what its failure means, whether another may
// follow, and when the client's answer is final.
//
// It owns the rules of docs/failover.md and performs no I/O: Step takes the
// time and one event and returns the effects that the caller carries out, in
// order. Only transitions pass through Step; the chunks of a committed answer
// pass through Gate. It refuses to choose endpoints, to hold the retry budget
// (it asks and is answered) and to look at bytes.
package attempt

import (
	"fmt"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/mutation"
)

// Policy is what a pool permits. The zero value permits one attempt.
type Policy struct {
	// MaxAttempts bounds the attempts of one logical request, the first
	// included. Values below 1 read as 1.
	MaxAttempts int

	// AllowTransportFence lets an attempt of unknown fate be repeated after no
	// more than closing its connection. Only ever right for text.
	AllowTransportFence bool

	// ExecutesTools says that the pool's engines call tools by themselves, so
	// that an attempt may have had effects that a repeat would double.
	ExecutesTools bool
}

// Spec holds what is fixed about one logical request at arrival.
type Spec struct {
	ID     inference.RequestID
	Policy Policy

	// Keyed says that the client sent an Idempotency-Key: its own repeats map
	// to this logical request, so a retryable status can do no harm.
	Keyed bool

	// Prior is the number of attempts that a keyed request made before it was
	// opened again, and PriorCharged how many of them count towards
	// MaxAttempts. Numbers go on from there.
	Prior, PriorCharged int
}

// State is how far one attempt has come.
type State uint8

// Attempt states.
const (
	Dispatched State = iota
	Publishing       // its output is reaching the client
	Fencing          // it failed; nothing proves yet that it is silent
	Fenced           // proved silent
	Ended            // over, and its answer (whole, or the engine's refusal) is the client's
)

var stateNames = [...]string{"dispatched", "publishing", "fencing", "fenced", "ended"}

func (s State) String() string { return stateNames[s] }

// Attempt is the record of one try.
type Attempt struct {
	N        int
	State    State
	Endpoint inference.EndpointID
	Revision string
	Fence    inference.FenceLevel
	Proof    inference.Proof
	Verdict  inference.Verdict

	// Resent marks the one attempt that repeats a request lost to a stale
	// pooled connection. It is counted but not charged to MaxAttempts.
	Resent bool

	// Again marks an attempt behind a guard that was sent a second time, under
	// its own number, after a pooled connection turned out to be stale.
	Again bool

	DispatchedAt  time.Time
	FirstOutputAt time.Time
	EndedAt       time.Time
}

// Request is the state machine of one logical request. It is not safe for
// concurrent use: one goroutine owns it.
type Request struct {
	spec     Spec
	phase    inference.Phase
	outcome  inference.Outcome
	code     inference.Code
	attempts []Attempt
	excluded []inference.EndpointID

	waiting    bool // an endpoint is awaited: at first, and after a granted retry
	firstDelta bool // set before the first write, never derived from a status
	streaming  bool // the committed answer is an event stream
	finishing  bool // the answer is whole; its last bytes are being written
	asked      bool // a retry was asked for and is not answered yet
	resent     bool // the free resend is used up
	crashes    int  // engines that crashed while this request was alone on them
	errors     int  // attempts that ended in engine_error
	passable   bool // the last attempt left an engine answer that may pass through
}

// NewRequest begins a logical request.
func NewRequest(spec Spec) *Request {
	spec.Policy.MaxAttempts = max(spec.Policy.MaxAttempts, 1)
	return &Request{
		spec: spec, phase: inference.Received, waiting: true,
		resent: spec.Prior > spec.PriorCharged, // what was not charged was the resend
	}
}

// Phase is how far the request has come.
func (r *Request) Phase() inference.Phase { return r.phase }

// Outcome is NoOutcome until the request is terminal.
func (r *Request) Outcome() inference.Outcome { return r.outcome }

// Code is the error code that the request ended with, "" if none.
func (r *Request) Code() inference.Code { return r.code }

// FirstDeltaSent reports whether any of the answer may have reached the client.
func (r *Request) FirstDeltaSent() bool { return r.firstDelta }

// Attempts returns a copy of the attempts' records, oldest first.
func (r *Request) Attempts() []Attempt { return slices.Clone(r.attempts) }

// Attempt returns the record of attempt n of this run.
func (r *Request) Attempt(n int) (Attempt, bool) {
	if i := n - r.spec.Prior - 1; i >= 0 && i < len(r.attempts) {
		return r.attempts[i], true
	}
	return Attempt{}, false
}

// Charged is the number of attempts that count towards MaxAttempts.
func (r *Request) Charged() int {
	n := r.spec.PriorCharged
	for i := range r.attempts {
		if !r.attempts[i].Resent {
			n++
		}
	}
	return n
}

// Settled reports whether nothing more is to come: the request has its outcome,
// and no attempt waits for a guard.
func (r *Request) Settled() bool { return r.phase == inference.Terminal && !r.fencing() }

// fencing reports whether a guard is to prove that the current attempt is
// silent.
func (r *Request) fencing() bool {
	a := r.current()
	return a != nil && a.State == Fencing && a.Fence == inference.FenceLease
}

// Step applies one event and returns the work to do, in order. Events of an
// attempt that is not the current one, and any event after the terminal
// outcome, are late: they change nothing and yield nothing. Only what fences
// the last attempt counts to the end.
func (r *Request) Step(now time.Time, event Event) []Effect {
	switch e := event.(type) {
	case CancelAck:
		return r.silent(now, e.N, inference.Closed, inference.ProofCancelAck)
	case LeaseExpired:
		return r.silent(now, e.N, inference.Uncertain, inference.ProofLeaseExpired)
	case Evidence:
		if verdicts[min(e.Kind, kinds-1)] == inference.Dead && r.fencing() {
			return r.silent(now, e.N, inference.Dead, inference.ProofDead)
		}
	}
	if r.phase == inference.Terminal {
		return nil
	}
	switch e := event.(type) {
	case Queued:
		return r.queue()
	case Placed:
		return r.place(now, e)
	case Unplaced:
		return r.unplaced(now, e)
	case FirstOutput:
		return r.firstOutput(now, e)
	case Evidence:
		return r.judge(now, e)
	case Answered:
		return r.answered(now, e)
	case Delivered:
		return r.delivered(e)
	case WriteFailed:
		return r.writeFailed(now, e)
	case CommitLost:
		return r.commitLost(now, e)
	case RetryAnswer:
		return r.retryAnswer(e)
	case ClientGone:
		return r.clientGone(now)
	case Stopped:
		return r.stop(now, e.Err)
	case Broken:
		return r.broken(now, e.Reason)
	}
	return r.broken(now, fmt.Sprintf("unknown event %T", event))
}

func (r *Request) queue() []Effect {
	if r.phase == inference.Received {
		r.phase = inference.Queued
	}
	return nil
}

// place dispatches the next attempt, and only while no delta was sent (I2) and
// the attempt before is fenced (I3).
func (r *Request) place(now time.Time, e Placed) []Effect {
	if !r.waiting {
		return r.broken(now, "an endpoint was placed and none was asked for")
	}
	return r.dispatch(now, Attempt{Endpoint: e.Endpoint, Revision: e.Revision, Fence: e.Fence}, r.spec.Policy.ExecutesTools)
}

func (r *Request) dispatch(now time.Time, a Attempt, fresh bool) []Effect {
	a.N = r.spec.Prior + len(r.attempts) + 1
	a.DispatchedAt = now
	r.waiting = false
	r.attempts = append(r.attempts, a)
	r.phase = inference.Prefill
	r.passable = false
	return []Effect{Dispatch{N: a.N, Endpoint: a.Endpoint, Fresh: fresh}}
}

// unplaced ends a request that no endpoint could take. After an attempt the
// truth is that attempt's failure, not the lack of another endpoint.
func (r *Request) unplaced(now time.Time, e Unplaced) []Effect {
	if !r.waiting {
		return r.broken(now, "no endpoint was placed and none was asked for")
	}
	if r.current() == nil {
		return r.finish(r.undispatched(), e.Err.Code, Respond{e.Err})
	}
	if e.Err.Code == inference.NoEndpoints {
		return r.exhausted()
	}
	return r.fail(e.Err)
}

// undispatched is the outcome of a run without an attempt. Rejected means that
// the request was never dispatched, and its key is free again; a request that was
// opened again is neither.
func (r *Request) undispatched() inference.Outcome {
	if r.spec.Prior > 0 {
		return inference.Failed
	}
	return inference.Rejected
}

// firstOutput sets the bit before anything is written: whatever happens to the
// write, no later step can take the request for untouched.
func (r *Request) firstOutput(now time.Time, e FirstOutput) []Effect {
	a := r.live(e.N)
	if a == nil || r.firstDelta {
		return nil
	}
	r.commit(now, a, e.Stream)
	return []Effect{Commit{N: a.N}}
}

func (r *Request) commit(now time.Time, a *Attempt, stream bool) {
	r.firstDelta = true
	r.streaming = stream
	r.phase = inference.Decode
	a.State = Publishing
	a.FirstOutputAt = now
}

// answered: the engine's answer is whole. Completed is claimed only once its
// last bytes are delivered (I4).
func (r *Request) answered(now time.Time, e Answered) []Effect {
	a := r.live(e.N)
	if a == nil || r.finishing {
		return nil
	}
	var effects []Effect
	if !r.firstDelta {
		r.commit(now, a, e.Stream)
		effects = append(effects, Commit{N: a.N})
	}
	r.finishing = true
	a.State, a.Verdict, a.EndedAt = Ended, inference.Finished, now
	return append(effects,
		Report{Endpoint: a.Endpoint, Verdict: inference.Finished},
		Complete{N: a.N, AddMarker: e.MarkerMissing})
}

func (r *Request) delivered(e Delivered) []Effect {
	if !r.finishing || r.current().N != e.N {
		return nil
	}
	return r.finish(inference.Completed, "")
}

func (r *Request) writeFailed(now time.Time, e WriteFailed) []Effect {
	if a := r.current(); a == nil || a.N != e.N {
		return nil
	}
	return r.clientGone(now)
}

// commitLost: the first-delta bit is not known to be on disk, so nothing may be
// written, an error neither: the record may say by now that a part was sent, or
// that another gateway owns the request.
func (r *Request) commitLost(now time.Time, e CommitLost) []Effect {
	a := r.current()
	if a == nil || a.N != e.N || !r.firstDelta {
		return nil
	}
	a.State, a.EndedAt = Fencing, now
	effects := r.revoke(a, r.fence(a, nil))
	if a.Fence == inference.FenceTransport {
		a.State, a.Proof = Fenced, inference.ProofTransport
	}
	return append(effects, r.finish(inference.Interrupted, inference.JournalUnavailable, Abort{})...)
}

func (r *Request) clientGone(now time.Time) []Effect {
	var effects []Effect
	if a := r.current(); a != nil && a.open() {
		a.State, a.Verdict, a.EndedAt = Fencing, inference.ClientGone, now
		effects = r.revoke(a, r.fence(a, effects))
		effects = append(effects, Report{Endpoint: a.Endpoint, Verdict: inference.ClientGone})
		if a.Fence == inference.FenceTransport {
			a.State, a.Proof = Fenced, inference.ProofTransport
		}
	}
	return append(effects, r.finish(inference.Cancelled, "")...)
}

// judge classifies how the current attempt failed and decides what follows.
func (r *Request) judge(now time.Time, e Evidence) []Effect {
	a := r.live(e.N)
	if a == nil {
		return nil
	}
	if e.Kind == StaleConnection && a.Fence == inference.FenceLease && !a.Again && !r.firstDelta {
		a.Again = true
		return []Effect{Resend{N: a.N, Endpoint: a.Endpoint}}
	}
	a.State, a.Verdict, a.EndedAt = Fencing, classify(e, r.spec.Policy, a.Fence), now

	if a.Again && a.Verdict == inference.NotStarted {
		a.Verdict = inference.Uncertain // the first sending may have started it
	}

	// Gate first: from here nothing of this attempt can reach the client,
	// whatever the old connection still holds.
	effects := r.fence(a, nil)
	if a.Fence == inference.FenceLease {
		if a.Proof = leaseProof(a, e); a.Proof != inference.NoProof {
			a.State = Fenced
		}
		effects = r.revoke(a, effects)
	} else if a.Verdict == inference.Closed && e.Kind == StaleConnection && r.mayResend() {
		return append(effects, r.resend(now, a)...)
	}
	effects = append(effects, Report{Endpoint: a.Endpoint, Verdict: a.Verdict, RetryAfter: e.RetryAfter})
	if r.firstDelta {
		return append(effects, r.interrupt(interruption(e, a.Verdict))...)
	}
	r.excluded = append(r.excluded, a.Endpoint)
	r.passable = e.Passable
	return append(effects, r.afterFailure(a, e)...)
}

// fence closes the attempt's way to the client and then its connection, in
// that order.
func (r *Request) fence(a *Attempt, effects []Effect) []Effect {
	return append(effects, CloseGate{N: a.N}, Cancel{N: a.N})
}

// revoke asks the guard of an attempt without a proof to stop it. The answer is
// CancelAck or LeaseExpired; a revoke that was only sent proves nothing.
func (r *Request) revoke(a *Attempt, effects []Effect) []Effect {
	if a.Fence == inference.FenceLease && a.State == Fencing {
		effects = append(effects, Revoke{N: a.N})
	}
	return effects
}

// silent: a guard's word, or the end of a lease, proves that attempt n publishes
// nothing more. Where that is news of an attempt that was thought to be at work
// it has failed; verdict says how.
func (r *Request) silent(now time.Time, n int, verdict inference.Verdict, proof inference.Proof) []Effect {
	a := r.current()
	switch {
	case a == nil || a.N != n || a.Fence != inference.FenceLease:
		return nil
	case a.State == Fencing:
		a.State, a.Proof = Fenced, proof
		effects := []Effect{Silent{N: n, Proof: proof}}
		if r.phase == inference.Terminal {
			return effects
		}
		return append(effects, r.askRetry(a)...)
	case !a.open():
		return nil
	}
	a.State, a.Verdict, a.Proof, a.EndedAt = Fenced, verdict, proof, now
	effects := append(r.fence(a, nil), Silent{N: n, Proof: proof}, Report{Endpoint: a.Endpoint, Verdict: verdict})
	if r.firstDelta {
		return append(effects, r.interrupt(interruption(Evidence{}, verdict))...)
	}
	r.excluded = append(r.excluded, a.Endpoint)
	return append(effects, r.afterFailure(a, Evidence{})...)
}

func (r *Request) mayResend() bool {
	return !r.firstDelta && !r.resent && !r.spec.Policy.ExecutesTools
}

// resend repeats a request that was lost with a pooled connection which the
// engine had closed. The engine most likely never saw it, so the endpoint is
// neither blamed nor excluded, and a fresh connection cannot be stale again.
func (r *Request) resend(now time.Time, a *Attempt) []Effect {
	r.resent = true
	a.State, a.Proof = Fenced, inference.ProofTransport
	return r.dispatch(now, Attempt{Endpoint: a.Endpoint, Revision: a.Revision, Fence: a.Fence, Resent: true}, true)
}

func (r *Request) afterFailure(a *Attempt, e Evidence) []Effect {
	guarded := a.Fence == inference.FenceLease
	switch a.Verdict {
	case inference.Refused:
		if !guarded {
			a.Proof = inference.ProofEnded
		}
		if a.Proof != inference.NoProof {
			a.State = Ended
		}
		if r.toolsMayHaveRun() && resentBySDKs(e.Status) {
			return r.fail(errToolEffects())
		}
		return r.finish(inference.Failed, "", PassThrough{N: a.N})
	case inference.Overloaded:
		// Never a second attempt because of latency: it would double the load
		// of a pool that is slow already.
		if !guarded {
			a.State = Ended
		}
		return r.fail(inference.Errorf(inference.UpstreamTimeout, "the engine gave no answer within the %s limit", e.Kind.limit()))
	}

	if !guarded {
		if a.Proof = proof(a.Verdict, r.spec.Policy); a.Proof == inference.NoProof {
			return r.fail(errNotFenced())
		}
		a.State = Fenced
	}
	if end := r.unrepeatable(a, e); end != nil {
		return end // nothing follows, so nobody waits for a fence
	}
	if mutation.UnackedRevoke {
		a.State, a.Proof = Fenced, inference.ProofCancelAck
	}
	if a.State == Fencing {
		return nil // CancelAck or LeaseExpired goes on
	}
	return r.askRetry(a)
}

// unrepeatable ends a request that no retry could follow, or returns nil.
func (r *Request) unrepeatable(a *Attempt, e Evidence) []Effect {
	policy := r.spec.Policy
	if policy.ExecutesTools && a.Verdict != inference.NotStarted {
		// Tools may have run. Nothing here may be repeated, by us or by an SDK;
		// a 429 or 503 is the engine's word that it did not begin.
		if a.Verdict == inference.Ended {
			return r.exhausted()
		}
		return r.fail(errToolEffects())
	}
	if r.poison(a.Verdict, e) {
		return r.fail(inference.Errorf(inference.PoisonRequest, "two engines crashed while this request was the only one they served"))
	}
	if r.Charged() >= policy.MaxAttempts || r.errorsSpent(a.Verdict) {
		return r.exhausted()
	}
	return nil
}

func (r *Request) askRetry(a *Attempt) []Effect {
	r.asked = true
	return []Effect{AskRetry{After: a.Verdict}}
}

// poison counts crashes that only this request can have caused.
func (r *Request) poison(v inference.Verdict, e Evidence) bool {
	if v == inference.Dead && e.Crash && e.Alone {
		r.crashes++
	}
	return r.crashes >= 2
}

// errorsSpent reports whether engine errors used up their single retry: an
// answer that two engines both got wrong is likely wrong on all of them.
func (r *Request) errorsSpent(v inference.Verdict) bool {
	if v == inference.EngineError {
		r.errors++
	}
	return v == inference.EngineError && r.errors > 1
}

func (r *Request) retryAnswer(e RetryAnswer) []Effect {
	if !r.asked {
		return nil
	}
	r.asked = false
	if e.Err == nil {
		r.waiting = true
		return []Effect{Requeue{
			Exclude:        slices.Clone(r.excluded),
			PreferRevision: r.current().Revision,
		}}
	}
	if e.Err.Code == inference.NoEndpoints {
		return r.exhausted()
	}
	return r.fail(e.Err)
}

// exhausted ends a request whose attempts all failed before the first delta.
// An engine's own 429 or 503 says more than a 502 of ours.
func (r *Request) exhausted() []Effect {
	a := r.current()
	if a.Verdict == inference.Ended && r.passable {
		return r.finish(inference.Failed, "", PassThrough{N: a.N})
	}
	return r.fail(inference.Errorf(inference.UpstreamFailed, "no engine produced an answer (attempts: %d, last: %s)", len(r.attempts), a.Verdict))
}

// fail answers with an error of ours. A request whose tools may have run never
// sees a status that SDKs resend by themselves.
func (r *Request) fail(err *inference.Error) []Effect {
	if r.toolsMayHaveRun() && (err.Code.Info().Retryable || err.HTTPStatus() >= 500) {
		safe := errToolEffects()
		safe.Err = err
		err = safe
	}
	return r.finish(inference.Failed, err.Code, Respond{err})
}

// toolsMayHaveRun: an engine that calls tools by itself had the request, and
// nothing but an Idempotency-Key would keep a repeat from running them again.
func (r *Request) toolsMayHaveRun() bool {
	a := r.current()
	return r.spec.Policy.ExecutesTools && !r.spec.Keyed && a != nil &&
		a.Verdict != inference.NotStarted && a.Verdict != inference.Ended
}

// interrupt ends an answer of which the client has a part.
func (r *Request) interrupt(err *inference.Error) []Effect {
	if r.streaming {
		return r.finish(inference.Interrupted, err.Code, EndStream{err})
	}
	return r.finish(inference.Interrupted, err.Code, Abort{})
}

func (r *Request) broken(now time.Time, reason string) []Effect {
	return r.stop(now, &inference.Error{
		Code: inference.Internal, Message: "internal error", Err: fmt.Errorf("broken invariant: %s", reason),
	})
}

// stop ends the request from outside, wherever it is.
func (r *Request) stop(now time.Time, err *inference.Error) []Effect {
	a := r.current()
	var effects []Effect
	if a != nil && a.open() {
		a.State, a.EndedAt = Fencing, now
		effects = r.revoke(a, r.fence(a, nil))
	}
	switch {
	case r.firstDelta && err.Code != inference.Internal:
		cut := interruption(Evidence{}, inference.NoVerdict)
		cut.Err = err
		return append(effects, r.interrupt(cut)...)
	case r.firstDelta:
		return append(effects, r.interrupt(err)...)
	case a == nil:
		return r.finish(r.undispatched(), err.Code, Respond{err})
	}
	return append(effects, r.fail(err)...)
}

func (r *Request) finish(outcome inference.Outcome, code inference.Code, last ...Effect) []Effect {
	r.phase, r.outcome, r.code = inference.Terminal, outcome, code
	return append(last, Finish{Outcome: outcome, Code: code, Fencing: r.fencing()})
}

func (r *Request) current() *Attempt {
	if len(r.attempts) == 0 {
		return nil
	}
	return &r.attempts[len(r.attempts)-1]
}

// live is the current attempt if it is number n and has not failed or ended.
func (r *Request) live(n int) *Attempt {
	if a := r.current(); a != nil && a.N == n && a.open() {
		return a
	}
	return nil
}

func (a *Attempt) open() bool { return a.State == Dispatched || a.State == Publishing }

func errNotFenced() *inference.Error {
	return inference.Errorf(inference.SourceNotFenced, "the engine that took the request may still be working on it, and nothing proves that it stopped")
}

func errToolEffects() *inference.Error {
	return inference.Errorf(inference.ToolEffectsUnknown, "the request failed after it may have run tools; sending it again could run them twice")
}

// resentBySDKs: the statuses below 500, other than 429, that common SDKs send
// again by themselves.
func resentBySDKs(status int) bool { return status == 408 || status == 409 }
