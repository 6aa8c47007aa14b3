// SPDX-License-Identifier: Apache-2.0

package attempt

import (
	"fmt"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/mutation"
)

// Kind is one sort of evidence about an attempt's end.
type Kind uint8

// Kinds of evidence, grouped by what they usually mean.
const (
	ConnectRefused Kind = iota
	NameGone            // DNS has no such host
	EndpointGone        // the endpoint left the pool before anything was sent to it
	TLSFailed
	Unwritten // a fresh connection broke before the request was fully written

	EngineExited        // a guard saw the process exit
	ContainerTerminated // Kubernetes says so, from a Ready node
	NewIncarnation      // another engine process answers at the address
	GuardReplaced       // another guard holds the engine's lock

	PeerClosed      // FIN before the answer was complete
	PeerReset       // RST
	StaleConnection // a pooled connection was closed before any byte of an answer
	PodGone         // the pod object is gone

	ConnectTimeout
	NoRoute
	GuardLost // the guard session is down while the connection hangs
	ProbesFail
	EndpointRemoved
	Unknown // an I/O error that fits no other kind

	FirstOutputLimit
	IdleLimit
	TotalLimit

	// A guard refused the attempt. The first three did not start here.
	WrongIncarnation
	LeaseOver
	LeaseRequired
	DuplicateAttempt // it had started
	StaleEpoch       // another attempt of the request was there before
	StaleGeneration  // another life of this gateway was heard

	Answer     // a well-framed answer with a status other than success
	ErrorEvent // an error inside a successful answer
	Garbage    // not HTTP, not JSON, HTML, an undecodable coding
	Incomplete // well framed to its end, but not a complete answer

	kinds // count
)

var kindNames = [kinds]string{
	ConnectRefused: "connect_refused", NameGone: "name_gone", EndpointGone: "endpoint_gone", TLSFailed: "tls_failed", Unwritten: "unwritten",
	EngineExited: "engine_exited", ContainerTerminated: "container_terminated", NewIncarnation: "new_incarnation", GuardReplaced: "guard_replaced",
	PeerClosed: "peer_closed", PeerReset: "peer_reset", StaleConnection: "stale_connection", PodGone: "pod_gone",
	ConnectTimeout: "connect_timeout", NoRoute: "no_route", GuardLost: "guard_lost", ProbesFail: "probes_fail",
	EndpointRemoved: "endpoint_removed", Unknown: "unknown",
	FirstOutputLimit: "first_output_limit", IdleLimit: "idle_limit", TotalLimit: "total_limit",
	WrongIncarnation: "wrong_incarnation", LeaseOver: "lease_expired", LeaseRequired: "lease_required",
	DuplicateAttempt: "duplicate_attempt", StaleEpoch: "stale_epoch", StaleGeneration: "stale_generation",
	Answer: "answer", ErrorEvent: "error_event", Garbage: "garbage", Incomplete: "incomplete",
}

func (k Kind) String() string {
	if k < kinds {
		return kindNames[k]
	}
	return "invalid"
}

// limit names the timeout that a limit kind is about.
func (k Kind) limit() string {
	switch k {
	case FirstOutputLimit:
		return "first_output"
	case IdleLimit:
		return "idle"
	case TotalLimit:
		return "total"
	}
	return ""
}

// verdicts is the classifier: what each kind of evidence means by itself.
// Answer and ErrorEvent depend on their status, PodGone on the pool.
var verdicts = [kinds]inference.Verdict{
	ConnectRefused: inference.NotStarted,
	NameGone:       inference.NotStarted,
	EndpointGone:   inference.NotStarted,
	TLSFailed:      inference.NotStarted,
	Unwritten:      inference.NotStarted,

	EngineExited:        inference.Dead,
	ContainerTerminated: inference.Dead,
	NewIncarnation:      inference.Dead,
	GuardReplaced:       inference.Dead,

	// A closed connection is not proof of death: a middlebox closes too.
	PeerClosed:      inference.Closed,
	PeerReset:       inference.Closed,
	StaleConnection: inference.Closed,

	ConnectTimeout:  inference.Uncertain,
	NoRoute:         inference.Uncertain,
	GuardLost:       inference.Uncertain,
	ProbesFail:      inference.Uncertain,
	EndpointRemoved: inference.Uncertain,
	Unknown:         inference.Uncertain,

	FirstOutputLimit: inference.Overloaded,
	IdleLimit:        inference.Overloaded,
	TotalLimit:       inference.Overloaded,

	WrongIncarnation: inference.NotStarted,
	LeaseOver:        inference.NotStarted,
	LeaseRequired:    inference.NotStarted,
	DuplicateAttempt: inference.Closed,
	StaleEpoch:       inference.Uncertain,
	StaleGeneration:  inference.Uncertain,

	Garbage:    inference.EngineError,
	Incomplete: inference.EngineError,
}

func classify(e Evidence, policy Policy, fence inference.FenceLevel) inference.Verdict {
	switch e.Kind {
	case Answer:
		if fence == inference.FenceLease && !e.Stamped {
			return inference.Uncertain // neither engine nor guard: something in between
		}
		return classifyStatus(e.Status, e.Stamped)
	case ErrorEvent:
		if e.Status >= 400 && e.Status < 500 {
			return inference.Refused
		}
		return inference.EngineError
	case PodGone:
		if fence == inference.FenceTransport && !policy.ExecutesTools {
			return inference.Closed
		}
		return inference.Uncertain
	}
	if e.Kind < kinds {
		return verdicts[e.Kind]
	}
	return inference.Uncertain
}

// classifyStatus judges a well-framed answer other than 2xx.
func classifyStatus(status int, stamped bool) inference.Verdict {
	switch {
	case status == 429 || status == 503:
		return inference.Ended
	case status == 502 || status == 504:
		// A proxy between us and the engine answers so for an engine that may
		// still be at work; only a guard can say that the answer is its own.
		if stamped {
			return inference.Ended
		}
		return inference.Uncertain
	case status >= 500:
		return inference.EngineError
	}
	return inference.Refused
}

// proof says how an attempt without a guard is known to be silent after the
// verdict, or NoProof where nothing shows it.
func proof(v inference.Verdict, policy Policy) inference.Proof {
	switch v {
	case inference.NotStarted:
		return inference.ProofNotStarted
	case inference.Dead:
		return inference.ProofDead
	case inference.Ended, inference.EngineError:
		return inference.ProofEnded
	case inference.Closed:
		if !policy.ExecutesTools {
			return inference.ProofTransport
		}
	case inference.Uncertain:
		if policy.AllowTransportFence && !policy.ExecutesTools {
			return inference.ProofTransport
		}
	}
	return inference.NoProof
}

// leaseProof says how an attempt behind a guard is known to be silent after its
// evidence alone, or NoProof where it must be revoked: unlike without a guard
// that costs a few milliseconds, so nothing weaker counts.
func leaseProof(a *Attempt, e Evidence) inference.Proof {
	switch {
	case a.Verdict == inference.Dead, a.Verdict == inference.Closed && mutation.CloseIsDeath:
		return inference.ProofDead
	case a.Verdict == inference.NotStarted, e.Kind == DuplicateAttempt && mutation.DuplicateIsNotStarted:
		return inference.ProofNotStarted
	case e.Kind == Answer && e.Stamped:
		return inference.ProofEnded
	case mutation.NoFence:
		return inference.ProofTransport
	}
	return inference.NoProof
}

// interruption is the error event that ends a stream after its first delta.
func interruption(e Evidence, v inference.Verdict) *inference.Error {
	cause := "the engine's connection was lost"
	switch v {
	case inference.NoVerdict:
		cause = "the gateway is shutting down"
	case inference.Overloaded:
		cause = fmt.Sprintf("the engine was silent past the %s limit", e.Kind.limit())
	case inference.EngineError, inference.Refused, inference.Ended:
		cause = "the engine failed"
		if e.Message != "" {
			cause = fmt.Sprintf("the engine failed: %s", e.Message)
		}
	}
	return inference.Errorf(inference.DecodeInterrupted,
		"the answer was cut off after a part of it was delivered (%s); it cannot be resumed. "+
			"For chat, send a new request that quotes the text already shown; for structured output, discard the part and ask again.", cause)
}
