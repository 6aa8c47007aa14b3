// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/headgate/headgate/plugin"
)

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*(1+math.Abs(b)) }

// A score by hand: 2000 tokens, half of them cached, on an engine that does
// 10,000 a second and has 0.4 s to do before.
func TestScoreByHand(t *testing.T) {
	stalls := &Table{}
	for b := range stalls {
		stalls[b] = cellAt[b] // one stream per second of stall
	}
	a := Ask{Prompt: 2000, Output: 100, Waited: 0.2, TTFT: 1}
	at := plugin.Candidate{Cached: 1000, Ahead: 0.4, PerToken: 1e-4, Intercept: 0.03, InFlight: 10, Context: 5000, Stalls: stalls}
	var got Terms
	Default.Score(&a, &at, &got)
	prefill := 1e-4 * 1000 * (1 + 2.5e-5*1500) // 0.10375
	want := Terms{
		Ahead:   0.4,
		Own:     prefill + 0.03,
		Delay:   0.15 * 10 * prefill,
		Decode:  0.5 * 100 * (2*2.5e-5*10 + 3e-8*(5000+10*2000)),
		Streams: prefill,
		Stall:   20 * prefill,
		Late:    3 * (0.2 + 0.4 + prefill + 0.03 - 0.1),
	}
	want.Total = want.Ahead + want.Own + want.Delay + want.Decode + want.Stall + want.Late
	for name, pair := range map[string][2]float64{
		"ahead": {got.Ahead, want.Ahead}, "own": {got.Own, want.Own}, "delay": {got.Delay, want.Delay},
		"decode": {got.Decode, want.Decode}, "stall": {got.Stall, want.Stall}, "late": {got.Late, want.Late},
		"total": {got.Total, want.Total},
	} {
		if !near(pair[0], pair[1]) {
			t.Errorf("%s: %v, want %v", name, pair[0], pair[1])
		}
	}
}

// An adapter is loaded first where it is not resident.
func TestScoreOfAnAdapter(t *testing.T) {
	for _, c := range []struct {
		load     float64
		resident bool
		own      float64
	}{{0, false, 0.03}, {0.5, true, 0.03}, {0.5, false, 0.53}} {
		var got Terms
		total := Default.Score(&Ask{Load: c.load}, &plugin.Candidate{Intercept: 0.03, Resident: c.resident}, &got)
		if !near(got.Own, c.own) || total != got.Total || total != Default.Score(&Ask{Load: c.load}, &plugin.Candidate{Intercept: 0.03, Resident: c.resident}, nil) {
			t.Errorf("%+v: own %v, total %v of %v", c, got.Own, total, got.Total)
		}
	}
}

func TestWithoutTargetsTheirTermsAreOff(t *testing.T) {
	var got Terms
	Default.Score(&Ask{Prompt: 8000, Waited: 9}, &plugin.Candidate{PerToken: 1e-4, Ahead: 5}, &got)
	if got.Stall != 0 || got.Late != 0 {
		t.Errorf("stall %v, late %v", got.Stall, got.Late)
	}
}

func TestLineLearnsAnEngine(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, truth := range []struct{ perToken, intercept float64 }{{1 / 31_000.0, 0.01}, {1 / 4_000.0, 0.05}, {1 / 15_000.0, 0.2}} {
		var l Line
		for range 200 {
			work := 200 + 8000*rnd.Float64()
			l.Observe(work, (truth.perToken*work+truth.intercept)*(0.9+0.2*rnd.Float64()))
		}
		for _, work := range []float64{1000, 8000} {
			got, want := l.Rate(Prior).Seconds(work), truth.perToken*work+truth.intercept
			if math.Abs(got-want) > 0.25*want {
				t.Errorf("%+v: %v s for %v tokens, want %v", truth, got, work, want)
			}
		}
	}
	var l Line
	l.Observe(math.NaN(), 1)
	l.Observe(1, math.Inf(1))
	l.Observe(-1, 1)
	if l != (Line{}) || l.Rate(Prior) != Prior {
		t.Error("nonsense was learned")
	}
}

// Short prompts on a slow engine, the prior being a fast one's: what is cached must
// still be worth something.
func TestLineLearnsASlowEngineFromShortPrompts(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, spread := range []float64{0, 40} {
		var l Line
		for i := range 60 {
			work := 360 + spread*(rnd.Float64()-0.5)
			l.Observe(work, (0.05+work/150)*(0.7+0.6*rnd.Float64()))
			rate := l.Rate(Prior)
			whole, part := rate.Seconds(360), rate.Seconds(75)
			if part > 0.75*whole {
				t.Fatalf("after %d: %v s whole and %v s with most of it cached", i+1, whole, part)
			}
			if i > 10 && math.Abs(whole-2.45) > 0.4*2.45 {
				t.Fatalf("after %d: %v s, want about 2.45", i+1, whole)
			}
		}
	}
}

// The table against the definition: draw the lengths of the answers and let each
// stream go on after the stall.
func TestTableIsWhatStreamsWouldDo(t *testing.T) {
	lengths := NewLengths()
	rnd := rand.New(rand.NewPCG(3, 4))
	const tpot, gap, now = 0.1, 0.03, 100.0
	for _, s := range []Stream{{First: 98, Tokens: 60}, {First: 99.5, Tokens: 10}, {First: 99, Tokens: 5}, {First: 96, Tokens: 41}} {
		var table Table
		table.Add(now, s, tpot, gap, lengths)
		for _, stall := range []float64{0, 0.05, 0.4, 1.3, 6} {
			missed, n := 0, 0
			for n < 40_000 {
				// The prior is exponential with a mean of 200.
				length := int(rnd.ExpFloat64() * 200)
				if length <= s.Tokens {
					continue
				}
				n++
				end := now + stall + float64(length-s.Tokens)*gap
				if end-s.First > tpot*float64(length-1) {
					missed++
				}
			}
			got, want := table.At(stall), float64(missed)/float64(n)
			// Between its entries the table is a straight line.
			if math.Abs(got-want) > 0.05 {
				t.Errorf("%+v, stall %v: %v of a stream, want %v", s, stall, got, want)
			}
		}
	}
}

func TestTableNeverFalls(t *testing.T) {
	lengths := NewLengths()
	rnd := rand.New(rand.NewPCG(5, 6))
	for range 50 {
		var table Table
		for range 20 {
			table.Add(10, Stream{First: 10 * rnd.Float64(), Tokens: rnd.IntN(5000)}, 0.05+rnd.Float64(), rnd.Float64()/10, lengths)
		}
		last := -1.0
		for x := 0.0; x < 40; x = x*1.1 + 0.001 {
			v := table.At(x)
			if v < last-1e-9 || v > 20 || math.IsNaN(v) {
				t.Fatalf("%v streams after %v s, %v after less", v, x, last)
			}
			last = v
		}
	}
}

func BenchmarkScore(b *testing.B) {
	var table Table
	table.Add(10, Stream{First: 9, Tokens: 20}, 0.1, 0.02, NewLengths())
	a := Ask{Prompt: 2000, Output: 100, TTFT: 1}
	at := plugin.Candidate{Cached: 1000, Ahead: 0.4, PerToken: 1e-4, InFlight: 10, Stalls: &table}
	b.ReportAllocs()
	for b.Loop() {
		Default.Score(&a, &at, nil)
	}
}

// What one engine says of one answer is soon made up for by others.
func TestAnAbsurdLengthIsNoMean(t *testing.T) {
	l := NewLengths()
	l.Observe(1 << 40)
	if l.Mean() > 3*lengthMean {
		t.Errorf("after one the mean is %v", l.Mean())
	}
	for range 300 {
		l.Observe(lengthMean)
	}
	if l.Mean() > 1.01*lengthMean {
		t.Errorf("after 300 more the mean is %v", l.Mean())
	}
}
