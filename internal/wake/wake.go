// SPDX-License-Identifier: Apache-2.0

// Package wake decides when a pool without engines asks for some, and when it
// lets them go.
//
// It asks as soon as a request waits that no endpoint can take, again and again
// while that is so, and lets engines go after a time without requests. Who
// starts and stops engines is none of its business.
//
// The package is a core: it is told the time and what the pool looks like, and
// returns what is to be done. A Pool is not safe for concurrent use.
package wake

import "time"

// How often engines are asked for while requests wait.
const (
	// Remind is the time after which it is asked again although it went well: who
	// was told may have forgotten, and to ask twice is no harm.
	Remind = 30 * time.Second

	pauseMin = time.Second      // after a failure, doubled with each one in a row
	pauseMax = 30 * time.Second // of these
)

// View is a pool at one moment.
type View struct {
	Waiting int // requests that wait for a place
	Running int // requests that have one
	Ready   int // endpoints that could take a request
	Unknown int // endpoints of which nobody knows yet whether they could

	// Active is when a request last came or ended. Zero: none has.
	Active time.Time
}

// Action is what is to be done now.
type Action uint8

// Actions.
const (
	Nothing Action = iota
	Ask            // for engines
	Release        // them
)

// Pool is what is to be remembered of one pool. The zero value has just begun and
// never lets engines go.
type Pool struct {
	idle time.Duration

	wanted bool
	held   bool      // there may be engines that were not let go
	since  time.Time // of held
	again  time.Time // nothing is done before
	pause  time.Duration
}

// Configure sets after how long without requests engines are let go; 0 is never.
func (p *Pool) Configure(idle time.Duration) { p.idle = idle }

// Wanted reports whether requests waited for an engine at the last look.
func (p *Pool) Wanted() bool { return p.wanted }

// Look returns what is to be done, and when to look again if nothing happens
// before; the zero time is never. It is called when a request begins to wait, when
// endpoints change, and when what was to be done has been, after Done.
func (p *Pool) Look(now time.Time, v View) (Action, time.Time) {
	if v.Ready > 0 {
		p.hold(now)
		p.again, p.pause = time.Time{}, 0
	}
	p.wanted = v.Waiting > 0 && v.Ready == 0 && v.Unknown == 0
	rests := v.Waiting+v.Running == 0 && p.held && p.idle > 0
	switch due := p.due(v.Active); {
	case !p.wanted && !rests:
		if p.held && p.idle > 0 {
			// Nobody tells when the last request ends.
			return Nothing, now.Add(p.idle)
		}
		return Nothing, time.Time{}
	case now.Before(p.again):
		return Nothing, p.again
	case p.wanted:
		p.hold(now)
		return Ask, time.Time{}
	case now.Before(due):
		return Nothing, due
	}
	return Release, time.Time{}
}

// hold notes that there are engines, or soon will be.
func (p *Pool) hold(now time.Time) {
	if !p.held {
		p.held, p.since = true, now
	}
}

// due is when engines have been idle for long enough.
func (p *Pool) due(active time.Time) time.Time {
	if active.Before(p.since) {
		active = p.since
	}
	return active.Add(p.idle)
}

// Done tells that what Look returned was done, or could not be.
func (p *Pool) Done(now time.Time, a Action, ok bool) {
	switch {
	case !ok:
		p.Failed(now)
	case a == Release:
		p.held, p.again, p.pause = false, time.Time{}, 0
	default:
		p.again, p.pause = now.Add(Remind), 0
	}
}

// Failed tells that something went wrong: what was to be done, or later an engine
// that was asked for. It is tried again after a pause.
func (p *Pool) Failed(now time.Time) {
	p.pause = min(max(2*p.pause, pauseMin), pauseMax)
	p.again = now.Add(p.pause)
}
