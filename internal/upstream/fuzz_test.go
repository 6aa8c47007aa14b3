// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"bufio"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// FuzzResponse compares this parser with net/http's. Goal: what we take for a
// complete answer net/http takes for the same answer, so that a peer can't show
// us one thing and a Go client behind us another. Method: both read the same
// bytes, ours in pieces of the given size. Refusing more is our right.
func FuzzResponse(f *testing.F) {
	for _, seed := range []string{
		reply("hello"),
		stream("hello", "world"),
		"HTTP/1.0 200 OK\r\n\r\nhello",
		"HTTP/1.1 100 Continue\r\n\r\n" + reply("hello"),
		"HTTP/1.1 204 No Content\r\n\r\n",
		"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
		"HTTP/1.1 200\r\nx-a: 1\r\nX-A:\t2 \r\npragma: no-cache\r\nconnection: close\r\ncontent-length: 005\r\n\r\nhello",
		"HTTP/1.1 200 OK\r\nTrailer: X\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
		"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
		"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffffffffffff\r\n",
	} {
		f.Add([]byte(seed), uint16(0), false)
		f.Add([]byte(seed), uint16(1), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, size uint16, head bool) {
		sameAnswer(t, string(data), int(size), head)
	})
}

// FuzzShapes is FuzzResponse on a richer diet: every byte stands for a fragment
// of HTTP, so that most inputs get past the status line.
func FuzzShapes(f *testing.F) {
	fragments := []string{"HTTP/1.1 200 OK\r\n", "HTTP/1.0 200 OK\r\n", "HTTP/1.1 100 C\r\n\r\n", "HTTP/1.1 204 \r\n",
		"HTTP/1.1 304\r\n", "\r\n", "\r", "\n", "0\r\n", "5\r\nhello\r\n", "5", "05", "hello", ";a=b", " ", "\t", ",", ":", "x",
		"Transfer-Encoding: chunked\r\n", "transfer-encoding:", "chunked", "Chunked", "identity", "gzip, ",
		"Content-Length: 5\r\n", "content-length:", "Connection: close\r\n", "connection: keep-alive\r\n", "connection: x, ClosE\r\n",
		"Trailer: X\r\n", "trailer: content-length\r\n", "X: y\r\n", "x: z \r\n", "X-A:\r\n", "Pragma: no-cache\r\n", " folded\r\n",
		"\x00", "\x80", "-", "+", "0x", "_", "f", "7fffffffffffffff", "\"", "\v", ";" + strings.Repeat("e", 900)}
	for _, seed := range []string{"\x00\x19\x05\x0c", "\x00\x13\x05\x09\x08\x20\x05", "\x02\x00\x13\x05\x09\x08\x05", "\x03\x19\x05", "\x01\x05\x0c"} {
		f.Add([]byte(seed), uint16(3), false)
	}
	f.Fuzz(func(t *testing.T, data []byte, size uint16, head bool) {
		var b strings.Builder
		for _, c := range data[:min(len(data), 100)] {
			b.WriteString(fragments[int(c)%len(fragments)])
		}
		sameAnswer(t, b.String(), int(size), head)
	})
}

// sameAnswer fails unless net/http reads an answer that we find complete, and
// reads the same.
func sameAnswer(t *testing.T, data string, size int, head bool) {
	req := get()
	if head {
		req.Method = "HEAD"
	}
	ours, body, end := do(t, cannedPool(t, cut(data, size)...), req)
	if end.Cause != Complete {
		if end.Cause != Malformed && end.Cause != ClosedFIN {
			t.Fatalf("bytes alone ended it as %v", end)
		}
		return
	}

	br := bufio.NewReader(strings.NewReader(data))
	var theirs *http.Response
	for theirs == nil || theirs.StatusCode < 200 {
		var err error
		if theirs, err = http.ReadResponse(br, &http.Request{Method: req.Method}); err != nil {
			t.Fatalf("we accept what net/http refuses: %v", err)
		}
	}
	theirBody, err := io.ReadAll(theirs.Body)
	if err != nil {
		t.Fatalf("we find whole what net/http finds broken: %v", err)
	}
	if ours.Status != theirs.StatusCode || body != string(theirBody) {
		t.Fatalf("status %d, theirs %d; body %q, theirs %q", ours.Status, theirs.StatusCode, body, theirBody)
	}
	sameHeader(t, ours.Header, theirs.Header)
	if ours.Chunked {
		sameHeader(t, ours.Trailer, theirs.Trailer)
	}
	if theirs.Close && !ours.Last {
		t.Fatal("we keep a connection that net/http closes")
	}
}

// cut cuts s into pieces of size bytes; 0 is one piece.
func cut(s string, size int) (pieces []string) {
	for size > 0 && len(s) > size {
		pieces, s = append(pieces, s[:size]), s[size:]
	}
	return append(pieces, s)
}

// sameHeader compares what net/http leaves as it came. It takes out framing
// fields, a Connection that says close, and adds Cache-Control to a Pragma.
func sameHeader(t *testing.T, ours, theirs http.Header) {
	t.Helper()
	for key, values := range ours {
		switch key {
		case "Transfer-Encoding", "Trailer", "Connection", "Content-Length":
			continue
		}
		if !slices.Equal(values, theirs[key]) {
			t.Fatalf("%s: %q, theirs %q", key, values, theirs[key])
		}
	}
	for key, values := range theirs {
		pragma := key == "Cache-Control" && len(ours["Pragma"]) > 0
		if _, ok := ours[key]; !ok && !pragma && values != nil {
			t.Fatalf("%s: %q is theirs alone", key, values)
		}
	}
}
