// SPDX-License-Identifier: Apache-2.0

// Package random picks at random among candidates that score nearly the same.
package random

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

// Pick draws among those whose score is within the margin of the best.
func (p picker) Pick(r *plugin.Request, _ []plugin.Candidate, scores []float64) int {
	best := 0
	for i, s := range scores {
		if s > scores[best] {
			best = i
		}
	}
	least := scores[best] - max(p.within, p.share*math.Abs(scores[best]))
	near, picked := 0, best
	for i, s := range scores {
		if s < least {
			continue
		}
		// Reservoir sampling: each of n wins with probability 1/n.
		if near++; r.Rand.IntN(near) == 0 {
			picked = i
		}
	}
	return picked
}

// Reason implements plugin.Reasoner.
func (p picker) Reason(_ []plugin.Candidate, scores []float64, _ int) string {
	near, best := 0, slices.Max(scores)
	for _, s := range scores {
		if s >= best-max(p.within, p.share*math.Abs(best)) {
			near++
		}
	}
	return fmt.Sprintf("drawn from %d near the best", near)
}
