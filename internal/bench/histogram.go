// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math"
	"math/bits"
	"sync/atomic"
	"time"
)

// Values are counted in buckets as wide as 1/128 of what they hold, so a
// quantile is off by less than 1 %. Small values have buckets of their own.
const (
	subBits = 7
	subs    = 1 << subBits
	buckets = (64 - subBits + 1) * subs
)

// Histogram counts durations. Many goroutines may Add at once; what is read
// while they do is approximate.
type Histogram struct {
	counts [buckets]atomic.Uint64
	total  atomic.Uint64
	max    atomic.Int64
}

// Add counts one duration. A negative one counts as zero.
func (h *Histogram) Add(d time.Duration) {
	d = max(d, 0)
	h.counts[bucketOf(uint64(d))].Add(1)
	h.total.Add(1)
	for {
		old := h.max.Load()
		if int64(d) <= old || h.max.CompareAndSwap(old, int64(d)) {
			return
		}
	}
}

func bucketOf(v uint64) int {
	shift := bits.Len64(v>>subBits) - 1
	if shift < 0 {
		return int(v)
	}
	return (shift+1)*subs + int(v>>shift) - subs
}

// topOf is the largest value of a bucket.
func topOf(bucket int) uint64 {
	if bucket < subs {
		return uint64(bucket)
	}
	shift := bucket/subs - 1
	return uint64(bucket%subs+subs+1)<<shift - 1
}

// Count is how many durations were counted.
func (h *Histogram) Count() uint64 { return h.total.Load() }

// Quantile is the duration that a share q of all is not above, 0 if there are
// none.
func (h *Histogram) Quantile(q float64) time.Duration {
	total := h.total.Load()
	if total == 0 {
		return 0
	}
	rank := uint64(math.Ceil(q * float64(total)))
	rank = min(max(rank, 1), total)
	seen := uint64(0)
	for i := range h.counts {
		if seen += h.counts[i].Load(); seen >= rank {
			return time.Duration(min(topOf(i), uint64(h.max.Load())))
		}
	}
	return time.Duration(h.max.Load())
}

// Quantiles are a histogram in few words, in microseconds.
type Quantiles struct {
	Count uint64  `json:"count"`
	P50   float64 `json:"p50_us"`
	P90   float64 `json:"p90_us"`
	P99   float64 `json:"p99_us"`
	P999  float64 `json:"p999_us"`
	Max   float64 `json:"max_us"`
}

// Quantiles summarizes the histogram, nil if it is empty.
func (h *Histogram) Quantiles() *Quantiles {
	if h.Count() == 0 {
		return nil
	}
	us := func(d time.Duration) float64 { return float64(d) / 1e3 }
	return &Quantiles{
		Count: h.Count(),
		P50:   us(h.Quantile(0.5)), P90: us(h.Quantile(0.9)), P99: us(h.Quantile(0.99)),
		P999: us(h.Quantile(0.999)), Max: us(time.Duration(h.max.Load())),
	}
}
