// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func startEngine(t *testing.T) *Engine {
	e := StartEngine(listen(t))
	t.Cleanup(e.Close)
	return e
}

// relay stands between the generator and the engine and spoils what it carries.
type relay struct {
	request func([]byte) []byte     // edits a request's body
	events  func([]string) []string // edits a stream
	answer  func([]byte) []byte     // edits an answer that is not streamed
	finish  string                  // instead of the last chunk
	close   bool                    // after every answer, without saying so before

	began func() // called when a request has come
}

func startRelay(t *testing.T, engine string, r relay) string {
	l := listen(t)
	var all sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	over := false
	keep := func(c net.Conn) {
		mu.Lock()
		defer mu.Unlock()
		conns = append(conns, c)
		if over {
			c.Close()
		}
	}
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			keep(c)
			up, err := net.Dial("tcp", engine)
			if err != nil {
				c.Close()
				continue
			}
			keep(up)
			all.Go(func() { defer c.Close(); defer up.Close(); r.carry(c, up) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		over = true
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		all.Wait()
	})
	return l.Addr().String()
}

func (r *relay) carry(client, engine net.Conn) {
	in := &incoming{conn: client, buf: make([]byte, 4<<10)}
	out := &incoming{conn: engine, buf: make([]byte, 4<<10)}
	for {
		var body, answer []byte
		head, err := in.head()
		if err != nil || in.body(head, func(p []byte, _ int64) error { body = append(body, p...); return nil }) != nil {
			return
		}
		if r.began != nil {
			r.began()
		}
		if r.request != nil {
			body = r.request(body)
		}
		fmt.Fprintf(engine, "POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		head, err = out.head()
		if err != nil || out.body(head, func(p []byte, _ int64) error { answer = append(answer, p...); return nil }) != nil {
			return
		}
		if !head.chunked {
			if r.answer != nil {
				answer = r.answer(answer)
			}
			fmt.Fprintf(client, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(answer), answer)
		} else {
			events := strings.SplitAfter(string(answer), "\n\n")
			events = events[:len(events)-1]
			if r.events != nil {
				events = r.events(events)
			}
			// Other chunks than the engine's: no part of what must not change.
			text := []byte(strings.Join(events, ""))
			fmt.Fprint(client, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
			for part := range slices.Chunk(text, 1000) {
				client.Write(appendChunk(nil, part))
			}
			if r.finish != "" {
				io.WriteString(client, r.finish)
				return
			}
			io.WriteString(client, "0\r\n\r\n")
		}
		if r.close {
			return
		}
	}
}

func TestTheGatePassesARelayThatChangesNothing(t *testing.T) {
	e := startEngine(t)
	for _, address := range []string{e.Addr(), startRelay(t, e.Addr(), relay{})} {
		if err := Gate(t.Context(), address, e); err != nil {
			t.Error(err)
		}
	}
}

func TestTheGateNotices(t *testing.T) {
	e := startEngine(t)
	swap := func(ev []string) []string { ev[5], ev[6] = ev[6], ev[5]; return ev }
	for name, c := range map[string]struct {
		relay relay
		want  string
	}{
		"a dropped token":    {relay{events: func(ev []string) []string { return slices.Delete(ev, 7, 8) }}, "token 7 where token 6 should be"},
		"a duplicated token": {relay{events: func(ev []string) []string { return slices.Insert(ev, 7, ev[6]) }}, "token 5 where token 6 should be"},
		"swapped tokens":     {relay{events: swap}, "token 5 where token 4 should be"},
		"an altered byte": {relay{events: func(ev []string) []string {
			ev[9] = strings.Replace(ev[9], "gate", "gat3", 1)
			return ev
		}}, "want"},
		"an altered time": {relay{events: func(ev []string) []string {
			ev[9] = strings.Replace(ev[9], "0000008 0", "0000008 1", 1)
			return ev
		}}, "want"},
		"a token of another stream": {relay{events: func(ev []string) []string {
			ev[9] = strings.Replace(ev[9], "chatcmpl-0", "chatcmpl-1", 1)
			return ev
		}}, "want"},
		"an added comment":    {relay{events: func(ev []string) []string { return slices.Insert(ev, 3, ": ping\n\n") }}, "should be"},
		"a lost end marker":   {relay{events: func(ev []string) []string { return ev[:len(ev)-1] }}, "ended cleanly after"},
		"a lost role event":   {relay{events: func(ev []string) []string { return ev[1:] }}, "first event"},
		"a lost usage event":  {relay{events: func(ev []string) []string { return slices.Delete(ev, len(ev)-2, len(ev)-1) }}, "want"},
		"two end markers":     {relay{events: func(ev []string) []string { return append(ev, endMarker) }}, "after the end marker"},
		"a cut connection":    {relay{finish: "5\r\nda"}, "unexpected EOF"},
		"a missing last line": {relay{events: func(ev []string) []string { ev[len(ev)-1] = "data: [DONE]\n"; return ev }}, "ended cleanly after"},
		"an altered answer":   {relay{answer: func(b []byte) []byte { return bytes.Replace(b, []byte("stop"), []byte("stap"), 1) }}, "want"},
		"a cut answer":        {relay{answer: func(b []byte) []byte { return b[:len(b)-1] }}, "want"},
		"an altered prompt":   {relay{request: func(b []byte) []byte { return bytes.Replace(b, []byte("river"), []byte("rivet"), 1) }}, "want"},
		"an altered request":  {relay{request: func(b []byte) []byte { return bytes.Replace(b, []byte(`"user"`), []byte(`"usre"`), 1) }}, "no user field"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Gate(t.Context(), startRelay(t, e.Addr(), c.relay), e)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

func TestARunMeasuresWhatItIsToldTo(t *testing.T) {
	e := startEngine(t)
	probes := 0
	r := Run(t.Context(), Load{
		Address: e.Addr(), Engine: e, Probe: func() { probes++ },
		Shape: Shape{Stream: true, PromptBytes: 100, Tokens: 1000, EventBytes: 300, Interval: 5 * time.Millisecond},
		Rate:  8, Fill: 40, Connections: 60, Ramp: 50 * time.Millisecond, Warmup: 50 * time.Millisecond, Window: 300 * time.Millisecond,
	})
	if r.Errors > 0 || r.Corrupt != "" {
		t.Fatalf("%d errors: %s %s", r.Errors, r.Error, r.Corrupt)
	}
	// About 40 streams × 200 tokens a second × 0.3 s; fewer on a busy machine.
	if r.Tokens < 100 || r.Tokens > 4000 {
		t.Errorf("%d tokens in the window, want at most about 2400", r.Tokens)
	}
	if probes != 2 || r.Took < 250*time.Millisecond || r.Added.Count() == 0 || r.Gap.Count() == 0 || r.Reads == 0 {
		t.Errorf("%d probes, took %v, %d delays, %d gaps, %d reads", probes, r.Took, r.Added.Count(), r.Gap.Count(), r.Reads)
	}
	// Whole answers last five seconds; that all have ended is the hurry's doing.
	if r.Whole < 40 {
		t.Errorf("%d streams ended whole, want all", r.Whole)
	}
}

// TestAStallDelaysAllThatWasDueInIt: a closed loop would send one request into
// the stall and report one slow answer.
func TestAStallDelaysAllThatWasDueInIt(t *testing.T) {
	e := startEngine(t)
	const stall = 250 * time.Millisecond
	var once sync.Once
	address := startRelay(t, e.Addr(), relay{began: func() { once.Do(func() { <-time.After(stall) }) }})
	r := Run(t.Context(), Load{
		Address: address, Engine: e, Shape: Shape{PromptBytes: 10, Tokens: 1}, Rate: 200, Connections: 1, Window: 400 * time.Millisecond,
	})
	if r.Errors > 0 {
		t.Fatal(r.Error)
	}
	// 50 of 80 were due while the target stood still, the middle one of them
	// half the stall before its end.
	if got := r.Latency.Quantile(0.68); got < stall/4 {
		t.Errorf("two thirds of the answers took at most %v, want over %v: waiting does not count", got, stall/4)
	}
	if r.Latency.Count() != 80 {
		t.Errorf("%d latencies of 80 requests", r.Latency.Count())
	}
}

func TestAKeptConnectionThatTheTargetClosedIsNoError(t *testing.T) {
	e := startEngine(t)
	r := Run(t.Context(), Load{
		Address: startRelay(t, e.Addr(), relay{close: true}), Engine: e,
		Shape: Shape{PromptBytes: 10, Tokens: 1}, Connections: 2, Least: 4, Window: 50 * time.Millisecond,
	})
	if r.Errors > 0 || r.Whole < 4 {
		t.Errorf("%d answers, %d errors: %s", r.Whole, r.Errors, r.Error)
	}
}

func TestARunEndsWhenItIsCancelled(t *testing.T) {
	e := startEngine(t)
	ctx, cancel := context.WithCancel(t.Context())
	address := startRelay(t, e.Addr(), relay{began: cancel})
	r := Run(ctx, Load{Address: address, Shape: Shape{Stream: true, Tokens: 10, Interval: time.Hour}, Connections: 3, Window: time.Hour})
	if r.Whole > 0 {
		t.Errorf("%d answers", r.Whole)
	}
}

func TestAnUnknownEngineIsReadForItsTokens(t *testing.T) {
	e := startEngine(t)
	load := Load{Address: e.Addr(), Unknown: true, Shape: Shape{Stream: true, Tokens: 30}, Connections: 1, Least: 1, Window: 500 * time.Millisecond}
	r := Run(t.Context(), load)
	if r.Errors > 0 || r.First.Count() == 0 || r.Gap.Count() == 0 || r.Added.Count() > 0 {
		t.Errorf("%d errors (%s), %d first tokens, %d gaps, %d delays", r.Errors, r.Error, r.First.Count(), r.Gap.Count(), r.Added.Count())
	}
	load.Address = startRelay(t, e.Addr(), relay{events: func(ev []string) []string { return ev[:9] }})
	if r := Run(t.Context(), load); !strings.Contains(r.Corrupt, "end marker") {
		t.Errorf("a cut stream passed: %+v", r.Error)
	}
	load.Address, load.Shape.Stream = e.Addr(), false
	if r := Run(t.Context(), load); r.Errors > 0 || r.Latency.Count() == 0 {
		t.Errorf("%d errors (%s), %d latencies", r.Errors, r.Error, r.Latency.Count())
	}
}

func TestBodiesAreReadWhereverTheirBytesAreCut(t *testing.T) {
	const message = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n00b\r\n, the world\r\n0\r\nTrailer: x\r\n\r\n"
	for cut := 1; cut < len(message); cut++ {
		client, server := net.Pipe()
		go func() {
			io.WriteString(server, message[:cut])
			io.WriteString(server, message[cut:])
			server.Close()
		}()
		in := &incoming{conn: client, buf: make([]byte, 8)}
		var got []byte
		head, err := in.head()
		status := head.status()
		if err == nil {
			err = in.body(head, func(p []byte, _ int64) error { got = append(got, p...); return nil })
		}
		if err != nil || string(got) != "hello, the world" || status != 200 {
			t.Errorf("cut at %d: %q, %v", cut, got, err)
		}
		client.Close()
	}
}

func TestACutChunkIsAnError(t *testing.T) {
	for _, message := range []string{"5\r\nhel", "5\r\nhello", "5\r\nhelloX\r\n0\r\n\r\n", "zz\r\n", "0\r\n", ""} {
		client, server := net.Pipe()
		go func() {
			io.WriteString(server, message)
			server.Close()
		}()
		in := &incoming{conn: client, buf: make([]byte, 64)}
		if err := in.body(messageHead{chunked: true}, func([]byte, int64) error { return nil }); err == nil || err == io.EOF {
			t.Errorf("%q: %v", message, err)
		}
		client.Close()
	}
}

func TestAComparisonGivesATargetThatFailsNoFigures(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("CPU time comes from /proc")
	}
	c := Comparison{
		Targets: []Target{{Name: "direct"}, {Name: "gone", Command: []string{"false"}}},
		Cells: []Cell{
			{Name: "unary", Load: Load{Shape: Shape{Tokens: 1}, Connections: 2, Window: 20 * time.Millisecond}},
			{Name: "streams", Load: Load{Shape: Shape{Stream: true, Tokens: 10}, Connections: 2, Window: 20 * time.Millisecond}},
		},
		Rounds: 2, CPU: -1, Log: io.Discard,
	}
	r, err := c.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Measured) != 4 {
		t.Errorf("%d measurements, want two cells twice", len(r.Measured))
	}
	for _, s := range r.Summary {
		if gone := s.Target == "gone"; s.Served == gone || (len(s.Values) == 0) != gone {
			t.Errorf("%s of %s: served %t, %d figures", s.Cell, s.Target, s.Served, len(s.Values))
		}
	}
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil || !strings.Contains(table.String(), "gone: served:false: gone: exited") {
		t.Errorf("%v\n%s", err, table.String())
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

func TestTheQuieterRoundsMakeTheSummary(t *testing.T) {
	r := &Report{Cells: []Cell{{Name: "c"}}, Targets: []TargetNote{{Name: "t", Served: true}}}
	for i, foreign := range []float64{1.5, 0.1, 0.9, 0.2, 0.3} {
		r.Measured = append(r.Measured, Measurement{
			Cell: "c", Target: "t", Served: true, Round: i, Foreign: foreign, PerSecond: 100 * foreign, Errors: 1, Stalls: 1,
		})
	}
	r.summarize()
	s := r.Summary[0]
	if got := s.Values["rps"]; got.Median != 20 || got.Low != 15 || got.High != 25 {
		t.Errorf("got %+v of 10, 20 and 30", got)
	}
	if s.Errors != 5 || s.Stalls != 3 || s.Foreign != 0.3 || r.Machine.ForeignMax != 1.5 {
		t.Errorf("%d errors of all rounds, %d stalls of the quieter three, noise %v of at most %v", s.Errors, s.Stalls, s.Foreign, r.Machine.ForeignMax)
	}
}

func TestTheTableSaysWhenTheMachineWasTooBusy(t *testing.T) {
	for reads, want := range map[float64]bool{1: false, 0.6: true} {
		r := &Report{Cells: []Cell{{Name: "c"}}, Targets: []TargetNote{{Name: "direct", Served: true}}}
		r.Measured = []Measurement{{Cell: "c", Target: "direct", Served: true, Reads: reads}}
		r.summarize()
		var table bytes.Buffer
		if err := r.WriteTable(&table); err != nil || strings.Contains(table.String(), "had no time") != want {
			t.Errorf("%v reads for each event: %v\n%s", reads, err, table.String())
		}
	}
}

func TestAProcessHasCPUTimeAndMemory(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	pids := family(os.Getpid())
	if pids[0] != os.Getpid() {
		t.Fatalf("family %v", pids)
	}
	before := cpuTime(pids)
	for end := before + 5*time.Millisecond; cpuTime(pids) < end; {
		bytes.Count(make([]byte, 1<<10), nil)
	}
	if rss := resident(pids); rss < 1<<20 {
		t.Errorf("%d bytes resident", rss)
	}
}

// BenchmarkCheck is what the generator itself spends on one event.
func BenchmarkCheck(b *testing.B) {
	shape := Shape{Stream: true, Tokens: b.N, EventBytes: 240}
	s, m := newScript(1, shape), &meter{token: func(_, _, _ int64) {}}
	c := &streamCheck{meter: m, s: newScript(1, shape)}
	if err := c.take(s.first(1), 1); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for k := range b.N {
		if err := c.take(s.token(k, now()), now()); err != nil {
			b.Fatal(err)
		}
	}
}
