// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/lifecycle"
	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/plugins/standard"
)

// TestExplainAsksARunningGateway: for people and as JSON, with nothing sent to an
// engine and nothing told of the prompt or of headers.
func TestExplainAsksARunningGateway(t *testing.T) {
	var urls []string
	var engines []*simengine.Engine
	for range 2 {
		e, err := simengine.Listen(simengine.Config{Name: "E"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		urls, engines = append(urls, e.URL()), append(engines, e)
	}
	folder := t.TempDir()
	token := filepath.Join(folder, "token")
	if err := os.WriteFile(token, []byte("s3same\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	yaml := `
listeners: [{name: main, address: "127.0.0.1:0"}]
admin: {address: "127.0.0.1:0", token: s3same}
journal: {driver: none}
routes:
  - {match: {model: never}, backends: [{pool: down}]}
  - {match: {model: nick}, backends: [{pool: up, weight: 3}, {pool: down, weight: 0}], rewrite: {model: sim}}
pools:
  up: {health: {interval: 0s}, discovery: {static: [{url: "` + urls[0] + `"}, {url: "` + urls[1] + `"}]}}
  down: {health: {interval: 0s}, discovery: {static: [{url: "http://127.0.0.1:1"}]}}
`
	c, err := config.Parse("test.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	p, err := lifecycle.Start(c, slog.New(slog.DiscardHandler), "test")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Stop()
	explain := func(body string, args ...string) (string, error) {
		var out bytes.Buffer
		root := newRoot(standard.Plugins)
		root.SetIn(strings.NewReader(body))
		root.SetOut(&out)
		root.SetArgs(append([]string{"explain", "--admin", "http://" + p.AdminAddr().String()}, args...))
		err := root.Execute()
		return out.String(), err
	}
	body := `{"model":"nick","messages":[{"role":"user","content":"` + strings.Repeat("swordfish ", 200) + `"}]}`

	text, err := explain(body, "--token-file", token, "-H", "x-session-id: opensesame", "-H", "x-slo-ttft-ms: 1500")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"nick, to engines sim", "routes[1]", "up 3, down 0", "profile cost", "priority  0", "first output 1.5s, per token none", "goes to", "because", "least loaded of 2", "cost -", urls[0], urls[1]} {
		if !strings.Contains(text, want) {
			t.Errorf("lacks %q:\n%s", want, text)
		}
	}
	raw, err := explain(body, "--token-file", token, "--json")
	if err != nil {
		t.Fatal(err)
	}
	var e gateway.Explained
	if err := json.Unmarshal([]byte(raw), &e); err != nil || e.Decision == nil {
		t.Fatalf("%v\n%s", err, raw)
	}
	if d := e.Decision; e.Pool != "up" || e.Target != "sim" || e.Prompt.Tokens < 100 || d.Endpoint == "" || len(d.Candidates) != 2 || len(d.Candidates[0].Scores) != 1 {
		t.Errorf("%s", raw)
	}
	for _, out := range []string{text, raw} {
		for _, secret := range []string{"swordfish", "opensesame", "s3same"} {
			if strings.Contains(out, secret) {
				t.Errorf("tells %q:\n%s", secret, out)
			}
		}
	}
	for _, e := range engines {
		for _, entry := range e.Log() {
			if entry.Method == "POST" {
				t.Errorf("an engine got a request: %+v", entry)
			}
		}
	}

	if text, err = explain(`{"model":"nik","messages":[]}`, "--token-file", token); err != nil || !strings.Contains(text, "model_not_found") || !strings.Contains(text, `did you mean "nick"`) {
		t.Errorf("%v\n%s", err, text)
	}
	if text, err = explain(`{`, "--token-file", token); err != nil || !strings.Contains(text, "invalid_json") {
		t.Errorf("%v\n%s", err, text)
	}
	if text, err = explain(body, "--token-file", token, "--path", "/v1/nothing"); err != nil || !strings.Contains(text, "not_found") {
		t.Errorf("%v\n%s", err, text)
	}
	if _, err = explain(body); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("without a token: %v", err)
	}
	if text, err = explain(body, "--token-file", token, "--admin", p.AdminAddr().String()); err != nil || !strings.Contains(text, "goes to") {
		t.Errorf("an admin address without scheme: %v\n%s", err, text)
	}
	if _, err = explain(body, "--admin", "a b:c"); err == nil || !strings.Contains(err.Error(), "http://host:port") {
		t.Errorf("no address: %v", err)
	}
	if _, err = explain(body, "--token-file", token, "-H", "nonsense"); err == nil || !strings.Contains(err.Error(), "Name: value") {
		t.Errorf("a bad header: %v", err)
	}
}

func TestExplainSaysWhatARequestWouldWaitFor(t *testing.T) {
	for name, c := range map[string]struct {
		decision gateway.PoolDecision
		queued   gateway.QueueLength
		want     []string
	}{
		"one that is busy": {
			gateway.PoolDecision{Waits: true, Endpoint: "http://a", Reason: "best score of 2", TTFT: 0.5, TPOT: 0.03},
			gateway.QueueLength{Requests: 3, Before: 1},
			[]string{
				"would wait  for http://a, which has no room\n", "because     best score of 2\n", "priority    10, objective typing\n",
				"targets     first output 500ms, per token 30ms\n", "queue       3 wait, 1 of them with this priority or a higher one",
			},
		},
		"any": {
			gateway.PoolDecision{Waits: true, Candidates: []gateway.CandidateFate{{Out: "label: zone is b, not a"}, {Out: "full"}}},
			gateway.QueueLength{}, []string{"would wait  for room on any endpoint that could take it\n", "out: full\n"},
		},
		"a start": {
			gateway.PoolDecision{Waits: true, Candidates: []gateway.CandidateFate{{Out: "gone"}}},
			gateway.QueueLength{}, []string{"would wait  for an engine to be started\n"},
		},
	} {
		var out bytes.Buffer
		e := gateway.Explained{Objective: "typing", Priority: 10, Queued: &c.queued, Decision: &c.decision}
		if err := printExplained(&out, &e); err != nil {
			t.Fatal(err)
		}
		for _, want := range c.want {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s lacks %q:\n%s", name, want, out.String())
			}
		}
		if strings.Contains(out.String(), "goes to") || c.queued.Requests == 0 && strings.Contains(out.String(), "queue") {
			t.Errorf("%s:\n%s", name, out.String())
		}
	}
}
