// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/headgate/headgate/internal/lease"
)

// boottime reads CLOCK_BOOTTIME, which goes on while the host is suspended. The
// error is the kernel's that has no such clock; New finds out.
func boottime() (lease.Boottime, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0, fmt.Errorf("read CLOCK_BOOTTIME: %w", err)
	}
	return lease.Boottime(ts.Nano()), nil
}

// bootID names this boot of the kernel.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
