// SPDX-License-Identifier: Apache-2.0

package attempt

import (
	"time"

	"github.com/headgate/headgate/inference"
)

// Event is something that happened. N fields name the attempt it happened to.
type Event interface{ isEvent() }

type (
	// Queued: the request waits for an endpoint.
	Queued struct{}

	// Placed: an endpoint was reserved for the next attempt.
	Placed struct {
		Endpoint inference.EndpointID
		Revision string
		Fence    inference.FenceLevel
	}

	// Unplaced: no endpoint can be had, or the queue gave the request up.
	Unplaced struct{ Err *inference.Error }

	// FirstOutput: the first output is in hand, or a held answer outgrew its
	// bound, and nothing of it was written yet. Stream says that the answer is
	// an event stream, so that a later failure can be told in-band.
	FirstOutput struct {
		N      int
		Stream bool
	}

	// Answered: the answer is complete by its dialect's rules. What is still
	// held back is written by the effects that follow.
	Answered struct {
		N             int
		Stream        bool
		MarkerMissing bool // complete, but the engine sent no end marker
	}

	// Delivered: all bytes of the answer were handed to the kernel.
	Delivered struct{ N int }

	// WriteFailed: a write to the client failed or was short.
	WriteFailed struct{ N int }

	// CommitLost: the journal did not confirm the first delta of attempt N, and
	// nothing was written.
	CommitLost struct{ N int }

	// ClientGone: the client closed its side; a half-close counts.
	ClientGone struct{}

	// Stopped: the gateway gives the request up, to shut down.
	Stopped struct{ Err *inference.Error }

	// RetryAnswer answers AskRetry. A nil Err grants the retry.
	RetryAnswer struct{ Err *inference.Error }

	// CancelAck: the guard's word that it publishes nothing more of attempt N:
	// it acknowledged a revoke, or ended the attempt by itself.
	CancelAck struct{ N int }

	// LeaseExpired: the lease of attempt N is over, by the guard's word or by
	// the gateway's clock.
	LeaseExpired struct{ N int }

	// Broken: the caller found a broken invariant of its own.
	Broken struct{ Reason string }

	// Evidence is what was seen of an attempt that ended without a complete
	// answer.
	Evidence struct {
		N      int
		Kind   Kind
		Status int // of Answer and ErrorEvent: HTTP status or numeric code, 0 if none

		// RetryAfter is the engine's own Retry-After, 0 if none.
		RetryAfter time.Duration

		// Stamped says that a guard marked the answer as the engine's own.
		Stamped bool

		// Passable says that the caller holds a whole engine answer that can
		// be passed through to the client.
		Passable bool

		// Crash: the engine exited by a signal or non-zero (not drained,
		// deleted or preempted). Alone: no other request was in flight there,
		// and the rest of the pool is healthy.
		Crash, Alone bool

		// Message is the engine's own words, for the error that ends a stream.
		Message string
	}
)

func (Queued) isEvent()       {}
func (Placed) isEvent()       {}
func (Unplaced) isEvent()     {}
func (FirstOutput) isEvent()  {}
func (Answered) isEvent()     {}
func (Delivered) isEvent()    {}
func (WriteFailed) isEvent()  {}
func (CommitLost) isEvent()   {}
func (ClientGone) isEvent()   {}
func (Stopped) isEvent()      {}
func (RetryAnswer) isEvent()  {}
func (CancelAck) isEvent()    {}
func (LeaseExpired) isEvent() {}
func (Broken) isEvent()       {}
func (Evidence) isEvent()     {}

// Effect is work for the caller. Effects are carried out in order.
type Effect interface{ isEffect() }

type (
	// Dispatch sends attempt N to the endpoint. Fresh forbids a pooled
	// connection.
	Dispatch struct {
		N        int
		Endpoint inference.EndpointID
		Fresh    bool
	}

	// Resend sends attempt N once more, on a fresh connection to the same guard
	// with the same lease: its epoch check starts it at most once.
	Resend struct {
		N        int
		Endpoint inference.EndpointID
	}

	// Commit makes attempt N the answer: where the bit must be durable it is
	// first; then gate check and first write happen under the gate's lock.
	Commit struct{ N int }

	// Complete writes what is left of attempt N's answer, with an end marker
	// if the engine left it out. The caller reports Delivered or WriteFailed.
	Complete struct {
		N         int
		AddMarker bool
	}

	// CloseGate bars attempt N from the client, one way.
	CloseGate struct{ N int }

	// Cancel ends attempt N's connection, which tells the engine to stop.
	Cancel struct{ N int }

	// Revoke takes the lease of attempt N back, and goes on to until CancelAck or
	// LeaseExpired. Its place on the endpoint is taken until Silent.
	Revoke struct{ N int }

	// Silent: attempt N, whose lease was revoked or ended by itself, is proved
	// silent. Its place can be given back. It may come after Finish.
	Silent struct {
		N     int
		Proof inference.Proof
	}

	// Report tells the pool's book how an endpoint did.
	Report struct {
		Endpoint   inference.EndpointID
		Verdict    inference.Verdict
		RetryAfter time.Duration
	}

	// AskRetry asks the pool's book for one retry: budget and cost.
	AskRetry struct{ After inference.Verdict }

	// Requeue asks for another endpoint; Placed or Unplaced answers.
	Requeue struct {
		Exclude        []inference.EndpointID
		PreferRevision string
	}

	// Respond answers with an error of Headgate's own; nothing was sent yet.
	Respond struct{ Err *inference.Error }

	// PassThrough answers with the engine's own refusal, unchanged.
	PassThrough struct{ N int }

	// EndStream ends a committed event stream with an error event.
	EndStream struct{ Err *inference.Error }

	// Abort cuts a committed answer that has no in-band way to tell.
	Abort struct{}

	// Finish is the terminal outcome: the last effect of a request, but for the
	// Silent of an attempt that was still being fenced: Fencing says so. Nothing
	// is written after it: a write that waited for the journal is late.
	Finish struct {
		Outcome inference.Outcome
		Code    inference.Code
		Fencing bool
	}
)

func (Dispatch) isEffect()    {}
func (Resend) isEffect()      {}
func (Commit) isEffect()      {}
func (Complete) isEffect()    {}
func (CloseGate) isEffect()   {}
func (Cancel) isEffect()      {}
func (Revoke) isEffect()      {}
func (Silent) isEffect()      {}
func (Report) isEffect()      {}
func (AskRetry) isEffect()    {}
func (Requeue) isEffect()     {}
func (Respond) isEffect()     {}
func (PassThrough) isEffect() {}
func (EndStream) isEffect()   {}
func (Abort) isEffect()       {}
func (Finish) isEffect()      {}
