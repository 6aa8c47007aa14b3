// SPDX-License-Identifier: Apache-2.0

package keep

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
)

// A fleet file is an endpoints file that tests rewrite.
type fleetFile struct {
	t    *testing.T
	path string
}

func newFleetFile(t *testing.T, dir string, list ...*simengine.Engine) fleetFile {
	f := fleetFile{t, filepath.Join(dir, "endpoints.yaml")}
	f.set(list...)
	return f
}

func (f fleetFile) set(list ...*simengine.Engine) { write(f.t, f.path, endpoints(list...)) }

// members are the endpoints of the pool p, as operators see them.
func (s site) members() int { return len(s.series("headgate_endpoint_available")) }

func (s site) awaitMembers(t *testing.T, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d endpoints", n), func() bool { return s.members() == n })
}

// crowd are clients that send streams until they are told to stop.
type crowd struct {
	stop    chan struct{}
	wg      sync.WaitGroup
	mu      sync.Mutex
	answers []check.Answer
	whole   atomic.Int64
}

// gather starts n clients; body and header make request i of client c.
func (s site) gather(n int, request func(c, i int) (string, []string)) *crowd {
	w := &crowd{stop: make(chan struct{})}
	for c := range n {
		w.wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-w.stop:
					return
				default:
				}
				body, header := request(c, i)
				tag := fmt.Sprintf("c%d-%d", c, i)
				a := s.try("POST", chat, body, append(header, check.TagHeader, tag)...)
				if a.whole() {
					w.whole.Add(1)
				}
				w.mu.Lock()
				w.answers = append(w.answers, check.Answer{
					Request: a.id(), Tag: tag, Stream: strings.Contains(body, `"stream":true`), Status: a.status, Body: []byte(a.body), Err: a.err,
				})
				w.mu.Unlock()
			}
		})
	}
	return w
}

// more waits until so many further requests were answered completely.
func (w *crowd) more(t *testing.T, n int64) {
	t.Helper()
	want := w.whole.Load() + n
	eventually(t, fmt.Sprintf("%d more answers", n), func() bool { return w.whole.Load() >= want })
}

// also enters an answer that somebody beside the clients got to a stream.
func (w *crowd) also(a answer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answers = append(w.answers, check.Answer{Request: a.id(), Stream: true, Status: a.status, Body: []byte(a.body), Err: a.err})
}

// stopAll stops the clients and checks that every request got a whole answer.
func (w *crowd) stopAll(t *testing.T) {
	t.Helper()
	close(w.stop)
	w.wg.Wait()
	bad := 0
	for _, a := range w.answers {
		seen, err := check.Read(a)
		if !seen.Complete || err != nil {
			if bad++; bad < 5 {
				t.Errorf("%s %s: %d %v %v\n%.400s", a.Tag, a.Request, a.Status, a.Err, err, a.Body)
			}
		}
	}
	if bad > 0 {
		t.Errorf("%d of %d requests were lost", bad, len(w.answers))
	}
	t.Logf("%d requests", len(w.answers))
}

// end is stopAll, and holds the answers against all that the engines saw.
func (w *crowd) end(t *testing.T, list ...*simengine.Engine) {
	t.Helper()
	w.stopAll(t)
	var log []simengine.Entry
	var left []check.Violation
	within(patience, func() bool { // an engine notes the end when its client has it
		log = log[:0]
		for _, e := range list {
			log = append(log, e.Log()...)
		}
		left = check.Fleet(w.answers, log, nil)
		return len(left) == 0
	})
	of := map[string][]simengine.Entry{}
	for _, entry := range log {
		of[entry.Request] = append(of[entry.Request], entry)
	}
	for _, a := range w.answers {
		for _, v := range check.Judge(a, of[a.Request], check.Limits{MaxAttempts: 2, Resends: 1}) {
			t.Error(v)
		}
	}
	for _, v := range left {
		t.Error(v)
	}
}

func slowStreams(int, int) (string, []string) {
	return streamed, []string{"X-Sim-Fault", "slow:8ms"}
}

// EPT-4: endpoints come and go under load: no request is lost or stuck, one
// that is removed finishes its streams and gets no new ones.
func TestEndpointsComeAndGoUnderLoad(t *testing.T) {
	t.Parallel()
	e := engines(t, 4, func(c *simengine.Config) { c.LogEntries = 1 << 20 })
	dir := t.TempDir()
	file := newFleetFile(t, dir, e[0], e[1])
	g := start(t, dir, onePool("discovery: {file: endpoints.yaml}"))
	g.awaitMembers(t, 2)
	w := g.gather(50, slowStreams)
	w.more(t, 100)
	rounds := 3
	if !testing.Short() {
		rounds = 15
	}
	for i := range rounds {
		a, b, c := e[i%4], e[(i+1)%4], e[(i+2)%4]
		file.set(a, b, c)
		g.awaitMembers(t, 3)
		w.more(t, 30)
		file.set(b, c)
		g.awaitMembers(t, 2)
		// The change is in force, and what was on its way has arrived: what a
		// gets from here on is a mistake.
		w.more(t, 100)
		var seq uint64
		if log := a.Log(); len(log) > 0 {
			seq = log[len(log)-1].Seq
		}
		w.more(t, 100)
		for _, entry := range a.LogSince(seq) {
			if entry.Event == simengine.EventReceived && entry.Path == chat {
				t.Errorf("round %d: engine %s got %s after it was removed", i, entry.Engine, entry.Request)
			}
			if entry.Event == simengine.EventAborted || entry.Event == simengine.EventCut {
				t.Errorf("round %d: engine %s's stream %s was %s", i, entry.Engine, entry.Request, entry.Event)
			}
		}
	}
	w.end(t, e...)
	for _, engine := range e {
		if len(received(engine)) == 0 {
			t.Error("an engine of the fleet got nothing")
		}
	}
	eventually(t, "none in flight", func() bool { return g.sum("headgate_inflight_requests") == 0 })
}

// EPT-4: draining is told in the file: the streams that run go on to their end,
// nothing new comes, and then the listener may close.
func TestDrainingEndpointFinishesItsStreams(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	dir := t.TempDir()
	file := newFleetFile(t, dir, e[0])
	g := start(t, dir, onePool("discovery: {file: endpoints.yaml}, health: {interval: 100ms}"))
	g.awaitMembers(t, 1)
	var open []*stream
	for range 5 {
		s := g.open(streamed, "X-Sim-Fault", "stall@token:2:3s")
		s.until("·")
		open = append(open, s)
	}
	write(t, file.path, fmt.Sprintf("[{url: %q, draining: true}, {url: %q}]", e[0].URL(), e[1].URL()))
	eventually(t, "new requests go to the other", func() bool {
		return g.post(streamed).header.Get("Headgate-Endpoint") == e[1].URL()
	})
	n := len(received(e[0]))
	for range 40 {
		if a := g.post(streamed); !a.whole() || a.header.Get("Headgate-Endpoint") != e[1].URL() {
			t.Fatal(a)
		}
	}
	// It closes its listener while its streams go on.
	must(t, e[0].Inject("refuse@listen:1m"))
	for _, s := range open {
		if a := s.rest(); !a.whole() || a.tokens() != 6 {
			t.Errorf("a stream of the draining engine: %v", a)
		}
	}
	if got := len(received(e[0])); got != n {
		t.Errorf("the draining engine got %d new requests", got-n)
	}
}

// A new engine at an address that had failed begins with a clean record, and
// nothing of the old one's connections is used.
func TestAddressThatIsUsedAgainStartsClean(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	dir := t.TempDir()
	file := newFleetFile(t, dir, e...)
	// By load alone: a newcomer's share is not to depend on how fast either seemed.
	g := start(t, dir, onePool("discovery: {file: endpoints.yaml}, health: {interval: 100ms}, routing: {profile: least_load}"))
	g.awaitMembers(t, 2)
	// One stream of the old life is still under way at the address.
	var old *stream
	eventually(t, "a stream at A", func() bool {
		old = g.open(streamed, "X-Sim-Fault", "engine=A;stall@token:2:2s")
		old.until("·")
		if old.res.Header.Get("Headgate-Endpoint") == e[0].URL() {
			return true
		}
		old.rest()
		return false
	})
	must(t, e[0].Inject("times=4;rst@head", "times=4;rst@head"))
	eventually(t, "A is ejected", func() bool {
		g.post(streamed)
		return g.sum("headgate_endpoint_available", e[0].Addr()) == 0
	})
	file.set(e[1])
	g.awaitMembers(t, 1)
	if a := old.rest(); !a.whole() {
		t.Errorf("the old stream: %v", a)
	}
	e[0].Kill()
	e[0].Reset()
	must(t, e[0].Restart(nil))
	file.set(e...)
	g.awaitMembers(t, 2)
	if v := g.sum("headgate_endpoint_available", e[0].Addr()); v != 1 {
		t.Errorf("available: %v right after it came", v)
	}
	if v := g.sum("headgate_inflight_requests", e[0].Addr()); v != 0 {
		t.Errorf("%v in flight right after it came", v)
	}
	// Its share is a full one at once.
	n := 0
	for range 60 {
		a := g.post(streamed)
		if !a.whole() {
			t.Fatal(a)
		}
		if a.header.Get("Headgate-Endpoint") == e[0].URL() {
			n++
		}
	}
	if n < 12 {
		t.Errorf("%d of 60 requests went to the new engine", n)
	}
}

// What is known of an engine does not end with the last stream of the one that
// was at its address before.
func TestHealthOutlivesTheStreamsOfAnEarlierEngine(t *testing.T) {
	t.Parallel()
	e := engines(t, 3)
	dir := t.TempDir()
	file := newFleetFile(t, dir, e[0])
	g := start(t, dir, onePool("discovery: {file: endpoints.yaml}, health: {interval: 100ms, unhealthy_after: 1}"))
	g.awaitMembers(t, 1)
	old := g.open(streamed, "X-Sim-Fault", "stall@token:2:6s")
	old.until("·")
	file.set(e[1], e[2])
	g.awaitMembers(t, 2)
	must(t, e[0].Inject("times=*;path=/health;status@head:503:empty"))
	file.set(e...)
	g.awaitMembers(t, 3)
	eventually(t, "A is known to be unhealthy", func() bool {
		return g.states()[e[0].URL()] == "unhealthy"
	})
	n := len(received(e[0]))
	for range 30 {
		g.post(streamed)
	}
	if got := len(received(e[0])); got != n {
		t.Fatalf("an unhealthy engine got %d requests while the old stream ran", got-n)
	}
	if a := old.rest(); !a.whole() {
		t.Fatal(a)
	}
	for range 60 {
		g.post(streamed)
	}
	if got := len(received(e[0])); got != n {
		t.Errorf("an unhealthy engine got %d of 60 requests once the old stream was over\n%s", got-n, g.operator("/admin/v1/endpoints").body)
	}
}

// EPT-1: an engine that is dead while its source still lists it costs nobody
// anything, and one whose removal came while nothing could be read is gone as
// soon as the list can be read.
func TestDeadEngineInTheListIsAvoided(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	dir := t.TempDir()
	file := newFleetFile(t, dir, e...)
	g := start(t, dir, onePool("discovery: {file: endpoints.yaml}, health: {interval: 100ms}"))
	g.awaitMembers(t, 2)
	// The watch sees nothing: the file is gone, then wrong.
	must(t, os.Remove(file.path))
	eventually(t, "the missing file is told of", func() bool { return strings.Contains(g.log.String(), "endpoints.yaml") })
	write(t, file.path, "[{url: nonsense}]")
	w := g.gather(10, slowStreams)
	w.more(t, 30)
	w.end(t, e...) // what dies with its engine is another test's
	e[0].Kill()
	n := len(received(e[0]))
	w = g.gather(10, slowStreams)
	w.more(t, 50)
	if g.members() != 2 {
		t.Errorf("%d endpoints while the list can't be read", g.members())
	}
	eventually(t, "A is known to be gone", func() bool { return g.states()[e[0].URL()] == "gone" })
	file.set(e[1])
	g.awaitMembers(t, 1)
	w.more(t, 20)
	if got := len(received(e[0])); got != n {
		t.Errorf("a dead engine got %d requests", got-n)
	}
	w.stopAll(t)
}

// EPT-6: engines that hang, at every place where one can, never block the
// others.
func TestHungEngineBlocksNobodyElse(t *testing.T) {
	t.Parallel()
	a, b := engines(t, 1), engines(t, 1)
	nothing := backlogged(t)
	g := start(t, "", fmt.Sprintf(`pools:
  hung: {%s, health: {interval: 0s}, timeouts: {first_output: 3s}, flow: {queue: {ttl: 3s}}}
  nothing: {discovery: {static: [{url: "http://%s"}]}, timeouts: {connect: 2s}}
  good: {%s}
routes:
  - {match: {model: a}, backends: [{pool: hung}]}
  - {match: {model: n}, backends: [{pool: nothing}]}
  - {backends: [{pool: good}]}
`, static(a...), nothing, static(b...)))
	a[0].Pause()
	stuck := 250
	if !testing.Short() {
		stuck = 500
	}
	var wg sync.WaitGroup
	var hung, none atomic.Int64
	started := time.Now()
	for i := range stuck {
		wg.Go(func() {
			// Few go to an engine that does not answer; the others wait for it.
			model, codes, count := "a", "upstream_timeout queue_timeout", &hung
			if i%5 == 0 {
				model, codes, count = "n", "source_not_fenced no_endpoints queue_timeout", &none
			}
			x := g.try("POST", chat, strings.Replace(chatOf(model), "sim", model, 1))
			if !slices.Contains(strings.Fields(codes), x.code()) {
				t.Errorf("%s: %v", model, x)
			}
			count.Add(1)
		})
	}
	eventually(t, "hung requests are under way", func() bool {
		return g.sum("headgate_inflight_requests", `pool="hung"`)+g.sum("headgate_queue_requests", `pool="hung"`) > 100
	})
	worst := time.Duration(0)
	for range 50 {
		before := time.Now()
		if x := g.post(streamed); !x.whole() {
			t.Fatal(x)
		}
		worst = max(worst, time.Since(before))
	}
	if hung.Load() > 0 {
		t.Logf("%d hung requests had ended by then", hung.Load())
	}
	if worst > time.Second {
		t.Errorf("a good request took %v", worst)
	}
	wg.Wait()
	t.Logf("worst %v, all ended after %v", worst, time.Since(started))
	a[0].Resume()
	eventually(t, "none in flight", func() bool { return g.sum("headgate_inflight_requests") == 0 })
}

// backlogged is the address of a listener that accepts nothing: its backlog is
// full, and the kernel drops what else comes, as a blackhole would.
func backlogged(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	must(t, err)
	t.Cleanup(func() { _ = syscall.Close(fd) })
	must(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	must(t, syscall.Listen(fd, 0))
	sa, err := syscall.Getsockname(fd)
	must(t, err)
	addr := fmt.Sprintf("127.0.0.1:%d", sa.(*syscall.SockaddrInet4).Port)
	for range 16 {
		c, err := net.DialTimeout("tcp", addr, 100*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	t.Skip("the kernel's backlog does not fill")
	return ""
}

// EPT-9: a request waits at an engine that vanishes without a word: removed
// from discovery, nothing answers at its address. Within seconds it is repeated
// elsewhere or failed; a slow engine that is there is left alone.
func TestRequestAtAnEngineThatVanishesIsNotStuck(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		settings string
		fenced   bool
	}{
		"may not be repeated": {"", false},
		"may be repeated":     {", failover: {allow_transport_fence: true}", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := engines(t, 2)
			vanishing := vanish(t, e[0])
			dir := t.TempDir()
			path := filepath.Join(dir, "endpoints.yaml")
			write(t, path, fmt.Sprintf("[{url: %q}]", "http://"+vanishing.addr))
			g := start(t, dir, onePool("discovery: {file: endpoints.yaml}, health: {interval: 200ms, timeout: 500ms}"+c.settings))
			g.awaitMembers(t, 1)
			got := make(chan answer, 1)
			go func() { got <- g.try("POST", chat, streamed, "X-Sim-Fault", "engine=A;stall@head") }()
			arrival(t, 1, e[0])
			vanishing.vanish()
			write(t, path, endpoints(e[1]))
			eventually(t, "the other has taken its place", func() bool {
				return g.members() == 1 && g.sum("headgate_endpoint_available", e[1].Addr()) == 1
			})
			gone := time.Now()
			select {
			case a := <-got:
				took := time.Since(gone)
				if took > 5*time.Second {
					t.Errorf("after %v", took)
				}
				switch {
				case c.fenced && (!a.whole() || a.header.Get("Headgate-Endpoint") != e[1].URL()):
					t.Errorf("not repeated on B: %v", a)
				case !c.fenced:
					refused(t, a, 503, "source_not_fenced", true)
				}
			case <-time.After(15 * time.Second):
				t.Error("15 s after its engine vanished the request still waits")
			}
		})
	}
}

// The same without discovery's help: probes find that nothing answers.
func TestRequestAtAnEngineThatIsUnreachableIsNotStuck(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	v := vanish(t, e[0])
	g := start(t, "", onePool(fmt.Sprintf("discovery: {static: [{url: %q}]}, health: {interval: 200ms, timeout: 500ms}, timeouts: {connect: 500ms}", "http://"+v.addr)))
	got := make(chan answer, 1)
	go func() { got <- g.try("POST", chat, streamed, "X-Sim-Fault", "stall@head") }()
	arrival(t, 1, e[0])
	v.vanish()
	select {
	case a := <-got:
		refused(t, a, 503, "source_not_fenced", true)
	case <-time.After(15 * time.Second):
		t.Error("15 s after its engine vanished the request still waits")
	}
}

func TestSlowEngineThatIsRemovedIsLeftAlone(t *testing.T) {
	t.Parallel()
	e := engines(t, 2)
	dir := t.TempDir()
	file := newFleetFile(t, dir, e[0])
	g := start(t, dir, onePool("discovery: {file: endpoints.yaml}, health: {interval: 200ms, timeout: 500ms}"))
	g.awaitMembers(t, 1)
	got := make(chan answer, 1)
	go func() { got <- g.try("POST", chat, streamed, "X-Sim-Fault", "stall@head:5s") }()
	arrival(t, 1, e[0])
	file.set(e[1])
	a := <-got
	if !a.whole() || a.header.Get("Headgate-Endpoint") != e[0].URL() {
		t.Errorf("a slow engine's answer: %v", a)
	}
	if n := len(received(e...)); n != 1 {
		t.Errorf("%d requests at engines", n)
	}
}

// vanishing is a relay in front of an engine that can stop without a word: its
// connections stay open and carry nothing, and new ones are not accepted.
type vanishing struct {
	addr string
	fd   int
	off  chan struct{}

	onVanish func()
}

func vanish(t *testing.T, e *simengine.Engine) *vanishing {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	must(t, err)
	must(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	must(t, syscall.Listen(fd, 128))
	sa, err := syscall.Getsockname(fd)
	must(t, err)
	file := os.NewFile(uintptr(fd), "relay")
	l, err := net.FileListener(file) // a copy: closing it leaves the socket listening
	must(t, err)
	v := &vanishing{addr: fmt.Sprintf("127.0.0.1:%d", sa.(*syscall.SockaddrInet4).Port), fd: fd, off: make(chan struct{})}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	ended := false
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", e.Addr())
			if err != nil {
				_ = c.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, c, up)
			over := ended
			mu.Unlock()
			if over {
				_ = c.Close()
				_ = up.Close()
			}
			wg.Go(func() { v.relay(up, c) })
			wg.Go(func() { v.relay(c, up) })
		}
	})
	var hold []net.Conn
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		ended = true
		for _, c := range append(conns, hold...) {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
		_ = file.Close()
	})
	v.onVanish = func() {
		close(v.off)
		_ = l.Close()
		must(t, syscall.Listen(v.fd, 0))
		// Fill the backlog: what comes after it is dropped by the kernel.
		for range 16 {
			c, err := net.DialTimeout("tcp", v.addr, 100*time.Millisecond)
			if err != nil {
				return
			}
			mu.Lock()
			hold = append(hold, c)
			mu.Unlock()
		}
		t.Error("the kernel's backlog does not fill")
	}
	return v
}

func (v *vanishing) vanish() { v.onVanish() }

// relay copies until the relay is off; then it reads and forgets.
func (v *vanishing) relay(to, from net.Conn) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		select {
		case <-v.off:
			if err != nil {
				return
			}
			continue
		default:
		}
		if err != nil {
			_ = to.Close()
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			_ = from.Close()
			return
		}
	}
}

// EPT-8: an engine on IPv6 is one endpoint, however it is written, and has one
// form everywhere.
func TestEndpointsOnIPv6(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6 here")
	}
	e, err := simengine.Start(l, simengine.Config{Name: "A", Tokens: 6})
	must(t, err)
	t.Cleanup(e.Close)
	_, port, _ := net.SplitHostPort(e.Addr())
	dir := t.TempDir()
	write(t, filepath.Join(dir, "endpoints.yaml"), fmt.Sprintf("[{url: \"http://[::1]:%s/\"}]", port))
	g := start(t, dir, onePool(fmt.Sprintf(
		"discovery: {file: endpoints.yaml, static: [{url: \"http://[0:0:0:0:0:0:0:1]:%s\"}]}, health: {interval: 100ms}", port)))
	eventually(t, "it serves", func() bool { return g.post(streamed).whole() })
	stays(t, "one endpoint", 500*time.Millisecond, func() bool { return g.members() == 1 })
	for labels := range g.series("headgate_endpoint_available") {
		if !strings.Contains(labels, "[::1]:"+port) {
			t.Errorf("series %s", labels)
		}
	}
	a := g.post(streamed)
	if got := a.header.Get("Headgate-Endpoint"); got != "http://[::1]:"+port {
		t.Errorf("Headgate-Endpoint: %s", got)
	}
	if r := g.record(a.id()); r.Attempts[0].Endpoint != "http://[::1]:"+port {
		t.Errorf("record: %+v", r.Attempts)
	}
	if body := g.operator("/admin/v1/endpoints").body; strings.Count(body, "[::1]:"+port) != 1 {
		t.Errorf("endpoints: %s", body)
	}
	// Without brackets it is no URL; that is said, with the place.
	write(t, filepath.Join(dir, "endpoints.yaml"), fmt.Sprintf("- url: http://::1:%s\n", port))
	eventually(t, "the wrong form is told of", func() bool { return strings.Contains(g.log.String(), "endpoints.yaml:1") })
	if a := g.post(streamed); !a.whole() {
		t.Error(a)
	}
}
