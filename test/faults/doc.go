// SPDX-License-Identifier: Apache-2.0

// Package faults breaks engines under a real gateway and judges what clients
// got.
//
// The gateway runs in this process on loopback sockets, in front of simulated
// engines with scripted faults; internal/sim/check is the judge. There are two
// kinds of test. Scenarios are short stories with one cause and one right
// outcome: those of the seed document, and bugs that other gateways had, by
// the ids of their cases. TestSchedules draws whole schedules from seeds:
// settings, requests, faults, clients that leave, engines that die and return.
//
// A seed fixes the schedule: what is asked, what breaks where, who leaves when.
// It does not fix the interleaving, which is the kernel's and the Go
// scheduler's: a failure that a seed found may need several tries to be seen
// again. Replay one with
//
//	go test ./test/faults -run TestSchedules -seed=123 -runs=1
//
// -runs is how many schedules are run, of about 32 requests each, with seeds
// counting up from -seed. HEADGATE_LONG=1 runs some 10,000 requests. Nothing
// here waits for time to pass: tests wait for entries of the engines' logs and
// for the gateway's recorder, with deadlines that only a failure reaches.
package faults
