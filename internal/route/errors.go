// SPDX-License-Identifier: Apache-2.0

package route

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/headgate/headgate/inference"
)

// Bounds on the work and the words that an unknown model costs. Anybody may
// send one.
const (
	shownMax     = 96  // bytes of a name in a message: a message has four names and at most 512 bytes
	comparedMax  = 64  // runes of a name that is compared
	candidateMax = 128 // names that are compared
	suggestMax   = 3
)

func notFound(path string) *inference.Error {
	return inference.Errorf(inference.NotFound, "nothing is served at %s on this host", quote(path, shownMax))
}

// modelNotFound names the models nearest to the one asked for among those that
// the request could have had.
func (t *Table) modelNotFound(host string, q Query) *inference.Error {
	message := "the model " + quote(q.Model, shownMax) + " is not served here"
	for i, name := range t.nearest(host, q) {
		if i == 0 {
			message += "; did you mean "
		} else {
			message = strings.TrimSuffix(message, "?") + ", "
		}
		message += quote(name, shownMax) + "?"
	}
	return inference.Errorf(inference.ModelNotFound, "%s", message)
}

func (t *Table) nearest(host string, q Query) []string {
	type candidate struct {
		name string
		far  int
	}
	var near []candidate
	asked := fold(q.Model)
	if len(asked) > comparedMax {
		return nil
	}
	compared := 0
	compare := func(name string) {
		known := fold(name)
		if len(known) > comparedMax || compared == candidateMax || q.May != nil && !q.May(name) {
			return
		}
		compared++
		limit := max(2, min(len(asked), len(known))/2)
		if max(len(asked), len(known))-min(len(asked), len(known)) > limit {
			return
		}
		if far := distance(asked, known); far <= limit {
			near = append(near, candidate{name, far})
		}
	}
	for i := range t.rules {
		r := &t.rules[i]
		if r.model.kind != modelExact {
			break // exact names come first
		}
		if r.holds(host, q) {
			compare(r.model.text)
		}
	}
	if q.Listed != nil && compared < candidateMax {
		for _, name := range q.Listed() {
			compare(name)
		}
	}
	slices.SortStableFunc(near, func(a, b candidate) int { return cmp.Compare(a.far, b.far) })
	var names []string
	for _, c := range near {
		if len(names) < suggestMax && !slices.Contains(names, c.name) {
			names = append(names, c.name)
		}
	}
	return names
}

// fold is a name as people confuse it: without letter case.
func fold(name string) []rune {
	if len(name) > comparedMax*utf8.UTFMax {
		name = name[:comparedMax*utf8.UTFMax]
	}
	return []rune(strings.ToLower(name))
}

// distance counts the runes to insert, delete or replace to turn a into b, of
// which neither is longer than comparedMax.
func distance(a, b []rune) int {
	var cells [comparedMax + 1]int
	row := cells[:len(b)+1]
	for j := range row {
		row[j] = j
	}
	for i, x := range a {
		diagonal := row[0]
		row[0] = i + 1
		for j, y := range b {
			change := diagonal
			if x != y {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

// quote shows text that a stranger chose: quoted, printable, and cut to about
// max bytes.
func quote(text string, max int) string {
	cut := ""
	if len(text) > max {
		text, cut = text[:max], "…"
	}
	for {
		q := strconv.Quote(strings.ToValidUTF8(text, "\uFFFD"))
		if len(q)+len(cut) <= max {
			return q + cut
		}
		_, n := utf8.DecodeLastRuneInString(text)
		text, cut = text[:len(text)-n], "…"
	}
}
