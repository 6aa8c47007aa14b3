// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"fmt"
	"time"
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
	hits   hits                        // whom it keeps from going on
	starts bool                        // the guards have started their engines
	strike func(s *story)              // at the point, where the engine is kept by SIGSTOP meanwhile
	stops  func(b *replica) []*process // who is stopped
	then   func(s *story)              // when the others go on
	mend   func(s *story)              // when the client's answer is over

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
		name: "kill child", hits: guardHit, starts: true,
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
		name:  "stop",
		stops: func(b *replica) []*process { return []*process{b.engine()} },
		bare:  silent, guarded: silent,
	},
	{
		name: "stop guard", hits: guardHit,
		stops:   func(b *replica) []*process { return []*process{b.guard()} },
		guarded: woken, // with what the engine said meanwhile before it
	},
	{
		name: "stop both", hits: guardHit,
		stops:   func(b *replica) []*process { return []*process{b.guard(), b.engine()} },
		guarded: woken, // the old replica wakes up
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

func (f fault) expects(guarded bool) *expectation {
	if guarded {
		return f.guarded
	}
	return f.bare
}
