// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/journal"
)

// statements are prepared once, on the one connection that writes.
type statements struct {
	begin, commit, rollback                      *sql.Stmt
	raise, lastEvent, orphans, unfenced, load    *sql.Stmt
	insert, update, end                          *sql.Stmt
	log, key, bind, rebind, extend, answer, keep *sql.Stmt
	sweepAnswers, sweepKeys, old                 *sql.Stmt
	dropEvents, dropRequest                      *sql.Stmt
	all                                          []*sql.Stmt
}

func (s *statements) prepare(ctx context.Context, c *sql.Conn) error {
	for _, p := range []struct {
		to    **sql.Stmt
		query string
	}{
		{&s.begin, "BEGIN IMMEDIATE"},
		{&s.commit, "COMMIT"},
		{&s.rollback, "ROLLBACK"},
		{&s.raise, `INSERT INTO gateways VALUES (?, 1) ON CONFLICT (id) DO UPDATE SET generation = generation + 1 RETURNING generation`},
		{&s.lastEvent, `SELECT coalesce(max(seq), 0) FROM events`},
		{&s.orphans, `SELECT seq, record FROM requests WHERE outcome = '' AND (owner <> ? OR owner_generation <> ?) ORDER BY seq LIMIT ?`},
		{&s.unfenced, `SELECT seq, record FROM requests WHERE unfenced <> 0 AND owner = ? ORDER BY seq LIMIT ?`},
		{&s.load, `SELECT seq, record FROM requests WHERE request_id = ?`},
		{&s.insert, `INSERT INTO requests (request_id, created_at, tenant, pool, model, outcome, owner, owner_generation, first_delta_sent, unfenced, record)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING seq`},
		// Columns of indexes are only set where they change: setting them
		// writes the indexes again.
		{&s.update, `UPDATE requests SET first_delta_sent = ?, unfenced = ?, record = ?
			WHERE request_id = ? AND owner = ? AND owner_generation = ? AND (outcome <> '') = ?`},
		{&s.end, `UPDATE requests SET first_delta_sent = ?, unfenced = ?, record = ?, outcome = ?, owner = ?, owner_generation = ?
			WHERE request_id = ? AND owner = ? AND owner_generation = ? AND (outcome <> '') = ?`},
		{&s.log, `INSERT INTO events VALUES (?, ?, ?) ON CONFLICT DO NOTHING`},
		{&s.key, `SELECT request_id, digest, expires_at FROM keys WHERE hash = ?`},
		{&s.bind, `INSERT INTO keys VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`},
		{&s.rebind, `UPDATE keys SET request_id = ?, digest = ?, expires_at = ? WHERE hash = ? AND request_id = ?`},
		{&s.extend, `UPDATE keys SET expires_at = ? WHERE request_id = ?`},
		{&s.answer, `SELECT status, header, body FROM answers WHERE request_id = ?`},
		{&s.keep, `INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)`},
		{&s.sweepAnswers, `DELETE FROM answers WHERE request_id IN (SELECT request_id FROM answers WHERE expires_at <= ? LIMIT ?)`},
		{&s.sweepKeys, `DELETE FROM keys WHERE hash IN (SELECT hash FROM keys WHERE expires_at <= ?
			AND NOT EXISTS (SELECT 1 FROM requests r WHERE r.request_id = keys.request_id AND r.outcome = '') LIMIT ?)`},
		{&s.old, `SELECT seq FROM requests WHERE created_at < ? AND outcome <> ''
			AND NOT EXISTS (SELECT 1 FROM keys k WHERE k.request_id = requests.request_id) ORDER BY created_at LIMIT ?`},
		{&s.dropEvents, `DELETE FROM events WHERE request = ?`},
		{&s.dropRequest, `DELETE FROM requests WHERE seq = ?`},
	} {
		stmt, err := c.PrepareContext(ctx, p.query)
		if err != nil {
			return fmt.Errorf("prepare %q: %w", p.query, err)
		}
		*p.to = stmt
		s.all = append(s.all, stmt)
	}
	return nil
}

func (s *statements) close() {
	for _, stmt := range s.all {
		_ = stmt.Close() // the connection goes too
	}
	s.all = nil
}

// tx implements journal.Tx.
type tx struct {
	ctx  context.Context // of the Update
	s    *statements
	rows int // written
}

func (t *tx) Raise(gateway string) (generation uint64, lastEvent int64, err error) {
	if err := t.s.raise.QueryRowContext(t.ctx, gateway).Scan(&generation); err != nil {
		return 0, 0, err
	}
	err = t.s.lastEvent.QueryRowContext(t.ctx).Scan(&lastEvent)
	return generation, lastEvent, err
}

// Orphans: the file is locked, so whoever else owns a record is dead, under
// whatever name.
func (t *tx) Orphans(gateway string, generation uint64, limit int) ([]*journal.Record, error) {
	rows, err := t.s.orphans.QueryContext(t.ctx, gateway, int64(generation), limit)
	if err != nil {
		return nil, err
	}
	return scanRecords(rows)
}

func (t *tx) Unfenced(gateway string, limit int) ([]*journal.Record, error) {
	rows, err := t.s.unfenced.QueryContext(t.ctx, gateway, limit)
	if err != nil {
		return nil, err
	}
	return scanRecords(rows)
}

func (t *tx) Load(id inference.RequestID) (*journal.Record, error) {
	return scanRecord(t.s.load.QueryRowContext(t.ctx, string(id)))
}

func (t *tx) Save(r *journal.Record, was journal.Was) (bool, error) {
	t.rows++
	record, err := json.Marshal(r)
	if err != nil {
		return false, fmt.Errorf("encode %s: %w", r.RequestID, err)
	}
	if was == (journal.Was{}) {
		err := t.s.insert.QueryRowContext(t.ctx, string(r.RequestID), int64(r.CreatedAt), r.Tenant, r.Pool, r.Model, string(r.Outcome),
			r.Gateway, int64(r.Generation), r.FirstDeltaSent, r.Unfenced() != nil, string(record)).Scan(&r.Seq)
		if errors.Is(err, sql.ErrNoRows) {
			return false, nil
		}
		return err == nil, err
	}
	if was == (journal.Was{Gateway: r.Gateway, Generation: r.Generation, Terminal: r.Terminal()}) {
		return changed(t.s.update.ExecContext(t.ctx, r.FirstDeltaSent, r.Unfenced() != nil, string(record),
			string(r.RequestID), was.Gateway, int64(was.Generation), was.Terminal))
	}
	return changed(t.s.end.ExecContext(t.ctx, r.FirstDeltaSent, r.Unfenced() != nil, string(record), string(r.Outcome), r.Gateway, int64(r.Generation),
		string(r.RequestID), was.Gateway, int64(was.Generation), was.Terminal))
}

func changed(res sql.Result, err error) (bool, error) {
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n > 0, err
}

func (t *tx) Log(r *journal.Record, e *journal.Event) error {
	t.rows++
	bare := *e
	bare.Seq, bare.Request = 0, "" // columns
	event, err := json.Marshal(bare)
	if err != nil {
		return fmt.Errorf("encode an event of %s: %w", e.Request, err)
	}
	_, err = t.s.log.ExecContext(t.ctx, e.Seq, r.Seq, string(event))
	return err
}

func (t *tx) Key(hash journal.Hash) (*journal.Binding, error) {
	b := &journal.Binding{Hash: hash}
	var digest []byte
	err := t.s.key.QueryRowContext(t.ctx, hash[:]).Scan(&b.Request, &digest, &b.Expires)
	if err != nil {
		return nil, absent(err)
	}
	copy(b.Digest[:], digest)
	return b, nil
}

func (t *tx) Bind(b *journal.Binding, was inference.RequestID) (bool, error) {
	if was == "" {
		return changed(t.s.bind.ExecContext(t.ctx, b.Hash[:], string(b.Request), b.Digest[:], int64(b.Expires)))
	}
	return changed(t.s.rebind.ExecContext(t.ctx, string(b.Request), b.Digest[:], int64(b.Expires), b.Hash[:], string(was)))
}

func (t *tx) Extend(id inference.RequestID, expires journal.Time) error {
	_, err := t.s.extend.ExecContext(t.ctx, int64(expires), string(id))
	return err
}

func (t *tx) Answer(id inference.RequestID) (*journal.Answer, error) {
	a := &journal.Answer{}
	var header string
	if err := t.s.answer.QueryRowContext(t.ctx, string(id)).Scan(&a.Status, &header, &a.Body); err != nil {
		return nil, absent(err)
	}
	if err := json.Unmarshal([]byte(header), &a.Header); err != nil {
		return nil, fmt.Errorf("%w: answer of %s: %w", journal.ErrUnavailable, id, err)
	}
	return a, nil
}

func (t *tx) Keep(id inference.RequestID, a *journal.Answer, expires journal.Time) error {
	header, err := json.Marshal(a.Header)
	if err != nil {
		return fmt.Errorf("encode the answer of %s: %w", id, err)
	}
	body := a.Body
	if body == nil {
		body = []byte{}
	}
	_, err = t.s.keep.ExecContext(t.ctx, string(id), int64(expires), a.Status, string(header), body)
	return err
}

func absent(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return journal.ErrNotFound
	}
	return err
}

// Sweep implements journal.Store.
func (s *Store) Sweep(ctx context.Context, now, before journal.Time) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		return 0, errReader
	}
	n := 0
	err := s.transact(ctx, false, func(journal.Tx) (err error) {
		n, err = s.stmts.sweep(ctx, now, before)
		return err
	})
	s.grown(4 * n)
	s.suspect = s.suspect || ioFailed(err)
	if err != nil {
		return 0, wrap(err)
	}
	if n > 0 {
		_, err = s.conn.ExecContext(ctx, fmt.Sprintf("PRAGMA incremental_vacuum(%d)", vacuumSize))
	}
	return n, wrap(err)
}

func (s *statements) sweep(ctx context.Context, now, before journal.Time) (int, error) {
	n := 0
	for _, stmt := range []*sql.Stmt{s.sweepAnswers, s.sweepKeys} {
		res, err := stmt.ExecContext(ctx, int64(now), sweepRows)
		if err != nil {
			return 0, err
		}
		gone, err := res.RowsAffected()
		if err != nil {
			return 0, err
		}
		n += int(gone)
	}
	old, err := s.oldest(ctx, before)
	if err != nil {
		return 0, err
	}
	for _, seq := range old {
		if _, err := s.dropEvents.ExecContext(ctx, seq); err != nil {
			return 0, err
		}
		if _, err := s.dropRequest.ExecContext(ctx, seq); err != nil {
			return 0, err
		}
	}
	return n + len(old), nil
}

func (s *statements) oldest(ctx context.Context, before journal.Time) ([]int64, error) {
	rows, err := s.old.QueryContext(ctx, int64(before), sweepRows)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var old []int64
	for rows.Next() {
		var seq int64
		if err := rows.Scan(&seq); err != nil {
			return nil, err
		}
		old = append(old, seq)
	}
	return old, rows.Err()
}
