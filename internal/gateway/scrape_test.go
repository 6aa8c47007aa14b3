// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/simengine/model"
)

// scraped is a pool whose engines are asked every 50 ms and never probed.
const scraped = "scrape: {interval: 50ms, timeout: 2s}\nhealth: {interval: 0s}"

// quick is an engine of a known size, ten times as fast as it is.
func quick(_ int, c *simengine.Config) { c.Params, c.Speed = model.A100x8B, 10 }

// endpoint is what the gateway knows of an engine.
func (r *rig) endpoint(i int) (schedule.Status, gateway.Metrics) {
	r.t.Helper()
	for _, pool := range r.gateway.Status() {
		for _, s := range pool.Endpoints {
			if strings.Contains(string(s.Endpoint), r.engines[i].Addr()) {
				return s, pool.Metrics[s.Endpoint]
			}
		}
	}
	r.t.Fatalf("engine %d is in no pool", i)
	return schedule.Status{}, gateway.Metrics{}
}

// reported is what an engine reports, as far as it is believed.
func (r *rig) reported(i int) schedule.Reported {
	s, _ := r.endpoint(i)
	return s.Reported
}

// scrapes waits until the engine was asked for its metrics n more times. What it
// answered the last time but one is in the book by then.
func (r *rig) scrapes(i, n int) {
	r.t.Helper()
	r.until("scrapes", func() bool { return asked(r.engines[i]) >= n })
}

// asked counts questions for metrics.
func asked(e *simengine.Engine) int {
	n := 0
	for _, entry := range e.Log() {
		if entry.Event == simengine.EventReceived && entry.Path == "/metrics" {
			n++
		}
	}
	return n
}

// scrapedAnew waits until each engine was asked at least twice more.
// The book has what holds now by then.
func (r *rig) scrapedAnew() {
	r.t.Helper()
	for i, e := range r.engines {
		r.scrapes(i, asked(e)+2)
	}
}

// hold occupies an engine with streams, until the test ends or what it returns is
// called. They do not go through the gateway: to it they are load of others.
func (r *rig) hold(i, n int) (letGo func()) {
	r.t.Helper()
	var held []net.Conn
	letGo = func() {
		for _, c := range held {
			_ = c.Close()
		}
	}
	r.t.Cleanup(letGo)
	for k := range n {
		c, err := net.Dial("tcp", r.engines[i].Addr())
		if err != nil {
			r.t.Fatal(err)
		}
		held = append(held, c)
		body := fmt.Sprintf(`{"model":"sim","stream":true,"max_tokens":100000,"messages":[{"role":"user","content":"hold %d"}]}`, k)
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nX-Sim-Fault: stall@computed:3\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
	}
	r.until("held streams run", func() bool { return r.engines[i].Snapshot().Running >= n })
	return letGo
}

// spread sends requests, nine at a time, and counts where they went.
func (r *rig) spread(n int) []int {
	r.t.Helper()
	before := r.received()
	var clients sync.WaitGroup
	var sent atomic.Int64
	for range 9 {
		clients.Go(func() {
			for i := sent.Add(1); int(i) <= n; i = sent.Add(1) {
				body := fmt.Sprintf(`{"model":"sim","max_tokens":20,"messages":[{"role":"user","content":"%d %s"}]}`, i, strings.Repeat("many words ", 60))
				if got := r.post(chatPath, body); got.status != 200 {
					r.t.Errorf("status %d: %s", got.status, got.body)
				}
				<-r.records.ended
			}
		})
	}
	clients.Wait()
	after := r.received()
	for i := range after {
		after[i] -= before[i]
	}
	return after
}

func TestEnginesTellWhatTheyAre(t *testing.T) {
	r := newRig(t, 1, scraped, quick)
	r.until("the engine is known", func() bool {
		s, m := r.endpoint(0)
		return m.Engine == "vllm" && m.Error == "" && s.Reported.Queued.Known && s.Reported.KVUsage.Known
	})
	r.hold(0, 3)
	r.until("others are seen", func() bool {
		s, _ := r.endpoint(0)
		return s.InFlight == 0 && s.Reported.Running.V == 3 && s.Reported.Others > 2.5
	})
}

// Two gateways before the same engines: one sees what the other sends.
func TestLoadOfAnotherGatewayIsAvoided(t *testing.T) {
	r := newRig(t, 3, scraped+"\nrouting: {profile: weighted}", quick)
	r.hold(0, 12)
	r.scrapedAnew()
	if got := r.spread(40); 2*got[0] >= min(got[1], got[2]) {
		t.Errorf("requests went to %v; the first engine is busy for others", got)
	}
}

// MET-1: metrics that can't be had do not stop traffic. One of three engines
// without them gets its share.
func TestTrafficGoesOnWithoutMetrics(t *testing.T) {
	for name, fault := range map[string]string{
		"hang":     "times=*;path=/metrics;stall@head",
		"404":      "times=*;path=/metrics;status@head:404",
		"late":     "times=*;path=/metrics;stall@head:5s",
		"an error": "times=*;path=/metrics;html@head",
		"reset":    "times=*;path=/metrics;rst@head",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, sick := range [][]int{{0}, {0, 1, 2}} {
				r := newRig(t, 3, "scrape: {interval: 50ms, timeout: 200ms}\nhealth: {interval: 0s}\nrouting: {profile: weighted}", func(i int, c *simengine.Config) {
					quick(i, c)
					if i < len(sick) {
						c.Faults = []string{fault}
					}
				})
				r.until("failures are counted", func() bool { _, m := r.endpoint(0); return m.Failures >= 2 })
				got := r.spread(60)
				for i, n := range got {
					if n < 9 || n > 33 {
						t.Errorf("%d of 3 without metrics: engine %d got %d of 60", len(sick), i, n)
					}
				}
				if s, m := r.endpoint(0); s.Reported.Queued.Known || s.Reported.Others != 0 || m.Error == "" {
					t.Errorf("%+v, %+v", m, s)
				}
			}
		})
	}
}

// A dead engine behind a live API answers errors at once and reports that it is
// idle. It is not sent everything.
func TestDeadButFastEngineDoesNotAttract(t *testing.T) {
	r := newRig(t, 3, scraped+"\nrouting: {profile: weighted}", func(i int, c *simengine.Config) {
		quick(i, c)
		if i == 0 {
			c.Faults = []string{"times=*;path=/v1;status@head:500"}
		}
	})
	r.hold(1, 3)
	r.hold(2, 3)
	r.scrapedAnew()
	failed := 0
	before := r.received()
	for i := range 60 {
		body := fmt.Sprintf(`{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"%d %s"}]}`, i, strings.Repeat("many words ", 60))
		if got := r.post(chatPath, body); got.status != 200 {
			failed++
		}
		<-r.records.ended
	}
	if n := r.received()[0] - before[0]; n > 10 || failed > 0 {
		t.Errorf("the dead engine got %d attempts of 60 requests, %d clients got an error", n, failed)
	}
}

// Metrics that freeze while the engine is idle do not attract, and those that
// freeze while it is busy do not repel for ever.
func TestFrozenMetricsNeitherAttractNorStarve(t *testing.T) {
	for name, load := range map[string]int{"frozen idle": 0, "frozen busy": 8} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, urls := newEngines(t, 2, quick)
			let := r.hold(0, load)
			r.engines[0].FreezeMetrics()
			let()
			r.start(urls, scraped+"\nrouting: {profile: weighted}")
			r.scrapedAnew()
			if got := r.reported(0).Others; got != float64(load) {
				t.Fatalf("others have %v there, want %d", got, load)
			}
			// More than what the busy one shows come at a time, until it is noticed.
			stop := make(chan struct{})
			var clients sync.WaitGroup
			for i := range 16 {
				clients.Go(func() {
					for n := 0; ; n++ {
						select {
						case <-stop:
							return
						default:
						}
						r.post(chatPath, fmt.Sprintf(`{"model":"sim","max_tokens":20,"messages":[{"role":"user","content":"%d %d"}]}`, i, n))
						<-r.records.ended
					}
				})
			}
			r.until("doubt", func() bool { return r.reported(0).Doubt == "frozen" })
			close(stop)
			clients.Wait()
			if s := r.reported(1); s.Doubt == "frozen" {
				t.Errorf("the other engine is doubted: %+v", s)
			}
			if got := r.spread(60); got[0] < 18 || got[0] > 42 {
				t.Errorf("requests went to %v", got)
			}
		})
	}
}

// An engine that is started anew has nothing cached, and the book knows it
// without having sent anything there.
func TestRestartedEngineIsCold(t *testing.T) {
	r, urls := newEngines(t, 2, quick)
	r.startYAML(fmt.Sprintf(`
listeners: [{name: main, debug_headers: true}]
pools:
  p:
    scrape: {interval: 50ms}
    health: {interval: 0s}
    discovery: {static: [{url: %q}, {url: %q}]}
`, urls[0], urls[1]))
	body := fmt.Sprintf(`{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("Tell me about the sea. ", 400))
	ask := func() (endpoint string, cached int) {
		got := r.post(chatPath, body)
		if got.status != 200 {
			t.Fatalf("status %d", got.status)
		}
		<-r.records.ended
		_, after, ok := strings.Cut(got.header.Get("Headgate-Route"), "cached=")
		if _, err := fmt.Sscan(after, &cached); !ok || err != nil {
			t.Fatalf("route %q", got.header.Get("Headgate-Route"))
		}
		return got.header.Get("Headgate-Endpoint"), cached
	}
	first, cold := ask()
	second, warm := ask()
	if first != second || cold != 0 || warm < 1000 {
		t.Fatalf("first %s with %d cached, then %s with %d", first, cold, second, warm)
	}
	home := 0
	if strings.Contains(first, r.engines[1].Addr()) {
		home = 1
	}
	r.until("it is scraped", func() bool { return r.reported(home).Known })
	r.engines[home].Kill()
	if err := r.engines[home].Restart(nil); err != nil {
		t.Fatal(err)
	}
	again := time.Now()
	r.until("it is scraped again", func() bool { return r.reported(home).At.After(again) })
	if where, cached := ask(); cached != 0 {
		t.Errorf("%d tokens are thought to be cached on %s after the restart", cached, where)
	}
}

// One that joins cold beside warm and busy ones gets its share, and no more.
func TestColdEngineJoins(t *testing.T) {
	r, urls := newEngines(t, 3, quick)
	r.start(urls[:2], scraped)
	var list []inference.Endpoint
	for _, text := range urls {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, fleet.NewEndpoint(u, ""))
	}
	stop := make(chan struct{})
	var clients sync.WaitGroup
	var n atomic.Int64
	for range 12 {
		clients.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				i := n.Add(1)
				// Every other prompt is one of a dozen that the first two engines have
				// cached by then, the rest are new.
				group := i
				if i%2 == 0 {
					group = i % 12
				}
				r.post(chatPath, fmt.Sprintf(`{"model":"sim","max_tokens":10,"messages":[{"role":"user","content":"%d %s %d"}]}`,
					group, strings.Repeat("many words ", 400), i))
				<-r.records.ended
			}
		})
	}
	r.until("they are warm", func() bool { return n.Load() > 120 })
	before := r.received()
	r.gateway.SetEndpoints("p", list)
	since := n.Load()
	r.until("the new one works", func() bool { return n.Load() > since+180 })
	close(stop)
	clients.Wait()
	got := r.received()
	sum := 0
	for i := range got {
		got[i] -= before[i]
		sum += got[i]
	}
	if got[2] < sum/10 || got[2] > sum*6/10 {
		t.Errorf("requests went to %v; the third engine joined cold", got)
	}
}
