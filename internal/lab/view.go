// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"github.com/headgate/headgate/internal/prefix"
	"github.com/headgate/headgate/internal/schedule/cost"
)

// view is what a gateway can know without asking: its own counts, and a prefix
// index of the engines' true sizes, fed by what it sent. All policies of others
// get the same one, so that none loses by a worse index than Headgate's.
type view struct {
	f *fleet
	c Cell

	running []float64 // requests in flight
	waiting []float64 // prompt tokens to compute, without a first output
	pending []int     // requests without one
	context []float64 // prompt tokens of those with one
	cached  []int     // of the request at hand, per engine

	index  *prefix.Index
	slots  []prefix.Slot
	lookup prefix.Lookup

	// Learned, for policies that learn.
	queues         [][]*flight // without a first output, in order
	together, took []float64   // work of the first outputs of the last moment, and its time
	lines          []cost.Line
	rates          []cost.Rate
	last           []float64 // time of the last first output
	pace           []float64 // smoothed time per token
	token1         []float64 // time of the last token

	// Scraped.
	queued, kv []float64
}

func newView(f *fleet, c Cell) *view {
	n := len(f.engines)
	floats := func() []float64 { return make([]float64, n) }
	v := &view{
		f: f, c: c,
		running: floats(), waiting: floats(), pending: make([]int, n), context: floats(), cached: make([]int, n),
		index:  prefix.New(1<<22, 1),
		queues: make([][]*flight, n), together: floats(), took: floats(), lines: make([]cost.Line, n), rates: make([]cost.Rate, n), last: floats(), pace: floats(), token1: floats(),
		queued: floats(), kv: floats(),
	}
	for i := range n {
		v.slots = append(v.slots, v.index.Join(f.params[i].Blocks))
		v.rates[i] = cost.Prior
		v.pace[i] = (f.spec.Params.StepBase + f.spec.Params.StepFloor).Seconds()
		v.last[i] = -1
	}
	return v
}

// look finds how much of the prompt each engine has.
func (v *view) look(q *flight) {
	v.lookup.Reset(v.index, q.Blocks)
	for i, s := range v.slots {
		v.cached[i] = min(v.lookup.Matched(s)*v.f.params[i].BlockTokens, q.In-1)
	}
}

func (v *view) scrape() {
	for i, e := range v.f.engines {
		s := e.Snapshot()
		v.queued[i], v.kv[i] = float64(s.Waiting), s.KVUsage()
	}
}

func (v *view) sent(q *flight) {
	i := q.at
	v.running[i]++
	v.pending[i]++
	v.waiting[i] += q.fresh
	v.queues[i] = append(v.queues[i], q)
	v.index.Learn(v.slots[i], q.Blocks)
}

func (v *view) first(now float64, q *flight) {
	i := q.at
	v.pending[i]--
	v.waiting[i] -= q.fresh
	if v.pending[i] == 0 {
		v.waiting[i] = 0
	}
	v.context[i] += float64(q.In)
	v.queues[i] = without(v.queues[i], q)
	if now > v.last[i] {
		v.lines[i].Observe(v.together[i], v.took[i])
		v.rates[i] = v.lines[i].Rate(cost.Prior)
		v.together[i], v.took[i] = 0, now-max(v.last[i], q.arrived)
		v.last[i] = now
	}
	v.together[i] += v.work(q)
}

func (v *view) token(now float64, q *flight) {
	i := q.at
	if gap := now - v.token1[i]; gap > 0 {
		if gap < 5 {
			v.pace[i] += min(1, gap/2) * (gap - v.pace[i])
		}
		v.token1[i] = now
	}
}

func (v *view) ended(q *flight) {
	i := q.at
	v.running[i]--
	v.context[i] -= float64(q.In)
	v.index.Learn(v.slots[i], q.Blocks) // it was in use until now
}

func (v *view) fresh(q *flight, i int) float64 { return float64(q.In - v.cached[i]) }

// work is a prefill in tokens of an empty engine, attention included.
func (v *view) work(q *flight) float64 { return cost.Default.Work(q.fresh, float64(q.In)-q.fresh) }

// ahead is the prefill in seconds that an engine has yet to do, by its learned
// speed and less what it must have done by now.
func (v *view) ahead(now float64, i int) float64 {
	if len(v.queues[i]) == 0 {
		return 0
	}
	total := 0.0
	for _, q := range v.queues[i] {
		total += v.work(q)
	}
	head := v.queues[i][0]
	done := now - max(v.last[i], head.arrived)
	return max(v.rates[i].Seconds(total)-min(done, 0.9*v.rates[i].Seconds(v.work(head))), 0)
}
