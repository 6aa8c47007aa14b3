// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of a test that would otherwise hang.
const patience = time.Minute

func start(t *testing.T, cfg Config) *Engine {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = "A"
	}
	e, err := Listen(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// await waits for an entry of the log.
func await(t *testing.T, e *Engine, match func(Entry) bool) Entry {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	entry, err := e.Await(ctx, match)
	if err != nil {
		for _, entry := range e.Log() {
			t.Logf("%d conn %d %s %s n=%d %s", entry.Seq, entry.Conn, entry.Request, entry.Event, entry.N, entry.Detail)
		}
		t.Fatal("the awaited entry did not come: ", err)
	}
	return entry
}

// client is a raw connection: bytes in, bytes out.
type client struct {
	t *testing.T
	net.Conn
	in *bufio.Reader
}

func dial(t *testing.T, e *Engine) *client {
	t.Helper()
	conn, err := net.Dial("tcp", e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(patience))
	return &client{t: t, Conn: conn, in: bufio.NewReader(conn)}
}

const (
	chatPath = "/v1/chat/completions"
	stream4  = `{"model":"sim","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"hello"}]}`
	whole4   = `{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"hello"}]}`
)

func (c *client) post(path, body string, header ...string) *client {
	c.t.Helper()
	head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: sim\r\nContent-Length: %d\r\n", path, len(body))
	for _, line := range header {
		head += line + "\r\n"
	}
	if _, err := io.WriteString(c, head+"\r\n"+body); err != nil {
		c.t.Logf("post: %v", err) // a fault may have cut the upload
	}
	return c
}

// rest reads what comes until the connection ends: "FIN" or "RST".
func (c *client) rest() (raw, end string) {
	c.t.Helper()
	got, err := io.ReadAll(c.in)
	switch {
	case err == nil:
		return string(got), "FIN"
	case errors.Is(err, syscall.ECONNRESET):
		return string(got), "RST"
	}
	c.t.Fatalf("after %q: %v", got, err)
	return
}

// until reads up to and including mark.
func (c *client) until(mark string) string {
	c.t.Helper()
	var got strings.Builder
	for !strings.HasSuffix(got.String(), mark) {
		b, err := c.in.ReadByte()
		if err != nil {
			c.t.Fatalf("no %q in %q: %v", mark, got.String(), err)
		}
		got.WriteByte(b)
	}
	return got.String()
}

func (c *client) response() *http.Response {
	c.t.Helper()
	res, err := http.ReadResponse(c.in, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	return res
}

func readAll(t *testing.T, res *http.Response) string {
	t.Helper()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("after %q: %v", body, err)
	}
	return string(body)
}

// get sends a GET on a connection of its own.
func get(t *testing.T, e *Engine, path string) string {
	t.Helper()
	c := dial(t, e)
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: sim\r\n\r\n", path)
	defer c.Close()
	res := c.response()
	if res.StatusCode != 200 {
		t.Errorf("GET %s: %s", path, res.Status)
	}
	return readAll(t, res)
}

// events is a plain parser of server-sent events: data of each, in order.
func events(body string) (data []string) {
	body = strings.TrimPrefix(body, "\ufeff")
	body = strings.ReplaceAll(strings.ReplaceAll(body, "\r\n", "\n"), "\r", "\n")
	var lines []string
	for line := range strings.SplitSeq(body, "\n") {
		switch {
		case line == "":
			if joined := strings.Join(lines, "\n"); joined != "" {
				data = append(data, joined)
			}
			lines = nil
		case strings.HasPrefix(line, "data:"):
			lines = append(lines, strings.TrimPrefix(strings.TrimPrefix(line, "data:"), " "))
		}
	}
	return data
}

// said is the text of a streamed answer, all choices mixed.
func said(body string) string {
	var text strings.Builder
	for _, data := range events(body) {
		gjson.Get(data, "choices").ForEach(func(_, c gjson.Result) bool {
			text.WriteString(c.Get("delta.content").String() + c.Get("text").String())
			return true
		})
	}
	return text.String()
}

const four = "A1·1 A1·2 A1·3 A1·4 "

func TestStreamIsHeadRoleTokensFinishDone(t *testing.T) {
	e := start(t, Config{})
	c := dial(t, e).post(chatPath, stream4, "X-Request-Id: req_1")
	res := c.response()
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" || res.ContentLength != -1 {
		t.Errorf("head %v", res)
	}
	body := readAll(t, res)
	if got := said(body); got != four {
		t.Errorf("said %q", got)
	}
	data := events(body)
	if len(data) != 1+4+1+1 || data[6] != "[DONE]" {
		t.Fatalf("events:\n%s", strings.Join(data, "\n"))
	}
	if gjson.Get(data[0], "choices.0.delta.role").String() != "assistant" ||
		gjson.Get(data[5], "choices.0.finish_reason").String() != "length" {
		t.Errorf("first %s\nlast %s", data[0], data[5])
	}
	for _, d := range data[:6] {
		if !gjson.Valid(d) || gjson.Get(d, "id").String() != "chatcmpl-A1-req_1" || gjson.Get(d, "usage").Exists() {
			t.Errorf("event %s", d)
		}
	}
	if finished := await(t, e, On(EventFinished, "req_1")); finished.N != 4 {
		t.Errorf("finished with %d tokens", finished.N)
	}
	// The connection lives on.
	c.post(chatPath, whole4, "X-Request-Id: req_2")
	if text := gjson.Get(readAll(t, c.response()), "choices.0.message.content").String(); text != four {
		t.Errorf("second answer %q", text)
	}
	if second := await(t, e, On(EventReceived, "req_2")); second.Conn != 1 {
		t.Errorf("on connection %d", second.Conn)
	}
}

func TestAnswersOfEveryShape(t *testing.T) {
	const (
		chat        = "/v1/chat/completions"
		completions = "/v1/completions"
	)
	for _, tt := range []struct {
		name, path, body string
		want             map[string]string // gjson path → value, of the whole answer
	}{
		{"default length", chat, `{"messages":[{"role":"user","content":"x"}]}`, map[string]string{
			"usage.completion_tokens": "16", "choices.0.finish_reason": "stop", "object": "chat.completion", "model": "sim"}},
		{"n", chat, `{"n":2,"max_tokens":2,"messages":[{"role":"user","content":"x"}]}`, map[string]string{
			"choices.#": "2", "choices.1.message.content": "A1/1·1 A1/1·2 ", "choices.1.index": "1", "usage.completion_tokens": "4"}},
		{"logprobs", chat, `{"logprobs":true,"max_tokens":2,"messages":[{"role":"user","content":"x"}]}`, map[string]string{
			"choices.0.logprobs.content.1.token": "A1·2 "}},
		{"tool", chat, `{"max_tokens":3,"tools":[{"type":"function","function":{"name":"pay"}}],"messages":[{"role":"user","content":"please call:pay now"}]}`, map[string]string{
			"choices.0.message.tool_calls.0.function.name":      "pay",
			"choices.0.message.tool_calls.0.function.arguments": `{"t":"A1·1 A1·2 A1·3 "}`,
			"choices.0.finish_reason":                           "tool_calls"}},
		{"max_completion_tokens", chat, `{"max_completion_tokens":1,"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]}`, map[string]string{
			"choices.0.message.content": "A1·1 "}},
		{"text prompt", completions, `{"prompt":"one two three","max_tokens":1}`, map[string]string{
			"object": "text_completion", "choices.0.text": "A1·1 ", "usage.prompt_tokens": "3"}},
		{"text prompts", completions, `{"prompt":["one two","three"],"max_tokens":1}`, map[string]string{
			"choices.#": "2", "choices.1.text": "A1/1·1 ", "usage.prompt_tokens": "3"}},
		{"token ids", completions, `{"prompt":[1,2,3,4],"max_tokens":1}`, map[string]string{
			"choices.#": "1", "usage.prompt_tokens": "4"}},
		{"lists of token ids", completions, `{"prompt":[[1,2],[3]],"n":2,"max_tokens":1}`, map[string]string{
			"choices.#": "4", "usage.prompt_tokens": "3", "usage.completion_tokens": "4"}},
		{"completions logprobs", completions, `{"prompt":"x","logprobs":1,"max_tokens":2}`, map[string]string{
			"choices.0.logprobs.text_offset": "[0,5]"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := start(t, Config{})
			c := dial(t, e).post(tt.path, tt.body)
			whole := readAll(t, c.response())
			if !gjson.Valid(whole) {
				t.Fatalf("not JSON: %s", whole)
			}
			for path, want := range tt.want {
				if got := gjson.Get(whole, path).String(); got != want {
					t.Errorf("%s is %q, want %q in %s", path, got, want, whole)
				}
			}
			// The same asked as a stream says the same.
			c.post(tt.path, `{"stream":true,"stream_options":{"include_usage":true},`+tt.body[1:])
			data := events(readAll(t, c.response()))
			joined := map[int64]string{}
			for _, d := range data[:len(data)-1] {
				gjson.Get(d, "choices").ForEach(func(_, ch gjson.Result) bool {
					joined[ch.Get("index").Int()] += ch.Get("delta.content").String() + ch.Get("text").String() +
						ch.Get("delta.tool_calls.0.function.arguments").String()
					return true
				})
			}
			gjson.Get(whole, "choices").ForEach(func(i, ch gjson.Result) bool {
				want := ch.Get("message.content").String() + ch.Get("text").String() + ch.Get("message.tool_calls.0.function.arguments").String()
				if got := joined[i.Int()]; got != want {
					t.Errorf("choice %v streams %q, whole %q", i, got, want)
				}
				return true
			})
			usage := data[len(data)-2]
			for _, field := range []string{"usage.prompt_tokens", "usage.completion_tokens", "usage.total_tokens"} {
				if gjson.Get(usage, field).Int() != gjson.Get(whole, field).Int() || gjson.Get(usage, "choices.#").Int() != 0 {
					t.Errorf("usage chunk %s, whole %s", usage, gjson.Get(whole, "usage"))
				}
			}
		})
	}
}

func TestBadRequestsAreRefused(t *testing.T) {
	e := start(t, Config{BodyBytes: 1000})
	for _, tt := range []struct {
		path, body string
		status     int
	}{
		{chatPath, `{"messages":`, 400},
		{chatPath, `[]`, 400},
		{chatPath, `{"messages":[]}`, 400},
		{chatPath, `{"messages":"x"}`, 400},
		{chatPath, `{"model":"other","messages":[{"role":"user","content":"x"}]}`, 404},
		{chatPath, `{"max_tokens":0,"messages":[{"role":"user","content":"x"}]}`, 400},
		{chatPath, `{"n":1000,"messages":[{"role":"user","content":"x"}]}`, 400},
		{"/v1/completions", `{}`, 400},
		{"/v1/completions", `{"prompt":[]}`, 400},
		{"/nowhere", `{}`, 404},
		{chatPath, strings.Repeat("x", 1001), 413},
	} {
		res := dial(t, e).post(tt.path, tt.body).response()
		if body := readAll(t, res); res.StatusCode != tt.status || gjson.Get(body, "error.message").String() == "" {
			t.Errorf("%s %.80s: %s %s", tt.path, tt.body, res.Status, body)
		}
	}
	c := dial(t, e)
	fmt.Fprintf(c, "no HTTP at all\r\n\r\n")
	if raw, end := c.rest(); !strings.HasPrefix(raw, "HTTP/1.1 400 ") || end != "FIN" {
		t.Errorf("%q then %s", raw, end)
	}
	c = dial(t, e)
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nX: %s\r\n\r\n", strings.Repeat("x", 2<<20))
	if raw, _ := c.rest(); !strings.HasPrefix(raw, "HTTP/1.1 400 ") {
		t.Errorf("a head of 2 MiB: %q", raw)
	}
}

func TestReceivedIsLoggedAsItCame(t *testing.T) {
	e := start(t, Config{})
	c := dial(t, e).post(chatPath, whole4, "X-Request-Id: req_1", "Headgate-Attempt: 3", "Authorization: Bearer secret", "Idempotency-Key: k", "X-Other: 1")
	if text := gjson.Get(readAll(t, c.response()), "choices.0.message.content").String(); !strings.HasPrefix(text, "A3·1 ") {
		t.Errorf("said %q", text)
	}
	got := await(t, e, On(EventReceived, "req_1"))
	if got.Attempt != 3 || got.Seen != 1 || got.Header.Get("Authorization") != "Bearer secret" || got.Header.Get("Host") != "sim" {
		t.Errorf("entry %+v", got)
	}
	if want := "[Authorization Idempotency-Key]"; fmt.Sprint(got.Flagged) != want {
		t.Errorf("flagged %v, want %s", got.Flagged, want)
	}
	if body := await(t, e, On(EventBody, "req_1")); body.SHA256 != fmt.Sprintf("%x", sha256.Sum256([]byte(whole4))) || body.N != len(whole4) {
		t.Errorf("body %+v", body)
	}
	// Without the header, attempts are counted by request id.
	c.post(chatPath, whole4, "X-Request-Id: req_1")
	if text := gjson.Get(readAll(t, c.response()), "choices.0.message.content").String(); !strings.HasPrefix(text, "A2·1 ") {
		t.Errorf("said %q", text)
	}
}

func TestModelsHealthVersionMetrics(t *testing.T) {
	e := start(t, Config{Models: []string{"m1", "m/2"}, Adapters: []string{"ad"}})
	if ids := gjson.Get(get(t, e, "/v1/models"), "data.#.id").String(); ids != `["m1","m/2","ad"]` {
		t.Errorf("models %s", ids)
	}
	if get(t, e, "/health") != "" || !gjson.Valid(get(t, e, "/version")) {
		t.Error("health or version")
	}
	c := dial(t, e).post(chatPath, `{"model":"ad","max_tokens":2,"messages":[{"role":"user","content":"x"}]}`)
	_ = readAll(t, c.response())
	page := get(t, e, "/metrics")
	for _, line := range []string{
		`vllm:num_requests_running{engine="0",model_name="m1"} 0.0`,
		`vllm:num_requests_waiting{engine="0",model_name="m1"} 0.0`,
		`vllm:kv_cache_usage_perc{engine="0",model_name="m1"} 0.0`,
		`vllm:prefix_cache_queries_total{engine="0",model_name="m1"} 3.0`,
		`vllm:prefix_cache_hits_total{engine="0",model_name="m1"} 0.0`,
		`vllm:prompt_tokens_total{engine="0",model_name="m1"} 3.0`,
		`vllm:generation_tokens_total{engine="0",model_name="m1"} 2.0`,
		`vllm:num_preemptions_total{engine="0",model_name="m1"} 0.0`,
		`vllm:request_success_total{engine="0",model_name="m1",finished_reason="length"} 1.0`,
		`vllm:time_to_first_token_seconds_count{engine="0",model_name="m1"} 1.0`,
		`vllm:inter_token_latency_seconds_count{engine="0",model_name="m1"} 1.0`,
		`vllm:e2e_request_latency_seconds_count{engine="0",model_name="m1"} 1.0`,
		`vllm:request_queue_time_seconds_count{engine="0",model_name="m1"} 1.0`,
		`num_gpu_blocks="65536"} 1.0`,
		`vllm:lora_requests_info{max_lora="8",running_lora_adapters="",waiting_lora_adapters=""} `,
		"\nprocess_start_time_seconds ",
	} {
		if !strings.Contains(page, line) {
			t.Errorf("no %s in\n%s", line, page)
		}
	}
}

func TestMetricsFreeze(t *testing.T) {
	e := start(t, Config{})
	e.FreezeMetrics()
	before := get(t, e, "/metrics")
	c := dial(t, e).post(chatPath, whole4)
	_ = readAll(t, c.response())
	if page := get(t, e, "/metrics"); page != before || e.Snapshot().GenerationTokens == 0 {
		t.Errorf("the page changed:\n%s", page)
	}
	e.Reset()
	if page := get(t, e, "/metrics"); page == before {
		t.Error("the page is still the old one")
	}
}

func TestCachedTokensAreReported(t *testing.T) {
	e := start(t, Config{})
	long := strings.Repeat("word ", 100)
	ask := func(messages string) gjson.Result {
		c := dial(t, e).post(chatPath, `{"max_tokens":20,"messages":[`+messages+`]}`)
		defer c.Close()
		return gjson.Parse(readAll(t, c.response()))
	}
	first := `{"role":"user","content":"` + long + `"}`
	one := ask(first)
	if got := one.Get("usage.prompt_tokens_details.cached_tokens").Int(); got != 0 {
		t.Errorf("first: %d cached", got)
	}
	// The next turn quotes the answer: the answer's blocks are hit too. 102
	// prompt and 20 answer tokens, of which 121 are computed, fill 7 blocks.
	two := ask(first + `,{"role":"assistant","content":"` + one.Get("choices.0.message.content").String() + `"},{"role":"user","content":"more"}`)
	if got := two.Get("usage.prompt_tokens_details.cached_tokens").Int(); got != 112 {
		t.Errorf("second turn: %d cached of %d, want 112", got, two.Get("usage.prompt_tokens").Int())
	}
}

func TestLogIsJSONLines(t *testing.T) {
	var b bytes.Buffer
	e := start(t, Config{Log: &b})
	c := dial(t, e).post(chatPath, whole4)
	_ = readAll(t, c.response())
	e.Close()
	for line := range strings.SplitSeq(strings.TrimSpace(b.String()), "\n") {
		if !gjson.Valid(line) || gjson.Get(line, "engine").String() != "A" || gjson.Get(line, "incarnation").Int() != 1 {
			t.Errorf("log line %s", line)
		}
	}
}
