// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// What an Entry records. Every received inference request gets exactly one of
// finished, aborted, cut and refused. Entries on what is sent come after the
// bytes were handed to the kernel, so a client may be quicker than the log;
// entries on faults come before the fault is carried out.
const (
	EventListening  = "listening"   // an incarnation accepts connections
	EventAccepted   = "accepted"    // a connection was accepted
	EventReceived   = "received"    // a request head was read; body unknown yet
	EventBody       = "body_sha256" // the whole body was read; N is its length
	EventSubmitted  = "submitted"   // the model has the job; Choices of them
	EventAdmitted   = "admitted"    // the model runs the job; N is cached prompt tokens
	EventHead       = "head"        // a response head was handed to the kernel; N is the status
	EventToken      = "token"       // the event of token N was handed to the kernel
	EventTool       = "tool"        // the engine called a tool; Detail is name or error
	EventFinished   = "finished"    // the whole answer was handed to the kernel; N is tokens
	EventAborted    = "aborted"     // the client is gone and the job is cancelled; N is tokens computed
	EventCut        = "cut"         // the engine ended the answer early by a fault; N is tokens computed
	EventFault      = "fault"       // a scripted fault was carried out
	EventRefused    = "refused"     // the request was answered with an error; N is the status
	EventConnClosed = "conn_closed" // the connection is closed; Detail says by whom
	EventExit       = "exit"        // the incarnation died abruptly
	EventStopped    = "stopped"     // the incarnation was closed
)

// Entry is one line of the event log: what really happened at the engine, as
// independent checkers read it.
type Entry struct {
	Seq         uint64    `json:"seq"` // from 1, without gaps
	T           time.Time `json:"t"`
	Engine      string    `json:"engine"`
	Incarnation int       `json:"incarnation"`
	Conn        uint64    `json:"conn,omitempty"`       // connection number, from 1
	Request     string    `json:"request_id,omitempty"` // X-Request-Id
	Attempt     int       `json:"attempt,omitempty"`
	Event       string    `json:"event"`
	N           int       `json:"n,omitempty"`
	Choice      int       `json:"choice,omitempty"`
	Choices     int       `json:"choices,omitempty"`
	Detail      string    `json:"detail,omitempty"`

	// Of a received request.
	Method string      `json:"method,omitempty"`
	Path   string      `json:"path,omitempty"`
	Seen   int         `json:"seen,omitempty"` // times this request id came to this engine, this one included
	Header http.Header `json:"header,omitempty"`
	// Flagged names those of Header that a gateway must not let through:
	// credentials, idempotency keys, and what only the gateway itself may read.
	Flagged []string `json:"flagged,omitempty"`
	// Length is the Content-Length, -1 for a chunked body.
	Length int64  `json:"length,omitempty"`
	SHA256 string `json:"sha256,omitempty"`
	Model  string `json:"model,omitempty"`
}

// ErrLogOverrun is returned by Await when entries were dropped from the ring
// before they could be looked at.
var ErrLogOverrun = errors.New("simengine: log entries were dropped unread")

// eventLog is a ring of entries that waiters can follow. When it is full the
// oldest entry is dropped; the writer, if any, still gets every one.
type eventLog struct {
	mu    sync.Mutex
	out   io.Writer // gets each entry as one JSON line, under mu
	ring  []Entry
	size  int
	base  uint64        // Seq of the last entry that reset forgot
	last  uint64        // Seq of the newest entry
	added chan struct{} // closed and replaced at each entry
}

func newEventLog(size int, out io.Writer) *eventLog {
	return &eventLog{out: out, size: size, added: make(chan struct{})}
}

func (l *eventLog) add(e Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	e.Seq, e.T = l.last, time.Now()
	if len(l.ring) < l.size {
		l.ring = append(l.ring, e)
	} else {
		l.ring[l.slot(e.Seq)] = e
	}
	if l.out != nil {
		line, err := json.Marshal(e)
		if err == nil {
			_, _ = l.out.Write(append(line, '\n')) // a log that cannot be written must not stop the engine
		}
	}
	close(l.added)
	l.added = make(chan struct{})
}

// since copies the retained entries after seq, oldest first. added is closed
// when there is another one.
func (l *eventLog) since(seq uint64) (entries []Entry, added <-chan struct{}, overrun bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first := l.last - uint64(len(l.ring)) + 1
	overrun = seq+1 < first
	for n := max(seq+1, first); n <= l.last; n++ {
		entries = append(entries, l.ring[l.slot(n)])
	}
	return entries, l.added, overrun
}

func (l *eventLog) slot(seq uint64) int { return int((seq - l.base - 1) % uint64(l.size)) }

// reset forgets the entries; sequence numbers go on.
func (l *eventLog) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ring, l.base = nil, l.last
}

// Log returns a copy of the retained entries, oldest first.
func (e *Engine) Log() []Entry {
	entries, _, _ := e.log.since(0)
	return entries
}

// LogSince returns the retained entries after the one numbered seq.
func (e *Engine) LogSince(seq uint64) []Entry {
	entries, _, _ := e.log.since(seq)
	return entries
}

// Await returns the first retained entry that matches, waiting for it if need
// be. It is how tests wait: for what the engine did, not for time to pass.
func (e *Engine) Await(ctx context.Context, match func(Entry) bool) (Entry, error) {
	return e.AwaitSince(ctx, 0, match)
}

// AwaitSince is Await for entries after the one numbered seq.
func (e *Engine) AwaitSince(ctx context.Context, seq uint64, match func(Entry) bool) (Entry, error) {
	for first := true; ; first = false {
		entries, added, overrun := e.log.since(seq)
		if overrun && !first {
			return Entry{}, ErrLogOverrun
		}
		for _, entry := range entries {
			if match(entry) {
				return entry, nil
			}
			seq = entry.Seq
		}
		select {
		case <-added:
		case <-ctx.Done():
			return Entry{}, context.Cause(ctx)
		}
	}
}

// On matches entries of one event of one request; an empty request matches all.
func On(event, request string) func(Entry) bool {
	return func(e Entry) bool { return e.Event == event && (request == "" || e.Request == request) }
}

// flaggedNames are headers a gateway must keep from engines (contract: what is
// used and then stripped). Headgate-Attempt and Headgate-Lease are the
// gateway's own words to engine and guard, and not among them.
var flaggedNames = []string{
	"Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "Api-Key",
	"Idempotency-Key", "X-Idempotency-Key", "X-Session-Id",
	"X-Llm-D-Inference-Objective", "X-Gateway-Inference-Objective", "Headgate-Objective",
	"X-Llm-D-Inference-Fairness-Id", "X-Gateway-Inference-Fairness-Id", "Headgate-Fairness-Id",
	"X-Slo-Ttft-Ms", "X-Llm-D-Slo-Ttft-Ms", "X-Slo-Tpot-Ms", "X-Llm-D-Slo-Tpot-Ms", "Headgate-Timeout-Ms",
	"X-Gateway-Destination-Endpoint", "X-Gateway-Destination-Endpoint-Subset",
	"Connection", "Proxy-Connection", "Keep-Alive", "Te", "Trailer", "Upgrade",
}

func flagged(h http.Header) []string {
	var found []string
	for _, name := range flaggedNames {
		if _, ok := h[name]; ok {
			found = append(found, name)
		}
	}
	return found
}
