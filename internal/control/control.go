// SPDX-License-Identifier: Apache-2.0

// Package control is the gateway's end of the control streams to guards: one
// Line per guard, over which leases are renewed and revoked and the ends of
// attempts come back.
//
// It owns the connection, the goroutines and the gateway's clock; what may be
// granted and what proves an attempt silent is internal/lease's to say. It
// tells the requests concerned and refuses to decide what follows for them
// (internal/attempt does) or who is routed where (internal/schedule).
package control

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/guard/guardpb"
	"github.com/headgate/headgate/internal/lease"
)

const (
	// A stream that has brought no heartbeat for so many of their intervals is
	// replaced, with its connection: what holds it up may hold it for ever.
	silentFor = 3.5

	reconnectMin = 50 * time.Millisecond
	reconnectMax = time.Second
	connectTime  = 5 * time.Second // to connect and to hear the first heartbeat
)

// Config is what a Line is made from. Locate, Terms and Self are required.
type Config struct {
	// Locate finds the guard's control port, host:port. It is asked before each
	// session.
	Locate func(context.Context) (string, error)

	Terms lease.Terms
	Self  lease.Gateway

	Token string      // presented to the guard; "" for none
	TLS   *tls.Config // nil for none

	// Held is told until when attempts may be dispatched, each time that changes:
	// the zero time means not now.
	Held func(until time.Time)

	// Engine is told what the guard says of its engine, when a session begins and
	// when it changes.
	Engine func(Engine)

	// Proved is told of attempts that were inherited.
	Proved func(lease.Proved)

	Log *slog.Logger // default: discards

	// dial stands for a TCP connection in tests.
	dial func(ctx context.Context, addr string) (net.Conn, error)
}

// Engine is what a guard knows of its engine.
type Engine struct {
	Supervised  bool
	Exited      bool
	Incarnation string
	Revision    string
}

// Word is what became of an attempt, proved.
type Word struct {
	Proof inference.Proof

	// Replaced: another life of the guard was heard, which holds the lock.
	Replaced bool

	// Crashed: the engine exited by a signal or non-zero, and nobody asked it
	// to. Alone: no other attempt was in flight there.
	Crashed, Alone bool

	// Published is how much of the answer had passed the guard, in bytes; -1 if
	// it did not say.
	Published int64
}

// Status is what operators are shown of a Line.
type Status struct {
	Up         bool // a session is open and its guard was heard
	Guard      string
	Alone      bool
	Leases     int           // not known to be over
	Age        time.Duration // of the newest heartbeat; -1: none in this session
	Sessions   uint64        // begun so far
	LateWrites int64         // that the guard counted
	Problem    string        // why the last session ended or its heartbeats don't count, "" if all is well
	Engine     Engine
}

// Line is the gateway's end for one guard. All methods may be called from any
// goroutine. Make one with Open.
type Line struct {
	self   lease.Gateway
	log    *slog.Logger
	cancel context.CancelFunc
	wake   chan struct{} // the next expiry may have changed
	done   sync.WaitGroup

	mu      sync.Mutex
	config  Config
	users   int
	over    bool                    // no user and no lease is left
	restart context.CancelCauseFunc // ends the session under way; nil if there is none
	link    *lease.Link
	alone   bool // as the newest heartbeat said
	heard   time.Time
	waiting map[lease.Key]func(Word)
	engine  Engine
	exit    *guardpb.Engine // the newest word about the engine
	late    int64
	problem string
	session *session
	count   uint64
}

// Open begins to connect, for one user. End it with Close or Retire, or by the
// end of ctx.
func Open(ctx context.Context, c Config) *Line {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(ctx)
	l := &Line{
		self: c.Self, config: c, users: 1, log: c.Log, cancel: cancel, wake: make(chan struct{}, 1),
		link: lease.NewLink(c.Terms, c.Self), waiting: map[lease.Key]func(Word){},
	}
	l.done.Go(func() { l.connect(ctx) })
	l.done.Go(func() { l.expire(ctx) })
	return l
}

// Close ends the session. Leases that are not over yet end by themselves at the
// guard; nobody is told of it any more.
func (l *Line) Close() {
	l.cancel()
	l.done.Wait()
}

// Use has one user more share the Line, with these settings from now on for all;
// Self and Log stay. anew says that the guard is to be connected to anew. It
// reports false if the Line has ended.
func (l *Line) Use(c Config, anew bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	l.users++
	l.config = c
	l.link.SetTerms(c.Terms)
	if anew && l.restart != nil {
		l.restart(errSettings)
	}
	return true
}

var errSettings = errors.New("the settings have changed")

// Retire is the end of one user. When none is left the session ends as soon as no
// lease is held any more.
func (l *Line) Retire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.users--
	l.rearm()
}

// Over reports whether the Line has ended.
func (l *Line) Over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.over
}

// Dispatch makes the initial lease of an attempt. told is called once, from
// another goroutine and without waiting, when the attempt is proved silent;
// Release ends that. It reports false if the guard is not to be had now.
func (l *Line) Dispatch(key lease.Key, told func(Word)) (lease.Grant, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return lease.Grant{}, false // nobody would tell of its end
	}
	grant, ok := l.link.Dispatch(time.Now(), key)
	if ok {
		l.waiting[key] = told
		l.rearm()
	}
	return grant, ok
}

// First is the lease as it was dispatched, for sending the same attempt again.
func (l *Line) First(key lease.Key) (lease.Grant, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.link.First(key)
}

// Fence revokes an attempt's lease, now and with each heartbeat until an end is
// known. The attempt's gate is closed by then. It reports false if the lease is
// over already.
func (l *Line) Fence(key lease.Key) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, ok := l.link.Fence(key)
	if ok && l.session != nil {
		l.session.order(nil, []lease.Revoke{v})
	}
	return ok
}

// Release lets go of the lease of an attempt that is over.
func (l *Line) Release(key lease.Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.link.Release(key)
	delete(l.waiting, key)
	if l.users == 0 {
		l.rearm()
	}
}

// Inherit fences an attempt that a process before this one left unfinished; from
// is when this one began. Proved is told.
func (l *Line) Inherit(key lease.Key, guard lease.Incarnation, from time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.link.Inherit(key, guard, from)
	if l.session != nil {
		l.session.order(nil, l.link.Revokes())
	}
	l.rearm()
}

// Terms are what was agreed on.
func (l *Line) Terms() lease.Terms { return l.settings().Terms }

func (l *Line) settings() Config {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.config
}

// Status reads the state.
func (l *Line) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	s := Status{
		Up: l.link.Candidate(now), Alone: l.alone, Leases: l.link.Held(), Age: -1,
		Sessions: l.count, LateWrites: l.late, Problem: l.problem, Engine: l.engine,
	}
	if known := l.link.Known(); known != (lease.Incarnation{}) {
		s.Guard = known.String()
	}
	if !l.heard.IsZero() {
		s.Age = now.Sub(l.heard)
	}
	return s
}

// rearm has the next expiry looked at again. The caller holds mu.
func (l *Line) rearm() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// expire waits for leases to end by the gateway's clock.
func (l *Line) expire(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		l.mu.Lock()
		now := time.Now()
		told := l.prove(l.link.Expire(now), Word{Published: -1})
		next, ok := l.link.NextExpiry()
		l.over = l.users == 0 && !ok
		over := l.over
		l.mu.Unlock()
		told()
		if over {
			l.cancel()
			return
		}
		timer.Stop()
		if ok {
			timer.Reset(next.Sub(now))
		}
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		case <-timer.C:
		}
	}
}

// prove finds who is to be told of proofs, and returns the telling, which must
// not happen under mu.
func (l *Line) prove(all []lease.Proved, word Word) func() {
	if len(all) == 0 {
		return func() {}
	}
	type telling struct {
		told func(Word)
		lease.Proved
	}
	var list []telling
	for _, p := range all {
		list = append(list, telling{l.waiting[p.Key], p})
		delete(l.waiting, p.Key)
	}
	l.rearm()
	inherited := l.config.Proved
	return func() {
		for _, t := range list {
			w := word
			w.Proof = t.Proof
			switch {
			case t.told != nil:
				t.told(w)
			case inherited != nil:
				inherited(t.Proved)
			}
		}
	}
}

// connect keeps a session open, one after the other.
func (l *Line) connect(ctx context.Context) {
	pause := reconnectMin
	for ctx.Err() == nil {
		began := time.Now()
		err := l.attach(ctx)
		if ctx.Err() != nil {
			return
		}
		l.mu.Lock()
		again := l.problem == err.Error()
		l.problem = err.Error()
		l.mu.Unlock()
		if !again {
			l.log.Warn("no control stream to the guard", "error", err)
		}
		if time.Since(began) > connectTime+reconnectMax {
			pause = reconnectMin // it held for a while
		}
		// A part of the pause is random: gateways that lost a guard together
		// don't come back together.
		select {
		case <-ctx.Done():
		case <-time.After(pause/2 + rand.N(pause/2)):
		}
		pause = min(2*pause, reconnectMax)
	}
}

// session is one stream.
type session struct {
	number uint64
	wake   chan struct{}

	mu     sync.Mutex
	renew  []lease.Grant // the newest take the place of those that were not sent
	revoke []lease.Revoke

	// Of whoever receives.
	counts  bool  // a heartbeat did
	ignored error // why the newest does not
}

// why is what ended a session, and says more of heartbeats that stayed away where
// there were some.
func (s *session) why(err error) error {
	if errors.Is(err, errSilent) && s.ignored != nil {
		return s.ignored
	}
	return err
}

// order queues what is to be sent. What finds the stream stuck is lost with it:
// revokes are repeated with each heartbeat, and of renewals the newest counts.
func (s *session) order(renew []lease.Grant, revoke []lease.Revoke) {
	if len(renew)+len(revoke) == 0 {
		return
	}
	s.mu.Lock()
	if len(renew) > 0 {
		s.renew = renew
	}
	for _, v := range revoke {
		if !slices.ContainsFunc(s.revoke, func(o lease.Revoke) bool { return o.Key == v.Key }) {
			s.revoke = append(s.revoke, v)
		}
	}
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// take returns what there is to send, in messages.
func (s *session) take() []*guardpb.ToGuard {
	s.mu.Lock()
	renew, revoke := s.renew, s.revoke
	s.renew, s.revoke = nil, nil
	s.mu.Unlock()
	var all []*guardpb.ToGuard
	// Revokes first: somebody waits for them.
	for part := range slices.Chunk(revoke, guardpb.Batch) {
		m := &guardpb.ToGuard{}
		for _, v := range part {
			m.Revoke = append(m.Revoke, guardpb.FromRevoke(v))
		}
		all = append(all, m)
	}
	for part := range slices.Chunk(renew, guardpb.Batch) {
		m := &guardpb.ToGuard{}
		for _, g := range part {
			m.Renew = append(m.Renew, guardpb.FromGrant(g))
		}
		all = append(all, m)
	}
	return all
}

// attach runs one session to its end.
func (l *Line) attach(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	l.mu.Lock()
	c := l.config
	l.restart = cancel
	l.mu.Unlock()
	locate, stop := context.WithTimeout(ctx, connectTime)
	addr, err := c.Locate(locate)
	stop()
	if err != nil {
		return fmt.Errorf("find the control port: %w", err)
	}
	creds := insecure.NewCredentials()
	if c.TLS != nil {
		creds = credentials.NewTLS(c.TLS)
	}
	// A connection for each session: a stream that is stuck would take the next
	// one on its connection with it. The address is one, not a name for gRPC to
	// resolve and to balance over.
	options := []grpc.DialOption{grpc.WithTransportCredentials(creds), grpc.WithNoProxy()}
	if c.dial != nil {
		options = append(options, grpc.WithContextDialer(c.dial))
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, options...)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // the stream has said why
	if c.Token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.Token)
	}
	// Nothing is heard yet, so nothing is to be waited for longer than that.
	silence := time.AfterFunc(connectTime, func() { cancel(errSilent) })
	defer silence.Stop()
	stream, err := guardpb.NewGuardClient(conn).Attach(ctx)
	if err != nil {
		return orCause(ctx, err)
	}
	s := l.begin()
	defer l.end(s)
	hello := &guardpb.Hello{Gateway: guardpb.FromGateway(l.self), Session: s.number, HeartbeatNanos: int64(c.Terms.Heartbeat)}
	if err := stream.Send(&guardpb.ToGuard{Hello: hello}); err != nil {
		return orCause(ctx, errors.Join(err, recvError(stream)))
	}
	var sender sync.WaitGroup
	defer sender.Wait()
	defer cancel(nil)
	sender.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-s.wake:
			}
			for _, m := range s.take() {
				if err := stream.Send(m); err != nil {
					if !errors.Is(err, io.EOF) { // then Recv says why
						cancel(err)
					}
					return
				}
			}
		}
	})
	for {
		m, err := stream.Recv()
		now := time.Now() // after the receive: an earlier moment would make leases seem to end sooner
		if err != nil {
			return s.why(orCause(ctx, err))
		}
		counts, err := l.take(now, s, m)
		if err != nil {
			return err
		}
		if counts {
			silence.Reset(time.Duration(silentFor * float64(c.Terms.Heartbeat)))
		}
	}
}

var errSilent = errors.New("the guard's heartbeats stay away")

// recvError is why a stream was refused: Send says only that it is over.
func recvError(stream grpc.BidiStreamingClient[guardpb.ToGuard, guardpb.ToGateway]) error {
	_, err := stream.Recv()
	return err
}

func orCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// begin opens a session.
func (l *Line) begin() *session {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count++
	s := &session{number: l.count, wake: make(chan struct{}, 1)}
	l.link.Open(s.number)
	l.session = s
	return s
}

func (l *Line) end(s *session) {
	l.mu.Lock()
	l.link.Close(s.number)
	if l.session == s {
		l.session, l.heard = nil, time.Time{}
	}
	l.mu.Unlock()
	l.held(time.Time{})
}

func (l *Line) held(until time.Time) {
	if held := l.settings().Held; held != nil {
		held(until)
	}
}

// take takes one message, and reports whether it brought a heartbeat that
// counts.
func (l *Line) take(now time.Time, s *session, m *guardpb.ToGateway) (counts bool, err error) {
	if p := m.GetHeartbeat(); p != nil {
		hb, err := p.Lease()
		if err != nil {
			return false, err
		}
		counts = l.heartbeat(now, s, hb, p.GetLateWrites())
	}
	if !s.counts {
		return counts, nil // another guard's engine and list are not this one's
	}
	if p := m.GetEngine(); p != nil {
		l.setEngine(p)
	}
	if m.GetListing() {
		var list []lease.Listed
		for _, p := range m.GetList() {
			item, err := p.Lease()
			if err != nil {
				return false, err
			}
			list = append(list, item)
		}
		l.resync(s, list)
	}
	for _, p := range m.GetEnded() {
		end, err := p.Lease()
		if err != nil {
			return false, err
		}
		l.ended(end)
	}
	return counts, nil
}

// heartbeat takes one, renews what may be renewed and repeats the revokes that
// were not answered.
func (l *Line) heartbeat(now time.Time, s *session, hb lease.Heartbeat, late int64) bool {
	l.mu.Lock()
	heard := l.link.Heartbeat(now, s.number, hb)
	told := l.prove(heard.Fenced, Word{Replaced: true, Published: -1})
	counts := heard.Ignored == lease.Counts
	shown := s.ignored != nil
	if counts {
		s.counts, s.ignored = true, nil
		l.heard, l.alone, l.late, l.problem = now, hb.Alone, late, ""
	} else if heard.Ignored != lease.OldTime {
		s.ignored = fmt.Errorf("heartbeats of guard %s don't count: %s", hb.Guard, heard.Ignored)
		shown = shown || l.problem == s.ignored.Error()
		l.problem = s.ignored.Error()
	}
	s.order(l.link.Renewals(now), l.link.Revokes())
	l.rearm()
	l.mu.Unlock()
	told()
	switch {
	case counts:
		l.held(now.Add(l.Terms().TTL / 2))
	case heard.Ignored == lease.OtherGuard && !shown:
		l.log.Error("another guard answers at the endpoint's address", "guard", hb.Guard.String())
	}
	if heard.New {
		l.log.Info("guard heard", "guard", hb.Guard.String(), "alone", hb.Alone)
	}
	return counts
}

func (l *Line) setEngine(p *guardpb.Engine) {
	e := Engine{Supervised: p.GetSupervised(), Exited: p.GetExited(), Incarnation: p.GetIncarnation(), Revision: p.GetRevision()}
	l.mu.Lock()
	l.engine, l.exit = e, p
	tell := l.config.Engine
	l.mu.Unlock()
	if tell != nil {
		tell(e)
	}
}

func (l *Line) ended(end lease.End) {
	l.mu.Lock()
	told := func() {}
	if p, ok := l.link.Ended(end); ok {
		told = l.prove([]lease.Proved{p}, l.word(end))
	}
	l.mu.Unlock()
	told()
}

// word is what an end tells besides its proof. The caller holds mu.
func (l *Line) word(end lease.End) Word {
	w := Word{Published: end.Published}
	if end.Reason == lease.EngineExited && l.exit.GetExited() {
		w.Crashed, w.Alone = l.exit.GetCrashed(), l.exit.GetInFlight() == 1
	}
	return w
}

func (l *Line) resync(s *session, list []lease.Listed) {
	ends := map[lease.Key]lease.End{}
	for _, item := range list {
		ends[item.Key] = item.End
	}
	l.mu.Lock()
	proved, revoke := l.link.Resync(l.link.Known(), list)
	var told []func()
	for _, p := range proved {
		told = append(told, l.prove([]lease.Proved{p}, l.word(ends[p.Key])))
	}
	s.order(nil, revoke)
	l.mu.Unlock()
	for _, tell := range told {
		tell()
	}
}
