"""The pause and commit protocol of an engine rank, alone or in a group: calls and step facts in, actions out.

Pure logic: no clock, no queue, no tensor. The core is the only caller and calls only between two steps. In every such
gap it hands over the calls it took, then calls :meth:`Protocol.boundary`, then runs a step if ``may_step`` allows one;
when idle it does the same without the step. A pause completes and an update commits in ``boundary`` and nowhere else.

::

               pause(m)              boundary, once m is complete
    running ──────────────► pausing m ──────────────────────────► paused m
       ▲                    │  ▲                                  │  │  ▲
       │                    │  └──────────── pause(any) ──────────┘  │  │
       ├─ resume, time-out ─┤                                        │  │
       │                    └── time-out, if "paused" held before ───┼──┘
       └────────────────────────────── resume ───────────────────────┘
    pausing m, pause(other mode): pausing that mode

    mode    while pausing                  completes                              new requests
    abort   no steps; AbortAll at once     at the boundary of the same gap        EnginePaused
    keep    no steps                       at the boundary of the same gap        queued
    wait    steps go on                    at the first boundary with none live   EnginePaused

A pause that completes with clear_cache drops all KV before it is reported. ``is_paused`` is true from the call on.

Every overlapping, repeated or crossed call ends in one of these ways:

    call       while                outcome
    pause      pausing, same mode   joins: all callers are answered together, clear_cache or-ed
    pause      pausing, other mode  the older callers fail (PauseCancelled), the newer mode decides alone
    pause      paused, same mode    answered at the next boundary, clear_cache or-ed
    pause      paused, other mode   keep→abort ends the held requests, keep→wait lets them run out, →keep only changes
                                    admission
    resume     running              answers {"was_paused": False} and changes nothing
    resume     pausing              the pause's callers fail (PauseCancelled); the engine runs
    time-out   pausing              that caller fails (TimedOut). After the last one: back to what held before, running
                                    or the pause already reported (its KV is dropped again if it asked for that). What
                                    an abort ended stays ended
    time-out   answered already     nothing
    finish     running              commits at the next boundary; after the first commit only once the oldest request
                                    has progressed since the last one (steps go on)
    finish     pausing              held until the pause completes, then as in "paused"
    finish     paused               commits at the next boundary under the policy the pause demands (clear_cache:
                                    recompute, else keep); a finish that names the other fails (Conflict)
    finish     another is held      raises UpdateConflict; the first one stays
    pause      finish held          held on; commits when the pause completes, under the pause's policy
    resume     pausing, finish held if it came during the pause it fails (Conflict) and the update stays prepared; if
                                    it came before, it waits for progress as it did. The same after a time-out that
                                    ends in running
    resume     paused, finish held  commits at the next boundary, before any step, as the pause demanded
    cancel     finish held          the finish fails (UpdateConflict); pauses are not touched
    pause      value unknown        raises InvalidInput; state unchanged

So when no call is open, the state is the one of the last call that was acknowledged. Each call is answered once: by
Reply, Fail or Commit (whose result the core reports), or by the exception it raised. ``shutdown`` fails what is open
and ends what lives; its own answer comes at the boundary that lets all ranks leave.

**Many ranks** run this very class. Every call is a command of one log, which all ranks take in the same order, each in
a gap of its own; the number of those it took is a rank's *position*. Above, "boundary" is then an *agreed vote*: a rank
sends a :class:`StepVote`, all ranks compute the same :func:`verdict` of all votes, and it agrees if all positions are
equal. So what is drawn above changes by the next command of the log or by an agreed verdict, and at equal positions all
ranks are in the same state and give the same answers. A rank's own requests only ever feed its vote.

A *wave* is the time in which the group steps together: every step on every rank, if need be with an empty batch.

::

             kicked: position ≠ that of the last agreed vote        step ─► one forward, then the next gap
    outside  woken: START_DP_WAVE of this wave's number      vote   again ─► take messages, vote, no forward
    a wave   has work itself: wakes the others          ───► ────►  end ─► outside, wave number + 1
             in a wave: every gap ("step"), or when                 stop ─► leave (shutdown)
             dp_sync_interval forwards are done ("interval")

    vote                                                                                          verdict
    not agreed; one is in a global pause and took no resume yet, or nobody can schedule anything  again
    not agreed; otherwise (a rank in a pause that is not agreed yet steps with an empty batch)    step
    agreed, shutdown was taken                                                                    stop
    agreed, then the pause completes (*global pause*) and the update commits where due;
        no call open any more, and paused or without work                                         end
        otherwise, somebody can schedule / nobody can                                             step / again

So a wave goes on while a call is open, since what settles a call may be the end of a request that nobody schedules. A
vote follows every command, also on an idle or paused group, and so the vote after a resume is its barrier. A wake-up is
only for the wave whose number it carries: once that has ended, by a pause or without work, it says nothing.

Replicas that do not step together (dense data parallel) vote through the log: each says :meth:`Protocol.due` when the
open call could be settled at its position, and the coordinator's answer, once all did, is :meth:`Protocol.agree`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from midstream.engine.vote import StepFacts, StepVerdict, StepVote, verdict
from midstream.errors import (
    Conflict,
    EngineDead,
    EnginePaused,
    InvalidInput,
    MidstreamError,
    PauseCancelled,
    TimedOut,
    UpdateConflict,
)
from midstream.types import PAUSE_MODES, KVPolicy, PauseMode

Op = Any
"""Identity of one call: hashable, the caller's choice, unique among the calls not answered yet."""


@dataclass(frozen=True, slots=True)
class AbortAll:
    """End every accepted request with finish reason ``abort``."""


@dataclass(frozen=True, slots=True)
class DropKV:
    """Drop the KV of every live request and empty the prefix cache; the version stays. Doing it twice is harmless."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Swap the prepared update in under ``policy``, then answer ``op`` with what was updated."""

    op: Op
    policy: KVPolicy


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer ``op``: it is done."""

    op: Op
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer ``op``: it ended without its effect."""

    op: Op
    error: MidstreamError


Action = AbortAll | DropKV | Commit | Reply | Fail
"""What the core must do, in the order given, before anything else happens."""


Turn = Literal["idle", "wake", "vote", "step"]
"""What a rank of a group does at the end of a gap; wake: have START_DP_WAVE sent to the others, then vote."""
Outcome = Literal["step", "again", "end", "stop"]


@dataclass(frozen=True, slots=True)
class _Paused:
    """A pause that was reported and holds."""

    mode: PauseMode
    clear_cache: bool

    @property
    def kv_policy(self) -> KVPolicy:
        return "recompute" if self.clear_cache else "keep"


@dataclass(frozen=True, slots=True)
class _Pausing:
    """A pause in flight: each caller with its own clear_cache, so that one who times out takes its wish along."""

    mode: PauseMode
    callers: tuple[tuple[Op, bool], ...]


@dataclass(frozen=True, slots=True)
class _Finish:
    """A finish not carried out yet. ``in_pause``: the engine was pausing or paused when it came."""

    op: Op
    policy: KVPolicy | None
    in_pause: bool


class Protocol:
    """The state machine drawn above. A call that is refused raises and changes nothing.

    All of its state is a few immutable values. ``vote_every``: forwards between two votes of a wave, 1 for "step".
    """

    __slots__ = (
        "_agreed", "_ending", "_finish", "_has_committed", "_holds", "_is_in_wave", "_is_woken", "_paused", "_pausing",
        "_position", "_step", "_vote_every", "_wave",
    )  # fmt: skip

    def __init__(self, vote_every: int = 1) -> None:
        self._paused: _Paused | None = None
        self._pausing: _Pausing | None = None
        self._finish: _Finish | None = None
        self._has_committed = False
        self._ending: tuple[Op, ...] | None = None  # the shutdown calls
        self._vote_every = vote_every
        self._position = self._agreed = 0
        self._wave = 0
        self._step = 0  # forwards since the last one before which a vote was due
        self._is_in_wave = self._is_woken = self._holds = False

    @property
    def wave(self) -> int:
        """How many waves have ended."""
        return self._wave

    @property
    def position(self) -> int:
        """How many commands of the log this rank has taken."""
        return self._position

    @property
    def phase(self) -> Literal["running", "pausing", "paused"]:
        """Paused only while a reported pause holds and no newer one is in flight."""
        if self._pausing is not None:
            return "pausing"
        return "running" if self._paused is None else "paused"

    @property
    def is_paused(self) -> bool:
        """True from the call of a pause, before it completes, until it is resumed or undone."""
        return self.phase != "running"

    @property
    def mode(self) -> PauseMode | None:
        """Mode of the pause in flight, else of the one that holds."""
        pause = self._pausing or self._paused
        return None if pause is None else pause.mode

    @property
    def clear_cache(self) -> bool:
        """Whether the pause in flight (else the one that holds) drops the KV."""
        held = self._paused is not None and self._paused.clear_cache
        if self._pausing is None:
            return held
        rejoined = self._paused is not None and self._paused.mode == self._pausing.mode
        return any(clear for _, clear in self._pausing.callers) or (held and rejoined)

    @property
    def may_step(self) -> bool:
        """Whether own requests may be scheduled: unless paused, and while a wait lets requests end."""
        if self._ending is not None:
            return False
        return not self.is_paused or (self._pausing is not None and self._pausing.mode == "wait")

    def admit(self) -> None:
        """Called for each new request; raises ``EnginePaused`` where an abort or wait pause is in flight or holds."""
        if self._ending is not None:
            raise EngineDead("the engine is shutting down and takes no new requests")
        if self.mode in ("abort", "wait"):
            raise EnginePaused(
                f"the engine is {self.phase} (mode {self.mode!r}) and takes no new requests: retry after it is resumed",
                mode=self.mode,
                phase=self.phase,
            )

    def pause(self, op: Op, mode: PauseMode, clear_cache: bool) -> list[Action]:
        """Begin a pause, or join the one of this mode that is in flight."""
        if mode not in PAUSE_MODES:
            raise InvalidInput(f"unknown pause mode {mode!r}: use one of {', '.join(PAUSE_MODES)}")
        caller = (op, clear_cache)
        if self._pausing is not None and self._pausing.mode == mode:
            self._pausing = replace(self._pausing, callers=(*self._pausing.callers, caller))
            return []
        actions = self._cancel_pausing(f"a newer pause (mode {mode!r})")
        self._pausing = _Pausing(mode, (caller,))
        if mode == "abort":
            actions.append(AbortAll())
        return actions

    def resume(self, op: Op) -> list[Action]:
        """Let the engine run, whatever pause was in flight or held."""
        was_paused, self._holds = self.is_paused, False
        actions: list[Action] = []
        if self._pausing is not None:
            actions += self._cancel_pausing("a resume")
            actions += self._fail_finish_of_pause()
        elif self._paused is not None and self._finish is not None:
            # It came under a reported pause, in this very gap: what that pause demanded is still what it gets.
            policy = self._paused.kv_policy
            if self._finish.policy in (None, policy):
                self._finish = replace(self._finish, policy=policy)
            else:
                actions += self._refuse_policy(policy)
        self._paused = None
        actions.append(Reply(op, {"was_paused": was_paused}))
        return actions

    def pause_timed_out(self, op: Op, still_running: str = "") -> list[Action]:
        """A clock ended this caller's wait; ``still_running`` says for whom it waited. Nothing if answered."""
        pausing = self._pausing
        if pausing is None or all(op != caller for caller, _ in pausing.callers):
            return []
        left = tuple(caller for caller in pausing.callers if caller[0] != op)
        self._pausing = replace(pausing, callers=left) if left else None
        undone = f"undone; the engine is {self.phase}" if not left else "still in flight for its other callers"
        error = TimedOut(
            f"pause (mode {pausing.mode!r}) did not complete in time: {still_running or 'requests still run'}. It is "
            f"{undone}. Give a longer timeout_s, or pause with mode 'keep' or 'abort'",
            mode=pausing.mode,
        )
        actions: list[Action] = []
        if not left and self._paused is not None and self._paused.clear_cache:
            actions.append(DropKV())  # a wait in between may have run steps
        actions.append(Fail(op, error))
        if not self.is_paused:
            actions += self._fail_finish_of_pause()
        return actions

    def finish_update(self, op: Op, kv_policy: KVPolicy | None) -> list[Action]:
        """An update is prepared and verified; it commits at a boundary. None: the pause's policy, else recompute."""
        if self._finish is not None:
            raise UpdateConflict("a finish of this update is waiting for its commit already: wait for its answer")
        self._finish = _Finish(op, kv_policy, self.is_paused)
        return []

    def cancel_update(self, reason: str) -> list[Action]:
        """The prepared update is gone: end the finish that waits for its commit, if there is one."""
        finish, self._finish = self._finish, None
        if finish is None:
            return []
        return [Fail(finish.op, UpdateConflict(f"{reason} before it was committed: start it again"))]

    def shutdown(self, op: Op) -> list[Action]:
        """End everything. Answered, and the outcome "stop", at the boundary where all ranks have taken it."""
        actions = self._cancel_pausing("a shutdown")
        if self._finish is not None:
            actions += self._fail_finish("the engine is shutting down")
        self._ending = (*(self._ending or ()), op)
        return [AbortAll(), *actions]

    def boundary(self, facts: StepFacts) -> list[Action]:
        """One rank alone, after this gap's calls and before the next step: its vote is with itself."""
        return self.conclude(verdict((self.vote(facts),)))[0]

    # -- many ranks ------------------------------------------------------------------------------------------------

    def take(self, position: int) -> None:
        """The next command of the log is taken in this gap: called before what the command itself asks for."""
        if position != self._position + 1:
            raise MidstreamError(f"command {position} of the log came after command {self._position}")
        self._position = position

    def join(self, position: int) -> None:
        """A replica that was started again is as the others are after command ``position``, and takes the next."""
        self._position = position

    def start_wave(self, wave: int) -> None:
        """START_DP_WAVE was taken: another rank has work in ``wave``. One of a wave that has ended says nothing."""
        if wave > self._wave:
            raise MidstreamError(f"START_DP_WAVE of wave {wave} came in wave {self._wave}: they begin in order")
        self._is_woken = self._is_woken or (wave == self._wave and not self._is_in_wave)

    def turn(self, facts: StepFacts) -> Turn:
        """What to do now that this gap's messages are taken. After "wake" and "vote" comes ``conclude``."""
        if self._is_in_wave:
            return "step" if self._step else "vote"
        if self._is_woken or self._position != self._agreed:
            return "vote"
        return "wake" if facts.has_ready and self.may_step else "idle"

    def vote(self, facts: StepFacts) -> StepVote:
        return StepVote(
            wave=self._wave,
            position=self._position,
            num_unfinished=facts.num_unfinished,
            has_work=facts.has_ready and self.may_step,
            oldest_has_progressed=facts.oldest_has_progressed,
            weight_number=facts.weight_number,
            holds=self._holds,
        )

    def conclude(self, verdict: StepVerdict) -> tuple[list[Action], Outcome]:
        """Carry out a vote: in the same gap, and so before the same forward, on every rank."""
        self._is_in_wave = True
        if not verdict.agrees:
            return [], "again" if verdict.holds or not verdict.has_work else "step"
        self._agreed = self._position
        actions = self._settle(verdict)
        if self._ending is not None:
            return actions + [Reply(op, {"stopped": True}) for op in self._ending], "stop"
        self._holds = self.phase == "paused"
        if self._is_open or not (self._holds or not verdict.has_work):
            return actions, "step" if verdict.has_work else "again"
        self._wave, self._step, self._is_in_wave, self._is_woken = self._wave + 1, 0, False, False
        return actions, "end"

    def stepped(self) -> None:
        """A forward was run, with or without a batch of this rank's own."""
        self._step = (self._step + 1) % self._vote_every

    def due(self, facts: StepFacts) -> int | None:
        """Of a replica that steps on its own: the position at which it could settle the open call now, or None."""
        is_due = self._is_open and any((self._may_complete(facts), self._may_commit(facts)))
        return self._position if is_due else None

    def agree(self, position: int) -> list[Action]:
        """All replicas were due at ``position``. Nothing, if a later command came before this one in the log."""
        return self._settle(StepVerdict(agrees=True)) if position == self._position else []

    @property
    def _is_open(self) -> bool:
        return self._pausing is not None or self._finish is not None

    # -- what a boundary does --------------------------------------------------------------------------------------

    def _settle(self, facts: StepFacts | StepVerdict) -> list[Action]:
        """Complete the pause and commit the update, if due."""
        actions: list[Action] = []
        if self._may_complete(facts):
            actions += self._complete()
        if self._finish is not None and self._may_commit(facts):
            actions += self._commit(self._finish)
        return actions

    def _may_complete(self, facts: StepFacts | StepVerdict) -> bool:
        return self._pausing is not None and self._is_complete(facts)

    def _is_complete(self, facts: StepFacts | StepVerdict) -> bool:
        """Of the pause in flight. No step runs during a boundary, so abort and keep have nothing left to wait for."""
        return self.mode != "wait" or facts.num_unfinished == 0

    def _complete(self) -> list[Action]:
        assert self._pausing is not None
        pausing, clear = self._pausing, self.clear_cache
        self._pausing, self._paused = None, _Paused(pausing.mode, clear)
        value = {"paused": True, "mode": pausing.mode, "clear_cache": clear}
        dropped: list[Action] = [DropKV()] if clear else []
        return dropped + [Reply(op, dict(value)) for op, _ in pausing.callers]

    def _may_commit(self, facts: StepFacts | StepVerdict) -> bool:
        """Never under a pause in flight; without a pause only once the oldest request got on since the last commit."""
        if self._pausing is not None:
            return False
        free = self._paused is not None or not self._has_committed
        return free or facts.oldest_has_progressed or (self._finish is not None and self._finish.in_pause)

    def _commit(self, finish: _Finish) -> list[Action]:
        policy: KVPolicy = finish.policy or "recompute"
        if self._paused is not None:
            policy = self._paused.kv_policy
            if finish.policy not in (None, policy):
                return self._refuse_policy(policy)
        self._finish, self._has_committed = None, True
        return [Commit(finish.op, policy)]

    def _refuse_policy(self, demanded: KVPolicy) -> list[Action]:
        why = f"the pause demands kv_policy {demanded!r} (its clear_cache decides) and the finish named the other"
        return self._fail_finish(why)

    def _cancel_pausing(self, by: str) -> list[Action]:
        pausing, self._pausing = self._pausing, None
        if pausing is None:
            return []
        message = f"pause (mode {pausing.mode!r}) was cancelled by {by} before it completed: pause again if needed"
        return [Fail(op, PauseCancelled(message, mode=pausing.mode)) for op, _ in pausing.callers]

    def _fail_finish_of_pause(self) -> list[Action]:
        """A finish that relied on a pause which will not complete."""
        if self._finish is None or not self._finish.in_pause:
            return []
        return self._fail_finish("the pause that this finish was held for ended before it completed")

    def _fail_finish(self, why: str) -> list[Action]:
        assert self._finish is not None
        op, self._finish = self._finish.op, None
        remedy = "nothing was committed and the update stays prepared: finish again, without kv_policy if in doubt"
        return [Fail(op, Conflict(f"{why}; {remedy}"))]
