// SPDX-License-Identifier: Apache-2.0

package dialect

import (
	"bytes"
	"testing"
)

func TestApplyReplacesSpansAndCopiesNothing(t *testing.T) {
	body := []byte(`{"model":"a","n":1}`)
	for _, tt := range []struct {
		name  string
		edits []Edit
		want  string
	}{
		{"none", nil, string(body)},
		{"replace", []Edit{{Span{9, 12}, []byte(`"longer"`)}}, `{"model":"longer","n":1}`},
		{"insert", []Edit{{Span{1, 1}, []byte(`"x":2,`)}}, `{"x":2,"model":"a","n":1}`},
		{"remove", []Edit{{Span{12, 18}, nil}}, `{"model":"a"}`},
		{"two", []Edit{{Span{1, 1}, []byte(`"x":2,`)}, {Span{9, 12}, []byte(`"b"`)}}, `{"x":2,"model":"b","n":1}`},
		{"ends", []Edit{{Span{0, 0}, []byte("<")}, {Span{19, 19}, []byte(">")}}, `<{"model":"a","n":1}>`},
		{"all", []Edit{{Span{0, 19}, []byte("x")}}, `x`},
		{"overlap is left out", []Edit{{Span{0, 12}, []byte("x")}, {Span{9, 12}, []byte("y")}}, `x,"n":1}`},
		{"outside is left out", []Edit{{Span{18, 40}, nil}, {Span{-3, 2}, nil}, {Span{5, 4}, nil}}, string(body)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			segments, length := Apply(body, tt.edits)
			got := bytes.Join(segments, nil)
			if string(got) != tt.want || length != int64(len(got)) {
				t.Errorf("%s (%d)", got, length)
			}
			for _, s := range segments {
				if len(s) == 0 {
					t.Error("empty segment")
				}
			}
		})
	}
	if segments, length := Apply(nil, nil); len(segments) != 0 || length != 0 {
		t.Errorf("%q, %d", segments, length)
	}
}

func TestTextEstimatesTokensByScript(t *testing.T) {
	for _, tt := range []struct {
		text Text
		want int
	}{{Text{}, 0}, {Text{Bytes: 1}, 1}, {Text{Bytes: 400}, 100}, {Text{CJK: 300}, 200}, {Text{Bytes: 40, CJK: 3}, 12}} {
		if got := tt.text.Tokens(); got != tt.want {
			t.Errorf("%+v: %d, want %d", tt.text, got, tt.want)
		}
	}
}

func TestOutputMaxDoesNotOverflow(t *testing.T) {
	for _, c := range []struct{ tokens, choices, least int }{
		{0, 3, 0}, {100, 1, 100}, {100, 3, 300}, {100, 0, 100},
		{1<<57 + 1, 128, 1 << 40}, {1 << 62, 1 << 62, 1 << 40},
	} {
		r := Request{MaxTokens: c.tokens, Choices: c.choices}
		if got := r.OutputMax(); got < c.least || c.tokens < 1<<40 && got != c.least {
			t.Errorf("%d tokens of %d answers: %d", c.tokens, c.choices, got)
		}
	}
}
