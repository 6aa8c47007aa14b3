// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/dialect/openai"
)

// refuse answers a request that was never journalled: refused before routing.
func (g *Gateway) refuse(ex Exchange, id inference.RequestID, d dialect.Dialect, err *inference.Error) {
	g.log.Debug("request refused", "request", id, "code", err.Code, "reason", err.Error())
	g.record.Request("", "", inference.Rejected, err.Code)
	writeError(ex, id, d, err)
}

// writeError answers with an error of Headgate's own. Nothing may have been
// written before.
func writeError(ex Exchange, id inference.RequestID, d dialect.Dialect, err *inference.Error) {
	writeErrorDetail(ex, d, err, dialect.ErrorDetail{RequestID: id, Retryable: err.Code.Info().Retryable})
}

func writeErrorDetail(ex Exchange, d dialect.Dialect, err *inference.Error, detail dialect.ErrorDetail) {
	body := d.ErrorBody(err, detail)
	h := http.Header{
		"Content-Type":    {"application/json"},
		"Content-Length":  {strconv.Itoa(len(body))},
		"Headgate-Reason": {string(err.Code)},
		"X-Should-Retry":  {strconv.FormatBool(detail.Retryable)},
	}
	identify(h, detail.RequestID)
	if err.Allow != "" {
		h["Allow"] = []string{err.Allow}
	}
	if wait := err.Wait(); wait > 0 {
		h["Retry-After"] = []string{seconds(wait)}
		h["Retry-After-Ms"] = []string{roundUp(wait, time.Millisecond)}
	}
	ex.WriteHead(err.HTTPStatus(), h)
	// A client that is gone needs no answer.
	_, _ = ex.Write(body)
}

// writeJSON answers with a value of Headgate's own.
func writeJSON(ex Exchange, id inference.RequestID, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		writeError(ex, id, openai.Chat, &inference.Error{Code: inference.Internal, Message: "internal error", Err: err})
		return
	}
	h := http.Header{"Content-Type": {"application/json"}, "Content-Length": {strconv.Itoa(len(body))}}
	identify(h, id)
	ex.WriteHead(http.StatusOK, h)
	_, _ = ex.Write(body)
}
