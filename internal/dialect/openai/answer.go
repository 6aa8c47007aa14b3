// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"fmt"

	"github.com/headgate/headgate/internal/dialect"
)

// Answer reads a whole answer. Its error says why the body is not an answer of
// this format: garbage, HTML, half an object.
func (api) Answer(_ *dialect.Request, body []byte, model string) (*dialect.Answer, error) {
	p := newPayload(model)
	isJSON, isObject := p.read(body)
	switch {
	case !isJSON:
		return nil, fmt.Errorf("answer is not JSON at byte %d: %s", p.Pos(), p.Err())
	case !isObject:
		return nil, fmt.Errorf("answer is not a JSON object")
	}
	return &dialect.Answer{
		Failure: p.failure, Usage: p.usage, HasUsage: p.hasUsage,
		Edits: p.edits, Choices: max(p.choices, 0),
	}, nil
}

// AnswerHead finds the edits of a body whose end is not there yet.
func (api) AnswerHead(body []byte, model string) []dialect.Edit {
	p := newPayload(model)
	p.read(body)
	return p.edits
}

// newPayload makes a payload that restores a model's name, unless that is "".
func newPayload(model string) *payload {
	p := &payload{}
	if model != "" {
		p.model = encode(model)
	}
	return p
}
