// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"
)

// told is what the admin API says of an endpoint.
type told struct {
	Endpoint string
	Engine   string
	Failures uint64 `json:"scrape_failures"`
	Error    string `json:"scrape_error"`
	Reported *struct {
		Age     float64 `json:"age_seconds"`
		Waiting *float64
		Running *float64
		KVUsage *float64 `json:"kv_usage"`
		Doubt   string
	}
}

func (g *gateway) endpoints(t *testing.T) map[string]told {
	t.Helper()
	a := g.do(t, "GET", "http://"+g.admin+"/admin/v1/endpoints", "")
	var list struct{ Endpoints []told }
	if err := json.Unmarshal([]byte(a.body), &list); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
	byURL := map[string]told{}
	for _, e := range list.Endpoints {
		byURL[e.Endpoint] = e
	}
	return byURL
}

// exporting is an engine with a page of metrics.
func exporting(t *testing.T, address, page string) *engine {
	t.Helper()
	e := newEngineAt(t, address, nil)
	e.page = page
	return e
}

const askOften = "scrape: {interval: 50ms}"

// MET-2, MET-4: each engine is read by the names that it has. One with neither
// name, and those whose answer is no page of metrics, are unknown and not empty.
func TestEnginesAreReadByTheirNames(t *testing.T) {
	t.Parallel()
	vllm := "vllm:num_requests_running{engine=\"0\"} 2.0\nvllm:num_requests_waiting{engine=\"0\"} 3.0\n"
	number := func(v float64) *float64 { return &v }
	engines := map[string]struct {
		page    string
		kind    string
		waiting *float64
		usage   *float64
		fails   bool
	}{
		"old":     {vllm + "vllm:gpu_cache_usage_perc 0.95\n", "vllm", number(3), number(0.95), false},
		"new":     {vllm + "vllm:kv_cache_usage_perc 0.1\n", "vllm", number(3), number(0.1), false},
		"both":    {vllm + "vllm:gpu_cache_usage_perc 0.95\nvllm:kv_cache_usage_perc 0.2\n", "vllm", number(3), number(0.2), false},
		"sglang":  {"sglang:num_running_reqs 2\nsglang:num_queue_reqs 0\nsglang:token_usage 0.3\n", "sglang", number(0), number(0.3), false},
		"neither": {vllm, "vllm", number(3), nil, false},
		"NaN":     {strings.Replace(vllm, "3.0", "NaN", 1), "vllm", nil, nil, false},
		"HTML":    {"<html>\n<body>It works!</body>\n</html>\n", "unknown", nil, nil, true},
		"empty":   {"\n", "unknown", nil, nil, true},
		"cut":     {vllm[:len(vllm)-5], "vllm", nil, nil, true},
	}
	byName := map[string]*engine{}
	var all []*engine
	for name, e := range engines {
		byName[name] = exporting(t, "127.0.0.1:0", e.page)
		all = append(all, byName[name])
	}
	g := start(t, "pools:\n"+pool("p", askOften, all...))
	eventually(t, "all engines were asked", func() bool {
		for _, e := range g.endpoints(t) {
			if e.Reported == nil && e.Failures < 2 {
				return false
			}
		}
		return true
	})
	got, page := g.endpoints(t), g.metrics(t)
	for name, want := range engines {
		url := byName[name].url()
		e := got[url]
		if e.Engine != want.kind || (e.Failures > 0) != want.fails || (e.Error != "") != want.fails || (e.Reported == nil) != want.fails {
			t.Errorf("%s: %+v", name, e)
			continue
		}
		series := fmt.Sprintf(`headgate_engine_kv_usage_ratio{endpoint=%q,pool="p"}`, url)
		if strings.Contains(page, series) != (want.usage != nil) {
			t.Errorf("%s: series of KV usage: %v, want %v", name, !(want.usage != nil), want.usage != nil)
		}
		if e.Reported == nil {
			continue
		}
		for what, pair := range map[string][2]*float64{"waiting": {e.Reported.Waiting, want.waiting}, "usage": {e.Reported.KVUsage, want.usage}} {
			if (pair[0] == nil) != (pair[1] == nil) || pair[0] != nil && *pair[0] != *pair[1] {
				t.Errorf("%s: %s is %v, want %v", name, what, show(pair[0]), show(pair[1]))
			}
		}
	}
	g.stillServes(t)
}

func show(v *float64) string {
	if v == nil {
		return "unknown"
	}
	return fmt.Sprint(*v)
}

// MET-6: the metrics are where the configuration says. Where nothing answers,
// each failure counts and few are logged.
func TestMetricsOnAnotherPort(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	beside := exporting(t, "127.0.0.1:0", "my_queue 4\nmy_busy 1\n")
	port := func(e *engine) string { _, p, _ := net.SplitHostPort(e.ln.Addr().String()); return p }
	settings := "engine: custom, scrape: {interval: 50ms, port: %s, metrics: {waiting: my_queue, running: my_busy}}"
	g := start(t, "pools:\n"+pool("p", fmt.Sprintf(settings, port(beside)), e))
	eventually(t, "the metrics are read", func() bool { return g.endpoints(t)[e.url()].Reported != nil })
	if r := g.endpoints(t)[e.url()]; r.Engine != "custom" || show(r.Reported.Waiting) != "4" || show(r.Reported.Running) != "1" || r.Failures > 0 {
		t.Errorf("%+v", r)
	}
	g.stillServes(t)

	g = start(t, "pools:\n"+pool("p", fmt.Sprintf(settings, "1"), e))
	eventually(t, "failures are counted", func() bool { return g.endpoints(t)[e.url()].Failures >= 4 })
	if n := strings.Count(g.log.String(), "metrics cannot be read"); n != 1 {
		t.Errorf("%d lines of failures in the log", n)
	}
	g.stillServes(t)
}

// EPT-8: metrics too are asked for at an address of IPv6.
func TestMetricsOnIPv6(t *testing.T) {
	t.Parallel()
	if ln, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skip("no [::1] on this machine")
	} else {
		ln.Close()
	}
	e := newEngineAt(t, "[::1]:0", nil)
	beside := exporting(t, "[::1]:0", "tgi_queue_size 4\n")
	_, port, _ := net.SplitHostPort(beside.ln.Addr().String())
	g := start(t, "pools:\n"+pool("p", "scrape: {interval: 50ms, port: "+port+"}", e))
	eventually(t, "the metrics are read", func() bool { return g.endpoints(t)[e.url()].Engine == "tgi" })
}
