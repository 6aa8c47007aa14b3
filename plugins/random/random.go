// SPDX-License-Identifier: Apache-2.0

// Package random picks at random among candidates that score nearly the same.
package random

import (
	"fmt"

	"github.com/headgate/headgate/plugin"
)

type picker struct{ plugin.Margin }

// New makes the plugin.
func New(o plugin.Options) (any, error) {
	m, err := plugin.NewMargin(o)
	return picker{m}, err
}

// Pick draws among those whose score is within the margin of the best.
func (p picker) Pick(r *plugin.Request, _ []plugin.Candidate, scores []float64) int {
	least := p.Least(scores)
	near, picked := 0, 0
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
	near, least := 0, p.Least(scores)
	for _, s := range scores {
		if s >= least {
			near++
		}
	}
	return fmt.Sprintf("drawn from %d near the best", near)
}
