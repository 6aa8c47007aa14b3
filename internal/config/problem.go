// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	File    string // as given to Parse; "" for values that no file gave
	Line    int    // from 1; 0 when unknown
	Column  int    // in characters, from 1; 0 when unknown
	Path    string // the field, as in pools.qwen.timeouts.idle; "" for the whole file
	Message string
}

// String is file:line:column: path: message, without the parts that are
// unknown.
func (p Problem) String() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(p.File)
		if p.Line > 0 {
			fmt.Fprintf(&b, ":%d", p.Line)
		}
		if p.Line > 0 && p.Column > 0 {
			fmt.Fprintf(&b, ":%d", p.Column)
		}
		b.WriteString(": ")
	}
	if p.Path != "" {
		b.WriteString(p.Path)
		b.WriteString(": ")
	}
	b.WriteString(p.Message)
	return b.String()
}

// Problems is everything that is wrong with a configuration, in the order of
// the file. As an error it is one line per problem.
type Problems []Problem

func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// problemsMax bounds a report: a file that is no configuration at all has a
// problem on every line.
const problemsMax = 1000

// sorted orders problems by place and drops those past problemsMax.
func (ps Problems) sorted() Problems {
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	ps = slices.Compact(ps)
	if len(ps) > problemsMax {
		left := len(ps) - problemsMax
		ps = append(ps[:problemsMax:problemsMax], Problem{File: ps[0].File, Message: fmt.Sprintf("and %d more problems", left)})
	}
	return ps
}

// Count says how many problems there are.
func (ps Problems) Count() string {
	switch n := len(ps); {
	case n > problemsMax: // the last one stands for those that were left out
		return fmt.Sprintf("more than %d problems", problemsMax)
	case n == 1:
		return "1 problem"
	default:
		return fmt.Sprintf("%d problems", n)
	}
}

// err is ps as an error, nil when there is none.
func (ps Problems) err() error {
	if len(ps) == 0 {
		return nil
	}
	return ps
}

// quote shows a value from a file in a message: safe to print and not long.
func quote(s string) string {
	const max = 64
	if len(s) > max {
		return fmt.Sprintf("%q…", strings.ToValidUTF8(s[:max], ""))
	}
	return fmt.Sprintf("%q", s)
}
