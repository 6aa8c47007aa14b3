// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/openai"
	"github.com/headgate/headgate/internal/journal"
)

// requestsPath leads to the records of requests.
const requestsPath = "/v1/requests/"

// journalTime bounds how long a request waits for the journal's disk.
const journalTime = 10 * time.Second

// open enters a request in the journal and makes its flight. It is nil, without
// an error, where an Idempotency-Key's stored answer was sent instead.
func (g *Gateway) open(a *admission) (*flight, *inference.Error) {
	ctx, cancel := context.WithTimeout(a.ex.Gone(), journalTime)
	defer cancel()
	head := a.ex.Head()
	arrival := &journal.Arrival{
		ClientRequestID: clip(head.Header.Get("X-Request-Id"), 128),
		Tenant:          a.who.Tenant,
		Model:           a.req.Model,
		TargetModel:     a.found.Model,
		Pool:            a.pool.name,
		Objective:       a.treatment.objective,
		MaxAttempts:     a.pool.policy.MaxAttempts,
		PromptTokens:    a.req.PromptTokens.N,
		ExecutesTools:   a.pool.policy.ExecutesTools,
	}
	key := head.Header.Get("Idempotency-Key")
	if key == "" {
		if err := g.journal.Receive(ctx, journal.Event{Request: a.id, Arrival: arrival}); err != nil {
			return nil, journalError(err)
		}
		return g.newFlight(a, false, nil), nil
	}
	decision, err := g.journal.Begin(ctx, journal.Claim{Request: a.id, Key: key, Digest: journal.Digest(a.body), Arrival: arrival})
	if err != nil {
		return nil, journalError(err)
	}
	if decision.State != journal.KeyReused {
		a.id = decision.Record.RequestID
	}
	switch decision.State {
	case journal.KeyNew:
		return g.newFlight(a, true, nil), nil
	case journal.KeyReopened:
		// Its pool too is the one of the first time.
		if p := g.state.Load().pools[decision.Record.Pool]; p != nil {
			a.pool = p
		}
		return g.newFlight(a, true, decision.Record), nil
	case journal.KeyReplay:
		g.replay(a.ex, decision)
		return nil, nil
	case journal.KeyInterrupted:
		g.repeatInterruption(a, decision)
		return nil, nil
	}
	return nil, decision.Error()
}

// repeatInterruption answers with the error that ended the request, and how much
// of its answer had been delivered then.
func (g *Gateway) repeatInterruption(a *admission, d journal.Decision) {
	g.record.Request("", "", inference.Rejected, d.Error().Code)
	writeErrorDetail(a.ex, a.d, d.Error(), dialect.ErrorDetail{
		RequestID: a.id, Partial: d.Record.FirstDeltaSent, Tokens: d.Record.DeliveredOutputTokens,
	})
}

// journalError is what a client is told when the journal can't keep a promise.
func journalError(err error) *inference.Error {
	if e, ok := errors.AsType[*inference.Error](err); ok {
		return e
	}
	return &inference.Error{Code: inference.JournalUnavailable, Message: "the journal can't be written, and this request needs it", Err: err}
}

// clip shortens a client's words, at a character's border.
func clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// replay sends a stored answer again, byte for byte.
func (g *Gateway) replay(ex Exchange, d journal.Decision) {
	h := d.Answer.Header.Clone()
	h.Set("Content-Length", strconv.Itoa(len(d.Answer.Body)))
	h.Set("Idempotent-Replayed", "true")
	identify(h, d.Record.RequestID)
	ex.WriteHead(d.Answer.Status, h)
	_, _ = ex.Write(d.Answer.Body)
}

// serveRecord answers what the journal knows of one of the caller's requests.
func (g *Gateway) serveRecord(ex Exchange, id inference.RequestID) {
	head := ex.Head()
	who, refusal := g.state.Load().keys.Authenticate(head.Header)
	if refusal != nil {
		g.refuse(ex, id, openai.Chat, refusal)
		return
	}
	ctx, cancel := context.WithTimeout(ex.Gone(), journalTime)
	defer cancel()
	record, err := g.journal.Get(ctx, inference.RequestID(strings.TrimPrefix(head.Path, requestsPath)))
	switch {
	case errors.Is(err, journal.ErrNotFound), err == nil && record.Tenant != who.Tenant:
		// Another tenant's request is not there, rather than forbidden.
		g.refuse(ex, id, openai.Chat, inference.Errorf(inference.NotFound, "no such request"))
	case err != nil:
		g.refuse(ex, id, openai.Chat, journalError(err))
	default:
		writeJSON(ex, id, record)
	}
}

// note enters an event of the flight. The journal counts what it can't take.
func (f *flight) note(e journal.Event) {
	e.Request = f.id
	_ = f.g.journal.Append(e)
}

// noteDispatch enters an attempt before anything of it is sent, and that of a
// request with a key on disk. Else its repeat after a crash would run beside an
// attempt that nobody knows of, and under its number.
func (f *flight) noteDispatch(n int) attempt.Event {
	ctx, cancel := context.WithTimeout(f.ctx, journalTime)
	defer cancel()
	a, _ := f.machine.Attempt(n)
	e := journal.Event{
		Request: f.id, Attempt: n, Endpoint: a.Endpoint, Revision: a.Revision, Fence: a.Fence, Resent: a.Resent,
	}
	if l := f.leased; l != nil {
		e.Guard, e.Engine, e.LeaseTTL = l.grant.Guard.String(), l.line.Status().Engine.Incarnation, l.line.Terms().TTL
	}
	err := f.g.journal.Dispatch(ctx, e, f.keyed)
	switch {
	case err == nil:
		return nil
	case errors.Is(context.Cause(f.ctx), errDraining):
		return stopped()
	case f.ctx.Err() != nil:
		return attempt.ClientGone{}
	}
	return attempt.Stopped{Err: journalError(err)}
}

// noteFailure enters how an attempt ended that is not the answer.
func (f *flight) noteFailure(n int) {
	a, _ := f.machine.Attempt(n)
	f.note(journal.Event{Kind: journal.Fencing, Attempt: n, Verdict: a.Verdict})
	switch a.State {
	case attempt.Fenced:
		f.fenced = n
		f.note(journal.Event{Kind: journal.Fenced, Attempt: n, Verdict: a.Verdict, Proof: a.Proof})
	case attempt.Ended:
		f.note(journal.Event{Kind: journal.Ended, Attempt: n, Verdict: a.Verdict})
	}
}

// noteFirstDelta enters the bit before anything is written, and on disk where
// the record's word is a promise.
func (f *flight) noteFirstDelta(n int) attempt.Event {
	ctx, cancel := context.WithTimeout(f.ctx, journalTime)
	defer cancel()
	event := journal.Event{Request: f.id, Attempt: n}
	var err error
	if a := f.wholeAnswer(); a != nil {
		// One wait for both: what is queued first is on disk first.
		event.Kind = journal.FirstDelta
		_ = f.g.journal.Append(event)
		err = f.keep(ctx, a)
	} else {
		err = f.g.journal.FirstDelta(ctx, event, f.keyed)
	}
	switch {
	case err == nil:
		return nil
	case f.ctx.Err() != nil && !errors.Is(context.Cause(f.ctx), errDraining):
		return attempt.ClientGone{}
	}
	f.g.log.Error("first delta is not in the journal; nothing is written", "request", f.id, "error", err)
	return attempt.CommitLost{N: n}
}

// wholeAnswer is the answer of a request with a key that is whole before
// anything of it was written, nil for any other.
func (f *flight) wholeAnswer() *journal.Answer {
	t := f.try
	if f.tape == nil || t.mode != whole && (t.stream == nil || !t.stream.Done()) {
		return nil
	}
	f.tape.over = true
	kept := &journal.Answer{Status: t.answer.status, Header: journal.KeepHeader(t.answer.header), Body: t.held}
	if t.mode == whole {
		kept.Body = bytes.Join(t.answer.segments, nil)
	}
	return kept
}

// keepStream stores the answer of a request with a key before its last bytes
// are written: a client that has the whole of it must get the same again.
func (f *flight) keepStream(last []byte) {
	if f.tape == nil || f.tape.over {
		return
	}
	_, _ = f.tape.tape.Write(last)
	ctx, cancel := context.WithTimeout(f.ctx, journalTime)
	defer cancel()
	if err := f.keep(ctx, f.tape.answer()); err != nil {
		// The client has all but the end of it; a repeat will be told that the
		// answer was interrupted, which is the lesser evil.
		f.g.log.Error("answer not stored for repeats", "request", f.id, "error", err)
	}
	f.tape.over = true
}

func (f *flight) keep(ctx context.Context, a *journal.Answer) error {
	return f.g.journal.KeepAnswer(ctx, journal.Event{Request: f.id, Attempt: f.try.n}, a)
}

// noteOutcome enters the outcome.
func (f *flight) noteOutcome(e attempt.Finish) {
	sent := f.gate.Counters()
	event := journal.Event{
		Request: f.id, Outcome: e.Outcome, Code: e.Code, Error: f.err, MarkerAdded: f.ended,
		Tokens: sent.Tokens, Events: sent.Events, Estimated: true,
	}
	if usage, ok := f.usage(); ok {
		event.PromptTokens, event.CachedTokens = max(usage.Prompt, 0), max(usage.Cached, 0)
		if e.Outcome == inference.Completed && usage.Completion >= 0 {
			event.Tokens, event.Estimated = usage.Completion, false
		}
	}
	_ = f.g.journal.Finish(event, f.keyed, nil)
}

// usage is what the engine of the last attempt reported.
func (f *flight) usage() (inference.Usage, bool) {
	switch {
	case f.try == nil:
		return inference.Usage{}, false
	case f.try.stream != nil:
		return f.try.stream.Usage()
	}
	return f.try.usage, f.try.hasUsage
}

// taped is an Exchange that keeps what is written to it.
type taped struct {
	Exchange
	tape   journal.Tape
	over   bool // nothing more is kept
	status int
	header http.Header
}

func (t *taped) WriteHead(status int, header http.Header) {
	t.status, t.header = status, header
	t.Exchange.WriteHead(status, header)
}

func (t *taped) Write(p []byte) (int, error) {
	n, err := t.Exchange.Write(p)
	if !t.over {
		_, _ = t.tape.Write(p[:n]) // never fails
	}
	return n, err
}

func (t *taped) answer() *journal.Answer { return t.tape.Answer(t.status, t.header) }
