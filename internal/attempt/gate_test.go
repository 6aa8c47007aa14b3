// SPDX-License-Identifier: Apache-2.0

package attempt

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"
)

func TestOnlyTheOwnerWrites(t *testing.T) {
	var g Gate
	var out bytes.Buffer
	head := func() (Counters, error) { return Counters{Events: 1, Tokens: 1, Bytes: 4}, nil }

	if !g.Open(1) || !g.Open(2) || g.Open(1) {
		t.Fatal("attempts must be admitted in order, each once")
	}
	if err := g.Commit(1, head); !errors.Is(err, ErrGateClosed) {
		t.Errorf("the replaced attempt committed: %v", err)
	}
	if err := g.Publish(2, &out, []byte("x"), 1, 1); !errors.Is(err, ErrNotCommitted) {
		t.Errorf("a write before the commit passed: %v", err)
	}
	if err := g.Commit(2, head); err != nil {
		t.Fatal(err)
	}
	if g.Open(3) {
		t.Error("an attempt was admitted after the first delta")
	}
	if err := g.Publish(2, &out, []byte("two"), 1, 1); err != nil {
		t.Fatal(err)
	}
	g.Close(1)
	if err := g.Publish(1, &out, []byte("one"), 1, 1); !errors.Is(err, ErrGateClosed) {
		t.Errorf("a late chunk passed: %v", err)
	}
	g.Close(2)
	if err := g.Publish(2, &out, []byte("late"), 1, 1); !errors.Is(err, ErrGateClosed) {
		t.Errorf("a chunk passed a closed gate: %v", err)
	}
	if err := g.Seal(func(Counters) error { out.WriteString("!"); return nil }); err != nil {
		t.Fatal(err)
	}
	if err := g.Seal(func(Counters) error { out.WriteString("?"); return nil }); !errors.Is(err, ErrGateClosed) {
		t.Errorf("sealed twice: %v", err)
	}
	if out.String() != "two!" {
		t.Errorf("the client got %q", out.String())
	}
	if got, want := g.Counters(), (Counters{Events: 2, Tokens: 2, Bytes: 7, Late: 3}); got != want {
		t.Errorf("counters %+v, want %+v", got, want)
	}
}

func TestFailedWriteIsNotCounted(t *testing.T) {
	var g Gate
	g.Open(1)
	broken := errors.New("broken pipe")
	if err := g.Commit(1, func() (Counters, error) { return Counters{Events: 9}, broken }); !errors.Is(err, broken) {
		t.Fatalf("commit: %v", err)
	}
	if g.Open(2) {
		t.Error("a failed first write still bars other attempts")
	}
	if c := g.Counters(); c.Events != 0 {
		t.Errorf("counted %+v", c)
	}
}

// TestCloseWaitsForTheWrite closes the gate against a writer at full speed:
// once Close returns, nothing more may arrive.
func TestCloseWaitsForTheWrite(t *testing.T) {
	for range 100 {
		var g Gate
		var out strings.Builder // guarded by the gate alone: -race is the judge
		g.Open(1)
		g.Commit(1, func() (Counters, error) { return Counters{}, nil })
		var wg sync.WaitGroup
		started := make(chan struct{})
		wg.Go(func() {
			for i := 0; ; i++ {
				if g.Publish(1, &out, []byte("x"), 1, 1) != nil {
					return
				}
				if i == 0 {
					close(started)
				}
			}
		})
		<-started
		g.Close(1)
		before := out.Len()
		wg.Wait()
		if out.Len() != before {
			t.Fatal("a write began after Close returned")
		}
	}
}

func BenchmarkPublish(b *testing.B) {
	var g Gate
	g.Open(1)
	g.Commit(1, func() (Counters, error) { return Counters{}, nil })
	chunk := bytes.Repeat([]byte("x"), 240)
	b.ReportAllocs()
	for b.Loop() {
		g.Publish(1, discard{}, chunk, 1, 1)
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
