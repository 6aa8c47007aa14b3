// SPDX-License-Identifier: Apache-2.0

package sqlite

import "context"

// LastSeq is the sequence number of the newest event, 0 if there is none: where
// a reader begins who wants only what is to come.
func (s *Store) LastSeq(ctx context.Context) (int64, error) {
	var seq int64
	err := s.r.QueryRowContext(ctx, `SELECT coalesce(max(seq), 0) FROM events`).Scan(&seq)
	return seq, wrap(err)
}
