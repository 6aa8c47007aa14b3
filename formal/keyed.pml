/* SPDX-License-Identifier: Apache-2.0
 *
 * A keyed request: who owns it, who may write its answer, and that its tool
 * call is executed once. Two lives of a gateway or two gateways, A and B, one
 * journal, one action ledger, one tool.
 *
 * A takes the request and runs attempt 1. It may stand still between any two
 * steps, for ever (a crash) or until long after its ownership ran out (a
 * pause). The client cuts its connection when it likes and sends the same key
 * again, to B. Engine 1 lives on and may call the tool at any time: a fence
 * silences it towards the client, not towards the tool.
 *
 * An atomic step on the journal or the ledger is one transaction. Clocks are
 * left out: ownership runs out at any moment, a fence comes at any moment.
 * What a fence is worth is in lease.pml; what owner_until is worth for leases
 * is in takeover.pml.
 *
 * Parts: SAMEOWNER, B is the next life of A and has its gateway_id.
 * Claims: I1, I4, I5, I9, I11, always. M_NAME and WITNESS_NAME as in lease.pml.
 *
 * Mirrors failover.md 7 and 8. internal/journal/sqlite is to be the journal,
 * the ledger is to come; when their swaps exist, name them here.
 */

#define A 1
#define B 2

#define OPEN        0
#define COMPLETED   1
#define INTERRUPTED 2
#define FAILED      3
#define CANCELLED   4

#define NONE        0
#define IN_PROGRESS 1
#define DONE        2
#define IN_DOUBT    3

#define CLAIM(says, holds) if :: (holds) -> skip :: else -> printf(says); assert(false) fi

/* ---- journal: one row ---- */
bit  row;                     /* the key maps to a request */
byte owner, generation;
byte outcome;
bit  delta;                   /* first_delta_sent, as a commit has it */
#ifdef M_DELTA_NOT_DURABLE
bit  pending;                 /* set in memory only */
#endif
bit  expired;                 /* A's owner_until has passed */

/* ---- ledger: index 1 is the request's call; 2 is the same call under a new request id ---- */
byte call[3];
byte epoch = 1;

/* ---- the truth ---- */
byte dispatched;              /* newest attempt */
byte wrote;                   /* who wrote answer bytes: 1 A, 2 B, 3 both */
bit  whole;                   /* the whole answer was written */
byte runs;                    /* executions of the tool call */
bit  fenced;                  /* attempt 1 */
bit  anew;                    /* the repeat became another request */
bit  second;                  /* B's attempt runs */

#ifdef SAMEOWNER
#define ME(x) A
#else
#define ME(x) x
#endif

#ifdef M_SWAP_WITHOUT_OWNER
#define SAME_OWNER(x) (true)
#else
#define SAME_OWNER(x) (owner == ME(x))
#endif
#ifdef M_SWAP_WITHOUT_GENERATION
#define SAME_GENERATION(g) (true)
#else
#define SAME_GENERATION(g) (generation == g)
#endif
#ifdef M_SWAP_WITHOUT_OUTCOME
#define STILL_OPEN (true)
#else
#define STILL_OPEN (outcome == OPEN)
#endif
#define SWAPS(x, g) (row && SAME_OWNER(x) && SAME_GENERATION(g) && STILL_OPEN)
#ifdef M_DELTA_NOT_SWAPPED
#define DELTA_SWAPS(x, g) (true)
#else
#define DELTA_SWAPS(x, g) SWAPS(x, g)
#endif

#ifdef M_UNKNOWN_IS_SUCCESS
#define UNKNOWN_RESULT 1
#else
#define UNKNOWN_RESULT 0      /* write nothing and abort */
#endif

inline claimOneWriter() {
	CLAIM("violated: I1 two gateways write the answer of one request\n", wrote != 3)
}

/* first_delta_sent: a swap, durable before the write. */
inline setDelta(x, g, ok) {
	atomic {
		if
#ifdef M_DELTA_NOT_DURABLE
		:: DELTA_SWAPS(x, g) -> pending = 1; ok = 1; printf("%c: sets first_delta_sent in memory\n", 64 + x)
#else
		:: DELTA_SWAPS(x, g) -> delta = 1; ok = 1; printf("%c: sets first_delta_sent\n", 64 + x)
		:: DELTA_SWAPS(x, g) -> delta = 1; ok = UNKNOWN_RESULT; printf("%c: sets first_delta_sent, but the result is lost\n", 64 + x)
#endif
		:: !DELTA_SWAPS(x, g) -> ok = 0; printf("%c: may not set first_delta_sent\n", 64 + x)
		:: true -> ok = UNKNOWN_RESULT; printf("%c: does not set first_delta_sent, and the result is lost\n", 64 + x)
		fi }
}

inline close(x, g, how) {
	atomic {
		if
#ifdef M_OUTCOME_NOT_SWAPPED
		:: true ->
#else
		:: SWAPS(x, g) ->
#endif
			printf("%c: closes the request, outcome %d\n", 64 + x, how);
			CLAIM("violated: I4 a second outcome\n", outcome == OPEN && (generation == g || how != FAILED));
			CLAIM("violated: I4 completed is not true\n", how != COMPLETED || whole);
			outcome = how
#ifndef M_OUTCOME_NOT_SWAPPED
		:: else -> printf("%c: may not close the request\n", 64 + x)
#endif
		fi }
}

active proctype GatewayA() {
	bit ok;
#ifdef M_KEY_AFTER_DISPATCH
	atomic { dispatched = 1; printf("A: dispatches attempt 1\n") };
	atomic {
		if
		:: !row -> row = 1; owner = A; generation = 1; printf("A: commits the request\n")
		:: else -> printf("A: finds the key taken\n"); goto out
		fi };
#else
	atomic { row = 1; owner = A; generation = 1; printf("A: commits the request\n") };
	atomic { dispatched = 1; printf("A: dispatches attempt 1\n") };
#endif
	if
	:: true -> setDelta(A, 1, ok);
		if
		:: ok ->
			atomic { wrote = wrote | A; printf("A: writes the first delta\n"); claimOneWriter() };
			if
			:: atomic { whole = 1; printf("A: writes the end of the answer\n") }; close(A, 1, COMPLETED)
			:: true -> close(A, 1, INTERRUPTED)
			fi
		:: else
		fi
	:: true -> close(A, 1, FAILED)                 /* before a delta */
	:: true -> close(A, 1, CANCELLED)              /* the client left before a delta */
	fi;
out:	skip
}

/* A crash loses what was not durable. */
#ifdef M_DELTA_NOT_DURABLE
active proctype Flush() {
	atomic { pending -> delta = 1; printf("journal: first_delta_sent is durable\n") }
}
#endif

active proctype Ownership() {
	atomic { row -> expired = 1; printf("journal: A's ownership runs out\n") }
}

active proctype Fence() {
	atomic { dispatched -> fenced = 1; printf("attempt 1 is fenced\n") }
}

#ifdef M_TAKEOVER_BEFORE_EXPIRY
#define ABANDONED (outcome == OPEN)
#else
#define ABANDONED (outcome == OPEN && expired)
#endif
#define REOPENABLE ((outcome == FAILED || outcome == CANCELLED) && !delta)

#ifdef M_REOPEN_UNFENCED
#define MAY_REPEAT (true)
#else
#define MAY_REPEAT (fenced)
#endif

/* The client's repeat arrives at B. Until a line is possible it is 409. */
active proctype GatewayB() {
	bit ok;
	bit seen;
	if
	:: atomic { dispatched && !row ->
		row = 1; owner = ME(B); generation = 2; anew = 1;
		printf("B: finds no such key, and begins another request\n") }
#ifdef M_TAKEOVER_NOT_SWAPPED
	:: atomic { row && ABANDONED && owner == A && generation == 1 ->
		seen = delta;
		printf("B: reads an abandoned request, first_delta_sent=%d\n", seen) };
	   atomic {
		owner = ME(B); generation = 2;
		printf("B: takes the request over\n");
		if
		:: seen -> outcome = INTERRUPTED; goto out
		:: else
		fi }
#else
	:: atomic { row && ABANDONED && generation == 1 ->
		owner = ME(B); generation = 2;
		printf("B: takes the request over, first_delta_sent=%d\n", delta);
		if
		:: delta ->
#ifdef WITNESS_INTERRUPTED
			CLAIM("witness: taken over and interrupted\n", false);
#endif
			outcome = INTERRUPTED; goto out
		:: else -> CLAIM("violated: I9 the journal has no first delta, and the client has\n", !wrote)
		fi }
#endif
	:: atomic { row && generation == 1 && REOPENABLE ->
		owner = ME(B); generation = 2; outcome = OPEN;
		printf("B: opens a failed request again\n");
		CLAIM("violated: I9 the journal has no first delta, and the client has\n", !wrote) }
	:: atomic { row && generation == 1 && outcome == COMPLETED ->
#ifdef WITNESS_REPLAYED
		CLAIM("witness: a completed answer is replayed\n", false);
#endif
		printf("B: replays the stored answer\n"); goto out }
	:: atomic { row && generation == 1 && (outcome == INTERRUPTED || outcome > COMPLETED && delta) ->
		printf("B: answers the stored error\n"); goto out }
	fi;
	if
	:: atomic { MAY_REPEAT && !anew -> CLAIM("violated: I3 the next attempt begins before this one is fenced\n", fenced) }
	:: atomic { anew -> goto newRequest }
	fi;
#ifndef M_EPOCH_RAISED_LATE
	atomic { epoch = 2; printf("B: raises the ledger's epoch to 2\n") };
#endif
	atomic { dispatched = 2; printf("B: dispatches attempt 2\n") };
#ifdef M_EPOCH_RAISED_LATE
	atomic { epoch = 2; printf("B: raises the ledger's epoch to 2\n") };
#endif
newRequest:
	atomic { second = 1 };
	setDelta(B, 2, ok);
	if
	:: ok ->
		atomic { wrote = wrote | B; printf("B: writes the first delta\n");
			if
			:: anew                        /* another request, as the client was told */
			:: else -> claimOneWriter()
			fi;
#ifdef WITNESS_SECOND
			CLAIM("witness: the second attempt reaches the client\n", false);
#endif
			skip };
		atomic { whole = 1; printf("B: writes the end of the answer\n") };
		close(B, 2, COMPLETED)
	:: else
	fi;
out:	skip
}

/* ==== ledger ==== */

#ifdef M_NO_LEDGER_EPOCH
#define CURRENT(n) (true)
#else
#define CURRENT(n) (n >= epoch)
#endif

inline begun(n, key) {
	call[key] = IN_PROGRESS;
	printf("ledger: attempt %d begins the call under request %d\n", n, key);
	CLAIM("violated: I11 a call begins for an attempt after the next one was dispatched\n", n >= dispatched)
}

inline execute(n) {
	runs++;
	printf("tool: executes the call of attempt %d\n", n);
	CLAIM("violated: I5 the tool call is executed twice\n", runs <= 1)
}

inline complete(key) {
	if
	:: call[key] == IN_PROGRESS || call[key] == IN_DOUBT -> call[key] = DONE; printf("ledger: the call is done\n")
	:: else
	fi
}

/* The engine of attempt n wants the call made, at any moment once it runs. */
inline act(n, key) {
	if
#if defined(M_BEGIN_NOT_ATOMIC)
	:: atomic { CURRENT(n) && call[key] == NONE -> printf("ledger: has no call of attempt %d\n", n) };
	   atomic { CURRENT(n) -> begun(n, key) }; atomic { execute(n) }; atomic { complete(key) }
#elif defined(M_EPOCH_CHECKED_APART)
	:: atomic { CURRENT(n) -> printf("ledger: attempt %d is current\n", n) };
	   if
	   :: atomic { call[key] == NONE -> begun(n, key) }; atomic { execute(n) }; atomic { complete(key) }
	   :: atomic { call[key] != NONE -> skip }
	   fi
#else
	:: atomic { CURRENT(n) && call[key] == NONE -> begun(n, key) };
	   if
	   :: atomic { execute(n) }; atomic { complete(key) }
	   :: skip                              /* the executor is lost before it executes */
	   fi
#endif
	:: atomic { !CURRENT(n) ->
		printf("ledger: attempt %d is stale\n", n);
#ifdef WITNESS_STALE
		CLAIM("witness: a fenced attempt may not act\n", false);
#endif
		skip }
	:: atomic { CURRENT(n) && call[key] == DONE ->
		printf("ledger: attempt %d gets the result there is\n", n);
#ifdef WITNESS_RESULT
		CLAIM("witness: the second attempt gets the first one's result\n", n != 2);
#endif
		skip }
	:: atomic { CURRENT(n) && call[key] == IN_PROGRESS -> printf("ledger: the call is in progress\n") }
	:: atomic { CURRENT(n) && call[key] == IN_DOUBT -> printf("ledger: the call is in doubt\n");
#ifdef M_RETRY_IN_DOUBT
		execute(n); call[key] = DONE
#endif
		}
	:: true                                  /* this engine makes no call */
	fi
}

active proctype Engine1() {
	dispatched >= 1;
	act(1, 1)
}

#ifdef M_NEW_REQUEST_ID
#define KEY2 2
#else
#define KEY2 (1 + anew)
#endif

/* Its call may arrive twice. */
active [2] proctype Engine2() {
	second;
	if
	:: KEY2 == 1 -> act(2, 1)
	:: else -> act(2, 2)
	fi
}

active proctype Until() {
	atomic { call[1] == IN_PROGRESS -> call[1] = IN_DOUBT; printf("ledger: the call's time is over, in doubt\n") }
}

#ifdef M_BEGIN_NOT_DURABLE
active proctype LedgerCrash() {
	atomic { call[1] == IN_PROGRESS -> call[1] = NONE; printf("ledger: dies and forgets what was not durable\n") }
}
#endif
