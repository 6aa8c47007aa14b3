// SPDX-License-Identifier: Apache-2.0

package process

import (
	"os"
	"syscall"
)

func attributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

func terminate(p *os.Process) error { return syscall.Kill(-p.Pid, syscall.SIGTERM) }

func kill(p *os.Process) error { return syscall.Kill(-p.Pid, syscall.SIGKILL) }
