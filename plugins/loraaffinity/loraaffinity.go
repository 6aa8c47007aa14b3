// SPDX-License-Identifier: Apache-2.0

// Package loraaffinity scores an endpoint by whether the request's adapter was
// used there lately.
package loraaffinity

import "github.com/headgate/headgate/plugin"

type scorer struct{}

// New makes the plugin. It has no options.
func New(o plugin.Options) (any, error) { return scorer{}, o(&struct{}{}) }

// Score is 1 where the adapter is, or where none is asked for, and 0 elsewhere.
func (scorer) Score(r *plugin.Request, candidates []plugin.Candidate, scores []float64) {
	for i := range candidates {
		scores[i] = 0
		if r.Adapter == "" || candidates[i].Resident {
			scores[i] = 1
		}
	}
}
