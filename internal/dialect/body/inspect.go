// SPDX-License-Identifier: Apache-2.0

// Package body reads JSON bodies as far as all dialects read them alike: the
// keys of a request that mean the same everywhere, the error, usage and model
// of an answer, and the framing of a stream's events.
//
// It owns these readings and no format: which key holds a prompt, which event
// is output and when an answer is whole, the dialects say. They embed its types
// and nobody else uses them.
package body

import (
	"bytes"
	"slices"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
)

// piecesMax bounds Request.Prompt, so that a body of empty pieces does not cost
// many times its own size.
const piecesMax = 8192

// An Inspection is one pass over one request body. A method that reads a value
// takes exactly one, of whatever kind.
type Inspection struct {
	jsonscan.Cursor
	Body  []byte
	Found dialect.Request
	IDs   int // token ids in prompts
	Texts int // prompt strings, empty ones too

	bad  *inference.Error // the first fault that is not one of syntax
	seen []string         // keys that were there
}

// Read passes over body, an object whose members it hands to member. Its error
// is invalid_json: text that is not JSON, or not UTF-8, or nested too deep.
// Other faults wait for Err.
func (in *Inspection) Read(body []byte, member func(key []byte)) error {
	in.Body = body
	in.Reset(body, true)
	if in.Kind() == jsonscan.Object {
		start := in.Pos()
		for more := in.Enter(); more; more = in.Next() {
			member(in.Key())
		}
		in.Found.Object = dialect.Span{Start: start, End: in.Pos()}
	} else {
		in.Skip()
		in.Refuse(inference.InvalidRequest, "the body must be a JSON object")
	}
	in.End()
	if reason := in.Cursor.Err(); reason != "" {
		line := bytes.Count(body[:in.Pos()], []byte("\n")) + 1
		return inference.Errorf(inference.InvalidJSON, "the body is not valid JSON at byte %d (line %d): %s", in.Pos(), line, reason)
	}
	return nil
}

// Refuse notes a fault; the first one counts.
func (in *Inspection) Refuse(code inference.Code, message string) {
	if in.bad == nil {
		in.bad = inference.Errorf(code, "%s", message)
	}
}

// Refused is the first fault, or nil.
func (in *Inspection) Refused() error {
	if in.bad == nil {
		return nil
	}
	return in.bad
}

// Once refuses a key that is written twice: of two values the engine might take
// the one that was not checked.
func (in *Inspection) Once(key string) {
	if in.Has(key) {
		in.Refuse(inference.InvalidRequest, key+": is written twice")
	}
	in.seen = append(in.seen, key)
}

// Has reports whether Once was called for the key.
func (in *Inspection) Has(key string) bool { return slices.Contains(in.seen, key) }

// Model reads the model's name.
func (in *Inspection) Model() {
	in.Once("model")
	switch in.Kind() {
	case jsonscan.String:
		start := in.Pos()
		in.Found.Model = in.Unquote(in.String())
		in.Found.ModelSpan = dialect.Span{Start: start, End: in.Pos()}
	case jsonscan.Null:
		in.Null()
	default:
		in.Skip()
		in.Refuse(inference.InvalidRequest, "model: must be a string")
	}
}

// RequireModel refuses a request that names none.
func (in *Inspection) RequireModel() {
	if in.Found.Model == "" {
		in.Refuse(inference.MissingModel, "model: must name a model")
	}
}

// Stream reads whether the answer is to be streamed.
func (in *Inspection) Stream() {
	in.Once("stream")
	in.Found.Stream = in.Boolean("stream")
}

// Unquote decodes a string that was read.
func (in *Inspection) Unquote(s jsonscan.Str) string {
	raw := in.Body[s.Start:s.End]
	if !s.Escaped {
		return string(raw)
	}
	return string(jsonscan.AppendUnquoted(nil, raw))
}

// Hint reads a string that only helps routing; the engine judges another type.
func (in *Inspection) Hint() string {
	if in.Kind() != jsonscan.String {
		in.Skip()
		return ""
	}
	return in.Unquote(in.String())
}

// Boolean reads true, false or null. Engines that also take "true" or 1 would
// stream an answer that Headgate collects, so nothing else passes.
func (in *Inspection) Boolean(path string) bool {
	switch in.Kind() {
	case jsonscan.Bool:
		return in.Bool()
	case jsonscan.Null:
		in.Null()
	default:
		in.Skip()
		in.Refuse(inference.InvalidRequest, path+": must be true or false")
	}
	return false
}

// Limit reads a token limit. Whether an odd one is an error the engine decides:
// llama.cpp takes -1 for no limit.
func (in *Inspection) Limit() int {
	if in.Kind() != jsonscan.Number {
		in.Skip()
		return 0
	}
	n, _ := in.Int()
	return max(n, 0)
}

// Skipped passes a value and returns where it is.
func (in *Inspection) Skipped() dialect.Span {
	in.Kind() // passes white space
	start := in.Pos()
	in.Skip()
	if in.Err() != "" {
		return dialect.Span{}
	}
	return dialect.Span{Start: start, End: in.Pos()}
}

// Empty tells null, false, "", [] and {} from values that hold something.
func Empty(raw []byte) bool {
	if len(raw) == 0 {
		return true
	}
	switch raw[0] {
	case '"':
		return len(raw) == 2
	case '[', '{':
		return len(bytes.TrimSpace(raw[1:len(raw)-1])) == 0
	}
	return raw[0] == 'n' || raw[0] == 'f'
}

// Tools reads a list of tools, under whatever key.
func (in *Inspection) Tools(key string) {
	in.Once(key)
	span := in.Skipped()
	if Empty(span.Of(in.Body)) {
		return
	}
	in.Found.Tools = true
	if in.Found.ToolsSpan.Empty() {
		in.Found.ToolsSpan = span
	}
	in.Found.Text.Bytes += span.End - span.Start
}

// TypeOf reads an object's type.
func (in *Inspection) TypeOf() (name string) {
	if in.Kind() != jsonscan.Object {
		in.Skip()
		return ""
	}
	for more := in.Enter(); more; more = in.Next() {
		if string(in.Key()) == "type" {
			name = in.Hint()
		} else {
			in.Skip()
		}
	}
	return name
}

// Messages reads a list of messages and reports whether it is one. What a
// message says is its content and its tool calls.
func (in *Inspection) Messages() bool {
	if in.Kind() != jsonscan.Array {
		in.Skip()
		return false
	}
	for more := in.Enter(); more; more = in.Next() {
		if in.Kind() != jsonscan.Object {
			in.Skip() // the engine judges it
			continue
		}
		for more := in.Enter(); more; more = in.Next() {
			switch string(in.Key()) {
			case "content":
				in.Content()
			case "tool_calls":
				in.Raw()
			default:
				in.Skip()
			}
		}
	}
	return true
}

// Content reads content: a string, or parts of which those with text count.
// Images and sound are not text, however many bytes they take.
func (in *Inspection) Content() {
	switch in.Kind() {
	case jsonscan.String:
		in.Words(in.String())
	case jsonscan.Array:
		for more := in.Enter(); more; more = in.Next() {
			in.Part()
		}
	default:
		in.Part()
	}
}

// Part reads a part of content: its text, what it says to a tool, or the answer
// of a tool that it quotes.
func (in *Inspection) Part() {
	switch in.Kind() {
	case jsonscan.String:
		in.Words(in.String())
	case jsonscan.Object:
		for more := in.Enter(); more; more = in.Next() {
			switch key := string(in.Key()); {
			case (key == "text" || key == "thinking") && in.Kind() == jsonscan.String:
				in.Words(in.String())
			case key == "content":
				in.Content()
			case key == "input" && in.Kind() == jsonscan.Object:
				in.Raw()
			default:
				in.Skip()
			}
		}
	default:
		in.Skip()
	}
}

// Raw reads a value that goes into the prompt as its JSON text.
func (in *Inspection) Raw() {
	span := in.Skipped()
	if Empty(span.Of(in.Body)) {
		return
	}
	in.piece(span.Start, span.End)
	in.Found.Text.Bytes += span.End - span.Start
}

func (in *Inspection) piece(start, end int) {
	if len(in.Found.Prompt) < piecesMax {
		in.Found.Prompt = append(in.Found.Prompt, dialect.Span{Start: start, End: end})
	}
}

// Words takes a string that was read into the prompt.
func (in *Inspection) Words(s jsonscan.Str) {
	in.piece(s.Start, s.End)
	in.Found.Text = in.Found.Text.Add(dialect.Text{Bytes: s.Bytes, CJK: s.CJK})
	in.Texts++
}

// Prompt reads a prompt and returns how many there are: a string, a list of
// strings or objects with text, token ids, or a list of lists of token ids.
// Another shape counts as one prompt each.
func (in *Inspection) Prompt() (prompts int) {
	if in.Kind() != jsonscan.Array {
		in.Part()
		return 1
	}
	start, ids := in.Pos(), 0
	for more := in.Enter(); more; more = in.Next() {
		switch in.Kind() {
		case jsonscan.Number:
			in.Number()
			ids++
			continue
		case jsonscan.Array:
			in.tokenIDs()
		default:
			in.Part()
		}
		prompts++
	}
	if ids > 0 {
		prompts++
		in.IDs += ids
		in.piece(start, in.Pos())
	}
	return max(prompts, 1)
}

func (in *Inspection) tokenIDs() {
	start := in.Pos()
	for more := in.Enter(); more; more = in.Next() {
		if in.Kind() == jsonscan.Number {
			in.IDs++
		}
		in.Skip()
	}
	in.piece(start, in.Pos())
}

// Request is what was found, with its prompt counted. It is complete once all
// of the body was read and nothing refused.
func (in *Inspection) Request() *dialect.Request {
	r := in.Found
	r.PromptTokens = inference.Tokens{N: in.IDs + r.Text.Tokens()}
	if in.IDs > 0 && in.Texts == 0 {
		r.PromptTokens.Source = inference.Counted
	}
	r.Choices, r.Prompts = max(r.Choices, 1), max(r.Prompts, 1)
	return &r
}

// First moves the pieces of the prompt from index i on to its beginning:
// templates write a system prompt first, wherever the body has it.
func (in *Inspection) First(i int) {
	p := in.Found.Prompt
	if i <= 0 || i >= len(p) {
		return
	}
	moved := append([]dialect.Span{}, p[i:]...)
	copy(p[len(moved):], p[:i])
	copy(p, moved)
}

// ModelEdit is the edit that names another model, if the request names one and
// another is wanted.
func ModelEdit(r *dialect.Request, model string) []dialect.Edit {
	if model == "" || model == r.Model || r.ModelSpan.Empty() {
		return nil
	}
	return []dialect.Edit{{Span: r.ModelSpan, Text: Encode(model)}}
}
