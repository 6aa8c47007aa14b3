// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/headgate/headgate/test/real"
)

// The other tests believe relays; this one does not. A peer sends ten bytes and
// ends its side, of which the hold lets four through at first.
func TestRelay(t *testing.T) {
	for _, c := range []struct {
		name string
		act  func(*real.Conn)
		want string
		err  error
	}{
		{"release", (*real.Conn).Release, "0123456789", io.EOF},
		{"FIN", func(c *real.Conn) { c.Cut(real.FIN) }, "0123", io.EOF},
		{"RST", func(c *real.Conn) { c.Cut(real.RST) }, "0123", syscall.ECONNRESET},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			peer := make(chan error, 1)
			go func() {
				conn, err := l.Accept()
				if err == nil {
					_, err = io.WriteString(conn, "0123456789")
					conn.Close()
				}
				peer <- err
			}()
			relay, err := real.NewRelay("127.0.0.1:0", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer relay.Close()
			h := &real.Hold{Direction: real.ToGateway, Pass: func([]byte) int { return 4 }}
			relay.Hold(h)
			conn, err := net.Dial("tcp", relay.Addr())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := <-peer; err != nil {
				t.Fatal(err)
			}
			held, err := h.Caught(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if end, err := held.AwaitEnd(ctx, real.ToGateway); err != nil || end != real.FIN {
				t.Fatalf("the peer ended with %s, %v", end, err)
			}
			first := make([]byte, 4)
			if _, err := io.ReadFull(conn, first); err != nil {
				t.Fatal(err)
			}
			if all, passed := held.Bytes(real.ToGateway); len(all) != 10 || passed != 4 {
				t.Errorf("%d bytes came, %d went on", len(all), passed)
			}
			c.act(held)
			rest, err := io.ReadAll(conn)
			if err == nil {
				err = io.EOF
			}
			if got := string(first) + string(rest); got != c.want || !errors.Is(err, c.err) {
				t.Errorf("got %q and %v, want %q and %v", got, err, c.want, c.err)
			}
		})
	}
}
