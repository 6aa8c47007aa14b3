// SPDX-License-Identifier: Apache-2.0

// Package contract holds what clients, engines and operators may rely on as
// tests of a running gateway on loopback sockets.
//
// They are written from the contract and from public bug reports of other
// gateways, whose ids (PAY-6, HTP-1 …) stand at the tests, and judge bytes:
// those that a raw client gets, and those that a raw engine got. They know the
// gateway's configuration file and nothing of its code.
package contract

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/lifecycle"
)

// patience bounds every wait for something that must happen. It is no part of
// any expectation.
const patience = time.Minute

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// gateway is one gateway process inside the test.
type gateway struct {
	t       *testing.T
	process *lifecycle.Process
	addr    string
	admin   string
	client  *http.Client
	log     *journal
	stop    func()
}

// start runs a gateway with this configuration. Listeners, admin listener and
// drain timeout have defaults that suit a test.
func start(t *testing.T, text string) *gateway {
	t.Helper()
	for _, d := range []struct{ key, value string }{
		{"listeners", "[{name: main, address: 127.0.0.1:0}]"},
		{"admin", "{address: 127.0.0.1:0}"},
		{"drain_timeout", "2s"},
		{"journal", "{driver: none}"},
	} {
		if !strings.HasPrefix(text, d.key+":") && !strings.Contains(text, "\n"+d.key+":") {
			text = d.key + ": " + d.value + "\n" + text
		}
	}
	c, err := config.Parse(filepath.Join(t.TempDir(), "headgate.yaml"), []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	log := new(journal)
	p, err := lifecycle.Start(c, slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), "test")
	if err != nil {
		t.Fatal(err)
	}
	g := &gateway{
		t: t, process: p, addr: p.Addr("main").String(), log: log,
		client: &http.Client{
			Transport:     &http.Transport{DisableCompression: true},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		stop: sync.OnceFunc(p.Stop),
	}
	if a := p.AdminAddr(); a != nil {
		g.admin = a.String()
	}
	t.Cleanup(func() {
		g.client.CloseIdleConnections()
		g.stop()
		if t.Failed() {
			t.Logf("the end of the gateway's log:\n%s", log.tail(4<<10))
		}
		if strings.Contains(log.String(), "panic") {
			t.Errorf("the gateway panicked:\n%s", log)
		}
	})
	return g
}

// pool is one line of the configuration's pools, to stand below "pools:".
func pool(name, extra string, engines ...*engine) string {
	urls := make([]string, len(engines))
	for i, e := range engines {
		urls[i] = fmt.Sprintf("{url: %q}", e.url())
	}
	if extra != "" {
		extra = ", " + extra
	}
	for _, asks := range []string{"health", "scrape"} {
		if !strings.Contains(extra, asks+":") {
			extra += ", " + asks + ": {interval: 0s}" // the questions would be counted as requests
		}
	}
	return fmt.Sprintf("  %s: {discovery: {static: [%s]}%s}\n", name, strings.Join(urls, ", "), extra)
}

// serve is a gateway with one pool of one engine, and no routes.
func serve(t *testing.T, e *engine, extra string) *gateway {
	t.Helper()
	return start(t, "pools:\n"+pool("p", extra, e))
}

// journal is a log that may be read while it is written.
type journal struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.buf.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.buf.String()
}

func (j *journal) tail(n int) string {
	s := j.String()
	return s[max(0, len(s)-n):]
}

// answer is one answer as a client got it.
type answer struct {
	status int
	header http.Header
	body   string
	err    error // that ended the body early
}

// begin sends a request and returns with the answer's head; the body is the
// caller's.
func (g *gateway) begin(t *testing.T, method, url string, body io.Reader, header ...string) (*http.Response, error) {
	t.Helper()
	if strings.HasPrefix(url, "/") {
		url = "http://" + g.addr + url
	}
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
			continue
		}
		if i > 0 && header[i] == header[i-2] {
			req.Header.Add(header[i], header[i+1])
			continue
		}
		req.Header.Set(header[i], header[i+1])
	}
	return g.client.Do(req)
}

// do is begin, with the whole answer.
func (g *gateway) do(t *testing.T, method, url, body string, header ...string) answer {
	t.Helper()
	var r io.Reader
	if method != http.MethodGet && method != http.MethodHead || body != "" {
		r = strings.NewReader(body)
	}
	type result struct {
		a   answer
		err error
	}
	done := make(chan result, 1)
	go func() {
		res, err := g.begin(t, method, url, r, header...)
		if err != nil {
			done <- result{err: err}
			return
		}
		done <- result{a: whole(res)}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			t.Fatalf("%s %s: %v", method, url, r.err)
		}
		return r.a
	case <-time.After(patience):
		t.Fatalf("%s %s: no answer", method, url)
		panic("unreachable")
	}
}

func (g *gateway) post(t *testing.T, path, body string, header ...string) answer {
	t.Helper()
	return g.do(t, http.MethodPost, path, body, header...)
}

func (g *gateway) get(t *testing.T, path string, header ...string) answer {
	t.Helper()
	return g.do(t, http.MethodGet, path, "", header...)
}

func whole(res *http.Response) answer {
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return answer{status: res.StatusCode, header: res.Header, body: string(body), err: err}
}

// stillServes asks for one plain answer and expects it.
func (g *gateway) stillServes(t *testing.T) {
	t.Helper()
	if a := g.post(t, "/v1/chat/completions", plainChat); a.status != http.StatusOK || a.err != nil {
		t.Fatalf("a good request afterwards: %d %s %v", a.status, a.body, a.err)
	}
}

// Requests and paths that are good.
const (
	chat      = "/v1/chat/completions"
	plainChat = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	streamed  = `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`
)

// wire is a raw connection to the gateway.
type wire struct {
	net.Conn
	t  *testing.T
	in *bufio.Reader
}

func (g *gateway) dial(t *testing.T) *wire {
	t.Helper()
	c, err := net.Dial("tcp", g.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return &wire{Conn: c, t: t, in: bufio.NewReaderSize(c, 1<<16)}
}

func (w *wire) send(text string) {
	w.t.Helper()
	if _, err := io.WriteString(w.Conn, text); err != nil {
		w.t.Fatalf("send: %v", err)
	}
}

// head reads an answer's head; method is that of the request.
func (w *wire) head(method string) (*http.Response, error) {
	return http.ReadResponse(w.in, &http.Request{Method: method})
}

// answer reads one whole answer, leaving out interim ones.
func (w *wire) answer(method string) answer {
	w.t.Helper()
	for {
		res, err := w.head(method)
		if err != nil {
			w.t.Fatalf("no answer: %v", err)
		}
		if res.StatusCode >= 200 {
			return whole(res)
		}
	}
}

// rest reads until the connection ends, and reports whether it did.
func (w *wire) rest(limit time.Duration) (string, bool) {
	_ = w.SetReadDeadline(time.Now().Add(limit))
	b, err := io.ReadAll(w.in)
	var ne net.Error
	return string(b), err == nil || !errors.As(err, &ne) || !ne.Timeout()
}

// rawPost is a POST as bytes.
func rawPost(path, body string, lines ...string) string {
	head := "POST " + path + " HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
	for _, l := range lines {
		head += l + "\r\n"
	}
	return fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", head, len(body), body)
}

var requestID = regexp.MustCompile(`^req_[0-7][0-9A-HJKMNP-TV-Z]{25}$`)

// apiError is the object below "error" of an OpenAI-shaped body.
type apiError struct {
	Message   string          `json:"message"`
	Type      string          `json:"type"`
	Code      string          `json:"code"`
	RequestID string          `json:"request_id"`
	Partial   *bool           `json:"partial_output"`
	Delivered *int            `json:"delivered_output_tokens"`
	Retryable *bool           `json:"retryable"`
	Param     json.RawMessage `json:"param"`
}

// refusal is the contract of every answer that Headgate gives by itself.
func (a answer) refusal(t *testing.T, status int, code string, retryable bool) apiError {
	t.Helper()
	fail := func(format string, args ...any) {
		t.Helper()
		t.Errorf(format+"\nanswer: %d %v\n%.600s", append(args, a.status, a.header, a.body)...)
	}
	if a.err != nil {
		fail("the body ended with %v", a.err)
	}
	if a.status != status {
		fail("status %d, want %d %s", a.status, status, code)
		return apiError{}
	}
	if got := a.header.Get("Headgate-Reason"); got != code {
		fail("Headgate-Reason: %q, want %q", got, code)
	}
	if got := a.header.Get("x-should-retry"); got != fmt.Sprint(retryable) {
		fail("x-should-retry: %q, want %v", got, retryable)
	}
	if !requestID.MatchString(a.header.Get("x-request-id")) {
		fail("x-request-id: %q", a.header.Get("x-request-id"))
	}
	if !strings.HasPrefix(a.header.Get("Content-Type"), "application/json") {
		fail("Content-Type: %q", a.header.Get("Content-Type"))
	}
	var body struct {
		Error *apiError `json:"error"`
	}
	if err := json.Unmarshal([]byte(a.body), &body); err != nil || body.Error == nil {
		fail("no error object: %v", err)
		return apiError{}
	}
	e := *body.Error
	switch {
	case e.Code != code:
		fail("error.code %q, want %q", e.Code, code)
	case e.Message == "" || e.Type == "":
		fail("error without message or type")
	case e.RequestID != a.header.Get("x-request-id"):
		fail("error.request_id %q is not the header's", e.RequestID)
	case e.Partial == nil || *e.Partial:
		fail("error.partial_output is missing or true")
	case e.Delivered == nil || *e.Delivered != 0:
		fail("error.delivered_output_tokens is missing or not 0")
	case e.Retryable == nil || *e.Retryable != retryable:
		fail("error.retryable is missing or not %v", retryable)
	}
	return e
}

// interrupted is the contract of a stream that failed after its first delta:
// what was sent, then one error event as the last bytes. The part before the
// event is returned.
func (a answer) interrupted(t *testing.T) string {
	t.Helper()
	i := strings.LastIndex(a.body, `data: {"error":`)
	if a.err != nil || i < 0 || strings.Count(a.body, `"error":{`) != 1 {
		t.Errorf("want a clean end (got %v) after one error event, got\n%s", a.err, a.body)
		return a.body
	}
	event := a.body[i:]
	line, ok := strings.CutSuffix(strings.TrimPrefix(event, "data: "), "\n\n")
	if !ok || strings.Contains(line, "\n") || strings.Contains(a.body, "[DONE]") || strings.Contains(a.body, "event:") {
		t.Errorf("the error event is not one data line at the end without [DONE]:\n%s", a.body)
	}
	var only map[string]json.RawMessage
	var e struct {
		Error apiError `json:"error"`
	}
	if err := json.Unmarshal([]byte(line), &only); err != nil || len(only) != 1 {
		t.Errorf("error is not the only key (%v): %s", err, line)
	}
	if err := json.Unmarshal([]byte(line), &e); err != nil {
		t.Errorf("error event: %v", err)
	}
	switch x := e.Error; {
	case x.Code != "upstream_decode_interrupted" || x.Type != "upstream_error" || x.Message == "":
		t.Errorf("error event: %s", line)
	case x.RequestID != a.header.Get("x-request-id"):
		t.Errorf("request_id %q is not the header's %q", x.RequestID, a.header.Get("x-request-id"))
	case x.Partial == nil || !*x.Partial || x.Delivered == nil || *x.Delivered < 1 || x.Retryable == nil || *x.Retryable:
		t.Errorf("error event: %s", line)
	}
	return a.body[:i]
}

// readUntil reads until the text has come, and returns everything read.
func readUntil(r io.Reader, text string) (string, error) {
	var got strings.Builder
	b := make([]byte, 64<<10)
	for !strings.Contains(got.String(), text) {
		n, err := r.Read(b)
		got.Write(b[:n])
		if err != nil {
			return got.String(), err
		}
	}
	return got.String(), nil
}

// within runs f and fails the test when it takes longer than patience.
func within[T any](t *testing.T, what string, f func() T) T {
	t.Helper()
	done := make(chan T, 1)
	go func() { done <- f() }()
	return receive(t, what, done)
}

func receive[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("waited in vain: %s", what)
		panic("unreachable")
	}
}

// eventually asks again and again, as an operator's probe would.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain: %s", what)
		}
	}
}
