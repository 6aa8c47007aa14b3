// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// Process is an engine that the guard started.
type Process struct {
	cmd    *exec.Cmd
	began  time.Time
	exited chan struct{}
	state  *os.ProcessState // once exited is closed
}

// StartEngine starts an engine. It dies with the guard: without one nobody would
// hold its work to any lease. What it writes goes where the guard's own output
// goes.
func StartEngine(argv []string) (*Process, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p := &Process{cmd: cmd, began: time.Now(), exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel sends the signal when the thread ends that started the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // its state says the same and more
		p.state = cmd.ProcessState
		close(p.exited)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the engine: %w", err)
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

// Stop asks the engine to end, and ends it after a while.
func (p *Process) Stop(patience time.Duration) {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.exited:
	case <-time.After(patience):
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
}
