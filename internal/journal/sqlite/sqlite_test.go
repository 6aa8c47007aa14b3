// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/journal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tester is a *testing.T or a *rapid.T.
type tester interface {
	Helper()
	Fatal(args ...any)
}

func must(t tester, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pair is one journal on the file and one on the model, which see the same
// operations in the same order.
type pair struct {
	path      string
	file, ram *journal.Journal
	model     *journal.Memory
	clock     journal.Time
}

// open begins both. A Memory forgets nothing when its Journal is closed.
func (p *pair) open(ctx context.Context, t *rapid.T) {
	s, err := Open(ctx, p.path)
	must(t, err)
	p.file, err = journal.Open(ctx, journal.Config{Store: s, Gateway: "gw", KeyTTL: time.Hour, AnswerMax: 100})
	must(t, err)
	p.ram, err = journal.Open(ctx, journal.Config{Store: p.model, Gateway: "gw", KeyTTL: time.Hour, AnswerMax: 100})
	must(t, err)
}

func (p *pair) close(t *rapid.T) {
	must(t, p.file.Close())
	must(t, p.ram.Close())
}

// TestModel draws operations, restarts among them, and compares the file with
// the in-memory store after each.
func TestModel(t *testing.T) {
	ctx := t.Context()
	dir, run := t.TempDir(), 0
	rapid.Check(t, func(t *rapid.T) {
		run++
		p := &pair{path: filepath.Join(dir, fmt.Sprintf("%d.db", run)), model: journal.NewMemory(0), clock: 1000}
		p.open(ctx, t)
		defer func() { p.close(t) }()
		ids := rapid.IntRange(0, 5)
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(t *rapid.T) {
				c := journal.Claim{Request: id(ids.Draw(t, "id")), Key: fmt.Sprint(rapid.IntRange(0, 3).Draw(t, "key")),
					Digest: journal.Digest([]byte{byte(rapid.IntRange(0, 1).Draw(t, "body"))}), At: p.tick(t),
					Arrival: &journal.Arrival{Tenant: "t", Pool: "p", Model: "m", MaxAttempts: 2, ExecutesTools: rapid.Bool().Draw(t, "tools")}}
				a, errA := p.file.Begin(ctx, c)
				b, errB := p.ram.Begin(ctx, c)
				same(t, "begin", a.State, b.State, errA, errB)
				if (a.Answer == nil) != (b.Answer == nil) || a.Answer != nil && string(a.Answer.Body) != string(b.Answer.Body) {
					t.Fatalf("answers %+v and %+v", a.Answer, b.Answer)
				}
			},
			"event": func(t *rapid.T) {
				e := journal.Event{Request: id(ids.Draw(t, "id")), At: p.tick(t), Kind: journal.Kind(rapid.IntRange(1, 10).Draw(t, "kind")),
					Attempt: rapid.IntRange(1, 3).Draw(t, "n"), Outcome: inference.Outcome(rapid.IntRange(1, 5).Draw(t, "outcome"))}
				errA, errB := p.file.Commit(ctx, e), p.ram.Commit(ctx, e)
				same(t, e.Kind.String(), errors.Is(errA, journal.ErrLost), errors.Is(errB, journal.ErrLost), nil, nil)
			},
			"finish": func(t *rapid.T) {
				e := journal.Event{Request: id(ids.Draw(t, "id")), At: p.tick(t), Outcome: inference.Completed}
				answer := &journal.Answer{Status: 200, Body: []byte(fmt.Sprint("answer at ", e.At))}
				must(t, p.file.Finish(e, true, answer))
				must(t, p.ram.Finish(e, true, answer))
			},
			"restart": func(t *rapid.T) {
				if rapid.IntRange(0, 5).Draw(t, "really") == 0 {
					p.close(t)
					p.open(ctx, t)
				}
			},
			"": func(t *rapid.T) { p.compare(ctx, t) },
		})
	})
}

// tick moves the clock, mostly forwards.
func (p *pair) tick(t *rapid.T) journal.Time {
	p.clock += journal.Time(rapid.IntRange(-50, 100).Draw(t, "tick"))
	return p.clock
}

func same(t *rapid.T, what string, a, b any, errA, errB error) {
	if a != b || (errA == nil) != (errB == nil) {
		t.Fatalf("%s: file %v (%v), model %v (%v)", what, a, errA, b, errB)
	}
}

func (p *pair) compare(ctx context.Context, t *rapid.T) {
	must(t, p.file.Flush(ctx))
	must(t, p.ram.Flush(ctx))
	f := journal.Filter{
		Limit:      rapid.IntRange(1, 10).Draw(t, "limit"),
		Outcome:    inference.Outcome(rapid.IntRange(0, 5).Draw(t, "outcome")),
		Unfinished: rapid.IntRange(0, 3).Draw(t, "unfinished") == 0,
		Since:      journal.Time(rapid.IntRange(0, 1).Draw(t, "since") * 1100),
	}
	if rapid.Bool().Draw(t, "tenant") {
		f.Tenant, f.Pool, f.Model = "t", "p", "m"
	}
	a, errA := p.file.List(ctx, f)
	b, errB := p.ram.List(ctx, f)
	same(t, "list", a.Next, b.Next, errA, errB)
	p.sameRecords(t, a.Records, b.Records)
	a, errA = p.file.List(ctx, journal.Filter{})
	b, errB = p.ram.List(ctx, journal.Filter{})
	same(t, "list", a.Next, b.Next, errA, errB)
	p.sameRecords(t, a.Records, b.Records)
}

// sameRecords compares what does not come from the real clock.
func (p *pair) sameRecords(t *rapid.T, a, b []*journal.Record) {
	if len(a) != len(b) {
		t.Fatalf("%d and %d records", len(a), len(b))
	}
	for i := range a {
		x, y := a[i].Clone(), b[i].Clone()
		x.UpdatedAt, y.UpdatedAt = 0, 0
		for _, r := range []*journal.Record{x, y} {
			for n := range r.Attempts {
				r.Attempts[n].EndedAt = 0
			}
		}
		if !reflect.DeepEqual(x, y) {
			t.Fatalf("record\n%+v\nmodel\n%+v", x, y)
		}
	}
}

// TestHundredDuplicates: of a hundred at once, exactly one runs.
func TestHundredDuplicates(t *testing.T) {
	j := newJournal(t, filepath.Join(t.TempDir(), "j.db"))
	defer j.Close()
	for round := range 5 {
		var mu sync.Mutex
		states := map[journal.KeyState]int{}
		var all sync.WaitGroup
		for i := range 100 {
			all.Go(func() {
				d, err := j.Begin(context.Background(), journal.Claim{Request: id(round*100 + i), Key: fmt.Sprint(round), Arrival: arrival(1)})
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				states[d.State]++
			})
		}
		all.Wait()
		if states[journal.KeyNew] != 1 || states[journal.KeyInProgress] != 99 {
			t.Errorf("round %d: %v", round, states)
		}
	}
}

// TestOneProcessAtATime, and readers beside it.
func TestOneProcessAtATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	j := newJournal(t, path)
	if _, err := Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("second open: %v", err)
	}
	must(t, j.Receive(t.Context(), journal.Event{Request: "r", Arrival: arrival(1)}))
	must(t, j.Flush(t.Context()))
	reader, err := OpenReader(t.Context(), path)
	must(t, err)
	if _, err := reader.Get(t.Context(), "r"); err != nil {
		t.Errorf("read beside the writer: %v", err)
	}
	if err := reader.Update(t.Context(), true, nil); !errors.Is(err, errReader) {
		t.Errorf("update by a reader: %v", err)
	}
	must(t, reader.Close())
	must(t, j.Close())
	for _, name := range []string{path, path + "-lock"} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", name, info.Mode(), err)
		}
	}
	reader, err = OpenReader(t.Context(), path)
	must(t, err)
	if _, err := reader.Get(t.Context(), "r"); err != nil {
		t.Errorf("read without a writer: %v", err)
	}
	if _, err := reader.Get(t.Context(), "none"); !errors.Is(err, journal.ErrNotFound) {
		t.Errorf("read what is not there: %v", err)
	}
	must(t, reader.Close())
}

// TestWrongFiles: each is refused with what is wrong with it.
func TestWrongFiles(t *testing.T) {
	dir := t.TempDir()
	exec := func(path, query string) {
		db, err := sql.Open("sqlite", path)
		must(t, err)
		_, err = db.Exec(query)
		must(t, err)
		must(t, db.Close())
	}
	garbage, foreign, newer := filepath.Join(dir, "garbage"), filepath.Join(dir, "foreign"), filepath.Join(dir, "newer")
	must(t, os.WriteFile(garbage, []byte(strings.Repeat("not a database ", 1000)), 0o600))
	exec(foreign, "CREATE TABLE t (x)")
	must(t, newJournal(t, newer).Close())
	exec(newer, "INSERT INTO schema_version VALUES (99, 'later')")
	for path, want := range map[string]string{
		garbage: "not a database", foreign: "not a journal of Headgate", newer: "schema 99",
		filepath.Join(dir, "none", "j.db"): "no such file",
	} {
		if _, err := Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
		if _, err := OpenReader(t.Context(), path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("reader of %s: %v", path, err)
		}
	}
}

// TestOddPaths: what a URL would read as its own.
func TestOddPaths(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a b?c#d%20é.db")
	must(t, newJournal(t, path).Close())
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
}

// TestDurableMeansSynced: SQLite itself says how it commits.
func TestDurableMeansSynced(t *testing.T) {
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "j.db"))
	must(t, err)
	defer s.Close()
	for _, durable := range []bool{true, false, false, true, false, true} {
		must(t, s.Update(t.Context(), durable, func(journal.Tx) error { return nil }))
		var mode int
		must(t, s.conn.QueryRowContext(t.Context(), "PRAGMA synchronous").Scan(&mode))
		if want := map[bool]int{true: 2, false: 1}[durable]; mode != want {
			t.Errorf("durable %v: synchronous %d, want %d", durable, mode, want)
		}
	}
}

// TestClockSetBack: order is that of arrival, and nothing is missing.
func TestClockSetBack(t *testing.T) {
	j := newJournal(t, filepath.Join(t.TempDir(), "j.db"))
	defer j.Close()
	now := time.Now()
	for i := range 20 {
		at := journal.At(now.Add(time.Duration(i) * time.Second))
		if i >= 10 {
			at -= journal.Time(time.Hour)
		}
		must(t, j.Receive(t.Context(), journal.Event{Request: id(i), At: at, Arrival: arrival(0)}))
		must(t, j.Finish(journal.Event{Request: id(i), At: at, Outcome: inference.Completed}, false, nil))
	}
	must(t, j.Flush(t.Context()))
	for _, f := range []journal.Filter{{Limit: 7}, {Limit: 7, Since: 1}, {Limit: 7, Tenant: "team-0"}} {
		next := 19
		for {
			page, err := j.List(t.Context(), f)
			must(t, err)
			for _, r := range page.Records {
				if r.RequestID != id(next) {
					t.Fatalf("%+v: got %s, want %s", f, r.RequestID, id(next))
				}
				next--
			}
			if f.Before = page.Next; f.Before == 0 {
				break
			}
		}
		if next != -1 {
			t.Errorf("%+v: %d are missing", f, next+1)
		}
	}
	page, err := j.List(t.Context(), journal.Filter{Until: journal.At(now)})
	must(t, err)
	if len(page.Records) != 10 {
		t.Errorf("before the jump's hour: %d", len(page.Records))
	}
}

// TestSweepTakesTheOldInSmallBites, between commits, and leaves what runs and
// what a key holds.
func TestSweepTakesTheOldInSmallBites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	s, err := Open(t.Context(), path)
	must(t, err)
	j, err := journal.Open(t.Context(), journal.Config{Store: s, Gateway: "gw", KeyTTL: time.Hour, AnswerMax: 100})
	must(t, err)
	const old = 500
	for i := range old {
		at := journal.Time(i + 1)
		must(t, j.Receive(t.Context(), journal.Event{Request: id(i), At: at, Arrival: arrival(i)}))
		if i != 7 { // runs for ever
			must(t, j.Finish(journal.Event{Request: id(i), At: at, Outcome: inference.Completed}, false, nil))
		}
	}
	for i := old; i < old+10; i++ {
		keyed(t, j, i)
	}
	must(t, j.Flush(t.Context()))
	ctx := context.Background()
	bites, now := 0, journal.At(time.Now())
	for i := old + 10; ; i++ {
		must(t, j.Receive(ctx, journal.Event{Request: id(i), Arrival: arrival(i)}))
		must(t, j.Commit(ctx, journal.Event{Request: id(i), Kind: journal.Queued}))
		n, err := s.Sweep(ctx, now, now+1)
		must(t, err)
		if n == 0 {
			break
		}
		if n > 3*sweepRows {
			t.Errorf("a bite of %d", n)
		}
		bites++
	}
	if bites < old/sweepRows {
		t.Errorf("%d bites", bites)
	}
	page, err := j.List(ctx, journal.Filter{Limit: 1000, Until: now + 1})
	must(t, err)
	if len(page.Records) != 11 || page.Records[10].RequestID != id(7) {
		t.Errorf("%d old records are left", len(page.Records))
	}
	if events, err := j.Events(ctx, journal.EventFilter{Limit: 1000}); err != nil || len(events) < 61 || events[0].Request != id(7) {
		t.Errorf("%d events are left: %v", len(events), err)
	}
	if d, err := j.Begin(ctx, journal.Claim{Request: "again", Key: fmt.Sprint(old), Digest: journal.Digest([]byte("body")), Arrival: arrival(old)}); err != nil || d.State != journal.KeyReplay {
		t.Errorf("replay of what a key holds: %s %v", d.State, err)
	}
	later := now + journal.Time(2*time.Hour)
	for n := 1; n > 0; {
		n, err = s.Sweep(ctx, later, later)
		must(t, err)
	}
	var left [3]int
	must(t, s.conn.QueryRowContext(ctx, "SELECT (SELECT count(*) FROM keys), (SELECT count(*) FROM answers), (SELECT count(*) FROM requests WHERE outcome <> '')").Scan(&left[0], &left[1], &left[2]))
	if left != [3]int{} {
		t.Errorf("left after everything expired: %v", left)
	}
	must(t, j.Close())
}

// TestListsAreFoundInAnIndex: no plan walks the table.
func TestListsAreFoundInAnIndex(t *testing.T) {
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "j.db"))
	must(t, err)
	defer s.Close()
	for _, f := range []journal.Filter{
		{Tenant: "t"}, {Outcome: inference.Failed}, {Outcome: inference.Completed}, {Pool: "p"}, {Model: "m"}, {Unfinished: true}, {Since: 1},
		{Tenant: "t", Outcome: inference.Failed}, {Tenant: "t", Unfinished: true, Since: 1}, {Tenant: "t", Before: 9},
		{Since: 1, Until: 2, Tenant: "t", Pool: "p", Model: "m", Outcome: inference.Interrupted, Before: 5},
	} {
		q := newQuery(f)
		rows, err := s.r.QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+q.text, append([]any{0}, q.args...)...)
		if err != nil {
			t.Fatalf("%+v: %v", f, err)
		}
		var plan []string
		for rows.Next() {
			var a, b, c int
			var step string
			must(t, rows.Scan(&a, &b, &c, &step))
			plan = append(plan, step)
		}
		must(t, rows.Close())
		text := strings.Join(plan, "; ")
		if !strings.Contains(text, "INDEX requests_") || strings.Contains(text, "SCAN requests;") {
			t.Errorf("%+v: %s", f, text)
		}
	}
}

// TestSwapsCompare: a row changes only if it is what the caller saw.
func TestSwapsCompare(t *testing.T) {
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "j.db"))
	must(t, err)
	defer s.Close()
	r := &journal.Record{RequestID: "r", Gateway: "a", Generation: 3}
	done := &journal.Record{RequestID: "r", Gateway: "a", Generation: 3, Outcome: "completed"}
	mine := journal.Was{Gateway: "a", Generation: 3}
	other := &journal.Record{RequestID: "r", Gateway: "b", Generation: 1}
	hash := journal.Digest([]byte("key"))
	must(t, s.Update(t.Context(), true, func(tx journal.Tx) error {
		for i, c := range []struct {
			record *journal.Record
			was    journal.Was
			want   bool
		}{
			{r, mine, false}, // not there yet
			{r, journal.Was{}, true},
			{r, journal.Was{}, false}, // there already
			{r, mine, true},
			{r, journal.Was{Gateway: "a", Generation: 2}, false},
			{r, journal.Was{Gateway: "b", Generation: 3}, false},
			{done, journal.Was{Gateway: "a", Generation: 4}, false},
			{done, journal.Was{Gateway: "a", Generation: 3, Terminal: true}, false},
			{done, mine, true},
			{r, mine, false}, // has its outcome
			{other, journal.Was{Gateway: "a", Generation: 3, Terminal: true}, true},
			{r, journal.Was{Gateway: "a", Generation: 3, Terminal: true}, false},
		} {
			got, err := tx.Save(c.record, c.was)
			if err != nil || got != c.want {
				t.Errorf("save %d: %v %v, want %v", i, got, err, c.want)
			}
		}
		for i, c := range []struct {
			request, was inference.RequestID
			want         bool
		}{{"r", "x", false}, {"r", "", true}, {"r2", "", false}, {"r2", "x", false}, {"r2", "r", true}, {"r3", "r", false}} {
			got, err := tx.Bind(&journal.Binding{Hash: hash, Request: c.request}, c.was)
			if err != nil || got != c.want {
				t.Errorf("bind %d: %v %v, want %v", i, got, err, c.want)
			}
		}
		return nil
	}))
}

// TestEventsWrittenTwiceCountOnce: a commit whose result was unknown is tried
// again.
func TestEventsWrittenTwiceCountOnce(t *testing.T) {
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "j.db"))
	must(t, err)
	defer s.Close()
	r := &journal.Record{RequestID: "r", Gateway: "a", Generation: 1}
	for range 2 {
		must(t, s.Update(t.Context(), true, func(tx journal.Tx) error {
			if _, err := tx.Save(r, journal.Was{}); err != nil {
				return err
			}
			return tx.Log(r, &journal.Event{Seq: 5, Request: "r", Kind: journal.Queued, At: 1})
		}))
	}
	failed := errors.New("later")
	if err := s.Update(t.Context(), true, func(tx journal.Tx) error {
		if err := tx.Log(r, &journal.Event{Seq: 6, Request: "r", Kind: journal.Queued, At: 1}); err != nil {
			return err
		}
		return failed
	}); !errors.Is(err, failed) {
		t.Error(err)
	}
	events, err := s.Events(t.Context(), journal.EventFilter{Request: "r"})
	if err != nil || len(events) != 1 {
		t.Errorf("%v %v", events, err)
	}
}

// TestNothingSecretIsKept: keys and bodies leave no trace in the file.
func TestNothingSecretIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	j := newJournal(t, path)
	_, err := j.Begin(t.Context(), journal.Claim{Request: id(1), Key: "SECRET-key", Digest: journal.Digest([]byte("SECRET-body")), Arrival: arrival(1)})
	must(t, err)
	tape := journal.Tape{Max: 100}
	_, _ = tape.Write([]byte("answer"))
	must(t, j.Finish(journal.Event{Request: id(1), Outcome: inference.Completed,
		Error: &inference.Error{Code: inference.Internal, Message: "m", Err: errors.New("SECRET-cause")}}, true,
		tape.Answer(200, map[string][]string{"Set-Cookie": {"SECRET-cookie"}, "Authorization": {"SECRET-token"}})))
	must(t, j.Flush(t.Context()))
	for _, name := range []string{path, path + "-wal"} {
		text, err := os.ReadFile(name)
		must(t, err)
		if strings.Contains(string(text), "SECRET") {
			t.Errorf("%s holds a secret", name)
		}
	}
	must(t, j.Close())
}
