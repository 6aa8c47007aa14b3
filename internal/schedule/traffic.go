// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/headgate/headgate/internal/prefix"
	"github.com/headgate/headgate/internal/schedule/cost"
)

// traffic is what the requests on one endpoint teach about its engine: how fast
// it prefills, what it has yet to do, and how its streams do against their
// target. Times are seconds since the book's epoch.
type traffic struct {
	// What every decision reads comes first and stays together: where a thousand
	// endpoints are known, each line of memory is a wait of its own.

	rate        cost.Rate                    // that is used: its own, or the pool's
	own         cost.Rate                    // of line
	seen        int                          // observations
	work        float64                      // sum of pending's
	waiting     float64                      // sum of its prompts' fresh tokens
	context     float64                      // sum of the prompts of running
	head        struct{ work, sent float64 } // of the oldest of pending; sent, or when the one before it was done
	wholeDue    float64                      // when that must be done, if its answer comes whole
	lastFirst   float64                      // when the last first output came
	stallsAt    float64                      // when the table was made
	pending     []*Reservation               // without a first output, in order of dispatch
	running     []*Reservation               // with one
	targets     int                          // streams of both that have a target per token
	slot        prefix.Slot
	cached      bool // slot is valid
	untaken     bool // some of pending has keys that its engine has not taken
	stallsKnown bool
	quiet       bool // none was pending since the table was made
	stalls      cost.Table

	line      cost.Line
	batchWork float64        // work of the first outputs that came at lastFirst
	batchTook float64        // and how long they took; 0: nothing to observe
	settled   float64        // when the last prompt was computed whose answer comes whole, as expected
	computed  []*Reservation // such prompts, until they are learned
	gap       float64        // time per token while no prefill is pending
	crowd     crowd
	capacity  int // in blocks of the index

	adapters adapters
}

const (
	gapAtStart   = 0.02
	sameMoment   = 0.003 // first outputs this close were computed in one step
	stallsFresh  = 0.02  // how old a table of stalls may get, if there is time
	overdue      = 3     // times its predicted time until an engine is suspect
	overdueFloor = 0.5
)

func newTraffic() traffic {
	return traffic{rate: cost.Prior, own: cost.Prior, lastFirst: -1, settled: -1, gap: gapAtStart, capacity: defaultBlocks, wholeDue: math.Inf(1)}
}

// ahead is the prefill in seconds that the engine has yet to do. What the oldest
// prompt had of it already is taken off; an engine that is long overdue with it
// is taken to need as long again.
func (t *traffic) ahead(now float64) float64 {
	if len(t.pending) == 0 {
		return 0
	}
	first := t.rate.Seconds(t.head.work)
	done := now - max(t.lastFirst, t.head.sent)
	left := t.rate.Seconds(t.work) - min(done, 0.9*first)
	if done > overdue*first+overdueFloor {
		left += done
	}
	return max(left, 0)
}

// An engine counts as its pool's average until it was seen some times and is
// plainly faster or slower. What chance makes of equal engines would otherwise
// send every prompt that nobody has cached to the one that looks quickest, and
// leave the caches of the others unused (SCH-1).
const (
	seenMin  = 4
	alikeMax = 1.12
	alikeFor = 2000 // tokens of work at which rates are compared
)

// settleRate chooses the rate that the engine is judged by.
func (t *traffic) settleRate(pool cost.Rate) {
	t.rate = pool
	if t.seen < seenMin {
		return
	}
	if own, all := t.own.Seconds(alikeFor), pool.Seconds(alikeFor); own > all*alikeMax || all > own*alikeMax {
		t.rate = t.own
	}
}

// settle moves prompts of answers that come whole out of the way once they
// must have been computed: nobody will tell when they were.
func (t *traffic) settle(now float64) {
	for now >= t.wholeDue {
		t.settled = t.wholeDue // what comes next was not computed before
		t.computed = append(t.computed, t.pending[0])
		t.begin(t.pending[0], t.wholeDue, nil)
	}
}

// renew notes what decisions ask of pending: to look at the reservations
// themselves, all over the memory, took a sixth of one.
func (t *traffic) renew() {
	t.untaken, t.wholeDue = false, math.Inf(1)
	for _, r := range t.pending {
		t.untaken = t.untaken || !r.taken && len(r.keys) > 0
	}
	if len(t.pending) > 0 {
		oldest := t.pending[0]
		t.head.work, t.head.sent = oldest.work, max(oldest.sent, t.settled)
		if !oldest.streams {
			t.wholeDue = oldest.due
		}
	}
}

func (t *traffic) dispatch(r *Reservation) {
	r.due = r.sent + t.ahead(r.sent) + t.rate.Seconds(r.work)
	r.behindWhole = slices.ContainsFunc(t.pending, func(p *Reservation) bool { return !p.streams })
	t.pending = append(t.pending, r)
	t.renew()
	t.work += r.work
	t.waiting += r.fresh
	if r.targeted() {
		t.targets++
	}
	t.quiet, t.stallsKnown = false, false
	t.crowd.quiet.broken = true
}

// begin notes the first output of a pending reservation. What it teaches about
// the engine teaches something about the pool too.
func (t *traffic) begin(r *Reservation, now float64, pool *cost.Line) {
	if !t.unqueue(r) {
		return
	}
	from := max(t.lastFirst, r.sent)
	if r.streams && pool != nil {
		if now-t.lastFirst > sameMoment {
			if t.batchTook > 0 {
				t.line.Observe(t.batchWork, t.batchTook)
				pool.Observe(t.batchWork, t.batchTook)
				t.seen++
				t.own = t.line.Rate(pool.Rate(cost.Prior))
			}
			t.batchWork, t.batchTook = 0, now-from
		}
		if r.behindWhole {
			t.batchTook = 0 // nobody tells how much of that time was the other prompt's
		}
		t.batchWork += r.work
		t.lastFirst = now
	}
	r.first, r.counted = now, 1
	r.begun = true
	t.running = append(t.running, r)
	t.context += r.prompt
}

func (t *traffic) unqueue(r *Reservation) bool {
	at := slices.Index(t.pending, r)
	if at < 0 {
		return false
	}
	t.pending = slices.Delete(t.pending, at, at+1)
	t.renew()
	t.work -= r.work
	t.waiting -= r.fresh
	if len(t.pending) == 0 {
		t.work, t.waiting = 0, 0 // no sum of roundings stays
	}
	return true
}

// end forgets a reservation, wherever it is.
func (t *traffic) end(r *Reservation) {
	if !r.streams {
		t.settled = max(t.settled, r.ended) // its prompt was computed by then
	}
	if !t.unqueue(r) && !t.retire(r) {
		return
	}
	if at := slices.Index(t.computed, r); at >= 0 {
		t.computed = slices.Delete(t.computed, at, at+1)
	}
	if r.targeted() {
		t.targets--
	}
}

// retire takes a reservation out of running, if it is there.
func (t *traffic) retire(r *Reservation) bool {
	at := slices.Index(t.running, r)
	if at < 0 {
		return false
	}
	last := len(t.running) - 1
	t.running[at] = t.running[last]
	t.running[last] = nil
	t.running = t.running[:last]
	t.context -= r.prompt
	if last == 0 {
		t.context = 0
	}
	return true
}

// table makes the table of stalls and returns how many streams that took.
func (t *traffic) table(now float64, lengths *cost.Lengths) int {
	t.pace(now)
	t.stalls.Reset()
	t.stallsAt, t.stallsKnown = now, true
	for _, r := range t.running {
		if r.targeted() {
			t.stalls.Add(now, cost.Stream{First: r.first, Tokens: int(r.tokens.Load())}, r.tpot, t.gap, lengths)
		}
	}
	// A prompt that waits becomes a stream before a prefill behind it is done, and
	// has no slack at all when it does.
	if len(t.pending) > 0 {
		at := now + t.ahead(now) - t.rate.PerToken*t.work
		for _, r := range t.pending {
			at += t.rate.PerToken * r.work
			if r.targeted() {
				t.stalls.Add(now, cost.Stream{First: max(at, now), Tokens: 1}, r.tpot, t.gap, lengths)
			}
		}
	}
	return len(t.running) + len(t.pending)
}

// pace learns the engine's time per token from how far its streams came since
// the last look, if no prefill was pending meanwhile.
func (t *traffic) pace(now float64) {
	since := now - t.stallsAt
	sum, n := 0, 0
	for _, r := range t.running {
		k := int(r.tokens.Load())
		if r.looked && k > r.seen {
			sum += k - r.seen
			n++
		}
		r.seen, r.looked = k, true
	}
	if t.quiet && n > 0 && since > 0 {
		// A few tokens between two looks are a coarse clock, so short looks weigh little.
		t.gap += min(since, 1) * (since*float64(n)/float64(sum) - t.gap)
	}
	t.quiet = len(t.pending) == 0
}

// crowd is how fast the streams of an engine get on, whatever else it does
// meanwhile. First outputs don't tell: an engine that puts prefill first begins
// every answer in time, and when it has too many ends none in time.
type crowd struct {
	at              float64 // of the last look
	seconds, tokens float64 // of streams with a target, old ones fading
	due             float64 // seconds that these tokens may take

	quiet struct {
		broken          bool    // prefill came since the last look
		seconds, tokens float64 // since there was no prefill
	}
	best float64 // least time per token without prefill; 0: not known
}

const (
	crowdLook  = 0.1 // seconds between two looks
	crowdFade  = 2.0 // seconds in which what was seen loses two thirds of its weight
	crowdLeast = 4   // tokens from which a pace is known
)

// slow is how near the streams of late are to being crowded at so many times their
// targets per token: 1 is the limit, and 0 where nothing is known.
func (t *traffic) slow(now, crowded float64) float64 {
	c := &t.crowd
	if t.targets == 0 {
		return 0
	}
	if len(t.running) == 0 {
		c.at, c.seconds, c.tokens, c.due = now, 0, 0, 0
		return 0
	}
	if now-c.at >= crowdLook {
		t.look(now)
	}
	if c.tokens < crowdLeast {
		return 0
	}
	return c.seconds / max(crowded*c.due, crowdBest*c.best*c.tokens)
}

// heldUp is the share of its time in which a stream waits for its client to read
// from which its pace says nothing of the engine.
const heldUp = 0.1

// look sees how far the streams came since the last look.
func (t *traffic) look(now float64) {
	c := &t.crowd
	keep := math.Exp(-(now - c.at) / crowdFade)
	c.seconds, c.tokens, c.due = keep*c.seconds, keep*c.tokens, keep*c.due
	seconds, tokens := 0.0, 0.0 // of all
	for _, r := range t.running {
		if !r.streams {
			continue
		}
		k := int(r.tokens.Load())
		took, made := now-max(c.at, r.first), float64(max(k-r.counted, 0))
		writing := r.spentWriting(now)
		held := writing-r.writingSeen > heldUp*took
		r.counted, r.writingSeen = k, writing
		if held {
			continue
		}
		seconds, tokens = seconds+took, tokens+made
		if r.tpot > 0 {
			c.seconds, c.tokens, c.due = c.seconds+took, c.tokens+made, c.due+made*r.tpot
		}
	}
	c.at = now
	c.rest(seconds, tokens)
	c.quiet.broken = len(t.pending) > 0
}

// rest learns how fast the engine is when it does nothing but generate.
func (c *crowd) rest(seconds, tokens float64) {
	q := &c.quiet
	if q.broken {
		q.seconds, q.tokens = 0, 0
		return
	}
	if q.seconds, q.tokens = q.seconds+seconds, q.tokens+tokens; q.tokens >= crowdLeast {
		if pace := q.seconds / q.tokens; c.best == 0 || pace < c.best {
			c.best = pace
		}
		q.seconds, q.tokens = 0, 0
	}
}

// stale reports whether the table should be made anew.
func (t *traffic) stale(now float64) bool {
	return !t.stallsKnown || now-t.stallsAt > stallsFresh
}

// progress is what a reservation's traffic is known by. The book's lock guards
// all but tokens.
type progress struct {
	streams     bool
	tpot        float64 // target per token; 0: none
	prompt      float64 // tokens
	fresh       float64 // of them, not cached as far as was known
	work        float64
	sent        float64
	due         float64
	first       float64
	ended       float64 // when all of the answer was there; 0: it is not
	begun       bool
	behindWhole bool // when it was sent, a prompt was pending whose answer comes whole
	taken       bool // accepted by the engine
	hashed      bool // its cached part was predicted
	keys        []uint64
	tokens      atomic.Int64
	seen        int
	looked      bool
	counted     int // tokens, at the last look at the crowd

	// Time that goes into writing to the client.
	writingSince atomic.Int64 // in ns of the book's time and 1 more; 0: nothing is being written
	writingSpent atomic.Int64 // ns, on what was written before
	writingSeen  float64      // seconds of both, at the last look at the crowd
}

// spentWriting is how many seconds went into writing to the client.
func (p *progress) spentWriting(now float64) float64 {
	spent := float64(p.writingSpent.Load()) / float64(time.Second)
	if began := p.writingSince.Load(); began != 0 {
		spent += max(now-float64(began-1)/float64(time.Second), 0)
	}
	return spent
}

// targeted reports whether it is a stream with a target per token.
func (p *progress) targeted() bool { return p.streams && p.tpot > 0 }

// adapters are those used lately, the newest last. An engine's own list shows
// activity and not residence (SCH-9), so recent use is the better witness.
type adapters struct {
	names []string
	used  []float64
	slots int // how many the engine keeps loaded; 0: not known
}

const (
	adaptersMax  = 64
	adapterStays = 600.0 // seconds without use after which it counts as gone
)

func (a *adapters) use(name string, now float64) {
	if name == "" {
		return
	}
	if at := slices.Index(a.names, name); at >= 0 {
		a.names, a.used = slices.Delete(a.names, at, at+1), slices.Delete(a.used, at, at+1)
	}
	if len(a.names) >= adaptersMax {
		a.names, a.used = slices.Delete(a.names, 0, 1), slices.Delete(a.used, 0, 1)
	}
	a.names, a.used = append(a.names, name), append(a.used, now)
}

func (a *adapters) has(name string, now float64) bool {
	at := slices.Index(a.names, name)
	if a.slots > 0 && at < len(a.names)-a.slots {
		return false // others have taken its place since
	}
	return at >= 0 && now-a.used[at] <= adapterStays
}
