"""What an exploration is made of: scenarios, and the states of a rank and of what is outside, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from midstream.engine.coordinator import Coordinator
from midstream.engine.protocol import Protocol
from midstream.engine.vote import StepFacts, StepVerdict, StepVote, verdict


class Violation(AssertionError):
    """A property does not hold; the message has the shortest way there."""


@dataclass(frozen=True)
class Variant:
    """What is explored: the real classes, or a mutant of them."""

    protocol: type[Protocol] = Protocol
    coordinator: type[Coordinator] = Coordinator
    verdict: Callable[[Sequence[StepVote]], StepVerdict] = verdict


class Request(NamedTuple):
    tokens: int
    rank: int | None = None
    """None: any."""
    is_slow: bool = False
    """It is live for a while before it can be scheduled, and may fail then, as with a grammar that is compiled."""


@dataclass(frozen=True)
class Scenario:
    """What the world may do, in any order and at any time. ``vote_every`` 0: replicas that do not step together."""

    name: str
    num_ranks: int = 2
    vote_every: int = 1
    requests: tuple[Request, ...] = ()
    controllers: tuple[tuple[tuple[str, Mapping[str, Any]], ...], ...] = ()
    """Each calls (verb, arguments) after the answer to its last call, whenever it likes."""
    may_lose: bool = False
    """One rank may die at any time."""


Label = tuple[Any, ...]
GAP, VOTE, FORWARD, ENDED, DEAD = "gap", "vote", "forward", "ended", "dead"


class Live(NamedTuple):
    """A request on a rank."""

    request: int
    tokens_left: int
    is_fresh: bool
    """No token since the last commit."""
    is_ready: bool = True


class Local(NamedTuple):
    """A rank without its channels: the shell around Protocol, in small."""

    protocol: Protocol
    place: str = GAP
    live: tuple[Live, ...] = ()
    version: int = 0
    prepared: int | None = None
    """The call whose update is staged."""
    said: int | None = None
    """Of a replica: the position at which it was due last."""
    rests: bool = False
    """It has reported a pause and has taken nothing since that may end it."""

    @property
    def facts(self) -> StepFacts:
        progressed = not self.live or not self.live[0].is_fresh
        return StepFacts(len(self.live), progressed, any(one.is_ready for one in self.live), self.version)


class Rank(NamedTuple):
    """A rank and its channels, oldest message first."""

    local: int
    commands: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()


class Effects(NamedTuple):
    """Where a transition leads one rank, and which requests it ends."""

    to: int
    """A Local first, then the Rank around it."""
    sent: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    has_committed: bool = False


class Shape(NamedTuple):
    """What others may see of a rank."""

    place: str
    waits_in: tuple[Any, ...] | None
    """Which collective it waits in: all who wait must wait in the same."""
    rests: bool
    head: str | None
    """What the coordinator hears of it next."""


class Outside(NamedTuple):
    """What has been called, sent, answered and lost."""

    controllers: tuple[tuple[int, int], ...]
    """Of each: 2 × the call that is next, + 1 while it waits for its answer; and ``disturbed`` when it last called."""
    homes: tuple[int, ...]
    """Of each request, the rank that it was sent to; -1: not sent."""
    answered: tuple[bool, ...]
    disturbed: int = 0
    """Calls and time-outs so far after which a paused group may step."""
    is_quiet: bool = False
    """A pause is acknowledged and nothing has disturbed it."""
    lost: int = -1
    """The rank that died."""
    is_known: bool = False
    """The coordinator has heard of it, and the front ends have."""
    is_over: bool = False
    """Front ends were told that the group has ended."""


def put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    """``items`` with another one at ``index``."""
    return (*items[:index], item, *items[index + 1 :])
