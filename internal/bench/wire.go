// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
)

// bigRead is the buffer of connections that carry large bodies.
const bigRead = 64 << 10

// incoming reads HTTP/1.1 messages from one side of a connection, as little of
// HTTP as a benchmark between known parts needs.
type incoming struct {
	conn  net.Conn
	buf   []byte // buf[r:w] is unread
	r, w  int
	at    int64  // when the latest read returned
	reads uint64 // that brought bytes
}

// messageHead is the head of a request or an answer. line is valid until the
// next read.
type messageHead struct {
	line    []byte
	length  int // -1: not said
	chunked bool
	close   bool
}

func (in *incoming) fill() error {
	switch {
	case in.r == in.w:
		in.r, in.w = 0, 0
	case in.w == len(in.buf):
		in.w = copy(in.buf, in.buf[in.r:in.w])
		in.r = 0
		if in.w == len(in.buf) {
			in.buf = append(in.buf, make([]byte, len(in.buf))...)
		}
	}
	n, err := in.conn.Read(in.buf[in.w:])
	if n == 0 {
		if err == nil {
			err = io.ErrNoProgress
		}
		return err
	}
	in.at = now()
	in.reads++
	in.w += n
	return nil
}

func (in *incoming) head() (messageHead, error) {
	end := -1
	for end < 0 {
		if end = bytes.Index(in.buf[in.r:in.w], []byte("\r\n\r\n")); end < 0 {
			if in.w-in.r > 64<<10 {
				return messageHead{}, errMessage
			}
			if err := in.fill(); err != nil {
				return messageHead{}, err
			}
		}
	}
	lines := in.buf[in.r : in.r+end]
	in.r += end + 4
	h := messageHead{length: -1}
	for first := true; len(lines) > 0; first = false {
		var line []byte
		line, lines, _ = bytes.Cut(lines, []byte("\r\n"))
		if first {
			h.line = line
			continue
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			n, err := strconv.Atoi(string(value))
			if err != nil || n < 0 {
				return h, errMessage
			}
			h.length = n
		case bytes.EqualFold(name, []byte("Transfer-Encoding")):
			h.chunked = true
		case bytes.EqualFold(name, []byte("Connection")):
			h.close = bytes.EqualFold(value, []byte("close"))
		}
	}
	return h, nil
}

// status is the status of an answer, 0 if the line is not one of HTTP/1.1.
func (h *messageHead) status() int {
	if len(h.line) < 12 || !bytes.HasPrefix(h.line, []byte("HTTP/1.1 ")) {
		return 0
	}
	return int(max(readDigits(h.line[9:12]), 0))
}

// body hands what the message's body holds to take, read by read.
func (in *incoming) body(h messageHead, take func(p []byte, at int64) error) error {
	switch {
	case h.chunked:
		return in.chunks(take)
	case h.length < 0 && h.close:
		return in.rest(take)
	}
	return in.span(max(h.length, 0), take)
}

// span hands on the next n bytes.
func (in *incoming) span(n int, take func(p []byte, at int64) error) error {
	for n > 0 {
		if in.r == in.w {
			if n >= bigRead && len(in.buf) < bigRead {
				in.buf = make([]byte, bigRead)
				in.r, in.w = 0, 0
			}
			if err := in.fill(); err != nil {
				return noEOF(err)
			}
		}
		k := min(n, in.w-in.r)
		if err := take(in.buf[in.r:in.r+k], in.at); err != nil {
			return err
		}
		in.r += k
		n -= k
	}
	return nil
}

func (in *incoming) rest(take func(p []byte, at int64) error) error {
	for {
		if err := take(in.buf[in.r:in.w], in.at); err != nil {
			return err
		}
		in.r = in.w
		if err := in.fill(); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func (in *incoming) chunks(take func(p []byte, at int64) error) error {
	for {
		line, err := in.line()
		if err != nil {
			return err
		}
		size, _, _ := bytes.Cut(line, []byte(";"))
		n, err := strconv.ParseUint(string(bytes.TrimSpace(size)), 16, 31)
		if err != nil {
			return fmt.Errorf("chunk size %q", clip(line))
		}
		if n == 0 {
			break
		}
		if err := in.span(int(n), take); err != nil {
			return err
		}
		if line, err = in.line(); err != nil {
			return err
		} else if len(line) > 0 {
			return fmt.Errorf("%q after a chunk", clip(line))
		}
	}
	for { // trailers
		if line, err := in.line(); err != nil || len(line) == 0 {
			return err
		}
	}
}

// line is the next line without its end, valid until the next read.
func (in *incoming) line() ([]byte, error) {
	for {
		if i := bytes.IndexByte(in.buf[in.r:in.w], '\n'); i >= 0 {
			line := in.buf[in.r : in.r+i]
			in.r += i + 1
			return bytes.TrimSuffix(line, []byte("\r")), nil
		}
		if in.w-in.r > 4<<10 {
			return nil, errMessage
		}
		if err := in.fill(); err != nil {
			return nil, noEOF(err)
		}
	}
}

// noEOF makes an end inside a body an error that says so.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
