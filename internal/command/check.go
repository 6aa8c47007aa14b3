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
			fmt.Fprintf(cmd.OutOrStdout(), "%s: ok: %d listeners, %d routes, %d pools\n",
				args[0], len(c.Listeners), len(c.Routes), len(c.Pools))
			return nil
		},
	}
}
