// SPDX-License-Identifier: Apache-2.0

package prefix

// ranking is a heap of the endpoints, the one that holds most blocks first. Of
// two that hold as many, the one with the higher slot comes first.
type ranking struct {
	heap []uint64 // blocks in the upper half, slot in the lower one
	at   []int32  // by slot: its place in the heap
}

func ranked(s Slot, blocks int) uint64 { return uint64(blocks)<<32 | uint64(s) }

// add takes in an endpoint that holds nothing.
func (r *ranking) add(s Slot) {
	for len(r.at) <= int(s) {
		r.at = append(r.at, 0)
	}
	r.at[s] = int32(len(r.heap))
	r.heap = append(r.heap, 0)
	r.set(s, 0)
}

// set moves an endpoint to where it belongs with that many blocks.
func (r *ranking) set(s Slot, blocks int) {
	key, at := ranked(s, blocks), r.at[s]
	for at > 0 && r.heap[(at-1)/2] < key {
		r.put(at, r.heap[(at-1)/2])
		at = (at - 1) / 2
	}
	for {
		child := 2*at + 1
		if int(child+1) < len(r.heap) && r.heap[child+1] > r.heap[child] {
			child++
		}
		if int(child) >= len(r.heap) || r.heap[child] < key {
			break
		}
		r.put(at, r.heap[child])
		at = child
	}
	r.put(at, key)
}

func (r *ranking) put(at int32, key uint64) { r.heap[at], r.at[uint32(key)] = key, at }

// remove takes out an endpoint.
func (r *ranking) remove(s Slot) {
	last := r.heap[len(r.heap)-1]
	r.heap = r.heap[:len(r.heap)-1]
	if moved := Slot(uint32(last)); moved != s {
		r.at[moved] = r.at[s]
		r.set(moved, int(last>>32))
	}
}

// most is who holds most of all but one of the endpoints, and how much; none
// where there is no other.
func (r *ranking) most(but Slot) (s Slot, blocks int) {
	var key uint64
	switch first := r.heap[0]; {
	case Slot(uint32(first)) != but:
		key = first
	case len(r.heap) == 1:
		return none, 0
	default:
		key = r.heap[1]
		if len(r.heap) > 2 {
			key = max(key, r.heap[2])
		}
	}
	return Slot(uint32(key)), int(key >> 32)
}
