// SPDX-License-Identifier: Apache-2.0

// Package demo shows the two promises of failover on simulated engines: it
// kills one engine before a first delta and another after it, and judges what
// the client received against what the engines logged.
//
// The judgement is internal/sim/check's, which shares no code with the gateway,
// so that a demo of a broken gateway fails.
package demo

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/lifecycle"
	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/simengine/model"
)

// Config says where the demo serves and what it says.
type Config struct {
	Listen string // of the gateway
	Admin  string // of its metrics; "" for none
	Out    io.Writer
	Log    *slog.Logger
}

// Demo is three simulated engines and a gateway in front of them.
type Demo struct {
	config  Config
	engines []*simengine.Engine
	process *lifecycle.Process
	client  *http.Client
}

// maxAttempts is the pool's, so that the judgement knows it.
const maxAttempts = 2

// Start starts the engines and the gateway.
func Start(c Config, version string) (*Demo, error) {
	d := &Demo{config: c, client: &http.Client{Transport: &http.Transport{}}}
	var urls []string
	for _, name := range []string{"A", "B", "C"} {
		e, err := simengine.Listen(simengine.Config{Name: name, Params: model.Laptop})
		if err != nil {
			d.Stop()
			return nil, err
		}
		d.engines = append(d.engines, e)
		urls = append(urls, e.URL())
	}
	gc, err := config.FromUpstreams(urls)
	if err != nil {
		d.Stop()
		return nil, err
	}
	gc.Listeners[0].Address = config.Address(c.Listen)
	gc.Listeners[0].DebugHeaders = true
	gc.Admin.Address = config.Address(c.Admin)
	gc.DrainTimeout = config.Duration(2 * time.Second)
	if d.process, err = lifecycle.Start(gc, c.Log, version); err != nil {
		d.Stop()
		return nil, err
	}
	return d, nil
}

// Stop ends the gateway and its engines.
func (d *Demo) Stop() {
	d.client.CloseIdleConnections()
	if d.process != nil {
		d.process.Stop()
	}
	for _, e := range d.engines {
		e.Close()
	}
}

// URL is where the gateway serves.
func (d *Demo) URL() string { return "http://" + d.process.Addr("main").String() }

// scene is one request of the demo.
type scene struct {
	title   string
	fault   string // what happens to the engine
	promise string
	kept    func(check.Seen) bool
}

var scenes = []scene{
	{
		title:   "nothing goes wrong",
		promise: "one whole answer",
		kept:    func(s check.Seen) bool { return s.Complete && s.Attempt == 1 },
	},
	{
		title:   "the engine dies with its first token computed and not sent",
		fault:   "attempt=1;exit@computed:1",
		promise: "one whole answer, from another engine",
		kept:    func(s check.Seen) bool { return s.Complete && s.Attempt == 2 },
	},
	{
		title:   "the engine dies after five tokens reached the client",
		fault:   "attempt=1;exit@token:5",
		promise: "the stream ends with an error, and nothing is generated again",
		kept: func(s check.Seen) bool {
			return !s.Complete && s.Attempt == 1 && s.Tokens > 0 && s.ErrorCode == "upstream_decode_interrupted"
		},
	},
}

// Run plays the scenes and reports whether every promise was kept.
func (d *Demo) Run(ctx context.Context) (bool, error) {
	fmt.Fprintf(d.config.Out, "Three simulated engines (A, B, C) behind %s.\nEach token says which engine and attempt it is from: A1·3 is engine A, attempt 1, token 3.\n", d.URL())
	good := true
	for i, s := range scenes {
		kept, err := d.play(ctx, i+1, s)
		if err != nil {
			return false, err
		}
		good = good && kept
		d.revive()
	}
	if good {
		fmt.Fprintf(d.config.Out, "\nAll promises were kept.\n")
	} else {
		fmt.Fprintf(d.config.Out, "\nA PROMISE WAS BROKEN.\n")
	}
	return good, nil
}

func (d *Demo) play(ctx context.Context, n int, s scene) (bool, error) {
	out := d.config.Out
	fmt.Fprintf(out, "\n%d. %s\n   promised: %s\n", n, capital(s.title), s.promise)
	answer, err := d.ask(ctx, s.fault)
	if err != nil {
		return false, err
	}
	log := d.logOf(ctx, answer.Request)
	for _, line := range d.story(log) {
		fmt.Fprintf(out, "   %s\n", line)
	}
	seen, readErr := check.Read(answer)
	fmt.Fprintf(out, "   client: %s\n", describe(seen))
	kept := readErr == nil && s.kept(seen)
	if readErr != nil {
		fmt.Fprintf(out, "   the bytes are not one answer: %v\n", readErr)
	}
	for _, v := range check.Judge(answer, log, check.Limits{MaxAttempts: maxAttempts, Resends: 1}) {
		kept = false
		fmt.Fprintf(out, "   violation: %v\n", v)
	}
	if kept {
		fmt.Fprintf(out, "   kept\n")
	} else {
		fmt.Fprintf(out, "   BROKEN\n")
	}
	return kept, nil
}

// ask sends one streaming request. The fault travels as a header that only
// simulated engines read.
func (d *Demo) ask(ctx context.Context, fault string) (check.Answer, error) {
	body := `{"model":"sim","stream":true,"max_tokens":12,"messages":[{"role":"user","content":"Count to twelve."}]}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.URL()+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return check.Answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	if fault != "" {
		req.Header.Set("X-Sim-Fault", fault)
	}
	res, err := d.client.Do(req)
	if err != nil {
		return check.Answer{}, err
	}
	defer res.Body.Close()
	a := check.Answer{Request: res.Header.Get("X-Request-Id"), Stream: true, Status: res.StatusCode}
	a.Body, a.Err = io.ReadAll(res.Body)
	return a, nil
}

// settleTime is how long an engine may take to log the end of a request that
// its client has seen the end of.
const settleTime = 2 * time.Second

// logOf collects what the engines logged of a request, in order of time, once
// each of them has logged how it ended there.
func (d *Demo) logOf(ctx context.Context, request string) []simengine.Entry {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	var log []simengine.Entry
	for _, e := range d.engines {
		of := func(entry simengine.Entry) bool { return entry.Request == request }
		if slices.ContainsFunc(e.Log(), of) {
			// A request without an end is the judge's to notice.
			_, _ = e.Await(ctx, func(entry simengine.Entry) bool { return of(entry) && ends[entry.Event] != "" })
		}
		for _, entry := range e.Log() {
			if of(entry) {
				log = append(log, entry)
			}
		}
	}
	slices.SortStableFunc(log, func(a, b simengine.Entry) int { return a.T.Compare(b.T) })
	return log
}

// ends are the events that end a request at an engine, in words.
var ends = map[string]string{
	simengine.EventFinished: "finished",
	simengine.EventCut:      "the process died",
	simengine.EventAborted:  "cancelled",
	simengine.EventRefused:  "refused it",
}

// story tells a request's life at the engines, a line an attempt.
func (d *Demo) story(log []simengine.Entry) []string {
	var lines []string
	for _, attempt := range log {
		if attempt.Event != simengine.EventReceived {
			continue
		}
		tokens, end := 0, "still running"
		for _, e := range log {
			if e.Engine != attempt.Engine || e.Attempt != attempt.Attempt {
				continue
			}
			if e.Event == simengine.EventToken {
				tokens++
			}
			if words, ok := ends[e.Event]; ok {
				end = words
			}
		}
		lines = append(lines, fmt.Sprintf("engine %s, attempt %d: sent %d tokens, %s", attempt.Engine, attempt.Attempt, tokens, end))
	}
	return lines
}

// describe puts in words what the client saw.
func describe(s check.Seen) string {
	text := fmt.Sprintf("%d tokens", s.Tokens)
	if s.Tokens > 0 {
		text += fmt.Sprintf(", all of engine %s, attempt %d", s.Engine, s.Attempt)
	}
	switch {
	case s.Complete:
		return text + ", then a proper end"
	case s.ErrorCode != "":
		return text + ", then the error " + s.ErrorCode
	}
	return text + ", and no end"
}

// revive starts engines that died again, at their old address.
func (d *Demo) revive() {
	for _, e := range d.engines {
		if !exited(e) {
			continue
		}
		if err := e.Restart(nil); err != nil {
			fmt.Fprintf(d.config.Out, "   engine at %s did not come back: %v\n", e.Addr(), err)
		}
	}
}

// exited reports whether the engine's process, as it were, is gone.
func exited(e *simengine.Engine) bool {
	gone := false
	for _, entry := range e.Log() {
		switch entry.Event {
		case simengine.EventExit:
			gone = true
		case simengine.EventListening:
			gone = false
		}
	}
	return gone
}

func capital(s string) string { return strings.ToUpper(s[:1]) + s[1:] }
