// SPDX-License-Identifier: Apache-2.0

package check

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/headgate/headgate/internal/simengine"
)

// Budget is what a pool's retry budget allows in a run.
type Budget struct {
	Ratio        float64
	MinPerSecond float64
	Lasted       time.Duration
	Resends      int // per request, on top of the budget
}

// window is how many seconds' worth a budget may have saved up.
const window = 10

func (b Budget) most(firsts int) float64 {
	return b.MinPerSecond*(window+b.Lasted.Seconds()) + b.Ratio*float64(firsts)
}

// Fleet judges a run that is over, with every answer that was begun and the
// whole log of every engine: engines are idle, every request that they got
// belongs to an answer, and the retries were within the budget. A nil budget is
// not checked.
func Fleet(answers []Answer, log []simengine.Entry, budget *Budget) []Violation {
	var list []Violation
	found := func(invariant, request, format string, args ...any) {
		list = append(list, Violation{Invariant: invariant, Request: request, Saw: fmt.Sprintf(format, args...)})
	}
	known, left := map[string]bool{}, map[string]bool{}
	for i := range answers {
		if id := answers[i].Request; id != "" {
			known[id] = true
			left[id] = answers[i].Left
		}
	}
	requests := arrivals(log)
	retries := 0
	for _, request := range slices.Sorted(maps.Keys(requests)) {
		attempts := requests[request]
		if !known[request] {
			found(NothingLeaks, request, "engine %s received it and no client sent it", attempts[0].name())
		}
		for _, a := range attempts {
			switch {
			case a.ended != "":
			case left[request]:
				found(ClientGone, request, "its client left and engine %s was not told", a.name())
			default:
				found(NothingLeaks, request, "engine %s never came to an end with it", a.name())
			}
		}
		if budget != nil {
			retries += max(0, len(attempts)-1-budget.Resends)
		}
	}
	if budget != nil {
		if most := budget.most(len(answers)); float64(retries) > most {
			found(Bounded, "", "%d retries, the budget allows %.1f", retries, most)
		}
	}
	return list
}
