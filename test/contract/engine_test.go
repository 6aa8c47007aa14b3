// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http/httputil"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// engine is a raw TCP server that records what it got to the byte and answers
// what the test says to the byte.
type engine struct {
	ln     net.Listener
	models []string
	page   string               // of metrics; "": it has none
	answer func(*exchange)      // after the body; default: usual
	early  func(*exchange) bool // before the body; true: answered
	done   chan struct{}        // closed when the test ends

	mu       sync.Mutex
	got      []*exchange
	conns    map[net.Conn]bool
	accepted int
	running  sync.WaitGroup
}

// exchange is one request at the engine, and the way to its answer.
type exchange struct {
	*engine
	net.Conn
	in *bufio.Reader

	head   string // the whole head as it came
	method string
	target string
	names  []string            // header names as spelt, in order
	header map[string][]string // by lower-case name
	body   string
	err    error // that ended the body early
	ended  bool  // the connection is not used for another request
}

// newEngine listens on a free port of 127.0.0.1. Without an answer it answers
// as a good engine would.
func newEngine(t *testing.T, answer func(*exchange), models ...string) *engine {
	t.Helper()
	return newEngineAt(t, "127.0.0.1:0", answer, models...)
}

func newEngineAt(t *testing.T, address string, answer func(*exchange), models ...string) *engine {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	if models == nil {
		models = []string{"m"}
	}
	if answer == nil {
		answer = (*exchange).usual
	}
	e := &engine{ln: ln, models: models, answer: answer, done: make(chan struct{}), conns: map[net.Conn]bool{}}
	e.running.Go(e.accept)
	t.Cleanup(e.close)
	return e
}

func (e *engine) url() string { return "http://" + e.ln.Addr().String() }

func (e *engine) close() {
	close(e.done)
	e.ln.Close()
	e.mu.Lock()
	for c := range e.conns {
		c.Close()
	}
	e.mu.Unlock()
	e.running.Wait()
}

func (e *engine) accept() {
	for {
		c, err := e.ln.Accept()
		if err != nil {
			return
		}
		e.mu.Lock()
		e.conns[c] = true
		e.accepted++
		e.mu.Unlock()
		e.running.Go(func() {
			in := bufio.NewReaderSize(c, 1<<16)
			for e.next(c, in) {
			}
			c.Close()
			e.mu.Lock()
			delete(e.conns, c)
			e.mu.Unlock()
		})
	}
}

func (e *engine) next(c net.Conn, in *bufio.Reader) bool {
	x := &exchange{engine: e, Conn: c, in: in, header: map[string][]string{}}
	if x.readHead() != nil {
		return false
	}
	if x.control() {
		return true
	}
	if e.early != nil && e.early(x) {
		return !x.ended
	}
	x.err = x.readBody()
	e.mu.Lock()
	e.got = append(e.got, x)
	e.mu.Unlock()
	if x.err != nil {
		return false
	}
	e.answer(x)
	return !x.ended
}

func (x *exchange) readHead() error {
	for {
		line, err := x.in.ReadString('\n')
		if err != nil {
			return err
		}
		x.head += line
		if line == "\r\n" {
			break
		}
	}
	lines := strings.Split(strings.TrimSuffix(x.head, "\r\n\r\n"), "\r\n")
	parts := strings.Split(lines[0], " ")
	if len(parts) != 3 {
		return fmt.Errorf("request line %q", lines[0])
	}
	x.method, x.target = parts[0], parts[1]
	for _, l := range lines[1:] {
		name, value, _ := strings.Cut(l, ":")
		x.names = append(x.names, name)
		name = strings.ToLower(name)
		x.header[name] = append(x.header[name], strings.Trim(value, " \t"))
	}
	return nil
}

func (x *exchange) readBody() error {
	te, cl := x.header["transfer-encoding"], x.header["content-length"]
	switch {
	case len(te)+len(cl) > 1:
		return fmt.Errorf("framed twice: %q %q", te, cl)
	case len(te) == 1:
		b, err := io.ReadAll(httputil.NewChunkedReader(x.in))
		x.body = string(b)
		for err == nil { // trailers
			var line string
			if line, err = x.in.ReadString('\n'); line == "\r\n" {
				break
			}
		}
		return err
	case len(cl) == 1:
		n, err := strconv.Atoi(cl[0])
		if err != nil {
			return err
		}
		b := make([]byte, n)
		_, err = io.ReadFull(x.in, b)
		x.body = string(b)
		return err
	}
	return nil
}

// control answers what a gateway asks on its own behalf.
func (x *exchange) control() bool {
	if x.method != "GET" {
		return false
	}
	path, _, _ := strings.Cut(x.target, "?")
	switch path {
	case "/v1/models":
		list := make([]string, len(x.models))
		for i, m := range x.models {
			list[i] = fmt.Sprintf(`{"id":%q,"object":"model","created":1,"owned_by":"test"}`, m)
		}
		x.json(200, `{"object":"list","data":[`+strings.Join(list, ",")+`]}`)
	case "/health", "/ping":
		x.json(200, "")
	case "/metrics":
		if x.page == "" {
			x.json(404, `{"detail":"Not Found"}`)
			return true
		}
		x.json(200, x.page, "Content-Type: text/plain; version=0.0.4")
	case "/prometheus/metrics", "/version", "/props", "/slots", "/get_server_info", "/get_model_info":
		x.json(404, `{"detail":"Not Found"}`)
	default:
		return false
	}
	return true
}

// requests are those that came so far, without the gateway's own questions.
func (e *engine) requests() []*exchange {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.got)
}

// last is the newest request.
func (e *engine) last(t *testing.T) *exchange {
	t.Helper()
	got := e.requests()
	if len(got) == 0 {
		t.Fatal("the engine got no request")
	}
	return got[len(got)-1]
}

func (x *exchange) streams() bool { return strings.Contains(x.body, `"stream":true`) }

func (x *exchange) write(text string) bool {
	_, err := io.WriteString(x.Conn, text)
	return err == nil
}

// json answers with a length. Headers are whole lines.
func (x *exchange) json(status int, body string, lines ...string) {
	head := fmt.Sprintf("HTTP/1.1 %d X\r\n", status)
	if !strings.Contains(strings.ToLower(strings.Join(lines, "\n")), "content-type:") {
		head += "Content-Type: application/json\r\n"
	}
	for _, l := range lines {
		head += l + "\r\n"
	}
	x.write(fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", head, len(body), body))
}

// stream begins a chunked answer of events.
func (x *exchange) stream(lines ...string) {
	head := "HTTP/1.1 200 OK\r\n"
	if !strings.Contains(strings.ToLower(strings.Join(lines, "\n")), "content-type:") {
		head += "Content-Type: text/event-stream; charset=utf-8\r\n"
	}
	for _, l := range lines {
		head += l + "\r\n"
	}
	x.write(head + "Transfer-Encoding: chunked\r\n\r\n")
}

func (x *exchange) chunk(text string) bool {
	return x.write(fmt.Sprintf("%x\r\n%s\r\n", len(text), text))
}

func (x *exchange) end() { x.write("0\r\n\r\n") }

// reset ends the connection with RST.
func (x *exchange) reset() {
	x.ended = true
	_ = x.Conn.(*net.TCPConn).SetLinger(0)
	x.Conn.Close()
}

// fin ends the connection with FIN.
func (x *exchange) fin() {
	x.ended = true
	x.Conn.Close()
}

// gone waits until the gateway has ended the connection.
func (x *exchange) gone() bool {
	x.ended = true
	_ = x.SetReadDeadline(time.Now().Add(patience))
	_, err := io.Copy(io.Discard, x.in)
	ne, ok := err.(net.Error)
	return !ok || !ne.Timeout()
}

// sleep is a stimulus: an engine that takes its time.
func (x *exchange) sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-x.done:
	}
}

// Events of a chat stream.
const (
	role   = `data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	finish = `data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	usage  = `data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}` + "\n\n"
	done   = "data: [DONE]\n\n"
)

func delta(text string) string {
	return `data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"` + text + `"},"finish_reason":null}]}` + "\n\n"
}

// plain is a chat answer that is not streamed.
const plain = `{"id":"c1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ab"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`

// usual answers as a good engine does.
func (x *exchange) usual() {
	if !x.streams() {
		x.json(200, plain)
		return
	}
	x.events(role, delta("a"), delta("b"), finish)
}

// events is a whole stream of these events, the usage chunk if asked for, and
// the end marker.
func (x *exchange) events(events ...string) {
	x.stream()
	for _, ev := range events {
		x.chunk(ev)
	}
	if strings.Contains(x.body, `"include_usage":true`) {
		x.chunk(usage)
	}
	x.chunk(done)
	x.end()
}
