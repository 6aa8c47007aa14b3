// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// watch learns from the kernel which connections' peers have closed. A socket
// with unread bytes shows that to no read, but epoll's EPOLLRDHUP tells it.
//
// One goroutine serves all connections. It sleeps in Go's own poller, because
// an epoll descriptor can itself be polled, and holds no thread.
type watch struct {
	file *os.File // the epoll descriptor
	done chan struct{}

	mu    sync.Mutex
	next  uint64
	conns map[uint64]*watchedConn
}

func newWatch() (*watch, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("setnonblock", err)
	}
	w := &watch{file: os.NewFile(uintptr(fd), "epoll"), done: make(chan struct{}), conns: map[uint64]*watchedConn{}}
	go w.run()
	return w, nil
}

// add watches a connection. One that can't be watched is left to net/http.
func (w *watch) add(c *watchedConn) {
	socket, ok := c.Conn.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return
	}
	w.mu.Lock()
	w.next++
	c.watch, c.key = w, w.next
	w.conns[c.key] = c
	w.mu.Unlock()
	// Edge-triggered: the goodbye is told once. The key, not the descriptor,
	// comes back, because descriptors are used again.
	event := unix.EpollEvent{
		Events: unix.EPOLLRDHUP | unix.EPOLLET,
		Fd:     int32(uint32(c.key)),
		Pad:    int32(uint32(c.key >> 32)),
	}
	_ = raw.Control(func(fd uintptr) { err = w.control(int(fd), &event) })
	if err != nil {
		w.remove(c)
	}
}

func (w *watch) control(fd int, event *unix.EpollEvent) error {
	epoll, err := w.file.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	if err := epoll.Control(func(ep uintptr) {
		result = unix.EpollCtl(int(ep), unix.EPOLL_CTL_ADD, fd, event)
	}); err != nil {
		return err
	}
	return result
}

// remove forgets a connection; closing its descriptor ends the kernel's watch.
func (w *watch) remove(c *watchedConn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, c.key)
}

func (w *watch) run() {
	defer close(w.done)
	epoll, err := w.file.SyscallConn()
	if err != nil {
		return
	}
	var events [64]unix.EpollEvent
	for {
		n := 0
		err := epoll.Read(func(fd uintptr) bool {
			var err error
			n, err = unix.EpollWait(int(fd), events[:], 0)
			return n > 0 || err != nil && err != unix.EINTR
		})
		if err != nil {
			return // closed
		}
		for _, event := range events[:max(n, 0)] {
			w.mu.Lock()
			c := w.conns[uint64(uint32(event.Fd))|uint64(uint32(event.Pad))<<32]
			w.mu.Unlock()
			if c != nil {
				c.peerClosed()
			}
		}
	}
}

func (w *watch) close() {
	w.file.Close()
	<-w.done
}
