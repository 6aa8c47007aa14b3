// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"testing"

	"pgregory.net/rapid"
)

// Whatever loads are set, the order holds every place once, the least load first, and
// the ends of equals are where the load changes.
func TestOrderOfLoadsStaysOne(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 20).Draw(rt, "places")
		o, want := newByLoad(n), make([]int32, n)
		for range rapid.IntRange(1, 50).Draw(rt, "steps") {
			place := rapid.IntRange(0, n-1).Draw(rt, "place")
			load := rapid.OneOf(rapid.IntRange(0, 5), rapid.IntRange(-1, 2*loadMax)).Draw(rt, "load")
			o.set(place, load)
			want[place] = int32(min(max(load, 0), loadMax))
		}
		for i, place := range o.order {
			switch {
			case o.at[place] != int32(i):
				rt.Fatalf("place %d is at %d, and counts as at %d", place, i, o.at[place])
			case o.loads[place] != want[place]:
				rt.Fatalf("place %d has load %d, want %d", place, o.loads[place], want[place])
			case i > 0 && o.loads[o.order[i-1]] > o.loads[place]:
				rt.Fatalf("load %d comes before %d", o.loads[o.order[i-1]], o.loads[place])
			}
			end := o.equals(i)
			if end <= i || o.loads[o.order[end-1]] != o.loads[place] || end < n && o.loads[o.order[end]] == o.loads[place] {
				rt.Fatalf("equals of %d (load %d) end at %d", i, o.loads[place], end)
			}
		}
	})
}
