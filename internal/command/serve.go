// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/filewatch"
	"github.com/headgate/headgate/internal/lifecycle"
)

func newServe(plugins lifecycle.Plugins) *cobra.Command {
	f := serveFlags{plugins: plugins}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the gateway",
		Long: `Run the gateway with a configuration file, or with none in front of the
engines that --upstream names. A changed file is read again, and so it is at
SIGHUP; one with mistakes leaves the old configuration in force.`,
		Example: `  headgate serve --config headgate.yaml
  headgate serve --upstream http://127.0.0.1:9001 --upstream http://127.0.0.1:9002`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.adminSet = cmd.Flags().Changed("admin")
			return f.run(cmd.Context())
		},
	}
	cmd.Flags().StringVarP(&f.file, "config", "c", "", "configuration file")
	cmd.Flags().StringArrayVar(&f.upstreams, "upstream", nil, "base URL of an engine; may be given several times")
	cmd.Flags().StringVar(&f.listen, "listen", "", "address of the first listener (default 127.0.0.1:8080)")
	cmd.Flags().StringVar(&f.admin, "admin", "", `address of the admin listener, "" for none (default 127.0.0.1:9901)`)
	cmd.Flags().StringVar(&f.trace, "trace", "", "file for what was decided for every request, for headgate replay; slow")
	f.logging.add(cmd)
	return cmd
}

type serveFlags struct {
	plugins   lifecycle.Plugins
	file      string
	upstreams []string
	listen    string
	admin     string
	adminSet  bool
	trace     string
	logging   logFlags
}

func (f *serveFlags) run(ctx context.Context) error {
	log, err := f.logging.logger()
	if err != nil {
		return err
	}
	// Before anybody is told that it listens: what is sent from then on counts, and
	// would otherwise end the process.
	hangup := make(chan os.Signal, 1)
	if f.file != "" {
		signal.Notify(hangup, syscall.SIGHUP)
		defer signal.Stop(hangup)
	}
	// Read before it is loaded: a change in between is then noticed.
	known, _ := os.ReadFile(f.file)
	c, err := f.load()
	if err != nil {
		return err
	}
	with := []lifecycle.Option{f.plugins.Option()}
	if f.trace != "" {
		trace, err := os.OpenFile(f.trace, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		defer trace.Close()
		with = append(with, lifecycle.Trace(trace))
	}
	p, err := lifecycle.Start(c, log, version(), with...)
	if err != nil {
		return err
	}
	defer p.Stop()
	if f.file != "" {
		stop := f.watch(known, hangup, log, p.Reload)
		defer stop()
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-p.Failed():
		return err
	}
}

// load reads the configuration that the flags name.
func (f *serveFlags) load() (*config.Config, error) {
	switch {
	case f.file == "" && len(f.upstreams) == 0:
		return nil, errors.New("serve needs --config FILE or --upstream URL")
	case f.file == "":
		c, err := config.FromUpstreams(f.upstreams)
		if err != nil {
			return nil, err
		}
		return f.override(c)
	}
	c, err := config.Load(f.file, f.plugins.Check)
	if err != nil {
		return nil, err
	}
	return f.override(c)
}

// override puts the flags' values over the file's.
func (f *serveFlags) override(c *config.Config) (*config.Config, error) {
	if f.file != "" && len(f.upstreams) > 0 {
		if err := c.AddUpstreams(f.upstreams); err != nil {
			return nil, err
		}
	}
	if f.listen != "" {
		c.Listeners[0].Address = config.Address(f.listen)
	}
	if f.adminSet {
		c.Admin.Address = config.Address(f.admin)
	}
	if problems := c.Validate(); len(problems) > 0 {
		return nil, problems
	}
	return c, nil
}

// watch puts each new content of the file in force, until stop is called, and looks at
// once when there is a hangup.
func (f *serveFlags) watch(known []byte, hangup <-chan os.Signal, log *slog.Logger, reload func(*config.Config) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	now := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-hangup:
			}
			select {
			case <-ctx.Done():
				return
			case now <- struct{}{}:
			}
		}
	})
	running.Go(func() {
		filewatch.Watcher{Path: f.file, Known: known, Now: now}.Run(ctx, func(data []byte, err error) {
			if err == nil {
				err = f.reload(data, reload)
			}
			if err != nil {
				log.Error("configuration not reloaded; the old one stays in force", "error", err)
			}
		})
	})
	return func() {
		cancel()
		running.Wait()
	}
}

func (f *serveFlags) reload(data []byte, reload func(*config.Config) error) error {
	c, err := config.Parse(f.file, data, f.plugins.Check)
	if err != nil {
		return err
	}
	if c, err = f.override(c); err != nil {
		return err
	}
	return reload(c)
}
