// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"errors"
	"fmt"

	driver "modernc.org/sqlite"
	codes "modernc.org/sqlite/lib"

	"github.com/headgate/headgate/internal/journal"
)

// wrap marks what is wrong with the disk or the file, and not with a statement
// of ours, as journal.ErrUnavailable.
func wrap(err error) error {
	if err == nil || errors.Is(err, journal.ErrUnavailable) {
		return err
	}
	e, ok := errors.AsType[*driver.Error](err)
	if !ok {
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return fmt.Errorf("%w: %w", journal.ErrUnavailable, err)
	}
	switch e.Code() & 0xff {
	case codes.SQLITE_ERROR, codes.SQLITE_CONSTRAINT, codes.SQLITE_MISMATCH, codes.SQLITE_MISUSE,
		codes.SQLITE_RANGE, codes.SQLITE_TOOBIG, codes.SQLITE_INTERNAL:
		return err
	}
	return fmt.Errorf("%w: %w", journal.ErrUnavailable, err)
}

// ioFailed reports whether a read, write or sync of the file went wrong.
func ioFailed(err error) bool {
	e, ok := errors.AsType[*driver.Error](err)
	return ok && e.Code()&0xff == codes.SQLITE_IOERR
}
