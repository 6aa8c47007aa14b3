// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/config"
)

// A rig runs Pools in virtual time, with names that a test answers for.
type rig struct {
	*Pools
	t   *testing.T
	dir string

	mu      sync.Mutex
	log     bytes.Buffer
	answers map[string]answer
	updates []string
}

func run(t *testing.T, test func(*rig)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, dir: dir, answers: map[string]answer{}}
		r.Pools = New(Config{Update: r.update, Log: slog.New(slog.NewTextHandler(r, nil))})
		r.newDNS = func(c config.DNS) Source {
			return &dnsSource{DNS: c, look: func(ctx context.Context) answer { return r.look(ctx, c.Name) }}
		}
		test(r)
		r.Close()
	})
}

func (r *rig) update(pool string, list []inference.Endpoint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.updates = append(r.updates, show(pool, list))
}

// Write takes the log.
func (r *rig) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log.Write(p)
}

func show(pool string, list []inference.Endpoint) string {
	text := pool + ":"
	for _, e := range list {
		text += " " + strings.TrimPrefix(e.URL, "http://")
		if e.Revision != "" {
			text += "@" + e.Revision
		}
	}
	return text
}

// look answers as the test says; a name that it says nothing of hangs.
func (r *rig) look(ctx context.Context, name string) answer {
	r.mu.Lock()
	a, known := r.answers[name]
	r.mu.Unlock()
	if !known {
		<-ctx.Done()
	}
	return a
}

func (r *rig) answer(name string, a answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answers[name] = a
}

func (r *rig) file(name, text string) config.File {
	r.t.Helper()
	path := filepath.Join(r.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
	return config.File(path)
}

// want waits and compares the updates of that time.
func (r *rig) want(d time.Duration, updates ...string) {
	r.t.Helper()
	time.Sleep(d) // virtual
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Equal(r.updates, updates) {
		r.t.Errorf("updates %q, want %q", r.updates, updates)
	}
	r.updates = nil
}

// logged is how many lines of the log have the text, and forgets them all.
func (r *rig) logged(text string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for line := range strings.Lines(r.log.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	r.log.Reset()
	return n
}

func list(urls ...config.URL) config.Discovery {
	var d config.Discovery
	for _, u := range urls {
		d.Static = append(d.Static, config.Endpoint{URL: u})
	}
	return d
}

func pools(d config.Discovery) map[string]config.Pool {
	return map[string]config.Pool{"q": {Discovery: d}}
}

func TestStaticListsAreThereAtOnce(t *testing.T) {
	run(t, func(r *rig) {
		d := list("http://b:1", "http://a:1", "http://c:1")
		d.Static[0].ModelRevision = "r2"
		d.Static[2].Draining = true
		r.Reload(map[string]config.Pool{"q": {Discovery: d, ModelRevision: "r1"}, "p": {Discovery: list("http://x:1")}})
		r.want(0, "p: x:1", "q: a:1@r1 b:1@r2")
		r.Reload(map[string]config.Pool{"q": {Discovery: d, ModelRevision: "r1"}})
		r.want(time.Minute) // nothing changed, and a pool that left is not heard of
		d.Static = d.Static[1:2]
		r.Reload(pools(d))
		r.want(0, "q: a:1")
		r.Close()
		r.Reload(pools(list("http://late:1")))
		r.want(time.Minute)
	})
}

// EPT-1: nothing that is missed keeps a dead endpoint: the file is read again
// and again, whatever the kernel said.
func TestFileIsFollowed(t *testing.T) {
	run(t, func(r *rig) {
		d := config.Discovery{File: r.file("list", "- url: http://[::1]:80\n- url: http://a:1\n- url: http://[0:0::2]\n")}
		r.Reload(pools(d))
		r.want(time.Second, "q: [::1]:80 [::2]:80 a:1")
		r.file("list", "[{\"url\": \"http://a:1\", \"draining\": true}, {\"url\": \"http://[::1]\"}]")
		r.want(2*time.Second, "q: [::1]:80")
		r.file("list", "[]")
		r.want(2*time.Second, "q:")
		r.file("list", "[{url: 'http://a:1'}]")
		r.want(2*time.Second, "q: a:1")
	})
}

func TestBadFileKeepsTheLastGoodList(t *testing.T) {
	run(t, func(r *rig) {
		d := config.Discovery{File: r.file("list", "- url: http://a:1\n")}
		r.Reload(pools(d))
		r.want(time.Second, "q: a:1")
		for _, bad := range []string{"", "- url: http://b:1\n- ulr: http://c:1\n- 3\n", "- url: http://b:1\n- ulr: http://d:1\n- 3\n", "gone"} {
			r.logged("")
			if bad == "gone" {
				if err := os.Remove(string(d.File)); err != nil {
					t.Fatal(err)
				}
			} else {
				r.file("list", bad)
			}
			r.want(time.Minute)
			if s := r.Status(); len(s) != 1 || s[0].Err == nil || !s[0].Known || s[0].Endpoints != 1 {
				t.Errorf("%q: status %v", bad, s)
			}
			want := "discovery is in trouble"
			if strings.Contains(bad, "ulr") {
				want = "list:2:3: [1].ulr: unknown field: did you mean url? (and 1 more)"
			}
			if n := r.logged(want); n != 1 {
				t.Errorf("%q: %d warnings", bad, n)
			}
		}
		r.file("list", "- url: http://a:1\n")
		r.want(time.Minute)
		if s := r.Status(); s[0].Err != nil {
			t.Errorf("status %v", s)
		}
		if n := r.logged("discovery is well again"); n != 1 {
			t.Errorf("%d lines", n)
		}
	})
}

// EPT-8: one endpoint is one, however it is written and whoever found it.
func TestSourcesOfOnePoolAreOneList(t *testing.T) {
	run(t, func(r *rig) {
		d := list("http://[::1]:80", "http://a:1")
		d.File = r.file("list", "- {url: 'http://[0::1]', model_revision: r2}\n- {url: 'http://a:1', draining: true}\n- url: http://[::ffff:10.0.0.1]\n")
		d.DNS = named("e")
		r.answer("e", answer{at: at("10.0.0.1:80", "[::1]:80", "[2001:db8::7]:80"), ttl: time.Second})
		r.Reload(map[string]config.Pool{"q": {Discovery: d, ModelRevision: "r1"}})
		r.want(0, "q: [::1]:80@r1 a:1@r1", "q: 10.0.0.1:80@r1 [2001:db8::7]:80@r1 [::1]:80@r1 a:1@r1")
		r.want(time.Second, "q: 10.0.0.1:80@r1 [2001:db8::7]:80@r1 [::1]:80@r2")
		if got := fmt.Sprint(r.Status()); got != "[{q static true 2 <nil>} {q file true 3 <nil>} {q dns true 3 <nil>}]" {
			t.Errorf("status %s", got)
		}
	})
}

func TestTooManyEndpointsKeepTheListBefore(t *testing.T) {
	run(t, func(r *rig) {
		d := list("http://a:1")
		d.DNS = named("e")
		many := answer{ttl: time.Second}
		for i := range config.EndpointsMax {
			many.at = append(many.at, at(fmt.Sprintf("10.0.%d.%d:80", i/250, i%250))...)
		}
		r.answer("e", many)
		r.Reload(pools(d))
		r.want(time.Minute, "q: a:1")
		if n := r.logged("a pool has too many endpoints"); n != 1 {
			t.Errorf("%d lines", n)
		}
		r.answer("e", answer{at: at("10.0.0.1:80"), ttl: time.Second})
		r.want(time.Minute, "q: 10.0.0.1:80 a:1")
	})
}

func TestNameThatHangsHoldsNobodyUp(t *testing.T) {
	run(t, func(r *rig) {
		hung, well := list("http://a:1"), config.Discovery{DNS: named("well")}
		hung.DNS = named("hung")
		r.answer("well", answer{at: at("10.0.0.1:80"), ttl: time.Second})
		r.Reload(map[string]config.Pool{"hung": {Discovery: hung}, "well": {Discovery: well}, "only": {Discovery: config.Discovery{DNS: named("hung")}}})
		r.want(time.Minute, "hung: a:1", "well: 10.0.0.1:80")
		r.answer("well", answer{at: at("10.0.0.2:80"), ttl: time.Second})
		r.want(30*time.Second, "well: 10.0.0.2:80")
	})
}

func TestReloadKeepsWhatSourcesKnow(t *testing.T) {
	run(t, func(r *rig) {
		d := list("http://a:1")
		d.DNS = named("e")
		d.File = r.file("list", "- url: http://f:1\n")
		r.answer("e", answer{at: at("10.0.0.1:80"), ttl: time.Second})
		r.Reload(pools(d))
		r.want(time.Second, "q: a:1", "q: 10.0.0.1:80 a:1", "q: 10.0.0.1:80 a:1 f:1")
		r.answer("e", answer{err: errors.New("lost")})
		r.want(time.Minute)

		d.Static[0].URL = "http://b:1"
		d.DNS.Refresh.Max = config.Duration(time.Minute)
		r.Reload(pools(d))
		r.want(time.Hour, "q: 10.0.0.1:80 b:1 f:1")

		d.DNS = config.DNS{}
		r.Reload(pools(d))
		r.want(0, "q: b:1 f:1")
	})
}

// A pool that moves from one source to another is not empty in between.
func TestEndpointsStayUntilANewSourceHasReported(t *testing.T) {
	run(t, func(r *rig) {
		r.Reload(pools(list("http://10.0.0.1:80", "http://10.0.0.2:80")))
		r.want(0, "q: 10.0.0.1:80 10.0.0.2:80")
		r.answer("e", answer{err: errors.New("lost")})
		r.Reload(pools(config.Discovery{DNS: named("e")}))
		r.want(4 * time.Second)
		r.answer("e", answer{at: at("10.0.0.1:80"), ttl: time.Second})
		r.want(time.Minute, "q: 10.0.0.1:80")
	})
}

func TestEndpointsDontStayForASourceThatNeverReports(t *testing.T) {
	run(t, func(r *rig) {
		r.Reload(pools(list("http://a:1", "http://b:1")))
		r.want(0, "q: a:1 b:1")
		d := list("http://b:1")
		d.DNS = named("hung")
		r.Reload(pools(d))
		r.want(holdTime - 1)
		r.want(1, "q: b:1")
	})
}

// EPT-1 with a real server: an endpoint that its name no longer has is gone
// within the refresh, servers that fail keep the rest, and a name that is denied
// three times has none.
func TestNameIsFollowed(t *testing.T) {
	z := newZone(t)
	updates := make(chan string)
	d := New(Config{Resolver: z.conf(), Update: func(pool string, list []inference.Endpoint) { updates <- show(pool, list) }})
	c := named("e.test")
	c.Refresh = config.Refresh{Min: config.Duration(time.Millisecond), Max: config.Duration(5 * time.Millisecond)}
	want := func(text string) {
		t.Helper()
		select {
		case got := <-updates:
			if got != text {
				t.Errorf("got %s, want %s", got, text)
			}
		case <-time.After(time.Minute):
			t.Fatalf("nothing; want %s", text)
		}
	}
	// answered waits for more questions, so that their answers could count.
	answered := func() {
		for next := z.asked.Load() + 40; z.asked.Load() < next; {
			select {
			case got := <-updates:
				t.Errorf("got %s", got)
			case <-time.After(time.Millisecond):
			}
		}
	}
	z.set(t, "e.test.", "e.test. 1 A 10.0.0.2", "e.test. 1 AAAA 2001:db8::7", "e.test. 1 A 10.0.0.1")
	d.Reload(pools(config.Discovery{DNS: c}))
	want("q: 10.0.0.1:8000 10.0.0.2:8000 [2001:db8::7]:8000")
	z.set(t, "e.test.", "e.test. 1 AAAA 2001:db8::7", "e.test. 1 A 10.0.0.1", "e.test. 1 A 10.0.0.2")
	answered()
	z.set(t, "e.test.", "e.test. 1 AAAA 2001:db8::7", "e.test. 1 A 10.0.0.1")
	want("q: 10.0.0.1:8000 [2001:db8::7]:8000")
	z.fail("e.test.", dns.RcodeServerFailure, dns.TypeA, dns.TypeAAAA)
	z.set(t, "e.test.")
	answered()
	z.fail("e.test.", 0, dns.TypeA, dns.TypeAAAA)
	want("q:")
	z.set(t, "e.test.", "e.test. 1 A 10.0.0.3")
	want("q: 10.0.0.3:8000")
	d.Close()
}
