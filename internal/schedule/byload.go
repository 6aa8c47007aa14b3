// SPDX-License-Identifier: Apache-2.0

package schedule

// loadMax is the load from which on all are equal.
const loadMax = 1 << 12

// byLoad keeps the places of a seating in order of their load, the least first. A
// load mostly changes by one, and then one exchange keeps the order: with the last of
// its equals, or with the first.
type byLoad struct {
	loads []int32 // by place
	order []int32 // places, by load
	at    []int32 // by place, where in the order it is
	upTo  []int32 // by load, how many places have at most that
}

// newByLoad is an order of so many places, all without load.
func newByLoad(n int) byLoad {
	o := byLoad{loads: make([]int32, n), order: make([]int32, n), at: make([]int32, n), upTo: []int32{int32(n)}}
	for i := range o.order {
		o.order[i], o.at[i] = int32(i), int32(i)
	}
	return o
}

// set notes the load of a place.
func (o *byLoad) set(place, load int) {
	to := int32(min(max(load, 0), loadMax))
	for int(to) >= len(o.upTo) {
		o.upTo = append(o.upTo, int32(len(o.order)))
	}
	for ; o.loads[place] < to; o.loads[place]++ {
		last := &o.upTo[o.loads[place]]
		*last--
		o.exchange(o.at[place], *last)
	}
	for ; o.loads[place] > to; o.loads[place]-- {
		first := &o.upTo[o.loads[place]-1]
		o.exchange(o.at[place], *first)
		*first++
	}
}

func (o *byLoad) exchange(i, k int32) {
	a, b := o.order[i], o.order[k]
	o.order[i], o.order[k] = b, a
	o.at[a], o.at[b] = k, i
}

// equals is where those end in the order that have the load of the one at i.
func (o *byLoad) equals(i int) (end int) { return int(o.upTo[o.loads[o.order[i]]]) }
