"""The pause and commit protocol: every reachable state up to stated bounds, seeded mutants, and the public cases.

The enumeration explores Protocol together with ``World``, a model of the core, its requests and its callers that
keeps its own books: which calls are open, what was acknowledged last, which requests hold KV. Every rule is checked
against those books, so the protocol's private state is read only to copy it and to tell states apart.

Bounds: two (or one) live requests, two (or three) pause calls open at once, one finish held and a second one tried.
Nothing limits how many calls a run makes, so the state space is closed: the frontier empties.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from midstream.engine.protocol import AbortAll, Action, Commit, DropKV, Fail, Protocol, Reply
from midstream.engine.vote import StepFacts
from midstream.errors import (
    Conflict,
    EnginePaused,
    InvalidInput,
    PauseCancelled,
    TimedOut,
    UpdateConflict,
)
from midstream.types import PAUSE_MODES


class Violation(AssertionError):
    """A rule of the protocol was broken."""


def need(condition: object, message: str) -> None:
    if not condition:
        raise Violation(message)


Pause = tuple[Any, str, bool]  # op, mode, clear_cache of an open pause call
Event = tuple[Any, ...]


@dataclass(slots=True)
class World:
    """What a perfect observer outside the protocol knows."""

    requests: tuple[bool, ...] = ()  # in arrival order: holds KV
    dirty: bool = False  # a step ran since the KV was dropped last
    progressed: bool = False  # the oldest request has sampled since the last commit
    committed: bool = False
    acked: tuple[str, bool] | None = None  # (mode, clear_cache) of the last acknowledged call; None: running
    pauses: tuple[Pause, ...] = ()
    finish: tuple[str | None, bool] | None = None  # policy named (or promised), came during a pause

    def key(self) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
        return (self.requests, self.dirty, self.progressed, self.committed, self.acked, self.pauses, self.finish)

    def copy(self) -> World:
        return World(*self.key())

    @property
    def facts(self) -> StepFacts:
        return StepFacts(len(self.requests), self.progressed or not self.requests)

    @property
    def mode(self) -> str | None:
        """The newest pause decides: one in flight, else the one reported."""
        if self.pauses:
            return self.pauses[0][1]
        return self.acked[0] if self.acked else None

    @property
    def may_step(self) -> bool:
        return self.pauses[0][1] == "wait" if self.pauses else self.acked is None

    @property
    def demanded(self) -> str:
        assert self.acked is not None
        return "recompute" if self.acked[1] else "keep"

    @property
    def is_quiet(self) -> bool:
        return not self.pauses and self.finish is None


# ---------------------------------------------------------------------------------------------- executing actions


def execute(world: World, event: Event, actions: list[Action]) -> None:
    """Carry the actions out as the core would, and check each against the books."""
    if not actions:
        return
    before = world.copy()
    clear = any(p[2] for p in before.pauses)
    if before.acked and before.mode == before.acked[0]:
        clear = clear or before.acked[1]
    for action in actions:
        if isinstance(action, AbortAll):
            need(event[:2] == ("pause", "abort"), "AbortAll outside pause(abort)")
            world.requests = ()
        elif isinstance(action, DropKV):
            world.requests = (False,) * len(world.requests)
            world.dirty = False
        elif isinstance(action, Commit):
            _check_commit(world, event, action)
        elif isinstance(action, Reply) and action.op == "r":
            need(event[0] == "resume", "a reply to a resume that was not called")
            need(action.value == {"was_paused": before.mode is not None}, f"resume answered {action.value}")
            world.acked = None
        elif isinstance(action, Reply):
            pause = _close_pause(world, action.op)
            need(event[0] == "boundary", "a pause was reported outside a boundary")
            need(pause[1] == "keep" or not world.requests, f"{pause[1]} was reported with requests live")
            need(not (clear and world.dirty), "a pause with clear_cache was reported and KV is held")
            need(action.value == {"paused": True, "mode": pause[1], "clear_cache": clear}, f"pause: {action.value}")
            world.acked = (pause[1], clear)
        elif action.op == "f":
            _check_finish_failed(before, world, event, action)
        else:
            pause = _close_pause(world, action.op)
            if isinstance(action.error, TimedOut):
                need(event == ("timeout", action.op), "TimedOut without a time-out")
            else:
                need(type(action.error) is PauseCancelled, f"a pause failed with {action.error!r}")
                need(
                    event[0] == "resume" or (event[0] == "pause" and event[1] != pause[1]),
                    "a pause was cancelled by nobody",
                )


def _close_pause(world: World, op: Any) -> Pause:
    found = [p for p in world.pauses if p[0] == op]
    need(len(found) == 1, f"a call was answered that is not open: {op!r}")
    world.pauses = tuple(p for p in world.pauses if p[0] != op)
    return found[0]


def _check_commit(world: World, event: Event, action: Commit) -> None:
    need(world.finish is not None and action.op == "f", "a commit that nobody asked for")
    assert world.finish is not None
    named, in_pause = world.finish
    need(event[0] == "boundary", "a commit outside a boundary")
    need(not world.pauses, "a commit under a pause in flight")
    if world.acked:
        need(action.policy == world.demanded, f"commit with {action.policy} under a pause that demands the other")
        need(named in (None, action.policy), "commit with another policy than the finish named")
    else:
        need(action.policy == (named or "recompute"), f"commit with {action.policy}, the finish named {named}")
        need(
            not world.committed or in_pause or world.facts.oldest_has_progressed,
            "a commit before the oldest request progressed",
        )
    if action.policy == "recompute":
        world.requests = (False,) * len(world.requests)
    world.finish, world.committed, world.progressed = None, True, False


def _check_finish_failed(before: World, world: World, event: Event, action: Fail) -> None:
    need(world.finish is not None, "a finish was answered twice")
    assert world.finish is not None
    named, in_pause = world.finish
    world.finish = None
    if isinstance(action.error, UpdateConflict):
        need(event[0] == "cancel", "a finish was cancelled by nobody")
        return
    need(type(action.error) is Conflict, f"a finish failed with {action.error!r}")
    undone = event[0] in ("resume", "timeout") and before.pauses and in_pause
    acked = world.acked or before.acked
    clashes = event[0] in ("boundary", "resume") and acked and named not in (None, "recompute" if acked[1] else "keep")
    need(undone or clashes, "a finish failed without a reason")


# --------------------------------------------------------------------------------------------------------- events


def events(world: World, max_requests: int, max_pauses: int) -> Iterator[Event]:
    """Everything that may happen next. A boundary is followed by the step it allows, one event per outcome."""
    yield ("boundary",)
    if len(world.requests) < max_requests:
        yield ("add",)
    for index in range(len(world.requests)):
        yield ("client abort", index)
    if len(world.pauses) < max_pauses:
        for mode in PAUSE_MODES:
            yield ("pause", mode, False)
            yield ("pause", mode, True)
    yield ("resume",)
    for op, _, _ in world.pauses:
        yield ("timeout", op)
    for policy in (None, "recompute", "keep"):
        yield ("finish", policy)
    yield ("cancel",)
    yield ("refused",)


def apply(protocol: Protocol, world: World, event: Event) -> None:
    """One event, all but the step. Checks what must hold right after it."""
    name = event[0]
    before = world.copy()
    if name == "boundary":
        execute(world, event, protocol.boundary(world.facts))
        need(
            not world.pauses or (world.mode == "wait" and world.requests),
            "a boundary left a pause unanswered that waits for nothing",
        )
        if world.finish is not None and not world.pauses:
            held = world.acked is None and world.committed and not world.finish[1]
            need(held and not world.facts.oldest_has_progressed, "a boundary left a finish that waits for nothing")
    elif name == "add":
        allowed = world.mode in (None, "keep")
        try:
            protocol.admit()
        except EnginePaused as error:
            need(error.retryable and not allowed, "a request was refused that should be accepted")
        else:
            need(allowed, f"a request was admitted during {world.mode}")
            world.requests += (False,)
    elif name == "client abort":
        world.requests = world.requests[: event[1]] + world.requests[event[1] + 1 :]
    elif name == "pause":
        op = len(world.pauses)
        joins = bool(world.pauses) and world.mode == event[1]
        world.pauses += ((op, event[1], event[2]),)
        execute(world, event, protocol.pause(op, event[1], event[2]))
        need(len(world.pauses) == (len(before.pauses) if joins else 0) + 1, "an older pause of another mode lives on")
        need(event[1] != "abort" or not world.requests, "pause(abort) left requests live")
    elif name == "resume":
        if before.acked and not before.pauses and world.finish and world.finish[0] in (None, world.demanded):
            world.finish = (world.demanded, True)  # what the reported pause promised still holds
        execute(world, event, protocol.resume("r"))
        need(world.acked is None and not world.pauses, "resume did not answer the pause it cancelled, or itself")
        if before.pauses and before.finish and before.finish[1]:
            need(world.finish is None, "resume left a finish that was held for the cancelled pause")
    elif name == "timeout":
        execute(world, event, protocol.pause_timed_out(event[1]))
        need(len(world.pauses) == len(before.pauses) - 1, "a time-out did not end exactly its own call")
    elif name == "finish" and world.finish is None:
        world.finish = (event[1], world.mode is not None)
        execute(world, event, protocol.finish_update("f", event[1]))
    elif name == "finish":
        _refused(protocol, UpdateConflict, lambda: protocol.finish_update("second", event[1]))
    elif name == "refused":
        _refused(protocol, InvalidInput, lambda: protocol.pause("bad", "stop", True))  # type: ignore[arg-type]
        need(protocol.pause_timed_out("gone") == [], "a time-out of a call that is answered did something")
    elif name == "cancel":
        execute(world, event, protocol.cancel_update("gone"))
        need(world.finish is None, "cancel_update left the finish open")


def _refused(protocol: Protocol, kind: type[Exception], call: Callable[[], object]) -> None:
    before = inner_state(protocol)
    try:
        call()
    except kind:
        need(inner_state(protocol) == before, "a refused call changed the state")
        return
    raise Violation(f"a call was accepted that should end in {kind.__name__}")


def step_outcomes(world: World) -> Iterator[World]:
    """All outcomes of one step: the oldest request is always served, the younger ones may not be; a request without
    KV gets it, one with KV samples and may end with that token."""
    for num_served in range(1, len(world.requests) + 1):
        ends = [(False, True) if has_kv else (False,) for has_kv in world.requests[:num_served]]
        for first in ends[0]:
            for rest in ends[1] if num_served > 1 else (False,):
                ended = (first, rest)[:num_served]
                kept = tuple(True for end in ended if not end) + world.requests[num_served:]
                progressed = world.progressed or world.requests[0]
                yield _with(world, requests=kept, dirty=True, progressed=progressed)


def _with(world: World, **changes: Any) -> World:
    new = world.copy()
    for name, value in changes.items():
        setattr(new, name, value)
    return new


def check_state(protocol: Protocol, world: World) -> None:
    """What must hold in every reachable state."""
    need(len({p[1] for p in world.pauses}) <= 1, "pauses of two modes in flight")
    need(protocol.may_step == world.may_step, f"may_step is {protocol.may_step}: last acked {world.acked}")
    need(protocol.mode == world.mode, f"mode is {protocol.mode}, not {world.mode}")
    need(protocol.is_paused == (world.mode is not None), "is_paused")
    phase = "pausing" if world.pauses else "paused" if world.acked else "running"
    need(protocol.phase == phase, f"phase is {protocol.phase}, not {phase}: not the last acknowledged call's")
    if not world.pauses:
        need(protocol.clear_cache == bool(world.acked and world.acked[1]), "clear_cache is not the acknowledged one")
        need(not (world.acked and world.acked[1] and world.dirty), "KV is held under a pause that cleared it")
    try:
        protocol.admit()
    except EnginePaused:
        need(world.mode in ("abort", "wait"), "admission refused")
    else:
        need(world.mode not in ("abort", "wait"), f"admission open during {world.mode}")


# ---------------------------------------------------------------------------------------------------- exploration


def canonical(protocol: Protocol, world: World) -> None:
    """Callers of one kind are interchangeable: number the open pause calls by what they asked for."""
    if not world.pauses:
        return
    order = sorted(world.pauses, key=lambda p: p[2])
    names = {p[0]: index for index, p in enumerate(order)}
    world.pauses = tuple((names[op], mode, clear) for op, mode, clear in order)
    pausing = protocol._pausing
    if pausing is not None:
        callers = sorted(((names.get(op, "gone"), clear) for op, clear in pausing.callers), key=str)
        protocol._pausing = replace(pausing, callers=tuple(callers))


def fork(protocol: Protocol) -> Protocol:
    """A copy; all of the state is in the slots and immutable."""
    return copy.copy(protocol)


def inner_state(protocol: Protocol) -> tuple[Any, ...]:
    """Everything the protocol of one rank decides by; where it is in log and waves matters to groups only."""
    return (protocol._paused, protocol._pausing, protocol._finish, protocol._has_committed)


@dataclass
class Explored:
    worlds: list[World] = field(default_factory=list)
    boundary_edges: list[list[int]] = field(default_factory=list)
    resume_edges: list[int] = field(default_factory=list)
    num_transitions: int = 0


def explore(cls: type[Protocol], max_requests: int, max_pauses: int) -> Explored:
    """Breadth first over every reachable state; a Violation carries the shortest way to it."""
    result = Explored()
    ids: dict[tuple[Any, ...], int] = {}
    came: list[tuple[int, Event]] = []
    frontier: deque[tuple[int, Protocol, World]] = deque()

    def visit(protocol: Protocol, world: World, source: int, event: Event) -> int:
        canonical(protocol, world)
        key = (inner_state(protocol), world.key())
        known = ids.get(key)
        if known is not None:
            return known
        check_state(protocol, world)
        ids[key] = index = len(came)
        came.append((source, event))
        result.worlds.append(world)
        result.boundary_edges.append([])
        result.resume_edges.append(-1)
        frontier.append((index, protocol, world))
        return index

    visit(cls(), World(), -1, ())
    while frontier:
        index, protocol, world = frontier.popleft()
        for event in events(world, max_requests, max_pauses):
            p, w = fork(protocol), world.copy()
            try:
                apply(p, w, event)
                if event[0] == "boundary" and p.may_step and w.requests:
                    check_state(p, w)
                    targets = [visit(fork(p), after, index, event) for after in step_outcomes(w)]
                else:
                    targets = [visit(p, w, index, event)]
            except Violation as error:
                trace = [event]
                while index > 0:
                    index, previous = came[index]
                    trace.append(previous)
                raise Violation(f"{error}\n  after {trace[::-1]}") from error
            result.num_transitions += len(targets)
            if event[0] == "boundary":
                result.boundary_edges[index] = targets
            elif event[0] == "resume":
                result.resume_edges[index] = targets[0]
    check_liveness(result)
    return result


def check_liveness(explored: Explored) -> None:
    """Nobody waits for ever: over the whole graph, not along sampled runs."""
    everyone = range(len(explored.worlds))
    quiet = [i for i in everyone if explored.worlds[i].is_quiet]
    answered = _can_reach(explored.boundary_edges, quiet)
    need(len(answered) == len(everyone), "a call that no number of boundaries answers")
    both = [[*explored.boundary_edges[i], explored.resume_edges[i]] for i in everyone]
    idle = [i for i in quiet if not explored.worlds[i].requests and explored.worlds[i].acked is None]
    need(len(_can_reach(both, idle)) == len(everyone), "a state from which the engine never comes to rest")
    # Without a wait pause, whatever the steps do: an open call is answered within three boundaries (a prefill, a
    # token, the commit). A path longer than that, or a cycle, is a call that is held too long.
    slow = [i for i in everyone if not explored.worlds[i].is_quiet and explored.worlds[i].mode != "wait"]
    for _ in range(3):
        still = set(slow)
        slow = [i for i in slow if any(j in still for j in explored.boundary_edges[i])]
    need(not slow, "a held commit is not bounded by one prefill")


def _can_reach(edges: list[list[int]], goals: list[int]) -> set[int]:
    back: list[list[int]] = [[] for _ in edges]
    for source, targets in enumerate(edges):
        for target in targets:
            back[target].append(source)
    found = set(goals)
    queue = list(goals)
    while queue:
        for source in back[queue.pop()]:
            if source not in found:
                found.add(source)
                queue.append(source)
    return found


@pytest.mark.parametrize(
    ("max_requests", "max_pauses", "num_states"),
    [(2, 2, 13_168), (1, 3, 13_836)],
)
def test_every_reachable_state_keeps_the_rules(max_requests: int, max_pauses: int, num_states: int) -> None:
    explored = explore(Protocol, max_requests, max_pauses)
    worlds = explored.worlds
    print(f"{len(worlds)} states, {explored.num_transitions} transitions")
    assert len(worlds) == num_states
    # The exploration is worth nothing if it never gets to the hard places.
    assert {w.mode for w in worlds} == {None, *PAUSE_MODES}
    replaced = {(w.acked[0], w.mode) for w in worlds if w.acked and w.pauses}
    assert replaced == {(held, newer) for held in PAUSE_MODES for newer in PAUSE_MODES}
    assert any(len(w.pauses) == max_pauses and w.finish and w.acked for w in worlds)
    assert any(w.finish == (None, False) and w.committed and not w.facts.oldest_has_progressed for w in worlds)


# --------------------------------------------------------------------------------------------------------- mutants


class RepliesBeforeTheWaitIsOver(Protocol):
    def _is_complete(self, facts: StepFacts) -> bool:
        return True


class RepliesAtTheCall(Protocol):
    def pause(self, op: Any, mode: Any, clear_cache: bool) -> list[Action]:
        actions = super().pause(op, mode, clear_cache)
        return actions + (self._complete() if mode == "keep" else [])


class WaitsForHeldRequests(Protocol):
    def _is_complete(self, facts: StepFacts) -> bool:
        return facts.num_unfinished == 0


class ResumeForgetsThePause(Protocol):
    def resume(self, op: Any) -> list[Action]:
        return [a for a in super().resume(op) if not (isinstance(a, Fail) and isinstance(a.error, PauseCancelled))]


class ResumeLeavesThePauseInFlight(Protocol):
    def resume(self, op: Any) -> list[Action]:
        was_paused, self._paused = self.is_paused, None
        return [Reply(op, {"was_paused": was_paused})]


class ReplacedPauseIsForgotten(Protocol):
    def pause(self, op: Any, mode: Any, clear_cache: bool) -> list[Action]:
        return [a for a in super().pause(op, mode, clear_cache) if not isinstance(a, Fail)]


class JoinedCallerIsForgotten(Protocol):
    def _complete(self) -> list[Action]:
        actions = super()._complete()
        return [a for a in actions if not isinstance(a, Reply)] + [a for a in actions if isinstance(a, Reply)][:1]


class JoinForgetsClearCache(Protocol):
    @property
    def clear_cache(self) -> bool:
        if self._pausing is not None:
            return self._pausing.callers[0][1]
        return super().clear_cache


class CommitsUnderAPauseInFlight(Protocol):
    def _may_commit(self, facts: StepFacts) -> bool:
        return self._pausing is not None or super()._may_commit(facts)


class CommitsAtTheCall(Protocol):
    def finish_update(self, op: Any, kv_policy: Any) -> list[Action]:
        actions = super().finish_update(op, kv_policy)
        return actions + (self._commit(self._finish) if self._paused and not self._pausing and self._finish else [])


class IgnoresProgress(Protocol):
    def _may_commit(self, facts: StepFacts) -> bool:
        return self._pausing is None


class NeverCommitsWithoutProgress(Protocol):
    def _may_commit(self, facts: StepFacts) -> bool:
        return super()._may_commit(facts) and facts.oldest_has_progressed


class NamedPolicyWinsOverThePause(Protocol):
    def _commit(self, finish: Any) -> list[Action]:
        self._finish, self._has_committed = None, True
        return [Commit(finish.op, finish.policy or "recompute")]


class AdmitsDuringWait(Protocol):
    def admit(self) -> None:
        if self.mode != "wait":
            super().admit()


class AdmitsOncePaused(Protocol):
    def admit(self) -> None:
        if self._pausing is not None:
            super().admit()


class AbortLetsRequestsRun(Protocol):
    def pause(self, op: Any, mode: Any, clear_cache: bool) -> list[Action]:
        return [a for a in super().pause(op, mode, clear_cache) if not isinstance(a, AbortAll)]


class StepsWhilePaused(Protocol):
    @property
    def may_step(self) -> bool:
        return self.mode in ("abort", "wait") or super().may_step


class ForgetsToDropKV(Protocol):
    def _complete(self) -> list[Action]:
        return [a for a in super()._complete() if not isinstance(a, DropKV)]


class UndoneWaitLeavesKV(Protocol):
    def pause_timed_out(self, op: Any, still_running: str = "") -> list[Action]:
        return [a for a in super().pause_timed_out(op, still_running) if not isinstance(a, DropKV)]


class TimeOutResumesAnAcknowledgedPause(Protocol):
    def pause_timed_out(self, op: Any, still_running: str = "") -> list[Action]:
        actions = super().pause_timed_out(op, still_running)
        if actions and self._pausing is None:
            self._paused = None
        return actions


class TimeOutEndsTheJoinedCallers(Protocol):
    def pause_timed_out(self, op: Any, still_running: str = "") -> list[Action]:
        actions = super().pause_timed_out(op, still_running)
        return actions + (self._cancel_pausing("a time-out") if actions else [])


class CancelledPauseStillCommits(Protocol):
    def _fail_finish_of_pause(self) -> list[Action]:
        return []


class ResumeFailsAnEarlierFinish(Protocol):
    def _fail_finish_of_pause(self) -> list[Action]:
        return [] if self._finish is None else self._fail_finish("gone")


class ResumeForgetsThePromisedPolicy(Protocol):
    def resume(self, op: Any) -> list[Action]:
        finish, cancelled = self._finish, self._pausing is not None
        actions = super().resume(op)
        if not cancelled and self._finish is not None:
            self._finish = finish
        return actions


class SecondFinishReplacesTheFirst(Protocol):
    def finish_update(self, op: Any, kv_policy: Any) -> list[Action]:
        self._finish = None
        return super().finish_update(op, kv_policy)


class CancelUpdateIsSilent(Protocol):
    def cancel_update(self, reason: str) -> list[Action]:
        super().cancel_update(reason)
        return []


MUTANTS = [
    (RepliesBeforeTheWaitIsOver, "wait was reported with requests live"),
    (RepliesAtTheCall, "reported outside a boundary"),
    (WaitsForHeldRequests, "left a pause unanswered that waits for nothing"),
    (ResumeForgetsThePause, "resume did not answer the pause"),
    (ResumeLeavesThePauseInFlight, "resume did not answer the pause"),
    (ReplacedPauseIsForgotten, "an older pause of another mode lives on"),
    (JoinedCallerIsForgotten, "left a pause unanswered"),
    (JoinForgetsClearCache, "KV is held|pause: {"),
    (CommitsUnderAPauseInFlight, "a commit under a pause in flight"),
    (CommitsAtTheCall, "a commit outside a boundary"),
    (IgnoresProgress, "before the oldest request progressed"),
    (NeverCommitsWithoutProgress, "left a finish that waits for nothing"),
    (NamedPolicyWinsOverThePause, "under a pause that demands the other"),
    (AdmitsDuringWait, "admission open during wait|was admitted during wait"),
    (AdmitsOncePaused, "admission open during"),
    (AbortLetsRequestsRun, r"pause\(abort\) left requests live"),
    (StepsWhilePaused, "may_step is True"),
    (ForgetsToDropKV, "KV is held"),
    (UndoneWaitLeavesKV, "KV is held under a pause that cleared it"),
    (TimeOutResumesAnAcknowledgedPause, "last ack"),
    (TimeOutEndsTheJoinedCallers, "cancelled by nobody"),
    (CancelledPauseStillCommits, "held for the cancelled pause"),
    (ResumeFailsAnEarlierFinish, "failed without a reason"),
    (ResumeForgetsThePromisedPolicy, "commit with"),
    (SecondFinishReplacesTheFirst, "accepted that should end in UpdateConflict"),
    (CancelUpdateIsSilent, "left the finish open"),
]


@pytest.mark.parametrize(("mutant", "reason"), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
def test_the_enumeration_finds_each_broken_rule(mutant: type[Protocol], reason: str) -> None:
    with pytest.raises(Violation, match=reason):
        explore(mutant, max_requests=2, max_pauses=2)


def test_the_liveness_check_finds_a_commit_that_is_never_due() -> None:
    """No single state shows a cycle: the graph does. First a state nothing leaves, then one that may go on for ever."""
    worlds = [World(), World(requests=(False,), committed=True, finish=(None, False))]
    with pytest.raises(Violation, match="no number of boundaries"):
        check_liveness(Explored(worlds, [[0], [1]], [0, 1]))
    with pytest.raises(Violation, match="not bounded by one prefill"):
        check_liveness(Explored(worlds, [[0], [1, 0]], [0, 1]))


# ---------------------------------------------------------------------------------------------------- public cases


class Rank:
    """A core in twenty lines: calls between two steps, actions carried out in order, steps where they may run."""

    def __init__(self) -> None:
        self.protocol = Protocol()
        self.live: dict[int, int] = {}  # request -> tokens left
        self.ended: dict[int, str] = {}
        self.answers: dict[Any, dict[str, Any] | Exception] = {}
        self.answered: list[Any] = []
        self.num_steps = 0
        self.version = 0
        self.num_kv_drops = 0

    def add(self, request: int, num_tokens: int) -> bool:
        try:
            self.protocol.admit()
        except EnginePaused:
            return False
        self.live[request] = num_tokens
        return True

    def end(self, request: int, reason: str) -> None:
        assert request not in self.ended, "a request ended twice"
        self.ended[request] = reason
        self.live.pop(request)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AbortAll():
                    for request in list(self.live):
                        self.end(request, "abort")
                case DropKV():
                    self.num_kv_drops += 1
                case Commit(op, policy):
                    self.version += 1
                    self._answer(op, {"version": self.version, "policy": policy})
                case Reply(op, value):
                    self._answer(op, value)
                case Fail(op, error):
                    self._answer(op, error)

    def _answer(self, op: Any, value: dict[str, Any] | Exception) -> None:
        assert op not in self.answers, f"{op} was answered twice"
        self.answers[op] = value
        self.answered.append(op)

    def turn(self, oldest_has_progressed: bool = True) -> None:
        """The end of a gap: boundary, then a step of one token for every live request."""
        self.do(self.protocol.boundary(StepFacts(len(self.live), oldest_has_progressed)))
        if self.protocol.may_step and self.live:
            self.num_steps += 1
            for request in list(self.live):
                self.live[request] -= 1
                if not self.live[request]:
                    self.end(request, "stop")


@pytest.mark.parametrize("seed", range(20))
def test_case_048_crossed_pause_and_resume_calls_each_end(seed: int) -> None:
    rng = random.Random(seed)
    rank, calls, num_requests = Rank(), {}, 0
    for op in range(200):
        if rng.random() < 0.5:
            num_requests += rank.add(num_requests, rng.randint(1, 6))
        if rng.random() < 0.35:
            calls[op] = "resume"
            rank.do(rank.protocol.resume(op))
        else:
            calls[op] = mode = rng.choice(PAUSE_MODES)
            rank.do(rank.protocol.pause(op, mode, rng.random() < 0.5))
        if rng.random() < 0.1:
            rank.do(rank.protocol.pause_timed_out(rng.randint(0, op)))
        for _ in range(rng.choice((0, 0, 1, 3))):
            rank.turn()
    for _ in range(10):  # more than the longest request has tokens
        rank.turn()
    assert set(rank.answers) == set(calls)
    acknowledged = [op for op in rank.answered if isinstance(rank.answers[op], dict)]
    last = calls[acknowledged[-1]]
    assert rank.protocol.mode == (None if last == "resume" else last)
    assert rank.protocol.phase == ("running" if last == "resume" else "paused")
    assert all(isinstance(a, (dict, PauseCancelled, TimedOut)) for a in rank.answers.values())
    rank.do(rank.protocol.resume("end"))
    for _ in range(10):
        rank.turn()
    assert set(rank.ended) == set(range(num_requests))


@pytest.mark.parametrize("mode", PAUSE_MODES)
def test_case_049_no_step_runs_after_the_acknowledgement(mode: Any) -> None:
    rank, refused, held, num_requests = Rank(), 0, 0, 0
    for gap in range(40):
        for _ in range(5):  # 200 requests, five in every gap, before and after the pause
            accepted = rank.add(num_requests, 1 + num_requests % 3)
            num_requests += 1
            refused += not accepted
            held += accepted and "p" in rank.answers
        if gap == 20:
            rank.do(rank.protocol.pause("p", mode, False))
            accepted_at_pause = len(rank.live) + len(rank.ended)
            steps_at_pause = rank.num_steps
        acknowledged = rank.num_steps if "p" in rank.answers else None
        rank.turn()
        assert acknowledged in (None, rank.num_steps)
    assert rank.answers["p"] == {"paused": True, "mode": mode, "clear_cache": False}
    if mode == "keep":
        assert (refused, held) == (0, 19 * 5) and rank.num_steps == steps_at_pause
    else:
        assert refused == 19 * 5 and held == 0 and len(rank.ended) == accepted_at_pause and not rank.live
        assert rank.num_steps == steps_at_pause + (3 if mode == "wait" else 0)


def test_case_052_an_abort_that_meets_a_natural_end_leaves_no_pause_waiting() -> None:
    rng = random.Random(0)
    for round_ in range(500):
        rank = Rank()
        for request in range(3):
            rank.add(request, rng.randint(1, 3))
        for _ in range(rng.randint(0, 3)):
            rank.turn()
        before = rng.random() < 0.5
        if before:
            rank.do(rank.protocol.pause(round_, "wait", True))
        target = rng.randrange(3)
        if target in rank.live:  # else it ended in this very step, and the abort finds nothing
            rank.end(target, "abort")
        if not before:
            rank.do(rank.protocol.pause(round_, "wait", True))
        turns = 0
        while round_ not in rank.answers:
            rank.turn()
            turns += 1
            assert turns <= 4, "the pause waits for a request that is gone"
        assert set(rank.ended) == {0, 1, 2}


def test_case_058_each_mode_has_a_result_of_its_own_and_an_unknown_one_changes_nothing() -> None:
    seen = {}
    for mode in PAUSE_MODES:
        rank = Rank()
        rank.add(0, 3)
        rank.turn()
        rank.do(rank.protocol.pause("p", mode, False))
        assert rank.protocol.is_paused
        for _ in range(4):
            rank.turn()
        seen[mode] = (rank.ended.get(0), rank.num_steps, rank.add(1, 1))
    assert seen == {"abort": ("abort", 1, False), "wait": ("stop", 3, False), "keep": (None, 1, True)}
    protocol = Protocol()
    with pytest.raises(InvalidInput, match=r"'finish'.*abort, wait, keep"):
        protocol.pause("p", "finish", True)  # type: ignore[arg-type]
    assert protocol.phase == "running" and not protocol.is_paused and protocol.may_step
    protocol.admit()


# ------------------------------------------------------------------------------------------- the table, row by row


def test_keep_then_wait_lets_the_held_requests_run_out() -> None:
    rank = Rank()
    rank.add(0, 2)
    rank.do(rank.protocol.pause("k", "keep", False))
    rank.turn()
    assert rank.add(1, 1) and rank.num_steps == 0
    rank.do(rank.protocol.pause("w", "wait", True))
    assert not rank.add(2, 1)
    for _ in range(3):
        rank.turn()
    assert rank.ended == {0: "stop", 1: "stop"} and rank.num_kv_drops == 1
    assert rank.answers["w"] == {"paused": True, "mode": "wait", "clear_cache": True}


def test_a_time_out_undoes_only_the_pause_that_was_not_reported() -> None:
    rank = Rank()
    rank.add(0, 9)
    rank.do(rank.protocol.pause("k", "keep", True))
    rank.turn()
    rank.do(rank.protocol.pause("w1", "wait", False))
    rank.do(rank.protocol.pause("w2", "wait", False))
    rank.turn()
    rank.do(rank.protocol.pause_timed_out("w1", "1 request: r0"))
    error = rank.answers["w1"]
    assert isinstance(error, TimedOut) and "1 request: r0" in error.message and "other callers" in error.message
    assert rank.protocol.is_paused and rank.protocol.may_step
    rank.do(rank.protocol.pause_timed_out("w2"))
    assert (rank.protocol.phase, rank.protocol.mode, rank.protocol.may_step) == ("paused", "keep", False)
    assert rank.num_kv_drops == 2
    rank.do(rank.protocol.pause_timed_out("k"))  # answered long ago: the clock came late
    assert rank.protocol.phase == "paused"


def test_a_finish_held_for_a_cancelled_pause_fails_and_a_second_one_commits() -> None:
    rank = Rank()
    rank.add(0, 9)
    rank.do(rank.protocol.pause("w", "wait", False))
    rank.do(rank.protocol.finish_update("f1", None))
    rank.turn()
    assert "f1" not in rank.answers and rank.version == 0
    rank.do(rank.protocol.resume("r"))
    assert isinstance(rank.answers["w"], PauseCancelled) and type(rank.answers["f1"]) is Conflict
    assert rank.answers["r"] == {"was_paused": True}
    rank.do(rank.protocol.finish_update("f2", None))
    rank.turn()
    assert rank.answers["f2"] == {"version": 1, "policy": "recompute"}


@pytest.mark.parametrize(("clear_cache", "demanded"), [(True, "recompute"), (False, "keep")])
def test_a_finish_inside_a_pause_takes_the_pauses_policy_or_is_refused(clear_cache: bool, demanded: str) -> None:
    rank = Rank()
    rank.do(rank.protocol.pause("p", "keep", clear_cache))
    rank.turn()
    other: Any = "keep" if demanded == "recompute" else "recompute"
    rank.do(rank.protocol.finish_update("wrong", other))
    rank.turn()
    assert type(rank.answers["wrong"]) is Conflict and demanded in str(rank.answers["wrong"]) and rank.version == 0
    rank.do(rank.protocol.finish_update("right", None))
    rank.do(rank.protocol.resume("r"))  # in the same gap: what the reported pause promised still holds
    rank.turn()
    assert rank.answers["right"] == {"version": 1, "policy": demanded}


def test_a_further_commit_waits_for_the_oldest_request() -> None:
    rank = Rank()
    rank.add(0, 9)
    rank.do(rank.protocol.finish_update("f1", "keep"))
    rank.turn(oldest_has_progressed=False)
    assert rank.answers["f1"] == {"version": 1, "policy": "keep"}
    rank.do(rank.protocol.finish_update("f2", None))
    rank.turn(oldest_has_progressed=False)
    assert "f2" not in rank.answers and rank.num_steps == 2
    with pytest.raises(UpdateConflict):
        rank.protocol.finish_update("f3", None)
    rank.turn(oldest_has_progressed=True)
    assert rank.answers["f2"] == {"version": 2, "policy": "recompute"}


def test_a_cancelled_update_ends_the_finish_that_waits_for_it() -> None:
    rank = Rank()
    rank.do(rank.protocol.pause("w", "wait", False))
    rank.do(rank.protocol.finish_update("f", None))
    rank.do(rank.protocol.cancel_update("the trainer has gone"))
    rank.turn()
    assert isinstance(rank.answers["f"], UpdateConflict) and "trainer has gone" in str(rank.answers["f"])
    assert rank.version == 0 and rank.protocol.phase == "paused"
    assert rank.protocol.cancel_update("gone") == []
