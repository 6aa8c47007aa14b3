// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/headgate/headgate/internal/guard/roster"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/upstream"
)

// What a guard says of its answers (docs/failover.md).
const (
	// OriginHeader says whose answer it is: the engine's, which passed through,
	// or the guard's own.
	OriginHeader = "Headgate-Guard"
	OriginEngine = "origin=engine"
	OriginGuard  = "origin=guard"

	// ReasonHeader is the code of a guard's own answer.
	ReasonHeader = "Headgate-Reason"

	// DescribePath tells who the guard is and where its control stream is.
	DescribePath = "/.headgate/guard"
)

// Refusals of the shell's own, beside the roster's. Of all of them but the last
// the engine has seen nothing.
const (
	Draining    roster.Refusal = "guard_draining"
	BadLease    roster.Refusal = "bad_lease"
	BadRequest  roster.Refusal = "bad_request"
	Unreachable roster.Refusal = "engine_unreachable"
	EngineLost  roster.Refusal = "engine_lost" // only without a lease: else the connection is cut
)

var statusOf = map[roster.Refusal]int{
	Draining: http.StatusServiceUnavailable, BadLease: http.StatusBadRequest, BadRequest: http.StatusBadRequest,
	Unreachable: http.StatusServiceUnavailable, EngineLost: http.StatusBadGateway,
}

// Description is the answer at DescribePath.
type Description struct {
	Guard       string `json:"guard"`
	Incarnation string `json:"incarnation"`
	Control     int    `json:"control_port"`
	Alone       bool   `json:"alone"`
	Engine      string `json:"engine_incarnation,omitempty"`
	Revision    string `json:"model_revision,omitempty"`
	InFlight    int    `json:"in_flight"`
	LateWrites  int    `json:"late_writes"`

	Refused map[roster.Refusal]int `json:"refused"`
	Ended   map[string]int         `json:"ended"`
}

// Handler serves what gateways send to the engine.
func (g *Guard) Handler() http.Handler { return http.HandlerFunc(g.serveHTTP) }

func (g *Guard) serveHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == DescribePath {
		g.describe(w)
		return
	}
	lines, leased := r.Header[lease.Header]
	if !leased {
		if g.config.RequireLease && r.Method != http.MethodGet && r.Method != http.MethodHead {
			g.refuse(w, roster.Required, "a request that starts work here needs a lease")
			return
		}
		g.pass(w, r)
		return
	}
	// One dictionary, on however many lines (RFC 9651 §3.2): two leases are none.
	grant, err := lease.ParseGrant(strings.Join(lines, ", "))
	if err != nil {
		g.refuse(w, BadLease, err.Error())
		return
	}
	// The body is read before the attempt starts: a request that breaks off
	// while it is sent has started nothing.
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, g.config.MaxBody))
	if err != nil {
		g.refuse(w, BadRequest, "the body can't be read, or is over the guard's limit")
		return
	}
	g.attempt(w, r, grant, body)
}

func (g *Guard) describe(w http.ResponseWriter) {
	c := g.Counts()
	g.mu.Lock()
	d := Description{
		Guard: g.self.Guard, Incarnation: g.self.String(), Control: g.config.Control, Alone: g.config.Alone,
		Engine: g.process.GetIncarnation(), Revision: g.process.GetRevision(), InFlight: c.InFlight, LateWrites: c.LateWrites,
		Refused: c.Refused, Ended: map[string]int{},
	}
	g.mu.Unlock()
	for why, n := range c.Ended {
		d.Ended[why.String()] = n
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set(OriginHeader, OriginGuard)
	_ = json.NewEncoder(w).Encode(d) // whoever asked is gone
}

func (g *Guard) refuse(w http.ResponseWriter, why roster.Refusal, message string) {
	g.mu.Lock()
	g.counts.Refused[why]++
	g.mu.Unlock()
	status, own := statusOf[why]
	if !own {
		status = why.Status()
	}
	body, err := json.Marshal(map[string]any{"error": map[string]string{"type": "guard", "code": string(why), "message": message}})
	if err != nil {
		status, body = http.StatusInternalServerError, nil // not reached: strings always encode
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set(OriginHeader, OriginGuard)
	h.Set(ReasonHeader, string(why))
	w.WriteHeader(status)
	_, _ = w.Write(body) // the connection is gone
}

var refusalText = map[roster.Refusal]string{
	roster.StaleEpoch:       "a newer attempt of this request was seen",
	roster.Duplicate:        "this attempt was started, or revoked",
	roster.WrongIncarnation: "the lease is of another incarnation of this guard",
	roster.Expired:          "the lease is over",
	roster.StaleGeneration:  "a newer life of this gateway was heard",
}

// attempt takes one attempt from its admission to its end.
func (g *Guard) attempt(w http.ResponseWriter, r *http.Request, grant lease.Grant, body []byte) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	s := &serving{key: grant.Key, cancel: cancel, deadline: http.NewResponseController(w)}
	if why := g.admit(grant, s); why != roster.Accepted {
		text := refusalText[why]
		if why == Draining {
			text = "the guard is shutting down"
		}
		g.refuse(w, why, text)
		return
	}
	defer g.remove(s)
	// The gateway has closed its side: nobody reads what would still be written.
	unwatch := context.AfterFunc(r.Context(), func() { g.gatewayGone(s.key) })
	defer unwatch()

	res, end := g.engine.Do(ctx, request(r, body))
	if end != nil {
		if notStarted(end) {
			g.finish(s.key, lease.Finished)
			g.refuse(w, Unreachable, "the engine takes no connection")
			return
		}
		g.finish(s.key, s.reason(lease.Closed))
		cut(w, false)
	}
	defer func() { _ = res.Close() }()
	if why := g.relay(w, res, s); why != lease.Finished {
		g.finish(s.key, s.reason(why))
		cut(w, endsByClosing(r, res))
	}
}

// admit starts the attempt in the roster, or says why not.
func (g *Guard) admit(grant lease.Grant, s *serving) roster.Refusal {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.draining {
		return Draining
	}
	if g.serving[s.key] != nil {
		return roster.Duplicate // over, even forgotten, and not gone yet
	}
	if why := g.roster.Admit(g.now(), grant); why != roster.Accepted {
		return why
	}
	g.serving[s.key] = s
	g.arm(grant.NotAfter)
	return roster.Accepted
}

func (g *Guard) remove(s *serving) {
	s.leave()
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.serving, s.key)
}

// finish ends an attempt that has not ended yet, and tells its gateway.
func (g *Guard) finish(key lease.Key, why lease.Reason) {
	g.mu.Lock()
	end, ok := g.roster.Finish(key, why)
	g.mu.Unlock()
	if ok {
		g.declare([]lease.End{end}, nil)
	}
}

// gatewayGone ends an attempt whose gateway has closed its connection.
func (g *Guard) gatewayGone(key lease.Key) {
	g.settling.RLock()
	defer g.settling.RUnlock()
	g.mu.Lock()
	end, ok := g.roster.Finish(key, lease.Closed)
	g.mu.Unlock()
	if ok {
		g.settle([]lease.End{end}, nil)
	}
}

// cut ends the connection to the gateway, whose answer is not whole: by how a
// body ends a gateway tells a whole answer from a part. Where it ends with its
// connection only a reset says that it was cut.
func cut(w http.ResponseWriter, byClosing bool) {
	if byClosing {
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			reset(conn)
		}
	}
	panic(http.ErrAbortHandler)
}

func reset(conn net.Conn) {
	if c, ok := conn.(*tls.Conn); ok {
		conn = c.NetConn() // its own Close would say that all is well
	}
	if c, ok := conn.(*net.TCPConn); ok {
		_ = c.SetLinger(0) // an error means that the connection is gone
	}
	_ = conn.Close()
}

// endsByClosing reports whether an answer's body ends with its connection.
func endsByClosing(r *http.Request, res *upstream.Response) bool {
	return res.CloseDelimited || res.ContentLength < 0 && !r.ProtoAtLeast(1, 1)
}

// notStarted reports whether the engine can't have had the whole request.
func notStarted(end *upstream.End) bool {
	switch end.Cause {
	case upstream.Refused, upstream.DNSFailed, upstream.ConnectTimeout, upstream.NoRoute, upstream.TLSFailed, upstream.Unwritten:
		return true
	}
	return false
}

// relay passes an answer on, checked chunk by chunk where it is an attempt's. It
// returns why it ended: Finished where the whole of it was written.
func (g *Guard) relay(w http.ResponseWriter, res *upstream.Response, s *serving) lease.Reason {
	answerHeader(w.Header(), res)
	rc := http.NewResponseController(w)
	if why := g.publish(s, func() (int, error) {
		w.WriteHeader(res.Status)
		return 0, rc.Flush()
	}); why != published {
		return why
	}
	buf := chunks.Get().(*[]byte)
	defer chunks.Put(buf)
	var n int
	write := func() (int, error) {
		n, err := w.Write((*buf)[:n])
		if err == nil {
			err = rc.Flush()
		}
		return n, err
	}
	for {
		var err error
		n, err = res.Read(*buf)
		if n > 0 {
			if why := g.publish(s, write); why != published {
				return why
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return g.complete(s)
		case err != nil:
			return lease.Closed
		}
	}
}

// A chunk is what one read from the engine brings.
var chunks = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

// published is what publish returns of a chunk that was written in time.
const published lease.Reason = 0

// publish writes one chunk if the lease holds. If it does not, or the write
// fails, it returns why the attempt is over.
func (g *Guard) publish(s *serving, write func() (int, error)) lease.Reason {
	if s == nil {
		if _, err := write(); err != nil {
			return lease.Closed
		}
		return published
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g.mu.Lock()
	ok := g.roster.Check(g.now(), s.key)
	g.mu.Unlock()
	if !ok {
		return lease.Expired // or what ended the attempt has said why
	}
	n, err := write()
	s.written += int64(n)
	g.mu.Lock()
	late := g.roster.Wrote(g.now(), s.key, n)
	g.mu.Unlock()
	switch {
	case late:
		g.log.Warn("a write ended after its lease", "request", s.key.Request, "attempt", s.key.N)
		return lease.Expired
	case err != nil:
		return lease.Closed
	}
	return published
}

// complete ends an attempt whose answer was passed on whole, if its lease still
// holds: what marks the end of a chunked body is written after this, and an
// answer whose attempt was revoked or is late must not look whole.
func (g *Guard) complete(s *serving) lease.Reason {
	if s == nil {
		return lease.Finished
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g.mu.Lock()
	ok := g.roster.Check(g.now(), s.key)
	g.mu.Unlock()
	if !ok {
		return lease.Expired
	}
	g.finish(s.key, lease.Finished)
	return lease.Finished
}

// pass relays a request that has no lease.
func (g *Guard) pass(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, g.config.MaxBody))
	if err != nil {
		g.refuse(w, BadRequest, "the body can't be read, or is over the guard's limit")
		return
	}
	res, end := g.engine.Do(r.Context(), request(r, body))
	if end != nil {
		if notStarted(end) {
			g.refuse(w, Unreachable, "the engine takes no connection")
			return
		}
		g.refuse(w, EngineLost, fmt.Sprintf("the exchange with the engine failed: %s", end.Cause))
		return
	}
	defer func() { _ = res.Close() }()
	if g.relay(w, res, nil) != lease.Finished {
		cut(w, endsByClosing(r, res))
	}
}

// request is what the engine is sent: what came, without the lease and the fields
// that are of the connection.
func request(r *http.Request, body []byte) *upstream.Request {
	req := &upstream.Request{Method: r.Method, Target: r.URL.RequestURI(), Host: r.Host}
	if len(body) > 0 {
		req.Body = [][]byte{body}
	}
	listed := upstream.ListedByConnection(r.Header)
	for name, values := range r.Header {
		if slices.Contains(hopByHop, name) || listed[name] || name == lease.Header {
			continue
		}
		for _, v := range values {
			req.Header = append(req.Header, upstream.Field{Name: name, Value: v})
		}
	}
	// A fixed order makes the bytes on the wire repeatable.
	slices.SortStableFunc(req.Header, func(a, b upstream.Field) int { return strings.Compare(a.Name, b.Name) })
	return req
}

// hopByHop are the fields that are about one connection (RFC 9110 §7.6.1), and
// those that frame a message.
var hopByHop = []string{
	"Connection", "Content-Length", "Expect", "Keep-Alive", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// answerHeader fills in the head of an engine's answer. Its framing is kept: a
// body that ends with its connection must not look whole on this side because
// the connection broke on the other.
func answerHeader(h http.Header, res *upstream.Response) {
	listed := upstream.ListedByConnection(res.Header)
	for name, values := range res.Header {
		if !slices.Contains(hopByHop, name) && !listed[name] && name != OriginHeader && name != ReasonHeader {
			h[name] = values
		}
	}
	h.Set(OriginHeader, OriginEngine)
	if h.Get("Date") == "" {
		h["Date"] = nil // the engine's own, or none
	}
	if h.Get("Content-Type") == "" {
		h["Content-Type"] = nil // net/http would guess one
	}
	switch {
	case res.CloseDelimited:
		h.Set("Transfer-Encoding", "identity")
	case res.ContentLength >= 0:
		h.Set("Content-Length", strconv.FormatInt(res.ContentLength, 10))
	}
}
