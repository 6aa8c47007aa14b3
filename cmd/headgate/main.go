// SPDX-License-Identifier: Apache-2.0

// Command headgate is the inference gateway and its tools, one subcommand each.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	if err := newRoot().ExecuteContext(ctx); err != nil {
		if !errors.Is(err, errTold) {
			fmt.Fprintln(os.Stderr, "headgate:", err)
		}
		if exit, ok := errors.AsType[errExit](err); ok {
			os.Exit(exit.code)
		}
		os.Exit(1)
	}
}

// errTold ends a command whose failure was reported already.
var errTold = errors.New("told")

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "headgate",
		Short:         "An inference gateway that never lies about a failed generation",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newServe(), newGuard(), newDemo(), newSim(), newBench(), newCheck(), newJournal(), newExplain(), newReplay(), newLab(), newVersion())
	return root
}

// version is what this binary calls itself: the module's version, or the
// revision that it was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	revision := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (revision == "" || revision == "(devel)") {
			revision = s.Value
		}
	}
	return revision
}

// logFlags are the flags of commands that log.
type logFlags struct {
	level  string
	format string
}

func (f *logFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.level, "log-level", "info", "least level that is logged: debug, info, warn or error")
	cmd.Flags().StringVar(&f.format, "log-format", "text", "text or json")
}

func (f *logFlags) logger() (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.level)); err != nil {
		return nil, fmt.Errorf("--log-level %q: must be debug, info, warn or error", f.level)
	}
	options := &slog.HandlerOptions{Level: level}
	switch f.format {
	case "text":
		return slog.New(slog.NewTextHandler(os.Stderr, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(os.Stderr, options)), nil
	}
	return nil, fmt.Errorf("--log-format %q: must be text or json", f.format)
}
