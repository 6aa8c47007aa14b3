// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// What each answer in a row does to the list and to the time of the next look.
func TestAnswersBecomeReports(t *testing.T) {
	type step struct {
		a     answer
		news  bool
		list  string // "-": none reported
		err   string
		after time.Duration
	}
	one, two := at("10.0.0.1:80"), at("10.0.0.1:80", "[::1]:80")
	lost := errors.New("lost")
	for name, steps := range map[string][]step{
		"TTL within limits": {
			{answer{at: one, ttl: 5 * time.Second}, true, "http://10.0.0.1:80", "", 5 * time.Second},
			{answer{at: one, ttl: 0}, false, "-", "", time.Second},
			{answer{at: two, ttl: time.Hour}, true, "http://10.0.0.1:80 http://[::1]:80", "", 30 * time.Second},
		},
		"only the third answer in a row that there is nothing empties": {
			{answer{at: one}, true, "http://10.0.0.1:80", "", time.Second},
			{answer{ttl: 7 * time.Second}, true, "-", "DNS has no addresses for e.test", 7 * time.Second},
			{answer{}, false, "-", "DNS has no addresses for e.test", time.Second},
			{answer{at: one}, true, "-", "", time.Second},
			{answer{}, true, "-", "DNS has no addresses for e.test", time.Second},
			{answer{}, false, "-", "DNS has no addresses for e.test", time.Second},
			{answer{}, true, "", "DNS has no addresses for e.test", time.Second},
			{answer{}, false, "-", "DNS has no addresses for e.test", time.Second},
			{answer{at: one}, true, "http://10.0.0.1:80", "", time.Second},
		},
		"missed answers never empty, neither count nor forgive": {
			{answer{at: one}, true, "http://10.0.0.1:80", "", time.Second},
			{answer{}, true, "-", "DNS has no addresses for e.test", time.Second},
			{answer{err: lost}, true, "-", "lost", time.Second},
			{answer{err: lost}, false, "-", "lost", 2 * time.Second},
			{answer{err: lost}, false, "-", "lost", 4 * time.Second},
			{answer{err: lost}, false, "-", "lost", 8 * time.Second},
			{answer{err: lost}, false, "-", "lost", 16 * time.Second},
			{answer{err: lost}, false, "-", "lost", 30 * time.Second},
			{answer{}, true, "-", "DNS has no addresses for e.test", time.Second},
			{answer{err: lost}, true, "-", "lost", time.Second},
			{answer{}, true, "", "DNS has no addresses for e.test", time.Second},
		},
		"a part that was not answered": {
			{answer{at: two, err: lost, ttl: time.Hour}, true, "http://10.0.0.1:80 http://[::1]:80", "lost", time.Second},
			{answer{at: two, ttl: 9 * time.Second}, true, "-", "", 9 * time.Second},
		},
	} {
		tr := dnsTracker{DNS: named("e.test")}
		for i, s := range steps {
			r, news, after := tr.observe(s.a)
			list, text := "-", ""
			if r.Endpoints != nil {
				list = ids(r.Endpoints)
			}
			if r.Err != nil {
				text = r.Err.Error()
			}
			if news != s.news || list != s.list || text != s.err || after != s.after {
				t.Errorf("%s, answer %d: news %v, list %s, error %q, after %v; want %+v", name, i, news, list, text, after, s)
			}
		}
	}
}

func TestNameIsLookedUpWhenItsTTLIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var looks []time.Duration
		s := &dnsSource{DNS: named("e.test"), look: func(context.Context) answer {
			looks = append(looks, time.Since(began))
			return answer{at: at("10.0.0.1:80"), ttl: 10 * time.Second}
		}}
		ctx, stop := context.WithTimeout(t.Context(), 35*time.Second)
		defer stop()
		reports := 0
		s.Run(ctx, func(Report) { reports++ })
		if len(looks) != 4 || looks[3] != 30*time.Second || reports != 1 {
			t.Errorf("looks at %v, %d reports", looks, reports)
		}
	})
}

func TestLookUpThatIsCutOffIsNoReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &dnsSource{DNS: named("e.test"), look: func(ctx context.Context) answer {
			<-ctx.Done()
			return answer{err: ctx.Err()}
		}}
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		s.Run(ctx, func(r Report) { t.Errorf("got %v", r) })
	})
}
