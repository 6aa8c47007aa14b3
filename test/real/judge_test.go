// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"

	"github.com/headgate/headgate/test/real"
)

// visible is what a client is to see of an engine's streamed answer: its bytes,
// without the usage event unless it was asked for.
func (a *reply) visible(events []real.Event) string {
	var b strings.Builder
	for _, e := range events {
		if a.usage || !e.UsageOnly() {
			b.WriteString(e.Raw)
		}
	}
	return b.String()
}

// wantWhole judges an answer that must be one whole answer of the request's last
// attempt, byte by byte, after a certain number of attempts.
func (r *rig) wantWhole(a *reply, attempts int) (last real.Exchange) {
	r.t.Helper()
	if a.status != 200 || a.err != nil {
		r.t.Fatalf("status %d, error %v: %s", a.status, a.err, a.body)
	}
	list := r.attempts(a)
	if len(list) != attempts {
		r.t.Fatalf("%d POSTs reached the engines for %s, want %d", len(list), a.request, attempts)
	}
	// The client has its answer before the engine has said that it is over.
	r.must(list[attempts-1].Conn.AwaitBytes(r.ctx, real.ToGateway, func(b []byte) bool { return bytes.HasSuffix(b, lastChunk) || !a.stream }))
	list = r.attempts(a)
	last = list[attempts-1]
	for _, x := range list {
		if string(x.Sent) != string(last.Sent) {
			r.t.Errorf("attempts differ in what was asked:\n%s\n%s", x.Sent, last.Sent)
		}
		if x.Conn != last.Conn && x.Relay == last.Relay {
			r.t.Errorf("attempts of %s went to the same engine", a.request)
		}
	}
	if !last.Whole || last.Status != 200 {
		r.t.Fatalf("the engine of the last attempt sent status %d, whole: %v", last.Status, last.Whole)
	}
	if !a.stream {
		r.wantWholeJSON(a, last)
		return last
	}
	events, rest := real.Events(last.Body)
	if got, want := string(a.body), a.visible(events); got != want || len(rest) > 0 {
		r.t.Fatalf("the client's bytes are not the engine's:\nclient:\n%s\nengine:\n%s", got, want)
	}
	seen, _ := real.Events(a.body)
	var finishes, usages, dones, texts int
	for _, e := range seen {
		for _, c := range e.Choices {
			if c.FinishReason != "" {
				finishes++
			}
		}
		if e.UsageOnly() {
			usages++
		}
		if e.Done {
			dones++
		}
		if e.Content() != "" {
			texts++
		}
		if e.Error != nil || e.ID != seen[0].ID && !e.Done {
			r.t.Errorf("an event that is not of the answer: %s", e.Raw)
		}
	}
	wantUsage := 0
	if a.usage {
		wantUsage = 1
	}
	if finishes != 1 || dones != 1 || usages != wantUsage || !seen[len(seen)-1].Done {
		r.t.Errorf("%d finish reasons, %d [DONE], %d usages, want 1, 1, %d:\n%s", finishes, dones, usages, wantUsage, a.body)
	}
	if texts == 0 || texts > a.tokens {
		r.t.Errorf("%d events with text, asked for %d tokens", texts, a.tokens)
	}
	return last
}

// attempts are the request's exchanges, without the one that may have met the
// end of a kept connection: it is sent once more, and no engine begins it.
func (r *rig) attempts(a *reply) []real.Exchange {
	r.t.Helper()
	all := r.of(a.request)
	fresh := slices.DeleteFunc(slices.Clone(all), real.Exchange.Stale)
	if stale := len(all) - len(fresh); stale > 1 {
		r.t.Errorf("%s was resent %d times", a.request, stale)
	}
	return fresh
}

// lastChunk ends a chunked body.
var lastChunk = []byte("0\r\n\r\n")

func (r *rig) wantWholeJSON(a *reply, last real.Exchange) {
	r.t.Helper()
	if string(a.body) != string(last.Body) {
		r.t.Fatalf("the client's bytes are not the engine's:\nclient: %s\nengine: %s", a.body, last.Body)
	}
	var got real.Chunk
	if err := json.Unmarshal(a.body, &got); err != nil {
		r.t.Fatalf("%v: %s", err, a.body)
	}
	if len(got.Choices) != 1 || got.Choices[0].FinishReason != "length" || got.Choices[0].Message.Content == "" {
		r.t.Errorf("not a whole answer: %s", a.body)
	}
	if got.Usage == nil || got.Usage.Completion != a.tokens {
		r.t.Errorf("asked for %d tokens: %s", a.tokens, a.body)
	}
}

// wantInterrupted judges a stream that must be whole events of one engine's
// answer and then the error, of one attempt, with nothing after it.
func (r *rig) wantInterrupted(a *reply) (only real.Exchange) {
	r.t.Helper()
	if a.status != 200 || a.err != nil {
		r.t.Fatalf("status %d, error %v: the body must end cleanly\n%s", a.status, a.err, a.body)
	}
	list := r.of(a.request)
	if len(list) != 1 {
		r.t.Fatalf("%d POSTs reached the engines for %s, want 1", len(list), a.request)
	}
	only = list[0]
	seen, rest := real.Events(a.body)
	if len(seen) < 2 || len(rest) > 0 {
		r.t.Fatalf("%d events and the rest %q:\n%s", len(seen), rest, a.body)
	}
	part, last := seen[:len(seen)-1], seen[len(seen)-1]
	sent, _ := real.Events(only.Passed)
	if got, want := a.visible(part), a.visible(sent); got != want {
		r.t.Errorf("the client's events are not those that came from the engine:\nclient:\n%s\nengine:\n%s", got, want)
	}
	texts := 0
	for _, e := range part {
		if e.Error != nil || e.Done || len(e.Choices) > 0 && e.Choices[0].FinishReason != "" {
			r.t.Errorf("an event that no interrupted stream has: %s", e.Raw)
		}
		if e.Content() != "" {
			texts++
		}
	}
	e := last.Error
	switch {
	case e == nil:
		r.t.Fatalf("the last event is no error: %s", last.Raw)
	case e.Code != "upstream_decode_interrupted", e.Type != "upstream_error", e.Message == "", e.Request != a.request,
		!e.Partial, e.Retryable == nil, *e.Retryable:
		r.t.Errorf("not the error that was promised: %s", last.Raw)
	case e.Tokens != texts || texts == 0:
		r.t.Errorf("the error says that %d tokens were delivered, the client saw %d", e.Tokens, texts)
	}
	return only
}

// wantUntouched judges an engine that must have had no part in anything.
func (r *rig) wantUntouched(e replica) {
	r.t.Helper()
	if posts, tasks, tokens := len(e.Posts()), e.Tasks(), r.tokens(e); posts+tasks+tokens != 0 {
		r.t.Errorf("%s got %d POSTs, began %d requests and generated %d tokens, want none", e.Name, posts, tasks, tokens)
	}
}

// wantTasks judges by an engine's own log and counters how much it did.
func (r *rig) wantTasks(e replica, tasks, tokens int) {
	r.t.Helper()
	r.must(e.AwaitReleases(r.ctx, tasks)) // which comes after the answer
	if gotTasks, got := e.Tasks(), r.tokens(e); gotTasks != tasks || got != tokens {
		r.t.Errorf("%s began %d requests and generated %d tokens, want %d and %d", e.Name, gotTasks, got, tasks, tokens)
	}
}

// wantFleet is wantTasks of both engines together.
func (r *rig) wantFleet(tasks, tokens int) {
	r.t.Helper()
	gotTasks, got := 0, 0
	for _, e := range r.replicas {
		n := e.Tasks()
		r.must(e.AwaitReleases(r.ctx, n))
		gotTasks, got = gotTasks+n, got+r.tokens(e)
	}
	if gotTasks != tasks || got != tokens {
		r.t.Errorf("the engines began %d requests and generated %d tokens, want %d and %d", gotTasks, got, tasks, tokens)
	}
}
