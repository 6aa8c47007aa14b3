// SPDX-License-Identifier: Apache-2.0

package live

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/headgate/headgate/internal/lab/overload"
)

// Report is a run over sockets and the same in virtual time.
type Report struct {
	Engine   string  `json:"engine"`
	Engines  int     `json:"engines"`
	Capacity float64 `json:"capacity"` // requests a second, in virtual time
	Seconds  float64 `json:"seconds"`  // at twice the capacity

	Sockets   Judged `json:"sockets"`
	Simulated Judged `json:"simulated"`

	Requests int     `json:"requests"`
	Failed   int     `json:"failed"` // ended otherwise than with an answer or a refusal
	Refusal  float64 `json:"refusal_p50_ms"`
	Slowest  float64 `json:"refusal_p99_ms"` // of those refused at once
}

// Judged is what became of the requests that came at twice the capacity.
type Judged struct {
	GoodputOfPeak float64 `json:"goodput_of_peak"` // the peak is the goodput at the capacity
	Top           float64 `json:"top_priority_slo"`
	Wasted        float64 `json:"wasted"`
	Goodput       float64 `json:"goodput"`
	Refused       float64 `json:"refused"`
	First99       float64 `json:"ttft_p99"`
}

// Seconds of the runs, and what is not judged at the begin of a load.
const (
	before = 5.0
	high   = 25.0
	after  = 5.0
	settle = 3.0
)

// Measure plays twice the capacity, and the capacity, in virtual time and over
// sockets. It takes about a minute and a half.
func Measure(ctx context.Context, pool overload.Pool, seed uint64, log func(format string, args ...any)) (*Report, error) {
	study := overload.Study{Pool: pool, Shape: overload.Standard, Seeds: []uint64{seed}}
	capacity, err := study.Capacity(ctx)
	if err != nil {
		return nil, err
	}
	report := &Report{Engine: pool.Engine, Engines: pool.Engines, Capacity: capacity, Seconds: high}
	step := overload.Standard.Make(seed, []overload.Phase{
		{Seconds: before, Rate: 0.7 * capacity}, {Seconds: high, Rate: 2 * capacity}, {Seconds: after, Rate: 0.7 * capacity},
	})
	steady := overload.Standard.Make(seed, []overload.Phase{{Seconds: high, Rate: capacity}})
	var virtual [2]*overload.Record
	for i, d := range []*overload.Demand{steady, step} {
		run := overload.Run{Pool: pool, Demand: d, Admission: overload.Headgate, Seed: seed}
		if virtual[i], err = run.Play(); err != nil {
			return nil, err
		}
	}
	report.Simulated = judge(virtual[0], virtual[1])
	var real [2]*Result
	for i, d := range []*overload.Demand{steady, step} {
		log("%d requests over sockets, %.0f s", len(d.Asked), d.End)
		if real[i], err = Play(ctx, pool, d, slog.New(slog.DiscardHandler)); err != nil {
			return nil, err
		}
	}
	report.Sockets = judge(&real[0].Record, &real[1].Record)
	report.Requests, report.Failed = len(step.Asked), real[1].Failed
	if refusals := atOnce(real[1].Refusals); len(refusals) > 0 {
		report.Refusal = milliseconds(refusals[len(refusals)/2])
		report.Slowest = milliseconds(refusals[len(refusals)*99/100])
	}
	return report, ctx.Err()
}

// atOnce is the refusals of requests that did not have to wait first.
func atOnce(all []time.Duration) []time.Duration {
	for i, d := range all {
		if d > waited {
			return all[:i]
		}
	}
	return all
}

// waited is the time from which a refusal came to a request that waited: no
// request can wait less before it gets hopeless.
const waited = 100 * time.Millisecond

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func judge(steady, step *overload.Record) Judged {
	peak := steady.Part(settle, high)
	p := step.Part(before+settle, before+high)
	return Judged{
		GoodputOfPeak: p.Goodput / peak.Goodput, Top: p.Priorities[overload.Priorities[0]],
		Wasted: p.Wasted, Goodput: p.Goodput, Refused: p.Refused, First99: p.First99,
	}
}

// WriteTable writes both beside each other.
func (r *Report) WriteTable(out io.Writer) {
	fmt.Fprintf(out, "%d engines %s over sockets, %.1f requests/s for %.0f s, %d requests, %d failed; refused at once in %.2f ms, 99 %% in %.2f ms\n",
		r.Engines, r.Engine, 2*r.Capacity, r.Seconds, r.Requests, r.Failed, r.Refusal, r.Slowest)
	for _, line := range []struct {
		name string
		Judged
	}{{"sockets", r.Sockets}, {"virtual time", r.Simulated}} {
		fmt.Fprintf(out, "%-14s goodput %.2f/s, %.3f of peak, highest priority %.1f %%, wasted %.2f %%, refused %.1f %%\n",
			line.name, line.Goodput, line.GoodputOfPeak, 100*line.Top, 100*line.Wasted, 100*line.Refused)
	}
}
