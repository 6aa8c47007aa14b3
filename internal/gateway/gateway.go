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
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/anthropic"
	"github.com/headgate/headgate/internal/dialect/openai"
	"github.com/headgate/headgate/internal/route"
	"github.com/headgate/headgate/internal/schedule"
)

// Bounds that no setting changes.
const (
	headerBytesMax  = 64 << 10  // a request's header, past it 431
	preambleMax     = 64 << 10  // held back before the first output, past it the answer is committed
	collectTotalMax = 512 << 20 // all collected answers together, past it they are committed early
	settleTime      = time.Second
)

// dialects are the inference paths that are served, by path.
var dialects = map[string]dialect.Dialect{
	"/v1/chat/completions":      openai.Chat,
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
}

// Gateway serves inference requests. Make one with New.
type Gateway struct {
	log    *slog.Logger
	record Recorder
	routes *route.Table
	pools  map[string]*pool

	collected atomic.Int64 // bytes of answers held back, over all requests

	// mu guards draining together with the first increment of running: a
	// request is either seen by Drain or refused.
	mu       sync.Mutex
	draining bool
	running  sync.WaitGroup
	cut      context.Context // cancelled when draining has taken too long
	cutOff   context.CancelFunc
}

// New makes a Gateway. It opens no connection and starts nothing.
func New(c Config) (*Gateway, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Recorder == nil {
		c.Recorder = discard{}
	}
	routes, err := c.Config.Table()
	if err != nil {
		return nil, err
	}
	g := &Gateway{log: c.Log, record: c.Recorder, routes: routes, pools: map[string]*pool{}}
	g.cut, g.cutOff = context.WithCancel(context.Background())
	for _, name := range c.Config.PoolNames() {
		if g.pools[name], err = newPool(name, c.Config.Pools[name]); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// errDraining is the cause of exchanges that Drain cut off.
var errDraining = errors.New("gateway is shutting down")

// Ready reports whether requests are accepted.
func (g *Gateway) Ready() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.draining && len(g.pools) > 0
}

// Drain refuses new requests and waits for the running ones. When ctx is done
// it cuts those off, each with an error its client can read, and returns once
// all have ended.
func (g *Gateway) Drain(ctx context.Context) {
	g.mu.Lock()
	g.draining = true
	g.mu.Unlock()

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
	for _, p := range g.pools {
		p.close()
	}
}

// PoolStatus is one pool's endpoints as its book sees them.
type PoolStatus struct {
	Pool      string
	Endpoints []schedule.Status
}

// Status lists the pools, in no order.
func (g *Gateway) Status() []PoolStatus {
	now := time.Now()
	list := make([]PoolStatus, 0, len(g.pools))
	for name, p := range g.pools {
		list = append(list, PoolStatus{Pool: name, Endpoints: p.book.Status(now, p.fleet)})
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
	if err != nil {
		g.refuse(ex, id, dialectAt(head.Path), err)
		return
	}
	if d == nil {
		g.serveModels(ex, id)
		return
	}
	f, err := g.admit(ex, id, d)
	if err != nil {
		g.refuse(ex, id, d, err)
		return
	}
	f.run()
}

// dialectOf returns the dialect of an inference path, or nil for the model
// list.
func (g *Gateway) dialectOf(head *Head) (dialect.Dialect, *inference.Error) {
	want := http.MethodPost
	d := dialects[head.Path]
	switch {
	case d != nil:
	case head.Path == "/v1/models" || strings.HasPrefix(head.Path, "/v1/models/"):
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
