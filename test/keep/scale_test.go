// SPDX-License-Identifier: Apache-2.0

package keep

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/freeport"
)

func reachable(address string) bool {
	conn, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

// startsSim is a configuration whose engine is the program's own simulated one.
func startsSim(t *testing.T, address, idle string) string {
	return fmt.Sprintf(`pools:
  p:
    discovery: {static: [{url: "http://%s"}]}
    health: {interval: 200ms}
    flow:
      max_concurrency: 2
      scale_from_zero: {start: {command: [%q, sim, --preset, instant, --listen, %q], idle: %s}}
`, address, program(t, "faultpoint"), address, idle)
}

// The real program starts a real engine when it is asked for something, and stops
// it when nobody asks for a while.
func TestAnEngineRunsWhileSomebodyNeedsIt(t *testing.T) {
	t.Parallel()
	at := freeport.For(t)
	p := serve(t, t.TempDir(), startsSim(t, at, "1s"), launch{tags: "faultpoint"})
	if reachable(at) {
		t.Fatal("the engine runs before anybody asked")
	}
	if ready := p.get("/readyz"); ready.status != 200 {
		t.Errorf("not ready, so that nobody would ask: %v", ready)
	}
	for range 2 {
		answers := make(chan answer, 20)
		for range cap(answers) {
			go func() { answers <- p.try("POST", "/v1/chat/completions", chatOf("sim")) }()
		}
		for range cap(answers) {
			if got := <-answers; !got.whole() {
				t.Errorf("got %v", got)
			}
		}
		eventually(t, "the engine stops", func() bool { return !reachable(at) })
	}
	if got := p.sum("headgate_scale_events_total", `event="release"`, `ok="true"`); got < 1 {
		t.Errorf("released %v times", got)
	}

	// A request that takes longer than the engine may be idle keeps it.
	s := p.open(chatOf("sim"), "X-Sim-Fault", "stall@token:3:2s")
	if got := s.rest(); !got.whole() {
		t.Errorf("got %v", got)
	}
	// kill -9 of the gateway ends it too.
	p.kill()
	eventually(t, "the engine dies with the gateway", func() bool { return !reachable(at) })
}

func TestAnEngineThatWasStartedEndsWithTheGateway(t *testing.T) {
	t.Parallel()
	at := freeport.For(t)
	p := serve(t, t.TempDir(), startsSim(t, at, "1h"), launch{tags: "faultpoint"})
	if got := p.post(chatOf("sim")); !got.whole() {
		t.Fatalf("got %v", got)
	}
	p.signal(syscall.SIGTERM)
	if reachable(at) {
		t.Error("the engine runs after the gateway has ended")
	}
}

// FLW-1: 20 requests wait for a pool without any endpoint. A command brings two
// engines into the file that lists them, and all are answered, once.
func TestRequestsWaitForEnginesThatACommandBrings(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	e := engines(t, 2)
	file := filepath.Join(dir, "engines.yaml")
	write(t, file, "[]\n")
	write(t, filepath.Join(dir, "later.yaml"), endpoints(e...))
	g := start(t, dir, onePool(fmt.Sprintf(
		`discovery: {file: engines.yaml}, health: {interval: 200ms}, flow: {scale_from_zero: {command: [sh, -c, 'test "$HEADGATE_POOL $HEADGATE_EVENT" = "p wake" && cp %s/later.yaml %s/new && mv %s/new %s']}}`,
		dir, dir, dir, file)))
	answers := make(chan answer, 20)
	for range cap(answers) {
		go func() { answers <- g.try("POST", "/v1/chat/completions", chatOf("sim")) }()
	}
	var ids []string
	for range cap(answers) {
		got := <-answers
		if !got.whole() {
			t.Errorf("got %v", got)
		}
		ids = append(ids, got.id())
	}
	var reached []string
	for _, entry := range received(e...) {
		reached = append(reached, entry.Request)
	}
	slices.Sort(ids)
	slices.Sort(reached)
	if !slices.Equal(ids, reached) {
		t.Errorf("answered %v\nengines got %v", ids, reached)
	}
	if got := g.sum("headgate_scale_from_zero_wanted"); got != 0 {
		t.Errorf("wanted %v with engines there", got)
	}
}
