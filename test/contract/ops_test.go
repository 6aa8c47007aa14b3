// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/lifecycle"
	"github.com/headgate/headgate/internal/simengine"
)

// metrics is the admin listener's page.
func (g *gateway) metrics(t *testing.T) string {
	t.Helper()
	a := g.get(t, "http://"+g.admin+"/metrics")
	if a.status != 200 || a.err != nil {
		t.Fatalf("/metrics: %d %v", a.status, a.err)
	}
	return a.body
}

// series are the samples of one family: labels → value.
func (g *gateway) series(t *testing.T, name string) map[string]float64 {
	t.Helper()
	found := map[string]float64{}
	for line := range strings.SplitSeq(g.metrics(t), "\n") {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest == "" || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		i := strings.LastIndex(rest, " ")
		v, err := strconv.ParseFloat(rest[i+1:], 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		found[rest[:i]] = v
	}
	return found
}

func (g *gateway) inflight(t *testing.T) (sum float64) {
	t.Helper()
	for _, v := range g.series(t, "headgate_inflight_requests") {
		sum += v
	}
	return sum
}

func TestProbes(t *testing.T) {
	t.Parallel()
	g := serve(t, newEngine(t, nil), "")
	for _, base := range []string{"", "http://" + g.admin} {
		for _, path := range []string{"/healthz", "/readyz"} {
			if a := g.get(t, base+path); a.status != 200 {
				t.Errorf("%s%s: %d", base, path, a.status)
			}
		}
	}
}

// Contract, "Failure of our own parts": SIGTERM.
func TestDrain(t *testing.T) {
	t.Parallel()
	next := make(chan struct{})
	e := newEngine(t, func(x *exchange) {
		if !x.streams() {
			x.usual()
			return
		}
		x.stream()
		x.chunk(role + delta("a"))
		select {
		case <-next:
		case <-x.done:
		}
		x.chunk(delta("b") + finish + done)
		x.end()
	})
	g := start(t, "drain_timeout: 60s\npools:\n"+pool("p", "", e))
	res, err := g.begin(t, "POST", chat, strings.NewReader(streamed))
	if err != nil {
		t.Fatal(err)
	}
	first := within(t, "the first delta", func() string { s, _ := readUntil(res.Body, delta("a")); return s })
	kept := g.dial(t) // a connection from before
	kept.send(rawPost(chat, plainChat))
	kept.answer("POST")

	stopped := make(chan struct{})
	go func() { g.stop(); close(stopped) }()
	eventually(t, "/readyz 503", func() bool { return g.get(t, "/readyz").status == 503 })
	if a := g.get(t, "http://"+g.admin+"/readyz"); a.status != 503 {
		t.Errorf("the admin listener's /readyz: %d", a.status)
	}
	if a := g.get(t, "/healthz"); a.status != 200 {
		t.Errorf("/healthz while draining: %d", a.status)
	}
	a := g.post(t, chat, plainChat)
	a.refusal(t, 503, "shutting_down", true)
	if a.header.Get("Retry-After") != "" {
		if n, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || n > 30 {
			t.Errorf("Retry-After: %q", a.header.Get("Retry-After"))
		}
	}
	kept.send(rawPost(chat, plainChat))
	kept.answer("POST").refusal(t, 503, "shutting_down", true)
	if n := len(e.requests()); n != 2 {
		t.Errorf("the engine got %d requests, want 2", n)
	}

	select {
	case <-stopped:
		t.Fatal("stopped with a stream running")
	default:
	}
	close(next)
	rest := within(t, "the stream's end", func() answer { return whole(res) })
	rest.body = first + rest.body
	same(t, rest, 200, role+delta("a")+delta("b")+finish+done)
	receive(t, "Stop returns", stopped)
	if c, err := net.Dial("tcp", g.addr); err == nil {
		c.Close()
		t.Error("still listening")
	}
}

// What is not over at the end of the drain is cut, and says so.
func TestDrainTimeoutCutsStreams(t *testing.T) {
	t.Parallel()
	gone := make(chan bool, 1)
	e := newEngine(t, func(x *exchange) {
		x.stream()
		x.chunk(role + delta("a"))
		gone <- x.gone()
	})
	g := start(t, "drain_timeout: 300ms\npools:\n"+pool("p", "", e))
	res, err := g.begin(t, "POST", chat, strings.NewReader(streamed))
	if err != nil {
		t.Fatal(err)
	}
	first := within(t, "the first delta", func() string { s, _ := readUntil(res.Body, delta("a")); return s })
	stopped := make(chan struct{})
	go func() { g.stop(); close(stopped) }()
	rest := within(t, "the stream's end", func() answer { return whole(res) })
	receive(t, "Stop returns", stopped)
	if !receive(t, "the engine is told", gone) {
		t.Error("the engine's connection stays open")
	}
	rest.body = first + rest.body
	if rest.err == nil {
		rest.interrupted(t)
	}
	if strings.Contains(rest.body, "[DONE]") {
		t.Errorf("a cut stream looks whole: %q", rest.body)
	}
}

type modelList struct {
	Object string `json:"object"`
	Data   []struct {
		ID     string `json:"id"`
		Object string `json:"object"`
	} `json:"data"`
}

func (g *gateway) models(t *testing.T) []string {
	t.Helper()
	a := g.get(t, "/v1/models")
	var list modelList
	if err := json.Unmarshal([]byte(a.body), &list); err != nil || a.status != 200 || list.Object != "list" {
		t.Fatalf("%d %s %v", a.status, a.body, err)
	}
	var ids []string
	for _, m := range list.Data {
		ids = append(ids, m.ID)
		if m.Object != "model" {
			t.Errorf("%s is a %q", m.ID, m.Object)
		}
	}
	return ids
}

// strict answers only for models that it has, as real engines do.
func strict(x *exchange) {
	var body struct {
		Model string `json:"model"`
	}
	_ = json.Unmarshal([]byte(x.body), &body)
	if !slices.Contains(x.models, body.Model) {
		x.json(404, `{"object":"error","message":"The model does not exist.","code":404}`)
		return
	}
	x.usual()
}

// A dead engine takes nothing away from the list of the others.
func TestModelListSurvivesADeadEngine(t *testing.T) {
	t.Parallel()
	dead := newEngine(t, nil, "gone")
	dead.ln.Close()
	g := start(t, "pools:\n"+pool("p", "", dead, newEngine(t, nil, "m1")))
	if ids := g.models(t); !slices.Equal(ids, []string{"m1"}) {
		t.Errorf("%q", ids)
	}
}

// ERR-3.
func TestModelByID(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil, "m", "org/name", "50% off")
	g := serve(t, e, "")
	ask := func(target string) answer {
		w := g.dial(t)
		w.send("GET " + target + " HTTP/1.1\r\nHost: gateway\r\n\r\n")
		defer w.Close()
		return w.answer("GET")
	}
	var objects []string
	for _, target := range []string{"/v1/models/org/name", "/v1/models/org%2Fname", "/v1/models/org%2fname"} {
		a := ask(target)
		if a.status != 200 || !strings.Contains(a.body, `"id":"org/name"`) {
			t.Errorf("%s: %d %s", target, a.status, a.body)
		}
		objects = append(objects, a.body)
	}
	if len(slices.Compact(objects)) != 1 {
		t.Errorf("%q", objects)
	}
	if a := ask("/v1/models/50%25%20off"); a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
	for _, target := range []string{
		"/v1/models/org%252Fname", "/v1/models/org/name/", "/v1/models/org/../org/name", "/v1/models/./m", "/v1/models/%2e%2e/models/m", "/v1/models/..%2f..%2fsleep",
		"/v1/models/m/", "/v1/models//m", "/v1/models/none", "/v1/models/org", "/v1/models/M",
	} {
		a := ask(target)
		code := "model_not_found"
		if a.header.Get("Headgate-Reason") == "not_found" {
			code = "not_found"
		}
		t.Run(target, func(t *testing.T) { a.refusal(t, 404, code, false) })
	}
	if got := e.requests(); len(got) != 0 {
		t.Errorf("the engine got %q", got[0].head)
	}
}

// Contract, "Metrics": names and labels that dashboards rely on.
func TestMetricsHaveTheNamesAndLabelsOfTheContract(t *testing.T) {
	t.Parallel()
	var failed atomic.Bool
	e := newEngine(t, func(x *exchange) {
		if x.streams() && failed.CompareAndSwap(false, true) {
			x.reset()
			return
		}
		x.usual()
	})
	g := start(t, "pools:\n"+pool("p", "", e, twin(t, e)))
	g.post(t, chat, streamed)
	g.post(t, chat, streamed)
	g.post(t, chat, plainChat)
	g.post(t, chat, "x")
	labels := map[string][]string{
		"requests_total": {"code", "model", "outcome", "pool"}, "inflight_requests": {"endpoint", "pool"},
		"attempts_total": {"fence_proof", "pool", "verdict"}, "retries_total": {"pool", "verdict"}, "late_chunks_total": nil,
	}
	name := regexp.MustCompile(`([a-z_]+)="`)
	for family, want := range labels {
		series := g.series(t, "headgate_"+family)
		if len(series) == 0 {
			t.Errorf("no headgate_%s", family)
		}
		for s := range series {
			var got []string
			for _, m := range name.FindAllStringSubmatch(s, -1) {
				got = append(got, m[1])
			}
			sort.Strings(got)
			if !slices.Equal(got, want) {
				t.Errorf("%s%s: labels %q, want %q", family, s, got, want)
			}
		}
	}
	for _, family := range []string{"first_output_seconds_count", "inter_output_seconds_count"} {
		if len(g.series(t, "headgate_"+family)) == 0 {
			t.Errorf("no headgate_%s", family)
		}
	}
	sum := func(family, part string) (n float64) {
		for s, v := range g.series(t, "headgate_"+family) {
			if strings.Contains(s, part) {
				n += v
			}
		}
		return n
	}
	for _, c := range []struct {
		family, part string
		want         float64
	}{
		{"requests_total", `outcome="completed"`, 3}, {"requests_total", `code="invalid_json"`, 1}, {"requests_total", `outcome="rejected"`, 1},
		{"attempts_total", "", 4}, {"attempts_total", `verdict="closed"`, 1}, {"retries_total", `verdict="closed"`, 1},
	} {
		if n := sum(c.family, c.part); n != c.want {
			t.Errorf("%s{%s} is %v, want %v: %v", c.family, c.part, n, c.want, g.series(t, "headgate_"+c.family))
		}
	}
}

// OBS-5: there from the first scrape, for every endpoint.
func TestEndpointSeriesAreThereFromTheStart(t *testing.T) {
	t.Parallel()
	g := start(t, "pools:\n"+pool("p", "", newEngine(t, nil), newEngine(t, nil), newEngine(t, nil)))
	if s := g.series(t, "headgate_inflight_requests"); len(s) != 3 {
		t.Errorf("%v", s)
	}
}

// OBS-6: running is from dispatch to the stream's end, and refused is not running.
func TestInflightCountsStreamsUntilTheirEnd(t *testing.T) {
	t.Parallel()
	const n = 20
	next := make(chan struct{})
	e := newEngine(t, func(x *exchange) {
		if !x.streams() {
			x.gone()
			return
		}
		x.stream()
		x.chunk(role + delta("a"))
		select {
		case <-next:
		case <-x.done:
		}
		x.chunk(finish + done)
		x.end()
	})
	g := serve(t, e, "")
	over := make(chan answer, n)
	for range n {
		res, err := g.begin(t, "POST", chat, strings.NewReader(streamed))
		if err != nil {
			t.Fatal(err)
		}
		go func() { over <- whole(res) }()
	}
	for range n {
		g.post(t, chat, "x")
		w := g.dial(t)
		w.send(rawPost(chat, plainChat))
		w.Close()
	}
	eventually(t, "as many in flight as streams", func() bool { return g.inflight(t) == n })
	close(next)
	for range n {
		same(t, receive(t, "a stream's end", over), 200, role+delta("a")+finish+done)
	}
	eventually(t, "none in flight", func() bool { return g.inflight(t) == 0 })
}

// OBS-1: what clients write is no way to fill the metrics.
func TestLabelsAreBounded(t *testing.T) {
	t.Parallel()
	e := newEngine(t, nil)
	g := serve(t, e, "")
	const n = 1500
	for i := range n {
		model := fmt.Sprintf("junk-%d", i)
		if i == 0 {
			model = strings.Repeat("long", 5000)
		}
		g.post(t, chat, fmt.Sprintf(`{"model":%q,"user":"u%d","messages":[{"role":"user","content":"hi"}]}`, model, i),
			"x-llm-d-inference-fairness-id", fmt.Sprintf("f%d", i), "Headgate-Objective", fmt.Sprintf("o%d", i))
	}
	page := g.metrics(t)
	models := map[string]bool{}
	for _, m := range regexp.MustCompile(`model="([^"]*)"`).FindAllStringSubmatch(page, -1) {
		models[m[1]] = true
		if len(m[1]) > 512 {
			t.Errorf("a label of %d bytes", len(m[1]))
		}
	}
	if len(models) > n/2 || !models["other"] {
		t.Errorf("%d models as labels, other: %v", len(models), models["other"])
	}
	if len(page) > 1<<20 {
		t.Errorf("a page of %d bytes", len(page))
	}
	for _, word := range []string{`"f7"`, `"o7"`, `"u7"`} {
		if strings.Contains(page, word) {
			t.Errorf("a client's %s is a label", word)
		}
	}
	var total float64
	for _, v := range g.series(t, "headgate_requests_total") {
		total += v
	}
	if total != n {
		t.Errorf("%v requests counted, want %d", total, n)
	}
}

// The admin listener is the operators' own.
func TestAdminNeedsItsToken(t *testing.T) {
	t.Parallel()
	g := start(t, "admin: {address: 127.0.0.1:0, token: sesame}\npools:\n"+pool("p", "", newEngine(t, nil)))
	url := "http://" + g.admin + "/metrics"
	for _, auth := range []string{"", "sesame", "Bearer ", "Bearer sesam", "Bearer sesamee", "Basic sesame"} {
		if a := g.get(t, url, "Authorization", auth); a.status != 401 {
			t.Errorf("%q: %d", auth, a.status)
		}
	}
	if a := g.get(t, url, "Authorization", "Bearer sesame"); a.status != 200 {
		t.Errorf("%d", a.status)
	}
	if a := g.get(t, "/metrics"); a.status != 404 {
		t.Errorf("metrics on the clients' listener: %d", a.status)
	}
}

func load(t *testing.T, text string) error {
	t.Helper()
	file := filepath.Join(t.TempDir(), "headgate.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := config.Load(file)
	return err
}

// Contract, "Config": an error has the file, the line and the field's path, and
// all come at once.
func TestConfigMistakesAreToldWithTheirPlaces(t *testing.T) {
	t.Parallel()
	const engine = "pools:\n  p:\n    discovery: {static: [{url: 'http://127.0.0.1:1'}]}\n"
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"unknown field":   {engine + "    colect_max: 8MiB\n", []string{":4", "colect_max"}},
		"duplicate key":   {engine + "drain_timeout: 1s\ndrain_timeout: 2s\n", []string{":5", "drain_timeout"}},
		"no unit":         {engine + "    timeouts: {idle: 60}\n", []string{":4", "idle"}},
		"bad unit":        {engine + "    collect_max: 8XB\n", []string{":4", "collect_max"}},
		"unknown pool":    {engine + "routes: [{backends: [{pool: q}]}]\n", []string{":4", "q"}},
		"bad URL":         {"pools:\n  p:\n    discovery: {static: [{url: 'ftp://x'}]}\n", []string{":3", "url"}},
		"not YAML":        {"pools: [\n", []string{"headgate.yaml"}},
		"broken rule":     {engine + "    failover: {after_first_delta: {automatic_retry: true}}\n", []string{":4", "automatic_retry"}},
		"two at once":     {engine + "    a: 1\n    b: 2\n", []string{":4", ":5"}},
		"missing file":    {"listeners: [{tls: {cert: none.pem, key: none.pem}}]\n" + engine, []string{":1", "cert"}},
		"half a TLS":      {"listeners: [{tls: {cert: none.pem}}]\n" + engine, []string{"tls"}},
		"open admin":      {"admin: {address: '0.0.0.0:9901'}\n" + engine, []string{":1", "token"}},
		"two credentials": {engine + "    forward_authorization: true\n    credential: {bearer_file: headgate.yaml}\n", []string{"forward_authorization"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := load(t, c.text)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, part := range append(c.want, "headgate.yaml") {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("no %q in: %v", part, err)
				}
			}
		})
	}
}

// A port that is taken is an error, and leaves nothing open.
func TestTakenPortIsAnError(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := config.Parse("headgate.yaml", fmt.Appendf(nil, "listeners: [{name: a, address: 127.0.0.1:0}, {name: b, address: %q}]\nadmin: {address: ''}\npools: {p: {discovery: {static: [{url: 'http://127.0.0.1:1'}]}}}\n", ln.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	if p, err := lifecycle.Start(c, slog.New(slog.NewTextHandler(io.Discard, nil)), "test"); err == nil {
		p.Stop()
		t.Error("started")
	} else if !strings.Contains(err.Error(), ln.Addr().String()) {
		t.Errorf("the error does not name the address: %v", err)
	}
}

// The same promises in front of the simulated engine, whose log flags whatever
// a gateway must not let through.
func TestSimulatedEngineFlagsNothing(t *testing.T) {
	t.Parallel()
	sim, err := simengine.Listen(simengine.Config{Name: "A", Models: []string{"m"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sim.Close)
	g := start(t, fmt.Sprintf("pools: {p: {discovery: {static: [{url: %q}]}}}\n", sim.URL()))
	for _, body := range []string{plainChat, streamed} {
		a := g.post(t, chat, body, append(slices.Clone(secrets), "Headgate-Lease", "x", "x-gateway-destination-endpoint", "127.0.0.1:1")...)
		if a.status != 200 || a.err != nil || !strings.Contains(a.body, "A1·") {
			t.Errorf("%d %v %s", a.status, a.err, a.body)
		}
	}
	received := 0
	for _, entry := range sim.Log() {
		if entry.Event != simengine.EventReceived || entry.Path != chat {
			continue
		}
		if received++; len(entry.Flagged) > 0 {
			t.Errorf("flagged: %q", entry.Flagged)
		}
	}
	if received != 2 {
		t.Errorf("%d requests received", received)
	}
}
