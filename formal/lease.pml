/* SPDX-License-Identifier: Apache-2.0
 *
 * The lease and fence protocol: one request, one gateway, the guard of its
 * first attempt, and whatever replica takes the second.
 *
 * Time. No instant is stored, only its age, or what is left until it, in ticks
 * of the clock that owns it, so that time goes on for ever in finitely many
 * states. The guard's clock ticks once in a round of the gateway's, anywhere in
 * the round, and loses at most one tick in DRIFT of them. A lease of TTL guard
 * ticks then ends within TTL + 2 gateway ticks: one for drift, one because the
 * two clocks tick at different moments (failover.md 4: "plus one tick").
 * Any process may stand still while clocks tick: that is SIGSTOP, GC, or load.
 *
 * Network. A message is a slot. It may be delivered late, twice (the copy
 * stays), or never (nothing is forced to deliver it, and a newer one may take
 * its slot), which also stands for a partition and for a reconnect; a copy of
 * a dispatch is also the gateway's own resend, under the same lease. Heartbeats
 * need no slot: at any moment one may arrive with any age, hence in any order.
 * The chunks of an attempt are one TCP connection: delayed, never doubled or
 * reordered.
 *
 * Parts, off unless defined:
 *   SPLIT       the guard's check and its write are two moments
 *   DEATH       the engine dies, and its guard says so
 *   REBOOT      the guard restarts once; the control stream reconnects
 *   NOLOCK      ... while its predecessor lives on: no exclusive lock per engine
 *   ALIAS       a second guard answers at the same address
 *   RESTART     the gateway dies once before a first delta, and restarts
 *   FORGET      the guard forgets what it may forget
 *   FREEZE      the gateway's clock may stand still
 *   EXACT       the guard's clock loses no tick
 *   PREAMBLE    the first chunk is preamble
 *   SAMEGUARD   the second attempt goes to the same guard, under a lease too
 *   TRANSPORT   a closed connection is proof: an endpoint without a guard
 *   REFUSALS    the guard's refusals of a dispatch reach the gateway
 *   LIVENESS    a total limit, and claims about what must happen
 *
 * Claims: I1 to I3 as the client sees them and I4 always; GUARD adds I3 as the
 * guard's engine sees it; LEASE adds I8 for deadlines and ACKED I8 for
 * acknowledged revokes. M_NAME breaks one rule: see mutations.txt.
 * WITNESS_NAME makes reaching something good an error: see runs.txt.
 *
 * Mirrors, by name: internal/attempt's Request (st, fd, term; place, judge,
 * firstOutput, interrupt) and Gate (gate; Open, Close, Commit, Publish, Seal).
 * Leases and guards mirror failover.md 4 until that code exists.
 */

#ifdef M_OLD_INCARNATION
#define M_OLD_SESSION
#define M_UNORDERED_INCARNATION
#endif

#ifndef TTL
#define TTL 2
#endif
#define DRIFT (TTL + 2)
#ifdef EXACT
#define LOST 0
#else
#define LOST 1                /* ticks that the guard's clock may lose in one lease */
#endif
#if defined(M_NO_MARGIN)
#define WAIT (TTL + 1)
#elif defined(M_NO_TICK)
#define WAIT (TTL + LOST)
#else
#define WAIT (TTL + LOST + 1)
#endif
#define STRANGER 9            /* in ack: another guard at the address */
#define LONG (TTL + 3)        /* more than any lease */

#ifdef SAMEGUARD
#define LEASED 2              /* attempts 1..LEASED have a lease at the guard */
#else
#define LEASED 1
#endif
#define LAST 2                /* max_attempts */
#ifndef CHUNKS
#define CHUNKS 2              /* of an answer; the last one carries its end */
#endif

/* Attempt at the gateway: attempt.State. */
#define NONE    0
#define LIVE    1             /* Dispatched or Publishing */
#define FENCING 2
#define FENCED  3

/* Attempt at the guard. */
#define UNKNOWN 0
#define ACTIVE  1
#define ENDED   2

/* Outcomes. */
#define COMPLETED   1
#define INTERRUPTED 2
#define FAILED      3
#define CANCELLED   4

#define CLAIM(says, holds) if :: (holds) -> skip :: else -> printf(says); assert(false) fi
#define ATMOST(a, b) ((a) < (b) -> (a) : (b))
#define ATLEAST(a, b) ((a) > (b) -> (a) : (b))

/* ---- network ---- */
byte dInc[3], dLeft[3];       /* dispatch: incarnation + 1, time to not_after */
byte rInc[3], rLeft[3];       /* renewal: the same */
bit  revoke[3];
byte ack[3];                  /* "ended", asked for or not: incarnation + 1 of the guard that says so */
byte chunks[3];               /* in flight to the gateway */
#ifdef M_ABSENCE_IS_PROOF
bit  absent[3];               /* a resync list without the attempt */
#endif
#ifdef M_CLOSE_IS_COMPLETE
bit  closed;                  /* the engine's end closed the connection */
#endif
#ifdef REFUSALS
bit  refused;                 /* 409 duplicate_attempt */
#endif

/* ---- guard ---- */
byte inc;                     /* incarnation */
byte gst[3], left[3];         /* state and lease of attempts */
byte sent[3];                 /* chunks published */
byte highest;                 /* epoch */
byte steady;                  /* ticks since the clock lost one */
bit  due;                     /* the tick of this round is to come */
bit  over[3];                 /* ghost: the end was acknowledged or declared */
bit  started;                 /* ghost: attempt 1 was started */
#ifdef WITNESS_RENEWED
byte firstLeft;
#endif
#ifdef SPLIT
bit  writing[3];              /* checked, about to write: holds the attempt's lock */
bit  recheck[3];              /* written, about to look at the clock again */
bit  lateWrite[3];            /* ghost */
#endif
#ifdef M_ACK_BEFORE_STOP
bit  stopping[3];
#endif
#ifdef NOLOCK
byte oldLeft;                 /* lease of attempt 1 at the predecessor that lives on */
bit  oldActive;
#endif
#ifdef FORGET
byte keep;                    /* guard ticks until attempt 1 may be forgotten */
byte notAfter;                /* gateway: what a revoke carries */
byte revNotAfter;
bit  newer;                   /* guard: has heard of the gateway's second generation */
bit  unsaid;                  /* gateway: restarted, does not know not_after */
#endif

/* ---- gateway ---- */
byte st[3];
byte expiry[3];               /* ticks until the lease is over whatever happened */
byte ainc[3];                 /* incarnation + 1 it was dispatched to */
byte cur;                     /* newest attempt */
byte gate;                    /* its owner, 0 = closed */
byte known;                   /* newest incarnation heard of, + 1; 0 = no heartbeat yet */
byte gAge = TTL;              /* guard ticks since G of the newest heartbeat; TTL = useless */
byte tAge = WAIT;             /* gateway ticks since t, when it was received */
bit  fd;                      /* first_delta_sent */
byte term;                    /* outcome */
byte pub;                     /* ghost: the attempt whose bytes reached the client */
#ifdef REBOOT
byte session;                 /* incarnation that the newest control stream is connected to */
#endif
#ifdef RESTART
bit  restarted;
#endif
#ifdef PREAMBLE
bit  held;                    /* preamble is held back */
#endif
#ifdef LIVENESS
byte total = TTL + 2;
#endif

/* ==== the rules that a guard keeps ==== */

#ifdef M_NO_INCARNATION
#define INCARNATION_OK(i) (i)
#else
#define INCARNATION_OK(i) ((i) == inc + 1)
#endif

#if defined(M_NO_EPOCH)
#define EPOCH_OK(x) (gst[x] != ACTIVE)
#elif defined(M_EQUAL_EPOCH)
#define EPOCH_OK(x) (highest <= x)
#elif defined(M_LOWER_EPOCH)
#define EPOCH_OK(x) (gst[x] == UNKNOWN && highest != x)
#else
#define EPOCH_OK(x) (gst[x] == UNKNOWN && highest < x)
#endif

#ifdef M_PAST_ACCEPTED
#define NOT_PAST(ticks) (true)
#else
#define NOT_PAST(ticks) ((ticks) > 0)
#endif

#if defined(FORGET) && defined(RESTART) && !defined(M_NO_GENERATION)
#define GENERATION_OK (!newer)     /* every lease in flight then is of the first generation */
#else
#define GENERATION_OK (true)
#endif

#ifdef M_RELATIVE_TTL
#define GRANTED(ticks) TTL         /* counted from its arrival */
#elif defined(M_GUARD_ROUNDS_UP)
#define GRANTED(ticks) ((ticks) + 1)
#else
#define GRANTED(ticks) (ticks)
#endif

#ifdef M_FORGET_EARLY
#define MAY_FORGET (true)
#else
#define MAY_FORGET (keep == 0)
#endif

#ifdef M_CHECK_ONCE
#define MAY_PUBLISH(x) (gst[x] == ACTIVE)
#else
#define MAY_PUBLISH(x) (gst[x] == ACTIVE && left[x] > 0)
#endif

#if defined(SPLIT) && !defined(M_REVOKE_UNLOCKED)
#define UNLOCKED(x) (!writing[x])
#else
#define UNLOCKED(x) (true)
#endif

/* ==== the rules that a gateway keeps ==== */

#if defined(M_NO_HEARTBEAT) || defined(M_SILENT_TRANSPORT)
#define CANDIDATE (true)
#else
#define CANDIDATE (known && gAge < TTL)
#endif

#if defined(M_SILENT_TRANSPORT)
#define GRANT (known && gAge < TTL -> TTL - gAge : LONG)   /* without a session, without a lease */
#define GRANT_ENDS WAIT
#elif defined(M_RELATIVE_TTL) || defined(M_NO_HEARTBEAT)
#define GRANT TTL
#define GRANT_ENDS WAIT            /* from now, which is when it is sent */
#elif defined(M_EXTRAPOLATE)
#define GRANT (TTL + tAge - gAge)  /* until what the guard's clock should show by now, plus ttl */
#define GRANT_ENDS WAIT
#else
#define GRANT (TTL - gAge)         /* until G + ttl */
#define GRANT_ENDS (WAIT - ATMOST(tAge, WAIT))
#endif

#ifdef M_EXPIRY_FORGETS
#define EXPIRY_RENEWED(x) expiry[x]          /* a renewal counts once acknowledged: here never */
#elif defined(M_EXPIRY_LAST_GRANT)
#define EXPIRY_RENEWED(x) GRANT_ENDS
#else
#define EXPIRY_RENEWED(x) ATLEAST(expiry[x], GRANT_ENDS)
#endif

#ifdef M_RENEW_WHILE_FENCING
#define RENEWABLE(x) (st[x] == LIVE || st[x] == FENCING)
#else
#define RENEWABLE(x) (st[x] == LIVE)
#endif

#ifdef M_UNORDERED_INCARNATION
#define NEWER(i) (known != (i))
#else
#define NEWER(i) (known < (i))
#endif

#if defined(NOLOCK) && !defined(M_NO_ENGINE_LOCK)
#define NEW_INCARNATION_FENCES false
#else
#define NEW_INCARNATION_FENCES true
#endif

/* A later life at the same engine speaks for the earlier one only if the lock
 * shows that it is over; another guard never does. */
#ifdef M_ANY_ACK
#define ACK_COUNTS(x) (true)
#else
#define ACK_COUNTS(x) (ack[x] == ainc[x] || (NEW_INCARNATION_FENCES && ack[x] != STRANGER))
#endif

#ifdef M_NO_EXPIRY
#define LEASE_EXPIRED_COUNTS false
#else
#define LEASE_EXPIRED_COUNTS true
#endif

#ifdef M_NO_GATE
#define GATE_OPEN(x) (true)
#else
#define GATE_OPEN(x) (gate == x)
#endif

#ifdef M_NO_BIT_CHECK
#define MAY_DISPATCH (true)
#else
#define MAY_DISPATCH (!fd)
#endif

#ifdef PREAMBLE
#define OUTPUT held                /* what follows the preamble */
#else
#define OUTPUT true
#endif

#ifdef LIVENESS
#define IN_TIME (total > 0 || st[x] == FENCING)
#else
#define IN_TIME true
#endif

/* Heartbeats matter while a grant may still be made of them, or a new
 * incarnation may end the wait. */
#if defined(REBOOT) || defined(ALIAS) || defined(M_RENEW_WHILE_FENCING)
#define LISTENS (cur < LEASED || (cur == LEASED && (st[LEASED] == LIVE || st[LEASED] == FENCING)))
#elif defined(SAMEGUARD)
#define LISTENS (cur == 0 || st[cur] == LIVE || (cur == 1 && st[1] == FENCED))
#else
#define LISTENS (cur == 0 || (cur == 1 && st[1] == LIVE))
#endif

/* What nobody reads any more is wiped, so that equal states are equal. */
inline wipe() {
#ifndef M_RENEW_WHILE_FENCING
	gAge = TTL; tAge = WAIT
#else
	skip
#endif
}

inline fenced(x) {
	st[x] = FENCED; gate = 0;
	expiry[x] = 0; ack[x] = 0;
	wipe()
}

/* Request.judge: gate first, then the revoke. */
inline fence(x) {
	st[x] = FENCING;
#ifndef M_RELAY_WHILE_FENCING
	gate = 0;
#endif
	sendRevoke(x);
	wipe()
}

inline sendRevoke(x) {
	revoke[x] = 1;
#ifdef FORGET
	revNotAfter = (unsaid -> 0 : notAfter)
#else
	skip
#endif
}

/* Request.interrupt and Request.fail: the gate is sealed. */
inline finish(outcome) {
	gate = 0; term = outcome
}

/* ==== clocks ==== */

inline tickLease(x) {
	if
	:: dLeft[x] > 1 -> dLeft[x]--
#if defined(M_RELATIVE_TTL) || defined(M_NO_HEARTBEAT)
	:: else
#elif defined(M_PAST_ACCEPTED)
	:: dLeft[x] == 1 -> dLeft[x] = 0
	:: else
#else
	:: dLeft[x] == 1 -> dInc[x] = 0; dLeft[x] = 0      /* would be refused: as good as lost */
	:: else
#endif
	fi;
	if
	:: rLeft[x] > 1 -> rLeft[x]--
#ifndef M_RELATIVE_TTL
	:: rLeft[x] == 1 -> rInc[x] = 0; rLeft[x] = 0
#endif
	:: else
	fi;
	if
	:: left[x] -> left[x]--
	:: else
	fi
}

inline tickGuard() {
#ifdef WITNESS_RENEWED
	if :: firstLeft -> firstLeft-- :: else fi;
#endif
	tickLease(1);
#ifdef SAMEGUARD
	tickLease(2);
#endif
#ifdef NOLOCK
	if :: oldLeft -> oldLeft-- :: else fi;
#endif
#ifdef FORGET
	if :: keep -> keep-- :: else fi;
	if :: notAfter -> notAfter-- :: else fi;
	if :: revNotAfter -> revNotAfter-- :: else fi;
#endif
	if
	:: gAge < TTL ->
		gAge++;
		if
		:: gAge == TTL -> tAge = WAIT
		:: else
		fi
	:: else
	fi
}

proctype GuardClock() {
end:
	do
	:: atomic { !term && due ->
		due = 0;
		if
		:: LOST && steady == DRIFT - 1 -> steady = 0; printf("guard's clock: loses a tick\n")
		:: true ->
			tickGuard();
			steady = ATMOST(steady + 1, DRIFT - 1);
			printf("guard's clock: ticks\n")
#ifdef M_MONOTONIC_CLOCK
		:: true -> printf("guard's clock: stands still while the host is suspended\n")
#endif
		fi }
	od
}

proctype GatewayClock() {
end:
	do
	:: atomic { !term && !due ->
		due = 1;
		if :: expiry[1] -> expiry[1]-- :: else fi;
		if :: tAge < WAIT -> tAge++ :: else fi;
#ifdef LIVENESS
		if :: total -> total-- :: else fi;
#endif
		printf("gateway's clock: ticks\n") }
#ifdef FREEZE
	:: atomic { !term && !due -> due = 1; printf("gateway's clock: stands still\n") }
#endif
	od
}

/* ==== guard ==== */

/* A chunk enters the socket. */
inline write(x) {
	chunks[x]++; sent[x]++;
	printf("guard: writes chunk %d of attempt %d\n", sent[x], x);
#ifdef GUARD
	CLAIM("violated: I3 the guard publishes for an attempt after the next one was dispatched\n", cur <= x);
#endif
#ifdef LEASE
	CLAIM("violated: I8 the guard publishes after the lease's deadline\n", left[x] > 0);
#endif
#if defined(LEASE) || defined(ACKED)
	CLAIM("violated: I8 the guard publishes after it acknowledged the end\n", !over[x]);
#endif
#ifdef WITNESS_RENEWED
	CLAIM("witness: a renewed lease outlived the first\n", x != 1 || firstLeft);
#endif
	skip
}

inline stop(x) {                    /* the guard's own end of an attempt, declared on the control stream */
	gst[x] = ENDED; left[x] = 0; over[x] = 1;
	ack[x] = (st[x] == LIVE || st[x] == FENCING -> inc + 1 : 0)    /* else nobody waits for it */
}

proctype Guard(byte x) {
end:
	do
	/* Dispatch: it carries the initial lease. */
	:: atomic { !term && dInc[x] ->
		if
		:: INCARNATION_OK(dInc[x]) && EPOCH_OK(x) && NOT_PAST(dLeft[x]) && GENERATION_OK ->
			gst[x] = ACTIVE; over[x] = 0; highest = ATLEAST(highest, x);
			left[x] = GRANTED(dLeft[x]);
#ifdef WITNESS_RENEWED
			firstLeft = left[x];
#endif
#ifdef FORGET
			keep = dLeft[x];
#endif
			printf("guard: starts attempt %d, lease for %d more ticks\n", x, left[x]);
#ifdef GUARD
			CLAIM("violated: I3 an attempt starts after the next one was dispatched\n", cur <= x);
#endif
			if
			:: x == 1 ->
				CLAIM("violated: I3 an attempt starts twice\n", !started);
				started = 1
			:: else
			fi
		:: else ->
			printf("guard: refuses a dispatch of attempt %d\n", x);
#ifdef WITNESS_TOMBSTONE
			CLAIM("witness: a tombstone refused a late dispatch\n", started || gst[x] != ENDED);
#endif
#ifdef REFUSALS
			if
			:: highest >= x && x == 1 -> refused = 1
			:: else
			fi
#endif
		fi;
		if
		:: dInc[x] = 0; dLeft[x] = 0
		:: skip                                    /* a copy is still on its way */
		fi }

	/* Renewal. Expired is final. */
	:: atomic { !term && rInc[x] ->
		if
#ifdef M_REVIVE
		:: gst[x] != UNKNOWN && INCARNATION_OK(rInc[x]) ->
			gst[x] = ACTIVE;
#else
		:: gst[x] == ACTIVE && left[x] && INCARNATION_OK(rInc[x]) ->
#endif
			left[x] = ATLEAST(left[x], GRANTED(rLeft[x]));
			printf("guard: renews attempt %d, lease for %d more ticks\n", x, left[x])
		:: else -> printf("guard: ignores a renewal of attempt %d\n", x)
		fi;
		rInc[x] = 0; rLeft[x] = 0 }

	/* Revoke: stop, then acknowledge. */
#ifdef M_ACK_BEFORE_STOP
	:: atomic { !term && revoke[x] && gst[x] != ENDED && !stopping[x] ->
		stopping[x] = 1; ack[x] = inc + 1; over[x] = 1; revoke[x] = 0;
		printf("guard: acknowledges the revoke of attempt %d\n", x) }
	:: atomic { !term && stopping[x] ->
		stopping[x] = 0; gst[x] = ENDED; left[x] = 0;
		printf("guard: stops attempt %d\n", x) }
#else
	:: atomic { !term && revoke[x] && UNLOCKED(x) ->
		printf("guard: takes the revoke of attempt %d and acknowledges it\n", x);
		revoke[x] = 0;
#ifdef FORGET
		newer = newer || unsaid;
		if
		:: gst[x] == UNKNOWN -> keep = revNotAfter
		:: else
		fi;
		revNotAfter = 0;
#endif
		if
#ifdef M_NO_TOMBSTONE
		:: gst[x] == UNKNOWN -> ack[x] = inc + 1
#endif
		:: else -> highest = ATLEAST(highest, x); stop(x)
		fi }
#endif

	/* The deadline, with no help from anyone. */
	:: atomic { !term && gst[x] == ACTIVE && left[x] == 0 && UNLOCKED(x) ->
		stop(x);
		printf("guard: attempt %d expires\n", x) }

	/* A chunk. */
#ifdef SPLIT
	:: atomic { !term && MAY_PUBLISH(x) && sent[x] < CHUNKS && !writing[x] && !recheck[x] ->
		writing[x] = 1;
		printf("guard: checks attempt %d\n", x) }
	:: atomic { !term && writing[x] ->
		writing[x] = 0;
		lateWrite[x] = (left[x] == 0);
#ifdef M_RECHECK_BEFORE_WRITE
		/* The clock was read when the check passed. */
		CLAIM("violated: I8 a late write is not counted\n", !lateWrite[x]);
#else
		recheck[x] = 1;
#endif
		write(x) }
	:: atomic { !term && recheck[x] ->
		recheck[x] = 0;
		if
		:: left[x] == 0 && gst[x] == ACTIVE ->
			printf("guard: counts a late write of attempt %d and aborts it\n", x);
			stop(x)
		:: else ->
			CLAIM("violated: I8 a late write is not counted\n", !lateWrite[x] || gst[x] == ENDED)
		fi;
		lateWrite[x] = 0 }
#else
	:: atomic { !term && MAY_PUBLISH(x) && sent[x] < CHUNKS -> write(x) }
#endif

#ifdef DEATH
	:: atomic { !term && gst[x] == ACTIVE && sent[x] < CHUNKS && UNLOCKED(x) ->
		stop(x);
		printf("engine: dies, and the guard says so\n");
#ifdef M_CLOSE_IS_COMPLETE
		closed = 1
#endif
		}
#endif

#ifdef FORGET
	:: atomic { !term && x == 1 && gst[1] == ENDED && highest && MAY_FORGET ->
		gst[1] = UNKNOWN; highest = 0; keep = 0;
		printf("guard: forgets attempt 1\n") }
	:: atomic { !term && x == 1 && unsaid && !newer ->
		newer = 1;
		printf("guard: hears of the gateway's second generation\n") }
#endif

#ifdef M_ABSENCE_IS_PROOF
	:: atomic { !term && gst[x] == UNKNOWN && cur >= x && !absent[x] ->
		absent[x] = 1;
		printf("guard: lists its attempts, without attempt %d\n", x) }
#endif
	od
}

#ifdef REBOOT
/* A new life of the guard: its memory is gone, its connections are cut. The
 * gateway notices when it reconnects. */
proctype Reboot() {
	byte x;
end:
	do
	:: atomic { !term && inc == 0 ->
		printf("guard: restarts as a new incarnation\n");
#ifdef NOLOCK
		oldActive = (gst[1] == ACTIVE); oldLeft = left[1];
#endif
		inc = 1; highest = 0;
		for (x : 1 .. LEASED) {
			gst[x] = UNKNOWN; left[x] = 0; over[x] = 0;
#ifdef SPLIT
			writing[x] = 0; recheck[x] = 0; lateWrite[x] = 0;
#endif
#ifdef M_NO_INCARNATION
			/* The host restarted too: its clock begins again. */
			if :: dInc[x] -> dLeft[x] = LONG :: else fi;
			if :: rInc[x] -> rLeft[x] = LONG :: else fi;
#endif
		}
		x = 0;
		started = 0 }
	:: atomic { !term && session != inc ->
		session = inc;
#ifndef M_HEARTBEAT_OF_OLD_SESSION
		gAge = TTL; tAge = WAIT;                   /* no heartbeat in this session yet */
#endif
		printf("gateway: opens a new control stream\n") }
#ifdef NOLOCK
	:: atomic { !term && oldActive && oldLeft && sent[1] < CHUNKS ->
		sent[1]++;
		printf("guard's predecessor: writes chunk %d of attempt 1\n", sent[1]);
		CLAIM("violated: I3 the guard publishes for an attempt after the next one was dispatched\n", cur <= 1);
		chunks[1]++ }
#endif
	od
}
#endif

#ifdef ALIAS
/* Another guard answers at the address, as a load balancer's name would let it. */
proctype Alias() {
end:
	do
	:: atomic { !term && revoke[1] ->
		revoke[1] = 0; ack[1] = STRANGER;
		printf("another guard at the address: leaves a tombstone for attempt 1 and acknowledges\n") }
#ifdef M_GUARD_ID_IGNORED
	:: atomic { !term && (st[1] == LIVE || st[1] == FENCING) ->
		printf("gateway: hears another guard and takes it for a new incarnation\n");
		if
		:: fd -> finish(INTERRUPTED)
		:: else -> fenced(1)
		fi }
#endif
	od
}
#endif

/* ==== gateway ==== */

proctype Heartbeats() {
	byte age, i, x;
end:
	do
	:: atomic { !term && LISTENS ->
		select (age : 0 .. TTL - 1);               /* older ones grant nothing */
#ifdef REBOOT
#ifdef M_OLD_SESSION
		select (i : 1 .. session + 1);             /* what the old stream still holds counts too */
#else
		i = session + 1;
#endif
#else
		i = 1;
#endif
		if
		:: NEWER(i) ->
			known = i; gAge = age; tAge = 0;
			printf("gateway: first heartbeat of incarnation %d, %d ticks old\n", i, age);
			for (x : 1 .. LEASED) {
				if
				:: NEW_INCARNATION_FENCES && (st[x] == LIVE || st[x] == FENCING) && ainc[x] != i ->
					printf("gateway: attempt %d is fenced, its guard is gone\n", x);
#ifdef WITNESS_DEAD
					CLAIM("witness: a new incarnation fenced an attempt\n", false);
#endif
					if
					:: fd -> finish(INTERRUPTED)
					:: else -> fenced(x)
					fi
				:: else
				fi
			}
		:: known == i && cur <= LEASED && !(cur && st[cur] == FENCING && cur == LEASED && age) && (gAge > 0 || tAge > 0 && cur < LAST) ->
#if defined(M_NEWEST_G_OLD_T)
			gAge = ATMOST(gAge, age); tAge = ATMOST(tAge, WAIT - 1);
#elif defined(M_NEWEST_T_OLD_G)
			gAge = (gAge == TTL -> age : gAge); tAge = 0;
#elif defined(M_T_BEFORE_RECEIVE)
			/* t was read before the receive began to wait, a tick ago. */
			gAge = age; tAge = ATMOST(tAge, 1);
#else
			/* One heartbeat's pair, of the newest G. */
			if
			:: age <= gAge -> gAge = age; tAge = 0
			:: else
			fi;
#endif
			printf("gateway: heartbeat, %d ticks old\n", age)
		:: else
		fi;
		if
		:: cur && cur <= LEASED && st[cur] == FENCING -> wipe()
		:: else
		fi;
		if
		:: cur == LAST -> tAge = WAIT
		:: else
		fi;
		age = 0; i = 0; x = 0 }
	od
}

proctype Attempt(byte x) {
end:
	do
	/* Request.place and Gate.Open. */
	:: atomic { !term && cur == x - 1 && (x == 1 || st[x - 1] == FENCED) && MAY_DISPATCH && CANDIDATE ->
		ainc[x] = (known -> known : 1);
		dInc[x] = ainc[x]; dLeft[x] = GRANT;
		expiry[x] = (x < LAST -> GRANT_ENDS : 0);        /* no attempt waits for the end of the last */
#ifdef FORGET
		notAfter = GRANT;
#endif
		printf("gateway: dispatches attempt %d, lease for %d ticks, expiry in %d\n", x, dLeft[x], expiry[x]);
		CLAIM("violated: I2 an attempt is dispatched after bytes reached the client\n", pub == 0);
		cur = x; st[x] = LIVE; gate = x }

	:: atomic { !term && RENEWABLE(x) && known == ainc[x] && gAge < TTL && IN_TIME ->
		rInc[x] = ainc[x]; rLeft[x] = GRANT; expiry[x] = (x < LAST -> EXPIRY_RENEWED(x) : 0);
		printf("gateway: renews attempt %d for %d ticks, expiry in %d\n", x, rLeft[x], expiry[x]) }

#ifdef M_RESEND_FRESH_LEASE
	:: atomic { !term && x == 1 && st[1] == LIVE && !fd && known == ainc[1] && gAge < TTL ->
		dInc[1] = ainc[1]; dLeft[1] = GRANT; expiry[1] = EXPIRY_RENEWED(1); notAfter = GRANT;
		printf("gateway: resends attempt 1, lease for %d ticks\n", dLeft[1]) }
#endif

	/* Evidence, at any moment and for any reason: Request.judge. */
	:: atomic { !term && st[x] == LIVE ->
		if
		:: fd ->
			printf("gateway: evidence against attempt %d after its first delta: error event\n", x);
#ifdef WITNESS_INTERRUPTED
			CLAIM("witness: interrupted\n", false);
#endif
			revoke[x] = 1; finish(INTERRUPTED)
		:: else ->
			printf("gateway: evidence against attempt %d: closes its gate, revokes it\n", x);
			fence(x);
#if defined(M_UNACKED_REVOKE)
			printf("gateway: takes the revoke it sent for proof\n");
			fenced(x)
#elif defined(M_SILENT_TRANSPORT)
			if
			:: known == 0 -> printf("gateway: takes the closed connection for proof\n"); fenced(x)
			:: else
			fi
#elif defined(M_CLOSE_IS_DEATH) || defined(TRANSPORT)
			printf("gateway: takes the closed connection for proof\n");
			fenced(x)
#elif defined(M_NO_FENCE)
			fenced(x)
#endif
		fi }

	:: atomic { !term && st[x] == FENCING && !revoke[x] ->
		sendRevoke(x);
		printf("gateway: revokes attempt %d again\n", x) }

	:: atomic { !term && ack[x] ->
		if
		:: ACK_COUNTS(x) && (st[x] == LIVE || st[x] == FENCING) ->
			if
			:: fd -> printf("gateway: attempt %d has ended after its first delta\n", x); finish(INTERRUPTED)
			:: else ->
				printf("gateway: attempt %d is fenced, its guard says so\n", x);
#ifdef WITNESS_ACK
				CLAIM("witness: an acknowledgement fenced an attempt\n", false);
#endif
				fenced(x)
			fi
		:: else
		fi;
		ack[x] = 0 }

#ifdef M_ABSENCE_IS_PROOF
	:: atomic { !term && absent[x] ->
		if
		:: (st[x] == LIVE || st[x] == FENCING) && !fd ->
			printf("gateway: takes absence for the end of attempt %d\n", x);
			fenced(x)
		:: else
		fi;
		absent[x] = 0 }
#endif
#ifdef REFUSALS
	:: atomic { !term && x == 1 && refused ->
		refused = 0;
#ifdef M_DUPLICATE_IS_NOT_STARTED
		if
		:: (st[1] == LIVE || st[1] == FENCING) && !fd ->
			printf("gateway: takes duplicate_attempt for not_started\n");
			fenced(1)
		:: else
		fi
#else
		skip                                       /* it had started: proves nothing */
#endif
		}
#endif
	od
}

/* A process of its own, so that its timer fires if time goes on. */
proctype Expiry() {
end:
	do
	:: atomic { !term && (st[1] == LIVE || st[1] == FENCING) && expiry[1] == 0 && LEASE_EXPIRED_COUNTS ->
		if
		:: fd -> printf("gateway: attempt 1 expired after its first delta\n"); finish(INTERRUPTED)
		:: else ->
			printf("gateway: attempt 1 is fenced, its lease has expired\n");
#ifdef WITNESS_EXPIRY
			CLAIM("witness: expiry fenced an attempt\n", false);
#endif
			fenced(1)
		fi }
	od
}

/* A chunk reaches the client. */
inline deliver(x) {
	CLAIM("violated: I4 bytes follow the end of the answer\n", !term);
	CLAIM("violated: I1 bytes of two attempts reach the client\n", pub == 0 || pub == x);
	CLAIM("violated: I3 bytes of an attempt reach the client after the next one was dispatched\n", cur == x);
	printf("gateway: writes a chunk of attempt %d to the client\n", x);
	pub = x;
#ifdef WITNESS_SECOND
	CLAIM("witness: the second attempt reaches the client\n", x != 2);
#endif
	if
	:: sent[x] == CHUNKS && chunks[x] == 0 ->
#ifdef WITNESS_COMPLETED
		CLAIM("witness: completed\n", false);
#endif
		finish(COMPLETED)
	:: else
	fi
}

inline deliverOrFail(x) {
	if
	:: deliver(x)
	:: printf("gateway: a write of attempt %d fails half way\n", x);
		pub = x;
#ifdef M_RETRY_FAILED_WRITE
		/* The fence is as good as any; what is wrong is that one is sought. */
		fd = 0; fenced(x); left[x] = 0; gst[x] = ENDED
#else
		finish(CANCELLED)
#endif
	fi
}

/* The goroutine that reads attempt x's connection and writes to the client. */
proctype Relay(byte x) {
end:
	do
#ifdef PREAMBLE
	:: atomic { !term && chunks[x] && GATE_OPEN(x) && st[x] == LIVE && !fd && !held && sent[x] == 1 ->
		chunks[x]--;
#ifdef M_PREAMBLE_SENT
		printf("gateway: writes the preamble of attempt %d to the client\n", x);
		CLAIM("violated: I1 bytes of two attempts reach the client\n", pub == 0 || pub == x);
		pub = x;
#else
		printf("gateway: holds the preamble of attempt %d back\n", x);
#endif
		held = 1 }
#endif
	/* Request.firstOutput: the bit, before anything is written. Then
	 * Gate.Commit: check and write under the writer's lock. */
	:: atomic { !term && chunks[x] && GATE_OPEN(x) && !fd && OUTPUT ->
		chunks[x]--;
#ifdef M_BIT_AFTER_WRITE
		deliver(x) };
	   atomic { fd = 1 }
#else
		fd = 1;
		printf("gateway: first output of attempt %d, sets first_delta_sent\n", x) };
#if defined(M_NO_RECHECK)
	   atomic { deliverOrFail(x) }
#elif defined(M_NO_WRITER_LOCK)
	   if
	   :: atomic { !term && GATE_OPEN(x) -> printf("gateway: checks the gate of attempt %d\n", x) };
	      atomic { deliverOrFail(x) }
	   :: atomic { else -> printf("gateway: drops a late chunk of attempt %d\n", x) }
	   fi
#else
	   atomic {
		if
		:: !term && GATE_OPEN(x) -> deliverOrFail(x)
		:: else -> printf("gateway: drops a late chunk of attempt %d\n", x)
		fi }
#endif
#endif
	:: atomic { !term && chunks[x] && GATE_OPEN(x) && fd -> chunks[x]--; deliverOrFail(x) }
#ifdef M_CLOSE_IS_COMPLETE
	:: atomic { !term && x == 1 && closed && fd && GATE_OPEN(1) && chunks[1] == 0 ->
		printf("gateway: takes the closed connection for the end of the answer\n");
		CLAIM("violated: I4 completed, without the end of the answer\n", sent[1] == CHUNKS);
		finish(COMPLETED) }
#endif
	:: atomic { !term && chunks[x] && !GATE_OPEN(x) ->
		chunks[x]--;
		printf("gateway: drops a late chunk of attempt %d\n", x);
#ifdef WITNESS_LATE
		CLAIM("witness: a late chunk is dropped\n", false);
#endif
		skip }
	od
}

#ifndef SAMEGUARD
/* The second attempt, at another replica. No attempt follows it, so its lease
 * protects nothing and is left out. */
proctype Second() {
end:
	do
	:: atomic { !term && cur == 1 && st[1] == FENCED && MAY_DISPATCH ->
		printf("gateway: dispatches attempt 2 to another replica\n");
		CLAIM("violated: I2 an attempt is dispatched after bytes reached the client\n", pub == 0);
#ifdef PREAMBLE
#ifdef M_PREAMBLE_KEPT
		CLAIM("violated: I1 bytes of two attempts reach the client\n", !held);
#endif
		held = 0;
#endif
		cur = 2; st[2] = LIVE; gate = 2; sent[2] = CHUNKS }
	:: atomic { !term && st[2] == LIVE && chunks[2] == 0 && !fd ->
		printf("replica: writes the answer of attempt 2\n");
#ifdef PREAMBLE
		held = 1;
#endif
		chunks[2] = 1 }
	:: atomic { !term && st[2] == LIVE && !fd ->
		printf("gateway: attempt 2 fails\n");
		st[2] = FENCED; gate = 0 }
	od
}
#endif

proctype Request() {
end:
	do
	:: atomic { !term && cur == LAST && st[LAST] == FENCED && !fd ->
		printf("gateway: attempts are used up\n"); finish(FAILED) }
	:: atomic { !term && cur && st[cur] == FENCED && fd ->
		printf("gateway: fenced after the first delta: error event\n"); finish(INTERRUPTED) }
#ifdef LIVENESS
	:: atomic { !term && total == 0 && (cur == 0 || st[cur] != FENCING) ->
		printf("gateway: the total limit passes\n");
		finish((fd -> INTERRUPTED : FAILED)) }
#endif
	od
}

#ifdef RESTART
/* The gateway dies before a first delta. Its journal has the unfinished
 * attempt and nothing of what was granted; the client sends its keyed request
 * again. */
proctype Crash() {
end:
	do
	:: atomic { !term && !restarted && cur == 1 && !fd && pub == 0 ->
		restarted = 1;
		printf("gateway: dies and restarts\n");
		known = 0; ack[1] = 0; chunks[1] = 0; revoke[1] = 0;
		wipe();
#ifdef FORGET
		unsaid = 1; notAfter = 0; revNotAfter = 0;
#endif
#if defined(M_RESTART_NAIVE) || defined(M_JOURNAL_AFTER_DISPATCH)
		/* Attempt 1 is over with its process, or was never written down. */
		fenced(1)
#elif defined(M_RESTART_TRUSTS_JOURNAL)
		st[1] = FENCING; gate = 0; expiry[1] = 0     /* no grant is known to be open */
#elif defined(M_RESTART_NO_MARGIN)
		st[1] = FENCING; gate = 0; expiry[1] = TTL
#else
		st[1] = FENCING; gate = 0; expiry[1] = WAIT  /* own start + ttl × margin */
#endif
		}
	od
}
#endif

init {
	atomic {
		steady = DRIFT - 1;
		run GatewayClock(); run GuardClock();
		run Guard(1); run Attempt(1); run Expiry(); run Relay(1); run Relay(2);
		run Heartbeats(); run Request();
#ifdef SAMEGUARD
		run Guard(2); run Attempt(2);
#else
		run Second();
#endif
#ifdef REBOOT
		run Reboot();
#endif
#ifdef ALIAS
		run Alias();
#endif
#ifdef RESTART
		run Crash();
#endif
	}
}

#ifdef LIVENESS
ltl ends { <> (term != 0) }
ltl verdict { [] ((st[1] == FENCING) -> <> (st[1] == FENCED || term != 0)) }
#endif
