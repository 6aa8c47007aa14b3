// SPDX-License-Identifier: Apache-2.0

package rate_test

import (
	"math"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/rate"
)

var start = time.Unix(1_700_000_000, 0)

func TestRequestsComeBackEvenly(t *testing.T) {
	a := rate.New(start, rate.Limits{RequestsPerMinute: 60})
	take := func(at time.Duration) *rate.Refusal {
		_, refusal := a.Take(start.Add(at), 10, 0)
		return refusal
	}
	for i := range 60 {
		if r := take(0); r != nil {
			t.Fatalf("request %d of a full allowance: %+v", i, r)
		}
	}
	if r := take(0); r == nil || *r != (rate.Refusal{Limit: rate.Requests, PerMinute: 60, Wait: time.Second}) {
		t.Fatalf("the 61st: %+v", r)
	}
	if r := take(time.Second - time.Millisecond); r == nil || r.Wait != time.Millisecond {
		t.Errorf("just before: %+v", r)
	}
	if r := take(time.Second); r != nil {
		t.Errorf("after the wait that was told: %+v", r)
	}
	// Idleness saves up a minute's worth and no more.
	for range 60 {
		if r := take(time.Hour); r != nil {
			t.Fatal(r)
		}
	}
	if take(time.Hour) == nil {
		t.Error("an hour of idleness saved up more than a minute's worth")
	}
}

func TestTokensAreCorrectedWhenTheyAreKnown(t *testing.T) {
	a := rate.New(start, rate.Limits{TokensPerMinute: 6000})
	remaining := func() int { _, tokens := a.Levels(start); return tokens.Remaining }
	charge, refusal := a.Take(start, 1000, 50)
	if refusal != nil || remaining() != 6000-1050 {
		t.Fatalf("%+v, %d left", refusal, remaining())
	}
	charge.Settle(start, 900, 10)
	if remaining() != 6000-910 {
		t.Errorf("%d left after it came to 910", remaining())
	}
	charge.Settle(start, 5000, 5000)
	charge.Void(start)
	if remaining() != 6000-910 {
		t.Errorf("%d left after it was settled again", remaining())
	}

	unanswered, _ := a.Take(start, 2000, 1)
	unanswered.Void(start)
	if remaining() != 6000-910 {
		t.Errorf("%d left after a request that came to nothing", remaining())
	}
	if r := a.Check(start); r != nil {
		t.Errorf("refuses: %+v", r)
	}

	// More than was guessed leaves less than nothing, and the next one waits for
	// all of it.
	long, _ := a.Take(start, 5000, 1)
	long.Settle(start, 5000, 1090)
	if r := a.Check(start); r == nil || r.Limit != rate.Tokens || r.Wait != 10*time.Second+10*time.Millisecond {
		t.Errorf("1000 tokens in debt: %+v", r)
	}
	if remaining() != 0 {
		t.Errorf("%d left, want none", remaining())
	}
}

func TestTheGuessFollowsTheKeysAnswers(t *testing.T) {
	a := rate.New(start, rate.Limits{TokensPerMinute: 1_000_000})
	now := start
	for range 100 {
		now = now.Add(time.Minute)
		charge, _ := a.Take(now, 0, 0)
		charge.Settle(now, 0, 4000)
	}
	now = now.Add(time.Minute)
	if _, r := a.Take(now, 0, 0); r != nil {
		t.Fatal(r)
	}
	if _, tokens := a.Levels(now); tokens.Remaining > 1_000_000-3900 || tokens.Remaining < 1_000_000-4000 {
		t.Errorf("%d tokens charged", 1_000_000-tokens.Remaining)
	}
}

func TestARequestLargerThanAnAllowanceGoesWhenItIsFull(t *testing.T) {
	a := rate.New(start, rate.Limits{TokensPerMinute: 100})
	if _, r := a.Take(start, 1000, 1); r != nil {
		t.Fatalf("with a full allowance: %+v", r)
	}
	_, r := a.Take(start, 1000, 1)
	if r == nil || r.Wait != 10*time.Minute+600*time.Millisecond {
		t.Fatalf("the next: %+v", r)
	}
	err := r.Error()
	if err.Code != inference.RateLimited || err.HTTPStatus() != 429 || err.Wait() != inference.RetryAfterMax {
		t.Errorf("%v, status %d, wait %v", err, err.HTTPStatus(), err.Wait())
	}
	if want := "this API key may use 100 tokens per minute: there is room in 10m0.7s"; err.Message != want {
		t.Errorf("says %q", err.Message)
	}
	if _, again := a.Take(start.Add(r.Wait), 1000, 1); again != nil {
		t.Errorf("after the wait that was told: %+v", again)
	}
}

func TestAnEnginesNonsenseLocksNobodyOutForEver(t *testing.T) {
	a := rate.New(start, rate.Limits{TokensPerMinute: 100})
	charge, _ := a.Take(start, 1, 1)
	charge.Settle(start, math.MaxInt, math.MaxInt)
	if r := a.Check(start); r == nil || r.Wait > time.Hour+time.Minute {
		t.Errorf("%+v", r)
	}
	// Nor does it make the guess for the next one useless for ever.
	if _, r := a.Take(start.Add(2*time.Hour), 1, 10); r != nil {
		t.Errorf("two hours later: %+v", r)
	}
}

func TestANewConfigurationKeepsWhatWasUsed(t *testing.T) {
	a := rate.New(start, rate.Limits{RequestsPerMinute: 10})
	for range 10 {
		a.Take(start, 0, 0)
	}
	a.Configure(start, rate.Limits{RequestsPerMinute: 20, TokensPerMinute: 300})
	if r := a.Check(start); r == nil || r.Wait != 3*time.Second {
		t.Errorf("a higher limit: %+v", r)
	}
	if requests, tokens := a.Levels(start); requests.Remaining != 0 || requests.Reset != time.Minute || tokens.Remaining != 300 || tokens.Reset != 0 {
		t.Errorf("%+v, %+v", requests, tokens)
	}
	a.Configure(start, rate.Limits{})
	for range 100 {
		if _, r := a.Take(start, 1e6, 0); r != nil {
			t.Fatalf("without a limit: %+v", r)
		}
	}
}

// Whatever is asked for, no span of time gets more than its limit and a minute's
// worth, the wait that a refusal tells is enough and not too much, and what was
// charged in the end is what requests came to.
func TestNoSpanGetsMoreThanItsLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limits := rate.Limits{
			RequestsPerMinute: rapid.IntRange(1, 1000).Draw(t, "rpm"),
			TokensPerMinute:   rapid.IntRange(1000, 1_000_000).Draw(t, "tpm"),
		}
		a := rate.New(start, limits)
		now, let, used := start, 0, 0.0
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(20*time.Second)).Draw(t, "pause")))
			prompt, outputMax := rapid.IntRange(0, 3000).Draw(t, "prompt"), rapid.IntRange(0, 500).Draw(t, "max")
			charge, refusal := a.Take(now, prompt, outputMax)
			if refusal != nil {
				if refusal.Wait <= 0 {
					t.Fatalf("refused with nothing to wait for: %+v", refusal)
				}
				if refusal.Wait > time.Millisecond {
					if _, r := a.Take(now.Add(refusal.Wait-time.Millisecond), prompt, outputMax); r == nil {
						t.Fatalf("a wait of %v was too long", refusal.Wait)
					}
				}
				now = now.Add(refusal.Wait)
				if charge, refusal = a.Take(now, prompt, outputMax); refusal != nil {
					t.Fatalf("after the wait that was told: %+v", refusal)
				}
			}
			let++
			output := rapid.IntRange(0, max(outputMax, 1)).Draw(t, "output")
			used += float64(prompt + output)
			charge.Settle(now, prompt, output)
		}
		span := now.Sub(start).Minutes() + 1
		if most := span * float64(limits.RequestsPerMinute); float64(let) > most+0.01 {
			t.Fatalf("%d requests in %.3f minutes and one", let, span)
		}
		// A request is let in with as much left as it is guessed to need; what the
		// last one came to beyond that is still owed.
		if most := span*float64(limits.TokensPerMinute) + 3500; used > most {
			t.Fatalf("%.0f tokens in %.3f minutes and one, most %.0f", used, span, most)
		}
	})
}

// Many requests of one key at one instant get exactly what there is.
func TestABurstGetsExactlyWhatThereIs(t *testing.T) {
	a := rate.New(start, rate.Limits{RequestsPerMinute: 50})
	var mu sync.Mutex
	let := 0
	var all sync.WaitGroup
	for range 500 {
		all.Go(func() {
			if _, r := a.Take(start, 1, 1); r == nil {
				mu.Lock()
				let++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if let != 50 {
		t.Errorf("%d of 500 were let in, want 50", let)
	}
}

func TestTimeNeverGoesBack(t *testing.T) {
	a := rate.New(start, rate.Limits{RequestsPerMinute: 1})
	a.Take(start, 0, 0)
	a.Check(start.Add(-time.Hour))
	if r := a.Check(start); r == nil || r.Wait != time.Minute {
		t.Errorf("%+v", r)
	}
}
