// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/headgate/headgate/internal/dialect"
)

// Strings that are neither text of the prompt nor short are images and sounds
// as data URLs, or long arguments of tools. They enter the prompt as a digest.
const (
	digestMin  = 4 << 10  // shorter ones are hashed like text
	digestMax  = 64 << 10 // of longer ones as much as this is read
	sampleSize = 512
)

// Hasher makes the keys of prompts. Its zero value is ready; it keeps its memory
// from one prompt to the next, and it is used by one goroutine at a time.
type Hasher struct {
	keys []uint64
	progress

	body  []byte
	spans []dialect.Span // prompt strings that are still ahead
}

// progress is how far a prompt has been read.
type progress struct {
	block [BlockBytes]byte // the block that is being filled
	n     int              // bytes of it
	total int
	chain uint64
}

// Request returns the keys of a request's whole blocks, in order, and the size
// of its canonical prompt in bytes. A key stands for everything up to its
// block's end: equal keys mean equal prompts so far, for the same model and
// salt. model is the name by which engines know the model, or the adapter.
//
// The canonical prompt is the tools, wherever the body has them, and then, in
// the order of the body, the values that hold the prompt: texts exactly as they
// are written, roles and whatever else stands between them, without white space
// outside strings, and large other strings by digest. So a text that is written
// as a string and one that is the only part of an array are two prompts, and so
// are two spellings of one character. Chat templates treat the first pair alike;
// clients keep to one of the two.
//
// The keys are valid until the next call.
func (h *Hasher) Request(body []byte, r *dialect.Request, model string) (keys []uint64, total int) {
	h.Start(model, r.CacheSalt)
	if len(r.Prompt) == 0 {
		return h.Keys()
	}
	h.body, h.spans = body, r.Prompt
	if !r.ToolsSpan.Empty() {
		h.tools(r.ToolsSpan)
	}
	h.members(r)
	h.body, h.spans = nil, nil
	return h.Keys()
}

// Start begins a prompt. Two models, adapters or salts never share a key.
func (h *Hasher) Start(model, salt string) {
	h.keys, h.n, h.total = h.keys[:0], 0, 0
	// Each name is hashed alone, so that no two pairs run together into one.
	h.chain = join(join(xxhash.Sum64String("headgate"), xxhash.Sum64String(model)), xxhash.Sum64String(salt))
}

// Keys returns what Request returns, for a prompt that was written by Text.
func (h *Hasher) Keys() (keys []uint64, total int) { return h.keys, h.total }

// Text appends bytes to the canonical prompt.
func (h *Hasher) Text(b []byte) {
	h.total += len(b)
	if h.n > 0 {
		took := copy(h.block[h.n:], b)
		b = b[took:]
		if h.n += took; h.n < BlockBytes {
			return
		}
		h.add(h.block[:])
		h.n = 0
	}
	whole := len(b) / BlockBytes * BlockBytes
	h.add(b[:whole])
	h.n = copy(h.block[:], b[whole:])
}

// add appends the keys of whole blocks.
func (h *Hasher) add(blocks []byte) {
	n := min(len(blocks)/BlockBytes, BlocksMax-len(h.keys))
	h.keys = slices.Grow(h.keys, n)
	chain := h.chain
	for ; n > 0; n-- {
		chain = join(chain, xxhash.Sum64(blocks[:BlockBytes]))
		h.keys = append(h.keys, chain)
		blocks = blocks[BlockBytes:]
	}
	h.chain = chain
}

// join chains two hashes. For either one given it is one to one in the other, so
// that chaining adds no collisions of its own.
func join(chain, hash uint64) uint64 {
	x := bits.RotateLeft64(chain, 29)*0x9E3779B185EBCA87 + hash
	x ^= x >> 32
	return x * 0xC2B2AE3D27D4EB4F
}

// digest appends a string's digest and length. Of a long string it reads the
// begin, the end and samples between: two images of one size that differ in
// none of them are taken for one.
func (h *Hasher) digest(b []byte) {
	var sum uint64
	if len(b) <= digestMax {
		sum = xxhash.Sum64(b)
	} else {
		const edge = digestMax / 4
		sum = join(xxhash.Sum64(b[:edge]), xxhash.Sum64(b[len(b)-edge:]))
		const samples = (digestMax - 2*edge) / sampleSize
		for i := range samples {
			at := edge + (len(b)-2*edge-sampleSize)*i/(samples-1)
			sum = join(sum, xxhash.Sum64(b[at:at+sampleSize]))
		}
	}
	var out [16]byte
	binary.LittleEndian.PutUint64(out[:], sum)
	binary.LittleEndian.PutUint64(out[8:], uint64(len(b)))
	h.Text(out[:])
}

// tools writes the tools' text. None of the prompt's strings is in it.
func (h *Hasher) tools(span dialect.Span) {
	spans := h.spans
	h.spans = nil
	h.value(span.Start, true, len(h.body))
	h.spans = spans
}

// members writes those of the body's members that hold some of the prompt. The
// body is valid JSON: the dialect has checked it. On one that is not, the walk
// ends early.
func (h *Hasher) members(r *dialect.Request) {
	pos := r.Object.Start + 1
	for len(h.spans) > 0 {
		quote := bytes.IndexByte(h.body[pos:], '"')
		if quote < 0 {
			return
		}
		pos = stringEnd(h.body, pos+quote+1)
		colon := bytes.IndexByte(h.body[pos:], ':')
		if colon < 0 {
			return
		}
		pos += colon + 1
		if r.ToolsSpan.Start >= pos && blank(h.body[pos:r.ToolsSpan.Start]) {
			pos = r.ToolsSpan.End
			continue
		}
		end := h.member(pos)
		if end <= pos {
			return
		}
		pos = end
	}
}

// member passes the value of one member and appends it to the prompt if it holds
// some of the prompt's strings.
func (h *Hasher) member(pos int) (end int) {
	for pos < len(h.body) && h.body[pos] <= ' ' {
		pos++
	}
	if pos < len(h.body) && (h.body[pos] == '[' || h.body[pos] == '{' || h.spans[0].Start == pos+1) {
		ahead, before, keys := len(h.spans), h.progress, len(h.keys)
		end = h.value(pos, true, digestMin)
		if len(h.spans) == ahead { // none of it was the prompt's
			h.progress, h.keys = before, h.keys[:keys]
		}
		return end
	}
	return h.value(pos, false, 0)
}

// blank reports whether b is a few bytes of white space.
func blank(b []byte) bool { return len(b) < 64 && len(bytes.TrimSpace(b)) == 0 }

// value passes one JSON value and returns where it ends. If write is set, it is
// appended to the prompt; then strings that are not the prompt's own and at
// least long are appended as digests.
func (h *Hasher) value(pos int, write bool, long int) int {
	body, depth, run := h.body, 0, pos
	flush := func(end int) {
		if write && run < end {
			h.Text(body[run:end])
		}
	}
	for pos < len(body) {
		switch c := body[pos]; c {
		case '"':
			inner := pos + 1
			var end int
			own := false
			if len(h.spans) > 0 && h.spans[0].Start == inner {
				end, own = h.spans[0].End, true
				h.spans = h.spans[1:]
			} else {
				end = stringEnd(body, inner) - 1
			}
			if write && !own && end-inner >= long {
				flush(inner)
				h.digest(body[inner:end])
				run = end
			}
			pos = end + 1
			if depth == 0 {
				flush(pos)
				return pos
			}
		case '{', '[':
			if len(h.spans) > 0 && h.spans[0].Start == pos {
				h.spans = h.spans[1:] // token ids and tool calls are read like all else
			}
			depth++
			pos++
		case '}', ']':
			if depth == 0 {
				flush(pos)
				return pos
			}
			depth--
			pos++
			if depth == 0 {
				flush(pos)
				return pos
			}
		case ' ', '\n', '\r', '\t':
			flush(pos)
			pos++
			run = pos
		case ',':
			if depth == 0 {
				flush(pos)
				return pos
			}
			pos++
		default:
			pos++
		}
	}
	pos = min(pos, len(body))
	flush(pos)
	return pos
}

// stringEnd returns the offset after the quote that ends the string whose inside
// begins at pos, or the end of body.
func stringEnd(body []byte, pos int) int {
	for from := pos; ; {
		at := bytes.IndexByte(body[min(from, len(body)):], '"')
		if at < 0 {
			return len(body)
		}
		end := from + at
		slashes := 0
		for end-slashes > pos && body[end-slashes-1] == '\\' {
			slashes++
		}
		if slashes%2 == 0 {
			return end + 1
		}
		from = end + 1
	}
}
