// SPDX-License-Identifier: Apache-2.0

package real

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// EngineConfig says which llama-server to run and how.
type EngineConfig struct {
	Name    string // in messages, and of the log's file
	Binary  string // llama-server
	Model   string // GGUF file
	Alias   string // the model's name in answers
	Slots   int    // requests at once; 0 is 4
	Context int    // tokens that the slots share; 0 is 2048 each
	Dir     string // where the log is kept
	Addr    string // host:port, its own also while it does not run: internal/freeport
}

// Engine is a llama-server process. Its output is its log, which is both kept
// in a file and waited on.
type Engine struct {
	Name    string
	Addr    string
	LogFile string

	cmd    *exec.Cmd
	exited chan struct{}
	file   *os.File

	state  // of what follows
	output []byte
	gone   bool
}

// StartEngine runs an engine until it can serve.
func StartEngine(ctx context.Context, c EngineConfig) (*Engine, error) {
	e, err := LaunchEngine(c)
	if err != nil {
		return nil, err
	}
	if err := e.AwaitReady(ctx); err != nil {
		e.Kill()
		return nil, fmt.Errorf("engine %s: %w, its log is %s", e.Name, err, e.LogFile)
	}
	return e, nil
}

// LaunchEngine starts the process and does not wait for anything.
func LaunchEngine(c EngineConfig) (*Engine, error) {
	host, port, err := net.SplitHostPort(c.Addr)
	if err != nil {
		return nil, err
	}
	slots := c.Slots
	if slots == 0 {
		slots = 4
	}
	tokens := c.Context
	if tokens == 0 {
		tokens = 2048 * slots
	}
	e := &Engine{
		Name: c.Name, Addr: c.Addr,
		LogFile: c.Dir + "/" + c.Name + ".log", exited: make(chan struct{}),
	}
	if e.file, err = os.OpenFile(e.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err != nil {
		return nil, err
	}
	// More threads than one spin while they wait for each other and starve a
	// small machine.
	e.cmd = exec.Command(c.Binary, "-m", c.Model, "-a", c.Alias,
		"--host", host, "--port", port,
		"-c", strconv.Itoa(tokens), "-np", strconv.Itoa(slots), "-t", "1", "--poll", "0",
		"--metrics", "--slots", "--no-webui", "--jinja")
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	e.cmd.Stdout, e.cmd.Stderr = (*engineOutput)(e), (*engineOutput)(e)
	if err := e.cmd.Start(); err != nil {
		e.file.Close()
		return nil, err
	}
	go func() {
		defer close(e.exited)
		_ = e.cmd.Wait() // that it was killed is no news
		e.file.Close()
		e.update(func() { e.gone = true })
	}()
	return e, nil
}

// engineOutput is the engine as the writer of its output.
type engineOutput Engine

func (w *engineOutput) Write(p []byte) (int, error) {
	e := (*Engine)(w)
	n, err := e.file.Write(p)
	e.update(func() { e.output = append(e.output, p...) })
	return n, err
}

// AwaitLog waits until the engine has logged a text.
func (e *Engine) AwaitLog(ctx context.Context, text string) error {
	return e.awaitLog(ctx, func(log []byte) bool { return bytes.Contains(log, []byte(text)) }, text)
}

// AwaitTasks waits until the engine has begun this many requests since it was
// started.
func (e *Engine) AwaitTasks(ctx context.Context, n int) error {
	return e.awaitLog(ctx, func(log []byte) bool { return bytes.Count(log, taskBegins) >= n }, "a task")
}

// AwaitReleases waits until the engine has ended this many requests, in
// whatever way.
func (e *Engine) AwaitReleases(ctx context.Context, n int) error {
	return e.awaitLog(ctx, func(log []byte) bool { return bytes.Count(log, taskEnds) >= n }, "a slot that is released")
}

func (e *Engine) awaitLog(ctx context.Context, holds func(log []byte) bool, what string) error {
	found := false
	err := e.await(ctx, func() bool {
		found = holds(e.output)
		return found || e.gone
	})
	switch {
	case err != nil:
		return fmt.Errorf("engine %s: waiting for %s: %w", e.Name, what, err)
	case !found:
		return fmt.Errorf("engine %s: waiting for %s: %w", e.Name, what, errExited)
	}
	return nil
}

// AwaitReady waits until this very process serves: had its port been taken by
// another one, it would not have logged that it listens.
func (e *Engine) AwaitReady(ctx context.Context) error {
	if err := e.AwaitLog(ctx, "listening on http://"+e.Addr); err != nil {
		return err
	}
	status, body, err := e.Get("/health")
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("/health is %d: %s", status, body)
	}
	return err
}

// What llama-server logs when a request gets a slot, and when the slot is free
// again.
var (
	taskBegins = []byte("| processing task, is_child = 0")
	taskEnds   = []byte("| stop processing: n_tokens")
)

// Log is what the engine has logged.
func (e *Engine) Log() string {
	var log string
	e.read(func() { log = string(e.output) })
	return log
}

// Tasks counts the requests that the engine has begun.
func (e *Engine) Tasks() int { return strings.Count(e.Log(), string(taskBegins)) }

// Story is what the engine's log says of requests, without the lines about
// anything else.
func (e *Engine) Story() []string {
	var lines []string
	for line := range strings.Lines(e.Log()) {
		switch {
		case strings.Contains(line, "| processing task"), strings.Contains(line, "eval time ="),
			strings.Contains(line, "| stop processing"), strings.Contains(line, "cancel task"):
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// PID is the process's id.
func (e *Engine) PID() int { return e.cmd.Process.Pid }

// Kill ends the process with signal 9, as the kernel does when memory runs out,
// and returns when it is gone. A second call does nothing.
func (e *Engine) Kill() {
	select {
	case <-e.exited:
	default:
		// The group, in case the server has children; they must not outlive it.
		_ = syscall.Kill(-e.PID(), syscall.SIGKILL)
		<-e.exited
	}
}

// Exited reports whether the process is gone.
func (e *Engine) Exited() bool {
	select {
	case <-e.exited:
		return true
	default:
		return false
	}
}

// Get asks the engine itself, on a connection of its own.
func (e *Engine) Get(path string) (status int, body []byte, err error) {
	return Ask(e.Addr, "GET "+path+" HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n")
}

// Post sends the engine a JSON body past the gateway.
func (e *Engine) Post(path, body string) (status int, answer []byte, err error) {
	return Ask(e.Addr, fmt.Sprintf("POST %s HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
		path, len(body), body))
}

// Ask writes a request to an address as it is and reads the answer.
func Ask(addr, request string) (status int, body []byte, err error) {
	conn, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return 0, nil, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := io.WriteString(conn, request); err != nil {
		return 0, nil, err
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	body, err = io.ReadAll(res.Body)
	return res.StatusCode, body, err
}

// Metric is one of the engine's metrics, without its prefix llamacpp:.
func (e *Engine) Metric(name string) (float64, error) {
	_, body, err := e.Get("/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(body)) {
		if value, ok := strings.CutPrefix(line, "llamacpp:"+name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("engine %s has no metric llamacpp:%s", e.Name, name)
}

// Slot is what /slots says of one slot.
type Slot struct {
	Busy bool `json:"is_processing"`
	Next []struct {
		Decoded int `json:"n_decoded"`
	} `json:"next_token"`
}

// Slots is what the engine is doing.
func (e *Engine) Slots() ([]Slot, error) {
	status, body, err := e.Get("/slots")
	if err != nil {
		return nil, err
	}
	var slots []Slot
	if err := json.Unmarshal(body, &slots); err != nil {
		return nil, fmt.Errorf("engine %s: /slots answered %d: %w", e.Name, status, err)
	}
	return slots, nil
}
