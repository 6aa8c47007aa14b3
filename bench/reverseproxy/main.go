// SPDX-License-Identifier: Apache-2.0

// Command reverseproxy is net/http/httputil's ReverseProxy with the settings
// that suit streams: what a Go program gets without a data path of its own. It
// is measured beside Headgate.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"sync"
	"time"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "address")
	engine := flag.String("engine", "", "base URL")
	flag.Parse()
	if err := run(*listen, *engine); err != nil {
		fmt.Fprintln(os.Stderr, "reverseproxy:", err)
		os.Exit(1)
	}
}

func run(listen, engine string) error {
	to, err := url.Parse(engine)
	if err != nil {
		return err
	}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(to) },
		FlushInterval: -1, // at once
		BufferPool:    &buffers{},
		Transport: &http.Transport{
			MaxIdleConnsPerHost: 4096,
			IdleConnTimeout:     10 * time.Minute,
			DisableCompression:  true,
		},
	}
	server := &http.Server{Addr: listen, Handler: whole(proxy), ReadHeaderTimeout: 10 * time.Second}
	return server.ListenAndServe()
}

// whole reads a request's body before it is forwarded. Without it an engine that
// answers at once is now and then cut off: the server closes the body with the
// answer's first byte, while Transport still looks for its end, and Transport then
// closes the engine's connection ("use of closed network connection").
func whole(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 64<<20))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		next.ServeHTTP(w, r)
	})
}

type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

func (b *buffers) Put(p []byte) { b.pool.Put(&p) }
