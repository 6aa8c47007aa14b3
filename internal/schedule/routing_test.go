// SPDX-License-Identifier: Apache-2.0

package schedule_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect/openai"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/prefix"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugin"
	"github.com/headgate/headgate/plugins/standard"
)

var start = time.Unix(1_000_000, 0)

func newPool(n int) *fleet.Pool {
	pool := &fleet.Pool{Name: "p"}
	for i := range n {
		u, err := url.Parse(fmt.Sprintf("http://10.0.%d.%d:8000", i/250, i%250+1))
		if err != nil {
			panic(err)
		}
		pool.Endpoints = append(pool.Endpoints, fleet.NewEndpoint(u, ""))
	}
	return pool
}

func newBook(t testing.TB) *schedule.Book {
	t.Helper()
	profile, err := standard.Profile(standard.Default)
	if err != nil {
		t.Fatal(err)
	}
	return bookWith(profile)
}

func bookWith(profile *schedule.Profile) *schedule.Book {
	return schedule.NewBook(schedule.Config{
		Profile: profile, TTFT: schedule.TTFT{Base: 2 * time.Second}, TPOT: 100 * time.Millisecond, ScrapeStale: 1500 * time.Millisecond,
	}, rand.New(rand.NewPCG(1, 2)))
}

// prompt is a request of that many tokens. Prompts of one group share all but
// the last quarter.
func prompt(group, id, tokens int) schedule.Ask {
	var h prefix.Hasher
	h.Start("m", "")
	shared, own := tokens*3/4, tokens-tokens*3/4
	h.Text([]byte(strings.Repeat(fmt.Sprintf("g%06d ", group), shared/2)))
	h.Text([]byte(strings.Repeat(fmt.Sprintf("i%06d ", id), own/2)))
	keys, bytes := h.Keys()
	return schedule.Ask{Model: "m", Prompt: inference.Tokens{N: tokens}, Keys: keys, PromptBytes: bytes, Stream: true, Explain: true}
}

func place(t *testing.T, b *schedule.Book, now time.Time, pool *fleet.Pool, ask schedule.Ask) *schedule.Reservation {
	t.Helper()
	r, err := b.Reserve(now, pool, ask)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// serve lets an engine answer: its first output after that long, and no tokens.
func serve(r *schedule.Reservation, now time.Time) {
	r.Accepted()
	r.FirstOutput(now)
	r.Finished(now, inference.Usage{Completion: 20, Cached: -1})
	r.Release()
}

// SCH-1: without a holder, equal engines share.
func TestMissesSpreadOverIdleEngines(t *testing.T) {
	b, pool := newBook(t), newPool(4)
	got := map[inference.EndpointID]int{}
	now := start
	for i := range 200 {
		now = now.Add(time.Second)
		r := place(t, b, now, pool, prompt(1000+i, i, 2000))
		got[r.Endpoint.ID]++
		serve(r, now.Add(230*time.Millisecond))
	}
	for id, n := range got {
		if n < 30 || n > 70 {
			t.Errorf("%s got %d of 200, want 50±20", id, n)
		}
	}
}

// Without a token-time target running streams cost next to nothing, so what is
// left between idle engines is how long each took last time. A burst of equal
// prompts must not follow that.
func TestBurstOfEqualPromptsSpreadsEvenlyWithoutTargets(t *testing.T) {
	for seed := range uint64(20) {
		profile, err := standard.Profile(standard.Default)
		if err != nil {
			t.Fatal(err)
		}
		rnd := rand.New(rand.NewPCG(seed, 2))
		b, pool := schedule.NewBook(schedule.Config{Profile: profile}, rnd), newPool(3)
		now := start
		jitter := func() time.Duration { return time.Duration(30+rnd.IntN(10)) * time.Millisecond }
		for i := range 400 { // short answers, and engines that differ by chance
			now = now.Add(time.Second)
			serve(place(t, b, now, pool, prompt(i, i, 20)), now.Add(jitter()))
		}
		got := map[inference.EndpointID]int{}
		type waits struct {
			r  *schedule.Reservation
			by time.Time
		}
		var waiting []waits
		for i := range 12 {
			now = now.Add(60 * time.Millisecond)
			for len(waiting) > 0 && !waiting[0].by.After(now) {
				waiting[0].r.Accepted()
				waiting[0].r.FirstOutput(waiting[0].by) // its stream goes on
				waiting = waiting[1:]
			}
			r := place(t, b, now, pool, prompt(1000+i, i, 20))
			got[r.Endpoint.ID]++
			waiting = append(waiting, waits{r, now.Add(jitter())})
		}
		for _, e := range pool.Endpoints {
			if n := got[e.ID]; n < 3 || n > 5 {
				t.Errorf("seed %d: the burst of 12 went to %v", seed, got)
				break
			}
		}
	}
}

func TestSecondTurnGoesWhereTheFirstWas(t *testing.T) {
	b, pool := newBook(t), newPool(8)
	now := start
	for g := range 30 {
		now = now.Add(time.Second)
		first := place(t, b, now, pool, prompt(g, 0, 4000))
		serve(first, now.Add(400*time.Millisecond))
		now = now.Add(time.Second)
		second := place(t, b, now, pool, prompt(g, 1, 4000))
		if second.Endpoint.ID != first.Endpoint.ID {
			t.Errorf("group %d went to %s and then to %s", g, first.Endpoint.ID, second.Endpoint.ID)
		}
		serve(second, now.Add(100*time.Millisecond))
	}
}

// SCH-3: one hot engine costs the others' groups nothing.
func TestOneHotEngineLeavesOtherGroupsAlone(t *testing.T) {
	b, pool := newBook(t), newPool(4)
	now := start
	home := map[int]inference.EndpointID{}
	for g := range 4 {
		// Each group's engine is the one that the others do not have.
		var exclude []inference.EndpointID
		for _, id := range home {
			exclude = append(exclude, id)
		}
		ask := prompt(g, 0, 8000)
		ask.Exclude = exclude
		r := place(t, b, now, pool, ask)
		home[g] = r.Endpoint.ID
		serve(r, now.Add(800*time.Millisecond))
	}
	now = now.Add(time.Second)
	for i := range 12 { // saturate group 0's engine: work that never begins
		ask := prompt(50+i, 0, 16_000)
		for g, id := range home {
			if g != 0 {
				ask.Exclude = append(ask.Exclude, id)
			}
		}
		place(t, b, now, pool, ask).Accepted()
	}
	stayed := map[int]int{}
	for i := range 40 {
		now = now.Add(500 * time.Millisecond)
		g := i % 4
		r := place(t, b, now, pool, prompt(g, i+1, 8000))
		if r.Endpoint.ID == home[g] {
			stayed[g]++
		}
		serve(r, now.Add(200*time.Millisecond))
	}
	for g := 1; g < 4; g++ {
		if stayed[g] < 9 {
			t.Errorf("group %d stayed on its engine %d times of 10", g, stayed[g])
		}
	}
	if stayed[0] > 0 {
		t.Errorf("group 0 went to its hot engine %d times of 10", stayed[0])
	}
}

// A popular prefix spills over before it queues.
func TestHotPrefixSpillsOver(t *testing.T) {
	b, pool := newBook(t), newPool(4)
	first := place(t, b, start, pool, prompt(1, 0, 8000))
	serve(first, start.Add(800*time.Millisecond))
	now := start.Add(time.Second)
	got := map[inference.EndpointID]int{}
	for i := range 40 { // a burst, before anything was computed
		got[place(t, b, now, pool, prompt(1, i+1, 8000)).Endpoint.ID]++
	}
	if len(got) != 4 {
		t.Fatalf("the burst went to %v", got)
	}
	for id, n := range got {
		if n > 20 {
			t.Errorf("%s got %d of 40", id, n)
		}
	}
}

// A popular prefix comes twice as often as the engine that has it can compute what
// differs. Nobody waits there for longer than it takes to compute all of it
// elsewhere. While one engine can do it all, others get none of it.
func TestPopularPrefixSpillsBeforeItQueues(t *testing.T) {
	if worst, engines := popular(t, 100*time.Millisecond); worst > prefixWhole || engines < 2 {
		t.Errorf("on %d engines a request waited for %s, longer than computing it all takes (%s)", engines, worst, prefixWhole)
	}
	// The second may go elsewhere to spare the first, whose answer just begins.
	if _, engines := popular(t, 500*time.Millisecond); engines > 2 {
		t.Errorf("%d engines have the prefix, and one could do it all", engines)
	}
}

// An engine computes a prompt of popular in this time, whole or but for the prefix.
const prefixWhole, prefixRest = 800 * time.Millisecond, 200 * time.Millisecond

// popular sends prompts that share their prefix, one after each interval, to six
// engines. It returns the longest wait and how many engines got any.
func popular(t *testing.T, every time.Duration) (worst time.Duration, engines int) {
	b, pool := newBook(t), newPool(6)
	type run struct {
		r  *schedule.Reservation
		at time.Time
	}
	var running []run
	busy, warm := map[inference.EndpointID]time.Time{}, map[inference.EndpointID]bool{}
	now := start
	for i := range 400 {
		now = now.Add(every)
		running = slices.DeleteFunc(running, func(x run) bool {
			if x.at.After(now) {
				return false
			}
			serve(x.r, x.at)
			return true
		})
		r := place(t, b, now, pool, prompt(1, i, 8000))
		r.Accepted()
		id := r.Endpoint.ID
		begin := now
		if busy[id].After(now) {
			begin = busy[id]
		}
		took := prefixWhole
		if warm[id] {
			took = prefixRest
		}
		warm[id], busy[id] = true, begin.Add(took)
		worst = max(worst, begin.Sub(now))
		running = append(running, run{r, busy[id]})
	}
	return worst, len(warm)
}

// Gateways that have just begun know nothing of each other, and nobody has told
// them anything of the engines. Their first requests must not meet.
func TestGatewaysThatBeginTogetherDoNotMeet(t *testing.T) {
	pool, got := newPool(8), map[inference.EndpointID]int{}
	for gateway := range uint64(40) {
		b := schedule.NewBook(schedule.Config{Profile: named(t, standard.Default)}, rand.New(rand.NewPCG(gateway, 1)))
		for i := range 2 {
			got[place(t, b, start, pool, prompt(1, i, 2000)).Endpoint.ID]++
		}
	}
	for _, e := range pool.Endpoints {
		if n := got[e.ID]; n < 2 || n > 22 {
			t.Errorf("80 requests of 40 gateways went to %v", got)
			break
		}
	}
}

// SCH-5: an endpoint that left or restarted is cold, and so is one at its address.
func TestNewEngineAtAnOldAddressIsCold(t *testing.T) {
	for name, gone := range map[string]func(*schedule.Book, inference.EndpointID){
		"forgotten": func(b *schedule.Book, id inference.EndpointID) { b.Forget(id) },
		"restarted": func(b *schedule.Book, id inference.EndpointID) { b.Restarted(id) },
		"gone": func(b *schedule.Book, id inference.EndpointID) {
			b.SetHealth(id, inference.Gone)
			b.SetHealth(id, inference.Healthy)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, pool := newBook(t), newPool(2)
			now := start
			warm := pool.Endpoints[0].ID
			for g := range 100 {
				ask := prompt(g, 0, 4000)
				ask.Exclude = []inference.EndpointID{pool.Endpoints[1].ID}
				now = now.Add(time.Second)
				serve(place(t, b, now, pool, ask), now.Add(400*time.Millisecond))
			}
			gone(b, warm)
			old := 0
			for g := range 100 {
				now = now.Add(time.Second)
				for _, e := range b.Explain(now, pool, prompt(g, 1, 4000)).Candidates {
					old += e.Cached
				}
			}
			if old > 0 {
				t.Errorf("%d tokens are still thought to be cached", old)
			}
			for i := range 2000 { // memory comes back while others learn
				now = now.Add(time.Second)
				serve(place(t, b, now, pool, prompt(1_000_000, 0, 600)), now.Add(time.Millisecond))
				_ = i
			}
			if n := b.Blocks(); n > 20 {
				t.Errorf("%d blocks are left in the index", n)
			}
		})
	}
}

// The gap between what was expected in a cache and what its engine reports shows
// for each endpoint, and ends with its process.
func TestPredictionsAreComparedWithWhatEnginesReport(t *testing.T) {
	b, pool := newBook(t), newPool(1)
	now, id := start, pool.Endpoints[0].ID
	for i, cached := range []int{0, 3000, 1000, -1} {
		now = now.Add(time.Second)
		r := place(t, b, now, pool, prompt(1, i, 4000))
		r.Accepted()
		r.FirstOutput(now.Add(100 * time.Millisecond))
		r.Finished(now.Add(time.Second), inference.Usage{Prompt: 4000, Completion: 1, Cached: cached})
		r.Release()
	}
	h := b.Status(now, pool)[0].Hits
	// The second and third were expected to find three quarters, in whole blocks.
	if h.Requests != 3 || h.Prompt != 12_000 || h.Actual != 4000 || h.Predicted < 5700 || h.Predicted > 6000 || h.Missed != h.Predicted/2-1000 {
		t.Errorf("%+v", h)
	}
	b.SetIncarnation(id, "one")
	b.SetIncarnation(id, "one")
	if got := b.Status(now, pool)[0].Hits; got != h {
		t.Errorf("the first word of a guard ended the count: %+v", got)
	}
	b.SetIncarnation(id, "two")
	if got := b.Status(now, pool)[0].Hits; got != (schedule.Hits{}) || cachedAt(b, pool, id, prompt(1, 9, 4000)) != 0 {
		t.Errorf("another process has the old one's cache: %+v", got)
	}
}

// An engine that reports more cached than there was to cache is believed as far as that.
func TestMoreCachedThanThePromptIsThePrompt(t *testing.T) {
	b, pool := newBook(t), newPool(1)
	r := place(t, b, start, pool, prompt(1, 1, 1000))
	r.Finished(start, inference.Usage{Prompt: 1000, Completion: 1, Cached: 5000})
	if h := b.Status(start, pool)[0].Hits; h.Prompt != 1000 || h.Actual != 1000 {
		t.Errorf("%+v", h)
	}
}

// What is known of a cache by its engine's own word takes the place of the index,
// in large pools too.
func TestWhatIsHeldIsBelieved(t *testing.T) {
	for _, n := range []int{4, 200} {
		b, pool := newBook(t), newPool(n)
		first := place(t, b, start, pool, prompt(1, 0, 8000))
		serve(first, start.Add(800*time.Millisecond))
		now, holder := start.Add(time.Minute), pool.Endpoints[n-1].ID
		if first.Endpoint.ID == holder {
			holder = pool.Endpoints[0].ID
		}
		for range 3 { // not among the idlest
			r := place(t, b, now, &fleet.Pool{Name: "p", Endpoints: []inference.Endpoint{{ID: holder}}}, schedule.Ask{})
			r.Accepted()
		}
		ask := prompt(1, 1, 8000)
		if d := b.Explain(now, pool, ask); d.Endpoint != first.Endpoint.ID {
			t.Errorf("%d endpoints: by the index it goes to %s, want %s", n, d.Endpoint, first.Endpoint.ID)
		}
		ask.Held = []schedule.Held{{Endpoint: holder, Tokens: 7000}, {Endpoint: first.Endpoint.ID, Tokens: 0}}
		d := b.Explain(now, pool, ask)
		if d.Endpoint != holder {
			t.Errorf("%d endpoints: it goes to %s because %q, want %s, which holds it", n, d.Endpoint, d.Reason, holder)
		}
		for _, c := range d.Candidates {
			if c.Endpoint == first.Endpoint.ID && c.Cached != 0 || c.Endpoint == holder && c.Cached != 7000 {
				t.Errorf("%d endpoints: %+v", n, c)
			}
		}
	}
}

// What an engine did not take is not learned.
func TestRefusedPromptsAreNotLearned(t *testing.T) {
	b, pool := newBook(t), newPool(2)
	r := place(t, b, start, pool, prompt(1, 0, 4000))
	// While it is under way it counts, so that its like go with it.
	if cached := cachedAt(b, pool, r.Endpoint.ID, prompt(1, 1, 4000)); cached < 2500 {
		t.Errorf("%d tokens of a prompt under way count as cached", cached)
	}
	r.Release()
	if cached := cachedAt(b, pool, r.Endpoint.ID, prompt(1, 1, 4000)); cached != 0 {
		t.Errorf("%d tokens of a prompt that was refused count as cached", cached)
	}
}

func cachedAt(b *schedule.Book, pool *fleet.Pool, id inference.EndpointID, ask schedule.Ask) int {
	for _, e := range b.Explain(start, pool, ask).Candidates {
		if e.Endpoint == id {
			return e.Cached
		}
	}
	return -1
}

// A dead-but-fast engine is always idle.
func TestQuickErrorsDoNotAttractPrompts(t *testing.T) {
	b, pool := newBook(t), newPool(3)
	bad := pool.Endpoints[0].ID
	now, toBad := start, 0
	type run struct {
		r  *schedule.Reservation
		by time.Time
	}
	var running []run
	for i := range 300 {
		now = now.Add(100 * time.Millisecond)
		for len(running) > 0 && !running[0].by.After(now) {
			serve(running[0].r, running[0].by)
			b.Report(now, schedule.Outcome{Endpoint: running[0].r.Endpoint.ID, Verdict: inference.Finished, Took: time.Second})
			running = running[1:]
		}
		r := place(t, b, now, pool, prompt(i, i, 2000))
		if r.Endpoint.ID == bad {
			toBad++
			r.Release()
			b.Report(now, schedule.Outcome{Endpoint: bad, Verdict: inference.Refused, Took: time.Millisecond})
			continue
		}
		running = append(running, run{r, now.Add(time.Second)})
	}
	if toBad > 110 {
		t.Errorf("the failing engine got %d of 300, more than its share", toBad)
	}
}

// An engine that froze takes prompts and never begins them.
func TestFrozenEngineIsLeftAlone(t *testing.T) {
	b, pool := newBook(t), newPool(3)
	now, frozen := start, 0
	for i := range 100 {
		now = now.Add(300 * time.Millisecond)
		r := place(t, b, now, pool, prompt(i, i, 2000))
		r.Accepted()
		if r.Endpoint.ID == pool.Endpoints[0].ID {
			frozen++
			continue
		}
		serve(r, now.Add(230*time.Millisecond))
	}
	if frozen > 5 {
		t.Errorf("the frozen engine got %d of 100", frozen)
	}
}

// One that joins cold while the others have a little more to do than they can is
// neither flooded nor starved.
func TestColdEngineGetsItsShare(t *testing.T) {
	b, pool := newBook(t), newPool(4)
	three := &fleet.Pool{Name: "p", Endpoints: pool.Endpoints[:3]}
	now := start
	type run struct {
		r  *schedule.Reservation
		by time.Time
	}
	var running []run
	busy := map[inference.EndpointID]time.Time{}
	warm := map[string]bool{}
	step := func(pool *fleet.Pool, i int) inference.EndpointID {
		now = now.Add(28 * time.Millisecond)
		keep := running[:0]
		for _, x := range running {
			if x.by.After(now) {
				keep = append(keep, x)
				continue
			}
			serve(x.r, x.by)
		}
		running = keep
		r := place(t, b, now, pool, prompt(i%12, i, 4000))
		r.Accepted()
		// An engine computes one prompt after another, a cached one in a quarter.
		if busy[r.Endpoint.ID].Before(now) {
			busy[r.Endpoint.ID] = now
		}
		took, key := 400*time.Millisecond, fmt.Sprint(r.Endpoint.ID, i%12)
		if warm[key] {
			took = 100 * time.Millisecond
		}
		warm[key] = true
		busy[r.Endpoint.ID] = busy[r.Endpoint.ID].Add(took)
		running = append(running, run{r, busy[r.Endpoint.ID]})
		return r.Endpoint.ID
	}
	for i := range 600 {
		step(three, i)
	}
	got := map[inference.EndpointID]int{}
	for i := range 400 {
		got[step(pool, i)]++
	}
	if n := got[pool.Endpoints[3].ID]; n < 40 || n > 150 {
		t.Errorf("the new engine got %d of 400: %v", n, got)
	}
}

// A prefill goes where it pushes fewest streams over their target, even if that
// engine has as much to do.
func TestPrefillSparesStreamsAtTheirLimit(t *testing.T) {
	t.Run("of the pool", func(t *testing.T) { sparesStreams(t, newBook(t), 0) })
	t.Run("of their requests", func(t *testing.T) {
		profile, err := standard.Profile(standard.Default)
		if err != nil {
			t.Fatal(err)
		}
		sparesStreams(t, schedule.NewBook(schedule.Config{Profile: profile}, rand.New(rand.NewPCG(1, 2))), 100*time.Millisecond)
	})
}

func sparesStreams(t *testing.T, b *schedule.Book, tpot time.Duration) {
	pool := newPool(2)
	now := start
	tight, easy := pool.Endpoints[0].ID, pool.Endpoints[1].ID
	var streams []*schedule.Reservation
	for i := range 20 {
		ask := prompt(100+i, 0, 500)
		ask.TPOT = tpot
		ask.Exclude = []inference.EndpointID{[]inference.EndpointID{easy, tight}[i%2]}
		r := place(t, b, now, pool, ask)
		r.Accepted()
		r.FirstOutput(now)
		streams = append(streams, r)
	}
	now = now.Add(4 * time.Second)
	for _, r := range streams {
		n := 42 // a hair ahead of 100 ms a token
		if r.Endpoint.ID == easy {
			n = 200
		}
		r.Tokens(n)
	}
	for i := range 20 {
		r := place(t, b, now, pool, prompt(200+i, i, 8000))
		if r.Endpoint.ID != easy {
			t.Fatalf("prompt %d went to streams that are at their limit: %s", i, r.Why())
		}
		r.Release()
	}
}

func TestLoadedAdapterIsPreferred(t *testing.T) {
	b, pool := newBook(t), newPool(4)
	now := start
	ask := func(i int) schedule.Ask {
		a := prompt(i, i, 1000)
		a.Adapter = "x"
		return a
	}
	first := place(t, b, now, pool, ask(0))
	serve(first, now.Add(100*time.Millisecond))
	for i := range 20 { // SCH-9: its list of active adapters is empty, its memory is not
		now = now.Add(2 * time.Second)
		r := place(t, b, now, pool, ask(i+1))
		if r.Endpoint.ID != first.Endpoint.ID {
			t.Fatalf("the adapter was loaded a second time: %s", r.Why())
		}
		serve(r, now.Add(100*time.Millisecond))
	}
}

// Where an adapter is loaded its requests go, unless waiting there costs more than
// loading it elsewhere.
func TestBusyHolderOfAnAdapterIsPassedBy(t *testing.T) {
	b, pool := newBook(t), newPool(3)
	ask := prompt(0, 0, 1000)
	ask.Adapter = "x"
	holder := place(t, b, start, pool, ask)
	serve(holder, start.Add(100*time.Millisecond))
	now := start.Add(2 * time.Second)
	alone := &fleet.Pool{Name: "p", Endpoints: []inference.Endpoint{holder.Endpoint}}
	for i := range 3 { // one costs less than the second that a load is taken to cost, two cost more
		if d := b.Explain(now, pool, ask); (d.Endpoint == holder.Endpoint.ID) != (i < 2) {
			t.Errorf("with %d prompts before it, it goes to %s, and the adapter is at %s", i, d.Endpoint, holder.Endpoint.ID)
		}
		place(t, b, now, alone, prompt(10+i, 0, 6000)).Accepted()
	}
}

func TestExplanationNamesEveryEndpoint(t *testing.T) {
	b, pool := newBook(t), newPool(4)
	ask := prompt(1, 1, 2000)
	ask.Exclude = []inference.EndpointID{pool.Endpoints[0].ID}
	b.SetHealth(pool.Endpoints[1].ID, inference.Gone)
	chosen := 0
	decision := b.Explain(start, pool, ask)
	for i, e := range decision.Candidates {
		switch {
		case i == 0 && e.Out != "excluded", i == 1 && e.Out != "gone", i > 1 && e.Out != "":
			t.Errorf("%s is out because of %q", e.Endpoint, e.Out)
		case i > 1 && (len(e.Scores) != 1 || e.Scores[0].Plugin != "cost" || e.Total >= 0 || e.Scores[0].Terms == ""):
			t.Errorf("%s: %+v", e.Endpoint, e)
		}
		if e.Chosen {
			chosen++
		}
	}
	if chosen != 1 || decision.Endpoint == "" || decision.Reason != "least loaded of 2 near the best, one of 2" {
		t.Errorf("%d endpoints were chosen: %s, %q", chosen, decision.Endpoint, decision.Reason)
	}
}

// Of a large pool those are scored that are least loaded among who may be chosen, and
// those that hold the longest part of the prompt, whatever their load.
func TestLargePoolScoresTheIdlestAndTheLongestHolders(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(49, 120).Draw(rt, "endpoints")
		b, pool, ask := newBook(t), newPool(n), prompt(1, 1, 4000)
		spread := rapid.IntRange(0, 12).Draw(rt, "spread of loads")
		out, holds := map[int]bool{}, make([]int, n)
		for i := range n {
			one := &fleet.Pool{Name: "p", Endpoints: pool.Endpoints[i : i+1]}
			if rapid.IntRange(0, 5).Draw(rt, "holds") == 0 {
				part := ask
				part.Keys = ask.Keys[:rapid.IntRange(1, len(ask.Keys)).Draw(rt, "blocks")]
				serve(place(t, b, start, one, part), start)
				holds[i] = len(part.Keys)
			}
			for range rapid.IntRange(0, spread).Draw(rt, "load") {
				place(t, b, start, one, schedule.Ask{Prompt: inference.Tokens{N: 10}, Stream: true})
			}
			if rapid.IntRange(0, 9).Draw(rt, "out") == 0 {
				ask.Exclude, out[i] = append(ask.Exclude, pool.Endpoints[i].ID), true
			}
		}
		all := b.Explain(start, pool, ask).Candidates
		var loads, depths []int // of those that may be chosen
		for i, e := range all {
			if !out[i] {
				loads, depths = append(loads, e.Load), append(depths, holds[i])
			}
		}
		slices.Sort(loads)
		slices.Sort(depths)
		everybody, scored := len(loads) <= 48, 0
		busiest, longest := loads[min(32, len(loads))-1], depths[max(len(depths)-16, 0)]
		for i, e := range all {
			is := len(e.Scores) > 0
			if is {
				scored++
			}
			must := everybody || e.Load < busiest || holds[i] > longest
			may := everybody || e.Load <= busiest || holds[i] > 0 && holds[i] >= longest
			if is && (out[i] || !may) || !is && !out[i] && must {
				rt.Errorf("endpoint %d: scored %v, excluded %v, load %d (the 32nd has %d), holds %d (the 16th longest %d)", i, is, out[i], e.Load, busiest, holds[i], longest)
			}
		}
		if !everybody && (scored < 32 || scored > 48) {
			rt.Errorf("%d of %d were scored", scored, len(loads))
		}
	})
}

// TestWhyIsTheExplanation: what a header says of a choice is what the explanation
// says of its winner.
func TestWhyIsTheExplanation(t *testing.T) {
	for name, profile := range map[string]*schedule.Profile{"cost": named(t, "cost"), "weighted": named(t, "weighted"), "none": nil} {
		b, pool := bookWith(profile), newPool(3)
		serve(place(t, b, start, pool, prompt(1, 0, 4000)), start.Add(400*time.Millisecond))
		place(t, b, start, pool, prompt(2, 0, 4000)).Accepted()
		now, ask := start.Add(time.Second), prompt(1, 1, 4000)
		var want schedule.Decision
		compared := false
		for range 100 { // which of several equals wins is drawn
			want = b.Explain(now, pool, ask)
			r := place(t, b, now, pool, ask)
			r.Release()
			if want.Endpoint != r.Endpoint.ID {
				continue
			}
			for _, e := range want.Candidates {
				if e.Chosen && !strings.HasPrefix(r.Why(), e.String()) || !strings.Contains(r.Why(), strconv.Quote(want.Reason)) {
					t.Errorf("%s: the header says %s, the explanation %s because %q", name, r.Why(), e.String(), want.Reason)
				}
			}
			compared = true
			break
		}
		if !compared {
			t.Errorf("%s: no choice was as explained in 100 tries: %+v", name, want)
		}
	}
}

func TestExplanationOfARefusal(t *testing.T) {
	b, pool := newBook(t), newPool(2)
	b.SetHealth(pool.Endpoints[0].ID, inference.Gone)
	b.SetHealth(pool.Endpoints[1].ID, inference.Gone)
	d := b.Explain(start, pool, prompt(1, 1, 2000))
	if d.Err == nil || d.Err.Code != inference.NoEndpoints || d.Endpoint != "" || len(d.Candidates) != 2 || d.Candidates[1].Out != "gone" {
		t.Errorf("%+v", d)
	}
}

// A pool's filters may leave nobody; then its fallback decides, and only the last
// one's filters are disregarded.
func TestFallbacksDecideInOrder(t *testing.T) {
	known := maps.Clone(standard.Plugins)
	for n := range 4 {
		known[fmt.Sprintf("only%d", n)] = func(plugin.Options) (any, error) { return only(n), nil }
	}
	profile := func(filter string) *schedule.Profile {
		p, err := schedule.NewProfile(known, []schedule.Use{{Plugin: filter}, {Plugin: "leastload"}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	for _, c := range []struct {
		filters []string
		want    int // endpoints that are used
		by      int // profile that decides
	}{
		{[]string{"only1", "only0"}, 1, 0},
		{[]string{"only0", "only1"}, 1, 1},
		{[]string{"only0", "only0", "only1"}, 1, 2},
		{[]string{"only0", "only0"}, 3, 1},
	} {
		var chain *schedule.Profile
		for _, name := range slices.Backward(c.filters) {
			p := profile(name)
			if chain != nil {
				p = p.Else(chain)
			}
			chain = p
		}
		b, pool, got := bookWith(chain), newPool(3), map[inference.EndpointID]int{}
		for i := range 30 {
			got[place(t, b, start, pool, prompt(i, i, 500)).Endpoint.ID]++
		}
		if d := b.Explain(start, pool, prompt(1, 1, 500)); len(got) != c.want || d.Profile != c.by {
			t.Errorf("%v: %v were used, by profile %d", c.filters, got, d.Profile)
		}
	}
}

func named(t *testing.T, name string) *schedule.Profile {
	t.Helper()
	p, err := standard.Profile(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestUnknownPromptsGoByLoad(t *testing.T) {
	b, pool := newBook(t), newPool(3)
	for range 30 {
		place(t, b, start, pool, schedule.Ask{})
	}
	for _, s := range b.Status(start, pool) {
		if s.InFlight != 10 {
			t.Errorf("%s has %d in flight, want 10", s.Endpoint, s.InFlight)
		}
	}
}

func TestFiltersThatLeaveNobodyAreDisregarded(t *testing.T) {
	for _, keep := range []int{0, 1} {
		known := map[string]plugin.Factory{"no": func(plugin.Options) (any, error) { return only(keep), nil }}
		maps.Copy(known, standard.Plugins)
		profile, err := schedule.NewProfile(known, []schedule.Use{{Plugin: "no"}, {Plugin: "leastload"}})
		if err != nil {
			t.Fatal(err)
		}
		b, pool := schedule.NewBook(schedule.Config{Profile: profile}, rand.New(rand.NewPCG(1, 2))), newPool(3)
		got := map[inference.EndpointID]int{}
		for i := range 30 {
			got[place(t, b, start, pool, prompt(i, i, 500)).Endpoint.ID]++
		}
		if want := []int{3, 1}[keep]; len(got) != want {
			t.Errorf("the filter keeps %d and %v were used", keep, got)
		}
		for _, e := range b.Explain(start, pool, prompt(1, 1, 500)).Candidates {
			if keep == 1 && !e.Chosen && e.Out != "no: not the first" {
				t.Errorf("%s is out because of %q", e.Endpoint, e.Out)
			}
		}
	}
}

// only keeps the first endpoint of newPool, or nobody.
type only int

func (n only) Filter(_ *plugin.Request, c *plugin.Candidate) string {
	if n == 1 && strings.HasSuffix(string(c.Endpoint.ID), "10.0.0.1:8000") {
		return ""
	}
	return "not the first"
}

// TestTrafficReturnsToZero: whatever order things happen in, nothing is left
// behind (CNT-1, CNT-3, CNT-5).
func TestTrafficReturnsToZero(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		b, pool := newBook(t), newPool(3)
		now := start
		var held []*schedule.Reservation
		one := func() *schedule.Reservation { return held[rapid.IntRange(0, len(held)-1).Draw(rt, "which")] }
		for range rapid.IntRange(1, 80).Draw(rt, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 2000).Draw(rt, "ms")) * time.Millisecond)
			what := rapid.IntRange(0, 9).Draw(rt, "what")
			if what > 0 && len(held) == 0 {
				continue
			}
			switch what {
			case 0:
				ask := prompt(rapid.IntRange(0, 3).Draw(rt, "group"), rapid.IntRange(0, 3).Draw(rt, "id"), rapid.IntRange(0, 900).Draw(rt, "tokens"))
				ask.Stream = rapid.Bool().Draw(rt, "stream")
				ask.TPOT = time.Duration(rapid.IntRange(0, 1).Draw(rt, "own target")) * time.Second
				if r, err := b.Reserve(now, pool, ask); err == nil {
					held = append(held, r)
				}
			case 1:
				one().Accepted()
			case 2:
				one().FirstOutput(now)
			case 3:
				one().Tokens(rapid.IntRange(0, 5000).Draw(rt, "n"))
			case 4:
				one().Finished(now, inference.Usage{Prompt: 5, Completion: 7, Cached: rapid.IntRange(-1, 5).Draw(rt, "cached")})
			case 5:
				one().Release()
			case 6:
				b.Forget(rapid.SampledFrom(pool.Endpoints).Draw(rt, "gone").ID)
			case 7:
				b.Restarted(rapid.SampledFrom(pool.Endpoints).Draw(rt, "new").ID)
			case 8:
				b.Asking(rapid.SampledFrom(pool.Endpoints).Draw(rt, "asked").ID)
			case 9:
				id := rapid.SampledFrom(pool.Endpoints).Draw(rt, "scraped").ID
				b.SetScraped(id, schedule.Scraped{At: now, Queued: anyValue(rt), Running: anyValue(rt), Done: anyValue(rt)})
				if r := b.Reported(now, id); r.Others < 0 || r.Others > 60 {
					rt.Fatalf("%s: others have %v: %+v", id, r.Others, r)
				}
			}
		}
		for _, r := range held {
			r.Release()
			r.Release()
		}
		for _, s := range b.Status(now, pool) {
			if pending, running, targets, work, context := b.Left(s.Endpoint); s.InFlight != 0 || pending+running+targets != 0 || work != 0 || context != 0 {
				rt.Fatalf("%s: %d in flight, %d pending (%v), %d running (%v)", s.Endpoint, s.InFlight, pending, work, running, context)
			}
		}
	})
}

func anyValue(rt *rapid.T) plugin.Value {
	if !rapid.Bool().Draw(rt, "known") {
		return plugin.Value{}
	}
	return plugin.Value{V: float64(rapid.IntRange(0, 30).Draw(rt, "value")), Known: true}
}

// crowd fills a book: 500k blocks in its index, and streams and prefills under
// way everywhere. A tenth of the engines hold a part of the prompt, one most.
func crowd(b *testing.B, book *schedule.Book, endpoints, tokens int) (*schedule.Book, *fleet.Pool, []byte, time.Time) {
	pool := newPool(endpoints)
	now := start
	reserve := func(at int, ask schedule.Ask) *schedule.Reservation {
		one := &fleet.Pool{Name: "p", Endpoints: pool.Endpoints[at : at+1]}
		r, err := book.Reserve(now, one, ask)
		if err != nil {
			b.Fatal(err)
		}
		return r
	}
	text := strings.Repeat("All work and no play makes Jack a dull boy, and that is all. ", 4*tokens/61+1)[:4*tokens]
	body := []byte(`{"model":"m","messages":[{"role":"system","content":` + strconv.Quote(text) + `},{"role":"user","content":"hello"}],"stream":true}`)
	ask := askOf(b, body)
	for i := range endpoints {
		per := 500_000 / endpoints
		book.SetCache(pool.Endpoints[i].ID, (per+len(ask.Keys))*prefix.BlockBytes/4)
		var h prefix.Hasher
		for have := 0; have < per; have += 1000 {
			h.Start("m", "")
			h.Text([]byte(strings.Repeat(fmt.Sprintf("%08d-%07d", i, have), prefix.BlockBytes/16*min(1000, per-have))))
			keys, total := h.Keys()
			r := reserve(i, schedule.Ask{Prompt: inference.Tokens{N: total / 4}, Keys: keys, PromptBytes: total, Stream: true})
			r.Accepted()
			r.FirstOutput(now)
			r.Release()
		}
		if i%10 == 0 {
			part := ask
			part.Keys = ask.Keys[:len(ask.Keys)*(i+1)/endpoints]
			r := reserve(i, part)
			r.Accepted()
			r.FirstOutput(now)
			r.Release()
		}
		for k := range 10 + i%5 {
			r := reserve(i, schedule.Ask{Prompt: inference.Tokens{N: 800}, Stream: true})
			if k < 9 {
				r.Accepted()
				r.FirstOutput(now)
				r.Tokens(10 + k*5)
			}
		}
	}
	return book, pool, body, now.Add(100 * time.Millisecond)
}

func askOf(b testing.TB, body []byte) schedule.Ask {
	r, err := openai.Chat.Inspect("application/json", body)
	if err != nil {
		b.Fatal(err)
	}
	var h prefix.Hasher
	keys, total := h.Request(body, r, r.Model)
	return schedule.Ask{Model: "m", Prompt: r.PromptTokens, Keys: keys, PromptBytes: total, Stream: true}
}

// BenchmarkDecision is one decision from the bytes of the prompt to the endpoint:
// hashing, lookup, and the cost of each candidate. The clock goes on by a tenth
// of a millisecond per decision, so tables of stalls are made anew meanwhile.
func BenchmarkDecision(b *testing.B) {
	for _, c := range []struct{ endpoints, k int }{{10, 1}, {100, 1}, {1000, 1}, {10, 32}, {100, 32}, {1000, 32}, {10, 128}, {100, 128}, {1000, 128}} {
		b.Run(fmt.Sprintf("%dx%dk", c.endpoints, c.k), func(b *testing.B) { decide(b, newBook(b), c.endpoints, c.k, nil) })
	}
}

// BenchmarkSharedDecision is the same where other gateways have requests on every
// endpoint, as metrics tell, and each has a guard.
func BenchmarkSharedDecision(b *testing.B) {
	for _, c := range []struct{ endpoints, k int }{{100, 1}, {1000, 1}, {1000, 128}} {
		b.Run(fmt.Sprintf("%dx%dk", c.endpoints, c.k), func(b *testing.B) {
			decide(b, newBook(b), c.endpoints, c.k, func(book *schedule.Book, pool *fleet.Pool, now time.Time) {
				later := now.Add(time.Hour) // so that neither ends during the benchmark
				for i := range pool.Endpoints {
					id := pool.Endpoints[i].ID
					says(book, later, id, 1, float64(14+i%7), 1)
					book.SetGuarded(id, true)
					book.SetLeasable(id, later)
				}
			})
		})
	}
}

// BenchmarkFullScan is the same with every endpoint scored in full, as it is
// where a profile has filters.
func BenchmarkFullScan(b *testing.B) {
	for _, c := range []struct{ endpoints, k int }{{100, 1}, {1000, 1}, {1000, 128}} {
		b.Run(fmt.Sprintf("%dx%dk", c.endpoints, c.k), func(b *testing.B) {
			known := maps.Clone(standard.Plugins)
			known["all"] = func(plugin.Options) (any, error) { return everybody{}, nil }
			profile, err := schedule.NewProfile(known, append([]schedule.Use{{Plugin: "all"}}, standard.Profiles[standard.Default]...))
			if err != nil {
				b.Fatal(err)
			}
			decide(b, bookWith(profile), c.endpoints, c.k, nil)
		})
	}
}

type everybody struct{}

func (everybody) Filter(*plugin.Request, *plugin.Candidate) string { return "" }

func decide(b *testing.B, book *schedule.Book, endpoints, k int, more func(*schedule.Book, *fleet.Pool, time.Time)) {
	book, pool, body, now := crowd(b, book, endpoints, k<<10)
	if more != nil {
		more(book, pool, now)
	}
	r, err := openai.Chat.Inspect("application/json", body)
	if err != nil {
		b.Fatal(err)
	}
	var h prefix.Hasher
	ask := schedule.Ask{Model: "m", Prompt: r.PromptTokens, Stream: true}
	h.Request(body, r, r.Model)
	book.Decide(now, pool, &ask)
	b.ReportAllocs()
	began := cpuTime(b)
	for b.Loop() {
		now = now.Add(100 * time.Microsecond)
		ask.Keys, ask.PromptBytes = h.Request(body, r, r.Model)
		if book.Decide(now, pool, &ask) == nil {
			b.Fatal("nobody")
		}
	}
	b.ReportMetric(float64(cpuTime(b)-began)/float64(b.N), "cpu-ns/op")
}

// cpuTime is what the process has used so far. On a busy machine the wall says
// more about the neighbours.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkBody is what a body of 220 KB costs in all before it is sent: it is
// inspected and hashed, and a place is reserved.
func BenchmarkBody(b *testing.B) {
	book, pool, body, now := crowd(b, newBook(b), 100, 55_000)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	var h prefix.Hasher
	began := cpuTime(b)
	for b.Loop() {
		r, err := openai.Chat.Inspect("application/json", body)
		if err != nil {
			b.Fatal(err)
		}
		now = now.Add(100 * time.Microsecond)
		ask := schedule.Ask{Model: "m", Prompt: r.PromptTokens, Stream: true}
		ask.Keys, ask.PromptBytes = h.Request(body, r, r.Model)
		place, refused := book.Reserve(now, pool, ask)
		if refused != nil {
			b.Fatal(refused)
		}
		place.Release()
	}
	took := cpuTime(b) - began
	b.ReportMetric(float64(took)/float64(b.N), "cpu-ns/op")
	b.ReportMetric(float64(b.N)/took.Seconds(), "requests/cpu-s")
}

// Of whole answers sent at once half must have been computed after half of the time.
func TestWholeAnswersBehindEachOtherAreNotOverdue(t *testing.T) {
	b, pool := newBook(t), newPool(1)
	for i := range 10 {
		ask := prompt(i, i, 10000)
		ask.Stream = false
		place(t, b, start, pool, ask)
	}
	ask := prompt(99, 99, 10000)
	whole := b.Candidate(start, pool, &ask).Ahead
	for part := range 10 {
		now := start.Add(time.Duration(whole*float64(part)/10*1e9) + 10*time.Millisecond)
		left, want := b.Candidate(now, pool, &ask).Ahead, whole*float64(10-part)/10
		if left > want+0.2 {
			t.Errorf("after %d parts of 10 of %.2f s there are %.2f s left, want about %.2f", part, whole, left, want)
		}
	}
}

// Streams behind whole answers do not make an engine look slower than it is.
func TestWholeAnswersDoNotSlowWhatStreamsTeach(t *testing.T) {
	for _, wholes := range []int{0, 3} {
		b, pool := newBook(t), newPool(1)
		now := start
		id := 0
		for range 40 {
			var sent []*schedule.Reservation
			for k := range wholes + 1 {
				ask := prompt(id, id, 4000)
				id++
				ask.Stream = k == wholes
				sent = append(sent, place(t, b, now, pool, ask))
			}
			// The engine computes one after the other, 10,000 tokens a second.
			now = now.Add(time.Duration(wholes+1) * 440 * time.Millisecond)
			ask := prompt(1<<20, 0, 100)
			b.Candidate(now.Add(-time.Millisecond), pool, &ask) // somebody else comes
			sent[wholes].Accepted()
			sent[wholes].FirstOutput(now)
			now = now.Add(time.Second)
			for _, r := range sent {
				r.Release()
			}
		}
		ask := prompt(id, id, 4000)
		c := b.Candidate(now, pool, &ask)
		t.Logf("%d wholes before each stream: %.0f tokens/s, intercept %.3f", wholes, 1/c.PerToken, c.Intercept)
		if 1/c.PerToken < 6000 {
			t.Errorf("%d wholes before each stream: taken for %.0f tokens a second, and it does 10000", wholes, 1/c.PerToken)
		}
	}
}

// An engine whose whole answers come sooner than expected is not overdue with the next.
func TestWholeAnswersThatComeSoonerAreNotOverdue(t *testing.T) {
	b, pool := newBook(t), newPool(1)
	var sent []*schedule.Reservation
	for i := range 20 {
		ask := prompt(i, i, 10000)
		ask.Stream = false
		sent = append(sent, place(t, b, start, pool, ask))
	}
	ask := prompt(99, 99, 10000)
	each := b.Candidate(start, pool, &ask).Ahead / 20
	now := start
	for i, r := range sent[:15] {
		now = now.Add(time.Duration(each / 3 * 1e9))
		r.Accepted()
		r.Finished(now, inference.Usage{Prompt: 10000, Completion: 1, Cached: -1})
		b.Report(now, schedule.Outcome{Endpoint: r.Endpoint.ID, Verdict: inference.Finished, Took: now.Sub(start)})
		r.Release()
		if left, most := b.Candidate(now, pool, &ask).Ahead, each*float64(19-i)+0.2; left > most {
			t.Errorf("after %d of 20 answers %.2f s are left, want at most %.2f", i+1, left, most)
		}
	}
}

// The prompt of an answer that comes whole is cached as soon as it must have been
// computed, and not only when all of the answer is there.
func TestPromptOfAWholeAnswerIsCachedWhileItIsGenerated(t *testing.T) {
	b, pool := limited(t, standard.Default, schedule.Limits{}), newPool(3)
	for _, e := range pool.Endpoints {
		b.Admit(e.ID)
	}
	place := func(now time.Time, ask schedule.Ask) *schedule.Reservation {
		round := b.Begin(now, pool)
		defer round.End()
		ask.Stream = false
		round.Bid(&ask)
		return round.Take(&ask)
	}
	first := place(start, prompt(1, 1, 4000))
	for i := range 3 {
		now := start.Add(time.Duration(2+i) * time.Second)
		if r := place(now, prompt(1, 2+i, 4000)); r.Endpoint.ID != first.Endpoint.ID {
			t.Errorf("%v after the first another of the same beginning went to %s, not to %s: %s", now.Sub(start), r.Endpoint.ID, first.Endpoint.ID, r.Why())
		}
	}
}
