// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/journal"
)

// TestTornLog cuts the write-ahead log where a power failure may, and fills the
// rest with noise: what was durable before the cut is there, the journal opens,
// and what it finds unfinished it closes.
func TestTornLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	j := newJournal(t, path)
	var sizes []int64 // of the log, once request i was acknowledged
	for i := range 40 {
		if _, err := j.Begin(t.Context(), journal.Claim{Request: id(i), Key: fmt.Sprint(i), Arrival: arrival(i)}); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path + "-wal")
		must(t, err)
		sizes = append(sizes, info.Size())
	}
	db, err := os.ReadFile(path)
	must(t, err)
	log, err := os.ReadFile(path + "-wal")
	must(t, err)
	must(t, j.Close())

	rng := rand.New(rand.NewPCG(1, 2))
	for n := range 60 {
		cut := rng.Int64N(int64(len(log)))
		torn := append([]byte(nil), log[:cut]...)
		switch n % 3 {
		case 1: // noise behind the cut
			for len(torn) < len(log) {
				torn = append(torn, byte(rng.Uint32()))
			}
		case 2: // one bit
			torn = append([]byte(nil), log...)
			torn[cut] ^= 1 << rng.IntN(8)
		}
		there := filepath.Join(t.TempDir(), "j.db")
		must(t, os.WriteFile(there, db, 0o600))
		must(t, os.WriteFile(there+"-wal", torn, 0o600))
		again := newJournal(t, there)
		for i, size := range sizes {
			r, err := again.Get(t.Context(), id(i))
			switch {
			case size <= cut && err != nil:
				t.Errorf("case %d, cut at %d: request %d was durable at %d: %v", n, cut, i, size, err)
			case err == nil && !r.Terminal():
				t.Errorf("case %d: request %d has no outcome", n, i)
			case err != nil && !errors.Is(err, journal.ErrNotFound):
				t.Errorf("case %d: request %d: %v", n, i, err)
			}
		}
		must(t, again.Close())
	}
}

// TestDamagedFile: pages of noise are an error, of the journal and clear, and
// no crash.
func TestDamagedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	j := newJournal(t, path)
	for i := range 200 {
		keyed(t, j, i)
	}
	must(t, j.Close())
	whole, err := os.ReadFile(path)
	must(t, err)
	rng := rand.New(rand.NewPCG(3, 4))
	for n := range 20 {
		damaged := append([]byte(nil), whole...)
		for range 1 + n {
			page := rng.IntN(len(damaged)/4096) * 4096
			for i := range 4096 {
				damaged[page+i] = byte(rng.Uint32())
			}
		}
		there := filepath.Join(t.TempDir(), "j.db")
		must(t, os.WriteFile(there, damaged, 0o600))
		s, err := Open(t.Context(), there)
		if err != nil {
			continue
		}
		again, err := journal.Open(t.Context(), journal.Config{Store: s, Gateway: "gw-1", KeyTTL: time.Hour})
		if err != nil {
			must(t, s.Close())
			continue
		}
		for i := range 200 {
			_, _ = again.Get(t.Context(), id(i))
		}
		err = again.Commit(t.Context(), journal.Event{Request: id(1000), Kind: journal.Received, Arrival: arrival(1)})
		if err != nil && !errors.Is(err, journal.ErrUnavailable) {
			t.Errorf("case %d: %v", n, err)
		}
		_ = again.Close() // may say that the file is damaged
	}
}

// outage is a journal whose disk stops taking writes while a keyed request is
// under way, and takes them again later.
func outage(t *testing.T, path string, fail, mend func()) {
	t.Helper()
	j := newJournal(t, path)
	ctx := t.Context()
	if _, err := j.Begin(ctx, journal.Claim{Request: id(0), Key: "0", Arrival: arrival(0)}); err != nil {
		t.Fatal(err)
	}
	must(t, j.Append(journal.Event{Request: id(0), Kind: journal.Dispatched, Attempt: 1}))
	must(t, j.Flush(ctx))
	fail()
	acknowledged, i := 1, 1
	for ; ; i++ {
		_, err := j.Begin(ctx, journal.Claim{Request: id(i), Key: fmt.Sprint(i), Arrival: arrival(i)})
		if err != nil {
			if !errors.Is(err, journal.ErrUnavailable) {
				t.Fatalf("begin %d: %v", i, err)
			}
			break
		}
		acknowledged++
	}
	if !j.Status().Down {
		t.Error("the journal does not say that it is down")
	}
	must(t, j.Receive(ctx, journal.Event{Request: id(5000), Arrival: arrival(1)})) // others go on
	if err := j.FirstDelta(ctx, journal.Event{Request: id(0), Attempt: 1}, true); !errors.Is(err, journal.ErrUnavailable) {
		t.Errorf("first delta: %v", err)
	}
	if _, err := j.Get(ctx, id(0)); err != nil {
		t.Errorf("reading goes on: %v", err)
	}
	mend()
	patience, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		err := j.FirstDelta(patience, journal.Event{Request: id(0), Attempt: 1}, true)
		if err == nil {
			break
		}
		if patience.Err() != nil {
			t.Fatalf("the journal did not recover: %v", err)
		}
	}
	d, err := j.Begin(ctx, journal.Claim{Request: id(9000), Key: fmt.Sprint(i), Arrival: arrival(i)})
	if err != nil || !d.Runs() {
		t.Errorf("the key of a refused request: %s %v", d.State, err)
	}
	must(t, j.Close())

	j = newJournal(t, path)
	for n := range acknowledged {
		if r, err := j.Get(ctx, id(n)); err != nil || r.FirstDeltaSent != (n == 0) {
			t.Errorf("request %d of %d acknowledged: %v", n, acknowledged, err)
		}
	}
	if _, err := j.Get(ctx, id(5000)); err != nil {
		t.Errorf("what was queued during the outage: %v", err)
	}
	must(t, j.Close())
}

// TestAfterAnIOErrorTheLogBeginsAnew, before anything is committed to it.
func TestAfterAnIOErrorTheLogBeginsAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	s, err := Open(t.Context(), path)
	must(t, err)
	defer s.Close()
	save := func(n int) error {
		return s.Update(t.Context(), true, func(tx journal.Tx) error {
			_, err := tx.Save(&journal.Record{RequestID: id(n)}, journal.Was{})
			return err
		})
	}
	must(t, save(1))
	size := func() int64 {
		info, err := os.Stat(path + "-wal")
		must(t, err)
		return info.Size()
	}
	before := size()
	s.suspect = true
	must(t, save(2))
	if s.suspect || size() >= before {
		t.Errorf("suspect %v, log of %d bytes after %d", s.suspect, size(), before)
	}
	if _, err := s.Get(t.Context(), id(1)); err != nil {
		t.Error(err)
	}
}
