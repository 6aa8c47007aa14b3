// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"errors"
	"fmt"

	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
)

var errNoObject = errors.New("answer is not a JSON object")

// Answer reads a whole answer. Its error says why the body is not an answer of
// this format: garbage, HTML, half an object.
func (api) Answer(_ *dialect.Request, text []byte, model string) (*dialect.Answer, error) {
	p := newPayload(model)
	isJSON, isObject := p.read(text)
	switch {
	case !isJSON:
		return nil, notJSON(&p.Payload)
	case !isObject:
		return nil, errNoObject
	}
	return &dialect.Answer{
		Failure: p.Failure, Usage: p.Usage, HasUsage: p.HasUsage,
		Edits: p.Edits, Choices: max(p.choices, 0),
	}, nil
}

func notJSON(p *body.Payload) error {
	return fmt.Errorf("answer is not JSON at byte %d: %s", p.Pos(), p.Err())
}

// AnswerHead finds the edits of a body whose end is not there yet.
func (api) AnswerHead(_ *dialect.Request, text []byte, model string) []dialect.Edit {
	p := newPayload(model)
	p.read(text)
	return p.Edits
}

// newPayload makes a payload that restores a model's name, unless that is "".
func newPayload(model string) *payload {
	p := &payload{}
	p.SetModel(model)
	return p
}
