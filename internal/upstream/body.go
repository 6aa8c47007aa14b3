// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"bytes"
	"io"
)

// framing is how a body is delimited.
type framing uint8

const (
	bodyless framing = iota
	byLength
	byChunks
	byClose
)

// chunkState is which element of the chunked coding comes next (RFC 9112 §7.1).
type chunkState uint8

const (
	chunkSize chunkState = iota
	chunkData
	chunkEnd // the CRLF after the data
	chunkTrailer
	chunkDone
)

// Bounds of the chunked coding. They are at most net/http's.
const (
	chunkLineMax   = 1 << 10
	chunkExcessMax = 16 << 10
	trailerMax     = 4 << 10
)

// readPlain reads a body that is not chunked.
func (r *Response) readPlain(p []byte) (int, error) {
	c := r.c
	if int64(len(p)) > r.left {
		p = p[:r.left]
	}
	n, err := c.readBody(p)
	if err == io.EOF && r.framing == byClose {
		r.finish(Complete, nil)
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if r.framing == byLength {
		if r.left -= int64(n); r.left == 0 {
			r.finish(Complete, nil)
		}
	}
	return n, nil
}

// readBody gives what is unread, or reads once: into p itself if that is no
// smaller than the buffer.
func (c *conn) readBody(p []byte) (int, error) {
	if c.r == c.w {
		if len(p) >= len(c.buf) {
			return c.read(p)
		}
		if err := c.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, c.unread())
	c.r += n
	return n, nil
}

// readChunks fills p from as many chunks as have arrived. It waits only while
// it has nothing.
func (r *Response) readChunks(p []byte) (int, error) {
	c, n := r.c, 0
	for n < len(p) {
		if r.chunk == chunkData {
			if c.r == c.w && n > 0 {
				break
			}
			room := p[n:]
			if int64(len(room)) > r.left {
				room = room[:r.left]
			}
			k, err := c.readBody(room)
			if err != nil {
				return n, err
			}
			n += k
			if r.left -= int64(k); r.left == 0 {
				r.chunk = chunkEnd
			}
			continue
		}

		ok, err := r.nextElement()
		switch {
		case err != nil && n > 0:
			// The element stays unread and fails again at the next Read.
			return n, nil
		case err != nil:
			return 0, err
		case r.chunk == chunkDone:
			r.finish(Complete, nil)
			return n, nil
		case ok:
			continue
		case n > 0:
			return n, nil
		}
		if err := c.fill(); err != nil {
			return 0, err
		}
	}
	return n, nil
}

// nextElement consumes one element that is not data, if it has arrived whole.
// It consumes nothing when it fails.
func (r *Response) nextElement() (bool, error) {
	c := r.c
	b := c.unread()
	switch r.chunk {
	case chunkEnd:
		if !bytes.HasPrefix([]byte("\r\n"), b[:min(len(b), 2)]) {
			return false, malformed("chunk data does not end in CRLF")
		}
		if len(b) < 2 {
			return false, nil
		}
		c.r += 2
		r.chunk = chunkSize
		return true, nil

	case chunkSize:
		size, n, err := parseChunkLine(b)
		if n == 0 || err != nil {
			return false, err
		}
		// A sender of tiny chunks has five bytes of overhead per byte, which is
		// legitimate in a stream; endless extensions are not. The allowance is
		// net/http's.
		r.excess = max(r.excess+int64(n)-16-2*min(size, chunkExcessMax), 0)
		if r.excess > chunkExcessMax {
			return false, malformed("too much chunk overhead")
		}
		c.r += n
		r.left = size
		r.chunk = chunkData
		if size == 0 {
			r.chunk = chunkTrailer
		}
		return true, nil

	default: // chunkTrailer
		if len(b) >= 2 && b[0] == '\r' && b[1] == '\n' {
			c.r += 2
			r.chunk = chunkDone
			return true, nil
		}
		var scan headScan
		n, err := scan.scan(b)
		switch {
		case err != nil:
			return false, err
		case n > trailerMax || n == 0 && len(b) >= trailerMax:
			return false, malformed("trailer section is too long")
		case n == 0:
			return false, nil
		}
		trailer, err := parseFields(string(b[:n]))
		if err != nil {
			return false, err
		}
		for key := range trailer {
			if isFraming(key) {
				return false, malformed("framing field in the trailer section")
			}
		}
		r.Trailer = trailer
		c.r += n
		r.chunk = chunkDone
		return true, nil
	}
}

// parseChunkLine reads a chunk's size and skips its extensions. n is the
// length of the line with its CRLF, or 0 if it has not arrived whole.
func parseChunkLine(b []byte) (size int64, n int, err error) {
	digits := 0
	for digits < len(b) {
		d := unhex(b[digits])
		if d < 0 {
			break
		}
		if digits++; digits > 16 || size >= 1<<59 {
			return 0, 0, malformed("chunk size is too large")
		}
		size = size<<4 | int64(d)
	}
	if digits == len(b) {
		return 0, 0, nil
	}
	if digits == 0 || b[digits] != '\r' && b[digits] != ';' {
		return 0, 0, malformed("bad chunk size")
	}
	end := bytes.IndexByte(b[:min(len(b), chunkLineMax)], '\n')
	if end < 0 {
		if len(b) >= chunkLineMax {
			return 0, 0, malformed("chunk line is too long")
		}
		// The CR that ends the size must be followed by LF at once.
		if b[digits] == '\r' && len(b) > digits+1 {
			return 0, 0, malformed("bare CR in chunk line")
		}
		return 0, 0, nil
	}
	if b[end-1] != '\r' {
		return 0, 0, malformed("chunk line ends in a bare LF")
	}
	for _, c := range b[digits : end-1] {
		if chars[c]&valueChar == 0 {
			return 0, 0, malformed("control character in chunk extension")
		}
	}
	return size, end + 1, nil
}

func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// skipReceived passes over what is left of the body, without reading from the
// socket, and reports whether that was all.
func (r *Response) skipReceived() bool {
	c := r.c
	switch r.framing {
	case byLength:
		n := min(r.left, int64(c.w-c.r))
		c.r += int(n)
		r.left -= n
		return r.left == 0
	case byChunks:
		for r.chunk != chunkDone {
			if r.chunk == chunkData {
				n := min(r.left, int64(c.w-c.r))
				c.r += int(n)
				if r.left -= n; r.left > 0 {
					return false
				}
				r.chunk = chunkEnd
				continue
			}
			if ok, err := r.nextElement(); !ok || err != nil {
				return false
			}
		}
		return true
	}
	return false
}
