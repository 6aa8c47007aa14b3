/* SPDX-License-Identifier: Apache-2.0
 *
 * State transfer: a generation moves from its source engine to a target, at a
 * boundary between two tokens, once. Any process may stand still for ever
 * between two steps; the source's connection may break with tokens in it; the
 * result of a swap in the journal may be lost.
 *
 * Claims: I1 with its exception (tokens up to the boundary from the source,
 * later ones from the target, none missing or twice), and FROZEN, source and
 * target never both generate. M_NAME and WITNESS_NAME as in lease.pml.
 *
 * Mirrors failover.md 9, of which nothing is built.
 */

#define TOKENS 3

/* The transfer in the journal. */
#define NONE      0
#define EXPORTED  1
#define COMMITTED 2
#define ABORTED   3

#define CLAIM(says, holds) if :: (holds) -> skip :: else -> printf(says); assert(false) fi

byte transfer;                /* journal */
byte boundary;                /* of the manifest */
bit  offered;                 /* the manifest reached the target */
byte made = 0;                /* tokens that the source wrote */
byte got = 0;                 /* ... and the gateway read */
bit  broken;                  /* the source's connection */
byte target;                  /* tokens that exist at the target, 0 = it is frozen */
byte taken;                   /* ... of which the gateway read */
bit  sourceRuns = 1, targetRuns;
byte shown;                   /* tokens at the client */
bit  over;                    /* interrupted, or the gateway's own end */

inline claimOneRuns() {
	CLAIM("violated: FROZEN source and target both generate\n", !(sourceRuns && targetRuns))
}

proctype Source() {
end:
	do
	:: atomic { sourceRuns && made < TOKENS -> made++; printf("source: token %d\n", made) }
	:: atomic { sourceRuns && made && made < TOKENS && transfer == NONE ->
		transfer = EXPORTED; boundary = made; offered = 1;
#ifndef M_EXPORT_WITHOUT_FREEZE
		sourceRuns = 0;
#endif
		printf("source: freezes and exports, boundary %d\n", boundary) }
	/* Its own swap is the only way back. */
	:: atomic { !sourceRuns && transfer == EXPORTED ->
		transfer = ABORTED;
		printf("source: aborts the transfer\n");
		if
		:: sourceRuns = 1; printf("source: goes on\n"); claimOneRuns()
		:: printf("source: the result is lost\n")
		fi }
#ifdef M_UNFREEZE_AFTER_TIMEOUT
	:: atomic { !sourceRuns && transfer == EXPORTED -> sourceRuns = 1; printf("source: a timeout passes, goes on\n"); claimOneRuns() }
#endif
#ifdef M_UNKNOWN_ABORT_IS_ABORTED
	:: atomic { !sourceRuns && transfer == COMMITTED -> sourceRuns = 1; printf("source: the result of its abort is lost, goes on\n"); claimOneRuns() }
#endif
	od
}

proctype Target() {
end:
	do
#ifdef M_COMMIT_BY_ACK
	:: atomic { offered && !targetRuns ->
		offered = 0; targetRuns = 1; target = boundary; taken = boundary;
		printf("target: acknowledges the import, goes on from %d\n", boundary); claimOneRuns() }
#else
	:: atomic { offered && transfer == EXPORTED ->
		offered = 0; transfer = COMMITTED;
		printf("target: commits the transfer\n");
		if
		:: targetRuns = 1; target = boundary; taken = boundary; printf("target: goes on from %d\n", boundary); claimOneRuns()
		:: printf("target: the result is lost\n")
		fi }
	:: atomic { offered && transfer != EXPORTED ->
		offered = 0; printf("target: may not commit\n");
#ifdef M_UNKNOWN_COMMIT_IS_COMMITTED
		targetRuns = 1; target = boundary; taken = boundary; printf("target: ... but its result is lost, goes on\n"); claimOneRuns();
#endif
		skip }
#endif
	:: atomic { targetRuns && target < TOKENS -> target++; printf("target: token %d\n", target) }
	od
}

inline deliver(token) {
	printf("gateway: shows token %d\n", token);
	CLAIM("violated: I1 a token is missing, or there twice\n", token == shown + 1);
	shown = token;
#ifdef WITNESS_MOVED
	CLAIM("witness: an answer is completed after a transfer\n", !(shown == TOKENS && transfer == COMMITTED));
#endif
#ifdef WITNESS_ABORTED
	CLAIM("witness: an answer is completed after an abort\n", !(shown == TOKENS && transfer == ABORTED));
#endif
	skip
}

#ifdef M_NO_BOUNDARY_WAIT
#define AT_BOUNDARY (true)
#else
#define AT_BOUNDARY (shown >= boundary)
#endif

proctype Gateway() {
end:
	do
	:: atomic { !over && got < made && !broken -> got++; deliver(got) }
	:: atomic { !broken -> broken = 1; printf("gateway: the source's connection breaks\n") }
	:: atomic { !over && targetRuns && taken < target && AT_BOUNDARY -> taken++; deliver(taken) }
	/* The tail that was lost with the connection is not in the manifest. */
	:: atomic { !over && broken && transfer == COMMITTED && shown < boundary ->
#ifdef M_TAIL_SKIPPED
		shown = boundary;
		printf("gateway: goes on at the boundary\n");
		CLAIM("violated: I1 a token is missing, or there twice\n", got == boundary)
#else
		over = 1; printf("gateway: interrupts the answer\n")
#endif
		}
	:: atomic { !over && broken && transfer != COMMITTED -> over = 1; printf("gateway: interrupts the answer\n") }
	od
}

init { atomic { run Source(); run Target(); run Gateway() } }
