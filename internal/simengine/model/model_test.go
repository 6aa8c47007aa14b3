// SPDX-License-Identifier: Apache-2.0

package model

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// keys makes n block keys of the prefix named by tag.
func keys(tag uint64, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = tag<<32 | uint64(i)
	}
	return out
}

func submit(t *testing.T, e *Engine, now time.Duration, j Job) {
	t.Helper()
	if err := e.Submit(now, j); err != nil {
		t.Fatal(err)
	}
}

// run steps e until nothing can run and returns all events.
func run(e *Engine) (events []Event, end time.Duration) {
	for at, ok := e.Next(); ok; at, ok = e.Next() {
		events = append(events, e.Step(at)...)
		end = at
	}
	return events, end
}

func of(events []Event, kind Kind, job string) (found []Event) {
	for _, ev := range events {
		if ev.Kind == kind && (job == "" || ev.Job == job) {
			found = append(found, ev)
		}
	}
	return found
}

func TestJobRunsFromAdmissionToItsLastToken(t *testing.T) {
	e := New(Params{StepBase: time.Second})
	submit(t, e, 5*time.Second, Job{ID: "a", PromptTokens: 10, MaxNew: 3})
	events, end := run(e)
	want := []Event{
		{Kind: Admitted, Job: "a", At: 5 * time.Second},
		{Kind: Token, Job: "a", N: 1, At: 6 * time.Second},
		{Kind: Token, Job: "a", N: 2, At: 7 * time.Second},
		{Kind: Token, Job: "a", N: 3, At: 8 * time.Second},
		{Kind: Finished, Job: "a", N: 3, At: 8 * time.Second},
	}
	if !slices.Equal(events, want) {
		t.Errorf("events %+v\nwant   %+v", events, want)
	}
	if s := e.Snapshot(); end != 8*time.Second || s.BlocksUsed != 0 || s.Running != 0 || s.Busy != 3*time.Second {
		t.Errorf("end %v, snapshot %+v", end, s)
	}
}

func TestStepTimeIsTheFormula(t *testing.T) {
	p := Params{StepBase: 1, StepFloor: 100, Token: 10, Attention: 1e6, Decode: 1000, KVRead: 1e6, StepTokens: 40}
	e := New(p)
	submit(t, e, 0, Job{ID: "a", PromptTokens: 60, MaxNew: 2})
	_, _ = e.Step(0), e.Step(0)
	var ends []time.Duration
	for at, ok := e.Next(); ok; at, ok = e.Next() {
		ends = append(ends, at)
		e.Step(at)
	}
	// Chunks of 40 and 20 tokens; pairs 40*20 and 20*40+20*10; then one decode
	// that reads 60 tokens of context and is at the floor.
	want := []time.Duration{
		1 + 400 + 800,
		(1 + 400 + 800) + 1 + 200 + 1000,
		(1 + 400 + 800) + (1 + 200 + 1000) + 1 + 100 + 1000 + 60000,
	}
	if !slices.Equal(ends, want) {
		t.Errorf("steps end at %v, want %v", ends, want)
	}
}

func TestPrefixHitsAreWholeBlocksAndNeverTheLastToken(t *testing.T) {
	for _, tt := range []struct{ first, second, want int }{
		{160, 160, 144}, // all ten blocks are cached; the last token is computed anyway
		{160, 161, 160},
		{160, 100, 96},
		{15, 15, 0},
		{159, 400, 144},
	} {
		e := New(Params{})
		submit(t, e, 0, Job{ID: "a", PromptTokens: tt.first, Blocks: keys(1, tt.first/16), MaxNew: 1})
		run(e)
		submit(t, e, 0, Job{ID: "b", PromptTokens: tt.second, Blocks: keys(1, tt.second/16), MaxNew: 1})
		events, _ := run(e)
		if got := of(events, Admitted, "b")[0].N; got != tt.want {
			t.Errorf("%d then %d tokens: %d cached, want %d", tt.first, tt.second, got, tt.want)
		}
		s := e.Snapshot()
		if s.QueryTokens != uint64(tt.first+tt.second) || s.HitTokens != uint64(tt.want) {
			t.Errorf("%d then %d tokens: counters %d of %d", tt.first, tt.second, s.HitTokens, s.QueryTokens)
		}
	}
}

func TestAnswerIsCachedForTheNextTurn(t *testing.T) {
	e := New(Params{})
	submit(t, e, 0, Job{ID: "a", PromptTokens: 20, Blocks: keys(1, 1), Output: keys(1, 4)[1:], MaxNew: 45})
	run(e)
	// 64 of the 65 tokens are computed and fill four blocks.
	if got := e.Match(keys(1, 9)); got != 64 {
		t.Errorf("%d tokens cached, want 64", got)
	}
}

func TestSequencesOfOneStepShareAPrefix(t *testing.T) {
	e := New(Params{})
	for _, id := range []string{"a", "b", "c"} {
		submit(t, e, 0, Job{ID: id, PromptTokens: 161, Blocks: keys(1, 10), MaxNew: 4})
	}
	e.Step(0)
	if s := e.Snapshot(); s.BlocksUsed != 10+3 || s.HitTokens != 320 {
		t.Errorf("%d blocks used, %d tokens hit; want 13 and 320", s.BlocksUsed, s.HitTokens)
	}
}

func TestLeastRecentlyUsedIsEvictedFirstAndTailsBeforeHeads(t *testing.T) {
	e := New(Params{Blocks: 8, BlockEvents: true})
	for i, tag := range []uint64{1, 2} {
		submit(t, e, 0, Job{ID: fmt.Sprint(i), PromptTokens: 48, Blocks: keys(tag, 3), MaxNew: 1})
		run(e)
	}
	// Using prefix 1 again makes 2 the older one.
	submit(t, e, 0, Job{ID: "again", PromptTokens: 49, Blocks: keys(1, 3), MaxNew: 1})
	run(e)
	submit(t, e, 0, Job{ID: "new", PromptTokens: 64, MaxNew: 1})
	events, _ := run(e)
	var removed []uint64
	for _, ev := range of(events, BlockRemoved, "") {
		removed = append(removed, ev.Block)
	}
	two := keys(2, 3)
	if want := []uint64{two[2], two[1]}; !slices.Equal(removed, want) {
		t.Errorf("removed %x, want %x", removed, want)
	}
	if e.Match(keys(1, 3)) != 48 || e.Match(two) != 16 {
		t.Errorf("left: %d and %d tokens", e.Match(keys(1, 3)), e.Match(two))
	}
}

func TestFullMemoryMakesJobsWaitAndPreemptsTheNewest(t *testing.T) {
	e := New(Params{Blocks: 4, StepBase: 1})
	submit(t, e, 0, Job{ID: "old", PromptTokens: 16, MaxNew: 34})
	submit(t, e, 0, Job{ID: "new", PromptTokens: 16, MaxNew: 34})
	submit(t, e, 0, Job{ID: "late", PromptTokens: 33, MaxNew: 1})
	e.Step(0)
	if s := e.Snapshot(); s.Running != 2 || s.Waiting != 1 {
		t.Fatalf("running %d, waiting %d; want 2 and 1", s.Running, s.Waiting)
	}
	events, _ := run(e)
	preempted := of(events, Preempted, "")
	if len(preempted) == 0 || preempted[0].Job != "new" {
		t.Errorf("preempted %+v, want new first", preempted)
	}
	for _, id := range []string{"old", "new"} {
		if tokens := of(events, Token, id); len(tokens) != 34 || tokens[33].N != 34 {
			t.Errorf("%s: %d tokens, want each of 34 once", id, len(tokens))
		}
	}
	if len(of(events, Finished, "late")) != 1 {
		t.Error("late did not finish")
	}
}

func TestAdaptersLoadDisplaceAndWait(t *testing.T) {
	e := New(Params{AdapterSlots: 2, AdapterLoad: time.Second, StepBase: time.Millisecond})
	job := func(id, adapter string, n int) Job {
		return Job{ID: id, PromptTokens: 1, MaxNew: n, Adapter: adapter}
	}
	submit(t, e, 0, job("a", "x", 50))
	submit(t, e, 0, job("b", "y", 2))
	submit(t, e, 0, job("c", "z", 1)) // finds no slot while a and b run
	submit(t, e, 0, job("d", "", 1))  // passes it
	e.Step(0)
	s := e.Snapshot()
	if !slices.Equal(s.AdaptersRunning, []string{"x", "y"}) || !slices.Equal(s.AdaptersWaiting, []string{"z"}) || s.Running != 3 {
		t.Errorf("running %v (%d), waiting %v", s.AdaptersRunning, s.Running, s.AdaptersWaiting)
	}
	if at, _ := e.Next(); at != 2*time.Second+time.Millisecond {
		t.Errorf("a step with two loads ends at %v", at)
	}
	events, _ := run(e)
	if len(of(events, Finished, "")) != 4 {
		t.Error("not all finished")
	}
	if s := e.Snapshot(); !slices.Equal(s.AdaptersResident, []string{"x", "z"}) || s.AdapterLoads != 3 {
		t.Errorf("resident %v after %d loads; y was idle and should have gone", s.AdaptersResident, s.AdapterLoads)
	}
}

func TestCancelFreesMemoryAndStopsTokens(t *testing.T) {
	e := New(Params{StepBase: 1})
	submit(t, e, 0, Job{ID: "a", PromptTokens: 100, MaxNew: 10})
	submit(t, e, 0, Job{ID: "b", PromptTokens: 100, MaxNew: 10})
	e.Step(0)
	if !e.Cancel(0, "a") || e.Cancel(0, "a") {
		t.Error("cancel is true once")
	}
	if s := e.Snapshot(); s.BlocksUsed != 7 || s.Running != 1 {
		t.Errorf("%d blocks used by %d", s.BlocksUsed, s.Running)
	}
	events, _ := run(e)
	if len(of(events, Token, "a")) != 0 || len(of(events, Token, "b")) != 10 {
		t.Error("a made tokens after its end, or b did not")
	}
	if e.Cancel(0, "b") {
		t.Error("b is finished and was cancelled")
	}
}

func TestHeldJobStopsAtItsTokenAndKeepsItsPlace(t *testing.T) {
	e := New(Params{})
	submit(t, e, 0, Job{ID: "a", PromptTokens: 20, MaxNew: 10, Hold: true, HoldAfter: 3})
	events, _ := run(e)
	if got := len(of(events, Token, "a")); got != 3 {
		t.Fatalf("%d tokens, want 3", got)
	}
	if s := e.Snapshot(); s.Running != 1 || s.BlocksUsed != 2 {
		t.Errorf("running %d with %d blocks", s.Running, s.BlocksUsed)
	}
	e.Hold(0, "a", 4)
	more, _ := run(e)
	e.Release(0, "a")
	rest, _ := run(e)
	if len(of(more, Token, "a")) != 1 || len(of(rest, Token, "a")) != 6 {
		t.Errorf("then %d and %d tokens", len(of(more, Token, "a")), len(of(rest, Token, "a")))
	}
}

func TestSubmitRefusesWhatCannotRun(t *testing.T) {
	e := New(Params{Blocks: 4})
	for _, tt := range []struct {
		job  Job
		want error
	}{
		{Job{ID: "a", PromptTokens: 0, MaxNew: 1}, ErrInvalid},
		{Job{ID: "a", PromptTokens: 1, MaxNew: 0}, ErrInvalid},
		{Job{PromptTokens: 1, MaxNew: 1}, ErrInvalid},
		{Job{ID: "a", PromptTokens: 64, MaxNew: 2}, ErrTooLong},
		{Job{ID: "a", PromptTokens: 64, MaxNew: 1}, nil},
		{Job{ID: "a", PromptTokens: 1, MaxNew: 1}, ErrDuplicate},
		{Job{ID: "b", PromptTokens: 1, MaxNew: 1, Adapter: "x"}, ErrNoAdapter},
	} {
		if err := e.Submit(0, tt.job); !errors.Is(err, tt.want) {
			t.Errorf("%+v: %v, want %v", tt.job, err, tt.want)
		}
	}
}

func TestLateCallerLosesNoTime(t *testing.T) {
	e := New(Params{StepBase: time.Second})
	submit(t, e, 0, Job{ID: "a", PromptTokens: 1, MaxNew: 3})
	e.Step(0)
	var at []time.Duration
	for next, ok := e.Next(); ok && next <= time.Minute; next, ok = e.Next() {
		for _, ev := range of(e.Step(time.Minute), Token, "") {
			at = append(at, ev.At)
		}
	}
	if want := []time.Duration{1e9, 2e9, 3e9}; !slices.Equal(at, want) {
		t.Errorf("tokens at %v, want %v", at, want)
	}
}

// throughput is tokens per second with n sequences at a time.
func throughput(t *testing.T, p Params, n int) float64 {
	e := New(p)
	for i := range n {
		submit(t, e, 0, Job{ID: fmt.Sprint(i), PromptTokens: 128, MaxNew: 256})
	}
	_, end := run(e)
	return float64(e.Snapshot().GenerationTokens) / end.Seconds()
}

// Batching: sequences are nearly free while reading the weights dominates a
// step, and cost their full price once computing and KV reads do.
func TestThroughputSaturates(t *testing.T) {
	one, eight, most, over := throughput(t, A100x8B, 1), throughput(t, A100x8B, 8), throughput(t, A100x8B, 256), throughput(t, A100x8B, 512)
	t.Logf("tokens/s: 1: %.0f, 8: %.0f, 256: %.0f, 512: %.0f", one, eight, most, over)
	if one < 70 || one > 85 {
		t.Errorf("one stream gets %.0f tokens/s; 12.5 ms a token is 79", one)
	}
	if eight < 7*one || most < 40*one || most > 100*one {
		t.Errorf("batching: %.0f, %.0f, %.0f", one, eight, most)
	}
	if over > most*1.15 || over < most*0.85 {
		t.Errorf("beyond RunningMax throughput went from %.0f to %.0f", most, over)
	}
}

// Any mix of calls: every job ends exactly once, memory stays within its limit,
// and at the end nothing is held. The model is checked against a ledger of what
// was submitted.
func TestEveryJobEndsOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := Params{
			StepBase:     time.Duration(rapid.IntRange(0, 3).Draw(t, "base")),
			Blocks:       rapid.IntRange(2, 40).Draw(t, "blocks"),
			BlockTokens:  rapid.SampledFrom([]int{1, 4, 16}).Draw(t, "block tokens"),
			StepTokens:   rapid.IntRange(1, 64).Draw(t, "step tokens"),
			RunningMax:   rapid.IntRange(1, 8).Draw(t, "running"),
			AdapterSlots: rapid.IntRange(1, 2).Draw(t, "slots"),
			AdapterLoad:  1,
			BlockEvents:  true,
		}
		e := New(p)
		var now time.Duration
		tokens, ended, want := map[string]int{}, map[string]int{}, map[string]int{}
		held := map[string]bool{}
		cached := map[uint64]bool{}
		take := func(events []Event) {
			for _, ev := range events {
				switch ev.Kind {
				case Token:
					if tokens[ev.Job]++; ev.N != tokens[ev.Job] || ended[ev.Job] > 0 {
						t.Fatalf("token %d of %s after %d, ended %d", ev.N, ev.Job, tokens[ev.Job]-1, ended[ev.Job])
					}
				case Finished:
					if ended[ev.Job]++; tokens[ev.Job] != want[ev.Job] {
						t.Fatalf("%s finished with %d of %d tokens", ev.Job, tokens[ev.Job], want[ev.Job])
					}
				case BlockStored, BlockRemoved:
					if cached[ev.Block] == (ev.Kind == BlockStored) {
						t.Fatalf("%v of block %x twice", ev.Kind, ev.Block)
					}
					cached[ev.Block] = ev.Kind == BlockStored
				}
				if ev.At > now {
					t.Fatalf("event at %v, now %v", ev.At, now)
				}
			}
		}
		check := func() {
			s := e.Snapshot()
			if s.BlocksUsed < 0 || s.BlocksUsed > s.Blocks || s.Running > p.RunningMax || len(s.AdaptersResident) > p.AdapterSlots {
				t.Fatalf("over a limit: %+v", s)
			}
			n := 0
			for _, c := range cached {
				if c {
					n++
				}
			}
			if n != s.BlocksCached {
				t.Fatalf("%d blocks by events, %d by snapshot", n, s.BlocksCached)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) { check() },
			"submit": func(t *rapid.T) {
				id := fmt.Sprintf("j%d", len(want))
				j := Job{ID: id, PromptTokens: rapid.IntRange(1, 60).Draw(t, "prompt"), MaxNew: rapid.IntRange(1, 20).Draw(t, "new"),
					Adapter: rapid.SampledFrom([]string{"", "", "x", "y", "z"}).Draw(t, "adapter")}
				tag := uint64(rapid.IntRange(1, 3).Draw(t, "prefix"))
				all := keys(tag, (j.PromptTokens+j.MaxNew)/p.BlockTokens)
				j.Blocks, j.Output = all[:j.PromptTokens/p.BlockTokens], all[j.PromptTokens/p.BlockTokens:]
				if rapid.IntRange(0, 5).Draw(t, "hold") == 0 {
					j.Hold, j.HoldAfter = true, rapid.IntRange(0, 5).Draw(t, "after")
				}
				if err := e.Submit(now, j); err == nil {
					want[id], held[id] = j.MaxNew, j.Hold
				} else if !errors.Is(err, ErrTooLong) {
					t.Fatal(err)
				}
			},
			"cancel": func(t *rapid.T) {
				id := fmt.Sprintf("j%d", rapid.IntRange(0, 20).Draw(t, "job"))
				_, known := want[id]
				if got := e.Cancel(now, id); got != (known && ended[id] == 0) {
					t.Fatalf("cancel %s: %v", id, got)
				} else if got {
					ended[id]++
				}
			},
			"step": func(t *rapid.T) {
				now += time.Duration(rapid.IntRange(0, 4).Draw(t, "dt"))
				for range 50 {
					if at, ok := e.Next(); !ok || at > now {
						break
					}
					take(e.Step(now))
				}
			},
		})
		for id, h := range held {
			if h {
				e.Release(now, id)
			}
		}
		for at, ok := e.Next(); ok; at, ok = e.Next() {
			now = max(now, at)
			take(e.Step(now))
			check()
		}
		for id := range want {
			if ended[id] != 1 {
				t.Fatalf("%s ended %d times", id, ended[id])
			}
		}
		if s := e.Snapshot(); s.BlocksUsed != 0 || s.Running+s.Waiting != 0 || int(s.Finished+s.Cancelled) != len(want) {
			t.Fatalf("left over: %+v", s)
		}
	})
}

func TestSameCallsSameEvents(t *testing.T) {
	history := func() (all []Event) {
		rng := rand.New(rand.NewPCG(1, 2))
		e := New(Params{Blocks: 200, StepBase: 5, Token: 3, RunningMax: 16, AdapterSlots: 2, AdapterLoad: 7, BlockEvents: true})
		var now time.Duration
		for i := range 300 {
			_ = e.Submit(now, Job{ID: fmt.Sprint(i), PromptTokens: 1 + rng.IntN(400), Blocks: keys(uint64(rng.IntN(5)), 20)[:rng.IntN(20)],
				MaxNew: 1 + rng.IntN(50), Adapter: []string{"", "x", "y", "z"}[rng.IntN(4)]})
			now += time.Duration(rng.IntN(2000))
			for at, ok := e.Next(); ok && at <= now; at, ok = e.Next() {
				all = append(all, e.Step(at)...)
			}
		}
		return all
	}
	if a, b := history(), history(); !slices.Equal(a, b) {
		t.Error("two runs differ")
	}
}

func BenchmarkStep(b *testing.B) {
	e := New(A100x8B)
	for i := range 256 {
		_ = e.Submit(0, Job{ID: fmt.Sprint(i), PromptTokens: 512, MaxNew: 1 << 18 / 256})
	}
	b.ReportAllocs()
	for b.Loop() {
		at, ok := e.Next()
		if !ok {
			b.StopTimer()
			e = New(A100x8B)
			for i := range 256 {
				_ = e.Submit(0, Job{ID: fmt.Sprint(i), PromptTokens: 512, MaxNew: 1 << 18 / 256})
			}
			b.StartTimer()
			continue
		}
		e.Step(at)
	}
}
