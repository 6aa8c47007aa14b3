// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/headgate/headgate/inference"
)

func drawEvent(t *rapid.T) Event {
	word := rapid.StringMatching(`[a-z:/@.-]{0,12}`)
	small := rapid.IntRange(0, 50)
	e := Event{
		Seq: rapid.Int64Range(1, 1<<40).Draw(t, "seq"), Request: inference.RequestID(word.Draw(t, "request")),
		At: Time(rapid.Int64Range(1, 1<<61).Draw(t, "at")), Kind: Kind(rapid.IntRange(1, int(kinds)-1).Draw(t, "kind")),
		Attempt: small.Draw(t, "attempt"), Verdict: inference.Verdict(rapid.IntRange(0, int(inference.Finished)).Draw(t, "verdict")),
		Proof:   inference.Proof(rapid.IntRange(0, int(inference.ProofTransport)).Draw(t, "proof")),
		Outcome: inference.Outcome(rapid.IntRange(0, int(inference.Cancelled)).Draw(t, "outcome")),
		Resent:  rapid.Bool().Draw(t, "resent"), Estimated: rapid.Bool().Draw(t, "estimated"), MarkerAdded: rapid.Bool().Draw(t, "marker"),
		Endpoint: inference.EndpointID(word.Draw(t, "endpoint")), Revision: word.Draw(t, "revision"),
		Guard: word.Draw(t, "guard"), Engine: word.Draw(t, "engine"), Tokens: small.Draw(t, "tokens"), Events: small.Draw(t, "events"),
		PromptTokens: small.Draw(t, "prompt"), CachedTokens: small.Draw(t, "cached"),
	}
	if e.Kind == Dispatched {
		e.Fence = inference.FenceLevel(rapid.IntRange(0, 1).Draw(t, "fence"))
		seed := rapid.Int64().Draw(t, "seed")
		e.Seed = &seed
	}
	if e.Kind == Received {
		e.Arrival = &Arrival{Tenant: word.Draw(t, "tenant"), Model: word.Draw(t, "model"), MaxAttempts: small.Draw(t, "max")}
	}
	if e.Kind == Finished {
		e.Code = inference.UpstreamFailed
		e.Error = &inference.Error{Code: e.Code, Message: "x" + word.Draw(t, "message")}
	}
	return e
}

func TestEventsSurviveTheirEncoding(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := drawEvent(t)
		text, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		var got Event
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(e, got) { //nolint:govet // the error inside is a plain struct
			t.Fatalf("%s\nwas %+v\nis  %+v", text, e, got)
		}
	})
}

// TestFoldHoldsWhateverComes: any events in any order leave a record that
// survives its encoding, never opens again after a delta, and never changes
// after its outcome except in what is known of its attempts.
func TestFoldHoldsWhateverComes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := begin(&Event{Seq: 1, Request: "r", At: 1, Arrival: &Arrival{MaxAttempts: 2}})
		for seq := range rapid.IntRange(1, 30).Draw(t, "n") {
			e := drawEvent(t)
			e.Seq = int64(seq + 2)
			before := r.Clone()
			err := r.apply(&e)
			switch {
			case err != nil && !reflect.DeepEqual(before, r):
				t.Fatalf("%s failed (%v) and changed\n%+v\n%+v", e.Kind, err, before, r)
			case before.FirstDeltaSent && !r.FirstDeltaSent:
				t.Fatalf("%s took the first delta back", e.Kind)
			case before.FirstDeltaSent && err == nil && (e.Kind == Dispatched || e.Kind == Reopened):
				t.Fatalf("I2: %s after the first delta", e.Kind)
			case before.Terminal() && err == nil && e.Kind != Fenced && e.Kind != Reopened:
				t.Fatalf("%s after the outcome", e.Kind)
			}
			again := r.Clone()
			if err == nil {
				if err := again.apply(&e); err != nil || !reflect.DeepEqual(again, r) {
					t.Fatalf("%s twice is not %s once: %v", e.Kind, e.Kind, err)
				}
			}
		}
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		got := &Record{}
		if err := json.Unmarshal(text, got); err != nil || !reflect.DeepEqual(got, r) {
			t.Fatalf("%v %s\n%+v\n%+v", err, text, r, got)
		}
	})
}

// TestRecordKeepsItsNames: they are a contract with users.
func TestRecordKeepsItsNames(t *testing.T) {
	r := begin(&Event{Request: "r", At: 1, Arrival: &Arrival{}})
	if err := r.apply(&Event{Kind: Dispatched, Attempt: 1, At: 2}); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var top struct {
		Attempts []map[string]any `json:"attempts"`
	}
	all := map[string]any{}
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &top); err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(`request_id client_request_id tenant model target_model pool objective phase outcome code
		first_delta_sent headers_sent delivered_output_tokens delivered_events attempt max_attempts retry_budget model_revision
		prompt_tokens cached_tokens attempts error created_at updated_at`) {
		if _, ok := all[name]; !ok {
			t.Errorf("the record has no %s: %s", name, text)
		}
	}
	for name := range strings.FieldsSeq(`attempt state endpoint fence_level fence_proof verdict guard_incarnation engine_incarnation
		lease_epoch model_revision seed dispatched_at first_output_at ended_at`) {
		if _, ok := top.Attempts[0][name]; !ok {
			t.Errorf("the attempt has no %s: %s", name, text)
		}
	}
	for _, name := range []string{"outcome", "code", "client_request_id", "error"} {
		if v := all[name]; v != nil {
			t.Errorf("%s is %v, want null", name, v)
		}
	}
}

func TestDurabilityWords(t *testing.T) {
	for _, word := range []string{"strict", "keyed", "relaxed"} {
		if d, ok := ParseDurability(word); !ok || d.String() != word {
			t.Errorf("%s: %s %v", word, d, ok)
		}
	}
	if _, ok := ParseDurability("none"); ok {
		t.Error("none is a driver")
	}
}
