// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/journal"
)

// TestTwoHundredMegabytes: every list and get stays under 50 ms, and a sweep of
// everything holds no commit up. HEADGATE_LONG=1 runs it.
func TestTwoHundredMegabytes(t *testing.T) {
	if os.Getenv("HEADGATE_LONG") == "" {
		t.Skip("HEADGATE_LONG is not set")
	}
	path := filepath.Join(t.TempDir(), "j.db")
	s, err := Open(t.Context(), path)
	must(t, err)
	j, err := journal.Open(t.Context(), journal.Config{Store: s, Gateway: "gw", KeyTTL: time.Hour, AnswerMax: 1 << 20, Queue: 1 << 15})
	must(t, err)
	size := func() int64 {
		info, err := os.Stat(path)
		must(t, err)
		return info.Size()
	}
	start, n := time.Now(), 0
	first := start.Add(-24 * time.Hour)
	for ; n%1000 != 0 || size() < 200<<20; n++ {
		at := journal.At(first.Add(time.Duration(n) * 100 * time.Millisecond))
		must(t, j.Receive(t.Context(), journal.Event{Request: id(n), At: at, Arrival: arrival(n)}))
		for _, e := range life(n) {
			e.At = at
			must(t, j.Append(e))
		}
		if n%1000 == 0 {
			must(t, j.Flush(t.Context()))
		}
	}
	must(t, j.Flush(t.Context()))
	t.Logf("%d requests, %d bytes each, written in %s", n, size()/int64(n), time.Since(start).Round(time.Millisecond))
	middle := journal.At(first.Add(time.Duration(n/2) * 100 * time.Millisecond))
	minute := journal.Time(time.Minute)
	timed := func(name string, f func() (int, error)) {
		var took []time.Duration
		rows := 0
		for range 9 {
			began := time.Now()
			got, err := f()
			must(t, err)
			took = append(took, time.Since(began))
			rows = got
		}
		slices.Sort(took)
		t.Logf("%-44s %4d rows  median %-10s max %s", name, rows, took[4].Round(10*time.Microsecond), took[8].Round(10*time.Microsecond))
		if took[4] > 50*time.Millisecond {
			t.Errorf("%s takes %s", name, took[4])
		}
	}
	for _, c := range []struct {
		name   string
		filter journal.Filter
	}{
		{"newest", journal.Filter{}},
		{"newest, page of 1000", journal.Filter{Limit: 1000}},
		{"page in the middle", journal.Filter{Before: int64(n / 2)}},
		{"tenant", journal.Filter{Tenant: "team-3"}},
		{"tenant unknown", journal.Filter{Tenant: "none"}},
		{"interrupted", journal.Filter{Outcome: inference.Interrupted}},
		{"completed", journal.Filter{Outcome: inference.Completed}},
		{"failed (none)", journal.Filter{Outcome: inference.Failed}},
		{"unfinished (none)", journal.Filter{Unfinished: true}},
		{"pool", journal.Filter{Pool: "pool-1"}},
		{"model unknown", journal.Filter{Model: "none"}},
		{"tenant, interrupted", journal.Filter{Tenant: "team-3", Outcome: inference.Interrupted}},
		{"tenant, pool, model, interrupted", journal.Filter{Tenant: "team-3", Pool: "pool-1", Model: "qwen-2", Outcome: inference.Interrupted}},
		{"one minute", journal.Filter{Since: middle, Until: middle + minute}},
		{"all since the first", journal.Filter{Since: 1}},
		{"all before the middle, tenant, interrupted", journal.Filter{Until: middle, Tenant: "team-3", Outcome: inference.Interrupted}},
	} {
		timed(c.name, func() (int, error) {
			page, err := j.List(t.Context(), c.filter)
			return len(page.Records), err
		})
	}
	timed("get", func() (int, error) { _, err := j.Get(t.Context(), id(n/3)); return 1, err })
	timed("events of one", func() (int, error) {
		events, err := j.Events(t.Context(), journal.EventFilter{Request: id(n / 3)})
		return len(events), err
	})
	timed("tail", func() (int, error) {
		events, err := j.Events(t.Context(), journal.EventFilter{After: int64(n) * 5})
		return len(events), err
	})

	for _, sweeping := range []bool{false, true} {
		ctx, stop := context.WithCancel(t.Context())
		var sweeper sync.WaitGroup
		swept := 0
		if sweeping {
			sweeper.Go(func() {
				for ctx.Err() == nil {
					got, err := s.Sweep(context.Background(), 1, journal.At(time.Now()))
					if err != nil {
						t.Error(err)
					}
					swept += got
				}
			})
		}
		var waits []time.Duration
		for i := range 1000 {
			waits = append(waits, keyed(t, j, 10*n+i+map[bool]int{true: 1 << 20}[sweeping])...)
		}
		stop()
		sweeper.Wait()
		slices.Sort(waits)
		t.Logf("keyed commit, sweeping %v (%d swept): median %s p99 %s max %s", sweeping, swept, waits[len(waits)/2], waits[len(waits)*99/100], waits[len(waits)-1])
	}
	must(t, j.Close())
	began := time.Now()
	must(t, newJournal(t, path).Close())
	t.Logf("open and close: %s", time.Since(began))
}
