// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/headgate/headgate/inference"
)

// Claim asks what a request with an Idempotency-Key is to do.
type Claim struct {
	Request inference.RequestID // the identity it gets if its key is new
	Key     string              // as the client sent it; only its hash is kept
	Digest  Hash                // of the body, see Digest
	Arrival *Arrival
	At      Time // 0: the time of Begin
}

// Digest is the hash of a request body.
func Digest(body []byte) Hash { return sha256.Sum256(body) }

// hash scopes the key to its tenant. The length keeps tenant and key apart.
func (c *Claim) hash() Hash {
	h := sha256.New()
	var size [8]byte
	binary.BigEndian.PutUint64(size[:], uint64(len(c.Arrival.Tenant)))
	h.Write(size[:])
	h.Write([]byte(c.Arrival.Tenant))
	h.Write([]byte(c.Key))
	return Hash(h.Sum(nil))
}

// KeyState is what an Idempotency-Key was found to be.
type KeyState uint8

// States of a key. KeyNew and KeyReopened are run; every other state is answered at
// once.
const (
	noKey             KeyState = iota
	KeyNew                     // run it as the claim's request
	KeyReopened                // run it as Record's request, from attempt Record.Attempt+1
	KeyInProgress              // it runs, or its last attempt is not fenced
	KeyReplay                  // completed: send Answer again
	KeyUnstored                // completed, and the answer was too large to keep or has expired
	KeyInterrupted             // it ended after a delta: send its error again
	KeyExhausted               // it failed max_attempts times
	KeyEffectsUnknown          // it failed, and its engine may have called tools
	KeyReused                  // the key came with another body
)

var keyStateNames = [...]string{"", "new", "reopened", "in_progress", "replay", "unstored", "interrupted",
	"exhausted", "effects_unknown", "reused"}

func (s KeyState) String() string {
	if int(s) < len(keyStateNames) {
		return keyStateNames[s]
	}
	return "unknown"
}

// Decision answers a Claim.
type Decision struct {
	State  KeyState
	Record *Record // of the request that the key stands for; the caller must not change it
	Answer *Answer // of KeyReplay
}

// Runs reports whether the request is to be run, as Record.RequestID. Whoever
// runs it must bring it to its outcome with Finish.
func (d Decision) Runs() bool { return d.State == KeyNew || d.State == KeyReopened }

// Error is what the client is told, nil if the request runs or is replayed.
func (d Decision) Error() *inference.Error {
	switch d.State {
	case KeyInProgress:
		return inference.Errorf(inference.RequestInProgress, "a request with this Idempotency-Key is running: %s", d.Record.RequestID)
	case KeyUnstored:
		return inference.Errorf(inference.KeyUnavailable, "the request completed and its answer is no longer stored: %s", d.Record.RequestID)
	case KeyInterrupted:
		// 400 and not 502: SDKs would send a 5xx again.
		err := &inference.Error{Code: inference.DecodeInterrupted, Status: 400, Message: "the answer was interrupted after part of it was sent"}
		if f := d.Record.Error; f != nil && d.Record.FirstDeltaSent {
			err.Code, err.Message = f.Code, f.Message
		}
		return err
	case KeyExhausted:
		return inference.Errorf(inference.AttemptsExhausted, "the request failed in all of its %d attempts: %s", d.Record.Charged(), d.Record.RequestID)
	case KeyEffectsUnknown:
		return inference.Errorf(inference.ToolEffectsUnknown, "the request failed and its engine may have called tools: %s", d.Record.RequestID)
	case KeyReused:
		return inference.Errorf(inference.KeyReused, "this Idempotency-Key was used with another body")
	}
	return nil
}

// found is what the journal has about a key: each field may be nil.
type found struct {
	binding *Binding
	record  *Record
	answer  *Answer
}

// decide is the table of docs/failover.md about keys.
func decide(f found, digest Hash, now Time) KeyState {
	r := f.record
	switch {
	case f.binding == nil || r == nil:
		return KeyNew
	case r.Terminal() && f.binding.Expires <= now:
		return KeyNew
	case r.ended(inference.Rejected) && len(r.Attempts) == 0:
		return KeyNew // never dispatched: the key is free again
	case f.binding.Digest != digest:
		return KeyReused
	case !r.Terminal() && (r.OwnerUntil == 0 || r.OwnerUntil > now):
		return KeyInProgress
	case f.answer != nil:
		return KeyReplay // whole, whatever became of its last bytes
	case !r.Terminal():
		return decideRunning(r)
	case r.ended(inference.Completed):
		return KeyUnstored
	case r.FirstDeltaSent || r.FirstDeltaUnproved:
		return KeyInterrupted
	case !r.silent():
		return KeyInProgress
	}
	return decideFailed(r)
}

// decideRunning: an owner that let its time run out is taken over.
func decideRunning(r *Record) KeyState {
	switch {
	case r.FirstDeltaSent || !r.FirstDeltaDurable:
		return KeyInterrupted
	case !r.silent():
		return KeyInProgress
	}
	return decideFailed(r)
}

func decideFailed(r *Record) KeyState {
	switch {
	case r.ExecutesTools && r.mayHaveActed():
		return KeyEffectsUnknown
	case r.Charged() >= r.MaxAttempts:
		return KeyExhausted
	}
	return KeyReopened
}

// silent reports whether no attempt can publish any more. Behind a guard that
// takes a proof; without one the connection is closed before the outcome.
func (r *Record) silent() bool {
	a := r.last()
	return a == nil || a.FenceLevel != inference.FenceLease.String() || a.State == stateFenced || a.State == stateEnded
}

// mayHaveActed reports whether an engine had the request and did not refuse it.
func (r *Record) mayHaveActed() bool {
	for i := range r.Attempts {
		v := r.Attempts[i].Verdict
		if v != Text(inference.NotStarted.String()) && v != Text(inference.Ended.String()) {
			return true
		}
	}
	return false
}
