// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/freeport"
)

func itoa(n int) string { return strconv.Itoa(n) }
func hex(n int) string  { return strconv.FormatInt(int64(n), 16) }

func TestDialErrorsAreClassified(t *testing.T) {
	op := func(err error) error {
		return &net.OpError{Op: "dial", Net: "tcp", Err: &os.SyscallError{Syscall: "connect", Err: err}}
	}
	for _, tt := range []struct {
		err  error
		want Cause
	}{
		{&net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", IsNotFound: true}}, DNSFailed},
		{&net.OpError{Op: "dial", Err: &net.DNSError{Err: "i/o timeout", IsTimeout: true}}, DNSFailed},
		{op(syscall.ECONNREFUSED), Refused},
		{fmt.Errorf("tunnel: %w", op(syscall.ECONNREFUSED)), Refused},
		{op(syscall.ETIMEDOUT), ConnectTimeout},
		{&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, ConnectTimeout},
		{context.DeadlineExceeded, ConnectTimeout},
		{op(syscall.EHOSTUNREACH), NoRoute},
		{op(syscall.ENETUNREACH), NoRoute},
		{op(syscall.ECONNRESET), Unwritten},
		{op(syscall.EMFILE), Failed},
	} {
		p := pool(t, "http://engine.test", dialed(nil, tt.err))
		_, _, end := do(t, p, post("{}"))
		if end.Cause != tt.want || !errors.Is(end, tt.err) {
			t.Errorf("%v: got %v, want %v", tt.err, end, tt.want)
		}
		if end.RequestWritten || end.ResponseStarted || end.Reused {
			t.Errorf("%v: evidence of an exchange: %+v", tt.err, end)
		}
	}
}

func TestRefusedByKernel(t *testing.T) {
	_, _, end := do(t, pool(t, "http://"+freeport.For(t)), post("{}"))
	if end.Cause != Refused {
		t.Fatalf("got %v", end)
	}
}

func TestConnectTimeout(t *testing.T) {
	p := pool(t, "http://engine.test", func(cfg *Config) {
		cfg.ConnectTimeout = time.Millisecond
		cfg.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}
		}
	})
	if _, _, end := do(t, p, post("{}")); end.Cause != ConnectTimeout {
		t.Fatalf("got %v", end)
	}
}

// TestCauses drives one exchange per row against a scripted engine on a fresh
// connection and compares all of the evidence.
func TestCauses(t *testing.T) {
	// More than the socket buffers of both sides take.
	huge := strings.Repeat("x", 20<<20)
	for _, tt := range []struct {
		name   string
		body   string
		script func(*peer)
		want   End
	}{
		{"FIN after the request", "{}", func(p *peer) { p.request() },
			End{Cause: ClosedFIN, RequestWritten: true}},
		{"RST after the request", "{}", func(p *peer) { p.request(); p.reset() },
			End{Cause: ClosedRST, RequestWritten: true}},
		{"RST in the upload", huge, func(p *peer) { p.br.Peek(1); p.reset() },
			End{Cause: Unwritten}},
		{"FIN in the upload", huge, func(p *peer) { p.br.Peek(1); p.CloseWrite(); <-p.t.Context().Done() },
			End{Cause: Unwritten}},
		{"FIN after an interim head", "{}", func(p *peer) { p.request(); p.say("HTTP/1.1 100 Continue\r\n\r\n") },
			End{Cause: ClosedFIN, RequestWritten: true, ResponseStarted: true}},
		{"FIN in the head", "{}", func(p *peer) { p.request(); p.say("HTTP/1.1 200 OK\r\nContent-") },
			End{Cause: ClosedFIN, RequestWritten: true, ResponseStarted: true}},
		{"FIN in a counted body", "{}", func(p *peer) { p.request(); p.say(reply("hello")[:len(reply("hello"))-1]) },
			End{Cause: ClosedFIN, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
		{"FIN in a chunk", "{}", func(p *peer) { p.request(); p.say(strings.TrimSuffix(stream("hello"), "lo\r\n0\r\n\r\n")) },
			End{Cause: ClosedFIN, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
		{"FIN between chunks", "{}", func(p *peer) { p.request(); p.say(strings.TrimSuffix(stream("hello"), "0\r\n\r\n")) },
			End{Cause: ClosedFIN, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
		{"FIN before the last CRLF", "{}", func(p *peer) { p.request(); p.say(strings.TrimSuffix(stream("hello"), "\r\n")) },
			End{Cause: ClosedFIN, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
		{"RST in a chunk", "{}", func(p *peer) {
			p.request()
			p.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel")
			p.reset()
		}, End{Cause: ClosedRST, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
		{"RST in a body that close delimits", "{}", func(p *peer) {
			p.request()
			p.say("HTTP/1.1 200 OK\r\n\r\nhel")
			p.reset()
		}, End{Cause: ClosedRST, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
		{"not HTTP, held open", "{}", func(p *peer) { p.say("SSH-2.0-x"); p.untilClosed() },
			End{Cause: Malformed, RequestWritten: true, ResponseStarted: true}},
		{"not HTTP in the upload", huge, func(p *peer) { p.say("+OK"); p.untilClosed() },
			End{Cause: Malformed, ResponseStarted: true}},
		{"bare LF, held open", "{}", func(p *peer) { p.say("HTTP/1.1 200 OK\n\n"); p.untilClosed() },
			End{Cause: Malformed, RequestWritten: true, ResponseStarted: true}},
		{"chunk garbage, held open", "{}", func(p *peer) {
			p.request()
			p.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloXX")
			p.untilClosed()
		}, End{Cause: Malformed, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
		{"complete", "{}", func(p *peer) { p.request(); p.say(reply("hello")) },
			End{Cause: Complete, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
		{"complete by close", "{}", func(p *peer) { p.request(); p.say("HTTP/1.1 200 OK\r\n\r\nhel") },
			End{Cause: Complete, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
		{"complete, 20 MiB", huge, func(p *peer) {
			if _, body := p.request(); string(body) != huge {
				p.t.Error("body differs")
			}
			p.say(stream("hello"))
		}, End{Cause: Complete, RequestWritten: true, ResponseStarted: true, HeadComplete: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := pool(t, engine(t, tt.script))
			_, _, end := do(t, p, post(tt.body))
			got := *end
			if got.Cause != Complete && got.Err == nil {
				t.Error("no Err")
			}
			// A row may reset while the head is still under way to us.
			got.Err = nil
			if tt.want.Cause == ClosedRST {
				got.ResponseStarted, got.HeadComplete = tt.want.ResponseStarted, tt.want.HeadComplete
			}
			// A reply that does not wait for the request may overtake it.
			if tt.want.Cause == Malformed {
				got.RequestWritten = tt.want.RequestWritten
			}
			if got != tt.want {
				t.Errorf("got  %+v (%v)\nwant %+v", got, end.Err, tt.want)
			}
		})
	}
}

// The peer answers a small request without reading it, and resets. Its answer
// is in our receive buffer before the reset and must be heard.
func TestAnswerBeforeResetIsHeard(t *testing.T) {
	p := pool(t, engine(t, func(p *peer) {
		p.br.Peek(1)
		p.say("HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		p.Close() // unread bytes in the receive buffer: the kernel sends RST
	}))
	resp, _ := mustDo(t, p, post(strings.Repeat("x", 60<<10)))
	if resp.Status != 413 {
		t.Fatalf("status %d", resp.Status)
	}
}

func TestEarlyAnswerStopsTheUpload(t *testing.T) {
	for _, closing := range []bool{true, false} {
		p := pool(t, engine(t, func(p *peer) {
			p.br.Peek(1)
			p.say("HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy")
			if !closing {
				// It neither reads on nor closes: only we can end this.
				p.SetReadBuffer(1)
				one := make([]byte, 1)
				for {
					if _, err := p.Read(one); err != nil {
						return
					}
				}
			}
		}))
		req := post(strings.Repeat("x", 10<<20), strings.Repeat("y", 10<<20))
		resp, body := mustDo(t, p, req)
		if resp.Status != 503 || body != "busy" {
			t.Errorf("closing %t: status %d, body %q", closing, resp.Status, body)
		}
		if resp.RequestWritten || resp.End().RequestWritten {
			t.Errorf("closing %t: RequestWritten", closing)
		}
		if s := p.Stats(); s.Idle != 0 {
			t.Errorf("closing %t: kept a connection with half a request on it", closing)
		}
		if len(req.Body) != 2 || len(req.Body[0]) != 10<<20 || len(req.Body[1]) != 10<<20 {
			t.Errorf("closing %t: the body was consumed", closing)
		}
	}
}

func TestTLS(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		fmt.Fprintf(w, "%s %d", req.Proto, len(body))
	}))
	defer srv.Close()
	roots := x509.NewCertPool()
	roots.AddCert(srv.Certificate())
	trust := func(cfg *Config) { cfg.TLS = &tls.Config{RootCAs: roots} }

	p := pool(t, srv.URL, trust)
	for i, size := range []int{10, 20 << 10, 300 << 10, 10} {
		resp, body := mustDo(t, p, post(strings.Repeat("x", size)))
		if want := fmt.Sprintf("HTTP/1.1 %d", size); body != want || resp.Reused != (i > 0) {
			t.Errorf("body %q, want %q; reused %t", body, want, resp.Reused)
		}
	}

	for name, p := range map[string]*Pool{
		"unknown authority": pool(t, srv.URL),
		"plain text":        pool(t, strings.Replace(engine(t, func(p *peer) { p.say("HTTP/1.1 400 Bad\r\n\r\n"); p.untilClosed() }), "http", "https", 1)),
		"FIN":               pool(t, strings.Replace(engine(t, func(p *peer) {}), "http", "https", 1)),
		"RST":               pool(t, strings.Replace(engine(t, func(p *peer) { p.br.Peek(1); p.reset() }), "http", "https", 1)),
		"silence": pool(t, strings.Replace(engine(t, (*peer).untilClosed), "http", "https", 1),
			func(cfg *Config) { cfg.ConnectTimeout = 20 * time.Millisecond }),
	} {
		if _, _, end := do(t, p, post("{}")); end.Cause != TLSFailed {
			t.Errorf("%s: got %v", name, end)
		}
	}
}

// Without close_notify nobody knows whether a body that close delimits is
// whole: anyone on the path can send a FIN.
func TestTLSCutIsNotAnEnd(t *testing.T) {
	srv := httptest.NewUnstartedServer(nil)
	srv.StartTLS()
	defer srv.Close()
	cert := srv.TLS.Certificates[0]
	roots := x509.NewCertPool()
	roots.AddCert(srv.Certificate())

	for _, goodbye := range []bool{true, false} {
		addr := engine(t, func(p *peer) {
			tc := tls.Server(p.TCPConn, &tls.Config{Certificates: []tls.Certificate{cert}})
			buf := make([]byte, 4096)
			tc.Read(buf)
			io.WriteString(tc, "HTTP/1.1 200 OK\r\n\r\nhalf")
			if goodbye {
				tc.CloseWrite()
			}
			p.CloseWrite()
			p.untilClosed()
		})
		p := pool(t, strings.Replace(addr, "http", "https", 1),
			func(cfg *Config) { cfg.TLS = &tls.Config{RootCAs: roots} })
		_, body, end := do(t, p, post("{}"))
		want := ClosedFIN
		if goodbye {
			want = Complete
		}
		if end.Cause != want || body != "half" {
			t.Errorf("goodbye %t: %v, body %q", goodbye, end, body)
		}
	}
}

// Bytes behind an answer, decrypted with it, must not answer the next request.
func TestTLSHiddenBytesEndTheConnection(t *testing.T) {
	srv := httptest.NewUnstartedServer(nil)
	srv.StartTLS()
	defer srv.Close()
	cert := srv.TLS.Certificates[0]
	roots := x509.NewCertPool()
	roots.AddCert(srv.Certificate())
	addr := engine(t, func(p *peer) {
		tc := tls.Server(p.TCPConn, &tls.Config{Certificates: []tls.Certificate{cert}, DynamicRecordSizingDisabled: true})
		buf := make([]byte, 4096)
		tc.Read(buf)
		// Head alone, then the body and a forged answer in one record: the body
		// is read past our buffer, straight to the caller.
		io.WriteString(tc, "HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n")
		io.WriteString(tc, strings.Repeat("x", 9000)+reply("forged"))
		tc.Read(buf)
		io.WriteString(tc, reply("honest"))
		p.untilClosed()
	})
	p := pool(t, strings.Replace(addr, "http", "https", 1),
		func(cfg *Config) { cfg.TLS = &tls.Config{RootCAs: roots} })
	resp, end := p.Do(t.Context(), post("{}"))
	if end != nil {
		t.Fatal(end)
	}
	if _, err := io.ReadFull(resp, make([]byte, 9000)); err != nil {
		t.Fatal(err)
	}
	if _, err := resp.Read(make([]byte, 1)); err != io.EOF || p.Stats().Idle != 0 {
		t.Fatalf("err %v, %+v", err, p.Stats())
	}
}

func TestInvalidRequestsAreNotDialled(t *testing.T) {
	p := pool(t, "http://engine.test", func(cfg *Config) {
		cfg.Dial = func(context.Context, string, string) (net.Conn, error) {
			t.Error("dialled")
			return nil, io.EOF
		}
	})
	with := func(change func(*Request)) *Request {
		req := post("{}")
		change(req)
		return req
	}
	header := func(name, value string) *Request {
		return with(func(r *Request) { r.Header = append(r.Header, Field{name, value}) })
	}
	for _, req := range []*Request{
		with(func(r *Request) { r.Method = "" }),
		with(func(r *Request) { r.Method = "GET " }),
		with(func(r *Request) { r.Method = "CONNECT" }),
		with(func(r *Request) { r.Target = "" }),
		with(func(r *Request) { r.Target = "http://other/" }),
		with(func(r *Request) { r.Target = "/a b" }),
		with(func(r *Request) { r.Target = "/a\r\nX: y" }),
		with(func(r *Request) { r.Target = "/a#b" }),
		with(func(r *Request) { r.Target = "/\x80" }),
		with(func(r *Request) { r.Host = "a\r\nX: y" }),
		with(func(r *Request) { r.Host = "a/b" }),
		header("", "x"),
		header("a b", "x"),
		header("a:", "x"),
		header("X", "a\rb"),
		header("X", "a\nb"),
		header("X", "a\x00b"),
		header("content-length", "2"),
		header("Transfer-Encoding", "chunked"),
		header("connection", "close"),
		header("Expect", "100-continue"),
		header("host", "x"),
		header("te", "trailers"),
		header("Upgrade", "h2c"),
	} {
		if _, _, end := do(t, p, req); end.Cause != InvalidRequest || end.Err == nil {
			t.Errorf("%+v: got %v", req, end)
		}
	}
}

// What reading and writing report depends on which of them met a reset first;
// the cause may not.
func TestBrokenCause(t *testing.T) {
	reset, pipe, late := syscall.ECONNRESET, syscall.EPIPE, os.ErrDeadlineExceeded
	started := End{RequestWritten: true, ResponseStarted: true}
	for _, tt := range []struct {
		end        End
		rerr, werr error
		want       Cause
	}{
		{started, io.EOF, nil, ClosedFIN},
		{started, io.EOF, late, ClosedFIN}, // we stopped the writer ourselves
		{started, io.EOF, reset, ClosedRST},
		{started, io.EOF, pipe, ClosedRST},
		{started, reset, nil, ClosedRST},
		{started, late, nil, Timeout},
		{started, late, late, Timeout},
		{started, late, pipe, ClosedRST},
		{started, syscall.EIO, nil, Failed},
		{End{RequestWritten: true}, io.EOF, nil, ClosedFIN},
		{End{}, io.EOF, nil, Unwritten},
		{End{}, late, syscall.EIO, Unwritten},
		{End{}, late, nil, Timeout},
		{End{Reused: true}, io.EOF, nil, Stale},
		{End{Reused: true}, io.EOF, pipe, Stale},
		{End{Reused: true, RequestWritten: true}, reset, nil, Stale},
		{End{Reused: true, RequestWritten: true, ResponseStarted: true}, reset, nil, ClosedRST},
		{End{Reused: true}, syscall.EIO, nil, Failed},
		{started, malformed("x"), nil, Malformed},
	} {
		if got, _ := brokenCause(&tt.end, tt.rerr, tt.werr); got != tt.want {
			t.Errorf("%+v, read %v, write %v: %v, want %v", tt.end, tt.rerr, tt.werr, got, tt.want)
		}
	}
}
