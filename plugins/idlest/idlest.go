// SPDX-License-Identifier: Apache-2.0

// Package idlest picks the least loaded among candidates that score nearly the
// same.
package idlest

import (
	"fmt"
	"math"

	"github.com/headgate/headgate/plugin"
)

type picker struct{ plugin.Margin }

// New makes the plugin.
func New(o plugin.Options) (any, error) {
	m, err := plugin.NewMargin(o)
	return picker{m}, err
}

// Pick takes the least load within the margin of the best score, at random among
// equals. Without it small differences decide: a burst of short prompts piles up
// where the last one happened to be computed a little faster.
func (p picker) Pick(r *plugin.Request, candidates []plugin.Candidate, scores []float64) int {
	margin := p.Least(scores)
	picked, least, ties := 0, math.MaxInt, 0
	for i, s := range scores {
		if s < margin {
			continue
		}
		switch load := int(candidates[i].Load() + 0.5); {
		case load < least:
			picked, least, ties = i, load, 1
		case load == least:
			// Reservoir sampling: each of n equals wins with probability 1/n.
			if ties++; r.Rand.IntN(ties) == 0 {
				picked = i
			}
		}
	}
	return picked
}

// Reason implements plugin.Reasoner.
func (p picker) Reason(candidates []plugin.Candidate, scores []float64, picked int) string {
	near, same, margin := 0, 0, p.Least(scores)
	load := func(i int) int { return int(candidates[i].Load() + 0.5) }
	for i, s := range scores {
		if s < margin {
			continue
		}
		near++
		if load(i) == load(picked) {
			same++
		}
	}
	if near == 1 {
		return "best score by more than the margin"
	}
	return fmt.Sprintf("least loaded of %d near the best, one of %d", near, same)
}
