// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"slices"
	"testing"
	"time"
)

func arrivals(load Load, end int64) []arrival {
	s := newSchedule(load, 1000, end)
	var all []arrival
	for {
		a, ok := s.take(1000)
		if !ok {
			return all
		}
		all = append(all, a)
	}
}

func TestConstantArrivalsAreEquallySpaced(t *testing.T) {
	all := arrivals(Load{Rate: 1000, Shape: Shape{Tokens: 5}}, 1000+int64(time.Second))
	if len(all) != 1000 {
		t.Fatalf("%d arrivals, want 1000", len(all))
	}
	for i, a := range all {
		want := arrival{at: 1000 + int64(i)*1e6, tokens: 5, n: uint64(i)}
		if d := a.at - want.at; d < -1 || d > 1 || a.tokens != want.tokens || a.n != want.n {
			t.Fatalf("arrival %d is %+v, want %+v", i, a, want)
		}
	}
}

func TestPoissonArrivalsHaveTheirRateAndFollowTheSeed(t *testing.T) {
	load := Load{Rate: 5000, Poisson: true, Seed: 3}
	all := arrivals(load, 1000+int64(time.Second))
	if len(all) < 4700 || len(all) > 5300 {
		t.Errorf("%d arrivals in a second, want about 5000", len(all))
	}
	if !slices.Equal(all, arrivals(load, 1000+int64(time.Second))) {
		t.Error("the same seed gives other arrivals")
	}
	load.Seed = 4
	if slices.Equal(all, arrivals(load, 1000+int64(time.Second))) {
		t.Error("another seed gives the same arrivals")
	}
	short := 0
	for i := 1; i < len(all); i++ {
		if all[i].at-all[i-1].at < int64(100*time.Microsecond) {
			short++
		}
	}
	if share := float64(short) / float64(len(all)); share < 0.35 || share > 0.44 { // 1 − e^−½ = 0.39
		t.Errorf("a share of %.2f of the gaps is under half the mean one", share)
	}
}

func TestFillIsSpreadOverTheRampWithAnswersOfEveryLength(t *testing.T) {
	load := Load{Fill: 10, Ramp: time.Second, Rate: 100, Shape: Shape{Tokens: 100}}
	all := arrivals(load, 1000+int64(1050*time.Millisecond))
	if len(all) != 15 {
		t.Fatalf("%d arrivals, want 10 of the fill and 5", len(all))
	}
	var lengths []int
	for i, a := range all[:10] {
		if want := 1000 + int64(i)*int64(100*time.Millisecond); a.at != want {
			t.Errorf("arrival %d at %d, want %d", i, a.at, want)
		}
		lengths = append(lengths, a.tokens)
	}
	if slices.IsSorted(lengths) {
		t.Error("the early ones are the short ones")
	}
	slices.Sort(lengths)
	if want := []int{10, 20, 30, 40, 50, 60, 70, 80, 90, 100}; !slices.Equal(lengths, want) {
		t.Errorf("lengths %v, want %v", lengths, want)
	}
	if a := all[10]; a.at != 1000+int64(time.Second) || a.tokens != 100 {
		t.Errorf("first arrival after the ramp is %+v", a)
	}
}

func TestLateArrivalsKeepTheTimeAtWhichTheyWereDue(t *testing.T) {
	s := newSchedule(Load{Rate: 10}, 0, int64(time.Second))
	late := int64(900 * time.Millisecond)
	for i := range 3 {
		if a, ok := s.take(late); !ok || a.at != int64(i)*int64(100*time.Millisecond) {
			t.Errorf("arrival %d: %+v, %t", i, a, ok)
		}
	}
}

func TestAClosedLoopHasNoDueTimesAndEnds(t *testing.T) {
	s := newSchedule(Load{}, 0, 100)
	if a, ok := s.take(99); !ok || a.at != 0 {
		t.Errorf("got %+v, %t", a, ok)
	}
	if _, ok := s.take(100); ok {
		t.Error("goes on after its end")
	}
	s = newSchedule(Load{Least: 1}, 0, 100)
	if _, ok := s.take(200); !ok {
		t.Error("a late start sends less than the least")
	}
	if _, ok := s.take(200); ok {
		t.Error("sends more than the least after its end")
	}
}

func TestATokenThatABlockedWriteDelayedIsStampedWithItsDueTime(t *testing.T) {
	start := now() - int64(time.Second)
	p := pacer{interval: 100 * time.Millisecond, due: start}
	for i := range 5 { // the writer comes a second late to all of them
		if got, want := p.wait(), start+int64(i)*int64(100*time.Millisecond); got != want {
			t.Errorf("token %d is stamped %d, want %d", i, got, want)
		}
	}
}
