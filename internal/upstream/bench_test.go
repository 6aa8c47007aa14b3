// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// benchEngine answers every request of a known length with answer, with as
// little work as it can.
func benchEngine(b *testing.B, answer string) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				out := []byte(answer)
				br := bufio.NewReaderSize(c, 8<<10)
				for {
					for {
						line, err := br.ReadSlice('\n')
						if err != nil {
							return
						}
						if len(line) == 2 {
							break
						}
					}
					if _, err := br.Discard(benchBody); err != nil {
						return
					}
					c.Write(out)
				}
			}()
		}
	}()
	return "http://" + ln.Addr().String()
}

const (
	benchBody   = 1 << 10
	benchAnswer = "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 09:00:00 GMT\r\nserver: uvicorn\r\n" +
		"content-type: application/json\r\nx-request-id: 0123456789abcdef\r\ncontent-length: 300\r\n\r\n"
)

// BenchmarkRoundTrip is one POST of 1 KiB and its answer of 300 bytes over
// loopback, with a cancellable context.
func BenchmarkRoundTrip(b *testing.B) {
	addr := benchEngine(b, benchAnswer+strings.Repeat("x", 300))
	payload := bytes.Repeat([]byte("x"), benchBody)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	buf := make([]byte, 4<<10)

	b.Run("client=headgate", func(b *testing.B) {
		p := pool(b, addr)
		req := &Request{Method: "POST", Target: "/v1/chat/completions",
			Header: []Field{{"Content-Type", "application/json"}, {"X-Request-Id", "0123456789abcdef"}},
			Body:   [][]byte{payload}}
		b.ReportAllocs()
		for b.Loop() {
			resp, end := p.Do(ctx, req)
			if end != nil {
				b.Fatal(end)
			}
			for {
				if _, err := resp.Read(buf); err == io.EOF {
					break
				} else if err != nil {
					b.Fatal(err)
				}
			}
			resp.Close()
		}
	})
	b.Run("client=nethttp", func(b *testing.B) {
		tr := &http.Transport{DisableCompression: true}
		defer tr.CloseIdleConnections()
		b.ReportAllocs()
		for b.Loop() {
			req, err := http.NewRequestWithContext(ctx, "POST", addr+"/v1/chat/completions", bytes.NewReader(payload))
			if err != nil {
				b.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("X-Request-Id", "0123456789abcdef")
			resp, err := tr.RoundTrip(req)
			if err != nil {
				b.Fatal(err)
			}
			for {
				if _, err := resp.Body.Read(buf); err == io.EOF {
					break
				} else if err != nil {
					b.Fatal(err)
				}
			}
			resp.Body.Close()
		}
	})
}

// endless is a connection that gives head once and then chunk at every read.
type endless struct {
	canned
	head, chunk []byte
}

func (e *endless) Read(p []byte) (int, error) {
	if e.head != nil {
		n := copy(p, e.head)
		e.head = nil
		return n, nil
	}
	return copy(p, e.chunk), nil
}

// BenchmarkStreamRead is the cost per streamed chunk of 240 bytes, one per
// read, without the system calls; an idle limit is moved at every chunk.
func BenchmarkStreamRead(b *testing.B) {
	head := []byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
	chunk := []byte(chunked("data: " + strings.Repeat("x", 232) + "\n\n"))
	buf := make([]byte, 4<<10)

	b.Run("client=headgate", func(b *testing.B) {
		p := pool(b, "http://engine.test", dialed(&endless{head: head, chunk: chunk}, nil))
		resp, end := p.Do(b.Context(), get())
		if end != nil {
			b.Fatal(end)
		}
		defer resp.Close()
		deadline := time.Now().Add(time.Hour)
		b.ReportAllocs()
		b.SetBytes(240)
		for b.Loop() {
			deadline = deadline.Add(time.Millisecond)
			resp.SetReadDeadline(deadline)
			if n, err := resp.Read(buf); n != 240 || err != nil {
				b.Fatal(n, err)
			}
		}
	})
	b.Run("client=nethttp", func(b *testing.B) {
		resp, err := http.ReadResponse(bufio.NewReader(&endless{head: head, chunk: chunk}), nil)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		b.SetBytes(240)
		for b.Loop() {
			if n, err := resp.Body.Read(buf); n != 240 || err != nil {
				b.Fatal(n, err)
			}
		}
	})
}
