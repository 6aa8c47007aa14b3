// SPDX-License-Identifier: Apache-2.0

package clients_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/freeport"
	"github.com/headgate/headgate/internal/lifecycle"
	"github.com/headgate/headgate/internal/simengine"
)

// pools are reached by their names as models, so that one gateway refuses in
// many ways. All but the last have the same two engines; each keeps a book of
// its own, so that what fails in one is not held against another.
var pools = []struct{ name, settings string }{
	{"main", "failover: {retry_budget: {min_per_second: 1000}}"},
	{"sick", "failover: {retry_budget: {min_per_second: 1000}}"},
	{"idle", "timeouts: {idle: 300ms}"},
	{"late", "timeouts: {first_output: 700ms, total: 700ms}"},
	{"proxied", ""},
	{"busy", ""},
	{"large", "collect_max: 1KiB"},
	{"tools", "executes_tools: true"},
	{"small", "max_body: 2KiB"},
	{"broke", "failover: {retry_budget: {ratio: 0, min_per_second: 0}}"},
	{"dear", "failover: {retry_cost_limit: {prompt_tokens: 1}}"},
	{"dead", ""}, // nobody listens there
}

const bodyMax = 256 << 10 // of the listener

// rig is two simulated engines behind a gateway.
type rig struct {
	t       *testing.T
	engines []*simengine.Engine
	process *lifecycle.Process
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t}
	var models []string
	for _, p := range pools {
		models = append(models, p.name)
	}
	live, dead := "", fmt.Sprintf("{url: %q}", "http://"+freeport.For(t))
	for _, name := range []string{"A", "B"} {
		e, err := simengine.Listen(simengine.Config{Name: name, Models: models})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		r.engines = append(r.engines, e)
		live += fmt.Sprintf("{url: %q},", e.URL())
	}
	var routes, list strings.Builder
	for _, p := range pools {
		endpoints := live
		if p.name == "dead" {
			endpoints = dead
		}
		fmt.Fprintf(&routes, "  - {match: {model: %s}, backends: [{pool: %s}]}\n", p.name, p.name)
		fmt.Fprintf(&list, "  %s:\n    discovery: {static: [%s]}\n    health: {interval: 0s}\n    scrape: {interval: 0s}\n    %s\n", p.name, endpoints, p.settings)
	}
	r.process = startGateway(t, "routes:\n"+routes.String()+"pools:\n"+list.String())
	t.Cleanup(r.process.Stop)
	return r
}

func startGateway(t *testing.T, yaml string) *lifecycle.Process {
	t.Helper()
	yaml = fmt.Sprintf("listeners: [{address: \"127.0.0.1:0\", max_body: %d}]\n", bodyMax) +
		"admin: {address: \"127.0.0.1:0\"}\njournal: {driver: none}\n" + yaml
	c, err := config.Parse("test.yaml", []byte(yaml))
	if err != nil {
		t.Fatalf("%v\n%s", err, yaml)
	}
	p, err := lifecycle.Start(c, slog.New(slog.DiscardHandler), "test")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func urlOf(p *lifecycle.Process) string { return "http://" + p.Addr("main").String() }

// startDraining starts a gateway that is shutting down for as long as the test
// runs: it waits for a stream that does not end.
func startDraining(t *testing.T) *lifecycle.Process {
	t.Helper()
	e, err := simengine.Listen(simengine.Config{Name: "A", Models: []string{"main"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	p := startGateway(t, fmt.Sprintf("drain_timeout: 5m\npools:\n  main: {timeouts: {idle: 0s}, discovery: {static: [{url: %q}]}}\n", e.URL()))

	body := strings.NewReader(`{"model":"main","stream":true,"messages":[{"role":"user","content":"hi"}]}`)
	req, err := http.NewRequest("POST", urlOf(p)+"/v1/chat/completions", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Sim-Fault", "stall@token:1")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	stopped := make(chan struct{})
	go func() {
		p.Stop()
		close(stopped)
	}()
	t.Cleanup(func() {
		res.Body.Close()
		<-stopped
	})
	within(t, "the gateway drains", func() bool {
		res, err := http.Get(urlOf(p) + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		return res.StatusCode == http.StatusServiceUnavailable
	})
	return p
}

// within asks until done: each question is an exchange with the gateway, which
// has nothing that could be waited for.
func within(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !done(); {
		if time.Now().After(deadline) {
			t.Errorf("not within a minute: %s", what)
			return
		}
	}
}

// visit is one attempt of a request as the engine tells it.
type visit struct {
	engine   *simengine.Engine
	name     string // of the engine
	attempt  int
	request  string
	sent     int // tokens that were streamed
	finished int // tokens of a whole answer; 0: it did not get there
}

// text is the first n tokens of the visit's answer.
func (v visit) text(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%s%d·%d ", v.name, v.attempt, i+1)
	}
	return b.String()
}

// visits are the attempts of a scenario's requests, in order of the attempts.
func (r *rig) visits(scenario string) []visit {
	var found []visit
	for _, e := range r.engines {
		for _, entry := range e.Log() {
			if entry.Event == simengine.EventReceived && entry.Header.Get("X-Check-Tag") == scenario {
				found = append(found, visit{engine: e, name: entry.Engine, attempt: entry.Attempt, request: entry.Request})
			}
			for i := range found {
				v := &found[i]
				if v.name != entry.Engine || v.request != entry.Request || v.attempt != entry.Attempt {
					continue
				}
				switch entry.Event {
				case simengine.EventToken:
					v.sent = entry.N
				case simengine.EventFinished:
					v.finished = entry.N
				}
			}
		}
	}
	if len(found) == 2 && found[0].attempt > found[1].attempt {
		found[0], found[1] = found[1], found[0]
	}
	return found
}

// awaitAborted waits until the engine has noticed that the request was given
// up.
func (v visit) awaitAborted(ctx context.Context) error {
	_, err := v.engine.Await(ctx, simengine.On(simengine.EventAborted, v.request))
	return err
}

// metric sums the series of a metric whose labels have all the given ones, each
// written name="value".
func (r *rig) metric(name string, labels ...string) int {
	r.t.Helper()
	res, err := http.Get("http://" + r.process.AdminAddr().String() + "/metrics")
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	return sumMetric(r.t, res.Body, name, labels)
}

func sumMetric(t *testing.T, from io.Reader, name string, labels []string) int {
	sum := 0.0
lines:
	for scan := bufio.NewScanner(from); scan.Scan(); {
		series, value, _ := strings.Cut(scan.Text(), " ")
		if !strings.HasPrefix(series, name+"{") {
			continue
		}
		for _, label := range labels {
			if !strings.Contains(series, label) {
				continue lines
			}
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("%s: %v", scan.Text(), err)
		}
		sum += n
	}
	return int(sum)
}
