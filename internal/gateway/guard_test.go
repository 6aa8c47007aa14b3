// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/control"
	"github.com/headgate/headgate/internal/guard"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/journal/sqlite"
	"github.com/headgate/headgate/internal/simengine"
)

// guarded is a guard in this process.
type guarded struct {
	url, control string
	stop         func()
}

// startGuard puts a guard before an engine.
func startGuard(t *testing.T, engine string, edit ...func(*guard.Options)) *guarded {
	t.Helper()
	u, err := url.Parse(engine)
	if err != nil {
		t.Fatal(err)
	}
	ready := make(chan [2]net.Addr, 1)
	o := guard.Options{
		Config: guard.Config{ID: "guard-of-" + u.Port(), Engine: u, RequireLease: true},
		Listen: "127.0.0.1:0", ControlAt: "127.0.0.1:0", LockDir: filepath.Join(t.TempDir(), "locks"), LockWait: 10 * time.Second,
		Ready: func(data, control net.Addr) { ready <- [2]net.Addr{data, control} },
	}
	for _, f := range edit {
		f(&o)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		_, err := guard.Run(ctx, o)
		ended <- err
	}()
	g := &guarded{}
	g.stop = func() {
		cancel()
		if err, ok := <-ended; ok && err != nil {
			t.Errorf("guard: %v", err)
		}
	}
	select {
	case at := <-ready:
		g.url, g.control = "http://"+at[0].String(), at[1].String()
	case err := <-ended:
		t.Fatal(err)
	}
	stop := g.stop
	done := false
	g.stop = func() {
		if !done {
			done = true
			stop()
		}
	}
	t.Cleanup(g.stop)
	return g
}

// newGuardedRig is newRig with a guard before each engine.
func newGuardedRig(t *testing.T, engines int, settings string, edit ...func(i int, c *simengine.Config)) (*rig, []*guarded) {
	t.Helper()
	r, urls := newEngines(t, engines, edit...)
	var guards []*guarded
	yaml := "pools:\n  p:\n"
	if !strings.Contains(settings, "lease:") {
		yaml += "    lease: {ttl: 2s, heartbeat: 100ms}\n"
	}
	for line := range strings.Lines(settings) {
		yaml += "    " + strings.TrimSpace(line) + "\n"
	}
	yaml += "    discovery: {static: ["
	for _, u := range urls {
		g := startGuard(t, u)
		guards = append(guards, g)
		yaml += fmt.Sprintf("{url: %q, guard: %q},", g.url, g.control)
	}
	r.startYAML(yaml + "]}\n")
	r.awaitGuards()
	return r, guards
}

// awaitGuards waits until every endpoint's guard is heard.
func (r *rig) awaitGuards() {
	r.t.Helper()
	r.until("every guard is heard", func() bool {
		for _, s := range r.gateway.Status()[0].Endpoints {
			if !s.Fenceable {
				return false
			}
		}
		return true
	})
}

// describe asks a guard about itself.
func (g *guarded) describe(t *testing.T, client *http.Client) guard.Description {
	t.Helper()
	res, err := client.Get(g.url + guard.DescribePath)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var d guard.Description
	if err := json.NewDecoder(res.Body).Decode(&d); err != nil {
		t.Fatal(err)
	}
	return d
}

func writeFile(t *testing.T, content string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestGuardedAnswersPassUnchanged(t *testing.T) {
	r, guards := newGuardedRig(t, 1, "")
	for range 3 {
		if got := r.stream(""); got.status != 200 || got.text() == "" || got.code() != "" {
			t.Fatalf("stream: %+v", got)
		}
		if got := r.whole(""); got.status != 200 || got.header.Get("Headgate-Guard") != "" {
			t.Fatalf("whole: %+v", got)
		}
	}
	if n := r.totalReceived(); n != 6 {
		t.Errorf("the engine got %d requests", n)
	}
	r.idle()
	// A gateway that has the whole answer may close before the guard's next read.
	r.until("the guard has ended them all", func() bool {
		d := guards[0].describe(t, r.client)
		return d.InFlight == 0 && d.Ended["finished"]+d.Ended["closed"] == 6 && len(d.Ended) <= 2
	})
}

// An engine that resets its connection before any output: the guard's word that
// the attempt has ended is the proof, and one other engine answers.
func TestGuardedFailureIsRepeatedOnProof(t *testing.T) {
	r, _ := newGuardedRig(t, 2, "")
	for _, fault := range []string{"rst@role", "fin@role", "rst@head"} {
		got := r.stream("attempt=1;" + fault)
		if !got.whole() {
			t.Errorf("%s: %d %s", fault, got.status, got.body)
		}
		if out := r.records.wait(t); out != "completed" {
			t.Errorf("%s: %s", fault, out)
		}
	}
	r.idle()
	if n := r.totalReceived(); n != 6 {
		t.Errorf("%d attempts reached engines, want 6", n)
	}
	want := strings.TrimSpace(strings.Repeat("closed/cancel_ack finished/ ", 3))
	if got := strings.TrimSpace(strings.Join(r.records.proofs, " ")); got != want {
		t.Errorf("attempts ended as %q, want %q", got, want)
	}
}

// After the first delta there is no retry, whatever is proved.
func TestGuardedFailureAfterOutputEndsTheStream(t *testing.T) {
	r, _ := newGuardedRig(t, 2, "")
	body, done := r.open("stall@token:2")
	defer done()
	if _, err := body.ReadString('}'); err != nil {
		t.Fatal(err)
	}
	// Only now: the guard's word can be quicker than the bytes before it.
	r.engines[slices.Index(r.received(), 1)].Kill()
	rest, err := io.ReadAll(body)
	if err != nil || !strings.Contains(string(rest), `"code":"upstream_decode_interrupted"`) {
		t.Errorf("the stream ended with %q, %v", rest, err)
	}
	r.idle()
	if n := r.totalReceived(); n != 1 {
		t.Errorf("%d attempts reached engines", n)
	}
}

// The place of an attempt whose client has left is given back when the guard has
// confirmed that it is over, and the engine has been cancelled.
func TestGuardedClientGone(t *testing.T) {
	r, guards := newGuardedRig(t, 1, "")
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "POST", "http://"+r.addr+chatPath, strings.NewReader(streamBody))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Sim-Fault", "stall@token:2")
	res, err := r.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	leave()
	res.Body.Close()
	if out := r.records.wait(t); out != "cancelled" {
		t.Errorf("outcome %s", out)
	}
	r.until("the place is given back", func() bool { return r.gateway.Status()[0].Endpoints[0].InFlight == 0 })
	r.until("the engine saw its client leave", func() bool {
		for _, e := range r.engines[0].Log() {
			if e.Event == simengine.EventAborted {
				return true
			}
		}
		return false
	})
	if d := guards[0].describe(t, r.client); d.InFlight != 0 || d.Ended["closed"]+d.Ended["revoked"] != 1 {
		t.Errorf("the guard counted %+v", d)
	}
	r.idle()
}

// A request without a lease can't start work behind a guard.
func TestGuardRefusesWorkWithoutLease(t *testing.T) {
	r, guards := newGuardedRig(t, 1, "")
	res, err := r.client.Post(guards[0].url+chatPath, "application/json", strings.NewReader(wholeBody))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != 428 || res.Header.Get("Headgate-Reason") != "lease_required" {
		t.Errorf("got %d %v", res.StatusCode, res.Header)
	}
	if n := r.totalReceived(); n != 0 {
		t.Errorf("the engine got %d requests", n)
	}
}

// Without a guard that is heard an endpoint takes nothing; it never passes for
// one that has none.
func TestUnheardGuardTakesNothing(t *testing.T) {
	r, urls := newEngines(t, 1)
	r.startYAML(fmt.Sprintf("pools: {p: {guard: required, discovery: {static: [{url: %q}]}}}", urls[0]))
	if got := r.stream(""); got.status != 503 || got.code() != "no_endpoints" {
		t.Errorf("got %d %s", got.status, got.body)
	}
	if n := r.totalReceived(); n != 0 {
		t.Errorf("the engine got %d requests", n)
	}
}

// guard: auto asks for the control port at the endpoint's own address.
func TestGuardTellsItsControlPort(t *testing.T) {
	r, urls := newEngines(t, 1)
	g := startGuard(t, urls[0], func(o *guard.Options) { o.Revision = "m@sha256:1"; o.Token = "s3cret" })
	token := writeFile(t, "s3cret\n")
	r.startYAML(fmt.Sprintf("pools: {p: {guard: required, lease: {token_file: %q}, discovery: {static: [{url: %q}]}}}", token, g.url))
	r.awaitGuards()
	if got := r.stream(""); got.status != 200 {
		t.Errorf("got %d %s", got.status, got.body)
	}
	if s := r.gateway.Status()[0].Endpoints[0]; s.Revision != "m@sha256:1" {
		t.Errorf("revision %q", s.Revision)
	}
}

// A wrong token opens no session.
func TestGuardWantsItsToken(t *testing.T) {
	r, urls := newEngines(t, 1)
	g := startGuard(t, urls[0], func(o *guard.Options) { o.Token = "s3cret" })
	r.startYAML(fmt.Sprintf("pools: {p: {discovery: {static: [{url: %q, guard: %q}]}}}", g.url, g.control))
	r.until("the refusal is shown", func() bool {
		return strings.Contains(r.gateway.Status()[0].Guards[inference.EndpointID(g.url)].Problem, "token")
	})
	if got := r.stream(""); got.code() != "no_endpoints" {
		t.Errorf("got %d %s", got.status, got.body)
	}
}

// What a process before this one left unfinished behind a guard is fenced at the
// start, and only then opened again by its key, as the next attempt.
func TestInheritedAttemptIsFenced(t *testing.T) {
	r, urls := newEngines(t, 1)
	g := startGuard(t, urls[0])
	file := filepath.Join(t.TempDir(), "journal.db")
	ctx := t.Context()
	before := openJournal(t, file)
	claim := journal.Claim{Request: "req_before", Key: "k", Digest: journal.Digest([]byte(streamBody)), Arrival: &journal.Arrival{
		Tenant: "anonymous", Model: "sim", TargetModel: "sim", Pool: "p", MaxAttempts: 2,
	}}
	if _, err := before.Begin(ctx, claim); err != nil {
		t.Fatal(err)
	}
	if err := before.Dispatch(ctx, journal.Event{
		Request: "req_before", Attempt: 1, Endpoint: inference.EndpointID(g.url), Fence: inference.FenceLease,
		Guard: g.describe(t, http.DefaultClient).Incarnation, LeaseTTL: time.Hour,
	}, true); err != nil {
		t.Fatal(err)
	}
	if err := before.Close(); err != nil { // as a crash would: without an outcome
		t.Fatal(err)
	}

	r.journal = openJournal(t, file)
	t.Cleanup(func() { _ = r.journal.Close() })
	r.startYAML(fmt.Sprintf("pools: {p: {discovery: {static: [{url: %q, guard: %q}]}}}", g.url, g.control))
	r.awaitGuards()
	var got *journal.Record
	r.until("the attempt is fenced", func() bool {
		var err error
		if got, err = r.journal.Get(ctx, "req_before"); err != nil {
			t.Fatal(err)
		}
		return got.Attempts[0].State == "fenced"
	})
	if proof := got.Attempts[0].FenceProof; proof != "cancel_ack" {
		t.Errorf("fenced by %s", proof)
	}
	again := r.post(chatPath, streamBody, "Idempotency-Key", "k")
	if !again.whole() || again.header.Get("X-Request-Id") != "req_before" {
		t.Errorf("got %d %v %s", again.status, again.header, again.body)
	}
	r.idle()
	got, err := r.journal.Get(ctx, "req_before")
	if err != nil || len(got.Attempts) != 2 || got.Attempts[1].LeaseEpoch != 2 || got.Outcome != "completed" {
		t.Errorf("%v %+v", err, got)
	}
	// The tombstone of attempt 1 keeps its dispatch out, should it still come.
	if d := g.describe(t, http.DefaultClient); d.InFlight != 0 {
		t.Errorf("the guard counted %+v", d)
	}
}

func openJournal(t *testing.T, file string) *journal.Journal {
	t.Helper()
	store, err := sqlite.Open(t.Context(), file)
	if err != nil {
		t.Fatal(err)
	}
	j, err := journal.Open(t.Context(), journal.Config{Store: store, Gateway: "gw", KeyTTL: time.Hour, AnswerMax: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// yamlOf is a configuration with one pool for each list of guards.
func yamlOf(setting string, pools map[string][]*guarded) string {
	yaml := "pools:\n"
	for name, guards := range pools {
		yaml += "  " + name + ":\n    lease: {ttl: 2s, heartbeat: 100ms}\n    " + setting + "\n    discovery: {static: ["
		for _, g := range guards {
			yaml += fmt.Sprintf("{url: %q, guard: %q},", g.url, g.control)
		}
		yaml += "]}\n"
	}
	return yaml
}

func (r *rig) reload(yaml string) {
	r.t.Helper()
	c, err := config.Parse("test.yaml", []byte(yaml))
	if err == nil {
		err = r.gateway.Reload(c)
	}
	if err != nil {
		r.t.Fatalf("%v\n%s", err, yaml)
	}
}

// A changed configuration keeps the control stream.
func TestControlStreamOutlivesConfigurations(t *testing.T) {
	r, guards := newGuardedRig(t, 2, "")
	status := func() control.Status { return r.gateway.Status()[0].Guards[inference.EndpointID(guards[0].url)] }
	before := status()
	r.reload(yamlOf("timeouts: {connect: 3s}", map[string][]*guarded{"p": guards}))
	if after := status(); !after.Up || after.Sessions != before.Sessions {
		t.Errorf("before %+v, after %+v", before, after)
	}
	r.reload(yamlOf("guard: off", map[string][]*guarded{"p": guards}))
	if len(r.gateway.Status()[0].Guards) != 0 {
		t.Error("a guard is used that was turned off")
	}
	r.reload(yamlOf("timeouts: {connect: 3s}", map[string][]*guarded{"p": guards}))
	r.awaitGuards()
	if got := r.stream(""); !got.whole() {
		t.Errorf("got %d %s", got.status, got.body)
	}
}

// A stream goes on, and its lease is renewed, when its endpoint has left the pool.
func TestLeaseOutlivesItsEndpoint(t *testing.T) {
	r, guards := newGuardedRig(t, 1, "lease: {ttl: 300ms, heartbeat: 50ms}")
	res, err := r.client.Post("http://"+r.addr+chatPath, "application/json",
		strings.NewReader(`{"model":"sim","stream":true,"max_tokens":50,"messages":[{"role":"user","content":"hi"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	r.engines[0].Pause()
	began := time.Now()
	r.reload(yamlOf("", map[string][]*guarded{"p": {startGuard(t, "http://127.0.0.1:1")}}))
	r.until("two leases are over", func() bool { return time.Since(began) > 600*time.Millisecond })
	r.engines[0].Resume()
	body, err := io.ReadAll(res.Body)
	if err != nil || !strings.Contains(string(body), "A1·50") || !strings.HasSuffix(string(body), "data: [DONE]\n\n") {
		t.Errorf("got %v %s", err, body)
	}
	r.idle()
	if d := guards[0].describe(t, http.DefaultClient); d.InFlight != 0 || d.Ended["expired"] != 0 {
		t.Errorf("the guard counted %+v", d)
	}
}

// Two pools may have the same engine: to its guard they are two gateways, and
// neither takes the other's attempts for forgotten.
func TestTwoPoolsOfOneGuard(t *testing.T) {
	r, urls := newEngines(t, 1)
	g := startGuard(t, urls[0])
	r.startYAML(yamlOf("", map[string][]*guarded{"a": {g}, "b": {g}}) +
		"routes: [{match: {model: sim}, backends: [{pool: a}, {pool: b}]}]\n")
	r.until("both are heard", func() bool {
		for _, p := range r.gateway.Status() {
			if !p.Endpoints[0].Fenceable {
				return false
			}
		}
		return true
	})
	for range 20 {
		if got := r.stream(""); !got.whole() {
			t.Fatalf("got %d %s", got.status, got.body)
		}
	}
	for _, p := range r.gateway.Status() {
		if s := p.Guards[inference.EndpointID(g.url)]; s.Sessions != 1 {
			t.Errorf("pool %s had %d sessions", p.Pool, s.Sessions)
		}
	}
}
