// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/inference"
)

var (
	start  = time.Unix(1000, 0)
	terms  = Terms{TTL: 10 * time.Second, Heartbeat: 2 * time.Second, DriftPPM: 1000, Tick: time.Millisecond}
	self   = Gateway{ID: "gw", Generation: 1}
	first  = Incarnation{Guard: "g", Start: 100, Boot: "boot-1"}
	second = Incarnation{Guard: "g", Start: 900, Boot: "boot-1"}
	other  = Incarnation{Guard: "g", Start: 50, Boot: "boot-2"}
	key    = Key{Request: "req_a", N: 1}
)

func at(d time.Duration) time.Time { return start.Add(d) }

// connected is a link that heard one heartbeat at start: G is 50 s.
func connected(t *testing.T) *Link {
	t.Helper()
	l := NewLink(terms, self)
	l.Open(1)
	if h := l.Heartbeat(start, 1, Heartbeat{G: Boottime(50 * time.Second), Guard: first, Alone: true}); h.Ignored != Counts || !h.New {
		t.Fatalf("first heartbeat: %+v", h)
	}
	return l
}

func TestWaitCoversBothClocks(t *testing.T) {
	for _, row := range []struct {
		terms Terms
		want  time.Duration
	}{
		{Terms{TTL: 10 * time.Second, DriftPPM: 1000}, 10_020_020_021},
		{Terms{TTL: 10 * time.Second, DriftPPM: 1000, Tick: time.Millisecond}, 10_021_020_021},
		{Terms{TTL: time.Second}, time.Second},
		{Terms{TTL: time.Second, DriftPPM: 100_000}, 1_222_222_223},
	} {
		if got := row.terms.Wait(); got != row.want {
			t.Errorf("%+v: %d, want %d", row.terms, got, row.want)
		}
	}
}

func TestNoGrantBeforeAHeartbeatOfThisSession(t *testing.T) {
	l := NewLink(terms, self)
	if _, ok := l.Dispatch(start, key); ok {
		t.Error("granted before a session")
	}
	l.Open(1)
	if _, ok := l.Dispatch(start, key); ok {
		t.Error("granted before a heartbeat")
	}
	l = connected(t)
	l.Open(2)
	if l.Candidate(start) {
		t.Error("a candidate with the heartbeat of an old session")
	}
	l.Heartbeat(at(1), 2, Heartbeat{G: Boottime(51 * time.Second), Guard: first})
	if !l.Candidate(at(2)) {
		t.Error("no candidate after the first heartbeat of the new session")
	}
	if l.Candidate(at(6 * time.Second)) {
		t.Error("a candidate after a silence of more than half a lease")
	}
	l.Close(2)
	if l.Candidate(at(2)) {
		t.Error("a candidate with its session down")
	}
}

func TestGrantsComeFromTheNewestHeartbeat(t *testing.T) {
	l := connected(t)
	grant, ok := l.Dispatch(at(3*time.Second), key)
	want := Grant{Key: key, Guard: first, NotAfter: Boottime(60 * time.Second), Gateway: self}
	if !ok || grant != want {
		t.Fatalf("initial lease %+v, want %+v", grant, want)
	}
	if _, ok := l.Dispatch(at(3*time.Second), key); ok {
		t.Error("a second initial lease for one attempt")
	}
	if got := l.Renewals(at(4 * time.Second)); got != nil {
		t.Errorf("renewed without a newer heartbeat: %v", got)
	}
	wantExpiry(t, l, at(terms.Wait()))

	// An older heartbeat that comes late changes nothing.
	l.Heartbeat(at(5*time.Second), 1, Heartbeat{G: Boottime(53 * time.Second), Guard: first, Alone: true})
	if h := l.Heartbeat(at(6*time.Second), 1, Heartbeat{G: Boottime(52 * time.Second), Guard: first, Alone: true}); h.Ignored != OldTime {
		t.Errorf("a late heartbeat: %+v", h)
	}
	want.NotAfter = Boottime(63 * time.Second)
	if got := l.Renewals(at(7 * time.Second)); len(got) != 1 || got[0] != want {
		t.Errorf("renewals %+v, want %+v", got, want)
	}
	wantExpiry(t, l, at(5*time.Second+terms.Wait()))
	if g, ok := l.First(key); !ok || g != grant {
		t.Errorf("a resend carries %+v, want %+v", g, grant)
	}
}

func wantExpiry(t *testing.T, l *Link, want time.Time) {
	t.Helper()
	if got, ok := l.NextExpiry(); !ok || !got.Equal(want) {
		t.Errorf("expiry %v %v, want %v", got.Sub(start), ok, want.Sub(start))
	}
	if over := l.Expire(want.Add(-1)); len(over) != 0 {
		t.Errorf("expired early: %v", over)
	}
}

func TestExpiredIsFinal(t *testing.T) {
	l := connected(t)
	l.Dispatch(start, key)
	late := at(terms.Wait())
	l.Heartbeat(late, 1, Heartbeat{G: Boottime(60 * time.Second), Guard: first, Alone: true})
	if got := l.Renewals(late); got != nil {
		t.Errorf("renewed after expiry: %v", got)
	}
	want := []Proved{{key, inference.ProofLeaseExpired}}
	if diff := cmp.Diff(want, l.Expire(late)); diff != "" {
		t.Error(diff)
	}
	if l.Held() != 0 {
		t.Error("an expired lease is held")
	}
}

func TestNoRenewalWhileFencing(t *testing.T) {
	l := connected(t)
	l.Dispatch(start, key)
	want := Revoke{Key: key, Guard: first, Gateway: self, NotAfter: Boottime(60 * time.Second)}
	if v, ok := l.Fence(key); !ok || v != want {
		t.Errorf("revoke %+v, want %+v", v, want)
	}
	l.Heartbeat(at(time.Second), 1, Heartbeat{G: Boottime(51 * time.Second), Guard: first, Alone: true})
	if got := l.Renewals(at(time.Second)); got != nil {
		t.Errorf("renewed while fencing: %v", got)
	}
	if got := l.Revokes(); len(got) != 1 || got[0] != want {
		t.Errorf("revokes to repeat: %v", got)
	}
	wantExpiry(t, l, at(terms.Wait()))
}

func TestWhoseWordFences(t *testing.T) {
	stranger := Incarnation{Guard: "x", Start: 1, Boot: "boot-1"}
	for name, row := range map[string]struct {
		hear  []Heartbeat // after the dispatch to first
		fence bool
		end   End
		want  inference.Proof
	}{
		"acknowledged":                    {nil, true, End{Key: key, Guard: first, Reason: Revoked}, inference.ProofCancelAck},
		"expired there":                   {nil, true, End{Key: key, Guard: first, Reason: Expired}, inference.ProofLeaseExpired},
		"expired there, unasked":          {nil, false, End{Key: key, Guard: first, Reason: Expired}, inference.ProofLeaseExpired},
		"the engine exited":               {nil, false, End{Key: key, Guard: first, Reason: EngineExited}, inference.ProofDead},
		"relayed whole, being fenced":     {nil, true, End{Key: key, Guard: first, Reason: Finished}, inference.ProofCancelAck},
		"relayed whole, still on its way": {nil, false, End{Key: key, Guard: first, Reason: Finished}, inference.NoProof},
		"another guard":                   {nil, true, End{Key: key, Guard: stranger, Reason: Revoked}, inference.NoProof},
		"a life not heard of":             {nil, true, End{Key: key, Guard: second, Reason: Revoked}, inference.NoProof},
		"a later life without the lock":   {[]Heartbeat{{G: 1, Guard: second}}, true, End{Key: key, Guard: second, Reason: Revoked}, inference.NoProof},
		"no such attempt":                 {nil, true, End{Key: Key{"req_a", 2}, Guard: first, Reason: Revoked}, inference.NoProof},
	} {
		t.Run(name, func(t *testing.T) {
			l := connected(t)
			l.Dispatch(start, key)
			if row.fence {
				l.Fence(key)
			}
			for _, hb := range row.hear {
				l.Heartbeat(at(1), 1, hb)
			}
			got, ok := l.Ended(row.end)
			if ok != (row.want != inference.NoProof) || got.Proof != row.want {
				t.Errorf("%+v %v, want %q", got, ok, row.want)
			}
			if ok == (l.Held() == 1) {
				t.Errorf("proved %v, held %d", ok, l.Held())
			}
		})
	}
}

func TestIncarnations(t *testing.T) {
	for name, row := range map[string]struct {
		hear   []Heartbeat
		want   Ignored // of the last
		fenced int     // by the last
	}{
		"a later life that holds the lock":   {[]Heartbeat{{G: 1, Guard: second, Alone: true}}, Counts, 1},
		"a later life without the lock":      {[]Heartbeat{{G: 1, Guard: second}}, Counts, 0},
		"another boot":                       {[]Heartbeat{{G: 1, Guard: other, Alone: true}}, Counts, 1},
		"an earlier life":                    {[]Heartbeat{{G: 1, Guard: second, Alone: true}, {G: 9e18, Guard: first, Alone: true}}, OldIncarnation, 0},
		"a boot that is over":                {[]Heartbeat{{G: 1, Guard: other, Alone: true}, {G: 9e18, Guard: second, Alone: true}}, OldIncarnation, 0},
		"another guard at the same address":  {[]Heartbeat{{G: 9e18, Guard: Incarnation{Guard: "x", Start: 1000, Boot: "boot-1"}, Alone: true}}, OtherGuard, 0},
		"the same life, its clock not later": {[]Heartbeat{{G: Boottime(50 * time.Second), Guard: first, Alone: true}}, OldTime, 0},
	} {
		t.Run(name, func(t *testing.T) {
			l := connected(t)
			l.Dispatch(start, key)
			var last Heard
			for _, hb := range row.hear {
				last = l.Heartbeat(at(1), 1, hb)
			}
			if last.Ignored != row.want || len(last.Fenced) != row.fenced {
				t.Errorf("%+v, want %q and %d fenced", last, row.want, row.fenced)
			}
			for _, p := range last.Fenced {
				if p.Proof != inference.ProofDead {
					t.Errorf("proof %q", p.Proof)
				}
			}
		})
	}
}

func TestOldSessionsDoNotCount(t *testing.T) {
	l := connected(t)
	l.Open(2)
	if h := l.Heartbeat(at(1), 1, Heartbeat{G: Boottime(60 * time.Second), Guard: first}); h.Ignored != OldSession {
		t.Errorf("%+v", h)
	}
	l.Open(1)
	l.Close(1)
	if h := l.Heartbeat(at(1), 2, Heartbeat{G: Boottime(51 * time.Second), Guard: first}); h.Ignored != Counts {
		t.Errorf("%+v", h)
	}
}

func TestRestartWaitsEveryLeaseOut(t *testing.T) {
	l := NewLink(terms, Gateway{"gw", 2})
	l.Inherit(key, first, start)
	want := Revoke{Key: key, Guard: first, Gateway: Gateway{"gw", 2}}
	if got := l.Revokes(); len(got) != 1 || got[0] != want {
		t.Errorf("revokes %+v, want %+v", got, want)
	}
	wantExpiry(t, l, at(terms.Wait()))
	l.Open(1)
	l.Heartbeat(at(1), 1, Heartbeat{G: 1, Guard: first, Alone: true})
	if got := l.Renewals(at(2)); got != nil {
		t.Errorf("renewed what another process had granted: %v", got)
	}
	if p, ok := l.Ended(End{Key: key, Guard: first, Reason: Revoked}); !ok || p.Proof != inference.ProofCancelAck {
		t.Errorf("acknowledged: %+v %v", p, ok)
	}
}

func TestAnotherGuardProvesNothingAboutAnInheritedLease(t *testing.T) {
	l := NewLink(terms, Gateway{"gw", 2})
	l.Inherit(key, first, start)
	l.Open(1)
	stranger := Incarnation{Guard: "x", Start: 1, Boot: "boot-1"}
	if h := l.Heartbeat(at(1), 1, Heartbeat{G: 1, Guard: stranger, Alone: true}); len(h.Fenced) != 0 {
		t.Errorf("fenced by a stranger: %v", h.Fenced)
	}
	if _, ok := l.Ended(End{Key: key, Guard: stranger, Reason: Revoked}); ok {
		t.Error("a stranger's word counts")
	}
}

func TestNothingIsGrantedPastOnesOwnOwnership(t *testing.T) {
	l := connected(t)
	l.Own(at(2 * time.Second))
	if _, ok := l.Dispatch(at(time.Second), key); !ok {
		t.Fatal("not granted before")
	}
	l.Heartbeat(at(time.Second), 1, Heartbeat{G: Boottime(51 * time.Second), Guard: first})
	if l.Candidate(at(2*time.Second)) || l.Renewals(at(2*time.Second)) != nil {
		t.Error("granted after")
	}
	if over, _ := l.NextExpiry(); over.After(at(2 * time.Second).Add(terms.Wait())) {
		t.Error("a taker would not wait long enough")
	}
}

func TestResync(t *testing.T) {
	l := connected(t)
	b, c, d := Key{"req_b", 1}, Key{"req_c", 1}, Key{"req_d", 1}
	for _, k := range []Key{key, b, c} {
		l.Dispatch(start, k)
		l.Fence(k)
	}
	proved, revoke := l.Resync(first, []Listed{
		{Key: key, End: End{Key: key, Guard: first, Reason: Revoked}}, {Key: b, Active: true}, {Key: d, Active: true},
	})
	if diff := cmp.Diff([]Proved{{key, inference.ProofCancelAck}}, proved); diff != "" {
		t.Errorf("only an end proves: %s", diff)
	}
	if diff := cmp.Diff([]Revoke{{Key: d, Guard: first, Gateway: self}}, revoke); diff != "" {
		t.Errorf("revoked: %s", diff)
	}
	if l.Held() != 2 {
		t.Errorf("held %d, want the active one and the absent one", l.Held())
	}
}

func TestIncarnationOnTheWire(t *testing.T) {
	i := Incarnation{Guard: "node-7/vllm", Start: 12345, Boot: "7e7a"}
	if got, err := ParseIncarnation(i.String()); err != nil || got != i {
		t.Errorf("%v %v", got, err)
	}
	for _, bad := range []string{"", "a", "a/b", "a/b/c", "/1/c", "a/1/", "a/-1/c"} {
		if got, err := ParseIncarnation(bad); err == nil {
			t.Errorf("%q is read as %v", bad, got)
		}
	}
}
