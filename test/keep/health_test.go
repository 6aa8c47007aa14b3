// SPDX-License-Identifier: Apache-2.0

package keep

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/freeport"
	"github.com/headgate/headgate/internal/simengine"
)

// states is what operators see of the endpoints: address → state of health.
func (s site) states() map[string]string {
	s.t.Helper()
	var list struct {
		Endpoints []struct{ Endpoint, Health string }
	}
	a := s.operator("/admin/v1/endpoints")
	if err := json.Unmarshal([]byte(a.body), &list); err != nil {
		s.t.Fatal(a)
	}
	found := map[string]string{}
	for _, e := range list.Endpoints {
		found[e.Endpoint] = e.Health
	}
	return found
}

func (s site) awaitState(t *testing.T, e *simengine.Engine, state string) {
	t.Helper()
	eventually(t, "an engine is "+state, func() bool { return s.states()[e.URL()] == state })
}

const quickProbes = ", health: {interval: 100ms, timeout: 500ms, unhealthy_after: 2}"

// sick makes the next n probes of an engine fail; 0 is all of them.
func sick(t *testing.T, e *simengine.Engine, n int) {
	t.Helper()
	times := "*"
	if n > 0 {
		times = fmt.Sprint(n)
	}
	must(t, e.Inject("times="+times+";path=/health;status@head:503:empty"))
}

// EPT-3: an engine that says that it can't serve gets no new request, keeps
// those it has, and is back as soon as it says so.
func TestEngineThatSaysItCannotServeGetsNothingNew(t *testing.T) {
	t.Parallel()
	e := engines(t, 3)
	g := start(t, "", onePool(static(e...)+quickProbes))
	var running *stream
	eventually(t, "a stream at A", func() bool {
		running = g.open(streamed, "X-Sim-Fault", "engine=A;stall@token:2:2s")
		running.until("·")
		if running.res.Header.Get("Headgate-Endpoint") == e[0].URL() {
			return true
		}
		running.rest()
		return false
	})
	sick(t, e[0], 0)
	g.awaitState(t, e[0], "unhealthy")
	n := len(received(e[0]))
	for range 60 {
		if a := g.post(streamed); !a.whole() {
			t.Fatal(a)
		}
	}
	if got := len(received(e[0])); got != n {
		t.Errorf("%d requests at an engine that can't serve", got-n)
	}
	if a := running.rest(); !a.whole() {
		t.Errorf("the stream that it had: %v", a)
	}
	e[0].Reset()
	g.awaitState(t, e[0], "healthy")
	eventually(t, "it gets requests again", func() bool { g.post(streamed); return len(received(e[0])) > 0 })
}

// One lost probe changes nothing.
func TestOneFailedProbeChangesNothing(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	g := start(t, "", onePool(static(e...)+quickProbes))
	seq := uint64(0)
	for _, entry := range e[0].Log() {
		seq = entry.Seq
	}
	sick(t, e[0], 1)
	eventually(t, "the probe fails and the next one is good", func() bool {
		bad, after := false, 0
		for _, entry := range e[0].LogSince(seq) {
			if entry.Event == simengine.EventRefused || entry.Event == simengine.EventFault {
				bad = true
			}
			if bad && entry.Event == simengine.EventReceived && entry.Path == "/health" {
				after++
			}
		}
		if s := g.states()[e[0].URL()]; s != "healthy" {
			t.Fatalf("it is %s", s)
		}
		return bad && after > 1
	})
}

// EPT-3: not listening yet, then listening and still loading, then good; first
// beside another engine, then alone.
func TestEngineThatStartsGetsNothingUntilItIsReady(t *testing.T) {
	t.Parallel()
	for _, alone := range []bool{false, true} {
		t.Run(fmt.Sprintf("alone %v", alone), func(t *testing.T) {
			t.Parallel()
			addr := freeport.For(t)
			rest := engines(t, 1, func(c *simengine.Config) { c.Name = "B" })
			urls := fmt.Sprintf("{url: \"http://%s\"}", addr)
			if !alone {
				urls += fmt.Sprintf(", {url: %q}", rest[0].URL())
			}
			// Alone and sick is a whole pool that is sick, which the default
			// takes for wrong checks.
			g := start(t, "", onePool("discovery: {static: ["+urls+"]}, health: {interval: 100ms, timeout: 500ms, panic_threshold: 0}"))
			ask := func(when string) {
				for range 30 {
					a := g.post(streamed)
					switch {
					case !alone && (!a.whole() || a.header.Get("Headgate-Endpoint") != rest[0].URL()):
						t.Fatalf("%s: %v", when, a)
					case alone && (a.status != 503 && a.status != 502 || a.error().Message == ""):
						t.Fatalf("%s: %v", when, a)
					}
				}
			}
			eventually(t, "it is known to be gone", func() bool { return g.states()["http://"+addr] == "gone" })
			ask("not listening")
			if a := g.post(streamed); alone && a.code() != "no_endpoints" {
				t.Errorf("not listening and alone: %v", a)
			}

			l, err := net.Listen("tcp", addr)
			must(t, err)
			e, err := simengine.Start(l, simengine.Config{Name: "A", Tokens: 6, Faults: []string{"times=*;path=/health;status@head:503:empty"}})
			must(t, err)
			t.Cleanup(e.Close)
			eventually(t, "it is known to be loading", func() bool { return g.states()["http://"+addr] == "unhealthy" })
			ask("loading")
			if n := len(received(e)); n > 0 {
				t.Errorf("an engine that is loading got %d requests", n)
			}
			e.Reset()
			eventually(t, "it serves", func() bool { g.post(streamed); return len(received(e)) > 0 })
			if a := g.post(streamed); !a.whole() {
				t.Error(a)
			}
		})
	}
}

// Dead behind a live API: /health is good, and nothing is ever computed. A
// generation finds it.
func TestDeadEngineBehindALiveAPIIsFound(t *testing.T) {
	t.Parallel()
	e := engines(t, 3)
	g := start(t, "", onePool(static(e...)+", health: {interval: 100ms, generate: true, generate_every: 1s, unhealthy_after: 2}"))
	eventually(t, "it serves", func() bool { return g.post(streamed).whole() })
	must(t, e[0].Inject("times=*;path=/v1/completions;status@head:500"))
	g.awaitState(t, e[0], "unhealthy")
	n := len(received(e[0]))
	for range 40 {
		if a := g.post(streamed); !a.whole() {
			t.Fatal(a)
		}
	}
	if got := len(received(e[0])); got != n {
		t.Errorf("%d requests at a dead engine", got-n)
	}
	e[0].Reset()
	g.awaitState(t, e[0], "healthy")
}

// When too few look healthy, it is the checks that are likelier wrong.
func TestChecksAreIgnoredWhenMostFail(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		threshold string
		sick      int
		served    int // engines that serve
	}{
		{"0.5", 1, 3}, {"0.5", 2, 2}, {"0.5", 3, 4}, {"0", 3, 1}, {"1", 1, 4},
	} {
		t.Run(fmt.Sprintf("threshold %s, %d of 4 sick", c.threshold, c.sick), func(t *testing.T) {
			t.Parallel()
			e := engines(t, 4)
			for i := range c.sick {
				sick(t, e[i], 0)
			}
			g := start(t, "", onePool(static(e...)+", health: {interval: 100ms, unhealthy_after: 1, panic_threshold: "+c.threshold+"}"))
			for i := range c.sick {
				g.awaitState(t, e[i], "unhealthy")
			}
			before := make([]int, 4)
			for i := range e {
				before[i] = len(received(e[i]))
			}
			for range 80 {
				if a := g.post(streamed); !a.whole() {
					t.Fatal(a)
				}
			}
			served := 0
			for i := range e {
				if len(received(e[i])) > before[i] {
					served++
				}
			}
			if served != c.served {
				t.Errorf("%d engines served, want %d", served, c.served)
			}
		})
	}
	// All sick: refusing everything helps nobody, unless it is asked for.
	for threshold, want := range map[string]int{"0.5": 200, "0": 503} {
		t.Run("all sick, threshold "+threshold, func(t *testing.T) {
			t.Parallel()
			e := engines(t, 2)
			for _, engine := range e {
				sick(t, engine, 0)
			}
			g := start(t, "", onePool(static(e...)+", health: {interval: 100ms, unhealthy_after: 1, panic_threshold: "+threshold+"}"))
			for _, engine := range e {
				g.awaitState(t, engine, "unhealthy")
			}
			if a := g.post(streamed); a.status != want {
				t.Errorf("want %d: %v", want, a)
			}
		})
	}
}

// An engine that died and came back gets its share again, as a newcomer.
func TestRestartedEngineComesBack(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	g := start(t, "", onePool(static(e...)+quickProbes))
	w := g.gather(6, slowStreams)
	w.more(t, 20)
	w.end(t, e...) // what dies with its engine is another test's
	e[0].Kill()
	g.awaitState(t, e[0], "gone")
	n := len(received(e[0]))
	w = g.gather(6, slowStreams)
	w.more(t, 20)
	if got := len(received(e[0])); got != n {
		t.Errorf("a dead engine got %d requests", got-n)
	}
	must(t, e[0].Restart(nil))
	g.awaitState(t, e[0], "healthy")
	eventually(t, "it serves again", func() bool { return len(received(e[0])) > n+5 })
	w.more(t, 20)
	w.stopAll(t)
}

// OBS-5: every endpoint has its series from the first scrape on: 1 while it is
// good, 0 while it fails, whoever found out, none once it is removed.
func TestAvailabilityIsShownFromStartToEnd(t *testing.T) {
	t.Parallel()
	e := engines(t, 3)
	dir := t.TempDir()
	file := newFleetFile(t, dir, e...)
	g := start(t, dir, onePool("discovery: {file: endpoints.yaml}"+quickProbes))
	eventually(t, "ready", func() bool { return g.get("/readyz").status == 200 })
	g.awaitMembers(t, 3)
	available := func(i int) float64 { return g.sum("headgate_endpoint_available", e[i].Addr()) }
	for i := range e {
		if available(i) != 1 {
			t.Errorf("engine %d: %v at the start", i, available(i))
		}
	}
	found := func(i int, how string, want float64) {
		t.Helper()
		if !within(3*time.Second, func() bool { return available(i) == want }) {
			t.Errorf("%s: headgate_endpoint_available is %v after 3 s, want %v (state: %s)", how, available(i), want, g.states()[e[i].URL()])
		}
	}
	sick(t, e[0], 0)
	g.awaitState(t, e[0], "unhealthy")
	found(0, "probes say 503", 0)
	e[0].Reset()
	g.awaitState(t, e[0], "healthy")
	found(0, "good again", 1)
	e[1].Kill()
	g.awaitState(t, e[1], "gone")
	found(1, "not listening", 0)
	must(t, e[2].Inject("times=9;rst@role"))
	eventually(t, "requests find C broken", func() bool { g.post(streamed); return available(2) == 0 })
	file.set(e[0], e[2])
	g.awaitMembers(t, 2)
	if got := g.series("headgate_endpoint_available"); len(got) != 2 {
		t.Errorf("after the removal: %v", got)
	}
	if got := g.series("headgate_inflight_requests"); len(got) != 2 {
		t.Errorf("after the removal: %v", got)
	}
}

// OBS-6: what is refused was never running; a stream runs until its end; who
// leaves runs no longer.
func TestInFlightCountsWhatRuns(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	g := start(t, "", twoTenants()+onePool(static(e...))+"routes: [{match: {model: sim}, backends: [{pool: p}]}]\n")
	inflight := func() float64 { return g.sum("headgate_inflight_requests") }
	header := bearer("one")
	var open []*stream
	for range 50 {
		s := g.open(streamed, append(header, "X-Sim-Fault", "stall@token:2")...)
		s.until("·")
		open = append(open, s)
	}
	if n := inflight(); n != 50 {
		t.Errorf("%v in flight with 50 streams open", n)
	}
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			for _, a := range []answer{
				g.try("POST", chat, "{", header...),
				g.try("POST", chat, chatOf(fmt.Sprint("none-", i)), header...),
				g.try("POST", chat, streamed),
				g.try("POST", "/v1/nothing", streamed, header...),
			} {
				if a.status < 400 || a.status > 404 {
					t.Errorf("%v", a)
				}
			}
		})
	}
	wg.Wait()
	if n := inflight(); n != 50 {
		t.Errorf("%v in flight after 200 refusals", n)
	}
	for _, s := range open[:25] {
		s.leave()
	}
	eventually(t, "25 in flight after 25 left", func() bool { return inflight() == 25 })
	for _, s := range open[25:] {
		s.leave()
	}
	eventually(t, "none in flight", func() bool { return inflight() == 0 })
	eventually(t, "all are counted", func() bool {
		return g.sum("headgate_requests_total", `outcome="cancelled"`) == 50 && g.sum("headgate_requests_total", `outcome="rejected"`) == 200
	})
}

// OBS-1: names that clients make up are no way to fill the metrics, the journal's
// lists or the memory.
func TestMadeUpNamesDoNotGrowTheMetrics(t *testing.T) {
	t.Parallel()
	n := 4000
	if !testing.Short() {
		n = 100_000
	}
	e := engines(t, 1, func(c *simengine.Config) { c.Tokens = 1; c.QuietTokens = true; c.LogEntries = 64 })
	g := start(t, "", "journal: {driver: none}\n"+onePool(static(e...)+", health: {interval: 0s}"))
	var wg sync.WaitGroup
	size := func() int { return len(g.operator("/metrics").body) }
	halfway := 0
	for half := range 2 {
		for c := range 8 {
			wg.Go(func() {
				for i := range n / 16 {
					name := fmt.Sprintf("junk-%d-%d-%d\\u00e9", half, c, i)
					body := fmt.Sprintf(`{"model":"%s","user":"u-%s","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}`, name, name)
					a := g.try("POST", chat, body, "x-llm-d-inference-fairness-id", name, "Headgate-Objective", name, "X-Request-Id", name)
					if a.status == 0 {
						t.Errorf("no answer: %v", a.err)
						return
					}
				}
			})
		}
		wg.Wait()
		if half == 0 {
			halfway = size()
		}
	}
	// A request is counted once its answer is out.
	eventually(t, "all are counted", func() bool { return int(g.sum("headgate_requests_total")) == n/16*16 })
	page := g.operator("/metrics").body
	if len(page) > 1<<20 || len(page) > halfway+halfway/10 {
		t.Errorf("the page grew from %d to %d bytes", halfway, len(page))
	}
	if strings.Contains(page, "u-junk") || strings.Count(page, `model="junk-1-`) > 0 || !strings.Contains(page, `model="other"`) {
		t.Errorf("names beyond the bound are labels, or there is no other")
	}
}

// The journal's own metrics are there from the start.
func TestJournalMetricsAreThereFromTheStart(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	g := start(t, "", onePool(static(e...)))
	for _, name := range []string{"headgate_journal_lag_seconds", "headgate_journal_dropped_total", "headgate_journal_lost_total"} {
		if got := g.series(name); len(got) != 1 || got[""] != 0 {
			t.Errorf("%s: %v", name, got)
		}
	}
	for range 20 {
		g.post(streamed, key(fmt.Sprint(time.Now().UnixNano()))...)
	}
	if got := g.sum("headgate_journal_dropped_total") + g.sum("headgate_journal_lost_total"); got != 0 {
		t.Errorf("%v events are missing", got)
	}
}
