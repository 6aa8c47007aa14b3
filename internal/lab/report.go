// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// WriteTable writes one line per cell and a summary per policy.
func WriteTable(out io.Writer, list []Comparison) {
	fmt.Fprintf(out, "%-26s %10s %10s %-18s %8s %8s\n", "cell", "headgate", "best peer", "", "gain", "p99")
	for _, c := range list {
		fmt.Fprintf(out, "%-26s %10.3f %10.3f %-18s %+7.1f%% %7.2f\n", c.Name, c.Ours, c.BestPeer, c.BestPeerName, 100*c.Gain, c.TTFT99)
	}
	fmt.Fprintf(out, "\n%-20s %8s %8s %8s %10s\n", "policy", "mean", "worst", "lost", "worst seed")
	for _, s := range Summarize(list, Everywhere) {
		fmt.Fprintf(out, "%-20s %+7.1f%% %+7.1f%% %4d/%-3d %+9.1f%%\n", s.Policy, 100*s.Mean, 100*s.Worst, s.Lost, s.Cells, 100*s.WorstSeed)
	}
}

// WriteOverload writes what each policy carries at multiples of the best peer's
// goodput, in its units, with the share of requests that was not refused.
func WriteOverload(out io.Writer, list []Comparison, multiples []float64) {
	fmt.Fprintf(out, "\n%-26s %-20s", "overload", "policy")
	for _, m := range multiples {
		fmt.Fprintf(out, " %12s", fmt.Sprintf("×%.4g", m))
	}
	fmt.Fprintln(out)
	for _, c := range list {
		for _, o := range c.Outcomes {
			fmt.Fprintf(out, "%-26s %-20s", c.Name, o.Policy)
			for i, v := range o.Overload {
				fmt.Fprintf(out, " %12s", fmt.Sprintf("%.2f (%.0f %%)", v, 100*o.Accepted[i]))
			}
			fmt.Fprintln(out)
		}
	}
}

// WriteMarkdown writes the tables of docs/routing.md: what each of Headgate's policies
// comes to over groups of cells, and every cell.
func WriteMarkdown(out io.Writer, list []Comparison) {
	writeGroups(out, list)
	fmt.Fprintln(out)
	writeCells(out, list)
}

// tabled are Headgate's policies that the tables show.
var tabled = []string{"headgate", "headgate-immediate"}

func writeGroups(out io.Writer, list []Comparison) {
	fmt.Fprintln(out, "| cells | policy | number | mean gain | worst cell | lost | worst seed | p99 within 1.05 | over 1.2 | largest |")
	fmt.Fprintln(out, "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|")
	for _, g := range []struct {
		name string
		want func(Comparison) bool
	}{
		{"all", Everywhere},
		{"without azcode", func(c Comparison) bool { return c.Workload != "azcode" }},
		{"one speed, without azcode", func(c Comparison) bool { return c.Workload != "azcode" && !c.TwoSpeed }},
		{"two speeds, without azcode", func(c Comparison) bool { return c.Workload != "azcode" && c.TwoSpeed }},
	} {
		sums := Summarize(list, g.want)
		for _, name := range tabled {
			at := slices.IndexFunc(sums, func(s Summary) bool { return s.Policy == name })
			if at < 0 {
				continue
			}
			near, far, most := 0, 0, 0.0
			for _, c := range list {
				if o := c.outcome(name); o != nil && g.want(c) {
					tail := c.tailRatio(o)
					most = max(most, tail)
					if tail <= 1.05 {
						near++
					}
					if tail > 1.2 {
						far++
					}
				}
			}
			s := sums[at]
			fmt.Fprintf(out, "| %s | %s | %d | %+.1f %% | %+.1f %% | %d | %+.1f %% | %d of %d | %d | %.2f |\n",
				g.name, name, s.Cells, 100*s.Mean, 100*s.Worst, s.Lost, 100*s.WorstSeed, near, s.Cells, far, most)
		}
	}
}

func writeCells(out io.Writer, list []Comparison) {
	fmt.Fprintln(out, "| workload | engines | speeds | Headgate | best peer | gain % | p99 | immediate % | its p99 | hits, ours / peer's | endless cache | clairvoyant |")
	fmt.Fprintln(out, "|---|--:|---|--:|---|--:|--:|--:|--:|--:|--:|--:|")
	for _, c := range list {
		speeds := "one"
		if c.TwoSpeed {
			speeds = "two"
		}
		fmt.Fprintf(out, "| %s | %d | %s | %.3g | %s, %.3g |", c.Workload, c.Engines, speeds, c.Ours, c.BestPeerName, c.BestPeer)
		hit := 0.0
		for _, name := range tabled {
			o := c.outcome(name)
			switch {
			case o == nil:
				fmt.Fprint(out, " | |")
			case name == "headgate":
				hit = o.Hit
				fmt.Fprintf(out, " %+.1f (%+.1f) | %.2f |", 100*o.Gain, 100*o.Worst, c.tailRatio(o))
			default:
				fmt.Fprintf(out, " %+.1f | %.2f |", 100*o.Gain, c.tailRatio(o))
			}
		}
		if peer := c.outcome(c.BestPeerName); peer != nil {
			fmt.Fprintf(out, " %.3f / %.3f |", hit, peer.Hit)
		} else {
			fmt.Fprint(out, " |")
		}
		for _, name := range []string{"infinite-cache", "clairvoyant"} {
			if o := c.outcome(name); o != nil {
				fmt.Fprintf(out, " %+.0f |", 100*o.Gain)
			} else {
				fmt.Fprint(out, " |")
			}
		}
		fmt.Fprintln(out)
	}
}

// outcome is that of a policy, nil if it was not played.
func (c *Comparison) outcome(policy string) *Outcome {
	for i := range c.Outcomes {
		if c.Outcomes[i].Policy == policy {
			return &c.Outcomes[i]
		}
	}
	return nil
}

// Summary is one policy over all cells, against each cell's best peer.
type Summary struct {
	Policy    string  `json:"policy"`
	Cells     int     `json:"cells"`
	Mean      float64 `json:"mean"`
	Worst     float64 `json:"worst"`
	WorstSeed float64 `json:"worst_seed"`
	Lost      int     `json:"lost"` // cells with more than half a per cent less
}

// lost is what counts as a loss; less is within the search's resolution.
const lost = -0.005

// Everywhere wants every cell.
func Everywhere(Comparison) bool { return true }

// Summarize adds up the cells that are wanted, the best policy first.
func Summarize(list []Comparison, want func(Comparison) bool) []Summary {
	by := map[string]*Summary{}
	var order []*Summary
	for _, c := range list {
		if !want(c) {
			continue
		}
		for _, o := range c.Outcomes {
			s := by[o.Policy]
			if s == nil {
				s = &Summary{Policy: o.Policy, Worst: math.Inf(1), WorstSeed: math.Inf(1)}
				by[o.Policy] = s
				order = append(order, s)
			}
			s.Cells++
			s.Mean += o.Gain
			s.Worst, s.WorstSeed = min(s.Worst, o.Gain), min(s.WorstSeed, o.Worst)
			if o.Gain < lost {
				s.Lost++
			}
		}
	}
	var all []Summary
	for _, s := range order {
		s.Mean /= float64(s.Cells)
		all = append(all, *s)
	}
	slices.SortStableFunc(all, func(a, b Summary) int {
		if a.Mean == b.Mean {
			return 0
		}
		return int(math.Copysign(1, b.Mean-a.Mean))
	})
	return all
}

// WriteJSON writes the cells for tools, goodput at Attainment.
func WriteJSON(out io.Writer, list []Comparison) error {
	e := json.NewEncoder(out)
	e.SetIndent("", " ")
	return e.Encode(struct {
		Metric  string       `json:"metric"`
		Cells   []Comparison `json:"cells"`
		Summary []Summary    `json:"summary"`
	}{"goodput at 95 % SLO", list, Summarize(list, Everywhere)})
}

// ReadJSON reads what WriteJSON wrote.
func ReadJSON(in io.Reader) ([]Comparison, error) {
	var read struct {
		Cells []Comparison `json:"cells"`
	}
	if err := json.NewDecoder(in).Decode(&read); err != nil {
		return nil, err
	}
	return read.Cells, nil
}

// Correlation is Spearman's: how alike two sweeps rank the policies that are in
// both, from -1 to 1. It is 0 for fewer than two.
func Correlation(a, b []Summary) float64 {
	other := map[string]float64{}
	for _, s := range b {
		other[s.Policy] = s.Mean
	}
	var x, y []float64
	for _, s := range a {
		if mean, ok := other[s.Policy]; ok {
			x, y = append(x, s.Mean), append(y, mean)
		}
	}
	n := float64(len(x))
	if n < 2 {
		return 0
	}
	sum := 0.0
	for i, r := range ranks(x) {
		d := r - ranks(y)[i]
		sum += d * d
	}
	return 1 - 6*sum/(n*(n*n-1))
}

// ranks are places from 1; equals share theirs.
func ranks(values []float64) []float64 {
	r := make([]float64, len(values))
	for i, v := range values {
		for _, w := range values {
			switch {
			case w > v:
				r[i]++
			case w == v:
				r[i] += 0.5
			}
		}
		r[i] += 0.5
	}
	return r
}

// WriteRanking writes how two sweeps rank the policies.
func WriteRanking(out io.Writer, here, there []Summary) {
	other := map[string]float64{}
	for _, s := range there {
		other[s.Policy] = s.Mean
	}
	fmt.Fprintf(out, "\n%-20s %8s %8s\n", "policy", "here", "there")
	for _, s := range here {
		if mean, ok := other[s.Policy]; ok {
			fmt.Fprintf(out, "%-20s %+7.1f%% %+7.1f%%\n", s.Policy, 100*s.Mean, 100*mean)
		}
	}
	fmt.Fprintf(out, "rank correlation %.2f\n", Correlation(here, there))
}

// WritePlot draws one cell as SVG: a bar per policy, the best peer marked.
func WritePlot(out io.Writer, c Comparison) error {
	outcomes := slices.Clone(c.Outcomes)
	slices.SortStableFunc(outcomes, func(a, b Outcome) int { return int(math.Copysign(1, b.Goodput-a.Goodput)) })
	most := 0.0
	for _, o := range outcomes {
		most = max(most, o.Goodput)
	}
	const row, left, width = 22, 170, 420
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", left+width+150, row*len(outcomes)+56)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="#fff"/><text x="8" y="20" font-size="14" font-weight="bold">%s</text>`+"\n", c.Name)
	fmt.Fprintf(&b, `<text x="8" y="38" fill="#555">largest load with 95 %% of requests in their targets, %s</text>`+"\n", c.Unit)
	for i, o := range outcomes {
		y := 50 + i*row
		color := "#b9c3d0"
		switch {
		case o.Policy == "headgate":
			color = "#1f6feb"
		case o.Policy == c.BestPeerName:
			color = "#6b7f99"
		case !o.Peer:
			color = "#e5e0cf"
		}
		wide := 0.0
		if most > 0 {
			wide = o.Goodput / most * width
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text><rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/><text x="%.1f" y="%d">%.4g (%+.1f %%)</text>`+"\n",
			left-8, y+12, o.Policy, left, y, wide, row-6, color, left+wide+6, y+12, o.Goodput, 100*o.Gain)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(out, b.String())
	return err
}

// WriteSummaryPlot draws the gain over the best peer in every cell as SVG.
func WriteSummaryPlot(out io.Writer, list []Comparison) error {
	low, high := -0.05, 0.1
	for _, c := range list {
		low, high = min(low, c.Gain), max(high, c.Gain)
	}
	const row, left, width = 18, 170, 460
	x := func(gain float64) float64 { return left + (gain-low)/(high-low)*width }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">`+"\n", left+width+190, row*len(list)+50)
	b.WriteString(`<rect width="100%" height="100%" fill="#fff"/><text x="8" y="20" font-size="14" font-weight="bold">goodput at 95 % SLO: gain over the best peer of each cell</text>` + "\n")
	for i, c := range list {
		y := 36 + i*row
		from, to, color := x(0), x(c.Gain), "#1f6feb"
		if c.Gain < 0 {
			from, to, color = to, from, "#c9402b"
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text><rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/><text x="%.1f" y="%d">%+.1f %% (%s)</text>`+"\n",
			left-8, y+11, c.Name, from, y, max(to-from, 0.5), row-5, color, max(to, x(0))+5, y+11, 100*c.Gain, c.BestPeerName)
	}
	fmt.Fprintf(&b, `<line x1="%.1f" y1="30" x2="%.1f" y2="%d" stroke="#444"/></svg>`+"\n", x(0), x(0), 36+row*len(list))
	_, err := io.WriteString(out, b.String())
	return err
}
