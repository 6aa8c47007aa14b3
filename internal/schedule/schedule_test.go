// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
)

var start = time.Unix(1_000_000, 0)

func newPool(n int) *fleet.Pool {
	pool := &fleet.Pool{Name: "p"}
	for i := range n {
		pool.Endpoints = append(pool.Endpoints, endpoint(fmt.Sprintf("http://10.0.0.%d:8000", i+1)))
	}
	return pool
}

func endpoint(raw string) inference.Endpoint {
	u, err := url.Parse(raw)
	if err != nil {
		panic(err)
	}
	return fleet.NewEndpoint(u, "")
}

// newBookOf makes a book and n endpoints that it knows.
func newBookOf(c Config, n int) (*Book, *fleet.Pool) {
	b, pool := newBook(c), newPool(n)
	for _, e := range pool.Endpoints {
		b.Admit(e.ID)
	}
	return b, pool
}

func newBook(c Config) *Book { return NewBook(c, rand.New(rand.NewPCG(1, 2))) }

func reserve(t *testing.T, b *Book, now time.Time, pool *fleet.Pool, ask Ask) *Reservation {
	t.Helper()
	r, err := b.Reserve(now, pool, ask)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestEqualEndpointsShareEvenly(t *testing.T) {
	b, pool := newBookOf(Config{}, 4)
	got := map[inference.EndpointID]int{}
	for range 200 {
		r := reserve(t, b, start, pool, Ask{})
		got[r.Endpoint.ID]++
		r.Release()
	}
	for id, n := range got {
		if n < 30 || n > 70 {
			t.Errorf("%s got %d of 200 requests one after another, want 50±20", id, n)
		}
	}
}

func TestLeastInFlightWins(t *testing.T) {
	b, pool := newBookOf(Config{}, 3)
	for range 30 {
		reserve(t, b, start, pool, Ask{})
	}
	for _, s := range b.Status(start, pool) {
		if s.InFlight != 10 {
			t.Errorf("%s has %d in flight, want 10", s.Endpoint, s.InFlight)
		}
	}
}

func TestReleaseCountsOnce(t *testing.T) {
	b, pool := newBookOf(Config{}, 1)
	r := reserve(t, b, start, pool, Ask{})
	r.Release()
	r.Release()
	if n := b.Status(start, pool)[0].InFlight; n != 0 {
		t.Errorf("in flight %d, want 0", n)
	}
}

func TestExcludedEndpointIsNeverChosen(t *testing.T) {
	b, pool := newBookOf(Config{}, 2)
	for range 50 {
		r := reserve(t, b, start, pool, Ask{Exclude: []inference.EndpointID{pool.Endpoints[0].ID}, Retry: true})
		if r.Endpoint.ID == pool.Endpoints[0].ID {
			t.Fatal("the excluded endpoint was chosen")
		}
	}
	_, err := b.Reserve(start, pool, Ask{Exclude: []inference.EndpointID{pool.Endpoints[0].ID, pool.Endpoints[1].ID}})
	if err == nil || err.Code != inference.NoEndpoints {
		t.Errorf("got %v, want no_endpoints", err)
	}
}

func TestRetryPrefersTheSameRevision(t *testing.T) {
	b, pool := newBookOf(Config{}, 3)
	pool.Endpoints[2].Revision = "r2"
	for range 20 {
		if r := reserve(t, b, start, pool, Ask{PreferRevision: "r2", Retry: true}); r.Endpoint.Revision != "r2" {
			t.Fatalf("chose revision %q", r.Endpoint.Revision)
		}
	}
}

func TestFailedEndpointIsEjectedTriedAndLetBackSlowly(t *testing.T) {
	b, pool := newBookOf(Config{}, 2)
	bad := pool.Endpoints[0].ID
	b.Report(start, Outcome{Endpoint: bad, Verdict: inference.NotStarted})
	share := func(now time.Time) int {
		n := 0
		for range 100 {
			r := reserve(t, b, now, pool, Ask{})
			if r.Endpoint.ID == bad {
				n++
			}
			r.Release()
		}
		return n
	}
	if n := share(start.Add(900 * time.Millisecond)); n != 0 {
		t.Errorf("an ejected endpoint got %d of 100", n)
	}

	// Its time is over: the next first attempt is its trial, and only that one.
	now := start.Add(1100 * time.Millisecond)
	if r := reserve(t, b, now, pool, Ask{Retry: true}); r.Endpoint.ID == bad {
		t.Error("a retry was used as a trial")
	}
	trial := reserve(t, b, now, pool, Ask{})
	if trial.Endpoint.ID != bad {
		t.Fatal("no trial")
	}
	if n := share(now); n != 0 {
		t.Errorf("%d more requests joined the trial", n)
	}
	trial.Release()
	b.Report(now, Outcome{Endpoint: bad, Verdict: inference.Closed})
	if n := share(now.Add(1500 * time.Millisecond)); n != 0 {
		t.Errorf("a second failure in a row must double the wait; got %d of 100", n)
	}

	now = now.Add(2100 * time.Millisecond)
	trial = reserve(t, b, now, pool, Ask{})
	trial.Release()
	b.Report(now, Outcome{Endpoint: bad, Verdict: inference.Finished, Took: time.Second})
	early, late := share(now), share(now.Add(rampTime))
	if early == 0 || early > 20 || late < 30 {
		t.Errorf("after recovery it got %d of 100 at once and %d later, want about 5 and 50", early, late)
	}
}

func TestEverythingEjectedStillServes(t *testing.T) {
	b, pool := newBookOf(Config{}, 2)
	for _, e := range pool.Endpoints {
		b.Report(start, Outcome{Endpoint: e.ID, Verdict: inference.Closed})
	}
	reserve(t, b, start, pool, Ask{})
}

// A dead-but-fast engine is always idle, so least load alone would send it
// everything.
func TestQuickErrorsDoNotAttractTraffic(t *testing.T) {
	for _, verdict := range []inference.Verdict{inference.Refused, inference.EngineError, inference.Ended} {
		t.Run(verdict.String(), func(t *testing.T) {
			b, pool := newBookOf(Config{Retry: BudgetConfig{Ratio: 1, MinPerSecond: 1}}, 3)
			bad := pool.Endpoints[0].ID
			toBad := 0
			var running []*Reservation
			now := start
			for i := range 300 {
				now = now.Add(10 * time.Millisecond)
				r := reserve(t, b, now, pool, Ask{})
				if r.Endpoint.ID == bad {
					toBad++
					r.Release()
					b.Report(now, Outcome{Endpoint: bad, Verdict: verdict, Took: time.Millisecond})
				} else {
					running = append(running, r)
				}
				// Healthy answers take a second.
				if i >= 100 && len(running) > 0 {
					running[0].Release()
					b.Report(now, Outcome{Endpoint: running[0].Endpoint.ID, Verdict: inference.Finished, Took: time.Second})
					running = running[1:]
				}
			}
			if toBad > 110 {
				t.Errorf("the failing engine got %d of 300, more than its share", toBad)
			}
			if verdict != inference.Refused && toBad > 12 {
				t.Errorf("an engine that only fails got %d of 300", toBad)
			}
		})
	}
}

func TestClientErrorsNeverEject(t *testing.T) {
	b, pool := newBookOf(Config{}, 3)
	for range 50 {
		for _, e := range pool.Endpoints {
			b.Report(start, Outcome{Endpoint: e.ID, Verdict: inference.Refused, Took: time.Millisecond})
			b.Report(start, Outcome{Endpoint: e.ID, Verdict: inference.ClientGone})
		}
	}
	for _, s := range b.Status(start, pool) {
		if s.Ejected {
			t.Errorf("%s was ejected by its clients' mistakes", s.Endpoint)
		}
	}
}

func TestRetryAfterIsKept(t *testing.T) {
	b, pool := newBookOf(Config{}, 2)
	b.Report(start, Outcome{Endpoint: pool.Endpoints[0].ID, Verdict: inference.Ended, RetryAfter: 2 * time.Second})
	for range 20 {
		if r := reserve(t, b, start.Add(1900*time.Millisecond), pool, Ask{}); r.Endpoint.ID == pool.Endpoints[0].ID {
			t.Fatal("used before its Retry-After passed")
		}
	}
	b.Report(start, Outcome{Endpoint: pool.Endpoints[1].ID, Verdict: inference.Ended, RetryAfter: time.Hour})
	_, err := b.Reserve(start.Add(time.Second), pool, Ask{})
	if err == nil || err.Code != inference.Shed || err.RetryAfter != time.Second {
		t.Errorf("got %v (retry after %v), want shed and the shortest rest, 1s", err, err.RetryAfter)
	}
	reserve(t, b, start.Add(ejectMax), pool, Ask{})
}

// A lease ends between two looks at the whole pool as well.
func TestNoEndpointIsChosenPastItsLease(t *testing.T) {
	b, pool := newBookOf(Config{}, 8)
	ends := map[inference.EndpointID]time.Time{}
	for i, e := range pool.Endpoints {
		b.SetHealth(e.ID, inference.Healthy)
		b.SetGuarded(e.ID, true)
		ends[e.ID] = start.Add(time.Duration(i*i*7) * time.Millisecond)
		b.SetLeasable(e.ID, ends[e.ID])
	}
	chosen := map[inference.EndpointID]bool{}
	for now := start; ; now = now.Add(time.Millisecond) {
		r, err := b.Reserve(now, pool, Ask{})
		if err != nil {
			if now.Before(ends[pool.Endpoints[7].ID]) {
				t.Errorf("after %v: %v, and a guard is heard still", now.Sub(start), err)
			}
			break
		}
		if !now.Before(ends[r.Endpoint.ID]) {
			t.Fatalf("%s was chosen after %v, and its lease ended after %v", r.Endpoint.ID, now.Sub(start), ends[r.Endpoint.ID].Sub(start))
		}
		chosen[r.Endpoint.ID] = true
	}
	if len(chosen) != 7 {
		t.Errorf("%d were chosen, want all but the first", len(chosen))
	}
}

func TestUnhealthyEndpointsAreAvoided(t *testing.T) {
	b, pool := newBookOf(Config{HealthPanic: 0.5}, 4)
	chosen := func() map[inference.EndpointID]bool {
		got := map[inference.EndpointID]bool{}
		for range 100 {
			r, err := b.Reserve(start, pool, Ask{})
			if err != nil {
				return got
			}
			got[r.Endpoint.ID] = true
			r.Release()
		}
		return got
	}
	e := pool.Endpoints
	b.SetHealth(e[0].ID, inference.Unhealthy)
	b.SetHealth(e[1].ID, inference.Gone)
	if got := chosen(); len(got) != 2 || got[e[0].ID] || got[e[1].ID] {
		t.Errorf("half are healthy, and %v were chosen", got)
	}

	// Below the threshold probes are not believed, but nothing answers at the
	// address of one that is gone.
	b.SetHealth(e[2].ID, inference.Unhealthy)
	if got := chosen(); len(got) != 3 || got[e[1].ID] {
		t.Errorf("in panic, %v were chosen", got)
	}
	for _, x := range e {
		b.SetHealth(x.ID, inference.Gone)
	}
	if got := chosen(); len(got) != 0 {
		t.Errorf("all are gone, and %v were chosen", got)
	}
	for _, x := range e {
		b.SetHealth(x.ID, inference.Healthy)
	}
	if got := chosen(); len(got) != 4 || b.unhealthy != 0 {
		t.Errorf("all are back, and %v were chosen (%d unhealthy)", got, b.unhealthy)
	}
}

func TestEndpointThatComesBackKeepsItsNewHealth(t *testing.T) {
	b, pool := newBookOf(Config{}, 2)
	id := pool.Endpoints[0].ID
	var old *Reservation
	for old == nil || old.Endpoint.ID != id {
		old = reserve(t, b, start, pool, Ask{})
	}
	b.SetHealth(id, inference.Unhealthy)
	b.Forget(id)
	b.Admit(id)
	b.SetHealth(id, inference.Unhealthy)
	old.Release()
	b.Report(start, Outcome{Endpoint: id, Verdict: inference.Finished, Took: time.Second})
	if s := b.Status(start, pool)[0]; s.Health != inference.Unhealthy || s.InFlight != 0 || b.unhealthy != 1 {
		t.Errorf("%+v, %d unhealthy", s, b.unhealthy)
	}
	b.Forget(id)
	if b.unhealthy != 0 || b.accounts[id] != nil {
		t.Errorf("%d unhealthy, account %v", b.unhealthy, b.accounts[id])
	}
}

func TestModelGoesToEndpointsThatListIt(t *testing.T) {
	b, pool := newBookOf(Config{}, 3)
	e := pool.Endpoints
	b.SetModels(e[0].ID, []string{"m1", "m2"})
	b.SetModels(e[1].ID, []string{"m1"}) // e[2] has not told
	for model, want := range map[string]int{"m1": 3, "m2": 2, "unlisted": 3} {
		got := map[inference.EndpointID]bool{}
		for range 50 {
			r := reserve(t, b, start, pool, Ask{Model: model})
			got[r.Endpoint.ID] = true
			r.Release()
		}
		if len(got) != want || model == "m2" && got[e[1].ID] {
			t.Errorf("%s went to %v", model, got)
		}
	}
}

func TestRetryCost(t *testing.T) {
	pool := newPool(2)
	b := newBook(Config{Retry: BudgetConfig{MinPerSecond: 1}, RetryCost: CostLimit{PromptTokens: 1000, Prefill: time.Second}})
	code := func(tokens int) inference.Code {
		if err := b.Retry(start, pool, Ask{Retry: true}, inference.Tokens{N: tokens}); err != nil {
			return err.Code
		}
		return ""
	}
	if c := code(1001); c != inference.RetryTooExpensive {
		t.Errorf("1001 tokens: %q", c)
	}
	if c := code(900); c != "" {
		t.Errorf("900 tokens with nothing learned: %q", c)
	}
	b.FirstOutput(inference.Tokens{N: 1000}, 2*time.Second)
	if c := code(900); c != inference.RetryTooExpensive {
		t.Errorf("900 tokens at 2 ms each: %q", c)
	}
	if c := code(100); c != "" {
		t.Errorf("100 tokens at 2 ms each: %q", c)
	}
}

func TestRetryWithoutAnotherEndpointSpendsNothing(t *testing.T) {
	pool := newPool(1)
	b := newBook(Config{Retry: BudgetConfig{MinPerSecond: 0.1}})
	ask := Ask{Exclude: []inference.EndpointID{pool.Endpoints[0].ID}, Retry: true}
	for range 5 {
		if err := b.Retry(start, pool, ask, inference.Tokens{}); err == nil || err.Code != inference.NoEndpoints {
			t.Fatalf("got %v, want no_endpoints", err)
		}
	}
	if err := b.Retry(start, pool, Ask{Retry: true}, inference.Tokens{}); err != nil {
		t.Errorf("the budget was spent on retries that could not happen: %v", err)
	}
}

// TestBudgetNeverExceeded: in any window, retries are at most what first
// attempts and time have added, plus the initial fill.
func TestBudgetNeverExceeded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := BudgetConfig{
			Ratio:        rapid.Float64Range(0, 1).Draw(t, "ratio"),
			MinPerSecond: rapid.Float64Range(0, 5).Draw(t, "min"),
		}
		b := newBudget(config)
		now, firsts, retries := start, 0, 0
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(-100, 3000).Draw(t, "ms")) * time.Millisecond)
			if rapid.Bool().Draw(t, "first") {
				b.first(now)
				firsts++
			} else if b.take(now) {
				retries++
			}
			if b.tokens < 0 || b.tokens > b.limit()+1e-9 {
				t.Fatalf("tokens %v of %v", b.tokens, b.limit())
			}
		}
		// The clock may step back; what it adds is bounded by the sum of its steps forward.
		allowed := config.MinPerSecond*(budgetWindow+600) + config.Ratio*float64(firsts)
		if float64(retries) > allowed {
			t.Fatalf("%d retries, allowed %v", retries, allowed)
		}
	})
}

func TestBudgetForgetsTheQuietNight(t *testing.T) {
	b := newBudget(BudgetConfig{Ratio: 0.2, MinPerSecond: 1})
	now := start
	for range 1000 {
		b.first(now)
	}
	now = now.Add(time.Hour)
	n := 0
	for b.take(now) {
		n++
	}
	if n != budgetWindow {
		t.Errorf("%d retries saved up over an hour, want %d", n, budgetWindow)
	}
}

// TestCountersReturnToZero drives a book at random and checks that what was
// reserved and released leaves nothing behind (CNT-1, CNT-5).
func TestCountersReturnToZero(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b, pool := newBookOf(Config{Retry: BudgetConfig{Ratio: 0.2, MinPerSecond: 3}}, 3)
		now := start
		var held []*Reservation
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 2000).Draw(t, "ms")) * time.Millisecond)
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				r, err := b.Reserve(now, pool, Ask{Retry: rapid.Bool().Draw(t, "retry")})
				if e := (*inference.Error)(nil); errors.As(err, &e) && err != nil {
					continue
				}
				held = append(held, r)
			case 1:
				if len(held) > 0 {
					i := rapid.IntRange(0, len(held)-1).Draw(t, "i")
					held[i].Release()
					held[i].Release()
				}
			case 2:
				e := rapid.SampledFrom(pool.Endpoints).Draw(t, "endpoint")
				b.Admit(e.ID)
				b.Report(now, Outcome{Endpoint: e.ID, Verdict: inference.Verdict(rapid.IntRange(0, 11).Draw(t, "verdict"))})
			case 3:
				b.Forget(rapid.SampledFrom(pool.Endpoints).Draw(t, "gone").ID)
			}
		}
		for _, r := range held {
			r.Release()
		}
		for _, s := range b.Status(now, pool) {
			if s.InFlight != 0 {
				t.Fatalf("%s: %d in flight after all were released", s.Endpoint, s.InFlight)
			}
		}
	})
}

func BenchmarkReserve(b *testing.B) {
	for _, n := range []int{8, 100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			book, pool := newBook(Config{}), newPool(n)
			b.ReportAllocs()
			for b.Loop() {
				r, _ := book.Reserve(start, pool, Ask{})
				r.Release()
			}
		})
	}
}

// An endpoint whose guard is not heard takes nothing, and never passes for one
// that has none: nothing sent there could be fenced.
func TestUnheardGuardIsNoCandidate(t *testing.T) {
	b, pool := newBookOf(Config{}, 2)
	first, second := pool.Endpoints[0].ID, pool.Endpoints[1].ID
	b.SetGuarded(first, true)
	only := func(now time.Time, want inference.EndpointID) {
		t.Helper()
		for range 20 {
			r := reserve(t, b, now, pool, Ask{})
			if r.Endpoint.ID != want {
				t.Fatalf("chose %s", r.Endpoint.ID)
			}
			r.Release()
		}
	}
	only(start, second)
	b.SetGuarded(second, true)
	if _, err := b.Reserve(start, pool, Ask{}); err == nil || err.Code != inference.NoEndpoints {
		t.Errorf("got %v", err)
	}
	b.SetLeasable(first, start.Add(time.Second))
	only(start, first)
	if _, err := b.Reserve(start.Add(time.Second), pool, Ask{}); err == nil {
		t.Error("chosen after the last heartbeat was too old")
	}
	if s := b.Status(start, pool); !s[0].Fenceable || s[1].Fenceable {
		t.Errorf("status %+v", s)
	}
	b.SetLeasable("http://elsewhere:1", start) // has left: nothing to note
	b.SetGuarded(second, false)
	only(start.Add(time.Minute), second)
}

// What an endpoint tells of its revision counts where none was configured.
func TestToldRevision(t *testing.T) {
	b, pool := newBookOf(Config{}, 2)
	pool.Endpoints[0].Revision = "configured"
	b.SetRevision(pool.Endpoints[0].ID, "told")
	b.SetRevision(pool.Endpoints[1].ID, "told")
	for range 10 {
		r := reserve(t, b, start, pool, Ask{PreferRevision: "told"})
		if r.Endpoint.ID != pool.Endpoints[1].ID || r.Endpoint.Revision != "told" {
			t.Fatalf("chose %+v", r.Endpoint)
		}
		r.Release()
	}
}

// An endpoint that left is not brought back by who has not heard of it: nobody would
// drop it again. What comes to its address later begins anew.
func TestWhoLeftStaysAway(t *testing.T) {
	for name, late := range map[string]func(b *Book, id inference.EndpointID, old *fleet.Pool){
		"models": func(b *Book, id inference.EndpointID, _ *fleet.Pool) { b.SetModels(id, []string{"m"}) },
		"metrics": func(b *Book, id inference.EndpointID, _ *fleet.Pool) {
			b.Asking(id)
			b.SetScraped(id, Scraped{At: start})
		},
		"a restart":   func(b *Book, id inference.EndpointID, _ *fleet.Pool) { b.Restarted(id) },
		"a cache":     func(b *Book, id inference.EndpointID, _ *fleet.Pool) { b.SetCache(id, 1) },
		"a guard":     func(b *Book, id inference.EndpointID, _ *fleet.Pool) { b.SetIncarnation(id, "x") },
		"a status":    func(b *Book, _ inference.EndpointID, old *fleet.Pool) { b.Status(start, old) },
		"an explain":  func(b *Book, _ inference.EndpointID, old *fleet.Pool) { b.Explain(start, old, Ask{}) },
		"a retry":     func(b *Book, _ inference.EndpointID, old *fleet.Pool) { b.Retry(start, old, Ask{}, inference.Tokens{}) },
		"nobody late": func(*Book, inference.EndpointID, *fleet.Pool) {},
	} {
		b, old := newBookOf(Config{}, 2)
		left := old.Endpoints[1].ID
		b.SetModels(left, []string{"m"})
		reserve(t, b, start, old, Ask{}).Release()
		b.Forget(left)
		late(b, left, old)
		if len(b.accounts) != 1 {
			t.Errorf("%s: there are %d accounts, want 1", name, len(b.accounts))
		}
		for range 10 {
			if r := reserve(t, b, start, old, Ask{}); r.Endpoint.ID == left {
				t.Fatalf("%s: a request went to the endpoint that left", name)
			}
		}
		if s := b.Status(start, old)[1]; s.Health != inference.Gone {
			t.Errorf("%s: its health is %v", name, s.Health)
		}
		b.Admit(left)
		if r := reserve(t, b, start, old, Ask{Model: "m"}); r.Endpoint.ID != left {
			t.Errorf("%s: back again, the idle one gets nothing", name)
		}
	}
}
