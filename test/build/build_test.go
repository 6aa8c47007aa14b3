// SPDX-License-Identifier: Apache-2.0

// Package build builds the program as others would.
package build

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const (
	module = "github.com/headgate/headgate"
	root   = "../../"
)

// TestBuildWithAPluginOfItsOwn compiles the module that docs/routing.md shows,
// outside of this tree, and lets its program check a configuration that names its
// plugin: the one of this tree refuses it.
func TestBuildWithAPluginOfItsOwn(t *testing.T) {
	page, err := os.ReadFile(root + "docs/routing.md")
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		name = filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	shown := regexp.MustCompile("(?s)```go\n// (\\S+\\.go)\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	if len(shown) != 2 {
		t.Fatalf("docs/routing.md shows %d files, want a main and a plugin", len(shown))
	}
	for _, file := range shown {
		write(file[1], file[2])
		if file[1] == "main.go" {
			if n := strings.Count(strings.TrimSpace(file[2]), "\n") + 1; n > 12 {
				t.Errorf("main.go has %d lines", n)
			}
		}
	}
	write("go.mod", modFile(t))
	sums, err := os.ReadFile(root + "go.sum")
	if err != nil {
		t.Fatal(err)
	}
	write("go.sum", string(sums))
	write("headgate.yaml", regexp.MustCompile("(?s)```yaml\n([^`]*plugin: nearby[^`]*)```").FindStringSubmatch(string(page))[1]+
		"    discovery: {static: [{url: 'http://127.0.0.1:8000'}]}\n")

	program := filepath.Join(folder, "headgate")
	run := func(dir, name string, args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOWORK=off")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := run(folder, "go", "build", "-o", program, "."); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err := run(folder, program, "check", "headgate.yaml"); err != nil || !strings.Contains(out, "ok: ") {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err := run(root, "go", "run", "./cmd/headgate", "check", filepath.Join(folder, "headgate.yaml")); err == nil || !strings.Contains(out, `there is no plugin "nearby"`) {
		t.Errorf("the program of this tree: %v\n%s", err, out)
	}
}

// modFile is a go.mod of a module that requires this tree and what this tree does.
func modFile(t *testing.T) string {
	t.Helper()
	raw, err := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json", root+"go.mod").Output()
	if err != nil {
		t.Fatal(err)
	}
	var own struct {
		Go      string
		Require []struct{ Path, Version string }
	}
	if err := json.Unmarshal(raw, &own); err != nil {
		t.Fatal(err)
	}
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	b.WriteString("module example.com/gateway\n\ngo " + own.Go + "\n\nrequire " + module + " v0.0.0\n\nreplace " + module + " => " + here + "\n\nrequire (\n")
	for _, r := range own.Require {
		b.WriteString("\t" + r.Path + " " + r.Version + "\n")
	}
	b.WriteString(")\n")
	return b.String()
}
