// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPromisesAreKept(t *testing.T) {
	var out bytes.Buffer
	d, err := Start(Config{Listen: "127.0.0.1:0", Out: &out, Log: slog.New(slog.DiscardHandler)}, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Stop()
	kept, err := d.Run(t.Context())
	if err != nil || !kept || strings.Count(out.String(), "   kept\n") != len(scenes) {
		t.Errorf("kept %v, error %v:\n%s", kept, err, &out)
	}
}
