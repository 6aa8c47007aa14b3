// SPDX-License-Identifier: Apache-2.0

// Package gateway carries one request from its arrival to its terminal outcome:
// HTTP in, HTTP out.
//
// It owns sockets, goroutines and time, and little judgement: what a failure
// means and whether another attempt may follow is internal/attempt's to say,
// which endpoint is tried is internal/schedule's, and what the bytes mean is a
// dialect's. The gateway feeds them what happened and carries out, in order,
// what they decide. It never writes a byte of an answer except through the
// request's attempt.Gate.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/auth"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/control"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/anthropic"
	"github.com/headgate/headgate/internal/dialect/openai"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/rate"
	"github.com/headgate/headgate/internal/route"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/waker"
)

// Bounds that no setting changes.
const (
	headerBytesMax  = 64 << 10  // a request's header, past it 431
	preambleMax     = 64 << 10  // held back before the first output, past it the answer is committed
	collectTotalMax = 512 << 20 // all collected answers together, past it they are committed early
	settleTime      = time.Second
	memoryRecords   = 1024 // of a journal in memory
)

// dialects are the inference paths that are served, by path.
var dialects = map[string]dialect.Dialect{
	chatPath:                    openai.Chat,
	"/v1/completions":           openai.Completions,
	"/v1/responses":             openai.Responses,
	"/v1/embeddings":            openai.Embeddings,
	"/v1/rerank":                openai.Rerank,
	"/v1/score":                 openai.Score,
	"/v1/audio/speech":          openai.Speech,
	"/v1/audio/transcriptions":  openai.Transcriptions,
	"/v1/audio/translations":    openai.Transcriptions,
	"/tokenize":                 openai.Tokenize,
	"/detokenize":               openai.Detokenize,
	"/v1/messages":              anthropic.Messages,
	"/v1/messages/count_tokens": anthropic.CountTokens,
}

// dialectAt is the dialect in which to speak at a path, served or not.
func dialectAt(path string) dialect.Dialect {
	if d := dialects[path]; d != nil {
		return d
	}
	return openai.Chat
}

// Config is what a Gateway is made from. Only Config is required.
type Config struct {
	Config   *config.Config
	Log      *slog.Logger // default: discards
	Recorder Recorder     // default: records nothing

	// Journal remembers requests. The caller closes it, after Drain. Default:
	// one in memory, which refuses Idempotency-Keys.
	Journal *journal.Journal

	// Routing makes what a pool's endpoints are chosen by, one for each pool; a nil
	// profile is least load, and so is a nil Routing.
	Routing func(config.Routing) (*schedule.Profile, error)

	// Trace gets a line for every event and effect of every request, in the
	// form of internal/attempt/trace, while the request waits. Default: none.
	Trace io.Writer
}

// Gateway serves inference requests. Make one with New.
type Gateway struct {
	log     *slog.Logger
	record  Recorder
	tracer  *tracer // nil traces nothing
	routing func(config.Routing) (*schedule.Profile, error)
	state   atomic.Pointer[state]

	self       lease.Gateway
	lines      lines
	journal    *journal.Journal
	journalOwn bool // made here, closed here

	collected atomic.Int64 // bytes of answers held back, over all requests

	// mu guards draining together with the first increment of running: a
	// request is either seen by Drain or refused.
	mu       sync.Mutex
	draining bool
	retired  []*waker.Waker // of pools that left, or that have engines always
	running  sync.WaitGroup
	cut      context.Context // cancelled when draining has taken too long
	cutOff   context.CancelFunc
}

// state is what one configuration makes. It is immutable and swapped whole; a
// request keeps the one of its arrival.
type state struct {
	routes  *route.Table
	pools   map[string]*pool
	names   []string // of the pools, in order
	keys    *auth.Keys
	session config.Session

	allowances map[string]*rate.Allowance // by key
	objectives map[string]config.Objective
	routed     []string // the objectives of routes, in their order
}

// New makes a Gateway and begins to probe its endpoints. End it with Drain.
func New(c Config) (*Gateway, error) {
	began := time.Now()
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Recorder == nil {
		c.Recorder = discard{}
	}
	g := &Gateway{log: c.Log, record: c.Recorder, tracer: newTracer(c.Trace), routing: c.Routing, journal: c.Journal, journalOwn: c.Journal == nil}
	g.cut, g.cutOff = context.WithCancel(context.Background())
	g.state.Store(&state{})
	if g.journalOwn {
		var err error
		g.journal, err = journal.Open(context.Background(), journal.Config{
			Store: journal.NewMemory(memoryRecords), Gateway: c.Config.Gateway.ID, Durability: journal.Relaxed, Log: c.Log,
		})
		if err != nil {
			return nil, err
		}
	}
	g.self = lease.Gateway{ID: c.Config.Gateway.ID, Generation: g.journal.Generation()}
	if g.journalOwn || c.Config.Journal.Driver == config.DriverNone {
		g.self.Generation = uint64(began.UnixNano()) // a memory that a restart empties can't count lives
	}
	if err := g.Reload(c.Config); err != nil {
		if g.journalOwn {
			_ = g.journal.Close() // the first error says more
		}
		return nil, err
	}
	g.inherit(began)
	return g, nil
}

// Reload puts another configuration's routes, pools and keys in force. Requests
// under way keep the policy that they arrived under. A pool of the same name
// keeps its endpoints' connections and records, and endpoints that were
// discovered stay until SetEndpoints says otherwise. On an error nothing has
// changed.
//
// It is called by one goroutine at a time.
func (g *Gateway) Reload(c *config.Config) error {
	routes, err := c.Table()
	if err != nil {
		return err
	}
	keys, err := c.AuthKeys()
	if err != nil {
		return err
	}
	old, next := g.state.Load(), &state{session: c.Session, routes: routes, pools: map[string]*pool{}, names: c.PoolNames(), keys: keys, objectives: c.Objectives, routed: routedObjectives(c.Routes)}
	for _, name := range c.PoolNames() {
		m, before := newMembers(g, name), chosenBy{}
		if p := old.pools[name]; p != nil {
			m, before = p.members, p.chosenBy
		}
		if next.pools[name], err = newPool(name, c.Pools[name], m); err != nil {
			return err
		}
		if next.pools[name].chosenBy, err = before.or(c.Pools[name].Routing, g.routing); err != nil {
			return fmt.Errorf("pool %s: routing: %w", name, err)
		}
	}
	for name, p := range next.pools {
		p.configure(c.Pools[name])
		set := func() error { return p.set(c.Pools[name].Endpoints(), &p.reach) }
		if c.Pools[name].Discovers() && old.pools[name] != nil {
			set = func() error { return p.setReach(&p.reach) } // SetEndpoints may be under way
		}
		if err := set(); err != nil {
			return err
		}
	}
	for name, p := range next.pools {
		p.wakeBy(name, c.Pools[name].Flow.ScaleFromZero)
	}
	next.allowances = allowances(time.Now(), c.RateLimits(), old.allowances)
	g.state.Store(next)
	for name, p := range old.pools {
		if next.pools[name] == nil {
			p.delete()
			p.endQueue(inference.NoEndpoints)
			p.putToBed(p.sleep.waker.Swap(nil))
		}
	}
	return nil
}

// SetEndpoints gives a pool the endpoints that were discovered for it. It may be
// called beside Reload.
func (g *Gateway) SetEndpoints(name string, list []inference.Endpoint) {
	p := g.state.Load().pools[name]
	if p == nil {
		return // deleted meanwhile
	}
	if err := p.set(list, nil); err != nil {
		g.log.Error("discovered endpoints are unusable", "pool", name, "error", err)
	}
}

// errDraining is the cause of exchanges that Drain cut off.
var errDraining = errors.New("gateway is shutting down")

// Ready reports whether requests are accepted and can be served: not while
// draining, while the journal fails that every request needs, or while nothing
// can be reached at any endpoint and no pool waits for one: where nobody sends
// requests, nothing wakes it.
func (g *Gateway) Ready() bool {
	g.mu.Lock()
	draining := g.draining
	g.mu.Unlock()
	if draining || !g.journal.Serves() {
		return false
	}
	for _, pool := range g.Status() {
		if pool.Sleeps {
			return true
		}
		for _, s := range pool.Endpoints {
			if s.Health != inference.Gone && s.Fenceable {
				return true
			}
		}
	}
	return false
}

// Drain refuses new requests and waits for the running ones. When ctx is done
// it cuts those off, each with an error its client can read, and returns once
// all have ended.
func (g *Gateway) Drain(ctx context.Context) {
	g.mu.Lock()
	g.draining = true
	g.mu.Unlock()
	for _, p := range g.state.Load().pools {
		p.endQueue(inference.ShuttingDown)
	}

	done := make(chan struct{})
	go func() {
		g.running.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		g.cutOff()
		<-done
	}
	g.cutOff()
	for _, p := range g.state.Load().pools {
		p.close()
	}
	g.mu.Lock()
	retired := g.retired
	g.mu.Unlock()
	for _, w := range retired {
		w.Close()
	}
	g.lines.close()
	if g.journalOwn {
		_ = g.journal.Close() // nothing that is left in memory matters now
	}
}

// PoolStatus is one pool's endpoints as its book sees them, and its queue.
type PoolStatus struct {
	Pool      string
	Endpoints []schedule.Status
	Leaving   []schedule.Leaving
	Guards    map[inference.EndpointID]control.Status // of those that have one
	Metrics   map[inference.EndpointID]Metrics
	Queue     flow.Status

	Sleeps bool // it may be without engines, and requests wait for one then
	Wanted bool // requests wait for one now
}

// Revisions are the model revisions that the endpoints are known to serve, sorted.
// More than one is a mixture: a repeated request may get another model.
func (s PoolStatus) Revisions() []string {
	var all []string
	for _, e := range s.Endpoints {
		if e.Revision != "" {
			all = append(all, e.Revision)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Status lists the pools by their names.
func (g *Gateway) Status() []PoolStatus {
	now := time.Now()
	state := g.state.Load()
	list := make([]PoolStatus, 0, len(state.names))
	for _, name := range state.names {
		p := state.pools[name]
		set := p.now.Load()
		status := PoolStatus{
			Pool: name, Endpoints: p.book.Status(now, set.fleet), Leaving: p.book.Leaving(), Queue: p.queueStatus(),
			Guards: map[inference.EndpointID]control.Status{}, Metrics: map[inference.EndpointID]Metrics{},
			Sleeps: p.sleep.awaits(), Wanted: p.sleep.waker.Load().Wanted(),
		}
		for id, e := range set.engines {
			status.Metrics[id] = e.scraped.metrics()
			if e.line != nil {
				status.Guards[id] = e.line.Status()
			}
		}
		list = append(list, status)
	}
	return list
}

// begin counts a request in, unless the gateway is draining.
func (g *Gateway) begin() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.draining {
		return false
	}
	g.running.Add(1)
	return true
}

// Serve answers one exchange. It returns when the answer is over.
func (g *Gateway) Serve(ex Exchange) {
	head := ex.Head()
	id := newRequestID()
	switch {
	case head.Path == "/healthz":
		writeText(ex, http.StatusOK, "ok\n")
		return
	case head.Path == "/readyz":
		if !g.Ready() {
			writeText(ex, http.StatusServiceUnavailable, "not ready\n")
			return
		}
		writeText(ex, http.StatusOK, "ready\n")
		return
	}
	if !g.begin() {
		g.refuse(ex, id, dialectAt(head.Path), inference.Errorf(inference.ShuttingDown, "the gateway is shutting down"))
		return
	}
	defer g.running.Done()

	d, err := g.dialectOf(head)
	switch {
	case err != nil:
		g.refuse(ex, id, dialectAt(head.Path), err)
	case d != nil:
		g.serveInference(ex, id, d)
	case strings.HasPrefix(head.Path, requestsPath):
		g.serveRecord(ex, id)
	default:
		g.serveModels(ex, id)
	}
}

func (g *Gateway) serveInference(ex Exchange, id inference.RequestID, d dialect.Dialect) {
	m := &metered{Exchange: ex}
	defer m.void()
	a, err := g.admit(m, id, d)
	if err != nil {
		g.refuse(m, id, d, err)
		return
	}
	f, err := g.open(a)
	if err != nil {
		g.refuse(m, a.id, d, err)
		return
	}
	if f != nil {
		f.run()
	}
}

// dialectOf returns the dialect of an inference path, or nil for what the
// gateway knows itself.
func (g *Gateway) dialectOf(head *Head) (dialect.Dialect, *inference.Error) {
	want := http.MethodPost
	d := dialects[head.Path]
	switch {
	case d != nil:
	case head.Path == modelsPath, strings.HasPrefix(head.Path, modelsPath+"/"), strings.HasPrefix(head.Path, requestsPath):
		want = http.MethodGet
	default:
		return nil, inference.Errorf(inference.NotFound, "nothing is served at this path")
	}
	if head.Method != want {
		err := inference.Errorf(inference.MethodNotAllowed, "this path takes %s", want)
		err.Allow = want
		return nil, err
	}
	return d, nil
}

// entropy draws the random half of request ids. ulid's own default locks a
// global; rand.Uint64 does not.
type entropy struct{}

func (entropy) Read(p []byte) (int, error) {
	for i := 0; i < len(p); {
		for v, k := rand.Uint64(), 0; k < 8 && i < len(p); k, i = k+1, i+1 {
			p[i] = byte(v >> (8 * k))
		}
	}
	return len(p), nil
}

func newRequestID() inference.RequestID {
	return inference.RequestID("req_" + ulid.MustNew(ulid.Now(), entropy{}).String())
}
