// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"runtime/pprof"
	"time"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/bench"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/lifecycle"
)

func newBench() *cobra.Command {
	var load bench.Load
	var target, engine, bearerEnv string
	var pid int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Load an OpenAI-compatible endpoint and measure what it adds",
		Long: `Load an endpoint and measure it. With --engine a paced engine listens at that
address, the target is expected to send its requests there, and every event is
checked byte for byte and timed from the engine's socket to the client's.
Without it the engine may be any, and only what a client sees is measured.

With --rate the load is open: requests begin when they are due, however slow
the answers are, and latency counts from then. Without it, --connections
clients send their next request when they have their answer.`,
		Example: `  headgate bench --engine 127.0.0.1:9001 --target http://127.0.0.1:8080 --stream --rate 50 --interval 20ms
  headgate bench --target http://127.0.0.1:8000 --model qwen --rate 5 --poisson --tokens 200 --stream`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			u, err := url.Parse(target)
			if err != nil || u.Scheme != "http" || u.Host == "" {
				return fmt.Errorf("--target %q: must be http://HOST:PORT", target)
			}
			load.Address = u.Host
			if u.Port() == "" {
				load.Address = net.JoinHostPort(u.Hostname(), "80")
			}
			load.Bearer = os.Getenv(bearerEnv)
			load.Unknown = engine == ""
			if engine != "" {
				l, err := net.Listen("tcp", engine)
				if err != nil {
					return err
				}
				load.Engine = bench.StartEngine(l)
				defer load.Engine.Close()
				if err := bench.Gate(cmd.Context(), load.Address, load.Engine); err != nil {
					return fmt.Errorf("%s is not measured: %w", target, err)
				}
			}
			m := bench.Measure(cmd.Context(), load, pid)
			if asJSON {
				return writeJSON(cmd.OutOrStdout(), m)
			}
			return m.WriteTable(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&target, "target", "http://127.0.0.1:8080", "base URL")
	f.StringVar(&engine, "engine", "", "address for an engine of the benchmark's own, behind the target")
	f.StringVar(&load.Path, "path", "/v1/chat/completions", "path of the requests")
	f.StringVar(&load.Model, "model", "bench", "model asked for")
	f.StringVar(&bearerEnv, "bearer-env", "", "environment variable with a bearer token")
	f.Float64Var(&load.Rate, "rate", 0, "requests per second; 0: as fast as --connections clients get answers")
	f.BoolVar(&load.Poisson, "poisson", false, "random gaps between requests instead of equal ones")
	f.Uint64Var(&load.Seed, "seed", 1, "of the random gaps")
	f.IntVar(&load.Connections, "connections", 64, "connections at most")
	f.IntVar(&load.Fill, "fill", 0, "streams that are under way from the beginning, with answers of every length")
	f.BoolVar(&load.Shape.Stream, "stream", false, "ask for event streams")
	f.IntVar(&load.Shape.PromptBytes, "prompt-bytes", 1024, "length of the prompt")
	f.IntVar(&load.Shape.Tokens, "tokens", 64, "tokens of an answer")
	f.IntVar(&load.Shape.EventBytes, "event-bytes", 240, "length of one token's event, with --engine")
	f.DurationVar(&load.Shape.Interval, "interval", 20*time.Millisecond, "between tokens, with --engine")
	f.DurationVar(&load.Ramp, "ramp", 400*time.Millisecond, "time in which the streams of --fill begin")
	f.DurationVar(&load.Warmup, "warmup", time.Second, "time that is not measured")
	f.DurationVar(&load.Window, "duration", 10*time.Second, "time that is measured")
	f.IntVar(&pid, "pid", 0, "process of the target on this machine, for its CPU time and memory")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	cmd.AddCommand(newBenchCompare(), newBenchProfile(), newBenchGateway())
	return cmd
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func newBenchCompare() *cobra.Command {
	var configs, reverseproxy, out string
	var only, cells []string
	var quick bool
	c := bench.Comparison{Log: os.Stderr}
	cmd := &cobra.Command{
		Use:   "compare",
		Short: "Measure headgate beside other proxies in one run",
		Long:  `Measure headgate beside a direct connection and other proxies; bench/run.sh installs and builds what it takes.`,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return err
			}
			if quick && !cmd.Flags().Changed("rounds") {
				c.Rounds = 1
			}
			if quick && !cmd.Flags().Changed("patience") {
				c.Patience = 0
			}
			// Some proxies take a path in a configuration for one below their own directory.
			for _, p := range []*string{&configs, &reverseproxy} {
				if *p, err = filepath.Abs(*p); err != nil {
					return err
				}
			}
			if c.Targets, err = pick(bench.Targets(configs, self, reverseproxy), only, func(t bench.Target) string { return t.Name }); err != nil {
				return err
			}
			if c.Cells, err = pick(bench.Cells(quick), cells, func(c bench.Cell) string { return c.Name }); err != nil {
				return err
			}
			report, err := c.Run(cmd.Context())
			if err != nil {
				return err
			}
			if out != "" {
				file, err := os.Create(out)
				if err != nil {
					return err
				}
				if err := errors.Join(writeJSON(file, report), file.Close()); err != nil {
					return err
				}
			}
			return report.WriteTable(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&configs, "configs", "bench", "directory with the proxies' configurations")
	f.StringVar(&reverseproxy, "reverseproxy", "bench/out/reverseproxy", "binary of bench/reverseproxy")
	f.StringVar(&out, "out", "", "file for the report as JSON")
	f.IntVar(&c.Rounds, "rounds", 4, "how often each target has its turn")
	f.IntVar(&c.CPU, "pin", -1, "CPU for the proxies, -1 for any")
	f.DurationVar(&c.Patience, "patience", 30*time.Second, "time to wait, in all, for other processes to be quiet")
	f.BoolVar(&quick, "quick", false, "fewer and shorter cells, one round")
	f.StringSliceVar(&only, "target", nil, "targets to measure (default all)")
	f.StringSliceVar(&cells, "cell", nil, "cells to measure (default all)")
	return cmd
}

// pick returns those that are named, all if none is.
func pick[T any](all []T, names []string, nameOf func(T) string) ([]T, error) {
	if len(names) == 0 {
		return all, nil
	}
	var picked []T
	for _, name := range names {
		n := len(picked)
		for _, v := range all {
			if nameOf(v) == name {
				picked = append(picked, v)
			}
		}
		if len(picked) == n {
			return nil, fmt.Errorf("there is no %q", name)
		}
	}
	return picked, nil
}

func newBenchProfile() *cobra.Command {
	var cell, out string
	var pin int
	cmd := &cobra.Command{
		Use:   "profile",
		Short: "Write profiles of the gateway under one cell's load",
		Long:  `Write a CPU profile to OUT.cpu and a profile of allocations to OUT.allocs, for go tool pprof.`,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			self, err := os.Executable()
			if err != nil {
				return err
			}
			picked, err := pick(bench.Cells(false), []string{cell}, func(c bench.Cell) string { return c.Name })
			if err != nil {
				return err
			}
			load := picked[0].Load
			load.Window = 10 * time.Second
			target := bench.Target{
				Name:    "headgate",
				Command: []string{self, "bench", "gateway", "--upstream", "http://@ENGINE@", "--listen", "@LISTEN@", "--out", out},
			}
			m, err := bench.MeasureTarget(cmd.Context(), target, load, pin)
			if err != nil {
				return err
			}
			return m.WriteTable(cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&cell, "cell", "stream-400x20ms", "cell of the comparison")
	cmd.Flags().StringVar(&out, "out", "bench/out/headgate", "files to write, without extension")
	cmd.Flags().IntVar(&pin, "pin", -1, "CPU for the gateway, -1 for any")
	return cmd
}

// newBenchGateway is serve with profiles, which are no feature of a gateway that
// faces clients.
func newBenchGateway() *cobra.Command {
	var upstream, listen, out string
	cmd := &cobra.Command{
		Use:    "gateway",
		Short:  "Run a gateway that writes profiles of itself when it ends",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := config.FromUpstreams([]string{upstream})
			if err != nil {
				return err
			}
			c.Listeners[0].Address, c.Admin.Address = config.Address(listen), ""
			p, err := lifecycle.Start(c, slog.New(slog.DiscardHandler), version())
			if err != nil {
				return err
			}
			defer p.Stop()
			return profiled(cmd.Context(), out)
		},
	}
	cmd.Flags().StringVar(&upstream, "upstream", "", "base URL of an engine")
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:8080", "address")
	cmd.Flags().StringVar(&out, "out", "", "files to write, without extension")
	return cmd
}

// profiled profiles this process until ctx is done.
func profiled(ctx context.Context, out string) error {
	cpu, err := os.Create(out + ".cpu")
	if err != nil {
		return err
	}
	defer cpu.Close()
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return err
	}
	<-ctx.Done()
	pprof.StopCPUProfile()
	allocs, err := os.Create(out + ".allocs")
	if err != nil {
		return err
	}
	return errors.Join(pprof.Lookup("allocs").WriteTo(allocs, 0), allocs.Close())
}
