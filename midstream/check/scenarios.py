"""What ``midstream check protocol`` explores: every pair of things that may happen at once, and mutants that must fail.

A guard of the protocol that no mutant needs would be dead weight, and an exploration that finds no mutant would prove
nothing; so each guard is taken out once, in a few lines over the real classes, and a scenario has to find it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement
from typing import Any, NamedTuple

from midstream.check.explore import explore
from midstream.check.machine import Machine
from midstream.check.state import Request, Scenario, Variant, Violation
from midstream.engine.coordinator import Answer, Coordinator, Send
from midstream.engine.protocol import Action, Op, Outcome, Protocol, Turn
from midstream.engine.vote import StepFacts, StepVerdict, StepVote, verdict
from midstream.types import KVPolicy, PauseMode

Calls = tuple[tuple[str, dict[str, Any]], ...]


def _cycle(mode: str, **more: Any) -> Calls:
    return (("pause_generation", {"mode": mode, **more}), ("resume_generation", {}))


class Element(NamedTuple):
    """Something that may happen at any time beside others."""

    controllers: tuple[Calls, ...] = ()
    requests: tuple[Request, ...] = ()
    may_lose: bool = False


ELEMENTS = {
    "request": Element(requests=(Request(2),)),
    "wake-up": Element(requests=(Request(1, rank=1),)),
    "pause abort": Element((_cycle("abort"),)),
    "pause keep": Element((_cycle("keep"),)),
    "pause wait": Element((_cycle("wait"),)),
    "resume": Element(((("resume_generation", {}),),)),
    "cancel": Element((_cycle("keep"), (("resume_generation", {}),))),
    "commit": Element(((("finish_update", {}),),)),
    "loss": Element(may_lose=True),
}
"""Each scenario has one request of one token on rank 0 as well: a group that never runs shows little. "wake-up" is a
second one, elsewhere, so that two ranks may begin a wave at once; "cancel" a pause with a resume that races it."""
MORE = {
    "time-out": Element((_cycle("wait", timeout_s=0.5),)),
    "aborted commit": Element(((("finish_update", {}),), (("abort_update", {}),))),
    "torn commit": Element(((("finish_update", {"fails_on": 1}),),)),
    "slow request": Element(requests=(Request(1, rank=1, is_slow=True),)),
    "shutdown": Element(((("shutdown", {}),),)),
}
"""Explored beside the elements that bear on them."""
BESIDE = (
    ("time-out",), ("time-out", "request"), ("time-out", "loss"), ("aborted commit",),
    ("torn commit",), ("torn commit", "pause keep"), ("slow request", "commit"), ("slow request", "pause wait"),
    ("shutdown",), ("shutdown", "request"), ("shutdown", "pause wait"),
    ("shutdown", "commit"), ("shutdown", "loss"),
)  # fmt: skip
BESIDE_DEEP = (
    ("aborted commit", "loss"), ("slow request", "commit", "commit"),
    ("time-out", "pause keep"), ("time-out", "pause wait"), ("time-out", "commit"), ("aborted commit", "pause keep"),
    ("aborted commit", "pause wait"), ("cancel", "cancel"), ("slow request", "cancel"), ("shutdown", "cancel"),
)  # fmt: skip
VOTES = {"step": 1, "interval": 2}
"""dp_sync_interval 2: the smallest in which forwards follow one another without a vote."""


def scenario(names: Sequence[str], vote: str, num_ranks: int = 2) -> Scenario:
    elements = [ELEMENTS.get(name) or MORE[name] for name in names]
    return Scenario(
        name=f"{' + '.join(names)} ({vote})",
        num_ranks=num_ranks,
        vote_every=VOTES.get(vote, 0),
        requests=(Request(1, rank=0), *(request for element in elements for request in element.requests)),
        controllers=tuple(calls for element in elements for calls in element.controllers),
        may_lose=any(element.may_lose for element in elements),
    )


def default_list() -> Iterator[Scenario]:
    """Two ranks, both ways to vote: every pair and what is beside. Replicas, which agree through the log: every pair
    but those with "cancel", which is a pair already."""
    pairs = [names for names in combinations_with_replacement(ELEMENTS, 2) if names not in _TWICE]
    for vote in VOTES:
        for names in (*pairs, *BESIDE):
            yield scenario(names, vote)
    for names in (*pairs, *BESIDE):
        if not {"cancel", "shutdown"} & set(names):
            yield scenario(names, "log")


def deep_list() -> Iterator[Scenario]:
    """Every three on two ranks and every pair on three, "cancel" counted as the pair that it is; and what was left."""
    single = [name for name in ELEMENTS if name != "cancel"]
    for vote in VOTES:
        for names in (*combinations(single, 3), *BESIDE_DEEP):
            yield scenario(names, vote)
        for pair in combinations(single, 2):
            yield scenario(pair, vote, num_ranks=3)
    for name in ELEMENTS:
        yield scenario(("cancel", name), "log")


LIMIT = 4_000_000
"""States of a scenario beyond which it is cut, which is a failure."""
_TWICE = (("loss", "loss"), ("cancel", "cancel"))
"""One is lost at most; and the other is explored with --deep."""


# -- mutants -----------------------------------------------------------------------------------------------------------


class StopsAtOnce(Protocol):
    """A pause is complete when a rank has taken it: the others wait for it in their next collective."""

    def pause(self, op: Op, mode: PauseMode, clear_cache: bool) -> list[Action]:
        actions = super().pause(op, mode, clear_cache) + self._complete()
        self._agreed, self._is_in_wave, self._holds = self._position, False, True
        return actions


class PausesInTheFrontEnd(Coordinator):
    """A pause holds back new requests and nothing else."""

    def call(self, caller: str, call: Any, verb: str, arguments: dict[str, Any], now: float) -> list[Send]:
        if verb == "pause_generation":
            return [(caller, Answer(call, {"paused": True}))]
        return super().call(caller, call, verb, arguments, now)


class WavesOutliveConsensus(Protocol):
    """A global pause does not end the wave's number: a wake-up from before it wakes one rank under it."""

    def conclude(self, verdict: StepVerdict) -> tuple[list[Action], Outcome]:
        actions, outcome = super().conclude(verdict)
        self._wave -= outcome == "end" and self._holds
        return actions, outcome


class NoResumeBarrier(Protocol):
    """A resumed rank with work goes into a forward without the vote that shows whether all have resumed."""

    _rushes = False

    def resume(self, op: Op) -> list[Action]:
        self._rushes = self._holds
        return super().resume(op)

    def turn(self, facts: StepFacts) -> Turn:
        if self._rushes and facts.has_ready and self.may_step:
            return "step"
        return super().turn(facts)

    def stepped(self) -> None:
        self._rushes = False
        super().stepped()


class NoWaveNumber(Protocol):
    """Every wake-up wakes, also one that comes late."""

    def start_wave(self, wave: int) -> None:
        super().start_wave(self._wave)


class LocalFlagContinues(Protocol):
    """Whether a forward follows is read from the rank's own pause, not from the verdict."""

    def conclude(self, verdict: StepVerdict) -> tuple[list[Action], Outcome]:
        actions, outcome = super().conclude(verdict)
        return actions, "again" if outcome == "step" and not self.may_step else outcome


class SwitchesWithoutTheVote(Protocol):
    """The new weights serve as soon as a rank hears that all are prepared."""

    def finish_update(self, op: Op, kv_policy: KVPolicy | None) -> list[Action]:
        actions = super().finish_update(op, kv_policy)
        assert self._finish is not None
        return actions + self._commit(self._finish)


class ResumesWithoutEpoch(Protocol):
    """Votes say "I am pausing" and not which pause: one before and one after a resume look alike."""

    def vote(self, facts: StepFacts) -> StepVote:
        return replace(super().vote(facts), position=int(self.is_paused))


class CommitsOnAMajority(Coordinator):
    """Half of the ranks have prepared: good enough."""

    def prepared(self, rank: int, op: int) -> list[Send]:
        call = self._open.get(op)
        if call is None or call.is_finishing:
            return []
        call.results[rank] = None
        if 2 * list(call.results.values()).count(None) < len(self.ranks):
            return []
        call.results, call.is_finishing = {}, True
        return self._log("finish", {}, op)


class NoKick(Protocol):
    """A command is no reason for a vote: an idle group never agrees on it."""

    def turn(self, facts: StepFacts) -> Turn:
        turn = super().turn(facts)
        return "idle" if turn == "vote" and not (self._is_in_wave or self._is_woken) else turn


class EndsWavesOverOpenCalls(Protocol):
    """A wave ends when nobody can schedule anything, whoever waits for an answer."""

    def conclude(self, verdict: StepVerdict) -> tuple[list[Action], Outcome]:
        actions, outcome = super().conclude(verdict)
        if verdict.agrees and outcome == "again":
            self._wave, self._step, self._is_in_wave = self._wave + 1, 0, False
            return actions, "end"
        return actions, outcome


def _forgets_who_holds(votes: Sequence[StepVote]) -> StepVerdict:
    """A vote in which somebody is still in a global pause is followed by a forward all the same."""
    return replace(verdict(votes), holds=False)


class Mutant(NamedTuple):
    name: str
    variant: Variant
    found_in: tuple[str, ...]
    """Elements of a scenario that finds it."""
    vote: str = "step"


MUTANTS = (
    Mutant("stop at once", Variant(StopsAtOnce), ("request", "pause keep")),
    Mutant("pause in the front end", Variant(coordinator=PausesInTheFrontEnd), ("request", "pause keep")),
    Mutant("waves accepted after consensus", Variant(WavesOutliveConsensus), ("wake-up", "pause keep")),
    Mutant("no resume barrier", Variant(NoResumeBarrier), ("request", "pause keep")),
    Mutant("no wave number", Variant(NoWaveNumber), ("request", "wake-up")),
    Mutant("a local flag in the continue rule", Variant(LocalFlagContinues), ("request", "pause keep")),
    Mutant("switch without the vote", Variant(SwitchesWithoutTheVote), ("request", "commit")),
    Mutant("resume without epoch", Variant(ResumesWithoutEpoch), ("pause keep", "cancel")),
    Mutant("commit on a majority", Variant(coordinator=CommitsOnAMajority), ("torn commit",)),
    Mutant("no vote after a command", Variant(NoKick), ("pause keep", "resume")),
    Mutant("a wave ends over an open call", Variant(EndsWavesOverOpenCalls), ("slow request", "pause wait")),
    Mutant("a vote forgets who holds", Variant(verdict=_forgets_who_holds), ("pause keep", "commit")),
)


def find(mutant: Mutant) -> tuple[Scenario, Violation | None]:
    """Explore the mutant's scenario; None where nothing is found wrong."""
    where = scenario(mutant.found_in, mutant.vote)
    try:
        explore(where, Machine(mutant.variant, where.num_ranks, where.vote_every), LIMIT)
    except Violation as violation:
        return where, violation
    return where, None


def check(scenarios: Iterable[Scenario], say: Callable[[str], None], limit: int = LIMIT) -> bool:
    """Explore all, then the mutants; a line for each. True if all are complete, hold, and every mutant is found."""
    gc.collect()
    gc.disable()  # the search makes millions of small objects and no cycles
    try:
        results = [*_explore_all(scenarios, say, limit), *_find_all(say)]
    finally:
        gc.enable()
    say("all complete, nothing violated, every mutant found" if all(results) else "NOT all complete, held and found")
    return all(results)


def _explore_all(scenarios: Iterable[Scenario], say: Callable[[str], None], limit: int) -> Iterator[bool]:
    kind, total = (0, 0), 0
    for one in scenarios:
        if kind != (one.num_ranks, one.vote_every):
            kind = (one.num_ranks, one.vote_every)
            machine = Machine(Variant(), *kind)  # what it has learnt serves every scenario of its kind
        try:
            explored = explore(one, machine, limit)
        except Violation as violation:
            say(f"{one.name}, {one.num_ranks} ranks: VIOLATION: {violation}")
            yield False
            continue
        total += explored.states
        end = "complete" if explored.is_complete else f"cut at {limit:,} states"
        say(f"{one.name}, {one.num_ranks} ranks: {explored.states:,} states, depth {explored.depth}, {end}")
        yield explored.is_complete
    say(f"{total:,} states in all")


def _find_all(say: Callable[[str], None]) -> Iterator[bool]:
    for mutant in MUTANTS:
        where, violation = find(mutant)
        what = "NOT FOUND" if violation is None else f"found: {str(violation).splitlines()[0]}"
        say(f"mutant “{mutant.name}” in {where.name}: {what}")
        yield violation is not None
