// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// column is one figure of a table.
type column struct {
	title  string
	name   string // of the figure
	format string
}

var (
	unaryColumns = []column{
		{"p50 µs", "latency_p50", "%.0f"}, {"p99 µs", "latency_p99", "%.0f"}, {"req/s", "rps", "%.0f"},
		{"CPU µs/req", "cpu_request", "%.1f"},
	}
	streamColumns = []column{
		{"first p50 µs", "first_p50", "%.0f"}, {"first p99", "first_p99", "%.0f"},
		{"event p50 µs", "added_p50", "%.0f"}, {"event p99", "added_p99", "%.0f"}, {"event p99.9", "added_p999", "%.0f"},
		{"CPU µs/event", "cpu_token", "%.1f"}, {"reads/event", "reads", "%.2f"},
	}
	idleColumns = []column{
		{"RSS before MB", "rss_before", "%.1f"}, {"RSS MB", "rss", "%.1f"}, {"KB/stream", "per_stream", "%.1f"},
	}
)

// WriteTable prints the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	m := r.Machine
	pinned := "not pinned"
	if m.Pinned {
		pinned = "pinned to one core each, generator and engine on the other"
	}
	fmt.Fprintf(w, "%s, %.0f s, %d rounds, medians of the quieter half; proxies %s\n", r.Started.UTC().Format("2006-01-02 15:04 MST"), r.Took, r.Rounds, pinned)
	fmt.Fprintf(w, "× nginx: CPU or memory of nginx; others: cores that other processes used, of %d\n", m.CPUs)
	fmt.Fprintf(w, "%s, Linux %s; load average %.1f before, %.1f after; others used %.2f cores in the median, %.2f at most\n",
		m.Go, m.Kernel, m.LoadBefore, m.LoadAfter, m.Foreign, m.ForeignMax)
	for _, t := range r.Targets {
		if t.Version != "" {
			fmt.Fprintf(w, "%s: %s\n", t.Name, t.Version)
		}
		if !t.Served {
			fmt.Fprintf(w, "%s: served:false: %s\n", t.Name, t.Reason)
		}
	}
	for _, cell := range r.Cells {
		columns := unaryColumns
		switch {
		case cell.Idle:
			columns = idleColumns
		case cell.Load.Shape.Stream:
			columns = streamColumns
		}
		fmt.Fprintf(w, "\n%s\n", cell.Name)
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		titles := []string{""}
		for _, c := range columns {
			titles = append(titles, c.title)
		}
		fmt.Fprintln(tw, strings.Join(append(titles, "× nginx", "errors", "others", "note"), "\t")+"\t")
		for _, s := range r.Summary {
			if s.Cell == cell.Name {
				fmt.Fprintln(tw, strings.Join(s.row(columns, r.base(s.Cell)), "\t")+"\t")
			}
		}
		if err := tw.Flush(); err != nil {
			return err
		}
		if r.starved(cell.Name) {
			fmt.Fprintln(w, "The machine had no time for this cell: events came in batches without a proxy too.")
		}
	}
	return nil
}

// starved reports a cell in which the generator itself could not keep up: then
// figures of proxies say nothing.
func (r *Report) starved(cell string) bool {
	for _, s := range r.Summary {
		if reads, ok := s.Values["reads"]; ok && s.Cell == cell && s.Target == "direct" {
			return reads.Median < 0.95
		}
	}
	return false
}

// base is what ratios of a cell compare with: nginx, whose place Headgate takes.
func (r *Report) base(cell string) map[string]Spread {
	for _, s := range r.Summary {
		if s.Cell == cell && s.Target == "nginx" {
			return s.Values
		}
	}
	return nil
}

// costs are the figures that ratios are made of, the first that a cell has.
var costs = []string{"per_stream", "cpu_token", "cpu_request"}

func (s *Summary) ratio(base map[string]Spread) string {
	for _, name := range costs {
		if own, of := s.Values[name], base[name]; own.Median > 0 && of.Median > 0 {
			return fmt.Sprintf("%.2f", own.Median/of.Median)
		}
	}
	return "–"
}

func (s *Summary) row(columns []column, base map[string]Spread) []string {
	row := []string{s.Target}
	for _, c := range columns {
		if v, ok := s.Values[c.name]; ok {
			row = append(row, fmt.Sprintf(c.format, v.Median))
		} else {
			row = append(row, "–")
		}
	}
	row = append(row, s.ratio(base), fmt.Sprint(s.Errors), fmt.Sprintf("%.1f", s.Foreign))
	switch {
	case !s.Served:
		return append(row, "served:false")
	case s.Values["own"].Median > 0.9:
		return append(row, "generator-bound")
	case s.Stalls > 0:
		return append(row, fmt.Sprintf("%d stalls", s.Stalls))
	}
	return append(row, "")
}

// WriteTable prints one measurement for people.
func (m *Measurement) WriteTable(w io.Writer) error {
	if !m.Served {
		_, err := fmt.Fprintf(w, "served:false: %s\n", m.Reason)
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "requests\t%d, %.1f per second, %d errors", m.Requests, m.PerSecond, m.Errors)
	if m.Error != "" {
		fmt.Fprintf(tw, ", the first: %s", m.Error)
	}
	if m.Unsent > 0 {
		fmt.Fprintf(tw, ", %d not sent for want of a connection", m.Unsent)
	}
	fmt.Fprintln(tw)
	for _, q := range []struct {
		name string
		of   *Quantiles
	}{{"latency", m.Latency}, {"first token", m.First}, {"event delay", m.Added}, {"between tokens", m.Gap}, {"generator late", m.Late}} {
		if q.of != nil {
			fmt.Fprintf(tw, "%s µs\tp50 %.0f\tp90 %.0f\tp99 %.0f\tp99.9 %.0f\tmax %.0f\n", q.name, q.of.P50, q.of.P90, q.of.P99, q.of.P999, q.of.Max)
		}
	}
	if m.Tokens > 0 {
		fmt.Fprintf(tw, "tokens\t%d, %.2f reads each, %d stalls\n", m.Tokens, m.Reads, m.Stalls)
	}
	if m.Cores > 0 {
		fmt.Fprintf(tw, "target\t%.2f cores, %.1f µs per request, %.1f µs per token, %.1f MB\n", m.Cores, m.CPURequest, m.CPUToken, m.RSS)
	}
	fmt.Fprintf(tw, "generator\t%.2f cores; others used %.2f\n", m.OwnCores, m.Foreign)
	return tw.Flush()
}
