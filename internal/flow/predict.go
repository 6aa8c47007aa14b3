// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"cmp"
	"math"
	"math/bits"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/schedule"
)

// Saturation is how much of the time that a request of a priority may wait is
// taken up by what is before it: the prefill that is pending on endpoints and
// that of waiting requests of the same or higher priority, over the number of
// endpoints and over RefuseAt of the target. Where it is more, it is the mean
// share of endpoints in use, by the limit on requests, by KV memory as engines
// tell, and by how crowded they are. A pool without endpoints is at 1.
func (q *Queue) Saturation(priority int, load schedule.Load) float64 {
	return q.saturation(priority, 0, load)
}

func (q *Queue) saturation(priority int, target time.Duration, load schedule.Load) float64 {
	if load.Endpoints == 0 {
		return 1
	}
	horizon := cmp.Or(target, q.config.Horizon, HorizonDefault)
	if q.config.RefuseAt > 0 {
		horizon = share(q.config.RefuseAt, horizon)
	}
	work := load.Prefill.Seconds()
	for _, b := range q.bands {
		if b.limits.Priority >= priority {
			work += b.work
		}
	}
	return min(max(work/float64(load.Endpoints)/horizon.Seconds(), load.Used), 1)
}

// fullness is how much of the queue's limits is taken.
func (q *Queue) fullness() float64 {
	full := 0.0
	if q.config.RequestsMax > 0 {
		full = float64(q.requests) / float64(q.config.RequestsMax)
	}
	if q.config.BytesMax > 0 {
		full = max(full, float64(q.bytes)/float64(q.config.BytesMax))
	}
	return full
}

// wait is how long a request that has just come is going to wait for others in
// the queue: all of higher bands, and of its own band as much as fair sharing
// lets go before it.
func (q *Queue) wait(b *band, f *flow, r *Request, load schedule.Load) time.Duration {
	work, requests := 0.0, 0
	for _, higher := range q.bands {
		if higher.limits.Priority > b.limits.Priority {
			work += higher.work
			requests += higher.requests
		}
	}
	flows := b.bulk.len()
	if f.count == 0 {
		flows++
	}
	work += min(b.work, f.work+(f.work+r.work)*float64(flows-1))
	requests += min(b.requests, f.count+(f.count+1)*(flows-1))
	return q.last(work, requests, load)
}

// last is how long it takes until so much has been dispatched.
func (q *Queue) last(work float64, requests int, load schedule.Load) time.Duration {
	seconds := work / float64(max(load.Endpoints, 1))
	if pace, known := q.pace.mean(); known {
		seconds = max(seconds, pace*float64(requests))
	}
	return time.Duration(min(seconds, 1e6) * float64(time.Second))
}

// drainTime is what Retry-After tells: until all that waits is dispatched.
func (q *Queue) drainTime(load schedule.Load) time.Duration {
	wait := q.last(q.work, q.requests, load)
	if load.Endpoints > 0 {
		wait += load.Prefill / time.Duration(load.Endpoints)
	}
	return min(max(wait, time.Second), inference.RetryAfterMax)
}

// pace is how fast requests leave the queue while others wait in it.
type pace struct {
	last    time.Duration
	running bool
	seconds float64
	seen    int
}

const (
	paceSeen = 8 // dispatches before it counts
	paceKeep = 0.95
)

// rest says that nobody waited until now.
func (p *pace) rest() { p.running = false }

func (p *pace) dispatched(at time.Duration, more bool) {
	if p.running {
		gap := max(at-p.last, 0).Seconds()
		if p.seen++; p.seen == 1 {
			p.seconds = gap
		}
		p.seconds = paceKeep*p.seconds + (1-paceKeep)*gap
	}
	p.last, p.running = at, more
}

func (p *pace) mean() (float64, bool) { return p.seconds, p.seen >= paceSeen }

// tail is the upper end of how long first outputs took as it looked at arrival,
// of late. Requests are held no longer than that, so that holding does not add
// to the slowest.
type tail struct {
	count [tailCells]float64
	sum   float64
}

const (
	tailCells = 160 // four per doubling from a microsecond: up to weeks
	tailShare = 0.95
	tailKeep  = 2000 // requests before the old ones are halved
)

func (t *tail) add(d time.Duration) {
	t.count[tailCell(d)]++
	if t.sum++; t.sum >= tailKeep {
		t.sum = 0
		for i := range t.count {
			t.count[i] /= 2
			t.sum += t.count[i]
		}
	}
}

// high is the 95th percentile, 0 when nothing is known.
func (t *tail) high() time.Duration {
	left := t.sum * (1 - tailShare)
	for i := tailCells - 1; i > 0; i-- {
		if left -= t.count[i]; left < 0 {
			return time.Duration(float64(time.Microsecond) * math.Exp2(float64(i)/4))
		}
	}
	return 0
}

// tailCell is the cell whose upper end is d or more.
func tailCell(d time.Duration) int {
	us := uint64(max(d, 0) / time.Microsecond)
	if us == 0 {
		return 0
	}
	whole := bits.Len64(us) - 1
	quarter := math.Ceil(4 * math.Log2(float64(us)/float64(uint64(1)<<whole)))
	return min(4*whole+int(quarter), tailCells-1)
}
