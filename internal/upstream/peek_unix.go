// SPDX-License-Identifier: Apache-2.0

//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package upstream

import (
	"net"
	"syscall"
)

// peeker looks at a socket's receive queue without waiting and without taking
// anything from it.
type peeker struct {
	rc syscall.RawConn // nil: not a socket
}

func newPeeker(c net.Conn) peeker {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return peeker{}
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return peeker{}
	}
	return peeker{rc}
}

// known reports whether there is a socket to look at.
func (p peeker) known() bool { return p.rc != nil }

// look reports the state of an idle connection.
func (p peeker) look() state {
	s := gone
	// Control and not Read: Read resets the poller and may wait.
	err := p.rc.Control(func(fd uintptr) {
		var b [1]byte
		for {
			n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
			switch {
			case err == syscall.EINTR:
				continue
			case err == syscall.EAGAIN:
				s = quiet
			case err == nil && n > 0:
				s = spoken
			}
			return
		}
	})
	if err != nil {
		return gone
	}
	return s
}
