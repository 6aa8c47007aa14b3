// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
)

// Record is what the journal knows of one logical request: the fold of its
// events. It never holds bodies, credentials or cookies. The JSON names are a
// contract with users.
type Record struct {
	RequestID       inference.RequestID `json:"request_id"`
	ClientRequestID Text                `json:"client_request_id"`
	Tenant          string              `json:"tenant"`
	Model           string              `json:"model"`        // the client's name
	TargetModel     string              `json:"target_model"` // the engine's
	Pool            string              `json:"pool"`
	Objective       Text                `json:"objective"`

	Phase                 string `json:"phase"`
	Outcome               Text   `json:"outcome"`
	Code                  Text   `json:"code"`
	FirstDeltaSent        bool   `json:"first_delta_sent"`
	HeadersSent           bool   `json:"headers_sent"`
	DeliveredOutputTokens int    `json:"delivered_output_tokens"`
	DeliveredEvents       int    `json:"delivered_events"`
	TokensEstimated       bool   `json:"delivered_output_tokens_estimated,omitzero"`
	EndMarker             string `json:"end_marker,omitzero"` // "added" when the engine left it out

	Attempt       int    `json:"attempt"`
	MaxAttempts   int    `json:"max_attempts"`
	RetryBudget   int    `json:"retry_budget"` // attempts left
	ModelRevision Text   `json:"model_revision"`
	PromptTokens  int    `json:"prompt_tokens"`
	CachedTokens  int    `json:"cached_tokens"`
	Gateway       string `json:"gateway"`
	Generation    uint64 `json:"generation"`
	OwnerUntil    Time   `json:"owner_until,omitzero"` // 0: as long as its process lives
	Keyed         bool   `json:"keyed"`
	ExecutesTools bool   `json:"executes_tools,omitzero"`

	// FirstDeltaDurable says that first_delta_sent=false is a claim: had a
	// delta been written, the bit would have been made durable before it.
	FirstDeltaDurable bool `json:"first_delta_durable"`

	// FirstDeltaUnproved marks a record that a dead process left without such
	// a claim: a delta may have been written.
	FirstDeltaUnproved bool `json:"first_delta_unproved,omitzero"`

	// AnswerKept says that the whole answer was stored for repeats with the
	// same key, before its last bytes were written.
	AnswerKept bool `json:"answer_kept,omitzero"`

	Attempts []Attempt `json:"attempts"`
	Error    *Failure  `json:"error"`

	CreatedAt Time `json:"created_at"`
	UpdatedAt Time `json:"updated_at"`

	// LastEvent is the sequence number of the newest event folded in, so that
	// an event written twice counts once.
	LastEvent int64 `json:"last_event"`

	// Seq orders records by creation, whatever the clock did. A store sets it.
	Seq int64 `json:"-"`
}

// Attempt is one try of a Record.
type Attempt struct {
	Attempt           int                  `json:"attempt"`
	State             string               `json:"state"`
	Endpoint          inference.EndpointID `json:"endpoint"`
	FenceLevel        string               `json:"fence_level"`
	FenceProof        Text                 `json:"fence_proof"`
	Verdict           Text                 `json:"verdict"`
	GuardIncarnation  Text                 `json:"guard_incarnation"`
	EngineIncarnation Text                 `json:"engine_incarnation"`
	LeaseEpoch        int                  `json:"lease_epoch"`
	LeaseTTL          time.Duration        `json:"lease_ttl_ns,omitzero"` // of each grant
	ModelRevision     Text                 `json:"model_revision"`
	Seed              *int64               `json:"seed"`
	Resent            bool                 `json:"resent,omitzero"` // not charged to max_attempts
	DispatchedAt      Time                 `json:"dispatched_at"`
	FirstOutputAt     Time                 `json:"first_output_at"`
	EndedAt           Time                 `json:"ended_at"`
}

// Failure is the error that a request ended with, as its client saw it or would
// have.
type Failure struct {
	Code      inference.Code `json:"code"`
	Type      string         `json:"type"`
	Message   string         `json:"message"`
	Partial   bool           `json:"partial_output"`
	Tokens    int            `json:"delivered_output_tokens"`
	Retryable bool           `json:"retryable"`
}

// Attempt states, in the words of internal/attempt.
const (
	stateDispatched = "dispatched"
	statePublishing = "publishing"
	stateFencing    = "fencing"
	stateFenced     = "fenced"
	stateEnded      = "ended"
)

// Charged is the number of attempts that count towards MaxAttempts.
func (r *Record) Charged() int {
	n := 0
	for i := range r.Attempts {
		if !r.Attempts[i].Resent {
			n++
		}
	}
	return n
}

// Terminal reports whether an outcome is fixed.
func (r *Record) Terminal() bool { return r.Outcome != "" }

func (r *Record) ended(o inference.Outcome) bool { return r.Outcome == Text(o.String()) }

// last is the newest attempt, nil if there is none.
func (r *Record) last() *Attempt {
	if len(r.Attempts) == 0 {
		return nil
	}
	return &r.Attempts[len(r.Attempts)-1]
}

// Unfenced returns the attempt that a guard is still to prove silent, once the
// request has its outcome; nil if there is none.
func (r *Record) Unfenced() *Attempt {
	if a := r.last(); r.Terminal() && a != nil && !r.silent() {
		return a
	}
	return nil
}

// Clone returns a copy that shares nothing that changes.
func (r *Record) Clone() *Record {
	c := *r
	c.Attempts = slices.Clone(r.Attempts)
	return &c
}

// Text is a string that JSON shows as null when it is empty.
type Text string

var null = []byte("null")

// MarshalJSON implements json.Marshaler.
func (t Text) MarshalJSON() ([]byte, error) {
	if t == "" {
		return null, nil
	}
	return json.Marshal(string(t))
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *Text) UnmarshalJSON(data []byte) error {
	if bytes.Equal(data, null) {
		*t = ""
		return nil
	}
	return json.Unmarshal(data, (*string)(t))
}

// Time is a moment in nanoseconds since 1970, UTC. JSON shows it as RFC 3339,
// and as null when it is 0.
type Time int64

// At converts a time. The zero time is 0.
func At(t time.Time) Time {
	if t.IsZero() {
		return 0
	}
	return Time(t.UnixNano())
}

// Time converts back. 0 is the zero time.
func (t Time) Time() time.Time {
	if t == 0 {
		return time.Time{}
	}
	return time.Unix(0, int64(t)).UTC()
}

// MarshalJSON implements json.Marshaler.
func (t Time) MarshalJSON() ([]byte, error) {
	if t == 0 {
		return null, nil
	}
	b := make([]byte, 0, len(time.RFC3339Nano)+2)
	b = append(b, '"')
	b = t.Time().AppendFormat(b, time.RFC3339Nano)
	return append(b, '"'), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *Time) UnmarshalJSON(data []byte) error {
	if bytes.Equal(data, null) {
		*t = 0
		return nil
	}
	var full time.Time
	if err := full.UnmarshalJSON(data); err != nil {
		return fmt.Errorf("journal time: %w", err)
	}
	*t = At(full)
	return nil
}
