// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/lifecycle"
	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/simengine/model"
	"github.com/headgate/headgate/plugins/standard"
)

// routing is what the process uses.
var routing = lifecycle.Plugins(standard.Plugins).Profile

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

// TestPluginsOfTheConfigurationChoose: a filter by label, and a fallback where it
// leaves nobody.
func TestPluginsOfTheConfigurationChoose(t *testing.T) {
	const plain = `{"model":"sim","messages":[{"role":"user","content":"hello"}]}`
	for zone, want := range map[string][]int{"a": {6, 0, 0}, "nowhere": {0, 0, 6}} {
		r, urls := newEngines(t, 3)
		r.startYAML(fmt.Sprintf(`
pools:
  p:
    discovery: {static: [{url: %q, labels: {zone: a}}, {url: %q, labels: {zone: b}}, {url: %q, labels: {zone: c}}]}
    routing:
      plugins: [{plugin: label, options: {in: {zone: [%s]}}}, {plugin: cost}, {plugin: idlest}]
      fallbacks: [{plugins: [{plugin: label, options: {in: {zone: [c]}}}, {plugin: leastload}]}]
`, urls[0], urls[1], urls[2], zone))
		for range 6 {
			if got := r.post(chatPath, plain); got.status != 200 {
				t.Fatalf("status %d: %s", got.status, got.body)
			}
		}
		if got := r.received(); !slices.Equal(got, want) {
			t.Errorf("zone %s: engines got %v, want %v", zone, got, want)
		}
		e := r.gateway.Explain(gateway.Question{Path: chatPath, Header: http.Header{"Content-Type": {"application/json"}}, Body: []byte(plain)})
		if e.Profile != "plugins" || e.Decision == nil || (e.Decision.Fallback > 0) != (zone == "nowhere") || e.Decision.Candidates[1].Out != "label: label zone" {
			t.Errorf("zone %s: %+v", zone, e.Decision)
		}
	}
}

// TestPredictedAndCachedTokensAreCompared: what engines say of their caches, in
// streams and whole answers, is compared with what was expected.
func TestPredictedAndCachedTokensAreCompared(t *testing.T) {
	r := newRig(t, 1, "", func(_ int, c *simengine.Config) { c.Params = model.A100x8B })
	text := strconv.Quote(strings.Repeat("Tell me about the sea. ", 400))
	for i := range 4 {
		body := fmt.Sprintf(`{"model":"sim","stream":%v,"max_tokens":4,"messages":[{"role":"user","content":%s}]}`, i%2 == 0, text)
		if got := r.post(chatPath, body); got.status != 200 {
			t.Fatalf("status %d: %s", got.status, got.body)
		}
		<-r.records.ended
	}
	h := r.gateway.Status()[0].Endpoints[0].Hits
	if h.Requests != 4 || h.Actual < h.Prompt*6/10 || h.Predicted < h.Prompt*6/10 || h.Missed > h.Prompt/20 {
		t.Errorf("%+v", h)
	}
}
