// SPDX-License-Identifier: Apache-2.0

// Package auth decides who sends a request and what they may ask for.
//
// It is a core: it is given the keys of the configuration and the header of a
// request, and keeps no secret, only digests. It refuses to know tenants'
// limits or priorities, which are flow control's.
package auth

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/route"
)

// Anonymous is the tenant of everyone where no keys are configured.
const Anonymous = "anonymous"

// Key is one API key as configured.
type Key struct {
	ID     string
	SHA256 string   // of the secret, in hex
	Tenant string   // "": the ID
	Models []string // patterns as in routes; none: no model

	Objectives []string // that its requests may ask for; the first is the default
	Fairness   string   // "": the tenant
}

// Keys knows the keys. The zero value has none and lets everyone in as
// Anonymous.
type Keys struct {
	byDigest map[[sha256.Size]byte]*Principal
}

// Principal is who sends a request.
type Principal struct {
	Key    string // id of the key, "" for Anonymous
	Tenant string

	// Objectives are those that requests may ask for, the default first. Fairness
	// is with whom they share. Both are flow control's to act on.
	Objectives []string
	Fairness   string

	models []route.Pattern
}

// NewKeys compiles keys. Its error names the key by its place.
func NewKeys(keys []Key) (*Keys, error) {
	k := &Keys{byDigest: make(map[[sha256.Size]byte]*Principal, len(keys))}
	for i, key := range keys {
		raw, err := hex.DecodeString(key.SHA256)
		if err != nil || len(raw) != sha256.Size {
			return nil, fmt.Errorf("key %d: secret_sha256 is not %d hexadecimal digits", i, 2*sha256.Size)
		}
		digest := [sha256.Size]byte(raw)
		if k.byDigest[digest] != nil {
			return nil, fmt.Errorf("key %d: another key has the same secret", i)
		}
		p := &Principal{Key: key.ID, Tenant: cmp.Or(key.Tenant, key.ID), Objectives: key.Objectives}
		p.Fairness = cmp.Or(key.Fairness, p.Tenant)
		for _, m := range key.Models {
			pattern, err := route.ParsePattern(m)
			if err != nil {
				return nil, fmt.Errorf("key %d: %w", i, err)
			}
			p.models = append(p.models, pattern)
		}
		k.byDigest[digest] = p
	}
	return k, nil
}

// Authenticate finds who a request is from, by its bearer token or, as
// Anthropic's clients send it, X-Api-Key. Two that differ are refused: it would
// be a guess whose request it is.
func (k *Keys) Authenticate(h http.Header) (*Principal, *inference.Error) {
	if len(k.byDigest) == 0 {
		return &Principal{Tenant: Anonymous, Fairness: Anonymous}, nil
	}
	secret, err := secretOf(h)
	if err != nil {
		return nil, err
	}
	// Looking a digest up leaks no timing that helps to find a secret: who
	// could use it would have to choose digests, and they choose preimages.
	if p := k.byDigest[sha256.Sum256([]byte(secret))]; p != nil {
		return p, nil
	}
	return nil, inference.Errorf(inference.Unauthorized, "the API key is not known here")
}

func secretOf(h http.Header) (string, *inference.Error) {
	var secrets []string
	for _, v := range h["Authorization"] {
		if scheme, token, ok := strings.Cut(v, " "); ok && strings.EqualFold(scheme, "Bearer") {
			secrets = append(secrets, strings.TrimSpace(token))
		}
	}
	secrets = append(secrets, h["X-Api-Key"]...)
	if len(secrets) == 0 || secrets[0] == "" {
		return "", inference.Errorf(inference.Unauthorized, "an API key is needed: send it as Authorization: Bearer")
	}
	for _, s := range secrets[1:] {
		if s != secrets[0] {
			return "", inference.Errorf(inference.Unauthorized, "the request carries two different API keys")
		}
	}
	return secrets[0], nil
}

// May says whether the principal may use a model.
func (p *Principal) May(model string) bool {
	if p.Key == "" {
		return true
	}
	for _, pattern := range p.models {
		if pattern.Holds(model) {
			return true
		}
	}
	return false
}

// Permit is May as an error.
func (p *Principal) Permit(model string) *inference.Error {
	if p.May(model) {
		return nil
	}
	return inference.Errorf(inference.Forbidden, "this API key may not use the model")
}
