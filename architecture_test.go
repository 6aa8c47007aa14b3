// SPDX-License-Identifier: Apache-2.0

// Package headgate_test holds the rules of the tree as tests: who may import
// whom, what a core may not do, what every file and page must have. Each ban
// has its reason, which is what a failure prints.
//
// The rules see parsed files only, so that each can be shown to bite: the tests
// at the end feed every rule a file that breaks it.
package headgate_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/headgate/headgate"

// Parts of the tree. "x/..." is x and all below it.
var (
	everything = []string{"..."}

	// cores take values and return decisions, so that one seed replays a whole
	// failure. internal/dialect and below are cores too: a pure function of bytes.
	cores = []string{
		"internal/attempt/...", "internal/flow/...", "internal/schedule/...", "internal/prefix/...",
		"internal/route/...", "internal/fleet/...", "internal/dialect/...", "internal/engine/...",
		"internal/diagnose/...", "internal/simengine/model/...", "internal/lease/...", "internal/guard/roster/...",
		"internal/mutation/...", "internal/rate/...", "internal/wake",
		"plugin/...", "plugins/...",
	}

	// checkers judge the gateway from outside.
	checkers = []string{"internal/sim/check/...", "test/..."}
)

// An importRule keeps packages out of a part of the tree.
type importRule struct {
	in     []string // here …
	except []string // … but not here
	tests  bool     // in tests too
	ban    []string // these packages; "x/..." as above, "std" and "own" stand for sets
	but    []string // though not these
	why    string
}

var importRules = []importRule{
	{
		in: []string{"inference"}, ban: everything, but: []string{"std"},
		why: "every package may import the vocabulary, so it drags nothing along",
	},
	{
		in: everything, tests: true, ban: own("cmd/..."),
		why: "commands are a parts list; what two of them need belongs to a package",
	},
	{
		in: cores, ban: own("..."), but: own(append(cores, "inference", "plugin")...),
		why: "a core knows other cores and the vocabulary; shells call cores, never the other way",
	},
	{
		in: cores, except: []string{"internal/prefix"}, ban: everything, but: append([]string{"std"}, own("...")...),
		why: "a core is readable and replayable without anybody else's code",
	},
	{
		in: []string{"internal/prefix"}, ban: everything, but: append([]string{"std", "github.com/cespare/xxhash/v2"}, own("...")...),
		why: "one pure function is borrowed, a hash with a published definition that others compute too; nothing else",
	},
	{
		in: cores, ban: []string{"net/http"}, except: []string{"internal/route"},
		why: "a core has no sockets (internal/route has http.Header, the type of a map)",
	},
	{
		in: cores, ban: []string{"os/...", "syscall", "log/...", "context"},
		why: "a core has no files, no log and nobody to wait for; it returns what the caller is to do",
	},
	{
		in: cores, ban: []string{"math/rand", "crypto/rand"},
		why: "randomness is handed in (*math/rand/v2.Rand or a draw), so that a seed replays it",
	},
	{
		in: everything, except: []string{"internal/telemetry/..."}, ban: []string{"github.com/prometheus/...", "go.opentelemetry.io/..."},
		why: "other packages speak to small recorders, so that names and labels are decided in one place",
	},
	{
		in: everything, except: []string{"internal/journal/..."}, ban: []string{"database/sql/...", "modernc.org/sqlite/...", "github.com/jackc/..."},
		why: "only the store knows SQL; the rest knows its interface",
	},
	{
		in: everything, except: []string{"internal/extproc/..."}, ban: []string{"github.com/envoyproxy/..."},
		why: "Envoy's types are one edge's, not a vocabulary",
	},
	{
		in: everything, except: []string{"api/...", "internal/controller/...", "internal/discovery/...", "cmd/..."},
		ban: []string{"k8s.io/...", "sigs.k8s.io/..."},
		why: "the gateway runs on a laptop; Kubernetes is one source of configuration",
	},
	{
		in: []string{"internal/upstream"}, ban: own("..."),
		why: "the client towards engines reports what happened and knows nothing of what it means",
	},
	{
		in: []string{"internal/simengine/..."}, tests: true, ban: own("..."), but: own("internal/simengine/..."),
		why: "tests judge the gateway by the simulated engine: shared code would share its mistakes",
	},
	{
		in: checkers, tests: true,
		ban: own("internal/attempt/...", "internal/lease/...", "internal/guard/...", "internal/gateway/...", "internal/schedule/...", "internal/dialect/...", "internal/upstream/..."),
		// internal/sim/check judges these runs; they only drive the gateway.
		except: []string{"test/faults"},
		why:    "a checker reads bytes and logs, so that it can't share a mistake with what it checks",
	},
	{
		in: everything, except: []string{"test/..."}, tests: true, ban: own("test/..."),
		why: "what engines and clients of other makers need is for the tests that run them",
	},
}

func TestImports(t *testing.T) {
	for _, r := range importRules {
		report(t, r.why, look(tree(t).files, r.look))
	}
}

func (r importRule) look(f *goFile) []finding {
	if f.test && !r.tests || !matches(f.dir, r.in) || matches(f.dir, r.except) {
		return nil
	}
	var found []finding
	for _, spec := range f.Imports {
		name, _ := strconv.Unquote(spec.Path.Value)
		if bans(name, r.ban) && !bans(name, r.but) {
			found = append(found, f.at(spec.Pos(), "imports "+name))
		}
	}
	return found
}

// A nameRule bans single names of packages.
type nameRule struct {
	in     []string
	except map[string]string // file → why it may
	bubble bool              // not inside synctest.Test, where time is virtual
	tests  bool
	ban    []string // "package.Name", with the package's import path
	why    string
}

var nameRules = []nameRule{
	{
		in: cores,
		ban: []string{
			"time.Now", "time.Since", "time.Until", "time.After", "time.AfterFunc", "time.Sleep",
			"time.NewTimer", "time.NewTicker", "time.Tick",
		},
		why: "a core is told the time, so that a run can be replayed",
	},
	{
		in: cores,
		ban: []string{
			"math/rand/v2.Int", "math/rand/v2.IntN", "math/rand/v2.Int32", "math/rand/v2.Int32N",
			"math/rand/v2.Int64", "math/rand/v2.Int64N", "math/rand/v2.Uint", "math/rand/v2.UintN",
			"math/rand/v2.Uint32", "math/rand/v2.Uint32N", "math/rand/v2.Uint64", "math/rand/v2.Uint64N",
			"math/rand/v2.Float32", "math/rand/v2.Float64", "math/rand/v2.ExpFloat64", "math/rand/v2.NormFloat64",
			"math/rand/v2.N", "math/rand/v2.Perm", "math/rand/v2.Shuffle",
		},
		why: "the global source can't be seeded; a core draws from the source it was given",
	},
	{
		in: cores,
		ban: []string{
			"net.Dial", "net.DialTimeout", "net.Dialer", "net.Listen", "net.ListenPacket",
			"net.Resolver", "net.LookupHost", "net.LookupIP", "net.LookupAddr", "net.Interfaces",
		},
		why: "a core has no sockets; of net it may use what takes addresses apart",
	},
	{
		in: everything,
		ban: []string{
			"net/http.NewRequest", "net/http.NewRequestWithContext", "net/http.Get", "net/http.Head", "net/http.Post",
			"net/http.PostForm", "net/http.Client", "net/http.DefaultClient", "net/http.Transport", "net/http.DefaultTransport",
		},
		except: map[string]string{
			"internal/demo/demo.go":      "is a client like any other: it talks to the gateway and not to engines",
			"bench/reverseproxy/main.go": "is what the gateway is measured beside",
		},
		why: "net/http silently sends a POST again if it has Idempotency-Key and GetBody, and hides how an exchange ended: engines are reached through internal/upstream",
	},
	{
		in: everything, tests: true, bubble: true, ban: []string{"time.Sleep"},
		except: map[string]string{
			"internal/upstream/pool_test.go":       "no event tells that a writer is blocked",
			"internal/upstream/interrupt_test.go":  "a peer that drips is the subject",
			"internal/discovery/discovery_test.go": "is called inside bubbles, by a helper of the rig",
			"internal/filewatch/filewatch_test.go": "is called inside bubbles, by a helper of the rig",
			"internal/scrape/scrape_test.go":       "is called inside bubbles, by a helper of the rig",
		},
		why: "a sleep is too long or too short: wait for an event, or sleep inside synctest.Test",
	},
}

func TestNames(t *testing.T) {
	for _, r := range nameRules {
		report(t, r.why, look(tree(t).files, r.look))
	}
}

func (r nameRule) look(f *goFile) []finding {
	if r.except[f.path] != "" {
		return nil
	}
	return r.all(f)
}

// all does not know exceptions.
func (r nameRule) all(f *goFile) []finding {
	if f.test && !r.tests || !matches(f.dir, r.in) {
		return nil
	}
	imported := f.imported()
	name := func(e ast.Expr) string {
		if sel, ok := e.(*ast.SelectorExpr); ok {
			if id, ok := sel.X.(*ast.Ident); ok && imported[id.Name] != "" {
				return imported[id.Name] + "." + sel.Sel.Name
			}
		}
		return ""
	}
	var found []finding
	ast.Inspect(f.File, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			return !r.bubble || name(n.Fun) != "testing/synctest.Test"
		case *ast.SelectorExpr:
			if used := name(n); slices.Contains(r.ban, used) {
				found = append(found, f.at(n.Pos(), "uses "+used))
			}
		}
		return true
	})
	return found
}

// TestExceptionsAreNeeded: one that excuses nothing hides the next offence.
func TestExceptionsAreNeeded(t *testing.T) {
	for _, r := range nameRules {
		for file := range r.except {
			f := tree(t).file(file)
			if f == nil || len(r.all(f)) == 0 {
				t.Errorf("%s needs no exception from the rule on %s", file, r.ban[0])
			}
		}
	}
}

const noGoroutines = "a core has no goroutines: their order could not be replayed"

func TestCoresStartNothing(t *testing.T) { report(t, noGoroutines, look(tree(t).files, goStatements)) }

func goStatements(f *goFile) []finding {
	if f.test || !matches(f.dir, cores) {
		return nil
	}
	var found []finding
	ast.Inspect(f.File, func(n ast.Node) bool {
		if s, ok := n.(*ast.GoStmt); ok {
			found = append(found, f.at(s.Pos(), "starts a goroutine"))
		}
		return true
	})
	return found
}

// A fileRule is about one file as a whole.
type fileRule struct {
	name string
	why  string
	look func(*goFile) []finding
}

var fileRules = []fileRule{
	{"licence line", "the licence is one line, so that the package's comment is the first thing seen", func(f *goFile) []finding {
		if !strings.HasPrefix(f.text, "// SPDX-License-Identifier: Apache-2.0\n\n") {
			return []finding{f.at(f.Package, "does not begin with // SPDX-License-Identifier: Apache-2.0 and an empty line")}
		}
		return nil
	}},
	{"package name", "the name says nothing: the code belongs to a noun that is not named yet", func(f *goFile) []finding {
		vague := []string{"util", "utils", "common", "types", "helpers", "helper", "constants", "manager", "misc", "base", "shared"}
		if slices.Contains(vague, f.Name.Name) {
			return []finding{f.at(f.Name.Pos(), "package "+f.Name.Name)}
		}
		return nil
	}},
}

func TestFiles(t *testing.T) {
	for _, r := range fileRules {
		t.Run(r.name, func(t *testing.T) { report(t, r.why, look(tree(t).files, r.look)) })
	}
}

const wantPackageComment = "a reader learns from it what the package owns, what it refuses to do and who calls it"

func TestPackageComments(t *testing.T) { report(t, wantPackageComment, packageComments(tree(t).files)) }

// packageComments finds packages without a comment, or with one that does not
// begin with the name that godoc and go doc show.
func packageComments(files []*goFile) []finding {
	first, good := map[string]*goFile{}, map[string]bool{}
	for _, f := range files {
		if f.test {
			continue
		}
		if first[f.dir] == nil {
			first[f.dir] = f
		}
		begin := []string{"Package " + f.Name.Name + " "}
		if f.Name.Name == "main" {
			command := path.Base(f.dir)
			begin = []string{"Command " + command + " ", strings.ToUpper(command[:1]) + command[1:] + " "}
		}
		good[f.dir] = good[f.dir] || slices.ContainsFunc(begin, func(b string) bool { return strings.HasPrefix(f.Doc.Text(), b) })
	}
	var found []finding
	for dir, f := range first {
		if !good[dir] {
			found = append(found, f.at(f.Package, "package "+f.Name.Name+" has no comment that begins with its name"))
		}
	}
	return found
}

// A textRule bans what a pattern finds in any text that people write.
type textRule struct {
	pattern *regexp.Regexp
	why     string
}

// The patterns are cut in two so that this file does not match.
var textRules = []textRule{
	{
		pattern: regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`),
		why:     "what is left to do is an issue; a note in the code is read by nobody",
	},
	{
		pattern: regexp.MustCompile(`(^|[\s"'=(` + "`" + `])/(home|root|tmp|Users|work)/` + `[\w.]`),
		why:     "a path of one machine means nothing on another; tests use t.TempDir",
	},
	{
		pattern: regexp.MustCompile(`\b(proxy\.golang|registry\.npmjs|registry\.yarnpkg|pypi|files\.pythonhosted|deb\.debian|index\.crates)\.` + `(org|io|com)\b`),
		why:     "registries are reached through their clients, as the machine is set up; a host name here breaks mirrors",
	},
}

func TestTexts(t *testing.T) {
	for _, r := range textRules {
		var found []finding
		for _, p := range tree(t).texts {
			found = append(found, r.look(p)...)
		}
		report(t, r.why, found)
	}
}

func (r textRule) look(p *page) []finding {
	var found []finding
	for i, line := range strings.Split(p.text, "\n") {
		if hit := r.pattern.FindString(line); hit != "" {
			found = append(found, finding{p.path, i + 1, "has " + strconv.Quote(strings.TrimSpace(hit))})
		}
	}
	return found
}

const noDeadLinks = "a page that names what does not exist misleads whoever trusts it"

// TestLinks: every relative link of a page, every path in its back quotes, and
// every page that a comment names must exist.
func TestLinks(t *testing.T) {
	var found []finding
	tr := tree(t)
	for _, p := range tr.texts {
		switch path.Ext(p.path) {
		case ".md":
			found = append(found, p.deadLinks(tr.exists)...)
		case ".sh", ".yaml", ".yml", ".mk", "":
			found = append(found, p.deadMentions(p.text, 1, tr.exists)...)
		}
	}
	for _, f := range tr.files {
		found = append(found, f.deadMentions(tr.exists)...)
	}
	report(t, noDeadLinks, found)
}

var (
	linkPattern    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	quotePattern   = regexp.MustCompile("`([^`\n]+)`")
	mentionPattern = regexp.MustCompile(`\bdocs/[\w./-]+\.md\b|\b[A-Z]{4,}\.md\b`)

	// What in back quotes is a path of the tree: words joined by slashes that
	// begin with a folder of ours, or a file at the root.
	pathPattern = regexp.MustCompile(`^(\./)?((api|bench|cmd|deploy|docs|examples|formal|inference|internal|plugin|plugins|test|\.ci)(/[\w.*-]+)*/?|[\w.-]+\.(md|go|ya?ml)|Makefile|LICENSE)$`)
)

func (p *page) deadLinks(exists func(string) bool) []finding {
	var found []finding
	fenced := false
	for i, line := range strings.Split(p.text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
		}
		if fenced {
			continue
		}
		for _, m := range linkPattern.FindAllStringSubmatch(line, -1) {
			target, _, _ := strings.Cut(m[1], "#")
			if target == "" || strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			if !exists(path.Join(path.Dir(p.path), target)) {
				found = append(found, finding{p.path, i + 1, "links to " + target})
			}
		}
		for _, m := range quotePattern.FindAllStringSubmatch(line, -1) {
			if !pathPattern.MatchString(m[1]) || readers[m[1]] {
				continue
			}
			if target := path.Clean(m[1]); !exists(target) && !exists(path.Join(path.Dir(p.path), target)) {
				found = append(found, finding{p.path, i + 1, "names " + target})
			}
		}
	}
	return found
}

// readers are files of the reader's own.
var readers = map[string]bool{"headgate.yaml": true}

// deadMentions looks at text that begins at a line of the page.
func (p *page) deadMentions(text string, first int, exists func(string) bool) []finding {
	var found []finding
	for i, line := range strings.Split(text, "\n") {
		for _, name := range mentionPattern.FindAllString(line, -1) {
			if !exists(name) && !exists(path.Join(path.Dir(p.path), name)) {
				found = append(found, finding{p.path, first + i, "names " + name})
			}
		}
	}
	return found
}

func (f *goFile) deadMentions(exists func(string) bool) []finding {
	var found []finding
	for _, group := range f.Comments {
		for _, c := range group.List {
			found = append(found, f.page.deadMentions(c.Text, f.fset.Position(c.Pos()).Line, exists)...)
		}
	}
	return found
}

// A finding is one place that breaks a rule.
type finding struct {
	path string
	line int
	what string
}

func (f finding) String() string { return fmt.Sprintf("%s:%d: %s", f.path, f.line, f.what) }

func report(t *testing.T, why string, found []finding) {
	t.Helper()
	for _, f := range found {
		t.Errorf("%s\n\twhy not: %s", f, why)
	}
}

func look(files []*goFile, rule func(*goFile) []finding) []finding {
	var found []finding
	for _, f := range files {
		found = append(found, rule(f)...)
	}
	return found
}

// page is one committed text.
type page struct {
	path string
	text string
}

// goFile is one Go file, parsed.
type goFile struct {
	page
	*ast.File
	dir  string
	test bool
	fset *token.FileSet
}

func parse(p page) (*goFile, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, p.path, p.text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	return &goFile{page: p, File: file, dir: path.Dir(p.path), test: strings.HasSuffix(p.path, "_test.go"), fset: fset}, nil
}

func (f *goFile) at(pos token.Pos, what string) finding {
	return finding{f.path, f.fset.Position(pos).Line, what}
}

// imported maps the names that the file gives its imports to their paths.
func (f *goFile) imported() map[string]string {
	names := map[string]string{}
	for _, spec := range f.Imports {
		full, _ := strconv.Unquote(spec.Path.Value)
		name := path.Base(strings.TrimSuffix(full, "/v2"))
		if spec.Name != nil {
			name = spec.Name.Name
		}
		names[name] = full
	}
	return names
}

// matches reports whether a directory is in one of the parts.
func matches(dir string, parts []string) bool {
	return slices.ContainsFunc(parts, func(part string) bool {
		below, deep := strings.CutSuffix(part, "...")
		below = strings.TrimSuffix(below, "/")
		return dir == part || deep && (below == "" || dir == below || strings.HasPrefix(dir, below+"/"))
	})
}

// bans is matches for import paths, with a word for the standard library.
func bans(name string, list []string) bool {
	host, _, _ := strings.Cut(name, "/")
	return matches(name, list) || slices.Contains(list, "std") && !strings.Contains(host, ".")
}

// own turns parts of the tree into import paths.
func own(parts ...string) []string {
	paths := make([]string, len(parts))
	for i, part := range parts {
		paths[i] = module + "/" + part
	}
	return paths
}

// forest is the tree as it is on disk.
type forest struct {
	files []*goFile
	texts []*page
	paths map[string]bool
}

// exists reports whether a file or folder is there; "*" stands for any name.
func (f *forest) exists(name string) bool {
	if !strings.Contains(name, "*") {
		return f.paths[name]
	}
	for p := range f.paths {
		if ok, _ := path.Match(name, p); ok {
			return true
		}
	}
	return false
}

func (f *forest) file(name string) *goFile {
	i := slices.IndexFunc(f.files, func(g *goFile) bool { return g.path == name })
	if i < 0 {
		return nil
	}
	return f.files[i]
}

var grown *forest

// tree reads the repository, once.
func tree(t *testing.T) *forest {
	t.Helper()
	if grown != nil {
		return grown
	}
	f := &forest{paths: map[string]bool{}}
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name = filepath.ToSlash(name)
		if d.IsDir() && (name == ".git" || name == "bin" || name == "bench/out" || d.Name() == "node_modules") {
			return fs.SkipDir
		}
		f.paths[name] = true
		if d.IsDir() || !isText(name) {
			return nil
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		p := page{name, string(data)}
		f.texts = append(f.texts, &p)
		if strings.HasSuffix(name, ".go") && !strings.Contains(name, "testdata/") {
			file, err := parse(p)
			if err != nil {
				return err
			}
			f.files = append(f.files, file)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	grown = f
	return grown
}

// isText leaves out what nobody writes by hand: corpora, locks, recordings.
func isText(name string) bool {
	base := path.Base(name)
	if strings.Contains(name, "testdata/fuzz/") || strings.Contains(name, "testdata/rapid/") || strings.HasSuffix(base, "-lock.json") {
		return false
	}
	switch path.Ext(base) {
	case ".go", ".mod", ".md", ".sh", ".mk", ".yaml", ".yml", ".toml", ".json", ".txt", ".proto", ".pml",
		".js", ".cjs", ".mjs", ".ts", ".py", ".html", ".css":
		return true
	}
	return base == "Makefile" || base == ".npmrc" || base == ".gitignore" || strings.HasPrefix(name, ".ci/")
}

// every runs all rules on one file alone.
func every(f *goFile) []finding {
	found := goStatements(f)
	for _, r := range importRules {
		found = append(found, r.look(f)...)
	}
	for _, r := range nameRules {
		found = append(found, r.look(f)...)
	}
	for _, r := range fileRules {
		found = append(found, r.look(f)...)
	}
	found = append(found, packageComments([]*goFile{f})...)
	for _, r := range textRules {
		found = append(found, r.look(&f.page)...)
	}
	return append(found, f.deadMentions(func(name string) bool { return name == "docs/there.md" })...)
}

func TestRulesBite(t *testing.T) {
	const head = "// SPDX-License-Identifier: Apache-2.0\n\n// Package p is here.\npackage p\n\n"
	use := func(pkg, expr string) string {
		return head + "import " + strconv.Quote(pkg) + "\n\nvar _ = " + expr + "\n"
	}
	for _, c := range []struct {
		path, source string
		want         string // in the one finding; "" for none
	}{
		{"inference/x.go", use("errors", "errors.New"), ""},
		{"inference/x.go", use("github.com/oklog/ulid/v2", "ulid.Make"), "imports github.com/oklog/ulid/v2"},
		{"inference/x.go", use(module+"/internal/fleet", "fleet.Pool{}"), "imports " + module + "/internal/fleet"},
		{"internal/gateway/x.go", use(module+"/cmd/headgate", "0"), "imports " + module + "/cmd/headgate"},
		{"internal/attempt/x.go", use(module+"/inference", "inference.Queued"), ""},
		{"internal/attempt/x.go", use(module+"/internal/upstream", "upstream.Stale"), "imports " + module + "/internal/upstream"},
		{"internal/dialect/new/x.go", use("github.com/tidwall/gjson", "gjson.Parse"), "imports github.com/tidwall/gjson"},
		{"internal/prefix/x.go", use("github.com/cespare/xxhash/v2", "xxhash.Sum64"), ""},
		{"internal/prefix/x.go", use("github.com/tidwall/gjson", "gjson.Parse"), "imports github.com/tidwall/gjson"},
		{"internal/schedule/x.go", use("net/http", "http.StatusOK"), "imports net/http"},
		{"internal/route/x.go", use("net/http", "http.Header{}"), ""},
		{"internal/fleet/x.go", use("os/exec", "exec.Command"), "imports os/exec"},
		{"internal/fleet/x.go", use("log/slog", "slog.Info"), "imports log/slog"},
		{"internal/schedule/x.go", use("math/rand", "rand.Intn"), "imports math/rand"},
		{"internal/schedule/x.go", use("math/rand/v2", "rand.New"), ""},
		{"internal/schedule/x.go", use("math/rand/v2", "rand.IntN(2)"), "uses math/rand/v2.IntN"},
		{"internal/schedule/x_test.go", use("math/rand/v2", "rand.IntN(2)"), ""},
		{"internal/route/x.go", use("time", "time.Now()"), "uses time.Now"},
		{"internal/route/x.go", strings.ReplaceAll(use("time", "clock.After"), "import ", "import clock "), "uses time.After"},
		{"internal/simengine/model/x.go", use("time", "time.NewTimer"), "uses time.NewTimer"},
		{"internal/fleet/x.go", use("net", "net.JoinHostPort"), ""},
		{"internal/fleet/x.go", use("net", "net.Dial"), "uses net.Dial"},
		{"internal/schedule/x.go", head + "func f() { go f() }\n", "starts a goroutine"},
		{"internal/gateway/x.go", head + "func f() { go f() }\n", ""},
		{"internal/gateway/x.go", use("github.com/prometheus/client_golang/prometheus", "prometheus.Labels{}"), "imports github.com/prometheus"},
		{"internal/telemetry/x.go", use("github.com/prometheus/client_golang/prometheus", "prometheus.Labels{}"), ""},
		{"internal/gateway/x.go", use("database/sql", "sql.Open"), "imports database/sql"},
		{"internal/gateway/x.go", use("github.com/envoyproxy/go-control-plane/envoy/config/core/v3", "core.Node{}"), "imports github.com/envoyproxy"},
		{"internal/fleet/x_test.go", use("k8s.io/api/core/v1", "v1.Pod{}"), ""},
		{"internal/gateway/x.go", use("k8s.io/api/core/v1", "v1.Pod{}"), "imports k8s.io/api/core/v1"},
		{"internal/upstream/x.go", use(module+"/inference", "inference.Queued"), "imports " + module + "/inference"},
		{"internal/simengine/x_test.go", use(module+"/internal/dialect", "dialect.Span{}"), "imports " + module + "/internal/dialect"},
		{"internal/sim/check/x_test.go", use(module+"/internal/attempt", "attempt.Queued{}"), "imports " + module + "/internal/attempt"},
		{"internal/gateway/x_test.go", use(module+"/test/real", "real.Engine"), "imports " + module + "/test/real"},
		{"internal/gateway/x.go", use("net/http", "http.DefaultClient"), "uses net/http.DefaultClient"},
		{"internal/gateway/x_test.go", use("net/http", "http.DefaultClient"), ""},
		{"internal/gateway/x_test.go", use("time", "time.Sleep"), "uses time.Sleep"},
		{"internal/gateway/x_test.go", head + "import (\n\"testing/synctest\"\n\"time\"\n)\n\nfunc f() { synctest.Test(nil, func() { time.Sleep(1) }) }\n", ""},
		{"internal/gateway/x.go", "// Package p is here.\npackage p\n", "does not begin with // SPDX"},
		{"internal/gateway/x.go", strings.ReplaceAll(head, "Package p", "P"), "no comment that begins with its name"},
		{"cmd/x/x.go", strings.NewReplacer("Package p", "X", "package p", "package main").Replace(head), ""},
		{"internal/util/x.go", strings.NewReplacer("Package p", "Package util", "package p", "package util").Replace(head), "package util"},
		{"internal/gateway/x.go", head + "// TO" + "DO: later\n", "has "},
		{"internal/gateway/x.go", head + "var dir = \"/ro" + "ot/x\"\n", "has "},
		{"internal/gateway/x.go", head + "var host = \"https://py" + "pi.org\"\n", "has "},
		{"internal/gateway/x.go", head + "// See docs/there.md and docs/gone.md.\n", "names docs/gone.md"},
	} {
		f, err := parse(page{c.path, c.source})
		if err != nil {
			t.Fatal(err)
		}
		found := every(f)
		switch {
		case c.want == "" && len(found) > 0:
			t.Errorf("%s: found %v in\n%s", c.path, found, c.source)
		case c.want != "" && (len(found) != 1 || !strings.Contains(found[0].what, c.want)):
			t.Errorf("%s: found %v, want %q in\n%s", c.path, found, c.want, c.source)
		}
	}
}

func TestDeadLinksAreFound(t *testing.T) {
	exists := func(name string) bool { return name == "docs/a.md" || name == "internal/gateway" }
	p := &page{"docs/a.md", strings.Join([]string{
		"[good](a.md#part) [far](https://example.com/x.md) `internal/gateway` `go test ./internal/x` `a.md`",
		"[bad](b.md)",
		"`internal/gone` and `GONE.md`",
		"```",
		"`internal/gone`",
		"```",
	}, "\n")}
	want := "[docs/a.md:2: links to b.md docs/a.md:3: names internal/gone docs/a.md:3: names GONE.md]"
	if got := fmt.Sprint(p.deadLinks(exists)); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
