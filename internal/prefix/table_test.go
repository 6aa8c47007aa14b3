// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"testing"

	"pgregory.net/rapid"
)

// TestTableIsAMap: with keys that share their cells, at every border of the
// array, and with the growth in between.
func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		table, want := newTable(seed), map[uint64]int32{}
		key := rapid.OneOf(
			rapid.Uint64Range(0, 40),
			// The multiplier is odd, so it has an inverse: these crowd at the end.
			rapid.Custom(func(t *rapid.T) uint64 {
				return inverse(seed|1) * (^uint64(0) - rapid.Uint64Range(0, 300).Draw(t, "from the end"))
			}),
		)
		for range rapid.IntRange(0, 600).Draw(t, "steps") {
			k := key.Draw(t, "key")
			id, known := want[k]
			if got, ok := table.get(k); ok != known || ok && got != id {
				t.Fatalf("key %d: got %d, %v, want %d, %v", k, got, ok, id, known)
			}
			if known {
				table.remove(k)
				delete(want, k)
				continue
			}
			want[k] = int32(len(want))
			table.put(k, want[k])
		}
		if table.n != len(want) {
			t.Fatalf("%d keys, want %d", table.n, len(want))
		}
		for k, id := range want {
			if got, ok := table.get(k); !ok || got != id {
				t.Fatalf("key %d: got %d, %v, want %d", k, got, ok, id)
			}
		}
	})
}

// inverse of an odd number, by Newton's method.
func inverse(n uint64) uint64 {
	x := n
	for range 6 {
		x *= 2 - n*x
	}
	return x
}
