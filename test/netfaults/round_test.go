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
const stallTime = time.Second

// limit is what a silent engine is given where silence is the fault: longer than
// stallTime, so that a process that is woken after it has something to say.
const limit = 1200 * time.Millisecond

// A fault is something that is done to a replica, its link or the gateway.
type fault struct {
	name   string
	hits   hits           // whom it keeps from going on
	strike func(s *story) // at the point, where the engine is kept by SIGSTOP meanwhile
	stops  bool           // and the engine stays so
	then   func(s *story) // when it goes on
	mend   func(s *story) // when the client's answer is over

	bare, guarded *expectation // without guards and with them; nil: not played
}

// hits is where a request must be unread for a fault to come before it is read.
type hits int

const (
	engineHit hits = iota
	guardHit       // without guards the engine
	relayHit       // the relay holds bytes back
)

// expectation is what must come of a fault.
type expectation struct {
	limits []string      // the pool's timeouts, if silence must end it
	stall  time.Duration // of the engine; 0: for ever
	before []ending      // what clients may get that have nothing yet
	after  []ending      // that have a part

	// times is how many attempts the journal must have of an answer that had not
	// begun: once, or more than once. Of one that had begun it is one.
	times times
}

type times int

const (
	anyTimes times = iota
	once
	repeated
)

func timeouts(first, idle, total time.Duration) []string {
	return []string{fmt.Sprintf("timeouts: {connect: 500ms, first_output: %v, idle: %v, after_finish: 300ms, total: %v}", first, idle, total)}
}

var (
	patient   = timeouts(30*time.Second, 30*time.Second, 50*time.Second)
	impatient = timeouts(limit, limit, limit)
	idles     = timeouts(30*time.Second, limit, 50*time.Second)
)

// outlasts is a stall after which a lease is over that was not renewed.
const outlasts = ttl + stallTime

// What comes of a loss: of one that is known to be one, and of one that may not
// be.
var (
	known     = &expectation{patient, 0, []ending{whole}, []ending{interrupted}, repeated}
	silent    = &expectation{impatient, stallTime, []ending{timedOut}, []ending{interrupted}, once}
	uncertain = &expectation{idles, stallTime, []ending{notFenced}, []ending{interrupted}, once}
	withheld  = &expectation{impatient, stallTime / 5, []ending{timedOut}, []ending{interrupted}, once}
	slow      = &expectation{patient, stallTime / 5, []ending{whole}, []ending{whole}, once}
	fenced    = &expectation{patient, outlasts, []ending{whole}, []ending{interrupted}, repeated}
	woken     = &expectation{patient, stallTime, []ending{whole}, []ending{interrupted}, repeated}
	died      = &expectation{patient, 0, []ending{lost}, []ending{lost}, anyTimes}
)

var faults = []fault{
	{
		name:   "kill",
		strike: func(s *story) { s.must(s.victim.killEngine()) },
		bare:   known, guarded: known,
	},
	{
		name: "restart",
		strike: func(s *story) {
			s.must(s.victim.killEngine())
			s.must(s.victim.launch())
			s.must(s.victim.await())
		},
		bare: known, guarded: known,
	},
	{
		// The guard has started it, sees it die, and ends.
		name: "kill child", hits: guardHit,
		strike:  func(s *story) { s.must(s.victim.killEngine()) },
		guarded: known,
	},
	{
		name: "kill guard", hits: guardHit,
		strike:  func(s *story) { s.victim.guard().kill() },
		guarded: known,
	},
	{
		name: "restart guard", hits: guardHit,
		strike: func(s *story) {
			s.victim.guard().kill()
			s.must(s.victim.launchGuard())
			s.must(s.victim.await())
		},
		guarded: known,
	},
	{
		name: "kill both", hits: guardHit,
		strike: func(s *story) {
			s.victim.guard().kill()
			s.must(s.victim.killEngine())
		},
		guarded: known,
	},
	{
		name: "stop", stops: true,
		strike: func(*story) {},
		mend:   func(s *story) { s.must(s.victim.engine().wake()) },
		bare:   silent, guarded: silent,
	},
	{
		name: "stop guard", hits: guardHit,
		strike:  func(s *story) { s.must(s.victim.guard().stop()) },
		mend:    func(s *story) { s.must(s.victim.guard().wake()) },
		guarded: woken, // with what the engine said meanwhile before it
	},
	{
		name: "stop both", hits: guardHit, stops: true,
		strike: func(s *story) { s.must(s.victim.guard().stop()) },
		mend: func(s *story) { // the old replica wakes up
			s.must(s.victim.guard().wake())
			s.must(s.victim.engine().wake())
		},
		guarded: woken,
	},
	{
		name: "cut", hits: guardHit,
		strike: func(s *story) { s.cut(true, true, s.victim.link()...) },
		mend:   func(s *story) { s.heal() },
		bare:   uncertain, guarded: fenced,
	},
	{
		name: "cut replies", hits: guardHit,
		strike: func(s *story) { s.cut(false, true, s.victim.link()...) },
		mend:   func(s *story) { s.heal() },
		bare:   uncertain, guarded: fenced,
	},
	{
		// What the engine says gets through, until the gateway gives it up.
		name: "cut requests", hits: guardHit,
		strike:  func(s *story) { s.cut(true, false, s.victim.link()...) },
		mend:    func(s *story) { s.heal() },
		bare:    &expectation{idles, stallTime, []ending{notFenced, whole, interrupted}, []ending{whole, interrupted}, once},
		guarded: &expectation{idles, stallTime, []ending{whole, interrupted}, []ending{whole, interrupted}, anyTimes},
	},
	{
		// The guard is heard and confirms.
		name: "cut data", hits: guardHit,
		strike:  func(s *story) { s.cut(true, true, s.victim.dataWay()) },
		mend:    func(s *story) { s.heal() },
		guarded: &expectation{idles, outlasts, []ending{whole}, []ending{interrupted}, repeated},
	},
	{
		// A lease that nobody renews ends, whatever else works.
		name: "cut control", hits: guardHit,
		strike:  func(s *story) { s.cut(true, true, s.victim.controlWay()) },
		mend:    func(s *story) { s.heal() },
		guarded: fenced,
	},
	{
		name: "link down", hits: guardHit,
		strike: func(s *story) { s.must(s.victim.node.up(false)) },
		mend:   func(s *story) { s.must(s.victim.node.up(true)) },
		bare:   uncertain, guarded: fenced,
	},
	{
		name: "hold", hits: relayHit,
		strike: func(s *story) { s.armed.Store(true) },
		then:   func(s *story) { s.find() },
		mend: func(s *story) {
			if s.held != nil {
				s.held.Release()
			}
		},
		bare: withheld, guarded: withheld,
	},
	{
		// Slow is no failure: what comes late is the answer.
		name: "delay", hits: relayHit,
		strike: func(s *story) { s.armed.Store(true) },
		then: func(s *story) {
			if s.find(); s.held == nil {
				return
			}
			s.await("bytes to be held back", func() bool { return s.holds() || s.asked.isOver() })
			s.held.Release()
		},
		bare: slow, guarded: slow,
	},
	{
		name:   "kill gateway",
		strike: func(s *story) { s.gateway().kill() },
		mend:   func(s *story) { s.serve() },
		bare:   died, guarded: died,
	},
}

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

func TestRounds(t *testing.T) {
	for round := range *roundsFlag {
		seed := *seedFlag + uint64(round)
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			for _, f := range faults {
				for _, p := range points {
					for _, guarded := range []bool{false, true} {
						if f.expects(guarded) == nil {
							continue
						}
						t.Run(f.name+"/"+p.name+map[bool]string{true: "/guarded", false: "/bare"}[guarded], func(t *testing.T) {
							t.Parallel()
							play(t, seed, f, p, guarded, nil)
						})
					}
				}
			}
		})
	}
}

func (f fault) expects(guarded bool) *expectation {
	if guarded {
		return f.guarded
	}
	return f.bare
}

// play plays one cell. edit changes what was drawn.
func play(t *testing.T, seed uint64, f fault, p point, guarded bool, edit func(*story)) *story {
	t.Helper()
	for {
		s := playOnce(t, seed, f, p, guarded, edit)
		if !s.missed {
			return s
		}
		table.count("runs played again, because a lease or a limit ran out before the fault", 1)
	}
}

func playOnce(t *testing.T, seed uint64, f fault, p point, guarded bool, edit func(*story)) *story {
	s := &story{run: newRun(t, seed, 2), fault: f, want: f.expects(guarded), point: p}
	s.guarded, s.starts, s.relayed, s.stall = guarded, f.name == "kill child", f.hits == relayHit, s.want.stall
	s.draw()
	if edit != nil {
		edit(s)
	}
	if s.point.over && s.ask.stream {
		s.pool = append(s.pool, idles...) // the marker's limit is what counts
	} else {
		s.pool = append(s.pool, s.want.limits...)
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
	if s.guarded {
		s.relayed = s.relayed || one(2)
		if s.want == fenced && s.fault.name != "cut control" && one(2) {
			s.stall = stallTime // the engine speaks while the lease lasts
		}
		for _, b := range s.replicas {
			b.boot = s.rnd.IntN(2) * s.rnd.IntN(1_000_000)
		}
	}
	if s.fault.hits == relayHit {
		s.pool = append(s.pool, "health: {interval: 0s}", "scrape: {interval: 0s}") // nothing else must be what is held
	} else {
		s.pool = append(s.pool, "health: {interval: 100ms, timeout: 300ms}")
	}
}

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
	default:
		s.victim, _ = s.awaitEntry("the engine to be at "+s.point.name, func(e simengine.Entry) bool {
			return e.Event == simengine.EventFault && e.Attempt == 1
		})
	}
	if e := s.victim.engine(); !e.stopped {
		s.must(e.stop())
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

// strike carries the fault out. The engine stands still meanwhile: on a busy
// machine it would be past the point before a link is cut.
func (s *story) strike() {
	s.t.Helper()
	s.struck = time.Now()
	s.fault.strike(s)
	s.tell("%s", s.fault.name)
	stays := []*process{}
	if s.fault.stops {
		stays = append(stays, s.victim.engine())
	}
	if s.fault.name == "stop guard" || s.fault.name == "stop both" {
		stays = append(stays, s.victim.guard())
	}
	for _, p := range slices.Concat(s.victim.engines, s.victim.guards) {
		if p.stopped && !slices.Contains(stays, p) {
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
	if s.guarded && got != lost {
		rec, err := s.record(s.asked.Request)
		s.must(err)
		if len(rec.Attempts) > 1 && rec.Attempts[0].EndedAt.Before(s.struck) {
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
	rec := s.rec
	s.t.Helper()
	want := s.want.times
	if s.begun() {
		want = once
	}
	elsewhere := slices.ContainsFunc(s.attempts(), func(e simengine.Entry) bool { return e.Engine != s.victim.name || e.Incarnation > 1 })
	switch n := len(rec.Attempts); {
	case want == once && n != 1:
		s.t.Errorf("I2, I3: %d attempts, want 1: %+v\n%s", n, rec, s.story())
	case want == repeated && (n < 2 || !elsewhere):
		s.t.Errorf("%d attempts, want another one elsewhere: %+v\n%s", n, rec, s.story())
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
	if got != want {
		s.t.Errorf("the same key leads to %q, want %q", got, want)
	}
}

// watch waits for the end of the answer. When another attempt reaches an engine
// it notes how much the victim's guard had let through.
func (s *story) watch() {
	s.t.Helper()
	s.passed = -1
	s.await("an answer", func() bool {
		if s.passed < 0 && s.guarded && s.victim.relay != nil && len(s.attempts()) > 1 {
			s.passed = len(s.published())
		}
		return s.asked.isOver()
	})
	s.answered(s.asked)
}

// published is what came over the victim's relay as an answer to the request.
// A guard's own refusal is none.
func (s *story) published() (all []byte) {
	for _, x := range s.victim.relay.Posts() {
		if x.Request == s.attempts()[0].Request && x.Status == http.StatusOK {
			all = append(all, x.Body...)
		}
	}
	return all
}

// silent: from the moment when another attempt reached an engine the guard of the
// first one let nothing through (I3, I8), or it counted what came late.
func (s *story) silent() {
	s.t.Helper()
	if !s.guarded {
		return
	}
	late := 0
	for _, g := range s.guardians() {
		late += int(g.LateWrites)
	}
	table.count("late writes that guards counted", late)
	if s.passed < 0 {
		return
	}
	table.count("guards watched by a relay while another attempt ran", 1)
	if all := s.published(); len(all) > s.passed && late == 0 {
		s.t.Errorf("I8: guard %s let %d bytes through after another attempt had begun: %q", s.victim.name, len(all)-s.passed, clip(all[s.passed:]))
	}
}

// arm puts one hold on all relays. It catches the request's connection: towards
// the engine all of it, towards the gateway what comes once the fault struck.
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

// find waits until the hold has its connection, and learns whose it is. On a busy
// machine the answer may be over before the engine speaks.
func (s *story) find() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	go func() {
		select {
		case <-s.asked.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	held, err := s.hold.Caught(ctx)
	if err != nil {
		s.missed = true
		return
	}
	s.held = held
	for _, b := range s.replicas {
		if slices.Contains(b.relay.Conns(), s.held) {
			s.victim = b
		}
	}
}

// holds says that bytes are held back.
func (s *story) holds() bool {
	record, passed := s.held.Bytes(s.hold.Direction)
	return len(record) > passed
}
