// SPDX-License-Identifier: Apache-2.0

// Package real tests Headgate with engines of another maker: llama.cpp's own
// server, killed with signal 9 in the middle of its work.
//
// It owns what such tests need around the gateway: engines as processes, and
// relays between the gateway and them that keep every byte and can hold bytes
// back, so that "computed, sent and not received" is a state a test can stop
// in. What was promised is judged by three witnesses that are not the gateway:
// the bytes that the client read, the bytes that the relays saw, and what the
// engines logged and counted. It imports nothing of the gateway but what starts
// one, so that a mistake made there is not made here again.
//
// The tests beside it and the command in test/real/demo call it.
package real

import (
	"context"
	"errors"
	"sync"
)

// state is a value that goroutines wait on: an update wakes all who wait.
type state struct {
	mu      sync.Mutex
	changed chan struct{} // closed by the next update; nil while nobody waits
}

// update changes what the state guards.
func (s *state) update(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// read looks at what the state guards.
func (s *state) read(look func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	look()
}

// await returns when holds is true, which it asks after every update.
func (s *state) await(ctx context.Context, holds func() bool) error {
	for {
		s.mu.Lock()
		if holds() {
			s.mu.Unlock()
			return nil
		}
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

var errExited = errors.New("the engine's process ended")
