// SPDX-License-Identifier: Apache-2.0

package alternate

import "container/heap"

// tree holds prefixes: a node is one block, and its path is all that comes
// before. A node that somebody holds is pinned with all nodes above it. Of the
// others the leaf that was used longest ago is forgotten first.
type tree struct {
	block  int // tokens
	root   *node
	tokens int // in all nodes
	pinned int // in held ones
	clock  int // of uses
	leaves leaves
}

type node struct {
	key    uint64
	parent *node
	kids   map[uint64]*node
	depth  int // blocks up to here
	users  int // jobs that hold it or something below it
	used   int
	at     int // in leaves, -1 if it is not there
}

func newTree(block int) tree { return tree{block: block, root: &node{at: -1}} }

// match finds the deepest node of a path, within a number of tokens.
func (t *tree) match(keys, more []uint64, most int) (*node, int) {
	at := t.root
	for i := range len(keys) + len(more) {
		var kid *node
		if i < len(keys) {
			kid = at.kids[keys[i]]
		} else {
			kid = at.kids[more[i-len(keys)]]
		}
		if kid == nil || kid.depth*t.block > most {
			break
		}
		at = kid
	}
	if at == t.root {
		return nil, 0
	}
	return at, at.depth * t.block
}

// hold pins a node and all above it.
func (t *tree) hold(n *node) {
	t.clock++
	for ; n != nil && n != t.root; n = n.parent {
		n.used = t.clock
		if n.users++; n.users == 1 {
			t.pinned += t.block
			if n.at >= 0 {
				heap.Remove(&t.leaves, n.at)
			}
		}
	}
}

// release is the opposite of hold.
func (t *tree) release(n *node) {
	t.clock++
	for ; n != nil && n != t.root; n = n.parent {
		n.used = t.clock
		if n.users--; n.users == 0 {
			t.pinned -= t.block
			t.leaf(n)
		}
	}
}

// leaf lists a node that may be forgotten.
func (t *tree) leaf(n *node) {
	if n.users == 0 && len(n.kids) == 0 && n.at < 0 {
		heap.Push(&t.leaves, n)
	}
}

// grow moves a hold on a node that covers so many tokens down the path of keys,
// which begins where tokens are zero, and makes the nodes that are missing.
func (t *tree) grow(from *node, tokens int, keys []uint64) (*node, int) {
	at := from
	if at == nil {
		at = t.root
	}
	for i := tokens / t.block; i < len(keys); i++ {
		kid := at.kids[keys[i]]
		if kid == nil {
			kid = &node{key: keys[i], parent: at, depth: at.depth + 1, at: -1}
			if at.kids == nil {
				at.kids = map[uint64]*node{}
			}
			at.kids[keys[i]] = kid
			t.tokens += t.block
			if at.at >= 0 {
				heap.Remove(&t.leaves, at.at)
			}
		}
		at = kid
	}
	if at == t.root {
		return nil, 0
	}
	t.hold(at)
	t.release(from)
	return at, max(tokens, len(keys)*t.block)
}

// forget drops the leaf that was used longest ago, if there is one.
func (t *tree) forget() bool {
	if len(t.leaves) == 0 {
		return false
	}
	n := heap.Pop(&t.leaves).(*node)
	delete(n.parent.kids, n.key)
	t.tokens -= t.block
	if n.parent != t.root {
		t.leaf(n.parent)
	}
	return true
}

// leaves is a heap, the one used longest ago on top.
type leaves []*node

func (l leaves) Len() int { return len(l) }

func (l leaves) Less(i, j int) bool {
	if l[i].used != l[j].used {
		return l[i].used < l[j].used
	}
	return l[i].depth > l[j].depth
}

func (l leaves) Swap(i, j int) {
	l[i], l[j] = l[j], l[i]
	l[i].at, l[j].at = i, j
}

func (l *leaves) Push(x any) {
	n := x.(*node)
	n.at = len(*l)
	*l = append(*l, n)
}

func (l *leaves) Pop() any {
	last := len(*l) - 1
	n := (*l)[last]
	(*l)[last] = nil
	*l = (*l)[:last]
	n.at = -1
	return n
}
