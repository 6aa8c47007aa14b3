// SPDX-License-Identifier: Apache-2.0

// Package roster decides what a guard lets pass: which attempts may start,
// which may publish this very chunk, and which are over.
//
// A Roster is one incarnation's memory: the attempts that it knows, each with
// the deadline of its lease, and the highest epoch of each request. It is a
// core: the guard's shell reads CLOCK_BOOTTIME, holds one lock around each
// call, and holds the lock of one attempt from Check to Wrote, so that no revoke
// is acknowledged between the check of a chunk and its write. What the shell is
// to abort is returned. The roster refuses to parse what engines say and to
// decide what a gateway makes of an end.
package roster

import (
	"maps"
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/mutation"
)

// Refusal is why an attempt may not start, in the words of the wire.
type Refusal string

// Refusals. Required is the shell's: a request came without a lease.
const (
	Accepted         Refusal = ""
	StaleEpoch       Refusal = "stale_epoch"       // a newer attempt of the request was seen
	Duplicate        Refusal = "duplicate_attempt" // it was started, or revoked
	WrongIncarnation Refusal = "wrong_incarnation"
	Expired          Refusal = "lease_expired"
	Required         Refusal = "lease_required"
	StaleGeneration  Refusal = "stale_generation" // a newer life of the gateway was heard
)

// Status is the HTTP status that goes with a refusal.
func (r Refusal) Status() int {
	switch r {
	case StaleEpoch, Duplicate:
		return 409
	case WrongIncarnation, StaleGeneration:
		return 412
	case Expired:
		return 410
	case Required:
		return 428
	}
	return 200
}

// Roster is the memory of one incarnation of a guard.
type Roster struct {
	self        lease.Incarnation
	leaseMax    time.Duration
	generations map[string]heard // by gateway
	requests    map[inference.RequestID]*request
	order       []inference.RequestID // of requests, sorted
	late        int
}

// heard is the newest generation of a gateway. It is forgotten when every grant
// that an older one can have made is over.
type heard struct {
	generation uint64
	forget     lease.Boottime
}

// request is what is known of one request. It is forgotten when no grant of it
// is open any more, so their number is bounded by what arrives in leaseMax.
type request struct {
	highest  int            // epoch
	attempts []*attempt     // rarely more than one
	forget   lease.Boottime // no grant of it is later
}

// attempt is one that was started or revoked here.
type attempt struct {
	key      lease.Key
	gateway  string
	deadline lease.Boottime
	ended    lease.Reason // 0: may publish
	written  int64
	engine   lease.Stopped
	stopping bool // only ever set where mutation.AckBeforeStop is
}

// New makes the roster of a guard that has just started. leaseMax is the longest
// ttl that any gateway may use: a later deadline is cut to it, and what is
// revoked without a deadline is remembered for so long.
func New(self lease.Incarnation, leaseMax time.Duration) *Roster {
	return &Roster{
		self: self, leaseMax: leaseMax,
		generations: map[string]heard{}, requests: map[inference.RequestID]*request{},
	}
}

// Self is the incarnation that the roster is of.
func (r *Roster) Self() lease.Incarnation { return r.self }

// Hello notes a gateway's generation, and reports false if it is an old one.
func (r *Roster) Hello(now lease.Boottime, g lease.Gateway) bool {
	known, ok := r.generations[g.ID]
	if ok && g.Generation < known.generation {
		return false
	}
	if !ok {
		maps.DeleteFunc(r.generations, func(_ string, h heard) bool { return now >= h.forget })
	}
	r.generations[g.ID] = heard{g.Generation, now.Add(r.leaseMax)}
	return true
}

// Admit decides on a dispatch, and starts the attempt if it may. The order of
// the checks is that of what they mean: an attempt that was started is a
// duplicate, however late its copy comes.
func (r *Roster) Admit(now lease.Boottime, g lease.Grant) Refusal {
	entry := r.requests[g.Request]
	switch {
	case !r.Hello(now, g.Gateway) && !mutation.NoGeneration:
		return StaleGeneration
	case g.Guard != r.self && !r.anyIncarnation(g):
		return WrongIncarnation
	case entry != nil && g.N < entry.highest && !mutation.NoEpoch && !mutation.LowerEpoch:
		return StaleEpoch
	case entry != nil && g.N == entry.highest && !mutation.NoEpoch && !mutation.EqualEpoch:
		return Duplicate
	case r.deadline(now, g) <= now && !mutation.PastAccepted:
		return Expired
	}
	a := r.attempt(g.Key)
	*a = attempt{key: g.Key, gateway: g.Gateway.ID, deadline: r.deadline(now, g)}
	r.requests[g.Request].keep(a.deadline)
	return Accepted
}

func (r *Roster) anyIncarnation(g lease.Grant) bool {
	return mutation.NoIncarnation || mutation.NoHeartbeat && g.Guard == lease.Incarnation{}
}

// deadline is where a grant ends. A longer one than anybody may give is cut.
func (r *Roster) deadline(now lease.Boottime, g lease.Grant) lease.Boottime {
	longest := now.Add(r.leaseMax)
	if mutation.RelativeTTL || mutation.NoHeartbeat && g.NotAfter == 0 {
		return longest
	}
	if mutation.GuardRoundsUp {
		return g.NotAfter + lease.Boottime(10*time.Millisecond) - g.NotAfter%lease.Boottime(10*time.Millisecond)
	}
	return min(g.NotAfter, longest)
}

// attempt finds or makes the entry of an attempt.
func (r *Roster) attempt(key lease.Key) *attempt {
	entry := r.requests[key.Request]
	if entry == nil {
		entry = &request{}
		r.requests[key.Request] = entry
		i, _ := slices.BinarySearch(r.order, key.Request)
		r.order = slices.Insert(r.order, i, key.Request)
	}
	entry.highest = max(entry.highest, key.N)
	if a := entry.find(key.N); a != nil {
		return a
	}
	a := &attempt{key: key}
	entry.attempts = append(entry.attempts, a)
	return a
}

func (r *request) find(n int) *attempt {
	for _, a := range r.attempts {
		if a.key.N == n {
			return a
		}
	}
	return nil
}

func (r *request) keep(until lease.Boottime) { r.forget = max(r.forget, until) }

func (r *Roster) find(key lease.Key) *attempt {
	if entry := r.requests[key.Request]; entry != nil {
		return entry.find(key.N)
	}
	return nil
}

// Renew takes a renewal, and reports whether the lease is longer now. Expired is
// final: nothing revives it.
func (r *Roster) Renew(now lease.Boottime, g lease.Grant) bool {
	a := r.find(g.Key)
	if a == nil || g.Guard != r.self && !mutation.NoIncarnation || !r.Hello(now, g.Gateway) && !mutation.NoGeneration {
		return false
	}
	if mutation.Revive && a.ended == lease.Expired {
		a.ended = 0
	} else if a.ended != 0 || now >= a.deadline {
		return false
	}
	a.deadline = max(a.deadline, r.deadline(now, g))
	r.requests[g.Request].keep(a.deadline)
	return true
}

// Check reports whether one chunk of an attempt may be written now. Where it may
// not because of the time, Tick ends the attempt.
func (r *Roster) Check(now lease.Boottime, key lease.Key) bool {
	a := r.find(key)
	return a != nil && a.ended == 0 && (now < a.deadline || mutation.CheckOnce)
}

// Wrote notes a chunk that was written. A pause between check and write can't
// be prevented, only noticed: the shell reads the clock again after the write.
// If the lease was over by then the write is counted as late, and Tick ends the
// attempt, if it has not done so, and forgotten it, while the write was under way.
func (r *Roster) Wrote(now lease.Boottime, key lease.Key, bytes int) (late bool) {
	a := r.find(key)
	if a == nil {
		r.late++
		return true
	}
	a.written += int64(bytes)
	if now < a.deadline || mutation.RecheckBeforeWrite {
		return false
	}
	r.late++
	return true
}

// Revoke ends an attempt and returns the acknowledgement. abort says that it was
// publishing, so that its engine request is to be aborted; the acknowledgement
// does not wait for that. Of an attempt that was never seen a tombstone stays,
// so that its dispatch, which may be on its way, finds its epoch taken.
func (r *Roster) Revoke(now lease.Boottime, v lease.Revoke) (end lease.End, abort bool) {
	a := r.find(v.Key)
	if a == nil {
		if mutation.NoTombstone {
			return lease.End{Key: v.Key, Guard: r.self, Reason: lease.Revoked}, false
		}
		a = r.attempt(v.Key)
		a.gateway, a.ended, a.engine = v.Gateway.ID, lease.Revoked, lease.StoppedYes
	}
	until := now.Add(r.leaseMax)
	if v.Guard == r.self && v.NotAfter > 0 {
		until = min(v.NotAfter, until)
	}
	r.requests[v.Request].keep(until)
	if a.ended == 0 {
		abort = true
		if mutation.AckBeforeStop {
			a.stopping = true
			return lease.End{Key: v.Key, Guard: r.self, Reason: lease.Revoked, Published: a.written}, true
		}
		a.ended = lease.Revoked
	}
	return r.end(a), abort
}

func (r *Roster) end(a *attempt) lease.End {
	return lease.End{Key: a.key, Gateway: a.gateway, Guard: r.self, Reason: a.ended, Published: a.written, Engine: a.engine}
}

// Finish ends an attempt for a reason of the shell's own: its answer was
// relayed whole, or the gateway closed the connection. It reports false if the
// attempt had ended.
func (r *Roster) Finish(key lease.Key, why lease.Reason) (lease.End, bool) {
	a := r.find(key)
	if a == nil || a.ended != 0 {
		return lease.End{}, false
	}
	a.ended = why
	if why == lease.Finished {
		a.engine = lease.StoppedYes
	}
	return r.end(a), true
}

// EngineExited ends every attempt. It is called before anybody is told of the
// exit, so that nothing which the engine left in a buffer is published after.
func (r *Roster) EngineExited() []lease.End {
	var ends []lease.End
	r.each(func(a *attempt) {
		a.engine = lease.StoppedYes
		if a.ended == 0 {
			a.ended = lease.EngineExited
			ends = append(ends, r.end(a))
		}
	})
	return ends
}

// EngineStopped notes what came of an abort.
func (r *Roster) EngineStopped(key lease.Key, stopped lease.Stopped) {
	if a := r.find(key); a != nil {
		a.engine = stopped
		if a.stopping && a.ended == 0 {
			a.ended = lease.Revoked
		}
	}
}

// Tick ends the attempts whose deadline has passed, with no help from anyone,
// and returns them: each engine request is to be aborted. It forgets requests of
// which no grant is open any more: a dispatch that still comes is too late.
func (r *Roster) Tick(now lease.Boottime) []lease.End {
	var ends []lease.End
	r.each(func(a *attempt) {
		if a.ended == 0 && now >= a.deadline && !mutation.CheckOnce {
			a.ended = lease.Expired
			ends = append(ends, r.end(a))
			if mutation.Revive {
				r.requests[a.key.Request].keep(now.Add(r.leaseMax))
			}
		}
	})
	r.order = slices.DeleteFunc(r.order, func(id inference.RequestID) bool {
		entry := r.requests[id]
		forget := now >= entry.forget || mutation.ForgetEarly
		if forget = forget && !slices.ContainsFunc(entry.attempts, func(a *attempt) bool { return a.ended == 0 }); forget {
			delete(r.requests, id)
		}
		return forget
	})
	return ends
}

// Next is when Tick has something to do, and false if there is nothing to wait
// for.
func (r *Roster) Next() (lease.Boottime, bool) {
	var next lease.Boottime
	found := false
	least := func(at lease.Boottime) {
		if !found || at < next {
			next, found = at, true
		}
	}
	for _, id := range r.order {
		least(r.requests[id].forget)
	}
	r.each(func(a *attempt) {
		if a.ended == 0 {
			least(a.deadline)
		}
	})
	return next, found
}

// List is what the guard tells a gateway when a session begins: the gateway's own
// attempts. It would revoke those of others, which it does not know.
func (r *Roster) List(gateway string) []lease.Listed {
	var list []lease.Listed
	r.each(func(a *attempt) {
		if a.gateway != gateway {
			return
		}
		item := lease.Listed{Key: a.key, Active: a.ended == 0}
		if !item.Active {
			item.End = r.end(a)
		}
		list = append(list, item)
	})
	return list
}

// Late is the number of writes that turned out to be late.
func (r *Roster) Late() int { return r.late }

// Requests is the number of requests that are remembered.
func (r *Roster) Requests() int { return len(r.requests) }

func (r *Roster) each(do func(*attempt)) {
	for _, id := range r.order {
		for _, a := range r.requests[id].attempts {
			do(a)
		}
	}
}
