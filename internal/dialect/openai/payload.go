// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
)

// A payload is one pass over one JSON text of an answer: the data of an event,
// or a whole body.
type payload struct {
	body.Payload
	found
}

// found is what a read found. The slice is reused by the next read.
type found struct {
	null     bool  // the text is null
	choices  int   // choices in it, -1 when there is no list of them
	output   bool  // carries output
	tokens   int   // output tokens, as counted
	finished []int // choice indexes with a finish_reason
}

// read reads text and reports whether it is JSON, and a JSON object at that.
func (p *payload) read(text []byte) (isJSON, isObject bool) {
	p.Start(text)
	p.found = found{choices: -1, finished: p.finished[:0]}
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
	p.FlatError = p.FlatError && p.choices < 0
	p.Flatten()
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
	p.Edits = append(p.Edits, dialect.Edit{Span: dialect.Span{Start: start, End: end}})
}

// member reads the value of a top-level key and reports whether the member must
// not reach the client: a null error makes openai-go and the AI SDK drop the
// text (measured).
func (p *payload) member(key []byte) (removed bool) {
	switch string(key) {
	case "choices":
		p.choiceList()
	case "error":
		if p.Kind() == jsonscan.Null {
			p.Null()
			return true
		}
		p.ReadError()
	default:
		if !p.Top(key) {
			p.Skip()
		}
	}
	return false
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
			said = p.Full() || said
		case "finish_reason":
			finished = !body.Empty(p.Value())
		case "logprobs":
			listed = p.logprobs()
		case "token_ids":
			ids = p.Length()
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
		return p.Full()
	}
	for more := p.Enter(); more; more = p.Next() {
		if string(p.Key()) == "role" {
			p.Skip()
		} else if p.Full() {
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
			n += p.Length()
		default:
			p.Skip()
		}
	}
	return n
}
