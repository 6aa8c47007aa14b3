// SPDX-License-Identifier: Apache-2.0

package check

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Seen is what an answer says when read by itself.
type Seen struct {
	Engine  string // publisher of the tokens; "" when there are none
	Attempt int
	Tokens  int      // of all choices
	ID      string   // the answer's own id, which names its attempt too
	Finish  []string // finish_reason by choice, "" for none

	Complete bool // every finish_reason and the end marker, or the whole body
	Cut      bool // it broke off, and the client could tell

	// Of an error body or the error event; "" when there is none. An engine's
	// own numeric code is given in digits.
	ErrorCode string
	Partial   bool // partial_output
	Delivered int  // delivered_output_tokens
	Retryable bool
	RequestID string
}

// Read reads an answer by itself. The error, a Violation, says that what the
// client got is no answer at all: a splice, a gap, an end that pretends.
func Read(a Answer) (Seen, error) {
	r := &reader{answer: a}
	err := r.read()
	s := r.seen
	s.Tokens, s.Finish = 0, nil
	for _, i := range r.order() {
		s.Tokens += r.choices[i].tokens
		s.Finish = append(s.Finish, r.choices[i].finish)
	}
	return s, err
}

type reader struct {
	answer  Answer
	seen    Seen
	choices map[int]*choice
}

// choice is what was read of one choice so far.
type choice struct {
	tokens int
	role   bool
	finish string
}

func (r *reader) order() []int {
	var list []int
	for i := range r.choices {
		list = append(list, i)
	}
	slices.Sort(list)
	return list
}

func (r *reader) choice(i int) *choice {
	c := r.choices[i]
	if c == nil {
		if r.choices == nil {
			r.choices = map[int]*choice{}
		}
		c = &choice{}
		r.choices[i] = c
	}
	return c
}

func (r *reader) read() error {
	a := &r.answer
	r.seen.Cut = a.Err != nil && !a.Left
	switch {
	case a.Status == 0 && a.Left:
		return nil
	case a.Status == 0:
		return broken(TrueOutcome, "no answer at all: %v", a.Err)
	case a.Status < 200 || a.Status > 299:
		return r.refusal()
	case a.Stream && !bytes.HasPrefix(bytes.TrimLeft(a.Body, " \t\r\n"), []byte("{")):
		return r.stream()
	}
	return r.whole()
}

// refusal reads an answer whose status says that it is none. It may be an
// engine's own and hold anything but output.
func (r *reader) refusal() error {
	if found := anyToken.Find(r.answer.Body); found != nil {
		return broken(OnePublisher, "status %d carries output: %q", r.answer.Status, found)
	}
	var body document
	if json.Unmarshal(r.answer.Body, &body) == nil {
		r.fault(body.Error)
	}
	if r.seen.Partial {
		return broken(TrueOutcome, "status %d says that output was delivered before it", r.answer.Status)
	}
	if r.answer.Err != nil && !r.answer.Left {
		return broken(TrueOutcome, "the error body broke off: %v", r.answer.Err)
	}
	return nil
}

// document is one chunk, or one whole answer, or one error.
type document struct {
	ID      string            `json:"id"`
	Choices []json.RawMessage `json:"choices"`
	Usage   json.RawMessage   `json:"usage"`
	Error   json.RawMessage   `json:"error"`
}

func (d *document) failed() bool { return len(d.Error) > 0 && string(d.Error) != "null" }

func (d *document) output() bool { return len(d.Choices) > 0 }

// fault reads an error object into what was seen.
func (r *reader) fault(raw json.RawMessage) {
	if len(raw) == 0 || string(raw) == "null" {
		return
	}
	var e struct {
		Code      json.RawMessage `json:"code"`
		RequestID string          `json:"request_id"`
		Partial   bool            `json:"partial_output"`
		Delivered int             `json:"delivered_output_tokens"`
		Retryable bool            `json:"retryable"`
	}
	if json.Unmarshal(raw, &e) != nil {
		r.seen.ErrorCode = "error"
		return
	}
	r.seen.ErrorCode = strings.Trim(string(e.Code), `"`)
	if r.seen.ErrorCode == "" || r.seen.ErrorCode == "null" {
		r.seen.ErrorCode = "error"
	}
	r.seen.RequestID, r.seen.Partial = e.RequestID, e.Partial
	r.seen.Delivered, r.seen.Retryable = e.Delivered, e.Retryable
}

// stream reads an event stream from its first event to its end.
func (r *reader) stream() error {
	a := &r.answer
	list, rest := splitEvents(a.Body)
	open := a.Err != nil || a.Left // the end is missing, and everyone knows
	if !open && len(bytes.TrimSpace(a.Body)) == 0 {
		return broken(TrueOutcome, "status 200 and an empty body")
	}
	done := false
	for _, ev := range list {
		data := bytes.TrimSpace(ev.data)
		switch {
		case len(data) == 0:
			continue
		case done:
			return broken(TrueOutcome, "bytes after the end marker: %q", clip(data))
		case r.seen.ErrorCode != "" && string(data) == "[DONE]":
			return broken(TrueOutcome, "[DONE] after an error event")
		case r.seen.ErrorCode != "":
			return r.afterError(data)
		case string(data) == "[DONE]":
			done = true
			continue
		}
		if err := r.chunk(data); err != nil {
			return err
		}
	}
	if len(rest) > 0 && !open {
		return broken(OnePublisher, "the last event is cut: %q", clip(rest))
	}
	return r.streamEnd(done, open)
}

func (r *reader) afterError(data []byte) error {
	var d document
	if json.Unmarshal(data, &d) == nil && d.failed() {
		return broken(TrueOutcome, "a second error event: %q", clip(data))
	}
	return broken(TrueOutcome, "bytes after the error event: %q", clip(data))
}

// chunk reads one event's data.
func (r *reader) chunk(data []byte) error {
	if !utf8.Valid(data) {
		return broken(OnePublisher, "an event is not UTF-8, a character was cut: %q", clip(data))
	}
	var d document
	if err := json.Unmarshal(data, &d); err != nil {
		return broken(OnePublisher, "an event is not JSON: %q", clip(data))
	}
	if d.failed() {
		if d.output() {
			return broken(TrueOutcome, "an event is an error and output at once: %q", clip(data))
		}
		r.fault(d.Error)
		if r.seen.Delivered != 0 && r.seen.Delivered != r.tokens() {
			return broken(TrueOutcome, "the error event says %d tokens were delivered, the client has %d", r.seen.Delivered, r.tokens())
		}
		if r.seen.Retryable && r.tokens() > 0 {
			return broken(TrueOutcome, "the error event calls a partly delivered answer retryable")
		}
		return nil
	}
	if err := r.identity(d.ID); err != nil {
		return err
	}
	for _, raw := range d.Choices {
		if err := r.delta(raw); err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) tokens() (n int) {
	for _, c := range r.choices {
		n += c.tokens
	}
	return n
}

// identity checks that all chunks are of one answer: what the client keeps of a
// second attempt's preamble would show here.
func (r *reader) identity(id string) error {
	if r.seen.ID == "" {
		r.seen.ID = id
	}
	if id != r.seen.ID {
		return broken(OnePublisher, "chunks of two answers: id %q after %q", id, r.seen.ID)
	}
	return nil
}

type part struct {
	Index    int             `json:"index"`
	Delta    json.RawMessage `json:"delta"`
	Message  json.RawMessage `json:"message"`
	Text     string          `json:"text"`
	Finish   *string         `json:"finish_reason"`
	Logprobs json.RawMessage `json:"logprobs"`
}

// delta reads one choice of a chunk.
func (r *reader) delta(raw json.RawMessage) error {
	var p part
	if err := json.Unmarshal(raw, &p); err != nil {
		return broken(OnePublisher, "a choice is not as it should be: %q", clip(raw))
	}
	c := r.choice(p.Index)
	text, role := words(p.Delta)
	text += p.Text
	if role && c.role {
		return broken(OnePublisher, "choice %d begins twice: a second role chunk", p.Index)
	}
	c.role = c.role || role
	sure := logprobs(p.Logprobs)
	if text == "" {
		text = sure
	} else if sure != "" && sure != text {
		return broken(OnePublisher, "choice %d: logprobs of %q beside %q", p.Index, sure, text)
	}
	if text != "" && c.finish != "" {
		return broken(TrueOutcome, "choice %d: %q after its finish_reason", p.Index, text)
	}
	if err := r.text(p.Index, text); err != nil {
		return err
	}
	if p.Finish == nil {
		return nil
	}
	if c.finish != "" {
		return broken(TrueOutcome, "choice %d finishes twice: %s, then %s", p.Index, c.finish, *p.Finish)
	}
	c.finish = *p.Finish
	return r.finished(p.Index)
}

// streamEnd judges how the stream ended.
func (r *reader) streamEnd(done, open bool) error {
	finished := 0
	for _, c := range r.choices {
		if c.finish != "" {
			finished++
		}
	}
	all := finished == len(r.choices) && finished > 0 && finished >= r.answer.Choices
	switch {
	case done && !all:
		return broken(TrueOutcome, "[DONE] after %d of %d finish_reasons and %d tokens", finished, max(len(r.choices), r.answer.Choices), r.tokens())
	case done:
		r.seen.Complete, r.seen.Cut = true, false
	case open || r.seen.ErrorCode != "":
	case all:
		return broken(TrueOutcome, "the stream is finished and has no end marker")
	default:
		return broken(TrueOutcome, "silent truncation: a clean end after %d tokens, with neither finish_reason nor error", r.tokens())
	}
	return nil
}

// whole reads an answer that is one JSON document.
func (r *reader) whole() error {
	a := &r.answer
	if a.Err != nil || a.Left {
		return r.fragment()
	}
	if len(bytes.TrimSpace(a.Body)) == 0 {
		return broken(TrueOutcome, "status 200 and an empty body")
	}
	if !utf8.Valid(a.Body) {
		return broken(OnePublisher, "the body is not UTF-8, a character was cut")
	}
	var d document
	dec := json.NewDecoder(bytes.NewReader(a.Body))
	if err := dec.Decode(&d); err != nil {
		return broken(TrueOutcome, "silent truncation: the body ends cleanly and is no whole JSON document: %v", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return broken(TrueOutcome, "bytes after the end of the answer")
	}
	if d.failed() {
		if d.output() {
			return broken(TrueOutcome, "the body is an error and output at once")
		}
		r.fault(d.Error)
		return nil
	}
	r.seen.ID = d.ID
	for _, raw := range d.Choices {
		if err := r.wholeChoice(raw); err != nil {
			return err
		}
	}
	if len(d.Choices) == 0 || len(d.Choices) < a.Choices {
		return broken(TrueOutcome, "an answer with %d choices passes for a whole one", len(d.Choices))
	}
	r.seen.Complete = true
	return nil
}

func (r *reader) wholeChoice(raw json.RawMessage) error {
	var p part
	if err := json.Unmarshal(raw, &p); err != nil {
		return broken(OnePublisher, "a choice is not as it should be: %q", clip(raw))
	}
	text, _ := words(p.Message)
	text += p.Text
	if sure := logprobs(p.Logprobs); sure != "" && sure != text {
		return broken(OnePublisher, "choice %d: logprobs of %q beside %q", p.Index, sure, text)
	}
	if err := r.text(p.Index, text); err != nil {
		return err
	}
	c := r.choice(p.Index)
	if c.finish != "" {
		return broken(OnePublisher, "choice %d comes twice", p.Index)
	}
	if p.Finish != nil {
		c.finish = *p.Finish
		return r.finished(p.Index)
	}
	return nil
}

// finished checks a finish_reason against what was asked for: "length" is a
// claim that can be counted.
func (r *reader) finished(i int) error {
	c := r.choice(i)
	if want := r.answer.MaxTokens; c.finish == "length" && want > 0 && c.tokens != want {
		return broken(TrueOutcome, "choice %d: finish_reason length after %d tokens of %d", i, c.tokens, want)
	}
	return nil
}

// fragment reads what there is of a body that broke off: all of its tokens are
// still of one attempt.
func (r *reader) fragment() error {
	for _, m := range anyToken.FindAllSubmatch(r.answer.Body, -1) {
		if err := r.publisher(string(m[1]), string(m[2])); err != nil {
			return err
		}
		choice, _ := strconv.Atoi(string(m[3]))
		n, _ := strconv.Atoi(string(m[4]))
		// Logprobs repeat the text, so tokens may start again from 1.
		if c := r.choice(choice); n == c.tokens+1 {
			c.tokens = n
		} else if n > c.tokens {
			return broken(OnePublisher, "choice %d: a gap, token %d after %d", choice, n, c.tokens)
		}
	}
	return nil
}

// Tokens in the middle of anything, and at the very start of a text.
var (
	anyToken   = regexp.MustCompile(`([A-Za-z_.-]+(?:[0-9]+[A-Za-z_.-]+)*)([0-9]+)(?:/([0-9]+))?·([0-9]+) `)
	firstToken = regexp.MustCompile(`^` + anyToken.String())
)

// text takes the next text of a choice, which is whole tokens.
func (r *reader) text(i int, text string) error {
	for text != "" {
		m := firstToken.FindStringSubmatch(text)
		if m == nil {
			return broken(OnePublisher, "choice %d: %q is not a whole token", i, clip([]byte(text)))
		}
		if of, _ := strconv.Atoi(m[3]); of != i {
			return broken(OnePublisher, "choice %d holds a token of choice %d", i, of)
		}
		if err := r.publisher(m[1], m[2]); err != nil {
			return err
		}
		c := r.choice(i)
		switch n, _ := strconv.Atoi(m[4]); {
		case n == c.tokens+1:
			c.tokens = n
		case n <= c.tokens:
			return broken(OnePublisher, "choice %d: a duplicate, token %d after %d", i, n, c.tokens)
		default:
			return broken(OnePublisher, "choice %d: a gap, token %d after %d", i, n, c.tokens)
		}
		text = text[len(m[0]):]
	}
	return nil
}

// publisher checks that every token is of the one attempt.
func (r *reader) publisher(engine, attempt string) error {
	n, _ := strconv.Atoi(attempt)
	if r.seen.Engine == "" {
		r.seen.Engine, r.seen.Attempt = engine, n
	}
	if engine != r.seen.Engine || n != r.seen.Attempt {
		return broken(OnePublisher, "a splice: tokens of %s%s after %s%d", engine, attempt, r.seen.Engine, r.seen.Attempt)
	}
	return nil
}

// labels are the members of a delta or message that are no text of the model.
var labels = map[string]bool{"role": true, "id": true, "type": true, "name": true, "index": true}

// words is the text of a delta or message, wherever in it that is, and whether
// it names a role.
func words(raw json.RawMessage) (text string, role bool) {
	if len(raw) == 0 {
		return "", false
	}
	var out strings.Builder
	dec := json.NewDecoder(bytes.NewReader(raw))
	var key []string   // the member being read, by depth; "" in a list
	var object []bool  // what each depth is
	expectKey := false // of the innermost object
	for {
		t, err := dec.Token()
		if err != nil {
			return out.String(), role
		}
		switch v := t.(type) {
		case json.Delim:
			if v == '{' || v == '[' {
				object, key = append(object, v == '{'), append(key, "")
				expectKey = v == '{'
				continue
			}
			object, key = object[:len(object)-1], key[:len(key)-1]
		case string:
			if expectKey {
				key[len(key)-1], expectKey = v, false
				if v == "role" && len(key) == 1 {
					role = true
				}
				continue
			}
			if k := key[len(key)-1]; !labels[k] {
				out.WriteString(unwrap(k, v))
			}
		}
		expectKey = len(object) > 0 && object[len(object)-1]
	}
}

// unwrap takes a tool call's arguments out of the JSON that surrounds them.
func unwrap(key, text string) string {
	if key == "arguments" {
		text = strings.TrimSuffix(strings.TrimPrefix(text, `{"t":"`), `"}`)
	}
	return text
}

// logprobs is the text that logprobs are of, in the chat form or the older one.
func logprobs(raw json.RawMessage) string {
	var l struct {
		Content []struct {
			Token string `json:"token"`
		} `json:"content"`
		Tokens []string `json:"tokens"`
	}
	if len(raw) == 0 || json.Unmarshal(raw, &l) != nil {
		return ""
	}
	text := strings.Join(l.Tokens, "")
	for _, c := range l.Content {
		text += c.Token
	}
	return text
}

func clip(b []byte) string {
	if len(b) > 120 {
		return string(b[:120]) + "…"
	}
	return string(b)
}
