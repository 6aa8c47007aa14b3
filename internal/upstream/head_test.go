// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

// asPieces gives b at once, byte by byte, and in halves.
func asPieces(b string) [][]string {
	return [][]string{{b}, strings.Split(b, ""), {b[:len(b)/2], b[len(b)/2:]}}
}

func TestHeadsAccepted(t *testing.T) {
	for _, tt := range []struct {
		name, in, body string
		method         string
		want           *Response
	}{
		{name: "counted", in: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", body: "hi",
			want: &Response{Status: 200, Reason: "OK", ContentLength: 2, Header: http.Header{"Content-Length": {"2"}}}},
		{name: "chunked", in: "HTTP/1.1 200 OK\r\ntransfer-encoding:CHUNKED\r\n\r\n2\r\nhi\r\n0\r\n\r\n", body: "hi",
			want: &Response{Status: 200, Reason: "OK", ContentLength: -1, Chunked: true, Header: http.Header{"Transfer-Encoding": {"CHUNKED"}}}},
		{name: "by close", in: "HTTP/1.1 200 OK\r\n\r\nhi", body: "hi",
			want: &Response{Status: 200, Reason: "OK", ContentLength: -1, CloseDelimited: true, Last: true, Header: http.Header{}}},
		{name: "HTTP/1.0", in: "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi", body: "hi",
			want: &Response{Status: 200, Reason: "OK", ContentLength: 2, Last: true, Header: http.Header{"Connection": {"keep-alive"}, "Content-Length": {"2"}}}},
		{name: "no reason", in: "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",
			want: &Response{Status: 200, ContentLength: 0, Header: http.Header{"Content-Length": {"0"}}}},
		{name: "empty reason", in: "HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n",
			want: &Response{Status: 200, ContentLength: 0, Header: http.Header{"Content-Length": {"0"}}}},
		{name: "connection tokens", in: "HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 0\r\n\r\n",
			want: &Response{Status: 200, Reason: "OK", Last: true, Header: http.Header{"Connection": {"x, Close"}, "Content-Length": {"0"}}}},
		{name: "fields", in: "HTTP/1.1 200 OK\r\nx-a: \t one \t\r\nX-A:two\r\nX-Empty:\r\nContent-Length: 0\r\n\r\n",
			want: &Response{Status: 200, Reason: "OK", Header: http.Header{"X-A": {"one", "two"}, "X-Empty": {""}, "Content-Length": {"0"}}}},
		{name: "interim", in: "HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\nHTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
			want: &Response{Status: 200, Reason: "OK", Header: http.Header{"Content-Length": {"0"}}}},
		{name: "HEAD", method: "HEAD", in: "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
			want: &Response{Status: 200, Reason: "OK", ContentLength: 5, Header: http.Header{"Content-Length": {"5"}}}},
		{name: "204", in: "HTTP/1.1 204 No Content\r\n\r\n",
			want: &Response{Status: 204, Reason: "No Content", ContentLength: -1, Header: http.Header{}}},
		{name: "204 that announces a body", in: "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
			want: &Response{Status: 204, Reason: "No Content", ContentLength: 5, Last: true, Header: http.Header{"Content-Length": {"5"}}}},
		{name: "304", in: "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
			want: &Response{Status: 304, Reason: "Not Modified", ContentLength: 5, Header: http.Header{"Content-Length": {"5"}}}},
		{name: "trailers", in: "HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx-sum: 7\r\n\r\n", body: "hi",
			want: &Response{Status: 200, Reason: "OK", ContentLength: -1, Chunked: true, Trailer: http.Header{"X-Sum": {"7"}},
				Header: http.Header{"Trailer": {"X-Sum"}, "Transfer-Encoding": {"chunked"}}}},
		{name: "chunk extensions", in: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0002;a=\"b\"\r\nhi\r\n000;x\r\n\r\n", body: "hi",
			want: &Response{Status: 200, Reason: "OK", ContentLength: -1, Chunked: true, Header: http.Header{"Transfer-Encoding": {"chunked"}}}},
	} {
		for i, pieces := range asPieces(tt.in) {
			req := get()
			req.Method = or(tt.method, req.Method)
			resp, body := mustDo(t, cannedPool(t, pieces...), req)
			if body != tt.body {
				t.Errorf("%s/%d: body %q, want %q", tt.name, i, body, tt.body)
			}
			got := &Response{Status: resp.Status, Reason: resp.Reason, Header: resp.Header, ContentLength: resp.ContentLength,
				Chunked: resp.Chunked, CloseDelimited: resp.CloseDelimited, Last: resp.Last, Trailer: resp.Trailer}
			if diff := cmp.Diff(tt.want, got, cmp.FilterPath(unexported, cmp.Ignore())); diff != "" {
				t.Errorf("%s/%d (-want +got):\n%s", tt.name, i, diff)
			}
		}
	}
}

func unexported(p cmp.Path) bool {
	f, ok := p.Last().(cmp.StructField)
	return ok && f.Name() != "" && f.Name()[0] >= 'a'
}

// Shapes by which a parser can be made to disagree with another about where an
// answer ends, and others that are not HTTP (SEC-4). All are followed by enough
// bytes, so that only a refusal can end the exchange.
func TestHeadsRefused(t *testing.T) {
	ok := "HTTP/1.1 200 OK\r\n"
	for _, in := range []string{
		"\r\n" + ok + "Content-Length: 0\r\n\r\n",
		"\n",
		"http/1.1 200 OK\r\n\r\n",
		"HTTP/2.0 200 OK\r\n\r\n",
		"HTTP/1.2 200 OK\r\n\r\n",
		"HTTP/1.10 200 OK\r\n\r\n",
		"HTTP/1.1  200 OK\r\n\r\n",
		"HTTP/1.1\t200 OK\r\n\r\n",
		"HTTP/1.1 20 OK\r\n\r\n",
		"HTTP/1.1 2000 OK\r\n\r\n",
		"HTTP/1.1 +20 OK\r\n\r\n",
		"HTTP/1.1 099 OK\r\n\r\n",
		"HTTP/1.1 600 OK\r\n\r\n",
		"HTTP/1.1 200 O\x00K\r\n\r\n",
		"HTTP/1.1 200 O\rK\r\n\r\n",
		"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
		"HTTP/1.1 200 OK\n\n",
		ok + "X: y\n\r\n",
		ok + "X: y\r\r\n\r\n",
		ok + "X: a\rContent-Length: 5\r\n\r\n",
		ok + "X : y\r\n\r\n",
		ok + " X: y\r\n\r\n",
		ok + "X: y\r\n folded\r\n\r\n",
		ok + "X: y\r\n\tfolded\r\n\r\n",
		ok + "no colon\r\n\r\n",
		ok + ": no name\r\n\r\n",
		ok + "X\x80: y\r\n\r\n",
		ok + "X: a\x00b\r\n\r\n",
		ok + "X: a\x7fb\r\n\r\n",
		ok + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
		ok + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
		ok + "Content-Length: 5, 5\r\n\r\nhello",
		ok + "Content-Length: +5\r\n\r\nhello",
		ok + "Content-Length: -5\r\n\r\nhello",
		ok + "Content-Length: 0x5\r\n\r\nhello",
		ok + "Content-Length: 5 5\r\n\r\nhello",
		ok + "Content-Length: abc\r\n\r\nhello",
		ok + "Content-Length:\r\n\r\nhello",
		ok + "Content-Length: 9223372036854775808\r\n\r\nhello",
		ok + "Content-Length: 99999999999999999999\r\n\r\nhello",
		ok + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
		ok + "Content-Length: abc\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding: identity\r\n\r\nhello",
		ok + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding: \rchunked\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n",
		ok + "Transfer-Encoding:\r\n\r\n0\r\n\r\n",
		"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		ok + "Trailer: Content-Length\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		ok + "X: " + strings.Repeat("y", headMaxDefault) + "\r\n\r\n",
		ok + strings.Repeat("X: y\r\n", headMaxDefault/6),
		strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 1+headMaxDefault/25),
		"HTTP/1.1 200 " + strings.Repeat("y", headMaxDefault),
	} {
		for i, pieces := range asPieces(in) {
			if len(in) > 1000 && i == 1 {
				continue // every byte on its own is slow, and says no more
			}
			_, _, end := do(t, cannedPool(t, slices.Concat(pieces, []string{strings.Repeat("z", 100)})...), get())
			if end.Cause != Malformed || end.HeadComplete || !end.ResponseStarted {
				t.Errorf("%.60q/%d: got %+v", in, i, end)
			}
		}
	}
}

func TestChunksRefused(t *testing.T) {
	ok := "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
	for _, in := range []string{
		"\r\nhello",
		" 5\r\nhello\r\n0\r\n\r\n",
		"5 \r\nhello\r\n0\r\n\r\n",
		"5\t;x\r\nhello\r\n0\r\n\r\n",
		"+5\r\nhello\r\n0\r\n\r\n",
		"-5\r\nhello\r\n0\r\n\r\n",
		"0x5\r\nhello\r\n0\r\n\r\n",
		"5_0\r\nhello\r\n0\r\n\r\n",
		"g\r\n",
		"5\nhello\r\n0\r\n\r\n",
		"5;x\nhello\r\n0\r\n\r\n",
		"5;a\rb\r\nhello\r\n0\r\n\r\n",
		"5;a\x00b\r\nhello\r\n0\r\n\r\n",
		"5\rhello\r\n0\r\n\r\n",
		"5\r\nhello0\r\n\r\n",
		"5\r\nhello\n0\r\n\r\n",
		"5\r\nhello\r0\r\n\r\n",
		"5\r\nhello, too long\r\n0\r\n\r\n",
		"8000000000000000\r\n",
		"ffffffffffffffff\r\n",
		"10000000000000000\r\n",
		"00000000000000005\r\nhello\r\n0\r\n\r\n",
		"5;" + strings.Repeat("x", chunkLineMax) + "\r\nhello\r\n0\r\n\r\n",
		strings.Repeat("1;"+strings.Repeat("x", 900)+"\r\ny\r\n", 20) + "0\r\n\r\n",
		"0\r\nX : y\r\n\r\n",
		"0\r\nX: y\n\r\n",
		"0\r\n folded: y\r\n\r\n",
		"0\r\nContent-Length: 5\r\n\r\n",
		"0\r\nTransfer-Encoding: chunked\r\n\r\n",
		"0\r\nX: " + strings.Repeat("y", trailerMax) + "\r\n\r\n",
		"0\r\n" + strings.Repeat("X: y\r\n", trailerMax/6+1) + "\r\n",
	} {
		for i, pieces := range asPieces(ok + in) {
			_, _, end := do(t, cannedPool(t, slices.Concat(pieces, []string{strings.Repeat("z", 2000)})...), get())
			if end.Cause != Malformed || !end.HeadComplete {
				t.Errorf("%.60q/%d: got %+v", in, i, end)
			}
		}
	}
}

func TestHeadOfManyBuffersIsAccepted(t *testing.T) {
	value := strings.Repeat("y", 40<<10)
	in := "HTTP/1.1 200 OK\r\nX: " + value + "\r\nContent-Length: 2\r\n\r\nhi"
	for _, pieces := range [][]string{{in}, {in[:9000], in[9000:]}} {
		resp, body := mustDo(t, cannedPool(t, pieces...), get())
		if resp.Header.Get("X") != value || body != "hi" {
			t.Fatalf("field of %d bytes, body %q", len(resp.Header.Get("X")), body)
		}
	}
}

// Read is a well-behaved io.Reader for every framing and piece size.
func TestBodiesAreReadersOfTheirContent(t *testing.T) {
	content := strings.Repeat("0123456789abcdef", 4<<10)
	var parts []string
	for i, rest := 1, content; rest != ""; i = i*2%977 + 1 {
		k := min(i, len(rest))
		parts, rest = append(parts, rest[:k]), rest[k:]
	}
	for name, in := range map[string]string{
		"counted":       reply(content),
		"chunked":       stream(parts...),
		"one big chunk": stream(content),
		"by close":      "HTTP/1.1 200 OK\r\n\r\n" + content,
	} {
		for _, size := range []int{1, 7, 1000, 8191, 1 << 20} {
			var pieces []string
			for i := 0; i < len(in); i += size {
				pieces = append(pieces, in[i:min(i+size, len(in))])
			}
			resp, end := cannedPool(t, pieces...).Do(t.Context(), get())
			if end != nil {
				t.Fatal(end)
			}
			if err := iotest.TestReader(resp, []byte(content)); err != nil {
				t.Errorf("%s in pieces of %d: %v", name, size, err)
			}
			resp.Close()
		}
	}
}
