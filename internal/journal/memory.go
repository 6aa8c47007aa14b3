// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/headgate/headgate/inference"
)

// Memory is a Store that a restart empties: the newest records in a ring. It is
// driver none, and what other stores are tested against.
type Memory struct {
	max int

	mu      sync.RWMutex
	rows    rows
	nextRow int64
}

// rows is all that a Memory holds. Pointers in it are never written through.
type rows struct {
	records     map[inference.RequestID]*Record
	order       []inference.RequestID // by Seq
	events      []Event               // by Seq
	keys        map[Hash]*Binding
	answers     map[inference.RequestID]kept
	generations map[string]uint64
}

type kept struct {
	answer  *Answer
	expires Time
}

// NewMemory makes a Memory that holds about that many records, and ten events for
// each. It never drops a record without an outcome; 0 drops none.
func NewMemory(records int) *Memory {
	return &Memory{max: records, rows: rows{
		records: map[inference.RequestID]*Record{}, keys: map[Hash]*Binding{},
		answers: map[inference.RequestID]kept{}, generations: map[string]uint64{},
	}}
}

// Update implements Store.
func (m *Memory) Update(_ context.Context, _ bool, fn func(Tx) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	tx := &memoryTx{m: m}
	if err := fn(tx); err != nil {
		for _, undo := range slices.Backward(tx.undo) {
			undo()
		}
		return err
	}
	m.logLocked(tx.events)
	m.trimLocked()
	return nil
}

// logLocked puts a transaction's events in their order, those that are there
// already left out.
func (m *Memory) logLocked(events []Event) {
	slices.SortFunc(events, func(a, b Event) int { return cmp.Compare(a.Seq, b.Seq) })
	for _, e := range events {
		if n := len(m.rows.events); n == 0 || m.rows.events[n-1].Seq < e.Seq {
			m.rows.events = append(m.rows.events, e)
			continue
		}
		at, there := slices.BinarySearchFunc(m.rows.events, e.Seq, func(a Event, seq int64) int { return cmp.Compare(a.Seq, seq) })
		if !there {
			m.rows.events = slices.Insert(m.rows.events, at, e)
		}
	}
}

// trimLocked drops the oldest records once an eighth too many have gathered, so
// that each costs little.
func (m *Memory) trimLocked() {
	if m.max <= 0 {
		return
	}
	if over := len(m.rows.records) - m.max; over > m.max/8 {
		m.rows.order = slices.DeleteFunc(m.rows.order, func(id inference.RequestID) bool {
			r := m.rows.records[id]
			if over <= 0 || r != nil && !r.Terminal() {
				return false
			}
			delete(m.rows.records, id)
			over--
			return true
		})
	}
	if over := len(m.rows.events) - 10*m.max; over > m.max {
		m.rows.events = slices.Delete(m.rows.events, 0, over)
	}
}

// Get implements Store.
func (m *Memory) Get(_ context.Context, id inference.RequestID) (*Record, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if r := m.rows.records[id]; r != nil {
		return r.Clone(), nil
	}
	return nil, ErrNotFound
}

// List implements Store.
func (m *Memory) List(_ context.Context, f Filter) (Page, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	page := Page{Records: []*Record{}}
	for _, id := range slices.Backward(m.rows.order) {
		r := m.rows.records[id]
		if !f.matches(r) {
			continue
		}
		if len(page.Records) == f.Size() {
			page.Next = page.Records[f.Size()-1].Seq
			break
		}
		page.Records = append(page.Records, r.Clone())
	}
	return page, nil
}

func (f *Filter) matches(r *Record) bool {
	return (f.Before == 0 || r.Seq < f.Before) &&
		r.CreatedAt >= f.Since && (f.Until == 0 || r.CreatedAt < f.Until) &&
		(f.Tenant == "" || r.Tenant == f.Tenant) &&
		(f.Pool == "" || r.Pool == f.Pool) &&
		(f.Model == "" || r.Model == f.Model) &&
		(f.Outcome == inference.NoOutcome || r.ended(f.Outcome)) &&
		(!f.Unfinished || !r.Terminal())
}

// Events implements Store.
func (m *Memory) Events(_ context.Context, f EventFilter) ([]Event, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	events := []Event{}
	for i := range m.rows.events {
		e := &m.rows.events[i]
		if e.Seq > f.After && (f.Request == "" || e.Request == f.Request) {
			if events = append(events, *e); len(events) == f.Size() {
				break
			}
		}
	}
	return events, nil
}

// Sweep implements Store.
func (m *Memory) Sweep(_ context.Context, now, before Time) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for id, k := range m.rows.answers {
		if k.expires <= now {
			delete(m.rows.answers, id)
			n++
		}
	}
	held := map[inference.RequestID]bool{}
	for hash, b := range m.rows.keys {
		if r := m.rows.records[b.Request]; b.Expires <= now && (r == nil || r.Terminal()) {
			delete(m.rows.keys, hash)
			n++
			continue
		}
		held[b.Request] = true
	}
	gone := map[inference.RequestID]bool{}
	for id, r := range m.rows.records {
		if r.Terminal() && r.CreatedAt < before && !held[id] {
			gone[id] = true
			delete(m.rows.records, id)
			n++
		}
	}
	m.rows.order = slices.DeleteFunc(m.rows.order, func(id inference.RequestID) bool { return gone[id] })
	m.rows.events = slices.DeleteFunc(m.rows.events, func(e Event) bool { return gone[e.Request] })
	return n, nil
}

// Close implements Store.
func (m *Memory) Close() error { return nil }

// memoryTx changes rows in place and remembers how to undo it.
type memoryTx struct {
	m      *Memory
	undo   []func()
	events []Event // logged when all else has gone well
}

func set[K comparable, V any](tx *memoryTx, to map[K]V, k K, v V) {
	old, had := to[k]
	tx.undo = append(tx.undo, func() {
		if had {
			to[k] = old
		} else {
			delete(to, k)
		}
	})
	to[k] = v
}

func (tx *memoryTx) Raise(gateway string) (uint64, int64, error) {
	rows := &tx.m.rows
	g := rows.generations[gateway] + 1
	set(tx, rows.generations, gateway, g)
	if n := len(rows.events); n > 0 {
		return g, rows.events[n-1].Seq, nil
	}
	return g, 0, nil
}

func (tx *memoryTx) Orphans(gateway string, generation uint64, limit int) ([]*Record, error) {
	var orphans []*Record
	for _, id := range tx.m.rows.order {
		r := tx.m.rows.records[id]
		if !r.Terminal() && (r.Gateway != gateway || r.Generation != generation) && len(orphans) < limit {
			orphans = append(orphans, r.Clone())
		}
	}
	return orphans, nil
}

func (tx *memoryTx) Unfenced(gateway string, limit int) ([]*Record, error) {
	var all []*Record
	for _, id := range tx.m.rows.order {
		r := tx.m.rows.records[id]
		if r.Gateway == gateway && r.Unfenced() != nil && len(all) < limit {
			all = append(all, r.Clone())
		}
	}
	return all, nil
}

func (tx *memoryTx) Load(id inference.RequestID) (*Record, error) {
	if r := tx.m.rows.records[id]; r != nil {
		return r.Clone(), nil
	}
	return nil, ErrNotFound
}

func (tx *memoryTx) Save(r *Record, before Was) (bool, error) {
	rows := &tx.m.rows
	old := rows.records[r.RequestID]
	if (old == nil) != (before == Was{}) || old != nil && was(old) != before {
		return false, nil
	}
	r = r.Clone()
	if old == nil {
		tx.m.nextRow++
		r.Seq = tx.m.nextRow
		order := rows.order
		tx.undo = append(tx.undo, func() { rows.order = order })
		rows.order = append(rows.order, r.RequestID)
	} else {
		r.Seq = old.Seq
	}
	set(tx, rows.records, r.RequestID, r)
	return true, nil
}

func (tx *memoryTx) Log(_ *Record, e *Event) error {
	tx.events = append(tx.events, *e)
	return nil
}

func (tx *memoryTx) Key(hash Hash) (*Binding, error) {
	if b := tx.m.rows.keys[hash]; b != nil {
		return b, nil
	}
	return nil, ErrNotFound
}

func (tx *memoryTx) Bind(b *Binding, before inference.RequestID) (bool, error) {
	old := tx.m.rows.keys[b.Hash]
	if (old == nil) != (before == "") || old != nil && old.Request != before {
		return false, nil
	}
	set(tx, tx.m.rows.keys, b.Hash, b)
	return true, nil
}

func (tx *memoryTx) Extend(id inference.RequestID, expires Time) error {
	for hash, b := range tx.m.rows.keys {
		if b.Request == id {
			longer := *b
			longer.Expires = expires
			set(tx, tx.m.rows.keys, hash, &longer)
		}
	}
	return nil
}

func (tx *memoryTx) Answer(id inference.RequestID) (*Answer, error) {
	if k, ok := tx.m.rows.answers[id]; ok {
		return k.answer, nil
	}
	return nil, ErrNotFound
}

func (tx *memoryTx) Keep(id inference.RequestID, a *Answer, expires Time) error {
	set(tx, tx.m.rows.answers, id, kept{&Answer{a.Status, maps.Clone(a.Header), a.Body}, expires})
	return nil
}
