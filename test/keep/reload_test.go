// SPDX-License-Identifier: Apache-2.0

package keep

import (
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/headgate/headgate/internal/simengine"
)

// routed is a configuration with keys, two pools and a route between them.
func routed(pool, rewrite string, keys []string, a, b *simengine.Engine) string {
	yaml := "keys:\n"
	for _, k := range keys {
		yaml += fmt.Sprintf("  - {id: %s, secret_sha256: %s, tenant: red}\n", k, sha("secret-"+k))
	}
	yaml += fmt.Sprintf("pools:\n  a: {%s}\n  b: {%s}\n", static(a), static(b))
	yaml += "routes:\n  - match: {model: m}\n    backends: [{pool: " + pool + "}]\n"
	if rewrite != "" {
		yaml += "    rewrite: {model: " + rewrite + "}\n"
	}
	return yaml
}

func models(list ...string) func(*simengine.Config) {
	return func(c *simengine.Config) { c.Models = list }
}

// reloads counts the configurations that were put in force.
func (p *child) reloads() int { return strings.Count(p.log.String(), "configuration reloaded") }

// Routes, pools, keys and rewrites change by SIGHUP and by themselves, while
// clients send streams: none is lost, and a change is of the requests that come
// after it.
func TestConfigurationChangesUnderLoad(t *testing.T) {
	t.Parallel()
	e := engines(t, 2, models("m", "x", "y"))
	dir := t.TempDir()
	both := []string{"one", "two"}
	p := serve(t, dir, routed("a", "x", both, e[0], e[1]), launch{tags: "faultpoint"})
	file := filepath.Join(dir, "headgate.yaml")
	w := p.gather(16, func(c, i int) (string, []string) {
		header := append(bearer("one"), "X-Sim-Fault", "slow:5ms")
		if i%3 == 0 {
			header = append(header, "Idempotency-Key", fmt.Sprintf("%d-%d", c, i))
		}
		return chatOf("m"), header
	})
	w.more(t, 30)
	rounds := 6
	if !testing.Short() {
		rounds = 30
	}
	for i := range rounds {
		pool, model, at := "b", "y", e[1]
		if i%2 == 1 {
			pool, model, at = "a", "x", e[0]
		}
		before := p.reloads()
		write(t, file, defaults(routed(pool, model, both[:1+i%2], e[0], e[1])))
		if i%3 != 0 {
			p.signal(syscall.SIGHUP)
		}
		eventually(t, "the change is in force", func() bool { return p.reloads() > before })
		a := p.post(chatOf("m"), bearer("one")...)
		w.also(a)
		if !a.whole() || a.header.Get("Headgate-Endpoint") != at.URL() {
			t.Errorf("round %d: want pool %s: %v", i, pool, a)
		}
		if r := p.record(a.id(), bearer("one")...); r.Pool != pool || r.TargetModel != model || r.Model != "m" {
			t.Errorf("round %d: %+v", i, r)
		}
		if strings.Contains(a.body, `"model":"`+model) || !strings.Contains(a.body, `"model":"m"`) {
			t.Errorf("round %d: the answer has the engine's name: %v", i, a)
		}
		two := p.post(chatOf("m"), bearer("two")...)
		if two.whole() {
			w.also(two)
		}
		if i%2 == 1 && !two.whole() || i%2 == 0 && two.status != 401 {
			t.Errorf("round %d: the key that comes and goes: %v", i, two)
		}
		w.more(t, 40)
	}
	w.end(t, e...)
	for labels, v := range p.series("headgate_requests_total") {
		if !strings.Contains(labels, `outcome="completed"`) && !strings.Contains(labels, `code="unauthorized"`) && v > 0 {
			t.Errorf("%v requests %s", v, labels)
		}
	}
	p.signal(syscall.SIGTERM)
	if p.state.ExitCode() != 0 {
		t.Errorf("SIGTERM: %v", p.state)
	}
}

// A request keeps the configuration of its arrival: its key, pool and rewrite
// may be gone before it ends.
func TestRequestsKeepTheConfigurationOfTheirArrival(t *testing.T) {
	t.Parallel()
	e := engines(t, 2, models("m", "x", "y"))
	dir := t.TempDir()
	g := start(t, dir, routed("a", "x", []string{"one", "two"}, e[0], e[1]))
	s := g.open(chatOf("m"), append(bearer("two"), "X-Sim-Fault", "stall@token:2:1s", "Idempotency-Key", "k")...)
	s.until("·")
	// Key two, pool a and the rewrite are deleted.
	g.reload(t, dir, fmt.Sprintf("keys: [{id: one, secret_sha256: %s, tenant: red}]\npools: {b: {%s}}\nroutes: [{match: {model: m}, backends: [{pool: b}], rewrite: {model: y}}]\n",
		sha("secret-one"), static(e[1])))
	refused(t, g.post(chatOf("m"), bearer("two")...), 401, "unauthorized", false)
	b := g.post(chatOf("m"), bearer("one")...)
	if !b.whole() || b.header.Get("Headgate-Endpoint") != e[1].URL() {
		t.Error(b)
	}
	a := s.rest()
	if !a.whole() || a.tokens() != 6 || strings.Count(a.body, `"model":"m"`) < 6 || strings.Contains(a.body, `"model":"x"`) {
		t.Errorf("the request that was under way: %v", a)
	}
	if r := g.record(a.id(), bearer("one")...); r.Pool != "a" || r.TargetModel != "x" || r.Outcome != "completed" {
		t.Errorf("%+v", r)
	}
	// What its key stands for is its tenant's, whatever key and pool are left.
	replayed(t, g.post(chatOf("m"), append(bearer("one"), "Idempotency-Key", "k")...), a)
	for labels := range g.series("headgate_inflight_requests") {
		if strings.Contains(labels, `pool="a"`) {
			t.Errorf("a deleted pool has the series %s", labels)
		}
	}
}

// A file with mistakes leaves the old configuration in force, and says where
// they are; the next good one is taken.
func TestBadFileKeepsTheOldConfiguration(t *testing.T) {
	t.Parallel()
	e := engines(t, 2, models("m", "x", "y"))
	dir := t.TempDir()
	good := routed("a", "x", []string{"one"}, e[0], e[1])
	p := serve(t, dir, good, launch{tags: "faultpoint"})
	file := filepath.Join(dir, "headgate.yaml")
	w := p.gather(4, func(int, int) (string, []string) {
		return chatOf("m"), append(bearer("one"), "X-Sim-Fault", "slow:5ms")
	})
	for name, c := range map[string]struct{ text, want string }{
		"not YAML":        {"pools: [", "headgate.yaml:"},
		"unknown field":   {defaults(good) + "nonsense: 1\n", fmt.Sprintf("headgate.yaml:%d:1: nonsense", strings.Count(defaults(good), "\n")+1)},
		"unknown pool":    {strings.Replace(defaults(good), "{pool: a}", "{pool: c}", 1), "routes[0].backends[0].pool"},
		"bad unit":        {defaults(good) + "drain_timeouts: 5\n", "drain_timeouts"},
		"missing secret":  {strings.Replace(defaults(good), "static:", "file: gone.yaml, static:", 1) + "x: {}\n", "x"},
		"same key twice":  {strings.Replace(defaults(good), "keys:\n", "keys:\n  - {id: one, secret_sha256: "+sha("z")+"}\n", 1), "keys[1].id"},
		"rule of failing": {strings.Replace(defaults(good), "a: {", "a: {failover: {after_first_delta: {automatic_retry: true}}, ", 1), "automatic_retry"},
	} {
		before := strings.Count(p.log.String(), "not reloaded")
		reloads := p.reloads()
		write(t, file, c.text)
		p.signal(syscall.SIGHUP)
		eventually(t, name+" is told of", func() bool { return strings.Count(p.log.String(), "not reloaded") > before })
		log := p.log.String()
		line := log[strings.LastIndex(log, "configuration not reloaded"):]
		if !strings.Contains(line, c.want) || !strings.Contains(line, "headgate.yaml") {
			t.Errorf("%s: the log does not say %q:\n%s", name, c.want, line)
		}
		a := p.post(chatOf("m"), bearer("one")...)
		w.also(a)
		if !a.whole() || a.header.Get("Headgate-Endpoint") != e[0].URL() {
			t.Errorf("%s: %v", name, a)
		}
		if p.reloads() != reloads {
			t.Errorf("%s: it was put in force", name)
		}
	}
	before := p.reloads()
	write(t, file, defaults(routed("b", "y", []string{"one"}, e[0], e[1])))
	eventually(t, "a good file", func() bool { return p.reloads() > before })
	a := p.post(chatOf("m"), bearer("one")...)
	w.also(a)
	if a.header.Get("Headgate-Endpoint") != e[1].URL() {
		t.Error(a)
	}
	w.end(t, e...)
	p.signal(syscall.SIGTERM)
}

// A file that was emptied, by a full disk or an editor that died, is none that
// anybody meant: it would take away every pool and every key.
func TestEmptyFileDoesNotEmptyTheGateway(t *testing.T) {
	t.Parallel()
	e := engines(t, 2, models("m", "x", "y"))
	dir := t.TempDir()
	p := serve(t, dir, routed("a", "x", []string{"one"}, e[0], e[1]), launch{tags: "faultpoint"})
	write(t, filepath.Join(dir, "headgate.yaml"), "")
	p.signal(syscall.SIGHUP)
	eventually(t, "the file is looked at", func() bool {
		return p.reloads() > 0 || strings.Contains(p.log.String(), "not reloaded")
	})
	if a := p.post(chatOf("m"), bearer("one")...); !a.whole() {
		t.Errorf("after the file was emptied: %v", a)
	}
	if a := p.post(chatOf("m")); a.status != 401 {
		t.Errorf("without an API key, after the file was emptied: %v", a)
	}
	p.signal(syscall.SIGTERM)
}

// What only a restart can change is told, and the rest of the file is taken.
func TestChangeThatNeedsARestartIsTold(t *testing.T) {
	t.Parallel()
	e := engines(t, 2, models("m", "x", "y"))
	dir := t.TempDir()
	g := start(t, dir, routed("a", "x", []string{"one"}, e[0], e[1]))
	g.reload(t, dir, "journal: {retention: 96h}\nlisteners: [{name: main, address: 127.0.0.1:0, debug_headers: false}]\n"+routed("b", "y", []string{"one"}, e[0], e[1]))
	for _, part := range []string{"part=journal", "part=listeners"} {
		if !strings.Contains(g.log.String(), "change needs a restart") || !strings.Contains(g.log.String(), part) {
			t.Errorf("the log does not tell of %s:\n%s", part, g.log)
		}
	}
	if a := g.post(chatOf("m"), bearer("one")...); !a.whole() || a.header.Get("Headgate-Endpoint") != e[1].URL() {
		t.Error(a)
	}
}
