// SPDX-License-Identifier: Apache-2.0

// Command tinygguf writes a small language model for tests, as a GGUF file that
// llama.cpp loads like any other model of the llama architecture.
//
// The model is a bigram model of corpus.txt in the clothes of a transformer.
// Each row of the token embedding is a random code of +1 and -1; codes of
// different tokens are nearly orthogonal. The output row of a token is the sum
// of the codes of the tokens that it follows in the corpus, so multiplying the
// two gives the likely next tokens. Attention and feed-forward layers end in
// matrices of zeros and add nothing, but an engine cannot know that: it does all
// the work that a real model of these dimensions costs, keeps a real KV cache,
// and answers with readable text in a few milliseconds.
//
// An answer ends with a real stop token, after -sentences sentences on average.
// For an answer of a certain length, as a test needs that kills an engine in
// mid-stream, forbid the stop token in the request and set max_tokens:
//
//	{"max_tokens": 400, "logit_bias": {"2": -100}, ...}
//
// llama-server's own "ignore_eos": true does the same, but is unknown to other
// servers. With -sentences 0 the model has no end of its own at all.
//
// The output is the same, byte for byte, on every platform. The flags trade
// speed for size; docs/testbed.md says what the usual ones give.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
)

func main() {
	cfg := defaultConfig
	flag.IntVar(&cfg.dim, "dim", cfg.dim, "embedding `width`")
	flag.IntVar(&cfg.layers, "layers", cfg.layers, "`number` of transformer blocks")
	flag.IntVar(&cfg.ff, "ff", cfg.ff, "feed-forward `width`")
	flag.IntVar(&cfg.heads, "heads", cfg.heads, "`number` of attention heads; must divide -dim into an even width")
	flag.IntVar(&cfg.context, "context", cfg.context, "context length in `tokens`")
	flag.IntVar(&cfg.sentences, "sentences", cfg.sentences, "average `number` of sentences in an answer; 0 leaves out the stop token")
	flag.StringVar(&cfg.name, "name", cfg.name, "model `name` in the metadata")
	out := flag.String("o", "tiny.gguf", "output `file`")
	flag.Parse()

	if err := run(cfg, *out); err != nil {
		fmt.Fprintln(os.Stderr, "tinygguf:", err)
		os.Exit(1)
	}
}

func run(cfg config, out string) error {
	m, err := newModel(cfg)
	if err != nil {
		return err
	}
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	if err := errors.Join(writeGGUF(f, m.metadata(), m.tensors()), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", out, err)
	}
	return nil
}
