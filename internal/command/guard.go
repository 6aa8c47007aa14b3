// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/guard"
)

func newGuard() *cobra.Command {
	var o guard.Options
	var engine, tokenFile string
	var logging logFlags
	cmd := &cobra.Command{
		Use:   "guard --engine URL [flags] [-- ENGINE ARGUMENT...]",
		Short: "Enforce leases beside an engine",
		Long: `Run the proxy that makes an engine's silence provable: gateways send their
requests to --listen and hold a control stream to --control; nothing of an
attempt passes once its lease is over or was revoked.

After -- the guard starts the engine itself. It sees the process exit then, ends
with it, and takes it along when it ends.`,
		Example: `  headgate guard --engine http://127.0.0.1:8000 --listen 127.0.0.1:8100 --control 127.0.0.1:8101
  headgate guard --engine http://127.0.0.1:8000 -- vllm serve Qwen/Qwen3-8B --port 8000`,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if o.Log, err = logging.logger(); err != nil {
				return err
			}
			if o.Engine, err = url.Parse(engine); err != nil || o.Engine.Host == "" {
				return fmt.Errorf("--engine %q: must be http://host:port", engine)
			}
			if tokenFile != "" {
				data, err := os.ReadFile(tokenFile)
				if err != nil {
					return fmt.Errorf("--token-file: %w", err)
				}
				if o.Token = strings.TrimSpace(string(data)); o.Token == "" {
					return fmt.Errorf("--token-file %s: it is empty", tokenFile)
				}
			}
			if o.ID == "" {
				host, err := os.Hostname()
				if err != nil {
					return fmt.Errorf("--id: %w", err)
				}
				o.ID = net.JoinHostPort(host, o.Engine.Port())
			}
			o.Command = args
			o.Ready = func(data, control net.Addr) {
				fmt.Fprintf(cmd.OutOrStdout(), "guard %s on %s, control on %s\n", o.ID, data, control)
			}
			code, err := guard.Run(cmd.Context(), o)
			if code > 1 {
				return errExit{code, err}
			}
			return err
		},
	}
	cmd.Flags().StringVar(&engine, "engine", "http://127.0.0.1:8000", "base URL of the engine")
	cmd.Flags().StringVar(&o.Listen, "listen", "127.0.0.1:8100", "address for gateways' requests")
	cmd.Flags().StringVar(&o.ControlAt, "control", "127.0.0.1:8101", "address for gateways' control streams; other hosts than loopback need --token-file or --tls-client-ca")
	cmd.Flags().StringVar(&o.ID, "id", "", "the guard's name, the same in all its lives (default host name and port of the engine)")
	cmd.Flags().BoolVar(&o.RequireLease, "require-lease", true, "refuse what could start work without a lease; GET and HEAD always pass")
	cmd.Flags().StringVar(&tokenFile, "token-file", "", "file with the token that gateways must present")
	cmd.Flags().StringVar(&o.Cert, "tls-cert", "", "PEM file with the certificate of both ports")
	cmd.Flags().StringVar(&o.Key, "tls-key", "", "PEM file with its key")
	cmd.Flags().StringVar(&o.ClientCA, "tls-client-ca", "", "PEM file with the CA of the certificates that gateways must present on the control port")
	cmd.Flags().StringVar(&o.LockDir, "lock-dir", filepath.Join(os.TempDir(), "headgate-guard"), `folder of the engine's exclusive lock, "" for none`)
	cmd.Flags().DurationVar(&o.LockWait, "lock-wait", 10*time.Second, "how long to wait for a guard that holds the lock")
	cmd.Flags().DurationVar(&o.LeaseMax, "lease-max", guard.LeaseMaxDefault, "longest lease that is honoured, at least that of every gateway")
	cmd.Flags().Int64Var(&o.MaxBody, "max-body", guard.MaxBodyDefault, "largest request body in bytes")
	cmd.Flags().StringVar(&o.Revision, "model-revision", "", "model revision that the engine serves")
	cmd.Flags().DurationVar(&o.DrainTime, "drain-timeout", 30*time.Second, "how long attempts may go on after SIGTERM")
	logging.add(cmd)
	return cmd
}

// errExit ends the process with another code than 1.
type errExit struct {
	code int
	err  error
}

func (e errExit) Error() string { return e.err.Error() }
