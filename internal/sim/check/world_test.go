// SPDX-License-Identifier: Apache-2.0

package check_test

import (
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
)

const g = "guard-0/1/boot-0"

var rules = check.Rules{VerdictBy: time.Second, Budget: check.Budget{Ratio: 0, MinPerSecond: 0.1}}

func f(what check.What, n int) check.Fact { return check.Fact{What: what, Request: "req_a", N: n} }

func guard(what check.What, n int, clock int64) check.Fact {
	return check.Fact{What: what, Request: "req_a", N: n, Guard: g, Clock: clock}
}

func word(what check.What, word string) check.Fact {
	return check.Fact{What: what, Request: "req_a", Word: word}
}

func delivered(n int, b check.Bytes) check.Fact {
	return check.Fact{What: check.Delivered, Request: "req_a", N: n, Bytes: b}
}

// story begins with one request whose first attempt publishes at a guard.
func story(rest ...check.Fact) []check.Fact {
	facts := []check.Fact{
		{What: check.Arrived, Request: "req_a", Max: 2},
		f(check.PlaceTaken, 1), f(check.Dispatched, 1), guard(check.Granted, 1, 100), guard(check.Started, 1, 10),
		{What: check.EngineBegan, Request: "req_a", N: 1, Engine: "e"}, {What: check.EngineEnded, Request: "req_a", N: 1, Engine: "e"},
	}
	facts = append(facts, rest...)
	for i := range facts {
		if facts[i].At == 0 {
			facts[i].At = time.Duration(i) * time.Millisecond
		}
	}
	return facts
}

var lone = []check.Fact{
	guard(check.Checked, 1, 50), guard(check.Written, 1, 50), delivered(1, check.Output), delivered(1, check.LastOutput),
	word(check.Outcome, "completed"), f(check.PlaceFreed, 1),
}

// retried is a whole answer by the second attempt, after the first was fenced.
var retried = []check.Fact{
	f(check.FencingBegan, 1), guard(check.Declared, 1, 60), f(check.Silenced, 1), f(check.PlaceFreed, 1),
	f(check.PlaceTaken, 2), f(check.Dispatched, 2), guard(check.Granted, 2, 200), guard(check.Started, 2, 70), guard(check.Checked, 2, 80),
	guard(check.Written, 2, 80), delivered(2, check.Output), delivered(2, check.LastOutput), word(check.Outcome, "completed"), f(check.PlaceFreed, 2),
}

func after(list []check.Fact, more ...check.Fact) []check.Fact {
	return append(list[:len(list):len(list)], more...)
}

func TestWorldAcceptsWhatIsRight(t *testing.T) {
	for name, facts := range map[string][]check.Fact{
		"one attempt":  lone,
		"two attempts": retried,
		"a late write that is counted": after([]check.Fact{
			guard(check.Checked, 1, 99), guard(check.Written, 1, 120), guard(check.CountedLate, 1, 120),
		}, lone[2:]...),
		"a late write of a guard that died": after([]check.Fact{
			guard(check.Checked, 1, 99), guard(check.Written, 1, 120), {What: check.GuardDied, Guard: g},
		}, lone[2:]...),
		"a verdict that waited for the gateway": after([]check.Fact{
			{At: time.Millisecond, What: check.FencingBegan, Request: "req_a", N: 1},
			{At: 5 * time.Second, What: check.GatewayResumed},
			{At: 5 * time.Second, What: check.Silenced, Request: "req_a", N: 1},
		}, word(check.Outcome, "failed"), f(check.PlaceFreed, 1)),
		"a gateway that died": {{What: check.GatewayDied}},
	} {
		for _, v := range check.World(story(facts...), rules) {
			t.Errorf("%s: %v", name, v)
		}
	}
}

func TestWorldNotices(t *testing.T) {
	broken := check.Fact{What: check.Leaked, Word: "1 flights"}
	over := after(lone, f(check.Dispatched, 2))
	for name, row := range map[string]struct {
		facts []check.Fact
		want  string
	}{
		"two publishers":                     {[]check.Fact{delivered(1, check.Output), delivered(2, check.Output)}, "I1"},
		"an attempt after output":            {[]check.Fact{delivered(1, check.Output), f(check.Dispatched, 2)}, "I2"},
		"an old attempt that starts":         {[]check.Fact{f(check.Dispatched, 2), guard(check.Started, 1, 20)}, "I3"},
		"an old attempt that publishes":      {[]check.Fact{f(check.Dispatched, 2), guard(check.Checked, 1, 20)}, "I3"},
		"an old attempt at the client":       {[]check.Fact{f(check.Dispatched, 2), delivered(1, check.Output)}, "I3"},
		"an attempt that starts twice":       {[]check.Fact{guard(check.Started, 1, 20)}, "I3"},
		"a silent attempt that publishes":    {[]check.Fact{f(check.Silenced, 1), guard(check.Checked, 1, 20)}, "I3"},
		"an attempt that is sent twice":      {[]check.Fact{f(check.Dispatched, 1)}, "I3"},
		"completed without its end":          {[]check.Fact{delivered(1, check.Output), word(check.Outcome, "completed")}, "I4"},
		"interrupted after its end":          {[]check.Fact{delivered(1, check.LastOutput), word(check.Outcome, "interrupted")}, "I4"},
		"failed after output":                {[]check.Fact{delivered(1, check.Output), word(check.Outcome, "failed")}, "I4"},
		"rejected after an attempt":          {[]check.Fact{word(check.Outcome, "rejected")}, "I4"},
		"two outcomes":                       {after(lone, word(check.Outcome, "cancelled")), "I4"},
		"output after the outcome":           {after(lone, delivered(1, check.Output)), "I4"},
		"an error after the end":             {[]check.Fact{delivered(1, check.LastOutput), delivered(1, check.ErrorBytes)}, "I4"},
		"an attempt for a client that left":  {[]check.Fact{f(check.ClientLeft, 0), f(check.Dispatched, 2)}, "I6"},
		"a place that is given back early":   {[]check.Fact{f(check.PlaceFreed, 1), guard(check.Checked, 1, 20)}, "I6"},
		"three attempts of two":              {after(retried[:len(retried)-4], f(check.Dispatched, 3)), "I7"},
		"a second resend":                    {[]check.Fact{resent(2), resent(3)}, "I7"},
		"a check past the deadline":          {[]check.Fact{guard(check.Checked, 1, 100)}, "I8"},
		"a check for another incarnation":    {[]check.Fact{{What: check.Checked, Request: "req_a", N: 1, Guard: "guard-0/2/boot-0", Clock: 20}}, "I8"},
		"a check after the acknowledgement":  {[]check.Fact{guard(check.Declared, 1, 20), guard(check.Checked, 1, 30)}, "I8"},
		"a write after the acknowledgement":  {[]check.Fact{guard(check.Checked, 1, 20), guard(check.Declared, 1, 20), guard(check.Written, 1, 30)}, "I8"},
		"a late write that nobody counts":    {after(lone, guard(check.Written, 1, 100)), "I8"},
		"something that is left":             {after(lone, broken), "I10"},
		"an engine that goes on":             {after(lone, check.Fact{What: check.EngineBegan, Request: "req_a", N: 1, Engine: "e"}), "I10"},
		"a place that is kept":               {lone[:len(lone)-1], "I10"},
		"a verdict that comes late":          {[]check.Fact{f(check.FencingBegan, 1), {At: 5 * time.Second, What: check.Silenced, Request: "req_a", N: 1}}, "liveness"},
		"a verdict that never comes":         {[]check.Fact{f(check.FencingBegan, 1), {At: 5 * time.Second, What: check.FaultsOver}}, "liveness"},
		"a request that never ends":          {[]check.Fact{f(check.PlaceFreed, 1)}, "liveness"},
		"a completed request that goes on":   {over, "I2"},
		"a retry that the budget can't hold": {after(retried, another()...), "I7"},
	} {
		var saw []string
		found := false
		for _, v := range check.World(story(row.facts...), rules) {
			saw = append(saw, v.Error())
			found = found || v.Invariant == row.want
		}
		if !found {
			t.Errorf("%s: want %s, saw %s", name, row.want, strings.Join(saw, "; "))
		}
	}
}

func resent(n int) check.Fact {
	return check.Fact{What: check.Dispatched, Request: "req_a", N: n, Word: check.Resent}
}

// another is a second request with a retry: one more than a tenth of a second's
// worth of ten seconds.
func another() []check.Fact {
	return []check.Fact{
		{What: check.Arrived, Request: "req_b", Max: 2},
		{What: check.Dispatched, Request: "req_b", N: 1}, {What: check.Dispatched, Request: "req_b", N: 2},
	}
}
