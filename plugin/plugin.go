// SPDX-License-Identifier: Apache-2.0

// Package plugin is what a routing plugin is given and may answer. A decision
// filters the endpoints of a pool, scores those that are left and picks one;
// each plugin does one of these. Plugins live one folder each below plugins, and
// a line in plugins/standard makes one known. The runtime knows these interfaces
// and no plugin.
//
// A plugin is called under the lock of its pool's book, many thousand times a
// second: it allocates nothing, waits for nothing and keeps no pointer that it
// was handed. It has no clock and no source of randomness but those in Request,
// so that a decision can be played again. Plugins of other modules implement the
// same interfaces; see docs/routing.md.
package plugin

import (
	"math/rand/v2"
	"time"

	"github.com/headgate/headgate/inference"
)

// Request is what is known of the request that needs an endpoint.
type Request struct {
	Now     time.Time
	Model   string // as engines know it
	Adapter string // LoRA adapter, "" for none
	Session string // from a header or a field of the body, "" for none
	Retry   bool   // not the first attempt

	Prompt inference.Tokens // of the whole prompt
	Output float64          // expected tokens of the answer
	Waited time.Duration    // since it arrived
	TTFT   time.Duration    // target for its first output; 0: none
	TPOT   time.Duration    // target per output token after that; 0: none

	Rand *rand.Rand
}

// Candidate is one endpoint, as the gateway knows it at this moment.
type Candidate struct {
	Endpoint *inference.Endpoint

	InFlight int // requests of this gateway there now
	Ghosts   int // quick errors that still count as load
	Cached   int // prompt tokens that its cache probably holds, less than the prompt

	// What its own traffic has taught, in seconds.
	Ahead     float64 // prefill that it has yet to do before it could begin
	PerToken  float64 // prefill of one token; more where attention is long
	Intercept float64 // fixed cost of a first output
	Waiting   float64 // prompt tokens without a first output yet
	Context   float64 // prompt tokens of streams that have one
	Stalls    Stalls  // nil: no stream is known to run

	// What the engine's own metrics say. Not Known is neither zero nor full.
	Queued  Value // requests that wait in the engine, with those sent since it was asked
	Running Value // requests that run there
	KVUsage Value // share of KV memory in use, 0 to 1

	// Others is the load there that this gateway did not put there, in requests,
	// as far as the engine's metrics tell; 0 where they don't.
	Others float64

	Resident bool // the request's adapter was used there lately
}

// Load is what the endpoint carries, in requests.
func (c *Candidate) Load() float64 { return float64(c.InFlight+c.Ghosts) + c.Others }

// Value is a measurement that may be missing or too old.
type Value struct {
	V     float64
	Known bool
}

// Stalls tells what a prefill does to the streams of an engine.
type Stalls interface {
	// At is how many of the running streams are expected to end over their
	// token-time target if the engine does nothing but prefill for that long.
	At(seconds float64) float64
}
