// SPDX-License-Identifier: Apache-2.0

// Package clients_test drives real client SDKs against a gateway and judges what
// an application sees: whole answers, errors instead of silent ends, and no
// request sent again that must not be.
//
// Every SDK plays the same scenarios, written down in scenario_test.go; a
// script of each, or Go code for the SDKs in Go, carries them out and reports
// what arrived. It owns nothing but these: it refuses to look inside the
// gateway, and judges by the SDK's report, the engines' logs and the metrics.
package clients_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/lifecycle"
)

// sdk is one client library and its ways.
type sdk struct {
	name  string
	plays func(t *testing.T, all []scenario) []seen

	resends     bool  // sends again by itself what may be
	counts      bool  // and says so in x-stainless-retry-count
	resendsCut  bool  // sends again when the body of an answer that is not streamed breaks off
	resendsMore []int // statuses that it sends again although nothing says so
	usageAlways bool  // gets usage whatever the application says
	bare        bool  // its base URL is without /v1
	needsEnd    bool  // its streams are not whole without their last event
	namesTool   bool  // the simulated engine puts the tool's name into the arguments of a whole call

	finishes map[string]string // its own names of finish reasons

	refusal     func(s scenario, resent bool) string // class of the error that stands for a status
	interrupted string                               // class of the error in a stream
	kind        string                               // and its type, if that is not upstream_error
	comments    string                               // class of that error after comments, where it differs
	details     bool                                 // shows the error object in full there
	requestID   bool                                 // and the request's id
}

func sdks() []sdk {
	node := func(script string, args ...string) func(*testing.T, []scenario) []seen {
		return func(t *testing.T, all []scenario) []seen {
			return play(t, all, "node", "NODE_PATH="+installed(t, "clients.sh"), script, args...)
		}
	}
	python := func(script string, args ...string) func(*testing.T, []scenario) []seen {
		return func(t *testing.T, all []scenario) []seen {
			return play(t, all, "python3", "PYTHONPATH="+installed(t, "pyclients.sh"), script, args...)
		}
	}
	responses := map[string]string{"stop": "completed", "length": "max_output_tokens", "tool_calls": "completed"}
	// Messages always have a limit, and the simulated engine always reaches it.
	messages := map[string]string{"stop": "max_tokens", "length": "max_tokens", "tool_calls": "tool_use"}
	return []sdk{
		{name: "openai-node", plays: node("openai.cjs"), resends: true, counts: true,
			refusal: byStatus("APIError"), interrupted: "APIError", details: true, requestID: true},
		{name: "openai-python", plays: python("openai_py.py"), resends: true, counts: true, resendsCut: true,
			refusal: byStatus("APIStatusError"), interrupted: "APIError", details: true},
		{name: "openai-go", plays: playOpenAIGo, resends: true, counts: true,
			refusal: always("*openai.Error"), interrupted: "*ssestream.StreamError", details: true},
		{name: "go-openai", plays: playGoOpenAI,
			refusal: always("*openai.APIError"), interrupted: "*openai.APIError",
			// It joins every line that is not data to the error that it then
			// reads: the error stays one, and its code is lost.
			comments: "*json.SyntaxError"},
		{name: "ai-sdk openai", plays: node("aisdk.cjs"), resends: true, resendsCut: true, usageAlways: true,
			refusal: aiError, interrupted: "Object"},
		{name: "ai-sdk compatible", plays: node("aisdk.cjs", "compatible"), resends: true, resendsCut: true,
			refusal: aiError, interrupted: "Object"},
		{name: "langchain", plays: node("langchain.cjs"), resends: true, resendsCut: true, resendsMore: []int{415, 431},
			refusal: byStatus("APIError"), interrupted: "APIError", details: true, requestID: true},

		{name: "openai-node responses", plays: node("openai.cjs", "responses"), resends: true, counts: true,
			usageAlways: true, needsEnd: true, finishes: responses,
			refusal: byStatus("APIError"), interrupted: "APIError", details: true, requestID: true},
		{name: "openai-python responses", plays: python("openai_py.py", "responses"), resends: true, counts: true, resendsCut: true,
			usageAlways: true, needsEnd: true, finishes: responses,
			refusal: byStatus("APIStatusError"), interrupted: "APIError", details: true},
		{name: "anthropic-node", plays: node("anthropic.cjs"), resends: true, counts: true,
			usageAlways: true, bare: true, finishes: messages, namesTool: true,
			refusal: anthropicError("APIError"), interrupted: "APIError", kind: "api_error", details: true, requestID: true},
		{name: "anthropic-python", plays: python("anthropic_py.py"), resends: true, counts: true, resendsCut: true,
			usageAlways: true, bare: true, finishes: messages, namesTool: true,
			refusal: anthropicError("APIStatusError"), interrupted: "APIStatusError", kind: "api_error", details: true, requestID: true},
	}
}

// scenarios are those that every SDK plays, with what its API makes of them.
func (c sdk) scenarios(url, draining string) []scenario {
	all := scenarios()
	for i := range all {
		s := &all[i]
		if c.needsEnd && strings.HasPrefix(s.Fault, "nodone") {
			s.ends = interrupted
		}
	}
	base := "/v1"
	if c.bare {
		base = ""
	}
	prepare(all, base, url, draining)
	for i := range all {
		if name, ok := c.finishes[all[i].finish]; ok {
			all[i].finish = name
		}
	}
	return all
}

// requests is how many requests the SDK makes when it is refused.
func (c sdk) requests(s scenario) int {
	switch {
	case slices.Contains(c.resendsMore, s.status):
		return 1 + s.Retries // to no harm: it is refused before anything is done
	case !s.again || !c.resends:
		return 1
	case s.code == "shed":
		return 2 // whoever waits as long as it was told is served
	}
	return 1 + s.Retries
}

// byStatus is how the openai packages name errors.
func byStatus(otherwise string) func(scenario, bool) string {
	return func(s scenario, _ bool) string {
		switch {
		case s.status == 400:
			return "BadRequestError"
		case s.status == 404:
			return "NotFoundError"
		case s.status == 429:
			return "RateLimitError"
		case s.status >= 500:
			return "InternalServerError"
		}
		return otherwise
	}
}

// anthropicError: the anthropic packages have some more.
func anthropicError(otherwise string) func(scenario, bool) string {
	plain := byStatus(otherwise)
	return func(s scenario, resent bool) string {
		switch s.status {
		case 413:
			return "ContentTooLargeError"
		case 431:
			return "RequestHeaderFieldsTooLargeError"
		case 503:
			return "ServiceUnavailableError"
		case 504:
			return "GatewayTimeoutError"
		}
		return plain(s, resent)
	}
}

func always(class string) func(scenario, bool) string {
	return func(scenario, bool) string { return class }
}

func aiError(_ scenario, resent bool) string {
	if resent {
		return "RetryError"
	}
	return "APICallError"
}

// TestMain lets more of them run at once than there are cores: most of their
// time they wait to send a request again.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

func TestClients(t *testing.T) {
	draining := startDraining(t)
	for _, c := range sdks() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			testClient(t, c, draining)
		})
	}
}

func testClient(t *testing.T, c sdk, draining *lifecycle.Process) {
	r := newRig(t)
	all := c.scenarios(urlOf(r.process), urlOf(draining))
	began := time.Now()
	saw := map[string]seen{}
	for _, s := range c.plays(t, all) {
		saw[s.Name] = s
	}
	t.Logf("%d scenarios in %.1f s", len(saw), time.Since(began).Seconds())
	requests, codes := 0, map[string]int{}
	for _, s := range all {
		got, ok := saw[s.Name]
		if !ok {
			t.Errorf("%s: the script did not get to it", s.Name)
			continue
		}
		t.Run(s.Name, func(t *testing.T) { judge(t, r, c, s, got) })
		if !s.drains {
			requests += len(got.Requests)
			for _, request := range got.Requests {
				codes[request.Reason]++
			}
		}
	}
	// The gateway counted what the SDK says that it sent.
	within(t, "every request has ended at the gateway", func() bool {
		return r.metric("headgate_requests_total") >= requests
	})
	if n := r.metric("headgate_requests_total"); n != requests {
		t.Errorf("the gateway counted %d requests, the SDK %d", n, requests)
	}
	for code, want := range codes {
		if code == "" {
			continue
		}
		if n := r.metric("headgate_requests_total", `code="`+code+`"`); n != want {
			t.Errorf("%s: the gateway counted %d, the SDK %d", code, n, want)
		}
	}
	judgeOutcomes(t, r, all, saw)
	within(t, "nothing is in flight", func() bool { return r.metric("headgate_inflight_requests") == 0 })
}

// judge holds what the application saw against what the engines did.
func judge(t *testing.T, r *rig, c sdk, s scenario, got seen) {
	visits := r.visits(s.Name)
	defer func() {
		if t.Failed() {
			t.Logf("text %q finish %q tools %v usage %d error %v\nrequests %+v\nvisits %d", got.Text, got.Finish, got.Tools, got.Usage, got.Error, got.Requests, len(visits))
		}
	}()
	switch s.ends {
	case refused:
		judgeRefusal(t, c, s, got, visits)
		return
	case cut:
		judgeCut(t, c, s, got, visits)
		return
	}
	if len(got.Requests) != 1 {
		t.Fatalf("the SDK sent %d requests, want 1", len(got.Requests))
	}
	if len(visits) != s.visits {
		t.Fatalf("engines got %d attempts, want %d", len(visits), s.visits)
	}
	last := visits[len(visits)-1]
	switch s.ends {
	case complete:
		judgeAnswer(t, c, s, got, last)
	case interrupted:
		judgeInterruption(t, c, s, got, last)
	case passed:
		if got.Error == nil || got.Error.Class != c.refusal(s, false) || got.Error.Status != s.status {
			t.Errorf("error %v, want a %s with status %d", got.Error, c.refusal(s, false), s.status)
		}
		if got.Requests[0].Reason != "" {
			t.Errorf("Headgate-Reason is %q on an engine's own answer", got.Requests[0].Reason)
		}
	case left:
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := last.awaitAborted(ctx); err != nil {
			t.Errorf("the engine did not notice that its client left: %v", err)
		}
	}
}

func judgeAnswer(t *testing.T, c sdk, s scenario, got seen, v visit) {
	if got.Error != nil {
		t.Fatalf("error %v", got.Error)
	}
	tokens := max(v.finished, v.sent) // an engine that forgets the end marker may not say that it finished
	text := v.text(tokens)
	if s.Tool != "" {
		if c.namesTool && !s.Stream {
			text = s.Tool
		}
		if len(got.Tools) != 1 || got.Tools[0].Name != s.Tool || got.Tools[0].Args.T != text {
			t.Errorf("tools %v, want %s of %q", got.Tools, s.Tool, text)
		}
		text = ""
	}
	if tokens == 0 || got.Text != text {
		t.Errorf("text %q, want %q", got.Text, text)
	}
	if finish := strings.ReplaceAll(got.Finish, "-", "_"); finish != s.finish {
		t.Errorf("finish reason %q, want %q", finish, s.finish)
	}
	usage := 0
	if s.Usage || !s.Stream || c.usageAlways {
		usage = tokens
	}
	if got.Usage != usage {
		t.Errorf("usage of %d tokens, want %d", got.Usage, usage)
	}
}

func judgeInterruption(t *testing.T, c sdk, s scenario, got seen, v visit) {
	e := got.Error
	if e == nil {
		t.Fatal("no error: the application takes the part for the whole")
	}
	if c.comments != "" && strings.Contains(s.Fault, ":comments") {
		if e.Class != c.comments {
			t.Errorf("error %v, want a %s", e, c.comments)
		}
		return
	}
	kind := cmp.Or(c.kind, "upstream_error")
	if e.Class != c.interrupted || e.Code != s.code || e.Type != kind {
		t.Errorf("error %v, want a %s with code %s and type %s", e, c.interrupted, s.code, kind)
	}
	tokens := strings.Count(got.Text, " ")
	switch {
	case s.Tool != "":
		tokens = v.sent
		if len(got.Tools) > 0 {
			t.Errorf("tools %v of a call that was cut off", got.Tools)
		}
	case got.Text != v.text(tokens) || tokens == 0 || tokens > v.sent || tokens < v.sent && !s.loses:
		t.Errorf("text %q, want the %d tokens that the engine sent", got.Text, v.sent)
	}
	if c.details {
		if e.detail("partial_output") != true || e.detail("retryable") != false ||
			e.detail("delivered_output_tokens") != float64(tokens) || e.detail("request_id") != got.Requests[0].ID {
			t.Errorf("details %v of request %s, want %d delivered tokens", e.Detail, got.Requests[0].ID, tokens)
		}
	}
	if c.requestID && e.RequestID != got.Requests[0].ID {
		t.Errorf("the error's request id is %q, want %q", e.RequestID, got.Requests[0].ID)
	}
}

func judgeCut(t *testing.T, c sdk, s scenario, got seen, visits []visit) {
	if got.Error == nil {
		t.Error("no error: the application takes the part for the whole")
	}
	want := 1
	if c.resendsCut {
		want += s.Retries
	}
	if len(got.Requests) != want || len(visits) != want {
		t.Errorf("the SDK sent %d requests and engines got %d attempts, want %d", len(got.Requests), len(visits), want)
	}
}

// judgeOutcomes holds what the gateway says of its requests' ends against what
// the SDK saw.
func judgeOutcomes(t *testing.T, r *rig, all []scenario, saw map[string]seen) {
	want := map[string]int{}
	for _, s := range all {
		got := saw[s.Name]
		switch {
		case s.drains:
		case s.ends == complete, s.code == "shed" && got.Error == nil:
			want["completed"]++
		case s.ends == interrupted, s.ends == cut:
			want["interrupted"] += len(got.Requests)
		case s.ends == left:
			want["cancelled"]++
		}
	}
	for outcome, n := range want {
		if counted := r.metric("headgate_requests_total", `outcome="`+outcome+`"`); counted != n {
			t.Errorf("the gateway counted %d requests as %s, want %d", counted, outcome, n)
		}
	}
}

func judgeRefusal(t *testing.T, c sdk, s scenario, got seen, visits []visit) {
	want := c.requests(s)
	if len(got.Requests) != want {
		t.Errorf("the SDK sent %d requests, want %d", len(got.Requests), want)
	}
	if s.code == "shed" && c.resends {
		if got.Error != nil || len(visits) != 1 || got.Text != visits[0].text(visits[0].finished) {
			t.Errorf("not answered after the pause: error %v, text %q", got.Error, got.Text)
		}
	} else if e := got.Error; e == nil || e.Class != c.refusal(s, want > 1) || e.Code != s.code || e.Status != s.status {
		t.Errorf("error %v, want a %s with code %s and status %d", e, c.refusal(s, want > 1), s.code, s.status)
	}
	if s.code != "shed" && len(visits) != s.visits*len(got.Requests) {
		t.Errorf("engines got %d attempts of %d requests, want %d of each", len(visits), len(got.Requests), s.visits)
	}
	for i, request := range got.Requests {
		if s.code == "shed" && i > 0 {
			break
		}
		if request.Status != s.status || request.Reason != s.code || request.Again != strconv.FormatBool(s.again) {
			t.Errorf("request %d: status %d, Headgate-Reason %q, x-should-retry %q", i, request.Status, request.Reason, request.Again)
		}
	}
	for i := 1; i < len(got.Requests); i++ {
		before, request := got.Requests[i-1], got.Requests[i]
		// A timer of Node may fire a millisecond early.
		if waited := request.At - before.Answered; waited < before.Wait-5 {
			t.Errorf("request %d came after %.0f ms, %.0f were asked for", i, waited, before.Wait)
		}
		if c.counts && request.Retry != strconv.Itoa(i) {
			t.Errorf("request %d: x-stainless-retry-count is %q", i, request.Retry)
		}
	}
}

// installed runs an install script and returns the path that it prints.
func installed(t *testing.T, script string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "../deps/"+script)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return strings.TrimSpace(string(out))
}

// play runs a script with the scenarios and reads what it prints. Its
// environment holds nothing that could lead an SDK elsewhere.
func play(t *testing.T, all []scenario, program, path, script string, args ...string) []seen {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	input, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, program, append([]string{script}, args...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "PYTHONDONTWRITEBYTECODE=1", path}
	cmd.Stdin = bytes.NewReader(input)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Errorf("%s: %v\n%s", script, err, stderr.String())
	}
	var list []seen
	for line := range strings.Lines(stdout.String()) {
		var s seen
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatalf("%s printed %q: %v", script, line, err)
		}
		list = append(list, s)
	}
	return list
}
