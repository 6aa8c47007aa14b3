// SPDX-License-Identifier: Apache-2.0

package schedule_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugin"
	"github.com/headgate/headgate/plugins/standard"
)

func known(v float64) plugin.Value { return plugin.Value{V: v, Known: true} }

func TestFadingIsNearlyExponential(t *testing.T) {
	for last, x := 1.0, 0.0; x < 100; x += 0.01 {
		got, want := schedule.Fade(x), math.Exp(-x)
		if got < want || got > want+0.009 || got > last {
			t.Fatalf("%g after %g, want about %g", got, x, want)
		}
		last = got
	}
	for _, x := range []float64{1e300, math.Inf(1)} {
		if got := schedule.Fade(x); got != 0 {
			t.Errorf("%g after %g", got, x)
		}
	}
}

// says has an endpoint's engine report that much.
func says(b *schedule.Book, at time.Time, id inference.EndpointID, queued, running, done float64) {
	b.Asking(id)
	b.SetScraped(id, schedule.Scraped{At: at, Queued: known(queued), Running: known(running), KVUsage: known(0.5), Done: known(done)})
}

func profileOf(t testing.TB, name string) *schedule.Book {
	t.Helper()
	if name == "least_load" {
		return bookWith(nil)
	}
	profile, err := standard.Profile(name)
	if err != nil {
		t.Fatal(err)
	}
	return bookWith(profile)
}

var profiles = []string{"cost", "weighted", "least_load"}

// What an engine reports beyond this gateway's own requests is load of others.
func TestLoadOfOthersCounts(t *testing.T) {
	for _, name := range profiles {
		t.Run(name, func(t *testing.T) {
			b, pool := profileOf(t, name), newPool(3)
			busy := pool.Endpoints[0].ID
			says(b, start, busy, 5, 12, 1)
			for _, e := range pool.Endpoints[1:] {
				says(b, start, e.ID, 0, 2, 1)
			}
			now := start.Add(100 * time.Millisecond)
			if r := b.Reported(now, busy); math.Abs(r.Others-17) > 2 || r.Queued.V != 5 || r.Age != 100*time.Millisecond || r.Doubt != "" {
				t.Errorf("reported %+v", r)
			}
			for i := range 9 {
				if r := place(t, b, now, pool, prompt(i, i, 1000)); r.Endpoint.ID == busy {
					t.Errorf("prompt %d went to an engine that is busy for others: %s", i, r.Why())
				}
			}
		})
	}
}

// What this gateway has there itself is not counted twice.
func TestOwnRequestsAreNotOthers(t *testing.T) {
	b, pool := newBook(t), newPool(1)
	id := pool.Endpoints[0].ID
	for i := range 6 {
		place(t, b, start, pool, prompt(i, i, 1000))
	}
	b.Asking(id)
	place(t, b, start, pool, prompt(7, 7, 1000)) // came while it was asked: in its metrics, or not
	b.SetScraped(id, schedule.Scraped{At: start, Queued: known(4), Running: known(4)})
	if r := b.Reported(start, id); r.Others != 1 {
		t.Errorf("others have %v, want 1 of 8: 7 are ours", r.Others)
	}
	// Only one of the two numbers is better than none.
	b.SetScraped(id, schedule.Scraped{At: start, Running: known(10)})
	if r := b.Reported(start, id); r.Others != 3 {
		t.Errorf("others have %v, want 3", r.Others)
	}
}

// MET-1, MET-2: what is old or was never said leaves the book's own counts
// alone. It does not make an engine look idle, or full.
func TestStaleMetricsAreNeitherIdleNorFull(t *testing.T) {
	for _, name := range profiles {
		for what, say := range map[string]func(b *schedule.Book, id inference.EndpointID){
			"never":         func(*schedule.Book, inference.EndpointID) {},
			"nothing known": func(b *schedule.Book, id inference.EndpointID) { b.SetScraped(id, schedule.Scraped{At: start}) },
			"idle long ago": func(b *schedule.Book, id inference.EndpointID) {
				says(b, start.Add(-2*time.Second), id, 0, 0, 1)
			},
			"full long ago": func(b *schedule.Book, id inference.EndpointID) {
				says(b, start.Add(-2*time.Second), id, 90, 200, 1)
			},
		} {
			t.Run(name+"/"+what, func(t *testing.T) {
				b, pool := profileOf(t, name), newPool(3)
				for i, e := range pool.Endpoints {
					if i > 0 {
						says(b, start, e.ID, 3, 3, 1)
					}
				}
				id := pool.Endpoints[0].ID
				say(b, id)
				if r := b.Reported(start, id); r.Queued.Known || r.Running.Known || r.KVUsage.Known || r.Others != 0 {
					t.Fatalf("reported %+v", r)
				}
				got := 0
				for i := range 90 {
					if place(t, b, start, pool, prompt(i, i, 1000)).Endpoint.ID == id {
						got++
					}
				}
				// Six of others are known to be at each of the other two.
				if got < 20 || got > 45 {
					t.Errorf("it got %d of 90", got)
				}
			})
		}
	}
}

// An engine whose metrics stand still while it answers, at whatever they show,
// is judged by the book's own counts.
func TestFrozenMetricsAreNotBelieved(t *testing.T) {
	for _, load := range []float64{0, 40} {
		b, pool := profileOf(t, "weighted"), newPool(2)
		id, other := pool.Endpoints[0].ID, pool.Endpoints[1].ID
		now, done, got := start, 0.0, 0
		for i := range 200 {
			now = now.Add(100 * time.Millisecond)
			if i%5 == 0 {
				says(b, now, id, load/2, load/2, 7)
				says(b, now, other, 0, 0, done)
			}
			r := place(t, b, now, pool, prompt(i, i, 1000))
			if r.Endpoint.ID == id {
				if i >= 100 {
					got++
				}
			} else {
				done++
			}
			if i%4 == 0 && r.Endpoint.ID != id { // one that it had all along goes on answering
				r.Release()
				r = place(t, b, now, &fleet.Pool{Name: "p", Endpoints: pool.Endpoints[:1]}, prompt(i, i, 1000))
			}
			serve(r, now.Add(90*time.Millisecond))
		}
		if r := b.Reported(now, id); r.Doubt != "frozen" || r.Others != 0 || r.Queued.Known {
			t.Errorf("load %v: reported %+v", load, r)
		}
		if r := b.Reported(now, other); r.Doubt != "" {
			t.Errorf("the other one is doubted: %+v", r)
		}
		if got < 30 || got > 70 {
			t.Errorf("load %v: the engine got %d of the last 100", load, got)
		}
		says(b, now, id, 1, 2, 8)
		if r := b.Reported(now, id); r.Doubt != "" || !r.Queued.Known {
			t.Errorf("it moves again: %+v", r)
		}
	}
}

// Metrics that froze while their engine was busy keep nobody away for ever, also
// where nobody comes who could see that it answers.
func TestBusyMetricsThatNeverMoveAreNotBelieved(t *testing.T) {
	b, pool := newBook(t), newPool(1)
	id := pool.Endpoints[0].ID
	says(b, start, id, 0, 0, 7)
	now := start.Add(time.Hour)
	says(b, now, id, 5, 5, 7) // work has begun and nothing has ended yet
	if r := b.Reported(now, id); r.Doubt != "" || r.Others != 10 {
		t.Errorf("at once: %+v", r)
	}
	for range 100 {
		now = now.Add(500 * time.Millisecond)
		says(b, now, id, 5, 5, 7)
		r, after := b.Reported(now, id), now.Sub(start.Add(time.Hour))
		if (r.Doubt == "frozen") != (after >= 30*time.Second) {
			t.Fatalf("after %v: %+v", after, r)
		}
	}
	says(b, now, id, 5, 5, 8)
	if r := b.Reported(now, id); r.Doubt != "" {
		t.Errorf("it moves: %+v", r)
	}
}

// An engine that does nothing may say so for ever.
func TestIdleIsNotFrozen(t *testing.T) {
	b, pool := newBook(t), newPool(1)
	id := pool.Endpoints[0].ID
	says(b, start, id, 0, 0, 10)
	serve(place(t, b, start, pool, prompt(1, 1, 1000)), start.Add(300*time.Millisecond))
	says(b, start.Add(500*time.Millisecond), id, 0, 0, 20)
	for i := range 100 {
		now := start.Add(time.Duration(i+2) * 500 * time.Millisecond)
		says(b, now, id, 0, 0, 20)
		if r := b.Reported(now, id); r.Doubt != "" {
			t.Fatalf("after %v: %+v", now.Sub(start), r)
		}
	}
}

// Metrics that show less than this gateway knows to be there are old ones.
func TestMetricsBelowOwnCountsAreNotBelieved(t *testing.T) {
	b, pool := profileOf(t, "weighted"), newPool(2)
	id := pool.Endpoints[0].ID
	for i := range 8 {
		ask := prompt(i, i, 1000)
		ask.Exclude = []inference.EndpointID{pool.Endpoints[1].ID}
		place(t, b, start, pool, ask)
	}
	says(b, start.Add(500*time.Millisecond), id, 0, 0, 1)
	if r := b.Reported(start.Add(500*time.Millisecond), id); r.Doubt != "" {
		t.Errorf("the requests may be too new to show: %+v", r)
	}
	says(b, start.Add(1500*time.Millisecond), id, 1, 4, 1)
	if r := b.Reported(start.Add(1500*time.Millisecond), id); r.Doubt != "" || r.Others != 0 {
		t.Errorf("three may have ended there and not here yet: %+v", r)
	}
	says(b, start.Add(2*time.Second), id, 0, 0, 1)
	if r := b.Reported(start.Add(2*time.Second), id); r.Doubt != "contradicted" || r.Queued.Known {
		t.Errorf("eight requests are there for two seconds: %+v", r)
	}
}

// A burst between two scrapes does not go where the queue was shortest.
func TestBurstWithinOneScrapeSpreads(t *testing.T) {
	for _, name := range profiles {
		t.Run(name, func(t *testing.T) {
			b, pool := profileOf(t, name), newPool(4)
			for i, e := range pool.Endpoints {
				says(b, start, e.ID, float64(i), 4, 1)
			}
			got := map[inference.EndpointID]int{}
			for i := range 80 {
				got[place(t, b, start.Add(time.Duration(i)*time.Millisecond), pool, prompt(i, i, 1000)).Endpoint.ID]++
			}
			for i, e := range pool.Endpoints {
				if n := got[e.ID]; n < 13 || n > 30 {
					t.Errorf("endpoint %d got %d of 80: %v", i, n, got)
				}
			}
		})
	}
}

// Gateways that know of each other by their engines' metrics alone share them
// better than gateways that don't, and not much worse where requests are so short
// that a metric is old news.
func TestGatewaysThatScrapeShareEngines(t *testing.T) {
	for _, c := range []struct {
		name   string
		took   time.Duration // by one request; an engine computes eight at a time
		atMost float64       // mean wait with scraping by the one without
	}{
		{"short requests", 160 * time.Millisecond, 1.5},
		{"long requests", 4 * time.Second, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, profile := range []string{"cost", "least_load"} {
				var blind, seeing time.Duration
				const seeds = 12
				for seed := range uint64(seeds) {
					blind += meanWait(t, profile, c.took, seed, false) / seeds
					seeing += meanWait(t, profile, c.took, seed, true) / seeds
				}
				t.Logf("%s: mean wait %v without metrics, %v with", profile, blind, seeing)
				if float64(seeing) > c.atMost*float64(blind) {
					t.Errorf("%s: requests wait %v with metrics, %v without", profile, seeing, blind)
				}
			}
		})
	}
}

// meanWait has four gateways share four engines at 85 % of what these can do.
func meanWait(t *testing.T, profile string, took time.Duration, seed uint64, scraping bool) time.Duration {
	const engines, gateways, places = 4, 4, 8
	rnd := rand.New(rand.NewPCG(7, seed))
	pool := newPool(engines)
	var books [gateways]*schedule.Book
	for g := range books {
		books[g] = profileOf(t, profile)
	}
	type job struct {
		book *schedule.Book
		r    *schedule.Reservation
		end  time.Time
	}
	var running, queued [engines][]job
	var waited time.Duration
	now, scrape, n := start, start, 4000
	for range n {
		next := now.Add(time.Duration(rnd.ExpFloat64() * float64(took) / engines / places / 0.85))
		for ; scrape.Before(next); scrape = scrape.Add(500 * time.Millisecond / gateways / engines) {
			k := int(scrape.Sub(start) / (500 * time.Millisecond / gateways / engines))
			g, e := k%gateways, k/gateways%engines
			if scraping {
				says(books[g], scrape, pool.Endpoints[e].ID, float64(len(queued[e])), float64(len(running[e])), float64(k))
			}
		}
		for e := range engines {
			for {
				first := -1
				for j := range running[e] {
					if !running[e][j].end.After(next) && (first < 0 || running[e][j].end.Before(running[e][first].end)) {
						first = j
					}
				}
				if first < 0 {
					break
				}
				x := running[e][first]
				running[e] = slices.Delete(running[e], first, first+1)
				serve(x.r, x.end)
				x.book.Report(x.end, schedule.Outcome{Endpoint: x.r.Endpoint.ID, Verdict: inference.Finished, Took: took})
				if len(queued[e]) > 0 {
					y := queued[e][0]
					queued[e] = queued[e][1:]
					waited += x.end.Sub(y.end) // until it begins, end is when it came
					y.end = x.end.Add(time.Duration(rnd.ExpFloat64() * float64(took)))
					running[e] = append(running[e], y)
				}
			}
		}
		now = next
		book := books[rnd.IntN(gateways)]
		r := place(t, book, now, pool, schedule.Ask{Model: "m", Prompt: inference.Tokens{N: 1000}, Stream: true})
		for e := range pool.Endpoints {
			switch {
			case pool.Endpoints[e].ID != r.Endpoint.ID:
			case len(running[e]) < places:
				running[e] = append(running[e], job{book, r, now.Add(time.Duration(rnd.ExpFloat64() * float64(took)))})
			default:
				queued[e] = append(queued[e], job{book, r, now})
			}
		}
	}
	return waited / time.Duration(n)
}

// A restart voids what was said before, and what was loaded.
func TestRestartVoidsWhatWasSaid(t *testing.T) {
	b, pool := newBook(t), newPool(1)
	id := pool.Endpoints[0].ID
	b.SetScraped(id, schedule.Scraped{At: start, Queued: known(50), Running: known(9), Adapters: []string{"x"}, AdapterSlots: 2})
	if !resident(b, pool, "x") {
		t.Fatal("an adapter that runs there is not resident")
	}
	b.Restarted(id)
	if r := b.Reported(start, id); r.Known || r.Others != 0 {
		t.Errorf("after the restart: %+v", r)
	}
	if resident(b, pool, "x") {
		t.Error("an adapter outlived its engine")
	}
}

// MET-7: an adapter that runs somewhere is resident there until as many others
// were used as there are places.
func TestResidenceEndsWithTheSlots(t *testing.T) {
	b, pool := newBook(t), newPool(1)
	id := pool.Endpoints[0].ID
	b.SetScraped(id, schedule.Scraped{At: start, AdapterSlots: 2, Adapters: []string{"x"}})
	b.SetScraped(id, schedule.Scraped{At: start, AdapterSlots: 2, Adapters: []string{"y"}})
	if !resident(b, pool, "x") || !resident(b, pool, "y") {
		t.Error("there is place for both")
	}
	b.SetScraped(id, schedule.Scraped{At: start, AdapterSlots: 2, Adapters: []string{"z"}})
	if resident(b, pool, "x") || !resident(b, pool, "y") || !resident(b, pool, "z") {
		t.Error("the third one took the place of the first")
	}
}

// resident is what a plugin is told.
func resident(b *schedule.Book, pool *fleet.Pool, adapter string) bool {
	ask := prompt(1, 1, 100)
	ask.Adapter = adapter
	return b.Candidate(start, pool, &ask).Resident
}

// A page that is not believed keeps no adapter loaded, however often it is read.
func TestDoubtedMetricsKeepNoAdapter(t *testing.T) {
	b, pool := profileOf(t, "cost"), newPool(1)
	id := pool.Endpoints[0].ID
	last := start
	for i := range 700 {
		last = start.Add(time.Duration(i) * time.Second)
		b.Asking(id)
		b.SetScraped(id, schedule.Scraped{At: last, Queued: known(0), Running: known(1), Done: known(5), Adapters: []string{"x"}, AdapterSlots: 1})
		ask := prompt(1, 1, 100)
		ask.Adapter = "x"
		if resident := b.Candidate(last, pool, &ask).Resident; resident != (i < 600+30) {
			t.Fatalf("after %d s, doubted as %q, the adapter is resident: %v", i, b.Reported(last, id).Doubt, resident)
		}
	}
	if doubt := b.Reported(last, id).Doubt; doubt != "frozen" {
		t.Errorf("doubted as %q", doubt)
	}
}
