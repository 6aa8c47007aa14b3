// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/headgate/headgate/internal/journal"
)

// small mounts a file system of that size, or skips.
func small(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("mounting a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

func TestFullDisk(t *testing.T) {
	dir := small(t, "2m")
	ballast := filepath.Join(dir, "ballast")
	outage(t, filepath.Join(dir, "j.db"),
		func() {
			f, err := os.Create(ballast)
			must(t, err)
			defer f.Close()
			for block := make([]byte, 4096); err == nil; {
				_, err = f.Write(block)
			}
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
		},
		func() { must(t, os.Remove(ballast)) })
}

// TestFileLimit: writes fail with an I/O error instead of a full disk.
func TestFileLimit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j.db")
	var before syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &before))
	mend := func() { must(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &before)) }
	defer mend()
	outage(t, path,
		func() { must(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 4096, Max: before.Max})) },
		mend)
}

func TestReadOnlyDisk(t *testing.T) {
	dir := small(t, "4m")
	path := filepath.Join(dir, "j.db")
	must(t, newJournal(t, path).Close())
	must(t, syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT|syscall.MS_RDONLY, "size=4m"))
	if _, err := Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("open: %v", err)
	}
	must(t, syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT, "size=4m"))
	must(t, newJournal(t, path).Close())
}

// TestDiskTurnsReadOnly while the journal runs, as a failing disk does.
func TestDiskTurnsReadOnly(t *testing.T) {
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "j.db"))
	must(t, err)
	defer s.Close()
	_, err = s.conn.ExecContext(t.Context(), "PRAGMA query_only = on")
	must(t, err)
	err = s.Update(t.Context(), true, func(tx journal.Tx) error {
		_, _, err := tx.Raise("gw")
		return err
	})
	if !errors.Is(err, journal.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}
