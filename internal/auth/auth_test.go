// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"strings"
	"testing"

	"github.com/headgate/headgate/inference"
)

func digest(secret string) string {
	d := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(d[:])
}

func keys(t *testing.T) *Keys {
	t.Helper()
	k, err := NewKeys([]Key{
		{ID: "a", SHA256: digest("sk-a"), Tenant: "team", Models: []string{"qwen-*", "exact/name"}},
		{ID: "b", SHA256: strings.ToUpper(digest("sk-b")), Models: []string{"*"}},
		{ID: "c", SHA256: digest("sk-c")},
	})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestAuthenticate(t *testing.T) {
	for _, row := range []struct {
		name   string
		header http.Header
		tenant string // "": refused
	}{
		{"bearer", http.Header{"Authorization": {"Bearer sk-a"}}, "team"},
		{"any case of the scheme", http.Header{"Authorization": {"bEARER sk-b"}}, "b"},
		{"x-api-key", http.Header{"X-Api-Key": {"sk-b"}}, "b"},
		{"the same twice", http.Header{"Authorization": {"Bearer sk-a"}, "X-Api-Key": {"sk-a"}}, "team"},
		{"two that differ", http.Header{"Authorization": {"Bearer sk-a"}, "X-Api-Key": {"sk-b"}}, ""},
		{"two bearers", http.Header{"Authorization": {"Bearer sk-a", "Bearer sk-b"}}, ""},
		{"none", http.Header{}, ""},
		{"empty", http.Header{"Authorization": {"Bearer "}}, ""},
		{"other scheme", http.Header{"Authorization": {"Basic sk-a"}}, ""},
		{"unknown", http.Header{"Authorization": {"Bearer sk-z"}}, ""},
		{"the digest itself", http.Header{"Authorization": {"Bearer " + digest("sk-a")}}, ""},
	} {
		p, err := keys(t).Authenticate(row.header)
		switch {
		case row.tenant == "" && (err == nil || err.Code != inference.Unauthorized):
			t.Errorf("%s: got %v, want unauthorized", row.name, err)
		case row.tenant != "" && (err != nil || p.Tenant != row.tenant):
			t.Errorf("%s: got %v, %v, want tenant %s", row.name, p, err, row.tenant)
		}
		if err != nil && strings.Contains(err.Error(), "sk-") {
			t.Errorf("%s: the message shows the secret: %v", row.name, err)
		}
	}
}

func TestWithoutKeysEveryoneIsAnonymous(t *testing.T) {
	var k Keys
	p, err := k.Authenticate(http.Header{"Authorization": {"Bearer whatever"}})
	if err != nil || p.Tenant != Anonymous || !p.May("anything") {
		t.Errorf("got %v, %v", p, err)
	}
}

func TestModelsOfAKey(t *testing.T) {
	k := keys(t)
	for secret, models := range map[string]map[string]bool{
		"sk-a": {"qwen-7b": true, "exact/name": true, "exact/name2": false, "llama": false},
		"sk-b": {"qwen-7b": true, "llama": true},
		"sk-c": {"qwen-7b": false},
	} {
		p, err := k.Authenticate(http.Header{"X-Api-Key": {secret}})
		if err != nil {
			t.Fatal(err)
		}
		for model, may := range models {
			if got := p.Permit(model); (got == nil) != may || got != nil && got.Code != inference.Forbidden {
				t.Errorf("%s %s: %v, want allowed %v", secret, model, got, may)
			}
		}
	}
}

func TestBadKeys(t *testing.T) {
	for want, bad := range map[string][]Key{
		"not 64 hexadecimal":  {{ID: "a", SHA256: "abc"}},
		"the same secret":     {{ID: "a", SHA256: digest("x")}, {ID: "b", SHA256: digest("x")}},
		"a * before its end":  {{ID: "a", SHA256: digest("x"), Models: []string{"a*b"}}},
		"key 1: secret_sha25": {{ID: "a", SHA256: digest("x")}, {ID: "b"}},
	} {
		if _, err := NewKeys(bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
