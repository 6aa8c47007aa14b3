// SPDX-License-Identifier: Apache-2.0

package waker_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/wake"
	"github.com/headgate/headgate/internal/waker"
)

// patience bounds every wait for an event. A test that needs it has failed.
const patience = time.Minute

// pool is a pool as a Waker sees it.
type pool struct {
	mu   sync.Mutex
	view wake.View
	shut bool
	told chan struct{} // of Gone
}

func newPool(v wake.View) *pool { return &pool{view: v, told: make(chan struct{}, 100)} }

func (p *pool) View() wake.View {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.view
}

func (p *pool) Shut() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.view.Waiting+p.view.Running > 0 {
		return false
	}
	p.shut, p.view.Ready = true, 0
	return true
}

func (p *pool) Gone() {
	p.mu.Lock()
	p.shut, p.view.Ready = false, 0
	p.mu.Unlock()
	p.told <- struct{}{}
}

func (p *pool) set(change func(*wake.View)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.view)
}

// deeds takes what a Waker records.
type deeds struct {
	mu   sync.Mutex
	done []string
	more chan struct{}
}

func newDeeds() *deeds { return &deeds{more: make(chan struct{}, 1000)} }

func (d *deeds) record(event string, ok bool) {
	d.mu.Lock()
	d.done = append(d.done, fmt.Sprintf("%s %v", event, ok))
	d.mu.Unlock()
	d.more <- struct{}{}
}

func (d *deeds) all() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.done)
}

func (d *deeds) await(t *testing.T) {
	t.Helper()
	select {
	case <-d.more:
	case <-time.After(patience):
		t.Fatal("nothing was done")
	}
}

func newWaker(t *testing.T, p *pool, d *deeds, scale config.ScaleFromZero) *waker.Waker {
	w := waker.New(waker.Config{Name: "p", Gateway: "gw", Pool: p, Log: slog.New(slog.DiscardHandler), Record: d.record}, scale)
	t.Cleanup(w.Close)
	return w
}

// With nobody to tell, the metric is all there is.
func TestWantedFollowsThePool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d := newPool(wake.View{}), newDeeds()
		w := newWaker(t, p, d, config.ScaleFromZero{TTL: config.Duration(time.Minute)})
		synctest.Wait()
		if w.Wanted() {
			t.Error("wanted by nobody")
		}
		p.set(func(v *wake.View) { v.Waiting = 1 })
		w.Waits("m")
		synctest.Wait()
		if !w.Wanted() {
			t.Error("not wanted")
		}
		time.Sleep(61 * time.Second) // it goes on looking by itself
		p.set(func(v *wake.View) { v.Ready, v.Waiting = 1, 0 })
		w.Look()
		synctest.Wait()
		if w.Wanted() {
			t.Error("wanted although one is there")
		}
		if got := d.all(); len(got) != 3 || got[0] != "wake true" {
			t.Errorf("did %v, want to have been woken and reminded twice", got)
		}
	})
}

func TestWebhook(t *testing.T) {
	type call struct {
		path, auth string
		body       map[string]any
	}
	calls := make(chan call, 100)
	status := make(chan int, 100)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := call{path: r.Method + " " + r.URL.RequestURI() + " " + r.Header.Get("Content-Type"), auth: r.Header.Get("Authorization")}
		data, _ := io.ReadAll(r.Body)
		_ = json.Unmarshal(data, &c.body)
		calls <- c
		w.WriteHeader(<-status)
	}))
	t.Cleanup(server.Close)
	bearer := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(bearer, []byte("t0ken\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, d := newPool(wake.View{Waiting: 3}), newDeeds()
	for _, s := range []int{302, 204, 200} {
		status <- s
	}
	w := newWaker(t, p, d, config.ScaleFromZero{
		Webhook:      config.Webhook{URL: config.HookURL(server.URL + "/wake?x=1"), Timeout: config.Duration(patience), BearerFile: config.File(bearer)},
		ReleaseAfter: config.Duration(time.Second),
	})
	w.Waits("some\x00 model")
	for range 2 {
		d.await(t)
	}
	if got, want := fmt.Sprint(d.all()), "[wake false wake true]"; got != want {
		t.Errorf("did %s, want %s", got, want)
	}
	<-calls
	got := <-calls
	want := call{"POST /wake?x=1 application/json", "Bearer t0ken", map[string]any{
		"event": "wake", "pool": "p", "model": "some model", "waiting": 3.0, "gateway": "gw",
	}}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	p.set(func(v *wake.View) { *v = wake.View{Ready: 1} })
	w.Look()
	d.await(t)
	if got := <-calls; got.body["event"] != "release" {
		t.Errorf("after a second without requests: %v", got)
	}
}

func TestAWebhookThatNeverAnswersHoldsNothingUp(t *testing.T) {
	hangs := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hangs }))
	t.Cleanup(func() { close(hangs); server.Close() })
	p, d := newPool(wake.View{Waiting: 1}), newDeeds()
	hook := config.Webhook{URL: config.HookURL(server.URL + "/"), Timeout: config.Duration(20 * time.Millisecond)}
	w := newWaker(t, p, d, config.ScaleFromZero{Webhook: hook})
	d.await(t)
	if got := d.all(); got[0] != "wake false" {
		t.Errorf("did %v", got)
	}
	hook.Timeout = config.Duration(time.Minute)
	w.Configure(config.ScaleFromZero{Webhook: hook})
	ended := make(chan struct{})
	go func() { w.Close(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("Close waits for the webhook")
	}
}

func TestCommand(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	p, d := newPool(wake.View{Waiting: 2}), newDeeds()
	w := newWaker(t, p, d, config.ScaleFromZero{
		Command: []string{"sh", "-c", `echo "$1 $HEADGATE_EVENT $HEADGATE_POOL $HEADGATE_MODEL $HEADGATE_WAITING $HEADGATE_GATEWAY" >>` + out, "sh", "a b"},
	})
	w.Waits("m")
	d.await(t)
	got, err := os.ReadFile(out)
	if want := "a b wake p m 2 gw\n"; err != nil || !strings.HasSuffix(string(got), want) && string(got) != "a b wake p  2 gw\n" {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

// What the test's own program is when it is started as an engine: it tells what
// happens to it at the address in the one, and exits at once if the other is set.
const (
	tells = "HEADGATE_WAKER_TEST_TELLS"
	exits = "HEADGATE_WAKER_TEST_EXITS"
)

func TestMain(m *testing.M) {
	at := os.Getenv(tells)
	if at == "" {
		goleak.VerifyTestMain(m)
		return
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	conn, err := net.Dial("tcp", at)
	if err != nil {
		os.Exit(1)
	}
	fmt.Fprintln(conn, "start", os.Getenv("HEADGATE_POOL"))
	if os.Getenv(exits) != "" {
		os.Exit(3)
	}
	<-term
	fmt.Fprintln(conn, "stop")
}

// engine is how to start such an engine. says waits for what it tells next.
func engine(t *testing.T) (start config.Start, says func(want string)) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(tells, l.Addr().String())
	said := make(chan string, 100)
	var listening sync.WaitGroup
	listening.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			listening.Go(func() {
				for lines := bufio.NewScanner(conn); lines.Scan(); {
					said <- lines.Text()
				}
				_ = conn.Close()
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); listening.Wait() })
	start = config.Start{
		Command: []string{os.Args[0]}, Idle: config.Duration(time.Second), StopTimeout: config.Duration(patience),
	}
	return start, func(want string) {
		t.Helper()
		select {
		case got := <-said:
			if got != want {
				t.Errorf("the engine says %q, want %q", got, want)
			}
		case <-time.After(patience):
			t.Fatalf("the engine does not say %q", want)
		}
	}
}

func TestAnEngineIsStartedAndStopped(t *testing.T) {
	start, says := engine(t)
	p, d := newPool(wake.View{Waiting: 1}), newDeeds()
	w := newWaker(t, p, d, config.ScaleFromZero{Start: start})
	says("start p")
	p.set(func(v *wake.View) { *v = wake.View{Ready: 1, Active: time.Now()} })
	w.Look()
	says("stop")
	<-p.told
	if view := p.View(); p.shut || view.Ready != 0 {
		t.Errorf("shut %v, %+v", p.shut, view)
	}
	p.set(func(v *wake.View) { v.Waiting = 1 })
	w.Look()
	says("start p")
	w.Close()
	says("stop")
	if got := fmt.Sprint(d.all()); !strings.HasPrefix(got, "[wake true release true") {
		t.Errorf("did %s", got)
	}
}

func TestAnEngineThatExitsIsStartedAgain(t *testing.T) {
	start, says := engine(t)
	t.Setenv(exits, "1")
	p, d := newPool(wake.View{Waiting: 1}), newDeeds()
	newWaker(t, p, d, config.ScaleFromZero{Start: start})
	says("start p")
	<-p.told
	says("start p")
}

func TestAProgramThatIsNotThereIsAnError(t *testing.T) {
	p, d := newPool(wake.View{Waiting: 1}), newDeeds()
	newWaker(t, p, d, config.ScaleFromZero{Start: config.Start{Command: []string{filepath.Join(t.TempDir(), "nothing")}}})
	d.await(t)
	if got := d.all(); got[0] != "wake false" {
		t.Errorf("did %v", got)
	}
}

// A pool that left keeps its engine while requests run there.
func TestARetiredWakerEndsWithItsRequests(t *testing.T) {
	start, says := engine(t)
	p, d := newPool(wake.View{Waiting: 1}), newDeeds()
	w := newWaker(t, p, d, config.ScaleFromZero{Start: start})
	says("start p")
	p.set(func(v *wake.View) { *v = wake.View{Ready: 1, Running: 1} })
	w.Retire()
	if w.Ended() {
		t.Error("ended while a request runs")
	}
	p.set(func(v *wake.View) { v.Running = 0 })
	w.Look()
	says("stop")
	<-p.told
	w.Close()
	if !w.Ended() {
		t.Error("goes on")
	}
}

func TestNoWakerDoesNothing(t *testing.T) {
	var w *waker.Waker
	w.Look()
	w.Waits("m")
	w.Configure(config.ScaleFromZero{})
	w.Retire()
	w.Close()
	if w.Wanted() {
		t.Error("wanted")
	}
}
