// SPDX-License-Identifier: Apache-2.0

//go:build mutate

package sim

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/mutation"
)

var (
	update     = flag.Bool("update", false, "write docs/simulation.md's table and the scenarios of testdata")
	only       = flag.String("rule", "", "this rule only")
	mutateSeed = flag.Int("mutate-seeds", 20000, "how many seeds a rule's absence may take to be seen")
	aloneSeeds = flag.Int("alone-seeds", 3000, "how many seeds show nothing without a rule that is harmless")
)

const (
	page       = "../../docs/simulation.md"
	tableBegin = "<!-- table of mutations -->\n"
	tableEnd   = "<!-- end of the table -->\n"
)

// TestMutations takes each rule away in turn. The checkers must notice.
func TestMutations(t *testing.T) {
	var table strings.Builder
	table.WriteString("| rule taken away | then | seen by | seeds |\n|---|---|---|---|\n")
	for _, rule := range mutation.Rules() {
		if *only != "" && rule.Name != *only {
			continue
		}
		off := rule.Off
		without(t, off...)
		if rule.Harmless != "" {
			if s, seen := find(*aloneSeeds); s > 0 {
				t.Errorf("%s is not harmless: seed %d shows %s", rule.Name, s, seen)
			}
			fmt.Fprintf(&table, "| `%s` | %s | nothing: %s | – |\n", rule.Name, rule.Means, rule.Harmless)
			continue
		}
		s, seen := find(*mutateSeed)
		if s == 0 {
			t.Errorf("%s: not seen in %d seeds", rule.Name, *mutateSeed)
			continue
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %d |\n", rule.Name, rule.Means, seen, s)
		t.Logf("%-28s %5d  %s", rule.Name, s, seen)
		if *update {
			write(t, "testdata/"+rule.Name+".txt", fmt.Sprintf("# without: %s\n%s", strings.Join(off, " "), Shrink(Draw(s))))
		}
	}
	without(t)
	if !*update || *only != "" || t.Failed() {
		return
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := strings.Cut(string(text), tableBegin)
	_, after, ok2 := strings.Cut(rest, tableEnd)
	if !ok1 || !ok2 {
		t.Fatalf("%s has no place for the table", page)
	}
	write(t, page, before+tableBegin+table.String()+tableEnd+after)
}

func without(t *testing.T, rules ...string) {
	t.Helper()
	if err := mutation.Off(rules...); err != nil {
		t.Fatal(err)
	}
}

// find is the first seed that shows something, and what.
func find(most int) (seed uint64, invariant string) {
	for s := range uint64(most) {
		if v := Run(Draw(s + 1)).Violations; len(v) > 0 {
			return s + 1, v[0].Invariant
		}
	}
	return 0, ""
}

// TestScenariosBite: each scenario fails without the rules that its first line
// names.
func TestScenariosBite(t *testing.T) {
	defer without(t)
	for _, file := range files(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		line, _, _ := strings.Cut(string(text), "\n")
		rules, ok := strings.CutPrefix(line, "# without: ")
		if !ok {
			continue
		}
		without(t, strings.Fields(rules)...)
		if len(Run(read(t, file)).Violations) == 0 {
			t.Errorf("%s shows nothing any more: find another with -run TestMutations -update", file)
		}
	}
}
