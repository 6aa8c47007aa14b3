// SPDX-License-Identifier: Apache-2.0

// Package admin serves operators: metrics, probes, what the gateway and its
// journal know, and where a request would go.
//
// It owns the paths and the token that guards them, and changes nothing. It is
// never on a listener that clients reach.
package admin

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugin"
)

// Config is what there is to show.
type Config struct {
	Gateway *gateway.Gateway
	Journal *journal.Journal
	Metrics http.Handler
	Token   config.Secret // that operators must present; none: nobody is asked
}

// New makes the server. It does not listen yet.
func New(c Config) *http.Server {
	a := &api{c}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", c.Metrics)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.ready)
	mux.HandleFunc("GET /admin/v1/endpoints", a.endpoints)
	mux.HandleFunc("POST /admin/v1/explain", a.explain)
	mux.HandleFunc("GET /admin/v1/queues", a.queues)
	mux.HandleFunc("GET /admin/v1/requests", a.requests)
	mux.HandleFunc("GET /admin/v1/requests/{id}", a.request)
	mux.HandleFunc("GET /admin/v1/requests/{id}/events", a.events)
	var handler http.Handler = mux
	if !c.Token.IsZero() {
		handler = requireToken(mux, c.Token)
	}
	return &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute}
}

// requireToken compares digests, so that the time taken says nothing about the
// token, its length included.
func requireToken(next http.Handler, token config.Secret) http.Handler {
	want := sha256.Sum256([]byte(token.Reveal()))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		got := sha256.Sum256([]byte(given))
		if !bearer || subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "unauthorized", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

type api struct{ Config }

func (a *api) ready(w http.ResponseWriter, _ *http.Request) {
	if !a.Gateway.Ready() {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintln(w, "not ready")
		return
	}
	fmt.Fprintln(w, "ready")
}

// endpoint is one endpoint as operators see it.
type endpoint struct {
	Pool     string               `json:"pool"`
	Endpoint inference.EndpointID `json:"endpoint"`
	InFlight int                  `json:"in_flight"`
	Ejected  bool                 `json:"ejected"`
	Health   string               `json:"health"`
	Revision string               `json:"model_revision,omitempty"`
	Guard    *guardian            `json:"guard,omitempty"`
	metrics
	Reported *reported `json:"reported"` // null: the engine has told nothing
	Prefix   prefix    `json:"prefix"`
}

// leaving is an endpoint that was removed or drains, until its last request ends.
type leaving struct {
	Pool     string               `json:"pool"`
	Endpoint inference.EndpointID `json:"endpoint"`
	InFlight int                  `json:"in_flight"`
}

// metrics is what an endpoint's engine is, and how asking for its metrics goes.
type metrics struct {
	Engine   string `json:"engine"`
	Failures uint64 `json:"scrape_failures"`
	Error    string `json:"scrape_error,omitempty"` // of the last scrape
}

// guardian is an endpoint's guard as operators see it.
type guardian struct {
	Up          bool    `json:"up"` // heard; if not, the endpoint takes no requests
	Incarnation string  `json:"incarnation"`
	Alone       bool    `json:"alone"` // holds its engine's lock
	Leases      int     `json:"leases"`
	Age         float64 `json:"heartbeat_age_seconds"` // -1: none in this session
	Sessions    uint64  `json:"sessions"`
	LateWrites  int64   `json:"late_writes"`
	Problem     string  `json:"problem,omitempty"`
	Engine      string  `json:"engine_incarnation,omitempty"`
}

func guardOf(pool gateway.PoolStatus, id inference.EndpointID) *guardian {
	s, ok := pool.Guards[id]
	if !ok {
		return nil
	}
	age := -1.0
	if s.Age >= 0 {
		age = s.Age.Seconds()
	}
	return &guardian{
		Up: s.Up, Incarnation: s.Guard, Alone: s.Alone, Leases: s.Leases, Age: age, Sessions: s.Sessions,
		LateWrites: s.LateWrites, Problem: s.Problem, Engine: s.Engine.Incarnation,
	}
}

// prefix compares what was expected in an engine's cache with what it reports.
type prefix struct {
	Requests  int64 `json:"requests"` // of which it reported anything
	Prompt    int64 `json:"prompt_tokens"`
	Predicted int64 `json:"predicted_tokens"`
	Actual    int64 `json:"cached_tokens"`
	Missed    int64 `json:"missed_tokens"` // predicted and not cached
}

// reported is what an engine's own metrics say. What is null is not known.
type reported struct {
	Age     float64  `json:"age_seconds"`
	Waiting *float64 `json:"waiting"`
	Running *float64 `json:"running"`
	KVUsage *float64 `json:"kv_usage"`
	Others  float64  `json:"others"`          // load there of other gateways, as expected now
	Doubt   string   `json:"doubt,omitempty"` // why nothing is believed
}

func newReported(r schedule.Reported) *reported {
	if !r.Known {
		return nil
	}
	return &reported{
		Age: r.Age.Seconds(), Waiting: value(r.Queued), Running: value(r.Running), KVUsage: value(r.KVUsage),
		Others: r.Others, Doubt: r.Doubt,
	}
}

func value(v plugin.Value) *float64 {
	if !v.Known {
		return nil
	}
	return &v.V
}

func (a *api) endpoints(w http.ResponseWriter, _ *http.Request) {
	list, going := []endpoint{}, []leaving{}
	for _, pool := range a.Gateway.Status() {
		for _, l := range pool.Leaving {
			going = append(going, leaving{pool.Pool, l.Endpoint, l.InFlight})
		}
		for _, s := range pool.Endpoints {
			list = append(list, endpoint{
				Pool: pool.Pool, Endpoint: s.Endpoint, InFlight: s.InFlight, Ejected: s.Ejected, Health: s.Health.String(),
				Revision: s.Revision, Guard: guardOf(pool, s.Endpoint),
				metrics: metrics(pool.Metrics[s.Endpoint]), Reported: newReported(s.Reported), Prefix: prefix(s.Hits),
			})
		}
	}
	write(w, map[string]any{"endpoints": list, "leaving": going})
}

func (a *api) requests(w http.ResponseWriter, r *http.Request) {
	filter, err := filterOf(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	page, err := a.Journal.List(r.Context(), filter)
	if err != nil {
		fail(w, err)
		return
	}
	write(w, page)
}

func (a *api) request(w http.ResponseWriter, r *http.Request) {
	record, err := a.Journal.Get(r.Context(), inference.RequestID(r.PathValue("id")))
	if err != nil {
		fail(w, err)
		return
	}
	write(w, record)
}

func (a *api) events(w http.ResponseWriter, r *http.Request) {
	after, err := number(r.URL.Query(), "after")
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	events, err := a.Journal.Events(r.Context(), journal.EventFilter{Request: inference.RequestID(r.PathValue("id")), After: after})
	if err != nil {
		fail(w, err)
		return
	}
	write(w, map[string]any{"events": events})
}

// filterOf reads a filter from a query: since, until (RFC 3339, or a duration
// ago), tenant, pool, model, outcome, unfinished, before, limit. An unknown name
// is an error: a filter that is ignored shows the wrong requests.
func filterOf(q url.Values) (journal.Filter, error) {
	f := journal.Filter{Tenant: q.Get("tenant"), Pool: q.Get("pool"), Model: q.Get("model")}
	for name := range q {
		switch name {
		case "tenant", "pool", "model", "since", "until", "outcome", "unfinished", "before", "limit":
		default:
			return f, fmt.Errorf("unknown parameter %q", name)
		}
	}
	var err error
	if f.Since, err = moment(q, "since"); err != nil {
		return f, err
	}
	if f.Until, err = moment(q, "until"); err != nil {
		return f, err
	}
	if name := q.Get("outcome"); name != "" {
		if f.Outcome = inference.ParseOutcome(name); f.Outcome == inference.NoOutcome {
			return f, fmt.Errorf("outcome: %q is none", name)
		}
	}
	if text := q.Get("unfinished"); text != "" {
		if f.Unfinished, err = strconv.ParseBool(text); err != nil {
			return f, fmt.Errorf("unfinished: %q is neither true nor false", text)
		}
	}
	if f.Before, err = number(q, "before"); err != nil {
		return f, err
	}
	limit, err := number(q, "limit")
	f.Limit = int(min(limit, 1<<20))
	return f, err
}

func number(q url.Values, name string) (int64, error) {
	text := q.Get(name)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%s: %q is not a number", name, text)
	}
	return n, nil
}

func moment(q url.Values, name string) (journal.Time, error) {
	text := q.Get(name)
	if text == "" {
		return 0, nil
	}
	if ago, err := time.ParseDuration(text); err == nil {
		return journal.At(time.Now().Add(-ago)), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return 0, fmt.Errorf("%s: %q is neither a time as 2006-01-02T15:04:05Z nor a duration as 15m", name, text)
	}
	return journal.At(at), nil
}

func fail(w http.ResponseWriter, err error) {
	if errors.Is(err, journal.ErrNotFound) {
		http.Error(w, "no such request", http.StatusNotFound)
		return
	}
	http.Error(w, "journal: "+err.Error(), http.StatusServiceUnavailable)
}

func write(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	// What can't be encoded or sent is the client's loss; the status is out.
	_ = json.NewEncoder(w).Encode(v)
}
