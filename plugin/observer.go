// SPDX-License-Identifier: Apache-2.0

package plugin

// Observer is a plugin that remembers decisions.
type Observer interface {
	// Chosen tells where the request goes.
	Chosen(r *Request, c *Candidate)
}
