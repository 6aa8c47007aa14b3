// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

const (
	priorityMax = 1_000_000
	waitingMax  = 1_000_000
	bandsMax    = 64
	fairnessMax = 128
)

func (k *checker) flow(c *Config, path string, f Flow) {
	k.within(path+".queue.max_requests", f.Queue.MaxRequests, 1, waitingMax)
	if f.Queue.MaxBytes < bodyMin {
		k.problem(path+".queue.max_bytes", "%s is less than %s", f.Queue.MaxBytes, Size(bodyMin))
	}
	if f.Queue.TTL != 0 {
		k.noShorter(path+".queue.ttl", f.Queue.TTL, Duration(10*time.Millisecond))
	}
	if f.LocalQueue.Prefill != 0 {
		k.noShorter(path+".local_queue.prefill", f.LocalQueue.Prefill, Duration(10*time.Millisecond))
	}
	k.within(path+".local_queue.requests", f.LocalQueue.Requests, 0, 10_000)
	k.ratio(path+".refuse_at", f.RefuseAt)
	k.oneOf(path+".order", f.Order, OrderArrival, OrderDeadline)
	if len(f.Bands) > bandsMax {
		k.problem(path+".bands", "has more than %d bands", bandsMax)
		return
	}
	reserved := Ratio(0)
	for i, b := range f.Bands {
		at := fmt.Sprintf("%s.bands[%d]", path, i)
		k.band(c, at, b, f)
		reserved += b.Reserve
		for j, o := range f.Bands[:i] {
			if b.Priority == o.Priority {
				k.problem(at+".priority", "%d is the priority of bands[%d] too", b.Priority, j)
			}
		}
	}
	if reserved > 1 {
		k.problem(path+".bands", "reserve more than there is: %s in all", reserved)
	}
}

func (k *checker) band(c *Config, path string, b Band, f Flow) {
	served := b.Priority == 0
	for _, o := range c.Objectives {
		served = served || o.Priority == b.Priority
	}
	if !served {
		k.problem(path+".priority", "no objective has the priority %d", b.Priority)
	}
	k.within(path+".max_requests", b.MaxRequests, 0, waitingMax)
	if b.MaxRequests > f.Queue.MaxRequests {
		k.problem(path+".max_requests", "%d would never be reached: the queue ends at %d", b.MaxRequests, f.Queue.MaxRequests)
	}
	if b.MaxBytes > f.Queue.MaxBytes {
		k.problem(path+".max_bytes", "%s would never be reached: the queue ends at %s", b.MaxBytes, f.Queue.MaxBytes)
	}
	if b.TTL != 0 {
		k.noShorter(path+".ttl", b.TTL, Duration(10*time.Millisecond))
	}
	k.ratio(path+".reserve", b.Reserve)
}

// ratio complains about a share that is none.
func (k *checker) ratio(path string, r Ratio) {
	if !(r >= 0 && r <= 1) {
		k.problem(path, "%s is not between 0 and 1", r)
	}
}

// prefillFactorMax bounds how much a target may grow with the prompt.
const prefillFactorMax = 100

// targets checks what a pool or an objective promises.
func (k *checker) targets(path string, ttft Duration, factor float64, tpot Duration) {
	if ttft != 0 {
		k.noShorter(path+".ttft", ttft, Duration(time.Millisecond))
	}
	switch at := path + ".ttft_prefill_factor"; {
	case !(factor >= 0 && factor <= prefillFactorMax):
		k.problem(at, "%v is not between 0 and %d", factor, prefillFactorMax)
	case factor > 0 && ttft == 0:
		k.problem(at, "there is no ttft that it would be added to")
	}
	if tpot != 0 {
		k.noShorter(path+".tpot", tpot, TPOTMin)
	}
}

func (k *checker) objectives(c *Config) {
	for _, name := range slices.Sorted(maps.Keys(c.Objectives)) {
		o, path := c.Objectives[name], field{}.child("objectives", "objectives").key(name).path
		if !namePattern.MatchString(name) {
			k.problem(path, badName)
		}
		k.within(path+".priority", o.Priority, -priorityMax, priorityMax)
		k.ratio(path+".shed_at.queue", o.ShedAt.Queue)
		k.ratio(path+".shed_at.saturation", o.ShedAt.Saturation)
		k.targets(path, o.TTFT, o.TTFTPrefillFactor, o.TPOT)
	}
	for i, key := range c.Keys {
		for j, name := range key.Objectives {
			k.objective(c, fmt.Sprintf("keys[%d].objectives[%d]", i, j), name)
		}
		if id := key.FairnessID; id != "" && (len(id) > fairnessMax || !printable(id)) {
			k.problem(fmt.Sprintf("keys[%d].fairness_id", i), "must be 1 to %d printable ASCII characters without spaces", fairnessMax)
		}
	}
	for i, r := range c.Routes {
		if r.Objective != "" {
			k.objective(c, fmt.Sprintf("routes[%d].objective", i), r.Objective)
		}
	}
}

// objective complains about the name of an objective that there is not.
func (k *checker) objective(c *Config, path, name string) {
	if _, known := c.Objectives[name]; known {
		return
	}
	k.problem(path, "there is no objective %s", quote(name))
}
