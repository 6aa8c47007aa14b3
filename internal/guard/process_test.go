// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/freeport"
	"github.com/headgate/headgate/internal/guard/guardpb"
	"github.com/headgate/headgate/internal/lease"
)

// The test binary plays other processes too: an engine, a guard that starts one,
// and who holds an engine's lock.
const (
	roleVariable = "HEADGATE_GUARD_TEST_ROLE"
	atVariable   = "HEADGATE_GUARD_TEST_AT" // the engine's host:port, or the locks' folder
)

// crashCode is what the played engine exits with when it is asked to.
const crashCode = 7

func play(role string) int {
	at := os.Getenv(atVariable)
	switch role {
	case "engine":
		return playEngine(at)
	case "guard":
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		code, err := Run(ctx, Options{
			Config: Config{ID: "g", Engine: &url.URL{Scheme: "http", Host: at}}, Listen: "127.0.0.1:0", ControlAt: "127.0.0.1:0",
			Command: engineCommand(at), DrainTime: patience,
			Ready: func(data, _ net.Addr) { fmt.Println(data) },
		})
		fmt.Println(err)
		return code
	case "lock":
		if _, err := LockEngine(context.Background(), at, someEngine); err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("held")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return 0
	}
	return 2
}

// playEngine begins an answer to each POST and never ends it.
func playEngine(at string) int {
	err := http.ListenAndServe(at, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/exit" {
			os.Exit(crashCode)
		}
		if r.Method != http.MethodPost {
			return
		}
		_, _ = io.WriteString(w, "abc")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	fmt.Println(err)
	return 3
}

func engineCommand(at string) []string {
	return []string{"env", roleVariable + "=engine", atVariable + "=" + at, os.Args[0]}
}

var someEngine = &url.URL{Scheme: "http", Host: "127.0.0.1:1"}

// running is a guard that Run runs in this process.
type running struct {
	*rig
	stop  context.CancelFunc
	ended chan struct{}
	code  int
	err   error
}

func run(t *testing.T, o Options) *running {
	t.Helper()
	t.Parallel()
	ready := make(chan [2]net.Addr, 1)
	o.ID, o.Listen, o.ControlAt = "g", "127.0.0.1:0", "127.0.0.1:0"
	o.Ready = func(data, control net.Addr) { ready <- [2]net.Addr{data, control} }
	ctx, stop := context.WithCancel(context.Background())
	r := &running{rig: &rig{t: t}, stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.code, r.err = Run(ctx, o)
	}()
	t.Cleanup(func() { stop(); <-r.ended })
	select {
	case at := <-ready:
		r.data, r.control = at[0].String(), at[1].String()
	case <-r.ended:
		t.Fatal(r.err)
	}
	return r
}

// leaseNow is a lease by the real clock.
func (r *running) leaseNow(l *line, request string) lease.Grant {
	r.t.Helper()
	guard, err := l.beat.Guard.Lease()
	if err != nil {
		r.t.Fatal(err)
	}
	return lease.Grant{
		Key: lease.Key{Request: inference.RequestID(request), N: 1}, Guard: guard,
		NotAfter: lease.Boottime(l.beat.Now).Add(patience), Gateway: gateway,
	}
}

// awaitEngine waits until the engine behind a guard answers.
func awaitEngine(t *testing.T, r *rig) {
	t.Helper()
	r.until("the engine answers", func() bool {
		c := r.dial()
		defer c.conn.Close()
		c.send("GET")
		return c.head("GET").StatusCode == 200
	})
}

// A gateway learns that the engine's process has exited, and how, before its guard
// is gone with it; the guard's exit code is the engine's.
func TestRunEndsWithItsEngine(t *testing.T) {
	at := freeport.For(t)
	r := run(t, Options{Config: Config{Engine: &url.URL{Scheme: "http", Host: at}}, Command: engineCommand(at), DrainTime: patience})
	awaitEngine(t, r.rig)
	l, _ := r.attach(gateway, 1)
	if !l.engine.GetSupervised() || !strings.HasPrefix(l.engine.GetIncarnation(), "pid-") {
		t.Errorf("engine %v", l.engine)
	}
	g := r.leaseNow(l, "req_1")
	c := r.post(g)
	reads(t, c.head("POST").Body, "abc")
	go func() {
		if res, err := http.Get("http://" + at + "/exit"); err == nil {
			res.Body.Close()
		}
		http.DefaultClient.CloseIdleConnections()
	}()
	// The engine's connection breaks as its process ends; either may be seen first.
	e := l.end(g.Key)
	for !l.engine.GetExited() {
		if _, err := l.recv(); err != nil {
			t.Fatalf("the engine's exit was not told: %v", err)
		}
	}
	if !l.engine.GetCrashed() || l.engine.InFlight > 1 || (e.Reason == guardpb.Reason_REASON_ENGINE_EXITED) != (l.engine.InFlight == 1) {
		t.Errorf("told %v and %v", e, l.engine)
	}
	<-r.ended
	if r.code != crashCode {
		t.Errorf("exit code %d, %v", r.code, r.err)
	}
}

// A guard that is to end takes nothing new and lets what is under way end.
func TestRunDrains(t *testing.T) {
	for name, drain := range map[string]time.Duration{"in time": patience, "not in time": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			engine := newEngine(t)
			t.Cleanup(engine.stop)
			r := run(t, Options{Config: Config{Engine: &url.URL{Scheme: "http", Host: engine.listener.Addr().String()}}, DrainTime: drain})
			r.engine = engine
			l, _ := r.attach(gateway, 1)
			_, x, body := r.begin(r.leaseNow(l, "req_1"))
			r.stop()
			r.until("new connections are refused", func() bool {
				conn, err := net.Dial("tcp", r.data)
				if err == nil {
					conn.Close()
				}
				return err != nil
			})
			if drain == patience {
				x.chunk("def")
				x.write("0\r\n\r\n")
			}
			x.finish()
			rest, err := io.ReadAll(body)
			if whole := string(rest) == "def" && err == nil; whole != (drain == patience) {
				t.Errorf("read %q, %v", rest, err)
			}
			<-r.ended
			if r.code != 0 || r.err != nil {
				t.Errorf("exit code %d, %v", r.code, r.err)
			}
		})
	}
}

// What a guard can't be trusted with is refused at its start.
func TestRunRefuses(t *testing.T) {
	for name, row := range map[string]struct {
		edit func(*Options)
		want string
	}{
		"no id":                     {func(o *Options) { o.ID = "" }, "id"},
		"an open control port":      {func(o *Options) { o.ControlAt = "0.0.0.0:0" }, "token"},
		"a key without certificate": {func(o *Options) { o.Key = "key.pem" }, "certificate"},
		"no such command":           {func(o *Options) { o.Command = []string{"/no/such/engine"} }, "start the engine"},
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{Config: Config{ID: "g", Engine: someEngine}, Listen: "127.0.0.1:0", ControlAt: "127.0.0.1:0"}
			row.edit(&o)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			o.Ready = func(net.Addr, net.Addr) { cancel() } // it is not refused
			if code, err := Run(ctx, o); code == 0 || err == nil || !strings.Contains(err.Error(), row.want) {
				t.Errorf("code %d, %v", code, err)
			}
		})
	}
}

// other is another process that the test binary plays.
type other struct {
	*exec.Cmd
	out *bufio.Reader
	in  io.Closer
}

func start(t *testing.T, role, at string) *other {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleVariable+"="+role, atVariable+"="+at)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &other{cmd, bufio.NewReader(out), in}
}

func (o *other) line(t *testing.T) string {
	t.Helper()
	s, err := o.out.ReadString('\n')
	if err != nil {
		t.Fatalf("read %q, %v", s, err)
	}
	return strings.TrimSpace(s)
}

// Without a guard nobody holds an engine's work to any lease: it is gone with its
// guard, however that ends.
func TestEngineDiesWithItsGuard(t *testing.T) {
	for name, how := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "asked to end": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			at := freeport.For(t)
			guard := start(t, "guard", at)
			awaitEngine(t, &rig{t: t, data: guard.line(t)})
			// A connection to the engine itself ends when its process does.
			conn, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := guard.Process.Signal(how); err != nil {
				t.Fatal(err)
			}
			_ = conn.SetReadDeadline(time.Now().Add(patience))
			if _, err := conn.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
				t.Errorf("the engine lives: %v", err)
			}
			if how == syscall.SIGTERM {
				if err := guard.Wait(); err != nil {
					t.Errorf("the guard ended with %v", err)
				}
			}
		})
	}
}

// An engine's lock has one holder, and who holds it is gone when it is given back.
func TestLockEngine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	holder := start(t, "lock", dir)
	if got := holder.line(t); got != "held" {
		t.Fatal(got)
	}
	if _, err := LockEngine(over, dir, someEngine); err == nil {
		t.Fatal("two hold the lock")
	}
	release, err := LockEngine(over, dir, &url.URL{Scheme: "http", Host: "127.0.0.1:2"})
	if err != nil {
		t.Fatalf("another engine's lock: %v", err)
	}
	release()

	// A holder that is stopped keeps it.
	if err := holder.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if _, err := LockEngine(over, dir, someEngine); err == nil {
		t.Fatal("two hold the lock")
	}
	taken := make(chan error, 1)
	wait, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	go func() {
		release, err := LockEngine(wait, dir, someEngine)
		if err == nil {
			release()
		}
		taken <- err
	}()
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-taken; err != nil {
		t.Errorf("the lock of a process that is gone: %v", err)
	}
}
