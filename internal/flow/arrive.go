// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/schedule"
)

// outputWeight is what a generated token is charged, in prompt tokens
// (VTC, arXiv 2401.00588 §5).
const outputWeight = 2

// outputGuess is the length of an answer of which nothing is known yet.
const outputGuess = 200

// PauseMax is the longest pause of engines that a request which has just come
// waits for. A client can do that as well.
const PauseMax = time.Second

// waitShare is the share of its target that every request may wait, however
// long its own prefill: else long prompts would be the only ones refused.
const waitShare = 0.2

func charge(fresh int, output float64) float64 { return float64(fresh) + outputWeight*output }

// Arrive takes a new request in, or returns why it is refused. It dispatches
// nothing and may refuse others, so Pump follows.
func (q *Queue) Arrive(now time.Time, r *Request, fleet Fleet) *inference.Error {
	at := q.clock(now)
	b := q.band(r.Priority)
	b.counts.Arrived++
	q.seq++
	r.seq = q.seq
	err := q.admit(at, b, r, fleet)
	if err != nil {
		b.counts.refused(err.Code)
		if r.flow != nil {
			r.flow.settle()
			r.flow = nil
		}
		return err
	}
	q.push(at, r)
	return nil
}

func (q *Queue) admit(at time.Duration, b *band, r *Request, fleet Fleet) *inference.Error {
	if q.closed != "" {
		return q.errClosed()
	}
	if !r.Deadline.IsZero() && q.clock(r.Deadline) <= at {
		return errDeadline()
	}
	r.work, r.tokens = 0, charge(r.Ask.Prompt.N, r.guess(outputGuess))
	q.expires(at, r)
	if q.requests == 0 && fleet.Room() {
		return nil // the pump that follows bids
	}
	r.flow = b.flow(r.Fairness)
	bid, load := q.bid(r, fleet), fleet.Load()
	if bid.None {
		if err := q.nowhere(bid, load); err != nil {
			return err
		}
		if until := at + q.config.EmptyTTL; load.Endpoints == 0 && q.config.EmptyTTL > 0 && until < r.ends {
			// One that comes gives it the usual time from then on.
			r.ends, r.why = until, inference.QueueTimeout
		}
		return q.makeRoom(b, r, load)
	}
	r.settled = true
	q.weigh(r, &bid)
	r.first = bid.Ahead + bid.Own + q.wait(b, r.flow, r, load)
	r.predicted = r.first
	q.aim(at, r, &bid)
	if err := q.shed(b, r, load); err != nil {
		return err
	}
	return q.makeRoom(b, r, load)
}

// learn notes how long an answer was. Those of one tenant are alike.
func (f *flow) learn(output float64) {
	if f.answer == 0 {
		f.answer = max(output, 1)
	}
	f.answer += answerPace * (max(output, 1) - f.answer)
}

// answerPace is how much one answer counts for the average of a flow's.
const answerPace = 0.2

// guess is the expected length of the request's answer: as long as its flow's
// last ones, or else as the pool's.
func (r *Request) guess(mean float64) float64 {
	if f := r.flow; f != nil && f.answer > 0 {
		mean = f.answer
	}
	if r.Output > 0 {
		return min(mean, float64(r.Output))
	}
	return mean
}

// nowhere refuses a request that no endpoint can take, unless it may wait for
// one.
func (q *Queue) nowhere(bid schedule.Bid, load schedule.Load) *inference.Error {
	switch {
	case bid.Pause > PauseMax:
		return withWait(inference.Errorf(inference.Shed, "every engine of the pool asked for a pause"), bid.Pause)
	case bid.Pause == 0 && q.config.EmptyTTL == 0:
		return errNowhere()
	}
	return nil
}

// weigh notes what a bid says of the request's size.
func (q *Queue) weigh(r *Request, bid *schedule.Bid) {
	if !r.charged {
		r.fresh, r.output = bid.Fresh, r.guess(bid.Output)
	}
	if r.weighed {
		return
	}
	r.weighed = true
	work, tokens := bid.Prefill.Seconds(), charge(r.fresh, r.output)
	if r.state == waiting {
		q.weighIn(r, work-r.work, tokens-r.tokens)
	}
	r.work, r.tokens = work, tokens
}

// aim notes by when the request must be served to be of use.
func (q *Queue) aim(at time.Duration, r *Request, bid *schedule.Bid) {
	if r.target = bid.Target; r.target <= 0 {
		return
	}
	q.tail.add(r.first)
	if q.config.RefuseAt <= 0 || r.returned {
		return
	}
	r.limit = q.limit(r, bid)
	// Past that it can't be served in time even if it begins at once.
	last := q.clock(r.Ask.Arrived) + r.limit - bid.Own
	if last < r.ends {
		r.ends, r.why = max(last, at+1), inference.Shed
		if r.state == waiting {
			q.ends.fix(r.inEnds)
		}
	}
}

// limit is how long a first output may take before the request is refused.
func (q *Queue) limit(r *Request, bid *schedule.Bid) time.Duration {
	return max(share(q.config.RefuseAt, r.target), bid.Own+share(waitShare, r.target))
}

// expires sets until when a request may wait.
func (q *Queue) expires(at time.Duration, r *Request) {
	r.ends, r.why = never, inference.QueueTimeout
	if ttl := q.ttl(r); ttl > 0 {
		r.ends = at + min(ttl, never-at-1) // no overflow
	}
	if !r.Deadline.IsZero() {
		if by := q.clock(r.Deadline); by <= r.ends {
			r.ends, r.why = by, inference.DeadlineExceeded
		}
	}
}

func (q *Queue) ttl(r *Request) time.Duration {
	ttl := q.config.TTL
	if own := q.band(r.Priority).limits.TTL; own > 0 {
		ttl = own
	}
	if r.TTL > 0 && (ttl == 0 || r.TTL < ttl) {
		ttl = r.TTL
	}
	return ttl
}

// shed refuses a request at arrival that could wait and should not.
func (q *Queue) shed(b *band, r *Request, load schedule.Load) *inference.Error {
	if at := r.ShedAt.Queue; at > 0 && q.fullness() >= at {
		return q.later(inference.Errorf(inference.Shed, "the queue is too full for requests of this priority"), load)
	}
	if at := r.ShedAt.Saturation; at > 0 && q.saturation(b.limits.Priority, r.target, load) >= at {
		return q.later(inference.Errorf(inference.Shed, "the pool is too busy for requests of this priority"), load)
	}
	if r.limit > 0 && r.first > r.limit {
		return q.later(errLate(), load)
	}
	return nil
}

// makeRoom finds room for a request in its band and in the queue. Where there is
// none, others give way that should be served later: those of lower bands, and
// in its own band those of flows with more in the queue than its own would have.
// Of a flow the youngest gives way, and none that was dispatched before.
func (q *Queue) makeRoom(b *band, r *Request, load schedule.Load) *inference.Error {
	full := func() *inference.Error {
		return q.later(inference.Errorf(inference.QueueFull, "too many requests wait for this pool"), load)
	}
	if over(q.config.BytesMax, r.Bytes) || over(b.limits.BytesMax, r.Bytes) {
		return full()
	}
	var gone []*Request
	for !q.fits(b, r) {
		victim := q.victim(b, r)
		if victim == nil || len(gone) == displacedMax {
			for _, r := range slices.Backward(gone) {
				q.back(r)
			}
			return full()
		}
		q.pop(victim)
		gone = append(gone, victim)
	}
	for _, victim := range gone {
		victim.flow.band.counts.Displaced++
		q.out = append(q.out, Decision{Request: victim, Err: full()})
		q.release(victim)
	}
	return nil
}

// displacedMax bounds how many may give way to one.
const displacedMax = 16

func over(limit, n int64) bool { return limit > 0 && n > limit }

func (q *Queue) fits(b *band, r *Request) bool {
	return q.fitsQueue(r) && q.fitsBand(b, r)
}

func (q *Queue) fitsQueue(r *Request) bool {
	return !over(int64(q.config.RequestsMax), int64(q.requests+1)) && !over(q.config.BytesMax, q.bytes+r.Bytes)
}

func (q *Queue) fitsBand(b *band, r *Request) bool {
	return !over(int64(b.limits.RequestsMax), int64(b.requests+1)) && !over(b.limits.BytesMax, b.bytes+r.Bytes)
}

// victim is who gives way next, nil for nobody.
func (q *Queue) victim(b *band, r *Request) *Request {
	if q.fitsBand(b, r) {
		for _, lower := range slices.Backward(q.bands) {
			if lower.limits.Priority >= b.limits.Priority {
				break
			}
			if lower.bulk.len() > 0 && lower.bulk.top().newest != nil {
				return lower.bulk.top().newest
			}
		}
	}
	if b.bulk.len() == 0 {
		return nil
	}
	f := b.bulk.top()
	if f == r.flow || f.newest == nil || f.tokens <= r.flow.tokens+r.tokens {
		return nil
	}
	return f.newest
}

// back undoes pop, in reverse order of it.
func (q *Queue) back(r *Request) {
	f := r.flow
	q.add(r, 1)
	f.next.push(r)
	if f.inReady < 0 {
		f.band.ready.push(f)
	}
	q.ends.push(r)
	r.older, f.newest = f.newest, r
	if r.older != nil {
		r.older.newer = r
	} else {
		f.oldest = r
	}
}

func share(part float64, of time.Duration) time.Duration { return time.Duration(part * float64(of)) }

func withWait(err *inference.Error, wait time.Duration) *inference.Error {
	err.RetryAfter = wait
	return err
}

// later tells a client when to come again.
func (q *Queue) later(err *inference.Error, load schedule.Load) *inference.Error {
	return withWait(err, q.drainTime(load))
}

func errDeadline() *inference.Error {
	return inference.Errorf(inference.DeadlineExceeded, "the request's own deadline passed before an engine could take it")
}

func errNowhere() *inference.Error {
	return inference.Errorf(inference.NoEndpoints, "no endpoint of the pool can take the request")
}

func errNobodyCame(after time.Duration) *inference.Error {
	return inference.Errorf(inference.NoEndpoints, "the pool has no engine, and none came within %s", after)
}

func errLate() *inference.Error {
	return inference.Errorf(inference.Shed, "the pool is too busy to begin the answer in time")
}
