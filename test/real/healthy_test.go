// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/headgate/headgate/test/real"
)

func TestAnswersOfHealthyEngines(t *testing.T) {
	r := newRig(t, "fast")
	for _, a := range []ask{
		{stream: true, tokens: 40},
		{stream: true, tokens: 40, usage: true},
		{tokens: 40},
	} {
		r.wantWhole(r.do(a), 1)
	}
	r.wantFleet(3, 3*40)
}

// llama-server says keep-alive and closes after each streamed answer. A gateway
// that believes it loses requests. What it sends again no engine may have begun.
func TestEngineThatClosesAfterEachStream(t *testing.T) {
	const streams, tokens = 50, 6
	r := newRig(t, "fast")
	for range streams {
		r.wantWhole(r.do(ask{stream: true, tokens: tokens}), 1)
	}
	// The gateway learns it from each engine by one connection that it loses.
	if resent := len(r.posts()) - streams; resent > len(r.replicas) {
		t.Errorf("%d requests were sent again", resent)
	} else {
		t.Logf("%d requests were sent again", resent)
	}
	r.wantFleet(streams, streams*tokens)
}

// A client that leaves in the middle of a stream stops the engine.
func TestClientLeaves(t *testing.T) {
	r := newRig(t, "slow")
	ctx, leave := context.WithCancel(r.ctx)
	got := r.open(ctx, ask{stream: true, tokens: 1900})
	got.readUntil(hasTokens(2))
	leave()
	if got.rest(); !errors.Is(got.err, context.Canceled) {
		t.Fatalf("the client did not leave: %v", got.err)
	}
	this, other := r.busy()
	conn := this.Conns()[0]
	if _, err := conn.AwaitEnd(r.ctx, real.ToEngine); err != nil {
		t.Fatalf("the gateway did not close: %v", err)
	}
	r.must(this.AwaitReleases(r.ctx, 1))
	slots, err := this.Slots()
	r.must(err)
	for i, s := range slots {
		if s.Busy {
			t.Errorf("slot %d of %s is busy", i, this.Name)
		}
	}
	if x := r.of(got.request); len(x) != 1 || bytes.Contains(x[0].Body, []byte("finish_reason\":\"")) {
		t.Errorf("%d POSTs; the engine sent %d bytes", len(x), len(x[0].Body))
	}
	r.wantUntouched(other)
}

// llama-server answers 500 to JSON that it can't read. That is the client's
// fault: no engine gets to see it, and none is held to be broken.
func TestMalformedJSON(t *testing.T) {
	r := newRig(t, "fast")
	const broken = `{"model":"tiny","messages":[{"role":"user","content":"hi"}`
	status, body, err := r.replicas[0].Post(chatPath, broken)
	r.must(err)
	if status != 500 {
		t.Fatalf("the engine by itself answers %d: %s", status, body)
	}
	for range 10 {
		got, err := r.post(r.ctx, broken)
		r.must(err)
		if got.rest(); got.status != 400 || !strings.Contains(string(got.body), `"code":"invalid_json"`) {
			t.Fatalf("status %d: %s", got.status, got.body)
		}
	}
	if n := len(r.posts()); n != 0 {
		t.Fatalf("%d POSTs reached the engines", n)
	}
	for range 4 {
		r.wantWhole(r.do(ask{stream: true, tokens: 5}), 1)
	}
}

// What an engine refuses is its answer: it passes unchanged and is not asked of
// another engine.
func TestPromptTooLong(t *testing.T) {
	both(t, func(t *testing.T, stream bool) {
		r := newRig(t, "fast")
		for range 2 {
			got := r.do(ask{stream: stream, tokens: 5, prompt: strings.Repeat(longPrompt, 2)})
			list := r.of(got.request)
			if len(list) != 1 {
				t.Fatalf("%d POSTs reached the engines", len(list))
			}
			if got.status != 400 || list[0].Status != 400 || string(got.body) != string(list[0].Body) ||
				!strings.Contains(string(got.body), "exceed_context_size_error") {
				t.Errorf("status %d of %d\nclient: %s\nengine: %s", got.status, list[0].Status, got.body, list[0].Body)
			}
		}
		// Neither engine is held to be broken.
		for range 2 {
			r.wantWhole(r.do(ask{stream: stream, tokens: 5}), 1)
		}
	})
}
