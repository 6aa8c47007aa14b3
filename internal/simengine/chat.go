// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headgate/headgate/internal/simengine/model"
)

// Bounds on what one request may ask, as vLLM has them.
const (
	choicesMax = 128
	tokensMax  = 1 << 20
)

// ask is what a request body asks for.
type ask struct {
	api       string // the path
	chat      bool
	stream    bool
	wantUsage bool
	model     string
	adapter   string
	max       int // tokens per choice
	n         int // choices per prompt
	logprobs  bool
	tool      string // the answer is a call of this tool
	executes  string // the engine calls this tool itself
	reason    string // finish_reason
	prompts   []*prompt
}

func (x *exchange) route() error {
	path, method := x.req.URL.Path, x.req.Method
	switch {
	case inference(path) && method == http.MethodPost:
		if slices.Contains(valuePaths, path) {
			return x.value(path)
		}
		return x.generate(path != "/v1/completions")
	case inference(path):
		return x.refuse(http.StatusMethodNotAllowed, "MethodNotAllowed", "only POST")
	case method != http.MethodGet && method != http.MethodHead:
		return x.refuse(http.StatusNotFound, "NotFoundError", "not found")
	}
	switch path {
	case "/health", "/ping":
		return x.plain("", "")
	case "/version":
		return x.plain("application/json", `{"version":"0.30.0+sim"}`)
	case "/v1/models":
		return x.plain("application/json", x.l.e.modelList())
	case "/metrics":
		page := x.l.e.frozenMetrics()
		if page == "" {
			page = x.l.metricsText()
		}
		return x.plain("text/plain; version=0.0.4; charset=utf-8", page)
	}
	return x.refuse(http.StatusNotFound, "NotFoundError", "not found")
}

func (x *exchange) plain(contentType, body string) error {
	a := &answer{exchange: x}
	h := head{status: http.StatusOK}
	if contentType != "" {
		h.set("Content-Type", contentType)
	}
	return a.whole(h, []byte(body))
}

func (e *Engine) modelList() string {
	var rows []string
	add := func(id, parent string) {
		rows = append(rows, fmt.Sprintf(`{"id":%s,"object":"model","created":1700000000,"owned_by":"vllm","root":%s,"parent":%s,"max_model_len":%d,"permission":[]}`,
			quote(id), quote(id), parent, e.current().capacity()))
	}
	for _, m := range e.cfg.Models {
		add(m, "null")
	}
	for _, m := range e.cfg.Adapters {
		add(m, quote(e.cfg.Models[0]))
	}
	return `{"object":"list","data":[` + strings.Join(rows, ",") + `]}`
}

func (l *life) capacity() int {
	p := l.model.Params() // fixed since New
	return p.Blocks * p.BlockTokens
}

// generate answers one inference request.
func (x *exchange) generate(chat bool) error {
	q, err := x.parse(chat)
	if err != nil {
		status, kind := http.StatusBadRequest, "BadRequestError"
		if errors.As(err, new(unknownModel)) {
			status, kind = http.StatusNotFound, "NotFoundError"
		}
		return x.refuse(status, kind, err.Error())
	}
	w, err := x.l.submit(x.record, x.jobs(q), q.reason)
	if err != nil {
		return x.refuse(http.StatusBadRequest, "BadRequestError", err.Error())
	}
	g := &generation{answer: &answer{exchange: x}, ask: q, work: w, sent: make([]int, len(w.jobs)),
		stopped: make([]bool, len(w.jobs)), created: time.Now().Unix()}
	if q.stream {
		err = g.streamed()
	} else {
		err = g.collected()
	}
	return g.settle(w, err)
}

type unknownModel string

func (m unknownModel) Error() string {
	return fmt.Sprintf("The model `%s` does not exist.", string(m))
}

func (x *exchange) parse(chat bool) (*ask, error) {
	cfg := x.l.e.cfg
	if !gjson.ValidBytes(x.body) {
		return nil, fmt.Errorf("the body is not valid JSON")
	}
	body := gjson.ParseBytes(x.body)
	if !body.IsObject() {
		return nil, fmt.Errorf("the body is not a JSON object")
	}
	q := &ask{
		api: x.req.URL.Path, chat: chat, model: body.Get("model").String(), max: cfg.Tokens, n: 1, reason: "stop",
		stream:    body.Get("stream").Bool(),
		wantUsage: body.Get("stream_options.include_usage").Bool(),
	}
	switch {
	case q.model == "":
		q.model = cfg.Models[0]
	case slices.Contains(cfg.Adapters, q.model):
		q.adapter = q.model
	case !slices.Contains(cfg.Models, q.model):
		return nil, unknownModel(q.model)
	}
	for _, name := range []string{"max_tokens", "max_completion_tokens", "max_output_tokens"} {
		if v := body.Get(name); v.Type == gjson.Number {
			q.max, q.reason = int(v.Int()), "length"
		}
	}
	if v := body.Get("n"); v.Type == gjson.Number {
		q.n = int(v.Int())
	}
	if q.max < 1 || q.max > tokensMax || q.n < 1 || q.n > choicesMax {
		return nil, fmt.Errorf("max_tokens must be 1..%d and n 1..%d", tokensMax, choicesMax)
	}
	logprobs := body.Get("logprobs")
	q.logprobs = logprobs.Type == gjson.True || logprobs.Type == gjson.Number

	fresh := func() *prompt {
		return newPrompt(x.l.model.Params().BlockTokens, q.adapter+"\x00"+body.Get("cache_salt").String())
	}
	switch {
	case q.api == apiResponses && !body.Get("input").Exists():
		return nil, fmt.Errorf("input is missing")
	case q.api == apiResponses:
		p := fresh()
		said := typedPrompt(p, q.api, body)
		q.prompts, q.n = []*prompt{p}, 1
		if body.Get("tools").IsArray() {
			q.tool = wordAfter(said, "call:")
		}
		q.executes = wordAfter(said, "exec:")
	case chat:
		if !body.Get("messages").IsArray() {
			return nil, fmt.Errorf("messages must be a list")
		}
		if len(body.Get("messages").Array()) == 0 {
			return nil, fmt.Errorf("messages is empty")
		}
		p := fresh()
		var said string
		if q.typed() {
			said = typedPrompt(p, q.api, body)
			q.n = 1
		} else {
			chatPrompt(p, body)
			said = lastUserText(body)
		}
		q.prompts = []*prompt{p}
		if body.Get("tools").IsArray() {
			q.tool = wordAfter(said, "call:")
		}
		q.executes = wordAfter(said, "exec:")
	default:
		q.prompts = textPrompts(fresh, body.Get("prompt"))
		if len(q.prompts) == 0 || len(q.prompts)*q.n > choicesMax {
			return nil, fmt.Errorf("between 1 and %d choices in all", choicesMax)
		}
	}
	for _, p := range q.prompts {
		if p.tokens == 0 {
			return nil, fmt.Errorf("the prompt is empty")
		}
	}
	if q.tool != "" {
		q.reason = "tool_calls"
	}
	return q, nil
}

// keyedOutput bounds how many tokens of an answer get cache keys.
const keyedOutput = 1 << 14

// jobs turns the request into sequences for the model, one per choice.
func (x *exchange) jobs(q *ask) []model.Job {
	var jobs []model.Job
	for i, p := range q.prompts {
		for c := range q.n {
			j := model.Job{PromptTokens: p.tokens, Blocks: p.blocks, MaxNew: q.max, Adapter: q.adapter}
			tail := p.chain
			for t := 1; t <= min(q.max, keyedOutput); t++ {
				if key, full := tail.token(strings.TrimSuffix(x.text(i*q.n+c, t), " ")); full {
					j.Output = append(j.Output, key)
				}
			}
			// A fault before the first token finds the engine before it.
			if k, ok := x.script.holdAfter(0); ok {
				j.Hold, j.HoldAfter = true, k
			}
			if slices.ContainsFunc(x.script, func(f Fault) bool { return f.Point.Name == "headers" || f.Point.Name == "role" }) {
				j.Hold, j.HoldAfter = true, 0
			}
			jobs = append(jobs, j)
		}
	}
	return jobs
}

// text is token t (from 1) of a choice: it names its engine, attempt and
// place, "A1·17 ", and "A1/2·17 " for choice 2 of several.
func (x *exchange) text(choice, t int) string {
	of := ""
	if choice > 0 {
		of = "/" + strconv.Itoa(choice)
	}
	return x.l.e.cfg.Name + strconv.Itoa(x.attempt) + of + "·" + strconv.Itoa(t) + " "
}

// quote makes a JSON string.
func quote(text string) string { return string(gjson.AppendJSONString(nil, text)) }
