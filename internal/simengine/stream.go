// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"fmt"
	"strconv"
	"strings"
)

// streamed sends the answer as server-sent events: head, role-only chunks, one
// event per token, finish reasons, usage if asked for, [DONE], last chunk.
func (g *generation) streamed() error {
	if err := g.begin("text/event-stream; charset=utf-8", -1); err != nil {
		return err
	}
	if g.script.word("sse", "") == "bom" {
		if err := g.send([]byte("\xef\xbb\xbf")); err != nil {
			return err
		}
	}
	if g.script.has("empty") {
		return g.onlyDone()
	}
	if err := g.preamble(); err != nil {
		return err
	}
	if err := g.tokens(g.tokenEvent); err != nil {
		return err
	}
	if err := g.ending(); err != nil {
		return err
	}
	g.record(Entry{Event: EventFinished, N: g.order})
	return g.early()
}

// onlyDone is an answer without any output that claims to be complete.
func (g *generation) onlyDone() error {
	g.struck("empty")
	if err := g.done(); err != nil {
		return err
	}
	if err := g.endBody(); err != nil {
		return err
	}
	return errEnded
}

func (g *generation) struck(kind string) {
	if f, ok := g.script.whole(kind); ok {
		g.record(Entry{Event: EventFault, Detail: f.String()})
	}
}

// preamble is one role-only chunk per choice.
func (g *generation) preamble() error {
	switch {
	case g.ask.typed():
		if err := g.typedPreamble(); err != nil {
			return err
		}
	case g.ask.chat:
		for c := range g.sent {
			if err := g.event(g.chunk(g.choice(c, `{"role":"assistant","content":""}`, "null", "null"), g.usageEach())); err != nil {
				return err
			}
		}
	}
	return g.reach(Point{Name: "role"})
}

// tokenEvent sends the newest token of a choice.
func (g *generation) tokenEvent(choice int) error {
	if err := g.noise(); err != nil {
		return err
	}
	finish := "null"
	if f := g.script.word("finish", "attached"); f != "" && g.sent[choice] == g.ask.max {
		finish = quote(g.reason())
		g.stopped[choice] = true
	}
	var frame string
	if g.ask.typed() {
		frame = g.typedToken()
	} else {
		body := g.chunk(g.tokenChoice(choice, finish), g.usageEach())
		for _, f := range g.script.at(Point{Name: "token", K: g.order}) {
			if f.Kind == "bigline" {
				body = pad(body, f.number(0, 65537)-len(g.prefix()))
			}
		}
		frame = g.frameEvent(body)
	}
	cuts := g.script.cuts(g.order, strings.Index(frame, "·")+1, len(frame))
	var err error
	if len(cuts) > 0 {
		err = g.sendCut([]byte(frame), cuts)
	} else {
		err = g.send([]byte(frame))
	}
	if err == nil && !g.l.e.cfg.QuietTokens {
		g.record(Entry{Event: EventToken, N: g.order, Choice: choice})
	}
	return err
}

// tokenChoice is the choices entry of a choice's newest token.
func (g *generation) tokenChoice(choice int, finish string) string {
	t := g.sent[choice]
	text := g.text(choice, t)
	logprobs := "null"
	if g.ask.logprobs {
		logprobs = g.logprobs(choice, t, t)
	}
	for _, f := range g.script.at(Point{Name: "token", K: g.order}) {
		if f.Kind == "delta" {
			return g.choice(choice, oddDelta(f.Args[0], text), g.oddLogprobs(f.Args[0], logprobs, text), finish)
		}
	}
	if g.ask.tool != "" {
		return g.choice(choice, g.toolDelta(choice, t, text), logprobs, finish)
	}
	if !g.ask.chat {
		return fmt.Sprintf(`{"index":%d,"text":"%s","logprobs":%s,"finish_reason":%s}`, choice, text, logprobs, finish)
	}
	return g.choice(choice, `{"content":"`+text+`"}`, logprobs, finish)
}

// toolDelta is a fragment of a tool call whose arguments carry the tokens.
func (g *generation) toolDelta(choice, t int, text string) string {
	id, args := "", text
	if t == 1 {
		id = fmt.Sprintf(`"id":"%s","type":"function",`, g.callID(choice))
		args = `{\"t\":\"` + args
	}
	if t == g.ask.max {
		args += `\"}`
	}
	name := ""
	if t == 1 {
		name = `"name":` + quote(g.ask.tool) + `,`
	}
	return fmt.Sprintf(`{"tool_calls":[{"index":0,%s"function":{%s"arguments":"%s"}}]}`, id, name, args)
}

func (g *generation) callID(choice int) string {
	return fmt.Sprintf("call_%s%d_%d", g.l.e.cfg.Name, g.attempt, choice)
}

// oddDelta is the text as another kind of output than content.
func oddDelta(kind, text string) string {
	switch kind {
	case "reasoning":
		return `{"reasoning_content":"` + text + `"}`
	case "tool":
		return `{"tool_calls":[{"index":0,"id":"call_odd","type":"function","function":{"name":"odd","arguments":"` + text + `"}}]}`
	case "refusal":
		return `{"refusal":"` + text + `"}`
	case "audio":
		return `{"audio":{"id":"audio_odd","transcript":"` + text + `"}}`
	case "null":
		return `{"content":null}`
	case "unknown":
		return `{"hologram":"` + text + `"}`
	}
	return `{"content":""}` // empty, logprobs
}

func (g *generation) oddLogprobs(kind, otherwise, text string) string {
	if kind == "logprobs" {
		return `{"content":[{"token":"` + text + `","logprob":-0.5,"bytes":null,"top_logprobs":[]}]}`
	}
	return otherwise
}

// logprobs are those of tokens from..to of a choice.
func (g *generation) logprobs(choice, from, to int) string {
	var tokens, values, tops, offsets []string
	offset := 0
	for t := from; t <= to; t++ {
		text := g.text(choice, t)
		tokens = append(tokens, `"`+text+`"`)
		values = append(values, "-0.5")
		tops = append(tops, "null")
		offsets = append(offsets, strconv.Itoa(offset))
		offset += len([]rune(text))
	}
	if !g.ask.chat {
		return fmt.Sprintf(`{"tokens":[%s],"token_logprobs":[%s],"top_logprobs":[%s],"text_offset":[%s]}`,
			strings.Join(tokens, ","), strings.Join(values, ","), strings.Join(tops, ","), strings.Join(offsets, ","))
	}
	for i, token := range tokens {
		tokens[i] = `{"token":` + token + `,"logprob":-0.5,"bytes":null,"top_logprobs":[]}`
	}
	return `{"content":[` + strings.Join(tokens, ",") + `]}`
}

// choice is one entry of a chat chunk's choices.
func (g *generation) choice(choice int, delta, logprobs, finish string) string {
	return fmt.Sprintf(`{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":%s}`, choice, delta, logprobs, finish)
}

// ending is everything after the last token.
func (g *generation) ending() error {
	if g.script.has("nofinish") {
		g.struck("nofinish")
	} else if err := g.finishReasons(); err != nil {
		return err
	}
	if err := g.reach(Point{Name: "finish"}); err != nil {
		return err
	}
	if usage, choices := g.usageChunk(); usage != "" && !g.ask.typed() {
		if err := g.event(g.chunk(choices, usage)); err != nil {
			return err
		}
		if err := g.reach(Point{Name: "usage"}); err != nil {
			return err
		}
	}
	if f, ok := g.script.whole("nodone"); ok {
		g.struck("nodone")
		switch f.arg(0, "clean") {
		case "open":
			return g.stall(Fault{Kind: "stall"}, g.gone)
		case "fin":
			return g.end(Fault{Kind: "fin"})
		}
		return g.endBody()
	}
	if err := g.done(); err != nil {
		return err
	}
	return g.endBody()
}

func (g *generation) done() error {
	var marker string
	if g.ask.typed() {
		marker = g.typedEnd()
	} else {
		marker = g.frameEvent("[DONE]")
	}
	if g.script.word("sse", "") == "noeol" {
		marker = strings.TrimRight(marker, "\n")
	}
	if err := g.send([]byte(marker)); err != nil {
		return err
	}
	return g.reach(Point{Name: "done"})
}

func (g *generation) reason() string {
	if word := g.script.word("finish", "attached"); word != "" && word != "attached" {
		return word
	}
	return g.ask.reason
}

func (g *generation) finishReasons() error {
	if g.ask.typed() {
		return g.typedFinish()
	}
	for c, stopped := range g.stopped {
		if stopped {
			continue
		}
		g.stopped[c] = true
		choice := g.choice(c, "{}", "null", quote(g.reason()))
		if !g.ask.chat {
			choice = fmt.Sprintf(`{"index":%d,"text":"","logprobs":null,"finish_reason":%s}`, c, quote(g.reason()))
		}
		usage := g.usageEach()
		if g.script.word("usage", "") == "final" && c == len(g.stopped)-1 {
			usage = g.usage(g.order)
		}
		if err := g.event(g.chunk(choice, usage)); err != nil {
			return err
		}
	}
	return nil
}

// usageChunk is the usage chunk's usage and choices; no usage, no chunk.
func (g *generation) usageChunk() (usage, choices string) {
	switch word := g.script.word("usage", ""); word {
	case "none", "final":
		return "", ""
	case "null":
		return "null", ""
	case "wrong":
		return `{"prompt_tokens":-1,"completion_tokens":"many","total_tokens":1e99}`, ""
	case "choices":
		return g.usage(g.order), g.choice(0, "{}", "null", "null")
	case "always", "each":
		return g.usage(g.order), ""
	}
	if g.ask.wantUsage {
		return g.usage(g.order), ""
	}
	return "", ""
}

func (g *generation) usageEach() string {
	if g.script.word("usage", "") == "each" {
		return g.usage(g.order)
	}
	return ""
}

func (g *generation) usage(completion int) string {
	prompt := 0
	for _, p := range g.ask.prompts {
		prompt += p.tokens
	}
	return fmt.Sprintf(`{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}`,
		prompt, prompt+completion, completion, g.work.cached(g.ask.n))
}

func (g *generation) answerID() string {
	kind := "cmpl"
	if g.ask.chat {
		kind = "chatcmpl"
	}
	id := g.id
	if id == "" {
		id = fmt.Sprintf("conn%d", g.conn.id)
	}
	return fmt.Sprintf("%s-%s%d-%s", kind, g.l.e.cfg.Name, g.attempt, id)
}

// chunk is the JSON of one event.
func (g *generation) chunk(choices, usage string) string {
	object := "text_completion"
	if g.ask.chat {
		object = "chat.completion.chunk"
	}
	extra := ""
	if usage != "" {
		extra += `,"usage":` + usage
	}
	if g.script.has("errornull") {
		extra += `,"error":null`
	}
	return fmt.Sprintf(`{"id":%s,"object":"%s","created":%d,"model":%s,"choices":[%s]%s}`,
		quote(g.answerID()), object, g.created, quote(g.ask.model), choices, extra)
}

// pad makes a JSON object length bytes long with a member nobody reads.
func pad(object string, length int) string {
	const member = `,"padding":""}`
	fill := length - len(object) + 1 - len(member)
	if fill < 0 {
		return object
	}
	return object[:len(object)-1] + `,"padding":"` + strings.Repeat("p", fill) + `"}`
}

func (g *generation) prefix() string {
	if g.script.word("sse", "") == "nospace" {
		return "data:"
	}
	return "data: "
}

// frameEvent puts data into the event syntax the script asks for.
func (g *generation) frameEvent(data string) string {
	g.events++
	event := g.prefix() + data + "\n\n"
	switch g.script.word("sse", "") {
	case "crlf":
		event = strings.ReplaceAll(event, "\n", "\r\n")
	case "cr":
		event = strings.ReplaceAll(event, "\n", "\r")
	case "event":
		event = "event: message\n" + event
	case "id":
		event = "id: " + strconv.Itoa(g.events) + "\n" + event
	case "multiline":
		// Two data lines are one datum with a newline between (WHATWG HTML
		// §9.2.6); between two JSON members that is white space.
		event = strings.Replace(event, `,"object"`, ",\ndata: \"object\"", 1)
	}
	return event
}

func (g *generation) event(data string) error { return g.send([]byte(g.frameEvent(data))) }

// noise is legal and meaningless: what SSE streams carry beside events.
var noise = []string{": keep-alive\n\n", "id: 7\n\n", "retry: 3000\n\n", "data:\n\n", "event: ping\n\n", ":\n"}

func (g *generation) noise() error {
	if !g.script.has("comment") {
		return nil
	}
	return g.send([]byte(noise[g.order%len(noise)]))
}

// collected sends the answer as one JSON body with a length.
func (g *generation) collected() error {
	if err := g.tokens(func(int) error { return nil }); err != nil {
		return err
	}
	if err := g.reach(Point{Name: "finish"}); err != nil {
		return err
	}
	body := []byte(g.body())
	if word := g.script.word("gzip", "plain"); word == "plain" {
		if err := g.zipped(body); err != nil {
			return err
		}
	} else if err := g.plainBody(body); err != nil {
		return err
	}
	if err := g.reach(Point{Name: "done"}); err != nil {
		return err
	}
	g.record(Entry{Event: EventFinished, N: g.order})
	return g.early()
}

// zipped sends the body compressed, in chunks: its length is not known.
func (g *generation) zipped(body []byte) error {
	if err := g.begin("application/json", -1); err != nil {
		return err
	}
	if err := g.sendCut(body, g.script.bodyCuts(len(body))); err != nil {
		return err
	}
	return g.endBody()
}

func (g *generation) plainBody(body []byte) error {
	if err := g.begin("application/json", len(body)); err != nil {
		return err
	}
	if f, ok := g.script.whole("shortbody"); ok {
		g.struck("shortbody")
		if err := g.put(body[:max(0, len(body)-f.number(0, 10))]); err != nil {
			return err
		}
		return g.end(Fault{Kind: "fin"})
	}
	return g.sendCut(body, g.script.bodyCuts(len(body)))
}

// body is the JSON of a whole answer.
func (g *generation) body() string {
	if g.ask.typed() {
		return g.typedBody()
	}
	object := "text_completion"
	if g.ask.chat {
		object = "chat.completion"
	}
	var choices []string
	for c := range g.sent {
		choices = append(choices, g.wholeChoice(c))
	}
	extra := ""
	if g.script.word("usage", "") != "none" {
		extra = `,"usage":` + g.usage(g.order)
	}
	if g.script.has("errornull") {
		extra += `,"error":null`
	}
	return fmt.Sprintf(`{"id":%s,"object":"%s","created":%d,"model":%s,"choices":[%s]%s}`,
		quote(g.answerID()), object, g.created, quote(g.ask.model), strings.Join(choices, ","), extra)
}

func (g *generation) wholeChoice(c int) string {
	var text strings.Builder
	for t := range g.sent[c] {
		text.WriteString(g.text(c, t+1))
	}
	logprobs, finish := "null", quote(g.reason())
	if g.ask.logprobs {
		logprobs = g.logprobs(c, 1, g.sent[c])
	}
	if g.script.has("nofinish") {
		finish = "null"
	}
	if g.script.has("empty") {
		text.Reset()
	}
	if !g.ask.chat {
		return fmt.Sprintf(`{"index":%d,"text":"%s","logprobs":%s,"finish_reason":%s}`, c, text.String(), logprobs, finish)
	}
	message := `{"role":"assistant","content":"` + text.String() + `"}`
	if g.ask.tool != "" {
		message = fmt.Sprintf(`{"role":"assistant","content":null,"tool_calls":[{"id":"%s","type":"function","function":{"name":%s,"arguments":"{\"t\":\"%s\"}"}}]}`,
			g.callID(c), quote(g.ask.tool), text.String())
	}
	return fmt.Sprintf(`{"index":%d,"message":%s,"logprobs":%s,"finish_reason":%s}`, c, message, logprobs, finish)
}
