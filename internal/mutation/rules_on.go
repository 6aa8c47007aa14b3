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
	LowerEpoch            bool
	NoTombstone           bool
	ForgetEarly           bool
	RelativeTTL           bool
	GuardRoundsUp         bool
	CheckOnce             bool
	PastAccepted          bool
	Revive                bool
	AckBeforeStop         bool
	RevokeUnlocked        bool
	MonotonicClock        bool
	RecheckBeforeWrite    bool
	NoIncarnation         bool
	NoGeneration          bool
	NewestGOldT           bool
	NewestTOldG           bool
	TBeforeReceive        bool
	Extrapolate           bool
	NoMargin              bool
	NoHeartbeat           bool
	HeartbeatOfOldSession bool
	ExpiryForgets         bool
	ExpiryLastGrant       bool
	RenewWhileFencing     bool
	UnorderedIncarnation  bool
	OldSession            bool
	NoEngineLock          bool
	GuardIDIgnored        bool
	NoFence               bool
	AbsenceIsProof        bool
	CloseIsDeath          bool
	UnackedRevoke         bool
	AnyAck                bool
	DuplicateIsNotStarted bool
	RestartNaive          bool
	RestartTrustsJournal  bool
	RestartNoMargin       bool
	JournalAfterDispatch  bool
	ResendFreshLease      bool
	NoGate                bool
	NoRecheck             bool
	BitAfterWrite         bool
	SlotEarly             bool
)

var switches = map[string]*bool{
	"no_epoch":                 &NoEpoch,
	"equal_epoch":              &EqualEpoch,
	"lower_epoch":              &LowerEpoch,
	"no_tombstone":             &NoTombstone,
	"forget_early":             &ForgetEarly,
	"relative_ttl":             &RelativeTTL,
	"guard_rounds_up":          &GuardRoundsUp,
	"check_once":               &CheckOnce,
	"past_accepted":            &PastAccepted,
	"revive":                   &Revive,
	"ack_before_stop":          &AckBeforeStop,
	"revoke_unlocked":          &RevokeUnlocked,
	"monotonic_clock":          &MonotonicClock,
	"recheck_before_write":     &RecheckBeforeWrite,
	"no_incarnation":           &NoIncarnation,
	"no_generation":            &NoGeneration,
	"newest_g_old_t":           &NewestGOldT,
	"newest_t_old_g":           &NewestTOldG,
	"t_before_receive":         &TBeforeReceive,
	"extrapolate":              &Extrapolate,
	"no_margin":                &NoMargin,
	"no_heartbeat":             &NoHeartbeat,
	"heartbeat_of_old_session": &HeartbeatOfOldSession,
	"expiry_forgets":           &ExpiryForgets,
	"expiry_last_grant":        &ExpiryLastGrant,
	"renew_while_fencing":      &RenewWhileFencing,
	"unordered_incarnation":    &UnorderedIncarnation,
	"old_session":              &OldSession,
	"no_engine_lock":           &NoEngineLock,
	"guard_id_ignored":         &GuardIDIgnored,
	"no_fence":                 &NoFence,
	"absence_is_proof":         &AbsenceIsProof,
	"close_is_death":           &CloseIsDeath,
	"unacked_revoke":           &UnackedRevoke,
	"any_ack":                  &AnyAck,
	"duplicate_is_not_started": &DuplicateIsNotStarted,
	"restart_naive":            &RestartNaive,
	"restart_trusts_journal":   &RestartTrustsJournal,
	"restart_no_margin":        &RestartNoMargin,
	"journal_after_dispatch":   &JournalAfterDispatch,
	"resend_fresh_lease":       &ResendFreshLease,
	"no_gate":                  &NoGate,
	"no_recheck":               &NoRecheck,
	"bit_after_write":          &BitAfterWrite,
	"slot_early":               &SlotEarly,
}

//go:embed list.txt
var list string

// A Rule is one line of list.txt.
type Rule struct {
	Name     string
	Means    string
	Harmless string   // why nothing breaks without it, "" if something must
	Off      []string // what is taken away: the rule itself, or others
}

// Rules lists them, in order.
func Rules() []Rule {
	var all []Rule
	for line := range strings.Lines(list) {
		name, means, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "" || name == "#" {
			continue
		}
		r := Rule{Name: name, Off: []string{name}}
		var both string
		means, r.Harmless, _ = strings.Cut(strings.TrimSpace(means), ". harmless: ")
		r.Means, both, _ = strings.Cut(means, ". both: ")
		if both != "" {
			r.Off = strings.Fields(both)
		}
		all = append(all, r)
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
