// SPDX-License-Identifier: Apache-2.0

package overload

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/simengine/model"
)

// Chaos is what happens in a run beside its requests.
type Chaos struct {
	Strikes []Strike
}

// Strike is one thing that happens.
type Strike struct {
	At   float64
	What What
	For  float64 // seconds, where it has an end
	Seed uint64  // of what it chooses
}

// What happens.
type What uint8

// What can happen.
const (
	Crash     What = iota // an engine dies in its place and comes back
	Depart                // an engine leaves the pool, and lets its requests end
	Join                  // a new engine comes
	Empty                 // all engines leave, and as many new ones come
	Reload                // limits change
	NoMetrics             // nobody can be asked for metrics
)

var whatNames = [...]string{"crash", "depart", "join", "empty", "reload", "no metrics"}

func (s What) String() string { return whatNames[s] }

func (c *Chaos) begin(w *world) {
	for _, s := range c.Strikes {
		w.play.At(s.At, func(now float64) { w.strike(now, s) })
	}
}

func (w *world) strike(now float64, s Strike) {
	r := rand.New(rand.NewPCG(s.Seed, 3))
	switch s.What {
	case Crash:
		if e := w.pick(r, func(e *engine) bool { return e.alive && e.listed }); e != nil {
			w.crash(now, e)
			w.play.At(now+s.For, func(now float64) { w.restart(now, e) })
		}
	case Depart:
		if w.size() > 1 {
			w.depart(w.pick(r, func(e *engine) bool { return e.listed }))
		}
	case Join:
		w.join(w.newEngine())
	case Empty:
		n := w.size()
		for _, e := range w.engines {
			if e.listed {
				w.depart(e)
			}
		}
		w.emptied = now + s.For
		w.play.At(now+s.For, func(float64) {
			for range n {
				w.join(w.newEngine())
			}
			w.door.stir()
		})
	case Reload:
		w.reload(r)
	case NoMetrics:
		w.deaf = true
		w.play.At(now+s.For, func(float64) { w.deaf = false })
	}
	w.door.stir()
}

func (w *world) size() (n int) {
	for _, e := range w.engines {
		if e.listed {
			n++
		}
	}
	return n
}

func (w *world) pick(r *rand.Rand, of func(*engine) bool) *engine {
	var list []*engine
	for _, e := range w.engines {
		if of(e) {
			list = append(list, e)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return list[r.IntN(len(list))]
}

// noticed is how long it takes until probes see that nothing answers any more.
const noticed = 0.5

func (w *world) crash(now float64, e *engine) {
	e.alive, e.tried, e.proving = false, false, false
	e.machine = model.New(w.params)
	w.play.Machines[e.slot] = e.machine
	for _, j := range append([]*job(nil), e.jobs...) {
		w.died(now, j, e)
	}
	w.play.At(now+noticed, func(now float64) {
		if !e.alive && e.listed {
			w.emptied = now
			w.book.SetHealth(e.id, inference.Gone)
			w.door.stir()
		}
	})
}

func (w *world) restart(_ float64, e *engine) {
	e.alive = true
	if !e.listed {
		return
	}
	w.book.Restarted(e.id)
	w.book.SetHealth(e.id, inference.Healthy)
	w.door.stir()
}

func (w *world) depart(e *engine) {
	e.listed = false
	w.relist()
	w.book.Forget(e.id)
}

// died is the end of an attempt whose engine is gone.
func (w *world) died(now float64, j *job, e *engine) {
	w.vacate(now, j, inference.Dead)
	began := j.first > 0
	j.request.Ask.Retry = true
	j.request.Ask.Exclude = append(j.request.Ask.Exclude, e.id)
	if began || w.book.Retry(clock(now), w.pool, j.request.Ask, j.request.Ask.Prompt) != nil {
		w.door.done(j)
		w.finish(now, j, Broken)
		w.door.stir()
		return
	}
	j.made, j.admitted = 0, false
	w.wait(now, j)
	w.door.again(now, j)
}

// reload puts other limits in force.
func (w *world) reload(r *rand.Rand) {
	d := w.ours()
	if d == nil {
		return
	}
	c := RandomLimits(r)
	w.limits = c
	d.queue.Configure(c)
	book := w.config
	book.Limits = schedule.Limits{Prefill: time.Duration(100+r.IntN(500)) * time.Millisecond, Waiting: r.IntN(4), Concurrency: r.IntN(3) * 24}
	w.book.Configure(book)
}

// RandomLimits draws a configuration of a queue.
func RandomLimits(r *rand.Rand) flow.Config {
	c := flow.Config{
		RequestsMax: 10 + r.IntN(300), BytesMax: int64(1+r.IntN(40)) << 20,
		TTL: time.Duration(1+r.IntN(30)) * time.Second, EmptyTTL: time.Duration(r.IntN(3)) * 20 * time.Second,
		EarliestDeadline: r.IntN(2) == 0,
	}
	if r.IntN(3) > 0 {
		c.RefuseAt = 0.5 + r.Float64()/2
	}
	for _, p := range Priorities {
		b := flow.Band{Priority: p}
		if r.IntN(3) == 0 {
			b.RequestsMax = 5 + r.IntN(100)
		}
		if r.IntN(3) == 0 {
			b.TTL = time.Duration(1+r.IntN(10)) * time.Second
		}
		if r.IntN(4) == 0 {
			b.Reserve = 0.05 + 0.2*r.Float64()
		}
		c.Bands = append(c.Bands, b)
	}
	return c
}

// RandomRun draws a run in which much goes wrong.
func RandomRun(seed uint64) Run {
	r := rand.New(rand.NewPCG(seed, 4))
	pool := Pool{Engine: "8b-a100", Engines: 1 + r.IntN(5)}
	rate := float64(pool.Engines) * (3 + 12*r.Float64())
	shape := Shape{Tenants: 2 + r.IntN(30), Greed: 1 + 10*r.Float64(), Patience: 2 + 60*r.Float64()}
	d := shape.Make(seed, []Phase{{10, rate / 2}, {20, rate}, {10, rate / 3}})
	d.After = 600
	for i := range d.Asked {
		a := &d.Asked[i]
		switch r.IntN(8) {
		case 0:
			a.Deadline = 0.2 + 10*r.Float64()
		case 1:
			a.Fickle, a.Leaves = true, 5*r.Float64()
		case 2:
			a.Target = -1
		case 3:
			a.Most = 1 + r.IntN(2*a.Out)
		case 4:
			a.ShedAt = flow.ShedAt{Queue: r.Float64(), Saturation: r.Float64()}
		}
	}
	admission := Headgate
	if admission.Queue = RandomLimits(r); r.IntN(2) == 0 {
		admission.Queue = Headgate.Queue
	}
	c := &Chaos{}
	for range r.IntN(12) {
		c.Strikes = append(c.Strikes, Strike{
			At: 45 * r.Float64(), What: What(r.IntN(int(NoMetrics) + 1)), For: 0.2 + 15*r.Float64(), Seed: r.Uint64(),
		})
	}
	return Run{Pool: pool, Demand: d, Admission: admission, Chaos: c, Seed: seed}
}

func (s Strike) String() string { return fmt.Sprintf("%s at %.2f s for %.1f s", s.What, s.At, s.For) }
