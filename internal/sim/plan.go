// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math/rand/v2"
	"time"

	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/sim/check"
)

// Plan is what is decided before a run.
type Plan struct {
	Seed     uint64 // draws delays, losses, and the like
	Terms    lease.Terms
	Gateway  int64 // how wrong its clock's rate is, in millionths
	Attempts int   // max_attempts
	Loose    bool  // allow_transport_fence
	Net      Net
	Nodes    []Node
	Requests []Ask
	Faults   []Fault
	Calm     time.Duration // when faults end

	long bool // answers, while it is drawn
}

// Net is how messages fare while nothing is cut.
type Net struct {
	Delay  time.Duration // up to
	Hold   float64       // chance that one is held for up to HoldMax
	Lose   float64       // of the control stream: a connection that broke with it inside
	Repeat float64       // a dispatch or control message arrives twice
	Stale  float64       // a dispatch meets a connection that was closed
	Split  float64       // time passes between a guard's check and its write

	HoldMax time.Duration
}

// Node is one host with an engine, and a guard unless it is bare.
type Node struct {
	Bare  bool
	Lock  bool          // guards hold an exclusive lock on the engine
	Clock int64         // how wrong the rate is, in millionths
	Abort time.Duration // up to: from an abort until the engine has stopped
	Token time.Duration // of decoding
	Busy  float64       // chance of a 503 of the engine's own
	Err   float64       // chance of an error event, after which the engine goes on
}

// Ask is one client's request.
type Ask struct {
	At     time.Duration
	Keyed  bool
	Whole  bool // not streamed
	Prompt int
	Tokens int
	Leaves time.Duration // after At; 0: never
}

// Strike is one kind of fault.
type Strike string

// Faults. For says how long those last that do not end by themselves.
const (
	CutUp        Strike = "cut-up"        // nothing from the node reaches the gateway
	CutDown      Strike = "cut-down"      // nothing from the gateway reaches the node
	Cut          Strike = "cut"           // both
	StopGuard    Strike = "stop-guard"    // SIGSTOP
	StopEngine   Strike = "stop-engine"   //
	StopGateway  Strike = "stop-gateway"  //
	Suspend      Strike = "suspend"       // the host: its CLOCK_MONOTONIC stands still too
	CrashGuard   Strike = "crash-guard"   // and restart
	CrashEngine  Strike = "crash-engine"  // and restart
	CrashGateway Strike = "crash-gateway" // and restart
	Reboot       Strike = "reboot"        // the host
	ReplaceGuard Strike = "replace-guard" // a new one starts; without a lock the old one lives on
	Reset        Strike = "reset"         // a middlebox resets every data connection of the node
	Reconnect    Strike = "reconnect"     // the control stream
	Alias        Strike = "alias"         // control messages reach another node's guard
	Drain        Strike = "drain"         // the gateway gives up what it has in flight
	JournalDown  Strike = "journal-down"  // first deltas are not confirmed
	HoldAll      Strike = "hold"          // every message of the node is held for up to a while
)

// strikes are drawn from.
var strikes = []Strike{
	CutUp, CutUp, CutDown, CutDown, Cut, Cut, StopGuard, StopGuard, StopEngine, StopGateway, Suspend, CrashGuard, CrashEngine,
	CrashGateway, CrashGateway, CrashGuard, Reboot, ReplaceGuard, Reset, Reset, Reconnect, Reconnect, Alias, Drain, JournalDown, HoldAll, HoldAll,
}

// Fault is one fault. On is the node.
type Fault struct {
	At   time.Duration
	What Strike
	On   int
	For  time.Duration
}

// Draw makes the plan of a seed.
func Draw(seed uint64) *Plan {
	r := rand.New(rand.NewPCG(seed, 0x9a))
	ms := func(low, high int) time.Duration { return time.Duration(low+r.IntN(high-low+1)) * time.Millisecond }
	pick := func(of ...float64) float64 { return of[r.IntN(len(of))] }
	p := &Plan{Seed: seed, Attempts: 2 + r.IntN(2), Loose: r.IntN(4) == 0}
	p.Terms = lease.Terms{
		TTL:      time.Duration(1+r.IntN(2)) * time.Second,
		DriftPPM: []int64{1_000, 20_000, 100_000, 100_000}[r.IntN(4)],
		Tick:     time.Millisecond,
	}
	p.Terms.Heartbeat = p.Terms.TTL / 5
	drift := func() int64 {
		d := p.Terms.DriftPPM
		return []int64{d, -d, 0, r.Int64N(2*d+1) - d}[r.IntN(4)]
	}
	p.Gateway = drift()
	p.Net = Net{
		Delay: ms(1, 20), Hold: pick(0, 0.02, 0.1, 0.3), HoldMax: ms(50, 1500), Lose: pick(0, 0.02, 0.2),
		Repeat: pick(0, 0.05, 0.3), Stale: pick(0, 0, 0.2), Split: pick(0, 0.1, 0.5),
	}
	for range 2 + r.IntN(2) {
		p.Nodes = append(p.Nodes, Node{
			Bare: r.IntN(8) == 0, Lock: r.IntN(4) > 0, Clock: drift(),
			Abort: ms(0, 1)*time.Duration(r.IntN(1500)) + time.Millisecond, Token: ms(5, 80), Busy: pick(0, 0, 0, 0.2), Err: pick(0, 0, 0.2),
		})
	}
	if r.IntN(4) == 0 {
		p.atTheEdge(r)
	}
	length := time.Duration(6+r.IntN(5)) * time.Second
	for range 3 + r.IntN(6) {
		a := Ask{At: ms(50, int(length.Milliseconds())-2000), Keyed: r.IntN(2) == 0, Whole: r.IntN(4) == 0, Prompt: 1 + r.IntN(200), Tokens: 3 + r.IntN(30)}
		if r.IntN(3) == 0 {
			a.Prompt = 1 + r.IntN(4000)
		}
		if p.long {
			a.Tokens *= 1 + r.IntN(12)
		}
		if r.IntN(5) == 0 {
			a.Leaves = ms(1, 1500)
		}
		p.Requests = append(p.Requests, a)
	}
	for i := range r.IntN(7) {
		f := Fault{
			At: ms(50, int(length.Milliseconds())-500), What: strikes[r.IntN(len(strikes))], On: r.IntN(len(p.Nodes)), For: ms(20, 3000),
		}
		if i > 0 && r.IntN(3) == 0 { // troubles come in company
			f.At, f.On = min(p.Faults[i-1].At+ms(0, 150), length), p.Faults[i-1].On
		}
		p.Faults = append(p.Faults, f)
	}
	p.Calm = length
	return p
}

// atTheEdge lets the gateway's clock run as fast as it may and the guards' as
// slow, while long answers are decoded quickly: what is wrong by a little at the
// end of a lease shows.
func (p *Plan) atTheEdge(r *rand.Rand) {
	p.Terms.TTL, p.Terms.DriftPPM = time.Second, 100_000
	p.Terms.Heartbeat = p.Terms.TTL / 5
	p.Gateway = p.Terms.DriftPPM
	for i := range p.Nodes {
		p.Nodes[i].Clock = -p.Terms.DriftPPM
		p.Nodes[i].Token = time.Duration(4+r.IntN(10)) * time.Millisecond
	}
	p.long = true
}

// until is when a run is over: after the faults everything has time to end.
func (p *Plan) until() time.Duration { return p.Calm + 2*totalLimit + 4*p.Terms.Wait() }

// Limits of an attempt in every plan.
const (
	firstOutputLimit = 4 * time.Second
	idleLimit        = 3 * time.Second
	totalLimit       = 8 * time.Second
)

var budget = check.Budget{Ratio: 0.2, MinPerSecond: 1}

func (p *Plan) rules() check.Rules {
	slow := million - p.Terms.DriftPPM
	b := budget
	b.MinPerSecond = b.MinPerSecond * million / float64(slow)
	return check.Rules{
		// The gateway's own wait, by a clock that is as slow as it may be.
		VerdictBy: time.Duration(int64(p.Terms.Wait()+time.Millisecond)*million/slow) + time.Millisecond,
		Budget:    b,
	}
}
