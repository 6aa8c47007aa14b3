// SPDX-License-Identifier: Apache-2.0

package model

import (
	"slices"
	"time"
)

// Stats are counters since New.
type Stats struct {
	Finished         uint64 // jobs
	Cancelled        uint64 // jobs
	Preemptions      uint64
	Steps            uint64
	Busy             time.Duration // sum of all steps begun
	QueryTokens      uint64        // prompt tokens looked up in the prefix cache, once per job
	HitTokens        uint64        // of those, found
	PromptTokens     uint64        // of jobs that reached their first token
	GenerationTokens uint64
}

// Snapshot is the engine's state between two calls.
type Snapshot struct {
	Stats
	Running      int
	Waiting      int
	Blocks       int // in all
	BlocksUsed   int // held by running jobs
	BlocksCached int // hittable, held or idle
	AdapterLoads uint64

	AdaptersResident []string // least recently used first
	AdaptersRunning  []string // of running jobs, sorted
	AdaptersWaiting  []string // of waiting jobs, sorted
}

// KVUsage is the share of KV memory in use, 0 to 1. Idle cached blocks count
// as free, as in vLLM.
func (s Snapshot) KVUsage() float64 { return float64(s.BlocksUsed) / float64(s.Blocks) }

// Snapshot reports the state. It shares nothing with the engine.
func (e *Engine) Snapshot() Snapshot {
	return Snapshot{
		Stats:            e.stats,
		Running:          len(e.batch),
		Waiting:          len(e.queue),
		Blocks:           e.p.Blocks,
		BlocksUsed:       e.pool.used(),
		BlocksCached:     len(e.pool.index),
		AdapterLoads:     e.lora.loads,
		AdaptersResident: slices.Clone(e.lora.resident),
		AdaptersRunning:  adaptersOf(e.batch),
		AdaptersWaiting:  adaptersOf(e.queue),
	}
}

func adaptersOf(seqs []*sequence) []string {
	var names []string
	for _, s := range seqs {
		if s.Adapter == "" {
			continue
		}
		if at, found := slices.BinarySearch(names, s.Adapter); !found {
			names = slices.Insert(names, at, s.Adapter)
		}
	}
	return names
}
