// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/simengine/model"
)

func newSim() *cobra.Command {
	var c simengine.Config
	var listen, preset, logFile string
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Run a simulated engine",
		Long: `Run a simulated engine: the OpenAI API, vLLM's metrics, and faults at exact
points of an answer, asked for by the header X-Sim-Fault or POST /sim/faults.
Each token names its engine, attempt and number: A1·17. Adapters are listed
with the first model as their base; an engine holds some of them at a time (laptop
2, others 8), and to bring in another takes a while, except with instant.`,
		Example: `  headgate sim --name A --listen 127.0.0.1:9001
  headgate sim --name B --listen 127.0.0.1:9002 --adapter poet --adapter pirate
  curl -d '{"model":"sim","stream":true,"messages":[{"role":"user","content":"hello"}]}' \
    -H 'Content-Type: application/json' -H 'X-Sim-Fault: rst@token:3' 127.0.0.1:9001/v1/chat/completions`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			params, ok := model.Presets[preset]
			if !ok {
				return fmt.Errorf("--preset %q: must be one of %s", preset, strings.Join(presets(), ", "))
			}
			c.Params = params
			log, err := openLog(logFile)
			if err != nil {
				return err
			}
			defer log.Close()
			c.Log = log
			exited := make(chan struct{})
			c.OnExit = func() { close(exited) }
			l, err := net.Listen("tcp", listen)
			if err != nil {
				return err
			}
			e, err := simengine.Start(l, c)
			if err != nil {
				return err
			}
			defer e.Close()
			fmt.Fprintf(cmd.OutOrStdout(), "engine %s on %s\n", c.Name, e.URL())
			select {
			case <-cmd.Context().Done():
				return nil
			case <-exited:
				return fmt.Errorf("engine %s exited as it was told to", c.Name)
			}
		},
	}
	cmd.Flags().StringVar(&c.Name, "name", "A", "the engine's name in its tokens and log")
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:9001", "address")
	cmd.Flags().StringSliceVar(&c.Models, "model", nil, "model served, may be given several times (default sim)")
	cmd.Flags().StringArrayVar(&c.Adapters, "adapter", nil, "LoRA adapter served, by its name as a model; may be given several times")
	cmd.Flags().IntVar(&c.Tokens, "tokens", 16, "tokens of an answer without max_tokens")
	cmd.Flags().Float64Var(&c.Speed, "speed", 1, "seconds of the model per second")
	cmd.Flags().StringVar(&preset, "preset", "laptop", "speed and size: "+strings.Join(presets(), ", "))
	cmd.Flags().StringArrayVar(&c.Faults, "fault", nil, "fault script for one request, may be given several times")
	cmd.Flags().StringVar(&logFile, "log", "", `file for the event log as JSON lines, "-" for standard error`)
	return cmd
}

func presets() []string {
	names := slices.Collect(maps.Keys(model.Presets))
	slices.Sort(names)
	return names
}

// openLog opens the event log's file for appending.
func openLog(name string) (io.WriteCloser, error) {
	switch name {
	case "":
		return nopCloser{io.Discard}, nil
	case "-":
		return nopCloser{os.Stderr}, nil
	}
	return os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }
