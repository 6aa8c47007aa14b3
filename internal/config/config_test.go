// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	"pgregory.net/rapid"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/rate"
	"github.com/headgate/headgate/internal/route"
)

var update = flag.Bool("update", false, "write expected output and docs/config.md anew")

// Every mistake has its exact message, and every message of a file is reported
// at once. testdata/problems.txt holds one case per block: a title, a file, a
// line of four hyphens, the report.
func TestProblems(t *testing.T) {
	const golden = "testdata/problems.txt"
	data, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for block := range strings.SplitSeq(strings.TrimPrefix(string(data), "== "), "\n== ") {
		title, rest, _ := strings.Cut(block, "\n")
		input, want, ok := strings.Cut(rest, "\n----")
		if !ok {
			t.Fatalf("%s: no line of four hyphens", title)
		}
		_, err := config.Parse("x.yaml", []byte(input+"\n"))
		got := "no problem"
		if err != nil {
			got = err.Error()
		}
		if strings.Contains(got, "hunter") {
			t.Errorf("%s: shows a secret:\n%s", title, got)
		}
		fmt.Fprintf(&out, "== %s\n%s\n----\n%s\n", title, input, got)
		if diff := cmp.Diff(strings.TrimSpace(want), got); diff != "" && !*update {
			t.Errorf("%s (-want +got):\n%s", title, diff)
		}
	}
	if *update {
		if err := os.WriteFile(golden, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestUnreadableFiles(t *testing.T) {
	for _, c := range []struct{ name, data, want string }{
		{"NUL", "a: b\nc: \x00", "x.yaml:2:4: a NUL byte: the file must be text"},
		{"Latin-1", "é: \xe9\n", "x.yaml:1:4: not valid UTF-8"},
		{"UTF-16", "\xff\xfea\x00", "x.yaml:1:1: text in UTF-16: the file must be UTF-8"},
		{"nested too deep", strings.Repeat("[", 20000), "x.yaml:1: not valid YAML: exceeded max depth of 10000"},
		{"a colon too many", "a: b: c", "x.yaml:1: not valid YAML: mapping values are not allowed in this context"},
		{"too large", strings.Repeat("#", 4<<20+1), "x.yaml: the file is larger than 4MiB"},
		{"a control character", "gateway: {id: \"\x01\"}", `x.yaml:1:16: a control character: in quotes it can be written as in "\x1b"`},
	} {
		_, err := config.Parse("x.yaml", []byte(c.data))
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: got %v, want %s", c.name, err, c.want)
		}
	}
}

func TestEmptyFilesAreTheDefault(t *testing.T) {
	for _, data := range []string{"", "\n\n", "# nothing\n", "---\n", "---\n...\n", "{}", "~", "\ufeff", "pools:\nlisteners:\nadmin:\n"} {
		c, err := config.Parse("x.yaml", []byte(data))
		if err != nil {
			t.Errorf("%q: %v", data, err)
			continue
		}
		if diff := cmp.Diff(config.Default(), c); diff != "" {
			t.Errorf("%q (-default +got):\n%s", data, diff)
		}
	}
}

// Aliases that stand for an exponential number of values end in a problem, in
// bounded time.
func TestAliasBombIsRefused(t *testing.T) {
	var b strings.Builder
	b.WriteString("a0: &a0 {static: [{url: \"http://a:1\"}]}\n")
	for i := 1; i < 30; i++ {
		fmt.Fprintf(&b, "a%d: &a%d {<<: [%s]}\n", i, i, strings.Repeat(fmt.Sprintf("*a%d, ", i-1), 10))
	}
	b.WriteString("pools: *a29\n")
	start := time.Now()
	_, err := config.Parse("x.yaml", []byte(b.String()))
	if err == nil || !strings.Contains(err.Error(), "merge keys are nested more than 16 deep") {
		t.Errorf("got %v", err)
	}
	b.Reset()
	b.WriteString("a0: &a0 {x: 1}\n")
	for i := 1; i < 14; i++ {
		fmt.Fprintf(&b, "a%d: &a%d {<<: [%s]}\n", i, i, strings.Repeat(fmt.Sprintf("*a%d, ", i-1), 10))
	}
	b.WriteString("pools: *a13\n")
	_, err = config.Parse("x.yaml", []byte(b.String()))
	if err == nil || !strings.Contains(err.Error(), "the file comes to more than 200000 values") {
		t.Errorf("got %v", err)
	}
	if d := time.Since(start); d > time.Minute {
		t.Errorf("took %v", d)
	}

	wide := "pools:\n  p: {discovery: {static: &s [" + strings.Repeat("{url: 'http://a:1'},", 1000) + "]}}\n"
	for i := range 1000 {
		wide += fmt.Sprintf("  p%d: {discovery: {static: *s}}\n", i)
	}
	_, err = config.Parse("x.yaml", []byte(wide))
	if err == nil || !strings.Contains(err.Error(), "the file comes to more than 200000 values once its aliases are followed") {
		t.Errorf("got %.300v", err)
	}
}

func TestManyProblemsAreCut(t *testing.T) {
	data := strings.Repeat("x: 1\n", 5000)
	_, err := config.Parse("x.yaml", []byte(data))
	problems := err.(config.Problems)
	if n := len(problems); n != 1001 || !strings.Contains(problems[n-1].Message, "more problems") {
		t.Errorf("got %d problems, the last: %v", n, problems[n-1])
	}
}

func TestWholeFile(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("token", []byte("  s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	data := `
gateway: {id: gw-1}
listeners:
  - {name: main, address: "[::1]:8080", max_body: 10MB, debug_headers: true}
  - {name: other, address: ":8081", max_body: 4096, trust_headers: true}
admin: {address: 0.0.0.0:9901, token: hunter2}
journal: {dsn: j.db, durability: strict, retention: 10h, idempotency: {max_answer: 2MiB}}
keys:
  - {id: a, secret_sha256: 2CF24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824}
  - {id: b, secret_sha256: 486ea46224d1bb4fb680f34f7c9ad96a8f24ec88be73ea8e5a6c65260e9cb8a7, tenant: a, models: ["qwen-*"], objectives: [fast, slow], fairness_id: b1, limits: {requests_per_minute: 60, tokens_per_minute: 100000}}
drain_timeout: 1m30s
routes:
  - match: {model: "qwen-*", path: /v1, hostnames: ["*.example.com"], headers: {x-team: a}}
    backends: [{pool: qwen, weight: 90}, {pool: next}]
    rewrite: {model: Qwen/Qwen3-8B}
    objective: slow
objectives:
  fast: {priority: 10, shed_at: {saturation: 0.99}, ttft: 1s, ttft_prefill_factor: 1.5, tpot: 50ms}
  slow: {shed_at: {queue: 0.5}}
pools:
  qwen: &qwen
    discovery:
      static:
        - {url: "HTTP://Example.COM", model_revision: r2}
        - url: http://[2001:DB8:0::7]:8000/
        - {url: "http://old:1", draining: true}
      file: engines.yaml
      dns: {name: engines, port: 8000, refresh: {max: 5s}}
    health: {interval: 1s, path: /ping, generate: true, panic_threshold: 0}
    flow: {max_concurrency: 4, queue: {ttl: 0s}, local_queue: {requests: 0}, order: deadline, bands: [{priority: 10, max_requests: 3, reserve: 0.1}], scale_from_zero: {webhook: {url: "HTTPS://A/wake?pool=qwen"}, release_after: 1h}}
    executes_tools: true
    credential: {bearer_file: token}
    model_revision: r1
    max_body: 1MiB
    collect_max: 1MiB
    timeouts: {connect: 0s, idle: 1.5s}
    on_upstream_failure:
      before_first_delta: {max_attempts: 1}
      retry_budget: {ratio: 1, min_per_second: 0.5}
  next:
    <<: *qwen
    executes_tools: false
    max_body:
    failover: {allow_transport_fence: true}
`
	c, err := config.Parse("x.yaml", []byte(data))
	if err != nil {
		t.Fatal(err)
	}
	plain, err := config.FromUpstreams([]string{"http://a"})
	if err != nil {
		t.Fatal(err)
	}
	qwen := plain.Pools["default"]
	qwen.Discovery.Static = []config.Endpoint{
		{URL: "http://example.com:80", ModelRevision: "r2"},
		{URL: "http://[2001:db8::7]:8000"},
		{URL: "http://old:1", Draining: true},
	}
	qwen.Discovery.File = "engines.yaml"
	qwen.Discovery.DNS = config.DNS{Name: "engines", Port: 8000, Type: "a", Scheme: "http",
		Refresh: config.Refresh{Min: config.Duration(time.Second), Max: config.Duration(5 * time.Second)}}
	qwen.Health.Interval, qwen.Health.Path, qwen.Health.Generate, qwen.Health.PanicThreshold = config.Duration(time.Second), "/ping", true, 0
	qwen.Flow.MaxConcurrency, qwen.Flow.Queue.TTL, qwen.Flow.LocalQueue.Requests, qwen.Flow.Order = 4, 0, 0, "deadline"
	qwen.Flow.Bands = []config.Band{{Priority: 10, MaxRequests: 3, Reserve: 0.1}}
	qwen.Flow.ScaleFromZero.Webhook.URL, qwen.Flow.ScaleFromZero.ReleaseAfter = "https://a:443/wake?pool=qwen", config.Duration(time.Hour)
	qwen.Credential.BearerFile = "token"
	qwen.ModelRevision = "r1"
	qwen.CollectMax = 1 << 20
	qwen.Timeouts.Connect = 0
	qwen.Timeouts.Idle = config.Duration(1500 * time.Millisecond)
	next := qwen
	next.Failover.AllowTransportFence = true
	qwen.ExecutesTools = true
	qwen.MaxBody = 1 << 20
	qwen.Failover.BeforeFirstDelta.MaxAttempts = 1
	qwen.Failover.RetryBudget = config.RetryBudget{Ratio: 1, MinPerSecond: 0.5}
	want := &config.Config{
		Gateway: config.Gateway{ID: "gw-1"},
		Listeners: []config.Listener{
			{Name: "main", Address: "[::1]:8080", MaxBody: 10_000_000, DebugHeaders: true, TrustHeaders: "auto"},
			{Name: "other", Address: ":8081", MaxBody: 4096, TrustHeaders: "true"},
		},
		Admin: config.Admin{Address: "0.0.0.0:9901", Token: config.NewSecret("hunter2")},
		Journal: config.Journal{
			Driver: "sqlite", DSN: "j.db", Durability: "strict", Retention: config.Duration(10 * time.Hour),
			Idempotency: config.Idempotency{TTL: config.Duration(24 * time.Hour), MaxAnswer: 2 << 20},
		},
		Keys: []config.Key{
			{ID: "a", SecretSHA256: config.NewDigest("hello"), Models: []string{"*"}},
			{ID: "b", SecretSHA256: config.NewDigest("world"), Tenant: "a", Models: []string{"qwen-*"}, Objectives: []string{"fast", "slow"}, FairnessID: "b1",
				Limits: config.KeyLimits{RequestsPerMinute: 60, TokensPerMinute: 100_000}},
		},
		DrainTimeout: config.Duration(90 * time.Second),
		Session:      config.Session{Header: "x-session-id", Field: "session_id"},
		Routes: []config.Route{{
			Match:    config.Match{Model: "qwen-*", Path: "/v1", Hostnames: []string{"*.example.com"}, Headers: map[string]string{"x-team": "a"}},
			Backends: []config.Backend{{Pool: "qwen", Weight: 90}, {Pool: "next", Weight: 1}},
			Rewrite:  config.Rewrite{Model: "Qwen/Qwen3-8B"}, Objective: "slow",
		}},
		Objectives: map[string]config.Objective{
			"fast": {Priority: 10, ShedAt: config.ShedAt{Saturation: 0.99}, TTFT: config.Duration(time.Second), TTFTPrefillFactor: 1.5, TPOT: config.Duration(50 * time.Millisecond)},
			"slow": {ShedAt: config.ShedAt{Queue: 0.5}},
		},
		Pools: map[string]config.Pool{"qwen": qwen, "next": next},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := c.Pools["qwen"].Endpoints(); !slices.Equal(got, []inference.Endpoint{
		{ID: "http://example.com:80", URL: "http://example.com:80", Revision: "r2"},
		{ID: "http://[2001:db8::7]:8000", URL: "http://[2001:db8::7]:8000", Revision: "r1"},
	}) {
		t.Errorf("endpoints: %v", got)
	}
	if token, err := c.Pools["qwen"].Credential.Bearer(); err != nil || token.Reveal() != "s3cret" {
		t.Errorf("bearer: %q, %v", token.Reveal(), err)
	}
	if got := c.Journal.KeyTTL(); got != 10*time.Hour {
		t.Errorf("keys are known for %v", got)
	}
	keys, err := c.AuthKeys()
	if err != nil {
		t.Fatal(err)
	}
	world, refused := keys.Authenticate(http.Header{"Authorization": {"Bearer world"}})
	if refused != nil || world.Key != "b" || world.Tenant != "a" || !world.May("qwen-3") || world.May("llama") {
		t.Errorf("key b: %+v, %v", world, refused)
	}
	if got, want := c.RateLimits(), map[string]rate.Limits{"b": {RequestsPerMinute: 60, TokensPerMinute: 100_000}}; !maps.Equal(got, want) {
		t.Errorf("limits %v, want %v", got, want)
	}
	if world.Fairness != "b1" || !slices.Equal(world.Objectives, []string{"fast", "slow"}) {
		t.Errorf("key b shares as %q and may ask for %v", world.Fairness, world.Objectives)
	}
	if !c.Listeners[0].Trusts() || !c.Listeners[1].Trusts() || (config.Listener{Address: ":1", TrustHeaders: "auto"}).Trusts() {
		t.Error("trusted: loopback and who says so, nobody else")
	}
	checkHidden(t, c)
}

// checkHidden prints a configuration in every way there is.
func checkHidden(t *testing.T, c *config.Config) {
	t.Helper()
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "config", c, "admin", c.Admin, "token", c.Admin.Token)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "config", c, "admin", c.Admin, "token", c.Admin.Token)
	j, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	y, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	printed := log.String() + string(j) + string(y)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		printed += fmt.Sprintf(verb, *c) + fmt.Sprintf(verb, c.Admin.Token) + fmt.Sprintf(verb, &c.Admin)
	}
	digest := c.Keys[0].SecretSHA256.Hex()
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		printed += fmt.Sprintf(verb, c.Keys[0].SecretSHA256)
	}
	for _, secret := range []string{c.Admin.Token.Reveal(), fmt.Sprintf("%x", c.Admin.Token.Reveal()), digest, fmt.Sprintf("%x", digest)} {
		if strings.Contains(printed, secret) {
			t.Errorf("a secret is printed:\n%s", printed)
		}
	}
	if !strings.Contains(printed, "[redacted]") {
		t.Error("nothing shows that there is a secret")
	}
}

func TestFilesAreRelativeToTheirConfiguration(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "headgate.yaml")
	data := `pools: {q: {discovery: {static: [{url: "http://a:1"}]}, credential: {bearer_file: token}}}`
	if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := config.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(c.Pools["q"].Credential.BearerFile), filepath.Join(dir, "token"); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, data := range []string{data, ""} {
		c, err := config.Parse(path, []byte(data))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := string(c.Journal.DSN), filepath.Join(dir, "headgate.db"); got != want {
			t.Errorf("journal: got %s, want %s", got, want)
		}
	}
	if _, err := config.Load(filepath.Join(dir, "absent.yaml")); err == nil || !strings.HasPrefix(err.Error(), "read configuration: open ") {
		t.Errorf("absent file: %v", err)
	}
}

// A file of engines is read as strictly as the configuration.
func TestLists(t *testing.T) {
	for _, data := range []string{
		"- url: http://a\n- {url: 'http://[::1]:8000', model_revision: r, draining: true}\n",
		"[\n\t{\"url\": \"http://a:80\"},\n\t{\n\t\t\"url\": \"http://[0::1]:8000\", \"model_revision\": \"r\", \"draining\": true\n\t}\n]\n",
	} {
		list, err := config.ParseEndpoints("x", []byte(data))
		want := []config.Endpoint{{URL: "http://a:80"}, {URL: "http://[::1]:8000", ModelRevision: "r", Draining: true}}
		if err != nil || !reflect.DeepEqual(list, want) {
			t.Errorf("%s: %v, %v", data, list, err)
		}
	}
	if list, err := config.ParseEndpoints("x", []byte("[]")); err != nil || list == nil || len(list) != 0 {
		t.Errorf("empty list: %v, %v", list, err)
	}
	for _, c := range []struct{ data, want string }{
		{"", "x:1: the file is empty: write [] for no engines"},
		{"# nothing\n", "x:1: the file is empty: write [] for no engines"},
		{"~", "x:1: the file is empty: write [] for no engines"},
		{"url: http://a", "x:1:1: must be a list, not a block of fields"},
		{"- http://a", "x:1:3: [0]: must be a block of fields, not a text"},
		{"- {url: a, wight: 1}\n- {draining: true}\n-\n- {url: 'http://b'}\n- {url: 'http://B:80'}\n",
			"x:1:9: [0].url: must begin with http:// or https://\n" +
				"x:1:12: [0].wight: unknown field: the fields here are url, model_revision, guard, labels, draining\n" +
				"x:2:3: [1]: has no url\nx:3:2: [2]: has no url\nx:5:9: [4].url: http://b:80 is [3] too"},
		{"[{\"url\": \"http://a\"", "x:2: not valid YAML at or below this line: did not find expected ',' or '}'"},
		{strings.Repeat("- {url: 'http://a'}\n", 4097), "x: has more than 4096 engines"},
	} {
		if _, err := config.ParseEndpoints("x", []byte(c.data)); err == nil || err.Error() != c.want {
			t.Errorf("%.40q: got %v", c.data, err)
		}
	}
}

func TestExampleIsServed(t *testing.T) {
	c, err := config.Load("../../examples/headgate.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if n := len(c.Pools["sim"].Endpoints()); n != 2 {
		t.Errorf("%d engines", n)
	}
	checkServes(t, c, "sim")
}

func TestFlowExampleIsServed(t *testing.T) {
	c, err := config.Load("../../examples/flow.yaml")
	if err != nil {
		t.Fatal(err)
	}
	checkServes(t, c, "sim")
	if c.Objectives["interactive"].Priority <= c.Objectives["batch"].Priority {
		t.Error("interactive requests do not go first")
	}
}

func TestScaleExampleIsServed(t *testing.T) {
	c, err := config.Load("../../examples/scale.yaml")
	if err != nil {
		t.Fatal(err)
	}
	checkServes(t, c, "laptop")
	scale := c.Pools["laptop"].Flow.ScaleFromZero
	if scale.Wait() != 5*time.Minute || scale.Idle() != 10*time.Minute {
		t.Errorf("waits %v, and stops it after %v", scale.Wait(), scale.Idle())
	}
}

func TestExampleWithKeysIsServed(t *testing.T) {
	c, err := config.Load("../../examples/keep.yaml")
	if err != nil {
		t.Fatal(err)
	}
	checkServes(t, c, "sim")
	keys, err := c.AuthKeys()
	if err != nil {
		t.Fatal(err)
	}
	if who, refused := keys.Authenticate(http.Header{"Authorization": {"Bearer example"}}); refused != nil || who.Tenant != "team-a" {
		t.Errorf("got %v, %v", who, refused)
	}
	name := string(c.Pools["sim"].Discovery.File)
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if list, err := config.ParseEndpoints(name, data); err != nil || len(list) != 2 {
		t.Errorf("engines: %v, %v", list, err)
	}
}

func TestUpstreams(t *testing.T) {
	c, err := config.FromUpstreams([]string{"http://a:1", "https://B"})
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Pools["default"].Endpoints(); len(got) != 2 || got[1].ID != "https://b:443" {
		t.Errorf("endpoints: %v", got)
	}
	checkServes(t, c, "default")
	if c.Journal.Driver != config.DriverNone {
		t.Errorf("journal: %s", c.Journal.Driver)
	}
	for _, c := range []struct {
		urls []string
		want string
	}{
		{[]string{"http://a:1", "a:2", "http://a:1/v1"}, "upstream[1]: must begin with http:// or https://\nupstream[2]: must not have a path: requests keep their own, as in /v1/chat/completions"},
		{[]string{"http://a:80", "http://A"}, "pools.default.discovery.static[1].url: http://a:80 is static[0] too"},
		{nil, `pools.default.discovery: names no engine: list them under static, as in static: [{url: "http://127.0.0.1:8000"}]`},
	} {
		if _, err := config.FromUpstreams(c.urls); err == nil || err.Error() != c.want {
			t.Errorf("%v: got %v", c.urls, err)
		}
	}
	if err := c.AddUpstreams([]string{"http://c"}); err == nil {
		t.Error("added to a configuration with pools")
	}
}

func checkServes(t *testing.T, c *config.Config, pool string) {
	t.Helper()
	table, err := c.Table()
	if err != nil {
		t.Fatal(err)
	}
	got, refused := table.Match(route.Query{Host: "x", Path: "/v1/chat/completions", Model: "m"}, rand.IntN)
	if refused != nil || got.Pool != pool {
		t.Errorf("got %+v, %v", got, refused)
	}
}

func TestLimitsCarryEveryTimeout(t *testing.T) {
	got := config.Timeouts{Connect: 1, FirstOutput: 2, Idle: 3, AfterFinish: 4, Total: 5}.Limits()
	if want := (inference.Timeouts{Connect: 1, FirstOutput: 2, Idle: 3, AfterFinish: 4, Total: 5}); got != want {
		t.Errorf("got %+v", got)
	}
	if n := reflect.TypeFor[inference.Timeouts]().NumField(); n != 5 {
		t.Errorf("inference has %d timeouts", n)
	}
}

func TestValuesPrintAsTheyAreWritten(t *testing.T) {
	for want, got := range map[string]fmt.Stringer{
		"10m": config.Duration(10 * time.Minute), "1h": config.Duration(time.Hour), "1h30m": config.Duration(90 * time.Minute),
		"1m30s": config.Duration(90 * time.Second), "0s": config.Duration(0), "250ms": config.Duration(250 * time.Millisecond),
		"64MiB": config.Size(64 << 20), "10MB": config.Size(10e6), "1025": config.Size(1025), "0": config.Size(0), "0.2": config.Ratio(0.2),
	} {
		if got.String() != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// The canonical form of an endpoint is its own canonical form, so that it can
// serve as identity.
func TestCanonicalURLsStay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SampledFrom([]string{"http://", "HTTPS://"}).Draw(t, "scheme") +
			rapid.SampledFrom([]string{"Host", "a.B.c", "127.0.0.1", "[::1]", "[2001:DB8::0:1]", "[::FFFF:1.2.3.4]", "a_b"}).Draw(t, "host") +
			rapid.SampledFrom([]string{"", ":", ":80", ":443", ":8000", ":65535"}).Draw(t, "port") +
			rapid.SampledFrom([]string{"", "/"}).Draw(t, "path")
		c, err := config.FromUpstreams([]string{text})
		if err != nil {
			t.Fatal(err)
		}
		once := c.Pools["default"].Endpoints()[0].URL
		c, err = config.FromUpstreams([]string{once})
		if err != nil {
			t.Fatal(err)
		}
		if twice := c.Pools["default"].Endpoints()[0].URL; twice != once || strings.ToLower(once) != once || strings.HasSuffix(once, "/") {
			t.Errorf("%s becomes %s, then %s", text, once, twice)
		}
	})
}

func TestLoopback(t *testing.T) {
	for a, want := range map[config.Address]bool{
		"127.0.0.1:1": true, "127.1.2.3:1": true, "[::1]:1": true, "localhost:1": true, "[::ffff:127.0.0.1]:1": true,
		":1": false, "0.0.0.0:1": false, "[::]:1": false, "10.0.0.1:1": false, "example.com:1": false, "": false,
	} {
		if a.Loopback() != want {
			t.Errorf("%s: %v", a, !want)
		}
	}
}

// Whatever the bytes, Parse answers, and what it accepts is valid, compiles and
// is read the same way again.
func FuzzParse(f *testing.F) {
	data, err := os.ReadFile("testdata/problems.txt")
	if err != nil {
		f.Fatal(err)
	}
	for block := range strings.SplitSeq(string(data), "\n== ") {
		_, rest, _ := strings.Cut(block, "\n")
		input, _, _ := strings.Cut(rest, "\n----")
		f.Add([]byte(input))
	}
	f.Add([]byte("a: &a [*a]\npools: *a"))
	f.Add([]byte("pools: &p {q: *p, discovery: *p}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		start := time.Now()
		c, err := config.Parse("x.yaml", data)
		if d := time.Since(start); d > time.Minute {
			t.Errorf("took %v", d)
		}
		if err != nil {
			if _, ok := err.(config.Problems); !ok {
				t.Errorf("not Problems: %v", err)
			}
			return
		}
		if problems := c.Validate(); len(problems) > 0 {
			t.Errorf("accepted, and not valid: %v", problems)
		}
		if _, err := c.Table(); err != nil {
			t.Errorf("accepted, and does not compile: %v", err)
		}
		if _, err := c.AuthKeys(); err != nil {
			t.Errorf("accepted, and does not compile: %v", err)
		}
	})
}
