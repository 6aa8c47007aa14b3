// SPDX-License-Identifier: Apache-2.0

// Package freeport finds TCP ports of 127.0.0.1 for programs that are started by
// tests and benchmarks, and that cannot tell which port they took.
//
// A port that was free a moment ago is free still only if nobody else is given
// it: neither a listener on port 0, nor an outgoing connection, nor another user
// of this package in any process. The package refuses to hold the port itself,
// as the program would then not get it.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
)

// Port is a port that this package gives to nobody else.
type Port struct {
	// Addr is where its program is to listen, "127.0.0.1:port".
	Addr string

	claim net.PacketConn
}

// Take claims a port at which nothing listens, until Release or the end of the
// process.
func Take() (*Port, error) {
	return take(func(address string) error {
		// Not by listening: a process that is being forked would have a copy of
		// the listener for as long as it takes to run its program.
		if c, err := net.Dial("tcp", address); err == nil {
			_ = c.Close()
			return fmt.Errorf("something listens at %s", address)
		}
		return nil
	})
}

// take claims a port that passes a check.
func take(check func(address string) error) (*Port, error) {
	lowest, ports := assignable()
	var err error
	for range 1000 {
		var p *Port
		if p, err = claim(fmt.Sprintf("127.0.0.1:%d", lowest+rand.IntN(ports))); err != nil {
			continue
		}
		if err = check(p.Addr); err == nil {
			return p, nil
		}
		p.Release()
	}
	return nil, fmt.Errorf("no free port among %d from %d on, the last one: %w", ports, lowest, err)
}

// claim takes the UDP port of the same number, which nobody else wants, as the
// sign that the TCP port is taken.
func claim(address string) (*Port, error) {
	c, err := net.ListenPacket("udp", address)
	if err != nil {
		return nil, err
	}
	return &Port{address, c}, nil
}

// Release lets others have the port.
func (p *Port) Release() { _ = p.claim.Close() }

// Test is what of a testing.TB For needs.
type Test interface {
	Helper()
	Fatal(...any)
	Cleanup(func())
}

// For is the address of a port that the test has until it ends.
func For(t Test) string {
	t.Helper()
	p, err := Take()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Release)
	return p.Addr
}

// Listen is a listener at a port that stays the test's when it is closed: its
// owner can always listen there again, and until then connections are refused.
func Listen(t Test) (l net.Listener) {
	t.Helper()
	p, err := take(func(address string) (err error) {
		l, err = net.Listen("tcp", address)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Release)
	return l
}

// assignable is a range of ports out of which the kernel chooses none by itself,
// as far as that can be known.
func assignable() (lowest, ports int) {
	const first = 10000
	low := 49152 // RFC 6335, section 6
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		_, _ = fmt.Sscan(string(text), &low)
	}
	if low-first >= 1000 {
		return first, low - first
	}
	return first, 65536 - first
}
