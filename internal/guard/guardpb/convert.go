// SPDX-License-Identifier: Apache-2.0

// Package guardpb is the control stream between a gateway and a guard on the
// wire: guard.proto, what is generated from it, and the way to and from the
// words of internal/lease.
//
// It owns the check that what came is well-formed, so that neither side has to
// doubt it again, and decides nothing about what it means. internal/guard serves
// the stream and internal/control is its client.
package guardpb

import (
	"errors"
	"fmt"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/lease"
)

// Batch is how many grants, revokes, ends or listed attempts go in one message:
// a few hundred KB, well below what gRPC takes.
const Batch = 512

// nameMax bounds every name on the wire: request and gateway ids, guard ids.
const nameMax = 256

// FromGateway converts.
func FromGateway(g lease.Gateway) *Gateway {
	return &Gateway{Id: g.ID, Generation: g.Generation}
}

// Lease converts back.
func (g *Gateway) Lease() (lease.Gateway, error) {
	if err := named("gateway", g.GetId()); err != nil {
		return lease.Gateway{}, err
	}
	return lease.Gateway{ID: g.GetId(), Generation: g.GetGeneration()}, nil
}

// FromIncarnation converts.
func FromIncarnation(i lease.Incarnation) *Incarnation {
	return &Incarnation{Guard: i.Guard, Start: int64(i.Start), Boot: i.Boot}
}

// Lease converts back.
func (i *Incarnation) Lease() (lease.Incarnation, error) {
	if err := errors.Join(named("guard", i.GetGuard()), named("boot", i.GetBoot())); err != nil {
		return lease.Incarnation{}, err
	}
	if i.GetStart() < 0 {
		return lease.Incarnation{}, errors.New("an incarnation that started before its clock")
	}
	return lease.Incarnation{Guard: i.GetGuard(), Start: lease.Boottime(i.GetStart()), Boot: i.GetBoot()}, nil
}

// FromKey converts.
func FromKey(k lease.Key) *Key { return &Key{Request: string(k.Request), N: int64(k.N)} }

// Lease converts back.
func (k *Key) Lease() (lease.Key, error) {
	if err := named("request", k.GetRequest()); err != nil {
		return lease.Key{}, err
	}
	if n := k.GetN(); n < 1 || n > 1<<31-1 {
		return lease.Key{}, fmt.Errorf("attempt %d of %s: attempts count from 1", n, k.GetRequest())
	}
	return lease.Key{Request: inference.RequestID(k.GetRequest()), N: int(k.GetN())}, nil
}

// FromGrant converts.
func FromGrant(g lease.Grant) *Grant {
	return &Grant{Key: FromKey(g.Key), Guard: FromIncarnation(g.Guard), NotAfter: int64(g.NotAfter), Gateway: FromGateway(g.Gateway)}
}

// Lease converts back.
func (g *Grant) Lease() (lease.Grant, error) {
	key, err1 := g.GetKey().Lease()
	guard, err2 := g.GetGuard().Lease()
	gateway, err3 := g.GetGateway().Lease()
	if err := errors.Join(err1, err2, err3); err != nil {
		return lease.Grant{}, fmt.Errorf("grant: %w", err)
	}
	return lease.Grant{Key: key, Guard: guard, NotAfter: lease.Boottime(g.GetNotAfter()), Gateway: gateway}, nil
}

// FromRevoke converts.
func FromRevoke(v lease.Revoke) *Revoke {
	return &Revoke{Key: FromKey(v.Key), Guard: FromIncarnation(v.Guard), NotAfter: int64(v.NotAfter), Gateway: FromGateway(v.Gateway)}
}

// Lease converts back.
func (v *Revoke) Lease() (lease.Revoke, error) {
	key, err1 := v.GetKey().Lease()
	guard, err2 := v.GetGuard().Lease()
	gateway, err3 := v.GetGateway().Lease()
	if err := errors.Join(err1, err2, err3); err != nil {
		return lease.Revoke{}, fmt.Errorf("revoke: %w", err)
	}
	return lease.Revoke{Key: key, Guard: guard, NotAfter: lease.Boottime(v.GetNotAfter()), Gateway: gateway}, nil
}

// FromHeartbeat converts.
func FromHeartbeat(hb lease.Heartbeat) *Heartbeat {
	return &Heartbeat{Now: int64(hb.G), Guard: FromIncarnation(hb.Guard), Alone: hb.Alone}
}

// Lease converts back.
func (h *Heartbeat) Lease() (lease.Heartbeat, error) {
	guard, err := h.GetGuard().Lease()
	if err != nil {
		return lease.Heartbeat{}, fmt.Errorf("heartbeat: %w", err)
	}
	return lease.Heartbeat{G: lease.Boottime(h.GetNow()), Guard: guard, Alone: h.GetAlone()}, nil
}

// FromEnd converts.
func FromEnd(e lease.End) *End {
	return &End{
		Key: FromKey(e.Key), Gateway: e.Gateway, Guard: FromIncarnation(e.Guard), Reason: Reason(e.Reason),
		PublishedBytes: e.Published, EngineStopped: Stopped(e.Engine),
	}
}

// Lease converts back. A reason that is not known here is an error: it may be
// no proof.
func (e *End) Lease() (lease.End, error) {
	key, err1 := e.GetKey().Lease()
	guard, err2 := e.GetGuard().Lease()
	err3 := error(nil)
	if r := e.GetReason(); r < Reason(lease.Revoked) || r > Reason(lease.EngineExited) {
		err3 = fmt.Errorf("unknown reason %d", r)
	}
	if err := errors.Join(err1, err2, err3); err != nil {
		return lease.End{}, fmt.Errorf("end: %w", err)
	}
	stopped := lease.StoppedUnknown
	if s := e.GetEngineStopped(); s == Stopped_STOPPED_YES || s == Stopped_STOPPED_NO {
		stopped = lease.Stopped(s)
	}
	return lease.End{
		Key: key, Gateway: e.GetGateway(), Guard: guard, Reason: lease.Reason(e.GetReason()),
		Published: e.GetPublishedBytes(), Engine: stopped,
	}, nil
}

// FromListed converts.
func FromListed(l lease.Listed) *Listed {
	p := &Listed{Key: FromKey(l.Key), Active: l.Active}
	if !l.Active {
		p.End = FromEnd(l.End)
	}
	return p
}

// Lease converts back.
func (l *Listed) Lease() (lease.Listed, error) {
	key, err := l.GetKey().Lease()
	if err != nil {
		return lease.Listed{}, fmt.Errorf("listed attempt: %w", err)
	}
	if l.GetActive() {
		return lease.Listed{Key: key, Active: true}, nil
	}
	end, err := l.GetEnd().Lease()
	if err == nil && end.Key != key {
		err = fmt.Errorf("the end of %s is listed under %s", end.Key, key)
	}
	return lease.Listed{Key: key, End: end}, err
}

func named(what, name string) error {
	if name == "" || len(name) > nameMax {
		return fmt.Errorf("%s: a name of %d bytes", what, len(name))
	}
	return nil
}
