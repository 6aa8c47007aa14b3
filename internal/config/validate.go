// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/auth"
	"github.com/headgate/headgate/internal/engine"
	"github.com/headgate/headgate/internal/route"
)

// The values of failover that can be stated and not changed.
const (
	requireFenced      = "source_attempt_fenced"
	requireBudget      = "retry_budget_available"
	actionRetry        = "retry_prefill_on_healthy_replica"
	actionTerminate    = "terminate_stream"
	actionFence        = "fence_source_attempt"
	waitForAckOrExpiry = "cancel_ack_or_lease_expiry"
	thenIfNoDelta      = "retry_only_if_no_delta_was_sent"
	clientError        = string(inference.DecodeInterrupted)
)

// The rules of failover, as the messages name them.
const (
	ruleOnePublisher = "all bytes of an answer come from one attempt, so that a repetition begins anew on another replica (failover rule I1)"
	ruleNoRepeat     = "after the first delta nothing is ever repeated (failover rule I2)"
	ruleFenced       = "no attempt is repeated before the old one is fenced (failover rule I3)"
	ruleTrueOutcome  = "an interrupted answer is never passed off as a whole one: clients know it by this code (failover rule I4)"
	ruleActionsOnce  = "a closed connection does not stop tools, and no action may be executed twice (failover rule I5)"
	ruleBudget       = "retries stay within the pool's budget and at most 10 attempts (failover rule I7)"
)

// Drivers of the journal.
const (
	DriverSQLite = "sqlite"
	DriverNone   = "none"
)

// Durability of the journal.
const (
	DurabilityStrict  = "strict"
	DurabilityKeyed   = "keyed"
	DurabilityRelaxed = "relaxed"
)

// Fields of a body that may name a session.
const (
	SessionField         = "session_id"
	SessionFieldCacheKey = "prompt_cache_key"
	SessionFieldUser     = "user"
)

// Types of DNS discovery.
const (
	DNSAddresses = "a"
	DNSServices  = "srv"
)

// EndpointsMax bounds the endpoints of one pool, over all its sources.
const EndpointsMax = 4096

const (
	listenersMax = 64
	keysMax      = 10_000
	perMinuteMax = 1_000_000_000
	answerMax    = 64 << 20
	bodyMin      = 1 << 10
	bodyMax      = 4 << 30
	bearerMax    = 64 << 10
	labelMax     = 63
	weightMax    = 1e9
)

var (
	idPattern    = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	namePattern  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	labelPattern = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$`)
	// RFC 9110 §5.6.2, token.
	headerPattern = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")
)

func validID(id string) bool { return idPattern.MatchString(id) }

// Validate returns everything that is wrong with the configuration, without
// places in a file. It reads the files that the configuration names.
func (c *Config) Validate() Problems {
	k := &checker{}
	if !validID(c.Gateway.ID) {
		k.problem("gateway.id", "%s is not 1 to 63 letters, digits, dots, hyphens or underscores", quote(c.Gateway.ID))
	}
	k.atLeast("drain_timeout", c.DrainTimeout)
	k.listeners(c)
	k.admin(c)
	k.journal(c.Journal)
	k.keys(c.Keys)
	k.session(c.Session)
	for _, name := range slices.Sorted(maps.Keys(c.Pools)) {
		k.pool(c, name)
	}
	k.objectives(c)
	k.routes(c)
	return k.problems
}

// A checker collects problems.
type checker struct{ problems Problems }

func (k *checker) problem(path, format string, args ...any) {
	k.problems = append(k.problems, Problem{Path: path, Message: fmt.Sprintf(format, args...)})
}

// only complains about a value that a rule fixes.
func (k *checker) only(path, got, want, rule string) {
	if got != want {
		k.problem(path, "must be %s, not %s: %s", want, quote(got), rule)
	}
}

// oneOf complains about a word that is not in the set.
func (k *checker) oneOf(path, got string, words ...string) bool {
	if slices.Contains(words, got) {
		return true
	}
	last := len(words) - 1
	k.problem(path, "must be %s or %s, not %s", strings.Join(words[:last], ", "), words[last], quote(got))
	return false
}

// within complains about a whole number out of its range.
func (k *checker) within(path string, n, least, most int) {
	if n < least || n > most {
		k.problem(path, "%d is not between %d and %d", n, least, most)
	}
}

// noShorter complains about a duration below its least.
func (k *checker) noShorter(path string, d, least Duration) {
	if d < least {
		k.problem(path, "%s is less than %s", d, least)
	}
}

// atLeast complains about a duration below zero, which no file can hold.
func (k *checker) atLeast(path string, d Duration) {
	if d < 0 {
		k.problem(path, "is negative")
	}
}

func (k *checker) listeners(c *Config) {
	switch n := len(c.Listeners); {
	case n == 0:
		k.problem("listeners", "has no listener: leave it out for one on 127.0.0.1:8080")
	case n > listenersMax:
		k.problem("listeners", "has more than %d listeners", listenersMax)
		return
	}
	for i, l := range c.Listeners {
		path := fmt.Sprintf("listeners[%d]", i)
		switch {
		case l.Name == "":
			k.problem(path, "has no name")
		case !namePattern.MatchString(l.Name):
			k.problem(path+".name", "%s is not 1 to 63 lower-case letters, digits or hyphens", quote(l.Name))
		}
		if l.Address == "" {
			k.problem(path, "has no address")
		}
		k.body(path+".max_body", l.MaxBody)
		k.tls(path+".tls", l.TLS)
		for j, o := range c.Listeners[:i] {
			if l.Name != "" && l.Name == o.Name {
				k.problem(path+".name", "%s is the name of listeners[%d] too", quote(l.Name), j)
			}
			if l.Address.overlaps(o.Address) {
				k.problem(path+".address", "%s is taken by listeners[%d] (%s)", l.Address, j, o.Address)
			}
		}
	}
}

func (k *checker) body(path string, size Size) {
	if size < bodyMin || size > bodyMax {
		k.problem(path, "%s is not between %s and %s", size, Size(bodyMin), Size(bodyMax))
	}
}

func (k *checker) tls(path string, t TLS) {
	switch {
	case t == TLS{}:
	case t.Cert == "":
		k.problem(path, "has a key and no cert")
	case t.Key == "":
		k.problem(path, "has a cert and no key")
	default:
		unread := false
		for _, f := range []struct {
			name string
			file File
		}{{"cert", t.Cert}, {"key", t.Key}} {
			if _, err := readFile(f.file); err != nil {
				k.problem(path+"."+f.name, "%v", err)
				unread = true
			}
		}
		if unread {
			return
		}
		if _, err := tls.LoadX509KeyPair(string(t.Cert), string(t.Key)); err != nil {
			k.problem(path, "cert and key don't make a pair: %v", err)
		}
	}
}

func (k *checker) admin(c *Config) {
	a := c.Admin
	if a.Address == "" {
		return
	}
	if a.Token.IsZero() && !a.Address.Loopback() {
		k.problem("admin.address", "%s can be reached from other machines: set admin.token, or listen on 127.0.0.1", a.Address)
	}
	if !printable(a.Token.Reveal()) {
		k.problem("admin.token", "must be printable ASCII without spaces")
	}
	for i, l := range c.Listeners {
		if a.Address.overlaps(l.Address) {
			k.problem("admin.address", "%s is taken by listeners[%d] (%s)", a.Address, i, l.Address)
		}
	}
}

// badName is what is wrong with the name of a pool or an objective.
const badName = "the name is not 1 to 63 lower-case letters, digits or hyphens"

// PoolPath is the path of a pool in problems.
func PoolPath(name string) string { return field{}.child("pools", "pools").key(name).path }

func (k *checker) pool(c *Config, name string) {
	p, path := c.Pools[name], PoolPath(name)
	if !namePattern.MatchString(name) {
		k.problem(path, badName)
	}
	k.discovery(path+".discovery", p.Discovery)
	k.health(path+".health", p.Health)
	k.scrape(path, p)
	k.routing(path+".routing", p.Routing)
	k.oneOf(path+".guard", p.Guard, GuardRequired, GuardAuto, GuardOff)
	k.lease(path+".lease", p.Lease)
	k.flow(c, path+".flow", p.Flow)
	k.scale(path+".flow.scale_from_zero", p)
	if p.Credential.BearerFile != "" {
		if _, err := p.Credential.Bearer(); err != nil {
			k.problem(path+".credential.bearer_file", "%v", err)
		}
		if p.ForwardAuthorization {
			k.problem(path+".forward_authorization", "the pool has a credential, which takes the place of the client's")
		}
	}
	if p.ForwardAuthorization && len(c.Keys) > 0 {
		k.problem(path+".forward_authorization", "clients send this gateway's keys as Authorization, which are not for engines")
	}
	if p.MaxBody != 0 {
		k.poolBody(c, path+".max_body", p.MaxBody)
	}
	if p.CollectMax < 0 || p.CollectMax > bodyMax {
		k.problem(path+".collect_max", "%s is not between 0 and %s", p.CollectMax, Size(bodyMax))
	}
	if p.ExecutesTools && p.CollectMax < toolsCollectMin {
		k.problem(path+".collect_max", "%s is below %s with executes_tools: there an answer is never begun before it is whole, because clients send again what was cut", p.CollectMax, toolsCollectMin)
	}
	k.timeouts(path+".timeouts", p.Timeouts)
	k.failover(path+".failover", p)
}

// leaseMax is what guards honour unless they are told otherwise.
const leaseMax = Duration(time.Minute)

func (k *checker) lease(path string, l Lease) {
	k.noShorter(path+".ttl", l.TTL, Duration(200*time.Millisecond))
	k.noShorter(path+".heartbeat", l.Heartbeat, Duration(20*time.Millisecond))
	switch {
	case l.TTL > leaseMax:
		k.problem(path+".ttl", "%s is more than %s", l.TTL, leaseMax)
	case l.Heartbeat > l.TTL/3:
		k.problem(path+".heartbeat", "%s is more than a third of ttl (%s): one that is lost would end leases", l.Heartbeat, l.TTL)
	}
	if _, err := l.Token(); err != nil {
		k.problem(path+".token_file", "%v", err)
	}
	if l.TLS.CA == "" && l.TLS.Cert != "" {
		k.problem(path+".tls", "has a cert and no ca: without it nothing is encrypted")
	} else if _, err := l.TLS.Config(); err != nil {
		k.problem(path+".tls", "%v", err)
	}
}

// Token reads the token's file. It returns an empty Secret where there is none.
func (l Lease) Token() (Secret, error) { return readToken(l.TokenFile) }

// Config reads the files. It returns nil where there are none.
func (t LeaseTLS) Config() (*tls.Config, error) {
	switch {
	case (t.Cert == "") != (t.Key == ""):
		return nil, errors.New("cert and key belong together")
	case t.CA == "":
		return nil, nil
	}
	pem, err := readFile(t.CA)
	if err != nil {
		return nil, err
	}
	c := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if !c.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s has no certificate", t.CA)
	}
	if t.Cert == "" {
		return c, nil
	}
	for _, f := range []File{t.Cert, t.Key} {
		if _, err := readFile(f); err != nil {
			return nil, err
		}
	}
	pair, err := tls.LoadX509KeyPair(string(t.Cert), string(t.Key))
	if err != nil {
		return nil, fmt.Errorf("cert and key don't make a pair: %w", err)
	}
	c.Certificates = []tls.Certificate{pair}
	return c, nil
}

func (k *checker) poolBody(c *Config, path string, size Size) {
	k.body(path, size)
	var largest Size
	for _, l := range c.Listeners {
		largest = max(largest, l.MaxBody)
	}
	if size > largest && largest > 0 {
		k.problem(path, "%s is more than any listener reads (%s): raise listeners[].max_body", size, largest)
	}
}

func (k *checker) discovery(path string, d Discovery) {
	var def Pool
	def.setDefaults()
	named := d.DNS != def.Discovery.DNS && d.DNS != DNS{}
	if len(d.Static) == 0 && d.File == "" && !named {
		k.problem(path, "names no engine: list them under static, as in static: [{url: \"http://127.0.0.1:8000\"}]")
	}
	k.endpoints(path+".static", "static", d.Static)
	if named {
		k.dns(path+".dns", d.DNS)
	}
}

// endpoints checks a list that messages call name.
func (k *checker) endpoints(path, name string, list []Endpoint) {
	if len(list) > EndpointsMax {
		k.problem(path, "has more than %d engines", EndpointsMax)
		return
	}
	first := map[URL]int{}
	for i, e := range list {
		at := fmt.Sprintf("%s[%d]", path, i)
		k.labels(at+".labels", e.Labels)
		if e.URL == "" {
			k.problem(at, "has no url")
			continue
		}
		if j, twice := first[e.URL]; twice {
			k.problem(at+".url", "%s is %s[%d] too", e.URL, name, j)
			continue
		}
		first[e.URL] = i
	}
}

func (k *checker) dns(path string, d DNS) {
	_, numeric := netip.ParseAddr(d.Name)
	switch {
	case d.Name == "":
		k.problem(path, "has no name")
	case numeric == nil:
		k.problem(path+".name", "%s is an address: list it under static", quote(d.Name))
	case !validName(d.Name):
		k.problem(path+".name", "%s is not a name that DNS can hold", quote(d.Name))
	}
	k.oneOf(path+".scheme", d.Scheme, "http", "https")
	if k.oneOf(path+".type", d.Type, DNSAddresses, DNSServices) {
		switch {
		case d.Type == DNSServices && d.Port != 0:
			k.problem(path+".port", "SRV records have their own ports: leave it out")
		case d.Type == DNSAddresses && d.Port == 0:
			k.problem(path, "has no port")
		case d.Type == DNSAddresses:
			k.within(path+".port", d.Port, 1, 65535)
		}
	}
	k.noShorter(path+".refresh.min", d.Refresh.Min, Duration(100*time.Millisecond))
	switch {
	case d.Refresh.Max < d.Refresh.Min:
		k.problem(path+".refresh.max", "%s is less than min (%s)", d.Refresh.Max, d.Refresh.Min)
	case d.Refresh.Max > Duration(time.Hour):
		k.problem(path+".refresh.max", "%s is more than 1h", d.Refresh.Max)
	}
}

// validName reports whether s is a host name, with or without a dot at its end.
func validName(s string) bool {
	s = strings.TrimSuffix(s, ".")
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || strings.ContainsFunc(strings.ToLower(label), notHostRune) {
			return false
		}
	}
	return len(s) <= 253
}

func (k *checker) health(path string, h Health) {
	if h.Interval != 0 {
		k.noShorter(path+".interval", h.Interval, Duration(100*time.Millisecond))
	}
	k.noShorter(path+".timeout", h.Timeout, Duration(time.Millisecond))
	if err := route.CheckPath(h.Path); err != nil {
		k.problem(path+".path", "%v", err)
	} else if h.Path == "" {
		k.problem(path+".path", "is empty: to turn checks off set interval to 0s")
	}
	if h.Generate && h.Interval == 0 {
		k.problem(path+".generate", "interval is 0s: without checks nothing is computed")
	}
	k.noShorter(path+".generate_every", h.GenerateEvery, Duration(time.Second))
	k.within(path+".unhealthy_after", h.UnhealthyAfter, 1, 100)
	k.within(path+".healthy_after", h.HealthyAfter, 1, 100)
	if r := float64(h.PanicThreshold); !(r >= 0 && r <= 1) {
		k.problem(path+".panic_threshold", "%v is not between 0 and 1", r)
	}
}

func (k *checker) scrape(path string, p Pool) {
	kinds := []string{EngineAuto}
	for kind := engine.VLLM; kind <= engine.Custom; kind++ {
		kinds = append(kinds, kind.String())
	}
	known := k.oneOf(path+".engine", p.Engine, kinds...)
	s, at := p.Scrape, path+".scrape"
	k.noShorter(at+".timeout", s.Timeout, Duration(time.Millisecond))
	if s.Interval != 0 {
		k.noShorter(at+".interval", s.Interval, Duration(50*time.Millisecond))
	}
	if err := route.CheckPath(s.Path); err != nil {
		k.problem(at+".path", "%v", err)
	}
	if s.Port != 0 {
		k.within(at+".port", s.Port, 1, 65535)
	}
	for _, f := range []struct {
		field string
		set   bool
	}{{".engine", known && p.Engine != EngineAuto}, {".scrape.path", s.Path != ""}, {".scrape.port", s.Port != 0}, {".scrape.metrics", s.Metrics != Metrics{}}} {
		if f.set && s.Interval == 0 {
			k.problem(path+f.field, "has no effect: scrape.interval is 0s, so engines are asked nothing")
		}
	}
	m := s.Metrics
	if p.Engine == engine.Custom.String() && m.Waiting == "" && m.Running == "" && m.KVUsage == "" {
		k.problem(path+".engine", "custom needs the name of at least one of waiting, running and kv_usage in scrape.metrics")
	}
	if err := m.Names().Check(); err != nil {
		k.problem(at+".metrics", "%v", err)
	}
}

// doubleChoice is what is wrong with a profile beside plugins.
const doubleChoice = "plugins are given, and they choose: leave one of the two out"

func (k *checker) routing(path string, r Routing) {
	k.oneOf(path+".profile", r.Profile, ProfileCost, ProfileWeighted, ProfileLeastLoad)
	// A profile that is the default and given all the same is found by who reads
	// the file.
	if len(r.Plugins) > 0 && r.Profile != ProfileCost {
		k.problem(path+".profile", doubleChoice)
	}
	k.plugins(path+".plugins", r.Plugins)
	for i, f := range r.Fallbacks {
		at := fmt.Sprintf("%s.fallbacks[%d]", path, i)
		switch {
		case f.Profile == "" && len(f.Plugins) == 0:
			k.problem(at, "has neither a profile nor plugins")
		case f.Profile != "" && len(f.Plugins) > 0:
			k.problem(at+".profile", doubleChoice)
		case f.Profile != "":
			k.oneOf(at+".profile", f.Profile, ProfileCost, ProfileWeighted, ProfileLeastLoad)
		}
		k.plugins(at+".plugins", f.Plugins)
	}
	k.targets(path, r.TTFT, r.TTFTPrefillFactor, r.TPOT)
}

// plugins checks what can be said without knowing the plugins; a Check knows them.
func (k *checker) plugins(path string, uses []PluginUse) {
	for i, u := range uses {
		at := fmt.Sprintf("%s[%d]", path, i)
		if u.Plugin == "" {
			k.problem(at, "has no plugin")
		}
		if !(u.Weight > 0 && u.Weight <= weightMax) {
			k.problem(at+".weight", "%v is not above 0 and at most %v", u.Weight, weightMax)
		}
	}
}

func (k *checker) labels(path string, labels map[string]string) {
	for name, value := range labels {
		at := field{path: path}.key(name).path
		if !labelPattern.MatchString(name) {
			k.problem(at, "%s is not 1 to 63 letters, digits, dots, slashes, hyphens or underscores", quote(name))
		}
		if !cleanText(value) || len(value) > labelMax {
			k.problem(at, "the value has control characters or more than %d bytes", labelMax)
		}
	}
}

func (k *checker) journal(j Journal) {
	switch j.Driver {
	case "postgres":
		k.problem("journal.driver", "postgres is not supported by this version of headgate: use sqlite or none")
	case DriverSQLite:
		k.database("journal.dsn", j.DSN)
	default:
		k.oneOf("journal.driver", j.Driver, DriverSQLite, DriverNone)
	}
	if k.oneOf("journal.durability", j.Durability, DurabilityStrict, DurabilityKeyed, DurabilityRelaxed) &&
		j.Durability == DurabilityStrict && j.Driver == DriverNone {
		k.problem("journal.durability", "strict needs a journal on disk: driver is none")
	}
	k.noShorter("journal.retention", j.Retention, Duration(time.Minute))
	ttl := j.Idempotency.TTL
	k.noShorter("journal.idempotency.ttl", ttl, Duration(time.Second))
	// The default may outlive a short retention: KeyTTL cuts it.
	if ttl > j.Retention && ttl != Default().Journal.Idempotency.TTL {
		k.problem("journal.idempotency.ttl", "%s is longer than retention (%s)", ttl, j.Retention)
	}
	if n := j.Idempotency.MaxAnswer; n < 0 || n > answerMax {
		k.problem("journal.idempotency.max_answer", "%s is not between 0 and %s", n, Size(answerMax))
	}
}

// database checks that an SQLite file can be where the configuration has it.
func (k *checker) database(path string, name File) {
	base := filepath.Base(string(name))
	switch {
	case name == "":
		k.problem(path, "is empty: to keep nothing on disk set driver to none")
		return
	case base == ":memory:" || strings.HasPrefix(base, "file:"):
		k.problem(path, "must be the name of a file, not %s: to keep nothing on disk set driver to none", quote(base))
		return
	case strings.ContainsAny(string(name), "?#%") || !cleanText(string(name)):
		k.problem(path, "%s has one of ?, # and %%, which mean something else to SQLite", quote(string(name)))
		return
	}
	if info, err := os.Stat(filepath.Dir(string(name))); err != nil {
		k.problem(path, "%v", err)
	} else if !info.IsDir() {
		k.problem(path, "%s is not a folder", filepath.Dir(string(name)))
	} else if info, err := os.Stat(string(name)); err == nil && !info.Mode().IsRegular() {
		k.problem(path, "%s is not a regular file", name)
	}
}

func (k *checker) keys(keys []Key) {
	if len(keys) > keysMax {
		k.problem("keys", "has more than %d keys", keysMax)
		return
	}
	ids, digests := map[string]int{}, map[Digest]int{}
	for i, key := range keys {
		path := fmt.Sprintf("keys[%d]", i)
		switch j, twice := ids[key.ID]; {
		case key.ID == "":
			k.problem(path, "has no id")
		case twice:
			k.problem(path+".id", "%s is the id of keys[%d] too", quote(key.ID), j)
		default:
			k.tenant(path+".id", key.ID)
			ids[key.ID] = i
		}
		switch j, twice := digests[key.SecretSHA256]; {
		case key.SecretSHA256.IsZero():
			k.problem(path, "has no secret_sha256")
		case key.SecretSHA256 == NewDigest(""):
			k.problem(path+".secret_sha256", "is the SHA-256 of nothing")
		case twice:
			k.problem(path+".secret_sha256", "is that of keys[%d] too", j)
		default:
			digests[key.SecretSHA256] = i
		}
		if key.Tenant != "" {
			k.tenant(path+".tenant", key.Tenant)
		}
		k.models(path, key.Models)
		k.within(path+".limits.requests_per_minute", key.Limits.RequestsPerMinute, 0, perMinuteMax)
		k.within(path+".limits.tokens_per_minute", key.Limits.TokensPerMinute, 0, perMinuteMax)
	}
}

// tenant checks the name of a tenant, or of a key, which may be one.
func (k *checker) tenant(path, name string) {
	switch {
	case !validID(name):
		k.problem(path, "%s is not 1 to 63 letters, digits, dots, hyphens or underscores", quote(name))
	case name == auth.Anonymous:
		k.problem(path, "%s is the tenant of everyone where there are no keys", name)
	}
}

func (k *checker) models(path string, models []string) {
	if len(models) == 0 {
		k.problem(path+".models", "is empty: leave it out to allow all models")
	}
	for i, m := range models {
		at := fmt.Sprintf("%s.models[%d]", path, i)
		switch err := route.CheckModel(m); {
		case m == "":
			k.problem(at, "is empty: * allows all models")
		case err != nil:
			k.problem(at, "%v", err)
		case !cleanText(m):
			k.problem(at, "has control characters")
		}
	}
}

func (k *checker) timeouts(path string, t Timeouts) {
	var def Pool
	def.setDefaults()
	for _, l := range []struct {
		name   string
		d, def Duration
	}{
		{"connect", t.Connect, def.Timeouts.Connect},
		{"first_output", t.FirstOutput, def.Timeouts.FirstOutput},
		{"idle", t.Idle, def.Timeouts.Idle},
		{"after_finish", t.AfterFinish, def.Timeouts.AfterFinish},
		{"total", t.Total, def.Timeouts.Total},
	} {
		k.atLeast(path+"."+l.name, l.d)
		// A default may be out of reach: lowering total alone is fine.
		if t.Total > 0 && l.d > t.Total && l.d != l.def {
			k.problem(path+"."+l.name, "%s would never be reached: the attempt ends after total (%s)", l.d, t.Total)
		}
	}
}

func (k *checker) failover(path string, p Pool) {
	f := p.Failover
	before := path + ".before_first_delta"
	for i, r := range f.BeforeFirstDelta.Require {
		at := fmt.Sprintf("%s.require[%d]", before, i)
		switch {
		case r != requireFenced && r != requireBudget:
			k.problem(at, "must be %s or %s, not %s: nothing else is checked before a retry (failover rules I3 and I7)", requireFenced, requireBudget, quote(r))
		case slices.Contains(f.BeforeFirstDelta.Require[:i], r):
			k.problem(at, "%s is listed twice", r)
		}
	}
	if !slices.Contains(f.BeforeFirstDelta.Require, requireFenced) {
		k.problem(before+".require", "must list %s: %s", requireFenced, ruleFenced)
	}
	if !slices.Contains(f.BeforeFirstDelta.Require, requireBudget) {
		k.problem(before+".require", "must list %s: %s", requireBudget, ruleBudget)
	}
	k.only(before+".action", f.BeforeFirstDelta.Action, actionRetry, ruleOnePublisher+"; for no retry set max_attempts: 1")
	if n := f.BeforeFirstDelta.MaxAttempts; n < 1 || n > 10 {
		k.problem(before+".max_attempts", "%d is not between 1 and 10: %s", n, ruleBudget)
	}
	after := path + ".after_first_delta"
	k.only(after+".action", f.AfterFirstDelta.Action, actionTerminate, ruleNoRepeat)
	k.only(after+".client_error", f.AfterFirstDelta.ClientError, clientError, ruleTrueOutcome)
	if f.AfterFirstDelta.AutomaticRetry {
		k.problem(after+".automatic_retry", "must be false: %s", ruleNoRepeat)
	}
	uncertain := path + ".uncertain_source_liveness"
	k.only(uncertain+".action", f.UncertainSourceLiveness.Action, actionFence, ruleFenced)
	k.only(uncertain+".wait_for", f.UncertainSourceLiveness.WaitFor, waitForAckOrExpiry, ruleFenced)
	k.only(uncertain+".then", f.UncertainSourceLiveness.Then, thenIfNoDelta, ruleNoRepeat)
	k.budget(path, f)
	if f.AllowTransportFence && p.ExecutesTools {
		k.problem(path+".allow_transport_fence", "must be false with executes_tools: %s", ruleActionsOnce)
	}
}

// toolsCollectMin is the least that a pool must hold back whose engines run
// tools: a larger answer fails there.
const toolsCollectMin Size = 64 << 10

func (k *checker) budget(path string, f Failover) {
	if r := float64(f.RetryBudget.Ratio); !(r >= 0 && r <= 1) {
		k.problem(path+".retry_budget.ratio", "%v is not between 0 and 1: %s", r, ruleBudget)
	}
	if n := f.RetryBudget.MinPerSecond; !(n >= 0 && n <= 1000) {
		k.problem(path+".retry_budget.min_per_second", "%v is not between 0 and 1000: %s", n, ruleBudget)
	}
	if n := f.RetryCostLimit.PromptTokens; n < 0 || n > math.MaxInt32 {
		k.problem(path+".retry_cost_limit.prompt_tokens", "%d is not between 0 and %d", n, math.MaxInt32)
	}
	k.atLeast(path+".retry_cost_limit.estimated_prefill", f.RetryCostLimit.EstimatedPrefill)
}

func (k *checker) routes(c *Config) {
	if len(c.Routes) == 0 && len(c.Pools) > 1 {
		k.problem("pools", "there are %d pools and no routes: nothing says which requests go to which", len(c.Pools))
	}
	pools := slices.Sorted(maps.Keys(c.Pools))
	first := map[string]int{} // by match: the first route that has it
	for i, r := range c.Routes {
		path := fmt.Sprintf("routes[%d]", i)
		before := len(k.problems)
		k.match(path+".match", r.Match)
		if same := r.Match.canonical(); len(k.problems) == before && len(r.Backends) > 0 {
			if j, twice := first[same]; twice {
				k.problem(path+".match", "matches what routes[%d] matches, which comes first: this route is never used", j)
			} else {
				first[same] = i
			}
		}
		k.backends(path, r.Backends, pools)
		k.sticky(c, path+".sticky", r)
		k.rewrite(path+".rewrite", r.Rewrite)
	}
}

func (k *checker) rewrite(path string, r Rewrite) {
	switch {
	case !cleanText(r.Model):
		k.problem(path+".model", "has control characters")
	case strings.Contains(r.Model, "*"):
		k.problem(path+".model", "%s has a *: engines get this name as it is, and it stands for no other", quote(r.Model))
	}
}

// canonical is one text for all ways to write the same match.
func (m Match) canonical() string {
	if m.Model == "*" {
		m.Model = ""
	}
	var hosts []string
	for _, h := range m.Hostnames {
		hosts = append(hosts, strings.ToLower(h))
	}
	slices.Sort(hosts)
	headers := map[string]string{} // printed in the order of their names
	for name, value := range m.Headers {
		headers[strings.ToLower(name)] = value
	}
	return fmt.Sprintf("%q %q %q %q", m.Model, strings.TrimRight(m.Path, "/"), slices.Compact(hosts), headers)
}

func (k *checker) session(s Session) {
	if s.Header != "" && !headerPattern.MatchString(s.Header) {
		k.problem("session.header", "%s is not a header name", quote(s.Header))
	}
	if s.Field != "" {
		k.oneOf("session.field", s.Field, SessionField, SessionFieldCacheKey, SessionFieldUser)
	}
}

func (k *checker) sticky(c *Config, path string, r Route) {
	if r.Sticky && c.Session == (Session{}) {
		k.problem(path, "no request has a session: neither session.header nor session.field is set")
	}
}

func (k *checker) match(path string, m Match) {
	if err := route.CheckModel(m.Model); err != nil {
		k.problem(path+".model", "%v", err)
	} else if !cleanText(m.Model) {
		k.problem(path+".model", "has control characters")
	}
	if err := route.CheckPath(m.Path); err != nil {
		k.problem(path+".path", "%v", err)
	}
	for i, h := range m.Hostnames {
		if err := route.CheckHostname(h); err != nil {
			k.problem(fmt.Sprintf("%s.hostnames[%d]", path, i), "%v", err)
		}
	}
	seen := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(m.Headers)) {
		at := field{path: path + ".headers"}.key(name).path
		lower := strings.ToLower(name)
		switch {
		case !headerPattern.MatchString(name):
			k.problem(at, "%s is not a header name", quote(name))
		case lower == "host":
			k.problem(at, "a host is matched by hostnames")
		case seen[lower]:
			k.problem(at, "is given twice: letter case does not count")
		case m.Headers[name] == "":
			k.problem(at, "has no value")
		case !cleanText(m.Headers[name]) || strings.TrimSpace(m.Headers[name]) != m.Headers[name]:
			k.problem(at, "has a value that no header can have")
		}
		seen[lower] = true
	}
}

func (k *checker) backends(path string, backends []Backend, pools []string) {
	if len(backends) == 0 {
		k.problem(path, "has no backends: name at least one pool")
		return
	}
	total := 0
	type target struct{ pool, model string }
	seen := map[target]bool{}
	for i, b := range backends {
		at := fmt.Sprintf("%s.backends[%d]", path, i)
		_, known := slices.BinarySearch(pools, b.Pool)
		switch {
		case b.Pool == "":
			k.problem(at, "has no pool")
		case !known:
			k.problem(at+".pool", "there is no pool %s%s", quote(b.Pool), nearPool(b.Pool, pools))
		case seen[target{b.Pool, b.Rewrite.Model}]:
			k.problem(at+".pool", "%s is in this route twice, with the same rewrite", b.Pool)
		}
		seen[target{b.Pool, b.Rewrite.Model}] = true
		k.rewrite(at+".rewrite", b.Rewrite)
		if b.Weight < 0 || b.Weight > route.WeightMax {
			k.problem(at+".weight", "%d is not between 0 and %d", b.Weight, route.WeightMax)
			total++
			continue
		}
		total += b.Weight
	}
	if total == 0 {
		k.problem(path+".backends", "all weights are 0: the route would serve nothing")
	}
}

// nearPool suggests a pool. A file may name so many that only the first are
// compared.
func nearPool(name string, pools []string) string {
	if s := suggestion(name, pools[:min(len(pools), 64)]); strings.HasPrefix(s, ": did you mean") {
		return s
	}
	return ""
}

// Bearer reads the credential's file. It returns an empty Secret where there is
// none.
func (c Credential) Bearer() (Secret, error) { return readToken(c.BearerFile) }

func readToken(name File) (Secret, error) {
	if name == "" {
		return Secret{}, nil
	}
	data, err := readFile(name)
	if err != nil {
		return Secret{}, err
	}
	token := string(bytes.TrimSpace(data))
	switch {
	case token == "":
		return Secret{}, fmt.Errorf("%s is empty", name)
	case !printable(token):
		return Secret{}, fmt.Errorf("%s must hold one token of printable ASCII without spaces", name)
	}
	return NewSecret(token), nil
}

// readFile reads a small file of credentials.
func readFile(name File) ([]byte, error) {
	info, err := os.Stat(string(name))
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		// Opening a pipe would wait for its writer.
		return nil, fmt.Errorf("%s is not a regular file", name)
	}
	f, err := os.Open(string(name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, bearerMax+1))
	if err == nil && len(data) > bearerMax {
		err = errors.New(string(name) + " is larger than " + Size(bearerMax).String())
	}
	return data, err
}

// printable reports whether s can stand in a header as one word.
func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

func cleanText(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f })
}
