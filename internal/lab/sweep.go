// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
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

	// Peers are cells of an earlier sweep, whose peers are taken from there instead of
	// being played again. Each cell must be among them, with the same seeds.
	Peers []Comparison
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
	Seeds        []int64   `json:"seeds"` // in the order of Outcome.Seeds
	Ours         float64   `json:"ours"`
	BestPeer     float64   `json:"best_peer"`
	BestPeerName string    `json:"best_peer_name"`
	Gain         float64   `json:"gain"`
	TTFT99       float64   `json:"ttft_p99_ratio"` // ours to the best among peers within 10 % of the best goodput
	Outcomes     []Outcome `json:"outcomes"`
}

// Run compares the policies in every cell. Which peer is a cell's best is known
// only afterwards, which is a harder bar than any one of them. A done context ends
// it at once, and so does the first cell that can't be played.
func (s *Sweep) Run(ctx context.Context) ([]Comparison, error) {
	caller := ctx
	ctx, stop := context.WithCancel(caller)
	defer stop()
	type job struct{ cell, seed int }
	known := make([][]Outcome, len(s.Cells))
	play := s.Policies
	if s.Peers != nil {
		play = slices.DeleteFunc(slices.Clone(play), func(p Policy) bool { return p.Peer })
		for i, cell := range s.Cells {
			var err error
			if known[i], err = s.peers(cell); err != nil {
				return nil, err
			}
		}
	}
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
				w, trials, err := s.one(ctx, &mu, cell, play, bestOf(known[j.cell], j.seed))
				mu.Lock()
				if err != nil && failed == nil {
					failed = err
					stop() // the others' results would be thrown away
				}
				grid[j.cell][j.seed] = trials
				if w != nil {
					units[j.cell] = w.short
				}
				if done[j.cell]++; done[j.cell] == len(s.Seeds) && failed == nil && s.Log != nil {
					c := s.compare(cell, play, grid[j.cell], known[j.cell], units[j.cell])
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
	if err := caller.Err(); err != nil {
		return nil, err // wherever in the work it was noticed
	}
	if failed != nil {
		return nil, failed
	}
	var list []Comparison
	for i, c := range s.Cells {
		list = append(list, s.compare(c, play, grid[i], known[i], units[i]))
	}
	return list, nil
}

// peers are the outcomes of others in a cell that was played before.
func (s *Sweep) peers(cell Cell) ([]Outcome, error) {
	for _, c := range s.Peers {
		if c.Name == cell.Name() && slices.Equal(c.Seeds, s.Seeds) {
			return slices.DeleteFunc(slices.Clone(c.Outcomes), func(o Outcome) bool { return !o.Peer || len(o.Seeds) != len(s.Seeds) }), nil
		}
	}
	return nil, fmt.Errorf("%s with seeds %v is not among the cells to take peers from", cell.Name(), s.Seeds)
}

// bestOf is the largest goodput under one seed, 0 if there is none.
func bestOf(list []Outcome, seed int) float64 {
	best := 0.0
	for _, o := range list {
		best = max(best, o.Seeds[seed])
	}
	return best
}

// trial is one policy under one seed.
type trial struct {
	knee float64
	near Result // at 0.95 of the best peer's

	over, accepted []float64 // as in Outcome
}

// one plays a cell under its seed. Traces are read under mu.
func (s *Sweep) one(ctx context.Context, mu *sync.Mutex, cell Cell, play []Policy, best float64) (*Workload, []trial, error) {
	mu.Lock()
	w, err := s.Traces.Workload(ctx, cell.Workload, cell.N, cell.Seed, cell.Held)
	mu.Unlock()
	for err == nil {
		trials, failed := s.seed(ctx, w, cell, play, best)
		if failed == nil {
			return w, trials, nil
		}
		if !errors.Is(failed, errAllCarried) {
			return nil, nil, fmt.Errorf("%s: %w", cell.Name(), failed)
		}
		mu.Lock()
		w, err = w.larger(ctx)
		mu.Unlock()
	}
	return nil, nil, err
}

// seed plays the policies under one seed. best is the goodput of peers that are not
// played.
func (s *Sweep) seed(ctx context.Context, w *Workload, cell Cell, play []Policy, best float64) ([]trial, error) {
	trials := make([]trial, len(play))
	guess := w.guess
	if cell.TwoSpeed {
		guess *= 0.7
	}
	first := guess
	for i, p := range play {
		k, err := knee(ctx, w, cell, p, guess)
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
	for i, p := range play {
		var err error
		if trials[i].near, err = run(ctx, w, cell, p, 0.95*best); err != nil {
			return nil, err
		}
		if n := trials[i].near.Requests; w.own && n < measuredMin {
			return nil, fmt.Errorf("%d requests are measured at %.3g %s, want at least %d, or one that is late is more than 5 %%: more engines or a longer trace give more",
				n, 0.95*best, w.short, measuredMin)
		}
		for _, times := range s.Overload {
			times = min(times, w.loadMax/best)
			r, err := run(ctx, w, cell, p, times*best)
			if err != nil {
				return nil, err
			}
			trials[i].over = append(trials[i].over, r.Good*times)
			trials[i].accepted = append(trials[i].accepted, 1-r.Refused)
		}
	}
	return trials, nil
}

const (
	// kneeStep is the distance of the loads that a search brackets.
	kneeStep = 1.25

	// A search goes down to this share of its first guess. For a trace that nobody
	// has seen before the guess is worse.
	kneeLeast    = 0.02
	kneeLeastOwn = 1e-4

	// burst is the time in seconds within which requests are no load any more:
	// engines that answer them all in time would do so at any load, endless ones too.
	burst = 1

	// measuredMin is how many requests of a trace of the user's own must be measured.
	measuredMin = 20
)

// errAllCarried ends a search at the bound of a workload that can be made larger.
var errAllCarried = errors.New("all of the workload is carried")

// knee is the largest load with Attainment, by bisection of its logarithm to two
// per cent and a straight line at the end. Brackets are of one grid per workload,
// so what is found does not hang on the guess, which is another policy's knee.
func knee(ctx context.Context, w *Workload, c Cell, p Policy, guess float64) (float64, error) {
	guess = min(w.guess*math.Pow(kneeStep, math.Round(math.Log(guess/w.guess)/math.Log(kneeStep))), w.loadMax)
	var failed error
	good := func(load float64) float64 {
		r, err := run(ctx, w, c, p, load)
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
				if w.larger != nil {
					return 0, errAllCarried
				}
				return w.loadMax, failed
			}
			if n := len(w.roots); w.compress && float64(n)/lo < burst {
				return 0, fmt.Errorf("%d engines answer all %d requests in time even if they come within %d s, which is too few to find what they carry: want fewer engines or a longer trace", c.N, n, burst)
			}
			hi = min(w.loadMax, lo*kneeStep)
			atHi = good(hi)
		}
	} else {
		least := guess * kneeLeast
		if w.own {
			least = guess * kneeLeastOwn
		}
		for atLo < Attainment && failed == nil {
			hi, atHi = lo, atLo
			if lo /= kneeStep; lo < least {
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

func (s *Sweep) compare(cell Cell, played []Policy, seeds [][]trial, known []Outcome, unit string) Comparison {
	c := Comparison{Name: cell.Name(), Workload: cell.Workload, Engines: cell.N, TwoSpeed: cell.TwoSpeed, Unit: unit, Seeds: s.Seeds}
	n := float64(len(seeds))
	for i, p := range played {
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
	}
	for _, o := range known {
		o.Gain = 0
		c.Outcomes = append(c.Outcomes, o)
	}
	best := -1
	for i, o := range c.Outcomes {
		if o.Peer && (best < 0 || o.Goodput > c.Outcomes[best].Goodput) {
			best = i
		}
	}
	if best < 0 {
		return c
	}
	peer := c.Outcomes[best]
	c.BestPeer, c.BestPeerName = peer.Goodput, peer.Policy
	for i := range c.Outcomes {
		o := &c.Outcomes[i]
		o.Worst = math.Inf(1)
		for k, v := range o.Seeds {
			gain := 0.0
			if peer.Seeds[k] > 0 { // it may be from a file
				gain = v/peer.Seeds[k] - 1
			}
			o.Gain += gain / n
			o.Worst = min(o.Worst, gain)
		}
	}
	if o := c.outcome("headgate"); o != nil {
		c.Ours, c.Gain, c.TTFT99 = o.Goodput, o.Gain, c.tailRatio(o)
	}
	return c
}

// tail is the least TTFT99 of the peers that are near the best.
func (c *Comparison) tail() float64 {
	tail := math.Inf(1)
	for _, o := range c.Outcomes {
		if o.Peer && o.Goodput > nearBest*c.BestPeer {
			tail = min(tail, o.TTFT99)
		}
	}
	return tail
}

// tailRatio is a policy's TTFT99 to the peers', 0 if they have none.
func (c *Comparison) tailRatio(o *Outcome) float64 {
	if tail := c.tail(); tail > 0 {
		return o.TTFT99 / tail
	}
	return 0
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
