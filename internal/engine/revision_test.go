// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"strings"
	"testing"
)

func TestRevision(t *testing.T) {
	for _, c := range []struct {
		kind         Kind
		answer, want string
	}{
		{TGI, `{"model_id":"org/m","model_sha":"0a1b","version":"3"}`, "org/m@0a1b"},
		{TGI, `{"model_id":"/models/m","model_sha":null}`, ""},
		{SGLang, `{"model_path":"org/m","revision":"main","tp_size":1}`, "org/m@main"},
		{SGLang, `{"model_path":"org/m","revision":null}`, ""},
		{SGLang, `{"model_path":["org/m"],"revision":"x"}`, ""},
		{SGLang, `{"model_path":"m","revision":"` + strings.Repeat("x", revisionMax) + `"}`, ""},
		{SGLang, `not json`, ""},
		{SGLang, ``, ""},
	} {
		if got := c.kind.Revision([]byte(c.answer)); got != c.want {
			t.Errorf("%s: %.80s: %q, want %q", c.kind, c.answer, got, c.want)
		}
	}
	for k := range Custom + 1 {
		if tells := k.RevisionPath() != ""; tells != (k == TGI || k == SGLang) {
			t.Errorf("%s: %q", k, k.RevisionPath())
		}
	}
}
