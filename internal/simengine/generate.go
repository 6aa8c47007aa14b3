// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// generation is one answer in the making.
type generation struct {
	*answer
	ask     *ask
	work    *work
	created int64
	sent    []int  // tokens taken from each choice
	stopped []bool // finish_reason sent
	order   int    // tokens taken of all choices: the K of points
}

// await waits for the next token of any choice and returns it, or ok false
// once every choice is finished.
func (g *generation) await() (choice int, ok bool, err error) {
	for {
		select {
		case <-g.gone: // also while tokens come faster than they are waited for
			return 0, false, errGone
		default:
		}
		p := g.work.progress()
		finished := true
		for c := range p.made {
			if p.made[c] > g.sent[c] {
				g.sent[c]++
				g.order++
				return c, true, nil
			}
			finished = finished && p.done[c]
		}
		if finished {
			return 0, false, nil
		}
		if err := g.wait(); err != nil {
			return 0, false, err
		}
	}
}

func (g *generation) wait() error {
	select {
	case <-g.work.changed:
		return nil
	case <-g.gone:
		return errGone
	case <-g.l.ctx.Done():
		return errCut
	}
}

// tokens passes every token to each, with the points before and after it.
func (g *generation) tokens(each func(choice int) error) error {
	for {
		if g.lockstep() {
			k, ok := g.script.holdAfter(g.order)
			g.work.limit(k, ok)
		}
		choice, ok, err := g.await()
		if !ok || err != nil {
			return err
		}
		if err := g.executeTool(); err != nil {
			return err
		}
		if f, ok := g.script.whole("slow"); ok {
			if err := g.stall(f, g.gone); err != nil {
				return err
			}
		}
		if err := g.reach(Point{Name: "computed", K: g.order}); err != nil {
			return err
		}
		if err := each(choice); err != nil {
			return err
		}
		if err := g.reach(Point{Name: "token", K: g.order}); err != nil {
			return err
		}
	}
}

// lockstep says that the model waits for the script at some token.
func (g *generation) lockstep() bool {
	return slices.ContainsFunc(g.script, func(f Fault) bool {
		return f.Kind == "slow" || f.Point.counts() || f.Point.Name == "role" || f.Point.Name == "headers"
	})
}

// executeTool is an engine that calls tools by itself: once, in the middle of
// the answer, when the user asked for "exec:NAME".
func (g *generation) executeTool() error {
	if g.ask.executes == "" || g.toolCalls > 0 || g.order != max(1, g.ask.max/2) {
		return nil
	}
	return g.runTool(g.ask.executes)
}

// runTool has the engine execute a tool. If that fails, so does the answer.
func (a *answer) runTool(name string) error {
	hook := a.l.e.cfg.Tool
	if hook == nil {
		a.record(Entry{Event: EventTool, Detail: name + ": this engine executes no tools"})
		return nil
	}
	call := ToolCall{Engine: a.l.e.cfg.Name, Request: a.id, Attempt: a.attempt, Index: a.toolCalls, Name: name,
		Args: fmt.Sprintf(`{"by":"%s%d"}`, a.l.e.cfg.Name, a.attempt), Header: a.req.Header.Clone()}
	a.toolCalls++
	ctx, cancel := context.WithCancelCause(a.l.ctx)
	defer cancel(nil)
	stop := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-a.gone:
			cancel(errGone)
		case <-stop:
		}
	})
	err := hook(ctx, call)
	close(stop)
	watch.Wait()
	if err == nil {
		a.record(Entry{Event: EventTool, N: call.Index, Detail: name})
		return nil
	}
	a.record(Entry{Event: EventTool, N: call.Index, Detail: name + ": " + err.Error()})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return a.errorEvent(Fault{Kind: "error"})
}
