// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/schedule"
)

// How far a pump looks, and by which rules a request is held although there is
// room for it.
const (
	scanMax = 128 // requests that one pump passes over
	// Where pumps are many they pass over fewer, so that looking takes a tenth of a
	// processor or so, and never fewer than that.
	scanMin   = 16
	scanRate  = 50_000 // a second
	scanBurst = 4096

	// holdPrice is how many streams over their target a request may cost, per part
	// of its time that it has used up over the part that is left.
	holdPrice = 0.1
	// budget is the share of its target that a request may use up by waiting.
	budget = 0.5
	// A held request is looked at again after so long; what it waits for changes
	// with time alone.
	holdAgain = 25 * time.Millisecond
	// openAgain is the least time until an endpoint is looked at again that was
	// expected to have room.
	openAgain = 5 * time.Millisecond
)

// Pump refuses who has waited too long and dispatches as many as fit. It is
// called when anything has changed: a request came, an endpoint was freed or
// changed, a first output came, and at Next. The Decisions, and those of
// requests that gave way to an arrival, are valid until the next call.
func (q *Queue) Pump(now time.Time, fleet Fleet) []Decision {
	at := q.clock(now)
	q.again = 0
	empty := fleet.Load().Endpoints == 0
	if q.empty && !empty {
		q.filled = at
	}
	q.empty = empty
	q.overdue(at, fleet)
	if q.requests > 0 {
		q.dispatch(now, at, fleet)
	}
	if opens := fleet.Opens(); q.requests > 0 && opens >= 0 {
		q.lookAt(at + max(opens, openAgain))
	}
	out := q.out
	q.out, q.spare = q.spare[:0], out
	return out
}

// lookAt asks for a pump at a time.
func (q *Queue) lookAt(at time.Duration) {
	if q.again == 0 || at < q.again {
		q.again = at
	}
}

// overdue refuses requests whose time is over.
func (q *Queue) overdue(at time.Duration, fleet Fleet) {
	for q.ends.len() > 0 && q.ends.top().ends <= at {
		r := q.ends.top()
		switch {
		case r.why == inference.DeadlineExceeded:
			q.refuse(r, errDeadline())
		case r.why == inference.Shed:
			q.refuse(r, q.later(errLate(), fleet.Load()))
		case q.extend(at, r):
		case q.empty && q.config.EmptyTTL > 0:
			q.refuse(r, errNobodyCame(q.config.EmptyTTL))
		default:
			err := inference.Errorf(inference.QueueTimeout, "the request waited too long for an engine")
			if q.empty {
				err.Status = inference.NoEndpoints.Info().Status
			}
			q.refuse(r, q.later(err, fleet.Load()))
		}
	}
}

// extend lets a request wait longer that waits for an engine to start, or for
// its turn since one has.
func (q *Queue) extend(at time.Duration, r *Request) bool {
	ends := r.came + q.config.EmptyTTL
	if !q.empty {
		if r.came >= q.filled {
			return false
		}
		ends = min(q.filled, ends) + q.ttl(r)
	}
	if ends <= at {
		return false
	}
	r.ends = ends
	if !r.Deadline.IsZero() && q.clock(r.Deadline) < ends {
		r.ends, r.why = q.clock(r.Deadline), inference.DeadlineExceeded
	}
	q.ends.fix(r.inEnds)
	return true
}

// dispatch goes through the waiting requests in the order in which they are due,
// while there is room.
func (q *Queue) dispatch(now time.Time, at time.Duration, fleet Fleet) {
	most := q.scans(at)
	for len(q.aside) < most && fleet.Room() {
		b := q.turn()
		if b == nil {
			break
		}
		q.look(now, at, b.ready.top().next.top(), fleet)
	}
	q.looks -= float64(len(q.aside))
	for _, r := range q.aside {
		f := r.flow
		f.next.push(r)
		f.key = f.served
		if f.inReady < 0 {
			f.band.ready.push(f)
		} else {
			f.band.ready.fix(f.inReady)
		}
	}
	clear(q.aside)
	q.aside = q.aside[:0]
}

// scans is how many requests a pump may pass over now.
func (q *Queue) scans(at time.Duration) int {
	q.looks = min(q.looks+max(at-q.looked, 0).Seconds()*scanRate, scanBurst)
	q.looked = at
	return min(max(int(q.looks), scanMin), scanMax)
}

// turn is the band whose turn it is: the highest that its reserve is owed to,
// else the highest.
func (q *Queue) turn() *band {
	var first *band
	for _, b := range q.bands {
		if b.ready.len() == 0 {
			continue
		}
		if b.credit > 0 {
			return b
		}
		if first == nil {
			first = b
		}
	}
	return first
}

// look decides what becomes of one request now.
func (q *Queue) look(now time.Time, at time.Duration, r *Request, fleet Fleet) {
	bid := q.bid(r, fleet)
	if !r.settled && !bid.None {
		r.settled = true
		r.first = bid.Ahead + bid.Own
		q.weigh(r, &bid)
		q.aim(at, r, &bid)
	}
	q.weigh(r, &bid)
	waited := max(now.Sub(r.Ask.Arrived), 0)
	switch {
	case bid.None:
		if err := q.nowhere(bid, fleet.Load()); err != nil && !r.settled {
			q.refuse(r, err)
			return
		}
		r.settled = true
		if bid.Pause > 0 {
			q.lookAt(at + bid.Pause)
		}
		q.setAside(r)
	case bid.Endpoint == "":
		q.setAside(r)
	case r.limit > 0 && waited+bid.Ahead+bid.Own > q.limit(r, &bid):
		q.refuse(r, q.later(errLate(), fleet.Load()))
	case !bid.Open:
		fleet.Pass(&r.Ask)
		q.setAside(r)
	case !bid.Idle && q.held(r, &bid, waited):
		r.flow.band.counts.Held++
		q.lookAt(at + holdAgain)
		q.setAside(r)
	default:
		q.take(at, r, fleet)
	}
}

// bid asks where a request would go now. Where there are requests of higher priority
// it leaves engines that are nearly crowded to those.
func (q *Queue) bid(r *Request, fleet Fleet) schedule.Bid {
	r.Ask.Yields = slices.ContainsFunc(q.bands, func(b *band) bool {
		return b.limits.Priority > r.Priority && len(b.flows) > 0
	})
	return fleet.Bid(&r.Ask)
}

// setAside leaves a request out for the rest of a pump. Its flow's turn is over
// as if it had been served.
func (q *Queue) setAside(r *Request) {
	f := r.flow
	f.next.remove(r.inFlow)
	f.key += r.tokens
	if f.next.len() == 0 {
		f.band.ready.remove(f.inReady)
	} else {
		f.band.ready.fix(f.inReady)
	}
	q.aside = append(q.aside, r)
}

// held reports whether a request waits although there is room, because its
// prefill would push running streams over their target and it has time to spare.
func (q *Queue) held(r *Request, bid *schedule.Bid, waited time.Duration) bool {
	if r.target <= 0 || bid.Stalled <= 0 {
		return false
	}
	mayUse := min(share(budget, r.target), max(q.tail.high(), r.first))
	if mayUse <= 0 {
		return false
	}
	used := float64(waited+bid.Ahead+bid.Prefill) / float64(mayUse)
	return used < 1 && bid.Stalled > holdPrice*used/(1-used)
}

// take dispatches a request.
func (q *Queue) take(at time.Duration, r *Request, fleet Fleet) {
	f := r.flow
	b := f.band
	place := fleet.Take(&r.Ask)
	q.repay(b, r.tokens)
	q.pop(r)
	r.state = dispatched
	f.out++
	b.counts.Dispatched++
	if !r.charged {
		// A retry is the pool's doing and not charged again.
		r.charged = true
		b.floor = max(b.floor, f.level())
		f.serve(charge(r.fresh, r.output))
		if r.blind = f.answer == 0; r.blind {
			f.guessed += outputWeight * r.output
		}
	}
	if b.requests == 0 {
		// Where nobody waits nobody is behind.
		b.floor = max(b.floor, f.level())
	}
	q.pace.dispatched(at, q.requests > 0)
	q.out = append(q.out, Decision{Request: r, Place: place})
}

// repay keeps the account of reserves: each band that waits is owed its share of
// what others get, and a band that is served before a higher one pays.
func (q *Queue) repay(served *band, tokens float64) {
	higher := false
	for _, b := range q.bands {
		switch {
		case b == served:
			if b.limits.Reserve > 0 && higher {
				if b.credit > 0 {
					b.counts.Reserved++
				}
				b.credit -= (1 - b.limits.Reserve) * tokens
			}
		case b.requests > 0 && b.limits.Reserve > 0:
			b.credit = min(b.credit+b.limits.Reserve*tokens, creditMax)
		}
		higher = higher || b.requests > 0
	}
}

// creditMax bounds what a reserve can be owed, in tokens, so that a band which
// could not use it for a while does not hold up the others afterwards.
const creditMax = 64 << 10
