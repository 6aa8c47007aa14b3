// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"
)

// Duration is a field of a plugin's options that holds a duration, as it was
// written. It takes whatever is there, so that Read can say of a bare number that
// it needs a unit, and not that it is no text.
type Duration struct{ written []byte }

// UnmarshalJSON keeps what was written.
func (d *Duration) UnmarshalJSON(written []byte) error {
	d.written = bytes.Clone(written)
	return nil
}

// Read is the duration of the option with that name, 0 or more, or unset where
// none was written.
func (d Duration) Read(name string, unset time.Duration) (time.Duration, error) {
	if d.written == nil || string(d.written) == "null" {
		return unset, nil
	}
	var text string
	wrong := json.Unmarshal(d.written, &text)
	v, err := time.ParseDuration(text)
	if wrong != nil || err != nil || v < 0 {
		return 0, fmt.Errorf("%s %s: must be a duration such as 1s or 500ms", name, d.written)
	}
	return v, nil
}
