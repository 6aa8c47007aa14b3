// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"slices"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// types lists the types of a typed stream's events, each once in a row.
func types(t *testing.T, body string) (names []string) {
	t.Helper()
	for event := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		name, data, ok := strings.Cut(event, "\ndata: ")
		name, named := strings.CutPrefix(name, "event: ")
		if !ok || !named || !gjson.Valid(data) || gjson.Get(data, "type").Str != name {
			t.Errorf("not a typed event: %q", event)
		}
		if len(names) == 0 || names[len(names)-1] != name {
			names = append(names, name)
		}
	}
	return names
}

func TestTypedStreams(t *testing.T) {
	e := start(t, Config{Tokens: 3})
	for _, tt := range []struct {
		path, body, fault string
		want              []string
	}{
		{apiResponses, `{"stream":true,"input":"hi"}`, "", []string{"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added", "response.output_text.delta", "response.output_item.done", "response.completed"}},
		{apiResponses, `{"stream":true,"input":[{"role":"user","content":"call:pay"}],"tools":[]}`, "", []string{"response.created", "response.in_progress", "response.output_item.added", "response.function_call_arguments.delta", "response.output_item.done", "response.completed"}},
		{apiResponses, `{"stream":true,"input":"hi","max_output_tokens":2}`, "nodone", []string{"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added", "response.output_text.delta", "response.output_item.done"}},
		{apiMessages, `{"stream":true,"messages":[{"role":"user","content":"hi"}],"system":"x"}`, "", []string{"message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"}},
		{apiMessages, `{"stream":true,"messages":[{"role":"user","content":"call:pay"}],"tools":[]}`, "end@finish", []string{"message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"}},
		{apiMessages, `{"stream":true,"messages":[{"role":"user","content":"hi"}]}`, "error@computed:1", []string{"message_start", "ping", "content_block_start", "error"}},
		{apiMessages, `{"stream":true,"messages":[{"role":"user","content":"hi"}]}`, "empty", []string{"message_stop"}},
	} {
		body := readAll(t, dial(t, e).post(tt.path, tt.body, "X-Sim-Fault: "+tt.fault).response())
		if got := types(t, body); !slices.Equal(got, tt.want) {
			t.Errorf("%s %s: %v, want %v", tt.body, tt.fault, got, tt.want)
		}
	}
}

func TestWholeTypedAnswers(t *testing.T) {
	e := start(t, Config{Tokens: 3})
	for _, tt := range []struct{ path, body, at, want string }{
		{apiResponses, `{"input":"hi"}`, "output.0.content.0.text", "A1·1 A1·2 A1·3 "},
		{apiResponses, `{"input":"hi","max_output_tokens":2}`, "incomplete_details.reason", "max_output_tokens"},
		{apiResponses, `{"input":"call:pay","tools":[]}`, "output.0.name", "pay"},
		{apiMessages, `{"messages":[{"role":"user","content":"hi"}]}`, "content.0.text", "A1·1 A1·2 A1·3 "},
		{apiMessages, `{"messages":[{"role":"user","content":"hi"}],"max_tokens":2}`, "stop_reason", "max_tokens"},
		{apiMessages, `{"messages":[{"role":"user","content":"call:pay"}],"tools":[]}`, "content.0.name", "pay"},
	} {
		body := readAll(t, dial(t, e).post(tt.path, tt.body).response())
		if got := gjson.Get(body, tt.at).Str; !gjson.Valid(body) || got != tt.want {
			t.Errorf("%s: %s", tt.body, body)
		}
	}
	for path, body := range map[string]string{apiResponses: `{}`, apiMessages: `{}`} {
		if res := dial(t, e).post(path, body).response(); res.StatusCode != 400 {
			t.Errorf("%s: %d", path, res.StatusCode)
		}
	}
}

func TestOneValueEndpoints(t *testing.T) {
	e := start(t, Config{})
	for _, path := range valuePaths {
		if strings.HasPrefix(path, "/v1/audio/tran") {
			continue
		}
		body := readAll(t, dial(t, e).post(path, `{"model":"sim","input":"hi"}`).response())
		if path != "/v1/audio/speech" && !gjson.Valid(body) {
			t.Errorf("%s: %s", path, body)
		}
		if res := dial(t, e).post(path, `{"model":"other"}`).response(); res.StatusCode != 404 {
			t.Errorf("%s: %d", path, res.StatusCode)
		}
		raw, end := dial(t, e).post(path, `{}`, "X-Sim-Fault: rst@in-body:5").rest()
		if _, body, _ := strings.Cut(raw, "\r\n\r\n"); len(body) != 5 || end != "RST" {
			t.Errorf("%s: %q, %s", path, body, end)
		}
	}
}
