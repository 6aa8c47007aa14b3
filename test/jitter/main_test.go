// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The standard library that is installed takes the changes.
func TestThisGoCanBeDelayed(t *testing.T) {
	dir := t.TempDir()
	if err := write(dir); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "program.go")
	text := `package main

import ("fmt"; "os"; "sync")

func main() {
	var mu sync.Mutex
	for range 100_000 {
		mu.Lock()
		mu.Unlock()
	}
	fmt.Fprintln(os.Stdout, "unlocked")
}
`
	if err := os.WriteFile(program, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(dir, "program")
	if out, err := exec.Command("go", "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", binary, program).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err := exec.Command(binary).CombinedOutput(); err != nil || string(out) != "unlocked\n" {
		t.Errorf("%v: %s", err, out)
	}
	symbols, err := exec.Command("go", "tool", "nm", binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"runtime.jitter", "sync.runtime_jitter", "internal/poll.runtime_jitter"} {
		if !strings.Contains(string(symbols), " "+name+"\n") {
			t.Errorf("the program has no %s", name)
		}
	}
}

func TestUnknownTextIsRefused(t *testing.T) {
	if _, err := changed("a b b", []string{"b", "c"}); err == nil {
		t.Error("text that is there twice was changed")
	}
	if _, err := changed("a", []string{"b", "c"}); err == nil {
		t.Error("text that is not there was changed")
	}
}
