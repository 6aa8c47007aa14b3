// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/gateway"
)

// explain asks about a small request with these headers.
func (r *rig) explain(header ...string) *gateway.Explained {
	q := gateway.Question{
		Path: chatPath, Header: http.Header{"Content-Type": {"application/json"}},
		Body: []byte(`{"model":"sim","messages":[{"role":"user","content":"hello"}]}`),
	}
	for i := 0; i < len(header); i += 2 {
		q.Header.Set(header[i], header[i+1])
	}
	return r.gateway.Explain(q)
}

// A request for which the filters leave engines without room waits, beside one that
// has nothing to do, and an explanation says so.
func TestRequestsWaitForEnginesThatPass(t *testing.T) {
	r, urls := newEngines(t, 2)
	r.startYAML(fmt.Sprintf(`
pools:
  p:
    discovery: {static: [{url: %q, labels: {zone: a}}, {url: %q, labels: {zone: b}}]}
    flow: {max_concurrency: 2}
    routing: {plugins: [{plugin: label, options: {in: {zone: [a]}}}, {plugin: cost}, {plugin: idlest}]}
`, urls[0], urls[1]))
	_, end := r.open("stall@token:1")
	if e := r.explain(); e.Decision.Waits || string(e.Decision.Endpoint) != urls[0] {
		t.Errorf("with room left: %+v", e.Decision)
	}
	_, endOther := r.open("stall@token:1")
	e := r.explain()
	if d := e.Decision; e.Error != nil || !d.Waits || d.Endpoint != "" || d.Candidates[0].Out != "full" || d.Candidates[1].Out != "label: zone is b, not a" {
		t.Errorf("%+v, error %v", d, e.Error)
	}
	if q := e.Queued; q.Requests != 0 {
		t.Errorf("explaining it left something in the queue: %+v", q)
	}
	answered := make(chan int)
	for range 2 {
		go func() { answered <- r.post(chatPath, wholeBody).status }()
	}
	r.until("two wait", func() bool { return r.gateway.Status()[0].Queue.Requests == 2 })
	if q := r.explain().Queued; q.Requests != 2 || q.Before != 2 {
		t.Errorf("%+v", q)
	}
	end()
	endOther()
	for range 2 {
		if status := <-answered; status != 200 {
			t.Errorf("status %d", status)
		}
	}
	if got := r.received(); !slices.Equal(got, []int{4, 0}) {
		t.Errorf("engines got %v", got)
	}
}

// A pool that starts engines when they are needed lets a request wait for one.
func TestExplainOfAPoolWithoutEngines(t *testing.T) {
	r := &rig{t: t, records: &records{ended: make(chan struct{}, 1)}}
	r.startYAML("pools: {p: {flow: {scale_from_zero: {ttl: 10s}}, discovery: {static: [{url: http://127.0.0.1:1}]}}}")
	if e := r.explain(); e.Error != nil || !e.Decision.Waits || e.Decision.Candidates[0].Out != "gone" {
		t.Errorf("%+v, error %v", e.Decision, e.Error)
	}
}

// What a request is asked to keep, and by whom, is shown with the decision.
func TestExplainShowsTargets(t *testing.T) {
	r, urls := newEngines(t, 1)
	r.startYAML(fmt.Sprintf(`
objectives: {typing: {priority: 10, ttft: 500ms}}
pools: {p: {routing: {ttft: 2s, tpot: 100ms}, discovery: {static: [{url: %q}]}}}
`, urls[0]))
	for _, c := range []struct {
		header     []string
		objective  string
		priority   int
		ttft, tpot float64
	}{
		{nil, "", 0, 2, 0.1},
		{[]string{"Headgate-Objective", "typing"}, "typing", 10, 0.5, 0.1},
		{[]string{"Headgate-Objective", "typing", "X-Slo-Ttft-Ms", "700", "X-Slo-Tpot-Ms", "30"}, "typing", 10, 0.7, 0.03},
		{[]string{"Headgate-Objective", "unheard of"}, "", 0, 2, 0.1},
	} {
		e := r.explain(c.header...)
		if d := e.Decision; e.Objective != c.objective || e.Priority != c.priority || d.TTFT != c.ttft || d.TPOT != c.tpot {
			t.Errorf("%v: objective %q, priority %d, targets %v s and %v s", c.header, e.Objective, e.Priority, d.TTFT, d.TPOT)
		}
	}
}

// Without a key anything may be asked about; with one it is that client's request.
func TestExplainTakesKeysAsTheGatewayDoes(t *testing.T) {
	r, urls := newEngines(t, 1)
	r.startYAML(fmt.Sprintf(`
keys: [{id: k, secret_sha256: %q}, {id: narrow, secret_sha256: %q, models: [other]}]
pools: {p: {discovery: {static: [{url: %q}]}}}
`, config.NewDigest("secret").Hex(), config.NewDigest("narrow").Hex(), urls[0]))
	for _, c := range []struct {
		header []string
		code   string
	}{
		{nil, ""},
		{[]string{"Authorization", "Bearer secret"}, ""},
		{[]string{"X-Api-Key", "secret"}, ""},
		{[]string{"Authorization", "Bearer unknown"}, "unauthorized"},
		{[]string{"X-Api-Key", "unknown"}, "unauthorized"},
		{[]string{"Authorization", "Basic c2VjcmV0"}, "unauthorized"},
		{[]string{"X-Api-Key", "narrow"}, "forbidden"},
	} {
		e, got := r.explain(c.header...), ""
		if e.Error != nil {
			got = string(e.Error.Code)
		}
		if got != c.code || (e.Decision == nil) != (c.code != "") {
			t.Errorf("%v: refused with %q, want %q", c.header, got, c.code)
		}
	}
}

// Where all engines asked for a short pause a request waits, and an explanation says so.
func TestExplainOfAShortPause(t *testing.T) {
	r := newRig(t, 1, "health: {interval: 0s}\nscrape: {interval: 0s}\nfailover: {before_first_delta: {max_attempts: 1}}")
	_, end := r.open("status@head:503:json:1")
	end()
	<-r.records.ended
	if e := r.explain(); e.Error != nil || e.Decision.Waits != (e.Decision.Candidates[0].Out == "paused") {
		t.Errorf("%+v, error %v", e.Decision, e.Error)
	}
	if got := r.post(chatPath, wholeBody); got.status != 200 {
		t.Errorf("status %d", got.status)
	}
	_, end = r.open("status@head:503:json:20")
	end()
	<-r.records.ended
	<-r.records.ended
	if e := r.explain(); e.Error == nil || e.Decision.Waits {
		t.Errorf("after a long pause: %+v, error %v", e.Decision, e.Error)
	}
}
