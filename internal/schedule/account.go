// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
)

// How an endpoint that fails is kept away and let back.
const (
	ejectMin     = time.Second      // after a first failure; doubled by each further one
	ejectMax     = 30 * time.Second // and the longest pause an engine may ask for
	errorsMax    = 3                // answered errors in a row before they count as a failure
	rampTime     = 30 * time.Second // from the first success to a full share
	rampFloor    = 0.1              // the share at its begin
	ghostsMax    = 256              // remembered quick errors per endpoint
	ghostTimeMax = 30 * time.Second
)

// standing ranks endpoints by their recent past; the least is preferred.
type standing int

const (
	onTrial standing = iota // its ejection is over: one first attempt finds out
	good
	ramping // back, and this time its turn is given to another
	ejected
)

var standingNames = [...]string{"on_trial", "good", "ramping", "ejected"}

func (s standing) String() string { return standingNames[s] }

// account is what the book knows of one endpoint.
type account struct {
	at       int // in the seating
	inflight int

	// ghosts are the ends of times for which quick errors still count as load.
	// An engine that answers errors at once is always idle, and least load
	// would send it everything; so an error holds its place as long as a
	// typical answer would have.
	ghosts []time.Time

	traffic
	scraped scraped

	// Of the round under way.
	turn         bool // it is its turn, if it is ramping
	room         room
	roomYielding room    // for requests that yield
	opens        float64 // seconds until a busy one has room, as expected
	passed       float64 // prefill in seconds of requests that were passed over

	gone   bool // left the pool; dropped at the last release
	health inference.Health
	models map[string]bool // that it lists; nil: not known

	hits     Hits
	process  string    // that its engine is, as its guard told; "" not known
	revision string    // of its model, as it told; "" not known
	guarded  bool      // attempts there need a lease
	leasable time.Time // until when its guard can be granted one

	failures     int // since the last success
	errors       int // answered errors since the last success
	ejectedUntil time.Time
	heldUntil    time.Time // by the engine's own Retry-After
	recoveredAt  time.Time // first success after an ejection, zero when long ago
}

// Leaving is an endpoint that takes no requests any more and has some.
type Leaving struct {
	Endpoint inference.EndpointID
	InFlight int
}

// Leaving lists the endpoints that have left the pool, or are draining, while
// their last requests go on.
func (b *Book) Leaving() []Leaving {
	b.mu.Lock()
	defer b.mu.Unlock()
	var list []Leaving
	for id, a := range b.accounts {
		if a.gone && a.inflight > 0 {
			list = append(list, Leaving{id, a.inflight})
		}
	}
	slices.SortFunc(list, func(x, y Leaving) int { return cmp.Compare(x.Endpoint, y.Endpoint) })
	return list
}

// Why an endpoint cannot take a request.
const (
	excluded  = "excluded"   // failed for this request
	gone      = "gone"       // nothing answers at its address, so trying it would only spend an attempt
	unhealthy = "unhealthy"  // by its probes
	unlisted  = "unlisted"   // it lists its models, and this is none of them
	paused    = "paused"     // by its engine's own Retry-After
	guardLost = "guard_lost" // nothing sent there could be fenced
)

// plain reports whether nothing is to be said of the endpoint but its load and
// its models until some time. Most are.
func (a *account) plain(until time.Time) bool {
	return a.health == inference.Healthy && a.failures == 0 && len(a.ghosts) == 0 &&
		a.heldUntil.IsZero() && a.recoveredAt.IsZero() && a.fenceable(until)
}

// past forgets what is over.
func (a *account) past(now time.Time) {
	if !now.Before(a.heldUntil) {
		a.heldUntil = time.Time{}
	}
	if a.share(now) >= 1 {
		a.recoveredAt = time.Time{}
	}
	a.load(now)
}

// fenceable reports whether an attempt that is sent there can be proved silent as
// its pool demands. An endpoint whose guard is not heard never passes for one
// without a guard.
func (a *account) fenceable(now time.Time) bool { return !a.guarded || now.Before(a.leasable) }

// why returns why the endpoint cannot take the request, "" if it can.
func (a *account) why(now time.Time, ask *Ask, e *inference.Endpoint, believe, serves bool) string {
	switch {
	case ask.excludes(e.ID):
		return excluded
	case a.health == inference.Gone:
		return gone
	case !a.fenceable(now):
		return guardLost
	case a.health == inference.Unhealthy && believe:
		return unhealthy
	case !serves:
		return unlisted
	case !a.heldUntil.IsZero() && now.Before(a.heldUntil):
		return paused
	}
	return ""
}

func (a *account) rank(now time.Time, ask *Ask, e *inference.Endpoint, turn bool) rank {
	return rank{
		standing: a.standing(now, ask.Retry, turn),
		stranger: ask.PreferRevision != "" && a.revisionOf(e) != ask.PreferRevision,
	}
}

// revisionOf is the model revision of the account's endpoint, "" if not known.
func (a *account) revisionOf(e *inference.Endpoint) string { return cmp.Or(e.Revision, a.revision) }

// drawTurn decides whether an endpoint takes its turn, which one that is ramping
// does not always.
func (a *account) drawTurn(now time.Time, rnd *rand.Rand) bool {
	if a.failures > 0 {
		return true
	}
	share := a.share(now)
	return share >= 1 || rnd.Float64() < share
}

// standing places the endpoint for one choice. A retry is no occasion for a trial.
func (a *account) standing(now time.Time, retry, turn bool) standing {
	switch {
	case a.failures == 0 && turn:
		return good
	case a.failures == 0:
		return ramping
	case now.Before(a.ejectedUntil) || a.inflight > 0 || retry:
		return ejected
	}
	return onTrial
}

// share grows from a tenth to one while an endpoint comes back.
func (a *account) share(now time.Time) float64 {
	if a.recoveredAt.IsZero() {
		return 1
	}
	back := float64(now.Sub(a.recoveredAt)) / float64(rampTime)
	return min(rampFloor+(1-rampFloor)*max(back, 0), 1)
}

// load is what this gateway's requests put on the endpoint.
func (a *account) load(now time.Time) int {
	if len(a.ghosts) == 0 {
		return a.inflight
	}
	live := a.ghosts[:0]
	for _, end := range a.ghosts {
		if now.Before(end) {
			live = append(live, end)
		}
	}
	a.ghosts = live
	return a.inflight + len(a.ghosts)
}

func (a *account) report(now time.Time, o Outcome, typical time.Duration) {
	if o.RetryAfter > 0 {
		a.heldUntil = now.Add(min(o.RetryAfter, ejectMax))
	}
	switch o.Verdict {
	case inference.Finished:
		if a.failures > 0 {
			a.recoveredAt = now
		}
		a.failures, a.errors = 0, 0
		return
	case inference.ClientGone:
		return
	case inference.Refused:
		// A client's mistake says nothing about the engine's health.
		a.haunt(now, o.Took, typical)
		return
	case inference.EngineError, inference.Ended:
		// One 500 may be this request's fault, and a busy engine refuses some
		// while it serves others; a row of errors is the engine's own.
		a.haunt(now, o.Took, typical)
		if a.errors++; a.errors < errorsMax {
			return
		}
	}
	a.failures++
	backoff := ejectMax
	if a.failures <= 5 {
		backoff = min(ejectMin<<(a.failures-1), ejectMax)
	}
	a.ejectedUntil = now.Add(backoff)
}

// haunt keeps a quick error's place taken for as long as a typical answer.
func (a *account) haunt(now time.Time, took, typical time.Duration) {
	if rest := min(typical, ghostTimeMax) - took; rest > 0 && len(a.ghosts) < ghostsMax {
		a.ghosts = append(a.ghosts, now.Add(rest))
	}
}
