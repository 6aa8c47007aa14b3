// SPDX-License-Identifier: Apache-2.0

// Package alternate is a second model of an engine, built differently from
// internal/simengine/model on purpose: what the laboratory finds on both is not
// one model's quirk. It shares that model's parameters, jobs and events, and no
// code.
//
// It is after SGLang's scheduler where the other is after vLLM's. A pass is
// either prefill or decode, never both, and prefill comes first, so running
// streams stand still for all of it. Prompts share a tree of prefixes that is
// entered when a prompt has been computed, not when it begins. Memory is counted
// in tokens. A job is taken in when the expected rest of all answers fits, and
// when that was too hopeful those with the fewest tokens made are put back.
//
// The package owns when a token is ready and what is in the tree. It refuses
// adapters, and like the other model it knows no clock, no text and no network.
package alternate

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/headgate/headgate/internal/simengine/model"
)

// ErrTooLong says that a job can never fit.
var ErrTooLong = errors.New("alternate: the job can never fit into memory")

// How much of the rest of the answers is expected to be made: it begins high,
// sinks with each decode pass and is set back when memory ran out.
const (
	restAtStart = 0.7
	restMin     = 0.1
	restFades   = 1.0 / 600 // of restAtStart, per pass
	restMax     = 4096      // tokens of one answer that are reckoned with
)

// Engine is one engine. It has one owner: no method may run beside another.
type Engine struct {
	p        model.Params
	capacity int // tokens
	tree     tree
	private  int // tokens that running jobs hold outside the tree

	queue   []*job // waiting, first come first served
	prefill []*job // in the batch whose prompts are being computed
	decode  []*job
	live    map[string]*job

	rest  float64
	busy  bool
	pass  pass
	at    float64 // when the pass ends, or when an idle engine was woken
	woken bool

	stats  model.Stats
	events []model.Event
}

// job is a live one. Its length grows as tokens are made; what of it is in the
// tree is counted there and held, the rest is private.
type job struct {
	model.Job
	made    int
	held    *node // deepest node of the tree that it holds
	shared  int   // tokens up to there
	done    int   // tokens that are computed, shared ones included
	chunk   int   // of the pass under way
	taken   bool  // it has memory
	counted bool
	gone    bool
}

func (j *job) length() int { return j.PromptTokens + j.made }

// pass is one pass of the model.
type pass struct {
	prefill []*job
	decode  []*job
}

// New makes an idle engine. Parameters are those of the other model; StepTokens
// bounds a prefill pass, and there are no adapters.
func New(p model.Params) *Engine {
	return &Engine{
		p: p, capacity: p.Blocks * p.BlockTokens, rest: restAtStart,
		tree: newTree(p.BlockTokens), live: map[string]*job{},
	}
}

// Submit adds a job at the end of the queue, which is not bounded.
func (e *Engine) Submit(now time.Duration, j model.Job) error {
	switch {
	case j.ID == "" || j.PromptTokens < 1 || j.MaxNew < 1:
		return model.ErrInvalid
	case e.live[j.ID] != nil:
		return model.ErrDuplicate
	case j.Adapter != "":
		return model.ErrNoAdapter
	case j.PromptTokens+j.MaxNew > e.capacity:
		return fmt.Errorf("%w: %d prompt and %d new tokens, room for %d", ErrTooLong, j.PromptTokens, j.MaxNew, e.capacity)
	}
	if full := j.PromptTokens / e.p.BlockTokens; len(j.Blocks) > full {
		j.Blocks = j.Blocks[:full]
	} else if len(j.Blocks) < full {
		j.Output = nil // the tree has no gaps
	}
	made := &job{Job: j}
	e.live[j.ID] = made
	e.queue = append(e.queue, made)
	e.wake(now)
	return nil
}

func (e *Engine) wake(now time.Duration) {
	if !e.busy && !e.woken {
		e.woken, e.at = true, now.Seconds()
	}
}

// Cancel ends a live job and frees its memory. A pass under way keeps its length.
func (e *Engine) Cancel(now time.Duration, id string) bool {
	j := e.live[id]
	if j == nil {
		return false
	}
	for _, list := range []*[]*job{&e.queue, &e.prefill, &e.decode} {
		if at := slices.Index(*list, j); at >= 0 {
			*list = slices.Delete(*list, at, at+1)
		}
	}
	e.leave(j)
	j.gone = true
	delete(e.live, id)
	e.stats.Cancelled++
	e.wake(now)
	return true
}

// Next is when Step has something to do.
func (e *Engine) Next() (at time.Duration, ok bool) {
	// Up, so that a caller who steps at this time is never early.
	return time.Duration(math.Ceil(e.at * 1e9)), e.busy || e.woken
}

// Step ends the pass that is due by now and begins the next. Events are valid
// until the next call.
func (e *Engine) Step(now time.Duration) []model.Event {
	e.events = e.events[:0]
	if due, ok := e.Next(); !ok || due > now {
		return nil
	}
	e.woken = false
	if e.busy {
		e.busy = false
		e.finish()
	}
	e.begin()
	return e.events
}

// finish applies the pass that ended.
func (e *Engine) finish() {
	e.stats.Steps++
	for _, j := range e.pass.prefill {
		if j.gone {
			continue
		}
		j.done += j.chunk
		if j.done < j.length() {
			continue // its next chunk comes in the next pass
		}
		e.prefill = slices.DeleteFunc(e.prefill, func(x *job) bool { return x == j })
		e.share(j)
		if j.made == 0 {
			e.stats.PromptTokens += uint64(j.PromptTokens)
		}
		e.decode = append(e.decode, j)
		e.token(j)
	}
	for _, j := range e.pass.decode {
		if !j.gone {
			e.token(j)
		}
	}
	if len(e.pass.decode) > 0 {
		e.rest = max(e.rest-restAtStart*restFades, restMin)
	}
}

// token makes one token of a job whose every earlier token is computed.
func (e *Engine) token(j *job) {
	j.made++
	j.done = j.length() - 1
	e.private++
	e.stats.GenerationTokens++
	e.emit(model.Event{Kind: model.Token, Job: j.ID, N: j.made})
	if j.made < j.MaxNew {
		return
	}
	e.decode = slices.DeleteFunc(e.decode, func(x *job) bool { return x == j })
	e.share(j)
	e.leave(j)
	delete(e.live, j.ID)
	e.stats.Finished++
	e.emit(model.Event{Kind: model.Finished, Job: j.ID, N: j.made})
}

// share enters into the tree what a job has computed.
func (e *Engine) share(j *job) {
	before := j.shared
	full := j.done / e.p.BlockTokens
	keys := j.Blocks[:min(full, len(j.Blocks))]
	j.held, j.shared = e.tree.grow(j.held, j.shared, keys)
	if more := full - len(j.Blocks); more > 0 && len(j.Output) > 0 && len(keys) == len(j.Blocks) {
		j.held, j.shared = e.tree.grow(j.held, j.shared-len(j.Blocks)*e.p.BlockTokens, j.Output[:min(more, len(j.Output))])
		j.shared += len(j.Blocks) * e.p.BlockTokens
	}
	e.private -= j.shared - before
}

// leave gives back all that a job holds.
func (e *Engine) leave(j *job) {
	if j.taken {
		e.private -= j.length() - j.shared
	}
	e.tree.release(j.held)
	j.held, j.shared, j.done, j.chunk, j.taken = nil, 0, 0, 0, false
}

// begin plans the next pass: prefill if anything can be, otherwise decode.
func (e *Engine) begin() {
	e.pass.prefill, e.pass.decode = e.pass.prefill[:0], e.pass.decode[:0]
	var took float64
	if tokens, pairs := e.fill(); tokens > 0 {
		took = e.matrix(tokens) + e.p.Attention.Seconds()*pairs/1e6
	} else {
		e.makeRoom()
		context := 0
		for _, j := range e.decode {
			e.pass.decode = append(e.pass.decode, j)
			context += j.length()
		}
		n := len(e.pass.decode)
		if n == 0 {
			return
		}
		took = e.matrix(n) + e.p.Decode.Seconds()*float64(n) + e.p.KVRead.Seconds()*float64(context)/1e3
	}
	e.busy = true
	e.at += took
	e.stats.Busy += time.Duration(took * 1e9)
}

// matrix is the time that a pass of so many tokens takes apart from attention.
func (e *Engine) matrix(tokens int) float64 {
	return e.p.StepBase.Seconds() + max(e.p.StepFloor.Seconds(), float64(tokens)*e.p.Token.Seconds())
}

// fill chooses what a prefill pass computes.
func (e *Engine) fill() (tokens int, pairs float64) {
	budget := e.p.StepTokens
	take := func(j *job) {
		j.chunk = min(j.length()-j.done, budget)
		budget -= j.chunk
		tokens += j.chunk
		pairs += float64(j.chunk) * (float64(j.done) + float64(j.chunk)/2)
		e.pass.prefill = append(e.pass.prefill, j)
	}
	for _, j := range e.prefill {
		if budget > 0 {
			take(j)
		}
	}
	for budget > 0 && len(e.queue) > 0 && len(e.prefill)+len(e.decode) < e.p.RunningMax {
		j := e.queue[0]
		if !e.admit(j) {
			break
		}
		e.queue = slices.Delete(e.queue, 0, 1)
		take(j)
	}
	return tokens, pairs
}

// admit gives the first of the queue its place, if the expected rest of all
// answers fits too.
func (e *Engine) admit(j *job) bool {
	expected := func(j *job) float64 { return e.rest * float64(min(j.MaxNew-j.made, restMax)) }
	wanted := expected(j)
	for _, list := range [][]*job{e.prefill, e.decode} {
		for _, other := range list {
			wanted += expected(other)
		}
	}
	held, shared := e.tree.match(j.Blocks, j.Output, j.length()-1)
	e.tree.hold(held)
	need := j.length() - shared
	alone := len(e.prefill)+len(e.decode) == 0
	if room := e.capacity - e.private - e.next() - 1 - e.tree.pinned - need; room < 0 || !alone && float64(room) < wanted {
		e.tree.release(held)
		return false
	}
	j.held, j.shared, j.done, j.taken = held, shared, shared, true
	e.private += need
	e.prefill = append(e.prefill, j)
	e.evict()
	cached := min(shared, j.PromptTokens)
	if !j.counted {
		j.counted = true
		e.stats.QueryTokens += uint64(j.PromptTokens)
		e.stats.HitTokens += uint64(cached)
	}
	e.emit(model.Event{Kind: model.Admitted, Job: j.ID, N: cached})
	return true
}

// next is how many tokens are made before anybody is put back again.
func (e *Engine) next() int { return len(e.prefill) + len(e.decode) }

// makeRoom frees memory for one more token of each stream. Where forgetting
// prefixes is not enough, the streams with the fewest tokens are put back.
func (e *Engine) makeRoom() {
	for len(e.decode) > 1 && e.private+e.next()+e.tree.pinned > e.capacity {
		least := 0
		for i, j := range e.decode {
			if j.made <= e.decode[least].made {
				least = i
			}
		}
		j := e.decode[least]
		e.decode = slices.Delete(e.decode, least, least+1)
		e.leave(j)
		e.queue = slices.Insert(e.queue, 0, j)
		e.rest = restAtStart
		e.stats.Preemptions++
		e.emit(model.Event{Kind: model.Preempted, Job: j.ID, N: j.made})
	}
	e.evict()
}

// evict forgets prefixes until everything fits.
func (e *Engine) evict() {
	for e.private+e.next()+e.tree.tokens > e.capacity && e.tree.forget() {
	}
}

func (e *Engine) emit(ev model.Event) {
	ev.At = time.Duration(e.at * 1e9)
	e.events = append(e.events, ev)
}

// Match is how many leading tokens of a prompt are in the tree.
func (e *Engine) Match(blocks []uint64) int {
	_, tokens := e.tree.match(blocks, nil, math.MaxInt)
	return tokens
}

// Snapshot reports the state as the other model does.
func (e *Engine) Snapshot() model.Snapshot {
	block := max(e.p.BlockTokens, 1)
	return model.Snapshot{
		Stats: e.stats, Running: len(e.prefill) + len(e.decode), Waiting: len(e.queue),
		Blocks: e.p.Blocks, BlocksUsed: (e.private + e.tree.pinned + block - 1) / block, BlocksCached: e.tree.tokens / block,
	}
}
