// SPDX-License-Identifier: Apache-2.0

package cost

import "math"

// Lengths is the distribution of answers' lengths, learned from answers that
// ended. It begins as an exponential one with a mean of 200 tokens.
type Lengths struct {
	count [lengthMax + 1]float64
	share [lengthMax + 1]float64 // answers of at most so many tokens
	since int                    // answers since share was made
	mean  float64
}

const (
	lengthMax    = 4096
	lengthMean   = 200
	lengthWeight = 20   // answers that the beginning stands for
	lengthRefit  = 100  // answers between two looks
	lengthKeep   = 4000 // answers before the old ones are halved
	meanPace     = 0.02
	meanMax      = 4 * lengthMax // that an answer counts as for the mean
)

// NewLengths is the distribution before any answer.
func NewLengths() *Lengths {
	l := &Lengths{mean: lengthMean}
	for k := range l.count {
		l.count[k] = lengthWeight * (math.Exp(-float64(k)/lengthMean) - math.Exp(-float64(k+1)/lengthMean))
	}
	l.refit()
	return l
}

// Mean is the expected length of an answer.
func (l *Lengths) Mean() float64 { return l.mean }

// Observe adds an answer that ended. One that an engine says is absurdly long counts
// as a long one: taken at its word it would spoil the mean for a thousand others.
func (l *Lengths) Observe(tokens int) {
	l.mean += meanPace * (float64(min(tokens, meanMax)) - l.mean)
	l.count[min(max(tokens, 0), lengthMax)]++
	if l.since++; l.since >= lengthRefit {
		l.since = 0
		l.refit()
	}
}

func (l *Lengths) refit() {
	sum := 0.0
	for k, n := range l.count {
		sum += n
		l.share[k] = sum
	}
	for k := range l.share {
		l.share[k] /= sum
	}
	if sum > lengthKeep {
		for k := range l.count {
			l.count[k] /= 2
		}
	}
}

// Stream is one answer that has begun.
type Stream struct {
	First  float64 // time of its first token
	Tokens int     // so far
}

// Table is what a stall of any length does to the streams of one engine: how
// many end over their target. It is made at one moment and read between.
type Table [cells + 1]float64

// The table has entry 0 for no stall and then two per doubling from 20 ms.
const (
	cells    = 22 // up to 29 s; a longer stall counts as that
	cellStep = 0.02
)

var cellAt = func() (at [cells + 1]float64) {
	for b := 1; b <= cells; b++ {
		at[b] = cellStep * math.Pow(2, float64(b-1)/2)
	}
	return at
}()

// cellPer is one over the length of each entry.
var cellPer = func() (per [cells]float64) {
	for b := range per {
		per[b] = 1 / (cellAt[b+1] - cellAt[b])
	}
	return per
}()

// Reset empties the table.
func (t *Table) Reset() { *t = Table{} }

// Add counts a stream that has produced s.Tokens by now. gap is the engine's
// time per token while nobody stalls it. A stream has slack while its tokens are
// ahead of its target; a stall uses it up, and after that the answer must still
// be so long that tokens at their usual pace win the time back. So it misses
// its target if it ends before.
func (t *Table) Add(now float64, s Stream, tpot, gap float64, lengths *Lengths) {
	k := s.Tokens
	if k >= lengthMax-1 || k < 1 {
		return
	}
	slack := tpot*float64(k-1) - (now - s.First)
	perToken := 1 / (tpot - min(gap, 0.8*tpot)) // tokens that win a second back
	have := lengths.share[k]
	live := 1 / max(1-have, 1e-4)
	for b := range t {
		over := cellAt[b] - slack
		if over <= 0 {
			continue
		}
		at := lengthMax
		if more := over * perToken; more < lengthMax {
			at = min(k+int(more), lengthMax)
		}
		t[b] += (lengths.share[at] - have) * live
	}
}

// At is how many streams are expected to miss their target after a stall. Which entry
// it is differs from engine to engine, so that is found without branches.
func (t *Table) At(seconds float64) float64 {
	switch { // neither is common
	case seconds <= 0:
		return t[0]
	case seconds >= cellAt[cells]:
		return t[cells]
	}
	// Two entries per doubling: the exponent and one comparison of the mantissa.
	// Below the first entry both come out at zero or less.
	raw := math.Float64bits(seconds * (1 / cellStep))
	upper := 1 - (raw&(1<<52-1)-sqrt2Mantissa)>>63
	b := min(max(2*(int(raw>>52)-1023)+1+int(upper), 0), cells-1)
	return t[b] + (t[b+1]-t[b])*(seconds-cellAt[b])*cellPer[b]
}

var sqrt2Mantissa = math.Float64bits(math.Sqrt2) & (1<<52 - 1)
