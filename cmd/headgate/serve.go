// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/lifecycle"
)

func newServe() *cobra.Command {
	var file, listen, admin string
	var upstreams []string
	var logging logFlags
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the gateway",
		Long: `Run the gateway with a configuration file, or with none in front of the
engines that --upstream names.`,
		Example: `  headgate serve --config headgate.yaml
  headgate serve --upstream http://127.0.0.1:9001 --upstream http://127.0.0.1:9002`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logging.logger()
			if err != nil {
				return err
			}
			c, err := serveConfig(file, upstreams)
			if err != nil {
				return err
			}
			if listen != "" {
				c.Listeners[0].Address = config.Address(listen)
			}
			if cmd.Flags().Changed("admin") {
				c.Admin.Address = config.Address(admin)
			}
			if problems := c.Validate(); len(problems) > 0 {
				return problems
			}
			p, err := lifecycle.Start(c, log, version())
			if err != nil {
				return err
			}
			defer p.Stop()
			select {
			case <-cmd.Context().Done():
				return nil
			case err := <-p.Failed():
				return err
			}
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file")
	cmd.Flags().StringArrayVar(&upstreams, "upstream", nil, "base URL of an engine; may be given several times")
	cmd.Flags().StringVar(&listen, "listen", "", "address of the first listener (default 127.0.0.1:8080)")
	cmd.Flags().StringVar(&admin, "admin", "", `address of the admin listener, "" for none (default 127.0.0.1:9901)`)
	logging.add(cmd)
	return cmd
}

// serveConfig is the file's configuration with the engines that flags name.
func serveConfig(file string, upstreams []string) (*config.Config, error) {
	switch {
	case file == "" && len(upstreams) == 0:
		return nil, errors.New("serve needs --config FILE or --upstream URL")
	case file == "":
		return config.FromUpstreams(upstreams)
	}
	c, err := config.Load(file)
	if err != nil || len(upstreams) == 0 {
		return c, err
	}
	return c, c.AddUpstreams(upstreams)
}
