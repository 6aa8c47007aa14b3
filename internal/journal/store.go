// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"context"
	"errors"
	"time"

	"github.com/headgate/headgate/inference"
)

var (
	// ErrUnavailable says that the journal could not make something durable:
	// disk full, read-only or failing, queue full, or closed. Whether it is
	// durable after all is then unknown.
	ErrUnavailable = errors.New("journal: unavailable")

	// ErrLost says that a compare-and-swap failed: the request has its outcome,
	// belongs to another owner, or the event contradicts the record. Nothing
	// changed, and nothing may be written to the client.
	ErrLost = errors.New("journal: lost")

	// ErrNotFound says that the journal has no such record.
	ErrNotFound = errors.New("journal: not found")
)

// Store keeps records. All rules are in this package; a store knows how to keep
// rows, in which order, and how to change them only if nobody else did. Methods
// are safe for concurrent use. Errors that may pass by themselves (disk full,
// read-only, busy) wrap ErrUnavailable.
type Store interface {
	// Update runs fn in one transaction: all of what it does is kept, or
	// nothing. If durable, it is on disk when Update returns nil; if not, it
	// survives a crash of the process but maybe not of the machine. fn may be
	// run again after a conflict. After an error it is unknown whether the
	// transaction was kept.
	Update(ctx context.Context, durable bool, fn func(Tx) error) error

	// Get returns one record, or ErrNotFound.
	Get(ctx context.Context, id inference.RequestID) (*Record, error)

	// List returns records, newest first by order of creation.
	List(ctx context.Context, f Filter) (Page, error)

	// Events returns events, oldest first.
	Events(ctx context.Context, f EventFilter) ([]Event, error)

	// Sweep deletes a few finished records created before a time, and answers
	// and keys that expired by now. It returns how many rows it deleted and is
	// called again until that is 0. A record whose key has not expired stays.
	Sweep(ctx context.Context, now, before Time) (int, error)

	Close() error
}

// Tx is the inside of an Update. It is used by one goroutine.
type Tx interface {
	// Raise adds one to the generation of a gateway and returns it, and the
	// sequence number of the newest event.
	Raise(gateway string) (generation uint64, lastEvent int64, err error)

	// Orphans returns unfinished records whose owner can't be alive, given
	// that this gateway has this generation.
	Orphans(gateway string, generation uint64, limit int) ([]*Record, error)

	// Unfenced returns records of this gateway with an attempt that Record.Unfenced
	// tells of.
	Unfenced(gateway string, limit int) ([]*Record, error)

	// Load returns one record, or ErrNotFound.
	Load(id inference.RequestID) (*Record, error)

	// Save keeps a record if the stored one still is as was says, and reports
	// whether it did. A new record is saved with the zero Was.
	Save(r *Record, was Was) (bool, error)

	// Log keeps an event of a saved record. One with the same Seq is there
	// already if an earlier try was kept after all: nothing
	// happens.
	Log(r *Record, e *Event) error

	// Key returns a binding, or ErrNotFound.
	Key(hash Hash) (*Binding, error)

	// Bind keeps a binding in the place of the one to the request was ("" for
	// none), and reports whether that was still so.
	Bind(b *Binding, was inference.RequestID) (bool, error)

	// Extend gives the bindings to a request another time to expire.
	Extend(id inference.RequestID, expires Time) error

	// Answer returns the stored answer of a request, or ErrNotFound.
	Answer(id inference.RequestID) (*Answer, error)

	// Keep stores an answer until a time.
	Keep(id inference.RequestID, a *Answer, expires Time) error
}

// Was is what a Save compares with.
type Was struct {
	Gateway    string
	Generation uint64
	Terminal   bool
}

func was(r *Record) Was { return Was{r.Gateway, r.Generation, r.Terminal()} }

// Filter chooses records. Zero fields choose all.
type Filter struct {
	Since, Until Time // created at or after, before
	Tenant       string
	Pool         string
	Model        string
	Outcome      inference.Outcome
	Unfinished   bool // only those without an outcome

	Before int64 // Seq of the last record of the page before
	Limit  int   // at most this many; default 100, at most 1000
}

// Page bounds.
const (
	pageDefault = 100
	pageMax     = 1000
)

// Size is the number of rows that the filter asks for.
func (f Filter) Size() int { return pageSize(f.Limit) }

func pageSize(limit int) int {
	if limit <= 0 {
		return pageDefault
	}
	return min(limit, pageMax)
}

// Page is one page of a list.
type Page struct {
	Records []*Record `json:"records"`
	Next    int64     `json:"next"` // Before of the next page; 0: this is the last
}

// EventFilter chooses events.
type EventFilter struct {
	Request inference.RequestID // "" for those of all requests
	After   int64               // Seq of the last event seen
	Limit   int                 // as in Filter
}

// Size is the number of rows that the filter asks for.
func (f EventFilter) Size() int { return pageSize(f.Limit) }

// Binding ties an Idempotency-Key to the request that it began.
type Binding struct {
	Hash    Hash // of tenant and key
	Request inference.RequestID
	Digest  Hash // of the request's body
	Expires Time
}

// Hash is a SHA-256.
type Hash [32]byte

// Durability says what is on disk before a client sees it.
type Durability uint8

// Durabilities.
const (
	// Keyed makes requests with an Idempotency-Key durable: the key before
	// dispatch, the first-delta bit before the first write.
	Keyed Durability = iota
	// Strict does the same for every request.
	Strict
	// Relaxed makes only keys durable; a crash leaves the first-delta bit
	// unproved.
	Relaxed
)

var durabilityNames = [...]string{"keyed", "strict", "relaxed"}

func (d Durability) String() string {
	if int(d) < len(durabilityNames) {
		return durabilityNames[d]
	}
	return "unknown"
}

// ParseDurability reads the word used in configuration.
func ParseDurability(word string) (Durability, bool) {
	var d Durability
	return d, byName(&d, word)
}

// sweepEvery is the pause between looks for what has expired.
const sweepEvery = 10 * time.Second
