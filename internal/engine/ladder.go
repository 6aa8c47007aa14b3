// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"
	"strings"
)

// ladder is where to look for each part, in order: the first name that a page
// has counts, whatever its value.
type ladder struct {
	waiting, running, kvUsage, done []selector

	caches []cache
	lora   string // family with vLLM's labels
}

// cache is one way to say how much KV memory there is: labels of an info
// family, a number of tokens, or the size of a block and how many there are.
type cache struct {
	info, tokensLabel, blockLabel, blocksLabel string
	tokens                                     selector
	blockTokens, blocks                        selector
}

// before puts the ladder's own names in front of others.
func (l *ladder) before(k *ladder) *ladder {
	return &ladder{
		waiting: slices.Concat(l.waiting, k.waiting), running: slices.Concat(l.running, k.running),
		kvUsage: slices.Concat(l.kvUsage, k.kvUsage), done: slices.Concat(l.done, k.done),
		caches: slices.Concat(l.caches, k.caches), lora: k.lora,
	}
}

func (l *ladder) families() []string {
	var names []string
	for _, rungs := range [][]selector{l.waiting, l.running, l.kvUsage, l.done} {
		for _, s := range rungs {
			names = append(names, s.name)
		}
	}
	for _, c := range l.caches {
		names = append(names, c.info, c.tokens.name, c.blockTokens.name, c.blocks.name)
	}
	names = append(names, l.lora)
	return slices.DeleteFunc(names, func(n string) bool { return n == "" })
}

// bootFamily is the start of the process, as the clients of Prometheus for most
// languages export it. vLLM with several API servers does not.
const bootFamily = "process_start_time_seconds"

// prefixes tell the kind of a page.
var prefixes = [...]struct {
	text string
	kind Kind
}{
	{"vllm:", VLLM}, {"sglang:", SGLang}, {"trtllm_", TRTLLM}, {"nv_", Triton}, {"llamacpp:", LlamaCPP}, {"tgi_", TGI},
}

// ladders are what is known of each kind. docs/engines.md says what of this was
// seen with real engines.
var ladders = map[Kind]*ladder{
	VLLM: {
		waiting: rungs("vllm:num_requests_waiting"),
		running: rungs("vllm:num_requests_running"),
		// The old name is all there is up to 0.9.1, and is gone from 0.12 on.
		kvUsage: rungs("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
		done:    rungs("vllm:generation_tokens_total", "vllm:generation_tokens"),
		caches: []cache{{
			// Where layers differ, blocks are not all of one size, and only the label
			// that newer versions have tells how many tokens fit.
			info: "vllm:cache_config_info", tokensLabel: "kv_cache_size_tokens", blockLabel: "block_size", blocksLabel: "num_gpu_blocks",
		}},
		lora: "vllm:lora_requests_info",
	},
	SGLang: {
		waiting: rungs("sglang:num_queue_reqs"),
		running: rungs("sglang:num_running_reqs"),
		kvUsage: rungs("sglang:token_usage"),
		done:    rungs("sglang:generation_tokens_total", "sglang:num_requests_total"),
		caches: []cache{
			{blockTokens: one("sglang:page_size"), blocks: one("sglang:num_pages")}, // from 0.5.11 on
			{info: "sglang:cache_config_info", blockLabel: "page_size", blocksLabel: "num_pages"},
			{tokens: one("sglang:max_total_num_tokens")},
		},
	},
	TRTLLM: {
		waiting: rungs("trtllm_num_requests_waiting"),
		running: rungs("trtllm_num_requests_running"),
		kvUsage: rungs("trtllm_kv_cache_utilization"),
		done:    rungs("trtllm_generation_tokens_total", "trtllm_request_success_total"),
		caches:  []cache{{blockTokens: one("trtllm_kv_cache_tokens_per_block"), blocks: one("trtllm_kv_cache_max_blocks")}},
	},
	Triton: {
		waiting: rungs(`nv_trt_llm_request_metrics{request_type="waiting"}`, "nv_inference_pending_request_count"),
		// nv_inference_exec_count, which others read as this, only ever grows.
		running: rungs(`nv_trt_llm_request_metrics{request_type="scheduled"}`),
		kvUsage: rungs(`nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}`),
		done:    rungs("nv_inference_request_success"),
		caches: []cache{{
			blockTokens: one(`nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"}`),
			blocks:      one(`nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"}`),
		}},
	},
	LlamaCPP: {
		waiting: rungs("llamacpp:requests_deferred"),
		running: rungs("llamacpp:requests_processing"),
		done:    rungs("llamacpp:tokens_predicted_total"),
	},
	TGI: {
		waiting: rungs("tgi_queue_size"),
		running: rungs("tgi_batch_current_size"),
		done:    rungs("tgi_request_success", "tgi_request_count"),
	},
}

func rungs(texts ...string) []selector {
	list := make([]selector, len(texts))
	for i, text := range texts {
		list[i] = one(text)
	}
	return list
}

func one(text string) selector {
	s, err := ParseSelector(text)
	if err != nil {
		panic(err) // a table of this package is wrong
	}
	return s
}

// selector is a family, and the labels that a series of it must have.
type selector struct {
	name   string
	labels string // as label="value",…
}

// ParseSelector reads name, or name{label="value",…}; quotes may be left out.
func ParseSelector(text string) (selector, error) {
	name, rest, has := strings.Cut(strings.TrimSpace(text), "{")
	s := selector{name: strings.TrimSpace(name)}
	if s.name == "" || nameLength([]byte(s.name)) != len(s.name) {
		return s, fmt.Errorf("%q is not the name of a metric", text)
	}
	if !has {
		return s, nil
	}
	inner, closed := strings.CutSuffix(rest, "}")
	if !closed {
		return s, fmt.Errorf("%q has no } at its end", text)
	}
	var parts []string
	for part := range strings.SplitSeq(inner, ",") {
		label, value, has := strings.Cut(part, "=")
		label, value = strings.TrimSpace(label), strings.Trim(strings.TrimSpace(value), `"`)
		if !has || label == "" || strings.ContainsAny(value, `"\{}`) {
			return s, fmt.Errorf(`%q: labels are written as {label="value"}`, text)
		}
		parts = append(parts, label+"="+value)
	}
	s.labels = strings.Join(parts, ",")
	return s, nil
}

// has reports whether the series has the labels.
func (s selector) has(x *series) bool {
	if s.labels == "" {
		return true
	}
	for part := range strings.SplitSeq(s.labels, ",") {
		label, value, _ := strings.Cut(part, "=")
		if x.label(label) != value {
			return false
		}
	}
	return true
}
