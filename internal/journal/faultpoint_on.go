// SPDX-License-Identifier: Apache-2.0

//go:build faultpoint

package journal

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// HEADGATE_FAULTPOINT=kind:stage or kind:stage#n names the point, and the how
// manyeth pass of it, at which the process kills itself.
var armed, armedAt = func() (string, int64) {
	name, nth, _ := strings.Cut(os.Getenv("HEADGATE_FAULTPOINT"), "#")
	n, err := strconv.ParseInt(nth, 10, 64)
	if err != nil {
		n = 1
	}
	return name, n
}()

var passed atomic.Int64

// point ends the process at once, as SIGKILL from outside would, if it is the
// one that was asked for.
func point(s stage, k Kind) {
	if armed == "" || armed != k.String()+":"+s.String() || passed.Add(1) != armedAt {
		return
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}
