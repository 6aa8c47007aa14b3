// SPDX-License-Identifier: Apache-2.0

package schedule_test

import (
	"testing"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/prefix"
	"github.com/headgate/headgate/internal/schedule"
)

// Two engines with large caches fill the prefix index; a third joins, and its
// conversations are known like theirs while they go on.
func TestEngineThatJoinsIsLearnedInAFullIndex(t *testing.T) {
	b, pool := newBook(t), newPool(3)
	var next uint64
	fresh := func(blocks int) schedule.Ask {
		keys := make([]uint64, blocks)
		for i := range keys {
			next++
			keys[i] = next * 0x9E3779B97F4A7C15
		}
		return schedule.Ask{
			Keys: keys, PromptBytes: blocks * prefix.BlockBytes,
			Prompt: inference.Tokens{N: blocks * prefix.BlockBytes / 4}, Stream: true,
		}
	}
	serve := func(at int, ask schedule.Ask) {
		r, err := b.Reserve(start, &fleet.Pool{Name: "p", Endpoints: pool.Endpoints[at : at+1]}, ask)
		if err != nil {
			t.Fatal(err)
		}
		r.Accepted()
		r.FirstOutput(start)
		r.Release()
	}
	for i := range pool.Endpoints {
		b.SetCache(pool.Endpoints[i].ID, 64<<20)
	}
	for range 33 {
		serve(0, fresh(prefix.BlocksMax))
		serve(1, fresh(prefix.BlocksMax))
	}
	bound := b.Blocks()
	serve(0, fresh(100))
	if b.Blocks() != bound {
		t.Fatalf("the index went from %d to %d blocks: it was not full", bound, b.Blocks())
	}
	conversation := fresh(300)
	cached := func() int { return b.Explain(start, pool, conversation).Candidates[2].Cached }
	serve(2, conversation)
	if got, want := cached(), conversation.Prompt.N*9/10; got < want {
		t.Errorf("after the first turn %d of %d tokens are thought to be cached", got, conversation.Prompt.N)
	}
	for range 3 {
		serve(0, fresh(prefix.BlocksMax))
		serve(1, fresh(prefix.BlocksMax))
	}
	if got, want := cached(), conversation.Prompt.N*9/10; got < want {
		t.Errorf("once the others went on, %d of %d tokens", got, conversation.Prompt.N)
	}
}
