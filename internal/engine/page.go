// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/headgate/headgate/plugin"
)

// Bounds of a page. vLLM's has 60 KB, and more with more engines behind one
// address. What is past a bound is unknown.
const (
	PageMax   = 8 << 20  // bytes
	lineMax   = 16 << 10 // a longer line is skipped
	seriesMax = 512      // of one family
	labelsMax = 64       // of one series
)

// page is what is known of a page in the middle of it.
type page struct {
	ladders map[Kind]*ladder
	head    Head

	size     int
	tail     []byte // of a line whose end has not come
	skipping bool   // in a line that is too long
	lines    int    // samples, whether they are looked for or not
	bad      int    // that are none
	seen     uint16 // kinds of whose prefixes there was a sample
}

// Write reads some bytes of the page. The error is ErrTooLarge, and what comes
// after it is not read.
func (r *Reader) Write(p []byte) (int, error) {
	r.size += len(p)
	if r.size > PageMax {
		return 0, ErrTooLarge
	}
	n := len(p)
	for len(p) > 0 {
		end := bytes.IndexByte(p, '\n')
		if end < 0 {
			r.keep(p)
			break
		}
		line := p[:end]
		p = p[end+1:]
		switch {
		case r.skipping:
			r.skipping = false
		case len(r.tail) > 0: // first, so that it is not left to the next line
			if r.keep(line); !r.skipping {
				r.line(r.tail)
			}
			r.tail, r.skipping = r.tail[:0], false
		case len(line) > lineMax:
			r.lost(line)
		default:
			r.line(line)
		}
	}
	return n, nil
}

// keep keeps the begin of a line.
func (r *Reader) keep(part []byte) {
	if r.skipping {
		return
	}
	if len(r.tail)+len(part) > lineMax {
		r.lost(append(r.tail, part[:min(len(part), lineMax-len(r.tail))]...))
		r.tail, r.skipping = r.tail[:0], true
		return
	}
	r.tail = append(r.tail, part...)
}

// lost notes a line that is too long. What it would have said is not known.
func (r *Reader) lost(line []byte) {
	r.lines++
	if f := r.families[string(line[:nameLength(line)])]; f != nil {
		f.broken = true
	}
}

// line reads one whole line.
func (r *Reader) line(line []byte) {
	line = bytes.TrimRight(line, "\r \t")
	if len(line) == 0 || line[0] == '#' {
		return
	}
	r.lines++
	n := nameLength(line)
	if n == 0 || n == len(line) {
		r.bad++
		return
	}
	r.notice(line[:n])
	f := r.families[string(line[:n])]
	if f == nil {
		return
	}
	if len(f.series) >= seriesMax || !f.add(line[n:]) {
		f.broken = true
	}
}

func (r *Reader) notice(name []byte) {
	for i := range prefixes {
		p := &prefixes[i]
		if len(name) > len(p.text) && string(name[:len(p.text)]) == p.text {
			r.seen |= 1 << p.kind
			return
		}
	}
}

// nameLength is how many bytes from the begin are a metric's name.
func nameLength(b []byte) int {
	for i, c := range b {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c == '_', c == ':':
		case c >= '0' && c <= '9' && i > 0:
		default:
			return i
		}
	}
	return len(b)
}

// family is the series of one name on a page.
type family struct {
	series []series
	broken bool // one of its lines makes no sense, or is there twice
	newest bool // values are times, and only the series with the latest is kept
}

func (f *family) reset() { f.series, f.broken = f.series[:0], false }

type series struct {
	labels []label // by name
	value  float64
}

type label struct{ name, value string }

func (s *series) label(name string) string {
	for i := range s.labels {
		if s.labels[i].name == name {
			return s.labels[i].value
		}
	}
	return ""
}

// add reads what follows the name and reports whether it makes sense.
func (f *family) add(rest []byte) bool {
	var s series
	rest = bytes.TrimLeft(rest, " \t")
	if len(rest) > 0 && rest[0] == '{' {
		var ok bool
		if s.labels, rest, ok = labelsOf(rest[1:]); !ok {
			return false
		}
		slices.SortFunc(s.labels, func(a, b label) int { return strings.Compare(a.name, b.name) })
	}
	rest = bytes.TrimLeft(rest, " \t")
	if end := bytes.IndexAny(rest, " \t"); end >= 0 {
		rest = rest[:end] // a time follows
	}
	var err error
	if s.value, err = strconv.ParseFloat(string(rest), 64); err != nil {
		return false
	}
	if f.newest {
		if !math.IsNaN(s.value) && (len(f.series) == 0 || s.value >= f.series[0].value) {
			f.series = append(f.series[:0], s)
		}
		return true
	}
	for i := range f.series {
		if slices.Equal(f.series[i].labels, s.labels) {
			return false
		}
	}
	f.series = append(f.series, s)
	return true
}

// labelsOf reads labels up to the brace that ends them.
func labelsOf(b []byte) (list []label, rest []byte, ok bool) {
	for {
		b = bytes.TrimLeft(b, " \t,")
		if len(b) == 0 || len(list) > labelsMax {
			return nil, nil, false
		}
		if b[0] == '}' {
			return list, b[1:], true
		}
		n := nameLength(b)
		name := string(b[:n])
		b = bytes.TrimLeft(b[n:], " \t")
		if n == 0 || len(b) == 0 || b[0] != '=' {
			return nil, nil, false
		}
		b = bytes.TrimLeft(b[1:], " \t")
		if len(b) == 0 || b[0] != '"' {
			return nil, nil, false
		}
		var value string
		if value, b, ok = quoted(b[1:]); !ok {
			return nil, nil, false
		}
		list = append(list, label{name, value})
	}
}

// quoted reads a label's value up to the quote that ends it.
func quoted(b []byte) (value string, rest []byte, ok bool) {
	end := bytes.IndexAny(b, `"\`)
	if end >= 0 && b[end] == '"' {
		return string(b[:end]), b[end+1:], true
	}
	var out []byte
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case c == '"':
			return string(out), b[i+1:], true
		case c == '\\' && i+1 < len(b):
			i++
			if b[i] == 'n' {
				out = append(out, '\n')
			} else {
				out = append(out, b[i])
			}
		default:
			out = append(out, c)
		}
	}
	return "", nil, false
}

// sameThing are the labels in which series differ that count the same requests:
// the ranks of one engine that is spread over several devices.
var sameThing = []string{"tp_rank", "pp_rank", "moe_ep_rank"}

// values are those of the series that the selector chooses, one for each engine
// at the address. ok is false if one of them is no number, or broken.
func (f *family) values(s selector) (values []float64, ok bool) {
	if f.broken {
		return nil, false
	}
	var first []*series // of each value
	for i := range f.series {
		x := &f.series[i]
		if !s.has(x) {
			continue
		}
		if math.IsNaN(x.value) || math.IsInf(x.value, 0) || x.value < 0 {
			return nil, false
		}
		if at := slices.IndexFunc(first, x.same); at >= 0 {
			values[at] = max(values[at], x.value)
			continue
		}
		first, values = append(first, x), append(values, x.value)
	}
	return values, true
}

// same reports whether two series count the same requests.
func (s *series) same(o *series) bool {
	a, b := s.apart(), o.apart()
	return len(a) < len(s.labels) && slices.Equal(a, b)
}

// apart are the labels that tell engines apart.
func (s *series) apart() []label {
	if !slices.ContainsFunc(s.labels, isRank) {
		return s.labels
	}
	return slices.DeleteFunc(slices.Clone(s.labels), isRank)
}

func isRank(l label) bool { return slices.Contains(sameThing, l.name) }

// capacity is how many tokens the memory holds that the labels of an info family
// describe, added up over parallel engines.
func (f *family) capacity(c cache) plugin.Value {
	if f.broken {
		return plugin.Value{}
	}
	total := 0.0
	for i := range f.series {
		s := &f.series[i]
		if strings.EqualFold(s.label("enable_prefix_caching"), "false") {
			continue
		}
		tokens := s.count(c.tokensLabel)
		if tokens == 0 {
			tokens = s.count(c.blockLabel) * s.count(c.blocksLabel)
		}
		if tokens == 0 {
			return plugin.Value{}
		}
		total += tokens
	}
	return plugin.Value{V: total, Known: true}
}

// count is the number in a label, 0 if there is none: until its memory is laid
// out, vLLM says None.
func (s *series) count(name string) float64 {
	n, err := strconv.ParseUint(s.label(name), 10, 40)
	if err != nil {
		return 0
	}
	return float64(n)
}
