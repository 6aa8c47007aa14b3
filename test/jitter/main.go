// SPDX-License-Identifier: Apache-2.0

// Command jitter writes an overlay for go build and go test with which a program
// stands still for a moment, now and then: after it takes up a lock or releases
// one, is woken by a channel, or has read from or written to a connection.
//
//	go run ./test/jitter DIR && GOMAXPROCS=8 go test -overlay DIR/overlay.json ./...
//
// What a test takes for granted and nothing ensures ("it has surely noted that by
// now") then fails within minutes, and not once in a thousand runs of a busy
// machine. The delays are real time: in a bubble of testing/synctest they take
// none. The command changes copies of the standard library's files, and refuses
// where they are not as it knows them.
package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// delay stands still for up to 0.3 ms, and each eighth time for up to 8 ms: longer
// than a busy machine's scheduler lets a goroutine wait, often enough to matter.
// The thread sleeps and not the goroutine, so that no other clock is involved.
const delay = `package runtime

import _ "unsafe"

//go:linkname sync_runtime_jitter sync.runtime_jitter
func sync_runtime_jitter(odds uint32) { jitter(odds) }

//go:linkname poll_runtime_jitter internal/poll.runtime_jitter
func poll_runtime_jitter(odds uint32) { jitter(odds) }

func jitter(odds uint32) {
	if cheaprandn(odds) != 0 {
		return
	}
	n := cheaprandn(300)
	if cheaprandn(8) == 0 {
		n = cheaprandn(8000)
	}
	systemstack(func() { usleep(n) })
}
`

const linked = `package %s

import _ "unsafe"

//go:linkname runtime_jitter
func runtime_jitter(odds uint32)
`

// added are files that the standard library does not have.
var added = map[string]string{
	"runtime/jitter.go":       delay,
	"sync/jitter.go":          fmt.Sprintf(linked, "sync"),
	"internal/poll/jitter.go": fmt.Sprintf(linked, "poll"),
}

// changes are what is said otherwise in its files: pairs of old and new, the old
// one being there once. The odds of a delay keep a test at about twice its time.
var changes = map[string][]string{
	"sync/mutex.go": {
		"\tm.mu.Lock()\n", "\truntime_jitter(400)\n\tm.mu.Lock()\n",
		"\tm.mu.Unlock()\n", "\tm.mu.Unlock()\n\truntime_jitter(400)\n",
	},
	"internal/poll/fd_unix.go": {
		"func (fd *FD) Read(p []byte) (int, error) {\n", "func (fd *FD) Read(p []byte) (int, error) {\n\tdefer runtime_jitter(12)\n",
		"func (fd *FD) Write(p []byte) (int, error) {\n", "func (fd *FD) Write(p []byte) (int, error) {\n\tdefer runtime_jitter(12)\n",
	},
	"runtime/proc.go": {
		"\treleasem(mp)\n\t// can't do anything that might move the G between Ms here.\n\tmcall(park_m)\n",
		"\treleasem(mp)\n\tmcall(park_m)\n\tswitch reason {\n" +
			"\tcase waitReasonChanReceive, waitReasonChanSend, waitReasonSelect, waitReasonSyncMutexLock, waitReasonSyncCondWait, waitReasonSyncWaitGroupWait:\n" +
			"\t\tjitter(60)\n\t}\n",
	},
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: jitter DIR")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "jitter:", err)
		os.Exit(1)
	}
}

func write(dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("go env GOROOT: %w", err)
	}
	library := filepath.Join(strings.TrimSpace(string(root)), "src")
	texts := maps.Clone(added)
	for name, pairs := range changes {
		text, err := os.ReadFile(filepath.Join(library, name))
		if err != nil {
			return err
		}
		if texts[name], err = changed(string(text), pairs); err != nil {
			return fmt.Errorf("%s of this Go: %w", name, err)
		}
	}
	var overlay struct{ Replace map[string]string }
	overlay.Replace = map[string]string{}
	for name, text := range texts {
		to := filepath.Join(dir, strings.ReplaceAll(name, "/", "_"))
		if err := os.WriteFile(to, []byte(text), 0o600); err != nil {
			return err
		}
		overlay.Replace[filepath.Join(library, name)] = to
	}
	text, err := json.MarshalIndent(overlay, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "overlay.json"), text, 0o600)
}

func changed(text string, pairs []string) (string, error) {
	for i := 0; i < len(pairs); i += 2 {
		if n := strings.Count(text, pairs[i]); n != 1 {
			return "", fmt.Errorf("%q is there %d times", pairs[i], n)
		}
		text = strings.Replace(text, pairs[i], pairs[i+1], 1)
	}
	return text, nil
}
