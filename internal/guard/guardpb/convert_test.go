// SPDX-License-Identifier: Apache-2.0

package guardpb

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/headgate/headgate/internal/lease"
)

var (
	incarnation = lease.Incarnation{Guard: "node-7/gpu-0", Start: 1 << 60, Boot: "8f1c"}
	gateway     = lease.Gateway{ID: "gw-1", Generation: 1 << 63}
	key         = lease.Key{Request: "req_01J", N: 2}
)

// wire sends a message through its encoding.
func wire[T proto.Message](t *testing.T, m, into T) T {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := proto.Unmarshal(data, into); err != nil {
		t.Fatal(err)
	}
	return into
}

func same[T any](t *testing.T, want, got T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("not what was sent (-want +got):\n%s", diff)
	}
}

func TestWireKeepsEverything(t *testing.T) {
	grant := lease.Grant{Key: key, Guard: incarnation, NotAfter: 12345, Gateway: gateway}
	g, err := wire(t, FromGrant(grant), &Grant{}).Lease()
	same(t, grant, g, err)

	revoke := lease.Revoke{Key: key, Guard: incarnation, Gateway: gateway}
	v, err := wire(t, FromRevoke(revoke), &Revoke{}).Lease()
	same(t, revoke, v, err)

	heartbeat := lease.Heartbeat{G: 77, Guard: incarnation, Alone: true}
	h, err := wire(t, FromHeartbeat(heartbeat), &Heartbeat{}).Lease()
	same(t, heartbeat, h, err)

	for reason := lease.Revoked; reason <= lease.EngineExited; reason++ {
		end := lease.End{Key: key, Gateway: "gw-1", Guard: incarnation, Reason: reason, Published: 9, Engine: lease.StoppedNo}
		e, err := wire(t, FromEnd(end), &End{}).Lease()
		same(t, end, e, err)
		if name := FromEnd(end).GetReason().String(); name != "REASON_"+strings.ToUpper(reason.String()) {
			t.Errorf("reason %s is %s on the wire", reason, name)
		}
		listed := lease.Listed{Key: key, End: end}
		l, err := wire(t, FromListed(listed), &Listed{}).Lease()
		same(t, listed, l, err)
	}
	active := lease.Listed{Key: key, Active: true}
	l, err := wire(t, FromListed(active), &Listed{}).Lease()
	same(t, active, l, err)
}

// What is not well-formed is no lease, no proof and no order.
func TestMalformedIsRefused(t *testing.T) {
	inc, gw := FromIncarnation(incarnation), FromGateway(gateway)
	for name, parse := range map[string]func() error{
		"grant of nothing":     func() error { _, err := (&Grant{}).Lease(); return err },
		"attempt 0":            func() error { _, err := (&Key{Request: "r"}).Lease(); return err },
		"attempt -1":           func() error { _, err := (&Key{Request: "r", N: -1}).Lease(); return err },
		"attempt past int32":   func() error { _, err := (&Key{Request: "r", N: 1 << 40}).Lease(); return err },
		"long name":            func() error { _, err := (&Key{Request: strings.Repeat("r", nameMax+1), N: 1}).Lease(); return err },
		"nameless gateway":     func() error { _, err := (&Gateway{}).Lease(); return err },
		"guard without a boot": func() error { _, err := (&Incarnation{Guard: "g"}).Lease(); return err },
		"start below zero":     func() error { _, err := (&Incarnation{Guard: "g", Boot: "b", Start: -1}).Lease(); return err },
		"heartbeat of nobody":  func() error { _, err := (&Heartbeat{Now: 1}).Lease(); return err },
		"revoke without guard": func() error { _, err := (&Revoke{Key: FromKey(key), Gateway: gw}).Lease(); return err },
		"unknown reason":       func() error { _, err := (&End{Key: FromKey(key), Guard: inc, Reason: 99}).Lease(); return err },
		"no reason":            func() error { _, err := (&End{Key: FromKey(key), Guard: inc}).Lease(); return err },
		"ended without an end": func() error { _, err := (&Listed{Key: FromKey(key)}).Lease(); return err },
		"end of another": func() error {
			end := FromEnd(lease.End{Key: lease.Key{Request: "other", N: 1}, Guard: incarnation, Reason: lease.Revoked})
			_, err := (&Listed{Key: FromKey(key), End: end}).Lease()
			return err
		},
	} {
		if parse() == nil {
			t.Errorf("%s was taken", name)
		}
	}
}
