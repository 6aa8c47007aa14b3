// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

// sdk is OpenAI's own client, with its retries as they are.
func (r *rig) sdk() openai.Client {
	return openai.NewClient(option.WithBaseURL(r.url+"/v1"), option.WithAPIKey("none"), option.WithHTTPClient(r.client))
}

func params(tokens int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:         "tiny",
		MaxTokens:     openai.Int(tokens),
		LogitBias:     map[string]int64{"2": -100},
		StreamOptions: openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)},
		Messages:      []openai.ChatCompletionMessageParamUnion{openai.UserMessage("What does the gateway do?")},
	}
}

func TestOpenAIStream(t *testing.T) {
	r := newRig(t, "fast")
	client := r.sdk()
	stream := client.Chat.Completions.NewStreaming(r.ctx, params(30))
	defer stream.Close()
	var all openai.ChatCompletionAccumulator
	for stream.Next() {
		if !all.AddChunk(stream.Current()) {
			t.Fatalf("a chunk that is not of the answer: %s", stream.Current().RawJSON())
		}
	}
	r.must(stream.Err())
	if all.Usage.CompletionTokens != 30 || len(all.Choices) != 1 || all.Choices[0].FinishReason != "length" {
		t.Errorf("%+v", all.ChatCompletion)
	}
	if n := len(r.posts()); n != 1 {
		t.Errorf("%d POSTs reached the engines", n)
	}
}

func TestOpenAIWholeAnswer(t *testing.T) {
	r := newRig(t, "fast")
	client := r.sdk()
	p := params(30)
	p.StreamOptions = openai.ChatCompletionStreamOptionsParam{}
	got, err := client.Chat.Completions.New(r.ctx, p)
	r.must(err)
	if got.Usage.CompletionTokens != 30 || len(got.Choices) != 1 || got.Choices[0].Message.Content == "" {
		t.Errorf("%s", got.RawJSON())
	}
	if n := len(r.posts()); n != 1 {
		t.Errorf("%d POSTs reached the engines", n)
	}
}

// An interrupted stream is an error in the SDK, with our code, and makes it
// send nothing again.
func TestOpenAIInterruptedStream(t *testing.T) {
	r := newRig(t, "slow")
	client := r.sdk()
	stream := client.Chat.Completions.NewStreaming(r.ctx, params(1500))
	defer stream.Close()
	text, died := "", false
	for stream.Next() {
		for _, c := range stream.Current().Choices {
			text += c.Delta.Content
		}
		if text != "" && !died {
			died = true
			first, _ := r.busy()
			first.kill()
		}
	}
	if err := stream.Err(); err == nil || !strings.Contains(err.Error(), "upstream_decode_interrupted") {
		t.Errorf("the SDK says %v after %q", err, text)
	} else {
		t.Log(err)
	}
	if n := len(r.posts()); n != 1 {
		t.Errorf("%d POSTs reached the engines", n)
	}
	for _, e := range r.replicas {
		if len(e.Posts()) == 0 {
			r.wantUntouched(e)
		}
	}
}

// A death before the first delta is nothing that the SDK sees.
func TestOpenAIDoesNotSeeARetry(t *testing.T) {
	r := newRig(t, "slow")
	client := r.sdk()
	p := params(20)
	p.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage(longPrompt)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if first, _ := r.busy(); first.Engine != nil {
			first.kill()
		}
	}()
	stream := client.Chat.Completions.NewStreaming(r.ctx, p)
	defer stream.Close()
	var all openai.ChatCompletionAccumulator
	for stream.Next() {
		if !all.AddChunk(stream.Current()) {
			t.Errorf("a chunk that is not of the answer: %s", stream.Current().RawJSON())
		}
	}
	r.must(stream.Err())
	<-done
	if all.Usage.CompletionTokens != 20 {
		t.Errorf("%+v", all.ChatCompletion)
	}
	if n := len(r.posts()); n != 2 {
		t.Errorf("%d POSTs reached the engines, want 2", n)
	}
}
