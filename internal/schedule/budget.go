// SPDX-License-Identifier: Apache-2.0

package schedule

import "time"

// budgetWindow is how much of the past the budget's cap reflects, in seconds.
const budgetWindow = 10

// BudgetConfig says how many retries a pool may cause, so that a mass failure
// does not become a storm of repeated prefills.
type BudgetConfig struct {
	Ratio        float64 // added by each first attempt
	MinPerSecond float64 // added by each second
}

// budget is a token bucket. A first attempt adds Ratio, a second MinPerSecond,
// a retry takes one; it never holds more than the last ten seconds would have
// added, so that a quiet night saves nothing up for the morning's failure.
type budget struct {
	config BudgetConfig
	tokens float64
	second int64               // the newest second seen
	firsts [budgetWindow]int64 // first attempts in each of the last seconds
	filled time.Time           // when time was last turned into tokens
}

func newBudget(c BudgetConfig) budget {
	return budget{config: c, tokens: c.MinPerSecond * budgetWindow}
}

// configure changes what is added from here on. A bucket that was never
// configured is filled.
func (b *budget) configure(c BudgetConfig) {
	fresh := b.config == BudgetConfig{} && b.filled.IsZero()
	b.config = c
	if fresh {
		b.tokens = c.MinPerSecond * budgetWindow
	}
	b.tokens = min(b.tokens, b.limit())
}

// first notes a first attempt.
func (b *budget) first(now time.Time) {
	b.advance(now)
	b.firsts[b.second%budgetWindow]++
	b.tokens = min(b.tokens+b.config.Ratio, b.limit())
}

// take spends one retry, if there is one.
func (b *budget) take(now time.Time) bool {
	b.advance(now)
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// advance turns the time since the last call into tokens and drops what has
// left the window. A clock that went backwards adds nothing.
func (b *budget) advance(now time.Time) {
	if b.filled.IsZero() {
		b.filled, b.second = now, now.Unix()
		return
	}
	elapsed := now.Sub(b.filled)
	if elapsed <= 0 {
		return
	}
	b.filled = now
	for s := max(b.second+1, now.Unix()-budgetWindow+1); s <= now.Unix(); s++ {
		b.firsts[s%budgetWindow] = 0
	}
	b.second = max(b.second, now.Unix())
	b.tokens = min(b.tokens+elapsed.Seconds()*b.config.MinPerSecond, b.limit())
}

func (b *budget) limit() float64 {
	var firsts int64
	for _, n := range b.firsts {
		firsts += n
	}
	return b.config.MinPerSecond*budgetWindow + b.config.Ratio*float64(firsts)
}
