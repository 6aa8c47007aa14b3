// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"time"

	"github.com/miekg/dns"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/fleet"
)

// goneAfter is how many answers in a row must say that a name stands for
// nothing: a server that restarts denies what it has not loaded yet.
const goneAfter = 3

// dnsSource finds what a name stands for, and looks again when the answer's
// time to live is over.
type dnsSource struct {
	config.DNS
	look func(context.Context) answer
}

func newDNS(c config.DNS, servers func() (*dns.ClientConfig, error)) *dnsSource {
	r := &resolver{DNS: c, servers: servers}
	return &dnsSource{DNS: c, look: r.look}
}

// An answer is what one look-up found.
type answer struct {
	at  []netip.AddrPort // sorted, each once; what was known stands in for what was not answered
	ttl time.Duration
	err error // something was not answered; without it an empty list means that there is nothing
}

func (s *dnsSource) Run(ctx context.Context, report func(Report)) {
	t := dnsTracker{DNS: s.DNS}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		a := s.look(ctx)
		if ctx.Err() != nil {
			return
		}
		r, news, wait := t.observe(a)
		if news {
			report(r)
		}
		timer.Reset(wait)
	}
}

// A dnsTracker turns answers into reports and the time until the next look-up.
type dnsTracker struct {
	config.DNS
	known   bool
	at      []netip.AddrPort
	nothing int // answers in a row that there is nothing
	failed  int // look-ups in a row that were not answered, in part or in whole
	trouble string
}

func (t *dnsTracker) observe(a answer) (r Report, news bool, wait time.Duration) {
	least, most := time.Duration(t.Refresh.Min), time.Duration(t.Refresh.Max)
	wait = min(max(a.ttl, least), most)
	r.Err = a.err
	if a.err != nil {
		// Doubling stops before it overflows.
		wait = min(least<<min(t.failed, 16), most)
		t.failed++
	} else {
		t.failed = 0
	}
	switch {
	case len(a.at) > 0:
		t.nothing = 0
		news = t.take(a.at)
	case a.err == nil:
		t.nothing++
		r.Err = fmt.Errorf("DNS has no addresses for %s", t.Name)
		news = t.nothing >= goneAfter && t.take(nil)
	}
	if news {
		r.Endpoints = t.endpoints()
	}
	trouble := ""
	if r.Err != nil {
		trouble = r.Err.Error()
	}
	news = news || trouble != t.trouble
	t.trouble = trouble
	return r, news, wait
}

// take makes at what is known and reports whether it is news.
func (t *dnsTracker) take(at []netip.AddrPort) bool {
	if t.known && slices.Equal(at, t.at) {
		return false
	}
	t.known, t.at = true, at
	return true
}

func (t *dnsTracker) endpoints() []Found {
	list := make([]Found, len(t.at))
	for i, at := range t.at {
		list[i].Endpoint = fleet.NewEndpoint(&url.URL{Scheme: t.Scheme, Host: at.String()}, "")
	}
	return list
}

// errUnusable is why addresses that no connection can be made to are left out:
// blocking resolvers answer 0.0.0.0, which is this machine.
var errUnusable = errors.New("DNS answers with an address that is none")

// usable is an address in the one form that it has here.
func usable(a netip.Addr) (netip.Addr, bool) {
	a = a.Unmap()
	return a, a.IsValid() && !a.IsUnspecified() && !a.IsMulticast()
}
