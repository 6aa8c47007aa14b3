// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"maps"
	"slices"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/auth"
	"github.com/headgate/headgate/internal/rate"
	"github.com/headgate/headgate/internal/route"
)

// Table compiles the routes. A valid configuration always compiles. Without
// routes everything goes to the one pool; without pools nothing is served.
func (c *Config) Table() (*route.Table, error) {
	routes := c.Routes
	if len(routes) == 0 {
		for name := range c.Pools {
			routes = append(routes, Route{Backends: []Backend{{Pool: name, Weight: 1}}})
		}
	}
	compiled := make([]route.Route, len(routes))
	for i, r := range routes {
		compiled[i] = route.Route{
			Model:     r.Match.Model,
			Path:      r.Match.Path,
			Hostnames: r.Match.Hostnames,
			Headers:   r.Match.Headers,
			Rewrite:   r.Rewrite.Model,
			Sticky:    r.Sticky,
		}
		for _, b := range r.Backends {
			compiled[i].Backends = append(compiled[i].Backends, route.Backend{
				Pool: b.Pool, Weight: b.Weight, MaxBody: int64(c.Pools[b.Pool].MaxBody), Rewrite: b.Rewrite.Model,
			})
		}
	}
	return route.New(compiled)
}

// PoolNames returns the pools' names in alphabetical order.
func (c *Config) PoolNames() []string { return slices.Sorted(maps.Keys(c.Pools)) }

// AuthKeys compiles the keys. Those of a valid configuration always compile.
func (c *Config) AuthKeys() (*auth.Keys, error) {
	keys := make([]auth.Key, len(c.Keys))
	for i, k := range c.Keys {
		keys[i] = auth.Key{ID: k.ID, SHA256: k.SecretSHA256.Hex(), Tenant: k.Tenant, Models: k.Models, Objectives: k.Objectives, Fairness: k.FairnessID}
	}
	return auth.NewKeys(keys)
}

// RateLimits returns the limits of the keys that have some, by the keys' ids.
func (c *Config) RateLimits() map[string]rate.Limits {
	limits := map[string]rate.Limits{}
	for _, k := range c.Keys {
		if l := rate.Limits(k.Limits); l != (rate.Limits{}) {
			limits[k.ID] = l
		}
	}
	return limits
}

// Endpoints returns the engines that the configuration itself lists for new
// requests. What else the pool has is for internal/discovery to find.
func (p Pool) Endpoints() []inference.Endpoint {
	var endpoints []inference.Endpoint
	for _, e := range p.Discovery.Static {
		if !e.Draining {
			endpoints = append(endpoints, e.Endpoint(p.ModelRevision))
		}
	}
	return endpoints
}

// Endpoint is e as the rest of the program knows it, with the pool's model
// revision where it has none of its own.
func (e Endpoint) Endpoint(revision string) inference.Endpoint {
	return inference.Endpoint{ID: inference.EndpointID(e.URL), URL: string(e.URL), Revision: cmp.Or(e.ModelRevision, revision), Guard: string(e.Guard), Labels: inference.NewLabels(e.Labels)}
}

// Trusts reports whether the listener's clients may say how their requests are
// treated.
func (l Listener) Trusts() bool {
	return l.TrustHeaders == TrustTrue || l.TrustHeaders == TrustAuto && l.Address.Loopback()
}

// Secure reports whether the listener serves TLS.
func (l Listener) Secure() bool { return l.TLS.Cert != "" }

// Discovers reports whether the pool has endpoints that the configuration does
// not list.
func (p Pool) Discovers() bool { return p.Discovery.File != "" || p.Discovery.DNS.Name != "" }
