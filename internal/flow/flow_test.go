// SPDX-License-Identifier: Apache-2.0

package flow_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule"
)

var start = time.Unix(1_000_000, 0)

// fleet is a pool with a number of places that all requests share. Its zero
// value has endpoints and no place.
type fleet struct {
	places  int
	idle    bool // some endpoint has nothing to do
	yielded int  // places that are not for requests that yield
	none    bool // no endpoint is there
	pause   time.Duration
	ahead   time.Duration
	own     time.Duration
	target  time.Duration
	stalled func(prompt int) float64
	closed  func(prompt int) bool // prefers an endpoint without room
	passed  int
	opens   time.Duration
	load    schedule.Load
}

func (f *fleet) Room() bool           { return f.places > 0 && !f.none }
func (f *fleet) Opens() time.Duration { return f.opens - 1 }
func (f *fleet) Load() schedule.Load {
	if f.load.Endpoints == 0 && !f.none {
		f.load.Endpoints = 1
	}
	if f.none {
		return schedule.Load{}
	}
	return f.load
}

func (f *fleet) Bid(ask *schedule.Ask) schedule.Bid {
	if f.none {
		return schedule.Bid{None: true, Pause: f.pause}
	}
	b := schedule.Bid{
		Endpoint: "http://engine", Open: f.places > 0, Idle: f.idle, Ahead: f.ahead, Own: f.own,
		Prefill: time.Duration(ask.Prompt.N) * 100 * time.Microsecond,
		Target:  f.target, Fresh: ask.Prompt.N, Output: 100,
	}
	if f.own == 0 {
		b.Own = b.Prefill
	}
	if ask.TTFT.Base > 0 {
		b.Target = ask.TTFT.Base
	}
	if f.closed != nil && f.closed(ask.Prompt.N) {
		b.Open = false
	}
	if ask.Yields && f.places <= f.yielded {
		b.Open = false
	}
	if f.stalled != nil {
		b.Stalled = f.stalled(ask.Prompt.N)
	}
	return b
}

func (f *fleet) Take(*schedule.Ask) *schedule.Reservation { f.places--; return &schedule.Reservation{} }
func (f *fleet) Pass(*schedule.Ask)                       { f.passed++ }

// rig drives a queue by hand.
type rig struct {
	t     *testing.T
	q     *flow.Queue
	fleet fleet
	now   time.Time
}

func newRig(t *testing.T, c flow.Config) *rig {
	return &rig{t: t, q: flow.New(c), now: start}
}

type option func(*flow.Request)

func priority(p int) option { return func(r *flow.Request) { r.Priority = p } }
func of(id string) option   { return func(r *flow.Request) { r.Fairness = id } }
func prompt(n int) option   { return func(r *flow.Request) { r.Ask.Prompt.N = n } }
func bytes(n int64) option  { return func(r *flow.Request) { r.Bytes = n } }
func within(d time.Duration) option {
	return func(r *flow.Request) { r.Deadline = r.Ask.Arrived.Add(d) }
}
func ttft(d time.Duration) option { return func(r *flow.Request) { r.Ask.TTFT.Base = d } }
func shedAt(queue, pool float64) option {
	return func(r *flow.Request) { r.ShedAt = flow.ShedAt{Queue: queue, Saturation: pool} }
}

// arrive sends a request and pumps. What is decided at once is in the answer.
func (g *rig) arrive(name string, options ...option) (*flow.Request, *inference.Error, []string) {
	g.t.Helper()
	r := &flow.Request{Owner: name, Ask: schedule.Ask{Arrived: g.now, Prompt: inference.Tokens{N: 100}}}
	for _, o := range options {
		o(r)
	}
	err := g.q.Arrive(g.now, r, &g.fleet)
	return r, err, g.pump()
}

// queue sends a request that must wait.
func (g *rig) queue(name string, options ...option) *flow.Request {
	g.t.Helper()
	r, err, decided := g.arrive(name, options...)
	if err != nil || len(decided) > 0 || !r.Waiting() {
		g.t.Fatalf("%s: error %v, decided %v, waiting %v; it should wait", name, err, decided, r.Waiting())
	}
	return r
}

// pump returns the names of those dispatched, and with their code of those refused.
func (g *rig) pump() (decided []string) {
	g.t.Helper()
	for _, d := range g.q.Pump(g.now, &g.fleet) {
		word := d.Request.Owner.(string)
		if d.Err != nil {
			word += ":" + string(d.Err.Code)
		}
		decided = append(decided, word)
	}
	if err := g.q.Check(); err != nil {
		g.t.Fatal(err)
	}
	return decided
}

// place makes room for n and pumps.
func (g *rig) place(n int) []string {
	g.t.Helper()
	g.fleet.places = n
	return g.pump()
}

func (g *rig) pass(d time.Duration) []string {
	g.t.Helper()
	g.now = g.now.Add(d)
	return g.pump()
}

func (g *rig) want(got []string, want ...string) {
	g.t.Helper()
	if !slices.Equal(got, want) {
		g.t.Fatalf("decided %v, want %v", got, want)
	}
}

func TestAnArrivalWithRoomIsDispatchedAtOnce(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.fleet.places = 2
	_, err, decided := g.arrive("a")
	if err != nil {
		t.Fatal(err)
	}
	g.want(decided, "a")
	if g.fleet.places != 1 {
		t.Errorf("%d places are left, want 1", g.fleet.places)
	}
}

func TestAFreedPlaceTakesAsManyAsFit(t *testing.T) {
	g := newRig(t, flow.Config{})
	for i := range 40 {
		g.queue(fmt.Sprint(i))
	}
	if got := g.place(25); len(got) != 25 || got[0] != "0" || got[24] != "24" {
		t.Errorf("decided %v, want the first 25 in order", got)
	}
}

func TestOrder(t *testing.T) {
	t.Run("higher bands go first", func(t *testing.T) {
		g := newRig(t, flow.Config{})
		g.queue("low", priority(-10))
		g.queue("mid")
		g.queue("high", priority(100))
		g.queue("high2", priority(100))
		g.want(g.place(9), "high", "high2", "mid", "low")
	})
	t.Run("flows take turns by tokens", func(t *testing.T) {
		g := newRig(t, flow.Config{})
		// A request of a costs 100+2*100, one of b 700+2*100.
		for i := range 4 {
			g.queue(fmt.Sprint("a", i), of("a"), prompt(100))
		}
		for i := range 4 {
			g.queue(fmt.Sprint("b", i), of("b"), prompt(700))
		}
		g.want(g.place(6), "a0", "b0", "a1", "a2", "a3", "b1")
	})
	t.Run("the nearest deadline goes first if asked for", func(t *testing.T) {
		g := newRig(t, flow.Config{EarliestDeadline: true})
		g.queue("whenever")
		g.queue("late", within(time.Minute))
		g.queue("soon", within(time.Second))
		g.queue("target", ttft(2*time.Second))
		g.want(g.place(9), "soon", "whenever", "target", "late")
	})
	t.Run("a retry goes ahead of its flow", func(t *testing.T) {
		g := newRig(t, flow.Config{RequestsMax: 2})
		g.fleet.places = 1
		r, _, _ := g.arrive("first")
		g.queue("second")
		g.queue("third")
		g.q.Return(g.now, r)
		g.want(g.pump())
		g.want(g.place(9), "first", "second", "third")
	})
}

func TestIdlenessSavesNothingUp(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.fleet.places = 1
	known, _, _ := g.arrive("known", of("a"))
	g.q.Done(known, 100, 100)
	for i := range 20 {
		g.queue(fmt.Sprint("a", i), of("a"))
	}
	g.place(10)
	// b asked for nothing all the while, and is level with a from here.
	for i := range 3 {
		g.queue(fmt.Sprint("b", i), of("b"))
	}
	g.want(g.place(6), "a10", "b0", "a11", "b1", "a12", "b2")
}

// What was guessed of another's first answer, and turns out too much, is not held
// against who comes meanwhile.
func TestANewcomerDoesNotPayForAGuess(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.fleet.places = 1
	first, _, _ := g.arrive("first", of("many"), prompt(10))
	for i := range 40 {
		g.queue(fmt.Sprint("many", i), of("many"), prompt(10))
	}
	g.queue("one", of("one"), prompt(10))
	g.q.Done(first, 10, 1) // and not 100
	got := g.place(2)
	if got[0] != "one" && got[1] != "one" {
		t.Errorf("decided %v", got)
	}
	// What is known by then is no guess any more: the next one is not put before
	// all that was served.
	g.queue("two", of("two"), prompt(10))
	got = g.place(3)
	if got[0] == "two" {
		t.Errorf("decided %v", got)
	}
}

// Answers of one flow are alike, so its next ones are charged as its last.
func TestAFlowIsChargedByItsOwnAnswers(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.fleet.places = 1
	known, _, _ := g.arrive("known", of("brief"))
	g.q.Done(known, 100, 5)
	for i := range 8 {
		g.queue(fmt.Sprint("brief", i), of("brief")) // 100 + 2*5
		g.queue(fmt.Sprint("usual", i), of("usual")) // 100 + 2*100
	}
	n := 0
	for _, name := range g.place(8) {
		if name[:5] == "brief" {
			n++
		}
	}
	if n != 6 {
		t.Errorf("%d of 8 were brief, want 6: they cost a third", n)
	}
}

func TestTheChargeIsCorrectedWhenARequestEnds(t *testing.T) {
	g := newRig(t, flow.Config{})
	var a []*flow.Request
	for i := range 6 {
		a = append(a, g.queue(fmt.Sprint("a", i), of("a")))
		g.queue(fmt.Sprint("b", i), of("b"))
	}
	g.want(g.place(2), "a0", "b0")
	// 100 tokens were expected of the answer and 1000 came: a has had three
	// requests' worth of what b has had, and more.
	g.q.Done(a[0], 100, 1000)
	g.want(g.place(5), "b1", "b2", "b3", "b4", "b5")
	g.want(g.place(2), "a1", "a2")
}

func TestALowBandGetsItsReserveAndNoMore(t *testing.T) {
	g := newRig(t, flow.Config{Bands: []flow.Band{{Priority: -10, Reserve: 0.1}}})
	low := 0
	for i := range 400 {
		g.queue(fmt.Sprint("h", i), priority(100))
		g.queue(fmt.Sprint("l", i), priority(-10))
	}
	for _, name := range g.place(220) {
		if name[0] == 'l' {
			low++
		}
	}
	if low < 21 || low > 23 {
		t.Errorf("the low band got %d of 220 places, want 22", low)
	}
	if got := g.q.Status(g.fleet.load, 0).Bands[1].Counts.Reserved; got != uint64(low) {
		t.Errorf("%d were counted as reserved, want %d", got, low)
	}
}

func TestAReserveIsNotSavedUp(t *testing.T) {
	g := newRig(t, flow.Config{Bands: []flow.Band{{Priority: 0, Reserve: 0.5}}})
	for i := range 100 {
		g.queue(fmt.Sprint("h", i), priority(1))
	}
	g.place(90)
	g.queue("l0")
	g.queue("l1")
	// Had it saved up, both would be first.
	g.want(g.place(4), "h90", "l0", "h91", "l1")
}

// A reserve that was owed something when it was taken away would pass higher bands.
func TestAReserveThatIsTakenAwayIsOwedNothing(t *testing.T) {
	g := newRig(t, flow.Config{Bands: []flow.Band{{Priority: 0, Reserve: 0.9}}})
	g.queue("l0")
	for i := range 4 {
		g.queue(fmt.Sprint("h", i), priority(1))
	}
	g.want(g.place(1), "h0")
	g.q.Configure(flow.Config{})
	g.want(g.place(4), "h1", "h2", "h3", "l0")
}

func TestLimits(t *testing.T) {
	code := func(err *inference.Error) inference.Code {
		if err == nil {
			return ""
		}
		return err.Code
	}
	t.Run("requests", func(t *testing.T) {
		g := newRig(t, flow.Config{RequestsMax: 2})
		g.queue("a")
		g.queue("b")
		_, err, decided := g.arrive("c")
		g.want(decided)
		if code(err) != inference.QueueFull || err.Wait() < time.Second || err.Wait() > 30*time.Second {
			t.Errorf("got %v after %v", err, err.Wait())
		}
	})
	t.Run("bytes", func(t *testing.T) {
		g := newRig(t, flow.Config{BytesMax: 100})
		g.queue("a", bytes(60))
		if _, err, _ := g.arrive("b", bytes(50)); code(err) != inference.QueueFull {
			t.Errorf("got %v", err)
		}
		g.queue("c", bytes(40))
	})
	t.Run("a band's own", func(t *testing.T) {
		g := newRig(t, flow.Config{RequestsMax: 10, Bands: []flow.Band{{Priority: 5, RequestsMax: 1}}})
		g.queue("a", priority(5))
		if _, err, _ := g.arrive("b", priority(5)); code(err) != inference.QueueFull {
			t.Errorf("got %v", err)
		}
		g.queue("c")
	})
	t.Run("lower bands give way, youngest first", func(t *testing.T) {
		g := newRig(t, flow.Config{RequestsMax: 3})
		g.queue("low1", priority(-1))
		g.queue("low2", priority(-1))
		g.queue("mid")
		_, err, decided := g.arrive("high", priority(1))
		if err != nil {
			t.Fatal(err)
		}
		g.want(decided, "low2:queue_full")
		g.want(g.place(9), "high", "mid", "low1")
	})
	t.Run("the greedy flow gives way", func(t *testing.T) {
		g := newRig(t, flow.Config{RequestsMax: 4})
		for i := range 4 {
			g.queue(fmt.Sprint("greedy", i), of("greedy"))
		}
		_, err, decided := g.arrive("modest", of("modest"))
		if err != nil {
			t.Fatal(err)
		}
		g.want(decided, "greedy3:queue_full")
		if _, err, _ := g.arrive("greedy5", of("greedy")); code(err) != inference.QueueFull {
			t.Errorf("the greedy flow got in: %v", err)
		}
	})
	t.Run("nobody gives way in vain", func(t *testing.T) {
		g := newRig(t, flow.Config{BytesMax: 100, RequestsMax: 10})
		g.queue("low", priority(-1), bytes(20))
		g.queue("mid", bytes(80))
		if _, err, decided := g.arrive("high", priority(0), bytes(60)); code(err) != inference.QueueFull || len(decided) > 0 {
			t.Errorf("got %v, decided %v", err, decided)
		}
		g.want(g.place(9), "mid", "low")
	})
	t.Run("a retry neither gives way nor is refused", func(t *testing.T) {
		g := newRig(t, flow.Config{RequestsMax: 1})
		g.fleet.places = 1
		r, _, _ := g.arrive("retry", priority(-1))
		g.queue("mid")
		g.q.Return(g.now, r)
		if _, err, _ := g.arrive("high", priority(1)); err == nil {
			t.Error("somebody gave way for high, and only mid could; then two wait beside it where one may")
		}
	})
}

func TestShedding(t *testing.T) {
	t.Run("batch when the queue is half full", func(t *testing.T) {
		g := newRig(t, flow.Config{RequestsMax: 4})
		g.queue("a")
		g.queue("batch1", priority(-10), shedAt(0.5, 0))
		if _, err, _ := g.arrive("batch2", priority(-10), shedAt(0.5, 0)); err == nil || err.Code != inference.Shed {
			t.Errorf("got %v", err)
		}
		g.queue("b")
	})
	t.Run("by saturation", func(t *testing.T) {
		g := newRig(t, flow.Config{})
		g.fleet.load = schedule.Load{Endpoints: 2, Prefill: 1900 * time.Millisecond}
		g.queue("below", shedAt(0, 0.99)) // 0.95 s of 2 s, per endpoint
		g.fleet.load.Prefill = 4 * time.Second
		if _, err, _ := g.arrive("over", shedAt(0, 0.99)); err == nil || err.Code != inference.Shed {
			t.Errorf("got %v", err)
		}
		g.fleet.load = schedule.Load{Endpoints: 2, Used: 0.5}
		g.queue("again", shedAt(0, 0.99))
		g.fleet.load.Used = 1
		if _, err, _ := g.arrive("full", shedAt(0, 0.99)); err == nil || err.Code != inference.Shed {
			t.Errorf("got %v", err)
		}
	})
	t.Run("lower bands do not saturate a higher one", func(t *testing.T) {
		g := newRig(t, flow.Config{})
		for i := range 30 {
			g.queue(fmt.Sprint("low", i), priority(-1), prompt(1000))
		}
		g.queue("high", priority(1), shedAt(0, 0.9))
		if _, err, _ := g.arrive("low", priority(-1), shedAt(0, 0.9)); err == nil {
			t.Error("3 s of prefill wait and 2 s saturate a pool")
		}
	})
	t.Run("at arrival when it can't begin in time", func(t *testing.T) {
		g := newRig(t, flow.Config{RefuseAt: 0.8})
		g.fleet.ahead = 1700 * time.Millisecond
		if _, err, _ := g.arrive("late", ttft(2*time.Second)); err == nil || err.Code != inference.Shed {
			t.Errorf("got %v", err)
		}
		g.fleet.ahead = 1500 * time.Millisecond
		r := g.queue("in time", ttft(2*time.Second))
		if r.Predicted() != 1510*time.Millisecond {
			t.Errorf("predicted %v", r.Predicted())
		}
	})
	t.Run("as soon as it can't begin in time any more", func(t *testing.T) {
		g := newRig(t, flow.Config{RefuseAt: 0.8})
		g.queue("a", ttft(2*time.Second)) // 10 ms of its own
		next, ok := g.q.Next()
		if want := start.Add(1590 * time.Millisecond); !ok || !next.Equal(want) {
			t.Errorf("next pump at %v, want %v", next.Sub(start), want.Sub(start))
		}
		g.want(g.pass(1589 * time.Millisecond))
		g.fleet.places = 1
		g.want(g.pass(2*time.Millisecond), "a:shed")
	})
	t.Run("a long prompt is not refused for its length", func(t *testing.T) {
		g := newRig(t, flow.Config{RefuseAt: 0.8})
		g.fleet.places = 1
		_, err, decided := g.arrive("long", ttft(2*time.Second), prompt(100_000)) // 10 s
		if err != nil {
			t.Fatal(err)
		}
		g.want(decided, "long")
		r := g.queue("long too", ttft(2*time.Second), prompt(100_000))
		g.want(g.pass(399 * time.Millisecond))
		g.want(g.pass(2*time.Millisecond), "long too:shed")
		_ = r
	})
	t.Run("a modest flow is not refused for a greedy one's backlog", func(t *testing.T) {
		g := newRig(t, flow.Config{RefuseAt: 0.8})
		for i := range 100 {
			g.queue(fmt.Sprint(i), of("greedy"), prompt(1000)) // 10 s
		}
		g.queue("modest", of("modest"), ttft(2*time.Second), prompt(1000))
		if _, err, _ := g.arrive("greedy", of("greedy"), ttft(2*time.Second), prompt(1000)); err == nil {
			t.Error("the greedy flow's own backlog does not count")
		}
	})
}

// Where something else than prefill is what requests wait for, how fast they leave
// the queue tells how long it takes.
func TestThePaceOfDispatchesIsBelieved(t *testing.T) {
	g := newRig(t, flow.Config{RequestsMax: 30, RefuseAt: 0.8})
	for i := range 30 {
		g.queue(fmt.Sprint(i), prompt(1)) // prefill is nothing
	}
	for range 12 {
		g.now = g.now.Add(time.Second)
		if got := g.place(1); len(got) != 1 {
			t.Fatalf("decided %v", got)
		}
	}
	if _, err, _ := g.arrive("hurry", prompt(1), ttft(10*time.Second)); err == nil || err.Code != inference.Shed ||
		err.Wait() < 16*time.Second || err.Wait() > 20*time.Second {
		t.Errorf("18 wait, one a second goes: got %v", err)
	}
	r := g.queue("has time", prompt(1), ttft(60*time.Second))
	if p := r.Predicted(); p < 16*time.Second || p > 20*time.Second {
		t.Errorf("predicted %v", p)
	}
}

func TestWaitingEnds(t *testing.T) {
	t.Run("by the band's ttl", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: time.Minute, Bands: []flow.Band{{Priority: 1, TTL: time.Second}}})
		g.queue("high", priority(1))
		g.queue("low")
		g.want(g.pass(time.Second), "high:queue_timeout")
		g.want(g.pass(58 * time.Second))
		g.want(g.pass(time.Second), "low:queue_timeout")
		if _, ok := g.q.Next(); ok {
			t.Error("an empty queue wants to be pumped")
		}
	})
	t.Run("by the client's deadline, and it is never dispatched after it", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: time.Minute})
		g.queue("a", within(time.Second))
		g.fleet.places = 1
		g.want(g.pass(time.Second), "a:deadline_exceeded")
		if _, err, _ := g.arrive("b", within(-time.Second)); err == nil || err.Code != inference.DeadlineExceeded {
			t.Errorf("got %v", err)
		}
	})
	t.Run("by the client's deadline, for a retry too", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: time.Second})
		g.fleet.places = 1
		r, _, _ := g.arrive("a", within(3*time.Second))
		g.now = g.now.Add(2 * time.Second)
		g.q.Return(g.now, r)
		g.want(g.pump()) // its time to wait begins anew
		g.now = g.now.Add(time.Second)
		g.fleet.places = 1
		g.want(g.pump(), "a:deadline_exceeded")
	})
	t.Run("because the client left", func(t *testing.T) {
		g := newRig(t, flow.Config{})
		a := g.queue("a")
		g.queue("b")
		if !g.q.Leave(a) || g.q.Leave(a) {
			t.Error("it left, once")
		}
		g.want(g.place(9), "b")
	})
	t.Run("because the gateway stops", func(t *testing.T) {
		g := newRig(t, flow.Config{})
		g.queue("a")
		g.queue("b", priority(1))
		g.q.Close(inference.ShuttingDown)
		if _, ok := g.q.Next(); !ok {
			t.Error("nobody would be told")
		}
		got := g.pump()
		slices.Sort(got)
		g.want(got, "a:shutting_down", "b:shutting_down")
		if _, err, _ := g.arrive("c"); err == nil || err.Code != inference.ShuttingDown {
			t.Errorf("got %v", err)
		}
	})
	t.Run("because the pool is deleted, for those under way too", func(t *testing.T) {
		g := newRig(t, flow.Config{})
		g.fleet.places = 1
		r, _, _ := g.arrive("under way")
		g.queue("a")
		g.q.Close(inference.NoEndpoints)
		g.q.Return(g.now, r)
		g.want(g.pump(), "a:no_endpoints", "under way:no_endpoints")
		if _, err, _ := g.arrive("b"); err == nil || err.Code != inference.NoEndpoints {
			t.Errorf("got %v", err)
		}
	})
}

func TestAPoolWithoutEndpoints(t *testing.T) {
	t.Run("refuses at once by default", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: time.Minute})
		g.fleet.none = true
		if _, err, _ := g.arrive("a"); err == nil || err.Code != inference.NoEndpoints {
			t.Errorf("got %v", err)
		}
	})
	t.Run("holds for the first endpoint, and keeps the order (FLW-1)", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: time.Second, EmptyTTL: time.Minute})
		g.fleet.none = true
		for i := range 20 {
			g.queue(fmt.Sprint(i))
		}
		g.want(g.pass(5 * time.Second))
		g.fleet.none, g.fleet.places = false, 3
		g.want(g.pump(), "0", "1", "2")
		g.want(g.pass(50 * time.Second))
		g.want(g.place(1), "3")
		if got := g.pass(10 * time.Second); len(got) != 16 || got[0] != "4:queue_timeout" {
			t.Errorf("decided %v", got)
		}
	})
	t.Run("gives those the usual time whom a late start would leave none", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: 10 * time.Second, EmptyTTL: time.Minute})
		g.fleet.none = true
		g.queue("a")
		g.want(g.pass(9 * time.Second))
		g.fleet.none = false
		g.want(g.pump())
		g.want(g.pass(5 * time.Second))
		g.want(g.place(1), "a")
	})
	t.Run("says so when nobody came", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: time.Second, EmptyTTL: time.Minute})
		g.fleet.none = true
		g.queue("a")
		g.want(g.pass(59 * time.Second))
		g.want(g.pass(time.Second), "a:no_endpoints")
	})
	t.Run("says so when nobody came, although it might wait longer for its turn", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: time.Minute, EmptyTTL: 10 * time.Second})
		g.fleet.none = true
		g.queue("a")
		g.want(g.pass(9 * time.Second))
		g.queue("b")
		g.want(g.pass(time.Second), "a:no_endpoints")
		g.fleet.none = false
		g.want(g.pump())
		g.want(g.pass(50 * time.Second))
		g.want(g.place(1), "b")
	})
	t.Run("answers 503 to who waited when the last one went", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: time.Second})
		r := g.queue("a")
		g.fleet.none = true
		g.now = g.now.Add(time.Second)
		decided := g.q.Pump(g.now, &g.fleet)
		if len(decided) != 1 || decided[0].Request != r || decided[0].Err.Code != inference.QueueTimeout || decided[0].Err.HTTPStatus() != 503 {
			t.Errorf("decided %+v", decided)
		}
	})
	t.Run("waits out a short pause of its engines and no long one", func(t *testing.T) {
		g := newRig(t, flow.Config{TTL: time.Minute})
		g.fleet.none, g.fleet.pause = true, 200*time.Millisecond
		g.queue("a")
		g.fleet.pause = 10 * time.Second
		if _, err, _ := g.arrive("b"); err == nil || err.Code != inference.Shed || err.Wait() != 10*time.Second {
			t.Errorf("got %v", err)
		}
	})
}

func TestARequestMayWaitForABetterEndpointWhileOthersGo(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.queue("prefers a busy one", prompt(5000))
	g.queue("goes anywhere", prompt(100))
	g.fleet.closed = func(prompt int) bool { return prompt == 5000 }
	g.want(g.place(1), "goes anywhere")
	if g.fleet.passed != 1 {
		t.Errorf("%d were passed over, want 1", g.fleet.passed)
	}
	g.fleet.closed = nil
	g.want(g.place(1), "prefers a busy one")
}

// A storm of events does not become a storm of looking.
func TestLookingIsBoundedWherePumpsAreMany(t *testing.T) {
	g := newRig(t, flow.Config{})
	for i := range 1000 {
		g.queue(fmt.Sprint(i), prompt(5000))
	}
	g.fleet.closed = func(prompt int) bool { return prompt == 5000 }
	g.fleet.places = 1
	look := func() int {
		before := g.fleet.passed
		g.want(g.pump())
		return g.fleet.passed - before
	}
	if n := look(); n != 128 {
		t.Errorf("a pump passed over %d, want 128", n)
	}
	for range 100 {
		look()
	}
	if n := look(); n != 16 {
		t.Errorf("after 100 pumps at once one passed over %d, want 16", n)
	}
	g.now = g.now.Add(100 * time.Millisecond)
	if n := look(); n != 128 {
		t.Errorf("a tenth of a second later one passed over %d, want 128", n)
	}
}

// Whoever is passed over has had its turn: its flow's next does not take another.
func TestPassingOverUsesUpAFlowsTurn(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.queue("a0", of("a"), prompt(5000))
	g.queue("a1", of("a"))
	g.queue("b0", of("b"))
	g.fleet.closed = func(prompt int) bool { return prompt == 5000 }
	g.want(g.place(1), "b0")
	// The pump after that begins anew.
	g.want(g.place(1), "a1")
}

// Room that is left for higher priorities stays free until one of those has come, and
// then while one could come again.
func TestLowerPrioritiesLeaveRoomToHigherOnes(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.fleet.places, g.fleet.yielded = 2, 1
	if _, _, got := g.arrive("alone", priority(0)); !slices.Equal(got, []string{"alone"}) {
		t.Fatalf("%v: nobody is there to leave room to", got)
	}
	g.fleet.places = 1
	if _, _, got := g.arrive("high", priority(10)); !slices.Equal(got, []string{"high"}) {
		t.Fatalf("%v", got)
	}
	g.fleet.places = 1
	low := g.queue("low", priority(0))
	if _, _, got := g.arrive("high again", priority(10)); !slices.Equal(got, []string{"high again"}) || !low.Waiting() {
		t.Fatalf("%v", got)
	}
	if got := g.place(2); !slices.Equal(got, []string{"low"}) {
		t.Errorf("%v", got)
	}
}

// Nobody is held while an engine has nothing to do.
func TestNobodyIsHeldWhileAnEngineIdles(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.fleet.target, g.fleet.stalled = 10*time.Second, func(int) float64 { return 5 }
	g.fleet.places = 1
	g.queue("held")
	g.fleet.idle = true
	if got := g.pump(); !slices.Equal(got, []string{"held"}) {
		t.Errorf("%v", got)
	}
}

// Time that is used up holds nobody, whatever it costs.
func TestNobodyIsHeldPastItsBudget(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.fleet.ahead = 5 * time.Second
	g.fleet.stalled = func(int) float64 { return 1000 }
	g.queue("a", ttft(4*time.Second))
	g.fleet.ahead, g.fleet.places = 0, 1
	g.want(g.pass(1900 * time.Millisecond))
	g.want(g.pass(200*time.Millisecond), "a")
}

func TestARequestIsHeldWhileItWouldStallStreamsAndHasTime(t *testing.T) {
	g := newRig(t, flow.Config{})
	g.fleet.stalled = func(prompt int) float64 { return float64(prompt / 5000) }
	g.queue("long", prompt(5000), ttft(4*time.Second)) // 0.5 s of its own
	g.fleet.ahead = 5 * time.Second                    // so that it may use up half its target
	g.queue("short", prompt(10), ttft(4*time.Second))
	g.fleet.ahead = 0
	g.want(g.place(2), "short")
	next, ok := g.q.Next()
	if !ok || next.After(g.now.Add(50*time.Millisecond)) {
		t.Errorf("looked at again at %v", next.Sub(g.now))
	}
	// One stream is worth it when used/(1-used) is over 10: 1.82 s of 2 s.
	g.want(g.pass(1300 * time.Millisecond))
	g.want(g.pass(30*time.Millisecond), "long")
}

func TestWhatANewConfigurationKeeps(t *testing.T) {
	g := newRig(t, flow.Config{RequestsMax: 10})
	for i := range 5 {
		g.queue(fmt.Sprint(i))
	}
	g.q.Configure(flow.Config{RequestsMax: 2, Bands: []flow.Band{{Priority: 7, RequestsMax: 1}}})
	if _, err, _ := g.arrive("over"); err == nil {
		t.Error("the new limit does not hold")
	}
	g.want(g.place(9), "0", "1", "2", "3", "4")
}

func TestFlowsAreForgottenAndBounded(t *testing.T) {
	g := newRig(t, flow.Config{})
	for i := range 10_000 {
		g.fleet.places = 1
		r, _, _ := g.arrive("r", of(fmt.Sprint(i)))
		g.q.Done(r, -1, -1)
	}
	if n := g.q.Flows(); n > 65 {
		t.Errorf("%d flows are remembered of which none waits", n)
	}
	for i := range 10_000 {
		r := &flow.Request{Owner: "w", Fairness: fmt.Sprint("w", i), Ask: schedule.Ask{Arrived: g.now}}
		if err := g.q.Arrive(g.now, r, &g.fleet); err != nil {
			t.Fatal(err)
		}
	}
	g.pump()
	if n := g.q.Flows(); n > 4097 {
		t.Errorf("%d flows are remembered", n)
	}
	if got := g.place(20_000); len(got) != 10_000 {
		t.Errorf("%d of 10000 were dispatched", len(got))
	}
}
