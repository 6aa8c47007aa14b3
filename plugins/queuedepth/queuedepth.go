// SPDX-License-Identifier: Apache-2.0

// Package queuedepth scores an endpoint by the queue that its engine reports.
package queuedepth

import "github.com/headgate/headgate/plugin"

type scorer struct{}

// New makes the plugin. It has no options.
func New(o plugin.Options) (any, error) { return scorer{}, o(&struct{}{}) }

// Score is 1 for the shortest and 0 for the longest queue. One that is not known
// gets the mean of the known ones: it is neither empty nor full.
func (scorer) Score(_ *plugin.Request, candidates []plugin.Candidate, scores []float64) {
	var least, most, sum float64
	known := 0
	for i := range candidates {
		q := candidates[i].Queued
		if !q.Known {
			continue
		}
		if known == 0 {
			least, most = q.V, q.V
		}
		least, most, sum = min(least, q.V), max(most, q.V), sum+q.V
		known++
	}
	for i := range candidates {
		q := candidates[i].Queued
		switch {
		case known == 0 || most == least:
			scores[i] = 1
		case q.Known:
			scores[i] = (most - q.V) / (most - least)
		default:
			scores[i] = (most - sum/float64(known)) / (most - least)
		}
	}
}
