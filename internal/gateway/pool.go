// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/health"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/upstream"
)

// noLimit stands for a limit that is turned off where one must be given; the
// kernel gives up long before.
const noLimit = 24 * time.Hour

// pool is one configured pool. It is fixed: a new configuration makes new ones,
// and requests keep the policy of their arrival.
type pool struct {
	*members
	chosenBy
	name   string
	policy attempt.Policy
	limits inference.Timeouts

	bodyMax     int64 // 0: the listener's
	collectMax  int64
	forwardAuth bool
	reach       // how its engines are reached
}

// newPool makes the pool of a configuration, with the members that it had under
// the one before, if any.
func newPool(name string, c config.Pool, m *members) (*pool, error) {
	p := &pool{
		members:    m,
		name:       name,
		limits:     c.Timeouts.Limits(),
		bodyMax:    int64(c.MaxBody),
		collectMax: int64(c.CollectMax),
		policy: attempt.Policy{
			MaxAttempts:         c.Failover.BeforeFirstDelta.MaxAttempts,
			AllowTransportFence: c.Failover.AllowTransportFence,
			ExecutesTools:       c.ExecutesTools,
		},
		forwardAuth: c.ForwardAuthorization,
		reach:       newReach(c),
	}
	bearer, err := c.Credential.Bearer()
	if err != nil {
		return nil, fmt.Errorf("pool %s: credential: %w", name, err)
	}
	if !bearer.IsZero() {
		p.authorization = "Bearer " + bearer.Reveal()
	}
	return p, nil
}

// members is what a pool keeps from one configuration to the next: its
// endpoints, the connections to them and what the book knows of them.
type members struct {
	g     *Gateway
	book  *schedule.Book
	queue queue
	sleep sleep
	now   atomic.Pointer[endpoints]

	setting sync.Mutex // held while now is replaced
	deleted bool       // the configuration has no such pool any more
	noting  sync.Mutex // held while listed is put together
	listed  atomic.Pointer[lists]

	revisions atomic.Pointer[[]string] // that were reported as a mixture; nil: none
}

// endpoints is the set of a moment. It is immutable and swapped whole.
type endpoints struct {
	fleet   *fleet.Pool
	engines map[inference.EndpointID]*engine
	reach   reach
}

// reach is how a pool's engines are reached. Engines are reached anew when it
// changes.
type reach struct {
	connect       time.Duration
	health        health.Config
	scraping      scraping
	authorization string // what engines are sent; "" for none
	guarding
}

func newReach(c config.Pool) reach {
	r := reach{
		guarding: newGuarding(c),
		connect:  time.Duration(c.Timeouts.Connect),
		health: health.Config{
			Path:           c.Health.Path,
			Interval:       time.Duration(c.Health.Interval),
			Timeout:        time.Duration(c.Health.Timeout),
			UnhealthyAfter: c.Health.UnhealthyAfter,
			HealthyAfter:   c.Health.HealthyAfter,
			Starts:         c.Flow.ScaleFromZero.Wait() > 0,
		},
		scraping: newScraping(c),
	}
	if c.Health.Generate {
		r.health.GenerateEvery = time.Duration(c.Health.GenerateEvery)
	}
	if r.connect == 0 {
		r.connect = noLimit
	}
	return r
}

func newMembers(g *Gateway, name string) *members {
	m := &members{
		g: g, book: schedule.NewBook(schedule.Config{}, rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))),
		queue: queue{flow: flow.New(flow.Config{})},
	}
	m.now.Store(&endpoints{fleet: &fleet.Pool{Name: name}})
	m.listed.Store(&lists{})
	return m
}

// chosenBy is what a pool's endpoints are chosen by.
type chosenBy struct {
	how     config.Routing
	profile *schedule.Profile
}

// or returns what another configuration says. One that stays keeps what its
// plugins know.
func (b chosenBy) or(how config.Routing, makes func(config.Routing) (*schedule.Profile, error)) (chosenBy, error) {
	how.TTFT, how.TTFTPrefillFactor, how.TPOT = 0, 0, 0 // are the book's
	if makes == nil || reflect.DeepEqual(b.how, how) {
		return b, nil
	}
	profile, err := makes(how)
	return chosenBy{how, profile}, err
}

// called is the word for it.
func (b chosenBy) called() string {
	if len(b.how.Plugins) > 0 {
		return "plugins"
	}
	return b.how.Profile
}

// configure gives the book and the queue a configuration's limits.
func (p *pool) configure(c config.Pool) {
	p.book.Configure(schedule.Config{
		Retry: schedule.BudgetConfig{
			Ratio:        float64(c.Failover.RetryBudget.Ratio),
			MinPerSecond: c.Failover.RetryBudget.MinPerSecond,
		},
		RetryCost: schedule.CostLimit{
			PromptTokens: c.Failover.RetryCostLimit.PromptTokens,
			Prefill:      time.Duration(c.Failover.RetryCostLimit.EstimatedPrefill),
		},
		HealthPanic: float64(c.Health.PanicThreshold),
		Profile:     p.profile,
		TTFT:        schedule.TTFT{Base: time.Duration(c.Routing.TTFT), Prefills: c.Routing.TTFTPrefillFactor},
		TPOT:        time.Duration(c.Routing.TPOT),
		ScrapeStale: staleAfter(time.Duration(c.Scrape.Interval)),
		Limits: schedule.Limits{
			Concurrency: int(c.Flow.MaxConcurrency),
			Prefill:     time.Duration(c.Flow.LocalQueue.Prefill),
			Waiting:     c.Flow.LocalQueue.Requests,
		},
	})
	p.limitQueue(flowConfig(c.Flow))
}

func flowConfig(c config.Flow) flow.Config {
	f := flow.Config{
		RequestsMax:      c.Queue.MaxRequests,
		BytesMax:         int64(c.Queue.MaxBytes),
		TTL:              time.Duration(c.Queue.TTL),
		EarliestDeadline: c.Order == config.OrderDeadline,
		RefuseAt:         float64(c.RefuseAt),
		EmptyTTL:         c.ScaleFromZero.Wait(),
	}
	for _, b := range c.Bands {
		f.Bands = append(f.Bands, flow.Band{
			Priority: b.Priority, RequestsMax: b.MaxRequests, BytesMax: int64(b.MaxBytes),
			TTL: time.Duration(b.TTL), Reserve: float64(b.Reserve),
		})
	}
	return f
}

// set replaces the endpoints. One that stays keeps its connections and its
// record; one that leaves takes no new request, and those it has go on. how is
// nil where nothing changes about that.
func (m *members) set(list []inference.Endpoint, how *reach) error {
	m.setting.Lock()
	defer m.setting.Unlock()
	if m.deleted {
		return nil // discovery had not heard of it
	}
	return m.replace(list, how)
}

// setReach changes how the endpoints that there are, are reached.
func (m *members) setReach(how *reach) error {
	m.setting.Lock()
	defer m.setting.Unlock()
	return m.replace(m.now.Load().fleet.Endpoints, how)
}

// delete lets go of all endpoints, for good.
func (m *members) delete() {
	m.setting.Lock()
	defer m.setting.Unlock()
	m.deleted = true
	_ = m.replace(nil, nil) // cannot fail without endpoints
}

// replace is set. The caller holds setting.
func (m *members) replace(list []inference.Endpoint, how *reach) error {
	old := m.now.Load()
	if how == nil {
		how = &old.reach
	}
	set := &endpoints{
		fleet:   &fleet.Pool{Name: old.fleet.Name, Endpoints: list},
		engines: make(map[inference.EndpointID]*engine, len(list)),
		reach:   *how,
	}
	for _, e := range list {
		e.Guard = how.guardOf(e)
		if known := old.engines[e.ID]; known != nil && old.reach == *how && known.guard == e.Guard {
			set.engines[e.ID] = known
			continue
		}
		u, err := url.Parse(e.URL)
		if err != nil {
			return fmt.Errorf("pool %s: %w", set.fleet.Name, err)
		}
		conn, err := upstream.New(upstream.Config{URL: u, ConnectTimeout: how.connect})
		if err != nil {
			return fmt.Errorf("pool %s: %w", set.fleet.Name, err)
		}
		aside, err := upstream.New(upstream.Config{URL: u, ConnectTimeout: how.connect, IdleMax: -1})
		if err != nil {
			return fmt.Errorf("pool %s: %w", set.fleet.Name, err)
		}
		made := newEngine(conn, aside)
		made.guard = e.Guard
		made.scraped.kind.Store(int32(how.scraping.Kind)) // until it tells
		if known := old.engines[e.ID]; known != nil {
			made.listed.Store(known.listed.Load())
			made.forgetModels()
		}
		if how.scraping.Interval > 0 {
			if made.metrics, err = how.scraping.connect(u); err != nil {
				return fmt.Errorf("pool %s: %w", set.fleet.Name, err)
			}
		}
		set.engines[e.ID] = made
	}
	m.g.lines.sweep()
	for id, e := range set.engines {
		if old.engines[id] != e {
			// Its probes begin anew and report what differs from this.
			m.book.SetHealth(id, how.health.AtFirst())
		}
		m.book.SetGuarded(id, e.guard != "")
		if e.guard != "" && e.line == nil {
			var err error
			if e.line, err = m.openLine(id, e, how.guarding); err != nil {
				return fmt.Errorf("pool %s: guard of %s: %w", set.fleet.Name, id, err)
			}
		}
	}
	// No pump that goes by the old set may meet accounts that were forgotten: to the
	// book it would be a new endpoint.
	m.queue.mu.Lock()
	m.now.Store(set)
	m.queue.mu.Unlock()
	m.note()
	defer m.reportRevisions()
	for id, e := range old.engines {
		if set.engines[id] != e {
			e.retire()
		}
		if set.engines[id] == nil {
			m.book.Forget(id)
		}
	}
	for id, e := range set.engines {
		m.book.Admit(id)
		if old.engines[id] != e {
			m.watch(id, e, how)
		}
	}
	m.pump()
	return nil
}

// reportRevisions warns of endpoints that serve different models, once for each
// mixture: a repeated request may get another model's answer.
func (m *members) reportRevisions() {
	set := m.now.Load()
	mixed := PoolStatus{Endpoints: m.book.Status(time.Now(), set.fleet)}.Revisions()
	if len(mixed) < 2 {
		m.revisions.Store(nil)
		return
	}
	if before := m.revisions.Swap(&mixed); before == nil || !slices.Equal(*before, mixed) {
		m.g.log.Warn("endpoints of one pool serve different model revisions", "pool", set.fleet.Name, "revisions", mixed)
	}
}

// watch starts what is to be known of an endpoint all the time.
func (m *members) watch(id inference.EndpointID, e *engine, how *reach) {
	var each []func(context.Context)
	if how.health.Interval > 0 {
		each = append(each,
			func(ctx context.Context) {
				e.probe(ctx, how.health, authorizationHeader(how.authorization), func(h inference.Health) {
					m.found(ctx, id, e, how, h)
				})
			})
	}
	each = append(each, func(ctx context.Context) { m.lookAtModels(ctx, id, e, how.authorization, how.health.Interval > 0) })
	if e.metrics != nil {
		each = append(each, func(ctx context.Context) { m.scrape(ctx, id, e, how) })
	}
	e.watch(each...)
}

// lookAtModels keeps what an engine serves known, until ctx is done. An engine that
// is not probed is only asked when there is a reason.
func (m *members) lookAtModels(ctx context.Context, id inference.EndpointID, e *engine, authorization string, unasked bool) {
	var every <-chan time.Time
	if unasked {
		ticker := time.NewTicker(modelsEvery)
		defer ticker.Stop()
		every = ticker.C
	}
	for look := unasked; ; look = true {
		if look {
			at, cancel := context.WithTimeout(ctx, modelsTime)
			m.modelsOf(at, id, e, authorization)
			m.revisionOf(at, id, e, authorization)
			cancel()
		}
		looked := time.After(modelsAgain)
		select {
		case <-every:
			continue
		case <-e.changed:
		case <-ctx.Done():
			return
		}
		select {
		case <-looked:
			e.forgetModels()
		case <-ctx.Done():
			return
		}
	}
}

func authorizationHeader(value string) []upstream.Field {
	if value == "" {
		return nil
	}
	return []upstream.Field{{Name: "Authorization", Value: value}}
}

func (m *members) close() {
	m.stopQueue()
	m.sleep.waker.Load().Close()
	for _, e := range m.now.Load().engines {
		e.halt()
		e.conn.Close()
	}
}
