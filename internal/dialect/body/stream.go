// SPDX-License-Identifier: Apache-2.0

package body

import (
	"bytes"
	"cmp"
	"unicode/utf8"

	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/sse"
)

// A Judge knows one format's events. It is told of each event that has data, in
// order.
type Judge interface {
	// Judge says what an event is and how its data is to be edited. The event
	// that it is given has its Bytes set; nil withholds it.
	Judge(e sse.Event, out dialect.Event) (dialect.Event, []dialect.Edit)
	// Whole reports whether data is complete by itself.
	Whole(data []byte) bool
}

// A Stream is what is alike in all of dialect.Stream's kinds. It holds no more
// of a stream than the event that is not whole yet.
type Stream struct {
	split   *sse.Splitter
	judge   Judge
	outputs int
	done    bool
	failed  bool
	ids     bool // an id field was seen

	patched, data []byte // the last patched event, and data
}

// NewStream returns a Stream whose events j judges.
func NewStream(o dialect.StreamOptions, j Judge) Stream {
	return Stream{split: sse.NewSplitter(cmp.Or(o.EventMax, dialect.EventMax)), judge: j}
}

// Buffer is dialect.Stream's.
func (s *Stream) Buffer() []byte { return s.split.Buffer() }

// Filled is dialect.Stream's.
func (s *Stream) Filled(n int) { s.split.Filled(n) }

// Done is dialect.Stream's.
func (s *Stream) Done() bool { return s.done }

// Outputs is dialect.Stream's.
func (s *Stream) Outputs() int { return s.outputs }

// Failed reports whether an error event was seen.
func (s *Stream) Failed() bool { return s.failed }

// Next is dialect.Stream's.
func (s *Stream) Next() (dialect.Event, bool, error) {
	e, ok, err := s.split.Next()
	if !ok || err != nil {
		return dialect.Event{}, false, err
	}
	return s.take(e), true, nil
}

// CloseInput takes an event that lacks its blank line only if its data is whole,
// since a cut event must not pass for one. The blank line is added, or whatever
// Headgate writes next would run into it.
func (s *Stream) CloseInput() (dialect.Event, bool) {
	e, ok := s.split.Close()
	if !ok || !e.Ended && !s.judge.Whole(bytes.TrimSpace(e.Data)) {
		return dialect.Event{}, false
	}
	judged := s.take(e)
	if e.Ended || judged.Bytes == nil {
		return judged, true
	}
	// Capped, so that the line ends are not written over what the bytes lie in.
	b := judged.Bytes[:len(judged.Bytes):len(judged.Bytes)]
	// After a CR alone too: with the LF of the blank line it would be one line end.
	if b[len(b)-1] != '\n' {
		b = append(b, '\n')
	}
	judged.Bytes = append(b, '\n')
	return judged, true
}

func (s *Stream) take(e sse.Event) dialect.Event {
	s.ids = s.ids || e.ID
	if len(bytes.TrimSpace(e.Data)) == 0 {
		return s.dataless(e)
	}
	out, edits := s.judge.Judge(e, dialect.Event{Bytes: e.Raw})
	s.done = s.done || out.Done
	s.failed = s.failed || out.Failure != nil
	if out.Output {
		s.outputs++
	}
	if out.Bytes != nil && len(edits) > 0 {
		out.Bytes = s.patch(e, edits)
	}
	return out
}

// dataless judges lines that carry no data. Comments pass: they keep connections
// alive. Anything else is withheld, and comments too once an id was sent: the
// decoders of the common SDKs make an empty event of it then, and fail on its
// empty JSON. Bytes that are not text are no event stream.
func (s *Stream) dataless(e sse.Event) dialect.Event {
	switch {
	case !utf8.Valid(e.Raw):
		s.failed = true
		return dialect.Event{Failure: &dialect.Failure{Message: "undecodable event"}}
	case e.Fields > 0 || s.ids:
		return dialect.Event{}
	}
	return dialect.Event{Bytes: e.Raw}
}

// patch applies edits of an event's data to its bytes.
func (s *Stream) patch(e sse.Event, edits []dialect.Edit) []byte {
	if e.At < 0 {
		s.data = appendEdited(s.data[:0], e.Data, edits)
		s.patched = sse.AppendWithData(s.patched[:0], e.Raw, s.data)
		return s.patched
	}
	s.patched = append(s.patched[:0], e.Raw[:e.At]...)
	s.patched = appendEdited(s.patched, e.Data, edits)
	s.patched = append(s.patched, e.Raw[e.At+len(e.Data):]...)
	return s.patched
}

func appendEdited(dst, text []byte, edits []dialect.Edit) []byte {
	at := 0
	for _, e := range edits {
		dst = append(append(dst, text[at:e.Start]...), e.Text...)
		at = e.End
	}
	return append(dst, text[at:]...)
}
