// SPDX-License-Identifier: Apache-2.0

package route

import (
	"cmp"
	"iter"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/headgate/headgate/inference"
)

// Bounds on the work and the words that an unknown model costs. Anybody may
// send one.
const (
	shownMax     = 96     // bytes of a name in a message: a message has four names and at most 512 bytes
	comparedMax  = 64     // runes of a name that is compared
	candidateMax = 256    // names that are compared
	lookedMax    = 10_000 // that are looked at, to compare those of about the right length
	takenMax     = 16     // near ones of which it is found out whether a request for them would be taken
	prefixMin    = 3      // runes in common that make a longer name a near one
	suggestMax   = 3
)

func notFound(path string) *inference.Error {
	return inference.Errorf(inference.NotFound, "nothing is served at %s on this host", quote(path, shownMax))
}

// modelNotFound names the models nearest to the one asked for among those that
// the request could have had.
func (t *Table) modelNotFound(host string, q Query) *inference.Error {
	message := "the model " + quote(q.Model, shownMax) + " is not served here"
	if q.Brief {
		return inference.Errorf(inference.ModelNotFound, "%s", message)
	}
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

// ModelNotFound says that a model is not known, and names the nearest that are.
func ModelNotFound(name string, known iter.Seq[string]) *inference.Error {
	return (&Table{}).modelNotFound("", Query{Model: name, Listed: known})
}

func (t *Table) nearest(host string, q Query) []string {
	type candidate struct {
		name   string
		far    int
		listed bool
	}
	var near []candidate
	asked := fold(q.Model)
	if len(asked) > comparedMax {
		return nil
	}
	looked, compared := 0, 0
	// compare returns false when enough was done.
	compare := func(name string, listed bool) bool {
		if looked++; looked > lookedMax || compared == candidateMax {
			return false
		}
		known := fold(name)
		if len(known) > comparedMax || q.May != nil && !q.May(name) {
			return true
		}
		short, long := asked, known
		if len(short) > len(long) {
			short, long = long, short
		}
		limit, more := max(2, len(short)/2), len(long)-len(short)
		// A family's name and a member's, llama and llama-70b, are near however long
		// the rest is.
		if len(short) >= prefixMin && slices.Equal(short, long[:len(short)]) {
			compared++
			near = append(near, candidate{name, more, listed})
			return true
		}
		if more > limit {
			return true
		}
		compared++
		if far := distance(asked, known); far <= limit {
			near = append(near, candidate{name, far, listed})
		}
		return true
	}
	for i := range t.rules {
		r := &t.rules[i]
		if r.model.kind != modelExact {
			break // exact names come first
		}
		if r.holds(host, q) {
			compare(r.model.text, false)
		}
	}
	if q.Listed != nil {
		for name := range q.Listed {
			if !compare(name, true) {
				break
			}
		}
	}
	slices.SortStableFunc(near, func(a, b candidate) int { return cmp.Compare(a.far, b.far) })
	var names []string
	for _, c := range near[:min(len(near), takenMax)] {
		if len(names) < suggestMax && !slices.Contains(names, c.name) && (!c.listed || q.Takes == nil || q.Takes(c.name)) {
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
