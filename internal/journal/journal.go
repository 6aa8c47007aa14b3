// SPDX-License-Identifier: Apache-2.0

// Package journal remembers what happened to every routed request: its record,
// the events that made it, and what an Idempotency-Key stands for.
//
// It owns the rules: how events fold into a record, which transitions are
// compare-and-swaps, what a key means (docs/failover.md), what a dead
// predecessor's records become. A Store only keeps rows; journal/sqlite is one.
// The gateway is its caller: it appends events, which costs it no I/O, and waits
// only where a promise to a client needs the disk first. One goroutine writes,
// and commits whatever has gathered as a group.
//
// A record never holds bodies, credentials or cookies. Answers are kept, apart
// from records, only for requests with an Idempotency-Key and for a bounded
// time.
package journal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/headgate/headgate/inference"
)

// Config is what a Journal is made from. Only Store and Gateway are required.
type Config struct {
	// Store keeps the rows. The Journal closes it.
	Store Store

	// Gateway is this gateway's id: records carry it as their owner.
	Gateway string

	// Durability says what is on disk before a client sees it. Default: Keyed.
	Durability Durability

	// Retention is how long finished records are kept. Default: 0, for ever.
	Retention time.Duration

	// KeyTTL is how long an Idempotency-Key and its answer are kept. 0 refuses
	// keys: right for a store that a restart empties.
	KeyTTL time.Duration

	// AnswerMax bounds a stored answer, in bytes. A larger one is not stored.
	AnswerMax int

	// Queue is the number of events that may wait to be written. When it is
	// full the newest event is dropped, counted, and its caller told. The last
	// quarter is kept for outcomes, so that a record is rather left without a
	// middle than without an end. Default: 8192, some 5 MB.
	Queue int

	Log *slog.Logger // default: discards
}

const (
	queueDefault   = 8192
	answersMax     = 64 << 20               // bytes of answers that wait to be written
	gatherTime     = 5 * time.Millisecond   // how long events nobody waits for may gather
	retryPause     = 100 * time.Millisecond // between tries while the store fails
	closeTries     = 5                      // to write what is left, when closing
	liveMax        = 1 << 16                // running records kept in memory
	orphansPerStep = 256
)

// Journal is safe for concurrent use. Make one with Open.
type Journal struct {
	store      Store
	gateway    string
	generation uint64
	durability Durability
	retention  time.Duration
	keyTTL     time.Duration
	answerMax  int
	queueMax   int
	log        *slog.Logger
	opened     time.Time
	unfenced   []*Record

	seq int64 // of the newest event; the writer's own

	wake    chan struct{} // something for the writer to look at
	stopped chan struct{} // the writer has returned

	// mu guards what follows. Nobody waits for I/O under it.
	mu      sync.Mutex
	queue   []entry
	since   time.Time // when the oldest entry of the queue was put there
	writing time.Time // the same, of the batch being written; zero if none
	urgent  bool      // somebody waits for an entry, or the queue is half full
	answers int       // bytes of answers in the queue
	dropped uint64
	lost    uint64
	down    bool
	closed  bool
	err     error // of the last write, when closing
}

// entry is one thing to write.
type entry struct {
	event   Event
	claim   *Claim
	answer  *Answer
	durable bool
	room    bool    // finds room in a full queue
	wait    *waiter // nil: nobody waits
}

// Open makes a Journal: it raises the gateway's generation and gives every
// record that a dead predecessor left its outcome. A record that may have
// reached its client becomes interrupted, any other failed.
func Open(ctx context.Context, c Config) (*Journal, error) {
	if c.Queue <= 0 {
		c.Queue = queueDefault
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	j := &Journal{
		store: c.Store, gateway: c.Gateway, durability: c.Durability, retention: c.Retention,
		keyTTL: c.KeyTTL, answerMax: c.AnswerMax, queueMax: c.Queue, log: c.Log, opened: time.Now(),
		wake: make(chan struct{}, 1), stopped: make(chan struct{}),
		queue: make([]entry, 0, c.Queue),
	}
	err := c.Store.Update(ctx, true, func(tx Tx) error {
		var err error
		j.generation, j.seq, err = tx.Raise(c.Gateway)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	closed, err := j.closeOrphans(ctx)
	if err != nil {
		return nil, fmt.Errorf("close what a predecessor left: %w", err)
	}
	if closed > 0 {
		j.log.Info("closed records of a predecessor", "records", closed)
	}
	err = c.Store.Update(ctx, false, func(tx Tx) error {
		var err error
		j.unfenced, err = tx.Unfenced(j.gateway, liveMax)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("find what is to be fenced: %w", err)
	}
	go j.write()
	return j, nil
}

// Unfenced are the records that were left with an attempt which a guard is still
// to prove silent when the Journal was opened. A Fenced event is expected of
// each.
func (j *Journal) Unfenced() []*Record { return j.unfenced }

// Generation is this gateway's, raised by every Open: it tells guards and
// records of this process from those of its predecessors.
func (j *Journal) Generation() uint64 { return j.generation }

// AnswerMax is the size of the largest answer that is stored.
func (j *Journal) AnswerMax() int { return j.answerMax }

// Append queues an event; it does not wait. A nil error means that the event
// will be written unless the process dies first. ErrUnavailable means that the
// queue is full, which is counted: who needs no durability goes on.
func (j *Journal) Append(e Event) error {
	return j.put(entry{event: e})
}

// Receive begins the record of a request without a key: queued, or durable
// where every request is.
func (j *Journal) Receive(ctx context.Context, e Event) error {
	e.Kind = Received
	if j.durability == Strict {
		return j.Commit(ctx, e)
	}
	_ = j.Append(e) // counted; the request goes on without a record
	return nil
}

// Dispatch is called before anything of an attempt is sent. Of a request with a
// key it returns nil only once the attempt is on disk, unless durability is
// relaxed: whoever opens the request again after a crash must know of every
// attempt. After an error nothing may be sent.
func (j *Journal) Dispatch(ctx context.Context, e Event, keyed bool) error {
	e.Kind = Dispatched
	if keyed && j.promises(keyed) {
		return j.Commit(ctx, e)
	}
	_ = j.Append(e) // counted; the request goes on
	return nil
}

// FirstDelta is called before the first byte of an answer is written. Where the
// record's word is a promise it returns nil only once the bit is on disk. After
// an error nothing may be written: the bit may or may not be set.
func (j *Journal) FirstDelta(ctx context.Context, e Event, keyed bool) error {
	e.Kind = FirstDelta
	if j.promises(keyed) {
		return j.Commit(ctx, e)
	}
	_ = j.Append(e) // counted; the request goes on
	return nil
}

func (j *Journal) promises(keyed bool) bool {
	return j.durability == Strict || keyed && j.durability == Keyed
}

// KeepAnswer stores the whole answer of a request with a key before its last
// bytes are written, so that no client has a whole answer that a crash makes
// unrepeatable. Where the record's word is no promise it does not wait. An
// answer that is nil or too large is not stored.
func (j *Journal) KeepAnswer(ctx context.Context, e Event, answer *Answer) error {
	e.Kind = Answered
	if answer == nil || len(answer.Body) > j.answerMax {
		return nil
	}
	if !j.promises(true) {
		return j.put(entry{event: e, answer: answer})
	}
	w := newWaiter()
	if err := j.put(entry{event: e, answer: answer, durable: true, wait: w}); err != nil {
		return err
	}
	r, err := w.await(ctx)
	if err != nil {
		return err
	}
	return r.err
}

// Finish queues a request's outcome, and its answer if it has a key, is to be
// replayed and was not stored by KeepAnswer. The outcome of a request with a key
// finds room even in a full queue. An answer that is too large, or that finds
// too many waiting, is not stored.
func (j *Journal) Finish(e Event, keyed bool, answer *Answer) error {
	e.Kind = Finished
	if !keyed || answer != nil && len(answer.Body) > j.answerMax {
		answer = nil
	}
	return j.put(entry{event: e, answer: answer, room: keyed})
}

// Commit queues an event and waits until it is on disk, together with all that
// was queued before it. ErrLost: the event does not fit the record any more.
// ErrUnavailable, or ctx's error: unknown.
func (j *Journal) Commit(ctx context.Context, e Event) error {
	w := newWaiter()
	if err := j.put(entry{event: e, durable: true, wait: w}); err != nil {
		return err
	}
	r, err := w.await(ctx)
	if err != nil {
		return err
	}
	return r.err
}

// Begin asks what a request with an Idempotency-Key is to do. The binding of the
// key to its request is on disk when it returns. An *inference.Error says that
// this journal takes no keys.
func (j *Journal) Begin(ctx context.Context, c Claim) (Decision, error) {
	if j.keyTTL <= 0 {
		return Decision{}, inference.Errorf(inference.KeyUnavailable, "Idempotency-Key needs a journal that survives a restart")
	}
	if c.At == 0 {
		c.At = At(time.Now())
	}
	arrival := *c.Arrival
	arrival.Keyed = true
	c.Arrival = &arrival
	w := newWaiter()
	e := Event{Request: c.Request, Kind: Received, At: c.At, Arrival: c.Arrival}
	if err := j.put(entry{event: e, claim: &c, durable: true, wait: w}); err != nil {
		return Decision{}, err
	}
	r, err := w.await(ctx)
	if err != nil {
		return Decision{}, err
	}
	return r.decision, r.err
}

// Get returns one record as it is after all events queued so far.
func (j *Journal) Get(ctx context.Context, id inference.RequestID) (*Record, error) {
	if err := j.Flush(ctx); err != nil && !errors.Is(err, ErrUnavailable) {
		return nil, err
	}
	return j.store.Get(ctx, id)
}

// Flush waits until the events queued so far are written, or the store fails.
func (j *Journal) Flush(ctx context.Context) error {
	w := newWaiter()
	if err := j.put(entry{wait: w}); err != nil {
		return err
	}
	r, err := w.await(ctx)
	if err != nil {
		return err
	}
	return r.err
}

// List returns records, newest first.
func (j *Journal) List(ctx context.Context, f Filter) (Page, error) { return j.store.List(ctx, f) }

// Events returns events, oldest first.
func (j *Journal) Events(ctx context.Context, f EventFilter) ([]Event, error) {
	return j.store.Events(ctx, f)
}

// Status is what metrics show of a Journal.
type Status struct {
	Lag     time.Duration // age of the oldest event that is not written
	Queued  int
	Dropped uint64 // events and answers that a full queue or a failing store cost
	Lost    uint64 // events that no longer fitted their record
	Down    bool   // the last write failed
}

// Status returns the counters.
func (j *Journal) Status() Status {
	now := time.Now()
	j.mu.Lock()
	defer j.mu.Unlock()
	s := Status{Queued: len(j.queue), Dropped: j.dropped, Lost: j.lost, Down: j.down}
	switch {
	case !j.writing.IsZero():
		s.Lag = max(now.Sub(j.writing), 0)
	case len(j.queue) > 0:
		s.Lag = max(now.Sub(j.since), 0)
	}
	return s
}

// Serves reports whether requests would be taken: not while the store fails and
// every request needs it.
func (j *Journal) Serves() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return !j.down || j.durability != Strict
}

// Close writes what is queued, stops the writer and closes the store. Events
// that come later are refused. It returns an error if something was left.
func (j *Journal) Close() error {
	j.mu.Lock()
	first := !j.closed
	j.closed = true
	j.mu.Unlock()
	j.nudge()
	<-j.stopped
	if !first {
		return nil
	}
	return errors.Join(j.err, j.store.Close())
}

// put queues an entry, or refuses it.
func (j *Journal) put(e entry) error {
	point(stageQueue, e.event.Kind)
	now := time.Now()
	if e.event.At == 0 {
		e.event.At = At(now)
	}
	bound := j.queueMax - j.queueMax/4
	if e.event.Kind == Finished {
		bound = j.queueMax
	}
	j.mu.Lock()
	if j.closed || len(j.queue) >= bound && !e.room {
		if e.event.Kind != noKind {
			j.dropped++
		}
		closed := j.closed
		j.mu.Unlock()
		if closed {
			return fmt.Errorf("%w: closed", ErrUnavailable)
		}
		return fmt.Errorf("%w: queue full", ErrUnavailable)
	}
	if e.answer != nil {
		if j.answers += len(e.answer.Body); j.answers > answersMax {
			j.answers -= len(e.answer.Body)
			e.answer = nil
			j.dropped++
		}
	}
	wake := len(j.queue) == 0
	if wake {
		j.since = now
	}
	j.queue = append(j.queue, e)
	if !j.urgent && (e.wait != nil || len(j.queue) >= j.queueMax/2) {
		j.urgent, wake = true, true
	}
	j.mu.Unlock()
	if wake {
		j.nudge()
	}
	return nil
}

func (j *Journal) nudge() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}
