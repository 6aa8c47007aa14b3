// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"strings"
	"testing"

	"github.com/headgate/headgate/test/real"
)

// TestLlama plays the seed document's stories with llama.cpp's own server. Its
// answers name no attempt, so they are judged by the id that each event carries
// and by what the servers logged.
func TestLlama(t *testing.T) {
	t.Run("1 killed during prefill", func(t *testing.T) {
		t.Parallel()
		r, a, victim, other := llama(t, false, false, 80)
		victim.engine().kill()
		r.answered(a)
		r.wantLlama(a, true)
		r.wantTasks(victim, 1)
		r.wantTasks(other, 1)
		r.over()
	})
	t.Run("3 killed after the first delta", func(t *testing.T) {
		t.Parallel()
		r, a, victim, other := llama(t, false, true, 1200)
		victim.engine().kill()
		r.answered(a)
		r.wantLlama(a, false)
		r.wantTasks(other, 0)
		r.over()
	})
	t.Run("4 link cut and process alive, no guard", func(t *testing.T) {
		t.Parallel()
		r, a, victim, other := llama(t, false, false, 1200)
		r.cut(true, true, victim.link()...)
		r.answered(a)
		if got := endingOf(a.Answer); got != notFenced {
			t.Errorf("the client has %q: %s", got, a.Body)
		}
		r.wantTasks(other, 0)
		r.heal()
		r.must(poll("the old engine to notice", func() bool { return victim.logged(taskEnds) == 1 }))
		r.over()
	})
	t.Run("4 link cut and process alive, guard", func(t *testing.T) {
		t.Parallel()
		r, a, victim, other := llama(t, true, false, 400)
		r.cut(true, true, victim.link()...)
		// Nothing but its guard can tell the engine to stop: the cut lasts.
		r.must(poll("the old engine to be stopped", func() bool { return victim.logged(taskEnds) == 1 }))
		r.answered(a)
		r.wantLlama(a, true)
		r.wantTasks(victim, 1)
		r.wantTasks(other, 1)
		rec := r.finished(a.Request)
		if len(rec.Attempts) != 2 || rec.Attempts[0].Proof != "lease_expired" {
			t.Errorf("%+v", rec)
		}
		r.heal()
		r.over()
	})
}

// What llama-server logs when a request gets a slot, and when the slot is free.
const (
	taskBegins = "| processing task, is_child = 0"
	taskEnds   = "| stop processing: n_tokens"
)

// llama asks a long question of two servers, and returns when one is at work on
// it: with the prompt, or with the answer.
func llama(t *testing.T, guarded, begun bool, tokens int) (r *run, a *asked, victim, other *replica) {
	r = newRun(t, *seedFlag, 2)
	r.llama, r.guarded = true, guarded
	r.pool = append(append(r.pool, patient...), "health: {interval: 100ms, timeout: 300ms}")
	r.start()
	// An answer that can't stop by itself.
	more := map[string]any{"logit_bias": map[string]int{"2": -100}}
	a = r.send(ask{path: "/v1/chat/completions", stream: true, tokens: tokens, n: 1, pad: 6000, more: more})
	r.must(poll("a server to begin", func() bool {
		for i, b := range r.replicas {
			if b.logged(taskBegins) > 0 {
				victim, other = b, r.replicas[1-i]
			}
		}
		return victim != nil
	}))
	if begun {
		r.must(poll("the first token", func() bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			return strings.Contains(string(a.got), `"content":"`)
		}))
	}
	return r, a, victim, other
}

// logged counts lines of the engine's log.
func (b *replica) logged(word string) (n int) {
	all, _, _ := b.engine().since(0)
	for _, line := range all {
		if strings.Contains(line, word) {
			n++
		}
	}
	return n
}

func (r *run) wantTasks(b *replica, want int) {
	r.t.Helper()
	if got := b.logged(taskBegins); got != want {
		r.t.Errorf("server %s began %d requests, want %d", b.name, got, want)
	}
}

// wantLlama judges a stream: whole, or a part and the error that says so. All of
// its events are of one answer.
func (r *run) wantLlama(a *asked, complete bool) {
	r.t.Helper()
	events, rest := real.Events(a.Body)
	if a.Status != 200 || a.Err != nil || len(rest) > 0 || len(events) == 0 {
		r.t.Fatalf("status %d, error %v, rest %q, %d events", a.Status, a.Err, rest, len(events))
	}
	finished := false
	for _, e := range events[:len(events)-1] {
		if e.ID != events[0].ID || e.Error != nil || e.Done {
			r.t.Errorf("an event that is not of the answer: %s", e.Raw)
		}
		for _, c := range e.Choices {
			finished = finished || c.FinishReason != ""
		}
	}
	last := events[len(events)-1]
	switch {
	case complete && (!last.Done || !finished):
		r.t.Errorf("not whole: %s", last.Raw)
	case !complete && (last.Error == nil || last.Error.Code != "upstream_decode_interrupted" || !last.Error.Partial || finished):
		r.t.Errorf("no error at the end of a part: %s", last.Raw)
	}
}

// over ends the gateway and plays its trace again.
func (r *run) over() {
	r.t.Helper()
	r.terminate()
	r.replay()
}
