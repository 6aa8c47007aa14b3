// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/headgate/headgate/test/real"
)

// An engine that is still loading its model answers 503 to everything. Clients
// never notice, as there is another one.
//
// A model is loaded within a tenth of a second; one that is a named pipe which
// nobody writes to takes for ever.
func TestEngineThatIsLoading(t *testing.T) {
	both(t, func(t *testing.T, stream bool) {
		r := blankRig(t)
		healthy, err := real.StartEngine(r.ctx, r.engine("healthy", "fast"))
		r.must(err)
		r.add(healthy)
		c := r.engine("loading", "fast")
		c.Model = filepath.Join(t.TempDir(), "model.gguf")
		r.must(unix.Mkfifo(c.Model, 0o600))
		loading, err := real.LaunchEngine(c)
		r.must(err)
		r.add(loading)
		r.must(loading.AwaitLog(r.ctx, "loading model"))
		if status, body, err := loading.Get("/health"); err != nil || status != 503 {
			t.Fatalf("/health is %d, %v: %s", status, err, body)
		}
		r.serve()

		// While the healthy one is at work, the other one has the least load.
		h := r.hold(&real.Hold{Direction: real.ToGateway})
		first := r.start(ask{stream: stream, tokens: 5})
		conn, err := h.Caught(r.ctx)
		r.must(err)
		attempts := 2
		if this, _ := r.holding(conn); this.Engine == healthy {
			r.wantWhole(r.do(ask{stream: stream, tokens: 5}), 2)
			attempts = 1
		}
		conn.Release()
		r.wantWhole(first(), attempts)
		for range 4 {
			got := r.do(ask{stream: stream, tokens: 5})
			r.wantWhole(got, len(r.attempts(got)))
		}
		refused := r.replicas[1].Posts()
		for _, x := range refused {
			if x.Status != 503 {
				t.Errorf("the loading engine answered %d: %s", x.Status, x.Body)
			}
		}
		if len(refused) == 0 {
			t.Error("the loading engine was not asked")
		}
		t.Logf("the loading engine was asked %d times", len(refused))
	})
}
