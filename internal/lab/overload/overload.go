// SPDX-License-Identifier: Apache-2.0

// Package overload plays more requests than a pool can serve, in virtual time,
// through Headgate's real flow.Queue and schedule.Book and through the admission
// rules of others, against the engines of the laboratory.
//
// A Demand is the requests that come, a Chaos is what else happens: clients that
// leave, engines that die and come, limits that change, metrics that stay away.
// Engines, targets and the book's choice of an endpoint are the same for every
// Admission, so that runs differ by who is let in and when alone. While a run
// plays, a checker compares each decision with its own ledger, which is written
// from what engines do and never from what the queue says of itself.
//
// The package judges and decides nothing. cmd/headgate calls it, and
// make bench-flow.
package overload

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/lab"
	"github.com/headgate/headgate/internal/prefix"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/simengine/model"
	"github.com/headgate/headgate/plugins/standard"
)

// BlockTokens are the tokens of a block of KV memory, and of a key of a prompt.
const BlockTokens = 128

// scrapeEvery is how often engines are asked for their metrics, in seconds.
const scrapeEvery = 0.05

// Pool is the engines of a run.
type Pool struct {
	Engine  string // of lab.Engines
	Engines int
}

// Run is one run to be played.
type Run struct {
	Pool      Pool
	Demand    *Demand
	Admission Admission
	Chaos     *Chaos // nil: nothing else happens
	Seed      uint64 // of draws that the run makes itself
}

// Play plays the run to its end. The error is the first thing that a checker
// found wrong.
func (r *Run) Play() (*Record, error) {
	w, err := newWorld(r)
	if err != nil {
		return nil, err
	}
	return w.run()
}

var epoch = time.Unix(1_000_000, 0)

// clock is a virtual time as the book and the queue know it.
func clock(s float64) time.Time { return epoch.Add(span(s)) }

func span(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }

// job is one request of a run: what is asked, and the ledger of its life.
type job struct {
	request flow.Request
	*Asked
	name string

	state    state
	outcome  Outcome
	since    float64 // when it began to wait, the last time
	until    float64 // by when it must be refused or sent if the pool never was empty
	admitted bool    // by the engine, which says what of the prompt is cached
	place    *schedule.Reservation
	on       *engine
	attempts int
	began    float64 // when it was sent, of the attempt that counts
	first    float64 // 0: no output yet
	end      float64
	made     int // tokens of the answer
	cached   int
	target   float64
	spent    float64 // tokens that engines computed for it, over all attempts
}

type state uint8

const (
	coming state = iota
	waiting
	sent
	over
)

// Outcome is how a request ended.
type Outcome uint8

// Outcomes.
const (
	Unfinished Outcome = iota
	Answered
	Refused // before an engine had it
	Left    // the client did
	Broken  // an engine died after the first output, or no retry was granted
)

// engine is one engine and the endpoint that it is known by.
type engine struct {
	id      inference.EndpointID
	slot    int // in lab.Play
	machine lab.Machine
	alive   bool
	listed  bool // in the pool
	tried   bool // nothing is held against it: it has not failed, or has served for long enough since
	proving bool // it serves again since it failed
	jobs    []*job

	queued, kv float64 // as last scraped
	scraped    float64 // when; negative: never
}

// world is what a run is made of.
type world struct {
	plan    *Run
	spec    lab.Engine
	params  model.Params
	play    lab.Play
	engines []*engine
	born    int
	config  schedule.Config
	book    *schedule.Book
	pool    *fleet.Pool
	limits  flow.Config // in force
	emptied float64     // when the pool was last without an engine, as far as that can be told
	door    door
	check   *checker
	rnd     *rand.Rand

	jobs   []job
	byName map[string]*job
	left   int
	deaf   bool // no scrapes

	drain []float64
	depth []int
}

// door is an Admission at work.
type door interface {
	arrive(now float64, j *job)
	// stir says that something has changed: an engine has room, or is gone.
	stir()
	due() float64
	wake(now float64)
	leave(j *job) bool
	again(now float64, j *job) // after an engine died
	done(j *job)               // a sent one has ended
}

// ours is the door if it has Headgate's queue behind it, else nil.
func (w *world) ours() *queued {
	if d, ok := w.door.(interface{ inner() *queued }); ok {
		return d.inner()
	}
	return nil
}

func newWorld(r *Run) (*world, error) {
	spec, ok := lab.Engines[r.Pool.Engine]
	if !ok {
		return nil, fmt.Errorf("engine %q is not known", r.Pool.Engine)
	}
	profile, err := standard.Profile(standard.Default)
	if err != nil {
		return nil, err
	}
	w := &world{
		plan: r, spec: spec, params: spec.Params, pool: &fleet.Pool{Name: "pool"},
		rnd: rand.New(rand.NewPCG(r.Seed, 5)), byName: map[string]*job{},
	}
	w.params.BlockTokens, w.params.Blocks = BlockTokens, spec.KVTokens/BlockTokens
	w.config = schedule.Config{
		Profile: profile, TPOT: span(spec.TPOT), ScrapeStale: time.Second, Limits: r.Admission.limits(),
		Retry: schedule.BudgetConfig{Ratio: 0.2, MinPerSecond: 5},
	}
	w.book = schedule.NewBook(w.config, rand.New(rand.NewPCG(r.Seed, 6)))
	w.limits, w.emptied = r.Admission.Queue, -1
	for range r.Pool.Engines {
		w.join(w.newEngine())
	}
	w.check = &checker{w: w}
	w.door = r.Admission.open(w)
	w.play.Heard, w.play.Due, w.play.Wake = w.heard, w.door.due, w.door.wake
	w.jobs = make([]job, len(r.Demand.Asked))
	for i := range w.jobs {
		w.prepare(&w.jobs[i], &r.Demand.Asked[i], i)
	}
	w.left = len(w.jobs)
	return w, nil
}

func (w *world) prepare(j *job, a *Asked, i int) {
	j.Asked, j.name = a, fmt.Sprint(i)
	j.target = cmp.Or(a.Target, Target(w.spec, a.In))
	if a.Target < 0 {
		j.target = 0
	}
	j.request = flow.Request{
		Ask: schedule.Ask{
			Prompt: inference.Tokens{N: a.In}, Keys: a.Blocks, PromptBytes: max(a.In*prefix.BlockBytes/BlockTokens, 1),
			Stream: true, Arrived: clock(a.At), TTFT: schedule.TTFT{Base: span(j.target)},
		},
		Priority: a.Priority, Fairness: a.Tenant, Bytes: int64(4 * a.In), ShedAt: a.ShedAt, Output: a.Most, Owner: j,
	}
	if a.Deadline > 0 {
		j.request.Deadline = clock(a.At + a.Deadline)
	}
}

// Target is the time, in seconds, within which a first output of a prompt is good:
// the engine's base, and twice what the prompt takes on an idle, empty one.
func Target(e lab.Engine, in int) float64 {
	n := float64(in)
	return e.Base + 2*(n*e.Params.Token.Seconds()+n*n/2*e.Params.Attention.Seconds()/1e6)
}

func (w *world) newEngine() *engine {
	e := &engine{
		id: inference.EndpointID(fmt.Sprintf("http://engine-%d:8000", w.born)), slot: w.born,
		machine: model.New(w.params), alive: true, tried: true, scraped: -1,
	}
	w.born++
	w.engines = append(w.engines, e)
	w.play.Machines = append(w.play.Machines, e.machine)
	return e
}

// join puts an engine into the pool.
func (w *world) join(e *engine) {
	e.listed = true
	w.relist()
	w.book.Admit(e.id)
	// The index counts blocks of its own size; here they are the engine's.
	w.book.SetCache(e.id, w.params.Blocks*prefix.BlockBytes/4)
}

func (w *world) relist() {
	next := &fleet.Pool{Name: w.pool.Name}
	for _, e := range w.engines {
		if e.listed {
			next.Endpoints = append(next.Endpoints, inference.Endpoint{ID: e.id})
		}
	}
	w.pool = next
}

// run plays until nothing is left to happen.
func (w *world) run() (*Record, error) {
	asked := w.plan.Demand.Asked
	next := 0
	var arrive func(now float64)
	arrive = func(now float64) {
		j := &w.jobs[next]
		if next++; next < len(asked) {
			w.play.At(asked[next].At, arrive)
		}
		w.arrive(now, j)
	}
	if len(asked) > 0 {
		w.play.At(asked[0].At, arrive)
	}
	w.scrape(0)
	w.sample(0)
	if c := w.plan.Chaos; c != nil {
		c.begin(w)
	}
	end := w.plan.Demand.End + w.plan.Demand.After
	for w.left > 0 && w.play.Advance(end) {
		if w.play.Due() > w.play.Now() {
			w.check.settled(w.play.Now())
		}
		if w.check.failed != nil {
			return nil, w.check.failed
		}
	}
	if err := w.check.ended(w.play.Now()); err != nil {
		return nil, err
	}
	return w.record(), nil
}

func (w *world) arrive(now float64, j *job) {
	w.wait(now, j)
	if j.Leaves > 0 {
		w.play.At(now+j.Leaves, func(now float64) {
			// Patience ends with the first output, unless the client is a fickle one.
			if j.Fickle || j.first == 0 {
				w.leave(now, j)
			}
		})
	}
	w.door.arrive(now, j)
}

// wait notes that a request has nobody who works for it.
func (w *world) wait(now float64, j *job) {
	j.state, j.since, j.until = waiting, now, math.Inf(1)
	ttl := w.limits.TTL
	for _, b := range w.limits.Bands {
		if b.Priority == j.Priority && b.TTL > 0 {
			ttl = b.TTL
		}
	}
	if ttl > 0 {
		j.until = now + ttl.Seconds()
	}
	if j.Deadline > 0 {
		j.until = min(j.until, j.At+j.Deadline)
	}
	w.check.waits = append(w.check.waits, j)
}

// send carries out that a request has got a place.
func (w *world) send(now float64, j *job, place *schedule.Reservation) {
	e := w.engine(place.Endpoint.ID)
	w.check.sent(now, j, e)
	j.state, j.place, j.on, j.began = sent, place, e, now
	j.attempts++
	e.jobs = append(e.jobs, j)
	if !e.alive {
		// Nobody listens there, which takes a moment to find out.
		w.play.At(now+0.001, func(now float64) {
			if j.state == sent && j.on == e {
				w.died(now, j, e)
			}
		})
		return
	}
	place.Accepted()
	w.byName[j.label()] = j
	err := e.machine.Submit(span(now), model.Job{ID: j.label(), PromptTokens: j.In, MaxNew: j.Out, Blocks: j.Blocks})
	if err != nil {
		w.check.fail(now, j, "engine refused: %v", err)
	}
}

// label is what an engine knows the present attempt by.
func (j *job) label() string {
	if j.attempts == 1 {
		return j.name
	}
	return fmt.Sprintf("%s.%d", j.name, j.attempts)
}

func (w *world) engine(id inference.EndpointID) *engine {
	for _, e := range w.engines {
		if e.id == id {
			return e
		}
	}
	return nil
}

// refuse carries out that a request is turned away.
func (w *world) refuse(now float64, j *job, err *inference.Error) {
	w.check.refused(now, j, err)
	w.finish(now, j, Refused)
}

func (w *world) finish(now float64, j *job, how Outcome) {
	j.state, j.outcome, j.end = over, how, now
	w.left--
	w.check.over(j)
}

// leave is a client that goes.
func (w *world) leave(now float64, j *job) {
	switch j.state {
	case waiting:
		if !w.door.leave(j) {
			w.check.fail(now, j, "its client left and the queue did not have it")
		}
		w.finish(now, j, Left)
	case sent:
		if j.on.alive {
			j.on.machine.Cancel(span(now), j.label())
		}
		w.vacate(now, j, inference.ClientGone)
		w.door.done(j)
		w.finish(now, j, Left)
		w.door.stir()
	}
}

// vacate gives the place of an attempt back.
func (w *world) vacate(now float64, j *job, v inference.Verdict) {
	w.book.Report(clock(now), schedule.Outcome{Endpoint: j.on.id, Verdict: v, Took: span(now - j.began)})
	j.place.Release()
	e := j.on
	for i, x := range e.jobs {
		if x == j {
			e.jobs = append(e.jobs[:i], e.jobs[i+1:]...)
			break
		}
	}
	j.spent += j.computed()
	j.on, j.place = nil, nil
}

// computed is how many tokens the engine has computed for the attempt. Of a
// prompt that is not done it is not known, and all of it counts.
func (j *job) computed() float64 {
	if !j.admitted {
		return 0
	}
	return float64(j.In - j.cached + j.made)
}

// heard is told what engines do.
func (w *world) heard(now float64, machine int, ev model.Event) {
	j := w.byName[ev.Job]
	if j == nil || j.state != sent || j.on.slot != machine {
		return
	}
	switch ev.Kind {
	case model.Admitted:
		if j.made == 0 {
			j.cached, j.admitted = ev.N, true
		}
	case model.Token:
		if j.made = ev.N; ev.N == 1 {
			j.first = now
			j.place.FirstOutput(clock(now))
			w.check.served(j, j.In-j.cached)
			w.door.stir()
		} else {
			j.place.Tokens(ev.N)
		}
		w.check.served(j, outputWeight)
	case model.Finished:
		j.place.Finished(clock(now), inference.Usage{Prompt: j.In, Completion: j.Out, Cached: j.cached})
		w.prove(now, j.on)
		w.vacate(now, j, inference.Finished)
		w.door.done(j)
		w.finish(now, j, Answered)
		w.door.stir()
	}
}

// rampFor is for how long, from the first answer after a failure, an engine gets
// less than its share, and a moment more.
const rampFor = 31

// prove notes that an engine that failed serves again.
func (w *world) prove(now float64, e *engine) {
	if e.tried || e.proving || !e.alive {
		return
	}
	e.proving = true
	machine := e.machine
	w.play.At(now+rampFor, func(float64) {
		if e.machine == machine {
			e.tried = true
		}
	})
}

// scrape asks every engine for its metrics, and again later.
func (w *world) scrape(now float64) {
	for _, e := range w.engines {
		if w.deaf || !e.alive || !e.listed {
			continue
		}
		s := e.machine.Snapshot()
		e.queued, e.kv, e.scraped = float64(s.Waiting), s.KVUsage(), now
		w.book.Asking(e.id)
		w.book.SetScraped(e.id, schedule.Scraped{
			At: clock(now), Queued: known(e.queued), Running: known(float64(s.Running)), KVUsage: known(e.kv),
			Done: known(float64(s.GenerationTokens)),
		})
	}
	w.door.stir()
	w.play.At(now+scrapeEvery, w.scrape)
}

// sample notes once a second how much waits.
func (w *world) sample(now float64) {
	if d := w.ours(); d != nil {
		round := w.book.Begin(clock(now), w.pool)
		load := round.Load()
		round.End()
		w.drain = append(w.drain, d.queue.Status(load, 0).Drain.Seconds())
	}
	w.depth = append(w.depth, len(w.check.waits))
	w.play.At(now+1, w.sample)
}
