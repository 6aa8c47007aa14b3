// SPDX-License-Identifier: Apache-2.0

package check_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/sim/check"
	"github.com/headgate/headgate/internal/simengine"
)

const id = "req_1"

// event is one event of a stream; raw is its data.
func event(raw string) string { return "data: " + raw + "\n\n" }

func chunk(attempt, delta, finish string) string {
	if finish != "null" {
		finish = `"` + finish + `"`
	}
	return event(fmt.Sprintf(`{"id":"chatcmpl-%s-req_1","choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]}`, attempt, delta, finish))
}

func role(attempt string) string { return chunk(attempt, `{"role":"assistant","content":""}`, "null") }

func token(attempt string, n int) string {
	return chunk(attempt, fmt.Sprintf(`{"content":"%s·%d "}`, attempt, n), "null")
}

func finish(attempt, reason string) string { return chunk(attempt, "{}", reason) }

func tokens(attempt string, from, to int) (text string) {
	for n := from; n <= to; n++ {
		text += token(attempt, n)
	}
	return text
}

const (
	done      = "data: [DONE]\n\n"
	interrupt = `data: {"error":{"code":"upstream_decode_interrupted","type":"upstream_error","message":"m","request_id":"req_1","partial_output":true,"delivered_output_tokens":3,"retryable":false}}` + "\n\n"
)

var whole = role("A1") + tokens("A1", 1, 4) + finish("A1", "length")

func stream(body string) check.Answer {
	return check.Answer{Request: id, Stream: true, Status: 200, Body: []byte(body), MaxTokens: 4}
}

func document(choices ...string) string {
	return `{"id":"chatcmpl-A1-req_1","object":"chat.completion","choices":[` + strings.Join(choices, ",") + `]}`
}

func message(index int, text, finish string) string {
	return fmt.Sprintf(`{"index":%d,"message":{"role":"assistant","content":%q},"logprobs":null,"finish_reason":%q}`, index, text, finish)
}

func collected(body string) check.Answer {
	return check.Answer{Request: id, Status: 200, Body: []byte(body), MaxTokens: 2}
}

// Every way of lying to a client that we could think of is caught, under the
// name of the promise that it breaks.
func TestReadNamesWhatIsNoAnswer(t *testing.T) {
	cut := stream(role("A1") + tokens("A1", 1, 3))
	cut.Err = io.ErrUnexpectedEOF
	noAnswer := check.Answer{Err: io.EOF}
	halfError := check.Answer{Status: 502, Body: []byte(`{"error":`), Err: io.ErrUnexpectedEOF}
	twoChoices := stream(whole + done)
	twoChoices.Choices = 2
	mixed := collected(`{"choices":[{"message":{"content":"A1·1 B2·`)
	mixed.Body = []byte(`{"id":"x","choices":[{"index":0,"message":{"content":"A1·1 B2·2 A`)
	mixed.Err = io.ErrUnexpectedEOF
	for name, c := range map[string]struct {
		answer check.Answer
		want   string // invariant and words
	}{
		"splice of two attempts":               {stream(tokens("A1", 1, 3) + strings.ReplaceAll(tokens("B2", 1, 1), "chatcmpl-B2", "chatcmpl-A1")), "I1: a splice: tokens of B2 after A1"},
		"splice that goes on counting":         {stream(tokens("A1", 1, 3) + strings.ReplaceAll(tokens("A2", 4, 4), "chatcmpl-A2", "chatcmpl-A1")), "I1: a splice: tokens of A2 after A1"},
		"preamble of another attempt":          {stream(role("A1") + strings.ReplaceAll(role("B2"), `"role":"assistant",`, "") + tokens("B2", 1, 4)), "I1: chunks of two answers"},
		"second role chunk":                    {stream(role("A1") + whole + done), "I1: choice 0 begins twice"},
		"duplicate token":                      {stream(tokens("A1", 1, 2) + tokens("A1", 2, 4)), "I1: choice 0: a duplicate, token 2 after 2"},
		"answer sent twice":                    {stream(tokens("A1", 1, 2) + tokens("A1", 1, 4)), "I1: choice 0: a duplicate, token 1 after 2"},
		"gap":                                  {stream(tokens("A1", 1, 2) + tokens("A1", 4, 4)), "I1: choice 0: a gap, token 4 after 2"},
		"missing begin":                        {stream(tokens("A1", 2, 4)), "I1: choice 0: a gap, token 2 after 0"},
		"half a token":                         {stream(chunk("A1", `{"content":"A1·"}`, "null")), "I1: choice 0: \"A1·\" is not a whole token"},
		"token of another choice":              {stream(chunk("A1", `{"content":"A1/1·1 "}`, "null")), "I1: choice 0 holds a token of choice 1"},
		"UTF-8 cut":                            {stream("data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"A1\xc2\"}}]}\n\n"), "I1: an event is not UTF-8"},
		"UTF-8 replaced":                       {stream(chunk("A1", `{"content":"A1�1 "}`, "null")), "I1: choice 0: \"A1�1 \" is not a whole token"},
		"cut event":                            {stream(tokens("A1", 1, 3) + `data: {"id":"chat`), "I1: the last event is cut"},
		"event cut by another":                 {stream(tokens("A1", 1, 3) + `data: {"id":"chat` + interrupt), "I1: an event is not JSON"},
		"logprobs of other tokens":             {stream(event(`{"id":"x","choices":[{"index":0,"delta":{"content":"A1·1 "},"logprobs":{"content":[{"token":"B1·1 "}]}}]}`)), "I1: choice 0: logprobs"},
		"silent truncation":                    {stream(role("A1") + tokens("A1", 1, 3)), "I4: silent truncation: a clean end after 3 tokens"},
		"silent truncation before any token":   {stream(role("A1")), "I4: silent truncation: a clean end after 0 tokens"},
		"finish and no end marker":             {stream(whole), "I4: the stream is finished and has no end marker"},
		"only [DONE]":                          {stream(done), "I4: [DONE] after 0 of 0 finish_reasons"},
		"[DONE] without finish_reason":         {stream(role("A1") + tokens("A1", 1, 4) + done), "I4: [DONE] after 0 of 1 finish_reasons"},
		"[DONE] with a choice missing":         {twoChoices, "I4: [DONE] after 1 of 2 finish_reasons"},
		"length that is not":                   {stream(role("A1") + tokens("A1", 1, 3) + finish("A1", "length") + done), "I4: choice 0: finish_reason length after 3 tokens of 4"},
		"output after finish_reason":           {stream(role("A1") + tokens("A1", 1, 2) + finish("A1", "stop") + tokens("A1", 3, 3)), "I4: choice 0: \"A1·3 \" after its finish_reason"},
		"two finish_reasons":                   {stream(whole + finish("A1", "length")), "I4: choice 0 finishes twice"},
		"[DONE] after error":                   {stream(role("A1") + tokens("A1", 1, 3) + interrupt + done), "I4: [DONE] after an error event"},
		"error twice":                          {stream(role("A1") + tokens("A1", 1, 3) + interrupt + interrupt), "I4: a second error event"},
		"output after error":                   {stream(role("A1") + tokens("A1", 1, 3) + interrupt + token("A1", 4)), "I4: bytes after the error event"},
		"error after [DONE]":                   {stream(whole + done + interrupt), "I4: bytes after the end marker"},
		"output after [DONE]":                  {stream(whole + done + token("A1", 5)), "I4: bytes after the end marker"},
		"[DONE] twice":                         {stream(whole + done + done), "I4: bytes after the end marker"},
		"error with choices":                   {stream(tokens("A1", 1, 1) + event(`{"error":{"code":"x"},"choices":[{"index":0,"delta":{}}]}`)), "I4: an event is an error and output at once"},
		"error that miscounts":                 {stream(tokens("A1", 1, 2) + interrupt), "I4: the error event says 3 tokens were delivered, the client has 2"},
		"partial answer called retryable":      {stream(tokens("A1", 1, 3) + strings.Replace(interrupt, `"retryable":false`, `"retryable":true`, 1)), "I4: the error event calls a partly delivered answer retryable"},
		"empty stream":                         {stream(""), "I4: status 200 and an empty body"},
		"stream of comments":                   {stream(": nothing\n\n"), "I4: silent truncation"},
		"no answer at all":                     {noAnswer, "I4: no answer at all"},
		"half an error":                        {halfError, "I4: the error body broke off"},
		"output under an error status":         {check.Answer{Status: 502, Body: []byte("A1·1 A1·2 ")}, "I1: status 502 carries output"},
		"error status that says partial":       {check.Answer{Status: 502, Body: []byte(`{"error":{"code":"upstream_failed","partial_output":true}}`)}, "I4: status 502 says that output was delivered"},
		"empty body":                           {collected(""), "I4: status 200 and an empty body"},
		"body mixing attempts":                 {collected(document(message(0, "A1·1 B2·2 ", "length"))), "I1: a splice: tokens of B2 after A1"},
		"choices of two attempts":              {collected(document(message(0, "A1·1 A1·2 ", "length"), message(1, "B2/1·1 B2/1·2 ", "length"))), "I1: a splice: tokens of B2 after A1"},
		"body cut and ended cleanly":           {collected(document(message(0, "A1·1 A1·2 ", "length"))[:90]), "I4: silent truncation: the body ends cleanly"},
		"cut body mixing attempts":             {mixed, "I1: a splice: tokens of B2 after A1"},
		"body with a gap":                      {collected(document(message(0, "A1·1 A1·3 ", "length"))), "I1: choice 0: a gap, token 3 after 1"},
		"body with missing tokens":             {collected(document(message(0, "A1·1 ", "length"))), "I4: choice 0: finish_reason length after 1 tokens of 2"},
		"body with missing choices":            {check.Answer{Status: 200, Body: []byte(document(message(0, "A1·1 ", "stop"))), Choices: 2}, "I4: an answer with 1 choices passes for a whole one"},
		"body without choices":                 {collected(document()), "I4: an answer with 0 choices"},
		"body with a choice twice":             {collected(document(message(0, "A1·1 A1·2 ", "length"), message(0, "", "length"))), "I1: choice 0 comes twice"},
		"bytes after the body":                 {collected(document(message(0, "A1·1 A1·2 ", "length")) + `{"error":{}}`), "I4: bytes after the end of the answer"},
		"body that is error and output":        {collected(strings.TrimSuffix(document(message(0, "A1·1 ", "stop")), "}") + `,"error":{"code":"x"}}`), "I4: the body is an error and output at once"},
		"silent truncation behind a bare FIN":  {stream(tokens("A1", 1, 3) + "\n"), "I4: silent truncation"},
		"finish_reason stop for missing end":   {stream(whole[:len(whole)-len(finish("A1", "length"))] + done), "I4: [DONE] after 0 of 1"},
		"client left, and still two attempts":  {left(stream(tokens("A1", 1, 1) + tokens("B2", 1, 1))), "I1: chunks of two answers"},
		"reasoning of one, content of another": {stream(strings.ReplaceAll(chunk("A1", `{"reasoning_content":"A1·1 "}`, "null")+chunk("A1", `{"content":"B2·1 "}`, "null"), "B2-", "A1-")), "I1: a splice: tokens of B2 after A1"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := check.Read(c.answer)
			if err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("got %v\nwant %s…", err, c.want)
			}
			var v check.Violation
			if err != nil && !errors.As(err, &v) {
				t.Errorf("%T is no Violation", err)
			}
		})
	}
	// A stream that breaks off is no lie, but a promise broken: Judge says so.
	if seen, err := check.Read(cut); err != nil || !seen.Cut || seen.Tokens != 3 {
		t.Errorf("cut stream: %+v, %v", seen, err)
	}
	wants(t, check.Judge(cut, nil, check.Limits{}), "I4: req_1: the stream broke off without an error event after 3 tokens")
}

func left(a check.Answer) check.Answer {
	a.Left, a.Err = true, errors.New("context canceled")
	return a
}

func TestReadUnderstandsGoodAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		answer check.Answer
		want   string
	}{
		"whole stream":              {stream(whole + done), "A1 4 complete"},
		"comments around":           {stream(": hi\n\n" + whole + ": bye\n\ndata:\n\n" + done + ":\n"), "A1 4 complete"},
		"carriage returns and BOM":  {stream("\ufeff" + strings.ReplaceAll(whole+done, "\n", "\r\n")), "A1 4 complete"},
		"data in two lines":         {stream(strings.Replace(whole, `","choices"`, "\",\ndata: \"choices\"", 1) + done), "A1 4 complete"},
		"legal empty answer":        {stream(role("A1") + finish("A1", "stop") + done), "0 0 complete"},
		"interrupted":               {stream(role("A1") + tokens("A1", 1, 3) + interrupt), "A1 3 upstream_decode_interrupted"},
		"client left mid-event":     {left(stream(role("A1") + tokens("A1", 1, 3) + "data: {")), "A1 3"},
		"client left before a head": {check.Answer{Left: true, Err: io.EOF}, "0 0"},
		"error body":                {check.Answer{Status: 502, Body: []byte(`{"error":{"code":"upstream_failed","retryable":true}}`)}, "0 0 upstream_failed"},
		"engine's own error":        {check.Answer{Status: 404, Body: []byte(`{"error":{"code":404}}`)}, "0 0 404"},
		"engine's own page":         {check.Answer{Status: 418, Body: []byte("<html>")}, "0 0"},
		"error of an engine in 200": {stream(event(`{"error":{"code":400,"message":"x"}}`)), "0 0 400"},
		"whole body":                {collected(document(message(0, "A1·1 A1·2 ", "length"))), "A1 2 complete"},
		"two choices":               {collected(document(message(1, "A1/1·1 A1/1·2 ", "length"), message(0, "A1·1 A1·2 ", "length"))), "A1 4 complete"},
		"body that was cut":         {check.Answer{Status: 200, Err: io.ErrUnexpectedEOF, Body: []byte(`{"choices":[{"message":{"content":"A1·1 A1·2 A`)}, "A1 2"},
	} {
		t.Run(name, func(t *testing.T) {
			seen, err := check.Read(c.answer)
			if err != nil {
				t.Fatal(err)
			}
			got := fmt.Sprintf("%s%d %d", seen.Engine, seen.Attempt, seen.Tokens)
			if seen.Complete {
				got += " complete"
			}
			if seen.ErrorCode != "" {
				got += " " + seen.ErrorCode
			}
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// Real engines' answers, without a gateway between, break nothing.
func TestAnswersOfEnginesPass(t *testing.T) {
	e, err := simengine.Listen(simengine.Config{Name: "eng-A"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	chat := `"model":"sim","messages":[{"role":"user","content":"hi call:pay"}]`
	n := 0
	for _, fault := range []string{"", "comment", "sse:crlf", "sse:cr", "sse:multiline", "sse:bom", "bytewise", "delta@token:1:reasoning",
		"delta@token:2:tool", "delta@token:2:logprobs", "delta@token:1:refusal", "delta@token:2:audio", "delta@token:1:unknown",
		"finish:attached", "usage:always", "usage:each", "bigline@token:1:70000", "errornull"} {
		for _, body := range []string{
			`{` + chat + `,"max_tokens":3,"stream":true}`, `{` + chat + `,"max_tokens":3}`,
			`{` + chat + `,"max_tokens":3,"n":3,"stream":true,"logprobs":true,"stream_options":{"include_usage":true}}`,
			`{` + chat + `,"max_tokens":3,"n":2,"logprobs":true,"tools":[{}]}`,
			`{` + chat + `,"max_tokens":3,"stream":true,"tools":[{}]}`,
			`{"model":"sim","prompt":"hi","max_tokens":3,"stream":true,"logprobs":1}`, `{"model":"sim","prompt":["a","b"],"max_tokens":3,"logprobs":1}`,
		} {
			n++
			a := check.Answer{Request: fmt.Sprint("r", n), Stream: strings.Contains(body, `"stream":true`)}
			path := "/v1/chat/completions"
			if strings.Contains(body, "prompt") {
				path = "/v1/completions"
			}
			req, _ := http.NewRequest("POST", e.URL()+path, strings.NewReader(body))
			req.Header.Set("X-Request-Id", a.Request)
			req.Header.Set("X-Sim-Fault", fault)
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			a.Status = res.StatusCode
			a.Body, a.Err = io.ReadAll(res.Body)
			res.Body.Close()
			for _, v := range check.Judge(a, e.Log(), check.Limits{MaxAttempts: 1}) {
				t.Errorf("%q %s\n%v\n%s", fault, body, v, a.Body)
			}
			if seen, _ := check.Read(a); seen.Engine != "eng-A" || seen.Tokens == 0 || !seen.Complete {
				t.Errorf("%q %s: %+v\n%s", fault, body, seen, a.Body)
			}
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

// tale writes an engine's log: "A1 received", "A1 token 3".
func tale(lines ...string) []simengine.Entry {
	var log []simengine.Entry
	for i, line := range lines {
		e := simengine.Entry{Seq: uint64(i + 1), T: epoch.Add(time.Duration(i) * time.Second), Incarnation: 1, Request: id}
		var who string
		fmt.Sscanf(line, "%s %s %d", &who, &e.Event, &e.N)
		e.Engine = who[:1]
		fmt.Sscan(who[1:], &e.Attempt)
		e.Conn = uint64(e.Attempt)
		if e.Event == simengine.EventReceived {
			e.Path = "/v1/chat/completions"
		}
		log = append(log, e)
	}
	return log
}

var epoch = time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC)

func TestJudgeComparesWithTheLogs(t *testing.T) {
	failed := check.Answer{Request: id, Status: 502, Body: []byte(`{"error":{"code":"upstream_failed","request_id":"req_1"}}`)}
	gone := left(stream(role("A1") + tokens("A1", 1, 3)))
	gone.LeftAt = epoch
	for name, c := range map[string]struct {
		answer check.Answer
		log    []simengine.Entry
		limits check.Limits
		want   string // "" for none
	}{
		"one attempt":                       {stream(whole + done), tale("A1 received", "A1 finished 4"), check.Limits{MaxAttempts: 1}, ""},
		"a retry before the first delta":    {stream(strings.ReplaceAll(whole, "A1", "B2") + done), tale("A1 received", "A1 cut", "B2 received", "B2 finished 4"), check.Limits{MaxAttempts: 2}, ""},
		"a resend on top":                   {failed, tale("A1 received", "A2 received", "B3 received"), check.Limits{MaxAttempts: 2, Resends: 1}, ""},
		"second attempt after a delta":      {stream(role("A1") + tokens("A1", 1, 3) + interrupt), tale("A1 received", "A1 cut 3", "B2 received"), check.Limits{MaxAttempts: 2}, "I2: req_1: attempt B2 was dispatched although the client has output of A1"},
		"attempt after a whole answer":      {stream(whole + done), tale("A1 received", "A1 finished 4", "B2 received"), check.Limits{MaxAttempts: 3}, "I2: req_1: attempt B2 was dispatched"},
		"attempts go on after the error":    {failed, tale("A1 received", "B2 received", "C3 received"), check.Limits{MaxAttempts: 2}, "I7: req_1: engines received 3 attempts (A1 B2 C3), 2 are allowed"},
		"one attempt sent twice":            {failed, tale("A1 received", "B1 received"), check.Limits{MaxAttempts: 2}, "I7: req_1: attempt 1 was received twice"},
		"tools twice":                       {failed, tale("A1 received", "A1 body_sha256 9", "B2 received", "B2 body_sha256 9"), check.Limits{MaxAttempts: 2, ToolsOnce: true}, "I5: req_1: 2 engines that execute tools got the whole request"},
		"tools once and half":               {failed, tale("A1 received", "B2 received", "B2 body_sha256 9"), check.Limits{MaxAttempts: 2, ToolsOnce: true}, ""},
		"output that nobody made":           {stream(whole + done), tale("B1 received", "B1 finished 4"), check.Limits{}, "I1: req_1: the client has output of A1, which no engine made"},
		"more than was sent":                {stream(role("A1") + tokens("A1", 1, 3) + interrupt), tale("A1 received", "A1 token 1", "A1 cut 9"), check.Limits{}, "I1: req_1: the client has 3 tokens, engine A1 sent 1"},
		"complete with tokens missing":      {stream(strings.Replace(whole, `"length"`, `"stop"`, 1) + done), tale("A1 received", "A1 finished 6"), check.Limits{}, "I4: req_1: the answer claims to be complete with 4 tokens, engine A1 computed 6"},
		"complete out of nothing":           {stream(role("A1") + finish("A1", "stop") + done), nil, check.Limits{}, "I4: req_1: the answer is complete and no engine received the request"},
		"an error of another request":       {check.Answer{Request: "req_2", Status: 502, Body: failed.Body}, nil, check.Limits{}, "I4: req_2: the error names request req_1"},
		"client gone and noticed":           {gone, tale("A1 received", "A1 aborted 3"), check.Limits{}, ""},
		"engine works on for nobody":        {gone, tale("A1 received", "A1 token 1", "A1 token 2", "A1 token 3"), check.Limits{}, "I6: req_1: engine A1 still worked 3s after the client had left"},
		"an attempt after the client left":  {gone, tale("A1 received", "A1 cut", "B2 received"), check.Limits{}, "I6: req_1: attempt B2 arrived 2s after the client had left"},
		"a splice is the answer's own":      {stream(tokens("A1", 1, 1) + tokens("B2", 1, 1)), nil, check.Limits{}, "I1: req_1: chunks of two answers"},
		"silent truncation beside a retry":  {stream(tokens("A1", 1, 1)), tale("A1 received", "B2 received"), check.Limits{}, "I4: req_1: silent truncation"},
		"answer by a request no one logged": {failed, nil, check.Limits{MaxAttempts: 1}, ""},
	} {
		t.Run(name, func(t *testing.T) { wants(t, check.Judge(c.answer, c.log, c.limits), c.want) })
	}
}

// wants looks for one violation that begins so; "" wants none.
func wants(t *testing.T, got []check.Violation, want string) {
	t.Helper()
	if want == "" && len(got) > 0 {
		t.Errorf("found %v", got)
	}
	for _, v := range got {
		if want != "" && strings.HasPrefix(v.String(), want) {
			return
		}
	}
	if want != "" {
		t.Errorf("found %v, want %s…", got, want)
	}
}

func TestFleetFindsWhatIsLeftOver(t *testing.T) {
	answers := []check.Answer{{Request: id, Status: 502}}
	gone := []check.Answer{{Request: id, Left: true}}
	for name, c := range map[string]struct {
		answers []check.Answer
		log     []simengine.Entry
		budget  *check.Budget
		want    string
	}{
		"all over":                         {answers, tale("A1 received", "A1 cut", "B2 received", "B2 finished 4"), nil, ""},
		"ended with its connection":        {answers, tale("A1 received", "A1 conn_closed"), nil, ""},
		"ended with its engine":            {answers, []simengine.Entry{tale("A1 received")[0], {Engine: "A", Incarnation: 1, Event: "exit"}}, nil, ""},
		"an engine at work":                {answers, tale("A1 received", "A1 token 1"), nil, "I10: req_1: engine A1 never came to an end"},
		"an engine at work for nobody":     {gone, tale("A1 received", "A1 token 1"), nil, "I6: req_1: its client left and engine A1 was not told"},
		"a request from nowhere":           {nil, tale("A1 received", "A1 finished"), nil, "I10: req_1: engine A1 received it and no client sent it"},
		"retries over the budget":          {answers, tale("A1 received", "A1 cut", "B2 received", "B2 cut"), &check.Budget{}, "I7: 1 retries, the budget allows 0.0"},
		"retries within what was saved":    {answers, tale("A1 received", "A1 cut", "B2 received", "B2 cut"), &check.Budget{MinPerSecond: 0.1}, ""},
		"a resend is not charged":          {answers, tale("A1 received", "A1 cut", "A2 received", "A2 cut"), &check.Budget{Resends: 1}, ""},
		"retries within what firsts added": {answers, tale("A1 received", "A1 cut", "B2 received", "B2 cut"), &check.Budget{Ratio: 1}, ""},
	} {
		t.Run(name, func(t *testing.T) { wants(t, check.Fleet(c.answers, c.log, c.budget), c.want) })
	}
}

func TestIdentifyFindsRequestsByTag(t *testing.T) {
	log := tale("A1 received")
	log[0].Header = http.Header{check.TagHeader: {"t7"}}
	answers := []check.Answer{{Tag: "t7"}, {Tag: "t8"}, {Request: "mine", Tag: "t7"}}
	check.Identify(answers, log)
	if answers[0].Request != id || answers[1].Request != "" || answers[2].Request != "mine" {
		t.Errorf("got %+v", answers)
	}
}
