// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"io"
	"sync"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/attempt/trace"
)

// tracer writes what went into every machine and came out of it, for tests and
// reports of bugs. A request waits for each write, so that the trace of a
// killed process lacks nothing that was done.
type tracer struct {
	mu   sync.Mutex
	out  io.Writer
	last uint64 // flight
	line []byte // used again
}

// traced is a flight's part of a trace; nil traces nothing.
type traced struct {
	*tracer
	flight  uint64
	request inference.RequestID
}

func newTracer(out io.Writer) *tracer {
	if out == nil {
		return nil
	}
	return &tracer{out: out}
}

func (t *tracer) begin(spec attempt.Spec) *traced {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	t.last++
	f := &traced{t, t.last, spec.ID}
	t.mu.Unlock()
	f.write(trace.Line{T: time.Now(), Spec: &spec})
	return f
}

func (f *traced) event(now time.Time, e attempt.Event) {
	if f != nil {
		f.write(trace.Line{T: now, Event: e})
	}
}

func (f *traced) effect(e attempt.Effect) {
	if f != nil {
		f.write(trace.Line{T: time.Now(), Effect: e})
	}
}

func (f *traced) write(l trace.Line) {
	l.Flight, l.Request = f.flight, f.request
	f.mu.Lock()
	defer f.mu.Unlock()
	f.line = trace.Append(f.line[:0], l)
	_, _ = f.out.Write(f.line) // a full disk must not end requests; Replay finds the gap
}
