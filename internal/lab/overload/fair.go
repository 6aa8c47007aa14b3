// SPDX-License-Identifier: Apache-2.0

package overload

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/headgate/headgate/internal/flow"
)

// Fairness is how flows share a pool that always have requests waiting, and whose
// requests look nothing alike.
type Fairness struct {
	Flows int     `json:"flows"`
	Jain  float64 `json:"jain"` // of the tokens that they were served, 1 is equal

	// Gap is the most that the service of two flows ever differed by, in tokens: of
	// prompts those that were computed, and two for each that was generated. Bound is
	// what VTC promises for it, 2·max(wp·L, wq·M) (arXiv 2401.00588, theorem 4.4), with
	// the longest computed prompt for L and for M the most tokens, computed and
	// generated, of all requests that ever were on engines together.
	Gap   float64 `json:"gap"`
	Bound float64 `json:"vtc_bound"`

	Served map[string]float64 `json:"served"` // tokens, by flow

	// Hit is the share of prompt tokens that was cached, the mean over the flows, as
	// each gets other shares of the pool in turns and in order of arrival (FCFS).
	Hit     float64 `json:"hit_ratio"`
	HitFCFS float64 `json:"hit_ratio_fcfs"`
}

// backlogs are the flows: how long their own prompts and answers are, beside the
// documents that their requests share.
var backlogs = []struct {
	name string
	in   [2]float64 // median, sigma
	out  [2]float64
}{
	{"chat", [2]float64{250, 0.8}, [2]float64{220, 0.7}},
	{"documents", [2]float64{3000, 0.6}, [2]float64{60, 0.6}},
	{"stories", [2]float64{80, 0.5}, [2]float64{900, 0.4}},
	{"mixed", [2]float64{700, 1.3}, [2]float64{150, 1.2}},
	{"short", [2]float64{60, 0.6}, [2]float64{20, 0.8}},
	{"summaries", [2]float64{1500, 0.8}, [2]float64{200, 0.5}},
}

const (
	backlogEach = 900 // requests of each flow at the begin, for four engines
	backlogFor  = 120.0
	libraryEach = 40 // documents of each flow; together they don't fit into one engine
)

// backlog is everything at once: each flow has more to ask than can be served.
func backlog(seed uint64, each int) *Demand {
	r := rand.New(rand.NewPCG(seed, 7))
	d := &Demand{End: backlogFor}
	popular := zipf(libraryEach, interest)
	for _, b := range backlogs {
		library := make([][]uint64, libraryEach)
		for i := range library {
			library[i] = newKeys(r, int(logNormal(r, 36, 0.5, 8, 90)))
		}
		for range each {
			blocks := library[popular.draw(r)]
			a := Asked{
				Tenant: b.name, Blocks: blocks, Target: -1,
				In:  len(blocks)*BlockTokens + int(logNormal(r, b.in[0], b.in[1], 10, 12_000)),
				Out: int(logNormal(r, b.out[0], b.out[1], 1, 2500)),
			}
			d.Asked = append(d.Asked, a)
		}
	}
	r.Shuffle(len(d.Asked), func(i, k int) { d.Asked[i], d.Asked[k] = d.Asked[k], d.Asked[i] })
	for i := range d.Asked {
		d.Asked[i].At = float64(i) * 1e-6
	}
	return d
}

// Fair plays a backlog in turns and in order of arrival.
func (p Pool) Fair(seed uint64) (Fairness, error) {
	a := Headgate
	a.Queue = flow.Config{TTL: time.Hour}
	f := Fairness{Flows: len(backlogs), Served: map[string]float64{}}
	longest, inside, most := 0.0, 0.0, 0.0
	count := map[string]int{}
	var end float64
	play := func(watch func(w *world)) (*Record, error) {
		w, err := newWorld(&Run{Pool: p, Demand: backlog(seed, backlogEach*p.Engines/4), Admission: a, Seed: seed})
		if err != nil {
			return nil, err
		}
		watch(w)
		return w.run()
	}
	r, err := play(func(w *world) {
		for i := range w.jobs {
			count[w.jobs[i].Tenant]++
		}
		w.check.tokens = func(j *job, tokens int) {
			if end == 0 {
				f.Served[j.Tenant] += float64(tokens)
			}
		}
		w.check.left = func(j *job) {
			if count[j.Tenant]--; count[j.Tenant] == 0 && end == 0 {
				end = w.play.Now() // it has nothing left that waits
			}
		}
		w.check.watchers = append(w.check.watchers, func(now float64) {
			if end > 0 {
				return
			}
			inside = 0
			for _, e := range w.engines {
				for _, j := range e.jobs {
					inside += j.computed()
					longest = max(longest, j.computed()-float64(j.made))
				}
			}
			most = max(most, inside)
			low, high := math.Inf(1), 0.0
			for _, b := range backlogs {
				low, high = min(low, f.Served[b.name]), max(high, f.Served[b.name])
			}
			f.Gap = max(f.Gap, high-low)
		})
	})
	if err != nil {
		return f, err
	}
	if end == 0 {
		end = backlogFor
	}
	sum, squares := 0.0, 0.0
	for _, x := range f.Served {
		sum += x
		squares += x * x
	}
	f.Jain = sum * sum / (float64(f.Flows) * squares)
	f.Bound = 2 * max(longest, outputWeight*most)
	f.Hit = r.locality(end)
	fcfs, err := play(func(w *world) {
		for i := range w.jobs {
			w.jobs[i].request.Fairness = "all"
		}
	})
	if err != nil {
		return f, err
	}
	f.HitFCFS = fcfs.locality(end)
	return f, nil
}

// locality is the cached share of prompts of what ended by a time, the mean over
// the flows.
func (r *Record) locality(end float64) (hit float64) {
	cached, prompt := map[string]float64{}, map[string]float64{}
	for i := range r.Finished {
		if f := &r.Finished[i]; f.Outcome == Answered && f.End <= end {
			cached[f.Asked.Tenant] += float64(f.Cached)
			prompt[f.Asked.Tenant] += float64(f.Asked.In)
		}
	}
	for _, b := range backlogs {
		hit += cached[b.name] / max(prompt[b.name], 1) / float64(len(backlogs))
	}
	return hit
}
