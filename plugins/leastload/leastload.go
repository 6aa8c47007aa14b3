// SPDX-License-Identifier: Apache-2.0

// Package leastload scores an endpoint by how many requests it carries: those of
// this gateway, and as many more as its engine reports.
package leastload

import (
	"math"

	"github.com/headgate/headgate/plugin"
)

type scorer struct{}

// New makes the plugin. It has no options.
func New(o plugin.Options) (any, error) { return scorer{}, o(&struct{}{}) }

// Score is 1 for the least loaded and 0 for the most loaded candidate.
func (scorer) Score(_ *plugin.Request, candidates []plugin.Candidate, scores []float64) {
	// Whole requests: what others have is an estimate, and a hundredth of a request
	// of it would otherwise count as much as ten where nobody has more.
	load := func(i int) float64 { return math.Round(candidates[i].Load()) }
	least, most := load(0), load(0)
	for i := range candidates {
		least, most = min(least, load(i)), max(most, load(i))
	}
	for i := range candidates {
		scores[i] = 1
		if most > least {
			scores[i] = (most - load(i)) / (most - least)
		}
	}
}
