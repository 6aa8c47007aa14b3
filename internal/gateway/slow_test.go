// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/simengine/model"
)

// postUnread sends a request over HTTP/2 whose answer may not be written.
func (r *rig) postUnread(body string) {
	r.t.Helper()
	must := func(err error) {
		if err != nil {
			r.t.Fatal(err)
		}
	}
	conn, err := net.Dial("tcp", r.addr)
	must(err)
	over := make(chan struct{})
	r.t.Cleanup(func() { _ = conn.Close(); <-over })
	_, err = conn.Write([]byte(http2.ClientPreface))
	must(err)
	f := http2.NewFramer(conn, conn)
	must(f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
	go func() {
		defer close(over)
		for {
			if _, err := f.ReadFrame(); err != nil {
				return
			}
		}
	}()
	var head bytes.Buffer
	e := hpack.NewEncoder(&head)
	for _, field := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "x"}, {":path", chatPath}, {"content-type", "application/json"}} {
		must(e.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}))
	}
	must(f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndHeaders: true}))
	for text := []byte(body); len(text) > 0; {
		n := min(len(text), 16_000)
		must(f.WriteData(1, n == len(text), text[:n]))
		text = text[n:]
	}
}

// A client that does not read its answer says nothing of the engine: its prompt is
// computed, whether the client takes that or not.
func TestAClientThatDoesNotReadIsNoPendingPrefill(t *testing.T) {
	r := newRig(t, 1, "", func(_ int, c *simengine.Config) { c.Params = model.A100x8B })
	r.postUnread(fmt.Sprintf(`{"model":"sim","stream":true,"max_tokens":4,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("Tell me about the sea. ", 800)))
	r.until("the engine has it", func() bool { return r.received()[0] == 1 })
	r.until("its prefill counts as done", func() bool { return term(t, r.terms(), "ahead") == 0 })
}
