// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	pools "github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/prefix"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/schedule/cost"
	"github.com/headgate/headgate/plugin"
	"github.com/headgate/headgate/plugins/standard"
)

// ours is Headgate's own choice without its queue: a real book that is told what
// a gateway would tell it.
type ours struct {
	v    *view
	book *schedule.Book
	pool *pools.Pool
	at   map[inference.EndpointID]int
	next *schedule.Reservation // of the request that was just placed
}

var epoch = time.Unix(1_000_000, 0)

func clock(s float64) time.Time { return epoch.Add(seconds(s)) }

func newOurs(v *view) policy { return bookOf(v, schedule.Limits{}) }

func bookOf(v *view, limits schedule.Limits) *ours {
	profile, err := standard.Profile(standard.Default)
	if err != nil {
		panic(err) // the profile is built in
	}
	p := &ours{
		v: v, at: map[inference.EndpointID]int{}, pool: &pools.Pool{Name: "lab"},
		book: schedule.NewBook(schedule.Config{
			Profile: profile, Limits: limits,
			TPOT: time.Duration(v.f.spec.TPOT * float64(time.Second)),
		}, rand.New(rand.NewPCG(77, 8))),
	}
	for i := range v.f.engines {
		e := inference.Endpoint{ID: inference.EndpointID(fmt.Sprintf("http://engine-%d:8000", i))}
		p.pool.Endpoints = append(p.pool.Endpoints, e)
		p.at[e.ID] = i
		// The index counts blocks of its own size; here they are the engine's.
		p.book.SetCache(e.ID, v.f.params[i].Blocks*prefix.BlockBytes/4)
	}
	return p
}

func (p *ours) choose(now float64, q *flight) int {
	r, err := p.book.Reserve(clock(now), p.pool, p.ask(q))
	if err != nil {
		panic(err) // no engine of the lab ever fails
	}
	p.next = r
	return p.at[r.Endpoint.ID]
}

// ask is what a gateway would ask of the book.
func (p *ours) ask(q *flight) schedule.Ask {
	return schedule.Ask{
		Prompt: inference.Tokens{N: q.In}, Keys: q.Blocks, PromptBytes: max(q.In*prefix.BlockBytes/p.v.f.params[0].BlockTokens, 1),
		Stream: true, Arrived: clock(q.arrived), TTFT: schedule.TTFT{Base: time.Duration(q.target * float64(time.Second))},
		Adapter: q.Adapter,
	}
}

func (p *ours) sent(_ float64, q *flight) {
	q.bookkeeper = p.next
	p.next.Accepted()
}

func (p *ours) first(now float64, q *flight) {
	q.bookkeeper.(*schedule.Reservation).FirstOutput(clock(now))
}

func (p *ours) token(_ float64, q *flight) { q.bookkeeper.(*schedule.Reservation).Tokens(q.tokens) }

func (p *ours) ended(now float64, q *flight) {
	r := q.bookkeeper.(*schedule.Reservation)
	r.Finished(clock(now), usage(q))
	r.Accepted()
	r.Release()
}

func usage(q *flight) inference.Usage {
	return inference.Usage{Prompt: q.In, Completion: q.Out, Cached: q.cached}
}

// clairvoyant takes the same cost with what no gateway knows: the engines' true
// speeds and caches, how much prefill is left, and how long each answer gets. It
// is greedy, so it is no upper bound of what a policy could do, only a mark.
type clairvoyant struct {
	deaf
	v       *view
	streams [][]*flight
	waits   [][]*flight
	rnd     *rand.Rand
}

func newClairvoyant(v *view) policy {
	n := len(v.f.engines)
	return &clairvoyant{v: v, streams: make([][]*flight, n), waits: make([][]*flight, n), rnd: newRand(77, 9)}
}

func (p *clairvoyant) choose(now float64, q *flight) int {
	l := newLeast(p.v, nil)
	l.rnd = p.rnd
	return l.argmin(func(i int) float64 {
		params := &p.v.f.params[i]
		hit := min(p.v.f.engines[i].Match(q.Blocks), q.In-1)
		ahead := 0.0
		for _, w := range p.waits[i] {
			ahead += prefillSeconds(params.Token.Seconds(), params.Attention.Seconds(), w.In, w.In-int(w.fresh))
		}
		own := prefillSeconds(params.Token.Seconds(), params.Attention.Seconds(), q.In, hit)
		ask := cost.Ask{Prompt: float64(q.In), Output: float64(q.Out), TTFT: q.target}
		there := plugin.Candidate{
			Cached: hit, Ahead: ahead, PerToken: params.Token.Seconds(),
			Others: p.v.running[i], Context: p.v.context[i],
			Stalls: known{now, p.streams[i], p.v.f.spec.TPOT, (params.StepBase + params.StepFloor).Seconds()},
		}
		var terms cost.Terms
		return cost.Default.Score(&ask, &there, &terms) + own - terms.Own
	})
}

func prefillSeconds(token, attention float64, in, hit int) float64 {
	fresh := float64(in - hit)
	return fresh*token + fresh*(float64(hit)+fresh/2)*attention/1e6
}

// known are streams whose lengths are known.
type known struct {
	now     float64
	streams []*flight
	tpot    float64
	gap     float64
}

func (k known) At(stall float64) float64 {
	missed := 0.0
	for _, q := range k.streams {
		end := k.now + stall + float64(q.Out-q.tokens)*k.gap*1.5
		if end-q.first > k.tpot*float64(q.Out-1) {
			missed++
		}
	}
	return missed
}

func (p *clairvoyant) sent(_ float64, q *flight) { p.waits[q.at] = append(p.waits[q.at], q) }

func (p *clairvoyant) first(_ float64, q *flight) {
	p.waits[q.at] = without(p.waits[q.at], q)
	p.streams[q.at] = append(p.streams[q.at], q)
}

func (p *clairvoyant) ended(_ float64, q *flight) { p.streams[q.at] = without(p.streams[q.at], q) }

func without(list []*flight, q *flight) []*flight {
	for i, x := range list {
		if x == q {
			return slices.Delete(list, i, i+1)
		}
	}
	return list
}
