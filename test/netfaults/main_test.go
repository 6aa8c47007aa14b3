// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

var (
	seedFlag   = flag.Uint64("seed", 1, "seed of the first round")
	roundsFlag = flag.Int("rounds", 1, "rounds to play, each with the next seed")
	keepFlag   = flag.String("keep", "", "folder for what failing runs leave; default a new one")
)

// patience is how long anything is waited for. Only a failure gets there.
const patience = 60 * time.Second

// together is how many runs go on at the same time: most of a run is waiting.
const together = 8

// What the tests use and the process inside the namespaces is told.
const (
	insideEnv   = "HEADGATE_NETFAULTS_INSIDE" // the folder that goes with the process
	keptEnv     = "HEADGATE_NETFAULTS_KEPT"   // the folder for what stays
	revisionEnv = "HEADGATE_NETFAULTS_REVISION"
	programEnv  = "HEADGATE_NETFAULTS_PROGRAM"
	llamaEnv    = "HEADGATE_NETFAULTS_LLAMA"
	modelEnv    = "HEADGATE_NETFAULTS_MODEL"
)

// The main goroutine keeps the main thread, whose network namespace is what
// others call that of this process.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(insideEnv) == "" {
		code, err := enter()
		if err != nil {
			fmt.Fprintln(os.Stderr, "netfaults:", err)
			code = 1
		}
		os.Exit(code)
	}
	if err := settle(); err != nil {
		fmt.Fprintln(os.Stderr, "netfaults:", err)
		os.Exit(1)
	}
	if err := flag.Set("test.parallel", strconv.Itoa(together)); err != nil {
		panic(err) // not reached: the flag is testing's own
	}
	code := m.Run()
	fmt.Print(table.String())
	lanes.close()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// enter builds what is needed and runs this program again, as the first process
// of namespaces of its own.
func enter() (int, error) {
	if out, err := exec.Command("../deps/net.sh").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("test/deps/net.sh: %w\n%s", err, out)
	}
	dir, err := os.MkdirTemp("", "netfaults-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	// Not by its own name: who ends gateways by their name does not mean these.
	program := filepath.Join(dir, "program")
	build := exec.Command("go", "build", "-o", program, "github.com/headgate/headgate/cmd/headgate")
	if out, err := build.CombinedOutput(); err != nil {
		return 1, fmt.Errorf("%w\n%s", err, out)
	}
	revision, _ := exec.Command("git", "describe", "--always", "--dirty").Output() // unknown where there is no git
	env := append(os.Environ(), revisionEnv+"="+strings.TrimSpace(string(revision)), insideEnv+"="+dir, programEnv+"="+program, keptEnv+"="+os.TempDir(), "TMPDIR="+dir)
	for name, args := range map[string][]string{llamaEnv: {"llama.sh"}, modelEnv: {"model.sh", "slow"}} {
		path, err := exec.Command("../deps/"+args[0], args[1:]...).Output()
		if err != nil {
			return 1, fmt.Errorf("test/deps/%s: %w", args[0], err)
		}
		env = append(env, name+"="+strings.TrimSpace(string(path)))
	}

	inside := exec.Command("/proc/self/exe", os.Args[1:]...)
	inside.Args[0] = os.Args[0]
	inside.Stdin, inside.Stdout, inside.Stderr, inside.Env = os.Stdin, os.Stdout, os.Stderr, env
	inside.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL, // and with the first process all others go
	}
	// The first process of a namespace has no default actions.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if err := inside.Start(); err != nil {
		return 1, fmt.Errorf("user, network, mount and process namespaces: %w", err)
	}
	over := make(chan struct{})
	defer close(over)
	go func() {
		select {
		case <-signals:
			_ = inside.Process.Kill()
		case <-over:
		}
	}()
	err = inside.Wait()
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return max(inside.ProcessState.ExitCode(), 1), nil
	}
	return 0, err
}
