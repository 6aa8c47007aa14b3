// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// timings are what vLLM exports and the model does not count. Times are the
// model's own.
type timings struct {
	queue, firstToken, interToken, total histogram

	reasons map[string]uint64 // finished requests by finish_reason
	aborted uint64
}

func newTimings() timings {
	short := []float64{0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60}
	return timings{
		queue: newHistogram(short), firstToken: newHistogram(short),
		interToken: newHistogram(short), total: newHistogram(short),
		reasons: make(map[string]uint64),
	}
}

func (t *timings) finish(j *job, at time.Duration) {
	t.total.observe(at - j.submitted)
	t.reasons[j.reason]++
}

type histogram struct {
	bounds []float64 // seconds
	counts []uint64  // one more than bounds
	sum    float64
}

func newHistogram(bounds []float64) histogram {
	return histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

func (h *histogram) observe(d time.Duration) {
	at := 0
	for at < len(h.bounds) && d.Seconds() > h.bounds[at] {
		at++
	}
	h.counts[at]++
	h.sum += d.Seconds()
}

// metricsText is the /metrics page with the names of vLLM's V1 engine. Written
// by hand, in their order, so that it shares nothing with our own exporter.
func (l *life) metricsText() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.model.Snapshot()
	p := l.model.Params()
	var b strings.Builder
	labels := fmt.Sprintf(`engine="0",model_name=%q`, l.e.cfg.Models[0])
	family := func(name, kind, help string) {
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
	}
	gauge := func(name, help string, v float64) {
		family(name, "gauge", help)
		fmt.Fprintf(&b, "%s{%s} %s\n", name, labels, float(v))
	}
	counter := func(name, help string, v uint64) {
		family(name, "counter", help)
		fmt.Fprintf(&b, "%s_total{%s} %s\n", name, labels, float(float64(v)))
	}
	gauge("vllm:num_requests_running", "Number of requests in model execution batches.", float64(s.Running))
	gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", float64(s.Waiting))
	gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", s.KVUsage())
	counter("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", s.QueryTokens)
	counter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", s.HitTokens)
	counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", s.Preemptions)
	counter("vllm:prompt_tokens", "Number of prefill tokens processed.", s.PromptTokens)
	counter("vllm:generation_tokens", "Number of generation tokens processed.", s.GenerationTokens)

	family("vllm:request_success", "counter", "Count of successfully processed requests.")
	for _, reason := range []string{"stop", "length", "abort"} {
		n := l.timings.reasons[reason]
		if reason == "abort" {
			n = l.timings.aborted
		}
		fmt.Fprintf(&b, "vllm:request_success_total{%s,finished_reason=%q} %s\n", labels, reason, float(float64(n)))
	}
	for _, h := range []struct {
		name, help string
		histogram  histogram
	}{
		{"vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", l.timings.firstToken},
		{"vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", l.timings.interToken},
		{"vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", l.timings.total},
		{"vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", l.timings.queue},
	} {
		family(h.name, "histogram", h.help)
		var total uint64
		for i, n := range h.histogram.counts {
			le := "+Inf"
			if i < len(h.histogram.bounds) {
				le = float(h.histogram.bounds[i])
			}
			total += n
			fmt.Fprintf(&b, "%s_bucket{%s,le=%q} %s\n", h.name, labels, le, float(float64(total)))
		}
		fmt.Fprintf(&b, "%s_count{%s} %s\n%s_sum{%s} %s\n", h.name, labels, float(float64(total)), h.name, labels, float(h.histogram.sum))
	}
	if p.AdapterSlots > 0 && len(l.e.cfg.Adapters) > 0 {
		// As vLLM: adapters of requests, not of slots, and the time as value.
		family("vllm:lora_requests_info", "gauge", "Running stats on lora requests.")
		fmt.Fprintf(&b, "vllm:lora_requests_info{max_lora=\"%d\",running_lora_adapters=%q,waiting_lora_adapters=%q} %s\n",
			p.AdapterSlots, strings.Join(s.AdaptersRunning, ","), strings.Join(s.AdaptersWaiting, ","),
			float(float64(time.Now().UnixMilli())/1e3))
	}
	// As Python's client writes it, to the hundredth of a second.
	family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
	fmt.Fprintf(&b, "process_start_time_seconds %s\n", float(float64(l.started.UnixMilli()/10)/100))
	family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
	fmt.Fprintf(&b, "vllm:cache_config_info{block_size=\"%d\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"0\",gpu_memory_utilization=\"0.9\",num_gpu_blocks=\"%d\"} 1.0\n",
		p.BlockTokens, p.Blocks)
	return b.String()
}

// float writes a number as Python does: never without a point or exponent.
func float(v float64) string {
	text := strconv.FormatFloat(v, 'g', -1, 64)
	if !strings.ContainsAny(text, ".e") {
		text += ".0"
	}
	return text
}
