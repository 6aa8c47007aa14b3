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
// internal/command calls it, and make bench-routing.
package lab

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/headgate/headgate/internal/lab/alternate"
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

// Built is the engine's parameters with blocks of that many tokens. A slow one
// prefills at 0.4 and decodes at 0.6 of the speed.
func (e Engine) Built(blockTokens int, slow bool) model.Params {
	p := e.Params
	p.BlockTokens, p.Blocks = blockTokens, e.KVTokens/blockTokens
	if slow {
		p.Token = p.Token * 10 / 4
		p.Attention = p.Attention * 10 / 4
		p.StepFloor, p.Decode, p.KVRead = p.StepFloor*10/6, p.Decode*10/6, p.KVRead*10/6
	}
	return p
}

// Target is the time within which the first output of a prompt is good.
func (e Engine) Target(prompt int) float64 {
	n := float64(prompt)
	return e.Base + 2*(n*e.Params.Token.Seconds()+n*n/2*e.Params.Attention.Seconds()/1e6)
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
	Model    string  // of Models; "": mixed
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
	if c.Model != "" {
		name += "/" + c.Model
	}
	return name
}

// Models are the ways in which an engine is modelled, by name. They share
// parameters and nothing else, so what holds in both is not one model's quirk.
var Models = map[string]func(model.Params) Machine{
	"mixed":       func(p model.Params) Machine { return model.New(p) },
	"alternating": func(p model.Params) Machine { return alternate.New(p) },
}

// fleet is the engines of one run.
type fleet struct {
	spec    Engine
	params  []model.Params
	engines []Machine
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
	build, ok := Models[cmp.Or(c.Model, "mixed")]
	if !ok {
		return nil, fmt.Errorf("model %q is not known", c.Model)
	}
	for i := range w.requests {
		q := &w.requests[i]
		switch {
		case q.Adapter != "" && c.Model == "alternating":
			return nil, fmt.Errorf("engines of the alternating model have no adapters")
		case q.In+q.Out > spec.KVTokens-w.BlockTokens:
			return nil, fmt.Errorf("%s has %d tokens, more than engine %s can hold", w.source(i), q.In+q.Out, name)
		case q.Adapter != "" && spec.Params.AdapterSlots == 0:
			return nil, fmt.Errorf("engine %s has no slots for adapters", name)
		}
	}
	f := &fleet{spec: spec}
	for i := range c.N {
		p := spec.Built(w.BlockTokens, c.TwoSpeed && i%2 == 1)
		if infinite {
			p.Blocks *= 100
		}
		f.params = append(f.params, p)
		f.engines = append(f.engines, build(p))
	}
	return f, nil
}
