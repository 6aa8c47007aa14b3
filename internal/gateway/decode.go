// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"compress/gzip"
	"compress/zlib"
	"fmt"
	"io"
	"strings"
)

// decode undoes the content codings of an answer, which engines use although
// they were not asked to. The reader returns what has arrived without waiting
// for more, as far as the coder flushed it.
func decode(body io.Reader, codings []string) (io.Reader, error) {
	for _, line := range codings {
		for coding := range strings.SplitSeq(line, ",") {
			switch strings.ToLower(strings.TrimSpace(coding)) {
			case "", "identity":
			case "gzip", "x-gzip":
				body = &lazy{src: body, open: func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }}
			case "deflate":
				body = &lazy{src: body, open: func(r io.Reader) (io.Reader, error) { return zlib.NewReader(r) }}
			default:
				return nil, fmt.Errorf("the content coding %q is not known", coding)
			}
		}
	}
	return body, nil
}

// lazy opens a decoder with the first Read: opening one reads its header, which
// may not have arrived.
type lazy struct {
	src  io.Reader
	open func(io.Reader) (io.Reader, error)
	r    io.Reader
}

func (l *lazy) Read(p []byte) (int, error) {
	if l.r == nil {
		r, err := l.open(l.src)
		if err != nil {
			return 0, err
		}
		l.r = r
	}
	return l.r.Read(p)
}
