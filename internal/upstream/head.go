// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"bytes"
	"math"
	"net/http"
	"net/textproto"
	"strings"
)

// headScan finds the end of a head, or of a trailer section, in bytes that
// arrive in pieces. It refuses a line that doesn't end in CRLF as soon as it
// is seen: waiting for an empty line that can't come would hang.
type headScan struct {
	line int // start of the line under way
	seen int // bytes looked at
}

// scan looks at b, which begins where it began in earlier calls. It returns
// the length up to and with the empty line, or 0 if that has not come yet.
func (s *headScan) scan(b []byte) (int, error) {
	for {
		i := bytes.IndexByte(b[s.seen:], '\n')
		if i < 0 {
			s.seen = len(b)
			return 0, nil
		}
		nl := s.seen + i
		if nl == s.line || b[nl-1] != '\r' {
			return 0, malformed("line ends in a bare LF")
		}
		empty := nl-1 == s.line
		s.line, s.seen = nl+1, nl+1
		if empty {
			return nl + 1, nil
		}
	}
}

const statusPrefix = "HTTP/1."

// checkStart refuses bytes that can't become a status line, so that a peer
// that speaks something else is noticed before it falls silent.
func checkStart(b []byte) error {
	n := min(len(b), len(statusPrefix))
	if string(b[:n]) != statusPrefix[:n] {
		return malformed("answer does not begin with HTTP/1.")
	}
	return nil
}

// parseHead reads head, which ends in its empty line, into r.
func (r *Response) parseHead(head string) error {
	line, fields := cutLine(head)
	if err := r.parseStatus(line); err != nil {
		return err
	}
	var err error
	r.Header, err = parseFields(fields)
	return err
}

// parseStatus reads "HTTP/1.x SSS reason" (RFC 9112 §4). The space after the
// code may be missing when the reason is: real engines leave it out.
func (r *Response) parseStatus(line string) error {
	const code = len("HTTP/1.1 ")
	if len(line) < code+3 || line[:code-2] != statusPrefix || line[code-1] != ' ' {
		return malformed("bad status line")
	}
	switch line[code-2] {
	case '0':
		r.old = true
	case '1':
		r.old = false
	default:
		return malformed("HTTP version is not 1.0 or 1.1")
	}
	status := 0
	for _, c := range []byte(line[code : code+3]) {
		if c < '0' || c > '9' {
			return malformed("bad status code")
		}
		status = status*10 + int(c-'0')
	}
	if status < 100 || status > 599 {
		return malformed("status code out of range")
	}
	reason := line[code+3:]
	if reason != "" {
		if reason[0] != ' ' || !isFieldValue(reason) {
			return malformed("bad reason phrase")
		}
		reason = reason[1:]
	}
	r.Status, r.Reason = status, reason
	return nil
}

// cutLine splits s after its first CRLF, which is there.
func cutLine(s string) (line, rest string) {
	i := strings.IndexByte(s, '\n')
	return s[:i-1], s[i+1:]
}

// parseFields reads field lines up to the empty line that ends s. Keys and
// values are slices of s.
func parseFields(s string) (http.Header, error) {
	n := strings.Count(s, "\n") - 1
	h := make(http.Header, n)
	values := make([]string, 0, n) // one allocation for all one-element values
	for {
		line, rest := cutLine(s)
		s = rest
		if line == "" {
			return h, nil
		}
		// A folded line begins with a space and a name may not have one before
		// its colon: both fail as a token (RFC 9112 §5.1, §5.2).
		i := strings.IndexByte(line, ':')
		if i < 0 || !isToken(line[:i]) {
			return nil, malformed("bad header field name")
		}
		value := strings.Trim(line[i+1:], " \t")
		if !isFieldValue(value) {
			return nil, malformed("control character in header field value")
		}
		key := textproto.CanonicalMIMEHeaderKey(line[:i])
		if vv, ok := h[key]; ok {
			h[key] = append(vv, value)
			continue
		}
		values = append(values, value)
		h[key] = values[len(values)-1 : len(values) : len(values)]
	}
}

// frame decides how the body is delimited (RFC 9112 §6.3) and whether the
// connection outlives it.
func (r *Response) frame() error {
	r.Last = r.old || hasToken(r.Header["Connection"], "close")
	r.ContentLength = -1

	te, chunked := r.Header["Transfer-Encoding"]
	cl, counted := r.Header["Content-Length"]
	switch {
	case chunked && counted:
		return malformed("both Content-Length and Transfer-Encoding")
	case chunked && r.old:
		return malformed("Transfer-Encoding in HTTP/1.0")
	case chunked:
		if len(te) != 1 || !strings.EqualFold(te[0], "chunked") {
			return malformed("Transfer-Encoding is not chunked")
		}
		for _, v := range r.Header["Trailer"] {
			for name := range strings.SplitSeq(v, ",") {
				if isFraming(textproto.CanonicalMIMEHeaderKey(strings.Trim(name, " \t"))) {
					return malformed("Trailer announces a framing field")
				}
			}
		}
	case counted:
		if len(cl) != 1 {
			return malformed("more than one Content-Length")
		}
		n, ok := parseLength(cl[0])
		if !ok {
			return malformed("bad Content-Length")
		}
		r.ContentLength = n
	}

	switch {
	case r.head || r.Status == http.StatusNotModified:
		r.framing = bodyless
	case r.Status == http.StatusNoContent:
		r.framing = bodyless
		// It says that a body follows, which it must not: if one does, it must
		// not meet the next request.
		r.Last = r.Last || chunked || r.ContentLength > 0
	case chunked:
		r.framing, r.Chunked = byChunks, true
	case counted:
		r.framing, r.left = byLength, r.ContentLength
	default:
		r.framing, r.left = byClose, math.MaxInt64
		r.CloseDelimited, r.Last = true, true
	}
	return nil
}

// isFraming reports fields that may not come as trailers.
func isFraming(key string) bool {
	return key == "Transfer-Encoding" || key == "Content-Length" || key == "Trailer"
}

// parseLength reads 1*DIGIT below 2^63.
func parseLength(s string) (int64, bool) {
	if s == "" || len(s) > 19 {
		return 0, false
	}
	var n uint64
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
		n = n*10 + uint64(s[i]-'0')
	}
	return int64(n), n <= math.MaxInt64
}

// hasToken reports whether token is in a comma-separated list.
func hasToken(values []string, token string) bool {
	for _, v := range values {
		for t := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.Trim(t, " \t"), token) {
				return true
			}
		}
	}
	return false
}

// ListedByConnection are the fields that a Connection field claims for the
// connection (RFC 9110 §7.6.1), by canonical name. Whoever forwards a message
// removes them.
func ListedByConnection(h http.Header) map[string]bool {
	var listed map[string]bool
	for _, line := range h["Connection"] {
		for token := range strings.SplitSeq(line, ",") {
			if listed == nil {
				listed = map[string]bool{}
			}
			listed[textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(token))] = true
		}
	}
	return listed
}
