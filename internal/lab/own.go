// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// Of a trace of the user's own: how long a stretch of it is replayed, how many
// requests at most, and how many streams an engine is guessed to decode at once,
// which only says where the search begins.
const (
	ownStretch  = 600 // seconds
	ownRequests = 200_000
	ownStreams  = 30
)

// What a trace of the user's own must have, or what is found means nothing: enough
// requests for a 99th percentile, a time that is longer than an answer's, and not
// so long that its stretches would be all but empty.
const (
	ownMin     = 100
	ownSpanMin = 10 * time.Second
	ownSpanMax = 31 * 24 * time.Hour
)

// own is a trace of the user's: a .jsonl file as Mooncake's are, or a .csv file as
// Azure's are. Windows are drawn from all of it.
func (t *Traces) own(ctx context.Context, name string, seed int64, n int) (w *Workload, err error) {
	if strings.HasSuffix(name, ".csv") {
		w, err = t.ownAzure(ctx, name, seed, n)
	} else {
		w, err = t.ownMooncake(ctx, name, seed, n, 1)
	}
	return w, err
}

func (t *Traces) ownAzure(ctx context.Context, name string, seed int64, n int) (*Workload, error) {
	rows, err := load(ctx, t, name, readAzure)
	if err != nil {
		return nil, err
	}
	last := rows[len(rows)-1]
	if err := ownEnough(name, len(rows), last.at-rows[0].at, last.line); err != nil {
		return nil, err
	}
	w, err := t.azure(ctx, name, name, seed, 600*n, 0, 1)
	if err != nil {
		return nil, err
	}
	w.own, w.guess = true, 5*float64(n)
	return w, nil
}

// ownMooncake lays that many times more copies over each other than by the guess.
func (t *Traces) ownMooncake(ctx context.Context, name string, seed int64, n, times int) (*Workload, error) {
	rows, err := load(ctx, t, name, readMooncake)
	if err != nil {
		return nil, err
	}
	last := rows[len(rows)-1]
	span := last.ms / 1000
	if err := ownEnough(name, len(rows), span, last.line); err != nil {
		return nil, err
	}
	spec := Engines["32b-tier"].Params
	busy := 0.0 // seconds of an engine that the trace takes, if half of the prompts are cached
	for _, row := range rows {
		busy += float64(row.in)/2*spec.Token.Seconds() + float64(row.out)*spec.StepFloor.Seconds()/ownStreams
	}
	stretch := min(span, ownStretch)
	guess := float64(n) * span / busy
	copies, most := (int(3*guess)+2)*times, max(int(ownRequests/(float64(len(rows))*stretch/span)), 1)
	w, err := t.mooncake(ctx, name, seed, min(copies, most), window{
		file: name, end: stretch, warm: 0.3 * stretch, to: 1 - stretch/span, common: common(rows),
	})
	if err != nil {
		return nil, err
	}
	w.own, w.guess = true, min(guess/2, w.loadMax)
	w.larger = func(ctx context.Context) (*Workload, error) {
		if copies >= most {
			return nil, fmt.Errorf("%d engines carry all %d copies of %s that are replayed, of %.4g s and about %d requests in all: want fewer engines or slower ones", n, most, name, stretch, ownRequests)
		}
		return t.ownMooncake(ctx, name, seed, n, 4*times)
	}
	return w, nil
}

// common are the blocks that more than a tenth of all requests begin with: what so
// many share is a prompt of the application and tells no session from another.
func common(rows []mooncakeRow) map[int64]bool {
	found := map[int64]bool{}
	for depth := 0; ; depth++ {
		count, before := map[int64]int{}, len(found)
		for _, row := range rows {
			if depth >= len(row.blocks) {
				continue
			}
			id := row.blocks[depth]
			if count[id]++; 10*count[id] > len(rows) {
				found[id] = true
			}
		}
		if len(found) == before {
			return found
		}
	}
}

// ownEnough refuses a trace that can't show what a fleet carries. last is the line
// of the latest request, span the seconds between the first and it.
func ownEnough(name string, requests int, span float64, last int) error {
	switch {
	case requests < ownMin:
		return fmt.Errorf("%s: has %d requests, want at least %d: of fewer, the slowest alone is the 99th percentile", name, requests, ownMin)
	case span < ownSpanMin.Seconds():
		return fmt.Errorf("%s: all %d requests come within %.4g s, want at least %.0f s from the first to the last: what comes at once is a burst and shows no load that lasts (a .jsonl file has milliseconds)",
			name, requests, span, ownSpanMin.Seconds())
	case span > ownSpanMax.Seconds():
		return fmt.Errorf("%s:%d: timestamp is %.4g days after the first, want at most %.0f (a .jsonl file has milliseconds)",
			name, last, span/86400, ownSpanMax.Hours()/24)
	}
	return nil
}
