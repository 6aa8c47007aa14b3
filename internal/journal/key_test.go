// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"bytes"
	"net/http"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headgate/headgate/inference"
)

// TestKeyTable has a row for each row of the table in docs/failover.md.
func TestKeyTable(t *testing.T) {
	const now = Time(1000)
	body, other := Digest([]byte("a")), Digest([]byte("b"))
	rec := func(change func(*Record)) *Record {
		r := &Record{RequestID: "r", MaxAttempts: 2, Keyed: true, FirstDeltaDurable: true,
			Attempts: []Attempt{{Attempt: 1, State: stateFenced, FenceLevel: "transport", Verdict: "closed"}}}
		change(r)
		return r
	}
	end := func(o inference.Outcome) func(*Record) { return func(r *Record) { r.Outcome = Text(o.String()) } }
	for _, c := range []struct {
		name   string
		record *Record
		digest Hash
		answer *Answer
		until  Time // of the binding
		want   KeyState
		code   inference.Code
	}{
		{name: "record swept", want: KeyNew},
		{name: "in flight", record: rec(func(*Record) {}), want: KeyInProgress, code: inference.RequestInProgress},
		{name: "in flight past its ttl", record: rec(func(*Record) {}), until: now, want: KeyInProgress, code: inference.RequestInProgress},
		{name: "in flight, other body", record: rec(func(*Record) {}), digest: other, want: KeyReused, code: inference.KeyReused},
		{name: "completed", record: rec(end(inference.Completed)), answer: &Answer{}, want: KeyReplay},
		{name: "completed, not stored", record: rec(end(inference.Completed)), want: KeyUnstored, code: inference.KeyUnavailable},
		{name: "completed, other body", record: rec(end(inference.Completed)), answer: &Answer{}, digest: other, want: KeyReused, code: inference.KeyReused},
		{name: "completed, expired", record: rec(end(inference.Completed)), answer: &Answer{}, until: now, want: KeyNew},
		{name: "interrupted", record: rec(func(r *Record) { end(inference.Interrupted)(r); r.FirstDeltaSent = true }), want: KeyInterrupted, code: inference.DecodeInterrupted},
		{name: "cancelled after a delta", record: rec(func(r *Record) { end(inference.Cancelled)(r); r.FirstDeltaSent = true }), want: KeyInterrupted, code: inference.DecodeInterrupted},
		{name: "failed", record: rec(end(inference.Failed)), want: KeyReopened},
		{name: "cancelled before a delta", record: rec(end(inference.Cancelled)), want: KeyReopened},
		{name: "failed, not fenced", record: rec(func(r *Record) {
			end(inference.Failed)(r)
			r.Attempts[0].State, r.Attempts[0].FenceLevel = stateFencing, "lease"
		}), want: KeyInProgress, code: inference.RequestInProgress},
		{name: "rejected", record: rec(func(r *Record) { end(inference.Rejected)(r); r.Attempts = nil }), want: KeyNew},
		{name: "rejected, other body", record: rec(func(r *Record) { end(inference.Rejected)(r); r.Attempts = nil }), digest: other, want: KeyNew},
		{name: "opened again, then rejected", record: rec(end(inference.Rejected)), want: KeyReopened},
		{name: "attempts exhausted", record: rec(func(r *Record) { end(inference.Failed)(r); r.MaxAttempts = 1 }), want: KeyExhausted, code: inference.AttemptsExhausted},
		{name: "free resend is not charged", record: rec(func(r *Record) {
			end(inference.Failed)(r)
			r.Attempts = append(r.Attempts, Attempt{Attempt: 2, Resent: true, State: stateFenced})
		}), want: KeyReopened},
		{name: "tools may have run", record: rec(func(r *Record) { end(inference.Failed)(r); r.ExecutesTools = true }), want: KeyEffectsUnknown, code: inference.ToolEffectsUnknown},
		{name: "tools, engine refused", record: rec(func(r *Record) {
			end(inference.Failed)(r)
			r.ExecutesTools, r.Attempts[0].Verdict = true, "ended"
		}), want: KeyReopened},
		{name: "owner's time ran out", record: rec(func(r *Record) { r.OwnerUntil = now }), want: KeyReopened},
		{name: "owner's time ran out after a delta", record: rec(func(r *Record) { r.OwnerUntil, r.FirstDeltaSent = now, true }), want: KeyInterrupted, code: inference.DecodeInterrupted},
		{name: "owner's time ran out, nothing promised", record: rec(func(r *Record) { r.OwnerUntil, r.FirstDeltaDurable = now, false }), want: KeyInterrupted, code: inference.DecodeInterrupted},
		{name: "owner has time", record: rec(func(r *Record) { r.OwnerUntil = now + 1 }), want: KeyInProgress, code: inference.RequestInProgress},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := found{binding: &Binding{Request: "r", Digest: body, Expires: now + 1}, record: c.record, answer: c.answer}
			if c.until != 0 {
				f.binding.Expires = c.until
			}
			digest := c.digest
			if digest == (Hash{}) {
				digest = body
			}
			got := decide(f, digest, now)
			if got != c.want {
				t.Fatalf("got %s, want %s", got, c.want)
			}
			err := Decision{State: got, Record: c.record}.Error()
			if (err == nil) != (c.code == "") || err != nil && err.Code != c.code {
				t.Fatalf("error %v, want code %q", err, c.code)
			}
			if err != nil && err.HTTPStatus() != 400 && got != KeyInProgress {
				t.Errorf("status %d is one that SDKs send again", err.HTTPStatus())
			}
		})
	}
	if got := decide(found{}, body, now); got != KeyNew {
		t.Errorf("unknown key: %s", got)
	}
}

func TestKeysAreScopedToTheirTenant(t *testing.T) {
	a := claim("r", "k", "")
	b := claim("r", "k", "")
	b.Arrival = &Arrival{Tenant: "t2"}
	c := claim("r", "2k", "") // tenant t, key 2k: the same bytes in a row as tenant t2, key k
	if a.hash() == b.hash() || b.hash() == c.hash() {
		t.Error("two keys of two tenants are one")
	}
}

// TestReplayIsTheSameBytes, over the whole life of the stored answer.
func TestReplayIsTheSameBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := open(t, NewMemory(0))
		d, err := j.Begin(t.Context(), claim("r", "k", "b"))
		must(t, err)
		if d.State != KeyNew || !d.Record.Keyed {
			t.Fatalf("%s", d.State)
		}
		tape := &Tape{Max: j.AnswerMax()}
		stream := []byte("data: {\"x\":1}\n\ndata: [DONE]\n\n")
		for part := range slices.Chunk(stream, 3) {
			_, _ = tape.Write(part)
		}
		must(t, j.FirstDelta(t.Context(), Event{Request: "r", Attempt: 1}, true))
		must(t, j.Finish(Event{Request: "r", Outcome: inference.Completed}, true, tape.Answer(200, http.Header{
			"Content-Type": {"text/event-stream"}, "Set-Cookie": {"secret"}, "Authorization": {"secret"}})))
		for range 2 {
			d, err = j.Begin(t.Context(), claim("r2", "k", "b"))
			if err != nil || d.State != KeyReplay || d.Record.RequestID != "r" || !bytes.Equal(d.Answer.Body, stream) ||
				d.Answer.Status != 200 || len(d.Answer.Header) != 1 || d.Answer.Header.Get("Content-Type") != "text/event-stream" {
				t.Fatalf("replay: %s %+v %v", d.State, d.Answer, err)
			}
		}
		time.Sleep(time.Hour + sweepEvery)
		d, err = j.Begin(t.Context(), claim("r3", "k", "another body"))
		if err != nil || d.State != KeyNew || d.Record.RequestID != "r3" {
			t.Errorf("after the ttl: %s %v", d.State, err)
		}
		shut(t, j)
	})
}

func TestAnswerThatIsTooLargeIsNotStored(t *testing.T) {
	j := open(t, NewMemory(0))
	defer shut(t, j)
	_, err := j.Begin(t.Context(), claim("r", "k", "b"))
	must(t, err)
	tape := &Tape{Max: j.AnswerMax()}
	_, _ = tape.Write(make([]byte, 60))
	_, _ = tape.Write(make([]byte, 60))
	must(t, j.Finish(Event{Request: "r", Outcome: inference.Completed}, true, tape.Answer(200, nil)))
	d, err := j.Begin(t.Context(), claim("r2", "k", "b"))
	if err != nil || d.State != KeyUnstored || d.Error().Code != inference.KeyUnavailable {
		t.Errorf("%s %v", d.State, err)
	}
}

// TestRejectedKeyIsFree, with another body too.
func TestRejectedKeyIsFree(t *testing.T) {
	j := open(t, NewMemory(0))
	defer shut(t, j)
	_, err := j.Begin(t.Context(), claim("r", "k", "b"))
	must(t, err)
	must(t, j.Finish(Event{Request: "r", Outcome: inference.Rejected, Code: inference.QueueFull}, true, nil))
	d, err := j.Begin(t.Context(), claim("r2", "k", "other"))
	if err != nil || d.State != KeyNew || d.Record.RequestID != "r2" {
		t.Errorf("%s %v", d.State, err)
	}
}

// TestReopenedRequestKeepsItsHistory and its bound on attempts.
func TestReopenedRequestKeepsItsHistory(t *testing.T) {
	j := open(t, NewMemory(0))
	defer shut(t, j)
	_, err := j.Begin(t.Context(), claim("r", "k", "b"))
	must(t, err)
	for n := 1; n <= 2; n++ {
		must(t, j.Append(Event{Request: "r", Kind: Dispatched, Attempt: n}))
		must(t, j.Append(Event{Request: "r", Kind: Fenced, Attempt: n, Verdict: inference.Closed, Proof: inference.ProofTransport}))
		must(t, j.Finish(Event{Request: "r", Outcome: inference.Failed, Code: inference.UpstreamFailed}, true, nil))
		d, err := j.Begin(t.Context(), claim("r2", "k", "b"))
		must(t, err)
		switch {
		case n == 1 && (d.State != KeyReopened || d.Record.RequestID != "r" || d.Record.Attempt != 1 || d.Record.Terminal() || d.Record.RetryBudget != 1):
			t.Fatalf("after one: %s %+v", d.State, d.Record)
		case n == 2 && d.State != KeyExhausted:
			t.Fatalf("after two: %s", d.State)
		}
	}
}
