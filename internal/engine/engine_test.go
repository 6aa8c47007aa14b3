// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/headgate/headgate/plugin"
)

// read reads a page in pieces of so many bytes; 0: whole.
func read(t testing.TB, kind Kind, names Names, text string, piece int) (Reading, error) {
	t.Helper()
	r, err := NewReader(kind, names)
	if err != nil {
		t.Fatal(err)
	}
	r.Begin(Head{})
	for len(text) > 0 {
		n := len(text)
		if piece > 0 {
			n = min(piece, n)
		}
		if _, err := r.Write([]byte(text[:n])); err != nil {
			return r.End()
		}
		text = text[n:]
	}
	return r.End()
}

func known(v float64) plugin.Value { return plugin.Value{V: v, Known: true} }

func recorded(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Pages of real engines with more requests than they run at a time.
func TestRecordedPages(t *testing.T) {
	for name, want := range map[string]Reading{
		"vllm_0.32_busy.txt": {
			Kind: VLLM, Waiting: known(2), Running: known(2), KVUsage: known(0.001220852154804053), Done: known(2877),
			CacheTokens: known(1048576), Boot: "1796047125.49",
		},
		"llamacpp_5b4ebc5_busy.txt": {Kind: LlamaCPP, Waiting: known(3), Running: known(2), Done: known(0)},
	} {
		for _, piece := range []int{0, 1, 7, 4096} {
			got, err := read(t, Unknown, Names{}, recorded(t, name), piece)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s in pieces of %d: (-want +got)\n%s", name, piece, diff)
			}
		}
	}
}

const (
	vllmOld = `vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.95
vllm:generation_tokens_total{model_name="m"} 100.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",num_cpu_blocks="None"} 1.0
`
	vllmNew = `vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.1
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
`
	sglang = `sglang:num_running_reqs{model_name="m",engine_type="unified",tp_rank="0",pp_rank="0",dp_rank="0"} 4.0
sglang:num_running_reqs{model_name="m",engine_type="unified",tp_rank="1",pp_rank="0",dp_rank="0"} 4.0
sglang:num_running_reqs{model_name="m",engine_type="unified",tp_rank="0",pp_rank="0",dp_rank="1"} 2.0
sglang:num_queue_reqs{model_name="m",engine_type="unified",tp_rank="0",pp_rank="0",dp_rank="0"} 5.0
sglang:token_usage{model_name="m",engine_type="unified",tp_rank="0",pp_rank="0",dp_rank="0"} 0.3
sglang:token_usage{model_name="m",engine_type="unified",tp_rank="0",pp_rank="0",dp_rank="1"} 0.6
sglang:generation_tokens_total{model_name="m"} 77.0
`
	trtllm = `trtllm_num_requests_running{model_name="m"} 3.0
trtllm_num_requests_waiting{model_name="m"} 2.0
trtllm_kv_cache_utilization{model_name="m"} 0.25
trtllm_kv_cache_tokens_per_block{model_name="m"} 32.0
trtllm_kv_cache_max_blocks{model_name="m"} 101.0
trtllm_request_success_total{model_name="m"} 9.0
`
	triton = `nv_inference_request_success{model="ensemble",version="1"} 6
nv_inference_request_success{model="tensorrt_llm",version="1"} 6
nv_inference_exec_count{model="tensorrt_llm",version="1"} 60000
nv_inference_pending_request_count{model="tensorrt_llm",version="1"} 0
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 7
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 448
`
	tgi = `tgi_queue_size 2
tgi_batch_current_size 5
tgi_batch_current_max_tokens 4096
tgi_request_success{method="generate"} 11
`
)

// MET-4, and the names of engines that were not run here.
func TestLadders(t *testing.T) {
	for _, c := range []struct {
		name, page string
		want       Reading
	}{
		{"vllm, old", vllmOld, Reading{Kind: VLLM, Waiting: known(1), Running: known(3), KVUsage: known(0.95), Done: known(100), CacheTokens: known(16000)}},
		{"vllm, new", vllmNew, Reading{Kind: VLLM, Waiting: known(1), Running: known(3), KVUsage: known(0.1), Done: known(100)}},
		{"vllm, both", vllmNew + "vllm:gpu_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.95\n", Reading{
			Kind: VLLM, Waiting: known(1), Running: known(3), KVUsage: known(0.1), Done: known(100),
		}},
		{"vllm, renamed", strings.ReplaceAll(vllmNew, "kv_cache_usage_perc", "memory_share"), Reading{
			Kind: VLLM, Waiting: known(1), Running: known(3), Done: known(100), Missing: []string{"kv_usage"},
		}},
		{"sglang", sglang + "sglang:page_size{} 1\nsglang:num_pages{} 5000\n", Reading{
			Kind: SGLang, Waiting: known(5), Running: known(6), KVUsage: known(0.6), Done: known(77), CacheTokens: known(5000),
		}},
		{"sglang, labels", sglang + "sglang:cache_config_info{page_size=\"16\",num_pages=\"300\"} 1\n", Reading{
			Kind: SGLang, Waiting: known(5), Running: known(6), KVUsage: known(0.6), Done: known(77), CacheTokens: known(4800),
		}},
		{"sglang, older", sglang + "sglang:max_total_num_tokens{model_name=\"m\"} 123\n", Reading{
			Kind: SGLang, Waiting: known(5), Running: known(6), KVUsage: known(0.6), Done: known(77), CacheTokens: known(123),
		}},
		{"trtllm", trtllm, Reading{Kind: TRTLLM, Waiting: known(2), Running: known(3), KVUsage: known(0.25), Done: known(9), CacheTokens: known(3232)}},
		{"triton", triton, Reading{Kind: Triton, Waiting: known(1), Running: known(7), KVUsage: known(0.5), Done: known(12), CacheTokens: known(64 * 448)}},
		{"tgi", tgi, Reading{Kind: TGI, Waiting: known(2), Running: known(5), Done: known(11)}},
		{"vllm in triton", triton + vllmNew, Reading{Kind: VLLM, Waiting: known(1), Running: known(3), KVUsage: known(0.1), Done: known(100)}},
	} {
		got, err := read(t, Unknown, Names{}, c.page, 0)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", c.name, diff)
		}
	}
}

// What makes no sense is unknown, whatever else the page says, and never the
// value of an older name.
func TestNonsenseIsUnknown(t *testing.T) {
	for _, value := range []string{"NaN", "+Inf", "-Inf", "-1", "1e10", "three", "", "0x", "1 2 3 }"} {
		page := fmt.Sprintf("%svllm:num_requests_swapped 1\n", strings.Replace(vllmNew, "waiting{engine=\"0\",model_name=\"m\"} 1.0", "waiting{engine=\"0\",model_name=\"m\"} "+value, 1))
		got, err := read(t, Unknown, Names{}, page, 0)
		if value == "1 2 3 }" { // a time may follow, and nobody reads it
			if got.Waiting != known(1) {
				t.Errorf("%q: %+v", value, got.Waiting)
			}
			continue
		}
		if err != nil || got.Waiting.Known || !got.Running.Known || !slices.Equal(got.Missing, []string{"waiting"}) {
			t.Errorf("%q: %+v, %v", value, got, err)
		}
	}
	for name, page := range map[string]string{
		"twice":             vllmNew + "vllm:num_requests_waiting{model_name=\"m\",engine=\"0\"} 1.0\n",
		"label not closed":  vllmNew + "vllm:num_requests_waiting{engine=\"1,model_name=m} 1.0\n",
		"brace not closed":  vllmNew + "vllm:num_requests_waiting{engine=\"1\" 1.0\n",
		"label without =":   vllmNew + "vllm:num_requests_waiting{engine} 1.0\n",
		"too long":          vllmNew + "vllm:num_requests_waiting{engine=\"" + strings.Repeat("x", lineMax) + "\"} 1.0\n",
		"too many series":   vllmNew + many("vllm:num_requests_waiting", seriesMax+1),
		"one of two is NaN": vllmNew + "vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} NaN\n",
		"too many labels":   vllmNew + "vllm:num_requests_waiting{" + strings.Repeat(`a="b",`, labelsMax+2) + "} 1\n",
	} {
		for _, piece := range []int{0, 1, 1000} {
			got, err := read(t, Unknown, Names{}, page, piece)
			if err != nil || got.Waiting.Known || got.Running != known(3) {
				t.Errorf("%s: %+v, %v", name, got, err)
			}
		}
	}
	for _, usage := range []string{"1.0001", "95", "-0.1"} {
		got, err := read(t, Unknown, Names{}, strings.Replace(vllmNew, "} 0.1", "} "+usage, 1)+"vllm:gpu_cache_usage_perc 0.5\n", 0)
		if err != nil || got.KVUsage.Known {
			t.Errorf("usage %s: %+v, %v", usage, got.KVUsage, err)
		}
	}
}

func many(name string, n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%s{engine=\"x%d\"} 1\n", name, i)
	}
	return b.String()
}

// MET-2: a page that is none is an error, and not an idle engine.
func TestPagesThatAreNone(t *testing.T) {
	for _, c := range []struct {
		name, page string
		want       error
	}{
		{"empty", "", ErrNoText},
		{"only comments", "# HELP a b\n# TYPE a gauge\n", ErrNoText},
		{"HTML", "<!DOCTYPE html>\n<html>\n<body>Welcome</body>\n</html>\n", ErrNoText},
		{"JSON of trtllm-serve", "[{\"gpuMemUsage\":1,\n\"iter\":2}]\n", ErrNoText},
		{"JSON without an end of line", "[]", ErrNoText},
		{"HTML without an end of line", "<html>\n<body>Welcome</body>\n</html>", ErrNoText},
		{"cut in a line", vllmNew[:len(vllmNew)-3], ErrCut},
		{"of something else", "go_goroutines 12\nprocess_start_time_seconds 1\n", ErrNoKind},
		{"vLLM without statistics", "vllm:something_new 1\n", ErrNothing},
		{"all broken", strings.ReplaceAll(vllmNew, "} ", "} x"), ErrNothing},
		{"too large", vllmNew + strings.Repeat("a 1\n", PageMax/4), ErrTooLarge},
	} {
		for _, piece := range []int{0, 4096} {
			got, err := read(t, Unknown, Names{}, c.page, piece)
			if !errors.Is(err, c.want) || got.Waiting.Known || got.Running.Known || got.KVUsage.Known {
				t.Errorf("%s: %+v, %v; want %v", c.name, got, err, c.want)
			}
		}
	}
}

// MET-7: the newest series counts, in whatever order they come.
func TestNewestAdaptersCount(t *testing.T) {
	series := []string{
		`vllm:lora_requests_info{max_lora="4",running_lora_adapters="a",waiting_lora_adapters=""} 1.7e9`,
		`vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.7000001e9`,
		`vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters="a"} 1.7000002e9`,
		`vllm:lora_requests_info{max_lora="4",running_lora_adapters="a",waiting_lora_adapters="b"} 1.7000003e9`,
		`vllm:lora_requests_info{max_lora="4",running_lora_adapters="c",waiting_lora_adapters="a"} NaN`,
	}
	for newest, want := range map[string]struct {
		running []string
		slots   int
	}{
		`{max_lora="4",running_lora_adapters="b",waiting_lora_adapters=""}`:                       {[]string{"b"}, 4},
		`{waiting_lora_adapters="a",running_lora_adapters=" b , org/lora-1.2 ,, ",max_lora="8",}`: {[]string{"b", "org/lora-1.2"}, 8},
		`{running_lora_adapters="",max_lora="0",waiting_lora_adapters=""}`:                        {nil, 0},
		`{running_lora_adapters="b",max_lora="many"}`:                                             {[]string{"b"}, 0},
	} {
		for seed := range uint64(20) {
			all := append(slices.Clone(series), "vllm:lora_requests_info"+newest+" 1.7000009e9")
			rand.New(rand.NewPCG(1, seed)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			got, err := read(t, Unknown, Names{}, vllmNew+strings.Join(all, "\n")+"\n", 0)
			if err != nil || !slices.Equal(got.Adapters, want.running) || got.AdapterSlots != want.slots || !got.Running.Known {
				t.Fatalf("%s: %v, %d slots, %v; want %v", newest, got.Adapters, got.AdapterSlots, err, want)
			}
		}
	}
}

func TestParallelEnginesAddUp(t *testing.T) {
	page := vllmNew + strings.ReplaceAll(strings.Replace(vllmNew, "0.1", "0.7", 1), `engine="0"`, `engine="1"`) +
		`vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",enable_prefix_caching="True"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50",enable_prefix_caching="True"} 1.0
`
	got, err := read(t, VLLM, Names{}, page, 0)
	if err != nil || got.Running != known(6) || got.Waiting != known(2) || got.KVUsage != known(0.7) || got.CacheTokens != known(2400) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestCacheSize(t *testing.T) {
	for labels, want := range map[string]plugin.Value{
		`block_size="16",num_gpu_blocks="100"`:                               known(1600),
		`block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="900"`:    known(900),
		`block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="None"`:   known(1600),
		`block_size="16",num_gpu_blocks="100",enable_prefix_caching="False"`: known(0),
		`block_size="16",num_gpu_blocks="None"`:                              {},
		`block_size="0",num_gpu_blocks="5"`:                                  {},
		`block_size="4294967295",num_gpu_blocks="999999999999"`:              {},
		`block_size="-1",num_gpu_blocks="-1"`:                                {},
		`block_size="16"`:                                                    {},
	} {
		got, err := read(t, Unknown, Names{}, vllmNew+"vllm:cache_config_info{"+labels+"} 1\n", 0)
		if err != nil || got.CacheTokens != want {
			t.Errorf("%s: %+v, %v; want %+v", labels, got.CacheTokens, err, want)
		}
	}
	if v := PropsTokens([]byte(`{"default_generation_settings":{"params":{},"n_ctx":2048},"total_slots":4}`)); v != known(8192) {
		t.Errorf("of properties: %+v", v)
	}
	for _, body := range []string{"", "[]", "{}", `{"total_slots":-4,"default_generation_settings":{"n_ctx":1}}`, `{"total_slots":1e300,"default_generation_settings":{"n_ctx":1e300}}`} {
		if v := PropsTokens([]byte(body)); v.Known {
			t.Errorf("%s: %+v", body, v)
		}
	}
}

func TestRestartsShow(t *testing.T) {
	base := Reading{Kind: VLLM, Boot: "1", Done: known(100)}
	for name, c := range map[string]struct {
		edit func(*Reading)
		want bool
	}{
		"nothing":          {func(*Reading) {}, false},
		"work was done":    {func(r *Reading) { r.Done = known(101) }, false},
		"another boot":     {func(r *Reading) { r.Boot = "2"; r.Done = known(500) }, true},
		"boot not told":    {func(r *Reading) { r.Boot = "" }, false},
		"less was done":    {func(r *Reading) { r.Boot = ""; r.Done = known(99) }, true},
		"done not told":    {func(r *Reading) { r.Done = plugin.Value{} }, false},
		"another engine":   {func(r *Reading) { r.Kind, r.Boot = SGLang, "" }, true},
		"engine not known": {func(r *Reading) { *r = Reading{} }, false},
	} {
		next := base
		c.edit(&next)
		if got := next.Restarted(&base); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestNamesOfOtherEngines(t *testing.T) {
	page := `my_queue{kind="real"} 3
my_queue{kind="fake"} 100
my_busy{} 4
my_memory 0.5
my_tokens_total 12
my_page 16
my_pages 10
`
	names := Names{
		Waiting: `my_queue{kind="real"}`, Running: "my_busy", KVUsage: "my_memory", Done: "my_tokens_total",
		BlockTokens: "my_page", Blocks: "my_pages",
	}
	got, err := read(t, Custom, names, page, 0)
	want := Reading{Kind: Custom, Waiting: known(3), Running: known(4), KVUsage: known(0.5), Done: known(12), CacheTokens: known(160)}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got)\n%s", err, diff)
	}
	// They go before the names that a kind is known for.
	got, err = read(t, Unknown, Names{KVUsage: "my_memory"}, vllmNew+page, 0)
	if err != nil || got.Kind != VLLM || got.KVUsage != known(0.5) || got.Running != known(3) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, text := range []string{"", " ", "1a", "a b", "a{", "a{b}", "a{b=c", `a{b="c}"}`, `a{="c"}`, "a{b=\"c\"} "} {
		_, err := NewReader(Custom, Names{Waiting: text, Running: "x"})
		if text != "" && err == nil && text != "a{b=\"c\"} " {
			t.Errorf("%q is taken", text)
		}
	}
	if _, err := NewReader(Custom, Names{Blocks: "x"}); err == nil {
		t.Error("blocks without their size are taken")
	}
}

func TestKinds(t *testing.T) {
	for k := VLLM; k <= Custom; k++ {
		if got, ok := ParseKind(k.String()); !ok || got != k {
			t.Errorf("%v is read as %v", k, got)
		}
	}
	if k, ok := ParseKind("auto"); !ok || k != Unknown {
		t.Error("auto")
	}
	if _, ok := ParseKind("unknown"); ok {
		t.Error("unknown is a kind")
	}
	// llama.cpp that exports nothing still says what it is.
	r, err := NewReader(Unknown, Names{})
	if err != nil {
		t.Fatal(err)
	}
	r.Begin(Head{Server: "llama.cpp", Boot: "7"})
	_, _ = r.Write([]byte("{}\n"))
	if got, err := r.End(); got.Kind != LlamaCPP || err == nil {
		t.Errorf("%v, %v", got.Kind, err)
	}
}

// The next page knows nothing of the last.
func TestPagesAreReadOneByOne(t *testing.T) {
	r, err := NewReader(Unknown, Names{})
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range []string{vllmNew + "process_start_time_seconds 5\n", vllmNew[:90], tgi, vllmNew + strings.Repeat("x", lineMax+5), "", vllmOld} {
		r.Begin(Head{})
		_, _ = r.Write([]byte(page))
		got, gotErr := r.End()
		want, wantErr := read(t, Unknown, Names{}, page, 0)
		if diff := cmp.Diff(want, got); diff != "" || !errors.Is(gotErr, wantErr) {
			t.Errorf("%.40q: %v, %v (-want +got)\n%s", page, gotErr, wantErr, diff)
		}
	}
}

// FuzzPage: whatever comes, in whatever pieces, values are sane or unknown.
func FuzzPage(f *testing.F) {
	for _, page := range []string{vllmOld, vllmNew, sglang, trtllm, triton, tgi, recorded(f, "llamacpp_5b4ebc5_busy.txt"),
		`vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.7e9`,
		"vllm:num_requests_waiting{a=\"b\\\"\\n\\\\\"} 5 1700000000\r\n"} {
		f.Add([]byte(page), 7)
	}
	f.Fuzz(func(t *testing.T, page []byte, piece int) {
		got, err := read(t, Unknown, Names{}, string(page), 0)
		for name, v := range map[string]plugin.Value{"waiting": got.Waiting, "running": got.Running, "usage": got.KVUsage, "done": got.Done, "cache": got.CacheTokens} {
			if !v.Known && v.V != 0 || v.Known && err != nil || !(v.V >= 0) || name == "usage" && v.V > 1 || name != "done" && v.V > tokensMax {
				t.Errorf("%s is %+v, %v", name, v, err)
			}
		}
		if len(got.Adapters) > adaptersMax {
			t.Errorf("%d adapters", len(got.Adapters))
		}
		again, errAgain := read(t, Unknown, Names{}, string(page), 1+max(piece%64, -piece%64))
		if diff := cmp.Diff(got, again); diff != "" || !errors.Is(errAgain, err) {
			t.Errorf("in pieces: %v, %v\n%s", err, errAgain, diff)
		}
	})
}

// BenchmarkPage reads a page of vLLM as it is every half second for every
// endpoint.
func BenchmarkPage(b *testing.B) {
	page := []byte(recorded(b, "vllm_0.32_busy.txt"))
	r, err := NewReader(Unknown, Names{})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	for b.Loop() {
		r.Begin(Head{})
		_, _ = r.Write(page)
		if _, err := r.End(); err != nil {
			b.Fatal(err)
		}
	}
}

// A line that is too long is lost wherever the page is cut, and no other with it.
func TestLongLineInTwoPieces(t *testing.T) {
	before := vllmNew + "vllm:num_requests_waiting{engine=\"8\",x=\"" + strings.Repeat("x", 2*lineMax) + "\"} 7\n"
	page := before + "vllm:num_requests_running{engine=\"9\"} 5\n"
	want, err := read(t, VLLM, Names{}, page, 0)
	if err != nil {
		t.Fatal(err)
	}
	if want.Waiting.Known || !want.Running.Known {
		t.Fatalf("whole: %+v", want)
	}
	for cut := len(vllmNew); cut <= len(vllmNew)+60; cut += 5 {
		r, err := NewReader(VLLM, Names{})
		if err != nil {
			t.Fatal(err)
		}
		r.Begin(Head{})
		for _, piece := range []string{page[:cut], page[cut:]} {
			if _, err := r.Write([]byte(piece)); err != nil {
				t.Fatal(err)
			}
		}
		got, err := r.End()
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("cut %d bytes into the line: %v %s", cut-len(vllmNew), err, diff)
		}
	}
}

// vLLM keeps a series for each set of adapters that there ever was. The newest counts,
// however many there are.
func TestNewestOfVeryManySetsOfAdaptersCounts(t *testing.T) {
	var page strings.Builder
	page.WriteString(vllmNew)
	for i := range 2 * seriesMax {
		fmt.Fprintf(&page, "vllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=\"a%d\",waiting_lora_adapters=\"\"} %d\n", i, 1000+i)
	}
	got, err := read(t, VLLM, Names{}, page.String(), 4096)
	if want := []string{fmt.Sprintf("a%d", 2*seriesMax-1)}; err != nil || !slices.Equal(got.Adapters, want) || got.AdapterSlots != 4 {
		t.Errorf("adapters %v of %d, want %v, error %v", got.Adapters, got.AdapterSlots, want, err)
	}
}
