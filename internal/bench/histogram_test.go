// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

func TestQuantilesAreWithinOnePercent(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var h Histogram
	var all []time.Duration
	for range 20000 {
		d := time.Duration(math.Exp(rnd.Float64() * 23)) // 1 ns to 10 s
		h.Add(d)
		all = append(all, d)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.001, 0.5, 0.9, 0.99, 0.999, 1} {
		want := all[max(int(math.Ceil(q*float64(len(all))))-1, 0)]
		if got := h.Quantile(q); got < want || float64(got) > float64(want)*1.01 {
			t.Errorf("quantile %v is %v, want %v and up to 1 %% more", q, got, want)
		}
	}
}

func TestEveryBucketHoldsItsOwnTop(t *testing.T) {
	for i := range buckets {
		top := topOf(i)
		if got := bucketOf(top); got != i {
			t.Fatalf("top %d of bucket %d lies in bucket %d", top, i, got)
		}
		if top < math.MaxUint64 && bucketOf(top+1) != i+1 {
			t.Fatalf("%d does not begin bucket %d", top+1, i+1)
		}
	}
}

func TestAnEmptyHistogramHasNoQuantiles(t *testing.T) {
	var h Histogram
	if h.Quantiles() != nil || h.Quantile(0.5) != 0 {
		t.Error("figures without a value")
	}
}

func TestAddsOfManyGoroutinesAllCount(t *testing.T) {
	var h Histogram
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for k := range 1000 {
				h.Add(time.Duration(i*1000 + k))
			}
		})
	}
	all.Wait()
	if q := h.Quantiles(); q.Count != 8000 || q.Max != 7.999 {
		t.Errorf("got %+v", q)
	}
}
