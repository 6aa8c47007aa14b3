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
	var options struct {
		AdapterLoad plugin.Duration `json:"adapterLoad"`
	}
	if err := o(&options); err != nil {
		return nil, err
	}
	load, err := options.AdapterLoad.Read("adapterLoad", time.Second)
	if err != nil {
		return nil, err
	}
	return &scorer{params: cost.Default, load: load.Seconds()}, nil
}

func (s *scorer) ask(r *plugin.Request) cost.Ask {
	a := cost.Ask{
		Prompt: float64(r.Prompt.N), Output: r.Output,
		Waited: r.Waited.Seconds(), TTFT: r.TTFT.Seconds(),
	}
	if r.Adapter != "" {
		a.Load = s.load
	}
	return a
}

// Patient: what is ahead is a term of the cost.
func (s *scorer) Patient() {}

func (s *scorer) Score(r *plugin.Request, candidates []plugin.Candidate, scores []float64) {
	a := s.ask(r)
	for i := range candidates {
		scores[i] = -s.params.Score(&a, &candidates[i], nil)
	}
}

func (s *scorer) Explain(r *plugin.Request, c *plugin.Candidate) string {
	a := s.ask(r)
	var t cost.Terms
	s.params.Score(&a, c, &t)
	return fmt.Sprintf("%.3fs: ahead %.3f, own %.3f, delay %.3f, decode %.3f, stall %.3f (%.2f streams), late %.3f",
		t.Total, t.Ahead, t.Own, t.Delay, t.Decode, t.Stall, t.Streams, t.Late)
}
