// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// nodesMax bounds the values that one file may come to once its aliases are
// followed: nested aliases grow exponentially.
const nodesMax = 200_000

// mergeDepthMax bounds merge keys inside merged mappings, which may be cyclic.
const mergeDepthMax = 16

// later lists the fields that Headgate is to have and that this version does
// not act on. Accepting one silently would be a lie; calling it unknown would
// be one too.
var later = map[reflect.Type][]string{
	reflect.TypeFor[Journal]():   {"capture"},
	reflect.TypeFor[Listener]():  {"early_headers", "hostnames"},
	reflect.TypeFor[Pool]():      {"guard", "targets", "scheduler"},
	reflect.TypeFor[Discovery](): {"kubernetes"},
	reflect.TypeFor[Endpoint]():  {"guard"},
}

// A place is where a field stands in the file, under the name that the file
// uses for it.
type place struct {
	line, column int
	path         string
}

// A decoder reads YAML nodes into a Config. It goes on after a problem, so that
// all are found.
type decoder struct {
	file     string
	problems Problems
	places   map[string]place // by path, with fields under their first name
	given    map[string]bool  // by path: it has a value, and not a key alone
	nodes    int
}

func newDecoder(file string) *decoder {
	return &decoder{file: file, places: map[string]place{}, given: map[string]bool{}}
}

// A field is a place in the Config while it is read: path names it as Validate
// does, shown as the file does.
type field struct {
	path, shown string
}

func (f field) child(name, shown string) field {
	if f.path == "" {
		return field{name, shown}
	}
	return field{f.path + "." + name, f.shown + "." + shown}
}

func (f field) index(i int) field {
	n := "[" + strconv.Itoa(i) + "]"
	return field{f.path + n, f.shown + n}
}

// key is the child for a key that the user chose.
func (f field) key(name string) field {
	if name == "" || len(name) > 64 || strings.ContainsFunc(name, notKeyRune) {
		name = quote(name)
	}
	return f.child(name, name)
}

func notKeyRune(r rune) bool {
	return r != '-' && r != '_' && !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9')
}

func (d *decoder) problem(n *yaml.Node, f field, format string, args ...any) {
	d.problems = append(d.problems, Problem{d.file, n.Line, n.Column, f.shown, fmt.Sprintf(format, args...)})
}

// full reports whether reading must stop, and says so once.
func (d *decoder) full(n *yaml.Node) bool {
	if d.nodes++; d.nodes == nodesMax+1 {
		d.problem(n, field{}, "the file comes to more than %d values once its aliases are followed", nodesMax)
	}
	return d.nodes > nodesMax
}

// decode reads n into v. at is the node that stands for the field in messages
// about its absence or its content as a whole: its key, or n itself in a list.
func (d *decoder) decode(at, n *yaml.Node, f field, v reflect.Value) {
	if d.full(n) {
		return
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind != yaml.ScalarNode {
		d.places[f.path] = place{at.Line, at.Column, f.shown}
	} else {
		d.places[f.path] = place{n.Line, n.Column, f.shown}
	}
	if n.Style&yaml.TaggedStyle != 0 && !slices.Contains(knownTags, n.ShortTag()) {
		d.problem(n, f, "the tag %s is not supported", quote(n.Tag))
		return
	}
	if isNull(n) {
		d.places[f.path] = place{at.Line, at.Column, f.shown}
		return // a key without a value keeps the default
	}
	d.given[f.path] = true
	if _, ok := reflect.TypeAssert[value](v.Addr()); ok {
		d.scalar(n, f, v)
		return
	}
	if o, ok := reflect.TypeAssert[*Options](v.Addr()); ok {
		d.options(n, f, o)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.structure(n, f, v)
	case reflect.Slice:
		d.list(n, f, v)
	case reflect.Map:
		d.table(n, f, v)
	default:
		d.scalar(n, f, v)
	}
}

var knownTags = []string{"!!str", "!!int", "!!float", "!!bool", "!!null", "!!map", "!!seq"}

func isNull(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}

func (d *decoder) structure(n *yaml.Node, f field, v reflect.Value) {
	pairs, ok := d.pairs(n, f, "a block of fields")
	if !ok {
		return
	}
	names, indexes := fieldsOf(v.Type())
	seen := map[int]string{} // by field index: the name it was set under
	for _, p := range pairs {
		if d.full(p.key) {
			return
		}
		name := p.key.Value
		child := f.key(name)
		i, known := indexes[name]
		switch {
		case !known && slices.Contains(later[v.Type()], name):
			d.problem(p.key, child, "not supported by this version of headgate")
			continue
		case !known:
			d.problem(p.key, child, "unknown field%s", suggestion(name, names))
			continue
		}
		if other, twice := seen[i]; twice {
			if !p.merged {
				d.problem(p.key, child, "is another name for %s, which is set too: keep one", other)
			}
			continue
		}
		seen[i] = name
		child = f.child(yamlName(v.Type().Field(i)), name)
		d.decode(p.key, p.value, child, v.Field(i))
	}
}

// fieldsOf returns the names of a struct's fields in order, and where each is.
func fieldsOf(t reflect.Type) ([]string, map[string]int) {
	names, indexes := []string{}, map[string]int{}
	for i := range t.NumField() {
		name := yamlName(t.Field(i))
		names = append(names, name)
		indexes[name] = i
		if also := t.Field(i).Tag.Get("also"); also != "" {
			names = append(names, also)
			indexes[also] = i
		}
	}
	return names, indexes
}

func yamlName(f reflect.StructField) string { return f.Tag.Get("yaml") }

func (d *decoder) list(n *yaml.Node, f field, v reflect.Value) {
	if n.Kind != yaml.SequenceNode {
		d.problem(n, f, "must be a list, not %s", kindOf(n))
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), 0, min(len(n.Content), 64)))
	for i, item := range n.Content {
		elem := newElem(v.Type().Elem())
		d.decode(item, item, f.index(i), elem)
		v.Set(reflect.Append(v, elem))
		if d.nodes > nodesMax {
			return
		}
	}
}

func (d *decoder) table(n *yaml.Node, f field, v reflect.Value) {
	pairs, ok := d.pairs(n, f, "a block of named entries")
	if !ok {
		return
	}
	v.Set(reflect.MakeMap(v.Type()))
	for _, p := range pairs {
		if d.full(p.key) {
			return
		}
		elem := newElem(v.Type().Elem())
		d.decode(p.key, p.value, f.key(p.key.Value), elem)
		v.SetMapIndex(reflect.ValueOf(p.key.Value), elem)
	}
}

func newElem(t reflect.Type) reflect.Value {
	p := reflect.New(t)
	if def, ok := reflect.TypeAssert[defaulter](p); ok {
		def.setDefaults()
	}
	return p.Elem()
}

func (d *decoder) scalar(n *yaml.Node, f field, v reflect.Value) {
	want := wanted(v)
	if n.Kind != yaml.ScalarNode {
		d.problem(n, f, "must be %s, not %s", want, kindOf(n))
		return
	}
	if val, ok := reflect.TypeAssert[value](v.Addr()); ok {
		if err := val.set(n.Value); err != nil {
			d.problem(n, f, "%v", err)
		}
		return
	}
	tag := n.ShortTag()
	switch v.Kind() {
	case reflect.String:
		if tag != "!!str" {
			d.problem(n, f, "must be a text, not %s: put it in quotes", scalarKind(n))
			return
		}
		v.SetString(n.Value)
		return
	case reflect.Bool:
		if tag == "!!bool" {
			v.SetBool(strings.EqualFold(n.Value, "true"))
			return
		}
	case reflect.Int:
		// Decimal only: YAML reads 010 as eight.
		i, err := strconv.Atoi(n.Value)
		if tag == "!!int" && err == nil && n.Value == strconv.Itoa(i) {
			v.SetInt(int64(i))
			return
		}
	case reflect.Float64:
		x, err := strconv.ParseFloat(n.Value, 64)
		if (tag == "!!int" || tag == "!!float") && err == nil && !math.IsInf(x, 0) && !math.IsNaN(x) {
			v.SetFloat(x)
			return
		}
	}
	d.problem(n, f, "must be %s, not %s", want, quote(n.Value))
}

// wanted says what a scalar field holds.
func wanted(v reflect.Value) string {
	switch v.Addr().Interface().(type) {
	case *Duration:
		return "a duration"
	case *Size:
		return "a size"
	case *Ratio:
		return "a number from 0 to 1"
	case *Address:
		return "an address"
	case *Count:
		return "a whole number or auto"
	case *Trust:
		return "auto, true or false"
	case *URL, *HookURL:
		return "a URL"
	case *File:
		return "a file name"
	}
	switch v.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	}
	return "a text"
}

// kindOf says what a node is, never what it holds.
func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a block of fields"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		return scalarKind(n)
	}
	return "an alias"
}

func scalarKind(n *yaml.Node) string {
	switch n.ShortTag() {
	case "!!int", "!!float":
		return "a number"
	case "!!bool":
		return "true or false"
	case "!!timestamp":
		return "a date"
	}
	return "a text"
}

// A pair is one entry of a mapping, or of a mapping merged into it.
type pair struct {
	key, value *yaml.Node
	merged     bool
}

// pairs lists a mapping's entries, its own before those that it merges, and
// each key once.
func (d *decoder) pairs(n *yaml.Node, f field, want string) ([]pair, bool) {
	if n.Kind != yaml.MappingNode {
		d.problem(n, f, "must be %s, not %s", want, kindOf(n))
		return nil, false
	}
	m := merger{d: d, f: f, lines: map[string]int{}}
	m.add(n, 0)
	return m.pairs, true
}

// A merger collects the entries of a mapping and of those that it merges.
type merger struct {
	d     *decoder
	f     field
	pairs []pair
	lines map[string]int // by key: the line where it is set
	deep  bool           // mergeDepthMax was passed: the rest is left out
}

func (m *merger) add(n *yaml.Node, depth int) {
	if m.deep || m.d.full(n) {
		return
	}
	if depth > mergeDepthMax {
		m.deep = true
		m.d.problem(n, m.f, "merge keys are nested more than %d deep", mergeDepthMax)
		return
	}
	own := map[string]bool{}
	var merges []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		if key.Kind == yaml.AliasNode {
			key = key.Alias
		}
		switch {
		case m.d.full(key):
			return
		case key.Kind != yaml.ScalarNode:
			m.d.problem(key, m.f, "a key must be a text, not %s", kindOf(key))
		case key.ShortTag() == "!!merge":
			merges = append(merges, val)
		case own[key.Value]:
			m.d.problem(key, m.f.key(key.Value), "is set twice: first on line %d", m.lines[key.Value])
		case m.lines[key.Value] > 0:
			// What stands nearer wins over what is merged.
		default:
			m.pairs = append(m.pairs, pair{key, val, depth > 0})
			m.lines[key.Value] = key.Line
		}
		if key.Kind == yaml.ScalarNode {
			own[key.Value] = true
		}
	}
	for _, from := range merges {
		m.merge(from, depth)
	}
}

// merge adds the entries of the mapping, or of the list of mappings, that a
// merge key names. Of a list the first mapping that has a key wins.
func (m *merger) merge(from *yaml.Node, depth int) {
	if from.Kind == yaml.AliasNode {
		from = from.Alias
	}
	froms := []*yaml.Node{from}
	if from.Kind == yaml.SequenceNode {
		froms = from.Content
	}
	for _, n := range froms {
		at := n
		if n.Kind == yaml.AliasNode {
			n = n.Alias
		}
		if n.Kind != yaml.MappingNode {
			m.d.problem(at, m.f, "only blocks of fields can be merged, not %s", kindOf(n))
			continue
		}
		m.add(n, depth+1)
	}
}

// files makes the file names in v relative to dir.
func files(v reflect.Value, dir string) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[Secret]() || v.Type() == reflect.TypeFor[Digest]() {
			return
		}
		for _, field := range v.Fields() {
			files(field, dir)
		}
	case reflect.Slice:
		for i := range v.Len() {
			files(v.Index(i), dir)
		}
	case reflect.Map:
		for iter := v.MapRange(); iter.Next(); {
			elem := reflect.New(v.Type().Elem()).Elem()
			elem.Set(iter.Value())
			files(elem, dir)
			v.SetMapIndex(iter.Key(), elem)
		}
	case reflect.String:
		if v.Type() == reflect.TypeFor[File]() && v.String() != "" && !filepath.IsAbs(v.String()) {
			v.SetString(filepath.Join(dir, v.String()))
		}
	}
}
