// SPDX-License-Identifier: Apache-2.0

package plugin

// Filter takes candidates out of a decision.
type Filter interface {
	// Filter returns why the candidate cannot take the request, in a few constant
	// words, or "" if it can. If a pool's filters leave nobody, they are
	// disregarded: a request refused for want of an endpoint helps nobody.
	Filter(r *Request, c *Candidate) (reason string)
}
