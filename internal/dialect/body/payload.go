// SPDX-License-Identifier: Apache-2.0

package body

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
)

// A Payload is one pass over one JSON text of an answer: the data of an event,
// or a whole body. A method that reads a value takes exactly one, of whatever
// kind.
type Payload struct {
	jsonscan.Cursor
	Text  []byte
	Model []byte // the client's model name as JSON; nil leaves names alone

	Usage    inference.Usage // meaningful if HasUsage
	HasUsage bool            // usage is an object
	Failure  *dialect.Failure
	Edits    []dialect.Edit // reused by the next pass

	// For an error that an engine writes at the top level instead of inside
	// error: {"object":"error","message":…,"code":404}.
	Flat      dialect.Failure
	FlatError bool
}

// Start begins a pass.
func (p *Payload) Start(text []byte) {
	p.Reset(text, false)
	p.Text, p.Edits = text, p.Edits[:0]
	p.HasUsage, p.Failure = false, nil
	p.Flat, p.FlatError = dialect.Failure{}, false
}

// SetModel says which name to restore; "" leaves names alone.
func (p *Payload) SetModel(name string) {
	if name != "" {
		p.Model = Encode(name)
	}
}

// Value passes a value and returns its bytes.
func (p *Payload) Value() []byte {
	p.Kind()
	start := p.Pos()
	p.Skip()
	if p.Err() != "" {
		return nil
	}
	return p.Text[start:p.Pos()]
}

// Full passes a value and reports whether it is a string, object or array that
// holds something.
func (p *Payload) Full() bool {
	switch p.Kind() {
	case jsonscan.String, jsonscan.Object, jsonscan.Array:
		return !Empty(p.Value())
	}
	p.Skip()
	return false
}

// Length passes a value and returns how many elements it has if it is an array.
func (p *Payload) Length() (n int) {
	if p.Kind() != jsonscan.Array {
		p.Skip()
		return 0
	}
	for more := p.Enter(); more; more = p.Next() {
		p.Skip()
		n++
	}
	return n
}

// ReadUsage keeps the last usage that is not null: some engines send a running
// one with every event. OpenAI's endpoints have two sets of names for the same
// counts. Anthropic counts what came from the cache beside the input.
func (p *Payload) ReadUsage() {
	if p.Kind() != jsonscan.Object {
		p.Skip()
		return
	}
	p.HasUsage = true
	p.Usage = inference.Usage{Prompt: -1, Completion: -1, Cached: -1}
	created, read := -1, -1
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "prompt_tokens", "input_tokens":
			p.Usage.Prompt = p.Count()
		case "completion_tokens", "output_tokens":
			p.Usage.Completion = p.Count()
		case "prompt_tokens_details", "input_tokens_details":
			p.cachedTokens()
		case "cache_creation_input_tokens":
			created = p.Count()
		case "cache_read_input_tokens":
			read = p.Count()
		default:
			p.Skip()
		}
	}
	if read >= 0 {
		p.Usage.Cached = read
	}
	if p.Usage.Prompt >= 0 {
		p.Usage.Prompt += max(created, 0) + max(read, 0)
	}
}

func (p *Payload) cachedTokens() {
	if p.Kind() != jsonscan.Object {
		p.Skip()
		return
	}
	for more := p.Enter(); more; more = p.Next() {
		if string(p.Key()) == "cached_tokens" {
			p.Usage.Cached = p.Count()
		} else {
			p.Skip()
		}
	}
}

// Count reads a number of tokens, -1 if it is none.
func (p *Payload) Count() int {
	if p.Kind() != jsonscan.Number {
		p.Skip()
		return -1
	}
	// A sum of counts must not overflow, whatever an engine writes.
	if n, ok := p.Int(); ok && n <= 1<<40 {
		return max(n, -1)
	}
	return -1
}

// ReadModel reads a model's name and restores the client's.
func (p *Payload) ReadModel() {
	if p.Kind() != jsonscan.String || p.Model == nil {
		p.Skip()
		return
	}
	start := p.Pos()
	p.String()
	if p.Err() == "" && !bytes.Equal(p.Text[start:p.Pos()], p.Model) {
		p.Edits = append(p.Edits, dialect.Edit{Span: dialect.Span{Start: start, End: p.Pos()}, Text: p.Model})
	}
}

// Top reads the value of a key that means the same at the top of every answer
// and reports whether it did.
func (p *Payload) Top(key []byte) bool {
	switch string(key) {
	case "usage":
		p.ReadUsage()
	case "model":
		p.ReadModel()
	case "error":
		p.ReadError()
	case "object":
		p.FlatError = string(p.Value()) == `"error"`
	case "message":
		p.Flat.Message = p.Str()
	case "type":
		p.Flat.Type = p.Str()
	case "code", "status":
		p.ReadCode(&p.Flat)
	default:
		return false
	}
	return true
}

// Flatten makes a failure of an error that is written at the top level.
func (p *Payload) Flatten() {
	if p.Failure == nil && p.FlatError {
		flat := p.Flat
		p.Failure = &flat
	}
	if p.Failure != nil && p.Failure.Status == 0 {
		p.Failure.Status = p.Flat.Status
	}
}

// ReadError reads an error. null, an empty string, false and 0 are none to any
// SDK but one.
func (p *Payload) ReadError() {
	switch p.Kind() {
	case jsonscan.Null:
		p.Null()
	case jsonscan.Object:
		p.Failure = &dialect.Failure{}
		p.errorObject()
	case jsonscan.String:
		if message := p.Str(); message != "" {
			p.Failure = &dialect.Failure{Message: message}
		}
	default:
		if raw := p.Value(); string(raw) != "false" && string(raw) != "0" {
			p.Failure = &dialect.Failure{Message: Short(raw)}
		}
	}
}

func (p *Payload) errorObject() {
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "message":
			p.Failure.Message = p.Str()
		case "type":
			p.Failure.Type = p.Str()
		case "code":
			p.Failure.Code = p.ReadCode(p.Failure)
		case "status":
			p.ReadCode(p.Failure)
		default:
			p.Skip()
		}
	}
}

// ReadCode reads a code, as a number or as a string, and notes it in f if it is
// an HTTP error status.
func (p *Payload) ReadCode(f *dialect.Failure) string {
	code := p.Str()
	if n, ok := jsonscan.ParseInt([]byte(code)); ok && n >= 400 && n <= 599 {
		f.Status = n
	}
	return code
}

// Str reads a string, or what else there is as its JSON text. null reads as "".
func (p *Payload) Str() string {
	if p.Kind() != jsonscan.String {
		if raw := p.Value(); string(raw) != "null" {
			return Short(raw)
		}
		return ""
	}
	s := p.String()
	return Short(jsonscan.AppendUnquoted(nil, p.Text[s.Start:s.End]))
}

// MessageMax bounds what is kept of an engine's error text.
const MessageMax = 2 << 10

// Short is b as a string that is UTF-8 and of bounded length.
func Short(b []byte) string {
	if len(b) > MessageMax {
		n := MessageMax
		for n > MessageMax-utf8.UTFMax && !utf8.RuneStart(b[n]) {
			n--
		}
		b = b[:n]
	}
	return string(bytes.ToValidUTF8(b, []byte("\uFFFD")))
}

// Encode writes v as JSON on one line, with < > & as they are.
func Encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return []byte("null") // not reached: strings, numbers and booleans always encode
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
