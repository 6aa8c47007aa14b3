// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Load is what a run sends. With a Rate it is open: requests begin when they are
// due, whether or not earlier ones were answered. Without one, Connections
// clients send their next request when they have their answer.
type Load struct {
	Address string `json:"-"` // host:port
	Path    string `json:"path"`
	Model   string `json:"model"`
	Shape   Shape  `json:"shape"`

	Rate        float64 `json:"rate,omitempty"` // requests a second
	Poisson     bool    `json:"poisson,omitempty"`
	Connections int     `json:"connections"`    // at most; a request that finds none free waits, and its latency counts
	Fill        int     `json:"fill,omitempty"` // requests under way from the beginning, see newSchedule
	Seed        uint64  `json:"seed"`
	Least       int     `json:"-"` // requests that are sent even if the window is over

	Ramp   time.Duration `json:"ramp_ns"` // before it all of Fill have begun
	Warmup time.Duration `json:"warmup_ns"`
	Window time.Duration `json:"window_ns"` // what is measured

	// Unknown: the engine is another one than this package's. Then nothing is
	// known about when it sent what, nor what.
	Unknown bool   `json:"unknown_engine,omitempty"`
	Bearer  string `json:"-"`

	Engine *Engine `json:"-"` // told to hurry when the window is over; may be nil
	Probe  func()  `json:"-"` // called at the window's begin and end; may be nil
}

// timeLimit is for one request, from first to last byte.
const timeLimit = 60 * time.Second

// Result is what a run measured in its window.
type Result struct {
	Took     time.Duration
	Requests uint64 // answered whole within the window
	Whole    uint64 // answered whole, at any time
	Unsent   uint64 // due within the window, and no connection was free by its end
	Errors   uint64
	Error    string // the first
	Corrupt  string // the first answer that was not what the engine sent
	Tokens   uint64
	Reads    uint64 // of the clients' sockets that brought bytes
	Stalls   uint64 // tokens that came over ten intervals after the one before

	Latency *Histogram // of whole answers, from when the request was due

	// First is the time to the first token from when the request was due, less
	// what the engine itself waited.
	First *Histogram
	Added *Histogram // from the engine's stamp in a token to the client
	Gap   *Histogram // between tokens, at the client
	Late  *Histogram // how late the generator itself was
}

// run is one run at work.
type run struct {
	Load
	schedule *schedule
	begin    int64 // of the window
	finish   int64
	head     []byte
	prompt   uint32

	requests, whole, failures, tokens, reads, stalls atomic.Uint64

	latency, first, added, gap, late Histogram

	// mu guards what follows.
	mu      sync.Mutex
	failed  string
	corrupt string
}

// Run applies a load and returns when all of its requests have ended.
func Run(ctx context.Context, load Load) *Result {
	load.Path = cmp.Or(load.Path, "/v1/chat/completions")
	load.Model = cmp.Or(load.Model, "bench")
	if load.Engine != nil {
		load.Engine.Calm()
	}
	start := now()
	r := &run{Load: load, begin: start + int64(load.Ramp+load.Warmup)}
	r.finish = r.begin + int64(load.Window)
	r.schedule = newSchedule(load, start, r.finish)
	r.prompt = crc32.Checksum(appendPrompt(nil, load.Shape.PromptBytes), castagnoli)
	r.head = fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nAccept: */*\r\nUser-Agent: headgate-bench\r\n", load.Path, load.Address)
	if load.Bearer != "" {
		r.head = fmt.Appendf(r.head, "Authorization: Bearer %s\r\n", load.Bearer)
	}
	r.head = fmt.Appendf(r.head, "Content-Length: %d\r\n\r\n", len(requestBody(load.Shape, load.Model, 0)))

	var clients sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for range max(load.Connections, 1) {
		clients.Go(func() { r.client(ctx) })
	}
	took := r.watch(ctx)
	if load.Engine != nil {
		load.Engine.Hurry()
	}
	clients.Wait()
	unsent := uint64(0)
	if ctx.Err() == nil && load.Rate > 0 {
		unsent = r.countUnsent()
	}
	return &Result{
		Unsent: unsent,
		Took:   took, Requests: r.requests.Load(), Whole: r.whole.Load(), Errors: r.failures.Load(), Error: r.failed, Corrupt: r.corrupt,
		Tokens: r.tokens.Load(), Reads: r.reads.Load(), Stalls: r.stalls.Load(),
		Latency: &r.latency, First: &r.first, Added: &r.added, Gap: &r.gap, Late: &r.late,
	}
}

// countUnsent counts requests that were due and for which no connection came free
// before the window was over, as if they had been answered at its end: they
// waited that long at least.
func (r *run) countUnsent() uint64 {
	unsent := uint64(0)
	for a, ok := r.schedule.take(0); ok; a, ok = r.schedule.take(0) {
		if r.within(a.at) {
			unsent++
			r.latency.Add(time.Duration(r.finish - a.at))
			r.first.Add(time.Duration(r.finish - a.at))
		}
	}
	return unsent
}

// watch waits for the window to pass and probes at both of its ends. It says how
// long the window was between the probes.
func (r *run) watch(ctx context.Context) time.Duration {
	probe := r.Probe
	if probe == nil {
		probe = func() {}
	}
	wait(ctx, r.begin)
	probe()
	from := now()
	wait(ctx, r.finish)
	to := now()
	probe()
	return time.Duration(to - from)
}

// wait returns at a time of now, or false when ctx is done first.
func wait(ctx context.Context, t int64) bool {
	d := until(t)
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (r *run) within(t int64) bool { return r.begin <= t && t < r.finish }

// client sends one request after the other over one connection at a time.
func (r *run) client(ctx context.Context) {
	c := &client{run: r}
	defer c.hangUp()
	stop := context.AfterFunc(ctx, c.interrupt)
	defer stop()
	for {
		a, ok := r.schedule.take(now())
		if !ok || ctx.Err() != nil {
			return
		}
		due := a.at
		if t := now(); due > t {
			// Free and waiting: a timer that fires late is no fault of the target's.
			if !wait(ctx, due) {
				return
			}
			t = now()
			r.late.Add(time.Duration(t - due))
			due = t
		} else if due == 0 {
			due = t
		}
		if err := c.do(a, due); err != nil && ctx.Err() == nil {
			r.fail(err)
		}
	}
}

func (r *run) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c, ok := errors.AsType[*Corrupt](err); ok && r.corrupt == "" {
		r.corrupt = c.What
	}
	if r.failed == "" {
		r.failed = err.Error()
	}
	r.failures.Add(1)
}

// client is one connection and what is kept with it.
type client struct {
	run  *run
	in   incoming
	out  []byte
	used bool // the connection has carried an answer

	// mu guards conn and gone against interrupt.
	mu   sync.Mutex
	conn net.Conn
	gone bool
}

func (c *client) interrupt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = true
	if c.conn != nil {
		c.conn.Close()
	}
}

func (c *client) hangUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

func (c *client) dial() error {
	conn, err := net.DialTimeout("tcp", c.run.Address, 10*time.Second)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		conn.Close()
		return net.ErrClosed
	}
	c.conn, c.used = conn, false
	buf := c.in.buf
	if buf == nil {
		buf = make([]byte, 4<<10)
	}
	c.in = incoming{conn: conn, buf: buf}
	return nil
}

// do makes one request. A kept connection that the target has closed in the
// meantime is replaced once: that is how keep-alive works, and not an error.
func (c *client) do(a arrival, due int64) error {
	for {
		kept := c.conn != nil
		if !kept {
			if err := c.dial(); err != nil {
				return err
			}
		}
		before := c.in.reads
		again, err := c.exchange(a, due)
		if err != nil || again {
			c.hangUp()
		}
		switch {
		case err == nil:
			return nil
		case kept && c.in.reads == before && again:
			continue
		}
		return err
	}
}

// exchange says again with an error if the connection was closed before any of
// the answer came, and without one if it must not be used again.
func (c *client) exchange(a arrival, due int64) (again bool, err error) {
	r := c.run
	id := r.Seed<<32 | a.n
	shape := r.Shape
	shape.Tokens = a.tokens
	c.out = append(c.out[:0], r.head...)
	c.out = append(c.out, requestBody(shape, r.Model, id)...)

	m := &meter{token: func(sent, at, before int64) { r.token(sent, at, before) }}
	check := r.reader(m, newScript(id, shape))
	c.conn.SetDeadline(time.Now().Add(timeLimit))
	reads := c.in.reads
	if _, err := c.conn.Write(c.out); err != nil {
		return true, err
	}
	head, err := c.in.head()
	if err != nil {
		return err == io.EOF || errors.Is(err, net.ErrClosed) || isReset(err), noEOF(err)
	}
	if status := head.status(); status != 200 {
		var body []byte
		_ = c.in.body(head, func(p []byte, _ int64) error { body = append(body, clip(p)...); return nil })
		return false, fmt.Errorf("status %d: %s", status, clip(body))
	}
	if err := c.in.body(head, func(p []byte, at int64) error { return r.counted(check, p, at, &reads, c) }); err != nil {
		return false, err
	}
	if err := check.end(); err != nil {
		return false, err
	}
	// One that was due in the window and that the generator sent after it is the
	// window's all the same, or the counts would not add up.
	measured := r.within(cmp.Or(a.at, due))
	r.answered(measured, due, c.in.at)
	if m.tokens > 0 && measured {
		waited := int64(0)
		if m.received > 0 {
			waited = m.sent - m.received
		}
		r.first.Add(time.Duration(m.firstAt - due - waited))
	}
	return head.close, nil
}

// answered counts a whole answer. Rates count what ended within the window, and
// latency what was due in it: what a slow target answers later must not go
// missing. A stream that was hurried after the window says nothing.
func (r *run) answered(measured bool, due, end int64) {
	r.whole.Add(1)
	if r.within(end) {
		r.requests.Add(1)
	}
	if measured && (r.within(end) || !r.Shape.Stream || r.Engine == nil) {
		r.latency.Add(time.Duration(end - due))
	}
}

// counted hands bytes on and counts the reads that they took.
func (r *run) counted(check reader, p []byte, at int64, reads *uint64, c *client) error {
	if n := c.in.reads - *reads; n > 0 && r.within(at) {
		r.reads.Add(n)
	}
	*reads = c.in.reads
	return check.take(p, at)
}

func (r *run) token(sent, at, before int64) {
	if sent > 0 && r.within(sent) {
		r.added.Add(time.Duration(at - sent))
	}
	if !r.within(at) {
		return
	}
	r.tokens.Add(1)
	if before > 0 {
		r.gap.Add(time.Duration(at - before))
		if r.Shape.Interval > 0 && time.Duration(at-before) > 10*r.Shape.Interval {
			r.stalls.Add(1)
		}
	}
}

func (r *run) reader(m *meter, s *script) reader {
	switch {
	case r.Unknown && r.Shape.Stream:
		return &anyStream{meter: m}
	case r.Unknown:
		return &anyWhole{meter: m}
	case r.Shape.Stream:
		return &streamCheck{meter: m, s: s, prompt: r.prompt}
	}
	return &wholeCheck{meter: m, s: s, prompt: r.prompt}
}

func isReset(err error) bool {
	return bytes.Contains([]byte(err.Error()), []byte("reset by peer"))
}
