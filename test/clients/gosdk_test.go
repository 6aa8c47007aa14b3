// SPDX-License-Identifier: Apache-2.0

package clients_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	openai "github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
	goopenai "github.com/sashabaranov/go-openai"
)

// recorder is a transport that notes every request: an SDK's own resends are
// made through it and show here. It adds the scenario's headers, for the SDK
// that has no option for that.
type recorder struct {
	header   http.Header
	requests []request
}

func (r *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	maps.Copy(req.Header, r.header)
	i := len(r.requests)
	r.requests = append(r.requests, request{At: now(), Retry: req.Header.Get("X-Stainless-Retry-Count")})
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	noted := &r.requests[i]
	noted.Answered, noted.Status, noted.ID = now(), res.StatusCode, res.Header.Get("X-Request-Id")
	noted.Reason, noted.Again = res.Header.Get("Headgate-Reason"), res.Header.Get("X-Should-Retry")
	noted.Wait, _ = strconv.ParseFloat(res.Header.Get("Retry-After-Ms"), 64)
	return res, nil
}

var started = time.Now()

func now() float64 { return float64(time.Since(started).Microseconds()) / 1000 }

// playLanes is lanes.cjs in Go: lanes run at once, the scenarios of a lane in
// turn.
func playLanes(t *testing.T, all []scenario, play func(context.Context, scenario, *http.Client, *seen, func()) error, describe func(error) failure) []seen {
	lanes := map[string][]scenario{}
	for _, s := range all {
		lanes[s.Lane] = append(lanes[s.Lane], s)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var list []seen
	for _, lane := range lanes {
		wg.Go(func() {
			for _, s := range lane {
				got := playOne(t.Context(), s, play, describe)
				mu.Lock()
				list = append(list, got)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return list
}

func playOne(ctx context.Context, s scenario, play func(context.Context, scenario, *http.Client, *seen, func()) error, describe func(error) failure) seen {
	ctx, leave := context.WithTimeout(ctx, time.Minute)
	defer leave()
	if s.LeaveAfter > 0 {
		timer := time.AfterFunc(time.Duration(s.LeaveAfter)*time.Millisecond, leave)
		defer timer.Stop()
	}
	pieces := 0
	piece := func() {
		if pieces++; pieces == s.LeaveAt {
			leave()
		}
	}
	r := &recorder{header: http.Header{"X-Check-Tag": {s.Name}}}
	if s.Fault != "" {
		r.header.Set("X-Sim-Fault", s.Fault)
	}
	for name, value := range s.Headers {
		r.header.Set(name, value)
	}
	got := seen{Name: s.Name}
	if err := play(ctx, s, &http.Client{Transport: r}, &got, piece); err != nil {
		f := describe(err)
		f.Message = err.Error()
		got.Error = &f
	}
	got.Requests = r.requests
	return got
}

func (s scenario) prompt() string {
	if s.Tool != "" {
		return "call:" + s.Tool
	}
	return "hello" + strings.Repeat(" x", s.Pad/2)
}

// addTool adds a call whose arguments may be in pieces to those seen.
func (s *seen) addTool(name, args string) error {
	s.Tools = append(s.Tools, struct {
		Name string
		Args struct{ T string }
	}{Name: name})
	return json.Unmarshal([]byte(args), &s.Tools[len(s.Tools)-1].Args)
}

var toolSchema = map[string]any{
	"type": "object", "properties": map[string]any{"t": map[string]any{"type": "string"}}, "required": []string{"t"},
}

func playOpenAIGo(t *testing.T, all []scenario) []seen {
	return playLanes(t, all, askOpenAIGo, describeOpenAIGo)
}

func askOpenAIGo(ctx context.Context, s scenario, h *http.Client, got *seen, piece func()) error {
	client := openai.NewClient(option.WithBaseURL(s.URL), option.WithAPIKey("none"), option.WithMaxRetries(s.Retries), option.WithHTTPClient(h))
	ask := openai.ChatCompletionNewParams{
		Model:    s.Model,
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(s.prompt())},
	}
	if s.Tokens > 0 {
		ask.MaxTokens = openai.Int(int64(s.Tokens))
	}
	if s.Tool != "" {
		ask.Tools = []openai.ChatCompletionToolUnionParam{
			openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{Name: s.Tool, Parameters: toolSchema}),
		}
	}
	if !s.Stream {
		answer, err := client.Chat.Completions.New(ctx, ask)
		if err != nil {
			return err
		}
		choice := answer.Choices[0]
		got.Text, got.Finish, got.Usage = choice.Message.Content, choice.FinishReason, int(answer.Usage.CompletionTokens)
		for _, call := range choice.Message.ToolCalls {
			if err := got.addTool(call.Function.Name, call.Function.Arguments); err != nil {
				return err
			}
		}
		return nil
	}
	if s.Usage {
		ask.StreamOptions.IncludeUsage = openai.Bool(true)
	}
	stream := client.Chat.Completions.NewStreaming(ctx, ask)
	defer stream.Close()
	var whole openai.ChatCompletionAccumulator
	for stream.Next() {
		chunk := stream.Current()
		if !whole.AddChunk(chunk) {
			return errors.New("the accumulator refused a chunk")
		}
		if len(chunk.Choices) > 0 && chunk.Choices[0].Delta.Content != "" {
			got.Text += chunk.Choices[0].Delta.Content
			piece()
		}
	}
	if err := stream.Err(); err != nil {
		return err
	}
	got.Finish, got.Usage = whole.Choices[0].FinishReason, int(whole.Usage.CompletionTokens)
	for _, call := range whole.Choices[0].Message.ToolCalls {
		if err := got.addTool(call.Function.Name, call.Function.Arguments); err != nil {
			return err
		}
	}
	return nil
}

func describeOpenAIGo(err error) failure {
	if e, ok := errors.AsType[*openai.Error](err); ok {
		f := failure{Class: "*openai.Error", Code: e.Code, Type: e.Type, Status: e.StatusCode, RequestID: e.Response.Header.Get("X-Request-Id")}
		_ = json.Unmarshal([]byte(e.RawJSON()), &f.Detail)
		return f
	}
	e, ok := errors.AsType[*ssestream.StreamError](err)
	if !ok {
		return failure{Class: fmt.Sprintf("%T", err)}
	}
	f := failure{Class: "*ssestream.StreamError"}
	var body struct{ Error map[string]any }
	_ = json.Unmarshal(e.Event.Data, &body)
	f.Detail, f.Code = body.Error, body.Error["code"]
	f.Type, _ = body.Error["type"].(string)
	return f
}

func playGoOpenAI(t *testing.T, all []scenario) []seen {
	return playLanes(t, all, askGoOpenAI, describeGoOpenAI)
}

func askGoOpenAI(ctx context.Context, s scenario, h *http.Client, got *seen, piece func()) error {
	config := goopenai.DefaultConfig("none")
	config.BaseURL, config.HTTPClient = s.URL, h
	client := goopenai.NewClientWithConfig(config)
	ask := goopenai.ChatCompletionRequest{
		Model: s.Model, MaxCompletionTokens: s.Tokens,
		Messages: []goopenai.ChatCompletionMessage{{Role: "user", Content: s.prompt()}},
	}
	if s.Tool != "" {
		ask.Tools = []goopenai.Tool{{Type: "function", Function: &goopenai.FunctionDefinition{Name: s.Tool, Parameters: toolSchema}}}
	}
	if !s.Stream {
		answer, err := client.CreateChatCompletion(ctx, ask)
		if err != nil {
			return err
		}
		choice := answer.Choices[0]
		got.Text, got.Finish, got.Usage = choice.Message.Content, string(choice.FinishReason), answer.Usage.CompletionTokens
		for _, call := range choice.Message.ToolCalls {
			if err := got.addTool(call.Function.Name, call.Function.Arguments); err != nil {
				return err
			}
		}
		return nil
	}
	if s.Usage {
		ask.StreamOptions = &goopenai.StreamOptions{IncludeUsage: true}
	}
	stream, err := client.CreateChatCompletionStream(ctx, ask)
	if err != nil {
		return err
	}
	defer stream.Close()
	name, args := "", ""
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if chunk.Usage != nil {
			got.Usage = chunk.Usage.CompletionTokens
		}
		if len(chunk.Choices) == 0 {
			continue
		}
		choice := chunk.Choices[0]
		if choice.FinishReason != "" {
			got.Finish = string(choice.FinishReason)
		}
		for _, call := range choice.Delta.ToolCalls {
			name += call.Function.Name
			args += call.Function.Arguments
		}
		if choice.Delta.Content != "" {
			got.Text += choice.Delta.Content
			piece()
		}
	}
	if name != "" {
		return got.addTool(name, args)
	}
	return nil
}

func describeGoOpenAI(err error) failure {
	e, ok := errors.AsType[*goopenai.APIError](err)
	if !ok {
		return failure{Class: fmt.Sprintf("%T", err)}
	}
	return failure{Class: "*openai.APIError", Code: e.Code, Type: e.Type, Status: e.HTTPStatusCode}
}
