// SPDX-License-Identifier: Apache-2.0

package plugin

// Scorer says how good candidates are.
type Scorer interface {
	// Score sets scores[i] to the score of candidates[i]; more is better. Scorers
	// of one profile are added, each times its weight, so the README says in
	// which unit a plugin scores.
	Score(r *Request, candidates []Candidate, scores []float64)
}

// Explainer is a Scorer that can say what a score is made of.
type Explainer interface {
	// Explain is one line about one candidate. It may allocate.
	Explain(r *Request, c *Candidate) string
}
