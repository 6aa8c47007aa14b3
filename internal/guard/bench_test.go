// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/lease"
)

// BenchmarkChunk passes the chunks of one answer, one at a time, over sockets:
// through a guard with a lease, through the same relay without one, and through
// httputil.ReverseProxy. cpu-ns/op is the whole process's, with the client and the
// engine in it, which are the same for all three.
func BenchmarkChunk(b *testing.B) {
	realClock := func(s *setup) { s.config.now = nil }
	b.Run("leased", func(b *testing.B) {
		r := newRig(b, realClock)
		g := r.grant("req_1", 1)
		g.NotAfter = r.guard.now().Add(LeaseMaxDefault)
		passChunks(b, r, r.data, lease.Header+": "+g.String())
	})
	b.Run("plain", func(b *testing.B) {
		r := newRig(b, realClock, withoutLease)
		passChunks(b, r, r.data)
	})
	b.Run("reverseproxy", func(b *testing.B) {
		r := newRig(b)
		transport := &http.Transport{}
		proxy := &httputil.ReverseProxy{
			FlushInterval: -1, Transport: transport,
			Rewrite: func(p *httputil.ProxyRequest) {
				p.SetURL(&url.URL{Scheme: "http", Host: r.engine.listener.Addr().String()})
			},
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		server := &http.Server{Handler: proxy}
		served := make(chan error)
		go func() { served <- server.Serve(l) }()
		b.Cleanup(func() {
			_ = server.Close()
			<-served
			transport.CloseIdleConnections()
		})
		passChunks(b, r, l.Addr().String())
	})
}

func passChunks(b *testing.B, r *rig, at string, fields ...string) {
	r.data = at
	c := r.dial()
	_ = c.conn.SetDeadline(time.Time{})
	c.send("POST", fields...)
	x := r.engine.next()
	x.write(chunkedHead)
	body := c.head("POST").Body
	chunk := []byte(fmt.Sprintf("%x\r\n%s\r\n", 200, strings.Repeat("x", 200)))
	buf := make([]byte, 200)
	b.ReportAllocs()
	before := cpu(b)
	for b.Loop() {
		if _, err := x.conn.Write(chunk); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(body, buf); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(cpu(b)-before)/float64(b.N), "cpu-ns/op")
	x.write("0\r\n\r\n")
	x.finish()
	if n, err := io.Copy(io.Discard, body); n != 0 || err != nil {
		b.Errorf("the answer ended after %d bytes more, %v", n, err)
	}
	c.conn.Close()
}

// cpu is the time that this process has used of all CPUs.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
