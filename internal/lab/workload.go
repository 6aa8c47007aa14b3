// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"strconv"
)

// Request is one request of a workload.
type Request struct {
	ID      string
	Arrive  float64 // seconds; of a later turn it is set when the one before ended
	In, Out int     // tokens
	Blocks  []uint64
	Answer  []uint64 // blocks that the answer fills
	Adapter string
	Group   int // session or customer, for policies that hash one

	next  int     // the session's next turn, -1 for none
	think float64 // seconds from this one's end to it
	draw  float64 // in [0, 1): whether a load includes the session
	line  int     // of Workload.file
}

// Workload is requests whose load can be set: either sessions are left out, so
// that the gaps inside a session stay as they are, or time is compressed.
type Workload struct {
	Name string
	file string // trace that each request is a line of; "": none
	own  bool   // the file is the user's

	// larger makes another whose loadMax is larger, of a trace that turns out to be
	// carried whole; nil: loadMax is the bound.
	larger func(context.Context) (*Workload, error)

	BlockTokens int
	requests    []Request
	roots       []int // those that arrive by themselves, in order
	compress    bool
	loadMax     float64
	warm, end   float64 // what is measured: seconds, or shares of the arrivals if compressed
	guess       float64 // a load to begin the search at
	engine      string  // name of the engines that it is for
	short       string  // what load counts
}

func (w *Workload) number() {
	for i := range w.requests {
		w.requests[i].ID = strconv.Itoa(i)
	}
}

// source names a request for whoever made the trace.
func (w *Workload) source(i int) string {
	if w.file == "" {
		return fmt.Sprintf("request %d", i)
	}
	return fmt.Sprintf("%s:%d", w.file, w.requests[i].line)
}

// seeds are told apart by what they are for.
const (
	blockLarge = 512 // of traces and generators with prefixes
	blockSmall = 128
)

func newRand(seed int64, stream uint64) *rand.Rand {
	return rand.New(rand.NewPCG(uint64(seed)*0x9E3779B97F4A7C15+stream, stream))
}

func logNormal(r *rand.Rand, median, sigma, lo, hi float64) float64 {
	return min(hi, max(lo, median*math.Exp(sigma*r.NormFloat64())))
}

// keys makes block keys that nobody else has.
type keys struct{ next uint64 }

func (k *keys) take(n int) []uint64 {
	list := make([]uint64, n)
	for i := range list {
		k.next++
		list[i] = k.next * 0x9E3779B97F4A7C15
	}
	return list
}

// zipf draws from n ranks with exponent z.
type zipf []float64

func newZipf(n int, z float64) zipf {
	cumulated, sum := make(zipf, n), 0.0
	for i := range cumulated {
		sum += math.Pow(float64(i+1), -z)
		cumulated[i] = sum
	}
	return cumulated
}

func (z zipf) draw(r *rand.Rand) int { return sort.SearchFloat64s(z, r.Float64()*z[len(z)-1]) }

// sharedPrompts is a service with customers who each have a long prompt of their
// own, and who are sometimes all asking at once.
func sharedPrompts(seed int64, n int, held bool) *Workload {
	r := newRand(seed, 1)
	rate, end, warm := 7*float64(n), 120.0, 20.0
	skew, length := 0.8, 6000
	if held {
		skew, length = 1.0, 5000
	}
	w := &Workload{
		Name: "b2b", BlockTokens: blockSmall, loadMax: rate, warm: warm, end: end,
		guess: 3 * float64(n), engine: "32b", short: "requests/s",
	}
	var k keys
	customers := make([][]uint64, 19*n)
	for i := range customers {
		customers[i] = k.take(length / blockSmall)
	}
	popular := newZipf(len(customers), skew)
	burst, burstEnd, burstNext := 0, 0.0, r.ExpFloat64()*25
	for t := r.ExpFloat64() / rate; t <= end; t += r.ExpFloat64() / rate {
		if t > burstNext {
			burst, burstEnd = r.IntN(len(customers)), t+10
			burstNext = t + 10 + r.ExpFloat64()*25
		}
		c := popular.draw(r)
		if t < burstEnd && r.Float64() < 0.15 {
			c = burst
		}
		w.add(Request{
			Arrive: t, In: length + int(logNormal(r, 900, 0.75, 50, 8000)), Out: int(logNormal(r, 220, 0.8, 2, 2000)),
			Blocks: customers[c], Group: c, next: -1, draw: r.Float64(),
		})
	}
	w.number()
	return w
}

func (w *Workload) add(q Request) {
	w.roots = append(w.roots, len(w.requests))
	w.requests = append(w.requests, q)
}

// codeAgents is sessions of a code assistant: a long context that grows turn by
// turn, and a pause between turns.
func codeAgents(seed int64, n int, held bool) *Workload {
	r := newRand(seed, 2)
	rate, end, warm := 0.5*float64(n), 300.0, 100.0
	apps, own, more, pause := 8, 12000.0, 1200.0, 2.0
	if held {
		apps, own, more, pause = 5, 16000, 900, 3
	}
	w := &Workload{
		Name: "codegen", BlockTokens: blockLarge, loadMax: rate, warm: warm, end: end,
		guess: 0.15 * float64(n), engine: "32b-tier", short: "sessions/s",
	}
	var k keys
	prompts := make([][]uint64, apps)
	for i := range prompts {
		prompts[i] = k.take(int(logNormal(r, 7000, 0.6, 2000, 30000)) / blockLarge)
	}
	for t := r.ExpFloat64() / rate; t <= end; t += r.ExpFloat64() / rate {
		app := prompts[int(float64(apps)*math.Pow(r.Float64(), 1.7))]
		full := slices.Clone(app)
		length := len(app)*blockLarge + int(logNormal(r, own, 0.7, 500, 80000))
		turns, draw := min(2+int(r.ExpFloat64()*6), 20), r.Float64()
		for turn := range turns {
			out := int(logNormal(r, 200, 0.9, 5, 3000))
			after := length + out
			if need := after/blockLarge - len(full); need > 0 {
				full = append(full, k.take(need)...)
			}
			q := Request{
				Arrive: t, In: length, Out: out, Group: len(w.roots), next: -1, draw: draw,
				think:  logNormal(r, pause, 1.3, 0.1, 90),
				Blocks: full[: length/blockLarge : length/blockLarge],
				Answer: full[length/blockLarge : after/blockLarge : after/blockLarge],
			}
			at := len(w.requests)
			if turn == 0 {
				w.roots = append(w.roots, at)
			} else {
				w.requests[at-1].next = at
			}
			w.requests = append(w.requests, q)
			if length = after + int(logNormal(r, more, 0.8, 20, 12000)); length > 120_000 {
				break
			}
		}
	}
	w.number()
	return w
}

// adapters is many LoRA adapters with unequal popularity on few slots.
func adapterMix(seed int64, n int, held bool) *Workload {
	r := newRand(seed, 3)
	rate, end, warm, count, skew := 14*float64(n), 90.0, 20.0, 64, 1.0
	if held {
		count, skew = 80, 0.9
	}
	w := &Workload{
		Name: "lora", BlockTokens: blockSmall, loadMax: rate, warm: warm, end: end,
		guess: 4 * float64(n), engine: "8b-a100", short: "requests/s",
	}
	var k keys
	prompts := make([][]uint64, count)
	for i := range prompts {
		prompts[i] = k.take(1024 / blockSmall)
	}
	popular := newZipf(count, skew)
	for t := r.ExpFloat64() / rate; t <= end; t += r.ExpFloat64() / rate {
		a := popular.draw(r)
		w.add(Request{
			Arrive: t, In: 1024 + int(logNormal(r, 300, 0.7, 20, 3000)), Out: int(logNormal(r, 120, 0.8, 2, 1000)),
			Blocks: prompts[a], Adapter: "adapter-" + strconv.Itoa(a), Group: a, next: -1, draw: r.Float64(),
		})
	}
	w.number()
	return w
}
