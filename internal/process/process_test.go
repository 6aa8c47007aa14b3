// SPDX-License-Identifier: Apache-2.0

//go:build unix

package process_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/internal/process"
)

// role makes the test's own program one that starts another and waits to be
// killed.
const role = "HEADGATE_PROCESS_TEST_ROLE"

func TestMain(m *testing.M) {
	if os.Getenv(role) == "" {
		goleak.VerifyTestMain(m)
		return
	}
	if _, err := process.Start([]string{"sleep", "1000"}); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("started")
	select {}
}

func TestAProgramDiesWithThisProcess(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux can do that")
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), role+"=parent")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(out)
	if line, err := r.ReadString('\n'); line != "started\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// The program has the pipe too: it ends when both have.
	ended(t, r)
	_ = cmd.Wait() // it was killed
}

func ended(t *testing.T, r io.Reader) {
	t.Helper()
	done := make(chan error, 1)
	go func() { _, err := io.Copy(io.Discard, r); done <- err }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("somebody still runs after a minute")
	}
}

// script starts a shell script that has a fifo open while it, or anything that it
// started, runs. It returns once the script has written its first line there.
func script(t *testing.T, text string) (*process.Process, io.Reader) {
	t.Helper()
	fifo := filepath.Join(t.TempDir(), "fifo")
	if out, err := exec.Command("mkfifo", fifo).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	p, err := process.Start([]string{"sh", "-c", text}, "FIFO="+fifo)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(fifo)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	r := bufio.NewReader(f)
	if line, err := r.ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return p, r
}

func TestStopEndsAProgramAndWhatItStarted(t *testing.T) {
	for name, c := range map[string]struct {
		script   string
		patience time.Duration
		code     int
	}{
		"that ends by itself":         {`exec >$FIFO; sleep 1000 & trap 'exit 7' TERM; echo ready; wait`, time.Minute, 7},
		"that ignores it":             {`exec >$FIFO; trap '' TERM; echo ready; while :; do sleep 1000; done`, time.Millisecond, 128 + 9},
		"that leaves a worker behind": {`exec >$FIFO; (trap '' TERM; sleep 1000; sleep 1000) & echo ready; wait`, time.Minute, 128 + 15},
	} {
		t.Run(name, func(t *testing.T) {
			p, r := script(t, c.script)
			p.Stop(c.patience)
			if p.Code() != c.code {
				t.Errorf("exit code %d, want %d", p.Code(), c.code)
			}
			ended(t, r)
			p.Stop(c.patience) // nobody is there any more
		})
	}
}

func TestWhatAProgramLeavesBehindIsKilled(t *testing.T) {
	p, r := script(t, `exec >$FIFO; sleep 1000 & echo ready; exit 3`)
	<-p.Exited()
	if p.Code() != 3 {
		t.Errorf("exit code %d", p.Code())
	}
	ended(t, r)
}

func TestRun(t *testing.T) {
	ctx := t.Context()
	if out, err := process.Run(ctx, []string{"sh", "-c", `echo "$WHO"; echo err >&2`}, "WHO=me"); err != nil || out != "me\nerr" {
		t.Errorf("%q, %v", out, err)
	}
	if out, err := process.Run(ctx, []string{"sh", "-c", "echo no; exit 5"}); err == nil || err.Error() != "exit code 5" || out != "no" {
		t.Errorf("%q, %v", out, err)
	}
	if _, err := process.Run(ctx, []string{filepath.Join(t.TempDir(), "nothing")}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	out, err := process.Run(ctx, []string{"sh", "-c", "head -c 100000 /dev/zero | tr '\\0' a; echo end"})
	if err != nil || len(out) > 4<<10 || !strings.HasSuffix(out, "aend") {
		t.Errorf("%d bytes kept, %v", len(out), err)
	}
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if _, err := process.Run(short, []string{"sleep", "1000"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

// A hook may leave a daemon running.
func TestRunLeavesWhatWasLeftRunning(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if out, err := exec.Command("mkfifo", fifo).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if _, err := process.Run(t.Context(), []string{"sh", "-c", `(read line <$FIFO; echo "got $line" >$FIFO) >/dev/null 2>&1 & exit 0`}, "FIFO="+fifo); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(fifo, []byte("it\n"), 0); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(fifo)
	if err != nil || string(got) != "got it\n" {
		t.Errorf("%q, %v", got, err)
	}
}
