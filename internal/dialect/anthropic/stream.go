// SPDX-License-Identifier: Apache-2.0

package anthropic

import (
	"bytes"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
	"github.com/headgate/headgate/internal/dialect/sse"
)

// A payload is one pass over an event's data or a whole answer.
type payload struct {
	body.Payload
	kind    string // type
	full    bool   // carries something that a client can see
	stopped bool   // has a stop_reason
}

func (p *payload) read(text []byte) (isJSON, isObject bool) {
	p.Start(text)
	p.kind, p.full, p.stopped = "", false, false
	if isObject = p.Kind() == jsonscan.Object; isObject {
		p.members()
	} else {
		p.Skip()
	}
	p.End()
	if p.Err() != "" {
		return false, false
	}
	p.Flatten()
	return true, isObject
}

func (p *payload) members() {
	for more := p.Enter(); more; more = p.Next() {
		switch key := p.Key(); string(key) {
		case "type":
			p.kind = p.word()
		case "message":
			if p.Kind() == jsonscan.Object {
				p.message()
			} else {
				p.Flat.Message = p.Str()
			}
		case "delta":
			p.delta()
		case "content_block":
			p.block()
		default:
			if !p.Top(key) {
				p.Skip()
			}
		}
	}
}

// word reads the type of an event, without allocating for the usual ones.
func (p *payload) word() string {
	raw := p.Value()
	if len(raw) < 2 || raw[0] != '"' {
		return ""
	}
	raw = raw[1 : len(raw)-1]
	if string(raw) == "content_block_delta" {
		return "content_block_delta"
	}
	return body.Short(jsonscan.AppendUnquoted(nil, raw))
}

// message reads the message that a stream begins with.
func (p *payload) message() {
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "model":
			p.ReadModel()
		case "usage":
			p.ReadUsage()
		case "content":
			p.full = p.Full() || p.full
		default:
			p.Skip()
		}
	}
}

// delta reads what was added: to a block, where every member but the type says
// something, or to the message.
func (p *payload) delta() {
	if p.Kind() != jsonscan.Object {
		p.full = p.Full() || p.full
		return
	}
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "type", "stop_sequence":
			p.Skip()
		case "stop_reason":
			p.stopped = p.Full()
		default:
			p.full = p.Full() || p.full
		}
	}
}

// block reads a block as it begins. Text and thinking are empty until deltas
// come; any other block is there for its own sake, such as a call of a tool by
// its name.
func (p *payload) block() {
	if p.Kind() != jsonscan.Object {
		p.full = p.Full() || p.full
		return
	}
	other := false
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "type":
			raw := string(p.Value())
			other = raw != `"text"` && raw != `"thinking"`
		case "text", "thinking", "citations":
			p.full = p.Full() || p.full
		default:
			p.Skip()
		}
	}
	p.full = p.full || other
}

// A stream judges one streamed message.
type stream struct {
	body.Stream
	payload  payload
	usage    inference.Usage
	hasUsage bool
	stopped  bool // a stop_reason was seen
	ended    bool // message_stop was seen, and something to stop
}

func (api) NewStream(_ *dialect.Request, o dialect.StreamOptions) dialect.Stream {
	s := &stream{usage: inference.Usage{Prompt: -1, Completion: -1, Cached: -1}}
	s.payload.SetModel(o.Model)
	s.Stream = body.NewStream(o, s)
	return s
}

// Complete is true from the stop_reason on: only message_stop may follow.
func (s *stream) Complete() bool                 { return (s.stopped || s.ended) && !s.Failed() }
func (s *stream) Usage() (inference.Usage, bool) { return s.usage, s.hasUsage }

// Whole is for body.Stream.
func (s *stream) Whole(data []byte) bool {
	isJSON, _ := s.payload.read(data)
	return isJSON
}

// Judge says what an event is. Its type is in its data; the name of the event
// says the same and is only looked at where the type is missing.
func (s *stream) Judge(e sse.Event, out dialect.Event) (dialect.Event, []dialect.Edit) {
	p := &s.payload
	isJSON, isObject := p.read(e.Data)
	if !isJSON {
		out.Failure = &dialect.Failure{Message: "undecodable event"}
		if string(e.Name) == "error" {
			out.Failure.Message = body.Short(bytes.TrimSpace(e.Data))
		}
		return out, nil
	}
	if p.HasUsage {
		s.report()
	}
	kind := p.kind
	if kind == "" {
		kind = string(e.Name)
	}
	switch {
	case p.Failure != nil:
		out.Failure = p.Failure
	case kind == "error":
		flat := p.Flat
		out.Failure = &flat
	case kind == "ping", kind == "content_block_stop":
	case kind == "message_start", kind == "content_block_start":
		out.Output = p.full
	case kind == "content_block_delta":
		if out.Output = p.full; p.full {
			out.Tokens = 1
		}
	case kind == "message_delta":
		out.Finish = p.stopped
		s.stopped = s.stopped || p.stopped
	case kind == "message_stop":
		out.Done = true
		s.ended = s.Outputs() > 0
	default:
		out.Output = isObject || kind != ""
	}
	return out, p.Edits
}

// report takes in a usage: the first event counts the prompt, the last the
// output, and either may repeat the other in part.
func (s *stream) report() {
	u := s.payload.Usage
	s.hasUsage = true
	s.usage.Prompt = max(s.usage.Prompt, u.Prompt)
	s.usage.Cached = max(s.usage.Cached, u.Cached)
	if u.Completion >= 0 {
		s.usage.Completion = u.Completion
	}
}
