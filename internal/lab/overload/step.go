// SPDX-License-Identifier: Apache-2.0

package overload

import (
	"context"
	"math"
	"slices"
)

// The step: a pool that is well loaded gets twice what it can carry, for a
// minute, and then what it had before. Times are seconds.
const (
	stepBefore = 30.0
	stepFor    = 60.0
	stepAfter  = 60.0
	stepLow    = 0.7 // of capacity
	stepHigh   = 2.0

	steadyWarm = 15.0
	steadyFor  = 60.0
)

// attainment is the share of requests within their targets up to which a load is
// carried.
const attainment = 0.95

// Loads are those of the steady runs that a peak is the best of, in capacities.
var Loads = []float64{0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3}

// Study is what is to be compared.
type Study struct {
	Pool       Pool
	Shape      Shape
	Seeds      []uint64
	Admissions []Admission
	Log        func(format string, args ...any) // progress; nil for none
}

// Steady is one admission under one load, over all seeds.
type Steady struct {
	Load    float64 `json:"load"`     // capacities
	Goodput float64 `json:"goodput"`  // requests a second within their targets
	Good    float64 `json:"good"`     // share of the requests that came
	Top     float64 `json:"top"`      // the same of the highest priority
	Wasted  float64 `json:"wasted"`   // share of computed tokens
	Refused float64 `json:"refused"`  // share
	First99 float64 `json:"ttft_p99"` // seconds, of those with a first output
	Hit     float64 `json:"hit_ratio"`
}

// Step is one admission under twice the capacity, over all seeds.
type Step struct {
	Name  string `json:"name"`
	About string `json:"about"`
	Peer  bool   `json:"peer"`

	GoodputOfPeak float64            `json:"goodput_of_peak"`
	Top           float64            `json:"top_priority_slo"`
	Wasted        float64            `json:"wasted"`
	Priorities    map[string]float64 `json:"priorities"` // share within targets
	Worst         StepWorst          `json:"worst_seed"`

	Goodput float64 `json:"goodput"`        // requests a second
	Tokens  float64 `json:"goodput_tokens"` // prompt and answer, a second
	Peak    float64 `json:"peak_goodput"`
	At      float64 `json:"peak_load"`    // capacities
	Refused float64 `json:"refused"`      // share
	Long    float64 `json:"refused_long"` // share of the tenth with the longest prompts
	Slow    float64 `json:"slow"`         // share that was in time and then too slow
	Late    float64 `json:"late"`         // share whose first output was too late, or never came
	First99 float64 `json:"ttft_p99"`

	// Recovery is how long after the step's end requests were served as before, and
	// Drain how long the queue said then that it takes to drain.
	Recovery float64 `json:"recovery_s"`
	Drain    float64 `json:"drain_s"`

	// The share within targets of the requests of the other tenants, and of the greedy one.
	Others float64 `json:"modest_tenants_slo"`
	Greedy float64 `json:"greedy_tenant_slo"`

	Steady   []Steady     `json:"steady"`
	Timeline []TimelineAt `json:"timeline"` // of the first seed
}

// StepWorst is the worst of the seeds, each figure by itself.
type StepWorst struct {
	GoodputOfPeak float64 `json:"goodput_of_peak"`
	Top           float64 `json:"top_priority_slo"`
	Wasted        float64 `json:"wasted"`
	Recovery      float64 `json:"recovery_s"`
	OverDrain     float64 `json:"recovery_over_drain_s"`
}

// TimelineAt is one second of a step.
type TimelineAt struct {
	At      float64 `json:"at"`
	Came    float64 `json:"came"` // requests a second
	Good    float64 `json:"good"`
	Top     float64 `json:"top"` // share of the highest priority within targets; -1: none came
	Waiting int     `json:"waiting"`
}

// Capacity is the largest load, in requests a second, of which Headgate brings
// 95 % within their targets. Everybody's loads are told in it.
func (s *Study) Capacity(ctx context.Context) (float64, error) {
	at := func(rate float64) (float64, error) {
		good := 0.0
		for _, seed := range s.Seeds {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			r, err := s.steady(Headgate, seed, rate)
			if err != nil {
				return 0, err
			}
			good += r.Part(steadyWarm, steadyWarm+steadyFor).Good
		}
		return good / float64(len(s.Seeds)), nil
	}
	low, high := 1.0, 2.0
	for {
		good, err := at(high)
		if err != nil {
			return 0, err
		}
		if good < attainment {
			break
		}
		low, high = high, 1.5*high
	}
	for high/low > 1.01 {
		mid := math.Sqrt(low * high)
		good, err := at(mid)
		if err != nil {
			return 0, err
		}
		if good < attainment {
			high = mid
		} else {
			low = mid
		}
	}
	return low, nil
}

func (s *Study) steady(a Admission, seed uint64, rate float64) (*Record, error) {
	run := Run{Pool: s.Pool, Demand: s.Shape.Make(seed, []Phase{{steadyWarm + steadyFor, rate}}), Admission: a, Seed: seed}
	return run.Play()
}

func (s *Study) step(a Admission, seed uint64, capacity float64) (*Record, error) {
	low, high := stepLow*capacity, stepHigh*capacity
	run := Run{
		Pool: s.Pool, Admission: a, Seed: seed,
		Demand: s.Shape.Make(seed, []Phase{{stepBefore, low}, {stepFor, high}, {stepAfter, low}}),
	}
	return run.Play()
}

// Run plays all of it.
func (s *Study) Run(ctx context.Context) (capacity float64, steps []Step, err error) {
	if capacity, err = s.Capacity(ctx); err != nil {
		return 0, nil, err
	}
	s.logf("capacity %.2f requests/s", capacity)
	for _, a := range s.Admissions {
		step, err := s.study(ctx, a, capacity)
		if err != nil {
			return 0, nil, err
		}
		steps = append(steps, step)
		s.logf("%-14s goodput %.3f of its peak %.2f/s, top %.4f, wasted %.4f, recovery %.0f s, drain %.1f s",
			step.Name, step.GoodputOfPeak, step.Peak, step.Top, step.Wasted, step.Recovery, step.Drain)
	}
	return capacity, steps, nil
}

func (s *Study) logf(format string, args ...any) {
	if s.Log != nil {
		s.Log(format, args...)
	}
}

func (s *Study) study(ctx context.Context, a Admission, capacity float64) (Step, error) {
	step := Step{Name: a.Name, About: a.About, Peer: a.Peer, Priorities: map[string]float64{}}
	for _, load := range Loads {
		if err := ctx.Err(); err != nil {
			return step, err
		}
		steady, err := s.steadies(a, capacity, load)
		if err != nil {
			return step, err
		}
		step.Steady = append(step.Steady, steady)
		if steady.Goodput > step.Peak {
			step.Peak, step.At = steady.Goodput, load
		}
	}
	n := float64(len(s.Seeds))
	step.Worst = StepWorst{GoodputOfPeak: math.Inf(1), Top: 1, OverDrain: math.Inf(-1)}
	for i, seed := range s.Seeds {
		r, err := s.step(a, seed, capacity)
		if err != nil {
			return step, err
		}
		end := stepBefore + stepFor
		p := r.Part(stepBefore, end)
		step.Goodput += p.Goodput / n
		step.Tokens += p.GoodTokens / n
		step.Wasted += p.Wasted / n
		step.Refused, step.Slow, step.Late = step.Refused+p.Refused/n, step.Slow+p.Slow/n, step.Late+p.LateFirst/n
		step.Long += p.RefusedLong / n
		step.First99 += p.First99 / n
		for k, name := range priorityNames {
			step.Priorities[name] += p.Priorities[Priorities[k]] / n
		}
		recovery, drain := r.Recovery(end, end+stepAfter, attainment), r.drainAt(end)
		step.Recovery += recovery / n
		step.Drain += drain / n
		greedy, others := r.tenants(stepBefore, end)
		step.Greedy, step.Others = step.Greedy+greedy/n, step.Others+others/n
		w := &step.Worst
		w.GoodputOfPeak = min(w.GoodputOfPeak, p.Goodput/step.Peak)
		w.Top, w.Wasted = min(w.Top, p.Priorities[Priorities[0]]), max(w.Wasted, p.Wasted)
		w.Recovery, w.OverDrain = max(w.Recovery, recovery), max(w.OverDrain, recovery-drain)
		if i == 0 {
			step.Timeline = r.timeline(stepBefore + stepFor + stepAfter)
		}
	}
	step.Top = step.Priorities[priorityNames[0]]
	step.GoodputOfPeak = step.Goodput / step.Peak
	return step, nil
}

var priorityNames = [len(Priorities)]string{"high", "middle", "low"}

func (s *Study) steadies(a Admission, capacity, load float64) (Steady, error) {
	steady := Steady{Load: load}
	n := float64(len(s.Seeds))
	for _, seed := range s.Seeds {
		r, err := s.steady(a, seed, load*capacity)
		if err != nil {
			return steady, err
		}
		p := r.Part(steadyWarm, steadyWarm+steadyFor)
		steady.Goodput, steady.Good = steady.Goodput+p.Goodput/n, steady.Good+p.Good/n
		steady.Top, steady.Wasted = steady.Top+p.Priorities[Priorities[0]]/n, steady.Wasted+p.Wasted/n
		steady.Refused, steady.First99, steady.Hit = steady.Refused+p.Refused/n, steady.First99+p.First99/n, steady.Hit+p.Hit/n
	}
	return steady, nil
}

// drainAt is how long the queue said at a second that it takes to drain.
func (r *Record) drainAt(at float64) float64 {
	if i := int(at); i < len(r.Drain) {
		return r.Drain[i]
	}
	return 0
}

// tenants is the share within targets of the greedy tenant's requests, and of the
// others'.
func (r *Record) tenants(begin, end float64) (greedy, others float64) {
	var good, all [2]float64
	for i := range r.Finished {
		f := &r.Finished[i]
		if f.Asked.At < begin || f.Asked.At >= end {
			continue
		}
		k := 1
		if f.Asked.Tenant == tenantName(0) {
			k = 0
		}
		all[k]++
		if f.Good {
			good[k]++
		}
	}
	return good[0] / max(all[0], 1), good[1] / max(all[1], 1)
}

func (r *Record) timeline(end float64) []TimelineAt {
	list := make([]TimelineAt, int(end))
	top, topGood := make([]float64, len(list)), make([]float64, len(list))
	for i := range r.Finished {
		f := &r.Finished[i]
		at := int(f.Asked.At)
		if at >= len(list) {
			continue
		}
		list[at].Came++
		high := f.Asked.Priority == Priorities[0]
		if high {
			top[at]++
		}
		if f.Good {
			list[at].Good++
			if high {
				topGood[at]++
			}
		}
	}
	for i := range list {
		list[i].At, list[i].Top = float64(i), -1
		if top[i] > 0 {
			list[i].Top = topGood[i] / top[i]
		}
		if i < len(r.Depth) {
			list[i].Waiting = r.Depth[i]
		}
	}
	return slices.Clip(list)
}
