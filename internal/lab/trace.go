// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// Traces reads the traces of a folder; they are not part of the repository. Each
// file is read once.
type Traces struct {
	fs    fs.FS
	files map[string]any
}

// NewTraces reads from a folder.
func NewTraces(dir fs.FS) *Traces { return &Traces{fs: dir, files: map[string]any{}} }

// load reads a file once.
func load[T any](ctx context.Context, t *Traces, name string, read func(*reader) ([]T, error)) ([]T, error) {
	if known, ok := t.files[name].([]T); ok {
		return known, nil
	}
	f, err := t.fs.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	rows, err := read(newReader(ctx, name, f))
	if err != nil {
		return nil, err
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("%s: is empty", name)
	}
	t.files[name] = rows
	return rows, nil
}

// window says which part of a trace a workload is drawn from.
type window struct {
	file     string
	end      float64 // seconds of each copy
	warm     float64
	from, to float64 // shares of the trace in which copies begin
	jitter   float64 // seconds; the conversation trace's times are binned
	shared   bool    // block 0 is a prompt that everybody shares

	common map[int64]bool // blocks that don't tell sessions apart; the first one never does
}

// chained is a block with the key of all before it. Ids of a user's trace may stand
// for 512 tokens wherever they are, but engines and indices need keys that stand for
// a whole prefix.
type chained struct {
	before uint64
	id     int64
}

// mooncake lays windows of a trace over each other, each with users of its own.
// Load leaves out sessions, so the gaps between a session's turns are real.
func (t *Traces) mooncake(ctx context.Context, name string, seed int64, copies int, in window) (*Workload, error) {
	rows, err := load(ctx, t, in.file, readMooncake)
	if err != nil {
		return nil, err
	}
	r := newRand(seed, 4)
	w := &Workload{
		Name: name, file: in.file, BlockTokens: blockLarge, loadMax: float64(copies), warm: in.warm, end: in.end,
		engine: "32b-tier", short: "× the trace",
	}
	span := rows[len(rows)-1].ms / 1000
	var k keys
	everybody := k.take(1)[0]
	for range copies {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		begin := (in.from + r.Float64()*(in.to-in.from)) * span
		ids, draws := map[chained]uint64{}, map[uint64]float64{}
		for _, row := range rows {
			// Drawn for the rows outside of the window too: what a seed gives must not
			// hang on where it lies.
			at := row.ms/1000 + r.Float64()*in.jitter - begin
			if at < 0 || at >= in.end {
				continue
			}
			q := Request{Arrive: at, In: row.in, Out: row.out, next: -1, line: row.line}
			var before uint64
			for _, id := range row.blocks {
				block := chained{before, id}
				switch {
				case id == 0 && in.shared:
					before = everybody
				case ids[block] == 0:
					before = k.take(1)[0]
					ids[block] = before
				default:
					before = ids[block]
				}
				q.Blocks = append(q.Blocks, before)
			}
			which := min(1, max(len(q.Blocks)-1, 0))
			for which < len(q.Blocks) && in.common[row.blocks[which]] {
				which++
			}
			var session uint64
			if which < len(q.Blocks) {
				session = q.Blocks[which]
			} else {
				session = k.take(1)[0] // of its own
			}
			if _, known := draws[session]; !known {
				draws[session] = r.Float64()
			}
			q.draw, q.Group = draws[session], int(session>>33)
			q.Blocks = q.Blocks[:min(len(q.Blocks), q.In/blockLarge)]
			w.requests = append(w.requests, q)
		}
	}
	sort.SliceStable(w.requests, func(a, b int) bool { return w.requests[a].Arrive < w.requests[b].Arrive })
	for i := range w.requests {
		w.roots = append(w.roots, i)
	}
	w.number()
	return w, nil
}

// azure is a stretch of a trace that has no prefixes, its bursts kept. A load of
// one is one request a second.
func (t *Traces) azure(ctx context.Context, name, file string, seed int64, n int, from, to float64) (*Workload, error) {
	rows, err := load(ctx, t, file, readAzure)
	if err != nil {
		return nil, err
	}
	if len(rows) < 8 {
		return nil, fmt.Errorf("%s: has %d rows, too few to draw from", file, len(rows))
	}
	rows = rows[int(from*float64(len(rows))):int(to*float64(len(rows)))]
	r := newRand(seed, 5)
	n = min(n, len(rows)*9/10)
	begin := r.IntN(len(rows) - n + 1)
	rows = rows[begin : begin+n]
	w := &Workload{Name: name, file: file, BlockTokens: blockSmall, compress: true, loadMax: math.Inf(1), warm: 0.1, end: 1, engine: "8b-a100", short: "requests/s"}
	took := rows[n-1].at - rows[0].at
	if took <= 0 {
		return nil, fmt.Errorf("%s:%d: %d requests from here on have one time: without the gaps between them no load can be made", file, rows[0].line, n)
	}
	for _, row := range rows {
		w.add(Request{Arrive: (row.at - rows[0].at) / took * float64(n), In: row.in, Out: row.out, next: -1, line: row.line})
	}
	w.number()
	return w, nil
}

// A renewal is one client of ServeGen: how it arrives and how long its requests
// are.
type renewal struct {
	rate, shape float64
	gamma       bool
	in, out     lengths
}

// lengths are token counts with their cumulated probabilities.
type lengths struct {
	tokens    []int
	cumulated []float64
}

func (l *lengths) draw(r *rand.Rand) int {
	x := r.Float64() * l.cumulated[len(l.cumulated)-1]
	return max(l.tokens[min(sort.SearchFloat64s(l.cumulated, x), len(l.tokens)-1)], 1)
}

// client reads one of ServeGen's clients, at the window that begins at a time.
func (t *Traces) client(ctx context.Context, chunk int, at float64) (*renewal, error) {
	base := fmt.Sprintf("servegen_m-small/chunk-%d-", chunk)
	rows, err := load(ctx, t, base+"trace.csv", func(r *reader) (rows [][]string, err error) {
		for r.next() {
			rows = append(rows, strings.Split(r.text(), ","))
		}
		return rows, r.err()
	})
	if err != nil {
		return nil, err
	}
	c := &renewal{}
	for _, row := range rows {
		if when, err := strconv.ParseFloat(row[0], 64); err != nil || when != at || len(row) < 5 {
			continue
		}
		c.rate, _ = strconv.ParseFloat(row[1], 64)
		c.gamma = row[3] == "Gamma"
		c.shape, _ = strconv.ParseFloat(row[4], 64)
	}
	if c.rate <= 0 || c.shape <= 0 {
		return nil, fmt.Errorf("%strace.csv: no window at %v with a rate and a shape", base, at)
	}
	type dataset struct {
		at   float64
		text map[string]string
	}
	sets, err := load(ctx, t, base+"dataset.json", func(r *reader) ([]dataset, error) {
		var raw map[string]map[string]string
		if err := json.NewDecoder(r).Decode(&raw); err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
		var sets []dataset
		for key, text := range raw {
			when, err := strconv.ParseFloat(key, 64)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", r.name, err)
			}
			sets = append(sets, dataset{when, text})
		}
		sort.Slice(sets, func(a, b int) bool { return sets[a].at < sets[b].at })
		return sets, nil
	})
	if err != nil {
		return nil, err
	}
	for _, which := range []struct {
		name string
		to   *lengths
	}{{"input_tokens", &c.in}, {"output_tokens", &c.out}} {
		best := -1
		for i, s := range sets {
			if text := s.text[which.name]; text == "" || text == "{}" {
				continue
			}
			if best < 0 || math.Abs(s.at-at) < math.Abs(sets[best].at-at) {
				best = i
			}
		}
		if best < 0 {
			return nil, fmt.Errorf("%sdataset.json: no %s", base, which.name)
		}
		if err := which.to.parse(sets[best].text[which.name]); err != nil {
			return nil, fmt.Errorf("%sdataset.json: %s: %w", base, which.name, err)
		}
	}
	return c, nil
}

// parse reads a Python dict of tokens to probabilities.
func (l *lengths) parse(text string) error {
	probability := map[int]float64{}
	for pair := range strings.SplitSeq(strings.Trim(strings.TrimSpace(text), "{}"), ",") {
		key, value, ok := strings.Cut(pair, ":")
		n, err1 := strconv.Atoi(strings.TrimSpace(key))
		p, err2 := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if !ok || err1 != nil || err2 != nil {
			return fmt.Errorf("%q is no length with its probability", pair)
		}
		probability[n] += p
	}
	sum := 0.0
	for n := range probability {
		l.tokens = append(l.tokens, n)
	}
	slices.Sort(l.tokens)
	for _, n := range l.tokens {
		sum += probability[n]
		l.cumulated = append(l.cumulated, sum)
	}
	return nil
}

// shapeMin keeps a finite sample of a bursty client from being one spike.
const shapeMin = 0.35

func (c *renewal) gap(r *rand.Rand) float64 {
	mean := 1 / c.rate
	if c.gamma {
		return gammaDraw(r, c.shape) * mean / c.shape
	}
	shape := max(c.shape, shapeMin)
	return math.Pow(-math.Log(1-r.Float64()), 1/shape) * mean / math.Gamma(1+1/shape)
}

// gammaDraw is Marsaglia and Tsang's method.
func gammaDraw(r *rand.Rand, k float64) float64 {
	if k < 1 {
		return gammaDraw(r, k+1) * math.Pow(r.Float64(), 1/k)
	}
	d := k - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := r.NormFloat64()
		v := (1 + c*x) * (1 + c*x) * (1 + c*x)
		if v > 0 && math.Log(r.Float64()) < 0.5*x*x+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}

// clients lays ServeGen's clients over each other. A load of one is one request
// a second.
func (t *Traces) clients(ctx context.Context, seed int64, n int, held bool) (*Workload, error) {
	chosen := []struct {
		chunk int
		at    float64
	}{{12, 970200}, {10, 529200}, {2, 256200}, {0, 338400}}
	if held {
		chosen[0].at, chosen[1].at, chosen[2].at = 960000, 530400, 306000
		chosen[3].chunk, chosen[3].at = 3, 822000
	}
	var all []*renewal
	total := 0.0
	for _, c := range chosen {
		one, err := t.client(ctx, c.chunk, c.at)
		if err != nil {
			return nil, err
		}
		all, total = append(all, one), total+one.rate
	}
	r := newRand(seed, 6)
	w := &Workload{Name: "servegen", BlockTokens: blockSmall, compress: true, loadMax: math.Inf(1), warm: 0.1, end: 1, engine: "8b-a100", short: "requests/s"}
	end := float64(n) / total
	var list []Request
	for _, c := range all {
		for at := -r.Float64() * 5 / c.rate; at < end; at += c.gap(r) {
			if at >= 0 {
				list = append(list, Request{Arrive: at * total, In: c.in.draw(r), Out: c.out.draw(r), next: -1})
			}
		}
	}
	sort.SliceStable(list, func(a, b int) bool { return list[a].Arrive < list[b].Arrive })
	for _, q := range list {
		w.add(q)
	}
	w.number()
	return w, nil
}

// Workloads are the names that Workload knows, those with traces first.
var Workloads = []string{"conv", "synth", "codegen", "b2b", "servegen", "azconv", "azcode", "lora"}

// Workload makes a workload for n engines. Held ones use other parts of the
// traces and other parameters of the generators than those that policies were
// tuned on. The name of a .jsonl or .csv file is a trace of the user's own. A done
// context ends the reading and the making.
func (t *Traces) Workload(ctx context.Context, name string, n int, seed int64, held bool) (w *Workload, err error) {
	f, from := float64(n), 0.0
	if held {
		seed += 1_000_003
		from = 0.5
	}
	switch name {
	case "conv":
		in := window{file: "mooncake_conversation_trace.jsonl", end: 700, warm: 250, to: 0.30, jitter: 3, shared: true}
		if held {
			in.from, in.to = 0.5, 0.80
		}
		w, err = t.mooncake(ctx, name, seed, int(f*0.45+2), in)
	case "synth":
		in := window{file: "mooncake_synthetic_trace.jsonl", end: 330, warm: 100, to: 0.18}
		if held {
			in.from, in.to = 0.5, 0.67
		}
		w, err = t.mooncake(ctx, name, seed, int(f*0.5+2), in)
	case "codegen":
		return codeAgents(seed, n, held), nil
	case "b2b":
		return sharedPrompts(seed, n, held), nil
	case "lora":
		return adapterMix(seed, n, held), nil
	case "servegen":
		w, err = t.clients(ctx, seed, 600*n, held)
	case "azconv":
		w, err = t.azure(ctx, name, "azure2023_conv.csv", seed, 600*n, from, from+0.5)
	case "azcode":
		w, err = t.azure(ctx, name, "azure2023_code.csv", seed, 400*n, from, from+0.5)
	default:
		if !strings.HasSuffix(name, ".jsonl") && !strings.HasSuffix(name, ".csv") {
			return nil, fmt.Errorf("workload %q: want one of %s, or a .jsonl or .csv file of the folder with traces", name, strings.Join(Workloads, ", "))
		}
		return t.own(ctx, name, seed, n)
	}
	if err != nil {
		return nil, err
	}
	w.guess = map[string]float64{"conv": 0.17, "synth": 0.17, "servegen": 25, "azconv": 5, "azcode": 0.4}[name] * f
	return w, nil
}
