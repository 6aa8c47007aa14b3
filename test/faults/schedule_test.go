// SPDX-License-Identifier: Apache-2.0

package faults_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
)

var (
	seedFlag = flag.Uint64("seed", 1, "first seed of TestSchedules")
	runsFlag = flag.Int("runs", 0, "schedules that TestSchedules runs; 0: as many as cover everything, more with HEADGATE_LONG=1")
	aimFlag  = flag.String("aim", "", "points that the faults of TestSchedules strike at, comma between them; empty: all")
)

const (
	together = 4 // schedules at the same time: most of it is waiting

	runsShort = 20
	runsMore  = 20 // on top, aimed at what the table misses
	runsLong  = 160
	slots     = 16 // clients at work at the same time
	asksEach  = 4
	soloAsks  = 3
)

// plan is a whole schedule, drawn from a seed before anything is started.
type plan struct {
	seed     uint64
	engines  int
	settings settings
	shared   bool // all clients share one pool; else each has its own
	rewrite  bool // routes rename the model
	solo     []soloAsk
	slots    [slots][]ask
	clients  [slots]string
	kills    []kill
}

// Every other seed is calm: one fault per request, nobody leaves, nothing dies
// that no request asked for. What a fault means shows best there.
func (p plan) calm() bool { return p.seed%2 == 1 }

// settings are those of every pool of a schedule.
type settings struct {
	attempts int
	collect  string
	fence    bool
	tools    bool
	ratio    float64
	perSec   float64
}

func (s settings) yaml() string {
	return fmt.Sprintf(`executes_tools: %v
    collect_max: %s
    timeouts: {connect: 300ms, first_output: 300ms, idle: 300ms, after_finish: 100ms, total: 500ms}
    failover:
      before_first_delta: {max_attempts: %d}
      retry_budget: {ratio: %v, min_per_second: %v}
      allow_transport_fence: %v
`, s.tools, s.collect, s.attempts, s.ratio, s.perSec, s.fence)
}

// soloAsk is a request with nobody beside it, so that what strikes a connection
// is known to strike it.
type soloAsk struct {
	ask   ask
	point string // "accept", "listen"
	fault string // injected into engines, not asked for by the request
}

// kill is the death of an engine once it received so many requests. It is
// restarted at once.
type kill struct{ engine, after int }

// card is one fault at one point, for streams or for whole answers.
type card struct {
	point  string // "answer": the whole answer
	fault  string // without conditions
	stream bool
}

// deck holds every fault at every point where it can strike.
var deck = newDeck()

func newDeck() []card {
	points := []string{"body:10", "head", "headers", "role", "computed:1", "computed:2", "in-chunk:1:30", "in-chunk:2:30",
		"in-char:1", "in-char:2", "token:1", "token:2", "in-body:40", "in-body:200", "finish", "usage", "done"}
	kinds := []string{"rst", "fin", "end", "stall", "exit", "garbage", "tool", "html", "status:503", "status:500:html",
		"status:502", "status:400", "status:429", "error", "error:400", "error:string", "error:event:done"}
	answers := []string{"slow:2ms", "role:2ms", "errornull", "nodone:clean", "nodone:fin", "nodone:open", "nofinish",
		"finish:stop", "finish:attached", "empty", "early", "comment", "sse:nospace", "sse:crlf", "sse:cr", "sse:bom",
		"sse:event", "sse:id", "sse:noeol", "sse:multiline", "bytewise", "wrongtype:application/json", "wrongtype:text/event-stream",
		"gzip:plain", "gzip:broken", "badhead:clte", "badhead:cl2", "badhead:negative", "badhead:nocolon", "badhead:space",
		"badhead:nul", "badhead:huge", "badhead:version", "badhead:status", "badhead:lf", "badhead:fold", "badhead:te",
		"badhead:badchunk", "badhead:close", "badhead:continue", "badhead:hints", "badhead:trailer", "shortbody:5",
		"usage:none", "usage:always", "usage:final", "usage:each", "usage:choices", "usage:null", "usage:wrong",
		"bigline@token:1:70000", "delta@token:1:reasoning", "delta@token:1:tool", "delta@token:1:refusal",
		"delta@token:1:logprobs", "delta@token:1:audio", "delta@token:1:unknown", "stall@token:1:30ms:comments",
		"stall@role:30ms:comments"}
	var all []card
	for _, stream := range []bool{true, false} {
		for _, point := range points {
			name, _, _ := strings.Cut(point, ":")
			for _, kind := range kinds {
				word, args, _ := strings.Cut(kind, ":")
				fault := strings.TrimSuffix(word+"@"+point+":"+args, ":")
				if fault == "stall@body:10" || fault == "stall@done" {
					// An engine that reads nothing sees no goodbye behind much
					// that it did not read: a body, a next request.
					fault += ":1s"
				}
				_, err := simengine.ParseFaults(fault)
				if err != nil || !strikes(name, word, stream) {
					continue
				}
				all = append(all, card{name, fault, stream})
				if word == "stall" || word == "end" || kind == "error:400" || kind == "status:502" { // alone with their verdict
					all = append(all, card{name, fault, stream})
				}
			}
		}
		for _, fault := range answers {
			all = append(all, card{"answer", fault, stream})
		}
	}
	// Fixed, and so that neighbours are not alike.
	rand.New(rand.NewPCG(7, 7)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// strikes says that a fault at this point does anything to such an answer.
func strikes(point, kind string, stream bool) bool {
	switch point {
	case "role", "in-chunk", "in-char", "usage":
		return stream
	case "in-body":
		return !stream
	case "computed", "token", "finish":
		return !(stream && kind == "status")
	}
	return true
}

// aimedAt is the part of the deck at these points: all of it, if there is none.
func aimedAt(points []string) []card {
	part := slices.DeleteFunc(slices.Clone(deck), func(c card) bool { return !slices.Contains(points, c.point) })
	if len(part) == 0 {
		return deck
	}
	return part
}

func draw(seed uint64, aim []string) plan {
	rnd := rand.New(rand.NewPCG(seed, 0x9e3779b97f4a7c15))
	one := func(n int) bool { return rnd.IntN(n) == 0 }
	p := plan{seed: seed, engines: 3 + rnd.IntN(2), shared: one(6), rewrite: one(4)}
	p.settings = settings{attempts: 1 + rnd.IntN(3), collect: []string{"0", "150B", "8MiB", "8MiB"}[rnd.IntN(4)], ratio: 0.2, perSec: 3}
	if p.calm() {
		p.shared = false
		p.settings.attempts = max(p.settings.attempts, 2)
	}
	switch rnd.IntN(4) {
	case 0:
		// Where tools may run, an answer over collect_max is never begun.
		p.settings.tools, p.settings.collect = true, "8MiB"
	case 1:
		p.settings.fence = true
	}
	if one(3) {
		p.settings.ratio, p.settings.perSec = 0.1, 0.2
	}
	// The deck goes round, for calm seeds and for others: consecutive seeds
	// between them play every card that is aimed at.
	cards := aimedAt(aim)
	next := int(seed/2) * slots * asksEach
	for s := range p.slots {
		p.clients[s] = []string{"h1", "h1", "h1-close", "h2c"}[rnd.IntN(4)]
		for range asksEach {
			c := cards[next%len(cards)]
			next++
			q := drawAsk(rnd, c, p.calm())
			q.Model = fmt.Sprintf("m%d", s)
			p.slots[s] = append(p.slots[s], q)
		}
	}
	for i := range soloAsks {
		q := ask{Stream: one(2), Model: "m0"}
		point, fault := "accept", []string{"rst@accept", "fin@accept", "refuse@accept", "stall@accept", "exit@accept"}[rnd.IntN(5)]
		if i == 0 || one(4) {
			point, fault = "listen", "refuse@listen:50ms"
		}
		p.solo = append(p.solo, soloAsk{q, point, fault})
	}
	for i := rnd.IntN(3); i > 0 && !p.calm(); i-- {
		p.kills = append(p.kills, kill{rnd.IntN(p.engines), 1 + rnd.IntN(8)})
	}
	return p
}

func drawAsk(rnd *rand.Rand, c card, calm bool) ask {
	one := func(n int) bool { return rnd.IntN(n) == 0 }
	q := ask{Stream: c.stream, Max: 2 + rnd.IntN(4), N: 1, Usage: one(3) || c.point == "usage"}
	if one(5) {
		q.Path = "/v1/completions"
	}
	if one(4) {
		q.N = 2 + rnd.IntN(2)
	}
	if one(4) {
		q.Extra = `,"logprobs":true`
	}
	switch {
	case c.fault == "rst@body:10", c.fault == "exit@body:10" && one(2):
		q.Pad = 11 << 20 // more than the kernel takes from a writer
	case one(8):
		q.Pad = 300 << 10
	}
	if strings.HasPrefix(c.fault, "empty") {
		q.Extra = "" // logprobs of no text are a lie of the engine's
	}
	if calm {
		q.Fault = "attempt=1;" + c.fault
		return q
	}
	// A few requests meet no fault, and some meet one on later attempts too.
	if !one(8) {
		q.Fault = "attempt=1;" + c.fault
	}
	for n := 2; n <= 3 && one(3); n++ {
		q.Fault += fmt.Sprintf(",attempt=%d;%s", n, deck[rnd.IntN(len(deck))].fault)
	}
	q.Fault = strings.TrimPrefix(q.Fault, ",")
	if one(8) {
		// Long enough for a client to leave in the middle.
		q.Fault = "attempt=1;slow:20ms"
		q.Leave = leave{"events", 2 + rnd.IntN(3)}
	} else if one(7) {
		q.Leave.When = []string{"written", "received", "fault", "events", "events"}[rnd.IntN(5)]
		q.Leave.Events = 1 + rnd.IntN(5)
	}
	return q
}

func (p plan) yaml(static string) string {
	var b strings.Builder
	b.WriteString("routes:\n")
	for s := range slots {
		fmt.Fprintf(&b, "  - match: {model: m%d}\n    backends: [{pool: %s}]\n", s, p.pool(s))
		if p.rewrite {
			b.WriteString("    rewrite: {model: sim}\n")
		}
	}
	b.WriteString("pools:\n")
	for s := range slots {
		if s > 0 && p.shared {
			break
		}
		fmt.Fprintf(&b, "  %s:\n    health: {interval: 0s}\n    scrape: {interval: 0s}\n    discovery: %s\n    %s", p.pool(s), static, p.settings.yaml())
	}
	return b.String()
}

func (p plan) pool(slot int) string {
	if p.shared {
		slot = 0
	}
	return fmt.Sprintf("p%d", slot)
}

func (p plan) limits() check.Limits {
	l := check.Limits{MaxAttempts: p.settings.attempts, Resends: 1, ToolsOnce: p.settings.tools, Notice: notice}
	if p.settings.tools {
		l.Resends = 0
	}
	return l
}

// Goal: whatever breaks, clients are told the truth and nothing is left over.
// Method: schedules drawn from seeds, judged from received bytes and engine
// logs; and a table shows that the seeds reach every kind of failure.
func TestSchedules(t *testing.T) {
	runs := *runsFlag
	if runs == 0 {
		runs = runsShort
		if os.Getenv("HEADGATE_LONG") != "" {
			runs = runsLong
		}
	}
	cover := newCoverage()
	var aim []string
	if *aimFlag != "" {
		aim = strings.Split(*aimFlag, ",")
	}
	fixed := *seedFlag == 1 && runs >= runsShort && aim == nil // else the table may have gaps
	for first := 0; first < runs || fixed && first < runs+runsMore && len(cover.empty()) > 0; first += together {
		before := goleak.IgnoreCurrent()
		last := first + together - 1
		if first < runs {
			last = min(last, runs-1)
		} else {
			// Where a fault is seen to strike depends on the machine's pace too:
			// seeds alone reach the rarest cells most times, not every time.
			aim = cover.missed()
		}
		t.Run(fmt.Sprintf("seeds=%d-%d", *seedFlag+uint64(first), *seedFlag+uint64(last)), func(t *testing.T) {
			for i := first; i <= last; i++ {
				seed := *seedFlag + uint64(i)
				t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
					t.Parallel()
					defer func() {
						if t.Failed() {
							t.Logf("replay: go test ./test/faults -run TestSchedules -seed=%d -runs=1 -aim=%s", seed, strings.Join(aim, ","))
						}
					}()
					runPlan(t, draw(seed, aim), cover)
				})
			}
		})
		if err := goleak.Find(before); err != nil {
			t.Errorf("I10: after seeds %d to %d: %v", *seedFlag+uint64(first), *seedFlag+uint64(last), err)
		}
	}
	t.Logf("%d requests\n%s", cover.requests, cover)
	if fixed {
		if empty := cover.empty(); len(empty) > 0 {
			t.Errorf("these cells can be reached and were not: %v\n%s", empty, cover)
		}
	}
}

func runPlan(t *testing.T, p plan, cover *coverage) {
	r := newRig(t, p.engines, p.yaml)
	r.limits = p.limits()
	solo := p.runSolo(r, cover)

	var kills, clients sync.WaitGroup
	ctx, cancel := r.context()
	for _, k := range p.kills {
		kills.Go(func() { k.carryOut(ctx, r) })
	}
	open := newGauge(r)
	for s := range slots {
		clients.Go(func() { p.runSlot(r, s, solo, cover) })
	}
	clients.Wait()
	cancel()
	kills.Wait()

	p.probe(r)
	if most := open(); most > 3*slots {
		t.Errorf("I10: up to %d connections to one engine for %d clients", most, slots)
	}
	r.stop()
	r.quiet(nil)
	p.checkBudget(r)
	r.judgeAll()
	r.close()
	if t.Failed() {
		t.Logf("settings: %+v, shared: %v, rewrite: %v, engines: %d, kills: %v", p.settings, p.shared, p.rewrite, p.engines, p.kills)
	}
}

// runSolo asks the requests that have the fleet to themselves. It returns how
// many outcomes the first pool has then, or -1 if that is not known.
func (p plan) runSolo(r *rig, cover *coverage) int {
	c := r.newClient("h1")
	for i, s := range p.solo {
		before := r.ledger.pool("p0")
		from := time.Now()
		for _, e := range r.engines {
			if err := e.Inject(s.fault); err != nil {
				r.t.Error(err)
			}
		}
		a := r.ask(c, s.ask)
		if !r.ledger.ended("p0", i+1) {
			r.t.Errorf("I4: a request never came to an outcome")
			return -1
		}
		cover.solo(s, a, r.ledger.pool("p0").verdicts[len(before.verdicts):], r.log(), from)
		for _, e := range r.engines {
			p.clear(r, e)
		}
	}
	return len(p.solo)
}

// clear takes back what is left of a solo request's fault: a script that no
// connection met, a socket that does not listen.
func (p plan) clear(r *rig, e *simengine.Engine) {
	_ = e.Relisten() // an error: it listens
	ctx, cancel := r.context()
	defer cancel()
	for e.FaultsLeft() > 0 && ctx.Err() == nil {
		c, err := net.Dial("tcp", e.Addr())
		if err != nil {
			continue // it is being restarted
		}
		from := c.LocalAddr().String()
		_, _ = e.Await(ctx, func(entry simengine.Entry) bool {
			return entry.Event == simengine.EventAccepted && entry.Detail == from
		})
		_ = c.Close()
	}
}

// carryOut kills an engine in the middle of its work and brings it back.
func (k kill) carryOut(ctx context.Context, r *rig) {
	e := r.engines[k.engine]
	n := 0
	_, err := e.Await(ctx, func(entry simengine.Entry) bool {
		if entry.Event == simengine.EventReceived {
			n++
		}
		return n >= k.after
	})
	if err == nil {
		e.Kill()
		r.revive(e)
	}
}

// runSlot is one client: its requests one after the other.
func (p plan) runSlot(r *rig, slot, solo int, cover *coverage) {
	c := r.newClient(p.clients[slot])
	pool := p.pool(slot)
	ended := 0
	if slot == 0 {
		ended = solo
	}
	// Alone in its pool, a client's requests can be told apart by the order of
	// what the gateway records.
	apart := !p.shared && ended >= 0
	marks := r.marks()
	for _, q := range p.slots[slot] {
		before := len(r.ledger.pool(pool).verdicts)
		a := r.ask(c, q)
		cover.count()
		if !apart {
			continue
		}
		log := r.since(marks)
		if list := []check.Answer{a}; a.Left {
			check.Identify(list, log)
			a = list[0]
		}
		if a.Left && a.Request == "" {
			apart = false // it may or may not be under way
			continue
		}
		ended++
		if !r.ledger.ended(pool, ended) {
			r.t.Errorf("I4: request %s (%+v) never came to an outcome\n%s", a.Request, q, r.story(a.Request))
			return
		}
		now := r.ledger.pool(pool)
		r.checkOutcome(a, now.outcomes[ended-1])
		cover.add(q, a, now.verdicts[before:], append(log, r.since(marks)...))
	}
	if now := r.ledger.pool(pool); apart && len(now.outcomes) != ended {
		r.t.Errorf("I4: %d outcomes for %d requests in pool %s", len(now.outcomes), ended, pool)
	}
}

// checkOutcome holds the gateway's own word against the client's view (I4).
func (r *rig) checkOutcome(a check.Answer, outcome string) {
	seen, err := check.Read(a)
	if err != nil || a.Left {
		return // judged elsewhere, or not the whole view
	}
	if completed := outcome == inference.Completed.String(); completed != seen.Complete {
		r.t.Errorf("I4: %s: the gateway recorded %q, the client's answer: complete %v, error %q\n%s", a.Request, outcome, seen.Complete, seen.ErrorCode, r.story(a.Request))
	}
}

// judgeAll judges every answer of the run.
func (r *rig) judgeAll() {
	r.mu.Lock()
	answers := slices.Clone(r.answers)
	r.mu.Unlock()
	log := r.log()
	check.Identify(answers, log)
	requests := map[string][]simengine.Entry{}
	for _, e := range log {
		requests[e.Request] = append(requests[e.Request], e)
	}
	for _, a := range answers {
		for _, v := range check.Judge(a, requests[a.Request], r.limits) {
			r.t.Errorf("%v\n%s    stream %v, status %d, left %v, err %v, body:\n%s", v, r.story(a.Request), a.Stream, a.Status, a.Left, a.Err, clip(a.Body))
		}
	}
}

func clip(b []byte) string {
	if len(b) > 4000 {
		return string(b[:2000]) + "\n…\n" + string(b[len(b)-2000:])
	}
	return string(b)
}

// probe: after everything, the gateway serves.
func (p plan) probe(r *rig) {
	c := r.newClient("h1-close")
	var a check.Answer
	for range 5 {
		// Engines may be held back for their Retry-After, or slow under load;
		// five misses in a row are neither.
		a = r.ask(c, ask{Model: "m0", Stream: true})
		if seen, err := check.Read(a); err == nil && seen.Complete {
			return
		}
	}
	r.t.Errorf("the gateway does not serve any more: status %d, %v, %s", a.Status, a.Err, a.Body)
}

// checkBudget: the retries that the gateway made are within each pool's budget
// (I7).
func (p plan) checkBudget(r *rig) {
	lasted := time.Since(r.began).Seconds()
	for s := range slots {
		a := r.ledger.pool(p.pool(s))
		most := p.settings.perSec*(10+lasted) + p.settings.ratio*float64(len(a.outcomes))
		if float64(a.retries) > most {
			r.t.Errorf("I7: pool %s: %d retries, the budget allows %.1f", p.pool(s), a.retries, most)
		}
	}
}

// newGauge watches how many connections each engine has open at most. The
// result reads the maximum.
func newGauge(r *rig) func() int {
	marks := r.marks()
	return func() (most int) {
		for i, e := range r.engines {
			open := 0
			for _, entry := range e.LogSince(marks[i]) {
				switch entry.Event {
				case simengine.EventAccepted:
					open++
				case simengine.EventConnClosed:
					open--
				}
				most = max(most, open)
			}
		}
		return most
	}
}
