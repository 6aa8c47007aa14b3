// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package sqlite

import "os"

// lock only opens the file: see lock_unix.go.
func lock(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
}
