// SPDX-License-Identifier: Apache-2.0

// Package simengine is an LLM engine on sockets that is not one: the OpenAI
// API and vLLM's metrics in front of the arithmetic of simengine/model, with
// faults that strike at an exact byte and a log of what really happened.
//
// It is used by tests, the demo, the benchmarks and `headgate sim`. Because
// tests judge the gateway by it, it shares no code with the gateway: it writes
// its own HTTP/1.1 answers byte by byte and imports neither dialect, attempt
// nor gateway. It refuses to be realistic in text: token 17 of attempt 1 on
// engine A reads "A1·17 ", so that a splice, a duplicate or a gap shows.
package simengine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/headgate/headgate/internal/simengine/model"
)

// Config describes one engine. The zero value of every field but Name is
// usable.
type Config struct {
	// Name is the engine's in token texts and the log, e.g. "A". It is not
	// empty and holds no "·", control or JSON special character.
	Name string
	// Models are the base models served; the first is the default. None means
	// "sim".
	Models []string
	// Adapters are LoRA adapters, served by their names as further models.
	Adapters []string
	// Params is the speed and size of the engine. The zero value is
	// model.Instant.
	Params model.Params
	// Speed is how many seconds of the model pass per real second; 0 means 1.
	Speed float64
	// Tokens is how long an answer is that names no max_tokens; 0 means 16.
	Tokens int

	// Faults are scripts for the first requests, one each, as in Inject.
	Faults []string
	// Tool is called when the engine itself executes a tool in the middle of an
	// answer. nil: it executes none.
	Tool func(context.Context, ToolCall) error
	// IdleTimeout closes a kept-alive connection that is silent for so long
	// between two requests; 0 means never.
	IdleTimeout time.Duration
	// OnExit is called, in a goroutine of its own, after Kill by a fault or by
	// POST /sim/exit: a process exits here, so that its engine dies with it.
	OnExit func()

	// Log gets every entry of the event log as a JSON line. It is written to
	// under a lock and should not block.
	Log io.Writer
	// LogEntries is how many entries Log() retains; the oldest are dropped.
	// 0 means 65536.
	LogEntries int
	// QuietTokens leaves the token entries out of the log, for benchmarks.
	QuietTokens bool
	// FaultScripts bounds the fault queue; Inject refuses more. 0 means 4096.
	FaultScripts int
	// BodyBytes bounds a request body; a longer one is answered 413. 0 means
	// 64 MiB.
	BodyBytes int64
	// RequestsSeen bounds the memory of request ids that numbers attempts; the
	// oldest id is forgotten. 0 means 65536.
	RequestsSeen int
}

// A ToolCall is a tool executed by the engine itself in the middle of an
// answer.
type ToolCall struct {
	Engine  string
	Request string // X-Request-Id
	Attempt int
	Index   int         // ordinal of the call in the answer, from 0
	Name    string      // tool
	Args    string      // JSON
	Header  http.Header // of the request: lease and key headers are here
}

// Engine is one simulated engine. It may die (Kill) and come back (Restart) as
// a new incarnation; log and fault queue stay.
type Engine struct {
	cfg     Config
	log     *eventLog
	faults  faultQueue
	network string
	addr    string

	mu     sync.Mutex // guards what follows; taken before life.mu
	life   *life
	seen   seenRequests
	frozen string // the metrics page that is served whatever happens; "": the true one
}

// Start serves on ln, which the engine owns from here on.
func Start(ln net.Listener, cfg Config) (*Engine, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		_ = ln.Close()
		return nil, err
	}
	e := &Engine{
		cfg:     cfg,
		log:     newEventLog(cfg.LogEntries, cfg.Log),
		faults:  faultQueue{max: cfg.FaultScripts},
		network: ln.Addr().Network(),
		addr:    ln.Addr().String(),
		seen:    seenRequests{max: cfg.RequestsSeen, times: make(map[string]int)},
	}
	e.life = startLife(e, ln, 1)
	if err := e.Inject(cfg.Faults...); err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// Listen is Start on a free port of the loopback interface.
func Listen(cfg Config) (*Engine, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	return Start(ln, cfg)
}

func (c Config) withDefaults() (Config, error) {
	var errs []error
	if c.Name == "" || strings.ContainsAny(c.Name, "·\"\\;:,") || strings.ContainsFunc(c.Name, func(r rune) bool { return r <= ' ' }) {
		errs = append(errs, fmt.Errorf("name %q: empty, or a character the log or the fault grammar uses", c.Name))
	}
	if err := c.Params.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("params: %w", err))
	}
	if c.Speed < 0 || c.Tokens < 0 {
		errs = append(errs, errors.New("speed and tokens cannot be negative"))
	}
	if c.Params == (model.Params{}) {
		c.Params = model.Instant
	}
	if len(c.Adapters) > 0 && c.Params.AdapterSlots == 0 {
		errs = append(errs, errors.New("adapters need params with adapter slots"))
	}
	if len(c.Models) == 0 {
		c.Models = []string{"sim"}
	}
	c.Speed = cmp.Or(c.Speed, 1)
	c.Tokens = cmp.Or(c.Tokens, 16)
	c.LogEntries = cmp.Or(c.LogEntries, 1<<16)
	c.FaultScripts = cmp.Or(c.FaultScripts, 4096)
	c.BodyBytes = cmp.Or(c.BodyBytes, 64<<20)
	c.RequestsSeen = cmp.Or(c.RequestsSeen, 1<<16)
	if c.LogEntries < 0 || c.FaultScripts < 0 || c.BodyBytes < 0 || c.RequestsSeen < 0 {
		errs = append(errs, errors.New("a bound cannot be negative"))
	}
	return c, errors.Join(errs...)
}

// URL is the base URL, without a trailing slash.
func (e *Engine) URL() string { return "http://" + e.addr }

// Addr is host:port.
func (e *Engine) Addr() string { return e.addr }

// Incarnation is 1, and one more after each Restart.
func (e *Engine) Incarnation() int { return e.current().n }

// Snapshot is the state of the model.
func (e *Engine) Snapshot() model.Snapshot { return e.current().snapshot() }

func (e *Engine) current() *life {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.life
}

// Inject queues one script per text, each for the next request (or connection)
// that its conditions match and no earlier script takes. A fault at "listen"
// strikes at once.
func (e *Engine) Inject(texts ...string) error {
	for _, text := range texts {
		script, err := ParseFaults(text)
		if err != nil {
			return err
		}
		var queued []Fault
		for _, f := range script {
			switch {
			case f.Point.Name != "listen":
				queued = append(queued, f)
			case f.Engine == "" || f.Engine == e.cfg.Name:
				e.current().refuse(f)
			}
		}
		if len(queued) == 0 {
			continue
		}
		if err := e.faults.push(queued); err != nil {
			return err
		}
	}
	return nil
}

// FaultsLeft is how many scripts wait in the queue.
func (e *Engine) FaultsLeft() int { return e.faults.len() }

// FreezeMetrics has the metrics page stay as it is, in this life and the next, as
// where an API server outlives the engine behind it. Reset ends it.
func (e *Engine) FreezeMetrics() {
	page := e.current().metricsText()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.frozen = page
}

func (e *Engine) frozenMetrics() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.frozen
}

// Reset empties the fault queue, the log and the memory of request ids, and
// resumes a paused engine and frozen metrics. Requests in flight go on.
func (e *Engine) Reset() {
	e.faults.reset()
	e.log.reset()
	e.mu.Lock()
	e.seen = seenRequests{max: e.cfg.RequestsSeen, times: make(map[string]int)}
	e.frozen = ""
	l := e.life
	e.mu.Unlock()
	l.pause(false)
}

// Pause stops the engine as SIGSTOP would: connections are accepted by the
// kernel and nothing is read, computed or written. Only /sim/ answers.
func (e *Engine) Pause() { e.current().pause(true) }

// Resume ends Pause. The model's clock stood still meanwhile.
func (e *Engine) Resume() { e.current().pause(false) }

// Kill is the sudden death of the engine: the listener is closed and every
// connection is reset. It does not wait, and may be called from anywhere.
func (e *Engine) Kill() { e.current().end(EventExit) }

// Close ends the engine and waits until all its goroutines are gone. Open
// connections are closed, their requests aborted.
func (e *Engine) Close() {
	l := e.current()
	l.end(EventStopped)
	l.wait()
}

// Restart brings a dead engine back as the next incarnation, with an empty
// cache, on ln or, if that is nil, on the address it had. It waits for the old
// incarnation's goroutines.
func (e *Engine) Restart(ln net.Listener) error {
	old := e.current()
	if !old.dead() {
		return errors.New("simengine: the engine lives; kill it first")
	}
	old.wait()
	if ln == nil {
		var err error
		if ln, err = net.Listen(e.network, e.addr); err != nil {
			return err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.life = startLife(e, ln, old.n+1)
	return nil
}

// exit is Kill from inside: by a fault or the admin API.
func (e *Engine) exit(l *life) {
	if l.end(EventExit) && e.cfg.OnExit != nil {
		go e.cfg.OnExit()
	}
}

// meet counts a request id and returns how often it was seen, this time
// included.
func (e *Engine) meet(request string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.seen.add(request)
}

// seenRequests counts request ids, forgetting the oldest id when full.
type seenRequests struct {
	max   int
	times map[string]int
	order []string
}

func (s *seenRequests) add(request string) int {
	if request == "" {
		return 1
	}
	if s.times[request] == 0 {
		if len(s.order) >= s.max {
			delete(s.times, s.order[0])
			s.order = s.order[1:]
		}
		s.order = append(s.order, request)
	}
	s.times[request]++
	return s.times[request]
}
