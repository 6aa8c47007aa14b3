// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"cmp"
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
	seats      []int32 // endpoints that could take the request, by their place in the pool; with filters, those that pass
	seatOf     []int32 // by place; of one that is not among the seats it says nothing
	class      rank    // of the seats; all are of one
	listed     struct{ seats, seatOf []int32 }
	chosen     []int32 // seats to be scored, beside candidates
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
	load        int // in requests, as endpoints are compared by it
	seat        int32
	by          *Profile         // that decided, of the chain; nil under least load without filters
	able        int              // how many its filters looked at; 0 where there are none
	passed      int              // and how many they left, which come first among the candidates
	candidate   plugin.Candidate // as it was scored; zero under least load
	candidateAt int              // among those that were scored
	scored      int              // how many were
	early       bool             // it has no room, and gets the request all the same
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

// choose finds the best endpoint. Filters come first, so that who passes them is not
// given up for others because of a failure or for want of room. Then standing comes
// before everything else; an ejected endpoint is still used when no better one is
// left, because a request refused for want of an endpoint helps nobody.
func (b *Book) choose(now time.Time, pool *fleet.Pool, ask *Ask) (c choice) {
	d, p := &b.decision, b.config.Profile
	filters := p != nil && p.Filters()
	if filters {
		b.passing(now, pool, ask, &c)
	} else {
		c.pause = b.eligible(now, pool, ask)
	}
	if len(d.seats) == 0 {
		return c
	}
	c.pause = 0
	if p != nil && ask.Prompt.N > 0 {
		if !filters {
			c.by = p
			b.candidates(now, pool, ask)
		}
		n := len(d.chosen)
		d.totals, d.scores = slices.Grow(d.totals[:0], n)[:n], slices.Grow(d.scores[:0], n)[:n]
		best := c.by.pick(&d.request, d.candidates[:n], d.totals, d.scores)
		c.candidate, c.candidateAt, c.scored = d.candidates[best], best, n
		c.seat = d.chosen[best]
	} else {
		c.seat = b.leastLoad()
	}
	at := d.seats[c.seat]
	c.endpoint, c.account, c.rank = &pool.Endpoints[at], b.seated.accounts[at], d.class
	c.load = int(b.seated.loads[at])
	return c
}

// leastLoad is a seat of the least load.
func (b *Book) leastLoad() (best int32) {
	seats, loads := b.decision.seats, b.seated.loads
	ties := 1
	for i := 1; i < len(seats); i++ {
		switch load, least := loads[seats[i]], loads[seats[best]]; {
		case load < least:
			best, ties = int32(i), 1
		case load == least:
			// Reservoir sampling: each of n equals wins with probability 1/n.
			if ties++; b.rnd.IntN(ties) == 0 {
				best = int32(i)
			}
		}
	}
	return best
}

// eligible lists the endpoints of the best standing, where there are no filters, or
// returns how long until one that asked for a pause may be used again.
func (b *Book) eligible(now time.Time, pool *fleet.Pool, ask *Ask) (pause time.Duration) {
	d, s := &b.decision, b.renewed(now, pool)
	may := b.serving(ask.Model)
	simple := len(ask.Exclude) == 0 && ask.PreferRevision == ""
	d.class, d.full = rank{standing: good}, false
	if simple && may == nil && s.odds == 0 && !d.late {
		d.seats, d.seatOf = s.everybody, s.everybody
		return 0
	}
	believe := b.believeProbes(s.accounts)
	n := len(s.accounts)
	d.seats, d.seatOf = slices.Grow(d.listed.seats[:0], n), slices.Grow(d.listed.seatOf[:0], n)[:n]
	d.listed.seats, d.listed.seatOf = d.seats, d.seatOf
	found := false // somebody of the class, with room or without
	for i, a := range s.accounts {
		serves := may == nil || may[i]
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
			r = a.rank(now, ask, e, turn)
		}
		switch c := r.compare(d.class); {
		case !found || c < 0:
			d.seats, d.class, found, d.full = d.seats[:0], r, true, false
		case c > 0:
			continue
		}
		if b.noRoom(a, ask, b.config.Profile) {
			d.full = true
			continue
		}
		d.seatOf[i] = int32(len(d.seats))
		d.seats = append(d.seats, int32(i))
	}
	return pause
}

// noRoom reports whether an endpoint is out of a round's choice for want of room.
// A busy one stays in it where the profile that decides can tell what waiting for it
// costs.
func (b *Book) noRoom(a *account, ask *Ask, by *Profile) bool {
	if !b.decision.late {
		return false
	}
	room := b.roomFor(a, ask)
	return room == full || room == busy && (by == nil || !by.patient || ask.Prompt.N <= 0)
}

// passing lists those of the best standing among the endpoints that pass the filters,
// with what plugins see of them. Filters look at everybody that can take the request
// at all, whatever its standing and room.
func (b *Book) passing(now time.Time, pool *fleet.Pool, ask *Ask, c *choice) {
	d, s := &b.decision, b.renewed(now, pool)
	may, believe := b.serving(ask.Model), b.believeProbes(s.accounts)
	d.chosen = d.chosen[:0] // by place, until it is known who takes a seat
	for i, a := range s.accounts {
		serves := may == nil || may[i]
		if len(ask.Exclude) == 0 && serves && !s.odd[i] {
			d.chosen = append(d.chosen, int32(i))
			continue
		}
		switch a.why(now, ask, &pool.Endpoints[i], believe, serves) {
		case "":
			a.past(now)
			b.touch(a)
			d.chosen = append(d.chosen, int32(i))
		case paused:
			if wait := a.heldUntil.Sub(now); c.pause == 0 || wait < c.pause {
				c.pause = wait
			}
		}
	}
	b.prepare(now, ask)
	n := len(d.chosen)
	d.candidates = slices.Grow(d.candidates[:0], n)[:n]
	for k, at := range d.chosen {
		b.fill(&d.candidates[k], &pool.Endpoints[at], s.accounts[at], ask)
	}
	c.able = n
	c.by, c.passed = b.config.Profile.filter(&d.request, d.candidates, d.chosen)
	b.narrow(now, pool, ask, c)
}

// narrow seats those of the best standing that have room, among the candidates that
// pass the filters.
func (b *Book) narrow(now time.Time, pool *fleet.Pool, ask *Ask, c *choice) {
	d, s := &b.decision, &b.seated
	d.class, d.full = rank{standing: good}, false
	kept := 0
	for k := range c.passed {
		at := d.chosen[k]
		a, r := s.accounts[at], rank{standing: good}
		if ask.PreferRevision != "" || s.odd[at] {
			turn := a.turn
			if !d.late {
				turn = a.drawTurn(now, b.rnd)
			}
			r = a.rank(now, ask, &pool.Endpoints[at], turn)
		}
		switch better := r.compare(d.class); {
		case k == 0 || better < 0:
			kept, d.class, d.full = 0, r, false
		case better > 0:
			continue
		}
		if b.noRoom(a, ask, c.by) {
			d.full = true
			continue
		}
		if kept < k {
			d.candidates[kept], d.candidates[k] = d.candidates[k], d.candidates[kept]
			d.chosen[kept], d.chosen[k] = at, d.chosen[kept]
		}
		kept++
	}
	d.seats = append(d.listed.seats[:0], d.chosen[:kept]...)
	d.listed.seats, d.chosen = d.seats, d.chosen[:kept]
	for k := range d.chosen {
		d.chosen[k] = int32(k)
	}
}

// prepare notes what plugins see of the request, and what fill goes by.
func (b *Book) prepare(now time.Time, ask *Ask) {
	d := &b.decision
	d.request = plugin.Request{
		Now: now, Model: ask.Model, Adapter: ask.Adapter, Session: ask.Session, Retry: ask.Retry,
		Prompt: ask.Prompt, Output: b.lengths.Mean(), TTFT: b.ttft(ask), TPOT: b.tpot(ask), Rand: b.rnd,
	}
	if !ask.Arrived.IsZero() {
		d.request.Waited = max(now.Sub(ask.Arrived), 0)
	}
	d.rate, d.at = b.line.Rate(cost.Prior), b.seconds(now)
	d.lookup.Reset(b.index, ask.Keys)
}

// candidates fills in what plugins see of the endpoints that are worth scoring, where
// there are no filters.
func (b *Book) candidates(now time.Time, pool *fleet.Pool, ask *Ask) {
	b.prepare(now, ask)
	d, accounts := &b.decision, b.seated.accounts
	d.chosen = d.chosen[:0]
	if len(d.seats) <= scoreAll {
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
	c.InFlight, c.Ghosts, c.Cached = a.inflight, len(a.ghosts), 0
	if a.untaken || len(ask.Held) > 0 || a.cached && d.lookup.Holds(a.slot) { // most hold nothing
		c.Cached = b.cachedOn(e, a, ask)
	}
	c.PerToken, c.Intercept, c.Ahead = a.rate.PerToken, a.rate.Intercept, a.ahead(at)
	c.Waiting, c.Context, c.Stalls = a.waiting, a.context, nil
	c.Queued, c.Running, c.KVUsage, c.Others = plugin.Value{}, plugin.Value{}, plugin.Value{}, 0
	c.Resident = ask.Adapter != "" && a.adapters.has(ask.Adapter, at)
	if !a.scraped.At.IsZero() { // its engine's metrics have said something
		b.fillScraped(c, d.request.Now, a)
	}
	if d.late {
		c.Ahead += a.passed
	}
	if c.Ghosts > 0 {
		// A quick error keeps its place as a prompt like this one would.
		c.Ahead += float64(c.Ghosts) * max(a.rate.Seconds(float64(ask.Prompt.N)), ghostWeight)
	}
	if a.targets > 0 {
		if a.stale(at) && b.mayRefresh(at, len(a.running)+len(a.pending)) {
			b.streamBudget -= float64(a.table(at, b.lengths))
		}
		c.Stalls = &a.stalls
	}
}

// target is the request's for its first output.
func (b *Book) target(ask *Ask) TTFT { return cmp.Or(ask.TTFT, b.config.TTFT) }

// ttft is how long its first output may take by that; 0: as long as it does.
func (b *Book) ttft(ask *Ask) time.Duration {
	target := b.target(ask)
	if target.Base <= 0 || target.Prefills <= 0 || ask.Prompt.N <= 0 {
		return target.Base
	}
	return target.Base + span(target.Prefills*b.line.Rate(cost.Prior).Seconds(work(ask.Prompt.N, 0)))
}

// tpot is how long each of its tokens may take.
func (b *Book) tpot(ask *Ask) time.Duration { return cmp.Or(ask.TPOT, b.config.TPOT) }

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
	d, loads := &b.decision, b.seated.loads
	most := b.chooseIdlest(idlestMax)
	idlest, held := len(d.chosen), len(d.chosen)
	hold := func(a *account) bool {
		if !b.seated.has(a) {
			return false
		}
		i, found := d.seat(int32(a.at))
		if !found {
			return false
		}
		load := loads[a.at]
		if load == most && !slices.Contains(d.chosen[:idlest], i) || load > most && !slices.Contains(d.chosen[idlest:held], i) {
			d.chosen = append(d.chosen, i)
		}
		return true
	}
	for i := range min(len(ask.Held), holdersMax) {
		if a := b.accounts[ask.Held[i].Endpoint]; a != nil {
			hold(a)
		}
	}
	held = len(d.chosen)
	holders := 0
	for slot := range d.lookup.Longest() {
		if hold(b.bySlot[slot]) {
			holders++
		}
		if holders == holdersMax {
			break
		}
	}
}

// chooseIdlest chooses up to n seats of the least load, and of equals not always the same
// ones. It returns the load of the last.
func (b *Book) chooseIdlest(n int) (most int32) {
	d, o := &b.decision, &b.seated.byLoad
	everybody := len(d.seats) == len(o.order) // each in the seat of its place
	for from := 0; n > 0 && from < len(o.order); {
		end := o.equals(from)
		equals, begin := o.order[from:end], 0
		if len(equals) > n {
			begin = b.rnd.IntN(len(equals))
		}
		most = o.loads[equals[0]]
		for _, part := range [2][]int32{equals[begin:], equals[:begin]} {
			if everybody {
				part = part[:min(len(part), n)]
				d.chosen = append(d.chosen, part...)
				n -= len(part)
				continue
			}
			for _, place := range part {
				if n == 0 {
					break
				}
				if i, found := d.seat(place); found {
					d.chosen = append(d.chosen, i)
					n--
				}
			}
		}
		from = end
	}
	return most
}

// seat finds a place of the pool among the seats.
func (d *decision) seat(place int32) (i int32, found bool) {
	i = d.seatOf[place]
	return i, int(i) < len(d.seats) && d.seats[i] == place
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
	if a.cached {
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
