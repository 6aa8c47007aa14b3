// SPDX-License-Identifier: Apache-2.0

package faults_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
	"github.com/headgate/headgate/internal/simengine/model"
)

// RTY-6: the first attempt ends anywhere in the upload, by a reset, a close or
// an early answer. The second one carries the whole body all the same.
func TestRepeatCarriesTheWholeBodyWhereverTheFirstEnded(t *testing.T) {
	r := newRig(t, 2, onePool("failover: {retry_budget: {ratio: 1}}"), func(c *simengine.Config) { c.QuietTokens = true })
	clients := map[string]*http.Client{"h1": r.newClient("h1"), "h2c": r.newClient("h2c")}
	for _, size := range []int{1 << 10, 300 << 10, 20 << 20} {
		for i, fault := range []string{"rst@body:0", "rst@body:HALF", "rst@body:LAST", "fin@body:HALF", "fin@body:LAST", "status@body:HALF:503", "status@body:0:429"} {
			for _, chunked := range []bool{false, true} {
				kind := "h1"
				if (i%2 == 0) == chunked {
					kind = "h2c"
				}
				if size > 1<<20 && (!strings.Contains(fault, "HALF") || testing.Short() && kind == "h2c") {
					continue // of the big ones, the middle is enough
				}
				q := ask{Pad: size, Chunked: chunked, Max: 4}
				body := q.body()
				q.Fault = "attempt=1;" + strings.NewReplacer("HALF", fmt.Sprint(len(body)/2), "LAST", fmt.Sprint(len(body)-1)).Replace(fault)
				name := fmt.Sprintf("%d bytes, %s, chunked %v, %s", size, fault, chunked, kind)
				a := r.ask(clients[kind], q)
				// Ended in the upload, an attempt may have been on a kept
				// connection, which costs a resend.
				if seen := r.judge(a); !seen.Complete || seen.Attempt < 2 {
					t.Errorf("%s: %d %+v", name, a.Status, seen)
					continue
				}
				sent := sha256.Sum256([]byte(body))
				whole := 0
				for _, e := range r.log() {
					if e.Request != a.Request {
						continue
					}
					if e.Event == simengine.EventReceived && e.Length != int64(len(body)) {
						t.Errorf("%s: attempt %d says %d bytes", name, e.Attempt, e.Length)
					}
					if e.Event == simengine.EventBody {
						whole++
						if e.N != len(body) || e.SHA256 != hex.EncodeToString(sent[:]) {
							t.Errorf("%s: attempt %d has other bytes, %d of them", name, e.Attempt, e.N)
						}
					}
				}
				if whole != 1 {
					t.Errorf("%s: %d whole bodies at the engines", name, whole)
				}
			}
		}
	}
	r.quiet(nil)
}

// RTY-6: a body that was patched for engines is patched the same way again.
func TestRepeatCarriesTheSamePatchedBody(t *testing.T) {
	r := newRig(t, 2, func(static string) string {
		return "routes: [{match: {model: public}, backends: [{pool: p}], rewrite: {model: m1}}]\n" + onePool()(static)
	})
	for _, size := range []int{0, 300 << 10, 5 << 20} {
		q := ask{Model: "public", Stream: true, Pad: size, Fault: "attempt=1;rst@role"}
		a, seen := r.one(q)
		if !seen.Complete || seen.Attempt != 2 {
			t.Errorf("%d bytes: %d %+v", size, a.Status, seen)
		}
		digests := map[string]bool{}
		n := 0
		for _, e := range r.log() {
			if e.Request == a.Request && e.Event == simengine.EventBody {
				digests[fmt.Sprint(e.N, e.SHA256, e.Model)] = true
				n++
			}
		}
		if n != 2 || len(digests) != 1 {
			t.Errorf("%d bytes: %d bodies, %d different", size, n, len(digests))
		}
	}
	r.quiet(nil)
}

// RTY-11: many more requests than engines can run wait in line at engines that
// are healthy. Every one is served and no engine is ejected, bad requests and
// clients that leave among them notwithstanding.
func TestOverloadAndMistakesEjectNoEngine(t *testing.T) {
	requests := 1024
	switch {
	case testing.Short():
		requests = 256
	case os.Getenv("HEADGATE_LONG") != "":
		requests = 2048
	}
	// How fast this machine accepts connections is not what is judged.
	r := newRig(t, 3, onePool("timeouts: {connect: 30s}"), func(c *simengine.Config) {
		c.QuietTokens = true
		c.Params = model.Params{StepBase: time.Millisecond, RunningMax: 16}
	})
	clients := make([]*http.Client, 16)
	for i := range clients {
		clients[i] = r.newClient("h2c")
	}
	var asking sync.WaitGroup
	for i := range requests {
		c := clients[i%len(clients)]
		asking.Go(func() {
			switch {
			case i%40 == 7:
				status := []int{400, 404, 422}[i%3]
				if a := r.ask(c, ask{Fault: fmt.Sprint("times=*;status@head:", status)}); a.Status != status {
					t.Errorf("status %d, want %d: %s", a.Status, status, clip(a.Body))
				}
			case i%40 == 8:
				r.ask(c, ask{Stream: true, Leave: leave{When: "received"}})
			default:
				a := r.ask(c, ask{Stream: i%2 == 0})
				if seen, err := check.Read(a); err != nil || !seen.Complete {
					t.Errorf("%d %v %v: %s", a.Status, a.Err, err, clip(a.Body))
				}
			}
		})
	}
	asking.Wait()
	for _, e := range r.gateway.Status()[0].Endpoints {
		if e.Ejected {
			t.Errorf("%s is ejected", e.Endpoint)
		}
	}
	if n := r.ledger.pool("p").retries; n > 0 {
		t.Errorf("%d retries", n)
	}
	// Whoever has room gets the next, so shares follow how fast engines get on,
	// which on a busy machine is not equally. None is left out.
	for i, n := range r.received() {
		if n < requests/3*3/10 {
			t.Errorf("engine %d got %d of %d requests", i, n, requests)
		}
	}
	r.quiet(nil)
	r.judgeAll()
}

// CAN-2, RTY-9: there is no pause between attempts to leave in; a client that
// leaves just as the first one fails, or while the second one waits, ends the
// request there.
func TestClientThatLeavesBetweenAttemptsStartsNoOther(t *testing.T) {
	for _, stream := range []bool{true, false} {
		for _, kind := range []string{"h1", "h2c"} {
			for _, second := range []bool{false, true} {
				t.Run(fmt.Sprintf("stream %v, %s, in the second attempt %v", stream, kind, second), func(t *testing.T) {
					r := newRig(t, 3, onePool("failover: {before_first_delta: {max_attempts: 3}}"))
					r.limits.MaxAttempts = 3
					const fault = "attempt=1;rst@head,attempt=2;stall@head,attempt=3;stall@head"
					if second {
						r.leaveAtTheSecondAttempt(kind, ask{Stream: stream, Max: 4, Fault: fault})
					} else {
						a := r.ask(r.newClient(kind), ask{Stream: stream, Fault: fault, Leave: leave{When: "fault"}})
						if !a.Left {
							t.Fatalf("the client did not leave: %+v", a)
						}
					}
					if o := r.outcomes("p", 1); o[0] != "cancelled" {
						t.Errorf("outcome %s", o[0])
					}
					if n := sum(r.received()); n > 2 {
						t.Errorf("%d engines got the request", n)
					}
					r.quiet(nil)
					r.judgeAll()
				})
			}
		}
	}
}

// leaveAtTheSecondAttempt asks, and leaves once the second attempt waits.
func (r *rig) leaveAtTheSecondAttempt(kind string, q ask) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.addr+chatPath, strings.NewReader(q.body()))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Sim-Fault", q.Fault)
	over := make(chan error, 1)
	c := r.newClient(kind)
	go func() {
		res, err := c.Do(req)
		if err == nil {
			res.Body.Close()
		}
		over <- err
	}()
	waits := r.mustAwait(func(e simengine.Entry) bool { return e.Event == simengine.EventFault && e.Attempt == 2 })
	r.answers = append(r.answers, check.Answer{Request: waits.Request, Stream: q.Stream, Left: true, LeftAt: time.Now()})
	cancel()
	if err := <-over; err == nil {
		r.t.Error("the client got an answer")
	}
}

// CAN-4: clients vanish from silent streams without a word: no FIN, no RST, and
// nobody reads. Their streams end with the idle limit, everything is given back,
// and the gateway can stop while the dead connections are still open.
func TestClientsThatVanishEndWithTheIdleLimit(t *testing.T) {
	const clients = 40
	r := newRig(t, 2, onePool("timeouts: {idle: 500ms}"))
	body := ask{Stream: true, Max: 4}.body()
	for range clients {
		c, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() // not before the gateway has stopped
		if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Sim-Fault: stall@token:1\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body); err != nil {
			t.Fatal(err)
		}
	}
	for _, o := range r.outcomes("p", clients) {
		if o != "interrupted "+interrupted {
			t.Errorf("outcome %s", o)
		}
	}
	for _, e := range r.log() {
		if e.Event == simengine.EventReceived {
			r.answers = append(r.answers, check.Answer{Request: e.Request, Stream: true, Left: true})
		}
	}
	if n := len(r.answers); n != clients {
		t.Errorf("the engines got %d requests, want %d", n, clients)
	}
	r.quiet(nil)
	r.stop() // fails the test unless everything ends by itself
}

// CAN-4: the same on HTTP/2, where one connection carries many, and beside
// streams that somebody reads.
func TestUnreadStreamsOfASharedConnectionEndAlone(t *testing.T) {
	const unread = 20
	r := newRig(t, 2, onePool("timeouts: {idle: 500ms}"))
	c := r.newClient("h2c")
	ctx, cancel := r.context()
	defer cancel()
	for range unread {
		q := ask{Stream: true, Max: 4}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.addr+chatPath, strings.NewReader(q.body()))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Sim-Fault", "stall@token:1")
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		r.answers = append(r.answers, check.Answer{Request: res.Header.Get("X-Request-Id"), Stream: true, Left: true})
		defer func() {
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}()
		if seen := r.judge(r.ask(c, ask{Stream: true})); !seen.Complete {
			t.Errorf("%+v", seen)
		}
	}
	interruptions := 0
	for _, o := range r.outcomes("p", 2*unread) {
		if o == "interrupted "+interrupted {
			interruptions++
		}
	}
	if interruptions != unread {
		t.Errorf("%d streams were interrupted, want %d", interruptions, unread)
	}
	r.quiet(nil)
}
