// SPDX-License-Identifier: Apache-2.0

package filewatch

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type seen struct {
	text string
	err  error
}

// A rig watches a file in virtual time. Reading a file takes none of it.
type rig struct {
	t    *testing.T
	path string
	now  chan struct{}

	mu   sync.Mutex
	seen []seen
}

// bubble runs a test with a watcher on a file that holds "one".
func bubble(t *testing.T, w Watcher, test func(*rig)) {
	t.Helper()
	r := &rig{t: t, path: filepath.Join(t.TempDir(), "file")}
	r.write("one")
	synctest.Test(t, func(t *testing.T) {
		r.now = make(chan struct{})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		if w.Path == "" {
			w.Path = r.path
		}
		w.Now = r.now
		go func() {
			defer close(done)
			w.Run(ctx, func(data []byte, err error) {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.seen = append(r.seen, seen{string(data), err})
			})
		}()
		test(r)
		stop()
		<-done
	})
}

func (r *rig) write(text string) {
	r.t.Helper()
	if err := os.WriteFile(r.path, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// after lets time pass and returns the reports of that time.
func (r *rig) after(d time.Duration) []seen {
	time.Sleep(d) // virtual
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	got := r.seen
	r.seen = nil
	return got
}

func (r *rig) want(d time.Duration, texts ...string) {
	r.t.Helper()
	got := r.after(d)
	if len(got) != len(texts) {
		r.t.Fatalf("got %v, want %q", got, texts)
	}
	for i, s := range got {
		if s.err != nil || s.text != texts[i] {
			r.t.Errorf("got %v, want %q", got, texts)
		}
	}
}

func TestChangesAreReportedOnce(t *testing.T) {
	bubble(t, Watcher{}, func(r *rig) {
		r.want(250*time.Millisecond, "one")
		r.want(time.Minute)
		r.write("two")
		r.want(1250*time.Millisecond, "two")
		r.write("two") // touched, not changed
		r.want(time.Minute)
	})
}

func TestKnownContentIsNotReported(t *testing.T) {
	bubble(t, Watcher{Known: []byte("one")}, func(r *rig) {
		r.want(time.Minute)
		r.write("")
		r.want(2*time.Second, "")
	})
}

// A file of the same size and time, as rsync -t and cp -p leave it.
func TestTimesAreNotTrusted(t *testing.T) {
	bubble(t, Watcher{}, func(r *rig) {
		r.want(time.Second, "one")
		info, err := os.Stat(r.path)
		if err != nil {
			t.Fatal(err)
		}
		r.write("two")
		if err := os.Chtimes(r.path, info.ModTime(), info.ModTime()); err != nil {
			t.Fatal(err)
		}
		r.want(2*time.Second, "two")
	})
}

func TestHalfWrittenContentIsWaitedOut(t *testing.T) {
	bubble(t, Watcher{}, func(r *rig) {
		r.want(time.Second, "one")
		for _, part := range []string{"", "t", "tw"} {
			r.write(part)
			r.want(250 * time.Millisecond)
		}
		r.write("two")
		r.want(time.Second, "two")
	})
}

func TestMissingFileIsReportedAndItsReturn(t *testing.T) {
	bubble(t, Watcher{}, func(r *rig) {
		r.want(time.Second, "one")
		if err := os.Remove(r.path); err != nil {
			t.Fatal(err)
		}
		got := r.after(time.Minute)
		if len(got) != 1 || !errors.Is(got[0].err, fs.ErrNotExist) || got[0].text != "" {
			t.Errorf("missing: %v", got)
		}
		r.write("one")
		r.want(time.Minute, "one")
	})
}

// An editor that removes the file and writes it anew is no trouble.
func TestFileMissingForAMomentIsNotReported(t *testing.T) {
	bubble(t, Watcher{}, func(r *rig) {
		r.want(900*time.Millisecond, "one")
		if err := os.Remove(r.path); err != nil {
			t.Fatal(err)
		}
		r.want(400 * time.Millisecond)
		r.write("two")
		r.want(time.Second, "two")
	})
}

// As Kubernetes does it: file → ..data/file, ..data → a folder per version.
func TestSymlinkSwapIsNoticed(t *testing.T) {
	dir := t.TempDir()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, version := range []string{"v1", "v2"} {
		check(os.Mkdir(filepath.Join(dir, version), 0o700))
		check(os.WriteFile(filepath.Join(dir, version, "file"), []byte(version), 0o600))
	}
	check(os.Symlink("v1", filepath.Join(dir, "..data")))
	check(os.Symlink(filepath.Join("..data", "file"), filepath.Join(dir, "file")))
	bubble(t, Watcher{Path: filepath.Join(dir, "file")}, func(r *rig) {
		r.want(time.Second, "v1")
		check(os.Symlink("v2", filepath.Join(dir, "..tmp")))
		check(os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")))
		check(os.RemoveAll(filepath.Join(dir, "v1")))
		r.want(2*time.Second, "v2")
	})
}

func TestLookOnRequestReportsWhatIsKnown(t *testing.T) {
	bubble(t, Watcher{Interval: time.Hour}, func(r *rig) {
		r.want(15*time.Minute, "one")
		r.now <- struct{}{}
		r.want(15*time.Minute, "one")
		r.write("two")
		r.now <- struct{}{}
		r.want(15*time.Minute, "two")
		close(r.now)
		r.want(3 * time.Hour)
	})
}

func TestWhatIsNoSmallFileIsAnError(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	large := filepath.Join(dir, "large")
	if err := os.WriteFile(large, make([]byte, 9), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, pipe, large} {
		bubble(t, Watcher{Path: path, MaxBytes: 8}, func(r *rig) {
			if got := r.after(time.Minute); len(got) != 1 || got[0].err == nil {
				t.Errorf("%s: %v", path, got)
			}
		})
	}
}
