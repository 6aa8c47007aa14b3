// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"strings"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
	"github.com/headgate/headgate/internal/dialect/sse"
)

// Transcriptions is the dialect of /v1/audio/transcriptions and translations: a
// form with a sound file in, JSON, text or events out.
var Transcriptions dialect.Dialect = transcriptions{}

type transcriptions struct{ api }

func (transcriptions) CheckType(contentType string) error { return dialect.CheckForm(contentType) }

// Inspect finds the few fields that matter here. Python engines read a boolean
// of a form in many spellings, and so does Headgate.
func (transcriptions) Inspect(contentType string, form []byte) (*dialect.Request, error) {
	all, wrong := fields(contentType, form)
	if wrong != "" {
		return nil, inference.Errorf(inference.InvalidRequest, "%s", wrong)
	}
	r := &dialect.Request{Choices: 1, Prompts: 1, IncludeUsage: true} // an event with usage was asked for, or is not there
	seen := map[string]bool{}
	for _, f := range all {
		switch f.name {
		case "model", "stream", "response_format", "user":
		default:
			continue
		}
		if seen[f.name] {
			return nil, inference.Errorf(inference.InvalidRequest, "%s: is written twice", f.name)
		}
		seen[f.name] = true
		v, err := f.read(form)
		if err != nil {
			return nil, err
		}
		switch f.name {
		case "model":
			r.Model, r.ModelSpan = v, f.Span
		case "user":
			r.User = v
		case "response_format":
			r.ResponseFormat = v
		case "stream":
			if r.Stream, err = boolean(v); err != nil {
				return nil, err
			}
		}
	}
	if r.Model == "" {
		return nil, inference.Errorf(inference.MissingModel, "model: must name a model")
	}
	r.Opaque = r.ResponseFormat != "" && !strings.HasSuffix(r.ResponseFormat, "json")
	return r, nil
}

func boolean(v string) (bool, *inference.Error) {
	switch strings.ToLower(v) {
	case "true", "1", "on", "yes", "t", "y":
		return true, nil
	case "false", "0", "off", "no", "f", "n":
		return false, nil
	}
	return false, inference.Errorf(inference.InvalidRequest, "stream: must be true or false")
}

// RequestEdits writes another model's name in the place of the field's value.
func (transcriptions) RequestEdits(r *dialect.Request, _ []byte, model string, _ bool) []dialect.Edit {
	if model == "" || model == r.Model {
		return nil
	}
	return []dialect.Edit{{Span: r.ModelSpan, Text: []byte(model)}}
}

// Answer reads JSON, or takes text as it is where that was asked for.
func (transcriptions) Answer(r *dialect.Request, text []byte, model string) (*dialect.Answer, error) {
	return one(r, text, model)
}

func (transcriptions) AnswerHead(r *dialect.Request, text []byte, model string) []dialect.Edit {
	return oneHead(r, text, model)
}

// EndMarker is nil: see Complete.
func (transcriptions) EndMarker() []byte { return nil }

// A transcription judges one that is streamed. OpenAI's has typed events and
// ends by one of them; vLLM's is made of chunks as in chat.
type transcription struct {
	stream
	ended bool
}

func (transcriptions) NewStream(r *dialect.Request, o dialect.StreamOptions) dialect.Stream {
	s := &transcription{stream: *newStream(r, o)}
	s.Stream = body.NewStream(o, s)
	return s
}

// Complete needs the end marker: vLLM cuts long sound into pieces and writes a
// finish_reason after each of them.
func (s *transcription) Complete() bool { return s.ended && !s.Failed() }

// Judge says what an event is.
func (s *transcription) Judge(e sse.Event, out dialect.Event) (dialect.Event, []dialect.Edit) {
	out, edits := s.stream.Judge(e, out)
	switch {
	case out.Failure != nil:
	case bytes.Equal(bytes.TrimSpace(e.Data), doneData):
		s.ended = s.ended || s.nFinished > 0
	case s.payload.Flat.Type == "transcript.text.done":
		s.ended = true
		out.Output, out.Finish, out.Done = true, true, true
	case s.payload.Flat.Type == "transcript.text.delta":
		out.Output, out.Tokens = true, 1
	}
	return out, edits
}
