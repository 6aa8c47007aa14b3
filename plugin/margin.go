// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"math"
)

// Margin is how far from the best a score may be and still count as near it: by
// Within, or by a Share of the best, whichever is more.
type Margin struct {
	Within float64 `json:"within"`
	Share  float64 `json:"share"`
}

// NewMargin reads the options of a picker that has a margin and nothing else.
func NewMargin(o Options) (m Margin, err error) {
	if err := o(&m); err != nil {
		return Margin{}, err
	}
	if m.Within < 0 || m.Share < 0 {
		return Margin{}, errors.New("within and share: must not be negative")
	}
	return m, nil
}

// Least is the least score that is near the best. There is at least one score.
func (m Margin) Least(scores []float64) float64 {
	best := scores[0]
	for _, s := range scores {
		if s > best {
			best = s
		}
	}
	return best - max(m.Within, m.Share*math.Abs(best))
}
