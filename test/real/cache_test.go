// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// account is what an engine says of one streamed answer, and how long its first
// output took.
type account struct {
	text           string
	prompt, cached int
	first          time.Duration
}

// stream sends a request for a streamed answer and reads it.
func (r *rig) stream(url, path string, body map[string]any) account {
	r.t.Helper()
	body["stream"], body["stream_options"] = true, map[string]bool{"include_usage": true}
	raw, err := json.Marshal(body)
	r.must(err)
	req, err := http.NewRequestWithContext(r.ctx, http.MethodPost, url+path, bytes.NewReader(raw))
	r.must(err)
	req.Header.Set("Content-Type", "application/json")
	began := time.Now()
	res, err := r.client.Do(req)
	r.must(err)
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(res.Body)
		r.t.Fatalf("status %d: %s", res.StatusCode, text)
	}
	out := account{cached: -1}
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var chunk struct {
			Choices []struct {
				Text  string
				Delta struct{ Content string }
			}
			Usage *struct {
				Prompt  int `json:"prompt_tokens"`
				Details struct {
					Cached *int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		r.must(json.Unmarshal([]byte(data), &chunk))
		for _, c := range chunk.Choices {
			if c.Text+c.Delta.Content != "" && out.first == 0 {
				out.first = time.Since(began)
			}
			out.text += c.Text + c.Delta.Content
		}
		if u := chunk.Usage; u != nil {
			out.prompt = u.Prompt
			if u.Details.Cached != nil {
				out.cached = *u.Details.Cached
			}
		}
	}
	r.must(lines.Err())
	if out.cached < 0 {
		r.t.Fatal("the engine does not tell what it had cached")
	}
	return out
}

// talk has conversations with a long beginning each, turn by turn, where send
// takes each turn somewhere. It returns the share of prompt tokens that engines
// had cached, and the times to first outputs after the first turns.
func talk(r *rig, send func(body map[string]any) account) (hits float64, firsts []time.Duration) {
	const conversations, turns = 5, 4 // an odd number, so that taking turns never comes out even
	said := make([][]map[string]string, conversations)
	prompt, cached := 0, 0
	for turn := range turns {
		for c := range said {
			if turn == 0 {
				said[c] = []map[string]string{{"role": "system", "content": fmt.Sprintf("Conversation %d. ", c) + strings.Repeat(fmt.Sprintf("Rule %d is to be kept. ", c), 40)}}
			}
			said[c] = append(said[c], map[string]string{"role": "user", "content": fmt.Sprintf("Question %d of conversation %d?", turn, c)})
			got := send(map[string]any{"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": said[c]})
			prompt, cached = prompt+got.prompt, cached+got.cached
			if turn > 0 {
				firsts = append(firsts, got.first)
			}
			said[c] = append(said[c], map[string]string{"role": "assistant", "content": got.text})
		}
	}
	slices.Sort(firsts)
	return float64(cached) / float64(prompt), firsts
}

// Behind the gateway a conversation finds its prompt in an engine's cache. Taking
// turns among the engines it often doesn't. How long first outputs take is told
// and not judged.
func TestConversationsFindTheirPromptsCached(t *testing.T) {
	r := newRig(t, "slow")
	ours, firsts := talk(r, func(body map[string]any) account { return r.stream(r.url, chatPath, body) })

	other, turn := newRig(t, "slow"), 0
	theirs, theirFirsts := talk(other, func(body map[string]any) account {
		turn++
		return other.stream("http://"+other.replicas[turn%2].Relay.Addr(), chatPath, body)
	})
	middle := func(d []time.Duration) time.Duration { return d[len(d)/2].Round(100 * time.Microsecond) }
	t.Logf("headgate: %.3f of prompt tokens cached, first output after %s (median) and %s (longest); round robin: %.3f, %s and %s",
		ours, middle(firsts), firsts[len(firsts)-1].Round(100*time.Microsecond), theirs, middle(theirFirsts), theirFirsts[len(theirFirsts)-1].Round(100*time.Microsecond))
	if ours < 0.6 || ours < theirs+0.1 {
		t.Errorf("engines had %.3f of the prompts cached, and %.3f with round robin", ours, theirs)
	}
}

// What an engine has cached, and where a prompt ends beside the borders of blocks
// by which the gateway knows it, changes no token of an answer.
func TestCachesChangeNoTokens(t *testing.T) {
	r := newRig(t, "slow")
	text := strings.Repeat("The quick brown fox jumps over the lazy dog. ", 40)
	ask := func(url string, end int, cache bool) account {
		return r.stream(url, "/v1/completions", map[string]any{
			"model": "tiny", "prompt": text[:end], "max_tokens": 12, "temperature": 0, "cache_prompt": cache, "logit_bias": map[string]int{"2": -100},
		})
	}
	const block = 256
	warm := 0
	for _, border := range []int{block, 2 * block, 4 * block} {
		for _, end := range []int{border - 2, border - 1, border, border + 1} {
			cold := ask("http://"+r.replicas[0].Relay.Addr(), end, false)
			if cold.cached != 0 {
				t.Fatalf("a cold prompt had %d tokens cached", cold.cached)
			}
			for range 2 {
				got := ask(r.url, end, true)
				warm += got.cached
				if got.text != cold.text {
					t.Errorf("%d bytes: with %d of %d tokens cached the answer is %q, cold %q", end, got.cached, got.prompt, got.text, cold.text)
				}
			}
		}
	}
	if warm == 0 {
		t.Error("nothing was ever cached")
	}
}
