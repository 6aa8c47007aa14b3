// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/headgate/headgate/internal/freeport"
)

// Target is a proxy to measure. In Command and the text of Config, @LISTEN@ is
// the address to listen on, @ENGINE@ the engine's, @CONFIG@ the file that is made
// from Config, and @DIR@ a directory of its own.
type Target struct {
	Name    string
	Command []string // none: the engine itself, without a proxy
	Config  string   // name of a file; may be empty
	Version []string // a command that prints the version
}

// Targets are the proxies of the comparison, each with one core's worth of
// workers. dir holds their configurations, and headgate and reverseproxy are
// binaries.
func Targets(dir, headgate, reverseproxy string) []Target {
	return []Target{
		{Name: "direct"},
		{
			Name:    "headgate",
			Command: []string{"env", "GOMAXPROCS=1", headgate, "serve", "--upstream", "http://@ENGINE@", "--listen", "@LISTEN@", "--admin", "", "--log-level", "warn"},
			Version: []string{"git", "-C", dir, "describe", "--always", "--dirty"},
		},
		{
			Name: "nginx", Config: filepath.Join(dir, "nginx.conf"),
			Command: []string{"nginx", "-p", "@DIR@", "-c", "@CONFIG@"},
			Version: []string{"nginx", "-v"},
		},
		{
			Name: "haproxy", Config: filepath.Join(dir, "haproxy.cfg"),
			Command: []string{"haproxy", "-db", "-f", "@CONFIG@"},
			Version: []string{"haproxy", "-v"},
		},
		{
			Name:    "reverseproxy",
			Command: []string{"env", "GOMAXPROCS=1", reverseproxy, "-listen", "@LISTEN@", "-engine", "http://@ENGINE@"},
			Version: []string{"go", "version"},
		},
	}
}

// version is the first line that the version command prints, "" without one.
func (t Target) version(ctx context.Context) string {
	if len(t.Version) == 0 {
		return ""
	}
	out, err := exec.CommandContext(ctx, t.Version[0], t.Version[1:]...).CombinedOutput()
	if err != nil {
		return err.Error()
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return line
}

// process is a target at work.
type process struct {
	address string
	port    *freeport.Port
	pid     int // 0 for the engine itself
	cmd     *exec.Cmd
	dir     string
	words   bytes.Buffer // what it printed
	exited  chan struct{}
}

// start runs a target, on one CPU if cpu is not negative, and returns when it
// accepts connections.
func (t Target) start(ctx context.Context, engine string, cpu int) (*process, error) {
	if len(t.Command) == 0 {
		return &process{address: engine}, nil
	}
	p := &process{exited: make(chan struct{})}
	var err error
	if p.port, err = freeport.Take(); err != nil {
		return nil, err
	}
	p.address = p.port.Addr
	if p.dir, err = os.MkdirTemp("", "headgate-bench-"); err != nil {
		p.port.Release()
		return nil, err
	}
	_, port, _ := net.SplitHostPort(p.address)
	fill := strings.NewReplacer("@LISTEN@", p.address, "@PORT@", port, "@ENGINE@", engine, "@DIR@", p.dir,
		"@CONFIG@", filepath.Join(p.dir, "config"))
	if t.Config != "" {
		text, err := os.ReadFile(t.Config)
		if err == nil {
			err = os.WriteFile(filepath.Join(p.dir, "config"), []byte(fill.Replace(string(text))), 0o600)
		}
		if err != nil {
			return nil, errors.Join(err, p.clean())
		}
	}
	var args []string
	if cpu >= 0 {
		args = []string{"taskset", "-c", strconv.Itoa(cpu)}
	}
	for _, a := range t.Command {
		args = append(args, fill.Replace(a))
	}
	p.cmd = exec.CommandContext(ctx, args[0], args[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = &p.words, &p.words
	p.cmd.WaitDelay = 5 * time.Second
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(err, p.clean())
	}
	p.pid = p.cmd.Process.Pid
	go func() {
		_ = p.cmd.Wait() // the exit code of a process that was told to end says nothing
		close(p.exited)
	}()
	if err := p.ready(ctx); err != nil {
		p.stop()
		return nil, fmt.Errorf("%s: %w: %s", t.Name, err, strings.TrimSpace(p.words.String()))
	}
	return p, nil
}

// ready returns when the process accepts connections.
func (p *process) ready(ctx context.Context) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 1000 {
		if c, err := net.Dial("tcp", p.address); err == nil {
			return c.Close()
		}
		select {
		case <-tick.C:
		case <-p.exited:
			return errors.New("exited")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return errors.New("does not listen")
}

// stop ends the process and returns when it is gone.
func (p *process) stop() {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	grace := time.NewTimer(3 * time.Second)
	defer grace.Stop()
	select {
	case <-p.exited:
	case <-grace.C:
		for _, pid := range family(p.pid) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		<-p.exited
	}
	_ = p.clean()
}

func (p *process) clean() error {
	p.port.Release()
	return os.RemoveAll(p.dir)
}
