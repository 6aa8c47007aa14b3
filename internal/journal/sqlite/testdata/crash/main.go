// SPDX-License-Identifier: Apache-2.0

// Command crash plays a gateway on a journal until a fault point kills it. It
// tells its parent, on standard output and at once, what was acknowledged and
// what the fake clients received.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/journal"
	"github.com/headgate/headgate/internal/journal/sqlite"
)

// say is one write of one line: a killed process leaves no half of it.
func say(format string, args ...any) { fmt.Fprint(os.Stdout, fmt.Sprintf(format+"\n", args...)) }

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	ctx := context.Background()
	s, err := sqlite.Open(ctx, os.Args[1])
	check(err)
	durability, _ := journal.ParseDurability(os.Args[2])
	j, err := journal.Open(ctx, journal.Config{Store: s, Gateway: "gw-1", Durability: durability, KeyTTL: time.Hour, AnswerMax: 1 << 16})
	check(err)
	say("generation %d", j.Generation())
	var clients sync.WaitGroup
	for c := range 8 {
		clients.Go(func() {
			for i := range 60 {
				serve(ctx, j, c, i, durability)
			}
		})
	}
	clients.Wait()
	check(j.Close())
	say("closed")
}

// serve runs one request. Every third has no key; every fifth fails its first
// attempt, and of those every other has its client repeat it.
func serve(ctx context.Context, j *journal.Journal, c, i int, durability journal.Durability) {
	name := strconv.Itoa(c) + "-" + strconv.Itoa(i)
	id := inference.RequestID("req_" + name)
	arrival := &journal.Arrival{Tenant: "t", Model: "m", Pool: "p", MaxAttempts: 3}
	keyed := i%3 != 0
	if keyed {
		d, err := j.Begin(ctx, journal.Claim{Request: id, Key: name, Digest: journal.Digest([]byte(name)), Arrival: arrival})
		check(err)
		if d.State != journal.KeyNew {
			check(fmt.Errorf("%s is %s", name, d.State))
		}
		say("begun %s", name)
	} else {
		check(j.Receive(ctx, journal.Event{Request: id, Arrival: arrival}))
		if durability == journal.Strict {
			say("received %s", name)
		}
	}
	n := 1
	check(j.Append(journal.Event{Request: id, Kind: journal.Dispatched, Attempt: n, Endpoint: "http://a"}))
	if i%5 == 0 {
		check(j.Append(journal.Event{Request: id, Kind: journal.Fencing, Attempt: n, Verdict: inference.Closed}))
		check(j.Append(journal.Event{Request: id, Kind: journal.Fenced, Attempt: n, Proof: inference.ProofTransport}))
		if keyed && i%10 == 0 {
			check(j.Finish(journal.Event{Request: id, Outcome: inference.Failed, Code: inference.UpstreamFailed}, keyed, nil))
			d, err := j.Begin(ctx, journal.Claim{Request: id + "x", Key: name, Digest: journal.Digest([]byte(name)), Arrival: arrival})
			check(err)
			if d.State != journal.KeyReopened || d.Record.RequestID != id {
				check(fmt.Errorf("repeat of %s is %s", name, d.State))
			}
		}
		n = 2
		check(j.Append(journal.Event{Request: id, Kind: journal.Dispatched, Attempt: n, Endpoint: "http://b"}))
	}
	check(j.FirstDelta(ctx, journal.Event{Request: id, Attempt: n}, keyed))
	say("delta %s", name)
	check(j.Append(journal.Event{Request: id, Kind: journal.Ended, Attempt: n, Verdict: inference.Finished}))
	if err := j.Finish(journal.Event{Request: id, Outcome: inference.Completed}, keyed, &journal.Answer{Status: 200, Body: []byte(name)}); err != nil && !errors.Is(err, journal.ErrUnavailable) {
		check(err)
	}
	if i%4 == 0 {
		check(j.Flush(ctx))
		say("finished %s", name)
	}
}
