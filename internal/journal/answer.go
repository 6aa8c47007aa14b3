// SPDX-License-Identifier: Apache-2.0

package journal

import "net/http"

// Answer is what a client got, for a repeat with the same key: the same status
// and the same bytes, an event stream's events included.
type Answer struct {
	Status int
	Header http.Header // see KeepHeader
	Body   []byte
}

// replayed are the header fields of an answer that a repeat gets too. Cookies
// and whatever else belongs to one exchange are not kept.
var replayed = []string{"Content-Type", "Content-Encoding", "Content-Language", "Cache-Control"}

// KeepHeader returns the part of an answer's header that is stored.
func KeepHeader(h http.Header) http.Header {
	kept := http.Header{}
	for _, name := range replayed {
		if v := h.Values(name); len(v) > 0 {
			kept[name] = append([]string(nil), v...)
		}
	}
	return kept
}

// Tape collects the bytes of an answer as they are written to the client, up to
// a bound. The zero Tape keeps nothing; it is not safe for concurrent use.
type Tape struct {
	Max  int // bytes
	body []byte
	over bool
}

// Write keeps p. It never fails: past the bound the tape lets go of everything.
func (t *Tape) Write(p []byte) (int, error) {
	switch {
	case t.over:
	case len(t.body)+len(p) > t.Max:
		t.over, t.body = true, nil
	default:
		t.body = append(t.body, p...)
	}
	return len(p), nil
}

// Answer returns what was taped, or nil if it was more than the bound.
func (t *Tape) Answer(status int, header http.Header) *Answer {
	if t.over {
		return nil
	}
	return &Answer{Status: status, Header: KeepHeader(header), Body: t.body}
}
