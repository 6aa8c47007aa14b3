// SPDX-License-Identifier: Apache-2.0

// Package model is one LLM engine as arithmetic: continuous batching with
// chunked prefill, batched decode, a block prefix cache, KV memory with
// preemption, and LoRA slots. The order of its decisions is vLLM's (V1).
//
// It owns when a token is ready and what is in the cache. It refuses to know
// text, HTTP and real time: it starts no goroutine and reads no clock, so the
// same calls always give the same events. The simulated engine on sockets
// (internal/simengine), the deterministic simulation and the routing
// laboratory all drive this one model.
//
// Time is a time.Duration since any start the caller likes, and never goes
// back. The caller's loop:
//
//	for at, ok := e.Next(); ok; at, ok = e.Next() {
//		for _, ev := range e.Step(at) { … }
//	}
package model

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Errors of Submit.
var (
	ErrDuplicate = errors.New("model: a job with this id is live")
	ErrTooLong   = errors.New("model: the job can never fit into KV memory")
	ErrNoAdapter = errors.New("model: the engine has no LoRA slots")
	ErrInvalid   = errors.New("model: a job needs an id, a prompt and a token to make")
)

// Job is one sequence to generate.
type Job struct {
	ID           string // unique among live jobs
	PromptTokens int    // at least 1
	MaxNew       int    // tokens to generate, at least 1: the engine always makes all of them
	Adapter      string // LoRA adapter, "" for the base model

	// Blocks are the keys of the prompt's full blocks, in order; Output those
	// of the full blocks that follow as the answer grows (the first one spans
	// the prompt's tail). A key stands for all tokens up to the block's end, so
	// equal keys mean equal prefixes, adapter and salt included. Both may be
	// shorter than the text: what has no key is never cached.
	Blocks []uint64
	Output []uint64

	// Hold stops the job after HoldAfter tokens, keeping its place in the
	// batch and its memory, until Release or another Hold.
	Hold      bool
	HoldAfter int
}

// Kind says what an Event reports.
type Kind uint8

// Kinds of events.
const (
	Admitted     Kind = iota // the job joined the batch; N is its cached prompt tokens
	Token                    // token N (from 1) is ready
	Finished                 // all N tokens are made; follows the last Token
	Preempted                // the job lost its memory and waits again; N tokens are made
	BlockStored              // Block is hittable from now on
	BlockRemoved             // Block was evicted
)

var kindNames = [...]string{"admitted", "token", "finished", "preempted", "block_stored", "block_removed"}

func (k Kind) String() string { return kindNames[k] }

// Event is one thing that happened in the engine.
type Event struct {
	Kind  Kind
	Job   string // "" for BlockRemoved
	N     int
	Block uint64
	At    time.Duration
}

// Engine is one simulated engine. It has one owner: no method may run beside
// another.
type Engine struct {
	p     Params
	pool  *pool
	lora  adapters
	jobs  map[string]*sequence
	queue []*sequence // waiting, first come first served; preempted ones go in front
	batch []*sequence // running, in order of admission

	state      state
	at         time.Duration // when the state's work is due
	lastSubmit time.Duration
	stats      Stats
	events     []Event
}

type state uint8

const (
	idle     state = iota // nothing can run
	due                   // a step is to be planned at e.at
	stepping              // a step ends at e.at
)

// sequence is a live job. Its blocks hold computed tokens, and those of the
// step in progress; once all of prompt and output is computed the step has
// made one more token. Prefill, decode and recomputation after preemption are
// the same thing with different counts.
type sequence struct {
	Job
	made     int // output tokens made
	computed int
	planned  int // tokens computed by the step in progress
	keyed    int // leading blocks that were offered to the prefix cache
	blocks   []int32
	counted  bool // in the prefix-cache counters
}

func (s *sequence) length() int { return s.PromptTokens + s.made }

func (s *sequence) held() bool { return s.Hold && s.made >= s.HoldAfter }

// decoding tells a step that only appends from one that (re)computes a prompt.
func (s *sequence) decoding() bool { return s.made > 0 && s.computed == s.length()-1 }

func (s *sequence) key(block int) (uint64, bool) {
	if block < len(s.Blocks) {
		return s.Blocks[block], true
	}
	if block -= len(s.Blocks); block < len(s.Output) {
		return s.Output[block], true
	}
	return 0, false
}

// New makes an idle engine with an empty cache. It panics on parameters that
// Validate refuses.
func New(p Params) *Engine {
	if err := p.Validate(); err != nil {
		panic(err)
	}
	p = p.withDefaults()
	return &Engine{
		p:    p,
		pool: newPool(p.Blocks),
		lora: adapters{slots: p.AdapterSlots, users: make(map[string]int)},
		jobs: make(map[string]*sequence),
	}
}

// Params returns the parameters in use, defaults filled in.
func (e *Engine) Params() Params { return e.p }

// Submit adds a job at the end of the waiting queue. The queue is not bounded:
// it is the caller who refuses work.
func (e *Engine) Submit(now time.Duration, job Job) error {
	switch {
	case job.ID == "" || job.PromptTokens < 1 || job.MaxNew < 1:
		return ErrInvalid
	case e.jobs[job.ID] != nil:
		return ErrDuplicate
	case job.Adapter != "" && e.p.AdapterSlots == 0:
		return ErrNoAdapter
	case e.blocksFor(job.PromptTokens+job.MaxNew-1) > e.p.Blocks:
		return fmt.Errorf("%w: %d prompt and %d new tokens, room for %d",
			ErrTooLong, job.PromptTokens, job.MaxNew, e.p.Blocks*e.p.BlockTokens)
	}
	if full := job.PromptTokens / e.p.BlockTokens; len(job.Blocks) > full {
		job.Blocks = job.Blocks[:full]
	}
	if len(job.Blocks) < job.PromptTokens/e.p.BlockTokens {
		job.Output = nil // a gap in the keys: what follows it cannot be matched
	}
	s := &sequence{Job: job}
	e.jobs[job.ID] = s
	e.queue = append(e.queue, s)
	e.lastSubmit = max(e.lastSubmit, now)
	e.wake(now)
	return nil
}

// Cancel ends a live job and frees its memory at once. It reports whether the
// job was live; a job that finished or was cancelled is not. A step in progress
// keeps its length, as it would on a GPU.
func (e *Engine) Cancel(now time.Duration, id string) bool {
	s := e.jobs[id]
	if s == nil {
		return false
	}
	if at := slices.Index(e.batch, s); at >= 0 {
		e.batch = slices.Delete(e.batch, at, at+1)
		e.leave(s)
	} else {
		at := slices.Index(e.queue, s)
		e.queue = slices.Delete(e.queue, at, at+1)
	}
	delete(e.jobs, id)
	e.stats.Cancelled++
	e.wake(now)
	return true
}

// Hold makes a live job stop after that many tokens in all, or where it is if
// it has made more. It reports whether the job is live.
func (e *Engine) Hold(now time.Duration, id string, after int) bool {
	s := e.jobs[id]
	if s == nil {
		return false
	}
	s.Hold, s.HoldAfter = true, after
	e.wake(now)
	return true
}

// Release lets a held job run to its end. It reports whether the job is live.
func (e *Engine) Release(now time.Duration, id string) bool {
	s := e.jobs[id]
	if s == nil {
		return false
	}
	s.Hold = false
	e.wake(now)
	return true
}

func (e *Engine) wake(now time.Duration) {
	if e.state == idle && len(e.jobs) > 0 {
		e.state, e.at = due, now
	}
}

// Next is when Step has something to do: the end of the step in progress, or
// the moment an idle engine was given work. ok is false while nothing can run.
func (e *Engine) Next() (at time.Duration, ok bool) { return e.at, e.state != idle }

// Step ends the step that is due by now, if any, and plans the next. The events
// are in order and valid until the next call. One call ends at most one step: a
// caller that is late calls again while Next is not after now. The next step
// begins when the last one ended, however late the caller is, but not before
// the newest job was submitted.
func (e *Engine) Step(now time.Duration) []Event {
	e.events = e.events[:0]
	if e.state == idle || e.at > now {
		return nil
	}
	if e.state == stepping {
		e.finish()
		e.at = max(e.at, e.lastSubmit)
	}
	e.plan()
	return e.events
}

// finish applies the step in progress.
func (e *Engine) finish() {
	e.stats.Steps++
	running := e.batch
	e.batch = e.batch[:0]
	for _, s := range running {
		s.computed += s.planned
		worked := s.planned > 0
		s.planned = 0
		if !worked || s.computed < s.length() {
			e.batch = append(e.batch, s)
			continue
		}
		s.made++
		e.stats.GenerationTokens++
		if s.made == 1 {
			e.stats.PromptTokens += uint64(s.PromptTokens)
		}
		e.emit(Event{Kind: Token, Job: s.ID, N: s.made})
		if s.made < s.MaxNew {
			e.batch = append(e.batch, s)
			continue
		}
		e.leave(s)
		delete(e.jobs, s.ID)
		e.stats.Finished++
		e.emit(Event{Kind: Finished, Job: s.ID, N: s.made})
	}
	clear(running[len(e.batch):])
}

// plan decides what the next step computes and how long that takes.
func (e *Engine) plan() {
	w := work{budget: e.p.StepTokens}
	if preempted := e.continueBatch(&w); !preempted || w.tokens == 0 {
		e.admit(&w)
	}
	if w.tokens == 0 {
		e.state = idle
		return
	}
	took := w.duration(e.p)
	e.state = stepping
	e.at += took
	e.stats.Busy += took
}

// work is what one step computes.
type work struct {
	budget  int
	tokens  int
	pairs   int
	decodes int
	context int
	loads   int
}

func (w *work) add(s *sequence, n int) {
	s.planned = n
	w.budget -= n
	w.tokens += n
	if s.decoding() {
		w.decodes++
		w.context += s.computed
	} else {
		w.pairs += n*s.computed + n*n/2
	}
}

func (w *work) duration(p Params) time.Duration {
	return p.StepBase + max(p.StepFloor, time.Duration(w.tokens)*p.Token) +
		p.Attention*time.Duration(w.pairs)/1e6 +
		p.Decode*time.Duration(w.decodes) + p.KVRead*time.Duration(w.context)/1e3 +
		p.AdapterLoad*time.Duration(w.loads)
}

// continueBatch plans the sequences that run already, oldest first. When one
// cannot grow, the newest is preempted, so the oldest always gets to its end.
// It reports whether any was: then nobody is admitted in a step that has work.
func (e *Engine) continueBatch(w *work) (preempted bool) {
	for i := 0; i < len(e.batch); i++ { //nolint:intrange // preemption shrinks the batch
		s := e.batch[i]
		if s.held() || w.budget == 0 {
			continue
		}
		n := min(s.length()-s.computed, w.budget)
		for !e.grow(s, s.computed+n) {
			victim := e.batch[len(e.batch)-1]
			e.preempt(victim)
			preempted = true
			if victim == s {
				return preempted
			}
		}
		w.add(s, n)
		e.enter(s)
	}
	return preempted
}

// grow makes room for that many tokens of s.
func (e *Engine) grow(s *sequence, tokens int) bool {
	need := e.blocksFor(tokens) - len(s.blocks)
	if need > e.pool.available() {
		return false
	}
	for range need {
		b, evicted, wasCached := e.pool.take()
		s.blocks = append(s.blocks, b)
		if wasCached && e.p.BlockEvents {
			e.emit(Event{Kind: BlockRemoved, Block: evicted})
		}
	}
	return true
}

// enter offers the blocks that this step fills to the prefix cache. They are
// hittable from the moment the step is planned: a sequence admitted into the
// same step shares them, as in vLLM.
func (e *Engine) enter(s *sequence) {
	for full := (s.computed + s.planned) / e.p.BlockTokens; s.keyed < full; s.keyed++ {
		key, ok := s.key(s.keyed)
		if !ok {
			return
		}
		if e.pool.enter(s.blocks[s.keyed], key) && e.p.BlockEvents {
			e.emit(Event{Kind: BlockStored, Job: s.ID, Block: key})
		}
	}
}

func (e *Engine) preempt(s *sequence) {
	e.batch = e.batch[:len(e.batch)-1]
	e.leave(s)
	e.queue = slices.Insert(e.queue, 0, s)
	e.stats.Preemptions++
	e.emit(Event{Kind: Preempted, Job: s.ID, N: s.made})
}

// leave gives back everything a running sequence holds.
func (e *Engine) leave(s *sequence) {
	e.pool.drop(s.blocks)
	e.lora.release(s.Adapter)
	s.blocks, s.computed, s.planned, s.keyed = nil, 0, 0, 0
}

// admit takes waiting jobs into the batch in order. The first one that does
// not fit into memory blocks those behind it; one whose adapter finds no slot
// is passed over.
func (e *Engine) admit(w *work) {
	for i := 0; i < len(e.queue) && w.budget > 0 && len(e.batch) < e.p.RunningMax; {
		s := e.queue[i]
		if !e.lora.fits(s.Adapter) {
			i++
			continue
		}
		hits, idleHits := e.match(s)
		if e.blocksFor(s.length())-hits > e.pool.available()-idleHits {
			return
		}
		e.queue = slices.Delete(e.queue, i, i+1)
		e.batch = append(e.batch, s)
		if loaded, _ := e.lora.acquire(s.Adapter); loaded {
			w.loads++
		}
		e.start(s, hits)
		if !s.held() {
			w.add(s, min(s.length()-s.computed, w.budget))
			e.enter(s)
		}
	}
}

// match finds how many leading blocks of s are cached, and how many of those
// nobody holds. The last token is always computed, cached or not: its output
// is the next token.
func (e *Engine) match(s *sequence) (hits, idleHits int) {
	for hits < (s.length()-1)/e.p.BlockTokens {
		key, ok := s.key(hits)
		if !ok {
			break
		}
		b, ok := e.pool.lookup(key)
		if !ok {
			break
		}
		if e.pool.ref[b] == 0 {
			idleHits++
		}
		hits++
	}
	return hits, idleHits
}

// start gives s its cached blocks and room for the rest of its tokens.
func (e *Engine) start(s *sequence, hits int) {
	for i := range hits {
		key, _ := s.key(i)
		b, _ := e.pool.lookup(key)
		e.pool.hold(b)
		s.blocks = append(s.blocks, b)
	}
	s.keyed, s.computed = hits, hits*e.p.BlockTokens
	cached := min(s.computed, s.PromptTokens)
	if !s.counted {
		s.counted = true
		e.stats.QueryTokens += uint64(s.PromptTokens)
		e.stats.HitTokens += uint64(cached)
	}
	e.emit(Event{Kind: Admitted, Job: s.ID, N: cached})
	e.grow(s, s.length())
}

func (e *Engine) emit(ev Event) {
	ev.At = e.at
	e.events = append(e.events, ev)
}

func (e *Engine) blocksFor(tokens int) int {
	return (tokens + e.p.BlockTokens - 1) / e.p.BlockTokens
}

// Match is how many leading tokens of a prompt with these block keys are in
// the prefix cache now. It changes nothing, recency included.
func (e *Engine) Match(blocks []uint64) int {
	for i, key := range blocks {
		if _, ok := e.pool.lookup(key); !ok {
			return i * e.p.BlockTokens
		}
	}
	return len(blocks) * e.p.BlockTokens
}
