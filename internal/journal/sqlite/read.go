// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/journal"
)

// Get implements journal.Store.
func (s *Store) Get(ctx context.Context, id inference.RequestID) (*journal.Record, error) {
	r, err := scanRecord(s.r.QueryRowContext(ctx, `SELECT seq, record FROM requests WHERE request_id = ?`, string(id)))
	return r, wrapRead(err)
}

// List implements journal.Store. What is asked for is found in an index alone;
// only the rows of the page are read.
func (s *Store) List(ctx context.Context, f journal.Filter) (journal.Page, error) {
	page := journal.Page{Records: []*journal.Record{}}
	query, args := listQuery(f)
	rows, err := s.r.QueryContext(ctx, query, args...)
	if err != nil {
		return page, wrap(err)
	}
	records, err := scanRecords(rows)
	if err != nil {
		return page, wrap(err)
	}
	if len(records) > f.Size() {
		records = records[:f.Size()]
		page.Next = records[f.Size()-1].Seq
	}
	page.Records = append(page.Records, records...)
	return page, nil
}

// listQuery asks for one row more than the page has, to know whether another
// page follows.
func listQuery(f journal.Filter) (string, []any) {
	var where []string
	var args []any
	add := func(cond string, arg any) {
		where = append(where, cond)
		args = append(args, arg)
	}
	if f.Since != 0 {
		add("created_at >= ?", int64(f.Since))
	}
	if f.Until != 0 {
		add("created_at < ?", int64(f.Until))
	}
	if f.Tenant != "" {
		add("tenant = ?", f.Tenant)
	}
	if f.Pool != "" {
		add("pool = ?", f.Pool)
	}
	if f.Model != "" {
		add("model = ?", f.Model)
	}
	from := "requests"
	if f.Outcome != inference.NoOutcome {
		add("outcome = ?", f.Outcome.String())
	}
	if f.Unfinished {
		add("outcome = ?", "")
	}
	// Several conditions: one pass over the index that has all columns is never
	// bad, and following one of many rows each to the table is.
	if len(where) > 1 || f.Since != 0 || f.Until != 0 || f.Pool != "" || f.Model != "" {
		from += " INDEXED BY requests_filter"
	}
	if f.Before != 0 {
		add("seq < ?", f.Before)
	}
	cond := ""
	if len(where) > 0 {
		cond = "WHERE " + strings.Join(where, " AND ")
	}
	args = append(args, f.Size()+1)
	return fmt.Sprintf(`SELECT seq, record FROM requests WHERE seq IN (SELECT seq FROM %s %s ORDER BY seq DESC LIMIT ?) ORDER BY seq DESC`, from, cond), args
}

// Events implements journal.Store.
func (s *Store) Events(ctx context.Context, f journal.EventFilter) ([]journal.Event, error) {
	query := `SELECT e.seq, r.request_id, e.event FROM events e JOIN requests r ON r.seq = e.request WHERE e.seq > ?`
	args := []any{f.After}
	if f.Request != "" {
		query += ` AND e.request = (SELECT seq FROM requests WHERE request_id = ?)`
		args = append(args, string(f.Request))
	}
	rows, err := s.r.QueryContext(ctx, query+` ORDER BY e.seq LIMIT ?`, append(args, f.Size())...)
	if err != nil {
		return nil, wrap(err)
	}
	defer rows.Close()
	events := []journal.Event{}
	for rows.Next() {
		var seq int64
		var id, text string
		if err := rows.Scan(&seq, &id, &text); err != nil {
			return nil, wrap(err)
		}
		var e journal.Event
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			return nil, fmt.Errorf("%w: event %d: %w", journal.ErrUnavailable, seq, err)
		}
		e.Seq, e.Request = seq, inference.RequestID(id)
		events = append(events, e)
	}
	return events, wrap(rows.Err())
}

type scanner interface{ Scan(dest ...any) error }

func scanRecord(row scanner) (*journal.Record, error) {
	var seq int64
	var text string
	if err := row.Scan(&seq, &text); err != nil {
		return nil, absent(err)
	}
	r := &journal.Record{}
	if err := json.Unmarshal([]byte(text), r); err != nil {
		return nil, fmt.Errorf("%w: record %d is damaged: %w", journal.ErrNotFound, seq, err)
	}
	r.Seq = seq
	return r, nil
}

func scanRecords(rows *sql.Rows) ([]*journal.Record, error) {
	defer rows.Close()
	var records []*journal.Record
	for rows.Next() {
		r, err := scanRecord(rows)
		if err != nil {
			return nil, err
		}
		records = append(records, r)
	}
	return records, rows.Err()
}

// wrapRead leaves journal.ErrNotFound as it is.
func wrapRead(err error) error {
	if err == journal.ErrNotFound {
		return err
	}
	return wrap(err)
}
