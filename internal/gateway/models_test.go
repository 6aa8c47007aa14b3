// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/gateway"
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

// TestAdaptersAreServedByTheirBase: an adapter that no route names goes to the
// pool that lists it, under its own name, is in the list, and is a near name.
func TestAdaptersAreServedByTheirBase(t *testing.T) {
	r, urls := newEngines(t, 2, func(i int, c *simengine.Config) {
		c.Models = []string{"org/base"}
		c.Adapters = [][]string{nil, {"sql-lora"}}[i]
	})
	r.startYAML(fmt.Sprintf(`
keys: [{id: k, secret_sha256: %q}, {id: narrow, secret_sha256: %q, models: [public, sql-lorx]}]
routes:
  - match: {model: public}
    backends: [{pool: without, weight: 1000}, {pool: with, weight: 1}]
    rewrite: {model: org/base}
pools:
  without: {discovery: {static: [{url: %q}]}}
  with: {discovery: {static: [{url: %q}]}}
`, config.NewDigest("all").Hex(), config.NewDigest("few").Hex(), urls[0], urls[1]))
	as := func(key, path, body string) reply {
		t.Helper()
		method := "POST"
		if body == "" {
			method = "GET"
		}
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+r.addr+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		req.Header.Set("Content-Type", "application/json")
		res, err := r.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		got, err := io.ReadAll(res.Body)
		return reply{res.StatusCode, res.Header, string(got), err}
	}
	if got, want := ids(as("all", "/v1/models", "").body), []string{"public", "sql-lora"}; !slices.Equal(got, want) {
		t.Errorf("listed %v, want %v", got, want)
	}
	for range 5 {
		got := as("all", chatPath, `{"model":"sql-lora","messages":[{"role":"user","content":"x"}]}`)
		if got.status != 200 || gjson.Get(got.body, "model").Str != "sql-lora" {
			t.Fatalf("status %d: %s", got.status, got.body)
		}
	}
	if n := r.received(); n[0] != 0 || n[1] != 5 {
		t.Errorf("engines got %v", n)
	}
	unknown := `{"model":"sql-lorx","messages":[]}`
	if got := as("all", chatPath, unknown); got.status != 404 || !strings.Contains(got.body, "sql-lora") {
		t.Errorf("%d %s", got.status, got.body)
	}
	// What a key may not use it is not told either.
	if got := as("few", chatPath, unknown); got.status != 404 || strings.Contains(got.body, "sql-lora") {
		t.Errorf("%d %s", got.status, got.body)
	}
	q := gateway.Question{Path: chatPath, Header: http.Header{"Content-Type": {"application/json"}}, Body: []byte(`{"model":"sql-lora","messages":[]}`)}
	if e := r.gateway.Explain(q); e.Pool != "with" || e.Target != "sql-lora" || e.Adapter != "sql-lora" {
		t.Errorf("%+v", e)
	}
}

// TestSessionsStayWithTheirBackend: by header, by field, and per tenant.
func TestSessionsStayWithTheirBackend(t *testing.T) {
	r, urls := newEngines(t, 2)
	r.startYAML(fmt.Sprintf(`
session: {header: X-Conversation, field: user}
routes: [{sticky: true, backends: [{pool: a}, {pool: b}]}]
pools:
  a: {discovery: {static: [{url: %q}]}}
  b: {discovery: {static: [{url: %q}]}}
`, urls[0], urls[1]))
	pool := func(header, body string) string {
		t.Helper()
		h := http.Header{"Content-Type": {"application/json"}}
		if header != "" {
			h.Set("X-Conversation", header)
		}
		e := r.gateway.Explain(gateway.Question{Path: chatPath, Header: h, Body: []byte(body)})
		if e.Error != nil {
			t.Fatal(e.Error)
		}
		return e.Pool
	}
	const none = `{"model":"sim","messages":[]}`
	drawn := map[string]int{}
	for i := range 40 {
		session := fmt.Sprintf("s%d", i)
		home := pool(session, none)
		drawn[home]++
		inBody := fmt.Sprintf(`{"model":"sim","user":%q,"messages":[]}`, session)
		if a, b, c := pool(session, none), pool("", inBody), pool(session, `{"model":"sim","user":"another","messages":[]}`); a != home || b != home || c != home {
			t.Errorf("%s is at %s, %s, %s and %s", session, home, a, b, c)
		}
	}
	if drawn["a"] < 8 || drawn["b"] < 8 {
		t.Errorf("40 sessions drew %v", drawn)
	}
	moved, long := map[string]bool{}, strings.Repeat("x", 257)
	for range 60 {
		moved[pool("", none)] = true
		moved[pool(long, none)] = true
	}
	if len(moved) != 2 {
		t.Errorf("without a session all went to %v", moved)
	}
}

// Engines that tell their model's revision are asked; what is configured goes
// first, and two of one pool that differ are a mixture.
func TestEnginesTellTheirRevision(t *testing.T) {
	tgi := func(sha string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/info" {
				fmt.Fprintf(w, `{"model_id":"org/m","model_sha":%q}`, sha)
			}
		}))
		t.Cleanup(s.Close)
		return s.URL
	}
	r := &rig{t: t, records: &records{ended: make(chan struct{}, 1)}}
	r.startYAML(fmt.Sprintf("pools: {p: {engine: tgi, discovery: {static: [{url: %q}, {url: %q}, {url: %q, model_revision: org/m@1}]}}}",
		tgi("1"), tgi("2"), tgi("3")))
	r.until("both revisions are known", func() bool {
		return strings.Join(r.gateway.Status()[0].Revisions(), " ") == "org/m@1 org/m@2"
	})
}

// One engine that hangs hides no model of another.
func TestHungEnginesHideNoModels(t *testing.T) {
	t.Parallel()
	r, urls := newEngines(t, 1, func(_ int, c *simengine.Config) { c.Models = []string{"good"} })
	hung, err := net.Listen("tcp", "127.0.0.1:0") // its backlog takes connections
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = hung.Close() })
	yaml := "routes: [{match: {model: good}, backends: [{pool: ok}]}]\npools:\n"
	for _, name := range []string{"a", "b", "c", "z"} {
		yaml += fmt.Sprintf("  %s: {health: {interval: 0s}, discovery: {static: [{url: \"http://%s\"}]}}\n", name, hung.Addr())
	}
	r.startYAML(yaml + fmt.Sprintf("  ok: {health: {interval: 0s}, discovery: {static: [{url: %q}]}}\n", urls[0]))
	if got := ids(r.get("/v1/models", "").body); !slices.Equal(got, []string{"good"}) {
		t.Errorf("listed %v", got)
	}
	if got := r.get("/v1/models/good", ""); got.status != 200 {
		t.Errorf("%+v", got)
	}
}

// lister is an engine whose models change.
type lister struct {
	mu     sync.Mutex
	models []string
	hold   chan struct{} // not nil: a list is answered once it is closed
	lists  int
}

func (l *lister) serve(models ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.models = models
}

// asked is how often it was asked for its models.
func (l *lister) asked() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lists
}

func (l *lister) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	l.mu.Lock()
	models, hold := l.models, l.hold
	if q.URL.Path == "/v1/models" {
		l.lists++
	}
	l.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch q.URL.Path {
	case "/v1/models":
		if hold != nil {
			<-hold
		}
		list := `{"id":"base"}`
		for _, name := range models {
			list += fmt.Sprintf(`,{"id":%q,"parent":"base"}`, name)
		}
		fmt.Fprintf(w, `{"data":[%s]}`, list)
	case chatPath:
		body, _ := io.ReadAll(q.Body)
		if name := gjson.GetBytes(body, "model").Str; name != "base" && !slices.Contains(models, name) {
			w.WriteHeader(404)
			fmt.Fprint(w, `{"error":{"message":"no such model","code":404}}`)
			return
		}
		fmt.Fprint(w, `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]}`)
	}
}

// startListers puts a gateway before engines that serve "base" and some adapters.
func startListers(t *testing.T, n int, settings string, adapters ...string) (r *rig, engines []*lister, yaml string) {
	t.Helper()
	r = &rig{t: t, records: &records{ended: make(chan struct{}, 1024)}}
	static := ""
	for range n {
		l := &lister{models: adapters}
		s := httptest.NewServer(l)
		t.Cleanup(s.Close)
		engines, static = append(engines, l), static+fmt.Sprintf("{url: %q}, ", s.URL)
	}
	yaml = "routes: [{match: {model: base}, backends: [{pool: p}]}]\npools: {p: {scrape: {interval: 0s}, " + settings + ", discovery: {static: [" + static + "]}}}\n"
	r.startYAML(yaml)
	return r, engines, yaml
}

func (r *rig) asks(model string) int {
	return r.post(chatPath, `{"model":"`+model+`","messages":[{"role":"user","content":"x"}]}`).status
}

// An adapter that is loaded later is found by those who ask for it, with probes or
// without, and is not forgotten when a reload begins the connections anew.
func TestAdaptersThatAreLoadedLaterAreFound(t *testing.T) {
	t.Parallel()
	r, engines, yaml := startListers(t, 1, "health: {interval: 0s}")
	if got := r.asks("sql"); got != 404 {
		t.Fatalf("status %d before it is loaded", got)
	}
	r.until("the engine is asked for its models", func() bool { return engines[0].asked() > 0 })
	engines[0].serve("sql")
	r.until("the adapter is found", func() bool { return r.asks("sql") == 200 })
	hold := make(chan struct{})
	engines[0].mu.Lock()
	engines[0].hold = hold
	engines[0].mu.Unlock()
	r.reload(strings.Replace(yaml, "{p: {", "{p: {timeouts: {connect: 3s}, ", 1))
	if got := r.asks("sql"); got != 200 {
		t.Errorf("status %d after a reload, while the engine is asked again", got)
	}
	close(hold)
}

// An engine that no longer serves what it listed is asked again, and requests go to
// the one that does.
func TestAdaptersThatAreUnloadedAreNotAskedFor(t *testing.T) {
	t.Parallel()
	r, engines, _ := startListers(t, 2, "health: {interval: 1m}, routing: {profile: least_load}", "sql")
	r.until("both were asked", func() bool { return engines[0].asked() > 0 && engines[1].asked() > 0 })
	r.until("the adapter is found", func() bool { return r.asks("sql") == 200 })
	engines[0].serve()
	before := engines[0].asked()
	r.until("one meets the engine that has unloaded it", func() bool { return r.asks("sql") == 404 })
	r.until("it is asked again", func() bool { return engines[0].asked() > before })
	r.until("the engine that has it gets the requests", func() bool {
		for range 10 {
			if r.asks("sql") != 200 {
				return false
			}
		}
		return true
	})
}
