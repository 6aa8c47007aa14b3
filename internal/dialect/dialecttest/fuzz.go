// SPDX-License-Identifier: Apache-2.0

package dialecttest

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"testing"
	"unicode/utf8"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
)

// FuzzStream holds a dialect's streams against what is true of every stream:
// reads cut anywhere change nothing, options change no verdict, and what the
// client gets reads as it was judged.
func FuzzStream(f *testing.F, d dialect.Dialect, r *dialect.Request, seeds ...string) {
	for _, seed := range seeds {
		f.Add([]byte(seed), uint16(5))
	}
	f.Fuzz(func(t *testing.T, text []byte, size uint16) {
		options := dialect.StreamOptions{EventMax: 1 << 16}
		s := d.NewStream(r, options)
		want, err := Feed(s, string(text), 1<<20)
		got, err2 := Feed(d.NewStream(r, options), string(text), 1+int(size))
		if !reflect.DeepEqual(want, got) || !errors.Is(err2, err) {
			t.Fatalf("%v, %v: %+v, in reads %+v", err, err2, want, got)
		}
		for _, e := range want {
			if e.Failure != nil && (e.Output || s.Complete()) {
				t.Fatalf("an error event is output, or the stream complete after it: %+v", e)
			}
		}
		options.Model, options.HideUsage = "m", true
		patched, _ := Feed(d.NewStream(r, options), string(text), 1<<20)
		if len(patched) != len(want) {
			t.Fatalf("%d events, without options %d", len(patched), len(want))
		}
		for i, e := range patched {
			w := want[i]
			if e.Output != w.Output || e.Finish != w.Finish || e.Done != w.Done || e.Tokens != w.Tokens || (e.Failure == nil) != (w.Failure == nil) {
				t.Fatalf("options change %+v to %+v", w, e)
			}
			options := options
			options.EventMax = 1 << 17
			again, _ := Feed(d.NewStream(r, options), e.Bytes, 1<<20)
			if !e.Withheld && (len(again) != 1 || again[0].Bytes != e.Bytes || again[0].Output != e.Output || again[0].Tokens != e.Tokens) {
				t.Fatalf("patched %q reads as %+v, was %+v", e.Bytes, again, e)
			}
		}
	})
}

// FuzzJSON holds a dialect that takes and gives JSON against encoding/json: it
// accepts no request that is not JSON and finds the same model and stream;
// renaming the model changes nothing else, in requests and in answers.
func FuzzJSON(f *testing.F, d dialect.Dialect, seeds ...string) {
	for _, seed := range seeds {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		valid := json.Valid(body) && utf8.Valid(body)
		r, err := d.Inspect("application/json", body)
		if err != nil {
			if code := inference.AsError(err).Code; code == inference.Internal || (code == inference.InvalidJSON) == valid {
				t.Fatalf("valid %v, but %v", valid, err)
			}
		} else {
			if !valid {
				t.Fatal("invalid JSON passes")
			}
			checkRequest(t, d, r, body)
		}
		checkAnswer(t, d, body)
	})
}

func checkRequest(t *testing.T, d dialect.Dialect, r *dialect.Request, body []byte) {
	t.Helper()
	before := members(t, body)
	var model *string
	if err := json.Unmarshal(before["model"], &model); before["model"] != nil && err != nil {
		t.Fatal(err)
	}
	if model != nil && *model != r.Model || model == nil && r.Model != "" {
		t.Fatalf("model %q, want %s", r.Model, before["model"])
	}
	var stream *bool
	_ = json.Unmarshal(before["stream"], &stream)
	if r.Stream && (stream == nil || !*stream) {
		t.Fatalf("stream %v, want %s", r.Stream, before["stream"])
	}
	for _, s := range r.Prompt {
		s.Of(body)
	}
	if r.Choices < 1 || r.Prompts < 1 || r.PromptTokens.N < 0 {
		t.Fatalf("%+v", r)
	}
	same(t, before, members(t, []byte(applied(body, d.RequestEdits(r, body, "new", false)))), "new")
}

func checkAnswer(t *testing.T, d dialect.Dialect, body []byte) {
	t.Helper()
	a, err := d.Answer(&dialect.Request{Choices: 1, Prompts: 1}, body, "public")
	if err != nil || !json.Valid(body) {
		return // NaN passes here and nowhere else
	}
	after := []byte(applied(body, a.Edits))
	if !json.Valid(after) {
		t.Fatalf("edited answer %q", after)
	}
	if bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("{")) {
		same(t, members(t, body), members(t, after), "public")
	}
}

// same compares members but for the one that was renamed, those that hold one
// that was, and a null error.
func same(t *testing.T, before, after map[string]json.RawMessage, model string) {
	t.Helper()
	for key, raw := range before {
		switch key {
		case "model":
			if name := string(after[key]); name != string(raw) && name != `"`+model+`"` {
				t.Fatalf("model %s", name)
			}
		case "response", "message", "error":
		default:
			if string(after[key]) != string(raw) {
				t.Fatalf("%s: %s became %s", key, raw, after[key])
			}
		}
	}
}

func members(t *testing.T, body []byte) map[string]json.RawMessage {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal(body, &m); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return m
}
