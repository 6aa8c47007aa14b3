// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/freeport"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/simengine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait for an event. A test that needs it has failed, or the
// machine stood still meanwhile.
const patience = time.Minute

// rig is a gateway between a client and simulated engines, all on loopback.
type rig struct {
	t       *testing.T
	engines []*simengine.Engine
	gateway *gateway.Gateway
	server  *gateway.Server
	addr    string
	client  *http.Client
	records *records
	journal *journal.Journal // nil: the gateway's own
}

// newRig starts engines A, B, … and a gateway with one pool of them. settings
// are lines of the pool's YAML; edit changes an engine's configuration.
func newRig(t *testing.T, engines int, settings string, edit ...func(i int, c *simengine.Config)) *rig {
	t.Helper()
	r, urls := newEngines(t, engines, edit...)
	r.start(urls, settings)
	return r
}

// newEngines starts engines alone; start or startYAML puts the gateway before
// them.
func newEngines(t *testing.T, engines int, edit ...func(i int, c *simengine.Config)) (r *rig, urls []string) {
	t.Helper()
	r = &rig{t: t, records: &records{ended: make(chan struct{}, 1024)}}
	for i := range engines {
		c := simengine.Config{Name: string(rune('A' + i))}
		for _, f := range edit {
			f(i, &c)
		}
		e, err := simengine.Start(freeport.Listen(t), c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		r.engines = append(r.engines, e)
		urls = append(urls, e.URL())
	}
	return r, urls
}

func (r *rig) start(urls []string, settings string) {
	r.t.Helper()
	yaml := "pools:\n  p:\n"
	for line := range strings.Lines(settings) {
		yaml += "    " + strings.TrimSpace(line) + "\n"
	}
	yaml += "    discovery: {static: ["
	for _, u := range urls {
		yaml += fmt.Sprintf("{url: %q},", u)
	}
	yaml += "]}\n"
	r.startYAML(yaml)
}

func (r *rig) startYAML(yaml string) {
	t := r.t
	t.Helper()
	c, err := config.Parse("test.yaml", []byte(yaml))
	if err != nil {
		t.Fatalf("%v\n%s", err, yaml)
	}
	if r.gateway, err = gateway.New(gateway.Config{Config: c, Recorder: r.records, Routing: routing, Journal: r.journal}); err != nil {
		t.Fatal(err)
	}
	if r.server, err = r.gateway.NewServer(c.Listeners[0]); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- r.server.Serve(l) }()
	transport := &http.Transport{}
	r.client = &http.Client{Transport: transport}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		r.gateway.Drain(ctx)
		if err := r.server.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
}

// reply is a whole answer as the client got it.
type reply struct {
	status int
	header http.Header
	body   string
	err    error // of reading the body: a cut answer
}

func (r *rig) post(path, body string, header ...string) reply {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), "POST", "http://"+r.addr+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := r.client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	got, err := io.ReadAll(res.Body)
	return reply{res.StatusCode, res.Header, string(got), err}
}

const (
	chatPath   = "/v1/chat/completions"
	streamBody = `{"model":"sim","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`
	wholeBody  = `{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`
)

// fault makes the engines misbehave for the request.
func (r *rig) stream(fault string) reply { return r.post(chatPath, streamBody, "X-Sim-Fault", fault) }
func (r *rig) whole(fault string) reply  { return r.post(chatPath, wholeBody, "X-Sim-Fault", fault) }

// text joins the answer's delta contents, read independently of the gateway's
// own parser.
func (r reply) text() string {
	var text strings.Builder
	for scan := bufio.NewScanner(strings.NewReader(r.body)); scan.Scan(); {
		line := scan.Text()
		_, after, ok := strings.Cut(line, `"content":"`)
		if ok && strings.HasPrefix(line, "data: ") {
			part, _, _ := strings.Cut(after, `"`)
			text.WriteString(part)
		}
	}
	return text.String()
}

// code is the code of the error that the answer carries, "" if none.
func (r reply) code() string {
	_, after, ok := strings.Cut(r.body, `"error":{`)
	if !ok {
		return ""
	}
	_, after, _ = strings.Cut(after, `"code":"`)
	code, _, _ := strings.Cut(after, `"`)
	return code
}

// received counts the requests that each engine got, in order of the engines.
func (r *rig) received() []int {
	counts := make([]int, len(r.engines))
	for i, e := range r.engines {
		for _, entry := range e.Log() {
			if entry.Event == simengine.EventReceived && entry.Method == "POST" { // probes are not requests
				counts[i]++
			}
		}
	}
	return counts
}

func (r *rig) totalReceived() int {
	n := 0
	for _, c := range r.received() {
		n += c
	}
	return n
}

// until asks again and again, as an operator would.
func (r *rig) until(what string, holds func() bool) {
	r.t.Helper()
	look, over := time.NewTicker(time.Millisecond), time.After(patience)
	defer look.Stop()
	for !holds() {
		select {
		case <-look.C:
		case <-over:
			r.t.Fatalf("%s: waited in vain; %+v", what, r.gateway.Status())
		}
	}
}

// idle ends the gateway and fails the test if anything is still counted as in
// flight.
func (r *rig) idle() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r.gateway.Drain(ctx)
	for _, pool := range r.gateway.Status() {
		for _, s := range pool.Endpoints {
			if s.InFlight != 0 {
				r.t.Errorf("%s: %d in flight", s.Endpoint, s.InFlight)
			}
		}
	}
}

// records is a Recorder that remembers how requests ended.
type records struct {
	mu       sync.Mutex
	outcomes []string
	attempts []string
	proofs   []string // verdict/proof of each attempt
	over     []string // key/limit of each that was rate limited
	woke     []string // pool/event/ok
	ended    chan struct{}
}

func (r *records) Request(_, _ string, o inference.Outcome, code inference.Code) {
	r.mu.Lock()
	r.outcomes = append(r.outcomes, strings.TrimSpace(o.String()+" "+string(code)))
	r.mu.Unlock()
	select {
	case r.ended <- struct{}{}:
	default: // nobody waits for so many
	}
}
func (r *records) Attempt(_ string, v inference.Verdict, p inference.Proof) {
	r.mu.Lock()
	r.attempts = append(r.attempts, v.String())
	r.proofs = append(r.proofs, v.String()+"/"+p.String())
	r.mu.Unlock()
}
func (r *records) RateLimited(key, limit string) {
	r.mu.Lock()
	r.over = append(r.over, key+"/"+limit)
	r.mu.Unlock()
}
func (r *records) limited() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.over)
}
func (r *records) Waited(string, int, time.Duration)              {}
func (r *records) Predicted(string, time.Duration, time.Duration) {}
func (r *records) Woke(pool, event string, ok bool) {
	r.mu.Lock()
	r.woke = append(r.woke, fmt.Sprintf("%s/%s/%v", pool, event, ok))
	r.mu.Unlock()
}
func (r *records) wakes() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.woke)
}
func (r *records) FirstOutput(string, string, time.Duration) {}
func (r *records) Gap(string, string, time.Duration)         {}
func (r *records) Retry(string, inference.Verdict)           {}
func (r *records) RetryDenied(string, inference.Code)        {}
func (r *records) LateChunks(int)                            {}

// wait returns the outcome of the next request to end.
func (r *records) wait(t *testing.T) string {
	t.Helper()
	select {
	case <-r.ended:
	case <-time.After(patience):
		t.Fatal("no request ended")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.outcomes[len(r.outcomes)-1]
}
