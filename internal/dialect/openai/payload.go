// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"unicode/utf8"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
)

// A payload is one pass over one JSON text of an answer: the data of an event,
// or a whole body.
type payload struct {
	jsonscan.Cursor
	text  []byte
	model []byte // the client's model name as JSON; nil leaves names alone
	found
}

// found is what a read found. The slices are reused by the next read.
type found struct {
	null     bool  // the text is null
	choices  int   // choices in it, -1 when there is no list of them
	output   bool  // carries output
	tokens   int   // output tokens, as counted
	finished []int // choice indexes with a finish_reason
	usage    inference.Usage
	hasUsage bool // usage is an object
	failure  *dialect.Failure
	edits    []dialect.Edit

	// For an error that an engine writes at the top level instead of inside
	// error: {"object":"error","message":…,"code":404}.
	flat      dialect.Failure
	flatError bool
}

// read reads text and reports whether it is JSON, and a JSON object at that.
func (p *payload) read(text []byte) (isJSON, isObject bool) {
	p.Reset(text, false)
	p.text = text
	p.found = found{choices: -1, finished: p.finished[:0], edits: p.edits[:0]}
	switch p.Kind() {
	case jsonscan.Object:
		isObject = true
		p.members()
	case jsonscan.Null:
		p.null = true
		p.Null()
	default:
		p.Skip()
	}
	p.End()
	if p.Err() != "" {
		return false, false
	}
	if p.failure == nil && p.flatError && p.choices < 0 {
		flat := p.flat
		p.failure = &flat
	}
	if p.failure != nil && p.failure.Status == 0 {
		p.failure.Status = p.flat.Status
	}
	return true, isObject
}

// members reads the top level. A null error is edited out together with the
// comma before it or, where no member before it stays, the comma after it.
func (p *payload) members() {
	kept, comma := 0, 0
	for more := p.Enter(); more; {
		start := p.Pos()
		removed := p.member(p.Key())
		end := p.Pos()
		more = p.Next()
		switch {
		case !removed:
			kept++
		case kept > 0:
			p.remove(comma, end)
		case more:
			p.remove(start, p.Pos())
		default:
			p.remove(start, end)
		}
		comma = p.Pos() - 1
	}
}

func (p *payload) remove(start, end int) {
	p.edits = append(p.edits, dialect.Edit{Span: dialect.Span{Start: start, End: end}})
}

// member reads the value of a top-level key and reports whether the member must
// not reach the client: a null error makes openai-go and the AI SDK drop the
// text (measured).
func (p *payload) member(key []byte) (removed bool) {
	switch string(key) {
	case "choices":
		p.choiceList()
	case "usage":
		p.readUsage()
	case "error":
		if p.Kind() == jsonscan.Null {
			p.Null()
			return true
		}
		p.readError()
	case "model":
		p.readModel()
	case "object":
		p.flatError = string(p.value()) == `"error"`
	case "message":
		p.flat.Message = p.str()
	case "type":
		p.flat.Type = p.str()
	case "code", "status":
		p.readCode(&p.flat)
	default:
		p.Skip()
	}
	return false
}

// value passes a value and returns its bytes.
func (p *payload) value() []byte {
	p.Kind()
	start := p.Pos()
	p.Skip()
	if p.Err() != "" {
		return nil
	}
	return p.text[start:p.Pos()]
}

// full passes a value and reports whether it is a string, object or array that
// holds something.
func (p *payload) full() bool {
	switch p.Kind() {
	case jsonscan.String, jsonscan.Object, jsonscan.Array:
		return !empty(p.value())
	}
	p.Skip()
	return false
}

// length passes a value and returns how many elements it has if it is an array.
func (p *payload) length() (n int) {
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

func (p *payload) choiceList() {
	switch p.Kind() {
	case jsonscan.Array:
	case jsonscan.Null:
		p.Null()
		return
	default:
		p.Skip()
		p.output = true // not a shape that is known, so perhaps output
		return
	}
	p.choices = 0
	for more := p.Enter(); more; more = p.Next() {
		p.choices++
		if p.Kind() == jsonscan.Object {
			p.choice()
		} else {
			p.Skip()
			p.output = true
		}
	}
}

// choice reads one choice. Its tokens are those that the engine lists, by
// logprobs or by id; without a list a delta that says something counts as one.
func (p *payload) choice() {
	index, finished, said, listed, ids := 0, false, false, 0, 0
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "index":
			if p.Kind() == jsonscan.Number {
				index, _ = p.Int()
			} else {
				p.Skip()
			}
		case "delta", "message":
			said = p.delta() || said
		case "text":
			said = p.full() || said
		case "finish_reason":
			finished = !empty(p.value())
		case "logprobs":
			listed = p.logprobs()
		case "token_ids":
			ids = p.length()
		default:
			p.Skip()
		}
	}
	if finished {
		p.finished = append(p.finished, index)
	}
	switch {
	case listed > 0:
		p.tokens += listed
	case ids > 0:
		p.tokens += ids
	case said:
		p.tokens++
	default:
		return
	}
	p.output = true
}

// delta reports whether a delta says anything: content, reasoning, a tool call,
// a refusal, audio or a key that is not known. The role says nothing.
func (p *payload) delta() (said bool) {
	if p.Kind() != jsonscan.Object {
		return p.full()
	}
	for more := p.Enter(); more; more = p.Next() {
		if string(p.Key()) == "role" {
			p.Skip()
		} else if p.full() {
			said = true
		}
	}
	return said
}

// logprobs returns the tokens listed: those of content and refusal (chat) or of
// tokens (completions).
func (p *payload) logprobs() (n int) {
	if p.Kind() != jsonscan.Object {
		p.Skip()
		return 0
	}
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "content", "refusal", "tokens":
			n += p.length()
		default:
			p.Skip()
		}
	}
	return n
}

// readUsage keeps the last usage that is not null: some engines send a running
// one with every chunk.
func (p *payload) readUsage() {
	if p.Kind() != jsonscan.Object {
		p.Skip()
		return
	}
	p.hasUsage = true
	p.usage = inference.Usage{Prompt: -1, Completion: -1, Cached: -1}
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "prompt_tokens":
			p.usage.Prompt = p.count()
		case "completion_tokens":
			p.usage.Completion = p.count()
		case "prompt_tokens_details":
			if p.Kind() != jsonscan.Object {
				p.Skip()
				continue
			}
			for more := p.Enter(); more; more = p.Next() {
				if string(p.Key()) == "cached_tokens" {
					p.usage.Cached = p.count()
				} else {
					p.Skip()
				}
			}
		default:
			p.Skip()
		}
	}
}

// count reads a number of tokens, -1 if it is none.
func (p *payload) count() int {
	if p.Kind() != jsonscan.Number {
		p.Skip()
		return -1
	}
	if n, ok := p.Int(); ok {
		return max(n, -1)
	}
	return -1
}

func (p *payload) readModel() {
	if p.Kind() != jsonscan.String || p.model == nil {
		p.Skip()
		return
	}
	start := p.Pos()
	p.String()
	if p.Err() == "" && !bytes.Equal(p.text[start:p.Pos()], p.model) {
		p.edits = append(p.edits, dialect.Edit{Span: dialect.Span{Start: start, End: p.Pos()}, Text: p.model})
	}
}

// readError reads an error that is not null. An empty string, false and 0 are
// no errors to any SDK but one, and stay as they are.
func (p *payload) readError() {
	switch p.Kind() {
	case jsonscan.Object:
		p.failure = &dialect.Failure{}
		p.errorObject()
	case jsonscan.String:
		if message := p.str(); message != "" {
			p.failure = &dialect.Failure{Message: message}
		}
	default:
		if raw := p.value(); string(raw) != "false" && string(raw) != "0" {
			p.failure = &dialect.Failure{Message: short(raw)}
		}
	}
}

func (p *payload) errorObject() {
	for more := p.Enter(); more; more = p.Next() {
		switch string(p.Key()) {
		case "message":
			p.failure.Message = p.str()
		case "type":
			p.failure.Type = p.str()
		case "code":
			p.failure.Code = p.readCode(p.failure)
		case "status":
			p.readCode(p.failure)
		default:
			p.Skip()
		}
	}
}

// readCode reads a code, as a number or as a string, and notes it in f if it is
// an HTTP error status.
func (p *payload) readCode(f *dialect.Failure) string {
	code := p.str()
	if n, ok := jsonscan.ParseInt([]byte(code)); ok && n >= 400 && n <= 599 {
		f.Status = n
	}
	return code
}

// str reads a string, or what else there is as its JSON text. null reads as "".
func (p *payload) str() string {
	if p.Kind() != jsonscan.String {
		if raw := p.value(); string(raw) != "null" {
			return short(raw)
		}
		return ""
	}
	s := p.String()
	return short(jsonscan.AppendUnquoted(nil, p.text[s.Start:s.End]))
}

// messageMax bounds what is kept of an engine's error text.
const messageMax = 2 << 10

// short is b as a string that is UTF-8 and of bounded length.
func short(b []byte) string {
	if len(b) > messageMax {
		n := messageMax
		for n > messageMax-utf8.UTFMax && !utf8.RuneStart(b[n]) {
			n--
		}
		b = b[:n]
	}
	return string(bytes.ToValidUTF8(b, []byte("\uFFFD")))
}
