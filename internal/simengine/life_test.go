// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headgate/headgate/internal/simengine/model"
)

// endless is an answer that takes hours at the tests' step time.
const endless = `{"stream":true,"max_tokens":60000,"messages":[{"role":"user","content":"x"}]}`

// A client that leaves is noticed whether it waits for the head, for a token of
// a quiet stream, or is being written to, and whether it sends FIN or RST, with
// or without bytes of a next request behind it.
func TestLeavingClientFreesTheSlot(t *testing.T) {
	hour := model.Params{StepBase: time.Hour}
	busy := model.Params{StepBase: 100 * time.Microsecond, Blocks: 1 << 14, StepTokens: 64}
	for _, tt := range []struct {
		name   string
		params model.Params
		body   string
		ready  func(c *client)
		behind string
		rst    bool
	}{
		{"waiting for the head", hour, strings.Replace(endless, "true", "false", 1), nil, "", false},
		{"waiting for the head, RST", hour, strings.Replace(endless, "true", "false", 1), nil, "", true},
		{"quiet stream", hour, endless, func(c *client) { c.until(`"role":"assistant"`) }, "", false},
		{"quiet stream, pipelined bytes", hour, endless, func(c *client) { c.until(`"role":"assistant"`) }, "GET /health HTTP/1.1\r\n", false},
		{"busy stream", busy, endless, func(c *client) { c.until("A1·9 ") }, "", false},
		{"busy stream, RST", busy, endless, func(c *client) { c.until("A1·9 ") }, "", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := start(t, Config{Params: tt.params})
			c := dial(t, e).post(chatPath, tt.body, "X-Request-Id: req_1")
			await(t, e, On(EventAdmitted, "req_1"))
			if tt.ready != nil {
				tt.ready(c)
			}
			_, _ = io.WriteString(c, tt.behind)
			if tt.rst {
				_ = c.Conn.(*net.TCPConn).SetLinger(0)
			}
			_ = c.Close()
			await(t, e, On(EventAborted, "req_1"))
			if s := e.Snapshot(); s.Running+s.Waiting+s.BlocksUsed != 0 || s.Cancelled != 1 {
				t.Errorf("after: %+v", s)
			}
			await(t, e, func(en Entry) bool { return en.Event == EventConnClosed && en.Detail == "client" })
		})
	}
}

func TestHalfCloseCountsAsLeaving(t *testing.T) {
	e := start(t, Config{Params: model.Params{StepBase: time.Hour}})
	c := dial(t, e).post(chatPath, endless, "X-Request-Id: req_1")
	await(t, e, On(EventAdmitted, "req_1"))
	_ = c.Conn.(*net.TCPConn).CloseWrite()
	await(t, e, On(EventAborted, "req_1"))
}

func TestUploadCutByTheClientIsLogged(t *testing.T) {
	e := start(t, Config{})
	c := dial(t, e)
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: sim\r\nX-Request-Id: req_1\r\nContent-Length: 100\r\n\r\nhalf", chatPath)
	await(t, e, On(EventReceived, "req_1"))
	_ = c.Close()
	if entry := await(t, e, On(EventAborted, "req_1")); !strings.Contains(entry.Detail, "after 4 bytes") {
		t.Errorf("entry %+v", entry)
	}
}

func TestKillResetsAndRestartIsANewIncarnation(t *testing.T) {
	e := start(t, Config{Params: model.Params{StepBase: time.Hour}})
	streaming := dial(t, e).post(chatPath, endless, "X-Request-Id: req_1")
	idle := dial(t, e)
	await(t, e, On(EventAdmitted, "req_1"))
	await(t, e, func(en Entry) bool { return en.Event == EventAccepted && en.Conn == 2 })
	if err := e.Restart(nil); err == nil {
		t.Error("a living engine restarts")
	}
	e.Kill()
	e.Kill()
	for _, c := range []*client{streaming, idle} {
		if _, end := c.rest(); end != "RST" {
			t.Errorf("connection ended with %s", end)
		}
	}
	if _, err := net.Dial("tcp", e.Addr()); err == nil {
		t.Error("a dead engine accepts")
	}
	await(t, e, On(EventCut, "req_1"))
	if err := e.Restart(nil); err != nil {
		t.Fatal(err)
	}
	if e.Incarnation() != 2 || e.Snapshot().Running != 0 {
		t.Errorf("incarnation %d, %+v", e.Incarnation(), e.Snapshot())
	}
	_ = get(t, e, "/health")
	if last := e.Log()[len(e.Log())-1]; last.Incarnation != 2 {
		t.Errorf("entry %+v", last)
	}
}

func TestPauseStopsEverythingButAdmin(t *testing.T) {
	e := start(t, Config{Params: model.Params{StepBase: time.Millisecond}})
	c := dial(t, e).post(chatPath, endless, "X-Request-Id: req_1")
	c.until("A1·3 ")
	admin := dial(t, e)
	admin.post("/sim/pause", "")
	_ = readAll(t, admin.response())
	made := e.Snapshot().GenerationTokens
	health := dial(t, e)
	fmt.Fprintf(health, "GET /health HTTP/1.1\r\nHost: sim\r\n\r\n")
	await(t, e, func(en Entry) bool { return en.Event == EventAccepted && en.Conn == 3 })
	_ = health.SetReadDeadline(time.Now().Add(30 * time.Millisecond))
	if _, err := health.in.ReadByte(); err == nil {
		t.Error("a paused engine answers")
	}
	if now := e.Snapshot().GenerationTokens; now != made {
		t.Errorf("a paused engine computes: %d, then %d tokens", made, now)
	}
	_ = readAll(t, admin.post("/sim/resume", "").response())
	_ = health.SetReadDeadline(time.Now().Add(patience))
	if health.response().StatusCode != 200 {
		t.Error("resumed, and no answer")
	}
	c.until(fmt.Sprintf("A1·%d ", made+5))
}

func TestAdmin(t *testing.T) {
	exited := make(chan struct{})
	e := start(t, Config{OnExit: func() { close(exited) }})
	c := dial(t, e)
	call := func(method, path, body string) (int, string) {
		fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: sim\r\nContent-Length: %d\r\n\r\n%s", method, path, len(body), body)
		res := c.response()
		return res.StatusCode, readAll(t, res)
	}
	for body, want := range map[string]int{
		`{"faults":["rst@head","boom"]}`: 400, `{"faults":"rst"}`: 400, `nope`: 400,
		`{"faults":["times=2;status@head:503"]}`: 200,
	} {
		if status, answer := call("POST", "/sim/faults", body); status != want {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
	if e.FaultsLeft() != 1 {
		t.Errorf("%d scripts queued; a bad list must queue none", e.FaultsLeft())
	}
	if status, _ := call("POST", chatPath, whole4); status != 503 {
		t.Errorf("status %d", status)
	}
	_, lines := call("GET", "/sim/log?since=1", "")
	first, _, _ := strings.Cut(lines, "\n")
	if gjson.Get(first, "seq").Int() != 2 || !strings.Contains(lines, `"event":"received"`) {
		t.Errorf("log %s", lines)
	}
	if status, _ := call("POST", "/sim/nothing", ""); status != 404 {
		t.Errorf("status %d", status)
	}
	if status, _ := call("POST", "/sim/reset", ""); status != 200 || e.FaultsLeft() != 0 {
		t.Errorf("reset: %d, %d left", status, e.FaultsLeft())
	}
	fmt.Fprintf(c, "POST /sim/exit HTTP/1.1\r\nHost: sim\r\nContent-Length: 0\r\n\r\n")
	if _, end := c.rest(); end != "RST" {
		t.Errorf("exit: %s", end)
	}
	<-exited
}

func TestEngineExecutesTools(t *testing.T) {
	var calls []ToolCall
	fail := errors.New("the tool is broken")
	var answer error
	e := start(t, Config{Tool: func(_ context.Context, call ToolCall) error {
		calls = append(calls, call)
		return answer
	}})
	body := `{"stream":true,"max_tokens":4,"messages":[{"role":"user","content":"exec:pay please"}]}`
	c := dial(t, e).post(chatPath, body, "X-Request-Id: req_1", "Headgate-Lease: L")
	if got := said(readAll(t, c.response())); got != four {
		t.Errorf("said %q", got)
	}
	if len(calls) != 1 || calls[0].Name != "pay" || calls[0].Request != "req_1" || calls[0].Header.Get("Headgate-Lease") != "L" {
		t.Fatalf("calls %+v", calls)
	}
	c.post(chatPath, stream4, "X-Sim-Fault: tool@computed:3:refund,tool@finish:again")
	_ = readAll(t, c.response())
	if len(calls) != 3 || calls[1].Name != "refund" || calls[2].Index != 1 {
		t.Errorf("calls %+v", calls)
	}
	answer = fail
	c.post(chatPath, body)
	if raw := readAll(t, c.response()); !strings.Contains(raw, `"error"`) || said(raw) != "A1·1 " {
		t.Errorf("a failed tool: %s", raw)
	}
}

func TestLeavingClientEndsTheToolCall(t *testing.T) {
	began := make(chan struct{})
	e := start(t, Config{Tool: func(ctx context.Context, _ ToolCall) error {
		close(began)
		<-ctx.Done()
		return context.Cause(ctx)
	}})
	c := dial(t, e).post(chatPath, stream4, "X-Request-Id: req_1", "X-Sim-Fault: tool@computed:2")
	<-began
	_ = c.Close()
	await(t, e, On(EventAborted, "req_1"))
}

// Many clients at once through a real client library: every answer is whole
// and its own, and the engine batches.
func TestManyClientsAreBatched(t *testing.T) {
	e := start(t, Config{Params: model.Params{StepBase: time.Millisecond, RunningMax: 64}})
	tr := &http.Transport{MaxIdleConnsPerHost: 64}
	defer tr.CloseIdleConnections()
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			req, _ := http.NewRequestWithContext(t.Context(), "POST", e.URL()+chatPath, strings.NewReader(stream4))
			req.Header.Set("X-Request-Id", fmt.Sprintf("req_%d", i))
			res, err := tr.RoundTrip(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			body, err := io.ReadAll(res.Body)
			if err != nil || said(string(body)) != four {
				t.Errorf("%v: %q", err, body)
			}
		})
	}
	wg.Wait()
	// One by one they would take 256 steps; those that come late cost some.
	if s := e.Snapshot(); s.Finished != 64 || s.Steps > 64*4/2 {
		t.Errorf("%d jobs in %d steps: not batched", s.Finished, s.Steps)
	}
}

func TestAwaitEndsWithItsContextAndReportsOverrun(t *testing.T) {
	e := start(t, Config{LogEntries: 4})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.Await(ctx, On("never", "")); !errors.Is(err, context.Canceled) {
		t.Errorf("err %v", err)
	}
	l := newEventLog(4, nil)
	e.log = l
	looking, looked := make(chan struct{}), make(chan struct{})
	var once sync.Once
	done := make(chan error)
	l.add(Entry{Event: "a"})
	go func() {
		_, err := e.Await(t.Context(), func(en Entry) bool {
			once.Do(func() { close(looking); <-looked })
			return en.Event == "lost"
		})
		done <- err
	}()
	<-looking
	l.add(Entry{Event: "lost"})
	for range 5 {
		l.add(Entry{Event: "more"})
	}
	close(looked)
	if err := <-done; !errors.Is(err, ErrLogOverrun) {
		t.Errorf("err %v", err)
	}
	if kept := e.Log(); len(kept) != 4 || kept[0].Seq != 4 || kept[3].Seq != 7 {
		t.Errorf("kept %+v", kept)
	}
	l.reset()
	l.add(Entry{Event: "after"})
	if kept := e.Log(); len(kept) != 1 || kept[0].Seq != 8 {
		t.Errorf("kept %+v", kept)
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, cfg := range []Config{
		{}, {Name: "a b"}, {Name: "A·"}, {Name: `A"`}, {Name: "A", Speed: -1}, {Name: "A", Params: model.Params{Blocks: -1}},
		{Name: "A", Faults: []string{"boom"}}, {Name: "A", Params: model.Params{StepBase: 1}, Adapters: []string{"x"}}, {Name: "A", LogEntries: -1},
	} {
		if e, err := Listen(cfg); err == nil {
			e.Close()
			t.Errorf("%+v is accepted", cfg)
		}
	}
}

// pipes is a listener whose connections are net.Pipe, for virtual time.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), closed: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "pipe"} }
func (p *pipes) dial() net.Conn {
	ours, theirs := net.Pipe()
	p.conns <- theirs
	return ours
}

// In a synctest bubble the engine runs on virtual time: token times are those
// of the model, to the nanosecond, divided by Speed.
func TestTokenTimesAreTheModels(t *testing.T) {
	for _, speed := range []float64{1, 10} {
		synctest.Test(t, func(t *testing.T) {
			ln := newPipes()
			e, err := Start(ln, Config{Name: "A", Speed: speed, Params: model.Params{StepBase: time.Second}})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			conn := ln.dial()
			defer conn.Close()
			began := time.Now()
			c := (&client{t: t, Conn: conn}).post(chatPath, stream4, "X-Request-Id: req_1")
			go io.Copy(io.Discard, c)
			for n := 1; n <= 4; n++ {
				entry := await(t, e, func(en Entry) bool { return en.Event == EventToken && en.N == n })
				want := time.Duration(float64(n) * 1e9 / speed)
				if late := entry.T.Sub(began) - want; late < 0 || late > time.Microsecond {
					t.Errorf("speed %v: token %d after %v, want %v", speed, n, entry.T.Sub(began), want)
				}
			}
		})
	}
}

func TestIdleConnectionIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ln := newPipes()
		e, err := Start(ln, Config{Name: "A", IdleTimeout: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		conn := ln.dial()
		c := &client{t: t, Conn: conn, in: bufio.NewReader(conn)}
		defer c.Close()
		res := c.post(chatPath, whole4).response()
		_ = readAll(t, res)
		if res.Close {
			t.Error("keep-alive was not promised")
		}
		answered := time.Now()
		if raw, end := c.rest(); raw != "" || end != "FIN" {
			t.Errorf("%q then %s", raw, end)
		}
		if silent := time.Since(answered); silent != time.Second {
			t.Errorf("closed after %v", silent)
		}
		await(t, e, func(en Entry) bool { return en.Event == EventConnClosed && en.Detail == "engine: idle" })
	})
}

func TestCloseAbortsWhatRuns(t *testing.T) {
	e := start(t, Config{Params: model.Params{StepBase: time.Hour}})
	c := dial(t, e).post(chatPath, endless, "X-Request-Id: req_1")
	await(t, e, On(EventAdmitted, "req_1"))
	e.Close()
	e.Close()
	_, _ = c.rest()
	await(t, e, On(EventCut, "req_1"))
}

// BenchmarkStream is what one 64-token stream costs the engine and a bare
// client together: the floor under every measurement that uses it.
func BenchmarkStream(b *testing.B) {
	e, err := Listen(Config{Name: "A", QuietTokens: true})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	conn, err := net.Dial("tcp", e.Addr())
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	const body = `{"stream":true,"max_tokens":64,"messages":[{"role":"user","content":"x"}]}`
	request := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: sim\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
	in := bufio.NewReader(conn)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := io.WriteString(conn, request); err != nil {
			b.Fatal(err)
		}
		for {
			line, err := in.ReadSlice('\n')
			if err != nil {
				b.Fatal(err)
			}
			if string(line) == "0\r\n" {
				break
			}
		}
	}
}
