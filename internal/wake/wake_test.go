// SPDX-License-Identifier: Apache-2.0

package wake_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headgate/headgate/internal/wake"
)

// rig plays a pool through time and notes what it decides.
type rig struct {
	*testing.T
	p     wake.Pool
	start time.Time
	now   time.Time
	view  wake.View
	fails bool // what is decided
}

func newRig(t *testing.T, idle time.Duration) *rig {
	g := &rig{T: t, start: time.Unix(1_700_000_000, 0)}
	g.now = g.start
	g.p.Configure(idle)
	return g
}

// pass lets time go by, looking when the pool wants to, and returns when it
// decided what.
func (g *rig) pass(d time.Duration) (asks, releases []time.Duration) {
	g.Helper()
	end := g.now.Add(d)
	for looks := 0; ; looks++ {
		action, next := g.p.Look(g.now, g.view)
		switch action {
		case wake.Ask:
			asks = append(asks, g.now.Sub(g.start))
		case wake.Release:
			releases = append(releases, g.now.Sub(g.start))
		}
		if action != wake.Nothing {
			g.p.Done(g.now, action, !g.fails)
			continue
		}
		if looks > 1000 {
			g.Fatal("looks again and again")
		}
		if next.IsZero() || next.After(end) {
			g.now = end
			return asks, releases
		}
		if !next.After(g.now) {
			g.Fatalf("wants to look again at %v, at %v", next.Sub(g.start), g.now.Sub(g.start))
		}
		g.now = next
	}
}

func (g *rig) want(what string, got []time.Duration, want ...time.Duration) {
	g.Helper()
	if len(got) != len(want) {
		g.Errorf("%s at %v, want %v", what, got, want)
		return
	}
	for i := range got {
		if got[i] != want[i] {
			g.Errorf("%s at %v, want %v", what, got, want)
			return
		}
	}
}

const s = time.Second

func TestAWaitingRequestAsksAtOnceAndReminds(t *testing.T) {
	g := newRig(t, 0)
	asks, _ := g.pass(time.Hour)
	g.want("asked without a request", asks)
	g.now = g.start
	g.view.Waiting = 1
	asks, releases := g.pass(70 * s)
	g.want("asked", asks, 0, 30*s, 60*s)
	if !g.p.Wanted() {
		t.Error("not wanted")
	}
	g.view.Ready, g.view.Waiting, g.view.Running = 1, 0, 1
	more, _ := g.pass(time.Hour)
	g.want("asked with an engine", more)
	g.want("released", releases)
	if g.p.Wanted() {
		t.Error("wanted with an engine")
	}
}

func TestWhatFailsIsTriedAgainWithGrowingPauses(t *testing.T) {
	g := newRig(t, 0)
	g.view.Waiting, g.fails = 1, true
	asks, _ := g.pass(100 * s)
	g.want("asked", asks, 0, 1*s, 3*s, 7*s, 15*s, 31*s, 61*s, 91*s)
}

// A client that comes and goes is not to make a storm of it.
func TestWhoComesAgainDoesNotAskAgain(t *testing.T) {
	g := newRig(t, 0)
	n := 0
	for range 100 {
		g.view.Waiting = 1
		asks, _ := g.pass(100 * time.Millisecond)
		n += len(asks)
		g.view.Waiting = 0
		g.pass(0)
	}
	if n != 1 {
		t.Errorf("asked %d times in 10 s", n)
	}
}

func TestNobodyIsAskedBeforeItIsKnownWhetherEnginesAreThere(t *testing.T) {
	g := newRig(t, 0)
	g.view.Waiting, g.view.Unknown = 1, 1
	asks, _ := g.pass(time.Minute)
	g.want("asked", asks)
	g.view.Unknown = 0
	asks, _ = g.pass(0)
	g.want("asked", asks, time.Minute)
}

func TestEnginesAreLetGoAfterIdleness(t *testing.T) {
	g := newRig(t, time.Minute)
	g.view = wake.View{Ready: 1, Running: 1, Active: g.start}
	_, releases := g.pass(130 * s)
	g.want("released while a request runs", releases)
	// It ended between two looks.
	g.view.Running, g.view.Active = 0, g.start.Add(125*s)
	_, releases = g.pass(100 * s)
	g.want("released", releases, 185*s)
	// Those that are still there after as long again are let go again.
	_, releases = g.pass(20 * s)
	g.want("released", releases, 245*s)
	g.view.Ready = 0
	g.pass(time.Minute)
	_, releases = g.pass(time.Hour)
	g.want("released although there is none", releases)
	g.view.Ready = 1
	back := g.now.Sub(g.start)
	_, releases = g.pass(90 * s)
	g.want("released", releases, back+time.Minute)
}

func TestEnginesThatWereAskedForInVainAreLetGoToo(t *testing.T) {
	g := newRig(t, time.Minute)
	g.view.Waiting, g.view.Active = 1, g.start
	asks, _ := g.pass(10 * s)
	g.want("asked", asks, 0)
	g.view.Waiting, g.view.Active = 0, g.now // its client left
	_, releases := g.pass(10 * time.Minute)
	g.want("released", releases, 70*s)
}

func TestAReleaseThatFailsIsTriedAgain(t *testing.T) {
	g := newRig(t, time.Minute)
	g.view.Ready = 1
	g.pass(0)
	g.view.Ready, g.fails = 0, true
	_, releases := g.pass(64 * s)
	g.want("released", releases, 60*s, 61*s, 63*s)
	g.fails = false
	_, releases = g.pass(time.Hour)
	g.want("released", releases, 67*s)
}

func TestAnEngineThatFailsLaterIsAskedForAfterAPause(t *testing.T) {
	g := newRig(t, 0)
	g.view.Waiting = 1
	g.pass(2 * s)
	g.p.Failed(g.now) // it crashed while it started
	asks, _ := g.pass(10 * s)
	g.want("asked", asks, 3*s)
	g.p.Failed(g.now)
	asks, _ = g.pass(10 * s)
	g.want("asked", asks, 12*s+1*s)
}

// Whatever happens: it asks only while requests wait without an engine, lets go
// only of what may be there and only after idleness, never twice in a second, and
// a request that waits without an engine is never forgotten.
func TestWhateverHappens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p wake.Pool
		now := time.Unix(1_700_000_000, 0)
		idle := time.Duration(rapid.IntRange(0, 100).Draw(t, "idle")) * s
		p.Configure(idle)
		var v wake.View
		var last, vain time.Time // the last action; since when requests wait in vain
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			v.Ready, v.Unknown = rapid.IntRange(0, 1).Draw(t, "ready"), rapid.IntRange(0, 1).Draw(t, "unknown")
			waiting, running := rapid.IntRange(0, 1).Draw(t, "waiting"), rapid.IntRange(0, 1).Draw(t, "running")
			if waiting != v.Waiting || running != v.Running {
				v.Active = now
			}
			v.Waiting, v.Running = waiting, running
			inVain := v.Waiting > 0 && v.Ready == 0 && v.Unknown == 0
			if !inVain {
				vain = time.Time{}
			} else if vain.IsZero() {
				vain = now
			}
			action, next := p.Look(now, v)
			switch {
			case action == wake.Ask && !inVain:
				t.Fatalf("asks with %+v", v)
			case action == wake.Release && (idle == 0 || v.Waiting+v.Running > 0 || now.Sub(v.Active) < idle):
				t.Fatalf("lets go with %+v", v)
			case action == wake.Nothing && inVain && now.Sub(vain) > 31*s && (last.IsZero() || now.Sub(last) > 31*s):
				t.Fatalf("forgets a request")
			case action == wake.Nothing && inVain && (next.IsZero() || next.Sub(now) > wake.Remind):
				t.Fatalf("will look again at %v", next)
			}
			if action != wake.Nothing {
				p.Done(now, action, rapid.Bool().Draw(t, "ok"))
				last = now
			}
			now = now.Add(time.Duration(rapid.Int64Range(1, int64(20*s)).Draw(t, "pause")))
		}
	})
}
