// SPDX-License-Identifier: Apache-2.0

// Package lab is the routing laboratory: it replays traces and generated
// workloads against a fleet of simulated engines in virtual time, under
// Headgate's own choice and under policies of others that are written anew from
// their published formulas, and compares how much load each carries.
//
// The engines are internal/simengine/model, so prefill comes in chunks, decode
// in batches, and caches and memory are bounded. Headgate's choice is the real
// schedule.Book with the default profile. The lab measures policies; it knows no
// sockets, and it says nothing about how fast a decision is made.
//
// cmd/headgate calls it, and make bench-routing.
package lab

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/headgate/headgate/internal/simengine/model"
)

// Engine is a GPU and model pair with the targets that its answers are judged by.
type Engine struct {
	Params model.Params
	// First outputs are in time within Base and twice the time of the prompt alone
	// on an idle, empty engine of full speed; tokens within TPOT each on average.
	Base, TPOT float64
	KVTokens   int
}

// Engines are the known ones. The 32b and 8b ones are by roofline arithmetic and
// not checked against a GPU. 32b-tier has a second tier of memory for prefixes,
// whose loading costs nothing here.
var Engines = map[string]Engine{
	"32b": {
		Params: model.Params{
			StepBase: 2 * time.Millisecond, StepFloor: 13600 * time.Microsecond, Token: 62893 * time.Nanosecond,
			Attention: 2400 * time.Microsecond, Decode: 30 * time.Microsecond, KVRead: 52 * time.Microsecond,
			StepTokens: 8192, RunningMax: 256,
		}, Base: 2, TPOT: 0.1, KVTokens: 275_000,
	},
	"32b-tier": {
		Params: model.Params{
			StepBase: 2 * time.Millisecond, StepFloor: 13600 * time.Microsecond, Token: 62893 * time.Nanosecond,
			Attention: 2400 * time.Microsecond, Decode: 30 * time.Microsecond, KVRead: 26 * time.Microsecond,
			StepTokens: 8192, RunningMax: 256,
		}, Base: 2, TPOT: 0.1, KVTokens: 1_200_000,
	},
	"8b-a100": {Params: model.A100x8B, Base: 1, TPOT: 0.1, KVTokens: 400_000},
	"8b-h100": {
		Params: model.Params{
			StepBase: 2 * time.Millisecond, StepFloor: 6400 * time.Microsecond, Token: 32258 * time.Nanosecond,
			Attention: 1050 * time.Microsecond, Decode: 25 * time.Microsecond, KVRead: 52 * time.Microsecond,
			StepTokens: 8192, RunningMax: 256, AdapterSlots: 8, AdapterLoad: 15 * time.Millisecond,
		}, Base: 1, TPOT: 0.1, KVTokens: 400_000,
	},
}

// Cell is one place in the comparison.
type Cell struct {
	Workload string
	N        int
	TwoSpeed bool    // every second engine prefills at 0.4 and decodes at 0.6 of the speed
	Stale    float64 // seconds between scrapes; 0: scraped values are those of the moment
	Engine   string  // instead of the workload's own
	Seed     int64
	Held     bool
}

// Name is the cell in one word.
func (c Cell) Name() string {
	speed := "one-speed"
	if c.TwoSpeed {
		speed = "two-speed"
	}
	name := fmt.Sprintf("%s/%d/%s", c.Workload, c.N, speed)
	if c.Stale > 0 {
		name += "/stale-" + strconv.FormatFloat(c.Stale*1000, 'f', -1, 64) + "ms"
	}
	if c.Engine != "" {
		name += "/" + c.Engine
	}
	return name
}

// fleet is the engines of one run.
type fleet struct {
	spec    Engine
	params  []model.Params
	engines []*model.Engine
}

func newFleet(c Cell, w *Workload, infinite bool) (*fleet, error) {
	name := w.engine
	if c.Engine != "" {
		name = c.Engine
	}
	spec, ok := Engines[name]
	if !ok {
		return nil, fmt.Errorf("engine %q is not known", name)
	}
	for i := range w.requests {
		q := &w.requests[i]
		switch {
		case q.In+q.Out > spec.KVTokens-w.BlockTokens:
			return nil, fmt.Errorf("request %d has %d tokens, more than engine %s can hold", i, q.In+q.Out, name)
		case q.Adapter != "" && spec.Params.AdapterSlots == 0:
			return nil, fmt.Errorf("engine %s has no slots for adapters", name)
		}
	}
	f := &fleet{spec: spec}
	for i := range c.N {
		p := spec.Params
		p.BlockTokens, p.Blocks = w.BlockTokens, spec.KVTokens/w.BlockTokens
		if infinite {
			p.Blocks *= 100
		}
		if c.TwoSpeed && i%2 == 1 {
			p.Token = p.Token * 10 / 4
			p.Attention = p.Attention * 10 / 4
			p.StepFloor, p.Decode, p.KVRead = p.StepFloor*10/6, p.Decode*10/6, p.KVRead*10/6
		}
		f.params = append(f.params, p)
		f.engines = append(f.engines, model.New(p))
	}
	return f, nil
}

// target is the time within which a first output is good.
func (f *fleet) target(in int) float64 {
	p := f.spec.Params
	n := float64(in)
	return f.spec.Base + 2*(n*p.Token.Seconds()+n*n/2*p.Attention.Seconds()/1e6)
}

// flight is one request on its way.
type flight struct {
	*Request
	at         int // engine, -1 before it is sent
	arrived    float64
	first      float64 // 0: not yet
	end        float64
	tokens     int
	target     float64
	fresh      float64 // prompt tokens that the policy expected to be computed
	cached     int     // what the engine found
	measured   bool
	bookkeeper any // of the policy
}

// Result is what one run came to.
type Result struct {
	Requests  int     // measured
	Good      float64 // share that met both targets
	LateFirst float64 // share whose first output was late
	Slow      float64 // share that was in time and then too slow
	Mean      float64 // first output, seconds
	P50, P99  float64
	Slowest   float64 // time per token, 99th percentile
	Hit       float64 // cached share of prompt tokens
	Loads     uint64  // of adapters
	Preempted uint64
}

// policy chooses an engine per request and hears what becomes of it.
type policy interface {
	choose(now float64, q *flight) int
	sent(now float64, q *flight)
	first(now float64, q *flight)
	token(now float64, q *flight)
	ended(now float64, q *flight)
}

// run replays a workload at a load.
func run(w *Workload, c Cell, p Policy, load float64) (Result, error) {
	f, err := newFleet(c, w, p.infinite)
	if err != nil {
		return Result{}, err
	}
	s := &simulation{w: w, c: c, fleet: f, view: newView(f, c)}
	s.policy = p.make(s.view)
	s.live = make([]*flight, len(w.requests))
	return s.run(load), nil
}

// simulation is one run.
type simulation struct {
	w      *Workload
	c      Cell
	fleet  *fleet
	view   *view
	policy policy

	live     []*flight // by request
	later    turns
	measured []*flight
	left     int
	scrape   float64
}

// turn is a later turn of a session that is due.
type turn struct {
	at float64
	q  int
}

type turns []turn

func (t *turns) push(x turn) {
	at, _ := slices.BinarySearchFunc(*t, x.at, func(a turn, b float64) int {
		if a.at > b { // the soonest last
			return -1
		}
		return 1
	})
	*t = slices.Insert(*t, at, x)
}

const tail = 60 // seconds after the last arrival, for what is under way

func (s *simulation) run(load float64) Result {
	w := s.w
	var arrivals []int
	at := func(i int) float64 {
		if w.compress {
			return w.requests[i].Arrive / load
		}
		return w.requests[i].Arrive
	}
	for _, i := range w.roots {
		if w.compress || w.requests[i].draw < load/w.loadMax {
			arrivals = append(arrivals, i)
			for j := i; j >= 0; j = w.requests[j].next {
				s.left++
			}
		}
	}
	end := w.end
	if w.compress && len(arrivals) > 0 {
		end = at(arrivals[len(arrivals)-1])
	}
	for next := 0; s.left > 0; {
		engine, now := s.nextStep()
		arrival, turn := math.Inf(1), false
		if next < len(arrivals) {
			arrival = at(arrivals[next])
		}
		if n := len(s.later); n > 0 && s.later[n-1].at < arrival {
			arrival, turn = s.later[n-1].at, true
		}
		if math.Min(arrival, now) > end+tail || math.IsInf(arrival, 1) && engine < 0 {
			break
		}
		if engine >= 0 && now < arrival {
			s.step(engine, now)
			continue
		}
		var q int
		if turn {
			q = s.later[len(s.later)-1].q
			s.later = s.later[:len(s.later)-1]
		} else {
			q = arrivals[next]
			next++
		}
		if !w.compress && arrival >= w.end {
			for j := q; j >= 0; j = w.requests[j].next {
				s.left--
			}
			continue
		}
		measured := arrival >= w.warm
		if w.compress {
			measured = float64(next) > w.warm*float64(len(arrivals))
		}
		s.arrive(arrival, q, measured)
	}
	return s.result(end + tail)
}

func (s *simulation) nextStep() (engine int, at float64) {
	engine, at = -1, math.Inf(1)
	for i, e := range s.fleet.engines {
		if due, ok := e.Next(); ok && due.Seconds() < at {
			engine, at = i, due.Seconds()
		}
	}
	return engine, at
}

func (s *simulation) arrive(now float64, i int, measured bool) {
	q := &flight{Request: &s.w.requests[i], at: -1, arrived: now, measured: measured, target: s.fleet.target(s.w.requests[i].In)}
	s.live[i] = q
	if measured {
		s.measured = append(s.measured, q)
	}
	if s.c.Stale == 0 || now >= s.scrape {
		s.view.scrape()
		s.scrape = now + s.c.Stale
	}
	s.view.look(q)
	q.at = s.policy.choose(now, q)
	q.fresh = float64(q.In - s.view.cached[q.at])
	s.view.sent(q)
	s.policy.sent(now, q)
	err := s.fleet.engines[q.at].Submit(seconds(now), model.Job{
		ID: q.ID, PromptTokens: q.In, MaxNew: q.Out, Blocks: q.Blocks, Output: q.Answer, Adapter: q.Adapter,
	})
	if err != nil {
		panic(err) // newFleet has checked that every request fits
	}
}

func seconds(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }

func (s *simulation) step(engine int, now float64) {
	e := s.fleet.engines[engine]
	due, _ := e.Next()
	for _, ev := range e.Step(due) {
		if ev.Job == "" || ev.Kind == model.Preempted {
			continue
		}
		i, _ := strconv.Atoi(ev.Job)
		q := s.live[i]
		switch ev.Kind {
		case model.Admitted:
			if q.tokens == 0 {
				q.cached = ev.N
			}
		case model.Token:
			if q.tokens = ev.N; ev.N == 1 {
				q.first = now
				s.view.first(now, q)
				s.policy.first(now, q)
			} else {
				s.view.token(now, q)
				s.policy.token(now, q)
			}
		case model.Finished:
			q.end = now
			s.left--
			s.view.ended(q)
			s.policy.ended(now, q)
			if q.next >= 0 {
				s.later.push(turn{now + q.think, q.next})
			}
			s.live[i] = nil
		}
	}
}

// result judges what was measured. What did not begin by the end was late.
func (s *simulation) result(end float64) (r Result) {
	r.Requests = len(s.measured)
	if r.Requests == 0 {
		return r
	}
	var firsts, paces []float64
	cached, prompt := 0, 0
	for _, q := range s.measured {
		first, pace := q.first-q.arrived, 0.0
		if q.first == 0 {
			first = max(end-q.arrived, q.target*1.01)
		}
		switch {
		case q.first == 0:
		case q.end == 0:
			pace = 1
		case q.Out > 1:
			pace = (q.end - q.first) / float64(q.Out-1)
			paces = append(paces, pace)
		}
		firsts = append(firsts, first)
		r.Mean += first
		cached, prompt = cached+q.cached, prompt+q.In
		switch {
		case first > q.target:
			r.LateFirst++
		case pace > s.fleet.spec.TPOT:
			r.Slow++
		default:
			r.Good++
		}
	}
	n := float64(r.Requests)
	r.Good, r.LateFirst, r.Slow, r.Mean = r.Good/n, r.LateFirst/n, r.Slow/n, r.Mean/n
	r.P50, r.P99, r.Slowest = quantile(firsts, 0.5), quantile(firsts, 0.99), quantile(paces, 0.99)
	r.Hit = float64(cached) / float64(max(prompt, 1))
	for _, e := range s.fleet.engines {
		snap := e.Snapshot()
		r.Loads += snap.AdapterLoads
		r.Preempted += snap.Preemptions
	}
	return r
}

func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[min(int(q*float64(len(values))), len(values)-1)]
}
