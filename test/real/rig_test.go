// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/freeport"
	"github.com/headgate/headgate/internal/lifecycle"
	"github.com/headgate/headgate/test/real"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds one test: what has not happened by then does not happen.
const patience = 90 * time.Second

// part runs an install script and returns the path that it prints.
func part(t *testing.T, script string, args ...string) string {
	t.Helper()
	cmd := exec.Command(filepath.Join("..", "deps", script), args...)
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, complaints.Bytes())
	}
	return strings.TrimSpace(string(out))
}

// replica is an engine behind a relay.
type replica struct {
	*real.Engine
	*real.Relay
}

// kill ends the engine with signal 9. From then on its address refuses, as it
// would without a relay.
func (r replica) kill() {
	r.Engine.Kill()
	r.Refuse()
}

// rig is a gateway between a client and two real engines.
type rig struct {
	t        *testing.T
	ctx      context.Context
	replicas []replica
	url      string
	client   *http.Client
}

// newRig starts two engines with a model of test/deps/model.sh.
func newRig(t *testing.T, model string) *rig {
	t.Helper()
	r := blankRig(t)
	for _, name := range []string{"engine1", "engine2"} {
		e, err := real.LaunchEngine(r.engine(name, model))
		if err != nil {
			t.Fatal(err)
		}
		r.add(e)
	}
	for _, e := range r.replicas {
		if err := e.AwaitReady(r.ctx); err != nil {
			t.Fatal(err)
		}
	}
	r.serve()
	return r
}

func blankRig(t *testing.T) *rig {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return &rig{t: t, ctx: ctx}
}

func (r *rig) engine(name, model string) real.EngineConfig {
	r.t.Helper()
	return real.EngineConfig{
		Name: name, Binary: part(r.t, "llama.sh"), Model: part(r.t, "model.sh", model), Alias: "tiny", Dir: r.keep(), Addr: freeport.For(r.t),
	}
}

// keep is a directory for logs that stays when the test fails, which
// t.TempDir does not.
func (r *rig) keep() string {
	r.t.Helper()
	dir, err := os.MkdirTemp("", "headgate-real-")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if r.t.Failed() {
			r.t.Logf("kept %s", dir)
			return
		}
		if err := os.RemoveAll(dir); err != nil {
			r.t.Error(err)
		}
	})
	return dir
}

// add puts a relay before an engine.
func (r *rig) add(e *real.Engine) {
	r.t.Helper()
	r.t.Cleanup(func() {
		e.Kill()
		if r.t.Failed() {
			r.t.Logf("%s\n%s", e.Name, strings.Join(e.Story(), "\n"))
		}
	})
	relay, err := real.NewRelay("127.0.0.1:0", e.Addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(relay.Close)
	r.replicas = append(r.replicas, replica{e, relay})
}

// serve starts the gateway before the replicas.
func (r *rig) serve() {
	r.t.Helper()
	yaml := "listeners: [{name: main, address: \"127.0.0.1:0\"}]\nadmin: {address: \"\"}\njournal: {driver: none}\npools:\n  tiny:\n    health: {interval: 0s}\n    scrape: {interval: 0s}\n    discovery: {static: ["
	for _, e := range r.replicas {
		yaml += fmt.Sprintf("{url: %q},", "http://"+e.Relay.Addr())
	}
	yaml += "]}\n"
	c, err := config.Parse("test.yaml", []byte(yaml))
	if err != nil {
		r.t.Fatal(err)
	}
	log := &logFile{}
	p, err := lifecycle.Start(c, slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), "test")
	if err != nil {
		r.t.Fatal(err)
	}
	r.url = "http://" + p.Addr("main").String()
	transport := &http.Transport{DisableCompression: true}
	r.client = &http.Client{Transport: transport}
	r.t.Cleanup(func() {
		transport.CloseIdleConnections()
		p.Stop()
		if r.t.Failed() {
			r.t.Logf("gateway\n%s", log.text())
		}
	})
}

// logFile is a log in memory.
type logFile struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logFile) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// ask is one request to the chat endpoint.
type ask struct {
	stream bool
	usage  bool
	tokens int    // of the answer, which can't stop before
	prompt string // "" is a short one
}

func (a ask) body() string {
	prompt := a.prompt
	if prompt == "" {
		prompt = "What does the gateway do?"
	}
	m := map[string]any{
		"model": "tiny", "max_tokens": a.tokens, "logit_bias": map[string]int{"2": -100},
		"messages": []map[string]string{{"role": "user", "content": prompt}},
	}
	if a.stream {
		m["stream"] = true
	}
	if a.usage {
		m["stream_options"] = map[string]bool{"include_usage": true}
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// longPrompt takes the slow model a second or more to read.
var longPrompt = strings.Repeat("The gateway sends every request to a healthy engine. ", 150)

// reply is an answer as the client got it, as far as it has read.
type reply struct {
	ask
	status  int
	request string // X-Request-Id
	body    []byte
	err     error // of reading the body: nil when it ended by its framing

	from io.ReadCloser
}

const chatPath = "/v1/chat/completions"

// open sends a request and returns when the head of the answer is there.
func (r *rig) open(ctx context.Context, a ask) *reply {
	r.t.Helper()
	got, err := r.post(ctx, a.body())
	if err != nil {
		r.t.Fatal(err)
	}
	got.ask = a
	return got
}

func (r *rig) post(ctx context.Context, body string) (*reply, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+chatPath, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := r.client.Do(req)
	if err != nil {
		return nil, err
	}
	return &reply{status: res.StatusCode, request: res.Header.Get("X-Request-Id"), from: res.Body}, nil
}

// do sends a request and reads the whole answer.
func (r *rig) do(a ask) *reply {
	r.t.Helper()
	return r.open(r.ctx, a).rest()
}

// start sends a request beside the test, which goes on; wait has the answer.
func (r *rig) start(a ask) (wait func() *reply) {
	var got *reply
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		if got, err = r.post(r.ctx, a.body()); err == nil {
			got.ask = a
			got.rest()
		}
	}()
	return func() *reply {
		r.t.Helper()
		<-done
		if err != nil {
			r.t.Fatal(err)
		}
		return got
	}
}

// readUntil reads on until the body is as wanted, or ends.
func (a *reply) readUntil(enough func(body []byte) bool) {
	buf := make([]byte, 4<<10)
	for !enough(a.body) {
		n, err := a.from.Read(buf)
		a.body = append(a.body, buf[:n]...)
		if err != nil {
			if !errors.Is(err, io.EOF) {
				a.err = err
			}
			return
		}
	}
}

// rest reads to the end.
func (a *reply) rest() *reply {
	a.readUntil(func([]byte) bool { return false })
	a.from.Close()
	return a
}

// hasTokens is true for a body, decoded or not, with this many pieces of text.
// Each streamed token of the tiny models is one event, with some text.
func hasTokens(n int) func([]byte) bool {
	return func(b []byte) bool { return bytes.Count(b, []byte(`"content":"`)) >= n }
}

// throughTokens is the hold's Pass that lets a number of events with text go by,
// and some bytes of the next one.
func throughTokens(n, more int) func([]byte) int {
	return func(b []byte) int {
		at := 0
		for range n {
			i := bytes.Index(b[at:], []byte(`"content":"`))
			if i < 0 {
				return len(b)
			}
			at += i + 1
		}
		end := bytes.Index(b[at:], []byte("\n\n"))
		if end < 0 {
			return len(b)
		}
		return at + end + 2 + more
	}
}

// posts are all requests that reached the fleet.
func (r *rig) posts() []real.Exchange {
	var all []real.Exchange
	for _, e := range r.replicas {
		all = append(all, e.Posts()...)
	}
	return real.InOrder(all)
}

// of are the exchanges of one request.
func (r *rig) of(request string) []real.Exchange {
	var mine []real.Exchange
	for _, x := range r.posts() {
		if x.Request == request {
			mine = append(mine, x)
		}
	}
	return mine
}

// holding is the replica of a connection, and the other one.
func (r *rig) holding(c *real.Conn) (this, other replica) {
	if slices.Contains(r.replicas[0].Conns(), c) {
		return r.replicas[0], r.replicas[1]
	}
	return r.replicas[1], r.replicas[0]
}

// hold arms all relays with one hold.
func (r *rig) hold(h *real.Hold) *real.Hold {
	for _, e := range r.replicas {
		e.Hold(h)
	}
	return h
}

// must fails the test on an error.
func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// busy waits until one of the engines has begun a request and returns it.
func (r *rig) busy() (this, other replica) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	found := make(chan int, len(r.replicas))
	for i, e := range r.replicas {
		go func() {
			if e.AwaitTasks(ctx, 1) == nil {
				found <- i
			} else {
				found <- -1
			}
		}()
	}
	first := <-found
	cancel()
	for range len(r.replicas) - 1 {
		<-found
	}
	if first < 0 {
		r.t.Fatal("no engine began the request")
	}
	return r.replicas[first], r.replicas[1-first]
}

// tokens is what an engine says that it has generated.
func (r *rig) tokens(e replica) int {
	r.t.Helper()
	n, err := e.Metric("tokens_predicted_total")
	r.must(err)
	return int(n)
}
