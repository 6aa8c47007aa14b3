// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/headgate/headgate/internal/simengine"
)

func (r *rig) get(path, host string) reply {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), "GET", "http://"+r.addr+path, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	if host != "" {
		req.Host = host
	}
	res, err := r.client.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	return reply{res.StatusCode, res.Header, string(body), err}
}

func ids(list string) (names []string) {
	for _, id := range gjson.Get(list, "data.#.id").Array() {
		names = append(names, id.Str)
	}
	return names
}

// ERR-1: the list is the union of the pools, unique, and each id works.
func TestModelListIsWhatCanBeAskedFor(t *testing.T) {
	r, urls := newEngines(t, 2, func(i int, c *simengine.Config) {
		c.Models = [][]string{{"org/base:7b", "shared"}, {"embed", "shared", "hidden"}}[i]
		c.Adapters = [][]string{{"org/adapter@v2"}, nil}[i]
	})
	r.startYAML(fmt.Sprintf(`
routes:
  - match: {model: public}
    backends: [{pool: a}]
    rewrite: {model: "org/base:7b"}
  - match: {model: unlisted}
    backends: [{pool: a}]
    rewrite: {model: other}
  - match: {model: elsewhere, hostnames: [other.example]}
    backends: [{pool: a}]
  - match: {model: "org/*"}
    backends: [{pool: a}]
  - match: {model: shared}
    backends: [{pool: b}]
  - match: {model: embed, path: /v1/embeddings}
    backends: [{pool: b}]
pools:
  a: {discovery: {static: [{url: %q}]}}
  b: {discovery: {static: [{url: %q}]}}
`, urls[0], urls[1]))
	got := r.get("/v1/models", "")
	if want := []string{"embed", "org/adapter@v2", "org/base:7b", "public", "shared", "unlisted"}; got.status != 200 || !slices.Equal(ids(got.body), want) {
		t.Fatalf("%v, want %v", ids(got.body), want)
	}
	if got := ids(r.get("/v1/models", "other.example").body); !slices.Contains(got, "elsewhere") {
		t.Errorf("the other host has %v", got)
	}

	// An alias is what it stands for, under its own name.
	entry := r.get("/v1/models/public", "").body
	if gjson.Get(entry, "id").Str != "public" || gjson.Get(entry, "root").Str != "org/base:7b" || !gjson.Get(entry, "max_model_len").Exists() {
		t.Error(entry)
	}
	if entry := r.get("/v1/models/unlisted", "").body; gjson.Get(entry, "owned_by").Str != "headgate" {
		t.Error(entry)
	}
	for _, name := range []string{"public", "org/base:7b", "org/adapter@v2", "shared"} {
		got := r.post(chatPath, strings.Replace(wholeBody, "sim", name, 1))
		if got.status != 200 || gjson.Get(got.body, "model").Str != name {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got := r.post("/v1/embeddings", `{"model":"embed","input":"hi"}`); got.status != 200 {
		t.Errorf("%+v", got)
	}
}

// ERR-3 and SCH-11: an id is found as it was listed, raw or encoded once, and
// nothing else is; near names are told.
func TestModelByItsID(t *testing.T) {
	r, urls := newEngines(t, 1, func(_ int, c *simengine.Config) {
		c.Models = []string{"org/base:7b", "org/base", "org/base@v2.1", "with space", "名前"}
	})
	yaml := "routes:\n"
	for _, name := range []string{"org/base:7b", "org/base", "org/base@v2.1", "with space", "名前"} {
		yaml += fmt.Sprintf("  - {match: {model: %q}, backends: [{pool: p}]}\n", name)
	}
	r.startYAML(yaml + "pools: {p: {discovery: {static: [{url: \"" + urls[0] + "\"}]}}}\n")
	for path, want := range map[string]string{
		"org/base:7b": "org/base:7b", "org%2Fbase:7b": "org/base:7b", "org%2fbase%3A7b": "org/base:7b", "org/base": "org/base",
		"org/base@v2.1": "org/base@v2.1", "with%20space": "with space", "%E5%90%8D%E5%89%8D": "名前",
		"org%252Fbase": "", "org/base/": "", "org/base/../base": "", "org": "", "base": "", "": "", "ORG/base": "",
	} {
		got := r.get("/v1/models/"+path, "")
		if want == "" && (got.status != 404 || got.code() != "model_not_found") || want != "" && (got.status != 200 || gjson.Get(got.body, "id").Str != want) {
			t.Errorf("%s: %+v", path, got)
		}
	}
	for _, got := range []reply{r.get("/v1/models/org/base:7", ""), r.post(chatPath, strings.Replace(wholeBody, "sim", "org/base:7", 1))} {
		if got.status != 404 || !strings.Contains(got.body, `org/base:7b`) {
			t.Errorf("no near name: %s", got.body)
		}
	}
}
