// SPDX-License-Identifier: Apache-2.0

package flow_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule"
)

// service is a pool with a number of places where every request takes as long as
// its tokens, and flows that always have requests waiting.
type service struct {
	q      *flow.Queue
	fleet  fleet
	now    time.Time
	rnd    *rand.Rand
	shapes map[string]func(*rand.Rand) (prompt, output int)
	served map[string]float64 // tokens, by flow
	under  []served
	most   float64 // cost of one request
}

type served struct {
	r      *flow.Request
	output int
	ends   time.Time
}

func (s *service) arrive(id string) {
	prompt, output := s.shapes[id](s.rnd)
	r := &flow.Request{
		Fairness: id, Owner: output,
		Ask: schedule.Ask{Arrived: s.now, Prompt: inference.Tokens{N: prompt}},
	}
	if err := s.q.Arrive(s.now, r, &s.fleet); err != nil {
		panic(err)
	}
}

func (s *service) run(requests int) {
	for id := range s.shapes {
		for range 30 {
			s.arrive(id)
		}
	}
	for n := 0; n < requests; {
		for _, d := range s.q.Pump(s.now, &s.fleet) {
			n++
			id, output := d.Request.Fairness, d.Request.Owner.(int)
			cost := float64(d.Request.Ask.Prompt.N + 2*output)
			s.served[id] += cost
			s.most = max(s.most, cost)
			s.under = append(s.under, served{d.Request, output, s.now.Add(time.Duration(cost) * time.Millisecond)})
			s.arrive(id) // it is backlogged
		}
		first := 0
		for i := range s.under {
			if s.under[i].ends.Before(s.under[first].ends) {
				first = i
			}
		}
		u := s.under[first]
		s.under = append(s.under[:first], s.under[first+1:]...)
		s.now = u.ends
		s.q.Done(u.r, u.r.Ask.Prompt.N, u.output)
		s.fleet.places = 1
	}
}

// Flows that all have requests waiting get equal tokens, however their requests
// are shaped. The gap between two is within twice the largest request, and what
// is under way (VTC, arXiv 2401.00588, theorem 4.4).
func TestEqualFlowsGetEqualTokens(t *testing.T) {
	for _, places := range []int{1, 16} {
		t.Run(fmt.Sprintf("%d places", places), func(t *testing.T) {
			s := &service{
				q: flow.New(flow.Config{}), now: start, rnd: rand.New(rand.NewPCG(1, uint64(places))), served: map[string]float64{},
				shapes: map[string]func(*rand.Rand) (int, int){
					"chat":  func(r *rand.Rand) (int, int) { return 50 + r.IntN(500), 50 + r.IntN(400) },
					"rag":   func(r *rand.Rand) (int, int) { return 2000 + r.IntN(6000), 20 + r.IntN(100) },
					"story": func(r *rand.Rand) (int, int) { return 20 + r.IntN(50), 1000 + r.IntN(2000) },
					"mixed": func(r *rand.Rand) (int, int) { return 1 + r.IntN(8000), 1 + r.IntN(2000) },
				},
			}
			s.fleet.places = places
			s.run(3000)
			sum, squares, low, high := 0.0, 0.0, math.Inf(1), 0.0
			for _, x := range s.served {
				sum += x
				squares += x * x
				low, high = min(low, x), max(high, x)
			}
			if jain := sum * sum / (float64(len(s.served)) * squares); jain < 0.99 {
				t.Errorf("Jain's index is %.4f, want 0.99: %v", jain, s.served)
			}
			if gap, bound := high-low, 2*s.most*float64(1+places); gap > bound {
				t.Errorf("the gap is %.0f tokens, want at most %.0f: %v", gap, bound, s.served)
			}
		})
	}
}

// A tenant with a hundred requests waiting does not delay one with a single one
// beyond its turn (FLW-6).
func TestOneClientBesideAHundred(t *testing.T) {
	g := newRig(t, flow.Config{})
	for i := range 100 {
		g.queue(fmt.Sprint("t1-", i), of("t1"))
	}
	g.place(10)
	g.queue("t2", of("t2"))
	got := g.place(2)
	if got[0] != "t2" && got[1] != "t2" {
		t.Errorf("decided %v, t2 should be one of two", got)
	}
}
