// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// kept is what the journal knows of a request that is over.
type kept struct {
	Tenant    string `json:"tenant"`
	Outcome   string `json:"outcome"`
	Code      string `json:"code"`
	Prompt    int    `json:"prompt_tokens"`
	Tokens    int    `json:"delivered_output_tokens"`
	Estimated bool   `json:"delivered_output_tokens_estimated"`
}

// record waits until the request of an answer is over in the journal.
func (g *gateway) record(t *testing.T, a answer) (k kept) {
	t.Helper()
	url := "http://" + g.admin + "/admin/v1/requests/" + a.header.Get("x-request-id")
	eventually(t, "a record with an outcome", func() bool {
		b := g.get(t, url)
		return b.status == 200 && json.Unmarshal([]byte(b.body), &k) == nil && k.Outcome != ""
	})
	return k
}

// outcomes counts the requests that ended so.
func (g *gateway) outcomes(t *testing.T, outcome string) (n float64) {
	t.Helper()
	for s, v := range g.series(t, "headgate_requests_total") {
		if strings.Contains(s, `outcome="`+outcome+`"`) {
			n += v
		}
	}
	return n
}

// STR-2: applications that read only deltas, that wait for [DONE] and that look
// for error events get the same bytes of a stream that failed, and each of them
// is released at once. None is told of a success.
func TestInterruptedStreamReadsTheSameToEveryKindOfClient(t *testing.T) {
	t.Parallel()
	begun := role + delta("a") + delta("b")
	readers := map[string]func(line string) bool{ // true: the application has what it waits for
		"deltas": func(string) bool { return false },
		"[DONE]": func(line string) bool { return line == "data: [DONE]" },
		"errors": func(line string) bool { return strings.HasPrefix(line, `data: {"error":{`) },
	}
	for how, end := range map[string]func(*exchange){
		"RST": (*exchange).reset, "FIN": (*exchange).fin, "end": (*exchange).end,
		"error event": func(x *exchange) { x.chunk(`data: {"error":{"message":"boom","code":500}}` + "\n\n" + done); x.end() },
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			read := make(chan struct{})
			e := newEngine(t, func(x *exchange) {
				x.stream()
				x.chunk(begun)
				select {
				case <-read: // or RST would take the deltas with it
				case <-x.done:
				}
				end(x)
			})
			g := serve(t, e, "")
			seen := map[string]bool{}
			n := 0
			for _, c := range []*http.Client{g.client, h2c(t)} {
				for kind, satisfied := range readers {
					n++
					res := roundTrip(t, c, "http://"+g.addr+chat, streamed)
					type told struct {
						a    answer
						took time.Duration
					}
					got := within(t, kind+": the client's release", func() told {
						defer res.Body.Close()
						var all strings.Builder
						var failed time.Time
						var released time.Duration
						in := bufio.NewReader(res.Body)
						for {
							line, err := in.ReadString('\n')
							all.WriteString(line)
							if strings.Contains(line, `"content":"b"`) {
								failed = time.Now()
								read <- struct{}{}
							}
							if released == 0 && (err != nil || satisfied(strings.TrimSuffix(line, "\n"))) {
								released = time.Since(failed)
							}
							if err == io.EOF {
								err = nil
							} else if err == nil {
								continue
							}
							return told{answer{res.StatusCode, res.Header, all.String(), err}, released}
						}
					})
					if rest := got.a.interrupted(t); rest != begun || strings.Contains(got.a.body, `"finish_reason":"`) {
						t.Errorf("%s: %q", kind, got.a.body)
					}
					if got.took > 5*time.Second { // 1 s is promised, on a machine that is not busy
						t.Errorf("%s: released after %v", kind, got.took)
					}
					seen[strings.ReplaceAll(got.a.body, got.a.header.Get("x-request-id"), "ID")] = true
				}
			}
			if len(seen) != 1 {
				t.Errorf("clients got %d different streams: %v", len(seen), seen)
			}
			eventually(t, "every stream counts as interrupted", func() bool { return g.outcomes(t, "interrupted") == float64(n) })
			if got := len(e.requests()); got != n {
				t.Errorf("%d requests at the engine, want %d", got, n)
			}
		})
	}
}

// STR-6: a Responses stream that fails has exactly one event that says so,
// whoever writes it, and it is the last one.
func TestResponsesStreamThatFailsHasOneTerminalEvent(t *testing.T) {
	t.Parallel()
	text := func(n int, s string) string {
		return fmt.Sprintf("event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":%d,\"item_id\":\"i1\",\"output_index\":0,\"content_index\":0,\"delta\":%q}\n\n", n, s)
	}
	begun := "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"r1\",\"object\":\"response\",\"status\":\"in_progress\",\"model\":\"m\",\"output\":[]}}\n\n" +
		text(1, "a") + text(2, "b")
	say := func(event string, end func(*exchange)) func(*exchange) {
		return func(x *exchange) { x.chunk(event); end(x) }
	}
	for how, end := range map[string]func(*exchange){
		"error event":     say("event: error\ndata: {\"type\":\"error\",\"sequence_number\":3,\"code\":\"server_error\",\"message\":\"boom\",\"param\":null}\n\n", (*exchange).end),
		"error object":    say("data: {\"error\":{\"message\":\"boom\",\"type\":\"InternalServerError\",\"code\":500}}\n\n", (*exchange).fin),
		"response.failed": say("event: response.failed\ndata: {\"type\":\"response.failed\",\"sequence_number\":3,\"response\":{\"id\":\"r1\",\"object\":\"response\",\"status\":\"failed\",\"model\":\"m\",\"error\":{\"code\":\"server_error\",\"message\":\"boom\"},\"output\":[]}}\n\n", (*exchange).end),
		"FIN":             (*exchange).fin,
		"RST":             (*exchange).reset,
		"end":             (*exchange).end,
		"end marker":      say(done, (*exchange).end),
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			read := make(chan struct{})
			e := newEngine(t, func(x *exchange) {
				x.stream()
				x.chunk(begun)
				select {
				case <-read:
				case <-x.done:
				}
				end(x)
			})
			g := start(t, "pools:\n"+pool("p", "", e, twin(t, e)))
			res, err := g.begin(t, "POST", "/v1/responses", strings.NewReader(`{"model":"m","input":"hi","stream":true}`))
			if err != nil {
				t.Fatal(err)
			}
			first := within(t, "both deltas", func() string { s, _ := readUntil(res.Body, `"delta":"b"}`+"\n\n"); return s })
			close(read)
			a := within(t, "the end", func() answer { return whole(res) })
			a.body = first + a.body
			if a.err != nil || !strings.HasPrefix(a.body, begun) {
				t.Errorf("%v %q", a.err, a.body)
			}
			events := strings.Split(strings.TrimSuffix(a.body, "\n\n"), "\n\n")
			terminal := 0
			for i, ev := range events {
				if strings.Contains(ev, `"type":"error"`) || strings.Contains(ev, `"type":"response.failed"`) || strings.HasPrefix(ev, `data: {"error"`) {
					terminal++
					if i < len(events)-1 {
						t.Errorf("something follows %q: %q", ev, events[i+1])
					}
				}
			}
			if terminal != 1 || strings.Contains(a.body, "response.completed") || strings.Contains(a.body, "[DONE]") {
				t.Errorf("%d terminal events: %q", terminal, a.body)
			}
			if k := g.record(t, a); k.Outcome != "interrupted" {
				t.Errorf("%+v", k)
			}
			eventually(t, "nothing in flight", func() bool { return g.inflight(t) == 0 })
			if n := len(e.requests()); n != 1 {
				t.Errorf("%d attempts", n)
			}
		})
	}
}

// SSE-4, SSE-7: the engine's own token counts are what is kept, wherever reads
// end, whether or not the client asked for them, and without an end marker too.
func TestUsageIsCountedWhereverItComes(t *testing.T) {
	t.Parallel()
	counts := strings.Replace(usage, `{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}`, `{"prompt_tokens":1234,"completion_tokens":77,"total_tokens":1311}`, 1)
	beside := strings.Replace(finish, `"choices"`, `"usage":{"prompt_tokens":1234,"completion_tokens":77,"total_tokens":1311},"choices"`, 1)
	text := role + delta("a") + finish
	for name, respond := range map[string]func(*exchange){
		"apart": func(x *exchange) {
			x.chunk(text)
			x.chunk(counts)
			x.sleep(200 * time.Millisecond)
			x.chunk(done)
			x.end()
		},
		"together":      func(x *exchange) { x.chunk(text); x.chunk(counts + done); x.end() },
		"all in one":    func(x *exchange) { x.chunk(text + counts + done); x.end() },
		"no end marker": func(x *exchange) { x.chunk(text); x.chunk(counts); x.end() },
		"closed":        func(x *exchange) { x.chunk(text); x.chunk(counts); x.fin() },
		"cut inside": func(x *exchange) {
			x.chunk(text + counts[:len(counts)-20])
			x.sleep(50 * time.Millisecond)
			x.chunk(counts[len(counts)-20:] + done)
			x.end()
		},
		"no space after the colon": func(x *exchange) { x.chunk(strings.ReplaceAll(text+counts+done, "data: ", "data:")); x.end() },
		"beside the finish":        func(x *exchange) { x.chunk(role + delta("a") + beside + done); x.end() },
		"comment between":          func(x *exchange) { x.chunk(text + counts); x.chunk(": still here\n\n"); x.chunk(done); x.end() },
	} {
		for _, asked := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, asked for %v", name, asked), func(t *testing.T) {
				t.Parallel()
				body := streamed
				if asked {
					body = strings.Replace(streamed, `"stream":true`, `"stream":true,"stream_options":{"include_usage":true}`, 1)
				}
				a, g, _ := relay(t, body, func(x *exchange) { x.stream(); respond(x) })
				if a.status != 200 || a.err != nil || strings.Count(a.body, "[DONE]") != 1 {
					t.Errorf("%d %v %q", a.status, a.err, a.body)
				}
				if got := strings.Contains(a.body, `"choices":[],`); got != (asked && name != "beside the finish") {
					t.Errorf("a usage chunk: %v, in %q", got, a.body)
				}
				if k := g.record(t, a); k.Outcome != "completed" || k.Prompt != 1234 || k.Tokens != 77 || k.Estimated {
					t.Errorf("%+v", k)
				}
			})
		}
	}
}

// SSE-1: an event that is larger than anything the gateway keeps is an error
// that is told, never a quiet end.
func TestEventOverEveryBoundIsToldOf(t *testing.T) {
	t.Parallel()
	const size = 40 << 20
	for name, before := range map[string]string{"before output": role, "after output": role + delta("a")} {
		t.Run(name, func(t *testing.T) {
			a, g, _ := relay(t, streamed, func(x *exchange) {
				x.stream()
				x.chunk(before)
				block := strings.Repeat("x", 1<<20)
				if !x.chunk(`data: {"choices":[{"index":0,"delta":{"content":"`) {
					return
				}
				for range size >> 20 {
					if !x.chunk(block) {
						x.ended = true
						return
					}
				}
				x.chunk(`"}}]}` + "\n\n" + finish + done)
				x.end()
			})
			switch {
			case a.status == 200 && strings.Count(a.body, "x") > size && strings.HasSuffix(a.body, done):
				// There is no bound that it is over.
			case before == role:
				a.refusal(t, 502, "upstream_failed", true)
			default:
				if got := a.interrupted(t); got != before {
					t.Errorf("%d bytes before the error event: %.300q", len(got), got)
				}
				if k := g.record(t, a); k.Outcome != "interrupted" {
					t.Errorf("%+v", k)
				}
			}
		})
	}
}

// HTP-2: an engine that promised more than it sent has failed, in a stream and
// in an error answer too.
func TestAnswerShorterThanItsLengthIsNeverACleanEnd(t *testing.T) {
	t.Parallel()
	short := func(head, body string) func(*exchange) {
		return func(x *exchange) {
			x.write(head + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body)+600, body))
			x.fin()
		}
	}
	const events = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
	t.Run("stream, before output", func(t *testing.T) {
		a, _, _ := relay(t, streamed, short(events, role))
		a.refusal(t, 502, "upstream_failed", true)
	})
	t.Run("stream, after output", func(t *testing.T) {
		a, _, _ := relay(t, streamed, short(events, role+delta("a")))
		if got := a.interrupted(t); got != role+delta("a") {
			t.Errorf("%q", got)
		}
	})
	for _, request := range []string{plainChat, streamed} {
		for _, status := range []int{400, 404, 422} {
			t.Run(fmt.Sprint(status), func(t *testing.T) {
				const body = `{"error":{"message":"too long","code":400}}`
				a, _, _ := relay(t, request, short(fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: application/json\r\n", status), body))
				if a.err == nil && a.header.Get("Headgate-Reason") == "" {
					t.Errorf("a clean end: %d %v %q", a.status, a.header, a.body)
				}
			})
		}
	}
}

// PAY-5: whatever type a vendor's stop_reason has, it arrives, also where the
// gateway edits the same event.
func TestVendorsStopReasonsSurviveARewrite(t *testing.T) {
	t.Parallel()
	named := func(s, model string) string { return strings.ReplaceAll(s, `"model":"m"`, `"model":"`+model+`"`) }
	for _, value := range []string{`"</s>"`, `128009`, `null`, `["a","b"]`, `{"type":"stop_sequence","stop_sequence":"\u003c"}`, `1e400`, `""`} {
		t.Run(value, func(t *testing.T) {
			with := func(s string) string {
				return strings.Replace(s, `"finish_reason":"stop"`, `"finish_reason":"tool_calls","stop_reason":`+value+`,"matched_stop":9007199254740993`, 1)
			}
			last := with(strings.Replace(finish, `"delta":{}`, `"delta":{"content":"z"}`, 1))
			text := role + delta("a") + last
			e := newEngine(t, func(x *exchange) {
				if !x.streams() {
					x.json(200, named(with(plain), "backend"))
					return
				}
				x.stream()
				x.chunk(named(text+usage+done, "backend"))
				x.end()
			}, "backend")
			g := start(t, "routes: [{match: {model: public}, backends: [{pool: p}], rewrite: {model: backend}}]\npools:\n"+pool("p", "", e))
			same(t, g.post(t, chat, named(plainChat, "public")), 200, named(with(plain), "public"))
			same(t, g.post(t, chat, named(streamed, "public")), 200, named(text+done, "public"))
		})
	}
}
