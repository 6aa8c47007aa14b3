// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"strconv"
	"time"
)

// Shape is what one request and its answer look like.
type Shape struct {
	Stream      bool          `json:"stream"`
	PromptBytes int           `json:"prompt_bytes"`
	Tokens      int           `json:"tokens"`      // of an answer; not streamed: about as many bytes
	EventBytes  int           `json:"event_bytes"` // of one token's event
	Interval    time.Duration `json:"interval_ns"` // between tokens; 0: as fast as they can be written
}

// script is one answer, known byte for byte to the engine that sends it and the
// client that checks it. All of it follows from what the request says but the
// times, which have a fixed width, and two checksums near the end: of the prompt
// as the engine got it, and of every byte of the stream before it.
type script struct {
	id       uint64
	tokens   int
	interval time.Duration

	role  []byte // the first event
	event []byte // a token's event
	usage []byte

	roleAt, numberAt, timeAt int // where digits stand in role and event
}

const (
	timeDigits   = 19
	numberDigits = 7
	created      = `"created":1700000000,"model":"bench"`
	endMarker    = "data: [DONE]\n\n"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// requestBody is a chat completion request. What the engine must know stands in
// "user", which proxies pass as it is.
func requestBody(shape Shape, model string, id uint64) []byte {
	b := fmt.Appendf(nil, `{"model":%q,"stream":%t,`, model, shape.Stream)
	if shape.Stream {
		b = append(b, `"stream_options":{"include_usage":true},`...)
	}
	b = fmt.Appendf(b, `"max_tokens":%07d,"user":"bench %016x %07d %d %d","messages":[{"role":"user","content":"`,
		1000000+shape.Tokens, id, shape.Tokens, int64(shape.Interval), shape.EventBytes)
	return append(appendPrompt(b, shape.PromptBytes), `"}]}`...)
}

const prose = "The gate at the head of a channel is opened when the field is dry and shut when the river is high. "

func appendPrompt(b []byte, n int) []byte {
	for n > 0 {
		k := min(n, len(prose))
		b = append(b, prose[:k]...)
		n -= k
	}
	return b
}

// readRequest finds what requestBody wrote, in a body that may have been edited
// around it.
func readRequest(body []byte) (id uint64, shape Shape, prompt uint32, err error) {
	user, ok := member(body, `"user":"bench `)
	if !ok {
		return 0, shape, 0, fmt.Errorf("no user field of this benchmark")
	}
	content, ok := member(body, `"content":"`)
	if !ok {
		return 0, shape, 0, fmt.Errorf("no prompt")
	}
	f := bytes.Fields(user)
	if len(f) != 4 {
		return 0, shape, 0, fmt.Errorf("user field %q", user)
	}
	var numbers [3]int64
	if id, err = strconv.ParseUint(string(f[0]), 16, 64); err != nil {
		return 0, shape, 0, err
	}
	for i := range numbers {
		if numbers[i], err = strconv.ParseInt(string(f[i+1]), 10, 64); err != nil {
			return 0, shape, 0, err
		}
	}
	shape = Shape{
		Stream: bytes.Contains(body[:min(len(body), 256)], []byte(`"stream":true`)),
		Tokens: int(numbers[0]), Interval: time.Duration(numbers[1]), EventBytes: int(numbers[2]),
	}
	return id, shape, crc32.Checksum(content, castagnoli), nil
}

// member is what follows a member's begin up to the next quote.
func member(body []byte, begin string) ([]byte, bool) {
	i := bytes.Index(body, []byte(begin))
	if i < 0 {
		return nil, false
	}
	rest := body[i+len(begin):]
	end := bytes.IndexByte(rest, '"')
	return rest[:max(end, 0)], end >= 0
}

func newScript(id uint64, shape Shape) *script {
	s := &script{id: id, tokens: shape.Tokens, interval: shape.Interval}
	begin := fmt.Sprintf(`data: {"id":"chatcmpl-%016x","object":"chat.completion.chunk",`+created, id)

	s.role = append(s.role, begin+`,"system_fingerprint":"`...)
	s.roleAt = len(s.role)
	s.role = append(s.role, digits(timeDigits)+
		`","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`+"\n\n"...)

	s.event = append(s.event, begin+`,"choices":[{"index":0,"delta":{"content":"`...)
	s.numberAt = len(s.event)
	s.timeAt = s.numberAt + numberDigits + 1
	const end = `"},"finish_reason":null}]}` + "\n\n"
	s.event = append(s.event, digits(numberDigits)+" "+digits(timeDigits)+" "...)
	s.event = append(appendPrompt(s.event, shape.EventBytes-len(s.event)-len(end)), end...)

	s.usage = fmt.Appendf(nil, `%s,"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":%d}}`+"\n\n",
		begin, s.tokens, s.tokens+1)
	return s
}

// first is the event before any token, with the time at which the request was
// there.
func (s *script) first(received int64) []byte {
	putDigits(s.role[s.roleAt:s.roleAt+timeDigits], received)
	return s.role
}

// token is the event of token k, counted from 0. It is overwritten by the next.
func (s *script) token(k int, sent int64) []byte {
	putDigits(s.event[s.numberAt:s.numberAt+numberDigits], int64(k))
	putDigits(s.event[s.timeAt:s.timeAt+timeDigits], sent)
	return s.event
}

// finish is the event with the finish reason and the checksums.
func (s *script) finish(prompt, stream uint32) []byte {
	return fmt.Appendf(nil, `data: {"id":"chatcmpl-%016x","object":"chat.completion.chunk",`+created+
		`,"system_fingerprint":"%08x%08x","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`+"\n\n", s.id, prompt, stream)
}

// whole is an answer that is not streamed.
func (s *script) whole(received, sent int64, prompt uint32) []byte {
	b := fmt.Appendf(nil, `{"id":"chatcmpl-%016x","object":"chat.completion",`+created+
		`,"system_fingerprint":"%019d %019d %08x","choices":[{"index":0,"message":{"role":"assistant","content":"`, s.id, received, sent, prompt)
	b = appendPrompt(b, s.tokens)
	return fmt.Appendf(b, `"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":%d}}`, s.tokens, s.tokens+1)
}

func digits(n int) string { return "0000000000000000000"[:n] }

func putDigits(b []byte, v int64) {
	for i := len(b) - 1; i >= 0; i-- {
		b[i] = byte('0' + v%10)
		v /= 10
	}
}

// readDigits is -1 for anything but digits.
func readDigits(b []byte) int64 {
	v := int64(0)
	for _, c := range b {
		if c < '0' || c > '9' {
			return -1
		}
		v = v*10 + int64(c-'0')
	}
	return v
}
