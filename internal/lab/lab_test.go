// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/simengine/model"
)

// bench is a view with facts set by hand.
func bench(t *testing.T, n int) *view {
	t.Helper()
	c := Cell{Workload: "b2b", N: n}
	f, err := newFleet(c, &Workload{BlockTokens: blockLarge, engine: "32b"}, false)
	if err != nil {
		t.Fatal(err)
	}
	return newView(f, c)
}

// TestPeersDecideAsTheirFormulasSay: each row is worked out by hand from the
// formula that the policy's project publishes.
func TestPeersDecideAsTheirFormulasSay(t *testing.T) {
	for _, c := range []struct {
		policy string
		why    string
		want   int
		in     int
		set    func(v *view)
	}{
		{"least-request", "3 < 4 < 5", 1, 1000, func(v *view) { v.running = []float64{4, 3, 5} }},

		{"sglang", "max-min = 60 is within 64, and 400/1000 > 0.3: the match", 2, 1000, func(v *view) {
			v.running, v.cached = []float64{0, 20, 60}, []int{0, 0, 400}
		}},
		{"sglang", "max-min = 65 > 64 and 70 > 1.5×5: least load", 0, 1000, func(v *view) {
			v.running, v.cached = []float64{5, 20, 70}, []int{0, 0, 900}
		}},
		{"sglang", "max-min = 70 > 64 but 370 < 1.5×300: the match", 2, 1000, func(v *view) {
			v.running, v.cached = []float64{300, 320, 370}, []int{0, 0, 900}
		}},
		{"sglang", "300/1000 is not more than 0.3: least load", 0, 1000, func(v *view) {
			v.running, v.cached = []float64{5, 20, 9}, []int{0, 0, 300}
		}},
		{"sglang-tuned", "max-min = 9 > 8 and 12 > 1.5×3: least load", 0, 1000, func(v *view) {
			v.running, v.cached = []float64{3, 7, 12}, []int{0, 0, 900}
		}},

		// 3×hit + 2×queue + 2×(1-KV): 0+2×1+2×0.5=3, 3×0.9+2×0+2×0.1=2.9, 3×0.5+2×0.5+2×0.4=3.3.
		{"llm-d-3-2-2", "3.0, 2.9, 3.3", 2, 1000, func(v *view) {
			v.cached, v.queued, v.kv = []int{0, 900, 500}, []float64{0, 4, 2}, []float64{0.5, 0.9, 0.6}
		}},
		{"llm-d-3-2-2", "queues are equal, so all score 2: 3.0, 4.9, 4.7", 1, 1000, func(v *view) {
			v.cached, v.queued, v.kv = []int{0, 900, 500}, []float64{3, 3, 3}, []float64{0.5, 0.9, 0.4}
		}},

		{"llm-d-sticky", "only 2 holds 0.8, and is 200,000 ahead of the idlest, within 286,720", 2, 1000, func(v *view) {
			v.cached, v.waiting = []int{0, 700, 800}, []float64{0, 10, 200_000}
		}},
		{"llm-d-sticky", "2 is 290,000 ahead: the least work left of all, 0: 1000, 1: 310", 1, 1000, func(v *view) {
			v.cached, v.waiting = []int{0, 700, 800}, []float64{0, 10, 290_000}
		}},
		{"llm-d-sticky-tuned", "1 holds 0.7 ≥ 0.5 and 2 is 40,000 > 32,000 ahead", 1, 1000, func(v *view) {
			v.cached, v.waiting = []int{0, 700, 800}, []float64{0, 500, 40_000}
		}},

		// (waiting + fresh)/512 + (context + prompt)/512, common parts left out:
		// 0: 0+1000+9000, 1: 2000+500+5000, 2: 100+1000+8000.
		{"dynamo", "10,000, 7,500, 9,100 tokens", 1, 1000, func(v *view) {
			v.cached, v.waiting, v.context = []int{0, 500, 0}, []float64{0, 2000, 100}, []float64{9000, 5000, 8000}
		}},

		{"lmetric", "1000×9 = 9,000, (2,000+500)×3 = 7,500, (7,000+100)×1 = 7,100", 2, 1000, func(v *view) {
			v.cached, v.waiting, v.running = []int{0, 500, 900}, []float64{0, 2000, 7000}, []float64{8, 2, 0}
		}},
		{"lpwl", "1,000, 2,500, 950", 2, 1000, func(v *view) {
			v.cached, v.waiting, v.running = []int{0, 500, 900}, []float64{0, 2000, 850}, []float64{0, 0, 90}
		}},
		{"lpwl", "equal work: fewer requests", 1, 1000, func(v *view) { v.running = []float64{4, 3, 5} }},

		// 0.8×first/target + 0.2×pace×(n+2)/(n+1)/0.1, at rates of 10,000 and 20,000
		// tokens a second after 30 ms: 1000 tokens take 0.13125 s or 0.080625 s.
		{"predicted-latency", "target 2.1: 0.05+0.13=0.18, 0.031+0.08=0.111, 0.05+0.08=0.13", 1, 1000, func(v *view) {
			v.rates[1].PerToken /= 2
			v.pace, v.running = []float64{0.06, 0.03, 0.035}, []float64{9, 2, 5}
		}},
	} {
		v := bench(t, 3)
		c.set(v)
		p, ok := PolicyNamed(c.policy)
		if !ok {
			t.Fatalf("no policy %q", c.policy)
		}
		q := &flight{Request: &Request{In: c.in, Out: 100}, at: -1, target: 2.1}
		for range 20 {
			if got := p.make(v).choose(5, q); got != c.want {
				t.Errorf("%s chose %d, want %d: %s", c.policy, got, c.want, c.why)
				break
			}
		}
	}
}

func TestBoundedHashPassesFullEngines(t *testing.T) {
	p, _ := PolicyNamed("chwbl")
	q := &flight{Request: &Request{In: 2000, Blocks: []uint64{7, 8, 9}}}
	v := bench(t, 4)
	home := p.make(v).choose(0, q)
	if again := p.make(v).choose(9, q); again != home {
		t.Fatalf("the same begin went to %d and %d", home, again)
	}
	// ceil(1.25×(8+1)/4) = 3: two more may come to an engine with none, none to one with three.
	v.running[home], v.running[(home+2)%4], v.running[(home+3)%4] = 3, 3, 2
	if got := p.make(v).choose(0, q); got != (home+1)%4 {
		t.Errorf("went to %d past %d, want the next one", got, home)
	}
}

func TestRoundRobinAndRandomUseEverybody(t *testing.T) {
	for _, name := range []string{"round-robin", "random", "p2c"} {
		p, _ := PolicyNamed(name)
		run, got := p.make(bench(t, 4)), map[int]int{}
		for range 400 {
			got[run.choose(0, &flight{Request: &Request{In: 10}})]++
		}
		for i := range 4 {
			if n := got[i]; n < 60 || name == "round-robin" && n != 100 {
				t.Errorf("%s: engine %d got %d of 400", name, i, n)
			}
		}
	}
}

// Of three engines with loads 9, 5 and 1 two are drawn, the same twice if it so
// happens: the most loaded wins 1 of 9 draws, the next 3, the idlest 5.
func TestTwoChoicesTakeTheLessLoaded(t *testing.T) {
	p, _ := PolicyNamed("p2c")
	v := bench(t, 3)
	v.running = []float64{9, 5, 1}
	run, got := p.make(v), [3]int{}
	for range 9000 {
		got[run.choose(0, &flight{Request: &Request{In: 10}})]++
	}
	for i, want := range []int{1000, 3000, 5000} {
		if got[i] < want-200 || got[i] > want+200 {
			t.Errorf("engine %d got %d of 9000, want about %d", i, got[i], want)
		}
	}
}

var sample = NewTraces(Sample(1))

// TestEveryWorkloadRuns: each workload makes sense, every policy serves it, and
// the same seed gives the same result.
func TestEveryWorkloadRuns(t *testing.T) {
	for _, name := range Workloads {
		for _, held := range []bool{false, true} {
			w, err := sample.Workload(t.Context(), name, 2, 3, held)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if len(w.roots) < 20 || w.guess <= 0 {
				t.Errorf("%s: %d arrivals, guess %v", name, len(w.roots), w.guess)
			}
			for i, q := range w.requests {
				if q.In < 1 || q.Out < 1 || len(q.Blocks) > q.In/w.BlockTokens || i > 0 && q.next == 0 {
					t.Fatalf("%s: request %d is %+v", name, i, q)
				}
			}
			if held {
				continue
			}
			for _, p := range Policies {
				c := Cell{Workload: name, N: 2, TwoSpeed: true}
				a, err := run(t.Context(), w, c, p, w.guess/3)
				if err != nil {
					t.Fatalf("%s, %s: %v", name, p.Name, err)
				}
				if a.Requests == 0 || math.IsNaN(a.Good) || math.Abs(a.Good+a.LateFirst+a.Slow+a.Refused-1) > 1e-9 {
					t.Errorf("%s, %s: %+v", name, p.Name, a)
				}
				if p.Name != "headgate" {
					continue
				}
				if b, _ := run(t.Context(), w, c, p, w.guess/3); !reflect.DeepEqual(a, b) {
					t.Errorf("%s, %s: two runs differ: %+v, %+v", name, p.Name, a, b)
				}
				if c.Model = "alternating"; name == "lora" {
					if _, err := run(t.Context(), w, c, p, 1); err == nil {
						t.Errorf("%s: an engine without adapters was given some", p.Name)
					}
				} else if a, err := run(t.Context(), w, c, p, w.guess/3); err != nil || a.Requests == 0 {
					t.Errorf("%s, %s: %+v, %v", name, p.Name, a, err)
				}
			}
		}
	}
}

func TestMoreLoadIsServedWorse(t *testing.T) {
	w, err := sample.Workload(t.Context(), "b2b", 2, 1, false)
	if err != nil {
		t.Fatal(err)
	}
	p, _ := PolicyNamed("headgate")
	light, _ := run(t.Context(), w, Cell{Workload: "b2b", N: 2}, p, w.loadMax/7)
	heavy, _ := run(t.Context(), w, Cell{Workload: "b2b", N: 2}, p, w.loadMax)
	if light.Good < 0.99 || heavy.Good > 0.5 || heavy.Requests <= light.Requests {
		t.Errorf("light %+v, heavy %+v", light, heavy)
	}
}

// TestLabTellsPoliciesApart: with long sessions, who follows them carries more
// than who does not, and an endless cache carries most.
func TestLabTellsPoliciesApart(t *testing.T) {
	s := Sweep{Cells: []Cell{{Workload: "codegen", N: 2}}, Seeds: []int64{1}, Traces: sample}
	for _, name := range []string{"headgate", "round-robin", "llm-d-sticky", "infinite-cache"} {
		p, _ := PolicyNamed(name)
		s.Policies = append(s.Policies, p)
	}
	list, err := s.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := list[0]
	good := map[string]float64{}
	for _, o := range c.Outcomes {
		good[o.Policy] = o.Goodput
	}
	if c.BestPeerName != "llm-d-sticky" || good["round-robin"] > 0.8*good["llm-d-sticky"] || good["infinite-cache"] < good["headgate"]*0.98 {
		t.Errorf("goodput %v, best peer %s", good, c.BestPeerName)
	}
	var table, plot, all, raw bytes.Buffer
	WriteTable(&table, list)
	if err := WritePlot(&plot, c); err != nil {
		t.Fatal(err)
	}
	if err := WriteSummaryPlot(&all, list); err != nil {
		t.Fatal(err)
	}
	if err := WriteJSON(&raw, list); err != nil {
		t.Fatal(err)
	}
	var read struct {
		Cells []struct {
			Name         string
			Ours         float64
			BestPeer     float64 `json:"best_peer"`
			BestPeerName string  `json:"best_peer_name"`
		}
	}
	if err := json.Unmarshal(raw.Bytes(), &read); err != nil || len(read.Cells) != 1 || read.Cells[0].Ours != c.Ours || read.Cells[0].BestPeerName != "llm-d-sticky" {
		t.Errorf("%v: %s", err, raw.String())
	}
	for _, text := range []string{table.String(), plot.String(), all.String()} {
		if !strings.Contains(text, "codegen/2/one-speed") {
			t.Errorf("the cell is not in %s", text)
		}
	}
}

// TestQueueKeepsWhatEnginesHaveNoRoomFor: of forty prompts at once each engine
// gets as many as fill its local queue, the rest follow as first outputs come, and
// everybody is served.
func TestQueueKeepsWhatEnginesHaveNoRoomFor(t *testing.T) {
	w := &Workload{BlockTokens: blockLarge, compress: true, loadMax: 1, engine: "32b"}
	for range 40 {
		w.add(Request{In: 3000, Out: 20, next: -1})
	}
	w.number()
	p, _ := PolicyNamed("headgate")
	c := Cell{N: 2}
	f, err := newFleet(c, w, false)
	if err != nil {
		t.Fatal(err)
	}
	s := newSimulation(w, c, f, p)
	most := 0
	heard := s.play.Heard
	s.play.Heard = func(now float64, machine int, ev model.Event) {
		heard(now, machine, ev)
		most = max(most, s.view.pending[machine])
	}
	r, err := s.run(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	// A prompt takes 0.2 s: two are more than 0.25 s, and a third would come before
	// it is known that the first takes as long.
	if r.Requests != 40 || most > 4 || s.left != 0 {
		t.Errorf("%d of %d requests are left, %d were pending on an engine at once", s.left, r.Requests, most)
	}
}

// TestRefusingKeepsGoodputInOverload: at twice the load that it carries, a pool
// whose queue refuses serves most of that in time, even if it is as small as this
// one, and a pool that only queues serves much less.
func TestRefusingKeepsGoodputInOverload(t *testing.T) {
	s := Sweep{Cells: []Cell{{Workload: "b2b", N: 2}}, Seeds: []int64{1}, Traces: sample, Overload: []float64{2}}
	for _, name := range []string{"headgate", "headgate-refusing", "llm-d-sticky"} {
		p, _ := PolicyNamed(name)
		s.Policies = append(s.Policies, p)
	}
	list, err := s.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range list[0].Outcomes {
		at, accepted := o.Overload[0], o.Accepted[0]
		switch o.Policy {
		case "headgate-refusing":
			if at < 0.65 || accepted > 0.9 || accepted < 0.4 {
				t.Errorf("%s: %.2f of the goodput, %.2f accepted", o.Policy, at, accepted)
			}
		default:
			if at > 0.4 || accepted != 1 {
				t.Errorf("%s: %.2f of the goodput, %.2f accepted", o.Policy, at, accepted)
			}
		}
	}
	var out bytes.Buffer
	WriteOverload(&out, list, s.Overload)
	if !strings.Contains(out.String(), "×2") || !strings.Contains(out.String(), "headgate-refusing") {
		t.Error(out.String())
	}
}

// TestTwoModelsRankAlike: what the lab says of policies does not hang on how
// engines are modelled.
func TestTwoModelsRankAlike(t *testing.T) {
	var sums [2][]Summary
	for i, name := range []string{"mixed", "alternating"} {
		s := Sweep{Seeds: []int64{2}, Traces: sample, Cells: []Cell{
			{Workload: "codegen", N: 2, Model: name}, {Workload: "b2b", N: 2, TwoSpeed: true, Model: name},
		}}
		for _, name := range []string{"headgate", "llm-d-sticky", "lmetric", "least-request", "round-robin", "random"} {
			p, _ := PolicyNamed(name)
			s.Policies = append(s.Policies, p)
		}
		list, err := s.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		sums[i] = Summarize(list, Everywhere)
	}
	if c := Correlation(sums[0], sums[1]); c < 0.8 || sums[0][0].Policy != "headgate" || sums[1][0].Policy != "headgate" {
		t.Errorf("correlation %v:\n%+v\n%+v", c, sums[0], sums[1])
	}
	var raw, text bytes.Buffer
	if err := WriteJSON(&raw, nil); err != nil {
		t.Fatal(err)
	}
	if back, err := ReadJSON(&raw); err != nil || len(back) != 0 {
		t.Errorf("%v, %v", back, err)
	}
	WriteRanking(&text, sums[0], sums[1])
	if !strings.Contains(text.String(), "rank correlation 0.") && !strings.Contains(text.String(), "rank correlation 1.") {
		t.Error(text.String())
	}
}

// By hand: ranks 1 2 3 4 against 2 1 3 4 are 1-6×2/(4×15) = 0.8 alike, and equals
// share a place.
func TestCorrelation(t *testing.T) {
	of := func(means ...float64) (list []Summary) {
		for i, m := range means {
			list = append(list, Summary{Policy: string(rune('a' + i)), Mean: m})
		}
		return list
	}
	for _, c := range []struct {
		a, b []Summary
		want float64
	}{
		{of(4, 3, 2, 1), of(8, 9, 5, 2), 0.8},
		{of(4, 3, 2, 1), of(1, 2, 3, 4), -1},
		{of(4, 3, 2, 1), of(9, 5, 5, 1), 1 - 6*0.5/60},
		{of(4, 3), nil, 0},
	} {
		if got := Correlation(c.a, c.b); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("%v and %v: %v, want %v", c.a, c.b, got, c.want)
		}
	}
}

// TestOwnTraces: a file of the user's is replayed, whatever it is called, and the
// load that is found is one that the fleet carries.
func TestOwnTraces(t *testing.T) {
	dir := Sample(4)
	dir["mine.jsonl"], dir["mine.csv"] = dir["mooncake_synthetic_trace.jsonl"], dir["azure2023_code.csv"]
	own := NewTraces(dir)
	p, _ := PolicyNamed("headgate")
	for _, name := range []string{"mine.jsonl", "mine.csv"} {
		var goodput []float64
		for _, n := range []int{1, 2} {
			w, err := own.Workload(t.Context(), name, n, 1, true)
			if err != nil {
				t.Fatal(err)
			}
			c := Cell{Workload: name, N: n}
			k, err := knee(t.Context(), w, c, p, w.guess)
			if err != nil {
				t.Fatal(err)
			}
			if r, err := run(t.Context(), w, c, p, k*0.95); err != nil || r.Requests < 50 || r.Good < Attainment-0.03 {
				t.Errorf("%s on %d: %+v at %v, %v", name, n, r, k*0.95, err)
			}
			goodput = append(goodput, k)
		}
		if goodput[1] < 1.4*goodput[0] {
			t.Errorf("%s: goodput of 1 and 2 engines is %v", name, goodput)
		}
	}
}

func TestBadTracesAreRefused(t *testing.T) {
	dir := Sample(1)
	dir["azure2023_conv.csv"].Data = []byte("a,b,c\nx,1,2\n")
	dir["mooncake_conversation_trace.jsonl"].Data = []byte("{\n")
	delete(dir, "azure2023_code.csv")
	dir["servegen_m-small/chunk-2-trace.csv"].Data = []byte("0,1,1,Gamma,1,0\n600,1,1,Gamma,1,0\n")
	broken := NewTraces(dir)
	for _, name := range []string{"conv", "azconv", "azcode", "servegen", "nothing"} {
		if _, err := broken.Workload(t.Context(), name, 2, 1, false); err == nil {
			t.Errorf("%s: no complaint", name)
		}
	}
}

// TestPlayGoesByTime: calls in the order of their times and then of their making,
// before a wake and a step at the same moment.
func TestPlayGoesByTime(t *testing.T) {
	e := model.New(model.Params{StepFloor: time.Second, Blocks: 64})
	var got []string
	note := func(what string) func(float64) {
		return func(now float64) { got = append(got, fmt.Sprintf("%s@%v", what, now)) }
	}
	due := 2.0
	p := Play{
		Machines: []Machine{e},
		Heard: func(now float64, machine int, ev model.Event) {
			if ev.Kind == model.Token {
				note("token")(now)
			}
		},
		Due: func() float64 { return due },
		Wake: func(now float64) {
			note("wake")(now)
			due = math.Inf(1)
		},
	}
	p.At(3, note("c"))
	p.At(1, func(now float64) {
		note("a")(now)
		if err := e.Submit(seconds(now), model.Job{ID: "1", PromptTokens: 4, MaxNew: 2}); err != nil {
			t.Error(err)
		}
		p.At(0, note("past"))
	})
	p.At(1, note("b"))
	for p.Advance(2.5) {
	}
	if p.Now() != 2 {
		t.Errorf("stopped at %v, want 2", p.Now())
	}
	for p.Advance(math.Inf(1)) {
	}
	want := "a@1 b@1 past@1 wake@2 token@2 c@3 token@3"
	if text := strings.Join(got, " "); text != want {
		t.Errorf("got  %s\nwant %s", text, want)
	}
}
