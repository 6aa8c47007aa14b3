// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"time"
)

// Head is what a request says before its body.
type Head struct {
	Method string
	Path   string // decoded
	Query  string // raw, without "?"
	Host   string
	Header http.Header

	// ContentLength is -1 when the body's length is not known.
	ContentLength int64
	BodyMax       int64 // the listener's bound on bodies
	Debug         bool  // the listener shows Headgate-* headers
	Loopback      bool  // the listener is reached from this machine only
	Trusted       bool  // its clients may say how their requests are treated
}

// Exchange is one request and the way to answer it, whatever HTTP stack is
// beneath. It belongs to one goroutine, but for Gone's context.
type Exchange interface {
	Head() *Head

	// Body is read before the answer begins. Deadlines are the reader's.
	Body() io.Reader
	SetBodyDeadline(time.Time)

	// Gone is done once the client has closed its side; a half-close counts.
	Gone() context.Context

	// WriteHead begins the answer; it is sent with the first Write.
	WriteHead(status int, header http.Header)

	// Write hands bytes of the answer to the kernel before it returns. A
	// client that reads nothing for too long is an error.
	Write(p []byte) (int, error)

	// Abort cuts the answer off so that the client can tell: no final chunk,
	// or RST_STREAM. Nothing may be written after it.
	Abort()
}

// writeStall is how long a client may take no byte of its answer.
const writeStall = 60 * time.Second

// httpExchange is an Exchange on net/http.
type httpExchange struct {
	head    Head
	w       http.ResponseWriter
	control *http.ResponseController
	r       *http.Request
	gone    context.Context
	read    bool // the body was read to its end
	aborted bool
	stallAt time.Time
}

func newHTTPExchange(w http.ResponseWriter, r *http.Request, gone context.Context) *httpExchange {
	return &httpExchange{
		w: w, r: r, gone: gone, control: http.NewResponseController(w),
		head: Head{
			Method: r.Method, Path: r.URL.Path, Query: r.URL.RawQuery, Host: r.Host,
			Header: r.Header, ContentLength: r.ContentLength,
		},
	}
}

func (x *httpExchange) Head() *Head           { return &x.head }
func (x *httpExchange) Body() io.Reader       { return bodyReader{x} }
func (x *httpExchange) Gone() context.Context { return x.gone }
func (x *httpExchange) Abort()                { x.aborted = true }

func (x *httpExchange) SetBodyDeadline(t time.Time) {
	// Not every writer under test has deadlines; a missing one only means that
	// a slow body is bounded by the connection alone.
	_ = x.control.SetReadDeadline(t)
}

// bodyReader notes that the body was read to its end.
type bodyReader struct{ *httpExchange }

func (b bodyReader) Read(p []byte) (int, error) {
	n, err := b.r.Body.Read(p)
	if errors.Is(err, io.EOF) {
		b.read = true
	}
	return n, err
}

// mustClose reports whether an HTTP/1.1 connection can't be used again. A body
// that was not read would have to be waited for. And net/http hides whether a
// chunked request had a Content-Length too, in which case what the client takes
// for the next request may be part of this one (RFC 9112 §6.1).
func (x *httpExchange) mustClose() bool {
	return x.r.ProtoMajor == 1 && (x.r.ContentLength != 0 && !x.read || len(x.r.TransferEncoding) > 0)
}

func (x *httpExchange) WriteHead(status int, header http.Header) {
	h := x.w.Header()
	if x.mustClose() {
		h["Connection"] = []string{"close"}
	}
	maps.Copy(h, header)
	x.w.WriteHeader(status)
}

func (x *httpExchange) Write(p []byte) (int, error) {
	if x.aborted {
		return 0, errors.New("gateway: write after abort")
	}
	// Arming a deadline costs a timer; a second of slack saves it per chunk.
	if now := time.Now(); x.stallAt.Sub(now) < writeStall-time.Second {
		x.stallAt = now.Add(writeStall)
		_ = x.control.SetWriteDeadline(x.stallAt)
	}
	n, err := x.w.Write(p)
	if err != nil {
		return n, err
	}
	return n, x.control.Flush()
}

// writeText answers a probe.
func writeText(ex Exchange, status int, text string) {
	ex.WriteHead(status, http.Header{"Content-Type": {"text/plain; charset=utf-8"}})
	_, _ = ex.Write([]byte(text))
}

// target is the request target for engines, or "" if the query can't be sent.
func (h *Head) target() string {
	for i := range len(h.Query) {
		if c := h.Query[i]; c <= ' ' || c >= 0x7f || c == '#' {
			return ""
		}
	}
	target := (&url.URL{Path: h.Path}).EscapedPath()
	if h.Query != "" {
		target += "?" + h.Query
	}
	return target
}
