// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"cmp"
	"unicode/utf8"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/sse"
)

// A stream judges one streamed answer, event by event, and holds no more of it
// than the event that is not whole yet.
type stream struct {
	split    *sse.Splitter
	payload  payload
	hide     bool
	expected int  // choices
	prompts  bool // more than one

	finished  []uint64 // bit set of the choice indexes that are finished
	nFinished int
	outputs   int
	done      bool
	failed    bool
	ids       bool   // an id field was seen
	total     report // of usage-only events
	running   report // of usage beside choices

	patched, data []byte // the last patched event, and data
}

func (api) NewStream(r *dialect.Request, o dialect.StreamOptions) dialect.Stream {
	s := &stream{
		split:    sse.NewSplitter(cmp.Or(o.EventMax, dialect.EventMax)),
		hide:     o.HideUsage,
		expected: max(r.Choices, 1),
		prompts:  r.Prompts > 1,
	}
	if o.Model != "" {
		s.payload.model = encode(o.Model)
	}
	return s
}

func (s *stream) Buffer() []byte { return s.split.Buffer() }
func (s *stream) Filled(n int)   { s.split.Filled(n) }
func (s *stream) Complete() bool { return !s.failed && s.nFinished >= s.expected }
func (s *stream) Done() bool     { return s.done }
func (s *stream) Outputs() int   { return s.outputs }

func (s *stream) Usage() (inference.Usage, bool) {
	if s.total.seen {
		return s.total.usage, true
	}
	return s.running.usage, s.running.seen
}

func (s *stream) Next() (dialect.Event, bool, error) {
	e, ok, err := s.split.Next()
	if !ok || err != nil {
		return dialect.Event{}, false, err
	}
	return s.judge(e), true, nil
}

// CloseInput takes an event that lacks its blank line only if its data is whole,
// since a cut event must not pass for one. The blank line is added, or whatever
// Headgate writes next would run into it.
func (s *stream) CloseInput() (dialect.Event, bool) {
	e, ok := s.split.Close()
	if !ok || !e.Ended && !s.whole(e) {
		return dialect.Event{}, false
	}
	judged := s.judge(e)
	if e.Ended || judged.Bytes == nil {
		return judged, true
	}
	// Capped, so that the line ends are not written over what the bytes lie in.
	b := judged.Bytes[:len(judged.Bytes):len(judged.Bytes)]
	if last := b[len(b)-1]; last != '\n' && last != '\r' {
		b = append(b, '\n')
	}
	judged.Bytes = append(b, '\n')
	return judged, true
}

func (s *stream) whole(e sse.Event) bool {
	data := bytes.TrimSpace(e.Data)
	if bytes.Equal(data, doneData) {
		return true
	}
	isJSON, _ := s.payload.read(data)
	return isJSON
}

// judge says what an event is.
//
// An event named error is a failure. So is one whose data is not JSON: it is no
// answer, whoever wrote it, and no client could read it. An event whose name or
// shape is not known counts as output, except ping and null: llama.cpp begins
// completions with data: null.
func (s *stream) judge(e sse.Event) dialect.Event {
	out := dialect.Event{Bytes: e.Raw}
	data := bytes.TrimSpace(e.Data)
	s.ids = s.ids || e.ID
	if len(data) == 0 {
		return s.dataless(e)
	}
	name := string(e.Name)
	if bytes.Equal(data, doneData) && name != "error" {
		s.done, out.Done = true, true
		return out
	}
	p := &s.payload
	isJSON, isObject := p.read(e.Data)
	switch {
	case name == "error":
		out.Failure = s.namedError(data, isObject)
	case name != "" && name != "message" && (!isObject || p.choices < 0) && p.failure == nil:
		out.Output = name != "ping"
	case !isJSON:
		out.Failure = &dialect.Failure{Message: "undecodable event"}
	default:
		s.chunk(&out)
	}
	if out.Failure != nil {
		s.failed = true
	}
	if out.Output {
		s.outputs++
	}
	if isJSON && out.Bytes != nil && len(p.edits) > 0 {
		out.Bytes = s.patch(e)
	}
	return out
}

// dataless judges lines that carry no data. Comments pass: they keep connections
// alive. Anything else is withheld, and comments too once an id was sent: the
// decoders of the common SDKs make an empty event of it then, and fail on its
// empty JSON. Bytes that are not text are no event stream.
func (s *stream) dataless(e sse.Event) dialect.Event {
	switch {
	case !utf8.Valid(e.Raw):
		s.failed = true
		return dialect.Event{Failure: &dialect.Failure{Message: "undecodable event"}}
	case e.Fields > 0 || s.ids:
		return dialect.Event{}
	}
	return dialect.Event{Bytes: e.Raw}
}

// namedError is the failure that an event named error reports, whatever form
// its data has.
func (s *stream) namedError(data []byte, isObject bool) *dialect.Failure {
	switch p := &s.payload; {
	case !isObject:
		return &dialect.Failure{Message: short(data)}
	case p.failure != nil:
		return p.failure
	default:
		flat := p.flat
		return &flat
	}
}

// chunk judges the payload of an ordinary event.
func (s *stream) chunk(out *dialect.Event) {
	p := &s.payload
	if p.hasUsage {
		s.report()
	}
	if p.failure != nil {
		out.Failure = p.failure
		return
	}
	usageOnly := p.hasUsage && p.choices <= 0 && !p.output
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
		into.usage.Completion = sum(into.usage.Completion, p.usage.Completion)
		if s.prompts {
			into.usage.Prompt = sum(into.usage.Prompt, p.usage.Prompt)
			into.usage.Cached = sum(into.usage.Cached, p.usage.Cached)
		}
	default:
		*into = report{p.usage, true}
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

// patch applies the payload's edits to an event's bytes.
func (s *stream) patch(e sse.Event) []byte {
	if e.At < 0 {
		s.data = appendEdited(s.data[:0], e.Data, s.payload.edits)
		s.patched = sse.AppendWithData(s.patched[:0], e.Raw, s.data)
		return s.patched
	}
	s.patched = append(s.patched[:0], e.Raw[:e.At]...)
	s.patched = appendEdited(s.patched, e.Data, s.payload.edits)
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
