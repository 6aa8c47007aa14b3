// SPDX-License-Identifier: Apache-2.0

package keep

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/headgate/headgate/internal/simengine"
)

// threeKeys are a key for everything, one for one family of models, and one for
// a single model in the same tenant.
func threeKeys() string {
	return fmt.Sprintf(`keys:
  - {id: all, secret_sha256: %s, tenant: red}
  - {id: family, secret_sha256: %s, tenant: blue, models: ["small-*"]}
  - {id: single, secret_sha256: %s, tenant: blue, models: [large]}
`, sha("secret-one"), sha("secret-two"), sha("secret-uno"))
}

func chatOf(model string) string {
	return fmt.Sprintf(`{"model":%q,"stream":true,"messages":[{"role":"user","content":"hi"}]}`, model)
}

func TestAPIKeysDecideWhoMayAskForWhat(t *testing.T) {
	t.Parallel()
	e := engines(t, 1, func(c *simengine.Config) { c.Models = []string{"small-1", "small-2", "large"} })
	g := start(t, "", threeKeys()+onePool(static(e...)))
	for _, c := range []struct {
		name   string
		header []string
		model  string
		status int
		code   string
	}{
		{"no key", nil, "large", 401, "unauthorized"},
		{"unknown key", []string{"Authorization", "Bearer nonsense"}, "large", 401, "unauthorized"},
		{"empty key", []string{"Authorization", "Bearer "}, "large", 401, "unauthorized"},
		{"the digest instead of the key", []string{"Authorization", "Bearer " + sha("secret-one")}, "large", 401, "unauthorized"},
		{"another scheme", []string{"Authorization", "Basic " + base64.StdEncoding.EncodeToString([]byte("secret-one:"))}, "large", 401, "unauthorized"},
		{"two keys that differ", append(bearer("one"), "X-Api-Key", "secret-two"), "large", 401, "unauthorized"},
		{"key in a query", nil, "large", 401, "unauthorized"},
		{"any model", bearer("one"), "large", 200, ""},
		{"as Anthropic's clients send it", []string{"X-Api-Key", "secret-one"}, "small-1", 200, ""},
		{"scheme in lower case", []string{"Authorization", "bearer secret-one"}, "small-1", 200, ""},
		{"model of the family", bearer("two"), "small-2", 200, ""},
		{"model outside the family", bearer("two"), "large", 403, "forbidden"},
		{"single model", bearer("uno"), "large", 200, ""},
		{"not the single model", bearer("uno"), "small-1", 403, "forbidden"},
		{"forbidden model that does not exist", bearer("uno"), "none", 403, "forbidden"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := len(received(e...))
			a := g.try("POST", chat+"?api_key=secret-one", chatOf(c.model), c.header...)
			if c.status == 200 {
				if !a.whole() {
					t.Fatal(a)
				}
				return
			}
			refused(t, a, c.status, c.code, false)
			if n := len(received(e...)); n != before {
				t.Error("the engine got it")
			}
		})
	}
	// A refusal of who may not ask comes before what is wrong with the request.
	if a := g.post("{"); a.status != 401 {
		t.Errorf("a bad body without a key: %v", a)
	}
	for _, path := range []string{"/v1/models", "/v1/models/large", "/v1/requests/req_0"} {
		refused(t, g.get(path), 401, "unauthorized", false)
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if a := g.get(path); a.status != 200 {
			t.Errorf("%s: %v", path, a)
		}
	}
}

func TestModelListShowsWhatAKeyMayUse(t *testing.T) {
	t.Parallel()
	e := engines(t, 1, func(c *simengine.Config) { c.Models = []string{"small-1", "small-2", "large"} })
	g := start(t, "", threeKeys()+onePool(static(e...))+
		"routes: [{match: {model: small-alias}, backends: [{pool: p}], rewrite: {model: small-1}}, {backends: [{pool: p}]}]\n")
	for name, want := range map[string]string{
		"one": "large small-1 small-2 small-alias", "two": "small-1 small-2 small-alias", "uno": "large",
	} {
		var list struct{ Data []struct{ ID string } }
		a := g.get("/v1/models", bearer(name)...)
		if err := json.Unmarshal([]byte(a.body), &list); err != nil {
			t.Fatal(a)
		}
		var ids []string
		for _, m := range list.Data {
			ids = append(ids, m.ID)
			if b := g.get("/v1/models/"+m.ID, bearer(name)...); b.status != 200 {
				t.Errorf("%s: %s is listed: %v", name, m.ID, b)
			}
		}
		slices.Sort(ids)
		if got := strings.Join(ids, " "); got != want {
			t.Errorf("%s sees %q, want %q", name, got, want)
		}
	}
	refused(t, g.get("/v1/models/large", bearer("two")...), 404, "model_not_found", false)
}

// One's own requests, and those of one's tenant; of others not even that they
// exist.
func TestRecordsOfOtherTenantsAreNotThere(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	g := start(t, "", twoTenants()+onePool(static(e...)))
	a := g.post(streamed, bearer("one")...)
	if r := g.record(a.id(), bearer("one")...); r.Tenant != "red" || r.Outcome != "completed" {
		t.Errorf("%+v", r)
	}
	if r := g.record(a.id(), bearer("uno")...); r.RequestID != a.id() {
		t.Errorf("of the same tenant: %+v", r)
	}
	other := g.get("/v1/requests/"+a.id(), bearer("two")...)
	refused(t, other, 404, "not_found", false)
	none := g.get("/v1/requests/req_00000000000000000000000000", bearer("two")...)
	strip := func(a answer) string { return requestID.ReplaceAllString(a.body, "") }
	if strip(other) != strip(none) || other.status != none.status {
		t.Errorf("a request of another tenant shows:\n%s\n%s", other.body, none.body)
	}
	for _, id := range []string{"", "/", "%2e%2e/models", "x", "req_" + strings.Repeat("0", 5000), "req_%00"} {
		if a := g.get("/v1/requests/"+id, bearer("two")...); a.status != 404 && a.status != 400 && a.status != 301 {
			t.Errorf("%.20q: %v", id, a)
		}
	}
}

// SEC-1, SEC-2: nothing that a run leaves behind holds a secret that it was
// given: not the log at its most talkative, the journal's file, metrics, the
// admin API, answers, what engines get, or the output of a crash.
func TestSecretsAreNowhere(t *testing.T) {
	t.Parallel()
	secrets := map[string]string{
		"API key":          "sk-apikey-8f3a1c77",
		"other API key":    "sk-otherkey-55d0e9b2",
		"unknown API key":  "sk-wrongkey-bb91d6e0",
		"engine's bearer":  "engine-bearer-c20f44aa",
		"admin token":      "admin-token-7e6d1b03",
		"wrong token":      "admin-wrong-3c9a4d18",
		"cookie":           "cookie-session-19be77d4",
		"basic password":   "basic-pass-0aa41fd2",
		"proxy password":   "proxy-pass-d2c51e6b",
		"key in the query": "query-secret-e1f70c95",
		"Idempotency-Key":  "idem-secret-4b8e2f61",
		"prompt":           "prompt-words-a7c3390d",
		"bad body":         "body-words-5d12c8ef",
		"bad config":       "config-secret-99ab01cd",
	}
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "bearer"), []byte(secrets["engine's bearer"]+"\n"), 0o600))
	e := engines(t, 2)
	yaml := fmt.Sprintf(`listeners: [{name: main, address: 127.0.0.1:0, debug_headers: true}]
admin: {address: 127.0.0.1:0, token: %s}
keys: [{id: team, secret_sha256: %s, models: [sim]}, {id: other, secret_sha256: %s}]
`, secrets["admin token"], sha(secrets["API key"]), sha(secrets["other API key"])) +
		onePool(static(e...)+", credential: {bearer_file: bearer}, health: {interval: 100ms, generate: true, generate_every: 1s}")
	p := serve(t, dir, yaml, launch{tags: "faultpoint", token: secrets["admin token"], env: []string{"GOTRACEBACK=all"}})

	var said []answer // everything that clients and operators are told
	say := func(a answer) answer {
		said = append(said, a)
		return a
	}
	prompt := strings.Replace(streamed, "hi", secrets["prompt"], 1)
	header := func(key string, more ...string) []string {
		return append([]string{
			"Authorization", "Bearer " + key, "Cookie", "session=" + secrets["cookie"],
			"Proxy-Authorization", "Basic " + base64.StdEncoding.EncodeToString([]byte("u:"+secrets["proxy password"])),
		}, more...)
	}
	good := secrets["API key"]
	for i, fault := range []string{"", "attempt=1;status@head:500", "status@head:500", "rst@token:2", "status@head:404:json", "badhead:nocolon", "garbage@head", "html@head"} {
		k := fmt.Sprintf("%s-%d", secrets["Idempotency-Key"], i)
		for range 2 {
			say(p.post(prompt, header(good, "X-Sim-Fault", fault, "Idempotency-Key", k)...))
		}
		say(p.post(strings.Replace(prompt, "user", "system", 1), header(good, "Idempotency-Key", k)...))
	}
	if !said[0].whole() || said[1].header.Get("Idempotent-Replayed") != "true" {
		t.Fatalf("%v\n%v", said[0], said[1])
	}
	say(p.try("POST", chat+"?api_key="+url.QueryEscape(secrets["key in the query"]), prompt, header(good)...))
	say(p.try("POST", "/v1/nowhere?api_key="+secrets["key in the query"], prompt, header(good)...))
	say(p.post(prompt, header(secrets["unknown API key"])...))
	say(p.post(prompt, header(good, "X-Api-Key", secrets["unknown API key"])...))
	say(p.post(prompt, "Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("u:"+secrets["basic password"]))))
	say(p.post(`{"model":"sim","messages":"`+secrets["bad body"]+`"`, header(good)...))
	say(p.post(`{"messages":"`+secrets["bad body"]+`"}`, header(good)...))
	say(p.post(`{"model":["`+secrets["bad body"]+`"]}`, header(good)...))
	say(p.post(chatOf("other-model"), header(good)...))
	say(p.get("/v1/models", header(good)...))
	say(p.get("/v1/requests/"+said[0].id(), header(good)...))
	say(p.get("/v1/requests/"+said[0].id(), header(secrets["other API key"])...))

	say(p.get("http://"+p.admin+"/metrics", "Authorization", "Bearer "+secrets["wrong token"]))
	for _, path := range []string{"/metrics", "/admin/v1/endpoints", "/admin/v1/requests", "/admin/v1/requests/" + said[0].id(),
		"/admin/v1/requests/" + said[0].id() + "/events", "/admin/v1/requests?outcome=nonsense", "/debug/pprof/", "/debug/vars"} {
		say(p.operator(path))
	}

	// A reload that works and one that does not.
	p.signal(syscall.SIGHUP)
	write(t, filepath.Join(dir, "headgate.yaml"), strings.Replace(yaml, "keys:", "admin_token: "+secrets["bad config"]+"\nkeys:", 1))
	eventually(t, "the bad file is told of", func() bool { return strings.Contains(p.log.String(), "not reloaded") })

	journal := headgate(t, "journal", "export", "--file", filepath.Join(dir, "headgate.db")) +
		headgate(t, "journal", "get", said[0].id(), "--file", filepath.Join(dir, "headgate.db")) +
		headgate(t, "journal", "list", "--file", filepath.Join(dir, "headgate.db"))

	// The stacks of a process that is made to crash with requests under way.
	s := p.open(prompt, header(good, "X-Sim-Fault", "stall@token:2")...)
	s.until("·")
	p.signal(syscall.SIGABRT)
	if !strings.Contains(p.log.String(), "goroutine ") {
		t.Errorf("no stacks:\n%s", p.log.tail(2000))
	}
	s.leave()

	left := map[string][]byte{"log and crash output": []byte(p.log.String()), "journal commands": []byte(journal)}
	for i, a := range said {
		left[fmt.Sprintf("answer %d", i)] = fmt.Appendf(nil, "%v %s", a.header, a.body)
	}
	files, err := filepath.Glob(filepath.Join(dir, "headgate.db*"))
	must(t, err)
	if len(files) < 2 {
		t.Errorf("journal files: %v", files)
	}
	for _, file := range files {
		left[filepath.Base(file)], err = os.ReadFile(file)
		must(t, err)
	}
	for _, engine := range e {
		for _, entry := range engine.Log() {
			b, err := json.Marshal(entry)
			must(t, err)
			left["engine "+entry.Engine] = append(append(left["engine "+entry.Engine], b...), '\n')
			for _, name := range entry.Flagged {
				// The gateway's own questions about models keep no connection.
				if own := name == "Connection" && entry.Path == "/v1/models"; name != "Authorization" && !own {
					t.Errorf("the engine got %s at %s", name, entry.Path)
				}
			}
		}
	}
	for where, b := range left {
		for name, secret := range secrets {
			// The query is the client's own and goes to the engine; its secret is
			// none that we were trusted with, but it has no place in our log.
			allowed := name == "engine's bearer" && strings.HasPrefix(where, "engine ") ||
				name == "key in the query" && strings.HasPrefix(where, "engine ")
			for form, hidden := range map[string]string{
				"": secret, "in base64 ": base64.StdEncoding.EncodeToString([]byte("u:" + secret)),
				"as digest ": sha(secret),
			} {
				if form == "as digest " && (name == "prompt" || name == "bad body") || allowed {
					continue
				}
				if i := bytes.Index(b, []byte(hidden)); i >= 0 {
					t.Errorf("%s: %s%s: …%q…", where, form, name, b[max(0, i-80):min(len(b), i+len(hidden)+40)])
				}
			}
		}
	}
	if n := len(left["log and crash output"]); n < 5000 {
		t.Errorf("only %d bytes of log: what was looked at?", n)
	}
	if !bytes.Contains(left["engine A"], []byte(secrets["engine's bearer"])) {
		t.Error("the engine did not get its credential: this search finds nothing")
	}
	// The engine's credential is sent, to engines only, and in the client's place.
	for _, entry := range received(e...) {
		if got := entry.Header["Authorization"]; !slices.Equal(got, []string{"Bearer " + secrets["engine's bearer"]}) {
			t.Errorf("the engine got Authorization %q", got)
		}
	}
}

// SEC-6: who is not trusted gains nothing by saying so, and nothing of it is
// passed on.
func TestClientsPriorityHeadersStayHere(t *testing.T) {
	t.Parallel()
	e := engines(t, 1)
	g := start(t, "", twoTenants()+onePool(static(e...)))
	for _, value := range []string{"critical", "-1", "1e9", "\"", strings.Repeat("x", 4000)} {
		header := append(bearer("one"), "x-llm-d-inference-objective", value, "x-gateway-inference-fairness-id", value,
			"Headgate-Objective", value, "Headgate-Timeout-Ms", value, "x-gateway-destination-endpoint", "127.0.0.1:1",
			"X-Gateway-Destination-Endpoint-Subset", value, "Headgate-Lease", value, "Headgate-Attempt", "7")
		if a := g.post(streamed, header...); !a.whole() {
			t.Errorf("%.10q: %v", value, a)
		}
	}
	for _, entry := range received(e...) {
		if len(entry.Flagged) > 0 || entry.Attempt != 1 {
			t.Errorf("the engine got %v, attempt %d", entry.Flagged, entry.Attempt)
		}
	}
	if got := len(received(e...)); got != 5 {
		t.Errorf("%d requests at the engine", got)
	}
}
