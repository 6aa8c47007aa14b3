// SPDX-License-Identifier: Apache-2.0

// Package schedule chooses the endpoint of each attempt and keeps the fast
// facts that the choice rests on: what is in flight where, which endpoints
// failed lately, and how many retries the pool may still afford.
//
// The choice is least load, at random among equals. The package is a core: it
// is told the time and draws its randomness from the source it was given. It
// refuses to talk to engines and to decide whether a request may be repeated.
package schedule

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
)

// Config is what a pool's Book is told.
type Config struct {
	Retry     BudgetConfig
	RetryCost CostLimit

	// HealthPanic is the share of endpoints below which probes are not
	// believed: a pool that looks unhealthy as a whole is more likely probed
	// wrongly, and refusing everything helps nobody. 0: always believed.
	HealthPanic float64
}

// CostLimit is what one retry may cost. Zero fields are no limit.
type CostLimit struct {
	PromptTokens int           // prompt tokens to prefill again
	Prefill      time.Duration // estimated time to do so
}

// Book is the memory of one pool. It is safe for concurrent use.
type Book struct {
	config Config

	mu       sync.Mutex
	rnd      *rand.Rand
	accounts map[inference.EndpointID]*account

	unhealthy int // accounts that are not healthy
	budget    budget
	typical   time.Duration // learned length of a whole answer
	prefill   time.Duration // learned time to first output per prompt token
}

// typicalAtStart stands for the length of an answer until one was seen.
const typicalAtStart = time.Second

// NewBook makes an empty book. The random source breaks ties between equals.
func NewBook(config Config, rnd *rand.Rand) *Book {
	return &Book{
		config: config, rnd: rnd,
		accounts: map[inference.EndpointID]*account{},
		budget:   newBudget(config.Retry),
		typical:  typicalAtStart,
	}
}

// Configure replaces the limits; what the book has learned stays.
func (b *Book) Configure(config Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.config = config
	b.budget.configure(config.Retry)
}

// Ask is what a request needs of an endpoint.
type Ask struct {
	Model          string                 // as engines know it
	Exclude        []inference.EndpointID // failed for this request
	PreferRevision string                 // of the attempt before, "" for none
	Retry          bool                   // not a first attempt
}

// Reservation is one place on an endpoint, held until Release.
type Reservation struct {
	Endpoint inference.Endpoint
	rank     rank
	book     *Book
	once     sync.Once
}

// Why says in one line what the choice rested on.
func (r *Reservation) Why() string {
	why := fmt.Sprintf("load=%d standing=%s", r.rank.load, r.rank.standing)
	if r.rank.stranger {
		why += " revision=other"
	}
	return why
}

// Release gives the place back. Only the first call counts.
func (r *Reservation) Release() {
	r.once.Do(func() {
		r.book.mu.Lock()
		defer r.book.mu.Unlock()
		a := r.book.accounts[r.Endpoint.ID]
		a.inflight--
		if a.inflight == 0 && a.gone {
			delete(r.book.accounts, r.Endpoint.ID)
		}
	})
}

// Reserve chooses an endpoint of the pool and counts the request there, in one
// step. The error is NoEndpoints where there is none to choose, or Shed where
// every engine asked for a pause.
func (b *Book) Reserve(now time.Time, pool *fleet.Pool, ask Ask) (*Reservation, *inference.Error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !ask.Retry {
		b.budget.first(now)
	}
	best, r, pause := b.choose(now, pool, ask)
	switch {
	case best == nil && pause > 0:
		err := inference.Errorf(inference.Shed, "every engine of the pool asked for a pause")
		err.RetryAfter = pause
		return nil, err
	case best == nil:
		return nil, inference.Errorf(inference.NoEndpoints, "no endpoint of pool %q can take the request", pool.Name)
	}
	b.account(best.ID).inflight++
	return &Reservation{Endpoint: *best, rank: r, book: b}, nil
}

// choose returns the best endpoint and its rank, or nil and how long until one
// that asked for a pause may be used again. Standing comes before load; an ejected
// endpoint is still used when no better one is left, because a request refused
// for want of an endpoint helps nobody.
func (b *Book) choose(now time.Time, pool *fleet.Pool, ask Ask) (best *inference.Endpoint, bestRank rank, pause time.Duration) {
	ties := 0
	believe := b.believeProbes(pool)
	listed := b.listed(pool, ask.Model)
	for i := range pool.Endpoints {
		e := &pool.Endpoints[i]
		if slices.Contains(ask.Exclude, e.ID) {
			continue
		}
		a := b.account(e.ID)
		// Nothing answers at the address of one that is gone, so trying it
		// would only spend an attempt.
		if a.health == inference.Gone || a.health == inference.Unhealthy && believe {
			continue
		}
		if listed && a.models != nil && !a.models[ask.Model] {
			continue
		}
		if wait := a.heldUntil.Sub(now); wait > 0 {
			if pause == 0 || wait < pause {
				pause = wait
			}
			continue
		}
		r := rank{
			standing: a.standing(now, ask.Retry, b.rnd.Float64()),
			stranger: ask.PreferRevision != "" && e.Revision != ask.PreferRevision,
			load:     a.load(now),
		}
		switch c := r.compare(bestRank); {
		case best == nil || c < 0:
			best, bestRank, ties = e, r, 1
		case c == 0:
			// Reservoir sampling: each of n equals wins with probability 1/n.
			if ties++; b.rnd.IntN(ties) == 0 {
				best = e
			}
		}
	}
	return best, bestRank, pause
}

// believeProbes reports whether enough endpoints are healthy for the others'
// probes to count.
func (b *Book) believeProbes(pool *fleet.Pool) bool {
	if b.unhealthy == 0 {
		return true
	}
	healthy := 0
	for i := range pool.Endpoints {
		if b.account(pool.Endpoints[i].ID).health == inference.Healthy {
			healthy++
		}
	}
	return float64(healthy) >= b.config.HealthPanic*float64(len(pool.Endpoints))
}

// listed reports whether some endpoint of the pool is known to serve the model.
// Only then are those that list others left out: llama.cpp takes any name, and
// an adapter may be loaded without being listed yet.
func (b *Book) listed(pool *fleet.Pool, model string) bool {
	for i := range pool.Endpoints {
		if a := b.accounts[pool.Endpoints[i].ID]; a != nil && a.models[model] {
			return true
		}
	}
	return false
}

// SetModels notes which models an endpoint lists.
func (b *Book) SetModels(id inference.EndpointID, models []string) {
	set := make(map[string]bool, len(models))
	for _, m := range models {
		set[m] = true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.account(id).models = set
}

// SetHealth notes what probes say of an endpoint.
func (b *Book) SetHealth(id inference.EndpointID, h inference.Health) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.account(id)
	if (a.health == inference.Healthy) != (h == inference.Healthy) {
		if h == inference.Healthy {
			b.unhealthy--
		} else {
			b.unhealthy++
		}
	}
	a.health = h
}

// rank orders candidates; the least wins.
type rank struct {
	standing standing
	stranger bool // serves another revision than the attempt before
	load     int
}

func (r rank) compare(o rank) int {
	switch {
	case r.standing != o.standing:
		return int(r.standing - o.standing)
	case r.stranger != o.stranger:
		if r.stranger {
			return 1
		}
		return -1
	}
	return r.load - o.load
}

// Outcome is what the book learns from an attempt's end.
type Outcome struct {
	Endpoint   inference.EndpointID
	Verdict    inference.Verdict
	RetryAfter time.Duration // the engine's own, 0 if none
	Took       time.Duration // from dispatch to the end
}

// Report notes how an attempt ended.
func (b *Book) Report(now time.Time, o Outcome) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if o.Verdict == inference.Finished {
		b.typical = blend(b.typical, o.Took)
	}
	// What an endpoint did that has left the pool says nothing about another
	// that may come to its address.
	if a := b.accounts[o.Endpoint]; a != nil && !a.gone {
		a.report(now, o, b.typical)
	}
}

// FirstOutput notes how long a prompt took to its first output.
func (b *Book) FirstOutput(prompt inference.Tokens, took time.Duration) {
	// Short prompts say more about queues and networks than about prefill.
	if prompt.N < 256 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	perToken := took / time.Duration(prompt.N)
	if b.prefill == 0 {
		b.prefill = perToken
		return
	}
	b.prefill = blend(b.prefill, perToken)
}

// blend moves an average a tenth of the way towards a new value.
func blend(average, value time.Duration) time.Duration { return average + (value-average)/10 }

// Retry asks whether one retry of a prompt may be made, and spends it. The
// error is RetryTooExpensive, RetryBudgetExhausted, or NoEndpoints if nothing
// but excluded endpoints is left, in which case nothing is spent.
func (b *Book) Retry(now time.Time, pool *fleet.Pool, ask Ask, prompt inference.Tokens) *inference.Error {
	b.mu.Lock()
	defer b.mu.Unlock()
	limit, cost := b.config.RetryCost, b.prefill*time.Duration(prompt.N)
	switch {
	case limit.PromptTokens > 0 && prompt.N > limit.PromptTokens:
		return inference.Errorf(inference.RetryTooExpensive, "repeating a prompt of %d tokens is over the limit of %d", prompt.N, limit.PromptTokens)
	case limit.Prefill > 0 && cost > limit.Prefill:
		return inference.Errorf(inference.RetryTooExpensive, "repeating the prompt would take about %s, over the limit of %s", cost.Round(time.Millisecond), limit.Prefill)
	}
	if best, _, _ := b.choose(now, pool, ask); best == nil {
		return inference.Errorf(inference.NoEndpoints, "no other endpoint of pool %q can take the request", pool.Name)
	}
	if !b.budget.take(now) {
		return inference.Errorf(inference.RetryBudgetExhausted, "too many requests of the pool are being repeated already")
	}
	return nil
}

// Admit notes that an endpoint is in the pool, perhaps again at the address of
// one that left and still has requests in flight.
func (b *Book) Admit(id inference.EndpointID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.account(id).gone = false
}

// Forget drops an endpoint that has left the pool, once nothing is in flight
// there. A later endpoint at the same address starts with a clean record.
func (b *Book) Forget(id inference.EndpointID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a := b.accounts[id]; a != nil {
		if a.health != inference.Healthy {
			b.unhealthy--
		}
		if a.inflight == 0 {
			delete(b.accounts, id)
			return
		}
		*a = account{inflight: a.inflight, gone: true}
	}
}

// Status is one endpoint as the book sees it.
type Status struct {
	Endpoint inference.EndpointID
	InFlight int
	Ejected  bool // failed lately and not tried again yet
	Health   inference.Health
}

// Status lists the pool's endpoints.
func (b *Book) Status(now time.Time, pool *fleet.Pool) []Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]Status, 0, len(pool.Endpoints))
	for _, e := range pool.Endpoints {
		a := b.account(e.ID)
		list = append(list, Status{
			Endpoint: e.ID, InFlight: a.inflight,
			Ejected: a.failures > 0 || now.Before(a.heldUntil), Health: a.health,
		})
	}
	return list
}

func (b *Book) account(id inference.EndpointID) *account {
	a := b.accounts[id]
	if a == nil {
		a = &account{}
		b.accounts[id] = a
	}
	return a
}
