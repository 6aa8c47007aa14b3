// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/http"
	"strconv"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect"
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
	body := d.ErrorBody(err, dialect.ErrorDetail{RequestID: id, Retryable: err.Code.Info().Retryable})
	h := http.Header{
		"Content-Type":    {"application/json"},
		"Content-Length":  {strconv.Itoa(len(body))},
		"X-Request-Id":    {string(id)},
		"Headgate-Reason": {string(err.Code)},
		"X-Should-Retry":  {strconv.FormatBool(err.Code.Info().Retryable)},
	}
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
