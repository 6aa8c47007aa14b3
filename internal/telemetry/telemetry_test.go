// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"fmt"
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/control"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugin"
)

func scrape(t *testing.T, m *Metrics) string {
	t.Helper()
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	body, err := io.ReadAll(rec.Result().Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// OBS-1: names that clients make up must not grow the metrics.
func TestModelNamesFromClientsAreBounded(t *testing.T) {
	m := New("test")
	for i := range 10_000 {
		m.Request("p", fmt.Sprintf("junk-%d", i), inference.Rejected, inference.ModelNotFound)
	}
	m.Request("p", strings.Repeat("x", 1000), inference.Rejected, inference.ModelNotFound)
	m.Request("p", "bad\xffutf8", inference.Rejected, inference.ModelNotFound)
	families, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	series := func(name string) (all []*dto.Metric) {
		for _, f := range families {
			if f.GetName() == name {
				return f.GetMetric()
			}
		}
		return nil
	}("headgate_requests_total")
	if len(series) != modelsMax+1 {
		t.Errorf("%d series, want %d and one for the others", len(series), modelsMax)
	}
	total := 0.0
	for _, s := range series {
		total += s.GetCounter().GetValue()
	}
	if total != 10_002 {
		t.Errorf("counted %v requests, want 10002", total)
	}
}

func TestRefusalsOfKeysAreCountedByLimit(t *testing.T) {
	m := New("test")
	m.RateLimited("team-a", "tokens")
	m.RateLimited("team-a", "tokens")
	if got, want := scrape(t, m), `headgate_rate_limited_total{key="team-a",limit="tokens"} 2`; !strings.Contains(got, want) {
		t.Errorf("no %s in\n%s", want, got)
	}
}

func TestPoolsThatMayBeEmptySayWhetherTheyAreWanted(t *testing.T) {
	m := New("test")
	m.Watch(func() []gateway.PoolStatus {
		return []gateway.PoolStatus{{Pool: "a", Sleeps: true, Wanted: true}, {Pool: "b", Sleeps: true}, {Pool: "c"}}
	})
	m.Woke("a", "wake", false)
	got := scrape(t, m)
	for _, want := range []string{
		`headgate_scale_from_zero_wanted{pool="a"} 1`, `headgate_scale_from_zero_wanted{pool="b"} 0`,
		`headgate_scale_events_total{event="wake",ok="false",pool="a"} 1`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(got, `wanted{pool="c"}`) {
		t.Error("has a gauge for a pool that always has engines")
	}
}

// OBS-5: an endpoint has its series from the first scrape.
func TestEndpointsAreThereFromTheFirstScrape(t *testing.T) {
	m := New("test")
	m.Watch(func() []gateway.PoolStatus {
		return []gateway.PoolStatus{{Pool: "p", Endpoints: []schedule.Status{
			{Endpoint: "http://a:1", InFlight: 3, Fenceable: true}, {Endpoint: "http://b:1", Ejected: true, Fenceable: true},
			{Endpoint: "http://c:1", Revision: "m@1"}, {Endpoint: "http://d:1", Fenceable: true, Revision: "m@2"},
		}, Guards: map[inference.EndpointID]control.Status{
			"http://c:1": {LateWrites: 2}, "http://d:1": {Up: true, Leases: 7},
		}}}
	})
	got := scrape(t, m)
	for _, want := range []string{
		`headgate_inflight_requests{endpoint="http://a:1",pool="p"} 3`,
		`headgate_inflight_requests{endpoint="http://b:1",pool="p"} 0`,
		`headgate_endpoint_available{endpoint="http://a:1",pool="p"} 1`,
		`headgate_endpoint_available{endpoint="http://b:1",pool="p"} 0`,
		`headgate_endpoint_available{endpoint="http://c:1",pool="p"} 0`,
		`headgate_guard_up{endpoint="http://c:1",pool="p"} 0`,
		`headgate_guard_up{endpoint="http://d:1",pool="p"} 1`,
		`headgate_guard_leases{endpoint="http://d:1",pool="p"} 7`,
		`headgate_guard_late_writes_total{endpoint="http://c:1",pool="p"} 2`,
		`headgate_pool_revisions{pool="p"} 2`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the scrape lacks %s", want)
		}
	}
}

// MET-2: what an engine did not say has no series. It is not 0.
func TestUnknownHasNoSeries(t *testing.T) {
	m := New("test")
	said := schedule.Reported{Known: true, Age: 250 * time.Millisecond}
	said.Queued, said.KVUsage = plugin.Value{V: 4, Known: true}, plugin.Value{V: 0.5, Known: true}
	m.Watch(func() []gateway.PoolStatus {
		return []gateway.PoolStatus{{Pool: "p", Endpoints: []schedule.Status{{Endpoint: "a", Reported: said}, {Endpoint: "b"}},
			Metrics: map[inference.EndpointID]gateway.Metrics{"a": {Engine: "vllm"}, "b": {Engine: "unknown", Failures: 7}},
		}}
	})
	got := scrape(t, m)
	for line, want := range map[string]bool{
		`headgate_scrape_age_seconds{endpoint="a",pool="p"} 0.25`:   true,
		`headgate_engine_waiting_requests{endpoint="a",pool="p"} 4`: true,
		`headgate_engine_kv_usage_ratio{endpoint="a",pool="p"} 0.5`: true,
		`headgate_engine_info{endpoint="a",kind="vllm",pool="p"} 1`: true,
		`headgate_scrape_failures_total{endpoint="b",pool="p"} 7`:   true,
		`headgate_engine_running_requests`:                          false,
		`headgate_engine_waiting_requests{endpoint="b"`:             false,
		`headgate_engine_kv_usage_ratio{endpoint="b"`:               false,
		`headgate_scrape_age_seconds{endpoint="b"`:                  false,
	} {
		if strings.Contains(got, line) != want {
			t.Errorf("%s: %v, want %v", line, !want, want)
		}
	}
}

// TestNames keeps to Prometheus's conventions: prefix, unit, _total, help.
func TestNames(t *testing.T) {
	m := New("test")
	m.Watch(func() []gateway.PoolStatus { return nil })
	ch := make(chan *prometheus.Desc, 1000)
	m.registry.Describe(ch)
	close(ch)
	for d := range ch {
		s := d.String()
		name, _, _ := strings.Cut(s[strings.Index(s, `fqName: "`)+len(`fqName: "`):], `"`)
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		if !strings.HasPrefix(name, "headgate_") {
			t.Errorf("%s: no prefix", name)
		}
		if strings.Contains(s, `help: ""`) {
			t.Errorf("%s: no help", name)
		}
	}
}
