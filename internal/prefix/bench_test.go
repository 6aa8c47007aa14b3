// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"fmt"
	"testing"
)

func BenchmarkLearn(b *testing.B) {
	for _, k := range []int{1, 128} {
		blocks := k << 10 * 4 / BlockBytes
		b.Run(fmt.Sprintf("own/%dk", k), func(b *testing.B) { learnOwn(b, blocks) })
		for _, endpoints := range []int{10, 1000} {
			b.Run(fmt.Sprintf("bound/%dx%dk", endpoints, k), func(b *testing.B) { learnAtBound(b, endpoints, blocks) })
			b.Run(fmt.Sprintf("joiner/%dx%dk", endpoints, k), func(b *testing.B) { learnJoiners(b, endpoints, blocks) })
		}
	}
}

// learnOwn is one endpoint whose cache is full.
func learnOwn(b *testing.B, blocks int) {
	x := New(1<<20, 1)
	s := x.Join(1 << 16)
	b.ReportAllocs()
	i := uint64(0)
	for b.Loop() {
		i++
		x.Learn(s, prompt(i, i, 0, blocks))
	}
}

// full is an index at its bound, held in even shares.
func full(endpoints int) (x *Index, slots []Slot, next uint64) {
	x = New(1<<20, 1)
	for range endpoints {
		slots = append(slots, x.Join(1<<20))
	}
	for x.Blocks() < 1<<20 {
		next++
		x.Learn(slots[next%uint64(endpoints)], prompt(next, next, 0, 16))
	}
	return x, slots, next
}

// learnAtBound is equally busy endpoints that have their shares.
func learnAtBound(b *testing.B, endpoints, blocks int) {
	x, slots, i := full(endpoints)
	b.ReportAllocs()
	for b.Loop() {
		i++
		x.Learn(slots[i%uint64(endpoints)], prompt(i, i, 0, blocks))
	}
}

// learnJoiners is as many endpoints again that join a full index and take their
// shares of it, a half in all.
func learnJoiners(b *testing.B, endpoints, blocks int) {
	b.ReportAllocs()
	for n := 0; n < b.N; {
		b.StopTimer()
		x, _, i := full(endpoints)
		var joined []Slot
		for range endpoints {
			joined = append(joined, x.Join(1<<20))
		}
		b.StartTimer()
		for range max(1<<19/blocks, 1) {
			if n++; n > b.N {
				break
			}
			i++
			x.Learn(joined[i%uint64(endpoints)], prompt(i, i, 0, blocks))
		}
	}
}
