// SPDX-License-Identifier: Apache-2.0

// Package route decides which pool serves a request, from its host name, path,
// headers and model.
//
// It owns the rules of precedence, the draw by weight, the model names that it
// can suggest, and the form of the patterns. It refuses to look at pools and
// endpoints, which come after it, and does no I/O: randomness is handed in.
// internal/config builds the table; the gateway asks it once per request.
package route

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"math"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/headgate/headgate/inference"
)

// Route is one rule: the requests that it is for, and the pools that they go
// to.
type Route struct {
	Model     string            // exact name, prefix*, or /regex/ for the whole name; "" or "*": any, or none
	Path      string            // prefix in whole segments; "": any
	Hostnames []string          // name or *.suffix; none: any
	Headers   map[string]string // header → the value that it must have
	Backends  []Backend
	Sticky    bool   // a session's requests all go to one backend
	Rewrite   string // the model name for engines; "": the client's
}

// Backend is a pool's share of a route.
type Backend struct {
	Pool    string
	Weight  int    // relative to the route's other weights; 0: nothing
	MaxBody int64  // the pool's own limit on request bodies in bytes; 0: none
	Rewrite string // the model name for engines there; "": the route's

	key string // what a session's draw tells it by
}

// Query is what is known of a request.
type Query struct {
	Host    string      // as in the Host header, with or without port
	Path    string      // decoded and without dot segments: the gateway refuses others
	Header  http.Header // after the gateway dropped what clients may not set
	Model   string      // exactly as in the body; "" when it names none
	Session string      // "" for none

	// For the names that an error suggests, unless it is to be Brief. Listed are
	// further ones, of which Takes tells those that may be asked for here; May says
	// which a client may know. Nil: none, and all.
	Brief  bool
	Listed iter.Seq[string]
	Takes  func(name string) bool
	May    func(name string) bool
}

// Result is where a request goes.
type Result struct {
	Route int    // index of the route
	Pool  string // drawn by weight
	Model string // the name for engines: rewritten, or the client's
	Path  string // the route's path prefix as it was given; "" when it gave none
}

// Table is a compiled list of routes. It is immutable.
type Table struct {
	rules  []rule // in order of precedence, then of the list
	models []string
}

type rule struct {
	Route
	index  int
	prefix string // Path without slashes at its end
	model  Pattern
	drawn  []Backend // those with a weight
}

// New compiles routes. Its error names the route by its index.
func New(routes []Route) (*Table, error) {
	t := &Table{}
	named := map[string]bool{}
	for i, r := range routes {
		compiled, err := compile(i, r)
		if err != nil {
			return nil, fmt.Errorf("route %d: %w", i, err)
		}
		t.rules = append(t.rules, compiled)
		if compiled.model.kind == modelExact && !named[r.Model] {
			named[r.Model] = true
			t.models = append(t.models, r.Model)
		}
	}
	slices.SortStableFunc(t.rules, func(a, b rule) int { return a.model.compare(b.model) })
	return t, nil
}

func compile(index int, r Route) (rule, error) {
	model, err := ParsePattern(r.Model)
	if err != nil {
		return rule{}, err
	}
	if err := CheckPath(r.Path); err != nil {
		return rule{}, err
	}
	hosts := make([]string, len(r.Hostnames))
	for i, h := range r.Hostnames {
		if err := CheckHostname(h); err != nil {
			return rule{}, err
		}
		hosts[i] = strings.ToLower(h)
	}
	r.Hostnames = hosts
	headers := make(map[string]string, len(r.Headers))
	for name, want := range r.Headers {
		headers[http.CanonicalHeaderKey(name)] = want
	}
	r.Headers = headers
	var drawn []Backend
	for _, b := range r.Backends {
		if b.Weight < 0 || b.Weight > WeightMax {
			return rule{}, fmt.Errorf("weight %d is not between 0 and %d", b.Weight, WeightMax)
		}
		if b.Weight > 0 {
			b.key = b.Pool
			if b.Rewrite != "" {
				b.key += "\xff" + b.Rewrite // no name has this byte
			}
			b.Rewrite = cmp.Or(b.Rewrite, r.Rewrite)
			drawn = append(drawn, b)
		}
	}
	if len(drawn) == 0 {
		return rule{}, errors.New("no backend has a weight above 0")
	}
	return rule{Route: r, index: index, prefix: strings.TrimRight(r.Path, "/"), model: model, drawn: drawn}, nil
}

// WeightMax bounds a backend's weight.
const WeightMax = 1_000_000

// Match finds the route of a request and draws one of its backends. intn
// returns a number below its argument, as rand.IntN does; it is called only
// when more than one backend has a weight.
//
// The error is NotFound when nothing is served for this host, path and headers,
// MissingModel when only requests that name a model are, and ModelNotFound when
// the model is not.
func (t *Table) Match(q Query, intn func(int) int) (Result, *inference.Error) {
	host := hostOf(q.Host)
	place := false
	for i := range t.rules {
		r := &t.rules[i]
		if !r.holds(host, q) {
			continue
		}
		place = true
		if !r.model.Holds(q.Model) {
			continue
		}
		b := r.draw(r.drawn, q.Session, intn)
		return Result{Route: r.index, Pool: b.Pool, Model: cmp.Or(b.Rewrite, q.Model), Path: r.Path}, nil
	}
	switch {
	case !place:
		return Result{}, notFound(q.Path)
	case q.Model == "":
		return Result{}, inference.Errorf(inference.MissingModel, "the request names no model, and here only requests that name one are served")
	}
	return Result{}, t.modelNotFound(host, q)
}

// MatchBase finds the route of a request for an adapter, which routes need not
// name: it goes where its base model goes, to one of the pools that serve it. base
// is the engines' name of that model. found is false where there is no such route.
func (t *Table) MatchBase(q Query, base string, serves func(pool string) bool, intn func(int) int) (to Result, found bool) {
	host := hostOf(q.Host)
	for i := range t.rules {
		r := &t.rules[i]
		if !r.holds(host, q) {
			continue
		}
		holds := r.model.Holds(base)
		backends := slices.DeleteFunc(slices.Clone(r.drawn), func(b Backend) bool {
			return b.Rewrite != base && (b.Rewrite != "" || !holds) || !serves(b.Pool)
		})
		if len(backends) > 0 {
			return Result{Route: r.index, Pool: r.draw(backends, q.Session, intn).Pool, Model: q.Model, Path: r.Path}, true
		}
	}
	return Result{}, false
}

// Leads reports whether the route of a request may draw this pool.
func (t *Table) Leads(q Query, pool string) bool {
	host := hostOf(q.Host)
	for i := range t.rules {
		r := &t.rules[i]
		if r.holds(host, q) && r.model.Holds(q.Model) {
			return slices.ContainsFunc(r.Backends, func(b Backend) bool { return b.Pool == pool && b.Weight > 0 })
		}
	}
	return false
}

// LargestBody is the most that the body of a request may have, in bytes, before
// its model is known: the largest limit of the pools that its host, path and
// headers still allow, and never more than the listener's. NotFound when they
// allow none.
func (t *Table) LargestBody(q Query, listener int64) (int64, *inference.Error) {
	host := hostOf(q.Host)
	largest, found := int64(0), false
	for i := range t.rules {
		r := &t.rules[i]
		if !r.holds(host, q) {
			continue
		}
		found = true
		for _, b := range r.Backends {
			switch {
			case b.Weight == 0:
			case b.MaxBody == 0:
				return listener, nil
			default:
				largest = max(largest, b.MaxBody)
			}
		}
	}
	if !found {
		return 0, notFound(q.Path)
	}
	return min(largest, listener), nil
}

// Backends returns the backends of a route by its index, not to be changed.
func (t *Table) Backends(route int) []Backend {
	for i := range t.rules {
		if t.rules[i].index == route {
			return t.rules[i].Backends
		}
	}
	return nil
}

// Models returns the model names that routes give exactly, in their order.
func (t *Table) Models() []string { return slices.Clone(t.models) }

// holds reports whether everything but the model allows the request.
func (r *rule) holds(host string, q Query) bool {
	if len(r.Hostnames) > 0 && !slices.ContainsFunc(r.Hostnames, func(p string) bool { return hostHolds(p, host) }) {
		return false
	}
	if !pathHolds(r.prefix, q.Path) {
		return false
	}
	for name, want := range r.Headers {
		if !slices.Contains(q.Header.Values(name), want) {
			return false
		}
	}
	return true
}

// draw picks one of the backends that have a weight.
func (r *rule) draw(backends []Backend, session string, intn func(int) int) Backend {
	switch {
	case len(backends) == 1:
		return backends[0]
	case r.Sticky && session != "":
		return drawFor(session, backends)
	}
	// At random: a rotation would send every first request of a burst, and of every
	// gateway, to the same pool.
	total := 0
	for _, b := range backends {
		total += b.Weight
	}
	n := intn(total)
	for _, b := range backends {
		if n -= b.Weight; n < 0 {
			return b
		}
	}
	return backends[len(backends)-1]
}

// drawFor draws by weight, for a session always the same, at every gateway
// (weighted rendezvous hashing). Each backend has a number of its own for each
// session and no other's weight is in it, so a changed weight moves only what must
// move.
func drawFor(session string, backends []Backend) (drawn Backend) {
	least := math.Inf(1)
	for i, b := range backends {
		// Exponential with the weight as its rate: the least is drawn by weight.
		if x := -math.Log(unit(session, b.key)) / float64(b.Weight); x < least || i == 0 {
			least, drawn = x, b
		}
	}
	return drawn
}

// unit is a number above 0 and at most 1 for a session and a backend: FNV-1a and a
// mixer, the same on every machine.
func unit(session, backend string) float64 {
	h := uint64(14695981039346656037)
	for _, text := range [2]string{session, backend} {
		for i := range len(text) {
			h = (h ^ uint64(text[i])) * 1099511628211
		}
		h = (h ^ 0xff) * 1099511628211 // no text has it, so no two pairs run together
	}
	h ^= h >> 30
	h *= 0xbf58476d1ce4e5b9
	h ^= h >> 27
	h *= 0x94d049bb133111eb
	h ^= h >> 31
	return (float64(h>>11) + 1) / (1 << 53)
}

func hostOf(hostport string) string {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	return strings.TrimSuffix(strings.ToLower(host), ".")
}

func hostHolds(pattern, host string) bool {
	if suffix, ok := strings.CutPrefix(pattern, "*"); ok {
		return len(host) > len(suffix) && strings.HasSuffix(host, suffix)
	}
	return pattern == host
}

// pathHolds compares whole segments: /v1 holds for /v1 and /v1/x, not for /v12.
func pathHolds(prefix, path string) bool {
	rest, ok := strings.CutPrefix(path, prefix)
	return ok && (prefix == "" || rest == "" || rest[0] == '/')
}

// CheckPath says what is wrong with a path prefix.
func CheckPath(path string) error {
	switch {
	case path == "":
		return nil
	case path[0] != '/':
		return fmt.Errorf("path %s does not begin with /", quote(path, 64))
	case strings.ContainsAny(path, "?#*") || strings.ContainsFunc(path, notPathRune):
		return fmt.Errorf("path %s is not a plain prefix such as /v1/audio", quote(path, 64))
	}
	for s := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if (s == "" && strings.Trim(path, "/") != "") || s == "." || s == ".." {
			return fmt.Errorf("path %s has a segment that no request keeps", quote(path, 64))
		}
	}
	return nil
}

func notPathRune(r rune) bool { return r <= ' ' || r == 0x7f }

var hostname = regexp.MustCompile(`^(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*$`)

// CheckHostname says what is wrong with a host name pattern.
func CheckHostname(name string) error {
	lower := strings.ToLower(name)
	if len(name) <= 253 && hostname.MatchString(lower) || net.ParseIP(name) != nil {
		return nil
	}
	return fmt.Errorf("host name %s is neither a name, without port, nor *. and a name", quote(name, 64))
}
