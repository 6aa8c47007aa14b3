// SPDX-License-Identifier: Apache-2.0

//go:build !mutate

package mutation

// The rules, all in force. list.txt says what each is about.
const (
	NoEpoch               = false
	EqualEpoch            = false
	NoTombstone           = false
	ForgetEarly           = false
	RelativeTTL           = false
	CheckOnce             = false
	PastAccepted          = false
	Revive                = false
	AckBeforeStop         = false
	RevokeUnlocked        = false
	MonotonicClock        = false
	LateUncounted         = false
	NoIncarnation         = false
	NewestGOldT           = false
	TBeforeReceive        = false
	Extrapolate           = false
	NoMargin              = false
	NoHeartbeat           = false
	ExpiryForgets         = false
	RenewWhileFencing     = false
	UnorderedIncarnation  = false
	OldSession            = false
	NoEngineLock          = false
	AbsenceIsProof        = false
	CloseIsDeath          = false
	UnackedRevoke         = false
	AnyAck                = false
	DuplicateIsNotStarted = false
	RestartNaive          = false
	RestartNoMargin       = false
	ResendRenewed         = false
	NoGate                = false
	NoRecheck             = false
	BitAfterWrite         = false
	SlotEarly             = false
)
