// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/lab"
)

// labFlags say what the laboratory compares.
type labFlags struct {
	traces    string
	workloads []string
	engines   []int
	speeds    []string
	cells     []string
	policies  []string
	seeds     []int64
	stale     float64
	engine    string
	model     string
	overload  []float64
	tuning    bool
	out       string
	plots     string
	against   string
	peers     string
	table     string
}

func newLab() *cobra.Command {
	var f labFlags
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Compare routing policies on traces, in virtual time",
		Long: `Replay traces and generated workloads against simulated engines under
Headgate's choice of endpoints and under the policies of others, and print how
much load each carries with 95 % of requests within their targets.

Without --traces small generated ones take the place of the public traces; their
results mean nothing beyond that the laboratory works. docs/routing.md says where
the traces are from and what the figures mean.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	var names []string
	for _, p := range lab.Policies {
		names = append(names, p.Name)
	}
	flags := cmd.Flags()
	flags.StringVar(&f.traces, "traces", "", "folder with the public traces; generated ones if empty")
	flags.StringSliceVar(&f.workloads, "workload", lab.Workloads[:7], "workloads: "+strings.Join(lab.Workloads, ", "))
	flags.IntSliceVar(&f.engines, "engines", []int{4, 8, 16}, "sizes of the pool")
	flags.StringSliceVar(&f.speeds, "speed", []string{"one", "two"}, "pools of one speed, of two, or both")
	flags.StringSliceVar(&f.cells, "cell", nil, "further cells, as workload/engines/speed")
	flags.StringSliceVar(&f.policies, "policy", nil, "policies, all if empty: "+strings.Join(names, ", "))
	flags.Int64SliceVar(&f.seeds, "seed", []int64{9101}, "seeds")
	flags.Float64Var(&f.stale, "stale", 0, "seconds between two scrapes of the engines")
	flags.StringVar(&f.engine, "engine", "", "engines instead of the workload's own")
	flags.Float64SliceVar(&f.overload, "overload", nil, "multiples of the best peer's goodput at which to look too")
	flags.StringVar(&f.model, "model", "", "how engines are modelled: mixed (the default) or alternating")
	flags.BoolVar(&f.tuning, "tuning", false, "the parts of traces that policies may be tuned on, instead of the held-out ones")
	flags.StringVar(&f.out, "out", "", "file for the results as JSON")
	flags.StringVar(&f.plots, "plots", "", "folder for a plot per cell as SVG")
	flags.StringVar(&f.against, "against", "", "JSON of another sweep, to compare the ranking of policies with")
	flags.StringVar(&f.table, "table", "", "file for the results as Markdown")
	flags.StringVar(&f.peers, "peers", "", "JSON of another sweep of these cells and seeds, whose peers are not played again")
	cmd.AddCommand(newOverload())
	return cmd
}

// check refuses numbers that would become results that are none.
func (f *labFlags) check() error {
	if !(f.stale >= 0) || math.IsInf(f.stale, 0) {
		return fmt.Errorf("--stale %v: want seconds, 0 or more", f.stale)
	}
	for _, times := range f.overload {
		if !(times > 0) || math.IsInf(times, 0) {
			return fmt.Errorf("--overload %v: want a multiple above 0", times)
		}
	}
	if len(f.seeds) == 0 {
		return fmt.Errorf("--seed: want one at least")
	}
	return cmp.Or(oneOf("--engine", f.engine, lab.Engines), oneOf("--model", f.model, lab.Models))
}

// oneOf is an error unless name is "" or a key of the table.
func oneOf[V any](flag, name string, table map[string]V) error {
	if _, ok := table[name]; ok || name == "" {
		return nil
	}
	return fmt.Errorf("%s %q: want one of %s", flag, name, strings.Join(slices.Sorted(maps.Keys(table)), ", "))
}

func (f *labFlags) sweep(progress io.Writer) (*lab.Sweep, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	s := &lab.Sweep{Seeds: f.seeds, Overload: f.overload, Policies: lab.Policies, Log: progress, Traces: lab.NewTraces(lab.Sample(1))}
	if f.traces != "" {
		s.Traces = lab.NewTraces(os.DirFS(f.traces))
	}
	if len(f.policies) > 0 {
		s.Policies = nil
		for _, name := range f.policies {
			p, ok := lab.PolicyNamed(name)
			if !ok {
				return nil, fmt.Errorf("--policy %q is not known", name)
			}
			s.Policies = append(s.Policies, p)
		}
	}
	add := func(workload string, n int, speed string) error {
		if n < 1 || speed != "one" && speed != "two" {
			return fmt.Errorf("a cell needs at least 1 engine, and speed one or two")
		}
		s.Cells = append(s.Cells, lab.Cell{
			Workload: workload, N: n, TwoSpeed: speed == "two", Stale: f.stale, Engine: f.engine, Model: f.model, Held: !f.tuning,
		})
		return nil
	}
	for _, w := range f.workloads {
		for _, n := range f.engines {
			for _, speed := range f.speeds {
				if err := add(w, n, speed); err != nil {
					return nil, err
				}
			}
		}
	}
	for _, cell := range f.cells {
		part := strings.Split(cell, "/")
		if len(part) != 3 {
			return nil, fmt.Errorf("--cell %q: want workload/engines/speed, as in b2b/64/one", cell)
		}
		n, err := strconv.Atoi(part[1])
		if err != nil {
			return nil, fmt.Errorf("--cell %q: %w", cell, err)
		}
		if err := add(part[0], n, part[2]); err != nil {
			return nil, fmt.Errorf("--cell %q: %w", cell, err)
		}
	}
	return s, nil
}

func (f *labFlags) run(ctx context.Context, out, progress io.Writer) error {
	s, err := f.sweep(progress)
	if err != nil {
		return err
	}
	if f.peers != "" {
		if s.Peers, err = readSweep(f.peers); err != nil {
			return err
		}
	}
	list, err := s.Run(ctx)
	if err != nil {
		return err
	}
	lab.WriteTable(out, list)
	if len(f.overload) > 0 {
		lab.WriteOverload(out, list, f.overload)
	}
	if f.against != "" {
		if err := f.rank(out, list); err != nil {
			return err
		}
	}
	if f.out != "" {
		if err := writeFile(f.out, func(w io.Writer) error { return lab.WriteJSON(w, list) }); err != nil {
			return err
		}
	}
	if f.table != "" {
		err := writeFile(f.table, func(w io.Writer) error { lab.WriteMarkdown(w, list); return nil })
		if err != nil {
			return err
		}
	}
	if f.plots == "" {
		return nil
	}
	for _, c := range list {
		name := strings.ReplaceAll(c.Name, "/", "-") + ".svg"
		if err := writeFile(filepath.Join(f.plots, name), func(w io.Writer) error { return lab.WritePlot(w, c) }); err != nil {
			return err
		}
	}
	return writeFile(filepath.Join(f.plots, "summary.svg"), func(w io.Writer) error { return lab.WriteSummaryPlot(w, list) })
}

// rank compares with a sweep of before.
func (f *labFlags) rank(out io.Writer, list []lab.Comparison) error {
	there, err := readSweep(f.against)
	if err != nil {
		return err
	}
	lab.WriteRanking(out, lab.Summarize(list, lab.Everywhere), lab.Summarize(there, lab.Everywhere))
	return nil
}

// readSweep reads what --out wrote.
func readSweep(name string) ([]lab.Comparison, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	list, err := lab.ReadJSON(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return list, nil
}

// writeFile writes a file and the folders above it.
func writeFile(name string, write func(io.Writer) error) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	if err := write(file); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}
