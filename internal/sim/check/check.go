// SPDX-License-Identifier: Apache-2.0

// Package check judges runs against simulated engines: did the gateway keep
// the invariants of docs/failover.md, section 10?
//
// It believes only two witnesses, the bytes that clients received and the logs
// of the engines, and reads both with code of its own: it imports nothing of
// the gateway, so that a mistake made there is not made here again. It checks
// I1 (one publisher), I2 (no attempt after the first delta), I4 (a true
// outcome), I6 (client gone), I7 (attempts and budget), I10 (nothing leaks),
// and of I5 that a pool whose engines run tools gets a request once. The other
// invariants need witnesses that a client and an engine are not: World judges a
// simulated world by facts that nobody in it knows, I3 and I8 among them.
//
// Engines write token 17 of attempt 1 on engine A as "A1·17 ", and of choice 2
// as "A1/2·17 ": a splice, a gap or a duplicate shows in the text itself. An
// engine's name must not end in a digit.
//
// Tests, the demo and the simulator call it: Read for one answer by itself,
// Judge for one answer beside the logs, Fleet once a run is over.
package check

import (
	"fmt"
	"time"
)

// Answer is what one client got.
type Answer struct {
	Request string // x-request-id; "" if the client saw none, see Identify
	Tag     string // what the client sent as TagHeader, "" for nothing

	Stream bool // a stream was asked for
	Status int  // 0: the client never saw a head
	Body   []byte
	Err    error // how reading head or body failed; nil is a clean end

	Left   bool      // the client went away by itself
	LeftAt time.Time // when it began to; zero: unknown

	// What was asked for; 0: not said, and not checked.
	MaxTokens int // tokens per choice
	Choices   int
}

// TagHeader is a request header that a gateway hands on to engines like any
// other that it does not know. With it the request of an answer without
// x-request-id is found in the engines' logs.
const TagHeader = "X-Check-Tag"

// Limits are what the pool's settings permit one request.
type Limits struct {
	MaxAttempts int // 0: not checked
	Resends     int // attempts on top of these, after a stale connection

	// ToolsOnce: the engines execute tools, so no second one may get a whole
	// request.
	ToolsOnce bool

	// Notice is how soon after a client left it must be noticed everywhere.
	// 0 means 500 ms.
	Notice time.Duration
}

func (l Limits) notice() time.Duration {
	if l.Notice == 0 {
		return 500 * time.Millisecond
	}
	return l.Notice
}

// Names of the invariants, as in docs/failover.md.
const (
	OnePublisher = "I1"
	NoRepeat     = "I2"
	TrueOutcome  = "I4"
	ActionsOnce  = "I5"
	ClientGone   = "I6"
	Bounded      = "I7"
	NothingLeaks = "I10"
)

// A Violation is one broken promise.
type Violation struct {
	Invariant string
	Request   string // the request, or its tag; "" when it is of no single one
	Saw       string
}

func (v Violation) Error() string {
	if v.Request == "" {
		return v.Invariant + ": " + v.Saw
	}
	return v.Invariant + ": " + v.Request + ": " + v.Saw
}

func (v Violation) String() string { return v.Error() }

func broken(invariant, format string, args ...any) error {
	return Violation{Invariant: invariant, Saw: fmt.Sprintf(format, args...)}
}
