// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/jsonscan"
)

// Bounds. OpenAI has the same for n. Prompt keeps the first pieces only, so that
// a body of empty ones does not cost many times its own size.
const (
	choicesMax = 128
	piecesMax  = 8192
)

// An inspection is one pass over one request body.
type inspection struct {
	jsonscan.Cursor
	body []byte
	chat bool
	r    dialect.Request
	bad  *inference.Error // the first fault that is not one of syntax
	seen keySet           // keys that were there

	maxTokens, maxCompletionTokens int
	n, prompts, ids                int
	texts                          int // prompt strings, empty ones too
}

// keySet is a set of the keys that Headgate reads.
type keySet uint32

const (
	keyModel keySet = 1 << iota
	keyStream
	keyStreamOptions
	keyMessages
	keyPrompt
	keyN
	keyMaxTokens
	keyMaxCompletionTokens
	keyTools
	keyFunctions
	keyResponseFormat
	keyUser
	keySessionID
	keyPromptCacheKey
	keyCacheSalt
)

// Inspect reads a request. A body that is not JSON is invalid_json; so is one
// whose strings are not UTF-8 and one nested more than 10,000 deep. A key that
// Headgate reads and that is written twice is invalid_request: of two values
// the engine might take the one that was not checked.
func (a api) Inspect(body []byte) (*dialect.Request, error) {
	in := inspection{body: body, chat: a.chat, n: 1, prompts: 1}
	in.Reset(body, true)
	in.object()
	in.End()
	if reason := in.Err(); reason != "" {
		line := bytes.Count(body[:in.Pos()], []byte("\n")) + 1
		return nil, inference.Errorf(inference.InvalidJSON, "the body is not valid JSON at byte %d (line %d): %s", in.Pos(), line, reason)
	}
	in.require()
	if in.bad != nil {
		return nil, in.bad
	}
	r := in.r
	r.MaxTokens = cmp.Or(in.maxCompletionTokens, in.maxTokens)
	r.Choices, r.Prompts = in.n*in.prompts, in.prompts
	r.PromptTokens = in.tokens()
	return &r, nil
}

func (in *inspection) refuse(code inference.Code, message string) {
	if in.bad == nil {
		in.bad = inference.Errorf(code, "%s", message)
	}
}

// require refuses what is missing, after everything else.
func (in *inspection) require() {
	if in.r.Model == "" {
		in.refuse(inference.MissingModel, "model: must name a model")
	}
	if in.chat && in.seen&keyMessages == 0 {
		in.refuse(inference.InvalidRequest, "messages: is missing")
	}
}

func (in *inspection) tokens() inference.Tokens {
	t := inference.Tokens{N: in.ids + in.r.Text.Tokens()}
	if in.ids > 0 && in.texts == 0 {
		t.Source = inference.Counted
	}
	return t
}

func (in *inspection) object() {
	if in.Kind() != jsonscan.Object {
		in.Skip()
		in.refuse(inference.InvalidRequest, "the body must be a JSON object")
		return
	}
	start := in.Pos()
	for more := in.Enter(); more; more = in.Next() {
		in.member(in.Key())
	}
	in.r.Object = dialect.Span{Start: start, End: in.Pos()}
}

func (in *inspection) member(key []byte) {
	switch string(key) {
	case "model":
		in.once(keyModel, "model")
		in.model()
	case "stream":
		in.once(keyStream, "stream")
		in.r.Stream = in.boolean("stream")
	case "stream_options":
		in.once(keyStreamOptions, "stream_options")
		in.streamOptions()
	case "messages":
		in.once(keyMessages, "messages")
		in.messages()
	case "prompt":
		in.once(keyPrompt, "prompt")
		in.prompt()
	case "n":
		in.once(keyN, "n")
		in.choices()
	case "max_tokens":
		in.once(keyMaxTokens, "max_tokens")
		in.maxTokens = in.limit()
	case "max_completion_tokens":
		in.once(keyMaxCompletionTokens, "max_completion_tokens")
		in.maxCompletionTokens = in.limit()
	case "tools":
		in.once(keyTools, "tools")
		in.tools()
	case "functions":
		in.once(keyFunctions, "functions")
		in.tools()
	case "response_format":
		in.once(keyResponseFormat, "response_format")
		in.responseFormat()
	case "user":
		in.once(keyUser, "user")
		in.r.User = in.hint()
	case "session_id":
		in.once(keySessionID, "session_id")
		in.r.SessionID = in.hint()
	case "prompt_cache_key":
		in.once(keyPromptCacheKey, "prompt_cache_key")
		in.r.PromptCacheKey = in.hint()
	case "cache_salt":
		in.once(keyCacheSalt, "cache_salt")
		in.r.CacheSalt = in.hint()
	default:
		in.Skip()
	}
}

func (in *inspection) once(key keySet, name string) {
	if in.seen&key != 0 {
		in.refuse(inference.InvalidRequest, name+": is written twice")
	}
	in.seen |= key
}

func (in *inspection) model() {
	switch in.Kind() {
	case jsonscan.String:
		start := in.Pos()
		in.r.Model = in.unquote(in.String())
		in.r.ModelSpan = dialect.Span{Start: start, End: in.Pos()}
	case jsonscan.Null:
		in.Null()
	default:
		in.Skip()
		in.refuse(inference.InvalidRequest, "model: must be a string")
	}
}

func (in *inspection) unquote(s jsonscan.Str) string {
	raw := in.body[s.Start:s.End]
	if !s.Escaped {
		return string(raw)
	}
	return string(jsonscan.AppendUnquoted(nil, raw))
}

// hint reads a string that only helps routing.
func (in *inspection) hint() string {
	if in.Kind() != jsonscan.String {
		in.Skip()
		return ""
	}
	return in.unquote(in.String())
}

// boolean reads true, false or null. Engines that also take "true" or 1 would
// stream an answer that Headgate collects, so nothing else passes.
func (in *inspection) boolean(path string) bool {
	switch in.Kind() {
	case jsonscan.Bool:
		return in.Bool()
	case jsonscan.Null:
		in.Null()
	default:
		in.Skip()
		in.refuse(inference.InvalidRequest, path+": must be true or false")
	}
	return false
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
	in.refuse(inference.InvalidRequest, "n: must be a whole number from 1 to 128")
}

// limit reads a token limit. Whether an odd one is an error the engine decides:
// llama.cpp takes -1 for no limit.
func (in *inspection) limit() int {
	if in.Kind() != jsonscan.Number {
		in.Skip()
		return 0
	}
	n, _ := in.Int()
	return max(n, 0)
}

func (in *inspection) streamOptions() {
	kind := in.Kind()
	start := in.Pos()
	switch kind {
	case jsonscan.Object:
	case jsonscan.Null:
		in.Null()
		in.r.NullStreamOptions = dialect.Span{Start: start, End: in.Pos()}
		return
	default:
		in.Skip()
		in.refuse(inference.InvalidRequest, "stream_options: must be an object")
		return
	}
	twice := false
	for more := in.Enter(); more; more = in.Next() {
		if string(in.Key()) != "include_usage" {
			in.Skip()
			continue
		}
		if twice {
			in.refuse(inference.InvalidRequest, "stream_options.include_usage: is written twice")
		}
		twice = true
		in.Kind() // passes white space
		at := in.Pos()
		in.r.IncludeUsage = in.boolean("stream_options.include_usage")
		in.r.IncludeUsageSpan = dialect.Span{Start: at, End: in.Pos()}
	}
	in.r.StreamOptions = dialect.Span{Start: start, End: in.Pos()}
}

func (in *inspection) responseFormat() {
	if in.Kind() != jsonscan.Object {
		in.Skip()
		return
	}
	for more := in.Enter(); more; more = in.Next() {
		if string(in.Key()) == "type" {
			in.r.ResponseFormat = in.hint()
		} else {
			in.Skip()
		}
	}
}

func (in *inspection) tools() {
	span := in.skipped()
	if empty(span.Of(in.body)) {
		return
	}
	in.r.Tools = true
	if in.r.ToolsSpan.Empty() {
		in.r.ToolsSpan = span
	}
	in.r.Text.Bytes += span.End - span.Start
}

// skipped passes a value and returns where it is.
func (in *inspection) skipped() dialect.Span {
	in.Kind() // passes white space
	start := in.Pos()
	in.Skip()
	if in.Err() != "" {
		return dialect.Span{}
	}
	return dialect.Span{Start: start, End: in.Pos()}
}

// empty tells null, false, "", [] and {} from values that hold something.
func empty(raw []byte) bool {
	if len(raw) == 0 {
		return true
	}
	switch raw[0] {
	case '"':
		return len(raw) == 2
	case '[', '{':
		return len(bytes.TrimSpace(raw[1:len(raw)-1])) == 0
	}
	return raw[0] == 'n' || raw[0] == 'f'
}

func (in *inspection) messages() {
	if !in.chat {
		in.Skip()
		return
	}
	if in.Kind() != jsonscan.Array {
		in.Skip()
		in.refuse(inference.InvalidRequest, "messages: must be an array")
		return
	}
	for more := in.Enter(); more; more = in.Next() {
		if in.Kind() != jsonscan.Object {
			in.Skip() // the engine judges it
			continue
		}
		for more := in.Enter(); more; more = in.Next() {
			switch string(in.Key()) {
			case "content":
				in.content()
			case "tool_calls":
				in.toolCalls()
			default:
				in.Skip()
			}
		}
	}
}

// content reads a message's content: a string, or parts of which those with
// text count. Images and sound are not text, however many bytes they take.
func (in *inspection) content() {
	switch in.Kind() {
	case jsonscan.String:
		in.text(in.String())
	case jsonscan.Array:
		for more := in.Enter(); more; more = in.Next() {
			in.part()
		}
	default:
		in.Skip()
	}
}

func (in *inspection) part() {
	switch in.Kind() {
	case jsonscan.String:
		in.text(in.String())
	case jsonscan.Object:
		for more := in.Enter(); more; more = in.Next() {
			if string(in.Key()) == "text" && in.Kind() == jsonscan.String {
				in.text(in.String())
			} else {
				in.Skip()
			}
		}
	default:
		in.Skip()
	}
}

func (in *inspection) toolCalls() {
	span := in.skipped()
	if empty(span.Of(in.body)) {
		return
	}
	in.piece(span.Start, span.End)
	in.r.Text.Bytes += span.End - span.Start
}

func (in *inspection) piece(start, end int) {
	if len(in.r.Prompt) < piecesMax {
		in.r.Prompt = append(in.r.Prompt, dialect.Span{Start: start, End: end})
	}
}

func (in *inspection) text(s jsonscan.Str) {
	in.piece(s.Start, s.End)
	in.r.Text = in.r.Text.Add(dialect.Text{Bytes: s.Bytes, CJK: s.CJK})
	in.texts++
}

// prompt reads a completions prompt: a string, a list of strings, token ids, or
// a list of lists of token ids. Another shape counts as one prompt each.
func (in *inspection) prompt() {
	if in.chat {
		in.Skip()
		return
	}
	switch in.Kind() {
	case jsonscan.String:
		in.text(in.String())
		return
	case jsonscan.Array:
	default:
		in.Skip()
		return
	}
	start, prompts, ids := in.Pos(), 0, 0
	for more := in.Enter(); more; more = in.Next() {
		switch in.Kind() {
		case jsonscan.Number:
			in.Number()
			ids++
			continue
		case jsonscan.String:
			in.text(in.String())
		case jsonscan.Array:
			in.tokenIDs()
		default:
			in.Skip()
		}
		prompts++
	}
	if ids > 0 {
		prompts++
		in.ids += ids
		in.piece(start, in.Pos())
	}
	in.prompts = max(prompts, 1)
}

func (in *inspection) tokenIDs() {
	start := in.Pos()
	for more := in.Enter(); more; more = in.Next() {
		if in.Kind() == jsonscan.Number {
			in.ids++
		}
		in.Skip()
	}
	in.piece(start, in.Pos())
}

var (
	includeUsage       = []byte(`"include_usage":true`)
	includeUsageMember = []byte(`"include_usage":true,`)
	streamOptions      = []byte(`{"include_usage":true}`)
	streamOptionMember = []byte(`"stream_options":{"include_usage":true},`)
	jsonTrue           = []byte("true")
)

func (api) RequestEdits(r *dialect.Request, body []byte, model string, usage bool) []dialect.Edit {
	var edits []dialect.Edit
	if model != "" && model != r.Model {
		edits = append(edits, dialect.Edit{Span: r.ModelSpan, Text: encode(model)})
	}
	if usage && r.Stream && !r.IncludeUsage {
		edits = append(edits, usageEdit(r, body))
	}
	slices.SortFunc(edits, func(a, b dialect.Edit) int { return cmp.Compare(a.Start, b.Start) })
	return edits
}

func usageEdit(r *dialect.Request, body []byte) dialect.Edit {
	switch {
	case !r.IncludeUsageSpan.Empty():
		return dialect.Edit{Span: r.IncludeUsageSpan, Text: jsonTrue}
	case !r.NullStreamOptions.Empty():
		return dialect.Edit{Span: r.NullStreamOptions, Text: streamOptions}
	case r.StreamOptions.Empty():
		return insert(r.Object.Start+1, streamOptionMember)
	case empty(r.StreamOptions.Of(body)):
		return insert(r.StreamOptions.Start+1, includeUsage)
	}
	return insert(r.StreamOptions.Start+1, includeUsageMember)
}

func insert(at int, text []byte) dialect.Edit {
	return dialect.Edit{Span: dialect.Span{Start: at, End: at}, Text: text}
}
