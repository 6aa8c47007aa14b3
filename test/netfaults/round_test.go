// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/test/real"
)

// A point is how far an answer is when a fault strikes.
type point struct {
	name   string
	engine string // of the script that holds the engine there; "" holds nothing
	begun  bool   // the client of a stream has a part of the answer
	over   bool   // and all of it but the end marker
}

// points are where decisions change, in order. LAST is the answer's last token.
var points = []point{
	{name: "unread"},                         // the request is with the engine's kernel
	{name: "accepted", engine: "head"},       // it was read, nothing is answered
	{name: "head", engine: "headers"},        // the head of the answer is out
	{name: "computed", engine: "computed:1"}, // the first token is computed and not sent
	{name: "first", engine: "token:1", begun: true},
	{name: "last", engine: "computed:LAST", begun: true},
	{name: "finish", engine: "finish", begun: true, over: true},
}

// stallTime is how long an engine is held at a point, unless a fault ends it. A
// replica that was stopped or cut off speaks when it is over.
const stallTime = 700 * time.Millisecond

// limit is what a silent engine is given where silence is the fault: longer than
// stallTime, so that a process that is woken after it has something to say.
const limit = time.Second

// A fault is something that is done to a replica, its link or the gateway.
type fault struct {
	name   string
	hold   bool                       // with a relay, which holds bytes back
	forget bool                       // the engine never goes on by itself
	limits []string                   // the pool's timeouts, if silence must end it
	strike func(s *story)             // at the point
	mend   func(s *story)             // when the client's answer is over
	before []ending                   // what clients may get that have nothing yet
	after  []ending                   // that have a part
	check  func(s *story, rec record) // what else must hold
}

func timeouts(first, idle, total time.Duration) []string {
	return []string{fmt.Sprintf("timeouts: {connect: 500ms, first_output: %v, idle: %v, after_finish: 300ms, total: %v}", first, idle, total)}
}

var (
	patient   = timeouts(30*time.Second, 30*time.Second, 50*time.Second)
	impatient = timeouts(limit, limit, limit)
	idles     = timeouts(30*time.Second, limit, 50*time.Second)
)

var faults = []fault{
	{
		name: "kill", forget: true, limits: patient,
		strike: func(s *story) { s.victim.kill() },
		before: []ending{whole}, after: []ending{interrupted},
		check: (*story).repeated,
	},
	{
		name: "restart", forget: true, limits: patient,
		strike: func(s *story) {
			s.victim.kill()
			s.must(s.victim.launch())
			s.must(s.victim.await())
		},
		before: []ending{whole}, after: []ending{interrupted},
		check: (*story).repeated,
	},
	{
		name: "stop", limits: impatient,
		strike: func(s *story) { s.must(s.victim.engine().stop()) },
		mend:   func(s *story) { s.must(s.victim.engine().wake()) },
		before: []ending{timedOut}, after: []ending{interrupted},
		check: (*story).notRepeated,
	},
	{
		name: "cut", limits: idles,
		strike: func(s *story) { s.cut(s.victim, true, true, 0) },
		mend:   func(s *story) { s.heal() },
		before: []ending{notFenced}, after: []ending{interrupted},
		check: (*story).notRepeated,
	},
	{
		name: "cut replies", limits: idles,
		strike: func(s *story) { s.cut(s.victim, false, true, 0) },
		mend:   func(s *story) { s.heal() },
		before: []ending{notFenced}, after: []ending{interrupted},
		check: (*story).notRepeated,
	},
	{
		// What the engine says gets through, until the gateway gives it up.
		name: "cut requests", limits: idles,
		strike: func(s *story) { s.cut(s.victim, true, false, 0) },
		mend:   func(s *story) { s.heal() },
		before: []ending{notFenced, whole, interrupted}, after: []ending{whole, interrupted},
		check: (*story).notRepeated,
	},
	{
		name: "link down", limits: idles,
		strike: func(s *story) { s.must(s.victim.node.up(false)) },
		mend:   func(s *story) { s.must(s.victim.node.up(true)) },
		before: []ending{notFenced}, after: []ending{interrupted},
		check: (*story).notRepeated,
	},
	{
		name: "hold", hold: true, limits: impatient,
		strike: func(s *story) { s.catch() },
		mend:   func(s *story) { s.held.Release() },
		before: []ending{timedOut}, after: []ending{interrupted},
		check: (*story).notRepeated,
	},
	{
		// Slow is no failure: what comes late is the answer.
		name: "delay", hold: true, limits: patient,
		strike: func(s *story) {
			s.catch()
			s.await("bytes to be held back", func() bool { return s.holds() || s.asked.isOver() })
			s.held.Release()
		},
		before: []ending{whole}, after: []ending{whole},
		check: (*story).notRepeated,
	},
	{
		name: "kill gateway", forget: true, limits: patient,
		strike: func(s *story) { s.gateway().kill() },
		mend:   func(s *story) { s.serve() },
		before: []ending{lost}, after: []ending{lost},
	},
}

// A story is a run of one cell.
type story struct {
	*run
	fault  fault
	point  point
	ask    ask
	asked  *asked
	victim *replica
	struck time.Time
	stall  time.Duration

	hold  *real.Hold
	held  *real.Conn
	armed atomic.Bool // the hold lets nothing more through
}

// begun says that the client has a part of the answer.
func (s *story) begun() bool { return s.ask.stream && s.point.begun }

func TestRounds(t *testing.T) {
	for round := range *roundsFlag {
		seed := *seedFlag + uint64(round)
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			for _, f := range faults {
				for _, p := range points {
					t.Run(f.name+"/"+p.name, func(t *testing.T) {
						t.Parallel()
						play(t, seed, f, p, nil)
					})
				}
			}
		})
	}
}

// play plays one cell. edit changes what was drawn.
func play(t *testing.T, seed uint64, f fault, p point, edit func(*story)) *story {
	s := &story{run: newRun(t, seed, 2), fault: f, point: p, stall: stallTime}
	s.draw()
	if edit != nil {
		edit(s)
	}
	s.relayed = f.hold
	s.pool = append(s.pool, f.limits...)
	if s.point.over && s.ask.stream {
		s.pool = slices.Concat(s.pool[:len(s.pool)-1], idles) // the marker's limit is what counts
	}
	s.start()
	s.reach()
	s.strike()
	got := s.settle()
	s.outlive()
	s.finish(got)
	return s
}

// draw decides what is asked.
func (s *story) draw() {
	one := func(n int) bool { return s.rnd.IntN(n) == 0 }
	s.ask = ask{path: "/v1/chat/completions", stream: !one(3), tokens: 2 + s.rnd.IntN(12), n: 1, pad: 4000 + s.rnd.IntN(30000)}
	if one(4) {
		s.ask.path = "/v1/completions"
	}
	if one(4) {
		s.ask.n = 2
	}
	if one(3) {
		s.journal = "strict"
	}
	if one(3) || s.fault.name == "kill gateway" {
		s.ask.key = "key-1"
	}
	if s.fault.hold {
		s.pool = append(s.pool, "health: {interval: 0s}") // a probe must not be what is held
	} else {
		s.pool = append(s.pool, "health: {interval: 100ms, timeout: 300ms}")
	}
}

// script is the fault script that holds the engine of the first attempt.
func (s *story) script() string {
	if s.point.engine == "" {
		return ""
	}
	script := "attempt=1;stall@" + strings.ReplaceAll(s.point.engine, "LAST", fmt.Sprint(s.ask.tokens*s.ask.n))
	if !s.fault.forget {
		script += ":" + s.stall.String()
	}
	return script
}

// reach brings the request to the point and finds out which replica has it.
func (s *story) reach() {
	s.t.Helper()
	s.ask.fault = s.script()
	if s.fault.hold {
		s.arm()
	}
	if s.point.name == "unread" && !s.fault.hold {
		for _, b := range s.replicas {
			s.must(b.engine().stop())
		}
	}
	s.asked = s.send(s.ask)
	switch {
	case s.point.name == "unread" && s.fault.hold:
		s.find()
	case s.point.name == "unread":
		s.await("the request in an engine's socket", func() bool {
			for _, b := range s.replicas {
				if b.engine().unread(dataPort, 2000) {
					s.victim = b
				}
			}
			return s.victim != nil
		})
		for _, b := range s.replicas {
			if b != s.victim {
				s.must(b.engine().wake())
			}
		}
	default:
		s.victim, _ = s.awaitEntry("the engine to be at "+s.point.name, func(e simengine.Entry) bool {
			return e.Event == simengine.EventFault && e.Attempt == 1
		})
	}
	if s.begun() {
		have := 1
		if s.point.name != "first" {
			have = s.ask.tokens*s.ask.n - 1
		}
		s.tokens(s.asked, have)
	}
	s.tell("replica %s is at %s, stream %v", s.victim.name, s.point.name, s.ask.stream)
}

// await is poll that fails the test.
func (s *story) await(what string, holds func() bool) {
	s.t.Helper()
	if err := poll(what, holds); err != nil {
		s.t.Fatalf("%v\n%s", err, s.story())
	}
}

func (s *story) strike() {
	s.t.Helper()
	s.struck = time.Now()
	s.fault.strike(s)
	s.tell("%s", s.fault.name)
	if e := s.victim.engine(); e.stopped && s.fault.name != "stop" {
		s.must(e.wake()) // it reads the request now
	}
}

// settle waits for the client's answer, judges how it ended, and mends what the
// fault broke.
func (s *story) settle() ending {
	s.t.Helper()
	s.answered(s.asked)
	got := endingOf(s.asked.Answer)
	s.tell("the client has: %s", got)
	table.add(cell{s.fault.name, s.point.name, false}, got)
	if got == notFenced {
		table.measure("from "+s.fault.name+" to 503 source_not_fenced", s.asked.over.Sub(s.struck))
	}
	want := s.fault.before
	if s.begun() {
		want = s.fault.after
		if s.point.over && !slices.Contains(want, lost) {
			want = []ending{whole}
		}
	}
	if !slices.Contains(want, got) {
		s.t.Errorf("the client has %q, want one of %q: %d %v\n%s\n%s", got, want, s.asked.Status, s.asked.Err, clip(s.asked.Body), s.story())
	}
	s.mend()
	return got
}

func (s *story) mend() {
	s.t.Helper()
	if s.fault.mend != nil {
		s.fault.mend(s)
		s.tell("mended")
	}
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
	} else if rec := s.agree(s.asked); s.fault.check != nil && !s.point.over {
		s.fault.check(s, rec)
	}
	s.judge()
	s.terminate()
	s.replay()
	table.count("tokens that old replicas sent when the client's answer was over", s.late())
}

// repeated: a failure before the first delta was followed by another attempt,
// elsewhere; one after it by none.
func (s *story) repeated(rec record) {
	s.t.Helper()
	n := 0
	elsewhere := false
	for _, e := range s.arrivals() {
		if e.Request == s.asked.Request {
			n++
			elsewhere = elsewhere || e.Engine != s.victim.name || e.Incarnation > 1
		}
	}
	if s.begun() {
		s.notRepeated(rec)
	} else if !elsewhere || len(rec.Attempts) < 2 {
		s.t.Errorf("%d attempts reached engines, the journal has %d, and none is another engine's\n%s", n, len(rec.Attempts), s.story())
	}
}

// notRepeated: engines got one attempt.
func (s *story) notRepeated(rec record) {
	s.t.Helper()
	if len(rec.Attempts) != 1 {
		s.t.Errorf("I2, I3: %d attempts, want 1: %+v\n%s", len(rec.Attempts), rec, s.story())
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
	if got != want {
		s.t.Errorf("the same key leads to %q, want %q", got, want)
	}
}

// arm puts one hold on all relays. It catches the request's connection: towards
// the engine all of it, towards the gateway what comes once catch was called.
func (s *story) arm() {
	s.hold = &real.Hold{Direction: real.ToGateway}
	if s.point.name == "unread" {
		s.hold.Direction = real.ToEngine
	} else {
		passed := 0
		s.hold.Pass = func(since []byte) int {
			if !s.armed.Load() {
				passed = len(since)
			}
			return passed
		}
	}
	for _, b := range s.replicas {
		b.relay.Hold(s.hold)
	}
}

// find waits until the hold has its connection, and learns whose it is.
func (s *story) find() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	s.held, err = s.hold.Caught(ctx)
	s.must(err)
	for _, b := range s.replicas {
		if slices.Contains(b.relay.Conns(), s.held) {
			s.victim = b
		}
	}
}

// catch begins to hold back.
func (s *story) catch() {
	s.t.Helper()
	s.armed.Store(true)
	s.find()
}

// holds says that bytes are held back.
func (s *story) holds() bool {
	record, passed := s.held.Bytes(s.hold.Direction)
	return len(record) > passed
}
