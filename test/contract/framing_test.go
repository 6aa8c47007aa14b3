// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

const smuggledBody = `{"model":"m","prompt":"smuggled"}`

var smuggled = rawPost("/v1/completions", smuggledBody)

// SEC-4: a request whose framing two servers may read differently is refused,
// or reaches the engine once, framed anew. What hides behind it never does.
func TestAmbiguousFramingSmugglesNothing(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	const head = "POST " + chat + " HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
	chunked := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(plainChat), plainChat)
	n := len(plainChat)

	for _, c := range []struct {
		name, text string
		served     bool // 200 is right as well as 400
	}{
		{"length then chunked", head + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n%s", len(chunked)+len(smuggled), chunked), true},
		{"chunked then length", head + fmt.Sprintf("Transfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n%s", len(chunked)+len(smuggled), chunked), true},
		{"length that ends inside the chunked body", head + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked, true},
		{"two lengths", head + fmt.Sprintf("Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s", n, n+len(smuggled), plainChat), false},
		{"two lengths, the larger first", head + fmt.Sprintf("Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s", n+len(smuggled), n, plainChat), false},
		{"two lengths in one line", head + fmt.Sprintf("Content-Length: %d, %d\r\n\r\n%s", n, n+1, plainChat), false},
		{"two equal lengths", head + fmt.Sprintf("Content-Length: %d\r\nContent-Length: %d\r\n\r\n%s", n, n, plainChat), true},
		{"length is no number, and chunked", head + "Content-Length: abc\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked, true},
		{"length is no number", head + "Content-Length: abc\r\n\r\n" + plainChat, false},
		{"length is negative", head + "Content-Length: -1\r\n\r\n" + plainChat, false},
		{"length has a sign", head + fmt.Sprintf("Content-Length: +%d\r\n\r\n%s", n, plainChat), false},
		{"length is hexadecimal", head + fmt.Sprintf("Content-Length: 0x%x\r\n\r\n%s", n, plainChat), false},
		{"length has a blank inside", head + fmt.Sprintf("Content-Length: %d %d\r\n\r\n%s", n, n, plainChat), false},
		{"length is empty", head + "Content-Length:\r\n\r\n" + plainChat, false},
		{"length overflows", head + "Content-Length: 18446744073709551617\r\n\r\n" + plainChat, false},
		{"length has underscores", head + "Content-Length: 1_0\r\n\r\n" + plainChat, false},
		{"chunked in two lines", head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked, false},
		{"chunked twice", head + "Transfer-Encoding: chunked, chunked\r\n\r\n" + chunked, false},
		{"chunked is not last", head + "Transfer-Encoding: chunked, identity\r\n\r\n" + chunked, false},
		{"xchunked", head + "Transfer-Encoding: xchunked\r\n\r\n" + chunked, false},
		{"xchunked and length", head + fmt.Sprintf("Transfer-Encoding: xchunked\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"identity and length", head + fmt.Sprintf("Transfer-Encoding: identity\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"gzip, chunked", head + "Transfer-Encoding: gzip, chunked\r\n\r\n" + chunked, false},
		{"chunked in quotes", head + "Transfer-Encoding: \"chunked\"\r\n\r\n" + chunked, false},
		{"chunked behind a vertical tab", head + "Transfer-Encoding: \vchunked\r\n\r\n" + chunked, false},
		{"chunked behind a tab", head + "Transfer-Encoding:\tchunked\r\n\r\n" + chunked, true},
		{"Chunked in capitals", head + "Transfer-Encoding: CHUNKED\r\n\r\n" + chunked, true},
		{"blank before the colon of chunked", head + fmt.Sprintf("Transfer-Encoding : chunked\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"blank before the colon of length", head + fmt.Sprintf("Content-Length : %d\r\n\r\n%s", n, plainChat), false},
		{"folded encoding", head + "Transfer-Encoding:\r\n chunked\r\n\r\n" + chunked, true},
		{"folded header", head + fmt.Sprintf("X-A: b\r\n c\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), true},
		{"folded first header", "POST " + chat + " HTTP/1.1\r\n Host: gateway\r\n" + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"leading CR in a value", head + fmt.Sprintf("Content-Length: \r%d\r\n\r\n%s", n, plainChat), false},
		{"CR in a value", head + fmt.Sprintf("X-A: b\rContent-Length: 4\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"NUL in a value", head + fmt.Sprintf("X-A: b\x00c\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"NUL in a name", head + fmt.Sprintf("X-A\x00: b\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"header without a name", head + fmt.Sprintf(": b\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"header without a colon", head + fmt.Sprintf("X-A\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"bare LF in the head", strings.ReplaceAll(head, "\r\n", "\n") + fmt.Sprintf("Content-Length: %d\n\n%s", n, plainChat), true},
		{"bare LF in chunk sizes", head + fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\n%s\r\n0\r\n\r\n", n, plainChat), true},
		{"chunk size is negative", head + "Transfer-Encoding: chunked\r\n\r\n-1\r\n" + plainChat + "\r\n0\r\n\r\n", false},
		{"chunk size has a prefix", head + fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n0x%x\r\n%s\r\n0\r\n\r\n", n, plainChat), false},
		{"chunk size is no number", head + "Transfer-Encoding: chunked\r\n\r\nzz\r\n" + plainChat + "\r\n0\r\n\r\n", false},
		{"chunk size overflows", head + fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n1%016x\r\n%s\r\n0\r\n\r\n", n, plainChat), false},
		{"chunk size is empty", head + "Transfer-Encoding: chunked\r\n\r\n\r\n" + plainChat + "\r\n0\r\n\r\n", false},
		{"chunk is longer than its size", head + fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", n-2, plainChat), false},
		{"chunk extension", head + fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x;a=b\r\n%s\r\n0\r\n\r\n", n, plainChat), true},
		{"trailers", head + fmt.Sprintf("Transfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n%x\r\n%s\r\n0\r\nX-T: 1\r\nContent-Length: 3\r\n\r\n", n, plainChat), true},
		{"no host", "POST " + chat + " HTTP/1.1\r\nContent-Type: application/json\r\n" + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"two hosts", head + fmt.Sprintf("Host: other\r\nContent-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"blank in the host", strings.Replace(head, "gateway", "a b", 1) + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"chunked in HTTP/1.0", strings.Replace(head, "1.1", "1.0", 1) + "Transfer-Encoding: chunked\r\n\r\n" + chunked, true},
		{"HTTP/1.9", strings.Replace(head, "1.1", "1.9", 1) + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", n, plainChat), true},
		{"HTTP/3.0", strings.Replace(head, "1.1", "3.0", 1) + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"request line of one word", "POST\r\nHost: gateway\r\n\r\n", false},
		{"blanks in the target", strings.Replace(head, chat, chat+" HTTP/1.1 x", 1) + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", n, plainChat), false},
		{"TLS hello", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", false},
		{"absolute target of elsewhere", strings.Replace(head, chat, "http://127.0.0.1:1"+chat, 1) + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", n, plainChat), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := len(e.requests())
			w := g.dial(t)
			// It all comes in one write; an early refusal may end the connection.
			_, _ = io.WriteString(w, c.text+smuggled)
			res, err := w.head("POST")
			status := 0
			if err == nil {
				a := whole(res)
				status = a.status
			}
			// A connection that goes on may carry the second request openly: then
			// both sides agree on where the first ended.
			w.rest(200 * time.Millisecond)
			w.Close()
			g.stillServes(t)

			got := e.requests()[before:]
			got = got[:len(got)-1]
			var first, second int
			for _, x := range got {
				switch {
				case x.err != nil:
					t.Errorf("the engine got a broken request: %v", x.err)
				case x.body == plainChat && x.target == chat:
					first++
				case x.body == smuggledBody:
					second++
				default:
					t.Errorf("the engine got %q with body %q", x.head, x.body)
				}
				if strings.Contains(x.head, "\x00") || strings.Contains(strings.ReplaceAll(x.head, "\r\n", ""), "\r") {
					t.Errorf("the engine got %q", x.head)
				}
			}
			switch {
			case status == http.StatusOK && !c.served:
				t.Errorf("answered 200; the engine got %d requests", len(got))
			case status == http.StatusOK && first != 1:
				t.Errorf("answered 200, but the engine got the request %d times", first)
			case status != http.StatusOK && len(got) > 0:
				t.Errorf("answered %d, but the engine got %d requests", status, len(got))
			case status != http.StatusOK && (status < 400 || status >= 500) && status != 501 && status != 505:
				t.Errorf("answered %d (%v)", status, err)
			case second > 0 && !separate[c.name]:
				t.Errorf("the smuggled request reached the engine")
			}
		})
	}
}

// separate are the cases in which all servers agree where the first request
// ends, so that what follows is a pipelined request and not a smuggled one.
var separate = map[string]bool{
	"two equal lengths": true, "chunked behind a tab": true, "Chunked in capitals": true, "folded encoding": true,
	"folded header": true, "bare LF in the head": true, "bare LF in chunk sizes": true, "chunk extension": true,
	"trailers": true, "absolute target of elsewhere": true, "HTTP/1.9": true,
}

// A request's trailers are no headers of the request that the engine gets.
func TestRequestTrailersDoNotBecomeHeaders(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	w := g.dial(t)
	w.send(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\nTrailer: Authorization, X-T\r\n\r\n%x\r\n%s\r\n0\r\nAuthorization: Bearer stolen\r\nX-T: 1\r\n\r\n", chat, len(plainChat), plainChat))
	if a := w.answer("POST"); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	x := e.last(t)
	if strings.Contains(x.head, "stolen") || x.header["x-t"] != nil || x.header["trailer"] != nil {
		t.Errorf("the engine got %q", x.head)
	}
}

func TestHTTP10ClientGetsAWholeAnswer(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	for _, body := range []string{plainChat, streamed} {
		w := g.dial(t)
		w.send(strings.Replace(rawPost(chat, body), "HTTP/1.1", "HTTP/1.0", 1))
		res, err := w.head("POST")
		if err != nil {
			t.Fatal(err)
		}
		if te := res.TransferEncoding; len(te) > 0 || res.ContentLength < 0 && !res.Close {
			t.Errorf("framed as %v, length %d, close %v", te, res.ContentLength, res.Close)
		}
		want := plain
		if body == streamed {
			want = role + delta("a") + delta("b") + finish + done
		}
		if a := whole(res); a.status != 200 || a.body != want {
			t.Errorf("%d %q", a.status, a.body)
		}
		if rest, ended := w.rest(patience); !ended || rest != "" {
			t.Errorf("after the answer: %q, ended %v", rest, ended)
		}
	}
}

func TestPipelinedRequestsAreAnsweredInOrder(t *testing.T) {
	t.Parallel()
	e := newEngine(t, func(x *exchange) {
		x.json(200, strings.Replace(plain, `"ab"`, `"`+x.header["x-n"][0]+`"`, 1))
	})
	g := serve(t, e, "")
	w := g.dial(t)
	const n = 20
	var all strings.Builder
	for i := range n {
		all.WriteString(rawPost(chat, plainChat, fmt.Sprintf("X-N: %d", i)))
	}
	w.send(all.String())
	for i := range n {
		if a := w.answer("POST"); a.status != 200 || !strings.Contains(a.body, fmt.Sprintf(`"content":"%d"`, i)) {
			t.Fatalf("answer %d: %d %s", i, a.status, a.body)
		}
	}
	if got := len(e.requests()); got != n {
		t.Errorf("the engine got %d requests", got)
	}
}

func TestHeadHasNoBody(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	for _, path := range []string{"/v1/models", "/healthz", "/readyz", chat, "/nothing"} {
		t.Run(path, func(t *testing.T) {
			w := g.dial(t)
			w.send("HEAD " + path + " HTTP/1.1\r\nHost: gateway\r\n\r\n" + rawPost(chat, plainChat))
			if a := w.answer("HEAD"); a.status >= 500 {
				t.Errorf("%d", a.status)
			}
			// With a body in between, this one would not be understood.
			if a := w.answer("POST"); a.status != 200 || a.body != plain {
				t.Errorf("the next request: %d %s", a.status, a.body)
			}
		})
	}
	if got := len(e.requests()); got != 5 {
		t.Errorf("the engine got %d requests, want 5", got)
	}
}

func TestConnectAndTraceAndOptionsAreRefused(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	for _, line := range []string{
		"CONNECT 127.0.0.1:1 HTTP/1.1", "CONNECT " + chat + " HTTP/1.1", "TRACE " + chat + " HTTP/1.1", "OPTIONS * HTTP/1.1",
		"get " + chat + " HTTP/1.1", "PRI /x HTTP/1.1",
	} {
		t.Run(line, func(t *testing.T) {
			w := g.dial(t)
			w.send(line + "\r\nHost: gateway\r\nAuthorization: Bearer secret\r\n\r\n")
			method, _, _ := strings.Cut(line, " ")
			if method == "CONNECT" {
				method = "GET" // of an answer to a refused CONNECT, the body is read
			}
			a := w.answer(method)
			if method != "OPTIONS" && (a.status < 400 || a.status >= 500 && a.status != 501) {
				t.Errorf("%d %s", a.status, a.body)
			}
			if strings.Contains(a.body, "secret") {
				t.Errorf("the request is echoed: %s", a.body)
			}
		})
	}
	if got := e.requests(); len(got) != 0 {
		t.Errorf("the engine got %q", got[0].head)
	}
}

// HTP-6.
func TestExpectContinue(t *testing.T) {
	t.Parallel()
	body := strings.Replace(plainChat, `"hi"`, `"`+strings.Repeat("a", 2<<20)+`"`, 1)
	head := func(n int) string {
		return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", chat, n)
	}
	t.Run("the body follows on 100", func(t *testing.T) {
		e := newEngine(t, nil)
		g := serve(t, e, "")
		w := g.dial(t)
		w.send(head(len(body)))
		res, err := w.head("POST")
		if err != nil || res.StatusCode != 100 {
			t.Fatalf("%v %v", res, err)
		}
		w.send(body)
		if a := w.answer("POST"); a.status != 200 || a.body != plain {
			t.Errorf("%d %s", a.status, a.body)
		}
		x := e.last(t)
		if x.body != body {
			t.Error("another body at the engine")
		}
		if x.header["expect"] != nil {
			t.Errorf("the engine got Expect: %v", x.header["expect"])
		}
	})
	t.Run("refused without 100", func(t *testing.T) {
		e := newEngine(t, nil)
		g := serve(t, e, "")
		w := g.dial(t)
		w.send(head(100 << 20))
		res, err := w.head("POST")
		if err != nil {
			t.Fatal(err)
		}
		whole(res).refusal(t, 413, "request_too_large", false)
	})
	for name, c := range map[string]struct {
		from, to, code string
		status         int
	}{
		"unknown path":     {"POST " + chat, "POST /nothing", "not_found", 404},
		"wrong media type": {"application/json", "text/plain", "unsupported_media_type", 415},
		"key, no journal":  {"Host: gateway", "Host: gateway\r\nIdempotency-Key: k", "idempotency_unavailable", 400},
		"gzip":             {"Host: gateway", "Host: gateway\r\nContent-Encoding: gzip", "unsupported_media_type", 415},
	} {
		t.Run("what the head decides needs no body: "+name, func(t *testing.T) {
			g := serve(t, newEngine(t, nil), "")
			w := g.dial(t)
			w.send(strings.Replace(head(1000), c.from, c.to, 1))
			res, err := w.head("POST")
			if err != nil {
				t.Fatal(err)
			}
			if res.StatusCode != 100 {
				whole(res).refusal(t, c.status, c.code, false)
			}
		})
	}
	t.Run("the engine answers before the body", func(t *testing.T) {
		e := newEngine(t, nil)
		const tooLarge = `{"error":{"message":"too large","type":"invalid_request_error","code":413}}`
		e.early = func(x *exchange) bool {
			if !strings.Contains(x.head, "X-Early") {
				return false
			}
			x.json(413, tooLarge, "Connection: close")
			// What the gateway still sends is read, or RST would overtake the answer.
			x.gone()
			return true
		}
		g := serve(t, e, "")
		w := g.dial(t)
		w.send(strings.Replace(head(len(body)), "Expect", "X-Early: 1\r\nExpect", 1))
		if res, err := w.head("POST"); err != nil || res.StatusCode != 100 {
			t.Fatalf("%v %v", res, err)
		}
		w.send(body)
		if a := w.answer("POST"); a.status != 413 || a.body != tooLarge {
			t.Errorf("%d %s", a.status, a.body)
		}
		g.stillServes(t)
	})
	t.Run("the client leaves instead of sending", func(t *testing.T) {
		e := newEngine(t, nil)
		g := serve(t, e, "")
		w := g.dial(t)
		w.send(head(len(body)))
		if _, err := w.head("POST"); err != nil {
			t.Fatal(err)
		}
		w.Close()
		g.stillServes(t)
		if n := len(e.requests()); n != 1 {
			t.Errorf("the engine got %d requests", n)
		}
	})
	t.Run("another expectation", func(t *testing.T) {
		e := newEngine(t, nil)
		g := serve(t, e, "")
		w := g.dial(t)
		w.send(rawPost(chat, plainChat, "Expect: miracles"))
		if a := w.answer("POST"); a.status != 417 && a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
	})
}
