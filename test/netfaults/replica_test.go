// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/test/real"
)

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

// url is what the gateway calls the endpoint.
func (b *replica) url() string {
	if b.relay != nil {
		return "http://" + b.relay.Addr()
	}
	return "http://" + b.data()
}

// endpoint is its line in the gateway's configuration.
func (b *replica) endpoint() string {
	if b.run.guarded {
		return fmt.Sprintf("{url: %q, guard: \"%s:%d\"}", b.url(), b.node.addr, controlPort)
	}
	return fmt.Sprintf("{url: %q}", b.url())
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
		r.t.Fatalf("%v\n%s", err, r.engineLogs())
	}
	return found, entry
}

// engineLogs is what the engines say, for failure messages.
func (r *run) engineLogs() string {
	var b strings.Builder
	for _, e := range r.log() {
		if e.Request == "" && e.Event != simengine.EventListening && e.Event != simengine.EventExit {
			continue
		}
		fmt.Fprintf(&b, "    %s %s%d life %d c%d %s %d %s %s\n", e.T.Format("05.000"), e.Engine, e.Attempt, e.Incarnation, e.Conn, e.Event, e.N, e.Path, e.Detail)
	}
	return b.String()
}
