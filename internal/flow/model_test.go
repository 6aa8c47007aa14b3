// SPDX-License-Identifier: Apache-2.0

package flow_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/flow"
	"github.com/headgate/headgate/internal/schedule"
)

// model is the queue's policy as loops over one list. It has no index, no heap
// and no running sum.
type model struct {
	config  flow.Config
	waiting []*modelRequest
	served  map[modelFlow]float64
	born    map[modelFlow]int
	out     map[modelFlow]int
	answer  map[modelFlow]float64
	guessed map[modelFlow]float64
	floor   map[int]float64
	credit  map[int]float64
}

type modelFlow struct {
	priority int
	id       string
}

type modelRequest struct {
	name     string
	flow     modelFlow
	prompt   int
	output   float64 // that it is charged for
	weighed  float64 // tokens as they count in the backlog
	bid      bool
	blind    bool
	bytes    int64
	seq      int
	returned bool
	charged  bool
	ends     time.Duration
	deadline bool
}

// tokens are what a request counts in the backlog: what it looked like when it was
// first looked at.
func (r *modelRequest) tokens() float64 { return r.weighed }

// look is what happens when a request is bid for: the guess follows its flow.
func (m *model) look(r *modelRequest) {
	if r.charged {
		return
	}
	r.output = 100
	if mean := m.answer[r.flow]; mean > 0 {
		r.output = mean
	}
	if !r.bid {
		r.bid, r.weighed = true, float64(r.prompt)+2*r.output
	}
}

func newModel(c flow.Config) *model {
	return &model{config: c, served: map[modelFlow]float64{}, born: map[modelFlow]int{}, out: map[modelFlow]int{}, answer: map[modelFlow]float64{}, guessed: map[modelFlow]float64{}, floor: map[int]float64{}, credit: map[int]float64{}}
}

func (m *model) band(priority int) (b flow.Band) {
	for _, c := range m.config.Bands {
		if c.Priority == priority {
			return c
		}
	}
	return flow.Band{Priority: priority}
}

func (m *model) sum(of func(*modelRequest) bool) (requests int, bytes int64, tokens float64) {
	for _, r := range m.waiting {
		if of(r) {
			requests, bytes, tokens = requests+1, bytes+r.bytes, tokens+r.tokens()
		}
	}
	return requests, bytes, tokens
}

func (m *model) backlog(f modelFlow) float64 {
	_, _, tokens := m.sum(func(r *modelRequest) bool { return r.flow == f })
	return tokens
}

func (m *model) fits(r *modelRequest) (queue, band bool) {
	n, bytes, _ := m.sum(func(*modelRequest) bool { return true })
	queue = (m.config.RequestsMax == 0 || n < m.config.RequestsMax) && (m.config.BytesMax == 0 || bytes+r.bytes <= m.config.BytesMax)
	b := m.band(r.flow.priority)
	n, bytes, _ = m.sum(func(o *modelRequest) bool { return o.flow.priority == r.flow.priority })
	band = (b.RequestsMax == 0 || n < b.RequestsMax) && (b.BytesMax == 0 || bytes+r.bytes <= b.BytesMax)
	return queue, band
}

// youngest is the request of the flow with the largest backlog in a band that
// came last.
func (m *model) youngest(priority int) (*modelRequest, float64) {
	var most modelFlow
	tokens, found := 0.0, false
	for _, r := range m.waiting {
		if r.flow.priority != priority {
			continue
		}
		n := m.backlog(r.flow)
		if !found || n > tokens || n == tokens && m.born[r.flow] < m.born[most] {
			most, tokens, found = r.flow, n, true
		}
	}
	var last *modelRequest
	for _, r := range m.waiting {
		if r.flow == most && found && !r.returned && (last == nil || r.seq > last.seq) {
			last = r
		}
	}
	return last, tokens
}

// arrive returns the names of those who gave way, and whether r got in.
func (m *model) arrive(r *modelRequest) (gone []string, in bool) {
	before := slices.Clone(m.waiting)
	for range 17 {
		queue, band := m.fits(r)
		if queue && band {
			m.push(r)
			return gone, true
		}
		var victim *modelRequest
		if band {
			lowest := r.flow.priority
			for _, o := range m.waiting {
				if o.flow.priority < lowest && func() bool { v, _ := m.youngest(o.flow.priority); return v != nil }() {
					lowest = o.flow.priority
				}
			}
			if lowest < r.flow.priority {
				victim, _ = m.youngest(lowest)
			}
		}
		if victim == nil {
			v, tokens := m.youngest(r.flow.priority)
			if v != nil && v.flow != r.flow && tokens > m.backlog(r.flow)+r.tokens() {
				victim = v
			}
		}
		if victim == nil {
			break
		}
		gone = append(gone, victim.name)
		m.remove(victim)
	}
	m.waiting = before
	return nil, false
}

func (m *model) push(r *modelRequest) {
	if n, _, _ := m.sum(func(o *modelRequest) bool { return o.flow == r.flow }); n == 0 {
		level, least, who, active := m.floor[r.flow.priority], 0.0, modelFlow{}, false
		for _, o := range m.waiting {
			if o.flow.priority == r.flow.priority && (!active || m.served[o.flow] < least || m.served[o.flow] == least && m.born[o.flow] < m.born[who]) {
				least, who, active = m.served[o.flow], o.flow, true
			}
		}
		if active {
			level = least - m.guessed[who]
		}
		m.served[r.flow] = max(m.served[r.flow], level)
	}
	m.waiting = append(m.waiting, r)
}

func (m *model) remove(r *modelRequest) {
	m.waiting = slices.DeleteFunc(m.waiting, func(o *modelRequest) bool { return o == r })
	if n, _, _ := m.sum(func(o *modelRequest) bool { return o.flow.priority == r.flow.priority }); n == 0 {
		m.credit[r.flow.priority] = min(m.credit[r.flow.priority], 0)
	}
}

// next is who is dispatched next.
func (m *model) next() *modelRequest {
	priority, found := 0, false
	for _, owed := range []bool{true, false} {
		for _, r := range m.waiting {
			if (!owed || m.credit[r.flow.priority] > 0) && (!found || r.flow.priority > priority) {
				priority, found = r.flow.priority, true
			}
		}
		if found {
			break
		}
	}
	var best *modelRequest
	for _, r := range m.waiting {
		if r.flow.priority != priority {
			continue
		}
		if best == nil || m.before(r, best) {
			best = r
		}
	}
	return best
}

func (m *model) before(a, b *modelRequest) bool {
	switch {
	case a.flow != b.flow && m.served[a.flow] != m.served[b.flow]:
		return m.served[a.flow] < m.served[b.flow]
	case a.flow != b.flow:
		return m.born[a.flow] < m.born[b.flow]
	case a.returned != b.returned:
		return a.returned
	}
	return a.seq < b.seq
}

func (m *model) take(r *modelRequest) {
	m.look(r)
	reserve := m.band(r.flow.priority).Reserve
	bands := map[int]bool{}
	higher := false
	for _, o := range m.waiting {
		bands[o.flow.priority] = true
		higher = higher || o.flow.priority > r.flow.priority
	}
	for p := range bands {
		switch share := m.band(p).Reserve; {
		case p != r.flow.priority && share > 0:
			m.credit[p] = min(m.credit[p]+share*r.tokens(), 64<<10)
		case p == r.flow.priority && share > 0 && higher:
			m.credit[p] -= (1 - reserve) * r.tokens()
		}
	}
	m.remove(r)
	m.out[r.flow]++
	if !r.charged {
		r.charged = true
		m.floor[r.flow.priority] = max(m.floor[r.flow.priority], m.served[r.flow]-m.guessed[r.flow])
		m.served[r.flow] += float64(r.prompt) + 2*r.output
		if r.blind = m.answer[r.flow] == 0; r.blind {
			m.guessed[r.flow] += 2 * r.output
		}
	}
	if n, _, _ := m.sum(func(o *modelRequest) bool { return o.flow.priority == r.flow.priority }); n == 0 {
		m.floor[r.flow.priority] = max(m.floor[r.flow.priority], m.served[r.flow]-m.guessed[r.flow])
	}
}

// The queue against the model, under random arrivals, places, ends, departures
// and retries. After every step all its indexes agree with each other.
func TestQueueDoesWhatItsModelDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		config := flow.Config{
			RequestsMax: rapid.IntRange(0, 12).Draw(t, "requests"),
			BytesMax:    int64(rapid.SampledFrom([]int{0, 50}).Draw(t, "bytes")),
			TTL:         time.Duration(rapid.IntRange(0, 5).Draw(t, "ttl")) * time.Second,
			Bands: []flow.Band{
				{Priority: 0, Reserve: rapid.SampledFrom([]float64{0, 0.2}).Draw(t, "reserve")},
				{Priority: 1, RequestsMax: rapid.IntRange(0, 5).Draw(t, "band"), TTL: time.Duration(rapid.IntRange(0, 2).Draw(t, "bandTTL")) * time.Second},
			},
		}
		q, m, f := flow.New(config), newModel(config), &fleet{}
		now := start
		requests := map[string]*flow.Request{}
		models := map[string]*modelRequest{}
		var out []string
		seq := 0
		f.load.Endpoints = 1

		decide := func() (got []string) {
			for _, d := range q.Pump(now, f) {
				name := d.Request.Owner.(string)
				if d.Err == nil {
					out = append(out, name)
				} else {
					name += ":" + string(d.Err.Code)
				}
				got = append(got, name)
			}
			if err := q.Check(); err != nil {
				t.Fatal(err)
			}
			return got
		}
		expect := func(gone []string) (want []string) {
			for _, name := range gone {
				want = append(want, name+":queue_full")
			}
			at := now.Sub(start)
			due := slices.Clone(m.waiting)
			slices.SortStableFunc(due, func(a, b *modelRequest) int {
				if a.ends != b.ends {
					return int(a.ends - b.ends)
				}
				return a.seq - b.seq
			})
			for _, r := range due {
				if r.ends > 0 && r.ends <= at {
					code := inference.QueueTimeout
					if r.deadline {
						code = inference.DeadlineExceeded
					}
					want = append(want, r.name+":"+string(code))
					m.remove(r)
				}
			}
			for n := f.places; n > 0 && len(m.waiting) > 0; n-- {
				r := m.next()
				m.take(r)
				want = append(want, r.name)
			}
			return want
		}
		step := func(gone []string) {
			want := expect(gone)
			if got := decide(); !slices.Equal(got, want) {
				t.Fatalf("decided %v, the model %v", got, want)
			}
		}
		ends := func(r *modelRequest, deadline time.Duration) {
			ttl := config.TTL
			if own := m.band(r.flow.priority).TTL; own > 0 {
				ttl = own
			}
			at := now.Sub(start)
			r.ends, r.deadline = 0, false
			if ttl > 0 {
				r.ends = at + ttl
			}
			if deadline > 0 && (ttl == 0 || deadline <= r.ends) {
				r.ends, r.deadline = deadline, true
			}
		}

		t.Repeat(map[string]func(*rapid.T){
			"arrive": func(t *rapid.T) {
				seq++
				r := &modelRequest{
					name: fmt.Sprint(seq), seq: seq, prompt: 50 * rapid.IntRange(1, 20).Draw(t, "prompt"),
					bytes: int64(rapid.IntRange(0, 30).Draw(t, "bytes")),
					flow:  modelFlow{rapid.IntRange(-1, 1).Draw(t, "priority"), rapid.StringMatching("[abc]").Draw(t, "flow")},
				}
				real := &flow.Request{
					Owner: r.name, Priority: r.flow.priority, Fairness: r.flow.id, Bytes: r.bytes,
					Ask: schedule.Ask{Arrived: now, Prompt: inference.Tokens{N: r.prompt}},
				}
				deadline := time.Duration(0)
				if rapid.Bool().Draw(t, "deadline") {
					deadline = now.Sub(start) + time.Duration(rapid.IntRange(1, 4).Draw(t, "within"))*time.Second
					real.Deadline = start.Add(deadline)
				}
				requests[r.name], models[r.name] = real, r
				ends(r, deadline)
				if _, known := m.served[r.flow]; !known {
					m.served[r.flow], m.born[r.flow] = 0, seq
				}
				direct := len(m.waiting) == 0 && f.places > 0
				var gone []string
				in := true
				r.weighed = float64(r.prompt) + 2*200
				if direct {
					m.push(r)
				} else {
					m.look(r)
					gone, in = m.arrive(r)
				}
				err := q.Arrive(now, real, f)
				if (err == nil) != in {
					t.Fatalf("%s: error %v, the model takes it: %v", r.name, err, in)
				}
				step(gone)
			},
			"places": func(t *rapid.T) {
				f.places = rapid.IntRange(0, 4).Draw(t, "places")
				step(nil)
			},
			"time": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(1, 3000).Draw(t, "ms")) * time.Millisecond)
				step(nil)
			},
			"end": func(t *rapid.T) {
				if len(out) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(out)-1).Draw(t, "which")
				r := models[out[i]]
				tokens := rapid.IntRange(-1, 400).Draw(t, "output")
				q.Done(requests[out[i]], -1, tokens)
				if r.blind {
					m.guessed[r.flow] -= 2 * r.output
				}
				if tokens >= 0 {
					m.served[r.flow] += 2 * (float64(tokens) - r.output)
					length := float64(max(tokens, 1))
					if m.answer[r.flow] == 0 {
						m.answer[r.flow] = length
					}
					m.answer[r.flow] += 0.2 * (length - m.answer[r.flow])
				}
				m.out[r.flow]--
				if n, _, _ := m.sum(func(o *modelRequest) bool { return o.flow == r.flow }); n == 0 && m.out[r.flow] == 0 {
					m.guessed[r.flow] = 0
				}
				out = slices.Delete(out, i, i+1)
				step(nil)
			},
			"retry": func(t *rapid.T) {
				if len(out) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(out)-1).Draw(t, "which")
				r, real := models[out[i]], requests[out[i]]
				deadline := time.Duration(0)
				if !real.Deadline.IsZero() {
					deadline = real.Deadline.Sub(start)
				}
				ends(r, deadline)
				r.returned = true
				m.out[r.flow]--
				m.push(r)
				q.Return(now, real)
				out = slices.Delete(out, i, i+1)
				step(nil)
			},
			"leave": func(t *rapid.T) {
				if len(m.waiting) == 0 {
					t.Skip()
				}
				r := m.waiting[rapid.IntRange(0, len(m.waiting)-1).Draw(t, "which")]
				if !q.Leave(requests[r.name]) {
					t.Fatalf("%s does not wait", r.name)
				}
				m.remove(r)
				step(nil)
			},
		})
	})
}

// Chaos ends and leaves nothing behind.
func TestCountsReturnToZero(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q, f := flow.New(flow.Config{RequestsMax: 20, TTL: time.Second}), &fleet{}
		now := start
		var live []*flow.Request
		forget := func(r *flow.Request) {
			live = slices.DeleteFunc(live, func(o *flow.Request) bool { return o == r })
		}
		pump := func() {
			for _, d := range q.Pump(now, f) {
				if d.Err != nil {
					forget(d.Request)
				}
			}
		}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 300).Draw(t, "ms")) * time.Millisecond)
			f.places, f.none = rapid.IntRange(0, 3).Draw(t, "places"), rapid.IntRange(0, 9).Draw(t, "none") == 0
			r := &flow.Request{
				Ask:      schedule.Ask{Arrived: now, Prompt: inference.Tokens{N: rapid.IntRange(1, 9999).Draw(t, "prompt")}},
				Priority: rapid.IntRange(0, 2).Draw(t, "priority"), Fairness: rapid.StringMatching("[a-e]").Draw(t, "flow"),
				Bytes: 7,
			}
			if q.Arrive(now, r, f) == nil {
				live = append(live, r)
			}
			pump()
			if len(live) > 0 && rapid.Bool().Draw(t, "end") {
				r := rapid.SampledFrom(live).Draw(t, "which")
				if !q.Leave(r) {
					q.Done(r, rapid.IntRange(-1, 9999).Draw(t, "fresh"), rapid.IntRange(-1, 999).Draw(t, "output"))
				}
				forget(r)
			}
			if rapid.IntRange(0, 20).Draw(t, "reload") == 0 {
				q.Configure(flow.Config{RequestsMax: rapid.IntRange(1, 20).Draw(t, "limit"), TTL: time.Second, Bands: []flow.Band{{Priority: 1, Reserve: 0.3}}})
			}
			if err := q.Check(); err != nil {
				t.Fatal(err)
			}
		}
		now = now.Add(time.Hour)
		pump()
		for _, r := range live {
			q.Done(r, -1, -1)
		}
		s := q.Status(f.Load(), 100)
		if s.Requests != 0 || s.Bytes != 0 || s.Work != 0 {
			t.Fatalf("left: %+v", s)
		}
		for _, b := range s.Bands {
			for _, f := range b.Flows {
				if f.Requests != 0 || f.Dispatched != 0 || f.Tokens != 0 {
					t.Fatalf("left: %+v", f)
				}
			}
			refused := uint64(0)
			for _, n := range b.Counts.Refused {
				refused += n
			}
			if b.Counts.Arrived != b.Counts.Dispatched+b.Counts.Left+b.Counts.Displaced+refused {
				t.Fatalf("band %d: %+v does not add up", b.Priority, b.Counts)
			}
		}
		if err := q.Check(); err != nil {
			t.Fatal(err)
		}
	})
}
