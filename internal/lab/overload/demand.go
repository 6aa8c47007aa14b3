// SPDX-License-Identifier: Apache-2.0

package overload

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sort"

	"github.com/headgate/headgate/internal/flow"
)

// Asked is one request of a Demand.
type Asked struct {
	At       float64 // seconds
	Priority int
	Tenant   string
	In, Out  int // tokens
	Most     int // tokens that the answer may have, as the client says; 0: it does not
	Blocks   []uint64
	Target   float64 // seconds to the first output; 0: the laboratory's, below 0: none
	Deadline float64 // seconds after which it is of no use; 0: none
	Leaves   float64 // seconds until its client goes, if there is no output by then; 0: it stays
	Fickle   bool    // its client goes in any case
	ShedAt   flow.ShedAt
}

// Demand is the requests of a run.
type Demand struct {
	Asked []Asked // by time
	End   float64 // when the last may come
	After float64 // seconds to play on after that at most
}

// Priorities of a Shape's requests, the highest first, and their shares.
var (
	Priorities = [3]int{10, 0, -10}
	shares     = [3]float64{0.1, 0.3, 0.6}
)

// A Phase is a time of one load.
type Phase struct {
	Seconds float64
	Rate    float64 // requests a second
}

// Shape is how the requests of an overload look: a service whose tenants each
// have a prompt of their own and documents that they ask about.
type Shape struct {
	Tenants int
	Greed   float64 // requests of the first tenant for one of each other
	// Patience is how long a client waits for a first output.
	Patience float64
}

// Standard is the shape of the figures: 20 tenants, one ten times too greedy.
var Standard = Shape{Tenants: 20, Greed: 10, Patience: 60}

// documents of a tenant, and how uneven the interest in them is.
const (
	documents = 12
	interest  = 0.9
)

// Make draws the requests of some phases.
func (s Shape) Make(seed uint64, phases []Phase) *Demand {
	r := rand.New(rand.NewPCG(seed, 1))
	prompts := s.prompts(rand.New(rand.NewPCG(seed, 2)))
	popular := zipf(documents, interest)
	d := &Demand{After: 240}
	for _, p := range phases {
		begin := d.End
		d.End += p.Seconds
		for at := begin + r.ExpFloat64()/p.Rate; at < d.End; at += r.ExpFloat64() / p.Rate {
			tenant := 0
			if r.Float64() >= s.Greed/(s.Greed+float64(s.Tenants-1)) {
				tenant = 1 + r.IntN(s.Tenants-1)
			}
			q := prompts[tenant][popular.draw(r)]
			q.At, q.Tenant, q.Priority = at, tenantName(tenant), priority(r)
			q.In += int(logNormal(r, 350, 0.9, 20, 6000))
			q.Out = int(logNormal(r, 140, 0.8, 2, 1000))
			q.Leaves = s.Patience
			d.Asked = append(d.Asked, q)
		}
	}
	return d
}

// prompts are what each tenant's requests begin with.
func (s Shape) prompts(r *rand.Rand) [][]Asked {
	list := make([][]Asked, s.Tenants)
	for t := range list {
		system := newKeys(r, 4+r.IntN(8))
		for range documents {
			blocks := append(system[:len(system):len(system)], newKeys(r, int(logNormal(r, 14, 0.7, 2, 60)))...)
			list[t] = append(list[t], Asked{In: len(blocks) * BlockTokens, Blocks: blocks})
		}
	}
	return list
}

func tenantName(n int) string { return fmt.Sprintf("tenant-%02d", n) }

func priority(r *rand.Rand) int {
	x := r.Float64()
	for i, share := range shares {
		if x -= share; x < 0 {
			return Priorities[i]
		}
	}
	return Priorities[len(Priorities)-1]
}

func newKeys(r *rand.Rand, n int) []uint64 {
	list := make([]uint64, n)
	for i := range list {
		list[i] = r.Uint64()
	}
	return list
}

func logNormal(r *rand.Rand, median, sigma, lo, hi float64) float64 {
	return min(hi, max(lo, median*math.Exp(sigma*r.NormFloat64())))
}

// ranks are the cumulated weights of ranks.
type ranks []float64

func zipf(n int, exponent float64) ranks {
	list, sum := make(ranks, n), 0.0
	for i := range list {
		sum += math.Pow(float64(i+1), -exponent)
		list[i] = sum
	}
	return list
}

func (z ranks) draw(r *rand.Rand) int { return sort.SearchFloat64s(z, r.Float64()*z[len(z)-1]) }
