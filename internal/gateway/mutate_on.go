// SPDX-License-Identifier: Apache-2.0

//go:build mutate

package gateway

import (
	"os"

	"github.com/headgate/headgate/internal/attempt"
)

// gateless takes the gate away: output is written as it comes and the attempt
// machine is not told, so that a failure after it looks like one before. It
// exists to show that the checkers notice, in builds with the tag mutate only.
var gateless = os.Getenv("HEADGATE_MUTATE") == "no_gate"

// leak writes what is held back around the gate.
func (f *flight) leak() attempt.Event {
	t := f.try
	if !f.leaked {
		f.writeHead(t.answer.status, t.answer.header)
	}
	_, err := f.ex.Write(t.held)
	f.leaked, t.held, t.committed = true, nil, true
	return f.written(t.n, err)
}
