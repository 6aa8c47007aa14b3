// SPDX-License-Identifier: Apache-2.0

// Package fleet is the immutable view of the pools that a gateway may use: what
// was configured or discovered, without the fast facts that schedule.Book keeps.
//
// A Pool is built by the control side and swapped whole; nobody changes one
// that others can see.
package fleet

import (
	"net"
	"net/url"
	"strings"

	"github.com/headgate/headgate/inference"
)

// Pool is one set of endpoints that serve the same models.
type Pool struct {
	Name      string
	Endpoints []inference.Endpoint
}

// NewEndpoint makes the endpoint for a base URL. Two spellings of one address
// get one ID: the scheme and host in lower case, the port explicit, IPv6 hosts
// in brackets.
func NewEndpoint(u *url.URL, revision string) inference.Endpoint {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[strings.ToLower(u.Scheme)]
	}
	host := net.JoinHostPort(strings.ToLower(u.Hostname()), port)
	base := strings.ToLower(u.Scheme) + "://" + host + strings.TrimSuffix(u.EscapedPath(), "/")
	return inference.Endpoint{ID: inference.EndpointID(base), URL: base, Revision: revision}
}
