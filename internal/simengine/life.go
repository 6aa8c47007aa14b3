// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/headgate/headgate/internal/simengine/model"
)

// life is one incarnation of an engine: a listener, a model with the goroutine
// that drives it, and connections. When it ends, all of that is gone.
type life struct {
	e      *Engine
	n      int
	ctx    context.Context // done when the life ends
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu      sync.Mutex // guards what follows
	ln      net.Listener
	ended   bool
	conns   map[*conn]struct{}
	connN   uint64
	model   *model.Engine
	jobs    map[string]*job
	workN   uint64
	timings timings

	started  time.Time
	stopped  time.Duration // real time spent paused
	pausedAt time.Time     // zero: running
	resumed  chan struct{} // closed by resume

	wake chan struct{} // tells drive that the model has work; one token
}

func startLife(e *Engine, ln net.Listener, n int) *life {
	l := &life{
		e: e, n: n, ln: ln,
		conns:   make(map[*conn]struct{}),
		model:   model.New(e.cfg.Params),
		jobs:    make(map[string]*job),
		timings: newTimings(),
		started: time.Now(),
		wake:    make(chan struct{}, 1),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.record(Entry{Event: EventListening, Detail: ln.Addr().String()})
	l.tasks.Go(l.drive)
	l.tasks.Go(func() { l.accept(ln) })
	return l
}

func (l *life) record(entry Entry) {
	entry.Engine, entry.Incarnation = l.e.cfg.Name, l.n
	l.e.log.add(entry)
}

func (l *life) dead() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ended
}

// end closes everything at once, with RST if the life ends by EventExit. It
// does not wait, and reports whether this call ended the life.
func (l *life) end(event string) bool {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return false
	}
	l.ended = true
	if l.ln != nil {
		_ = l.ln.Close()
	}
	// The entry comes before the first reset: nothing a client sees of this
	// death is earlier than it in the log.
	l.record(Entry{Event: event})
	for c := range l.conns {
		if event == EventExit {
			c.linger0()
		}
		_ = c.net.Close()
	}
	l.cancel()
	l.mu.Unlock()
	return true
}

func (l *life) wait() { l.tasks.Wait() }

func (l *life) accept(ln net.Listener) {
	for {
		nc, err := ln.Accept()
		if err != nil {
			return // closed: by end or by a fault
		}
		c := newConn(l, nc)
		l.mu.Lock()
		if l.ended {
			l.mu.Unlock()
			c.linger0()
			_ = nc.Close()
			return
		}
		l.connN++
		c.id = l.connN
		l.conns[c] = struct{}{}
		l.tasks.Go(c.serve)
		l.mu.Unlock()
	}
}

// refuse closes the listening socket, so that the kernel answers connects with
// RST. Open connections go on. With a duration it listens again after that.
func (l *life) refuse(f Fault) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || l.ln == nil {
		return
	}
	_ = l.ln.Close()
	l.ln = nil
	l.record(Entry{Event: EventFault, Detail: f.String()})
	if after := f.duration(0, 0); after > 0 {
		l.tasks.Go(func() {
			if sleep(l.ctx, after) == nil {
				_ = l.relisten()
			}
		})
	}
}

// Relisten undoes refuse@listen.
func (e *Engine) Relisten() error { return e.current().relisten() }

func (l *life) relisten() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || l.ln != nil {
		return errors.New("simengine: not refusing")
	}
	ln, err := net.Listen(l.e.network, l.e.addr)
	if err != nil {
		l.record(Entry{Event: EventFault, Detail: "listen again: " + err.Error()})
		return err
	}
	l.ln = ln
	l.record(Entry{Event: EventListening, Detail: ln.Addr().String()})
	l.tasks.Go(func() { l.accept(ln) })
	return nil
}

func (l *life) pause(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch paused := !l.pausedAt.IsZero(); {
	case on && !paused:
		l.pausedAt, l.resumed = time.Now(), make(chan struct{})
	case !on && paused:
		l.stopped += time.Since(l.pausedAt)
		l.pausedAt = time.Time{}
		close(l.resumed)
		l.nudge()
	}
}

// running waits until the engine is not paused. It returns false when the life
// ends first.
func (l *life) running() bool {
	for {
		l.mu.Lock()
		paused, resumed := !l.pausedAt.IsZero(), l.resumed
		l.mu.Unlock()
		if l.ctx.Err() != nil {
			return false
		}
		if !paused {
			return true
		}
		select {
		case <-resumed:
		case <-l.ctx.Done():
			return false
		}
	}
}

func (l *life) nudge() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// now is the model's time.
func (l *life) now() time.Duration {
	return time.Duration(float64(time.Since(l.started)-l.stopped) * l.e.cfg.Speed)
}

// stepsPerLock bounds how long drive keeps the lock while the model is behind:
// an Instant engine always is.
const stepsPerLock = 16

// drive is the goroutine that lets the model's time pass.
func (l *life) drive() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		wait, ok := l.advance()
		if ok {
			timer.Reset(wait)
		} else {
			timer.Stop()
		}
		select {
		case <-timer.C:
		case <-l.wake:
		case <-l.ctx.Done():
			return
		}
	}
}

// advance steps the model up to now and returns how long to wait for the next
// step, if there is one.
func (l *life) advance() (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.pausedAt.IsZero() {
		return 0, false
	}
	now := l.now()
	for range stepsPerLock {
		at, ok := l.model.Next()
		if !ok {
			return 0, false
		}
		if at > now {
			return time.Duration(float64(at-now)/l.e.cfg.Speed) + 1, true // rounded up, or it would spin
		}
		for _, ev := range l.model.Step(now) {
			l.apply(ev)
		}
	}
	return 0, true
}

func (l *life) apply(ev model.Event) {
	j := l.jobs[ev.Job]
	if j == nil {
		return
	}
	w := j.work
	switch ev.Kind {
	case model.Admitted:
		if !j.admitted {
			j.admitted, j.cached = true, ev.N
			l.timings.queue.observe(ev.At - j.submitted)
			w.record(Entry{Event: EventAdmitted, N: ev.N, Choice: j.choice})
		}
	case model.Token:
		j.made = ev.N
		if ev.N == 1 {
			l.timings.firstToken.observe(ev.At - j.submitted)
		} else {
			l.timings.interToken.observe(ev.At - j.last)
		}
		j.last = ev.At
	case model.Finished:
		j.done = true
		l.timings.finish(j, ev.At)
		delete(l.jobs, ev.Job)
	case model.Preempted:
		w.record(Entry{Event: "preempted", N: ev.N, Choice: j.choice})
	}
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// work is what the model does for one request: one job per choice.
type work struct {
	l       *life
	record  func(Entry)   // logs with the request's identity
	changed chan struct{} // one token: some job went on
	jobs    []*job        // their fields are guarded by l.mu
}

type job struct {
	work      *work
	id        string
	choice    int
	reason    string // finish_reason
	submitted time.Duration
	last      time.Duration // when the newest token was made
	admitted  bool
	cached    int
	made      int
	done      bool
}

// submit gives the jobs to the model, all or none. Their ids are set here.
func (l *life) submit(record func(Entry), jobs []model.Job, reason string) (*work, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	l.workN++
	w := &work{l: l, record: record, changed: make(chan struct{}, 1)}
	for i, mj := range jobs {
		mj.ID = fmt.Sprintf("%d/%d", l.workN, i)
		if err := l.model.Submit(now, mj); err != nil {
			w.cancelLocked(now)
			return nil, err
		}
		j := &job{work: w, id: mj.ID, choice: i, reason: reason, submitted: now, last: now}
		l.jobs[mj.ID] = j
		w.jobs = append(w.jobs, j)
	}
	record(Entry{Event: EventSubmitted, Choices: len(jobs)})
	l.nudge()
	return w, nil
}

// cancel takes what is not finished out of the model and returns how many
// tokens were computed.
func (w *work) cancel() (computed int) {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	return w.cancelLocked(w.l.now())
}

func (w *work) cancelLocked(now time.Duration) (computed int) {
	for _, j := range w.jobs {
		computed += j.made
		if w.l.model.Cancel(now, j.id) {
			w.l.timings.aborted++
			delete(w.l.jobs, j.id)
		}
	}
	w.l.nudge()
	return computed
}

// limit lets each job make so many tokens and no more, or go to its end.
func (w *work) limit(tokens int, limited bool) {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	now := w.l.now()
	for _, j := range w.jobs {
		if limited {
			w.l.model.Hold(now, j.id, tokens)
		} else {
			w.l.model.Release(now, j.id)
		}
	}
	w.l.nudge()
}

// progress is a copy of where the jobs are.
type progress struct {
	made []int
	done []bool
}

func (w *work) progress() (p progress) {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	for _, j := range w.jobs {
		p.made, p.done = append(p.made, j.made), append(p.done, j.done)
	}
	return p
}

// cached is the prompt tokens that were found in the prefix cache, those of
// further choices of the same prompt left out.
func (w *work) cached(perPrompt int) (n int) {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	for i, j := range w.jobs {
		if i%perPrompt == 0 {
			n += j.cached
		}
	}
	return n
}

func (l *life) snapshot() model.Snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.model.Snapshot()
}

// sleep waits for d or until ctx is done.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
