// SPDX-License-Identifier: Apache-2.0

// Package session keeps the requests of a session on one endpoint.
package session

import (
	"errors"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/plugin"
)

// affinity remembers where each session went, within a bound: the map is two
// generations, and when the young one is full the old one is dropped.
type affinity struct {
	max        int
	stays      time.Duration
	young, old map[string]place
}

type place struct {
	endpoint inference.EndpointID
	at       time.Time
}

// New makes the plugin.
func New(o plugin.Options) (any, error) {
	options := struct {
		SessionsMax int             `json:"sessionsMax"`
		Stays       plugin.Duration `json:"stays"`
	}{SessionsMax: 100_000}
	if err := o(&options); err != nil {
		return nil, err
	}
	stays, err := options.Stays.Read("stays", 10*time.Minute)
	if err != nil {
		return nil, err
	}
	if stays == 0 {
		return nil, errors.New("stays: must be above 0")
	}
	if options.SessionsMax < 1 {
		return nil, errors.New("sessionsMax: must be at least 1")
	}
	return &affinity{max: options.SessionsMax, stays: stays, young: map[string]place{}}, nil
}

func (a *affinity) last(r *plugin.Request) (inference.EndpointID, bool) {
	if r.Session == "" {
		return "", false
	}
	p, ok := a.young[r.Session]
	if !ok {
		p, ok = a.old[r.Session]
	}
	return p.endpoint, ok && r.Now.Sub(p.at) <= a.stays
}

// Score is 1 for the endpoint that the session used last and 0 for others.
func (a *affinity) Score(r *plugin.Request, candidates []plugin.Candidate, scores []float64) {
	last, known := a.last(r)
	for i := range candidates {
		scores[i] = 0
		if known && candidates[i].Endpoint.ID == last {
			scores[i] = 1
		}
	}
}

// Chosen remembers where the session went.
func (a *affinity) Chosen(r *plugin.Request, c *plugin.Candidate) {
	if r.Session == "" {
		return
	}
	_, known := a.young[r.Session]
	if !known && (len(a.young) >= (a.max+1)/2 || len(a.young)+len(a.old) >= a.max) {
		a.young, a.old = map[string]place{}, a.young
		if len(a.old) >= a.max {
			a.old = nil // max is 1
		}
	}
	a.young[r.Session] = place{c.Endpoint.ID, r.Now}
}
