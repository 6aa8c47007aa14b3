// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// twin is a second engine that does what the first one does and keeps its
// record with the first one's.
func twin(t *testing.T, e *engine) *engine {
	return newEngine(t, func(x *exchange) {
		e.mu.Lock()
		e.got = append(e.got, x)
		e.mu.Unlock()
		e.answer(x)
	}, e.models...)
}

func hasIPv6() bool {
	ln, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		return false
	}
	ln.Close()
	return true
}

func h2Only(t *testing.T, tr *http.Transport, clear bool) *http.Client {
	tr.Protocols = new(http.Protocols)
	if clear {
		tr.Protocols.SetUnencryptedHTTP2(true)
	} else {
		tr.Protocols.SetHTTP2(true)
	}
	tr.DisableCompression = true
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// h2c speaks HTTP/2 without TLS, by prior knowledge.
func h2c(t *testing.T) *http.Client { return h2Only(t, &http.Transport{}, true) }

func roundTrip(t *testing.T, c *http.Client, url, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	res := within(t, "an answer's head", func() *http.Response {
		res, err := c.Do(req)
		if err != nil {
			t.Error(err)
			return nil
		}
		return res
	})
	if res == nil {
		t.FailNow()
	}
	return res
}

// certificate makes a key pair for 127.0.0.1.
func certificate(t *testing.T) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "gateway"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, kind string, b []byte) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	pool.AddCert(parsed)
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", keyDER), pool
}

// overHTTP2 runs a test over h2c and over TLS.
func overHTTP2(t *testing.T, config string, test func(*testing.T, *gateway, *http.Client, string)) {
	t.Run("h2c", func(t *testing.T) {
		g := start(t, config)
		test(t, g, h2c(t), "http://"+g.addr)
	})
	t.Run("TLS", func(t *testing.T) {
		cert, key, roots := certificate(t)
		g := start(t, fmt.Sprintf("listeners: [{name: main, address: 127.0.0.1:0, tls: {cert: %q, key: %q}}]\n%s", cert, key, config))
		test(t, g, h2Only(t, &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}, false), "https://"+g.addr)
	})
}

func TestHTTP2(t *testing.T) {
	t.Parallel()
	begun := role + delta("a")
	next := make(chan struct{})
	gone := make(chan bool, 1)
	e := newEngine(t, func(x *exchange) {
		switch {
		case strings.Contains(x.head, "X-Do: break"):
			x.stream()
			x.chunk(begun)
			x.reset()
		case strings.Contains(x.head, "X-Do: hold"):
			if x.streams() {
				x.stream()
				x.chunk(begun)
			}
			gone <- x.gone()
		case strings.Contains(x.head, "X-Do: step"):
			x.stream()
			x.chunk(begun)
			select {
			case <-next:
			case <-x.done:
			}
			x.chunk(finish + done)
			x.end()
		default:
			x.usual()
		}
	})
	overHTTP2(t, "pools:\n"+pool("p", "", e), func(t *testing.T, g *gateway, c *http.Client, base string) {
		do := func(ctx context.Context, body, what string) (*http.Response, error) {
			req, err := http.NewRequestWithContext(ctx, "POST", base+chat, strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("X-Do", what)
			return c.Do(req)
		}
		t.Run("plain", func(t *testing.T) {
			res := roundTrip(t, c, base+chat, plainChat)
			if res.ProtoMajor != 2 {
				t.Errorf("%s", res.Proto)
			}
			same(t, whole(res), 200, plain)
		})
		t.Run("stream, promptly", func(t *testing.T) {
			res, err := do(t.Context(), streamed, "step")
			if err != nil {
				t.Fatal(err)
			}
			first := within(t, "the first delta", func() string { s, _ := readUntil(res.Body, delta("a")); return s })
			next <- struct{}{}
			a := within(t, "the rest", func() answer { return whole(res) })
			a.body = first + a.body
			same(t, a, 200, begun+finish+done)
		})
		t.Run("error event", func(t *testing.T) {
			res, err := do(t.Context(), streamed, "break")
			if err != nil {
				t.Fatal(err)
			}
			if got := whole(res).interrupted(t); got != begun {
				t.Errorf("before it: %q", got)
			}
		})
		t.Run("refusals", func(t *testing.T) {
			whole(roundTrip(t, c, base+chat, `{"model":`)).refusal(t, 400, "invalid_json", false)
			whole(roundTrip(t, c, base+"/nothing", plainChat)).refusal(t, 404, "not_found", false)
			g.stillServesAt(t, c, base)
		})
		t.Run("too large, by length and without", func(t *testing.T) {
			before := len(e.requests())
			for _, length := range []int64{100 << 20, -1} {
				req, err := http.NewRequestWithContext(t.Context(), "POST", base+chat, io.LimitReader(zeros{}, 100<<20))
				if err != nil {
					t.Fatal(err)
				}
				req.ContentLength = length
				req.Header.Set("Content-Type", "application/json")
				within(t, "413", func() answer {
					res, err := c.Do(req)
					if err != nil {
						return answer{err: err}
					}
					return whole(res)
				}).refusal(t, 413, "request_too_large", false)
			}
			if n := len(e.requests()) - before; n != 0 {
				t.Errorf("the engine got %d requests", n)
			}
			g.stillServesAt(t, c, base)
		})
		t.Run("CAN-1 RST_STREAM cancels a plain request", func(t *testing.T) {
			before := len(e.requests())
			ctx, cancel := context.WithCancel(t.Context())
			over := make(chan error, 1)
			go func() {
				res, err := do(ctx, plainChat, "hold")
				if err == nil {
					res.Body.Close()
				}
				over <- err
			}()
			eventually(t, "the request at the engine", func() bool { return len(e.requests()) > before })
			cancel()
			if err := receive(t, "the client's end", over); err == nil {
				t.Error("an answer")
			}
			if !receive(t, "the engine's connection ends", gone) {
				t.Error("the engine was not told")
			}
		})
		t.Run("RST_STREAM cancels a stream", func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			res, err := do(ctx, streamed, "hold")
			if err != nil {
				t.Fatal(err)
			}
			within(t, "the first delta", func() string { s, _ := readUntil(res.Body, delta("a")); return s })
			cancel()
			res.Body.Close()
			if !receive(t, "the engine's connection ends", gone) {
				t.Error("the engine was not told")
			}
			g.stillServesAt(t, c, base) // the connection lives on
		})
		t.Run("many at once", func(t *testing.T) {
			const n = 50
			bodies := make(chan string, n)
			for range n {
				go func() {
					res, err := do(t.Context(), streamed, "")
					if err != nil {
						bodies <- err.Error()
						return
					}
					bodies <- whole(res).body
				}()
			}
			for range n {
				if got := receive(t, "an answer", bodies); got != role+delta("a")+delta("b")+finish+done {
					t.Errorf("%q", got)
				}
			}
		})
	})
}

// zeros is a body without end that is blank JSON.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func (g *gateway) stillServesAt(t *testing.T, c *http.Client, base string) {
	t.Helper()
	same(t, whole(roundTrip(t, c, base+chat, plainChat)), 200, plain)
}

// failover.md 2: a committed plain answer whose engine dies is cut with
// RST_STREAM, or a client would take the part for the whole.
func TestHTTP2CutBodyIsNoCleanEnd(t *testing.T) {
	t.Parallel()
	large := strings.Replace(plain, `"ab"`, `"`+strings.Repeat("a", 1<<20)+`"`, 1)
	for _, framing := range []string{"length", "chunked"} {
		t.Run(framing, func(t *testing.T) {
			half := make(chan struct{}, 1)
			e := newEngine(t, func(x *exchange) {
				if framing == "length" {
					x.write(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(large), large[:512<<10]))
				} else {
					x.stream("Content-Type: application/json")
					x.chunk(large[:512<<10])
				}
				select {
				case <-half:
				case <-x.done:
				}
				x.reset()
			})
			overHTTP2(t, "pools:\n"+pool("p", "collect_max: 64KiB", e), func(t *testing.T, _ *gateway, c *http.Client, base string) {
				res := roundTrip(t, c, base+chat, plainChat)
				first := make([]byte, 100<<10)
				if err := within(t, "the committed part", func() error { _, err := io.ReadFull(res.Body, first); return err }); err != nil {
					t.Fatal(err)
				}
				half <- struct{}{}
				rest := within(t, "the end", func() answer { return whole(res) })
				if rest.err == nil {
					t.Errorf("a cut answer of %d bytes ended cleanly", len(first)+len(rest.body))
				}
			})
		})
	}
}

// One listener speaks both protocols over TLS.
func TestHTTP1OverTLS(t *testing.T) {
	t.Parallel()
	cert, key, roots := certificate(t)
	e := newEngine(t, nil)
	g := start(t, fmt.Sprintf("listeners: [{name: main, address: 127.0.0.1:0, tls: {cert: %q, key: %q}}]\npools:\n%s", cert, key, pool("p", "", e)))
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableCompression: true, Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(true)
	defer tr.CloseIdleConnections()
	res := roundTrip(t, &http.Client{Transport: tr}, "https://"+g.addr+chat, streamed)
	if res.ProtoMajor != 1 {
		t.Error(res.Proto)
	}
	same(t, whole(res), 200, role+delta("a")+delta("b")+finish+done)
}
