// SPDX-License-Identifier: Apache-2.0

// Package process runs programs that must not outlive this one: engines and
// hooks.
//
// A program gets a process group of its own, so that it can be ended together
// with what it started, and a terminal's Ctrl-C reaches only whoever stops it in
// order. On Linux the kernel kills it when this process dies, however it dies;
// elsewhere it outlives a crash. The package refuses to know what the programs are for, to start them
// again, and to use a shell.
package process

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// Process is a program that was started.
type Process struct {
	cmd    *exec.Cmd
	began  time.Time
	exited chan struct{}
	state  *os.ProcessState // once exited is closed
}

// Start starts a program with more in its environment than this process has. What
// it writes goes where this process's own output goes. When it ends, what is left
// of its group is killed: an engine's workers would keep its memory.
func Start(argv []string, env ...string) (*Process, error) {
	cmd := command(argv, env)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return start(cmd, kill)
}

func command(argv, env []string) *exec.Cmd {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = attributes()
	return cmd
}

func start(cmd *exec.Cmd, after func(*os.Process) error) (*Process, error) {
	p := &Process{cmd: cmd, began: time.Now(), exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel's signal is sent when the thread ends that started the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // its state says the same and more
		// At once: later the group's number may be another's.
		_ = after(cmd.Process)
		p.state = cmd.ProcessState
		close(p.exited)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// Incarnation names the process.
func (p *Process) Incarnation() string {
	return fmt.Sprintf("pid-%d@%d", p.cmd.Process.Pid, p.began.UnixNano())
}

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Code is the exit code to pass on, once the process has ended: 128 and the
// signal's number where a signal ended it, as shells do.
func (p *Process) Code() int {
	if status, ok := p.state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return p.state.ExitCode()
}

// Stop asks the program and what it started to end, and kills them after a while.
// It returns when the program has ended.
func (p *Process) Stop(patience time.Duration) {
	select {
	case <-p.exited:
		return
	default:
		_ = terminate(p.cmd.Process)
	}
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case <-p.exited:
	case <-limit.C:
		_ = kill(p.cmd.Process)
		<-p.exited
	}
}

// outputMax bounds what is kept of a program's output: the last of it.
const outputMax = 4 << 10

// killTime is how long a program may take to end when it is told to.
const killTime = time.Second

// Run runs a program until it ends, and stops it when ctx is done. It returns the
// last of its output, and an error unless it ended with 0. What it started and
// left running by then is its own affair.
func Run(ctx context.Context, argv []string, env ...string) (output string, err error) {
	var last tail
	cmd := command(argv, env)
	cmd.Stdout, cmd.Stderr = &last, &last
	cmd.WaitDelay = killTime // for what it left behind with its output open
	p, err := start(cmd, func(*os.Process) error { return nil })
	if err != nil {
		return "", err
	}
	select {
	case <-p.exited:
	case <-ctx.Done():
		p.Stop(killTime)
		return last.String(), context.Cause(ctx)
	}
	if code := p.Code(); code != 0 {
		return last.String(), fmt.Errorf("exit code %d", code)
	}
	return last.String(), nil
}

// tail keeps the last bytes that are written to it.
type tail struct{ kept []byte }

func (t *tail) Write(b []byte) (int, error) {
	t.kept = append(t.kept, b[max(0, len(b)-outputMax):]...)
	if over := len(t.kept) - outputMax; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	return string(bytes.ToValidUTF8(bytes.TrimSpace(t.kept), []byte("?")))
}
