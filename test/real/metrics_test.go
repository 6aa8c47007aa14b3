// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/headgate/headgate/test/real"
)

// occupy sends an engine requests of others, past the gateway, which end with the
// test or when what it returns is called.
func occupy(t *testing.T, address string, n int) (end func()) {
	t.Helper()
	var conns []net.Conn
	end = func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}
	t.Cleanup(end)
	for i := range n {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		body := fmt.Sprintf(`{"model":"tiny","prompt":"Request %d of others","max_tokens":900,"ignore_eos":true,"stream":true}`, i)
		fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
	return end
}

// What llama-server exports reaches the gateway, and what it does with it: load
// of others is avoided, and an engine that was started anew is cold.
func TestMetricsOfLlamaServer(t *testing.T) {
	r := blankRig(t)
	var engines []*real.Engine
	var configs []real.EngineConfig
	for _, name := range []string{"one", "two"} {
		c := r.engine(name, "slow")
		c.Slots = 2
		e, err := real.StartEngine(r.ctx, c)
		r.must(err)
		t.Cleanup(e.Kill)
		engines, configs = append(engines, e), append(configs, c)
	}
	f := newFront(t, "scrape: {interval: 100ms}, health: {interval: 0s}", engines[0].Addr, engines[1].Addr)
	for _, e := range engines {
		f.awaits("it is known", e.Addr, func(e told) bool { return e.Engine == "llamacpp" && e.Reported != nil && e.Reported.Doubt == "" })
	}

	end := occupy(t, engines[0].Addr, 5)
	f.awaits("load of others shows", engines[0].Addr, func(e told) bool {
		return e.Reported.Running != nil && *e.Reported.Running == 2 && *e.Reported.Waiting == 3 && e.Reported.Others > 4
	})
	for i := range 4 {
		if got := f.complete(fmt.Sprintf("Question %d", i), 3); got.endpoint != engines[1].Addr {
			t.Errorf("a request went to %s, which is busy for others", got.endpoint)
		}
	}
	end()
	f.awaits("it is idle again", engines[0].Addr, func(e told) bool { return e.Reported.Others < 0.5 && *e.Reported.Running == 0 })

	// The same prompt cold and warm: the engine agrees with what is expected, and
	// the tokens are the same.
	prompt := strings.Repeat("The gateway keeps what it knows of every engine. ", 30)
	cold, warm := f.twice(prompt, 12)
	if cold.expected != 0 || warm.text != cold.text {
		t.Errorf("cold: %+v\nwarm: %+v", cold, warm)
	}
	if warm.cached < warm.prompt*9/10 || warm.expected < warm.prompt/2 || warm.expected > warm.prompt {
		t.Errorf("of %d tokens the engine had %d cached, %d were expected", warm.prompt, warm.cached, warm.expected)
	}

	home := 0
	if warm.endpoint == engines[1].Addr {
		home = 1
	}
	if n := f.expected(prompt, engines[home].Addr); n == 0 {
		t.Error("nothing is thought to be cached before the restart")
	}
	engines[home].Kill()
	f.awaits("it is missed", engines[home].Addr, func(e told) bool { return e.Error != "" })
	again, err := real.StartEngine(r.ctx, configs[home])
	r.must(err)
	t.Cleanup(again.Kill)
	f.awaits("it is back", again.Addr, func(e told) bool { return e.Error == "" && e.Reported != nil && e.Reported.Doubt == "" })
	if n := f.expected(prompt, again.Addr); n != 0 {
		t.Errorf("%d tokens are thought to be cached after the restart", n)
	}
	if got := f.complete(prompt, 12); got.text != cold.text {
		t.Errorf("after the restart: %+v, before: %+v", got, cold)
	}
}
