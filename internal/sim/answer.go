// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"time"

	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/guard/roster"
	"github.com/headgate/headgate/internal/mutation"
	"github.com/headgate/headgate/internal/sim/check"
)

// fromAttempt runs what the attempt's own reader does, in order.
func (f *flight) fromAttempt(fn func()) {
	if f.waiting {
		f.queue = append(f.queue, fn)
		return
	}
	fn()
}

// chunk takes one chunk of an answer.
func (f *flight) chunk(c *conn, last bool) {
	f.fromAttempt(func() {
		n := c.key.N
		if n != f.n {
			return // of an attempt that was given up: the machine would not hear of it
		}
		f.moved = f.g.now()
		switch {
		case f.c.ask.Whole:
			f.held++
		case f.committed:
			if event := f.written(n, f.gate.Publish(n, f, []byte{byte(n)}, 1, 1)); event != nil {
				f.step(event)
				return
			}
		case mutation.BitAfterWrite:
			f.held++
			f.leaked = true
			if f.gate.Commit(n, func() (attempt.Counters, error) { return attempt.Counters{}, f.deliver(n, check.Output) }) == nil {
				f.committed = true
				f.g.after(f.w.between(time.Millisecond, 20*time.Millisecond), func() { f.step(attempt.FirstOutput{N: n, Stream: true}) })
			}
		default:
			f.held++
			f.step(attempt.FirstOutput{N: n, Stream: true})
		}
		if last {
			f.fromAttempt(func() { f.step(attempt.Answered{N: n, Stream: !f.c.ask.Whole}) })
		}
	})
}

// errorEvent is an engine's error inside its answer.
func (f *flight) errorEvent(c *conn, status int) {
	f.fromAttempt(func() {
		f.step(attempt.Evidence{N: c.key.N, Kind: attempt.ErrorEvent, Status: status, Passable: true})
	})
}

// closed: the connection ended before the answer did.
func (f *flight) closed(c *conn, reset bool) {
	f.fromAttempt(func() {
		kind := attempt.PeerClosed
		if reset {
			kind = attempt.PeerReset
		}
		f.step(attempt.Evidence{N: c.key.N, Kind: kind})
	})
}

// engineSaid is an answer of the guard's: the engine's 503, or that there is no
// engine to ask.
func (f *flight) engineSaid(c *conn, busy bool) {
	f.fromAttempt(func() {
		f.step(attempt.Evidence{N: c.key.N, Kind: attempt.Answer, Status: 503, Stamped: busy, Passable: busy})
	})
}

var refusals = map[roster.Refusal]attempt.Kind{
	roster.StaleEpoch: attempt.StaleEpoch, roster.Duplicate: attempt.DuplicateAttempt, roster.WrongIncarnation: attempt.WrongIncarnation,
	roster.Expired: attempt.LeaseOver, roster.StaleGeneration: attempt.StaleGeneration, roster.Required: attempt.LeaseRequired,
}

func (f *flight) refused(c *conn, why roster.Refusal) {
	f.fromAttempt(func() { f.step(attempt.Evidence{N: c.key.N, Kind: refusals[why]}) })
}
