// SPDX-License-Identifier: Apache-2.0

// Package anthropic speaks the wire format of Anthropic's Messages API, as
// vLLM, SGLang and llama.cpp serve it.
//
// It owns which keys of a request Headgate reads, which event of a stream is
// output, when a message is whole, and the shape of an error. It judges no more
// of a request than package openai does, and hands every byte on that it need
// not change. Headers such as anthropic-version are the gateway's business.
package anthropic

import (
	"errors"
	"fmt"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
)

// The dialects of this package.
var (
	Messages dialect.Dialect = api{}
	// CountTokens counts a prompt's tokens. Its requests are those of Messages
	// and its answers are never streamed.
	CountTokens dialect.Dialect = counting{}
)

type api struct{}

func (api) CheckType(contentType string) error { return dialect.CheckJSON(contentType) }

// Inspect reads a request.
func (api) Inspect(_ string, text []byte) (*dialect.Request, error) {
	in := inspection{}
	if err := in.Read(text, in.member); err != nil {
		return nil, err
	}
	in.First(in.system)
	in.RequireModel()
	if !in.Has("messages") {
		in.Refuse(inference.InvalidRequest, "messages: is missing")
	}
	if err := in.Refused(); err != nil {
		return nil, err
	}
	return in.Request(), nil
}

// An inspection is one pass over one request body.
type inspection struct {
	body.Inspection
	system int // where the system prompt is among the pieces of the prompt
}

func (in *inspection) member(key []byte) {
	switch string(key) {
	case "model":
		in.Model()
	case "stream":
		in.Stream()
	case "messages":
		in.Once("messages")
		if !in.Messages() {
			in.Refuse(inference.InvalidRequest, "messages: must be an array")
		}
	case "system":
		in.Once("system")
		in.system = len(in.Found.Prompt)
		in.Content()
	case "max_tokens":
		in.Once("max_tokens")
		in.Found.MaxTokens = in.Limit()
	case "tools":
		in.Tools("tools")
	case "metadata":
		in.Once("metadata")
		in.metadata()
	case "cache_salt":
		in.Once("cache_salt")
		in.Found.CacheSalt = in.Hint()
	default:
		in.Skip()
	}
}

func (in *inspection) metadata() {
	if in.Kind() != jsonscan.Object {
		in.Skip()
		return
	}
	for more := in.Enter(); more; more = in.Next() {
		if string(in.Key()) == "user_id" {
			in.Found.User = in.Hint()
		} else {
			in.Skip()
		}
	}
}

// RequestEdits never asks for usage: every stream has it.
func (api) RequestEdits(r *dialect.Request, _ []byte, model string, _ bool) []dialect.Edit {
	return body.ModelEdit(r, model)
}

func (api) EndMarker() []byte {
	return []byte("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n")
}

// ErrorBody is Anthropic's shape, with what Headgate says beside type and
// message.
func (api) ErrorBody(e *inference.Error, d dialect.ErrorDetail) []byte {
	type object struct {
		Type      string              `json:"type"`
		Message   string              `json:"message"`
		Code      inference.Code      `json:"code"`
		RequestID inference.RequestID `json:"request_id"`
		Partial   bool                `json:"partial_output"`
		Tokens    int                 `json:"delivered_output_tokens"`
		Retryable bool                `json:"retryable"`
	}
	type whole struct {
		Type      string              `json:"type"`
		Error     object              `json:"error"`
		RequestID inference.RequestID `json:"request_id"`
	}
	return body.Encode(whole{"error", object{
		errorType(e.HTTPStatus()), e.Message, e.Code, d.RequestID, d.Partial, d.Tokens, d.Retryable,
	}, d.RequestID})
}

// errorType is the name that Anthropic's API has for a status.
func errorType(status int) string {
	switch status {
	case 400, 405, 409, 415, 431:
		return "invalid_request_error"
	case 401:
		return "authentication_error"
	case 403:
		return "permission_error"
	case 404:
		return "not_found_error"
	case 413:
		return "request_too_large"
	case 429:
		return "rate_limit_error"
	case 503:
		return "overloaded_error"
	case 504:
		return "timeout_error"
	}
	return "api_error"
}

func (a api) ErrorEvent(e *inference.Error, d dialect.ErrorDetail) []byte {
	return append(append([]byte("event: error\ndata: "), a.ErrorBody(e, d)...), "\n\n"...)
}

// Answer reads a whole answer.
func (api) Answer(_ *dialect.Request, text []byte, model string) (*dialect.Answer, error) {
	p := payload{}
	p.SetModel(model)
	isJSON, isObject := p.read(text)
	switch {
	case !isJSON:
		return nil, fmt.Errorf("answer is not JSON at byte %d: %s", p.Pos(), p.Err())
	case !isObject:
		return nil, errors.New("answer is not a JSON object")
	}
	return &dialect.Answer{Failure: p.Failure, Usage: p.Usage, HasUsage: p.HasUsage, Edits: p.Edits, Choices: 1}, nil
}

func (api) AnswerHead(_ *dialect.Request, text []byte, model string) []dialect.Edit {
	p := payload{}
	p.SetModel(model)
	p.read(text)
	return p.Edits
}

type counting struct{ api }

func (counting) Inspect(contentType string, text []byte) (*dialect.Request, error) {
	r, err := api{}.Inspect(contentType, text)
	if err == nil {
		r.Stream = false
	}
	return r, err
}

func (counting) NewStream(*dialect.Request, dialect.StreamOptions) dialect.Stream { return nil }
