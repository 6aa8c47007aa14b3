// SPDX-License-Identifier: Apache-2.0

// Package engine knows what engines say of themselves: under which names each
// make of engine, old or new, exports how many requests wait and run, how full
// its KV memory is and how much it holds, which adapters run, and how it shows
// that it was started anew.
//
// It owns those names and the reading of a page of metrics, byte by byte as it
// comes, within bounds. What a page does not say, or says as nonsense, is
// unknown: never zero and never full. It refuses to fetch anything, to remember
// more than the page at hand, and to judge what a number means for routing.
// internal/scrape feeds it; internal/schedule gets what it reads.
package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/headgate/headgate/plugin"
)

// Kind is the make of an engine.
type Kind uint8

// The kinds. Unknown is also the wish to find out.
const (
	Unknown Kind = iota
	VLLM
	SGLang
	TRTLLM // trtllm-serve
	Triton // with the TensorRT-LLM backend
	LlamaCPP
	TGI
	Sim    // the simulated engine, which exports what vLLM does
	Custom // any other, by the names that it was given
)

var kindNames = [...]string{"unknown", "vllm", "sglang", "trtllm", "triton", "llamacpp", "tgi", "sim", "custom"}

func (k Kind) String() string { return kindNames[k] }

// ParseKind is the kind of a name; auto is Unknown.
func ParseKind(name string) (Kind, bool) {
	if name == "auto" {
		return Unknown, true
	}
	i := slices.Index(kindNames[:], name)
	return Kind(max(i, 0)), i > 0
}

// Reading is what one page of metrics said.
type Reading struct {
	Kind    Kind
	Waiting plugin.Value // requests
	Running plugin.Value // requests
	KVUsage plugin.Value // 0 to 1

	// Done counts work since the engine's start: tokens, or requests.
	Done plugin.Value

	// CacheTokens is how many tokens the KV memory holds, over all parallel
	// engines at the address. 0: prefixes are not kept.
	CacheTokens plugin.Value

	// Adapters are those with running requests. One that is loaded and idle is
	// not among them. AdapterSlots is how many fit at a time, 0 if not known.
	Adapters     []string
	AdapterSlots int

	// Boot is the same for as long as the process lives, and "" if the engine
	// does not say.
	Boot string

	// Missing are the parts that pages of this kind have and this one had not,
	// or not in a form that makes sense.
	Missing []string
}

// Restarted reports whether another process than before answered.
func (r *Reading) Restarted(before *Reading) bool {
	return r.Boot != "" && before.Boot != "" && r.Boot != before.Boot ||
		r.Kind != before.Kind && r.Kind != Unknown && before.Kind != Unknown ||
		r.Kind == before.Kind && r.Done.Known && before.Done.Known && r.Done.V < before.Done.V
}

// Why a page cannot be used.
var (
	ErrTooLarge = errors.New("the page is larger than a page of metrics may be")
	ErrCut      = errors.New("the page ends in the middle of a line")
	ErrNoText   = errors.New("the page is not in Prometheus's text format")
	ErrNoKind   = errors.New("the page has metrics of no engine that is known")
	ErrNothing  = errors.New("the page has none of the metrics that are looked for")
)

// Head is what came before a page that tells of the engine.
type Head struct {
	Server string // the field Server
	Boot   string // the field Process-Start-Time-Unix, which llama.cpp sends
}

// KindOfServer is the kind of an engine that names itself in the field Server,
// also where it exports no metrics.
func KindOfServer(field string) Kind {
	if field == "llama.cpp" {
		return LlamaCPP
	}
	return Unknown
}

// Reader reads pages of one engine, one after the other.
type Reader struct {
	kind     Kind // Unknown: found out page by page
	own      Names
	families map[string]*family
	page
}

// NewReader makes a reader for engines of the kind. names are looked for before
// those that the kind is known for; Custom has no others.
func NewReader(kind Kind, names Names) (*Reader, error) {
	own, err := names.ladder()
	if err != nil {
		return nil, err
	}
	r := &Reader{kind: kind, own: names, families: map[string]*family{bootFamily: {}}}
	r.ladders = map[Kind]*ladder{}
	for k, known := range ladders {
		if kind == Unknown || kind == k || kind == Sim && k == VLLM {
			r.ladders[k] = own.before(known)
		}
	}
	r.ladders[Custom] = own
	for _, l := range r.ladders {
		for _, name := range l.families() {
			r.families[name] = &family{newest: name == l.lora}
		}
	}
	return r, nil
}

// Begin forgets the last page.
func (r *Reader) Begin(h Head) {
	for _, f := range r.families {
		f.reset()
	}
	tail := r.page.tail[:0]
	r.page = page{ladders: r.page.ladders, head: h, tail: tail}
}

// End makes a reading of the page. With an error nothing is known, but perhaps
// the kind.
func (r *Reader) End() (Reading, error) {
	out := Reading{Kind: r.kindOfPage()}
	switch {
	case r.size > PageMax:
		return out, ErrTooLarge
	case r.lines == 0 || r.bad > r.lines/2:
		return out, ErrNoText
	case len(r.tail) > 0 || r.skipping:
		return out, ErrCut
	}
	l := r.ladders[r.ladderOf(out.Kind)]
	if l == nil {
		return out, ErrNoKind
	}
	out.Boot = r.head.Boot
	if f := r.families[bootFamily]; len(f.series) == 1 && !f.broken {
		out.Boot = strconv.FormatFloat(f.series[0].value, 'f', -1, 64)
	}
	out.Waiting = r.value(l.waiting, sum, requestsMax)
	out.Running = r.value(l.running, sum, requestsMax)
	out.KVUsage = r.value(l.kvUsage, most, 1)
	out.Done = r.value(l.done, sum, math.MaxFloat64)
	out.CacheTokens = r.cache(l)
	out.Adapters, out.AdapterSlots = r.adapters(l)
	if !out.Waiting.Known && !out.Running.Known && !out.KVUsage.Known {
		return Reading{Kind: out.Kind}, ErrNothing
	}
	for _, part := range []struct {
		name  string
		rungs []selector
		value plugin.Value
	}{{"waiting", l.waiting, out.Waiting}, {"running", l.running, out.Running}, {"kv_usage", l.kvUsage, out.KVUsage}, {"done", l.done, out.Done}} {
		if len(part.rungs) > 0 && !part.value.Known {
			out.Missing = append(out.Missing, part.name)
		}
	}
	return out, nil
}

// ladderOf is the kind whose names are looked for.
func (r *Reader) ladderOf(k Kind) Kind {
	switch {
	case k == Sim:
		return VLLM
	case k == Unknown && r.own != Names{}:
		return Custom
	}
	return k
}

func (r *Reader) kindOfPage() Kind {
	if r.kind != Unknown {
		return r.kind
	}
	// A Triton that runs vLLM exports both; the one that knows of tokens wins.
	for k := VLLM; k <= TGI; k++ {
		if r.seen&(1<<k) != 0 {
			return k
		}
	}
	return KindOfServer(r.head.Server)
}

// PropsTokens reads how many tokens fit into the KV memory of llama.cpp from its
// properties: it exports no metric of it.
func PropsTokens(body []byte) plugin.Value {
	var props struct {
		Slots   float64 `json:"total_slots"`
		Default struct {
			Context float64 `json:"n_ctx"`
		} `json:"default_generation_settings"`
	}
	v := 0.0
	if json.Unmarshal(body, &props) == nil {
		v = props.Slots * props.Default.Context
	}
	return plugin.Value{V: v, Known: v > 0 && v <= tokensMax}
}

// requestsMax is more than any engine can have at a time.
const requestsMax = 1e9

// value is that of the first rung that the page has.
func (r *Reader) value(rungs []selector, reduce func([]float64) float64, largest float64) plugin.Value {
	for _, s := range rungs {
		values, ok := r.families[s.name].values(s)
		if !ok {
			return plugin.Value{}
		}
		if len(values) == 0 {
			continue
		}
		v := reduce(values)
		if !(v >= 0 && v <= largest) || math.IsInf(v, 1) {
			return plugin.Value{}
		}
		return plugin.Value{V: v, Known: true}
	}
	return plugin.Value{}
}

func sum(values []float64) float64 {
	total := 0.0
	for _, v := range values {
		total += v
	}
	return total
}

func most(values []float64) float64 { return slices.Max(values) }

// tokensMax is more than any KV memory holds.
const tokensMax = 1e12

// cache is how many tokens the KV memory holds.
func (r *Reader) cache(l *ladder) plugin.Value {
	for _, c := range l.caches {
		var v plugin.Value
		switch {
		case c.info != "":
			f := r.families[c.info]
			if len(f.series) == 0 && !f.broken {
				continue
			}
			v = f.capacity(c)
		case c.tokens.name != "":
			if v = r.value([]selector{c.tokens}, sum, tokensMax); !v.Known {
				continue
			}
		default:
			size, blocks := r.value([]selector{c.blockTokens}, most, tokensMax), r.value([]selector{c.blocks}, sum, tokensMax)
			if !size.Known || !blocks.Known {
				continue
			}
			v = plugin.Value{V: size.V * blocks.V, Known: true}
		}
		if !(v.V <= tokensMax) {
			return plugin.Value{}
		}
		return v
	}
	return plugin.Value{}
}

// adapters reads the series that was written last. Each change of the running
// or waiting adapters makes a new series, whose value is the time; old ones stay, and
// may become more than are kept of other families.
func (r *Reader) adapters(l *ladder) (running []string, slots int) {
	if l.lora == "" {
		return nil, 0
	}
	f := r.families[l.lora]
	if len(f.series) == 0 {
		return nil, 0
	}
	newest := &f.series[0]
	for name := range strings.SplitSeq(newest.label("running_lora_adapters"), ",") {
		if name = strings.TrimSpace(name); name != "" && len(running) < adaptersMax {
			running = append(running, name)
		}
	}
	if n, err := strconv.Atoi(strings.TrimSpace(newest.label("max_lora"))); err == nil && n > 0 {
		slots = n
	}
	return running, slots
}

// adaptersMax bounds the adapters of one reading.
const adaptersMax = 256

// Names are the metrics of an engine that is not known, each a name, or a name
// with labels that must be there: name{label="value"}. An empty one is not
// looked for.
type Names struct {
	Waiting     string // requests that wait; series are added up
	Running     string // requests that run; series are added up
	KVUsage     string // 0 to 1; the largest series counts
	Done        string // a counter of work that moves with every answer
	BlockTokens string // tokens of a block of KV memory
	Blocks      string // blocks of it
}

// Check says what is wrong with the names.
func (n Names) Check() error {
	_, err := n.ladder()
	return err
}

func (n Names) ladder() (*ladder, error) {
	l := &ladder{}
	for _, part := range []struct {
		what, text string
		into       *[]selector
	}{{"waiting", n.Waiting, &l.waiting}, {"running", n.Running, &l.running}, {"kv_usage", n.KVUsage, &l.kvUsage}, {"done", n.Done, &l.done}} {
		if part.text == "" {
			continue
		}
		s, err := ParseSelector(part.text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", part.what, err)
		}
		*part.into = []selector{s}
	}
	switch {
	case n.BlockTokens == "" && n.Blocks == "":
		return l, nil
	case n.BlockTokens == "" || n.Blocks == "":
		return nil, errors.New("block_tokens and blocks go together: one alone says nothing")
	}
	size, err := ParseSelector(n.BlockTokens)
	if err != nil {
		return nil, fmt.Errorf("block_tokens: %w", err)
	}
	blocks, err := ParseSelector(n.Blocks)
	if err != nil {
		return nil, fmt.Errorf("blocks: %w", err)
	}
	l.caches = []cache{{blockTokens: size, blocks: blocks}}
	return l, nil
}
