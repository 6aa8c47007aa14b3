// SPDX-License-Identifier: Apache-2.0

package keep

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
)

// Kinds of journalled transitions, and the points of each at which the program
// kills itself: before the event is queued, before it is written, before its
// transaction commits, and before whoever waits for it is told.
var (
	kinds  = []string{"received", "dispatched", "first_delta", "fencing", "fenced", "ended", "finished", "reopened"}
	stages = []string{"queue", "write", "commit", "committed"}
)

// TestCrashAtEveryTransition kills the program at each fault point, under load,
// and holds what it left against what its clients got and its engines saw.
func TestCrashAtEveryTransition(t *testing.T) {
	nths := []int{9}
	if !testing.Short() {
		nths = []int{1, 5, 25}
	}
	slots := make(chan struct{}, 4)
	program(t, "faultpoint")
	t.Run("points", func(t *testing.T) {
		for i, kind := range kinds {
			for j, stage := range stages {
				if kind == "reopened" && (stage == "queue" || stage == "write") {
					continue // until its transaction it is a claim like any other
				}
				for _, nth := range nths {
					durability := []string{"keyed", "strict"}[(i+j)%2]
					if kind == "reopened" {
						nth = (nth + 3) / 4
					}
					point := fmt.Sprintf("%s:%s#%d", kind, stage, nth)
					t.Run(strings.Replace(point, "#", " pass ", 1)+" "+durability, func(t *testing.T) {
						t.Parallel()
						slots <- struct{}{}
						defer func() { <-slots }()
						crash(t, point, durability)
					})
				}
			}
		}
	})
}

// A sent request, and what its client got.
type sent struct {
	name  string // its client's id, and its key if it has one
	body  string
	keyed bool
	fault string
	answer
}

func (s *sent) header() []string {
	h := []string{"X-Request-Id", s.name, "X-Sim-Fault", s.fault, check.TagHeader, s.name}
	if s.keyed {
		h = append(h, "Idempotency-Key", s.name)
	}
	return h
}

// cases are what clients send in turn: whole answers, retries, interruptions,
// failures, long streams.
var cases = []struct{ body, fault string }{
	{streamed, ""},
	{streamed, "attempt=1;status@head:500"},
	{streamed, "slow:2ms"},
	{plain, ""},
	{streamed, "status@head:500"}, // both engines; sent again it is reopened
	{streamed, "rst@token:3"},
	{plain, "attempt=1;garbage@head"},
	{streamed, "stall@role:5ms"},
}

func crash(t *testing.T, point, durability string) {
	e := engines(t, 2)
	dir := t.TempDir()
	yaml := fmt.Sprintf("journal: {durability: %s}\n", durability) + onePool(static(e...)+
		", health: {interval: 0s}, failover: {before_first_delta: {max_attempts: 3}, retry_budget: {ratio: 1, min_per_second: 1000}}")
	p := serve(t, dir, yaml, launch{tags: "faultpoint", env: []string{"HEADGATE_FAULTPOINT=" + point}})
	list := loadUntilGone(p)
	p.gone()
	if !p.killed() {
		t.Fatalf("not killed at %s: %v", point, p.state)
	}
	p.client.CloseIdleConnections()

	// What is on disk holds without any repair.
	for _, engine := range e {
		for _, entry := range received(engine) {
			await(t, engine, "an end", func(x simengine.Entry) bool { return ended(x, entry) })
		}
	}
	judge(t, "as it was left", list, exported(t, filepath.Join(dir, "headgate.db")), durability, false)

	p = serve(t, dir, yaml, launch{tags: "faultpoint"})
	left := exported(t, filepath.Join(dir, "headgate.db"))
	for _, r := range left {
		if r.Outcome == "" {
			t.Errorf("%s has no outcome after the restart: %+v", r.ClientRequestID, r)
		}
	}
	judge(t, "after the restart", list, left, durability, true)
	for i := range list {
		if list[i].keyed {
			again(t, p, &list[i], left)
		}
	}
	if a := p.post(streamed, key("new")...); !a.whole() {
		t.Errorf("a new request: %v", a)
	}
	p.signal(syscall.SIGTERM)
	if p.state.ExitCode() != 0 {
		t.Errorf("SIGTERM: %v", p.state)
	}
	// I2, I7: over both lives no engine got a request after its client had a
	// delta, nor more often than is allowed.
	var log []simengine.Entry
	for _, engine := range e {
		log = append(log, engine.Log()...)
	}
	for _, s := range list {
		if s.id() == "" || s.tokens() == 0 {
			continue
		}
		got := check.Answer{Request: s.id(), Stream: s.body == streamed, Status: s.status, Body: []byte(s.got()), Err: s.err}
		for _, v := range check.Judge(got, log, check.Limits{MaxAttempts: 3}) {
			if !strings.Contains(v.Saw, "broke off without an error event") { // its gateway was killed
				t.Error(v)
			}
		}
	}
}

// got is the answer's body: sent has a body of its own.
func (s *sent) got() string { return s.answer.body }

// ended says that an entry is the end of a received request.
func ended(x, of simengine.Entry) bool {
	return x.Seq > of.Seq && (x.Conn == of.Conn && slices.Contains([]string{
		simengine.EventFinished, simengine.EventAborted, simengine.EventCut, simengine.EventRefused, simengine.EventConnClosed}, x.Event))
}

// loadUntilGone sends requests, half of them keyed, until the program is dead.
func loadUntilGone(p *child) []sent {
	var mu sync.Mutex
	var list []sent
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for n := range 400 {
				c := cases[(n+worker)%len(cases)]
				s := sent{name: fmt.Sprintf("w%d-%d", worker, n), body: c.body, keyed: (n/len(cases)+worker)%2 == 0, fault: c.fault}
				s.answer = p.try("POST", chat, s.body, s.header()...)
				if s.keyed && s.status == 502 {
					mu.Lock()
					list = append(list, s)
					mu.Unlock()
					s.answer = p.try("POST", chat, s.body, s.header()...)
				}
				mu.Lock()
				list = append(list, s)
				mu.Unlock()
				select {
				case <-p.exited:
					return
				default:
				}
			}
		})
	}
	wg.Wait()
	return list
}

// judge holds records against what clients got.
func judge(t *testing.T, when string, list []sent, records map[string]record, durability string, closed bool) {
	t.Helper()
	byName := map[string]record{}
	for _, r := range records {
		if prior, twice := byName[r.ClientRequestID]; twice {
			t.Errorf("%s: %s is two requests: %s and %s", when, r.ClientRequestID, prior.RequestID, r.RequestID)
		}
		byName[r.ClientRequestID] = r
		if r.Durable != (durability == "strict" || r.Keyed) {
			t.Errorf("%s: %s: first_delta_durable is %v under %s", when, r.ClientRequestID, r.Durable, durability)
		}
	}
	for _, s := range list {
		r, known := byName[s.name]
		promised := s.keyed || durability == "strict"
		switch {
		case !known && promised && s.status != 0 && s.code() != "journal_unavailable":
			t.Errorf("%s: %s was answered and is not in the journal: %v", when, s.name, s.answer)
		case !known:
		case promised && !r.FirstDelta && s.status == 200:
			t.Errorf("I9: %s: %s: the journal says no delta was sent, the client has %q", when, s.name, s.got())
		case closed && r.Outcome == "completed" && s.status == 200 && s.err == nil && !s.whole():
			t.Errorf("I4: %s: %s completed, and its client has %v", when, s.name, s.answer)
		case closed && r.Outcome == "failed" && s.status == 200 && !r.Unproved:
			t.Errorf("I4: %s: %s failed before a delta, which is not called unproved, and its client has %v\n%+v", when, s.name, s.answer, r)
		case closed && (r.Outcome == "rejected" || r.Outcome == "cancelled"):
			t.Errorf("I4: %s: %s is %s, its client did not leave", when, s.name, r.Outcome)
		}
	}
}

// again repeats a keyed request after the crash.
func again(t *testing.T, p *child, s *sent, left map[string]record) {
	t.Helper()
	var r record
	for _, x := range left {
		if x.ClientRequestID == s.name {
			r = x
		}
	}
	a := p.post(s.body, s.header()...)
	had := s.got()
	switch {
	case s.whole():
		// Acknowledged: the client has the complete answer.
		if a.header.Get("Idempotent-Replayed") != "true" || a.body != had || a.id() != s.id() {
			t.Errorf("%s was answered completely; repeated after the crash (record: %s, first delta %v):\n%v", s.name, r.Outcome, r.FirstDelta, a)
		}
	case s.status == 200 && a.status == 200:
		// The rest of an answer that was cut by the crash.
		if a.header.Get("Idempotent-Replayed") != "true" || !strings.HasPrefix(a.body, had) {
			t.Errorf("%s: its client had %q, now %v", s.name, had, a)
		}
	case s.status == 200:
		refused(t, a, 400, "upstream_decode_interrupted", false)
	case r.FirstDelta && a.status == 400:
		refused(t, a, 400, "upstream_decode_interrupted", false)
	case a.status == 200, a.status == 502 && s.fault != "", a.status == 400 && a.code() == "attempts_exhausted":
	case a.status == 400 && a.code() == "upstream_decode_interrupted":
		if !r.FirstDelta && a.header.Get("Headgate-Reason") != "" {
			t.Errorf("%s: no delta was sent, and it is not repeated: %v", s.name, a)
		}
	default:
		t.Errorf("%s: first %v\nafter the crash %v", s.name, s.answer, a)
	}
	if r.RequestID != "" && a.id() != r.RequestID {
		t.Errorf("%s was %s and is now %s", s.name, r.RequestID, a.id())
	}
}

// kill -9 at no point in particular, several times over: what keys stand for is
// still there, and each life closes what the one before left.
func TestKeysSurviveKill(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	dir := t.TempDir()
	yaml := onePool(static(e...) + ", failover: {before_first_delta: {max_attempts: 3}}")
	p := serve(t, dir, yaml, launch{tags: "faultpoint"})
	done := p.post(streamed, key("done")...)
	cut := p.post(streamed, key("cut", "X-Sim-Fault", "rst@token:2")...)
	failed := p.post(streamed, key("failed", "X-Sim-Fault", "status@head:500")...)
	for _, a := range []answer{done, cut, failed} {
		if r := p.record(a.id()); r.Outcome == "" { // reading it waits for its writing
			t.Fatalf("record: %+v", r)
		}
	}
	// Under way when it is killed: one before its first delta, one after it.
	running := p.open(streamed, key("running", "X-Sim-Fault", "stall@token:2")...)
	running.until("·")
	ahead := len(received(e...))
	waiting := make(chan answer, 1)
	go func() { waiting <- p.try("POST", chat, streamed, key("waiting", "X-Sim-Fault", "stall@head")...) }()
	arrival(t, ahead+1, e...)
	runningID := running.res.Header.Get("X-Request-Id")
	// Its dispatch is queued and not promised: reading the record waits for it.
	for _, entry := range received(e...) {
		if r := p.record(entry.Request); entry.Attempt == 1 && len(r.Attempts) == 0 {
			t.Fatalf("record without its attempt: %+v", r)
		}
	}
	p.kill()
	if a := <-waiting; a.status != 0 {
		t.Errorf("a client of a dead gateway got %v", a)
	}
	if a := running.rest(); a.err == nil || a.whole() {
		t.Errorf("a stream cut by kill -9 ended cleanly: %v", a)
	}

	for life := range 3 {
		p = serve(t, dir, yaml, launch{tags: "faultpoint"})
		replayed(t, p.post(streamed, key("done")...), done)
		refused(t, p.post(streamed, key("cut")...), 400, "upstream_decode_interrupted", false)
		refused(t, p.post(streamed, key("running")...), 400, "upstream_decode_interrupted", false)
		if r := p.record(runningID); r.Outcome != "interrupted" || !r.FirstDelta {
			t.Errorf("record of what ran: %+v", r)
		}
		a := p.post(streamed, key("failed")...)
		b := p.post(streamed, key("waiting")...)
		if !a.whole() || a.id() != failed.id() || !b.whole() {
			t.Errorf("life %d: reopened: %v\n%v", life, a, b)
		}
		if r := p.record(b.id()); len(r.Attempts) != 2 || r.Attempts[0].Proof != "transport" || r.Outcome != "completed" {
			t.Errorf("record of what waited: %+v", r)
		}
		p.kill()
	}
}

// A log that the disk lost a part of costs what was in that part, and nothing
// else.
func TestJournalSurvivesATornLog(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	for name, tear := range map[string]func(wal []byte) []byte{
		"cut in the last frame": func(b []byte) []byte { return b[:len(b)-100] },
		"garbage at the end":    func(b []byte) []byte { return append(b, strings.Repeat("\xa5", 5000)...) },
		"half":                  func(b []byte) []byte { return b[:len(b)/2] },
		"gone":                  func([]byte) []byte { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			p := serve(t, dir, onePool(static(e...)), launch{tags: "faultpoint"})
			var first []answer
			for i := range 5 {
				first = append(first, p.post(streamed, key(fmt.Sprint(i))...))
			}
			p.record(first[4].id())
			p.kill()
			wal := filepath.Join(dir, "headgate.db-wal")
			before, err := os.ReadFile(wal)
			must(t, err)
			must(t, os.WriteFile(wal, tear(before), 0o600))

			p = serve(t, dir, onePool(static(e...)), launch{tags: "faultpoint"})
			lost := 0
			for i, a := range first {
				// A disk that loses what it had confirmed loses answers; what
				// is left is whole, and nothing is made up.
				b := p.post(streamed, key(fmt.Sprint(i))...)
				switch {
				case b.header.Get("Idempotent-Replayed") == "true":
					replayed(t, b, a)
				case b.status == 400:
					refused(t, b, 400, "upstream_decode_interrupted", false)
				case !b.whole():
					t.Error(b)
				default:
					lost++
				}
			}
			if name == "garbage at the end" && lost > 0 {
				t.Errorf("%d of 5 answers are gone, and nothing of the log was", lost)
			}
			p.signal(syscall.SIGTERM)
			if p.state.ExitCode() != 0 {
				t.Errorf("SIGTERM: %v", p.state)
			}
		})
	}
}

// A database that is no database, or that can't be written, is a clear error at
// the start: never a gateway that silently keeps nothing.
func TestUnusableJournalIsAnErrorAtTheStart(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	for name, c := range map[string]struct {
		spoil func(t *testing.T, file string)
		want  []string
	}{
		"no database": {func(t *testing.T, file string) {
			must(t, os.WriteFile(file, []byte(strings.Repeat("not sqlite. ", 500)), 0o600))
		}, []string{"headgate.db", "not a database"}},
		"cut short":       {func(t *testing.T, file string) { must(t, os.Truncate(file, 5000)) }, []string{"headgate.db"}},
		"a folder":        {func(t *testing.T, file string) { must(t, os.Remove(file)); must(t, os.Mkdir(file, 0o700)) }, []string{"headgate.db"}},
		"of another life": {func(t *testing.T, file string) { hold(t, file) }, []string{"headgate.db", "another process uses this journal"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			yaml := onePool(static(e...))
			p := serve(t, dir, yaml, launch{tags: "faultpoint"})
			p.post(streamed, key("k")...)
			p.signal(syscall.SIGTERM)
			c.spoil(t, filepath.Join(dir, "headgate.db"))
			p, err := launch{tags: "faultpoint"}.try(t, dir, yaml)
			if err == nil {
				t.Fatal("it serves")
			}
			if p.state == nil || p.state.ExitCode() != 1 {
				t.Fatalf("exit: %v", err)
			}
			for _, word := range c.want {
				if !strings.Contains(p.log.String(), word) {
					t.Errorf("the error does not say %q:\n%s", word, p.log)
				}
			}
			if strings.Contains(p.log.String(), "goroutine") {
				t.Errorf("a stack for an operator's mistake:\n%s", p.log)
			}
		})
	}
}

// hold runs another gateway on the file until the test is over.
func hold(t *testing.T, file string) {
	serve(t, t.TempDir(), fmt.Sprintf("journal: {dsn: %q}\npools: {p: {discovery: {static: [{url: \"http://127.0.0.1:1\"}]}}}\n", file), launch{tags: "faultpoint"})
}

func TestReadOnlyJournalIsAnErrorAtTheStart(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	dir := t.TempDir()
	disk := mount(t, "4m")
	yaml := fmt.Sprintf("journal: {dsn: %q}\n", filepath.Join(disk, "j.db")) + onePool(static(e...))
	p := serve(t, dir, yaml, launch{tags: "faultpoint"})
	a := p.post(streamed, key("k")...)
	p.signal(syscall.SIGTERM)
	must(t, syscall.Mount("tmpfs", disk, "tmpfs", syscall.MS_REMOUNT|syscall.MS_RDONLY, "size=4m"))
	p, err := launch{tags: "faultpoint"}.try(t, dir, yaml)
	if err == nil {
		t.Fatal("it serves")
	}
	if p.state == nil || p.state.ExitCode() != 1 || !strings.Contains(p.log.String(), "j.db") || !strings.Contains(p.log.String(), "read-only") {
		t.Errorf("%v", err)
	}
	must(t, syscall.Mount("tmpfs", disk, "tmpfs", syscall.MS_REMOUNT, "size=4m"))
	p = serve(t, dir, yaml, launch{tags: "faultpoint"})
	replayed(t, p.post(streamed, key("k")...), a)
	p.signal(syscall.SIGTERM)
}

// mount makes a small file system, or skips the test.
func mount(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("mounting a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// fill takes all that is left of a disk, and returns what gives it back.
func fill(t *testing.T, disk string) (free func()) {
	t.Helper()
	ballast := filepath.Join(disk, "ballast")
	f, err := os.Create(ballast)
	must(t, err)
	defer f.Close()
	for block := make([]byte, 4096); err == nil; {
		_, err = f.Write(block)
	}
	return func() { must(t, os.Remove(ballast)) }
}

// A full disk costs exactly what needs it: strict and keyed requests are
// refused and may be sent again, the others go on and are counted. When there is
// room again everything is as before.
func TestFullDiskCostsOnlyWhatNeedsIt(t *testing.T) {
	for _, durability := range []string{"keyed", "strict"} {
		t.Run(durability, func(t *testing.T) {
			t.Parallel()
			e := engines(t, 2)
			disk := mount(t, "2m")
			g := start(t, "", fmt.Sprintf("journal: {dsn: %q, durability: %s}\n", filepath.Join(disk, "j.db"), durability)+onePool(static(e...)))
			kept := g.post(streamed, key("kept")...)
			if !kept.whole() {
				t.Fatal(kept)
			}
			g.record(kept.id())
			// One is under way: its first delta is to become durable on a disk
			// that is full by then.
			ahead := len(received(e...))
			halfway := make(chan answer, 1)
			go func() { halfway <- g.try("POST", chat, streamed, key("halfway", "X-Sim-Fault", "stall@head:2s")...) }()
			arrival(t, ahead+1, e...)
			free := fill(t, disk)

			// A log that has free frames left takes a few more.
			i := 0
			eventually(t, "a keyed request is refused", func() bool {
				i++
				a := g.try("POST", chat, streamed, key(fmt.Sprintf("fill%d", i))...)
				if !a.whole() && a.status != 0 && a.code() != "journal_unavailable" {
					t.Fatal(a)
				}
				return a.code() == "journal_unavailable"
			})
			before := len(received(e...))
			a := g.post(streamed, key("refused")...)
			refused(t, a, 503, "journal_unavailable", true)
			if n := len(received(e...)); n != before {
				t.Errorf("a request that was refused reached an engine")
			}
			b := g.post(streamed)
			if durability == "strict" {
				refused(t, b, 503, "journal_unavailable", true)
			} else if !b.whole() {
				t.Errorf("a request without a key: %v", b)
			}
			// Whether its first delta is on disk is unknown: nothing is written.
			if h := <-halfway; h.status == 200 || h.status != 0 && h.code() != "journal_unavailable" {
				t.Errorf("a first delta that can't be durable: %v", h)
			}
			if r := g.operator("/readyz"); r.status != 200 && durability == "keyed" {
				t.Errorf("not ready, while requests without a key are served: %v", r)
			}
			if durability == "keyed" {
				// Nothing is dropped before the queue is full.
				for range 40 {
					if c := g.post(plain); !c.whole() {
						t.Fatal(c)
					}
				}
			}
			free()
			eventually(t, "keyed requests are served again", func() bool {
				c := g.post(streamed, key("refused")...)
				if !c.whole() {
					refused(t, c, 503, "journal_unavailable", true)
				}
				return c.whole()
			})
			replayed(t, g.post(streamed, key("kept")...), kept)
			if durability == "keyed" {
				eventually(t, "what was served meanwhile is in the journal, or counted", func() bool {
					return g.get("/v1/requests/"+b.id()).status == 200 || g.sum("headgate_journal_dropped_total") > 0
				})
			}
			if lag := g.sum("headgate_journal_lag_seconds"); lag > 5 {
				t.Errorf("lag %v s after the recovery", lag)
			}
		})
	}
}

// When the disk stays full, what can't wait any longer is dropped, and counted.
func TestLongOutageOfTheJournalIsCounted(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("sends thousands of requests")
	}
	e := engines(t, 2, func(c *simengine.Config) { c.Tokens = 1; c.QuietTokens = true })
	disk := mount(t, "64m") // with room for what has gathered
	g := start(t, "", fmt.Sprintf("journal: {dsn: %q}\n", filepath.Join(disk, "j.db"))+onePool(static(e...)))
	free := fill(t, disk)
	n := 0
	eventually(t, "something is dropped", func() bool {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 50 {
					if a := g.try("POST", chat, plain); a.status != 200 {
						t.Errorf("a request without a key: %v", a)
					}
				}
			})
		}
		wg.Wait()
		n += 400
		return g.sum("headgate_journal_dropped_total") > 0
	})
	free()
	eventually(t, "keyed requests are served again", func() bool { return g.post(streamed, key("k")...).whole() })
	t.Logf("dropped %v events of %d requests", g.sum("headgate_journal_dropped_total"), n)
	if len(e[0].Log()) == 0 {
		t.Error("nothing reached an engine")
	}
}

// A limit on file sizes: writes fail with another error than that of a full
// disk.
func TestFileSizeLimitCostsOnlyWhatNeedsIt(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	dir := t.TempDir()
	yaml := onePool(static(e...))
	p := serve(t, dir, yaml, launch{tags: "faultpoint"})
	kept := p.post(streamed, key("kept")...)
	p.signal(syscall.SIGTERM)
	// The shell counts in blocks of 512 bytes.
	p = serve(t, dir, yaml, launch{tags: "faultpoint", shell: "ulimit -f 256"})
	// The log begins anew after an error, so some get through in between.
	i, refusals := 0, 0
	eventually(t, "keyed requests are refused", func() bool {
		i++
		a := p.try("POST", chat, streamed, key(fmt.Sprint(i))...)
		if a.status != 0 && !a.whole() {
			refused(t, a, 503, "journal_unavailable", true)
			refusals++
		}
		if b := p.post(streamed); !b.whole() {
			t.Fatalf("a request without a key: %v", b)
		}
		return refusals >= 3
	})
	if !strings.Contains(p.log.String(), "journal unavailable") {
		t.Error("the log does not tell of the outage")
	}
	p.kill()
	p = serve(t, dir, yaml, launch{tags: "faultpoint"})
	replayed(t, p.post(streamed, key("kept")...), kept)
	if a := p.post(streamed, key("new")...); !a.whole() {
		t.Error(a)
	}
	p.signal(syscall.SIGTERM)
}
