"""Mixture of experts: which experts a token goes to, their products, and how their outputs become one.

A token's bits depend on that token alone: not on its company, nor on how a batch is cut, nor on which rank holds an
expert. An expert is two row-stable products; outputs come back apart, one for each (token, expert), and are added by
:func:`combine`, the one function of one rank, of many, and of the trainer. Everything is torch, and differentiable.

Shapes: T tokens, D hidden, E experts, k experts of a token, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from midstream.ops.layers import LinearWeight, linear, silu_and_mul

COMBINE_ORDER = "ascending expert id"
"""How :func:`combine` adds, for the numerics fingerprint. Whoever reduces on the way has another one."""


class Expert(NamedTuple):
    """The weights of one: gate ‖ up [2I, D] and down [D, I]."""

    gate_up: LinearWeight
    down: LinearWeight


def route(
    logits: torch.Tensor, top_k: int, normalise: bool, given: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, E] → the ids [T, k] of each token's experts, ascending, and their weights [T, k] in fp32.

    The k most likely of a softmax in fp32, of equal ones the lower id; ``normalise``: weights add up to 1. ``given``
    [T, k], ascending, replaces the choice where it is not negative; the weights are these logits' all the same.
    """
    likely = torch.softmax(logits.float(), -1)
    ids = torch.sort(likely, dim=-1, descending=True, stable=True).indices[:, :top_k].sort(-1).values
    if given is not None:
        ids = torch.where(given < 0, ids, given)
    shares = likely.gather(-1, ids)
    if normalise:
        total = shares[:, 0]
        for j in range(1, shares.shape[1]):  # one after another: a sum's own order is the library's affair
            total = total + shares[:, j]
        shares = shares / total[:, None]
    return ids, shares


def group(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [T, k] of tokens → the order [T k] that brings (token, expert) rows together by expert, and the number of
    rows [E] of each. Row r of the flat ids belongs to token r // k."""
    flat = ids.flatten()
    return torch.sort(flat, stable=True).indices, torch.bincount(flat, minlength=num_experts)


def run_experts(rows: torch.Tensor, counts: Sequence[int], experts: Sequence[Expert]) -> torch.Tensor:
    """rows [N, D], the first ``counts[0]`` of them for the first expert, and so on → its output for each [N, D]."""
    busy = [(count, expert) for count, expert in zip(counts, experts, strict=True) if count]
    if not busy:
        return rows
    sizes = [count for count, _ in busy]
    wide = [linear(part, expert.gate_up) for part, (_, expert) in zip(rows.split(sizes), busy, strict=True)]
    inner = silu_and_mul(torch.cat(wide)).split(sizes)
    return torch.cat([linear(part, expert.down) for part, (_, expert) in zip(inner, busy, strict=True)])


def combine(outputs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Outputs [T, k, D] of each token's experts, by ascending id, and their weights [T, k] → [T, D], in outputs' dtype:
    weighted and added in that order in fp32, and rounded once."""
    total = outputs[:, 0].float() * shares[:, :1]
    for j in range(1, shares.shape[1]):
        total = total + outputs[:, j].float() * shares[:, j : j + 1]
    return total.to(outputs.dtype)
