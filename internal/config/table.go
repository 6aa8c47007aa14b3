// SPDX-License-Identifier: Apache-2.0

package config

import (
	"maps"
	"slices"

	"github.com/headgate/headgate/inference"
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
		}
		for _, b := range r.Backends {
			compiled[i].Backends = append(compiled[i].Backends, route.Backend{
				Pool: b.Pool, Weight: b.Weight, MaxBody: int64(c.Pools[b.Pool].MaxBody),
			})
		}
	}
	return route.New(compiled)
}

// PoolNames returns the pools' names in alphabetical order.
func (c *Config) PoolNames() []string { return slices.Sorted(maps.Keys(c.Pools)) }

// Endpoints returns the pool's configured engines.
func (p Pool) Endpoints() []inference.Endpoint {
	endpoints := make([]inference.Endpoint, len(p.Discovery.Static))
	for i, e := range p.Discovery.Static {
		revision := e.ModelRevision
		if revision == "" {
			revision = p.ModelRevision
		}
		endpoints[i] = inference.Endpoint{ID: inference.EndpointID(e.URL), URL: string(e.URL), Revision: revision}
	}
	return endpoints
}

// Secure reports whether the listener serves TLS.
func (l Listener) Secure() bool { return l.TLS.Cert != "" }
