// SPDX-License-Identifier: Apache-2.0

package faults_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
)

const interrupted = "upstream_decode_interrupted"

// one asks one request of a new client, judges the answer and returns both. An
// engine that the request before it killed is back first.
func (r *rig) one(q ask) (check.Answer, check.Seen) {
	r.t.Helper()
	for _, e := range r.engines {
		r.revive(e)
	}
	a := r.ask(r.newClient("h1"), q)
	return a, r.judge(a)
}

// attemptsOf lists the attempts that engines received of a request, as "A1 B2".
func (r *rig) attemptsOf(request string) string {
	var list []string
	for _, e := range r.log() {
		if e.Event == simengine.EventReceived && e.Request == request {
			list = append(list, fmt.Sprint(e.Engine, e.Attempt))
		}
	}
	return strings.Join(list, " ")
}

func (r *rig) outcomes(pool string, n int) []string {
	r.t.Helper()
	if !r.ledger.ended(pool, n) {
		r.t.Fatalf("%d outcomes, want %d", len(r.ledger.pool(pool).outcomes), n)
	}
	return r.ledger.pool(pool).outcomes
}

// Seed scenario 1: an engine dies during prefill, before the first downstream
// byte. The client sees one full answer.
func TestDeathBeforeTheFirstByteGivesOneWholeAnswer(t *testing.T) {
	r := newRig(t, 3, onePool())
	for _, fault := range []string{"exit@head", "exit@headers", "rst@head", "fin@head", "exit@computed:1"} {
		for _, stream := range []bool{true, false} {
			a, seen := r.one(ask{Stream: stream, Fault: "attempt=1;" + fault})
			// A kept connection to an engine that died before may cost a resend.
			if !seen.Complete || seen.Attempt < 2 || seen.Tokens != 4 {
				t.Errorf("%s, stream %v: %+v\n%s", fault, stream, seen, a.Body)
			}
		}
	}
	for i, o := range r.outcomes("p", 10) {
		if o != "completed" {
			t.Errorf("outcome %d: %s", i, o)
		}
	}
	r.quiet(nil)
}

// Seed scenario 2: a token was computed, or sent in part, and did not reach the
// client. The retry is allowed and the client sees no scrap of the first.
func TestTokenComputedAndNotSentLeavesNoTrace(t *testing.T) {
	r := newRig(t, 3, onePool())
	for _, fault := range []string{"exit@computed:1", "rst@computed:1", "fin@in-chunk:1:30", "rst@in-chunk:1:200", "exit@in-char:1"} {
		a, seen := r.one(ask{Stream: true, Fault: "attempt=1;" + fault})
		if !seen.Complete || seen.Attempt < 2 {
			t.Errorf("%s: %+v", fault, seen)
		}
		first, _, _ := strings.Cut(r.attemptsOf(a.Request), " ")
		if first == "" || bytes.Contains(a.Body, []byte(first+"·")) || bytes.Contains(a.Body, []byte("chatcmpl-"+first)) {
			t.Errorf("%s: a scrap of %s is in the answer:\n%s", fault, first, a.Body)
		}
	}
	r.quiet(nil)
}

// Seed scenario 3, RTY-1, STR-1, STR-2: an engine dies right after the first
// delta, whatever kind of delta it was and however it ends. The stream ends
// with one error event and without [DONE]; no second generation begins.
func TestDeathAfterTheFirstDeltaEndsWithOneErrorAndNoSecondGeneration(t *testing.T) {
	for _, end := range []string{"exit", "rst", "fin", "end"} {
		for _, delta := range []string{"", "reasoning", "tool", "refusal", "logprobs", "audio", "unknown"} {
			t.Run(end+" "+delta, func(t *testing.T) {
				r := newRig(t, 2, onePool("failover: {before_first_delta: {max_attempts: 3}}"))
				fault := end + "@token:1"
				if delta != "" {
					fault = "delta@token:1:" + delta + "," + fault
				}
				a, seen := r.one(ask{Stream: true, Fault: fault})
				if a.Status != 200 || a.Err != nil || seen.ErrorCode != interrupted || !seen.Partial || seen.Retryable || seen.Tokens != 1 || seen.Delivered != 1 {
					t.Errorf("status %d, err %v, %+v\n%s", a.Status, a.Err, seen, a.Body)
				}
				if n := sum(r.received()); n != 1 {
					t.Errorf("%d engines got the request, want 1", n)
				}
				if o := r.outcomes("p", 1); o[0] != "interrupted "+interrupted {
					t.Errorf("outcome %s", o[0])
				}
				r.quiet(nil)
			})
		}
	}
}

// CAN-1, CAN-2: a client leaves, in each phase, streaming or not. The engine is
// told, no other attempt begins and nothing stays counted.
func TestClientThatLeavesIsNoticedInEveryPhase(t *testing.T) {
	for _, c := range []struct {
		phase  string
		stream bool
		fault  string
		leave  leave
	}{
		{"before the head", true, "stall@head", leave{When: "fault"}},
		{"before the head", false, "stall@head", leave{When: "fault"}},
		{"after the head", true, "stall@headers", leave{When: "fault"}},
		{"after the head", false, "stall@headers", leave{When: "fault"}},
		{"after the role", true, "stall@role", leave{When: "fault"}},
		{"in the computation", false, "stall@computed:2", leave{When: "fault"}},
		{"in the body", false, "stall@in-body:60", leave{When: "fault"}},
		{"after a delta", true, "stall@token:2", leave{When: "events", Events: 2}},
		{"after all deltas", true, "stall@finish", leave{When: "events", Events: 5}},
	} {
		for _, kind := range []string{"h1", "h2c"} {
			t.Run(fmt.Sprintf("%s, stream %v, %s", c.phase, c.stream, kind), func(t *testing.T) {
				r := newRig(t, 2, onePool("failover: {before_first_delta: {max_attempts: 3}}"))
				a := r.ask(r.newClient(kind), ask{Stream: c.stream, Fault: c.fault, Leave: c.leave})
				if !a.Left {
					t.Fatalf("the client did not leave: %+v", a)
				}
				r.judge(a)
				if o := r.outcomes("p", 1); o[0] != "cancelled" {
					t.Errorf("outcome %s", o[0])
				}
				if n := sum(r.received()); n != 1 {
					t.Errorf("%d engines got the request, want 1", n)
				}
				r.quiet(nil)
			})
		}
	}
}

// CAN-1, CAN-2: with bytes of a next request waiting on the connection, a
// departure shows to no read. It is noticed all the same, a half-close too.
func TestClientThatLeavesBehindPipelinedBytesIsNoticed(t *testing.T) {
	for _, stream := range []bool{true, false} {
		for _, half := range []bool{true, false} {
			t.Run(fmt.Sprintf("stream %v, half-close %v", stream, half), func(t *testing.T) {
				r := newRig(t, 2, onePool())
				c, err := net.Dial("tcp", r.addr)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				body := ask{Stream: stream, Max: 4}.body()
				next := "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
				fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s: t\r\nX-Sim-Fault: stall@head\r\nContent-Length: %d\r\n\r\n%s%s",
					chatPath, check.TagHeader, len(body), body, next+next+next)
				struck := r.mustAwait(func(e simengine.Entry) bool { return e.Event == simengine.EventFault })
				r.answers = append(r.answers, check.Answer{Request: struck.Request, Stream: stream, Left: true, LeftAt: time.Now()})
				if half {
					err = c.(*net.TCPConn).CloseWrite()
				} else {
					err = c.Close()
				}
				if err != nil {
					t.Fatal(err)
				}
				if o := r.outcomes("p", 1); o[0] != "cancelled" {
					t.Errorf("outcome %s", o[0])
				}
				r.quiet(nil)
				r.judgeAll()
			})
		}
	}
}

// CAN-4: clients of silent streams vanish. Nothing of them is left, and the
// gateway can stop.
func TestDepartureFromAnIdleStreamLeavesNothingBehind(t *testing.T) {
	const clients = 50
	r := newRig(t, 3, onePool())
	var asking sync.WaitGroup
	for i := range clients {
		c := r.newClient([]string{"h1", "h2c"}[i%2])
		asking.Go(func() {
			r.ask(c, ask{Stream: true, Fault: "stall@token:1", Leave: leave{When: "events", Events: 2}})
		})
	}
	asking.Wait()
	for _, o := range r.outcomes("p", clients) {
		if o != "cancelled" {
			t.Errorf("outcome %s", o)
		}
	}
	r.quiet(nil)
	r.judgeAll()
	r.stop() // fails the test unless everything ends by itself
}

// RTY-4: engines close kept connections. A request that meets a closed one is
// sent again once, which costs no attempt; the engine sees each request once.
func TestStaleConnectionCostsNoAttempt(t *testing.T) {
	const requests = 200
	const idle = 10 * time.Millisecond
	r := newRig(t, 1, onePool("failover: {before_first_delta: {max_attempts: 1}}"), func(c *simengine.Config) { c.IdleTimeout = idle })
	r.limits.MaxAttempts = 1
	c := r.newClient("h1")
	// Requests that come just when the engine says goodbye, from a fifth before
	// to a fifth after: time is what the case is about.
	beat := time.NewTicker(idle)
	defer beat.Stop()
	for i := range requests {
		a := r.ask(c, ask{Stream: i%2 == 0})
		if seen := r.judge(a); !seen.Complete {
			t.Fatalf("request %d: %d %s", i, a.Status, a.Body)
		}
		beat.Reset(idle*4/5 + idle*2/5*time.Duration(i%20)/20)
		<-beat.C
	}
	bodies := 0
	for _, e := range r.log() {
		if e.Event == simengine.EventBody {
			bodies++
		}
	}
	if bodies != requests {
		t.Errorf("the engine saw %d bodies of %d requests", bodies, requests)
	}
	r.quiet(nil)
}

// RTY-4, variant: the engine reads the whole request from a kept connection and
// resets it. One more attempt is made, and where tools may run, none.
func TestResetOfAKeptConnectionIsRepeatedOnce(t *testing.T) {
	for _, c := range []struct {
		tools    bool
		attempts string
		code     string
	}{{false, "A1 A2", ""}, {true, "A1", "tool_effects_unknown"}} {
		t.Run(fmt.Sprint("tools ", c.tools), func(t *testing.T) {
			r := newRig(t, 1, onePool(fmt.Sprint("executes_tools: ", c.tools), "failover: {before_first_delta: {max_attempts: 1}}"))
			r.limits = check.Limits{MaxAttempts: 1, Resends: 1, ToolsOnce: c.tools}
			client := r.newClient("h1")
			if seen := r.judge(r.ask(client, ask{})); !seen.Complete {
				t.Fatalf("%+v", seen)
			}
			a := r.ask(client, ask{Fault: "attempt=1;rst@head"})
			seen := r.judge(a)
			if got := r.attemptsOf(a.Request); got != c.attempts || seen.ErrorCode != c.code {
				t.Errorf("attempts %s, want %s; code %q, want %q", got, c.attempts, seen.ErrorCode, c.code)
			}
			r.quiet(nil)
		})
	}
}

// STR-4: an engine answers nothing but [DONE]. That is a failure before the
// first delta, never an answer without tokens. A legal empty answer is one.
func TestNothingButAnEndMarkerIsNoAnswer(t *testing.T) {
	r := newRig(t, 2, onePool())
	if _, seen := r.one(ask{Stream: true, Fault: "attempt=1;empty"}); !seen.Complete || seen.Attempt != 2 || seen.Tokens != 4 {
		t.Errorf("not repeated: %+v", seen)
	}
	if a, seen := r.one(ask{Stream: true, Fault: "times=*;empty"}); a.Status != 502 || seen.ErrorCode != "upstream_failed" {
		t.Errorf("empty everywhere: status %d, %+v", a.Status, seen)
	}
	a, seen := r.one(ask{Stream: true, Max: 1, Fault: "times=*;delta@token:1:empty,times=*;finish:stop"})
	if !seen.Complete || r.attemptsOf(a.Request) == "" || strings.Contains(r.attemptsOf(a.Request), " ") {
		t.Errorf("legal empty answer: %+v, attempts %s\n%s", seen, r.attemptsOf(a.Request), a.Body)
	}
	r.quiet(nil)
}

// STR-5: an engine is silent after its last finish_reason, or closes without
// [DONE]. The answer is complete: the client gets its end marker, soon.
func TestAnswerWithoutItsEndMarkerGetsOne(t *testing.T) {
	for _, fault := range []string{"nodone:open", "nodone:fin", "nodone:clean"} {
		t.Run(fault, func(t *testing.T) {
			r := newRig(t, 1, onePool("timeouts: {after_finish: 100ms}"))
			a, seen := r.one(ask{Stream: true, Fault: fault})
			if !seen.Complete || seen.Tokens != 4 {
				t.Errorf("%+v\n%s", seen, a.Body)
			}
			if o := r.outcomes("p", 1); o[0] != "completed" {
				t.Errorf("outcome %s", o[0])
			}
			if fault == "nodone:open" {
				r.mustAwait(func(e simengine.Entry) bool { return e.Event == simengine.EventConnClosed })
			}
			r.quiet(nil)
		})
	}
}

// RTY-3: the first engine sends a preamble and fails. The client gets one role
// chunk, and all chunks are of the second.
func TestPreambleOfAFailedAttemptIsDropped(t *testing.T) {
	r := newRig(t, 2, onePool("timeouts: {first_output: 200ms}"))
	for _, fault := range []string{"comment,attempt=1;rst@role", "attempt=1;stall@role:20ms:comments,attempt=1;fin@role"} {
		a, seen := r.one(ask{Stream: true, N: 2, Fault: fault})
		if !seen.Complete || seen.Attempt != 2 || bytes.Count(a.Body, []byte(`"role"`)) != 2 {
			t.Errorf("%s: %+v\n%s", fault, seen, a.Body)
		}
	}
	// A slow engine is not a dead one: its preamble is dropped as well, and
	// nothing is repeated because of latency.
	a, seen := r.one(ask{Stream: true, Fault: "times=*;stall@role"})
	if a.Status != 504 || seen.ErrorCode != "upstream_timeout" || bytes.Contains(a.Body, []byte("role")) {
		t.Errorf("stalled: %d %s", a.Status, a.Body)
	}
	if got := r.attemptsOf(a.Request); strings.Contains(got, " ") {
		t.Errorf("latency made a second attempt: %s", got)
	}
	r.quiet(nil)
}

// RTY-6: the second attempt carries the same bytes as the first, whatever the
// size, however far the first one got.
func TestRepeatCarriesTheSameBody(t *testing.T) {
	r := newRig(t, 2, onePool(), func(c *simengine.Config) { c.QuietTokens = true })
	for _, size := range []int{1 << 10, 300 << 10, 20 << 20} {
		for _, fault := range []string{"status@head:503", "rst@body:100"} {
			for _, chunked := range []bool{false, true} {
				if size > 1<<20 && chunked == (fault == "rst@body:100") {
					continue // once each is enough of the big ones
				}
				q := ask{Pad: size, Chunked: chunked, Max: 4, Fault: "attempt=1;" + fault}
				a, seen := r.one(q)
				if !seen.Complete || seen.Attempt != 2 {
					t.Errorf("%d bytes, %s, chunked %v: %d %+v", size, fault, chunked, a.Status, seen)
					continue
				}
				body := q.body()
				sent := sha256.Sum256([]byte(body))
				for _, e := range r.log() {
					if e.Request != a.Request || e.Attempt != 2 {
						continue
					}
					if e.Event == simengine.EventReceived && e.Length != int64(len(body)) {
						t.Errorf("%d bytes, %s, chunked %v: attempt 2 says %d bytes", size, fault, chunked, e.Length)
					}
					if e.Event == simengine.EventBody && (e.N != len(body) || e.SHA256 != hex.EncodeToString(sent[:])) {
						t.Errorf("%d bytes, %s, chunked %v: attempt 2 has other bytes, %d of them", size, fault, chunked, e.N)
					}
				}
			}
		}
	}
	r.quiet(nil)
}

// RTY-8: an engine that fails fast looks idle. Retries never go back to it, and
// every request is served.
func TestRepeatGoesToAnotherEngine(t *testing.T) {
	const requests = 60
	r := newRig(t, 3, onePool("failover: {before_first_delta: {max_attempts: 3}, retry_budget: {ratio: 1}}"))
	r.limits.MaxAttempts = 3
	if err := r.engines[0].Inject("times=*;status@head:503"); err != nil {
		t.Fatal(err)
	}
	c := r.newClient("h1")
	for range requests {
		a := r.ask(c, ask{Stream: true})
		if seen := r.judge(a); !seen.Complete {
			t.Errorf("%d %s", a.Status, a.Body)
		}
		if strings.Count(r.attemptsOf(a.Request), "A") > 1 {
			t.Errorf("went back to the bad engine: %s", r.attemptsOf(a.Request))
		}
	}
	if n := r.received()[0]; n > requests/2 {
		t.Errorf("the bad engine got %d of %d requests", n, requests)
	}
	r.quiet(nil)
}

// RTY-9: max_attempts is what it says, with few engines and with many; and a
// busy engine is failed over from when another is idle.
func TestAttemptsAreAsManyAsConfigured(t *testing.T) {
	for _, engines := range []int{2, 5} {
		for _, attempts := range []int{1, 3, 10} {
			t.Run(fmt.Sprint(engines, " engines, max_attempts ", attempts), func(t *testing.T) {
				r := newRig(t, engines, onePool(fmt.Sprintf("failover: {before_first_delta: {max_attempts: %d}}", attempts)))
				r.limits.MaxAttempts = attempts
				a, seen := r.one(ask{Fault: "times=*;status@head:503"})
				if a.Status != 503 || seen.ErrorCode != "503" {
					t.Errorf("the engine's own refusal is not passed on: %d %s", a.Status, a.Body)
				}
				if n := sum(r.received()); n != min(attempts, engines) {
					t.Errorf("%d attempts, want %d", n, min(attempts, engines))
				}
				if attempts > 1 {
					if _, seen := r.one(ask{Fault: "attempt=1;status@head:429"}); !seen.Complete || seen.Attempt != 2 {
						t.Errorf("busy: %+v", seen)
					}
				}
				r.quiet(nil)
			})
		}
	}
}

// RTY-11: requests that clients got wrong say nothing about engines. None is
// ejected, and good requests between them are served.
func TestClientsMistakesEjectNoEngine(t *testing.T) {
	r := newRig(t, 3, onePool())
	c := r.newClient("h1")
	for i := range 50 {
		status := []int{400, 422, 404}[i%3]
		if a := r.ask(c, ask{Fault: fmt.Sprint("times=*;status@head:", status)}); a.Status != status {
			t.Errorf("status %d, want %d", a.Status, status)
		}
		if seen := r.judge(r.ask(c, ask{Stream: i%2 == 0})); !seen.Complete {
			t.Errorf("a good request was not served: %+v", seen)
		}
		r.ask(c, ask{Stream: true, Fault: "stall@head", Leave: leave{When: "fault"}})
	}
	for _, e := range r.gateway.Status()[0].Endpoints {
		if e.Ejected {
			t.Errorf("%s is ejected", e.Endpoint)
		}
	}
	r.quiet(nil)
	r.judgeAll()
}

// RTY-13: engines ask for a pause. They get it: the client is told, and no
// engine is asked again meanwhile.
func TestRetryAfterOfEnginesIsKept(t *testing.T) {
	r := newRig(t, 2, onePool("failover: {before_first_delta: {max_attempts: 3}}"))
	r.limits.MaxAttempts = 3
	for _, e := range r.engines {
		if err := e.Inject("times=*;status@head:429:json:30"); err != nil {
			t.Fatal(err)
		}
	}
	for range 20 {
		if a, _ := r.one(ask{Stream: true}); a.Status != http.StatusTooManyRequests {
			t.Errorf("status %d: %s", a.Status, a.Body)
		}
	}
	if got := r.received(); got[0] > 1 || got[1] > 1 {
		t.Errorf("engines were asked %v times within their pause", got)
	}
	r.quiet(nil)
}

// CNT-1: clients leave at random points, an engine restarts. Nothing stays
// counted, so that new requests are spread evenly.
func TestDeparturesLeaveNoCount(t *testing.T) {
	const storm, after = 90, 30
	r := newRig(t, 3, onePool("failover: {before_first_delta: {max_attempts: 1}}"))
	when := []leave{{When: "written"}, {When: "received"}, {When: "fault"}, {When: "events", Events: 2}}
	faults := []string{"stall@head", "stall@role", "stall@role", "stall@token:1"}
	var asking sync.WaitGroup
	for i := range storm {
		c := r.newClient([]string{"h1", "h2c", "h1-close"}[i%3])
		asking.Go(func() { r.ask(c, ask{Stream: true, Fault: faults[i%4], Leave: when[i%4]}) })
	}
	asking.Wait()
	r.quiet(nil)
	r.engines[2].Kill()
	r.revive(r.engines[2])

	// Every engine holds what it gets until all are placed, so that only the
	// counts decide.
	before := r.received()
	placed := make(chan struct{})
	for range after {
		c := r.newClient("h1")
		asking.Go(func() { r.ask(c, ask{Stream: true, Fault: "stall@head:" + patience.String()}) })
	}
	go func() {
		defer close(placed)
		ctx, cancel := r.context()
		defer cancel()
		r.ledger.wait(ctx, func() bool { return sum(r.received()) >= sum(before)+after })
	}()
	<-placed
	for i, n := range r.received() {
		if got := n - before[i]; got < after/3-2 || got > after/3+2 {
			t.Errorf("engine %d got %d of %d requests", i, got, after)
		}
	}
	for _, e := range r.engines {
		e.Kill()
		r.revive(e)
	}
	asking.Wait()
	r.quiet(nil)
	r.judgeAll()
}

// CNT-5: attempts fail in every way. Nothing stays counted.
func TestErrorsLeaveNoCount(t *testing.T) {
	r := newRig(t, 3, onePool("failover: {retry_budget: {ratio: 1}}"))
	c := r.newClient("h1")
	if err := r.engines[1].Inject("refuse@listen"); err != nil {
		t.Fatal(err)
	}
	for _, stream := range []bool{true, false} {
		for _, fault := range []string{"status@head:500", "rst@headers", "rst@token:1", "badhead:badchunk", "badhead:clte", "gzip:broken", "shortbody", "garbage@head", "exit@computed:2", "status@head:429"} {
			for range 5 {
				r.ask(c, ask{Stream: stream, Fault: fault})
			}
		}
	}
	r.quiet(nil)
	r.judgeAll()
}

// LIM-6: a client reads nothing of a long answer. The engine is held back, the
// gateway's memory stays small, and other clients are served.
func TestSlowReaderHoldsItsEngineBack(t *testing.T) {
	r := newRig(t, 1, onePool(), func(c *simengine.Config) { c.QuietTokens = true })
	c, err := (&net.Dialer{}).Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	body := ask{Stream: true, Max: 400_000}.body()
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
	slow := r.mustAwait(simengine.On(simengine.EventHead, ""))
	r.answers = append(r.answers, check.Answer{Request: slow.Request, Stream: true, Left: true})
	others := r.newClient("h1")
	for range 30 {
		if seen := r.judge(r.ask(others, ask{Stream: true})); !seen.Complete {
			t.Errorf("another client was not served: %+v", seen)
		}
	}
	for _, e := range r.log() {
		if e.Request == slow.Request && e.Event == simengine.EventFinished {
			t.Errorf("the engine sent all of an answer that nobody reads")
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 64<<20 {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
	c.Close()
	r.mustAwait(simengine.On(simengine.EventAborted, slow.Request))
	r.quiet(nil)
}

// EPT-6: an engine hangs. Requests for it end by their limits; requests for
// others are served meanwhile.
func TestHungEngineHoldsUpNobodyElse(t *testing.T) {
	r := newRig(t, 2, func(static string) string {
		urls := strings.Split(strings.Trim(strings.TrimPrefix(static, "{static: ["), "]}"), "}, ")
		pool := func(name, url string) string {
			return "  " + name + ":\n    discovery: {static: [" + strings.TrimSuffix(url, "}") + "}]}\n    timeouts: {first_output: 1500ms, total: 1500ms}\n"
		}
		return "routes:\n  - {match: {model: m0}, backends: [{pool: hung}]}\n  - {match: {model: m1}, backends: [{pool: fine}]}\npools:\n" +
			pool("hung", urls[0]) + pool("fine", urls[1])
	})
	r.engines[0].Pause()
	const hung, fine = 100, 50
	var asking sync.WaitGroup
	for i := range hung {
		c := r.newClient("h1-close")
		asking.Go(func() {
			a := r.ask(c, ask{Model: "m0", Stream: i%2 == 0})
			if seen := r.judge(a); a.Status != 504 || seen.ErrorCode != "upstream_timeout" {
				t.Errorf("status %d: %s", a.Status, a.Body)
			}
		})
	}
	ctx, cancel := r.context()
	defer cancel()
	if !r.ledger.wait(ctx, func() bool { return r.inFlight() == hung }) {
		t.Fatalf("%d in flight, want %d", r.inFlight(), hung)
	}
	c := r.newClient("h1")
	for range fine {
		if seen := r.judge(r.ask(c, ask{Model: "m1", Stream: true})); !seen.Complete {
			t.Errorf("another engine's request was not served: %+v", seen)
		}
	}
	asking.Wait()
	r.engines[0].Resume()
	r.quiet(nil)
}

// An answer over collect_max is passed on as it comes. That it is no answer at
// all shows in its first byte, before anything was sent: it must be repeated
// like any other garbage, not delivered and called completed.
func TestGarbageOverTheCollectBoundIsNoAnswer(t *testing.T) {
	r := newRig(t, 2, onePool("collect_max: 0"))
	for _, fault := range []string{"html@head", "garbage@headers"} {
		if a, seen := r.one(ask{Fault: "attempt=1;" + fault}); !seen.Complete || seen.Attempt != 2 {
			t.Errorf("%s: status %d, %q, outcomes %v", fault, a.Status, clip(a.Body), r.ledger.pool("p").outcomes)
		}
	}
	r.quiet(nil)
}
