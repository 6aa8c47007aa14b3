// SPDX-License-Identifier: Apache-2.0

package check

import (
	"fmt"

	"time"
)

// What names one kind of fact about a simulated world.
type What uint8

// Kinds of facts. Each says which fields it has beside At and What.
const (
	_              What = iota
	Arrived             // Request: a client's request was taken; Max attempts
	Dispatched          // Request, N, Leased: an attempt was sent
	Granted             // Request, N, Guard ("" for whichever), Clock: a lease until Clock was sent
	Started             // Request, N, Guard: a guard let the attempt start
	Checked             // Request, N, Guard, Clock: a guard's check let a chunk pass
	Written             // Request, N, Guard, Clock: the guard began to write it
	CountedLate         // Request, N, Guard: the guard noticed that a write was late
	Declared            // Request, N, Guard: the guard said that the attempt has ended
	GuardDied           // Guard
	FencingBegan        // Request, N: the gate was closed, for a guard to prove the rest
	Silenced            // Request, N: the gateway believes that the attempt is silent
	Delivered           // Request, N, Bytes: handed to the client's kernel
	Outcome             // Request, Word
	ClientLeft          // Request: and the gateway knows
	PlaceTaken          // Request, N
	PlaceFreed          // Request, N
	EngineBegan         // Request, N, Engine
	EngineEnded         // Request, N, Engine
	GatewayDied         //
	GatewayResumed      // after it stood still
	Leaked              // Word: something is left at the end
	FaultsOver          //
	whats
)

var whatNames = [whats]string{
	Arrived: "arrived", Dispatched: "dispatched", Granted: "granted", Started: "started", Checked: "checked",
	Written: "written", CountedLate: "counted_late", Declared: "declared", GuardDied: "guard_died",
	FencingBegan: "fencing", Silenced: "silenced", Delivered: "delivered", Outcome: "outcome", ClientLeft: "client_left",
	PlaceTaken: "place_taken", PlaceFreed: "place_freed", EngineBegan: "engine_began", EngineEnded: "engine_ended",
	GatewayDied: "gateway_died", GatewayResumed: "gateway_resumed", Leaked: "leaked", FaultsOver: "faults_over",
}

func (w What) String() string { return whatNames[w] }

// Resent marks the one attempt that follows a stale connection where no guard
// is: neither counted nor charged.
const Resent = "resent"

// Bytes says what a delivery was.
type Bytes uint8

// Deliveries.
const (
	Output     Bytes = iota + 1
	LastOutput       // the end marker, or the last byte of a whole body
	ErrorBytes       // an error of the gateway's own, before or after output
	PassedOn         // an engine's refusal
)

var bytesNames = [...]string{"", "output", "last_output", "error", "passed_on"}

func (b Bytes) String() string { return bytesNames[b] }

// A Fact is one thing that is true of a world, in the order in which it became
// so. Nobody in the world knows all of them.
type Fact struct {
	At      time.Duration // true time
	What    What
	Request string
	N       int
	Guard   string // incarnation
	Engine  string
	Clock   int64 // the guard's own
	Max     int
	Leased  bool
	Bytes   Bytes
	Word    string
}

func (f Fact) String() string {
	s := fmt.Sprintf("%12.6fs %s", f.At.Seconds(), f.What)
	add := func(format string, v any, is bool) {
		if is {
			s += fmt.Sprintf(format, v)
		}
	}
	add(" %s", f.Request, f.Request != "")
	add("/%d", f.N, f.N != 0)
	add(" guard=%s", f.Guard, f.Guard != "")
	add(" engine=%s", f.Engine, f.Engine != "")
	add(" clock=%d", f.Clock, f.Clock != 0)
	add(" max=%d", f.Max, f.Max != 0)
	add(" leased=%v", f.Leased, f.What == Dispatched)
	add(" %s", f.Bytes, f.Bytes != 0)
	add(" %s", f.Word, f.Word != "")
	return s
}

// Rules are the numbers that a world was told to keep.
type Rules struct {
	// VerdictBy is how long after its gate was closed an attempt may wait for a
	// proof, in true time, while the gateway runs.
	VerdictBy time.Duration

	Budget Budget
}

// Names of what World checks beyond the invariants above.
const (
	FencedFirst  = "I3"
	LeaseKept    = "I8"
	VerdictComes = "liveness"
)

// World judges a world by all that is true of it: I1 to I4, I6 to I8, I10 and
// the liveness lines. It knows what must hold and nothing of how it is held.
func World(facts []Fact, rules Rules) []Violation {
	w := &omniscient{rules: rules, attempts: map[name]*seen{}, requests: map[string]*told{}, died: map[string]bool{}}
	for i := range facts {
		w.see(&facts[i])
	}
	w.end()
	return w.found
}

type name struct {
	request string
	n       int
}

// seen is what is true of one attempt.
type seen struct {
	dispatched bool
	leased     bool
	newer      bool // a later attempt of the request was dispatched
	starts     int
	granted    map[string]int64 // latest deadline, by incarnation
	declared   map[string]bool  // ended, by incarnation
	lateDue    map[string]int   // late writes that are not counted yet
	fencingAt  time.Duration
	fencing    bool
	proved     bool
	taken      bool
	freed      bool
	engines    map[string]int
}

// told is what is true of one request.
type told struct {
	max       int
	attempts  int
	publisher int
	output    bool
	last      bool
	outcome   string
	left      bool
	resent    bool
	opened    bool // its next attempt is no retry
	lost      bool // its gateway died
}

type omniscient struct {
	rules    Rules
	attempts map[name]*seen
	order    []name
	requests map[string]*told
	asked    []string
	died     map[string]bool
	resumed  time.Duration
	firsts   int // of this life of the gateway, as the budget counts them
	retries  int
	found    []Violation
	now      time.Duration
}

func (w *omniscient) broke(invariant string, f *Fact, format string, args ...any) {
	w.found = append(w.found, Violation{
		Invariant: invariant, Request: f.Request,
		Saw: fmt.Sprintf("at %.6fs: attempt %d: %s", f.At.Seconds(), f.N, fmt.Sprintf(format, args...)),
	})
}

func (w *omniscient) attempt(f *Fact) *seen {
	key := name{f.Request, f.N}
	a := w.attempts[key]
	if a == nil {
		a = &seen{granted: map[string]int64{}, declared: map[string]bool{}, lateDue: map[string]int{}, engines: map[string]int{}}
		w.attempts[key] = a
		w.order = append(w.order, key)
	}
	return a
}

func (w *omniscient) request(f *Fact) *told {
	r := w.requests[f.Request]
	if r == nil {
		r = &told{}
		w.requests[f.Request] = r
		w.asked = append(w.asked, f.Request)
	}
	return r
}

func (w *omniscient) see(f *Fact) {
	w.now = f.At
	switch f.What {
	case Arrived:
		r := w.request(f)
		r.max, r.lost, r.opened = max(r.max, f.Max), false, true
	case Dispatched:
		w.dispatched(f)
	case Granted, Started, Checked, Written, CountedLate, Declared:
		w.atGuard(f)
	case GuardDied:
		w.died[f.Guard] = true
	case FencingBegan:
		a := w.attempt(f)
		a.fencing, a.fencingAt = true, f.At
	case Silenced:
		a := w.attempt(f)
		w.verdict(f, a)
		a.proved = true
	case Delivered:
		w.delivered(f)
	case Outcome:
		w.outcome(f)
	case ClientLeft:
		w.request(f).left = true
	case PlaceTaken:
		w.attempt(f).taken = true
	case PlaceFreed:
		w.attempt(f).freed = true
	case EngineBegan:
		w.attempt(f).engines[f.Engine]++
	case EngineEnded:
		w.attempt(f).engines[f.Engine]--
	case GatewayDied:
		w.gatewayDied()
	case GatewayResumed:
		w.resumed = f.At
	case Leaked:
		w.broke(NothingLeaks, f, "%s", f.Word)
	}
}

func (w *omniscient) dispatched(f *Fact) {
	r, a := w.request(f), w.attempt(f)
	switch {
	case f.Word == Resent:
		r.max++
		if r.resent {
			w.broke(Bounded, f, "a second resend")
		}
		r.resent = true
	case r.opened:
		w.firsts++
	default:
		w.retries++
	}
	r.opened = false
	switch {
	case r.output:
		w.broke(NoRepeat, f, "dispatched after output of attempt %d was delivered", r.publisher)
	case r.left:
		w.broke(ClientGone, f, "dispatched after the client had left")
	case a.dispatched:
		w.broke(FencedFirst, f, "dispatched twice")
	}
	if r.attempts++; r.attempts > r.max {
		w.broke(Bounded, f, "dispatched as number %d of at most %d", r.attempts, r.max)
	}
	a.dispatched, a.leased = true, f.Leased
	for n := 1; n < f.N; n++ {
		w.attempt(&Fact{Request: f.Request, N: n}).newer = true
	}
	if b := w.rules.Budget; float64(w.retries) > b.MinPerSecond*(window+f.At.Seconds())+b.Ratio*float64(w.firsts) {
		w.broke(Bounded, f, "retry %d is over the budget", w.retries)
	}
}

// atGuard sees what guards do. At fence level transport there is none.
func (w *omniscient) atGuard(f *Fact) {
	a := w.attempt(f)
	switch f.What {
	case Granted:
		a.granted[f.Guard] = max(a.granted[f.Guard], f.Clock)
	case Started:
		switch {
		case a.newer:
			w.broke(FencedFirst, f, "started by %s after the next one was dispatched", f.Guard)
		case a.proved:
			w.broke(FencedFirst, f, "started by %s after the gateway took the attempt to be silent", f.Guard)
		}
		if a.starts++; a.starts > 1 {
			w.broke(FencedFirst, f, "started %d times", a.starts)
		}
	case Checked:
		switch until := max(a.granted[f.Guard], a.granted[""]); {
		case a.newer:
			w.broke(FencedFirst, f, "a check of %s passed after the next one was dispatched", f.Guard)
		case f.Clock >= until:
			w.broke(LeaseKept, f, "a check of %s passed at %d, the lease was over at %d", f.Guard, f.Clock, until)
		case a.declared[f.Guard]:
			w.broke(LeaseKept, f, "a check of %s passed after it had declared the end", f.Guard)
		case a.proved:
			w.broke(FencedFirst, f, "a check of %s passed after the gateway took the attempt to be silent", f.Guard)
		case a.freed:
			w.broke(ClientGone, f, "a check of %s passed after the place was given back", f.Guard)
		}
	case Written:
		if a.declared[f.Guard] {
			w.broke(LeaseKept, f, "a write of %s began after it had declared the end", f.Guard)
		}
		if f.Clock >= max(a.granted[f.Guard], a.granted[""]) {
			a.lateDue[f.Guard]++
		}
	case CountedLate:
		a.lateDue[f.Guard]--
	case Declared:
		a.declared[f.Guard] = true
	}
}

// verdict: a proof comes within the longest lease, or as soon as the gateway
// runs again.
func (w *omniscient) verdict(f *Fact, a *seen) {
	if a.fencing && !a.proved && f.At > max(a.fencingAt+w.rules.VerdictBy, w.resumed) {
		w.broke(VerdictComes, f, "fenced %s after its gate was closed, %s is enough", f.At-a.fencingAt, w.rules.VerdictBy)
	}
}

func (w *omniscient) delivered(f *Fact) {
	r, a := w.request(f), w.attempt(f)
	switch {
	case r.outcome != "":
		w.broke(TrueOutcome, f, "%s is delivered after the outcome %s", f.Bytes, r.outcome)
	case r.last:
		w.broke(TrueOutcome, f, "%s is delivered after the end of the answer", f.Bytes)
	case f.Bytes == ErrorBytes:
		return
	case a.newer:
		w.broke(FencedFirst, f, "reaches the client after the next one was dispatched")
	case r.publisher != 0 && r.publisher != f.N:
		w.broke(OnePublisher, f, "reaches the client after attempt %d", r.publisher)
	}
	r.publisher = f.N
	r.output = r.output || f.Bytes != PassedOn
	r.last = r.last || f.Bytes == LastOutput
}

func (w *omniscient) outcome(f *Fact) {
	r := w.request(f)
	switch {
	case r.outcome != "":
		w.broke(TrueOutcome, f, "the outcome is %s, and was %s", f.Word, r.outcome)
	case f.Word == "completed" && !r.last:
		w.broke(TrueOutcome, f, "completed without the end of the answer")
	case f.Word != "completed" && r.last:
		w.broke(TrueOutcome, f, "%s, and the whole answer was delivered", f.Word)
	case (f.Word == "failed" || f.Word == "rejected") && r.output:
		w.broke(TrueOutcome, f, "%s, and output was delivered", f.Word)
	case f.Word == "rejected" && r.attempts > 0:
		w.broke(TrueOutcome, f, "rejected after %d attempts", r.attempts)
	}
	r.outcome = f.Word
}

// gatewayDied: what it held is gone, and its clients' connections with it.
func (w *omniscient) gatewayDied() {
	w.firsts, w.retries = 0, 0
	for _, r := range w.requests {
		r.lost = r.lost || r.outcome == ""
	}
	for _, a := range w.attempts {
		a.taken = false
		a.fencing = false
	}
}

func (w *omniscient) end() {
	over := func(request string, n int) *Fact { return &Fact{At: w.now, Request: request, N: n} }
	for _, key := range w.order {
		a, f := w.attempts[key], over(key.request, key.n)
		for guard, due := range a.lateDue {
			if due > 0 && !w.died[guard] {
				w.broke(LeaseKept, f, "%d late writes of %s are not counted", due, guard)
			}
		}
		for engine, running := range a.engines {
			if running > 0 {
				w.broke(NothingLeaks, f, "engine %s still computes it", engine)
			}
		}
		if a.taken && !a.freed {
			w.broke(NothingLeaks, f, "its place was never given back")
		}
		if a.fencing && !a.proved {
			if w.now > max(a.fencingAt+w.rules.VerdictBy, w.resumed) {
				w.broke(VerdictComes, over(key.request, key.n), "being fenced since %s, and no verdict", a.fencingAt)
			}
		}
	}
	for _, request := range w.asked {
		if r := w.requests[request]; r.outcome == "" && !r.lost && r.max > 0 {
			w.broke(VerdictComes, over(request, 0), "the request never ended")
		}
	}
}
