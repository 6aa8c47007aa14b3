// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math"
)

// GGUF is a header, the metadata, the descriptions of the tensors, and their
// data, each tensor aligned. All numbers are little-endian, all strings are
// preceded by their length.

const (
	ggufMagic     = "GGUF"
	ggufVersion   = 3
	ggufAlignment = 32
)

// Types of a metadata value.
const (
	typeUint32  = 4
	typeInt32   = 5
	typeFloat32 = 6
	typeBool    = 7
	typeString  = 8
	typeArray   = 9
)

// A format is how the elements of a tensor are stored, in GGUF's numbering.
type format uint32

const (
	formatF32 format = 0
	formatF16 format = 1
)

func (f format) size() int {
	if f == formatF16 {
		return 2
	}
	return 4
}

// An entry is one piece of metadata: a uint32, float32, bool, string, []int32,
// []float32 or []string under a key.
type entry struct {
	key   string
	value any
}

// A tensor is a matrix of rows and cols, or a vector if rows is 0. fill writes
// row r of it.
type tensor struct {
	name       string
	format     format
	cols, rows int
	fill       func(r int, row []float32)
}

func (t tensor) dims() []int {
	if t.rows == 0 {
		return []int{t.cols}
	}
	return []int{t.cols, t.rows}
}

func (t tensor) bytes() int { return t.cols * max(t.rows, 1) * t.format.size() }

// writeGGUF writes a complete file.
func writeGGUF(out io.Writer, metadata []entry, tensors []tensor) error {
	w := &writer{buf: bufio.NewWriter(out)}
	w.raw(ggufMagic)
	w.number(uint32(ggufVersion))
	w.number(uint64(len(tensors)))
	w.number(uint64(len(metadata)))
	for _, e := range metadata {
		w.text(e.key)
		w.value(e.value)
	}
	offset := 0
	for _, t := range tensors {
		w.text(t.name)
		w.number(uint32(len(t.dims())))
		for _, d := range t.dims() {
			w.number(uint64(d))
		}
		w.number(t.format)
		w.number(uint64(offset))
		offset = align(offset + t.bytes())
	}
	for _, t := range tensors {
		w.pad()
		w.tensor(t)
	}
	if w.err != nil {
		return w.err
	}
	return w.buf.Flush()
}

// A writer counts what it writes, for the alignment, and keeps the first error.
type writer struct {
	buf *bufio.Writer
	n   int
	err error
}

func (w *writer) Write(p []byte) (int, error) {
	n, err := w.buf.Write(p)
	w.n += n
	return n, err
}

func (w *writer) keep(err error) {
	if w.err == nil {
		w.err = err
	}
}

// number writes a number or a slice of numbers.
func (w *writer) number(v any) {
	w.keep(binary.Write(w, binary.LittleEndian, v))
}

func (w *writer) raw(s string) {
	_, err := io.WriteString(w, s)
	w.keep(err)
}

func (w *writer) text(s string) {
	w.number(uint64(len(s)))
	w.raw(s)
}

func (w *writer) pad() {
	w.raw(string(make([]byte, align(w.n)-w.n)))
}

func (w *writer) typed(t uint32, v any) {
	w.number(t)
	w.number(v)
}

func (w *writer) array(t uint32, n int) {
	w.typed(typeArray, t)
	w.number(uint64(n))
}

func (w *writer) value(v any) {
	switch v := v.(type) {
	case uint32:
		w.typed(typeUint32, v)
	case float32:
		w.typed(typeFloat32, v)
	case bool:
		w.typed(typeBool, v)
	case string:
		w.number(uint32(typeString))
		w.text(v)
	case []int32:
		w.array(typeInt32, len(v))
		w.number(v)
	case []float32:
		w.array(typeFloat32, len(v))
		w.number(v)
	case []string:
		w.array(typeString, len(v))
		for _, s := range v {
			w.text(s)
		}
	default:
		w.keep(fmt.Errorf("cannot store a %T", v))
	}
}

// align rounds up to where a tensor may start.
func align(n int) int {
	return (n + ggufAlignment - 1) / ggufAlignment * ggufAlignment
}

func (w *writer) tensor(t tensor) {
	row := make([]float32, t.cols)
	half := make([]uint16, t.cols)
	for r := range max(t.rows, 1) {
		t.fill(r, row)
		if t.format == formatF32 {
			w.number(row)
			continue
		}
		for i, f := range row {
			half[i] = float16(f)
		}
		w.number(half)
	}
}

// float16 converts by cutting off the mantissa. What is too small becomes zero,
// what is too large infinite.
func float16(f float32) uint16 {
	bits := math.Float32bits(f)
	sign := uint16(bits>>16) & 0x8000
	exponent := int(bits>>23&0xff) - 127 + 15
	switch {
	case exponent <= 0:
		return sign
	case exponent >= 31:
		return sign | 0x7c00
	}
	return sign | uint16(exponent)<<10 | uint16(bits>>13&0x3ff)
}
