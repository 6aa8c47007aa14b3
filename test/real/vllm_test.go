// SPDX-License-Identifier: Apache-2.0

package real_test

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/headgate/headgate/internal/freeport"
	"github.com/headgate/headgate/test/real"
)

// vllm is a vLLM process on the CPU with a tiny model.
type vllm struct {
	t       *testing.T
	python  string
	model   string
	address string
	log     string
	cmd     *exec.Cmd
}

func (v *vllm) start() {
	v.t.Helper()
	host, port, err := net.SplitHostPort(v.address)
	if err != nil {
		v.t.Fatal(err)
	}
	out, err := os.OpenFile(v.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		v.t.Fatal(err)
	}
	defer out.Close()
	v.cmd = exec.Command(v.python, "-m", "vllm.entrypoints.cli.main", "serve", v.model, "--served-model-name", "tiny",
		"--host", host, "--port", port, "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "1024",
		"--max-num-seqs", "2", "--enable-prompt-tokens-details")
	v.cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "VLLM_CPU_KVCACHE_SPACE=1",
		"OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind")
	v.cmd.Stdout, v.cmd.Stderr = out, out
	v.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := v.cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
}

// kill ends the process and its engine core with signal 9.
func (v *vllm) kill() {
	if v.cmd == nil {
		return
	}
	_ = syscall.Kill(-v.cmd.Process.Pid, syscall.SIGKILL)
	_ = v.cmd.Wait() // that it was killed is no news
	v.cmd = nil
}

// ready waits until the engine answers probes. Its port is closed until then.
func (v *vllm) ready() {
	v.t.Helper()
	over := time.After(10 * time.Minute)
	for {
		status, _, err := real.Ask(v.address, "GET /health HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n")
		if err == nil && status == http.StatusOK {
			return
		}
		select {
		case <-over:
			text, _ := os.ReadFile(v.log)
			v.t.Fatalf("vLLM is not ready after ten minutes:\n%s", text)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// counter adds up a counter of the engine's own.
func (v *vllm) counter(name string) float64 {
	v.t.Helper()
	_, page, err := real.Ask(v.address, "GET /metrics HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n")
	if err != nil {
		v.t.Fatal(err)
	}
	sum := 0.0
	for line := range strings.Lines(string(page)) {
		if rest, ok := strings.CutPrefix(line, name+"{"); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, ' ')+1:]), 64)
			if err != nil {
				v.t.Fatalf("%v: %s", err, line)
			}
			sum += n
		}
	}
	return sum
}

// Two engines of vLLM behind the gateway: their metrics are read, load of others
// is avoided, conversations stay where their prefix is, and by vLLM's own count
// it is; one that was started anew is cold.
func TestVLLM(t *testing.T) {
	if os.Getenv("HEADGATE_LONG") == "" {
		t.Skip("vLLM takes minutes to start and 6 GB of disk: set HEADGATE_LONG=1")
	}
	python := part(t, "vllm.sh")
	model := filepath.Join(t.TempDir(), "model")
	if out, err := exec.Command(python, filepath.Join("..", "deps", "vllm_model.py"), model).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	engines := make([]*vllm, 2)
	addresses := make([]string, 2)
	for i := range engines {
		addresses[i] = freeport.For(t)
		engines[i] = &vllm{t: t, python: python, model: model, address: addresses[i], log: filepath.Join(t.TempDir(), "log")}
		engines[i].start()
		t.Cleanup(engines[i].kill)
	}
	for _, v := range engines {
		v.ready()
	}
	f := newFront(t, "scrape: {interval: 200ms}, health: {interval: 0s}", addresses...)
	for _, a := range addresses {
		f.awaits("it is known", a, func(e told) bool {
			return e.Engine == "vllm" && e.Reported != nil && e.Reported.Doubt == "" && e.Reported.Waiting != nil && e.Reported.KVUsage != nil
		})
	}

	end := occupy(t, addresses[0], 6)
	f.awaits("load of others shows", addresses[0], func(e told) bool {
		return *e.Reported.Running == 2 && *e.Reported.Waiting == 4 && *e.Reported.KVUsage > 0 && e.Reported.Others > 5
	})
	for i := range 3 {
		if got := f.complete(fmt.Sprintf("Question %d", i), 3); got.endpoint != addresses[1] {
			t.Errorf("a request went to %s, which is busy for others", got.endpoint)
		}
	}
	end()
	f.awaits("it is idle again", addresses[0], func(e told) bool {
		return e.Reported.Running != nil && *e.Reported.Running == 0 && e.Reported.Others < 0.5
	})

	// A token is a byte, and a block of this vLLM 128 of them.
	const conversations, turns = 4, 3
	homes := map[string]int{}
	stayed, cached, prompts, hits := 0, 0, 0, -engines[0].counter("vllm:prefix_cache_hits_total")-engines[1].counter("vllm:prefix_cache_hits_total")

	for c := range conversations {
		said := fmt.Sprintf("%d: ", c) + strings.Repeat("What does the gateway keep? ", 16)
		been := map[string]bool{}
		for turn := range turns {
			got := f.complete(said, 8)
			if turn > 0 {
				cached, prompts = cached+got.cached, prompts+got.prompt
				// The gateway counts four bytes to a token, which this model does not.
				if had := been[got.endpoint]; had != (got.cached >= 256) || had != (got.expected >= 50) {
					t.Errorf("turn %d of conversation %d, on %s after %v: of %d tokens %d were cached and %d expected",
						turn, c, got.endpoint, been, got.prompt, got.cached, got.expected)
				} else if had {
					stayed++
				}
			}
			been[got.endpoint] = true
			said += " And then?"
		}
		for where := range been {
			homes[where]++
		}
	}
	hits += engines[0].counter("vllm:prefix_cache_hits_total") + engines[1].counter("vllm:prefix_cache_hits_total")
	t.Logf("of %d tokens of later turns %d were cached; vLLM counts %.0f hits; conversations were on %v", prompts, cached, hits, homes)
	// So short a prompt costs next to nothing anywhere: one may go elsewhere.
	if stayed < conversations*(turns-1)*3/4 {
		t.Errorf("%d of %d later turns stayed where their prefix was", stayed, conversations*(turns-1))
	}
	if float64(cached) != hits {
		t.Errorf("answers say that %d tokens were cached, vLLM's counters %v", cached, hits)
	}

	// Cold, warm, and after a restart: the same tokens.
	prompt := strings.Repeat("Equal prompts get equal answers. ", 12)
	cold, warm := f.twice(prompt, 16)
	if cold.text != warm.text || warm.cached == 0 || cold.cached != 0 {
		t.Errorf("cold: %+v\nwarm: %+v", cold, warm)
	}
	home := engines[0]
	if warm.endpoint == addresses[1] {
		home = engines[1]
	}
	if n := f.expected(prompt, home.address); n == 0 {
		t.Error("nothing is thought to be cached before the restart")
	}
	home.kill()
	f.awaits("it is missed", home.address, func(e told) bool { return e.Error != "" })
	home.start()
	home.ready()
	f.awaits("it is back", home.address, func(e told) bool { return e.Error == "" && e.Reported != nil && e.Reported.Doubt == "" })
	if n := f.expected(prompt, home.address); n != 0 {
		t.Errorf("%d tokens are thought to be cached after the restart", n)
	}
	if got := f.complete(prompt, 16); got.text != cold.text {
		t.Errorf("after the restart: %+v, before: %+v", got, cold)
	}
}
