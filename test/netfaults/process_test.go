// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// A process is a program that runs in a node. Its output is kept in a file, and
// each line is told to whoever wants it.
type process struct {
	name    string
	cmd     *exec.Cmd
	file    *os.File
	exited  chan struct{} // closed once it is gone and its output is read
	stopped bool          // by SIGSTOP

	lines // of its output
}

// lines are an output that grows, and can be waited on.
type lines struct {
	mu   sync.Mutex
	all  []string
	more chan struct{} // closed and replaced at each line
	over bool
}

func (l *lines) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, line)
	close(l.more)
	l.more = make(chan struct{})
}

func (l *lines) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	close(l.more)
	l.more = make(chan struct{})
}

// since returns the lines from the nth on, a channel that is closed at the next
// one, and whether there will be none.
func (l *lines) since(n int) ([]string, <-chan struct{}, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all[min(n, len(l.all)):], l.more, l.over
}

var errOver = errors.New("the process ended")

// await waits for a line.
func (l *lines) await(match func(string) bool) error {
	late := time.NewTimer(patience)
	defer late.Stop()
	for n := 0; ; {
		found, more, over := l.since(n)
		if slices.ContainsFunc(found, match) {
			return nil
		}
		n += len(found)
		if over {
			return errOver
		}
		select {
		case <-more:
		case <-late.C:
			return fmt.Errorf("not within %v", patience)
		}
	}
}

// start runs a program in a node, with its output in a file.
func (n *node) start(name, file string, args ...string) (*process, error) {
	p := &process{name: name, exited: make(chan struct{})}
	p.more = make(chan struct{})
	var err error
	if p.file, err = os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		return nil, err
	}
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.cmd = exec.Command(args[0], args[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = in, in
	err = n.do(p.cmd.Start)
	in.Close()
	if err != nil {
		out.Close()
		return nil, err
	}
	go func() {
		defer close(p.exited)
		defer p.file.Close()
		defer out.Close()
		for r := bufio.NewReader(out); ; {
			line, err := r.ReadString('\n')
			_, _ = p.file.WriteString(line)
			if err != nil {
				break
			}
			p.add(strings.TrimSuffix(line, "\n"))
		}
		_ = p.cmd.Wait() // that it was killed is no news
		p.end()
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) alive() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// kill is kill -9. It returns when the process is gone.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may be gone
	<-p.exited
	p.stopped = false
}

// stop is SIGSTOP. It returns when the kernel says that every thread of the
// process stands still.
func (p *process) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	p.stopped = true
	return poll("all threads to stop", func() bool {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.pid()))
		for _, task := range tasks {
			if state(p.pid(), task.Name()) != 'T' {
				return false
			}
		}
		return err == nil && len(tasks) > 0
	})
}

func state(pid int, task string) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/stat", pid, task))
	i := strings.LastIndexByte(string(stat), ')')
	if err != nil || i < 0 || i+2 >= len(stat) {
		return 0
	}
	return stat[i+2]
}

// wake is SIGCONT.
func (p *process) wake() error {
	p.stopped = false
	return p.cmd.Process.Signal(syscall.SIGCONT)
}

// unread reports whether a connection to a port of the process's node has that
// many bytes that it has not read.
func (p *process) unread(port, bytes int) bool {
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", p.pid()))
	if err != nil {
		return false
	}
	for row := range strings.Lines(string(table)) {
		f := strings.Fields(row)
		if len(f) < 5 || !strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
			continue
		}
		var waiting int
		if _, rx, ok := strings.Cut(f[4], ":"); ok {
			_, _ = fmt.Sscanf(rx, "%X", &waiting)
		}
		if waiting >= bytes {
			return true
		}
	}
	return false
}

// poll waits for what nothing announces.
func poll(what string, holds func() bool) error {
	late := time.NewTimer(patience)
	defer late.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-late.C:
			return fmt.Errorf("not within %v: %s", patience, what)
		}
	}
	return nil
}
