// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// applicationID marks the file as a journal: "HGjr".
const applicationID = 0x48476a72

// migrations lead from each schema version to the next: the first makes
// version 1 from an empty file. One that was released is never changed.
var migrations = []string{`
CREATE TABLE gateways (
	id         TEXT PRIMARY KEY,
	generation INTEGER NOT NULL
) WITHOUT ROWID, STRICT;

CREATE TABLE requests (
	seq              INTEGER PRIMARY KEY AUTOINCREMENT,
	request_id       TEXT NOT NULL UNIQUE,
	created_at       INTEGER NOT NULL,
	tenant           TEXT NOT NULL,
	pool             TEXT NOT NULL,
	model            TEXT NOT NULL,
	outcome          TEXT NOT NULL,
	owner            TEXT NOT NULL,
	owner_generation INTEGER NOT NULL,
	first_delta_sent INTEGER NOT NULL,
	record           TEXT NOT NULL
) STRICT;
CREATE INDEX requests_filter ON requests (created_at, tenant, pool, model, outcome);
CREATE INDEX requests_tenant ON requests (tenant);
CREATE INDEX requests_outcome ON requests (outcome);

CREATE TABLE events (
	seq     INTEGER PRIMARY KEY,
	request INTEGER NOT NULL,
	event   TEXT NOT NULL
) STRICT;
CREATE INDEX events_request ON events (request);

CREATE TABLE keys (
	hash       BLOB PRIMARY KEY,
	request_id TEXT NOT NULL,
	digest     BLOB NOT NULL,
	expires_at INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE INDEX keys_expiry ON keys (expires_at);
CREATE INDEX keys_request ON keys (request_id);

CREATE TABLE answers (
	request_id TEXT PRIMARY KEY,
	expires_at INTEGER NOT NULL,
	status     INTEGER NOT NULL,
	header     TEXT NOT NULL,
	body       BLOB NOT NULL
) STRICT;
CREATE INDEX answers_expiry ON answers (expires_at);
`, `
ALTER TABLE requests ADD COLUMN unfenced INTEGER NOT NULL DEFAULT 0;
CREATE INDEX requests_unfenced ON requests (owner) WHERE unfenced <> 0;
`}

// migrate brings the file to the newest schema, forward only, each step in a
// transaction of its own.
func migrate(ctx context.Context, c *sql.Conn) error {
	version, err := schemaVersion(ctx, c)
	if err != nil {
		return err
	}
	for ; version < len(migrations); version++ {
		step := fmt.Sprintf(`BEGIN IMMEDIATE;
			PRAGMA application_id = %d;
			CREATE TABLE IF NOT EXISTS schema_version (version INTEGER PRIMARY KEY, applied_at TEXT NOT NULL) STRICT;
			%s
			INSERT INTO schema_version VALUES (%d, '%s');
			COMMIT`, applicationID, migrations[version], version+1, time.Now().UTC().Format(time.RFC3339))
		if _, err := c.ExecContext(ctx, step); err != nil {
			_, _ = c.ExecContext(ctx, "ROLLBACK") // the error says more
			return fmt.Errorf("migrate to schema %d: %w", version+1, wrap(err))
		}
	}
	return nil
}

// schemaVersion is 0 for an empty file. A file that is not a journal, or one
// that a newer Headgate has migrated, is an error.
func schemaVersion(ctx context.Context, c *sql.Conn) (int, error) {
	var id, tables, version int
	if err := c.QueryRowContext(ctx, "PRAGMA application_id").Scan(&id); err != nil {
		return 0, fmt.Errorf("read the file: %w", wrap(err))
	}
	if err := c.QueryRowContext(ctx, "SELECT count(*) FROM sqlite_schema").Scan(&tables); err != nil {
		return 0, fmt.Errorf("read the schema: %w", wrap(err))
	}
	if tables == 0 {
		return 0, nil
	}
	if id != applicationID {
		return 0, fmt.Errorf("the file is an SQLite database, and not a journal of Headgate")
	}
	if err := c.QueryRowContext(ctx, "SELECT coalesce(max(version), 0) FROM schema_version").Scan(&version); err != nil {
		return 0, fmt.Errorf("read the schema version: %w", wrap(err))
	}
	if version > len(migrations) {
		return 0, fmt.Errorf("the journal has schema %d and this binary knows up to %d: use a newer Headgate, or another journal", version, len(migrations))
	}
	return version, nil
}
