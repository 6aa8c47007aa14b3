// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"slices"
	"sync"
	"testing"
)

// lanes are sets of nodes that runs use one after the other.
var lanes laneSet

type laneSet struct {
	mu   sync.Mutex
	made int
	free []*lane
}

// A lane is the space of a gateway and those of replicas.
type lane struct{ nodes []*node } // the first is the gateway's

// take returns a lane with so many nodes.
func (s *laneSet) take(t *testing.T, nodes int) *lane {
	t.Helper()
	s.mu.Lock()
	for i, l := range s.free {
		if len(l.nodes) >= nodes {
			s.free = slices.Delete(s.free, i, i+1)
			s.mu.Unlock()
			return l
		}
	}
	s.made++
	number := s.made
	s.mu.Unlock()
	l := &lane{}
	for i := range nodes {
		n, err := newNode(number, i)
		if err != nil {
			t.Fatal(err)
		}
		l.nodes = append(l.nodes, n)
	}
	for _, n := range l.nodes[1:] {
		if err := l.nodes[0].reach(n); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func (s *laneSet) give(l *lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, l)
}

func (s *laneSet) close() {
	for _, l := range s.free {
		for _, n := range l.nodes {
			n.close()
		}
	}
}

// A way is a path between the gateway and a replica.
type way struct {
	addr string
	port int // 0: all
}

// dataWay and controlWay are the two. A relay is on the replica's side of a cut.
func (b *replica) dataWay() way {
	if b.relay != nil {
		return way{b.node.near, 0}
	}
	return way{b.node.addr, dataPort}
}

// link is all ways.
func (b *replica) link() []way {
	if b.relay != nil {
		return []way{{b.node.addr, 0}, {b.node.near, 0}}
	}
	return []way{{b.node.addr, 0}}
}

func (b *replica) controlWay() way { return way{b.node.addr, controlPort} }

// cut drops everything on these ways from now on: towards the replica, towards
// the gateway, or both.
func (r *run) cut(toReplica, toGateway bool, ways ...way) {
	r.t.Helper()
	gateway := r.lane.nodes[0].addr
	var list []cut
	for _, w := range ways {
		if toReplica {
			list = append(list, cut{gateway, w.addr, w.port})
		}
		if toGateway {
			list = append(list, cut{w.addr, gateway, w.port})
		}
	}
	r.must(change("add", list))
	r.tell("cut %v: to the replica %v, to the gateway %v", ways, toReplica, toGateway)
	r.cuts = append(r.cuts, list...)
}

// heal ends all cuts.
func (r *run) heal() {
	if err := change("delete", r.cuts); err != nil {
		r.t.Error(err)
	}
	r.cuts = nil
}
