// SPDX-License-Identifier: Apache-2.0

package alternate

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/simengine/model"
)

// small is an engine whose times are easy to work out: a prompt token takes 1 ms,
// a pass at least 10 ms, a stream 1 ms more in each.
var small = model.Params{
	StepFloor: 10 * time.Millisecond, Token: time.Millisecond, Decode: time.Millisecond,
	BlockTokens: 10, Blocks: 20, StepTokens: 50, RunningMax: 8,
}

// play drives an engine to its end and writes down what it tells.
func play(e *Engine) string {
	var lines []string
	for at, ok := e.Next(); ok; at, ok = e.Next() {
		for _, ev := range e.Step(at) {
			lines = append(lines, fmt.Sprintf("%v %s %s %d", ev.At.Round(time.Microsecond), ev.Job, ev.Kind, ev.N))
		}
	}
	return strings.Join(lines, "\n")
}

func submit(t *testing.T, e *Engine, at time.Duration, jobs ...model.Job) {
	t.Helper()
	for _, j := range jobs {
		if err := e.Submit(at, j); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPrefillStopsDecode: by hand. a's 60 tokens take two passes of 50 and 10 ms,
// and b, which came meanwhile, is computed in the rest of the second before a's
// second token is made.
func TestPrefillStopsDecode(t *testing.T) {
	e := New(small)
	submit(t, e, 0,
		model.Job{ID: "a", PromptTokens: 60, MaxNew: 2, Blocks: []uint64{1, 2, 3, 4, 5, 6}},
		model.Job{ID: "b", PromptTokens: 25, MaxNew: 2, Blocks: []uint64{1, 2}},
	)
	want := `0s a admitted 0
50ms b admitted 0
85ms a token 1
85ms b token 1
97ms a token 2
97ms a finished 2
97ms b token 2
97ms b finished 2`
	if got := play(e); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	// b began before a's prompt was in the tree; c does not.
	if n := e.Match([]uint64{1, 2, 3, 9}); n != 30 {
		t.Errorf("%d tokens match, want 30", n)
	}
	submit(t, e, time.Second, model.Job{ID: "c", PromptTokens: 60, MaxNew: 1, Blocks: []uint64{1, 2, 3, 4, 5, 6}})
	// All six blocks are there, but one token at least is computed.
	if got, want := play(e), "1s c admitted 50\n1.01s c token 1\n1.01s c finished 1"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestMemoryThatRunsOutPutsStreamsBack: two streams of 60 and 60 tokens that make
// 50 each do not fit into 200 together, but are taken in for what is expected.
func TestMemoryThatRunsOutPutsStreamsBack(t *testing.T) {
	e := New(small)
	submit(t, e, 0,
		model.Job{ID: "a", PromptTokens: 60, MaxNew: 50},
		model.Job{ID: "b", PromptTokens: 60, MaxNew: 50},
	)
	got := play(e)
	if s := e.Snapshot(); s.Finished != 2 || s.Preemptions != 1 || s.BlocksUsed != 0 {
		t.Errorf("%+v\n%s", s, got)
	}
	if !strings.Contains(got, "b preempted") || strings.Contains(got, "a preempted") {
		t.Errorf("the one with the fewest tokens goes, and of equals the newer one:\n%s", got)
	}
}

func TestWhatCanNeverBeIsRefused(t *testing.T) {
	e := New(small)
	for _, c := range []struct {
		job  model.Job
		want error
	}{
		{model.Job{ID: "a", MaxNew: 1}, model.ErrInvalid},
		{model.Job{ID: "a", PromptTokens: 199, MaxNew: 2}, ErrTooLong},
		{model.Job{ID: "a", PromptTokens: 1, MaxNew: 1, Adapter: "x"}, model.ErrNoAdapter},
	} {
		if err := e.Submit(0, c.job); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.job, err, c.want)
		}
	}
	submit(t, e, 0, model.Job{ID: "a", PromptTokens: 1, MaxNew: 1})
	if err := e.Submit(0, model.Job{ID: "a", PromptTokens: 1, MaxNew: 1}); !errors.Is(err, model.ErrDuplicate) {
		t.Error(err)
	}
	if e.Cancel(0, "b") {
		t.Error("somebody who is not there was cancelled")
	}
}

// TestEveryJobEndsAndNothingIsLeft: random jobs that share prefixes, some of them
// cancelled. Tokens come in order, memory is never over, and at the end only
// prefixes that nobody holds are left.
func TestEveryJobEndsAndNothingIsLeft(t *testing.T) {
	for seed := range uint64(60) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		e := New(small)
		at, made, ended, cancelled := time.Duration(0), map[string]int{}, 0, 0
		const jobs = 60
		for n := 0; n < jobs || len(e.live) > 0; {
			due, ok := e.Next()
			if n < jobs && (!ok || rnd.IntN(4) == 0) {
				j := model.Job{ID: fmt.Sprint(n), PromptTokens: 1 + rnd.IntN(120), MaxNew: 1 + rnd.IntN(60)}
				key := uint64(rnd.IntN(3))
				for i := range (j.PromptTokens + j.MaxNew) / 10 {
					if key = key*31 + uint64(i); rnd.IntN(4) == 0 {
						key += 1000
					}
					if i < j.PromptTokens/10 {
						j.Blocks = append(j.Blocks, key)
					} else {
						j.Output = append(j.Output, key)
					}
				}
				submit(t, e, at, j)
				n++
				continue
			}
			if rnd.IntN(40) == 0 {
				if e.Cancel(at, fmt.Sprint(rnd.IntN(n+1))) {
					cancelled++
				}
				continue
			}
			if !ok {
				t.Fatalf("seed %d: %d jobs are live and nothing is due", seed, len(e.live))
			}
			if due < at {
				t.Fatalf("seed %d: time goes back from %v to %v", seed, at, due)
			}
			at = due
			for _, ev := range e.Step(at) {
				switch ev.Kind {
				case model.Token:
					if made[ev.Job]++; made[ev.Job] != ev.N {
						t.Fatalf("seed %d: token %d of %s after %d", seed, ev.N, ev.Job, made[ev.Job]-1)
					}
				case model.Finished:
					ended++
				}
			}
			if used := e.private + e.tree.tokens; used > e.capacity {
				t.Fatalf("seed %d: %d tokens of %d in use", seed, used, e.capacity)
			}
		}
		if ended+cancelled != jobs || e.private != 0 || e.tree.pinned != 0 {
			t.Errorf("seed %d: %d ended, %d cancelled, %d private tokens and %d held ones left",
				seed, ended, cancelled, e.private, e.tree.pinned)
		}
		for e.tree.forget() {
		}
		if e.tree.tokens != 0 || len(e.tree.root.kids) != 0 {
			t.Errorf("seed %d: %d tokens of prefixes cannot be forgotten", seed, e.tree.tokens)
		}
	}
}
