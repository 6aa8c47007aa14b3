// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/simengine"
)

// sleeping is a gateway before an engine that is not there.
func sleeping(t *testing.T, flowYAML string) *queueRig {
	r, urls := newEngines(t, 1, ofM)
	r.engines[0].Kill()
	return sleepingAt(r, urls[0], flowYAML)
}

// ofM makes an engine serve the model that requests ask for.
func ofM(_ int, c *simengine.Config) { c.Models = []string{"m"} }

func sleepingAt(r *rig, url, flowYAML string) *queueRig {
	q := &queueRig{rig: r, text: fmt.Sprintf(`
listeners: [{name: main, address: 127.0.0.1:0, debug_headers: true}]
pools: {p: {flow: %s, health: {interval: 100ms}, discovery: {static: [{url: %q}]}}}
`, flowYAML, url)}
	r.startYAML(q.text)
	return q
}

// up brings the engine.
func (q *queueRig) up() {
	q.t.Helper()
	if err := q.engines[0].Restart(nil); err != nil {
		q.t.Fatal(err)
	}
}

// order is the order in which the engine got the requests of answers, and how
// many it had at a time at most.
func (q *queueRig) order(answers []reply) (order []int, most int) {
	number := map[string]int{}
	for i, a := range answers {
		number[a.header.Get("X-Request-Id")] = i
	}
	now := 0
	for _, e := range q.engines[0].Log() {
		switch {
		case e.Event == simengine.EventReceived && e.Method == "POST":
			order = append(order, number[e.Request])
			now++
			most = max(most, now)
		case e.Event == simengine.EventFinished, e.Event == simengine.EventAborted, e.Event == simengine.EventCut:
			now--
		}
	}
	return order, most
}

// FLW-1: what waits for the first engine is sent to it in order, all of it, once,
// and never more at a time than the queue allows.
func TestTheFirstEngineIsNotStampeded(t *testing.T) {
	for _, c := range []struct{ requests, atOnce int }{{50, 1}, {200, 4}} {
		t.Run(fmt.Sprintf("%d requests, %d at a time", c.requests, c.atOnce), func(t *testing.T) {
			q := sleeping(t, fmt.Sprintf("{max_concurrency: %d, scale_from_zero: {ttl: 1m}}", c.atOnce))
			names := make([]string, c.requests)
			for i := range names {
				names[i] = fmt.Sprint(i)
			}
			waiting := q.enqueue(names...)
			if s := q.gateway.Status()[0]; !s.Sleeps || !s.Wanted {
				t.Errorf("sleeps %v, wanted %v", s.Sleeps, s.Wanted)
			}
			q.up()
			answers := make([]reply, len(waiting))
			for i, c := range waiting {
				if answers[i] = <-c; answers[i].status != 200 {
					t.Fatalf("request %d: %+v", i, answers[i])
				}
			}
			order, most := q.order(answers)
			if len(order) != c.requests || most > c.atOnce {
				t.Errorf("the engine got %d requests, %d at a time", len(order), most)
			}
			// Of those that are under way together any may be the first to arrive.
			if c.atOnce == 1 && !slices.IsSorted(order) {
				t.Errorf("the engine got them in the order %v", order)
			}
			q.waiting(0)
			q.idle()
		})
	}
}

// FLW-1: an engine that has gone is waited for by requests that find that out.
func TestRequestsWaitForAnEngineThatGoesAway(t *testing.T) {
	q := sleeping(t, "{scale_from_zero: {ttl: 1m}}")
	q.up()
	if got := <-q.ask("first"); got.status != 200 {
		t.Fatalf("%+v", got)
	}
	// The probes don't know yet.
	q.engines[0].Kill()
	waiting := q.enqueue("second", "third")
	q.up()
	for i, c := range waiting {
		if got := <-c; got.status != 200 {
			t.Errorf("request %d: %+v", i, got)
		}
	}
	if n := q.totalReceived(); n != 3 {
		t.Errorf("the engine got %d requests, want 3", n)
	}
	q.idle()
}

// FLW-1: an engine that answers and does not serve yet gets nothing.
func TestAnEngineThatIsLoadingGetsNothing(t *testing.T) {
	q := sleeping(t, "{scale_from_zero: {ttl: 1m}}")
	waiting := q.ask("one")
	q.waiting(1)
	for range 3 {
		if err := q.engines[0].Inject("path=/health;status@head:503"); err != nil {
			t.Fatal(err)
		}
	}
	q.up()
	if got := <-waiting; got.status != 200 {
		t.Errorf("%+v", got)
	}
	probes := 0
	for _, e := range q.engines[0].Log() {
		if e.Path == "/health" && e.Event == simengine.EventReceived {
			probes++
		}
		if e.Method == "POST" && e.Event == simengine.EventReceived && probes < 4 {
			t.Errorf("it got the request after %d probes, of which three failed", probes)
		}
	}
	if n := q.totalReceived(); n != 1 {
		t.Errorf("the engine got %d requests", n)
	}
}

func TestNobodyComes(t *testing.T) {
	q := sleeping(t, "{scale_from_zero: {ttl: 1s}}")
	got := <-q.ask("one")
	refused(t, got, 503, inference.NoEndpoints)
	if !strings.Contains(got.body, "the pool has no engine, and none came within 1s") {
		t.Errorf("says %s", got.body)
	}
	if end := q.records.wait(t); end != "rejected no_endpoints" {
		t.Errorf("ended as %q", end)
	}
	q.waiting(0)
}

// FLW-2: who leaves, or has no time, is no error of ours, and never reaches an
// engine.
func TestWhoLeavesWhileNoEngineIsThere(t *testing.T) {
	q := sleeping(t, "{scale_from_zero: {ttl: 1m}}")
	ctx, cancel := context.WithCancel(t.Context())
	gone := q.askAs(ctx, "gone")
	q.waiting(1)
	refused(t, <-q.ask("hurried", "Headgate-Timeout-Ms", "50"), 504, inference.DeadlineExceeded)
	q.records.wait(t)
	cancel()
	<-gone
	if end := q.records.wait(t); end != "cancelled" {
		t.Errorf("ended as %q", end)
	}
	q.waiting(0)
	stays := q.ask("stays")
	q.waiting(1)
	q.up()
	if got := <-stays; got.status != 200 {
		t.Errorf("%+v", got)
	}
	if n := q.totalReceived(); n != 1 {
		t.Errorf("the engine got %d requests, want that of the client that stayed", n)
	}
	q.idle()
}

func TestLimitsHoldWhileNoEngineIsThere(t *testing.T) {
	q := sleeping(t, "{queue: {max_requests: 2, max_bytes: 1KiB}, scale_from_zero: {ttl: 1m}}")
	q.enqueue("one", "two")
	refused(t, <-q.ask("three"), 429, inference.QueueFull)
	refused(t, <-q.ask(strings.Repeat("x", 2000)), 429, inference.QueueFull)
}

func TestAReloadKeepsWhoWaitsForAnEngine(t *testing.T) {
	q := sleeping(t, "{scale_from_zero: {ttl: 1m}}")
	waiting := q.enqueue("one", "two")
	q.reload(strings.Replace(q.text, "ttl: 1m", "ttl: 2m", 1))
	q.waiting(2)
	q.up()
	for _, c := range waiting {
		if got := <-c; got.status != 200 {
			t.Errorf("%+v", got)
		}
	}
}

func TestADeletedPoolAnswersWhoWaitsForAnEngine(t *testing.T) {
	q := sleeping(t, "{scale_from_zero: {ttl: 1m}}")
	waiting := q.enqueue("one")
	q.reload(strings.Replace(q.text, "pools: {p:", "pools: {other:", 1))
	refused(t, <-waiting[0], 503, inference.NoEndpoints)
}

func TestADrainAnswersWhoWaitsForAnEngine(t *testing.T) {
	q := sleeping(t, "{scale_from_zero: {ttl: 1m}}")
	waiting := q.enqueue("one")
	if !q.gateway.Ready() {
		t.Error("not ready: nobody would send the requests that wake the pool")
	}
	drained := make(chan struct{})
	go func() { q.gateway.Drain(t.Context()); close(drained) }()
	refused(t, <-waiting[0], 503, inference.ShuttingDown)
	<-drained
}

// An engine that is there when the gateway starts is used, and nobody is asked
// for another.
func TestAnEngineThatIsThereIsUsed(t *testing.T) {
	r, urls := newEngines(t, 1, ofM)
	if err := r.engines[0].Inject("path=/health;stall@head:200ms"); err != nil {
		t.Fatal(err) // the request comes before anything is known
	}
	q := sleepingAt(r, urls[0], `{scale_from_zero: {command: ["false"]}}`)
	if got := <-q.ask("one"); got.status != 200 {
		t.Errorf("%+v", got)
	}
	if got := r.records.wakes(); len(got) != 0 {
		t.Errorf("asked: %v", got)
	}
}

// Pools that always have engines refuse at once, as ever.
func TestAPoolThatDoesNotSleepRefusesAtOnce(t *testing.T) {
	q := sleeping(t, "{}")
	if got := <-q.ask("one"); got.status < 500 {
		t.Errorf("%+v", got)
	}
	if q.gateway.Status()[0].Sleeps {
		t.Error("sleeps")
	}
}

func TestACommandIsRunWhenRequestsWait(t *testing.T) {
	q := sleeping(t, `{scale_from_zero: {command: ["true"]}}`)
	waiting := q.ask("one")
	q.waiting(1)
	q.until("somebody is asked", func() bool { return len(q.records.wakes()) > 0 })
	if got := fmt.Sprint(q.records.wakes()); got != "[p/wake/true]" {
		t.Errorf("did %s", got)
	}
	q.up()
	if got := <-waiting; got.status != 200 {
		t.Errorf("%+v", got)
	}
}

// What an engine serves is known before it gets what waits, so that those who ask
// for what another one serves wait for that.
func TestAnEngineThatComesIsFirstAskedForItsModels(t *testing.T) {
	r, urls := newEngines(t, 2, func(i int, c *simengine.Config) { c.Models = []string{[]string{"m", "other"}[i]} })
	q := &queueRig{rig: r, text: fmt.Sprintf(`
listeners: [{name: main, address: 127.0.0.1:0}]
pools: {p: {flow: {scale_from_zero: {ttl: 1m}}, health: {interval: 100ms}, discovery: {static: [{url: %q}, {url: %q}]}}}
`, urls[0], urls[1])}
	q.engines[1].Kill()
	r.startYAML(q.text)
	if got := <-q.ask("known"); got.status != 200 {
		t.Fatalf("%+v", got)
	}
	q.engines[0].Kill()
	waiting := q.enqueue("one", "two")
	for _, i := range []int{1, 0} { // the wrong one comes first
		if err := q.engines[i].Restart(nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range waiting {
		if got := <-c; got.status != 200 {
			t.Errorf("%+v", got)
		}
	}
	if got := q.received(); got[1] != 0 {
		t.Errorf("engines got %v requests", got)
	}
}

// With other settings probes begin anew, and what was known of the engine before
// does not stay for ever.
func TestAReloadLeavesNoEngineBehind(t *testing.T) {
	q := sleeping(t, "{scale_from_zero: {ttl: 1m}}")
	waiting := q.enqueue("one")
	q.reload(strings.Replace(q.text, "scale_from_zero: {ttl: 1m}", "queue: {ttl: 1m}", 1))
	q.up()
	<-waiting[0] // answered or refused, whichever came first
	if got := <-q.ask("two"); got.status != 200 {
		t.Errorf("without scale_from_zero: %+v", got)
	}
	q.reload(q.text)
	if got := <-q.ask("three"); got.status != 200 {
		t.Errorf("with it again: %+v", got)
	}
}
