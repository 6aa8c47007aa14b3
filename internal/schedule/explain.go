// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"fmt"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/plugin"
)

// Explanation is how one endpoint fared in a decision.
type Explanation struct {
	Endpoint inference.EndpointID
	Out      string  // why it could not take the request; "" if it was scored
	Load     int     // requests in flight, ghosts, and what others have there
	Cached   int     // prompt tokens that its cache probably holds
	Total    float64 // score; more is better
	Scores   []Score // by plugin, weights applied
	Chosen   bool
}

// Score is one plugin's part of a total.
type Score struct {
	Plugin string
	Value  float64
	Terms  string // what the plugin says of it, "" if it doesn't
}

// Explain makes the decision for a request and says of every endpoint how it
// came about. Nothing is reserved, and no plugin is told of a choice.
func (b *Book) Explain(now time.Time, pool *fleet.Pool, ask Ask) []Explanation {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.choose(now, pool, &ask)
	accounts := b.seated.accounts
	believe, may := b.believeProbes(accounts), b.serving(ask.Model)
	list := make([]Explanation, len(accounts))
	where := map[inference.EndpointID]*Explanation{}
	for i, a := range accounts {
		e := &list[i]
		*e = Explanation{Endpoint: pool.Endpoints[i].ID, Load: a.load(now) + int(b.elsewhere(now, a)+0.5)}
		e.Out = a.why(now, &ask, &pool.Endpoints[i], believe, may == nil || may[i])
		where[e.Endpoint] = e
	}
	d, seated := &b.decision, map[inference.EndpointID]bool{}
	for _, s := range d.seats {
		seated[pool.Endpoints[s].ID] = true
	}
	if c.endpoint != nil {
		where[c.endpoint.ID].Chosen = true
	}
	if c.scored == 0 {
		for i := range list {
			if list[i].Out == "" && !seated[list[i].Endpoint] {
				list[i].Out = "standing"
			}
		}
		return list
	}
	scored := map[inference.EndpointID]bool{}
	p := b.config.Profile
	for _, s := range p.scorers {
		s.does.Score(&d.request, d.candidates, d.scores)
		for i := range d.candidates {
			cand := &d.candidates[i]
			e := where[cand.Endpoint.ID]
			part := Score{Plugin: s.name, Value: s.weight * d.scores[i]}
			if x, ok := s.does.(plugin.Explainer); ok {
				part.Terms = x.Explain(&d.request, cand)
			}
			scored[e.Endpoint] = true
			e.Scores, e.Total, e.Cached = append(e.Scores, part), e.Total+part.Value, cand.Cached
		}
	}
	for i := range list {
		e := &list[i]
		switch {
		case e.Out != "" || scored[e.Endpoint]:
		case !seated[e.Endpoint]:
			e.Out = "standing"
		default:
			var out plugin.Candidate
			b.fill(&out, &pool.Endpoints[i], accounts[i], &ask)
			e.Out = p.refusal(&d.request, &out)
		}
	}
	return list
}

// refusal says why an endpoint of the right standing was not scored.
func (p *Profile) refusal(r *plugin.Request, c *plugin.Candidate) string {
	for _, f := range p.filters {
		if why := f.does.Filter(r, c); why != "" {
			return fmt.Sprintf("%s: %s", f.name, why)
		}
	}
	return "neither idle nor a holder"
}
