// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/journal"
)

func newJournal(t testing.TB, path string, set ...func(*journal.Config)) *journal.Journal {
	t.Helper()
	s, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	c := journal.Config{Store: s, Gateway: "gw-1", KeyTTL: time.Hour, AnswerMax: 1 << 20}
	for _, f := range set {
		f(&c)
	}
	j, err := journal.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func arrival(i int) *journal.Arrival {
	return &journal.Arrival{
		ClientRequestID: fmt.Sprintf("client-%08d", i), Tenant: fmt.Sprintf("team-%d", i%7), Model: fmt.Sprintf("qwen-%d", i%5),
		TargetModel: "Qwen/Qwen3-8B", Pool: fmt.Sprintf("pool-%d", i%3), Objective: "interactive", MaxAttempts: 2, PromptTokens: 812,
	}
}

func id(i int) inference.RequestID {
	return inference.RequestID(fmt.Sprintf("req_01J%023d", i))
}

// life is every event of one ordinary request, in order, the first left out.
func life(i int) []journal.Event {
	r := id(i)
	outcome := inference.Completed
	if i%100 == 99 {
		outcome = inference.Interrupted
	}
	return []journal.Event{
		{Request: r, Kind: journal.Queued},
		{Request: r, Kind: journal.Dispatched, Attempt: 1, Endpoint: "http://10.0.0.7:8000", Revision: "model-x@sha256:0123456789abcdef"},
		{Request: r, Kind: journal.FirstDelta, Attempt: 1, Tokens: 1, Events: 1, Estimated: true},
		{Request: r, Kind: journal.Ended, Attempt: 1, Verdict: inference.Finished, PromptTokens: 812, CachedTokens: 640},
		{Request: r, Kind: journal.Finished, Outcome: outcome, Tokens: 37, Events: 37},
	}
}

// BenchmarkRequests writes whole unkeyed requests: what the writer can carry.
func BenchmarkRequests(b *testing.B) {
	j := newJournal(b, filepath.Join(b.TempDir(), "j.db"))
	i := 0
	for b.Loop() {
		if err := j.Receive(b.Context(), journal.Event{Request: id(i), Arrival: arrival(i)}); err != nil {
			b.Fatal(err)
		}
		for _, e := range life(i) {
			if err := j.Append(e); err != nil {
				b.Fatal(err)
			}
		}
		if i++; i%500 == 0 {
			if err := j.Flush(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	}
	if err := j.Close(); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(b.N)*6/b.Elapsed().Seconds(), "events/s")
}

// BenchmarkKeyed is the wait of a keyed request: for its key, and for its bit.
func BenchmarkKeyed(b *testing.B) {
	for _, clients := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) { benchKeyed(b, clients) })
	}
}

func benchKeyed(b *testing.B, clients int) {
	j := newJournal(b, filepath.Join(b.TempDir(), "j.db"))
	var mu sync.Mutex
	var waits []time.Duration
	next := make(chan int)
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for i := range next {
				took := keyed(b, j, i)
				mu.Lock()
				waits = append(waits, took...)
				mu.Unlock()
			}
		})
	}
	i := 0
	for b.Loop() {
		next <- i
		i++
	}
	close(next)
	all.Wait()
	if err := j.Close(); err != nil {
		b.Fatal(err)
	}
	slices.Sort(waits)
	b.ReportMetric(float64(waits[len(waits)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(waits[len(waits)*99/100].Microseconds()), "p99-µs")
}

// keyed runs one keyed request and returns its two waits.
func keyed(t testing.TB, j *journal.Journal, i int) []time.Duration {
	ctx := context.Background()
	began := time.Now()
	d, err := j.Begin(ctx, journal.Claim{Request: id(i), Key: fmt.Sprint(i), Digest: journal.Digest([]byte("body")), Arrival: arrival(i)})
	waits := []time.Duration{time.Since(began)}
	if err != nil || d.State != journal.KeyNew {
		t.Errorf("begin %d: %v %v", i, d.State, err)
	}
	for _, e := range life(i) {
		switch e.Kind {
		case journal.FirstDelta:
			began = time.Now()
			err = j.FirstDelta(ctx, e, true)
			waits = append(waits, time.Since(began))
		case journal.Finished:
			err = j.Finish(e, true, &journal.Answer{Status: 200, Body: []byte("data: hello\n\ndata: [DONE]\n\n")})
		default:
			err = j.Append(e)
		}
		if err != nil {
			t.Errorf("request %d, %s: %v", i, e.Kind, err)
		}
	}
	return waits
}
