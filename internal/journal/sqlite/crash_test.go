// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/journal"
)

// TestCrash kills a gateway at each fault point, under load, and reads what it
// left: nothing acknowledged is lost, first_delta_sent=false is the truth where
// it is promised (I9), every record gets its outcome, every key its right
// answer.
func TestCrash(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and runs a program many times")
	}
	program := filepath.Join(t.TempDir(), "crash")
	build := exec.CommandContext(t.Context(), "go", "build", "-tags", "faultpoint", "-o", program, "./testdata/crash")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, kind := range []string{"received", "dispatched", "first_delta", "fencing", "fenced", "ended", "finished", "reopened"} {
		for _, stage := range []string{"queue", "write", "commit", "committed"} {
			if kind == "reopened" && (stage == "queue" || stage == "write") {
				continue // only the transaction makes a claim a reopening
			}
			for _, nth := range []int{1, 23} {
				if kind == "reopened" {
					nth = (nth + 1) / 3
				}
				durability := []string{"keyed", "strict"}[nth%2]
				if nth == 23 {
					durability = "keyed"
				}
				point := fmt.Sprintf("%s:%s#%d", kind, stage, max(nth, 1))
				t.Run(point, func(t *testing.T) { crashAt(t, program, point, durability) })
			}
		}
	}
	t.Run("none", func(t *testing.T) { crashAt(t, program, "", "relaxed") })
}

// heard is what a dead gateway said.
type heard struct {
	received, begun, delta, finished map[string]bool
	generation                       uint64
	closed                           bool
}

func crashAt(t *testing.T, program, point, durability string) {
	path := filepath.Join(t.TempDir(), "j.db")
	h := run(t, program, point, path, durability)
	if h.closed != (point == "") {
		t.Fatalf("closed: %v", h.closed)
	}
	j := newJournal(t, path)
	defer j.Close()
	if j.Generation() <= h.generation {
		t.Errorf("generation %d after %d", j.Generation(), h.generation)
	}
	page, err := j.List(t.Context(), journal.Filter{Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	kept := map[string]*journal.Record{}
	for _, r := range page.Records {
		name := strings.TrimPrefix(string(r.RequestID), "req_")
		kept[name] = r
		if !r.Terminal() {
			t.Errorf("%s has no outcome", name)
		}
		if r.FirstDeltaDurable && !r.FirstDeltaSent && h.delta[name] {
			t.Errorf("I9: %s: the client has a delta and the journal says it has none", name)
		}
		if r.Outcome == "interrupted" && !r.FirstDeltaSent {
			t.Errorf("%s is interrupted without a delta", name)
		}
	}
	for name := range h.begun {
		if kept[name] == nil {
			t.Fatalf("%s was begun and is lost", name)
		}
		h.repeat(t, j, name, kept[name])
	}
	for name := range h.received {
		if kept[name] == nil {
			t.Errorf("%s was received, strictly, and is lost", name)
		}
	}
	for name := range h.finished {
		if r := kept[name]; r == nil || r.Outcome != "completed" {
			t.Errorf("%s was finished and is %+v", name, r)
		}
	}
}

// repeat sends a key again.
func (h *heard) repeat(t *testing.T, j *journal.Journal, name string, r *journal.Record) {
	d, err := j.Begin(t.Context(), journal.Claim{Request: inference.RequestID("req_again_" + name), Key: name,
		Digest: journal.Digest([]byte(name)), Arrival: &journal.Arrival{Tenant: "t"}})
	if err != nil {
		t.Fatal(err)
	}
	if d.Record.RequestID != r.RequestID {
		t.Errorf("%s is now %s", name, d.Record.RequestID)
	}
	var want journal.KeyState
	switch {
	case r.Outcome == "completed":
		want = journal.KeyReplay
	case r.FirstDeltaSent:
		want = journal.KeyInterrupted
	case r.FirstDeltaUnproved && r.Keyed:
		want = journal.KeyInterrupted
	default:
		want = journal.KeyReopened
	}
	if d.State != want {
		t.Errorf("repeat of %s (%s, first delta %v) is %s, want %s", name, r.Outcome, r.FirstDeltaSent, d.State, want)
	}
	if h.delta[name] && d.Runs() {
		t.Errorf("I2: %s had a delta and runs again", name)
	}
	if d.State == journal.KeyReplay && string(d.Answer.Body) != name {
		t.Errorf("replay of %s is %q", name, d.Answer.Body)
	}
}

// run runs the program until it ends and returns what it said.
func run(t *testing.T, program, point, path, durability string) *heard {
	cmd := exec.CommandContext(t.Context(), program, path, durability)
	cmd.Env = append(os.Environ(), "HEADGATE_FAULTPOINT="+point)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h := &heard{received: map[string]bool{}, begun: map[string]bool{}, delta: map[string]bool{}, finished: map[string]bool{}}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		word, name, _ := strings.Cut(lines.Text(), " ")
		switch word {
		case "received":
			h.received[name] = true
		case "begun":
			h.begun[name] = true
		case "delta":
			h.delta[name] = true
		case "finished":
			h.finished[name] = true
		case "closed":
			h.closed = true
		case "generation":
			fmt.Sscan(name, &h.generation)
		}
	}
	err = cmd.Wait()
	if point == "" {
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || !exit.Sys().(syscall.WaitStatus).Signaled() || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the program was not killed at %s: %v", point, err)
	}
	return h
}
