// SPDX-License-Identifier: Apache-2.0

// Package label takes out endpoints by the labels that the configuration gives
// them.
package label

import (
	"fmt"
	"maps"
	"slices"

	"github.com/headgate/headgate/plugin"
)

type filter struct{ wants []want }

// want is what one label must be.
type want struct {
	name   string
	in     []string // one of these; nil: it must not be there at all
	reason string
}

// New makes the plugin.
func New(o plugin.Options) (any, error) {
	var options struct {
		In     map[string][]string `json:"in"`
		Absent []string            `json:"absent"`
	}
	if err := o(&options); err != nil {
		return nil, err
	}
	var f filter
	for _, name := range slices.Sorted(maps.Keys(options.In)) {
		if len(options.In[name]) == 0 {
			return nil, fmt.Errorf("in: %s has no values", name)
		}
		f.wants = append(f.wants, want{name, options.In[name], "label " + name})
	}
	for _, name := range options.Absent {
		f.wants = append(f.wants, want{name: name, reason: "label " + name})
	}
	return f, nil
}

// Filter names the first label that is not as it must be.
func (f filter) Filter(_ *plugin.Request, c *plugin.Candidate) string {
	for i := range f.wants {
		w := &f.wants[i]
		value, has := c.Endpoint.Labels.Get(w.name)
		if has != (w.in != nil) || has && !slices.Contains(w.in, value) {
			return w.reason
		}
	}
	return ""
}
