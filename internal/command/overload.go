// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/lab/overload"
	"github.com/headgate/headgate/internal/lab/overload/live"
)

// overloadFlags say what is played.
type overloadFlags struct {
	engines []string
	size    int
	seeds   []uint
	chaos   int
	sockets int
	out     string
	plots   string
}

func newOverload() *cobra.Command {
	var f overloadFlags
	cmd := &cobra.Command{
		Use:   "overload",
		Short: "Give a pool twice what it can carry, in virtual time",
		Long: `Play more requests than a pool can carry against simulated engines, through
Headgate's queue and through the admission rules of others, and print what
became of them: three priorities, 20 tenants of which one is ten times too greedy.
Then flows that always have requests waiting, engines that can't be asked for
their metrics, and runs in which clients leave, engines die and limits change,
each decision checked. docs/flow-control.md says what the figures mean.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&f.engines, "engine", []string{"8b-a100", "32b"}, "engines, one pool of each")
	flags.IntVar(&f.size, "engines", 4, "size of a pool")
	flags.UintSliceVar(&f.seeds, "seed", []uint{9101, 9102, 9103}, "seeds")
	flags.IntVar(&f.chaos, "chaos", 1000, "runs in which much goes wrong")
	flags.IntVar(&f.sockets, "sockets", 2, "simulated engines of a run in real time, with the gateway itself; 0: none")
	flags.StringVar(&f.out, "out", "", "file for the results as JSON")
	flags.StringVar(&f.plots, "plots", "", "folder for plots as SVG")
	return cmd
}

func (f *overloadFlags) run(ctx context.Context, out, progress io.Writer) error {
	if f.size < 1 || len(f.seeds) == 0 || len(f.engines) == 0 {
		return fmt.Errorf("--engines must be at least 1, and --seed and --engine name one at least")
	}
	log := func(format string, args ...any) { fmt.Fprintf(progress, format+"\n", args...) }
	var seeds []uint64
	for _, s := range f.seeds {
		seeds = append(seeds, uint64(s))
	}
	var report overload.Report
	for _, engine := range f.engines {
		pool, err := overload.Measure(ctx, overload.Pool{Engine: engine, Engines: f.size}, seeds, log)
		if err != nil {
			return err
		}
		pool.WriteTable(out)
		report.Add(pool)
		if f.plots == "" {
			continue
		}
		for name, svg := range pool.Plots() {
			err := writeFile(filepath.Join(f.plots, name), func(w io.Writer) error { _, err := io.WriteString(w, svg); return err })
			if err != nil {
				return err
			}
		}
	}
	began := time.Now()
	for n := range f.chaos {
		if err := ctx.Err(); err != nil {
			return err
		}
		seed := uint64(1_000_000 + n)
		run := overload.RandomRun(seed)
		record, err := run.Play()
		if err != nil {
			return fmt.Errorf("seed %d: %w (again: go test ./internal/lab/overload -run TestChaos -seed=%s)", seed, err, strconv.FormatUint(seed, 10))
		}
		report.Chaos++
		report.Requests += len(record.Finished)
	}
	fmt.Fprintf(out, "chaos: %d runs of %d requests, nothing found (%.0f s)\n", report.Chaos, report.Requests, time.Since(began).Seconds())
	if f.sockets > 0 {
		live, err := live.Measure(ctx, overload.Pool{Engine: f.engines[0], Engines: f.sockets}, seeds[0], log)
		if err != nil {
			return err
		}
		live.WriteTable(out)
		report.Sockets = live
	}
	if f.out == "" {
		return nil
	}
	return writeFile(f.out, report.WriteJSON)
}
