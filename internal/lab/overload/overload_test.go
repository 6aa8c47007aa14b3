// SPDX-License-Identifier: Apache-2.0

package overload

import (
	"context"
	"flag"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/flow"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "replay the run of this seed alone")
	seedsFlag = flag.Int("seeds", 12, "how many seeds are played; HEADGATE_LONG=1 plays 2000")
)

// slow skips what takes too long under the race detector.
func slow(t *testing.T) {
	t.Helper()
	if racing {
		t.Skip("nothing runs at the same time here")
	}
}

func long() bool { return os.Getenv("HEADGATE_LONG") != "" }

// In runs in which clients leave, engines die and come, limits change and metrics
// stay away, the checkers find nothing: nobody waits while an engine idles, nobody
// goes before a higher request that could have gone, nobody waits or is sent past
// a deadline, everybody has one end, and all that was counted is counted out.
func TestChaosBreaksNoPromise(t *testing.T) {
	first, last := uint64(1), uint64(*seedsFlag)
	if racing {
		last = 3
	}
	if long() {
		last = max(last, 2000)
	}
	if *seedFlag > 0 {
		first, last = *seedFlag, *seedFlag
	}
	outcomes := map[Outcome]int{}
	for seed := first; seed <= last; seed++ {
		run := RandomRun(seed)
		record, err := run.Play()
		if err != nil {
			t.Errorf("%v\n\t%d engines, %v\n\tagain: go test ./internal/lab/overload -run '^%s$' -seed=%d", err, run.Pool.Engines, run.Chaos.Strikes, t.Name(), seed)
			continue
		}
		for _, f := range record.Finished {
			outcomes[f.Outcome]++
		}
	}
	// Runs in which nothing happens would prove nothing; a few may miss the rarest.
	for _, o := range []Outcome{Answered, Refused, Left, Broken} {
		if outcomes[o] == 0 && last-first >= 9 {
			t.Errorf("no request ended with outcome %d: %v", o, outcomes)
		}
	}
	if outcomes[Unfinished] > 0 {
		t.Errorf("%d requests never ended", outcomes[Unfinished])
	}
}

func TestTheSameSeedGivesTheSameRun(t *testing.T) {
	play := func(seed uint64) *Record {
		run := RandomRun(seed)
		r, err := run.Play()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if a, b := play(3), play(3); !reflect.DeepEqual(a.Finished, b.Finished) {
		t.Error("one seed gave two runs")
	}
	if a, b := play(3), play(4); len(a.Finished) == len(b.Finished) {
		t.Error("two seeds gave one run")
	}
}

// carried is about what four 8b-a100 engines carry. TestCapacity says when it is
// not true any more.
const carried = 24.0

// step plays the overload of some seeds, and the best of some steady loads.
func step(t *testing.T, a Admission, seeds uint64) (goodput, peak, top, wasted, late float64) {
	t.Helper()
	s := Study{Pool: Pool{Engine: "8b-a100", Engines: 4}, Shape: Standard}
	n := float64(seeds)
	for seed := uint64(1); seed <= seeds; seed++ {
		r, err := s.step(a, seed, carried)
		if err != nil {
			t.Fatal(err)
		}
		end := stepBefore + stepFor
		p := r.Part(stepBefore, end)
		goodput, top, wasted = goodput+p.Goodput/n, top+p.Priorities[Priorities[0]]/n, wasted+p.Wasted/n
		late += (r.Recovery(end, end+stepAfter, attainment) - r.drainAt(end)) / n
	}
	for _, load := range []float64{0.9, 1.1, 1.5} {
		sum := 0.0
		for seed := uint64(1); seed <= seeds; seed++ {
			r, err := s.steady(a, seed, load*carried)
			if err != nil {
				t.Fatal(err)
			}
			sum += r.Part(steadyWarm, steadyWarm+steadyFor).Goodput / n
		}
		peak = max(peak, sum)
	}
	return goodput, peak, top, wasted, late
}

func TestTwiceTheCapacityCostsTheHighestPriorityNothing(t *testing.T) {
	slow(t)
	// Recovery is counted in whole seconds, and one bad second of a few seeds is
	// chance; a queue that does not recover takes tens.
	seeds, lateMax := uint64(2), 2.0
	if long() {
		seeds, lateMax = 20, 0.5
	}
	goodput, peak, top, wasted, late := step(t, Headgate, seeds)
	if goodput < 0.95*peak {
		t.Errorf("%.2f requests/s are good, want 0.95 of %.2f", goodput, peak)
	}
	if top < 0.99 {
		t.Errorf("%.4f of the highest priority are good, want 0.99", top)
	}
	if wasted > 0.02 {
		t.Errorf("%.4f of the work is wasted, want 0.02", wasted)
	}
	if late > lateMax {
		t.Errorf("it is over %.1f s later than the queue said, in the mean", late)
	}
	// That this is an overload at all:
	none, _ := AdmissionNamed("none")
	if goodput, peak, _, _, _ := step(t, none, 1); goodput > 0.5*peak {
		t.Errorf("without flow control %.2f of %.2f requests/s are good: that is no overload", goodput, peak)
	}
}

func TestCapacity(t *testing.T) {
	if !long() {
		t.Skip("plays many loads; set HEADGATE_LONG=1")
	}
	s := Study{Pool: Pool{Engine: "8b-a100", Engines: 4}, Shape: Standard, Seeds: []uint64{1, 2, 3}}
	if c, err := s.Capacity(context.Background()); err != nil || math.Abs(c-carried) > 2 {
		t.Errorf("capacity is %.2f requests/s (%v), want about %v", c, err, carried)
	}
}

func TestBackloggedFlowsShareFairly(t *testing.T) {
	slow(t)
	f, err := Pool{Engine: "8b-a100", Engines: 2}.Fair(1)
	if err != nil {
		t.Fatal(err)
	}
	if f.Jain < 0.98 {
		t.Errorf("Jain's index is %.4f, want 0.98: %v", f.Jain, f.Served)
	}
	if f.Gap > f.Bound {
		t.Errorf("the service of two flows differed by %.0f tokens, want at most %.0f", f.Gap, f.Bound)
	}
	if f.Hit < 0.95*f.HitFCFS {
		t.Errorf("%.3f of the prompts were cached, want 0.95 of %.3f", f.Hit, f.HitFCFS)
	}
}

func TestAnOutageOfMetricsNeitherHaltsNorFloods(t *testing.T) {
	slow(t)
	pool := Pool{Engine: "8b-a100", Engines: 4}
	for _, load := range []float64{0.8, 2} {
		o, err := pool.Outage(Standard, Headgate, 1, load*carried)
		if err != nil {
			t.Fatal(err)
		}
		if o.Sent < 0.95*o.Normal || o.Inside > o.Usual+3 || o.Good < o.Without-0.05 {
			t.Errorf("at %v of capacity: %+v", load, o)
		}
	}
	peer, _ := AdmissionNamed("llm-d")
	if o, err := pool.Outage(Standard, peer, 1, 0.8*carried); err != nil || o.Sent > 0.1*o.Normal {
		t.Errorf("llm-d's rules stop when there are no metrics, and here they don't: %+v, %v", o, err)
	}
}

// Broken doors, each against one promise. A checker that finds nothing in them
// checks nothing.
func TestCheckersBite(t *testing.T) {
	slow(t)
	for _, c := range []struct {
		what, want string
		make       func(*queued) door
	}{
		{"no pump after an arrival", "has nothing to do", func(d *queued) door { return &sleepy{d} }},
		{"the lowest first", "goes before", func(d *queued) door { return &upsideDown{d} }},
		{"no look at the clock", "after its time", func(d *queued) door { return &timeless{d} }},
		{"ends are not told", "counts", func(d *queued) door { return &forgetful{d} }},
		{"clients that left stay", "taken for nobody", func(d *queued) door { return &hoarder{d} }},
	} {
		found := ""
		for seed := uint64(1); seed <= 30 && !strings.Contains(found, c.want); seed++ {
			run := RandomRun(seed)
			run.Chaos = nil
			run.Admission.make = func(w *world, a *Admission) door { return c.make(newQueued(w, a).(*queued)) }
			if _, err := run.Play(); err != nil {
				found = err.Error()
			}
		}
		if !strings.Contains(found, c.want) {
			t.Errorf("%s: found %q, want %q", c.what, found, c.want)
		}
	}
}

type sleepy struct{ *queued }

func (d *sleepy) arrive(now float64, j *job) {
	round := d.w.book.Begin(clock(now), d.w.pool)
	defer round.End()
	if err := d.queue.Arrive(clock(now), &j.request, d.w.check.watch(now, round)); err != nil {
		d.w.refuse(now, j, err)
	}
}

type upsideDown struct{ *queued }

func (d *upsideDown) arrive(now float64, j *job) {
	j.request.Priority = -j.request.Priority
	d.queued.arrive(now, j)
}

type timeless struct{ *queued }

func (d *timeless) due() float64 {
	if d.dirty && len(d.w.check.waits) == 0 {
		return 0
	}
	return math.Inf(1)
}

type forgetful struct{ *queued }

func (d *forgetful) done(*job) {}

type hoarder struct{ *queued }

func (d *hoarder) leave(j *job) bool {
	d.queue.Leave(&j.request)
	copied := &flow.Request{Ask: j.request.Ask, Priority: j.Priority, Fairness: "left", Owner: j}
	round := d.w.book.Begin(clock(d.w.play.Now()), d.w.pool)
	defer round.End()
	_ = d.queue.Arrive(clock(d.w.play.Now()), copied, round)
	return true
}

func TestReportTellsHeadgateFromBaselines(t *testing.T) {
	var r Report
	r.Add(PoolReport{Engine: "e", Engines: 2, Steps: []Step{
		{Name: "headgate", GoodputOfPeak: 1, Steady: []Steady{{Load: 1, Goodput: 5}}, Timeline: make([]TimelineAt, 6)},
		{Name: "none", Peer: true, Steady: []Steady{{Load: 1, Goodput: 2}}, Timeline: make([]TimelineAt, 6)},
	}})
	var b strings.Builder
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"overload_2x": {`, `"goodput_of_peak": 1,`, `"top_priority_slo"`, `"wasted"`, `"baselines": [`, `"name": "none"`} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %s in the report", want)
		}
	}
	if r.Overload2x.Name != "headgate" || len(r.Baselines) != 1 {
		t.Errorf("the report is of %q with %d baselines", r.Overload2x.Name, len(r.Baselines))
	}
	for name, svg := range r.Pools[0].Plots() {
		if strings.Count(svg, "<polyline") != 2 || strings.Contains(svg, "NaN") {
			t.Errorf("%s: %s", name, svg)
		}
	}
}
