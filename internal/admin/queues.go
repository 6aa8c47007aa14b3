// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/flow"
)

// queue is a pool's queue as operators see it. Times are in seconds.
type queue struct {
	Pool     string  `json:"pool"`
	Requests int     `json:"requests"`
	Bytes    int64   `json:"bytes"`
	Prefill  float64 `json:"prefill_seconds"` // of all that waits
	Drain    float64 `json:"drain_seconds"`   // until all of it is dispatched, as it looks
	Bands    []band  `json:"bands"`           // highest priority first
}

type band struct {
	Priority   int                       `json:"priority"`
	Requests   int                       `json:"requests"`
	Bytes      int64                     `json:"bytes"`
	Prefill    float64                   `json:"prefill_seconds"`
	Saturation float64                   `json:"saturation"`
	Arrived    uint64                    `json:"arrived"`
	Dispatched uint64                    `json:"dispatched"`
	Left       uint64                    `json:"left"`
	Displaced  uint64                    `json:"displaced"`
	Held       uint64                    `json:"held"`
	Reserved   uint64                    `json:"reserved"`
	Refused    map[inference.Code]uint64 `json:"refused"`
	FlowsAll   int                       `json:"flows_all"`
	Flows      []flowView                `json:"flows"` // those with most tokens waiting
}

type flowView struct {
	FairnessID string  `json:"fairness_id"`
	Requests   int     `json:"requests"`
	InFlight   int     `json:"in_flight"`
	Tokens     float64 `json:"tokens"` // that wait
	Ahead      float64 `json:"ahead"`  // tokens that it was served beyond the least served flow
}

// queues shows what waits in every pool.
func (a *api) queues(w http.ResponseWriter, _ *http.Request) {
	list := []queue{}
	for _, pool := range a.Gateway.Status() {
		s := pool.Queue
		q := queue{
			Pool: pool.Pool, Requests: s.Requests, Bytes: s.Bytes,
			Prefill: s.Work.Seconds(), Drain: s.Drain.Round(time.Millisecond).Seconds(), Bands: []band{},
		}
		for i := range s.Bands {
			q.Bands = append(q.Bands, bandOf(&s.Bands[i]))
		}
		list = append(list, q)
	}
	slices.SortFunc(list, func(a, b queue) int { return cmp.Compare(a.Pool, b.Pool) })
	write(w, map[string]any{"queues": list})
}

func bandOf(b *flow.BandStatus) band {
	out := band{
		Priority: b.Priority, Requests: b.Requests, Bytes: b.Bytes, Prefill: b.Work.Seconds(), Saturation: b.Saturation,
		Arrived: b.Counts.Arrived, Dispatched: b.Counts.Dispatched, Left: b.Counts.Left, Displaced: b.Counts.Displaced,
		Held: b.Counts.Held, Reserved: b.Counts.Reserved, Refused: b.Counts.Refused, FlowsAll: b.FlowsAll, Flows: []flowView{},
	}
	if out.Refused == nil {
		out.Refused = map[inference.Code]uint64{}
	}
	for _, f := range b.Flows {
		out.Flows = append(out.Flows, flowView{f.Fairness, f.Requests, f.Dispatched, f.Tokens, f.Served})
	}
	return out
}
