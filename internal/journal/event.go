// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/headgate/headgate/inference"
)

// Kind is what happened to a request.
type Kind uint8

// Kinds of events. Each says which fields of Event it reads beside Request, At
// and, where an attempt is meant, Attempt.
const (
	noKind      Kind = iota
	Received         // routed: Arrival
	Queued           // waits for an endpoint
	Dispatched       // an attempt goes to an engine: Endpoint, Revision, Fence, Guard, LeaseTTL, Engine, Seed, Resent
	HeadersSent      // headers went out before any output
	FirstDelta       // the answer's first bytes are about to be written: counters
	Answered         // the whole answer is in hand, and its last bytes are about to be written
	Fencing          // an attempt failed and is not proved silent: Verdict
	Fenced           // it is: Proof, Verdict if known only now
	Ended            // an attempt is over and its answer is the client's: Verdict
	Finished         // the outcome: Outcome, Code, Error, counters
	Reopened         // a keyed request runs again after it failed before a delta
	kinds
)

var kindNames = [...]string{"", "received", "queued", "dispatched", "headers_sent", "first_delta",
	"answered", "fencing", "fenced", "ended", "finished", "reopened"}

func (k Kind) String() string {
	if k >= kinds {
		return "unknown"
	}
	return kindNames[k]
}

// Arrival is what is fixed about a request once it is routed. The journal keeps
// the pointer until the event is written: it must not change any more.
type Arrival struct {
	ClientRequestID string `json:"client_request_id,omitzero"`
	Tenant          string `json:"tenant"`
	Model           string `json:"model"`
	TargetModel     string `json:"target_model"`
	Pool            string `json:"pool"`
	Objective       string `json:"objective,omitzero"`
	MaxAttempts     int    `json:"max_attempts"`
	PromptTokens    int    `json:"prompt_tokens,omitzero"` // estimated
	ExecutesTools   bool   `json:"executes_tools,omitzero"`
	Keyed           bool   `json:"keyed,omitzero"` // set by Begin
}

// Event is one transition of one request. It is passed by value and holds no
// bytes of bodies.
type Event struct {
	Seq     int64 // order in the journal, whatever the clock did; set when written
	Request inference.RequestID
	At      Time // 0: the time of Append
	Kind    Kind

	Verdict inference.Verdict
	Proof   inference.Proof
	Fence   inference.FenceLevel
	Outcome inference.Outcome
	Code    inference.Code

	Resent      bool // the attempt is the free resend
	Estimated   bool // Tokens was counted, not reported
	MarkerAdded bool // the engine's end marker was missing and was written

	Attempt  int
	Arrival  *Arrival
	Endpoint inference.EndpointID
	Revision string
	Guard    string // incarnation
	LeaseTTL time.Duration
	Engine   string // incarnation
	Seed     *int64

	// Counters so far. 0 leaves a record's number as it is.
	Tokens       int // output tokens delivered
	Events       int // events delivered
	PromptTokens int
	CachedTokens int

	// Error is kept with its code and its message for the client; its inner
	// error is not.
	Error *inference.Error
}

// eventJSON is how an event is stored and shown.
type eventJSON struct {
	Seq          int64                `json:"seq,omitzero"`
	Request      inference.RequestID  `json:"request_id,omitzero"`
	At           Time                 `json:"at"`
	Kind         string               `json:"kind"`
	Attempt      int                  `json:"attempt,omitzero"`
	Arrival      *Arrival             `json:"arrival,omitempty"`
	Endpoint     inference.EndpointID `json:"endpoint,omitzero"`
	Fence        string               `json:"fence_level,omitzero"`
	Verdict      string               `json:"verdict,omitzero"`
	Proof        string               `json:"fence_proof,omitzero"`
	Outcome      string               `json:"outcome,omitzero"`
	Code         inference.Code       `json:"code,omitzero"`
	Message      string               `json:"message,omitzero"`
	Status       int                  `json:"status,omitzero"`
	Revision     string               `json:"model_revision,omitzero"`
	Guard        string               `json:"guard_incarnation,omitzero"`
	LeaseTTL     time.Duration        `json:"lease_ttl_ns,omitzero"`
	Engine       string               `json:"engine_incarnation,omitzero"`
	Seed         *int64               `json:"seed,omitempty"`
	Resent       bool                 `json:"resent,omitzero"`
	MarkerAdded  bool                 `json:"end_marker_added,omitzero"`
	Tokens       int                  `json:"delivered_output_tokens,omitzero"`
	Estimated    bool                 `json:"delivered_output_tokens_estimated,omitzero"`
	Events       int                  `json:"delivered_events,omitzero"`
	PromptTokens int                  `json:"prompt_tokens,omitzero"`
	CachedTokens int                  `json:"cached_tokens,omitzero"`
}

// MarshalJSON implements json.Marshaler. Zero fields are left out.
func (e Event) MarshalJSON() ([]byte, error) {
	j := eventJSON{
		Seq: e.Seq, Request: e.Request, At: e.At, Kind: e.Kind.String(), Attempt: e.Attempt, Arrival: e.Arrival,
		Endpoint: e.Endpoint, Verdict: e.Verdict.String(), Proof: e.Proof.String(), Outcome: e.Outcome.String(),
		Code: e.Code, Revision: e.Revision, Guard: e.Guard, LeaseTTL: e.LeaseTTL, Engine: e.Engine, Seed: e.Seed, Resent: e.Resent,
		MarkerAdded: e.MarkerAdded, Tokens: e.Tokens, Estimated: e.Estimated, Events: e.Events,
		PromptTokens: e.PromptTokens, CachedTokens: e.CachedTokens,
	}
	if e.Kind == Dispatched {
		j.Fence = e.Fence.String()
	}
	if e.Error != nil {
		j.Code, j.Message, j.Status = e.Error.Code, e.Error.Message, e.Error.Status
	}
	return json.Marshal(&j)
}

// UnmarshalJSON implements json.Unmarshaler.
func (e *Event) UnmarshalJSON(data []byte) error {
	var j eventJSON
	if err := json.Unmarshal(data, &j); err != nil {
		return err
	}
	*e = Event{
		Seq: j.Seq, Request: j.Request, At: j.At, Attempt: j.Attempt, Arrival: j.Arrival, Endpoint: j.Endpoint,
		Code: j.Code, Revision: j.Revision, Guard: j.Guard, LeaseTTL: j.LeaseTTL, Engine: j.Engine, Seed: j.Seed, Resent: j.Resent,
		MarkerAdded: j.MarkerAdded, Tokens: j.Tokens, Estimated: j.Estimated, Events: j.Events,
		PromptTokens: j.PromptTokens, CachedTokens: j.CachedTokens,
	}
	if j.Message != "" || j.Status != 0 {
		e.Error = &inference.Error{Code: j.Code, Message: j.Message, Status: j.Status}
	}
	ok := byName(&e.Kind, j.Kind) && byName(&e.Verdict, j.Verdict) && byName(&e.Proof, j.Proof) && byName(&e.Outcome, j.Outcome)
	if j.Fence != "" {
		ok = ok && byName(&e.Fence, j.Fence)
	}
	if !ok {
		return fmt.Errorf("journal event of %s has an unknown word: %.200s", j.Request, data)
	}
	return nil
}

// byName finds the enumerator with that name.
func byName[T interface {
	~uint8
	String() string
}](to *T, name string) bool {
	for v := T(0); v.String() != "unknown"; v++ {
		if v.String() == name {
			*to = v
			return true
		}
	}
	return false
}
