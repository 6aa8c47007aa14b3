// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"

	"github.com/headgate/headgate/internal/gateway"
)

// explainMax bounds a body that is to be explained; past it 413.
const explainMax = 64 << 20

// explain says where a request would go now. Its body is the request's body; its
// path, host and headers are parameters. Nothing is sent to an engine.
func (a *api) explain(w http.ResponseWriter, r *http.Request) {
	question, err := questionOf(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	question.Body, err = io.ReadAll(http.MaxBytesReader(w, r.Body, explainMax))
	if _, over := errors.AsType[*http.MaxBytesError](err); over {
		http.Error(w, fmt.Sprintf("the body is over the limit of %d bytes", explainMax), http.StatusRequestEntityTooLarge)
		return
	} else if err != nil {
		return // nobody is there to read the answer
	}
	write(w, a.Gateway.Explain(question))
}

// questionOf reads path (default /v1/chat/completions), host and any number of
// header, as Name: value.
func questionOf(q url.Values) (gateway.Question, error) {
	out := gateway.Question{Path: cmp.Or(q.Get("path"), "/v1/chat/completions"), Host: q.Get("host"), Header: http.Header{}}
	for name := range q {
		switch name {
		case "path", "host", "header":
		default:
			return out, fmt.Errorf("unknown parameter %q", name)
		}
	}
	for _, line := range q["header"] {
		name, value, found := strings.Cut(line, ":")
		if name = strings.TrimSpace(name); !found || name == "" {
			return out, fmt.Errorf("header: must be like Name: value")
		}
		out.Header.Add(textproto.CanonicalMIMEHeaderKey(name), strings.TrimSpace(value))
	}
	if out.Header.Get("Content-Type") == "" {
		out.Header.Set("Content-Type", "application/json")
	}
	return out, nil
}
