// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/mutation"
)

// node is one host: a clock, an engine, and the guard at its address.
type node struct {
	w       *world
	i       int
	set     *Node
	id      inference.EndpointID
	clock   clock
	boot    int
	lag     time.Duration // how long the host was suspended in this boot
	guards  []*guard      // every life; the last one is at the address
	engine  *engine
	lives   int // of the engine
	cutUp   int
	cutDown int
	heldUp  []func() // by the cut, of connections that hang
	heldDn  []func()
	slow    time.Duration // everything is held for up to so long
	alias   int           // how many faults send its control messages elsewhere
	conns   []*conn       // data connections that are open somewhere
}

func newNode(w *world, i int) *node {
	n := &node{w: w, i: i, set: &w.plan.Nodes[i], id: inference.EndpointID(fmt.Sprintf("http://node-%d:80", i))}
	n.start()
	return n
}

// start boots the host.
func (n *node) start() {
	n.boot++
	n.lag = 0
	up := n.w.between(5*time.Second, 100*time.Second)
	if n.boot > 1 {
		up = n.w.between(time.Second, 5*time.Second)
	}
	n.clock = clock{base: int64(up), since: n.w.now, ppm: n.set.Clock}
	n.startEngine()
	n.startGuard()
}

func (n *node) guard() *guard { return n.guards[len(n.guards)-1] }

// boottime is CLOCK_BOOTTIME.
func (n *node) boottime() int64 { return n.clock.at(n.w.now) }

// told is what the guard reads.
func (n *node) told() lease.Boottime {
	b := lease.Boottime(n.boottime())
	if mutation.MonotonicClock {
		b = b.Add(-n.lag)
	}
	return b
}
