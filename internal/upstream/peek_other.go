// SPDX-License-Identifier: Apache-2.0

//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package upstream

import "net"

// peeker is not available here: conn.probe reads instead.
type peeker struct{}

func newPeeker(net.Conn) *peeker { return nil }

func (*peeker) known() bool { return false }
func (*peeker) look() state { return gone }
