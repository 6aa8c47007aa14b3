// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// family is a process and its descendants, as they were when it was asked for.
func family(root int) []int {
	parents := map[int]int{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if f := statFields(pid); len(f) > 1 {
			parents[pid], _ = strconv.Atoi(f[1])
		}
	}
	pids := []int{root}
	for i := 0; i < len(pids); i++ {
		for pid, parent := range parents {
			if parent == pids[i] && !slices.Contains(pids, pid) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// statFields are the fields of /proc/PID/stat from the third on: the second is
// a name and may hold anything.
func statFields(pid int) []string {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
}

// cpuTime is the CPU time that processes have used, threads that have ended
// included. The kernel's clock of a process counts nanoseconds, where
// /proc/PID/stat counts hundredths of a second.
func cpuTime(pids []int) time.Duration {
	total := int64(0)
	for _, pid := range pids {
		const sched = 2 // CPUCLOCK_SCHED, see clock_getcpuclockid(3)
		total += clockNanos(int32((^pid)<<3 | sched))
	}
	return time.Duration(total)
}

// resident is the memory that processes hold, in bytes. What forked processes
// share counts once for each.
func resident(pids []int) int64 {
	total := int64(0)
	for _, pid := range pids {
		data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if f := strings.Fields(string(data)); len(f) > 1 {
			pages, _ := strconv.ParseInt(f[1], 10, 64)
			total += pages * int64(os.Getpagesize())
		}
	}
	return total
}

// busyTime is the time that all CPUs of the machine have worked, or would have
// if the host had let them.
func busyTime() time.Duration {
	data, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(data), "\n")
	f := strings.Fields(line)
	total := int64(0)
	for i, v := range f {
		if i == 0 || i == 4 || i == 5 || i > 8 { // "cpu", idle, iowait, and guests, who are in user
			continue
		}
		ticks, _ := strconv.ParseInt(v, 10, 64)
		total += ticks
	}
	return time.Duration(total) * time.Second / 100
}

// loadAverage is the one of the last minute.
func loadAverage() float64 {
	data, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(data), " ")
	load, _ := strconv.ParseFloat(first, 64)
	return load
}

// Usage is what processes used in a window.
type Usage struct {
	CPU     time.Duration // of the target
	Own     time.Duration // of this process, generator and engine
	Foreign float64       // cores that others used
	RSS     int64         // of the target, the larger of begin and end
}

// Meter takes the usage between the two calls of Probe.
type Meter struct {
	Usage
	pids []int
	mark struct{ at, cpu, own, busy int64 }
	done bool
}

// NewMeter watches a process and its descendants; none if pid is 0.
func NewMeter(pid int) *Meter {
	m := &Meter{}
	if pid != 0 {
		m.pids = family(pid)
	}
	return m
}

// Probe is called at the window's begin and end.
func (m *Meter) Probe() {
	at, cpu, own, busy := now(), int64(cpuTime(m.pids)), int64(cpuTime([]int{os.Getpid()})), int64(busyTime())
	m.RSS = max(m.RSS, resident(m.pids))
	if took := at - m.mark.at; m.done && took > 0 {
		m.CPU, m.Own = time.Duration(cpu-m.mark.cpu), time.Duration(own-m.mark.own)
		m.Foreign = max(0, float64(busy-m.mark.busy-int64(m.CPU)-int64(m.Own))/float64(took))
	}
	m.mark.at, m.mark.cpu, m.mark.own, m.mark.busy = at, cpu, own, busy
	m.done = true
}
