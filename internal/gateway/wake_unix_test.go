// SPDX-License-Identifier: Apache-2.0

//go:build unix

package gateway_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/headgate/headgate/inference"
)

// While an engine is being stopped it may still serve, and answers probes; it gets
// nothing more. Who comes then waits for the next one.
func TestAnEngineThatIsBeingStoppedGetsNothing(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	q := sleeping(t, fmt.Sprintf(
		`{scale_from_zero: {start: {command: [sh, -c, 'trap "" TERM; echo $$ >%s.new; mv %s.new %s; while :; do sleep 0.05; done'], idle: 1s, stop_timeout: 1s}}}`,
		pid, pid, pid))
	first := q.ask("first")
	q.waiting(1)
	var text []byte // before the engine is used: from then on it can be stopped
	q.until("the command is running", func() bool {
		var err error
		text, err = os.ReadFile(pid)
		return err == nil
	})
	number, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	q.up() // what the command stands for
	if got := <-first; got.status != 200 {
		t.Fatalf("%+v", got)
	}
	q.until("the engine is stopped", func() bool { return q.gateway.Status()[0].Endpoints[0].Health == inference.Gone })
	if err := syscall.Kill(number, 0); err != nil {
		t.Fatalf("the engine has ended before it could be tried: %v", err)
	}
	if got := <-q.ask("second"); got.status != 200 {
		t.Errorf("%+v", got)
	}
	if err := syscall.Kill(number, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("a request was sent to an engine that is being stopped: %v", err)
	}
}
