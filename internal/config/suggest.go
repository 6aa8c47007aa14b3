// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"
)

// suggestion names the known word that an unknown one was most likely meant to
// be, or every known word where none is near and they are few.
func suggestion(unknown string, known []string) string {
	best, least := "", 1+max(1, len(unknown)/3)
	for _, k := range known {
		if n := distance(strings.ToLower(unknown), k); n < least {
			best, least = k, n
		}
	}
	switch {
	case best != "":
		return fmt.Sprintf(": did you mean %s?", best)
	case len(known) > 0 && len(known) <= 9:
		return ": the fields here are " + strings.Join(known, ", ")
	}
	return ""
}

// distance counts the letters to insert, delete, replace or swap with their
// neighbour to turn a into b. Long words are too far from all.
func distance(a, b string) int {
	const far = 64
	if len(a) > far || len(b) > far {
		return far
	}
	var before, last, row [far + 1]int
	for j := range len(b) + 1 {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}
