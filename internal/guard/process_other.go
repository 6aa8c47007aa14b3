// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package guard

import "time"

// Process is an engine that the guard started, which takes Linux.
type Process struct{}

// StartEngine fails: guards need Linux.
func StartEngine([]string) (*Process, error) { return nil, errLinux }

// Incarnation, Exited, Code and Stop have nothing to speak of.
func (*Process) Incarnation() string { return "" }

// Exited is never closed.
func (*Process) Exited() <-chan struct{} { return nil }

// Code is of nothing.
func (*Process) Code() int { return 0 }

// Stop does nothing.
func (*Process) Stop(time.Duration) {}
