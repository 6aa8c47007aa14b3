// SPDX-License-Identifier: Apache-2.0

package keep

import (
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/simengine"
)

// key makes the header of a keyed request.
func key(k string, more ...string) []string { return append([]string{"Idempotency-Key", k}, more...) }

// refused checks the shape of a refusal by the gateway itself.
func refused(t *testing.T, a answer, status int, code string, retryable bool) {
	t.Helper()
	e := a.error()
	switch {
	case a.status != status || e.Code != code:
		t.Errorf("got %d %s, want %d %s\n%v", a.status, e.Code, status, code, a)
	case e.Retryable == nil || *e.Retryable != retryable || a.header.Get("X-Should-Retry") != strconv.FormatBool(retryable):
		t.Errorf("%s: retryable is not %v\n%v", code, retryable, a)
	case a.header.Get("Headgate-Reason") != code:
		t.Errorf("Headgate-Reason is not %s\n%v", code, a)
	case a.header.Get("Idempotent-Replayed") != "":
		t.Errorf("a refusal claims to be a replay\n%v", a)
	}
}

// replayed checks that b is a's answer once more.
func replayed(t *testing.T, b, a answer) {
	t.Helper()
	switch {
	case b.status != a.status || b.body != a.body || b.err != nil:
		t.Errorf("the replay is another answer:\n%v\nfirst:\n%v", b, a)
	case b.header.Get("Idempotent-Replayed") != "true":
		t.Errorf("a replay without Idempotent-Replayed: true\n%v", b)
	case a.header.Get("Idempotent-Replayed") != "":
		t.Errorf("the first answer says that it is a replay\n%v", a)
	case b.id() != a.id():
		t.Errorf("the replay is request %s, the first was %s", b.id(), a.id())
	case b.header.Get("Content-Type") != a.header.Get("Content-Type"):
		t.Errorf("the replay's type is %q, the first's %q", b.header.Get("Content-Type"), a.header.Get("Content-Type"))
	}
}

// Row "in flight": 409 with Retry-After and the id of the request that runs,
// before its first delta and after it.
func TestRepeatOfARunningRequestIsToldToWait(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]string{"before the first delta": "stall@head", "after the first delta": "stall@token:2"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := engines(t, 1)
			g := start(t, "", onePool(static(e...)))
			first := make(chan answer, 1)
			must(t, e[0].Inject(fault+":1s"))
			go func() { first <- g.try("POST", chat, streamed, key("k")...) }()
			arrival(t, 1, e...)
			again := g.post(streamed, key("k")...)
			a := <-first
			if !a.whole() {
				t.Fatalf("first: %v", a)
			}
			refused(t, again, 409, "request_in_progress", true)
			wait, err := strconv.Atoi(again.header.Get("Retry-After"))
			if err != nil || wait < 1 || wait > 30 {
				t.Errorf("Retry-After: %q", again.header.Get("Retry-After"))
			}
			if !strings.Contains(again.error().Message, a.id()) {
				t.Errorf("the 409 does not name %s: %q", a.id(), again.error().Message)
			}
			if again.error().RequestID != again.id() {
				t.Errorf("error.request_id %s, x-request-id %s", again.error().RequestID, again.id())
			}
			replayed(t, g.post(streamed, key("k")...), a)
			if n := len(received(e...)); n != 1 {
				t.Errorf("%d requests at the engine", n)
			}
		})
	}
}

// Row "completed": the same bytes, a stream as the same events.
func TestRepeatOfACompletedRequestGetsItsBytes(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	g := start(t, "", onePool(static(e...)))
	for _, c := range []struct{ name, body, fault string }{
		{"stream", streamed, ""},
		{"stream in pieces", streamed, "bytewise"},
		{"stream with a marker that the engine left out", streamed, "nodone"},
		{"stream that asks for usage", `{"model":"sim","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"hi"}]}`, ""},
		{"stream after a retry", streamed, "attempt=1;status@head:500"},
		{"whole", plain, ""},
		{"whole after a retry", plain, "attempt=1;status@head:500"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := len(received(e...))
			header := key(c.name, "X-Sim-Fault", c.fault, "X-Request-Id", "mine")
			a := g.post(c.body, header...)
			if !a.whole() {
				t.Fatal(a)
			}
			ran := len(received(e...))
			for range 2 {
				replayed(t, g.post(c.body, header...), a)
			}
			if n := len(received(e...)); n != ran {
				t.Errorf("%d requests at engines, then %d", ran-before, n-before)
			}
			if r := g.record(a.id()); !r.Keyed || r.Outcome != "completed" || !r.FirstDelta {
				t.Errorf("record: %+v", r)
			}
		})
	}
}

// An engine's refusal is no answer that is stored: a repeat asks again, as an
// attempt of the same request, and the attempts are counted.
func TestRepeatOfARequestThatItsEngineRefused(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	g := start(t, "", onePool(static(e...)))
	header := key("k", "X-Sim-Fault", "times=9;status@head:422:json")
	a := g.post(plain, header...)
	if a.status != 422 {
		t.Fatal(a)
	}
	if r := g.record(a.id()); r.Outcome != "failed" || r.FirstDelta {
		t.Errorf("record: %+v", r)
	}
	b := g.post(plain, header...)
	if b.status != 422 || b.body != a.body || b.id() != a.id() {
		t.Errorf("first %v\nagain %v", a, b)
	}
	refused(t, g.post(plain, header...), 400, "attempts_exhausted", false)
	if n := len(received(e...)); n != 2 {
		t.Errorf("%d requests at the engine", n)
	}
}

// Row "completed": the size of what is stored is bounded.
func TestAnswerOverTheBoundIsNotMadeTwice(t *testing.T) {
	t.Parallel()
	e := engines(t, 1, func(c *simengine.Config) { c.Tokens = 300 })
	g := start(t, "", "journal: {idempotency: {max_answer: 2KiB}}\n"+onePool(static(e...)))
	a := g.post(streamed, key("k")...)
	if !a.whole() || len(a.body) < 2<<10 {
		t.Fatal(a)
	}
	b := g.post(streamed, key("k")...)
	refused(t, b, 400, "idempotency_unavailable", false)
	if !strings.Contains(b.error().Message, a.id()) {
		t.Errorf("the answer does not name %s: %q", a.id(), b.error().Message)
	}
	small := strings.Replace(streamed, `{"model"`, `{"max_tokens":2,"model"`, 1)
	first := g.post(small, key("small")...)
	replayed(t, g.post(small, key("small")...), first)
	if n := len(received(e...)); n != 2 {
		t.Errorf("%d requests at the engine", n)
	}
}

// Row "completed": the time that it is stored is bounded, and counts from the
// end of the request.
func TestKeyIsFreeAfterItsTime(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	g := start(t, "", "journal: {idempotency: {ttl: 1500ms}}\n"+onePool(static(e...)))
	a := g.post(streamed, key("k", "X-Sim-Fault", "stall@token:2:1s")...)
	ended := time.Now()
	replayed(t, g.post(streamed, key("k")...), a)
	var b answer
	eventually(t, "the key is free", func() bool {
		b = g.post(streamed, key("k")...)
		return b.header.Get("Idempotent-Replayed") == ""
	})
	if took := time.Since(ended); took < time.Second {
		t.Errorf("free %v after the end, its ttl is 1.5 s", took)
	}
	if !b.whole() || b.id() == a.id() {
		t.Errorf("after its time: %v", b)
	}
}

// Row "interrupted": the stored error, as 400, which no SDK sends again.
func TestRepeatOfAnInterruptedRequestGetsItsError(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	g := start(t, "", onePool(static(e...)))
	a := g.post(streamed, key("k", "X-Sim-Fault", "rst@token:3")...)
	if a.status != 200 || a.tokens() != 3 || a.code() != "upstream_decode_interrupted" {
		t.Fatal(a)
	}
	b := g.post(streamed, key("k")...)
	refused(t, b, 400, "upstream_decode_interrupted", false)
	if n := len(received(e...)); n != 1 {
		t.Errorf("%d requests at engines", n)
	}
	// What is told is about the request that the key stands for.
	stored := errorIn(a.body[strings.LastIndex(a.body, `{"error"`):])
	if got := b.error(); got.RequestID != stored.RequestID || b.id() != a.id() {
		t.Errorf("the stored error is of request %s (header %s), want %s", got.RequestID, b.id(), stored.RequestID)
	} else if got.Message != stored.Message || got.Partial != stored.Partial || got.Delivered != stored.Delivered {
		t.Errorf("the stored error is %+v, the client was told %+v", got, stored)
	}
}

// Row "cancelled": after a delta as interrupted, before one as failed.
func TestRepeatOfACancelledRequest(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	g := start(t, "", onePool(static(e...)))

	s := g.open(streamed, key("after", "X-Sim-Fault", "stall@token:2")...)
	s.until("·")
	id := s.res.Header.Get("X-Request-Id")
	s.leave()
	eventually(t, "the outcome", func() bool { return g.record(id).Outcome == "cancelled" })
	refused(t, g.post(streamed, key("after")...), 400, "upstream_decode_interrupted", false)

	// The engine stalls at the request's first visit only.
	left := make(chan answer, 1)
	ahead := len(received(e...))
	hasty := g.site
	transport := *newSite(t).client
	transport.Timeout = 300 * time.Millisecond
	hasty.client = &transport
	go func() { left <- hasty.try("POST", chat, streamed, key("before", "X-Sim-Fault", "stall@head")...) }()
	arrival(t, ahead+1, e...)
	first := received(e...)[ahead].Request
	if a := <-left; a.err == nil {
		t.Fatalf("the client was to leave: %v", a)
	}
	eventually(t, "the outcome", func() bool { return g.record(first).Outcome == "cancelled" })
	b := g.post(streamed, key("before")...)
	if !b.whole() || b.id() != first {
		t.Errorf("want the answer of %s: %v", first, b)
	}
	if last := received(e...)[ahead+1]; last.Attempt != 2 || last.Request != first {
		t.Errorf("the engine got attempt %d of %s", last.Attempt, last.Request)
	}
	replayed(t, g.post(streamed, key("before")...), b)
}

// Rows "failed before a delta" and "attempts exhausted".
func TestRepeatOfAFailedRequestIsItsNextAttempt(t *testing.T) {
	t.Parallel()
	for _, body := range []string{streamed, plain} {
		e := engines(t, 2)
		g := start(t, "", onePool(static(e...)+", failover: {before_first_delta: {max_attempts: 3}}"))
		// Each engine fails the request's first visit.
		failing := key("k", "X-Sim-Fault", "status@head:500")
		a := g.post(body, failing...)
		if a.status != 502 || a.code() != "upstream_failed" || a.tokens() != 0 {
			t.Fatal(a)
		}
		if n := len(received(e...)); n != 2 {
			t.Fatalf("%d attempts", n)
		}
		if r := g.record(a.id()); r.Outcome != "failed" || r.FirstDelta || len(r.Attempts) != 2 {
			t.Errorf("record: %+v", r)
		}
		b := g.post(body, failing...)
		if !b.whole() || b.id() != a.id() {
			t.Fatalf("first %v\nagain %v", a, b)
		}
		last := received(e...)
		seen := map[int]bool{}
		for _, entry := range last {
			seen[entry.Attempt] = true
			if entry.Request != a.id() {
				t.Errorf("an engine got request %s", entry.Request)
			}
		}
		if len(last) != 3 || !seen[1] || !seen[2] || !seen[3] {
			t.Errorf("attempts at engines: %v", seen)
		}
		if b.header.Get("Headgate-Attempts") != "3" {
			t.Errorf("Headgate-Attempts: %q", b.header.Get("Headgate-Attempts"))
		}
		r := g.record(a.id())
		if r.Outcome != "completed" || len(r.Attempts) != 3 || !r.FirstDelta {
			t.Errorf("record: %+v", r)
		}
		replayed(t, g.post(body, key("k")...), b)
	}
}

func TestRepeatAfterAllAttemptsIsRefused(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	g := start(t, "", onePool(static(e...)))
	a := g.post(streamed, key("k", "X-Sim-Fault", "times=9;status@head:500")...)
	if a.status != 502 || a.code() != "upstream_failed" {
		t.Fatal(a)
	}
	b := g.post(streamed, key("k")...)
	refused(t, b, 400, "attempts_exhausted", false)
	if !strings.Contains(b.error().Message, a.id()) {
		t.Errorf("the answer does not name %s: %q", a.id(), b.error().Message)
	}
	if n := len(received(e...)); n != 2 {
		t.Errorf("%d requests at engines", n)
	}
	if r := g.record(a.id()); r.Outcome != "failed" || len(r.Attempts) != 2 {
		t.Errorf("record: %+v", r)
	}
}

// Row "other body": one byte is another body, whatever became of the first.
func TestSameKeyWithAnotherBodyIsRefused(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	g := start(t, "", onePool(static(e...)))
	other := strings.Replace(streamed, "hi", "hj", 1)
	for name, fault := range map[string]string{"completed": "", "interrupted": "rst@token:2", "failed": "times=2;status@head:500"} {
		g.post(streamed, key(name, "X-Sim-Fault", fault)...)
		n := len(received(e...))
		refused(t, g.post(other, key(name)...), 400, "idempotency_key_reused", false)
		if len(received(e...)) != n {
			t.Errorf("%s: the other body reached an engine", name)
		}
	}
	s := g.open(streamed, key("running", "X-Sim-Fault", "stall@token:2")...)
	refused(t, g.post(other, key("running")...), 400, "idempotency_key_reused", false)
	s.leave()
}

// Row "rejected": a request that never reached an engine leaves its key free,
// for any body. Requests refused before routing never took it.
func TestKeyOfARejectedRequestIsFree(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "endpoints.yaml")
	write(t, file, "[]")
	e := engines(t, 1)
	g := start(t, dir, onePool("discovery: {file: endpoints.yaml}"))
	a := g.post(streamed, key("k")...)
	if a.status != 503 || a.code() != "no_endpoints" {
		t.Fatal(a)
	}
	if r := g.record(a.id()); r.Outcome != "rejected" {
		t.Errorf("record: %+v", r)
	}
	g.post(`{"model":7}`, key("bad")...)
	g.post(`{`, key("bad")...)
	write(t, file, endpoints(e...))
	eventually(t, "an endpoint", func() bool { return g.post(plain).status == 200 })
	before := len(received(e...))
	b := g.post(plain, key("k")...)
	if !b.whole() {
		t.Fatal(b)
	}
	if b.id() == a.id() {
		t.Errorf("the new body runs as the rejected request %s", a.id())
	}
	replayed(t, g.post(plain, key("k")...), b)
	if c := g.post(plain, key("bad")...); !c.whole() {
		t.Errorf("a key of requests that could not be understood: %v", c)
	}
	if n := len(received(e...)) - before; n != 2 {
		t.Errorf("%d requests at the engine", n)
	}
}

// A pool that runs tools by itself: its attempts are never repeated once they
// may have begun.
func TestRepeatWhereToolsMayHaveRunIsRefused(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	g := start(t, "", onePool(static(e...)+", executes_tools: true, failover: {before_first_delta: {max_attempts: 5}}"))
	for _, fault := range []string{"status@head:500", "garbage@head", "fin@role", "rst@role"} {
		ahead := len(received(e...))
		a := g.post(streamed, key(fault, "X-Sim-Fault", fault)...)
		if a.status == 200 || a.tokens() > 0 {
			t.Errorf("%s: first: %v", fault, a)
		}
		refused(t, g.post(streamed, key(fault)...), 400, "tool_effects_unknown", false)
		if n := len(received(e...)) - ahead; n != 1 {
			t.Errorf("%s: %d requests at engines", fault, n)
		}
	}
	// Refused by the engine: nothing has run, and the next attempt may.
	a := g.post(streamed, key("busy", "X-Sim-Fault", "times=1;status@head:503:json")...)
	if b := g.post(streamed, key("busy")...); !a.whole() && !b.whole() {
		t.Errorf("a busy engine: %v\nagain: %v", a, b)
	}
}

// Fifty clients with one key: one request.
func TestConcurrentDuplicatesAreOneRequest(t *testing.T) {
	t.Parallel()
	e := engines(t, 2, func(c *simengine.Config) { c.Tokens = 40 })
	g := start(t, "", onePool(static(e...)))
	for round := range 4 {
		header := key(fmt.Sprintf("k%d", round), "X-Sim-Fault", "slow:5ms")
		if round == 3 {
			header[3] = "attempt=1;status@head:500,slow:5ms" // with a retry inside
		}
		ahead := len(received(e...))
		var wg sync.WaitGroup
		begin := make(chan struct{})
		answers := make([]answer, 50)
		for i := range answers {
			wg.Go(func() {
				<-begin
				answers[i] = g.try("POST", chat, streamed, header...)
			})
		}
		close(begin)
		wg.Wait()
		var first answer
		for _, a := range answers {
			if a.status == 200 && a.header.Get("Idempotent-Replayed") == "" {
				if first.status != 0 {
					t.Errorf("two clients got a first answer: %s and %s", first.id(), a.id())
				}
				first = a
			}
		}
		if !first.whole() {
			t.Fatalf("nobody got the answer: %v", answers[0])
		}
		for _, a := range append(answers, g.post(streamed, header...)) {
			switch {
			case a.status == 409:
				refused(t, a, 409, "request_in_progress", true)
			case a.header.Get("Idempotent-Replayed") == "true":
				replayed(t, a, first)
			case a.id() != first.id():
				t.Errorf("neither the answer, nor a replay, nor 409: %v", a)
			}
		}
		attempts := received(e...)[ahead:]
		ids, want := map[string]bool{}, 1
		all := received(e...)
		for _, entry := range all {
			if entry.Request == first.id() {
				ids[entry.Request+strconv.Itoa(entry.Attempt)] = true
			}
		}
		if round == 3 {
			want = 2
		}
		if len(attempts) != want || len(ids) != want {
			t.Errorf("round %d: engines saw %d requests, %d attempts of %s, want %d", round, len(attempts), len(ids), first.id(), want)
		}
	}
}

// sha is a key as configured.
func sha(secret string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(secret))) }

// twoTenants are API keys: one and uno belong to a tenant, two to another.
func twoTenants() string {
	return fmt.Sprintf("keys: [{id: one, secret_sha256: %s, tenant: red}, {id: uno, secret_sha256: %s, tenant: red}, {id: two, secret_sha256: %s, tenant: blue}]\n",
		sha("secret-one"), sha("secret-uno"), sha("secret-two"))
}

func bearer(name string) []string { return []string{"Authorization", "Bearer secret-" + name} }

// A key is its tenant's.
func TestKeysOfTenantsDoNotMeet(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	g := start(t, "", twoTenants()+onePool(static(e...)))
	a := g.post(streamed, key("k", bearer("one")...)...)
	b := g.post(streamed, key("k", bearer("two")...)...)
	if !a.whole() || !b.whole() || a.id() == b.id() || b.header.Get("Idempotent-Replayed") != "" {
		t.Errorf("red %v\nblue %v", a, b)
	}
	// Nor with another body, which would tell that the key is in use.
	if c := g.post(plain, key("l", bearer("one")...)...); !c.whole() {
		t.Error(c)
	}
	if c := g.post(streamed, key("l", bearer("two")...)...); !c.whole() {
		t.Error(c)
	}
	replayed(t, g.post(streamed, key("k", bearer("uno")...)...), a)
	replayed(t, g.post(streamed, key("k", bearer("two")...)...), b)
	if n := len(received(e...)); n != 4 {
		t.Errorf("%d requests at the engine", n)
	}
}

// Without API keys clients can't be told apart; only on loopback they are taken
// for one.
func TestKeyWithoutTenantIsRefusedOffLoopback(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	open := "listeners: [{name: main, address: 0.0.0.0:0}]\n"
	g := start(t, "", open+onePool(static(e...)))
	refused(t, g.post(streamed, key("k")...), 400, "idempotency_unavailable", false)
	if n := len(received(e...)); n != 0 {
		t.Errorf("%d requests at the engine", n)
	}
	if a := g.post(streamed); !a.whole() {
		t.Errorf("without a key: %v", a)
	}
	g = start(t, "", open+twoTenants()+onePool(static(e...)))
	a := g.post(streamed, key("k", bearer("one")...)...)
	if !a.whole() {
		t.Fatal(a)
	}
	replayed(t, g.post(streamed, key("k", bearer("one")...)...), a)
}

// A journal that a restart empties takes no keys.
func TestKeyWithoutJournalIsRefused(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	dir := t.TempDir()
	g := start(t, dir, "journal: {driver: none}\n"+onePool(static(e...)))
	refused(t, g.post(streamed, key("k")...), 400, "idempotency_unavailable", false)
	if n := len(received(e...)); n != 0 {
		t.Errorf("%d requests at the engine", n)
	}
	a := g.post(streamed)
	if r := g.record(a.id()); !a.whole() || r.Outcome != "completed" {
		t.Errorf("without a key: %v\n%+v", a, r)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("driver none left files: %v", left)
	}
}

// What a key stands for survives an orderly restart, whatever it was.
func TestKeysSurviveARestart(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	dir := t.TempDir()
	yaml := onePool(static(e...) + ", failover: {before_first_delta: {max_attempts: 3}}")
	g := start(t, dir, yaml)
	stream := g.post(streamed, key("stream")...)
	whole := g.post(plain, key("whole")...)
	cut := g.post(streamed, key("cut", "X-Sim-Fault", "rst@token:2")...)
	failed := g.post(streamed, key("failed", "X-Sim-Fault", "status@head:500")...)
	if !stream.whole() || !whole.whole() || cut.tokens() != 2 || failed.code() != "upstream_failed" {
		t.Fatalf("%v\n%v\n%v\n%v", stream, whole, cut, failed)
	}
	g.client.CloseIdleConnections()
	g.stop()

	ahead := len(received(e...))
	g = start(t, dir, yaml)
	replayed(t, g.post(streamed, key("stream")...), stream)
	replayed(t, g.post(plain, key("whole")...), whole)
	refused(t, g.post(streamed, key("cut")...), 400, "upstream_decode_interrupted", false)
	refused(t, g.post(plain, key("stream")...), 400, "idempotency_key_reused", false)
	again := g.post(streamed, key("failed")...)
	if !again.whole() || again.id() != failed.id() || again.header.Get("Headgate-Attempts") != "3" {
		t.Errorf("want attempt 3 of %s: %v", failed.id(), again)
	}
	if n := len(received(e...)) - ahead; n != 1 {
		t.Errorf("%d requests at engines after the restart", n)
	}
	for _, a := range []answer{stream, whole, cut} {
		if r := g.record(a.id()); r.Outcome == "" || r.RequestID != a.id() {
			t.Errorf("record: %+v", r)
		}
	}
}

// A key that could not mean anything is refused before anything runs.
func TestBadKeys(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	g := start(t, "", onePool(static(e...)))
	for name, header := range map[string][]string{
		"empty":    {"Idempotency-Key", ""},
		"two":      {"Idempotency-Key", "a", "Idempotency-Key", "b"},
		"too long": {"Idempotency-Key", strings.Repeat("k", 256)},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, g.post(streamed, header...), 400, "invalid_request", false)
		})
	}
	long := key(strings.Repeat("k", 255))
	first := g.post(streamed, long...)
	replayed(t, g.post(streamed, long...), first)
	if n := len(received(e...)); n != 1 {
		t.Errorf("%d requests at the engine", n)
	}
	for _, entry := range received(e...) {
		if len(entry.Flagged) > 0 {
			t.Errorf("the engine got %v", entry.Flagged)
		}
	}
}
