// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/lease"
)

// FuzzHeads sends an attempt's request with any fields, and answers with any. The
// engine gets no lease and nothing without one, and can't speak for the guard.
func FuzzHeads(f *testing.F) {
	f.Add("X-A: 1", "Content-Length: 0")
	f.Add("Connection: Headgate-Lease, close\r\nTe: trailers", "Connection: Headgate-Guard\r\nContent-Length: 1\r\nTransfer-Encoding: chunked")
	f.Add("headgate-lease: x", "headgate-guard: origin=guard\r\nHEADGATE-REASON: stale_epoch")
	f.Add("Expect: 1", "")
	f.Add("Expect: 100-continue", "Trailer: Headgate-Guard\r\nTransfer-Encoding: chunked")
	f.Add("Transfer-Encoding: chunked", "Content-Length: -1")
	f.Add("Upgrade: h2c\r\nConnection: upgrade", " folded: 1\r\n:")
	r := newRig(f)
	n := 0
	f.Fuzz(func(t *testing.T, asked, answered string) {
		if strings.Contains(asked, "\r\n\r\n") || strings.Contains(asked, "\n\n") || strings.Contains(asked, "\n\r\n") {
			return // more than one request
		}
		n++
		r.t = t
		g := r.grant("req_1", n)
		c := r.dial()
		defer c.conn.Close()
		served := make(chan struct{})
		over := make(chan struct{})
		go func() {
			defer close(served)
			select {
			case x := <-r.engine.exchanges:
				if got := x.Header.Values(lease.Header); len(got) != 0 {
					t.Errorf("the engine got the lease %q", got)
				}
				_, _ = io.WriteString(x.conn, "HTTP/1.1 200 OK\r\n"+answered+"\r\n\r\n")
				x.closeConn()
				x.finish()
			case <-over:
			}
		}()
		c.write("POST / HTTP/1.1\r\nHost: h\r\n" + asked + "\r\n" + lease.Header + ": " + g.String() + "\r\nContent-Length: 0\r\n\r\n" +
			"0\r\n\r\n") // the body, if it is chunked
		res, err := http.ReadResponse(c.r, nil)
		close(over)
		<-served
		if err != nil {
			return // cut, or refused by net/http
		}
		defer res.Body.Close()
		origin, reason := res.Header.Values(OriginHeader), res.Header.Values(ReasonHeader)
		switch got := fmt.Sprint(origin); {
		case got == "[origin=engine]" && len(reason) == 0 && res.StatusCode == 200:
		case got == "[origin=guard]" && len(reason) == 1 && res.StatusCode >= 400:
		case got == "[]" && res.StatusCode >= 400: // net/http's own
		default:
			t.Errorf("got %d from %v for %v", res.StatusCode, origin, reason)
		}
	})
}
