// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/guard/guardpb"
	"github.com/headgate/headgate/internal/lease"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(play(role))
	}
	goleak.VerifyTestMain(m)
}

// patience bounds every wait for an event. A test that needs it has failed.
const patience = time.Minute

// clock is the guard's, and stands still until a test moves it.
type clock struct{ ns atomic.Int64 }

func (c *clock) now() (lease.Boottime, error) { return lease.Boottime(c.ns.Load()), nil }

func (c *clock) advance(d time.Duration) lease.Boottime { return lease.Boottime(c.ns.Add(int64(d))) }

// ttl is that of the leases in tests.
const ttl = 10 * time.Second

var gateway = lease.Gateway{ID: "gw-1", Generation: 4}

// rig is a guard on sockets between an engine and a gateway that tests play.
type rig struct {
	t       testing.TB
	clock   clock
	guard   *Guard
	engine  *engine
	data    string // host:port
	control string
	log     syncBuffer
}

// setup is what a test changes of a rig.
type setup struct {
	config *Config
	token  string
	server func(g *Guard) *grpc.Server                     // default: no TLS
	writer func(w http.ResponseWriter) http.ResponseWriter // around the guard's, nil for none
}

func newRig(t testing.TB, edit ...func(*setup)) *rig {
	t.Helper()
	if t, ok := t.(*testing.T); ok {
		t.Parallel() // most of the time a rig waits for the guard's timer
	}
	r := &rig{t: t, engine: newEngine(t)}
	r.clock.advance(time.Hour)
	u := &url.URL{Scheme: "http", Host: r.engine.listener.Addr().String()}
	s := setup{config: &Config{ID: "g", Engine: u, RequireLease: true, Alone: true, Control: 1, now: r.clock.now, boot: "boot-1"}}
	s.config.Log = slog.New(slog.NewTextHandler(&r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	for _, f := range edit {
		f(&s)
	}
	g, err := New(*s.config)
	if err != nil {
		t.Fatal(err)
	}
	r.guard = g
	handler := g.Handler()
	if s.writer != nil {
		handler = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) { g.Handler().ServeHTTP(s.writer(w), q) })
	}
	requests := newDataServer(handler, s.config.Log)
	var orders *grpc.Server
	if s.server != nil {
		orders = s.server(g)
	} else {
		orders = NewControlServer(g, s.token, nil)
	}
	var served sync.WaitGroup
	listen := func(serve func(net.Listener) error) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		served.Go(func() { _ = serve(l) })
		return l.Addr().String()
	}
	r.data, r.control = listen(requests.Serve), listen(orders.Serve)
	t.Cleanup(func() {
		orders.Stop()
		_ = requests.Close()
		g.Close()
		served.Wait()
		r.engine.stop()
	})
	return r
}

func withoutLease(s *setup) { s.config.RequireLease = false }

// grant is the lease of an attempt as gw-1 would grant it now.
func (r *rig) grant(request string, n int) lease.Grant {
	now, _ := r.clock.now()
	return lease.Grant{
		Key:   lease.Key{Request: inference.RequestID(request), N: n},
		Guard: r.guard.Incarnation(), NotAfter: now.Add(ttl), Gateway: gateway,
	}
}

// until waits for what no event tells.
func (r *rig) until(what string, holds func() bool) {
	r.t.Helper()
	deadline := time.After(patience)
	for !holds() {
		select {
		case <-deadline:
			r.t.Fatalf("not within %v: %s\n%s", patience, what, r.log.String())
		case <-time.After(time.Millisecond):
		}
	}
}

// written waits until the guard has noted that it wrote n bytes of an attempt, and
// at which time. A client may have read them before.
func (r *rig) written(key lease.Key, n int64) {
	r.t.Helper()
	r.until("the write is noted", func() bool {
		r.guard.mu.Lock()
		s := r.guard.serving[key]
		r.guard.mu.Unlock()
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.written == n
	})
}

// client is a gateway's data connection.
type client struct {
	t    testing.TB
	conn *net.TCPConn
	r    *bufio.Reader
}

func (r *rig) dial() *client {
	r.t.Helper()
	conn, err := net.Dial("tcp", r.data)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	return &client{r.t, conn.(*net.TCPConn), bufio.NewReader(conn)}
}

const askBody = `{"model":"m","stream":true}`

// post sends an attempt's request with its lease; fields are further header lines.
func (r *rig) post(g lease.Grant, fields ...string) *client {
	r.t.Helper()
	c := r.dial()
	c.send("POST", append([]string{lease.Header + ": " + g.String()}, fields...)...)
	return c
}

func (c *client) send(method string, fields ...string) {
	c.t.Helper()
	body := askBody
	if method != "POST" {
		body = ""
	} else {
		fields = append(fields, fmt.Sprint("Content-Length: ", len(body)))
	}
	fields = append([]string{method + " /v1/chat/completions?a=%2f HTTP/1.1", "Host: pool"}, fields...)
	c.write(strings.Join(fields, "\r\n") + "\r\n\r\n" + body)
}

func (c *client) write(raw string) {
	c.t.Helper()
	if _, err := io.WriteString(c.conn, raw); err != nil {
		c.t.Fatal(err)
	}
}

// head reads the answer up to its body.
func (c *client) head(method string) *http.Response {
	c.t.Helper()
	res, err := http.ReadResponse(c.r, &http.Request{Method: method})
	if err != nil {
		c.t.Fatal(err)
	}
	return res
}

// reads reads exactly the text from a body.
func reads(t testing.TB, body io.Reader, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if n, err := io.ReadFull(body, got); err != nil || string(got) != want {
		t.Fatalf("read %q, %v; want %q", got[:n], err, want)
	}
}

// engine plays the engine: the test writes its answers byte by byte.
type engine struct {
	t         testing.TB
	listener  net.Listener
	exchanges chan *exchange
	received  atomic.Int64
	conns     sync.WaitGroup
	stopped   chan struct{}
}

// exchange is one request that the engine got.
type exchange struct {
	*http.Request
	body []byte
	conn *net.TCPConn
	done chan struct{} // closed by finish
	t    testing.TB
}

func newEngine(t testing.TB) *engine {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{t: t, listener: l, exchanges: make(chan *exchange, 64), stopped: make(chan struct{})}
	e.conns.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			e.conns.Go(func() { e.serve(conn.(*net.TCPConn)) })
		}
	})
	return e
}

func (e *engine) serve(conn *net.TCPConn) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	e.conns.Go(func() {
		select {
		case <-e.stopped:
		case <-ctx.Done():
		}
		conn.Close()
	})
	br := bufio.NewReader(conn)
	for {
		q, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		body, err := io.ReadAll(q.Body)
		if err != nil {
			return
		}
		e.received.Add(1)
		x := &exchange{Request: q, body: body, conn: conn, done: make(chan struct{}), t: e.t}
		e.exchanges <- x
		select {
		case <-x.done:
		case <-e.stopped:
			return
		}
	}
}

func (e *engine) stop() {
	close(e.stopped)
	e.listener.Close()
	e.conns.Wait()
}

// next is the next request that the engine gets.
func (e *engine) next() *exchange {
	e.t.Helper()
	select {
	case x := <-e.exchanges:
		return x
	case <-time.After(patience):
		e.t.Fatal("the engine got no request")
		return nil
	}
}

func (x *exchange) write(raw string) {
	x.t.Helper()
	if _, err := io.WriteString(x.conn, raw); err != nil {
		x.t.Fatal(err)
	}
}

const chunkedHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

// chunk writes one chunk of a chunked answer.
func (x *exchange) chunk(data string) {
	x.t.Helper()
	x.write(fmt.Sprintf("%x\r\n%s\r\n", len(data), data))
}

// finish lets the connection serve its next request.
func (x *exchange) finish() { close(x.done) }

func (x *exchange) closeConn() { x.conn.Close() }

func (x *exchange) reset() {
	_ = x.conn.SetLinger(0)
	x.conn.Close()
}

// awaitGone waits until the guard has closed the connection to the engine.
func (x *exchange) awaitGone() {
	x.t.Helper()
	_ = x.conn.SetReadDeadline(time.Now().Add(patience))
	if n, err := x.conn.Read(make([]byte, 1)); n != 0 || os.IsTimeout(err) {
		x.t.Fatalf("the engine's connection was not closed: read %d, %v", n, err)
	}
}

// line is a gateway's end of a control stream.
type line struct {
	t      testing.TB
	stream grpc.BidiStreamingClient[guardpb.ToGuard, guardpb.ToGateway]
	cancel context.CancelFunc
	beat   *guardpb.Heartbeat // the newest
	engine *guardpb.Engine    // the newest
	ended  []*guardpb.End     // not asked for yet
	syncs  int
}

// stub is a connection to the control port.
func (r *rig) stub(options ...grpc.DialOption) guardpb.GuardClient {
	r.t.Helper()
	if len(options) == 0 {
		options = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	}
	conn, err := grpc.NewClient("passthrough:///"+r.control, options...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return guardpb.NewGuardClient(conn)
}

// open opens a stream and says nothing.
func (r *rig) open(stub guardpb.GuardClient) *line {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	r.t.Cleanup(cancel)
	stream, err := stub.Attach(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	return &line{t: r.t, stream: stream, cancel: cancel}
}

// hello is a session's first message. Its heartbeats are frequent.
func hello(gw lease.Gateway, session uint64) *guardpb.ToGuard {
	return &guardpb.ToGuard{Hello: &guardpb.Hello{Gateway: guardpb.FromGateway(gw), Session: session, HeartbeatNanos: int64(20 * time.Millisecond)}}
}

// attach begins a session and returns the list that begins it.
func (r *rig) attach(gw lease.Gateway, session uint64) (*line, []*guardpb.Listed) {
	r.t.Helper()
	l := r.open(r.stub())
	l.say(hello(gw, session))
	return l, l.begun()
}

func (l *line) say(m *guardpb.ToGuard) {
	l.t.Helper()
	if err := l.stream.Send(m); err != nil {
		l.t.Fatal(err)
	}
}

// begun reads what a session begins with: a heartbeat, the list, which may be
// empty, and what else there is to tell before the next heartbeat.
func (l *line) begun() (list []*guardpb.Listed) {
	l.t.Helper()
	for beats := 0; beats < 2; {
		m, err := l.recv()
		if err != nil {
			l.t.Fatal(err)
		}
		for _, item := range m.GetList() {
			if !strings.HasPrefix(item.Key.Request, syncPrefix) {
				list = append(list, item)
			}
		}
		if m.Heartbeat != nil {
			beats++
		}
	}
	return list
}

func (l *line) recv() (*guardpb.ToGateway, error) {
	m, err := l.stream.Recv()
	if err != nil {
		return nil, err
	}
	if m.Heartbeat != nil {
		l.beat = m.Heartbeat
	}
	if m.Engine != nil {
		l.engine = m.Engine
	}
	l.ended = append(l.ended, m.Ended...)
	return m, nil
}

// end waits for the end of an attempt.
func (l *line) end(key lease.Key) *guardpb.End {
	l.t.Helper()
	for {
		for i, e := range l.ended {
			if e.Key.Request == string(key.Request) && int(e.Key.N) == key.N {
				l.ended = append(l.ended[:i], l.ended[i+1:]...)
				return e
			}
		}
		if _, err := l.recv(); err != nil {
			l.t.Fatalf("no end of %v: %v", key, err)
		}
	}
}

// syncPrefix begins the names of requests that only sync asks about.
const syncPrefix = "sync_"

// sync waits for a heartbeat that the guard made after it had obeyed what was said
// before: the revoke of an attempt that never was is acknowledged in its turn.
// Ends that were due are in l.ended then.
func (l *line) sync() {
	l.t.Helper()
	l.syncs++
	g := lease.Grant{Key: lease.Key{Request: inference.RequestID(fmt.Sprint(syncPrefix, l.syncs)), N: 1}, Guard: lease.Incarnation{Guard: "another", Boot: "boot-1"}, Gateway: gateway}
	l.say(revoke(g))
	l.end(g.Key)
	for l.beat = nil; l.beat == nil; {
		if _, err := l.recv(); err != nil {
			l.t.Fatal(err)
		}
	}
}

// broken waits for the end of the stream, and returns what ended it.
func (l *line) broken() error {
	l.t.Helper()
	for {
		if _, err := l.recv(); err != nil {
			return err
		}
	}
}

func revoke(g lease.Grant) *guardpb.ToGuard {
	return &guardpb.ToGuard{Revoke: []*guardpb.Revoke{guardpb.FromRevoke(lease.Revoke{Key: g.Key, Guard: g.Guard, Gateway: g.Gateway, NotAfter: g.NotAfter})}}
}

func renew(g lease.Grant) *guardpb.ToGuard {
	return &guardpb.ToGuard{Renew: []*guardpb.Grant{guardpb.FromGrant(g)}}
}

// syncBuffer is a log that tests read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
