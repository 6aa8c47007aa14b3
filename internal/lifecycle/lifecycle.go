// SPDX-License-Identifier: Apache-2.0

// Package lifecycle starts the parts of a gateway process in order and stops
// them in reverse: listeners last to open, first to refuse.
//
// It is the parts list that commands and end-to-end tests share. It refuses to
// read flags or files.
package lifecycle

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/discovery"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/telemetry"
)

// Process is a running gateway. Make one with Start, end it with Stop.
type Process struct {
	log       *slog.Logger
	config    *config.Config
	drain     time.Duration
	gateway   *gateway.Gateway
	discovery *discovery.Pools

	addrs   map[string]net.Addr // of client listeners, by name
	servers []*gateway.Server
	admin   *http.Server
	adminAt net.Addr

	running sync.WaitGroup
	failed  chan error
}

// Start opens every listener and serves. When one can't be opened nothing is
// left open.
func Start(c *config.Config, log *slog.Logger, version string) (*Process, error) {
	metrics := telemetry.New(version)
	g, err := gateway.New(gateway.Config{Config: c, Log: log, Recorder: metrics})
	if err != nil {
		return nil, err
	}
	metrics.Watch(g.Status)
	p := &Process{
		log: log, config: c, drain: time.Duration(c.DrainTimeout), gateway: g,
		discovery: discovery.New(discovery.Config{Update: g.SetEndpoints, Log: log}),
		addrs:  map[string]net.Addr{},
		failed: make(chan error, len(c.Listeners)+1),
	}
	var opened []net.Listener
	abandon := func(err error) (*Process, error) {
		p.discovery.Close()
		g.Drain(context.Background())
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
		p.admin = newAdmin(g, metrics, c.Admin.Token)
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
	p.log.Info("stopped")
}

// newAdmin serves operators: metrics and probes.
func newAdmin(g *gateway.Gateway, metrics *telemetry.Metrics, token config.Secret) *http.Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics.Handler())
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !g.Ready() {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintln(w, "not ready")
			return
		}
		fmt.Fprintln(w, "ready")
	})
	var handler http.Handler = mux
	if !token.IsZero() {
		handler = requireToken(mux, token)
	}
	return &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute}
}

// requireToken compares digests, so that the time taken says nothing about the
// token, its length included.
func requireToken(next http.Handler, token config.Secret) http.Handler {
	want := sha256.Sum256([]byte(token.Reveal()))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		got := sha256.Sum256([]byte(given))
		if !bearer || subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "unauthorized", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}
