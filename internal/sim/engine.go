// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine/model"
)

// engine is one life of an engine's process.
type engine struct {
	process
	n     *node
	name  string
	model *model.Engine
	jobs  map[string]*serving
	next  time.Duration // when pump is due
}

func (n *node) startEngine() {
	n.lives++
	n.engine = &engine{
		process: process{w: n.w}, n: n, name: fmt.Sprintf("engine-%d.%d", n.i, n.lives), jobs: map[string]*serving{},
		model: model.New(model.Params{
			StepBase: n.set.Token, Token: 200 * time.Microsecond, Decode: time.Millisecond, Blocks: 1024, RunningMax: 3,
		}),
	}
}

func (e *engine) submit(s *serving) {
	e.do(func() {
		s.job = fmt.Sprintf("%s#%d", s.key, s.serial)
		if e.model.Submit(e.w.now, model.Job{ID: s.job, PromptTokens: s.conn.prompt, MaxNew: s.conn.tokens}) != nil {
			return
		}
		e.jobs[s.job] = s
		e.w.fact(check.Fact{What: check.EngineBegan, Request: string(s.key.Request), N: s.key.N, Engine: e.name})
		e.pump()
	})
}

// pump takes what the engine has made and waits for more.
func (e *engine) pump() {
	for {
		at, ok := e.model.Next()
		if !ok {
			return
		}
		if at > e.w.now {
			if e.next != at {
				e.next = at
				e.w.at(at, func() {
					e.do(func() {
						e.next = 0
						e.pump()
					})
				})
			}
			return
		}
		for _, ev := range e.model.Step(e.w.now) {
			s := e.jobs[ev.Job]
			switch {
			case s == nil:
			case ev.Kind == model.Token:
				last := ev.N == s.conn.tokens
				s.guard.after(50*time.Microsecond, func() { s.guard.publish(s, last) })
			case ev.Kind == model.Finished:
				e.ended(s)
			}
		}
	}
}

func (e *engine) ended(s *serving) {
	if e.jobs[s.job] == nil {
		return
	}
	delete(e.jobs, s.job)
	e.w.fact(check.Fact{What: check.EngineEnded, Request: string(s.key.Request), N: s.key.N, Engine: e.name})
}

// abort ends a job, a while after it is asked to.
func (e *engine) abort(s *serving, after time.Duration, then func()) {
	e.after(after, func() {
		e.model.Cancel(e.w.now, s.job)
		e.ended(s)
		e.pump()
		then()
	})
}

// crash ends the engine and all that it computed.
func (e *engine) crash() {
	e.kill()
	for _, id := range sortedKeys(e.jobs) {
		e.ended(e.jobs[id])
	}
}
