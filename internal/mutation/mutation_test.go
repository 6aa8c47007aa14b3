// SPDX-License-Identifier: Apache-2.0

package mutation_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestOneListOfRules: both builds know the rules of list.txt, in its order.
func TestOneListOfRules(t *testing.T) {
	var want []string
	for line := range strings.Lines(read(t, "list.txt")) {
		if name, means, _ := strings.Cut(line, " "); name != "#" && strings.TrimSpace(name) != "" && !strings.Contains(means, ". both: ") {
			want = append(want, goName(name))
		}
	}
	for file, pattern := range map[string]string{
		"rules_off.go": `(?m)^\t(\w+) += false$`,
		"rules_on.go":  `(?m)^\t(\w+) +bool$`,
	} {
		var got []string
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(read(t, file), -1) {
			got = append(got, m[1])
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s has %v, want %v", file, got, want)
		}
	}
}

func goName(name string) string {
	var out strings.Builder
	for word := range strings.SplitSeq(name, "_") {
		if word == "ttl" || word == "id" {
			word = strings.ToUpper(word)
		}
		out.WriteString(strings.ToUpper(word[:1]) + word[1:])
	}
	return out.String()
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
