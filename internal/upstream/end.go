// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
)

// Cause is what ended an exchange, as far as this end of the connection can
// know.
type Cause uint8

// Causes. Those from DNSFailed to TLSFailed mean that no byte of the request
// was sent.
const (
	Complete       Cause = iota // the framing says that the body is whole
	DNSFailed                   // the name was not resolved
	Refused                     // ECONNREFUSED
	ConnectTimeout              // no connection within Config.ConnectTimeout
	NoRoute                     // EHOSTUNREACH, ENETUNREACH and their like
	TLSFailed                   // the handshake failed, took too long, or agreed on another protocol
	Unwritten                   // a fresh connection broke before the request was fully written, and no answer began
	Stale                       // a reused connection was closed by the peer before any byte of the answer
	ClosedFIN                   // the peer closed in an orderly way before head or body was whole
	ClosedRST                   // the peer reset the connection
	Malformed                   // bytes that are not HTTP as this package accepts it, or over a bound
	Interrupted                 // this side closed it: Interrupt, Close, the context, the Pool
	Failed                      // another I/O error
	Timeout                     // a deadline passed: Request.HeadBy, Response.SetReadDeadline
	InvalidRequest              // the Request can't be sent as HTTP; nothing was done
)

var causeNames = [...]string{"complete", "dns_failed", "refused", "connect_timeout", "no_route",
	"tls_failed", "unwritten", "stale", "closed_fin", "closed_rst", "malformed", "interrupted",
	"failed", "timeout", "invalid_request"}

func (c Cause) String() string {
	if int(c) < len(causeNames) {
		return causeNames[c]
	}
	return "unknown"
}

// End is how an exchange ended: typed evidence, read by the failure
// classifier. As an error it wraps Err.
type End struct {
	Cause Cause
	Err   error // what the system said; nil for Complete

	Reused          bool // the exchange ran on a kept connection
	RequestWritten  bool // all bytes of the request were handed to the kernel
	ResponseStarted bool // at least one byte of an answer, interim ones included, was seen
	HeadComplete    bool // the final head was whole and acceptable
}

func (e *End) Error() string {
	if e.Err == nil {
		return "upstream: " + e.Cause.String()
	}
	return "upstream: " + e.Cause.String() + ": " + e.Err.Error()
}

func (e *End) Unwrap() error { return e.Err }

// malformed is the Err behind Malformed: what was wrong with the bytes. The
// bytes themselves stay out of it, they may be a client's text.
type malformed string

func (m malformed) Error() string { return string(m) }

// errInterrupted is the Err of an exchange ended by Interrupt or Close.
var errInterrupted = errors.New("exchange interrupted")

func isTimeout(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }

func isEOF(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }

// isReset reports a connection that the peer aborted. EPIPE is Linux's word
// for a reset that followed a FIN.
func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		errors.Is(err, syscall.ECONNABORTED)
}

// dialCause classifies a failed dial. ctx is the caller's, without the
// connect timeout.
func dialCause(ctx context.Context, err error) Cause {
	var dns *net.DNSError
	var timeout net.Error
	switch {
	case ctx.Err() != nil:
		return Interrupted
	case errors.As(err, &dns):
		return DNSFailed
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH),
		errors.Is(err, syscall.EHOSTDOWN), errors.Is(err, syscall.ENETDOWN):
		return NoRoute
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, context.DeadlineExceeded):
		return ConnectTimeout
	case isReset(err), isEOF(err):
		return Unwritten
	}
	return Failed
}

// brokenCause classifies an exchange whose connection failed with rerr while
// reading and werr (or nil) while writing, and picks the error that says most.
func brokenCause(e *End, rerr, werr error) (Cause, error) {
	if _, ok := errors.AsType[malformed](rerr); ok {
		return Malformed, rerr
	}
	if isTimeout(rerr) {
		// After a failed write only the peer's last words were awaited, and
		// none came: the write is what failed.
		if werr == nil || isTimeout(werr) {
			return Timeout, rerr
		}
		rerr = werr
	}

	fin, rst := isEOF(rerr), isReset(rerr)
	// The kernel reports a reset once: if the write saw it, the read sees EOF.
	if fin && isReset(werr) {
		fin, rst, rerr = false, true, werr
	}
	switch {
	case !e.ResponseStarted && e.Reused && (fin || rst):
		return Stale, rerr
	case !e.ResponseStarted && !e.Reused && !e.RequestWritten:
		return Unwritten, rerr
	case rst:
		return ClosedRST, rerr
	case fin:
		return ClosedFIN, rerr
	}
	return Failed, rerr
}
