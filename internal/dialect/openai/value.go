// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"errors"

	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
)

// Dialects whose answer is one value: JSON in, JSON out, never streamed. Those
// of the second group are not OpenAI's; vLLM, SGLang and llama.cpp share them.
var (
	Embeddings dialect.Dialect = value{prompts: []string{"input"}, need: true}

	Rerank     dialect.Dialect = value{prompts: []string{"query", "documents"}, need: true}
	Score      dialect.Dialect = value{prompts: []string{"text_1", "text_2", "queries", "documents", "query", "items", "data_1", "data_2"}, need: true}
	Tokenize   dialect.Dialect = value{prompts: []string{"prompt", "content"}}
	Detokenize dialect.Dialect = value{prompts: []string{"tokens"}}
)

// Speech takes JSON and answers with sound, or with events that hold some. It
// is collected and handed on as it is: nothing in sound says that it is whole.
var Speech dialect.Dialect = value{prompts: []string{"input"}, need: true, opaque: true}

// value is the dialect of a request that is answered by one value.
type value struct {
	api
	prompts []string // keys that hold prompts
	need    bool     // a model must be named; engines tokenize without
	opaque  bool     // the answer is no JSON
}

func (v value) Inspect(_ string, text []byte) (*dialect.Request, error) {
	in := body.Inspection{}
	in.Found.Opaque = v.opaque
	if err := in.Read(text, func(key []byte) { v.member(&in, key) }); err != nil {
		return nil, err
	}
	if v.need {
		in.RequireModel()
	}
	if err := in.Refused(); err != nil {
		return nil, err
	}
	return in.Request(), nil
}

func (v value) member(in *body.Inspection, key []byte) {
	switch string(key) {
	case "model":
		in.Model()
		return
	case "messages":
		in.Once("messages")
		in.Messages()
		return
	case "encoding_format":
		// vLLM answers these two with raw numbers.
		in.Once("encoding_format")
		format := in.Hint()
		in.Found.Opaque = v.opaque || format == "bytes" || format == "bytes_only"
		return
	}
	for _, name := range v.prompts {
		if string(key) == name {
			in.Once(name)
			in.Found.Prompts += in.Prompt()
			return
		}
	}
	hint(in, key)
}

func (value) RequestEdits(r *dialect.Request, _ []byte, model string, _ bool) []dialect.Edit {
	return body.ModelEdit(r, model)
}

func (value) NewStream(*dialect.Request, dialect.StreamOptions) dialect.Stream { return nil }

// EndMarker is nil: nothing is streamed.
func (value) EndMarker() []byte { return nil }

func (value) Answer(r *dialect.Request, text []byte, model string) (*dialect.Answer, error) {
	return one(r, text, model)
}

func (value) AnswerHead(r *dialect.Request, text []byte, model string) []dialect.Edit {
	return oneHead(r, text, model)
}

// one reads an answer that is one value. What was asked for as something else
// than JSON is taken as it is, unless it is an error.
func one(r *dialect.Request, text []byte, model string) (*dialect.Answer, error) {
	p := body.Payload{}
	p.SetModel(model)
	kind := oneValue(&p, text)
	switch {
	case r.Opaque:
		if kind == jsonscan.Object && p.Failure != nil {
			return &dialect.Answer{Failure: p.Failure, Choices: 1}, nil
		}
		return &dialect.Answer{Choices: 1, Opaque: true}, nil
	case kind == jsonscan.None:
		return nil, notJSON(&p)
	case kind != jsonscan.Object && kind != jsonscan.Array:
		return nil, errors.New("answer is neither a JSON object nor an array")
	}
	return &dialect.Answer{Failure: p.Failure, Usage: p.Usage, HasUsage: p.HasUsage, Edits: p.Edits, Choices: 1}, nil
}

func oneHead(r *dialect.Request, text []byte, model string) []dialect.Edit {
	if r.Opaque {
		return nil
	}
	p := body.Payload{}
	p.SetModel(model)
	oneValue(&p, text)
	return p.Edits
}

// oneValue reads the top level of text and returns its kind, None if it is not
// JSON.
func oneValue(p *body.Payload, text []byte) jsonscan.Kind {
	p.Start(text)
	kind := p.Kind()
	if kind == jsonscan.Object {
		for more := p.Enter(); more; more = p.Next() {
			if !p.Top(p.Key()) {
				p.Skip()
			}
		}
	} else {
		p.Skip()
	}
	p.End()
	if p.Err() != "" {
		return jsonscan.None
	}
	p.Flatten()
	return kind
}
