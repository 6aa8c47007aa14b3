// SPDX-License-Identifier: Apache-2.0

// Package bench measures what a proxy adds between clients and an engine, wire
// to wire.
//
// It owns a load generator, an engine that paces its answers, and the comparison
// of several proxies in one run. The engine writes the time into every event
// just before it sends it, on the clock that the generator reads it with, so that
// the delay of a single event is a subtraction and not an estimate. Every answer
// is checked byte by byte: a proxy that changes one has no figures.
//
// It imports no part of the gateway and treats it like any other proxy. It
// refuses to say why a proxy is slow. internal/command calls it.
package bench

import (
	"time"

	"golang.org/x/sys/unix"
)

// Times are nanoseconds of CLOCK_MONOTONIC, so that two processes of one
// machine can subtract them. Go's own monotonic clock is the same one, and
// reading it costs no system call.
var (
	epoch      = time.Now()
	epochNanos = clockNanos(unix.CLOCK_MONOTONIC)
)

func now() int64 { return epochNanos + int64(time.Since(epoch)) }

// until is how long it is until a time of now.
func until(t int64) time.Duration { return time.Duration(t - now()) }

// clockNanos reads a clock of the kernel, 0 if there is no such clock.
func clockNanos(id int32) int64 {
	var ts unix.Timespec
	if unix.ClockGettime(id, &ts) != nil {
		return 0
	}
	return ts.Nano()
}
