// SPDX-License-Identifier: Apache-2.0

package session

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/plugin"
)

// No more than sessionsMax are remembered, and of those used last at least half as many.
func TestSessionsAreBounded(t *testing.T) {
	for most := 1; most <= 9; most++ {
		made, err := New(func(into any) error {
			return json.Unmarshal(fmt.Appendf(nil, `{"sessionsMax": %d}`, most), into)
		})
		if err != nil {
			t.Fatal(err)
		}
		a := made.(*affinity)
		now := time.Unix(0, 0)
		endpoint := plugin.Candidate{Endpoint: &inference.Endpoint{ID: "e"}}
		for i := range 5 * most {
			a.Chosen(&plugin.Request{Now: now, Session: fmt.Sprint(i)}, &endpoint)
			known, recent := 0, 0
			for k := range i + 1 {
				if _, is := a.last(&plugin.Request{Now: now, Session: fmt.Sprint(k)}); is {
					if known++; k > i-(most+1)/2 {
						recent++
					}
				}
			}
			if known > most || recent < min(i+1, (most+1)/2) {
				t.Fatalf("sessionsMax %d: after %d sessions %d are remembered, %d of the last", most, i+1, known, recent)
			}
		}
	}
}
