// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/guard/guardpb"
	"github.com/headgate/headgate/internal/lease"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	terms = lease.DefaultTerms
	self  = lease.Gateway{ID: "gw-1", Generation: 4}
	first = lease.Incarnation{Guard: "g", Start: 100, Boot: "boot-1"}
	key   = lease.Key{Request: "req_1", N: 1}
)

// far plays the guard's end.
type far struct {
	guardpb.UnimplementedGuardServer
	t      testing.TB
	visits chan *visit
}

// visit is one session, as the guard has it.
type visit struct {
	t      testing.TB
	stream grpc.BidiStreamingServer[guardpb.ToGuard, guardpb.ToGateway]
	hello  *guardpb.Hello
	token  []string
	orders chan *guardpb.ToGuard
	gone   chan struct{} // closed when the gateway has left
	end    chan error    // makes the guard end it
}

func (f *far) Attach(stream grpc.BidiStreamingServer[guardpb.ToGuard, guardpb.ToGateway]) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	md, _ := metadata.FromIncomingContext(stream.Context())
	v := &visit{
		t: f.t, stream: stream, hello: m.GetHello(), token: md.Get("authorization"),
		orders: make(chan *guardpb.ToGuard, 1024), gone: make(chan struct{}), end: make(chan error, 1),
	}
	f.visits <- v
	go func() {
		defer close(v.gone)
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			v.orders <- m
		}
	}()
	select {
	case err := <-v.end:
		return err
	case <-v.gone:
		return nil
	}
}

func (v *visit) say(m *guardpb.ToGateway) {
	v.t.Helper()
	if err := v.stream.Send(m); err != nil {
		v.t.Fatal(err)
	}
}

// beat sends a heartbeat of an incarnation whose clock is at G.
func (v *visit) beat(g lease.Boottime, guard lease.Incarnation, alone bool) {
	v.t.Helper()
	v.say(&guardpb.ToGateway{Heartbeat: guardpb.FromHeartbeat(lease.Heartbeat{G: g, Guard: guard, Alone: alone})})
}

func (v *visit) ended(e lease.End) {
	v.t.Helper()
	v.say(&guardpb.ToGateway{Ended: []*guardpb.End{guardpb.FromEnd(e)}})
}

// order is what the gateway has sent since the last look, in one message.
func (v *visit) order() *guardpb.ToGuard {
	all := &guardpb.ToGuard{}
	for {
		select {
		case m := <-v.orders:
			all.Renew = append(all.Renew, m.Renew...)
			all.Revoke = append(all.Revoke, m.Revoke...)
		default:
			return all
		}
	}
}

// rig is a Line in a bubble, and the guard's end of it.
type rig struct {
	t      *testing.T
	line   *Line
	visits chan *visit

	mu     sync.Mutex
	dials  int
	held   []time.Time
	proved []lease.Proved
}

// newRig is made in a bubble. Its moments are exact.
func newRig(t *testing.T, edit ...func(*Config)) *rig {
	f := &far{t: t, visits: make(chan *visit, 256)}
	server := grpc.NewServer()
	guardpb.RegisterGuardServer(server, f)
	listener := bufconn.Listen(1 << 16)
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(listener) })
	r := &rig{t: t, visits: f.visits}
	c := Config{
		Locate: func(context.Context) (string, error) { return "guard", nil }, Terms: terms, Self: self,
		Held:   func(until time.Time) { r.mu.Lock(); r.held = append(r.held, until); r.mu.Unlock() },
		Proved: func(p lease.Proved) { r.mu.Lock(); r.proved = append(r.proved, p); r.mu.Unlock() },
		dial: func(ctx context.Context, _ string) (net.Conn, error) {
			r.mu.Lock()
			r.dials++
			r.mu.Unlock()
			return listener.DialContext(ctx)
		},
	}
	for _, f := range edit {
		f(&c)
	}
	r.line = Open(context.Background(), c)
	t.Cleanup(func() {
		r.line.Close()
		server.Stop()
		served.Wait()
	})
	return r
}

// next is the session that begins next, or the one that is open.
func (r *rig) next() *visit {
	r.t.Helper()
	for {
		select {
		case v := <-r.visits:
			synctest.Wait()
			select {
			case <-v.gone:
			default:
				return v
			}
		case <-time.After(time.Hour):
			r.t.Fatal("no session begins")
			return nil
		}
	}
}

// up is a session with a heartbeat at G = 1 s.
func (r *rig) up() *visit {
	r.t.Helper()
	v := r.next()
	v.beat(second, first, true)
	synctest.Wait()
	return v
}

const second = lease.Boottime(time.Second)

// words collects what is told of one attempt.
type words struct {
	mu  sync.Mutex
	all []Word
	at  time.Time
}

func (w *words) told(word Word) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all, w.at = append(w.all, word), time.Now()
}

func (w *words) get() []Word {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.all)
}

func (r *rig) dispatch(key lease.Key) (*words, lease.Grant) {
	r.t.Helper()
	w := &words{}
	g, ok := r.line.Dispatch(key, w.told)
	if !ok {
		r.t.Fatal("the guard is not to be had")
	}
	return w, g
}

func (w *words) want(t *testing.T, want ...Word) {
	t.Helper()
	if got := w.get(); !slices.Equal(got, want) {
		t.Errorf("told %+v, want %+v", got, want)
	}
}

// No lease is granted before the first heartbeat of the session that is open.
func TestGrantsNeedAHeartbeatOfTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.Token = "s3cret" })
		v := r.next()
		gw, err := v.hello.GetGateway().Lease()
		if err != nil || gw != self || v.hello.Session != 1 || v.hello.HeartbeatNanos != int64(terms.Heartbeat) || !slices.Equal(v.token, []string{"Bearer s3cret"}) {
			t.Errorf("hello %v with token %q, %v", v.hello, v.token, err)
		}
		for range 2 {
			synctest.Wait()
			if _, ok := r.line.Dispatch(key, nil); ok || r.line.Status().Up {
				t.Error("a lease was granted from nothing")
			}
			v.beat(second, first, true)
			synctest.Wait()
			w, g := r.dispatch(key)
			if want := (lease.Grant{Key: key, Guard: first, NotAfter: second.Add(terms.TTL), Gateway: self}); g != want {
				t.Errorf("granted %v, want %v", g, want)
			}
			if again, ok := r.line.First(key); !ok || again != g {
				t.Errorf("the first lease is %v", again)
			}
			r.line.Release(key)
			v.end <- status.Error(codes.Aborted, "enough")
			synctest.Wait()
			if s := r.line.Status(); s.Up || s.Age != -1 || !strings.Contains(s.Problem, "enough") {
				t.Errorf("status %+v", s)
			}
			w.want(t)
			number := v.hello.Session
			if v = r.next(); v.hello.Session <= number {
				t.Errorf("session %d after %d", v.hello.Session, number)
			}
		}
	})
}

// Until when attempts may be dispatched is half a lease after each heartbeat, and
// not at all without a session.
func TestHeldIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		begin := time.Now()
		v := r.up()
		time.Sleep(2 * time.Second)
		v.beat(3*second, first, true)
		synctest.Wait()
		v.beat(3*second, first, true) // an old time: it does not count
		synctest.Wait()
		v.end <- nil
		synctest.Wait()
		r.mu.Lock()
		defer r.mu.Unlock()
		want := []time.Time{begin.Add(terms.TTL / 2), begin.Add(2*time.Second + terms.TTL/2), {}}
		if !slices.EqualFunc(r.held, want, time.Time.Equal) {
			t.Errorf("told %v, want %v", r.held, want)
		}
	})
}

// A stream that is silent for 3.5 heartbeats is replaced, with its connection.
func TestSilenceIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		v := r.up()
		heard := time.Now()
		<-v.gone
		if d := time.Since(heard); d != 3500*terms.Heartbeat/1000 {
			t.Errorf("given up after %v", d)
		}
		v = r.next() // says nothing at all
		began := time.Now()
		r.mu.Lock()
		if r.dials != 2 {
			t.Errorf("%d connections for 2 sessions", r.dials)
		}
		r.mu.Unlock()
		<-v.gone
		if d := time.Since(began); d != connectTime {
			t.Errorf("given up after %v", d)
		}
		if p := r.line.Status().Problem; p != errSilent.Error() {
			t.Errorf("the problem is %q", p)
		}
		r.up()
		if s := r.line.Status(); !s.Up || s.Problem != "" || s.Sessions != 3 {
			t.Errorf("status %+v", s)
		}
	})
}

// A guard that can't be found or reached is tried again, with pauses.
func TestReconnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		tries, broken := 0, true
		r := newRig(t, func(c *Config) {
			c.Locate = func(context.Context) (string, error) {
				mu.Lock()
				defer mu.Unlock()
				if tries++; broken {
					return "", errors.New("no such place")
				}
				return "guard", nil
			}
		})
		time.Sleep(10 * time.Second)
		mu.Lock()
		if tries < 10 || tries > 30 {
			t.Errorf("%d tries in 10 s", tries)
		}
		broken = false
		mu.Unlock()
		if p := r.line.Status().Problem; !strings.Contains(p, "no such place") {
			t.Errorf("the problem is %q", p)
		}
		r.up()
	})
}

// Each heartbeat renews what is held, from its own time; what is fenced is revoked
// with each until its end is known.
func TestRenewalsAndRevokes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		v := r.up()
		other := lease.Key{Request: "req_2", N: 3}
		w1, _ := r.dispatch(key)
		w2, _ := r.dispatch(other)
		time.Sleep(2 * time.Second)
		v.beat(3*second, first, true)
		synctest.Wait()
		o := v.order()
		if len(o.Renew) != 2 || o.Renew[0].NotAfter != int64(13*second) || len(o.Revoke) != 0 {
			t.Errorf("ordered %v", o)
		}
		if !r.line.Fence(key) {
			t.Error("there is nothing to fence")
		}
		synctest.Wait()
		for i := range 3 {
			o = v.order()
			if len(o.Revoke) != 1 || o.Revoke[0].Key.Request != "req_1" || o.Revoke[0].NotAfter != int64(13*second) {
				t.Errorf("%d: revoked %v", i, o.Revoke)
			}
			if renewed := len(o.Renew); renewed != min(i, 1) || renewed == 1 && o.Renew[0].Key.Request != "req_2" {
				t.Errorf("%d: renewed %v", i, o.Renew)
			}
			time.Sleep(time.Second)
			v.beat(lease.Boottime(4+i)*second, first, true)
			synctest.Wait()
		}
		w1.want(t)
		v.order()
		end := lease.End{Key: key, Gateway: self.ID, Guard: first, Reason: lease.Revoked, Published: 7}
		for range 2 { // told once, however often it is acknowledged
			v.ended(end)
			synctest.Wait()
			w1.want(t, Word{Proof: inference.ProofCancelAck, Published: 7})
		}
		if r.line.Fence(key) {
			t.Error("what is over was fenced")
		}
		v.beat(8*second, first, true)
		synctest.Wait()
		if o = v.order(); len(o.Revoke) != 0 || len(o.Renew) != 1 {
			t.Errorf("ordered %v", o)
		}
		w2.want(t)
		if n := r.line.Status().Leases; n != 1 {
			t.Errorf("%d leases", n)
		}
	})
}

// A guard that says nothing more: a lease is over when it is by the gateway's own
// clock, however wrong both clocks are, and not before.
func TestExpiryByTheGatewaysClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		v := r.up()
		heard := time.Now()
		time.Sleep(time.Second)
		w, _ := r.dispatch(key)
		released, _ := r.dispatch(lease.Key{Request: "req_2", N: 1})
		r.line.Release(lease.Key{Request: "req_2", N: 1})
		<-v.gone
		time.Sleep(time.Until(heard.Add(terms.Wait() - 1)))
		synctest.Wait()
		w.want(t)
		time.Sleep(time.Minute)
		w.want(t, Word{Proof: inference.ProofLeaseExpired, Published: -1})
		if d := w.at.Sub(heard); d != terms.Wait() {
			t.Errorf("told after %v, want %v", d, terms.Wait())
		}
		released.want(t)
		// A late word about it changes nothing.
		v = r.up()
		v.ended(lease.End{Key: key, Guard: first, Reason: lease.Revoked})
		synctest.Wait()
		w.want(t, Word{Proof: inference.ProofLeaseExpired, Published: -1})
	})
}

// Who is told may call the Line.
func TestToldUnderNoLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		v := r.up()
		done := make(chan struct{})
		_, ok := r.line.Dispatch(key, func(Word) {
			defer close(done)
			r.line.Status()
			r.line.Fence(key)
			r.line.Release(key)
			r.line.First(key)
			r.line.Inherit(lease.Key{Request: "req_3", N: 1}, first, time.Now())
			r.line.Dispatch(lease.Key{Request: "req_2", N: 1}, func(Word) {})
		})
		if !ok {
			t.Fatal("the guard is not to be had")
		}
		v.ended(lease.End{Key: key, Guard: first, Reason: lease.Closed})
		<-done
	})
}

// What an end is worth depends on who says it and why.
func TestEnds(t *testing.T) {
	older := lease.Incarnation{Guard: "g", Start: 99, Boot: "boot-1"}
	newer := lease.Incarnation{Guard: "g", Start: 101, Boot: "boot-1"}
	crashed := &guardpb.Engine{Supervised: true, Exited: true, Crashed: true, InFlight: 1}
	beside := &guardpb.Engine{Supervised: true, Exited: true, Crashed: true, InFlight: 2}
	drained := &guardpb.Engine{Supervised: true, Exited: true, InFlight: 1}
	for name, row := range map[string]struct {
		engine *guardpb.Engine
		end    lease.End
		want   []Word
	}{
		"revoked":                  {nil, lease.End{Guard: first, Reason: lease.Revoked, Published: 3}, []Word{{Proof: inference.ProofCancelAck, Published: 3}}},
		"expired":                  {nil, lease.End{Guard: first, Reason: lease.Expired}, []Word{{Proof: inference.ProofLeaseExpired}}},
		"closed":                   {nil, lease.End{Guard: first, Reason: lease.Closed}, []Word{{Proof: inference.ProofCancelAck}}},
		"relayed whole":            {nil, lease.End{Guard: first, Reason: lease.Finished}, nil},
		"of an older incarnation":  {nil, lease.End{Guard: older, Reason: lease.Revoked}, nil},
		"of a newer one":           {nil, lease.End{Guard: newer, Reason: lease.Revoked}, nil},
		"of another attempt":       {nil, lease.End{Key: lease.Key{Request: "req_1", N: 2}, Guard: first, Reason: lease.Revoked}, nil},
		"the engine crashed":       {crashed, lease.End{Guard: first, Reason: lease.EngineExited}, []Word{{Proof: inference.ProofDead, Crashed: true, Alone: true}}},
		"crashed with others":      {beside, lease.End{Guard: first, Reason: lease.EngineExited}, []Word{{Proof: inference.ProofDead, Crashed: true}}},
		"the engine ended":         {drained, lease.End{Guard: first, Reason: lease.EngineExited}, []Word{{Proof: inference.ProofDead, Alone: true}}},
		"before the engine's word": {nil, lease.End{Guard: first, Reason: lease.EngineExited}, []Word{{Proof: inference.ProofDead}}},
	} {
		if row.end.Key == (lease.Key{}) {
			row.end.Key = key
		}
		row.end.Gateway = self.ID
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				v := r.up()
				w, _ := r.dispatch(key)
				v.say(&guardpb.ToGateway{Engine: row.engine})
				v.ended(row.end)
				synctest.Wait()
				w.want(t, row.want...)
			})
		})
		t.Run(name+", listed", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				v := r.up()
				w, _ := r.dispatch(key)
				v.end <- io.ErrUnexpectedEOF
				v = r.next()
				v.say(&guardpb.ToGateway{
					Heartbeat: guardpb.FromHeartbeat(lease.Heartbeat{G: 2 * second, Guard: first}), Engine: row.engine,
				})
				v.say(&guardpb.ToGateway{Listing: true, List: []*guardpb.Listed{guardpb.FromListed(lease.Listed{Key: row.end.Key, End: row.end})}})
				synctest.Wait()
				w.want(t, row.want...)
			})
		})
	}
}

// Absence from a guard's list proves nothing; what is active there and held by
// nobody here is revoked.
func TestResync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		v := r.up()
		w, _ := r.dispatch(key)
		stray := lease.Key{Request: "req_2", N: 1}
		v.say(&guardpb.ToGateway{Listing: true, List: []*guardpb.Listed{guardpb.FromListed(lease.Listed{Key: stray, Active: true})}})
		synctest.Wait()
		w.want(t)
		if o := v.order(); len(o.Revoke) != 1 || o.Revoke[0].Key.Request != "req_2" || o.Revoke[0].NotAfter != 0 {
			t.Errorf("revoked %v", o.Revoke)
		}
	})
}

// A new life of the guard that holds the engine's lock is the end of the old one;
// one that does not proves nothing.
func TestNewIncarnation(t *testing.T) {
	for name, alone := range map[string]bool{"with the lock": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				v := r.up()
				w, _ := r.dispatch(key)
				v.beat(2*second, lease.Incarnation{Guard: "g", Start: 101, Boot: "boot-1"}, alone)
				synctest.Wait()
				if alone {
					w.want(t, Word{Proof: inference.ProofDead, Replaced: true, Published: -1})
				} else {
					w.want(t)
				}
				if s := r.line.Status(); s.Guard != "g/101/boot-1" || s.Alone != alone {
					t.Errorf("status %+v", s)
				}
			})
		})
	}
}

// Another guard at the address is an error that stays in sight. Nothing that it
// says counts.
func TestAnotherGuard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		v := r.up()
		w, _ := r.dispatch(key)
		v.end <- io.ErrUnexpectedEOF
		for i := range 2 {
			v = r.next()
			v.say(&guardpb.ToGateway{
				Heartbeat: guardpb.FromHeartbeat(lease.Heartbeat{G: 2 * second, Guard: lease.Incarnation{Guard: "h", Start: 200, Boot: "boot-1"}, Alone: true}),
				Engine:    &guardpb.Engine{Revision: "h's"},
			})
			v.say(&guardpb.ToGateway{Listing: true, List: []*guardpb.Listed{guardpb.FromListed(lease.Listed{Key: lease.Key{Request: "req_2", N: 1}, Active: true})}})
			synctest.Wait()
			if o := v.order(); len(o.Revoke)+len(o.Renew) != 0 {
				t.Errorf("%d: ordered %v", i, o)
			}
			<-v.gone
			synctest.Wait()
			s := r.line.Status()
			if s.Up || !strings.Contains(s.Problem, "h/200/boot-1") || s.Engine.Revision != "" {
				t.Errorf("%d: status %+v", i, s)
			}
		}
		if _, ok := r.line.Dispatch(lease.Key{Request: "req_2", N: 1}, nil); ok {
			t.Error("a lease was granted")
		}
		time.Sleep(time.Minute)
		w.want(t, Word{Proof: inference.ProofLeaseExpired, Published: -1})
	})
}

// What a process before this one left unfinished is revoked at once, if there is a
// session, and with each heartbeat; or its lease is waited out.
func TestInherit(t *testing.T) {
	for name, acknowledged := range map[string]bool{"acknowledged": true, "waited out": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				v := r.up()
				from := time.Now()
				r.line.Inherit(key, first, from)
				synctest.Wait()
				for i := range 3 {
					if o := v.order(); len(o.Revoke) != 1 || len(o.Renew) != 0 || o.Revoke[0].NotAfter != 0 {
						t.Errorf("%d: ordered %v", i, o)
					}
					time.Sleep(time.Second)
					v.beat(lease.Boottime(2+i)*second, first, true)
					synctest.Wait()
				}
				want := lease.Proved{Key: key, Proof: inference.ProofLeaseExpired}
				if acknowledged {
					v.ended(lease.End{Key: key, Guard: first, Reason: lease.Revoked})
					synctest.Wait()
					want.Proof = inference.ProofCancelAck
				} else {
					time.Sleep(time.Until(from.Add(terms.Wait() - 1)))
					synctest.Wait()
					r.mu.Lock()
					if len(r.proved) != 0 {
						t.Errorf("proved %v too early", r.proved)
					}
					r.mu.Unlock()
					time.Sleep(time.Nanosecond)
					synctest.Wait()
				}
				time.Sleep(time.Minute)
				r.mu.Lock()
				defer r.mu.Unlock()
				if !slices.Equal(r.proved, []lease.Proved{want}) {
					t.Errorf("proved %v, want %v", r.proved, want)
				}
			})
		})
	}
}

// A Line that is retired goes on until its last lease is over.
func TestRetire(t *testing.T) {
	for name, end := range map[string]func(r *rig, v *visit){
		"released": func(r *rig, _ *visit) { r.line.Release(key) },
		"ended":    func(_ *rig, v *visit) { v.ended(lease.End{Key: key, Guard: first, Reason: lease.Revoked}) },
		"expired":  func(*rig, *visit) { <-time.After(terms.Wait()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				v := r.up()
				w, _ := r.dispatch(key)
				r.line.Retire()
				synctest.Wait()
				if r.line.Over() {
					t.Error("the Line ended with a lease held")
				}
				end(r, v)
				synctest.Wait()
				if !r.line.Over() {
					t.Error("the Line goes on without a lease")
				}
				<-v.gone
				if told := len(w.get()); (told == 0) != (name == "released") {
					t.Errorf("told %v", w.get())
				}
				if _, ok := r.line.Dispatch(key, nil); ok || r.line.Use(Config{}, false) {
					t.Error("a Line that has ended is used")
				}
			})
		})
	}
}

// What a guard says must be well-formed; the session ends where it is not.
func TestMalformedMessages(t *testing.T) {
	for name, m := range map[string]*guardpb.ToGateway{
		"a heartbeat of nobody": {Heartbeat: &guardpb.Heartbeat{Now: 1}},
		"an end of nothing":     {Ended: []*guardpb.End{{}}},
		"an end for no reason":  {Ended: []*guardpb.End{{Key: guardpb.FromKey(key), Guard: guardpb.FromIncarnation(first)}}},
		"a list of nothing":     {Listing: true, List: []*guardpb.Listed{{}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				v := r.up()
				w, _ := r.dispatch(key)
				v.say(m)
				<-v.gone
				w.want(t)
				if v = r.up(); v.hello.Session != 2 || !r.line.Status().Up {
					t.Errorf("status %+v", r.line.Status())
				}
			})
		})
	}
}

// A refusal of the guard's is what the problem says, not that the stream is over.
func TestRefusalIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.next().end <- status.Error(codes.FailedPrecondition, "a newer life of this gateway was heard")
		synctest.Wait()
		if p := r.line.Status().Problem; !strings.Contains(p, "newer life") {
			t.Errorf("the problem is %q", p)
		}
	})
}

// The same over sockets, and in real time.
func TestOverSockets(t *testing.T) {
	f := &far{t: t, visits: make(chan *visit, 16)}
	server := grpc.NewServer()
	guardpb.RegisterGuardServer(server, f)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(listener) })
	defer served.Wait()
	defer server.Stop()
	held := make(chan time.Time, 16)
	line := Open(t.Context(), Config{
		Locate: func(context.Context) (string, error) { return listener.Addr().String(), nil }, Terms: terms, Self: self,
		Held: func(until time.Time) { held <- until },
	})
	defer line.Close()
	v := <-f.visits
	v.beat(second, first, true)
	<-held
	told := make(chan Word, 2)
	if _, ok := line.Dispatch(key, func(w Word) { told <- w }); !ok {
		t.Fatal("the guard is not to be had")
	}
	line.Fence(key)
	if m := <-v.orders; len(m.Revoke) != 1 {
		t.Errorf("ordered %v", m)
	}
	v.ended(lease.End{Key: key, Guard: first, Reason: lease.Revoked, Published: 7})
	if w := <-told; w != (Word{Proof: inference.ProofCancelAck, Published: 7}) {
		t.Errorf("told %+v", w)
	}
}
