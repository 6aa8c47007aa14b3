// SPDX-License-Identifier: Apache-2.0

package model

import "slices"

// pool is the engine's KV memory: a fixed number of blocks. A block is held
// (ref > 0), idle in the prefix cache (ref 0, keyed: still hittable), or free.
// Idle blocks are given up least recently used first, and only when no free
// block is left.
type pool struct {
	ref   []int32
	key   []uint64
	keyed []bool

	free       []int32 // a stack
	prev, next []int32 // ring of idle blocks; the last index is its head
	idle       int

	index map[uint64]int32 // prefix cache: key → the one block that answers to it
}

func newPool(n int) *pool {
	p := &pool{
		ref: make([]int32, n), key: make([]uint64, n), keyed: make([]bool, n),
		free: make([]int32, n), prev: make([]int32, n+1), next: make([]int32, n+1),
		index: make(map[uint64]int32),
	}
	for i := range p.free {
		p.free[i] = int32(n - 1 - i)
	}
	p.prev[n], p.next[n] = int32(n), int32(n)
	return p
}

// available is how many blocks could be taken now, idle ones included.
func (p *pool) available() int { return len(p.free) + p.idle }

func (p *pool) used() int { return len(p.ref) - p.available() }

func (p *pool) lookup(key uint64) (block int32, ok bool) {
	block, ok = p.index[key]
	return block, ok
}

// hold adds a user to a block that is cached.
func (p *pool) hold(b int32) {
	if p.ref[b] == 0 {
		p.unlink(b)
	}
	p.ref[b]++
}

// take gives out one block that nobody holds. When that pushed a block out of
// the prefix cache, evicted is its key. The caller has checked available.
func (p *pool) take() (b int32, evicted uint64, wasCached bool) {
	if n := len(p.free); n > 0 {
		b = p.free[n-1]
		p.free = p.free[:n-1]
	} else {
		b = p.next[len(p.ref)]
		p.unlink(b)
		evicted, wasCached = p.key[b], true
		delete(p.index, evicted)
		p.keyed[b] = false
	}
	p.ref[b] = 1
	return b, evicted, wasCached
}

// enter makes a held block hittable under key. When another block answers to
// the key already, this one stays anonymous: two sequences computed the same
// prefix side by side, and the copy is freed with its sequence.
func (p *pool) enter(b int32, key uint64) bool {
	if _, taken := p.index[key]; taken {
		return false
	}
	p.index[key], p.key[b], p.keyed[b] = b, key, true
	return true
}

// drop gives up blocks of one sequence, last first, so that the tail of a
// prefix is evicted before its head: a tail without its head is never hit.
func (p *pool) drop(blocks []int32) {
	for _, b := range slices.Backward(blocks) {

		p.ref[b]--
		switch {
		case p.ref[b] > 0:
		case p.keyed[b]:
			p.link(b)
		default:
			p.free = append(p.free, b)
		}
	}
}

func (p *pool) link(b int32) {
	head := int32(len(p.ref))
	last := p.prev[head]
	p.next[last], p.prev[b], p.next[b], p.prev[head] = b, last, head, b
	p.idle++
}

func (p *pool) unlink(b int32) {
	p.next[p.prev[b]], p.prev[p.next[b]] = p.next[b], p.prev[b]
	p.idle--
}
