// SPDX-License-Identifier: Apache-2.0

package plugin

// Picker chooses among scored candidates.
type Picker interface {
	// Pick returns an index into candidates, which is not empty; scores[i] is the
	// total of candidates[i].
	Pick(r *Request, candidates []Candidate, scores []float64) int
}

// Reasoner is a Picker that can say why it picked.
type Reasoner interface {
	// Reason says in a few words why candidates[picked] won. It may allocate.
	Reason(candidates []Candidate, scores []float64, picked int) string
}
