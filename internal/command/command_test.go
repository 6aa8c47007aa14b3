// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

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

func TestCheckPassesTheExample(t *testing.T) {
	if out, err := run("check", "../../examples/headgate.yaml"); err != nil || !strings.Contains(out, ": ok: ") {
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
	if _, err := run(append(args, "--out", first, "--plots", dir)...); err != nil {
		t.Fatal(err)
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
	for _, bad := range [][]string{{"--policy", "nobody"}, {"--workload", "nothing"}, {"--model", "none"}, {"--speed", "three"}, {"--against", dir}, {"--cell", "b2b/2"}, {"--cell", "b2b/x/one"}, {"--cell", "b2b/0/one"}} {
		if _, err := run(append(args, bad...)...); err == nil {
			t.Errorf("%v: no complaint", bad)
		}
	}
}

func TestLabReplaysATraceOfOnesOwn(t *testing.T) {
	dir := t.TempDir()
	var trace strings.Builder
	for i := range 600 {
		fmt.Fprintf(&trace, `{"timestamp": %d, "input_length": %d, "output_length": 50, "hash_ids": [0, %d, %d]}`+"\n", i*500, 1400+i%100, 1+i%7, 8+i)
	}
	if err := os.WriteFile(filepath.Join(dir, "mine.jsonl"), []byte(trace.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := run("lab", "--traces", dir, "--workload", "mine.jsonl", "--engines", "1,2", "--speed", "one", "--policy", "headgate,lpwl", "--engine", "8b-h100")
	if err != nil || !strings.Contains(out, "mine.jsonl/2/one-speed/8b-h100") {
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
