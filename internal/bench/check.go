// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"fmt"
	"hash/crc32"
)

// Corrupt says how an answer differs from what the engine sent.
type Corrupt struct{ What string }

func (c *Corrupt) Error() string { return "not what the engine sent: " + c.What }

func corrupt(format string, args ...any) error { return &Corrupt{fmt.Sprintf(format, args...)} }

// A reader takes an answer's body as it comes and tells what is in it.
type reader interface {
	// take gets the bytes of one read, which are its only for the call.
	take(p []byte, at int64) error

	// end is told that the body ended by its framing.
	end() error
}

// meter is where a reader puts what it measures.
type meter struct {
	received int64 // when the engine had the request, 0 if that is not known
	sent     int64 // when it sent its first token, or the answer
	firstAt  int64 // when that was here
	tokens   int
	last     int64 // when the latest token was here

	// token is called for every token: when the engine sent it, 0 if unknown,
	// when it was here, and when the one before was, 0 for the first.
	token func(sent, at, before int64)
}

func (m *meter) count(sent, at int64) {
	if m.tokens == 0 {
		m.sent, m.firstAt = sent, at
	}
	m.token(sent, at, m.last)
	m.tokens++
	m.last = at
}

// events cuts a body into what stands between blank lines.
type events struct{ pending []byte }

func (e *events) push(p []byte) { e.pending = append(e.pending, p...) }

func (e *events) each(take func(event []byte) error) error {
	rest := e.pending
	for {
		i := bytes.Index(rest, []byte("\n\n"))
		if i < 0 {
			e.pending = e.pending[:copy(e.pending, rest)]
			return nil
		}
		if err := take(rest[:i+2]); err != nil {
			return err
		}
		rest = rest[i+2:]
	}
}

// streamCheck reads a stream of the engine of this package and accepts no other
// byte than it sent.
type streamCheck struct {
	*meter
	events
	s      *script
	prompt uint32
	crc    uint32
	seen   int // events
}

func (c *streamCheck) take(p []byte, at int64) error {
	c.push(p)
	return c.each(func(e []byte) error { return c.event(e, at) })
}

func (c *streamCheck) event(e []byte, at int64) error {
	k := c.seen - 1
	var want []byte
	switch {
	case k < 0:
		if len(e) != len(c.s.role) {
			return corrupt("first event %q", clip(e))
		}
		c.received = readDigits(e[c.s.roleAt : c.s.roleAt+timeDigits])
		want = c.s.first(c.received)
	case k < c.s.tokens:
		if len(e) != len(c.s.event) {
			return corrupt("event %q where token %d should be", clip(e), k)
		}
		if n := readDigits(e[c.s.numberAt : c.s.numberAt+numberDigits]); n != int64(k) {
			return corrupt("token %d where token %d should be", n, k)
		}
		sent := readDigits(e[c.s.timeAt : c.s.timeAt+timeDigits])
		want = c.s.token(k, sent)
		if bytes.Equal(e, want) {
			c.count(sent, at)
		}
	case k == c.s.tokens:
		want = c.s.finish(c.prompt, c.crc)
	case k == c.s.tokens+1:
		want = c.s.usage
	case k == c.s.tokens+2:
		want = []byte(endMarker)
	default:
		return corrupt("event %q after the end marker", clip(e))
	}
	if !bytes.Equal(e, want) {
		return corrupt("event %q, want %q", clip(e), clip(want))
	}
	c.crc = crc32.Update(c.crc, castagnoli, e)
	c.seen++
	return nil
}

func (c *streamCheck) end() error {
	if all := c.s.tokens + 4; c.seen != all || len(c.pending) > 0 {
		return corrupt("the body ended cleanly after %d of %d events and %d bytes", c.seen, all, len(c.pending))
	}
	return nil
}

// wholeCheck reads an answer that is not streamed.
type wholeCheck struct {
	*meter
	s      *script
	prompt uint32
	body   []byte
	at     int64
}

func (c *wholeCheck) take(p []byte, at int64) error {
	c.body, c.at = append(c.body, p...), at
	return nil
}

func (c *wholeCheck) end() error {
	field, _ := member(c.body, `"system_fingerprint":"`)
	if len(field) != 2*timeDigits+10 {
		return corrupt("answer %q", clip(c.body))
	}
	received, sent := readDigits(field[:timeDigits]), readDigits(field[timeDigits+1:2*timeDigits+1])
	if want := c.s.whole(received, sent, c.prompt); !bytes.Equal(c.body, want) {
		return corrupt("answer %q, want %q", clip(c.body), clip(want))
	}
	c.received = received
	c.count(sent, c.at)
	return nil
}

// anyStream reads a stream of an engine that is not known.
type anyStream struct {
	*meter
	events
	done bool
}

func (c *anyStream) take(p []byte, at int64) error {
	c.push(bytes.ReplaceAll(p, []byte("\r\n"), []byte("\n")))
	return c.each(func(e []byte) error {
		switch {
		case bytes.HasPrefix(e, []byte("data: [DONE]")), bytes.HasPrefix(e, []byte("event: message_stop")):
			c.done = true
		case bytes.Contains(e, []byte(`"error":{`)):
			return fmt.Errorf("error event %q", clip(e))
		case bytes.HasPrefix(e, []byte("data:")) && !bytes.Contains(e, []byte(`"role":`)) && !bytes.Contains(e, []byte(`"choices":[]`)):
			c.count(0, at)
		}
		return nil
	})
}

func (c *anyStream) end() error {
	if !c.done {
		return corrupt("no end marker")
	}
	return nil
}

// anyWhole reads an answer of an engine that is not known.
type anyWhole struct{ *meter }

func (c *anyWhole) take(_ []byte, at int64) error { c.last = at; return nil }
func (c *anyWhole) end() error                    { c.count(0, c.last); return nil }

func clip(b []byte) []byte { return b[:min(len(b), 160)] }
