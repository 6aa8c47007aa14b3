// SPDX-License-Identifier: Apache-2.0

// Package rate keeps API keys within their limits of requests and tokens per
// minute.
//
// Each key has an Allowance: what it may use now. It fills up evenly and holds a
// minute's worth at most, so that in any span of t minutes a key gets no more
// than its limit times t+1. A request is charged an estimate of its tokens when
// it is let in, and what it came to when it ends. That may leave less than
// nothing, which the requests after it wait for.
//
// The package is a core with a lock: it is told the time. It refuses to know
// keys' secrets, queues and HTTP, and to remember anything across restarts.
package rate

import (
	"math"
	"sync"
	"time"

	"github.com/headgate/headgate/inference"
)

// Limits are what a key may use. Zero fields are no limit.
type Limits struct {
	RequestsPerMinute int
	TokensPerMinute   int // of prompts and answers
}

// Names of the limits, for metrics.
const (
	Requests = "requests"
	Tokens   = "tokens"
)

// outputGuess is the length of a key's answers in tokens until some were seen.
const outputGuess = 200

// outputShare is how much one answer moves the mean of a key's answers.
const outputShare = 0.1

// debtMax bounds how far below nothing an allowance goes, in minutes: what an
// engine reports is not to lock a key out for ever.
const debtMax = 60

// Allowance is what one key may use. It is safe for concurrent use. Make one with
// New.
type Allowance struct {
	mu       sync.Mutex // guards what is below
	requests bucket
	tokens   bucket
	output   float64 // mean length of answers
}

// New makes a full allowance.
func New(now time.Time, limits Limits) *Allowance {
	a := &Allowance{output: outputGuess}
	a.Configure(now, limits)
	return a
}

// Configure replaces the limits. What was used stays used.
func (a *Allowance) Configure(now time.Time, limits Limits) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests.configure(now, float64(limits.RequestsPerMinute))
	a.tokens.configure(now, float64(limits.TokensPerMinute))
}

// Refusal says which limit stands in the way of a request, and for how long if
// nothing else is asked for meanwhile.
type Refusal struct {
	Limit     string
	PerMinute int
	Wait      time.Duration
}

// Error is the refusal as clients are told. Retry-After is bounded, so the
// message has the whole wait.
func (r *Refusal) Error() *inference.Error {
	err := inference.Errorf(inference.RateLimited, "this API key may use %d %s per minute: there is room in %s",
		r.PerMinute, r.Limit, r.Wait.Truncate(100*time.Millisecond)+100*time.Millisecond)
	err.RetryAfter = r.Wait
	return err
}

// Check tells before a request is read whether it can't be let in now, whatever
// its size. It takes nothing.
func (a *Allowance) Check(now time.Time) *Refusal {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refusal(now, 1)
}

// Take lets a request in and charges it, or returns why not. prompt is an
// estimate; outputMax is the most tokens that the answer may have, 0 where it is
// not known. A request that is larger than a full allowance is let in when it is
// full.
func (a *Allowance) Take(now time.Time, prompt, outputMax int) (*Charge, *Refusal) {
	a.mu.Lock()
	defer a.mu.Unlock()
	output := a.output
	if outputMax > 0 {
		output = min(output, float64(outputMax))
	}
	n := max(float64(prompt)+output, 1)
	if r := a.refusal(now, n); r != nil {
		return nil, r
	}
	a.requests.take(1)
	a.tokens.take(n)
	return &Charge{allowance: a, tokens: n}, nil
}

func (a *Allowance) refusal(now time.Time, tokens float64) *Refusal {
	a.requests.fill(now)
	a.tokens.fill(now)
	requests, all := a.requests.wait(1), a.tokens.wait(tokens)
	switch {
	case requests <= 0 && all <= 0:
		return nil
	case requests >= all:
		return &Refusal{Requests, int(a.requests.perMinute), requests}
	}
	return &Refusal{Tokens, int(a.tokens.perMinute), all}
}

// Charge is what one request was charged, until it is settled.
type Charge struct {
	allowance *Allowance
	tokens    float64
	settled   bool // allowance.mu guards it
}

// Settle puts what a request came to in place of the estimate. Only the first
// call of Settle and Void counts.
func (c *Charge) Settle(now time.Time, prompt, output int) {
	c.correct(now, float64(max(prompt, 0))+float64(max(output, 0)), output)
}

// Void gives the tokens of a request back that no engine answered. It still
// counts as a request.
func (c *Charge) Void(now time.Time) { c.correct(now, 0, -1) }

func (c *Charge) correct(now time.Time, tokens float64, output int) {
	a := c.allowance
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.settled {
		return
	}
	c.settled = true
	a.tokens.fill(now)
	a.tokens.take(tokens - c.tokens)
	if output >= 0 {
		a.output += outputShare * (float64(output) - a.output)
	}
}

// Level is one limit at a moment. Limit is 0 where there is none, and then the
// rest means nothing.
type Level struct {
	Limit     int
	Remaining int
	Reset     time.Duration // until the allowance is full, if nothing is asked for
}

// Levels are a key's limits at a moment.
func (a *Allowance) Levels(now time.Time) (requests, tokens Level) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.requests.level(now), a.tokens.level(now)
}

// bucket holds what is left of one limit.
type bucket struct {
	perMinute float64 // and what it holds at most; 0: no limit
	left      float64
	at        time.Time
}

// near makes up for rounding: whoever comes back after exactly the wait that it
// was told is let in.
const near = 1e-6

func (b *bucket) configure(now time.Time, perMinute float64) {
	if b.perMinute == 0 {
		b.left, b.at = perMinute, now
	}
	b.fill(now)
	b.perMinute = perMinute
	b.left = min(b.left, perMinute)
}

// fill adds what has come since the last time. Time never goes back.
func (b *bucket) fill(now time.Time) {
	if since := now.Sub(b.at); since > 0 {
		b.left = min(b.left+since.Minutes()*b.perMinute, b.perMinute)
		b.at = now
	}
}

// wait is how long until so much is there; the bucket was filled just now.
func (b *bucket) wait(n float64) time.Duration {
	missing := min(n, b.perMinute) - b.left
	if b.perMinute == 0 || missing <= near {
		return 0
	}
	return time.Duration(math.Ceil(missing / b.perMinute * float64(time.Minute)))
}

// take removes n; less than nothing is given back.
func (b *bucket) take(n float64) {
	b.left = min(max(b.left-n, -debtMax*b.perMinute), b.perMinute)
}

func (b *bucket) level(now time.Time) Level {
	b.fill(now)
	return Level{Limit: int(b.perMinute), Remaining: int(max(b.left+near, 0)), Reset: b.wait(b.perMinute)}
}
