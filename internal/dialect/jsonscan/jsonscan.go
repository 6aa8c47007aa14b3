// SPDX-License-Identifier: Apache-2.0

// Package jsonscan walks once over JSON text without building anything from it.
//
// It owns the grammar of RFC 8259 and nothing else: a Cursor hands out keys,
// strings and numbers as spans of the text and checks every byte that it
// passes, skipped values too. Nesting is bounded, and no value is ever decoded
// that the caller did not ask for, so that bodies of megabytes cost about what
// reading them costs.
package jsonscan

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf8"
)

// DepthMax bounds how deep values may nest. encoding/json has the same bound.
const DepthMax = 10000

// A Kind says which kind of value comes next.
type Kind uint8

// Kinds.
const (
	None Kind = iota // no value: the text is broken here
	Object
	Array
	String
	Number
	Bool
	Null
)

// A Str is a string found in the text.
type Str struct {
	Start, End int  // inside the quotes
	Escaped    bool // holds escapes
	Bytes      int  // UTF-8 bytes outside CJK once escapes are decoded
	CJK        int  // CJK characters
}

// A Cursor walks over one text. Strict refuses strings that are not UTF-8, as
// RFC 8259 §8.1 does; otherwise they pass, and so do NaN and Infinity, which
// Python engines write: what an engine says is for its client to judge.
//
// The pattern for an object, and without Key for an array:
//
//	for more := c.Enter(); more; more = c.Next() {
//		switch string(c.Key()) { … } // each case takes exactly one value
//	}
//
// After the first fault every method returns zero values, so that loops end and
// Err needs to be looked at once.
type Cursor struct {
	text   []byte
	pos    int
	strict bool
	depth  int
	reason string
	keybuf []byte
	arrays [DepthMax/64 + 1]uint64 // bit d: the container at depth d is an array
}

// Reset starts the cursor over on another text.
func (c *Cursor) Reset(text []byte, strict bool) {
	c.text, c.pos, c.strict, c.depth, c.reason = text, 0, strict, 0, ""
}

// Pos is the offset of the next byte, or of the fault.
func (c *Cursor) Pos() int { return c.pos }

// Err says what is wrong at Pos, "" if nothing is.
func (c *Cursor) Err() string { return c.reason }

func (c *Cursor) fail(pos int, reason string) {
	if c.reason == "" {
		c.pos, c.reason = pos, reason
	}
}

func (c *Cursor) space() {
	for c.pos < len(c.text) {
		switch c.text[c.pos] {
		case ' ', '\n', '\r', '\t':
			c.pos++
		default:
			return
		}
	}
}

// peek passes white space and returns the byte after it, 0 at a fault or the
// end of the text.
func (c *Cursor) peek() byte {
	if c.reason != "" {
		return 0
	}
	if c.pos < len(c.text) && c.text[c.pos] > ' ' {
		return c.text[c.pos]
	}
	c.space()
	if c.pos == len(c.text) {
		return 0
	}
	return c.text[c.pos]
}

// unexpected fails at the next byte.
func (c *Cursor) unexpected(reason string) {
	if c.pos >= len(c.text) {
		reason = "unexpected end of text"
	}
	c.fail(c.pos, reason)
}

// Kind returns the kind of the next value and leaves the cursor on its first
// byte. None is a fault.
func (c *Cursor) Kind() Kind {
	switch b := c.peek(); b {
	case '{':
		return Object
	case '[':
		return Array
	case '"':
		return String
	case 't', 'f':
		return Bool
	case 'n':
		return Null
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		return Number
	case 'N', 'I':
		if !c.strict {
			return Number
		}
	}
	c.unexpected("expected a value")
	return None
}

// Enter goes into the object or array that comes next and reports whether it
// holds anything; an empty one is passed.
func (c *Cursor) Enter() bool {
	b := c.peek()
	if b != '{' && b != '[' {
		c.unexpected("expected an object or array")
		return false
	}
	if c.depth == DepthMax {
		c.unexpected("nested too deeply")
		return false
	}
	c.pos++
	if c.peek() == b+2 { // '}' and ']' follow their openers by two in ASCII
		c.pos++
		return false
	}
	c.depth++
	word, bit := &c.arrays[c.depth/64], uint64(1)<<(c.depth%64)
	if b == '[' {
		*word |= bit
	} else {
		*word &^= bit
	}
	return c.reason == ""
}

func (c *Cursor) inArray() bool { return c.arrays[c.depth/64]>>(c.depth%64)&1 == 1 }

// Next passes the comma to the next member or element and reports true, or
// leaves the container.
func (c *Cursor) Next() bool {
	b := c.peek()
	if b == ',' {
		c.pos++
		return true
	}
	if c.depth > 0 && (b == ']' && c.inArray() || b == '}' && !c.inArray()) {
		c.pos++
		c.depth--
		return false
	}
	c.unexpected("expected a comma or the end of the object or array")
	return false
}

// Key returns the next member's key, decoded, valid until the next call of Key.
// The value comes next.
func (c *Cursor) Key() []byte {
	if c.peek() != '"' {
		c.unexpected("expected a key")
		return nil
	}
	start := c.pos + 1
	end, escaped := c.passString()
	if c.peek() != ':' {
		c.unexpected("expected a colon")
		return nil
	}
	c.pos++
	if !escaped {
		return c.text[start:end]
	}
	c.keybuf = AppendUnquoted(c.keybuf[:0], c.text[start:end])
	return c.keybuf
}

// passString is String without the counts, quick where nothing needs a look.
func (c *Cursor) passString() (end int, escaped bool) {
	if end = plainEnd(c.text, c.pos+1); end < len(c.text) && c.text[end] == '"' {
		c.pos = end + 1
		return end, false
	}
	s := c.String()
	return s.End, s.Escaped
}

// Skip passes one value of any kind.
func (c *Cursor) Skip() {
	base := c.depth
	for {
		inside := false
		switch c.Kind() {
		case None:
			return
		case Object, Array:
			inside = c.Enter()
		case String:
			c.passString()
		case Number:
			c.Number()
		default:
			c.literal()
		}
		for !inside {
			if c.depth == base || c.reason != "" {
				return
			}
			inside = c.Next()
		}
		if !c.inArray() {
			c.Key()
		}
	}
}

// End checks that nothing but white space follows.
func (c *Cursor) End() {
	c.peek()
	if c.pos < len(c.text) {
		c.fail(c.pos, "unexpected text after the value")
	}
}

// Bool takes true or false.
func (c *Cursor) Bool() bool {
	b := c.peek()
	c.literal()
	return b == 't' && c.reason == ""
}

// Null takes null.
func (c *Cursor) Null() { c.literal() }

func (c *Cursor) literal() {
	switch c.peek() {
	case 't':
		c.word("true")
	case 'f':
		c.word("false")
	case 'n':
		c.word("null")
	default:
		c.unexpected("expected a value")
	}
}

func (c *Cursor) word(want string) {
	rest := c.text[c.pos:]
	if len(rest) < len(want) || string(rest[:len(want)]) != want {
		c.fail(c.pos, "expected "+want)
		return
	}
	c.pos += len(want)
}

// Number takes a number and returns its text.
func (c *Cursor) Number() []byte {
	if c.peek() == 0 {
		c.unexpected("expected a number")
		return nil
	}
	start := c.pos
	i := start
	if c.text[i] == '-' {
		i++
	}
	if !c.strict && i < len(c.text) && (c.text[i] == 'N' || c.text[i] == 'I') {
		c.pos = i
		if c.text[i] == 'N' {
			c.word("NaN")
		} else {
			c.word("Infinity")
		}
		return c.text[start:c.pos]
	}
	switch {
	case i < len(c.text) && c.text[i] == '0':
		i++
	default:
		if i = c.digits(i); i < 0 {
			return nil
		}
	}
	if i < len(c.text) && c.text[i] == '.' {
		if i = c.digits(i + 1); i < 0 {
			return nil
		}
	}
	if i < len(c.text) && c.text[i]|0x20 == 'e' {
		i++
		if i < len(c.text) && (c.text[i] == '+' || c.text[i] == '-') {
			i++
		}
		if i = c.digits(i); i < 0 {
			return nil
		}
	}
	c.pos = i
	return c.text[start:i]
}

// digits passes one digit or more; -1 is a fault.
func (c *Cursor) digits(i int) int {
	from := i
	for i < len(c.text) && c.text[i]-'0' <= 9 {
		i++
	}
	if i == from {
		c.pos = min(i, len(c.text))
		c.unexpected("expected a digit")
		return -1
	}
	return i
}

// Int takes a number and returns it if it is an integer that fits.
func (c *Cursor) Int() (n int, ok bool) { return ParseInt(c.Number()) }

// ParseInt reads a JSON number that is an integer written without fraction or
// exponent.
func ParseInt(b []byte) (n int, ok bool) {
	neg := len(b) > 0 && b[0] == '-'
	if neg {
		b = b[1:]
	}
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	for _, d := range b {
		if d -= '0'; d > 9 {
			return 0, false
		} else {
			n = n*10 + int(d)
		}
	}
	if neg {
		n = -n
	}
	return n, true
}

// The word-at-a-time search below looks at eight bytes at once for one that
// ends the plain part of a string: a quote, a backslash, a control character or
// a byte outside ASCII. A borrow can mark a byte wrongly only above a byte that
// is marked rightly, and the lowest mark is the one that is used.
const (
	lows  = 0x0101010101010101
	highs = 0x8080808080808080
)

func marks(w uint64) uint64 {
	quote := w ^ lows*'"'
	slash := w ^ lows*'\\'
	return (w | (w - lows*0x20) | (quote - lows) | (slash - lows)) & highs
}

func plain(b byte) bool { return b >= 0x20 && b < utf8.RuneSelf && b != '"' && b != '\\' }

// plainEnd returns where the plain part of a string that goes on at i ends.
func plainEnd(text []byte, i int) int {
	for i+8 <= len(text) {
		if m := marks(binary.LittleEndian.Uint64(text[i:])); m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
		i += 8
	}
	for i < len(text) && plain(text[i]) {
		i++
	}
	return i
}

// String takes a string.
func (c *Cursor) String() Str {
	if c.peek() != '"' {
		c.unexpected("expected a string")
		return Str{}
	}
	text := c.text
	i := c.pos + 1
	s := Str{Start: i}
	surplus := 0 // raw bytes that do not count as text outside CJK
	for {
		if i = plainEnd(text, i); i == len(text) {
			c.fail(i, "unterminated string")
			return Str{}
		}
		switch b := text[i]; {
		case b == '"':
			s.End = i
			s.Bytes = s.End - s.Start - surplus
			c.pos = i + 1
			return s
		case b == '\\':
			s.Escaped = true
			if i+1 < len(text) && short[text[i+1]] != 0 {
				i += 2
				surplus++
				continue
			}
			n, r := escape(text[i:])
			if n == 0 {
				c.fail(i, "bad escape in string")
				return Str{}
			}
			i += n
			if isCJK(r) {
				s.CJK++
				surplus += n
			} else {
				surplus += n - max(utf8.RuneLen(r), 1)
			}
		case b < 0x20:
			c.fail(i, "control character in string")
			return Str{}
		default:
			end, cjk, ok := wide(text, i)
			if !ok && c.strict {
				c.fail(end, "string is not UTF-8")
				return Str{}
			}
			if !ok {
				end++
			}
			i = end
			s.CJK += cjk.chars
			surplus += cjk.bytes
		}
	}
}

type cjkCount struct{ chars, bytes int }

// wide passes the run of characters outside ASCII that begins at i.
func wide(text []byte, i int) (end int, n cjkCount, ok bool) {
	for i < len(text) && text[i] >= utf8.RuneSelf {
		// Three bytes with a lead that needs no further check: most of the world's
		// text outside Latin.
		if b := text[i]; b >= 0xe1 && b <= 0xef && b != 0xed && i+3 <= len(text) {
			if text[i+1]&0xc0 != 0x80 || text[i+2]&0xc0 != 0x80 {
				return i, n, false
			}
			if isCJK(rune(b&0xf)<<12 | rune(text[i+1]&0x3f)<<6 | rune(text[i+2]&0x3f)) {
				n.chars++
				n.bytes += 3
			}
			i += 3
			continue
		}
		r, size := utf8.DecodeRune(text[i:])
		if r == utf8.RuneError && size == 1 {
			return i, n, false
		}
		if isCJK(r) {
			n.chars++
			n.bytes += size
		}
		i += size
	}
	return i, n, true
}

// isCJK tells the scripts that are written without spaces between words and
// that take far more tokens per byte of meaning than alphabets do.
func isCJK(r rune) bool {
	return r >= 0x2e80 && (r <= 0x9fff || r >= 0xac00 && r <= 0xd7a3 || // radicals to ideographs, Hangul
		r >= 0xf900 && r <= 0xfaff || r >= 0xff00 && r <= 0xffef || r >= 0x20000 && r <= 0x3ffff)
}

// short holds the escapes of one letter.
var short = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// escape reads the escape that b begins with: its length, 0 if it is none, and
// its character. Half a surrogate pair reads as U+FFFD, as encoding/json does.
func escape(b []byte) (n int, r rune) {
	if len(b) < 2 {
		return 0, 0
	}
	if r := short[b[1]]; r != 0 {
		return 2, rune(r)
	}
	if b[1] != 'u' {
		return 0, 0
	}
	r = hex4(b[2:])
	if r < 0 {
		return 0, 0
	}
	if r < 0xd800 || r > 0xdfff {
		return 6, r
	}
	if r < 0xdc00 && len(b) >= 12 && b[6] == '\\' && b[7] == 'u' {
		if low := hex4(b[8:]); low >= 0xdc00 && low <= 0xdfff {
			return 12, (r-0xd800)<<10 | (low - 0xdc00) + 0x10000
		}
	}
	return 6, utf8.RuneError
}

func hex4(b []byte) rune {
	if len(b) < 4 {
		return -1
	}
	var r rune
	for _, d := range b[:4] {
		switch {
		case d-'0' <= 9:
			d -= '0'
		case d|0x20 >= 'a' && d|0x20 <= 'f':
			d = d | 0x20 - 'a' + 10
		default:
			return -1
		}
		r = r<<4 | rune(d)
	}
	return r
}

// AppendUnquoted appends the decoded form of raw, the inside of a string that a
// Cursor has passed. Bytes that are not UTF-8 are kept.
func AppendUnquoted(dst, raw []byte) []byte {
	for i := 0; i < len(raw); {
		if raw[i] != '\\' {
			dst = append(dst, raw[i])
			i++
			continue
		}
		n, r := escape(raw[i:])
		if n == 0 {
			return dst
		}
		dst = utf8.AppendRune(dst, r)
		i += n
	}
	return dst
}
