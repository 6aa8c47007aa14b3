// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"slices"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/mutation"
)

// Link is what one gateway knows of one guard. It has one owner at a time: who
// shares it locks it.
//
// Every time that it is given is the gateway's; with Heartbeat it must have
// been read after the message was received.
type Link struct {
	terms Terms
	self  Gateway
	until time.Time // the gateway's own lease on its requests; zero: for good

	session uint64
	up      bool

	known   Incarnation // newest heard of; zero: none
	alone   bool        // it holds its engine's lock, so older ones are gone
	retired []string    // boots that are over

	// G and t are one heartbeat's pair, of the newest G in this session.
	paired   bool
	g        Boottime
	t        time.Time
	leases   map[Key]*held
	heldKeys []Key // of leases, in order
}

// held is a lease that is not known to be over.
type held struct {
	first    Grant
	fencing  bool
	expiry   time.Time // by then it is over, whatever was delivered
	notAfter Boottime  // latest granted; 0: not known
}

// retiredMax bounds the memory of boots. A boot that was forgotten could pass
// for new only if its guard spoke in the newest session, long after its host
// was restarted that many times.
const retiredMax = 16

// NewLink begins with a guard that was never heard.
func NewLink(terms Terms, self Gateway) *Link {
	return &Link{terms: terms, self: self, leases: map[Key]*held{}}
}

// SetTerms changes what grants are made by. What was granted keeps its end.
func (l *Link) SetTerms(terms Terms) { l.terms = terms }

// Own bounds what is granted by the gateway's own lease on its requests: after
// that moment nothing is, because another gateway may take them over and waits
// no longer than from then. The zero time is no bound.
func (l *Link) Own(until time.Time) { l.until = until }

// Open begins a session, with a number higher than any before. Until its first
// heartbeat nothing is granted.
func (l *Link) Open(session uint64) {
	if session > l.session {
		l.session, l.up = session, true
		l.unpair()
	}
}

func (l *Link) unpair() {
	if !mutation.NoHeartbeat && !mutation.OldSession && !mutation.HeartbeatOfOldSession {
		l.paired = false
	}
}

// Close ends a session.
func (l *Link) Close(session uint64) {
	if session == l.session {
		l.up = false
		l.unpair()
	}
}

// Heartbeat is a guard's word about itself.
type Heartbeat struct {
	G     Boottime // its clock when it was sent
	Guard Incarnation

	// Alone says that this incarnation holds the exclusive lock of its engine,
	// so that no older one can be at work.
	Alone bool
}

// Ignored is why a heartbeat does not count.
type Ignored uint8

// Reasons to ignore a heartbeat.
const (
	Counts         Ignored = iota
	OldSession             // a connection that was replaced still held it
	OldIncarnation         // a guard that was replaced sent it
	OtherGuard             // another guard answers at the address: an error, to be shown
	OldTime                // a later one was received already
)

var ignoredNames = [...]string{"", "old_session", "old_incarnation", "other_guard", "old_time"}

func (i Ignored) String() string { return ignoredNames[i] }

// Heard is what a heartbeat told.
type Heard struct {
	Ignored Ignored
	New     bool // the first of this incarnation

	// Fenced are the attempts whose guard is proved gone.
	Fenced []Proved
}

// Proved is an attempt that is known to be silent, and why.
type Proved struct {
	Key
	Proof inference.Proof
}

// Heartbeat takes one heartbeat of a session, received before now.
func (l *Link) Heartbeat(now time.Time, session uint64, hb Heartbeat) Heard {
	switch {
	case (session != l.session || !l.up) && !mutation.OldSession:
		return Heard{Ignored: OldSession}
	case l.known != Incarnation{} && hb.Guard.Guard != l.known.Guard && !mutation.GuardIDIgnored:
		return Heard{Ignored: OtherGuard}
	case hb.Guard != l.known && !l.newer(hb.Guard):
		return Heard{Ignored: OldIncarnation}
	}
	var heard Heard
	if hb.Guard != l.known {
		heard.New = true
		l.replace(hb)
		heard.Fenced = l.fencedByDeath()
	}
	if l.paired && hb.G <= l.g {
		heard.Ignored = OldTime
		return heard
	}
	if !mutation.NewestGOldT || !l.paired {
		l.t = now
	}
	if !mutation.NewestTOldG || !l.paired {
		l.g = hb.G
	}
	l.paired = true
	return heard
}

// newer reports whether an incarnation may replace the one that is known. Boots
// have no order of their own; one that is over does not come back.
func (l *Link) newer(i Incarnation) bool {
	switch {
	case l.known == Incarnation{} || mutation.UnorderedIncarnation:
		return true
	case i.Boot == l.known.Boot:
		return i.Start > l.known.Start
	}
	return !slices.Contains(l.retired, i.Boot)
}

func (l *Link) replace(hb Heartbeat) {
	if l.known.Boot != hb.Guard.Boot && l.known != (Incarnation{}) {
		l.retired = append(l.retired, l.known.Boot)
		if len(l.retired) > retiredMax {
			l.retired = l.retired[1:]
		}
	}
	l.known, l.alone, l.paired = hb.Guard, hb.Alone, false
}

// fencedByDeath drops the leases of the same guard's incarnations that can't be
// at work any more. Without the lock on the engine the old one may live on
// unseen, and its leases are waited out. Another guard proves nothing: one may
// answer first at the address of a lease that was inherited.
func (l *Link) fencedByDeath() []Proved {
	if !l.alone && !mutation.NoEngineLock {
		return nil
	}
	var fenced []Proved
	for _, key := range slices.Clone(l.heldKeys) {
		if of := l.leases[key].first.Guard; (of.Guard == l.known.Guard || mutation.GuardIDIgnored) && of != l.known {
			fenced = append(fenced, Proved{key, inference.ProofDead})
			l.drop(key)
		}
	}
	return fenced
}

// Candidate reports whether an attempt may be dispatched to the guard. A guard
// that was silent for half a lease is none: what is left of a lease would end
// with the next heartbeat lost.
func (l *Link) Candidate(now time.Time) bool {
	if mutation.NoHeartbeat {
		return true
	}
	return l.up && l.paired && now.Sub(l.t) < l.terms.TTL/2 && l.owns(now)
}

func (l *Link) owns(now time.Time) bool { return l.until.IsZero() || now.Before(l.until) }

// Dispatch makes the initial lease of a new attempt. It reports false if the
// guard is no candidate, or the attempt has a lease.
func (l *Link) Dispatch(now time.Time, key Key) (Grant, bool) {
	if !l.Candidate(now) || l.leases[key] != nil {
		return Grant{}, false
	}
	g := Grant{Key: key, Guard: l.known, Gateway: l.self}
	var expiry time.Time
	if mutation.NoHeartbeat && !l.paired {
		expiry = now.Add(l.terms.Wait())
	} else {
		g.NotAfter, expiry = l.grant(now)
	}
	l.add(&held{first: g, expiry: expiry, notAfter: g.NotAfter})
	return g, true
}

// grant is until when a lease may be given from the newest heartbeat, and when
// it is over for certain. The guard's time is never extrapolated: the drift of
// the heartbeat's age would escape the margin.
func (l *Link) grant(now time.Time) (Boottime, time.Time) {
	if mutation.Extrapolate {
		return l.g.Add(now.Sub(l.t) + l.terms.TTL), now.Add(l.terms.Wait())
	}
	wait := l.terms.Wait()
	if mutation.NoMargin {
		wait = l.terms.TTL
	}
	return l.g.Add(l.terms.TTL), l.t.Add(wait)
}

// First is an attempt's initial lease as it was dispatched. A resend carries it
// unchanged: the guard forgets an attempt when the last grant that it knows of
// is over, and would take a later one for a new attempt.
func (l *Link) First(key Key) (Grant, bool) {
	h := l.leases[key]
	if h == nil {
		return Grant{}, false
	}
	g := h.first
	if mutation.ResendFreshLease {
		g.NotAfter, h.expiry = l.grant(l.t)
	}
	return g, true
}

// Renewals are the grants that the newest heartbeat allows, each to be sent at
// once. Once fencing has begun a lease is not renewed, or the wait would never
// end, and one that has expired is over.
func (l *Link) Renewals(now time.Time) []Grant {
	if !l.up || !l.paired || !l.owns(now) {
		return nil
	}
	notAfter, expiry := l.grant(now)
	var grants []Grant
	for _, key := range l.heldKeys {
		h := l.leases[key]
		if h.fencing && !mutation.RenewWhileFencing || h.first.Guard != l.known || !now.Before(h.expiry) || notAfter <= h.notAfter {
			continue
		}
		// Counted when it is sent: an unacknowledged grant is a grant.
		h.notAfter = notAfter
		if (expiry.After(h.expiry) || mutation.ExpiryLastGrant) && !mutation.ExpiryForgets {
			h.expiry = expiry
		}
		g := h.first
		g.NotAfter = notAfter
		grants = append(grants, g)
	}
	return grants
}

// Fence begins the fencing of an attempt, whose gate is closed by now. The
// revoke is to be sent at once and, because it may be lost, again with each
// heartbeat: see Revokes. It reports false if the attempt has no lease.
func (l *Link) Fence(key Key) (Revoke, bool) {
	h := l.leases[key]
	if h == nil {
		return Revoke{}, false
	}
	h.fencing = true
	return l.revoke(h), true
}

func (l *Link) revoke(h *held) Revoke {
	return Revoke{Key: h.first.Key, Guard: h.first.Guard, Gateway: l.self, NotAfter: h.notAfter}
}

// Revokes are those of all attempts that are being fenced.
func (l *Link) Revokes() []Revoke {
	var all []Revoke
	for _, key := range l.heldKeys {
		if h := l.leases[key]; h.fencing {
			all = append(all, l.revoke(h))
		}
	}
	return all
}

// Ended takes a guard's word about an attempt. It reports false where nothing
// follows from it: it is another guard's, another incarnation's while the
// attempt's own may live, about an attempt that is not held, or about an answer
// that was relayed whole and may still be on its way here.
func (l *Link) Ended(end End) (Proved, bool) {
	h := l.leases[end.Key]
	if h == nil || !l.speaksFor(end.Guard, h.first.Guard) || end.Reason == Finished && !h.fencing {
		return Proved{}, false
	}
	l.drop(end.Key)
	return Proved{end.Key, end.Reason.proof()}, true
}

// speaksFor reports whether what one incarnation says is true of another: its
// own, or one that it has replaced for certain.
func (l *Link) speaksFor(speaker, subject Incarnation) bool {
	return mutation.AnyAck || speaker == subject ||
		l.alone && speaker == l.known && speaker.Guard == subject.Guard
}

// Expire drops the leases that are over by the gateway's clock, fencing or not:
// expired is final.
func (l *Link) Expire(now time.Time) []Proved {
	var over []Proved
	for _, key := range slices.Clone(l.heldKeys) {
		if !now.Before(l.leases[key].expiry) {
			over = append(over, Proved{key, inference.ProofLeaseExpired})
			l.drop(key)
		}
	}
	return over
}

// NextExpiry is when Expire has something to do, and false if there is no lease.
func (l *Link) NextExpiry() (time.Time, bool) {
	var first time.Time
	for i, key := range l.heldKeys {
		if at := l.leases[key].expiry; i == 0 || at.Before(first) {
			first = at
		}
	}
	return first, len(l.heldKeys) > 0
}

// Release drops the lease of an attempt that is over and needs no fence: its
// answer is complete, or its end proved in another way.
func (l *Link) Release(key Key) { l.drop(key) }

// Inherit takes over an attempt that a process before this one left unfinished.
// What that one granted is not known, but only that it granted from heartbeats
// which it had received, so every lease is over a whole wait after from: the
// start of this process if it is certain that the old one is gone, else the end
// of the old one's ownership. The attempt is being fenced from the beginning.
func (l *Link) Inherit(key Key, guard Incarnation, from time.Time) {
	wait := l.terms.Wait()
	switch {
	case mutation.RestartTrustsJournal:
		wait = 0
	case mutation.RestartNoMargin:
		wait = l.terms.TTL
	}
	l.add(&held{first: Grant{Key: key, Guard: guard, Gateway: l.self}, fencing: true, expiry: from.Add(wait)})
}

// Listed is one attempt in the list that a guard sends when a session begins.
type Listed struct {
	Key
	Active bool
	End    End // of one that has ended
}

// Resync compares a guard's list with the leases. An end proves what it always
// proves. Absence proves nothing: the dispatch may be on its way, and the revoke
// that Revokes repeats will be there before it or after it. Attempts that are
// active there and have no lease here are to be revoked: nobody reads them.
func (l *Link) Resync(guard Incarnation, list []Listed) (proved []Proved, revoke []Revoke) {
	for _, item := range list {
		switch {
		case !item.Active:
			if p, ok := l.Ended(item.End); ok {
				proved = append(proved, p)
			}
		case l.leases[item.Key] == nil:
			revoke = append(revoke, Revoke{Key: item.Key, Guard: guard, Gateway: l.self})
		}
	}
	if mutation.AbsenceIsProof {
		for _, key := range slices.Clone(l.heldKeys) {
			if !slices.ContainsFunc(list, func(i Listed) bool { return i.Key == key }) {
				proved = append(proved, Proved{key, inference.ProofCancelAck})
				l.drop(key)
			}
		}
	}
	return proved, revoke
}

// Held is the number of leases that are not known to be over.
func (l *Link) Held() int { return len(l.leases) }

// Known is the newest incarnation heard of, zero if none.
func (l *Link) Known() Incarnation { return l.known }

func (l *Link) add(h *held) {
	key := h.first.Key
	if l.leases[key] != nil {
		return
	}
	l.leases[key] = h
	i, _ := slices.BinarySearchFunc(l.heldKeys, key, Key.compare)
	l.heldKeys = slices.Insert(l.heldKeys, i, key)
}

func (l *Link) drop(key Key) {
	if l.leases[key] == nil {
		return
	}
	delete(l.leases, key)
	i, _ := slices.BinarySearchFunc(l.heldKeys, key, Key.compare)
	l.heldKeys = slices.Delete(l.heldKeys, i, i+1)
}
