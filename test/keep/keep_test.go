// SPDX-License-Identifier: Apache-2.0

// Package keep tests what a gateway keeps when things change around it: its
// journal over crashes and full disks, the meaning of an Idempotency-Key, the
// secrets that it was trusted with, and its requests while endpoints,
// configuration and health change.
//
// The tests are black boxes around a gateway on loopback sockets, inside the
// test or as the real program that is killed. They know the configuration file,
// the HTTP APIs and the command line, and judge by what clients got and what
// simulated engines logged. Ids of public bug reports of other gateways
// (EPT-4, OBS-6 …) stand at the tests.
package keep

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/freeport"
	"github.com/headgate/headgate/internal/lifecycle"
	"github.com/headgate/headgate/internal/simengine"
)

// patience bounds every wait for something that must happen. It is no part of
// any expectation.
const patience = 30 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(removing{m}) }

// removing removes the programs that were built once the tests are over.
type removing struct{ *testing.M }

func (r removing) Run() int {
	defer removePrograms()
	return r.M.Run()
}

// A site is a running gateway as its clients and operators reach it.
type site struct {
	t      *testing.T
	addr   string
	admin  string
	token  string // of the admin listener
	client *http.Client
}

func newSite(t *testing.T) site {
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}
	t.Cleanup(transport.CloseIdleConnections)
	return site{t: t, client: &http.Client{Transport: transport}}
}

// A gateway runs inside the test.
type gateway struct {
	site
	process *lifecycle.Process
	log     *text
	stop    func()
}

// defaults puts the listeners on free ports, unless the text says otherwise.
func defaults(yaml string) string {
	for _, d := range []struct{ key, value string }{
		{"listeners", "[{name: main, address: 127.0.0.1:0, debug_headers: true}]"},
		{"admin", "{address: 127.0.0.1:0}"},
		{"drain_timeout", "5s"},
		{"gateway", "{id: gw-test}"},
	} {
		if !strings.HasPrefix(yaml, d.key+":") && !strings.Contains(yaml, "\n"+d.key+":") {
			yaml = d.key + ": " + d.value + "\n" + yaml
		}
	}
	return yaml
}

// start runs a gateway whose files are in dir; "" makes a new one.
func start(t *testing.T, dir, yaml string) *gateway {
	t.Helper()
	if dir == "" {
		dir = t.TempDir()
	}
	yaml = defaults(yaml)
	c, err := config.Parse(filepath.Join(dir, "headgate.yaml"), []byte(yaml))
	if err != nil {
		t.Fatalf("%v\n%s", err, yaml)
	}
	log := new(text)
	p, err := lifecycle.Start(c, slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), "test")
	if err != nil {
		t.Fatal(err)
	}
	g := &gateway{site: newSite(t), process: p, log: log, stop: sync.OnceFunc(p.Stop)}
	_, port, _ := strings.Cut(strings.ReplaceAll(p.Addr("main").String(), "[::]", ""), ":")
	g.addr = "127.0.0.1:" + port
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
			t.Errorf("the gateway panicked:\n%s", log.tail(8<<10))
		}
	})
	return g
}

// reload puts another configuration in force.
func (g *gateway) reload(t *testing.T, dir, yaml string) {
	t.Helper()
	c, err := config.Parse(filepath.Join(dir, "headgate.yaml"), []byte(defaults(yaml)))
	if err == nil {
		err = g.process.Reload(c)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, yaml)
	}
}

// text is a log that may be read while it is written.
type text struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (x *text) Write(p []byte) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.buf.Write(p)
}

func (x *text) String() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.buf.String()
}

func (x *text) tail(n int) string {
	s := x.String()
	return s[max(0, len(s)-n):]
}

// engines starts n simulated engines A, B, …
func engines(t *testing.T, n int, edit ...func(c *simengine.Config)) []*simengine.Engine {
	t.Helper()
	list := make([]*simengine.Engine, n)
	for i := range list {
		c := simengine.Config{Name: string(rune('A' + i)), Tokens: 6}
		for _, f := range edit {
			f(&c)
		}
		e, err := simengine.Start(freeport.Listen(t), c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		list[i] = e
	}
	return list
}

// static is a discovery block that lists these engines.
func static(list ...*simengine.Engine) string {
	return "discovery: {static: " + endpoints(list...) + "}"
}

// endpoints is a list of these engines, as an endpoints file holds it too.
func endpoints(list ...*simengine.Engine) string {
	urls := make([]string, len(list))
	for i, e := range list {
		urls[i] = fmt.Sprintf("{url: %q}", e.URL())
	}
	return "[" + strings.Join(urls, ", ") + "]"
}

// onePool is a configuration with one pool p.
func onePool(settings string) string { return "pools:\n  p: {" + settings + "}\n" }

// Requests.
const (
	chat     = "/v1/chat/completions"
	streamed = `{"model":"sim","stream":true,"messages":[{"role":"user","content":"hi"}]}`
	plain    = `{"model":"sim","messages":[{"role":"user","content":"hi"}]}`
)

// An answer is what a client got.
type answer struct {
	status int
	header http.Header
	body   string
	err    error // that ended the body early, or there was no head
}

func (a answer) id() string { return a.header.Get("X-Request-Id") }

// code is the code of the error that the answer is or ends with.
func (a answer) code() string {
	return errorIn(a.body[max(strings.LastIndex(a.body, `{"error"`), 0):]).Code
}

// tokens counts what the client has of the model's words.
func (a answer) tokens() int { return strings.Count(a.body, "·") }

// whole says that the client has the complete answer.
func (a answer) whole() bool {
	return a.status == 200 && a.err == nil && a.code() == "" &&
		(strings.HasSuffix(a.body, "data: [DONE]\n\n") || strings.HasSuffix(strings.TrimSpace(a.body), "}"))
}

func (a answer) String() string {
	return fmt.Sprintf("%d %s %v\n%v\n%.700s", a.status, a.code(), a.err, a.header, a.body)
}

// apiError is the object below "error".
type apiError struct {
	Code      string `json:"code"`
	Message   string `json:"message"`
	Type      string `json:"type"`
	RequestID string `json:"request_id"`
	Partial   bool   `json:"partial_output"`
	Delivered int    `json:"delivered_output_tokens"`
	Retryable *bool  `json:"retryable"`
}

func (a answer) error() apiError { return errorIn(a.body) }

// errorIn reads an error body; what is none has no code.
func errorIn(body string) apiError {
	var b struct {
		Error apiError `json:"error"`
	}
	_ = json.NewDecoder(strings.NewReader(body)).Decode(&b)
	return b.Error
}

// request builds a request. Headers come in pairs.
func (s site) request(ctx context.Context, method, url, body string, header ...string) *http.Request {
	s.t.Helper()
	if strings.HasPrefix(url, "/") {
		url = "http://" + s.addr + url
	}
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, url, r)
	if err != nil {
		s.t.Error(err)
		return nil
	}
	req.GetBody = nil // net/http would send a keyed request again by itself
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	return req
}

// try sends a request and returns whatever comes of it. It may be called from
// any goroutine.
func (s site) try(method, url, body string, header ...string) answer {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	res, err := s.client.Do(s.request(ctx, method, url, body, header...))
	if err != nil {
		return answer{err: err}
	}
	return read(res)
}

func read(res *http.Response) answer {
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return answer{res.StatusCode, res.Header, string(body), err}
}

// post is try for chats that must be answered.
func (s site) post(body string, header ...string) answer {
	s.t.Helper()
	a := s.try("POST", chat, body, header...)
	if a.status == 0 {
		s.t.Fatalf("no answer: %v", a.err)
	}
	return a
}

func (s site) get(url string, header ...string) answer {
	s.t.Helper()
	a := s.try("GET", url, "", header...)
	if a.status == 0 {
		s.t.Fatalf("GET %s: no answer: %v", url, a.err)
	}
	return a
}

// operator asks the admin listener.
func (s site) operator(path string) answer {
	s.t.Helper()
	return s.get("http://"+s.admin+path, "Authorization", "Bearer "+s.token)
}

// stream is an answer that is being read.
type stream struct {
	t      *testing.T
	res    *http.Response
	in     *bufio.Reader
	seen   strings.Builder
	cancel context.CancelFunc
}

// open begins a request and returns once its answer has a head.
func (s site) open(body string, header ...string) *stream {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	s.t.Cleanup(cancel)
	res, err := s.client.Do(s.request(ctx, "POST", chat, body, header...))
	if err != nil {
		s.t.Fatalf("no head: %v", err)
	}
	return &stream{t: s.t, res: res, in: bufio.NewReader(res.Body), cancel: cancel}
}

// until reads lines up to one that has word in it.
func (x *stream) until(word string) {
	x.t.Helper()
	for {
		line, err := x.in.ReadString('\n')
		x.seen.WriteString(line)
		if err != nil {
			x.t.Fatalf("%d, no %q: %v\n%s", x.res.StatusCode, word, err, x.seen.String())
		}
		if strings.Contains(line, word) {
			return
		}
	}
}

// rest reads to the end.
func (x *stream) rest() answer {
	defer x.cancel()
	defer x.res.Body.Close()
	body, err := io.ReadAll(x.in)
	x.seen.Write(body)
	return answer{x.res.StatusCode, x.res.Header, x.seen.String(), err}
}

// leave closes the client's side.
func (x *stream) leave() {
	x.cancel()
	_ = x.res.Body.Close()
}

// record is the part of a journal's record that tests look at.
type record struct {
	RequestID       string  `json:"request_id"`
	ClientRequestID string  `json:"client_request_id"`
	Tenant          string  `json:"tenant"`
	Model           string  `json:"model"`
	TargetModel     string  `json:"target_model"`
	Pool            string  `json:"pool"`
	Phase           string  `json:"phase"`
	Outcome         string  `json:"outcome"`
	Code            string  `json:"code"`
	FirstDelta      bool    `json:"first_delta_sent"`
	Durable         bool    `json:"first_delta_durable"`
	Unproved        bool    `json:"first_delta_unproved"`
	Tokens          int     `json:"delivered_output_tokens"`
	MaxAttempts     int     `json:"max_attempts"`
	Generation      uint64  `json:"generation"`
	Keyed           bool    `json:"keyed"`
	Attempts        []tried `json:"attempts"`
}

type tried struct {
	Attempt  int    `json:"attempt"`
	State    string `json:"state"`
	Endpoint string `json:"endpoint"`
	Verdict  string `json:"verdict"`
	Proof    string `json:"fence_proof"`
}

// record asks the client API for one's own request.
func (s site) record(id string, header ...string) record {
	s.t.Helper()
	a := s.get("/v1/requests/"+id, header...)
	var r record
	if err := json.Unmarshal([]byte(a.body), &r); err != nil || a.status != 200 {
		s.t.Fatalf("record of %s: %v", id, a)
	}
	return r
}

// series are the samples of one family of the metrics: labels → value.
func (s site) series(name string) map[string]float64 {
	s.t.Helper()
	found := map[string]float64{}
	for line := range strings.SplitSeq(s.operator("/metrics").body, "\n") {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest == "" || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		i := strings.LastIndex(rest, " ")
		v, err := strconv.ParseFloat(rest[i+1:], 64)
		if err != nil {
			s.t.Fatalf("%s: %v", line, err)
		}
		found[rest[:i]] = v
	}
	return found
}

// sum adds up a family, or those of its samples whose labels have all words.
func (s site) sum(name string, words ...string) (sum float64) {
	s.t.Helper()
sample:
	for labels, v := range s.series(name) {
		for _, w := range words {
			if !strings.Contains(labels, w) {
				continue sample
			}
		}
		sum += v
	}
	return sum
}

// eventually waits until a condition holds that nothing announces.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	if !within(patience, holds) {
		t.Fatalf("not within %v: %s", patience, what)
	}
}

// within reports whether a condition comes to hold in a time.
func within(limit time.Duration, holds func() bool) bool {
	over := time.After(limit)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-over:
			return false
		case <-tick.C:
		}
	}
	return true
}

// stays fails if a condition ceases to hold within a time. What must not
// happen announces nothing, so only time shows that it does not.
func stays(t *testing.T, what string, during time.Duration, holds func() bool) {
	t.Helper()
	limit := time.After(during)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if !holds() {
			t.Fatalf("no longer: %s", what)
		}
		select {
		case <-limit:
			return
		case <-tick.C:
		}
	}
}

// received are an engine's inference requests, probes left out.
func received(list ...*simengine.Engine) []simengine.Entry {
	var found []simengine.Entry
	for _, e := range list {
		for _, entry := range e.Log() {
			if entry.Event == simengine.EventReceived && entry.Path == chat {
				found = append(found, entry)
			}
		}
	}
	return found
}

// await waits for an entry of an engine's log.
func await(t *testing.T, e *simengine.Engine, what string, match func(simengine.Entry) bool) simengine.Entry {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	entry, err := e.Await(ctx, match)
	if err != nil {
		t.Fatalf("engine's log: %s: %v", what, err)
	}
	return entry
}

// arrival waits until an engine has received n chats.
func arrival(t *testing.T, n int, list ...*simengine.Engine) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d chats at the engines", n), func() bool { return len(received(list...)) >= n })
}

func write(t *testing.T, name, content string) {
	t.Helper()
	// A rename, as editors and kubelets do it: nobody reads half a file.
	if err := os.WriteFile(name+".new", []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(name+".new", name); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var requestID = regexp.MustCompile(`req_[0-7][0-9A-HJKMNP-TV-Z]{25}`)
