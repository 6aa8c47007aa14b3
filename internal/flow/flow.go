// SPDX-License-Identifier: Apache-2.0

// Package flow holds the requests of a pool that wait for a place on an
// endpoint, and decides who gets the next one and who is refused.
//
// Requests of one priority and one fairness id are a flow; the flows of one
// priority are a band. Higher bands go first, unless a lower one has a reserved
// share and is owed it. Within a band the flow goes first that has been served
// least, in tokens to compute and tokens to generate; what was guessed when a
// request was dispatched is corrected when it ends, and a flow that comes back
// from idleness starts level with the others. Within a flow the first to come
// goes first, or the one whose deadline is nearest.
//
// A request is bound late: it stays here until the endpoint that suits it best
// has nearly no prefill pending, and the endpoint is chosen at that moment.
// While it can afford to it also waits where its prefill would hold up running
// streams. Nobody waits while an endpoint idles.
//
// Who can't be served in time is told so at once: at arrival if that is already
// clear, else when it becomes clear, never after an engine has worked for it.
//
// The package is a core. It is told the time, calls nobody but the Fleet that it
// is handed, and returns Decisions. A Queue is not safe for concurrent use. It
// refuses to know HTTP, endpoints or engines, to keep bodies, and to decide
// whether a request may be repeated.
package flow

import (
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/schedule"
)

// Config is what a Queue is told.
type Config struct {
	RequestsMax int           // that wait; 0: no limit
	BytesMax    int64         // of their bodies; 0: no limit
	TTL         time.Duration // how long one may wait; 0: no limit

	// EmptyTTL is how long a request may wait while no endpoint can take it, as
	// when a pool was scaled to zero. 0: one that arrives then is refused.
	EmptyTTL time.Duration

	// EarliestDeadline orders the requests of a flow by when they must be served
	// and not by when they came.
	EarliestDeadline bool

	// RefuseAt is the share of a request's first-output target past which it is
	// refused if that is what it would take. 0: nobody is refused for that.
	RefuseAt float64

	// Horizon is the wait at which a pool counts as saturated where a request has
	// no target. 0: HorizonDefault.
	Horizon time.Duration

	Bands []Band
}

// RefuseAtDefault is a share that keeps goodput high past capacity: at 1.0 the
// last ones that are let in come too late.
const RefuseAtDefault = 0.8

// HorizonDefault is Config.Horizon where it is 0.
const HorizonDefault = 2 * time.Second

// Band is what is set for one priority. Others have no limits of their own.
type Band struct {
	Priority    int
	RequestsMax int           // 0: the queue's limit alone
	BytesMax    int64         // 0: the same
	TTL         time.Duration // 0: the queue's
	// Reserve is the share of dispatched tokens that the band gets at least, while
	// it has requests to dispatch. 0: none.
	Reserve float64
}

// ShedAt says when a request is refused although it could wait. Zero fields are
// never.
type ShedAt struct {
	Queue      float64 // share of the queue's limits in use, 0 to 1
	Saturation float64 // of the pool, see Queue.Saturation
}

// Request is one request as a Queue knows it. The owner sets the exported fields
// before Arrive and keeps them while it waits.
type Request struct {
	Ask      schedule.Ask // what it needs of an endpoint; Arrived must be set
	Priority int          // higher goes first
	Fairness string       // whose it is, within a priority
	Bytes    int64        // of memory that it holds while it waits
	Deadline time.Time    // after which it is of no use; zero: none
	ShedAt   ShedAt
	TTL      time.Duration // its own, if shorter than the band's; 0: the band's
	Output   int           // most tokens that the answer may have; 0: unknown

	// Owner is for whoever is told of the Decision.
	Owner any

	state    state
	flow     *flow
	seq      uint64  // of its arrival
	due      float64 // order within its flow
	returned bool    // was dispatched before
	settled  bool    // it may wait: a pump has looked at it, or it came when there was no room

	work    float64 // prefill in seconds
	tokens  float64 // to charge
	weighed bool    // these are from a bid
	fresh   int     // prompt tokens to compute, as charged
	output  float64 // tokens of the answer, as charged
	charged bool
	blind   bool // output was a guess about a flow of which no answer had ended

	target    time.Duration // of its first output; 0: none
	limit     time.Duration // past which it is refused; 0: none
	first     time.Duration // to its first output, as it looked when it came
	predicted time.Duration // the same, if it had to wait
	came      time.Duration // when it began to wait, on the queue's clock
	ends      time.Duration // when it is refused, on the queue's clock
	why       inference.Code

	inFlow, inEnds int // places in heaps, -1 for none
	older, newer   *Request
}

type state uint8

const (
	outside state = iota
	waiting
	dispatched
)

// Waiting reports whether the request is in the queue.
func (r *Request) Waiting() bool { return r.state == waiting }

// Predicted is how long after its arrival the first output was expected; 0 if it
// never had to wait.
func (r *Request) Predicted() time.Duration { return r.predicted }

// Decision is what becomes of one request: a place, or the error that refuses it.
type Decision struct {
	Request *Request
	Place   *schedule.Reservation // nil: refused
	Err     *inference.Error
}

// Fleet is the pool's endpoints as one call finds them: a *schedule.Round, from
// Begin to End. The calls of one round come one after the other.
type Fleet interface {
	// Room reports whether some endpoint has room. While none has, nobody bids.
	Room() bool
	// Opens is how long until one has room by itself; negative: unknown.
	Opens() time.Duration
	Load() schedule.Load
	// Bid says where a request would go, given what was taken and passed before.
	Bid(ask *schedule.Ask) schedule.Bid
	// Take places the request of the last Bid, which was open.
	Take(ask *schedule.Ask) *schedule.Reservation
	// Pass leaves it waiting for the endpoint of the last Bid.
	Pass(ask *schedule.Ask)
}

// Queue holds the waiting requests of one pool. Make one with New.
type Queue struct {
	config Config
	epoch  time.Time
	bands  []*band // highest priority first
	ends   heap[*Request]
	seq    uint64
	closed inference.Code // why nobody is let in any more; "" while they are

	requests int
	bytes    int64
	work     float64

	empty  bool          // no endpoint was there at the last pump
	filled time.Duration // when one came after that

	looks  float64 // how many may be passed over now
	looked time.Duration

	again time.Duration // when a pump may find more than now; 0: not foreseen
	pace  pace
	tail  tail

	aside []*Request
	out   []Decision
	spare []Decision
}

// New makes an empty queue.
func New(config Config) *Queue {
	q := &Queue{
		ends: heap[*Request]{
			less: func(a, b *Request) bool {
				if a.ends != b.ends {
					return a.ends < b.ends
				}
				return a.seq < b.seq
			},
			moved: func(r *Request, at int) { r.inEnds = at },
		},
	}
	q.looks = scanBurst
	q.Configure(config)
	return q
}

// Configure replaces the limits. Requests that wait keep the time until which
// they may; one over a new limit stays.
func (q *Queue) Configure(config Config) {
	q.config = config
	for _, b := range q.bands {
		b.limits = Band{Priority: b.limits.Priority}
	}
	for _, limits := range config.Bands {
		q.band(limits.Priority).limits = limits
	}
	for _, b := range q.bands {
		// What was owed to a reserve that is gone would let it pass higher bands.
		if b.limits.Reserve == 0 {
			b.credit = 0
		}
	}
	q.dropBands()
}

// clock is a time on the queue's clock.
func (q *Queue) clock(now time.Time) time.Duration {
	if q.epoch.IsZero() {
		q.epoch = now
	}
	return now.Sub(q.epoch)
}

// Leave takes a request out whose client is gone. It reports whether it waited.
func (q *Queue) Leave(r *Request) bool {
	if r.state != waiting {
		return false
	}
	q.pop(r)
	r.flow.band.counts.Left++
	q.release(r)
	return true
}

// Return puts a dispatched request back, for another attempt: ahead of its flow,
// and past every limit but its deadline. The owner has changed Ask.
func (q *Queue) Return(now time.Time, r *Request) {
	if r.state != dispatched {
		return
	}
	at := q.clock(now)
	r.flow.out--
	r.returned, r.limit = true, 0
	q.expires(at, r)
	q.push(at, r)
	if q.closed == inference.NoEndpoints {
		q.refuse(r, q.errClosed())
	}
}

// Done tells that a dispatched request has ended, however it did: with so many
// prompt tokens computed and tokens generated. Negative numbers are unknown, and
// what was charged for them stays.
func (q *Queue) Done(r *Request, fresh, output int) {
	if r.state != dispatched {
		return
	}
	more := 0.0
	if fresh >= 0 {
		more += float64(fresh - r.fresh)
	}
	if output >= 0 {
		more += outputWeight * (float64(output) - r.output)
	}
	f := r.flow
	f.out--
	if r.blind {
		f.guessed -= outputWeight * r.output
	}
	if f.out == 0 && f.count == 0 {
		f.guessed = 0 // no sum of roundings stays
	}
	if output >= 0 {
		f.learn(float64(output))
	}
	f.serve(more)
	q.release(r)
}

// release ends what the queue and a request know of each other.
func (q *Queue) release(r *Request) {
	f := r.flow
	r.state = outside
	f.settle()
}

// Close refuses everybody who waits and everybody who comes: with ShuttingDown
// those who return still get their place, with NoEndpoints, of a pool that was
// deleted, nobody does.
func (q *Queue) Close(code inference.Code) {
	q.closed = code
	for q.ends.len() > 0 {
		q.refuse(q.ends.top(), q.errClosed())
	}
}

func (q *Queue) errClosed() *inference.Error {
	if q.closed == inference.ShuttingDown {
		return inference.Errorf(q.closed, "the gateway is shutting down")
	}
	return errNowhere()
}

// Next is when Pump must be called at the latest, if nothing happens before.
func (q *Queue) Next() (time.Time, bool) {
	var at time.Duration
	switch {
	case q.requests == 0 && len(q.out) == 0:
		return time.Time{}, false
	case len(q.out) > 0:
		return q.epoch, true
	case q.again > 0:
		at = min(q.again, q.ends.top().ends)
	default:
		at = q.ends.top().ends
	}
	if at == never {
		return time.Time{}, false
	}
	return q.epoch.Add(at), true
}
