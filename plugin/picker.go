// SPDX-License-Identifier: Apache-2.0

package plugin

// Picker chooses among scored candidates.
type Picker interface {
	// Pick returns an index into scores, which is not empty.
	Pick(r *Request, scores []float64) int
}
