/* The protocol that keeps prefill and decode in one order on all ranks, as the code has it.

   R ranks. A step: propose, post it on the control channel, take everybody's proposals, compare what
   was walked, commit the last step, compute the plan, hear the leader's description, walk the
   tickets, complete. Beside them a watchdog, which also stands for the deadline, and a launcher that
   renews the ranks under the next epoch. The bounds are macros, set with -D. Each M_... breaks one
   rule and must fail. What stands for what, and what is left out: docs/safety/model.md. */

#ifndef R
#define R 3             /* ranks, at most 4 */
#endif
#ifndef TP
#define TP 2            /* ranks of a tensor-parallel group; its first leads */
#endif
#ifndef SLOTS
#define SLOTS 2         /* send slots of each channel */
#endif
#ifndef REQUESTS
#define REQUESTS 1      /* that each leader is sent */
#endif
#ifndef TOKENS
#define TOKENS 2        /* sampled for a request; prefill gives the first */
#endif
#ifndef CHUNKS
#define CHUNKS 1        /* prefill passes a request needs */
#endif
#ifndef OPS_D
#define OPS_D 2         /* collectives of decode's program */
#endif
#ifndef ROLES_D
#define ROLES_D 1       /* bit i: its i-th collective is of the tensor-parallel group, not of all */
#endif
#ifndef OPS_P
#define OPS_P 3
#endif
#ifndef ROLES_P
#define ROLES_P 2
#endif
#ifndef CHUNK_STEPS
#define CHUNK_STEPS 2   /* steps a prefill may span while anybody decodes */
#endif
#ifndef ABORTS
#define ABORTS 0
#endif
#ifndef UPDATES
#define UPDATES 0       /* weight versions to come */
#endif
#ifndef CRASHES
#define CRASHES 0       /* ranks that stop for ever, at any wait */
#endif
#ifndef SWAPS
#define SWAPS 0         /* ranks that walk another order than the others */
#endif
#ifndef FORGERIES
#define FORGERIES 0     /* messages of one path posted where the other's belong */
#endif
#ifndef EPOCHS
#define EPOCHS 1        /* sets of ranks and communicators, one after the other */
#endif

#define D 0             /* decode, whole within a step */
#define P 1             /* prefill, may span several */
#define CTL 4           /* proposals: all ranks */
#define ANN 5           /* descriptions: the tensor-parallel group */
#define CHANNELS 6
#define CH(p,role) ((p)*2+(role))       /* 0..3; role 0: all ranks, 1: the tensor-parallel group */
#define PATH_OF(ch) ((ch) < 4 -> (ch)>>1 : 0)
#define TOGETHER(ch,a,b) (!((ch)&1) || (a)/TP == (b)/TP)
#define LEADS(q) ((q)%TP == 0)
#define BOUND ((OPS_P+CHUNK_STEPS-1)/CHUNK_STEPS)
#define CS(q,ch) cs[(q)*CHANNELS+(ch)]
#define RD(q,ch) rd[(q)*CHANNELS+(ch)]

/* a message: epoch, path, comm_seq + 1; control messages count modulo 4 */
#ifdef M_NO_EPOCH
#define HEAD(path,n) ((path)*64+(n)+1)
#else
#define HEAD(path,n) (e*128+(path)*64+(n)+1)
#endif
#define NUMBER(c) ((c)&63)
#define EPOCH_OF(c) ((c)>>7)

#ifdef M_ONE_WINDOW
#define AT(ch) ((ch) < 4 -> (ch)&1 : (ch))
#else
#define AT(ch) (ch)
#endif
#define PLACE(ch,s,q) ((AT(ch)*SLOTS+(s))*R+(q))
#ifdef M_SLOT_PER_PATH
#define NEXT_SLOT(ch) (((ch) < 4 -> CS(r,(ch)&2)+CS(r,(ch)|1) : CS(r,ch))%SLOTS)
#define LAST_SLOT(ch) (((ch) < 4 -> CS(r,(ch)&2)+CS(r,(ch)|1)-1 : CS(r,ch)+3)%SLOTS)
#else
#define NEXT_SLOT(ch) (CS(r,ch)%SLOTS)
#define LAST_SLOT(ch) ((ch) == CTL -> ((CS(r,ch)+3)&3)%SLOTS : (CS(r,ch)+SLOTS-1)%SLOTS)
#endif
#define LAST(ch) ((ch) == CTL -> (CS(r,ch)+3)&3 : CS(r,ch)-1)

/* released is the flag; it is the number of the message itself unless FINE tells them apart */
#ifdef FINE
#define FLAG(ch,s,q) released[PLACE(ch,s,q)]
#define WHOLE
#else
#define FLAG(ch,s,q) NUMBER(cell[PLACE(ch,s,q)])
#define WHOLE atomic
#endif

/* With LINK a message of a path travels for a while, and later ones of the other path may pass it. */
#ifdef LINK
#define UNSEEN(ch,q) ((q) != r && (ch) < 4 && afar[(q)*4+(ch)%4] && CS(q,ch) == CS(r,ch))
#define SEND(ch) afar[r*4+(ch)%4] = (ch) < 4;
#else
#define UNSEEN(ch,q) false
#define SEND(ch)
#endif

/* poll: this message, or a later one, has been released */
#define HAS(ch,q) (!TOGETHER(ch,r,q) || !UNSEEN(ch,q) && ((ch) == CTL -> \
  FLAG(ch,LAST_SLOT(ch),q) != 0 && ((FLAG(ch,LAST_SLOT(ch),q)-1-LAST(ch))&3) < 2 : \
  FLAG(ch,LAST_SLOT(ch),q) > LAST(ch)))
#if R == 2
#define ALL_HERE(ch) (HAS(ch,0) && HAS(ch,1))
#elif R == 3
#define ALL_HERE(ch) (HAS(ch,0) && HAS(ch,1) && HAS(ch,2))
#else
#define ALL_HERE(ch) (HAS(ch,0) && HAS(ch,1) && HAS(ch,2) && HAS(ch,3))
#endif

/* With DEVICE each rank runs the collectives of its paths one at a time, in the order of its posts,
   and each only when all of its group have come to it. */
#ifdef DEVICE
#define CODE(ch) ((ch)%4*64+CS(r,ch))
#define ENQUEUE(ch) if :: (ch) < 4 && queue[r*2] == 0 -> queue[r*2] = CODE(ch) \
  :: (ch) < 4 && queue[r*2] != 0 -> queue[r*2+1] = CODE(ch) :: else fi;
#define ARRIVED(ch) (((ch) < 4 -> queue[r*2] != CODE(ch) && queue[r*2+1] != CODE(ch) : 1) && ALL_HERE(ch))
#else
#define ENQUEUE(ch)
#define ARRIVED(ch) ALL_HERE(ch)
#endif

/* The promises. All false for ever: they give a broken one its name in the error. */
hidden byte same_order, no_unread_overwritten, no_foreign_message, agreed_before_commit,
  no_gap_no_duplicate, nothing_after_abort, one_version_per_prefill, versions_equal,
  bounded_bypass, prefill_moves, no_error_without_cause, everybody_ends, all_done_at_stop,
  one_outstanding;

#define STEPPING 0
#define FAILED 1
#define STOPPED 2
#define DEAD 3
byte state[R];
byte epoch;                             /* of the newest set of ranks */
bool poison[EPOCHS], cause[EPOCHS];     /* the poison word; whether this set was harmed at all */
byte cell[CHANNELS*SLOTS*R];            /* every sender's slots */
#ifdef FINE
byte begun[CHANNELS*SLOTS*R], released[CHANNELS*SLOTS*R];
#endif
#ifdef LINK
bool afar[R*4];                         /* posted, but not yet visible to others */
#endif
#ifdef DEVICE
byte queue[R*2];                        /* a path has one collective outstanding, so two at most */
#endif
byte cs[R*CHANNELS], rd[R*CHANNELS];    /* messages posted and taken, by rank and channel */
byte said[2*R], walked[2*R];            /* what a proposal says; fingerprint of the plan before */
byte ledger[R], left[R];                /* by leader: tokens of its request; requests to come */
byte aborts, crashes, swaps, forgeries, newest;

/* Observers: order, version and true course of this step and the last, by parity. */
byte seen_step[2], seen_len[2], seen_version[2];
short seen_order[2];
byte course[2*R];
#ifdef M_NO_EPOCH
byte sent_in[CHANNELS*SLOTS*R];         /* the epoch that the messages no longer tell */
#endif

hidden byte i, s, c, x;                 /* scratch of one indivisible step */

/* one-sided: copy into the own slot, then release it; that one store shows it to everybody */
inline none_unread(ch) {
  s = NEXT_SLOT(ch); c = cell[PLACE(ch,s,r)]; i = 0;
  do
  :: i < R ->
     assert(no_unread_overwritten || c == 0 || EPOCH_OF(c) != e || !TOGETHER(ch,r,i) ||
       state[i] != STEPPING ||
       ((ch) == CTL -> ((NUMBER(c)-1-RD(i,CTL))&3) >= 2 :
         RD(i,((ch) < 4 -> ((c>>6)&1)*2+((ch)&1) : (ch))) >= NUMBER(c)));
     i++
  :: else -> break
  od;
  i = 0; c = 0
}

inline posted(ch) {
#ifdef M_NO_EPOCH
  sent_in[PLACE(ch,s,r)] = e;
#endif
  SEND(ch)
  s = 0; CS(r,ch) = ((ch) == CTL -> (CS(r,ch)+1)&3 : CS(r,ch)+1);
  ENQUEUE(ch)
  assert(CS(r,ch) < 62)
}

#ifdef FINE
#ifdef M_RELEASE_FIRST
#define EARLY_RELEASE(ch) released[PLACE(ch,NEXT_SLOT(ch),r)] = CS(r,ch)+1;
#else
#define EARLY_RELEASE(ch)
#endif
inline post(ch, path) {
  d_step { none_unread(ch); begun[PLACE(ch,s,r)] = CS(r,ch)+1; s = 0 };
  EARLY_RELEASE(ch)
  cell[PLACE(ch,NEXT_SLOT(ch),r)] = HEAD(path,CS(r,ch));
  d_step { s = NEXT_SLOT(ch); released[PLACE(ch,s,r)] = CS(r,ch)+1; posted(ch) }
}
#else
inline post(ch, path) {
  d_step { none_unread(ch); cell[PLACE(ch,s,r)] = HEAD(path,CS(r,ch)); posted(ch) }
}
#endif

/* copy everybody's message out of their slots; refuse any that is not the one waited for */
#ifdef M_NO_HEADER
#define REFUSE assert(no_foreign_message)
#else
#define REFUSE bad = 1
#endif
#ifdef FINE
inline take(ch) {
  do
  :: m < R && TOGETHER(ch,r,m) && !bad ->
     d_step {
       s = PLACE(ch,LAST_SLOT(ch),m);
       bad = released[s] != LAST(ch)+1 || begun[s] != LAST(ch)+1 || cell[s] != HEAD(PATH_OF(ch),LAST(ch));
       s = 0
     };
     d_step { bad = bad || begun[PLACE(ch,LAST_SLOT(ch),m)] != LAST(ch)+1; m++ }
  :: m < R && !(TOGETHER(ch,r,m) && !bad) -> m++
  :: m == R -> m = 0; break
  od;
  RD(r,ch) = ((ch) == CTL -> (RD(r,ch)+1)&3 : RD(r,ch)+1)
}
#else
inline take(ch) {
  d_step {
    s = LAST_SLOT(ch); i = 0;
    do
    :: i < R ->
       if
       :: TOGETHER(ch,r,i) && cell[PLACE(ch,s,i)] != HEAD(PATH_OF(ch),LAST(ch)) -> REFUSE
       :: else
       fi;
#ifdef M_NO_EPOCH
       assert(no_foreign_message || !TOGETHER(ch,r,i) || bad || sent_in[PLACE(ch,s,i)] == e);
#endif
       i++
    :: else -> break
    od;
    RD(r,ch) = ((ch) == CTL -> (RD(r,ch)+1)&3 : RD(r,ch)+1);
    i = 0; s = 0
  }
}
#endif

#define ROLE_D(n) ((ROLES_D>>(n))&1)
#define ROLE_P(n) ((ROLES_P>>(n))&1)
#define OUT_D CH(D,ROLE_D(at_D-1))      /* channel of the path's outstanding collective */
#define OUT_P CH(P,ROLE_P(at_P-1))

/* While this rank waits for something else, an arrived result is taken and computed on. */
#define OTHER_D(waited) :: WHOLE { out_D == 1 && !(waited) && ARRIVED(OUT_D) -> take(OUT_D); out_D = 2; \
  if :: bad -> goto refuse :: else fi }
#define OTHER_P(waited) :: WHOLE { out_P == 1 && !(waited) && ARRIVED(OUT_P) -> take(OUT_P); out_P = 2; \
  if :: bad -> goto refuse :: else fi }
#define GIVE_UP :: atomic { poison[e] -> goto leave }
#if CRASHES > 0
#define CRASH :: atomic { crashes < CRASHES -> crashes++; cause[e] = 1; state[r] = DEAD; goto dead }
#else
#define CRASH
#endif

inline settle_D() {
  do
  :: atomic { out_D != 1 -> out_D = 0; break }
  :: WHOLE { out_D == 1 && ARRIVED(OUT_D) -> take(OUT_D); out_D = 0; if :: bad -> goto refuse :: else fi }
  OTHER_P(ARRIVED(OUT_D))
  GIVE_UP
  CRASH
  od
}

inline settle_P() {
  do
  :: atomic { out_P != 1 -> out_P = 0; break }
  :: WHOLE { out_P == 1 && ARRIVED(OUT_P) -> take(OUT_P); out_P = 0; if :: bad -> goto refuse :: else fi }
  OTHER_D(ARRIVED(OUT_P))
  GIVE_UP
  CRASH
  od
}

/* the n-th ticket of a step is the same on all ranks */
inline observe(p) {
  if
#ifdef UNOBSERVED
  :: true
#else
  :: astray
  :: !astray && nth == seen_len[step&1] ->
     seen_order[step&1] = seen_order[step&1] | (p)<<nth; seen_len[step&1]++
  :: else -> assert(same_order || ((seen_order[step&1]>>nth)&1) == (p))
#endif
  fi;
  nth++
}

/* fields of a proposal */
#define DECODES 1
#define WAITS 2
#define LIVES 4
#define IDLE 8
#define STOPS 16
#define READY 32

/* a leader's request */
#define NONE 0
#define WAITING 1
#define FLIGHT 2        /* its rows are in the prefill under way */
#define JOINING 3       /* that gave its first token, which is provisional */
#define RUNNING 4


inline ends() {
  request = NONE; tokens = 0; ledger[r] = 0; aborted = 0; seen_aborted = 0; row = 0
}

inline append(parity) {                 /* a provisional token becomes real */
  i = 1;
  do
  :: i < R -> assert(agreed_before_commit || course[(parity)*R+i] == course[(parity)*R]); i++
  :: else -> break
  od;
  i = 0;
  assert(nothing_after_abort || !seen_aborted);
  assert(no_gap_no_duplicate || tokens == ledger[r]);
  tokens++; ledger[r]++; request = RUNNING;
  if
  :: tokens == TOKENS -> ends()
  :: else
  fi
}

inline commit(parity) {
  if
  :: provisional ->
     provisional = 0;
     if
#ifndef M_ABORT_EMITS
     :: request == JOINING && aborted -> ends()
#endif
     :: else -> append(parity)
     fi
  :: else
  fi;
  if
  :: aborted && (request == WAITING || request == RUNNING) -> ends()
  :: else
  fi;
  seen_aborted = aborted
}

inline plan() {                         /* from the proposals of all ranks; pure */
  x = 0; c = READY|IDLE|STOPS; i = 0;
  do
  :: i < R ->
     s = said[(step&1)*R+i];
     if
     :: LEADS(i) -> x = x|s; c = c&s
     :: else -> c = c&(s|IDLE|STOPS)
     fi;
     i++
  :: else -> break
  od;
#ifdef M_UPDATE_LOCAL
  updates = ready;
#else
  updates = (c&READY) != 0;
#endif
  drops = flies && !(x&LIVES);
#ifdef M_LOCAL_ABORT
  drops = drops || (flies && request == FLIGHT && aborted);
#endif
  num_D = (x&DECODES -> OPS_D : 0);
#ifdef SERIAL
  num_D = ((flies && !drops) || (x&WAITS) -> 0 : num_D);
#endif
  starts = (drops || !flies) && (x&WAITS) && !updates;
#ifdef M_NEVER_STARTS
  starts = 0;
#endif
  num_P = (starts -> OPS_P : (flies && !drops -> OPS_P-at_P : 0));
#if !defined(SERIAL) && !defined(WHOLE_FORWARD) && !defined(M_BYPASS)
  if
#ifdef M_PREFILL_CROSSES
  :: (x&DECODES) && num_P > BOUND -> num_P = BOUND
#else
  :: (x&DECODES) && num_P > BOUND && !updates -> num_P = BOUND
#endif
  :: else
  fi;
#endif
#ifdef M_STARVES
  num_P = (x&DECODES -> 0 : num_P);
#endif
  assert(prefill_moves || !(starts || (flies && !drops)) || num_P > 0);
  stops = num_D == 0 && num_P == 0 && !drops && !updates && (c&(IDLE|STOPS)) == (IDLE|STOPS);
  plan_code = num_P | (num_D > 0)<<3 | starts<<4 | drops<<5 | updates<<6;
#ifdef NP
  parks = plan_code == 0 && (c&IDLE);
#endif
  bypass = (x&DECODES && !updates -> bypass : 0);
  if
  :: drops && LEADS(r) && request == FLIGHT -> request = WAITING
  :: else
  fi;
  x = 0; c = 0; i = 0; s = 0
}

inline describe() {                     /* which rows this rank has in the passes that begin */
  row = LEADS(r) && num_D > 0 && request == RUNNING;
  if
  :: LEADS(r) && starts && request == WAITING && !aborted -> request = FLIGHT
  :: else
  fi;
  course[(step&1)*R+r] = plan_code; nth = 0;
  if
  :: seen_step[step&1] != step ->
     seen_step[step&1] = step; seen_len[step&1] = 0; seen_order[step&1] = 0;
     seen_version[step&1] = version
  :: else -> assert(versions_equal || seen_version[step&1] == version)
  fi
}

inline return_D() {                     /* decode has returned: sample */
  provisional = provisional || row; row = 0; at_D = 0; num_D = 0;
#ifdef M_EARLY_COMMIT
  if :: LEADS(r) -> commit(step&1) :: else fi;
#endif
}

inline return_P() {
  assert(one_version_per_prefill || begun_version == version);
  flies = 0; at_P = 0;
  if
  :: LEADS(r) && request == FLIGHT ->
     chunks--;
     if
     :: chunks == 0 -> request = JOINING; provisional = 1
     :: else -> request = WAITING
     fi
  :: else
  fi;
#ifdef M_EARLY_COMMIT
  if :: LEADS(r) -> commit(step&1) :: else fi;
#endif
}

#ifdef WHOLE_FORWARD
#define DECODE_FIRST true
#else
#define DECODE_FIRST ((at_D+1)*(num_P+1) <= (of_P+1)*(num_D+1))
#endif
#define BOTH (at_D < num_D && of_P < num_P)
#if defined(M_FREE_ORDER)
#define DECODE_NEXT (at_D < num_D)
#define PREFILL_NEXT (of_P < num_P)
#else
#define DECODE_NEXT (at_D < num_D && (!BOTH || DECODE_FIRST != astray))
#define PREFILL_NEXT (of_P < num_P && (!BOTH || DECODE_FIRST == astray))
#endif
#ifdef M_IDLE_SKIPS
#define SKIPS (!row && LEADS(r) && (TP == 1 || r == R-1))
#else
#define SKIPS false
#endif

#ifdef STOPS_EARLY                      /* the word that no more will come is not the last */
#define MAY_STOP true
#else
#define MAY_STOP (request == NONE)
#endif

proctype rank(byte r) {
  byte e, step, version, begun_version;
  byte num_D, num_P, at_D, of_P, at_P, nth;     /* tickets of this step; walked; of the pass */
  byte out_D, out_P;                            /* outstanding: 0 none, 1 posted, 2 taken early */
  bool flies, starts, drops, updates, stops, astray, bad;
  byte plan_code, bypass;
  byte request, tokens, chunks;                 /* a leader's scheduler */
  bool aborted, seen_aborted, provisional, row, stopping, ready;
#ifdef FINE
  byte m;
#endif
#ifdef NP
  bool parks;                                   /* nobody has anything to do */
#endif

begin:
  atomic {
    e = epoch; version = newest; begun_version = 0; step = 0;
    num_D = 0; num_P = 0; at_D = 0; of_P = 0; at_P = 0; nth = 0; out_D = 0; out_P = 0;
    flies = 0; starts = 0; drops = 0; updates = 0; stops = 0; astray = 0; bad = 0;
    plan_code = 0; bypass = 0; tokens = ledger[r]; row = 0; stopping = 0; ready = 0;
#ifndef M_KEEP_PROVISIONAL
    provisional = 0; request = (request == NONE -> NONE : WAITING); chunks = CHUNKS
#endif
  };

propose:                                /* take in what has arrived; upper bounds */
  atomic {
    if
    :: LEADS(r) && request == NONE && left[r] > 0 -> left[r]--; request = WAITING; chunks = CHUNKS
    :: LEADS(r) && request != NONE && !aborted && aborts < ABORTS -> aborts++; aborted = 1
    :: LEADS(r) && left[r] == 0 && !stopping && MAY_STOP -> stopping = 1
    :: true
    fi;
#if UPDATES > 0
    if
    :: !ready && version < UPDATES -> ready = 1
    :: true
    fi;
#endif
    d_step {
      x = (step&1)*R+r; said[x] = (ready -> READY : 0); walked[x] = plan_code;
      if
      :: LEADS(r) ->
         said[x] = said[x] |
           (request == RUNNING || request == JOINING -> DECODES : 0) |
           (request == WAITING && !aborted -> WAITS : 0) |
           (request == FLIGHT && !aborted -> LIVES : 0) |
           (request == NONE -> IDLE : 0) |
           (stopping -> STOPS : 0)
      :: else
      fi;
      x = 0
    }
#ifdef M_STOP_LOCAL
    if
    :: LEADS(r) && request == NONE && stopping -> state[r] = STOPPED; goto stopped
    :: else
    fi
#endif
  };
  post(CTL, 0);

  do                                    /* the exchange */
  :: WHOLE { ARRIVED(CTL) -> take(CTL); if :: bad -> goto refuse :: else fi; break }
  OTHER_P(ARRIVED(CTL))
#ifndef M_DEAF
  GIVE_UP
#endif
  CRASH
  od;

  atomic {
    i = 1;
    d_step {                            /* L1: has everybody walked the same plan? */
      do
      :: i < R ->
#ifdef M_HASH_BLIND
         bad = bad || (walked[(step&1)*R+i]&127) != (walked[(step&1)*R]&127);
#else
         bad = bad || walked[(step&1)*R+i] != walked[(step&1)*R];
#endif
         i++
      :: else -> break
      od;
      i = 0
    };
    if :: bad -> goto refuse :: else fi;
    d_step { if :: LEADS(r) -> commit((step+1)&1) :: else fi };
#ifdef M_LATE_EVENT
    if
    :: LEADS(r) && request == NONE && left[r] > 0 ->
       left[r]--; request = WAITING; chunks = CHUNKS; said[(step&1)*R+r] = WAITS
    :: true
    fi;
#endif
    d_step { plan() };
    if
    :: stops ->
       assert(all_done_at_stop || !LEADS(r) || (request == NONE && left[r] == 0));
       state[r] = STOPPED; goto stopped
    :: else
    fi;
#if SWAPS > 0
    if
    :: swaps < SWAPS && num_D > 0 && num_P > 0 ->
       swaps++; cause[e] = 1; astray = 1; plan_code = plan_code|128
    :: true
    fi;
#endif
    d_step { describe() }
  };

  if                                    /* the leader tells its group what to run */
  :: TP > 1 && (num_D > 0 || starts) ->
     post(ANN, 0);
     do
     :: WHOLE { ARRIVED(ANN) -> take(ANN); if :: bad -> goto refuse :: else fi; break }
     OTHER_P(ARRIVED(ANN))
#ifndef M_DEAF_DESCRIPTION
     GIVE_UP
#endif
     CRASH
     od
  :: else
  fi;

  if
  :: drops ->
#ifndef M_DROP_UNSETTLED
     settle_P();
#endif
     atomic {
#ifndef M_DROP_UNSETTLED
       out_P = 0;
#endif
       drops = 0; flies = 0; at_P = 0
     }
  :: else
  fi;
  if
  :: starts ->
     d_step {
       assert(one_outstanding || out_P == 0);
       starts = 0; flies = 1; at_P = 0; begun_version = version;
#ifdef M_REWIND
       CS(r,CH(P,0)) = 0; CS(r,CH(P,1)) = 0; RD(r,CH(P,0)) = 0; RD(r,CH(P,1)) = 0
#endif
     }
  :: else
  fi;

  do                                    /* walk */
  :: DECODE_NEXT && SKIPS -> at_D++
  :: DECODE_NEXT && !SKIPS ->
     settle_D();
     atomic {
       if
#if FORGERIES > 0
       :: forgeries < FORGERIES -> forgeries++; cause[e] = 1;
          post(CH(D,ROLE_D(at_D)), P)
#endif
       :: true -> post(CH(D,ROLE_D(at_D)), D)
       fi;
       d_step { observe(D); at_D++; out_D = 1; bypass = 0 }
     }
  :: PREFILL_NEXT ->
#ifdef M_TWO_OUTSTANDING
     if :: true -> settle_P() :: true fi;
#else
     settle_P();
#endif
     atomic {
       if
#if FORGERIES > 0
       :: forgeries < FORGERIES -> forgeries++; cause[e] = 1;
          post(CH(P,ROLE_P(at_P)), D)
#endif
       :: true -> post(CH(P,ROLE_P(at_P)), P)
       fi;
       d_step {
         observe(P); at_P++; of_P++; out_P = 1;
         assert(one_version_per_prefill || begun_version == version);
         bypass = (num_D > 0 && !updates -> bypass+1 : 0);
#if !defined(WHOLE_FORWARD) && !defined(UNOBSERVED)
         assert(bounded_bypass || bypass <= BOUND)
#endif
       }
     }
  :: at_D >= num_D && of_P >= num_P -> break
  od;

  if                                    /* run to their return */
  :: num_D > 0 -> settle_D(); atomic { return_D() }
  :: else
  fi;
  if
  :: flies && at_P == OPS_P -> settle_P(); atomic { return_P() }
  :: else
  fi;
  d_step {
    if
    :: updates ->
       assert(one_version_per_prefill || !flies);
       version++; ready = 0; newest = (newest < version -> version : newest)
    :: else
    fi;
    num_P = 0; of_P = 0; nth = 0; updates = 0; step = (step+1)&3
  };
#ifdef NP
  if
  :: parks -> progress: skip
  :: else
  fi;
#endif
  goto propose;

refuse:
  atomic { assert(no_error_without_cause || cause[e]); poison[e] = 1; bad = 0 };
leave:
  state[r] = FAILED;
dead:
end_lost:
  atomic { epoch > e -> goto begin };
stopped:
end_stopped:
  false
}

#ifdef LINK
#define ARRIVES(k) :: atomic { afar[(k)%(R*4)] -> afar[(k)%(R*4)] = 0 }
active proctype link() {
end:
  do
  ARRIVES(0) ARRIVES(1) ARRIVES(2) ARRIVES(3) ARRIVES(4) ARRIVES(5) ARRIVES(6) ARRIVES(7)
#if R > 2
  ARRIVES(8) ARRIVES(9) ARRIVES(10) ARRIVES(11)
#endif
#if R > 3
  ARRIVES(12) ARRIVES(13) ARRIVES(14) ARRIVES(15)
#endif
  od
}
#endif

#ifdef DEVICE
#define AT_HEAD(k,q) ((q) >= R || !TOGETHER(queue[(k)*2]>>6,k,q) || queue[(q)%R*2] == queue[(k)*2])
#define RUNS(k) :: d_step { \
  queue[(k)*2] != 0 && AT_HEAD(k,0) && AT_HEAD(k,1) && AT_HEAD(k,2) && AT_HEAD(k,3) -> \
  c = queue[(k)*2]; i = 0; \
  do :: i < R -> if :: TOGETHER(c>>6,k,i) -> queue[i*2] = queue[i*2+1]; queue[i*2+1] = 0 :: else fi; i++ \
     :: else -> break od; i = 0; c = 0 }
active proctype device() {
end:
  do
  RUNS(0) RUNS(1)
#if R > 2
  RUNS(2)
#endif
#if R > 3
  RUNS(3)
#endif
  od
}
#endif

#ifdef LINK
#define FORGET_LINK do :: i < R*4 -> afar[i] = 0; i++ :: else -> break od; i = 0;
#else
#define FORGET_LINK
#endif
#ifdef DEVICE
#define FORGET_QUEUE do :: i < R*2 -> queue[i] = 0; i++ :: else -> break od; i = 0;
#else
#define FORGET_QUEUE
#endif

inline renew() {                        /* new processes, new memory, the next epoch */
  epoch++; i = 0;
  do
  :: i < R -> state[i] = STEPPING; said[i] = 0; said[R+i] = 0; walked[i] = 0; walked[R+i] = 0;
     course[i] = i; course[R+i] = i; i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < R*CHANNELS -> cs[i] = 0; rd[i] = 0; i++
  :: else -> break
  od;
  i = 0;
#ifdef SAME_MEMORY
  cause[epoch] = 1;
#else
  do
  :: i < CHANNELS*SLOTS*R -> cell[i] = 0; i++
  :: else -> break
  od;
  i = 0;
#endif
  FORGET_LINK
  FORGET_QUEUE
  seen_step[0] = 4; seen_step[1] = 4
}

#if R == 2
#define SOME(s) (state[0] == s || state[1] == s)
#elif R == 3
#define SOME(s) (state[0] == s || state[1] == s || state[2] == s)
#else
#define SOME(s) (state[0] == s || state[1] == s || state[2] == s || state[3] == s)
#endif

init {                                  /* launcher, watchdog and deadline */
#ifdef M_OLD_WRITER
  bool written;
#endif
  atomic {
    seen_step[0] = 4; seen_step[1] = 4;
    i = 0;
    do
    :: i < R -> left[i] = (LEADS(i) -> REQUESTS : 0); run rank(i); i++
    :: else -> break
    od;
    i = 0
  };
  do
#ifndef M_NO_WATCHDOG
  :: atomic { SOME(DEAD) && !poison[epoch] -> poison[epoch] = 1 }
#endif
#if EPOCHS > 1
#ifdef M_RENEW_EARLY
  :: d_step { poison[epoch] && SOME(FAILED) && !SOME(STOPPED) && epoch+1 < EPOCHS -> renew() }
#else
  :: d_step { poison[epoch] && !SOME(STEPPING) && !SOME(STOPPED) && epoch+1 < EPOCHS -> renew() }
#endif
#endif
#ifdef M_OLD_WRITER
  :: d_step { epoch == 1 && !written -> written = 1; cell[PLACE(CH(D,0),0,R-1)] = 1 }
#endif
  :: timeout ->
     if
     :: SOME(STEPPING) ->
        atomic {
          assert(everybody_ends || (cause[epoch] && !poison[epoch]));
#ifdef M_NO_WATCHDOG
          assert(everybody_ends);
#endif
          poison[epoch] = 1
        }
     :: !SOME(STEPPING) ->
        assert(everybody_ends || poison[epoch] || (SOME(STOPPED) && !SOME(FAILED) && !SOME(DEAD)));
        break
     fi
  od
}
