// SPDX-License-Identifier: Apache-2.0

// Package cost scores an endpoint by what placing the request there costs the
// pool, in seconds. It is the default profile; the formula is in
// internal/schedule/cost, which a queue calls too.
package cost

import (
	"fmt"
	"time"

	"github.com/headgate/headgate/internal/schedule/cost"
	"github.com/headgate/headgate/plugin"
)

type scorer struct {
	params cost.Params
	load   float64
}

// New makes the plugin.
func New(o plugin.Options) (any, error) {
	options := struct {
		AdapterLoad string `json:"adapterLoad"`
	}{AdapterLoad: "1s"}
	if err := o(&options); err != nil {
		return nil, err
	}
	load, err := time.ParseDuration(options.AdapterLoad)
	if err != nil || load < 0 {
		return nil, fmt.Errorf("adapterLoad %q: must be a duration like 500ms", options.AdapterLoad)
	}
	return &scorer{params: cost.Default, load: load.Seconds()}, nil
}

func ask(r *plugin.Request) cost.Ask {
	return cost.Ask{
		Prompt: float64(r.Prompt.N), Output: r.Output,
		Waited: r.Waited.Seconds(), TTFT: r.TTFT.Seconds(), TPOT: r.TPOT.Seconds(),
	}
}

func (s *scorer) terms(a *cost.Ask, r *plugin.Request, c *plugin.Candidate) cost.Terms {
	at := cost.Place{
		Cached: float64(c.Cached), Ahead: c.Ahead, PerToken: c.PerToken, Intercept: c.Intercept,
		Running: float64(c.InFlight+c.Ghosts) + c.Others, Context: c.Context, Stalls: c.Stalls,
	}
	// An adapter that is not there is loaded first, and the whole batch waits.
	if r.Adapter != "" && !c.Resident {
		at.Intercept += s.load
	}
	return s.params.Score(a, &at)
}

func (s *scorer) Score(r *plugin.Request, candidates []plugin.Candidate, scores []float64) {
	a := ask(r)
	for i := range candidates {
		t := s.terms(&a, r, &candidates[i])
		scores[i] = -t.Total
	}
}

func (s *scorer) Explain(r *plugin.Request, c *plugin.Candidate) string {
	a := ask(r)
	t := s.terms(&a, r, c)
	return fmt.Sprintf("%.3fs: ahead %.3f, own %.3f, delay %.3f, decode %.3f, stall %.3f (%.2f streams), late %.3f",
		t.Total, t.Ahead, t.Own, t.Delay, t.Decode, t.Stall, t.Streams, t.Late)
}
