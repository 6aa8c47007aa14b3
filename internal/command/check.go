// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/lifecycle"
)

func newCheck(plugins lifecycle.Plugins) *cobra.Command {
	return &cobra.Command{
		Use:   "check FILE",
		Short: "Check a configuration file and list everything that is wrong with it",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := config.Load(args[0], plugins.Check)
			if err != nil {
				return err
			}
			if len(c.Pools) == 0 {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: ok, but nothing is served: there are no pools\n", args[0])
				return nil
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: ok: %s, %s, %s\n", args[0],
				count(len(c.Listeners), "listener"), count(len(c.Routes), "route"), count(len(c.Pools), "pool"))
			return nil
		},
	}
}

// count is a number of things in words.
func count(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}
