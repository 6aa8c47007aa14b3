// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/journal/sqlite"
)

func newJournal() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "journal",
		Short: "Read the journal of a gateway, running or not",
	}
	cmd.PersistentFlags().StringVar(&file, "file", "headgate.db", "the journal's database file")
	// with opens the journal for one subcommand.
	with := func(run func(*cobra.Command, *sqlite.Store, []string) error) func(*cobra.Command, []string) error {
		return func(cmd *cobra.Command, args []string) error {
			store, err := sqlite.OpenReader(cmd.Context(), file)
			if err != nil {
				return err
			}
			defer store.Close()
			return run(cmd, store, args)
		}
	}
	cmd.AddCommand(newJournalGet(with), newJournalList(with), newJournalTail(with), newJournalExport(with))
	return cmd
}

type withStore func(func(*cobra.Command, *sqlite.Store, []string) error) func(*cobra.Command, []string) error

func newJournalGet(with withStore) *cobra.Command {
	return &cobra.Command{
		Use:   "get REQUEST",
		Short: "Print a request's record and its events as JSON",
		Args:  cobra.ExactArgs(1),
		RunE: with(func(cmd *cobra.Command, store *sqlite.Store, args []string) error {
			id := inference.RequestID(args[0])
			record, err := store.Get(cmd.Context(), id)
			if err != nil {
				return err
			}
			out := json.NewEncoder(cmd.OutOrStdout())
			out.SetIndent("", "  ")
			if err := out.Encode(record); err != nil {
				return err
			}
			return eachEvent(cmd.Context(), store, journal.EventFilter{Request: id}, json.NewEncoder(cmd.OutOrStdout()).Encode)
		}),
	}
}

func newJournalList(with withStore) *cobra.Command {
	var outcome string
	var since time.Duration
	f := journal.Filter{}
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List requests, newest first",
		Args:  cobra.NoArgs,
		RunE: with(func(cmd *cobra.Command, store *sqlite.Store, _ []string) error {
			if f.Outcome = inference.ParseOutcome(outcome); outcome != "" && f.Outcome == inference.NoOutcome {
				return fmt.Errorf("--outcome %q: must be completed, interrupted, failed, rejected or cancelled", outcome)
			}
			if since > 0 {
				f.Since = journal.At(time.Now().Add(-since))
			}
			page, err := store.List(cmd.Context(), f)
			if err != nil {
				return err
			}
			return printRecords(cmd.OutOrStdout(), page.Records)
		}),
	}
	cmd.Flags().StringVar(&outcome, "outcome", "", "only requests that ended so")
	cmd.Flags().BoolVar(&f.Unfinished, "unfinished", false, "only requests that have not ended")
	cmd.Flags().StringVar(&f.Tenant, "tenant", "", "only this tenant's")
	cmd.Flags().StringVar(&f.Pool, "pool", "", "only this pool's")
	cmd.Flags().StringVar(&f.Model, "model", "", "only for this model")
	cmd.Flags().DurationVar(&since, "since", 0, "only of the last so long, as 15m")
	cmd.Flags().IntVar(&f.Limit, "limit", 50, "at most so many")
	return cmd
}

func printRecords(out io.Writer, records []*journal.Record) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CREATED\tREQUEST\tMODEL\tPOOL\tOUTCOME\tCODE\tATTEMPTS\tTOKENS")
	for _, r := range records {
		outcome := string(r.Outcome)
		if outcome == "" {
			outcome = "(" + r.Phase + ")"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\n", r.CreatedAt.Time().UTC().Format(time.RFC3339),
			r.RequestID, r.Model, r.Pool, outcome, r.Code, len(r.Attempts), r.DeliveredOutputTokens)
	}
	return w.Flush()
}

// tailEvery is how often tail looks for new events.
const tailEvery = 200 * time.Millisecond

func newJournalTail(with withStore) *cobra.Command {
	var request string
	cmd := &cobra.Command{
		Use:   "tail",
		Short: "Print events as they happen, as JSON lines, until Ctrl-C",
		Args:  cobra.NoArgs,
		RunE: with(func(cmd *cobra.Command, store *sqlite.Store, _ []string) error {
			f := journal.EventFilter{Request: inference.RequestID(request)}
			if request == "" {
				last, err := store.LastSeq(cmd.Context())
				if err != nil {
					return err
				}
				f.After = last
			}
			out := json.NewEncoder(cmd.OutOrStdout())
			tick := time.NewTicker(tailEvery)
			defer tick.Stop()
			for {
				err := eachEvent(cmd.Context(), store, f, func(e any) error {
					f.After = e.(journal.Event).Seq
					return out.Encode(e)
				})
				if err != nil {
					return err
				}
				select {
				case <-cmd.Context().Done():
					return nil
				case <-tick.C:
				}
			}
		}),
	}
	cmd.Flags().StringVar(&request, "request", "", "only of this request, from its begin")
	return cmd
}

func newJournalExport(with withStore) *cobra.Command {
	return &cobra.Command{
		Use:   "export",
		Short: "Print all records as JSON lines, newest first",
		Args:  cobra.NoArgs,
		RunE: with(func(cmd *cobra.Command, store *sqlite.Store, _ []string) error {
			out := json.NewEncoder(cmd.OutOrStdout())
			f := journal.Filter{Limit: 1000}
			for {
				page, err := store.List(cmd.Context(), f)
				if err != nil {
					return err
				}
				for _, r := range page.Records {
					if err := out.Encode(r); err != nil {
						return err
					}
				}
				if f.Before = page.Next; page.Next == 0 {
					return nil
				}
			}
		}),
	}
}

// eachEvent pages through events.
func eachEvent(ctx context.Context, store *sqlite.Store, f journal.EventFilter, do func(any) error) error {
	for {
		events, err := store.Events(ctx, f)
		if err != nil || len(events) == 0 {
			return err
		}
		for _, e := range events {
			f.After = e.Seq
			if err := do(e); err != nil {
				return err
			}
		}
	}
}
