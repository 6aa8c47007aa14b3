// SPDX-License-Identifier: Apache-2.0

package attempt

import (
	"errors"
	"io"
	"sync"

	"github.com/headgate/headgate/internal/mutation"
)

// ErrGateClosed says that the attempt may not write to the client. The bytes
// are dropped and counted.
var ErrGateClosed = errors.New("attempt: gate closed")

// ErrNotCommitted says that an attempt tried to write before its commit.
var ErrNotCommitted = errors.New("attempt: write before commit")

// Gate is the one way to a client's answer. It is one lock: the check that an
// attempt may write, the first-delta bit, the write itself and the end of the
// answer all happen under it, so that no write of an old attempt can fall
// between a decision and what follows from it.
//
// The zero Gate admits nobody.
type Gate struct {
	mu        sync.Mutex
	owner     int  // the attempt that may write; 0 for none
	highest   int  // the highest attempt ever admitted
	committed bool // the first write was begun
	sealed    bool // the last write was begun
	counters  Counters
}

// Counters is what passed a Gate, and what it stopped.
type Counters struct {
	Events int // whole events written
	Tokens int // output tokens in them, as counted
	Bytes  int64
	Late   int // chunks of attempts that no longer own the gate
}

// Open hands the gate to attempt n. It reports false, and changes nothing, if n
// is not newer than every attempt before it or an answer was begun.
func (g *Gate) Open(n int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if n <= g.highest || g.committed || g.sealed {
		return false
	}
	g.owner, g.highest = n, n
	return true
}

// Close bars attempt n for ever. Once it returns, no write of n is under way
// and none will begin.
func (g *Gate) Close(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.owner == n {
		g.owner = 0
	}
}

// Commit sets the first-delta bit and runs write, which sends the head and what
// was held back of attempt n and says what that was.
func (g *Gate) Commit(n int, write func() (Counters, error)) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if (g.owner != n || g.sealed) && !mutation.NoGate && !mutation.NoRecheck {
		g.counters.Late++
		return ErrGateClosed
	}
	g.committed = true
	sent, err := write()
	if err != nil {
		return err
	}
	g.counters.Events += sent.Events
	g.counters.Tokens += sent.Tokens
	g.counters.Bytes += sent.Bytes
	return nil
}

// Publish writes one chunk of attempt n to w: that many whole events with that
// many output tokens in them. A write error is the writer's.
func (g *Gate) Publish(n int, w io.Writer, chunk []byte, events, tokens int) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case (g.owner != n || g.sealed) && !mutation.NoGate:
		g.counters.Late++
		return ErrGateClosed
	case !g.committed:
		return ErrNotCommitted
	}
	if _, err := w.Write(chunk); err != nil {
		return err
	}
	g.counters.Events += events
	g.counters.Tokens += tokens
	g.counters.Bytes += int64(len(chunk))
	return nil
}

// Seal bars every attempt and runs write, which sends the last bytes of the
// answer: an error, or nothing. It is told what was sent before, and runs at
// most once.
func (g *Gate) Seal(write func(sent Counters) error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.sealed {
		return ErrGateClosed
	}
	g.sealed, g.owner = true, 0
	return write(g.counters)
}

// Counters returns what passed so far.
func (g *Gate) Counters() Counters {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.counters
}
