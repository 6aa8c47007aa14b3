// SPDX-License-Identifier: Apache-2.0

// Package cost is the price of placing a request on an engine, in seconds, and
// what the price rests on: an engine's speed as its own traffic taught it, the
// prefill that it still has to do, and the streams that a further prefill would
// push over their target.
//
// Score is a pure function: immediate dispatch and a queue with late binding
// call the same one. The package decides nothing and holds no lock; the pool's
// book owns an Engine each and calls it. Times are seconds since any moment that
// the owner keeps to.
package cost

import (
	"math"

	"github.com/headgate/headgate/plugin"
)

// Params weigh the terms of a score. They are not for users to tune: they were
// fixed on other seeds and windows than those that docs/routing.md reports.
type Params struct {
	Attention float64 // how much a token costs more per earlier token
	Delay     float64 // a second of prefill, per stream that waits meanwhile
	Decode    float64 // seconds that the answer takes longer in a larger batch
	Stall     float64 // seconds that a stream over its target is worth
	Late      float64 // a second over the budget for the first output
	Budget    float64 // share of the TTFT target from which on time is dear
}

// Default is what docs/routing.md reports on.
var Default = Params{
	Attention: 2.5e-5,
	Delay:     0.15,
	Decode:    0.5,
	Stall:     20,
	Late:      3,
	Budget:    0.1,
}

// Per output token: of each further sequence in the batch, and of each token of
// its context. They are an A100's, within a factor of two of others.
const (
	perSequence = 2.5e-5
	perContext  = 3e-8
)

// Ask is what a request costs anywhere.
type Ask struct {
	Prompt float64 // tokens
	Output float64 // expected tokens of the answer
	Waited float64 // since its arrival
	TTFT   float64 // target; 0: none
	Load   float64 // to load its adapter where that is not resident; 0: it has none
}

// Terms are what a score is made of, in seconds; Total is their sum.
type Terms struct {
	Ahead  float64 // prefill of others before it
	Own    float64 // its own prefill, first output included
	Delay  float64 // that other requests wait meanwhile
	Decode float64 // that answers take longer
	Stall  float64 // streams that are expected to miss their target because of it
	Late   float64 // its first output over budget

	Streams float64 // how many streams Stall stands for
	Total   float64
}

// Work is a prefill of fresh tokens behind cached ones, in tokens of the first.
func (p *Params) Work(fresh, cached float64) float64 {
	return fresh * (1 + p.Attention*(cached+fresh/2))
}

// Score is what placing the request on an endpoint costs the pool. What that is made of
// it puts into t, unless that is nil.
func (p *Params) Score(a *Ask, c *plugin.Candidate, t *Terms) (total float64) {
	cached, running, intercept := float64(c.Cached), c.Load(), c.Intercept
	fresh := a.Prompt - cached
	if fresh < 1 {
		fresh = 1
	}
	if a.Load > 0 && !c.Resident {
		intercept += a.Load // the whole batch waits for it
	}
	prefill := c.PerToken * p.Work(fresh, cached)
	ahead, own := c.Ahead, prefill+intercept
	delay := p.Delay * running * prefill
	decode := p.Decode * a.Output * (2*perSequence*running + perContext*(c.Context+running*a.Prompt))
	streams, late := 0.0, 0.0
	if c.Stalls != nil {
		if streams = c.Stalls.At(ahead+prefill) - c.Stalls.At(ahead); streams < 0 {
			streams = 0
		}
	}
	if a.TTFT > 0 {
		if late = p.Late * (a.Waited + ahead + own - p.Budget*a.TTFT); late < 0 {
			late = 0
		}
	}
	stall := p.Stall * streams
	total = ahead + own + delay + decode + stall + late
	if t != nil {
		*t = Terms{ahead, own, delay, decode, stall, late, streams, total}
	}
	return total
}

// Rate is an engine's time to a first output: a straight line over the work.
type Rate struct {
	PerToken  float64
	Intercept float64
}

// Seconds is how long that much work takes.
func (r Rate) Seconds(work float64) float64 { return r.PerToken*work + r.Intercept }

// Prior is the rate of an engine about which nothing is known, in a pool about
// which nothing is: 10,000 tokens a second after 30 ms.
var Prior = Rate{PerToken: 1 / 10_000.0, Intercept: 0.03}

// Line learns a rate as the least-squares line through observations that fade.
type Line struct{ n, x, y, xx, xy float64 }

const (
	fade         = 0.98
	priorWork    = 4000
	perTokenMin  = 1e-6
	interceptMax = 0.5
)

// Observe adds one prefill of that much work that took that long.
func (l *Line) Observe(work, seconds float64) {
	if work <= 0 || seconds <= 0 || math.IsNaN(work+seconds) || math.IsInf(work+seconds, 0) {
		return
	}
	l.n = l.n*fade + 1
	l.x = l.x*fade + work
	l.y = l.y*fade + seconds
	l.xx = l.xx*fade + work*work
	l.xy = l.xy*fade + work*seconds
}

// Rate fits the line. The prior stays in it as two observations of weight one,
// of no work and of 4000 tokens: an engine's is the rate of its pool, so that
// one that joins is taken for an average one, and not for a slow one that is
// never tried.
//
// On an engine much slower than the prior, short prompts would make a line that
// falls or hardly rises, on which nothing is worth having cached. There only how
// the prior shares the time between first output and tokens is kept, and not how
// fast it is.
func (l *Line) Rate(prior Rate) Rate {
	if l.n == 0 {
		return prior
	}
	pace := l.y / (prior.PerToken*l.x + prior.Intercept*l.n)
	if r, falls := l.fit(prior); !falls && pace <= paceMax {
		return r
	}
	r, _ := l.fit(Rate{prior.PerToken * pace, prior.Intercept * pace})
	return r
}

// paceMax is how many times slower than the prior an engine may be for the prior
// to be taken as it is.
const paceMax = 4

// fit also reports whether the line falls, or begins above any first output.
func (l *Line) fit(prior Rate) (r Rate, falls bool) {
	at := prior.Seconds(priorWork)
	n, x, y := l.n+2, l.x+priorWork, l.y+prior.Intercept+at
	xx, xy := l.xx+priorWork*priorWork, l.xy+priorWork*at
	slope := (xy - x*y/n) / (xx - x*x/n)
	intercept := (y - slope*x) / n
	if intercept < 0 {
		intercept, slope = 0, xy/xx
	}
	falls = slope < perTokenMin || intercept > interceptMax
	if intercept > interceptMax { // the rest is left to the slope
		intercept, slope = interceptMax, (xy-interceptMax*x)/xx
	}
	return Rate{max(slope, perTokenMin), intercept}, falls
}
