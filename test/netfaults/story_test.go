// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/test/real"
)

// A story is a run of one cell.
type story struct {
	*run
	fault  fault
	want   *expectation
	point  point
	ask    ask
	asked  *asked
	victim *replica
	struck time.Time
	rec    record // of the journal, when all was over
	stall  time.Duration
	paced  string // of the engine's tokens, a fault of the simulated engine

	hold  *real.Hold
	held  *real.Conn
	armed atomic.Bool // the hold lets nothing more through

	// passed is how much the victim's guard had let through of the request's
	// answer when another attempt reached an engine; -1: none did.
	passed int

	// missed says that the plan came to nothing: a busy machine let a lease or a
	// limit run out before anything was struck.
	missed bool
}

// begun says that the client has a part of the answer.
func (s *story) begun() bool { return s.ask.stream && s.point.begun }

// script is the fault script that holds the engine of the first attempt.
func (s *story) script() string {
	at := s.point.engine
	if at == "" {
		if s.stall == 0 {
			return ""
		}
		at = "head" // it is read after the fault struck
	}
	script := "attempt=1;stall@" + strings.ReplaceAll(at, "LAST", fmt.Sprint(s.ask.tokens*s.ask.n))
	if s.stall > 0 {
		script += ":" + s.stall.String()
	}
	if s.paced != "" {
		script += ",attempt=1;" + s.paced
	}
	return script
}

// reader is who reads requests that come to a replica, and where: whom the fault
// keeps from going on.
func (s *story) reader(b *replica) (*process, int) {
	switch {
	case !s.guarded:
		return b.engine(), dataPort
	case s.fault.hits == guardHit:
		return b.guard(), dataPort
	}
	return b.engine(), enginePort
}

// reach brings the request to the point and finds out which replica has it.
func (s *story) reach() {
	s.t.Helper()
	s.ask.fault = s.script()
	held := s.fault.hits == relayHit
	if held {
		s.arm()
	}
	unread := s.point.name == "unread"
	if unread && !held {
		for _, b := range s.replicas {
			p, _ := s.reader(b)
			s.must(p.stop())
		}
	}
	s.asked = s.send(s.ask)
	switch {
	case unread && held:
		if s.find(); s.missed {
			s.t.Fatalf("the answer is over and nothing was held back: %d %v", s.asked.Status, s.asked.Err)
		}
	case unread:
		s.await("the request in a socket", func() bool {
			for _, b := range s.replicas {
				if p, port := s.reader(b); p.unread(port, 2000) {
					s.victim = b
				}
			}
			return s.victim != nil
		})
		for _, b := range s.replicas {
			if p, _ := s.reader(b); b != s.victim {
				s.must(p.wake())
			}
		}
		s.heard()
	default:
		s.victim, _ = s.awaitEntry("the engine to be at "+s.point.name, func(e simengine.Entry) bool {
			return e.Event == simengine.EventFault && e.Attempt == 1
		})
	}
	if e := s.victim.engine(); !e.stopped && s.stall > 0 {
		s.must(e.stop()) // else it goes nowhere by itself
	}
	if s.begun() {
		switch all := s.ask.tokens * s.ask.n; s.point.name {
		case "first":
			s.has(s.asked, "·", 1)
		case "last":
			s.has(s.asked, "·", all-1)
		default:
			s.has(s.asked, `"finish_reason":"`, s.ask.n)
		}
	}
	s.tell("replica %s is at %s, stream %v", s.victim.name, s.point.name, s.ask.stream)
}

// heard waits until all replicas but the victim were found healthy, and their
// guards heard, a moment ago: on a busy machine they stood still for long, and
// nothing is dispatched to one that was not.
func (s *story) heard() {
	s.t.Helper()
	s.await("the other replicas to be heard", func() bool {
		return !slices.ContainsFunc(s.guardians(), func(g guardian) bool {
			return g.endpoint != s.victim.url() && (g.health != "healthy" || !g.Up || g.Age < 0 || g.Age > heartbeat.Seconds())
		})
	})
}

// await is poll that fails the test.
func (s *story) await(what string, holds func() bool) {
	s.t.Helper()
	if err := poll(what, holds); err != nil {
		s.t.Fatalf("%v\n%s", err, s.engineLogs())
	}
}

// strike carries the fault out. The engine stands still meanwhile: on a busy
// machine it would be past the point before a link is cut.
func (s *story) strike() {
	s.t.Helper()
	s.struck = time.Now()
	var stopped []*process
	if s.fault.stops != nil {
		stopped = s.fault.stops(s.victim)
	}
	for _, p := range stopped {
		s.must(p.stop())
	}
	if s.fault.strike != nil {
		s.fault.strike(s)
	}
	s.tell("%s", s.fault.name)
	for _, p := range slices.Concat(s.victim.engines, s.victim.guards) {
		if p.stopped && !slices.Contains(stopped, p) {
			s.must(p.wake())
		}
	}
	if s.fault.then != nil {
		s.fault.then(s)
	}
}

// settle waits for the client's answer, judges how it ended, and mends what the
// fault broke.
func (s *story) settle() ending {
	s.t.Helper()
	s.watch()
	got := endingOf(s.asked.Answer)
	s.tell("the client has: %s", got)
	if s.missed {
		s.mend()
		return got
	}
	if got != lost {
		rec, err := s.record(s.asked.Request)
		s.must(err)
		if all := rec.Attempts; len(all) > 0 && !all[0].EndedAt.IsZero() && all[0].EndedAt.Before(s.struck) {
			s.missed = true
			s.mend()
			return got
		}
	}
	table.add(cell{s.fault.name, s.point.name, s.guarded}, got)
	s.measure(got)
	want := s.want.before
	if s.begun() {
		want = s.want.after
		if s.point.over && !slices.Contains(want, lost) {
			want = []ending{whole}
		}
	}
	if !slices.Contains(want, got) {
		s.t.Errorf("the client has %q, want one of %q: %d %v\n%s\n%s", got, want, s.asked.Status, s.asked.Err, clip(s.asked.Body), s.engineLogs())
	}
	s.mend()
	return got
}

func (s *story) mend() {
	s.t.Helper()
	if s.fault.stops != nil {
		for _, p := range s.fault.stops(s.victim) {
			s.must(p.wake())
		}
	}
	if s.fault.mend != nil {
		s.fault.mend(s)
	}
	s.tell("mended")
}

// outlive: whatever was broken, the gateway serves on.
func (s *story) outlive() {
	s.t.Helper()
	s.await("a whole answer after it", func() bool {
		if !s.gateway().alive() {
			s.t.Fatalf("the gateway ended: %v", s.gateway().cmd.ProcessState)
		}
		return endingOf(s.answered(s.send(ask{path: s.ask.path, stream: s.ask.stream, tokens: 3, n: 1}))) == whole
	})
}

// finish judges the run.
func (s *story) finish(got ending) {
	s.t.Helper()
	if got == lost {
		s.reopen()
	} else if s.rec = s.agree(s.asked); !s.point.over && !s.missed {
		s.counted()
	}
	s.judge()
	s.silent()
	s.terminate()
	s.replay()
	table.count("tokens that old replicas sent when the client's answer was over", s.late())
}

// counted judges how many attempts the journal has.
func (s *story) counted() {
	s.t.Helper()
	rec := s.rec
	want := s.want.times
	if s.begun() {
		want = once
	}
	switch n := len(rec.Attempts); {
	case want == once && n != 1:
		s.t.Errorf("I2, I3: %d attempts, want 1: %+v\n%s", n, rec, s.engineLogs())
	case want == repeated && n < 2:
		s.t.Errorf("%d attempts, want another one: %+v\n%s", n, rec, s.engineLogs())
	case want == repeated:
		s.await("an attempt elsewhere", func() bool { // the engine's log may be on its way
			return slices.ContainsFunc(s.attempts(), func(e simengine.Entry) bool { return e.Engine != s.victim.name || e.Incarnation > 1 })
		})
	}
}

// measure keeps how long the client or the next attempt had to wait.
func (s *story) measure(got ending) {
	if got == notFenced {
		table.measure("from "+s.fault.name+" to 503 source_not_fenced", s.asked.over.Sub(s.struck))
	}
	if all := s.attempts(); s.guarded && len(all) > 1 && s.want.times == repeated {
		table.measure(fmt.Sprintf("guards, ttl %v: from %s to the second attempt", ttl, s.fault.name), all[len(all)-1].T.Sub(s.struck))
	}
}

// reopen judges what a gateway that was killed left of a request: its journal
// says no less than the client has, and the same key leads to one answer or to
// the truth.
func (s *story) reopen() {
	s.t.Helper()
	arrived := s.arrivals()[0]
	rec := s.finished(arrived.Request)
	if got := s.asked.Body; !rec.FirstDelta && len(got) > 0 {
		s.t.Errorf("I9: the journal says that nothing was sent, and the client has %s", got)
	}
	var again *asked
	s.await("an answer to the same key", func() bool {
		q := s.ask
		q.fault = ""
		again = s.send(q)
		return s.answered(again).Status != http.StatusConflict
	})
	got := endingOf(again.Answer)
	s.tell("the journal: %+v; the same key: %s", rec, got)
	if again.Request != arrived.Request {
		s.t.Errorf("the same key leads to request %s, not %s", again.Request, arrived.Request)
	}
	want := whole
	if rec.FirstDelta {
		want = refused(http.StatusBadRequest, "upstream_decode_interrupted")
		again.told = true
	}
	// At its end an answer may have been stored before its last bytes were written.
	if got != want && !(s.point.over && got == whole) {
		s.t.Errorf("the same key leads to %q, want %q", got, want)
	}
}
