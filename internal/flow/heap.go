// SPDX-License-Identifier: Apache-2.0

package flow

// heap is a binary heap whose members know where they are, so that any of them
// can be taken out or moved in logarithmic time.
type heap[T any] struct {
	list  []T
	less  func(a, b T) bool
	moved func(x T, at int) // at is -1 for one that was taken out
}

func (h *heap[T]) len() int { return len(h.list) }
func (h *heap[T]) top() T   { return h.list[0] }

func (h *heap[T]) push(x T) {
	h.list = append(h.list, x)
	h.moved(x, len(h.list)-1)
	h.up(len(h.list) - 1)
}

func (h *heap[T]) remove(at int) T {
	x, last := h.list[at], len(h.list)-1
	if at != last {
		h.set(at, h.list[last])
	}
	var none T
	h.list[last] = none
	h.list = h.list[:last]
	if at != last {
		h.fix(at)
	}
	h.moved(x, -1)
	return x
}

// fix restores the order after the member at that place has changed.
func (h *heap[T]) fix(at int) {
	if !h.down(at) {
		h.up(at)
	}
}

func (h *heap[T]) set(at int, x T) {
	h.list[at] = x
	h.moved(x, at)
}

func (h *heap[T]) up(at int) {
	x := h.list[at]
	for at > 0 {
		parent := (at - 1) / 2
		if !h.less(x, h.list[parent]) {
			break
		}
		h.set(at, h.list[parent])
		at = parent
	}
	h.set(at, x)
}

func (h *heap[T]) down(at int) bool {
	x, from := h.list[at], at
	for {
		child := 2*at + 1
		if child >= len(h.list) {
			break
		}
		if child+1 < len(h.list) && h.less(h.list[child+1], h.list[child]) {
			child++
		}
		if !h.less(h.list[child], x) {
			break
		}
		h.set(at, h.list[child])
		at = child
	}
	h.set(at, x)
	return at != from
}
