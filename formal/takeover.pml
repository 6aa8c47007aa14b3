/* SPDX-License-Identifier: Apache-2.0
 *
 * Taking over from a gateway that may only be cut off. Gateway A owns a request
 * in the shared journal, and an attempt of it has a lease at a guard that A can
 * reach. A may be cut off from the journal, or stand still, at any moment; it
 * dies never. B takes the request over once A's owner_until has passed, and
 * dispatches the next attempt elsewhere when the guard has acknowledged a
 * revoke, or else after a wait.
 *
 * Time as in lease.pml. B's clock sets the rounds; A's and the guard's tick
 * once in a round, anywhere in it, and lose at most one tick of a lease, or of
 * an ownership. A's ownership is counted by A on A's clock and by B on B's, so
 * that no two clocks are ever compared.
 *
 * Parts: SAMEOWNER, B is A's next life, started while A still runs, and waits
 * as after a restart (lease.pml): that A is gone is what its rule rests on.
 * Claim: I3 as the guard's engine sees it. M_NAME and WITNESS_NAME as in
 * lease.pml.
 *
 * Mirrors the last sentence of failover.md 4 on gateways.
 */

#define TTL 2                 /* of a lease, in guard ticks */
#define OWN 2                 /* of an ownership */
#define DRIFT (TTL + 2)

/* What B waits after owner_until. */
#define LEASE_WAIT (TTL + 2)  /* a lost tick and a part of one: lease.pml */
#define OWNER_WAIT 2          /* the same for A's clock against B's, over an ownership */
#if defined(M_TAKER_DOES_NOT_WAIT)
#define WAIT 0
#elif defined(M_TAKER_WAITS_WITHOUT_MARGIN)
#define WAIT TTL
#elif defined(M_OWNERSHIP_WITHOUT_MARGIN) || defined(SAMEOWNER)
#define WAIT LEASE_WAIT
#else
#define WAIT (LEASE_WAIT + OWNER_WAIT)
#endif

#define UNKNOWN 0
#define ACTIVE  1
#define ENDED   2

#define CLAIM(says, holds) if :: (holds) -> skip :: else -> printf(says); assert(false) fi

/* ---- A ---- */
byte until = OWN;             /* A's ticks until it must stop granting */
byte gAge = TTL;              /* guard ticks since G of the newest heartbeat */
bit  dispatched;
bit  allowed;                 /* was seen to own it, and has granted nothing since */
#ifdef M_OWNERSHIP_FROM_THE_ANSWER
bit  answer;                  /* the journal's answer to an extension is on its way */
#endif

/* ---- journal and B ---- */
byte ownerUntil = OWN;        /* B's ticks until the takeover */
bit  taken;
byte wait;
bit  next;                    /* B has dispatched the next attempt */

/* ---- guard ---- */
byte gst, left;
byte dLeft, rLeft;            /* dispatch and renewal in flight */
bit  revoke, ack;

bit  dueA, dueG;
byte steadyA = DRIFT - 1, steadyG = DRIFT - 1;

inline down(x) { if :: x -> x-- :: else fi }

proctype Clocks() {
end:
	do
	:: atomic { !next && !dueA && !dueG ->
		dueA = 1; dueG = 1;
		if :: taken -> down(wait) :: else -> down(ownerUntil) fi;
		printf("B's clock: ticks\n") }
	:: atomic { !next && dueA ->
		dueA = 0;
		if
		:: steadyA == DRIFT - 1 -> steadyA = 0; printf("A's clock: loses a tick\n")
		:: true ->
			down(until);
			if :: steadyA < DRIFT - 1 -> steadyA++ :: else fi;
			printf("A's clock: ticks\n")
		fi }
	:: atomic { dueG ->
		dueG = 0;
		if
		:: steadyG == DRIFT - 1 -> steadyG = 0; printf("guard's clock: loses a tick\n")
		:: true ->
			down(left); down(dLeft); down(rLeft);
			if :: gAge < TTL -> gAge++ :: else fi;
			if :: steadyG < DRIFT - 1 -> steadyG++ :: else fi;
			printf("guard's clock: ticks\n")
		fi }
	od
}

#ifdef M_GRANTS_BEYOND_OWNERSHIP
#define OWNS (true)
#elif defined(SAMEOWNER)
#define OWNS (true)           /* nobody has told A */
#else
#define OWNS (until > 0)
#endif

#ifdef M_OWNERSHIP_CHECKED_FIRST
#define CHECKED allowed       /* at some moment before G was read */
#else
#define CHECKED OWNS          /* after G was read */
#endif

proctype GatewayA() {
	byte age;
end:
	do
	:: atomic { !next ->
		select (age : 0 .. TTL - 1);
		if
		:: age < gAge -> gAge = age; printf("A: heartbeat, %d ticks old\n", age)
		:: else
		fi;
		age = 0 }
#ifdef M_OWNERSHIP_CHECKED_FIRST
	:: atomic { !allowed && OWNS -> allowed = 1; printf("A: sees that it owns the request\n") }
#endif
	/* What is late after this is the message: it carries an absolute time. */
	:: atomic { !next && CHECKED && gAge < TTL && !dispatched ->
		dispatched = 1; dLeft = TTL - gAge; allowed = 0;
		printf("A: dispatches attempt 1, lease for %d ticks\n", dLeft) }
	:: atomic { !next && CHECKED && gAge < TTL && dispatched ->
		rLeft = TTL - gAge; allowed = 0;
		printf("A: renews attempt 1 for %d ticks\n", rLeft) }
#ifdef M_OWNERSHIP_FROM_THE_ANSWER
	:: atomic { !taken && ownerUntil && !answer ->
		ownerUntil = OWN; answer = 1;
		printf("journal: A owns the request for %d more ticks\n", OWN) }
	:: atomic { answer ->
		answer = 0; until = OWN;
		printf("A: hears that it owns the request, and counts from now\n") }
#else
	:: atomic { !taken && ownerUntil && until < OWN ->
		ownerUntil = OWN; until = OWN;
		printf("A: owns the request for %d more ticks\n", OWN) }
#endif
	od
}

proctype GatewayB() {
end:
	do
#ifdef SAMEOWNER
	:: atomic { !taken -> taken = 1; wait = WAIT; printf("B: starts as A's next generation\n") }
#else
	:: atomic { !taken && ownerUntil == 0 ->
		taken = 1; wait = WAIT; printf("B: takes the request over\n") }
#endif
	:: atomic { taken && !next && !revoke -> revoke = 1; printf("B: revokes attempt 1\n") }
	:: atomic { taken && !next && ack ->
#ifdef WITNESS_ACK
		CLAIM("witness: B goes on after an acknowledgement\n", false);
#endif
		next = 1; printf("B: dispatches attempt 2 after an acknowledgement\n") }
	:: atomic { taken && !next && wait == 0 ->
#ifdef WITNESS_WAIT
		CLAIM("witness: B goes on after its wait\n", gst != ACTIVE);
#endif
		next = 1; printf("B: dispatches attempt 2 after its wait\n") }
	od
}

proctype Guard() {
end:
	do
	:: atomic { dLeft ->
		if
		:: gst == UNKNOWN ->
			gst = ACTIVE; left = dLeft;
			printf("guard: starts attempt 1, lease for %d ticks\n", left);
			CLAIM("violated: I3 an attempt starts after the next one was dispatched\n", !next)
		:: else
		fi;
		if
		:: dLeft = 0
		:: skip
		fi }
	:: atomic { rLeft ->
		if
		:: gst == ACTIVE && left -> left = (rLeft > left -> rLeft : left); printf("guard: renews attempt 1, lease for %d ticks\n", left)
		:: else
		fi;
		rLeft = 0 }
	:: atomic { revoke ->
		revoke = 0; gst = ENDED; left = 0; ack = 1;
		printf("guard: takes the revoke of attempt 1 and acknowledges it\n") }
	:: atomic { gst == ACTIVE && left == 0 -> gst = ENDED; printf("guard: attempt 1 expires\n") }
	:: atomic { gst == ACTIVE && left && next ->
		printf("guard: writes a chunk of attempt 1\n");
		CLAIM("violated: I3 the guard publishes for an attempt after the next one was dispatched\n", !next) }
	od
}

init { atomic { run Clocks(); run GatewayA(); run GatewayB(); run Guard() } }
