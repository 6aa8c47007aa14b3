// SPDX-License-Identifier: Apache-2.0

// Package lifecycle starts the parts of a gateway process in order and stops
// them in reverse: listeners last to open, first to refuse.
//
// It is the parts list that commands and end-to-end tests share. It refuses to
// read flags or files.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"sync"
	"time"

	"github.com/headgate/headgate/internal/admin"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/discovery"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/journal/sqlite"
	"github.com/headgate/headgate/internal/telemetry"
	"github.com/headgate/headgate/plugins/standard"
)

const (
	openTime      = 30 * time.Second // for the journal to open and close what a predecessor left
	memoryRecords = 10_000           // of a journal without a file
)

// Process is a running gateway. Make one with Start, end it with Stop.
type Process struct {
	log       *slog.Logger
	config    *config.Config
	drain     time.Duration
	gateway   *gateway.Gateway
	discovery *discovery.Pools
	journal   *journal.Journal

	addrs   map[string]net.Addr // of client listeners, by name
	servers []*gateway.Server
	admin   *http.Server
	adminAt net.Addr

	running sync.WaitGroup
	failed  chan error
}

// An Option is what a process is started with beyond its configuration.
type Option func(*gateway.Config)

// Trace writes what was decided for every request, and on what grounds, while
// the request waits: for tests and reports of bugs.
func Trace(w io.Writer) Option { return func(c *gateway.Config) { c.Trace = w } }

// Start opens every listener and serves. When one can't be opened nothing is
// left open.
func Start(c *config.Config, log *slog.Logger, version string, with ...Option) (*Process, error) {
	metrics := telemetry.New(version)
	j, err := openJournal(c, log)
	if err != nil {
		return nil, err
	}
	gc := gateway.Config{Config: c, Log: log, Recorder: metrics, Journal: j, Routing: Plugins(standard.Plugins).Profile}
	for _, option := range with {
		option(&gc)
	}
	g, err := gateway.New(gc)
	if err != nil {
		_ = j.Close() // the first error says more
		return nil, err
	}
	metrics.Watch(g.Status)
	metrics.WatchJournal(j.Status)
	p := &Process{
		log: log, config: c, drain: time.Duration(c.DrainTimeout), gateway: g, journal: j,
		discovery: discovery.New(discovery.Config{Update: g.SetEndpoints, Log: log}),
		addrs:     map[string]net.Addr{},
		failed:    make(chan error, len(c.Listeners)+1),
	}
	var opened []net.Listener
	abandon := func(err error) (*Process, error) {
		p.discovery.Close()
		g.Drain(context.Background())
		_ = j.Close()
		for _, l := range opened {
			l.Close()
		}
		return nil, err
	}
	for _, lc := range c.Listeners {
		s, err := g.NewServer(lc)
		if err != nil {
			return abandon(fmt.Errorf("listener %s: %w", lc.Name, err))
		}
		l, err := net.Listen("tcp", string(lc.Address))
		if err != nil {
			return abandon(fmt.Errorf("listener %s: %w", lc.Name, err))
		}
		opened = append(opened, l)
		p.servers = append(p.servers, s)
		p.addrs[lc.Name] = l.Addr()
	}
	var adminListener net.Listener
	if c.Admin.Address != "" {
		if adminListener, err = net.Listen("tcp", string(c.Admin.Address)); err != nil {
			return abandon(fmt.Errorf("admin listener: %w", err))
		}
		p.adminAt = adminListener.Addr()
		p.admin = admin.New(admin.Config{Gateway: g, Journal: j, Metrics: metrics.Handler(), Token: c.Admin.Token})
	}

	p.discovery.Reload(c.Pools)
	for i, s := range p.servers {
		p.run(func() error { return s.Serve(opened[i]) })
		log.Info("listening", "listener", c.Listeners[i].Name, "address", opened[i].Addr().String(), "tls", c.Listeners[i].Secure())
	}
	if p.admin != nil {
		p.run(func() error { return p.admin.Serve(adminListener) })
		log.Info("listening", "listener", "admin", "address", p.adminAt.String())
	}
	return p, nil
}

// openJournal opens the journal that the configuration names.
func openJournal(c *config.Config, log *slog.Logger) (*journal.Journal, error) {
	durability, _ := journal.ParseDurability(c.Journal.Durability) // validated
	jc := journal.Config{
		Gateway: c.Gateway.ID, Durability: durability, Retention: time.Duration(c.Journal.Retention),
		AnswerMax: int(c.Journal.Idempotency.MaxAnswer), Log: log,
	}
	ctx, cancel := context.WithTimeout(context.Background(), openTime)
	defer cancel()
	if c.Journal.Driver == config.DriverNone {
		jc.Store, jc.Durability = journal.NewMemory(memoryRecords), journal.Relaxed
		return journal.Open(ctx, jc)
	}
	store, err := sqlite.Open(ctx, string(c.Journal.DSN))
	if err != nil {
		return nil, err
	}
	jc.Store, jc.KeyTTL = store, c.Journal.KeyTTL()
	j, err := journal.Open(ctx, jc)
	if err != nil {
		_ = store.Close() // the first error says more
		return nil, err
	}
	return j, nil
}

func (p *Process) run(serve func() error) {
	p.running.Go(func() {
		if err := serve(); err != nil && !errors.Is(err, http.ErrServerClosed) {
			p.failed <- err
		}
	})
}

// Reload puts a changed configuration in force: routes, pools and keys. What
// only a restart can change is logged and left as it is. On an error nothing has
// changed. It is called by one goroutine at a time.
func (p *Process) Reload(c *config.Config) error {
	// An emptied file is far likelier a mistake than a wish to serve nobody.
	if len(c.Pools) == 0 {
		return errors.New("the new configuration has no pools")
	}
	if err := p.gateway.Reload(c); err != nil {
		return err
	}
	p.discovery.Reload(c.Pools)
	for _, part := range []struct {
		name     string
		old, new any
	}{
		{"gateway", p.config.Gateway, c.Gateway},
		{"listeners", p.config.Listeners, c.Listeners},
		{"admin", p.config.Admin, c.Admin},
		{"drain_timeout", p.config.DrainTimeout, c.DrainTimeout},
		{"journal", p.config.Journal, c.Journal},
	} {
		if !reflect.DeepEqual(part.old, part.new) {
			p.log.Warn("change needs a restart", "part", part.name)
		}
	}
	p.log.Info("configuration reloaded", "routes", len(c.Routes), "pools", len(c.Pools), "keys", len(c.Keys))
	return nil
}

// Addr is where a client listener of this name listens, nil if there is none.
func (p *Process) Addr(listener string) net.Addr { return p.addrs[listener] }

// AdminAddr is where the admin listener listens, nil if it is off.
func (p *Process) AdminAddr() net.Addr { return p.adminAt }

// Failed yields the error of a listener that ended by itself.
func (p *Process) Failed() <-chan error { return p.failed }

// Stop refuses new requests, lets the running ones end within the drain
// timeout, and closes everything.
func (p *Process) Stop() {
	p.log.Info("draining", "timeout", p.drain)
	p.discovery.Close()
	ctx, cancel := context.WithTimeout(context.Background(), p.drain)
	defer cancel()
	p.gateway.Drain(ctx)

	// The answers are out; what is left are idle connections and clients that
	// are slow to read the last bytes.
	ctx, cancel = context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, s := range p.servers {
		if s.Shutdown(ctx) != nil {
			_ = s.Close()
		}
	}
	if p.admin != nil {
		_ = p.admin.Close()
	}
	p.running.Wait()
	if err := p.journal.Close(); err != nil {
		p.log.Error("journal not closed cleanly", "error", err)
	}
	p.log.Info("stopped")
}
