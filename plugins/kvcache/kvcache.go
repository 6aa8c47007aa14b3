// SPDX-License-Identifier: Apache-2.0

// Package kvcache scores an endpoint by the free share of its KV memory.
package kvcache

import "github.com/headgate/headgate/plugin"

type scorer struct{}

// New makes the plugin. It has no options.
func New(o plugin.Options) (any, error) { return scorer{}, o(&struct{}{}) }

// Score is the free share, 0 to 1. Where it is not known it is the mean of the
// known ones.
func (scorer) Score(_ *plugin.Request, candidates []plugin.Candidate, scores []float64) {
	sum, known := 0.0, 0
	for i := range candidates {
		if u := candidates[i].KVUsage; u.Known {
			sum, known = sum+u.V, known+1
		}
	}
	for i := range candidates {
		switch u := candidates[i].KVUsage; {
		case u.Known:
			scores[i] = 1 - min(max(u.V, 0), 1)
		case known > 0:
			scores[i] = 1 - min(max(sum/float64(known), 0), 1)
		default:
			scores[i] = 1
		}
	}
}
