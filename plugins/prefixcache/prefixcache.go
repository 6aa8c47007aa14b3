// SPDX-License-Identifier: Apache-2.0

// Package prefixcache scores an endpoint by how much of the prompt it has
// probably cached.
package prefixcache

import "github.com/headgate/headgate/plugin"

type scorer struct{}

// New makes the plugin. It has no options.
func New(o plugin.Options) (any, error) { return scorer{}, o(&struct{}{}) }

// Score is the cached share of the prompt, 0 to 1.
func (scorer) Score(r *plugin.Request, candidates []plugin.Candidate, scores []float64) {
	for i := range candidates {
		scores[i] = float64(candidates[i].Cached) / float64(max(r.Prompt.N, 1))
	}
}
