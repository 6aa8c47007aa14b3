// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/schedule"
)

// Counts are what has become of a band's requests since the queue was made.
type Counts struct {
	Arrived    uint64
	Dispatched uint64                    // retries too
	Left       uint64                    // whose client was gone
	Displaced  uint64                    // refused with queue_full for another's sake
	Held       uint64                    // times that one was held although there was room
	Reserved   uint64                    // dispatched before higher bands
	Refused    map[inference.Code]uint64 // but for those displaced
}

func (c *Counts) refused(code inference.Code) {
	if c.Refused == nil {
		c.Refused = map[inference.Code]uint64{}
	}
	c.Refused[code]++
}

// Status is a queue at one moment.
type Status struct {
	Requests int
	Bytes    int64
	Work     time.Duration // prefill of all that waits
	Drain    time.Duration // until all of it is dispatched, as it looks
	Bands    []BandStatus  // highest priority first
}

// BandStatus is one band at one moment.
type BandStatus struct {
	Priority   int
	Requests   int
	Bytes      int64
	Work       time.Duration
	Saturation float64 // as a request of this priority would see it
	Counts     Counts
	Flows      []FlowStatus // those with most tokens waiting first
	FlowsAll   int          // how many there are
}

// FlowStatus is one flow at one moment.
type FlowStatus struct {
	Fairness   string
	Requests   int
	Dispatched int     // and not ended
	Tokens     float64 // that wait
	Served     float64 // beyond the least served flow of the band
}

// Status describes the queue, with at most that many flows per band.
func (q *Queue) Status(load schedule.Load, flowsMax int) Status {
	s := Status{Requests: q.requests, Bytes: q.bytes, Work: seconds(q.work), Drain: q.drainTime(load)}
	if q.requests == 0 {
		s.Drain = 0
	}
	for _, b := range q.bands {
		counts := b.counts
		counts.Refused = maps.Clone(b.counts.Refused)
		s.Bands = append(s.Bands, BandStatus{
			Priority: b.limits.Priority, Requests: b.requests, Bytes: b.bytes, Work: seconds(b.work),
			Saturation: q.Saturation(b.limits.Priority, load), Counts: counts,
			Flows: b.status(flowsMax), FlowsAll: len(b.flows),
		})
	}
	return s
}

func (b *band) status(most int) []FlowStatus {
	all, level := make([]*flow, 0, len(b.flows)), b.floor
	for _, f := range b.flows {
		all = append(all, f)
		level = min(level, f.served)
	}
	slices.SortFunc(all, func(a, b *flow) int {
		return cmp.Or(cmp.Compare(b.tokens, a.tokens), cmp.Compare(b.out, a.out), cmp.Compare(a.n, b.n))
	})
	list := make([]FlowStatus, 0, min(len(all), most))
	for _, f := range all[:min(len(all), most)] {
		list = append(list, FlowStatus{
			Fairness: f.id, Requests: f.count, Dispatched: f.out, Tokens: f.tokens, Served: f.served - level,
		})
	}
	return list
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
