// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"container/heap"
	"math"
	"time"

	"github.com/headgate/headgate/internal/simengine/model"
)

// Machine is one modelled engine, whatever it is made of: model.Engine and
// alternate.Engine are two. It is driven as model.Engine says.
type Machine interface {
	Submit(now time.Duration, job model.Job) error
	Cancel(now time.Duration, id string) bool
	Next() (at time.Duration, ok bool)
	Step(now time.Duration) []model.Event
	Match(blocks []uint64) int // leading tokens that are cached
	Snapshot() model.Snapshot
}

// Play is machines on one virtual clock, with calls at set times between their
// steps. It decides nothing: calls and Heard do, and they may submit, cancel and
// set further calls. At one moment calls come first, in the order in which they
// were set, then Wake, then steps in the order of the machines.
type Play struct {
	Machines []Machine

	// Heard is told what machines do, in order. The event is valid during the call.
	Heard func(now float64, machine int, ev model.Event)

	// Due is asked before each step when Wake is wanted; +Inf is never. A time that
	// has passed means now. Both may be nil.
	Due  func() float64
	Wake func(now float64)

	now   float64
	calls calls
	made  int
}

// Now is the virtual time in seconds.
func (p *Play) Now() float64 { return p.now }

// At sets a call.
func (p *Play) At(at float64, do func(now float64)) {
	heap.Push(&p.calls, call{at: max(at, p.now), order: p.made, do: do})
	p.made++
}

// Advance plays the next thing. It reports whether there was one by that time.
func (p *Play) Advance(until float64) bool {
	machine, at := p.nextStep()
	due := math.Inf(1)
	if p.Due != nil {
		due = max(p.Due(), p.now)
	}
	set := math.Inf(1)
	if len(p.calls) > 0 {
		set = p.calls[0].at
	}
	next := min(set, due, at)
	if next > until || math.IsInf(next, 1) {
		return false
	}
	p.now = next
	switch {
	case set <= next:
		heap.Pop(&p.calls).(call).do(next)
	case due <= next:
		p.Wake(next)
	default:
		p.step(machine)
	}
	return true
}

func (p *Play) nextStep() (machine int, at float64) {
	machine, at = -1, math.Inf(1)
	for i, m := range p.Machines {
		if due, ok := m.Next(); ok && due.Seconds() < at {
			machine, at = i, due.Seconds()
		}
	}
	return machine, at
}

func (p *Play) step(machine int) {
	m := p.Machines[machine]
	due, _ := m.Next()
	for _, ev := range m.Step(due) {
		p.Heard(p.now, machine, ev)
	}
}

// seconds is a virtual time as machines know it.
func seconds(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }

type call struct {
	at    float64
	order int
	do    func(now float64)
}

// calls is a heap, the soonest on top.
type calls []call

func (c calls) Len() int { return len(c) }

func (c calls) Less(i, j int) bool {
	if c[i].at != c[j].at {
		return c[i].at < c[j].at
	}
	return c[i].order < c[j].order
}

func (c calls) Swap(i, j int) { c[i], c[j] = c[j], c[i] }

func (c *calls) Push(x any) { *c = append(*c, x.(call)) }

func (c *calls) Pop() any {
	last := len(*c) - 1
	x := (*c)[last]
	(*c)[last] = call{}
	*c = (*c)[:last]
	return x
}
