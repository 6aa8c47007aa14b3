// SPDX-License-Identifier: Apache-2.0

package attempt

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/inference"
)

var rewrite = flag.Bool("rewrite", false, "rewrite testdata/*.txt with the effects that Step yields")

// TestScripts replays every testdata/*.txt: blocks of events, "----", and the
// effects that Step must yield for them. Run with -rewrite to update them, and
// read the diff.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			before, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			after, err := replay(string(before))
			if err != nil {
				t.Fatal(err)
			}
			if *rewrite {
				if err := os.WriteFile(file, []byte(after), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(string(before), after); diff != "" {
				t.Errorf("effects differ from the script (-script +got):\n%s", diff)
			}
		})
	}
}

// replay runs a script and returns it with the effects that were yielded.
func replay(script string) (string, error) {
	var out strings.Builder
	var r *Request
	now := time.Unix(0, 0)
	script, _, _ = strings.Cut(script, "\n# end: ")
	for i, block := range strings.Split(strings.TrimRight(script, "\n"), "\n\n") {
		events, _, _ := strings.Cut(block, "----")
		var effects []Effect
		for line := range strings.Lines(events) {
			line = strings.TrimSpace(line)
			if i > 0 {
				out.WriteString("\n")
			}
			i = 0
			out.WriteString(line + "\n")
			words := strings.Fields(line)
			switch {
			case len(words) == 0 || words[0] == "#":
			case words[0] == "policy":
				policy, keyed, err := parsePolicy(words[1:])
				if err != nil {
					return "", err
				}
				r = NewRequest(Spec{ID: "req_test", Policy: policy, Keyed: keyed})
			default:
				event, err := parseEvent(words)
				if err != nil {
					return "", fmt.Errorf("%q: %w", line, err)
				}
				effects = append(effects, r.Step(now, event)...)
			}
		}
		if !strings.Contains(block, "----") {
			continue
		}
		out.WriteString("----\n")
		if len(effects) == 0 {
			out.WriteString("nothing\n")
		}
		for _, effect := range effects {
			out.WriteString(show(effect) + "\n")
		}
	}
	out.WriteString(attempts(r))
	return out.String(), nil
}

// attempts shows the records at the end of a script, as comments.
func attempts(r *Request) string {
	var out strings.Builder
	fmt.Fprintf(&out, "\n# end: %s phase=%s first_delta=%v\n", r.Outcome(), r.Phase(), r.FirstDeltaSent())
	for _, a := range r.Attempts() {
		fmt.Fprintf(&out, "# attempt %d %s %s verdict=%s proof=%s resent=%v\n", a.N, a.Endpoint, a.State, a.Verdict, a.Proof, a.Resent)
	}
	return out.String()
}

func parsePolicy(words []string) (p Policy, keyed bool, err error) {
	for _, w := range words {
		switch key, value, _ := strings.Cut(w, "="); key {
		case "max_attempts":
			p.MaxAttempts, err = strconv.Atoi(value)
		case "transport_fence":
			p.AllowTransportFence = true
		case "tools":
			p.ExecutesTools = true
		case "keyed":
			keyed = true
		default:
			err = fmt.Errorf("unknown policy word %q", w)
		}
		if err != nil {
			return p, keyed, err
		}
	}
	return p, keyed, nil
}

// parseEvent reads one event line: a name, an attempt number where there is
// one, then words.
func parseEvent(words []string) (Event, error) {
	args := words[1:]
	n := 0
	if len(args) > 0 {
		if v, err := strconv.Atoi(args[0]); err == nil {
			n, args = v, args[1:]
		}
	}
	has := func(word string) bool {
		return slices.Contains(args, word)
	}
	switch words[0] {
	case "queued":
		return Queued{}, nil
	case "placed":
		placed := Placed{Endpoint: inference.EndpointID(args[0]), Revision: "r1"}
		if has("lease") {
			placed.Fence = inference.FenceLease
		}
		return placed, nil
	case "unplaced":
		return Unplaced{inference.Errorf(inference.Code(args[0]), "unplaced")}, nil
	case "first_output":
		return FirstOutput{N: n, Stream: !has("body")}, nil
	case "answered":
		return Answered{N: n, Stream: !has("body"), MarkerMissing: has("marker_missing")}, nil
	case "delivered":
		return Delivered{N: n}, nil
	case "write_failed":
		return WriteFailed{N: n}, nil
	case "commit_lost":
		return CommitLost{N: n}, nil
	case "client_gone":
		return ClientGone{}, nil
	case "cancel_ack":
		return CancelAck{N: n}, nil
	case "lease_expired":
		// Also the name of a refusal: a guard's answer to a dispatch.
		if !has("refused") {
			return LeaseExpired{N: n}, nil
		}
		return Evidence{N: n, Kind: LeaseOver}, nil
	case "granted":
		return RetryAnswer{}, nil
	case "denied":
		return RetryAnswer{inference.Errorf(inference.Code(args[0]), "denied")}, nil
	case "stopped":
		return Stopped{inference.Errorf(inference.ShuttingDown, "shutting down")}, nil
	case "broken":
		return Broken{"test"}, nil
	}
	for k := range kinds {
		if k.String() == words[0] {
			return parseEvidence(Evidence{N: n, Kind: k}, args)
		}
	}
	return nil, fmt.Errorf("unknown event %q", words[0])
}

func parseEvidence(e Evidence, args []string) (Event, error) {
	for _, a := range args {
		key, value, _ := strings.Cut(a, "=")
		var err error
		switch key {
		case "status":
			e.Status, err = strconv.Atoi(value)
			e.Passable = true
		case "retry_after":
			e.RetryAfter, err = time.ParseDuration(value)
		case "stamped":
			e.Stamped = true
		case "crash":
			e.Crash = true
		case "alone":
			e.Alone = true
		default:
			err = fmt.Errorf("unknown word %q", a)
		}
		if err != nil {
			return nil, err
		}
	}
	return e, nil
}

func show(effect Effect) string {
	switch e := effect.(type) {
	case Dispatch:
		if e.Fresh {
			return fmt.Sprintf("dispatch %d to %s on a fresh connection", e.N, e.Endpoint)
		}
		return fmt.Sprintf("dispatch %d to %s", e.N, e.Endpoint)
	case Resend:
		return fmt.Sprintf("resend %d to %s on a fresh connection", e.N, e.Endpoint)
	case Revoke:
		return fmt.Sprintf("revoke %d", e.N)
	case Silent:
		return fmt.Sprintf("%d is silent: %s", e.N, e.Proof)
	case Commit:
		return fmt.Sprintf("commit %d", e.N)
	case Complete:
		if e.AddMarker {
			return fmt.Sprintf("complete %d and add the end marker", e.N)
		}
		return fmt.Sprintf("complete %d", e.N)
	case CloseGate:
		return fmt.Sprintf("close gate %d", e.N)
	case Cancel:
		return fmt.Sprintf("cancel %d", e.N)
	case Report:
		if e.RetryAfter > 0 {
			return fmt.Sprintf("report %s %s retry_after=%s", e.Endpoint, e.Verdict, e.RetryAfter)
		}
		return fmt.Sprintf("report %s %s", e.Endpoint, e.Verdict)
	case AskRetry:
		return fmt.Sprintf("ask for a retry after %s", e.After)
	case Requeue:
		return fmt.Sprintf("requeue without %v prefer %s", e.Exclude, e.PreferRevision)
	case Respond:
		return fmt.Sprintf("respond %d %s", e.Err.HTTPStatus(), e.Err.Code)
	case PassThrough:
		return fmt.Sprintf("pass the answer of %d through", e.N)
	case EndStream:
		return fmt.Sprintf("end the stream with %s", e.Err.Code)
	case Abort:
		return "abort the body"
	case Finish:
		words := []string{"finish", e.Outcome.String()}
		if e.Code != "" {
			words = append(words, string(e.Code))
		}
		if e.Fencing {
			words = append(words, "while fencing")
		}
		return strings.Join(words, " ")
	}
	return fmt.Sprintf("unknown effect %T", effect)
}
