// SPDX-License-Identifier: Apache-2.0

package model

import "slices"

// adapters are the LoRA slots. An adapter used by a running sequence keeps its
// slot; the others are displaced least recently used first.
type adapters struct {
	slots    int
	resident []string       // least recently used first
	users    map[string]int // running sequences per adapter, only above zero
	loads    uint64
}

// acquire gives name a slot for one more sequence. loaded says that the
// adapter had to be brought in; ok is false when every slot is in use.
func (a *adapters) acquire(name string) (loaded, ok bool) {
	if name == "" {
		return false, true
	}
	if !a.fits(name) {
		return false, false
	}
	at := slices.Index(a.resident, name)
	switch {
	case at >= 0:
		a.resident = slices.Delete(a.resident, at, at+1)
	case len(a.resident) == a.slots:
		idle := slices.IndexFunc(a.resident, func(r string) bool { return a.users[r] == 0 })
		a.resident = slices.Delete(a.resident, idle, idle+1)
	}
	a.resident = append(a.resident, name)
	a.users[name]++
	if at < 0 {
		a.loads++
	}
	return at < 0, true
}

func (a *adapters) fits(name string) bool {
	return name == "" || a.users[name] > 0 || len(a.users) < a.slots
}

func (a *adapters) release(name string) {
	if name == "" {
		return
	}
	if a.users[name]--; a.users[name] == 0 {
		delete(a.users, name)
	}
}
