// SPDX-License-Identifier: Apache-2.0

// Package discovery finds the endpoints of pools: in the configuration, in a
// file or behind a name in DNS.
//
// It owns the goroutines that look and the rule of when a list counts. A source
// that can't look keeps what it found: only a list that says so empties a pool.
// It refuses to know whether an endpoint is healthy. Lifecycle makes one Pools
// and gives the lists to the gateway, which lets an endpoint that left its list
// finish what it has and gives it nothing new.
package discovery

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
)

// A Source finds endpoints. Run calls report when it has learned something,
// always from one goroutine, and returns soon after ctx is done.
type Source interface {
	Run(ctx context.Context, report func(Report))
}

// A Report is what a source has learned: its endpoints, or trouble, or both
// where it found only a part. A source reports trouble when it begins, changes
// or is over.
type Report struct {
	Endpoints []Found // all of them; nil: what was found before still holds
	Err       error
}

// Found is one endpoint that a source found.
type Found struct {
	inference.Endpoint
	Draining bool // it is to get no new requests
}

// Config is what Pools are made from. Update is required.
type Config struct {
	// Update takes a pool's endpoints, each once, sorted by ID, when they
	// have changed. It is called by one goroutine at a time, under a lock: it
	// must not call Pools. A pool whose sources have found nothing out yet has
	// no update.
	Update func(pool string, endpoints []inference.Endpoint)

	// Log takes changes and trouble. Default: discards.
	Log *slog.Logger

	// Resolver yields the servers for DNS, before each look-up. Default: those
	// of /etc/resolv.conf.
	Resolver func() (*dns.ClientConfig, error)
}

// holdTime is how long the endpoints of a pool stay after a reload while a new
// source has not found anything out yet. Past it they count as gone.
const holdTime = 10 * time.Second

// Pools runs the sources of all pools. Make it with New, end it with Close.
type Pools struct {
	config  Config
	newDNS  func(config.DNS) Source
	running sync.WaitGroup

	mu     sync.Mutex
	closed bool
	pools  map[string]*pool
}

// pool is what is known about one pool; Pools.mu guards it.
type pool struct {
	name     string
	revision string
	static   []Found
	sources  map[string]*source // by kind

	published []inference.Endpoint // nil before the first update
	held      []inference.Endpoint // stay until all sources have reported
	holding   *time.Timer          // ends that too
	over      bool                 // there are too many
}

// source is one running Source.
type source struct {
	of    any // what it was made from; comparable
	stop  context.CancelFunc
	known bool
	found []Found
	err   error
}

// kinds of sources that run, in the order in which they win.
var kinds = []string{"file", "dns"}

// New makes Pools without any pool.
func New(c Config) *Pools {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Resolver == nil {
		c.Resolver = func() (*dns.ClientConfig, error) { return dns.ClientConfigFromFile("/etc/resolv.conf") }
	}
	return &Pools{
		config: c,
		newDNS: func(of config.DNS) Source { return newDNS(of, c.Resolver) },
		pools:  map[string]*pool{},
	}
}

// Reload puts another configuration's pools in force. What it lists itself is
// updated before Reload returns. Sources that stay as they were go on with what
// they know; a pool that left has no further update.
func (d *Pools) Reload(pools map[string]config.Pool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	for name, p := range d.pools {
		if _, stays := pools[name]; !stays {
			p.end()
			delete(d.pools, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(pools)) {
		p := d.pools[name]
		if p == nil {
			p = &pool{name: name, sources: map[string]*source{}}
			d.pools[name] = p
		}
		d.configure(p, pools[name])
		d.publish(p)
	}
}

// Close ends all sources and waits for them. No update follows it.
func (d *Pools) Close() {
	d.mu.Lock()
	d.closed = true
	for _, p := range d.pools {
		p.end()
	}
	d.mu.Unlock()
	d.running.Wait()
}

// Status is what one source of a pool knows.
type Status struct {
	Pool      string
	Source    string // static, file or dns
	Known     bool   // it has found something out, if only that there is nothing
	Endpoints int    // those that drain included
	Err       error  // its trouble
}

// Status lists the sources of all pools by pool.
func (d *Pools) Status() []Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	var list []Status
	for _, name := range slices.Sorted(maps.Keys(d.pools)) {
		p := d.pools[name]
		if len(p.static) > 0 {
			list = append(list, Status{Pool: name, Source: "static", Known: true, Endpoints: len(p.static)})
		}
		for _, kind := range kinds {
			if s := p.sources[kind]; s != nil {
				list = append(list, Status{Pool: name, Source: kind, Known: s.known, Endpoints: len(s.found), Err: s.err})
			}
		}
	}
	return list
}

// configure makes p's sources those of c.
func (d *Pools) configure(p *pool, c config.Pool) {
	p.revision, p.static = c.ModelRevision, nil
	for _, e := range c.Discovery.Static {
		p.static = append(p.static, found(e))
	}
	fresh := false
	var file, name any
	if c.Discovery.File != "" {
		file = c.Discovery.File
	}
	if c.Discovery.DNS.Name != "" {
		name = c.Discovery.DNS
	}
	for kind, of := range map[string]any{"file": file, "dns": name} {
		old := p.sources[kind]
		if old != nil && old.of == of {
			continue
		}
		if old != nil {
			old.stop()
			delete(p.sources, kind)
		}
		if of == nil {
			continue
		}
		s := d.start(p, kind, of)
		if old != nil && samePlace(old.of, of) {
			s.known, s.found = old.known, old.found
		}
		fresh = fresh || !s.known
	}
	if fresh && len(p.published) > 0 {
		d.hold(p)
	}
}

// start runs a source. Its reports wait for d.mu, which the caller holds.
func (d *Pools) start(p *pool, kind string, of any) *source {
	ctx, stop := context.WithCancel(context.Background())
	s := &source{of: of, stop: stop}
	p.sources[kind] = s
	var run Source
	switch of := of.(type) {
	case config.File:
		run = fileSource{path: string(of)}
	case config.DNS:
		run = d.newDNS(of)
	}
	d.running.Go(func() {
		defer stop()
		run.Run(ctx, func(r Report) { d.report(p, kind, s, r) })
	})
	return s
}

// samePlace reports whether two sources look for the same thing, if at another
// pace.
func samePlace(a, b any) bool {
	x, isX := a.(config.DNS)
	y, isY := b.(config.DNS)
	x.Refresh, y.Refresh = config.Refresh{}, config.Refresh{}
	return isX && isY && x == y
}

func (d *Pools) report(p *pool, kind string, s *source, r Report) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p.sources[kind] != s {
		return // it was replaced
	}
	if r.Err != nil {
		d.config.Log.Warn("discovery is in trouble", "pool", p.name, "source", kind, "error", r.Err.Error(),
			"endpoints_known", len(s.found))
	} else if s.err != nil {
		d.config.Log.Info("discovery is well again", "pool", p.name, "source", kind)
	}
	s.err = r.Err
	if r.Endpoints != nil {
		s.known, s.found = true, r.Endpoints
		d.publish(p)
	}
}

// hold keeps the published endpoints in the list for a while.
func (d *Pools) hold(p *pool) {
	p.drop()
	p.held = p.published
	var timer *time.Timer
	timer = time.AfterFunc(holdTime, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if p.holding == timer {
			p.drop()
			d.publish(p)
		}
	})
	p.holding = timer
}

// drop ends hold.
func (p *pool) drop() {
	if p.holding != nil {
		p.holding.Stop()
	}
	p.held, p.holding = nil, nil
}

// end stops all of a pool's sources; their reports don't count any more.
func (p *pool) end() {
	p.drop()
	for _, s := range p.sources {
		s.stop()
	}
	p.sources = nil
}

// publish calls Update when the endpoints have changed.
func (d *Pools) publish(p *pool) {
	known := true
	for _, s := range p.sources {
		known = known && s.known
	}
	if known {
		p.drop()
	}
	list := p.merge()
	if over := len(list) > config.EndpointsMax; over {
		if !p.over {
			d.config.Log.Error("a pool has too many endpoints: the list before stays", "pool", p.name, "found", len(list), "most", config.EndpointsMax)
		}
		p.over = true
		return
	}
	p.over = false
	first := p.published == nil
	if first && len(list) == 0 && !known || !first && slices.Equal(list, p.published) {
		return
	}
	added, removed := difference(p.published, list)
	p.published = list
	d.config.Log.Info("endpoints changed", "pool", p.name, "endpoints", len(list), "added", added, "removed", removed)
	d.config.Update(p.name, slices.Clone(list))
}

// merge is the union of what the sources found, without what drains.
func (p *pool) merge() []inference.Endpoint {
	all := slices.Clone(p.static)
	for _, kind := range kinds {
		if s := p.sources[kind]; s != nil {
			all = append(all, s.found...)
		}
	}
	merged := map[inference.EndpointID]Found{}
	for _, f := range all {
		if before, twice := merged[f.ID]; twice {
			f.Revision = cmp.Or(before.Revision, f.Revision)
			f.Guard = cmp.Or(before.Guard, f.Guard)
			f.Draining = f.Draining || before.Draining
		}
		merged[f.ID] = f
	}
	for _, e := range p.held {
		if _, found := merged[e.ID]; !found {
			merged[e.ID] = Found{Endpoint: e}
		}
	}
	list := []inference.Endpoint{}
	for _, id := range slices.Sorted(maps.Keys(merged)) {
		if f := merged[id]; !f.Draining {
			f.Revision = cmp.Or(f.Revision, p.revision)
			list = append(list, f.Endpoint)
		}
	}
	return list
}

// difference counts the IDs that only one of two sorted lists has.
func difference(before, after []inference.Endpoint) (added, removed int) {
	was := map[inference.EndpointID]bool{}
	for _, e := range before {
		was[e.ID] = true
	}
	for _, e := range after {
		if !was[e.ID] {
			added++
		}
	}
	return added, len(before) + added - len(after)
}

// found is an engine as a configuration or a file lists it.
func found(e config.Endpoint) Found {
	return Found{Endpoint: e.Endpoint(""), Draining: e.Draining}
}
