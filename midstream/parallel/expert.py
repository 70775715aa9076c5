"""Expert parallel: each rank holds some of the experts, tokens travel to them and their outputs travel back.

    home rank   rows (token, expert), by expert ──dispatch──▶ rank of the expert   one product for each expert
                outputs, one for each row       ◀──combine───                      nothing is added up there

Outputs come home unreduced, and :func:`midstream.ops.moe.combine` adds them there as one rank alone would: so any
number of ranks gives the bits of one.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import InvalidInput
from midstream.ops import moe
from midstream.parallel.groups import Group


class AllToAll(ABC):
    """Tokens to experts and back. T local tokens (0 is legal), k experts of each, D hidden, N rows on this rank.

    Over several ranks both calls are collective: every rank makes them for every layer with experts, in order, also
    without a token of its own. Which wire and which kernels is the implementation's affair (DeepEP's buffers are
    dispatch and combine of this very shape); what reduces on the way has another ``combine_order``.
    """

    num_experts: int
    experts: range
    """Those held here."""
    combine_order = moe.COMBINE_ORDER
    """For the numerics fingerprint."""

    @abstractmethod
    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, list[int], Any]:
        """x [T, D], ids [T, k] → rows [N, D] for the experts held here, by expert; how many each has; and what
        :meth:`combine` needs."""

    @abstractmethod
    def combine(self, y: torch.Tensor, back: Any) -> torch.Tensor:
        """y [N, D], an output for each row of :meth:`dispatch` → [T, k, D] at home, in the order of its ids."""


class OneRank(AllToAll):
    """All experts are here. Differentiable."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts, self.experts = num_experts, range(num_experts)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, list[int], Any]:
        order, counts = moe.group(ids, self.num_experts)
        return x.index_select(0, order // ids.shape[1]), counts.tolist(), (order, ids.shape)

    def combine(self, y: torch.Tensor, back: Any) -> torch.Tensor:
        order, shape = back
        return y.index_select(0, _inverse(order)).view(*shape, y.shape[1])


@dataclass(frozen=True, slots=True)
class _Back:
    """How rows go home: ``order`` of the (token, expert) rows there, ``place`` of the rows that came here, and how many
    went to, and came from, each rank."""

    shape: torch.Size
    order: torch.Tensor
    place: torch.Tensor
    sent: list[int]
    received: list[int]


def check_experts(num_experts: int, num_ranks: int) -> None:
    """Raises InvalidInput for more ranks than experts."""
    if num_experts < num_ranks:
        raise InvalidInput(
            f"expert parallel over {num_ranks} ranks needs at least as many experts, the model has {num_experts}: "
            "start fewer ranks, or do without it"
        )


class GroupAllToAll(AllToAll):
    """Over a group of ranks: rank r of n holds the experts [r E / n, (r + 1) E / n), rounded down, so that any number
    of experts is split; every rank has at least one. For inference: it has no backward.

    Raises ``InvalidInput`` for more ranks than experts; ``RankLost`` in a call where a rank is gone, or was silent for
    the group's time limit.
    """

    def __init__(self, group: Group, num_experts: int) -> None:
        check_experts(num_experts, group.size)
        borders = [rank * num_experts // group.size for rank in range(group.size + 1)]
        self.group, self.num_experts = group, num_experts
        self.experts = range(borders[group.rank], borders[group.rank + 1])
        self._sizes = [end - start for start, end in itertools.pairwise(borders)]

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, list[int], Any]:
        order, counts = moe.group(ids, self.num_experts)
        held, size = len(self.experts), self.group.size
        theirs = self.group.all_to_all(counts, self._sizes, [held] * size).view(size, held)
        sent = [int(part.sum()) for part in counts.split(self._sizes)]
        received: list[int] = theirs.sum(1).tolist()
        rows = self.group.all_to_all(x.index_select(0, order // ids.shape[1]), sent, received)
        # they come by rank, and from each by expert: put together what is for one expert
        expert = torch.arange(held, device=x.device).repeat(size).repeat_interleave(theirs.flatten())
        place = torch.sort(expert, stable=True).indices
        back = _Back(ids.shape, order, place, sent, received)
        return rows.index_select(0, place), theirs.sum(0).tolist(), back

    def combine(self, y: torch.Tensor, back: Any) -> torch.Tensor:
        rows = self.group.all_to_all(y.index_select(0, _inverse(back.place)), back.received, back.sent)
        return rows.index_select(0, _inverse(back.order)).view(*back.shape, y.shape[1])


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes ``order``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
