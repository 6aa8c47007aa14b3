// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"testing"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/dialecttest"
)

var values = map[string]dialect.Dialect{
	"embeddings": Embeddings, "rerank": Rerank, "score": Score, "tokenize": Tokenize, "detokenize": Detokenize, "speech": Speech,
}

func TestValuesAreNeverStreamed(t *testing.T) {
	for name, d := range values {
		r, err := d.Inspect("", []byte(`{"model":"m","stream":true,"input":"a"}`))
		if err != nil || r.Stream || d.EndMarker() != nil || d.NewStream(r, dialect.StreamOptions{}) != nil {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
}

// Engines with one model tokenize for clients that name none.
func TestOnlyTokenizingNeedsNoModel(t *testing.T) {
	for name, d := range values {
		_, err := d.Inspect("", []byte(`{"input":"a","prompt":"a","tokens":[1]}`))
		if free := name == "tokenize" || name == "detokenize"; (err == nil) != free {
			t.Errorf("%s: %v", name, err)
		} else if !free && inference.AsError(err).Code != inference.MissingModel {
			t.Errorf("%s: %v", name, err)
		}
	}
	r, err := Tokenize.Inspect("", []byte(`{"prompt":"a"}`))
	if err != nil || len(Tokenize.RequestEdits(r, []byte(`{"prompt":"a"}`), "other", false)) != 0 {
		t.Errorf("a name is written where there was none: %+v, %v", r, err)
	}
}

// PAY-9: every shape of an input, and how many prompts it is.
func TestInputsOfEmbeddings(t *testing.T) {
	for input, want := range map[string]struct {
		prompts int
		tokens  inference.Tokens
	}{
		`"four"`:              {1, inference.Tokens{N: 1}},
		`["four","four"]`:     {2, inference.Tokens{N: 2}},
		`[1,2,3]`:             {1, inference.Tokens{N: 3, Source: inference.Counted}},
		`[[1,2],[3]]`:         {2, inference.Tokens{N: 3, Source: inference.Counted}},
		`[]`:                  {1, inference.Tokens{}},
		`null`:                {1, inference.Tokens{}},
		`[{"text":"four"},7]`: {2, inference.Tokens{N: 2}},
	} {
		r, err := Embeddings.Inspect("", []byte(`{"model":"m","input":`+input+`}`))
		if err != nil || r.Prompts != want.prompts || r.PromptTokens.N != want.tokens.N {
			t.Errorf("%s: %+v, %v", input, r, err)
		}
	}
}

func TestAnswersOfValues(t *testing.T) {
	r := &dialect.Request{}
	for _, body := range []string{`{"model":"e","usage":{"prompt_tokens":3}}`, `[{"index":0,"score":0.5}]`, `{}`, `[[0.1,NaN]]`} {
		if a, err := Embeddings.Answer(r, []byte(body), ""); err != nil || a.Choices != 1 || a.Failure != nil || a.Opaque {
			t.Errorf("%s: %+v, %v", body, a, err)
		}
	}
	for _, body := range []string{``, `<html>`, `"x"`, `null`, `3`, `{"data":[`, `{}{}`} {
		if a, err := Rerank.Answer(r, []byte(body), ""); err == nil {
			t.Errorf("%s: %+v", body, a)
		}
	}
	for _, body := range []string{`{"error":{"message":"m","code":400}}`, `{"object":"error","message":"m","code":400}`} {
		for _, r := range []*dialect.Request{{}, {Opaque: true}} {
			if a, err := Speech.Answer(r, []byte(body), ""); err != nil || a.Failure == nil || a.Failure.Status != 400 {
				t.Errorf("%s: %+v, %v", body, a, err)
			}
		}
	}
}

// Sound is handed on as it is, and nothing in it says that it is whole.
func TestOpaqueAnswersAreNotTouched(t *testing.T) {
	r := &dialect.Request{Opaque: true}
	for _, body := range []string{"", "RIFF\x00\xff", `{"model":"engine/name"}`, `{"model":"engine/name"`, "1\n00:00:00,000 --> 1\nhi\n"} {
		a, err := Transcriptions.Answer(r, []byte(body), "public")
		if err != nil || !a.Opaque || a.Choices != 1 || len(a.Edits) != 0 || len(Speech.AnswerHead(r, []byte(body), "public")) != 0 {
			t.Errorf("%q: %+v, %v", body, a, err)
		}
	}
}

func FuzzValues(f *testing.F) {
	seeds := append(recorded(f, "testdata/*/request.json"), recorded(f, "testdata/*/answer.json")...)
	dialecttest.FuzzJSON(f, Embeddings, seeds...)
}
