"""The pause and commit protocol of one engine rank: calls and step facts in, actions out.

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
Reply, Fail or Commit (whose result the core reports), or by the exception it raised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from midstream.errors import (
    Conflict,
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


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the scheduler says at a boundary."""

    num_unfinished: int
    """All live requests: running, queued and preempted."""
    oldest_has_progressed: bool
    """None is live, or the one that was the oldest has sampled a token since the last commit."""


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

    All of its state is four immutable values. With more ranks, ``boundary`` is the place of their vote.
    """

    __slots__ = ("_finish", "_has_committed", "_paused", "_pausing")

    def __init__(self) -> None:
        self._paused: _Paused | None = None
        self._pausing: _Pausing | None = None
        self._finish: _Finish | None = None
        self._has_committed = False

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
        """Whether a step may run after this gap's ``boundary``: unless paused, and while a wait lets requests end."""
        return not self.is_paused or (self._pausing is not None and self._pausing.mode == "wait")

    def admit(self) -> None:
        """Called for each new request; raises ``EnginePaused`` where an abort or wait pause is in flight or holds."""
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
        was_paused = self.is_paused
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
        """The core's clock ended this caller's wait; ``still_running`` says for whom it waited. Nothing if answered."""
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

    def boundary(self, facts: StepFacts) -> list[Action]:
        """After this gap's calls and before the next step: complete the pause and commit the update, if due."""
        actions: list[Action] = []
        if self._pausing is not None and self._is_complete(facts):
            actions += self._complete()
        if self._finish is not None and self._may_commit(facts):
            actions += self._commit(self._finish)
        return actions

    def _is_complete(self, facts: StepFacts) -> bool:
        """Of the pause in flight. No step runs during a boundary, so abort and keep have nothing left to wait for."""
        return self.mode != "wait" or facts.num_unfinished == 0

    def _complete(self) -> list[Action]:
        assert self._pausing is not None
        pausing, clear = self._pausing, self.clear_cache
        self._pausing, self._paused = None, _Paused(pausing.mode, clear)
        value = {"paused": True, "mode": pausing.mode, "clear_cache": clear}
        dropped: list[Action] = [DropKV()] if clear else []
        return dropped + [Reply(op, dict(value)) for op, _ in pausing.callers]

    def _may_commit(self, facts: StepFacts) -> bool:
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
