// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/headgate/headgate/internal/simengine/model"
)

// lines is n lines of a file, each made from its number.
func lines(n int, line func(i int) string) []string {
	var list []string
	for i := range n {
		list = append(list, line(i))
	}
	return list
}

func folder(files map[string][]string) *Traces {
	dir := fstest.MapFS{}
	for name, text := range files {
		dir[name] = &fstest.MapFile{Data: []byte(strings.Join(text, "\n"))}
	}
	return NewTraces(dir)
}

// plain is row i of a trace with two requests a second; from is when it begins.
func plain(from float64) func(i int) string {
	return func(i int) string {
		return fmt.Sprintf(`{"timestamp": %f, "input_length": %d, "output_length": 100, "hash_ids": [%d, %d, %d]}`,
			from+float64(i)*500, 1500+i, i/3, i/3+1000, i)
	}
}

const names = "TIMESTAMP,ContextTokens,GeneratedTokens"

// dated is row i of a trace with a request in each step.
func dated(from time.Time, step time.Duration) func(i int) string {
	return func(i int) string {
		return from.Add(time.Duration(i)*step).Format("2006-01-02 15:04:05.0000000") + fmt.Sprintf(",%d,50", 1000+i)
	}
}

var noon = time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)

// TestWrongTracesAreNamed: what is wrong with a trace is said with its file, line and
// field, before anything is played.
func TestWrongTracesAreNamed(t *testing.T) {
	good, goodCSV := plain(0), dated(noon, time.Second)
	row := func(text string) []string { return append(lines(150, good), "", text) }
	rowCSV := func(text string) []string { return append(append([]string{names}, lines(150, goodCSV)...), "", text) }
	for _, c := range []struct {
		file string
		text []string
		want string
	}{
		{"a.jsonl", []string{`{"timestamp":1}`}, "a.jsonl:1: no input_length"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":5}`), "a.jsonl:152: no output_length"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":5,"output_length":null}`), "a.jsonl:152: no output_length"},
		{"a.jsonl", row(`{"input_length":5,"output_length":5}`), "a.jsonl:152: no timestamp"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":0,"output_length":5}`), "a.jsonl:152: input_length 0: want a whole number from 1 to 1200000"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":-5,"output_length":5}`), "a.jsonl:152: input_length -5: want a whole number from 1 to 1200000"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":5,"output_length":2e9}`), "a.jsonl:152: output_length 2000000000: want a whole number from 1 to 1200000"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":5.5,"output_length":5}`), "a.jsonl:152: input_length 5.5: want a whole number from 1 to 1200000"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":"5","output_length":5}`), "a.jsonl:152: input_length: want a number, not string"},
		{"a.jsonl", row(`{"timestamp":NaN,"input_length":5,"output_length":5}`), "a.jsonl:152: timestamp: invalid character 'N' looking for beginning of value"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":5,"output_length":NaN}`), "a.jsonl:152: output_length: invalid character 'N' looking for beginning of value"},
		{"a.jsonl", row(`{"timestamp":1e999,"input_length":5,"output_length":5}`), "a.jsonl:152: timestamp: want a number, not number 1e999"},
		{"a.jsonl", row(`{"timestamp":"2026-01-31","input_length":5,"output_length":5}`), "a.jsonl:152: timestamp: want a number, not string"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":5,"output_length":5}`), "a.jsonl:152: no hash_ids, though other lines have them"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":5,"output_length":5,"hash_ids":[0.5]}`), "a.jsonl:152: hash_ids: want a list of whole numbers of 64 bits, not number 0.5"},
		{"a.jsonl", row(`{"timestamp":1,"input_length":600,"output_length":5,"hash_ids":[1,2,3]}`), "a.jsonl:152: hash_ids has 3 for 600 tokens, want at most 2: one per 512 tokens"},
		{"a.jsonl", row(`[1, 2]`), "a.jsonl:152: is a JSON array, want an object"},
		{"a.jsonl", row(`{`), "a.jsonl:152: unexpected end of JSON input"},
		{"a.jsonl", row(strings.Repeat(" ", lineMax+1)), "a.jsonl:152: is longer than 8388608 bytes"},
		{"a.jsonl", nil, "a.jsonl: is empty"},
		{"a.jsonl", []string{"", " ", ""}, "a.jsonl: is empty"},
		{"a.jsonl", lines(1, good), "a.jsonl: has 1 requests, want at least 100: of fewer, the slowest alone is the 99th percentile"},
		{"a.jsonl", lines(99, good), "a.jsonl: has 99 requests, want at least 100"},
		{"a.jsonl", lines(300, func(int) string { return good(7) }), "a.jsonl: all 300 requests come within 0 s, want at least 10 s from the first to the last"},
		{"a.jsonl", append(lines(299, good), plain(1.7e12)(0)), "a.jsonl:300: timestamp is 1.968e+04 days after the first, want at most 31"},
		{"a.csv", append([]string{names}, lines(9, goodCSV)...), "a.csv: has 9 requests, want at least 100"},
		{"a.csv", append([]string{names}, lines(300, dated(noon, 0))...), "a.csv: all 300 requests come within 0 s, want at least 10 s"},
		{"a.csv", append(append([]string{names}, lines(2000, dated(noon, 0))...), goodCSV(60)), "a.csv:37: 1200 requests from here on have one time"},
		{"a.csv", rowCSV("2026-01-31 18:17:03,5"), "a.csv:153: has 2 fields, want 3: time, prompt tokens and answer tokens"},
		{"a.csv", rowCSV("31.1.2026,5,5"), `a.csv:153: time "31.1.2026": want one like 2026-01-31 18:17:03.9799600`},
		{"a.csv", rowCSV("2026-01-31 18:17:03,0,5"), "a.csv:153: prompt tokens 0: want a whole number from 1 to 1200000"},
		{"a.csv", rowCSV("2026-01-31 18:17:03,5,-1"), "a.csv:153: answer tokens -1: want a whole number from 1 to 1200000"},
		{"a.csv", rowCSV("2026-01-31 18:17:03,NaN,5"), "a.csv:153: prompt tokens NaN: want a whole number from 1 to 1200000"},
		{"a.csv", rowCSV("2026-01-31 18:17:03,many,5"), `a.csv:153: prompt tokens "many": want a whole number from 1 to 1200000`},
		{"a.csv", []string{names}, "a.csv: is empty"},
	} {
		_, err := folder(map[string][]string{c.file: c.text}).Workload(t.Context(), c.file, 2, 1, true)
		if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("got  %v\nwant %s", err, c.want)
		}
	}
}

// TestTracesThatShowNoLimitAreRefused: what looks well only when it is played.
func TestTracesThatShowNoLimitAreRefused(t *testing.T) {
	headgate, _ := PolicyNamed("headgate")
	sticky, _ := PolicyNamed("llm-d-sticky")
	small := func(i int) string {
		return fmt.Sprintf(`{"timestamp": %d, "input_length": 10, "output_length": 1}`, i*2000)
	}
	for _, c := range []struct {
		file   string
		text   []string
		engine string
		want   string
	}{
		{"a.jsonl", lines(300, small), "", "2 engines carry all 666 copies of a.jsonl that are replayed, of 598 s and about 200000 requests in all"},
		{"a.jsonl", lines(120, func(i int) string {
			return fmt.Sprintf(`{"timestamp": %d, "input_length": 190000, "output_length": 20}`, i*100)
		}), "", "a.jsonl/2/one-speed: 2 requests are measured at"},
		{"a.jsonl", lines(120, func(i int) string {
			return fmt.Sprintf(`{"timestamp": %d, "input_length": 300000, "output_length": 20}`, i*10000)
		}), "32b", "a.jsonl/2/one-speed/32b: a.jsonl:"},
		{"a.csv", lines(120, dated(noon, time.Second)), "8b-h100", "a.csv/2/one-speed/8b-h100: 2 engines answer all 108 requests in time even if they come within 1 s"},
	} {
		if strings.HasSuffix(c.file, ".csv") {
			for i, text := range c.text {
				c.text[i], _, _ = strings.Cut(text, ",")
				c.text[i] += ",10,1"
			}
		}
		s := Sweep{
			Cells: []Cell{{Workload: c.file, N: 2, Engine: c.engine}}, Seeds: []int64{1}, Policies: []Policy{headgate, sticky},
			Traces: folder(map[string][]string{c.file: c.text}),
		}
		if list, err := s.Run(t.Context()); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("got  %v, %+v\nwant %s", err, list, c.want)
		}
	}
}

// made is what a trace is for two engines.
func made(t *testing.T, traces *Traces, name string) *Workload {
	t.Helper()
	w, err := traces.Workload(t.Context(), name, 2, 1, true)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// TestOrderAndOriginOfTimesDoNotMatter: a trace says the same in any order of its
// lines, with blank ones between them, and whenever it begins.
func TestOrderAndOriginOfTimesDoNotMatter(t *testing.T) {
	const n = 300
	base := lines(n, plain(0))
	mixed := slices.Clone(base)
	rand.New(rand.NewPCG(1, 2)).Shuffle(n, func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
	reversed := slices.Clone(base)
	slices.Reverse(reversed)
	var blank []string
	for _, text := range base {
		blank = append(blank, "", text+"\r", "  ")
	}
	files := map[string][]string{
		"base.jsonl": base, "hour.jsonl": lines(n, plain(3.6e6)), "day.jsonl": lines(n, plain(86.4e6)), "epoch.jsonl": lines(n, plain(1.7e12)),
		"before.jsonl": lines(n, plain(-5e5)), "mixed.jsonl": mixed, "reversed.jsonl": reversed, "blank.jsonl": blank,
	}
	traces := folder(files)
	want := made(t, traces, "base.jsonl")
	for name := range files {
		// What is unique to a line is told apart by its place.
		same := func(q, p Request) bool { return q.Arrive == p.Arrive && q.In == p.In && q.Out == p.Out }
		if w := made(t, traces, name); w.guess != want.guess || !slices.EqualFunc(w.requests, want.requests, same) {
			t.Errorf("%s is played as %d requests and a guess of %v, want the %d and %v of the plain one", name, len(w.requests), w.guess, len(want.requests), want.guess)
		}
	}
	headgate, _ := PolicyNamed("headgate")
	sticky, _ := PolicyNamed("llm-d-sticky")
	s := Sweep{Seeds: []int64{1}, Policies: []Policy{headgate, sticky}, Traces: traces, Cells: []Cell{{Workload: "epoch.jsonl", N: 1}}}
	list, err := s.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if ours := list[0].Ours; ours < 2 || ours > 10 {
		t.Errorf("an engine carries %v × two requests of 1500 tokens a second", ours)
	}
}

// A .csv file's time is compressed, so that its scale does not matter either.
func TestScaleOfDatesDoesNotMatter(t *testing.T) {
	const n = 300
	mixed := lines(n, dated(noon, time.Second))
	rand.New(rand.NewPCG(1, 2)).Shuffle(n, func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
	zoned := lines(n, dated(noon, time.Second))
	for i, text := range zoned {
		zoned[i] = strings.Replace(text, ",", "+00:00,", 1)
	}
	traces := folder(map[string][]string{
		"base.csv": append([]string{names}, lines(n, dated(noon, time.Second))...), "mixed.csv": append([]string{names}, mixed...),
		"day.csv": lines(n, dated(noon.AddDate(0, 0, 1), time.Second)), "scaled.csv": lines(n, dated(noon, 7*time.Second)), "zoned.csv": zoned,
	})
	want := made(t, traces, "base.csv")
	for _, name := range []string{"mixed.csv", "day.csv", "scaled.csv", "zoned.csv"} {
		w := made(t, traces, name)
		if len(w.requests) != len(want.requests) || w.guess != want.guess {
			t.Fatalf("%s: %d requests, guess %v", name, len(w.requests), w.guess)
		}
		for i, q := range w.requests {
			// Seconds since 1970 have seven digits after the point.
			if p := want.requests[i]; math.Abs(q.Arrive-p.Arrive) > 1e-5 || q.In != p.In || q.Out != p.Out {
				t.Fatalf("%s: request %d is %+v, want %+v", name, i, q, p)
			}
		}
	}
}

// TestIdsNeedNotBeChained: an id that stands for 512 tokens wherever they are would
// break an index, whose keys stand for whole prefixes.
func TestIdsNeedNotBeChained(t *testing.T) {
	w, err := folder(map[string][]string{"a.jsonl": lines(300, func(i int) string {
		return fmt.Sprintf(`{"timestamp": %d, "input_length": 1600, "output_length": 100, "hash_ids": [%d, %d, 7]}`, i*500, i%5, (i+1)%5)
	})}).Workload(t.Context(), "a.jsonl", 2, 1, true)
	if err != nil {
		t.Fatal(err)
	}
	before := map[uint64]uint64{}
	for _, q := range w.requests {
		last := uint64(0)
		for _, key := range q.Blocks {
			if known, ok := before[key]; ok && known != last {
				t.Fatalf("key %x comes after %x and %x", key, known, last)
			}
			before[key], last = last, key
		}
	}
	p, _ := PolicyNamed("headgate")
	if r, err := run(t.Context(), w, Cell{N: 2}, p, w.guess); err != nil || r.Requests == 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestCommonPromptsTellNoSessionsApart: requests that begin alike, or of which no
// blocks are known, are left out one by one and not all at once.
func TestCommonPromptsTellNoSessionsApart(t *testing.T) {
	for _, ids := range []string{`, "hash_ids": [1, 2, 3]`, `, "hash_ids": []`, ""} {
		w, err := folder(map[string][]string{"a.jsonl": lines(300, func(i int) string {
			return fmt.Sprintf(`{"timestamp": %d, "input_length": 1600, "output_length": 100%s}`, i*500, ids)
		})}).Workload(t.Context(), "a.jsonl", 2, 1, true)
		if err != nil {
			t.Fatal(err)
		}
		draws := map[float64]bool{}
		for _, q := range w.requests {
			draws[q.draw] = true
		}
		if len(draws) != len(w.requests) {
			t.Errorf("%s: %d of %d requests are drawn by themselves", ids, len(draws), len(w.requests))
		}
	}
}

// TestResultsAreNumbers: even next to peers of another sweep that carried nothing.
func TestResultsAreNumbers(t *testing.T) {
	headgate, _ := PolicyNamed("headgate")
	s := Sweep{
		Cells: []Cell{{Workload: "b2b", N: 1}}, Seeds: []int64{1}, Policies: []Policy{headgate}, Traces: sample,
		Peers: []Comparison{{Name: "b2b/1/one-speed", Seeds: []int64{1}, Outcomes: []Outcome{{Policy: "random", Peer: true, Seeds: []float64{0}}}}},
	}
	list, err := s.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	WriteTable(&out, list)
	WriteMarkdown(&out, list)
	for _, err := range []error{WritePlot(&out, list[0]), WriteSummaryPlot(&out, list), WriteJSON(&out, list)} {
		if err != nil {
			t.Error(err)
		}
	}
	if text := out.String(); strings.Contains(text, "NaN") || strings.Contains(text, "Inf") {
		t.Error(text)
	}
}

// TestCancellingEndsARun: after the first event, with almost everything still to come.
func TestCancellingEndsARun(t *testing.T) {
	w, err := sample.Workload(t.Context(), "b2b", 2, 1, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"headgate", "random"} {
		p, _ := PolicyNamed(name)
		f, err := newFleet(Cell{N: 2}, w, false)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		s := newSimulation(w, Cell{N: 2}, f, p)
		heard := s.play.Heard
		s.play.Heard = func(now float64, machine int, ev model.Event) {
			heard(now, machine, ev)
			cancel()
		}
		if _, err := s.run(ctx, w.loadMax); !errors.Is(err, context.Canceled) || s.left < len(w.requests)-10 {
			t.Errorf("%s: %v, %d of %d requests are left", name, err, s.left, len(w.requests))
		}
		if k, err := knee(ctx, w, Cell{N: 2}, p, w.guess); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v, %v", name, k, err)
		}
	}
}

// opened is told which files are opened.
type opened struct {
	fs.FS
	note func(name string)
}

func (o opened) Open(name string) (fs.File, error) {
	o.note(name)
	return o.FS.Open(name)
}

// TestCancellingEndsLoading: no line of a file is read, and none of the cells after
// it begins.
func TestCancellingEndsLoading(t *testing.T) {
	for _, name := range []string{"conv", "servegen", "azcode", "mine.jsonl", "mine.csv"} {
		dir := Sample(1)
		dir["mine.jsonl"], dir["mine.csv"] = dir["mooncake_synthetic_trace.jsonl"], dir["azure2023_code.csv"]
		ctx, cancel := context.WithCancel(t.Context())
		var files []string
		s := Sweep{
			Cells: []Cell{{Workload: name, N: 2}, {Workload: "azconv", N: 64}}, Seeds: []int64{1}, Policies: Policies, Workers: 1,
			Traces: NewTraces(opened{dir, func(name string) {
				files = append(files, name)
				cancel()
			}}),
		}
		if _, err := s.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		if len(s.Traces.files) > 0 {
			t.Errorf("%s: read all of %v", name, files)
		}
	}
}

// TestFirstWrongCellEndsASweep: twenty minutes before its complaint are too many.
func TestFirstWrongCellEndsASweep(t *testing.T) {
	s := Sweep{
		Cells: []Cell{{Workload: "a.jsonl", N: 2}, {Workload: "b2b", N: 64}}, Seeds: []int64{1}, Policies: Policies, Workers: 1,
		Traces: folder(map[string][]string{"a.jsonl": {"{}"}}),
	}
	var log bytes.Buffer
	s.Log = &log
	if _, err := s.Run(t.Context()); err == nil || err.Error() != "a.jsonl:1: no timestamp" || log.Len() > 0 {
		t.Errorf("%v, and then %s", err, log.String())
	}
}
