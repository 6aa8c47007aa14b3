// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"slices"
	"strconv"

	"github.com/headgate/headgate/internal/simengine/model"
)

// flight is one request on its way.
type flight struct {
	*Request
	at         int // engine, -1 before it is sent
	arrived    float64
	sent       float64
	first      float64 // 0: not yet
	end        float64
	tokens     int
	target     float64
	fresh      float64 // prompt tokens that the policy expected to be computed
	cached     int     // what the engine found
	refused    bool
	measured   bool
	bookkeeper any // of the policy
}

// Result is what one run came to.
type Result struct {
	Requests  int     // measured
	Good      float64 // share that met both targets
	LateFirst float64 // share whose first output was late
	Slow      float64 // share that was in time and then too slow
	Refused   float64 // share that was turned away; figures below are of the others
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
	listener
}

// listener hears what becomes of requests.
type listener interface {
	sent(now float64, q *flight)
	first(now float64, q *flight)
	token(now float64, q *flight)
	ended(now float64, q *flight)
}

// queue is a policy that may keep requests: it is told of their arrival and sends
// each to an engine at its own time, or refuses it.
type queue interface {
	listener
	arrive(now float64, q *flight)
	due() float64 // when it wants to be woken; +Inf: never
	wake(now float64)
}

// desk is what a queue sends and refuses by.
type desk interface {
	send(now float64, q *flight, engine int)
	refuse(now float64, q *flight)
}

// run replays a workload at a load. A done context ends it.
func run(ctx context.Context, w *Workload, c Cell, p Policy, load float64) (Result, error) {
	f, err := newFleet(c, w, p.infinite)
	if err != nil {
		return Result{}, err
	}
	return newSimulation(w, c, f, p).run(ctx, load)
}

func newSimulation(w *Workload, c Cell, f *fleet, p Policy) *simulation {
	s := &simulation{w: w, c: c, fleet: f, view: newView(f, c), live: make([]*flight, len(w.requests))}
	s.play = Play{Machines: f.engines, Heard: s.heard}
	if p.queue != nil {
		s.queue = p.queue(s.view, s)
		s.hears, s.play.Due, s.play.Wake = s.queue, s.queue.due, s.queue.wake
	} else {
		s.policy = p.make(s.view)
		s.hears = s.policy
	}
	return s
}

// simulation is one run.
type simulation struct {
	w      *Workload
	c      Cell
	fleet  *fleet
	view   *view
	policy policy // nil if there is a queue
	queue  queue
	hears  listener // of the two
	play   Play

	live     []*flight // by request
	measured []*flight
	left     int
	scrape   float64
}

const tail = 60 // seconds after the last arrival, for what is under way

func (s *simulation) run(ctx context.Context, load float64) (Result, error) {
	w := s.w
	var arrivals []int
	for _, i := range w.roots {
		if w.compress || w.requests[i].draw < load/w.loadMax {
			arrivals = append(arrivals, i)
			for j := i; j >= 0; j = w.requests[j].next {
				s.left++
			}
		}
	}
	at := func(k int) float64 {
		if w.compress {
			return w.requests[arrivals[k]].Arrive / load
		}
		return w.requests[arrivals[k]].Arrive
	}
	end := w.end
	if w.compress && len(arrivals) > 0 {
		end = at(len(arrivals) - 1)
	}
	next := 0
	var arrive func(now float64)
	arrive = func(now float64) {
		k := next
		if next++; next < len(arrivals) {
			s.play.At(at(next), arrive)
		}
		if w.compress {
			s.arrive(now, arrivals[k], float64(next) > w.warm*float64(len(arrivals)))
		} else {
			s.turn(now, arrivals[k])
		}
	}
	if len(arrivals) > 0 {
		s.play.At(at(0), arrive)
	}
	for s.left > 0 && s.play.Advance(end+tail) {
		// Each time: one step of a long queue may take milliseconds, and to ask is
		// an atomic load.
		if err := ctx.Err(); err != nil {
			return Result{}, err
		}
	}
	return s.result(end + tail), nil
}

// turn is an arrival in a workload of sessions: none begins after its end.
func (s *simulation) turn(now float64, i int) {
	if now >= s.w.end {
		s.over(i)
		return
	}
	s.arrive(now, i, now >= s.w.warm)
}

// over drops a request and the turns after it.
func (s *simulation) over(i int) {
	for ; i >= 0; i = s.w.requests[i].next {
		s.left--
	}
}

func (s *simulation) arrive(now float64, i int, measured bool) {
	q := &flight{Request: &s.w.requests[i], at: -1, arrived: now, measured: measured, target: s.fleet.spec.Target(s.w.requests[i].In)}
	s.live[i] = q
	if measured {
		s.measured = append(s.measured, q)
	}
	if s.c.Stale == 0 || now >= s.scrape {
		s.view.scrape()
		s.scrape = now + s.c.Stale
	}
	if s.queue != nil {
		s.queue.arrive(now, q)
		return
	}
	s.view.look(q)
	s.send(now, q, s.policy.choose(now, q))
}

func (s *simulation) send(now float64, q *flight, engine int) {
	q.at, q.sent = engine, now
	if s.queue != nil {
		s.view.look(q)
	}
	q.fresh = float64(q.In - s.view.cached[q.at])
	s.view.sent(q)
	s.hears.sent(now, q)
	err := s.fleet.engines[q.at].Submit(seconds(now), model.Job{
		ID: q.ID, PromptTokens: q.In, MaxNew: q.Out, Blocks: q.Blocks, Output: q.Answer, Adapter: q.Adapter,
	})
	if err != nil {
		panic(err) // newFleet has checked that every request fits
	}
}

// refuse turns a request away. Its session goes on as if it were answered.
func (s *simulation) refuse(now float64, q *flight) {
	q.refused = true
	s.done(now, q)
}

// done is the end of a request, after which its session's next turn is due.
func (s *simulation) done(now float64, q *flight) {
	i, _ := strconv.Atoi(q.ID)
	s.live[i] = nil
	s.left--
	if q.next >= 0 {
		s.play.At(now+q.think, func(now float64) { s.turn(now, q.next) })
	}
}

func (s *simulation) heard(now float64, _ int, ev model.Event) {
	if ev.Job == "" || ev.Kind == model.Preempted {
		return
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
			s.hears.first(now, q)
		} else {
			s.view.token(now, q)
			s.hears.token(now, q)
		}
	case model.Finished:
		q.end = now
		s.view.ended(q)
		s.hears.ended(now, q)
		s.done(now, q)
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
		if q.refused {
			r.Refused++
			continue
		}
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
	r.Mean /= max(n-r.Refused, 1)
	r.Good, r.LateFirst, r.Slow, r.Refused = r.Good/n, r.LateFirst/n, r.Slow/n, r.Refused/n
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
