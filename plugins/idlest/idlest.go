// SPDX-License-Identifier: Apache-2.0

// Package idlest picks the least loaded among candidates that score nearly the
// same.
package idlest

import (
	"fmt"
	"math"
	"slices"

	"github.com/headgate/headgate/plugin"
)

type picker struct{ within, share float64 }

// New makes the plugin.
func New(o plugin.Options) (any, error) {
	options := struct {
		Within float64 `json:"within"`
		Share  float64 `json:"share"`
	}{}
	if err := o(&options); err != nil {
		return nil, err
	}
	if options.Within < 0 || options.Share < 0 {
		return nil, fmt.Errorf("within and share: must not be negative")
	}
	return picker{options.Within, options.Share}, nil
}

// Pick takes the least load within the margin of the best score, at random among
// equals. Without it small differences decide: a burst of short prompts piles up
// where the last one happened to be computed a little faster.
func (p picker) Pick(r *plugin.Request, candidates []plugin.Candidate, scores []float64) int {
	best := scores[0]
	for _, s := range scores {
		if s > best {
			best = s
		}
	}
	margin := p.margin(best)
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

// margin is the least score that counts as near the best.
func (p picker) margin(best float64) float64 { return best - max(p.within, p.share*math.Abs(best)) }

// Reason implements plugin.Reasoner.
func (p picker) Reason(candidates []plugin.Candidate, scores []float64, picked int) string {
	near, same, margin := 0, 0, p.margin(slices.Max(scores))
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
