// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
	kind "github.com/headgate/headgate/internal/engine"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/scrape"
	"github.com/headgate/headgate/internal/upstream"
)

// scraping is how a pool's engines are asked for their metrics.
type scraping struct {
	scrape.Config
	port int // 0: the engine's own
}

func newScraping(c config.Pool) scraping {
	of, _ := kind.ParseKind(c.Engine)
	return scraping{
		Config: scrape.Config{
			Kind: of, Names: c.Scrape.Metrics.Names(), Path: c.Scrape.Path,
			Interval: time.Duration(c.Scrape.Interval), Timeout: time.Duration(c.Scrape.Timeout),
		},
		port: c.Scrape.Port,
	}
}

// staleAfter is the age at which a metric is no longer believed: always longer
// than the time between two scrapes, or healthy engines would look stale.
func staleAfter(interval time.Duration) time.Duration { return max(3*interval, time.Second) }

// connect makes the connections for the metrics of an engine. They are not those
// of requests, which would otherwise wait for each other's sockets.
func (s scraping) connect(engine *url.URL) (*upstream.Pool, error) {
	u := *engine
	if s.port != 0 {
		u.Host = net.JoinHostPort(u.Hostname(), strconv.Itoa(s.port))
	}
	return upstream.New(upstream.Config{URL: &u, ConnectTimeout: s.Timeout, IdleMax: 1})
}

// scraped is what is known of the metrics of one engine beside their values,
// which are in the book.
type scraped struct {
	kind     atomic.Int32
	failures atomic.Uint64
	err      atomic.Pointer[string] // of the last scrape, nil if it was good
}

// Metrics is how the scraping of an endpoint goes.
type Metrics struct {
	Engine   string // its kind: what it showed, or what was configured; "unknown" if neither
	Failures uint64 // scrapes that failed
	Error    string // of the last one, "" if it was good
}

func (s *scraped) metrics() Metrics {
	m := Metrics{Engine: kind.Kind(s.kind.Load()).String(), Failures: s.failures.Load()}
	if text := s.err.Load(); text != nil {
		m.Error = *text
	}
	return m
}

// listener takes what engines report to the book.
type listener struct {
	*members
	id     inference.EndpointID
	log    *slog.Logger
	engine *engine
	*scraped
}

// Asking implements scrape.Watcher.
func (l listener) Asking() { l.book.Asking(l.id) }

// Scraped implements scrape.Watcher.
func (l listener) Scraped(r scrape.Report) {
	read := &r.Reading
	if read.Kind != kind.Unknown {
		l.kind.Store(int32(read.Kind))
	}
	if r.Restarted {
		l.log.Info("engine was restarted: nothing of it counts as cached")
		l.book.Restarted(l.id)
		l.engine.relist()
	}
	if read.CacheTokens.Known {
		l.book.SetCache(l.id, int(read.CacheTokens.V))
	}
	if r.Err != nil {
		text := r.Err.Error()
		l.failures.Add(1)
		l.err.Store(&text)
		return
	}
	l.err.Store(nil)
	l.book.SetScraped(l.id, schedule.Scraped{
		At: r.At, Queued: read.Waiting, Running: read.Running, KVUsage: read.KVUsage, Done: read.Done,
		Adapters: read.Adapters, AdapterSlots: read.AdapterSlots,
	})
	l.pump()
}

// scrape asks an engine for its metrics until ctx is done.
func (m *members) scrape(ctx context.Context, id inference.EndpointID, e *engine, how *reach) {
	log := m.g.log.With("pool", m.now.Load().fleet.Name, "endpoint", string(id))
	err := scrape.Watch(ctx, e.metrics, how.scraping.Config, authorizationHeader(how.authorization), log, listener{m, id, log, e, &e.scraped})
	if err != nil {
		log.Error("engine's metrics are not asked for", "error", err)
	}
}
