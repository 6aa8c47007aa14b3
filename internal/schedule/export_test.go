// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/plugin"
)

// Decide is the choice that Reserve rests on, and nothing else.
func (b *Book) Decide(now time.Time, pool *fleet.Pool, ask *Ask) *inference.Endpoint {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.choose(now, pool, ask).endpoint
}

// Blocks is how many blocks the prefix index has.
func (b *Book) Blocks() int { return b.index.Blocks() }

// Left is what traffic is still noted for an endpoint.
func (b *Book) Left(id inference.EndpointID) (pending, running, targets int, work, context float64) {
	a := b.account(id)
	return len(a.pending), len(a.running), a.targets, a.work, a.context
}

// Candidate is what plugins see of the endpoint that is chosen.
func (b *Book) Candidate(now time.Time, pool *fleet.Pool, ask *Ask) plugin.Candidate {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.choose(now, pool, ask).candidate
}

// Fade is what is left of something seen, x typical answers later.
func Fade(x float64) float64 { return fade(x) }
