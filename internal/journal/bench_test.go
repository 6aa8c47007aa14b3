// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"context"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
)

// sink is a store that takes everything at once: what is left is the caller's
// share of the work.
type sink struct{ *Memory }

func (sink) Update(_ context.Context, _ bool, fn func(Tx) error) error { return fn(sinkTx{}) }

type sinkTx struct{ Tx }

func (sinkTx) Raise(string) (uint64, int64, error)            { return 1, 0, nil }
func (sinkTx) Orphans(string, uint64, int) ([]*Record, error) { return nil, nil }
func (sinkTx) Load(inference.RequestID) (*Record, error)      { return nil, ErrNotFound }
func (sinkTx) Save(*Record, Was) (bool, error)                { return true, nil }
func (sinkTx) Log(*Record, *Event) error                      { return nil }
func (sinkTx) Keep(inference.RequestID, *Answer, Time) error  { return nil }

// BenchmarkAppend is what an event costs the request's goroutine.
func BenchmarkAppend(b *testing.B) {
	j, err := Open(b.Context(), Config{Store: sink{NewMemory(0)}, Gateway: "gw", Queue: 1 << 16})
	if err != nil {
		b.Fatal(err)
	}
	e := Event{Request: "req_01J00000000000000000000000", Kind: Dispatched, Attempt: 1, Endpoint: "http://10.0.0.7:8000", At: At(time.Now())}
	n := 0
	b.ReportAllocs()
	for b.Loop() {
		if err := j.Append(e); err != nil {
			b.Fatal(err)
		}
		if n++; n%10000 == 0 {
			b.StopTimer()
			if err := j.Flush(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	}
	if err := j.Close(); err != nil {
		b.Fatal(err)
	}
}
