// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/tidwall/gjson"
)

// adminBytes bounds the body of an admin request.
const adminBytes = 1 << 20

// admin answers /sim/: what a test in another process uses. It is neither
// logged nor paused, and no fault of a request strikes it.
func (x *exchange) admin() error {
	body, err := io.ReadAll(io.LimitReader(x.req.Body, adminBytes+1))
	switch {
	case err != nil:
		return errGone
	case len(body) > adminBytes:
		x.close = true
		return x.reply(http.StatusRequestEntityTooLarge, "application/json", errorBody("the body is too long", "BadRequestError", 413))
	}
	e := x.l.e
	switch x.req.Method + " " + x.req.URL.Path {
	case "POST /sim/faults":
		return x.postFaults(body)
	case "GET /sim/log":
		since, _ := strconv.ParseUint(x.req.URL.Query().Get("since"), 10, 64)
		return x.reply(http.StatusOK, "application/x-ndjson", jsonLines(e.LogSince(since)))
	case "POST /sim/reset":
		e.Reset()
	case "POST /sim/pause":
		e.Pause()
	case "POST /sim/resume":
		e.Resume()
	case "POST /sim/exit":
		e.exit(x.l)
		return errCut
	default:
		return x.reply(http.StatusNotFound, "application/json", errorBody("no such admin call", "NotFoundError", 404))
	}
	return x.reply(http.StatusOK, "application/json", []byte(`{"ok":true}`))
}

// postFaults reads {"faults": ["script", …]}. Either all scripts are good and
// queued, or none is.
func (x *exchange) postFaults(body []byte) error {
	fail := func(status int, err error) error {
		return x.reply(status, "application/json", errorBody(err.Error(), "BadRequestError", status))
	}
	list := gjson.GetBytes(body, "faults")
	if !gjson.ValidBytes(body) || !list.IsArray() {
		return fail(http.StatusBadRequest, fmt.Errorf(`want {"faults": ["script", …]}`))
	}
	var texts []string
	for _, text := range list.Array() {
		if _, err := ParseFaults(text.String()); err != nil {
			return fail(http.StatusBadRequest, err)
		}
		texts = append(texts, text.String())
	}
	if err := x.l.e.Inject(texts...); err != nil {
		return fail(http.StatusInsufficientStorage, err)
	}
	return x.reply(http.StatusOK, "application/json", fmt.Appendf(nil, `{"ok":true,"queued":%d}`, x.l.e.FaultsLeft()))
}

// reply is a whole answer that does not stop for Pause.
func (x *exchange) reply(status int, contentType string, body []byte) error {
	h := head{status: status}
	h.set("Content-Type", contentType)
	h.set("Content-Length", strconv.Itoa(len(body)))
	if _, err := x.net.Write(append(h.bytes(x.close), body...)); err != nil {
		return errGone
	}
	return nil
}

func jsonLines(entries []Entry) []byte {
	var out []byte
	for _, entry := range entries {
		line, err := json.Marshal(entry)
		if err != nil {
			continue // no Entry is like that
		}
		out = append(append(out, line...), '\n')
	}
	return out
}
