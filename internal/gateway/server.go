// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/headgate/headgate/internal/config"
)

// Time that a client has for its request's header, and that an idle connection
// is kept.
const (
	headerTime = 10 * time.Second
	idleTime   = 3 * time.Minute
)

// Server is one listener: HTTP/1.1, HTTP/2 over TLS, and HTTP/2 in the clear
// (RFC 9113 §3.3, prior knowledge).
type Server struct {
	gateway *Gateway
	config  config.Listener
	http    *http.Server
	watch   *watch
}

// NewServer makes the server of a listener. It does not listen yet.
func (g *Gateway) NewServer(c config.Listener) (*Server, error) {
	s := &Server{gateway: g, config: c}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	s.http = &http.Server{
		Handler:           s,
		Protocols:         &protocols,
		ReadHeaderTimeout: headerTime,
		IdleTimeout:       idleTime,
		// net/http answers an oversized header with plain text; up to this
		// bound checkHead does it in the client's dialect.
		MaxHeaderBytes: 4 * headerBytesMax,
		ErrorLog:       slog.NewLogLogger(g.log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, watched(c))
		},
	}
	if c.Secure() {
		cert, err := tls.LoadX509KeyPair(string(c.TLS.Cert), string(c.TLS.Key))
		if err != nil {
			return nil, err
		}
		s.http.TLSConfig = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	}
	return s, nil
}

// Serve accepts connections until Close. It returns nil after Close.
func (s *Server) Serve(l net.Listener) error {
	w, err := newWatch()
	if err != nil {
		return err
	}
	s.watch = w
	defer w.close()
	l = &watchedListener{Listener: l, watch: w}
	if s.config.Secure() {
		err = s.http.ServeTLS(l, "", "")
	} else {
		err = s.http.Serve(l)
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends the server and every connection that is left.
func (s *Server) Close() error { return s.http.Close() }

// Shutdown ends the server once its connections are idle or ctx is done.
func (s *Server) Shutdown(ctx context.Context) error { return s.http.Shutdown(ctx) }

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	gone, stop := s.gone(r)
	defer stop()
	ex := newHTTPExchange(w, r, gone)
	ex.head.BodyMax = int64(s.config.MaxBody)
	ex.head.Debug = s.config.DebugHeaders
	ex.head.Loopback = s.config.Address.Loopback()
	ex.head.Trusted = s.config.Trusts()
	s.gateway.Serve(ex)
	if ex.aborted {
		// net/http's way to cut an answer off so that the client notices.
		panic(http.ErrAbortHandler)
	}
}

type connKey struct{}

// gone is done once the client has closed its side. For HTTP/1.1 net/http sees
// that only while no pipelined bytes wait to be read, so the connection is
// watched beside it.
func (s *Server) gone(r *http.Request) (context.Context, func()) {
	c, _ := r.Context().Value(connKey{}).(*watchedConn)
	if c == nil || r.ProtoMajor != 1 {
		return r.Context(), func() {}
	}
	ctx, cancel := context.WithCancel(r.Context())
	c.onGone(cancel)
	return ctx, func() {
		c.onGone(nil)
		cancel()
	}
}
