// SPDX-License-Identifier: Apache-2.0

// Package lease decides when an attempt behind a guard is known to be silent:
// what a gateway may grant, until when, and what proves that a grant is over.
//
// A lease is a guard's permission to publish for one attempt until a moment on
// the guard's own clock. A Link is what one gateway knows of one guard: the
// newest session of the control stream, the guard's incarnation, its newest
// heartbeat, and every lease that was granted and is not known to be over. The
// other side, which obeys, is internal/guard/roster.
//
// The package is a core: it sends nothing, and what it is told of time is an
// argument. It refuses to decide what a failure means or whether an attempt is
// repeated (internal/attempt does), and nothing in it is about what the client
// sees: that is the gate's alone.
package lease

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/headgate/headgate/inference"
)

// Boottime is a moment on a guard's own clock, in nanoseconds: CLOCK_BOOTTIME,
// because CLOCK_MONOTONIC stands still while a host is suspended. Moments of
// two guards, or of two boots of one host, can't be compared.
type Boottime int64

// Add returns the moment that much later.
func (b Boottime) Add(d time.Duration) Boottime { return b + Boottime(d) }

// Sub returns how much later b is than o.
func (b Boottime) Sub(o Boottime) time.Duration { return time.Duration(b - o) }

// Incarnation is one life of a guard.
type Incarnation struct {
	Guard string   // configured; one endpoint address has one
	Start Boottime // when it started: later lives of one boot have larger ones
	Boot  string   // the kernel's boot id
}

// String is the form on the wire: id/counter/boot.
func (i Incarnation) String() string {
	return fmt.Sprintf("%s/%d/%s", i.Guard, i.Start, i.Boot)
}

// ParseIncarnation reads what String writes.
func ParseIncarnation(s string) (Incarnation, error) {
	rest, boot, ok1 := cutLast(s)
	guard, start, ok2 := cutLast(rest)
	n, err := strconv.ParseInt(start, 10, 64)
	if !ok1 || !ok2 || err != nil || guard == "" || boot == "" || n < 0 {
		return Incarnation{}, fmt.Errorf("%q is no incarnation of the form id/counter/boot", s)
	}
	return Incarnation{Guard: guard, Start: Boottime(n), Boot: boot}, nil
}

func cutLast(s string) (before, after string, found bool) {
	if i := strings.LastIndexByte(s, '/'); i >= 0 {
		return s[:i], s[i+1:], true
	}
	return s, "", false
}

// Gateway is one life of a gateway. A guard refuses the dispatches and renewals
// of an older generation once it has heard of a newer one.
type Gateway struct {
	ID         string
	Generation uint64
}

// Key names an attempt. N is its lease's epoch too.
type Key struct {
	Request inference.RequestID
	N       int
}

func (k Key) String() string { return fmt.Sprintf("%s/%d", k.Request, k.N) }

func (k Key) compare(o Key) int {
	if c := strings.Compare(string(k.Request), string(o.Request)); c != 0 {
		return c
	}
	return k.N - o.N
}

// Grant lets a guard publish for an attempt until NotAfter. The first one of an
// attempt rides in its dispatch, later ones, the renewals, on the control
// stream.
type Grant struct {
	Key
	Guard    Incarnation // whose clock NotAfter is of
	NotAfter Boottime
	Gateway  Gateway
}

// Revoke takes the permission back.
type Revoke struct {
	Key
	Guard   Incarnation
	Gateway Gateway

	// NotAfter is the latest that was granted: the guard may forget the attempt
	// then. 0 where the gateway can't know, after its restart.
	NotAfter Boottime
}

// Reason is why an attempt has ended at its guard.
type Reason uint8

// Reasons.
const (
	Revoked      Reason = iota + 1
	Expired             // the guard's own clock passed the deadline
	Finished            // the engine's answer was relayed to its end
	Closed              // the gateway closed the data connection
	EngineExited        // the engine's process is gone
)

var reasonNames = [...]string{"", "revoked", "expired", "finished", "closed", "engine_exited"}

func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return "unknown"
}

// proof is what a guard's word about an end is worth.
func (r Reason) proof() inference.Proof {
	switch r {
	case Revoked, Closed, Finished:
		return inference.ProofCancelAck
	case Expired:
		return inference.ProofLeaseExpired
	case EngineExited:
		return inference.ProofDead
	}
	return inference.NoProof
}

// Stopped says whether an engine still computes an attempt that has ended.
type Stopped uint8

// Answers.
const (
	StoppedUnknown Stopped = iota
	StoppedYes
	StoppedNo
)

var stoppedNames = [...]string{"unknown", "yes", "no"}

func (s Stopped) String() string { return stoppedNames[s] }

// End is a guard's word that it publishes nothing more of an attempt, and never
// will: the acknowledgement of a revoke, or said unasked.
type End struct {
	Key
	Gateway   string // id, of the one that dispatched it or revoked it unseen
	Guard     Incarnation
	Reason    Reason
	Published int64 // bytes
	Engine    Stopped
}

// Terms are what gateway and guards agree on.
type Terms struct {
	TTL       time.Duration
	Heartbeat time.Duration

	// DriftPPM bounds how wrong the rate of each of the two clocks may be, in
	// millionths.
	DriftPPM int64

	// Tick is added to every wait: two clocks tick at different moments.
	Tick time.Duration
}

// DefaultTerms are those of docs/failover.md.
var DefaultTerms = Terms{TTL: 10 * time.Second, Heartbeat: 2 * time.Second, DriftPPM: 1000, Tick: time.Millisecond}

// Wait is how long after a heartbeat was received, by the gateway's clock, a
// lease granted from it is over on the guard's, however both clocks are wrong:
// ttl × (1+d)/(1−d), rounded up, and one tick.
func (t Terms) Wait() time.Duration {
	const million = 1_000_000
	fast, slow := million+t.DriftPPM, million-t.DriftPPM
	return time.Duration((int64(t.TTL)*fast+slow-1)/slow) + t.Tick
}
