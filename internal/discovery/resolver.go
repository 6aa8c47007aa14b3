// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/headgate/headgate/internal/config"
)

const (
	lookMax  = 20 * time.Second // one look-up, with all its questions
	askMax   = 16               // questions at a time
	udpBytes = 1232             // no fragments: DNS flag day 2020
)

// resolver looks up what one name stands for. Unlike the standard library's it
// knows how long an answer holds, and tells apart a name that is gone from a
// question that was not answered. It is used by one goroutine.
type resolver struct {
	config.DNS
	servers func() (*dns.ClientConfig, error)

	good  atomic.Uint32 // the server that answered last
	known map[question]records
}

type question struct {
	name string // ends with a dot
	kind uint16
}

// records are the answer to one question.
type records struct {
	of    []dns.RR // those asked for
	extra []dns.RR // the additional section
	ttl   time.Duration
	err   error // it was not answered
}

// A lookup is one look at the name.
type lookup struct {
	*resolver
	conf *dns.ClientConfig
	seen map[question]records
}

// look looks the name up once.
func (r *resolver) look(ctx context.Context) answer {
	conf, err := r.servers()
	if err == nil && len(conf.Servers) == 0 {
		err = errors.New("there is no DNS server to ask")
	}
	if err != nil {
		return answer{err: err}
	}
	ctx, cancel := context.WithTimeout(ctx, lookMax)
	defer cancel()
	l := &lookup{resolver: r, conf: conf, seen: map[question]records{}}
	a := l.search(ctx)
	if ctx.Err() == nil {
		r.known = l.seen
	}
	slices.SortFunc(a.at, netip.AddrPort.Compare)
	a.at = slices.Compact(a.at)
	if len(a.at) > config.EndpointsMax {
		return answer{err: fmt.Errorf("DNS has more than %d addresses for %s", config.EndpointsMax, r.Name)}
	}
	return a
}

// search tries the names that the search list makes of the name. It ends at the
// first that stands for something, or may: after a question that was not
// answered the next name might be of somebody else's engines.
func (l *lookup) search(ctx context.Context) answer {
	least := answer{ttl: time.Duration(l.Refresh.Max)}
	for _, name := range l.conf.NameList(l.Name) {
		var a answer
		if l.Type == config.DNSServices {
			a = l.services(ctx, name)
		} else {
			a = l.addresses(ctx, name, uint16(l.Port))
		}
		if len(a.at) > 0 || a.err != nil {
			return a
		}
		least.ttl = min(least.ttl, a.ttl)
	}
	return least
}

// services looks up the SRV records of a name and the addresses of their
// targets.
func (l *lookup) services(ctx context.Context, name string) answer {
	rs := l.ask(ctx, question{name, dns.TypeSRV})[0]
	a := answer{ttl: rs.ttl, err: rs.err}
	if len(rs.of) > config.EndpointsMax {
		a.err = fmt.Errorf("DNS has more than %d targets for %s", config.EndpointsMax, name)
		return a
	}
	l.prime(rs.extra)
	var questions []question
	for _, rr := range rs.of {
		if target := strings.ToLower(rr.(*dns.SRV).Target); target != "." {
			questions = append(questions, question{target, dns.TypeA}, question{target, dns.TypeAAAA})
		}
	}
	slices.SortFunc(questions, func(p, q question) int {
		return strings.Compare(fmt.Sprint(p.name, p.kind), fmt.Sprint(q.name, q.kind))
	})
	l.ask(ctx, slices.Compact(questions)...)
	for _, rr := range rs.of {
		srv := rr.(*dns.SRV)
		if srv.Target == "." {
			continue // RFC 2782: the service is decidedly not there
		}
		b := l.addresses(ctx, strings.ToLower(srv.Target), srv.Port)
		a.at = append(a.at, b.at...)
		a.ttl = min(a.ttl, b.ttl)
		if a.err == nil {
			a.err = b.err
		}
	}
	return a
}

// prime takes the addresses of targets that came with the SRV records. A server
// leaves out what has no room, but no part of a set (RFC 2181 §5).
func (l *lookup) prime(extra []dns.RR) {
	came := map[question]records{}
	for _, rr := range extra {
		h := rr.Header()
		if h.Rrtype != dns.TypeA && h.Rrtype != dns.TypeAAAA {
			continue
		}
		q, ttl := question{strings.ToLower(h.Name), h.Rrtype}, time.Duration(h.Ttl)*time.Second
		rs := came[q]
		if len(rs.of) == 0 {
			rs.ttl = ttl
		}
		rs.of, rs.ttl = append(rs.of, rr), min(rs.ttl, ttl)
		came[q] = rs
	}
	maps.Copy(l.seen, came)
}

// addresses looks up the addresses of a name.
func (l *lookup) addresses(ctx context.Context, name string, port uint16) answer {
	both := l.ask(ctx, question{name, dns.TypeA}, question{name, dns.TypeAAAA})
	a := answer{ttl: min(both[0].ttl, both[1].ttl)}
	switch {
	// A family that is not there does not set the pace: many servers don't say
	// how long that holds.
	case len(both[0].of) == 0 && len(both[1].of) > 0:
		a.ttl = both[1].ttl
	case len(both[1].of) == 0 && len(both[0].of) > 0:
		a.ttl = both[0].ttl
	}
	for _, rs := range both {
		if a.err == nil {
			a.err = rs.err
		}
		for _, rr := range rs.of {
			var ip netip.Addr
			switch rr := rr.(type) {
			case *dns.A:
				ip, _ = netip.AddrFromSlice(rr.A)
			case *dns.AAAA:
				ip, _ = netip.AddrFromSlice(rr.AAAA)
			}
			if ip, ok := usable(ip); ok {
				a.at = append(a.at, netip.AddrPortFrom(ip, port))
			} else if a.err == nil {
				a.err = fmt.Errorf("%w: %s", errUnusable, name)
			}
		}
	}
	return a
}

// ask asks questions, each once in a look-up and some at a time. What was known
// stands in for what is not answered.
func (l *lookup) ask(ctx context.Context, questions ...question) []records {
	out := make([]records, len(questions))
	var asking sync.WaitGroup
	slots := make(chan struct{}, askMax)
	for i, q := range questions {
		if rs, seen := l.seen[q]; seen {
			out[i] = rs
			continue
		}
		slots <- struct{}{}
		asking.Go(func() {
			defer func() { <-slots }()
			if out[i] = l.one(ctx, q); out[i].err != nil {
				old := l.known[q]
				out[i].of, out[i].extra = old.of, old.extra
			}
		})
	}
	asking.Wait()
	for i, q := range questions {
		l.seen[q] = out[i]
	}
	return out
}

// one asks the servers in turn, beginning with the one that answered last.
func (l *lookup) one(ctx context.Context, q question) (rs records) {
	servers := l.conf.Servers
	begin := int(l.good.Load())
	for range max(1, l.conf.Attempts) {
		for i := range servers {
			n := (begin + i) % len(servers)
			m, err := l.exchange(ctx, servers[n], q)
			if err == nil {
				l.good.Store(uint32(n))
				return read(m, q)
			}
			rs.err = fmt.Errorf("ask %s about %s: %w", servers[n], q.name, err)
			if ctx.Err() != nil {
				return rs
			}
		}
	}
	return rs
}

// exchange asks one server, by UDP, and by TCP where the answer is too large
// for that.
func (l *lookup) exchange(ctx context.Context, server string, q question) (*dns.Msg, error) {
	m := new(dns.Msg).SetQuestion(q.name, q.kind).SetEdns0(udpBytes, false)
	at := net.JoinHostPort(server, l.conf.Port)
	res, err := l.send(ctx, "udp", at, m)
	if err == nil && (res.Rcode == dns.RcodeFormatError || res.Rcode == dns.RcodeNotImplemented) {
		m.Extra = nil // a server from before EDNS
		res, err = l.send(ctx, "udp", at, m)
	}
	if err == nil && res.Truncated {
		res, err = l.send(ctx, "tcp", at, m)
	}
	switch {
	case err != nil:
		return nil, err
	case len(res.Question) != 1 || !strings.EqualFold(res.Question[0].Name, q.name) || res.Question[0].Qtype != q.kind:
		return nil, errors.New("the answer is to another question")
	case res.Rcode != dns.RcodeSuccess && res.Rcode != dns.RcodeNameError:
		return nil, errors.New("it answers " + dns.RcodeToString[res.Rcode])
	case res.Rcode == dns.RcodeSuccess && !res.Authoritative && !res.RecursionAvailable && len(read(res, q).of) == 0:
		return nil, errors.New("it knows nothing and asks nobody")
	}
	return res, nil
}

func (l *lookup) send(ctx context.Context, network, at string, m *dns.Msg) (*dns.Msg, error) {
	c := &dns.Client{Net: network, Timeout: time.Duration(max(1, l.conf.Timeout)) * time.Second}
	conn, err := c.DialContext(ctx, at)
	if err != nil {
		return nil, plain(err)
	}
	defer conn.Close()
	// The client looks at ctx's deadline only.
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	res, _, err := c.ExchangeWithConnContext(ctx, m, conn)
	return res, plain(err)
}

// plain is an error without the port of this side, which would make each one
// look new.
func plain(err error) error {
	var op *net.OpError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &op) && op.Timeout():
		return errors.New("no answer in time")
	case op != nil:
		return op.Err
	}
	return err
}

// read takes the records that were asked for out of an answer.
func read(m *dns.Msg, q question) records {
	rs := records{extra: m.Extra}
	ttl := uint32(1<<31 - 1)
	if m.Rcode == dns.RcodeSuccess {
		for _, rr := range m.Answer {
			ttl = min(ttl, rr.Header().Ttl) // aliases on the way included
			if rr.Header().Rrtype == q.kind {
				rs.of = append(rs.of, rr)
			}
		}
	}
	if len(rs.of) == 0 {
		// RFC 2308 §5: how long an answer that there is nothing holds.
		ttl = 0
		for _, rr := range m.Ns {
			if soa, ok := rr.(*dns.SOA); ok {
				ttl = min(soa.Hdr.Ttl, soa.Minttl)
			}
		}
	}
	rs.ttl = time.Duration(ttl) * time.Second
	return rs
}
