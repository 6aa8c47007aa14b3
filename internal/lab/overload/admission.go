// SPDX-License-Identifier: Apache-2.0

package overload

import (
	"math"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugin"
)

// Admission is a way to decide who is let in and when. All choose endpoints by
// the same book, so none loses by a worse router than Headgate's.
type Admission struct {
	Name   string
	About  string // what it is, and where its rules are from
	Peer   bool   // somebody else's
	Limits schedule.Limits
	Queue  flow.Config // of Headgate's
	make   func(w *world, a *Admission) door
}

func (a *Admission) open(w *world) door { return a.make(w, a) }

func (a *Admission) limits() schedule.Limits { return a.Limits }

// Headgate is the queue with a configuration's defaults.
var Headgate = Admission{
	Name: "headgate", About: "flow.Queue with its defaults, rounds of schedule.Book",
	Limits: schedule.Limits{Prefill: 250 * time.Millisecond, Waiting: 2},
	Queue: flow.Config{
		RequestsMax: 5000, BytesMax: 1 << 30, TTL: time.Minute, EmptyTTL: 5 * time.Minute,
		RefuseAt: flow.RefuseAtDefault,
	},
	make: newQueued,
}

// Admissions are the known ones. Those of others are written anew from what
// their projects publish; "X-like" would be the honest name of each.
var Admissions = []Admission{
	Headgate,
	{
		Name: "none", About: "no flow control: every request goes to an engine as it comes", Peer: true,
		make: newAtOnce(func(*world, *job) bool { return false }),
	},
	{
		Name: "hard-shed", About: "llm-d without flow control: the lowest priority is refused while saturation is 1 or more", Peer: true,
		make: newAtOnce(func(w *world, j *job) bool { return sheddable(j) && w.saturation() >= 1 }),
	},
	{
		Name: "llm-d", About: "llm-d's flow control: strict bands, round robin between flows, one request per arrival and per tick of 1 ms while saturation is below 1", Peer: true,
		make: newTicked,
	},
	{
		Name: "probabilistic", About: "llm-d's probabilistic admitter: the lowest priority is refused with probability min(1, 300·saturation⁵)", Peer: true,
		make: newAtOnce(func(w *world, j *job) bool {
			return sheddable(j) && w.rnd.Float64() < min(1, 300*math.Pow(w.saturation(), 5))
		}),
	},
}

// AdmissionNamed finds an admission.
func AdmissionNamed(name string) (Admission, bool) {
	for _, a := range Admissions {
		if a.Name == name {
			return a, true
		}
	}
	return Admission{}, false
}

func sheddable(j *job) bool { return j.Priority < 0 }

func known(v float64) plugin.Value { return plugin.Value{V: v, Known: true} }

// saturation is llm-d's: the mean over endpoints of the larger of waiting
// requests over 5 and KV memory over 0.8. An endpoint whose metrics are older
// than 200 ms counts as saturated, and so does an empty pool.
func (w *world) saturation() float64 {
	const queueFull, kvFull, stale = 5, 0.8, 0.2
	sum, n := 0.0, 0
	for _, e := range w.engines {
		if !e.listed {
			continue
		}
		n++
		if e.scraped < 0 || w.play.Now()-e.scraped > stale {
			sum++
			continue
		}
		sum += max(e.queued/queueFull, e.kv/kvFull)
	}
	if n == 0 {
		return 1
	}
	return sum / float64(n)
}

// queued is Headgate's door, pumped as a gateway pumps it.
type queued struct {
	w     *world
	queue *flow.Queue
	dirty bool // something has changed since the last pump
}

// inner is the door itself, whatever is built around it.
func (d *queued) inner() *queued { return d }

func newQueued(w *world, a *Admission) door { return &queued{w: w, queue: flow.New(a.Queue)} }

func (d *queued) arrive(now float64, j *job) {
	d.round(now, func(fleet flow.Fleet) {
		if err := d.queue.Arrive(clock(now), &j.request, fleet); err != nil {
			d.w.refuse(now, j, err)
		}
	})
}

// round makes a change and pumps, in one round, and carries out what was decided.
func (d *queued) round(now float64, change func(flow.Fleet)) {
	round := d.w.book.Begin(clock(now), d.w.pool)
	fleet := d.w.check.watch(now, round)
	if change != nil {
		change(fleet)
	}
	list := d.queue.Pump(clock(now), fleet)
	d.w.check.load(round.Load())
	round.End()
	d.dirty = false
	for _, decision := range list {
		j := decision.Request.Owner.(*job)
		if decision.Place == nil {
			d.w.refuse(now, j, decision.Err)
		} else {
			d.w.send(now, j, decision.Place)
		}
	}
}

func (d *queued) stir() { d.dirty = true }

func (d *queued) due() float64 {
	if d.dirty {
		return 0
	}
	at, wanted := d.queue.Next()
	if !wanted {
		return math.Inf(1)
	}
	return at.Sub(epoch).Seconds()
}

func (d *queued) wake(now float64) { d.round(now, nil) }

func (d *queued) leave(j *job) bool { return d.queue.Leave(&j.request) }

func (d *queued) again(now float64, j *job) {
	d.queue.Return(clock(now), &j.request)
	d.dirty = true
}

func (d *queued) done(j *job) {
	fresh, output := -1, -1
	if j.first > 0 {
		fresh, output = j.In-j.cached, j.made
	}
	d.queue.Done(&j.request, fresh, output)
}

// atOnce is a door without a queue: who is not refused is sent to an engine.
type atOnce struct {
	w      *world
	refuse func(w *world, j *job) bool
}

func newAtOnce(refuse func(w *world, j *job) bool) func(*world, *Admission) door {
	return func(w *world, _ *Admission) door { return &atOnce{w, refuse} }
}

func (d *atOnce) arrive(now float64, j *job) {
	if d.refuse(d.w, j) {
		d.w.refuse(now, j, inference.Errorf(inference.Shed, "shed"))
		return
	}
	d.again(now, j)
}

func (d *atOnce) again(now float64, j *job) {
	place, err := d.w.book.Reserve(clock(now), d.w.pool, j.request.Ask)
	if err != nil {
		d.w.refuse(now, j, err)
		return
	}
	d.w.send(now, j, place)
}

func (*atOnce) stir()           {}
func (*atOnce) due() float64    { return math.Inf(1) }
func (*atOnce) wake(float64)    {}
func (*atOnce) leave(*job) bool { return true }
func (*atOnce) done(*job)       {}

// ticked is llm-d's flow control.
type ticked struct {
	atOnce
	bands map[int]*ring
	count int
	next  float64 // tick
}

// ring is the flows of a band and whose turn it is.
type ring struct {
	flows []string
	queue map[string][]*job
	turn  int
}

const (
	tick      = 0.001
	tickedTTL = 60.0
)

func newTicked(w *world, _ *Admission) door {
	d := &ticked{atOnce: atOnce{w: w}, bands: map[int]*ring{}}
	for _, p := range Priorities {
		d.bands[p] = &ring{queue: map[string][]*job{}}
	}
	return d
}

func (d *ticked) arrive(now float64, j *job) {
	b := d.bands[j.Priority]
	if b.queue[j.Tenant] == nil {
		b.flows = append(b.flows, j.Tenant)
	}
	b.queue[j.Tenant] = append(b.queue[j.Tenant], j)
	if d.count++; d.count == 1 {
		d.next = now + tick
	}
	d.dispatch(now)
}

// dispatch lets one request go.
func (d *ticked) dispatch(now float64) {
	d.expire(now)
	if d.count == 0 || d.w.saturation() >= 1 {
		return
	}
	for _, p := range Priorities {
		b := d.bands[p]
		for range b.flows {
			id := b.flows[b.turn%len(b.flows)]
			b.turn++
			if waits := b.queue[id]; len(waits) > 0 {
				b.queue[id] = waits[1:]
				d.count--
				d.again(now, waits[0])
				return
			}
		}
	}
}

// expire refuses those who have waited too long.
func (d *ticked) expire(now float64) {
	for _, p := range Priorities {
		b := d.bands[p]
		for _, id := range b.flows {
			for len(b.queue[id]) > 0 && now-b.queue[id][0].At >= tickedTTL {
				j := b.queue[id][0]
				b.queue[id] = b.queue[id][1:]
				d.count--
				d.w.refuse(now, j, inference.Errorf(inference.QueueTimeout, "waited too long"))
			}
		}
	}
}

func (d *ticked) due() float64 {
	if d.count == 0 {
		return math.Inf(1)
	}
	return d.next
}

func (d *ticked) wake(now float64) {
	d.next = now + tick
	d.dispatch(now)
}

func (d *ticked) leave(j *job) bool {
	b := d.bands[j.Priority]
	for i, x := range b.queue[j.Tenant] {
		if x == j {
			b.queue[j.Tenant] = append(b.queue[j.Tenant][:i:i], b.queue[j.Tenant][i+1:]...)
			d.count--
			return true
		}
	}
	return false
}
