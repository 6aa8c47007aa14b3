// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/plugin"
)

// Decision is a choice with all that it rested on. It holds no part of a prompt.
type Decision struct {
	Endpoint   inference.EndpointID // the winner; "" for none
	Reason     string               // why it won
	Profile    int                  // that decided: 0 the pool's first, 1 its first fallback, and so on
	Candidates []Explanation        // every endpoint of the pool, in its order
	Err        *inference.Error     // why there is no winner
}

// Explanation is how one endpoint fared in a decision.
type Explanation struct {
	Endpoint inference.EndpointID
	Out      string  // why it could not take the request; "" if it was scored
	Standing string  // by its recent past, where that was asked: on_trial, good, ramping, ejected
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

// String is one line for a header.
func (e *Explanation) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "load=%d", e.Load)
	if e.Standing != "" {
		s.WriteString(" standing=" + e.Standing)
	}
	if len(e.Scores) > 0 {
		fmt.Fprintf(&s, " cached=%d total=%s", e.Cached, number(e.Total))
	}
	for _, x := range e.Scores {
		fmt.Fprintf(&s, " %s=%s", x.Plugin, number(x.Value))
		if x.Terms != "" {
			s.WriteString(" (" + x.Terms + ")")
		}
	}
	return s.String()
}

func number(v float64) string { return strconv.FormatFloat(v, 'f', 3, 64) }

// Explain makes the decision for a request and says of every endpoint how it
// came about. Nothing is reserved, and no plugin is told of a choice.
func (b *Book) Explain(now time.Time, pool *fleet.Pool, ask Ask) Decision {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.choose(now, pool, &ask)
	accounts := b.seated.accounts
	believe, may := b.believeProbes(accounts), b.serving(ask.Model)
	out := Decision{Candidates: make([]Explanation, len(accounts))}
	for i, a := range accounts {
		e := &out.Candidates[i]
		e.Endpoint, e.Load = pool.Endpoints[i].ID, a.load(now)+int(b.elsewhere(now, a)+0.5)
		e.Out = a.why(now, &ask, &pool.Endpoints[i], believe, may == nil || may[i])
	}
	if c.endpoint == nil {
		out.Err = c.refused(pool)
		return out
	}
	d := &b.decision
	seated := make([]bool, len(accounts))
	for _, at := range d.seats {
		seated[at] = true
		out.Candidates[at].Standing = d.class.standing.String()
	}
	for i := range d.candidates[:c.scored] {
		b.explain(&c, i, &out.Candidates[d.seats[d.chosen[i]]])
	}
	for i := range out.Candidates {
		e := &out.Candidates[i]
		switch {
		case e.Out != "" || len(e.Scores) > 0 || seated[i] && c.scored == 0:
		case !seated[i]:
			e.Out = "standing"
		default:
			var x plugin.Candidate
			b.fill(&x, &pool.Endpoints[i], accounts[i], &ask)
			e.Out = c.by.refusal(&d.request, &x)
		}
	}
	win := &out.Candidates[d.seats[c.seat]]
	win.Chosen = true
	out.Endpoint, out.Reason = win.Endpoint, b.reason(&c)
	for p := b.config.Profile; p != nil && p != c.by && c.scored > 0; p = p.next {
		out.Profile++
	}
	return out
}

// explain says how a candidate of the decision just made was scored.
func (b *Book) explain(c *choice, i int, e *Explanation) {
	d := &b.decision
	candidate := &d.candidates[i]
	e.Cached = candidate.Cached
	for _, s := range c.by.scorers {
		s.does.Score(&d.request, d.candidates[:c.scored], d.scores)
		part := Score{Plugin: s.name, Value: s.weight * d.scores[i]}
		if x, ok := s.does.(plugin.Explainer); ok {
			part.Terms = x.Explain(&d.request, candidate)
		}
		e.Scores, e.Total = append(e.Scores, part), e.Total+part.Value
	}
}

// reason says why the winner of the decision just made won.
func (b *Book) reason(c *choice) string {
	d := &b.decision
	switch {
	case len(d.seats) == 1:
		return "the only one that can take it"
	case c.scored == 0:
		same := 0
		for _, load := range d.loads {
			if load == d.loads[c.seat] {
				same++
			}
		}
		return "fewest requests, " + oneOf(same)
	case c.scored == 1:
		return "the only one that the filters leave"
	}
	if x, ok := c.by.picker.(plugin.Reasoner); ok {
		return x.Reason(d.candidates[:c.scored], d.totals[:c.scored], c.candidateAt)
	}
	return "best score of " + strconv.Itoa(c.scored)
}

func oneOf(n int) string {
	if n == 1 {
		return "alone"
	}
	return "one of " + strconv.Itoa(n)
}

// told is the decision just made in one line, by its winner.
func (b *Book) told(c *choice) string {
	e := Explanation{Load: c.rank.load, Standing: c.rank.standing.String()}
	if c.scored > 0 {
		b.explain(c, c.candidateAt, &e)
	}
	line := e.String()
	if c.scored > 0 {
		line += fmt.Sprintf(" scored=%d", c.scored)
	}
	if c.rank.stranger {
		line += " revision=other"
	}
	return line + " why=" + strconv.Quote(b.reason(c))
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
