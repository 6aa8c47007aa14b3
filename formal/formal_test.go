// SPDX-License-Identifier: Apache-2.0

// Package formal_test checks the models of this folder with spin: each run of
// runs.txt and each mutation of mutations.txt must end as its stanza says.
//
//	go test ./formal                the quick ones
//	go test ./formal -whole         all of them, and docs/formal.md against the results
//	go test ./formal -whole -update write the tables of docs/formal.md
//	formal/trail.sh NAME            the events of one counterexample
package formal_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var (
	whole  = flag.Bool("whole", false, "check everything, not only what is marked quick")
	update = flag.Bool("update", false, "with -whole: write the tables of docs/formal.md")
	trail  = flag.String("trail", "", "print the events of this counterexample")
)

const page = "../docs/formal.md"

// A run is one stanza.
type run struct {
	name     string
	says     string // or the rule that is broken
	why      string // of a harmless mutation
	model    string
	defines  []string
	liveness string // the claim, if it is one about what must happen
	expect   string // holds, witness, limit CLAIM, break CLAIM, harmless
	quick    bool
	mutation bool
}

// A result is what spin found.
type result struct {
	claim  string // the one that is violated, "witness", or "" if none is
	states string
	events []string // of the counterexample, without the violation
}

// want is the claim that must be violated.
func (r *run) want() string {
	_, claim, ok := strings.Cut(r.expect, " ")
	if !ok && r.expect == "witness" {
		return r.expect
	}
	return claim
}

func TestModels(t *testing.T) {
	if raced() {
		t.Skip("nothing here is concurrent Go")
	}
	install(t)
	runs := append(stanzas(t, "runs.txt"), stanzas(t, "mutations.txt")...)
	var mu sync.Mutex
	results := map[string]result{}
	t.Run("all", func(t *testing.T) {
		for _, r := range runs {
			if !*whole && !r.quick {
				continue
			}
			t.Run(r.name, func(t *testing.T) {
				t.Parallel()
				start := time.Now()
				found := check(t, r)
				if found.claim != r.want() {
					t.Errorf("violated: %q, want %q (%s)\n%s", found.claim, r.want(), r.expect, strings.Join(found.events, "\n"))
				}
				t.Logf("%-16s %10s states, %2d events, %s", r.expect, found.states, len(found.events), time.Since(start).Round(time.Second/10))
				mu.Lock()
				defer mu.Unlock()
				results[r.name] = found
			})
		}
	})
	switch {
	case t.Failed():
	case *update && len(results) == len(runs): // not with -run
		write(t, runs, results)
	case *whole:
		compare(t, runs, results)
	}
}

// Every switch of the models has its stanza, and every stanza its switch.
func TestListsAreComplete(t *testing.T) {
	used := map[string]bool{}
	for _, r := range append(stanzas(t, "runs.txt"), stanzas(t, "mutations.txt")...) {
		for _, d := range r.defines {
			used[r.model+" "+d] = true
		}
		switch kind, claim, _ := strings.Cut(r.expect, " "); kind {
		case "holds", "witness", "harmless":
		case "limit", "break":
			if claim == "" {
				t.Errorf("%s: expect %s names no claim", r.name, kind)
			}
		default:
			t.Errorf("%s: expect is %q", r.name, r.expect)
		}
		if r.mutation && (r.expect == "harmless") != (r.why != "") {
			t.Errorf("%s: a harmless mutation says why, and no other", r.name)
		}
	}
	switches := regexp.MustCompile(`\b(M|WITNESS)_[A-Z0-9_]+\b`)
	for _, model := range []string{"lease", "keyed", "takeover", "transfer"} {
		text := read(t, model+".pml")
		declared := map[string]bool{}
		for line := range strings.SplitSeq(text, "\n") {
			if !strings.HasPrefix(line, "#") {
				continue
			}
			for _, name := range switches.FindAllString(line, -1) {
				declared[name] = true
				if !used[model+" "+name] && !strings.HasPrefix(line, "#define") && !strings.Contains(text, "#define "+name+"\n") {
					t.Errorf("%s.pml has %s, which no stanza defines", model, name)
				}
			}
		}
		for u := range used {
			if m, name, _ := strings.Cut(u, " "); m == model && switches.MatchString(name) && !declared[name] {
				t.Errorf("a stanza defines %s, which %s.pml does not have", name, model)
			}
		}
	}
}

func TestTrail(t *testing.T) {
	if *trail == "" {
		t.Skip("no -trail")
	}
	install(t)
	for _, r := range append(stanzas(t, "runs.txt"), stanzas(t, "mutations.txt")...) {
		if r.name != *trail {
			continue
		}
		found := check(t, r)
		fmt.Printf("# %s: %s\n", r.name, r.says)
		for _, e := range found.events {
			fmt.Println(e)
		}
		fmt.Printf("# violated: %s\n", found.claim)
		return
	}
	t.Fatalf("no run or mutation is called %q", *trail)
}

// stanzas reads runs.txt or mutations.txt.
func stanzas(t *testing.T, file string) []run {
	t.Helper()
	var runs []run
	seen := map[string]bool{}
	for i, line := range strings.Split(read(t, file), "\n") {
		if line == "" || line[0] == '#' {
			continue
		}
		if line[0] != ' ' {
			if seen[line] {
				t.Fatalf("%s:%d: %s is there twice", file, i+1, line)
			}
			seen[line] = true
			runs = append(runs, run{name: line, mutation: file == "mutations.txt"})
			continue
		}
		r := &runs[len(runs)-1]
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		value = strings.TrimSpace(value)
		switch key {
		case "says", "rule":
			r.says = value
		case "why":
			r.why = value
		case "model":
			words := strings.Fields(value)
			r.model, r.defines = words[0], words[1:]
			if r.mutation {
				r.defines = append(r.defines, "M_"+strings.ToUpper(r.name))
			}
		case "liveness":
			r.liveness = value
		case "expect":
			r.expect = value
		case "quick":
			r.quick = true
		default:
			t.Fatalf("%s:%d: unknown property %q", file, i+1, key)
		}
	}
	return runs
}

var (
	statesPattern = regexp.MustCompile(`(?m)^\s*(\S+) states, stored`)
	errorsPattern = regexp.MustCompile(`errors: (\d+)`)
	ownWords      = regexp.MustCompile(`(?i)^(spin:|warning|ltl |never claim)`)
)

// check lets spin write a verifier for one run and runs it. Safety is searched
// breadth first, so that a counterexample is a shortest one.
func check(t *testing.T, r run) result {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "m.pml"), []byte(read(t, r.model+".pml")), 0o600); err != nil {
		t.Fatal(err)
	}
	defines := make([]string, len(r.defines))
	for i, d := range r.defines {
		defines[i] = "-D" + d
	}
	// Most searches are shorter than an optimised build of them would take.
	cc := []string{"-w", "-O0", "-DCOLLAPSE", "-DMEMLIM=6000", "-o", "pan", "pan.c"}
	pan := []string{"-E", "-m2000000"}
	if r.liveness != "" {
		cc = append(cc, "-DNFAIR=4")
		pan = append(pan, "-a", "-f", "-N", r.liveness)
	} else {
		cc = append(cc, "-DSAFETY", "-DBFS", "-DNOCLAIM")
	}
	command(t, dir, "spin", append(append([]string{"-a"}, defines...), "m.pml")...)
	command(t, dir, "gcc", cc...)
	out := command(t, dir, "./pan", pan...)
	if r.liveness != "" && r.want() != "" {
		// The first cycle that is found is long. A lower ceiling finds a shorter one.
		for depth := 100; depth < 10000; depth += depth / 2 {
			if again := command(t, dir, "./pan", append(pan, fmt.Sprintf("-m%d", depth))...); strings.Contains(again, "errors: 1") {
				out = again
				break
			}
		}
	}

	failed := errorsPattern.FindStringSubmatch(out)
	stored := statesPattern.FindStringSubmatch(out)
	if failed == nil || stored == nil {
		t.Fatalf("pan did not finish:\n%s", out)
	}
	found := result{states: count(stored[1])}
	if failed[1] == "0" {
		for _, short := range []string{"Search not completed", "too small", "out of memory", "MEMLIM"} {
			if strings.Contains(out, short) {
				t.Fatalf("the search was not exhaustive:\n%s", out)
			}
		}
		return found
	}

	steps := command(t, dir, "spin", append(append([]string{"-t", "-T"}, defines...), "m.pml")...)
	for line := range strings.Lines(steps) {
		line = strings.TrimSpace(line)
		if says, ok := strings.CutPrefix(line, "violated: "); ok {
			found.claim, _, _ = strings.Cut(says, " ")
			return found
		}
		if strings.HasPrefix(line, "witness: ") {
			found.claim = "witness"
			return found
		}
		if strings.HasPrefix(line, "spin: trail ends") {
			break
		}
		// Events come from the model; spin has things to say of its own, such as
		// that a trail is not newer than its model when both took no second.
		if line != "" && !ownWords.MatchString(line) {
			found.events = append(found.events, line)
		}
	}
	found.claim = "?"
	if r.liveness != "" && strings.Contains(out, "acceptance cycle") {
		found.claim = r.liveness
	}
	return found
}

// count writes 1.2829019e+07 as 12829019.
func count(states string) string {
	var n float64
	if _, err := fmt.Sscan(states, &n); err != nil {
		return states
	}
	return fmt.Sprintf("%.0f", n)
}

// command runs a program and returns what it prints. A counterexample is not a
// failure of the program.
func command(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil && (name == "gcc" || ctx.Err() != nil) {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out.String())
	}
	if strings.Contains(out.String(), "syntax error") {
		t.Fatalf("%s %s:\n%s", name, strings.Join(args, " "), out.String())
	}
	return out.String()
}

// A table of docs/formal.md.
type table struct {
	name, head string
	row        func(r run, found result) string // "" if it has none
}

func tables() []table {
	return []table{
		{"runs", "| run | shows | model | expected | states |\n|---|---|---|---|---|\n", func(r run, found result) string {
			if r.mutation || r.expect == "witness" {
				return ""
			}
			return fmt.Sprintf("| `%s`%s | %s | %s | %s | %s |\n", r.name, star(r), r.says, built(r), r.expect, found.states)
		}},
		{"witnesses", "| witness | model | events |\n|---|---|---|\n", func(r run, found result) string {
			if r.expect != "witness" {
				return ""
			}
			return fmt.Sprintf("| %s%s | %s | %d |\n", r.says, star(r), built(r), len(found.events))
		}},
		{"mutations", "| mutation | breaks | model | result | events |\n|---|---|---|---|---|\n", func(r run, found result) string {
			if !r.mutation || r.want() == "" {
				return ""
			}
			return fmt.Sprintf("| `%s`%s | %s | %s | %s | %d |\n", r.name, star(r), r.says, built(r), r.want(), len(found.events))
		}},
		{"harmless", "| mutation | breaks | model | states | why it holds |\n|---|---|---|---|---|\n", func(r run, found result) string {
			if r.expect != "harmless" {
				return ""
			}
			return fmt.Sprintf("| `%s` | %s | %s | %s | %s |\n", r.name, r.says, built(r), found.states, r.why)
		}},
	}
}

// compare wants the row of each result in the page.
func compare(t *testing.T, runs []run, results map[string]result) {
	t.Helper()
	text := read(t, page)
	for _, r := range runs {
		found, ok := results[r.name]
		for _, table := range tables() {
			if row := table.row(r, found); ok && !strings.Contains(text, row) {
				t.Errorf("%s lacks this row (go test ./formal -whole -update writes it):\n%s", page, row)
			}
		}
	}
}

func write(t *testing.T, runs []run, results map[string]result) {
	t.Helper()
	text := read(t, page)
	for _, table := range tables() {
		begin, end := "<!-- "+table.name+" -->\n", "<!-- /"+table.name+" -->\n"
		before, rest, ok := strings.Cut(text, begin)
		_, after, closed := strings.Cut(rest, end)
		if !ok || !closed {
			t.Fatalf("%s has no place for the table %q", page, table.name)
		}
		rows := table.head
		for _, r := range runs {
			rows += table.row(r, results[r.name])
		}
		text = before + begin + rows + end + after
	}
	if err := os.WriteFile(page, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func star(r run) string {
	if r.quick {
		return " *"
	}
	return ""
}

// built is a run's model and parts, without the switch that its name says.
func built(r run) string {
	words := []string{r.model}
	for _, d := range r.defines {
		if d != "M_"+strings.ToUpper(r.name) && !strings.HasPrefix(d, "WITNESS_") {
			words = append(words, d)
		}
	}
	return strings.Join(words, " ")
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

var installed = sync.OnceValues(func() ([]byte, error) {
	return exec.Command("bash", "-c", ". ../test/deps/lib.sh; apt_need spin=spin gcc=gcc").CombinedOutput()
})

func install(t *testing.T) {
	t.Helper()
	if out, err := installed(); err != nil {
		t.Fatalf("spin and gcc: %v\n%s", err, out)
	}
}

// raced: under the race detector everything here would only be done again.
func raced() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.ContainsFunc(info.Settings, func(s debug.BuildSetting) bool { return s.Key == "-race" && s.Value == "true" })
}
