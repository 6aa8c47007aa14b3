// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/internal/engine"
	"github.com/headgate/headgate/internal/upstream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is an engine behind pipes, for bubbles where time is virtual.
type fake struct {
	t      *testing.T
	answer func(path string) string // the bytes of a whole answer; "" closes
	wait   time.Duration            // before it
	refuse bool

	mu    sync.Mutex
	asked map[string]int
	tasks sync.WaitGroup
}

func (f *fake) dial(context.Context, string, string) (net.Conn, error) {
	if f.refuse {
		return nil, errors.New("refused")
	}
	near, far := net.Pipe()
	f.tasks.Go(func() {
		defer far.Close()
		in := bufio.NewReader(far)
		for {
			req, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			f.mu.Lock()
			f.asked[req.URL.Path]++
			f.mu.Unlock()
			time.Sleep(f.wait)
			text := f.answer(req.URL.Path)
			if text == "" {
				return
			}
			if _, err := far.Write([]byte(text)); err != nil || strings.Contains(text, "Connection: close") {
				return
			}
		}
	})
	return near, nil
}

func page(body string, header ...string) string {
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s", len(body), strings.Join(append(header, ""), "\r\n"), body)
}

func vllm(done int, boot string) string {
	return fmt.Sprintf(`vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:generation_tokens_total{engine="0"} %d
%s`, done, boot)
}

// run watches for so long, within a bubble, and returns what was reported and
// logged.
func (f *fake) run(c Config, long time.Duration) (reports []Report, asked int, log string) {
	f.asked = map[string]int{}
	conn, err := upstream.New(upstream.Config{URL: &url.URL{Scheme: "http", Host: "engine:8000"}, Dial: f.dial})
	if err != nil {
		f.t.Fatal(err)
	}
	var out bytes.Buffer
	ctx, cancel := context.WithTimeout(f.t.Context(), long)
	defer cancel()
	w := &notes{}
	if err := Watch(ctx, conn, c, nil, slog.New(slog.NewTextHandler(&out, nil)), w); err != nil {
		f.t.Fatal(err)
	}
	conn.Close()
	f.tasks.Wait()
	return w.reports, w.asked, out.String()
}

type notes struct {
	asked   int
	reports []Report
}

func (n *notes) Asking()          { n.asked++ }
func (n *notes) Scraped(r Report) { n.reports = append(n.reports, r) }

var everyHalfSecond = Config{Interval: 500 * time.Millisecond, Timeout: time.Second}

func TestAsksAtItsInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{t: t, answer: func(string) string { return page(vllm(1, "")) }}
		reports, asked, log := f.run(everyHalfSecond, time.Minute)
		if n := len(reports); n < 105 || n > 120 || asked < n {
			t.Errorf("%d reports of %d questions in a minute", n, asked)
		}
		gaps := map[time.Duration]bool{}
		for i, r := range reports {
			if r.Err != nil || r.Reading.Kind != engine.VLLM || r.Reading.Waiting.V != 1 || r.Restarted {
				t.Fatalf("report %d: %+v", i, r)
			}
			if i > 0 {
				gaps[r.At.Sub(reports[i-1].At)] = true
			}
		}
		if len(gaps) < 50 {
			t.Errorf("only %d different gaps: there is no jitter", len(gaps))
		}
		if n := strings.Count(log, "\n"); n != 1 || !strings.Contains(log, "kind=vllm") {
			t.Errorf("log:\n%s", log)
		}
	})
}

// MET-6: an engine that fails is asked less and less often, and each failure is
// reported while hardly any is logged.
func TestFailuresMakePausesLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{t: t, answer: func(string) string { return "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n" }}
		reports, asked, log := f.run(Config{Kind: engine.VLLM, Interval: 50 * time.Millisecond, Timeout: time.Second}, 2*time.Minute)
		if n := len(reports); n < 15 || n > 22 || asked != n || f.asked["/metrics"] != n {
			t.Errorf("%d reports of %d questions in two minutes", n, asked)
		}
		for _, r := range reports {
			if r.Err == nil || r.Reading.Waiting.Known {
				t.Errorf("%+v", r)
			}
		}
		if n := strings.Count(log, "\n"); n != 1 {
			t.Errorf("%d lines:\n%s", n, log)
		}
	})
}

// An engine that fails now and then does not flood the log either, and is asked
// at its interval again.
func TestFlappingIsLoggedSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		f := &fake{t: t, answer: func(string) string {
			if n++; n%3 == 0 {
				return page("<html></html>\n")
			}
			return page(vllm(n, ""))
		}}
		reports, _, log := f.run(Config{Kind: engine.VLLM, Interval: 500 * time.Millisecond, Timeout: time.Second}, time.Minute)
		if len(reports) < 80 {
			t.Errorf("%d reports in a minute", len(reports))
		}
		if lines := strings.Count(log, "\n"); lines > 3 {
			t.Errorf("%d lines in a minute:\n%s", lines, log)
		}
	})
}

// MET-2: whatever is wrong, nothing is known.
func TestNothingIsKnownOfAFailure(t *testing.T) {
	whole := vllm(1, "")
	for name, f := range map[string]*fake{
		"refused":   {refuse: true},
		"500":       {answer: func(string) string { return "HTTP/1.1 500 X\r\nContent-Length: 3\r\n\r\na 1" }},
		"redirect":  {answer: func(string) string { return "HTTP/1.1 302 X\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n" }},
		"HTML":      {answer: func(string) string { return page("<html>\n<body>\n</body></html>\n") }},
		"empty":     {answer: func(string) string { return page("") }},
		"no answer": {answer: func(string) string { return "" }},
		"slow":      {wait: 5 * time.Second, answer: func(string) string { return page(whole) }},
		"cut by count": {answer: func(string) string {
			return "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 500\r\n\r\n" + whole[:100]
		}},
		"cut at close": {answer: func(string) string {
			return "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + whole[:len(whole)-4]
		}},
		"no end": {answer: func(string) string {
			return "HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + whole + strings.Repeat("a 1\n", engine.PageMax/4)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f.t = t
				reports, _, _ := f.run(everyHalfSecond, 10*time.Second)
				if len(reports) < 3 || len(reports) > 8 {
					t.Errorf("%d reports in ten seconds", len(reports))
				}
				for _, r := range reports {
					if v := r.Reading; r.Err == nil || r.Restarted || v.Waiting.Known || v.Running.Known || v.KVUsage.Known || v.CacheTokens.Known {
						t.Fatalf("%+v", r)
					}
				}
			})
		})
	}
}

// trtllm-serve has JSON of its own at /metrics.
func TestTheOtherPathIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{t: t, answer: func(path string) string {
			if path == usualPath {
				return page(`[{"iter":1}]` + "\n")
			}
			return page("trtllm_num_requests_running 3\ntrtllm_num_requests_waiting 0\n")
		}}
		reports, _, log := f.run(everyHalfSecond, 10*time.Second)
		if strings.Contains(log, "cannot be read") || !strings.Contains(log, "kind=trtllm") {
			t.Errorf("log:\n%s", log)
		}
		if f.asked[usualPath] != 1 || f.asked[trtllmPath] < 15 {
			t.Errorf("asked %v", f.asked)
		}
		if last := reports[len(reports)-1]; last.Reading.Kind != engine.TRTLLM || !last.Reading.Running.Known {
			t.Errorf("%+v", last)
		}
	})
}

func TestRestartsAreSeen(t *testing.T) {
	for name, pages := range map[string][2]string{
		"start time":    {vllm(100, "process_start_time_seconds 1.7e9\n"), vllm(100, "process_start_time_seconds 1.7001e9\n")},
		"counter falls": {vllm(100, ""), vllm(3, "")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := 0
				f := &fake{t: t, answer: func(string) string {
					switch n++; {
					case n < 8:
						return page(pages[0])
					case n == 8:
						return "HTTP/1.1 503 Loading\r\nContent-Length: 0\r\n\r\n"
					}
					return page(pages[1])
				}}
				reports, _, _ := f.run(Config{Kind: engine.VLLM, Interval: 500 * time.Millisecond, Timeout: time.Second}, 10*time.Second)
				for i, r := range reports {
					if r.Restarted != (i == 8) {
						t.Errorf("report %d: restarted %v", i, r.Restarted)
					}
				}
			})
		})
	}
}

// llama.cpp tells the size of its memory elsewhere: once, and again after a
// restart. Without --metrics it still tells what it is.
func TestLlamaCPPIsAskedForItsProperties(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slots, boot, asks, with := 4, 1, 0, true
		f := &fake{t: t, answer: func(path string) string {
			switch {
			case path == usualPath && with:
				if asks++; asks == 5 {
					slots, boot = 8, 2
				}
			}
			switch {
			case path == propsPath:
				return page(fmt.Sprintf(`{"total_slots":%d,"default_generation_settings":{"n_ctx":1000}}`, slots), "Server: llama.cpp")
			case !with:
				return "HTTP/1.1 501 Not Implemented\r\nServer: llama.cpp\r\nContent-Length: 0\r\n\r\n"
			}
			return page("llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\nllamacpp:tokens_predicted_total 5\n",
				"Server: llama.cpp", fmt.Sprintf("Process-Start-Time-Unix: %d", boot))
		}}
		reports, _, _ := f.run(everyHalfSecond, 5*time.Second)
		if last := reports[len(reports)-1]; f.asked[propsPath] != 2 || reports[3].Reading.CacheTokens.V != 4000 || last.Reading.CacheTokens.V != 8000 || last.Reading.Kind != engine.LlamaCPP {
			t.Errorf("asked %v: %+v", f.asked, last)
		}
		slots, with = 2, false
		reports, _, _ = f.run(everyHalfSecond, 5*time.Second)
		if last := reports[len(reports)-1]; last.Err == nil || last.Reading.Kind != engine.LlamaCPP || last.Reading.CacheTokens.V != 2000 {
			t.Errorf("without metrics: %+v", last)
		}
	})
}

func TestNamesThatMakeNoSenseAreAnError(t *testing.T) {
	err := Watch(t.Context(), nil, Config{Kind: engine.Custom, Names: engine.Names{Waiting: "{"}}, nil, slog.New(slog.DiscardHandler), &notes{})
	if err == nil {
		t.Error("taken")
	}
}

// BenchmarkScrape is one question and its answer over loopback, with a page as
// vLLM writes it. What the answering side costs is in it.
func BenchmarkScrape(b *testing.B) {
	text, err := os.ReadFile("../engine/testdata/vllm_0.32_busy.txt")
	if err != nil {
		b.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	answer := []byte(page(string(text)))
	var server sync.WaitGroup
	server.Go(func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		for in := bufio.NewReader(c); ; {
			if _, err := http.ReadRequest(in); err != nil {
				return
			}
			if _, err := c.Write(answer); err != nil {
				return
			}
		}
	})
	conn, err := upstream.New(upstream.Config{URL: &url.URL{Scheme: "http", Host: l.Addr().String()}})
	if err != nil {
		b.Fatal(err)
	}
	reader, err := engine.NewReader(engine.Unknown, engine.Names{})
	if err != nil {
		b.Fatal(err)
	}
	w := &watch{conn: conn, config: Config{Timeout: time.Minute}, reader: reader, paths: []string{usualPath}, buffer: make([]byte, chunk)}
	b.ReportAllocs()
	began := cpuTime(b)
	for b.Loop() {
		if r := w.ask(b.Context()); r.Err != nil {
			b.Fatal(r.Err)
		}
	}
	b.ReportMetric(float64(cpuTime(b)-began)/float64(b.N), "cpu-ns/op")
	conn.Close()
	_ = l.Close()
	server.Wait()
}

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
