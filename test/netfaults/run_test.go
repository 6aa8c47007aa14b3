// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
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
	about := fmt.Sprintf("run: %s\nseed: %d\nrevision: %s\n\n%s\n", r.name, r.seed, os.Getenv(revisionEnv), strings.Join(r.told, "\n"))
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
	endpoint, health string

	Up         bool    `json:"up"`
	Age        float64 `json:"heartbeat_age_seconds"`
	LateWrites int64   `json:"late_writes"`
}

// guardians asks the gateway for its guards, and how well their engines are.
func (r *run) guardians() []guardian {
	r.t.Helper()
	var page struct {
		Endpoints []struct {
			Endpoint string    `json:"endpoint"`
			Health   string    `json:"health"`
			Guard    *guardian `json:"guard"`
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
		if e.Guard == nil && !r.guarded {
			e.Guard = &guardian{Up: true}
		}
		if e.Guard == nil {
			r.t.Fatalf("an endpoint without its guard: %s", body)
		}
		e.Guard.endpoint, e.Guard.health = e.Endpoint, e.Health
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
