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
	Waits      bool                 // for room on the winner, or if there is none for room anywhere
	Profile    int                  // that decided: 0 the pool's first, 1 its first fallback, and so on
	TTFT, TPOT time.Duration        // targets that it went by; 0: none
	Candidates []Explanation        // every endpoint of the pool, in its order
	Err        *inference.Error     // why there is no winner, unless it Waits
}

// Explanation is how one endpoint fared in a decision.
type Explanation struct {
	Endpoint inference.EndpointID
	Out      string  // why it could not take the request; "" if it was scored
	Standing string  // by its recent past, of one that can take the request: on_trial, good, ramping, ejected
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

// Explain makes the decision for a request as it would be made for one that comes to
// an empty queue now, and says of every endpoint how it came about. Nothing is reserved,
// and no plugin is told of a choice.
func (b *Book) Explain(now time.Time, pool *fleet.Pool, ask Ask) Decision {
	r := b.Begin(now, pool)
	defer r.End()
	bid, d := r.Bid(&ask), &b.decision
	d.late = true // whatever is still asked belongs to that decision
	defer func() { d.late = false }()
	c := &r.choice
	out := Decision{Waits: !bid.Open && !bid.None, TTFT: b.ttft(&ask), TPOT: b.tpot(&ask)}
	out.Candidates = b.fates(now, pool, &ask, c)
	for p := b.config.Profile; p != nil && p != c.by && c.by != nil; p = p.next {
		out.Profile++
	}
	switch {
	case bid.None:
		out.Err = c.refused(pool)
	case c.endpoint != nil:
		win := &out.Candidates[d.seats[c.seat]]
		win.Chosen = true
		out.Endpoint, out.Reason = win.Endpoint, b.reason(c)
	}
	return out
}

// fates says of every endpoint of the pool how it fared in the decision just made.
func (b *Book) fates(now time.Time, pool *fleet.Pool, ask *Ask, c *choice) []Explanation {
	d, accounts := &b.decision, b.seated.accounts
	believe, may := b.believeProbes(accounts), b.serving(ask.Model)
	fates, seated := make([]Explanation, len(accounts)), make([]bool, len(accounts))
	for _, at := range d.seats {
		seated[at] = true
	}
	for i := range d.candidates[:c.scored] {
		b.explain(c, i, &fates[d.seats[d.chosen[i]]])
	}
	for i, a := range accounts {
		e, x := &pool.Endpoints[i], &fates[i]
		x.Endpoint, x.Load = e.ID, a.load(now)+b.elsewhereWhole(now, a)
		if x.Out = a.why(now, ask, e, believe, may == nil || may[i]); x.Out != "" {
			continue
		}
		x.Standing = a.rank(now, ask, e, a.turn).standing.String()
		switch {
		case len(x.Scores) > 0 || seated[i] && c.scored == 0:
		case seated[i]:
			x.Out = "neither idle nor a holder"
		default:
			x.Out = b.unseated(now, e, a, ask, c)
		}
	}
	return fates
}

// unseated says why an endpoint that can take the request was not among those that
// were compared.
func (b *Book) unseated(now time.Time, e *inference.Endpoint, a *account, ask *Ask, c *choice) string {
	d := &b.decision
	if c.passed > 0 {
		var x plugin.Candidate
		b.fill(&x, e, a, ask)
		if why := c.by.refusal(&d.request, &x, &d.candidates[0]); why != "" {
			return why
		}
	}
	switch {
	case a.rank(now, ask, e, a.turn).compare(d.class) > 0:
		return "standing"
	case b.roomFor(a, ask) == full:
		return "full"
	}
	return "busy"
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
	why := b.won(c)
	if c.passed > 0 {
		d := &b.decision
		switch names := c.by.disregarded(&d.request, &d.candidates[0]); len(names) {
		case 0:
		case 1:
			why += ", " + names[0] + " disregarded: nobody passes it"
		default:
			why += ", " + strings.Join(names, " and ") + " disregarded: nobody passes them"
		}
	}
	if c.early {
		why += ", at once because another has nothing to do"
	}
	return why
}

// won is reason by what was compared alone.
func (b *Book) won(c *choice) string {
	d := &b.decision
	switch {
	case len(d.seats) == 1 && d.class.standing == onTrial:
		return "its ejection is over, and one request is its trial"
	case len(d.seats) == 1 && d.full:
		return "the only one that has room"
	case c.passed == 1 && c.able > 1:
		return "the only one that the filters leave"
	case len(d.seats) == 1:
		return "the only one that can take it"
	case c.scored == 0:
		same := 0
		for _, at := range d.seats {
			if int(b.seated.loads[at]) == c.load {
				same++
			}
		}
		return "fewest requests, " + oneOf(same)
	}
	totals := d.totals[:c.scored]
	if x, ok := c.by.picker.(plugin.Reasoner); ok {
		return x.Reason(d.candidates[:c.scored], totals, c.candidateAt)
	}
	same, best := 0, "best score of "+strconv.Itoa(c.scored)
	for _, total := range totals {
		if total == totals[c.candidateAt] {
			same++
		}
	}
	if same > 1 {
		best += ", " + oneOf(same) + " equal"
	}
	return best
}

func oneOf(n int) string {
	if n == 1 {
		return "alone"
	}
	return "one of " + strconv.Itoa(n)
}

// told is the decision just made in one line, by its winner.
func (b *Book) told(c *choice) string {
	e := Explanation{Load: c.load, Standing: c.rank.standing.String()}
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
