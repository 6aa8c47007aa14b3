// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/guard"
	"github.com/headgate/headgate/internal/lease"
	"github.com/headgate/headgate/internal/upstream"
)

type headerField = upstream.Field

// mode is what sort of answer an attempt gives.
type mode uint8

const (
	unsent mode = iota
	events      // an event stream, relayed event by event
	whole       // collected, then written at once
	raw         // began as whole and outgrew its bound; relayed as it comes
)

// try is one attempt at work: an exchange with one engine and what came of it
// so far.
type try struct {
	n          int
	fresh      bool
	dispatched time.Time
	engine     *engine
	ctx        context.Context // done with the request, or when the engine is lost
	cancel     context.CancelCauseFunc
	mode       mode

	res    *upstream.Response
	body   io.Reader // of res, decoded
	stream dialect.Stream
	ended  bool // the body ended by its framing

	held       []byte // events held back until the commit
	heldEvents int
	heldTokens int
	committed  bool

	out       []byte // whole events of one read, written together
	outEvents int
	outTokens int

	finishBy time.Time // the end marker must come by then; zero until the answer finished

	answer    answer
	usage     inference.Usage // of an answer that was collected
	hasUsage  bool
	collected []byte
	counted   int64 // of Gateway.collected
}

func newTry(ctx context.Context, e *engine, d attempt.Dispatch) *try {
	t := &try{n: d.N, fresh: d.Fresh, dispatched: time.Now(), engine: e}
	t.ctx, t.cancel = context.WithCancelCause(ctx)
	e.await(t, t.cancel)
	return t
}

// close ends the exchange. A complete answer's connection is kept if its end
// comes soon; anything else closes the connection, which tells the engine to
// stop.
func (t *try) close(f *flight) {
	t.engine.forget(t)
	defer t.cancel(nil)
	f.g.collected.Add(-t.counted)
	t.counted, t.collected = 0, nil
	if t.res == nil {
		return
	}
	res := t.res
	t.res = nil
	if t.stream == nil || !t.stream.Done() || t.ended {
		_ = res.Close()
		return
	}
	// Engines send the final chunk a moment after the end marker. The client
	// must not wait for it, and the connection is worth a short wait.
	res.Detach()
	f.g.running.Go(func() {
		res.SetReadDeadline(time.Now().Add(settleTime))
		_, _ = res.Read(make([]byte, 64))
		_ = res.Close()
	})
}

// next goes on with the current attempt until something happened that the
// machine must know.
func (f *flight) next() attempt.Event {
	if f.try.mode == unsent {
		if event := f.send(); event != nil {
			return event
		}
	}
	switch f.try.mode {
	case events:
		return f.relayEvents()
	case whole:
		return f.collect()
	}
	return f.relayRaw()
}

// send makes the exchange with the engine and looks at the head of its answer.
func (f *flight) send() attempt.Event {
	t := f.try
	header := append(f.header[:len(f.header):len(f.header)], headerField{Name: "Headgate-Attempt", Value: strconv.Itoa(t.n)})
	if f.leased != nil {
		header = append(header, headerField{Name: lease.Header, Value: f.leased.grant.String()})
	}
	limit := f.pool.limits.Total
	if first := f.pool.limits.FirstOutput; f.req.Stream && first > 0 && (limit == 0 || first < limit) {
		limit = first
	}
	res, end := t.engine.conn.Do(t.ctx, &upstream.Request{
		Method: http.MethodPost, Target: f.target, Header: header, Body: f.body, Fresh: t.fresh, HeadBy: t.by(limit),
	})
	if end != nil {
		return f.evidence(end)
	}
	t.res = res
	t.answer = answer{status: res.Status, header: res.Header}
	if res.Status < 200 || res.Status > 299 {
		return f.refused()
	}
	f.place.Accepted()
	var err error
	if t.body, err = decode(res, res.Header["Content-Encoding"]); err != nil {
		return attempt.Evidence{N: t.n, Kind: attempt.Garbage, Message: err.Error()}
	}
	t.mode = whole
	if f.req.Stream {
		return f.sniff()
	}
	return nil
}

// by is the time when a limit counted from dispatch is over, zero for none.
func (t *try) by(limit time.Duration) time.Time {
	if limit == 0 {
		return time.Time{}
	}
	return t.dispatched.Add(limit)
}

// sniff decides by the first bytes whether the answer to a streaming request is
// an event stream: engines get the content type wrong, and answer with a plain
// JSON body where they refuse to stream.
func (f *flight) sniff() attempt.Event {
	t := f.try
	t.stream = f.d.NewStream(f.req, dialect.StreamOptions{HideUsage: !f.req.IncludeUsage, Model: f.restore})
	if strings.HasPrefix(t.res.Header.Get("Content-Type"), "text/event-stream") {
		t.mode = events
		return nil
	}
	buf := t.stream.Buffer()
	n, err := t.body.Read(buf)
	switch first := bytes.TrimLeft(buf[:n], " \t\r\n\ufeff"); {
	case n == 0 && !errors.Is(err, io.EOF):
		return f.readFailed(err)
	case len(first) > 0 && first[0] == '{':
		t.collected = append([]byte(nil), buf[:n]...)
		t.stream = nil
	case len(first) > 0 && first[0] == '<':
		return attempt.Evidence{N: t.n, Kind: attempt.Garbage, Message: "the answer is markup"}
	default:
		t.mode = events
		t.stream.Filled(n)
	}
	t.ended = errors.Is(err, io.EOF)
	return nil
}

// relayEvents judges the stream event by event. Before the commit events are
// held back; after it, all whole events of one read are written together.
// Part of an event is never written, so an error event always stands alone.
func (f *flight) relayEvents() attempt.Event {
	t := f.try
	for {
		for {
			ev, ok, err := t.stream.Next()
			if err != nil {
				return f.flushThen(attempt.Evidence{N: t.n, Kind: attempt.Garbage, Message: err.Error()})
			}
			if !ok {
				break
			}
			if event := f.take(ev); event != nil {
				return event
			}
		}
		if event := f.flush(); event != nil {
			return event
		}
		if t.ended {
			return f.streamEnded()
		}
		if t.committed {
			t.res.SetReadDeadline(f.readBy())
		} else if !t.finishBy.IsZero() {
			t.res.SetReadDeadline(t.finishBy)
		}
		n, err := t.body.Read(t.stream.Buffer())
		t.stream.Filled(n)
		if errors.Is(err, io.EOF) {
			t.ended = true
		} else if err != nil {
			return f.readFailed(err)
		}
	}
}

// take handles one event of the stream.
func (f *flight) take(ev dialect.Event) attempt.Event {
	t := f.try
	switch {
	case ev.Failure != nil:
		if !t.committed {
			t.hold(ev)
			t.answer.segments, t.answer.length = [][]byte{t.held}, int64(len(t.held))
		}
		return f.flushThen(attempt.Evidence{
			N: t.n, Kind: attempt.ErrorEvent, Status: ev.Failure.Status, Message: ev.Failure.Message, Passable: !t.committed,
		})
	case ev.Done && !t.stream.Complete():
		return f.flushThen(attempt.Evidence{N: t.n, Kind: attempt.Incomplete, Message: "the stream ended before its answer was finished"})
	case t.committed:
		t.out = append(t.out, ev.Bytes...)
		t.outEvents++
		t.outTokens += ev.Tokens
	default:
		t.hold(ev)
	}
	if silence := f.pool.limits.AfterFinish; silence > 0 && t.finishBy.IsZero() && t.stream.Complete() {
		t.finishBy = time.Now().Add(silence)
	}
	if gateless && !t.committed && ev.Output {
		return f.leak()
	}
	switch {
	case ev.Done:
		if t.committed {
			f.keepStream(t.out)
		}
		return f.flushThen(attempt.Answered{N: t.n, Stream: true})
	case !t.committed && (ev.Output || len(t.held) > preambleMax):
		return attempt.FirstOutput{N: t.n, Stream: true}
	}
	return nil
}

func (t *try) hold(ev dialect.Event) {
	t.held = append(t.held, ev.Bytes...)
	t.heldEvents++
	t.heldTokens += ev.Tokens
}

// flush writes the events of one read.
func (f *flight) flush() attempt.Event {
	t := f.try
	event := f.publish(t.out, t.outEvents, t.outTokens)
	t.out, t.outEvents, t.outTokens = t.out[:0], 0, 0
	return event
}

// flushThen writes what is good before it tells what is not.
func (f *flight) flushThen(event attempt.Event) attempt.Event {
	if failed := f.flush(); failed != nil {
		return failed
	}
	return event
}

// streamEnded judges a stream whose body ended by its framing.
func (f *flight) streamEnded() attempt.Event {
	t := f.try
	if ev, ok := t.stream.CloseInput(); ok {
		if event := f.take(ev); event != nil {
			return event
		}
		if event := f.flush(); event != nil {
			return event
		}
	}
	switch {
	case t.stream.Complete():
		return attempt.Answered{N: t.n, Stream: true, MarkerMissing: !t.stream.Done()}
	case t.res.CloseDelimited:
		return attempt.Evidence{N: t.n, Kind: attempt.PeerClosed}
	}
	return attempt.Evidence{N: t.n, Kind: attempt.Incomplete, Message: "the stream ended before its answer was finished"}
}

// readBy is when the next byte of a committed stream must have come.
func (f *flight) readBy() time.Time {
	t := f.try
	by := t.by(f.pool.limits.Total)
	sooner := func(at time.Time) {
		if by.IsZero() || at.Before(by) {
			by = at
		}
	}
	if !t.finishBy.IsZero() {
		sooner(t.finishBy)
	} else if idle := f.pool.limits.Idle; idle > 0 {
		sooner(time.Now().Add(idle))
	}
	return by
}

// readFailed judges an error of reading the answer's body.
func (f *flight) readFailed(err error) attempt.Event {
	t := f.try
	end, ok := errors.AsType[*upstream.End](err)
	if !ok {
		// The decoder's: the bytes are not what their content coding says.
		return attempt.Evidence{N: t.n, Kind: attempt.Garbage, Message: "the answer can't be decoded"}
	}
	// The answer itself is whole; only the end marker is missing. A guard's word
	// that the attempt is over may come before the end of its connection.
	over := end.Cause == upstream.Timeout || end.Cause == upstream.ClosedFIN || errors.Is(context.Cause(t.ctx), errProved)
	if over && t.stream != nil && t.stream.Complete() {
		return attempt.Answered{N: t.n, Stream: true, MarkerMissing: true}
	}
	return f.evidence(end)
}

// evidence says in the machine's words how an exchange ended.
func (f *flight) evidence(end *upstream.End) attempt.Event {
	t := f.try
	if errors.Is(end, upstream.ErrClosed) {
		return attempt.Evidence{N: t.n, Kind: attempt.EndpointGone}
	}
	switch end.Cause {
	case upstream.Interrupted:
		switch cause := context.Cause(t.ctx); {
		case errors.Is(cause, errDraining):
			return stopped()
		case errors.Is(cause, errProved):
			return f.proved(<-f.leased.word)
		case errors.Is(cause, errEngineLost) && unwritten(end):
			return attempt.Evidence{N: t.n, Kind: attempt.Unwritten}
		case errors.Is(cause, errEngineLost):
			return attempt.Evidence{N: t.n, Kind: attempt.ProbesFail}
		}
		return attempt.ClientGone{}
	case upstream.Timeout:
		return attempt.Evidence{N: t.n, Kind: f.limit()}
	case upstream.InvalidRequest:
		return attempt.Broken{Reason: end.Error()}
	}
	kind := evidenceOf[end.Cause]
	if kind == attempt.Unknown && unwritten(end) {
		kind = attempt.Unwritten // no socket to be had, say
	}
	return attempt.Evidence{N: t.n, Kind: kind}
}

// unwritten reports whether the engine can't have the whole request.
func unwritten(end *upstream.End) bool {
	return !end.Reused && !end.RequestWritten && !end.ResponseStarted
}

// stopped ends a request that a shutdown cuts off.
func stopped() attempt.Event {
	return attempt.Stopped{Err: inference.Errorf(inference.ShuttingDown, "the gateway is shutting down")}
}

var evidenceOf = map[upstream.Cause]attempt.Kind{
	upstream.DNSFailed:      attempt.NameGone,
	upstream.Refused:        attempt.ConnectRefused,
	upstream.ConnectTimeout: attempt.ConnectTimeout,
	upstream.NoRoute:        attempt.NoRoute,
	upstream.TLSFailed:      attempt.TLSFailed,
	upstream.Unwritten:      attempt.Unwritten,
	upstream.Stale:          attempt.StaleConnection,
	upstream.ClosedFIN:      attempt.PeerClosed,
	upstream.ClosedRST:      attempt.PeerReset,
	upstream.Malformed:      attempt.Garbage,
	upstream.Failed:         attempt.Unknown,
}

// limit tells which limit a passed deadline was.
func (f *flight) limit() attempt.Kind {
	t := f.try
	switch total := t.by(f.pool.limits.Total); {
	case !total.IsZero() && !time.Now().Before(total), !f.req.Stream:
		return attempt.TotalLimit
	case t.committed:
		return attempt.IdleLimit
	}
	return attempt.FirstOutputLimit
}

// refused reads an answer that is not a success, whole, so that it can be
// passed through.
func (f *flight) refused() attempt.Event {
	t := f.try
	t.res.SetReadDeadline(t.by(f.pool.limits.Total))
	var err error
	if t.body, err = decode(t.res, t.res.Header["Content-Encoding"]); err != nil {
		return attempt.Evidence{N: t.n, Kind: attempt.Garbage, Message: err.Error()}
	}
	if over, err := f.readWhole(); err != nil {
		return f.readFailed(err)
	} else if over {
		return attempt.Evidence{N: t.n, Kind: attempt.Garbage, Message: "the engine's error is too large"}
	}
	t.answer.segments, t.answer.length = [][]byte{t.collected}, int64(len(t.collected))
	if t.answer.status == http.StatusNotFound && t.engine.lists(f.served) {
		t.engine.relist() // it was restarted with another model, or an adapter was unloaded
	}
	if f.leased != nil {
		if kind, ok := t.guardRefused(); ok {
			return attempt.Evidence{N: t.n, Kind: kind}
		}
	}
	return attempt.Evidence{
		N: t.n, Kind: attempt.Answer, Status: t.answer.status, Passable: true,
		Stamped:    f.leased != nil && t.answer.header.Get(guard.OriginHeader) == guard.OriginEngine,
		RetryAfter: retryAfter(t.res.Header.Get("Retry-After"), time.Now()),
	}
}

// collect reads a whole answer and judges it. One that outgrows its bound is
// committed as it is and relayed from there.
func (f *flight) collect() attempt.Event {
	t := f.try
	t.res.SetReadDeadline(t.by(f.pool.limits.Total))
	over, err := f.readWhole()
	switch {
	case err != nil:
		return f.readFailed(err)
	case over && f.pool.policy.ExecutesTools:
		// SDKs send a request again whose body was cut, and its tools may have
		// run; so such an answer is never begun.
		return attempt.Evidence{N: t.n, Kind: attempt.Garbage, Message: "the answer is larger than collect_max"}
	case over && !f.req.Opaque && !beginsObject(t.collected):
		return attempt.Evidence{N: t.n, Kind: attempt.Garbage, Message: "the answer is not JSON"}
	case over:
		segments, _ := dialect.Apply(t.collected, f.d.AnswerHead(f.req, t.collected, f.restore))
		t.mode, t.held = raw, bytes.Join(segments, nil)
		return attempt.FirstOutput{N: t.n}
	}
	found, err := f.d.Answer(f.req, t.collected, f.restore)
	switch {
	case t.res.CloseDelimited && (err != nil || found.Opaque):
		return attempt.Evidence{N: t.n, Kind: attempt.PeerClosed}
	case err != nil:
		return attempt.Evidence{N: t.n, Kind: attempt.Garbage, Message: "the answer is not JSON"}
	}
	t.answer.segments, t.answer.length = dialect.Apply(t.collected, found.Edits)
	switch {
	case found.Failure != nil:
		return attempt.Evidence{
			N: t.n, Kind: attempt.ErrorEvent, Status: found.Failure.Status, Message: found.Failure.Message, Passable: true,
		}
	case found.Choices == 0:
		return attempt.Evidence{N: t.n, Kind: attempt.Incomplete, Message: "the answer has no choices"}
	}
	t.heldTokens = max(found.Usage.Completion, 0)
	t.usage, t.hasUsage = found.Usage, found.HasUsage
	return attempt.Answered{N: t.n}
}

// beginsObject reports whether the bytes may be the begin of a JSON object.
func beginsObject(b []byte) bool {
	b = bytes.TrimLeft(b, " \t\r\n")
	return len(b) == 0 || b[0] == '{'
}

// readWhole reads the body to its end, or reports that it passed its bound.
func (f *flight) readWhole() (over bool, err error) {
	t := f.try
	for !t.ended {
		if len(t.collected) == cap(t.collected) {
			grown := make([]byte, len(t.collected), max(2*cap(t.collected), 4<<10))
			copy(grown, t.collected)
			t.collected = grown
		}
		n, err := t.body.Read(t.collected[len(t.collected):cap(t.collected)])
		t.collected = t.collected[:len(t.collected)+n]
		t.counted += int64(n)
		total := f.g.collected.Add(int64(n))
		if errors.Is(err, io.EOF) {
			t.ended = true
			break
		}
		if err != nil {
			return false, err
		}
		if int64(len(t.collected)) > f.pool.collectMax || total > collectTotalMax {
			return true, nil
		}
	}
	return false, nil
}

// relayRaw relays what follows an answer that outgrew its bound.
func (f *flight) relayRaw() attempt.Event {
	t := f.try
	buf := make([]byte, 32<<10)
	for !t.ended {
		n, err := t.body.Read(buf)
		if event := f.publish(buf[:n], 0, 0); event != nil {
			return event
		}
		if errors.Is(err, io.EOF) {
			t.ended = true
		} else if err != nil {
			return f.readFailed(err)
		}
	}
	if t.res.CloseDelimited {
		return attempt.Evidence{N: t.n, Kind: attempt.PeerClosed}
	}
	return attempt.Answered{N: t.n}
}
