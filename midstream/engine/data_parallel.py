"""A rank's ties to its group: the votes between two steps, and the group that its experts exchange tokens in.

Both are collectives on groups of their own, so a vote is never taken for a part of a forward, nor the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields

import torch

from midstream.engine.vote import StepVote
from midstream.parallel.groups import Group


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in a lockstep group."""

    rank: int
    size: int
    meeting: str
    """Address at which the ranks meet: see :class:`midstream.parallel.groups.Group`."""
    host: str = "127.0.0.1"
    """Under which the others reach this one."""


class Lockstep:
    """Rank ``place.rank`` of a group that steps together. Collective: made when all ranks have come.

    ``wake`` has START_DP_WAVE of a wave sent to the other ranks; it must not wait for them.
    """

    def __init__(self, place: Place, timeout_s: float, wake: Callable[[int], object]) -> None:
        self.size = place.size
        self.wake = wake
        self.votes = Group("votes", place.meeting, place.rank, place.size, timeout_s, host=place.host)
        self.experts = Group("experts", place.meeting, place.rank, place.size, timeout_s, host=place.host)

    def exchange(self, vote: StepVote) -> list[StepVote]:
        """Everyone's vote, by rank. Raises ``RankLost`` where one is gone or silent for the time limit."""
        row = torch.tensor([astuple(vote)], dtype=torch.int64)
        ones = [1] * self.size
        rows = self.votes.all_to_all(row.expand(self.size, -1), ones, ones).tolist()
        kinds = [bool if f.type == "bool" else int for f in fields(StepVote)]
        words = ([kind(value) for kind, value in zip(kinds, row, strict=True)] for row in rows)
        return [StepVote(*word) for word in words]  # type: ignore[arg-type]

    def close(self) -> None:
        self.votes.close()
        self.experts.close()
