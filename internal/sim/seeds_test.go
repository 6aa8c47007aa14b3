// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
)

var (
	oneSeed  = flag.Uint64("seed", 0, "play this seed only, and print what was true")
	seeds    = flag.Int("seeds", 2000, "how many seeds TestSeeds plays, from 1")
	fresh    = flag.Int("fresh", 500, "how many it plays that nobody has chosen")
	lasting  = flag.Duration("for", 0, "play such seeds for so long instead")
	scenario = flag.String("scenario", "", "play this file only, and print what was true")
	keep     = flag.String("keep", "", "write the first plan that fails, made smaller, as this scenario")
)

var passed, failed int

// TestMain counts plans on the last line, after what the testing package has to
// say.
func TestMain(m *testing.M) {
	code := m.Run()
	if passed+failed > 0 {
		fmt.Printf("%d passed, %d failed\n", passed, failed)
	}
	os.Exit(code)
}

// TestSeeds plays plans that were drawn: the same ones each time, and fresh ones.
func TestSeeds(t *testing.T) {
	if *oneSeed != 0 {
		tell(t, Draw(*oneSeed))
		return
	}
	if *lasting > 0 {
		for end := time.Now().Add(*lasting); time.Now().Before(end); {
			play(t, rand.Uint64())
		}
		return
	}
	for s := range uint64(*seeds) {
		play(t, s+1)
	}
	for range *fresh {
		play(t, rand.Uint64())
	}
}

func play(t *testing.T, seed uint64) {
	r := Run(Draw(seed))
	if len(r.Violations) == 0 {
		passed++
		return
	}
	if failed++; failed > 10 {
		return
	}
	t.Errorf("%v\n\treplay: make sim SEED=%d", r.Violations[0], seed)
	if failed == 1 && *keep != "" {
		write(t, *keep, fmt.Sprintf("# seed %d: %v\n%s", seed, r.Violations[0], Shrink(Draw(seed))))
	}
}

// TestScenarios plays the plans of testdata: each once showed what a rule is
// for, and passes while the rule is kept.
func TestScenarios(t *testing.T) {
	if *scenario != "" {
		tell(t, read(t, *scenario))
		return
	}
	for _, file := range files(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			for _, v := range Run(read(t, file)).Violations {
				t.Error(v)
			}
		})
	}
}

func tell(t *testing.T, p *Plan) {
	t.Helper()
	t.Logf("plan:\n%s", p)
	r := Run(p)
	for _, f := range r.Facts {
		t.Log(f)
	}
	for _, v := range r.Violations {
		t.Error(v)
	}
	if t.Failed() {
		failed++
	} else {
		passed++
	}
}

func files(t *testing.T) []string {
	t.Helper()
	list, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(list) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	return list
}

func read(t *testing.T, file string) *Plan {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	p, err := Parse(string(text))
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return p
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestASeedReplaysExactly: everything that is true of a run, and the number of
// events that made it, are the same twice, and from the plan's text.
func TestASeedReplaysExactly(t *testing.T) {
	for s := range uint64(200) {
		p := Draw(s + 1)
		again, err := Parse(p.String())
		if err != nil {
			t.Fatal(err)
		}
		want := Run(p)
		for name, q := range map[string]*Plan{"the same seed": Draw(s + 1), "its text": again} {
			if got := Run(q); got.Events != want.Events || !slices.Equal(got.Facts, want.Facts) {
				t.Fatalf("seed %d: %s gives another run: %d events and %d facts, want %d and %d",
					s+1, name, got.Events, len(got.Facts), want.Events, len(want.Facts))
			}
		}
	}
}

// TestEverythingHappens: checkers that see nothing find nothing.
func TestEverythingHappens(t *testing.T) {
	seen := map[string]int{}
	for s := range uint64(1000) {
		r := Run(Draw(s + 1))
		second, late := map[string]bool{}, false
		for _, f := range r.Facts {
			word := f.What.String()
			switch f.What {
			case check.Outcome, check.Silenced:
				word += " " + f.Word
			case check.Dispatched:
				word = fmt.Sprintf("%s %d leased=%v %s", word, f.N, f.Leased, f.Word)
			case check.Delivered:
				word = fmt.Sprintf("%s %s", word, f.Bytes)
				if f.N > 1 && f.Bytes == check.LastOutput {
					second[f.Request] = true
				}
			case check.CountedLate:
				late = true
			}
			seen[strings.TrimSpace(word)]++
		}
		seen["second attempt completes"] += len(second)
		if late {
			seen["a late write"]++
		}
	}
	for _, want := range []string{
		"outcome completed", "outcome interrupted", "outcome failed", "outcome cancelled", "outcome rejected",
		"dispatched 1 leased=true", "dispatched 1 leased=false", "dispatched 2 leased=true", "dispatched 2 leased=false",
		"dispatched 2 leased=false resent", "dispatched 3 leased=true", "granted", "started", "checked", "written", "declared",
		"delivered output", "delivered last_output", "delivered error", "delivered passed_on", "fencing", "guard_died",
		"silenced cancel_ack", "silenced lease_expired", "silenced dead", "client_left", "engine_began", "engine_ended", "gateway_died", "gateway_resumed",
		"second attempt completes", "a late write",
	} {
		if seen[want] == 0 {
			t.Errorf("never seen: %s", want)
		}
	}
	if t.Failed() || testing.Verbose() {
		t.Log(seen)
	}
}
