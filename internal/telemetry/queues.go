// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/gateway"
)

// queues reads the gauges and counts of pools' queues when they are scraped.
type queues struct {
	status                                func() []gateway.PoolStatus
	requests, bytes, saturation, outcomes *prometheus.Desc
	wanted                                *prometheus.Desc
}

func newQueues(status func() []gateway.PoolStatus) *queues {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(namespace+"_"+name, help, append([]string{"pool", "band"}, labels...), nil)
	}
	return &queues{
		status:     status,
		requests:   desc("queue_requests", "Requests that wait for a place on an endpoint."),
		bytes:      desc("queue_bytes", "Bytes of the bodies of requests that wait."),
		saturation: desc("pool_saturation", "How much of what the pool can take in time is taken, as a request of this priority finds it; 0 to 1."),
		outcomes:   desc("flow_outcomes_total", "What became of requests in the queue: dispatched, left (the client did), displaced, or the code of their refusal; retries count again.", "reason"),
		wanted: prometheus.NewDesc(namespace+"_scale_from_zero_wanted",
			"1 while requests wait for an engine of a pool that has none, else 0; of pools with scale_from_zero.", []string{"pool"}, nil),
	}
}

func (q *queues) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{q.requests, q.bytes, q.saturation, q.outcomes, q.wanted} {
		ch <- d
	}
}

func (q *queues) Collect(ch chan<- prometheus.Metric) {
	for _, pool := range q.status() {
		if pool.Sleeps {
			wanted := 0.0
			if pool.Wanted {
				wanted = 1
			}
			ch <- prometheus.MustNewConstMetric(q.wanted, prometheus.GaugeValue, wanted, pool.Pool)
		}
		for i := range pool.Queue.Bands {
			b := &pool.Queue.Bands[i]
			name := band(b.Priority)
			gauge := func(d *prometheus.Desc, v float64) {
				ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, pool.Pool, name)
			}
			gauge(q.requests, float64(b.Requests))
			gauge(q.bytes, float64(b.Bytes))
			gauge(q.saturation, b.Saturation)
			for reason, n := range outcomesOf(&b.Counts) {
				ch <- prometheus.MustNewConstMetric(q.outcomes, prometheus.CounterValue, float64(n), pool.Pool, name, reason)
			}
		}
	}
}

// outcomesOf are a band's counts by reason.
func outcomesOf(c *flow.Counts) map[string]uint64 {
	reasons := map[string]uint64{"dispatched": c.Dispatched, "left": c.Left, "displaced": c.Displaced}
	for code, n := range c.Refused {
		reasons[string(code)] = n
	}
	return reasons
}
