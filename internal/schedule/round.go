// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"math"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/schedule/cost"
)

// Limits say when an endpoint has room for one more request. The zero value
// leaves room everywhere.
type Limits struct {
	// Concurrency is how many requests an endpoint may have in flight. 0: no limit.
	Concurrency int
	// Prefill closes an endpoint while that much prefill is pending there. 0: never.
	// As the endpoint gets crowded it is less.
	Prefill time.Duration
	// Waiting closes an endpoint while its engine says that so many requests wait
	// in it, and some of ours may be among them. 0: never.
	Waiting int
}

// kvFull is the share of KV memory in use from which an engine would have to
// preempt a request to take another.
const kvFull = 0.97

// A crowded endpoint's streams are too slow for the target per token. It gets no more
// until that has passed. Before that it gets less prefill at a time, so that it is not
// closed for long. This is where overload ends; short of it the price of a stall
// decides who goes where. Requests that yield find it closed earlier: what is left is
// for those that they yield to.
const (
	crowdedAt       = 1.1  // times the target
	crowdedYielding = 0.85 // the same for requests that yield
	crowdEase       = 0.4  // of that, from where on it gets less

	// A few streams are no crowd: what slows them is a long prompt, and an engine that
	// is closed for them gets nothing done. Requests that yield wait even so.
	crowdLeastStreams = 16

	// An engine that hardly meets the target with one stream can't be made to by
	// giving it one at a time. It is crowded at so many times its best pace.
	crowdBest = 1.5
)

// room is whether an endpoint can take one more request.
type room uint8

const (
	roomy room = iota
	busy       // enough prefill is pending; it can be foreseen when that is done
	full       // at a limit of which nobody knows when it ends
)

// Round is one pass over a pool's endpoints on behalf of requests that wait
// together. The book is locked from Begin to End, so that what has room is what
// is chosen, and choosing is counting.
//
// A request may prefer an endpoint that has no room yet, because waiting for it
// costs less than going elsewhere. It is then passed over, and those after it
// see its work there as if it had been sent. While another endpoint has nothing to
// do it is not to wait: it goes where it prefers at once, room or not.
type Round struct {
	book   *Book
	now    time.Time
	pool   *fleet.Pool
	load   Load
	rooms  int
	opens  float64 // seconds until the first busy one has room
	choice choice
}

// Load is how busy a pool is.
type Load struct {
	Endpoints int           // that could be used
	Prefill   time.Duration // pending on all of them
	Used      float64       // mean share of them in use, by the limit on requests, KV memory and the pace of streams; 0 to 1
}

// Bid is where a request would go now.
type Bid struct {
	Endpoint inference.EndpointID // "" for none
	Open     bool                 // it has room, or Idle
	Idle     bool                 // another could take it that has nothing to do: it is not to wait
	None     bool                 // no endpoint can take the request, room or not
	Pause    time.Duration        // with None: until one can that asked for a pause

	Ahead   time.Duration // prefill that is pending there
	Own     time.Duration // from its begin to its first output there
	Prefill time.Duration // of it, what takes the engine's time
	Stalled float64       // streams there that it is expected to push over their target
	Target  time.Duration // for its first output; 0: none
	Fresh   int           // prompt tokens to compute
	Output  float64       // expected tokens of the answer
}

// Begin locks the book for a round.
func (b *Book) Begin(now time.Time, pool *fleet.Pool) *Round {
	b.mu.Lock()
	r := &b.round
	*r = Round{book: b, now: now, pool: pool}
	r.survey()
	return r
}

// End unlocks the book. The round can't be used any more.
func (r *Round) End() { r.book.mu.Unlock() }

// survey looks at what every endpoint has to do.
func (r *Round) survey() {
	b := r.book
	at, rate := b.seconds(r.now), b.line.Rate(cost.Prior)
	accounts := b.seats(r.pool).accounts
	believe := b.believeProbes(accounts)
	var ask Ask
	r.opens = math.Inf(1)
	for i, a := range accounts {
		a.settle(at)
		b.learnComputed(a)
		a.settleRate(rate)
		a.passed = 0
		// For the whole round: drawn anew for each, a request could go where one
		// that is ahead of it was not allowed to.
		a.turn = a.drawTurn(r.now, b.rnd)
		b.judge(r.now, a)
		switch a.why(r.now, &ask, &r.pool.Endpoints[i], believe, true) {
		case "":
		case paused:
			r.load.Endpoints++
			r.load.Used++
			r.opens = min(r.opens, a.heldUntil.Sub(r.now).Seconds())
			continue
		default:
			continue
		}
		ahead := a.ahead(at)
		r.load.Endpoints++
		r.load.Prefill += span(ahead)
		r.load.Used += b.used(r.now, a)
		if a.room == roomy {
			r.rooms++
		}
		if a.failures > 0 && r.now.Before(a.ejectedUntil) {
			r.opens = min(r.opens, a.ejectedUntil.Sub(r.now).Seconds())
		}
		r.opens = min(r.opens, a.opens)
	}
	if r.load.Endpoints > 0 {
		r.load.Used /= float64(r.load.Endpoints)
	}
}

// judge notes what room an endpoint has, and when it has more. What it goes by is what
// this gateway sent there and has not seen begin; an engine's own metrics only ever add
// to that, so that a missing or stale scrape neither stops a pool nor floods it. An
// endpoint with nothing in flight always has room.
func (b *Book) judge(now time.Time, a *account) {
	a.opens = math.Inf(1)
	switch {
	case a.inflight == 0:
		a.room, a.roomYielding = roomy, roomy
		return
	case b.isFull(now, a):
		a.room, a.roomYielding = full, full
		return
	}
	slow := 0.0
	if len(a.running) >= crowdLeastStreams {
		slow = a.slow(b.seconds(now), crowdedAt)
	}
	a.room = b.roomBeside(now, a, slow)
	if a.roomYielding = a.room; a.room == roomy {
		a.roomYielding = b.roomBeside(now, a, a.slow(b.seconds(now), crowdedYielding))
	}
}

// isFull reports whether an endpoint is at a limit of which nobody knows when it ends.
func (b *Book) isFull(now time.Time, a *account) bool {
	limits := &b.config.Limits
	if limits.Concurrency > 0 && a.inflight >= limits.Concurrency {
		return true
	}
	if limits.Waiting > 0 && b.saysFull(now, a) {
		a.opens = a.scraped.At.Add(b.config.ScrapeStale).Sub(now).Seconds() // nobody may ask again
		return true
	}
	return limits.Prefill > 0 && a.unbegun() >= pendingMax
}

// roomBeside judges one that is not full by the prefill that is pending there, given
// how near its streams are to being crowded.
func (b *Book) roomBeside(now time.Time, a *account, slow float64) room {
	if slow >= 1 {
		a.opens = crowdLook
		return busy
	}
	if prefill := b.config.Limits.Prefill; prefill > 0 && b.foreseen(a) {
		most := prefill.Seconds() * min((1-slow)/(1-crowdEase), 1)
		if more := a.ahead(b.seconds(now)) - most; more >= 0 {
			a.opens = more
			return busy
		}
	}
	return roomy
}

// roomFor is what room an endpoint has for a request. One without a target for its
// first output can wait until streams get on better, so it yields to those that have
// one.
func (b *Book) roomFor(a *account, ask *Ask) room {
	if ask.Yields || b.target(ask).Base <= 0 {
		return a.roomYielding
	}
	return a.room
}

// pendingMax bounds the streams without a first output on one endpoint, however
// short they are: a step computes about as many, and all that came while others
// seemed full would otherwise go to one.
const pendingMax = 64

// unbegun is how many streams have no first output yet.
func (a *account) unbegun() (n int) {
	for _, r := range a.pending {
		if r.streams {
			n++
		}
	}
	return n
}

// growBy is how many requests an engine may get more than it had when it said that
// none waits, or as many again if that is more.
const growBy = 32

// saysFull reports whether the engine's own metrics close it. What has ended since
// it was asked has made room, and of streams that have begun none waits any more;
// so its word holds while it can still be true, and no longer. Of answers that come
// whole nothing else is known: there its word that nobody waits is good for some
// more requests only.
func (b *Book) saysFull(now time.Time, a *account) bool {
	s, foreseen := &a.scraped, b.foreseen(a)
	if foreseen && len(a.pending) == 0 || !s.believed(now, b.config.ScrapeStale) {
		return false
	}
	if s.KVUsage.Known && s.KVUsage.V >= kvFull {
		return true
	}
	if !s.Queued.Known {
		return false
	}
	most := float64(b.config.Limits.Waiting)
	if s.Queued.V < most {
		return !foreseen && a.inflight >= s.own+max(s.own, growBy)
	}
	waiting := s.Queued.V + float64(a.inflight-s.own)
	if foreseen {
		waiting = min(waiting, float64(len(a.pending)))
	}
	return waiting >= most
}

// foreseen reports whether it is known when the pending prefill of an endpoint will
// be done. Of answers that come whole nobody tells when their prompts were computed.
// As long as no stream has shown how fast the engines are, such prompts don't
// count: an engine faster than what is assumed would be held down to that.
func (b *Book) foreseen(a *account) bool {
	return b.line != (cost.Line{}) || a.lastFirst >= 0 || a.unbegun() > 0
}

// used is the share of an endpoint that is in use.
func (b *Book) used(now time.Time, a *account) float64 {
	used := a.slow(b.seconds(now), crowdedYielding)
	if n := b.config.Limits.Concurrency; n > 0 {
		used = max(used, float64(a.inflight)/float64(n))
	}
	if kv := a.scraped.KVUsage; kv.Known && a.inflight > 0 && a.scraped.believed(now, b.config.ScrapeStale) {
		used = max(used, kv.V)
	}
	return min(used, 1)
}

// Room reports whether some endpoint has room. If that is an ejected one, it is a bid's
// to say whether a request may go there: that depends on who else could take it.
func (r *Round) Room() bool { return r.rooms > 0 }

// Opens is how long until some endpoint may have room, if nothing happens before.
// Negative: there is none.
func (r *Round) Opens() time.Duration {
	if math.IsInf(r.opens, 1) {
		return -1
	}
	return span(max(r.opens, 0))
}

// Load is how busy the pool was when the round began.
func (r *Round) Load() Load { return r.load }

// Bid chooses an endpoint for a request, given the rest of the round. Where
// waiting for a busy one can be better than any with room, that one is chosen.
// Explain says the same of a round that has just begun.
func (r *Round) Bid(ask *Ask) Bid {
	b, d := r.book, &r.book.decision
	d.late = true
	r.choice = b.choose(r.now, r.pool, ask)
	d.late = false
	c := &r.choice
	if c.endpoint == nil {
		return Bid{None: !d.full, Pause: c.pause, Target: b.ttft(ask), Output: b.lengths.Mean(), Fresh: ask.Prompt.N}
	}
	a, at := c.account, b.seconds(r.now)
	ahead, cached := a.ahead(at), c.candidate.Cached
	fresh, own := ask.Prompt.N, 0.0
	if ask.Prompt.N > 0 {
		fresh = ask.Prompt.N - cached
		own = a.rate.Seconds(work(ask.Prompt.N, cached))
	}
	prefill := max(own-a.rate.Intercept, 0)
	idle, roomy := a.inflight > 0 && r.idle(), b.roomFor(a, ask) == roomy
	c.early = idle && !roomy
	bid := Bid{
		Endpoint: c.endpoint.ID, Open: idle || roomy, Idle: idle,
		Ahead: span(ahead), Own: span(own), Prefill: span(prefill), Target: b.ttft(ask), Fresh: max(fresh, 0), Output: b.lengths.Mean(),
	}
	if s := c.candidate.Stalls; s != nil && c.scored > 0 {
		bid.Stalled = max(s.At(ahead+prefill)-s.At(ahead), 0)
	}
	return bid
}

// idle reports whether one of those that the last choice was made from has nothing
// to do, for other gateways neither. Nobody waits while that is so: not for the engine
// that suits it better, which gets the request ahead of its turn then, and not to spare
// its streams.
func (r *Round) idle() bool {
	d := &r.book.decision
	for _, i := range d.chosen[:r.choice.scored] {
		if a := r.book.seated.accounts[d.seats[i]]; a.inflight == 0 && r.book.elsewhereWhole(r.now, a) == 0 {
			return true
		}
	}
	return false
}

// Take places the request of the last Bid, which was open, and counts it there.
func (r *Round) Take(ask *Ask) *Reservation {
	b, a := r.book, r.choice.account
	if !ask.Retry {
		b.budget.first(r.now)
	}
	place := b.reserve(r.now, ask, &r.choice)
	was := a.room
	if b.judge(r.now, a); was == roomy && a.room != roomy {
		r.rooms--
	}
	if a.roomYielding == busy {
		r.opens = min(r.opens, a.opens)
	}
	return place
}

// Pass leaves the request of the last Bid waiting. For the rest of the round its
// work counts where it would have gone.
func (r *Round) Pass(ask *Ask) {
	a := r.choice.account
	if a == nil || ask.Prompt.N <= 0 {
		return
	}
	a.passed += a.rate.PerToken * work(ask.Prompt.N, r.choice.candidate.Cached)
}

func span(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }
