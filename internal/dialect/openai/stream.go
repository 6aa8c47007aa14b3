// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
	"github.com/headgate/headgate/internal/dialect/sse"
)

// A stream judges one streamed answer, event by event.
type stream struct {
	body.Stream
	payload  payload
	hide     bool
	expected int  // choices
	prompts  bool // more than one

	finished  []uint64 // bit set of the choice indexes that are finished
	nFinished int
	total     report // of usage-only events
	running   report // of usage beside choices
}

func (api) NewStream(r *dialect.Request, o dialect.StreamOptions) dialect.Stream {
	return newStream(r, o)
}

func newStream(r *dialect.Request, o dialect.StreamOptions) *stream {
	s := &stream{hide: o.HideUsage, expected: max(r.Choices, 1), prompts: r.Prompts > 1}
	s.payload.SetModel(o.Model)
	s.Stream = body.NewStream(o, s)
	return s
}

func (s *stream) Complete() bool { return !s.Failed() && s.nFinished >= s.expected }

func (s *stream) Usage() (inference.Usage, bool) {
	if s.total.seen {
		return s.total.usage, true
	}
	return s.running.usage, s.running.seen
}

// Whole is for body.Stream.
func (s *stream) Whole(data []byte) bool {
	if bytes.Equal(data, doneData) {
		return true
	}
	isJSON, _ := s.payload.read(data)
	return isJSON
}

// Judge says what an event is.
//
// An event named error is a failure. So is one whose data is not JSON: it is no
// answer, whoever wrote it, and no client could read it. An event whose name or
// shape is not known counts as output, except ping and null: llama.cpp begins
// completions with data: null.
func (s *stream) Judge(e sse.Event, out dialect.Event) (dialect.Event, []dialect.Edit) {
	data := bytes.TrimSpace(e.Data)
	name := string(e.Name)
	if bytes.Equal(data, doneData) && name != "error" {
		out.Done = true
		return out, nil
	}
	p := &s.payload
	isJSON, isObject := p.read(e.Data)
	switch {
	case name == "error":
		out.Failure = s.namedError(data, isObject)
	case name != "" && name != "message" && (!isObject || p.choices < 0) && p.Failure == nil:
		out.Output = name != "ping"
	case !isJSON:
		out.Failure = undecodable()
	default:
		s.chunk(&out)
	}
	if !isJSON {
		return out, nil
	}
	return out, p.Edits
}

func undecodable() *dialect.Failure { return &dialect.Failure{Message: "undecodable event"} }

// namedError is the failure that an event named error reports, whatever form
// its data has.
func (s *stream) namedError(data []byte, isObject bool) *dialect.Failure {
	switch p := &s.payload; {
	case !isObject:
		return &dialect.Failure{Message: body.Short(data)}
	case p.Failure != nil:
		return p.Failure
	default:
		flat := p.Flat
		return &flat
	}
}

// chunk judges the payload of an ordinary event.
func (s *stream) chunk(out *dialect.Event) {
	p := &s.payload
	if p.HasUsage {
		s.report()
	}
	if p.Failure != nil {
		out.Failure = p.Failure
		return
	}
	usageOnly := p.HasUsage && p.choices <= 0 && !p.output
	out.Output = p.output || p.choices < 0 && !usageOnly && !p.null
	out.Tokens = p.tokens
	out.Finish = len(p.finished) > 0
	for _, index := range p.finished {
		s.finish(index)
	}
	if usageOnly && s.hide {
		out.Bytes = nil
	}
}

// A report is the usage that an engine reported in one way.
type report struct {
	usage inference.Usage
	seen  bool
}

// report takes in the payload's usage. The last one counts where one choice was
// asked for. Of several choices llama.cpp reports each by itself as it ends, and
// these add up; vLLM reports all at the very end, which then is the only
// usage-only event. A running usage beside several choices is not a total.
func (s *stream) report() {
	p := &s.payload
	into := &s.running
	if p.choices <= 0 {
		into = &s.total
	}
	switch {
	case s.expected > 1 && p.choices > 0 && len(p.finished) == 0:
	case s.expected > 1 && into.seen:
		into.usage.Completion = sum(into.usage.Completion, p.Usage.Completion)
		if s.prompts {
			into.usage.Prompt = sum(into.usage.Prompt, p.Usage.Prompt)
			into.usage.Cached = sum(into.usage.Cached, p.Usage.Cached)
		}
	default:
		*into = report{p.Usage, true}
	}
}

// sum adds two counts of which a negative one was not reported.
func sum(a, b int) int {
	if a < 0 || b < 0 {
		return max(a, b)
	}
	return a + b
}

// finish marks a choice as finished. An index that the request cannot have asked
// for is ignored, which bounds the set.
func (s *stream) finish(index int) {
	if index < 0 || index >= max(s.expected, 64) {
		return
	}
	word, bit := index/64, uint64(1)<<(index%64)
	for len(s.finished) <= word {
		s.finished = append(s.finished, 0)
	}
	if s.finished[word]&bit == 0 {
		s.finished[word] |= bit
		s.nFinished++
	}
}
