// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// secrets are what clients authenticate by, one way or another.
var secrets = []string{
	"Authorization", "Bearer secret-a", "Cookie", "session=secret-b", "x-api-key", "secret-c", "Proxy-Authorization", "Basic secret-d",
	"X-Idempotency-Key", "secret-e", "x-request-id", "secret-f", "x-session-id", "secret-g", "api-key", "secret-h",
}

// SEC-2: an engine sees no credential of a client, on no path, on no attempt.
func TestClientCredentialsNeverReachTheEngine(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	for name, c := range map[string]struct{ path, body string }{
		"chat": {chat, plainChat}, "stream": {chat, streamed}, "completions": {"/v1/completions", `{"model":"m","prompt":"hi"}`},
	} {
		t.Run(name, func(t *testing.T) {
			if a := g.post(t, c.path, c.body, secrets...); a.status != 200 {
				t.Fatalf("%d %s", a.status, a.body)
			}
			noSecrets(t, e.last(t), "")
		})
	}
	// The model list is the gateway's own question.
	g.get(t, "/v1/models", secrets...)
}

// noSecrets accepts what is listed in but.
func noSecrets(t *testing.T, x *exchange, but string) {
	t.Helper()
	for i := 1; i < len(secrets); i += 2 {
		if secrets[i] != but && strings.Contains(x.head, secrets[i]) {
			t.Errorf("the engine got %s: %s", secrets[i-1], secrets[i])
		}
	}
	for _, name := range []string{"cookie", "x-api-key", "idempotency-key", "x-idempotency-key", "proxy-authorization", "x-session-id"} {
		if v := x.header[name]; v != nil {
			t.Errorf("the engine got %s: %q", name, v)
		}
	}
	if v := x.header["authorization"]; but == "" && v != nil {
		t.Errorf("the engine got Authorization: %q", v)
	}
}

func TestPoolsCredentialIsSentInstead(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("  pool-token\n\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var n atomic.Int32
	e := newEngine(t, func(x *exchange) {
		if n.Add(1)%2 == 1 {
			x.json(503, `{"error":"busy"}`)
			return
		}
		x.usual()
	})
	g := start(t, "pools:\n"+pool("p", fmt.Sprintf("credential: {bearer_file: %q}", file), e, twin(t, e)))
	for _, header := range [][]string{nil, secrets, {"Connection", "authorization"}, {"Authorization", ""}} {
		before := len(e.requests())
		if a := g.post(t, chat, plainChat, header...); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
		got := e.requests()[before:]
		if len(got) != 2 {
			t.Errorf("%d attempts, want 2", len(got))
		}
		for _, x := range got {
			if v := x.header["authorization"]; len(v) != 1 || v[0] != "Bearer pool-token" {
				t.Errorf("Authorization: %q", v)
			}
			noSecrets(t, x, "pool-token")
		}
	}
}

// SEC-2: a key that is missing by mistake is an error at the start.
func TestMissingOrEmptyCredentialIsAConfigError(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, []byte(" \n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{empty, filepath.Join(dir, "missing"), dir} {
		config := fmt.Sprintf("pools:\n  p:\n    discovery: {static: [{url: 'http://127.0.0.1:1'}]}\n    credential: {bearer_file: %q}\n", file)
		if err := load(t, config); err == nil {
			t.Errorf("%s is accepted", filepath.Base(file))
		} else if !strings.Contains(err.Error(), "bearer_file") {
			t.Errorf("the error does not name the field: %v", err)
		}
	}
}

func TestForwardAuthorization(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "forward_authorization: true")
	if a := g.post(t, chat, plainChat, secrets...); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	x := e.last(t)
	if v := x.header["authorization"]; len(v) != 1 || v[0] != "Bearer secret-a" {
		t.Errorf("Authorization: %q", v)
	}
	noSecrets(t, x, "Bearer secret-a")
	g.post(t, chat, plainChat)
	if v := e.last(t).header["authorization"]; v != nil {
		t.Errorf("an Authorization that nobody sent: %q", v)
	}
}

// Contract, "Request headers": what Headgate reads itself, and whatever looks
// like its own, stays here.
func TestHeadersForTheGatewayStayHere(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	names := []string{
		"x-llm-d-inference-objective", "x-gateway-inference-objective", "Headgate-Objective", "x-llm-d-inference-fairness-id",
		"x-gateway-inference-fairness-id", "Headgate-Fairness-Id", "x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-tpot-ms",
		"x-llm-d-slo-tpot-ms", "Headgate-Lease", "Headgate-Guard", "Headgate-Attempt", "HEADGATE-ANYTHING", "headgate-x",
		"x-gateway-destination-endpoint", "X-Gateway-Destination-Endpoint-Subset", "x-gateway-model-name", "x-llm-d-other", "X-LLM-D-Upper",
	}
	var header []string
	for _, n := range names {
		header = append(header, n, "1000")
	}
	header = append(header, "Headgate-Timeout-Ms", "60000")
	if a := g.post(t, chat, plainChat, header...); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	for name, v := range e.last(t).header {
		for _, prefix := range []string{"x-llm-d-", "x-gateway-", "x-slo-", "headgate-"} {
			if strings.HasPrefix(name, prefix) && v[0] != "" && (v[0] == "1000" || v[0] == "60000") {
				t.Errorf("the engine got %s: %q", name, v)
			}
		}
	}
}

// HTP-1, towards the engine.
func TestClientsHopByHopHeadersStayHere(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	w := g.dial(t)
	w.send(rawPost(chat, plainChat, "Connection: keep-alive, X-Hop , x-hop-2,content-type", "Connection: X-Third", "X-Hop: 1", "X-Hop-2: 1", "X-Third: 1",
		"Keep-Alive: timeout=5", "TE: trailers, deflate", "Proxy-Connection: keep-alive", "Upgrade: websocket", "X-Kept: 1"))
	if a := w.answer("POST"); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	x := e.last(t)
	for _, name := range []string{"x-hop", "x-hop-2", "x-third", "keep-alive", "te", "proxy-connection", "upgrade"} {
		if v := x.header[name]; v != nil {
			t.Errorf("the engine got %s: %q", name, v)
		}
	}
	if x.header["x-kept"] == nil {
		t.Error("X-Kept is lost")
	}
}

// Everything else is forwarded, and framed once.
func TestOtherHeadersReachTheEngine(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	w := g.dial(t)
	w.send(rawPost(chat, plainChat, "traceparent: "+trace, "tracestate: a=b,c=d", "baggage: k=v", "X-Unknown: one", "X-Unknown: two", "x-lower: \"q\" ü",
		"User-Agent: test/1", "Accept: application/json", "OpenAI-Organization: org", "X-Empty:"))
	a := w.answer("POST")
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	x := e.last(t)
	if v := x.header["traceparent"]; len(v) != 1 || strings.Split(v[0], "-")[1] != strings.Split(trace, "-")[1] {
		t.Errorf("traceparent: %q", v)
	}
	for name, want := range map[string]string{
		"tracestate": "a=b,c=d", "baggage": "k=v", "x-lower": `"q" ü`, "user-agent": "test/1", "accept": "application/json",
		"openai-organization": "org", "x-empty": "", "content-type": "application/json", "content-length": strconv.Itoa(len(plainChat)),
		"host": e.ln.Addr().String(),
	} {
		if v := x.header[name]; len(v) != 1 || v[0] != want {
			t.Errorf("%s: %q, want %q", name, v, want)
		}
	}
	if v := strings.Join(x.header["x-unknown"], ","); v != "one,two" {
		t.Errorf("X-Unknown: %q", v)
	}
	if x.header["transfer-encoding"] != nil {
		t.Error("framed twice")
	}
}

// x-request-id is Headgate's own, and the same for engine and client.
func TestRequestIDIsOursOnBothSides(t *testing.T) {
	t.Parallel()
	e := newEngine(t, func(x *exchange) {
		if x.streams() {
			x.stream("X-Request-Id: engine-1")
			x.chunk(role + delta("a") + finish + done)
			x.end()
			return
		}
		x.json(200, plain, "x-request-id: engine-1")
	})
	g := serve(t, e, "")
	seen := map[string]bool{}
	for _, body := range []string{plainChat, streamed} {
		for _, own := range []string{"", "req_01ARZ3NDEKTSV4RRFFQ69G5FAV", "x"} {
			a := g.post(t, chat, body, "x-request-id", own)
			ids := a.header.Values("x-request-id")
			if len(ids) != 1 || !requestID.MatchString(ids[0]) || ids[0] == own || seen[ids[0]] {
				t.Errorf("x-request-id: %q", ids)
				continue
			}
			seen[ids[0]] = true
			if v := e.last(t).header["x-request-id"]; len(v) != 1 || v[0] != ids[0] {
				t.Errorf("the engine got %q, the client %q", v, ids[0])
			}
		}
	}
}

// SEC-1: no header of a client decides where a request goes.
func TestDestinationHeadersOfClientsAreIgnored(t *testing.T) {
	t.Parallel()
	trap, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	caught := make(chan struct{}, 100)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			c, err := trap.Accept()
			if err != nil {
				return
			}
			caught <- struct{}{}
			c.Close()
		}
	}()
	defer func() { trap.Close(); <-over }()
	e := newEngine(t, nil)
	other := newEngine(t, nil)
	g := start(t, `routes:
- {match: {model: m}, backends: [{pool: p}]}
- {match: {model: other}, backends: [{pool: q}]}
pools:
`+pool("p", "", e)+pool("q", "", other))
	targets := []string{trap.Addr().String(), g.admin, other.ln.Addr().String(), "169.254.169.254:80", trap.Addr().String() + "," + e.ln.Addr().String(), "junk"}
	for _, name := range []string{
		"x-gateway-destination-endpoint", "X-Gateway-Destination-Endpoint", "x-gateway-destination-endpoint-subset", "X-GATEWAY-DESTINATION-ENDPOINT-SERVED",
		"Headgate-Endpoint", "x-envoy-original-dst-host", "X-Forwarded-Host",
	} {
		for _, target := range targets {
			w := g.dial(t)
			w.send(rawPost(chat, plainChat, name+": "+target, name+": "+target))
			if a := w.answer("POST"); a.status != 200 {
				t.Errorf("%s: %s: %d %s", name, target, a.status, a.body)
			}
			w.Close()
		}
	}
	if n := len(e.requests()); n != 7*len(targets) {
		t.Errorf("the engine got %d requests", n)
	}
	if n := len(other.requests()); n != 0 {
		t.Errorf("another pool's engine got %d requests", n)
	}
	if len(caught) > 0 {
		t.Error("a stranger was called")
	}
}

// SEC-2: redirects are the client's to follow.
func TestRedirectIsPassedThroughAndNotFollowed(t *testing.T) {
	t.Parallel()
	elsewhere := newEngine(t, nil)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("pool-token"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, status := range []int{301, 302, 303, 307, 308} {
		for _, body := range []string{plainChat, streamed} {
			t.Run(fmt.Sprint(status), func(t *testing.T) {
				e := newEngine(t, func(x *exchange) { x.json(status, "moved", "Location: "+elsewhere.url()+chat) })
				g := serve(t, e, fmt.Sprintf("credential: {bearer_file: %q}", file))
				a := g.post(t, chat, body)
				same(t, a, status, "moved")
				if l := a.header.Get("Location"); l != elsewhere.url()+chat {
					t.Errorf("Location: %q", l)
				}
				if n := len(e.requests()); n != 1 {
					t.Errorf("%d attempts", n)
				}
			})
		}
	}
	elsewhere.mu.Lock()
	defer elsewhere.mu.Unlock()
	if elsewhere.accepted > 0 {
		t.Error("the redirect was followed")
	}
}

// RTY-13 and the contract: Retry-After never exceeds 30, since openai-node
// sleeps any value.
func TestEnginesRetryAfterIsClamped(t *testing.T) {
	t.Parallel()
	soon := time.Now().Add(time.Hour)
	for _, status := range []int{429, 503, 400} {
		for _, c := range []struct{ value, want string }{
			{"100", "30"}, {"30", "30"}, {"31", "30"}, {"5", "5"}, {"0", "0"}, {"99999999999999999999999", "30"},
			{soon.UTC().Format(http.TimeFormat), "30"}, {soon.UTC().Format(time.RFC850), ""}, {"Thu, 01 Jan 1970 00:00:00 GMT", ""}, {"soon", ""}, {"-1", ""}, {"1e9", ""}, {"", ""},
		} {
			t.Run(fmt.Sprintf("%d %s", status, c.value), func(t *testing.T) {
				const body = `{"error":{"message":"busy","code":1}}`
				a, _, _ := relay(t, plainChat, func(x *exchange) { x.json(status, body, "Retry-After: "+c.value) })
				same(t, a, status, body)
				got := a.header.Values("Retry-After")
				if c.want != "" && (len(got) != 1 || got[0] != c.want) {
					t.Errorf("Retry-After: %q, want %s", got, c.want)
				}
				for _, v := range got {
					n, err := strconv.Atoi(v)
					at, dateErr := http.ParseTime(v)
					if err == nil && (n > 30 || n < 0) || err != nil && dateErr == nil && time.Until(at) > 31*time.Second {
						t.Errorf("Retry-After: %q", got)
					}
				}
			})
		}
	}
}

// The same reason holds for the header that openai-node reads first.
func TestEnginesRetryAfterMsIsClamped(t *testing.T) {
	t.Parallel()
	a, _, _ := relay(t, plainChat, func(x *exchange) { x.json(429, "{}", "Retry-After-Ms: 3600000") })
	if v := a.header.Get("retry-after-ms"); v != "" {
		if n, err := strconv.Atoi(v); err != nil || n > 30_000 {
			t.Errorf("retry-after-ms: %q", v)
		}
	}
}

// Debug headers are shown where the listener says so, and only there.
func TestDebugHeadersAreOptIn(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	names := []string{"Headgate-Endpoint", "Headgate-Attempts", "Headgate-Route", "Headgate-Queue-Ms"}
	g := serve(t, e, "")
	for _, body := range []string{plainChat, streamed} {
		for _, n := range names {
			if v := g.post(t, chat, body).header.Values(n); v != nil {
				t.Errorf("%s: %q", n, v)
			}
		}
	}
	g = start(t, "listeners: [{name: main, address: '127.0.0.1:0', debug_headers: true}]\npools:\n"+pool("p", "", e))
	for _, body := range []string{plainChat, streamed} {
		a := g.post(t, chat, body)
		for _, n := range names {
			if a.header.Get(n) == "" {
				t.Errorf("no %s", n)
			}
		}
		if v := a.header.Get("Headgate-Attempts"); v != "1" {
			t.Errorf("Headgate-Attempts: %q", v)
		}
	}
}
