// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// gatedEngine answers each request when its name is let through.
type gatedEngine struct {
	*engine
	came chan string

	mu    sync.Mutex
	gates map[string]chan struct{}
}

func newGatedEngine(t *testing.T) *gatedEngine {
	e := &gatedEngine{came: make(chan string, 4096), gates: map[string]chan struct{}{}}
	e.engine = newEngine(t, func(x *exchange) {
		name := nameOf(x.body)
		e.came <- name
		select {
		case <-e.gate(name):
			x.usual()
		case <-x.done:
		}
	})
	return e
}

func (e *gatedEngine) gate(name string) chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gates[name] == nil {
		e.gates[name] = make(chan struct{})
	}
	return e.gates[name]
}

func (e *gatedEngine) let(name string) { close(e.gate(name)) }

// named is a chat whose prompt is a name.
func named(name string) string {
	return fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"name=%s;"}]}`, name)
}

func nameOf(body string) string {
	_, after, _ := strings.Cut(body, "name=")
	name, _, _ := strings.Cut(after, ";")
	return name
}

const twoObjectives = "objectives: {interactive: {priority: 100}, batch: {priority: -10}}\n"

// ask sends a request and returns where its answer will come.
func (g *gateway) ask(t *testing.T, name string, header ...string) <-chan answer {
	t.Helper()
	got := make(chan answer, 1)
	go func() { got <- g.post(t, chat, named(name), header...) }()
	return got
}

// queued are the requests that wait, by priority.
func (g *gateway) queued(t *testing.T, band string) float64 {
	t.Helper()
	return g.series(t, "headgate_queue_requests")[`{band="`+band+`",pool="p"}`]
}

// What waits is where operators look for it, and counts return to zero.
func TestQueuesAreShown(t *testing.T) {
	t.Parallel()
	e := newGatedEngine(t)
	g := start(t, twoObjectives+"pools:\n"+pool("p", "flow: {max_concurrency: 1}", e.engine))
	first := g.ask(t, "first")
	receive(t, "the first request", e.came)
	batch := g.ask(t, "batch", "Headgate-Objective", "batch", "Headgate-Fairness-Id", "nightly")
	eventually(t, "one waits", func() bool { return g.queued(t, "-10") == 1 })
	inter := g.ask(t, "inter", "Headgate-Objective", "interactive")
	eventually(t, "the other waits", func() bool { return g.queued(t, "100") == 1 })
	w := g.dial(t)
	w.send(rawPost(chat, named("leaves")))
	eventually(t, "a third waits", func() bool { return g.queued(t, "0") == 1 })
	if n := g.series(t, "headgate_queue_bytes")[`{band="-10",pool="p"}`]; n != float64(len(named("batch"))) {
		t.Errorf("%v bytes wait, want %d", n, len(named("batch")))
	}
	w.Close()
	eventually(t, "it has left", func() bool { return g.queued(t, "0") == 0 })

	var view struct {
		Queues []struct {
			Pool     string
			Requests int
			Bands    []struct {
				Priority int
				Requests int
				Flows    []struct {
					FairnessID string `json:"fairness_id"`
					Requests   int
				}
			}
		}
	}
	a := g.get(t, "http://"+g.admin+"/admin/v1/queues")
	if err := json.Unmarshal([]byte(a.body), &view); err != nil || len(view.Queues) != 1 || len(view.Queues[0].Bands) != 3 {
		t.Fatalf("%v in %s", err, a.body)
	}
	q := view.Queues[0]
	if q.Pool != "p" || q.Requests != 2 || q.Bands[0].Priority != 100 || q.Bands[2].Priority != -10 ||
		q.Bands[2].Flows[0].FairnessID != "nightly" || q.Bands[2].Flows[0].Requests != 1 {
		t.Errorf("%s", a.body)
	}

	e.let("first")
	e.let("inter")
	e.let("batch")
	for _, c := range []<-chan answer{first, inter, batch} {
		if a := receive(t, "an answer", c); a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	for _, want := range []string{"inter", "batch"} {
		if got := receive(t, "who is next", e.came); got != want {
			t.Errorf("the engine got %q, want %q", got, want)
		}
	}
	for series, want := range map[string]float64{
		`{band="0",pool="p",reason="dispatched"}`: 1, `{band="100",pool="p",reason="dispatched"}`: 1,
		`{band="-10",pool="p",reason="dispatched"}`: 1, `{band="0",pool="p",reason="left"}`: 1,
	} {
		if got := g.series(t, "headgate_flow_outcomes_total")[series]; got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
	if n := g.series(t, "headgate_queue_wait_seconds_count")[`{band="-10",pool="p"}`]; n != 1 {
		t.Errorf("%v waits were measured, want 1", n)
	}
	for _, band := range []string{"100", "0", "-10"} {
		if g.queued(t, band) != 0 {
			t.Errorf("band %s: something is left", band)
		}
	}
}

// FLW-2: whoever waits too long or leaves is told so, or is gone; nothing of it
// looks like a crash, and no engine sees it.
func TestABurstOverCapacityIsNoCrashWave(t *testing.T) {
	t.Parallel()
	e := newEngine(t, func(x *exchange) {
		x.sleep(20 * time.Millisecond)
		x.usual()
	})
	g := start(t, "pools:\n"+pool("p", "flow: {max_concurrency: 1, queue: {ttl: 250ms}}", e))
	var clients sync.WaitGroup
	var mu sync.Mutex
	status := map[int]int{}
	for i := range 300 {
		if i%3 == 0 {
			w := g.dial(t)
			w.send(rawPost(chat, named(fmt.Sprint("leaver", i))))
			clients.Go(func() {
				timer := time.NewTimer(time.Duration(i) * time.Millisecond)
				defer timer.Stop()
				<-timer.C
				w.Close()
			})
			continue
		}
		clients.Go(func() {
			a := g.post(t, chat, named(fmt.Sprint("stayer", i)))
			mu.Lock()
			defer mu.Unlock()
			if status[a.status]++; a.status != 200 && a.status != 429 {
				t.Errorf("%d %s", a.status, a.body)
			}
		})
	}
	clients.Wait()
	if status[200] == 0 || status[429] == 0 {
		t.Errorf("statuses %v: some should be served and some refused", status)
	}
	eventually(t, "nothing in flight", func() bool { return g.inflight(t) == 0 })
	if n := g.queued(t, "0"); n != 0 {
		t.Errorf("%v are left in the queue", n)
	}
	for series, n := range g.series(t, "headgate_requests_total") {
		if n > 0 && strings.Contains(series, `code="internal"`) {
			t.Errorf("%s: %v", series, n)
		}
	}
}

// FLW-6: the documented policy holds. While higher bands want everything, a low one
// gets its reserve, and without one a clean 429 when its time is over.
func TestALowBandIsNotStarvedBeyondItsPromise(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		band   string
		status int
	}{
		{"{priority: -10, reserve: 0.2}", 200},
		{"{priority: -10, ttl: 150ms}", 429},
	} {
		t.Run(c.band, func(t *testing.T) {
			t.Parallel()
			over := make(chan struct{})
			e := newEngine(t, func(x *exchange) {
				select {
				case <-over:
				default:
					x.sleep(20 * time.Millisecond)
				}
				x.usual()
			})
			g := start(t, twoObjectives+"pools:\n"+pool("p", "flow: {max_concurrency: 1, bands: ["+c.band+"]}", e))
			var high sync.WaitGroup
			// Enough for longer than the low band waits, even if none came back.
			for range 16 {
				high.Go(func() {
					for {
						select {
						case <-over:
							return
						default:
							g.post(t, chat, named("high"), "Headgate-Objective", "interactive")
						}
					}
				})
			}
			eventually(t, "the high band waits", func() bool { return g.queued(t, "100") > 12 })
			a := receive(t, "the low band's answer", g.ask(t, "low", "Headgate-Objective", "batch"))
			if a.status != c.status {
				t.Errorf("%d %s, want %d", a.status, a.body, c.status)
			}
			if a.status == 429 && (a.header.Get("Headgate-Reason") != "queue_timeout" || a.header.Get("Retry-After") == "") {
				t.Errorf("header %v", a.header)
			}
			close(over)
			high.Wait()
		})
	}
}

// FLW-6, second part: a tenant's one request among another's many waits for its
// turn and no longer.
func TestOneRequestAmongManyOfAnotherTenant(t *testing.T) {
	t.Parallel()
	e := newGatedEngine(t)
	g := start(t, "pools:\n"+pool("p", "flow: {max_concurrency: 1}", e.engine))
	answers := []<-chan answer{g.ask(t, "0", "Headgate-Fairness-Id", "many")}
	receive(t, "the first request", e.came)
	for i := range 40 {
		answers = append(answers, g.ask(t, fmt.Sprint(i+1), "Headgate-Fairness-Id", "many"))
	}
	eventually(t, "they wait", func() bool { return g.queued(t, "0") == 40 })
	answers = append(answers, g.ask(t, "one", "Headgate-Fairness-Id", "one"))
	eventually(t, "it waits too", func() bool { return g.queued(t, "0") == 41 })
	e.let("0")
	place := 0
	for i := 1; i <= 41; i++ {
		name := receive(t, "who is next", e.came)
		if e.let(name); name == "one" {
			place = i
		}
	}
	if place == 0 || place > 2 {
		t.Errorf("it came as number %d of 41, want 1 or 2", place)
	}
	for _, c := range answers {
		if a := receive(t, "an answer", c); a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
}
