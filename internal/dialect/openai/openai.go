// SPDX-License-Identifier: Apache-2.0

// Package openai speaks the wire format of OpenAI's chat/completions and
// completions, as vLLM, SGLang, TensorRT-LLM and llama.cpp serve them.
//
// It owns which keys of a request Headgate reads, which event of a stream is
// output, when every choice is finished, and the shape of an error. What it
// does not read it does not judge: unknown keys, numbers of any size and
// content of any kind pass byte for byte, and the engine decides. It refuses a
// request only where engine and gateway could understand it differently, as
// with a key that is written twice.
//
// Events without data are not the client's, except comments: an id or a retry
// alone and empty data break the decoders of several SDKs.
package openai

import (
	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
)

// The two dialects of this package.
var (
	Chat        dialect.Dialect = api{chat: true}
	Completions dialect.Dialect = api{}
)

// api is one implementation for both: they differ in what the prompt is.
type api struct{ chat bool }

var doneData = []byte("[DONE]")

func (api) EndMarker() []byte { return []byte("data: [DONE]\n\n") }

// errorObject is error's value. The order of keys is for readers only.
type errorObject struct {
	Message   string              `json:"message"`
	Type      string              `json:"type"`
	Param     *string             `json:"param"` // always null: the message names the field
	Code      inference.Code      `json:"code"`
	RequestID inference.RequestID `json:"request_id"`
	Partial   bool                `json:"partial_output"`
	Tokens    int                 `json:"delivered_output_tokens"`
	Retryable bool                `json:"retryable"`
}

func errorOf(e *inference.Error, d dialect.ErrorDetail) errorObject {
	return errorObject{
		Message: e.Message, Type: e.Code.Info().Type, Code: e.Code,
		RequestID: d.RequestID, Partial: d.Partial, Tokens: d.Tokens, Retryable: d.Retryable,
	}
}

// ErrorBody has error as its only key, and so has ErrorEvent: the AI SDK loses
// an error that comes with other keys, and go-openai finds one only where the
// line begins with {"error": (both measured).
func (api) ErrorBody(e *inference.Error, d dialect.ErrorDetail) []byte {
	return body.Encode(map[string]errorObject{"error": errorOf(e, d)})
}

func (a api) ErrorEvent(e *inference.Error, d dialect.ErrorDetail) []byte {
	return append(append([]byte("data: "), a.ErrorBody(e, d)...), "\n\n"...)
}
