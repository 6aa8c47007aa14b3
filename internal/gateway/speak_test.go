// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/simengine"
)

// A surface is one client API as a test needs to know it.
type surface struct {
	path          string
	stream, whole string // requests for four tokens
	end           string // how the last event of a complete stream begins
	kept          string // what no answer may have twice
}

var surfaces = []surface{
	{
		chatPath, streamBody, wholeBody, "data: [DONE]", `"role":"assistant"`,
	},
	{
		"/v1/responses",
		`{"model":"sim","stream":true,"max_output_tokens":4,"input":"hi"}`,
		`{"model":"sim","max_output_tokens":4,"input":"hi"}`,
		"event: response.incomplete\n", "event: response.created",
	},
	{
		"/v1/messages",
		`{"model":"sim","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`,
		`{"model":"sim","max_tokens":4,"messages":[{"role":"user","content":"hi"}]}`,
		"event: message_stop\n", "event: message_start",
	},
}

// ended reports whether a stream has its last event.
func (s surface) ended(body string) bool {
	body, whole := strings.CutSuffix(body, "\n\n")
	return whole && strings.HasPrefix(body[strings.LastIndex(body, "\n\n")+1:], "\n"+s.end)
}

func (r *rig) speak(s surface, fault string) reply {
	return r.post(s.path, s.stream, "X-Sim-Fault", fault)
}

func TestEverySurfaceRelaysItsStream(t *testing.T) {
	for _, s := range surfaces {
		t.Run(s.path, func(t *testing.T) {
			r := newRig(t, 1, "")
			got := r.speak(s, "")
			if got.status != 200 || got.err != nil || !s.ended(got.body) || !strings.Contains(got.body, "A1·4 ") {
				t.Fatalf("%+v", got)
			}
			if outcome := r.records.wait(t); outcome != "completed" {
				t.Errorf("outcome %q", outcome)
			}
			direct, err := http.Post(r.engines[0].URL()+s.path, "application/json", strings.NewReader(s.stream))
			if err != nil {
				t.Fatal(err)
			}
			defer direct.Body.Close()
			want, err := io.ReadAll(direct.Body)
			if err != nil {
				t.Fatal(err)
			}
			if scrub(got.body) != scrub(string(want)) {
				t.Errorf("%s\nthe engine's own answer is\n%s", got.body, want)
			}
			r.idle()
		})
	}
}

// scrub takes out what differs between two answers of one engine.
func scrub(text string) string {
	var kept []string
	for part := range strings.SplitSeq(text, `"`) {
		switch {
		case strings.Contains(part, "-A1-"), strings.HasPrefix(part, ":17"), strings.Contains(part, "cached_tokens"):
		default:
			kept = append(kept, part)
		}
	}
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, strings.Join(kept, `"`))
}

// RTY-3: nothing of a first attempt reaches the client, not even its preamble.
func TestEverySurfaceIsRetriedBeforeOutput(t *testing.T) {
	for _, s := range surfaces {
		t.Run(s.path, func(t *testing.T) {
			r := newRig(t, 2, "")
			for _, fault := range []string{
				"attempt=1;rst@head", "attempt=1;rst@headers", "attempt=1;fin@role", "attempt=1;rst@role", "attempt=1;end@role",
				"attempt=1;fin@in-chunk:1:20", "attempt=1;status@head:500", "attempt=1;html@head", "attempt=1;error@computed:1",
			} {
				got := r.speak(s, fault)
				if got.status != 200 || got.err != nil || !s.ended(got.body) {
					t.Errorf("%s: %+v", fault, got)
				}
				if strings.Count(got.body, s.kept) > 1 || !strings.Contains(got.body, "2·1 ") || strings.Contains(got.body, "1·1 ") {
					t.Errorf("%s: two attempts in one answer: %s", fault, got.body)
				}
				if outcome := r.records.wait(t); outcome != "completed" {
					t.Errorf("%s: outcome %q", fault, outcome)
				}
			}
			r.idle()
		})
	}
}

// STR-1, STR-6: after output there is exactly one failure signal, in the API's
// own form, no sign of success, and no second attempt.
func TestEverySurfaceEndsInItsOwnErrorAfterOutput(t *testing.T) {
	for _, s := range surfaces {
		t.Run(s.path, func(t *testing.T) {
			r := newRig(t, 2, "")
			for _, fault := range []string{"rst@token:2", "fin@token:2", "end@token:2", "error@token:2", "rst@in-chunk:3:30", "garbage@token:2", "end@token:4"} {
				before := r.totalReceived()
				got := r.speak(s, fault)
				if got.err != nil || got.status != 200 || s.ended(got.body) {
					t.Errorf("%s: %+v", fault, got)
				}
				for _, success := range []string{"[DONE]", "response.completed", "response.incomplete", "message_stop", `"finish_reason":"`} {
					if strings.Contains(got.body, success) {
						t.Errorf("%s: %s in %s", fault, success, got.body)
					}
				}
				if n := strings.Count(got.body, "upstream_decode_interrupted"); n == 0 || n > 2 || got.code() == "" {
					t.Errorf("%s: %s", fault, got.body)
				}
				checkErrorEvent(t, s, got.body)
				if outcome := r.records.wait(t); outcome != "interrupted upstream_decode_interrupted" {
					t.Errorf("%s: outcome %q", fault, outcome)
				}
				if n := r.totalReceived() - before; n != 1 {
					t.Errorf("%s: %d engines got the request", fault, n)
				}
			}
			r.idle()
		})
	}
}

// checkErrorEvent reads the last event of a stream as its API's client would.
func checkErrorEvent(t *testing.T, s surface, body string) {
	t.Helper()
	events := strings.Split(strings.TrimSuffix(body, "\n\n"), "\n\n")
	last := events[len(events)-1]
	data, ok := strings.CutPrefix(last, "data: ")
	if s.path != chatPath {
		data, ok = strings.CutPrefix(last, "event: error\ndata: ")
	}
	var e struct {
		Type  string
		Error struct {
			Code      string
			RequestID string `json:"request_id"`
			Partial   bool   `json:"partial_output"`
			Tokens    int    `json:"delivered_output_tokens"`
		}
	}
	if err := json.Unmarshal([]byte(data), &e); !ok || err != nil {
		t.Errorf("%v: %s", err, last)
		return
	}
	if wantType := map[bool]string{true: "", false: "error"}[s.path == chatPath]; e.Type != wantType ||
		e.Error.Code != "upstream_decode_interrupted" || !strings.HasPrefix(e.Error.RequestID, "req_") || !e.Error.Partial || e.Error.Tokens < 1 {
		t.Errorf("%+v: %s", e, last)
	}
}

// STR-5: an answer that is whole and lacks its end marker gets it; a Responses
// stream has none that Headgate could write.
func TestMissingEnd(t *testing.T) {
	for _, s := range surfaces {
		for _, how := range []string{"clean", "fin", "open"} {
			t.Run(s.path+" "+how, func(t *testing.T) {
				r := newRig(t, 1, "timeouts: {after_finish: 100ms, idle: 300ms}")
				got := r.speak(s, "nodone:"+how)
				outcome := r.records.wait(t)
				if s.path == "/v1/responses" {
					if outcome != "interrupted upstream_decode_interrupted" || got.code() == "" {
						t.Errorf("%s: %s", outcome, got.body)
					}
				} else if outcome != "completed" || !s.ended(got.body) || got.err != nil {
					t.Errorf("%s: %+v", outcome, got)
				}
				r.idle()
			})
		}
	}
}

// STR-4: only an end marker is no answer.
func TestOnlyAnEndIsRetried(t *testing.T) {
	for _, s := range surfaces {
		if s.path == "/v1/responses" {
			continue // its last event holds the answer
		}
		r := newRig(t, 2, "")
		got := r.speak(s, "attempt=1;empty")
		if got.status != 200 || !strings.Contains(got.body, "2·1 ") || r.records.wait(t) != "completed" {
			t.Errorf("%s: %+v", s.path, got)
		}
	}
}

func TestWholeAnswersOfEverySurface(t *testing.T) {
	for _, s := range surfaces {
		t.Run(s.path, func(t *testing.T) {
			r := newRig(t, 2, "")
			for _, fault := range []string{"", "attempt=1;rst@headers", "attempt=1;fin@in-body:30", "attempt=1;shortbody", "attempt=1;status@head:503", "gzip", "bytewise"} {
				got := r.post(s.path, s.whole, "X-Sim-Fault", fault)
				if got.status != 200 || got.err != nil || !json.Valid([]byte(got.body)) || !strings.Contains(got.body, "·4 ") {
					t.Errorf("%s: %+v", fault, got)
				}
				if outcome := r.records.wait(t); outcome != "completed" {
					t.Errorf("%s: outcome %q", fault, outcome)
				}
			}
			got := r.post(s.path, s.whole, "X-Sim-Fault", "status@head:422")
			if got.status != 422 || !strings.Contains(got.body, "simulated status 422") {
				t.Errorf("an engine's refusal: %+v", got)
			}
			r.records.wait(t)
			r.idle()
		})
	}
}

// SSE-1, SSE-2, SSE-5: whatever the framing, the bytes are the engine's.
func TestEverySurfaceSurvivesOddFraming(t *testing.T) {
	for _, s := range surfaces {
		r := newRig(t, 1, "")
		for _, fault := range []string{"bytewise", "comment", "sse:crlf", "sse:nospace", "sse:bom", "gzip", "wrongtype", "early"} {
			got := r.speak(s, fault)
			outcome := r.records.wait(t)
			if got.err != nil || outcome != "completed" || !strings.Contains(got.body, "A1·4 ") || strings.Contains(got.body, "\uFFFD") {
				t.Errorf("%s %s: %s, %+v", s.path, fault, outcome, got)
			}
		}
	}
}

// PAY-6, PAY-8, PAY-12: a rewrite changes the model's name and nothing else, and
// answers show the client's, streamed or not.
func TestModelIsRewrittenOnEverySurface(t *testing.T) {
	const odd = `"seed":9007199254740993,"x":1e400,"y":"<>&\ud83d\ude00","chat_template_kwargs":{"a":null}`
	for _, tt := range []struct{ path, body string }{
		{chatPath, `{"model":"public", "messages":[{"role":"user","content":"hi"}],` + odd + `}`},
		{"/v1/completions", `{"model":"public", "prompt":[1,2,3],` + odd + `}`},
		{"/v1/responses", `{"model":"public", "input":"hi",` + odd + `}`},
		{"/v1/messages", `{"model":"public", "messages":[{"role":"user","content":"hi"}],` + odd + `}`},
		{"/v1/embeddings", `{"model":"public", "input":"hi",` + odd + `}`},
		{"/v1/rerank", `{"model":"public", "query":"hi","documents":["a"],` + odd + `}`},
		{"/v1/score", `{"model":"public", "text_1":"hi","text_2":"a",` + odd + `}`},
		{"/tokenize", `{"model":"public", "prompt":"hi",` + odd + `}`},
		{"/detokenize", `{"model":"public", "tokens":[1],` + odd + `}`},
		{"/v1/messages/count_tokens", `{"model":"public", "messages":[],` + odd + `}`},
	} {
		t.Run(tt.path, func(t *testing.T) {
			r := newAliased(t)
			got := r.post(tt.path, tt.body)
			want := sha256.Sum256([]byte(strings.Replace(tt.body, "public", "org/base:7b", 1)))
			if got.status != 200 || r.bodySum() != hex.EncodeToString(want[:]) {
				t.Errorf("%+v", got)
			}
			if strings.Contains(got.body, "org/base") || strings.Contains(got.body, `"model"`) && !strings.Contains(got.body, `"public"`) {
				t.Errorf("the answer names another model: %s", got.body)
			}
		})
	}
	for _, s := range surfaces {
		r := newAliased(t)
		for _, fault := range []string{"", "bytewise"} {
			got := r.post(s.path, strings.Replace(s.stream, "sim", "public", 1), "X-Sim-Fault", fault)
			if got.status != 200 || strings.Contains(got.body, "org/base") || !strings.Contains(got.body, `"model":"public"`) || !s.ended(got.body) {
				t.Errorf("%s: %+v", s.path, got)
			}
		}
	}
}

// newAliased is a rig whose engine has a model of another name than clients use.
func newAliased(t *testing.T) *rig {
	t.Helper()
	r, urls := newEngines(t, 1, func(_ int, c *simengine.Config) { c.Models = []string{"org/base:7b"} })
	r.startYAML("listeners: [{name: main, debug_headers: true}]\nroutes:\n  - match: {model: public}\n    backends: [{pool: p}]\n    rewrite: {model: \"org/base:7b\"}\n" +
		"pools:\n  p:\n    discovery: {static: [{url: \"" + urls[0] + "\"}]}\n")
	return r
}

// bodySum is the SHA-256 of the last body that the first engine got.
func (r *rig) bodySum() (sum string) {
	for _, e := range r.engines[0].Log() {
		if e.Event == simengine.EventBody && e.Request != "" {
			sum = e.SHA256
		}
	}
	return sum
}

// The same for a form, of which the file may be anything.
func TestModelIsRewrittenInForms(t *testing.T) {
	form := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"public.wav\"\r\n\r\npublic \x00\xff\r\n--\r\n" +
		"\r\n--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\npublic\r\n--b--\r\n"
	for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		r := newAliased(t)
		got := r.post(path, form, "Content-Type", "multipart/form-data; boundary=b")
		if route := got.header.Get("Headgate-Route"); !strings.HasPrefix(route, "pool=p model=org/base:7b ") {
			t.Errorf("%s: route %q", path, route)
		}
		at := strings.LastIndex(form, "public")
		want := sha256.Sum256([]byte(form[:at] + "org/base:7b" + form[at+len("public"):]))
		if got.status != 200 || got.body != `{"text":"A1"}` || r.bodySum() != hex.EncodeToString(want[:]) {
			t.Errorf("%+v", got)
		}
		if got := r.post(path, `{"model":"public"}`); got.status != 415 || got.code() != "unsupported_media_type" {
			t.Errorf("%+v", got)
		}
		if got := r.post(path, form[:len(form)-20], "Content-Type", "multipart/form-data; boundary=b"); got.status != 400 || got.code() != "invalid_request" {
			t.Errorf("%+v", got)
		}
	}
}

var valueRequests = map[string]string{
	"/v1/embeddings":            `{"model":"sim","input":"hi"}`,
	"/v1/rerank":                `{"model":"sim","query":"hi","documents":["a","b"]}`,
	"/v1/score":                 `{"model":"sim","text_1":"hi","text_2":"a"}`,
	"/tokenize":                 `{"prompt":"hi"}`,
	"/detokenize":               `{"tokens":[1]}`,
	"/v1/messages/count_tokens": `{"model":"sim","messages":[]}`,
	"/v1/audio/speech":          `{"model":"sim","input":"hi","voice":"x"}`,
}

// An engine that dies in the middle of a value has not answered.
func TestValuesAreCollectedAndRetried(t *testing.T) {
	for path, body := range valueRequests {
		t.Run(path, func(t *testing.T) {
			r := newRig(t, 2, "")
			for _, fault := range []string{"", "attempt=1;rst@headers", "attempt=1;fin@in-body:5", "attempt=1;shortbody", "attempt=1;status@head:503", "attempt=1;status@head:500"} {
				got := r.post(path, body, "X-Sim-Fault", fault)
				if got.status != 200 || got.err != nil || r.records.wait(t) != "completed" {
					t.Errorf("%s: %+v", fault, got)
				}
				if path == "/v1/audio/speech" {
					if want := "RIFF\x00\xff"; !strings.HasPrefix(got.body, want) || got.header.Get("Content-Type") != "audio/wav" {
						t.Errorf("%s: %+v", fault, got)
					}
				} else if !json.Valid([]byte(got.body)) {
					t.Errorf("%s: %s", fault, got.body)
				}
			}
			if got := r.post(path, body, "X-Sim-Fault", "status@head:404"); got.status != 404 || !strings.Contains(got.body, "simulated status 404") {
				t.Errorf("an engine's refusal: %+v", got)
			}
			r.records.wait(t)
			r.idle()
		})
	}
}

// Where a body ends by the end of its connection, JSON shows that it is whole
// and sound does not: a crash looks the same.
func TestSoundWithoutLengthIsNotTakenForWhole(t *testing.T) {
	r := newRig(t, 2, "")
	if got := r.post("/v1/audio/speech", valueRequests["/v1/audio/speech"], "X-Sim-Fault", "badhead:close"); got.status != 502 || got.code() != "upstream_failed" {
		t.Errorf("%+v", got)
	}
	if got := r.post("/v1/embeddings", valueRequests["/v1/embeddings"], "X-Sim-Fault", "badhead:close"); got.status != 200 || !json.Valid([]byte(got.body)) {
		t.Errorf("%+v", got)
	}
	if got := r.post("/v1/embeddings", valueRequests["/v1/embeddings"], "X-Sim-Fault", "attempt=1;badhead:close,attempt=1;fin@in-body:9"); got.status != 200 || !strings.Contains(got.body, "2") {
		t.Errorf("%+v", got)
	}
}

// Past its bound an answer of any kind is committed and relayed, and cut off
// where the engine dies.
func TestLargeValuesAreRelayed(t *testing.T) {
	r := newRig(t, 1, "collect_max: 16")
	for _, path := range []string{"/v1/audio/speech", "/v1/embeddings"} {
		want := r.post(path, valueRequests[path])
		if want.status != 200 || want.err != nil || len(want.body) < 100 || r.records.wait(t) != "completed" {
			t.Errorf("%+v", want)
		}
		if got := r.post(path, valueRequests[path], "X-Sim-Fault", "rst@in-body:100"); got.err == nil || r.records.wait(t) != "interrupted upstream_decode_interrupted" {
			t.Errorf("%+v", got)
		}
	}
}

func TestErrorsSpeakTheClientsLanguage(t *testing.T) {
	r := newRig(t, 1, "")
	for path, body := range map[string]string{
		"/v1/messages":              `{"model":1,"messages":[]}`,
		"/v1/messages/count_tokens": `{"messages":[]}`,
	} {
		got := r.post(path, body)
		var e struct {
			Type  string
			Error struct{ Type, Code, Message string }
		}
		if err := json.Unmarshal([]byte(got.body), &e); err != nil || e.Type != "error" || e.Error.Type == "" || e.Error.Message == "" {
			t.Errorf("%s: %v, %+v", path, err, got)
		}
	}
	for path, want := range map[string]int{
		"/v1/responses/resp_1": 404, "/v1/responses/resp_1/cancel": 404, "/v1/responses/": 404, "/v1/load_lora_adapter": 404,
		"/sleep": 404, "/v1/audio": 404, "/v1/messages/batches": 404, "/tokenize/": 404, "//v1/messages": 404,
	} {
		if got := r.post(path, `{}`); got.status != want {
			t.Errorf("%s: %+v", path, got)
		}
	}
	if n := r.totalReceived(); n != 0 {
		t.Errorf("%d requests reached the engine", n)
	}
	res, err := r.client.Get("http://" + r.addr + "/v1/messages")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(res.Body)
	res.Body.Close()
	if res.StatusCode != 405 || !strings.HasPrefix(string(body), `{"type":"error"`) {
		t.Errorf("%d %s", res.StatusCode, body)
	}
}

// The key ends here, and what the API's version is goes on.
func TestHeadersOfMessages(t *testing.T) {
	r := newRig(t, 1, "")
	r.post("/v1/messages", surfaces[2].whole, "X-Api-Key", "secret", "Anthropic-Version", "2023-06-01", "Anthropic-Beta", "b1")
	for _, e := range r.engines[0].Log() {
		if e.Event != simengine.EventReceived || e.Method != "POST" {
			continue
		}
		if e.Header.Get("X-Api-Key") != "" || e.Header.Get("Anthropic-Version") != "2023-06-01" || e.Header.Get("Anthropic-Beta") != "b1" {
			t.Errorf("%v", e.Header)
		}
	}
}

// CAN-2: whatever the API, a client that leaves frees the engine.
func TestEverySurfaceCancels(t *testing.T) {
	for _, s := range surfaces {
		r := newRig(t, 1, "")
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, "POST", "http://"+r.addr+s.path, strings.NewReader(s.stream))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Sim-Fault", "stall@token:1")
		res, err := r.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		res.Body.Close()
		if outcome := r.records.wait(t); !strings.HasPrefix(outcome, "cancelled") {
			t.Errorf("%s: %s", s.path, outcome)
		}
		r.idle()
	}
}

// PAY-11: odd requests end as 200 or 400, each by itself, and break nothing.
func TestOddRequestsOnEverySurface(t *testing.T) {
	r := newRig(t, 1, "")
	deep := strings.Repeat("[", 9000) + strings.Repeat("]", 9000)
	tooDeep := strings.Repeat("[", 20000) + strings.Repeat("]", 20000)
	for _, s := range surfaces {
		prompt := map[string]string{"/v1/responses": "input"}[s.path]
		if prompt == "" {
			prompt = "messages"
		}
		for body, want := range map[string]int{
			`[]`: 400, `"x"`: 400, `null`: 400, ``: 400, `{`: 400, `{}`: 400, `{"model":1}`: 400, `{"model":null}`: 400,
			`{"model":"sim","model":"sim","` + prompt + `":[]}`:                                                                                                   400,
			`{"model":"sim","stream":1,"` + prompt + `":[]}`:                                                                                                      400,
			`{"model":"sim","` + prompt + `":[{"role":"user","content":"a"}],"x":` + tooDeep + `}`:                                                                400,
			`{"model":"sim","` + prompt + `":[{"role":"user","content":"a"}],"x":` + deep + `}`:                                                                   200,
			`{"model":"sim","` + prompt + `":[{"role":"user","content":null},{"content":"a"}]}`:                                                                   200,
			`{"model":"sim","` + prompt + `":[{"role":"user","content":[{"type":"image"},{"type":"invented","text":7},null]}]}`:                                   200,
			`{"model":"sim","` + prompt + `":[{"role":"assistant","content":null,"tool_calls":[{"function":{"arguments":"{}"}}]},{"role":"user","content":"a"}]}`: 200,
		} {
			got := r.post(s.path, body)
			if got.status != want {
				t.Errorf("%s %.80s: %d %.300s", s.path, body, got.status, got.body)
			}
			if own := `{"type":"error","error":{`; want == 400 && strings.HasPrefix(got.body, own) != (s.path == "/v1/messages") {
				t.Errorf("%s %.80s: %.300s", s.path, body, got.body)
			}
			r.records.wait(t)
		}
	}
	r.idle()
}

// A call of a tool is output by its name: after it nothing is repeated.
func TestANamedCallIsOutputOnEverySurface(t *testing.T) {
	for _, s := range surfaces {
		r := newRig(t, 2, "")
		body := strings.Replace(strings.Replace(s.stream, `"hi"`, `"call:pay"`, 1), `"model"`, `"tools":[{"type":"function","name":"pay","function":{"name":"pay"}}],"model"`, 1)
		fault := "rst@role"
		if s.path == chatPath {
			fault = "rst@token:1"
		}
		got := r.post(s.path, body, "X-Sim-Fault", fault)
		if got.code() == "" || !strings.Contains(got.body, `"name":"pay"`) || r.totalReceived() != 1 {
			t.Errorf("%s: %+v", s.path, got)
		}
	}
}
