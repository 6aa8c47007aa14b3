// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/upstream"
)

// hopByHop concern one connection (RFC 9110 §7.6.1) and are never forwarded in
// either direction.
var hopByHop = map[string]bool{
	"Connection": true, "Keep-Alive": true, "Proxy-Connection": true, "Te": true,
	"Trailer": true, "Transfer-Encoding": true, "Upgrade": true,
	"Proxy-Authenticate": true, "Proxy-Authorization": true,
}

// notForEngines are request headers that end here: this gateway's own, and
// what would leak a client's secrets or make net/http-based engines repeat.
var notForEngines = map[string]bool{
	"Authorization": true, "X-Api-Key": true, "Api-Key": true, "Cookie": true,
	"Idempotency-Key": true, "X-Idempotency-Key": true,
	"X-Request-Id": true, "X-Session-Id": true,
	"X-Slo-Ttft-Ms": true, "X-Slo-Tpot-Ms": true,
	"Accept-Encoding": true, // answers must be readable
	"Content-Length":  true, "Expect": true, "Host": true,
}

// ownPrefixes are name spaces of this and other gateways: a client that sets
// them could choose endpoints or priorities.
var ownPrefixes = []string{"Headgate-", "X-Gateway-", "X-Llm-D-"}

func own(name string) bool {
	for _, prefix := range ownPrefixes {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// engineHeader is the header that an engine gets.
func engineHeader(client http.Header, p *pool, id inference.RequestID) []upstream.Field {
	fields := make([]upstream.Field, 0, len(client)+3)
	listed := upstream.ListedByConnection(client)
	for name, values := range client {
		if name == "Authorization" && p.forwardAuth && p.authorization == "" {
			// kept: the pool says so
		} else if hopByHop[name] || notForEngines[name] || own(name) || listed[name] {
			continue
		}
		for _, v := range values {
			fields = append(fields, upstream.Field{Name: name, Value: v})
		}
	}
	fields = append(fields, authorizationHeader(p.authorization)...)
	return append(fields, upstream.Field{Name: "X-Request-Id", Value: string(id)})
}

// clientHeader is the header of an engine's answer as the client gets it.
func clientHeader(engine http.Header, id inference.RequestID) http.Header {
	h := make(http.Header, len(engine)+2)
	listed := upstream.ListedByConnection(engine)
	for name, values := range engine {
		if hopByHop[name] || listed[name] || own(name) || name == "Content-Length" || name == "Content-Encoding" {
			continue
		}
		h[name] = values
	}
	identify(h, id)
	if after := h.Get("Retry-After"); after != "" {
		h.Set("Retry-After", seconds(min(retryAfter(after, time.Now()), inference.RetryAfterMax)))
	}
	if after := h.Get("Retry-After-Ms"); after != "" && count(after, time.Millisecond) > inference.RetryAfterMax {
		h.Set("Retry-After-Ms", roundUp(inference.RetryAfterMax, time.Millisecond))
	}
	return h
}

// identify names the request in an answer. Anthropic's SDKs read the second name
// only.
func identify(h http.Header, id inference.RequestID) {
	h["X-Request-Id"] = []string{string(id)}
	h["Request-Id"] = []string{string(id)}
}

// retryAfter reads a Retry-After value: seconds or a date (RFC 9110 §10.2.3).
// What can't be read asks for nothing.
func retryAfter(value string, now time.Time) time.Duration {
	if at, err := http.ParseTime(value); err == nil {
		return max(at.Sub(now), 0)
	}
	return count(value, time.Second)
}

// count reads a whole number of units. One that is too large to be a duration
// reads as the largest: a wait that long is a wait.
func count(value string, unit time.Duration) time.Duration {
	n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 63)
	switch {
	case errors.Is(err, strconv.ErrRange), err == nil && n > uint64(math.MaxInt64/unit):
		return math.MaxInt64
	case err != nil:
		return 0
	}
	return time.Duration(n) * unit
}

// seconds is a wait as Retry-After says it.
func seconds(d time.Duration) string { return roundUp(d, time.Second) }

// roundUp counts units, and a part of one as one: a client must not come back
// early.
func roundUp(d, unit time.Duration) string {
	return strconv.FormatInt(int64((d+unit-1)/unit), 10)
}
