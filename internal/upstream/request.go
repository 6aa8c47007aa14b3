// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"errors"
	"fmt"
	"net/textproto"
	"strconv"
	"time"
)

// Field is one header field of a Request. Fields are a slice and not a map:
// it keeps the caller's order, which makes the bytes on the wire repeatable,
// and costs one allocation however many fields there are.
type Field struct{ Name, Value string }

// Request is one request. Do does not change it or keep any part of it, so it
// may be sent again as it is.
type Request struct {
	Method string
	Target string // origin-form: path and query, "/v1/chat/completions?x=1"
	Host   string // default: host and port of the pool's URL
	// Header is sent as given. Names are tokens, values have no control
	// characters but tab. Fields that frame the message or concern this
	// connection are this package's business and are refused.
	Header []Field
	// Body is written in order; its total is the Content-Length. nil is no
	// body, which for POST, PUT and PATCH is said with "Content-Length: 0".
	Body [][]byte
	// Fresh opens a connection instead of reusing one: for requests that must
	// not meet Stale.
	Fresh bool
	// HeadBy, if set, is when, on an open connection, writing and waiting for
	// the final head end with Timeout. It remains the body's read deadline until SetReadDeadline
	// replaces it, so one limit covers the wait for a first output.
	HeadBy time.Time
}

// ownFields are refused in Request.Header, by canonical name. Expect is among
// them because the body is never held back for an interim answer.
var ownFields = map[string]bool{
	"Connection": true, "Content-Length": true, "Expect": true, "Host": true,
	"Keep-Alive": true, "Proxy-Connection": true, "Te": true, "Trailer": true,
	"Transfer-Encoding": true, "Upgrade": true,
}

// validate reports what makes r unfit to be sent.
func (r *Request) validate() error {
	if !isToken(r.Method) || r.Method == "CONNECT" {
		return fmt.Errorf("method %q is not usable", r.Method)
	}
	if !isTarget(r.Target) {
		return errors.New("target is not a path with an optional query")
	}
	if !isHost(r.Host) {
		return errors.New("host has characters that no host has")
	}
	for _, f := range r.Header {
		if !isToken(f.Name) {
			return fmt.Errorf("header field name %q is not a token", f.Name)
		}
		if !isFieldValue(f.Value) {
			return fmt.Errorf("value of header field %q has control characters", f.Name)
		}
		if ownFields[textproto.CanonicalMIMEHeaderKey(f.Name)] {
			return fmt.Errorf("header field %q belongs to the connection", f.Name)
		}
	}
	return nil
}

// size is the length of the body.
func (r *Request) size() int64 {
	var n int64
	for _, seg := range r.Body {
		n += int64(len(seg))
	}
	return n
}

// appendHead appends the request's head. r is valid.
func (r *Request) appendHead(b []byte, host string, size int64, keep bool) []byte {
	b = append(b, r.Method...)
	b = append(b, ' ')
	b = append(b, r.Target...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, or(r.Host, host)...)
	b = append(b, "\r\n"...)
	for _, f := range r.Header {
		b = append(b, f.Name...)
		b = append(b, ": "...)
		b = append(b, f.Value...)
		b = append(b, "\r\n"...)
	}
	if r.Body != nil || r.Method == "POST" || r.Method == "PUT" || r.Method == "PATCH" {
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, size, 10)
		b = append(b, "\r\n"...)
	}
	if !keep {
		b = append(b, "Connection: close\r\n"...)
	}
	return append(b, "\r\n"...)
}

// Character classes of RFC 9110 §5.5 and §5.6.2, one bit each.
const (
	tokenChar uint8 = 1 << iota
	valueChar       // VCHAR, obs-text, SP, HTAB
	targetChar
	hostChar
)

var chars = func() (t [256]uint8) {
	for c := range 256 {
		alnum := c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if alnum || in("!#$%&'*+-.^_`|~", c) {
			t[c] |= tokenChar
		}
		if c >= 0x20 && c != 0x7f || c == '\t' {
			t[c] |= valueChar
		}
		if c > 0x20 && c < 0x7f && c != '#' {
			t[c] |= targetChar
		}
		if alnum || in("-._~!$&'()*+,;=:[]%", c) {
			t[c] |= hostChar
		}
	}
	return t
}()

func in(set string, c int) bool {
	for i := range len(set) {
		if int(set[i]) == c {
			return true
		}
	}
	return false
}

func all(s string, class uint8) bool {
	for i := range len(s) {
		if chars[s[i]]&class == 0 {
			return false
		}
	}
	return true
}

func isToken(s string) bool      { return s != "" && all(s, tokenChar) }
func isFieldValue(s string) bool { return all(s, valueChar) }
func isTarget(s string) bool     { return s != "" && s[0] == '/' && all(s, targetChar) }
func isHost(s string) bool       { return all(s, hostChar) }
