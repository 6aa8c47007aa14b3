// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"crypto/tls"
	"net"
	"sync"
)

// watchedListener hands out connections whose peer's goodbye is noticed at
// once, whatever else waits to be read.
type watchedListener struct {
	net.Listener
	watch *watch
}

func (l *watchedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	w := &watchedConn{Conn: c}
	l.watch.add(w)
	return w, nil
}

// watchedConn is a connection with a note of whether its peer has closed.
type watchedConn struct {
	net.Conn
	watch *watch
	key   uint64

	mu   sync.Mutex
	gone bool
	call func()
}

// onGone sets what is called, once, when the peer closes; at once if it has.
// nil sets nothing.
func (c *watchedConn) onGone(call func()) {
	c.mu.Lock()
	c.call = call
	gone := c.gone
	c.mu.Unlock()
	if gone && call != nil {
		call()
	}
}

func (c *watchedConn) peerClosed() {
	c.mu.Lock()
	c.gone = true
	call := c.call
	c.mu.Unlock()
	if call != nil {
		call()
	}
}

func (c *watchedConn) Close() error {
	if c.watch != nil {
		c.watch.remove(c)
	}
	return c.Conn.Close()
}

// watched finds the watched connection under c, or nil.
func watched(c net.Conn) *watchedConn {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	w, _ := c.(*watchedConn)
	return w
}
