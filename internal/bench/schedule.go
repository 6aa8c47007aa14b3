// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math/rand/v2"
	"sync"
	"time"
)

// An arrival is one request that is due.
type arrival struct {
	at     int64 // when; 0: as soon as somebody is free to send it
	tokens int   // of its answer
	n      uint64
}

// schedule hands out arrivals in order. It does not wait for answers: a slow
// target makes arrivals late, and their latency counts from when they were due.
type schedule struct {
	mu     sync.Mutex
	rnd    *rand.Rand
	load   Load
	from   int64 // when the first arrival after the fill is due
	next   float64
	filled int
	n      uint64
	end    int64 // no arrival from here on
}

// newSchedule begins at a time. The first load.Fill arrivals are spread over the
// ramp and their answers are of every length up to a whole one, as if they had
// begun at different times: so the load is steady from the ramp's end on, and
// there is no beat of streams that end and begin together.
func newSchedule(load Load, start, end int64) *schedule {
	s := &schedule{rnd: rand.New(rand.NewPCG(load.Seed, 0)), load: load, from: start, end: end}
	if load.Fill > 0 {
		s.from += int64(load.Ramp)
	}
	return s
}

// take is the next arrival, false when there are no more.
func (s *schedule) take(t int64) (arrival, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t >= s.end && s.n >= uint64(s.load.Least) {
		return arrival{}, false
	}
	a := arrival{tokens: s.load.Shape.Tokens, n: s.n}
	switch {
	case s.filled < s.load.Fill:
		a.at = s.from - int64(s.load.Ramp) + int64(s.load.Ramp)*int64(s.filled)/int64(s.load.Fill)
		s.filled++
		// A permutation, so that short ones are not all the early ones.
		k := s.filled * stride(s.load.Fill) % s.load.Fill
		a.tokens = max(1, a.tokens*(k+1)/s.load.Fill)
	case s.load.Rate > 0:
		a.at = s.from + int64(s.next*float64(time.Second))
		gap := 1.0
		if s.load.Poisson {
			gap = s.rnd.ExpFloat64()
		}
		s.next += gap / s.load.Rate
		if a.at >= s.end {
			return arrival{}, false
		}
	}
	s.n++
	return a, true
}

// stride is a number without a common divisor with n, about 0.6 of it.
func stride(n int) int {
	for k := max(n*618/1000, 1); ; k++ {
		if gcd(k, n) == 1 {
			return k
		}
	}
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
