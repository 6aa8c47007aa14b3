// SPDX-License-Identifier: Apache-2.0

package real

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"time"
)

// Exchange is one request that reached a relay and what its engine answered,
// read from the relay's bytes.
type Exchange struct {
	Relay   *Relay
	Conn    *Conn
	Began   time.Time // of the connection
	Reused  bool      // the connection had carried another request
	Request string    // X-Request-Id
	Path    string
	Sent    []byte // the request's body as far as it came

	Status int    // 0: no whole head of an answer came
	Body   []byte // without the transfer coding, as far as it came
	Whole  bool   // the body ended by its framing
	Passed []byte // the part of Body that the gateway was let see
}

// Posts are the POST requests that came over the relay, in order.
func (r *Relay) Posts() []Exchange {
	var posts []Exchange
	for _, c := range r.Conns() {
		posts = append(posts, c.posts()...)
	}
	return posts
}

func (c *Conn) posts() []Exchange {
	up, _ := c.Bytes(ToEngine)
	down, passed := c.Bytes(ToGateway)
	requests := bufio.NewReader(bytes.NewReader(up))
	sent := bufio.NewReader(bytes.NewReader(down))
	seen := bufio.NewReader(bytes.NewReader(down[:passed]))
	var posts []Exchange
	for {
		req, err := http.ReadRequest(requests)
		if err != nil {
			return posts
		}
		x := Exchange{
			Relay: c.relay, Conn: c, Began: c.Began, Reused: len(posts) > 0,
			Request: req.Header.Get("X-Request-Id"), Path: req.URL.Path,
		}
		x.Sent, _ = io.ReadAll(req.Body) // as far as it came
		x.Status, x.Body, x.Whole = readAnswer(sent, req)
		_, x.Passed, _ = readAnswer(seen, req)
		if req.Method == http.MethodPost {
			posts = append(posts, x)
		}
	}
}

func readAnswer(from *bufio.Reader, req *http.Request) (status int, body []byte, whole bool) {
	res, err := http.ReadResponse(from, req)
	if err != nil {
		return 0, nil, false
	}
	body, err = io.ReadAll(res.Body)
	return res.StatusCode, body, err == nil
}

// Stale reports whether the request met the end of a connection that was kept
// from an earlier one. The engine's log tells that it was not begun.
func (x Exchange) Stale() bool { return x.Reused && x.Status == 0 }

// InOrder sorts exchanges by when their connections began.
func InOrder(list []Exchange) []Exchange {
	slices.SortStableFunc(list, func(a, b Exchange) int { return a.Began.Compare(b.Began) })
	return list
}

// Event is one event of a streamed answer: its bytes with the empty line that
// ends it, and what its data says.
type Event struct {
	Raw  string
	Done bool // data: [DONE]
	Chunk
}

// Chunk is the data of an event, as far as tests read it.
type Chunk struct {
	ID      string `json:"id"`
	Choices []struct {
		Delta struct {
			Content string `json:"content"`
		} `json:"delta"`
		Message struct {
			Content string `json:"content"`
		} `json:"message"`
		FinishReason string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		Completion int `json:"completion_tokens"`
	} `json:"usage"`
	Error *StreamError `json:"error"`
}

// StreamError is the error that ends a stream.
type StreamError struct {
	Message   string `json:"message"`
	Type      string `json:"type"`
	Code      any    `json:"code"`
	Request   string `json:"request_id"`
	Partial   bool   `json:"partial_output"`
	Tokens    int    `json:"delivered_output_tokens"`
	Retryable *bool  `json:"retryable"`
}

// Events splits the body of a streamed answer as llama-server and Headgate
// write it, one data line an event. rest is what follows the last whole event.
func Events(body []byte) (list []Event, rest []byte) {
	for {
		raw, after, ok := bytes.Cut(body, []byte("\n\n"))
		if !ok {
			return list, body
		}
		body = after
		e := Event{Raw: string(raw) + "\n\n"}
		data, _ := bytes.CutPrefix(raw, []byte("data: "))
		if e.Done = string(data) == "[DONE]"; !e.Done {
			_ = json.Unmarshal(data, &e.Chunk) // what can't be read has no fields
		}
		list = append(list, e)
	}
}

// UsageOnly reports whether the event is the one that include_usage asks for.
func (e Event) UsageOnly() bool { return e.Usage != nil && len(e.Choices) == 0 }

// Content is the event's text.
func (e Event) Content() string {
	text := ""
	for _, c := range e.Choices {
		text += c.Delta.Content
	}
	return text
}

// Text joins the text of events.
func Text(events []Event) string {
	text := ""
	for _, e := range events {
		text += e.Content()
	}
	return text
}
