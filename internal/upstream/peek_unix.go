// SPDX-License-Identifier: Apache-2.0

//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package upstream

import (
	"net"
	"syscall"
)

// peeker looks at a socket's receive queue without waiting and without taking
// anything from it. A nil *peeker has no socket.
type peeker struct {
	rc    syscall.RawConn
	recv  func(fd uintptr) // made once: a look allocates nothing
	found state
	b     [1]byte
}

func newPeeker(c net.Conn) *peeker {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	p := &peeker{rc: rc}
	p.recv = p.peek
	return p
}

// known reports whether there is a socket to look at.
func (p *peeker) known() bool { return p != nil }

// look reports the state of an idle connection.
func (p *peeker) look() state {
	p.found = gone
	// Control and not Read: Read resets the poller and may wait.
	if p.rc.Control(p.recv) != nil {
		return gone
	}
	return p.found
}

func (p *peeker) peek(fd uintptr) {
	for {
		n, _, err := syscall.Recvfrom(int(fd), p.b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			p.found = quiet
		case err == nil && n > 0:
			p.found = spoken
		}
		return
	}
}
