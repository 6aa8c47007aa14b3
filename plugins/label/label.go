// SPDX-License-Identifier: Apache-2.0

// Package label takes out endpoints by the labels that the configuration gives
// them.
package label

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/headgate/headgate/plugin"
)

type filter struct{ wants []want }

// want is what one label must be.
type want struct {
	name    string
	in      []string // one of these; nil: it must not be there at all
	missing string   // the reason where it is not there
	other   string   // the end of the reason where it is another: what was wanted
	wrong   string   // the reason without the value

	// The reasons by the value that is there. A filter is asked for every request
	// and answers the same each time, so that a reason is put together once.
	reasons map[string]string
}

const (
	shownMax   = 8   // values that a reason names
	reasonsMax = 256 // values of one label whose reasons are kept; further ones are not named
)

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
		other := listed(options.In[name])
		f.wants = append(f.wants, want{
			name: name, in: options.In[name], reasons: map[string]string{},
			missing: "has no " + name, other: other, wrong: name + " is " + other,
		})
	}
	for _, name := range options.Absent {
		f.wants = append(f.wants, want{
			name: name, reasons: map[string]string{},
			other: "and must not be there", wrong: name + " must not be there",
		})
	}
	return f, nil
}

// listed is "not a", or "not one of a, b and 3 more".
func listed(values []string) string {
	if len(values) == 1 {
		return "not " + shown(values[0])
	}
	var names []string
	for _, v := range values[:min(len(values), shownMax)] {
		names = append(names, shown(v))
	}
	text := "not one of " + strings.Join(names, ", ")
	if more := len(values) - len(names); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

func shown(value string) string {
	if value == "" {
		return `""`
	}
	return value
}

// Filter names the first label that is not as it must be.
func (f filter) Filter(_ *plugin.Request, c *plugin.Candidate) string {
	for i := range f.wants {
		w := &f.wants[i]
		value, has := c.Endpoint.Labels.Get(w.name)
		switch {
		case !has && w.in == nil, has && slices.Contains(w.in, value):
		case !has:
			return w.missing
		default:
			return w.reason(value)
		}
	}
	return ""
}

// reason says what the label is and what was wanted.
func (w *want) reason(value string) string {
	if known := w.reasons[value]; known != "" {
		return known
	}
	if len(w.reasons) >= reasonsMax {
		return w.wrong
	}
	text := w.name + " is " + shown(value) + ", " + w.other
	w.reasons[value] = text
	return text
}
