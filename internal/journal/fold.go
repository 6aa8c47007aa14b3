// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"fmt"

	"github.com/headgate/headgate/inference"
)

// errLate says that the request has its outcome already.
var errLate = errors.New("the request has its outcome")

// begin makes the record that a Received event describes.
func begin(e *Event) *Record {
	a := e.Arrival
	if a == nil {
		a = &Arrival{}
	}
	limit := max(a.MaxAttempts, 1)
	return &Record{
		RequestID: e.Request, ClientRequestID: Text(a.ClientRequestID), Tenant: a.Tenant,
		Model: a.Model, TargetModel: a.TargetModel, Pool: a.Pool, Objective: Text(a.Objective),
		Phase: inference.Received.String(), MaxAttempts: limit, RetryBudget: limit, PromptTokens: a.PromptTokens,
		Keyed: a.Keyed, ExecutesTools: a.ExecutesTools, Attempts: []Attempt{},
		CreatedAt: e.At, UpdatedAt: e.At, LastEvent: e.Seq,
	}
}

// apply folds one event into the record. On an error the record is as it was.
// After the outcome nothing changes but what is known of an attempt's silence.
func (r *Record) apply(e *Event) error {
	if e.Seq != 0 && e.Seq <= r.LastEvent {
		return nil
	}
	if r.Terminal() && e.Kind != Fenced && e.Kind != Reopened {
		return errLate
	}
	if err := r.change(e); err != nil {
		return err
	}
	r.LastEvent = max(r.LastEvent, e.Seq)
	r.UpdatedAt = e.At
	return nil
}

func (r *Record) change(e *Event) error {
	switch e.Kind {
	case Received:
		return errors.New("the request was received already")
	case Queued:
		if r.Phase == inference.Received.String() {
			r.Phase = inference.Queued.String()
		}
	case Dispatched:
		return r.dispatch(e)
	case HeadersSent:
		r.HeadersSent = true
	case FirstDelta:
		return r.publish(e)
	case Answered: // the answer beside the event is what counts
	case Fencing:
		a := r.attempt(e)
		a.State, a.Verdict, a.EndedAt = stateFencing, Text(e.Verdict.String()), e.At
	case Fenced:
		a := r.attempt(e)
		a.State, a.FenceProof = stateFenced, Text(e.Proof.String())
		r.close(a, e)
	case Ended:
		a := r.attempt(e)
		a.State = stateEnded
		if e.Proof != inference.NoProof {
			a.FenceProof = Text(e.Proof.String())
		}
		r.close(a, e)
		r.count(e)
	case Finished:
		r.finish(e)
	case Reopened:
		return r.reopen()
	default:
		return fmt.Errorf("unknown kind %d", e.Kind)
	}
	return nil
}

// close notes how an attempt ended, unless that is known.
func (r *Record) close(a *Attempt, e *Event) {
	if e.Verdict != inference.NoVerdict {
		a.Verdict = Text(e.Verdict.String())
	}
	if a.EndedAt == 0 {
		a.EndedAt = e.At
	}
}

func (r *Record) dispatch(e *Event) error {
	if r.FirstDeltaSent {
		return fmt.Errorf("attempt %d dispatched after the first delta (I2)", e.Attempt)
	}
	*r.attempt(e) = Attempt{
		Attempt: e.Attempt, State: stateDispatched, Endpoint: e.Endpoint, FenceLevel: e.Fence.String(),
		GuardIncarnation: Text(e.Guard), EngineIncarnation: Text(e.Engine), LeaseEpoch: e.Attempt, LeaseTTL: e.LeaseTTL,
		ModelRevision: Text(e.Revision), Seed: e.Seed, Resent: e.Resent, DispatchedAt: e.At,
	}
	r.Phase = inference.Prefill.String()
	r.Attempt = max(r.Attempt, e.Attempt)
	r.RetryBudget = max(r.MaxAttempts-r.Charged(), 0)
	return nil
}

func (r *Record) publish(e *Event) error {
	if r.FirstDeltaSent {
		return fmt.Errorf("attempt %d publishes after a first delta (I1)", e.Attempt)
	}
	a := r.attempt(e)
	a.State, a.FirstOutputAt = statePublishing, e.At
	r.FirstDeltaSent, r.HeadersSent = true, true
	r.Phase = inference.Decode.String()
	r.ModelRevision = a.ModelRevision
	r.count(e)
	return nil
}

func (r *Record) finish(e *Event) {
	r.count(e)
	r.Phase, r.Outcome, r.Code = inference.Terminal.String(), Text(e.Outcome.String()), Text(e.Code)
	if e.Error == nil {
		return
	}
	if r.Code == "" {
		r.Code = Text(e.Error.Code)
	}
	info := e.Error.Code.Info()
	r.Error = &Failure{
		Code: e.Error.Code, Type: info.Type, Message: e.Error.Message,
		Partial: r.FirstDeltaSent, Tokens: r.DeliveredOutputTokens,
		Retryable: info.Retryable && !r.FirstDeltaSent,
	}
}

func (r *Record) reopen() error {
	if r.FirstDeltaSent {
		return errors.New("a request with a delta sent is not opened again (I2)")
	}
	r.Outcome, r.Code, r.Error = "", "", nil
	r.Phase = inference.Prefill.String()
	if len(r.Attempts) == 0 {
		r.Phase = inference.Received.String()
	}
	return nil
}

func (r *Record) count(e *Event) {
	if e.Tokens != 0 {
		r.DeliveredOutputTokens, r.TokensEstimated = e.Tokens, e.Estimated
	}
	if e.Events != 0 {
		r.DeliveredEvents = e.Events
	}
	if e.PromptTokens != 0 {
		r.PromptTokens = e.PromptTokens
	}
	if e.CachedTokens != 0 {
		r.CachedTokens = e.CachedTokens
	}
	if e.MarkerAdded {
		r.EndMarker = "added"
	}
}

// attempt finds the attempt of an event. One whose dispatch was dropped from a
// full queue is made up from what is known.
func (r *Record) attempt(e *Event) *Attempt {
	for i := range r.Attempts {
		if r.Attempts[i].Attempt == e.Attempt {
			return &r.Attempts[i]
		}
	}
	r.Attempts = append(r.Attempts, Attempt{Attempt: e.Attempt, State: stateDispatched, FenceLevel: e.Fence.String(), LeaseEpoch: e.Attempt})
	r.Attempt = max(r.Attempt, e.Attempt)
	return r.last()
}
