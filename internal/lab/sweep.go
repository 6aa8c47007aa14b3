// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"sync"
)

// Attainment is the share of requests that must meet both of their targets.
const Attainment = 0.95

// Sweep is what is to be compared.
type Sweep struct {
	Cells    []Cell
	Seeds    []int64
	Policies []Policy
	Traces   *Traces
	Overload []float64 // multiples of the best peer's goodput at which to look too
	Log      io.Writer // progress, a line per cell; nil for none
	Workers  int       // 0: one per processor
}

// Outcome is one policy in one cell, over all seeds.
type Outcome struct {
	Policy  string    `json:"policy"`
	Peer    bool      `json:"peer"`
	Goodput float64   `json:"goodput"` // largest load with 95 % of requests in their targets, mean over seeds
	Seeds   []float64 `json:"seeds"`
	Gain    float64   `json:"gain"`      // over the cell's best peer
	Worst   float64   `json:"worst"`     // of the seeds
	TTFT99  float64   `json:"ttft_p99"`  // at 0.95 of the best peer's goodput
	TPOT99  float64   `json:"tpot_p99"`  // there
	Hit     float64   `json:"hit_ratio"` // there
	Good    float64   `json:"attainment"`
	Loads   float64   `json:"adapter_loads,omitempty"`

	// At each multiple of Sweep.Overload: requests in their targets, in units of the
	// best peer's goodput, and the share of requests that was not refused.
	Overload []float64 `json:"overload,omitempty"`
	Accepted []float64 `json:"accepted,omitempty"`
}

// Comparison is one cell.
type Comparison struct {
	Name         string    `json:"name"`
	Workload     string    `json:"workload"`
	Engines      int       `json:"engines"`
	TwoSpeed     bool      `json:"two_speed"`
	Unit         string    `json:"unit"`
	Ours         float64   `json:"ours"`
	BestPeer     float64   `json:"best_peer"`
	BestPeerName string    `json:"best_peer_name"`
	Gain         float64   `json:"gain"`
	TTFT99       float64   `json:"ttft_p99_ratio"` // ours to the best among peers within 10 % of the best goodput
	Outcomes     []Outcome `json:"outcomes"`
}

// Run compares the policies in every cell. Which peer is a cell's best is known
// only afterwards, which is a harder bar than any one of them. A done context ends
// it with the search that is under way.
func (s *Sweep) Run(ctx context.Context) ([]Comparison, error) {
	type job struct{ cell, seed int }
	jobs := make(chan job)
	grid := make([][][]trial, len(s.Cells))
	units := make([]string, len(s.Cells))
	for i := range grid {
		grid[i] = make([][]trial, len(s.Seeds))
	}
	var mu sync.Mutex
	var failed error
	done := make([]int, len(s.Cells))
	var wait sync.WaitGroup
	workers := s.Workers
	if workers == 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	for range workers {
		wait.Go(func() {
			for j := range jobs {
				cell := s.Cells[j.cell]
				cell.Seed = s.Seeds[j.seed]
				mu.Lock() // traces are read under it
				w, err := s.Traces.Workload(cell.Workload, cell.N, cell.Seed, cell.Held)
				mu.Unlock()
				var trials []trial
				if err == nil {
					trials, err = s.seed(ctx, w, cell)
				}
				mu.Lock()
				if err != nil && failed == nil {
					failed = fmt.Errorf("%s: %w", cell.Name(), err)
				}
				grid[j.cell][j.seed] = trials
				if w != nil {
					units[j.cell] = w.short
				}
				if done[j.cell]++; done[j.cell] == len(s.Seeds) && failed == nil && s.Log != nil {
					c := s.compare(cell, grid[j.cell], units[j.cell])
					fmt.Fprintf(s.Log, "%-26s headgate %8.3f  best peer %8.3f %-18s %+6.1f %%  p99 ×%.2f\n",
						c.Name, c.Ours, c.BestPeer, c.BestPeerName, 100*c.Gain, c.TTFT99)
				}
				mu.Unlock()
			}
		})
	}
	for i := range s.Cells {
		for k := range s.Seeds {
			jobs <- job{i, k}
		}
	}
	close(jobs)
	wait.Wait()
	if failed != nil {
		return nil, failed
	}
	var list []Comparison
	for i, c := range s.Cells {
		list = append(list, s.compare(c, grid[i], units[i]))
	}
	return list, nil
}

// trial is one policy under one seed.
type trial struct {
	knee float64
	near Result // at 0.95 of the best peer's

	over, accepted []float64 // as in Outcome
}

func (s *Sweep) seed(ctx context.Context, w *Workload, cell Cell) ([]trial, error) {
	trials := make([]trial, len(s.Policies))
	best, guess := 0.0, w.guess
	if cell.TwoSpeed {
		guess *= 0.7
	}
	first := guess
	for i, p := range s.Policies {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		k, err := knee(w, cell, p, guess)
		if err != nil {
			return nil, err
		}
		trials[i].knee = k
		if p.Peer {
			best = max(best, k)
		}
		guess = max(k, first*0.3)
	}
	if best == 0 {
		best = first
	}
	for i, p := range s.Policies {
		var err error
		if trials[i].near, err = run(w, cell, p, 0.95*best); err != nil {
			return nil, err
		}
		for _, times := range s.Overload {
			times = min(times, w.loadMax/best)
			r, err := run(w, cell, p, times*best)
			if err != nil {
				return nil, err
			}
			trials[i].over = append(trials[i].over, r.Good*times)
			trials[i].accepted = append(trials[i].accepted, 1-r.Refused)
		}
	}
	return trials, nil
}

// kneeStep is the distance of the loads that a search brackets.
const kneeStep = 1.25

// knee is the largest load with Attainment, by bisection of its logarithm to two
// per cent and a straight line at the end. Brackets are of one grid per workload,
// so what is found does not hang on the guess, which is another policy's knee.
func knee(w *Workload, c Cell, p Policy, guess float64) (float64, error) {
	guess = min(w.guess*math.Pow(kneeStep, math.Round(math.Log(guess/w.guess)/math.Log(kneeStep))), w.loadMax)
	var failed error
	good := func(load float64) float64 {
		r, err := run(w, c, p, load)
		if err != nil {
			failed = err
		}
		return r.Good
	}
	lo, hi := guess, guess
	atLo := good(guess)
	atHi := atLo
	if atLo >= Attainment {
		for atHi >= Attainment {
			if lo, atLo = hi, atHi; lo >= w.loadMax {
				return w.loadMax, failed
			}
			hi = min(w.loadMax, lo*kneeStep)
			atHi = good(hi)
		}
	} else {
		for atLo < Attainment {
			hi, atHi = lo, atLo
			if lo /= kneeStep; lo < guess*0.02 {
				return lo, failed
			}
			atLo = good(lo)
		}
	}
	for hi/lo > 1.02 && failed == nil {
		mid := math.Sqrt(lo * hi)
		if at := good(mid); at >= Attainment {
			lo, atLo = mid, at
		} else {
			hi, atHi = mid, at
		}
	}
	part := 0.5
	if atLo > atHi {
		part = (atLo - Attainment) / (atLo - atHi)
	}
	return lo + (hi-lo)*part, failed
}

// nearBest is which peers a tail of latency is compared with: one that carries
// far less is no alternative, however quick it is.
const nearBest = 0.9

func (s *Sweep) compare(cell Cell, seeds [][]trial, unit string) Comparison {
	c := Comparison{Name: cell.Name(), Workload: cell.Workload, Engines: cell.N, TwoSpeed: cell.TwoSpeed, Unit: unit}
	n := float64(len(seeds))
	best := -1
	for i, p := range s.Policies {
		o := Outcome{Policy: p.Name, Peer: p.Peer}
		for _, trials := range seeds {
			t := trials[i]
			o.Seeds = append(o.Seeds, t.knee)
			o.Goodput += t.knee / n
			o.TTFT99, o.TPOT99, o.Hit, o.Good = o.TTFT99+t.near.P99/n, o.TPOT99+t.near.Slowest/n, o.Hit+t.near.Hit/n, o.Good+t.near.Good/n
			o.Loads += float64(t.near.Loads) / n
			o.Overload, o.Accepted = added(o.Overload, t.over, n), added(o.Accepted, t.accepted, n)
		}
		c.Outcomes = append(c.Outcomes, o)
		if p.Peer && (best < 0 || o.Goodput > c.Outcomes[best].Goodput) {
			best = i
		}
	}
	if best < 0 {
		return c
	}
	peer := c.Outcomes[best]
	c.BestPeer, c.BestPeerName = peer.Goodput, peer.Policy
	tail := math.Inf(1)
	for i := range c.Outcomes {
		o := &c.Outcomes[i]
		o.Worst = math.Inf(1)
		for k, v := range o.Seeds {
			gain := v/peer.Seeds[k] - 1
			o.Gain += gain / n
			o.Worst = min(o.Worst, gain)
		}
		if o.Peer && o.Goodput > nearBest*peer.Goodput {
			tail = min(tail, o.TTFT99)
		}
	}
	if at := slices.IndexFunc(c.Outcomes, func(o Outcome) bool { return o.Policy == "headgate" }); at >= 0 {
		o := c.Outcomes[at]
		c.Ours, c.Gain, c.TTFT99 = o.Goodput, o.Gain, o.TTFT99/tail
	}
	return c
}

// added adds a part of more to sums.
func added(sums, more []float64, n float64) []float64 {
	if sums == nil {
		sums = make([]float64, len(more))
	}
	for i, v := range more {
		sums[i] += v / n
	}
	return sums
}
