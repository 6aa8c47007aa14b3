// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"mime"
	"strings"
	"unicode/utf8"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
)

// Bounds on a form. The file may be as large as the body may.
const (
	partsMax       = 256
	partHeaderMax  = 8 << 10
	fieldValuesMax = 4 << 10 // of one field that is read here
)

// A field is one part of a form that is no file.
type field struct {
	name string
	dialect.Span
}

// fields finds the fields of a multipart/form-data body (RFC 7578) by their
// spans, without copying what is in them. It takes the strict form that clients
// write and refuses what parsers read differently: anything around the parts,
// line ends other than CRLF, a boundary that goes on, headers that are folded
// or repeated.
func fields(contentType string, form []byte) ([]field, string) {
	_, params, err := mime.ParseMediaType(contentType)
	boundary := params["boundary"]
	if err != nil || boundary == "" || len(boundary) > 70 {
		return nil, "the Content-Type has no usable boundary"
	}
	delimiter := []byte("\r\n--" + boundary)
	if !bytes.HasPrefix(form, delimiter[2:]) {
		return nil, "the form does not begin with its boundary"
	}
	var found []field
	at := len(delimiter) - 2
	for range partsMax + 1 {
		switch rest := form[at:]; {
		case bytes.HasPrefix(rest, []byte("--")):
			if end := string(rest[2:]); end != "" && end != "\r\n" {
				return nil, "the form goes on behind its end"
			}
			return found, ""
		case !bytes.HasPrefix(rest, []byte("\r\n")):
			return nil, "the form has its boundary inside a part"
		}
		at += 2
		head := bytes.Index(form[at:min(len(form), at+partHeaderMax)], []byte("\r\n\r\n"))
		if head < 0 {
			return nil, "a part of the form has no header, or one that is too large"
		}
		name, file, wrong := partName(string(form[at : at+head]))
		if wrong != "" {
			return nil, wrong
		}
		at += head + len("\r\n\r\n")
		length := bytes.Index(form[at:], delimiter)
		switch {
		case length < 0:
			return nil, "the form is cut off"
		case bytes.HasPrefix(form[at:], delimiter[2:]):
			return nil, "a part of the form has no content, not even an empty line"
		}
		if !file {
			found = append(found, field{name, dialect.Span{Start: at, End: at + length}})
		}
		at += length + len(delimiter)
	}
	return nil, "the form has too many parts"
}

// partName reads a part's header: the field's name, and whether it is a file.
func partName(header string) (name string, file bool, wrong string) {
	disposition := ""
	for line := range strings.SplitSeq(header, "\r\n") {
		key, v, ok := strings.Cut(line, ":")
		if !ok || !token(key) || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
			return "", false, "a part of the form has a malformed header"
		}
		switch strings.ToLower(key) {
		case "content-disposition":
			if disposition != "" {
				return "", false, "a part of the form has two names"
			}
			disposition = v
		case "content-transfer-encoding":
			switch strings.ToLower(strings.TrimSpace(v)) {
			case "binary", "8bit", "7bit":
			default:
				return "", false, "a part of the form has a transfer encoding"
			}
		}
	}
	for param := range strings.SplitSeq(strings.ToLower(disposition), ";") {
		if strings.HasPrefix(strings.TrimSpace(param), "name*") {
			return "", false, "a part of the form has an encoded name"
		}
	}
	kind, params, err := mime.ParseMediaType(disposition)
	if err != nil || kind != "form-data" || params["name"] == "" {
		return "", false, "a part of the form has no name"
	}
	_, file = params["filename"]
	return params["name"], file, ""
}

// token reports whether a header's name is one (RFC 9110 §5.1), less the odd
// characters that nobody uses.
func token(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return r != '-' && (r < '0' || r > '9') && (r|0x20 < 'a' || r|0x20 > 'z')
	})
}

// read returns a field's value as text.
func (f field) read(form []byte) (string, *inference.Error) {
	v := f.Of(form)
	if len(v) > fieldValuesMax || !utf8.Valid(v) {
		return "", inference.Errorf(inference.InvalidRequest, "%s: must be text of at most %d bytes", f.name, fieldValuesMax)
	}
	return string(v), nil
}
