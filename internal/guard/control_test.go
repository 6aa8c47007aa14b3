// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/guard/guardpb"
	"github.com/headgate/headgate/internal/lease"
)

// begin dispatches an attempt whose answer has begun.
func (r *rig) begin(g lease.Grant) (*client, *exchange, io.Reader) {
	r.t.Helper()
	c := r.post(g)
	x := r.engine.next()
	x.write(chunkedHead)
	x.chunk("abc")
	res := c.head("POST")
	reads(r.t, res.Body, "abc")
	return c, x, res.Body
}

// After an acknowledged revoke nothing is published, the engine is let go and the
// connection is cut.
func TestRevoke(t *testing.T) {
	r := newRig(t)
	l, _ := r.attach(gateway, 1)
	g := r.grant("req_1", 1)
	_, x, body := r.begin(g)
	l.say(revoke(g))
	e := l.end(g.Key)
	if e.Reason != guardpb.Reason_REASON_REVOKED || e.PublishedBytes != 3 || e.EngineStopped == guardpb.Stopped_STOPPED_NO {
		t.Errorf("told %v", e)
	}
	if i, err := e.Guard.Lease(); err != nil || i != g.Guard {
		t.Errorf("told by %v", e.Guard)
	}
	x.awaitGone()
	if rest, err := io.ReadAll(body); len(rest) != 0 || err == nil {
		t.Errorf("the gateway got %q, %v", rest, err)
	}
	// It is acknowledged as often as it is sent: the first word may have been lost.
	l.say(revoke(g))
	if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_REVOKED || e.PublishedBytes != 3 {
		t.Errorf("told %v", e)
	}
	// A renewal that crossed it revives nothing, nor does its dispatch.
	l.say(renew(g))
	l.sync()
	if res := r.post(g).head("POST"); res.StatusCode != 409 {
		t.Errorf("got %d", res.StatusCode)
	}
	if n := r.guard.Counts().Ended; n[lease.Revoked] != 1 || len(n) != 1 {
		t.Errorf("counted %v", n)
	}
	r.until("nothing is in flight", func() bool { return r.guard.Counts().InFlight == 0 })
}

// Chunks race with the revoke. Whatever was read of the answer, no more than what
// the acknowledgement says had passed.
func TestNothingPassesAnAcknowledgedRevoke(t *testing.T) {
	r := newRig(t)
	l, _ := r.attach(gateway, 1)
	for n := range 20 {
		g := r.grant("req_1", n+1)
		_, x, body := r.begin(g)
		wrote := make(chan struct{})
		go func() {
			defer close(wrote)
			for {
				if _, err := io.WriteString(x.conn, "1\r\nx\r\n"); err != nil {
					return
				}
			}
		}()
		reads(t, body, "x")
		l.say(revoke(g))
		e := l.end(g.Key)
		got, err := io.Copy(io.Discard, body)
		if got+4 > e.PublishedBytes || err == nil {
			t.Fatalf("read %d bytes of the %d that were acknowledged, %v", got+4, e.PublishedBytes, err)
		}
		<-wrote
		x.finish()
	}
}

// A revoke that overtakes its dispatch leaves a tombstone.
func TestRevokeBeforeTheDispatch(t *testing.T) {
	r := newRig(t)
	l, _ := r.attach(gateway, 1)
	g := r.grant("req_1", 2)
	l.say(revoke(g))
	if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_REVOKED || e.PublishedBytes != 0 {
		t.Errorf("told %v", e)
	}
	for n, want := range map[int]string{2: "duplicate_attempt", 1: "stale_epoch"} {
		if res := r.post(r.grant("req_1", n)).head("POST"); res.StatusCode != 409 || res.Header.Get("Headgate-Reason") != want {
			t.Errorf("attempt %d: got %d %v", n, res.StatusCode, res.Header)
		}
	}
	if n := r.engine.received.Load(); n != 0 {
		t.Errorf("the engine got %d requests", n)
	}
	_, x, _ := r.begin(r.grant("req_1", 3))
	x.finish()
}

func TestFirstMessageIsAHello(t *testing.T) {
	g := lease.Grant{Key: lease.Key{Request: "req_1", N: 1}, Guard: lease.Incarnation{Guard: "g", Start: 1, Boot: "b"}, NotAfter: 1, Gateway: gateway}
	for name, m := range map[string]*guardpb.ToGuard{
		"nothing":            {},
		"an order":           renew(g),
		"no gateway":         {Hello: &guardpb.Hello{Session: 1, HeartbeatNanos: 1e9}},
		"an unnamed gateway": hello(lease.Gateway{Generation: 1}, 1),
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			l := r.open(r.stub())
			l.say(m)
			if err := l.broken(); status.Code(err) != codes.InvalidArgument {
				t.Errorf("got %v", err)
			}
		})
	}
}

// Orders that are not well-formed end the stream: a half understood revoke would
// be acknowledged by somebody.
func TestMalformedOrders(t *testing.T) {
	g := lease.Grant{Guard: lease.Incarnation{Guard: "g", Start: 1, Boot: "boot-1"}}
	for name, m := range map[string]*guardpb.ToGuard{
		"a second hello":       hello(gateway, 2),
		"a renewal of nothing": {Renew: []*guardpb.Grant{{}}},
		"a revoke of nothing":  {Revoke: []*guardpb.Revoke{{}}},
		"an attempt 0":         revoke(lease.Grant{Key: lease.Key{Request: "req_1"}, Guard: g.Guard, Gateway: gateway}),
		"no request":           revoke(lease.Grant{Key: lease.Key{N: 1}, Guard: g.Guard, Gateway: gateway}),
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			l, _ := r.attach(gateway, 1)
			l.say(m)
			if err := l.broken(); status.Code(err) != codes.InvalidArgument {
				t.Errorf("got %v", err)
			}
		})
	}
}

// Of one gateway's sessions the newest counts.
func TestSessionsReplaceOlderOnes(t *testing.T) {
	r := newRig(t)
	first, _ := r.attach(gateway, 5)
	second, _ := r.attach(gateway, 6)
	if err := first.broken(); status.Code(err) == codes.OK || err == io.EOF {
		t.Errorf("the older session ended with %v", err)
	}
	for _, session := range []uint64{6, 5} {
		l := r.open(r.stub())
		l.say(hello(gateway, session))
		if err := l.broken(); status.Code(err) == codes.OK || err == io.EOF {
			t.Errorf("session %d ended with %v", session, err)
		}
	}
	second.sync()
	// A later life of the gateway numbers its sessions anew; an older one is over.
	newer := gateway
	newer.Generation++
	third, _ := r.attach(newer, 1)
	_ = second.broken()
	l := r.open(r.stub())
	l.say(hello(gateway, 7))
	if err := l.broken(); status.Code(err) == codes.OK || err == io.EOF {
		t.Errorf("the older life's session ended with %v", err)
	}
	third.sync()
	third.cancel()
	r.until("no session is left", func() bool { return r.guard.Counts().Sessions == 0 })
}

// A gateway is told of its own attempts, when a session begins and when they end.
func TestGatewaysSeeTheirOwn(t *testing.T) {
	r := newRig(t)
	l1, list := r.attach(gateway, 1)
	if len(list) != 0 {
		t.Errorf("listed %v", list)
	}
	l2, _ := r.attach(lease.Gateway{ID: "gw-2", Generation: 1}, 1)
	g1, g2 := r.grant("req_1", 1), r.grant("req_2", 1)
	g2.Gateway = lease.Gateway{ID: "gw-2", Generation: 1}
	active := r.grant("req_3", 1)
	_, x1, _ := r.begin(g1)
	_, x2, _ := r.begin(g2)
	_, x3, _ := r.begin(active)
	x1.write("0\r\n\r\n")
	x2.write("0\r\n\r\n")
	x1.finish()
	x2.finish()
	l1.end(g1.Key)
	l2.end(g2.Key)
	l1.sync()
	l2.sync()
	if len(l1.ended) != 0 || len(l2.ended) != 0 {
		t.Errorf("told %v and %v besides", l1.ended, l2.ended)
	}
	_, list = r.attach(gateway, 2)
	states := map[string]bool{}
	for _, e := range list {
		states[e.Key.Request] = e.Active
		if !e.Active && (e.End == nil || e.End.Reason != guardpb.Reason_REASON_FINISHED) {
			t.Errorf("listed %v", e)
		}
	}
	if len(list) != 2 || states["req_1"] || !states["req_3"] {
		t.Errorf("listed %v", list)
	}
	x3.write("0\r\n\r\n")
	x3.finish()
}

// Who takes over a request revokes what another gateway dispatched: both are told.
func TestRevokeByAnotherGateway(t *testing.T) {
	r := newRig(t)
	dispatcher, _ := r.attach(gateway, 1)
	taker, _ := r.attach(lease.Gateway{ID: "gw-2", Generation: 1}, 1)
	g := r.grant("req_1", 1)
	_, x, _ := r.begin(g)
	by := g
	by.Gateway = lease.Gateway{ID: "gw-2", Generation: 1}
	taker.say(revoke(by))
	for name, l := range map[string]*line{"taker": taker, "dispatcher": dispatcher} {
		if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_REVOKED || e.PublishedBytes != 3 {
			t.Errorf("the %s is told %v", name, e)
		}
	}
	x.awaitGone()
}

// A gateway whose stream is down learns of an end from the next session's list.
func TestEndsWhileNobodyListens(t *testing.T) {
	r := newRig(t)
	l, _ := r.attach(gateway, 1)
	g := r.grant("req_1", 1)
	_, x, body := r.begin(g)
	l.cancel()
	r.until("the session is over", func() bool { return r.guard.Counts().Sessions == 0 })
	x.write("0\r\n\r\n")
	x.finish()
	_, _ = io.ReadAll(body)
	r.until("the attempt is over", func() bool { return r.guard.Counts().InFlight == 0 })
	_, list := r.attach(gateway, 2)
	if len(list) != 1 || list[0].Active || list[0].End.GetReason() != guardpb.Reason_REASON_FINISHED {
		t.Errorf("listed %v", list)
	}
}

// The guard's time is its own clock's, and each heartbeat says whose it is.
func TestHeartbeats(t *testing.T) {
	r := newRig(t, func(s *setup) { s.config.Revision = "m@sha256:1" })
	l, _ := r.attach(gateway, 1)
	at := r.clock.advance(time.Minute)
	l.sync()
	i := r.guard.Incarnation()
	if l.beat.Now != int64(at) || fmt.Sprint(l.beat.Guard) != fmt.Sprint(guardpb.FromIncarnation(i)) || !l.beat.Alone {
		t.Errorf("heartbeat %v at %d", l.beat, at)
	}
	if i.Guard != "g" || i.Boot != "boot-1" || i.Start != lease.Boottime(time.Hour) {
		t.Errorf("incarnation %v", i)
	}
	if l.engine.GetRevision() != "m@sha256:1" || l.engine.GetSupervised() || l.engine.GetExited() {
		t.Errorf("engine %v", l.engine)
	}
}

// Every attempt has ended before anybody is told that the engine's process has.
func TestEngineExitEndsAll(t *testing.T) {
	r := newRig(t, func(s *setup) { s.config.Supervised, s.config.Incarnation = true, "1/2" })
	l, _ := r.attach(gateway, 1)
	if !l.engine.GetSupervised() || l.engine.GetExited() || l.engine.GetIncarnation() != "1/2" {
		t.Errorf("engine %v", l.engine)
	}
	g1, g2 := r.grant("req_1", 1), r.grant("req_2", 1)
	_, x1, body := r.begin(g1)
	_, _, _ = r.begin(g2)
	r.guard.EngineExited(true)
	// What the engine had written already is not published any more.
	_, _ = io.WriteString(x1.conn, "3\r\ndef\r\n")
	if n := r.guard.Counts(); n.Ended[lease.EngineExited] != 2 {
		t.Errorf("counted %+v", n)
	}
	for _, g := range []lease.Grant{g1, g2} {
		if e := l.end(g.Key); e.Reason != guardpb.Reason_REASON_ENGINE_EXITED || e.PublishedBytes != 3 || e.EngineStopped != guardpb.Stopped_STOPPED_YES {
			t.Errorf("told %v", e)
		}
	}
	for !l.engine.GetExited() {
		l.sync()
	}
	if !l.engine.Crashed || l.engine.InFlight != 2 {
		t.Errorf("engine %v", l.engine)
	}
	if rest, err := io.ReadAll(body); len(rest) != 0 || err == nil {
		t.Errorf("the gateway got %q, %v", rest, err)
	}
	// A gateway that comes later is told too.
	other, _ := r.attach(lease.Gateway{ID: "gw-2", Generation: 1}, 1)
	if !other.engine.GetExited() || !other.engine.GetCrashed() {
		t.Errorf("engine %v", other.engine)
	}
}

// Ends of a gateway that reads nothing are kept within a bound, past which its
// session is over. No other gateway waits for it.
func TestSlowStream(t *testing.T) {
	r := newRig(t)
	slow := r.open(r.stub(grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithInitialWindowSize(1<<16), grpc.WithInitialConnWindowSize(1<<16)))
	slow.say(hello(gateway, 1))
	slow.begun()
	l, _ := r.attach(lease.Gateway{ID: "gw-2", Generation: 1}, 1)
	g := r.grant("", 1)
	var sender sync.WaitGroup
	defer sender.Wait()
	defer slow.cancel()
	sender.Go(func() {
		for n := 0; ; n++ {
			revokes := &guardpb.ToGuard{}
			for i := range guardpb.Batch {
				key := lease.Key{Request: inference.RequestID(fmt.Sprintf("req_%09d", n*guardpb.Batch+i)), N: 1}
				revokes.Revoke = append(revokes.Revoke, guardpb.FromRevoke(lease.Revoke{Key: key, Guard: g.Guard, Gateway: g.Gateway, NotAfter: g.NotAfter}))
			}
			if slow.stream.Send(revokes) != nil {
				return
			}
		}
	})
	r.until("the slow session is over", func() bool { return r.guard.Counts().Sessions == 1 })
	if err := slow.broken(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("it ended with %v", err)
	}
	g2 := r.grant("req_2", 1)
	g2.Gateway = lease.Gateway{ID: "gw-2", Generation: 1}
	_, x, _ := r.begin(g2)
	l.say(revoke(g2))
	l.end(g2.Key)
	x.awaitGone()
}

// tokenOf presents a token.
type tokenOf string

func (t tokenOf) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(t)}, nil
}
func (tokenOf) RequireTransportSecurity() bool { return false }

// Without the token there is no session, and no log has it.
func TestToken(t *testing.T) {
	r := newRig(t, func(s *setup) { s.token = "s3cret" })
	plain := grpc.WithTransportCredentials(insecure.NewCredentials())
	for name, options := range map[string][]grpc.DialOption{
		"none":   {plain},
		"wrong":  {plain, grpc.WithPerRPCCredentials(tokenOf("s3cre7"))},
		"longer": {plain, grpc.WithPerRPCCredentials(tokenOf("s3cret "))},
		"empty":  {plain, grpc.WithPerRPCCredentials(tokenOf(""))},
	} {
		l := r.open(r.stub(options...))
		_ = l.stream.Send(hello(gateway, 1))
		if err := l.broken(); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s: %v", name, err)
		}
	}
	l := r.open(r.stub(plain, grpc.WithPerRPCCredentials(tokenOf("s3cret"))))
	l.say(hello(gateway, 1))
	l.begun()
	if log := r.log.String(); strings.Contains(log, "s3cre") {
		t.Errorf("the log has a token: %s", log)
	}
}

// authority signs certificates for one test.
type authority struct {
	t    testing.TB
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
}

func newAuthority(t testing.TB) *authority {
	a := &authority{t: t, pool: x509.NewCertPool()}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.key, a.cert = a.sign(template, nil, nil)
	a.pool.AddCert(a.cert)
	return a
}

func (a *authority) sign(template, parent *x509.Certificate, by *ecdsa.PrivateKey) (*ecdsa.PrivateKey, *x509.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	if parent == nil {
		parent, by = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, cert
}

func (a *authority) leaf(name string) tls.Certificate {
	a.t.Helper()
	key, cert := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}, a.cert, a.key)
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
}

// With client certificates only gateways of that authority open a session.
func TestClientCertificates(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	r := newRig(t, func(s *setup) {
		s.server = func(g *Guard) *grpc.Server {
			return NewControlServer(g, "", credentials.NewTLS(&tls.Config{
				Certificates: []tls.Certificate{ours.leaf("guard")}, ClientCAs: ours.pool, ClientAuth: tls.RequireAndVerifyClientCert,
			}))
		}
	})
	dial := func(c *tls.Config) guardpb.GuardClient {
		c.ServerName, c.RootCAs = "127.0.0.1", ours.pool
		return r.stub(grpc.WithTransportCredentials(credentials.NewTLS(c)))
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for name, c := range map[string]*tls.Config{"none": {}, "another's": {Certificates: []tls.Certificate{theirs.leaf("gw")}}} {
		stream, err := dial(c).Attach(ctx)
		if err == nil {
			_, err = stream.Recv()
		}
		if status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	l := r.open(dial(&tls.Config{Certificates: []tls.Certificate{ours.leaf("gw")}}))
	l.say(hello(gateway, 1))
	l.begun()
}
