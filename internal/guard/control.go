// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"crypto/subtle"
	"errors"
	"io"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/headgate/headgate/internal/guard/guardpb"
	"github.com/headgate/headgate/internal/lease"
)

// Bounds of a session.
const (
	heartbeatMin  = 20 * time.Millisecond
	heartbeatMax  = 30 * time.Second
	heartbeatUsed = 2 * time.Second // where the gateway names none

	// untoldMax bounds the ends that wait for a slow stream. Past it the session
	// is ended: the next one begins with the whole list.
	untoldMax = 1 << 14
)

// NewControlServer makes the server of the control stream. Gateways must present
// the token, unless it is ""; with credentials the stream is TLS.
func NewControlServer(g *Guard, token string, transport credentials.TransportCredentials) *grpc.Server {
	options := []grpc.ServerOption{
		grpc.StreamInterceptor(tokenCheck(token)),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
	}
	if transport != nil {
		options = append(options, grpc.Creds(transport))
	}
	s := grpc.NewServer(options...)
	guardpb.RegisterGuardServer(s, g)
	return s
}

func tokenCheck(token string) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		md, _ := metadata.FromIncomingContext(stream.Context())
		given := slices.Concat(md.Get("authorization"), []string{""})[0]
		if token != "" && subtle.ConstantTimeCompare([]byte(given), []byte("Bearer "+token)) != 1 {
			return status.Error(codes.Unauthenticated, "the control stream needs the guard's token")
		}
		return handler(srv, stream)
	}
}

// session is one control stream, from its Hello on.
type session struct {
	gateway lease.Gateway
	number  uint64
	every   time.Duration
	stop    context.CancelCauseFunc
	wake    chan struct{} // untold or engine changed

	// Guarded by Guard.mu.
	untold  []lease.End
	engine  *guardpb.Engine
	telling bool // what was taken from these is being sent
}

// tell queues an end. The caller holds the guard's mu.
func (s *session) tell(end lease.End) {
	if len(s.untold) == untoldMax {
		s.stop(errSlow)
		return
	}
	s.untold = append(s.untold, end)
	s.nudge()
}

func (s *session) tellEngine(e *guardpb.Engine) {
	s.engine = e
	s.nudge()
}

func (s *session) nudge() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Attach implements the control stream.
func (g *Guard) Attach(stream grpc.BidiStreamingServer[guardpb.ToGuard, guardpb.ToGateway]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(stream.Context())
	defer stop(nil)
	s, list, err := g.begin(first.GetHello(), stop)
	if err != nil {
		return err
	}
	defer g.end(s)
	log := g.log.With("gateway", s.gateway.ID, "generation", s.gateway.Generation, "session", s.number)
	log.Info("control stream opened", "attempts", len(list))
	// Neither is waited for. One may hang in Send, because the gateway reads
	// nothing, and the other in Recv: the stream's end, which is when this
	// returns, ends both.
	go func() { stop(g.speak(ctx, s, list, stream)) }()
	go func() { stop(g.obey(ctx, s, stream)) }()
	<-ctx.Done()
	err = context.Cause(ctx)
	log.Info("control stream closed", "error", err)
	if errors.Is(err, context.Canceled) {
		return nil // the gateway has closed it
	}
	return err
}

// Why a guard ends a session that is well.
var (
	errClosing  = status.Error(codes.Unavailable, "the guard is shutting down")
	errReplaced = status.Error(codes.Aborted, "a newer session of this gateway has begun")
	errSlow     = status.Error(codes.ResourceExhausted, "the gateway does not read what has ended")
)

// begin opens a session in the place of the gateway's older one, and takes the
// list for it: whatever ends from then on is told to this session.
func (g *Guard) begin(hello *guardpb.Hello, stop context.CancelCauseFunc) (*session, []lease.Listed, error) {
	gateway, err := hello.GetGateway().Lease()
	if err != nil {
		return nil, nil, status.Error(codes.InvalidArgument, "the first message is no hello: "+err.Error())
	}
	every := time.Duration(hello.GetHeartbeatNanos())
	if every <= 0 {
		every = heartbeatUsed
	}
	s := &session{
		gateway: gateway, number: hello.GetSession(), every: min(max(every, heartbeatMin), heartbeatMax),
		stop: stop, wake: make(chan struct{}, 1),
	}
	g.settling.Lock()
	defer g.settling.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	old := g.sessions[gateway.ID]
	switch {
	case g.closed:
		return nil, nil, errClosing
	case !g.roster.Hello(g.now(), gateway), old != nil && old.gateway.Generation > gateway.Generation:
		return nil, nil, status.Error(codes.FailedPrecondition, "a newer life of this gateway was heard")
	case old != nil && old.gateway.Generation == gateway.Generation && old.number >= s.number:
		return nil, nil, status.Error(codes.FailedPrecondition, "a newer session of this gateway was heard")
	case old != nil:
		old.stop(errReplaced)
	}
	g.sessions[gateway.ID] = s
	s.engine = g.process // goes with the first heartbeat
	return s, g.roster.List(gateway.ID), nil
}

func (g *Guard) end(s *session) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.sessions[s.gateway.ID] == s {
		delete(g.sessions, s.gateway.ID)
	}
}

// speak sends heartbeats, the list and what has ended, until ctx is done.
func (g *Guard) speak(ctx context.Context, s *session, list []lease.Listed, stream grpc.BidiStreamingServer[guardpb.ToGuard, guardpb.ToGateway]) error {
	every := time.NewTicker(s.every)
	defer every.Stop()
	// The engine before the list and all ends: what an exit means for them is in it.
	if err := stream.Send(&guardpb.ToGateway{Heartbeat: g.heartbeat(), Engine: g.engineNews(s)}); err != nil {
		return err
	}
	for part := range slices.Chunk(list, guardpb.Batch) {
		m := &guardpb.ToGateway{Listing: true}
		for _, item := range part {
			m.List = append(m.List, guardpb.FromListed(item))
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	for {
		news := g.news(s)
		for _, m := range news {
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		if len(news) > 0 {
			continue // more may have come meanwhile, and this notes that these are out
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.wake:
		case <-every.C:
			if err := stream.Send(&guardpb.ToGateway{Heartbeat: g.heartbeat()}); err != nil {
				return err
			}
		}
	}
}

func (g *Guard) heartbeat() *guardpb.Heartbeat {
	g.mu.Lock()
	late := g.roster.Late()
	g.mu.Unlock()
	hb := guardpb.FromHeartbeat(lease.Heartbeat{G: g.now(), Guard: g.self, Alone: g.config.Alone})
	hb.LateWrites = int64(late)
	return hb
}

func (g *Guard) engineNews(s *session) *guardpb.Engine {
	g.mu.Lock()
	defer g.mu.Unlock()
	e := s.engine
	s.engine = nil
	return e
}

// news takes what a session has not been told yet.
func (g *Guard) news(s *session) []*guardpb.ToGateway {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []*guardpb.ToGateway
	if s.engine != nil {
		all = append(all, &guardpb.ToGateway{Engine: s.engine})
		s.engine = nil
	}
	for part := range slices.Chunk(s.untold, guardpb.Batch) {
		m := &guardpb.ToGateway{}
		for _, end := range part {
			m.Ended = append(m.Ended, guardpb.FromEnd(end))
		}
		all = append(all, m)
	}
	s.untold, s.telling = nil, len(all) > 0
	return all
}

// obey takes a gateway's orders until the stream ends.
func (g *Guard) obey(ctx context.Context, s *session, stream grpc.BidiStreamingServer[guardpb.ToGuard, guardpb.ToGateway]) error {
	for ctx.Err() == nil {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil // the gateway has said all that it will
		case err != nil:
			return err
		case m.GetHello() != nil:
			return status.Error(codes.InvalidArgument, "a second hello")
		}
		for _, p := range m.GetRenew() {
			grant, err := p.Lease()
			if err != nil {
				return status.Error(codes.InvalidArgument, err.Error())
			}
			g.renew(grant)
		}
		for _, p := range m.GetRevoke() {
			revoke, err := p.Lease()
			if err != nil {
				return status.Error(codes.InvalidArgument, err.Error())
			}
			g.revoke(s, revoke)
		}
	}
	return context.Cause(ctx)
}

func (g *Guard) renew(grant lease.Grant) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.roster.Renew(g.now(), grant)
}

// revoke makes an attempt stop publishing, acknowledges and aborts it: the
// acknowledgement does not wait for the engine. It goes to whoever asked, which
// after a takeover is not the gateway that dispatched.
func (g *Guard) revoke(by *session, v lease.Revoke) {
	s := g.holdServing(v.Key)
	end, abort := g.roster.Revoke(g.now(), v)
	g.arm(g.now().Add(g.config.LeaseMax)) // to forget it
	if abort {
		g.counts.Ended[lease.Revoked]++
	}
	by.tell(end)
	if other := g.sessions[end.Gateway]; other != nil && other != by {
		other.tell(end)
	}
	g.mu.Unlock()
	if s != nil {
		s.mu.Unlock()
		s.abort(errEnded{lease.Revoked})
	}
}

// holdServing takes the lock of an attempt, if it is at work, and then the
// guard's: between the two it may have begun.
func (g *Guard) holdServing(key lease.Key) *serving {
	for {
		g.mu.Lock()
		s := g.serving[key]
		if s == nil {
			return nil
		}
		g.mu.Unlock()
		s.hold(lease.Revoked)
		g.mu.Lock()
		if g.serving[key] == s {
			return s
		}
		g.mu.Unlock()
		s.mu.Unlock()
	}
}
