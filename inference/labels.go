// SPDX-License-Identifier: Apache-2.0

package inference

import (
	"maps"
	"slices"
	"strings"
)

// Labels are words that an operator gave an endpoint. They are one text, so that
// endpoints can be compared; NewLabels makes it.
type Labels string

// NewLabels makes labels of names and values. Neither may have a line break, nor
// a name an equals sign.
func NewLabels(values map[string]string) Labels {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(values)) {
		b.WriteString("\n" + name + "=" + values[name])
	}
	if b.Len() > 0 {
		b.WriteByte('\n')
	}
	return Labels(b.String())
}

// Get returns the value of a label. It allocates nothing.
func (l Labels) Get(name string) (value string, ok bool) {
	for rest := string(l); len(rest) > 1; {
		line := rest[1:]
		end := strings.IndexByte(line, '\n')
		if value, ok := strings.CutPrefix(line[:end], name); ok && value != "" && value[0] == '=' {
			return value[1:], true
		}
		rest = line[end:]
	}
	return "", false
}
