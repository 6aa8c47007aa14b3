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

	// How long streams may go on after SIGTERM before they are cut; new
	// requests are refused at once. A duration; 0s cuts them at once.
	DrainTimeout Duration `yaml:"drain_timeout"`

	// Which pool serves which request. Default: with exactly one pool, all
	// requests go to it.
	Routes []Route `yaml:"routes"`

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

	// What is changed on the way.
	Rewrite Rewrite `yaml:"rewrite"`
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

	// True when the engines run tools by themselves. Their attempts are never
	// repeated once they may have begun.
	ExecutesTools bool `yaml:"executes_tools"`

	// What engines are sent as Authorization, in place of the client's.
	Credential Credential `yaml:"credential"`

	// Sends the client's own Authorization header on to the engines. Not
	// together with a credential.
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

// Discovery says where a pool's engines are found.
type Discovery struct {
	// A fixed list of engines.
	Static []Endpoint `yaml:"static"`
}

// Endpoint is one engine.
type Endpoint struct {
	// http or https, host and port, without a path: requests keep their own.
	URL URL `yaml:"url"`

	// The model revision that this engine serves. Default: the pool's.
	ModelRevision string `yaml:"model_revision"`
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
