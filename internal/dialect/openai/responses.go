// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"strings"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
	"github.com/headgate/headgate/internal/dialect/sse"
)

// Responses is the dialect of /v1/responses: items in, typed events out.
//
// What it asks of an engine has to be in the request: an earlier answer, a
// conversation or a background job lives in the memory of one engine, and the
// next request may go to another.
var Responses dialect.Dialect = responses{}

type responses struct{ api }

// Inspect reads a request.
func (responses) Inspect(_ string, text []byte) (*dialect.Request, error) {
	in := item{}
	if err := in.Read(text, in.member); err != nil {
		return nil, err
	}
	in.First(in.instructions)
	in.RequireModel()
	if err := in.Refused(); err != nil {
		return nil, err
	}
	return in.Request(), nil
}

// An item is one pass over a request, which is a list of items.
type item struct {
	body.Inspection
	instructions int // where they are among the pieces of the prompt
}

func (in *item) member(key []byte) {
	switch string(key) {
	case "model":
		in.Model()
	case "stream":
		in.Stream()
	case "input":
		in.Once("input")
		in.input()
	case "instructions":
		in.Once("instructions")
		in.instructions = len(in.Found.Prompt)
		in.Content()
	case "max_output_tokens":
		in.Once("max_output_tokens")
		in.Found.MaxTokens = in.Limit()
	case "tools":
		in.Tools("tools")
	case "text":
		in.Once("text")
		in.format()
	case "background":
		in.Once("background")
		if in.Boolean("background") {
			in.Refuse(inference.InvalidRequest, "background: must be false: an answer that is to be fetched later lives in one engine, and no later request is sure to reach it")
		}
	case "previous_response_id":
		in.Once("previous_response_id")
		in.remembered("previous_response_id")
	case "conversation":
		in.Once("conversation")
		in.remembered("conversation")
	default:
		hint(&in.Inspection, key)
	}
}

// remembered refuses what only the engine knows that answered before.
func (in *item) remembered(key string) {
	if !body.Empty(in.Skipped().Of(in.Body)) {
		in.Refuse(inference.InvalidRequest, key+": must be absent: earlier turns live in the engine that answered them; send them in input")
	}
}

// input reads what was asked: a string, or items. Of an item that is no message
// its text counts, whatever the key.
func (in *item) input() {
	if in.Kind() != jsonscan.Array {
		in.Content()
		return
	}
	for more := in.Enter(); more; more = in.Next() {
		if in.Kind() != jsonscan.Object {
			in.Part()
			continue
		}
		for more := in.Enter(); more; more = in.Next() {
			switch string(in.Key()) {
			case "content", "output", "arguments", "input", "summary":
				in.Content()
			default:
				in.Skip()
			}
		}
	}
}

func (in *item) format() {
	if in.Kind() != jsonscan.Object {
		in.Skip()
		return
	}
	for more := in.Enter(); more; more = in.Next() {
		if string(in.Key()) == "format" {
			in.Found.ResponseFormat = in.TypeOf()
		} else {
			in.Skip()
		}
	}
}

// RequestEdits never asks for usage: the last event has it.
func (responses) RequestEdits(r *dialect.Request, _ []byte, model string, _ bool) []dialect.Edit {
	return body.ModelEdit(r, model)
}

// EndMarker is nil: the last event holds the whole answer, and only the engine
// can write it.
func (responses) EndMarker() []byte { return nil }

// ErrorEvent is the API's own error event, with its error once more under the
// key error: openai-node, openai-python and openai-go raise an error for that
// key alone, the AI SDK for the type, and readers of the API's documentation
// look for code and message beside it.
func (r responses) ErrorEvent(e *inference.Error, d dialect.ErrorDetail) []byte {
	type event struct {
		Type     string         `json:"type"`
		Sequence int            `json:"sequence_number"`
		Code     inference.Code `json:"code"`
		Message  string         `json:"message"`
		Param    *string        `json:"param"`
		Error    errorObject    `json:"error"`
	}
	data := body.Encode(event{Type: "error", Sequence: d.Events, Code: e.Code, Message: e.Message, Error: errorOf(e, d)})
	return append(append([]byte("event: error\ndata: "), data...), "\n\n"...)
}

// Answer reads a whole answer, which has a null error where all went well: a
// documented field, which stays.
func (responses) Answer(_ *dialect.Request, text []byte, model string) (*dialect.Answer, error) {
	p := response{}
	p.SetModel(model)
	isJSON, isObject := p.read(text)
	switch {
	case !isJSON:
		return nil, notJSON(&p.Payload)
	case !isObject:
		return nil, errNoObject
	case p.status == "failed" && p.Failure == nil:
		p.Failure = &dialect.Failure{Message: "the response failed"}
	}
	return &dialect.Answer{Failure: p.Failure, Usage: p.Usage, HasUsage: p.HasUsage, Edits: p.Edits, Choices: 1}, nil
}

func (responses) AnswerHead(_ *dialect.Request, text []byte, model string) []dialect.Edit {
	p := response{}
	p.SetModel(model)
	p.read(text)
	return p.Edits
}

// A response is one pass over an event's data or a whole answer.
type response struct {
	body.Payload
	kind   string // type
	status string
	full   bool // carries something that a client can see
	tokens int
}

func (p *response) read(text []byte) (isJSON, isObject bool) {
	p.Start(text)
	p.kind, p.status, p.full, p.tokens = "", "", false, 0
	if isObject = p.Kind() == jsonscan.Object; isObject {
		for more := p.Enter(); more; more = p.Next() {
			p.member(p.Key())
		}
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

func (p *response) member(key []byte) {
	switch string(key) {
	case "type":
		p.kind = p.word()
		p.Flat.Type = p.kind
	case "status":
		p.status = p.word()
	case "response":
		p.response()
	case "delta", "text", "arguments", "input", "refusal", "annotation", "code":
		p.said(key)
	case "item", "part":
		p.thing()
	case "logprobs":
		if n := p.Length(); n > 0 {
			p.tokens, p.full = n, true
		}
	default:
		if !p.Top(key) {
			p.Skip()
		}
	}
}

// said reads a value that is output where it holds something. code is code that
// a tool runs, or the code of an error.
func (p *response) said(key []byte) {
	if string(key) == "code" {
		p.Flat.Code = p.ReadCode(&p.Flat)
		p.full = p.full || p.Flat.Code != ""
		return
	}
	p.full = p.Full() || p.full
}

// word is Str for words that hardly ever differ, without allocating.
func (p *response) word() string {
	raw := p.Value()
	if len(raw) < 2 || raw[0] != '"' {
		return ""
	}
	raw = raw[1 : len(raw)-1]
	switch string(raw) {
	case textDelta:
		return textDelta
	case argumentsDelta:
		return argumentsDelta
	case reasoningDelta:
		return reasoningDelta
	}
	return body.Short(jsonscan.AppendUnquoted(nil, raw))
}

const (
	textDelta      = "response.output_text.delta"
	argumentsDelta = "response.function_call_arguments.delta"
	reasoningDelta = "response.reasoning_text.delta"
)

// response reads the answer that an event shows as it stands.
func (p *response) response() {
	if p.Kind() != jsonscan.Object {
		p.Skip()
		return
	}
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "model":
			p.ReadModel()
		case "usage":
			p.ReadUsage()
		case "error":
			p.ReadError()
		case "status":
			p.status = p.word()
		default:
			p.Skip()
		}
	}
}

// thing reads an item of the answer, or a part of its content. Messages and
// reasoning are empty until they hold text; anything else is there for its own
// sake, such as a call of a function by its name.
func (p *response) thing() {
	if p.Kind() != jsonscan.Object {
		p.full = p.Full() || p.full
		return
	}
	other, text := false, false
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "type":
			switch p.word() {
			case "message", "reasoning", "output_text", "reasoning_text", "summary_text", "text", "refusal":
			default:
				other = true
			}
		case "content", "summary", "text", "refusal", "encrypted_content", "logprobs":
			text = p.Full() || text
		default:
			p.Skip()
		}
	}
	p.full = p.full || other || text
}

// A typed stream is one whose events say what they are.
type typed struct {
	body.Stream
	payload  response
	usage    inference.Usage
	hasUsage bool
	complete bool
}

func (responses) NewStream(_ *dialect.Request, o dialect.StreamOptions) dialect.Stream {
	s := &typed{}
	s.payload.SetModel(o.Model)
	s.Stream = body.NewStream(o, s)
	return s
}

func (s *typed) Complete() bool                 { return s.complete && !s.Failed() }
func (s *typed) Usage() (inference.Usage, bool) { return s.usage, s.hasUsage }

// Whole is for body.Stream.
func (s *typed) Whole(data []byte) bool {
	isJSON, _ := s.payload.read(data)
	return isJSON || bytes.Equal(data, doneData)
}

// Judge says what an event is. Its type is in its data; the name of the event
// says the same and is only looked at where the type is missing.
func (s *typed) Judge(e sse.Event, out dialect.Event) (dialect.Event, []dialect.Edit) {
	p := &s.payload
	if bytes.Equal(bytes.TrimSpace(e.Data), doneData) {
		out.Done = true // no event of this API, and no end: judged by Complete
		return out, nil
	}
	isJSON, isObject := p.read(e.Data)
	if !isJSON {
		out.Failure = undecodable()
		if string(e.Name) == "error" {
			out.Failure.Message = body.Short(bytes.TrimSpace(e.Data))
		}
		return out, nil
	}
	if p.HasUsage {
		s.usage, s.hasUsage = p.Usage, true
	}
	kind := p.kind
	if kind == "" {
		kind = string(e.Name)
	}
	s.event(&out, kind, isObject)
	return out, p.Edits
}

func (s *typed) event(out *dialect.Event, kind string, isObject bool) {
	p := &s.payload
	switch kind {
	case "error", "response.failed", "response.error", "response.cancelled":
		out.Failure = p.Failure
		if out.Failure == nil {
			flat := p.Flat
			out.Failure = &flat
		}
		return
	case "response.completed", "response.incomplete":
		// Even if it holds an error: an incomplete answer says why.
		s.complete = true
		out.Done, out.Finish = true, true
		return
	case "response.created", "response.in_progress", "response.queued", "ping", "keepalive":
		return
	}
	switch {
	case p.Failure != nil:
		out.Failure = p.Failure
	case !isObject:
		out.Output = true
	case strings.HasSuffix(kind, ".delta"):
		if out.Output = p.full; p.full {
			out.Tokens = max(p.tokens, 1)
		}
	case strings.HasSuffix(kind, ".added"), strings.HasSuffix(kind, ".done"):
		// What follows deltas repeats them, and what comes without any is output
		// all the same.
		out.Output = p.full
	default:
		out.Output = true
	}
}
