// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/test/real"
)

// Ports of the processes in their nodes.
const (
	gatewayPort = 8080
	adminPort   = 9901
	dataPort    = 8000 // of a guard, or of an engine without one
	controlPort = 8001 // of a guard
	enginePort  = 9000 // behind a guard, on loopback
)

const secret = "of-these-tests" // and everybody else's

// How long leases are in these tests.
const (
	ttl       = 2 * time.Second
	heartbeat = 400 * time.Millisecond
)

// lanes are sets of nodes that runs use one after the other.
var lanes laneSet

type laneSet struct {
	mu   sync.Mutex
	made int
	free []*lane
}

// A lane is the space of a gateway and those of replicas.
type lane struct{ nodes []*node } // the first is the gateway's

// take returns a lane with so many nodes.
func (s *laneSet) take(t *testing.T, nodes int) *lane {
	t.Helper()
	s.mu.Lock()
	for i, l := range s.free {
		if len(l.nodes) >= nodes {
			s.free = slices.Delete(s.free, i, i+1)
			s.mu.Unlock()
			return l
		}
	}
	s.made++
	number := s.made
	s.mu.Unlock()
	l := &lane{}
	for i := range nodes {
		n, err := newNode(number, i)
		if err != nil {
			t.Fatal(err)
		}
		l.nodes = append(l.nodes, n)
	}
	for _, n := range l.nodes[1:] {
		if err := l.nodes[0].reach(n); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func (s *laneSet) give(l *lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, l)
}

func (s *laneSet) close() {
	for _, l := range s.free {
		for _, n := range l.nodes {
			n.close()
		}
	}
}

// A run is one story: processes in a lane, what is asked of them, and what is
// done to them.
type run struct {
	t    *testing.T
	name string
	seed uint64
	rnd  *rand.Rand
	dir  string
	lane *lane

	pool     []string // lines of the pool's YAML
	journal  string
	guarded  bool // a guard stands before each engine
	starts   bool // and has started it
	relayed  bool // a relay stands before each replica
	llama    bool // the engines are llama.cpp's server
	budget   check.Budget
	replicas []*replica
	gateways []*process // one per life
	client   *http.Client
	asked    []*asked
	began    time.Time

	mu   sync.Mutex
	told []string // what was done when, for whoever reads a failure
	cuts []cut
}

// newRun prepares a run, whose rest is the caller's to set before start.
func newRun(t *testing.T, seed uint64, nodes int) *run {
	t.Helper()
	sum := sha256.Sum256([]byte(t.Name()))
	r := &run{
		t: t, name: t.Name(), seed: seed, dir: t.TempDir(), journal: "keyed", began: time.Now(),
		budget: check.Budget{Ratio: 0.2, MinPerSecond: 3, Resends: 1}, // the defaults
		rnd:    rand.New(rand.NewPCG(seed, uint64(sum[0])<<8|uint64(sum[1]))),
		lane:   lanes.take(t, nodes+1),
		client: &http.Client{Transport: &http.Transport{DisableCompression: true}},
	}
	for i := range nodes {
		r.replicas = append(r.replicas, &replica{run: r, name: string(rune('A' + i)), node: r.lane.nodes[i+1]})
	}
	t.Cleanup(r.end)
	return r
}

// end takes everything down, and keeps what it left if the test failed.
func (r *run) end() {
	r.client.CloseIdleConnections()
	for _, g := range r.gateways {
		g.kill()
	}
	for _, b := range r.replicas {
		b.end()
		if b.relay != nil {
			b.relay.Close()
		}
	}
	r.heal()
	lanes.give(r.lane)
	if !r.t.Failed() {
		r.t.Log(strings.Join(r.told, "\n"))
		return
	}
	kept, err := r.keep()
	r.t.Logf("replay: go test ./test/netfaults -run '%s' -seed=%d -rounds=1", r.name, r.seed)
	r.t.Logf("kept in %s (%v)\n%s", kept, err, strings.Join(r.told, "\n"))
}

// keep moves the run's folder to where it stays.
func (r *run) keep() (string, error) {
	revision := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" || s.Key == "vcs.modified" {
				revision += " " + s.Value
			}
		}
	}
	about := fmt.Sprintf("run: %s\nseed: %d\nrevision: %s\n\n%s\n", r.name, r.seed, revision, strings.Join(r.told, "\n"))
	for _, a := range r.asked {
		about += fmt.Sprintf("\n%s %s, fault %q, key %q\n%s\n-> %d %v\n%s\n", a.path, a.Tag, a.fault, a.key, clip(a.body), a.Status, a.Err, a.Body)
	}
	if err := os.WriteFile(filepath.Join(r.dir, "about.txt"), []byte(about), 0o600); err != nil {
		return "", err
	}
	to := *keepFlag
	if to == "" {
		to = filepath.Join(os.Getenv(keptEnv), "netfaults-failed")
	}
	to = filepath.Join(to, strings.NewReplacer("/", "_", " ", "_").Replace(r.name)+fmt.Sprintf("_%d", time.Now().UnixNano()))
	return to, os.CopyFS(to, os.DirFS(r.dir))
}

func clip[T string | []byte](b T) T {
	if len(b) > 2000 {
		return b[:2000]
	}
	return b
}

// tell notes what is done to the run.
func (r *run) tell(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = append(r.told, fmt.Sprintf("%s %s", time.Now().Format("05.000"), fmt.Sprintf(format, args...)))
}

func (r *run) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// start starts engines, guards and the gateway, and returns when all listen.
func (r *run) start() {
	r.t.Helper()
	r.must(os.WriteFile(filepath.Join(r.dir, "token"), []byte(secret), 0o600))
	for _, b := range r.replicas {
		if !r.starts {
			r.must(b.launch())
		}
		if r.guarded {
			r.must(b.launchGuard())
		}
	}
	for _, b := range r.replicas {
		r.must(b.await())
		if r.relayed {
			var err error
			b.relay, err = real.NewRelay(net.JoinHostPort(b.node.near, "0"), b.data())
			r.must(err)
		}
	}
	r.must(os.WriteFile(filepath.Join(r.dir, "headgate.yaml"), []byte(r.yaml()), 0o600))
	r.serve()
}

func (r *run) yaml() string {
	digest := sha256.Sum256([]byte(secret))
	var static []string
	for _, b := range r.replicas {
		static = append(static, b.endpoint())
	}
	pool := r.pool
	if r.guarded {
		pool = append(pool, "guard: required", fmt.Sprintf("lease: {ttl: %v, heartbeat: %v, token_file: token}", ttl, heartbeat))
	}
	gateway := r.lane.nodes[0].addr
	return fmt.Sprintf(`gateway: {id: gw}
listeners: [{name: main, address: "%s:%d"}]
admin: {address: "%s:%d", token: "%s"}
drain_timeout: 10s
keys: [{id: client, secret_sha256: %s}]
journal: {driver: sqlite, dsn: journal.db, durability: %s}
pools:
  p:
    discovery: {static: [%s]}
    %s
`, gateway, gatewayPort, gateway, adminPort, secret, hex.EncodeToString(digest[:]), r.journal, strings.Join(static, ", "), strings.Join(pool, "\n    "))
}

// serve starts a life of the gateway.
func (r *run) serve() {
	r.t.Helper()
	g, err := r.lane.nodes[0].start("gateway", filepath.Join(r.dir, "gateway.log"),
		os.Getenv(programEnv), "serve", "--config", filepath.Join(r.dir, "headgate.yaml"),
		"--log-level", "debug", "--trace", r.trace(len(r.gateways)))
	r.must(err)
	r.gateways = append(r.gateways, g)
	if err := g.await(func(line string) bool { return strings.Contains(line, "msg=listening listener=admin") }); err != nil {
		r.t.Fatalf("gateway: %v\n%s", err, strings.Join(g.all, "\n"))
	}
	if r.guarded {
		r.must(poll("guards to be heard", func() bool {
			for _, g := range r.guardians() {
				if !g.Up {
					return false
				}
			}
			return true
		}))
	}
}

// guardian is what the gateway tells operators of a guard.
type guardian struct {
	Up         bool  `json:"up"`
	LateWrites int64 `json:"late_writes"`
}

// guardians asks the gateway for its guards.
func (r *run) guardians() []guardian {
	r.t.Helper()
	var page struct {
		Endpoints []struct {
			Guard *guardian `json:"guard"`
		} `json:"endpoints"`
	}
	body, err := r.get(adminPort, "/admin/v1/endpoints")
	if err == nil {
		err = json.Unmarshal(body, &page)
	}
	if err != nil || len(page.Endpoints) != len(r.replicas) {
		r.t.Fatalf("endpoints: %v: %s", err, body)
	}
	var all []guardian
	for _, e := range page.Endpoints {
		if e.Guard == nil {
			r.t.Fatalf("an endpoint without its guard: %s", body)
		}
		all = append(all, *e.Guard)
	}
	return all
}

// get asks the gateway itself.
func (r *run) get(port int, path string) ([]byte, error) {
	req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://%s:%d%s", r.lane.nodes[0].addr, port, path), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+secret)
	res, err := r.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s is %d: %s", path, res.StatusCode, body)
	}
	return body, err
}

func (r *run) trace(life int) string { return filepath.Join(r.dir, fmt.Sprintf("trace.%d", life)) }

func (r *run) gateway() *process { return r.gateways[len(r.gateways)-1] }

// A replica is one endpoint: an engine, maybe behind a guard, maybe behind a
// relay.
type replica struct {
	run  *run
	name string
	node *node
	boot int // seconds by which the guard's CLOCK_BOOTTIME is ahead

	engines []*process // one per life
	guards  []*process // one per life
	relay   *real.Relay
	killed  map[int]time.Time // lives that ended without a word
	log     []simengine.Entry // of all lives, as far as it was read
	read    []int             // how many lines of each life
}

// data is the address that requests come to.
func (b *replica) data() string { return fmt.Sprintf("%s:%d", b.node.addr, dataPort) }

func (b *replica) endpoint() string {
	addr := b.data()
	if b.relay != nil {
		addr = b.relay.Addr()
	}
	if b.run.guarded {
		return fmt.Sprintf("{url: %q, guard: \"%s:%d\"}", "http://"+addr, b.node.addr, controlPort)
	}
	return fmt.Sprintf("{url: %q}", "http://"+addr)
}

func (b *replica) engine() *process { return b.engines[len(b.engines)-1] }

func (b *replica) guard() *process { return b.guards[len(b.guards)-1] }

// command is the command line of the engine, and what it writes when it is ready.
func (b *replica) command() (args []string, ready string) {
	host, port := b.node.addr, dataPort
	if b.run.guarded {
		host, port = "127.0.0.1", enginePort
	}
	if b.run.llama {
		return []string{
			os.Getenv(llamaEnv), "-m", os.Getenv(modelEnv), "-a", "sim", "--host", host, "--port", strconv.Itoa(port),
			"-c", "8192", "-np", "2", "-t", "1", "--poll", "0", "--no-webui", "--jinja",
		}, fmt.Sprintf("listening on http://%s:%d", host, port)
	}
	return []string{
		os.Getenv(programEnv), "sim", "--name", b.name, "--listen", fmt.Sprintf("%s:%d", host, port), "--log", "-", "--preset", "instant",
	}, "engine " + b.name + " on "
}

// launchGuard starts a life of the guard, whose clock may be another than the
// gateway's.
func (b *replica) launchGuard() error {
	dir := b.run.dir
	args := []string{
		"unshare", "--time", "--boottime", strconv.Itoa(b.boot), "--",
		os.Getenv(programEnv), "guard", "--id", "guard-" + b.name, "--engine", fmt.Sprintf("http://127.0.0.1:%d", enginePort),
		"--listen", b.data(), "--control", fmt.Sprintf("%s:%d", b.node.addr, controlPort), "--token-file", filepath.Join(dir, "token"),
		"--lock-dir", filepath.Join(dir, "lock-"+b.name), "--log-level", "debug",
	}
	if b.run.starts {
		engine, _ := b.command()
		args = append(append(args, "--"), engine...)
	}
	p, err := b.node.start("guard "+b.name, filepath.Join(dir, fmt.Sprintf("guard-%s.%d.log", b.name, len(b.guards))), args...)
	if err != nil {
		return err
	}
	b.guards = append(b.guards, p)
	if b.run.starts { // its output is the engine's too
		b.engines, b.read = append(b.engines, p), append(b.read, 0)
	}
	return nil
}

// launch starts a life of the engine.
func (b *replica) launch() error {
	args, _ := b.command()
	p, err := b.node.start("engine "+b.name, filepath.Join(b.run.dir, fmt.Sprintf("engine-%s.%d.log", b.name, len(b.engines))), args...)
	if err != nil {
		return err
	}
	b.engines = append(b.engines, p)
	b.read = append(b.read, 0)
	return nil
}

// await waits until the newest life listens.
func (b *replica) await() error {
	_, ready := b.command()
	err := b.engine().await(func(line string) bool { return strings.Contains(line, ready) })
	if err != nil {
		return fmt.Errorf("engine %s: %w: %s", b.name, err, strings.Join(b.engine().all, "\n"))
	}
	if !b.run.guarded {
		return nil
	}
	err = b.guard().await(func(line string) bool { return strings.HasPrefix(line, "guard guard-"+b.name+" on ") })
	if err != nil {
		return fmt.Errorf("guard %s: %w: %s", b.name, err, strings.Join(b.guard().all, "\n"))
	}
	return nil
}

// killEngine is kill -9 for the engine.
func (b *replica) killEngine() error {
	life := len(b.engines) - 1
	if b.killed == nil {
		b.killed = map[int]time.Time{}
	}
	b.killed[life] = time.Now()
	p := b.engines[life]
	if !b.run.starts {
		p.kill()
		return nil
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", p.pid(), p.pid()))
	if err != nil {
		return err
	}
	all := strings.Fields(string(children))
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.pid()))
	if err != nil {
		return err
	}
	for _, task := range tasks {
		more, _ := os.ReadFile(task) // a thread may have ended
		all = append(all, strings.Fields(string(more))...)
	}
	if len(all) == 0 {
		return fmt.Errorf("guard %s has no engine", b.name)
	}
	pid, err := strconv.Atoi(all[0])
	if err != nil {
		return err
	}
	return syscall.Kill(pid, syscall.SIGKILL) // and the guard ends with it
}

// end ends all processes of the replica.
func (b *replica) end() {
	for _, p := range slices.Concat(b.guards, b.engines) {
		p.kill()
	}
}

// entries are what the engine has logged, with an end for each life that could
// not log its own.
func (b *replica) entries() []simengine.Entry {
	for life, p := range b.engines {
		found, _, _ := p.since(b.read[life])
		b.read[life] += len(found)
		for _, line := range found {
			var e simengine.Entry
			if !strings.HasPrefix(line, "{") || json.Unmarshal([]byte(line), &e) != nil {
				continue
			}
			e.Incarnation = life + 1
			b.log = append(b.log, e)
		}
		if at, ok := b.killed[life]; ok && !p.alive() {
			b.log = append(b.log, simengine.Entry{Engine: b.name, Incarnation: life + 1, Event: simengine.EventExit, T: at})
			delete(b.killed, life)
		}
	}
	return b.log
}

// log is what all engines have logged, in order of time.
func (r *run) log() []simengine.Entry {
	var all []simengine.Entry
	for _, b := range r.replicas {
		all = append(all, b.entries()...)
	}
	slices.SortStableFunc(all, func(a, b simengine.Entry) int { return a.T.Compare(b.T) })
	return all
}

// arrivals are the attempts at requests that engines got, oldest first.
func (r *run) arrivals() []simengine.Entry {
	return slices.DeleteFunc(r.log(), func(e simengine.Entry) bool {
		return e.Event != simengine.EventReceived || e.Method != http.MethodPost
	})
}

// awaitEntry waits for an entry of any engine and says whose it is.
func (r *run) awaitEntry(what string, match func(simengine.Entry) bool) (found *replica, entry simengine.Entry) {
	r.t.Helper()
	err := poll(what, func() bool {
		for _, b := range r.replicas {
			for _, e := range b.entries() {
				if match(e) {
					found, entry = b, e
					return true
				}
			}
		}
		return false
	})
	if err != nil {
		r.t.Fatalf("%v\n%s", err, r.story())
	}
	return found, entry
}

// story is what the engines say, for failure messages.
func (r *run) story() string {
	var b strings.Builder
	for _, e := range r.log() {
		if e.Request == "" && e.Event != simengine.EventListening && e.Event != simengine.EventExit {
			continue
		}
		fmt.Fprintf(&b, "    %s %s%d life %d c%d %s %d %s %s\n", e.T.Format("05.000"), e.Engine, e.Attempt, e.Incarnation, e.Conn, e.Event, e.N, e.Path, e.Detail)
	}
	return b.String()
}

// A way is a path between the gateway and a replica.
type way struct {
	addr string
	port int // 0: all
}

// dataWay and controlWay are the two. A relay is on the replica's side of a cut.
func (b *replica) dataWay() way {
	if b.relay != nil {
		return way{b.node.near, 0}
	}
	return way{b.node.addr, dataPort}
}

// link is all ways.
func (b *replica) link() []way {
	if b.relay != nil {
		return []way{{b.node.addr, 0}, {b.node.near, 0}}
	}
	return []way{{b.node.addr, 0}}
}

func (b *replica) controlWay() way { return way{b.node.addr, controlPort} }

// cut drops everything on these ways from now on: towards the replica, towards
// the gateway, or both.
func (r *run) cut(toReplica, toGateway bool, ways ...way) {
	r.t.Helper()
	gateway := r.lane.nodes[0].addr
	var list []cut
	for _, w := range ways {
		if toReplica {
			list = append(list, cut{gateway, w.addr, w.port})
		}
		if toGateway {
			list = append(list, cut{w.addr, gateway, w.port})
		}
	}
	r.must(change("add", list))
	r.tell("cut %v: to the replica %v, to the gateway %v", ways, toReplica, toGateway)
	r.cuts = append(r.cuts, list...)
}

// heal ends all cuts.
func (r *run) heal() {
	if err := change("delete", r.cuts); err != nil {
		r.t.Error(err)
	}
	r.cuts = nil
}

// ask is one request.
type ask struct {
	path   string
	stream bool
	tokens int // per choice
	n      int // choices
	pad    int // bytes of the prompt
	fault  string
	key    string // Idempotency-Key
	more   map[string]any
}

func (q ask) content() string {
	m := map[string]any{"model": "sim", "stream": q.stream, "max_tokens": q.tokens, "n": q.n}
	text := strings.Repeat("word ", q.pad/5+1)
	if q.path == "/v1/completions" {
		m["prompt"] = text
	} else {
		m["messages"] = []any{map[string]string{"role": "user", "content": text}}
	}
	maps.Copy(m, q.more)
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // not reached: these values always encode
	}
	return string(b)
}

// asked is a request under way, and what its client has got so far.
type asked struct {
	ask
	body string
	done chan struct{} // closed when the answer is over, and check.Answer whole

	check.Answer
	over time.Time // when the answer was over
	told bool      // the answer is the stored error of another one

	mu   sync.Mutex
	got  []byte
	more chan struct{}
}

// send sends a request, beside the test.
func (r *run) send(q ask) *asked {
	r.t.Helper()
	a := &asked{ask: q, body: q.content(), done: make(chan struct{}), more: make(chan struct{})}
	a.Tag = fmt.Sprintf("ask-%d", len(r.asked)+1)
	a.Answer.Stream, a.MaxTokens, a.Choices = q.stream, q.tokens, q.n
	r.asked = append(r.asked, a)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost,
		fmt.Sprintf("http://%s:%d%s", r.lane.nodes[0].addr, gatewayPort, q.path), strings.NewReader(a.body))
	r.must(err)
	req.GetBody = nil // net/http would send a keyed request again by itself
	for name, value := range map[string]string{
		"Content-Type": "application/json", "Authorization": "Bearer " + secret, check.TagHeader: a.Tag,
		"X-Sim-Fault": q.fault, "Idempotency-Key": q.key,
	} {
		if value != "" {
			req.Header.Set(name, value)
		}
	}
	go func() {
		defer close(a.done)
		defer cancel()
		defer func() { a.over = time.Now() }()
		res, err := r.client.Do(req)
		if err != nil {
			a.Err = err
			return
		}
		defer res.Body.Close()
		a.Status, a.Request = res.StatusCode, res.Header.Get("X-Request-Id")
		a.Err = a.readAll(res.Body)
		a.Answer.Body = a.got
	}()
	r.t.Cleanup(func() { <-a.done })
	return a
}

func (a *asked) isOver() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

func (a *asked) readAll(from io.Reader) error {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		a.mu.Lock()
		a.got = append(a.got, buf[:n]...)
		close(a.more)
		a.more = make(chan struct{})
		a.mu.Unlock()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// tokens waits until the client has so many tokens.
func (r *run) tokens(a *asked, n int) {
	r.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		a.mu.Lock()
		have, more := bytes.Count(a.got, []byte("·")), a.more
		a.mu.Unlock()
		if have >= n {
			return
		}
		select {
		case <-more:
		case <-a.done:
			r.t.Fatalf("the answer is over with %d tokens of %d: %d %v %s\n%s", have, n, a.Status, a.Err, a.Body, r.story())
		case <-late.C:
			r.t.Fatalf("%d tokens of %d within %v\n%s", have, n, patience, r.story())
		}
	}
}

// answered waits for the end of an answer.
func (r *run) answered(a *asked) check.Answer {
	r.t.Helper()
	<-a.done // by the deadline of its context at the latest
	return a.Answer
}

// terminate is SIGTERM, and a wait for the gateway's orderly end.
func (r *run) terminate() {
	r.t.Helper()
	g := r.gateway()
	r.must(g.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-g.exited:
	case <-time.After(patience):
		r.t.Errorf("I10: the gateway does not end")
		g.kill()
	}
	r.tell("gateway ended")
	if code := g.cmd.ProcessState.ExitCode(); code != 0 {
		r.t.Errorf("the gateway ended with %v", g.cmd.ProcessState)
	}
}
