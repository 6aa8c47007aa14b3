// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// reader goes through the lines of a trace, without the blank ones, and knows
// where it is. A done context ends it.
type reader struct {
	ctx   context.Context
	name  string
	in    io.Reader
	lines *bufio.Scanner
	line  int // the one at hand, from 1
}

// lineMax is the longest line of a trace in bytes: its prompt has a million blocks.
const lineMax = 8 << 20

func newReader(ctx context.Context, name string, in io.Reader) *reader {
	r := &reader{ctx: ctx, name: name, in: in}
	r.lines = bufio.NewScanner(r)
	r.lines.Buffer(make([]byte, 64<<10), lineMax)
	return r
}

// Read looks at the context each time, so that a file of any size is let go of.
func (r *reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.in.Read(p)
}

// next goes to the next line that is not blank. At the end err says why it is one.
func (r *reader) next() bool {
	for r.lines.Scan() {
		if r.line++; r.text() != "" {
			return true
		}
	}
	return false
}

func (r *reader) text() string { return strings.TrimSpace(r.lines.Text()) }

func (r *reader) err() error {
	switch err := r.lines.Err(); {
	case err == nil:
		return nil
	case errors.Is(err, bufio.ErrTooLong):
		r.line++
		return r.at(fmt.Errorf("is longer than %d bytes", lineMax))
	default:
		return fmt.Errorf("%s: %w", r.name, err)
	}
}

// at says where an error is.
func (r *reader) at(err error) error { return fmt.Errorf("%s:%d: %w", r.name, r.line, err) }

// tokensMax is what an engine with the most memory holds.
var tokensMax = func() (most int) {
	for _, e := range Engines {
		most = max(most, e.KVTokens)
	}
	return most
}()

// tokens checks a length. A request of no tokens is none, and one that no engine
// holds is more likely a column mistaken for another.
func tokens(n float64) (int, error) {
	if !(n >= 1 && n <= float64(tokensMax)) || n != math.Trunc(n) {
		return 0, fmt.Errorf("%s: want a whole number from 1 to %d", strconv.FormatFloat(n, 'f', -1, 64), tokensMax)
	}
	return int(n), nil
}

// mooncakeRow is one line of a Mooncake trace.
type mooncakeRow struct {
	ms      float64 // after the trace's first one
	in, out int
	blocks  []int64 // of 512 tokens; nil: not known
	line    int
}

// readMooncake gives the rows by their times, which may count from anywhere.
func readMooncake(r *reader) ([]mooncakeRow, error) {
	var rows []mooncakeRow
	for r.next() {
		row, err := parseMooncake(r.lines.Bytes())
		if err != nil {
			return nil, r.at(err)
		}
		row.line = r.line
		rows = append(rows, row)
	}
	if err := r.err(); err != nil || len(rows) == 0 {
		return nil, err
	}
	without := slices.IndexFunc(rows, func(row mooncakeRow) bool { return row.blocks == nil })
	if without >= 0 && slices.ContainsFunc(rows, func(row mooncakeRow) bool { return row.blocks != nil }) {
		return nil, fmt.Errorf("%s:%d: no hash_ids, though other lines have them", r.name, rows[without].line)
	}
	slices.SortStableFunc(rows, func(a, b mooncakeRow) int { return cmp.Compare(a.ms, b.ms) })
	first := rows[0].ms
	for i := range rows {
		rows[i].ms -= first
	}
	return rows, nil
}

func parseMooncake(text []byte) (row mooncakeRow, err error) {
	// Pointers tell a field that is missing from one that is 0.
	var raw struct {
		Timestamp *float64 `json:"timestamp"` // ms
		In        *float64 `json:"input_length"`
		Out       *float64 `json:"output_length"`
		Blocks    []int64  `json:"hash_ids"`
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		return row, fieldError(text, err)
	}
	if raw.Timestamp == nil {
		return row, errors.New("no timestamp")
	}
	row.ms, row.blocks = *raw.Timestamp, raw.Blocks
	for _, field := range []struct {
		name string
		from *float64
		to   *int
	}{{"input_length", raw.In, &row.in}, {"output_length", raw.Out, &row.out}} {
		if field.from == nil {
			return row, fmt.Errorf("no %s", field.name)
		}
		if *field.to, err = tokens(*field.from); err != nil {
			return row, fmt.Errorf("%s %w", field.name, err)
		}
	}
	// Blocks of another size would be taken for prefixes far shorter than they are.
	if most := row.in/blockLarge + 1; len(row.blocks) > most {
		return row, fmt.Errorf("hash_ids has %d for %d tokens, want at most %d: one per %d tokens", len(row.blocks), row.in, most, blockLarge)
	}
	return row, nil
}

// lastField is the field that text breaks off in.
var lastField = regexp.MustCompile(`"(\w+)"\s*:[^:]*$`)

// fieldError names the field in which text is not what is wanted, if one is known.
func fieldError(text []byte, err error) error {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		switch wrong.Field {
		case "":
			return fmt.Errorf("is a JSON %s, want an object", wrong.Value)
		case "hash_ids":
			return fmt.Errorf("hash_ids: want a list of whole numbers of 64 bits, not %s", wrong.Value)
		}
		return fmt.Errorf("%s: want a number, not %s", wrong.Field, wrong.Value)
	}
	if broken, ok := errors.AsType[*json.SyntaxError](err); ok {
		if field := lastField.FindSubmatch(text[:min(int(broken.Offset), len(text))]); field != nil {
			return fmt.Errorf("%s: %w", field[1], err)
		}
	}
	return err
}

// azureRow is one line of an Azure LLM inference trace.
type azureRow struct {
	at      float64 // seconds
	in, out int
	line    int
}

// azureTime reads the times of 2023's traces, and those of 2024's, which have a zone.
func azureTime(text string) (at time.Time, err error) {
	for _, layout := range []string{"2006-01-02 15:04:05", "2006-01-02 15:04:05Z07:00"} {
		if at, err = time.Parse(layout, strings.TrimSpace(text)); err == nil {
			return at, nil
		}
	}
	return at, fmt.Errorf("time %q: want one like 2026-01-31 18:17:03.9799600", text)
}

// readAzure gives the rows by their times. The line of names may be missing.
func readAzure(r *reader) ([]azureRow, error) {
	var rows []azureRow
	for first := true; r.next(); first = false {
		part := strings.Split(r.text(), ",")
		at, err := azureTime(part[0])
		if first && err != nil {
			continue // names
		}
		switch {
		case len(part) != 3:
			return nil, r.at(fmt.Errorf("has %d fields, want 3: time, prompt tokens and answer tokens", len(part)))
		case err != nil:
			return nil, r.at(err)
		}
		row := azureRow{at: float64(at.UnixNano()) / 1e9, line: r.line}
		if row.in, err = count("prompt tokens", part[1]); err != nil {
			return nil, r.at(err)
		}
		if row.out, err = count("answer tokens", part[2]); err != nil {
			return nil, r.at(err)
		}
		rows = append(rows, row)
	}
	slices.SortStableFunc(rows, func(a, b azureRow) int { return cmp.Compare(a.at, b.at) })
	return rows, r.err()
}

// count is a field with a number of tokens.
func count(field, text string) (int, error) {
	n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil {
		return 0, fmt.Errorf("%s %q: want a whole number from 1 to %d", field, text, tokensMax)
	}
	whole, err := tokens(n)
	if err != nil {
		return 0, fmt.Errorf("%s %w", field, err)
	}
	return whole, nil
}
