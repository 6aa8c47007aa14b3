// SPDX-License-Identifier: Apache-2.0

//go:build !mutate

package mutation

// The rules, all in force. list.txt says what each is about.
const (
	NoEpoch               = false
	EqualEpoch            = false
	LowerEpoch            = false
	NoTombstone           = false
	ForgetEarly           = false
	RelativeTTL           = false
	GuardRoundsUp         = false
	CheckOnce             = false
	PastAccepted          = false
	Revive                = false
	AckBeforeStop         = false
	RevokeUnlocked        = false
	MonotonicClock        = false
	RecheckBeforeWrite    = false
	NoIncarnation         = false
	NoGeneration          = false
	NewestGOldT           = false
	NewestTOldG           = false
	TBeforeReceive        = false
	Extrapolate           = false
	NoMargin              = false
	NoHeartbeat           = false
	HeartbeatOfOldSession = false
	ExpiryForgets         = false
	ExpiryLastGrant       = false
	RenewWhileFencing     = false
	UnorderedIncarnation  = false
	OldSession            = false
	NoEngineLock          = false
	GuardIDIgnored        = false
	NoFence               = false
	AbsenceIsProof        = false
	CloseIsDeath          = false
	UnackedRevoke         = false
	AnyAck                = false
	DuplicateIsNotStarted = false
	RestartNaive          = false
	RestartTrustsJournal  = false
	RestartNoMargin       = false
	JournalAfterDispatch  = false
	ResendFreshLease      = false
	NoGate                = false
	NoRecheck             = false
	BitAfterWrite         = false
	SlotEarly             = false
)
