// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Options are a block of fields that this package does not know: a plugin's own.
// They are kept as JSON.
type Options struct{ text string }

// MarshalText returns the options as JSON, "" for none.
func (o Options) MarshalText() ([]byte, error) { return []byte(o.text), nil }

// Into decodes the options into a struct with json tags, as strictly as the rest
// of the file. Without options nothing is changed.
func (o Options) Into(into any) error {
	if o.text == "" {
		return nil
	}
	d := json.NewDecoder(strings.NewReader(o.text))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return optionError(err)
	}
	return nil
}

// optionError puts what encoding/json says in the words of the file.
func optionError(err error) error {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("option %s: must be %s, not %s", wrong.Field, wantedOf(wrong.Type), jsonKind(wrong.Value))
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return errors.New("unknown option " + name)
	}
	return err
}

var textReader = reflect.TypeFor[encoding.TextUnmarshaler]()

// wantedOf says what an option of a Go type holds.
func wantedOf(t reflect.Type) string {
	if t.Implements(textReader) || reflect.PointerTo(t).Implements(textReader) {
		return "a text"
	}
	switch t.Kind() {
	case reflect.Pointer:
		return wantedOf(t.Elem())
	case reflect.String:
		return "a text"
	case reflect.Bool:
		return "true or false"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		switch t.Elem().Kind() {
		case reflect.String:
			return "a list of texts"
		case reflect.Float32, reflect.Float64:
			return "a list of numbers"
		}
		return "a list"
	case reflect.Map, reflect.Struct:
		return "a block of fields"
	}
	return "a whole number"
}

// jsonKind is what encoding/json found, in the words of the file.
func jsonKind(value string) string {
	kind, number, found := strings.Cut(value, " ")
	if found && kind == "number" {
		return number // that is not whole, or too large
	}
	switch kind {
	case "string":
		return "a text"
	case "bool":
		return "true or false"
	case "array":
		return "a list"
	case "object":
		return "a block of fields"
	}
	return "a number"
}

// options reads a block of any shape.
func (d *decoder) options(n *yaml.Node, f field, o *Options) {
	if n.Kind != yaml.MappingNode {
		d.problem(n, f, "must be a block of fields, not %s", kindOf(n))
		return
	}
	var b bytes.Buffer
	if d.free(&b, n, f, 0) {
		o.text = b.String()
	}
}

// freeDepthMax bounds blocks in blocks.
const freeDepthMax = 16

// free writes a value of any shape as JSON. It reports whether it could.
func (d *decoder) free(b *bytes.Buffer, n *yaml.Node, f field, depth int) bool {
	if d.full(n) {
		return false
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if depth > freeDepthMax {
		d.problem(n, f, "is nested more than %d deep", freeDepthMax)
		return false
	}
	d.places[f.path] = place{n.Line, n.Column, f.shown}
	switch n.Kind {
	case yaml.MappingNode:
		pairs, _ := d.pairs(n, f, "a block of fields")
		b.WriteByte('{')
		for i, p := range pairs {
			comma(b, i)
			writeJSON(b, p.key.Value)
			b.WriteByte(':')
			if !d.free(b, p.value, f.key(p.key.Value), depth+1) {
				return false
			}
		}
		b.WriteByte('}')
	case yaml.SequenceNode:
		b.WriteByte('[')
		for i, item := range n.Content {
			comma(b, i)
			if !d.free(b, item, f.index(i), depth+1) {
				return false
			}
		}
		b.WriteByte(']')
	default:
		return d.freeScalar(b, n, f)
	}
	return true
}

func comma(b *bytes.Buffer, i int) {
	if i > 0 {
		b.WriteByte(',')
	}
}

func writeJSON(b io.Writer, v any) {
	raw, _ := json.Marshal(v) // of a text, a number or a bool
	_, _ = b.Write(raw)
}

func (d *decoder) freeScalar(b *bytes.Buffer, n *yaml.Node, f field) bool {
	switch n.ShortTag() {
	case "!!null":
		b.WriteString("null")
	case "!!bool":
		writeJSON(b, strings.EqualFold(n.Value, "true"))
	case "!!int", "!!float":
		x, err := strconv.ParseFloat(n.Value, 64)
		if err != nil || math.IsInf(x, 0) || math.IsNaN(x) {
			d.problem(n, f, "must be a plain number, not %s", quote(n.Value))
			return false
		}
		if i, err := strconv.ParseInt(n.Value, 10, 64); err == nil {
			writeJSON(b, i)
		} else {
			writeJSON(b, x)
		}
	case "!!str":
		writeJSON(b, n.Value)
	default:
		d.problem(n, f, "must be a text, a number, or true or false, not %s", scalarKind(n))
		return false
	}
	return true
}
