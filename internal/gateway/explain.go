// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/http"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/auth"
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
// prompt but its size, and no header's value.
type Explained struct {
	Model    string        `json:"model"`             // as the client names it
	Target   string        `json:"target_model"`      // as engines know it
	Adapter  string        `json:"adapter,omitempty"` // that the target is
	Route    *int          `json:"route,omitempty"`   // index in the configuration; nil: none matches
	Backends []PoolWeight  `json:"backends"`          // of the route
	Pool     string        `json:"pool,omitempty"`    // drawn of them
	Profile  string        `json:"profile,omitempty"` // of the pool
	Prompt   PromptSize    `json:"prompt"`
	Decision *PoolDecision `json:"decision,omitempty"` // nil: no pool was found
	Error    *Refusal      `json:"error,omitempty"`    // with which the request would be refused
}

// PoolWeight is one backend of a route.
type PoolWeight struct {
	Pool   string `json:"pool"`
	Weight int    `json:"weight"`
}

// PromptSize is what routing knows of a prompt.
type PromptSize struct {
	Tokens int    `json:"tokens"`
	Source string `json:"source"` // estimated, counted or reported
	Blocks int    `json:"blocks"` // that the prefix index can look up
}

// PoolDecision is a schedule.Decision as JSON.
type PoolDecision struct {
	Endpoint   inference.EndpointID `json:"endpoint,omitempty"`
	Reason     string               `json:"reason,omitempty"`
	Fallback   int                  `json:"fallback,omitempty"` // that decided; 0: the pool's own profile
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

// Explain says where a request would go now. Nothing is sent, reserved or
// remembered, and where a route draws one of several pools it is drawn anew.
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
			out.Backends = append(out.Backends, PoolWeight{b.Pool, b.Weight})
		}
	}
	if err != nil {
		out.Error = &Refusal{err.Code, err.Message}
		return out
	}
	m := newAim(a)
	out.Prompt = PromptSize{m.want.Prompt.N, m.want.Prompt.Source.String(), len(m.want.Keys)}
	d := a.pool.book.Explain(time.Now(), a.pool.now.Load().fleet, m.ask(schedule.Ask{}))
	out.Decision = decisionOf(&d)
	if d.Err != nil {
		out.Error = &Refusal{d.Err.Code, d.Err.Message}
	}
	return out
}

// understand is admit for a request that is not served. What it found before an
// error is in the admission.
func (s *state) understand(q Question) (*admission, *inference.Error) {
	// With a client's key among the headers it is that client's request.
	who, err := s.keys.Authenticate(q.Header)
	if err != nil {
		who = &auth.Principal{Tenant: auth.Anonymous}
	}
	a := &admission{d: dialects[q.Path], body: q.Body, who: who, arrived: time.Now()}
	if a.d == nil {
		return a, inference.Errorf(inference.NotFound, "nothing is served at this path")
	}
	contentType := q.Header.Get("Content-Type")
	if err := a.d.CheckType(contentType); err != nil {
		return a, inference.AsError(err)
	}
	return a, s.find(a, route.Query{Host: q.Host, Path: q.Path, Header: q.Header}, contentType)
}

func decisionOf(d *schedule.Decision) *PoolDecision {
	out := &PoolDecision{Endpoint: d.Endpoint, Reason: d.Reason, Fallback: d.Profile, Candidates: make([]CandidateFate, len(d.Candidates))}
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
