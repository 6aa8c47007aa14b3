// SPDX-License-Identifier: Apache-2.0

package overload

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strings"
)

// Report is what make bench-flow writes.
type Report struct {
	// Overload2x is Headgate under twice the capacity of the first pool, and Baselines
	// what others made of the same requests.
	Overload2x Step   `json:"overload_2x"`
	Baselines  []Step `json:"baselines"`

	Pools    []PoolReport `json:"pools"`
	Sockets  any          `json:"sockets,omitempty"` // of a run with real sockets
	Chaos    int          `json:"chaos_seeds"`       // played, in which no checker found anything
	Requests int          `json:"chaos_requests"`
}

// PoolReport is one pool.
type PoolReport struct {
	Engine   string     `json:"engine"`
	Engines  int        `json:"engines"`
	Seeds    []uint64   `json:"seeds"`
	Capacity float64    `json:"capacity"` // requests a second
	Steps    []Step     `json:"steps"`
	Fairness []Fairness `json:"fairness"` // by seed
	Outages  []Outage   `json:"outages"`  // at Loads of 0.8 of capacity, with the first seed
}

// Measure plays everything on one pool. A done context ends it with the run that
// is under way.
func Measure(ctx context.Context, p Pool, seeds []uint64, log func(format string, args ...any)) (PoolReport, error) {
	r := PoolReport{Engine: p.Engine, Engines: p.Engines, Seeds: seeds}
	study := Study{Pool: p, Shape: Standard, Seeds: seeds, Admissions: Admissions, Log: log}
	var err error
	if r.Capacity, r.Steps, err = study.Run(ctx); err != nil {
		return r, err
	}
	for _, seed := range seeds {
		if err := ctx.Err(); err != nil {
			return r, err
		}
		f, err := p.Fair(seed)
		if err != nil {
			return r, err
		}
		study.logf("fairness: Jain %.4f, gap %.0f of %.0f tokens, cached %.3f, in order of arrival %.3f", f.Jain, f.Gap, f.Bound, f.Hit, f.HitFCFS)
		r.Fairness = append(r.Fairness, f)
	}
	for _, a := range Admissions {
		o, err := p.Outage(Standard, a, seeds[0], outageLoad*r.Capacity)
		if err != nil {
			return r, err
		}
		study.logf("no metrics: %-14s sends %.1f/s and not %.1f/s, at most %d wait inside an engine and not %d", a.Name, o.Sent, o.Normal, o.Inside, o.Usual)
		r.Outages = append(r.Outages, o)
	}
	return r, nil
}

// outageLoad is the load of an outage, in capacities.
const outageLoad = 0.8

// Add puts a pool into the report.
func (r *Report) Add(p PoolReport) {
	if len(r.Pools) == 0 {
		for _, s := range p.Steps {
			if s.Peer {
				r.Baselines = append(r.Baselines, s)
			} else {
				r.Overload2x = s
			}
		}
	}
	r.Pools = append(r.Pools, p)
}

// WriteJSON writes the report for tools.
func (r *Report) WriteJSON(out io.Writer) error {
	e := json.NewEncoder(out)
	e.SetIndent("", " ")
	return e.Encode(r)
}

// WriteTable writes what a pool came to, a line per admission.
func (p *PoolReport) WriteTable(out io.Writer) {
	fmt.Fprintf(out, "%d engines %s, capacity %.1f requests/s, %d seeds; at twice the capacity for %.0f s:\n", p.Engines, p.Engine, p.Capacity, len(p.Seeds), stepFor)
	fmt.Fprintf(out, "%-14s %9s %8s %7s %7s %7s %7s %7s %9s\n", "", "goodput/s", "of peak", "high", "middle", "low", "wasted", "refused", "recovery")
	for _, s := range p.Steps {
		fmt.Fprintf(out, "%-14s %9.2f %8.3f %6.1f%% %6.1f%% %6.1f%% %6.2f%% %6.1f%% %7.1f s\n", s.Name, s.Goodput, s.GoodputOfPeak,
			100*s.Priorities["high"], 100*s.Priorities["middle"], 100*s.Priorities["low"], 100*s.Wasted, 100*s.Refused, s.Recovery)
	}
}

// Plots are the pool's pictures, by name.
func (p *PoolReport) Plots() map[string]string {
	goodput := plot{Title: "requests a second within their targets", X: "load, in capacities", EndX: Loads[len(Loads)-1]}
	top := plot{Title: "highest priority: share within targets", X: "load, in capacities", EndX: goodput.EndX, EndY: 1}
	step := plot{
		Title: "requests a second within their targets, as time passes", X: "seconds; twice the capacity comes from 30 to 90",
		EndX: stepBefore + stepFor + stepAfter, Shade: [2]float64{stepBefore, stepBefore + stepFor},
	}
	for _, s := range p.Steps {
		var g, t, when line
		for _, at := range s.Steady {
			g.add(at.Load, at.Goodput)
			t.add(at.Load, at.Top)
		}
		for i := 0; i+smooth <= len(s.Timeline); i += smooth {
			sum := 0.0
			for _, at := range s.Timeline[i : i+smooth] {
				sum += at.Good / smooth
			}
			when.add(s.Timeline[i].At+smooth/2, sum)
		}
		g.name, t.name, when.name = s.Name, s.Name, s.Name
		goodput.Lines, top.Lines, step.Lines = append(goodput.Lines, g), append(top.Lines, t), append(step.Lines, when)
	}
	base := fmt.Sprintf("%s-%d-", p.Engine, p.Engines)
	return map[string]string{base + "goodput.svg": goodput.svg(), base + "top.svg": top.svg(), base + "step.svg": step.svg()}
}

// smooth is how many seconds make a point of a plot.
const smooth = 3

// plot is lines over one axis.
type plot struct {
	Title, X   string
	EndX, EndY float64 // EndY 0: what the lines need
	Shade      [2]float64
	Lines      []line
}

type line struct {
	name string
	x, y []float64
}

func (l *line) add(x, y float64) { l.x, l.y = append(l.x, x), append(l.y, y) }

var colors = map[string]string{
	"headgate": "#1f6feb", "none": "#999999", "hard-shed": "#c9402b", "llm-d": "#2b9348", "probabilistic": "#b07d12",
}

// svg draws the plot.
func (p *plot) svg() string {
	const left, top, width, height = 50, 44, 520, 240
	high := p.EndY
	if high == 0 {
		for _, l := range p.Lines {
			for _, y := range l.y {
				high = max(high, y)
			}
		}
	}
	if high == 0 {
		high = 1
	}
	unit := niceStep(high)
	high = math.Ceil(high/unit-1e-9) * unit
	px := func(x float64) float64 { return left + x/p.EndX*width }
	py := func(y float64) float64 { return top + height - y/high*height }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">`+"\n", left+width+130, top+height+44)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="#fff"/><text x="8" y="20" font-size="14" font-weight="bold">%s</text>`+"\n", p.Title)
	if p.Shade[1] > 0 {
		fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="#f3f0e6"/>`+"\n", px(p.Shade[0]), top, px(p.Shade[1])-px(p.Shade[0]), height)
	}
	for y := 0.0; y <= high*1.0001; y += unit {
		fmt.Fprintf(&b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%.4g</text>`+"\n", left, py(y), left+width, py(y), left-6, py(y)+4, y)
	}
	across := niceStep(p.EndX)
	for x := 0.0; x <= p.EndX*1.0001; x += across {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%.4g</text>`+"\n", px(x), top+height+16, x)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle" fill="#555">%s</text>`+"\n", left+width/2, top+height+34, p.X)
	for i, l := range p.Lines {
		color, wide := colors[l.name], 1.5
		if l.name == Headgate.Name {
			wide = 2.5
		}
		var points []string
		for k := range l.x {
			points = append(points, fmt.Sprintf("%.1f,%.1f", px(l.x[k]), py(l.y[k])))
		}
		fmt.Fprintf(&b, `<polyline fill="none" stroke="%s" stroke-width="%.1f" points="%s"/>`+"\n", color, wide, strings.Join(points, " "))
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="12" height="4" fill="%s"/><text x="%d" y="%d">%s</text>`+"\n", left+width+14, top+8+18*i, color, left+width+32, top+14+18*i, l.name)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// niceStep is a distance of about a fifth of a range that reads well.
func niceStep(high float64) float64 {
	if high <= 0 {
		return 1
	}
	rough := high / 5
	unit := math.Pow(10, math.Floor(math.Log10(rough)))
	for _, f := range []float64{1, 2, 2.5, 5, 10} {
		if f*unit >= rough*0.999 {
			return f * unit
		}
	}
	return 10 * unit
}
