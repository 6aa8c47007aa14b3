// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/plugin"
)

// Scraped is what an engine's own metrics said when it was asked. What they did
// not say, or said as nonsense, is not Known.
type Scraped struct {
	At      time.Time    // when the engine was asked
	Queued  plugin.Value // requests that wait in the engine
	Running plugin.Value // requests that run there
	KVUsage plugin.Value // share of KV memory in use, 0 to 1

	// Done counts the engine's work in a unit of its own. It moves with every
	// answer, so a page where it stands still while answers come is an old one.
	Done plugin.Value

	Adapters     []string // LoRA adapters that have requests there
	AdapterSlots int      // how many adapters fit at a time; 0: not known
}

// Reported is what is believed of an engine's own metrics at a moment.
type Reported struct {
	Scraped // its values are not Known when they are stale or not believed

	Known  bool          // the engine has said something, however long ago
	Age    time.Duration // since it was asked
	Others float64       // load there that this gateway did not put there, as expected now
	Doubt  string        // why nothing is believed: stale, frozen, contradicted; "" if it is
}

// Why an engine's metrics are not believed.
const (
	stale        = "stale"        // they are too old
	frozen       = "frozen"       // answers came, or requests run, and the count of work stands still
	contradicted = "contradicted" // they show fewer requests than this gateway has there
)

// settled is how long ago something must have happened to show in metrics. An
// engine writes them between two steps, and a scrape takes its time.
const settled = time.Second

// longestStep is how long requests may run without any work being counted. Some
// engines count only when an answer ends. Without this bound, metrics that froze
// while their engine was busy would keep everybody away, and so nothing would
// ever come of it that shows them to be old.
const longestStep = 30 * time.Second

// usualOver is about how many scrapes the usual load of others goes over.
const usualOver = 10

// scraped is the newest Scraped of an endpoint and what speaks against it.
type scraped struct {
	Scraped
	own     int     // requests of this gateway there when the engine was asked
	pending int     // of them, without a first output
	others  fading  // load beyond them
	queue   fading  // of others, those that waited
	scrapes float64 // that are in their means, at most usualOver
	doubt   string  // frozen, contradicted or ""

	asked struct{ own, pending int } // at the last Asking

	movedAt    time.Time // when Done was first seen as it is
	answeredAt time.Time // the first answer long enough after that; zero: none
	workingAt  time.Time // since when it is so while requests run; zero: none do
}

// fading is a count of requests that others had on an endpoint when its engine was
// asked, and have there usually.
type fading struct{ last, usual float64 }

// see notes what is there now, as one of so many times that the mean goes over.
func (f *fading) see(n, times float64) {
	f.last = n
	f.usual += (n - f.usual) / times
}

// expected is how many are there when what was seen is that fresh.
func (f fading) expected(freshness float64) float64 { return f.usual + (f.last-f.usual)*freshness }

// freshness is how much of what was seen still holds, from 1 down to 0. It says the
// less the longer that is ago: requests have ended since, and others have come. So it
// fades into the usual within a typical answer. Without that, gateways whose requests
// are short would all shun the engine that was busy half a second ago, and all go to
// the one that was idle.
func (b *Book) freshness(now time.Time, r *scraped) float64 {
	return fade(float64(max(now.Sub(r.At), 0)) / float64(b.typical))
}

// fade is (1+x/32)^-32 for x from 0 up, which falls as exp(-x) does, by no more than
// 0.009 above it. It is asked once per candidate, where math.Exp was a fifth of a
// decision.
func fade(x float64) float64 {
	y := 1 + x/32
	y *= y
	y *= y
	y *= y
	y *= y
	return 1 / (y * y)
}

// Asking tells that an endpoint's engine is being asked for its metrics, so that
// what is there now can be told from what comes later.
func (b *Book) Asking(id inference.EndpointID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.member(id)
	a.scraped.asked.own, a.scraped.asked.pending = a.inflight, len(a.pending)
}

// SetScraped notes an engine's own metrics, of the last time of Asking. They
// correct what the book itself has counted and never take its place: without
// them, or once they are older than Config.ScrapeStale, its counts stand alone.
func (b *Book) SetScraped(id inference.EndpointID, s Scraped) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.member(id)
	r := &a.scraped
	load := s.Queued.V + s.Running.V
	if !s.Done.Known || s.Done != r.Done {
		r.movedAt, r.answeredAt, r.workingAt = s.At, time.Time{}, time.Time{}
	}
	switch {
	case load == 0 || !s.Done.Known:
		r.workingAt = time.Time{}
	case r.workingAt.IsZero():
		r.workingAt = s.At
	}
	if r.doubt != "" || s.At.Sub(r.At) > b.config.ScrapeStale {
		r.others.usual, r.queue.usual, r.scrapes = 0, 0, 0
	}
	r.Scraped, r.own, r.pending = s, r.asked.own, r.asked.pending
	r.doubt, r.others.last, r.queue.last = "", 0, 0
	switch {
	case !r.answeredAt.IsZero() && s.At.Sub(r.answeredAt) >= settled,
		!r.workingAt.IsZero() && s.At.Sub(r.workingAt) >= longestStep:
		r.doubt = frozen
	case s.Queued.Known && s.Running.Known && contradicts(load, float64(a.since(b.seconds(s.At)-settled.Seconds()))):
		r.doubt = contradicted
	default:
		// What came or went while the engine was asked may be in its metrics or
		// not. To count it as ours is the smaller mistake: it repels nobody.
		r.scrapes = min(r.scrapes+1, usualOver)
		r.others.see(max(load-float64(max(r.own, a.inflight)), 0), r.scrapes)
		r.queue.see(min(max(s.Queued.V-float64(r.pending), 0), r.others.last), r.scrapes)
	}
	b.touch(a)
	at := b.seconds(s.At)
	if s.AdapterSlots > 0 {
		a.adapters.slots = s.AdapterSlots
	}
	if r.doubt != "" {
		return // an old page would keep its adapters loaded for ever
	}
	for _, name := range s.Adapters {
		a.adapters.use(name, at)
	}
}

// contradicts reports whether an engine that has own requests can report so few.
// Some may have ended there a moment ago and not here, and a client that reads
// slowly keeps its request open longer than its engine.
func contradicts(load, own float64) bool { return load+1+own/4 < own }

// since is how many of the requests in flight were there at a time already.
func (t *traffic) since(at float64) int {
	n := 0
	for _, r := range t.pending {
		if r.sent <= at {
			n++
		}
	}
	for _, r := range t.running {
		if r.sent <= at {
			n++
		}
	}
	return n
}

// answered notes an answer that the engine must have counted as work.
func (r *scraped) answered(now time.Time) {
	if r.Done.Known && r.answeredAt.IsZero() && now.Sub(r.movedAt) >= settled {
		r.answeredAt = now
	}
}

// believed reports whether the metrics are of use at this moment.
func (r *scraped) believed(now time.Time, staleAfter time.Duration) bool {
	return r.doubt == "" && !r.At.IsZero() && now.Sub(r.At) <= staleAfter
}

// elsewhere is the load that others are expected to have on the endpoint now.
func (b *Book) elsewhere(now time.Time, a *account) float64 {
	r := &a.scraped
	if r.others == (fading{}) || !r.believed(now, b.config.ScrapeStale) {
		return 0
	}
	return r.others.expected(b.freshness(now, r))
}

// elsewhereWhole is elsewhere in whole requests, as loads are compared.
func (b *Book) elsewhereWhole(now time.Time, a *account) int { return int(b.elsewhere(now, a) + 0.5) }

// reported is what is believed of the endpoint's metrics.
func (b *Book) reported(now time.Time, a *account) Reported {
	r := &a.scraped
	if r.At.IsZero() {
		return Reported{}
	}
	out := Reported{Known: true, Age: now.Sub(r.At), Doubt: r.doubt}
	out.At = r.At
	switch {
	case r.believed(now, b.config.ScrapeStale):
		out.Scraped, out.Others = r.Scraped, b.elsewhere(now, a)
	case out.Doubt == "":
		out.Doubt = stale
	}
	return out
}

// Reported is what is believed of an endpoint's metrics.
func (b *Book) Reported(now time.Time, id inference.EndpointID) Reported {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a := b.accounts[id]; a != nil {
		return b.reported(now, a)
	}
	return Reported{}
}

// fillScraped says what plugins see of the endpoint's metrics. What this gateway
// has sent since they were asked for is added, and what has ended is taken off:
// otherwise a whole burst would see the same shortest queue.
func (b *Book) fillScraped(c *plugin.Candidate, now time.Time, a *account) {
	r := &a.scraped
	if !r.believed(now, b.config.ScrapeStale) {
		return
	}
	c.Queued, c.Running, c.KVUsage = r.Queued, r.Running, r.KVUsage
	if c.Queued.Known {
		c.Queued.V = max(c.Queued.V+float64(a.inflight-r.own+len(a.ghosts)), 0)
	}
	if r.others != (fading{}) {
		freshness := b.freshness(now, r)
		c.Others = r.others.expected(freshness)
		// Prompts of others that wait are prefill that comes first.
		c.Ahead += r.queue.expected(freshness) * a.rate.Seconds(b.meanWork)
	}
}
