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

// place says what the endpoint is to this request. An adapter that is not there
// is loaded first, and the whole batch waits.
func (s *scorer) place(at *cost.Place, r *plugin.Request, c *plugin.Candidate) {
	at.Cached, at.Ahead, at.PerToken, at.Intercept = float64(c.Cached), c.Ahead, c.PerToken, c.Intercept
	at.Running, at.Context, at.Stalls = c.Load(), c.Context, c.Stalls
	if r.Adapter != "" && !c.Resident {
		at.Intercept += s.load
	}
}

// Patient: what is ahead is a term of the cost.
func (s *scorer) Patient() {}

func (s *scorer) Score(r *plugin.Request, candidates []plugin.Candidate, scores []float64) {
	a := ask(r)
	var at cost.Place
	var t cost.Terms
	for i := range candidates {
		s.place(&at, r, &candidates[i])
		s.params.Score(&a, &at, &t)
		scores[i] = -t.Total
	}
}

func (s *scorer) Explain(r *plugin.Request, c *plugin.Candidate) string {
	a := ask(r)
	var at cost.Place
	var t cost.Terms
	s.place(&at, r, c)
	s.params.Score(&a, &at, &t)
	return fmt.Sprintf("%.3fs: ahead %.3f, own %.3f, delay %.3f, decode %.3f, stall %.3f (%.2f streams), late %.3f",
		t.Total, t.Ahead, t.Own, t.Delay, t.Decode, t.Stall, t.Streams, t.Late)
}
