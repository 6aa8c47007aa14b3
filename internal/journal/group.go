// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"fmt"
	"slices"

	"github.com/headgate/headgate/inference"
)

// group is one batch inside one transaction. It works on copies: only a commit
// makes them what the writer believes.
type group struct {
	w       *writer
	tx      Tx
	batch   []entry
	results []result // by index in batch
	touched map[inference.RequestID]*touch
	order   []*touch
	binds   []bind
}

// touch is a record that the batch changes.
type touch struct {
	record *Record
	was    Was
	lost   bool
	events []int // indices in batch
	answer *Answer
}

type bind struct {
	binding *Binding
	was     inference.RequestID
}

func (w *writer) newGroup(tx Tx, batch []entry) *group {
	return &group{w: w, tx: tx, batch: batch, results: make([]result, len(batch)), touched: map[inference.RequestID]*touch{}}
}

func (g *group) run() error {
	for i := range g.batch {
		var err error
		switch e := &g.batch[i]; {
		case e.event.Kind == noKind: // Flush
		case e.claim != nil:
			err = g.claim(i, e.claim)
		default:
			err = g.event(i)
		}
		if err != nil {
			return err
		}
	}
	for _, t := range g.order {
		if err := g.save(t); err != nil {
			return err
		}
	}
	for _, b := range g.binds {
		ok, err := g.tx.Bind(b.binding, b.was)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("%w: a key was bound by another gateway", ErrUnavailable)
		}
	}
	return nil
}

// event folds one event into its record, if the record is ours to change.
func (g *group) event(i int) error {
	e := &g.batch[i].event
	if e.Kind == Received {
		return g.receive(i)
	}
	t, err := g.touch(e.Request)
	if errors.Is(err, ErrNotFound) {
		g.lose(i, "no such record")
		return nil
	}
	if err != nil {
		return err
	}
	if t.record.Gateway != g.w.gateway || t.record.Generation != g.w.generation {
		g.lose(i, "owned by another")
		return nil
	}
	if err := t.record.apply(e); err != nil {
		g.lose(i, err.Error())
		return nil
	}
	t.events = append(t.events, i)
	if a := g.batch[i].answer; a != nil && t.record.Keyed {
		t.answer, t.record.AnswerKept = a, true
	}
	return nil
}

func (g *group) lose(i int, why string) {
	e := &g.batch[i].event
	g.results[i].err = fmt.Errorf("%w: %s of %s: %s", ErrLost, e.Kind, e.Request, why)
}

// receive begins a record of ours.
func (g *group) receive(i int) error {
	e := &g.batch[i].event
	_, err := g.touch(e.Request)
	if err == nil {
		g.lose(i, "received already")
		return nil
	}
	if !errors.Is(err, ErrNotFound) {
		return err
	}
	g.add(i)
	return nil
}

func (g *group) add(i int) *touch {
	e := &g.batch[i].event
	t := &touch{record: begin(e), events: []int{i}}
	g.own(t.record)
	g.touched[e.Request] = t
	g.order = append(g.order, t)
	return t
}

func (g *group) own(r *Record) {
	r.Gateway, r.Generation, r.OwnerUntil = g.w.gateway, g.w.generation, 0
	r.FirstDeltaDurable = g.w.promises(r.Keyed)
}

// touch returns the record as the batch has left it so far.
func (g *group) touch(id inference.RequestID) (*touch, error) {
	if t := g.touched[id]; t != nil {
		return t, nil
	}
	r := g.w.live[id]
	if r != nil {
		r = r.Clone()
	} else {
		var err error
		if r, err = g.tx.Load(id); err != nil {
			return nil, err
		}
	}
	t := &touch{record: r, was: was(r)}
	g.touched[id] = t
	g.order = append(g.order, t)
	return t, nil
}

// claim decides what a key means, and binds it if its request is to run.
func (g *group) claim(i int, c *Claim) error {
	f, t, err := g.find(c.hash())
	if err != nil {
		return err
	}
	state := decide(f, c.Digest, At(g.w.now()))
	switch state {
	case KeyNew:
		return g.bindNew(i, c, f)
	case KeyReopened:
		if err := g.takeOver(i, t); err != nil {
			return err
		}
	case KeyInterrupted:
		if !t.record.Terminal() {
			g.closeFor(i, t)
		}
	}
	g.results[i].decision = Decision{State: state, Record: t.record.Clone()}
	if state == KeyReplay {
		g.results[i].decision.Answer = f.answer
	}
	return nil
}

// find reads what there is about a key, this batch included.
func (g *group) find(hash Hash) (f found, t *touch, err error) {
	f.binding, err = g.binding(hash)
	if err != nil || f.binding == nil {
		return f, nil, err
	}
	t, err = g.touch(f.binding.Request)
	if errors.Is(err, ErrNotFound) {
		return f, nil, nil
	}
	if err != nil {
		return f, nil, err
	}
	f.record, f.answer = t.record, t.answer
	if f.answer != nil || !t.record.AnswerKept {
		return f, t, nil
	}
	f.answer, err = g.tx.Answer(f.binding.Request)
	if errors.Is(err, ErrNotFound) {
		f.answer, err = nil, nil
	}
	return f, t, err
}

func (g *group) binding(hash Hash) (*Binding, error) {
	for _, v := range slices.Backward(g.binds) {
		if v.binding.Hash == hash {
			return v.binding, nil
		}
	}
	b, err := g.tx.Key(hash)
	if errors.Is(err, ErrNotFound) {
		return nil, nil
	}
	return b, err
}

func (g *group) bindNew(i int, c *Claim, f found) error {
	if _, err := g.touch(c.Request); err == nil {
		g.lose(i, "received already")
		return nil
	} else if !errors.Is(err, ErrNotFound) {
		return err
	}
	t := g.add(i)
	b := &Binding{Hash: c.hash(), Request: c.Request, Digest: c.Digest, Expires: At(g.w.now().Add(g.w.keyTTL))}
	var was inference.RequestID
	if f.binding != nil {
		was = f.binding.Request
	}
	g.binds = append(g.binds, bind{b, was})
	g.results[i].decision = Decision{State: KeyNew, Record: t.record.Clone()}
	return nil
}

// takeOver makes a failed request run again, as ours.
func (g *group) takeOver(i int, t *touch) error {
	e := &g.batch[i].event
	e.Kind, e.Request, e.Arrival = Reopened, t.record.RequestID, nil
	if err := t.record.apply(e); err != nil {
		return fmt.Errorf("reopen %s: %w", t.record.RequestID, err)
	}
	g.own(t.record)
	t.events = append(t.events, i)
	return nil
}

// closeFor ends a record whose owner let its time run out after a delta.
func (g *group) closeFor(i int, t *touch) {
	e := &g.batch[i].event
	*e = Event{Seq: e.Seq, Request: t.record.RequestID, At: e.At, Kind: Finished, Outcome: inference.Interrupted,
		Error: inference.Errorf(inference.DecodeInterrupted, "the gateway stopped after part of the answer was sent")}
	if t.record.apply(e) == nil {
		t.record.FirstDeltaUnproved = !t.record.FirstDeltaSent
		g.own(t.record)
		t.events = append(t.events, i)
	}
}

// save keeps a record with its events, unless somebody else changed it.
func (g *group) save(t *touch) error {
	if len(t.events) == 0 {
		return nil
	}
	ok, err := g.tx.Save(t.record, t.was)
	if err != nil {
		return err
	}
	if !ok {
		t.lost = true
		for _, i := range t.events {
			g.lose(i, "changed by another")
			g.results[i].decision = Decision{}
		}
		return nil
	}
	expires := At(g.w.now().Add(g.w.keyTTL))
	if t.record.Keyed && t.record.Terminal() && !t.was.Terminal {
		// A key is kept from the end of its request.
		if err := g.tx.Extend(t.record.RequestID, expires); err != nil {
			return err
		}
	}
	for _, i := range t.events {
		if err := g.tx.Log(t.record, &g.batch[i].event); err != nil {
			return err
		}
	}
	if t.answer == nil {
		return nil
	}
	return g.tx.Keep(t.record.RequestID, t.answer, expires)
}
