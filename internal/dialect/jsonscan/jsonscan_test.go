// SPDX-License-Identifier: Apache-2.0

package jsonscan

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

// skip walks over text as one value.
func skip(text string, strict bool) *Cursor {
	var c Cursor
	c.Reset([]byte(text), strict)
	c.Skip()
	c.End()
	return &c
}

func nested(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }

var texts = []string{
	``, ` `, `{}`, `[]`, `{"a":1}`, `{"a":1,}`, `{"a":1 "b":2}`, `{,}`, `[1,]`, `[,1]`, `[1 2]`, `{"a"}`, `{"a":}`, `{a:1}`,
	`{"a":1}}`, `[1]]`, `[}`, `{]`, `[1}`, `{"a":1]`, `{"a":{"b":[{}]}}`, `[[],{}]`, "\ufeff{}", `{"a":1} x`, "{}\x00", "\x00",
	`0`, `-0`, `-`, `01`, `1.`, `.1`, `1.5`, `1e5`, `1E+5`, `1e-5`, `1e`, `1e+`, `-1.5e10`, `1e400`, `+1`, `0x1`, `9007199254740993`,
	`true`, `false`, `null`, `tru`, `nul`, `truex`, `True`, `NaN`, `Infinity`, `-Infinity`, `-N`, `I`,
	`"`, `""`, `"a`, `"\`, `"\"`, `"\""`, `"\x"`, `"\u12"`, `"\u12G4"`, `"\u0041"`, `"\ud83d\ude00"`, `"\ud800"`, `"\ud800\u0041"`, `"\udc00"`,
	"\"\n\"", "\"\x1f\"", "\"\x7f\"", `"12345678901234567890"`, `"1234567\n12345678"`, "\"1234567\x01\"", `"é漢字😀"`,
	nested(DepthMax), nested(DepthMax + 1), strings.Repeat(`{"a":`, DepthMax) + "1" + strings.Repeat("}", DepthMax),
	strings.Repeat("[", 100000), "\t\r\n {\t\r\n \"a\" \t: \r1\n,\"b\" :2 } ",
}

func TestValidityIsThatOfEncodingJSON(t *testing.T) {
	for _, text := range texts {
		c := skip(text, true)
		if got, want := c.Err() == "", json.Valid([]byte(text)); got != want {
			t.Errorf("%.40q: valid %v, want %v (%s at %d)", text, got, want, c.Err(), c.Pos())
		}
		if c.Pos() > len(text) {
			t.Errorf("%.40q: position %d beyond the text", text, c.Pos())
		}
	}
}

func TestStrictRefusesWhatIsNotUTF8(t *testing.T) {
	for _, s := range []string{"\xff", "a\x80b", "\xc3", "\xe6\xbc", "\xed\xa0\x80", "\xf5\x80\x80\x80", "\xc0\x80", "\xe0\x80\x80", "\xf0\x9f\x98", "漢\xe6字"} {
		text := `{"` + s + `":"` + s + `"}`
		if c := skip(text, true); c.Err() == "" {
			t.Errorf("%q passed as UTF-8", s)
		}
		if c := skip(text, false); c.Err() != "" {
			t.Errorf("%q: %s", s, c.Err())
		}
	}
}

func TestLenientTakesWhatPythonWrites(t *testing.T) {
	for _, text := range []string{`NaN`, `Infinity`, `-Infinity`, `[NaN,{"a":-Infinity}]`} {
		if c := skip(text, false); c.Err() != "" {
			t.Errorf("%s: %s", text, c.Err())
		}
	}
	for _, text := range []string{`Na`, `-Inf`, `NaNN`, `nan`} {
		if c := skip(text, false); c.Err() == "" {
			t.Errorf("%s passed", text)
		}
	}
}

func TestKeysAreDecoded(t *testing.T) {
	var c Cursor
	c.Reset([]byte(`{"mod\u0065l":1,"":2,"a\/b":3,"\ud83d\ude00":4}`), true)
	var got []string
	for more := c.Enter(); more; more = c.Next() {
		got = append(got, string(c.Key()))
		c.Skip()
	}
	if fmt.Sprint(got) != "[model  a/b 😀]" {
		t.Errorf("keys %q", got)
	}
}

func TestStringsAreCountedByScript(t *testing.T) {
	for _, tt := range []struct {
		raw        string
		bytes, cjk int
	}{
		{``, 0, 0},
		{`plain text`, 10, 0},
		{`a\nb`, 3, 0},
		{`\u0041\u00e9`, 3, 0},
		{`é`, 2, 0},
		{`漢字かなカナ한글`, 0, 8},
		{`\u6f22\u5b57 x`, 2, 2},
		{`😀`, 4, 0},
		{`\ud83d\ude00`, 4, 0},
		{`\ud800`, 3, 0},
		{`Привет`, 12, 0},
		{`漢a字b`, 2, 2},
		{`𠀀`, 0, 1},
	} {
		var c Cursor
		c.Reset([]byte(`"`+tt.raw+`"`), true)
		if s := c.String(); c.Err() != "" || s.Bytes != tt.bytes || s.CJK != tt.cjk {
			t.Errorf("%s: %d bytes, %d CJK, %q; want %d, %d", tt.raw, s.Bytes, s.CJK, c.Err(), tt.bytes, tt.cjk)
		}
	}
}

func TestIntegers(t *testing.T) {
	for text, want := range map[string]int{"0": 0, "12": 12, "-7": -7, "999999999999999999": 999999999999999999} {
		if n, ok := ParseInt([]byte(text)); !ok || n != want {
			t.Errorf("%s: %d, %v", text, n, ok)
		}
	}
	for _, text := range []string{"", "-", "1.0", "1e3", "9223372036854775808", "x"} {
		if n, ok := ParseInt([]byte(text)); ok {
			t.Errorf("%s read as %d", text, n)
		}
	}
}

func TestMethodsAreSafeOnAnyTextAndInAnyOrder(t *testing.T) {
	for _, text := range append(texts, "[", "{", `{"a"`, `{"a":`, `"`, `-`, `t`, `n`) {
		for order := range 7 * 7 * 7 {
			var c Cursor
			c.Reset([]byte(text), order%2 == 0)
			for range 3 {
				switch order % 7 {
				case 0:
					c.Enter()
				case 1:
					c.Next()
				case 2:
					c.Key()
				case 3:
					c.String()
				case 4:
					c.Number()
				case 5:
					c.Bool()
				case 6:
					c.Null()
				}
				order /= 7
			}
			c.Skip()
			c.End()
			if c.Pos() > len(text) {
				t.Fatalf("%.40q: position %d", text, c.Pos())
			}
		}
	}
}

func FuzzSkip(f *testing.F) {
	for _, text := range texts {
		if len(text) < 1000 {
			f.Add([]byte(text))
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c := skip(string(text), true)
		want := json.Valid(text)
		if want && !utf8.Valid(text) {
			want = false // bytes outside ASCII can only stand in strings
		}
		if got := c.Err() == ""; got != want {
			t.Fatalf("valid %v, want %v (%s at %d)", got, want, c.Err(), c.Pos())
		}
		if want && skip(string(text), false).Err() != "" {
			t.Fatal("lenient is stricter than strict")
		}
		var s string
		if json.Unmarshal(text, &s) == nil && want {
			var c Cursor
			c.Reset(text, true)
			if c.Kind() == String {
				if at := c.String(); string(AppendUnquoted(nil, text[at.Start:at.End])) != s {
					t.Fatalf("decoded differently from %q", s)
				}
			}
		}
	})
}

func BenchmarkSkip(b *testing.B) {
	for name, text := range map[string]string{
		"ascii":   `"` + strings.Repeat("The quick brown fox jumps over the lazy dog. ", 5000) + `"`,
		"escapes": `"` + strings.Repeat(`line of code;\n\t`, 13000) + `"`,
		"cjk":     `"` + strings.Repeat("漢字かなカナ", 12000) + `"`,
		"numbers": `[` + strings.Repeat("12345,", 36000) + `1]`,
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			data := []byte(text)
			var c Cursor
			for b.Loop() {
				c.Reset(data, true)
				c.Skip()
			}
		})
	}
}
