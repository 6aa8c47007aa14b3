// SPDX-License-Identifier: Apache-2.0

package schedule_test

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugin"
	"github.com/headgate/headgate/plugins/standard"
)

// profileWith is a profile of those plugins, and of the filters first, which leaves
// the first endpoint, and nobody.
func profileWith(t testing.TB, names ...string) *schedule.Profile {
	t.Helper()
	known := maps.Clone(standard.Plugins)
	known["first"] = func(plugin.Options) (any, error) { return only(1), nil }
	known["nobody"] = func(plugin.Options) (any, error) { return only(0), nil }
	var uses []schedule.Use
	for _, name := range names {
		uses = append(uses, schedule.Use{Plugin: name})
	}
	p, err := schedule.NewProfile(known, uses)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// roomed is a book of n endpoints with limits.
func roomed(p *schedule.Profile, limits schedule.Limits, n int) (*schedule.Book, *fleet.Pool) {
	b, pool := schedule.NewBook(schedule.Config{Profile: p, Limits: limits}, rand.New(rand.NewPCG(1, 2))), newPool(n)
	for _, e := range pool.Endpoints {
		b.Admit(e.ID)
	}
	return b, pool
}

// bid is what a request that comes now is offered. It is taken if it is open.
func bid(b *schedule.Book, now time.Time, pool *fleet.Pool, ask schedule.Ask) schedule.Bid {
	round := b.Begin(now, pool)
	defer round.End()
	got := round.Bid(&ask)
	if got.Open {
		round.Take(&ask)
	}
	return got
}

// Who passes the filters is waited for, and those who don't get nothing.
func TestFiltersChooseBeforeRoomDoes(t *testing.T) {
	for name, p := range map[string]*schedule.Profile{
		"alone":         profileWith(t, "first", "cost"),
		"with fallback": profileWith(t, "first", "leastload").Else(profileWith(t, "leastload")),
	} {
		for kind, ask := range map[string]schedule.Ask{"known": prompt(1, 1, 1000), "unknown": {}} {
			b, pool := roomed(p, schedule.Limits{Concurrency: 1}, 2)
			first := pool.Endpoints[0].ID
			if got := bid(b, start, pool, ask); !got.Open || got.Endpoint != first {
				t.Errorf("%s, %s prompt: the first bid is %+v", name, kind, got)
			}
			if got := bid(b, start, pool, ask); got.Open || got.None || got.Endpoint != "" {
				t.Errorf("%s, %s prompt: with the only one full the bid is %+v", name, kind, got)
			}
		}
	}
}

// A fallback decides where nobody passes of those that could take the request.
func TestFallbackDecidesWhereNobodyPasses(t *testing.T) {
	b, pool := roomed(profileWith(t, "first", "cost").Else(profileWith(t, "leastload")), schedule.Limits{Concurrency: 1}, 2)
	ask := prompt(1, 1, 1000)
	ask.Exclude = []inference.EndpointID{pool.Endpoints[0].ID}
	if got := bid(b, start, pool, ask); !got.Open || got.Endpoint != pool.Endpoints[1].ID {
		t.Errorf("%+v", got)
	}
}

// The profile that decides says whether a request can wait for a busy endpoint,
// whatever its fallback could do.
func TestPatienceIsOfTheProfileThatDecides(t *testing.T) {
	b, pool := roomed(profileWith(t, "first", "cost").Else(profileWith(t, "leastload")), schedule.Limits{Prefill: 100 * time.Millisecond}, 2)
	bid(b, start, pool, prompt(1, 1, 8000))
	if got := bid(b, start, pool, prompt(2, 2, 8000)); got.Open || got.Endpoint != pool.Endpoints[0].ID {
		t.Errorf("%+v, want it to wait for the first endpoint", got)
	}
}

// Whatever happened to an endpoint that passes, and to one that does not.
func TestFiltersChooseBeforeStandingDoes(t *testing.T) {
	dead := func(b *schedule.Book, id inference.EndpointID) {
		b.Report(start, schedule.Outcome{Endpoint: id, Verdict: inference.Dead})
	}
	for name, happens := range map[string]func(b *schedule.Book, first, other inference.EndpointID){
		"the other is on trial": func(b *schedule.Book, _, other inference.EndpointID) { dead(b, other) },
		"the first is on trial": func(b *schedule.Book, first, _ inference.EndpointID) { dead(b, first) },
		"the first is ramping": func(b *schedule.Book, first, _ inference.EndpointID) {
			dead(b, first)
			b.Report(start.Add(2*time.Second), schedule.Outcome{Endpoint: first, Verdict: inference.Finished})
		},
		"the first is ejected": func(b *schedule.Book, first, _ inference.EndpointID) {
			dead(b, first)
			dead(b, first)
			dead(b, first)
		},
	} {
		for _, queued := range []bool{false, true} {
			b, pool := roomed(profileWith(t, "first", "cost"), schedule.Limits{}, 2)
			happens(b, pool.Endpoints[0].ID, pool.Endpoints[1].ID)
			got := map[inference.EndpointID]int{}
			for i := range 100 {
				if queued {
					got[bid(b, start.Add(2*time.Second), pool, prompt(i, i, 100)).Endpoint]++
				} else {
					got[place(t, b, start.Add(2*time.Second), pool, prompt(i, i, 100)).Endpoint.ID]++
				}
			}
			if got[pool.Endpoints[0].ID] != 100 {
				t.Errorf("%s, queued %v: %v", name, queued, got)
			}
		}
	}
}

// Among those that pass, standing and room decide as they do without filters.
func TestStandingDecidesAmongThoseThatPass(t *testing.T) {
	known := maps.Clone(standard.Plugins)
	known["all"] = func(plugin.Options) (any, error) { return everybody{}, nil }
	p, err := schedule.NewProfile(known, []schedule.Use{{Plugin: "all"}, {Plugin: "leastload"}})
	if err != nil {
		t.Fatal(err)
	}
	b, pool := roomed(p, schedule.Limits{Concurrency: 2}, 4)
	b.Report(start, schedule.Outcome{Endpoint: pool.Endpoints[0].ID, Verdict: inference.Dead})
	b.Report(start, schedule.Outcome{Endpoint: pool.Endpoints[2].ID, Verdict: inference.Dead})
	got := map[inference.EndpointID]int{}
	for i := range 4 {
		got[bid(b, start, pool, prompt(i, i, 100)).Endpoint]++
	}
	if got[pool.Endpoints[1].ID] != 2 || got[pool.Endpoints[3].ID] != 2 {
		t.Errorf("two of four are ejected, and requests went to %v", got)
	}
	if last := bid(b, start, pool, prompt(9, 9, 100)); last.Open || last.None {
		t.Errorf("with the good ones full the bid is %+v", last)
	}
}

// What an explanation says is what the queue would be told, room included.
func TestExplanationGoesByRoom(t *testing.T) {
	outs := func(d schedule.Decision) (list []string) {
		for _, e := range d.Candidates {
			list = append(list, e.Out)
		}
		return list
	}
	for name, c := range map[string]struct {
		profile *schedule.Profile
		limits  schedule.Limits
		before  int    // requests there, of the same prompt
		next    string // what the next one does: goes, waits for one, waits
		outs    []string
	}{
		"one is full":                    {profileWith(t, "cost"), schedule.Limits{Concurrency: 1}, 1, "goes", []string{"", "full"}},
		"both are full":                  {profileWith(t, "cost"), schedule.Limits{Concurrency: 1}, 2, "waits", []string{"full", "full"}},
		"both are full, without profile": {nil, schedule.Limits{Concurrency: 1}, 2, "waits", []string{"full", "full"}},
		"who passes is full":             {profileWith(t, "first", "cost"), schedule.Limits{Concurrency: 1}, 1, "waits", []string{"full", "first: not the first"}},
		"busy ones are scored":           {profileWith(t, "cost"), schedule.Limits{Prefill: 100 * time.Millisecond}, 2, "waits for one", []string{"", ""}},
		"busy ones can't be":             {profileWith(t, "leastload"), schedule.Limits{Prefill: 100 * time.Millisecond}, 2, "waits", []string{"busy", "busy"}},
	} {
		b, pool := roomed(c.profile, c.limits, 2)
		for range c.before {
			bid(b, start, pool, prompt(1, 1, 8000))
		}
		before := b.Status(start, pool)
		ask := prompt(1, 1, 8000)
		d := b.Explain(start, pool, ask)
		if after := b.Status(start, pool); !slices.Equal(statusLoads(after), statusLoads(before)) {
			t.Errorf("%s: explaining it left %v in flight of %v", name, statusLoads(after), statusLoads(before))
		}
		slices.Sort(c.outs)
		if got := outs(d); !slices.Equal(slices.Sorted(slices.Values(got)), c.outs) || d.Err != nil {
			t.Errorf("%s: endpoints are out because of %q, error %v", name, got, d.Err)
		}
		next := bid(b, start, pool, ask)
		if d.Endpoint != next.Endpoint && c.next == "goes" || d.Waits == next.Open {
			t.Errorf("%s: explained as %q, waits %v, and the bid is %+v", name, d.Endpoint, d.Waits, next)
		}
		if ends := map[bool]string{false: "goes", true: "waits"}[d.Waits]; ends != c.next && ends+" for one" != c.next ||
			(d.Endpoint == "") != (c.next == "waits") || (d.Reason == "") != (d.Endpoint == "") {
			t.Errorf("%s: %+v, want that it %s", name, d, c.next)
		}
	}
}

func statusLoads(all []schedule.Status) (loads []int) {
	for _, s := range all {
		loads = append(loads, s.InFlight)
	}
	return loads
}

// Nobody waits beside an endpoint that has nothing to do, and the reason says so.
func TestExplanationOfARequestThatGoesEarly(t *testing.T) {
	b, pool := roomed(named(t, standard.Default), schedule.Limits{Prefill: 100 * time.Millisecond}, 2)
	long := prompt(0, 0, 20_000)
	first := place(t, b, start, pool, long)
	first.Accepted()
	first.FirstOutput(start.Add(2 * time.Second))
	now := start.Add(2 * time.Second)
	ask := prompt(7, 7, 4000)
	ask.Exclude = []inference.EndpointID{other(pool, first.Endpoint.ID)}
	place(t, b, now, pool, ask)
	d := b.Explain(now, pool, prompt(0, 1, 20_000))
	if d.Waits || d.Endpoint != first.Endpoint.ID || d.Reason != "best score by more than the margin, at once because another has nothing to do" {
		t.Errorf("%q, waits %v, because %q", d.Endpoint, d.Waits, d.Reason)
	}
}

// What the reason says of equals, and of filters that nobody passes.
func TestReasons(t *testing.T) {
	for _, c := range []struct {
		profile *schedule.Profile
		want    string
	}{
		{profileWith(t, "leastload"), "best score of 3, one of 3 equal"},
		{profileWith(t, "first", "leastload"), "the only one that the filters leave"},
		{profileWith(t, "nobody", "leastload"), "best score of 3, one of 3 equal, nobody disregarded: nobody passes it"},
		{profileWith(t, "nobody", "nobody", "leastload"), "best score of 3, one of 3 equal, nobody and nobody disregarded: nobody passes them"},
		{profileWith(t, "first", "nobody", "leastload"), "the only one that the filters leave, nobody disregarded: nobody passes it"},
		{profileWith(t, "nobody", "cost", "idlest"), "least loaded of 3 near the best, one of 3, nobody disregarded: nobody passes it"},
		{
			profileWith(t, "nobody", "cost").Else(profileWith(t, "nobody", "leastload")),
			"best score of 3, one of 3 equal, nobody disregarded: nobody passes it",
		},
	} {
		b, pool := roomed(c.profile, schedule.Limits{}, 3)
		ask := prompt(1, 1, 500)
		if d := b.Explain(start, pool, ask); d.Reason != c.want {
			t.Errorf("%q, want %q", d.Reason, c.want)
		}
		if r := place(t, b, start, pool, ask); !strings.Contains(r.Why(), strconv.Quote(c.want)) {
			t.Errorf("the header says %s, want %q", r.Why(), c.want)
		}
	}
}
