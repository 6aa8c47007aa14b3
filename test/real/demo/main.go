// SPDX-License-Identifier: Apache-2.0

// Command demo starts two llama-servers and headgate before them, kills one in
// the middle of its work, and prints what curl received beside what the engines
// logged. It fails if a promise was broken.
//
// It judges by curl's bytes and the engines' logs alone. test/real/demo.sh
// builds and installs what it needs.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/headgate/headgate/internal/freeport"
	"github.com/headgate/headgate/test/real"
)

func main() {
	var d demo
	flag.StringVar(&d.headgate, "headgate", "", "the gateway's binary")
	flag.StringVar(&d.engine.Binary, "llama", "", "llama-server")
	flag.StringVar(&d.engine.Model, "model", "", "GGUF file")
	flag.StringVar(&d.engine.Dir, "dir", "", "directory for logs")
	flag.Parse()
	d.engine.Alias, d.engine.Slots = "smollm2", 2
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if err := d.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// demo is two engines and a gateway, each a process.
type demo struct {
	headgate string
	engine   real.EngineConfig
	engines  []*real.Engine
	told     []int // how much of each engine's story was printed
	addr     string
}

func (d *demo) run(ctx context.Context) error {
	defer func() {
		for _, e := range d.engines {
			e.Kill()
		}
	}()
	for _, name := range []string{"A", "B"} {
		c := d.engine
		c.Name = name
		port, err := freeport.Take()
		if err != nil {
			return err
		}
		defer port.Release()
		c.Addr = port.Addr
		e, err := real.StartEngine(ctx, c)
		if err != nil {
			return err
		}
		d.engines = append(d.engines, e)
		d.told = append(d.told, 0)
	}
	stop, err := d.serve(ctx)
	if err != nil {
		return err
	}
	defer stop()
	fmt.Printf("Engines: llama-server with SmolLM2-135M, A on %s and B on %s.\n", d.engines[0].Addr, d.engines[1].Addr)
	fmt.Printf("$ headgate serve --upstream http://%s --upstream http://%s --listen %s\n", d.engines[0].Addr, d.engines[1].Addr, d.addr)

	kept := true
	for i, s := range scenes {
		fmt.Printf("\n%d. %s\n   promised: %s\n", i+1, s.title, s.promise)
		err := d.play(ctx, s)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil {
			fmt.Println("   kept")
		} else {
			kept = false
			fmt.Println("   BROKEN:", err)
		}
		if err := d.revive(ctx); err != nil {
			return err
		}
	}
	if !kept {
		return errors.New("a promise was broken")
	}
	fmt.Println("\nAll promises were kept.")
	return nil
}

// serve starts the gateway and waits until it listens.
func (d *demo) serve(ctx context.Context) (stop func(), err error) {
	port, err := freeport.Take()
	if err != nil {
		return nil, err
	}
	d.addr = port.Addr
	args := []string{"serve", "--listen", d.addr, "--admin", "", "--log-level", "debug"}
	for _, e := range d.engines {
		args = append(args, "--upstream", "http://"+e.Addr)
	}
	cmd := exec.Command(d.headgate, args...)
	log := newOutput()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		port.Release()
		return nil, err
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait() // it was told to end
		log.close()
	}()
	stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-exited
		port.Release()
	}
	if text := log.until(ctx, "msg=listening", 1); !strings.Contains(text, "msg=listening") {
		stop()
		return nil, fmt.Errorf("headgate did not start: %s", text)
	}
	return stop, nil
}

// scene is one request of the demo.
type scene struct {
	title, promise string
	prompt         string
	tokens         int
	killAt         moment
}

type moment int

const (
	never moment = iota
	inPrefill
	inDecode
)

const question = "Explain in two sentences what a load balancer does."

var scenes = []scene{
	{
		title: "Nothing goes wrong", promise: "one whole answer",
		prompt: question, tokens: 60,
	},
	{
		title:   "The busy engine is killed while it reads the prompt",
		promise: "one whole answer, from the other engine",
		prompt:  strings.Repeat("A gateway stands between clients and engines. ", 30) + question, tokens: 60, killAt: inPrefill,
	},
	{
		title:   "The busy engine is killed when the client has eight tokens",
		promise: "the stream ends with an error, and nothing is generated again",
		prompt:  question, tokens: 60, killAt: inDecode,
	},
}

func (d *demo) play(ctx context.Context, s scene) error {
	before := d.tasks()
	body, err := json.Marshal(map[string]any{
		"model": "smollm2", "stream": true, "max_tokens": s.tokens, "temperature": 0,
		"messages": []map[string]string{{"role": "user", "content": s.prompt}},
	})
	if err != nil {
		return err
	}
	shown := string(body)
	if len(shown) > 200 {
		shown = shown[:110] + " … " + shown[len(shown)-85:]
	}
	url := "http://" + d.addr + "/v1/chat/completions"
	fmt.Printf("   $ curl -sN %s -H 'Content-Type: application/json' -d '%s'\n", url, shown)

	curl := exec.CommandContext(ctx, "curl", "-sN", "--max-time", "120", url, "-H", "Content-Type: application/json", "-d", string(body))
	out := newOutput()
	curl.Stdout = out
	if err := curl.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		err := curl.Wait()
		out.close()
		ended <- err
	}()
	victim := -1
	if s.killAt != never {
		if s.killAt == inDecode {
			out.until(ctx, `"content":"`, 8)
		}
		if victim, err = d.busy(ctx, before); err == nil {
			d.engines[victim].Kill()
			fmt.Printf("   $ kill -9 %s\n", d.engines[victim].Name)
		}
	}
	curlErr := <-ended
	events, rest := real.Events([]byte(out.text()))
	describe(events)
	d.tell()
	switch {
	case err != nil:
		return err
	case curlErr != nil:
		return fmt.Errorf("curl: %w", curlErr)
	case len(events) == 0 || len(rest) > 0:
		return fmt.Errorf("not an event stream: %q", out.text())
	}
	return s.judge(events, d.worked(before), victim)
}

// judge says which promise was broken; worked is which engines began the
// request.
func (s scene) judge(events []real.Event, worked []int, victim int) error {
	last := events[len(events)-1]
	id := events[0].ID
	for _, e := range events {
		if e.ID != id && !e.Done && e.Error == nil {
			return errors.New("the client got parts of two answers")
		}
	}
	if s.killAt == inDecode {
		switch {
		case last.Error == nil || last.Error.Code != "upstream_decode_interrupted":
			return fmt.Errorf("the last event is %s", last.Raw)
		case real.Text(events) == "":
			return errors.New("there was no output before the error")
		case !slices.Equal(worked, []int{victim}):
			return fmt.Errorf("the request was begun by the engines %v", worked)
		}
		return nil
	}
	attempts := 1
	if s.killAt == inPrefill {
		attempts = 2
	}
	switch {
	case !last.Done:
		return fmt.Errorf("the last event is %s", last.Raw)
	case len(worked) != attempts:
		return fmt.Errorf("the request was begun by the engines %v", worked)
	}
	return nil
}

// describe prints the client's events, the text as it reads.
func describe(events []real.Event) {
	fmt.Println("   client:")
	if n := countText(events); n > 0 {
		fmt.Printf("     %d events with text: %q\n", n, real.Text(events))
	}
	for _, e := range events {
		switch {
		case e.Error != nil:
			fmt.Printf("     %s\n", strings.TrimSpace(e.Raw))
		case e.Done:
			fmt.Println("     data: [DONE]")
		case len(e.Choices) > 0 && e.Choices[0].FinishReason != "":
			fmt.Printf("     finish_reason: %s\n", e.Choices[0].FinishReason)
		}
	}
}

func countText(events []real.Event) int {
	n := 0
	for _, e := range events {
		if e.Content() != "" {
			n++
		}
	}
	return n
}

// tell prints what the engines logged since it was last called.
func (d *demo) tell() {
	for i, e := range d.engines {
		story := e.Story()
		fmt.Printf("   log of engine %s:%s\n", e.Name, map[bool]string{true: " nothing"}[len(story) == d.told[i]])
		for _, line := range story[d.told[i]:] {
			fmt.Printf("     %s\n", line)
		}
		d.told[i] = len(story)
	}
}

// tasks counts what each engine has begun.
func (d *demo) tasks() []int {
	counts := make([]int, len(d.engines))
	for i, e := range d.engines {
		counts[i] = e.Tasks()
	}
	return counts
}

// worked lists the engines that began a request since.
func (d *demo) worked(before []int) []int {
	var list []int
	for i, n := range d.tasks() {
		for range n - before[i] {
			list = append(list, i)
		}
	}
	return list
}

// busy waits until an engine has begun a request.
func (d *demo) busy(ctx context.Context, before []int) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	found := make(chan int, len(d.engines))
	for i, e := range d.engines {
		go func() {
			if e.AwaitTasks(ctx, before[i]+1) != nil {
				i = -1
			}
			found <- i
		}()
	}
	if i := <-found; i >= 0 {
		return i, nil
	}
	return 0, errors.New("no engine began the request")
}

// revive starts an engine again that was killed, at its old address.
func (d *demo) revive(ctx context.Context) error {
	for i, e := range d.engines {
		if !e.Exited() {
			continue
		}
		c := d.engine
		c.Name, c.Addr = e.Name, e.Addr
		var err error
		if d.engines[i], err = real.StartEngine(ctx, c); err != nil {
			return err
		}
		d.told[i] = 0
	}
	return nil
}

// output collects what a process prints; until waits for a text in it.
type output struct {
	mu    sync.Mutex
	b     bytes.Buffer
	more  chan struct{}
	ended bool
}

func newOutput() *output { return &output{more: make(chan struct{}, 1)} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, err := o.b.Write(p)
	o.wake()
	return n, err
}

func (o *output) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	o.wake()
}

func (o *output) wake() {
	select {
	case o.more <- struct{}{}:
	default:
	}
}

func (o *output) text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// until returns what there is when the text is in it n times, or when nothing
// more comes. One goroutine may wait.
func (o *output) until(ctx context.Context, text string, n int) string {
	for {
		o.mu.Lock()
		all, ended := o.b.String(), o.ended
		o.mu.Unlock()
		if ended || strings.Count(all, text) >= n {
			return all
		}
		select {
		case <-o.more:
		case <-ctx.Done():
			return all
		}
	}
}
