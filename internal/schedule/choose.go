// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"math/bits"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/prefix"
	"github.com/headgate/headgate/internal/schedule/cost"
	"github.com/headgate/headgate/plugin"
)

// Of a large pool not everybody is scored in full.
const (
	holdersMax = 16 // those that hold the longest part of the prompt
	idlestMax  = 32 // and the least loaded
	scoreAll   = holdersMax + idlestMax
)

// Tables of stalls are made anew at so many streams a second, and at most so
// many at once: what is left over is served from a table that is a little older.
const (
	streamRate  = 200_000
	streamBurst = 2048
)

// decision is the scratch of one choice. It belongs to the book and is kept from
// one choice to the next.
type decision struct {
	late       bool    // made for a request that may wait for an endpoint
	full       bool    // one of the best standing was left out because it has no room
	seats      []int32 // endpoints that could take the request, by their place in the pool
	loads      []int32 // of the seats
	class      rank    // of the seats; all are of one
	listed     struct{ seats, loads []int32 }
	chosen     []int32 // seats to be scored; of the candidates that are left, after filters
	lookup     prefix.Lookup
	rate       cost.Rate // of the pool as a whole
	at         float64   // now, in the book's seconds
	request    plugin.Request
	candidates []plugin.Candidate
	totals     []float64
	scores     []float64
}

// choice is what a choice came to.
type choice struct {
	endpoint    *inference.Endpoint
	account     *account
	rank        rank
	seat        int32
	by          *Profile         // that decided, of the chain; nil under least load
	candidate   plugin.Candidate // as it was scored; zero under least load
	candidateAt int              // among those that were scored
	scored      int              // how many were
	pause       time.Duration    // nobody may be used for so long
}

// refused is the error of a choice without an endpoint: NoEndpoints where there is
// none to choose, or Shed where every engine asked for a pause.
func (c *choice) refused(pool *fleet.Pool) *inference.Error {
	if c.pause > 0 {
		err := inference.Errorf(inference.Shed, "every engine of the pool asked for a pause")
		err.RetryAfter = c.pause
		return err
	}
	return inference.Errorf(inference.NoEndpoints, "no endpoint of pool %q can take the request", pool.Name)
}

// choose finds the best endpoint. Standing comes before everything else; an
// ejected endpoint is still used when no better one is left, because a request
// refused for want of an endpoint helps nobody.
func (b *Book) choose(now time.Time, pool *fleet.Pool, ask *Ask) (c choice) {
	d := &b.decision
	c.pause = b.eligible(now, pool, ask)
	if len(d.seats) == 0 {
		return c
	}
	c.pause = 0
	if p := b.config.Profile; p != nil && ask.Prompt.N > 0 {
		b.candidates(now, pool, ask, p)
		by, n := p.filter(&d.request, d.candidates, d.chosen)
		d.totals, d.scores = slices.Grow(d.totals[:0], n)[:n], slices.Grow(d.scores[:0], n)[:n]
		best := by.pick(&d.request, d.candidates[:n], d.totals, d.scores)
		c.by, c.candidate, c.candidateAt, c.scored = by, d.candidates[best], best, n
		c.seat = d.chosen[best]
	} else {
		c.seat = b.leastLoad(d.loads)
	}
	at := d.seats[c.seat]
	c.endpoint, c.account, c.rank = &pool.Endpoints[at], b.seated.accounts[at], d.class
	c.rank.load = int(d.loads[c.seat])
	return c
}

func (b *Book) leastLoad(loads []int32) int32 {
	best, ties := 0, 1
	for i := 1; i < len(loads); i++ {
		switch load := loads[i]; {
		case load < loads[best]:
			best, ties = i, 1
		case load == loads[best]:
			// Reservoir sampling: each of n equals wins with probability 1/n.
			if ties++; b.rnd.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return int32(best)
}

// eligible lists the endpoints of the best standing, or returns how long until
// one that asked for a pause may be used again.
func (b *Book) eligible(now time.Time, pool *fleet.Pool, ask *Ask) (pause time.Duration) {
	d, s := &b.decision, b.seats(pool)
	may := b.serving(ask.Model)
	simple := len(ask.Exclude) == 0 && ask.PreferRevision == ""
	d.class, d.full = rank{standing: good}, false
	if simple && may == nil && s.odds == 0 && !d.late {
		d.seats, d.loads = s.everybody, s.loads
		return 0
	}
	believe := b.believeProbes(s.accounts)
	d.seats, d.loads = d.listed.seats[:0], d.listed.loads[:0]
	found := false // somebody of the class, with room or without
	idle := false  // one of the seats has nothing to do
	for i, load := range s.loads {
		a, serves := s.accounts[i], may == nil || may[i]
		r := rank{standing: good}
		if !simple || !serves || s.odd[i] {
			e := &pool.Endpoints[i]
			switch a.why(now, ask, e, believe, serves) {
			case "":
			case paused:
				if wait := a.heldUntil.Sub(now); pause == 0 || wait < pause {
					pause = wait
				}
				continue
			default:
				continue
			}
			a.past(now)
			b.touch(a)
			turn := a.turn
			if !d.late {
				turn = a.drawTurn(now, b.rnd)
			}
			r = a.rank(now, ask, e, b.elsewhere(now, a), turn)
			load = int32(r.load)
		}
		switch c := r.compareClass(d.class); {
		case !found || c < 0:
			d.seats, d.loads, d.class, found, d.full = d.seats[:0], d.loads[:0], r, true, false
			idle = false
		case c > 0:
			continue
		}
		if b.noRoom(a, ask) {
			d.full = true
			continue
		}
		d.seats, d.loads = append(d.seats, int32(i)), append(d.loads, load)
		idle = idle || a.inflight == 0
	}
	if d.late && idle {
		b.dropBusy()
	}
	d.listed.seats, d.listed.loads = d.seats, d.loads
	return pause
}

// dropBusy leaves those with room among the seats: nobody waits for a busy endpoint
// while another has nothing to do, even if its own first output would come sooner.
// Nobody has to wonder why an engine idles. On engines of one speed it costs no goodput
// in the laboratory; docs/routing.md says what it costs on those of two.
func (b *Book) dropBusy() {
	d, n := &b.decision, 0
	for k, i := range d.seats {
		if b.seated.accounts[i].room == roomy {
			d.seats[n], d.loads[n] = i, d.loads[k]
			n++
		}
	}
	d.full = d.full || n < len(d.seats)
	d.seats, d.loads = d.seats[:n], d.loads[:n]
}

// noRoom reports whether an endpoint is out of a round's choice for want of room.
// A busy one stays in it where the profile can tell what waiting for it costs.
func (b *Book) noRoom(a *account, ask *Ask) bool {
	if !b.decision.late || a.room == roomy {
		return false
	}
	p := b.config.Profile
	return a.room == full || p == nil || !p.patient || ask.Prompt.N <= 0
}

// candidates fills in what plugins see of the endpoints that are worth scoring.
func (b *Book) candidates(now time.Time, pool *fleet.Pool, ask *Ask, p *Profile) {
	d := &b.decision
	d.request = plugin.Request{
		Now: now, Model: ask.Model, Adapter: ask.Adapter, Session: ask.Session, Retry: ask.Retry,
		Prompt: ask.Prompt, Output: b.lengths.Mean(), TTFT: b.config.TTFT, TPOT: b.config.TPOT, Rand: b.rnd,
	}
	if ask.TTFT > 0 {
		d.request.TTFT = ask.TTFT
	}
	if !ask.Arrived.IsZero() {
		d.request.Waited = max(now.Sub(ask.Arrived), 0)
	}
	d.rate, d.at = b.line.Rate(cost.Prior), b.seconds(now)
	d.lookup.Reset(b.index, ask.Keys)
	accounts := b.seated.accounts
	d.chosen = d.chosen[:0]
	// Filters look at everybody; where the pool is small, scorers do too.
	if len(d.seats) <= scoreAll || p.filtering() {
		for i := range d.seats {
			d.chosen = append(d.chosen, int32(i))
		}
	} else {
		b.shortlist(ask)
	}
	n := len(d.chosen)
	d.candidates = slices.Grow(d.candidates[:0], n)[:n]
	for k, i := range d.chosen {
		at := d.seats[i]
		b.fill(&d.candidates[k], &pool.Endpoints[at], accounts[at], ask)
	}
}

// fill says what plugins see of one endpoint.
func (b *Book) fill(c *plugin.Candidate, e *inference.Endpoint, a *account, ask *Ask) {
	d := &b.decision
	at := d.at
	if at >= a.wholeDue {
		a.settle(at)
	}
	a.settleRate(d.rate)
	// Field by field: a literal would be made aside and copied.
	c.Endpoint = e
	c.InFlight, c.Ghosts, c.Cached = a.inflight, len(a.ghosts), b.cachedOn(e, a, ask)
	c.PerToken, c.Intercept, c.Ahead = a.rate.PerToken, a.rate.Intercept, a.ahead(at)
	c.Waiting, c.Context, c.Stalls = a.waiting, a.context, nil
	c.Queued, c.Running, c.KVUsage, c.Others = plugin.Value{}, plugin.Value{}, plugin.Value{}, 0
	c.Resident = ask.Adapter != "" && a.adapters.has(ask.Adapter, at)
	b.fillScraped(c, d.request.Now, a)
	if d.late {
		c.Ahead += a.passed
	}
	if c.Ghosts > 0 {
		// A quick error keeps its place as a prompt like this one would.
		c.Ahead += float64(c.Ghosts) * max(a.rate.Seconds(float64(ask.Prompt.N)), ghostWeight)
	}
	if b.config.TPOT > 0 {
		if n := len(a.running) + len(a.pending); n > 0 {
			if a.stale(at) && b.mayRefresh(at, n) {
				b.streamBudget -= float64(a.table(at, b.config.TPOT.Seconds(), b.lengths))
			}
			c.Stalls = &a.stalls
		}
	}
}

// ghostWeight is the least that a quick error counts for, in seconds.
const ghostWeight = 0.1

// mayRefresh reports whether there is time to make a table of so many streams.
func (b *Book) mayRefresh(now float64, streams int) bool {
	b.streamBudget = min(b.streamBudget+max(now-b.streamsAt, 0)*streamRate, streamBurst)
	b.streamsAt = now
	return b.streamBudget >= float64(min(streams, streamBurst))
}

// shortlist chooses the seats to be scored: the least loaded and the holders of
// the longest prefixes.
func (b *Book) shortlist(ask *Ask) {
	d := &b.decision
	// Loads are sorted into a few steps, which is all that finding the least of
	// them takes. Where loads are far apart a step is wider than one.
	const steps = 64
	least, most := d.loads[0], d.loads[0]
	for _, load := range d.loads {
		least, most = min(least, load), max(most, load)
	}
	shift := max(bits.Len32(uint32(most-least))-bits.Len32(steps-1), 0)
	var count [steps]int32
	for _, load := range d.loads {
		count[uint32(load-least)>>shift&(steps-1)]++
	}
	last, room := int32(0), int32(idlestMax) // all seats below step last are chosen, and as many on it as there is room for
	for ; room > count[last]; last++ {
		room -= count[last]
	}
	begin := b.rnd.IntN(len(d.seats)) // so that among equals it is not always the same ones
	for _, part := range [2][2]int{{begin, len(d.seats)}, {0, begin}} {
		for i := part[0]; i < part[1]; i++ {
			step := (d.loads[i] - least) >> shift
			if step > last {
				continue
			}
			if step == last {
				if room == 0 {
					continue
				}
				room--
			}
			d.chosen = append(d.chosen, int32(i))
		}
	}
	idlest, held := len(d.chosen), len(d.chosen)
	hold := func(a *account) {
		i, found := b.seat(a)
		if !found {
			return
		}
		step := (d.loads[i] - least) >> shift
		if step == last && !slices.Contains(d.chosen[:idlest], i) || step > last && !slices.Contains(d.chosen[idlest:held], i) {
			d.chosen = append(d.chosen, i)
		}
	}
	for i := range min(len(ask.Held), holdersMax) {
		if a := b.accounts[ask.Held[i].Endpoint]; a != nil {
			hold(a)
		}
	}
	held = len(d.chosen)
	for _, m := range d.lookup.Longest(holdersMax) {
		hold(b.bySlot[m.Slot])
	}
}

// seat finds an account among the seats, which are in the pool's order.
func (b *Book) seat(a *account) (at int32, found bool) {
	s := &b.seated
	if a.at >= len(s.accounts) || s.accounts[a.at] != a {
		return 0, false
	}
	if len(b.decision.seats) == len(s.accounts) {
		return int32(a.at), true
	}
	i, found := slices.BinarySearch(b.decision.seats, int32(a.at))
	return int32(i), found
}

// cachedOn is how many tokens of the prompt an endpoint's engine has cached, as
// far as is known: what it took, and what was sent to it and it has not refused.
func (b *Book) cachedOn(e *inference.Endpoint, a *account, ask *Ask) int {
	for i := range ask.Held {
		if h := &ask.Held[i]; h.Endpoint == e.ID {
			return max(min(h.Tokens, ask.Prompt.N-1), 0)
		}
	}
	if len(ask.Keys) == 0 || ask.PromptBytes <= 0 {
		return 0
	}
	blocks := 0
	if a.cached && b.decision.lookup.Holds(a.slot) {
		blocks = b.decision.lookup.Matched(a.slot)
	}
	if a.untaken {
		for _, r := range a.pending {
			if !r.taken {
				blocks = max(blocks, common(r.keys, ask.Keys))
			}
		}
	}
	if blocks == 0 {
		return 0
	}
	tokens := int(float64(ask.Prompt.N) * float64(blocks*prefix.BlockBytes) / float64(ask.PromptBytes))
	return max(min(tokens, ask.Prompt.N-1), 0)
}

// common is how many leading keys two prompts share. Keys are chained, so the
// last equal ones are found by bisection.
func common(a, b []uint64) int {
	lo, hi := 0, min(len(a), len(b))
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); a[mid] == b[mid] {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// seconds is a time as the book's traffic knows it.
func (b *Book) seconds(now time.Time) float64 {
	if b.epoch.IsZero() {
		b.epoch = now
	}
	return now.Sub(b.epoch).Seconds()
}

// work is what a prefill costs, in tokens of an empty engine.
func work(prompt, cached int) float64 {
	return cost.Default.Work(max(float64(prompt-cached), 1), float64(cached))
}
