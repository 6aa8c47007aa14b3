// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"
)

// Gate sends a target answers of every shape and reports the first that is not,
// byte for byte, what the engine sent, or is missing. Speed is not asked for: a
// proxy that is slow passes, one that cuts corners does not.
func Gate(ctx context.Context, address string, engine *Engine) error {
	for _, c := range []struct {
		name  string
		shape Shape
		conns int
	}{
		{"answer", Shape{PromptBytes: 1 << 10, Tokens: 64}, 1},
		{"large prompt", Shape{PromptBytes: 220 << 10, Tokens: 64}, 2},
		{"paced stream", Shape{Stream: true, PromptBytes: 1 << 10, Tokens: 20, EventBytes: 240, Interval: 2 * time.Millisecond}, 8},
		{"streams at full speed", Shape{Stream: true, PromptBytes: 1 << 10, Tokens: 1000, EventBytes: 240}, 8},
		{"large events", Shape{Stream: true, PromptBytes: 1 << 10, Tokens: 50, EventBytes: 20 << 10}, 2},
	} {
		r := Run(ctx, Load{
			Address: address, Shape: c.shape, Connections: c.conns, Least: c.conns, Seed: 1, Engine: engine,
			Window: 50 * time.Millisecond,
		})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case r.Corrupt != "":
			return fmt.Errorf("%s: %s", c.name, r.Corrupt)
		case r.Errors > 0:
			return fmt.Errorf("%s: %s", c.name, r.Error)
		case r.Whole < uint64(c.conns):
			return fmt.Errorf("%s: %d answers", c.name, r.Whole)
		}
	}
	return nil
}
