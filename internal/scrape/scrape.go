// SPDX-License-Identifier: Apache-2.0

// Package scrape asks an engine for its metrics, again and again.
//
// It owns the clock, the connection and the patience of that: an interval with
// jitter, a limit on time and bytes, longer pauses while it fails, and few words
// in the log. What a page means is internal/engine's to say, and how old a value
// may get is internal/schedule's. It refuses to keep values, to ask anything of
// an engine that changes it, and to end by itself. internal/gateway runs one
// Watch for each endpoint.
package scrape

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/headgate/headgate/internal/engine"
	"github.com/headgate/headgate/internal/upstream"
)

// Config says how an engine is asked. It is comparable.
type Config struct {
	Kind     engine.Kind   // Unknown: found out
	Names    engine.Names  // looked for before those of the kind
	Path     string        // of the metrics; "": where the kind has them
	Interval time.Duration // between two questions; 0: none is asked
	Timeout  time.Duration // for one answer, connecting included
}

// Watcher is told what comes of it, from the goroutine of Watch.
type Watcher interface {
	// Asking: a question is about to be sent.
	Asking()
	// Scraped: it was answered, or not.
	Scraped(Report)
}

// Report is what one question came to.
type Report struct {
	At        time.Time      // when it was sent
	Reading   engine.Reading // with Err no more than its Kind
	Restarted bool           // another process than the last time answered
	Err       error
}

// Bounds that no setting changes.
const (
	backoffMax = 10 * time.Second // between questions to an engine that fails to answer
	logEvery   = 30 * time.Second // between lines about one engine
	propsEvery = time.Minute      // between questions for properties that were not to be had
	propsMax   = 1 << 20          // bytes of them
	chunk      = 32 << 10         // bytes read at a time
)

// Where engines have their metrics. trtllm-serve has JSON of its own at the
// usual place.
const (
	usualPath  = "/metrics"
	trtllmPath = "/prometheus/metrics"
	propsPath  = "/props" // of llama.cpp
)

func (c Config) paths() []string {
	switch {
	case c.Path != "":
		return []string{c.Path}
	case c.Kind == engine.TRTLLM:
		return []string{trtllmPath, usualPath}
	case c.Kind == engine.Unknown:
		return []string{usualPath, trtllmPath}
	}
	return []string{usualPath}
}

// Watch asks until ctx is done. header goes with each question. The error is of
// c.Names, and nothing was asked.
func Watch(ctx context.Context, conn *upstream.Pool, c Config, header []upstream.Field, log *slog.Logger, to Watcher) error {
	reader, err := engine.NewReader(c.Kind, c.Names)
	if err != nil {
		return err
	}
	w := &watch{
		conn: conn, config: c, reader: reader, paths: c.paths(), buffer: make([]byte, chunk), log: log,
		header: append(slices.Clip(slices.Clone(header)), upstream.Field{Name: "Accept", Value: "text/plain;version=0.0.4"}),
	}
	// Gateways and endpoints that start together are not to ask together.
	timer := time.NewTimer(rand.N(c.Interval))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		to.Asking()
		report := w.ask(ctx)
		if ctx.Err() != nil {
			return nil
		}
		to.Scraped(report)
		w.tell(report)
		pause := w.pause()
		timer.Reset(pause + rand.N(pause/10+1))
	}
}

type watch struct {
	conn   *upstream.Pool
	config Config
	header []upstream.Field
	reader *engine.Reader
	buffer []byte
	log    *slog.Logger

	paths    []string // the first is asked next
	failures int      // in a row
	last     engine.Reading
	props    engine.Reading // CacheTokens of it is what properties told
	propsAt  time.Time      // when they were asked for

	told   said // by the last line
	toldAt time.Time
}

// pause doubles with each failure in a row.
func (w *watch) pause() time.Duration {
	p := w.config.Interval
	for range w.failures {
		if p *= 2; p >= backoffMax {
			return max(backoffMax, w.config.Interval)
		}
	}
	return p
}

// ask asks once.
func (w *watch) ask(ctx context.Context) Report {
	at := time.Now()
	ctx, cancel := context.WithTimeout(ctx, w.config.Timeout)
	defer cancel()
	r := Report{At: at}
	if r.Reading, r.Err = w.fetch(ctx); r.Err != nil {
		w.failures++
		w.paths = append(w.paths[1:], w.paths[0])
		r.Reading.Kind = cmp.Or(r.Reading.Kind, w.config.Kind, w.last.Kind)
	} else {
		w.failures = 0
		r.Restarted = r.Reading.Restarted(&w.last)
	}
	if r.Reading.Kind == engine.LlamaCPP {
		w.askProps(ctx, &r)
	}
	if r.Err == nil {
		w.last = r.Reading
	}
	return r
}

func (w *watch) fetch(ctx context.Context) (engine.Reading, error) {
	res, err := w.get(ctx, w.paths[0])
	if err != nil {
		return engine.Reading{}, err
	}
	defer func() { _ = res.Close() }()
	head := engine.Head{Server: res.Header.Get("Server"), Boot: res.Header.Get("Process-Start-Time-Unix")}
	w.reader.Begin(head)
	if res.Status != http.StatusOK {
		return engine.Reading{Kind: engine.KindOfServer(head.Server)}, fmt.Errorf("%s answers with status %d", w.paths[0], res.Status)
	}
	if _, err := io.CopyBuffer(w.reader, onlyReader{res}, w.buffer); err != nil && !errors.Is(err, engine.ErrTooLarge) {
		return engine.Reading{}, err
	}
	return w.reader.End()
}

// onlyReader hides methods that io.CopyBuffer would prefer to the buffer.
type onlyReader struct{ io.Reader }

func (w *watch) get(ctx context.Context, path string) (*upstream.Response, error) {
	deadline, _ := ctx.Deadline()
	res, end := w.conn.Do(ctx, &upstream.Request{Method: http.MethodGet, Target: path, Header: w.header, HeadBy: deadline})
	if end != nil {
		return nil, end
	}
	return res, nil
}

// askProps adds what llama.cpp tells elsewhere: how much its KV memory holds. It
// stays the same while the process lives.
func (w *watch) askProps(ctx context.Context, r *Report) {
	again := r.Restarted || !w.props.CacheTokens.Known && r.At.Sub(w.propsAt) >= propsEvery
	if again {
		w.props, w.propsAt = engine.Reading{}, r.At
		if res, err := w.get(ctx, propsPath); err == nil {
			body, err := io.ReadAll(io.LimitReader(res, propsMax))
			if _ = res.Close(); err == nil && res.Status == http.StatusOK {
				w.props.CacheTokens = engine.PropsTokens(body)
			}
		}
	}
	r.Reading.CacheTokens = w.props.CacheTokens
}

// tell logs what is new, and not more than a line in logEvery. Of a failure it says
// nothing while there is another path to try.
func (w *watch) tell(r Report) {
	if r.Err != nil && w.failures < len(w.paths) {
		return
	}
	now := said{kind: r.Reading.Kind, failed: r.Err != nil, missing: strings.Join(r.Reading.Missing, ", ")}
	if now == w.told || !w.toldAt.IsZero() && r.At.Sub(w.toldAt) < logEvery {
		return
	}
	w.told, w.toldAt = now, r.At
	switch {
	case r.Err != nil:
		w.log.Warn("engine's metrics cannot be read", "kind", now.kind.String(), "error", r.Err)
	case now.missing != "":
		w.log.Warn("engine's metrics are incomplete", "kind", now.kind.String(), "missing", now.missing)
	default:
		w.log.Info("engine's metrics are read", "kind", now.kind.String())
	}
}

// said is what a line in the log says.
type said struct {
	kind    engine.Kind
	failed  bool
	missing string
}
