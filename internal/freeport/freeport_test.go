// SPDX-License-Identifier: Apache-2.0

package freeport

import (
	"net"
	"testing"
)

func TestPortsAreDifferentAndFree(t *testing.T) {
	seen := map[string]bool{}
	for range 200 {
		at := For(t)
		if seen[at] {
			t.Fatalf("%s was given twice", at)
		}
		seen[at] = true
		if c, err := net.Dial("tcp", at); err == nil {
			t.Errorf("%s: something listens", at)
			_ = c.Close()
		}
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close()
	}
}

// A port is not given while it is claimed or somebody listens, and is again when
// it was released.
func TestClaims(t *testing.T) {
	p, err := Take()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := claim(p.Addr); err == nil {
		t.Errorf("%s was claimed twice", p.Addr)
	}
	p.Release()
	again, err := claim(p.Addr)
	if err != nil {
		t.Fatal(err)
	}
	again.Release()
}

func TestListen(t *testing.T) {
	l := Listen(t)
	if _, err := claim(l.Addr().String()); err == nil {
		t.Errorf("%s was claimed while a test has it", l.Addr())
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
		t.Error("a closed listener accepts")
		_ = c.Close()
	}
	l, err := net.Listen("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}

func TestPortsInUseAreNotGiven(t *testing.T) {
	taken := Listen(t)
	defer taken.Close()
	tried := 0
	p, err := take(func(address string) error {
		if tried++; tried == 1 {
			address = taken.Addr().String()
		}
		l, err := net.Listen("tcp", address)
		if err == nil {
			_ = l.Close()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	if tried < 2 {
		t.Errorf("%d ports were tried", tried)
	}
}

// What the kernel assigns by itself is never claimed.
func TestKernelsPortsAreLeftAlone(t *testing.T) {
	lowest, ports := assignable()
	if lowest+ports == 65536 {
		return // where the kernel chooses among all ports, none can be left to it
	}
	for range 100 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if n := l.Addr().(*net.TCPAddr).Port; n >= lowest && n < lowest+ports {
			t.Errorf("the kernel chose %d, which can be claimed", n)
		}
		_ = l.Close()
	}
}
