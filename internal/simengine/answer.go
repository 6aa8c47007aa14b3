// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// framing is how the end of a response body shows.
type framing uint8

const (
	byLength framing = iota
	byChunks
	byClose
)

// answer writes one response, byte by byte under the script's control.
type answer struct {
	*exchange
	framing framing
	gz      *gzip.Writer // nil: the body is sent as it is
	packed  bytes.Buffer // what gz wrote
	events  int          // events sent, for their ids
	broken  bool         // the next chunk gets a size that is no number
}

// reach carries out the faults at p, in the order in which they were written.
func (x *exchange) reach(p Point) error {
	return (&answer{exchange: x}).reach(p)
}

func (a *answer) reach(p Point) error {
	for _, f := range a.script.at(p) {
		a.record(Entry{Event: EventFault, N: p.K, Detail: f.String()})
		if err := a.strike(f); err != nil {
			return err
		}
	}
	return nil
}

// strike carries out one fault. Only those that return nil let the answer go on.
func (a *answer) strike(f Fault) error {
	switch f.Kind {
	case "stall":
		if f.arg(1, "") == "comments" && a.headOut {
			return a.stallWithComments(f)
		}
		return a.stall(f, a.gone)
	case "end":
		if !a.headOut {
			return a.end(Fault{Kind: "fin"}) // no body that could end
		}
		if err := a.endBody(); err != nil {
			return err
		}
		return errEnded
	case "status", "html":
		return a.answerStatus(f)
	case "garbage":
		return a.garbage()
	case "error":
		return a.errorEvent(f)
	case "tool":
		return a.runTool(f.arg(0, "tool"))
	case "delta", "bigline":
		return nil // they change the event of token K, see event
	default:
		return a.end(f)
	}
}

// stallWithComments is a stall that keeps the line warm.
func (a *answer) stallWithComments(f Fault) error {
	const every = 20 * time.Millisecond
	short := Fault{Kind: "stall", Args: []string{every.String()}}
	for total := f.duration(0, 0); ; {
		if err := a.send([]byte(": keep-alive\n\n")); err != nil {
			return err
		}
		if err := a.stall(short, a.gone); err != nil {
			return err
		}
		if total > 0 {
			if total -= every; total <= 0 {
				return nil
			}
		}
	}
}

// answerStatus answers with another status than 200. Once a response head is
// out it is too late, and the fault is logged as such.
func (a *answer) answerStatus(f Fault) error {
	if a.headOut {
		a.record(Entry{Event: EventFault, Detail: "not possible, a head was sent: " + f.String()})
		return nil
	}
	if f.Point.Name == "body" {
		a.close = true // the rest of the body is unread
	}
	status, kind := f.number(0, http.StatusServiceUnavailable), f.arg(1, "json")
	if f.Kind == "html" {
		status, kind = f.number(0, http.StatusOK), "html"
	}
	h := head{status: status}
	var body []byte
	switch kind {
	case "json":
		h.set("Content-Type", "application/json")
		body = errorBody(fmt.Sprintf("simulated status %d", status), "SimulatedError", status)
	case "html":
		h.set("Content-Type", "text/html")
		body = []byte("<html><head><title>" + strconv.Itoa(status) + "</title></head><body>simulated</body></html>\n")
	}
	switch after := f.arg(2, ""); after {
	case "":
	case "date":
		h.set("Retry-After", time.Now().Add(2*time.Second).UTC().Format(http.TimeFormat))
	default:
		h.set("Retry-After", after)
	}
	if status/100 == 3 {
		h.set("Location", "/elsewhere")
	}
	a.record(Entry{Event: EventRefused, N: status, Detail: f.String()})
	return a.whole(h, body)
}

// refuse answers with vLLM's error body.
func (x *exchange) refuse(status int, kind, message string) error {
	x.record(Entry{Event: EventRefused, N: status, Detail: message})
	a := &answer{exchange: x}
	h := head{status: status}
	h.set("Content-Type", "application/json")
	return a.whole(h, errorBody(message, kind, status))
}

// whole sends a complete short answer and returns errEnded.
func (a *answer) whole(h head, body []byte) error {
	bodiless := h.status == http.StatusNoContent || h.status == http.StatusNotModified
	if !bodiless {
		h.set("Content-Length", strconv.Itoa(len(body)))
	}
	out := h.bytes(a.close)
	if !bodiless && a.req.Method != http.MethodHead {
		out = append(out, body...)
	}
	if err := a.write(out); err != nil {
		return err
	}
	a.headSent(h.status)
	return errEnded
}

func (a *answer) headSent(status int) {
	a.headOut = true
	a.record(Entry{Event: EventHead, N: status})
}

func errorBody(message, kind string, code int) []byte {
	return fmt.Appendf(nil, `{"error":{"message":%s,"type":%s,"param":null,"code":%d}}`, quote(message), quote(kind), code)
}

// garbage sends bytes that are no HTTP before the head, and no event after it.
func (a *answer) garbage() error {
	if a.headOut {
		return a.send([]byte("\xff\xfe\x00garbage\n\ndata: {\"choices\":[{\"delta\":\n\n"))
	}
	if err := a.write([]byte("\x16\x03\x01\x00\xa5 this is no HTTP\r\n\r\n")); err != nil {
		return err
	}
	return a.end(Fault{Kind: "fin"})
}

// errorEvent sends an error inside the answer and ends it cleanly. Words among
// the arguments choose its shape; a number becomes its code.
func (a *answer) errorEvent(f Fault) error {
	code, message := `"engine_error"`, `"simulated engine error"`
	if a.script.has("errornull") {
		message = `"simulated engine error after nulls"`
	}
	number := 500
	for _, arg := range f.Args {
		if n, err := strconv.Atoi(arg); err == nil {
			number, code = n, arg
		}
	}
	data := `{"error":{"message":` + message + `,"type":"SimulatedError","param":null,"code":` + code + `}}`
	prefix := ""
	for _, arg := range f.Args {
		switch arg {
		case "string":
			data = `{"error":"simulated engine error"}`
		case "number":
			data = `{"error":{"message":` + message + `,"type":"SimulatedError","param":null,"code":` + strconv.Itoa(number) + `}}`
		case "event":
			prefix = "event: error\n"
		case "choices":
			data = strings.TrimSuffix(data, "}") + `,"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}`
		}
	}
	if a.req.URL.Path == apiMessages {
		prefix = "event: error\n"
		data = strings.Replace(data, "{", `{"type":"error",`, 1)
	}
	if !a.headOut { // an answer that is not streamed
		a.record(Entry{Event: EventRefused, N: number, Detail: f.String()})
		h := head{status: number}
		if number < 200 || number > 599 {
			h.status = http.StatusInternalServerError
		}
		h.set("Content-Type", "application/json")
		return a.whole(h, []byte(data))
	}
	if err := a.send([]byte(prefix + "data: " + data + "\n\n")); err != nil {
		return err
	}
	if slices.Contains(f.Args, "done") {
		if err := a.send([]byte("data: [DONE]\n\n")); err != nil {
			return err
		}
	}
	if err := a.endBody(); err != nil {
		return err
	}
	return errEnded
}

// head is a response head in the making.
type head struct {
	status int
	lines  []string
}

func (h *head) set(name, value string) { h.lines = append(h.lines, name+": "+value) }

func (h *head) bytes(closing bool) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\ndate: %s\r\nserver: simengine\r\n", h.status, http.StatusText(h.status),
		time.Now().UTC().Format(http.TimeFormat))
	for _, line := range h.lines {
		b.WriteString(line + "\r\n")
	}
	if closing {
		b.WriteString("Connection: close\r\n")
	}
	b.WriteString("\r\n")
	return b.Bytes()
}

// begin sends the head of a 200 answer. A length below zero means that the
// body is streamed.
func (a *answer) begin(contentType string, length int) error {
	h := head{status: http.StatusOK}
	if f, ok := a.script.whole("wrongtype"); ok {
		contentType = f.arg(0, "application/json")
	}
	h.set("Content-Type", contentType)
	if word := a.script.word("gzip", "plain"); word != "" {
		h.set("Content-Encoding", "gzip")
		if word != "broken" {
			a.gz = gzip.NewWriter(&a.packed)
		}
	}
	switch {
	case a.script.word("badhead", "") == "close":
		a.framing, a.close = byClose, true
	case length < 0:
		a.framing = byChunks
		h.set("Transfer-Encoding", "chunked")
	default:
		a.framing = byLength
		h.set("Content-Length", strconv.Itoa(length))
	}
	out, bad := a.badHead(h)
	if err := a.write(out); err != nil {
		return err
	}
	a.headSent(h.status)
	if bad != "" {
		a.record(Entry{Event: EventFault, Detail: "badhead:" + bad})
	}
	return a.reach(Point{Name: "headers"})
}

// badHead spoils the head if the script says so.
func (a *answer) badHead(h head) (out []byte, how string) {
	f, ok := a.script.whole("badhead")
	if !ok {
		return h.bytes(a.close), ""
	}
	how = f.arg(0, "")
	switch how {
	case "clte":
		if a.framing == byChunks {
			h.set("Content-Length", "5")
		} else {
			h.set("Transfer-Encoding", "chunked")
		}
	case "cl2":
		h.set("Content-Length", "3")
		h.set("Content-Length", "4")
	case "negative":
		h.set("Content-Length", "-1")
	case "nocolon":
		h.lines = append(h.lines, "this line has no colon")
	case "space":
		h.lines = append(h.lines, "X-Space : before the colon")
	case "nul":
		h.set("X-Nul", "a\x00b")
	case "huge":
		h.set("X-Huge", strings.Repeat("h", f.number(1, 1<<20)))
	case "fold":
		h.set("X-Fold", "one\r\n two")
	case "te":
		h.set("Transfer-Encoding", "sim-unknown")
	case "trailer":
		h.set("Trailer", "X-Sim-Trailer")
	case "badchunk":
		a.broken = true
	}
	out = h.bytes(a.close)
	switch how {
	case "version":
		out = bytes.Replace(out, []byte("HTTP/1.1 "), []byte("HTTP/9.9 "), 1)
	case "status":
		out = bytes.Replace(out, []byte(" 200 "), []byte(" 2x0 "), 1)
	case "lf":
		out = bytes.ReplaceAll(out, []byte("\r\n"), []byte("\n"))
	case "continue":
		out = append([]byte("HTTP/1.1 100 Continue\r\n\r\n"), out...)
	case "hints":
		out = append([]byte("HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n"), out...)
	}
	return out, how
}

// put writes to the connection, one byte at a time if the script says so.
func (a *answer) put(b []byte) error {
	if !a.script.has("bytewise") {
		return a.write(b)
	}
	for i := range b {
		if err := a.write(b[i : i+1]); err != nil {
			return err
		}
	}
	return nil
}

// pack compresses b if the answer is compressed. The result is complete: a
// reader can decode b from what it has.
func (a *answer) pack(b []byte) []byte {
	if a.gz == nil {
		return b
	}
	_, _ = a.gz.Write(b)
	_ = a.gz.Flush()
	return a.packedBytes()
}

func (a *answer) packedBytes() []byte {
	out := bytes.Clone(a.packed.Bytes())
	a.packed.Reset()
	return out
}

// send puts out a piece of body as one chunk and one write.
func (a *answer) send(b []byte) error { return a.put(a.frame(a.pack(b))) }

func (a *answer) frame(b []byte) []byte {
	if a.framing != byChunks || len(b) == 0 {
		return b
	}
	return slices.Concat(a.chunkHead(len(b)), b, []byte("\r\n"))
}

func (a *answer) chunkHead(length int) []byte {
	if a.broken {
		a.broken = false
		return []byte("xyz\r\n")
	}
	return fmt.Appendf(nil, "%x\r\n", length)
}

// sendCut is send with faults inside: after each cut's first bytes, its point
// is reached. The chunk is announced in full, so that a cut inside it shows;
// only a clean end, or compression, needs chunks of its own.
func (a *answer) sendCut(b []byte, cuts []cut) error {
	split := a.gz != nil || a.framing != byChunks || slices.ContainsFunc(cuts, func(c cut) bool {
		return slices.ContainsFunc(a.script.at(c.point), func(f Fault) bool { return f.Kind == "end" })
	})
	if !split {
		b = a.frame(b)
	}
	sent := 0
	for _, c := range cuts {
		at := c.at
		if !split {
			at += bytes.IndexByte(b, '\n') + 1
		}
		part := b[sent:at]
		sent = at
		if split {
			part = a.frame(a.pack(part))
		}
		if err := a.put(part); err != nil {
			return err
		}
		if err := a.reach(c.point); err != nil {
			return err
		}
	}
	if split {
		return a.send(b[sent:])
	}
	return a.put(b[sent:])
}

// endBody ends the body so that its framing is complete.
func (a *answer) endBody() error {
	var rest []byte
	if a.gz != nil {
		_ = a.gz.Close()
		rest = a.frame(a.packedBytes())
	}
	switch {
	case a.framing == byChunks && a.script.word("badhead", "") == "trailer":
		rest = append(rest, "0\r\nX-Sim-Trailer: 1\r\n\r\n"...)
	case a.framing == byChunks:
		rest = append(rest, "0\r\n\r\n"...)
	}
	if len(rest) == 0 {
		return nil
	}
	return a.put(rest)
}

// early closes the connection shortly after a complete answer, although
// keep-alive was promised, as llama.cpp's server does.
func (a *answer) early() error {
	f, ok := a.script.whole("early")
	if !ok {
		return nil
	}
	a.record(Entry{Event: EventFault, Detail: f.String()})
	if err := sleep(a.l.ctx, f.duration(0, time.Millisecond)); err != nil {
		return errCut
	}
	return a.end(Fault{Kind: "fin"})
}

// settle cancels what is left of the work and logs how an answer that did not
// get to its end was lost.
func (a *answer) settle(w *work, err error) error {
	if err != nil {
		a.lost(err, w.cancel())
	}
	return err
}
