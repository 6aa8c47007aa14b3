// SPDX-License-Identifier: Apache-2.0

package overload

import (
	"fmt"
	"slices"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule"
)

// outputWeight is what a generated token counts for, in prompt tokens.
const outputWeight = 2

// checker judges a run while it plays. Its ledger is written from what came,
// what engines did and what was carried out.
type checker struct {
	w      *world
	failed error
	queue  bool // the run has a queue of ours

	waits []*job

	// Of the round under way.
	bids map[*schedule.Ask]schedule.Bid

	watchers []func(now float64)      // called when a moment is over
	tokens   func(j *job, tokens int) // told of service; nil for nobody
	left     func(j *job)             // told of who waits no more; nil for nobody
	passed   int                      // lower bands dispatched while a higher request waited for a better endpoint
	held     int                      // the same while one was held
	pending  float64                  // most prefill per endpoint, in seconds
}

// holdPrice and holdShare are of docs/flow-control.md: a request may be held only
// in the first half of its target, and only if it would push more streams over
// theirs than this price allows.
const (
	holdPrice = 0.1
	holdShare = 0.5
)

func (c *checker) fail(now float64, j *job, format string, args ...any) {
	if c.failed != nil {
		return
	}
	what := fmt.Sprintf(format, args...)
	if j != nil {
		what = fmt.Sprintf("request %s (priority %d, came %.6f): %s", j.name, j.Priority, j.At, what)
	}
	c.failed = fmt.Errorf("at %.6f s: %s", now, what)
}

// sent is that a request was given a place on e.
func (c *checker) sent(now float64, j *job, e *engine) {
	switch {
	case j.state != waiting:
		c.fail(now, j, "sent although it did not wait")
	case j.Deadline > 0 && now > j.At+j.Deadline+moment:
		c.fail(now, j, "sent %.6f s after its deadline", now-j.At-j.Deadline)
	case e == nil:
		c.fail(now, j, "sent to an endpoint that is in no pool")
	case !e.listed:
		c.fail(now, j, "sent to %s, which has left", e.id)
	}
	c.over(j)
}

// refused is that a request was turned away.
func (c *checker) refused(now float64, j *job, err *inference.Error) {
	switch {
	case j.state != waiting:
		c.fail(now, j, "refused although it did not wait")
	case err.Code == inference.DeadlineExceeded && now < j.At+j.Deadline-moment:
		c.fail(now, j, "refused %.6f s before its deadline", j.At+j.Deadline-now)
	case err.RetryAfter > inference.RetryAfterMax:
		c.fail(now, j, "told to come again in %v", err.RetryAfter)
	}
}

// over takes a request out of those that wait.
func (c *checker) over(j *job) {
	for i, x := range c.waits {
		if x == j {
			if c.left != nil {
				c.left(j)
			}
			last := len(c.waits) - 1
			c.waits[i] = c.waits[last]
			c.waits[last] = nil
			c.waits = c.waits[:last]
			return
		}
	}
}

// served tells of tokens that an engine computed.
func (c *checker) served(j *job, tokens int) {
	if c.tokens != nil {
		c.tokens(j, tokens)
	}
}

// settled is called when nothing more happens at a moment.
func (c *checker) settled(now float64) {
	for _, watch := range c.watchers {
		watch(now)
	}
	if !c.queue {
		return
	}
	if !c.w.some() {
		c.w.emptied = now
	}
	for _, j := range c.waits {
		if until := c.w.lasts(j); now > until+moment {
			c.fail(now, j, "still waits %.6f s after its time", now-until)
		}
	}
	if len(c.waits) == 0 {
		return
	}
	for _, e := range c.w.engines {
		if len(e.jobs) > 0 || !e.listed || !e.alive || !e.tried {
			continue
		}
		for _, j := range c.waits {
			if !j.request.Waiting() || excludes(j, e) {
				continue
			}
			c.fail(now, j, "waits since %.6f while %s has nothing to do: %+v", j.since, e.id, c.bids[&j.request.Ask])
			break
		}
	}
}

func excludes(j *job, e *engine) bool {
	return slices.Contains(j.request.Ask.Exclude, e.id)
}

// load is told of what is pending after a round.
func (c *checker) load(l schedule.Load) {
	if l.Endpoints > 0 {
		c.pending = max(c.pending, l.Prefill.Seconds()/float64(l.Endpoints))
	}
}

// ended is called when the run is over: what has been counted must be counted out.
func (c *checker) ended(now float64) error {
	if c.failed != nil {
		return c.failed
	}
	w := c.w
	if w.left > 0 {
		return nil // somebody is still under way
	}
	for _, s := range w.book.Status(clock(now), w.pool) {
		if s.InFlight != 0 {
			c.fail(now, nil, "the book counts %d on %s", s.InFlight, s.Endpoint)
		}
	}
	for _, e := range w.engines {
		s := e.machine.Snapshot()
		if e.alive && (s.Running+s.Waiting > 0 || len(e.jobs) > 0) {
			c.fail(now, nil, "%s has %d running, %d waiting, %d in the ledger", e.id, s.Running, s.Waiting, len(e.jobs))
		}
	}
	if d := w.ours(); d != nil {
		c.counters(now, d.queue.Status(schedule.Load{}, 1<<20))
	}
	return c.failed
}

func (c *checker) counters(now float64, s flow.Status) {
	if s.Requests != 0 || s.Bytes != 0 || s.Work != 0 {
		c.fail(now, nil, "the queue counts %d requests, %d bytes, %v", s.Requests, s.Bytes, s.Work)
	}
	arrived := uint64(0)
	for _, b := range s.Bands {
		arrived += b.Counts.Arrived
		if b.Requests != 0 || b.Bytes != 0 || b.Work != 0 {
			c.fail(now, nil, "band %d counts %d requests, %d bytes, %v", b.Priority, b.Requests, b.Bytes, b.Work)
		}
		for _, f := range b.Flows {
			if f.Requests != 0 || f.Dispatched != 0 || f.Tokens != 0 {
				c.fail(now, nil, "flow %s counts %d requests, %d dispatched, %v tokens", f.Fairness, f.Requests, f.Dispatched, f.Tokens)
			}
		}
	}
	if arrived != uint64(len(c.w.jobs)) {
		c.fail(now, nil, "the queue counts %d arrivals of %d", arrived, len(c.w.jobs))
	}
}

// watch stands between a queue and a round, and notes what each says to the other.
func (c *checker) watch(now float64, round *schedule.Round) flow.Fleet {
	c.queue = true
	c.bids = map[*schedule.Ask]schedule.Bid{}
	return &watched{c, now, round}
}

type watched struct {
	c   *checker
	now float64
	*schedule.Round
}

func (f *watched) Bid(ask *schedule.Ask) schedule.Bid {
	bid := f.Round.Bid(ask)
	f.c.bids[ask] = bid
	return bid
}

func (f *watched) Take(ask *schedule.Ask) *schedule.Reservation {
	place := f.Round.Take(ask)
	f.c.taken(f.now, ask, f.c.w.engine(place.Endpoint.ID))
	return place
}

// taken looks for requests of higher priority that should have gone to e before.
func (c *checker) taken(now float64, ask *schedule.Ask, e *engine) {
	var j *job
	for _, x := range c.waits {
		if &x.request.Ask == ask {
			j = x
		}
	}
	if j == nil {
		c.fail(now, nil, "a place was taken for nobody")
		return
	}
	for _, h := range c.waits {
		if h.Priority <= j.Priority || c.w.reserved(j) || !h.request.Waiting() || excludes(h, e) {
			continue
		}
		bid, asked := c.bids[&h.request.Ask]
		switch {
		case !asked:
			c.fail(now, j, "goes before %s of priority %d, which was not looked at", h.name, h.Priority)
		case bid.None || bid.Endpoint == "":
			c.fail(now, j, "goes to %s before %s of priority %d, for which there was none", e.id, h.name, h.Priority)
		case !bid.Open && bid.Endpoint == e.id:
			c.fail(now, j, "goes to %s before %s of priority %d, which waits for it", e.id, h.name, h.Priority)
		case !bid.Open:
			c.passed++
		case !mayHold(h, now, bid):
			c.fail(now, j, "goes before %s of priority %d, which has no reason to be held: %+v", h.name, h.Priority, bid)
		default:
			c.held++
		}
	}
}

// mayHold reports whether the hold rule can allow a request to wait.
func mayHold(j *job, now float64, bid schedule.Bid) bool {
	if bid.Target <= 0 {
		return false
	}
	used := (now - j.At + (bid.Ahead + bid.Prefill).Seconds()) / (holdShare * bid.Target.Seconds())
	return used < 1+1e-6 && bid.Stalled > holdPrice*used/(1-used)-1e-6
}

// lasts is until when a request may wait. While there is no engine it may wait for
// one, and for its turn after that.
func (w *world) lasts(j *job) float64 {
	until := j.until
	if w.emptied >= j.since {
		until = j.since + 2*w.limits.TTL.Seconds() + emptyTTLMax
	}
	if j.Deadline > 0 {
		until = min(until, j.At+j.Deadline)
	}
	return until
}

// emptyTTLMax is the longest EmptyTTL of any run.
const emptyTTLMax = 300

// reserved reports whether a request's band may go before higher ones.
func (w *world) reserved(j *job) bool {
	for _, b := range w.limits.Bands {
		if b.Priority == j.Priority {
			return b.Reserve > 0
		}
	}
	return false
}

// moment is what roundings of times can make, in seconds.
const moment = 1e-6

// some reports whether the pool has an engine that lives.
func (w *world) some() bool {
	for _, e := range w.engines {
		if e.listed && e.alive {
			return true
		}
	}
	return false
}
