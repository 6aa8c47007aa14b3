// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	"go.uber.org/goleak"

	"github.com/headgate/headgate/internal/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A zone is what a DNS server on loopback, on UDP and TCP, answers. A name that
// it doesn't have is NXDOMAIN, a type that the name doesn't have is no data.
type zone struct {
	port  string
	asked atomic.Int64
	tcp   atomic.Int64

	mu      sync.Mutex
	records map[string][]dns.RR
	rcode   map[question]int // instead of an answer; -1: never answered
	extra   []dns.RR
}

func newZone(t *testing.T) *zone {
	t.Helper()
	z := &zone{records: map[string][]dns.RR{}, rcode: map[question]int{}}
	var packets net.PacketConn
	var stream net.Listener
	for range 100 {
		var err error
		if packets, err = net.ListenPacket("udp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if stream, err = net.Listen("tcp", packets.LocalAddr().String()); err == nil {
			break // the port was free for both
		}
		packets.Close()
	}
	_, z.port, _ = net.SplitHostPort(packets.LocalAddr().String())
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait) // the last one to run
	for _, s := range []*dns.Server{
		{PacketConn: packets, Handler: dns.HandlerFunc(z.serve)},
		{Listener: stream, Handler: dns.HandlerFunc(z.serve)},
	} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		serving.Go(func() { _ = s.ActivateAndServe() })
		<-started
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return z
}

func (z *zone) serve(w dns.ResponseWriter, m *dns.Msg) {
	z.asked.Add(1)
	stream := w.LocalAddr().Network() == "tcp"
	if stream {
		z.tcp.Add(1)
	}
	q := m.Question[0]
	res := new(dns.Msg).SetReply(m)
	res.RecursionAvailable, res.Compress = true, true
	z.mu.Lock()
	records, exists := z.records[q.Name]
	rcode := z.rcode[question{q.Name, q.Qtype}]
	if q.Qtype == dns.TypeSRV {
		res.Extra = slices.Clone(z.extra)
	}
	z.mu.Unlock()
	soa := &dns.SOA{Hdr: dns.RR_Header{Name: "test.", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 900}, Ns: "ns.test.", Mbox: "a.test.", Minttl: 7}
	for _, rr := range records {
		if rr.Header().Rrtype == q.Qtype || rr.Header().Rrtype == dns.TypeCNAME {
			res.Answer = append(res.Answer, rr)
		}
	}
	switch {
	case rcode < 0:
		return
	case rcode > 0:
		res.Rcode, res.Answer = rcode, nil
	case !exists:
		res.Rcode, res.Ns = dns.RcodeNameError, []dns.RR{soa}
	case len(res.Answer) == 0:
		res.Ns = []dns.RR{soa}
	}
	if opt := m.IsEdns0(); !stream && opt != nil {
		res.Truncate(int(opt.UDPSize()))
	}
	_ = w.WriteMsg(res)
}

// set replaces the records of a name; none: it does not exist.
func (z *zone) set(t *testing.T, name string, records ...string) {
	t.Helper()
	var rrs []dns.RR
	for _, text := range records {
		rrs = append(rrs, rr(t, text))
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if len(records) == 0 {
		delete(z.records, name)
		return
	}
	z.records[name] = rrs
}

// fail has questions of these kinds fail: 0 answers them again, -1 never does.
func (z *zone) fail(name string, rcode int, kinds ...uint16) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for _, kind := range kinds {
		z.rcode[question{name, kind}] = rcode
	}
}

func rr(t *testing.T, text string) dns.RR {
	t.Helper()
	rr, err := dns.NewRR(text)
	if err != nil {
		t.Fatal(err)
	}
	return rr
}

// conf is a resolv.conf that names the zone's server.
func (z *zone) conf(search ...string) func() (*dns.ClientConfig, error) {
	return func() (*dns.ClientConfig, error) {
		return &dns.ClientConfig{Servers: []string{"127.0.0.1"}, Port: z.port, Search: search, Ndots: 1, Timeout: 1, Attempts: 1}, nil
	}
}

func named(name string) config.DNS {
	return config.DNS{Name: name, Port: 8000, Type: config.DNSAddresses, Scheme: "http",
		Refresh: config.Refresh{Min: config.Duration(time.Second), Max: config.Duration(30 * time.Second)}}
}

func services(name string) config.DNS {
	c := named(name)
	c.Port, c.Type = 0, config.DNSServices
	return c
}

// check compares an answer with what it should hold, sorted.
func check(t *testing.T, a answer, ttl time.Duration, at ...string) {
	t.Helper()
	var got []string
	for _, at := range a.at {
		got = append(got, at.String())
	}
	if diff := cmp.Diff(at, got); diff != "" || a.err != nil || a.ttl != ttl {
		t.Errorf("error %v, ttl %v, want %v (-want +got):\n%s", a.err, a.ttl, ttl, diff)
	}
}

func TestAddressesOfBothFamiliesAreOneList(t *testing.T) {
	z := newZone(t)
	z.set(t, "e.test.", "e.test. 20 A 10.0.0.2", "e.test. 9 A 10.0.0.1", "e.test. 20 A 10.0.0.2",
		"e.test. 30 AAAA 2001:db8::0:7", "e.test. 30 AAAA ::ffff:10.0.0.1")
	r := &resolver{DNS: named("e.test"), servers: z.conf()}
	check(t, r.look(t.Context()), 9*time.Second, "10.0.0.1:8000", "10.0.0.2:8000", "[2001:db8::7]:8000")
	z.set(t, "alias.test.", "alias.test. 5 CNAME e.test.", "e.test. 20 A 10.0.0.2")
	r = &resolver{DNS: named("alias.test."), servers: z.conf()}
	check(t, r.look(t.Context()), 5*time.Second, "10.0.0.2:8000")
}

func TestAnswersThatThereIsNothing(t *testing.T) {
	z := newZone(t)
	r := &resolver{DNS: named("e.test"), servers: z.conf()}
	check(t, r.look(t.Context()), 7*time.Second) // NXDOMAIN, for as long as the zone says
	z.set(t, "e.test.", "e.test. 9 TXT x")
	check(t, r.look(t.Context()), 7*time.Second) // no data
}

func TestLargeAnswersComeByTCP(t *testing.T) {
	z := newZone(t)
	var records []string
	for i := range 3000 {
		records = append(records, fmt.Sprintf("e.test. 9 A 10.1.%d.%d", i/250, i%250))
	}
	z.set(t, "e.test.", records...)
	r := &resolver{DNS: named("e.test"), servers: z.conf()}
	if a := r.look(t.Context()); a.err != nil || len(a.at) != 3000 || z.tcp.Load() != 1 {
		t.Errorf("%d addresses, %v, %d questions by TCP", len(a.at), a.err, z.tcp.Load())
	}
	for i := range 2000 {
		records = append(records, fmt.Sprintf("e.test. 9 AAAA 2001:db8::%x", i+1))
	}
	z.set(t, "e.test.", records...)
	if a := r.look(t.Context()); len(a.at) != 0 || a.err == nil || a.err.Error() != "DNS has more than 4096 addresses for e.test" {
		t.Errorf("too many: %d, %v", len(a.at), a.err)
	}
}

func TestServersFromBeforeEDNSAreAskedWithoutIt(t *testing.T) {
	old := newZone(t)
	old.set(t, "e.test.", "e.test. 9 A 10.0.0.1")
	packets, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan struct{})
	s := &dns.Server{PacketConn: packets, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, m *dns.Msg) {
		if m.IsEdns0() != nil {
			_ = w.WriteMsg(new(dns.Msg).SetRcode(m, dns.RcodeFormatError))
			return
		}
		old.serve(w, m)
	})}
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.ActivateAndServe() })
	<-started
	defer serving.Wait()
	defer s.Shutdown()
	_, old.port, _ = net.SplitHostPort(packets.LocalAddr().String())
	r := &resolver{DNS: named("e.test"), servers: old.conf()}
	check(t, r.look(t.Context()), 9*time.Second, "10.0.0.1:8000")
}

func TestSearchListIsTriedInOrder(t *testing.T) {
	z := newZone(t)
	z.set(t, "e.b.test.", "e.b.test. 9 A 10.0.0.1")
	z.set(t, "e.c.test.", "e.c.test. 9 A 10.0.0.66")
	search := z.conf("a.test", "b.test", "c.test")
	r := &resolver{DNS: named("e"), servers: search}
	check(t, r.look(t.Context()), 9*time.Second, "10.0.0.1:8000")
	r = &resolver{DNS: named("e."), servers: search}
	check(t, r.look(t.Context()), 7*time.Second)

	// What may be there and can't be asked is not passed over.
	z.fail("e.a.test.", dns.RcodeServerFailure, dns.TypeA)
	r = &resolver{DNS: named("e"), servers: search}
	if a := r.look(t.Context()); len(a.at) > 0 || a.err == nil || a.err.Error() != "ask 127.0.0.1 about e.a.test.: it answers SERVFAIL" {
		t.Errorf("got %v", a)
	}
}

func TestWhatIsNotAnsweredStaysKnown(t *testing.T) {
	z := newZone(t)
	both := []string{"e.test. 9 A 10.0.0.1", "e.test. 9 AAAA ::7"}
	z.set(t, "e.test.", both...)
	r := &resolver{DNS: named("e.test"), servers: z.conf()}
	check(t, r.look(t.Context()), 9*time.Second, "10.0.0.1:8000", "[::7]:8000")
	for _, rcode := range []int{dns.RcodeServerFailure, dns.RcodeRefused, -1} {
		z.fail("e.test.", rcode, dns.TypeAAAA)
		z.set(t, "e.test.", "e.test. 9 A 10.0.0.2")
		for range 2 {
			a := r.look(t.Context())
			if fmt.Sprint(a.at) != "[10.0.0.2:8000 [::7]:8000]" || a.err == nil {
				t.Errorf("one family: %v", a)
			}
		}
	}
	z.fail("e.test.", dns.RcodeServerFailure, dns.TypeA)
	if a := r.look(t.Context()); fmt.Sprint(a.at) != "[10.0.0.2:8000 [::7]:8000]" || a.err == nil {
		t.Errorf("nothing: %v", a)
	}
}

func TestServersThatFailAreTriedLast(t *testing.T) {
	good := newZone(t)
	good.set(t, "e.test.", "e.test. 9 A 10.0.0.1")
	// Servers share the port of resolv.conf, so that they differ by address.
	silent, err := net.ListenPacket("udp", net.JoinHostPort("127.0.0.2", good.port))
	if err != nil {
		t.Skip(err)
	}
	defer silent.Close()
	conf, _ := good.conf()()
	conf.Servers = []string{"127.0.0.2", "127.0.0.1"}
	r := &resolver{DNS: named("e.test"), servers: func() (*dns.ClientConfig, error) { return conf, nil }}
	check(t, r.look(t.Context()), 9*time.Second, "10.0.0.1:8000")
	began := time.Now()
	check(t, r.look(t.Context()), 9*time.Second, "10.0.0.1:8000")
	if d := time.Since(began); d >= time.Second {
		t.Errorf("the silent server was asked first again: %v", d)
	}
}

func TestAddressesThatAreNoneAreLeftOut(t *testing.T) {
	z := newZone(t)
	z.set(t, "e.test.", "e.test. 9 A 0.0.0.0", "e.test. 9 A 224.0.0.1", "e.test. 9 AAAA ::")
	r := &resolver{DNS: named("e.test"), servers: z.conf()}
	if a := r.look(t.Context()); len(a.at) > 0 || a.err == nil {
		t.Errorf("got %v", a)
	}
}

func TestServices(t *testing.T) {
	z := newZone(t)
	z.set(t, "_http._tcp.e.test.", "_http._tcp.e.test. 20 SRV 0 0 8001 A.test.", "_http._tcp.e.test. 20 SRV 9 0 8002 b.test.",
		"_http._tcp.e.test. 20 SRV 0 5 8003 a.test.", "_http._tcp.e.test. 20 SRV 0 0 1 .")
	z.set(t, "a.test.", "a.test. 15 A 10.0.0.1")
	z.set(t, "b.test.", "b.test. 30 A 10.0.0.2", "b.test. 30 AAAA ::2")
	r := &resolver{DNS: services("_http._tcp.e"), servers: z.conf("test")}
	want := []string{"10.0.0.1:8001", "10.0.0.1:8003", "10.0.0.2:8002", "[::2]:8002"}
	check(t, r.look(t.Context()), 15*time.Second, want...)

	// A target that can't be asked keeps what it had; one that is gone has nothing.
	z.fail("b.test.", dns.RcodeServerFailure, dns.TypeA)
	z.set(t, "a.test.")
	if a := r.look(t.Context()); fmt.Sprint(a.at) != "[10.0.0.2:8002 [::2]:8002]" || a.err == nil {
		t.Errorf("got %v", a)
	}
	z.fail("_http._tcp.e.test.", dns.RcodeServerFailure, dns.TypeSRV)
	if a := r.look(t.Context()); fmt.Sprint(a.at) != "[10.0.0.2:8002 [::2]:8002]" || a.err == nil {
		t.Errorf("got %v", a)
	}
}

func TestAddressesThatComeWithServicesAreNotAskedFor(t *testing.T) {
	z := newZone(t)
	z.set(t, "s.test.", "s.test. 20 SRV 0 0 8001 a.test.", "s.test. 20 SRV 0 0 8002 b.test.")
	z.mu.Lock()
	z.extra = []dns.RR{rr(t, "a.test. 11 A 10.0.0.1"), rr(t, "a.test. 10 AAAA ::1"), rr(t, "A.test. 12 A 10.0.0.2"),
		rr(t, "b.test. 30 A 10.0.0.3"), rr(t, "b.test. 30 AAAA ::3")}
	z.mu.Unlock()
	r := &resolver{DNS: services("s.test"), servers: z.conf()}
	check(t, r.look(t.Context()), 10*time.Second, "10.0.0.1:8001", "10.0.0.2:8001", "10.0.0.3:8002", "[::1]:8001", "[::3]:8002")
	if n := z.asked.Load(); n != 1 {
		t.Errorf("%d questions", n)
	}
}

// The time that a look-up waits for an answer does not hold up the end.
func TestLookUpEndsWithItsContext(t *testing.T) {
	z := newZone(t)
	z.fail("e.test.", -1, dns.TypeA, dns.TypeAAAA)
	conf, _ := z.conf()()
	conf.Timeout = 3600
	r := &resolver{DNS: named("e.test"), servers: func() (*dns.ClientConfig, error) { return conf, nil }}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan answer)
	go func() { done <- r.look(ctx) }()
	stop()
	select {
	case a := <-done:
		if a.err == nil {
			t.Errorf("got %v", a)
		}
	case <-time.After(time.Minute):
		t.Fatal("it waits on")
	}
}

func TestNoServersIsTrouble(t *testing.T) {
	for _, servers := range []func() (*dns.ClientConfig, error){
		func() (*dns.ClientConfig, error) { return &dns.ClientConfig{}, nil },
		func() (*dns.ClientConfig, error) { return dns.ClientConfigFromFile("testdata/absent") },
	} {
		r := &resolver{DNS: named("e.test"), servers: servers}
		if a := r.look(t.Context()); a.err == nil {
			t.Errorf("got %v", a)
		}
	}
}

func at(list ...string) []netip.AddrPort {
	var out []netip.AddrPort
	for _, text := range list {
		out = append(out, netip.MustParseAddrPort(text))
	}
	return out
}

func ids(list []Found) string {
	var out []string
	for _, f := range list {
		out = append(out, string(f.ID))
	}
	return strings.Join(out, " ")
}
