"""From rewards to advantages. Pure arithmetic on lists; no torch.

DAPO (arXiv 2503.14476): the advantage of a completion is its reward, centred and scaled within its own group; a group
whose rewards are all equal has no advantage to give, and dynamic sampling replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from midstream.rl.types import MicroBatch, RolloutGroup

EPSILON = 1e-6
"""Keeps the scale finite when all rewards are equal; the advantages are then exactly 0."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6), with the population's standard deviation. Equal rewards give exact zeros."""
    if is_useless(rewards):
        return [0.0] * len(rewards)
    # fsum is exact, so the result does not depend on the order of the rewards.
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + EPSILON) for r in rewards]


def is_useless(rewards: Sequence[float]) -> bool:
    """Dynamic sampling's test: all rewards are equal, so there is nothing to learn from this group."""
    return all(r == rewards[0] for r in rewards)


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment, for a completion of ``num_tokens``.

    0 up to ``max_tokens - buffer_tokens``, then falling linearly to ``-factor`` at ``max_tokens``, and ``-factor``
    beyond. A ``buffer_tokens`` of 0 switches it off.
    """
    if buffer_tokens == 0:
        return 0.0
    over = num_tokens - (max_tokens - buffer_tokens)
    return -factor * min(max(over / buffer_tokens, 0.0), 1.0)


def build_batch(groups: Sequence[RolloutGroup], max_micro_batch_tokens: int) -> list[MicroBatch]:
    """Advantages for every rollout, and the cut into micro-batches.

    Rollouts stay in order (g, then index), whatever the order they finished in, and a micro-batch is closed before the
    rollout that would take it past ``max_micro_batch_tokens`` (a prompt counts once for the neighbours that share it; a
    single longer rollout is a micro-batch of its own). So the packing, and every bit of the gradient, is a function of
    the groups.
    """
    micro_batches: list[MicroBatch] = []
    size = 0
    for group in groups:
        for k, (rollout, advantage) in enumerate(zip(group.rollouts, group_advantages(group.rewards), strict=True)):
            prompt, output = len(rollout.prompt_token_ids), len(rollout.output_token_ids)
            size += output if k else prompt + output
            if not micro_batches or size > max_micro_batch_tokens:
                micro_batches.append(MicroBatch([], []))
                size = prompt + output
            micro_batches[-1].rollouts.append(rollout)
            micro_batches[-1].advantages.append(advantage)
    return micro_batches
