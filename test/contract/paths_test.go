// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"strings"
	"testing"
)

// On /v1/messages the error has Anthropic's shape.
func TestRefusalOnMessagesHasAnthropicsShape(t *testing.T) {
	t.Parallel()
	g, _ := twoModels(t)
	a := g.post(t, "/v1/messages", `{"model":"gpt-9","messages":[]}`)
	if a.status != 404 || a.header.Get("Headgate-Reason") != "model_not_found" || a.header.Get("x-should-retry") != "false" {
		t.Errorf("%d %v", a.status, a.header)
	}
	for _, part := range []string{`"type":"error"`, `"error":{`, `"type":"not_found_error"`, `"message":`, `"request_id":"req_`, `"retryable":false`} {
		if !strings.Contains(strings.ReplaceAll(a.body, " ", ""), part) {
			t.Errorf("no %s in %s", part, a.body)
		}
	}
}

// Every path of the client API reaches the engine as it is.
func TestEveryPathOfTheClientAPIIsServed(t *testing.T) {
	t.Parallel()
	e := newEngine(t, func(x *exchange) {
		if x.target == chat || x.target == "/v1/completions" {
			x.json(200, plain)
			return
		}
		x.json(200, `{"object":"list","model":"m","data":[]}`)
	})
	g := serve(t, e, "")
	for path, body := range map[string]string{
		chat:               plainChat,
		"/v1/completions":  `{"model":"m","prompt":"hi"}`,
		"/v1/responses":    `{"model":"m","input":"hi"}`,
		"/v1/embeddings":   `{"model":"m","input":["a","b"]}`,
		"/v1/messages":     `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}`,
		"/v1/rerank":       `{"model":"m","query":"q","documents":["a"]}`,
		"/v1/score":        `{"model":"m","text_1":"q","text_2":["a"]}`,
		"/tokenize":        `{"model":"m","prompt":"hi"}`,
		"/detokenize":      `{"model":"m","tokens":[1]}`,
		"/v1/audio/speech": `{"model":"m","input":"hi","voice":"v"}`,
	} {
		t.Run(path, func(t *testing.T) {
			before := len(e.requests())
			a := g.post(t, path, body)
			got := e.requests()[before:]
			if a.status != 200 || len(got) != 1 {
				t.Fatalf("%d %s; %d requests at the engine", a.status, a.body, len(got))
			}
			if got[0].target != path || got[0].body != body {
				t.Errorf("the engine got %s %s", got[0].target, got[0].body)
			}
		})
	}
}
