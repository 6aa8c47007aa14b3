// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
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

// window is how far back from the newest record that can match a list looks
// first. Records that match are near it more often than not, and sorting all
// that match is what takes time.
const window = 8192

// List implements journal.Store. What is asked for is found in an index alone;
// only the rows of the page are read.
func (s *Store) List(ctx context.Context, f journal.Filter) (journal.Page, error) {
	page := journal.Page{Records: []*journal.Record{}}
	records, err := s.list(ctx, f)
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

// list returns one record more than the page has, if there is one: then another
// page follows.
func (s *Store) list(ctx context.Context, f journal.Filter) ([]*journal.Record, error) {
	q := newQuery(f)
	if q.sorts {
		newest, err := s.newest(ctx, f)
		if err != nil {
			return nil, err
		}
		// With a page full of records from here on, none before can be newer.
		records, err := s.query(ctx, q, newest-window)
		if err != nil || len(records) > f.Size() {
			return records, err
		}
	}
	return s.query(ctx, q, 0)
}

// newest guesses the Seq of the newest record that the filter can match. A clock
// that was set makes it a bad guess, which costs time and nothing else.
func (s *Store) newest(ctx context.Context, f journal.Filter) (seq int64, err error) {
	if f.Before != 0 {
		return f.Before, nil
	}
	query, args := `SELECT seq FROM requests ORDER BY seq DESC LIMIT 1`, []any{}
	if f.Until != 0 {
		query, args = `SELECT seq FROM requests WHERE created_at < ? ORDER BY created_at DESC LIMIT 1`, []any{int64(f.Until)}
	}
	err = s.r.QueryRowContext(ctx, query, args...).Scan(&seq)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil
	}
	return seq, err
}

func (s *Store) query(ctx context.Context, q query, from int64) ([]*journal.Record, error) {
	rows, err := s.r.QueryContext(ctx, q.text, append([]any{from}, q.args...)...)
	if err != nil {
		return nil, err
	}
	return scanRecords(rows)
}

// query is a Filter in SQL. Its first argument is the lowest Seq to look at.
type query struct {
	text  string
	args  []any
	sorts bool // it visits all that match, to find the newest
}

func newQuery(f journal.Filter) query {
	where := []string{"seq >= ?"}
	var q query
	add := func(cond string, arg any) {
		where = append(where, cond)
		q.args = append(q.args, arg)
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
	if f.Outcome != inference.NoOutcome {
		add("outcome = ?", f.Outcome.String())
	}
	if f.Unfinished {
		add("outcome = ?", "")
	}
	from := "requests"
	// One condition on tenant or outcome has an index in the order of the list.
	// Several conditions: one pass over the index that has all columns is never
	// bad, and following one of many rows each to the table is.
	if len(q.args) > 1 || f.Since != 0 || f.Until != 0 || f.Pool != "" || f.Model != "" {
		from += " INDEXED BY requests_filter"
		q.sorts = true
	}
	if f.Before != 0 {
		add("seq < ?", f.Before)
	}
	q.args = append(q.args, f.Size()+1)
	q.text = fmt.Sprintf(`SELECT seq, record FROM requests WHERE seq IN (SELECT seq FROM %s WHERE %s ORDER BY seq DESC LIMIT ?) ORDER BY seq DESC`,
		from, strings.Join(where, " AND "))
	return q
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
