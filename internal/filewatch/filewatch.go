// SPDX-License-Identifier: Apache-2.0

// Package filewatch notices when the content of a file has changed.
//
// It reads the file once a second instead of asking the kernel for events:
// those are lost by network file systems, and name a file that a Kubernetes
// ConfigMap has already replaced by swapping symbolic links. It owns when a
// content counts as whole, and refuses to know what it means. The configuration
// and discovery from files are read through it.
package filewatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// Defaults of a Watcher.
const (
	intervalDefault = time.Second
	sizeDefault     = 4 << 20
)

// ErrTooLarge is why a file larger than MaxBytes is not read.
var ErrTooLarge = errors.New("the file is too large")

// Watcher watches one path, which may be a symbolic link or lead over some.
type Watcher struct {
	// Path of the file.
	Path string

	// Interval between two looks. Default: a second. A content that is new is
	// looked at again after a quarter of it, and counts when it is still the
	// same: a writer may be at work.
	Interval time.Duration

	// MaxBytes bounds the file. Default: 4 MiB.
	MaxBytes int64

	// Known is the content that the caller has read before, which is not
	// reported. Nil: the first one is.
	Known []byte

	// Now asks for a look at once with each value it yields, whose outcome is
	// reported even where nothing changed. Default: never.
	Now <-chan struct{}
}

// Run reports what the file holds, then each change of it, until ctx is done. A
// file that is missing or can't be read is such a change, with an error and
// without data: whoever needs the content keeps what came before. When the file
// is back it is reported again, changed or not. The data is the callee's to
// keep. Reports come from this goroutine.
func (w Watcher) Run(ctx context.Context, report func(data []byte, err error)) {
	interval := w.Interval
	if interval <= 0 {
		interval = intervalDefault
	}
	var t tracker
	if w.Known != nil {
		t.state = &outcome{data: w.Known}
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case _, open := <-w.Now:
			if !open {
				w.Now = nil
				continue
			}
			t.asked = true
		}
		seen := w.look()
		switch t.observe(seen) {
		case changed:
			report(bytes.Clone(seen.data), seen.err)
			timer.Reset(interval)
		case unsure:
			timer.Reset(interval / 4)
		case same:
			timer.Reset(interval)
		}
	}
}

// An outcome is what one look found.
type outcome struct {
	data []byte
	err  error
}

func (o outcome) equal(p outcome) bool {
	if o.err != nil || p.err != nil {
		return o.err != nil && p.err != nil && o.err.Error() == p.err.Error()
	}
	return bytes.Equal(o.data, p.data)
}

// look reads the file once.
func (w Watcher) look() outcome {
	most := w.MaxBytes
	if most <= 0 {
		most = sizeDefault
	}
	// Without O_NONBLOCK opening a pipe would wait for its writer.
	f, err := os.OpenFile(w.Path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return outcome{err: err}
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return outcome{err: err}
	} else if !info.Mode().IsRegular() {
		return outcome{err: fmt.Errorf("%s is not a regular file", w.Path)}
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("%s: %w: more than %d bytes", w.Path, ErrTooLarge, most)
	}
	if err != nil {
		return outcome{err: err}
	}
	return outcome{data: data}
}

// A tracker decides which looks are worth a report.
type tracker struct {
	state *outcome // what the caller has, nil at first
	maybe *outcome // what one look found and the next must confirm
	asked bool     // a report was asked for
}

type verdict int

const (
	same verdict = iota
	unsure
	changed
)

// observe takes what a look found.
func (t *tracker) observe(seen outcome) verdict {
	had := t.state != nil && t.state.equal(seen)
	switch {
	case t.maybe != nil && t.maybe.equal(seen):
	case t.maybe == nil && had && !t.asked:
		return same
	default:
		t.maybe = &seen
		return unsure
	}
	t.maybe = nil
	if had && !t.asked {
		return same
	}
	t.state, t.asked = &seen, false
	return changed
}
