// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"
)

// lowest is the smallest in-flight count of any endpoint.
func (g *gateway) lowest(t *testing.T) (low float64) {
	t.Helper()
	for _, v := range g.series(t, "headgate_inflight_requests") {
		low = min(low, v)
	}
	return low
}

// CNT-3: streams that outlast every limit of the configuration, many times
// over, stay counted until they end, whatever comes and goes beside them.
func TestStreamsStayCountedHoweverLongTheyLast(t *testing.T) {
	t.Parallel()
	const streams, engines = 12, 3
	const limit = 150 * time.Millisecond
	next := make(chan struct{})
	hold := func(x *exchange) {
		if !x.streams() {
			x.usual()
			return
		}
		x.stream()
		x.chunk(role + delta("a"))
		tick := time.NewTicker(limit / 10)
		defer tick.Stop()
		for {
			select {
			case <-tick.C: // an engine that is alive
				x.chunk(": still here\n\n")
				continue
			case <-next:
			case <-x.done:
			}
			x.chunk(finish + done)
			x.end()
			return
		}
	}
	var e []*engine
	for range engines {
		e = append(e, newEngine(t, hold))
	}
	g := start(t, "pools:\n"+pool("p", fmt.Sprintf("timeouts: {first_output: 10s, idle: %v, after_finish: %v, connect: %v}", 10*limit, limit, limit), e...))
	over := make(chan answer, streams)
	for range streams {
		res := roundTrip(t, g.client, "http://"+g.addr+chat, streamed)
		go func() { over <- whole(res) }()
	}
	held := func() (counts []int) {
		for _, x := range e {
			n := 0
			for _, r := range x.requests() {
				if r.streams() {
					n++
				}
			}
			counts = append(counts, n)
		}
		return counts
	}
	spread := held()
	for begun := time.Now(); time.Since(begun) < 30*limit; {
		for range 6 {
			same(t, g.post(t, chat, plainChat), 200, plain)
		}
		g.post(t, chat, `{"model":`)
		// A place is given back a moment after the answer's end.
		eventually(t, "as many in flight as streams, on each engine", func() bool {
			counts := g.series(t, "headgate_inflight_requests")
			for i, x := range e {
				if v := counts[fmt.Sprintf(`{endpoint=%q,pool="p"}`, x.url())]; int(v) < spread[i] {
					t.Fatalf("live streams are not counted any more: %v of %v", counts, spread)
				}
			}
			return g.inflight(t) == streams && len(over) == 0
		})
	}
	close(next)
	for range streams {
		if a := receive(t, "a stream's end", over); a.err != nil || !strings.HasSuffix(a.body, finish+done) {
			t.Errorf("%v %.300q", a.err, a.body)
		}
	}
	eventually(t, "none in flight", func() bool { return g.inflight(t) == 0 })
	g.stillServes(t)
}

// CNT-6: on every path that reaches an engine, requests are counted while they
// run, and spread by these counts.
func TestEveryPathIsCountedAndSpread(t *testing.T) {
	t.Parallel()
	const engines, each = 4, 6
	const form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n" +
		"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n--b--\r\n"
	for name, c := range map[string]struct {
		path, body string
		header     []string
	}{
		"chat":                   {chat, plainChat, nil},
		"streamed":               {chat, streamed, nil},
		"completions":            {"/v1/completions", `{"model":"m","prompt":"hi"}`, nil},
		"responses":              {"/v1/responses", `{"model":"m","input":"hi"}`, nil},
		"messages":               {"/v1/messages", `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}`, nil},
		"count_tokens":           {"/v1/messages/count_tokens", `{"model":"m","messages":[{"role":"user","content":"hi"}]}`, nil},
		"embeddings":             {"/v1/embeddings", `{"model":"m","input":["a","b"]}`, nil},
		"rerank":                 {"/v1/rerank", `{"model":"m","query":"q","documents":["a"]}`, nil},
		"score":                  {"/v1/score", `{"model":"m","text_1":"q","text_2":["a"]}`, nil},
		"tokenize":               {"/tokenize", `{"model":"m","prompt":"hi"}`, nil},
		"tokenize, no model":     {"/tokenize", `{"prompt":"hi"}`, nil},
		"detokenize":             {"/detokenize", `{"model":"m","tokens":[1]}`, nil},
		"speech":                 {"/v1/audio/speech", `{"model":"m","input":"hi","voice":"v"}`, nil},
		"transcriptions":         {"/v1/audio/transcriptions", form, []string{"Content-Type", "multipart/form-data; boundary=b"}},
		"translations":           {"/v1/audio/translations", form, []string{"Content-Type", "multipart/form-data; boundary=b"}},
		"chat, the same prompts": {chat, strings.Replace(plainChat, `"hi"`, `"`+strings.Repeat("the same ", 2000)+`"`, 1), nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			next := make(chan struct{})
			hold := func(x *exchange) {
				select {
				case <-next:
				case <-x.done:
				}
				if x.target == chat || x.target == "/v1/completions" {
					x.usual()
					return
				}
				x.json(200, `{"object":"list","model":"m","data":[]}`)
			}
			var e []*engine
			for range engines {
				e = append(e, newEngine(t, hold))
			}
			// The default profile goes by time too, of which more passes on a busy machine.
			g := start(t, "pools:\n"+pool("p", "routing: {profile: least_load}", e...))
			over := make(chan answer, engines*each)
			for range engines * each {
				go func() {
					res, err := g.begin(t, "POST", c.path, strings.NewReader(c.body), c.header...)
					if err != nil {
						over <- answer{err: err}
						return
					}
					over <- whole(res)
				}()
			}
			eventually(t, "all requests at the engines", func() bool {
				n := 0
				for _, x := range e {
					n += len(x.requests())
				}
				if len(over) > 0 {
					a := <-over
					t.Fatalf("answered by nobody: %d %v %s", a.status, a.err, a.body)
				}
				return n == engines*each
			})
			if n := g.inflight(t); n != engines*each {
				t.Errorf("%v in flight, want %d", n, engines*each)
			}
			for i, x := range e {
				if n := len(x.requests()); n != each {
					t.Errorf("engine %d got %d of %d requests", i, n, engines*each)
				}
			}
			close(next)
			for range engines * each {
				if a := receive(t, "an answer", over); a.status != 200 || a.err != nil {
					t.Errorf("%d %v %s", a.status, a.err, a.body)
				}
			}
			eventually(t, "none in flight", func() bool { return g.inflight(t) == 0 && g.lowest(t) == 0 })
		})
	}
}

// CNT-5: whatever way attempts fail, nothing stays counted, no count goes below
// zero, and round after round takes no more memory, goroutines or series.
func TestFailuresLeaveNothingBehindRoundAfterRound(t *testing.T) {
	// Not parallel: the heap is the whole process's.
	const ok = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
	faults := map[string]func(*exchange){
		"500":            func(x *exchange) { x.json(500, `{"error":"x"}`) },
		"RST in head":    func(x *exchange) { x.write("HTTP/1.1 200 OK\r\nConte"); x.reset() },
		"RST":            (*exchange).reset,
		"RST mid-stream": func(x *exchange) { x.stream(); x.chunk(role + delta("a")); x.reset() },
		"FIN mid-stream": func(x *exchange) { x.stream(); x.chunk(role + delta("a")); x.fin() },
		"bad chunk":      func(x *exchange) { x.stream(); x.chunk(role + delta("a")); x.write("zz\r\n"); x.fin() },
		"short body":     func(x *exchange) { x.write(ok + "Content-Length: 99\r\n\r\n{"); x.fin() },
		"bad gzip":       func(x *exchange) { x.json(200, plain, "Content-Encoding: gzip") },
		"garbage":        func(x *exchange) { x.write("SSH-2.0-OpenSSH_9\r\n"); x.fin() },
		"429":            func(x *exchange) { x.json(429, `{"error":"x"}`) },
		"400":            func(x *exchange) { x.json(400, `{"error":"x"}`) },
		"none":           (*exchange).usual,
	}
	e := newEngine(t, nil)
	e.early = func(x *exchange) bool { // so that nothing is kept of them
		if x.err = x.readBody(); x.err != nil {
			x.fin()
			return true
		}
		faults[x.header["x-fault"][0]](x)
		return true
	}
	dead := newEngine(t, nil)
	dead.ln.Close()
	plainText, err := net.Listen("tcp", "127.0.0.1:0") // where TLS is expected
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			c, err := plainText.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
			c.Close()
		}
	}()
	defer func() { plainText.Close(); <-over }()
	const quiet = "health: {interval: 0s}, scrape: {interval: 0s}"
	// A journal on disk: the one in memory keeps the latest requests, by design.
	g := start(t, fmt.Sprintf(`journal: {driver: sqlite, durability: relaxed}
routes:
- {match: {model: m}, backends: [{pool: p}]}
- {match: {model: dead}, backends: [{pool: dead}]}
- {match: {model: tls}, backends: [{pool: tls}]}
pools:
%s%s  tls: {discovery: {static: [{url: "https://%s"}]}, %s}
`, pool("p", quiet, e), pool("dead", quiet, dead), plainText.Addr(), quiet))
	ask := func(model, fault string, stream bool) {
		body := plainChat
		if stream {
			body = streamed
		}
		res, err := g.begin(t, "POST", chat, strings.NewReader(strings.Replace(body, `"m"`, `"`+model+`"`, 1)), "X-Fault", fault)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		res.Body.Close()
		if fault == "none" && (res.StatusCode == http.StatusOK) != (model == "m") {
			t.Errorf("%s: %d", model, res.StatusCode)
		}
	}
	rounds, asks := 5, 500
	if testing.Short() {
		rounds, asks = 3, 100
	}
	type left struct {
		heap, objects uint64
		goroutines    int
		page          int
	}
	round := func() (l left) {
		for i := 0; i < asks; {
			for fault := range faults {
				ask("m", fault, i%2 == 0)
				i++
			}
			ask("dead", "none", i%2 == 0)
			ask("tls", "none", i%2 == 0)
			i += 2
			if low := g.lowest(t); low < 0 {
				t.Fatalf("%v in flight", low)
			}
		}
		eventually(t, "none in flight", func() bool { return g.inflight(t) == 0 })
		l.page = len(g.series(t, "headgate_requests_total")) + len(g.series(t, "headgate_attempts_total"))
		if strings.Contains(g.log.String(), "panic") {
			t.Fatal("the gateway panicked")
		}
		g.log.mu.Lock()
		g.log.buf = bytes.Buffer{}
		g.log.mu.Unlock()
		g.client.CloseIdleConnections()
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		l.heap, l.objects, l.goroutines = m.HeapAlloc, m.HeapObjects, runtime.NumGoroutine()
		return l
	}
	round()
	first := round()
	last := first
	for range rounds - 1 {
		last = round()
	}
	t.Logf("after the first round %+v, after the last %+v", first, last)
	if grown := int64(last.heap) - int64(first.heap); grown > 2<<20 {
		t.Errorf("the heap grew by %d KiB in %d requests", grown>>10, (rounds-1)*asks)
	}
	if grown := int64(last.objects) - int64(first.objects); grown > 2000 {
		t.Errorf("%d objects more after %d requests", grown, (rounds-1)*asks)
	}
	if last.goroutines > first.goroutines+20 {
		t.Errorf("%d goroutines, then %d", first.goroutines, last.goroutines)
	}
	if last.page != first.page {
		t.Errorf("%d series, then %d", first.page, last.page)
	}
}

// unread is a gateway with n streams of raw connections, and one of HTTP/2, that
// nobody reads and whose engine is held back; cut tells when each engine was
// told.
func unread(t *testing.T, n int) (g *gateway, shared *http.Client, cut chan bool) {
	t.Helper()
	event := delta(strings.Repeat("x", 16<<10))
	blocked := make(chan struct{}, n+1)
	cut = make(chan bool, n+1)
	e := newEngine(t, func(x *exchange) {
		if !strings.Contains(x.head, "X-Stuck") {
			x.usual()
			return
		}
		x.stream()
		x.chunk(role)
		for range (200 << 20) / len(event) {
			_ = x.SetWriteDeadline(time.Now().Add(time.Second)) // a second without room is held back
			if !x.chunk(event) {
				blocked <- struct{}{}
				break
			}
		}
		x.ended = true
		_ = x.SetReadDeadline(time.Now().Add(100 * time.Second))
		_, err := io.Copy(io.Discard, x.in)
		var ne net.Error
		cut <- !errors.As(err, &ne) || !ne.Timeout()
	})
	g = serve(t, e, "")
	for range n {
		w := g.dial(t)
		_ = w.Conn.(*net.TCPConn).SetReadBuffer(8 << 10)
		w.send(rawPost(chat, streamed, "X-Stuck: 1"))
	}
	shared = h2c(t)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+g.addr+chat, strings.NewReader(streamed))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Stuck", "1")
	res, err := shared.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	for range n + 1 {
		receive(t, "the engine is held back", blocked)
	}
	return g, shared, cut
}

// LIM-6: clients that read nothing cost little memory and hurt nobody, not even
// the other streams of their own connection.
func TestClientsThatReadNothingHurtNobody(t *testing.T) {
	// Not parallel: the heap is the whole process's.
	const stuck = 8
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	g, shared, _ := unread(t, stuck)
	for range 20 {
		g.stillServes(t)
		if a := whole(roundTrip(t, shared, "http://"+g.addr+chat, streamed)); a.status != 200 || a.err != nil || !strings.HasSuffix(a.body, done) {
			t.Errorf("beside a stream that is not read: %d %v", a.status, a.err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	// The client of HTTP/2 itself may hold its window, 4 MiB.
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > stuck<<20+8<<20 {
		t.Errorf("the heap grew by %d MiB for %d clients", grown>>20, stuck+1)
	}
	if n := g.inflight(t); n != stuck+1 {
		t.Errorf("%v in flight", n)
	}
}

// LIM-6: at the write limit they are cut, their engines are told, and nothing
// stays counted.
func TestClientsThatReadNothingAreCutAtTheWriteLimit(t *testing.T) {
	if testing.Short() {
		t.Skip("the write limit is a minute")
	}
	t.Parallel()
	const stuck = 3
	g, _, cut := unread(t, stuck)
	limit := time.After(100 * time.Second)
	for range stuck + 1 {
		select {
		case ok := <-cut:
			if !ok {
				t.Error("an engine was never told")
			}
		case <-limit:
			t.Fatal("clients that read nothing are not cut")
		}
	}
	eventually(t, "none in flight", func() bool { return g.inflight(t) == 0 })
	if n := g.outcomes(t, "completed"); n != 0 {
		t.Errorf("%v streams count as completed", n)
	}
	g.stillServes(t)
}
