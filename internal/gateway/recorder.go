// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"time"

	"github.com/headgate/headgate/inference"
)

// Recorder takes the gateway's measurements. Implementations bound their
// labels: a model is whatever a client wrote. All methods may be called from
// any goroutine.
type Recorder interface {
	// Request: one request ended. pool and model are "" where it got no pool.
	Request(pool, model string, outcome inference.Outcome, code inference.Code)
	// FirstOutput: the first output came so long after the request's arrival.
	FirstOutput(pool, model string, after time.Duration)
	// Gap: the time between two writes of output to one client.
	Gap(pool, model string, gap time.Duration)
	// Waited: a request of that priority got a place after waiting so long for it.
	Waited(pool string, priority int, wait time.Duration)
	// Predicted: a request that had to wait was expected to have its first output
	// after predicted, and had it after actual, both from its arrival.
	Predicted(pool string, predicted, actual time.Duration)
	// Attempt: one attempt ended.
	Attempt(pool string, verdict inference.Verdict, proof inference.Proof)
	// Retry: an attempt is repeated after such a verdict.
	Retry(pool string, after inference.Verdict)
	// RetryDenied: it is not, for this reason.
	RetryDenied(pool string, reason inference.Code)
	// RateLimited: a request of a key was refused because of this limit.
	RateLimited(key, limit string)
	// Woke: a pool's engines were asked for or let go (event), or it did not go well.
	Woke(pool, event string, ok bool)
	// LateChunks: writes that a closed gate stopped.
	LateChunks(n int)
}

type discard struct{}

func (discard) Request(string, string, inference.Outcome, inference.Code) {}
func (discard) FirstOutput(string, string, time.Duration)                 {}
func (discard) Gap(string, string, time.Duration)                         {}
func (discard) Waited(string, int, time.Duration)                         {}
func (discard) Predicted(string, time.Duration, time.Duration)            {}
func (discard) Attempt(string, inference.Verdict, inference.Proof)        {}
func (discard) Retry(string, inference.Verdict)                           {}
func (discard) RetryDenied(string, inference.Code)                        {}
func (discard) RateLimited(string, string)                                {}
func (discard) Woke(string, string, bool)                                 {}
func (discard) LateChunks(int)                                            {}
