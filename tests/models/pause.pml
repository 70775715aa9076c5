/* The pause and commit protocol of a lockstep group, as a second model: written from the rules in docs/protocol.md, not
   from the code. Ranks take one log of commands, vote before a forward, and act on verdicts that all votes decide.

     N ranks, V forwards between two votes of a wave, R requests of one or two tokens, WAITS 1: the pause waits.

   A controller pauses, waits for the answer and resumes, CYC times; a second one sends a resume whenever it likes (the
   race that cancels a pause); a third one commits an update, once all ranks have prepared it. -DSTAYS=1: the pause is
   never resumed, and still nobody may wait in a collective. Bounded and complete: the command line says the bounds. Broken on purpose with one of

     -DSTOP_AT_ONCE -DFRONT_END -DOUTLIVES -DNO_BARRIER -DNO_WAVE -DLOCAL_FLAG -DNO_VOTE -DNO_EPOCH -DMAJORITY       */
#ifndef N
#define N 2
#endif
#ifndef V
#define V 1
#endif
#ifndef R
#define R 2
#endif
#ifndef CYC
#define CYC 1
#endif
#ifndef WAITS
#define WAITS 0
#endif
#ifndef RACES
#define RACES 1
#endif
#ifndef COMMITS
#define COMMITS 1
#endif
#ifndef STAYS
#define STAYS 0
#endif
#define LOGLEN (2 * CYC + RACES + COMMITS)

mtype = { PAUSE, RESUME, FINISH, WAKE };          /* what the coordinator sends */
mtype = { RUNNING, PAUSING, PAUSED };
mtype = { STEP, AGAIN, END };
mtype = { NONE, VOTE, FORWARD };                  /* collectives */
mtype = { OPEN, DONE, CANCELLED };                /* answers */

chan inbox[N] = [LOGLEN + 3] of { mtype, byte };  /* from the coordinator, FIFO: command and its position, or wave */
chan work[N] = [R] of { byte };                   /* from clients, in no order with the log: tokens */
chan asks = [4] of { byte, byte };                /* to the coordinator: rank, wave */
chan ready = [N] of { byte };                     /* to the coordinator: this rank has prepared */

byte logged = 0;                                  /* commands in the log so far */
mtype answer[LOGLEN + 1]; byte answered[LOGLEN + 1];
byte stirred = 0, acked_at = 0;                   /* is an acknowledged pause undisturbed? */
bool acked = false;
byte pause_at[N];                                 /* position of the pause in flight */

/* the collective that ranks are in */
mtype kind = NONE; byte inside = 0; byte wave_in, step_in; bit turn = 0;
byte v_pos, v_unfinished, v_work, v_holds; bool v_agrees;
byte r_unfinished, r_work, r_holds; bool r_agrees;
byte forwards = 0;                                /* ranks in a forward now */
byte live[N]; byte ended = 0, refused = 0; byte version[N];
bool parked[N];                                   /* this rank is idle, waits for a message, in no collective */

inline reply(pos, what) {
  assert(answer[pos] == OPEN || answer[pos] == what);   /* all ranks answer alike */
  answer[pos] = what; answered[pos]++;
  assert(answered[pos] <= N)                            /* and once */
  if
  :: answered[pos] == N && what == DONE && paused_op[pos] ->
       if :: stirred == pos -> acked = true :: else fi
  :: else
  fi
}
bool paused_op[LOGLEN + 1];

/* enter and leave: the last one in computes the verdict and lets all out */
inline join(k, w, s) {
  assert(kind == NONE || (kind == k && wave_in == w && step_in == s));
  kind = k; wave_in = w; step_in = s; my = turn; inside++
}
inline leave() {
  if
  :: inside == N -> inside = 0; kind = NONE; turn = 1 - turn
  :: else
  fi
}

#define MAY (state == RUNNING || (state == PAUSING && is_wait))

proctype Rank(byte i) {
  mtype m, state = RUNNING; byte x, at, pos = 0, seen = 0, wave = 0, step = 0; bit my;
  bool in_wave = false, woken = false, holds = false, finish = false, is_wait = false; byte finish_at;
  byte rushes = 0;
gap:
  /* take what there is: any number of messages, in any order of the two channels */
  do
  :: atomic { inbox[i]?m,at ->
       if
       :: m == WAKE ->
#ifdef NO_WAVE
            if :: !in_wave -> woken = true :: else fi
#else
            assert(at <= wave);
            if :: at == wave && !in_wave -> woken = true :: else fi
#endif
       :: m == PAUSE -> pos = at;
            if :: state == PAUSING -> reply(pause_at[i], DONE) :: else fi;   /* never: one pause is open at a time */
            state = PAUSING; pause_at[i] = at; is_wait = WAITS;
#ifdef STOP_AT_ONCE
            state = PAUSED; holds = true; seen = pos; in_wave = false; reply(at, DONE)
#endif
       :: m == RESUME -> pos = at;
            if :: state == PAUSING -> reply(pause_at[i], CANCELLED) :: else fi;
#ifdef NO_BARRIER
            if :: holds -> rushes = 1 :: else fi;
#endif
            state = RUNNING; holds = false; reply(at, DONE)
       :: m == FINISH -> pos = at;
#ifdef NO_VOTE
            assert(forwards == 0); version[i]++; reply(at, DONE)
#else
            finish = true; finish_at = at
#endif
       fi; at = 0; m = NONE; x = 0 }
  :: atomic { work[i]?x ->
       if
       :: state != RUNNING && is_wait -> refused++                 /* told so: retry after the resume */
       :: else -> live[i] = live[i] + x
       fi; x = 0 }
  :: atomic { (in_wave || woken || pos != seen || (live[i] > 0 && MAY)) -> break }
  :: atomic { !in_wave && !woken && pos == seen && !(live[i] > 0 && MAY) && empty(inbox[i]) && empty(work[i]) ->
       parked[i] = true };
end_idle:
     atomic { (nempty(inbox[i]) || nempty(work[i])) -> parked[i] = false }
  od;
  /* what now? */
  if
#ifdef NO_BARRIER
  :: rushes && live[i] > 0 && state == RUNNING -> rushes = 0; goto forward
#endif
  :: else
  fi;
  if
  :: in_wave && step > 0 -> goto forward
  :: in_wave && step == 0 -> goto vote
  :: !in_wave && (woken || pos != seen) -> goto vote
  :: !in_wave && !woken && pos == seen -> asks!i,wave; goto vote
  fi;
vote:
  atomic {
    join(VOTE, wave, 0);
#ifdef NO_EPOCH
    x = (state != RUNNING -> 1 : 0);
#else
    x = pos;
#endif
    if :: inside == 1 -> v_pos = x; v_agrees = true; v_unfinished = 0; v_work = 0; v_holds = 0 :: else fi;
    v_agrees = v_agrees && (v_pos == x);
    v_unfinished = v_unfinished + live[i];
    v_work = v_work + ((live[i] > 0 && MAY) -> 1 : 0);
    v_holds = v_holds + (holds -> 1 : 0);
    if :: inside == N -> r_agrees = v_agrees; r_unfinished = v_unfinished; r_work = v_work; r_holds = v_holds
       :: else fi;
    x = 0; leave()
  }
  atomic { my != turn ->
    in_wave = true;
    if
    :: !r_agrees && (r_holds > 0 || r_work == 0) -> m = AGAIN
    :: !r_agrees && r_holds == 0 && r_work > 0 -> m = STEP;
#ifdef LOCAL_FLAG
         if :: !MAY -> m = AGAIN :: else fi
#endif
    :: r_agrees -> seen = pos;
         if
         :: state == PAUSING && (!is_wait || r_unfinished == 0) -> state = PAUSED; reply(pause_at[i], DONE)
         :: else
         fi;
         if
         :: finish && state != PAUSING -> version[i]++; finish = false; reply(finish_at, DONE)
         :: else
         fi;
         holds = (state == PAUSED);
         if
         :: state == PAUSING || finish || (!holds && r_work > 0) ->
              if :: r_work > 0 -> m = STEP :: else -> m = AGAIN fi
         :: else -> m = END; in_wave = false; woken = false; step = 0;
#ifdef OUTLIVES
              if :: !holds -> wave++ :: else fi
#else
              wave++
#endif
         fi
    fi;
    if
    :: m == STEP -> m = NONE; goto forward
    :: else -> m = NONE; goto gap
    fi
  }
forward:
  atomic { join(FORWARD, wave, step); forwards++; assert(!acked); assert(!holds);
           x = 0; do :: x < N -> assert(version[x] == version[i] || inside < N); x++ :: else -> break od; x = 0;
           leave() }
  atomic { my != turn -> forwards--;
    if
    :: live[i] > 0 && MAY -> live[i]--; if :: live[i] == 0 -> ended++ :: else fi
    :: else
    fi;
    step = (step + 1) % V; goto gap }
}

/* one sequencer for all commands: the order is the same in every inbox */
inline tell(m) {
  atomic {
    logged++; paused_op[logged] = (m == PAUSE);
    if :: m == FINISH -> skip :: else -> stirred = logged; acked = false fi;
    j = 0; do :: j < N -> inbox[j]!m,logged; j++ :: else -> break od; j = 0 }
}
proctype Waker() { byte r, w, j;
end_w: do
  :: atomic { asks?r,w -> j = 0; do :: j < N -> if :: j != r -> inbox[j]!WAKE,w :: else fi; j++ :: else -> break od;
              j = 0; r = 0; w = 0 }
  od }
proctype Pauser() { byte j, n, mine;
  do
  :: n < CYC ->
#ifdef FRONT_END
       atomic { acked = true };
#else
       atomic { tell(PAUSE); mine = logged };
       (answered[mine] == N);
#endif
       if :: !STAYS -> tell(RESUME) :: else fi;
       n++
  :: else -> break
  od }
proctype Racer() { byte j; tell(RESUME) }
proctype Updater() { byte j, n;
#ifdef MAJORITY
  (len(ready) * 2 >= N);
#else
  (len(ready) == N);
#endif
  tell(FINISH);
  atomic { n = 0; j = 0; do :: j < N -> if :: ready??[eval(j)] -> n++ :: else fi; j++ :: else -> break od; assert(n == N) } }
proctype Preparer(byte i) { ready!i }
proctype Client() { byte n;
  do
  :: n < R ->
       if
       :: work[0]!1
       :: work[N - 1]!2
       fi; n++
  :: else -> break
  od }

init { atomic { byte k; mtype z = OPEN;
  k = 0; do :: k <= LOGLEN -> answer[k] = z; k++ :: else -> break od;
  k = 0; do :: k < N -> run Rank(k); k++ :: else -> break od;
  run Waker(); run Client(); run Pauser();
  if :: RACES -> run Racer() :: else fi;
  if :: COMMITS -> run Updater(); k = 0; do :: k < N -> run Preparer(k); k++ :: else -> break od :: else fi } }

/* nothing moves any more: all is answered, nobody waits in a collective, no request is left unless a pause holds it,
   and the last command was a resume, or the racing resume came first and the pause was resumed too: so none is held */
active proctype Monitor() { byte k;
  timeout ->
  assert(inside == 0);
  k = 1; do :: k <= logged -> assert(answered[k] == N); k++ :: else -> break od;
  k = 0; do :: k < N -> assert((live[k] == 0 || STAYS) && parked[k]); k++ :: else -> break od }
