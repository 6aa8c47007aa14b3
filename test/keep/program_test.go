// SPDX-License-Identifier: Apache-2.0

package keep

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// programs are the commands that were built, by build tags.
var programs struct {
	mu   sync.Mutex
	dir  string
	path map[string]string
}

// program builds the headgate command once for each set of tags.
func program(t *testing.T, tags string) string {
	t.Helper()
	programs.mu.Lock()
	defer programs.mu.Unlock()
	if path := programs.path[tags]; path != "" {
		return path
	}
	if programs.dir == "" {
		dir, err := os.MkdirTemp("", "headgate-keep-") //nolint:usetesting // it outlives the test that is first to need it
		must(t, err)
		programs.dir, programs.path = dir, map[string]string{}
	}
	path := filepath.Join(programs.dir, "headgate-"+tags)
	build := exec.Command("go", "build", "-tags", tags, "-o", path, "github.com/headgate/headgate/cmd/headgate")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	programs.path[tags] = path
	return path
}

func removePrograms() {
	if programs.dir != "" {
		_ = os.RemoveAll(programs.dir)
	}
}

// A child is the program, running.
type child struct {
	site
	dir    string
	cmd    *exec.Cmd
	log    *text
	exited chan struct{} // closed once it is gone
	state  *os.ProcessState
}

// launch describes how the program is started.
type launch struct {
	tags  string
	env   []string
	shell string // run before it by the same shell, as "ulimit -f 100"
	token string
}

var listening = regexp.MustCompile(`msg=listening listener=(\w+) address=(\S+)`)

// serve starts the program with this configuration in dir, and returns once it
// listens.
func serve(t *testing.T, dir, yaml string, l launch) *child {
	t.Helper()
	p, err := l.try(t, dir, yaml)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// try is serve for a program that may refuse to start.
func (l launch) try(t *testing.T, dir, yaml string) (*child, error) {
	t.Helper()
	file := filepath.Join(dir, "headgate.yaml")
	write(t, file, defaults(yaml))
	path := program(t, l.tags)
	args := []string{"serve", "--config", file, "--log-level", "debug"}
	cmd := exec.Command(path, args...)
	if l.shell != "" {
		cmd = exec.Command("sh", append([]string{"-c", l.shell + `; exec "$@"`, "sh", path}, args...)...)
	}
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), l.env...)
	pipe, err := cmd.StderrPipe()
	must(t, err)
	p := &child{site: newSite(t), dir: dir, cmd: cmd, log: new(text), exited: make(chan struct{})}
	p.token = l.token
	must(t, cmd.Start())
	ready := make(chan struct{})
	go func() {
		defer close(p.exited)
		announced := 0
		for lines := bufio.NewReader(pipe); ; {
			line, err := lines.ReadString('\n')
			_, _ = p.log.Write([]byte(line))
			if m := listening.FindStringSubmatch(line); m != nil {
				if m[1] == "admin" {
					p.admin = m[2]
				} else {
					p.addr = m[2]
				}
				if announced++; announced == 2 {
					close(ready)
				}
			}
			if err != nil {
				break
			}
		}
		_ = cmd.Wait() // its state is looked at instead
		p.state = cmd.ProcessState
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("the end of the program's log:\n%s", p.log.tail(4<<10))
		}
	})
	select {
	case <-ready:
		return p, nil
	case <-p.exited:
		return p, fmt.Errorf("the program ended: %v\n%s", p.state, p.log)
	case <-time.After(patience):
		return p, fmt.Errorf("the program does not listen\n%s", p.log)
	}
}

// kill is kill -9. It waits until the program is gone.
func (p *child) kill() { p.signal(syscall.SIGKILL) }

func (p *child) signal(s syscall.Signal) {
	_ = p.cmd.Process.Signal(s) // it may be gone by itself
	if s == syscall.SIGHUP {
		return
	}
	p.gone()
	p.client.CloseIdleConnections()
}

// gone waits for the program's end.
func (p *child) gone() {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.t.Fatal("the program does not end")
	}
}

// killed reports whether SIGKILL ended it.
func (p *child) killed() bool {
	status, ok := p.state.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// headgate runs a command of the program and returns its output.
func headgate(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t, "faultpoint"), args...)
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Fatalf("headgate %s: %v\n%s", strings.Join(args, " "), err, exit.Stderr)
		}
		t.Fatal(err)
	}
	return string(out)
}

// exported is the journal in a file, by the command line, by request id.
func exported(t *testing.T, file string) map[string]record {
	t.Helper()
	found := map[string]record{}
	for line := range strings.Lines(headgate(t, "journal", "export", "--file", file)) {
		var r record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("export: %v\n%s", err, line)
		}
		found[r.RequestID] = r
	}
	return found
}
