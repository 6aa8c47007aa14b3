// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/inference"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// moody is a Memory that can be told to fail, and to stand still.
type moody struct {
	*Memory
	mu      sync.Mutex
	err     error
	hold    chan struct{} // not nil: Update waits until it is closed
	keeps   bool          // fails after the fact: the transaction is kept
	durable int           // updates that were
	updates int
}

func newMoody() *moody { return &moody{Memory: NewMemory(0)} }

func (m *moody) be(err error, keeps bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err, m.keeps = err, keeps
}

func (m *moody) Update(ctx context.Context, durable bool, fn func(Tx) error) error {
	m.mu.Lock()
	err, keeps, hold := m.err, m.keeps, m.hold
	m.updates++
	if durable {
		m.durable++
	}
	m.mu.Unlock()
	if hold != nil {
		<-hold
	}
	if err == nil {
		return m.Memory.Update(ctx, durable, fn)
	}
	if keeps {
		if err := m.Memory.Update(ctx, durable, fn); err != nil {
			return err
		}
		return err
	}
	undone := errors.New("undone")
	if got := m.Memory.Update(ctx, durable, func(tx Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		return undone
	}); !errors.Is(got, undone) {
		return got
	}
	return err
}

var errFull = fmt.Errorf("%w: disk full", ErrUnavailable)

func open(t *testing.T, s Store, set ...func(*Config)) *Journal {
	t.Helper()
	c := Config{Store: s, Gateway: "gw-1", KeyTTL: time.Hour, AnswerMax: 64}
	for _, f := range set {
		f(&c)
	}
	j, err := Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func shut(t *testing.T, j *Journal) {
	t.Helper()
	if err := j.Close(); err != nil {
		t.Error(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func claim(id, key, body string) Claim {
	return Claim{Request: inference.RequestID(id), Key: key, Digest: Digest([]byte(body)), Arrival: &Arrival{Tenant: "t", Pool: "p", MaxAttempts: 2}}
}

// TestRecordTellsTheWholeStory: an incident is read from the record alone.
func TestRecordTellsTheWholeStory(t *testing.T) {
	j := open(t, NewMemory(0))
	defer shut(t, j)
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(s int) Time { return At(start.Add(time.Duration(s) * time.Second)) }
	r := inference.RequestID("req_1")
	must(t, j.Receive(t.Context(), Event{Request: r, At: at(0), Arrival: &Arrival{Tenant: "team", Model: "m", TargetModel: "M", Pool: "p", MaxAttempts: 2, PromptTokens: 800}}))
	for _, e := range []Event{
		{Kind: Queued, At: at(1)},
		{Kind: Dispatched, At: at(2), Attempt: 1, Endpoint: "http://a:1", Revision: "v1"},
		{Kind: Fencing, At: at(3), Attempt: 1, Verdict: inference.Closed},
		{Kind: Fenced, At: at(3), Attempt: 1, Proof: inference.ProofTransport},
		{Kind: Dispatched, At: at(4), Attempt: 2, Endpoint: "http://b:1", Revision: "v2"},
	} {
		e.Request = r
		must(t, j.Append(e))
	}
	must(t, j.FirstDelta(t.Context(), Event{Request: r, At: at(5), Attempt: 2, Tokens: 1, Events: 1}, true))
	must(t, j.Append(Event{Request: r, At: at(6), Kind: Fencing, Attempt: 2, Verdict: inference.Dead}))
	must(t, j.Finish(Event{Request: r, At: at(6), Outcome: inference.Interrupted, Tokens: 37, Events: 36, Estimated: true,
		Error: &inference.Error{Code: inference.DecodeInterrupted, Message: "cut", Err: errors.New("http://10.0.0.1 secret")}}, false, nil))
	got, err := j.Get(t.Context(), r)
	must(t, err)
	if got.Outcome != "interrupted" || got.Code != "upstream_decode_interrupted" || !got.FirstDeltaSent || got.Attempt != 2 ||
		got.RetryBudget != 0 || got.DeliveredOutputTokens != 37 || got.ModelRevision != "v2" || len(got.Attempts) != 2 ||
		got.Attempts[0].FenceProof != "transport" || got.Attempts[1].State != "fencing" || got.Phase != "terminal" {
		t.Errorf("record: %+v", got)
	}
	if f := got.Error; f == nil || f.Message != "cut" || !f.Partial || f.Retryable || f.Tokens != 37 {
		t.Errorf("error: %+v", got.Error)
	}
	events, err := j.Events(t.Context(), EventFilter{Request: r})
	must(t, err)
	if len(events) != 9 || events[8].Kind != Finished {
		t.Errorf("events: %v", events)
	}
	for i := 1; i < len(events); i++ {
		if events[i].Seq <= events[i-1].Seq {
			t.Errorf("event %d is not behind the one before it", i)
		}
	}
}

// TestFullQueueDropsTheNewestAndSaysSo: the last quarter is for outcomes.
func TestFullQueueDropsTheNewestAndSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s, func(c *Config) { c.Queue = 8 })
		s.mu.Lock()
		s.hold = make(chan struct{})
		s.mu.Unlock()
		must(t, j.Receive(t.Context(), Event{Request: "r0", Arrival: &Arrival{}}))
		time.Sleep(time.Second) // the writer holds r0 now
		for i := range 6 {
			must(t, j.Append(Event{Request: "r0", Kind: Queued, At: Time(i + 1)}))
		}
		if err := j.Append(Event{Request: "r0", Kind: Queued}); !errors.Is(err, ErrUnavailable) {
			t.Errorf("seventh: %v", err)
		}
		if err := j.FirstDelta(t.Context(), Event{Request: "r0", Attempt: 1}, true); !errors.Is(err, ErrUnavailable) {
			t.Errorf("keyed first delta: %v", err)
		}
		if err := j.FirstDelta(t.Context(), Event{Request: "r0", Attempt: 1}, false); err != nil {
			t.Errorf("unkeyed first delta: %v", err)
		}
		must(t, j.Finish(Event{Request: "r0", Outcome: inference.Completed}, false, nil))
		status := j.Status()
		if status.Dropped != 3 || status.Lag != time.Second || status.Queued != 7 {
			t.Errorf("status: %+v", status)
		}
		close(s.hold)
		shut(t, j)
		if r, err := j.Get(t.Context(), "r0"); err != nil && !errors.Is(err, ErrUnavailable) || r.Outcome != "completed" {
			t.Errorf("%+v, %v", r, err)
		}
	})
}

// TestStoreFailsAndRecovers: those who wait are told at once; the rest is
// written when the store works again.
func TestStoreFailsAndRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s)
		must(t, j.Receive(t.Context(), Event{Request: "r0", Arrival: &Arrival{}}))
		must(t, j.Flush(t.Context()))
		s.be(errFull, false)
		must(t, j.Append(Event{Request: "r0", Kind: Dispatched, Attempt: 1}))
		if err := j.Commit(t.Context(), Event{Request: "r0", Kind: FirstDelta, Attempt: 1}); !errors.Is(err, ErrUnavailable) {
			t.Errorf("commit: %v", err)
		}
		if _, err := j.Begin(t.Context(), claim("r1", "k", "b")); !errors.Is(err, ErrUnavailable) {
			t.Errorf("begin: %v", err)
		}
		if st := j.Status(); !st.Down {
			t.Errorf("status: %+v", st)
		}
		must(t, j.Append(Event{Request: "r0", Kind: Fencing, Attempt: 1, Verdict: inference.Dead}))
		s.be(nil, false)
		r, err := j.Get(t.Context(), "r0")
		must(t, err)
		if len(r.Attempts) != 1 || r.Attempts[0].State != "fencing" || r.FirstDeltaSent {
			t.Errorf("record: %+v", r)
		}
		if st := j.Status(); st.Down || st.Dropped != 0 || st.Lag != 0 {
			t.Errorf("status: %+v", st)
		}
		d, err := j.Begin(t.Context(), claim("r2", "k", "b"))
		if err != nil || d.State != KeyNew {
			t.Errorf("begin again: %v %v", d.State, err)
		}
		shut(t, j)
	})
}

// TestUnknownResultDoesNotHoldTheKey: the claim was kept although its client was
// told that the journal is unavailable.
func TestUnknownResultDoesNotHoldTheKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s)
		s.be(errFull, true)
		if _, err := j.Begin(t.Context(), claim("r1", "k", "b")); !errors.Is(err, ErrUnavailable) {
			t.Errorf("begin: %v", err)
		}
		s.be(nil, false)
		d, err := j.Begin(t.Context(), claim("r2", "k", "b"))
		if err != nil || d.State != KeyReopened || d.Record.RequestID != "r1" {
			t.Errorf("begin again: %v %+v %v", d.State, d.Record, err)
		}
		if d, err := j.Begin(t.Context(), claim("r3", "k", "b")); err != nil || d.State != KeyInProgress {
			t.Errorf("duplicate: %v %v", d.State, err)
		}
		shut(t, j)
	})
}

// TestClientThatLeavesWhileItsKeyIsCommitted: nobody runs the request, and the
// key is free for a repeat.
func TestClientThatLeavesWhileItsKeyIsCommitted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s)
		s.mu.Lock()
		s.hold = make(chan struct{})
		s.mu.Unlock()
		ctx, leave := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := j.Begin(ctx, claim("r1", "k", "b"))
			done <- err
		}()
		synctest.Wait()
		leave()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("begin: %v", err)
		}
		close(s.hold)
		d, err := j.Begin(t.Context(), claim("r2", "k", "b"))
		if err != nil || d.State != KeyReopened || d.Record.RequestID != "r1" {
			t.Errorf("repeat: %v %v", d.State, err)
		}
		shut(t, j)
	})
}

// TestCommitThatNobodyWaitsForAnyMore.
func TestCommitThatNobodyWaitsForAnyMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s)
		must(t, j.Receive(t.Context(), Event{Request: "r", Arrival: &Arrival{}}))
		must(t, j.Flush(t.Context()))
		s.mu.Lock()
		s.hold = make(chan struct{})
		s.mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := j.FirstDelta(ctx, Event{Request: "r", Attempt: 1}, true); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("first delta: %v", err)
		}
		close(s.hold)
		if r, err := j.Get(t.Context(), "r"); err != nil || r.Terminal() || !r.FirstDeltaSent {
			t.Errorf("%+v, %v", r, err)
		}
		shut(t, j)
	})
}

// TestNothingIsSyncedForWhoDoesNotAsk: group commits of async events are not
// durable, and come at most every few milliseconds.
func TestNothingIsSyncedForWhoDoesNotAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			durability Durability
			keyed      bool
			durable    int
		}{{Keyed, false, 0}, {Keyed, true, 2}, {Strict, false, 2}, {Strict, true, 3}, {Relaxed, true, 0}} {
			s := newMoody()
			j := open(t, s, func(cfg *Config) { cfg.Durability = c.durability })
			before := s.durable
			must(t, j.Receive(t.Context(), Event{Request: "r", Arrival: &Arrival{Keyed: c.keyed}}))
			must(t, j.Dispatch(t.Context(), Event{Request: "r", Attempt: 1}, c.keyed))
			must(t, j.FirstDelta(t.Context(), Event{Request: "r", Attempt: 1}, c.keyed))
			must(t, j.Finish(Event{Request: "r", Outcome: inference.Completed}, false, nil))
			must(t, j.Flush(t.Context()))
			if got := s.durable - before; got != c.durable {
				t.Errorf("%s keyed=%v: %d durable updates, want %d", c.durability, c.keyed, got, c.durable)
			}
			if r, _ := s.Get(t.Context(), "r"); r.FirstDeltaDurable != (c.durable > 0) {
				t.Errorf("%s keyed=%v: first_delta_durable %v", c.durability, c.keyed, r.FirstDeltaDurable)
			}
			shut(t, j)
		}
	})
}

func TestCloseWritesWhatIsQueued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s)
		for i := range 100 {
			must(t, j.Receive(t.Context(), Event{Request: inference.RequestID(fmt.Sprint("r", i)), Arrival: &Arrival{}}))
		}
		shut(t, j)
		if page, _ := s.List(t.Context(), Filter{Limit: 1000}); len(page.Records) != 100 {
			t.Errorf("%d records", len(page.Records))
		}
		if err := j.Append(Event{Request: "x", Kind: Queued}); !errors.Is(err, ErrUnavailable) {
			t.Errorf("after close: %v", err)
		}
		if err := j.Close(); err != nil {
			t.Errorf("second close: %v", err)
		}
	})
}

func TestCloseOfAFailingStoreGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s)
		s.be(errFull, false)
		must(t, j.Receive(t.Context(), Event{Request: "r", Arrival: &Arrival{}}))
		if err := j.Close(); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "1 events") {
			t.Errorf("close: %v", err)
		}
		if st := j.Status(); st.Dropped != 1 {
			t.Errorf("status: %+v", st)
		}
	})
}

// TestCloseAfterAnOutageWithNothingLeft returns at once.
func TestCloseAfterAnOutageWithNothingLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s)
		s.be(errFull, false)
		if err := j.Commit(t.Context(), Event{Request: "r", Kind: Received, Arrival: &Arrival{}}); !errors.Is(err, ErrUnavailable) {
			t.Errorf("commit: %v", err)
		}
		start := time.Now()
		shut(t, j)
		if took := time.Since(start); took > retryPause {
			t.Errorf("close took %s", took)
		}
	})
}

// TestFullQueueBehindAFailingStoreRecovers: memory stays bounded, commits are
// refused at once, and after recovery everything flows again.
func TestFullQueueBehindAFailingStoreRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s, func(c *Config) { c.Queue = 16 })
		s.be(errFull, false)
		refused := 0
		for i := range 200 {
			e := Event{Request: inference.RequestID(fmt.Sprint("r", i)), Kind: Received, Arrival: &Arrival{}}
			if j.Append(e) != nil {
				refused++
			}
			time.Sleep(10 * time.Millisecond)
		}
		if err := j.Commit(t.Context(), Event{Request: "r0", Kind: Queued}); !errors.Is(err, ErrUnavailable) {
			t.Errorf("commit: %v", err)
		}
		if st := j.Status(); refused < 150 || st.Dropped < uint64(refused) || st.Lag < time.Second {
			t.Errorf("refused %d, status %+v", refused, st)
		}
		s.be(nil, false)
		time.Sleep(time.Second)
		must(t, j.Commit(t.Context(), Event{Request: "r0", Kind: Queued}))
		page, _ := s.List(t.Context(), Filter{})
		if len(page.Records) != 200-refused {
			t.Errorf("%d records of %d accepted", len(page.Records), 200-refused)
		}
		shut(t, j)
	})
}

// TestBugInOneBatchDoesNotStopTheWriter.
func TestBugInOneBatchDoesNotStopTheWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s)
		s.be(errors.New("constraint"), false)
		must(t, j.Receive(t.Context(), Event{Request: "r", Arrival: &Arrival{}}))
		time.Sleep(time.Second)
		s.be(nil, false)
		must(t, j.Receive(t.Context(), Event{Request: "r2", Arrival: &Arrival{}}))
		must(t, j.Flush(t.Context()))
		if st := j.Status(); st.Dropped != 1 || st.Down {
			t.Errorf("status: %+v", st)
		}
		shut(t, j)
	})
}

// TestPredecessorsRecordsAreClosed, each as what is true of it.
func TestPredecessorsRecordsAreClosed(t *testing.T) {
	for _, c := range []struct {
		name       string
		durability Durability
		keyed      bool
		events     []Event
		outcome    Text
		state      string // of the last attempt
		unproved   bool
		repeat     KeyState
	}{
		{name: "not dispatched", keyed: true, outcome: "failed", repeat: KeyReopened},
		{name: "dispatched", keyed: true, events: []Event{{Kind: Dispatched, Attempt: 1}}, outcome: "failed", state: "fenced", repeat: KeyReopened},
		{name: "dispatched to a guard", keyed: true, events: []Event{{Kind: Dispatched, Attempt: 1, Fence: inference.FenceLease}},
			outcome: "failed", state: "fencing", repeat: KeyInProgress},
		{name: "after the first delta", keyed: true, events: []Event{{Kind: Dispatched, Attempt: 1}, {Kind: FirstDelta, Attempt: 1}},
			outcome: "interrupted", state: "fenced", repeat: KeyInterrupted},
		{name: "all attempts used", keyed: true, outcome: "failed", state: "fenced", repeat: KeyExhausted, events: []Event{
			{Kind: Dispatched, Attempt: 1}, {Kind: Fenced, Attempt: 1, Proof: inference.ProofTransport}, {Kind: Dispatched, Attempt: 2}}},
		{name: "relaxed", durability: Relaxed, keyed: true, events: []Event{{Kind: Dispatched, Attempt: 1}},
			outcome: "failed", state: "fenced", unproved: true, repeat: KeyInterrupted},
		{name: "no key", events: []Event{{Kind: Dispatched, Attempt: 1}}, outcome: "failed", state: "fenced", unproved: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := NewMemory(0)
			set := func(cfg *Config) { cfg.Durability = c.durability }
			j := open(t, s, set)
			if c.keyed {
				_, err := j.Begin(t.Context(), claim("r", "k", "b"))
				must(t, err)
			} else {
				must(t, j.Receive(t.Context(), Event{Request: "r", Arrival: &Arrival{MaxAttempts: 2}}))
			}
			for _, e := range c.events {
				e.Request = "r"
				must(t, j.Append(e))
			}
			shut(t, j)
			next := open(t, s, set)
			defer shut(t, next)
			if next.Generation() != j.Generation()+1 {
				t.Errorf("generations %d, %d", j.Generation(), next.Generation())
			}
			r, err := next.Get(t.Context(), "r")
			must(t, err)
			if r.Outcome != c.outcome || r.FirstDeltaUnproved != c.unproved || r.Error == nil || r.Generation != next.Generation() {
				t.Errorf("record: %+v", r)
			}
			if a := r.last(); (a == nil) != (c.state == "") || a != nil && a.State != c.state {
				t.Errorf("attempt: %+v", a)
			}
			if !c.keyed {
				return
			}
			if d, err := next.Begin(t.Context(), claim("r9", "k", "b")); err != nil || d.State != c.repeat {
				t.Errorf("repeat: %s %v, want %s", d.State, err, c.repeat)
			}
		})
	}
}

// TestLateEventsOfAnOldProcessAreLost: another process took the record over.
func TestLateEventsOfAnOldProcessAreLost(t *testing.T) {
	s := NewMemory(0)
	old := open(t, s)
	_, err := old.Begin(t.Context(), claim("r", "k", "b"))
	must(t, err)
	must(t, old.Commit(t.Context(), Event{Request: "r", Kind: Dispatched, Attempt: 1}))
	next := open(t, s)
	defer shut(t, next)
	if err := old.FirstDelta(t.Context(), Event{Request: "r", Attempt: 1}, true); !errors.Is(err, ErrLost) {
		t.Errorf("first delta of the old process: %v", err)
	}
	d, err := next.Begin(t.Context(), claim("r2", "k", "b"))
	if err != nil || d.State != KeyReopened || d.Record.Attempt != 1 {
		t.Fatalf("%v %v", d.State, err)
	}
	if err := old.FirstDelta(t.Context(), Event{Request: "r", Attempt: 1}, true); !errors.Is(err, ErrLost) {
		t.Errorf("first delta of the old process, again: %v", err)
	}
	must(t, next.Append(Event{Request: "r", Kind: Dispatched, Attempt: 2}))
	must(t, next.FirstDelta(t.Context(), Event{Request: "r", Attempt: 2}, true))
	shut(t, old)
}

func TestStoreWithoutKeysRefusesThem(t *testing.T) {
	j := open(t, NewMemory(10), func(c *Config) { c.KeyTTL = 0 })
	defer shut(t, j)
	_, err := j.Begin(t.Context(), claim("r", "k", "b"))
	if e, ok := errors.AsType[*inference.Error](err); !ok || e.Code != inference.KeyUnavailable {
		t.Errorf("got %v", err)
	}
}

func TestMemoryIsARing(t *testing.T) {
	s := NewMemory(10)
	j := open(t, s)
	for i := range 100 {
		id := inference.RequestID(fmt.Sprint("r", i))
		must(t, j.Receive(t.Context(), Event{Request: id, Arrival: &Arrival{}}))
		if i != 0 { // r0 runs for ever
			must(t, j.Finish(Event{Request: id, Outcome: inference.Completed}, false, nil))
		}
		must(t, j.Flush(t.Context()))
	}
	page, err := j.List(t.Context(), Filter{})
	must(t, err)
	if len(page.Records) != 10 || page.Records[0].RequestID != "r99" || page.Records[9].RequestID != "r0" {
		t.Errorf("%d records", len(page.Records))
	}
	shut(t, j)
}

// TestUnknownFirstDeltaIsNotForgotten: the bit was kept although its caller was
// told that this is unknown. Nothing runs after it (I2).
func TestUnknownFirstDeltaIsNotForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s)
		_, err := j.Begin(t.Context(), claim("r", "k", "b"))
		must(t, err)
		must(t, j.Commit(t.Context(), Event{Request: "r", Kind: Dispatched, Attempt: 1}))
		s.be(errFull, true)
		if err := j.FirstDelta(t.Context(), Event{Request: "r", Attempt: 1}, true); !errors.Is(err, ErrUnavailable) {
			t.Errorf("first delta: %v", err)
		}
		s.be(nil, false)
		if err := j.Commit(t.Context(), Event{Request: "r", Kind: Dispatched, Attempt: 2}); !errors.Is(err, ErrLost) {
			t.Errorf("dispatch: %v", err)
		}
		must(t, j.Finish(Event{Request: "r", Outcome: inference.Failed}, true, nil))
		if d, err := j.Begin(t.Context(), claim("r2", "k", "b")); err != nil || d.State != KeyInterrupted {
			t.Errorf("repeat: %s %v", d.State, err)
		}
		shut(t, j)
	})
}

// TestNobodyWaitsBehindAFullBatch: while the store fails and the batch that it
// refuses has no room left, commits are refused and not left to wait.
func TestNobodyWaitsBehindAFullBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s, func(c *Config) { c.Queue = 16 })
		s.be(errFull, false)
		for range 20 {
			_ = j.Append(Event{Request: "r", Kind: Queued}) // the last are one too many
			time.Sleep(retryPause * 2)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := j.Commit(ctx, Event{Request: "r", Kind: Queued}); !errors.Is(err, ErrUnavailable) {
			t.Errorf("commit: %v", err)
		}
		s.be(nil, false)
		shut(t, j)
	})
}

// TestAttemptsOfAKeyAreKnownAfterACrash: a successor finds the attempt that was
// sent a moment before its predecessor died.
func TestAttemptsOfAKeyAreKnownAfterACrash(t *testing.T) {
	s := newMoody()
	j := open(t, s)
	_, err := j.Begin(t.Context(), claim("r", "k", "b"))
	must(t, err)
	must(t, j.Dispatch(t.Context(), Event{Request: "r", Attempt: 1, Endpoint: "a"}, true))
	if r, err := s.Get(t.Context(), "r"); err != nil || len(r.Attempts) != 1 || r.Attempts[0].Endpoint != "a" {
		t.Errorf("%v %+v", err, r)
	}
	s.be(errFull, false)
	if err := j.Dispatch(t.Context(), Event{Request: "r", Attempt: 2}, true); !errors.Is(err, ErrUnavailable) {
		t.Errorf("an attempt that is not on disk may be sent: %v", err)
	}
	s.be(nil, false)
	shut(t, j)
}

func TestKeysAreDurable(t *testing.T) {
	s := newMoody()
	j := open(t, s, func(c *Config) { c.Durability = Relaxed })
	before := s.durable
	_, err := j.Begin(t.Context(), claim("r", "k", "b"))
	must(t, err)
	shut(t, j)
	if s.durable != before+1 {
		t.Errorf("%d durable updates for one key", s.durable-before)
	}
}

// TestManyRecordsOfAPredecessor: more than one step of closing.
func TestManyRecordsOfAPredecessor(t *testing.T) {
	s := NewMemory(0)
	j := open(t, s)
	for i := range 2*orphansPerStep + 9 {
		must(t, j.Receive(t.Context(), Event{Request: inference.RequestID(fmt.Sprint("r", i)), Arrival: &Arrival{}}))
	}
	shut(t, j)
	next := open(t, s)
	defer shut(t, next)
	if page, err := next.List(t.Context(), Filter{Unfinished: true}); err != nil || len(page.Records) != 0 {
		t.Errorf("%d are left: %v", len(page.Records), err)
	}
}

// TestKeyedOutcomeFindsRoom in a full queue: its key must not stay in flight.
func TestKeyedOutcomeFindsRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMoody()
		j := open(t, s, func(c *Config) { c.Queue = 8 })
		_, err := j.Begin(t.Context(), claim("r", "k", "b"))
		must(t, err)
		s.be(errFull, false)
		for j.Finish(Event{Request: "x", Outcome: inference.Completed}, false, nil) == nil {
		}
		must(t, j.Finish(Event{Request: "r", Outcome: inference.Completed}, true, &Answer{Status: 200, Body: []byte("b")}))
		s.be(nil, false)
		time.Sleep(time.Second)
		if d, err := j.Begin(t.Context(), claim("r2", "k", "b")); err != nil || d.State != KeyReplay {
			t.Errorf("repeat: %s %v", d.State, err)
		}
		shut(t, j)
	})
}
