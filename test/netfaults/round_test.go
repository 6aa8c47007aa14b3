// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"fmt"
	"testing"
)

func TestRounds(t *testing.T) {
	for round := range *roundsFlag {
		seed := *seedFlag + uint64(round)
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			for i, f := range faults {
				for j, p := range points {
					for k, guarded := range []bool{false, true} {
						// A short round is every other cell, another half with each seed.
						if f.expects(guarded) == nil || testing.Short() && (i+j+k+int(seed%2))%2 == 0 {
							continue
						}
						t.Run(f.name+"/"+p.name+map[bool]string{true: "/guarded", false: "/bare"}[guarded], func(t *testing.T) {
							t.Parallel()
							play(t, seed, f, p, guarded, nil)
						})
					}
				}
			}
		})
	}
}

// play plays one cell. edit changes what was drawn.
func play(t *testing.T, seed uint64, f fault, p point, guarded bool, edit func(*story)) *story {
	t.Helper()
	for {
		s := playOnce(t, seed, f, p, guarded, edit)
		if !s.missed {
			return s
		}
		table.count("runs played again, because a lease or a limit ran out before the fault", 1)
	}
}

func playOnce(t *testing.T, seed uint64, f fault, p point, guarded bool, edit func(*story)) *story {
	s := &story{run: newRun(t, seed, 2), fault: f, want: f.expects(guarded), point: p}
	s.guarded, s.starts, s.relayed, s.stall = guarded, f.starts, f.hits == relayHit, s.want.stall
	s.draw()
	if edit != nil {
		edit(s)
	}
	if s.point.over && s.ask.stream {
		s.pool = append(s.pool, idles...) // the marker's limit is what counts
	} else {
		s.pool = append(s.pool, s.want.limits...)
	}
	s.start()
	s.reach()
	s.strike()
	got := s.settle()
	s.outlive()
	s.finish(got)
	return s
}

// draw decides what is asked.
func (s *story) draw() {
	one := func(n int) bool { return s.rnd.IntN(n) == 0 }
	s.ask = ask{path: "/v1/chat/completions", stream: !one(3), tokens: 2 + s.rnd.IntN(12), n: 1, pad: 4000 + s.rnd.IntN(30000)}
	if one(4) {
		s.ask.path = "/v1/completions"
	}
	if one(4) {
		s.ask.n = 2
	}
	if one(3) {
		s.journal = "strict"
	}
	if one(3) || s.fault.name == "kill gateway" {
		s.ask.key = "key-1"
	}
	if s.guarded {
		s.relayed = s.relayed || one(2)
		if s.want == fenced && s.fault.name != "cut control" && one(2) {
			s.stall = stallTime // the engine speaks while the lease lasts
		}
		for _, b := range s.replicas {
			b.boot = s.rnd.IntN(2) * s.rnd.IntN(1_000_000)
		}
	}
	if s.fault.hits == relayHit {
		s.pool = append(s.pool, "health: {interval: 0s}", "scrape: {interval: 0s}") // nothing else must be what is held
	} else {
		s.pool = append(s.pool, "health: {interval: 100ms, timeout: 300ms}")
	}
}
