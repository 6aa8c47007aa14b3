// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"
)

// The file must not change by itself: tests and measurements depend on it. When
// a change is meant, take over the new digest.
func TestDigest(t *testing.T) {
	m := mustModel(t, defaultConfig)
	var file bytes.Buffer
	if err := writeGGUF(&file, m.metadata(), m.tensors()); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(file.Bytes())
	const want = "f4bc3193fe1c83d8e0969d914504a4c94749bb106a3ef8555bf3acf02cc93172"
	if got := hex.EncodeToString(sum[:]); got != want {
		t.Errorf("digest of the default model is %s, want %s", got, want)
	}
}

// What the weights make likely must be what the corpus has. The layers between
// embedding and output add nothing, so their product is all there is to compute.
func TestLikeliestTokenFollowsInCorpus(t *testing.T) {
	m := mustModel(t, defaultConfig)
	codes, start := m.codes()
	outputs := m.outputs(codes, start)
	for id, next := range m.next {
		if len(next) == 0 {
			next = m.start
		}
		if best := likeliest(codes[id], outputs); next[best] == 0 {
			t.Errorf("after %q comes %q, which the corpus does not have", m.vocab.tokens[id], m.vocab.tokens[best])
		}
	}
}

func likeliest(code []float32, outputs [][]float32) int {
	best, most := 0, float32(0)
	for id, row := range outputs {
		sum := float32(0)
		for i, c := range code {
			sum += c * row[i]
		}
		if sum > most {
			best, most = id, sum
		}
	}
	return best
}

func TestStopToken(t *testing.T) {
	for _, tt := range []struct {
		sentences int
		want      float64
	}{
		{0, 0},
		{2, 0.5},
		{12, 1.0 / 12},
	} {
		cfg := defaultConfig
		cfg.sentences = tt.sentences
		m := mustModel(t, cfg)
		if got := m.next[m.vocab.ids["."]][endID]; got < tt.want-1e-9 || got > tt.want+1e-9 {
			t.Errorf("-sentences %d: a full stop ends the answer with probability %v, want %v", tt.sentences, got, tt.want)
		}
	}
}

func TestConfigErrors(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*config)
		want   string
	}{
		{"no layer", func(c *config) { c.layers = 0 }, "must be positive"},
		{"odd heads", func(c *config) { c.heads = 3 }, "3 heads"},
		{"small", func(c *config) { c.dim = 64 }, "too small"},
		{"one sentence", func(c *config) { c.sentences = 1 }, "-sentences 1"},
	} {
		cfg := defaultConfig
		tt.change(&cfg)
		if _, err := newModel(cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error is %v, want one with %q", tt.name, err, tt.want)
		}
	}
}

func mustModel(t *testing.T, cfg config) *model {
	t.Helper()
	m, err := newModel(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}
