// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/headgate/headgate/internal/process"
)

// Options are what a guard's process is told. Listen and ControlAt are required,
// and what Config requires; Alone, Supervised, Incarnation and Control are found
// out.
type Options struct {
	Config

	Listen    string // host:port for the gateways' inference traffic
	ControlAt string // host:port for their control streams

	// LockDir is where the engine's exclusive lock is, shared by all guards of
	// the engine; "" for none, and then another guard's death proves nothing.
	LockDir  string
	LockWait time.Duration // for the lock of a guard that is about to end

	// Off loopback the control port needs a token or client certificates.
	Token     string // that gateways present; "" for none
	Cert, Key string // files, for TLS on both ports; "" for none
	ClientCA  string // file, whose certificates gateways must present on the control port; "" for none

	Command   []string      // the engine to start; nil: it is there
	DrainTime time.Duration // for attempts under way, when the guard is to end

	// Ready is called with the addresses once both ports are open.
	Ready func(data, control net.Addr)
}

// tellTime bounds how long a guard whose engine has exited goes on, and then its
// closing streams, for gateways to hear of it.
const tellTime = time.Second

// Run runs a guard until ctx is done or its engine has exited, whose exit code is
// the result then.
func Run(ctx context.Context, o Options) (code int, err error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	serverTLS, err := o.tls()
	if err != nil {
		return 1, err
	}
	if o.ID == "" {
		return 1, errors.New("a guard needs an id")
	}
	if o.LockDir != "" {
		wait, cancel := context.WithTimeout(ctx, o.LockWait)
		release, err := LockEngine(wait, o.LockDir, o.Engine)
		cancel()
		if err != nil {
			return 1, err
		}
		defer release()
		o.Alone = true
	}
	data, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return 1, err
	}
	defer data.Close()
	control, err := net.Listen("tcp", o.ControlAt)
	if err != nil {
		return 1, err
	}
	defer control.Close()
	at := control.Addr().(*net.TCPAddr)
	if !at.IP.IsLoopback() && o.Token == "" && o.ClientCA == "" {
		return 1, fmt.Errorf("control port %s: off loopback a token or client certificates are needed", at)
	}
	o.Config.Control = at.Port

	var exited <-chan struct{}
	var engine *process.Process
	if len(o.Command) > 0 {
		if engine, err = process.Start(o.Command); err != nil {
			return 1, fmt.Errorf("start the engine: %w", err)
		}
		defer engine.Stop(o.DrainTime)
		exited, o.Supervised, o.Incarnation = engine.Exited(), true, engine.Incarnation()
	}
	g, err := New(o.Config)
	if err != nil {
		return 1, err
	}
	var creds credentials.TransportCredentials
	if serverTLS != nil {
		creds = credentials.NewTLS(serverTLS)
		data = tls.NewListener(data, o.dataTLS(serverTLS))
	}
	streams := NewControlServer(g, o.Token, creds)
	requests := newDataServer(g.Handler(), o.Log)
	failed := make(chan error, 2)
	var running sync.WaitGroup
	running.Go(func() { failed <- requests.Serve(data) })
	running.Go(func() { failed <- streams.Serve(control) })
	o.Log.Info("guard started", "guard", g.Incarnation().String(), "engine", o.Engine.Redacted(),
		"listen", data.Addr().String(), "control", control.Addr().String(), "alone", o.Alone)
	if o.Ready != nil {
		o.Ready(data.Addr(), control.Addr())
	}

	select {
	case <-ctx.Done():
		o.drain(g, requests)
	case <-exited:
		code = engine.Code()
		g.EngineExited(code != 0)
		g.told(tellTime)
		if code == 0 {
			code = 1 // an engine is not to end by itself
		}
		err = fmt.Errorf("the engine has exited with code %d", engine.Code())
	case err = <-failed:
		code = 1
	}
	_ = requests.Close()
	g.Close()
	endStreams(streams)
	running.Wait()
	return code, err
}

// endStreams ends the control streams, which are over, so that what was sent on them
// arrives. A gateway that reads nothing is not waited for.
func endStreams(streams *grpc.Server) {
	late := time.AfterFunc(tellTime, streams.Stop)
	defer late.Stop()
	streams.GracefulStop()
}

// drain refuses new attempts and lets those under way end, within bounds.
func (o *Options) drain(g *Guard, requests *http.Server) {
	g.Drain()
	ctx, cancel := context.WithTimeout(context.Background(), o.DrainTime)
	defer cancel()
	if err := requests.Shutdown(ctx); err != nil {
		o.Log.Warn("attempts are cut off", "in_flight", g.Counts().InFlight)
	}
}

// newDataServer is a server for gateways: HTTP/1.1 only, because they judge how
// a connection ended, and no limit on how long an answer takes.
func newDataServer(h http.Handler, log *slog.Logger) *http.Server {
	s := &http.Server{
		Handler: h, ReadHeaderTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug), Protocols: new(http.Protocols),
	}
	s.Protocols.SetHTTP1(true)
	return s
}

func (o *Options) tls() (*tls.Config, error) {
	if o.Cert == "" {
		if o.Key != "" || o.ClientCA != "" {
			return nil, errors.New("TLS needs both a certificate and its key")
		}
		return nil, nil
	}
	cert, err := tls.LoadX509KeyPair(o.Cert, o.Key)
	if err != nil {
		return nil, fmt.Errorf("TLS certificate: %w", err)
	}
	c := &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	if o.ClientCA != "" {
		pem, err := os.ReadFile(o.ClientCA)
		if err != nil {
			return nil, fmt.Errorf("client CA: %w", err)
		}
		c.ClientCAs, c.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
		if !c.ClientCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("client CA: no certificate in %s", o.ClientCA)
		}
	}
	return c, nil
}

// dataTLS asks for no client certificate: who may use the engine is the
// network's affair, as it is without a guard.
func (o *Options) dataTLS(c *tls.Config) *tls.Config {
	c = c.Clone()
	c.ClientAuth, c.NextProtos = tls.NoClientCert, []string{"http/1.1"}
	return c
}

// told waits until every session was sent what there is to tell, for a while.
func (g *Guard) told(patience time.Duration) {
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for {
		if g.untold() == 0 {
			return
		}
		select {
		case <-deadline.C:
			return
		case <-look.C:
		}
	}
}

func (g *Guard) untold() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for _, s := range g.sessions {
		n += len(s.untold)
		if s.engine != nil || s.telling {
			n++
		}
	}
	return n
}
