// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"context"
	"sync/atomic"
)

// waiter is somebody who waits for an entry to be written.
type waiter struct {
	done    chan result // has room for the one result
	settled atomic.Bool // answered, or abandoned: whoever sets it first
}

type result struct {
	err      error
	decision Decision
}

func newWaiter() *waiter { return &waiter{done: make(chan result, 1)} }

// await returns the result. If ctx ends first nobody will ever read it, and the
// writer is told so by the false of answer.
func (w *waiter) await(ctx context.Context) (result, error) {
	select {
	case r := <-w.done:
		return r, nil
	case <-ctx.Done():
		if w.settled.CompareAndSwap(false, true) {
			return result{}, ctx.Err()
		}
		return <-w.done, nil
	}
}

// answer hands the result over. False: the waiter has left.
func (w *waiter) answer(r result) bool {
	if !w.settled.CompareAndSwap(false, true) {
		return false
	}
	w.done <- r
	return true
}
