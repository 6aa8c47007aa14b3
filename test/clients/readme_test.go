// SPDX-License-Identifier: Apache-2.0

package clients_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestReadme: the table of resends in README.md is the one that is asserted.
func TestReadme(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	if table := resendTable(); !strings.Contains(string(readme), table) {
		t.Errorf("README.md does not have this table:\n%s", table)
	}
}

func resendTable() string {
	var b strings.Builder
	b.WriteString("| refusal | HTTP | x-should-retry |")
	for _, c := range sdks() {
		b.WriteString(" " + c.name + " |")
	}
	b.WriteString("\n|" + strings.Repeat("---|", 3+len(sdks())) + "\n")
	row := func(s scenario) {
		fmt.Fprintf(&b, "| `%s` | %d | %t |", s.code, s.status, s.again)
		for _, c := range sdks() {
			fmt.Fprintf(&b, " %d |", c.requests(s))
		}
		b.WriteString("\n")
	}
	last := ""
	for _, s := range scenarios() {
		if s.ends == refused && s.code != last {
			row(s)
			last = s.code
		}
	}
	return b.String()
}
