// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/lifecycle"
)

// front is a gateway directly before engines, as an operator sees it.
type front struct {
	t          *testing.T
	url, admin string
	client     *http.Client
}

// newFront starts a gateway before engines at these addresses. settings are of
// the pool.
func newFront(t *testing.T, settings string, addresses ...string) *front {
	t.Helper()
	yaml := "listeners: [{name: main, address: \"127.0.0.1:0\", debug_headers: true}]\nadmin: {address: \"127.0.0.1:0\"}\njournal: {driver: none}\npools:\n  tiny: {" + settings + ", discovery: {static: ["
	for _, a := range addresses {
		yaml += fmt.Sprintf("{url: \"http://%s\"},", a)
	}
	c, err := config.Parse("test.yaml", []byte(yaml+"]}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	log := &logFile{}
	p, err := lifecycle.Start(c, slog.New(slog.NewTextHandler(log, nil)), "test")
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DisableCompression: true}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		p.Stop()
		if t.Failed() {
			t.Logf("gateway\n%s", log.text())
		}
	})
	return &front{t, "http://" + p.Addr("main").String(), "http://" + p.AdminAddr().String(), &http.Client{Transport: transport}}
}

// routed is an answer and where it came from.
type routed struct {
	text     string
	endpoint string // address
	expected int    // tokens of the prompt that the gateway took for cached
	prompt   int    // tokens, as the engine counts
	cached   int    // of them, as the engine says
}

func (f *front) body(prompt string, tokens int) []byte {
	f.t.Helper()
	body, err := json.Marshal(map[string]any{"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true})
	if err != nil {
		f.t.Fatal(err)
	}
	return body
}

// expected is how many tokens of a prompt the gateway takes for cached at an
// address.
func (f *front) expected(prompt, address string) int {
	f.t.Helper()
	res, err := f.client.Post(f.admin+"/admin/v1/explain?path=/v1/completions", "application/json", bytes.NewReader(f.body(prompt, 1)))
	if err != nil {
		f.t.Fatal(err)
	}
	defer res.Body.Close()
	var why struct {
		Decision struct {
			Candidates []struct {
				Endpoint string
				Cached   int `json:"cached_tokens"`
			}
		}
	}
	if err := json.NewDecoder(res.Body).Decode(&why); err != nil {
		f.t.Fatalf("status %d: %v", res.StatusCode, err)
	}
	for _, c := range why.Decision.Candidates {
		if strings.HasSuffix(c.Endpoint, address) {
			return c.Cached
		}
	}
	f.t.Fatalf("%s is no candidate", address)
	return 0
}

// complete has a prompt completed at temperature 0.
func (f *front) complete(prompt string, tokens int) routed {
	f.t.Helper()
	body := f.body(prompt, tokens)
	req, err := http.NewRequestWithContext(f.t.Context(), http.MethodPost, f.url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := f.client.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	var a struct {
		Choices []struct{ Text string }
		Usage   struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err != nil || res.StatusCode != 200 || json.Unmarshal(answer, &a) != nil || len(a.Choices) != 1 {
		f.t.Fatalf("status %d, %v: %s", res.StatusCode, err, answer)
	}
	out := routed{
		text: a.Choices[0].Text, prompt: a.Usage.Prompt, cached: a.Usage.Details.Cached,
		endpoint: strings.TrimPrefix(res.Header.Get("Headgate-Endpoint"), "http://"),
	}
	route := res.Header.Get("Headgate-Route")
	if _, after, ok := strings.Cut(route, "cached="); ok {
		if _, err := fmt.Sscan(after, &out.expected); err != nil {
			f.t.Fatalf("route %q", route)
		}
	}
	return out
}

// twice has a prompt completed until some engine has done so for the second time:
// its cache was cold, and then warm.
func (f *front) twice(prompt string, tokens int) (cold, warm routed) {
	f.t.Helper()
	first := map[string]routed{}
	for {
		got := f.complete(prompt, tokens)
		if before, ok := first[got.endpoint]; ok {
			return before, got
		}
		first[got.endpoint] = got
	}
}

// told is what the admin API says of an endpoint.
type told struct {
	Endpoint string
	Engine   string
	InFlight int    `json:"in_flight"`
	Error    string `json:"scrape_error"`
	Reported *struct {
		Age     float64 `json:"age_seconds"`
		Waiting *float64
		Running *float64
		KVUsage *float64 `json:"kv_usage"`
		Others  float64
		Doubt   string
	}
}

// endpoint is what the gateway knows of the engine at an address.
func (f *front) endpoint(address string) told {
	f.t.Helper()
	res, err := f.client.Get(f.admin + "/admin/v1/endpoints")
	if err != nil {
		f.t.Fatal(err)
	}
	defer res.Body.Close()
	var list struct{ Endpoints []told }
	if err := json.NewDecoder(res.Body).Decode(&list); err != nil {
		f.t.Fatal(err)
	}
	for _, e := range list.Endpoints {
		if strings.HasSuffix(e.Endpoint, address) {
			return e
		}
	}
	f.t.Fatalf("no endpoint %s", address)
	return told{}
}

// awaits asks the gateway until it says so of the engine at an address.
func (f *front) awaits(what, address string, holds func(told) bool) {
	f.t.Helper()
	over := time.After(patience)
	for {
		e := f.endpoint(address)
		if holds(e) {
			return
		}
		select {
		case <-over:
			text, _ := json.Marshal(e)
			f.t.Fatalf("%s: not within %v: %s", what, patience, text)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
