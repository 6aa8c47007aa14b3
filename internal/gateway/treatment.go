// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/headgate/headgate/internal/auth"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule"
)

// Headers by which clients say how their requests are treated, under the names
// that other gateways have for them too. The first one that is set counts.
var (
	objectiveHeaders = []string{"Headgate-Objective", "X-Gateway-Inference-Objective", "X-Llm-D-Inference-Objective"}
	fairnessHeaders  = []string{"Headgate-Fairness-Id", "X-Gateway-Inference-Fairness-Id", "X-Llm-D-Inference-Fairness-Id"}
	ttftHeaders      = []string{"X-Slo-Ttft-Ms", "X-Llm-D-Slo-Ttft-Ms"}
	tpotHeaders      = []string{"X-Slo-Tpot-Ms", "X-Llm-D-Slo-Tpot-Ms"}
	timeoutHeaders   = []string{"Headgate-Timeout-Ms"}
)

// fairnessBytesMax bounds a fairness id of a header; a longer one is not taken.
// How many there may be is the queue's to bound.
const fairnessBytesMax = 128

// millisecondsMax bounds times that clients name: a day.
const millisecondsMax = 24 * 60 * 60 * 1000

// treatment is how a request is dealt with in its pool's queue.
type treatment struct {
	objective string // its name, "" for none
	priority  int
	shedAt    flow.ShedAt
	ttft      schedule.TTFT // zero: the pool's
	tpot      time.Duration // 0: the pool's
	fairness  string
	deadline  time.Time // the client's own; zero: none
}

// treatment finds how a request is dealt with. Whoever is trusted says so by headers;
// a key's requests may ask for the key's objectives; then the route counts, and
// then the key. A client's own deadline is taken from everybody.
func (s *state) treatment(head *Head, who *auth.Principal, routed int, arrived time.Time) (t treatment) {
	t.fairness = who.Fairness
	t.objective = s.objective(head, who, routed)
	if o, known := s.objectives[t.objective]; known {
		t.priority, t.tpot = o.Priority, time.Duration(o.TPOT)
		t.ttft = schedule.TTFT{Base: time.Duration(o.TTFT), Prefills: o.TTFTPrefillFactor}
		t.shedAt = flow.ShedAt{Queue: float64(o.ShedAt.Queue), Saturation: float64(o.ShedAt.Saturation)}
	}
	if head.Trusted {
		if id := first(head.Header, fairnessHeaders); id != "" && len(id) <= fairnessBytesMax {
			t.fairness = id
		}
		if ttft := milliseconds(head.Header, ttftHeaders); ttft > 0 {
			t.ttft = schedule.TTFT{Base: ttft}
		}
		if tpot := milliseconds(head.Header, tpotHeaders); tpot > 0 {
			t.tpot = max(tpot, time.Duration(config.TPOTMin))
		}
	}
	if timeout := milliseconds(head.Header, timeoutHeaders); timeout > 0 {
		t.deadline = arrived.Add(timeout)
	}
	return t
}

// objective is the name of a request's objective.
func (s *state) objective(head *Head, who *auth.Principal, routed int) string {
	if asked := first(head.Header, objectiveHeaders); asked != "" {
		_, known := s.objectives[asked]
		allowed := head.Trusted && len(who.Objectives) == 0 || slices.Contains(who.Objectives, asked)
		if known && allowed {
			return asked
		}
	}
	if routed < len(s.routed) && s.routed[routed] != "" {
		return s.routed[routed]
	}
	if len(who.Objectives) > 0 {
		return who.Objectives[0]
	}
	return ""
}

// routedObjectives are the objectives of routes, in their order.
func routedObjectives(routes []config.Route) []string {
	names := make([]string, len(routes))
	for i, r := range routes {
		names[i] = r.Objective
	}
	return names
}

func first(h http.Header, names []string) string {
	for _, name := range names {
		if values := h[name]; len(values) > 0 && values[0] != "" {
			return values[0]
		}
	}
	return ""
}

// milliseconds reads a time that a header names. What is not a whole number from
// 1 to a day asks for nothing.
func milliseconds(h http.Header, names []string) time.Duration {
	n, err := strconv.ParseUint(first(h, names), 10, 31)
	if err != nil || n > millisecondsMax {
		return 0
	}
	return time.Duration(n) * time.Millisecond
}
