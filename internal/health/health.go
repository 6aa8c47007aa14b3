// SPDX-License-Identifier: Apache-2.0

// Package health asks engines whether they serve, beside what requests show by
// themselves.
//
// It owns the probes and the counting that turns them into a state. What a
// state means for routing is schedule's to decide, and for requests under way
// the gateway's.
package health

import (
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/upstream"
)

// Config says how an endpoint is probed.
type Config struct {
	Path     string        // of the probe; 2xx is healthy
	Interval time.Duration // between probes; 0: no probes
	Timeout  time.Duration // of a probe

	UnhealthyAfter int // bad probes in a row until a state changes, at least 1
	HealthyAfter   int // good ones until it is healthy again, at least 1

	// GenerateEvery is the time between real generations of one token, which
	// find an engine that is dead behind a live API. 0: none.
	GenerateEvery time.Duration

	// Starts: the engine may not be there yet. It counts as gone until it is healthy
	// for the first time, and again after nothing could be reached: one that starts
	// accepts connections long before it can serve. While it is gone it is probed
	// at least every startsEvery.
	Starts bool
}

// AtFirst is what an engine counts as before anything was seen of it.
func (c Config) AtFirst() inference.Health {
	if c.Starts {
		return inference.Gone
	}
	return inference.Healthy
}

// startsEvery is how often it is looked whether an engine is there.
const startsEvery = 500 * time.Millisecond

// Engine is who is probed. Conn is required.
type Engine struct {
	Conn   *upstream.Pool
	Header []upstream.Field // goes with each probe
	Permit Permit           // is asked before each generation; nil permits all

	// Lost tells, by each value, that somebody else found the engine gone. It is
	// probed at once, and what is seen then is reported, whatever was before.
	Lost <-chan struct{}
}

// generateTimeout bounds a generation: an engine under load is slow, not dead.
const generateTimeout = 30 * time.Second

// answerMax bounds what is read of a probe's answer.
const answerMax = 1 << 20

// Permit lets one generation pass what stands before an engine: header goes with
// it, and done is called after it. Where ok is false none may be made now.
type Permit func() (header []upstream.Field, done func(), ok bool)

// Probe probes an engine until ctx is done. report is called with each change of
// state, from this goroutine; for an engine that Starts with the first state too.
func Probe(ctx context.Context, e Engine, c Config, report func(inference.Health)) {
	p := prober{Engine: e, config: c, generateAt: time.Now().Add(c.GenerateEvery)}
	t := newTracker(c)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for known := !c.Starts; ; {
		select {
		case <-ctx.Done():
			return
		case <-e.Lost:
			t.lost()
			known = false
			timer.Reset(0)
			continue
		case <-timer.C:
		}
		// One that stops listens no more, and may still answer where it was asked
		// before.
		p.fresh = t.state == inference.Gone
		seen := p.look(ctx)
		if ctx.Err() != nil {
			return
		}
		if t.observe(seen) || !known {
			report(t.state)
		}
		known = true
		// A tenth of jitter keeps gateways that started together apart.
		interval := t.interval(c.Interval)
		timer.Reset(interval + time.Duration(rand.Int64N(int64(interval)/10+1)))
	}
}

type prober struct {
	Engine
	config     Config
	generateAt time.Time
	fresh      bool // by a new connection
}

// look probes once.
func (p *prober) look(ctx context.Context) inference.Health {
	state, _ := p.ask(ctx, p.config.Timeout, &upstream.Request{Method: http.MethodGet, Target: p.config.Path, Header: p.Header, Fresh: p.fresh})
	if state != inference.Healthy || p.config.GenerateEvery == 0 || time.Now().Before(p.generateAt) {
		return state
	}
	state = p.generate(ctx)
	if state == inference.Healthy {
		p.generateAt = time.Now().Add(p.config.GenerateEvery)
	}
	// After a bad one the next probe generates again: good looks at the API in
	// between must not hide it.
	return state
}

// generate has the engine compute one token. An engine that refuses to, because
// it serves no completions, is not unhealthy.
func (p *prober) generate(ctx context.Context) inference.Health {
	state, body := p.ask(ctx, p.config.Timeout, &upstream.Request{Method: http.MethodGet, Target: "/v1/models", Header: p.Header})
	model := gjson.GetBytes(body, "data.0.id").Str
	if state != inference.Healthy || model == "" {
		return state
	}
	request, err := json.Marshal(map[string]any{"model": model, "prompt": "1", "max_tokens": 1})
	if err != nil {
		return inference.Healthy // not reached: these values always encode
	}
	header := append(p.Header[:len(p.Header):len(p.Header)], upstream.Field{Name: "Content-Type", Value: "application/json"})
	if p.Permit != nil {
		more, done, ok := p.Permit()
		if !ok {
			return inference.Healthy // as far as can be told
		}
		defer done()
		header = append(header, more...)
	}
	state, _ = p.ask(ctx, generateTimeout, &upstream.Request{
		Method: http.MethodPost, Target: "/v1/completions", Body: [][]byte{request}, Header: header,
	})
	return state
}

func (p *prober) ask(ctx context.Context, limit time.Duration, req *upstream.Request) (inference.Health, []byte) {
	req.HeadBy = time.Now().Add(limit)
	res, end := p.Conn.Do(ctx, req)
	if end != nil {
		switch end.Cause {
		case upstream.Refused, upstream.DNSFailed, upstream.ConnectTimeout, upstream.NoRoute:
			return inference.Gone, nil
		}
		return inference.Unhealthy, nil
	}
	body, err := io.ReadAll(io.LimitReader(res, answerMax))
	_ = res.Close()
	if err != nil || res.Status >= 500 || res.Status >= 300 && req.Method == http.MethodGet && req.Target == p.config.Path {
		return inference.Unhealthy, nil
	}
	return inference.Healthy, body
}

// tracker turns single probes into a state, so that one lost packet changes
// nothing.
type tracker struct {
	unhealthyAfter, healthyAfter int
	starts                       bool

	state inference.Health
	last  inference.Health // of the probes in a row
	row   int
}

func newTracker(c Config) tracker {
	return tracker{
		unhealthyAfter: c.UnhealthyAfter, healthyAfter: c.HealthyAfter, starts: c.Starts,
		state: c.AtFirst(), last: c.AtFirst(),
	}
}

// lost notes that the engine is gone, as if it had been seen.
func (t *tracker) lost() { t.state, t.last, t.row = inference.Gone, inference.Gone, 0 }

// interval is the time until the next probe.
func (t *tracker) interval(usual time.Duration) time.Duration {
	if t.starts && t.state == inference.Gone {
		return min(usual, startsEvery)
	}
	return usual
}

// observe counts one probe and reports whether the state changed.
func (t *tracker) observe(seen inference.Health) bool {
	if t.starts && t.state == inference.Gone && seen == inference.Unhealthy {
		seen = inference.Gone // it is starting
	}
	// Unhealthy and gone add up to "not healthy"; the newest says which.
	if (seen == inference.Healthy) != (t.last == inference.Healthy) {
		t.row = 0
	}
	t.last = seen
	t.row++
	need := t.unhealthyAfter
	if seen == inference.Healthy {
		need = t.healthyAfter
	}
	if seen == t.state || t.row < need {
		return false
	}
	t.state = seen
	return true
}
