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

	text, err := explain(body, "--token-file", token, "-H", "x-session-id: opensesame")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"nick, to engines sim", "routes[1]", "up 3, down 0", "profile cost", "goes to", "because", "least loaded of 2", "cost -", urls[0], urls[1]} {
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
	if _, err = explain(body, "--token-file", token, "-H", "nonsense"); err == nil || !strings.Contains(err.Error(), "Name: value") {
		t.Errorf("a bad header: %v", err)
	}
}
