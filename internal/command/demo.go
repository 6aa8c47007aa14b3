// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/demo"
)

func newDemo() *cobra.Command {
	var once bool
	c := demo.Config{Log: slog.New(slog.DiscardHandler)}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Kill simulated engines in the middle of answers and show what clients see",
		Long: `Start three simulated engines and a gateway, kill one engine before a first
delta and another after it, and show what the client received. Then keep
serving, unless --once is given, which exits with an error if any promise broke.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.Out = cmd.OutOrStdout()
			if once {
				c.Listen, c.Admin = "127.0.0.1:0", ""
			}
			d, err := demo.Start(c, version())
			if err != nil {
				return err
			}
			defer d.Stop()
			kept, err := d.Run(cmd.Context())
			switch {
			case err != nil:
				return err
			case !kept:
				return errTold
			case once:
				return nil
			}
			fmt.Fprintf(c.Out, "\nServing until Ctrl-C. Try:\n"+
				"  curl -N %[1]s/v1/chat/completions -H 'Content-Type: application/json' \\\n"+
				"    -d '{\"model\":\"sim\",\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}'\n"+
				"and with -H 'X-Sim-Fault: attempt=1;rst@token:3' to lose the engine after three tokens.\n", d.URL())
			if c.Admin != "" {
				fmt.Fprintf(c.Out, "Metrics: http://%s/metrics\n", c.Admin)
			}
			<-cmd.Context().Done()
			return nil
		},
	}
	cmd.Flags().BoolVar(&once, "once", false, "exit after the scenes, with an error if a promise broke")
	cmd.Flags().StringVar(&c.Listen, "listen", "127.0.0.1:8080", "address of the gateway")
	cmd.Flags().StringVar(&c.Admin, "admin", "127.0.0.1:9901", `address of the metrics, "" for none`)
	return cmd
}
