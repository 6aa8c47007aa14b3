// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
)

// TestLabRefusesWhatItCannotPlay: with a message and no file of results.
func TestLabRefusesWhatItCannotPlay(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "my.jsonl"), []byte(`{"timestamp":1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out.json")
	done, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		ctx  context.Context
		args []string
		want string
	}{
		{t.Context(), []string{"--traces", dir, "--workload", "my.jsonl"}, "headgate: my.jsonl:1: no input_length\n"},
		{t.Context(), []string{"--overload", "1.5,Inf"}, "headgate: --overload +Inf: want a multiple above 0\n"},
		{t.Context(), []string{"--overload", "NaN"}, "headgate: --overload NaN: want a multiple above 0\n"},
		{t.Context(), []string{"--stale", "-1"}, "headgate: --stale -1: want seconds, 0 or more\n"},
		{t.Context(), []string{"--engine", "a"}, "headgate: --engine \"a\": want one of 32b, 32b-tier, 8b-a100, 8b-h100\n"},
		{t.Context(), []string{"--model", "b"}, "headgate: --model \"b\": want one of alternating, mixed\n"},
		{done, []string{"--engines", "64"}, "headgate: context canceled\n"},
	} {
		var stderr bytes.Buffer
		status := Run(c.ctx, nil, append([]string{"lab", "--out", out}, c.args...), &stderr)
		if status != 1 || stderr.String() != c.want {
			t.Errorf("status %d, %q, want %q", status, stderr.String(), c.want)
		}
		if _, err := os.Stat(out); err == nil {
			t.Error("results were written")
		}
	}
}
