// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"fmt"
	"sync"
	"testing"
)

// Six of eight engines die under load, most of it not answered yet. What the
// gateway repeats on the two that are left is bounded by the retry budget: the
// rest is told so, and the two go on serving.
func TestMassDeathIsNoStorm(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		t.Run(map[bool]string{true: "guarded", false: "bare"}[guarded], func(t *testing.T) {
			t.Parallel()
			massDeath(t, guarded)
		})
	}
}

const (
	stormClients  = 32
	stormRequests = 6 // of each client
	stormDead     = 6
)

func massDeath(t *testing.T, guarded bool) {
	r := newRun(t, *seedFlag, 8)
	r.guarded = guarded
	r.budget.Ratio, r.budget.MinPerSecond = 0.05, 0.3
	r.pool = append(append(r.pool, patient...), "failover: {retry_budget: {ratio: 0.05, min_per_second: 0.3}}")
	r.start()

	var clients sync.WaitGroup
	var mu sync.Mutex // of the run's list of requests
	got := map[ending]int{}
	for range stormClients {
		clients.Go(func() {
			for range stormRequests {
				mu.Lock()
				a := r.send(ask{path: "/v1/chat/completions", stream: true, tokens: 4, n: 1, pad: 8000, fault: "times=*;stall@computed:1:300ms"})
				mu.Unlock()
				r.answered(a)
				mu.Lock()
				got[endingOf(a.Answer)]++
				mu.Unlock()
			}
		})
	}
	r.must(poll("all engines to be at work", func() bool { return len(r.arrivals()) >= stormClients }))
	for _, b := range r.replicas[:stormDead] {
		r.must(b.killEngine())
	}
	r.tell("%d engines are dead", stormDead)
	clients.Wait()

	r.must(poll("a whole answer after it", func() bool {
		return endingOf(r.answered(r.send(ask{path: "/v1/chat/completions", stream: true, tokens: 4, n: 1}))) == whole
	}))
	r.judge()
	first, again := map[string]bool{}, 0
	for _, e := range r.arrivals() {
		if first[e.Request] {
			again++
		}
		first[e.Request] = true
	}
	exhausted := refused(503, "retry_budget_exhausted")
	table.count(fmt.Sprintf("mass death, guards %v: requests", guarded), len(r.asked))
	table.count(fmt.Sprintf("mass death, guards %v: prefills that were repeated", guarded), again)
	table.count(fmt.Sprintf("mass death, guards %v: requests told that the budget is exhausted", guarded), got[exhausted])
	if got[exhausted] == 0 || again == 0 || got[whole] == 0 {
		t.Errorf("%d repeated, %v: the budget was not at its end", again, got)
	}
	for e, n := range got {
		switch e {
		case whole, interrupted, exhausted, refused(502, "upstream_failed"), refused(503, "no_endpoints"):
		default:
			t.Errorf("%d clients have %q", n, e)
		}
	}
	r.terminate()
	r.replay()
}
