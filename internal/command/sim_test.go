// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/simengine"
)

// TestExampleOfSimWorksAsPasted: the request that the help shows is begun by the
// engine and cut after three tokens.
func TestExampleOfSimWorksAsPasted(t *testing.T) {
	e, err := simengine.Listen(simengine.Config{Name: "A"})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	_, curl, found := strings.Cut(newSim().Example, "curl ")
	if !found {
		t.Fatal("the help has no curl")
	}
	body := regexp.MustCompile(`-d '([^']*)'`).FindStringSubmatch(curl)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.URL()+"/v1/chat/completions", strings.NewReader(body[1]))
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range regexp.MustCompile(`-H '([^:]*): ([^']*)'`).FindAllStringSubmatch(curl, -1) {
		req.Header.Set(h[1], h[2])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if res.StatusCode != http.StatusOK || err == nil || !strings.Contains(string(text), "A1·3") || strings.Contains(string(text), "A1·4") {
		t.Errorf("%d, %v\n%s", res.StatusCode, err, text)
	}
	if got := req.Header.Get("Content-Type"); got != "application/json" {
		t.Errorf("Content-Type %q", got)
	}
}

// TestSimServesAdapters: with every preset an adapter is listed under its base and
// answers under its name.
func TestSimServesAdapters(t *testing.T) {
	for _, preset := range presets() {
		url := startSim(t, "--preset", preset, "--model", "base", "--adapter", "poet", "--adapter", "pirate")
		list := get(t, http.MethodGet, url+"/v1/models", "")
		for _, want := range []string{`"id":"base"`, `"id":"poet"`, `"id":"pirate"`, `"parent":"base"`} {
			if !strings.Contains(list, want) {
				t.Errorf("%s: lacks %s: %s", preset, want, list)
			}
		}
		const ask = `{"model":"pirate","max_tokens":1,"messages":[{"role":"user","content":"hello"}]}`
		if got := get(t, http.MethodPost, url+"/v1/chat/completions", ask); !strings.Contains(got, `"model":"pirate"`) {
			t.Errorf("%s: %s", preset, got)
		}
	}
}

// startSim runs headgate sim on a free port until the test ends.
func startSim(t *testing.T, args ...string) (url string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	out, in := io.Pipe()
	cmd := newSim()
	cmd.SetOut(in)
	cmd.SetArgs(append(args, "--listen", "127.0.0.1:0"))
	ended := make(chan error, 1)
	go func() {
		err := cmd.ExecuteContext(ctx)
		_ = in.CloseWithError(io.EOF)
		ended <- err
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line[strings.Index(line, "http://"):])
}

func get(t *testing.T, method, url, body string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
