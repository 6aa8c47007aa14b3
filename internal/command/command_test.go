// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/plugins/standard"
)

// run executes a command line in this process.
func run(args ...string) (string, error) {
	var out bytes.Buffer
	root := newRoot(standard.Plugins)
	root.SetOut(&out)
	root.SetArgs(args)
	err := root.Execute()
	return out.String(), err
}

func TestCheckTellsAllProblemsWithTheirPlaces(t *testing.T) {
	file := filepath.Join(t.TempDir(), "headgate.yaml")
	if err := os.WriteFile(file, []byte("listeners: [{adress: 127.0.0.1:1}]\npools:\n  q: {timeouts: {idle: 30}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := run("check", file)
	if err == nil {
		t.Fatal("a bad file passed")
	}
	for _, want := range []string{":1:14: listeners[0].adress", "did you mean address?", ":3:24: pools.q.timeouts.idle"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("lacks %q:\n%v", want, err)
		}
	}
}

// TestCheckTellsWhatIsWrongWithPluginsToo: at once with everything else, all of it,
// each at its place, on lines that editors can follow, and then how many there are.
func TestCheckTellsWhatIsWrongWithPluginsToo(t *testing.T) {
	file := filepath.Join(t.TempDir(), "headgate.yaml")
	yaml := `pools:
  p:
    discovery: {static: [{url: "http://a"}]}
    flow: {max_concurrency: many}
    routing:
      plugins:
        - {plugin: kost}
        - {plugin: cost, options: {adapterLoad: 1}}
        - {plugin: cost, weight: -1}
        - {plugin: label, weight: 2}
        - {plugin: label, options: {in: {zone: eu}}}
        - {plugin: idlest, options: {within: 5ms}}
        - {plugin: random}
        - {plugin: idlest}
      fallbacks:
        - {plugins: [{plugin: label}, {plugin: x}]}
        - {plugins: [{plugin: label}]}
        - {profile: fast}
  "No 2":
    discovery: {static: [{url: "http://a"}]}
    routing: {plugins: [{plugin: cozt}]}
  r:
    discovery: {static: [{url: "http://a"}]}
    routing: {plugins: [{plugin: cost}], fallbacks: [{profile: weighted}]}
routes: [{backends: [{pool: p}, {pool: "No 2"}, {pool: r}]}]
`
	if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	const there = "there are cost, idlest, kvcache, label, leastload, loraaffinity, prefixcache, queuedepth, random, session"
	want := `4:29: pools.p.flow.max_concurrency: "many" is not auto or a whole number from 1 to 1000000
7:20: pools.p.routing.plugins[0].plugin: there is no plugin "kost"; ` + there + `
8:35: pools.p.routing.plugins[1].options: adapterLoad 1: must be a duration such as 1s or 500ms
9:34: pools.p.routing.plugins[2].weight: -1 is not above 0 and at most 1e+09
10:35: pools.p.routing.plugins[3].weight: has no effect: label does not score
11:36: pools.p.routing.plugins[4].options: option in: must be a list of texts, not a text
12:37: pools.p.routing.plugins[5].options: option within: must be a number, not a text
14:20: pools.p.routing.plugins[7].plugin: idlest picks, and plugins[6] does already: keep one
16:48: pools.p.routing.fallbacks[0].plugins[1].plugin: there is no plugin "x"; ` + there + `
17:12: pools.p.routing.fallbacks[1].plugins: a profile needs a plugin that scores or picks
18:21: pools.p.routing.fallbacks[2].profile: must be cost, weighted or least_load, not "fast"
19:3: pools."No 2": the name is not 1 to 63 lower-case letters, digits or hyphens
21:34: pools."No 2".routing.plugins[0].plugin: there is no plugin "cozt"; ` + there + `
24:54: pools.r.routing.fallbacks[0]: is never used: nothing filters before it
`
	want = file + ":" + strings.ReplaceAll(strings.TrimSpace(want), "\n", "\n"+file+":") + "\nheadgate: 14 problems\n"
	for _, args := range [][]string{{"check", file}, {"serve", "--config", file}} {
		var errs bytes.Buffer
		if code := Run(t.Context(), standard.Plugins, args, &errs); code != 1 {
			t.Errorf("%v: exit %d", args, code)
		}
		if diff := cmp.Diff(want, errs.String()); diff != "" {
			t.Errorf("%v (-want +got):\n%s", args, diff)
		}
	}
}

// Problems are counted, and those that are no file's are the program's.
func TestProblemsAreCounted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "headgate.yaml")
	for yaml, want := range map[string]string{
		"x: 1\n":                       "headgate: 1 problem\n",
		strings.Repeat("x: 1\n", 1200): "headgate: more than 1000 problems\n",
	} {
		if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
			t.Fatal(err)
		}
		var errs bytes.Buffer
		Run(t.Context(), standard.Plugins, []string{"check", file}, &errs)
		if got := errs.String(); !strings.HasPrefix(got, file+":1:1: ") || !strings.HasSuffix(got, want) {
			t.Errorf("got %.200s, want %s at its end", got, want)
		}
	}
	var errs bytes.Buffer
	Run(t.Context(), standard.Plugins, []string{"serve", "--upstream", "ftp://x"}, &errs)
	if want := "headgate: upstream[0]: must begin with http:// or https://\n"; errs.String() != want {
		t.Errorf("got %s, want %s", &errs, want)
	}
}

func TestCheckSaysThatNothingIsServed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "headgate.yaml")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := run("check", file); err != nil || out != file+": ok, but nothing is served: there are no pools\n" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestCheckPassesTheExample(t *testing.T) {
	if out, err := run("check", "../../examples/headgate.yaml"); err != nil || !strings.Contains(out, ": ok: 1 listener, 1 route, 1 pool\n") {
		t.Errorf("%q, %v", out, err)
	}
}

func TestServeNeedsEngines(t *testing.T) {
	if _, err := run("serve"); err == nil || !strings.Contains(err.Error(), "--upstream") {
		t.Errorf("got %v", err)
	}
	if _, err := run("serve", "--upstream", "ftp://x"); err == nil || !strings.Contains(err.Error(), "http") {
		t.Errorf("got %v", err)
	}
}

func TestDemoOnceKeepsItsPromises(t *testing.T) {
	if out, err := run("demo", "--once"); err != nil || !strings.Contains(out, "All promises were kept.") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestDemoNoticesABrokenGate builds a headgate whose gate can be taken away, and
// takes it away: the demo must fail. Without the mutation the same build passes.
func TestDemoNoticesABrokenGate(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "headgate")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-tags", "mutate", "-o", binary, "../../cmd/headgate").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	demo := func(mutation string) (string, int) {
		cmd := exec.CommandContext(t.Context(), binary, "demo", "--once")
		cmd.Env = append(os.Environ(), "HEADGATE_MUTATE="+mutation)
		out, err := cmd.CombinedOutput()
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return string(out), exit.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		return string(out), 0
	}
	if out, code := demo(""); code != 0 {
		t.Errorf("whole gate: exit %d\n%s", code, out)
	}
	if out, code := demo("no_gate"); code != 1 || !strings.Contains(out, "violation: I2") {
		t.Errorf("no gate: exit %d, want 1 and a violation of I2\n%s", code, out)
	}
}

// A trace of this version replays; one in which something was done that nobody
// decided does not.
func TestReplayComparesDecisionsWithWhatWasDone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace")
	lines := `{"flight":1,"request_id":"req_1","spec":{"ID":"req_1"}}
{"flight":1,"request_id":"req_1","event":"Placed","with":{"Endpoint":"a"}}
{"flight":1,"request_id":"req_1","effect":"Dispatch","with":{"N":1,"Endpoint":"a"}}
`
	for _, c := range []struct{ more, want string }{
		{"", "under way: req_1\n1 requests, 1 events, 1 effects, 1 under way, 0 differences\n"},
		{`{"flight":1,"request_id":"req_1","effect":"Commit","with":{"N":1}}` + "\n", "1 differences"},
	} {
		if err := os.WriteFile(file, []byte(lines+c.more), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := run("replay", file)
		if !strings.Contains(out, c.want) || (err != nil) != (c.more != "") {
			t.Errorf("%v\n%s, want %q", err, out, c.want)
		}
	}
}

func TestLabComparesAndRanks(t *testing.T) {
	dir := t.TempDir()
	first := filepath.Join(dir, "first.json")
	args := []string{"lab", "--workload", "codegen", "--engines", "2", "--speed", "one", "--cell", "b2b/2/two", "--policy", "headgate,lpwl,round-robin", "--seed", "1"}
	table := filepath.Join(dir, "table.md")
	if _, err := run(append(args, "--out", first, "--plots", dir, "--table", table)...); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(table); err != nil || !strings.Contains(string(text), "| all | headgate | 2 |") || !strings.Contains(string(text), "\n| b2b | 2 | two | ") {
		t.Errorf("%v\n%s", err, text)
	}
	for _, name := range []string{first, filepath.Join(dir, "summary.svg"), filepath.Join(dir, "codegen-2-one-speed.svg"), filepath.Join(dir, "b2b-2-two-speed.svg")} {
		if s, err := os.Stat(name); err != nil || s.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	out, err := run(append(args, "--model", "alternating", "--against", first)...)
	if err != nil || !strings.Contains(out, "rank correlation 1.00") {
		t.Errorf("%v\n%s", err, out)
	}
	// Peers that are not played again come to the same.
	second := filepath.Join(dir, "second.json")
	if _, err := run(append(args, "--peers", first, "--out", second)...); err != nil {
		t.Fatal(err)
	}
	was, _ := readSweep(first)
	if is, err := readSweep(second); err != nil || !reflect.DeepEqual(is, was) {
		t.Errorf("%v\nplayed %+v\ntaken  %+v", err, was, is)
	}
	for _, bad := range [][]string{{"--peers", first, "--seed", "2"}, {"--peers", dir}, {"--policy", "nobody"}, {"--workload", "nothing"}, {"--model", "none"}, {"--speed", "three"}, {"--against", dir}, {"--cell", "b2b/2"}, {"--cell", "b2b/x/one"}, {"--cell", "b2b/0/one"}} {
		if _, err := run(append(args, bad...)...); err == nil {
			t.Errorf("%v: no complaint", bad)
		}
	}
}

func TestLabReplaysATraceOfOnesOwn(t *testing.T) {
	dir := t.TempDir()
	var trace strings.Builder
	for i := range 120 {
		fmt.Fprintf(&trace, `{"timestamp": %d, "input_length": %d, "output_length": 50, "hash_ids": [0, %d, %d]}`+"\n", i*500, 1400+i%100, 1+i%7, 8+i)
	}
	if err := os.WriteFile(filepath.Join(dir, "mine.jsonl"), []byte(trace.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := run("lab", "--traces", dir, "--workload", "mine.jsonl", "--engines", "1", "--speed", "one", "--policy", "headgate,lpwl", "--engine", "8b-a100")
	if err != nil || !strings.Contains(out, "mine.jsonl/1/one-speed/8b-a100") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestOverloadNeedsEngines(t *testing.T) {
	for _, args := range [][]string{{"--engines", "0"}, {"--engine", "abacus"}} {
		if out, err := run(append([]string{"lab", "overload"}, args...)...); err == nil {
			t.Errorf("%v printed %s", args, out)
		}
	}
}
