// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"net/url"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/upstream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestStateChangesAfterEnoughProbesInARow(t *testing.T) {
	tr := tracker{unhealthyAfter: 2, healthyAfter: 3}
	for i, step := range []struct {
		seen    State
		changed bool
		state   State
	}{
		{Up, false, Up},
		{Failing, false, Up},
		{Up, false, Up},
		{Failing, false, Up},
		{Gone, true, Gone}, // not up twice in a row; the newest says how
		{Gone, false, Gone},
		{Failing, true, Failing},
		{Up, false, Failing},
		{Up, false, Failing},
		{Gone, false, Failing},
		{Up, false, Failing},
		{Up, false, Failing},
		{Up, true, Up},
	} {
		if changed := tr.observe(step.seen); changed != step.changed || tr.state != step.state {
			t.Fatalf("step %d: changed %v to %s, want %v to %s", i, changed, tr.state, step.changed, step.state)
		}
	}
}

// probe watches an engine and returns its states as they change.
func probe(t *testing.T, e *simengine.Engine, c Config) <-chan State {
	t.Helper()
	u, err := url.Parse(e.URL())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := upstream.New(upstream.Config{URL: u, ConnectTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	states := make(chan State, 100)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Probe(ctx, conn, c, nil, func(s State) { states <- s })
	}()
	t.Cleanup(func() { cancel(); <-done; conn.Close() })
	return states
}

func await(t *testing.T, states <-chan State, want State) {
	t.Helper()
	for {
		select {
		case s := <-states:
			if s == want {
				return
			}
		case <-time.After(10 * time.Second):
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
	await(t, states, Failing)
	await(t, states, Up)
	e.Kill()
	await(t, states, Gone)
	if err := e.Restart(nil); err != nil {
		t.Fatal(err)
	}
	await(t, states, Up)
}

// A live API in front of a dead engine: /health is fine, generation is not.
func TestDeadEngineBehindALiveAPIIsFound(t *testing.T) {
	e := engine(t)
	c := quick
	c.GenerateEvery = 50 * time.Millisecond
	if err := e.Inject("times=*;path=/v1/completions;status@head:500"); err != nil {
		t.Fatal(err)
	}
	await(t, probe(t, e, c), Failing)
}
