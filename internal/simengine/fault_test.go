// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

func TestFaultGrammar(t *testing.T) {
	for _, text := range []string{
		"rst@head", "fin@body:100", "rst@accept", "refuse@accept", "refuse@listen:50ms", "stall@role",
		"engine=A;attempt=2;request=req_1;path=/health;times=*;status@head:503:json:2",
		"times=3;stall@token:4:200ms", "rst@in-chunk:3:17", "end@in-char:2", "stall@in-body:40",
		"error@token:2:number:502:event:done", "slow:10ms", "nodone:fin", "usage:none", "badhead:clte",
		"garbage@headers", "tool@computed:3:pay", "exit@token:2", "bigline@token:2:65537", "early", "gzip:broken",
	} {
		script, err := ParseFaults(text)
		if err != nil || len(script) != 1 || script[0].String() != text {
			t.Errorf("%s: %v %v", text, script, err)
		}
	}
	if script, err := ParseFaults(" rst , fin@done,, role:5ms"); err != nil || fmt.Sprint(script) != "[rst@head fin@done stall@role:5ms]" {
		t.Errorf("%v %v", script, err)
	}
	for _, text := range []string{
		"boom", "rst@nowhere", "rst@token", "rst@token:0", "rst@token:x", "status@token", "status@in-chunk:1:1", "slow", "slow:fast",
		"status@head:99", "status@head:200:xml", "times=0;rst", "attempt=x;rst", "color=red;rst", "nodone:maybe", "usage",
		"rst@head:1", "error@token:1:bogus", "in-chunk@rst", "stall@head:1s:music", "refuse@head", "slow@token:1:1ms", "=;rst",
	} {
		if script, err := ParseFaults(text); err == nil {
			t.Errorf("%q was read as %v", text, script)
		}
	}
}

// FuzzParseFaults: no text panics, and what is read is written and read back.
func FuzzParseFaults(f *testing.F) {
	f.Add("engine=A;times=*;status@head:503:json:2,rst@in-chunk:3:17")
	f.Fuzz(func(t *testing.T, text string) {
		script, err := ParseFaults(text)
		if err != nil {
			return
		}
		for _, fault := range script {
			again, err := ParseFaults(fault.String())
			if err != nil || len(again) != 1 || again[0].String() != fault.String() {
				t.Fatalf("%q → %q → %v %v", text, fault, again, err)
			}
		}
	})
}

// framed is a body of HTTP chunks as the engine sends it: one per event.
func chunks(body string) (out []string) {
	for body != "" {
		size, rest, _ := strings.Cut(body, "\r\n")
		var n int
		if _, err := fmt.Sscanf(size, "%x", &n); err != nil || len(rest) < n {
			return append(out, "CUT:"+rest)
		}
		if n == 0 {
			return append(out, "END"+strings.TrimSuffix(rest, "\r\n"))
		}
		out = append(out, rest[:n])
		body = strings.TrimPrefix(rest[n:], "\r\n")
	}
	return out
}

// wire sends one request with a fault and returns everything that came back,
// head and body apart, and how the connection ended.
func wire(t *testing.T, e *Engine, fault, body string) (head, rest, end string) {
	t.Helper()
	c := dial(t, e).post(chatPath, body, "X-Request-Id: req_1", "X-Sim-Fault: "+fault)
	raw, end := c.rest()
	_ = c.Close()
	head, rest, _ = strings.Cut(raw, "\r\n\r\n")
	return head, rest, end
}

// Every way to break the connection, at every point of a stream: what was sent
// before it arrives to the byte, and nothing after.
func TestConnectionEndsExactlyAtItsPoint(t *testing.T) {
	for _, kind := range []string{"rst", "fin", "exit"} {
		wantEnd := map[string]string{"rst": "RST", "fin": "FIN", "exit": "RST"}[kind]
		for _, tt := range []struct {
			point string
			check func(t *testing.T, head, body string)
		}{
			{"head", func(t *testing.T, head, body string) {
				if head+body != "" {
					t.Errorf("sent %q", head+body)
				}
			}},
			{"body:10", func(t *testing.T, head, body string) {
				if head+body != "" {
					t.Errorf("sent %q", head+body)
				}
			}},
			{"headers", func(t *testing.T, head, body string) {
				if !strings.HasPrefix(head, "HTTP/1.1 200 ") || body != "" {
					t.Errorf("sent %q and %q", head, body)
				}
			}},
			{"role", lastIs(1, `"role":"assistant"`)},
			{"computed:1", lastIs(1, `"role":"assistant"`)},
			{"computed:3", lastIs(3, "A1·2 ")},
			{"token:1", lastIs(2, "A1·1 ")},
			{"token:4", lastIs(5, "A1·4 ")},
			{"finish", lastIs(6, `"finish_reason":"length"`)},
			{"done", lastIs(7, "data: [DONE]\n\n")},
			{"in-chunk:2:9", func(t *testing.T, head, body string) {
				if got := chunks(body); len(got) != 3 || got[2] != `CUT:data: {"i` {
					t.Errorf("chunks %q", got)
				}
			}},
			{"in-chunk:2:0", func(t *testing.T, head, body string) {
				if got := chunks(body); len(got) != 3 || got[2] != `CUT:` {
					t.Errorf("chunks %q", got)
				}
			}},
			{"in-char:3", func(t *testing.T, head, body string) {
				if got := chunks(body); len(got) != 4 || !strings.HasSuffix(got[3], "A1\xc2") {
					t.Errorf("chunks %q", got)
				}
			}},
		} {
			t.Run(kind+"@"+tt.point, func(t *testing.T) {
				e := start(t, Config{})
				head, body, end := wire(t, e, kind+"@"+tt.point, stream4)
				if end != wantEnd {
					t.Errorf("ended with %s", end)
				}
				tt.check(t, head, body)
				closed := await(t, e, func(en Entry) bool { return en.Event == EventConnClosed })
				fault := await(t, e, func(en Entry) bool { return en.Event == EventFault })
				if fault.Detail != kind+"@"+tt.point || closed.Detail != "fault: "+fault.Detail {
					t.Errorf("fault %q, closed by %q", fault.Detail, closed.Detail)
				}
				if s := e.Snapshot(); s.Running+s.Waiting+s.BlocksUsed != 0 {
					t.Errorf("the model still works: %+v", s)
				}
			})
		}
	}
}

// lastIs checks that the body is n complete HTTP chunks and no more, the last
// of which holds text.
func lastIs(n int, text string) func(*testing.T, string, string) {
	return func(t *testing.T, _, body string) {
		got := chunks(body)
		if len(got) != n || !strings.Contains(got[n-1], text) || !strings.HasSuffix(got[n-1], "\n\n") {
			t.Errorf("chunks %q, want %d and the last with %q", got, n, text)
		}
	}
}

func TestCleanEndInsideAnEvent(t *testing.T) {
	for point, check := range map[string]func(got []string) bool{
		"token:2":      func(got []string) bool { return len(got) == 4 && got[3] == "END" },
		"in-chunk:2:9": func(got []string) bool { return len(got) == 4 && got[2] == `data: {"i` && got[3] == "END" },
		"in-char:2": func(got []string) bool {
			return len(got) == 4 && strings.HasSuffix(got[2], "A1\xc2") && got[3] == "END"
		},
	} {
		e := start(t, Config{})
		c := dial(t, e).post(chatPath, stream4, "X-Sim-Fault: end@"+point)
		c.until("\r\n\r\n")
		body := c.until("0\r\n\r\n")
		if got := chunks(body); !check(got) {
			t.Errorf("end@%s: %q", point, got)
		}
		// The framing was complete, so the connection is good for another.
		c.post(chatPath, whole4)
		if readAll(t, c.response()) == "" {
			t.Error("no second answer")
		}
	}
}

func TestWholeAnswersBreakToo(t *testing.T) {
	for fault, check := range map[string]func(head, body, end string) bool{
		"rst@computed:2": func(head, body, end string) bool { return head+body == "" && end == "RST" },
		"rst@token:4":    func(head, body, end string) bool { return head+body == "" && end == "RST" },
		"rst@headers": func(head, body, end string) bool {
			return strings.Contains(head, "Content-Length: ") && body == "" && end == "RST"
		},
		"rst@in-body:20": func(head, body, end string) bool { return len(body) == 20 && end == "RST" },
		"fin@in-body:20": func(head, body, end string) bool { return len(body) == 20 && end == "FIN" },
		"fin@done":       func(head, body, end string) bool { return gjson.Valid(body) && end == "FIN" },
		"early":          func(head, body, end string) bool { return gjson.Valid(body) && end == "FIN" },
		"shortbody:7": func(head, body, end string) bool {
			return strings.Contains(head, fmt.Sprintf("Content-Length: %d", len(body)+7)) && end == "FIN"
		},
		"garbage": func(head, body, end string) bool { return strings.HasPrefix(head, "\x16\x03\x01") && end == "FIN" },
	} {
		t.Run(fault, func(t *testing.T) {
			if head, body, end := wire(t, start(t, Config{}), fault, whole4); !check(head, body, end) {
				t.Errorf("%q %q %s", head, body, end)
			}
		})
	}
}

// bodies are streams that end on a living connection: the check sees the
// events' data.
func TestStreamVariants(t *testing.T) {
	last := func(data []string) string { return data[len(data)-1] }
	for fault, check := range map[string]func(data []string, raw string) bool{
		"nodone":       func(data []string, raw string) bool { return strings.Contains(last(data), `"finish_reason":"length"`) },
		"nodone:clean": func(data []string, raw string) bool { return !strings.Contains(raw, "[DONE]") },
		"nofinish": func(data []string, raw string) bool {
			return last(data) == "[DONE]" && !strings.Contains(raw, `"finish_reason":"`)
		},
		"empty": func(data []string, raw string) bool { return len(data) == 1 && data[0] == "[DONE]" },
		"error@token:2": func(data []string, raw string) bool {
			return gjson.Get(last(data), "error.code").String() == "engine_error"
		},
		"error@role:number:400": func(data []string, raw string) bool {
			return gjson.Get(last(data), "error.code").Type == gjson.Number && gjson.Get(last(data), "error.code").Int() == 400
		},
		"error@token:1:string": func(data []string, raw string) bool { return gjson.Get(last(data), "error").Type == gjson.String },
		"error@token:1:done":   func(data []string, raw string) bool { return last(data) == "[DONE]" },
		"error@token:1:event":  func(data []string, raw string) bool { return strings.Contains(raw, "event: error\ndata: {\"error\"") },
		"error@token:1:choices": func(data []string, raw string) bool {
			return gjson.Get(last(data), "error").Exists() && gjson.Get(last(data), "choices.0.finish_reason").String() == "error"
		},
		"errornull": func(data []string, raw string) bool {
			return strings.Count(raw, `,"error":null}`) == 6 && last(data) == "[DONE]"
		},
		"comment":  func(data []string, raw string) bool { return strings.Contains(raw, "\nretry: 3000\n\n") },
		"sse:crlf": func(data []string, raw string) bool { return strings.Count(raw, "\r\n\r\n") == 7 },
		"sse:cr":   func(data []string, raw string) bool { return !strings.Contains(raw, "\n") },
		"sse:nospace": func(data []string, raw string) bool {
			return strings.HasPrefix(raw, "data:{") && strings.HasSuffix(raw, "data:[DONE]\n\n")
		},
		"sse:bom":       func(data []string, raw string) bool { return strings.HasPrefix(raw, "\xef\xbb\xbfdata") },
		"sse:event":     func(data []string, raw string) bool { return strings.Count(raw, "event: message\n") == 7 },
		"sse:id":        func(data []string, raw string) bool { return strings.Contains(raw, "id: 7\ndata: [DONE]") },
		"sse:multiline": func(data []string, raw string) bool { return strings.Contains(data[0], ",\n\"object\"") },
		"sse:noeol":     func(data []string, raw string) bool { return strings.HasSuffix(raw, "data: [DONE]") },
		"bytewise":      func(data []string, raw string) bool { return last(data) == "[DONE]" },
		"bigline@token:2:70000": func(data []string, raw string) bool {
			return slices.ContainsFunc(strings.Split(raw, "\n"), func(line string) bool { return len(line) == 70000 })
		},
		"finish:content_filter": func(data []string, raw string) bool { return strings.Contains(raw, `"finish_reason":"content_filter"`) },
		"finish:attached": func(data []string, raw string) bool {
			return gjson.Get(data[4], "choices.0.finish_reason").String() == "length" && len(data) == 6
		},
		"usage:always":  func(data []string, raw string) bool { return gjson.Get(data[6], "usage.completion_tokens").Int() == 4 },
		"usage:choices": func(data []string, raw string) bool { return gjson.Get(data[6], "choices.#").Int() == 1 },
		"usage:final":   func(data []string, raw string) bool { return gjson.Get(data[5], "usage").Exists() && len(data) == 7 },
		"usage:each":    func(data []string, raw string) bool { return gjson.Get(data[2], "usage.completion_tokens").Int() == 2 },
		"usage:wrong":   func(data []string, raw string) bool { return gjson.Get(data[6], "usage.prompt_tokens").Int() == -1 },
		"usage:null":    func(data []string, raw string) bool { return gjson.Get(data[6], "usage").Type == gjson.Null },
		"delta@token:1:reasoning": func(data []string, raw string) bool {
			return gjson.Get(data[1], "choices.0.delta.reasoning_content").String() == "A1·1 "
		},
		"delta@token:1:tool": func(data []string, raw string) bool {
			return gjson.Get(data[1], "choices.0.delta.tool_calls.0.function.name").String() == "odd"
		},
		"delta@token:1:logprobs": func(data []string, raw string) bool {
			return gjson.Get(data[1], "choices.0.logprobs.content.0.token").Exists()
		},
		"delta@token:1:refusal":  func(data []string, raw string) bool { return strings.Contains(data[1], `"refusal"`) },
		"delta@token:1:audio":    func(data []string, raw string) bool { return strings.Contains(data[1], `"audio"`) },
		"delta@token:1:null":     func(data []string, raw string) bool { return strings.Contains(data[1], `"content":null`) },
		"delta@token:1:unknown":  func(data []string, raw string) bool { return strings.Contains(data[1], `"hologram"`) },
		"delta@token:1:empty":    func(data []string, raw string) bool { return strings.Contains(data[1], `"content":""`) },
		"garbage@token:1":        func(data []string, raw string) bool { return strings.Contains(raw, "\xff\xfe\x00garbage") },
		"slow:1ms":               func(data []string, raw string) bool { return said(raw) == four },
		"stall@token:2:5ms":      func(data []string, raw string) bool { return said(raw) == four },
		"stall@in-chunk:2:8:5ms": func(data []string, raw string) bool { return said(raw) == four },
		"stall@in-char:2:5ms":    func(data []string, raw string) bool { return said(raw) == four },
		"stall@finish:30ms:comments": func(data []string, raw string) bool {
			return strings.Contains(raw, ": keep-alive\n\n") && last(data) == "[DONE]"
		},
		"usage:always,stall@usage:5ms": func(data []string, raw string) bool { return last(data) == "[DONE]" },
		"badhead:continue":             func(data []string, raw string) bool { return said(raw) == four },
		"badhead:hints":                func(data []string, raw string) bool { return said(raw) == four },
		"badhead:trailer":              func(data []string, raw string) bool { return said(raw) == four },
	} {
		t.Run(fault, func(t *testing.T) {
			e := start(t, Config{})
			c := dial(t, e).post(chatPath, stream4, "X-Request-Id: req_1", "X-Sim-Fault: "+fault)
			res := c.response()
			for res.StatusCode < 200 {
				res = c.response()
			}
			raw := readAll(t, res)
			if data := events(raw); !check(append(data, "")[:len(data)], raw) {
				t.Errorf("%q", raw)
			}
			c.post(chatPath, whole4)
			if res := c.response(); res.StatusCode != 200 {
				t.Errorf("second answer: %s", res.Status)
			}
		})
	}
}

func TestEndsThatLeaveTheStreamOpenOrCut(t *testing.T) {
	e := start(t, Config{RequestsSeen: 1})
	if _, body, end := wire(t, e, "nodone:fin", stream4); end != "FIN" || strings.Contains(body, "[DONE]") || strings.HasSuffix(body, "0\r\n\r\n") {
		t.Errorf("nodone:fin: %q %s", body, end)
	}
	forget := func() { dial(t, e).post(chatPath, whole4, "X-Request-Id: other").response() }
	forget()
	head, body, end := wire(t, e, "early", stream4)
	if end != "FIN" || strings.Contains(head, "close") || !strings.HasSuffix(body, "0\r\n\r\n") {
		t.Errorf("early: %q %q %s", head, body, end)
	}
	forget()
	head, body, end = wire(t, e, "badhead:close", stream4)
	if end != "FIN" || !strings.Contains(head, "Connection: close") || strings.Contains(head, "chunked") || said(body) != four {
		t.Errorf("badhead:close: %q %q %s", head, body, end)
	}
	c := dial(t, e).post(chatPath, stream4, "X-Request-Id: req_open", "X-Sim-Fault: nodone:open")
	c.until(`"finish_reason":"length"}]}` + "\n\n\r\n")
	await(t, e, func(en Entry) bool { return en.Request == "req_open" && en.Detail == "nodone:open" })
	_ = c.Close()
	await(t, e, On(EventAborted, "req_open"))
}

func TestStatusFaults(t *testing.T) {
	e := start(t, Config{})
	for _, tt := range []struct {
		fault, contentType, retryAfter string
		status                         int
	}{
		{"status@head:503:json:2", "application/json", "2", 503},
		{"status@head:429:html", "text/html", "", 429},
		{"status@head:500:empty", "", "", 500},
		{"status@computed:2:502", "application/json", "", 502},
		{"status@head:307", "application/json", "", 307},
		{"html", "text/html", "", 200},
	} {
		c := dial(t, e).post(chatPath, whole4, "X-Sim-Fault: "+tt.fault)
		res := c.response()
		body := readAll(t, res)
		if res.StatusCode != tt.status || res.Header.Get("Content-Type") != tt.contentType || res.Header.Get("Retry-After") != tt.retryAfter {
			t.Errorf("%s: %s %v %s", tt.fault, res.Status, res.Header, body)
		}
		c.post(chatPath, whole4)
		if res := c.response(); res.StatusCode != 200 {
			t.Errorf("after %s: %s", tt.fault, res.Status)
		}
	}
	// In a non-streaming answer an error event is a status.
	c := dial(t, e).post(chatPath, whole4, "X-Sim-Fault: error@token:2:400")
	if res := c.response(); res.StatusCode != 400 {
		t.Errorf("error in a whole answer: %s", res.Status)
	}
	// An early refusal of an upload that is never finished.
	c = dial(t, e)
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: sim\r\nContent-Length: 1000000\r\nX-Sim-Fault: status@body:5:413\r\n\r\n{\"mod", chatPath)
	if res := c.response(); res.StatusCode != 413 {
		t.Errorf("early refusal: %s", res.Status)
	}
	_ = readAll(t, dial(t, e).post(chatPath, whole4, "X-Sim-Fault: what").response())
}

func TestMalformedHeads(t *testing.T) {
	for how, want := range map[string]string{
		"clte":     "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
		"cl2":      "Content-Length: 3\r\nContent-Length: 4\r\n",
		"negative": "Content-Length: -1\r\n",
		"nocolon":  "\r\nthis line has no colon\r\n",
		"space":    "X-Space : before",
		"nul":      "X-Nul: a\x00b",
		"huge:9":   "X-Huge: hhhhhhhhh\r\n",
		"fold":     "X-Fold: one\r\n two\r\n",
		"te":       "Transfer-Encoding: sim-unknown",
		"version":  "HTTP/9.9 200 OK",
		"status":   "HTTP/1.1 2x0 OK",
		"badchunk": "\r\n\r\nxyz\r\n",
	} {
		e := start(t, Config{})
		c := dial(t, e).post(chatPath, stream4, "Connection: close", "X-Sim-Fault: badhead:"+how)
		if raw, _ := c.rest(); !strings.Contains(raw, want) {
			t.Errorf("%s: %q not in %q", how, want, raw)
		}
	}
	c := dial(t, start(t, Config{})).post(chatPath, stream4, "Connection: close", "X-Sim-Fault: badhead:lf")
	if raw, _ := c.rest(); !strings.HasPrefix(raw, "HTTP/1.1 200 OK\n") {
		t.Errorf("lf: %q", raw)
	}
}

func TestContentTypeAndEncodingFaults(t *testing.T) {
	e := start(t, Config{})
	c := dial(t, e).post(chatPath, stream4, "X-Sim-Fault: wrongtype")
	res := c.response()
	if res.Header.Get("Content-Type") != "application/json" || said(readAll(t, res)) != four {
		t.Errorf("wrongtype: %v", res.Header)
	}
	for _, body := range []string{stream4, whole4} {
		c.post(chatPath, body, "X-Sim-Fault: gzip,stall@in-chunk:2:10:1ms")
		res = c.response()
		packed := readAll(t, res)
		plain, err := gzip.NewReader(strings.NewReader(packed))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(plain)
		if err != nil || res.Header.Get("Content-Encoding") != "gzip" || !bytes.Contains(got, []byte("A1·4 ")) {
			t.Errorf("gzip: %q %v", got, err)
		}
		c.post(chatPath, body, "X-Sim-Fault: gzip:broken")
		res = c.response()
		if got := readAll(t, res); res.Header.Get("Content-Encoding") != "gzip" || !strings.Contains(got, "A1·4 ") {
			t.Errorf("gzip:broken: %q", got)
		}
	}
}

func TestConditionsAndQueue(t *testing.T) {
	e := start(t, Config{Faults: []string{"status@head:503", "attempt=2;status@head:504"}, FaultScripts: 3})
	c := dial(t, e)
	ask := func(request string, attempt int, fault string) int {
		header := []string{fmt.Sprintf("Headgate-Attempt: %d", attempt), "X-Request-Id: " + request}
		if fault != "" {
			header = append(header, "X-Sim-Fault: "+fault)
		}
		c.post(chatPath, whole4, header...)
		res := c.response()
		_ = readAll(t, res)
		return res.StatusCode
	}
	var got []int
	got = append(got, ask("r1", 1, ""), ask("r1", 1, ""), ask("r1", 2, ""), ask("r1", 2, ""))
	got = append(got, ask("r2", 1, "engine=B;status@head:500"), ask("r2", 1, "engine=A;attempt=1;status@head:500"), ask("r2", 2, "attempt=1;status@head:500"))
	got = append(got, ask("r3", 1, "times=2;status@head:500"), ask("r3", 1, "times=2;status@head:500"), ask("r3", 1, "times=2;status@head:500"))
	if want := []int{503, 200, 504, 200, 200, 500, 200, 500, 500, 200}; !slices.Equal(got, want) {
		t.Errorf("statuses %v, want %v", got, want)
	}
	if err := e.Inject("path=/health;times=2;status@head:503:empty", "times=*;status@head:500", "rst"); err != nil {
		t.Fatal(err)
	}
	if err := e.Inject("rst"); err != ErrFaultsFull {
		t.Errorf("a full queue: %v", err)
	}
	for _, want := range []int{503, 503, 200} {
		fmt.Fprintf(c, "GET /health HTTP/1.1\r\nHost: sim\r\n\r\n")
		if res := c.response(); res.StatusCode != want {
			t.Errorf("health: %s, want %d", res.Status, want)
		}
	}
	if ask("r4", 1, "") != 500 || ask("r5", 1, "") != 500 {
		t.Error("times=* was used up")
	}
	e.Reset()
	if ask("r6", 1, "") != 200 || e.FaultsLeft() != 0 {
		t.Error("reset left faults")
	}
}

func TestFaultsWithoutARequest(t *testing.T) {
	e := start(t, Config{})
	if err := e.Inject("refuse", "fin@accept", "stall@accept"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"RST", "FIN"} {
		conn, err := net.Dial("tcp", e.Addr())
		if err != nil {
			// The reset was there before the connect returned.
			if want != "RST" || !errors.Is(err, syscall.ECONNRESET) {
				t.Error(err)
			}
			continue
		}
		c := &client{t: t, Conn: conn, in: bufio.NewReader(conn)}
		if raw, end := c.rest(); raw != "" || end != want {
			t.Errorf("%q then %s, want %s", raw, end, want)
		}
		_ = conn.Close()
	}
	c := dial(t, e).post(chatPath, whole4)
	await(t, e, func(en Entry) bool { return en.Detail == "stall@accept" })
	_ = c.Close()
	await(t, e, func(en Entry) bool { return en.Event == EventConnClosed && en.Conn == 3 })
	for _, en := range e.Log() {
		if en.Event == EventReceived {
			t.Error("a request was read")
		}
	}

	// The listening socket itself: connects are refused by the kernel.
	kept := dial(t, e)
	await(t, e, func(en Entry) bool { return en.Event == EventAccepted && en.Conn == 4 })
	if err := e.Inject("refuse@listen"); err != nil {
		t.Fatal(err)
	}
	if _, err := net.Dial("tcp", e.Addr()); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("dial: %v", err)
	}
	if kept.post(chatPath, whole4).response().StatusCode != 200 {
		t.Error("an open connection suffers")
	}
	if err := e.Relisten(); err != nil {
		t.Fatal(err)
	}
	if dial(t, e).post(chatPath, whole4).response().StatusCode != 200 {
		t.Error("listening again, and no answer")
	}
	last := e.Log()
	if err := e.Inject("refuse@listen:1ms"); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if _, err := e.AwaitSince(ctx, last[len(last)-1].Seq, On(EventListening, "")); err != nil {
		t.Fatal(err)
	}
	_ = dial(t, e)
}

// At every point where it may, a stall keeps the engine exactly there, its slot
// in use, until the client leaves.
func TestStallHoldsTheSlotUntilTheClientLeaves(t *testing.T) {
	for point, tokens := range map[string]int{
		"body:20": 0, "head": 0, "headers": 0, "role": 0, "computed:1": 1, "token:2": 2, "in-chunk:3:5": 3, "in-char:2": 2,
	} {
		t.Run(point, func(t *testing.T) {
			e := start(t, Config{})
			c := dial(t, e).post(chatPath, strings.Replace(stream4, `"max_tokens":4`, `"max_tokens":400`, 1), "X-Request-Id: req_1", "X-Sim-Fault: stall@"+point)
			await(t, e, On(EventFault, "req_1"))
			busy := 1
			if point == "head" || point == "body:20" {
				busy = 0 // the model has not got the request yet
			}
			if s := e.Snapshot(); s.Running+s.Waiting != busy {
				t.Errorf("running %d, waiting %d", s.Running, s.Waiting)
			}
			_ = c.Close()
			if aborted := await(t, e, On(EventAborted, "req_1")); aborted.N != tokens {
				t.Errorf("aborted at token %d, want %d", aborted.N, tokens)
			}
			if s := e.Snapshot(); s.Running+s.Waiting+s.BlocksUsed != 0 || s.Cancelled != uint64(busy) {
				t.Errorf("after: %+v", s)
			}
		})
	}
}

func TestSlowWaitsAtEachToken(t *testing.T) {
	e := start(t, Config{})
	began := time.Now()
	res := dial(t, e).post(chatPath, stream4, "X-Sim-Fault: slow:20ms").response()
	if said(readAll(t, res)) != four || time.Since(began) < 80*time.Millisecond {
		t.Errorf("four tokens took %v", time.Since(began))
	}
}

// Whatever happens to a request, its end is in the log, once.
func TestEveryRequestHasOneEnd(t *testing.T) {
	for fault, want := range map[string]string{
		"": EventFinished, "early": EventFinished, "nodone": EventFinished, "status@head:503": EventRefused,
		"rst@head": EventCut, "rst@body:9": EventCut, "fin@token:2": EventCut, "end@token:2": EventCut,
		"error@token:1": EventCut, "exit@token:1": EventCut, "rst@done": EventCut, "empty": EventCut,
	} {
		e := start(t, Config{})
		c := dial(t, e).post(chatPath, stream4, "Connection: close", "X-Request-Id: req_1", "X-Sim-Fault: "+fault)
		_, _ = c.rest()
		_ = c.Close()
		await(t, e, On(EventConnClosed, ""))
		var ends []string
		for _, en := range e.Log() {
			switch en.Event {
			case EventFinished, EventAborted, EventCut, EventRefused:
				ends = append(ends, en.Event)
			}
		}
		if !slices.Equal(ends, []string{want}) {
			t.Errorf("%q ended as %v, want %s", fault, ends, want)
		}
	}
}

// Every kind at every point it may have, streamed and not: it strikes in at
// least one of the two, is logged once where it does, the answer comes to an
// end, and the request has one end in the log.
func TestEveryKindAtEveryPoint(t *testing.T) {
	args := map[string]string{"stall": ":1ms", "bigline": ":500", "delta": ":tool", "status": ":503"}
	numbers := map[string]string{"body": ":9", "computed": ":2", "token": ":2", "in-chunk": ":2:9", "in-char": ":2", "in-body": ":9"}
	for kind, rule := range kindRules {
		for _, point := range rule.points {
			if point == "accept" || point == "listen" {
				continue // shown by TestFaultsWithoutARequest
			}
			fault := kind + "@" + point + numbers[point] + args[kind]
			t.Run(fault, func(t *testing.T) {
				struck := 0
				for _, body := range []string{stream4, whole4} {
					e := start(t, Config{Tool: func(context.Context, ToolCall) error { return nil }})
					c := dial(t, e).post(chatPath, body, "Connection: close", "X-Request-Id: req_1", "X-Sim-Fault: usage:always,"+fault)
					_, _ = c.rest()
					_ = c.Close()
					await(t, e, On(EventConnClosed, ""))
					ends, here := 0, 0
					for _, en := range e.Log() {
						switch en.Event {
						case EventFinished, EventAborted, EventCut, EventRefused:
							ends++
						case EventFault:
							if en.Detail == fault {
								here++
							}
						}
					}
					if ends != 1 || here > 1 {
						t.Errorf("%d ends, struck %d times", ends, here)
					}
					if s := e.Snapshot(); s.Running+s.Waiting+s.BlocksUsed != 0 {
						t.Errorf("the model still works: %+v", s)
					}
					struck += here
				}
				if struck == 0 {
					t.Error("it never strikes")
				}
			})
		}
	}
}
