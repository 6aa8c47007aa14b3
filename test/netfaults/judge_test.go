// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
)

// An ending is what a client can come to know of its request.
type ending string

// whole is a complete answer; interrupted a part of one, and the error that says
// so; lost a connection that broke. Anything else is a status and a code.
const (
	whole       ending = "whole"
	interrupted ending = "interrupted"
	lost        ending = "lost"
)

func refused(status int, code string) ending { return ending(fmt.Sprintf("%d %s", status, code)) }

var (
	notFenced = refused(http.StatusServiceUnavailable, "source_not_fenced")
	timedOut  = refused(http.StatusGatewayTimeout, "upstream_timeout")
)

// endingOf reads an answer by itself. What is no answer at all is a violation,
// which judge reports.
func endingOf(a check.Answer) ending {
	seen, _ := check.Read(a)
	switch {
	case a.Status == 0:
		return lost
	case a.Status != http.StatusOK:
		return refused(a.Status, seen.ErrorCode)
	case seen.Complete:
		return whole
	case seen.ErrorCode == "upstream_decode_interrupted":
		return interrupted
	}
	return lost
}

// record is the part of a journal's record that is judged.
type record struct {
	Outcome    string  `json:"outcome"`
	Code       string  `json:"code"`
	FirstDelta bool    `json:"first_delta_sent"`
	Attempts   []tried `json:"attempts"`
}

type tried struct {
	N       int       `json:"attempt"`
	State   string    `json:"state"`
	Verdict string    `json:"verdict"`
	Level   string    `json:"fence_level"`
	Proof   string    `json:"fence_proof"`
	EndedAt time.Time `json:"ended_at"`
}

// record asks the gateway what became of a request.
func (r *run) record(id string) (record, error) {
	var rec record
	body, err := r.get(gatewayPort, "/v1/requests/"+id)
	if err == nil {
		err = json.Unmarshal(body, &rec)
	}
	if err != nil {
		return rec, fmt.Errorf("record of %s: %w", id, err)
	}
	return rec, nil
}

// finished waits until the journal has the outcome of a request, and the proofs
// of its attempts.
func (r *run) finished(id string) record {
	r.t.Helper()
	var rec record
	var err error
	late := poll("outcome of "+id, func() bool {
		rec, err = r.record(id)
		return err == nil && rec.Outcome != "" && !slices.ContainsFunc(rec.Attempts, func(a tried) bool {
			return a.State == "fencing" && a.Level == "lease"
		})
	})
	if late != nil {
		r.t.Errorf("I4: %v: %v %+v\n%s", late, err, rec, r.engineLogs())
	}
	return rec
}

// limits are what one request may cost: two attempts, and one resend after a
// stale connection.
var limits = check.Limits{MaxAttempts: 2, Resends: 1, Notice: 20 * time.Second}

// judge waits until the engines are idle and all that they logged is read, and judges the whole run from outside:
// clients' bytes, engines' logs, the journal's records.
func (r *run) judge() {
	r.t.Helper()
	var answers []check.Answer
	for _, a := range r.asked {
		answer := r.answered(a)
		if len(r.gateways) > 1 && endingOf(answer) == lost {
			answer.Left = true // so it is for the engines; nobody was there to answer
		}
		answers = append(answers, answer)
	}
	var found []check.Violation
	_ = poll("nothing to be wrong", func() bool { // what is wrong is reported below
		found = r.look(answers)
		return len(found) == 0
	})
	for _, v := range found {
		r.t.Errorf("%v", v)
	}
	if r.t.Failed() {
		r.t.Log("\n" + r.engineLogs())
	}
}

// look judges what is known by now: an engine may be at work, or its log be on
// the way.
func (r *run) look(answers []check.Answer) []check.Violation {
	log := r.log()
	check.Identify(answers, log)
	budget := r.budget
	budget.Lasted = time.Since(r.began)
	found := check.Fleet(answers, log, &budget)
	requests := map[string][]simengine.Entry{}
	for _, e := range log {
		requests[e.Request] = append(requests[e.Request], e)
	}
	for i, a := range answers {
		if r.asked[i].told {
			continue // what it says was delivered, was so to another client
		}
		found = append(found, check.Judge(a, requests[a.Request], limits)...)
	}
	return found
}

// agree holds the journal's record against what the client got (I4), and the
// attempts that it knows against those that engines got.
func (r *run) agree(a *asked) record {
	r.t.Helper()
	rec := r.finished(a.Request)
	got := endingOf(a.Answer)
	want := map[string][]ending{"completed": {whole}, "interrupted": {interrupted}}[rec.Outcome]
	switch rec.Outcome {
	case "completed", "interrupted":
		if !slices.Contains(want, got) {
			r.t.Errorf("I4: %s: the journal says %s, the client has %q", a.Request, rec.Outcome, got)
		}
	case "failed":
		if a.Status == http.StatusOK || rec.FirstDelta {
			r.t.Errorf("I4: %s: the journal says failed, first delta %v, and the client has %q", a.Request, rec.FirstDelta, got)
		}
	default:
		r.t.Errorf("I4: %s: outcome %q for a client that stayed, which has %q", a.Request, rec.Outcome, got)
	}
	known := map[int]bool{}
	for _, t := range rec.Attempts {
		known[t.N] = true
	}
	for _, e := range r.arrivals() {
		if e.Request == a.Request && !known[e.Attempt] {
			r.t.Errorf("I7: engine %s got attempt %d, of which the journal knows nothing: %+v", e.Engine, e.Attempt, rec)
		}
	}
	for i, t := range rec.Attempts {
		if want := map[bool]string{true: "lease", false: "transport"}[r.guarded]; t.Level != want || r.guarded && t.Proof == "transport" {
			r.t.Errorf("attempt %d is fenced at level %s by %q", t.N, t.Level, t.Proof)
		}
		if i+1 < len(rec.Attempts) && (t.State != "fenced" || t.Proof == "") {
			r.t.Errorf("I3: attempt %d was followed by another, and its state is %s, its proof %q", t.N, t.State, t.Proof)
		}
	}
	return rec
}

// replay: the state machines, told again what happened, decide what was done.
// Of a life that was killed some requests may be under way.
func (r *run) replay() {
	r.t.Helper()
	for life, g := range r.gateways {
		out, err := exec.Command(os.Getenv(programEnv), "replay", r.trace(life)).CombinedOutput()
		killed := !g.cmd.ProcessState.Success()
		if err != nil || !killed && !strings.Contains(string(out), " 0 under way") {
			r.t.Errorf("replay of life %d: %v\n%s", life, err, out)
		}
		for _, line := range g.all {
			if strings.Contains(line, "panic") || strings.Contains(line, "level=ERROR") {
				r.t.Errorf("the gateway's log: %s", line)
			}
		}
	}
}
