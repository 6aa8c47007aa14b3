// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/flow"
)

// slowEngine answers a request when the test says so.
type slowEngine struct {
	url  string
	came chan *served

	mu        sync.Mutex
	now, most int // requests at a time
}

// served is one request at a slowEngine.
type served struct {
	name   string // its prompt
	finish chan int
	gone   <-chan struct{} // the gateway gave it up
}

// answer ends the request with a status.
func (s *served) answer(status int) { s.finish <- status }

func newSlowEngine(t *testing.T) *slowEngine {
	e := &slowEngine{came: make(chan *served, 1024)}
	s := httptest.NewServer(e)
	e.url = s.URL
	t.Cleanup(s.Close)
	return e
}

func (e *slowEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Messages []struct{ Content string }
	}
	if r.Method != "POST" || json.NewDecoder(r.Body).Decode(&body) != nil {
		return // a probe
	}
	e.count(1)
	defer e.count(-1)
	s := &served{name: body.Messages[0].Content, finish: make(chan int, 1), gone: r.Context().Done()}
	e.came <- s
	select {
	case status := <-s.finish:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		fmt.Fprint(w, `{"object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}`)
	case <-s.gone:
	}
}

func (e *slowEngine) count(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.now += n
	e.most = max(e.most, e.now)
}

// next is the next request that the engine gets.
func (e *slowEngine) next(t *testing.T) *served {
	t.Helper()
	select {
	case s := <-e.came:
		return s
	case <-time.After(patience):
		t.Fatal("no request came")
		return nil
	}
}

// none fails if the engine has another request.
func (e *slowEngine) none(t *testing.T) {
	t.Helper()
	select {
	case s := <-e.came:
		t.Fatalf("the engine got %q", s.name)
	default:
	}
}

// queueRig is a gateway before slow engines that take one request at a time.
type queueRig struct {
	*rig
	slow []*slowEngine
	text string // of the configuration
}

const objectives = `
objectives:
  interactive: {priority: 100}
  batch: {priority: -10, shed_at: {queue: 0.5}}
`

func newQueueRig(t *testing.T, engines int, flowYAML string) *queueRig {
	r, _ := newEngines(t, 0)
	q := &queueRig{rig: r}
	var urls []string
	for range engines {
		e := newSlowEngine(t)
		q.slow = append(q.slow, e)
		urls = append(urls, fmt.Sprintf("{url: %q}", e.url))
	}
	q.text = objectives + "listeners: [{name: main, address: 127.0.0.1:0, debug_headers: true}]\n" +
		"pools: {p: {flow: " + flowYAML + ", health: {interval: 0s}, discovery: {static: [" + strings.Join(urls, ",") + "]}}}\n"
	r.startYAML(q.text)
	return q
}

// ask sends a request and returns where its answer will come.
func (q *queueRig) ask(name string, header ...string) <-chan reply {
	return q.askAs(q.t.Context(), name, header...)
}

func (q *queueRig) askAs(ctx context.Context, name string, header ...string) <-chan reply {
	return q.send(ctx, fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":%q}]}`, name), header...)
}

func (q *queueRig) askStream(name string) <-chan reply {
	return q.send(q.t.Context(), fmt.Sprintf(`{"model":"m","stream":true,"messages":[{"role":"user","content":%q}]}`, name))
}

func (q *queueRig) send(ctx context.Context, body string, header ...string) <-chan reply {
	q.t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", "http://"+q.addr+chatPath, strings.NewReader(body))
	if err != nil {
		q.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	answer := make(chan reply, 1)
	go func() {
		res, err := q.client.Do(req)
		if err != nil {
			answer <- reply{err: err}
			return
		}
		defer res.Body.Close()
		got, err := io.ReadAll(res.Body)
		answer <- reply{res.StatusCode, res.Header, string(got), err}
	}()
	return answer
}

func (q *queueRig) status() flow.Status {
	for _, p := range q.gateway.Status() {
		if p.Pool == "p" {
			return p.Queue
		}
	}
	return flow.Status{}
}

// waiting waits until so many requests are in the queue.
func (q *queueRig) waiting(n int) {
	q.t.Helper()
	q.until(fmt.Sprint(n, " wait"), func() bool { return q.status().Requests == n })
}

// enqueue sends requests one after the other, so that they wait in this order.
func (q *queueRig) enqueue(names ...string) (answers []<-chan reply) {
	q.t.Helper()
	before := q.status().Requests
	for i, name := range names {
		name, objective, _ := strings.Cut(name, "/")
		var header []string
		if objective != "" {
			header = []string{"Headgate-Objective", objective}
		}
		answers = append(answers, q.ask(name, header...))
		q.waiting(before + i + 1)
	}
	return answers
}

// refused checks an answer by which the gateway refuses.
func refused(t *testing.T, got reply, status int, code inference.Code) {
	t.Helper()
	wait := got.header.Get("Retry-After")
	seconds, err := strconv.Atoi(wait)
	info := code.Info()
	switch {
	case got.status != status || got.code() != string(code) || got.header.Get("Headgate-Reason") != string(code):
		t.Errorf("got %+v, want %d %s", got, status, code)
	case got.header.Get("X-Should-Retry") != strconv.FormatBool(info.Retryable):
		t.Errorf("%s: X-Should-Retry %q", code, got.header.Get("X-Should-Retry"))
	case (wait != "") != (info.Wait > 0) || wait != "" && (err != nil || seconds < 1 || seconds > 30):
		t.Errorf("%s: Retry-After %q", code, wait)
	}
}

func TestRequestsWaitAndHigherPriorityGoesFirst(t *testing.T) {
	q := newQueueRig(t, 1, "{max_concurrency: 1}")
	first := q.ask("first")
	at := q.slow[0].next(t)
	answers := q.enqueue("batch/batch", "plain", "interactive/interactive", "unknown/nonsense")
	q.slow[0].none(t)
	at.answer(200)
	if got := <-first; got.status != 200 || got.header.Get("Headgate-Queue-Ms") != "0" {
		t.Errorf("first: %+v", got)
	}
	for _, want := range []string{"interactive", "plain", "unknown", "batch"} {
		s := q.slow[0].next(t)
		if s.name != want {
			t.Errorf("the engine got %q, want %q", s.name, want)
		}
		s.answer(200)
	}
	for _, a := range answers {
		if got := <-a; got.status != 200 || got.header.Get("Headgate-Queue-Ms") == "" {
			t.Errorf("got %+v", got)
		}
	}
	q.idle()
}

func TestWhoeverLeavesTheQueueNeverReachesAnEngine(t *testing.T) {
	q := newQueueRig(t, 1, "{max_concurrency: 1}")
	first := q.ask("first")
	at := q.slow[0].next(t)
	ctx, leave := context.WithCancel(t.Context())
	left := q.askAs(ctx, "leaves")
	q.waiting(1)
	stays := q.enqueue("stays")
	leave()
	<-left
	q.waiting(1)
	at.answer(200)
	<-first
	s := q.slow[0].next(t)
	if s.name != "stays" {
		t.Errorf("the engine got %q", s.name)
	}
	s.answer(200)
	<-stays[0]
	q.slow[0].none(t)
	if got := q.status().Bands[0].Counts; got.Left != 1 || got.Dispatched != 2 {
		t.Errorf("counts %+v", got)
	}
	q.idle()
}

func TestRefusalsOfTheQueue(t *testing.T) {
	for name, c := range map[string]struct {
		flow   string
		queue  []string // wait before
		header []string
		then   func(q *queueRig)
		status int
		code   inference.Code
	}{
		"waited too long":     {flow: "{max_concurrency: 1, queue: {ttl: 50ms}}", status: 429, code: inference.QueueTimeout},
		"its own deadline":    {flow: "{max_concurrency: 1}", header: []string{"Headgate-Timeout-Ms", "40"}, status: 504, code: inference.DeadlineExceeded},
		"the queue is full":   {flow: "{max_concurrency: 1, queue: {max_requests: 1}}", queue: []string{"a"}, status: 429, code: inference.QueueFull},
		"too many bytes":      {flow: "{max_concurrency: 1, queue: {max_bytes: 1KiB}}", queue: []string{strings.Repeat("x", 900)}, header: []string{"X-Long", "1"}, status: 429, code: inference.QueueFull},
		"batch, half full":    {flow: "{max_concurrency: 1, queue: {max_requests: 2}}", queue: []string{"a"}, header: []string{"X-Llm-D-Inference-Objective", "batch"}, status: 429, code: inference.Shed},
		"can't begin in time": {flow: "{max_concurrency: 1}", queue: []string{strings.Repeat("word ", 20_000)}, header: []string{"X-Slo-Ttft-Ms", "2000"}, status: 429, code: inference.Shed},
		"the gateway stops":   {flow: "{max_concurrency: 1}", then: (*queueRig).drain, status: 503, code: inference.ShuttingDown},
		"the pool is deleted": {flow: "{max_concurrency: 1}", then: (*queueRig).deletePool, status: 503, code: inference.NoEndpoints},
		"gives way":           {flow: "{max_concurrency: 1, queue: {max_requests: 1}}", then: func(q *queueRig) { q.ask("urgent", "Headgate-Objective", "interactive") }, status: 429, code: inference.QueueFull},
	} {
		t.Run(name, func(t *testing.T) {
			q := newQueueRig(t, 1, c.flow)
			first := q.ask("first")
			at := q.slow[0].next(t)
			q.enqueue(c.queue...)
			long := strings.Repeat("y", 200)
			answer := q.ask(long, c.header...)
			if c.then != nil {
				q.waiting(len(c.queue) + 1)
				c.then(q)
			}
			refused(t, <-answer, c.status, c.code)
			at.answer(200)
			if got := <-first; got.status != 200 {
				t.Errorf("who was served: %+v", got)
			}
		})
	}
}

// drain begins to shut down, and does not wait for the end of it.
func (q *queueRig) drain() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		q.gateway.Drain(context.Background())
	}()
	q.t.Cleanup(func() { <-done })
}

func (q *queueRig) deletePool() {
	c, err := config.Parse("test.yaml", []byte(strings.Replace(q.text, "pools: {p:", "pools: {other:", 1)))
	if err != nil {
		q.t.Fatal(err)
	}
	if err := q.gateway.Reload(c); err != nil {
		q.t.Error(err)
	}
}

// A request whose attempt failed is not put behind those that came after it.
func TestARetryGoesBeforeThoseWhoWait(t *testing.T) {
	q := newQueueRig(t, 2, "{max_concurrency: 1}")
	one, two := q.ask("fails"), q.ask("runs")
	fails, runs := q.slow[0].came, q.slow[1].came
	a, b := <-fails, <-runs
	if a.name == "runs" {
		a, b = b, a
	}
	waits := q.enqueue("waits")
	a.answer(500)
	// Its place is free, and not for itself: it goes to the one that waits.
	s := func() *served {
		select {
		case s := <-fails:
			return s
		case s := <-runs:
			return s
		}
	}
	if got := s(); got.name != "waits" {
		t.Errorf("the engine got %q", got.name)
	} else {
		later := q.enqueue("later")
		b.answer(200)
		if got := s(); got.name != "fails" {
			t.Errorf("%q went before the retry", got.name)
		} else {
			got.answer(200)
		}
		if got := s(); got.name != "later" {
			t.Errorf("then %q", got.name)
		} else {
			got.answer(200)
		}
		got.answer(200)
		for _, c := range []<-chan reply{one, two, waits[0], later[0]} {
			if r := <-c; r.status != 200 {
				t.Errorf("got %+v", r)
			}
		}
	}
	q.idle()
}

// An engine gets what keeps it busy for a moment, and the rest waits where it can
// still be overtaken. By what is assumed of an engine of which nothing is known,
// 1000 tokens are a tenth of a second.
func TestAnEngineGetsLittleAhead(t *testing.T) {
	q := newQueueRig(t, 1, "{}")
	text := strings.Repeat("word ", 800)
	var answers []<-chan reply
	for i := range 20 {
		answers = append(answers, q.askStream(fmt.Sprint(i, " ", text)))
	}
	early := []*served{q.slow[0].next(t)}
	q.until("all have come", func() bool { return q.status().Bands[0].Counts.Arrived == 20 })
	for range 20 - 1 - q.status().Requests {
		early = append(early, q.slow[0].next(t))
	}
	if n := len(early); n < 2 || n > 5 {
		t.Errorf("the engine got %d of 20 at once, want 2 to 5", n)
	}
	for _, s := range early {
		s.answer(200)
	}
	for range 20 - len(early) {
		q.slow[0].next(t).answer(200)
	}
	for _, a := range answers {
		if got := <-a; got.status != 200 {
			t.Errorf("got %+v", got)
		}
	}
	q.idle()
}

// FLW-4: what has room is decided and taken in one step.
func TestABurstNeverPassesTheLimitOfAnEngine(t *testing.T) {
	q := newQueueRig(t, 2, "{max_concurrency: 4}")
	for range 5 {
		var answers []<-chan reply
		for i := range 60 {
			answers = append(answers, q.ask(fmt.Sprint(i)))
		}
		for range answers {
			select {
			case s := <-q.slow[0].came:
				s.answer(200)
			case s := <-q.slow[1].came:
				s.answer(200)
			}
		}
		for _, a := range answers {
			if got := <-a; got.status != 200 {
				t.Fatalf("got %+v", got)
			}
		}
	}
	for i, e := range q.slow {
		if e.most > 4 {
			t.Errorf("engine %d had %d at a time, want at most 4", i, e.most)
		}
	}
	q.idle()
}

// FLW-2, and what a queue counts while clients leave, engines come and go and
// the configuration changes: nothing is left, and nothing is an internal error.
func TestChaosLeavesNothingInTheQueue(t *testing.T) {
	q := newQueueRig(t, 2, "{max_concurrency: 2, queue: {ttl: 300ms, max_requests: 150}}")
	over := make(chan struct{})
	var engines sync.WaitGroup
	for i, e := range q.slow {
		engines.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(i)))
			for {
				select {
				case s := <-e.came:
					switch rnd.IntN(10) {
					case 0:
						s.answer(500)
					case 1:
						s.answer(503)
					default:
						s.answer(200)
					}
				case <-over:
					return
				}
			}
		})
	}
	reload, err := config.Parse("test.yaml", []byte(strings.Replace(q.text, "max_concurrency: 2", "max_concurrency: 3", 1)))
	if err != nil {
		t.Fatal(err)
	}
	endpoints := reload.Pools["p"].Endpoints()
	rnd := rand.New(rand.NewPCG(2, 3))
	var answers []<-chan reply
	for i := range 600 {
		ctx := t.Context()
		if rnd.IntN(3) == 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, time.Duration(rnd.IntN(300))*time.Millisecond)
			defer cancel()
		}
		objective := []string{"interactive", "batch", ""}[rnd.IntN(3)]
		answers = append(answers, q.askAs(ctx, fmt.Sprint(i), "Headgate-Objective", objective, "Headgate-Fairness-Id", fmt.Sprint(rnd.IntN(5))))
		switch i % 100 {
		case 30:
			q.gateway.SetEndpoints("p", endpoints[:1])
		case 60:
			q.gateway.SetEndpoints("p", endpoints)
		case 90:
			if err := q.gateway.Reload(reload); err != nil {
				t.Error(err)
			}
		}
	}
	codes := map[string]int{}
	for _, a := range answers {
		got := <-a
		switch {
		case got.err != nil:
			codes["left"]++
		case got.status == 200:
			codes["answered"]++
		default:
			codes[got.code()]++
			if !slices.Contains([]int{429, 502, 503}, got.status) {
				t.Errorf("got %+v", got)
			}
		}
	}
	t.Log(codes)
	if codes["answered"] == 0 {
		t.Error("nobody was answered")
	}
	q.idle()
	close(over)
	engines.Wait()
	s := q.status()
	if s.Requests != 0 || s.Bytes != 0 || s.Work != 0 {
		t.Errorf("left in the queue: %+v", s)
	}
	for _, b := range s.Bands {
		sum := b.Counts.Left + b.Counts.Displaced
		for _, n := range b.Counts.Refused {
			sum += n
		}
		if b.Counts.Arrived > b.Counts.Dispatched+sum || b.Counts.Dispatched < b.Counts.Arrived-sum {
			t.Errorf("band %d does not add up: %+v", b.Priority, b.Counts)
		}
		for _, f := range b.Flows {
			if f.Requests != 0 || f.Dispatched != 0 {
				t.Errorf("left in flow %q: %+v", f.Fairness, f)
			}
		}
	}
}

// Who may say by headers how requests are treated, and what counts before what.
func TestObjectivesAndFairness(t *testing.T) {
	const head = `
objectives:
  fast: {priority: 3}
  normal: {priority: 2}
  slow: {priority: 1}
`
	key := func(extra string) string {
		return fmt.Sprintf("keys: [{id: k, secret_sha256: %q%s}]\n", config.NewDigest("s").Hex(), extra)
	}
	for name, c := range map[string]struct {
		yaml     string
		trust    string
		header   []string
		priority int
		fairness string
	}{
		"nothing":                            {trust: "true", fairness: "anonymous"},
		"headers on a trusted listener":      {trust: "true", header: []string{"Headgate-Objective", "slow", "Headgate-Fairness-Id", "t"}, priority: 1, fairness: "t"},
		"the names of other gateways":        {trust: "auto", header: []string{"X-Llm-D-Inference-Objective", "slow", "X-Gateway-Inference-Fairness-Id", "t"}, priority: 1, fairness: "t"},
		"headers on another":                 {trust: "false", header: []string{"Headgate-Objective", "slow", "Headgate-Fairness-Id", "t"}, fairness: "anonymous"},
		"a fairness id that is too long":     {trust: "true", header: []string{"Headgate-Fairness-Id", strings.Repeat("t", 129)}, fairness: "anonymous"},
		"the key's first objective":          {yaml: key(", objectives: [normal, slow], tenant: ten"), trust: "false", priority: 2, fairness: "ten"},
		"one of the key's, asked for":        {yaml: key(", objectives: [normal, slow], fairness_id: f"), trust: "false", header: []string{"Headgate-Objective", "slow"}, priority: 1, fairness: "f"},
		"one that the key has not":           {yaml: key(", objectives: [normal, slow]"), trust: "true", header: []string{"Headgate-Objective", "fast"}, priority: 2, fairness: "k"},
		"the route's":                        {yaml: "routes: [{backends: [{pool: p}], objective: fast}]\n", trust: "true", priority: 3, fairness: "anonymous"},
		"the route's, before the key's":      {yaml: key(", objectives: [normal]") + "routes: [{backends: [{pool: p}], objective: fast}]\n", trust: "false", priority: 3, fairness: "k"},
		"a trusted client's, before a route": {yaml: "routes: [{backends: [{pool: p}], objective: fast}]\n", trust: "true", header: []string{"Headgate-Objective", "slow"}, priority: 1, fairness: "anonymous"},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := newEngines(t, 0)
			q := &queueRig{rig: r, slow: []*slowEngine{newSlowEngine(t)}}
			r.startYAML(head + c.yaml + fmt.Sprintf("listeners: [{name: main, address: 127.0.0.1:0, trust_headers: %s}]\n", c.trust) +
				fmt.Sprintf("pools: {p: {health: {interval: 0s}, discovery: {static: [{url: %q}]}}}\n", q.slow[0].url))
			answer := q.ask("x", append(c.header, "Authorization", "Bearer s")...)
			s := q.slow[0].next(t)
			found := false
			for _, b := range q.status().Bands {
				for _, f := range b.Flows {
					found = true
					if b.Priority != c.priority || f.Fairness != c.fairness || f.Dispatched != 1 {
						t.Errorf("priority %d, fairness id %q; want %d and %q", b.Priority, f.Fairness, c.priority, c.fairness)
					}
				}
			}
			if !found {
				t.Error("the queue knows nothing of it")
			}
			s.answer(200)
			if got := <-answer; got.status != 200 {
				t.Errorf("got %+v", got)
			}
		})
	}
}
