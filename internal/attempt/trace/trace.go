// SPDX-License-Identifier: Apache-2.0

// Package trace writes down what went into the state machines of requests and
// what was carried out of them, and plays it again.
//
// A trace is JSON lines, one flight beside the other: how the machine was made,
// each event that Step was given, and each effect just before it was carried
// out. Replay gives the same events to a new machine; what it decides must be
// what was done. Traces are off unless somebody asks for them. The package does
// not write files, and it knows no bytes of requests or answers: there are none
// in events.
package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
)

// A Line is one thing that happened. Exactly one of Spec, Event and Effect is
// set.
type Line struct {
	T       time.Time           `json:"t"`
	Flight  uint64              `json:"flight"` // of the process; a key's repeats are flights of one request
	Request inference.RequestID `json:"request_id"`

	Spec   *attempt.Spec  `json:"-"`
	Event  attempt.Event  `json:"-"`
	Effect attempt.Effect `json:"-"`
}

// wire is a Line as JSON.
type wire struct {
	T       time.Time           `json:"t"`
	Flight  uint64              `json:"flight"`
	Request inference.RequestID `json:"request_id"`
	Spec    map[string]any      `json:"spec,omitempty"`
	Event   string              `json:"event,omitempty"`
	Effect  string              `json:"effect,omitempty"`
	With    map[string]any      `json:"with,omitempty"` // the fields that are not zero
}

// Append appends a line to a trace.
func Append(b []byte, l Line) []byte {
	w := wire{T: l.T, Flight: l.Flight, Request: l.Request}
	switch {
	case l.Spec != nil:
		w.Spec = fields(l.Spec)
	case l.Event != nil:
		w.Event, w.With = nameOf(l.Event), fields(l.Event)
	case l.Effect != nil:
		w.Effect, w.With = nameOf(l.Effect), fields(l.Effect)
	}
	line, err := json.Marshal(w)
	if err != nil {
		line = []byte(fmt.Sprintf("{\"flight\":%d,\"event\":%q}", l.Flight, err)) // which Replay cannot read
	}
	return append(append(b, line...), '\n')
}

// parse reads one line.
func parse(b []byte) (Line, error) {
	var w wire
	if err := json.Unmarshal(b, &w); err != nil {
		return Line{}, err
	}
	l := Line{T: w.T, Flight: w.Flight, Request: w.Request}
	var err error
	switch {
	case w.Event != "":
		l.Event, err = made[attempt.Event](w.Event, events, w.With)
	case w.Effect != "":
		l.Effect, err = made[attempt.Effect](w.Effect, effects, w.With)
	default:
		l.Spec = &attempt.Spec{}
		err = fill(l.Spec, w.Spec)
	}
	return l, err
}

// Result is what a replay came to.
type Result struct {
	Flights int // requests, or runs of one that was opened again
	Events  int
	Effects int

	// Cut are the flights that were under way when the trace ends, as it does
	// when its process is killed.
	Cut []inference.RequestID

	// Differences are where the machine decides otherwise than was done.
	Differences []Difference
}

// A Difference is one place where trace and machine disagree.
type Difference struct {
	Line    int // from 1
	Request inference.RequestID
	Said    string
}

func (d Difference) Error() string {
	return fmt.Sprintf("line %d: %s: %s", d.Line, d.Request, d.Said)
}

// Replay plays a trace. The error is that the trace cannot be read; a last line
// without its end is what a killed process leaves, and is not looked at.
func Replay(r io.Reader) (Result, error) {
	p := player{open: map[uint64]*flight{}}
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return p.result, err
		}
		l, err := parse(line)
		if err != nil {
			return p.result, fmt.Errorf("line %d: %w", n, err)
		}
		p.play(n, l)
	}
	for _, f := range p.open {
		f.end(&p)
	}
	slices.Sort(p.result.Cut)
	slices.SortFunc(p.result.Differences, func(a, b Difference) int { return a.Line - b.Line })
	return p.result, nil
}

type player struct {
	open   map[uint64]*flight
	result Result
}

// flight is one machine that is played again.
type flight struct {
	id      inference.RequestID
	machine *attempt.Request
	due     []attempt.Effect // decided, and not carried out yet
	done    attempt.Effect   // the last that was carried out
	line    int
	strayed bool // it differs, and what follows says nothing more
}

func (p *player) play(n int, l Line) {
	f := p.open[l.Flight]
	if l.Spec != nil {
		if f != nil { // of a process before
			f.end(p)
		}
		p.result.Flights++
		p.open[l.Flight] = &flight{id: l.Request, machine: attempt.NewRequest(*l.Spec), line: n}
		return
	}
	if f == nil {
		p.differ(n, l.Request, "flight %d never began", l.Flight)
		return
	}
	f.line = n
	switch {
	case f.strayed:
	case l.Event != nil:
		p.result.Events++
		if len(f.due) > 0 && !answered(f.done) {
			f.stray(p, "%s was decided and not carried out before the event %s", show(f.due[0]), show(l.Event))
			return
		}
		f.due = f.machine.Step(l.T, l.Event)
	default:
		p.result.Effects++
		f.done = l.Effect
		if len(f.due) == 0 {
			f.stray(p, "%s was carried out and nothing was decided", show(l.Effect))
			return
		}
		if want, got := show(f.due[0]), show(l.Effect); want != got {
			f.stray(p, "%s was carried out, decided was %s", got, want)
			return
		}
		f.due = f.due[1:]
	}
}

// answered reports whether what was decided with an effect may be dropped: its
// result was an event, and the machine decided anew.
func answered(e attempt.Effect) bool {
	_, ok := e.(attempt.Commit)
	return ok
}

func (f *flight) stray(p *player, format string, args ...any) {
	f.strayed = true
	p.differ(f.line, f.id, format, args...)
}

// end looks at a flight of which there is no more.
func (f *flight) end(p *player) {
	if !f.strayed && (len(f.due) > 0 || !f.machine.Settled()) {
		p.result.Cut = append(p.result.Cut, f.id)
	}
}

func (p *player) differ(line int, id inference.RequestID, format string, args ...any) {
	p.result.Differences = append(p.result.Differences, Difference{line, id, fmt.Sprintf(format, args...)})
}

// show is an event or effect by what a trace says of it.
func show(v any) string {
	with, err := json.Marshal(fields(v))
	if err != nil || bytes.Equal(with, []byte("{}")) {
		return nameOf(v)
	}
	return nameOf(v) + string(with)
}
