// SPDX-License-Identifier: Apache-2.0

package journal

// stage is a place at which a test may kill the process: see faultpoint_on.go.
type stage uint8

const (
	stageQueue     stage = iota // before the event is queued
	stageWrite                  // before it is written
	stageCommit                 // written, before the transaction is committed
	stageCommitted              // committed, before whoever waits is told
)

var stageNames = [...]string{"queue", "write", "commit", "committed"}

func (s stage) String() string { return stageNames[s] }
