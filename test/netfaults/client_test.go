// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
)

// ask is one request.
type ask struct {
	path   string
	stream bool
	tokens int // per choice
	n      int // choices
	pad    int // bytes of the prompt
	fault  string
	key    string // Idempotency-Key
	more   map[string]any
}

func (q ask) content() string {
	m := map[string]any{"model": "sim", "stream": q.stream, "max_tokens": q.tokens, "n": q.n}
	text := strings.Repeat("word ", q.pad/5+1)
	if q.path == "/v1/completions" {
		m["prompt"] = text
	} else {
		m["messages"] = []any{map[string]string{"role": "user", "content": text}}
	}
	maps.Copy(m, q.more)
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // not reached: these values always encode
	}
	return string(b)
}

// asked is a request under way, and what its client has got so far.
type asked struct {
	ask
	body string
	done chan struct{} // closed when the answer is over, and check.Answer whole

	check.Answer
	over time.Time // when the answer was over
	told bool      // the answer is the stored error of another one

	mu   sync.Mutex
	got  []byte
	more chan struct{}
}

// send sends a request, beside the test.
func (r *run) send(q ask) *asked {
	r.t.Helper()
	a := &asked{ask: q, body: q.content(), done: make(chan struct{}), more: make(chan struct{})}
	a.Tag = fmt.Sprintf("ask-%d", len(r.asked)+1)
	a.Answer.Stream, a.MaxTokens, a.Choices = q.stream, q.tokens, q.n
	r.asked = append(r.asked, a)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost,
		fmt.Sprintf("http://%s:%d%s", r.lane.nodes[0].addr, gatewayPort, q.path), strings.NewReader(a.body))
	r.must(err)
	req.GetBody = nil // net/http would send a keyed request again by itself
	for name, value := range map[string]string{
		"Content-Type": "application/json", "Authorization": "Bearer " + secret, check.TagHeader: a.Tag,
		"X-Sim-Fault": q.fault, "Idempotency-Key": q.key,
	} {
		if value != "" {
			req.Header.Set(name, value)
		}
	}
	go func() {
		defer close(a.done)
		defer cancel()
		defer func() { a.over = time.Now() }()
		res, err := r.client.Do(req)
		if err != nil {
			a.Err = err
			return
		}
		defer res.Body.Close()
		a.Status, a.Request = res.StatusCode, res.Header.Get("X-Request-Id")
		a.Err = a.readAll(res.Body)
		a.Answer.Body = a.got
	}()
	r.t.Cleanup(func() { <-a.done })
	return a
}

func (a *asked) isOver() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

func (a *asked) readAll(from io.Reader) error {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		a.mu.Lock()
		a.got = append(a.got, buf[:n]...)
		close(a.more)
		a.more = make(chan struct{})
		a.mu.Unlock()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// has waits until a text is in what the client has got, so many times.
func (r *run) has(a *asked, text string, times int) {
	r.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		a.mu.Lock()
		have, more := bytes.Count(a.got, []byte(text)), a.more
		a.mu.Unlock()
		if have >= times {
			return
		}
		select {
		case <-more:
		case <-a.done:
			r.t.Fatalf("the answer is over with %d of %d %q: %d %v %s\n%s", have, times, text, a.Status, a.Err, a.Body, r.engineLogs())
		case <-late.C:
			r.t.Fatalf("%d of %d %q within %v\n%s", have, times, text, patience, r.engineLogs())
		}
	}
}

// answered waits for the end of an answer.
func (r *run) answered(a *asked) check.Answer {
	r.t.Helper()
	<-a.done // by the deadline of its context at the latest
	return a.Answer
}
