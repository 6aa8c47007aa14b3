// SPDX-License-Identifier: Apache-2.0

// Package waker gets engines for a pool that has none, and lets them go.
//
// internal/wake decides when; a Waker is the goroutine that looks at its pool,
// and tells a webhook, runs a command, or starts and stops an engine itself. It
// refuses to know endpoints, health and queues, which the Pool that it is given
// does. The gateway makes one for each pool with scale_from_zero.
package waker

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/process"
	"github.com/headgate/headgate/internal/upstream"
	"github.com/headgate/headgate/internal/wake"
)

// Events, as webhooks, commands and metrics name them.
const (
	EventWake    = "wake"
	EventRelease = "release"
)

// commandTime bounds a command.
const commandTime = 30 * time.Second

// modelBytesMax bounds the name of a model in what is told.
const modelBytesMax = 256

// retiredLook is how often it is looked whether a pool that left is idle.
const retiredLook = time.Second

// Pool is whose engines are woken. Its methods are called from the Waker's
// goroutine.
type Pool interface {
	View() wake.View

	// Shut keeps requests away from the endpoints. It reports false, and does
	// nothing, if one waits or runs.
	Shut() bool

	// Gone tells that the engine that was started has ended. Its endpoint gets
	// nothing until it is found healthy, and is not shut any more.
	Gone()
}

// Config is what a Waker is made from. Only Record may be nil.
type Config struct {
	Name    string // of the pool
	Gateway string
	Pool    Pool
	Log     *slog.Logger
	Record  func(event string, ok bool) // takes what was done
}

// Waker is the goroutine of one pool. Make it with New, end it with Close. A nil
// Waker takes all calls and does nothing.
type Waker struct {
	config Config
	look   chan struct{}
	stop   context.CancelFunc
	done   chan struct{}
	model  atomic.Pointer[string]
	wanted atomic.Bool

	mu      sync.Mutex // guards what is below
	scale   config.ScaleFromZero
	retired bool

	// These are the goroutine's own.
	pool   wake.Pool
	engine *process.Process // that was started and has not ended
}

// New starts a Waker.
func New(c Config, scale config.ScaleFromZero) *Waker {
	ctx, stop := context.WithCancel(context.Background())
	w := &Waker{config: c, scale: scale, look: make(chan struct{}, 1), stop: stop, done: make(chan struct{})}
	go w.run(ctx)
	return w
}

// Configure puts other settings in force. An engine that runs goes on, whatever
// command would start it now.
func (w *Waker) Configure(scale config.ScaleFromZero) {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.scale = scale
	w.mu.Unlock()
	w.Look()
}

// Retire ends the Waker as soon as no request needs the engine that it started.
func (w *Waker) Retire() {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.retired = true
	w.mu.Unlock()
	w.Look()
}

// Ended reports whether nothing of a retired Waker is left.
func (w *Waker) Ended() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// Close ends the Waker, and the engine that it started.
func (w *Waker) Close() {
	if w == nil {
		return
	}
	w.stop()
	<-w.done
}

// Waits tells that a request for a model has begun to wait.
func (w *Waker) Waits(model string) {
	if w == nil {
		return
	}
	w.model.Store(&model)
	w.Look()
}

// Look tells that something has changed in the pool.
func (w *Waker) Look() {
	if w == nil {
		return
	}
	select {
	case w.look <- struct{}{}:
	default: // it is about to look
	}
}

// Wanted reports whether requests wait for an engine.
func (w *Waker) Wanted() bool { return w != nil && w.wanted.Load() }

func (w *Waker) run(ctx context.Context) {
	defer close(w.done)
	defer func() { w.end(w.settings()) }()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var exited <-chan struct{}
		if w.engine != nil {
			exited = w.engine.Exited()
		}
		select {
		case <-ctx.Done():
			return
		case <-w.look:
		case <-timer.C:
		case <-exited:
			w.crashed()
		}
		next := w.turn(ctx)
		if w.engine == nil && w.isRetired() {
			return
		}
		if next > 0 {
			timer.Reset(next)
		}
	}
}

// turn does what is to be done now. It returns when to look again, 0 for when
// something happens.
func (w *Waker) turn(ctx context.Context) time.Duration {
	for ctx.Err() == nil {
		scale, view := w.settings(), w.config.Pool.View()
		now := time.Now()
		w.pool.Configure(scale.Idle())
		action, next := w.pool.Look(now, view)
		if w.isRetired() {
			action, next = wake.Nothing, now.Add(retiredLook)
			if w.engine == nil {
				return 0
			}
			if view.Waiting+view.Running == 0 {
				action = wake.Release
			}
		}
		w.wanted.Store(w.pool.Wanted() && !w.isRetired())
		switch {
		case action != wake.Nothing:
			w.pool.Done(time.Now(), action, w.do(ctx, action, scale, view.Waiting))
		case next.IsZero():
			return 0
		default:
			return max(next.Sub(now), time.Millisecond)
		}
	}
	return 0
}

func (w *Waker) settings() config.ScaleFromZero {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.scale
}

func (w *Waker) isRetired() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.retired
}

// notice is what webhooks are sent.
type notice struct {
	Event   string `json:"event"`
	Pool    string `json:"pool"`
	Model   string `json:"model"` // of the request that began to wait last
	Waiting int    `json:"waiting"`
	Gateway string `json:"gateway"`
}

func (n notice) env() []string {
	return []string{
		"HEADGATE_EVENT=" + n.Event, "HEADGATE_POOL=" + n.Pool, "HEADGATE_MODEL=" + n.Model,
		"HEADGATE_WAITING=" + strconv.Itoa(n.Waiting), "HEADGATE_GATEWAY=" + n.Gateway,
	}
}

// clean makes a client's word fit for an environment, which can't hold a NUL.
func clean(model string) string {
	model = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return -1
		}
		return r
	}, strings.ToValidUTF8(model, ""))
	return strings.ToValidUTF8(model[:min(len(model), modelBytesMax)], "")
}

// do carries out an action and reports whether it went well.
func (w *Waker) do(ctx context.Context, action wake.Action, scale config.ScaleFromZero, waiting int) bool {
	if action == wake.Ask && len(scale.Start.Command) > 0 && w.engine != nil {
		return true // it starts, and nobody has forgotten that
	}
	n := notice{Event: EventWake, Pool: w.config.Name, Waiting: waiting, Gateway: w.config.Gateway}
	if model := w.model.Load(); model != nil {
		n.Model = clean(*model)
	}
	if action == wake.Release {
		n.Event = EventRelease
		if w.engine != nil {
			if !w.config.Pool.Shut() {
				return false // a request has come
			}
			w.end(scale)
			w.config.Pool.Gone()
		}
	}
	err := w.tell(ctx, n, scale)
	if ctx.Err() != nil {
		return false
	}
	if w.config.Record != nil {
		w.config.Record(n.Event, err == nil)
	}
	switch {
	case err != nil:
		w.config.Log.Error("engines were neither got nor let go", "pool", n.Pool, "event", n.Event, "waiting", waiting, "error", err)
	case action == wake.Release:
		w.config.Log.Info("engines are let go", "pool", n.Pool)
	default:
		w.config.Log.Info("engines are asked for", "pool", n.Pool, "waiting", waiting, "model", n.Model)
	}
	return err == nil
}

func (w *Waker) tell(ctx context.Context, n notice, scale config.ScaleFromZero) error {
	switch {
	case scale.Webhook.URL != "":
		ctx, cancel := context.WithTimeout(ctx, time.Duration(scale.Webhook.Timeout))
		defer cancel()
		return post(ctx, n, scale.Webhook)
	case len(scale.Command) > 0:
		ctx, cancel := context.WithTimeout(ctx, commandTime)
		defer cancel()
		if output, err := process.Run(ctx, scale.Command, n.env()...); err != nil {
			return fmt.Errorf("command: %w: %q", err, output)
		}
	case len(scale.Start.Command) > 0 && n.Event == EventWake:
		engine, err := process.Start(scale.Start.Command, n.env()...)
		if err != nil {
			return fmt.Errorf("start: %w", err)
		}
		w.engine = engine
	}
	return nil
}

// post sends a notice to a webhook.
func post(ctx context.Context, n notice, hook config.Webhook) error {
	server, target, err := hook.URL.Target()
	if err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	header := []upstream.Field{{Name: "Content-Type", Value: "application/json"}}
	switch bearer, err := hook.Bearer(); {
	case err != nil:
		return fmt.Errorf("webhook: bearer_file: %w", err)
	case !bearer.IsZero():
		header = append(header, upstream.Field{Name: "Authorization", Value: "Bearer " + bearer.Reveal()})
	}
	body, err := json.Marshal(n)
	if err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	conn, err := upstream.New(upstream.Config{URL: server, ConnectTimeout: time.Duration(hook.Timeout), IdleMax: -1})
	if err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	defer conn.Close()
	res, end := conn.Do(ctx, &upstream.Request{Method: http.MethodPost, Target: target, Header: header, Body: [][]byte{body}})
	if end != nil {
		return fmt.Errorf("webhook: %w", end)
	}
	_ = res.Close() // the status is all there is to know
	if res.Status < 200 || res.Status > 299 {
		return fmt.Errorf("webhook: status %d", res.Status)
	}
	return nil
}

// end stops the engine that was started, if there is one.
func (w *Waker) end(scale config.ScaleFromZero) {
	if w.engine != nil {
		w.engine.Stop(time.Duration(scale.Start.StopTimeout))
		w.engine = nil
	}
}

// crashed notes that the engine has ended by itself.
func (w *Waker) crashed() {
	w.config.Log.Error("the engine that was started has exited", "pool", w.config.Name, "code", w.engine.Code())
	w.engine = nil
	w.pool.Failed(time.Now())
	w.config.Pool.Gone()
}
