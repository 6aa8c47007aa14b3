// SPDX-License-Identifier: Apache-2.0

package clients_test

import (
	"fmt"
	"strings"
)

// scenario is one thing that an application does with its SDK, and what must
// come of it.
type scenario struct {
	Name   string `json:"name"`
	URL    string `json:"url"` // base URL of the SDK
	Lane   string `json:"lane"`
	Model  string `json:"model"`
	Stream bool   `json:"stream"`
	Usage  bool   `json:"usage"`  // ask for it; without a stream it always comes
	Tool   string `json:"tool"`   // offer this tool, and make the engine call it
	Tokens int    `json:"tokens"` // max_tokens; 0: none
	Pad    int    `json:"pad"`    // bytes that the prompt is longer

	Fault   string            `json:"fault"` // of the engine
	Headers map[string]string `json:"headers"`
	Retries int               `json:"retries"` // that the SDK may make

	LeaveAt    int `json:"leaveAt"`    // give up after so many pieces of text; 0: never
	LeaveAfter int `json:"leaveAfter"` // give up after so many milliseconds; 0: never

	ends   ending
	finish string // of a complete answer
	code   string // of an error
	status int    // of a refusal
	again  bool   // the refusal may be answered by sending the request again
	visits int    // attempts at engines, per request of the SDK
	loses  bool   // the engine's last tokens may be lost
	drains bool   // ask the gateway that is shutting down
	path   string // of the base URL, if not the usual one
}

type ending uint8

const (
	complete    ending = iota
	interrupted        // an error after part of the answer
	cut                // a body that breaks off
	refused            // an error of Headgate's own instead of an answer
	passed             // an engine's error, passed on
	left               // the application gave up
)

// retries is what every SDK may make here: the default of all but LangChain,
// whose is 6, and go-openai, which can't.
const retries = 2

// scenarios are played by every SDK. Those without a lane share one and run in
// turn; refusals, which take long when they are repeated, run beside them.
func scenarios() []scenario {
	all := []scenario{
		{Name: "stream", Stream: true, Usage: true},
		{Name: "stream without usage", Stream: true},
		{Name: "whole"},
		{Name: "stream, too long", Stream: true, Tokens: 5, finish: "length"},
		{Name: "whole, too long", Tokens: 5, finish: "length"},
		{Name: "tool, stream", Stream: true, Tool: "weather", finish: "tool_calls"},
		{Name: "tool, whole", Tool: "weather", finish: "tool_calls"},

		// What engines do that breaks SDKs, and Headgate mends.
		{Name: "error null, stream", Stream: true, Fault: "errornull"},
		{Name: "error null, whole", Fault: "errornull"},
		{Name: "comments", Stream: true, Fault: "stall@token:3:50ms:comments"},
		{Name: "ids and events without data", Stream: true, Fault: "comment"},
		{Name: "no end marker", Stream: true, Fault: "nodone:clean"},
		{Name: "no end marker and closed", Stream: true, Fault: "nodone:fin"},

		// The engine dies before the first delta: nobody notices.
		{Name: "dies at once, stream", Stream: true, Usage: true, Fault: "attempt=1;rst@head", visits: 2},
		{Name: "dies at once, whole", Fault: "attempt=1;rst@head", visits: 2},
		{Name: "dies after its head", Stream: true, Fault: "attempt=1;fin@role", visits: 2},
		{Name: "dies with its first token", Stream: true, Fault: "attempt=1;rst@computed:1", visits: 2},
		{Name: "dies in the body", Fault: "attempt=1;fin@in-body:40", visits: 2},
		{Name: "dies with a tool call", Tool: "weather", Fault: "attempt=1;rst@token:3", visits: 2, finish: "tool_calls"},
		{Name: "answers 500, stream", Stream: true, Fault: "attempt=1;status@head:500", visits: 2},
		{Name: "answers 500, whole", Fault: "attempt=1;status@head:500", visits: 2},

		// And after it: everybody does.
		{Name: "closed", Stream: true, Fault: "fin@token:4", ends: interrupted},
		{Name: "reset", Stream: true, Fault: "rst@token:4", ends: interrupted, loses: true},
		{Name: "cut inside an event", Stream: true, Fault: "fin@in-chunk:5:30", ends: interrupted},
		{Name: "ended too soon", Stream: true, Fault: "end@token:4", ends: interrupted},
		{Name: "silent", Stream: true, Model: "idle", Fault: "stall@token:4", ends: interrupted},
		{Name: "error event", Stream: true, Fault: "error@token:4", ends: interrupted},
		{Name: "error event with choices", Stream: true, Fault: "error@token:4:choices", ends: interrupted},
		{Name: "garbage", Stream: true, Fault: "garbage@token:4", ends: interrupted, loses: true},
		{Name: "closed after comments", Stream: true, Fault: "stall@token:4:50ms:comments,fin@token:4", ends: interrupted},
		{Name: "tool call cut off", Stream: true, Tool: "weather", Fault: "fin@token:4", ends: interrupted},

		// An answer that is not streamed and too large to be held back has no room
		// for an error: its body breaks off. Some SDKs then send again.
		{Name: "large, whole", Model: "large", Tokens: 500, finish: "length"},
		{Name: "large, closed", Lane: "large, closed", Model: "large", Retries: retries, Tokens: 500, Fault: "fin@in-body:2000", ends: cut},
		{Name: "large, reset", Lane: "large, reset", Model: "large", Retries: retries, Tokens: 500, Fault: "rst@in-body:2000", ends: cut},

		{Name: "engine's own 400, stream", Stream: true, Fault: "status@head:400", ends: passed, status: 400},
		{Name: "engine's own 400, whole", Fault: "status@head:400", ends: passed, status: 400},

		{Name: "leaves in the middle", Stream: true, Tokens: 5000, Fault: "slow:5ms", LeaveAt: 3, ends: left},
		{Name: "leaves before output, stream", Stream: true, Fault: "stall@head", LeaveAfter: 300, ends: left},
		{Name: "leaves before output, whole", Fault: "stall@head", LeaveAfter: 300, ends: left},

		// The engines ask for a pause; the next request must wait as long.
		{Name: "busy, told by the engine", Lane: "busy", Model: "busy", Fault: "status@head:429:json:5", ends: passed, status: 429, visits: 2},
		{Name: "busy, told by the gateway", Lane: "busy", Model: "busy", Stream: true, Retries: retries, ends: refused, code: "shed", status: 429, again: true},
	}
	for _, s := range refusals {
		for _, s.Stream = range []bool{false, true} {
			each := s
			each.Retries, each.ends = retries, refused
			each.Name = strings.TrimSpace(s.code+" "+s.Name) + map[bool]string{false: ", whole", true: ", stream"}[s.Stream]
			each.Lane = each.Name
			all = append(all, each)
		}
	}
	return all
}

// refusals are the errors of Headgate's own that can be had without a journal
// and queues.
var refusals = []scenario{
	{code: "missing_model", status: 400, Model: "-"},
	{code: "idempotency_unavailable", status: 400, Headers: map[string]string{"Idempotency-Key": "k"}},
	{code: "tool_effects_unknown", status: 400, Model: "tools", Fault: "rst@computed:1", visits: 1},
	{code: "model_not_found", status: 404, Model: "nobody"},
	{code: "not_found", status: 404, path: "/v9"},
	{code: "request_too_large", status: 413, Model: "small", Pad: 4 << 10},
	{code: "request_too_large", Name: "unread", status: 413, Model: "small", Pad: 8 << 20},
	{code: "unsupported_media_type", status: 415, Headers: map[string]string{"Content-Encoding": "br"}},
	{code: "headers_too_large", status: 431, Headers: map[string]string{"X-Long": strings.Repeat("x", 70<<10)}},

	{code: "upstream_failed", Name: "resets", status: 502, again: true, Model: "sick", Fault: "times=*;rst@head", visits: 2},
	{code: "upstream_failed", Name: "nobody listens", status: 502, again: true, Model: "dead"},
	{code: "source_not_fenced", status: 503, again: true, Model: "proxied", Fault: "status@head:502", visits: 1},
	{code: "retry_budget_exhausted", status: 503, again: true, Model: "broke", Fault: "rst@head", visits: 1},
	{code: "retry_too_expensive", status: 503, again: true, Model: "dear", Pad: 400, Fault: "rst@head", visits: 1},
	{code: "shutting_down", status: 503, again: true, drains: true},
	{code: "upstream_timeout", status: 504, again: true, Model: "late", Fault: "stall@head", visits: 1},
}

// prepare fills in what is common and where the gateways are.
func prepare(all []scenario, base, url, draining string) {
	for i := range all {
		s := &all[i]
		switch s.Model {
		case "":
			s.Model = "main"
		case "-":
			s.Model = ""
		}
		if s.finish == "" {
			s.finish = "stop"
		}
		if s.ends == interrupted {
			s.code = "upstream_decode_interrupted"
		}
		if s.ends != refused && s.visits == 0 {
			s.visits = 1
		}
		if s.path == "" {
			s.path = base
		}
		s.URL = url + s.path
		if s.drains {
			s.URL = draining + s.path
		}
	}
}

// seen is what the application saw.
type seen struct {
	Name   string
	Text   string
	Finish string
	Tools  []struct {
		Name string
		Args struct{ T string }
	}
	Usage    int // completion tokens; 0: none told
	Error    *failure
	Requests []request
}

// failure is an SDK's error; what it does not have is zero.
type failure struct {
	Class, Message string
	Code           any
	Type           string
	Status         int
	RequestID      string
	Detail         any // the error object of the gateway, as far as the SDK shows it
}

func (f *failure) String() string {
	return fmt.Sprintf("%s code=%v type=%s status=%d request=%q detail=%v: %.200s", f.Class, f.Code, f.Type, f.Status, f.RequestID, f.Detail, f.Message)
}

// detail is one field of the error object.
func (f *failure) detail(name string) any {
	object, _ := f.Detail.(map[string]any)
	return object[name]
}

// request is one request that the SDK made. Times are in milliseconds.
type request struct {
	At, Answered float64
	Retry        string // its own count of resends, if it tells
	Status       int
	ID           string
	Reason       string // Headgate-Reason
	Again        string // x-should-retry
	Wait         float64
}
