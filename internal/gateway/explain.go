// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/http"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/auth"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/route"
	"github.com/headgate/headgate/internal/schedule"
)

// Question is a request of which somebody asks where it would go.
type Question struct {
	Path   string
	Host   string
	Header http.Header // with canonical names
	Body   []byte
}

// Explained is where a request would go now, and why. It holds nothing of the
// prompt but its size, and of headers no more than the targets that they set.
type Explained struct {
	Model    string       `json:"model"`             // as the client names it
	Target   string       `json:"target_model"`      // as engines know it
	Adapter  string       `json:"adapter,omitempty"` // that the target is
	Route    *int         `json:"route,omitempty"`   // index in the configuration; nil: none matches
	Backends []PoolWeight `json:"backends"`          // of the route
	Pool     string       `json:"pool,omitempty"`    // drawn of them
	Profile  string       `json:"profile,omitempty"` // of the pool
	Prompt   PromptSize   `json:"prompt"`

	Objective string       `json:"objective,omitempty"` // whose priority and targets are the request's
	Priority  int          `json:"priority"`
	Queued    *QueueLength `json:"queued,omitempty"` // those that wait now; the decision is as if nobody did

	Decision *PoolDecision `json:"decision,omitempty"` // nil: no pool was found
	Error    *Refusal      `json:"error,omitempty"`    // with which the request would be refused
}

// PoolWeight is one backend of a route.
type PoolWeight struct {
	Pool   string `json:"pool"`
	Weight int    `json:"weight"`
	Model  string `json:"model,omitempty"` // to engines, where it is the backend's own
}

// PromptSize is what routing knows of a prompt.
type PromptSize struct {
	Tokens int    `json:"tokens"`
	Source string `json:"source"` // estimated, counted or reported
	Blocks int    `json:"blocks"` // that the prefix index can look up
}

// QueueLength is how many requests wait in a pool's queue.
type QueueLength struct {
	Requests int `json:"requests"`
	Before   int `json:"before"` // of them, with the request's own priority or a higher one
}

// PoolDecision is a schedule.Decision as JSON.
type PoolDecision struct {
	Endpoint   inference.EndpointID `json:"endpoint,omitempty"`
	Reason     string               `json:"reason,omitempty"`
	Waits      bool                 `json:"waits,omitempty"`        // until the endpoint has room, or where there is none until any has
	TTFT       float64              `json:"ttft_seconds,omitempty"` // target for the first output; 0: none
	TPOT       float64              `json:"tpot_seconds,omitempty"` // the same per token after it
	Fallback   int                  `json:"fallback,omitempty"`     // that decided; 0: the pool's own profile
	Candidates []CandidateFate      `json:"candidates"`
}

// CandidateFate is how one endpoint fared.
type CandidateFate struct {
	Endpoint inference.EndpointID `json:"endpoint"`
	Chosen   bool                 `json:"chosen,omitempty"`
	Out      string               `json:"out,omitempty"` // why it was not scored
	Standing string               `json:"standing,omitempty"`
	Load     int                  `json:"load"`
	Cached   int                  `json:"cached_tokens"`
	Total    float64              `json:"total"`
	Scores   []PluginScore        `json:"scores,omitempty"`
}

// PluginScore is one plugin's part of a total, with its weight applied.
type PluginScore struct {
	Plugin string  `json:"plugin"`
	Value  float64 `json:"value"`
	Terms  string  `json:"terms,omitempty"`
}

// Refusal is an error as a client would get it.
type Refusal struct {
	Code    inference.Code `json:"code"`
	Message string         `json:"message"`
}

// Explain says where a request would go now, or what it would wait for, as if nobody
// were in the queue. Whether the queue would let it in it does not say: what is refused
// there depends on those that wait, and may refuse others in its place. Nothing is sent,
// reserved or remembered, and where a route draws one of several pools it is drawn anew.
func (g *Gateway) Explain(q Question) *Explained {
	out := &Explained{Backends: []PoolWeight{}}
	state := g.state.Load()
	a, err := state.understand(q)
	if a.req != nil {
		out.Model = a.req.Model
	}
	if a.pool != nil {
		out.Target, out.Adapter, out.Pool, out.Profile = a.found.Model, a.adapter, a.found.Pool, a.pool.called()
		out.Route = &a.found.Route
		for _, b := range state.routes.Backends(a.found.Route) {
			out.Backends = append(out.Backends, PoolWeight{b.Pool, b.Weight, b.Rewrite})
		}
	}
	if err != nil {
		out.Error = &Refusal{err.Code, err.Message}
		return out
	}
	m := newAim(a)
	out.Prompt = PromptSize{m.want.Prompt.N, m.want.Prompt.Source.String(), len(m.want.Keys)}
	out.Objective, out.Priority = a.treatment.objective, a.treatment.priority
	d, queued := a.pool.explain(m.ask(schedule.Ask{}), out.Priority)
	out.Decision, out.Queued = decisionOf(&d), &queued
	switch {
	case d.Err == nil:
	case d.Err.Code == inference.NoEndpoints && a.pool.health.Starts:
		out.Decision.Waits = true // an engine is started for it
	case d.Err.Code == inference.Shed && d.Err.RetryAfter <= flow.PauseMax:
		out.Decision.Waits = true // for a pause that is nearly over
	default:
		out.Error = &Refusal{d.Err.Code, d.Err.Message}
	}
	return out
}

// explain is the book's decision on a request that came now.
func (m *members) explain(ask schedule.Ask, priority int) (d schedule.Decision, queued QueueLength) {
	// As in a pump, no decision goes by endpoints that have been replaced.
	m.queue.mu.Lock()
	defer m.queue.mu.Unlock()
	s := m.queue.flow.Status(schedule.Load{}, 0)
	queued.Requests = s.Requests
	for _, b := range s.Bands {
		if b.Priority >= priority {
			queued.Before += b.Requests
		}
		ask.Yields = ask.Yields || b.Priority > priority && b.FlowsAll > 0
	}
	return m.book.Explain(time.Now(), m.now.Load().fleet, ask), queued
}

// understand is admit for a request that is not served, its headers taken as on a
// listener that trusts them. What it found before an error is in the admission.
func (s *state) understand(q Question) (*admission, *inference.Error) {
	a := &admission{d: dialects[q.Path], body: q.Body, arrived: time.Now()}
	if a.d == nil {
		return a, inference.Errorf(inference.NotFound, "nothing is served at this path")
	}
	contentType := q.Header.Get("Content-Type")
	if err := a.d.CheckType(contentType); err != nil {
		return a, inference.AsError(err)
	}
	var err *inference.Error
	if a.who, err = s.asker(q.Header); err != nil {
		return a, err
	}
	if err := s.find(a, route.Query{Host: q.Host, Path: q.Path, Header: q.Header}, contentType); err != nil {
		return a, err
	}
	a.treatment = s.treatment(&Head{Header: q.Header, Trusted: true}, a.who, a.found.Route, a.arrived)
	return a, nil
}

// asker is whose request it is: with a client's key among the headers that client's,
// and without any nobody's in particular, who may ask for everything.
func (s *state) asker(h http.Header) (*auth.Principal, *inference.Error) {
	if len(h["Authorization"]) == 0 && len(h["X-Api-Key"]) == 0 {
		return &auth.Principal{Tenant: auth.Anonymous, Fairness: auth.Anonymous}, nil
	}
	return s.keys.Authenticate(h)
}

func decisionOf(d *schedule.Decision) *PoolDecision {
	out := &PoolDecision{
		Endpoint: d.Endpoint, Reason: d.Reason, Waits: d.Waits, TTFT: d.TTFT.Seconds(), TPOT: d.TPOT.Seconds(),
		Fallback: d.Profile, Candidates: make([]CandidateFate, len(d.Candidates)),
	}
	for i, c := range d.Candidates {
		fate := CandidateFate{
			Endpoint: c.Endpoint, Chosen: c.Chosen, Out: c.Out, Standing: c.Standing,
			Load: c.Load, Cached: c.Cached, Total: c.Total,
		}
		for _, s := range c.Scores {
			fate.Scores = append(fate.Scores, PluginScore{s.Plugin, s.Value, s.Terms})
		}
		out.Candidates[i] = fate
	}
	return out
}
