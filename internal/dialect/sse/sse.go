// SPDX-License-Identifier: Apache-2.0

// Package sse cuts a server-sent event stream into its events.
//
// It owns framing alone (WHATWG HTML §9.2): lines that end by LF, CR or CRLF, a
// leading byte order mark, comments, fields with or without a space after the
// colon, data that spans lines, and events that arrive cut anywhere, inside a
// character or a CRLF too. It keeps every byte: the Raw of all events, one after
// the other, is the stream. It does not look into data, and it is not an
// EventSource: id and retry mean nothing to it.
//
// The events do not depend on how the stream was cut into reads. The price is
// that a blank line ended by CR is held until one more byte shows whether it was
// half a CRLF.
package sse

import (
	"bytes"
	"errors"
)

// ErrTooLarge is returned when one event exceeds the Splitter's bound.
var ErrTooLarge = errors.New("sse: event too large")

const (
	freeMin  = 4 << 10   // Buffer never returns less
	bufStart = 8 << 10   // first size of the buffer
	bufKeep  = 256 << 10 // a buffer grown past this is dropped once it is empty
)

var bom = []byte("\xef\xbb\xbf")

// An Event is one event, or a run of lines up to a blank line that dispatches
// nothing: comments, an id or retry alone, empty data. Its slices are valid
// until the next call of Next, Buffer or Close.
type Event struct {
	Raw  []byte // every byte, the blank line included
	Name []byte // value of the event field, the last one counts
	Data []byte // values of the data fields, joined by LF
	// At is where Data begins in Raw, or -1 when it was joined from several
	// lines. Only meaningful when Lines > 0.
	At     int
	Lines  int  // data fields
	Fields int  // fields of any name, comments not counted
	ID     bool // has an id field
	Ended  bool
}

// A Splitter splits one stream. Fill its Buffer, then call Next until it has no
// event.
type Splitter struct {
	buf        []byte
	start, end int // buf[start:end] is the unfinished event and what follows it
	max        int
	err        error
	begun      bool // the first line was seen, so no byte order mark can follow

	// State of the event at start. Offsets count from start, so that the buffer
	// may move between reads.
	line     int // where the current line begins
	fields   int
	id       bool
	searched int // up to here there is no line end after line
	name     [2]int
	data     [2]int
	lines    int
	joined   []byte
}

// NewSplitter returns a Splitter that refuses events of more than max bytes.
func NewSplitter(max int) *Splitter { return &Splitter{max: max} }

// Buffer returns at least 4 KiB of free space for the next bytes of the stream.
func (s *Splitter) Buffer() []byte {
	if s.start == s.end {
		s.start, s.end = 0, 0
		if cap(s.buf) > bufKeep {
			s.buf, s.joined = nil, nil
		}
	}
	if len(s.buf)-s.end >= freeMin {
		return s.buf[s.end:]
	}
	if s.end-s.start > s.max {
		// Next would say so; a caller that does not ask still gets no more memory.
		s.fail()
	}
	held := s.buf[s.start:s.end]
	into := s.buf
	// Moving is only worth it when it frees half of the buffer: a large event
	// read in small pieces must not be copied once per piece.
	if len(held)+freeMin > len(s.buf)/2 {
		into = make([]byte, max(bufStart, 2*len(s.buf)))
	}
	copy(into, held)
	s.buf, s.start, s.end = into, 0, len(held)
	return s.buf[s.end:]
}

// Filled says that the first n bytes of the last Buffer are the stream's next.
func (s *Splitter) Filled(n int) { s.end = min(s.end+max(n, 0), len(s.buf)) }

// Next returns the next event that has its blank line. Its error is ErrTooLarge,
// and stays.
func (s *Splitter) Next() (Event, bool, error) { return s.next(false) }

// Close returns what is left at the end of the stream: an event whose lines are
// whole but for the last line end or the blank line. Ended tells whether the
// blank line was there.
func (s *Splitter) Close() (Event, bool) {
	e, ok, err := s.next(true)
	if err == nil && !ok && s.end > s.start {
		e, ok = s.take(s.end-s.start, false), true
	}
	if err == nil && ok && len(e.Raw) > s.max {
		s.fail()
		return Event{}, false
	}
	return e, ok
}

func (s *Splitter) fail() {
	s.err = ErrTooLarge
	s.start, s.end = 0, 0
	s.reset()
}

func (s *Splitter) next(closing bool) (Event, bool, error) {
	if s.err != nil {
		return Event{}, false, s.err
	}
	for {
		end, next, ok := s.lineEnd(closing)
		if !ok {
			if s.end-s.start > s.max {
				s.fail()
			}
			return Event{}, false, s.err
		}
		line := s.buf[s.start+s.line : s.start+end]
		at := s.line
		if !s.begun {
			s.begun = true
			if bytes.HasPrefix(line, bom) {
				line, at = line[len(bom):], at+len(bom)
			}
		}
		s.line, s.searched = next, next
		if len(line) > 0 {
			s.field(line, at)
			continue
		}
		if next > s.max {
			s.fail()
			return Event{}, false, s.err
		}
		return s.take(next, true), true, nil
	}
}

// lineEnd finds the end of the current line and the start of the next.
func (s *Splitter) lineEnd(closing bool) (end, next int, ok bool) {
	unread := s.buf[s.start:s.end]
	window := unread[s.searched:]
	lf := bytes.IndexByte(window, '\n')
	if lf >= 0 {
		window = window[:lf]
	}
	if cr := bytes.IndexByte(window, '\r'); cr >= 0 {
		end = s.searched + cr
		switch {
		case end+1 < len(unread) && unread[end+1] == '\n':
			return end, end + 2, true
		case end+1 < len(unread) || closing:
			return end, end + 1, true
		}
		s.searched = end
		return 0, 0, false
	}
	if lf >= 0 {
		return s.searched + lf, s.searched + lf + 1, true
	}
	s.searched = len(unread)
	if closing && s.line < len(unread) {
		return len(unread), len(unread), true
	}
	return 0, 0, false
}

// field takes in one line that is not blank and begins at offset at.
func (s *Splitter) field(line []byte, at int) {
	colon := bytes.IndexByte(line, ':')
	value := len(line)
	name := line
	if colon >= 0 {
		name, value = line[:colon], colon+1
		if value < len(line) && line[value] == ' ' {
			value++
		}
	}
	if colon == 0 {
		return // a comment
	}
	s.fields++
	switch string(name) {
	case "data":
		s.addData(line[value:], at+value)
	case "id":
		s.id = true
	case "event":
		s.name = [2]int{at + value, at + len(line)}
	}
}

func (s *Splitter) addData(value []byte, at int) {
	switch s.lines {
	case 0:
		s.data = [2]int{at, at + len(value)}
	case 1:
		s.joined = append(s.joined[:0], s.buf[s.start+s.data[0]:s.start+s.data[1]]...)
		fallthrough
	default:
		s.joined = append(append(s.joined, '\n'), value...)
	}
	s.lines++
}

// take cuts off the event of the next n bytes.
func (s *Splitter) take(n int, ended bool) Event {
	raw := s.buf[s.start : s.start+n : s.start+n]
	e := Event{Raw: raw, Name: raw[s.name[0]:s.name[1]], Lines: s.lines, Fields: s.fields, ID: s.id, Ended: ended}
	if s.lines == 1 {
		e.Data, e.At = raw[s.data[0]:s.data[1]], s.data[0]
	} else if s.lines > 1 {
		e.Data, e.At = s.joined, -1
	}
	s.start += n
	s.reset()
	return e
}

func (s *Splitter) reset() {
	s.line, s.searched, s.lines, s.fields, s.id = 0, 0, 0, 0, false
	s.name, s.data = [2]int{}, [2]int{}
}

// AppendWithData appends raw, an event with its lines, with other data in place
// of its data fields. Every other line keeps its bytes.
func AppendWithData(dst, raw, data []byte) []byte {
	s := Splitter{buf: raw, end: len(raw)}
	written := false
	for {
		end, next, ok := s.lineEnd(true)
		if !ok {
			return dst
		}
		line := raw[s.line:end]
		if name, _, _ := bytes.Cut(bytes.TrimPrefix(line, bom), []byte(":")); string(name) != "data" {
			dst = append(dst, raw[s.line:next]...)
		} else if !written {
			written = true
			for part := range bytes.SplitSeq(data, []byte("\n")) {
				dst = append(append(append(dst, "data: "...), part...), '\n')
			}
		}
		s.line, s.searched = next, next
	}
}
