// SPDX-License-Identifier: Apache-2.0

package faults_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
)

// cell is one kind of failure: where it struck, what the gateway took it for,
// and whether the client had a part of the answer then.
type cell struct {
	point   string
	verdict string
	after   bool
}

func (c cell) String() string {
	phase := "before"
	if c.after {
		phase = "after"
	}
	return c.point + "/" + c.verdict + "/" + phase
}

// coverage counts what the schedules reached.
type coverage struct {
	mu       sync.Mutex
	requests int
	counts   map[cell]int
}

func newCoverage() *coverage { return &coverage{counts: map[cell]int{}} }

func (c *coverage) count() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests++
}

func (c *coverage) hit(at cell) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[at]++
}

// reachable are the cells that a gateway without guards can come to, by point:
// verdicts before the first delta, then after it. "none" is an attempt that met
// no fault, "answer" a fault of the whole answer, "client" a client that left.
// The verdict dead needs a guard.
var reachable = map[string][2]string{
	"none":     {"", "finished"},
	"answer":   {"engine_error", "finished engine_error"},
	"client":   {"client_gone", "client_gone"},
	"listen":   {"not_started", ""},
	"accept":   {"closed overloaded", ""},
	"body":     {"not_started closed ended engine_error refused uncertain overloaded", ""},
	"head":     {"closed ended engine_error refused uncertain overloaded", ""},
	"headers":  {"closed engine_error refused overloaded", ""},
	"role":     {"closed engine_error refused overloaded", ""},
	"computed": {"closed ended engine_error refused uncertain overloaded", "closed engine_error refused overloaded"},
	"in-chunk": {"closed engine_error overloaded", "closed engine_error overloaded"},
	"in-char":  {"closed engine_error overloaded", "closed engine_error overloaded"},
	"token":    {"closed ended engine_error refused uncertain overloaded", "closed engine_error refused overloaded"},
	"in-body":  {"closed overloaded", "closed overloaded"},
	"finish":   {"closed ended engine_error refused uncertain overloaded", "finished closed engine_error refused"},
	"usage":    {"", "finished closed engine_error refused"},
	"done":     {"", "finished"},
}

// empty lists the cells that can be reached and were not.
func (c *coverage) empty() (list []cell) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, point := range slices.Sorted(maps.Keys(reachable)) {
		for phase, verdicts := range reachable[point] {
			for v := range strings.FieldsSeq(verdicts) {
				if at := (cell{point, v, phase == 1}); c.counts[at] == 0 {
					list = append(list, at)
				}
			}
		}
	}
	return list
}

// missed lists the points of the empty cells.
func (c *coverage) missed() (points []string) {
	for _, at := range c.empty() {
		points = append(points, at.point)
	}
	return slices.Compact(points)
}

// String is the table: one row per point, verdicts as columns, before/after.
func (c *coverage) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var verdicts []string
	for v := inference.NotStarted; v <= inference.Finished; v++ {
		if v != inference.Dead {
			verdicts = append(verdicts, v.String())
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%-9s", "")
	for _, v := range verdicts {
		fmt.Fprintf(&b, "%13s", v)
	}
	b.WriteString("    (before/after the first delta; . cannot be, 0 is a gap)\n")
	for _, point := range slices.Sorted(maps.Keys(reachable)) {
		fmt.Fprintf(&b, "%-9s", point)
		for _, v := range verdicts {
			fmt.Fprintf(&b, "%13s", c.entry(point, v, 0)+"/"+c.entry(point, v, 1))
		}
		b.WriteString("\n")
	}
	return b.String()
}

func (c *coverage) entry(point, verdict string, phase int) string {
	n := c.counts[cell{point, verdict, phase == 1}]
	if n == 0 && !slices.Contains(strings.Fields(reachable[point][phase]), verdict) {
		return "."
	}
	return fmt.Sprint(n)
}

// add counts a request whose verdicts are known, one per attempt in order.
func (c *coverage) add(q ask, a check.Answer, verdicts []inference.Verdict, log []simengine.Entry) {
	struck := map[int]string{}
	last := len(verdicts)
	for _, e := range log {
		if e.Request != a.Request || a.Request == "" {
			continue
		}
		last = max(last, e.Attempt)
		if e.Event == simengine.EventFault && struck[e.Attempt] == "" {
			struck[e.Attempt] = pointOf(e.Detail)
		}
	}
	if last != len(verdicts) {
		return // an attempt was resent, and its verdict is not reported
	}
	for i, v := range verdicts {
		n := i + 1
		point := struck[n]
		if point == "" {
			point = planned(q.Fault, n)
		}
		if v == inference.ClientGone {
			point = "client"
		}
		seen, _ := check.Read(a)
		// A status 200 is a beginning, except that an error which an engine
		// sent first is passed on with it.
		after := n == last && a.Status == 200 && !(v == inference.Refused && seen.Tokens == 0)
		c.hit(cell{point, v.String(), after})
	}
}

// pointOf is the point of a fault that struck.
func pointOf(detail string) string {
	script, err := simengine.ParseFaults(detail)
	if err != nil || len(script) == 0 || script[0].Point.Name == "" {
		return "answer"
	}
	switch script[0].Kind {
	case "delta", "bigline", "tool":
		return "answer"
	case "stall":
		if len(script[0].Args) > 0 && script[0].Args[0] == "30ms" {
			return "answer" // it only waits
		}
	}
	return script[0].Point.Name
}

// planned is "answer" if a fault of the whole answer was planned for attempt n:
// not all of them show in the log.
func planned(fault string, n int) string {
	script, _ := simengine.ParseFaults(fault)
	for _, f := range script {
		if f.Attempt == n && f.Point.Name == "" {
			return "answer"
		}
	}
	return "none"
}

// solo counts a request that had the fleet to itself: attempts that no engine
// received met the fault at the connection.
func (c *coverage) solo(s soloAsk, a check.Answer, verdicts []inference.Verdict, log []simengine.Entry, from time.Time) {
	received := map[int]bool{}
	for _, e := range log {
		if e.Request == a.Request && e.Event == simengine.EventReceived {
			received[e.Attempt] = true
		}
	}
	struck := false
	for _, e := range log {
		struck = struck || e.Event == simengine.EventFault && e.T.After(from)
	}
	for i, v := range verdicts {
		if struck && !received[i+1] && v != inference.ClientGone {
			c.hit(cell{s.point, v.String(), false})
		}
	}
}
