// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"math"
)

// Check compares every count and index of the queue with what it is made of.
func (q *Queue) Check() error {
	requests, bytes, work := 0, int64(0), 0.0
	for _, b := range q.bands {
		bandRequests, bandBytes, bandWork := 0, int64(0), 0.0
		for id, f := range b.flows {
			if f.id != id || f.band != b {
				return fmt.Errorf("flow %q is at home elsewhere", id)
			}
			flowWork, tokens, first := 0.0, 0.0, 0
			for at, r := range f.next.list {
				switch {
				case r.inFlow != at || r.flow != f || r.state != waiting:
					return fmt.Errorf("request %d of flow %q does not know where it is", r.seq, id)
				case q.ends.list[r.inEnds] != r:
					return fmt.Errorf("request %d has no end", r.seq)
				case at > 0 && f.next.less(r, f.next.list[(at-1)/2]):
					return fmt.Errorf("flow %q is out of order", id)
				}
				flowWork, tokens, bandBytes = flowWork+r.work, tokens+r.tokens, bandBytes+r.Bytes
				if !r.returned {
					first++
				}
			}
			n := 0
			for r := f.oldest; r != nil; r = r.newer {
				if n++; r.newer == nil && f.newest != r {
					return fmt.Errorf("flow %q ends elsewhere", id)
				}
			}
			switch {
			case n != first:
				return fmt.Errorf("flow %q has %d by arrival, %d by order", id, n, first)
			case f.count != f.next.len():
				return fmt.Errorf("flow %q counts %d, has %d", id, f.count, f.next.len())
			case !near(f.work, flowWork) || !near(f.tokens, tokens):
				return fmt.Errorf("flow %q sums %v s and %v tokens, has %v and %v", id, f.work, f.tokens, flowWork, tokens)
			case (f.count > 0) != (f.inReady >= 0) || (f.count > 0) != (f.inBulk >= 0):
				return fmt.Errorf("flow %q with %d requests is at %d of the ready and %d of the bulk", id, f.count, f.inReady, f.inBulk)
			case (f.count == 0 && f.out == 0) != (f.inIdle >= 0):
				return fmt.Errorf("flow %q with %d and %d requests is at %d of the idle", id, f.count, f.out, f.inIdle)
			case f.key != f.served:
				return fmt.Errorf("flow %q was left passed over", id)
			}
			bandRequests += f.count
			bandWork += f.work
		}
		if b.requests != bandRequests || b.bytes != bandBytes || !near(b.work, bandWork) {
			return fmt.Errorf("band %d counts %d, %d bytes and %v s, has %d, %d and %v",
				b.limits.Priority, b.requests, b.bytes, b.work, bandRequests, bandBytes, bandWork)
		}
		requests, bytes, work = requests+b.requests, bytes+b.bytes, work+b.work
	}
	if q.requests != requests || q.bytes != bytes || !near(q.work, work) || q.ends.len() != requests || len(q.aside) > 0 {
		return fmt.Errorf("the queue counts %d, %d bytes and %v s, has %d, %d and %v", q.requests, q.bytes, q.work, requests, bytes, work)
	}
	if q.requests == 0 && (q.bytes != 0 || q.work != 0) {
		return fmt.Errorf("an empty queue has %d bytes and %v s", q.bytes, q.work)
	}
	return nil
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-6*(1+math.Abs(b)) }

// Flows is how many flows are remembered.
func (q *Queue) Flows() (n int) {
	for _, b := range q.bands {
		n += len(b.flows)
	}
	return n
}
