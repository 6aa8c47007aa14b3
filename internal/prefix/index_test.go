// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// prompt makes the keys of a prompt of n blocks, the first shared of which are
// those of every prompt with that group.
func prompt(group, id uint64, shared, n int) []uint64 {
	keys := make([]uint64, n)
	chain := join(1, group)
	for i := range keys {
		if i >= shared {
			chain = join(chain, id)
		}
		chain = join(chain, uint64(i))
		keys[i] = chain
	}
	return keys
}

func matched(x *Index, s Slot, keys []uint64) int {
	var l Lookup
	l.Reset(x, keys)
	return l.Matched(s)
}

type match struct {
	slot   Slot
	blocks int
}

// longest are the first n holders that Longest goes through.
func longest(l *Lookup, n int) (found []match) {
	for s, blocks := range l.Longest() {
		if len(found) == n {
			break
		}
		found = append(found, match{s, blocks})
	}
	return found
}

func TestHoldersOfTheLongestPrefixComeFirst(t *testing.T) {
	x := New(1000, 1)
	a, b, c := x.Join(100), x.Join(100), x.Join(100)
	x.Learn(a, prompt(1, 1, 4, 8))
	x.Learn(b, prompt(1, 2, 4, 12))
	x.Learn(c, prompt(2, 3, 4, 8))
	var l Lookup
	l.Reset(x, prompt(1, 2, 4, 20))
	want := []match{{b, 12}, {a, 4}}
	if got := longest(&l, 8); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := longest(&l, 1); !slices.Equal(got, want[:1]) {
		t.Errorf("got %v, want %v", got, want[:1])
	}
	for s, n := range map[Slot]int{a: 4, b: 12, c: 0} {
		if got := l.Matched(s); got != n {
			t.Errorf("slot %d holds %d blocks, want %d", s, got, n)
		}
	}
}

// SCH-7: what is evicted first is the tail of a prompt, not its head.
func TestTailIsForgottenBeforeHead(t *testing.T) {
	x := New(1000, 1)
	s := x.Join(100)
	long := prompt(1, 1, 0, 80)
	x.Learn(s, long)
	x.Learn(s, prompt(2, 2, 0, 40))
	if n := matched(x, s, long); n != 60 {
		t.Errorf("%d blocks of the first prompt are left, want 60", n)
	}
	if x.Held(s) != 100 {
		t.Errorf("%d blocks are held, want 100", x.Held(s))
	}
	x.Learn(s, prompt(3, 3, 0, 500))
	if n := matched(x, s, prompt(3, 3, 0, 500)); n != 100 {
		t.Errorf("of a prompt larger than the cache %d blocks are kept, want 100", n)
	}
}

// SCH-5: an endpoint that leaves takes its entries with it, and one that comes
// to its place is cold.
func TestEndpointIsForgottenAtOnce(t *testing.T) {
	x := New(100_000, 1)
	a, b := x.Join(20_000), x.Join(20_000)
	for i := range uint64(1000) {
		x.Learn(a, prompt(i, i, 0, 10))
	}
	x.Learn(b, prompt(5, 5, 0, 10))
	x.Leave(a)
	var l Lookup
	l.Reset(x, prompt(5, 5, 0, 10))
	if got := longest(&l, 9); !slices.Equal(got, []match{{b, 10}}) {
		t.Errorf("after one holder left, %v", got)
	}
	for i := range uint64(1000) {
		if n := matched(x, a, prompt(i, i, 0, 10)); n != 0 {
			t.Fatalf("an endpoint that left holds %d blocks", n)
		}
	}
	d := x.Join(20_000)
	for i := range uint64(1000) {
		if n := matched(x, d, prompt(i, i, 0, 10)); n != 0 {
			t.Fatalf("a new endpoint holds %d blocks", n)
		}
	}
	for i := range uint64(1000) {
		x.Learn(b, prompt(1<<20+i, i, 0, 1)) // memory comes back while others learn
	}
	if n := x.Blocks(); n != 10+1000 {
		t.Errorf("%d blocks are left, want %d", n, 10+1000)
	}
}

func TestIndexIsBounded(t *testing.T) {
	x := New(500, 1)
	var slots []Slot
	for range 10 {
		slots = append(slots, x.Join(1000))
	}
	for i := range uint64(500) {
		x.Learn(slots[i%10], prompt(i, i, 0, int(i%70)+1))
		if x.Blocks() > 500 {
			t.Fatalf("%d blocks, want at most 500", x.Blocks())
		}
	}
	if len(x.blocks) > 500 {
		t.Errorf("memory for %d blocks", len(x.blocks))
	}
	x.Resize(slots[9], 5)
	if x.Held(slots[9]) > 5 {
		t.Errorf("%d blocks are held after a resize to 5", x.Held(slots[9]))
	}
}

// naive is the index as one would write it down: per endpoint a list of keys,
// the newest first, and matching block by block.
type naive struct {
	max     int
	held    map[Slot][]uint64
	size    map[Slot]int
	left    [][]uint64     // what endpoints that left have not given back
	holders map[uint64]int // by key, those that left among them
}

func (n *naive) learn(s Slot, keys []uint64) {
	n.reclaim(64 + len(keys))
	for i, k := range keys[:min(len(keys), n.size[s], n.max)] {
		if at := slices.Index(n.held[s], k); at >= 0 {
			n.held[s] = slices.Insert(slices.Delete(n.held[s], at, at+1), i, k)
			continue
		}
		if len(n.held[s]) >= n.size[s] {
			n.drop(s)
		}
		if n.holders[k] == 0 && !n.makeRoom(s, i) {
			return
		}
		n.held[s] = slices.Insert(n.held[s], i, k)
		n.holders[k]++
	}
}

// makeRoom spares the first blocks of s.
func (n *naive) makeRoom(s Slot, spared int) bool {
	for len(n.holders) >= n.max {
		most := s
		for other, held := range n.held {
			if d := len(held) - len(n.held[most]); d > 0 || d == 0 && most != s && other > most {
				most = other
			}
		}
		switch {
		case len(n.left) > 0:
			n.reclaim(1)
		case most == s && len(n.held[s]) == spared:
			return false
		default:
			n.drop(most)
		}
	}
	return true
}

func (n *naive) reclaim(blocks int) {
	for len(n.left) > 0 {
		for ; len(n.left[0]) > 0; blocks-- {
			if blocks <= 0 {
				return
			}
			n.left[0] = n.withoutLast(n.left[0])
		}
		n.left = n.left[1:]
	}
}

func (n *naive) drop(s Slot) { n.held[s] = n.withoutLast(n.held[s]) }

func (n *naive) withoutLast(held []uint64) []uint64 {
	k := held[len(held)-1]
	if n.holders[k]--; n.holders[k] == 0 {
		delete(n.holders, k)
	}
	return held[:len(held)-1]
}

func (n *naive) matched(s Slot, keys []uint64) int {
	for i, k := range keys {
		if !slices.Contains(n.held[s], k) {
			return i
		}
	}
	return len(keys)
}

func TestIndexIsTheNaiveOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := naive{
			max:  rapid.SampledFrom([]int{1 << 20, 1, 7, 30}).Draw(t, "bound"),
			held: map[Slot][]uint64{}, size: map[Slot]int{}, holders: map[uint64]int{},
		}
		x := New(n.max, 1)
		var slots []Slot
		draw := func() []uint64 {
			size := rapid.IntRange(0, 12).Draw(t, "blocks")
			return prompt(rapid.Uint64Range(0, 2).Draw(t, "group"), rapid.Uint64Range(0, 3).Draw(t, "id"),
				rapid.IntRange(0, 6).Draw(t, "shared"), size)
		}
		many := rapid.Bool().Draw(t, "many")
		for range rapid.IntRange(1, 120).Draw(t, "steps") {
			switch what := rapid.IntRange(0, 9).Draw(t, "what"); {
			case len(slots) == 0 || what == 0:
				for range map[bool]int{false: 1, true: 40}[many] {
					if len(x.vacant) == 0 && len(n.left) > 0 {
						n.reclaim(len(n.left[0]))
					}
					s := x.Join(rapid.IntRange(1, 20).Draw(t, "capacity"))
					if n.size[s] != 0 {
						t.Fatalf("slot %d was given twice", s)
					}
					n.held[s], n.size[s] = nil, x.slots[s].capacity
					slots = append(slots, s)
				}
			case what == 1:
				i := rapid.IntRange(0, len(slots)-1).Draw(t, "leaves")
				s := slots[i]
				x.Leave(s)
				n.left = append(n.left, n.held[s])
				delete(n.held, s)
				delete(n.size, s)
				slots = slices.Delete(slots, i, i+1)
			case what == 2:
				s := rapid.SampledFrom(slots).Draw(t, "resized")
				n.size[s] = rapid.IntRange(1, 20).Draw(t, "capacity")
				for len(n.held[s]) > n.size[s] {
					n.drop(s)
				}
				x.Resize(s, n.size[s])
			default:
				s, keys := rapid.SampledFrom(slots).Draw(t, "learns"), draw()
				before := map[Slot]int{}
				for _, o := range slots {
					before[o] = x.Held(o)
				}
				x.Learn(s, keys)
				n.learn(s, keys)
				for _, o := range slots {
					if share := n.max / len(slots); o != s && x.Held(o) < before[o] && x.Held(o) < share {
						t.Fatalf("slot %d is left %d blocks of a share of %d", o, x.Held(o), share)
					}
				}
			}
			if x.Blocks() != len(n.holders) || x.Blocks() > n.max {
				t.Fatalf("%d blocks, want %d and at most %d", x.Blocks(), len(n.holders), n.max)
			}
			keys := draw()
			var l Lookup
			l.Reset(x, keys)
			holders := 0
			for _, s := range slots {
				want := n.matched(s, keys)
				if got := l.Matched(s); got != want {
					t.Fatalf("slot %d holds %d blocks, want %d", s, got, want)
				}
				if want > 0 {
					holders++
				}
			}
			k := rapid.IntRange(0, 5).Draw(t, "longest")
			got := longest(&l, k)
			if len(got) != min(k, holders) {
				t.Fatalf("%d holders found, want %d", len(got), min(k, holders))
			}
			worst := 1 << 30
			for _, m := range got {
				if m.blocks > worst || m.blocks != n.matched(m.slot, keys) {
					t.Fatalf("found %v, want %d blocks at most %d", m, n.matched(m.slot, keys), worst)
				}
				worst = m.blocks
			}
			longer := 0
			for _, s := range slots {
				if len(got) == k && k > 0 && n.matched(s, keys) > worst {
					longer++
				}
			}
			if longer > len(got) {
				t.Fatalf("%d endpoints hold more than the worst that was found", longer)
			}
		}
		x.reclaim(1 << 30)
		n.reclaim(1 << 30)
		if x.Blocks() != len(n.holders) {
			t.Fatalf("%d blocks, want %d", x.Blocks(), len(n.holders))
		}
		if used := len(x.entries) - len(x.unused); used != entriesOf(x, slots) {
			t.Fatalf("%d entries are in use, want %d", used, entriesOf(x, slots))
		}
	})
}

// entriesOf is how many entries these endpoints need: one for each block, and their ends.
func entriesOf(x *Index, slots []Slot) int {
	n := len(slots)
	for _, s := range slots {
		n += x.Held(s)
	}
	return n
}

// some goes through the first n holders.
func some(l *Lookup, n int) {
	for range l.Longest() {
		if n--; n == 0 {
			return
		}
	}
}

func TestLookupAllocatesNothing(t *testing.T) {
	x := New(10_000, 1)
	for i := range 100 {
		x.Learn(x.Join(1000), prompt(1, uint64(i), 50, 100))
	}
	keys := prompt(1, 7, 50, 100)
	var l Lookup
	pass := func() {
		l.Reset(x, keys)
		some(&l, 32)
	}
	pass()
	if n := testing.AllocsPerRun(100, pass); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// warm is an index of 500k blocks on that many endpoints. Every endpoint has
// the first blocks of the prompt, ten a part of it and one all but the end.
func warm(endpoints, blocks int) (*Index, []uint64) {
	x := New(1<<20, 1)
	keys := prompt(1, 1, blocks/8, blocks)
	per := 500_000 / endpoints
	for i := range endpoints {
		s := x.Join(per + blocks)
		for have := 0; have < per; have += 500 {
			x.Learn(s, prompt(2, uint64(i)<<32|uint64(have), 4, min(500, per-have)))
		}
		n := blocks / 16
		switch {
		case i == endpoints/2:
			n = blocks * 15 / 16
		case i%(endpoints/10+1) == 0:
			n = blocks/8 + i*blocks/endpoints/2
		}
		x.Learn(s, keys[:n])
	}
	return x, keys
}

func BenchmarkLookup(b *testing.B) {
	for _, c := range []struct{ endpoints, k int }{{10, 1}, {100, 1}, {1000, 1}, {10, 128}, {100, 128}, {1000, 128}} {
		b.Run(fmt.Sprintf("%dx%dk", c.endpoints, c.k), func(b *testing.B) {
			x, keys := warm(c.endpoints, c.k<<10*4/BlockBytes)
			var l Lookup
			b.ReportAllocs()
			for b.Loop() {
				l.Reset(x, keys)
				some(&l, 32)
			}
		})
	}
}
