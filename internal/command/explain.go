// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/upstream"
)

// explainFlags say what is asked of which gateway.
type explainFlags struct {
	admin     string
	tokenFile string
	path      string
	host      string
	headers   []string
	json      bool
}

func newExplain() *cobra.Command {
	var f explainFlags
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Say where a running gateway would send a request, and why",
		Long: `Read the body of a request from standard input and ask a running gateway,
by its admin listener, where it would send it now: the pool, how each of its
endpoints fared, and why one won. Nothing is sent to an engine.`,
		Example: `  echo '{"model":"qwen","messages":[{"role":"user","content":"hello"}]}' | headgate explain
  headgate explain --path /v1/embeddings -H 'x-session-id: 7' --json < body.json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.admin, "admin", "http://127.0.0.1:9901", "address of the gateway's admin listener: host:port, or a URL")
	flags.StringVar(&f.tokenFile, "token-file", "", "file with the admin listener's token")
	flags.StringVar(&f.path, "path", "/v1/chat/completions", "path of the request")
	flags.StringVar(&f.host, "host", "", "Host of the request")
	flags.StringArrayVarP(&f.headers, "header", "H", nil, "header of the request, as 'Name: value'; may be given several times")
	flags.BoolVar(&f.json, "json", false, "print JSON")
	return cmd
}

// explainTime is how long a gateway may take to answer.
const explainTime = 10 * time.Second

func (f *explainFlags) run(ctx context.Context, in io.Reader, out io.Writer) error {
	body, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	answer, err := f.ask(ctx, body)
	if err != nil {
		return err
	}
	if f.json {
		var pretty bytes.Buffer
		if err := json.Indent(&pretty, answer, "", "  "); err != nil {
			return fmt.Errorf("the gateway's answer: %w", err)
		}
		_, err := pretty.WriteTo(out)
		return err
	}
	var e gateway.Explained
	if err := json.Unmarshal(answer, &e); err != nil {
		return fmt.Errorf("the gateway's answer: %w", err)
	}
	return printExplained(out, &e)
}

// ask has the gateway explain the request.
func (f *explainFlags) ask(ctx context.Context, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, explainTime)
	defer cancel()
	// Configurations have the address without a scheme.
	admin := f.admin
	if !strings.Contains(admin, "://") {
		admin = "http://" + admin
	}
	base, err := url.Parse(admin)
	if err != nil {
		return nil, fmt.Errorf("--admin %q: write it as http://host:port", f.admin)
	}
	conn, err := upstream.New(upstream.Config{URL: base, ConnectTimeout: explainTime})
	if err != nil {
		return nil, fmt.Errorf("--admin %q: %w", f.admin, err)
	}
	defer conn.Close()
	header := []upstream.Field{{Name: "Content-Type", Value: "application/octet-stream"}}
	if f.tokenFile != "" {
		token, err := os.ReadFile(f.tokenFile)
		if err != nil {
			return nil, fmt.Errorf("--token-file: %w", err)
		}
		header = append(header, upstream.Field{Name: "Authorization", Value: "Bearer " + strings.TrimSpace(string(token))})
	}
	query := url.Values{"path": {f.path}, "header": f.headers}
	if f.host != "" {
		query.Set("host", f.host)
	}
	res, end := conn.Do(ctx, &upstream.Request{
		Method: http.MethodPost, Target: "/admin/v1/explain?" + query.Encode(), Header: header, Body: [][]byte{body},
	})
	if end != nil {
		return nil, fmt.Errorf("the gateway at %s: %w", f.admin, end)
	}
	answer, err := io.ReadAll(res)
	_ = res.Close()
	if err != nil {
		return nil, fmt.Errorf("the gateway at %s: %w", f.admin, err)
	}
	if res.Status != http.StatusOK {
		return nil, fmt.Errorf("the gateway at %s: %d: %s", f.admin, res.Status, strings.TrimSpace(string(answer)))
	}
	return answer, nil
}

// printDecision writes what the request would do, and by what that was decided.
func printDecision(w io.Writer, e *gateway.Explained) {
	d := e.Decision
	fmt.Fprintf(w, "priority\t%d", e.Priority)
	if e.Objective != "" {
		fmt.Fprintf(w, ", objective %s", e.Objective)
	}
	fmt.Fprintf(w, "\ntargets\tfirst output %s, per token %s\n", target(d.TTFT), target(d.TPOT))
	if q := e.Queued; q != nil && q.Requests > 0 {
		fmt.Fprintf(w, "queue\t%d wait, %d of them with this priority or a higher one; what follows is as if nobody did\n", q.Requests, q.Before)
	}
	out := func(reasons ...string) bool {
		return slices.ContainsFunc(d.Candidates, func(c gateway.CandidateFate) bool { return slices.Contains(reasons, c.Out) })
	}
	switch {
	case d.Waits && d.Endpoint != "":
		fmt.Fprintf(w, "would wait\tfor %s, which has no room\nbecause\t%s\n", d.Endpoint, d.Reason)
	case d.Waits && out("full", "busy"):
		fmt.Fprintln(w, "would wait\tfor room on any endpoint that could take it")
	case d.Waits && out("paused"):
		fmt.Fprintln(w, "would wait\tfor the end of a pause that an engine asked for")
	case d.Waits:
		fmt.Fprintln(w, "would wait\tfor an engine to be started")
	case d.Endpoint != "":
		fmt.Fprintf(w, "goes to\t%s\nbecause\t%s\n", d.Endpoint, d.Reason)
	}
	if d.Fallback > 0 {
		fmt.Fprintf(w, "decided by\tfallback %d: the filters before it leave nobody\n", d.Fallback)
	}
}

// target is a time to keep, in words.
func target(seconds float64) string {
	if seconds == 0 {
		return "none"
	}
	return time.Duration(seconds * float64(time.Second)).Round(time.Millisecond / 10).String()
}

// printExplained writes for people.
func printExplained(out io.Writer, e *gateway.Explained) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	model := e.Model
	if e.Target != "" && e.Target != e.Model {
		model += ", to engines " + e.Target
	}
	if e.Adapter != "" {
		model += ", an adapter"
	}
	if model != "" {
		fmt.Fprintf(w, "model\t%s\n", model)
	}
	if e.Route != nil {
		var backends []string
		for _, b := range e.Backends {
			text := fmt.Sprintf("%s %d", b.Pool, b.Weight)
			if b.Model != "" {
				text += " as " + b.Model
			}
			backends = append(backends, text)
		}
		fmt.Fprintf(w, "route\troutes[%d], of pools by weight: %s\n", *e.Route, strings.Join(backends, ", "))
		fmt.Fprintf(w, "pool\t%s, profile %s\n", e.Pool, e.Profile)
		fmt.Fprintf(w, "prompt\t%d tokens (%s), %d blocks hashed\n", e.Prompt.Tokens, e.Prompt.Source, e.Prompt.Blocks)
	}
	if e.Error != nil {
		fmt.Fprintf(w, "refused\t%s: %s\n", e.Error.Code, e.Error.Message)
	}
	if e.Decision == nil {
		return w.Flush()
	}
	printDecision(w, e)
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w, "\n\tENDPOINT\tLOAD\tCACHED\tTOTAL\tSCORES")
	for _, c := range e.Decision.Candidates {
		mark := ""
		if c.Chosen {
			mark = ">"
		}
		if c.Out == "standing" {
			c.Out += " (" + c.Standing + ")"
		}
		if c.Out != "" {
			fmt.Fprintf(w, "%s\t%s\t%d\t\t\tout: %s\n", mark, c.Endpoint, c.Load, c.Out)
			continue
		}
		var scores []string
		for _, s := range c.Scores {
			text := fmt.Sprintf("%s %.3f", s.Plugin, s.Value)
			if s.Terms != "" {
				text += " (" + s.Terms + ")"
			}
			scores = append(scores, text)
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%.3f\t%s\n", mark, c.Endpoint, c.Load, c.Cached, c.Total, strings.Join(scores, "; "))
	}
	return w.Flush()
}
