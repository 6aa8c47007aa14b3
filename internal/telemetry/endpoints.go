// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/schedule"
)

// endpoints reads the metrics of endpoints when they are scraped, so that an
// endpoint has its series from the first scrape to the last, and what is not
// known of it has none.
type endpoints struct {
	status func() []gateway.PoolStatus
	each   []endpointMetric
}

type endpoint struct {
	schedule.Status
	metrics gateway.Metrics
}

// endpointMetric is one metric of every endpoint.
type endpointMetric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*endpoint) (v float64, known bool)
	label func(*endpoint) string // nil: none beside pool and endpoint
}

func newEndpoints(status func() []gateway.PoolStatus) *endpoints {
	e := &endpoints{status: status}
	add := func(name, help string, value func(*endpoint) (float64, bool)) {
		e.each = append(e.each, endpointMetric{desc: endpointDesc(name, help), kind: prometheus.GaugeValue, value: value})
	}
	add("inflight_requests", "Requests at an endpoint that are not over.",
		func(s *endpoint) (float64, bool) { return float64(s.InFlight), true })
	add("endpoint_available", "1 if the endpoint takes requests, 0 if it failed lately or its probes say that it does not serve.",
		func(s *endpoint) (float64, bool) {
			if s.Ejected || s.Health != inference.Healthy || !s.Fenceable {
				return 0, true
			}
			return 1, true
		})
	add("scrape_age_seconds", "Age of an engine's own metrics; none where it has not told any.",
		func(s *endpoint) (float64, bool) { return s.Reported.Age.Seconds(), s.Reported.Known })
	add("engine_waiting_requests", "Requests that wait in the engine, as it reports; none where that is not known or not believed.",
		func(s *endpoint) (float64, bool) { return s.Reported.Queued.V, s.Reported.Queued.Known })
	add("engine_running_requests", "Requests that run in the engine, as it reports; none where that is not known or not believed.",
		func(s *endpoint) (float64, bool) { return s.Reported.Running.V, s.Reported.Running.Known })
	add("engine_kv_usage_ratio", "Share of the engine's KV memory in use, as it reports; none where that is not known or not believed.",
		func(s *endpoint) (float64, bool) { return s.Reported.KVUsage.V, s.Reported.KVUsage.Known })
	total := func(name, help string, value func(*schedule.Hits) int64) {
		e.each = append(e.each, endpointMetric{
			desc: endpointDesc(name, help+", of those prompts of which the engine reported anything."), kind: prometheus.CounterValue,
			value: func(s *endpoint) (float64, bool) { return float64(value(&s.Hits)), true },
		})
	}
	total("prefix_prompt_tokens_total", "Tokens of prompts", func(h *schedule.Hits) int64 { return h.Prompt })
	total("prefix_predicted_tokens_total", "Prompt tokens that were expected in the engine's cache", func(h *schedule.Hits) int64 { return h.Predicted })
	total("prefix_cached_tokens_total", "Prompt tokens that the engine had cached, as it reports", func(h *schedule.Hits) int64 { return h.Actual })
	total("prefix_missed_tokens_total", "Prompt tokens that were expected in the engine's cache and were not there", func(h *schedule.Hits) int64 { return h.Missed })
	e.each = append(e.each,
		endpointMetric{
			desc: endpointDesc("scrape_failures_total", "Questions for an engine's metrics that were not answered with any."), kind: prometheus.CounterValue,
			value: func(s *endpoint) (float64, bool) { return float64(s.metrics.Failures), true },
		},
		endpointMetric{
			desc: endpointDesc("engine_info", "Always 1; what the engine is, as far as it was found out.", "kind"), kind: prometheus.GaugeValue,
			value: func(*endpoint) (float64, bool) { return 1, true },
			label: func(s *endpoint) string { return s.metrics.Engine },
		})
	return e
}

func endpointDesc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc(namespace+"_"+name, help, append([]string{"pool", "endpoint"}, more...), nil)
}

func (e *endpoints) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range e.each {
		ch <- m.desc
	}
}

func (e *endpoints) Collect(ch chan<- prometheus.Metric) {
	for _, pool := range e.status() {
		for i := range pool.Endpoints {
			s := &endpoint{pool.Endpoints[i], pool.Metrics[pool.Endpoints[i].Endpoint]}
			for _, m := range e.each {
				v, known := m.value(s)
				if !known {
					continue
				}
				labels := []string{pool.Pool, string(s.Endpoint)}
				if m.label != nil {
					labels = append(labels, m.label(s))
				}
				ch <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
			}
		}
	}
}
