// SPDX-License-Identifier: Apache-2.0

// Package prefix knows which endpoint has probably cached how much of a prompt.
//
// A Hasher turns a request into the chained keys of its prompt's blocks, from
// the bytes of the body and without decoding them. An Index remembers which
// endpoint took which blocks and finds the endpoints that hold the longest part
// of a prompt. It is approximate: it knows what was sent and accepted, not what
// an engine's memory holds.
//
// An Index is bounded in blocks. When it is full, who learns takes room from the
// endpoint that holds most, so that endpoints that need it have even shares, one
// that joins among them.
//
// The package decides nothing about where a request goes; schedule.Book does,
// and it guards an Index by its own lock. A wrong key costs a wrong estimate,
// never a wrong answer: engines compare tokens, not keys.
package prefix

// BlockBytes is how much of the canonical prompt one key covers: about 64
// tokens, four blocks of an engine's cache.
const BlockBytes = 256

// BlocksMax bounds the keys of one prompt: 4 MiB, about a million tokens. What
// follows has no key and counts as new.
const BlocksMax = 16 << 10
