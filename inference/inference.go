// SPDX-License-Identifier: Apache-2.0

// Package inference is the vocabulary that every part of Headgate shares:
// requests, endpoints, attempts, outcomes, token counts and error codes.
//
// It owns names and the tables that go with them, and no behaviour: it decides
// nothing, does no I/O, and imports only the standard library, so that any
// other package may import it. docs/glossary.md explains each word.
package inference

import "time"

// RequestID names one logical request from arrival to its terminal outcome:
// "req_" followed by a ULID. It is Headgate's own; a client's x-request-id is
// kept beside it and never trusted as identity.
type RequestID string

// EndpointID names one endpoint of a pool: its URL in canonical form
// (scheme://host:port, IPv6 hosts in brackets).
type EndpointID string

// Phase is how far a logical request has come.
type Phase uint8

// Phases, in order. A request never goes back to an earlier one, except that a
// request whose attempt failed before its first delta is queued again and its
// phase stays Prefill.
const (
	Received Phase = iota // accepted, not yet placed
	Queued                // waiting for an endpoint
	Prefill               // dispatched; the client has received nothing
	Decode                // the first delta was sent
	Terminal              // one Outcome is fixed
)

var phaseNames = [...]string{"received", "queued", "prefill", "decode", "terminal"}

func (p Phase) String() string { return name(phaseNames[:], int(p)) }

// Outcome is how a logical request ended. Exactly one is reached per request.
type Outcome uint8

// Outcomes.
const (
	NoOutcome   Outcome = iota // still running
	Completed                  // the whole answer was handed to the kernel
	Interrupted                // failed after the first delta
	Failed                     // failed before the first delta
	Rejected                   // never dispatched
	Cancelled                  // the client went away
)

var outcomeNames = [...]string{"", "completed", "interrupted", "failed", "rejected", "cancelled"}

func (o Outcome) String() string { return name(outcomeNames[:], int(o)) }

// ParseOutcome reads what String writes; anything else is NoOutcome.
func ParseOutcome(s string) Outcome {
	for o, name := range outcomeNames {
		if name == s {
			return Outcome(o)
		}
	}
	return NoOutcome
}

// Verdict is what an attempt's end was judged to mean. The classifier in
// internal/attempt derives it from evidence.
type Verdict uint8

// Verdicts.
const (
	NoVerdict   Verdict = iota
	NotStarted          // the engine never had the whole request
	Dead                // the engine process is proved gone
	Closed              // the connection closed; the engine may live on
	Uncertain           // nothing is known of the old attempt
	Overloaded          // alive but slower than a limit allows
	Refused             // the engine answered, and the answer is the client's to see
	Ended               // the engine refused for now (429, 503)
	EngineError         // the engine answered, wrongly
	ClientGone          // the client closed its side
	Finished            // the answer is complete
)

var verdictNames = [...]string{"", "not_started", "dead", "closed", "uncertain", "overloaded",
	"refused", "ended", "engine_error", "client_gone", "finished"}

func (v Verdict) String() string { return name(verdictNames[:], int(v)) }

// Proof is why an old attempt is known to publish nothing any more.
type Proof uint8

// Proofs. ProofTransport is the weakest: the connection is closed and the pool
// serves text only.
const (
	NoProof Proof = iota
	ProofNotStarted
	ProofEnded
	ProofDead
	ProofCancelAck
	ProofLeaseExpired
	ProofTransport
)

var proofNames = [...]string{"", "not_started", "ended", "dead", "cancel_ack", "lease_expired", "transport"}

func (p Proof) String() string { return name(proofNames[:], int(p)) }

// FenceLevel is how an attempt can be fenced. It is fixed at dispatch.
type FenceLevel uint8

// Fence levels.
const (
	FenceTransport FenceLevel = iota // no guard: closing the connection is all there is
	FenceLease                       // a guard beside the engine enforces a lease
)

var fenceNames = [...]string{"transport", "lease"}

func (f FenceLevel) String() string { return name(fenceNames[:], int(f)) }

// TokenSource says how a token count was come by, least exact first.
type TokenSource uint8

// Token sources.
const (
	Estimated TokenSource = iota // from bytes and a learned ratio
	Counted                      // from output events or logprob entries
	Reported                     // by the engine's usage
)

var sourceNames = [...]string{"estimated", "counted", "reported"}

func (s TokenSource) String() string { return name(sourceNames[:], int(s)) }

// Tokens is a number of tokens with its source.
type Tokens struct {
	N      int
	Source TokenSource
}

// Usage is what an engine reports about one answer. A negative number means
// that the engine did not report it.
type Usage struct {
	Prompt     int
	Completion int
	Cached     int // prompt tokens served from the prefix cache
}

// Health is what probes say of an endpoint.
type Health uint8

// Health states. An endpoint that was not probed yet is Healthy: a gateway that
// has just started must not refuse what it could serve.
const (
	Healthy   Health = iota
	Unhealthy        // it answers, wrongly or too late
	Gone             // nothing can be reached at its address
)

var healthNames = [...]string{"healthy", "unhealthy", "gone"}

func (h Health) String() string { return name(healthNames[:], int(h)) }

// Endpoint is one engine address of a pool, as configured or discovered.
type Endpoint struct {
	ID       EndpointID
	URL      string // base URL, http or https, without a trailing slash
	Revision string // model revision, "" when unknown
	Guard    string // its guard's control port as host:port, GuardAuto, or "" for none
	Labels   Labels // that the configuration gave it
}

// GuardAuto says that an endpoint has a guard, which tells its control port when
// it is asked at the endpoint's own address.
const GuardAuto = "auto"

// Limits on how long one attempt may take. A zero limit is off.
type Timeouts struct {
	Connect     time.Duration // TCP and TLS set-up
	FirstOutput time.Duration // dispatch to first output, streaming answers only
	Idle        time.Duration // silence of the engine after it, streaming answers only
	AfterFinish time.Duration // silence after the last finish_reason
	Total       time.Duration // one attempt in all
}

func name(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return "unknown"
}
