// SPDX-License-Identifier: Apache-2.0

package model

import (
	"errors"
	"fmt"
	"time"
)

// Params describes one GPU and model pair. A step that computes T tokens, of
// which P (prompt token, earlier token) pairs are prefill attention and D are
// decoding sequences with C tokens of context between them, takes
//
//	StepBase + max(StepFloor, T*Token) + P/1e6*Attention + D*Decode + C/1e3*KVRead
//
// plus AdapterLoad for each adapter it brings in. All costs are whole
// nanoseconds and all arithmetic is on integers, so that one seed gives one
// history on every architecture.
type Params struct {
	StepBase  time.Duration // paid by every step: launch, scheduling, sampling
	StepFloor time.Duration // least time of the matrix work: reading the weights once
	Token     time.Duration // matrix work per token of the step, prompt or decode
	Attention time.Duration // prefill attention per million (token, earlier token) pairs
	Decode    time.Duration // per decoding sequence
	KVRead    time.Duration // per thousand context tokens of decoding sequences

	BlockTokens int // tokens per KV block; 0 means 16
	Blocks      int // KV blocks in all; 0 means 4096
	StepTokens  int // token budget of one step; 0 means 2048
	RunningMax  int // sequences that run at once; 0 means 256

	AdapterSlots int           // LoRA adapters resident at once; 0: the engine serves none
	AdapterLoad  time.Duration // time the whole batch waits while one adapter is loaded

	// BlockEvents makes Step report every block that enters and leaves the
	// prefix cache, as an engine with KV-cache events does.
	BlockEvents bool
}

func (p Params) withDefaults() Params {
	for _, d := range []struct {
		field *int
		value int
	}{{&p.BlockTokens, 16}, {&p.Blocks, 4096}, {&p.StepTokens, 2048}, {&p.RunningMax, 256}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	return p
}

// Validate reports every field that no engine can have.
func (p Params) Validate() error {
	var errs []error
	for _, d := range []struct {
		name string
		v    time.Duration
	}{
		{"StepBase", p.StepBase}, {"StepFloor", p.StepFloor}, {"Token", p.Token}, {"Attention", p.Attention},
		{"Decode", p.Decode}, {"KVRead", p.KVRead}, {"AdapterLoad", p.AdapterLoad},
	} {
		if d.v < 0 {
			errs = append(errs, fmt.Errorf("%s is negative: %v", d.name, d.v))
		}
	}
	for _, n := range []struct {
		name string
		v    int
	}{
		{"BlockTokens", p.BlockTokens}, {"Blocks", p.Blocks}, {"StepTokens", p.StepTokens},
		{"RunningMax", p.RunningMax}, {"AdapterSlots", p.AdapterSlots},
	} {
		if n.v < 0 {
			errs = append(errs, fmt.Errorf("%s is negative: %d", n.name, n.v))
		}
	}
	return errors.Join(errs...)
}

// Instant takes no time at all: the order of things is that of a real engine,
// the clock never moves. For tests.
var Instant = Params{
	Blocks: 1 << 16, StepTokens: 1 << 16, RunningMax: 1024, AdapterSlots: 8,
}

// Laptop is a small model on a laptop's processor: about 30 tokens a second
// alone, four sequences at most. Chosen to look right in a demo, not measured.
var Laptop = Params{
	StepBase: 2 * time.Millisecond, StepFloor: 28 * time.Millisecond, Token: 4 * time.Millisecond,
	Attention: 200 * time.Millisecond, Decode: 500 * time.Microsecond, KVRead: 500 * time.Microsecond,
	Blocks: 512, StepTokens: 512, RunningMax: 4, AdapterSlots: 2, AdapterLoad: 50 * time.Millisecond,
}

// A100x8B is an 8-billion-parameter model in bf16 on one A100, by roofline
// arithmetic: half of peak compute, three quarters of peak bandwidth, 400k
// tokens of KV cache. Not checked against a GPU.
var A100x8B = Params{
	StepBase: 2 * time.Millisecond, StepFloor: 10500 * time.Microsecond, Token: 103093 * time.Nanosecond,
	Attention: 3400 * time.Microsecond, Decode: 25 * time.Microsecond, KVRead: 87 * time.Microsecond,
	Blocks: 25000, StepTokens: 2048, RunningMax: 256, AdapterSlots: 8, AdapterLoad: 15 * time.Millisecond,
}

// Presets are the named parameter sets, by the word used on command lines.
var Presets = map[string]Params{
	"instant": Instant,
	"laptop":  Laptop,
	"a100-8b": A100x8B,
}
