// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"net/url"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/upstream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestStateChangesAfterEnoughProbesInARow(t *testing.T) {
	tr := tracker{unhealthyAfter: 2, healthyAfter: 3}
	for i, step := range []struct {
		seen    inference.Health
		changed bool
		state   inference.Health
	}{
		{inference.Healthy, false, inference.Healthy},
		{inference.Unhealthy, false, inference.Healthy},
		{inference.Healthy, false, inference.Healthy},
		{inference.Unhealthy, false, inference.Healthy},
		{inference.Gone, true, inference.Gone}, // not healthy twice in a row; the newest says how
		{inference.Gone, false, inference.Gone},
		{inference.Unhealthy, true, inference.Unhealthy},
		{inference.Healthy, false, inference.Unhealthy},
		{inference.Healthy, false, inference.Unhealthy},
		{inference.Gone, false, inference.Unhealthy},
		{inference.Healthy, false, inference.Unhealthy},
		{inference.Healthy, false, inference.Unhealthy},
		{inference.Healthy, true, inference.Healthy},
	} {
		if changed := tr.observe(step.seen); changed != step.changed || tr.state != step.state {
			t.Fatalf("step %d: changed %v to %s, want %v to %s", i, changed, tr.state, step.changed, step.state)
		}
	}
}

// probe watches an engine and returns its states as they change.
func probe(t *testing.T, e *simengine.Engine, c Config) <-chan inference.Health {
	t.Helper()
	return probeLost(t, e, c, nil)
}

// probeLost is probe with somebody who may tell that the engine is gone.
func probeLost(t *testing.T, e *simengine.Engine, c Config, lost <-chan struct{}) <-chan inference.Health {
	t.Helper()
	u, err := url.Parse(e.URL())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := upstream.New(upstream.Config{URL: u, ConnectTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	states := make(chan inference.Health, 100)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Probe(ctx, Engine{Conn: conn, Lost: lost}, c, func(s inference.Health) { states <- s })
	}()
	t.Cleanup(func() { cancel(); <-done; conn.Close() })
	return states
}

func await(t *testing.T, states <-chan inference.Health, want inference.Health) {
	t.Helper()
	for {
		select {
		case s := <-states:
			if s == want {
				return
			}
		case <-time.After(time.Minute):
			t.Fatalf("never %s", want)
		}
	}
}

func engine(t *testing.T) *simengine.Engine {
	t.Helper()
	e, err := simengine.Listen(simengine.Config{Name: "A"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

var quick = Config{Path: "/health", Interval: 5 * time.Millisecond, Timeout: time.Second, UnhealthyAfter: 2, HealthyAfter: 2}

func TestEngineIsSeenToFailDieAndComeBack(t *testing.T) {
	e := engine(t)
	states := probe(t, e, quick)
	if err := e.Inject("times=3;path=/health;status@head:503:empty"); err != nil {
		t.Fatal(err)
	}
	await(t, states, inference.Unhealthy)
	await(t, states, inference.Healthy)
	e.Kill()
	await(t, states, inference.Gone)
	if err := e.Restart(nil); err != nil {
		t.Fatal(err)
	}
	await(t, states, inference.Healthy)
}

// A live API in front of a dead engine: /health is fine, generation is not.
func TestDeadEngineBehindALiveAPIIsFound(t *testing.T) {
	e := engine(t)
	c := quick
	c.GenerateEvery = 50 * time.Millisecond
	if err := e.Inject("times=*;path=/v1/completions;status@head:500"); err != nil {
		t.Fatal(err)
	}
	await(t, probe(t, e, c), inference.Unhealthy)
}

// An engine that starts accepts connections before it serves, and comes and goes.
func TestAnEngineThatStartsIsGoneUntilItServes(t *testing.T) {
	e := engine(t)
	c := quick
	c.Starts, c.HealthyAfter = true, 1
	if err := e.Inject("times=3;path=/health;status@head:503:empty"); err != nil {
		t.Fatal(err)
	}
	lost := make(chan struct{})
	states := probeLost(t, e, c, lost)
	next := func(want inference.Health) {
		t.Helper()
		select {
		case s := <-states:
			if s != want {
				t.Fatalf("got %s, want %s", s, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("never %s", want)
		}
	}
	next(inference.Gone)
	next(inference.Healthy)
	if err := e.Inject("times=3;path=/health;status@head:503:empty"); err != nil {
		t.Fatal(err)
	}
	next(inference.Unhealthy)
	next(inference.Healthy)
	e.Kill()
	next(inference.Gone)
	if err := e.Restart(nil); err != nil {
		t.Fatal(err)
	}
	next(inference.Healthy)
	// Whoever was told that it is gone is told that it is not.
	lost <- struct{}{}
	next(inference.Healthy)
}

func TestAnEngineThatIsAwaitedIsLookedForOften(t *testing.T) {
	c := Config{Interval: time.Minute, UnhealthyAfter: 2, HealthyAfter: 1, Starts: true}
	tr := newTracker(c)
	if got := tr.interval(c.Interval); got != startsEvery {
		t.Errorf("every %v", got)
	}
	tr.observe(inference.Healthy)
	if got := tr.interval(c.Interval); got != time.Minute {
		t.Errorf("every %v when it is there", got)
	}
	tr = newTracker(Config{UnhealthyAfter: 1})
	tr.observe(inference.Gone)
	if got := tr.interval(time.Minute); got != time.Minute {
		t.Errorf("every %v where it is not awaited", got)
	}
}
