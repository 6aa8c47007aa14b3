// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"iter"
	"math/bits"
	"slices"
)

// Slot is an endpoint's place in an Index.
type Slot int32

// Index is which endpoint holds which blocks. It has one owner at a time.
//
// Each endpoint's blocks are in an LRU list of their own, as large as the
// engine's cache. Learning a prompt leaves its first block the newest and its
// last the oldest, so the tail of a prompt is forgotten before its head, and an
// endpoint that holds a block always holds all that come before it. Hence the
// holders along a prompt only ever become fewer, and the longest match is found
// by bisection instead of block by block.
//
// The blocks in all are bounded. At the bound, room for a new one is taken from
// what endpoints that left have not given back yet, and else from the endpoint
// that holds most: that is the one that learns unless another holds more. So the
// endpoints' shares become even, but for those that need less than an even share,
// and nobody's is cut below that for another.
type Index struct {
	blocksMax int

	ids    table // key to block
	blocks []block
	free   []int32 // blocks that nobody holds

	// Each block has stride words: bit s is set while slot s holds it.
	bits   []uint64
	stride int

	// All lists are rings in one array, so that what is taken from one endpoint
	// is memory for the next.
	entries []entry
	unused  []int32

	slots   []lru
	ranking ranking  // of those that are endpoints; behind while one learns
	alive   []uint64 // bit s: slot s is an endpoint
	vacant  []Slot
	leaving []Slot // forgotten already, their entries not yet taken back
}

// block is a block's key and where one holder has its entry. Most blocks have
// one holder, and the others' maps stay small.
type block struct {
	key   uint64
	owner Slot // none: its holders have it in their maps
	entry int32
}

const none Slot = -1

// lru is the blocks of one endpoint. The ring goes from its ends by older through
// all entries, the newest first.
type lru struct {
	capacity int
	n        int
	at       map[int32]int32 // block to entry, where another slot owns the block
	ends     int32           // the entry that holds no block
}

type entry struct{ block, newer, older int32 }

// New makes an empty index. blocksMax bounds its blocks in all, however many
// endpoints there are. A block has an entry for each endpoint that holds it, and
// of those only the capacities are a bound. seed is a number that clients cannot
// know.
func New(blocksMax int, seed uint64) *Index {
	return &Index{blocksMax: max(blocksMax, 1), ids: newTable(seed), stride: 1, alive: make([]uint64, 1)}
}

// Blocks is how many blocks somebody holds.
func (x *Index) Blocks() int { return x.ids.n }

// Held is how many blocks an endpoint holds.
func (x *Index) Held(s Slot) int { return x.slots[s].n }

// Join adds an endpoint whose engine can keep that many blocks.
func (x *Index) Join(capacity int) Slot {
	if len(x.vacant) == 0 && len(x.leaving) > 0 {
		x.reclaim(x.slots[x.leaving[0]].n)
	}
	var s Slot
	if n := len(x.vacant); n > 0 {
		s = x.vacant[n-1]
		x.vacant = x.vacant[:n-1]
	} else {
		s = Slot(len(x.slots))
		x.slots = append(x.slots, lru{})
		if len(x.slots) > 64*x.stride {
			x.widen()
		}
	}
	ends := x.newEntry()
	x.entries[ends] = entry{newer: ends, older: ends}
	x.slots[s] = lru{capacity: max(capacity, 1), at: map[int32]int32{}, ends: ends}
	x.ranking.add(s)
	x.alive[s/64] |= 1 << (s % 64)
	return s
}

// widen makes room for twice as many endpoints.
func (x *Index) widen() {
	wide := make([]uint64, 2*len(x.bits))
	for i := range x.blocks {
		copy(wide[2*x.stride*i:], x.bits[x.stride*i:x.stride*(i+1)])
	}
	x.bits, x.stride = wide, 2*x.stride
	x.alive = append(x.alive, make([]uint64, len(x.alive))...)
}

// Resize changes how many blocks an endpoint keeps.
func (x *Index) Resize(s Slot, capacity int) {
	l := &x.slots[s]
	l.capacity = max(capacity, 1)
	for l.n > l.capacity {
		x.evict(s)
	}
	x.ranking.set(s, l.n)
}

// Leave forgets an endpoint at once. Its memory comes back while others learn.
func (x *Index) Leave(s Slot) {
	x.ranking.remove(s)
	x.alive[s/64] &^= 1 << (s % 64)
	x.leaving = append(x.leaving, s)
}

// reclaim takes back up to n entries of endpoints that left.
func (x *Index) reclaim(n int) {
	for len(x.leaving) > 0 {
		s := x.leaving[0]
		for ; x.slots[s].n > 0; n-- {
			if n <= 0 {
				return
			}
			x.evict(s)
		}
		x.unused = append(x.unused, x.slots[s].ends)
		x.slots[s] = lru{}
		x.leaving = x.leaving[1:]
		x.vacant = append(x.vacant, s)
	}
}

// sharedMax bounds the evictions of one Learn beyond one for each block. A block
// that a thousand endpoints hold takes a thousand to be free, and requests wait.
const sharedMax = 4096

// Learn notes that an endpoint's engine has these blocks now, in front of all
// others that it has. Of a prompt that is larger than the cache, or than what the
// index has room for, it has the head.
func (x *Index) Learn(s Slot, keys []uint64) {
	x.reclaim(64 + len(keys))
	l := &x.slots[s]
	keys = keys[:min(len(keys), l.capacity, x.blocksMax)]
	evictions := len(keys) + sharedMax
	// The newest entry of the prompt is its head; each next one goes behind it.
	ahead := l.ends
	for _, key := range keys {
		id, known := x.ids.get(key)
		if known {
			if e, held := x.entry(s, id); held {
				x.unlink(e)
				x.link(e, ahead)
				ahead = e
				continue
			}
		}
		// Everything of this prompt so far is newer than the oldest entry, unless
		// the cache is full of this prompt alone, which its length excludes.
		if l.n >= l.capacity {
			x.evict(s)
			id, known = x.ids.get(key)
		}
		if !known {
			if !x.makeRoom(s, ahead, &evictions) {
				break
			}
			id = x.create(key)
		}
		ahead = x.insert(l, id, ahead)
		if b := &x.blocks[id]; b.owner == none {
			b.owner, b.entry = s, ahead
		} else {
			l.at[id] = ahead
		}
		x.bits[int(id)*x.stride+int(s/64)] |= 1 << (s % 64)
	}
	x.ranking.set(s, l.n)
}

// entry is where an endpoint has its entry of a block, if it holds it.
func (x *Index) entry(s Slot, id int32) (e int32, held bool) {
	if b := &x.blocks[id]; b.owner == s {
		return b.entry, true
	}
	e, held = x.slots[s].at[id]
	return e, held
}

// makeRoom evicts until there is room for a block that s learns, but nothing of
// s that is as new as the entry ahead. It reports whether there is room.
func (x *Index) makeRoom(s Slot, ahead int32, evictions *int) bool {
	l := &x.slots[s]
	for ; x.ids.n >= x.blocksMax; *evictions-- {
		if *evictions == 0 {
			return false
		}
		if len(x.leaving) > 0 {
			x.reclaim(1)
			continue
		}
		// Where several hold as much, s evicts of its own: taken from the others,
		// blocks would go round between equals.
		if most, n := x.ranking.most(s); n > l.n {
			x.evict(most)
			x.ranking.set(most, n-1)
			continue
		}
		if x.entries[l.ends].newer == ahead {
			return false
		}
		x.evict(s)
	}
	return true
}

// create gives a key a block that nobody holds.
func (x *Index) create(key uint64) (id int32) {
	if n := len(x.free); n > 0 {
		id = x.free[n-1]
		x.free = x.free[:n-1]
	} else {
		id = int32(len(x.blocks))
		x.blocks = append(x.blocks, block{})
		x.bits = append(x.bits, make([]uint64, x.stride)...)
	}
	x.blocks[id] = block{key: key, owner: none}
	x.ids.put(key, id)
	return id
}

// evict takes the oldest block from an endpoint that has one. The ranking is the
// caller's to set.
func (x *Index) evict(s Slot) {
	l := &x.slots[s]
	e := x.entries[l.ends].newer
	id := x.entries[e].block
	x.unlink(e)
	x.unused = append(x.unused, e)
	l.n--
	b := &x.blocks[id]
	if b.owner == s {
		b.owner = none
	} else {
		delete(l.at, id)
	}
	words := x.holders(id)
	words[s/64] &^= 1 << (s % 64)
	if !slices.ContainsFunc(words, func(w uint64) bool { return w != 0 }) {
		x.ids.remove(b.key)
		x.free = append(x.free, id)
	}
}

func (x *Index) holders(id int32) []uint64 {
	at := int(id) * x.stride
	return x.bits[at : at+x.stride : at+x.stride]
}

// insert makes an entry for a block right behind the entry ahead.
func (x *Index) insert(l *lru, id, ahead int32) int32 {
	e := x.newEntry()
	x.entries[e].block = id
	l.n++
	x.link(e, ahead)
	return e
}

func (x *Index) newEntry() int32 {
	if n := len(x.unused); n > 0 {
		e := x.unused[n-1]
		x.unused = x.unused[:n-1]
		return e
	}
	x.entries = append(x.entries, entry{})
	return int32(len(x.entries) - 1)
}

func (x *Index) link(e, ahead int32) {
	behind := x.entries[ahead].older
	x.entries[e].newer, x.entries[e].older = ahead, behind
	x.entries[ahead].older, x.entries[behind].newer = e, e
}

func (x *Index) unlink(e int32) {
	newer, older := x.entries[e].newer, x.entries[e].older
	x.entries[newer].older, x.entries[older].newer = older, newer
}

// Lookup is one prompt looked up in an index. It keeps its memory from one
// prompt to the next. What it finds is valid until the index changes.
type Lookup struct {
	x     *Index
	keys  []uint64
	ids   []int32  // of keys; unseen until asked for
	known int      // keys from here on are held by nobody
	first []uint64 // bit s: slot s holds the first block
	left  []uint64 // bit s: slot s was not found by Longest yet
	depth []depth  // by slot, of those that were found
	turn  uint64   // of Reset; depths of others are of other prompts
}

type depth struct {
	turn   uint64
	blocks int32
}

const (
	unseen = -1
	nobody = -2
)

// Reset starts to look up another prompt.
func (l *Lookup) Reset(x *Index, keys []uint64) {
	l.x, l.keys = x, keys
	if cap(l.ids) < len(keys) {
		l.ids = make([]int32, len(keys), max(len(keys), 256))
	}
	l.ids = l.ids[:len(keys)]
	for i := range l.ids {
		l.ids[i] = unseen
	}
	l.known = l.bisect(0, len(keys), 0, x.alive)
	l.turn++
	if missing := len(x.slots) - len(l.depth); missing > 0 {
		l.depth = append(l.depth, make([]depth, missing)...)
	}
	l.first = l.first[:0]
	if l.known > 0 {
		for i, w := range x.holders(l.id(0)) {
			l.first = append(l.first, w&x.alive[i])
		}
	}
}

// Holds reports whether an endpoint holds any of the prompt. Most don't.
func (l *Lookup) Holds(s Slot) bool {
	return int(s/64) < len(l.first) && l.first[s/64]&(1<<(s%64)) != 0
}

func (l *Lookup) id(i int) int32 {
	id := l.ids[i]
	if id == unseen {
		var ok bool
		if id, ok = l.x.ids.get(l.keys[i]); !ok {
			id = nobody
		}
		l.ids[i] = id
	}
	return id
}

// holds reports whether any of some endpoints, whose bits from a word on are set in some,
// holds the i-th block.
func (l *Lookup) holds(i, word int, some []uint64) bool {
	id := l.id(i)
	if id == nobody {
		return false
	}
	for k, w := range l.x.holders(id)[word:][:len(some)] {
		if w&some[k] != 0 {
			return true
		}
	}
	return false
}

// bisect returns how many of the first hi blocks any of some endpoints holds; one of them
// holds the first lo.
func (l *Lookup) bisect(lo, hi, word int, some []uint64) int {
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); l.holds(mid, word, some) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// gallop is bisect of the first hi blocks where the result is often close to hi: its steps
// back begin small and grow.
func (l *Lookup) gallop(hi int, some []uint64) int {
	for step := 1; hi > 0; step *= 2 {
		at := max(hi-step, 0)
		if l.holds(at, 0, some) {
			return l.bisect(at+1, hi, 0, some)
		}
		hi = at
	}
	return 0
}

// Matched is how many leading blocks an endpoint holds.
func (l *Lookup) Matched(s Slot) int {
	word, bit := int(s/64), uint64(1)<<(s%64)
	if !l.Holds(s) {
		return 0
	}
	if d := l.depth[s]; d.turn == l.turn {
		return int(d.blocks)
	}
	return l.bisect(0, l.known, word, []uint64{bit})
}

// Longest goes through the endpoints that hold a part of the prompt, the longest first.
func (l *Lookup) Longest() iter.Seq2[Slot, int] {
	return func(yield func(s Slot, blocks int) bool) {
		l.left = append(l.left[:0], l.x.alive...)
		for at := l.known; at > 0; at = l.gallop(at-1, l.left) {
			for i, w := range l.x.holders(l.id(at - 1)) {
				w &= l.left[i]
				l.left[i] &^= w
				for ; w != 0; w &= w - 1 {
					s := Slot(64*i + bits.TrailingZeros64(w))
					l.depth[s] = depth{l.turn, int32(at)}
					if !yield(s, at) {
						return
					}
				}
			}
		}
	}
}
