"""What ranks tell each other between two steps, and what follows from it. Plain data; ``protocol`` says what for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midstream.errors import MidstreamError


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the scheduler says at a boundary."""

    num_unfinished: int
    """All live requests: running, queued and preempted."""
    oldest_has_progressed: bool
    """None is live, or the one that was the oldest has sampled a token since the last commit."""
    has_ready: bool = False
    """A step could be planned now, if no pause forbids it."""
    weight_number: int = 0


@dataclass(frozen=True, slots=True)
class StepVote:
    """One rank's word in a vote: integers only, so that a row of them is all that an all-gather has to carry."""

    wave: int
    position: int
    num_unfinished: int
    has_work: bool
    """It could schedule something now: not in a pause that forbids it."""
    oldest_has_progressed: bool
    weight_number: int
    holds: bool
    """In a global pause, and no resume taken since."""


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What a vote decides: a function of all the votes and of nothing else, so every rank computes the same."""

    agrees: bool
    num_unfinished: int = 0
    has_work: bool = False
    oldest_has_progressed: bool = True
    holds: bool = False


def verdict(votes: Sequence[StepVote]) -> StepVerdict:
    """Raises MidstreamError where ranks are not at the same wave or weights: nothing they compute together is right."""
    for name in ("wave", "weight_number"):
        values = [getattr(vote, name) for vote in votes]
        if len(set(values)) > 1:
            raise MidstreamError(f"the ranks differ in {name}: {values} by rank; the group has to be started again")
    return StepVerdict(
        agrees=len({vote.position for vote in votes}) == 1,
        num_unfinished=sum(vote.num_unfinished for vote in votes),
        has_work=any(vote.has_work for vote in votes),
        oldest_has_progressed=all(vote.oldest_has_progressed for vote in votes),
        holds=any(vote.holds for vote in votes),
    )
