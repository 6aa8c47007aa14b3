// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// busy has the endpoints learn prompts of ten blocks in turn, none of them twice.
type busy struct {
	x    *Index
	next uint64
}

func (b *busy) learn(rounds int, slots ...Slot) {
	for range rounds {
		for _, s := range slots {
			b.next++
			b.x.Learn(s, prompt(b.next, b.next, 0, 10))
		}
	}
}

func held(x *Index, slots ...Slot) (n []int) {
	for _, s := range slots {
		n = append(n, x.Held(s))
	}
	return n
}

// even reports whether the shares differ by one block at most.
func even(shares []int) bool { return slices.Max(shares)-slices.Min(shares) <= 1 }

func TestJoinerGetsItsShareOfAFullIndex(t *testing.T) {
	x := New(1000, 1)
	b := busy{x: x}
	a, c := x.Join(800), x.Join(800)
	b.learn(200, a, c)
	if got := held(x, a, c); !even(got) || x.Blocks() != 1000 {
		t.Fatalf("two share the index as %v", got)
	}
	joiner := x.Join(800)
	keys := prompt(0, 0, 0, 10)
	x.Learn(joiner, keys)
	if n := matched(x, joiner, keys); n != 10 {
		t.Errorf("of the first prompt of one that joined %d blocks are known, want 10", n)
	}
	b.learn(34, joiner)
	if got := held(x, a, c, joiner); !even(got) {
		t.Errorf("after a third joined, %v", got)
	}
	b.learn(500, a, c, joiner)
	if got := held(x, a, c, joiner); !even(got) || x.Blocks() != 1000 {
		t.Errorf("with three, %v of %d", got, x.Blocks())
	}
}

func TestRestartGivesRoomBackAndGetsItAgain(t *testing.T) {
	x := New(1000, 1)
	b := busy{x: x}
	a, c, d := x.Join(800), x.Join(800), x.Join(800)
	b.learn(200, a, c, d)
	x.Leave(a)
	a = x.Join(800)
	b.learn(1, a)
	if got := held(x, c, d); slices.Min(got) < 333 {
		t.Errorf("the others have %v: what a restart gave back was not used first", got)
	}
	b.learn(200, c, d)
	if got := held(x, a, c, d); got[0] != 10 || !even(got[1:]) || x.Blocks() != 1000 {
		t.Errorf("while it is idle, %v of %d", got, x.Blocks())
	}
	b.learn(200, a, c, d)
	if got := held(x, a, c, d); !even(got) {
		t.Errorf("once it is busy again, %v", got)
	}
}

// Blocks that several had who left are free once the last of them is taken back.
func TestWhatIsLeftBehindIsTakenFirst(t *testing.T) {
	x := New(1000, 1)
	b := busy{x: x}
	stays, shared := x.Join(800), prompt(1, 1, 0, 800)
	b.learn(20, stays)
	leave := []Slot{x.Join(800), x.Join(800), x.Join(800)}
	for _, s := range leave {
		x.Learn(s, shared)
	}
	joiner := x.Join(800)
	for _, s := range leave {
		x.Leave(s)
	}
	b.learn(20, joiner)
	if got := held(x, stays, joiner); got[0] != 200 || got[1] != 200 {
		t.Errorf("the one that stays and the one that joined have %v, want 200 each", got)
	}
}

// What one needs less than an even share is for the others.
func TestSmallCacheIsKeptWhole(t *testing.T) {
	x := New(1000, 1)
	b := busy{x: x}
	small, large := x.Join(50), []Slot{x.Join(400), x.Join(800), x.Join(5000)}
	b.learn(300, append(large, small)...)
	b.learn(300, large...)
	if got := held(x, large...); x.Held(small) != 50 || !even(got) || x.Blocks() != 1000 {
		t.Errorf("the small cache has %d blocks, the others %v", x.Held(small), got)
	}
	x.Resize(large[0], 100)
	b.learn(300, large...)
	if got := held(x, large...); got[0] != 100 || !even(got[1:]) || x.Blocks() != 1000 {
		t.Errorf("after one became smaller, %v of %d", got, x.Blocks())
	}
}

// An engine that is asked for nothing evicts nothing.
func TestIdleEndpointKeepsItsShare(t *testing.T) {
	x := New(1000, 1)
	b := busy{x: x}
	idle, others := x.Join(800), []Slot{x.Join(800), x.Join(800), x.Join(800)}
	long := prompt(0, 0, 0, 800)
	x.Learn(idle, long)
	b.learn(1000, others...)
	if n := matched(x, idle, long); n != 250 {
		t.Errorf("%d blocks are left, want the first 250 of the prompt", n)
	}
}

// Of a prompt that is larger than its share an endpoint has the head.
func TestHeadIsKeptOfAPromptLargerThanTheShare(t *testing.T) {
	x := New(1000, 1)
	b := busy{x: x}
	a, c := x.Join(2000), x.Join(2000)
	b.learn(200, a, c)
	long := prompt(0, 0, 0, 2000)
	for range 3 {
		x.Learn(a, long)
		if n := matched(x, a, long); n != 500 || x.Held(c) != 500 {
			t.Errorf("%d blocks of it are kept and the other has %d, want 500 each", n, x.Held(c))
		}
	}
}

// level is the largest share by which the caches fit into the bound, each with
// the lesser of its size and that share.
func level(bound int, caches []int) int {
	share, sum := 0, 0
	for sum <= bound && share <= bound {
		share++
		sum = 0
		for _, c := range caches {
			sum += min(c, share)
		}
	}
	return share - 1
}

// Whatever came before, endpoints that are busy end with even shares.
func TestSharesBecomeEven(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bound := rapid.IntRange(1, 400).Draw(t, "bound")
		x := New(bound, 1)
		b := busy{x: x}
		var slots []Slot
		var caches []int
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			cache := rapid.IntRange(1, 300).Draw(t, "cache")
			switch what := rapid.IntRange(0, 9).Draw(t, "what"); {
			case len(slots) == 0 || what < 2:
				slots, caches = append(slots, x.Join(cache)), append(caches, cache)
			case what == 2:
				i := rapid.IntRange(0, len(slots)-1).Draw(t, "leaves")
				x.Leave(slots[i])
				slots, caches = slices.Delete(slots, i, i+1), slices.Delete(caches, i, i+1)
			case what == 3:
				i := rapid.IntRange(0, len(slots)-1).Draw(t, "resized")
				x.Resize(slots[i], cache)
				caches[i] = cache
			default:
				b.learn(rapid.IntRange(1, 40).Draw(t, "rounds"), rapid.SampledFrom(slots).Draw(t, "learns"))
			}
		}
		b.learn(100, slots...)
		share := level(bound, caches)
		for i, n := range held(x, slots...) {
			if n < min(caches[i], share) || n > min(caches[i], share+1) {
				t.Fatalf("an even share is %d, caches of %v have %v", share, caches, held(x, slots...))
			}
		}
	})
}

// Blocks that many hold are free only once the last of them has forgotten, which
// is not for one request to wait for.
func TestSharedBlocksMakeRoomInSteps(t *testing.T) {
	x := New(1000, 1)
	shared := prompt(1, 1, 0, 1000)
	var slots []Slot
	for range 200 {
		s := x.Join(1000)
		x.Learn(s, shared)
		slots = append(slots, s)
	}
	sum := func() (n int) {
		for _, h := range held(x, slots...) {
			n += h
		}
		return n
	}
	joiner, own := x.Join(1000), prompt(2, 2, 0, 500)
	for turn, known := 0, 0; known < 500; turn++ {
		before := sum()
		x.Learn(joiner, own)
		if took := before - sum(); took > len(own)+sharedMax {
			t.Fatalf("%d evictions for one prompt", took)
		}
		n := matched(x, joiner, own)
		if n <= known || turn > 100 {
			t.Fatalf("turn %d: %d blocks are known, %d before", turn, n, known)
		}
		known = n
	}
	if got := held(x, slots...); !even(got) || got[0] != 500 {
		t.Errorf("those who share are left %d to %d blocks, want 500 each", slices.Min(got), slices.Max(got))
	}
}

// What is taken from one endpoint is memory for the next, through any number of
// joins and restarts.
func TestMemoryIsBounded(t *testing.T) {
	x := New(1000, 1)
	b := busy{x: x}
	var slots []Slot
	for range 50 {
		s := x.Join(2000)
		slots = append(slots, s)
		b.learn(120, s) // alone it would fill the index
		b.learn(3, slots...)
	}
	for i := range 500 {
		x.Leave(slots[i%50])
		slots[i%50] = x.Join(2000)
		b.learn(3, slots[i%50], slots[(i+7)%50])
	}
	if len(x.blocks) > 1000 || len(x.entries) > 1000+len(x.slots) || len(x.slots) > 60 {
		t.Errorf("memory for %d blocks, %d entries and %d endpoints", len(x.blocks), len(x.entries), len(x.slots))
	}
	if len(x.ranking.heap) != 50 || len(x.ids.cells) > 4096 {
		t.Errorf("%d endpoints are ranked, %d cells for keys", len(x.ranking.heap), len(x.ids.cells))
	}
}

func TestLearningAtTheBoundAllocatesNothing(t *testing.T) {
	x := New(1000, 1)
	b := busy{x: x}
	slots := []Slot{x.Join(800), x.Join(800), x.Join(30)}
	b.learn(1000, slots...)
	keys := make([]uint64, 10)
	turn := 0
	if n := testing.AllocsPerRun(1000, func() {
		turn++
		for i := range keys {
			b.next++
			keys[i] = join(3, b.next)
		}
		x.Learn(slots[turn%3], keys)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestRankingIsAMaximum: whoever is left out, and whatever changed.
func TestRankingIsAMaximum(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var r ranking
		in := map[Slot]int{}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			s, n := Slot(rapid.IntRange(0, 20).Draw(t, "slot")), rapid.IntRange(0, 30).Draw(t, "blocks")
			if _, known := in[s]; !known {
				r.add(s)
				n = 0
			} else if n == 30 {
				r.remove(s)
				delete(in, s)
				continue
			} else {
				r.set(s, n)
			}
			in[s] = n
			for but := range in {
				most, blocks := none, 0
				for o, n := range in {
					if o != but && (most == none || ranked(o, n) > ranked(most, blocks)) {
						most, blocks = o, n
					}
				}
				if got, n := r.most(but); got != most || n != blocks {
					t.Fatalf("but for %d slot %d has most, %d; want %d with %d", but, got, n, most, blocks)
				}
			}
		}
	})
}
