// SPDX-License-Identifier: Apache-2.0

package prefix

import "math/bits"

// table is a map from keys to blocks. Keys are hashes already, and a decision
// looks up a dozen of them: here each takes one access to memory, where the
// built-in map takes three.
//
// Which cell a key is in is chosen by a multiplier that nobody outside knows. Keys
// are hashes of what clients send, and a client could find prompts whose cells
// would otherwise be one.
type table struct {
	cells []cell
	n     int
	shift int // of a product, for its index
	by    uint64
}

// cell holds a key and its block plus one; 0 is empty.
type cell struct {
	key uint64
	id  int32
}

const cellsMin = 1 << 8

func newTable(seed uint64) table {
	t := table{by: seed | 1}
	t.resize(cellsMin)
	return t
}

func (t *table) resize(cells int) {
	old := t.cells
	t.cells, t.shift = make([]cell, cells), 64-bits.TrailingZeros(uint(cells))
	for _, c := range old {
		if c.id != 0 {
			t.cells[t.place(c.key)] = c
		}
	}
}

// place is where the key is, or the empty cell where it would be.
func (t *table) place(key uint64) int {
	mask := len(t.cells) - 1
	at := int(key * t.by >> t.shift)
	for t.cells[at&mask].id != 0 && t.cells[at&mask].key != key {
		at++
	}
	return at & mask
}

// get returns the key's block.
func (t *table) get(key uint64) (id int32, ok bool) {
	id = t.cells[t.place(key)].id - 1
	return id, id >= 0
}

// put adds a key that is not there.
func (t *table) put(key uint64, id int32) {
	// At most half full: a search ends after one or two cells. Of half a million
	// blocks the move takes some 10 ms, and then never again.
	if 2*(t.n+1) > len(t.cells) {
		t.resize(2 * len(t.cells))
	}
	t.cells[t.place(key)] = cell{key, id + 1}
	t.n++
}

// remove takes out a key that is there, and closes the gap: later keys that were
// pushed past it move up.
func (t *table) remove(key uint64) {
	mask := len(t.cells) - 1
	gap := t.place(key)
	for at := (gap + 1) & mask; t.cells[at].id != 0; at = (at + 1) & mask {
		home := int(t.cells[at].key * t.by >> t.shift)
		if (at-home)&mask >= (at-gap)&mask {
			t.cells[gap] = t.cells[at]
			gap = at
		}
	}
	t.cells[gap] = cell{}
	t.n--
}
