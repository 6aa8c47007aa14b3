// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
)

// faultNamed and pointNamed find rows of the tables.
func faultNamed(name string) fault {
	return faults[slices.IndexFunc(faults, func(f fault) bool { return f.name == name })]
}

func pointNamed(name string) point {
	return points[slices.IndexFunc(points, func(p point) bool { return p.name == name })]
}

// TestScenarios are the stories of the seed document that need no tools, by
// their numbers there, with nothing drawn but the replica.
func TestScenarios(t *testing.T) {
	for _, stream := range []bool{true, false} {
		asks := func(s *story) {
			s.ask = ask{path: "/v1/chat/completions", stream: stream, tokens: 8, n: 1, pad: 4000}
		}
		kind := map[bool]string{true: "streamed", false: "whole"}[stream]
		t.Run("1 killed during prefill/"+kind, func(t *testing.T) {
			t.Parallel()
			s := play(t, *seedFlag, faultNamed("kill"), pointNamed("accepted"), false, asks)
			s.answeredBy(2)
		})
		t.Run("2 killed with a token computed and not sent/"+kind, func(t *testing.T) {
			t.Parallel()
			s := play(t, *seedFlag, faultNamed("kill"), pointNamed("computed"), false, asks)
			s.answeredBy(2)
		})
		t.Run("4 link cut and process alive, no guard/"+kind, func(t *testing.T) {
			t.Parallel()
			s := play(t, *seedFlag, faultNamed("cut"), pointNamed("accepted"), false, asks)
			if got := endingOf(s.asked.Answer); got != notFenced {
				t.Errorf("the client has %q", got)
			}
		})
	}
	for _, stream := range []bool{true, false} {
		kind := map[bool]string{true: "streamed", false: "whole"}[stream]
		t.Run("4 link cut and process alive, guard/"+kind, func(t *testing.T) {
			t.Parallel()
			linkCut(t, stream, (*replica).link, "lease_expired")
		})
		t.Run("4 data link cut and guard heard/"+kind, func(t *testing.T) {
			t.Parallel()
			linkCut(t, stream, func(b *replica) []way { return []way{b.dataWay()} }, "cancel_ack")
		})
	}
	t.Run("3 killed after the first delta", func(t *testing.T) {
		t.Parallel()
		s := play(t, *seedFlag, faultNamed("kill"), pointNamed("first"), false, func(s *story) {
			s.ask = ask{path: "/v1/chat/completions", stream: true, tokens: 8, n: 1, pad: 4000}
		})
		if got := s.attempts(); len(got) != 1 {
			t.Errorf("%d attempts reached engines, want 1", len(got))
		}
	})
	t.Run("the old replica wakes up and speaks", func(t *testing.T) {
		t.Parallel()
		wakeUp(t)
	})
	t.Run("the old replica wakes up behind its guard", func(t *testing.T) {
		t.Parallel()
		s := play(t, *seedFlag, faultNamed("stop both"), pointNamed("computed"), true, func(s *story) {
			s.ask = ask{path: "/v1/chat/completions", stream: true, tokens: 8, n: 1, pad: 4000}
			s.relayed = true
		})
		s.answeredBy(2)
	})
}

// wakeUp: a replica that was cut off in mid-computation goes on, speaks after
// the client has its answer, and what it said arrives when the link is back.
func wakeUp(t *testing.T) {
	f := faultNamed("cut")
	mend := f.mend
	f.mend = func(s *story) {
		s.awaitEntry("the old replica to speak", func(e simengine.Entry) bool {
			return e.Event == simengine.EventToken && e.Request == s.asked.Request
		})
		mend(s)
	}
	s := play(t, *seedFlag, f, pointNamed("computed"), false, func(s *story) {
		s.ask = ask{path: "/v1/chat/completions", stream: true, tokens: 8, n: 1, pad: 4000}
		s.stall = 3 * time.Second
	})
	if s.late() == 0 {
		t.Errorf("the old replica said nothing after the client had its answer\n%s", s.engineLogs())
	}
}

// linkCut is scenario 4 behind guards: the engine lives and talks through the
// cut, until its guard stops it. ways are what is cut, proof what must fence it.
func linkCut(t *testing.T, stream bool, ways func(*replica) []way, proof string) {
	f := faultNamed("cut")
	f.strike = func(s *story) { s.cut(true, true, ways(s.victim)...) }
	f.mend = func(s *story) {
		// Only the guard can have told the engine to stop: the cut lasts.
		s.awaitEntry("the old engine to be at its end", func(e simengine.Entry) bool {
			return e.Engine == s.victim.name && (e.Event == simengine.EventAborted || e.Event == simengine.EventFinished) && e.Request == s.asked.Request
		})
		s.heal()
	}
	s := play(t, *seedFlag, f, pointNamed("computed"), true, func(s *story) {
		s.ask = ask{path: "/v1/chat/completions", stream: stream, tokens: 200, n: 1, pad: 4000}
		s.relayed = true
		s.stall = 300 * time.Millisecond
		s.paced = "slow:25ms" // 5 s of talk, past the lease
	})
	s.answeredBy(2)
	if got := s.rec.Attempts[0].Proof; got != proof {
		t.Errorf("the first attempt was fenced by %q, want %q", got, proof)
	}
	cancelled := slices.ContainsFunc(s.victim.entries(), func(e simengine.Entry) bool {
		return e.Event == simengine.EventAborted && e.Request == s.asked.Request
	})
	if !cancelled {
		t.Errorf("the guard did not cancel its engine's work\n%s", s.engineLogs())
	}
	took := s.attempts()[1].T.Sub(s.struck)
	table.measure(fmt.Sprintf("scenario 4, guards, ttl %v: from the cut to the second attempt, fenced by %s", ttl, proof), took)
}

// attempts are the attempts at the story's request that engines got.
func (s *story) attempts() []simengine.Entry {
	return slices.DeleteFunc(s.arrivals(), func(e simengine.Entry) bool { return e.Header.Get(check.TagHeader) != s.asked.Tag })
}

// answeredBy fails the test unless exactly so many attempts reached engines, and
// the last is the answer.
func (s *story) answeredBy(n int) {
	s.t.Helper()
	got := s.attempts()
	if len(got) != n || s.asked.Status != http.StatusOK {
		s.t.Errorf("%d attempts reached engines, want %d; status %d\n%s", len(got), n, s.asked.Status, s.engineLogs())
		return
	}
	// A resend to the dead engine, which did not reach it, may have a number too.
	if last := got[n-1]; last.Engine == s.victim.name || last.Attempt < n {
		s.t.Errorf("the last attempt is %s%d, and %s was struck", last.Engine, last.Attempt, s.victim.name)
	}
}

// late counts the tokens that engines sent of the request after its client's
// answer was over.
func (s *story) late() int {
	n := 0
	for _, e := range s.log() {
		if e.Event == simengine.EventToken && e.Request == s.asked.Request && e.T.After(s.asked.over) {
			n++
		}
	}
	return n
}
