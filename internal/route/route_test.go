// SPDX-License-Identifier: Apache-2.0

package route

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/headgate/headgate/inference"
)

func to(pools ...string) []Backend {
	backends := make([]Backend, len(pools))
	for i, p := range pools {
		backends[i] = Backend{Pool: p, Weight: 1}
	}
	return backends
}

func table(t testing.TB, routes ...Route) *Table {
	t.Helper()
	tab, err := New(routes)
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

func noDraw(int) int { panic("drew without a choice") }

func TestPrecedence(t *testing.T) {
	tab := table(t,
		Route{Backends: to("none")},
		Route{Model: "*", Backends: to("star")},
		Route{Model: "/q.*/", Backends: to("regexp")},
		Route{Model: "/qw.*/", Backends: to("regexp-later")},
		Route{Model: "q*", Backends: to("prefix-1")},
		Route{Model: "qwen*", Backends: to("prefix-4")},
		Route{Model: "qwen*", Backends: to("prefix-4-later")},
		Route{Model: "qwen", Backends: to("exact")},
		Route{Model: "qwen", Backends: to("exact-later")},
		Route{Model: "/.*llama/", Backends: to("llama")},
	)
	for model, want := range map[string]string{
		"qwen": "exact", "qwen3": "prefix-4", "qwe": "prefix-1", "q": "prefix-1",
		"codellama": "llama", "codellama2": "none", "": "none", "Qwen": "none",
	} {
		got, err := tab.Match(Query{Path: "/v1/chat/completions", Model: model}, noDraw)
		if err != nil || got.Pool != want || got.Model != model {
			t.Errorf("%q: got %+v, %v, want %s", model, got, err, want)
		}
	}
}

// A stronger model pattern of a route that does not hold otherwise decides
// nothing.
func TestConditionsComeBeforeTheModel(t *testing.T) {
	tab := table(t,
		Route{Model: "m", Hostnames: []string{"a.example"}, Backends: to("host")},
		Route{Model: "m", Path: "/v1/audio", Backends: to("path")},
		Route{Model: "m", Headers: map[string]string{"x-team": "red"}, Backends: to("header")},
		Route{Model: "m*", Hostnames: []string{"*.Sub.example", "::1"}, Backends: to("wild")},
		Route{Backends: to("rest")},
	)
	for _, c := range []struct {
		host, path string
		header     http.Header
		want       string
	}{
		{"a.example", "/v1/x", nil, "host"},
		{"A.Example.:8080", "/v1/x", nil, "host"},
		{"b.example", "/v1/x", nil, "rest"},
		{"b.a.example", "/v1/x", nil, "rest"},
		{"x.sub.example", "/", nil, "wild"},
		{"y.x.SUB.example", "/", nil, "wild"},
		{"sub.example", "/", nil, "rest"},
		{".sub.example", "/", nil, "rest"},
		{"[::1]:80", "/", nil, "wild"},
		{"[::1]", "/", nil, "wild"},
		{"", "/v1/audio", nil, "path"},
		{"", "/v1/audio/", nil, "path"},
		{"", "/v1/audio/speech", nil, "path"},
		{"", "/v1/audiobooks", nil, "rest"},
		{"", "/v1", nil, "rest"},
		{"", "/V1/audio", nil, "rest"},
		{"", "/", http.Header{"X-Team": {"blue", "red"}}, "header"},
		{"", "/", http.Header{"X-Team": {"Red"}}, "rest"},
		{"", "/", http.Header{"X-Team": {""}}, "rest"},
	} {
		got, err := tab.Match(Query{Host: c.host, Path: c.path, Header: c.header, Model: "m"}, noDraw)
		if err != nil || got.Pool != c.want {
			t.Errorf("%q %q %v: got %+v, %v, want %s", c.host, c.path, c.header, got, err, c.want)
		}
	}
}

func TestResultNamesRoutePathAndRewrite(t *testing.T) {
	tab := table(t,
		Route{Model: "other", Backends: to("x")},
		Route{Model: "/gpt-.*/", Path: "/v1/", Backends: to("p"), Rewrite: "Qwen/Qwen3-8B"},
	)
	got, err := tab.Match(Query{Path: "/v1/chat/completions", Model: "gpt-4"}, noDraw)
	if err != nil {
		t.Fatal(err)
	}
	if want := (Result{Route: 1, Pool: "p", Model: "Qwen/Qwen3-8B", Path: "/v1/"}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// Whatever a model is called, its name is compared as it is: SCH-11.
func TestModelNamesAreExactStrings(t *testing.T) {
	names := []string{
		"qwen3:8b", "qwen3:8b ", " qwen3:8b", "Qwen/Qwen3-8B", "qwen/qwen3-8b", "/mnt/models", "/data/models/llama.gguf", "model@sha256:0f",
		"my model", "模型", "é", "e\u0301", "a\tb", "%2F", "a.b", "a+b", "a?b", "//", "/", "true", "null", `"`, "\\",
	}
	var routes []Route
	for i, n := range names {
		routes = append(routes, Route{Model: n, Backends: to(fmt.Sprint(i))})
	}
	tab := table(t, routes...)
	for i, n := range names {
		got, err := tab.Match(Query{Path: "/", Model: n}, noDraw)
		if err != nil || got.Pool != fmt.Sprint(i) {
			t.Errorf("%q: got %+v, %v", n, got, err)
		}
	}
	if diff := cmp.Diff(names, tab.Models()); diff != "" {
		t.Errorf("models (-want +got):\n%s", diff)
	}
}

func TestModelsAreExactNamesOnce(t *testing.T) {
	tab := table(t,
		Route{Model: "b", Backends: to("x")}, Route{Model: "a*", Backends: to("x")}, Route{Model: "/c/", Backends: to("x")},
		Route{Model: "a", Backends: to("x")}, Route{Model: "b", Path: "/v2", Backends: to("x")}, Route{Backends: to("x")},
	)
	got := tab.Models()
	if !slices.Equal(got, []string{"b", "a"}) {
		t.Errorf("got %v", got)
	}
	got[0] = "changed"
	if tab.Models()[0] != "b" {
		t.Error("a caller changed the table")
	}
}

func TestRegularExpressionsMatchTheWholeName(t *testing.T) {
	tab := table(t, Route{Model: "/a|bc/", Backends: to("x")})
	for model, want := range map[string]bool{"a": true, "bc": true, "ac": false, "ab": false, "bcd": false, "a\n": false, "x\na": false} {
		if _, err := tab.Match(Query{Path: "/", Model: model}, noDraw); (err == nil) != want {
			t.Errorf("%q: %v", model, err)
		}
	}
}

func TestRefusals(t *testing.T) {
	tab := table(t,
		Route{Model: "qwen3-8b", Hostnames: []string{"a"}, Backends: to("x")},
		Route{Model: "qwen3-32b", Hostnames: []string{"a"}, Backends: to("x")},
		Route{Model: "qwen3-4b", Hostnames: []string{"a"}, Backends: to("x")},
		Route{Model: "Qwen3-0.6B", Hostnames: []string{"a"}, Backends: to("x")},
		Route{Model: "llama", Hostnames: []string{"a"}, Backends: to("x")},
		Route{Model: "qwen3-9b-secret", Hostnames: []string{"b"}, Backends: to("x")},
	)
	for _, c := range []struct {
		host, path, model string
		code              inference.Code
		message           string
	}{
		{"a", "/", "qwen3-9b", inference.ModelNotFound, `the model "qwen3-9b" is not served here; did you mean "qwen3-8b", "qwen3-4b", "qwen3-32b"?`},
		{"a", "/", "QWEN3-8B", inference.ModelNotFound, `the model "QWEN3-8B" is not served here; did you mean "qwen3-8b", "qwen3-4b", "qwen3-32b"?`},
		{"a", "/", "qwen", inference.ModelNotFound, `the model "qwen" is not served here; did you mean "qwen3-8b", "qwen3-4b", "qwen3-32b"?`},
		{"a", "/", "LLaMA-70b-instruct", inference.ModelNotFound, `the model "LLaMA-70b-instruct" is not served here; did you mean "llama"?`},
		{"a", "/", "qw", inference.ModelNotFound, `the model "qw" is not served here`},
		{"a", "/", "gpt-4", inference.ModelNotFound, `the model "gpt-4" is not served here`},
		{"b", "/", "lama", inference.ModelNotFound, `the model "lama" is not served here`},
		{"a", "/", "", inference.MissingModel, `the request names no model, and here only requests that name one are served`},
		{"c", "/v1/x", "llama", inference.NotFound, `nothing is served at "/v1/x" on this host`},
		{"c", "/v1/x", "", inference.NotFound, `nothing is served at "/v1/x" on this host`},
		{"a", "/", "\x1b[31m\"\u202e\xff", inference.ModelNotFound, `the model "\x1b[31m\"\u202e�" is not served here`},
	} {
		_, err := tab.Match(Query{Host: c.host, Path: c.path, Model: c.model}, noDraw)
		if err == nil || err.Code != c.code || err.Message != c.message {
			t.Errorf("%s%s %q: got %v", c.host, c.path, c.model, err)
		}
	}
}

func TestMessagesAreBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SliceOfN(rapid.StringN(1, -1, 300), 1, 8).Draw(t, "names")
		var routes []Route
		for _, n := range names {
			if CheckModel(n) == nil && n != "*" {
				routes = append(routes, Route{Model: n, Hostnames: []string{"a"}, Backends: to("x")})
			}
		}
		tab, err := New(routes)
		if err != nil {
			t.Fatal(err)
		}
		asked := rapid.SampledFrom(names).Draw(t, "asked") + rapid.SampledFrom([]string{"x", "\x00\x00", "\xff", strings.Repeat("\x01", 1000)}).Draw(t, "more")
		_, refused := tab.Match(Query{Host: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "host"), Path: "/" + asked, Model: asked}, noDraw)
		if refused == nil {
			return
		}
		if len(refused.Message) > 512 || !utf8.ValidString(refused.Message) || strings.ContainsFunc(refused.Message, func(r rune) bool { return r < ' ' }) {
			t.Errorf("%d bytes: %q", len(refused.Message), refused.Message)
		}
	})
}

func TestLongNamesAreCut(t *testing.T) {
	long := strings.Repeat("模", 5000)
	tab := table(t, Route{Model: "m", Backends: to("x")})
	_, err := tab.Match(Query{Path: "/", Model: long}, noDraw)
	if want := "the model \"" + strings.Repeat("模", 30) + "\"… is not served here"; err.Message != want {
		t.Errorf("got %s", err.Message)
	}
}

// The draw is by weight and nothing but the numbers handed in.
func TestWeights(t *testing.T) {
	tab := table(t, Route{Backends: []Backend{{Pool: "never"}, {Pool: "a", Weight: 90}, {Pool: "b", Weight: 10}, {Pool: "off"}}})
	for n, want := range map[int]string{0: "a", 89: "a", 90: "b", 99: "b"} {
		got, _ := tab.Match(Query{Path: "/"}, func(below int) int {
			if below != 100 {
				t.Errorf("drew below %d", below)
			}
			return n
		})
		if got.Pool != want {
			t.Errorf("%d: got %s", n, got.Pool)
		}
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	counts := map[string]int{}
	for range 10_000 {
		got, err := tab.Match(Query{Path: "/"}, rnd.IntN)
		if err != nil {
			t.Fatal(err)
		}
		counts[got.Pool]++
	}
	if diff := cmp.Diff(map[string]int{"a": 8946, "b": 1054}, counts); diff != "" {
		t.Errorf("seed 1, 2 (-want +got):\n%s", diff)
	}
}

func TestOneBackendWithWeightNeedsNoDraw(t *testing.T) {
	tab := table(t, Route{Backends: []Backend{{Pool: "off"}, {Pool: "on", Weight: 3}}})
	if got, _ := tab.Match(Query{Path: "/"}, noDraw); got.Pool != "on" {
		t.Errorf("got %s", got.Pool)
	}
}

func TestLargestBody(t *testing.T) {
	tab := table(t,
		Route{Model: "m", Path: "/v1", Backends: []Backend{{Pool: "a", Weight: 1, MaxBody: 10}, {Pool: "b", Weight: 1, MaxBody: 30}, {Pool: "c", MaxBody: 500}}},
		Route{Model: "n", Path: "/v1", Headers: map[string]string{"x": "y"}, Backends: []Backend{{Pool: "d", Weight: 1, MaxBody: 40}}},
		Route{Path: "/v2", Backends: []Backend{{Pool: "e", Weight: 1, MaxBody: 5}, {Pool: "f", Weight: 1}}},
	)
	for _, c := range []struct {
		path   string
		header http.Header
		want   int64
	}{
		{"/v1/x", nil, 30},
		{"/v1/x", http.Header{"X": {"y"}}, 40},
		{"/v2", nil, 100},
	} {
		if got, err := tab.LargestBody(Query{Path: c.path, Header: c.header}, 100); err != nil || got != c.want {
			t.Errorf("%s: got %d, %v, want %d", c.path, got, err, c.want)
		}
	}
	if got, err := tab.LargestBody(Query{Path: "/v1"}, 20); err != nil || got != 20 {
		t.Errorf("small listener: got %d, %v", got, err)
	}
	if _, err := tab.LargestBody(Query{Path: "/v3"}, 100); err == nil || err.Code != inference.NotFound {
		t.Errorf("no route: %v", err)
	}
}

func TestBadRoutes(t *testing.T) {
	for _, c := range []struct {
		route Route
		want  string
	}{
		{Route{Model: "/(/", Backends: to("x")}, "route 0: model: error parsing regexp: missing closing ): `(`"},
		{Route{Model: "/a)(b/", Backends: to("x")}, "route 0: model: error parsing regexp: unexpected ): `a)(b`"},
		{Route{Model: `/\Qa/`, Backends: to("x")}, "route 0: model: error parsing regexp: missing closing ): `^(?:\\Qa)$`"},
		{Route{Model: "/" + strings.Repeat("a", 1025) + "/", Backends: to("x")}, "route 0: model has a regular expression of more than 1024 bytes"},
		{Route{Model: "*a", Backends: to("x")}, `route 0: model "*a" has a * before its end: write a regular expression as /…/`},
		{Route{Path: "v1", Backends: to("x")}, `route 0: path "v1" does not begin with /`},
		{Route{Path: "/v1/*", Backends: to("x")}, `route 0: path "/v1/*" is not a plain prefix such as /v1/audio`},
		{Route{Path: "/v1//x", Backends: to("x")}, `route 0: path "/v1//x" has a segment that no request keeps`},
		{Route{Hostnames: []string{"*.*.a"}, Backends: to("x")}, `route 0: host name "*.*.a" is neither a name, without port, nor *. and a name`},
		{Route{}, "route 0: no backend has a weight above 0"},
		{Route{Backends: []Backend{{Weight: -1}, {Weight: 2}}}, "route 0: weight -1 is not between 0 and 1000000"},
	} {
		if _, err := New([]Route{c.route}); err == nil || err.Error() != c.want {
			t.Errorf("%+v: got %v", c.route, err)
		}
	}
}

// Match against a plain reading of the rules of precedence.
func TestMatchAgainstModel(t *testing.T) {
	patterns := rapid.SampledFrom([]string{"", "*", "a", "ab", "a*", "ab*", "/a.*/", "/.*b/", "b"})
	rapid.Check(t, func(t *rapid.T) {
		var routes []Route
		for i := range rapid.IntRange(0, 8).Draw(t, "n") {
			routes = append(routes, Route{
				Model:    patterns.Draw(t, "model"),
				Path:     rapid.SampledFrom([]string{"", "/x", "/x/y"}).Draw(t, "path"),
				Backends: to(fmt.Sprint(i)),
			})
		}
		tab, err := New(routes)
		if err != nil {
			t.Fatal(err)
		}
		model := rapid.SampledFrom([]string{"", "a", "ab", "abc", "b", "c"}).Draw(t, "asked")
		path := rapid.SampledFrom([]string{"/", "/x", "/x/y/z", "/xy"}).Draw(t, "at")

		best, bestRank := -1, -1
		for i, r := range routes {
			rank := -1
			switch m := r.Model; {
			case m == "" || m == "*":
				rank = 0
			case m == "/a.*/" && strings.HasPrefix(model, "a"), m == "/.*b/" && strings.HasSuffix(model, "b"):
				rank = 1
			case strings.HasSuffix(m, "*") && strings.HasPrefix(model, m[:len(m)-1]):
				rank = 1 + len(m)
			case m == model:
				rank = 100
			}
			if r.Path != "" && path != r.Path && !strings.HasPrefix(path, r.Path+"/") {
				rank = -1
			}
			if rank > bestRank {
				best, bestRank = i, rank
			}
		}
		got, refused := tab.Match(Query{Path: path, Model: model}, noDraw)
		if (refused != nil) != (best < 0) || refused == nil && got.Route != best {
			t.Errorf("%q at %s: got %+v, %v, want route %d", model, path, got, refused, best)
		}
	})
}

func BenchmarkMatch(b *testing.B) {
	var routes []Route
	for i := range 50 {
		routes = append(routes, Route{Model: fmt.Sprintf("model-%d", i), Backends: []Backend{{Pool: "a", Weight: 9}, {Pool: "b", Weight: 1}}})
	}
	tab := table(b, routes...)
	rnd := rand.New(rand.NewPCG(1, 2))
	q := Query{Host: "gateway.example:8080", Path: "/v1/chat/completions", Model: "model-49"}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := tab.Match(q, rnd.IntN); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkUnknownModel(b *testing.B) {
	var routes []Route
	for i := range 1000 {
		routes = append(routes, Route{Model: fmt.Sprintf("%050d", i), Backends: to("x")})
	}
	tab := table(b, routes...)
	for b.Loop() {
		tab.Match(Query{Path: "/", Model: strings.Repeat("0", 60)}, noDraw)
	}
}

func TestLeadsFollowsTheOneRouteThatMatches(t *testing.T) {
	table, err := New([]Route{
		{Model: "a*", Backends: []Backend{{Pool: "p", Weight: 1}, {Pool: "q", Weight: 0}}},
		{Backends: []Backend{{Pool: "q", Weight: 1}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for query, want := range map[[2]string]bool{
		{"abc", "p"}: true, {"abc", "q"}: false, {"x", "p"}: false, {"x", "q"}: true,
	} {
		if got := table.Leads(Query{Model: query[0]}, query[1]); got != want {
			t.Errorf("%v: %v", query, got)
		}
	}
}

// A session always draws the same backend, and many sessions draw by weight.
func TestStickySessionsDrawByWeight(t *testing.T) {
	draw := func(weights map[string]int) map[string]string {
		var backends []Backend
		for _, pool := range []string{"a", "b", "c"} {
			backends = append(backends, Backend{Pool: pool, Weight: weights[pool]})
		}
		tab := table(t, Route{Backends: backends, Sticky: true})
		drawn := map[string]string{}
		for i := range 4000 {
			session := fmt.Sprintf("session-%d", i)
			for range 2 {
				got, err := tab.Match(Query{Path: "/", Session: session}, noDraw)
				if err != nil || drawn[session] != "" && drawn[session] != got.Pool {
					t.Fatalf("%s went to %s and then to %s (%v)", session, drawn[session], got.Pool, err)
				}
				drawn[session] = got.Pool
			}
		}
		return drawn
	}
	count := func(drawn map[string]string) map[string]int {
		n := map[string]int{}
		for _, pool := range drawn {
			n[pool]++
		}
		return n
	}
	before, after := draw(map[string]int{"a": 90, "b": 10}), draw(map[string]int{"a": 90, "b": 30})
	if n := count(before); n["a"] < 3500 || n["a"] > 3700 || n["c"] != 0 {
		t.Errorf("drawn %v, want 90 and 10 of 100", n)
	}
	if n := count(after); n["a"] < 2880 || n["a"] > 3120 {
		t.Errorf("drawn %v, want 90 and 30 of 120", n)
	}
	for session, pool := range before {
		if pool == "b" && after[session] != "b" {
			t.Fatalf("%s left the backend that got more weight", session)
		}
	}
	// Without a session, and where the route is not sticky, chance decides.
	tab := table(t, Route{Backends: []Backend{{Pool: "a", Weight: 1}, {Pool: "b", Weight: 1}}, Sticky: true})
	if got, _ := tab.Match(Query{Path: "/"}, func(int) int { return 1 }); got.Pool != "b" {
		t.Errorf("without a session: %s", got.Pool)
	}
	tab = table(t, Route{Backends: []Backend{{Pool: "a", Weight: 1}, {Pool: "b", Weight: 1}}})
	if got, _ := tab.Match(Query{Path: "/", Session: "s"}, func(int) int { return 1 }); got.Pool != "b" {
		t.Errorf("without sticky: %s", got.Pool)
	}
}

func TestAdaptersGoWhereTheirBaseGoes(t *testing.T) {
	tab := table(t,
		Route{Model: "never", Backends: to("x"), Rewrite: "other"},
		Route{Model: "public", Backends: []Backend{{Pool: "a", Weight: 1}, {Pool: "b", Weight: 1}, {Pool: "off"}}, Rewrite: "org/base"},
		Route{Model: "plain", Path: "/v1/embeddings", Backends: to("e")},
	)
	in := func(pools ...string) func(string) bool {
		return func(pool string) bool { return slices.Contains(pools, pool) }
	}
	for _, c := range []struct {
		path, base string
		serves     func(string) bool
		want       string
	}{
		{"/v1/completions", "org/base", in("b"), "b"},
		{"/v1/completions", "org/base", in("x", "e"), ""},
		{"/v1/completions", "org/base", in("off"), ""}, // it has no weight
		{"/v1/completions", "public", in("a", "b"), ""},
		{"/v1/completions", "plain", in("e"), ""},
		{"/v1/embeddings", "plain", in("e"), "e"},
	} {
		got, found := tab.MatchBase(Query{Path: c.path, Model: "lora"}, c.base, c.serves, noDraw)
		if found != (c.want != "") || got.Pool != c.want || found && got.Model != "lora" {
			t.Errorf("%s at %s: %+v, %v, want %s", c.base, c.path, got, found, c.want)
		}
	}
}

func TestSuggestionsAreWhatTheClientMayKnow(t *testing.T) {
	tab := table(t, Route{Model: "qwen-small", Backends: to("p")}, Route{Model: "qwen-small2", Backends: to("p")})
	q := Query{Path: "/", Model: "qwen-smal", Listed: slices.Values([]string{"qwen-smart", "far-away"})}
	q.May = func(name string) bool { return name != "qwen-small2" }
	_, err := tab.Match(q, noDraw)
	if err == nil || !strings.Contains(err.Message, `"qwen-small"`) || !strings.Contains(err.Message, `"qwen-smart"`) || strings.Contains(err.Message, "small2") || strings.Contains(err.Message, "far") {
		t.Errorf("%v", err)
	}
}

// What an unknown model costs is bounded, however many models there are: anybody
// may ask for one.
func TestSuggestionsCostLittle(t *testing.T) {
	tab := table(t, Route{Model: "known", Backends: to("p")})
	looked, taken := 0, 0
	q := Query{
		Path: "/", Model: "model-0000",
		Listed: func(yield func(string) bool) {
			for {
				if looked++; !yield(fmt.Sprintf("model-%04d", looked%9000+1)) {
					return
				}
			}
		},
		Takes: func(string) bool { taken++; return false },
	}
	if _, err := tab.Match(q, noDraw); err == nil || strings.Contains(err.Message, "did you mean") {
		t.Errorf("%v", err)
	}
	if looked > 1000 || taken == 0 || taken > 20 {
		t.Errorf("%d names were looked at and %d tried", looked, taken)
	}
	q.Listed = func(yield func(string) bool) {
		for yield("of quite another length") {
			looked++
		}
	}
	if _, _ = tab.Match(q, noDraw); looked > 20_000 {
		t.Errorf("%d names were looked at", looked)
	}
	q.Brief, q.Listed = true, func(func(string) bool) { t.Error("names were looked at for a brief error") }
	if _, err := tab.Match(q, noDraw); err == nil || err.Code != inference.ModelNotFound {
		t.Errorf("%v", err)
	}
	if err := ModelNotFound("model-b", slices.Values([]string{"model-a", "x"})); !strings.Contains(err.Message, `"model-a"`) {
		t.Errorf("%v", err)
	}
}

// A route can share one name among models, of one pool too, and sessions stay with
// theirs.
func TestBackendsRewriteForThemselves(t *testing.T) {
	tab := table(t, Route{
		Model: "poet", Sticky: true, Rewrite: "poet-v1",
		Backends: []Backend{{Pool: "p", Weight: 3}, {Pool: "p", Weight: 1, Rewrite: "poet-v2"}, {Pool: "q", Weight: 0, Rewrite: "poet-v3"}},
	})
	counts := map[string]int{}
	for i := range 4000 {
		q := Query{Path: "/", Model: "poet", Session: fmt.Sprint("session ", i)}
		got, err := tab.Match(q, noDraw)
		if err != nil || got.Pool != "p" {
			t.Fatalf("%+v, %v", got, err)
		}
		if again, _ := tab.Match(q, noDraw); again != got {
			t.Fatalf("%+v, then %+v", got, again)
		}
		counts[got.Model]++
	}
	if n := counts["poet-v2"]; n < 900 || n > 1100 || n+counts["poet-v1"] != 4000 {
		t.Errorf("%v, want about 1 to 3", counts)
	}
	for draw, want := range map[int]string{0: "poet-v1", 2: "poet-v1", 3: "poet-v2"} {
		got, err := tab.Match(Query{Path: "/", Model: "poet"}, func(int) int { return draw })
		if err != nil || got.Model != want {
			t.Errorf("draw %d: %+v, %v, want %s", draw, got, err, want)
		}
	}
	serves := func(string) bool { return true }
	if _, found := tab.MatchBase(Query{Path: "/", Model: "lora"}, "poet", serves, noDraw); found {
		t.Error("an adapter of a model that no engine gets by this name was taken")
	}
	if got, found := tab.MatchBase(Query{Path: "/", Model: "lora"}, "poet-v2", serves, noDraw); !found || got.Pool != "p" || got.Model != "lora" {
		t.Errorf("%+v, %v", got, found)
	}
}
