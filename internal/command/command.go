// SPDX-License-Identifier: Apache-2.0

// Package command is the subcommands of the headgate program, one file each:
// flags, a configuration, a parts list, and run. It refuses to decide anything
// that somebody else could want to decide too. Package headgate at the root of
// the tree runs it, and with it every build of the program.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/plugin"
)

// Run executes a command line and returns the status to exit with. plugins are
// those that this build has, by the names that a configuration uses.
func Run(ctx context.Context, plugins map[string]plugin.Factory, args []string, stderr io.Writer) int {
	root := newRoot(plugins)
	root.SetArgs(args)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	tell(stderr, err)
	if exit, ok := errors.AsType[errExit](err); ok {
		return exit.code
	}
	return 1
}

// tell prints why a command failed.
func tell(stderr io.Writer, err error) {
	switch problems, ok := errors.AsType[config.Problems](err); {
	case errors.Is(err, errTold):
	case ok && problems[0].File != "":
		// Each line begins with file:line:column, so that editors find the place.
		fmt.Fprintf(stderr, "%v\nheadgate: %s\n", problems, problems.Count())
	default:
		fmt.Fprintln(stderr, "headgate:", err)
	}
}

// errTold ends a command whose failure was reported already.
var errTold = errors.New("told")

func newRoot(plugins map[string]plugin.Factory) *cobra.Command {
	root := &cobra.Command{
		Use:           "headgate",
		Short:         "An inference gateway that never lies about a failed generation",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newServe(plugins), newGuard(), newDemo(), newSim(), newBench(), newCheck(plugins), newJournal(), newExplain(), newReplay(), newLab(), newVersion())
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
