// SPDX-License-Identifier: Apache-2.0

// Package mutation names the safety rules that can be taken away, one at a
// time, to see that the checkers of internal/sim notice. It owns the names; the
// rules are where they are kept, as in
//
//	if n <= highest && !mutation.NoEpoch {
//
// In every build but those with the tag mutate the names are constants, so the
// compiler leaves nothing of them. internal/sim switches them.
package mutation
