// SPDX-License-Identifier: Apache-2.0

// Package telemetry turns the program's measurements into Prometheus metrics.
//
// It is the only package that knows Prometheus: the others speak to small
// recorders of their own. Names have the prefix headgate_ and base units, and
// every label is bounded, because a model name is whatever a client wrote.
package telemetry

import (
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/journal"
)

const (
	namespace = "headgate"

	// modelsMax bounds the model names that get series of their own, per
	// process; further ones share "other".
	modelsMax = 200
	// modelBytesMax bounds one of them.
	modelBytesMax = 128
)

// Metrics is one process's metrics. It is a gateway.Recorder.
type Metrics struct {
	registry *prometheus.Registry
	models   modelNames

	requests    *prometheus.CounterVec
	firstOutput *prometheus.HistogramVec
	interOutput *prometheus.HistogramVec
	waits       *prometheus.HistogramVec
	predictions *prometheus.HistogramVec
	attempts    *prometheus.CounterVec
	retries     *prometheus.CounterVec
	retryDenied *prometheus.CounterVec
	rateLimited *prometheus.CounterVec
	woke        *prometheus.CounterVec
	lateChunks  prometheus.Counter
}

// New makes the metrics of a process of the given version.
func New(version string) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		models:   modelNames{known: map[string]bool{}},
		requests: counter("requests_total", "Requests by how they ended; pool and model are empty where none was found.",
			"pool", "model", "outcome", "code"),
		firstOutput: histogram("first_output_seconds", "Time from a request's arrival to its first byte at the client.",
			prometheus.ExponentialBuckets(0.005, 2, 15), "pool", "model"),
		interOutput: histogram("inter_output_seconds", "Time between two writes of output to one client.",
			prometheus.ExponentialBuckets(0.001, 2, 14), "pool", "model"),
		waits: histogram("queue_wait_seconds", "Time that requests waited for a place on an endpoint, of those that got one.",
			append([]float64{0.001}, prometheus.ExponentialBuckets(0.005, 2, 14)...), "pool", "band"),
		predictions: histogram("first_output_predicted_ratio", "Time to the first output of requests that had to wait, over what was predicted when they came.",
			[]float64{0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4}, "pool"),
		attempts:    counter("attempts_total", "Attempts by how they ended and what proves that they are over.", "pool", "verdict", "fence_proof"),
		retries:     counter("retries_total", "Attempts that were repeated, by why.", "pool", "verdict"),
		retryDenied: counter("retry_denied_total", "Attempts that might have been repeated and were not, by why.", "pool", "reason"),
		rateLimited: counter("rate_limited_total", "Requests refused because their API key was over a limit, requests or tokens per minute.", "key", "limit"),
		woke:        counter("scale_events_total", "How often a pool's engines were asked for (wake) or let go (release), and whether it went well.", "pool", "event", "ok"),
		lateChunks: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "late_chunks_total", Help: "Writes of attempts that no longer owned their client's answer; all were dropped.",
		}),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: namespace, Name: "build_info", Help: "Always 1; the version is a label.", ConstLabels: prometheus.Labels{"version": version},
	})
	info.Set(1)
	m.registry.MustRegister(m.requests, m.firstOutput, m.interOutput, m.waits, m.predictions, m.attempts, m.retries, m.retryDenied, m.rateLimited, m.woke, m.lateChunks, info,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels)
}

// Handler serves the metrics in Prometheus's text formats.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// Watch adds the gauges of a gateway's endpoints, read when they are scraped.
func (m *Metrics) Watch(status func() []gateway.PoolStatus) {
	m.registry.MustRegister(newGuards(status), newQueues(status), newEndpoints(status))
}

// WatchJournal adds the metrics of a journal, read when they are scraped.
func (m *Metrics) WatchJournal(status func() journal.Status) {
	gauge := func(name, help string, value func(journal.Status) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help},
			func() float64 { return value(status()) })
	}
	total := func(name, help string, value func(journal.Status) uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help},
			func() float64 { return float64(value(status())) })
	}
	m.registry.MustRegister(
		gauge("journal_lag_seconds", "Age of the oldest event that is not written.",
			func(s journal.Status) float64 { return s.Lag.Seconds() }),
		gauge("journal_queued_events", "Events that wait to be written.",
			func(s journal.Status) float64 { return float64(s.Queued) }),
		total("journal_dropped_total", "Events and answers that a full queue or a failing disk cost.",
			func(s journal.Status) uint64 { return s.Dropped }),
		total("journal_lost_total", "Events that no longer fitted their record.",
			func(s journal.Status) uint64 { return s.Lost }),
	)
}

// Request implements gateway.Recorder.
func (m *Metrics) Request(pool, model string, outcome inference.Outcome, code inference.Code) {
	m.requests.WithLabelValues(pool, m.models.label(model), outcome.String(), string(code)).Inc()
}

// FirstOutput implements gateway.Recorder.
func (m *Metrics) FirstOutput(pool, model string, after time.Duration) {
	m.firstOutput.WithLabelValues(pool, m.models.label(model)).Observe(after.Seconds())
}

// Gap implements gateway.Recorder.
func (m *Metrics) Gap(pool, model string, gap time.Duration) {
	m.interOutput.WithLabelValues(pool, m.models.label(model)).Observe(gap.Seconds())
}

// Waited implements gateway.Recorder.
func (m *Metrics) Waited(pool string, priority int, wait time.Duration) {
	m.waits.WithLabelValues(pool, band(priority)).Observe(wait.Seconds())
}

// Predicted implements gateway.Recorder.
func (m *Metrics) Predicted(pool string, predicted, actual time.Duration) {
	m.predictions.WithLabelValues(pool).Observe(float64(actual) / float64(predicted))
}

// band is a priority as a label. There are as many as the configuration has
// objectives.
func band(priority int) string { return strconv.Itoa(priority) }

// Attempt implements gateway.Recorder.
func (m *Metrics) Attempt(pool string, verdict inference.Verdict, proof inference.Proof) {
	m.attempts.WithLabelValues(pool, verdict.String(), proof.String()).Inc()
}

// Retry implements gateway.Recorder.
func (m *Metrics) Retry(pool string, after inference.Verdict) {
	m.retries.WithLabelValues(pool, after.String()).Inc()
}

// RetryDenied implements gateway.Recorder.
func (m *Metrics) RetryDenied(pool string, reason inference.Code) {
	m.retryDenied.WithLabelValues(pool, string(reason)).Inc()
}

// RateLimited implements gateway.Recorder. Keys are those of the configuration.
func (m *Metrics) RateLimited(key, limit string) { m.rateLimited.WithLabelValues(key, limit).Inc() }

// Woke implements gateway.Recorder.
func (m *Metrics) Woke(pool, event string, ok bool) {
	m.woke.WithLabelValues(pool, event, strconv.FormatBool(ok)).Inc()
}

// LateChunks implements gateway.Recorder.
func (m *Metrics) LateChunks(n int) { m.lateChunks.Add(float64(n)) }

// modelNames bounds the label that clients choose: first come, first named.
type modelNames struct {
	mu    sync.RWMutex
	known map[string]bool
}

func (n *modelNames) label(model string) string {
	n.mu.RLock()
	known := n.known[model]
	n.mu.RUnlock()
	if known || model == "" {
		return model
	}
	if len(model) > modelBytesMax || strings.ToValidUTF8(model, "") != model {
		return "other"
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.known[model] && len(n.known) >= modelsMax {
		return "other"
	}
	n.known[model] = true
	return model
}
