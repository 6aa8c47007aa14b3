// SPDX-License-Identifier: Apache-2.0

// Package guard is the proxy beside one engine that enforces leases: nothing of
// an attempt passes it once the attempt's lease is over or was revoked.
//
// It owns the sockets, the clock and the locks; what may start, publish and end
// is internal/guard/roster's to say, and what a gateway makes of it is
// internal/lease's. It takes the gateways' inference traffic, passes it to the
// engine, asks the roster before every chunk that it passes back, and tells each
// gateway over its control stream what has ended and why. It refuses to parse
// what engines say, to repeat a request, and to judge a failure: bytes and their
// framing pass as they are, and what was cut off stays cut off.
package guard

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/headgate/headgate/internal/guard/guardpb"
	"github.com/headgate/headgate/internal/guard/roster"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/upstream"
)

// Defaults of Config.
const (
	LeaseMaxDefault = time.Minute
	MaxBodyDefault  = 256 << 20
)

// tickPause is the shortest time between two looks for deadlines that passed.
// Nothing is published meanwhile: each chunk is checked by itself.
const tickPause = 20 * time.Millisecond

// tickLongest bounds how late a deadline is noticed that passed while the host
// was suspended: timers stand still then.
const tickLongest = time.Second

// Config is what a Guard is made from. ID and Engine are required.
type Config struct {
	// ID names the guard, for good: one endpoint address has one.
	ID string

	// Engine is scheme, host and port of the engine.
	Engine *url.URL

	// RequireLease refuses what could start work without a lease. Requests that
	// only look (GET, HEAD) never need one.
	RequireLease bool

	// Alone says that the engine's exclusive lock is held, so that no older
	// guard of it is at work.
	Alone bool

	// Supervised says that EngineExited will be called when the engine's process
	// ends. Incarnation names that process.
	Supervised  bool
	Incarnation string

	// Revision is the model revision that the engine serves, "" if not known.
	Revision string

	// Control is the port that gateways are told to dial for the control stream.
	Control int

	LeaseMax time.Duration // longest ttl of any gateway; default LeaseMaxDefault
	MaxBody  int64         // of a request, in bytes; default MaxBodyDefault

	Log *slog.Logger // default: discards

	// now and boot stand for CLOCK_BOOTTIME and the kernel's boot id in tests.
	now  func() (lease.Boottime, error)
	boot string
}

// Guard is one life of a guard. Make one with New, and end it with Close.
type Guard struct {
	guardpb.UnimplementedGuardServer

	config Config
	log    *slog.Logger
	engine *upstream.Pool
	self   lease.Incarnation

	// settling is held, shared, from the moment at which attempts end in the roster
	// until no write of theirs is under way. A session's list is taken under it:
	// there too an end is the proof that nothing more is published. It is taken
	// before a serving's mu, and that before the guard's.
	settling sync.RWMutex

	// mu is held around each call of the roster, and nobody waits under it.
	mu       sync.Mutex
	roster   *roster.Roster
	serving  map[lease.Key]*serving
	sessions map[string]*session // by gateway
	process  *guardpb.Engine
	draining bool
	closed   bool
	counts   Counts

	timer  *time.Timer
	tickAt lease.Boottime // when the timer fires; 0: it does not
}

// Counts are a guard's counters since it started, and gauges.
type Counts struct {
	InFlight   int
	LateWrites int
	Refused    map[roster.Refusal]int
	Ended      map[lease.Reason]int
	Sessions   int // control streams that are open
}

// New makes a Guard whose incarnation begins now.
func New(c Config) (*Guard, error) {
	if c.ID == "" {
		return nil, errors.New("guard: no id")
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.LeaseMax <= 0 {
		c.LeaseMax = LeaseMaxDefault
	}
	if c.MaxBody <= 0 {
		c.MaxBody = MaxBodyDefault
	}
	if c.now == nil {
		c.now = boottime
		var err error
		if c.boot, err = bootID(); err != nil {
			return nil, err
		}
	}
	start, err := c.now()
	if err != nil {
		return nil, err
	}
	// A kept connection that the engine has closed would lose the request, and
	// what was lost here can't be told from what was begun. A fresh one costs
	// microseconds on loopback.
	engine, err := upstream.New(upstream.Config{URL: c.Engine, IdleMax: -1})
	if err != nil {
		return nil, fmt.Errorf("guard: %w", err)
	}
	self := lease.Incarnation{Guard: c.ID, Start: start, Boot: c.boot}
	g := &Guard{
		config: c, log: c.Log, engine: engine, self: self,
		roster:   roster.New(self, c.LeaseMax),
		serving:  map[lease.Key]*serving{},
		sessions: map[string]*session{},
		process:  &guardpb.Engine{Supervised: c.Supervised, Incarnation: c.Incarnation, Revision: c.Revision},
		counts:   Counts{Refused: map[roster.Refusal]int{}, Ended: map[lease.Reason]int{}},
	}
	g.timer = time.AfterFunc(time.Hour, g.tick)
	g.timer.Stop()
	return g, nil
}

// Incarnation is this life of the guard.
func (g *Guard) Incarnation() lease.Incarnation { return g.self }

// now reads the clock that deadlines are in. New has seen that it can be read.
func (g *Guard) now() lease.Boottime {
	t, err := g.config.now()
	if err != nil {
		// No deadline may be taken for one that has not passed.
		return 1<<63 - 1
	}
	return t
}

// Counts reads the counters.
func (g *Guard) Counts() Counts {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.counts
	c.InFlight, c.LateWrites, c.Sessions = len(g.serving), g.roster.Late(), len(g.sessions)
	c.Refused, c.Ended = maps.Clone(g.counts.Refused), maps.Clone(g.counts.Ended)
	return c
}

// Drain refuses new attempts. Those under way go on.
func (g *Guard) Drain() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.draining = true
}

// Close ends the sessions and all attempts. The servers are shut down by then.
func (g *Guard) Close() {
	g.mu.Lock()
	g.closed = true
	g.timer.Stop()
	for _, s := range g.sessions {
		s.stop(errClosing)
	}
	var left []*serving
	for _, s := range g.serving {
		left = append(left, s)
	}
	g.mu.Unlock()
	for _, s := range left {
		s.abort(errClosing)
	}
	g.engine.Close()
}

// EngineExited tells that the engine's process has ended. Crashed: by a signal
// or non-zero, and nobody asked it to. When it returns every attempt has ended
// and every gateway has been told, as far as its stream takes it.
func (g *Guard) EngineExited(crashed bool) {
	g.settling.RLock()
	defer g.settling.RUnlock()
	g.mu.Lock()
	ends := g.roster.EngineExited()
	process := &guardpb.Engine{
		Supervised: true, Exited: true, Crashed: crashed, InFlight: int64(len(ends)),
		Incarnation: g.process.GetIncarnation(), Revision: g.process.GetRevision(),
	}
	g.process = process
	g.mu.Unlock()
	g.log.Warn("the engine has exited", "crashed", crashed, "in_flight", len(ends))
	g.settle(ends, process)
}

// arm sees to it that tick runs by a deadline. The caller holds mu.
func (g *Guard) arm(deadline lease.Boottime) {
	if g.closed || g.tickAt != 0 && g.tickAt <= deadline {
		return
	}
	g.tickAt = deadline
	g.timer.Reset(min(max(deadline.Sub(g.now()), tickPause), tickLongest))
}

// tick ends what is past its deadline, with no help from anyone.
func (g *Guard) tick() {
	g.settling.RLock()
	defer g.settling.RUnlock()
	g.mu.Lock()
	g.tickAt = 0
	ends := g.roster.Tick(g.now())
	if next, ok := g.roster.Next(); ok {
		g.arm(next)
	}
	g.mu.Unlock()
	g.settle(ends, nil)
}

// settle aborts attempts that the roster has ended, and tells their gateways
// once no write of them is under way: a gateway takes an end for the proof that
// nothing more is published. The caller holds settling, shared.
func (g *Guard) settle(ends []lease.End, process *guardpb.Engine) {
	for i, end := range ends {
		g.mu.Lock()
		s := g.serving[end.Key]
		g.mu.Unlock()
		if s == nil {
			continue
		}
		s.hold(end.Reason)
		ends[i].Published = s.written
		s.mu.Unlock()
		s.abort(errEnded{end.Reason})
	}
	g.declare(ends, process)
}

// declare tells gateways of attempts that have ended, and of the engine.
func (g *Guard) declare(ends []lease.End, process *guardpb.Engine) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, end := range ends {
		g.counts.Ended[end.Reason]++
		if s := g.sessions[end.Gateway]; s != nil {
			s.tell(end)
		}
	}
	if process != nil {
		for _, s := range g.sessions {
			s.tellEngine(process)
		}
	}
}

// errEnded is the cause of exchanges that were ended with their attempt.
type errEnded struct{ why lease.Reason }

func (e errEnded) Error() string { return "the attempt has ended: " + e.why.String() }

// serving is one attempt at work.
type serving struct {
	key    lease.Key
	cancel func(error) // of its exchange with the engine

	// mu is held from the check of a chunk to the note that it was written, so
	// that no revoke is acknowledged in between.
	mu      sync.Mutex
	written int64 // bytes of the body

	// unblock guards deadline: once over is set the connection may be another
	// request's.
	unblock  sync.Mutex
	over     bool
	why      lease.Reason // that a write was made to give up; 0: none was
	deadline *http.ResponseController
}

// hold takes mu to end the attempt, and makes a write that hangs give up: what
// it wrote of its chunk is all that is written of the attempt.
func (s *serving) hold(why lease.Reason) {
	if s.mu.TryLock() {
		return
	}
	s.unblock.Lock()
	s.why = why
	s.unblock.Unlock()
	s.unblockWrites()
	s.mu.Lock()
}

// reason is why the attempt is over, from what its own goroutine saw of that.
func (s *serving) reason(seen lease.Reason) lease.Reason {
	s.unblock.Lock()
	defer s.unblock.Unlock()
	if s.why != 0 {
		return s.why
	}
	return seen
}

// abort ends the exchange with the engine and the connection to the gateway.
func (s *serving) abort(cause error) {
	s.cancel(cause)
	s.unblockWrites()
}

func (s *serving) unblockWrites() {
	s.unblock.Lock()
	defer s.unblock.Unlock()
	if !s.over {
		_ = s.deadline.SetWriteDeadline(time.Unix(1, 0)) // an error means that the connection is gone
	}
}

// leave gives the connection back.
func (s *serving) leave() {
	s.unblock.Lock()
	defer s.unblock.Unlock()
	s.over = true
}
