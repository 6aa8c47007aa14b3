// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"time"
)

// A Cell is one load that every target gets.
type Cell struct {
	Name string `json:"name"`
	Load Load   `json:"load"`

	// Idle: the streams are only held open, and memory is what is measured. The
	// target is fresh from its start.
	Idle bool `json:"idle,omitempty"`
}

// Cells are the loads of the comparison.
func Cells(quick bool) []Cell {
	small := Shape{PromptBytes: 1 << 10, Tokens: 32}
	large := Shape{PromptBytes: 220 << 10, Tokens: 32}
	cells := []Cell{
		{Name: "idle-1000", Idle: true, Load: streams(1000, 20, time.Second, 1500*time.Millisecond)},
		{Name: "unary-c1", Load: unary(small, 1)},
		{Name: "unary-c64", Load: unary(small, 64)},
		{Name: "unary-220k-c4", Load: unary(large, 4)},
		{Name: "stream-100x20ms", Load: streams(100, 100, 20*time.Millisecond, 1500*time.Millisecond)},
		{Name: "stream-400x20ms", Load: streams(400, 100, 20*time.Millisecond, 1500*time.Millisecond)},
		{Name: "stream-1000x50ms", Load: streams(1000, 40, 50*time.Millisecond, 1500*time.Millisecond)},
	}
	if !quick {
		return cells
	}
	cells = slices.DeleteFunc(cells, func(c Cell) bool { return c.Name == "stream-100x20ms" || c.Name == "stream-1000x50ms" })
	for i := range cells {
		cells[i].Load.Window /= 2
	}
	return cells
}

func unary(s Shape, connections int) Load {
	return Load{Shape: s, Connections: connections, Warmup: 200 * time.Millisecond, Window: 900 * time.Millisecond, Seed: 7}
}

// streams keeps n streams under way: each is over when the next is due.
func streams(n, tokens int, interval, window time.Duration) Load {
	s := Shape{Stream: true, PromptBytes: 1 << 10, Tokens: tokens, EventBytes: 240, Interval: interval}
	return Load{
		Shape: s, Fill: n, Connections: n + n/4 + 16, Seed: 7,
		Rate: float64(n) / (interval * time.Duration(tokens)).Seconds(),
		Ramp: 400 * time.Millisecond, Warmup: 300 * time.Millisecond, Window: window,
	}
}

// Comparison is a comparison to make.
type Comparison struct {
	Targets []Target
	Cells   []Cell
	Rounds  int
	CPU     int // of each target, -1 for any
	Log     io.Writer

	// Patience is the time that the comparison may wait for others to leave the
	// machine alone, over all cells together.
	Patience time.Duration
}

// quiet is how many cores others may use when a cell begins.
const quiet = 0.3

// Report is what a comparison found.
type Report struct {
	Started  time.Time     `json:"started"`
	Took     float64       `json:"took_s"`
	Machine  Machine       `json:"machine"`
	Rounds   int           `json:"rounds"`
	Targets  []TargetNote  `json:"targets"`
	Cells    []Cell        `json:"cells"`
	Measured []Measurement `json:"measured"`
	Summary  []Summary     `json:"summary"`
}

// Machine is where the comparison ran, and how busy it was with other things.
type Machine struct {
	CPUs       int     `json:"cpus"`
	Go         string  `json:"go"`
	Kernel     string  `json:"kernel"`
	Pinned     bool    `json:"pinned"`
	LoadBefore float64 `json:"load_before"`
	LoadAfter  float64 `json:"load_after"`
	Foreign    float64 `json:"foreign_cores"` // that others used, median over all measurements
	ForeignMax float64 `json:"foreign_cores_max"`
}

// TargetNote says what a target was and whether it has figures.
type TargetNote struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	Served  bool   `json:"served"`
	Reason  string `json:"reason,omitempty"`
}

// Measurement is one cell of one target in one round.
type Measurement struct {
	Cell   string `json:"cell"`
	Target string `json:"target"`
	Round  int    `json:"round"`

	Served     bool       `json:"served"`
	Reason     string     `json:"reason,omitempty"`
	Requests   uint64     `json:"requests"`
	PerSecond  float64    `json:"requests_per_s"`
	Unsent     uint64     `json:"unsent,omitempty"`
	Errors     uint64     `json:"errors"`
	Error      string     `json:"error,omitempty"`
	Latency    *Quantiles `json:"latency,omitempty"`
	First      *Quantiles `json:"first_token,omitempty"`
	Added      *Quantiles `json:"event_delay,omitempty"`
	Gap        *Quantiles `json:"gap,omitempty"`
	Late       *Quantiles `json:"generator_late,omitempty"`
	Tokens     uint64     `json:"tokens,omitempty"`
	Reads      float64    `json:"reads_per_token,omitempty"`
	Stalls     uint64     `json:"stalls,omitempty"`
	CPURequest float64    `json:"cpu_us_per_request,omitempty"`
	CPUToken   float64    `json:"cpu_us_per_token,omitempty"`
	Cores      float64    `json:"cores"`     // that the target used
	OwnCores   float64    `json:"own_cores"` // that generator and engine used
	Foreign    float64    `json:"foreign_cores"`
	RSS        float64    `json:"rss_mb,omitempty"`
	RSSBefore  float64    `json:"rss_before_mb,omitempty"`
	PerStream  float64    `json:"rss_kb_per_stream,omitempty"`
}

// Run makes the comparison. Targets take turns within a round, and each round
// begins with another one, so that what the machine does meanwhile meets all.
func (c *Comparison) Run(ctx context.Context) (*Report, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	engine := StartEngine(l)
	defer engine.Close()

	r := &Report{Started: time.Now(), Rounds: c.Rounds, Cells: c.Cells, Machine: Machine{
		CPUs: runtime.NumCPU(), Go: runtime.Version(), Kernel: kernel(), Pinned: c.CPU >= 0, LoadBefore: loadAverage(),
	}}
	notes := make([]TargetNote, len(c.Targets))
	for i, t := range c.Targets {
		notes[i] = TargetNote{Name: t.Name, Version: t.version(ctx), Served: true}
	}
	for round := range c.Rounds {
		for i := range c.Targets {
			k := (i + round) % len(c.Targets)
			if !notes[k].Served {
				continue
			}
			found, err := c.turn(ctx, c.Targets[k], engine, round)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil {
				notes[k].Served, notes[k].Reason = false, err.Error()
				fmt.Fprintf(c.Log, "round %d  %-14s not served: %v\n", round+1, c.Targets[k].Name, err)
				continue
			}
			r.Measured = append(r.Measured, found...)
			fmt.Fprintf(c.Log, "round %d  %-14s %s\n", round+1, c.Targets[k].Name, brief(found))
		}
	}
	for _, n := range notes {
		if !n.Served {
			r.Measured = slices.DeleteFunc(r.Measured, func(m Measurement) bool { return m.Target == n.Name })
		}
	}
	r.Targets = notes
	r.summarize()
	r.Took, r.Machine.LoadAfter = time.Since(r.Started).Seconds(), loadAverage()
	return r, nil
}

// turn gives one target every cell once.
func (c *Comparison) turn(ctx context.Context, t Target, engine *Engine, round int) ([]Measurement, error) {
	p, err := t.start(ctx, engine.Addr(), c.CPU)
	if err != nil {
		return nil, err
	}
	defer p.stop()
	if err := Gate(ctx, p.address, engine); err != nil {
		return nil, err
	}
	var found []Measurement
	for _, cell := range c.Cells {
		at := p
		if cell.Idle {
			if at, err = t.start(ctx, engine.Addr(), c.CPU); err != nil {
				return nil, err
			}
		}
		c.await(ctx)
		m := cell.measure(ctx, t.Name, at, engine, round)
		if cell.Idle {
			at.stop()
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		found = append(found, m)
	}
	return found, nil
}

// await returns when the machine is quiet or patience is at its end.
func (c *Comparison) await(ctx context.Context) {
	meter := NewMeter(0)
	for meter.Probe(); c.Patience > 0; {
		began := now()
		if !wait(ctx, began+int64(200*time.Millisecond)) {
			return
		}
		if meter.Probe(); meter.Foreign < quiet {
			return
		}
		c.Patience -= time.Duration(now() - began)
	}
}

func (cell Cell) measure(ctx context.Context, target string, p *process, engine *Engine, round int) Measurement {
	load := cell.Load
	load.Address, load.Engine, load.Seed = p.address, engine, load.Seed+uint64(round)
	runtime.GC() // of what the target before left to collect
	meter := NewMeter(p.pid)
	before := resident(meter.pids)
	load.Probe = meter.Probe
	m := newMeasurement(Run(ctx, load), meter)
	m.Cell, m.Target, m.Round = cell.Name, target, round
	if cell.Idle && p.pid != 0 {
		m.RSSBefore = float64(before) / (1 << 20)
		m.PerStream = float64(meter.RSS-before) / 1024 / float64(load.Fill)
	}
	return m
}

func newMeasurement(r *Result, meter *Meter) Measurement {
	m := Measurement{Served: r.Corrupt == "", Reason: r.Corrupt, Errors: r.Errors, Error: r.Error}
	if !m.Served {
		return m
	}
	seconds := r.Took.Seconds()
	m.Requests, m.PerSecond, m.Tokens = r.Requests, float64(r.Requests)/seconds, r.Tokens
	m.Latency, m.First, m.Added, m.Gap, m.Late = r.Latency.Quantiles(), r.First.Quantiles(), r.Added.Quantiles(), r.Gap.Quantiles(), r.Late.Quantiles()
	m.Stalls, m.Unsent = r.Stalls, r.Unsent
	m.Cores, m.OwnCores, m.Foreign = meter.CPU.Seconds()/seconds, meter.Own.Seconds()/seconds, meter.Foreign
	m.RSS = float64(meter.RSS) / (1 << 20)
	cpu := float64(meter.CPU) / 1e3
	if r.Requests > 0 {
		m.CPURequest = cpu / float64(r.Requests)
	}
	if r.Tokens > 0 {
		m.CPUToken, m.Reads = cpu/float64(r.Tokens), float64(r.Reads)/float64(r.Tokens)
	}
	return m
}

func kernel() string {
	data, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return string(data[:max(len(data)-1, 0)])
}

// brief is a turn in one line.
func brief(found []Measurement) string {
	errors, foreign := uint64(0), 0.0
	for _, m := range found {
		errors += m.Errors
		foreign += m.Foreign / float64(len(found))
		if !m.Served {
			return m.Cell + ": " + m.Reason
		}
	}
	return fmt.Sprintf("%d cells, %d errors, others used %.1f cores", len(found), errors, foreign)
}

// Summary is one cell of one target: medians over the quieter half of its
// rounds. Which those are is decided by what others did, and not by the result.
type Summary struct {
	Cell   string `json:"cell"`
	Target string `json:"target"`
	Served bool   `json:"served"`
	Reason string `json:"reason,omitempty"`
	Errors uint64 `json:"errors"` // in all rounds
	Stalls uint64 `json:"stalls"` // in the quieter ones

	Foreign float64 `json:"foreign_cores"` // that others used in the noisiest of those

	Values map[string]Spread `json:"values,omitempty"`
}

// Spread is the median of a figure over the rounds, and its quartiles.
type Spread struct {
	Median float64 `json:"median"`
	Low    float64 `json:"q1"`
	High   float64 `json:"q3"`
}

func (r *Report) summarize() {
	var foreign []float64
	for _, cell := range r.Cells {
		for _, t := range r.Targets {
			s := Summary{Cell: cell.Name, Target: t.Name, Served: t.Served, Reason: t.Reason, Values: map[string]Spread{}}
			var all []Measurement
			for _, m := range r.Measured {
				if m.Cell != cell.Name || m.Target != t.Name {
					continue
				}
				all = append(all, m)
				foreign = append(foreign, m.Foreign)
				s.Errors += m.Errors
				if !m.Served {
					s.Served, s.Reason = false, cmp.Or(s.Reason, m.Reason)
				}
			}
			if s.Served {
				s.add(all)
			}
			r.Summary = append(r.Summary, s)
		}
	}
	if len(foreign) > 0 {
		r.Machine.Foreign, r.Machine.ForeignMax = spread(foreign).Median, slices.Max(foreign)
	}
}

// add takes the figures of the quieter rounds.
func (s *Summary) add(all []Measurement) {
	slices.SortStableFunc(all, func(a, b Measurement) int { return cmp.Compare(a.Foreign, b.Foreign) })
	values := map[string][]float64{}
	for _, m := range all[:(len(all)+1)/2] {
		s.Stalls += m.Stalls
		s.Foreign = m.Foreign
		for name, v := range m.figures() {
			values[name] = append(values[name], v)
		}
	}
	for name, v := range values {
		s.Values[name] = spread(v)
	}
}

// figures are the measurement's numbers by name, without those it has none of.
func (m *Measurement) figures() map[string]float64 {
	f := map[string]float64{
		"rps": m.PerSecond, "cpu_request": m.CPURequest, "cpu_token": m.CPUToken, "reads": m.Reads,
		"cores": m.Cores, "own": m.OwnCores, "rss": m.RSS, "rss_before": m.RSSBefore, "per_stream": m.PerStream,
	}
	for name, q := range map[string]*Quantiles{"latency": m.Latency, "first": m.First, "added": m.Added, "gap": m.Gap, "late": m.Late} {
		if q != nil {
			f[name+"_p50"], f[name+"_p90"], f[name+"_p99"], f[name+"_p999"] = q.P50, q.P90, q.P99, q.P999
		}
	}
	for name, v := range f {
		if v == 0 {
			delete(f, name)
		}
	}
	return f
}

func spread(v []float64) Spread {
	v = slices.Sorted(slices.Values(v))
	at := func(q float64) float64 {
		x := q * float64(len(v)-1)
		i := int(x)
		if i+1 == len(v) {
			return v[i]
		}
		return v[i] + (x-float64(i))*(v[i+1]-v[i])
	}
	return Spread{Median: at(0.5), Low: at(0.25), High: at(0.75)}
}

// Measure applies a load to a target that is running already. pid is its process
// on this machine, 0 if it is not known.
func Measure(ctx context.Context, load Load, pid int) *Measurement {
	meter := NewMeter(pid)
	load.Probe = meter.Probe
	m := newMeasurement(Run(ctx, load), meter)
	return &m
}

// MeasureTarget starts a target in front of an engine and applies a load.
func MeasureTarget(ctx context.Context, t Target, load Load, cpu int) (*Measurement, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	engine := StartEngine(l)
	defer engine.Close()
	p, err := t.start(ctx, engine.Addr(), cpu)
	if err != nil {
		return nil, err
	}
	defer p.stop()
	load.Address, load.Engine = p.address, engine
	return Measure(ctx, load, p.pid), nil
}
