// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
)

// Every event and effect comes back from its line as it was, with each field
// set: an error's reason alone is for the log.
func TestLinesKeepEverything(t *testing.T) {
	for _, types := range []map[string]reflect.Type{events, effects} {
		for name, typ := range types {
			p := reflect.New(typ)
			stuff(p.Elem())
			l := Line{T: time.Unix(5, 7).UTC(), Flight: 3, Request: "req_1"}
			switch v := p.Elem().Interface().(type) {
			case attempt.Event:
				l.Event = v
			case attempt.Effect:
				l.Effect = v
			}
			got, err := parse(Append(nil, l))
			if diff := cmp.Diff(l, got, cmpopts.IgnoreFields(inference.Error{}, "Err")); err != nil || diff != "" {
				t.Errorf("%s: %v\n%s", name, err, diff)
			}
		}
	}
	spec := attempt.Spec{ID: "req_1", Keyed: true, Prior: 2, PriorCharged: 1, Policy: attempt.Policy{MaxAttempts: 3, ExecutesTools: true}}
	got, err := parse(Append(nil, Line{Flight: 1, Spec: &spec}))
	if diff := cmp.Diff(&spec, got.Spec); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
}

// stuff sets every field to something.
func stuff(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for _, f := range v.Fields() {
			stuff(f)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		stuff(v.Elem())
	case reflect.Interface:
		v.Set(reflect.ValueOf(errors.New("for the log")))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		stuff(v.Index(0))
		stuff(v.Index(1))
	case reflect.String:
		v.SetString("word")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8:
		v.SetUint(2)
	default:
		v.SetInt(int64(3 * time.Second))
	}
}

// What Step may be given or yield has a name here: a new one would be written
// and could not be read.
func TestNoEventOrEffectIsUnknown(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "../event.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, d := range file.Decls {
		method, ok := d.(*ast.FuncDecl)
		if !ok || method.Recv == nil {
			continue
		}
		known := map[string]map[string]reflect.Type{"isEvent": events, "isEffect": effects}[method.Name.Name]
		name := method.Recv.List[0].Type.(*ast.Ident).Name
		if found++; known[name] == nil {
			t.Errorf("%s is not known", name)
		}
	}
	if found != len(events)+len(effects) {
		t.Errorf("%d are known, and event.go has %d", len(events)+len(effects), found)
	}
}

// traceOf plays a request whose first engine dies, with a shell that does what
// it is told, and returns its trace.
func traceOf(t *testing.T, events ...attempt.Event) string {
	t.Helper()
	spec := attempt.Spec{ID: "req_1", Policy: attempt.Policy{MaxAttempts: 2}}
	m := attempt.NewRequest(spec)
	now := time.Unix(1, 0)
	b := Append(nil, Line{T: now, Flight: 1, Request: spec.ID, Spec: &spec})
	for _, e := range events {
		now = now.Add(time.Millisecond)
		b = Append(b, Line{T: now, Flight: 1, Request: spec.ID, Event: e})
		for _, effect := range m.Step(now, e) {
			b = Append(b, Line{T: now, Flight: 1, Request: spec.ID, Effect: effect})
		}
	}
	return string(b)
}

var story = []attempt.Event{
	attempt.Placed{Endpoint: "a", Fence: inference.FenceTransport},
	attempt.Evidence{N: 1, Kind: attempt.PeerReset},
	attempt.RetryAnswer{},
	attempt.Placed{Endpoint: "b", Fence: inference.FenceTransport},
	attempt.FirstOutput{N: 2, Stream: true},
	attempt.Answered{N: 2, Stream: true},
	attempt.Delivered{N: 2},
}

func TestReplayFindsWhatWasDoneOtherwise(t *testing.T) {
	whole := traceOf(t, story...)
	lines := strings.SplitAfter(whole, "\n")
	at := func(word string) int {
		for i, l := range lines {
			if strings.Contains(l, word) {
				return i
			}
		}
		t.Fatalf("no %s in\n%s", word, whole)
		return 0
	}
	without := func(word string) string {
		i := at(word)
		return strings.Join(lines[:i], "") + strings.Join(lines[i+1:], "")
	}
	for _, c := range []struct{ name, trace, want string }{
		{"the trace itself", whole, ""},
		{"an effect left out", without("CloseGate"), "line 5: req_1: Cancel{\"N\":1} was carried out, decided was CloseGate{\"N\":1}"},
		{"the last effect left out before an event", without(`"AskRetry"`), "AskRetry{\"After\":\"closed\"} was decided and not carried out before the event RetryAnswer"},
		{"another endpoint", strings.Replace(whole, `"effect":"Dispatch","with":{"Endpoint":"b"`, `"effect":"Dispatch","with":{"Endpoint":"c"`, 1), "decided was Dispatch"},
		{"an effect twice", strings.Replace(whole, lines[at("Requeue")], lines[at("Requeue")]+lines[at("Requeue")], 1), "was carried out and nothing was decided"},
		{"an event left out", without("peer_reset"), "CloseGate{\"N\":1} was carried out and nothing was decided"},
		{"no beginning", strings.Join(lines[1:], ""), "flight 1 never began"},
	} {
		got, err := Replay(strings.NewReader(c.trace))
		switch {
		case err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.want == "" && len(got.Differences) > 0, c.want != "" && (len(got.Differences) == 0 || !strings.Contains(got.Differences[0].Error(), c.want)):
			t.Errorf("%s: %v, want %q", c.name, got.Differences, c.want)
		}
	}
}

// A killed process leaves the request under way and half a line.
func TestReplayOfAKilledProcess(t *testing.T) {
	whole := traceOf(t, story...)
	for cut := range whole {
		got, err := Replay(strings.NewReader(whole[:cut]))
		if err != nil || len(got.Differences) > 0 {
			t.Fatalf("cut at %d: %v %v", cut, err, got)
		}
		if begun, over := strings.Contains(whole[:cut], "\n"), bytes.Count([]byte(whole[:cut]), []byte("\n")) == strings.Count(whole, "\n"); begun && !over && len(got.Cut) != 1 {
			t.Fatalf("cut at %d: under way: %v", cut, got.Cut)
		}
	}
	// Its successor appends to the same file.
	if got, err := Replay(strings.NewReader(traceOf(t, story[:3]...) + whole)); err != nil || got.Flights != 2 || len(got.Cut) != 1 || len(got.Differences) > 0 {
		t.Errorf("%v %+v", err, got)
	}
}

// A commit whose write fails is followed by that event; what was decided with
// it is dropped.
func TestReplayDropsWhatFollowsAFailedCommit(t *testing.T) {
	b := traceOf(t, attempt.Placed{Endpoint: "a"})
	now := time.Unix(2, 0)
	lines := Append([]byte(b), Line{T: now, Flight: 1, Request: "req_1", Event: attempt.Answered{N: 1}})
	lines = Append(lines, Line{T: now, Flight: 1, Request: "req_1", Effect: attempt.Commit{N: 1}})
	lines = Append(lines, Line{T: now, Flight: 1, Request: "req_1", Event: attempt.WriteFailed{N: 1}})
	got, err := Replay(bytes.NewReader(lines))
	if err != nil || len(got.Differences) > 0 {
		t.Errorf("%v %v", err, got)
	}
}

func TestReplayRefusesWhatIsNoTrace(t *testing.T) {
	for _, bad := range []string{
		"{}x\n", `{"event":"Nothing"}` + "\n", `{"event":"Placed","with":{"Endpoint":1}}` + "\n", `{"effect":"Dispatch","with":{"M":1}}` + "\n",
		`{"event":"Evidence","with":{"Kind":"word"}}` + "\n", `{"effect":"Requeue","with":{"Exclude":"a"}}` + "\n",
	} {
		if _, err := Replay(strings.NewReader(bad)); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}
