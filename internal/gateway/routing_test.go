// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/simengine/model"
	"github.com/headgate/headgate/plugins/standard"
)

// routing is what the process uses.
func routing(name string) (*schedule.Profile, error) { return standard.Profile(name) }

// TestNextTurnGoesWhereThePromptIs: a conversation stays on the engine that has
// it cached, and conversations share the engines.
func TestNextTurnGoesWhereThePromptIs(t *testing.T) {
	r := newRig(t, 4, "", func(_ int, c *simengine.Config) { c.Params = model.A100x8B })
	homes := map[int]int{}
	for conversation := range 8 {
		said := `{"role":"user","content":` + strconv.Quote(fmt.Sprintf("%d ", conversation)+strings.Repeat("Tell me about the sea. ", 400)) + `}`
		home := -1
		for turn := range 3 {
			before := r.received()
			body := `{"model":"sim","stream":` + strconv.FormatBool(turn%2 == 0) + `,"max_tokens":8,"messages":[` + said + `]}`
			if got := r.post(chatPath, body); got.status != 200 {
				t.Fatalf("status %d: %s", got.status, got.body)
			}
			<-r.records.ended // and nothing of it is in flight any more
			at := -1
			for i, n := range r.received() {
				if n > before[i] {
					at = i
				}
			}
			if turn > 0 && at != home {
				t.Errorf("conversation %d was on engine %d, turn %d went to %d", conversation, home, turn, at)
			}
			home = at
			said += `,{"role":"assistant","content":"Waves."},{"role":"user","content":"And more?"}`
		}
		homes[home]++
	}
	if len(homes) < 2 {
		t.Errorf("all conversations are on one engine: %v", homes)
	}
}
