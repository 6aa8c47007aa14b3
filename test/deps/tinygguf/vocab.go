// SPDX-License-Identifier: Apache-2.0

package main

import (
	_ "embed"
	"fmt"
	"strings"
)

// The corpus is English in sentences that end with a full stop.
//
//go:embed corpus.txt
var corpus string

// The ids that every llama vocabulary starts with.
const (
	unknownID = iota
	beginID
	endID
)

// Types of a token, in GGUF's numbering.
const (
	tokenNormal  = 1
	tokenUnknown = 2
	tokenControl = 3
	tokenByte    = 6
)

// space is how a SentencePiece vocabulary writes the blank before a word.
const space = "\u2581"

// A vocab is a SentencePiece vocabulary: control tokens, all bytes, the
// printable ASCII characters and the words of the corpus.
type vocab struct {
	tokens []string
	types  []int32
	ids    map[string]int
}

func newVocab(words []string) *vocab {
	v := &vocab{ids: map[string]int{}}
	v.add("<unk>", tokenUnknown)
	v.add("<s>", tokenControl)
	v.add("</s>", tokenControl)
	for b := range 256 {
		v.add(fmt.Sprintf("<0x%02X>", b), tokenByte)
	}
	v.add(space, tokenNormal)
	for c := '!'; c <= '~'; c++ {
		v.add(string(c), tokenNormal)
	}
	for _, word := range words {
		// A tokenizer merges two tokens at a time. It reaches a word only if
		// every beginning of the word is a token too.
		for i := range word {
			v.add(space+word[:i+1], tokenNormal)
		}
	}
	return v
}

func (v *vocab) add(token string, kind int32) {
	if _, ok := v.ids[token]; ok {
		return
	}
	v.ids[token] = len(v.tokens)
	v.tokens = append(v.tokens, token)
	v.types = append(v.types, kind)
}

// scores gives longer tokens precedence when a text is tokenized.
func (v *vocab) scores() []float32 {
	scores := make([]float32, len(v.tokens))
	for i, token := range v.tokens {
		if v.types[i] == tokenNormal {
			scores[i] = float32(len(token))
		}
	}
	return scores
}

// split cuts a text into sentences, and these into words and punctuation marks.
func split(text string) (sentences [][]string) {
	var sentence []string
	for field := range strings.FieldsSeq(text) {
		word := strings.TrimRight(field, ".,")
		sentence = append(sentence, word)
		for _, mark := range field[len(word):] {
			sentence = append(sentence, string(mark))
		}
		if strings.HasSuffix(field, ".") {
			sentences = append(sentences, sentence)
			sentence = nil
		}
	}
	return sentences
}

func isMark(word string) bool { return word == "." || word == "," }
