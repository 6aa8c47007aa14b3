// SPDX-License-Identifier: Apache-2.0

package schedule_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugin"
	"github.com/headgate/headgate/plugins/standard"
)

func limited(t *testing.T, profile string, limits schedule.Limits) *schedule.Book {
	t.Helper()
	p, err := standard.Profile(profile)
	if err != nil {
		t.Fatal(err)
	}
	b := schedule.NewBook(schedule.Config{Profile: p, Limits: limits, ScrapeStale: 5 * time.Second}, rand.New(rand.NewPCG(1, 2)))
	for _, e := range newPool(2).Endpoints {
		b.Admit(e.ID)
	}
	return b
}

// take dispatches as many requests of different prompts as go at once.
func take(b *schedule.Book, now time.Time, pool *fleet.Pool, tokens, most int) (taken []*schedule.Reservation) {
	round := b.Begin(now, pool)
	defer round.End()
	for len(taken) < most && round.Room() {
		ask := prompt(len(taken), len(taken), tokens)
		if !round.Bid(&ask).Open {
			break
		}
		taken = append(taken, round.Take(&ask))
	}
	return taken
}

func perEndpoint(taken []*schedule.Reservation) map[inference.EndpointID]int {
	n := map[inference.EndpointID]int{}
	for _, r := range taken {
		n[r.Endpoint.ID]++
	}
	return n
}

// A burst never puts more on an endpoint than it may have, and room and choice
// are one step (FLW-4).
func TestConcurrencyIsNeverPassed(t *testing.T) {
	for _, profile := range []string{standard.Default, "weighted"} {
		b, pool := limited(t, profile, schedule.Limits{Concurrency: 4}), newPool(2)
		for range 50 {
			taken := take(b, start, pool, 300, 100)
			if len(taken) != 8 {
				t.Fatalf("%s: %d of 100 went, want 8", profile, len(taken))
			}
			for id, n := range perEndpoint(taken) {
				if n != 4 {
					t.Fatalf("%s: %d on %s, want 4", profile, n, id)
				}
			}
			for _, r := range taken {
				r.Release()
			}
		}
	}
}

func TestAnEndpointIsOpenUntilItsPrefillIsPending(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{Prefill: 250 * time.Millisecond}), newPool(1)
	// 1000 tokens are 0.1 s and 30 ms for the first output: at 0.23 s it is open,
	// at 0.33 s it is not.
	if n := len(take(b, start, pool, 1000, 9)); n < 2 || n > 3 {
		t.Fatalf("%d went, want 2 or 3", n)
	}
	round := b.Begin(start, pool)
	if opens := round.Opens(); opens <= 0 || opens > 200*time.Millisecond {
		t.Errorf("opens after %v", opens)
	}
	ask := prompt(1, 1, 1000)
	if bid := round.Bid(&ask); bid.Open || bid.Endpoint == "" || bid.Ahead < 250*time.Millisecond {
		t.Errorf("bid %+v", bid)
	}
	round.End()
	// Time passes, and by what is known the engine has got on.
	if n := len(take(b, start.Add(250*time.Millisecond), pool, 1000, 9)); n == 0 {
		t.Error("it stays closed")
	}
}

// Whoever has its prompt cached may be worth waiting for, and each that waits
// makes it worth less.
func TestARequestWaitsForTheEndpointThatHasItsPrompt(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{Prefill: 100 * time.Millisecond}), newPool(2)
	long := prompt(0, 0, 20_000)
	first := place(t, b, start, pool, long)
	first.Accepted()
	first.FirstOutput(start.Add(2 * time.Second))
	now := start.Add(2 * time.Second)
	// Its engine is busy for a while with something else.
	ask := prompt(7, 7, 4000)
	ask.Exclude = []inference.EndpointID{other(pool, first.Endpoint.ID)}
	place(t, b, now, pool, ask)

	// Nobody waits while the other has nothing to do. It goes ahead of its turn.
	next := prompt(0, 1, 20_000)
	round := b.Begin(now, pool)
	if bid := round.Bid(&next); !bid.Open || !bid.Idle || bid.Endpoint != first.Endpoint.ID {
		t.Fatalf("with an idle endpoint beside it the bid is %+v", bid)
	}
	early := round.Take(&next)
	if !round.Room() {
		t.Error("a request that had no room took some")
	}
	round.End()
	early.Release()
	ask = prompt(8, 8, 300)
	ask.Exclude = []inference.EndpointID{first.Endpoint.ID}
	place(t, b, now, pool, ask)

	round = b.Begin(now, pool)
	defer round.End()
	if !round.Room() {
		t.Fatal("the other endpoint has room")
	}
	waited := 0
	for i := range 20 {
		next := prompt(0, i+1, 20_000) // three quarters of it are cached there
		bid := round.Bid(&next)
		if bid.Open {
			break
		}
		if bid.Endpoint != first.Endpoint.ID {
			t.Fatalf("waits for %s", bid.Endpoint)
		}
		waited++
		round.Pass(&next)
	}
	if waited == 0 || waited == 20 {
		t.Errorf("%d waited for it before the next went elsewhere", waited)
	}
}

func other(pool *fleet.Pool, id inference.EndpointID) inference.EndpointID {
	for _, e := range pool.Endpoints {
		if e.ID != id {
			return e.ID
		}
	}
	return ""
}

func TestWhatHasRoom(t *testing.T) {
	known := func(v float64) plugin.Value { return plugin.Value{V: v, Known: true} }
	limits := schedule.Limits{Prefill: time.Second, Waiting: 2}
	for name, c := range map[string]struct {
		change func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID)
		room   bool
	}{
		"nothing in flight": {func(*schedule.Book, *fleet.Pool, inference.EndpointID) {}, true},
		"nothing in flight, whatever the engine says": {func(b *schedule.Book, _ *fleet.Pool, id inference.EndpointID) {
			b.SetScraped(id, schedule.Scraped{At: start, Queued: known(50), KVUsage: known(1)})
		}, true},
		"some wait in the engine": {func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID) {
			place(t, b, start, pool, prompt(0, 0, 100))
			place(t, b, start, pool, prompt(1, 0, 100))
			b.Asking(id)
			b.SetScraped(id, schedule.Scraped{At: start, Queued: known(2)})
		}, false},
		"some waited, and have begun": {func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID) {
			r := place(t, b, start, pool, prompt(0, 0, 100))
			place(t, b, start, pool, prompt(1, 0, 100))
			b.Asking(id)
			b.SetScraped(id, schedule.Scraped{At: start, Queued: known(2)})
			r.FirstOutput(start)
		}, true},
		"some waited, and have ended": {func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID) {
			ask := prompt(0, 0, 100)
			ask.Stream = false
			r := place(t, b, start, pool, ask)
			place(t, b, start, pool, ask)
			b.Asking(id)
			b.SetScraped(id, schedule.Scraped{At: start, Queued: known(2)})
			r.Release()
		}, true},
		"whole answers, and none waited some time ago": {func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID) {
			ask := prompt(0, 0, 100)
			ask.Stream = false
			b.Asking(id)
			b.SetScraped(id, schedule.Scraped{At: start, Queued: known(0)})
			for range 31 {
				place(t, b, start, pool, ask)
			}
		}, true},
		"many whole answers, and none waited some time ago": {func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID) {
			ask := prompt(0, 0, 100)
			ask.Stream = false
			b.Asking(id)
			b.SetScraped(id, schedule.Scraped{At: start, Queued: known(0)})
			for range 32 {
				place(t, b, start, pool, ask)
			}
		}, false},
		"very many short prompts that have not begun": {func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID) {
			for range 64 {
				place(t, b, start, pool, prompt(0, 0, 1))
			}
		}, false},
		"its memory is full": {func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID) {
			place(t, b, start, pool, prompt(0, 0, 100))
			b.SetScraped(id, schedule.Scraped{At: start, KVUsage: known(0.99)})
		}, false},
		"others wait in the engine, ours have begun": {func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID) {
			place(t, b, start, pool, prompt(0, 0, 100)).FirstOutput(start)
			b.SetScraped(id, schedule.Scraped{At: start, Queued: known(9)})
		}, true},
		"what it said is too old": {func(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID) {
			place(t, b, start, pool, prompt(0, 0, 100))
			b.SetScraped(id, schedule.Scraped{At: start.Add(-6 * time.Second), Queued: known(9)})
		}, true},
		"gone": {func(b *schedule.Book, _ *fleet.Pool, id inference.EndpointID) { b.SetHealth(id, inference.Gone) }, false},
		"paused": {func(b *schedule.Book, _ *fleet.Pool, id inference.EndpointID) {
			b.Report(start, schedule.Outcome{Endpoint: id, Verdict: inference.Ended, RetryAfter: 3 * time.Second})
		}, false},
		"ejected, and the only one": {func(b *schedule.Book, _ *fleet.Pool, id inference.EndpointID) {
			b.Report(start, schedule.Outcome{Endpoint: id, Verdict: inference.Closed})
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			b, pool := limited(t, standard.Default, limits), newPool(1)
			c.change(b, pool, pool.Endpoints[0].ID)
			round := b.Begin(start, pool)
			defer round.End()
			if round.Room() != c.room {
				t.Errorf("room %v, want %v", round.Room(), c.room)
			}
		})
	}
	t.Run("an ejected one beside a busy one is not for those that can wait", func(t *testing.T) {
		b, pool := limited(t, standard.Default, schedule.Limits{Concurrency: 1}), newPool(2)
		b.Report(start, schedule.Outcome{Endpoint: pool.Endpoints[0].ID, Verdict: inference.Closed})
		if n := len(take(b, start, pool, 100, 9)); n != 1 {
			t.Errorf("%d went, want 1", n)
		}
		round := b.Begin(start, pool)
		defer round.End()
		ask := prompt(0, 0, 100)
		if bid := round.Bid(&ask); bid.Endpoint != "" || bid.None {
			t.Errorf("bid %+v", bid)
		}
	})
}

// Answers that come whole tell nothing of prefill, so a pool that has only those is
// not held down to the speed that is assumed of engines. Streams do tell.
func TestWholeAnswersAloneDoNotCloseAnEndpoint(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{Prefill: 250 * time.Millisecond}), newPool(1)
	wholes := func(from, n int) (taken int) {
		round := b.Begin(start, pool)
		defer round.End()
		for ; taken < n && round.Room(); taken++ {
			ask := prompt(from+taken, 0, 4000) // 0.4 s
			ask.Stream = false
			if !round.Bid(&ask).Open {
				break
			}
			round.Take(&ask)
		}
		return taken
	}
	if n := wholes(0, 50); n != 50 {
		t.Errorf("%d of 50 went", n)
	}
	r := place(t, b, start, pool, prompt(99, 0, 4000))
	if n := wholes(100, 1); n != 0 {
		t.Error("one went beside a stream that waits")
	}
	r.FirstOutput(start.Add(400 * time.Millisecond))
	place(t, b, start.Add(800*time.Millisecond), pool, prompt(98, 0, 4000)).FirstOutput(start.Add(1200 * time.Millisecond))
	if n := wholes(200, 9); n > 1 {
		t.Errorf("%d went, and by what streams took 0.4 s each are pending", n)
	}
}

// An engine that said that it is full and then says nothing any more is looked at
// again when its word is too old.
func TestAScrapeOutageDoesNotHaltAPool(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{Prefill: time.Minute, Waiting: 2}), newPool(1)
	id := pool.Endpoints[0].ID
	place(t, b, start, pool, prompt(0, 0, 100_000))
	place(t, b, start, pool, prompt(1, 0, 100_000))
	b.Asking(id)
	b.SetScraped(id, schedule.Scraped{At: start, Queued: plugin.Value{V: 2, Known: true}})
	round := b.Begin(start, pool)
	opens := round.Opens()
	if round.Room() || opens != 5*time.Second {
		t.Errorf("room %v, opens %v", round.Room(), opens)
	}
	round.End()
	round = b.Begin(start.Add(opens+time.Millisecond), pool)
	defer round.End()
	if !round.Room() {
		t.Error("it stays closed")
	}
}

func TestABidWithoutAnEndpointSaysWhy(t *testing.T) {
	b := limited(t, standard.Default, schedule.Limits{})
	ask := prompt(0, 0, 100)
	round := b.Begin(start, newPool(0))
	if bid := round.Bid(&ask); !bid.None || bid.Pause != 0 || round.Load().Endpoints != 0 {
		t.Errorf("bid %+v, load %+v", bid, round.Load())
	}
	round.End()
	pool := newPool(1)
	b.Report(start, schedule.Outcome{Endpoint: pool.Endpoints[0].ID, Verdict: inference.Ended, RetryAfter: 3 * time.Second})
	round = b.Begin(start.Add(time.Second), pool)
	defer round.End()
	if bid := round.Bid(&ask); !bid.None || bid.Pause != 2*time.Second || round.Load().Endpoints != 1 || round.Opens() != 2*time.Second {
		t.Errorf("bid %+v, load %+v, opens %v", bid, round.Load(), round.Opens())
	}
}

// A paced is streams on one endpoint whose tokens come at a set pace.
type paced struct {
	b       *schedule.Book
	pool    *fleet.Pool
	now     time.Time
	streams []*schedule.Reservation
	tokens  float64
	tpot    time.Duration // of requests; 0: the pool's
}

func newPaced(t *testing.T) *paced {
	t.Helper()
	profile, err := standard.Profile(standard.Default)
	if err != nil {
		t.Fatal(err)
	}
	return &paced{
		b: schedule.NewBook(schedule.Config{
			Profile: profile, TTFT: schedule.TTFT{Base: time.Second}, TPOT: 100 * time.Millisecond, Limits: schedule.Limits{Prefill: 250 * time.Millisecond},
		}, rand.New(rand.NewPCG(1, 2))),
		pool: newPool(1), now: start, tokens: 1,
	}
}

func (p *paced) begin(n int) {
	for range n {
		ask := prompt(len(p.streams), len(p.streams), 300)
		ask.Stream, ask.TPOT = true, p.tpot
		r, err := p.b.Reserve(p.now, p.pool, ask)
		if err != nil {
			panic(err)
		}
		r.FirstOutput(p.now)
		r.Tokens(int(p.tokens))
		p.streams = append(p.streams, r)
	}
}

// play lets time pass, with a look at the endpoint now and then.
func (p *paced) play(took, perToken time.Duration) {
	const look = 50 * time.Millisecond
	for range took / look {
		p.now = p.now.Add(look)
		p.tokens += float64(look) / float64(perToken)
		for _, r := range p.streams {
			r.Tokens(int(p.tokens))
		}
		p.b.Begin(p.now, p.pool).End()
	}
}

// takes is how many requests go to the endpoint now. They are given back.
func (p *paced) takes() int {
	taken := take(p.b, p.now, p.pool, 300, 50)
	for _, r := range taken {
		r.Release()
	}
	return len(taken)
}

func (p *paced) look() (schedule.Load, time.Duration) {
	round := p.b.Begin(p.now, p.pool)
	defer round.End()
	return round.Load(), round.Opens()
}

// An engine that puts prefill first begins every answer in time, however many it
// has. That its streams get slow is what shows that it has too many.
func TestACrowdedEndpointIsClosedUntilItsStreamsGetOn(t *testing.T) {
	p := newPaced(t)
	p.begin(20)
	p.play(5*time.Second, 30*time.Millisecond)
	roomy := p.takes()
	if load, _ := p.look(); roomy == 0 || load.Used < 0.3 || load.Used > 0.4 {
		t.Fatalf("at 30 ms per token %d went and %.2f is in use, want some and 30/85", roomy, load.Used)
	}
	p.play(10*time.Second, 100*time.Millisecond)
	if n := p.takes(); n == 0 || n >= roomy {
		t.Errorf("at 100 ms per token %d went, want fewer than %d and some", n, roomy)
	}
	p.play(10*time.Second, 115*time.Millisecond)
	if n := p.takes(); n != 0 {
		t.Errorf("at 115 ms per token %d went, want none", n)
	}
	if load, opens := p.look(); load.Used != 1 || opens <= 0 {
		t.Errorf("at 115 ms per token %.2f is in use, and it opens in %v: want 1, and soon", load.Used, opens)
	}
	p.play(2*time.Second, 30*time.Millisecond)
	if n := p.takes(); n == 0 {
		t.Error("none went although the streams get on again")
	}
}

// A stream is held against the target of its own request, whatever the pool's is, and
// with others against theirs.
func TestStreamsHaveTheirOwnTargets(t *testing.T) {
	for _, c := range []struct {
		tpots    [2]time.Duration
		perToken time.Duration
		open     bool
	}{
		{[2]time.Duration{200 * time.Millisecond, 200 * time.Millisecond}, 150 * time.Millisecond, true},
		{[2]time.Duration{50 * time.Millisecond, 50 * time.Millisecond}, 70 * time.Millisecond, false},
		{[2]time.Duration{50 * time.Millisecond, 0}, 70 * time.Millisecond, true},  // 75 on average
		{[2]time.Duration{50 * time.Millisecond, 0}, 90 * time.Millisecond, false}, // the others' target would allow it
	} {
		p := newPaced(t)
		for _, p.tpot = range c.tpots {
			p.begin(10)
		}
		p.play(5*time.Second, 30*time.Millisecond)
		p.play(10*time.Second, c.perToken)
		if n := p.takes(); (n > 0) != c.open {
			t.Errorf("with targets of %v and %v per token, %d went, want some: %v", c.tpots, c.perToken, n, c.open)
		}
	}
}

// What streams leave past 0.85 of their target is for requests that have a target for
// their first output and yield to nobody.
func TestRequestsThatYieldFindAnEngineCrowdedEarlier(t *testing.T) {
	p := newPaced(t)
	p.begin(20)
	p.play(10*time.Second, 90*time.Millisecond)
	round := p.b.Begin(p.now, p.pool)
	defer round.End()
	for _, c := range []struct {
		name string
		make func(*schedule.Ask)
		open bool
	}{
		{"one with a target", func(*schedule.Ask) {}, true},
		{"one that yields", func(a *schedule.Ask) { a.Yields = true }, false},
	} {
		ask := prompt(5, 5, 300)
		c.make(&ask)
		if bid := round.Bid(&ask); bid.Open != c.open || !round.Room() || round.Opens() < 0 {
			t.Errorf("%s: %+v, room %v, opens in %v", c.name, bid, round.Room(), round.Opens())
		}
	}
}

// Streams that are slow because their clients read slowly make no crowd.
func TestSlowClientsAreNoCrowd(t *testing.T) {
	p := newPaced(t)
	p.begin(20)
	p.play(5*time.Second, 30*time.Millisecond)
	for range 200 {
		for _, r := range p.streams {
			r.Writing(p.now)
		}
		p.play(250*time.Millisecond, 300*time.Millisecond)
		for _, r := range p.streams {
			r.Wrote(p.now)
		}
		p.play(50*time.Millisecond, 300*time.Millisecond)
	}
	if n := p.takes(); n == 0 {
		t.Error("an engine is closed for streams that wait for their clients")
	}
}

// What slows a few streams is a long prompt.
func TestAFewStreamsAreNoCrowd(t *testing.T) {
	p := newPaced(t)
	p.begin(8)
	p.play(5*time.Second, 30*time.Millisecond)
	p.play(10*time.Second, 300*time.Millisecond)
	if n := p.takes(); n == 0 {
		t.Error("an engine is closed for eight slow streams")
	}
}

// One request at a time would not make a slow engine faster.
func TestASlowEngineIsNotCrowdedByOneStream(t *testing.T) {
	p := newPaced(t)
	p.begin(1)
	p.play(20*time.Second, 200*time.Millisecond)
	if n := p.takes(); n == 0 {
		t.Fatal("an engine of 200 ms per token takes one request only")
	}
	p.begin(20)
	p.play(20*time.Second, 320*time.Millisecond)
	if n := p.takes(); n != 0 {
		t.Errorf("%d went at 1.6 times its best pace, want none", n)
	}
}

func TestAnEndpointWhoseStreamsHaveEndedIsNotCrowded(t *testing.T) {
	p := newPaced(t)
	p.begin(20)
	p.play(10*time.Second, 30*time.Millisecond)
	p.play(10*time.Second, 150*time.Millisecond)
	if n := p.takes(); n != 0 {
		t.Fatalf("%d went, want none", n)
	}
	for _, r := range p.streams {
		r.Release()
	}
	if n := p.takes(); n == 0 {
		t.Error("none went to an idle endpoint")
	}
}

// A target may grow with the prompt: a base, and so many times the prefill of all of it
// on an engine with nothing else to do. The request's own takes the place of the pool's
// whole.
func TestTargetGrowsWithThePrompt(t *testing.T) {
	const long, prefill = 10_000, 1155 * time.Millisecond // by the prior: 30 ms, and 0.1 ms a token, an eighth more for attention
	for name, c := range map[string]struct {
		pool, own schedule.TTFT
		tokens    int
		want      time.Duration
	}{
		"no target":            {schedule.TTFT{}, schedule.TTFT{Prefills: 2}, long, 0},
		"the pool's":           {schedule.TTFT{Base: time.Second, Prefills: 2}, schedule.TTFT{}, long, time.Second + 2*prefill},
		"its own":              {schedule.TTFT{}, schedule.TTFT{Base: time.Second, Prefills: 1}, long, time.Second + prefill},
		"its own, without":     {schedule.TTFT{Base: time.Second, Prefills: 2}, schedule.TTFT{Base: 3 * time.Second}, long, 3 * time.Second},
		"an unknown prompt":    {schedule.TTFT{Base: time.Second, Prefills: 2}, schedule.TTFT{}, 0, time.Second},
		"half of it is cached": {schedule.TTFT{Base: time.Second, Prefills: 2}, schedule.TTFT{}, -long, time.Second + 2*prefill},
	} {
		profile, err := standard.Profile(standard.Default)
		if err != nil {
			t.Fatal(err)
		}
		b, pool := schedule.NewBook(schedule.Config{Profile: profile, TTFT: c.pool}, rand.New(rand.NewPCG(1, 2))), newPool(1)
		ask := prompt(1, 1, max(c.tokens, -c.tokens))
		ask.TTFT = c.own
		if c.tokens < 0 {
			ask.Held = []schedule.Held{{Endpoint: pool.Endpoints[0].ID, Tokens: long / 2}}
		}
		round := b.Begin(start, pool)
		bid := round.Bid(&ask)
		round.End()
		if diff := bid.Target - c.want; diff < -time.Millisecond || diff > time.Millisecond {
			t.Errorf("%s: the target is %v, want %v", name, bid.Target, c.want)
		}
	}
}

// A request that only an ejected endpoint may take goes there, and takes no room from
// others.
func TestAnEjectedEndpointTakesNoRoomFromOthers(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{Concurrency: 1}), newPool(2)
	first, second := pool.Endpoints[0].ID, pool.Endpoints[1].ID
	b.SetModels(first, []string{"a"})
	b.SetModels(second, []string{"b"})
	b.Report(start, schedule.Outcome{Endpoint: first, Verdict: inference.Closed})
	round := b.Begin(start, pool)
	defer round.End()
	ask := prompt(0, 0, 100)
	ask.Model = "a"
	if bid := round.Bid(&ask); bid.Endpoint != first || !bid.Open {
		t.Fatalf("bid %+v", bid)
	}
	round.Take(&ask)
	ask = prompt(1, 1, 100)
	ask.Model = "b"
	if bid := round.Bid(&ask); bid.Endpoint != second || !bid.Open {
		t.Fatalf("bid %+v", bid)
	}
	if !round.Room() {
		t.Error("the second endpoint is idle, and there is no room")
	}
}

// Where nobody better can take a request, the queue lets it go to an ejected endpoint
// as the choice does, whoever else is full.
func TestAnEjectedEndpointIsUsedWhereNoBetterOneIs(t *testing.T) {
	for name, alone := range map[string]func(b *schedule.Book, good, bad inference.EndpointID, ask *schedule.Ask){
		"the better one does not list the model": func(b *schedule.Book, good, bad inference.EndpointID, ask *schedule.Ask) {
			b.SetModels(good, []string{"other"})
			b.SetModels(bad, []string{ask.Model})
		},
		"the better one failed for this request": func(_ *schedule.Book, good, _ inference.EndpointID, ask *schedule.Ask) {
			ask.Exclude = []inference.EndpointID{good}
		},
		"the better one asked for a pause": func(b *schedule.Book, good, _ inference.EndpointID, _ *schedule.Ask) {
			b.Report(start, schedule.Outcome{Endpoint: good, Verdict: inference.Overloaded, RetryAfter: 30 * time.Second})
		},
		"the other one is ejected too": func(b *schedule.Book, good, _ inference.EndpointID, _ *schedule.Ask) {
			b.Report(start, schedule.Outcome{Endpoint: good, Verdict: inference.Closed})
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, pool := limited(t, standard.Default, schedule.Limits{Concurrency: 1}), newPool(2)
			good, bad := pool.Endpoints[0].ID, pool.Endpoints[1].ID
			b.Report(start, schedule.Outcome{Endpoint: bad, Verdict: inference.Closed})
			place(t, b, start, pool, prompt(1, 1, 100)) // the good one is full
			ask := prompt(2, 2, 100)
			alone(b, good, bad, &ask)
			round := b.Begin(start, pool)
			defer round.End()
			if bid := round.Bid(&ask); bid.Endpoint != bad || !bid.Open {
				t.Fatalf("bid %+v", bid)
			}
			if !round.Room() {
				t.Error("a request would go, and the round has no room")
			}
		})
	}
}

// One that has answered since it failed is as good as before, whenever its ejection
// would have ended.
func TestOneThatAnsweredSinceHasRoom(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{Concurrency: 1}), newPool(2)
	first := pool.Endpoints[0].ID
	for range 6 {
		b.Report(start, schedule.Outcome{Endpoint: first, Verdict: inference.Closed}) // 30 s
	}
	b.Report(start, schedule.Outcome{Endpoint: first, Verdict: inference.Finished, Took: time.Second})
	ask := prompt(9, 9, 100)
	ask.Exclude = []inference.EndpointID{first}
	place(t, b, start, pool, ask)
	now := start.Add(29 * time.Second) // it ramps up; by now it has nearly its full share
	round := b.Begin(now, pool)
	defer round.End()
	ask = prompt(0, 0, 100)
	bid := round.Bid(&ask)
	if !round.Room() {
		t.Errorf("no room, and the bid is %+v", bid)
	}
}

// When an ejection is over somebody has to look: those who wait may go there.
func TestRoundTellsWhenAnEjectionEnds(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{Concurrency: 1}), newPool(2)
	b.Report(start, schedule.Outcome{Endpoint: pool.Endpoints[0].ID, Verdict: inference.Closed})
	if n := len(take(b, start, pool, 100, 9)); n != 1 {
		t.Fatalf("%d went, want 1", n)
	}
	round := b.Begin(start, pool)
	if opens := round.Opens(); opens <= 0 || opens > time.Second {
		t.Errorf("opens after %v, want 1s", opens)
	}
	round.End()
	round = b.Begin(start.Add(time.Second), pool)
	defer round.End()
	ask := prompt(9, 9, 100)
	if bid := round.Bid(&ask); !bid.Open || bid.Endpoint == "" {
		t.Errorf("after the ejection %+v", bid)
	}
}

// One that is busy for others has something to do.
func TestAnEngineThatIsBusyForOthersIsNotIdle(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{Prefill: 250 * time.Millisecond}), newPool(2)
	r := place(t, b, start, pool, prompt(0, 0, 8000))
	holder := r.Endpoint.ID
	serve(r, start)
	now := start.Add(time.Second)
	busy := other(pool, holder)
	for i := range 3 {
		ask := prompt(100+i, 0, 8000)
		ask.Exclude = []inference.EndpointID{busy}
		place(t, b, now, pool, ask)
	}
	says(b, now, busy, 50, 50, 1)
	ask := prompt(0, 1, 8000)
	round := b.Begin(now, pool)
	defer round.End()
	bid := round.Bid(&ask)
	if bid.Endpoint != holder {
		t.Fatalf("bid %+v", bid)
	}
	if bid.Idle || bid.Open {
		t.Errorf("100 requests of others are at %s, and it is idle: %+v", busy, bid)
	}
}

// Who stands behind whom, and why, is told of all that could take the request.
func TestExplainTellsStandings(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{}), newPool(2)
	failed := pool.Endpoints[0].ID
	b.Report(start, schedule.Outcome{Endpoint: failed, Verdict: inference.Closed})
	for _, c := range []struct {
		at                  time.Duration
		chosen, reason      string
		out, standing, next string
	}{
		{0, string(other(pool, failed)), "the only one that can take it", "standing", "ejected", "good"},
		{2 * time.Second, string(failed), "its ejection is over, and one request is its trial", "standing", "good", "on_trial"},
	} {
		d := b.Explain(start.Add(c.at), pool, prompt(0, 0, 100))
		if string(d.Endpoint) != c.chosen || d.Reason != c.reason {
			t.Errorf("after %v %s: %s", c.at, d.Endpoint, d.Reason)
		}
		for _, x := range d.Candidates {
			if x.Chosen && (x.Out != "" || x.Standing != c.next) || !x.Chosen && (x.Out != c.out || x.Standing != c.standing) {
				t.Errorf("after %v %+v", c.at, x)
			}
		}
	}
}
