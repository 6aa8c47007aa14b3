// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"math"
	"math/rand/v2"

	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule/cost"
)

// Policy is one way to choose an engine, by its name in results.
type Policy struct {
	Name     string
	About    string // what it is, and where its formula is from
	Peer     bool   // somebody else's
	make     func(v *view) policy
	queue    func(v *view, d desk) queue // instead of make, for one that keeps requests
	infinite bool                        // its engines never forget a prefix
}

// deaf is a policy that hears nothing of what becomes of requests.
type deaf struct{}

func (deaf) sent(float64, *flight)  {}
func (deaf) first(float64, *flight) {}
func (deaf) token(float64, *flight) {}
func (deaf) ended(float64, *flight) {}

// least chooses the engine with the least value, at random among equals.
type least struct {
	deaf
	v   *view
	rnd *rand.Rand
	of  func(p *least, now float64, q *flight, i int) float64
}

func (p *least) choose(now float64, q *flight) int {
	return p.argmin(func(i int) float64 { return p.of(p, now, q, i) })
}

func (p *least) argmin(of func(i int) float64) int {
	best, ties, value := 0, 0, math.Inf(1)
	for i := range p.v.running {
		switch x := of(i); {
		case x < value || ties == 0:
			best, ties, value = i, 1, x
		case x == value:
			if ties++; p.rnd.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return best
}

func newLeast(v *view, of func(p *least, now float64, q *flight, i int) float64) *least {
	return &least{v: v, rnd: newRand(77, 7), of: of}
}

// by makes a policy that takes the least of one value.
func by(of func(p *least, now float64, q *flight, i int) float64) func(*view) policy {
	return func(v *view) policy { return newLeast(v, of) }
}

// choosing makes a policy of a function.
func choosing(choose func(p *least, now float64, q *flight) int) func(*view) policy {
	return func(v *view) policy { return &chooser{newLeast(v, nil), choose} }
}

type chooser struct {
	*least
	fn func(p *least, now float64, q *flight) int
}

func (c *chooser) choose(now float64, q *flight) int { return c.fn(c.least, now, q) }

func running(p *least, _ float64, _ *flight, i int) float64 { return p.v.running[i] }

// Policies are those that the lab knows. Peers are written anew from what their
// projects publish; "X-like" would be the honest name of each.
var Policies = []Policy{
	{Name: "headgate", About: "flow.Queue before schedule.Book with the cost profile: late binding", queue: newLate(0)},
	{Name: "headgate-immediate", About: "the same without the queue", make: newOurs},
	{Name: "headgate-refusing", About: "with the queue, which refuses past 0.8 of a target", queue: newLate(flow.RefuseAtDefault)},
	{Name: "round-robin", About: "one after the other", Peer: true, make: func(v *view) policy {
		turn := -1
		return &chooser{newLeast(v, nil), func(p *least, _ float64, _ *flight) int {
			turn++
			return turn % len(p.v.running)
		}}
	}},
	{Name: "random", About: "at random", Peer: true, make: choosing(func(p *least, _ float64, _ *flight) int { return p.rnd.IntN(len(p.v.running)) })},
	{Name: "least-request", About: "fewest requests in flight", Peer: true, make: by(running)},
	{Name: "p2c", About: "the less loaded of two at random", Peer: true, make: choosing(func(p *least, _ float64, _ *flight) int {
		a, b := p.rnd.IntN(len(p.v.running)), p.rnd.IntN(len(p.v.running))
		if p.v.running[b] < p.v.running[a] {
			return b
		}
		return a
	})},
	{Name: "chwbl", About: "consistent hashing of the first two blocks with loads bounded at 1.25 of the mean (KubeAI)", Peer: true, make: choosing(boundedHash)},
	{Name: "sglang", About: "SGLang cache-aware: 64, 1.5, 0.3", Peer: true, make: sglang(64, 1.5, 0.3)},
	{Name: "sglang-tuned", About: "the same with 8, 1.5, 0.3", Peer: true, make: sglang(8, 1.5, 0.3)},
	{Name: "llm-d-3-2-2", About: "llm-d: 3 prefix + 2 queue + 2 free KV, scraped", Peer: true, make: choosing(threeTwoTwo)},
	{Name: "llm-d-sticky", About: "llm-d sticky until saturated: 0.8, 286,720 tokens", Peer: true, make: sticky(0.8, 286_720)},
	{Name: "llm-d-sticky-tuned", About: "the same with 0.5, 32,000 tokens", Peer: true, make: sticky(0.5, 32_000)},
	{Name: "dynamo", About: "Dynamo: blocks to prefill plus blocks that decode", Peer: true, make: by(dynamo)},
	{Name: "lmetric", About: "LMetric: tokens to prefill times batch", Peer: true, make: by(lmetric)},
	{Name: "lpwl", About: "least prefill work left", Peer: true, make: by(lpwl)},
	{Name: "predicted-latency", About: "llm-d predicted latency: 0.8 TTFT and 0.2 TPOT headroom, learned", Peer: true, make: by(predictedLatency)},
	{Name: "infinite-cache", About: "bound: Headgate's choice on engines that never forget a prefix", queue: newLate(0), infinite: true},
	{Name: "clairvoyant", About: "bound: the same cost with true speeds, caches and lengths, greedy", make: newClairvoyant},
}

// PolicyNamed finds a policy.
func PolicyNamed(name string) (Policy, bool) {
	for _, p := range Policies {
		if p.Name == name {
			return p, true
		}
	}
	return Policy{}, false
}

// boundedHash goes round the ring from where the prompt's begin hashes to, past
// engines over 1.25 times the mean load.
func boundedHash(p *least, now float64, q *flight) int {
	h := uint64(14695981039346656037)
	if len(q.Blocks) == 0 {
		h ^= uint64(q.arrived * 1e6)
		h *= 1099511628211
	}
	for _, b := range q.Blocks[:min(2, len(q.Blocks))] {
		h = (h ^ b) * 1099511628211
	}
	h ^= h >> 29
	h *= 0xbf58476d1ce4e5b9
	h ^= h >> 32
	n, total := len(p.v.running), 0.0
	for _, r := range p.v.running {
		total += r
	}
	bound := math.Ceil(1.25 * (total + 1) / float64(n))
	at := int(h % uint64(n))
	for range n {
		if p.v.running[at]+1 <= bound {
			break
		}
		at = (at + 1) % n
	}
	return at
}

// sglang falls back to least load while loads differ by more than both limits,
// and otherwise follows a match of more than the threshold.
func sglang(absolute, relative, threshold float64) func(*view) policy {
	return choosing(func(p *least, now float64, q *flight) int {
		low, high := math.Inf(1), 0.0
		for _, r := range p.v.running {
			low, high = min(low, r), max(high, r)
		}
		load := func(i int) float64 { return p.v.running[i] }
		if high-low > absolute && high > relative*low {
			return p.argmin(load)
		}
		best := p.argmin(func(i int) float64 { return -float64(p.v.cached[i])*1e4 + p.v.running[i] })
		if float64(p.v.cached[best])/float64(q.In) > threshold {
			return best
		}
		return p.argmin(load)
	})
}

func threeTwoTwo(p *least, _ float64, q *flight) int {
	low, high := math.Inf(1), 0.0
	for _, x := range p.v.queued {
		low, high = min(low, x), max(high, x)
	}
	return p.argmin(func(i int) float64 {
		queue := 1.0
		if high > low {
			queue = (high - p.v.queued[i]) / (high - low)
		}
		return -(3*float64(p.v.cached[i])/float64(q.In) + 2*queue + 2*(1-p.v.kv[i]))
	})
}

// sticky keeps to engines that hold the prompt while they are not too far behind
// the idlest one, and takes the least prefill work among them.
func sticky(share, tokens float64) func(*view) policy {
	return choosing(func(p *least, now float64, q *flight) int {
		idle := math.Inf(1)
		for _, w := range p.v.waiting {
			idle = min(idle, w)
		}
		warm := func(i int) bool {
			return float64(p.v.cached[i])/float64(q.In) >= share && p.v.waiting[i]-idle < tokens
		}
		some := false
		for i := range p.v.running {
			some = some || warm(i)
		}
		return p.argmin(func(i int) float64 {
			if some && !warm(i) {
				return math.Inf(1)
			}
			return lpwl(p, now, q, i)
		})
	})
}

func dynamo(p *least, _ float64, q *flight, i int) float64 {
	block := float64(p.v.f.params[i].BlockTokens)
	return (p.v.waiting[i]+p.v.fresh(q, i))/block + (p.v.context[i]+float64(q.In))/block
}

func lmetric(p *least, _ float64, q *flight, i int) float64 {
	return (p.v.waiting[i] + p.v.fresh(q, i)) * (p.v.running[i] + 1)
}

// lpwl breaks ties by requests in flight.
func lpwl(p *least, _ float64, q *flight, i int) float64 {
	return p.v.waiting[i] + p.v.fresh(q, i) + 1e-3*p.v.running[i]
}

func predictedLatency(p *least, now float64, q *flight, i int) float64 {
	n := p.v.running[i]
	fresh := p.v.fresh(q, i)
	first := p.v.ahead(now, i) + p.v.rates[i].Seconds(cost.Default.Work(fresh, float64(q.In)-fresh))
	pace := p.v.pace[i] * (n + 2) / (n + 1)
	return 0.8*first/q.target + 0.2*pace/p.v.f.spec.TPOT
}
