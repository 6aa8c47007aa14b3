// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"fmt"

	"github.com/headgate/headgate/plugin"
)

// Profile is how a pool's endpoints are chosen: filters, scorers with weights,
// and a picker. It is fixed once made. A nil profile is least load.
type Profile struct {
	filters   []named[plugin.Filter]
	scorers   []weighted
	picker    plugin.Picker
	observers []plugin.Observer
	patient   bool // a scorer counts what is ahead of a request

	next *Profile // decides where the filters leave nobody; nil: they are disregarded then
}

type named[T any] struct {
	name string
	does T
}

type weighted struct {
	name   string
	weight float64
	does   plugin.Scorer
}

// Use names a plugin of a profile and how much its score weighs.
type Use struct {
	Plugin  string
	Weight  float64 // of a scorer; 0: 1
	Options plugin.Options
}

// NewProfile builds a profile of plugins that known has. Without a picker the
// best score wins, at random among equals.
func NewProfile(known map[string]plugin.Factory, uses []Use) (*Profile, error) {
	p := &Profile{}
	for _, u := range uses {
		factory := known[u.Plugin]
		if factory == nil {
			return nil, fmt.Errorf("plugin %q is not known", u.Plugin)
		}
		options := u.Options
		if options == nil {
			options = plugin.None
		}
		made, err := factory(options)
		if err != nil {
			return nil, fmt.Errorf("plugin %s: %w", u.Plugin, err)
		}
		does := false
		if f, ok := made.(plugin.Filter); ok {
			p.filters, does = append(p.filters, named[plugin.Filter]{u.Plugin, f}), true
		}
		if s, ok := made.(plugin.Scorer); ok {
			weight := u.Weight
			if weight == 0 {
				weight = 1
			}
			p.scorers, does = append(p.scorers, weighted{u.Plugin, weight, s}), true
			_, patient := made.(plugin.Patient)
			p.patient = p.patient || patient
		} else if u.Weight != 0 && u.Weight != 1 {
			return nil, fmt.Errorf("plugin %s does not score: its weight would have no effect", u.Plugin)
		}
		if k, ok := made.(plugin.Picker); ok {
			if p.picker != nil {
				return nil, fmt.Errorf("plugin %s: a profile has one picker, and there is one already", u.Plugin)
			}
			p.picker, does = k, true
		}
		if !does {
			return nil, fmt.Errorf("plugin %s neither filters nor scores nor picks", u.Plugin)
		}
		if o, ok := made.(plugin.Observer); ok {
			p.observers = append(p.observers, o)
		}
	}
	if len(p.scorers) == 0 && p.picker == nil {
		return nil, fmt.Errorf("a profile needs a plugin that scores or picks")
	}
	return p, nil
}

// pick scores the candidates into totals and returns the index of the winner.
func (p *Profile) pick(r *plugin.Request, candidates []plugin.Candidate, totals, scores []float64) int {
	clear(totals)
	for i, s := range p.scorers {
		if i == 0 && s.weight == 1 { // mostly it is the only one, and there is nothing to add up
			s.does.Score(r, candidates, totals)
			continue
		}
		s.does.Score(r, candidates, scores)
		for i, v := range scores {
			totals[i] += s.weight * v
		}
	}
	if p.picker != nil {
		return min(max(p.picker.Pick(r, candidates, totals), 0), len(totals)-1)
	}
	best, ties := 0, 1
	for i := 1; i < len(totals); i++ {
		switch {
		case totals[i] > totals[best]:
			best, ties = i, 1
		case totals[i] == totals[best]:
			// Reservoir sampling: each of n equals wins with probability 1/n.
			if ties++; r.Rand.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return best
}

// Else is p with a fallback: where p's filters leave nobody, next decides. What
// filters of the last profile leave nobody are disregarded.
func (p *Profile) Else(next *Profile) *Profile {
	chain := *p
	chain.next = next
	return &chain
}

// Filters reports whether the profile may leave nobody, so that a fallback makes
// sense.
func (p *Profile) Filters() bool { return len(p.filters) > 0 }

// filter puts those candidates first that no filter refuses, and moves what stands
// beside each with it. It returns how many they are and the profile of the chain
// that decides.
func (p *Profile) filter(r *plugin.Request, candidates []plugin.Candidate, beside []int32) (by *Profile, n int) {
	for ; p.next != nil; p = p.next {
		if n := p.sift(r, candidates, beside, true); n > 0 {
			return p, n
		}
	}
	return p, p.sift(r, candidates, beside, false)
}

// sift applies the profile's own filters. If it is strict they may leave nobody;
// otherwise one that would is disregarded, and can be told by that it refuses those
// that are left.
func (p *Profile) sift(r *plugin.Request, candidates []plugin.Candidate, beside []int32, strict bool) int {
	n := len(candidates)
	for _, f := range p.filters {
		kept := 0
		for i := range n {
			if f.does.Filter(r, &candidates[i]) != "" {
				continue
			}
			if kept < i {
				candidates[kept], candidates[i] = candidates[i], candidates[kept]
				beside[kept], beside[i] = beside[i], beside[kept]
			}
			kept++
		}
		if kept > 0 || strict {
			n = kept
		}
	}
	return n
}

// refusal is the first of p's filters that refuses a candidate, and why, where they
// let another pass.
func (p *Profile) refusal(r *plugin.Request, c, passed *plugin.Candidate) string {
	for _, f := range p.filters {
		if why := f.does.Filter(r, c); why != "" && f.does.Filter(r, passed) == "" {
			return f.name + ": " + why
		}
	}
	return ""
}

// disregarded are those of p's filters that were, where one was let pass.
func (p *Profile) disregarded(r *plugin.Request, passed *plugin.Candidate) (names []string) {
	for _, f := range p.filters {
		if f.does.Filter(r, passed) != "" {
			names = append(names, f.name)
		}
	}
	return names
}
