// SPDX-License-Identifier: Apache-2.0

// Package dialect is what a client wire format must be able to say about the
// bytes that pass through the gateway: what a request asks for, which bytes of
// it a rule makes us change, which event of an answer is the first output, and
// whether the answer is whole.
//
// It owns these questions and the types of their answers; the packages below it
// each answer for one format. A dialect reads bytes and never builds them anew:
// requests and answers keep every byte that no rule names, and changes are
// Edits of exact spans. A dialect decides nothing about attempts, retries or
// HTTP, and it has no goroutine, socket, clock or log. It never panics,
// whatever it is fed.
//
// The gateway calls it: Inspect and RequestEdits before routing, a Stream per
// streamed attempt, Answer for a collected one, ErrorEvent and ErrorBody where
// Headgate itself speaks.
package dialect

import (
	"mime"
	"strconv"
	"strings"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect/sse"
)

// A Span is a half-open byte range of a body.
type Span struct{ Start, End int }

// Empty reports whether the span holds no byte. The zero Span stands for a
// value that is not there.
func (s Span) Empty() bool { return s.End <= s.Start }

// Of returns the span's bytes of body.
func (s Span) Of(body []byte) []byte { return body[s.Start:s.End] }

// Text counts the text of a prompt by script, because tokenizers spend their
// vocabulary unevenly.
type Text struct {
	Bytes int // UTF-8 bytes outside CJK, escapes decoded
	CJK   int // CJK characters
}

// Add returns the sum of two counts.
func (t Text) Add(u Text) Text { return Text{t.Bytes + u.Bytes, t.CJK + u.CJK} }

// Prior token ratios, used until an engine's usage has taught better ones.
const (
	BytesPerToken = 4.0 // UTF-8 bytes of text outside CJK
	CJKPerToken   = 1.5 // CJK characters
)

// Tokens estimates the text's tokens by the prior ratios.
func (t Text) Tokens() int {
	n := float64(t.Bytes)/BytesPerToken + float64(t.CJK)/CJKPerToken
	if n > 0 && n < 1 {
		return 1
	}
	return int(n)
}

// A Request is what one pass over a request body found. Its spans point into
// that body.
type Request struct {
	Object Span // the body's JSON object, braces included

	Model     string
	ModelSpan Span // the JSON string with its quotes

	Stream         bool
	MaxTokens      int    // 0: absent or unlimited; max_completion_tokens wins over max_tokens
	Choices        int    // answers expected: n times Prompts, at least 1
	Prompts        int    // prompts in the body, at least 1
	Tools          bool   // tools or functions is there and not empty
	ResponseFormat string // response_format.type, or what has its place
	Opaque         bool   // the answer was asked for as something else than JSON: sound, text, raw numbers

	IncludeUsage      bool // stream_options.include_usage is true
	IncludeUsageSpan  Span // the value of that key, where it is written
	StreamOptions     Span // the object stream_options
	NullStreamOptions Span // the null of stream_options, where it is written so

	// Hints for fairness and affinity. A hint of the wrong type is ignored: the
	// engine judges it.
	User, SessionID, PromptCacheKey, CacheSalt string

	// Prompt lists what becomes the prompt, in order: raw JSON text inside the
	// quotes of each message's content or text part or of each prompt string,
	// the array of tool_calls of an assistant message, or an array of token ids
	// with its brackets. Of thousands of pieces only the first are listed; Text
	// and PromptTokens count them all.
	Prompt    []Span
	ToolsSpan Span // tools or functions: templates write them into the prompt too

	Text         Text             // of Prompt and the tools
	PromptTokens inference.Tokens // Counted when the prompt is token ids alone, else Estimated
}

// More than any answer or request has, and far from overflow.
const (
	outputMax  = 1 << 40
	choicesMax = 1 << 20
)

// OutputMax is how many tokens all answers together may have, 0 if that is not
// limited.
func (r *Request) OutputMax() int {
	return min(r.MaxTokens, outputMax) * min(max(r.Choices, 1), choicesMax)
}

// An Edit replaces the bytes of its span by Text; an empty span inserts.
type Edit struct {
	Span
	Text []byte
}

// Apply returns the edited body as segments, slices of body and of the edits'
// texts, and their total length. Nothing of body is copied. Edits are in order
// and do not overlap; one that breaks this is left out.
func Apply(body []byte, edits []Edit) (segments [][]byte, length int64) {
	segments = make([][]byte, 0, 2*len(edits)+1)
	add := func(b []byte) {
		if len(b) > 0 {
			segments = append(segments, b)
			length += int64(len(b))
		}
	}
	at := 0
	for _, e := range edits {
		if e.Start < at || e.End < e.Start || e.End > len(body) {
			continue
		}
		add(body[at:e.Start])
		add(e.Text)
		at = e.End
	}
	add(body[at:])
	return segments, length
}

// A Failure is an error that an engine reported inside an answer.
type Failure struct {
	Status  int // a numeric 4xx or 5xx code inside it, 0 if there is none
	Message string
	Code    string
	Type    string
}

// An Event is one event of a streamed answer, judged.
type Event struct {
	// Bytes is what the client gets: the engine's own bytes with the blank line
	// that ends them, patched where a rule demands it, nil when withheld. They
	// are valid until the next call of Next, Buffer or CloseInput.
	Bytes []byte

	Output  bool     // carries output; unknown events count
	Finish  bool     // says that an answer, or a choice of it, is finished
	Done    bool     // is the end marker
	Tokens  int      // output tokens that it carries, as counted
	Failure *Failure // is an error event: never output, whatever else it carries
}

// ErrEventTooLarge is the error of a stream one of whose events exceeds
// StreamOptions.EventMax.
var ErrEventTooLarge = sse.ErrTooLarge

// EventMax is the default bound on the bytes of one event.
const EventMax = 16 << 20

// StreamOptions say how a streamed answer is shown to the client.
type StreamOptions struct {
	HideUsage bool   // withhold usage-only events: the client did not ask for them
	Model     string // name to restore in events that name a model; "" leaves them
	EventMax  int    // bound on one event in bytes; 0: EventMax
}

// A Stream judges one streamed answer. The caller reads engine bytes into
// Buffer, says how many with Filled, and takes events from Next until there is
// none before it reads again. A Stream is used by one goroutine at a time.
type Stream interface {
	// Buffer returns free space, at least 4 KiB, to read engine bytes into.
	Buffer() []byte
	// Filled says that n bytes of the last Buffer were filled.
	Filled(n int)
	// Next returns the next whole event. Its error is ErrEventTooLarge, and
	// stays.
	Next() (Event, bool, error)
	// CloseInput is called once, at a clean end of the body, when Next has no
	// more events. It returns a last event that lacks its blank line, with that
	// line added, if its payload is whole. Anything less is not the client's.
	CloseInput() (Event, bool)
	// Complete reports whether the whole answer was seen, be it without its end
	// marker, and no error event.
	Complete() bool
	// Done reports whether the end marker was seen.
	Done() bool
	// Outputs counts the output events so far.
	Outputs() int
	// Usage is what the engine reported so far for the whole answer, if it did.
	Usage() (inference.Usage, bool)
}

// An Answer is what one pass over a whole, not streamed answer found.
type Answer struct {
	Failure  *Failure
	Usage    inference.Usage
	HasUsage bool
	Edits    []Edit
	Choices  int  // answers in it; none is no answer
	Opaque   bool // nothing in the body shows that it is whole: its framing must
}

// An ErrorDetail is what an error says about the request that it ends.
type ErrorDetail struct {
	RequestID inference.RequestID
	Partial   bool // part of an answer was delivered
	Tokens    int  // output tokens delivered
	Events    int  // events delivered
	Retryable bool // always what x-should-retry says
}

// A Dialect is one client wire format. It has no state.
type Dialect interface {
	// CheckType refuses a Content-Type, "" if there is none, whose bodies can't
	// be inspected. Its error is an *inference.Error: unsupported_media_type.
	CheckType(contentType string) error
	// Inspect reads a request body of a type that CheckType let pass. Its error
	// is an *inference.Error: invalid_json, missing_model or invalid_request.
	Inspect(contentType string, body []byte) (*Request, error)
	// RequestEdits returns the edits, in order, that send the request to a model
	// of another name (model, unless "" or the same) and that ask a streamed
	// answer for its usage (usage). body is the one that r was read from.
	RequestEdits(r *Request, body []byte, model string, usage bool) []Edit
	// NewStream starts to judge a streamed answer to r. It is nil where requests
	// never set Stream.
	NewStream(r *Request, o StreamOptions) Stream
	// Answer reads a whole answer to r. model, unless "", is the name to restore
	// in it. The error says why the body is not an answer at all.
	Answer(r *Request, body []byte, model string) (*Answer, error)
	// AnswerHead returns the edits that Answer would make as far as a cut-off
	// body shows them, for an answer that is too large to be collected whole.
	AnswerHead(r *Request, body []byte, model string) []Edit
	// EndMarker is the event that ends a complete stream, nil where no stream
	// that lacks it is complete.
	EndMarker() []byte
	// ErrorEvent is e as the last event of a stream.
	ErrorEvent(e *inference.Error, d ErrorDetail) []byte
	// ErrorBody is e as the body of an HTTP error.
	ErrorBody(e *inference.Error, d ErrorDetail) []byte
}

// CheckJSON is CheckType for bodies that are JSON.
func CheckJSON(contentType string) error {
	if contentType == "" {
		return nil
	}
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil || media != "application/json" && !strings.HasSuffix(media, "+json") {
		return wrongType("application/json", contentType)
	}
	return nil
}

// CheckForm is CheckType for bodies that are multipart/form-data (RFC 7578).
func CheckForm(contentType string) error {
	media, params, err := mime.ParseMediaType(contentType)
	if err != nil || media != "multipart/form-data" || params["boundary"] == "" {
		return wrongType("multipart/form-data with a boundary", contentType)
	}
	return nil
}

func wrongType(want, got string) error {
	if len(got) > 64 {
		got = strings.ToValidUTF8(got[:64], "") + "…"
	}
	return inference.Errorf(inference.UnsupportedMediaType, "the body must be %s, not %s", want, strconv.Quote(got))
}
