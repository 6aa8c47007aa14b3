// SPDX-License-Identifier: Apache-2.0

package attempt

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headgate/headgate/inference"
)

// TestInvariants feeds random events, sensible or not, to a request and checks
// what must hold of its effects whatever came in: I1 to I4 and I7 of
// docs/failover.md, and the rule on statuses where tools may have run.
func TestInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		spec := Spec{ID: "req_test", Keyed: rapid.Bool().Draw(t, "keyed"), Policy: Policy{
			MaxAttempts:         rapid.IntRange(0, 4).Draw(t, "max_attempts"),
			AllowTransportFence: rapid.Bool().Draw(t, "transport_fence"),
			ExecutesTools:       rapid.Bool().Draw(t, "tools"),
		}}
		r := NewRequest(spec)
		w := watcher{t: t, spec: spec}
		for range rapid.IntRange(1, 30).Draw(t, "events") {
			event := drawEvent(t, len(r.attempts))
			w.see(event, r.Step(time.Unix(0, 0), event))
			if r.FirstDeltaSent() != (w.committed != 0) {
				t.Fatalf("first_delta_sent is %v, committed attempt is %d", r.FirstDeltaSent(), w.committed)
			}
		}
		w.settle(r)
	})
}

func drawEvent(t *rapid.T, attempts int) Event {
	n := rapid.IntRange(max(0, attempts-1), attempts+1).Draw(t, "n")
	if rapid.IntRange(0, 3).Draw(t, "current") > 0 {
		n = attempts
	}
	yes := func(label string) bool { return rapid.Bool().Draw(t, label) }
	endpoint := rapid.SampledFrom([]inference.EndpointID{"a", "b", "c", "d"}).Draw(t, "endpoint")
	switch rapid.IntRange(0, 14).Draw(t, "event") {
	case 0:
		return Queued{}
	case 13:
		return CancelAck{N: n}
	case 14:
		return LeaseExpired{N: n}
	case 1, 2:
		return Placed{Endpoint: endpoint, Fence: rapid.SampledFrom([]inference.FenceLevel{inference.FenceTransport, inference.FenceLease}).Draw(t, "fence")}
	case 3:
		return Unplaced{inference.Errorf(rapid.SampledFrom(inference.Codes()).Draw(t, "code"), "x")}
	case 4:
		return FirstOutput{N: n, Stream: yes("stream")}
	case 5:
		return Answered{N: n, Stream: yes("stream"), MarkerMissing: yes("missing")}
	case 6:
		return Delivered{N: n}
	case 7:
		if yes("lost") {
			return CommitLost{N: n}
		}
		return WriteFailed{N: n}
	case 8:
		if yes("gone") {
			return ClientGone{}
		}
		if yes("stopped") {
			return Stopped{inference.Errorf(inference.ShuttingDown, "x")}
		}
		return Broken{"drawn"}
	case 9, 10:
		if yes("denied") {
			return RetryAnswer{inference.Errorf(inference.RetryBudgetExhausted, "x")}
		}
		return RetryAnswer{}
	}
	return Evidence{
		N: n, Kind: Kind(rapid.IntRange(0, int(kinds)+1).Draw(t, "kind")),
		Status:   rapid.SampledFrom([]int{0, 302, 400, 404, 408, 409, 422, 429, 500, 502, 503, 504, 599}).Draw(t, "status"),
		Passable: yes("passable"), Stamped: yes("stamped"), Crash: yes("crash"), Alone: yes("alone"),
	}
}

// watcher knows only events and effects, nothing of the machine's own fields.
type watcher struct {
	t    *rapid.T
	spec Spec

	dispatched int
	fenced     int // highest attempt whose gate was closed and connection ended, in that order
	closed     int
	committed  int
	completing int
	delivered  bool
	evidence   map[int]Evidence
	finished   bool

	fence   map[int]inference.FenceLevel
	revoked int // highest attempt that was revoked
	proved  map[int]bool
	again   map[int]bool
	pending bool // finished, with an attempt that a guard is still to prove silent
}

func (w *watcher) see(event Event, effects []Effect) {
	if w.finished && len(effects) > 0 {
		if _, ok := effects[0].(Silent); !ok || !w.pending || len(effects) > 1 {
			w.t.Fatalf("effects after the terminal outcome: %v", effects)
		}
	}
	switch e := event.(type) {
	case Placed:
		if w.fence == nil {
			w.fence, w.proved, w.again = map[int]inference.FenceLevel{}, map[int]bool{}, map[int]bool{}
		}
		w.fence[w.dispatched+1] = e.Fence
	case CancelAck:
		w.prove(e.N)
	case LeaseExpired:
		w.prove(e.N)
	case Delivered:
		w.delivered = w.completing != 0 && e.N == w.completing
	case Evidence:
		if w.evidence == nil {
			w.evidence = map[int]Evidence{}
		}
		if e.N == w.dispatched && (e.Kind == EngineExited || e.Kind == ContainerTerminated || e.Kind == NewIncarnation || e.Kind == GuardReplaced ||
			e.Kind == Answer && e.Stamped || !w.again[e.N] && notStarted[e.Kind]) {
			w.prove(e.N)
		}
		if _, seen := w.evidence[e.N]; !seen && e.N == w.dispatched {
			w.evidence[e.N] = e
		}
	}
	for _, effect := range effects {
		w.check(effect)
	}
}

// notStarted is what says, of an attempt that was sent once, that it never began.
var notStarted = map[Kind]bool{
	ConnectRefused: true, NameGone: true, EndpointGone: true, TLSFailed: true, Unwritten: true,
	WrongIncarnation: true, LeaseOver: true, LeaseRequired: true,
}

func (w *watcher) prove(n int) {
	if n <= w.dispatched && w.proved != nil {
		w.proved[n] = true
	}
}

func (w *watcher) check(effect Effect) {
	if w.finished {
		if _, ok := effect.(Silent); !ok {
			w.t.Fatalf("%T after finish", effect)
		}
	}
	switch e := effect.(type) {
	case Resend:
		if w.fence[e.N] != inference.FenceLease || w.again[e.N] || w.committed != 0 || w.closed >= e.N {
			w.t.Fatalf("attempt %d sent again: lease %v, before %v, committed %d, closed %d", e.N, w.fence[e.N], w.again[e.N], w.committed, w.closed)
		}
		w.again[e.N] = true
		if w.evidence[e.N].Kind == StaleConnection {
			delete(w.evidence, e.N)
		}
	case Revoke:
		if w.fenced < e.N || w.fence[e.N] != inference.FenceLease {
			w.t.Fatalf("attempt %d revoked before its gate and connection were closed", e.N)
		}
		w.revoked = e.N
	case Silent:
		if !w.proved[e.N] || e.Proof == inference.NoProof {
			w.t.Fatalf("attempt %d called silent with proof %q", e.N, e.Proof)
		}
		w.pending = false
	case Dispatch:
		switch {
		case w.dispatched > 0 && w.fence[w.dispatched] == inference.FenceLease && !w.proved[w.dispatched]:
			w.t.Fatalf("I3: attempt %d dispatched, nothing proves attempt %d silent", e.N, w.dispatched)
		case w.committed != 0:
			w.t.Fatalf("I2: attempt %d dispatched after the first delta", e.N)
		case w.dispatched > w.fenced:
			w.t.Fatalf("I3: attempt %d dispatched before attempt %d was fenced", e.N, w.dispatched)
		case e.N != w.dispatched+1:
			w.t.Fatalf("attempt %d follows attempt %d", e.N, w.dispatched)
		case e.N > max(w.spec.Policy.MaxAttempts, 1)+1:
			w.t.Fatalf("I7: attempt %d of at most %d and one resend", e.N, w.spec.Policy.MaxAttempts)
		case w.spec.Policy.ExecutesTools && !e.Fresh:
			w.t.Fatalf("attempt %d may run tools and may meet a stale connection", e.N)
		}
		w.dispatched = e.N
	case CloseGate:
		w.closed = e.N
	case Cancel:
		if w.closed < e.N {
			w.t.Fatalf("attempt %d cancelled before its gate was closed", e.N)
		}
		w.fenced = e.N
	case Commit:
		if w.committed != 0 || e.N != w.dispatched || w.closed >= e.N {
			w.t.Fatalf("I1: attempt %d committed after %d (dispatched %d, closed %d)", e.N, w.committed, w.dispatched, w.closed)
		}
		w.committed = e.N
	case Complete:
		if e.N != w.committed {
			w.t.Fatalf("I1: attempt %d completes the answer of %d", e.N, w.committed)
		}
		w.completing = e.N
	case Respond:
		w.before(effect)
		w.harmless(e)
	case PassThrough:
		w.before(effect)
	case EndStream, Abort:
		if w.committed == 0 {
			w.t.Fatalf("%T with nothing committed", effect)
		}
	case Finish:
		w.finished, w.pending = true, e.Fencing
		if e.Fencing && w.revoked != w.dispatched {
			w.t.Fatalf("finished while fencing attempt %d: revoked %d", w.dispatched, w.revoked)
		}
		if (e.Outcome == inference.Completed) != w.delivered {
			w.t.Fatalf("I4: outcome %s, delivered %v", e.Outcome, w.delivered)
		}
	}
}

func (w *watcher) before(effect Effect) {
	if w.committed != 0 {
		w.t.Fatalf("%T after the first delta", effect)
	}
}

// harmless: no status that SDKs resend, where tools may have run.
func (w *watcher) harmless(e Respond) {
	if !w.spec.Policy.ExecutesTools || w.spec.Keyed || w.dispatched == 0 {
		return
	}
	if ev, ok := w.evidence[w.dispatched]; ok {
		switch ev.Kind {
		case ConnectRefused, NameGone, EndpointGone, TLSFailed, Unwritten, WrongIncarnation, LeaseOver, LeaseRequired:
			if !w.again[w.dispatched] {
				return
			}
		case Answer:
			if w.fence[w.dispatched] == inference.FenceLease && !ev.Stamped {
				break
			}
			if ev.Status == 429 || ev.Status == 503 || ev.Stamped && (ev.Status == 502 || ev.Status == 504) {
				return
			}
		}
	}
	if s := e.Err.HTTPStatus(); s == 408 || s == 409 || s == 429 || s >= 500 {
		w.t.Fatalf("status %d after tools may have run", s)
	}
}

// settle: when the client leaves, every request ends, its last attempt fenced.
func (w *watcher) settle(r *Request) {
	w.see(ClientGone{}, r.Step(time.Unix(0, 0), ClientGone{}))
	if !w.finished || r.Outcome() == inference.NoOutcome {
		w.t.Fatalf("the request did not end: %s", r.Phase())
	}
	if n := len(r.attempts); w.pending {
		w.see(LeaseExpired{N: n}, r.Step(time.Unix(0, 0), LeaseExpired{N: n}))
	}
	if !r.Settled() || w.pending {
		w.t.Fatalf("not settled after the last lease has expired")
	}
}

// TestClassifier has a row for each row of the table in docs/failover.md.
func TestClassifier(t *testing.T) {
	const text, tools, loose = 0, 1, 2
	policies := [...]Policy{text: {}, tools: {ExecutesTools: true}, loose: {AllowTransportFence: true}}
	rows := []struct {
		evidence Evidence
		verdict  inference.Verdict
		proofs   [3]inference.Proof // text, tools, text with allow_transport_fence
	}{
		{Evidence{Kind: ConnectRefused}, inference.NotStarted, all(inference.ProofNotStarted)},
		{Evidence{Kind: NameGone}, inference.NotStarted, all(inference.ProofNotStarted)},
		{Evidence{Kind: EndpointGone}, inference.NotStarted, all(inference.ProofNotStarted)},
		{Evidence{Kind: TLSFailed}, inference.NotStarted, all(inference.ProofNotStarted)},
		{Evidence{Kind: Unwritten}, inference.NotStarted, all(inference.ProofNotStarted)},
		{Evidence{Kind: EngineExited}, inference.Dead, all(inference.ProofDead)},
		{Evidence{Kind: ContainerTerminated}, inference.Dead, all(inference.ProofDead)},
		{Evidence{Kind: NewIncarnation}, inference.Dead, all(inference.ProofDead)},
		{Evidence{Kind: GuardReplaced}, inference.Dead, all(inference.ProofDead)},
		{Evidence{Kind: WrongIncarnation}, inference.NotStarted, all(inference.ProofNotStarted)},
		{Evidence{Kind: LeaseOver}, inference.NotStarted, all(inference.ProofNotStarted)},
		{Evidence{Kind: LeaseRequired}, inference.NotStarted, all(inference.ProofNotStarted)},
		{Evidence{Kind: DuplicateAttempt}, inference.Closed, textOnly},
		{Evidence{Kind: StaleEpoch}, inference.Uncertain, looseOnly},
		{Evidence{Kind: StaleGeneration}, inference.Uncertain, looseOnly},
		{Evidence{Kind: PeerClosed}, inference.Closed, textOnly},
		{Evidence{Kind: PeerReset}, inference.Closed, textOnly},
		{Evidence{Kind: StaleConnection}, inference.Closed, textOnly},
		{Evidence{Kind: ConnectTimeout}, inference.Uncertain, looseOnly},
		{Evidence{Kind: NoRoute}, inference.Uncertain, looseOnly},
		{Evidence{Kind: GuardLost}, inference.Uncertain, looseOnly},
		{Evidence{Kind: ProbesFail}, inference.Uncertain, looseOnly},
		{Evidence{Kind: EndpointRemoved}, inference.Uncertain, looseOnly},
		{Evidence{Kind: Unknown}, inference.Uncertain, looseOnly},
		{Evidence{Kind: kinds + 1}, inference.Uncertain, looseOnly},
		{Evidence{Kind: FirstOutputLimit}, inference.Overloaded, all(inference.NoProof)},
		{Evidence{Kind: IdleLimit}, inference.Overloaded, all(inference.NoProof)},
		{Evidence{Kind: TotalLimit}, inference.Overloaded, all(inference.NoProof)},
		{Evidence{Kind: Answer, Status: 302}, inference.Refused, all(inference.NoProof)},
		{Evidence{Kind: Answer, Status: 400}, inference.Refused, all(inference.NoProof)},
		{Evidence{Kind: Answer, Status: 404}, inference.Refused, all(inference.NoProof)},
		{Evidence{Kind: Answer, Status: 422}, inference.Refused, all(inference.NoProof)},
		{Evidence{Kind: Answer, Status: 429}, inference.Ended, all(inference.ProofEnded)},
		{Evidence{Kind: Answer, Status: 503}, inference.Ended, all(inference.ProofEnded)},
		{Evidence{Kind: Answer, Status: 502}, inference.Uncertain, looseOnly},
		{Evidence{Kind: Answer, Status: 504}, inference.Uncertain, looseOnly},
		{Evidence{Kind: Answer, Status: 502, Stamped: true}, inference.Ended, all(inference.ProofEnded)},
		{Evidence{Kind: Answer, Status: 504, Stamped: true}, inference.Ended, all(inference.ProofEnded)},
		{Evidence{Kind: Answer, Status: 500}, inference.EngineError, all(inference.ProofEnded)},
		{Evidence{Kind: Answer, Status: 501}, inference.EngineError, all(inference.ProofEnded)},
		{Evidence{Kind: ErrorEvent, Status: 400}, inference.Refused, all(inference.NoProof)},
		{Evidence{Kind: ErrorEvent, Status: 500}, inference.EngineError, all(inference.ProofEnded)},
		{Evidence{Kind: ErrorEvent}, inference.EngineError, all(inference.ProofEnded)},
		{Evidence{Kind: Garbage}, inference.EngineError, all(inference.ProofEnded)},
		{Evidence{Kind: Incomplete}, inference.EngineError, all(inference.ProofEnded)},
	}
	seen := map[Kind]bool{}
	for _, row := range rows {
		seen[row.evidence.Kind] = true
		for i, policy := range policies {
			v := classify(row.evidence, policy, inference.FenceTransport)
			if v != row.verdict {
				t.Errorf("%s %d: verdict %s, want %s", row.evidence.Kind, row.evidence.Status, v, row.verdict)
			}
			if got := proof(v, policy); got != row.proofs[i] {
				t.Errorf("%s %d, policy %+v: proof %q, want %q", row.evidence.Kind, row.evidence.Status, policy, got, row.proofs[i])
			}
		}
	}
	for k := range kinds {
		if !seen[k] && k != PodGone {
			t.Errorf("no row for %s", k)
		}
	}
}

func TestPodGoneIsProofOnlyWithoutGuardAndTools(t *testing.T) {
	for _, row := range []struct {
		policy Policy
		fence  inference.FenceLevel
		want   inference.Verdict
	}{
		{Policy{}, inference.FenceTransport, inference.Closed},
		{Policy{ExecutesTools: true}, inference.FenceTransport, inference.Uncertain},
		{Policy{}, inference.FenceLease, inference.Uncertain},
	} {
		if got := classify(Evidence{Kind: PodGone}, row.policy, row.fence); got != row.want {
			t.Errorf("%+v %s: %s, want %s", row.policy, row.fence, got, row.want)
		}
	}
}

// TestOpenedAgain: what an earlier run of a request did is not forgotten.
func TestOpenedAgain(t *testing.T) {
	now := time.Unix(0, 0)
	none := Unplaced{inference.Errorf(inference.NoEndpoints, "none")}
	for name, row := range map[string]struct {
		prior, charged int
		events         []Event
		outcome        inference.Outcome
		attempts       int
	}{
		"no endpoint":                    {1, 1, []Event{none}, inference.Failed, 0},
		"stopped":                        {1, 1, []Event{Stopped{none.Err}}, inference.Failed, 0},
		"no endpoint, and never one":     {0, 0, []Event{none}, inference.Rejected, 0},
		"its last attempt":               {1, 1, []Event{Placed{}, Evidence{N: 2, Kind: ConnectRefused}}, inference.Failed, 1},
		"its resend is used up":          {2, 1, []Event{Placed{}, Evidence{N: 3, Kind: StaleConnection}}, inference.Failed, 1},
		"its resend is not used up":      {1, 1, []Event{Placed{}, Evidence{N: 2, Kind: StaleConnection}}, inference.NoOutcome, 2},
		"an attempt with a later number": {3, 1, []Event{Placed{}, Evidence{N: 4, Kind: PeerClosed}}, inference.Failed, 1},
	} {
		r := NewRequest(Spec{Keyed: true, Policy: Policy{MaxAttempts: 2}, Prior: row.prior, PriorCharged: row.charged})
		for _, event := range row.events {
			r.Step(now, event)
		}
		if r.Outcome() != row.outcome || len(r.attempts) != row.attempts {
			t.Errorf("%s: %q after %d attempts, want %q after %d", name, r.Outcome(), len(r.attempts), row.outcome, row.attempts)
		}
	}
}

// TestBehindAGuard: what evidence alone proves where a revoke costs little.
func TestBehindAGuard(t *testing.T) {
	for _, row := range []struct {
		evidence Evidence
		verdict  inference.Verdict
		proof    inference.Proof // NoProof: revoke
	}{
		{Evidence{Kind: ConnectRefused}, inference.NotStarted, inference.ProofNotStarted},
		{Evidence{Kind: Unwritten}, inference.NotStarted, inference.ProofNotStarted},
		{Evidence{Kind: WrongIncarnation}, inference.NotStarted, inference.ProofNotStarted},
		{Evidence{Kind: LeaseOver}, inference.NotStarted, inference.ProofNotStarted},
		{Evidence{Kind: LeaseRequired}, inference.NotStarted, inference.ProofNotStarted},
		{Evidence{Kind: DuplicateAttempt}, inference.Closed, inference.NoProof},
		{Evidence{Kind: StaleEpoch}, inference.Uncertain, inference.NoProof},
		{Evidence{Kind: StaleGeneration}, inference.Uncertain, inference.NoProof},
		{Evidence{Kind: EngineExited}, inference.Dead, inference.ProofDead},
		{Evidence{Kind: GuardReplaced}, inference.Dead, inference.ProofDead},
		{Evidence{Kind: PeerClosed}, inference.Closed, inference.NoProof},
		{Evidence{Kind: PodGone}, inference.Uncertain, inference.NoProof},
		{Evidence{Kind: GuardLost}, inference.Uncertain, inference.NoProof},
		{Evidence{Kind: IdleLimit}, inference.Overloaded, inference.NoProof},
		{Evidence{Kind: Answer, Status: 503}, inference.Uncertain, inference.NoProof},
		{Evidence{Kind: Answer, Status: 404}, inference.Uncertain, inference.NoProof},
		{Evidence{Kind: Answer, Status: 503, Stamped: true}, inference.Ended, inference.ProofEnded},
		{Evidence{Kind: Answer, Status: 504, Stamped: true}, inference.Ended, inference.ProofEnded},
		{Evidence{Kind: Answer, Status: 500, Stamped: true}, inference.EngineError, inference.ProofEnded},
		{Evidence{Kind: Answer, Status: 404, Stamped: true}, inference.Refused, inference.ProofEnded},
		{Evidence{Kind: ErrorEvent}, inference.EngineError, inference.NoProof},
		{Evidence{Kind: Garbage}, inference.EngineError, inference.NoProof},
		{Evidence{Kind: Incomplete}, inference.EngineError, inference.NoProof},
	} {
		a := Attempt{Fence: inference.FenceLease}
		a.Verdict = classify(row.evidence, Policy{}, a.Fence)
		if got := leaseProof(&a, row.evidence); a.Verdict != row.verdict || got != row.proof {
			t.Errorf("%s %d: %s %q, want %s %q", row.evidence.Kind, row.evidence.Status, a.Verdict, got, row.verdict, row.proof)
		}
	}
}

func all(p inference.Proof) [3]inference.Proof { return [3]inference.Proof{p, p, p} }

var (
	textOnly  = [3]inference.Proof{inference.ProofTransport, inference.NoProof, inference.ProofTransport}
	looseOnly = [3]inference.Proof{inference.NoProof, inference.NoProof, inference.ProofTransport}
)
