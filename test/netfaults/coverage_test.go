// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// table counts what was played, and is printed at the end.
var table = coverage{played: map[cell]map[ending]int{}, took: map[string][]time.Duration{}, seen: map[string]int{}}

// A cell is one fault at one point, with or without guards.
type cell struct {
	fault, point string
	guarded      bool
}

type coverage struct {
	mu     sync.Mutex
	played map[cell]map[ending]int
	took   map[string][]time.Duration
	seen   map[string]int
}

func (c *coverage) add(at cell, got ending) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.played[at] == nil {
		c.played[at] = map[ending]int{}
	}
	c.played[at][got]++
}

// measure keeps a time for the report. None is judged.
func (c *coverage) measure(what string, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.took[what] = append(c.took[what], took)
}

// count keeps a count for the report.
func (c *coverage) count(what string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen[what] += n
}

func (c *coverage) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b strings.Builder
	for _, guarded := range []bool{false, true} {
		var rows []string
		for _, f := range faults {
			row := fmt.Sprintf("%-14s", f.name)
			any := false
			for _, p := range points {
				n := 0
				for _, times := range c.played[cell{f.name, p.name, guarded}] {
					n += times
				}
				any = any || n > 0
				row += fmt.Sprintf("%10s", map[bool]string{true: fmt.Sprint(n), false: "."}[n > 0])
			}
			if any {
				rows = append(rows, row)
			}
		}
		if len(rows) == 0 {
			continue
		}
		head := fmt.Sprintf("%-14s", map[bool]string{false: "no guards", true: "guards"}[guarded])
		for _, p := range points {
			head += fmt.Sprintf("%10s", p.name)
		}
		b.WriteString(head + "\n" + strings.Join(rows, "\n") + "\n\n")
	}
	for _, what := range sorted(c.took) {
		list := c.took[what]
		slices.Sort(list)
		fmt.Fprintf(&b, "%s: %d times, least %v, median %v, most %v\n", what, len(list), list[0].Round(time.Millisecond),
			list[len(list)/2].Round(time.Millisecond), list[len(list)-1].Round(time.Millisecond))
	}
	for _, what := range sorted(c.seen) {
		fmt.Fprintf(&b, "%s: %d\n", what, c.seen[what])
	}
	return b.String()
}

func sorted[V any](m map[string]V) []string {
	var names []string
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
