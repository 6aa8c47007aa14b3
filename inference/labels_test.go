// SPDX-License-Identifier: Apache-2.0

package inference

import "testing"

func TestLabels(t *testing.T) {
	l := NewLabels(map[string]string{"zone": "a", "zo": "", "gpu": "h100=x"})
	for name, want := range map[string]string{"zone": "a", "zo": "", "gpu": "h100=x"} {
		if got, ok := l.Get(name); !ok || got != want {
			t.Errorf("%s: %q, %v, want %q", name, got, ok, want)
		}
	}
	for _, name := range []string{"", "zon", "one", "zone=a", "a"} {
		if got, ok := l.Get(name); ok {
			t.Errorf("%q is there: %q", name, got)
		}
	}
	if l != NewLabels(map[string]string{"gpu": "h100=x", "zo": "", "zone": "a"}) || NewLabels(nil) != "" {
		t.Error("equal labels differ")
	}
	if _, ok := NewLabels(nil).Get("zone"); ok {
		t.Error("no labels have one")
	}
}
