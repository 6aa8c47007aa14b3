// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"fmt"

	"github.com/headgate/headgate/internal/dialect"
)

// Answer reads a whole answer. Its error says why the body is not an answer of
// this format: garbage, HTML, half an object.
func (api) Answer(_ *dialect.Request, body []byte, model string) (*dialect.Answer, error) {
	var p payload
	if model != "" {
		p.model = encode(model)
	}
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
