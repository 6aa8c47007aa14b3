// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"cmp"
	"slices"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/body"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
)

// choicesMax is OpenAI's bound on n.
const choicesMax = 128

// An inspection is one pass over one request body.
type inspection struct {
	body.Inspection
	chat bool

	maxTokens, maxCompletionTokens int
	n, prompts                     int
}

func (api) CheckType(contentType string) error { return dialect.CheckJSON(contentType) }

// Inspect reads a request. A body that is not JSON is invalid_json; so is one
// whose strings are not UTF-8 and one nested more than 10,000 deep. A key that
// Headgate reads and that is written twice is invalid_request: of two values
// the engine might take the one that was not checked.
func (a api) Inspect(_ string, text []byte) (*dialect.Request, error) {
	in := inspection{chat: a.chat, n: 1, prompts: 1}
	if err := in.Read(text, in.member); err != nil {
		return nil, err
	}
	in.RequireModel()
	if in.chat && !in.Has("messages") {
		in.Refuse(inference.InvalidRequest, "messages: is missing")
	}
	if err := in.Refused(); err != nil {
		return nil, err
	}
	in.Found.MaxTokens = cmp.Or(in.maxCompletionTokens, in.maxTokens)
	in.Found.Choices, in.Found.Prompts = in.n*in.prompts, in.prompts
	return in.Request(), nil
}

func (in *inspection) member(key []byte) {
	switch string(key) {
	case "model":
		in.Model()
	case "stream":
		in.Stream()
	case "stream_options":
		in.Once("stream_options")
		in.streamOptions()
	case "messages":
		in.Once("messages")
		if !in.chat {
			in.Skip()
		} else if !in.Messages() {
			in.Refuse(inference.InvalidRequest, "messages: must be an array")
		}
	case "prompt":
		in.Once("prompt")
		if in.chat {
			in.Skip()
		} else {
			in.prompts = in.Prompt()
		}
	case "n":
		in.Once("n")
		in.choices()
	case "max_tokens":
		in.Once("max_tokens")
		in.maxTokens = in.Limit()
	case "max_completion_tokens":
		in.Once("max_completion_tokens")
		in.maxCompletionTokens = in.Limit()
	case "tools":
		in.Tools("tools")
	case "functions":
		in.Tools("functions")
	case "response_format":
		in.Once("response_format")
		in.Found.ResponseFormat = in.TypeOf()
	default:
		hint(&in.Inspection, key)
	}
}

// hint reads the keys that help routing in every request of OpenAI's, and skips
// any other.
func hint(in *body.Inspection, key []byte) {
	switch string(key) {
	case "user":
		in.Once("user")
		in.Found.User = in.Hint()
	case "session_id":
		in.Once("session_id")
		in.Found.SessionID = in.Hint()
	case "prompt_cache_key":
		in.Once("prompt_cache_key")
		in.Found.PromptCacheKey = in.Hint()
	case "cache_salt":
		in.Once("cache_salt")
		in.Found.CacheSalt = in.Hint()
	default:
		in.Skip()
	}
}

func (in *inspection) choices() {
	switch in.Kind() {
	case jsonscan.Null:
		in.Null()
		return
	case jsonscan.Number:
		if n, ok := in.Int(); ok && n >= 1 && n <= choicesMax {
			in.n = n
			return
		}
	default:
		in.Skip()
	}
	in.Refuse(inference.InvalidRequest, "n: must be a whole number from 1 to 128")
}

func (in *inspection) streamOptions() {
	kind := in.Kind()
	start := in.Pos()
	switch kind {
	case jsonscan.Object:
	case jsonscan.Null:
		in.Null()
		in.Found.NullStreamOptions = dialect.Span{Start: start, End: in.Pos()}
		return
	default:
		in.Skip()
		in.Refuse(inference.InvalidRequest, "stream_options: must be an object")
		return
	}
	twice := false
	for more := in.Enter(); more; more = in.Next() {
		if string(in.Key()) != "include_usage" {
			in.Skip()
			continue
		}
		if twice {
			in.Refuse(inference.InvalidRequest, "stream_options.include_usage: is written twice")
		}
		twice = true
		in.Kind() // passes white space
		at := in.Pos()
		in.Found.IncludeUsage = in.Boolean("stream_options.include_usage")
		in.Found.IncludeUsageSpan = dialect.Span{Start: at, End: in.Pos()}
	}
	in.Found.StreamOptions = dialect.Span{Start: start, End: in.Pos()}
}

var (
	includeUsage       = []byte(`"include_usage":true`)
	includeUsageMember = []byte(`"include_usage":true,`)
	streamOptions      = []byte(`{"include_usage":true}`)
	streamOptionMember = []byte(`"stream_options":{"include_usage":true},`)
	jsonTrue           = []byte("true")
)

func (api) RequestEdits(r *dialect.Request, text []byte, model string, usage bool) []dialect.Edit {
	edits := body.ModelEdit(r, model)
	if usage && r.Stream && !r.IncludeUsage {
		edits = append(edits, usageEdit(r, text))
	}
	slices.SortFunc(edits, func(a, b dialect.Edit) int { return cmp.Compare(a.Start, b.Start) })
	return edits
}

func usageEdit(r *dialect.Request, text []byte) dialect.Edit {
	switch {
	case !r.IncludeUsageSpan.Empty():
		return dialect.Edit{Span: r.IncludeUsageSpan, Text: jsonTrue}
	case !r.NullStreamOptions.Empty():
		return dialect.Edit{Span: r.NullStreamOptions, Text: streamOptions}
	case r.StreamOptions.Empty():
		return insert(r.Object.Start+1, streamOptionMember)
	case body.Empty(r.StreamOptions.Of(text)):
		return insert(r.StreamOptions.Start+1, includeUsage)
	}
	return insert(r.StreamOptions.Start+1, includeUsageMember)
}

func insert(at int, text []byte) dialect.Edit {
	return dialect.Edit{Span: dialect.Span{Start: at, End: at}, Text: text}
}
