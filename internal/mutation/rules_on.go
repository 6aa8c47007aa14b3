// SPDX-License-Identifier: Apache-2.0

//go:build mutate

package mutation

import (
	_ "embed"
	"fmt"
	"strings"
)

// The rules; true takes one away. list.txt says what each is about.
var (
	NoEpoch               bool
	EqualEpoch            bool
	NoTombstone           bool
	ForgetEarly           bool
	RelativeTTL           bool
	CheckOnce             bool
	PastAccepted          bool
	Revive                bool
	AckBeforeStop         bool
	RevokeUnlocked        bool
	MonotonicClock        bool
	LateUncounted         bool
	NoIncarnation         bool
	NewestGOldT           bool
	TBeforeReceive        bool
	Extrapolate           bool
	NoMargin              bool
	NoHeartbeat           bool
	ExpiryForgets         bool
	RenewWhileFencing     bool
	UnorderedIncarnation  bool
	OldSession            bool
	NoEngineLock          bool
	AbsenceIsProof        bool
	CloseIsDeath          bool
	UnackedRevoke         bool
	AnyAck                bool
	DuplicateIsNotStarted bool
	RestartNaive          bool
	RestartNoMargin       bool
	ResendRenewed         bool
	NoGate                bool
	NoRecheck             bool
	BitAfterWrite         bool
	SlotEarly             bool
)

var switches = map[string]*bool{
	"no_epoch":                 &NoEpoch,
	"equal_epoch":              &EqualEpoch,
	"no_tombstone":             &NoTombstone,
	"forget_early":             &ForgetEarly,
	"relative_ttl":             &RelativeTTL,
	"check_once":               &CheckOnce,
	"past_accepted":            &PastAccepted,
	"revive":                   &Revive,
	"ack_before_stop":          &AckBeforeStop,
	"revoke_unlocked":          &RevokeUnlocked,
	"monotonic_clock":          &MonotonicClock,
	"late_uncounted":           &LateUncounted,
	"no_incarnation":           &NoIncarnation,
	"newest_g_old_t":           &NewestGOldT,
	"t_before_receive":         &TBeforeReceive,
	"extrapolate":              &Extrapolate,
	"no_margin":                &NoMargin,
	"no_heartbeat":             &NoHeartbeat,
	"expiry_forgets":           &ExpiryForgets,
	"renew_while_fencing":      &RenewWhileFencing,
	"unordered_incarnation":    &UnorderedIncarnation,
	"old_session":              &OldSession,
	"no_engine_lock":           &NoEngineLock,
	"absence_is_proof":         &AbsenceIsProof,
	"close_is_death":           &CloseIsDeath,
	"unacked_revoke":           &UnackedRevoke,
	"any_ack":                  &AnyAck,
	"duplicate_is_not_started": &DuplicateIsNotStarted,
	"restart_naive":            &RestartNaive,
	"restart_no_margin":        &RestartNoMargin,
	"resend_renewed":           &ResendRenewed,
	"no_gate":                  &NoGate,
	"no_recheck":               &NoRecheck,
	"bit_after_write":          &BitAfterWrite,
	"slot_early":               &SlotEarly,
}

//go:embed list.txt
var list string

// A Rule is one line of list.txt.
type Rule struct {
	Name  string
	Means string
	With  string // the rule that stands behind it, "" for none
}

// Rules lists them, in order.
func Rules() []Rule {
	var all []Rule
	for line := range strings.Lines(list) {
		name, means, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "" || name == "#" {
			continue
		}
		means, with, _ := strings.Cut(strings.TrimSpace(means), ". alone: ")
		all = append(all, Rule{Name: name, Means: means, With: with})
	}
	return all
}

// Off takes the named rules away and puts all others in force. It must not run
// beside code that asks.
func Off(names ...string) error {
	for _, s := range switches {
		*s = false
	}
	for _, name := range names {
		if switches[name] == nil {
			return fmt.Errorf("no rule %q", name)
		}
		*switches[name] = true
	}
	return nil
}
