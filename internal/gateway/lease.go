// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/control"
	"github.com/headgate/headgate/internal/guard"
	"github.com/headgate/headgate/internal/guard/roster"
	"github.com/headgate/headgate/internal/health"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/upstream"
)

// guarding is what a pool has agreed on with its guards.
type guarding struct {
	policy string
	terms  lease.Terms
	token  config.Secret
	tls    config.LeaseTLS
}

func newGuarding(c config.Pool) guarding {
	terms := lease.DefaultTerms
	terms.TTL, terms.Heartbeat = time.Duration(c.Lease.TTL), time.Duration(c.Lease.Heartbeat)
	token, _ := c.Lease.Token() // validated
	return guarding{policy: c.Guard, terms: terms, token: token, tls: c.Lease.TLS}
}

// guardOf is where an endpoint's guard is found, "" if it is used without one.
func (g guarding) guardOf(e inference.Endpoint) string {
	switch {
	case g.policy == config.GuardOff:
		return ""
	case g.policy == config.GuardRequired && e.Guard == "":
		return inference.GuardAuto
	}
	return e.Guard
}

// lines are the control streams of a gateway, one for each endpoint of each pool
// that has a guard. They outlive configurations: two at once would each take the
// guard's ear from the other.
type lines struct {
	mu   sync.Mutex
	open map[lineKey]*line
}

type lineKey struct {
	pool     string
	endpoint inference.EndpointID
}

type line struct {
	*control.Line
	guarding
	guard string
}

// openLine begins to connect to an endpoint's guard, or goes on to use the stream
// that is there.
func (m *members) openLine(id inference.EndpointID, e *engine, g guarding) (*control.Line, error) {
	transport, err := g.tls.Config()
	if err != nil {
		return nil, err
	}
	locate := func(context.Context) (string, error) { return e.guard, nil }
	if e.guard == inference.GuardAuto {
		locate = func(ctx context.Context) (string, error) { return askGuard(ctx, e.conn, id) }
	}
	pool := m.now.Load().fleet.Name
	c := control.Config{
		Locate: locate, Terms: g.terms, Token: g.token.Reveal(), TLS: transport,
		// A guard takes each pool for a gateway of its own: what one pool does not
		// know of may be another's.
		Self:   lease.Gateway{ID: m.g.self.ID + "/" + pool, Generation: m.g.self.Generation},
		Held:   func(until time.Time) { m.book.SetLeasable(id, until); m.pump() },
		Engine: func(of control.Engine) { m.engineTold(id, of) },
		Proved: m.g.inheritedSilent,
		Log:    m.g.log.With("pool", pool, "endpoint", id),
	}
	all, key := &m.g.lines, lineKey{pool, id}
	all.mu.Lock()
	defer all.mu.Unlock()
	if l := all.open[key]; l != nil && l.Use(c, l.guarding != g || l.guard != e.guard) {
		l.guarding, l.guard = g, e.guard
		return l.Line, nil
	}
	l := &line{control.Open(m.g.cut, c), g, e.guard}
	if all.open == nil {
		all.open = map[lineKey]*line{}
	}
	all.open[key] = l
	return l.Line, nil
}

// sweep forgets those that have ended.
func (l *lines) sweep() {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.open, func(_ lineKey, line *line) bool { return line.Over() })
}

// close ends the streams. The gateway has drained.
func (l *lines) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.open {
		line.Close()
	}
}

// engineTold notes what a guard says of its engine.
func (m *members) engineTold(id inference.EndpointID, of control.Engine) {
	m.book.SetIncarnation(id, of.Incarnation)
	if of.Revision != "" {
		m.book.SetRevision(id, of.Revision)
		m.reportRevisions()
	}
}

// askGuard asks at an endpoint's own address for the control port of its guard.
func askGuard(ctx context.Context, conn *upstream.Pool, id inference.EndpointID) (string, error) {
	res, end := conn.Do(ctx, &upstream.Request{Method: http.MethodGet, Target: guard.DescribePath})
	if end != nil {
		return "", end
	}
	defer func() { _ = res.Close() }()
	body, err := io.ReadAll(io.LimitReader(res, 64<<10))
	if err != nil {
		return "", err
	}
	var d guard.Description
	if res.Status != http.StatusOK || res.Header.Get(guard.OriginHeader) != guard.OriginGuard {
		return "", fmt.Errorf("no guard answers at %s%s (status %d)", id, guard.DescribePath, res.Status)
	}
	if err := json.Unmarshal(body, &d); err != nil || d.Control < 1 || d.Control > 65535 {
		return "", fmt.Errorf("the guard at %s does not tell its control port", id)
	}
	host, _, err := net.SplitHostPort(strings.TrimPrefix(strings.TrimPrefix(string(id), "http://"), "https://"))
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(host, strconv.Itoa(d.Control)), nil
}

// permit leases a health check's generation like an attempt; nil where no guard
// wants that.
func (e *engine) permit() health.Permit {
	line := e.line
	if line == nil {
		return nil
	}
	return func() (header []upstream.Field, done func(), ok bool) {
		key := lease.Key{Request: "probe_" + newRequestID(), N: 1}
		grant, ok := line.Dispatch(key, func(control.Word) {})
		return []upstream.Field{{Name: lease.Header, Value: grant.String()}}, func() { line.Release(key) }, ok
	}
}

// leased is the lease of an attempt, as far as its flight has to do with it.
type leased struct {
	line  *control.Line
	key   lease.Key
	grant lease.Grant
	word  chan control.Word // one: what the attempt's silence was proved by

	mu        sync.Mutex
	over      bool // word was given
	interrupt context.CancelCauseFunc
}

// errProved is the cause of exchanges whose attempt was proved silent meanwhile.
var errProved = errors.New("the attempt is silent")

// tell takes the line's word and interrupts the exchange that waits.
func (l *leased) tell(w control.Word) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return
	}
	l.over = true
	l.word <- w
	if l.interrupt != nil {
		l.interrupt(errProved)
	}
}

// watch has an exchange interrupted when there is a word.
func (l *leased) watch(interrupt context.CancelCauseFunc) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.interrupt = interrupt
	if l.over {
		interrupt(errProved)
	}
}

// grant takes a lease for attempt n, if its endpoint has a guard. It reports false
// if the guard is not to be had.
func (f *flight) grant(n int) bool {
	f.leased = nil
	line := f.engine.line
	if line == nil {
		return true
	}
	l := &leased{line: line, key: lease.Key{Request: f.id, N: n}, word: make(chan control.Word, 1)}
	var ok bool
	if l.grant, ok = line.Dispatch(l.key, l.tell); !ok {
		return false
	}
	f.leased = l
	l.watch(f.try.cancel)
	return true
}

// resend sends the current attempt again, on a fresh connection and with the same
// lease: the guard's epoch check starts it at most once.
func (f *flight) resend(e attempt.Resend) {
	f.cancel()
	f.try = newTry(f.ctx, f.try.engine, attempt.Dispatch{N: e.N, Endpoint: e.Endpoint, Fresh: true})
	f.leased.watch(f.try.cancel)
}

// revoke takes the lease back. What comes of it is for silence to say.
func (f *flight) revoke() {
	if l := f.leased; l != nil && !l.line.Fence(l.key) {
		l.tell(control.Word{Proof: inference.ProofLeaseExpired, Published: -1}) // it was over already
	}
}

// unlease lets go of the lease of an attempt that needs no fence any more.
func (f *flight) unlease() {
	if f.leased != nil {
		f.leased.line.Release(f.leased.key)
		f.leased = nil
	}
}

// fencing reports whether a guard is still to prove the last attempt silent.
func (f *flight) fencing() bool {
	return f.leased != nil && f.attemptState(f.leased.key.N) == attempt.Fencing
}

func (f *flight) attemptState(n int) attempt.State {
	a, _ := f.machine.Attempt(n)
	return a.State
}

// silence waits for the proof that the last attempt is silent.
func (f *flight) silence() attempt.Event {
	select {
	case w := <-f.leased.word:
		return f.proved(w)
	case <-f.ctx.Done():
		if errors.Is(context.Cause(f.ctx), errDraining) {
			return stopped()
		}
		return attempt.ClientGone{}
	}
}

// proved says in the machine's words what proves the last attempt silent.
func (f *flight) proved(w control.Word) attempt.Event {
	n := f.leased.key.N
	switch w.Proof {
	case inference.ProofLeaseExpired:
		return attempt.LeaseExpired{N: n}
	case inference.ProofDead:
		kind := attempt.EngineExited
		if w.Replaced {
			kind = attempt.GuardReplaced
		}
		return attempt.Evidence{N: n, Kind: kind, Crash: w.Crashed, Alone: w.Alone && f.othersFine()}
	}
	return attempt.CancelAck{N: n}
}

// othersFine reports whether no other endpoint of the pool is in trouble: else a
// crash may be the fault of what they share and not of this request.
func (f *flight) othersFine() bool {
	for _, s := range f.pool.book.Status(time.Now(), f.pool.now.Load().fleet) {
		if s.Endpoint != f.place.Endpoint.ID && (s.Ejected || s.Health != inference.Healthy || !s.Fenceable) {
			return false
		}
	}
	return true
}

// settle waits, after the client has its answer, until the last attempt is
// proved silent: until then its place on the endpoint is taken. The lease's end
// by this gateway's clock is the bound.
func (f *flight) settle() {
	select {
	case w := <-f.leased.word:
		_ = f.carryOut(f.step(f.proved(w)))
	case <-f.g.cut.Done():
	}
	f.letGo()
}

// silent notes the proof, and gives the place back.
func (f *flight) silent(e attempt.Silent) {
	f.vacate()
	a, _ := f.machine.Attempt(e.N)
	if f.fenced != e.N {
		f.fenced = e.N
		f.note(journal.Event{Kind: journal.Fenced, Attempt: e.N, Verdict: a.Verdict, Proof: e.Proof})
		if a.Verdict != inference.NoVerdict {
			f.g.record.Attempt(f.pool.name, a.Verdict, e.Proof)
		}
	}
	f.leased = nil // the line has let go of it
}

// guardRefusals is what a guard's own refusals are evidence of.
var guardRefusals = map[roster.Refusal]attempt.Kind{
	roster.StaleEpoch: attempt.StaleEpoch, roster.Duplicate: attempt.DuplicateAttempt,
	roster.WrongIncarnation: attempt.WrongIncarnation, roster.Expired: attempt.LeaseOver,
	roster.StaleGeneration: attempt.StaleGeneration, roster.Required: attempt.LeaseRequired,
	guard.Draining: attempt.EndpointGone, guard.BadRequest: attempt.Unwritten, guard.Unreachable: attempt.ConnectRefused,
}

// guardRefused reports what a guard's refusal says, if the answer is one.
func (t *try) guardRefused() (attempt.Kind, bool) {
	h := t.answer.header
	if h.Get(guard.OriginHeader) != guard.OriginGuard {
		return 0, false
	}
	kind, known := guardRefusals[roster.Refusal(h.Get(guard.ReasonHeader))]
	return kind, known
}

// inherit fences the attempts that a process before this one left unfinished.
// Where their endpoint is not known any more the end of their leases is waited
// for.
func (g *Gateway) inherit(began time.Time) {
	for _, r := range g.journal.Unfenced() {
		a := r.Unfenced()
		key := lease.Key{Request: r.RequestID, N: a.Attempt}
		inc, err := lease.ParseIncarnation(string(a.GuardIncarnation))
		terms := lease.DefaultTerms
		var line *control.Line
		if p := g.state.Load().pools[r.Pool]; p != nil {
			terms = p.reach.terms
			if e := p.now.Load().engines[a.Endpoint]; e != nil && err == nil {
				line = e.line
			}
		}
		// What was granted is as long as it was then.
		granted := terms
		granted.TTL = max(terms.TTL, a.LeaseTTL)
		if line != nil {
			line.Inherit(key, inc, began.Add(granted.Wait()-terms.Wait()))
			continue
		}
		timer := time.AfterFunc(time.Until(began.Add(granted.Wait())), func() {
			g.inheritedSilent(lease.Proved{Key: key, Proof: inference.ProofLeaseExpired})
		})
		context.AfterFunc(g.cut, func() { timer.Stop() })
	}
}

// inheritedSilent enters the proof that an inherited attempt is silent: from now
// on its key opens it again.
func (g *Gateway) inheritedSilent(p lease.Proved) {
	g.log.Info("an attempt of the process before is fenced", "request", p.Request, "attempt", p.N, "proof", p.Proof.String())
	_ = g.journal.Append(journal.Event{Request: p.Request, Kind: journal.Fenced, Attempt: p.N, Proof: p.Proof}) // counted
}
