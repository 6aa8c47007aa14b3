// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/headgate/headgate/inference"
)

// writer is the state of the one goroutine that writes.
type writer struct {
	*Journal
	live  map[inference.RequestID]*Record // running, ours, as stored
	left  []entry                         // of a failed batch: written before anything else
	spare []entry
	sweep time.Time // when to sweep next
	tries int       // that failed in a row

	failedAt  time.Time // the last of them
	lastTries int       // since the journal was closed
}

// write runs until the journal is closed and empty.
func (j *Journal) write() {
	defer close(j.stopped)
	w := &writer{Journal: j, live: map[inference.RequestID]*Record{}, spare: make([]entry, 0, j.queueMax), sweep: j.opened.Add(sweepEvery)}
	for w.await() {
		if batch := w.take(); len(batch) > 0 {
			w.commit(batch)
		}
		w.sweepStep()
	}
}

// await returns when there is something to do; false when there never will be.
func (w *writer) await() bool {
	for {
		w.mu.Lock()
		queued, urgent, closed, since := len(w.queue)+len(w.left), w.urgent || len(w.left) > 0, w.closed, w.since
		w.mu.Unlock()
		if closed && queued == 0 {
			return false
		}
		if w.tries > 0 && queued > 0 {
			return w.again(closed)
		}
		pause := time.Until(w.sweep)
		switch {
		case urgent || closed:
			return true
		case w.tries > 0:
			pause = sweepEvery
		case queued > 0:
			pause = min(pause, gatherTime-time.Since(since))
		}
		if pause <= 0 {
			return true
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-w.wake:
			timer.Stop()
		}
	}
}

// again waits before a store that failed is tried again. Nothing hurries it:
// those who wait are told after each try.
func (w *writer) again(closed bool) bool {
	if closed {
		if w.lastTries++; w.lastTries > closeTries {
			w.giveUp()
			return false
		}
	}
	if pause := retryPause - time.Since(w.failedAt); pause > 0 {
		timer := time.NewTimer(pause)
		<-timer.C
	}
	return true
}

// take moves the queue into a batch behind what an earlier batch left.
func (w *writer) take() []entry {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.writing.IsZero() && len(w.queue) > 0 {
		w.writing = w.since
	}
	w.urgent = false
	if len(w.left) > 0 {
		room := max(w.queueMax-len(w.left), 0)
		n := min(room, len(w.queue))
		batch := append(w.left, w.queue[:n]...)
		w.left = nil
		rest := copy(w.queue, w.queue[n:])
		clear(w.queue[rest:])
		w.queue = w.queue[:rest]
		return batch
	}
	batch := w.queue
	w.queue, w.spare = w.spare[:0], nil
	return batch
}

// now is the time for what expires. A clock that is set forward while the
// process runs must not expire anything early.
func (j *Journal) now() time.Time {
	wall, steady := time.Now().Round(0), j.opened.Round(0).Add(time.Since(j.opened))
	if wall.After(steady) {
		return steady
	}
	return wall
}

// commit writes a batch and tells those who wait for it.
func (w *writer) commit(batch []entry) {
	durable := false
	for i := range batch {
		e := &batch[i]
		durable = durable || e.durable
		if e.event.Kind != noKind && e.event.Seq == 0 {
			w.seq++
			e.event.Seq = w.seq
		}
		point(stageWrite, e.event.Kind)
	}
	var g *group
	err := w.store.Update(context.Background(), durable, func(tx Tx) error {
		g = w.newGroup(tx, batch)
		if err := g.run(); err != nil {
			return err
		}
		for i := range batch {
			point(stageCommit, batch[i].event.Kind)
		}
		return nil
	})
	if err != nil {
		w.failed(batch, g, err)
		return
	}
	w.succeeded(batch, g)
}

func (w *writer) succeeded(batch []entry, g *group) {
	for id, t := range g.touched {
		switch {
		case t.lost || t.record.Terminal() || t.record.Gateway != w.gateway || t.record.Generation != w.generation:
			delete(w.live, id)
		case len(w.live) < liveMax || w.live[id] != nil:
			w.live[id] = t.record
		}
	}
	answers, lost := 0, uint64(0)
	for i := range batch {
		e := &batch[i]
		point(stageCommitted, e.event.Kind)
		if e.answer != nil {
			answers += len(e.answer.Body)
		}
		if e.wait == nil && g.results[i].err != nil {
			lost++
		}
	}
	// Whoever is told finds the journal up.
	w.mu.Lock()
	recovered := w.down
	w.answers -= answers
	w.lost += lost
	w.writing, w.down = time.Time{}, false
	dropped := w.dropped
	w.mu.Unlock()
	for i := range batch {
		if wait := batch[i].wait; wait != nil && !wait.answer(g.results[i]) && g.results[i].decision.Runs() {
			// Its client left while the key was being committed: nobody will
			// run the request, and the key must not stay in flight.
			w.abandon(g.results[i].decision.Record.RequestID)
		}
	}
	w.tries = 0
	clear(batch)
	if w.spare == nil && cap(batch) >= w.queueMax {
		w.spare = batch[:0]
	} else if w.spare == nil {
		w.spare = make([]entry, 0, w.queueMax)
	}
	if recovered {
		w.log.Info("journal available again", "dropped", dropped)
	}
}

// abandon ends a request that was begun for nobody. It goes before whatever
// comes next, a repeat of the same key above all.
func (w *writer) abandon(id inference.RequestID) {
	e := Event{Request: id, At: At(time.Now()), Kind: Finished, Outcome: inference.Cancelled}
	w.left = append(w.left, entry{event: e})
}

// failed keeps what nobody waits for, to try again, and tells the others.
func (w *writer) failed(batch []entry, g *group, err error) {
	w.tries++
	w.failedAt = time.Now()
	again := errors.Is(err, ErrUnavailable)
	if !again {
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if g != nil {
		for id := range g.touched {
			delete(w.live, id) // whether it was kept is unknown: look again
		}
	}
	// Whoever is told finds the journal down.
	w.mu.Lock()
	first := !w.down
	w.down, w.urgent = true, false
	waiting := w.pullWaitersLocked()
	w.mu.Unlock()
	dropped, answers := uint64(0), 0
	for i := range batch {
		e := &batch[i]
		switch {
		case e.wait != nil:
			e.wait.answer(result{err: err})
			if e.claim != nil && g != nil && i < len(g.results) && g.results[i].decision.Runs() {
				// If the claim was kept after all, nobody runs it.
				w.abandon(g.results[i].decision.Record.RequestID)
			}
		case again:
			w.left = append(w.left, *e)
		default:
			dropped++
			if e.answer != nil {
				answers += len(e.answer.Body)
			}
		}
	}
	w.mu.Lock()
	w.dropped += dropped
	w.answers -= answers
	w.mu.Unlock()
	for _, wait := range waiting {
		wait.answer(result{err: err})
	}
	if w.spare == nil {
		w.spare = make([]entry, 0, w.queueMax)
	}
	if first || !again {
		w.log.Error("journal unavailable", "error", err, "dropped", dropped)
	}
}

// pullWaitersLocked takes entries that somebody waits for out of the queue:
// behind a store that fails they would wait in vain.
func (w *writer) pullWaitersLocked() []*waiter {
	var waiting []*waiter
	kept := w.queue[:0]
	for _, e := range w.queue {
		if e.wait != nil {
			waiting = append(waiting, e.wait)
			continue
		}
		kept = append(kept, e)
	}
	clear(w.queue[len(kept):])
	w.queue = kept
	return waiting
}

// giveUp drops what could not be written before the journal closed.
func (w *writer) giveUp() {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := len(w.left) + len(w.queue)
	for _, wait := range w.pullWaitersLocked() {
		wait.answer(result{err: ErrUnavailable})
	}
	w.dropped += uint64(n)
	w.left, w.queue = nil, nil
	w.err = fmt.Errorf("%w: %d events were not written", ErrUnavailable, n)
}

// sweepStep deletes a little of what has expired, then lets commits pass.
func (w *writer) sweepStep() {
	if w.tries > 0 || time.Until(w.sweep) > 0 {
		return
	}
	now, before := w.now(), Time(0)
	if w.retention > 0 {
		before = At(now.Add(-w.retention))
	}
	n, err := w.store.Sweep(context.Background(), At(now), before)
	if err != nil {
		w.log.Warn("journal not swept", "error", err)
	}
	if n == 0 {
		w.sweep = time.Now().Add(sweepEvery)
	}
}

// closeOrphans gives every record of a dead owner its outcome, a few in each
// transaction.
func (j *Journal) closeOrphans(ctx context.Context) (int, error) {
	closed := 0
	for {
		n := 0
		err := j.store.Update(ctx, true, func(tx Tx) error {
			orphans, err := tx.Orphans(j.gateway, j.generation, orphansPerStep)
			if err != nil {
				return err
			}
			n = len(orphans)
			for _, r := range orphans {
				if err := j.closeOrphan(tx, r); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil || n == 0 {
			return closed, err
		}
		closed += n
	}
}

func (j *Journal) closeOrphan(tx Tx, r *Record) error {
	before := was(r)
	for _, e := range orphaned(r, At(time.Now())) {
		j.seq++
		e.Seq = j.seq
		if err := r.apply(&e); err != nil {
			return fmt.Errorf("record %s: %w", r.RequestID, err)
		}
		if err := tx.Log(r, &e); err != nil {
			return err
		}
	}
	r.Gateway, r.Generation, r.OwnerUntil = j.gateway, j.generation, 0
	_, err := tx.Save(r, before)
	return err
}

// orphaned are the events that end a record whose process is dead. Its
// connections died with it, which is all the proof there is without a guard;
// with one, the attempt stays to be fenced.
func orphaned(r *Record, now Time) []Event {
	var events []Event
	if a := r.last(); a != nil && (a.State == stateDispatched || a.State == statePublishing || a.State == stateFencing) {
		e := Event{Request: r.RequestID, At: now, Kind: Fencing, Attempt: a.Attempt, Verdict: inference.Uncertain}
		if a.FenceLevel == inference.FenceTransport.String() {
			e.Kind, e.Proof = Fenced, inference.ProofTransport
		}
		events = append(events, e)
	}
	end := Event{Request: r.RequestID, At: now, Kind: Finished, Outcome: inference.Failed,
		Error: inference.Errorf(inference.Internal, "the gateway stopped while the request was running")}
	if r.FirstDeltaSent {
		end.Outcome = inference.Interrupted
		end.Error = inference.Errorf(inference.DecodeInterrupted, "the gateway stopped after part of the answer was sent")
	}
	r.FirstDeltaUnproved = !r.FirstDeltaSent && !r.FirstDeltaDurable
	return append(events, end)
}
