// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/auth"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/dialect"
	"github.com/headgate/headgate/internal/route"
)

// A body must arrive at this pace, with this head start: slower is an attack or
// a broken client, and either holds memory for nothing.
const (
	bodyGrace = 30 * time.Second
	bodyPace  = 16 << 10 // bytes a second
)

// admission is a request that was understood and has a pool.
type admission struct {
	ex        *metered
	id        inference.RequestID
	d         dialect.Dialect
	req       *dialect.Request
	body      []byte
	pool      *pool
	found     route.Result
	who       *auth.Principal
	treatment treatment
	session   string // with its tenant; "" for none
	adapter   string // that the engines' model is; "" for none
	debug     bool   // why an endpoint was chosen is to be told
	arrived   time.Time
}

// admit reads and understands a request and finds its pool. Whatever is wrong
// with it is found here, before anything is sent anywhere.
func (g *Gateway) admit(ex *metered, id inference.RequestID, d dialect.Dialect) (*admission, *inference.Error) {
	head := ex.Head()
	if err := checkHead(head); err != nil {
		return nil, err
	}
	contentType := head.Header.Get("Content-Type")
	if err := d.CheckType(contentType); err != nil {
		return nil, inference.AsError(err)
	}
	query := route.Query{Host: head.Host, Path: head.Path, Header: head.Header}
	state := g.state.Load()
	who, err := state.keys.Authenticate(head.Header)
	if err != nil {
		return nil, err
	}
	if err := checkKey(head, who); err != nil {
		return nil, err
	}
	ex.key, ex.allowance = who.Key, state.allowances[who.Key]
	if refusal := ex.check(); refusal != nil {
		return nil, g.rateLimited(ex, refusal)
	}
	bodyMax, err := state.routes.LargestBody(query, head.BodyMax)
	if err != nil {
		return nil, err
	}
	arrived := time.Now()
	body, err := readBody(ex, bodyMax)
	if err != nil {
		return nil, err
	}
	a := &admission{ex: ex, id: id, d: d, body: body, who: who, debug: head.Debug, arrived: arrived}
	if err := state.find(a, query, contentType); err != nil {
		if err.Code == inference.ModelNotFound {
			state.relist()
		}
		return nil, err
	}
	if refusal := ex.take(a.req.PromptTokens.N, a.req.OutputMax()); refusal != nil {
		return nil, g.rateLimited(ex, refusal)
	}
	a.treatment = state.treatment(head, who, a.found.Route, arrived)
	return a, nil
}

// find reads what an admission's body asks for, and finds its pool.
func (s *state) find(a *admission, query route.Query, contentType string) *inference.Error {
	req, inspectErr := a.d.Inspect(contentType, a.body)
	if inspectErr != nil {
		return inference.AsError(inspectErr)
	}
	a.req = req
	if err := a.who.Permit(req.Model); err != nil {
		return err
	}
	a.session = s.sessionOf(query.Header, req, a.who)
	query.Model, query.Session, query.May = req.Model, a.session, a.who.May
	var err *inference.Error
	if a.found, err = s.match(query, rand.IntN); err != nil {
		return err
	}
	a.pool = s.pools[a.found.Pool]
	if a.pool.listed.Load().bases[a.found.Model] != "" {
		a.adapter = a.found.Model
	}
	if most := a.pool.bodyMax; most > 0 && int64(len(a.body)) > most {
		return errTooLarge(most)
	}
	return nil
}

// sessionBytesMax bounds the name of a session; a longer one is none.
const sessionBytesMax = 256

// sessionOf names the session of a request. Tenants cannot meet in one.
func (s *state) sessionOf(header http.Header, req *dialect.Request, who *auth.Principal) string {
	name := ""
	if s.session.Header != "" {
		name = header.Get(s.session.Header)
	}
	if name == "" {
		switch s.session.Field {
		case config.SessionField:
			name = req.SessionID
		case config.SessionFieldCacheKey:
			name = req.PromptCacheKey
		case config.SessionFieldUser:
			name = req.User
		}
	}
	if name == "" || len(name) > sessionBytesMax {
		return ""
	}
	return who.Tenant + "\x00" + name
}

// keyBytesMax bounds an Idempotency-Key.
const keyBytesMax = 255

// checkKey refuses an Idempotency-Key that could not mean anything. Without API
// keys all clients are one tenant, so one could read another's answer; only on
// loopback they are taken for the same person.
func checkKey(head *Head, who *auth.Principal) *inference.Error {
	keys := head.Header["Idempotency-Key"]
	switch {
	case len(keys) == 0:
		return nil
	case len(keys) > 1 || keys[0] == "" || len(keys[0]) > keyBytesMax:
		return inference.Errorf(inference.InvalidRequest, "Idempotency-Key must be given once, with 1 to %d bytes", keyBytesMax)
	case who.Key == "" && !head.Loopback:
		return inference.Errorf(inference.KeyUnavailable, "Idempotency-Key needs an API key: without one clients can't be told apart")
	}
	return nil
}

// checkHead refuses what a request's head alone makes impossible.
func checkHead(head *Head) *inference.Error {
	size := 0
	for name, values := range head.Header {
		for _, v := range values {
			size += len(name) + len(v) + len(": \r\n")
		}
	}
	switch {
	case size > headerBytesMax:
		return inference.Errorf(inference.HeadersTooLarge, "the request's header is over %d bytes", headerBytesMax)
	case head.target() == "":
		return inference.Errorf(inference.InvalidRequest, "the query string has characters that a URL can't have")
	case len(head.Header["Content-Type"]) > 1:
		return inference.Errorf(inference.InvalidRequest, "the request has several Content-Types")
	}
	if ce := head.Header.Get("Content-Encoding"); ce != "" && !strings.EqualFold(ce, "identity") {
		return inference.Errorf(inference.UnsupportedMediaType, "the body must not have a content coding")
	}
	return nil
}

func errTooLarge(limit int64) *inference.Error {
	return inference.Errorf(inference.RequestTooLarge, "the request body is over the limit of %d bytes", limit)
}

// readBody reads a whole body of at most limit bytes. One that declares more is
// refused before a byte of it is read.
func readBody(ex Exchange, limit int64) ([]byte, *inference.Error) {
	declared := ex.Head().ContentLength
	if declared > limit {
		return nil, errTooLarge(limit)
	}
	// A declared length is a promise, not a fact: memory grows with what comes.
	body := make([]byte, 0, min(max(declared+1, 512), 1<<20))
	src, started := ex.Body(), time.Now()
	defer ex.SetBodyDeadline(time.Time{})
	for {
		ex.SetBodyDeadline(started.Add(bodyGrace + time.Duration(len(body))*time.Second/bodyPace))
		n, err := src.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case int64(len(body)) > limit:
			return nil, errTooLarge(limit)
		case errors.Is(err, io.EOF):
			return body, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, inference.Errorf(inference.InvalidRequest, "the request body came too slowly")
		case err != nil:
			return nil, &inference.Error{Code: inference.InvalidRequest, Message: "the request body could not be read to its end", Err: err}
		}
		if len(body) == cap(body) {
			body = slices.Grow(body, len(body))
		}
	}
}
