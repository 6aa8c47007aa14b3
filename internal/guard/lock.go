// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/headgate/headgate/internal/fleet"
)

// lockPause is the time between two tries to take a lock.
const lockPause = 50 * time.Millisecond

// LockEngine takes the exclusive lock of an engine, and waits for it until ctx
// is done. The kernel gives it back when the process ends, however it ends, and
// not before: a process that is stopped keeps it.
//
// Guards of one engine must share dir, and see it as the same file system.
func LockEngine(ctx context.Context, dir string, engine *url.URL) (release func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("lock folder: %w", err)
	}
	sum := sha256.Sum256([]byte(fleet.NewEndpoint(engine, "").ID))
	path := filepath.Join(dir, "engine-"+hex.EncodeToString(sum[:8])+".lock")
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of the engine: %w", err)
	}
	for {
		err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			break
		}
		select {
		case <-ctx.Done():
			_ = file.Close()
			return nil, fmt.Errorf("another guard of %s is at work: it holds %s", engine.Redacted(), path)
		case <-time.After(lockPause):
		}
	}
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() { _ = file.Close() }, nil
}
