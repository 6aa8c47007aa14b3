// SPDX-License-Identifier: Apache-2.0

package overload

import (
	"math"
	"slices"
)

// Record is what became of a run's requests.
type Record struct {
	Passed   int     // lower priorities sent while a higher request waited for a better endpoint
	Held     int     // the same while one was held for the sake of running streams
	Pending  float64 // most prefill that was pending per endpoint, seconds
	TPOT     float64
	Drain    []float64 // what the queue said at each second how long it takes to drain; nil without one
	Depth    []int     // requests that waited at each second
	Finished []Fate
}

// Fate is one request's.
type Fate struct {
	Asked   *Asked
	Outcome Outcome
	Waited  float64 // until it was sent; below 0: it never was
	First   float64 // to the first output; 0: none
	Pace    float64 // per token
	Spent   float64 // tokens that engines computed for it
	Cached  int
	Good    bool // answered within both targets
	Target  float64
	End     float64
}

func (w *world) record() *Record {
	r := &Record{Passed: w.check.passed, Held: w.check.held, Pending: w.check.pending, TPOT: w.spec.TPOT, Drain: w.drain, Depth: w.depth}
	for i := range w.jobs {
		j := &w.jobs[i]
		f := Fate{Asked: j.Asked, Outcome: j.outcome, Spent: j.spent, Cached: j.cached, Target: j.target, End: j.end, Waited: j.waited()}
		if j.state == sent {
			f.Spent += j.computed()
		}
		if j.first > 0 {
			f.First = j.first - j.At
		}
		if j.outcome == Answered && j.Out > 1 {
			f.Pace = (j.end - j.first) / float64(j.Out-1)
		}
		f.Good = j.outcome == Answered && (j.target == 0 || f.First <= j.target) && f.Pace <= w.spec.TPOT
		r.Finished = append(r.Finished, f)
	}
	return r
}

// Part is the requests that came in a time.
type Part struct {
	Seconds     float64
	Requests    int
	Goodput     float64         // requests a second within their targets
	GoodTokens  float64         // prompt and answer tokens of those, a second
	Good        float64         // share of the requests
	Refused     float64         // share
	LateFirst   float64         // share that was answered, and too late
	Slow        float64         // share that was in time, and then too slow
	Wasted      float64         // share of computed tokens that were for requests that missed their targets
	First99     float64         // first output, of those that have one
	Hit         float64         // cached share of prompt tokens
	Priorities  map[int]float64 // share within targets
	RefusedLong float64         // refused share of the tenth with the longest prompts
}

// Part judges the requests that came from begin to end.
func (r *Record) Part(begin, end float64) Part {
	p := Part{Seconds: end - begin, Priorities: map[int]float64{}}
	var firsts []float64
	var lengths []int
	wasted, spent, cached, prompt := 0.0, 0.0, 0, 0
	count := map[int]int{}
	in := func(f *Fate) bool { return f.Asked.At >= begin && f.Asked.At < end }
	for i := range r.Finished {
		f := &r.Finished[i]
		if !in(f) {
			continue
		}
		p.Requests++
		count[f.Asked.Priority]++
		lengths = append(lengths, f.Asked.In)
		spent += f.Spent
		if f.First > 0 {
			firsts = append(firsts, f.First)
			cached, prompt = cached+f.Cached, prompt+f.Asked.In
		}
		switch {
		case f.Good:
			p.Good++
			p.GoodTokens += float64(f.Asked.In + f.Asked.Out)
			p.Priorities[f.Asked.Priority]++
			continue
		case f.Outcome == Refused:
			p.Refused++
		case f.Outcome == Answered && f.Pace > r.TPOT:
			p.Slow++
		default:
			p.LateFirst++
		}
		wasted += f.Spent
	}
	p.Goodput, p.GoodTokens = p.Good/p.Seconds, p.GoodTokens/p.Seconds
	n := max(float64(p.Requests), 1)
	p.Good, p.Refused, p.LateFirst, p.Slow = p.Good/n, p.Refused/n, p.LateFirst/n, p.Slow/n
	p.Wasted, p.Hit = wasted/max(spent, 1), float64(cached)/float64(max(prompt, 1))
	p.First99 = quantile(firsts, 0.99)
	for priority := range count {
		p.Priorities[priority] /= float64(count[priority])
	}
	slices.Sort(lengths)
	if len(lengths) > 0 {
		long, refused, all := lengths[len(lengths)*9/10], 0.0, 0.0
		for i := range r.Finished {
			if f := &r.Finished[i]; in(f) && f.Asked.In >= long {
				all++
				if f.Outcome == Refused {
					refused++
				}
			}
		}
		p.RefusedLong = refused / all
	}
	return p
}

// Recovery is how long after a time it takes until requests are served as they
// should be: from then on no second is left in which less than the share that is
// wanted of its requests, and of the second's before and after it, met their
// targets. It ends at end.
func (r *Record) Recovery(from, end, wanted float64) float64 {
	seconds := int(math.Ceil(end - from))
	all, good := make([]float64, seconds), make([]float64, seconds)
	for i := range r.Finished {
		f := &r.Finished[i]
		if s := int(f.Asked.At - from); f.Asked.At >= from && s < seconds {
			all[s]++
			if f.Good {
				good[s]++
			}
		}
	}
	for s := seconds - 1; s >= 0; s-- {
		n, g := 0.0, 0.0
		for k := s; k <= min(s+2, seconds-1); k++ {
			n, g = n+all[k], g+good[k]
		}
		if g < wanted*n {
			return float64(s + 1)
		}
	}
	return 0
}

func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[min(int(q*float64(len(values))), len(values)-1)]
}

// waited is how long the request had no place; below 0: it never got one.
func (j *job) waited() float64 {
	if j.attempts == 0 {
		return -1
	}
	return j.began - j.At
}
