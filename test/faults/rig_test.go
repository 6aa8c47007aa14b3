// SPDX-License-Identifier: Apache-2.0

package faults_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt/trace"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/freeport"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long anything is waited for. Only a failure gets there.
const patience = 60 * time.Second

// notice is how soon a client's departure must be noticed. On two busy cores
// under the race detector that takes longer than the 500 ms that are promised, and this is no test of speed.
const notice = 15 * time.Second

// rig is a gateway between clients and simulated engines, all on loopback.
type rig struct {
	t       testing.TB
	engines []*simengine.Engine
	gateway *gateway.Gateway
	server  *gateway.Server
	served  chan error
	addr    string
	ledger  *ledger
	trace   bytes.Buffer
	began   time.Time
	limits  check.Limits

	tags    atomic.Int64
	mu      sync.Mutex
	answers []check.Answer
	clients []*http.Transport
	stopped bool

	reviving sync.Mutex // guards over, and every restart
	over     bool
}

// newRig starts engines A, B, … and a gateway that yaml configures, given the
// engines' endpoint list.
func newRig(t testing.TB, engines int, yaml func(static string) string, edit ...func(*simengine.Config)) *rig {
	t.Helper()
	r := &rig{t: t, ledger: newLedger(), served: make(chan error, 1), began: time.Now(), limits: check.Limits{MaxAttempts: 2, Resends: 1, Notice: notice}}
	for i := range engines {
		c := simengine.Config{Name: string(rune('A' + i)), Models: models}
		for _, f := range edit {
			f(&c)
		}
		var e *simengine.Engine
		started := make(chan struct{})
		if c.OnExit == nil { // a process manager
			c.OnExit = func() {
				<-started
				r.revive(e)
			}
		}
		var err error
		if e, err = simengine.Start(freeport.Listen(t), c); err != nil {
			t.Fatal(err)
		}
		close(started)
		r.engines = append(r.engines, e)
	}
	c, err := config.Parse("test.yaml", []byte("journal: {driver: none}\n"+yaml(r.static())))
	if err != nil {
		t.Fatalf("%v\n%s", err, yaml(r.static()))
	}
	if r.gateway, err = gateway.New(gateway.Config{Config: c, Recorder: r.ledger, Trace: &r.trace}); err != nil {
		t.Fatal(err)
	}
	if r.server, err = r.gateway.NewServer(c.Listeners[0]); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = ln.Addr().String()
	go func() { r.served <- r.server.Serve(ln) }()
	t.Cleanup(r.close)
	return r
}

// models are what every engine serves; the number picks a route.
var models = func() []string {
	list := []string{"sim"}
	for i := range slots {
		list = append(list, fmt.Sprint("m", i))
	}
	return list
}()

func (r *rig) static() string {
	var list []string
	for _, e := range r.engines {
		list = append(list, fmt.Sprintf("{url: %q}", e.URL()))
	}
	return "{static: [" + strings.Join(list, ", ") + "]}"
}

// onePool is a configuration with one pool, settings being its YAML lines.
func onePool(settings ...string) func(static string) string {
	return func(static string) string {
		return "pools:\n  p:\n    health: {interval: 0s}\n    scrape: {interval: 0s}\n    discovery: " + static + "\n    " + strings.Join(settings, "\n    ") + "\n"
	}
}

// revive restarts an engine that is dead, unless the test is over.
func (r *rig) revive(e *simengine.Engine) {
	r.reviving.Lock()
	defer r.reviving.Unlock()
	if r.over {
		return
	}
	// Two faults may ask for one restart.
	if err := e.Restart(nil); err != nil && !strings.Contains(err.Error(), "the engine lives") {
		r.t.Errorf("engine cannot be restarted: %v", err)
	}
}

// close ends the engines, after the gateway.
func (r *rig) close() {
	r.stop()
	r.reviving.Lock()
	r.over = true
	r.reviving.Unlock()
	for _, e := range r.engines {
		e.Close()
	}
}

// stop drains the gateway and ends it. A request that does not end by itself is
// a leak.
func (r *rig) stop() {
	r.mu.Lock()
	stopped := r.stopped
	r.stopped = true
	clients := r.clients
	r.mu.Unlock()
	if stopped {
		return
	}
	for _, c := range clients {
		c.CloseIdleConnections()
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r.gateway.Drain(ctx)
	if ctx.Err() != nil {
		r.t.Errorf("I10: a request did not end within %v", patience)
	}
	if err := r.server.Close(); err != nil {
		r.t.Error(err)
	}
	if err := <-r.served; err != nil {
		r.t.Error(err)
	}
	r.replay()
}

// replay: the state machine, told again what happened, decides what was done.
func (r *rig) replay() {
	result, err := trace.Replay(bytes.NewReader(r.trace.Bytes()))
	if err != nil {
		r.t.Errorf("the trace can't be replayed: %v", err)
	}
	for _, d := range result.Differences {
		r.t.Error(d)
	}
	if len(result.Cut) > 0 {
		r.t.Errorf("I10: requests were still under way: %v", result.Cut)
	}
}

func (r *rig) context() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

// await waits for an entry of any engine's log and returns it.
func (r *rig) await(ctx context.Context, match func(simengine.Entry) bool) (simengine.Entry, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		entry simengine.Entry
		err   error
	}
	results := make(chan result, len(r.engines))
	for _, e := range r.engines {
		go func() {
			entry, err := e.Await(ctx, match)
			results <- result{entry, err}
		}()
	}
	got := <-results
	cancel()
	for range len(r.engines) - 1 {
		<-results
	}
	return got.entry, got.err
}

// mustAwait is await that fails the test.
func (r *rig) mustAwait(match func(simengine.Entry) bool) simengine.Entry {
	r.t.Helper()
	ctx, cancel := r.context()
	defer cancel()
	entry, err := r.await(ctx, match)
	if err != nil {
		r.t.Fatalf("waiting for the engines: %v\n%s", err, r.story(""))
	}
	return entry
}

// log is the log of all engines, in order of time.
func (r *rig) log() []simengine.Entry {
	var all []simengine.Entry
	for _, e := range r.engines {
		all = append(all, e.Log()...)
	}
	slices.SortStableFunc(all, func(a, b simengine.Entry) int { return a.T.Compare(b.T) })
	return all
}

// since is what all engines logged after marks, which it moves on.
func (r *rig) since(marks []uint64) (list []simengine.Entry) {
	for i, e := range r.engines {
		entries := e.LogSince(marks[i])
		if n := len(entries); n > 0 {
			marks[i] = entries[n-1].Seq
		}
		list = append(list, entries...)
	}
	return list
}

// marks are where the engines' logs end.
func (r *rig) marks() []uint64 {
	marks := make([]uint64, len(r.engines))
	r.since(marks)
	return marks
}

// story is what the engines say of a request, for failure messages.
func (r *rig) story(request string) string {
	var b strings.Builder
	for _, e := range r.log() {
		if request == "" || e.Request == request {
			fmt.Fprintf(&b, "    %s %s%d c%d %s %d %s %s\n", e.T.Format("05.000000"), e.Engine, e.Attempt, e.Conn, e.Event, e.N, e.Path, e.Detail)
		}
	}
	return b.String()
}

// received counts the requests for output that engines got, by engine.
func (r *rig) received() []int {
	counts := make([]int, len(r.engines))
	for i, e := range r.engines {
		for _, entry := range e.Log() {
			if entry.Event == simengine.EventReceived && entry.Method == http.MethodPost {
				counts[i]++
			}
		}
	}
	return counts
}

func sum(list []int) (n int) {
	for _, v := range list {
		n += v
	}
	return n
}

// settled waits until no engine works on anything, and returns the verdict on
// the whole run: I10, I6 and, with a budget, I7.
func (r *rig) settled(budget *check.Budget) []check.Violation {
	ctx, cancel := r.context()
	defer cancel()
	for {
		marks := r.marks()
		log := r.log()
		r.mu.Lock()
		answers := slices.Clone(r.answers)
		r.mu.Unlock()
		check.Identify(answers, log)
		found := check.Fleet(answers, log, budget)
		if len(found) == 0 || ctx.Err() != nil {
			return found
		}
		// Something is still to end; look again at the next entry of any log.
		next, stop := context.WithTimeout(ctx, time.Second)
		done := make(chan struct{}, len(r.engines))
		for i, e := range r.engines {
			go func() {
				_, _ = e.AwaitSince(next, marks[i], func(simengine.Entry) bool { return true })
				stop()
				done <- struct{}{}
			}()
		}
		for range r.engines {
			<-done
		}
		stop()
	}
}

// quiet fails the test unless everything that the run held was let go: places
// on endpoints, work on engines. It waits for that.
func (r *rig) quiet(budget *check.Budget) {
	r.t.Helper()
	for _, v := range r.settled(budget) {
		r.t.Errorf("%v\n%s", v, r.story(v.Request))
	}
	ctx, cancel := r.context()
	defer cancel()
	r.ledger.wait(ctx, func() bool { return r.inFlight() == 0 })
	if n := r.inFlight(); n != 0 {
		r.t.Errorf("I10: %d requests are counted as in flight", n)
	}
	for _, e := range r.engines {
		// An end is logged a moment before the model has let go of the job.
		for s := e.Snapshot(); s.Running+s.Waiting > 0 && ctx.Err() == nil; s = e.Snapshot() {
			runtime.Gosched()
		}
		if s := e.Snapshot(); s.Running+s.Waiting > 0 {
			r.t.Errorf("I10: an engine's model still has %d running and %d waiting jobs", s.Running, s.Waiting)
		}
	}
}

func (r *rig) inFlight() (n int) {
	for _, pool := range r.gateway.Status() {
		n += pool.Queue.Requests // those that wait are not over either
		for _, s := range pool.Endpoints {
			if s.InFlight < 0 {
				r.t.Errorf("I10: %s: %d in flight", s.Endpoint, s.InFlight)
			}
			n += s.InFlight
		}
	}
	return n
}

// newClient makes a client of its own connections. Kinds: "h1", "h1-close",
// "h2c".
func (r *rig) newClient(kind string) *http.Client {
	t := &http.Transport{DisableCompression: true, DisableKeepAlives: kind == "h1-close"}
	if kind == "h2c" {
		t.Protocols = new(http.Protocols)
		t.Protocols.SetUnencryptedHTTP2(true)
	}
	r.mu.Lock()
	r.clients = append(r.clients, t)
	r.mu.Unlock()
	return &http.Client{Transport: t}
}

// ask is one request of a client.
type ask struct {
	Path   string // default chat
	Model  string // default "sim"
	Stream bool
	Max    int // tokens; default 4
	N      int // choices; default 1
	Usage  bool
	Extra  string // further members of the body, each with a comma before it
	Pad    int    // bytes of padding in the body
	Fault  string // X-Sim-Fault
	Leave  leave

	Chunked bool // the body's length is not told
}

// leave is when a client goes away. The zero value stays.
type leave struct {
	When   string // "written", "received", "fault", "events"
	Events int    // of "events": after so many were read
}

const chatPath = "/v1/chat/completions"

func (q ask) body() string {
	model, tokens := q.Model, max(q.Max, 1)
	if model == "" {
		model = "sim"
	}
	var b strings.Builder
	fmt.Fprintf(&b, `{"model":%q,"max_tokens":%d`, model, tokens)
	if q.Path == "/v1/completions" {
		b.WriteString(`,"prompt":"hi"`)
	} else {
		b.WriteString(`,"messages":[{"role":"user","content":"hi"}]`)
	}
	if q.Stream {
		b.WriteString(`,"stream":true`)
	}
	if q.N > 1 {
		fmt.Fprintf(&b, `,"n":%d`, q.N)
	}
	if q.Usage {
		b.WriteString(`,"stream_options":{"include_usage":true}`)
	}
	b.WriteString(q.Extra)
	if q.Pad > 0 {
		b.WriteString(`,"padding":"` + strings.Repeat("p", q.Pad) + `"`)
	}
	return b.String() + "}"
}

var (
	errLeft     = errors.New("the client leaves")
	errPatience = errors.New("the client's patience is over")
)

// ask sends a request and reads the answer to its end, or leaves. The answer
// is kept for settled.
func (r *rig) ask(c *http.Client, q ask) check.Answer {
	if q.Path == "" {
		q.Path = chatPath
	}
	if q.Max == 0 {
		q.Max = 4
	}
	a := check.Answer{Tag: strconv.FormatInt(r.tags.Add(1), 10), Stream: q.Stream, MaxTokens: q.Max, Choices: max(q.N, 1)}
	if strings.Contains(q.Fault, ";empty") {
		a.MaxTokens = 0 // the engine says "length" of a legal empty answer
	}
	// Known before it is sent: an engine may tell of it first.
	r.mu.Lock()
	at := len(r.answers)
	r.answers = append(r.answers, a)
	r.mu.Unlock()

	p := newPatient(r, q, a.Tag)
	defer p.end()
	var body io.Reader = strings.NewReader(q.body())
	if q.Chunked {
		body = struct{ io.Reader }{body}
	}
	req, err := http.NewRequestWithContext(p.ctx, http.MethodPost, "http://"+r.addr+q.Path, body)
	if err != nil {
		r.t.Error(err)
		return a
	}
	req.GetBody = nil // the client must not repeat anything either
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(check.TagHeader, a.Tag)
	if q.Fault != "" {
		req.Header.Set("X-Sim-Fault", q.Fault)
	}
	res, err := c.Do(req)
	if err == nil {
		a.Status, a.Request = res.StatusCode, res.Header.Get("X-Request-Id")
		a.Body, a.Err = p.read(res.Body)
		_ = res.Body.Close()
	} else {
		a.Err = err
	}
	if a.Err != nil {
		a.LeftAt, a.Left = p.left()
	}
	r.mu.Lock()
	r.answers[at] = a
	r.mu.Unlock()
	return a
}

// patient is a client's context, and what makes it leave.
type patient struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	over   context.CancelFunc
	watch  sync.WaitGroup
	events int // 0: does not leave by counting

	mu sync.Mutex
	at time.Time
}

func newPatient(r *rig, q ask, tag string) *patient {
	p := &patient{}
	p.ctx, p.over = context.WithTimeoutCause(context.Background(), patience, errPatience)
	p.ctx, p.cancel = context.WithCancelCause(p.ctx)
	received := func(e simengine.Entry) bool {
		return e.Event == simengine.EventReceived && e.Header.Get(check.TagHeader) == tag
	}
	switch q.Leave.When {
	case "written":
		p.ctx = httptrace.WithClientTrace(p.ctx, &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { p.leave() }})
	case "received":
		p.watch.Go(func() {
			if _, err := r.await(p.ctx, received); err == nil {
				p.leave()
			}
		})
	case "fault":
		p.watch.Go(func() { p.onFault(r, received) })
	case "events":
		p.events = q.Leave.Events
	}
	return p
}

// onFault leaves once a fault of the request struck.
func (p *patient) onFault(r *rig, received func(simengine.Entry) bool) {
	got, err := r.await(p.ctx, received)
	if err != nil {
		return
	}
	if _, err := r.await(p.ctx, simengine.On(simengine.EventFault, got.Request)); err == nil {
		p.leave()
	}
}

func (p *patient) leave() {
	p.mu.Lock()
	if p.at.IsZero() {
		p.at = time.Now()
	}
	p.mu.Unlock()
	p.cancel(errLeft)
}

func (p *patient) left() (time.Time, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at, !p.at.IsZero()
}

func (p *patient) end() {
	p.cancel(nil)
	p.over()
	p.watch.Wait()
}

// read reads a body to its end, or until enough events came.
func (p *patient) read(body io.Reader) ([]byte, error) {
	if p.events == 0 {
		return io.ReadAll(body)
	}
	var got bytes.Buffer
	in := bufio.NewReader(body)
	for n := 0; ; {
		line, err := in.ReadBytes('\n')
		got.Write(line)
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return got.Bytes(), err
		}
		if bytes.HasPrefix(line, []byte("data:")) {
			if n++; n == p.events {
				p.leave()
				return got.Bytes(), errLeft
			}
		}
	}
}

// judge fails the test if the answer breaks a promise.
func (r *rig) judge(a check.Answer) check.Seen {
	r.t.Helper()
	list := []check.Answer{a}
	log := r.log()
	check.Identify(list, log)
	for _, v := range check.Judge(list[0], log, r.limits) {
		r.t.Errorf("%v\n%s    status %d, err %v, body:\n%s", v, r.story(list[0].Request), a.Status, a.Err, a.Body)
	}
	seen, _ := check.Read(a)
	return seen
}

// ledger is a gateway.Recorder that remembers, by pool, and can be waited for.
type ledger struct {
	mu      sync.Mutex
	pools   map[string]*account
	changed chan struct{} // closed and replaced at each change
}

// account is what the gateway told of one pool.
type account struct {
	verdicts []inference.Verdict
	outcomes []string // "completed", "failed upstream_failed"
	retries  int
	denied   []inference.Code
}

func newLedger() *ledger {
	return &ledger{pools: map[string]*account{}, changed: make(chan struct{})}
}

func (l *ledger) note(pool string, f func(*account)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.pools[pool]
	if a == nil {
		a = &account{}
		l.pools[pool] = a
	}
	f(a)
	close(l.changed)
	l.changed = make(chan struct{})
}

// pool copies what is known of a pool.
func (l *ledger) pool(name string) account {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.pools[name]
	if a == nil {
		return account{}
	}
	return account{slices.Clone(a.verdicts), slices.Clone(a.outcomes), a.retries, slices.Clone(a.denied)}
}

// wait waits for a condition, looking again at each change.
func (l *ledger) wait(ctx context.Context, ok func() bool) bool {
	for {
		l.mu.Lock()
		changed := l.changed
		l.mu.Unlock()
		if ok() {
			return true
		}
		// Places are given back a moment after the outcome is recorded, which
		// nothing tells: so look again soon as well.
		soon := time.NewTimer(5 * time.Millisecond)
		select {
		case <-changed:
		case <-soon.C:
		case <-ctx.Done():
			soon.Stop()
			return ok()
		}
		soon.Stop()
	}
}

// ended waits until a pool has so many outcomes.
func (l *ledger) ended(pool string, n int) bool {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return l.wait(ctx, func() bool { return len(l.pool(pool).outcomes) >= n })
}

func (l *ledger) Request(pool, _ string, o inference.Outcome, code inference.Code) {
	l.note(pool, func(a *account) { a.outcomes = append(a.outcomes, strings.TrimSpace(o.String()+" "+string(code))) })
}

func (l *ledger) Attempt(pool string, v inference.Verdict, _ inference.Proof) {
	l.note(pool, func(a *account) { a.verdicts = append(a.verdicts, v) })
}

func (l *ledger) Retry(pool string, _ inference.Verdict) {
	l.note(pool, func(a *account) { a.retries++ })
}

func (l *ledger) RetryDenied(pool string, reason inference.Code) {
	l.note(pool, func(a *account) { a.denied = append(a.denied, reason) })
}

func (l *ledger) FirstOutput(string, string, time.Duration)      {}
func (l *ledger) Gap(string, string, time.Duration)              {}
func (l *ledger) Waited(string, int, time.Duration)              {}
func (l *ledger) Predicted(string, time.Duration, time.Duration) {}
func (l *ledger) RateLimited(string, string)                     {}
func (l *ledger) Woke(string, string, bool)                      {}
func (l *ledger) LateChunks(int)                                 {}
