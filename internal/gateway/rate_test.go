// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// limited is a configuration with a key for each of the limits, by the key's id,
// which is its secret too.
func limited(urls []string, limits map[string]string, settings ...string) string {
	yaml := "keys:\n"
	for id, limit := range limits {
		yaml += fmt.Sprintf("  - {id: %s, secret_sha256: %x, limits: {%s}}\n", id, sha256.Sum256([]byte(id)), limit)
	}
	yaml += "pools:\n  p:\n    discovery: {static: ["
	for _, u := range urls {
		yaml += fmt.Sprintf("{url: %q},", u)
	}
	yaml += "]}\n"
	for _, line := range settings {
		yaml += "    " + line + "\n"
	}
	return yaml
}

func (r reply) number(t *testing.T, header string) int {
	t.Helper()
	n, err := strconv.Atoi(r.header.Get(header))
	if err != nil {
		t.Fatalf("%s: %q", header, r.header.Get(header))
	}
	return n
}

func TestAKeyOverItsRequestsIsRefused(t *testing.T) {
	r, urls := newEngines(t, 1)
	r.startYAML(limited(urls, map[string]string{"slow": "requests_per_minute: 3", "free": ""}))
	for i := range 3 {
		got := r.post(chatPath, streamBody, "Authorization", "Bearer slow")
		if got.status != 200 || got.number(t, "X-Ratelimit-Limit-Requests") != 3 || got.number(t, "X-Ratelimit-Remaining-Requests") != 2-i {
			t.Fatalf("request %d: %+v", i, got)
		}
		if got.header.Get("X-Ratelimit-Limit-Tokens") != "" {
			t.Error("tells of a limit that is not there")
		}
	}
	refused := r.post(chatPath, wholeBody, "Authorization", "Bearer slow")
	if refused.status != 429 || refused.code() != "rate_limited" || refused.header.Get("Headgate-Reason") != "rate_limited" ||
		refused.header.Get("X-Should-Retry") != "true" || refused.header.Get("X-Ratelimit-Remaining-Requests") != "0" {
		t.Errorf("the fourth: %+v", refused)
	}
	// The third came at most seconds after the first, and each takes 20 s to come
	// back.
	if wait := refused.number(t, "Retry-After"); wait < 10 || wait > 20 {
		t.Errorf("Retry-After: %d", wait)
	}
	if reset, err := time.ParseDuration(refused.header.Get("X-Ratelimit-Reset-Requests")); err != nil || reset < 50*time.Second || reset > time.Minute {
		t.Errorf("reset %v, %v", reset, err)
	}
	if got := r.post(chatPath, wholeBody, "Authorization", "Bearer free"); got.status != 200 || got.header.Get("X-Ratelimit-Limit-Requests") != "" {
		t.Errorf("another key: %+v", got)
	}
	if n := r.totalReceived(); n != 4 {
		t.Errorf("engines received %d requests, want 4", n)
	}
	if got := r.records.limited(); fmt.Sprint(got) != "[slow/requests]" {
		t.Errorf("recorded %v", got)
	}
}

// Whoever is over a limit is refused before the body is read: it may be large.
func TestABodyOverALimitIsNotRead(t *testing.T) {
	r, urls := newEngines(t, 1)
	r.startYAML(limited(urls, map[string]string{"a": "tokens_per_minute: 100"}))
	if got := r.post(chatPath, streamBody, "Authorization", "Bearer a"); got.status != 200 {
		t.Fatalf("%+v", got)
	}
	large := fmt.Sprintf(`{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("word ", 1000))
	if got := r.post(chatPath, large, "Authorization", "Bearer a"); got.status != 429 {
		t.Fatalf("larger than what is left: %+v", got)
	}
	r.records.wait(t)
	r.records.wait(t)
	got := r.post(chatPath, `not even JSON`, "Authorization", "Bearer a")
	if got.status != 400 {
		t.Errorf("with something left, a bad body is a bad body: %+v", got)
	}
	r.records.wait(t)
	if got := r.post("/v1/messages", `{"model":"sim","max_tokens":1000,"messages":[{"role":"user","content":"hi"}]}`, "X-Api-Key", "a"); got.status != 429 {
		t.Errorf("on another surface, by another header: %+v", got)
	}
}

func TestTokensAreChargedAsTheyCameTo(t *testing.T) {
	r, urls := newEngines(t, 2)
	r.startYAML(limited(urls, map[string]string{"a": "tokens_per_minute: 6000"}))
	const body = `{"model":"sim","stream":%v,"messages":[{"role":"user","content":"hi"}]}`
	// 100 tokens come back each second: what is left is known no better than that.
	began, used := time.Now(), 0
	left := func(what, body string, want int, header ...string) reply {
		t.Helper()
		got := r.post(chatPath, body, append(header, "Authorization", "Bearer a")...)
		r.records.wait(t)
		back := int(time.Since(began).Seconds()*100) + 1
		// The guess for the request itself is charged at that time: 200 at first, and
		// less after some short answers.
		remaining := got.number(t, "X-Ratelimit-Remaining-Tokens")
		if least := 6000 - used - 220; remaining < least || remaining > least+150+back {
			t.Errorf("%s: %d tokens left, want %d to %d", what, remaining, least, least+150+back)
		}
		used += want
		return got
	}
	whole := left("the first", fmt.Sprintf(body, false), 0)
	var reported struct {
		Usage struct {
			Total int `json:"total_tokens"`
		}
	}
	if err := json.Unmarshal([]byte(whole.body), &reported); err != nil || reported.Usage.Total == 0 {
		t.Fatalf("%v in %s", err, whole.body)
	}
	used += reported.Usage.Total
	left("after a whole answer", fmt.Sprintf(body, true), reported.Usage.Total)
	long := `{"model":"sim","stream":true,"max_tokens":900,"messages":[{"role":"user","content":"hi"}]}`
	left("after a stream", long, 500, "X-Sim-Fault", "error@token:500")
	left("after a stream that broke", fmt.Sprintf(body, true), 0, "X-Sim-Fault", "times=2;status@head:500")
	left("after one that no engine answered", fmt.Sprintf(body, true), 0)
}

func TestLimitsOutliveAReloadAndFollowTheConfiguration(t *testing.T) {
	r, urls := newEngines(t, 1)
	r.startYAML(limited(urls, map[string]string{"a": "requests_per_minute: 1"}))
	ask := func() reply { return r.post(chatPath, wholeBody, "Authorization", "Bearer a") }
	if got := ask(); got.status != 200 {
		t.Fatalf("%+v", got)
	}
	r.reload(limited(urls, map[string]string{"a": "requests_per_minute: 1", "b": "requests_per_minute: 9"}))
	if got := ask(); got.status != 429 {
		t.Errorf("a reload gave back what was used: %+v", got)
	}
	r.reload(limited(urls, map[string]string{"a": ""}))
	if got := ask(); got.status != 200 || got.header.Get("X-Ratelimit-Limit-Requests") != "" {
		t.Errorf("without a limit: %+v", got)
	}
}

func TestABurstOfAKeyGetsExactlyItsLimit(t *testing.T) {
	r, urls := newEngines(t, 1)
	r.startYAML(limited(urls, map[string]string{"a": "requests_per_minute: 7"}))
	var mu sync.Mutex
	var all sync.WaitGroup
	seen := map[int]int{}
	for range 40 {
		all.Go(func() {
			got := r.post(chatPath, wholeBody, "Authorization", "Bearer a")
			mu.Lock()
			seen[got.status]++
			mu.Unlock()
		})
	}
	all.Wait()
	if seen[200] != 7 || seen[429] != 33 {
		t.Errorf("statuses %v, want 7 of 200 and 33 of 429", seen)
	}
}
