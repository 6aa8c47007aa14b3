// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package process

import (
	"os"
	"syscall"
)

func attributes() *syscall.SysProcAttr { return nil }

func terminate(p *os.Process) error { return p.Signal(syscall.SIGTERM) }

func kill(p *os.Process) error { return p.Kill() }
