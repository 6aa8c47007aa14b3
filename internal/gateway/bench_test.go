// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/gateway"
)

// exchange is a client in memory that reads whatever comes.
type exchange struct {
	head   gateway.Head
	body   strings.Reader
	text   string
	status int
}

func (x *exchange) Head() *gateway.Head                 { return &x.head }
func (x *exchange) Body() io.Reader                     { return &x.body }
func (x *exchange) SetBodyDeadline(time.Time)           {}
func (x *exchange) Gone() context.Context               { return context.Background() }
func (x *exchange) WriteHead(status int, _ http.Header) { x.status = status }
func (x *exchange) Write(p []byte) (int, error)         { return len(p), nil }
func (x *exchange) Abort()                              {}

// stubEngine answers every request at once, on one connection after the other.
func stubEngine(b *testing.B) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	const body = `{"id":"c","object":"chat.completion","created":1,"model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}`
	answer := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	serve := func(c net.Conn) {
		defer c.Close()
		for r := bufio.NewReader(c); ; {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			if _, err := io.Copy(io.Discard, req.Body); err != nil {
				return
			}
			if _, err := c.Write(answer); err != nil {
				return
			}
		}
	}
	go func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				go serve(c)
			}
		}
	}()
	b.Cleanup(func() { l.Close() })
	return "http://" + l.Addr().String()
}

// BenchmarkRequest is a whole request through the gateway to an engine that
// answers at once: what the gateway adds, and two trips over loopback.
func BenchmarkRequest(b *testing.B) {
	for _, prompt := range []int{50, 4000} {
		b.Run(fmt.Sprintf("tokens=%d", prompt), func(b *testing.B) {
			c, err := config.Parse("bench.yaml", fmt.Appendf(nil, "pools: {p: {health: {interval: 0s}, scrape: {interval: 0s}, discovery: {static: [{url: %q}]}}}", stubEngine(b)))
			if err != nil {
				b.Fatal(err)
			}
			g, err := gateway.New(gateway.Config{Config: c, Routing: routing})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { g.Drain(context.Background()) })
			x := &exchange{text: fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}]}`, strings.Repeat("abc ", prompt))}
			b.ReportAllocs()
			for b.Loop() {
				x.body.Reset(x.text)
				x.head = gateway.Head{
					Method: "POST", Path: chatPath, ContentLength: int64(len(x.text)), BodyMax: 1 << 20,
					Header: http.Header{"Content-Type": {"application/json"}},
				}
				if g.Serve(x); x.status != http.StatusOK {
					b.Fatalf("status %d", x.status)
				}
			}
		})
	}
}

// BenchmarkRefusal is a whole request that is refused because nothing more may wait:
// read, routed, looked at by the queue and answered with 429.
func BenchmarkRefusal(b *testing.B) {
	for _, prompt := range []int{50, 4000} {
		b.Run(fmt.Sprintf("tokens=%d", prompt), func(b *testing.B) {
			l, err := net.Listen("tcp", "127.0.0.1:0") // an engine that never answers
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { l.Close() })
			c, err := config.Parse("bench.yaml", fmt.Appendf(nil,
				"pools: {p: {health: {interval: 0s}, flow: {max_concurrency: 1, queue: {max_requests: 1}}, discovery: {static: [{url: %q}]}}}", "http://"+l.Addr().String()))
			if err != nil {
				b.Fatal(err)
			}
			g, err := gateway.New(gateway.Config{Config: c, Routing: routing})
			if err != nil {
				b.Fatal(err)
			}
			text := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}]}`, strings.Repeat("abc ", prompt))
			ask := func(ctx context.Context) int {
				x := &leaver{exchange: exchange{text: text}, gone: ctx}
				x.body.Reset(x.text)
				x.head = gateway.Head{
					Method: "POST", Path: chatPath, ContentLength: int64(len(x.text)), BodyMax: 1 << 20,
					Header: http.Header{"Content-Type": {"application/json"}},
				}
				g.Serve(x)
				return x.status
			}
			// One is at the engine and one waits, until their clients leave.
			ctx, leave := context.WithCancel(context.Background())
			var stay sync.WaitGroup
			for range 2 {
				stay.Go(func() { ask(ctx) })
			}
			for g.Status()[0].Queue.Requests == 0 {
				runtime.Gosched()
			}
			b.Cleanup(func() {
				leave()
				stay.Wait()
				g.Drain(context.Background())
			})
			b.ReportAllocs()
			for b.Loop() {
				if status := ask(ctx); status != http.StatusTooManyRequests {
					b.Fatalf("status %d", status)
				}
			}
		})
	}
}

// leaver is a client that may go.
type leaver struct {
	exchange
	gone context.Context
}

func (x *leaver) Gone() context.Context { return x.gone }
