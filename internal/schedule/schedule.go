// SPDX-License-Identifier: Apache-2.0

// Package schedule chooses the endpoint of each attempt and keeps the fast
// facts that the choice rests on: what is in flight where, which endpoints
// failed lately, and how many retries the pool may still afford.
//
// Who may take a request is decided here: endpoints that failed, that are
// unhealthy or that do not serve the model come last or not at all. Among the
// others a Profile of plugins chooses, by what the book knows of each: what is
// in flight, how fast its engine is, which prefixes it has cached, how its
// streams do. Without a profile, or when nothing is known of the prompt, the
// choice is least load, at random among equals.
//
// The package is a core: it is told the time and draws its randomness from the
// source it was given. It refuses to talk to engines, to know a concrete plugin
// and to decide whether a request may be repeated.
package schedule

import (
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/prefix"
	"github.com/headgate/headgate/internal/schedule/cost"
)

// Config is what a pool's Book is told.
type Config struct {
	Retry     BudgetConfig
	RetryCost CostLimit

	// HealthPanic is the share of endpoints below which probes are not
	// believed: a pool that looks unhealthy as a whole is more likely probed
	// wrongly, and refusing everything helps nobody. 0: always believed.
	HealthPanic float64

	Profile *Profile      // nil: least load
	TTFT    TTFT          // target for first outputs; zero: none
	TPOT    time.Duration // target per output token; 0: none, and what stalls a stream has no price

	// ScrapeStale is the age at which an engine's own metrics are no longer
	// believed. 0: they never are.
	ScrapeStale time.Duration

	Limits Limits // of room, for requests that wait in a queue
}

// TTFT is by when a first output should come, after the request came. The zero value
// is no target.
type TTFT struct {
	Base     time.Duration
	Prefills float64 // times an idle engine's prefill of the whole prompt, on top of Base
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
	admits   bool // Admit was called: who has no account now has left the pool

	seated   seating
	decision decision
	round    Round
	epoch    time.Time // of the traffic's seconds

	index   *prefix.Index
	bySlot  []*account // of the index
	lengths *cost.Lengths
	line    cost.Line // of the pool as a whole

	streamBudget float64 // streams whose stalls may be looked at now
	streamsAt    float64

	unhealthy int     // accounts that are not healthy
	prompts   float64 // seen, at most meanOver
	meanWork  float64 // of their prefill, in tokens
	budget    budget
	typical   time.Duration // learned length of a whole answer
	prefill   time.Duration // learned time to first output per prompt token
}

// Bounds of the prefix index: per endpoint half a million tokens, as long as
// nobody said how large its engine's cache is, and for the pool in all.
const (
	defaultBlocks = 512 << 10 * 4 / prefix.BlockBytes
	blocksMax     = 1 << 20
)

// meanOver is about how many prompts the mean of their work goes over.
const meanOver = 50

// typicalAtStart stands for the length of an answer until one was seen.
const typicalAtStart = time.Second

// NewBook makes an empty book. The random source breaks ties between equals.
func NewBook(config Config, rnd *rand.Rand) *Book {
	return &Book{
		config: config, rnd: rnd,
		accounts: map[inference.EndpointID]*account{},
		budget:   newBudget(config.Retry),
		typical:  typicalAtStart,
		index:    prefix.New(blocksMax, rnd.Uint64()),
		lengths:  cost.NewLengths(),
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

	// What a Profile goes by. Without Prompt the choice is least load.
	Prompt      inference.Tokens
	Keys        []uint64 // of the prompt's blocks, by prefix.Hasher; read during the call only
	PromptBytes int      // of the canonical prompt that Keys are of
	Held        []Held   // what is known better than by Keys, most tokens first; read during the call only
	Stream      bool     // the answer is streamed, so its first output will be seen
	Arrived     time.Time
	TTFT        TTFT          // the request's own target; zero: the pool's
	TPOT        time.Duration // the same per output token; 0: the pool's
	Adapter     string        // LoRA adapter, "" for none
	Session     string
	Explain     bool // Why is to be asked
	Yields      bool // in a round: what streams leave is kept for requests of higher priority
}

// Held is how much of the prompt an endpoint's engine has cached, by its own word:
// events of its KV cache. For that endpoint it takes the place of the prefix index.
type Held struct {
	Endpoint inference.EndpointID
	Tokens   int
}

func (a *Ask) excludes(id inference.EndpointID) bool {
	return len(a.Exclude) > 0 && slices.Contains(a.Exclude, id)
}

// Reservation is one place on an endpoint, held until Release. Whoever holds it
// tells what becomes of the request there; what it does not tell is not learned,
// and nothing else depends on it.
type Reservation struct {
	Endpoint inference.Endpoint
	why      string // what the choice rested on, if it was asked
	book     *Book
	once     sync.Once
	cached   int // expected, in tokens

	progress
}

// Why says in one line what the choice rested on, if Ask.Explain was set. It is
// what Explain would have said of the winner.
func (r *Reservation) Why() string { return r.why }

// Accepted tells that the engine took the request: from now on its prompt counts
// as cached there.
func (r *Reservation) Accepted() {
	r.book.mu.Lock()
	defer r.book.mu.Unlock()
	a := r.book.accounts[r.Endpoint.ID]
	if r.taken || a == nil || a.gone || len(r.keys) == 0 {
		return
	}
	r.taken = true
	a.renew()
	r.book.learn(a, r.keys)
}

// FirstOutput tells that the engine has computed the prompt.
func (r *Reservation) FirstOutput(now time.Time) {
	r.book.mu.Lock()
	defer r.book.mu.Unlock()
	if a := r.book.accounts[r.Endpoint.ID]; a != nil && !r.begun {
		r.tokens.Store(max(r.tokens.Load(), 1))
		a.begin(r, r.book.seconds(now), &r.book.line)
	}
}

// Tokens tells how many tokens of the answer there are. It takes no lock.
func (r *Reservation) Tokens(n int) { r.tokens.Store(int64(n)) }

// Writing tells that what the engine made is being written to the client, and
// Wrote that this took until now: a client that is slow to read slows its stream,
// which says nothing of the engine.
func (r *Reservation) Writing(now time.Time) { r.writingSince.Store(int64(now.Sub(r.book.epoch)) + 1) }

func (r *Reservation) Wrote(now time.Time) {
	if began := r.writingSince.Swap(0); began != 0 {
		r.writingSpent.Add(int64(now.Sub(r.book.epoch)) + 1 - began)
	}
}

// Finished tells that the answer is complete, and what the engine says of it.
func (r *Reservation) Finished(now time.Time, u inference.Usage) {
	r.book.mu.Lock()
	defer r.book.mu.Unlock()
	r.ended = r.book.seconds(now)
	if u.Completion > 0 {
		r.book.lengths.Observe(u.Completion)
		if a := r.book.accounts[r.Endpoint.ID]; a != nil {
			a.scraped.answered(now)
		}
	}
	if a := r.book.accounts[r.Endpoint.ID]; a != nil && u.Cached >= 0 && u.Prompt > 0 && r.hashed {
		// Of a prompt whose size was estimated the share counts.
		predicted := int64(float64(r.cached) / r.prompt * float64(u.Prompt))
		cached := int64(min(u.Cached, u.Prompt)) // whatever the engine says
		h := &a.hits
		h.Requests++
		h.Prompt += int64(u.Prompt)
		h.Predicted += predicted
		h.Actual += cached
		h.Missed += max(predicted-cached, 0)
	}
}

// Hits compares what the prefix index expected of an endpoint's cache with what
// its engine reported, in tokens of those prompts of which it reported anything.
type Hits struct {
	Requests  int64
	Prompt    int64 // tokens of the prompts
	Predicted int64 // of them, expected to be cached
	Actual    int64 // of them, cached
	Missed    int64 // expected and not cached; what was cached unexpectedly does not make up for it
}

// Release gives the place back. Only the first call counts.
func (r *Reservation) Release() {
	r.once.Do(func() {
		r.book.mu.Lock()
		defer r.book.mu.Unlock()
		a := r.book.accounts[r.Endpoint.ID]
		a.end(r)
		a.inflight--
		r.book.touch(a)
		if a.inflight == 0 && a.gone {
			r.book.drop(r.Endpoint.ID)
		}
	})
}

// learn notes that the endpoint's engine has these blocks.
func (b *Book) learn(a *account, keys []uint64) {
	if !a.cached {
		a.slot, a.cached = b.index.Join(a.capacity), true
		for len(b.bySlot) <= int(a.slot) {
			b.bySlot = append(b.bySlot, nil)
		}
		b.bySlot[a.slot] = a
	}
	b.index.Learn(a.slot, keys)
}

// learnComputed learns prompts of answers that come whole, once they must have been
// computed. Their engine tells that it took them when the answers are done, and that
// may be long after.
func (b *Book) learnComputed(a *account) {
	for i, r := range a.computed {
		if a.computed[i] = nil; !r.taken && len(r.keys) > 0 {
			b.learn(a, r.keys)
		}
	}
	a.computed = a.computed[:0]
}

// unlearn forgets what the endpoint's engine has cached and loaded.
func (b *Book) unlearn(a *account) {
	a.adapters = adapters{slots: a.adapters.slots}
	if a.cached {
		b.index.Leave(a.slot)
		b.bySlot[a.slot] = nil
		a.cached = false
	}
	for _, r := range a.pending {
		r.keys = nil
	}
	for _, r := range a.computed {
		r.keys = nil
	}
	a.renew()
}

// drop removes an account.
func (b *Book) drop(id inference.EndpointID) {
	delete(b.accounts, id)
	b.seated.pool = nil
}

// Restarted tells that another process answers at an endpoint's address: its
// cache is empty, and what the one before said of itself is void.
func (b *Book) Restarted(id inference.EndpointID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.restarted(b.member(id))
}

func (b *Book) restarted(a *account) {
	b.unlearn(a)
	a.scraped, a.hits = scraped{asked: a.scraped.asked}, Hits{}
	a.crowd.best = 0
	b.touch(a)
}

// SetIncarnation notes which process an endpoint's engine is, as its guard tells:
// another one than before has an empty cache.
func (b *Book) SetIncarnation(id inference.EndpointID, process string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.member(id)
	if a.process != "" && a.process != process {
		b.restarted(a)
	}
	a.process = process
}

// SetCache notes how many tokens an endpoint's engine can keep cached.
func (b *Book) SetCache(id inference.EndpointID, tokens int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.member(id)
	// A block covers a fixed number of bytes; tokens have about four.
	a.capacity = max(int(int64(tokens)*4/prefix.BlockBytes), 1)
	if a.cached {
		b.index.Resize(a.slot, a.capacity)
	}
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
	c := b.choose(now, pool, &ask)
	if c.endpoint == nil {
		return nil, c.refused(pool)
	}
	return b.reserve(now, &ask, &c), nil
}

// reserve counts the request at the chosen endpoint.
func (b *Book) reserve(now time.Time, ask *Ask, c *choice) *Reservation {
	a, at := c.account, b.seconds(now)
	b.learnComputed(a)
	r := &Reservation{Endpoint: *c.endpoint, book: b}
	if ask.Explain {
		r.why = b.told(c)
	}
	a.inflight++
	b.touch(a)
	r.Endpoint.Revision = a.revisionOf(c.endpoint)
	r.sent, r.streams, r.prompt = at, ask.Stream, float64(ask.Prompt.N)
	if ask.Prompt.N <= 0 {
		return r
	}
	r.cached = c.candidate.Cached
	r.tpot = b.tpot(ask).Seconds()
	r.fresh, r.work = float64(ask.Prompt.N-r.cached), work(ask.Prompt.N, r.cached)
	r.keys, r.hashed = slices.Clone(ask.Keys), len(ask.Keys) > 0 || len(ask.Held) > 0
	b.prompts = min(b.prompts+1, meanOver)
	b.meanWork += (r.work - b.meanWork) / b.prompts
	a.dispatch(r)
	a.adapters.use(ask.Adapter, at)
	if c.by != nil {
		for _, o := range c.by.observers {
			o.Chosen(&b.decision.request, &c.candidate)
		}
	}
	return r
}

// believeProbes reports whether enough endpoints are healthy for the others'
// probes to count.
func (b *Book) believeProbes(accounts []*account) bool {
	if b.unhealthy == 0 {
		return true
	}
	healthy := 0
	for _, a := range accounts {
		if a.health == inference.Healthy {
			healthy++
		}
	}
	return float64(healthy) >= b.config.HealthPanic*float64(len(accounts))
}

// SetModels notes which models an endpoint lists.
func (b *Book) SetModels(id inference.EndpointID, models []string) {
	set := make(map[string]bool, len(models))
	for _, m := range models {
		set[m] = true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if a := b.member(id); !maps.Equal(a.models, set) || a.models == nil {
		a.models = set
		b.seated.forgetModels()
	}
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
	b.touch(a)
	if h == inference.Gone {
		b.unlearn(a)
	}
}

// SetGuarded notes whether attempts at an endpoint need a lease. Until SetLeasable
// says that its guard is heard, it takes none then.
func (b *Book) SetGuarded(id inference.EndpointID, guarded bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.account(id)
	a.guarded = guarded
	b.touch(a)
}

// SetLeasable notes until when leases can be had of an endpoint's guard; the zero
// time is not now.
func (b *Book) SetLeasable(id inference.EndpointID, until time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	// One that left the pool is not brought back.
	if a := b.accounts[id]; a != nil {
		a.leasable = until
		b.touch(a)
	}
}

// SetRevision notes the model revision that an endpoint tells by itself. What was
// configured goes first.
func (b *Book) SetRevision(id inference.EndpointID, revision string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a := b.accounts[id]; a != nil {
		a.revision = revision
	}
}

// rank orders candidates before anything else does; the least wins.
type rank struct {
	standing standing
	stranger bool // serves another revision than the attempt before
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
	return 0
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
	a := b.accounts[o.Endpoint]
	if a == nil || a.gone {
		return
	}
	if o.Verdict == inference.Dead {
		b.unlearn(a)
	}
	a.report(now, o, b.typical)
	b.touch(a)
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
	if c := b.choose(now, pool, &ask); c.endpoint == nil {
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
	b.account(id).gone, b.admits = false, true
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
		b.unlearn(a)
		if a.inflight == 0 {
			b.drop(id)
			return
		}
		*a = account{at: a.at, inflight: a.inflight, gone: true, traffic: newTraffic()}
		b.touch(a)
		b.seated.forgetModels()
	}
}

// Status is one endpoint as the book sees it.
type Status struct {
	Endpoint inference.EndpointID
	InFlight int
	Ejected  bool // failed lately and not tried again yet
	Health   inference.Health
	Revision string   // of its model, "" if not known
	Reported Reported // by the engine's own metrics
	Hits     Hits     // since it joined, or its engine's process began

	// Fenceable: an attempt there can be proved silent as the pool demands. It is
	// false where a guard is not heard, and then the endpoint takes no requests.
	Fenceable bool
}

// Status lists the pool's endpoints.
func (b *Book) Status(now time.Time, pool *fleet.Pool) []Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]Status, 0, len(pool.Endpoints))
	for _, e := range pool.Endpoints {
		a := b.member(e.ID)
		list = append(list, Status{
			Endpoint: e.ID, InFlight: a.inflight,
			Ejected: a.failures > 0 || now.Before(a.heldUntil), Health: a.health,
			Revision: a.revisionOf(&e), Fenceable: a.fenceable(now), Reported: b.reported(now, a),
			Hits: a.hits,
		})
	}
	return list
}

// account is the account of an endpoint that is in the pool, or is about to be.
func (b *Book) account(id inference.EndpointID) *account {
	a := b.accounts[id]
	if a == nil {
		a = &account{traffic: newTraffic()}
		b.accounts[id] = a
		b.seated.pool = nil // what stood there for it is not this one
	}
	return a
}

// member is the account of an endpoint that was named by somebody who may not know yet
// that it has left. It is not brought back then: nobody would drop it again. What is
// noted of it is noted nowhere, and it is gone to every decision.
func (b *Book) member(id inference.EndpointID) *account {
	if b.admits && b.accounts[id] == nil {
		return &account{traffic: newTraffic(), health: inference.Gone}
	}
	return b.account(id)
}
