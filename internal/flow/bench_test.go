// SPDX-License-Identifier: Apache-2.0

package flow_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	pools "github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugins/standard"
)

// BenchmarkQueue is one request in and one out, with so many waiting meanwhile:
// what the queue itself costs, with an endpoint that takes whoever is first.
func BenchmarkQueue(b *testing.B) {
	for _, shape := range []struct {
		name         string
		flows, bands int
	}{{"fcfs", 1, 1}, {"flows", 1000, 3}} {
		for _, depth := range []int{100, 10_000, 100_000} {
			b.Run(fmt.Sprintf("%s/waiting=%d", shape.name, depth), func(b *testing.B) {
				q, places := flow.New(flow.Config{TTL: time.Hour}), &anyone{}
				rnd := rand.New(rand.NewPCG(1, 2))
				requests := make([]flow.Request, depth+1)
				now := start
				arrive := func(r *flow.Request) {
					*r = flow.Request{
						Ask:      schedule.Ask{Arrived: now, Prompt: inference.Tokens{N: 100 + rnd.IntN(4000)}},
						Priority: rnd.IntN(shape.bands), Fairness: fairnessIDs[rnd.IntN(shape.flows)], Bytes: 1000,
					}
					if err := q.Arrive(now, r, places); err != nil {
						b.Fatal(err)
					}
				}
				for i := range depth {
					arrive(&requests[i])
				}
				free := &requests[depth]
				b.ReportAllocs()
				for b.Loop() {
					now = now.Add(time.Microsecond)
					arrive(free)
					places.n = 1
					d := q.Pump(now, places)
					if len(d) != 1 || d[0].Err != nil {
						b.Fatalf("%d decisions", len(d))
					}
					free = d[0].Request
					q.Done(free, -1, 150)
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
			})
		}
	}
}

// BenchmarkRefusal is a request that finds 100,000 others in a full queue, and one
// that takes the place of one of them.
func BenchmarkRefusal(b *testing.B) {
	const depth = 100_000
	for name, priority := range map[string]int{"refused": 0, "displaces": 1} {
		b.Run(name, func(b *testing.B) {
			q, places := flow.New(flow.Config{RequestsMax: depth, TTL: time.Hour}), &anyone{}
			arrive := func(i, priority int) (*flow.Request, error) {
				r := &flow.Request{
					Ask:      schedule.Ask{Arrived: start, Prompt: inference.Tokens{N: 100 + i%4000}},
					Priority: priority, Fairness: fairnessIDs[i%len(fairnessIDs)],
				}
				if err := q.Arrive(start, r, places); err != nil {
					return r, err
				}
				return r, nil
			}
			for i := range depth {
				if _, err := arrive(i, 0); err != nil {
					b.Fatal(err)
				}
			}
			q.Pump(start, places)
			i := 0
			for b.Loop() {
				// The flow with most in the queue can't displace another.
				r, err := arrive(999, priority)
				switch {
				case (err == nil) != (priority == 1):
					b.Fatal(err)
				case err == nil:
					if d := q.Pump(start, places); len(d) != 1 || d[0].Err.Code != inference.QueueFull {
						b.Fatalf("%d decisions", len(d))
					}
					q.Leave(r)
					if _, err := arrive(i, 0); err != nil {
						b.Fatal(err)
					}
				}
				i++
			}
		})
	}
}

var fairnessIDs = func() (ids [1000]string) {
	for i := range ids {
		ids[i] = fmt.Sprint("tenant-", i)
	}
	return ids
}()

// anyone is an endpoint with places that says nothing of what a request costs.
type anyone struct{ n int }

func (f *anyone) Room() bool           { return f.n > 0 }
func (f *anyone) Opens() time.Duration { return -1 }
func (f *anyone) Load() schedule.Load  { return schedule.Load{Endpoints: 1} }
func (f *anyone) Bid(ask *schedule.Ask) schedule.Bid {
	return schedule.Bid{Endpoint: "http://engine", Open: f.n > 0, Fresh: ask.Prompt.N, Output: 100, Prefill: time.Millisecond}
}
func (f *anyone) Take(*schedule.Ask) *schedule.Reservation { f.n--; return nil }
func (f *anyone) Pass(*schedule.Ask)                       {}

// BenchmarkQueueBook is the same with the whole policy: a book of 16 endpoints
// with full queues, prompts of 32 blocks that share their begin, and targets, so
// that a pump looks at many requests before it finds one that goes.
func BenchmarkQueueBook(b *testing.B) {
	for _, depth := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("waiting=%d", depth), func(b *testing.B) {
			profile, err := standard.Profile(standard.Default)
			if err != nil {
				b.Fatal(err)
			}
			book := schedule.NewBook(schedule.Config{
				Profile: profile, TTFT: schedule.TTFT{Base: time.Hour}, TPOT: 100 * time.Millisecond,
				Limits: schedule.Limits{Prefill: 250 * time.Millisecond},
			}, rand.New(rand.NewPCG(1, 2)))
			pool := &pools.Pool{Name: "p"}
			for i := range 16 {
				e := inference.Endpoint{ID: inference.EndpointID(fmt.Sprintf("http://e%d:80", i))}
				pool.Endpoints = append(pool.Endpoints, e)
			}
			q := flow.New(flow.Config{RefuseAt: flow.RefuseAtDefault})
			rnd := rand.New(rand.NewPCG(3, 4))
			now := start
			arrive := func() {
				r := &flow.Request{
					Ask: schedule.Ask{
						Arrived: now, Prompt: inference.Tokens{N: 2048}, PromptBytes: 32 * 256, Stream: true,
						Keys: make([]uint64, 32), Model: "m",
					},
					Fairness: fairnessIDs[rnd.IntN(20)],
				}
				group := rnd.Uint64N(200)
				for i := range r.Ask.Keys {
					r.Ask.Keys[i] = group<<32 + uint64(i)
					if i >= 24 {
						r.Ask.Keys[i] = rnd.Uint64()
					}
				}
				round := book.Begin(now, pool)
				if err := q.Arrive(now, r, round); err != nil {
					b.Fatal(err)
				}
				round.End()
			}
			for range depth {
				arrive()
			}
			type running struct {
				r     *flow.Request
				place *schedule.Reservation
			}
			var under []running
			pump := func() int {
				round := book.Begin(now, pool)
				decided := q.Pump(now, round)
				round.End()
				for _, d := range decided {
					if d.Err != nil {
						b.Fatal(d.Err)
					}
					d.Place.Accepted()
					under = append(under, running{d.Request, d.Place})
				}
				return len(decided)
			}
			pump()
			b.ReportAllocs()
			for b.Loop() {
				arrive()
				for pump() == 0 {
					now = now.Add(time.Millisecond)
					x := under[0]
					under = under[1:]
					x.place.FirstOutput(now)
					x.place.Finished(now, inference.Usage{Prompt: 2048, Completion: 100, Cached: -1})
					x.place.Release()
					q.Done(x.r, -1, 100)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
		})
	}
}
