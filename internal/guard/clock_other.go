// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package guard

import (
	"errors"

	"github.com/headgate/headgate/internal/lease"
)

var errLinux = errors.New("a guard needs Linux: its deadlines are in CLOCK_BOOTTIME")

func boottime() (lease.Boottime, error) { return 0, errLinux }

func bootID() (string, error) { return "", errLinux }
