// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/sim/check"
)

// strike lets one fault happen, and end.
func (w *world) strike(f *Fault) {
	if f.On >= len(w.nodes) {
		return
	}
	n := w.nodes[f.On]
	l := w.gateway.links[n.i]
	end := func(undo func()) { w.at(min(w.now+f.For, w.plan.Calm), undo) }
	switch f.What {
	case CutUp, CutDown, Cut:
		if f.What != CutDown {
			n.cutUp++
			end(func() { n.heal(&n.cutUp, &n.heldUp) })
		}
		if f.What != CutUp {
			n.cutDown++
			end(func() { n.heal(&n.cutDown, &n.heldDn) })
		}
	case StopGuard:
		g := n.guard()
		g.stop()
		end(g.resume)
	case StopEngine:
		e := n.engine
		e.stop()
		end(e.resume)
	case StopGateway:
		g := w.gateway
		g.stop()
		end(func() {
			w.fact(check.Fact{What: check.GatewayResumed})
			g.resume()
		})
	case Suspend:
		w.suspend(n, end)
	case CrashGuard:
		n.crashGuards()
		n.startGuard()
	case CrashEngine:
		w.crashEngine(n, end)
	case CrashGateway:
		w.crashGateway()
	case Reboot:
		n.crashHost()
	case ReplaceGuard:
		if n.set.Lock {
			n.crashGuards()
		} else {
			n.guard().hangUp()
		}
		n.startGuard()
	case Reset:
		for _, c := range slices.Clone(n.conns) {
			c.breakOff()
		}
	case Reconnect:
		w.gateway.do(l.connect)
	case Alias:
		n.alias++
		w.gateway.do(l.connect)
		end(func() {
			n.alias--
			w.gateway.do(w.gateway.links[n.i].connect)
		})
	case Drain:
		w.gateway.do(w.gateway.drain)
	case JournalDown:
		w.journalDown++
		end(func() { w.journalDown-- })
	case HoldAll:
		n.slow += f.For
		end(func() { n.slow -= f.For })
	}
}

// heal ends a cut; what hung in connections goes on, in order.
func (n *node) heal(cut *int, held *[]func()) {
	if *cut--; *cut > 0 {
		return
	}
	waiting := *held
	*held = nil
	for _, send := range waiting {
		send()
	}
}

func (w *world) suspend(n *node, end func(func())) {
	g, e, began, boot := n.guard(), n.engine, w.now, n.boot
	g.stop()
	e.stop()
	end(func() {
		if n.boot == boot {
			n.lag += w.now - began
		}
		g.resume()
		e.resume()
	})
}

func (n *node) crashGuards() {
	for _, g := range n.guards {
		if !g.dead {
			g.crash(false)
		}
	}
}

func (w *world) crashEngine(n *node, end func(func())) {
	dead := n.engine
	if dead.dead {
		return
	}
	dead.crash()
	for _, g := range n.guards {
		g.after(w.between(time.Millisecond, 100*time.Millisecond), func() { g.engineExited(dead) })
	}
	end(func() {
		if n.engine == dead {
			n.startEngine()
		}
	})
}

// crashHost reboots the node: nobody sends a FIN.
func (n *node) crashHost() {
	if !n.engine.dead {
		n.engine.crash()
	}
	for _, g := range n.guards {
		if !g.dead {
			g.crash(true)
		}
	}
	n.start()
}

// crashGateway kills the gateway and starts another at once. Where its whole host
// went down nobody closes its connections.
func (w *world) crashGateway() {
	old := w.gateway
	if old.dead {
		return
	}
	old.kill()
	w.fact(check.Fact{What: check.GatewayDied})
	silently := w.chance(0.5)
	for _, id := range w.records {
		if r := w.journal[id]; r.before != nil && w.now-r.since < 50*time.Millisecond && r.outcome == 0 {
			*r = *r.before
		}
	}
	for _, id := range sortedIDs(old.flights) {
		f := old.flights[id]
		if f.conn != nil {
			f.conn.reset, f.conn.hole = silently, silently
			f.conn.close()
		}
		f.c.disconnected()
	}
	w.gateway = newGateway(w, old.self.Generation+1)
}

// drain gives up what is in flight, as a gateway does that must stop now.
func (g *gateway) drain() {
	for _, id := range sortedIDs(g.flights) {
		g.flights[id].step(attempt.Stopped{Err: inference.Errorf(inference.ShuttingDown, "shutting down")})
	}
}

// becalm ends every fault. What was cut heals, what stood still goes on: each
// has planned its own end for now or before.
func (w *world) becalm() {
	w.calm = true
	w.fact(check.Fact{What: check.FaultsOver})
}
