// SPDX-License-Identifier: Apache-2.0

// Package dialecttest runs a dialect over recorded traffic and compares what it
// makes of it with what was written down.
//
// It owns the layout of the cases and the ways in which streams are fed. Tests
// of dialects call it, and nothing else does. A case is a folder:
//
//	about           dialect: its name; origin: who wrote the bytes; model: a
//	                name that the route puts in place of the client's
//	request.*       the client's body (.json, .form with its boundary in about)
//	engine          what the engine gets of it, and what was understood
//	answer.*        the engine's answer (.sse, or any other: not streamed)
//	client          what the client gets of it
//	verdict         what was understood of it
//
// The files engine, client and verdict are written by the test with -rewrite
// and then read by a person.
package dialecttest

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"reflect"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/dialect"
)

// An Event is a dialect.Event with bytes of its own.
type Event struct {
	Bytes                string
	Withheld             bool
	Output, Finish, Done bool
	Tokens               int
	Failure              *dialect.Failure
}

// Feed gives text to s in reads of at most size bytes.
func Feed(s dialect.Stream, text string, size int) (events []Event, err error) {
	note := func(e dialect.Event) {
		events = append(events, Event{string(e.Bytes), e.Bytes == nil, e.Output, e.Finish, e.Done, e.Tokens, e.Failure})
	}
	for len(text) > 0 {
		free := s.Buffer()
		n := copy(free[:min(size, len(free))], text)
		s.Filled(n)
		text = text[n:]
		for {
			e, ok, err := s.Next()
			if err != nil {
				return events, err
			}
			if !ok {
				break
			}
			note(e)
		}
	}
	if e, ok := s.CloseInput(); ok {
		note(e)
	}
	return events, nil
}

// Judge feeds text to streams that start makes, in reads of several sizes, which
// must not matter, and returns what the first one said.
func Judge(t testing.TB, start func() dialect.Stream, text string) ([]Event, dialect.Stream) {
	t.Helper()
	s := start()
	want, err := Feed(s, text, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{1, 2, 7, 100} {
		other := start()
		got, err := Feed(other, text, size)
		if err != nil || !reflect.DeepEqual(got, want) || other.Complete() != s.Complete() {
			t.Fatalf("in reads of %d: %v\n%+v\nwant\n%+v", size, err, got, want)
		}
	}
	return want, s
}

// Bytes joins the bytes of events.
func Bytes(events []Event) string {
	var all strings.Builder
	for _, e := range events {
		all.WriteString(e.Bytes)
	}
	return all.String()
}

// A Case is one folder.
type Case struct {
	t       *testing.T
	dir     fs.FS
	name    string
	dialect dialect.Dialect
	about   map[string]string
	write   func(name string, text []byte) error
}

// Run runs every folder of dir. write, unless nil, writes the files anew.
func Run(t *testing.T, dialects map[string]dialect.Dialect, dir fs.FS, write func(name string, text []byte) error) {
	t.Helper()
	folders, err := fs.ReadDir(dir, ".")
	if err != nil || len(folders) == 0 {
		t.Fatal("no cases: ", err)
	}
	for _, folder := range folders {
		if !folder.IsDir() || folder.Name() == "fuzz" { // of go test
			continue
		}
		t.Run(folder.Name(), func(t *testing.T) {
			c := &Case{t: t, dir: dir, name: folder.Name(), write: write, about: map[string]string{}}
			for line := range strings.Lines(c.read("about")) {
				if key, value, ok := strings.Cut(line, ":"); ok {
					c.about[key] = strings.TrimSpace(value)
				}
			}
			if c.dialect = dialects[c.about["dialect"]]; c.dialect == nil {
				t.Fatalf("no dialect %q", c.about["dialect"])
			}
			if c.about["origin"] == "" {
				t.Error("the case does not say where its bytes are from")
			}
			c.run()
		})
	}
}

func (c *Case) read(name string) string {
	c.t.Helper()
	text, err := fs.ReadFile(c.dir, path.Join(c.name, name))
	if err != nil {
		c.t.Fatal(err)
	}
	return string(text)
}

// find reads the one file whose name begins so.
func (c *Case) find(prefix string) (text, kind string) {
	c.t.Helper()
	names, err := fs.Glob(c.dir, path.Join(c.name, prefix+".*"))
	if err != nil || len(names) != 1 {
		c.t.Fatalf("%d files %s.*: %v", len(names), prefix, err)
	}
	return c.read(path.Base(names[0])), path.Ext(names[0])
}

func (c *Case) compare(name, got string) {
	c.t.Helper()
	if c.write != nil {
		if err := c.write(path.Join(c.name, name), []byte(got)); err != nil {
			c.t.Fatal(err)
		}
	}
	if want := c.read(name); got != want {
		c.t.Errorf("%s is\n%s\nwant\n%s", name, got, want)
	}
}

func (c *Case) run() {
	text, kind := c.find("request")
	contentType := "application/json"
	if kind == ".form" {
		contentType = "multipart/form-data; boundary=" + c.about["boundary"]
	}
	body := []byte(text)
	if err := c.dialect.CheckType(contentType); err != nil {
		c.t.Fatal(err)
	}
	r, err := c.dialect.Inspect(contentType, body)
	if err != nil {
		c.compare("engine", "refused: "+err.Error()+"\n")
		return
	}
	model, restore := c.about["model"], ""
	if model != "" {
		restore = r.Model
	}
	edits := c.dialect.RequestEdits(r, body, model, r.Stream)
	c.compare("engine", applied(body, edits)+"\n----\n"+understood(r, body))

	answer, kind := c.find("answer")
	if kind == ".sse" {
		c.streamed(r, answer, restore)
	} else {
		c.whole(r, answer, restore)
	}
}

func applied(body []byte, edits []dialect.Edit) string {
	segments, _ := dialect.Apply(body, edits)
	return string(bytes.Join(segments, nil))
}

// understood writes what Inspect found as a person would read it.
func understood(r *dialect.Request, body []byte) string {
	var b strings.Builder
	fmt.Fprintf(&b, "model=%q stream=%v max_tokens=%d choices=%d prompts=%d tools=%v opaque=%v format=%q tokens=%v\n",
		r.Model, r.Stream, r.MaxTokens, r.Choices, r.Prompts, r.Tools, r.Opaque, r.ResponseFormat, r.PromptTokens)
	for _, span := range r.Prompt {
		fmt.Fprintf(&b, "prompt: %s\n", clip(string(span.Of(body))))
	}
	return b.String()
}

func clip(text string) string {
	if len(text) > 72 {
		text = text[:72] + "…"
	}
	return strings.ReplaceAll(text, "\n", `\n`)
}

func (c *Case) streamed(r *dialect.Request, text, restore string) {
	if !r.Stream {
		c.t.Fatal("the answer is streamed and the request did not ask for it")
	}
	o := dialect.StreamOptions{HideUsage: !r.IncludeUsage, Model: restore}
	events, s := Judge(c.t, func() dialect.Stream { return c.dialect.NewStream(r, o) }, text)
	c.compare("client", Bytes(events))
	var b strings.Builder
	for _, e := range events {
		b.WriteString(verdict(e))
	}
	usage, ok := s.Usage()
	fmt.Fprintf(&b, "----\ncomplete=%v done=%v outputs=%d usage=%+v %v\n", s.Complete(), s.Done(), s.Outputs(), usage, ok)
	c.compare("verdict", b.String())

	// Without options no byte changes, but for what would break clients, and
	// what was cut off is not shown.
	text = strings.ReplaceAll(text, `"error":null`, `"e":null`)
	events, _ = Judge(c.t, func() dialect.Stream { return c.dialect.NewStream(r, dialect.StreamOptions{}) }, text)
	for _, e := range events {
		if e.Withheld {
			return
		}
	}
	if got := Bytes(events); got != text && (s.Complete() || !strings.HasPrefix(text, got)) {
		c.t.Errorf("without options the stream becomes\n%s", got)
	}
}

func verdict(e Event) string {
	var b strings.Builder
	for _, mark := range []struct {
		name string
		set  bool
	}{{"output", e.Output}, {"finish", e.Finish}, {"done", e.Done}, {"withheld", e.Withheld}} {
		if mark.set {
			b.WriteString(mark.name + " ")
		}
	}
	if b.Len() == 0 {
		b.WriteString("- ")
	}
	if e.Tokens > 0 {
		fmt.Fprintf(&b, "tokens=%d ", e.Tokens)
	}
	if e.Failure != nil {
		fmt.Fprintf(&b, "failure=%+v ", *e.Failure)
	}
	return b.String() + "| " + clip(strings.TrimSpace(e.Bytes)) + "\n"
}

func (c *Case) whole(r *dialect.Request, text, restore string) {
	a, err := c.dialect.Answer(r, []byte(text), restore)
	if err != nil {
		c.compare("verdict", "no answer: "+err.Error()+"\n")
		return
	}
	c.compare("client", applied([]byte(text), a.Edits))
	failure := ""
	if a.Failure != nil {
		failure = fmt.Sprintf("failure=%+v ", *a.Failure)
	}
	c.compare("verdict", fmt.Sprintf("%schoices=%d opaque=%v usage=%+v %v\n", failure, a.Choices, a.Opaque, a.Usage, a.HasUsage))

	plain, err := c.dialect.Answer(r, []byte(text), "")
	if err != nil {
		c.t.Error(err)
	} else if got := applied([]byte(text), plain.Edits); got != text && !strings.Contains(text, `"error":null`) {
		c.t.Errorf("without options the answer becomes\n%s", got)
	}
}
