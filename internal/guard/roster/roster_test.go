// SPDX-License-Identifier: Apache-2.0

package roster

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/internal/lease"
)

const second = lease.Boottime(time.Second)

var (
	self = lease.Incarnation{Guard: "g", Start: 5, Boot: "b"}
	gw   = lease.Gateway{ID: "gw", Generation: 4}
	key  = lease.Key{Request: "req_a", N: 2}
)

func grant(k lease.Key, notAfter lease.Boottime) lease.Grant {
	return lease.Grant{Key: k, Guard: self, NotAfter: notAfter, Gateway: gw}
}

func started(t *testing.T) *Roster {
	t.Helper()
	r := New(self, 20*time.Second)
	if why := r.Admit(second, grant(key, 10*second)); why != Accepted {
		t.Fatalf("refused: %s", why)
	}
	return r
}

func TestAdmit(t *testing.T) {
	g := func(change func(*lease.Grant)) lease.Grant {
		g := grant(key, 10*second)
		change(&g)
		return g
	}
	for name, row := range map[string]struct {
		grant lease.Grant
		want  Refusal
	}{
		"the same epoch":            {g(func(*lease.Grant) {}), Duplicate},
		"the same epoch, too late":  {g(func(g *lease.Grant) { g.NotAfter = 2 }), Duplicate},
		"a lower epoch":             {g(func(g *lease.Grant) { g.N = 1 }), StaleEpoch},
		"a higher epoch":            {g(func(g *lease.Grant) { g.N = 3 }), Accepted},
		"a higher epoch, too late":  {g(func(g *lease.Grant) { g.N, g.NotAfter = 3, 2*second }), Expired},
		"another request":           {g(func(g *lease.Grant) { g.Request = "req_b" }), Accepted},
		"another life of the guard": {g(func(g *lease.Grant) { g.N, g.Guard.Start = 3, 4 }), WrongIncarnation},
		"another boot":              {g(func(g *lease.Grant) { g.N, g.Guard.Boot = 3, "c" }), WrongIncarnation},
		"an older generation":       {g(func(g *lease.Grant) { g.N, g.Gateway.Generation = 3, 3 }), StaleGeneration},
		"another gateway":           {g(func(g *lease.Grant) { g.N, g.Gateway = 3, lease.Gateway{ID: "x", Generation: 1} }), Accepted},
	} {
		if got := started(t).Admit(2*second, row.grant); got != row.want {
			t.Errorf("%s: %q, want %q", name, got, row.want)
		}
	}
}

func TestPublishingEndsAtTheDeadline(t *testing.T) {
	r := started(t)
	if !r.Check(10*second-1, key) {
		t.Error("stopped before the deadline")
	}
	if r.Check(10*second, key) {
		t.Error("publishes at the deadline")
	}
	if r.Renew(10*second, grant(key, 30*second)) || r.Check(9*second, lease.Key{Request: "req_a", N: 1}) {
		t.Error("an expired lease was renewed, or an attempt that was never started publishes")
	}
	want := []lease.End{{Key: key, Gateway: "gw", Guard: self, Reason: lease.Expired}}
	if diff := cmp.Diff(want, r.Tick(10*second)); diff != "" {
		t.Error(diff)
	}
	if r.Renew(10*second, grant(key, 30*second)) || r.Check(10*second, key) {
		t.Error("expired is final")
	}
}

func TestRenewalsExtendOnly(t *testing.T) {
	r := started(t)
	if !r.Renew(2*second, grant(key, 12*second)) || !r.Renew(3*second, grant(key, 5*second)) {
		t.Error("a renewal was refused")
	}
	if !r.Check(11*second, key) {
		t.Error("an older renewal that came late shortened the lease")
	}
	for name, change := range map[string]func(*lease.Grant){
		"another life":        func(g *lease.Grant) { g.Guard.Start++ },
		"an older generation": func(g *lease.Grant) { g.Gateway.Generation-- },
		"another attempt":     func(g *lease.Grant) { g.N++ },
	} {
		g := grant(key, 15*second)
		change(&g)
		if r.Renew(4*second, g) {
			t.Errorf("renewed by %s", name)
		}
	}
	if !r.Renew(4*second, grant(key, 1000*second)) || r.Check(24*second, key) {
		t.Error("a grant is longer than any may be")
	}
}

func TestLateWritesAreNoticed(t *testing.T) {
	r := started(t)
	if r.Wrote(9*second, key, 5) || !r.Wrote(10*second, key, 7) || r.Late() != 1 {
		t.Errorf("late writes: %d, want 1", r.Late())
	}
	if ends := r.Tick(10 * second); len(ends) != 1 || ends[0].Published != 12 {
		t.Errorf("ends %+v", ends)
	}
}

// A pause long enough for the attempt to be forgotten makes its write no less late.
func TestLateWriteOfAForgottenAttempt(t *testing.T) {
	r := started(t)
	if !r.Check(2*second, key) {
		t.Fatal("the chunk may not be written")
	}
	if ends := r.Tick(20 * second); len(ends) != 1 || r.Requests() != 0 {
		t.Fatalf("ended %v, %d requests are left", ends, r.Requests())
	}
	if !r.Wrote(20*second, key, 3) || r.Late() != 1 {
		t.Errorf("%d late writes", r.Late())
	}
}

func TestRevoke(t *testing.T) {
	r := started(t)
	r.Wrote(2*second, key, 5)
	v := lease.Revoke{Key: key, Guard: self, NotAfter: 10 * second}
	end, abort := r.Revoke(3*second, v)
	if want := (lease.End{Key: key, Gateway: "gw", Guard: self, Reason: lease.Revoked, Published: 5}); end != want || !abort {
		t.Errorf("%+v %v, want %+v", end, abort, want)
	}
	if r.Check(3*second, key) || r.Renew(3*second, grant(key, 15*second)) {
		t.Error("a revoked attempt publishes")
	}
	r.EngineStopped(key, lease.StoppedYes)
	end, abort = r.Revoke(4*second, v)
	if abort || end.Reason != lease.Revoked || end.Engine != lease.StoppedYes {
		t.Errorf("again: %+v %v", end, abort)
	}
}

func TestTombstones(t *testing.T) {
	for name, notAfter := range map[string]lease.Boottime{"carried": 10 * second, "not known": 0} {
		r := New(self, 20*time.Second)
		end, abort := r.Revoke(second, lease.Revoke{Key: key, Guard: self, Gateway: gw, NotAfter: notAfter})
		if end.Reason != lease.Revoked || abort {
			t.Errorf("%s: %+v %v", name, end, abort)
		}
		if why := r.Admit(2*second, grant(key, 10*second)); why != Duplicate {
			t.Errorf("%s: a revoked dispatch is %q", name, why)
		}
		r.Tick(10*second - 1)
		if why := r.Admit(10*second-1, grant(key, 10*second)); why != Duplicate {
			t.Errorf("%s: forgotten too early: %q", name, why)
		}
		if at, ok := r.Next(); !ok || notAfter > 0 && at != notAfter || notAfter == 0 && at != 21*second {
			t.Errorf("%s: to be forgotten at %d %v", name, at, ok)
		}
		r.Tick(21 * second)
		if why := r.Admit(21*second, grant(key, 10*second)); why != Expired || r.Requests() != 0 {
			t.Errorf("%s: %q, %d remembered", name, why, r.Requests())
		}
	}
}

func TestEndsOfTheGuardsOwn(t *testing.T) {
	r := started(t)
	other := lease.Key{Request: "req_b", N: 1}
	r.Admit(second, grant(other, 10*second))
	if _, ok := r.Finish(key, lease.Finished); !ok || r.Check(2*second, key) {
		t.Error("a finished attempt publishes")
	}
	if _, ok := r.Finish(key, lease.Closed); ok {
		t.Error("ended twice")
	}
	ends := r.EngineExited()
	if len(ends) != 1 || ends[0].Key != other || ends[0].Reason != lease.EngineExited || r.Check(2*second, other) {
		t.Errorf("ends of the exit: %+v", ends)
	}
	want := []lease.Listed{
		{Key: key, End: lease.End{Key: key, Gateway: "gw", Guard: self, Reason: lease.Finished, Engine: lease.StoppedYes}},
		{Key: other, End: lease.End{Key: other, Gateway: "gw", Guard: self, Reason: lease.EngineExited, Engine: lease.StoppedYes}},
	}
	if diff := cmp.Diff(want, r.List("gw")); diff != "" {
		t.Error(diff)
	}
	if list := r.List("another"); len(list) != 0 {
		t.Errorf("another gateway is told of attempts that are not its own: %v", list)
	}
	r.Tick(10 * second)
	if _, waiting := r.Next(); waiting || r.Requests() != 0 {
		t.Errorf("%d requests remembered after every deadline", r.Requests())
	}
}
