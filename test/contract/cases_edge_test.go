// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"crypto/sha256"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// RTY-13: engines ask for a pause, in seconds or with a date. They get it,
// clients are told how long, and when it is over they are asked again.
func TestPauseThatEnginesAskForIsKeptInBothForms(t *testing.T) {
	t.Parallel()
	date := func(d time.Duration) string { return time.Now().Add(d).UTC().Format(http.TimeFormat) }
	for _, status := range []int{429, 503} {
		for form, value := range map[string]func(time.Duration) string{
			"seconds": func(d time.Duration) string { return strconv.Itoa(int(d / time.Second)) },
			"date":    date,
			"asctime": func(d time.Duration) string { return time.Now().Add(d).UTC().Format(time.ANSIC) },
		} {
			t.Run(fmt.Sprint(status, " ", form), func(t *testing.T) {
				t.Parallel()
				e := newEngine(t, func(x *exchange) { x.json(status, `{"error":"busy"}`, "Retry-After: "+value(20*time.Second)) })
				g := start(t, "pools:\n"+pool("p", "failover: {before_first_delta: {max_attempts: 3}}", e, twin(t, e)))
				for i := range 20 {
					a := g.post(t, chat, plainChat)
					if a.status != status && (i == 0 || a.status != 429) {
						t.Errorf("request %d: %d %s", i, a.status, a.body)
					}
					if n, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || n < 1 || n > 20 {
						t.Errorf("request %d: Retry-After: %q", i, a.header.Get("Retry-After"))
					}
				}
				if n := len(e.requests()); n != 2 {
					t.Errorf("%d requests reached the two engines within their pause", n)
				}
			})
		}
	}
	t.Run("over", func(t *testing.T) {
		t.Parallel()
		var asked atomic.Int32
		var until atomic.Int64
		e := newEngine(t, func(x *exchange) {
			if asked.Add(1) <= 1 {
				at := time.Now().Add(2 * time.Second).Truncate(time.Second) // in at least one second
				until.Store(at.UnixNano())
				x.json(429, `{"error":"busy"}`, "Retry-After: "+at.UTC().Format(http.TimeFormat))
				return
			}
			if early := time.Until(time.Unix(0, until.Load())); early > 0 {
				t.Errorf("asked again %v too early", early)
			}
			x.usual()
		})
		g := serve(t, e, "")
		eventually(t, "the engine serves again", func() bool { return g.post(t, chat, plainChat).status == 200 })
		if n := asked.Load(); n != 2 {
			t.Errorf("it was asked %d times", n)
		}
	})
}

// HTP-2: what follows an answer without a body, on either side, is the next
// answer and never a part of this one, whatever its head says of a length.
func TestAnswersWithoutABodyKeepConnectionsInStep(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"204 No Content\r\n\r\n",
		"204 No Content\r\nContent-Length: 0\r\n\r\n",
		"204 No Content\r\nContent-Length: 9\r\n\r\n",
		"204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n",
		"204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"204 No Content\r\n\r\n{\"p\":\"X\"}",
		"205 Reset Content\r\nContent-Length: 0\r\n\r\n",
		"304 Not Modified\r\nContent-Length: 300\r\n\r\n",
		"304 Not Modified\r\nETag: \"x\"\r\n\r\n",
		"200 OK\r\nContent-Type: application/json\r\nContent-Length: 0\r\n\r\n",
		"200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"400 Bad Request\r\nContent-Length: 0\r\n\r\n",
	} {
		for _, request := range []string{plainChat, streamed} {
			t.Run(strings.ReplaceAll(text, "\r\n", "|"), func(t *testing.T) {
				t.Parallel()
				e := newEngine(t, func(x *exchange) {
					if strings.Contains(x.head, "X-Odd") {
						x.write("HTTP/1.1 " + text)
						return
					}
					x.usual()
				})
				g := serve(t, e, "failover: {before_first_delta: {max_attempts: 1}}")
				w := g.dial(t)
				for range 3 {
					w.send(rawPost(chat, request, "X-Odd: 1"))
					a := w.answer("POST")
					switch {
					case a.err != nil:
						t.Errorf("%d %v", a.status, a.err)
					case a.header.Get("Headgate-Reason") != "":
						a.refusal(t, 502, "upstream_failed", true)
					case fmt.Sprint(a.status) != text[:3] || a.body != "" || a.status == 200:
						t.Errorf("%d %v %q", a.status, a.header, a.body)
					case a.status == 204 && (a.header.Get("Content-Length") != "" || a.header.Get("Transfer-Encoding") != ""):
						t.Errorf("204 with %v", a.header)
					}
					w.send(rawPost(chat, plainChat))
					if b := w.answer("POST"); b.status != 200 || b.body != plain {
						t.Fatalf("the next answer: %d %q", b.status, b.body)
					}
				}
			})
		}
	}
}

// HTP-6: whoever answers, and when, a client that waits for 100 gets it or a
// final status.
func TestExpectationsNeverHang(t *testing.T) {
	t.Parallel()
	big := strings.Replace(plainChat, `"hi"`, `"`+strings.Repeat("a", 2<<20)+`"`, 1)
	expect := func(body string) string { return rawPost(chat, body, "Expect: 100-continue") }
	head := func(text string) string { return text[:strings.Index(text, "\r\n\r\n")+4] }
	t.Run("shed", func(t *testing.T) {
		e := newEngine(t, func(x *exchange) { x.json(429, `{"error":"busy"}`, "Retry-After: 20") })
		g := serve(t, e, "")
		g.post(t, chat, plainChat)
		w := g.dial(t)
		w.send(head(expect(big)))
		res, err := w.head("POST")
		if err != nil {
			t.Fatal(err)
		}
		if res.StatusCode == 100 { // the model is in the body
			w.send(big)
			if res, err = w.head("POST"); err != nil {
				t.Fatal(err)
			}
		}
		whole(res).refusal(t, 429, "shed", true)
		if n := len(e.requests()); n != 1 {
			t.Errorf("the engine got %d requests", n)
		}
	})
	t.Run("the engine refuses and closes without reading", func(t *testing.T) {
		e := newEngine(t, nil)
		e.early = func(x *exchange) bool {
			if !strings.Contains(x.body, "aaa") && len(x.header["content-length"]) == 1 && len(x.header["content-length"][0]) > 5 {
				x.json(413, `{"error":"too large"}`, "Connection: close")
				x.fin()
				return true
			}
			return false
		}
		g := serve(t, e, "")
		for range 10 {
			w := g.dial(t)
			w.send(head(expect(big)))
			if res, err := w.head("POST"); err != nil || res.StatusCode != 100 {
				t.Fatalf("%v %v", res, err)
			}
			w.send(big)
			// RST may overtake the engine's answer; then nobody has it.
			if a := w.answer("POST"); a.status != 413 && a.header.Get("Headgate-Reason") != "upstream_failed" {
				t.Errorf("%d %s", a.status, a.body)
			}
			g.stillServes(t)
		}
	})
	t.Run("the body comes without waiting", func(t *testing.T) {
		g := serve(t, newEngine(t, nil), "")
		w := g.dial(t)
		w.send(expect(plainChat) + expect(plainChat))
		same(t, w.answer("POST"), 200, plain)
		same(t, w.answer("POST"), 200, plain)
	})
	t.Run("chunked", func(t *testing.T) {
		e := newEngine(t, nil)
		g := serve(t, e, "")
		w := g.dial(t)
		w.send("POST " + chat + " HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nExpect: 100-Continue\r\nTransfer-Encoding: chunked\r\n\r\n")
		if res, err := w.head("POST"); err != nil || res.StatusCode != 100 {
			t.Fatalf("%v %v", res, err)
		}
		w.send(fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(plainChat), plainChat))
		same(t, w.answer("POST"), 200, plain)
		if x := e.last(t); x.body != plainChat || x.header["expect"] != nil {
			t.Errorf("the engine got %q", x.head)
		}
	})
	t.Run("HTTP/1.0 knows no 100", func(t *testing.T) {
		g := serve(t, newEngine(t, nil), "")
		w := g.dial(t)
		w.send(strings.Replace(expect(plainChat), "HTTP/1.1", "HTTP/1.0", 1))
		res, err := w.head("POST")
		if err != nil {
			t.Fatal(err)
		}
		same(t, whole(res), 200, plain)
	})
	t.Run("HTTP/2", func(t *testing.T) {
		e := newEngine(t, nil)
		g := serve(t, e, "")
		tr := &http.Transport{ExpectContinueTimeout: patience}
		c := h2Only(t, tr, true)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+g.addr+chat, strings.NewReader(big))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Expect", "100-continue")
		a := within(t, "an answer", func() answer {
			res, err := c.Do(req)
			if err != nil {
				return answer{err: err}
			}
			return whole(res)
		})
		same(t, a, 200, plain)
		if x := e.last(t); x.body != big || x.header["expect"] != nil {
			t.Errorf("the engine got %q and %d bytes", x.head, len(x.body))
		}
	})
	t.Run("many that never send", func(t *testing.T) {
		e := newEngine(t, nil)
		g := serve(t, e, "")
		for range 50 {
			w := g.dial(t)
			w.send(head(expect(big)))
			if res, err := w.head("POST"); err != nil || res.StatusCode != 100 {
				t.Fatalf("%v %v", res, err)
			}
			defer w.Close()
		}
		g.stillServes(t)
		if n := len(e.requests()); n != 1 {
			t.Errorf("the engine got %d requests", n)
		}
	})
}

// ERR-3: an id is decoded once, so that ids which look encoded are found, and no
// other spelling is.
func TestModelIDsAreDecodedOnce(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil, "m", "org/name", "org%2Fname", "a:b@v1.0", "..", "x y")
	g := serve(t, e, "")
	for target, id := range map[string]string{
		"org/name": "org/name", "org%2Fname": "org/name", "%6Frg/name": "org/name", "org%252Fname": "org%2Fname",
		"a:b@v1.0": "a:b@v1.0", "a%3Ab%40v1.0": "a:b@v1.0", "x%20y": "x y", "x+y": "", "org%25252Fname": "", "org%2Fname%2F": "",
		"org%2F%2Fname": "", "%6D/": "", "m%00": "", "m%2F..%2Fm": "", "m/../m": "", "org%5Cname": "", "%2e%2e%2fmodels%2fm": "",
	} {
		w := g.dial(t)
		w.send("GET /v1/models/" + target + " HTTP/1.1\r\nHost: gateway\r\n\r\n")
		a := w.answer("GET")
		w.Close()
		if id == "" {
			if a.status != 404 && a.status != 400 {
				t.Errorf("%s: %d %s", target, a.status, a.body)
			}
			continue
		}
		if a.status != 200 || !strings.Contains(a.body, fmt.Sprintf(`"id":%q`, id)) {
			t.Errorf("%s: %d %s, want %s", target, a.status, a.body, id)
		}
	}
	if got := e.requests(); len(got) != 0 {
		t.Errorf("the engine got %q", got[0].head)
	}
}

// ERR-3: no way to write a path leads to one of the engine's own.
func TestEncodedPathsLeadNowhereElse(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	for _, target := range []string{
		"/v1/chat%2Fcompletions", "/v1/chat/completions%2F", "/v1/chat/completions%2F..%2F..%2F..%2Fsleep", "/v1/chat/completions/..%2fembeddings",
		"/%2e%2e/sleep", "/v1/%2e%2e/sleep", "/v1/chat/%2e%2e/%2e%2e/sleep", "/v1/chat/completions;/../../../sleep", "/v1/chat/completions%00",
		"/v1/chat/completions%23", "/v1/chat/completions%3Fa=b", "/v1/chat/completions%20", "//sleep", "/v1/chat/completions%0d%0aX-Evil:%201",
		"/v1/%63hat/completions", "/v1\\chat\\completions", "/v1/chat/completions%c0%af", "/v1/chat/completions%2", "/sleep%2f..%2fv1/chat/completions",
	} {
		w := g.dial(t)
		w.send(rawPost(target, plainChat))
		a := w.answer("POST")
		w.Close()
		decoded, err := url.PathUnescape(target)
		if a.status != 404 && a.status != 400 && (a.status != 200 || err != nil || decoded != chat) {
			t.Errorf("%s: %d %s", target, a.status, a.body)
		}
	}
	// Another spelling of a path that is served is that path, in the one form.
	for _, x := range e.requests() {
		if x.target != chat {
			t.Errorf("the engine got %q", x.head)
		}
	}
}

// SEC-6: who writes priorities, objectives or another's fairness id gains
// nothing: it is not passed on, the tenant is its key's, and others are served.
// A priority in the body is the engine's own parameter and reaches it untouched.
func TestClaimedPrioritiesGainNothing(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := start(t, fmt.Sprintf("keys:\n- {id: one, secret_sha256: %x, tenant: one}\n- {id: two, secret_sha256: %x, tenant: two}\npools:\n",
		sha256.Sum256([]byte("key-one")), sha256.Sum256([]byte("key-two")))+pool("p", "", e))
	names := []string{
		"x-llm-d-inference-objective", "X-Gateway-Inference-Objective", "HEADGATE-OBJECTIVE", "x-llm-d-inference-fairness-id",
		"X-GATEWAY-INFERENCE-FAIRNESS-ID", "Headgate-Fairness-Id", "x-slo-ttft-ms", "X-LLM-D-Slo-Tpot-Ms", "Headgate-Priority",
	}
	for _, value := range []string{"two", "critical", "-1", "1e9", "99999999999999999999", "", "\"", "two, two", "\xff\xfe", strings.Repeat("x", 4000)} {
		lines := []string{"Authorization: Bearer key-one", "Connection: keep-alive"}
		for _, n := range names {
			lines = append(lines, n+": "+value, strings.ToLower(n)+": 7")
		}
		w := g.dial(t)
		w.send(rawPost(chat, plainChat, lines...))
		a := w.answer("POST")
		w.Close()
		same(t, a, 200, plain)
		if k := g.record(t, a); k.Tenant != "one" {
			t.Errorf("%.20q: the request is tenant %q's", value, k.Tenant)
		}
		for name, v := range e.last(t).header {
			for _, n := range names {
				if name == strings.ToLower(n) {
					t.Errorf("the engine got %s: %.20q", name, v)
				}
			}
		}
	}
	for _, value := range []string{"-3", "0", "1000000000", "1e400", `"high"`, "null", `{"a":[1]}`, "[]", "true"} {
		body := strings.Replace(plainChat, "{", `{"priority":`+value+`,`, 1)
		same(t, g.post(t, chat, body, "Authorization", "Bearer key-one"), 200, plain)
		if got := e.last(t).body; got != body {
			t.Errorf("sent %s, the engine got %s", body, got)
		}
		same(t, g.post(t, chat, plainChat, "Authorization", "Bearer key-two"), 200, plain)
	}
}

// SEC-1: where there is no engine to choose, a client's destination is none
// either.
func TestDestinationHeadersDoNotStandInForEngines(t *testing.T) {
	t.Parallel()
	trap := newEngine(t, nil)
	dead := newEngine(t, nil)
	dead.ln.Close()
	dir := t.TempDir()
	file := filepath.Join(dir, "endpoints.yaml")
	if err := os.WriteFile(file, []byte("[]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	g := start(t, fmt.Sprintf(`routes:
- {match: {model: m}, backends: [{pool: down}]}
- {match: {model: none}, backends: [{pool: none}]}
pools:
%s  none: {discovery: {file: %q}, health: {interval: 0s}}
`, pool("down", "", dead), file))
	target := trap.ln.Addr().String()
	for _, name := range []string{"x-gateway-destination-endpoint", "X-GATEWAY-Destination-Endpoint-Subset", "x-envoy-original-dst-host", "X-Forwarded-Host", "Forwarded", "Headgate-Endpoint", "x-forwarded-for"} {
		for _, model := range []string{"m", "none"} {
			w := g.dial(t)
			w.send(rawPost(chat, strings.Replace(plainChat, `"m"`, `"`+model+`"`, 1), name+": "+target, name+": "+target+","+dead.ln.Addr().String()))
			a := w.answer("POST")
			w.Close()
			if code := a.header.Get("Headgate-Reason"); model == "none" && (a.status != 503 || code != "no_endpoints") || a.status != 502 && a.status != 503 || code == "" {
				t.Errorf("%s, %s: %d %s", name, model, a.status, a.body)
			}
		}
	}
	w := g.dial(t)
	w.send(strings.Replace(rawPost(chat, plainChat), "Host: gateway", "Host: "+target, 1))
	if a := w.answer("POST"); a.status < 500 {
		t.Errorf("by Host: %d %s", a.status, a.body)
	}
	trap.mu.Lock()
	defer trap.mu.Unlock()
	if trap.accepted > 0 {
		t.Error("the client's destination was called")
	}
}

// EPT-8: an address of IPv6 has one form, however it is written; what has none
// is refused with its place.
func TestAddressesOfIPv6HaveOneForm(t *testing.T) {
	t.Parallel()
	if !hasIPv6() {
		t.Skip("no [::1] on this machine")
	}
	e := newEngineAt(t, "[::1]:0", nil)
	_, port, _ := net.SplitHostPort(e.ln.Addr().String())
	const text = "listeners: [{name: main, address: '127.0.0.1:0', debug_headers: true}]\npools:\n  p: {discovery: {static: [%s]}, health: {interval: 0s}}\n"
	one := func(host string) string { return fmt.Sprintf("{url: 'http://%s:%s'}", host, port) }
	for _, host := range []string{"[::1]", "[0:0:0:0:0:0:0:1]", "[::0001]", "[0::1]", "[::0.0.0.1]"} {
		g := start(t, fmt.Sprintf(text, one(host)))
		a := g.post(t, chat, plainChat)
		if got := a.header.Get("Headgate-Endpoint"); a.status != 200 || got != "http://[::1]:"+port {
			t.Errorf("%s: %d, Headgate-Endpoint %q", host, a.status, got)
		}
		if got := e.last(t).header["host"]; len(got) != 1 || got[0] != "[::1]:"+port {
			t.Errorf("%s: Host %q", host, got)
		}
		for s := range g.series(t, "headgate_inflight_requests") {
			if !strings.Contains(s, "[::1]:"+port+`"`) {
				t.Errorf("%s: series %s", host, s)
			}
		}
	}
	for name, list := range map[string]string{
		"twice":       one("[::1]") + ", " + one("[0::1]"),
		"no brackets": one("::1"),
		"half":        one("[::1"),
		"zone":        one("[fe80::1%25eth0]"),
		"raw zone":    one("[fe80::1%eth0]"),
	} {
		if err := load(t, fmt.Sprintf(text, list)); err == nil {
			t.Errorf("%s is accepted", name)
		} else if !strings.Contains(err.Error(), ":3") || !strings.Contains(err.Error(), "url") {
			t.Errorf("%s: no place in %v", name, err)
		}
	}
	// The IPv4 address of an IPv6 socket is one of IPv4.
	old := newEngine(t, nil)
	_, oldPort, _ := net.SplitHostPort(old.ln.Addr().String())
	g := start(t, fmt.Sprintf(text, "{url: 'http://[::ffff:127.0.0.1]:"+oldPort+"'}"))
	if a := g.post(t, chat, plainChat); a.status != 200 || a.header.Get("Headgate-Endpoint") != "http://127.0.0.1:"+oldPort {
		t.Errorf("%d, Headgate-Endpoint %q", a.status, a.header.Get("Headgate-Endpoint"))
	}
}

// EPT-8: an engine that is found on both families is two addresses, and one
// stands in for the other.
func TestAddressesOfBothFamiliesStandInForEachOther(t *testing.T) {
	t.Parallel()
	if !hasIPv6() {
		t.Skip("no [::1] on this machine")
	}
	for dead := range 2 {
		e := []*engine{newEngine(t, nil), newEngineAt(t, "[::1]:0", nil)}
		e[dead].answer = (*exchange).reset
		g := start(t, "pools:\n"+pool("p", "", e...))
		for range 40 { // so that chance leaves none out
			same(t, g.post(t, chat, plainChat), 200, plain)
		}
		if n := len(e[dead].requests()); n == 0 {
			t.Error("the one that fails was never asked")
		}
		for _, x := range e {
			if got := x.last(t).header["host"]; len(got) != 1 || got[0] != x.ln.Addr().String() {
				t.Errorf("Host: %q, want %s", got, x.ln.Addr())
			}
		}
	}
}
