// SPDX-License-Identifier: Apache-2.0

// Package upstream is Headgate's HTTP/1.1 client towards engines.
//
// It owns the sockets to one endpoint per Pool: dialling, keep-alive, writing
// a request, and reading an answer by its framing. It exists because the
// failure classifier in internal/attempt needs evidence that net/http hides:
// whether the request was fully written, whether the peer sent FIN or RST,
// whether a kept connection was already closed, and whether the body ended by
// its framing. That evidence is an End.
//
// It judges nothing. It never sends a request twice, follows a redirect,
// decodes a content coding, logs, or adds a header field beyond framing (Host,
// Content-Length, Connection). It accepts less than net/http does and never
// more: two parsers that disagree about where an answer ends are how responses
// are smuggled (RFC 9112 §11). internal/gateway calls it.
package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of Config, and the bounds that are not configurable.
const (
	connectTimeoutDefault = 5 * time.Second
	idleTimeoutDefault    = 30 * time.Second
	idleMaxDefault        = 64
	headMaxDefault        = 64 << 10

	// A kept connection that the peer closed this soon after a chunked answer
	// was closed because of the answer. Later closes are ordinary idle
	// timeouts; the shortest in use is uvicorn's 5 s.
	promptClose = time.Second
	// How long an endpoint seen to do so is believed to do so still. Engines
	// are replaced behind an address; finding out again costs one Stale.
	promptCloseMemory = 10 * time.Minute
)

// ErrClosed is the Err of an exchange begun on a closed Pool.
var ErrClosed = errors.New("upstream: pool is closed")

// Config says how to reach one endpoint. Only URL is required.
type Config struct {
	// URL is scheme, host and port of the endpoint, nothing else. The scheme
	// is http or https; the port defaults to the scheme's.
	URL *url.URL
	// Dial opens a connection; nil means a net.Dialer with its defaults (both
	// address families, RFC 8305). It must return soon after ctx is done, and
	// its connections must keep deadlines.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// TLS is used for https and is cloned. ServerName defaults to the URL's
	// host. ALPN is always http/1.1.
	TLS *tls.Config
	// ConnectTimeout bounds dialling and the TLS handshake together. Default 5 s.
	ConnectTimeout time.Duration
	// IdleMax is how many idle connections are kept. Default 64; negative
	// means none, and every request then says "Connection: close".
	IdleMax int
	// IdleTimeout is how long an idle connection is kept. Default 30 s.
	IdleTimeout time.Duration
	// HeadMax bounds the bytes of the answer's head, all interim (1xx) heads
	// before it included. Default 64 KiB.
	HeadMax int
}

// Stats is a reading of a Pool's gauges and counters.
type Stats struct {
	Idle   int // connections kept for reuse
	Active int // exchanges running, those still dialling included

	Dialed  uint64 // connections opened
	Reused  uint64 // exchanges begun on a kept connection
	Dropped uint64 // kept connections found closed or spoken on before reuse

	// StreamsClose reports that the endpoint was recently seen to close a
	// connection after a chunked answer, so such connections are not kept.
	StreamsClose bool
}

// Pool holds the connections to one endpoint. All methods may be called from
// any goroutine.
type Pool struct {
	dialFunc func(ctx context.Context, network, addr string) (net.Conn, error)
	tls      *tls.Config // nil for http
	addr     string      // host:port to dial
	host     string      // default Host field

	connectTimeout time.Duration
	idleTimeout    time.Duration
	idleMax        int
	headMax        int

	active  atomic.Int64
	dialed  atomic.Uint64
	reused  atomic.Uint64
	dropped atomic.Uint64

	// mu guards what follows. Nothing blocks while it is held.
	mu     sync.Mutex
	idle   []*conn     // oldest first; taken from the end, so that a burst's surplus ages out
	sweep  *time.Timer // runs while idle is not empty
	closed bool
	// Until then connections are not kept after a chunked answer. llama.cpp
	// advertises keep-alive and closes a millisecond after each stream, which
	// makes every prompt reuse a race that loses a request.
	streamsCloseUntil time.Time
}

// New makes a Pool. It opens no connection.
func New(cfg Config) (*Pool, error) {
	u := cfg.URL
	if u == nil || u.Hostname() == "" {
		return nil, errors.New("upstream: endpoint URL has no host")
	}
	port := u.Port()
	switch u.Scheme {
	case "http":
		port = or(port, "80")
	case "https":
		port = or(port, "443")
	default:
		return nil, fmt.Errorf("upstream: endpoint URL %q: scheme is not http or https", u.Redacted())
	}
	if u.User != nil || (u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("upstream: endpoint URL %q has more than scheme, host and port", u.Redacted())
	}

	p := &Pool{
		dialFunc:       cfg.Dial,
		addr:           net.JoinHostPort(u.Hostname(), port),
		host:           hostField(u),
		connectTimeout: or(cfg.ConnectTimeout, connectTimeoutDefault),
		idleTimeout:    or(cfg.IdleTimeout, idleTimeoutDefault),
		idleMax:        max(or(cfg.IdleMax, idleMaxDefault), 0),
		headMax:        or(cfg.HeadMax, headMaxDefault),
	}
	if p.dialFunc == nil {
		p.dialFunc = new(net.Dialer).DialContext
	}
	if u.Scheme == "https" {
		p.tls = &tls.Config{}
		if cfg.TLS != nil {
			p.tls = cfg.TLS.Clone()
		}
		p.tls.ServerName = or(p.tls.ServerName, u.Hostname())
		p.tls.NextProtos = []string{"http/1.1"}
	}
	return p, nil
}

func or[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// hostField is the Host field for u. A zone names an interface of this machine
// and means nothing to the peer (RFC 6874 §4).
func hostField(u *url.URL) string {
	host := u.Host
	if i := strings.IndexByte(host, '%'); i >= 0 {
		if j := strings.IndexByte(host[i:], ']'); j >= 0 {
			host = host[:i] + host[i+j:]
		}
	}
	return host
}

// Do sends req and returns once the final head of the answer is complete.
// Exactly one of its results is nil.
//
// ctx covers the whole exchange, the body too: when it is done, a pending
// dial, write or read returns at once with Cause Interrupted and
// context.Cause(ctx) as Err. It stops mattering when the exchange is over.
//
// The request is written in full before its answer is awaited, except that a
// body over 64 KiB is written while the answer is read. A final head that
// arrives before all of the request was written stops the writing;
// Response.RequestWritten is then false.
//
// A non-nil Response must be read until Read returns an error other than a
// Timeout, or closed.
func (p *Pool) Do(ctx context.Context, req *Request) (*Response, *End) {
	if err := req.validate(); err != nil {
		return nil, &End{Cause: InvalidRequest, Err: err}
	}
	if ctx.Err() != nil {
		return nil, &End{Cause: Interrupted, Err: context.Cause(ctx)}
	}

	p.active.Add(1)
	c, end := p.connect(ctx, req.Fresh)
	if end != nil {
		p.active.Add(-1)
		return nil, end
	}
	r := &Response{pool: p, c: c, ctx: ctx, Reused: c.reused, head: req.Method == "HEAD"}
	if ctx.Done() != nil {
		r.unwatch = context.AfterFunc(ctx, r.interruptByContext)
	}
	if err := r.exchange(req); err != nil {
		return nil, err
	}
	return r, nil
}

// connect takes an idle connection, or opens one.
func (p *Pool) connect(ctx context.Context, fresh bool) (*conn, *End) {
	if !fresh {
		if c := p.take(time.Now()); c != nil {
			p.reused.Add(1)
			return c, nil
		}
	}
	p.mu.Lock()
	closed := p.closed
	p.mu.Unlock()
	if closed {
		return nil, &End{Cause: Interrupted, Err: ErrClosed}
	}
	c, end := p.dial(ctx)
	if end == nil {
		p.dialed.Add(1)
	}
	return c, end
}

// take returns the idle connection used last that is still good, or nil.
func (p *Pool) take(now time.Time) *conn {
	for {
		p.mu.Lock()
		n := len(p.idle)
		if n == 0 {
			p.mu.Unlock()
			return nil
		}
		c := p.idle[n-1]
		p.idle[n-1] = nil
		p.idle = p.idle[:n-1]
		p.mu.Unlock()

		age := now.Sub(c.idleSince)
		if age > p.idleTimeout {
			c.closeIdle()
			continue
		}
		found := c.probe()
		if found == quiet {
			c.reused, c.idleFor = true, age
			return c
		}
		// Over TLS a goodbye looks like speech.
		if found == gone || c.tls != nil {
			p.noteClosed(c, age)
		}
		p.dropped.Add(1)
		c.close()
	}
}

// put keeps c for reuse, or closes it.
func (p *Pool) put(c *conn, streamed bool) {
	if !c.rest() {
		c.close()
		return
	}
	now := time.Now()
	c.idleSince, c.streamed = now, streamed

	p.mu.Lock()
	keep := !p.closed && len(p.idle) < p.idleMax && !(streamed && now.Before(p.streamsCloseUntil))
	if keep {
		p.idle = append(p.idle, c)
		if p.sweep == nil {
			p.sweep = time.AfterFunc(p.idleTimeout, p.sweepIdle)
		} else if len(p.idle) == 1 {
			p.sweep.Reset(p.idleTimeout)
		}
	}
	p.mu.Unlock()
	if !keep {
		c.closeIdle()
	}
}

// noteClosed learns from a kept connection that the peer had closed.
func (p *Pool) noteClosed(c *conn, idle time.Duration) {
	if !c.streamed || idle > promptClose {
		return
	}
	p.mu.Lock()
	p.streamsCloseUntil = time.Now().Add(promptCloseMemory)
	p.mu.Unlock()
}

// sweepIdle closes idle connections that are too old or that the peer closed,
// so that an unused endpoint costs no sockets.
func (p *Pool) sweepIdle() {
	now := time.Now()
	var drop []*conn
	p.mu.Lock()
	kept := p.idle[:0]
	for _, c := range p.idle {
		// Reading a socket under the lock is a non-blocking peek. Where there
		// is no such peek the age decides alone.
		if now.Sub(c.idleSince) >= p.idleTimeout || c.peek.known() && c.peek.look() != quiet {
			drop = append(drop, c)
		} else {
			kept = append(kept, c)
		}
	}
	clear(p.idle[len(kept):])
	p.idle = kept
	if len(kept) > 0 && !p.closed {
		p.sweep.Reset(max(p.idleTimeout-now.Sub(kept[0].idleSince), p.idleTimeout/8))
	}
	p.mu.Unlock()
	for _, c := range drop {
		c.closeIdle()
	}
}

// Close closes the idle connections. Running exchanges go on, their
// connections are closed when they end, and no new exchange begins.
func (p *Pool) Close() {
	p.mu.Lock()
	idle := p.idle
	p.idle, p.closed = nil, true
	if p.sweep != nil {
		p.sweep.Stop()
	}
	p.mu.Unlock()
	for _, c := range idle {
		c.closeIdle()
	}
}

// Stats reads the gauges and counters.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Stats{
		Idle:         len(p.idle),
		Active:       int(p.active.Load()),
		Dialed:       p.dialed.Load(),
		Reused:       p.reused.Load(),
		Dropped:      p.dropped.Load(),
		StreamsClose: time.Now().Before(p.streamsCloseUntil),
	}
}
