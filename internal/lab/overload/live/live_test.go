// SPDX-License-Identifier: Apache-2.0

package live

import (
	"context"
	"log/slog"
	"testing"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/internal/lab/overload"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A short flood: every request is answered whole or refused, and some are refused.
func TestAFloodOverSockets(t *testing.T) {
	demand := overload.Standard.Make(1, []overload.Phase{{Seconds: 1.5, Rate: 60}})
	for i := range demand.Asked {
		demand.Asked[i].Out = min(demand.Asked[i].Out, 30)
	}
	r, err := Play(context.Background(), overload.Pool{Engine: "8b-a100", Engines: 1}, demand, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	outcomes := map[overload.Outcome]int{}
	for i, f := range r.Finished {
		outcomes[f.Outcome]++
		if f.Asked != &demand.Asked[i] {
			t.Fatalf("request %d has no fate", i)
		}
	}
	if r.Failed > 0 || outcomes[overload.Answered] == 0 || outcomes[overload.Refused] == 0 || len(r.Refusals) != outcomes[overload.Refused] {
		t.Errorf("%d failed, outcomes %v, %d refusals", r.Failed, outcomes, len(r.Refusals))
	}
}
