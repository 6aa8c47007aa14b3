// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// config is what the flags set.
type config struct {
	dim, layers, ff, heads int
	context                int
	sentences              int
	name                   string
}

var defaultConfig = config{
	dim: 256, layers: 2, ff: 512, heads: 4,
	context:   8192,
	sentences: 12,
	name:      "tiny",
}

func (c config) validate() error {
	switch {
	case min(c.dim, c.layers, c.ff, c.heads, c.context) < 1:
		return fmt.Errorf("-dim, -layers, -ff, -heads and -context must be positive")
	case c.dim%(2*c.heads) != 0:
		return fmt.Errorf("-dim %d cannot be divided into %d heads of an even width", c.dim, c.heads)
	case c.dim < 128:
		// The codes of two tokens would be too similar to tell them apart.
		return fmt.Errorf("-dim %d is too small for readable text; the least is 128", c.dim)
	case c.sentences < 2 && c.sentences != 0:
		return fmt.Errorf("-sentences %d is neither 0 nor at least 2", c.sentences)
	}
	return nil
}

// A model is a bigram model of the corpus: next[a][b] is how likely b follows a.
// What the corpus does not have, such as the end of a prompt, is followed by the
// start of a sentence; its row of next is empty, and start stands for it.
type model struct {
	config
	vocab *vocab
	next  []distribution
	start distribution
}

// A distribution is the probability of each token, after normalize.
type distribution map[int]float64

func (d distribution) normalize() {
	total := 0.0
	for _, n := range d {
		total += n
	}
	for id := range d {
		d[id] /= total
	}
}

func newModel(cfg config) (*model, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	sentences := split(corpus)
	var words []string
	for _, s := range sentences {
		for _, word := range s {
			if !isMark(word) {
				words = append(words, word)
			}
		}
	}
	m := &model{config: cfg, vocab: newVocab(words)}
	m.count(sentences)
	return m, nil
}

// count fills next and start.
func (m *model) count(sentences [][]string) {
	m.start = distribution{}
	m.next = make([]distribution, len(m.vocab.tokens))
	for i := range m.next {
		m.next[i] = distribution{}
	}
	stop := m.vocab.ids["."]
	for _, s := range sentences {
		last := stop // of the sentence before
		m.start[m.id(s[0])]++
		for _, word := range s {
			id := m.id(word)
			m.next[last][id]++
			last = id
		}
	}
	if m.sentences > 0 {
		// One full stop in so many ends the answer. The counts stay whole numbers,
		// so their sum does not depend on the order of a map.
		for id := range m.next[stop] {
			m.next[stop][id] *= float64(m.sentences - 1)
		}
		m.next[stop][endID] = float64(len(sentences))
	}
	m.start.normalize()
	for _, d := range m.next {
		d.normalize()
	}
}

func (m *model) id(word string) int {
	if isMark(word) {
		return m.vocab.ids[word]
	}
	return m.vocab.ids[space+word]
}

// codes gives each token its code, a row of +1 and -1. Tokens that start is for
// share one: were each to add a code of its own to the first words of sentences,
// these would drown in noise.
func (m *model) codes() (codes [][]float32, start []float32) {
	rng := rand.New(rand.NewPCG(1, 0))
	random := func() []float32 {
		code := make([]float32, m.dim)
		for i := range code {
			code[i] = float32(rng.IntN(2)*2 - 1)
		}
		return code
	}
	start = random()
	for _, next := range m.next {
		if len(next) == 0 {
			codes = append(codes, start)
		} else {
			codes = append(codes, random())
		}
	}
	return codes, start
}

// outputs gives each token its output row.
func (m *model) outputs(codes [][]float32, start []float32) [][]float32 {
	rows := make([][]float32, len(codes))
	for i := range rows {
		rows[i] = make([]float32, m.dim)
	}
	add := func(code []float32, next distribution) {
		for id, p := range next {
			w := m.weight(p)
			for i, c := range code {
				rows[id][i] += w * c
			}
		}
	}
	add(start, m.start)
	for id, next := range m.next {
		add(codes[id], next)
	}
	return rows
}

// weight makes the logit of a token that follows with probability p, which is
// dim times its weight, log p plus a constant. The constant lifts it above the
// noise that the overlap of codes gives all other tokens.
//
// The weight is rounded to a multiple of 2^-16, so that float32 adds weights
// without error and sums do not depend on their order or on the platform.
func (m *model) weight(p float64) float32 {
	const lift, unit = 14, 1 << 16
	return float32(math.Round((lift+math.Log(p))/float64(m.dim)*unit) / unit)
}

func (m *model) tensors() []tensor {
	codes, start := m.codes()
	outputs := m.outputs(codes, start)
	tokens := len(m.vocab.tokens)
	copyRows := func(from [][]float32) func(int, []float32) {
		return func(r int, row []float32) { copy(row, from[r]) }
	}
	list := []tensor{{"token_embd.weight", formatF16, m.dim, tokens, copyRows(codes)}}
	for l := range m.layers {
		add := func(name string, f format, cols, rows int, fill func(int, []float32)) {
			list = append(list, tensor{fmt.Sprintf("blk.%d.%s.weight", l, name), f, cols, rows, fill})
		}
		add("attn_norm", formatF32, m.dim, 0, constant(1))
		add("attn_q", formatF16, m.dim, m.dim, noise(l, 0))
		add("attn_k", formatF16, m.dim, m.dim, noise(l, 1))
		add("attn_v", formatF16, m.dim, m.dim, noise(l, 2))
		add("attn_output", formatF16, m.dim, m.dim, constant(0))
		add("ffn_norm", formatF32, m.dim, 0, constant(1))
		add("ffn_gate", formatF16, m.dim, m.ff, noise(l, 3))
		add("ffn_up", formatF16, m.dim, m.ff, noise(l, 4))
		add("ffn_down", formatF16, m.ff, m.dim, constant(0))
	}
	return append(list,
		tensor{"output_norm.weight", formatF32, m.dim, 0, constant(1)},
		tensor{"output.weight", formatF16, m.dim, tokens, copyRows(outputs)})
}

func constant(v float32) func(int, []float32) {
	return func(_ int, row []float32) {
		for i := range row {
			row[i] = v
		}
	}
}

// noise gives a matrix of its own to each place in each layer.
func noise(layer, place int) func(int, []float32) {
	rng := rand.New(rand.NewPCG(2, uint64(layer)<<8|uint64(place)))
	return func(_ int, row []float32) {
		for i := range row {
			row[i] = (rng.Float32() - 0.5) / 16
		}
	}
}

// template writes a conversation as lines of "role: text".
const template = `{{ bos_token }}` +
	`{% for m in messages %}{{ m['role'] + ': ' + (m['content'] or '') + '\n' }}{% endfor %}` +
	`{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}`

func (m *model) metadata() []entry {
	u32 := func(n int) uint32 { return uint32(n) }
	return slices.Concat([]entry{
		{"general.architecture", "llama"},
		{"general.name", m.name},
		{"general.file_type", u32(int(formatF16))},
		{"general.alignment", u32(ggufAlignment)},
		{"llama.context_length", u32(m.context)},
		{"llama.embedding_length", u32(m.dim)},
		{"llama.block_count", u32(m.layers)},
		{"llama.feed_forward_length", u32(m.ff)},
		{"llama.attention.head_count", u32(m.heads)},
		{"llama.attention.head_count_kv", u32(m.heads)},
		{"llama.attention.layer_norm_rms_epsilon", float32(1e-5)},
		{"llama.rope.dimension_count", u32(m.dim / m.heads)},
		{"llama.vocab_size", u32(len(m.vocab.tokens))},
	}, []entry{
		{"tokenizer.ggml.model", "llama"},
		{"tokenizer.ggml.pre", "default"},
		{"tokenizer.ggml.tokens", m.vocab.tokens},
		{"tokenizer.ggml.scores", m.vocab.scores()},
		{"tokenizer.ggml.token_type", m.vocab.types},
		{"tokenizer.ggml.bos_token_id", u32(beginID)},
		{"tokenizer.ggml.eos_token_id", u32(endID)},
		{"tokenizer.ggml.unknown_token_id", u32(unknownID)},
		{"tokenizer.ggml.add_bos_token", true},
		{"tokenizer.ggml.add_eos_token", false},
		{"tokenizer.chat_template", template},
	})
}
