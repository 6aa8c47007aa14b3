// SPDX-License-Identifier: Apache-2.0

// Package config turns headgate.yaml into values that the rest of the program
// can rely on without checking them again.
//
// It owns the file's shape, its defaults, its limits and the text of every
// complaint about it; docs/config.md is written from the comments in this file.
// It is strict: a field that it does not know, a value outside the allowed set
// or a field that this version does not act on is a problem with its place, and
// all problems are reported at once. It refuses to guess, to start anything or
// to watch anything: whoever reloads calls Load again and keeps the old values
// when that fails. Commands call Load or FromUpstreams; the gateway and the
// control side read the values.
package config

import (
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/engine"
)

// Config is a whole configuration. Every field has a default that works. A key
// without a value keeps its default.
type Config struct {
	// Names this gateway to engines, journals and other gateways.
	Gateway Gateway `yaml:"gateway"`

	// Where clients connect. Default: one listener, main, on 127.0.0.1:8080.
	Listeners []Listener `yaml:"listeners"`

	// Where operators connect: metrics, console and admin API.
	Admin Admin `yaml:"admin"`

	// What is remembered of every request, and where.
	Journal Journal `yaml:"journal"`

	// API keys of clients. Default: none, and every client is the tenant
	// anonymous; with keys, a request without one of them is refused.
	Keys []Key `yaml:"keys"`

	// How long streams may go on after SIGTERM before they are cut; new
	// requests are refused at once. A duration; 0s cuts them at once.
	DrainTimeout Duration `yaml:"drain_timeout"`

	// What tells that requests belong to one session, for routes that are sticky
	// and for the plugin session.
	Session Session `yaml:"session"`

	// Which pool serves which request. Default: with exactly one pool, all
	// requests go to it.
	Routes []Route `yaml:"routes"`

	// Named priorities with their promises, which keys, routes and trusted clients
	// ask for. The key is the objective's name, written like a pool's. A request
	// without one has priority 0.
	Objectives map[string]Objective `yaml:"objectives"`

	// The engines, grouped by what they serve. The key is the pool's name: up
	// to 63 lower-case letters, digits and hyphens.
	Pools map[string]Pool `yaml:"pools"`
}

// Gateway names this gateway.
type Gateway struct {
	// Up to 63 letters, digits, dots, hyphens and underscores, unique among
	// the gateways that share engines. Default: the host name.
	ID string `yaml:"id"`
}

// Listener is one address that clients connect to, over HTTP/1.1 and HTTP/2.
type Listener struct {
	// The word for this listener in logs and metrics; unique.
	Name string `yaml:"name"`

	// host:port, [::1]:8080, or :8080 for every interface. Port 0 takes a free
	// port.
	Address Address `yaml:"address"`

	// The largest request body that is read. A size; at least 1KiB.
	MaxBody Size `yaml:"max_body"`

	// Adds Headgate-Endpoint, Headgate-Attempts, Headgate-Route and
	// Headgate-Queue-Ms to answers. They show addresses of engines: not for
	// clients that you don't trust.
	DebugHeaders bool `yaml:"debug_headers"`

	// Whether clients may set their requests' objective, fairness id and targets
	// by headers. A client that may can put its requests before those of others.
	// auto is true where only this machine can reach the listener. auto, true or
	// false.
	TrustHeaders Trust `yaml:"trust_headers"`

	// Serves TLS. Default: plain HTTP.
	TLS TLS `yaml:"tls"`
}

// TLS names the files of a certificate; both or neither are set.
type TLS struct {
	// PEM file with the certificate and its chain. A relative path starts at
	// the configuration file's folder.
	Cert File `yaml:"cert"`

	// PEM file with the private key.
	Key File `yaml:"key"`
}

// Admin is the operators' listener.
type Admin struct {
	// host:port; "" turns the admin listener off. Other hosts than loopback
	// need a token.
	Address Address `yaml:"address"`

	// Bearer token that operators must present. Default: none, which is
	// accepted on loopback only.
	Token Secret `yaml:"token"`
}

// Journal is the record of every request: what was decided, what the client got
// and how it ended. It holds no prompts and no answers, except answers to
// requests with an Idempotency-Key.
type Journal struct {
	// sqlite keeps the journal in a file; none keeps the latest requests in
	// memory, and Idempotency-Keys are refused. When headgate serves without a
	// configuration file it is none.
	Driver string `yaml:"driver"`

	// The database file of sqlite, made when it is not there; its folder must
	// be. A relative path starts at the configuration file's folder.
	DSN File `yaml:"dsn"`

	// What is on disk before the first byte of an answer is sent: strict, of
	// every request; keyed, of requests with an Idempotency-Key; relaxed, of
	// none. Where it can't be written, requests that need it are refused.
	Durability string `yaml:"durability"`

	// How long requests that have ended are kept. A duration; at least 1m.
	Retention Duration `yaml:"retention"`

	// Requests that carry an Idempotency-Key.
	Idempotency Idempotency `yaml:"idempotency"`
}

// Idempotency is how long repeats of a request with an Idempotency-Key are
// known as such.
type Idempotency struct {
	// From the end of the request. A duration; at least 1s, and no longer than
	// retention.
	TTL Duration `yaml:"ttl"`

	// The largest answer that is kept for repeats. A size, at most 64MiB.
	MaxAnswer Size `yaml:"max_answer"`
}

// KeyTTL is how long an Idempotency-Key is known: the default TTL gives way to
// a shorter retention.
func (j Journal) KeyTTL() time.Duration {
	return time.Duration(min(j.Idempotency.TTL, j.Retention))
}

// Key is one API key. Clients send it as Authorization: Bearer or X-Api-Key; it
// is never sent on to engines.
type Key struct {
	// The word for this key in logs and the journal; unique. Up to 63 letters,
	// digits, dots, hyphens and underscores.
	ID string `yaml:"id"`

	// SHA-256 of the key in 64 hexadecimal digits, as printed by printf %s "$KEY" | sha256sum.
	SecretSHA256 Digest `yaml:"secret_sha256"`

	// Whose requests these are. Tenants see nothing of each other, and several
	// keys may be of one tenant. Written like id. Default: the key's id.
	Tenant string `yaml:"tenant"`

	// The models that requests may name, as clients name them. Patterns as in
	// routes: an exact name, prefix* or /regex/.
	Models []string `yaml:"models"`

	// The objectives that requests may ask for by header, on any listener. The
	// first is that of requests which ask for none and whose route sets none.
	// Default: none, and only a trusted listener's clients may ask.
	Objectives []string `yaml:"objectives"`

	// With whom requests share: those of one priority and one fairness id take
	// turns with those of another. Up to 128 printable characters. Default: the
	// tenant.
	FairnessID string `yaml:"fairness_id"`

	// How much the key may use.
	Limits KeyLimits `yaml:"limits"`
}

// KeyLimits are what one key may use of this gateway. Each holds a minute's worth
// when nothing was asked for, and fills up evenly. A request over them is refused
// with 429 rate_limited. A restart forgets what was used.
type KeyLimits struct {
	// Requests per minute. 0 to 1000000000; 0 is no limit.
	RequestsPerMinute int `yaml:"requests_per_minute"`

	// Tokens per minute, of prompts and answers together. A request is let in by
	// an estimate and charged what its engine reports. 0 to 1000000000; 0 is no
	// limit.
	TokensPerMinute int `yaml:"tokens_per_minute"`
}

// Objective is a named priority with its promises.
type Objective struct {
	// Requests of a higher priority go first. -1000000 to 1000000.
	Priority int `yaml:"priority"`

	// When a request is refused although it could wait.
	ShedAt ShedAt `yaml:"shed_at"`

	// By when the first output should come, in place of the pool's routing.ttft
	// and its ttft_prefill_factor. A duration; 0s is the pool's.
	TTFT Duration `yaml:"ttft"`

	// How many times the time of the prompt's prefill comes on top of ttft, as in a
	// pool's routing. A number from 0 to 100.
	TTFTPrefillFactor float64 `yaml:"ttft_prefill_factor"`

	// How long each token after the first may take on average, in place of the
	// pool's routing.tpot. A duration of at least 5ms; 0s is the pool's.
	TPOT Duration `yaml:"tpot"`
}

// TPOTMin is the least that a token may be meant to take.
const TPOTMin = Duration(5 * time.Millisecond)

// ShedAt says when requests of an objective are refused, to keep what is left
// for others. docs/flow-control.md says how both are measured.
type ShedAt struct {
	// The share of the queue's limits in use. A number from 0 to 1; 0 is never.
	Queue Ratio `yaml:"queue"`

	// The saturation of the pool. A number from 0 to 1; 0 is never.
	Saturation Ratio `yaml:"saturation"`
}

// Session says where a request names its session. The header goes first; names of
// more than 256 bytes are none. Sessions of different tenants are never one.
type Session struct {
	// The request header with the session's name; engines never see X-Session-Id.
	// "" reads none.
	Header string `yaml:"header"`

	// The field of a request's body that is read where the header is not there:
	// session_id, prompt_cache_key or user. "" reads none.
	Field string `yaml:"field"`
}

// Route sends the requests that match to one of its backends. Among the routes
// whose host name, path and headers match, an exact model wins over the longest
// prefix, that over a regular expression, that over no model; then the first in
// the file wins.
type Route struct {
	// What a request must look like. All parts must hold; a part that is left
	// out always holds.
	Match Match `yaml:"match"`

	// Where matching requests go: one backend is drawn at random, by weight,
	// for each request.
	Backends []Backend `yaml:"backends"`

	// True to draw for each session once: all its requests go to one backend, at
	// every gateway, and when weights change only as few sessions move as must.
	// Requests without a session are drawn one by one.
	Sticky bool `yaml:"sticky"`

	// What is changed on the way.
	Rewrite Rewrite `yaml:"rewrite"`

	// The objective of requests that ask for none. Default: the key's.
	Objective string `yaml:"objective"`
}

// Match says which requests a route serves.
type Match struct {
	// The model that the request names: an exact name, prefix*, or /regex/,
	// which must match the whole name. "*" is any model, like leaving it out.
	Model string `yaml:"model"`

	// Path prefix in whole segments: /v1/audio holds for /v1/audio/speech and
	// not for /v1/audiobooks.
	Path string `yaml:"path"`

	// Host names of which one must be the request's; *.example.com holds for
	// every name below example.com. Without port, in any case.
	Hostnames []string `yaml:"hostnames"`

	// Request headers that must be there with exactly this value.
	Headers map[string]string `yaml:"headers"`
}

// Backend is one pool of a route.
type Backend struct {
	// The pool's name.
	Pool string `yaml:"pool"`

	// Its share of the route's requests, relative to the other weights: 0 to
	// 1000000; 0 sends nothing.
	Weight int `yaml:"weight"`

	// What is changed for this backend, in place of the route's rewrite. So one
	// name can be shared among several models or adapters, of one pool too.
	Rewrite Rewrite `yaml:"rewrite"`
}

// Rewrite is what a route changes in a request.
type Rewrite struct {
	// The model name that engines see; answers carry the client's name again.
	// Default: unchanged.
	Model string `yaml:"model"`
}

// Pool is a group of engines that can stand in for each other.
type Pool struct {
	// Where the pool's engines are found.
	Discovery Discovery `yaml:"discovery"`

	// How engines are asked whether they can serve.
	Health Health `yaml:"health"`

	// What the pool's engines are, and so how their metrics are called: vllm,
	// sglang, trtllm (trtllm-serve), triton (with TensorRT-LLM), llamacpp, tgi, sim
	// (headgate's simulated engine), custom (by the names in scrape.metrics), or
	// auto, which finds out for each engine by what it exports.
	Engine string `yaml:"engine"`

	// How engines are asked for their own metrics.
	Scrape Scrape `yaml:"scrape"`

	// How an engine is chosen for a request.
	Routing Routing `yaml:"routing"`

	// How requests wait for an engine, who goes first, and when one is refused.
	Flow Flow `yaml:"flow"`

	// Whether engines have guards, which make it provable that an attempt is over:
	// required, every one has, and is used only through it; auto, those for which
	// a guard is named; off, guards are not asked. See docs/failover.md.
	Guard string `yaml:"guard"`

	// What is agreed on with guards.
	Lease Lease `yaml:"lease"`

	// True when the engines run tools by themselves. Their attempts are never
	// repeated once they may have begun.
	ExecutesTools bool `yaml:"executes_tools"`

	// What engines are sent as Authorization, in place of the client's.
	Credential Credential `yaml:"credential"`

	// Sends the client's own Authorization header on to the engines. Not
	// together with a credential, nor with keys, which are this gateway's own.
	ForwardAuthorization bool `yaml:"forward_authorization"`

	// The model revision that all engines of the pool serve, when they can't
	// tell themselves. Default: unknown.
	ModelRevision string `yaml:"model_revision"`

	// The largest request body for this pool. A size, at most the largest
	// max_body of the listeners. Default: the listener's.
	MaxBody Size `yaml:"max_body"`

	// How much of an answer that is not streamed is held back, so that another
	// engine can stand in when the first one fails. A size; a larger answer is
	// committed and passed on as it comes; 0 holds nothing back.
	CollectMax Size `yaml:"collect_max"`

	// How long one attempt may take.
	Timeouts Timeouts `yaml:"timeouts"`

	// What happens when an engine fails. on_upstream_failure is accepted as
	// another name for this field.
	Failover Failover `yaml:"failover" also:"on_upstream_failure"`
}

// Discovery says where a pool's engines are found. All sources that are given
// count, and an engine that several find is one. An engine that none finds any
// more gets no new requests; those that it has go on. A pool has at most 4096
// engines.
type Discovery struct {
	// A fixed list of engines.
	Static []Endpoint `yaml:"static"`

	// YAML or JSON file with a list like static. It is read again when it
	// changes. While it is missing or wrong, the last good list stays; an
	// empty list ([]) is good. A relative path starts at the configuration
	// file's folder.
	File File `yaml:"file"`

	// A DNS name that stands for the engines.
	DNS DNS `yaml:"dns"`
}

// DNS is a name in DNS that stands for engines, one per address. It is looked
// up at the servers of /etc/resolv.conf; /etc/hosts is not read. When no answer
// comes the last one stays, and only three answers in a row that there is
// nothing leave the name without engines.
type DNS struct {
	// The name. Without a dot at its end the search list of /etc/resolv.conf
	// applies. For srv the whole name, as in _http._tcp.engines.example.com.
	Name string `yaml:"name"`

	// The engines' port: 1 to 65535. Required for a; srv has its own.
	Port int `yaml:"port"`

	// a asks for A and AAAA records; srv for SRV records, and for the addresses
	// of their targets. Priorities and weights don't count.
	Type string `yaml:"type"`

	// http or https. Engines are connected to by address: with https their
	// certificates must name it.
	Scheme string `yaml:"scheme"`

	// Limits on how often the name is looked up.
	Refresh Refresh `yaml:"refresh"`
}

// Refresh bounds the time between two look-ups, which is the TTL of the
// answer.
type Refresh struct {
	// A shorter TTL counts as this. A duration; at least 100ms.
	Min Duration `yaml:"min"`

	// A longer TTL counts as this. A duration; at least min, at most 1h.
	Max Duration `yaml:"max"`
}

// Lease is how long a guard may let an attempt publish without word from this
// gateway, and how the two reach each other.
type Lease struct {
	// How long a lease is. An engine that can't be reached is given up for certain
	// after so long; streams are cut when the control stream is away for as long.
	// A duration from 200ms to 1m, and no longer than the guards' --lease-max.
	TTL Duration `yaml:"ttl"`

	// Between two heartbeats of a guard, with which leases are renewed. A duration
	// of at least 20ms, and at most a third of ttl.
	Heartbeat Duration `yaml:"heartbeat"`

	// File with the token that guards are shown. A relative path starts at the
	// configuration file's folder. Default: none is shown.
	TokenFile File `yaml:"token_file"`

	// TLS of the control streams.
	TLS LeaseTLS `yaml:"tls"`
}

// LeaseTLS names the files for TLS to guards' control ports.
type LeaseTLS struct {
	// PEM file with the CA of the guards' certificates. Default: the streams are
	// not encrypted. A relative path starts at the configuration file's folder.
	CA File `yaml:"ca"`

	// PEM file with the certificate that guards are shown. Default: none.
	Cert File `yaml:"cert"`

	// PEM file with its private key.
	Key File `yaml:"key"`
}

// Scrape is how engines are asked for their own metrics: how many requests wait
// and run there, how full their KV memory is and how much it holds. What the
// gateway counts itself comes first. Metrics show what other gateways send, and
// that an engine was started anew. Those that are missing, make no sense or are
// older than three intervals, and a second at least, are unknown: neither idle
// nor full.
type Scrape struct {
	// Between two questions to one engine. One that fails to answer is asked less
	// often, every 10s at last. A duration of at least 50ms; 0s asks nothing.
	Interval Duration `yaml:"interval"`

	// An answer that takes longer is none. A duration of at least 1ms.
	Timeout Duration `yaml:"timeout"`

	// Where the metrics are. Default: /metrics, and of trtllm-serve
	// /prometheus/metrics.
	Path string `yaml:"path"`

	// The port of the metrics, where it is not that of requests; Triton's is 8002.
	// 1 to 65535. Default: the engine's own.
	Port int `yaml:"port"`

	// Names of metrics that are looked for before those that the engine is known
	// for.
	Metrics Metrics `yaml:"metrics"`
}

// Metrics names an engine's metrics. Each is a name, or a name with labels that
// a series must have, as in queue_size{kind="llm"}.
type Metrics struct {
	// Requests that wait in the engine. Several series are added up.
	Waiting string `yaml:"waiting"`

	// Requests that run there. Several series are added up.
	Running string `yaml:"running"`

	// The share of KV memory in use, 0 to 1. Of several series the largest counts.
	KVUsage string `yaml:"kv_usage"`

	// A counter of tokens or answers. While answers come and it stands still, the
	// metrics are taken to be old; when it falls, the engine was started anew.
	Done string `yaml:"done"`

	// How many tokens a block of KV memory holds. Together with blocks.
	BlockTokens string `yaml:"block_tokens"`

	// How many blocks there are. Together with block_tokens.
	Blocks string `yaml:"blocks"`
}

// Names returns the names in the form that the reader of pages takes.
func (m Metrics) Names() engine.Names { return engine.Names(m) }

// EngineAuto is the engine of a pool whose engines tell what they are.
const EngineAuto = "auto"

// Routing is how an engine is chosen among those that can take a request.
type Routing struct {
	// cost takes the engine where the request costs the pool least time; it goes
	// by what is cached where, by engines' speeds and by the streams that run.
	// weighted adds up scores of load, of the engine's queue and KV memory, of
	// cached prefixes, adapters and sessions.
	// least_load takes the engine with the fewest requests. cost, weighted or
	// least_load.
	Profile string `yaml:"profile"`

	// The plugins that choose, instead of a profile, which is left out then;
	// docs/routing.md lists them. Default: the profile's.
	Plugins []PluginUse `yaml:"plugins"`

	// What chooses where the filters of everything before leave no engine, in this
	// order. Default: none, and such filters are disregarded.
	Fallbacks []Fallback `yaml:"fallbacks"`

	// By when the first output of an answer should come. The choice goes by it, and
	// flow.refuse_at says when a request is refused because of it; nothing that
	// has begun is ended. A duration; 0s is no target.
	TTFT Duration `yaml:"ttft"`

	// How many times the time that an idle engine would take to prefill the whole
	// prompt, as the pool's have shown, comes on top of ttft, so that one target is
	// fair to short and to long prompts. A number from 0 to 100.
	TTFTPrefillFactor float64 `yaml:"ttft_prefill_factor"`

	// How long each token after the first may take on average. With a target, a
	// prompt is kept away from engines where it would hold up streams that could
	// not catch up, and an engine whose streams are too slow for it gets nothing
	// more until they are faster. Too low a target is worse than one too high. A
	// duration of at least 5ms; 0s is no target.
	TPOT Duration `yaml:"tpot"`
}

// Words of a pool's guard.
const (
	GuardRequired = "required"
	GuardAuto     = "auto"
	GuardOff      = "off"
)

// PluginUse is one plugin of a choice.
type PluginUse struct {
	// The plugin's name.
	Plugin string `yaml:"plugin"`

	// What its scores are multiplied by before they are added: above 0. Only for
	// plugins that score.
	Weight float64 `yaml:"weight"`

	// The plugin's own options; its README says which there are. Default: none.
	Options Options `yaml:"options"`
}

// Fallback is another way to choose an engine: by a profile or by plugins.
type Fallback struct {
	// cost, weighted or least_load. Default: none, and plugins are given.
	Profile string `yaml:"profile"`

	// The plugins that choose, instead of a profile.
	Plugins []PluginUse `yaml:"plugins"`
}

// Profiles of Routing.
const (
	ProfileCost      = "cost"
	ProfileWeighted  = "weighted"
	ProfileLeastLoad = "least_load"
)

// Flow is the queue of a pool. A request leaves it when the engine that suits it
// best has little left to prefill, and not before: until then it can be
// overtaken by one of higher priority, and costs nothing when its client leaves.
type Flow struct {
	// How many requests an engine may have at a time. auto sets no number: what
	// an engine can take is told by its prefill (local_queue) and its metrics. A
	// whole number, or auto.
	MaxConcurrency Count `yaml:"max_concurrency"`

	// Bounds on what waits.
	Queue Queue `yaml:"queue"`

	// How much is given to an engine ahead, so that it never runs dry.
	LocalQueue LocalQueue `yaml:"local_queue"`

	// The share of its target for the first output past which a request is
	// refused: at once when it comes, if it is clear by then, and never after an
	// engine has worked for it, nor for its own length alone. Without a target
	// nothing is refused for that. A number from 0 to 1; 0 refuses nobody.
	RefuseAt Ratio `yaml:"refuse_at"`

	// Who goes first among requests of one priority and fairness id: arrival, the
	// one that came first; deadline, the one that has to begin first, by its
	// Headgate-Timeout-Ms or its target. arrival or deadline.
	Order string `yaml:"order"`

	// What is set for single priorities.
	Bands []Band `yaml:"bands"`

	// Whether requests wait while the pool has no engine, and how one is got.
	ScaleFromZero ScaleFromZero `yaml:"scale_from_zero"`
}

// ScaleFromZero lets a pool be without engines while nobody needs them. Engines
// that can't be reached are then not there yet, and one that starts is not there
// before its health check is good. Engines are asked for through one of webhook,
// command and start, or by whoever reads the metrics. Requests that wait count
// for the limits of the queue.
type ScaleFromZero struct {
	// How long a request waits for an engine while the pool has none. A duration
	// of at least 1s; 0s refuses it at once. Default: 5m where webhook, command or
	// start is set, else 0s.
	TTL Duration `yaml:"ttl"`

	// Is told when engines are wanted.
	Webhook Webhook `yaml:"webhook"`

	// A program with its arguments, which is run when engines are wanted: not by a
	// shell, and for at most 30s. Its environment has HEADGATE_EVENT (wake or
	// release), HEADGATE_POOL, HEADGATE_MODEL and HEADGATE_WAITING. Default: none.
	Command []string `yaml:"command"`

	// After so long without requests webhook and command are told that engines can
	// go. A duration of at least 1s; 0s never tells.
	ReleaseAfter Duration `yaml:"release_after"`

	// An engine on this machine that the gateway starts and stops itself.
	Start Start `yaml:"start"`
}

// Webhook is sent a POST with JSON: event (wake or release), pool, model,
// waiting, gateway. A 2xx answer is good. After anything else it is sent again,
// with growing pauses of up to 30s, as long as requests wait.
type Webhook struct {
	// http or https, with path and query.
	URL HookURL `yaml:"url"`

	// How long one exchange may take. A duration from 1ms to 1m.
	Timeout Duration `yaml:"timeout"`

	// File whose content is sent as bearer token. A relative path starts at the
	// configuration file's folder. Default: no Authorization is sent.
	BearerFile File `yaml:"bearer_file"`
}

// Start is an engine that runs only while it is needed. The pool has exactly one
// engine then, in discovery.static.
type Start struct {
	// The program with its arguments, not run by a shell. Its output is the
	// gateway's. On Linux it dies with the gateway. Default: none.
	Command []string `yaml:"command"`

	// After so long without requests it is stopped. A duration of at least 1s; 0s
	// never stops it.
	Idle Duration `yaml:"idle"`

	// How long it may take to end after SIGTERM until it is killed. A duration.
	StopTimeout Duration `yaml:"stop_timeout"`
}

// Queue bounds the requests that wait for a pool's engines.
type Queue struct {
	// How many requests may wait. 1 to 1000000.
	MaxRequests int `yaml:"max_requests"`

	// How large their bodies may be together. A size; at least 1KiB.
	MaxBytes Size `yaml:"max_bytes"`

	// How long a request may wait. A duration of at least 10ms; 0s is no limit.
	TTL Duration `yaml:"ttl"`
}

// LocalQueue is what may wait inside an engine.
type LocalQueue struct {
	// An engine gets no further request while so much prefill waits there. It
	// should be as long as the engine's longest step. A duration of at least
	// 10ms; 0s is no limit, and then requests hardly ever wait here.
	Prefill Duration `yaml:"prefill"`

	// An engine gets no further request while its metrics say that so many wait
	// in it, requests of this gateway among them. 0 to 10000; 0 is no limit.
	Requests int `yaml:"requests"`
}

// Band is what is set for the requests of one priority.
type Band struct {
	// The priority, which an objective has, or 0.
	Priority int `yaml:"priority"`

	// How many of its requests may wait. 0 to 1000000; 0 is no limit but the
	// queue's.
	MaxRequests int `yaml:"max_requests"`

	// How large their bodies may be together. A size; 0 is no limit but the
	// queue's.
	MaxBytes Size `yaml:"max_bytes"`

	// How long one may wait. A duration; 0s is the queue's.
	TTL Duration `yaml:"ttl"`

	// The share of tokens that the band gets while it has requests waiting,
	// however many of higher priority do. A number from 0 to 1; 0 is none, and
	// then it may wait for ever.
	Reserve Ratio `yaml:"reserve"`
}

// Orders of Flow.
const (
	OrderArrival  = "arrival"
	OrderDeadline = "deadline"
)

// Health is how engines are asked whether they can serve, beside what requests
// show by themselves. An engine that is not healthy gets no requests while
// enough others are.
type Health struct {
	// Between two checks of one engine. A duration of at least 100ms; 0s turns
	// checks off.
	Interval Duration `yaml:"interval"`

	// A check that takes longer has failed. A duration.
	Timeout Duration `yaml:"timeout"`

	// What is asked with GET. A 2xx answer is good.
	Path string `yaml:"path"`

	// After a good answer the engine is also made to compute one token, which
	// finds engines that are dead behind a live API.
	Generate bool `yaml:"generate"`

	// Between two such computations. A duration; at least 1s.
	GenerateEvery Duration `yaml:"generate_every"`

	// Failed checks in a row until an engine is unhealthy: 1 to 100.
	UnhealthyAfter int `yaml:"unhealthy_after"`

	// Good checks in a row until it is healthy again: 1 to 100.
	HealthyAfter int `yaml:"healthy_after"`

	// When a smaller share of the pool's engines than this is healthy, health
	// is ignored: it is likelier that the checks are wrong. 0 to 1; 0 never
	// ignores it.
	PanicThreshold Ratio `yaml:"panic_threshold"`
}

// Endpoint is one engine.
type Endpoint struct {
	// http or https, host and port, which is 80 or 443 where it is left out.
	// Without a path: requests keep their own.
	URL URL `yaml:"url"`

	// The model revision that this engine serves. Default: the pool's.
	ModelRevision string `yaml:"model_revision"`

	// The guard beside the engine: host:port of its control port, or auto, which
	// asks at the url, which is the guard's then. Default: there is none, unless
	// the pool's guard is required.
	Guard GuardAddress `yaml:"guard"`

	// Words that routing plugins may go by, as {zone: eu-1}. Names have up to 63
	// letters, digits, dots, slashes, hyphens and underscores, values up to 63
	// characters. Default: none.
	Labels map[string]string `yaml:"labels"`

	// True when the engine is to get no new requests, whatever other sources
	// say; those that it has go on.
	Draining bool `yaml:"draining"`
}

// Credential is what a pool's engines are sent as Authorization.
type Credential struct {
	// File whose content, without white space around it, is sent as bearer
	// token. A relative path starts at the configuration file's folder.
	// Default: no Authorization is sent.
	BearerFile File `yaml:"bearer_file"`
}

// Timeouts are limits on one attempt. All are durations; 0s turns one off.
type Timeouts struct {
	// TCP and TLS set-up.
	Connect Duration `yaml:"connect"`

	// From dispatch to the first output; streamed answers only.
	FirstOutput Duration `yaml:"first_output"`

	// Silence of the engine after the first output; any byte ends it; streamed
	// answers only.
	Idle Duration `yaml:"idle"`

	// Silence after the answer was finished and before its end marker; then
	// the marker is added.
	AfterFinish Duration `yaml:"after_finish"`

	// One attempt from dispatch to end.
	Total Duration `yaml:"total"`
}

// Limits returns the timeouts in the form that the attempt machine reads.
func (t Timeouts) Limits() inference.Timeouts {
	return inference.Timeouts{
		Connect:     time.Duration(t.Connect),
		FirstOutput: time.Duration(t.FirstOutput),
		Idle:        time.Duration(t.Idle),
		AfterFinish: time.Duration(t.AfterFinish),
		Total:       time.Duration(t.Total),
	}
}

// Failover is what happens when an engine fails. Most of it can only be stated,
// not changed: it is here so that the file says what the program does, and a
// value that would break a rule is an error that names the rule.
type Failover struct {
	// Before anything of the answer was sent to the client.
	BeforeFirstDelta BeforeFirstDelta `yaml:"before_first_delta"`

	// After the first byte of the answer was sent to the client.
	AfterFirstDelta AfterFirstDelta `yaml:"after_first_delta"`

	// When the old attempt may be alive.
	UncertainSourceLiveness UncertainSourceLiveness `yaml:"uncertain_source_liveness"`

	// How many retries the pool gets, so that a sick fleet is not drowned by
	// repetitions.
	RetryBudget RetryBudget `yaml:"retry_budget"`

	// How expensive a single retry may be.
	RetryCostLimit RetryCostLimit `yaml:"retry_cost_limit"`

	// Takes a closed connection as proof that an unreachable engine publishes
	// nothing more. Only for pools that serve text; not with executes_tools.
	AllowTransportFence bool `yaml:"allow_transport_fence"`
}

// BeforeFirstDelta is the policy before anything was sent to the client.
type BeforeFirstDelta struct {
	// What must hold before an attempt is repeated: always both
	// source_attempt_fenced and retry_budget_available.
	Require []string `yaml:"require"`

	// Always retry_prefill_on_healthy_replica.
	Action string `yaml:"action"`

	// Attempts per request, the first included: 1 to 10. 1 never repeats.
	MaxAttempts int `yaml:"max_attempts"`
}

// AfterFirstDelta is the policy once the client has part of an answer.
type AfterFirstDelta struct {
	// Always terminate_stream.
	Action string `yaml:"action"`

	// Always upstream_decode_interrupted.
	ClientError string `yaml:"client_error"`

	// Always false.
	AutomaticRetry bool `yaml:"automatic_retry"`
}

// UncertainSourceLiveness is the policy when the old attempt may be alive.
type UncertainSourceLiveness struct {
	// Always fence_source_attempt.
	Action string `yaml:"action"`

	// Always cancel_ack_or_lease_expiry.
	WaitFor string `yaml:"wait_for"`

	// Always retry_only_if_no_delta_was_sent.
	Then string `yaml:"then"`
}

// RetryBudget is a pool's token bucket; a retry takes one token.
type RetryBudget struct {
	// Tokens that each first attempt adds: 0 to 1.
	Ratio Ratio `yaml:"ratio"`

	// Tokens that each second adds, whatever the traffic: 0 to 1000.
	MinPerSecond float64 `yaml:"min_per_second"`
}

// RetryCostLimit bounds one retry. What the prefix cache saves is subtracted
// first.
type RetryCostLimit struct {
	// Prompt tokens to compute again; 0 turns the limit off.
	PromptTokens int `yaml:"prompt_tokens"`

	// Time that the new prefill is estimated to take. A duration; 0s turns the
	// limit off.
	EstimatedPrefill Duration `yaml:"estimated_prefill"`
}
