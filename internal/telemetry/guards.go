// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/headgate/headgate/internal/gateway"
)

// guards reads what is known of guards and of model revisions when it is scraped.
type guards struct {
	status                      func() []gateway.PoolStatus
	up, leases, late, revisions *prometheus.Desc
}

func newGuards(status func() []gateway.PoolStatus) *guards {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(namespace+"_"+name, help, labels, nil)
	}
	return &guards{
		status:    status,
		up:        desc("guard_up", "1 if an endpoint's guard is heard; 0 if not, and then the endpoint takes no requests.", "pool", "endpoint"),
		leases:    desc("guard_leases", "Attempts behind a guard that are not known to be over.", "pool", "endpoint"),
		late:      desc("guard_late_writes_total", "Writes of a guard that ended after their lease, since it started.", "pool", "endpoint"),
		revisions: desc("pool_revisions", "Model revisions that a pool's endpoints are known to serve; more than one is a mixture.", "pool"),
	}
}

func (g *guards) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{g.up, g.leases, g.late, g.revisions} {
		ch <- d
	}
}

func (g *guards) Collect(ch chan<- prometheus.Metric) {
	for _, pool := range g.status() {
		for id, s := range pool.Guards {
			up := 0.0
			if s.Up {
				up = 1
			}
			ch <- prometheus.MustNewConstMetric(g.up, prometheus.GaugeValue, up, pool.Pool, string(id))
			ch <- prometheus.MustNewConstMetric(g.leases, prometheus.GaugeValue, float64(s.Leases), pool.Pool, string(id))
			ch <- prometheus.MustNewConstMetric(g.late, prometheus.CounterValue, float64(s.LateWrites), pool.Pool, string(id))
		}
		ch <- prometheus.MustNewConstMetric(g.revisions, prometheus.GaugeValue, float64(len(pool.Revisions())), pool.Pool)
	}
}
