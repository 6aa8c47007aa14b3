// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"fmt"
	"strings"

	"github.com/tidwall/gjson"
)

// The two APIs whose events say what they are: OpenAI's Responses and
// Anthropic's Messages. Both have one choice, and a token is a delta here too.
const (
	apiResponses = "/v1/responses"
	apiMessages  = "/v1/messages"
)

func (q *ask) typed() bool { return q.api == apiResponses || q.api == apiMessages }

// typedPrompt reads what a typed request asks.
func typedPrompt(p *prompt, api string, body gjson.Result) (said string) {
	if api == apiMessages {
		if system := body.Get("system"); system.Exists() {
			p.text(system.Raw)
		}
		chatPrompt(p, body)
		return lastUserText(body)
	}
	if instructions := body.Get("instructions"); instructions.Exists() {
		p.text(instructions.String())
	}
	if tools := body.Get("tools"); tools.Exists() {
		p.text(tools.Raw)
	}
	input := body.Get("input")
	if input.IsArray() {
		p.text(input.Raw)
		return input.Raw
	}
	p.text(input.String())
	return input.String()
}

// typedEvent is one event with its name, in the syntax the script asks for.
func (g *generation) typedEvent(name, members string) string {
	if g.ask.api == apiResponses {
		members = strings.TrimPrefix(fmt.Sprintf(`%s,"sequence_number":%d`, members, g.events), ",")
	}
	if members != "" {
		members = "," + members
	}
	return "event: " + name + "\n" + g.frameEvent(fmt.Sprintf(`{"type":"%s"%s}`, name, members))
}

func (g *generation) sendTyped(name, members string) error {
	return g.send([]byte(g.typedEvent(name, members)))
}

// typedPreamble is all that comes before the first token.
func (g *generation) typedPreamble() error {
	type event struct{ name, members string }
	var events []event
	switch {
	case g.ask.api == apiMessages:
		block := `{"type":"text","text":""}`
		if g.ask.tool != "" {
			block = fmt.Sprintf(`{"type":"tool_use","id":"%s","name":%s,"input":{}}`, g.callID(0), quote(g.ask.tool))
		}
		events = []event{
			{"message_start", `"message":` + g.message(`[]`, "null", fmt.Sprintf(`{"input_tokens":%d,"output_tokens":0}`, g.ask.prompts[0].tokens))},
			{"ping", ""},
			{"content_block_start", `"index":0,"content_block":` + block},
		}
	default:
		events = []event{
			{"response.created", `"response":` + g.response("in_progress", "[]", "null")},
			{"response.in_progress", `"response":` + g.response("in_progress", "[]", "null")},
			{"response.output_item.added", `"output_index":0,"item":` + g.item("in_progress", "")},
		}
		if g.ask.tool == "" {
			events = append(events, event{"response.content_part.added", `"item_id":"item_0","output_index":0,"content_index":0,"part":{"type":"output_text","text":"","annotations":[]}`})
		}
	}
	for _, e := range events {
		if err := g.sendTyped(e.name, e.members); err != nil {
			return err
		}
	}
	return nil
}

// typedToken is the event of the newest token.
func (g *generation) typedToken() string {
	t := g.sent[0]
	text := g.text(0, t)
	if g.ask.tool != "" {
		text = g.argument(t, text)
	}
	switch {
	case g.ask.api == apiMessages && g.ask.tool != "":
		return g.typedEvent("content_block_delta", `"index":0,"delta":{"type":"input_json_delta","partial_json":"`+text+`"}`)
	case g.ask.api == apiMessages:
		return g.typedEvent("content_block_delta", `"index":0,"delta":{"type":"text_delta","text":"`+text+`"}`)
	case g.ask.tool != "":
		return g.typedEvent("response.function_call_arguments.delta", `"item_id":"item_0","output_index":0,"delta":"`+text+`"`)
	}
	return g.typedEvent("response.output_text.delta", `"item_id":"item_0","output_index":0,"content_index":0,"delta":"`+text+`"`)
}

// argument is token t as a piece of a tool call's arguments.
func (g *generation) argument(t int, text string) string {
	if t == 1 {
		text = `{\"t\":\"` + text
	}
	if t == g.ask.max {
		text += `\"}`
	}
	return text
}

// typedFinish says why the answer ended.
func (g *generation) typedFinish() error {
	g.stopped[0] = true
	if g.ask.api == apiMessages {
		if err := g.sendTyped("content_block_stop", `"index":0`); err != nil {
			return err
		}
		return g.sendTyped("message_delta", fmt.Sprintf(`"delta":{"stop_reason":%s,"stop_sequence":null},"usage":{"output_tokens":%d}`, quote(g.stopReason()), g.order))
	}
	return g.sendTyped("response.output_item.done", `"output_index":0,"item":`+g.item("completed", g.said()))
}

// typedEnd is the last event.
func (g *generation) typedEnd() string {
	if g.ask.api == apiMessages {
		return g.typedEvent("message_stop", "")
	}
	status := g.status()
	return g.typedEvent("response."+status, `"response":`+g.response(status, "["+g.item("completed", g.said())+"]", g.typedUsage()))
}

func (g *generation) status() string {
	if g.reason() == "length" {
		return "incomplete"
	}
	return "completed"
}

func (g *generation) stopReason() string {
	switch reason := g.reason(); reason {
	case "stop":
		return "end_turn"
	case "length":
		return "max_tokens"
	case "tool_calls":
		return "tool_use"
	default:
		return reason
	}
}

// said is everything sent so far, as the inside of a JSON string.
func (g *generation) said() string {
	var all strings.Builder
	for t := range g.sent[0] {
		text := g.text(0, t+1)
		if g.ask.tool != "" {
			text = g.argument(t+1, text)
		}
		all.WriteString(text)
	}
	return all.String()
}

func (g *generation) typedUsage() string {
	if g.script.word("usage", "") == "none" {
		return "null"
	}
	return fmt.Sprintf(`{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d},"output_tokens":%d,"total_tokens":%d}`,
		g.ask.prompts[0].tokens, g.work.cached(g.ask.n), g.order, g.ask.prompts[0].tokens+g.order)
}

func (g *generation) response(status, output, usage string) string {
	details := "null"
	if status == "incomplete" {
		details = `{"reason":"max_output_tokens"}`
	}
	return fmt.Sprintf(`{"id":%s,"object":"response","created_at":%d,"status":"%s","error":null,"incomplete_details":%s,"model":%s,"output":%s,"usage":%s}`,
		quote("resp_"+g.answerID()), g.created, status, details, quote(g.ask.model), output, usage)
}

func (g *generation) item(status, text string) string {
	if g.ask.tool != "" {
		return fmt.Sprintf(`{"id":"item_0","type":"function_call","call_id":"%s","name":%s,"status":"%s","arguments":"%s"}`, g.callID(0), quote(g.ask.tool), status, text)
	}
	content := "[]"
	if text != "" {
		content = `[{"type":"output_text","text":"` + text + `","annotations":[]}]`
	}
	return fmt.Sprintf(`{"id":"item_0","type":"message","role":"assistant","status":"%s","content":%s}`, status, content)
}

func (g *generation) message(content, stop, usage string) string {
	return fmt.Sprintf(`{"id":%s,"type":"message","role":"assistant","content":%s,"model":%s,"stop_reason":%s,"stop_sequence":null,"usage":%s}`,
		quote("msg_"+g.answerID()), content, quote(g.ask.model), stop, usage)
}

// typedBody is the JSON of a whole typed answer.
func (g *generation) typedBody() string {
	if g.ask.api == apiResponses {
		status := g.status()
		return g.response(status, "["+g.item("completed", g.said())+"]", g.typedUsage())
	}
	content := `[{"type":"text","text":"` + g.said() + `"}]`
	if g.ask.tool != "" {
		content = fmt.Sprintf(`[{"type":"tool_use","id":"%s","name":%s,"input":{"t":"%s"}}]`, g.callID(0), quote(g.ask.tool), g.ask.tool)
	}
	return g.message(content, quote(g.stopReason()), fmt.Sprintf(`{"input_tokens":%d,"cache_read_input_tokens":%d,"output_tokens":%d}`,
		g.ask.prompts[0].tokens-g.work.cached(g.ask.n), g.work.cached(g.ask.n), g.order))
}
