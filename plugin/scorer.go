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

// Patient is a Scorer that counts Candidate.Ahead as time that the request would
// wait. With such a scorer a request in a queue may wait for an endpoint that has
// no room yet, if that costs less than another; without one the choice is among
// endpoints with room.
type Patient interface {
	// Patient does nothing; having it is the statement.
	Patient()
}
