// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/http"
	"strconv"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/rate"
)

// allowances are what the keys with limits may use, by their ids. Those that stay
// keep what was used.
func allowances(now time.Time, limits map[string]rate.Limits, old map[string]*rate.Allowance) map[string]*rate.Allowance {
	next := make(map[string]*rate.Allowance, len(limits))
	for key, l := range limits {
		a := old[key]
		if a == nil {
			a = rate.New(now, l)
		} else {
			a.Configure(now, l)
		}
		next[key] = a
	}
	return next
}

// metered is an Exchange whose request uses up the allowance of its key. However
// it is answered, the answer tells what is left.
type metered struct {
	Exchange
	key       string
	allowance *rate.Allowance // nil: the key has no limits
	charge    *rate.Charge    // nil until the request was let in
}

// check refuses a request whose size does not matter any more.
func (m *metered) check() *rate.Refusal {
	if m.allowance == nil {
		return nil
	}
	return m.allowance.Check(time.Now())
}

// take charges a request that was read.
func (m *metered) take(prompt, outputMax int) (refusal *rate.Refusal) {
	if m.allowance == nil {
		return nil
	}
	m.charge, refusal = m.allowance.Take(time.Now(), prompt, outputMax)
	return refusal
}

func (g *Gateway) rateLimited(m *metered, refusal *rate.Refusal) *inference.Error {
	g.record.RateLimited(m.key, refusal.Limit)
	return refusal.Error()
}

// void gives back what is still charged: the request came to nothing.
func (m *metered) void() {
	if m.charge != nil {
		m.charge.Void(time.Now())
	}
}

func (m *metered) WriteHead(status int, header http.Header) {
	if m.allowance != nil {
		showLevels(header, m.allowance, time.Now())
	}
	m.Exchange.WriteHead(status, header)
}

// showLevels sets the headers that clients of OpenAI's API know. An engine's own
// would speak of something else.
func showLevels(h http.Header, a *rate.Allowance, now time.Time) {
	requests, tokens := a.Levels(now)
	for _, l := range []struct {
		what string
		rate.Level
	}{{"Requests", requests}, {"Tokens", tokens}} {
		limit, remaining, reset := "X-Ratelimit-Limit-"+l.what, "X-Ratelimit-Remaining-"+l.what, "X-Ratelimit-Reset-"+l.what
		if l.Limit == 0 {
			delete(h, limit)
			delete(h, remaining)
			delete(h, reset)
			continue
		}
		h[limit] = []string{strconv.Itoa(l.Limit)}
		h[remaining] = []string{strconv.Itoa(l.Remaining)}
		h[reset] = []string{(l.Reset + time.Millisecond - 1).Truncate(time.Millisecond).String()}
	}
}

// bill charges what the request came to: what the engine reports, else what was
// estimated and delivered. What no engine answered is not charged.
func (f *flight) bill(outcome inference.Outcome) {
	if f.meter.charge == nil || f.try == nil || outcome == inference.Failed || outcome == inference.Rejected {
		return
	}
	prompt, output := f.req.PromptTokens.N, f.aim.sent
	if usage, known := f.usage(); known {
		if usage.Prompt >= 0 {
			prompt = usage.Prompt
		}
		if usage.Completion >= 0 {
			output = usage.Completion
		}
	}
	f.meter.charge.Settle(time.Now(), prompt, output)
}
