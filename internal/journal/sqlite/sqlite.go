// SPDX-License-Identifier: Apache-2.0

// Package sqlite is the journal of one gateway in one file: no server, no cgo.
//
// It keeps rows and knows nothing of what they mean. One connection writes, in
// transactions that begin as writers, and a few read beside it (WAL mode). A
// transaction that must be durable is synced before Update returns; one that
// need not be survives the process, though not a power failure.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	_ "modernc.org/sqlite" // the driver named sqlite

	"github.com/headgate/headgate/internal/journal"
)

const (
	readers    = 4
	busyWait   = 5 * time.Second
	sweepRows  = 64   // records deleted in one Sweep
	vacuumSize = 256  // pages given back in one Sweep
	logRows    = 1000 // rows written between checkpoints beside the writer
	logMax     = 8192 // pages of the log, past which a commit checkpoints itself
)

// Store is a journal.Store in an SQLite file. Make one with Open or OpenReader.
type Store struct {
	path string
	lock *os.File // nil: only reads
	w    *sql.DB
	r    *sql.DB

	full   chan struct{}  // the log has grown: checkpoint it
	movers sync.WaitGroup // the goroutine that does

	// mu is held for the length of a transaction and guards what follows.
	mu      sync.Mutex
	conn    *sql.Conn
	stmts   statements
	synced  bool // how the connection commits at present
	rows    int  // written since the last checkpoint was asked for
	suspect bool // an I/O error may have left a hole in the write-ahead log
}

var _ journal.Store = (*Store)(nil)

// Open opens the journal in a file, making or migrating it as needed. The file
// is this process's alone: a second Open of it fails, and readers use
// OpenReader.
func Open(ctx context.Context, path string) (*Store, error) {
	s, err := open(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("journal %s: %w", path, err)
	}
	return s, nil
}

func open(ctx context.Context, path string) (_ *Store, err error) {
	s := &Store{path: path}
	defer func() {
		if err != nil {
			_ = s.Close() // the first error says more
		}
	}()
	if s.lock, err = lock(path + "-lock"); err != nil {
		return nil, err
	}
	// Made here for its permissions: SQLite gives the log files the same.
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := f.Close(); err != nil {
		return nil, err
	}
	if s.w, err = connect(path, "rw", "auto_vacuum(incremental)", "journal_mode(wal)", "synchronous(full)", fmt.Sprintf("wal_autocheckpoint(%d)", logMax)); err != nil {
		return nil, err
	}
	s.synced = true
	s.w.SetMaxOpenConns(1)
	if s.conn, err = s.w.Conn(ctx); err != nil {
		return nil, wrap(err)
	}
	if err := migrate(ctx, s.conn); err != nil {
		return nil, err
	}
	if err := s.stmts.prepare(ctx, s.conn); err != nil {
		return nil, wrap(err)
	}
	if err := s.openReaders(path); err != nil {
		return nil, err
	}
	c, err := connect(path, "rw")
	if err != nil {
		return nil, err
	}
	s.full = make(chan struct{}, 1)
	s.movers.Go(func() { s.checkpoint(c) })
	return s, nil
}

// checkpoint moves the log into the database, beside the writer, whenever it
// has grown: the syncs that this takes hold no commit up. Past logMax the
// writer finishes it, so that the log begins anew under any load.
func (s *Store) checkpoint(c *sql.DB) {
	defer c.Close()
	c.SetMaxOpenConns(1)
	for range s.full {
		// What goes wrong here, the writer will meet and report.
		_, _ = c.Exec("PRAGMA wal_checkpoint(PASSIVE)")
	}
}

// OpenReader opens a journal to look at it, while a gateway writes or not.
func OpenReader(ctx context.Context, path string) (*Store, error) {
	s := &Store{path: path}
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	if err := s.openReaders(path); err != nil {
		return nil, fmt.Errorf("journal %s: %w", path, err)
	}
	if err := s.readable(ctx); err != nil {
		_ = s.Close() // the first error says more
		return nil, fmt.Errorf("journal %s: %w", path, err)
	}
	return s, nil
}

func (s *Store) readable(ctx context.Context) error {
	c, err := s.r.Conn(ctx)
	if err != nil {
		return wrap(err)
	}
	defer c.Close()
	switch version, err := schemaVersion(ctx, c); {
	case err != nil:
		return err
	case version < len(migrations):
		return fmt.Errorf("the journal has schema %d and this binary reads %d: start a gateway on it once", version, len(migrations))
	}
	return nil
}

func (s *Store) openReaders(path string) (err error) {
	s.r, err = connect(path, "ro", "query_only(on)")
	if err == nil {
		s.r.SetMaxOpenConns(readers)
		s.r.SetMaxIdleConns(readers)
	}
	return err
}

func connect(path, mode string, pragmas ...string) (*sql.DB, error) {
	full, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	q := url.Values{"mode": {mode}}
	q.Add("_pragma", fmt.Sprintf("busy_timeout(%d)", busyWait.Milliseconds()))
	for _, p := range pragmas {
		q.Add("_pragma", p)
	}
	dsn := "file:" + (&url.URL{Path: full}).EscapedPath() + "?" + q.Encode()
	return sql.Open("sqlite", dsn)
}

// Close implements journal.Store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	if s.full != nil {
		close(s.full)
		s.movers.Wait()
		s.full = nil
	}
	if s.r != nil {
		errs = append(errs, s.r.Close())
	}
	s.stmts.close()
	if s.conn != nil {
		errs = append(errs, s.conn.Close())
		s.conn = nil
	}
	if s.w != nil {
		errs = append(errs, s.w.Close())
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	return errors.Join(errs...)
}

var errReader = errors.New("the journal is open for reading only")

// Update implements journal.Store.
func (s *Store) Update(ctx context.Context, durable bool, fn func(journal.Tx) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		return errReader
	}
	err := s.transact(ctx, durable, fn)
	s.suspect = s.suspect || ioFailed(err)
	return wrap(err)
}

func (s *Store) transact(ctx context.Context, durable bool, fn func(journal.Tx) error) error {
	if err := s.prove(ctx); err != nil {
		return err
	}
	if err := s.sync(ctx, durable); err != nil {
		return err
	}
	if _, err := s.stmts.begin.ExecContext(ctx); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	t := &tx{ctx: ctx, s: &s.stmts}
	err := fn(t)
	if err == nil {
		if _, err = s.stmts.commit.ExecContext(ctx); err == nil {
			s.grown(t.rows)
			return nil
		}
		err = fmt.Errorf("commit: %w", err)
	}
	// SQLite may have rolled back by itself; saying so again does no harm.
	_, _ = s.stmts.rollback.ExecContext(context.WithoutCancel(ctx))
	return err
}

// grown counts what went into the log.
func (s *Store) grown(rows int) {
	if s.rows += rows; s.rows < logRows {
		return
	}
	s.rows = 0
	select {
	case s.full <- struct{}{}:
	default:
	}
}

// sync chooses whether commits reach the disk. A synced commit takes with it all
// that were not, since the log is one file.
func (s *Store) sync(ctx context.Context, durable bool) error {
	if s.synced == durable {
		return nil
	}
	mode := "NORMAL"
	if durable {
		mode = "FULL"
	}
	// Not a prepared statement: SQLite sets the mode when it compiles this, and
	// not each time it is run.
	if _, err := s.conn.ExecContext(ctx, "PRAGMA synchronous = "+mode); err != nil {
		return fmt.Errorf("set synchronous: %w", err)
	}
	s.synced = durable
	return nil
}

// prove makes the log trustworthy after an I/O error. A failed sync may have
// dropped pages of it that the kernel calls clean, and after a power failure
// recovery would stop at that hole, before whatever was committed behind it. So
// everything goes into the database first, and the log begins anew.
func (s *Store) prove(ctx context.Context) error {
	if !s.suspect {
		return nil
	}
	var busy, frames, moved int
	if err := s.conn.QueryRowContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, &frames, &moved); err != nil {
		return fmt.Errorf("checkpoint after an I/O error: %w", err)
	}
	if busy != 0 {
		return fmt.Errorf("%w: checkpoint after an I/O error: readers are in the way", journal.ErrUnavailable)
	}
	s.suspect = false
	return nil
}
