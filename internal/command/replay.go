// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/attempt/trace"
)

func newReplay() *cobra.Command {
	return &cobra.Command{
		Use:   "replay FILE",
		Short: "Play a trace again and compare what is decided with what was done",
		Long: `Give the events of a trace, written by headgate serve --trace FILE, to the state
machines of this version. It fails if one decides otherwise than the traced
process did, and lists the requests that were under way when the trace ends.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			file, err := os.Open(args[0])
			if err != nil {
				return err
			}
			defer file.Close()
			result, err := trace.Replay(file)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			out := cmd.OutOrStdout()
			for _, d := range result.Differences {
				fmt.Fprintln(out, d)
			}
			for _, id := range result.Cut {
				fmt.Fprintln(out, "under way:", id)
			}
			fmt.Fprintf(out, "%d requests, %d events, %d effects, %d under way, %d differences\n",
				result.Flights, result.Events, result.Effects, len(result.Cut), len(result.Differences))
			if len(result.Differences) > 0 {
				return errTold
			}
			return nil
		},
	}
}
