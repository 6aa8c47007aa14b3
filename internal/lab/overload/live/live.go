// SPDX-License-Identifier: Apache-2.0

// Package live plays a demand of internal/lab/overload in real time: a gateway,
// simulated engines of the same parameters and one client per request, all on
// sockets of this machine.
//
// It shows that what holds in virtual time holds for the program. Clients and
// engines share the machine with the gateway, so its figures are no benchmark.
// cmd/headgate calls it.
package live

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/lab"
	"github.com/headgate/headgate/internal/lab/overload"
	"github.com/headgate/headgate/internal/lifecycle"
	"github.com/headgate/headgate/internal/simengine"
)

// Result is a run.
type Result struct {
	overload.Record
	Refusals []time.Duration // from the request's last byte to the whole refusal, sorted
	Failed   int             // requests that ended otherwise than with an answer or a refusal
}

// Play plays a demand against a pool.
func Play(ctx context.Context, pool overload.Pool, demand *overload.Demand, log *slog.Logger) (*Result, error) {
	spec, ok := lab.Engines[pool.Engine]
	if !ok {
		return nil, fmt.Errorf("engine %q is not known", pool.Engine)
	}
	params := spec.Params
	params.BlockTokens, params.Blocks = 16, spec.KVTokens/16
	var text bytes.Buffer
	text.WriteString("objectives:\n")
	for i, p := range overload.Priorities {
		fmt.Fprintf(&text, "  %s: {priority: %d}\n", objectives[i], p)
	}
	fmt.Fprintf(&text, "listeners: [{name: main, address: '127.0.0.1:0'}]\njournal: {driver: none}\nadmin: {address: ''}\ndrain_timeout: 1s\n"+
		"routes: [{backends: [{pool: p}]}]\npools:\n  p:\n    routing: {tpot: %s}\n    discovery:\n      static:\n", time.Duration(spec.TPOT*float64(time.Second)))
	for i := range pool.Engines {
		e, err := simengine.Listen(simengine.Config{Name: fmt.Sprint("E", i), Params: params, QuietTokens: true})
		if err != nil {
			return nil, err
		}
		defer e.Close()
		fmt.Fprintf(&text, "        - {url: %q}\n", e.URL())
	}
	c, err := config.Parse("live.yaml", text.Bytes())
	if err != nil {
		return nil, err
	}
	process, err := lifecycle.Start(c, log, "live")
	if err != nil {
		return nil, err
	}
	defer process.Stop()
	return play(ctx, process.Addr("main").String(), spec, demand), nil
}

// objectives are the names of overload.Priorities.
var objectives = [len(overload.Priorities)]string{"high", "middle", "low"}

// play sends every request at its time, whatever became of those before.
func play(ctx context.Context, address string, spec lab.Engine, demand *overload.Demand) *Result {
	r := &Result{Record: overload.Record{TPOT: spec.TPOT, Finished: make([]overload.Fate, len(demand.Asked))}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex // guards Refusals and Failed
	var clients sync.WaitGroup
	began := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range demand.Asked {
		a := &demand.Asked[i]
		body := request(a, uint64(i))
		timer.Reset(time.Until(began.Add(seconds(a.At))))
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		clients.Go(func() {
			c := client{asked: a, target: overload.Target(spec, a.In), tpot: spec.TPOT}
			err := c.do(ctx, address, body)
			r.Finished[i] = c.fate()
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				r.Failed++
			case c.refused > 0:
				r.Refusals = append(r.Refusals, c.refused)
			}
		})
	}
	clients.Wait()
	slices.Sort(r.Refusals)
	return r
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// client is one request as its client sees it.
type client struct {
	asked        *overload.Asked
	target, tpot float64

	sent, first, last time.Time
	tokens            int
	done              bool
	refused           time.Duration // 0: it was not
}

// patience is how long a client waits for the next byte.
const patience = 60 * time.Second

func (c *client) do(ctx context.Context, address string, body []byte) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	name := objectives[slices.Index(overload.Priorities[:], c.asked.Priority)]
	head := fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nHost: live\r\nContent-Type: application/json\r\nConnection: close\r\n"+
		"Headgate-Objective: %s\r\nHeadgate-Fairness-Id: %s\r\nX-Slo-Ttft-Ms: %d\r\nContent-Length: %d\r\n\r\n",
		name, c.asked.Tenant, int(1000*c.target), len(body))
	if _, err := conn.Write(append(head, body...)); err != nil {
		return err
	}
	c.sent = time.Now()
	_ = conn.SetReadDeadline(c.sent.Add(patience))
	in := bufio.NewReader(conn)
	res, err := http.ReadResponse(in, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode == http.StatusTooManyRequests {
		_, err := io.Copy(io.Discard, res.Body)
		c.refused = max(time.Since(c.sent), 1)
		return err
	}
	if res.StatusCode != http.StatusOK {
		return errors.New(res.Status)
	}
	return c.read(conn, res.Body)
}

// read counts the tokens of an answer as they come.
func (c *client) read(conn net.Conn, body io.Reader) error {
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		line := lines.Bytes()
		switch {
		case bytes.Equal(line, []byte("data: [DONE]")):
			c.done = true
		case bytes.Contains(line, []byte(`"content":"E`)):
			c.last = time.Now()
			if c.tokens++; c.tokens == 1 {
				c.first = c.last
			}
			_ = conn.SetReadDeadline(c.last.Add(patience))
		case bytes.Contains(line, []byte(`"error":{`)):
			return fmt.Errorf("the stream ended with %s", line)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if !c.done || c.tokens != c.asked.Out {
		return fmt.Errorf("%d of %d tokens came", c.tokens, c.asked.Out)
	}
	return nil
}

// fate judges the answer as overload does.
func (c *client) fate() overload.Fate {
	f := overload.Fate{Asked: c.asked, Target: c.target}
	switch {
	case c.refused > 0:
		f.Outcome = overload.Refused
	case c.done:
		f.Outcome = overload.Answered
	default:
		f.Outcome = overload.Broken
	}
	if c.tokens > 0 {
		f.First = c.first.Sub(c.sent).Seconds()
		// What was cached is the engine's to know, so all of the prompt counts.
		f.Spent = float64(c.asked.In + c.tokens)
	}
	if c.tokens > 1 {
		f.Pace = c.last.Sub(c.first).Seconds() / float64(c.tokens-1)
	}
	f.Good = f.Outcome == overload.Answered && f.First <= c.target && f.Pace <= c.tpot
	return f
}

// request writes a body whose words are tokens: three letters and a space, which
// simulated engines count as one and gateways guess to be one. Equal blocks give
// equal words.
func request(a *overload.Asked, own uint64) []byte {
	b := append([]byte(nil), `{"model":"sim","stream":true,"max_tokens":`...)
	b = strconv.AppendInt(b, int64(a.Out), 10)
	b = append(b, `,"messages":[{"role":"user","content":"`...)
	left := a.In - frame
	for _, key := range a.Blocks {
		n := min(overload.BlockTokens, left)
		b = words(b, key, n)
		left -= n
	}
	b = words(b, own*0x9E3779B97F4A7C15+1, left)
	return append(b, `"}]}`...)
}

// frame is about how many tokens a message has beside its content.
const frame = 4

func words(b []byte, seed uint64, n int) []byte {
	for range n {
		seed = seed*6364136223846793005 + 1442695040888963407
		x := seed >> 40
		b = append(b, 'a'+byte(x%26), 'a'+byte(x/26%26), 'a'+byte(x/676%26), ' ')
	}
	return b
}
