// SPDX-License-Identifier: Apache-2.0

package check

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/headgate/headgate/internal/simengine"
)

// An arrival is one attempt as the engine that got it tells it.
type arrival struct {
	request     string
	engine      string
	incarnation int
	conn        uint64
	attempt     int
	at          time.Time
	whole       bool // the request's body was read to its end

	sent     int // tokens handed to the kernel, 0 where tokens are not logged
	computed int // tokens computed, from the entry that ended the attempt
	ended    string
	lastWork time.Time // of the last token or the end of the answer
}

func (a *arrival) name() string { return a.engine + strconv.Itoa(a.attempt) }

// Identify fills in the Request of answers that have only a Tag, and so the
// answers of clients that left before they saw a head.
func Identify(answers []Answer, log []simengine.Entry) {
	ids := map[string]string{}
	for _, e := range log {
		if e.Event == simengine.EventReceived && e.Request != "" {
			if tag := e.Header.Get(TagHeader); tag != "" {
				ids[tag] = e.Request
			}
		}
	}
	for i := range answers {
		if a := &answers[i]; a.Request == "" && a.Tag != "" {
			a.Request = ids[a.Tag]
		}
	}
}

func (a *Answer) name() string {
	if a.Request != "" {
		return a.Request
	}
	return a.Tag
}

// inference says that an entry is of a request for output.
func inference(e simengine.Entry) bool {
	path, _, _ := strings.Cut(e.Path, "?")
	return path == "/v1/chat/completions" || path == "/v1/completions"
}

// arrivals are the attempts of every request, oldest first.
func arrivals(log []simengine.Entry) map[string][]*arrival {
	type place struct {
		engine      string
		incarnation int
		conn        uint64
	}
	var list []*arrival
	open := map[place]*arrival{}
	gone := map[place]string{} // conn 0: the incarnation
	for _, e := range log {
		at := place{e.Engine, e.Incarnation, e.Conn}
		switch e.Event {
		case simengine.EventReceived:
			delete(open, at)
			if inference(e) {
				a := &arrival{request: e.Request, engine: e.Engine, incarnation: e.Incarnation, conn: e.Conn, attempt: e.Attempt, at: e.T}
				open[at] = a
				list = append(list, a)
			}
			continue
		case simengine.EventConnClosed, simengine.EventExit, simengine.EventStopped:
			gone[at] = e.Event
			continue
		}
		a := open[at]
		if a == nil {
			continue
		}
		switch e.Event {
		case simengine.EventBody:
			a.whole = true
		case simengine.EventToken:
			a.sent++
			a.lastWork = e.T
		case simengine.EventFinished:
			a.computed, a.ended, a.lastWork = e.N, e.Event, e.T
		case simengine.EventCut, simengine.EventAborted:
			if a.ended == "" {
				a.computed, a.ended = e.N, e.Event
			}
		case simengine.EventRefused:
			if a.ended == "" {
				a.ended = e.Event
			}
		}
	}
	requests := map[string][]*arrival{}
	for _, a := range list {
		if a.ended == "" {
			a.ended = gone[place{a.engine, a.incarnation, a.conn}]
		}
		if a.ended == "" {
			a.ended = gone[place{a.engine, a.incarnation, 0}]
		}
		requests[a.request] = append(requests[a.request], a)
	}
	for _, attempts := range requests {
		slices.SortStableFunc(attempts, func(a, b *arrival) int { return a.at.Compare(b.at) })
	}
	return requests
}

// Judge holds one answer against the logs of all engines.
func Judge(a Answer, log []simengine.Entry, limits Limits) []Violation {
	j := &judge{answer: a, limits: limits}
	seen, err := Read(a)
	if v, ok := errors.AsType[Violation](err); ok {
		j.found(v.Invariant, "%s", v.Saw)
	}
	if a.Request == "" {
		return j.list
	}
	attempts := arrivals(log)[a.Request]
	j.bounded(attempts)
	j.published(seen, attempts)
	if err == nil {
		j.outcome(seen, attempts)
	}
	j.gone(attempts)
	return j.list
}

type judge struct {
	answer Answer
	limits Limits
	list   []Violation
}

func (j *judge) found(invariant, format string, args ...any) {
	j.list = append(j.list, Violation{Invariant: invariant, Request: j.answer.name(), Saw: fmt.Sprintf(format, args...)})
}

// bounded: no more attempts than allowed, each numbered once. Their order shows
// nothing: an engine that was stopped reads an abandoned request late.
func (j *judge) bounded(attempts []*arrival) {
	most := j.limits.MaxAttempts + j.limits.Resends
	if j.limits.MaxAttempts > 0 && len(attempts) > most {
		j.found(Bounded, "engines received %d attempts (%s), %d are allowed", len(attempts), names(attempts), most)
	}
	whole := 0
	numbers := map[int]bool{}
	for _, a := range attempts {
		if numbers[a.attempt] {
			j.found(Bounded, "attempt %d was received twice (%s)", a.attempt, names(attempts))
		}
		numbers[a.attempt] = true
		if a.whole {
			whole++
		}
	}
	if j.limits.ToolsOnce && whole > 1 {
		j.found(ActionsOnce, "%d engines that execute tools got the whole request (%s)", whole, names(attempts))
	}
}

func names(attempts []*arrival) string {
	var list []string
	for _, a := range attempts {
		list = append(list, a.name())
	}
	return strings.Join(list, " ")
}

// published: what the client has was made by an attempt that really was, and no
// later one was dispatched.
func (j *judge) published(seen Seen, attempts []*arrival) {
	if seen.Engine == "" {
		return
	}
	by := seen.Engine + strconv.Itoa(seen.Attempt)
	var source *arrival
	for _, a := range attempts {
		switch {
		case a.name() == by:
			source = a
		case a.attempt > seen.Attempt:
			j.found(NoRepeat, "attempt %s was dispatched although the client has output of %s", a.name(), by)
		}
	}
	switch {
	case source == nil:
		j.found(OnePublisher, "the client has output of %s, which no engine made for this request (%s)", by, names(attempts))
	case source.sent > 0 && seen.Tokens > source.sent+1:
		// A token is logged after it is written, so a cut may leave one unlogged.
		j.found(OnePublisher, "the client has %d tokens, engine %s sent %d", seen.Tokens, by, source.sent)
	case seen.Complete && source.computed > 0 && seen.Tokens != source.computed:
		j.found(TrueOutcome, "the answer claims to be complete with %d tokens, engine %s computed %d", seen.Tokens, by, source.computed)
	}
}

// outcome: a stream that breaks off says so in the stream.
func (j *judge) outcome(seen Seen, attempts []*arrival) {
	if seen.Cut && j.answer.Stream && seen.ErrorCode == "" {
		j.found(TrueOutcome, "the stream broke off without an error event after %d tokens: %v", seen.Tokens, j.answer.Err)
	}
	if seen.ErrorCode != "" && seen.RequestID != "" && seen.RequestID != j.answer.Request {
		j.found(TrueOutcome, "the error names request %s", seen.RequestID)
	}
	if seen.Complete && len(attempts) == 0 {
		j.found(TrueOutcome, "the answer is complete and no engine received the request")
	}
}

// gone: nothing begins for a client that has left, and nothing goes on.
func (j *judge) gone(attempts []*arrival) {
	if !j.answer.Left || j.answer.LeftAt.IsZero() {
		return
	}
	by := j.answer.LeftAt.Add(j.limits.notice())
	for _, a := range attempts {
		if a.at.After(by) {
			j.found(ClientGone, "attempt %s arrived %v after the client had left", a.name(), a.at.Sub(j.answer.LeftAt))
		}
		if a.lastWork.After(by) {
			j.found(ClientGone, "engine %s still worked %v after the client had left", a.name(), a.lastWork.Sub(j.answer.LeftAt))
		}
	}
}
