// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/simengine/model"
)

const end = "data: [DONE]\n\n"

// whole reports whether the client got all four tokens, once, and an end.
func (r reply) whole() bool {
	var want strings.Builder
	text := r.text()
	if len(text) < 2 {
		return false
	}
	for i := range 4 {
		fmt.Fprintf(&want, "%s·%d ", text[:2], i+1)
	}
	return r.status == 200 && r.err == nil && text == want.String() && r.code() == "" && strings.HasSuffix(r.body, end)
}

func TestStreamIsRelayedWhole(t *testing.T) {
	r := newRig(t, 2, "")
	if got := r.stream(""); !got.whole() {
		t.Errorf("got %+v", got)
	}
	if outcome := r.records.wait(t); outcome != "completed" {
		t.Errorf("outcome %q", outcome)
	}
	r.idle()
}

func TestFailureBeforeOutputIsRepeatedElsewhere(t *testing.T) {
	r := newRig(t, 3, "")
	for _, fault := range []string{
		"rst@head", "fin@head", "rst@headers", "fin@role", "rst@role", "rst@computed:1", "fin@in-chunk:1:20",
		"status@head:500", "status@head:503", "status@head:429", "html@head", "garbage@head", "empty",
	} {
		before := r.totalReceived()
		if got := r.stream("attempt=1;" + fault); !got.whole() {
			t.Errorf("%s: got %+v", fault, got)
		}
		if outcome := r.records.wait(t); outcome != "completed" {
			t.Errorf("%s: outcome %q", fault, outcome)
		}
		if n := r.totalReceived() - before; n != 2 {
			t.Errorf("%s: %d engines got the request, want 2", fault, n)
		}
	}
	r.idle()
}

func TestFailureAfterOutputEndsTheStreamWithAnError(t *testing.T) {
	r := newRig(t, 2, "")
	for _, fault := range []string{"rst@token:1", "fin@token:2", "end@token:2", "rst@in-char:3", "fin@in-chunk:3:20", "error@token:2", "nofinish"} {
		before := r.totalReceived()
		got := r.stream(fault)
		if got.err != nil || got.code() != "upstream_decode_interrupted" || strings.Contains(got.body, "[DONE]") || strings.Count(got.body, `"error":{`) != 1 {
			t.Errorf("%s: got %+v", fault, got)
		}
		if outcome := r.records.wait(t); outcome != "interrupted upstream_decode_interrupted" {
			t.Errorf("%s: outcome %q", fault, outcome)
		}
		if n := r.totalReceived() - before; n != 1 {
			t.Errorf("%s: %d engines got the request, want 1", fault, n)
		}
	}
	r.idle()
}

func TestCollectedAnswerIsRepeatedWhenItsEngineDies(t *testing.T) {
	r := newRig(t, 2, "")
	for _, fault := range []string{"rst@head", "rst@headers", "fin@in-body:30", "status@head:500", "shortbody", "garbage@head"} {
		got := r.whole("attempt=1;" + fault)
		if got.status != 200 || got.err != nil || !strings.Contains(got.body, `2·1 `) || !strings.Contains(got.body, `2·4 `) {
			t.Errorf("%s: got %+v", fault, got)
		}
	}
	r.idle()
}

// Past collect_max the answer was committed: its end can't be repeated, and
// must not look like an end.
func TestOversizedAnswerIsCutWhenItsEngineDies(t *testing.T) {
	r := newRig(t, 2, "collect_max: 50")
	if got := r.whole(""); got.status != 200 || got.err != nil || !strings.Contains(got.body, "·4 ") {
		t.Errorf("got %+v", got)
	}
	before := r.totalReceived()
	if got := r.whole("fin@in-body:200"); got.err == nil {
		t.Errorf("a cut answer ended cleanly: %+v", got)
	}
	if n := r.totalReceived() - before; n != 1 {
		t.Errorf("%d engines got the request, want 1", n)
	}
}

func TestEnginesRefusalPassesThrough(t *testing.T) {
	r := newRig(t, 2, "")
	got := r.stream("times=*;status@head:422")
	if got.status != 422 || !strings.Contains(got.body, "simulated status 422") || r.totalReceived() != 1 {
		t.Errorf("got %+v after %d attempts", got, r.totalReceived())
	}
	// Busy everywhere: the last engine's own answer, its wait clamped.
	got = r.stream("times=*;status@head:503:json:90")
	if got.status != 503 || got.header.Get("Retry-After") != "30" || !strings.Contains(got.body, "simulated status 503") {
		t.Errorf("got %+v", got)
	}
}

// What a prefill takes is learned from first outputs, and a repeat that would
// take too long is refused.
func TestRepeatOfAPromptThatTakesTooLongIsRefused(t *testing.T) {
	r := newRig(t, 2, "failover: {retry_cost_limit: {prompt_tokens: 0, estimated_prefill: 1ms}}",
		func(_ int, c *simengine.Config) { c.Params, c.Speed = model.Laptop, 20 })
	body := `{"model":"sim","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"` + strings.Repeat("a word ", 1000) + `"}]}`
	if got := r.post(chatPath, body, "X-Sim-Fault", "attempt=1;rst@role"); !got.whole() {
		t.Fatalf("with nothing learned: %+v", got)
	}
	if got := r.post(chatPath, body, "X-Sim-Fault", "attempt=1;rst@role"); got.status != 503 || got.code() != "retry_too_expensive" {
		t.Errorf("got %+v", got)
	}
}

// Engines send the last chunk a moment after the end marker; the connection
// must be kept all the same.
func TestConnectionsAreKeptAfterStreams(t *testing.T) {
	r := newRig(t, 1, "scrape: {interval: 0s}")
	for range 20 {
		if got := r.stream(""); !got.whole() {
			t.Fatalf("got %+v", got)
		}
	}
	accepted := 0
	for _, entry := range r.engines[0].Log() {
		if entry.Event == simengine.EventAccepted {
			accepted++
		}
	}
	if accepted > 3 {
		t.Errorf("20 streams one after another took %d connections", accepted)
	}
}

// With unread bytes on the connection net/http does not see a client leave.
func TestClientThatLeavesWithPipelinedBytesIsNoticed(t *testing.T) {
	for name, body := range map[string]string{"stream": streamBody, "whole": wholeBody} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 1, "")
			conn, err := net.Dial("tcp", r.addr)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Sim-Fault: stall@head\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body)
			if _, err := r.engines[0].Await(t.Context(), func(e simengine.Entry) bool { return e.Event == simengine.EventFault }); err != nil {
				t.Fatal(err)
			}
			io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
			conn.Close()
			if outcome := r.records.wait(t); outcome != "cancelled" {
				t.Errorf("outcome %q", outcome)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if _, err := r.engines[0].Await(ctx, func(e simengine.Entry) bool { return e.Event == simengine.EventAborted }); err != nil {
				t.Errorf("the engine was not told: %v", err)
			}
			r.idle()
		})
	}
}

func TestDrainLetsStreamsEndAndCutsWhatTakesTooLong(t *testing.T) {
	r := newRig(t, 1, "", func(_ int, c *simengine.Config) { c.Params = model.Laptop })
	body, done := r.open("stall@token:2")
	if _, err := body.ReadString('}'); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	drained := make(chan struct{})
	go func() { r.gateway.Drain(ctx); close(drained) }()
	for r.gateway.Ready() {
	}
	if got := r.stream(""); got.status != 503 || got.header.Get("Headgate-Reason") != "shutting_down" {
		t.Errorf("a new request got %+v", got)
	}
	select {
	case <-drained:
		t.Fatal("drained with a stream open")
	default:
	}
	cancel()
	<-drained
	rest, err := io.ReadAll(body)
	if err != nil || !strings.Contains(string(rest), `"code":"upstream_decode_interrupted"`) {
		t.Errorf("the stream ended with %q, %v", rest, err)
	}
	done()
}

// open starts a stream and returns its body once the head is there.
func (r *rig) open(fault string, header ...string) (*bufio.Reader, func()) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), "POST", "http://"+r.addr+chatPath, strings.NewReader(streamBody))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Sim-Fault", fault)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := r.client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	return bufio.NewReader(res.Body), func() { res.Body.Close() }
}

// Discovery and a reload may come at once: neither undoes the other.
func TestReloadKeepsWhatDiscoveryFinds(t *testing.T) {
	r, urls := newEngines(t, 2)
	yaml := `pools: {p: {health: {interval: 0s}, scrape: {interval: 0s}, discovery: {dns: {name: engines.invalid, port: 8000}}}}`
	r.startYAML(yaml)
	c, err := config.Parse("test.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	var lists [2][]inference.Endpoint
	for i, text := range urls {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		lists[i] = []inference.Endpoint{fleet.NewEndpoint(u, "")}
	}
	r.gateway.SetEndpoints("p", lists[0])
	for i := range 3000 {
		want := lists[(i+1)%2]
		found := make(chan struct{})
		go func() { r.gateway.SetEndpoints("p", want); close(found) }()
		if err := r.gateway.Reload(c); err != nil {
			t.Fatal(err)
		}
		<-found
		if got := r.gateway.Status()[0].Endpoints[0].Endpoint; got != want[0].ID {
			t.Fatalf("round %d: %s, want %s", i, got, want[0].ID)
		}
	}
}

// Operators see when an endpoint that was taken out has nothing left to do.
func TestEndpointsThatLeaveAreShownUntilTheirLastRequestEnds(t *testing.T) {
	r := newRig(t, 1, "health: {interval: 0s}\nscrape: {interval: 0s}")
	body, done := r.open("stall@token:1")
	if line, err := body.ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
	r.gateway.SetEndpoints("p", nil)
	want := []schedule.Leaving{{Endpoint: inference.EndpointID(r.engines[0].URL()), InFlight: 1}}
	if s := r.gateway.Status()[0]; len(s.Endpoints) != 0 || !slices.Equal(s.Leaving, want) {
		t.Errorf("%+v", s)
	}
	done()
	r.until("it has left", func() bool { return len(r.gateway.Status()[0].Leaving) == 0 })
}
