// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// settle makes the namespaces that this process was started in usable: a /proc
// of its own processes, a loopback device, forwarding between links, and the
// table in which links are cut.
func settle() error {
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := command("", "ip", "link", "set", "lo", "up"); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return err
	}
	// What is in the set is dropped: by source and destination, or by these and
	// the port of the side that listens.
	return command(`
table ip faults {
	set link { type ipv4_addr . ipv4_addr; }
	set port { type ipv4_addr . ipv4_addr . inet_service; }
	chain cut {
		ip saddr . ip daddr @link drop
		ip saddr . ip daddr . tcp sport @port drop
		ip saddr . ip daddr . tcp dport @port drop
	}
	chain forward { type filter hook forward priority 0; jump cut; }
	chain input { type filter hook input priority 0; jump cut; }
	chain output { type filter hook output priority 0; jump cut; }
}
`, "nft", "-f", "-")
}

// command runs a tool and returns its complaint as the error.
func command(stdin, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, stdin, out)
	}
	return nil
}

// A space is a network namespace. It lasts as long as its file is open or a
// process is in it.
type space struct{ file *os.File }

func newSpace() (s space, err error) {
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		s.file, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return s, err
}

// do runs f on a thread that is in the space, and so are processes that f
// starts.
func (s space) do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(s.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// onThread runs f on a thread that ends after it.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread
		done <- f()
	}()
	return <-done
}

// A node is a space with one link to the space that the tests are in.
type node struct {
	space

	link string // its name on the tests' side
	addr string // on the node's side
	near string // on the tests' side, where relays listen
}

// newNode makes node i of a lane: 10.lane.i.0/30.
func newNode(lane, i int) (*node, error) {
	s, err := newSpace()
	if err != nil {
		return nil, err
	}
	n := &node{space: s, link: fmt.Sprintf("l%dn%d", lane, i), addr: fmt.Sprintf("10.%d.%d.2", lane, i), near: fmt.Sprintf("10.%d.%d.1", lane, i)}
	err = n.do(func() error {
		return command(fmt.Sprintf(`link set lo up
link add name eth0 type veth peer name %s netns 1
addr add %s/30 dev eth0
link set eth0 up
route add default via %s
`, n.link, n.addr, n.near), "ip", "-batch", "-")
	})
	if err != nil {
		return nil, err
	}
	return n, command(fmt.Sprintf("addr add %s/30 dev %s\nlink set %s up\n", n.near, n.link, n.link), "ip", "-batch", "-")
}

// reach waits until packets come through to another node and back. A link that
// is new may lose the first ones, and a second goes by before they are repeated.
func (n *node) reach(other *node) error {
	return n.do(func() error {
		return poll(n.addr+" to reach "+other.addr, func() bool {
			c, err := net.DialTimeout("tcp", net.JoinHostPort(other.addr, "9"), 100*time.Millisecond)
			if err == nil {
				c.Close()
			}
			return err == nil || errors.Is(err, syscall.ECONNREFUSED)
		})
	})
}

// close takes the link away, and with the last process the space.
func (n *node) close() {
	_ = command("", "ip", "link", "del", n.link) // the namespace goes anyway
	n.file.Close()
}

// up sets the tests' side of the link up or down.
func (n *node) up(up bool) error {
	return command("", "ip", "link", "set", n.link, map[bool]string{true: "up", false: "down"}[up])
}

// cuts are what is dropped between two nodes. One change at a time: the kernel
// takes a second one for a conflict.
var cuts struct {
	sync.Mutex
}

// A cut is one direction of a link, or of one port of it, that drops
// everything.
type cut struct {
	from, to string
	port     int // 0: all
}

func (c cut) element() string {
	if c.port == 0 {
		return fmt.Sprintf("faults link { %s . %s }", c.from, c.to)
	}
	return fmt.Sprintf("faults port { %s . %s . %d }", c.from, c.to, c.port)
}

// change adds or deletes cuts at one moment.
func change(verb string, list []cut) error {
	if len(list) == 0 {
		return nil
	}
	cuts.Lock()
	defer cuts.Unlock()
	var b strings.Builder
	for _, c := range list {
		fmt.Fprintf(&b, "%s element ip %s\n", verb, c.element())
	}
	return command(b.String(), "nft", "-f", "-")
}
