from __future__ import annotations

import itertools
import statistics

import pytest

from midstream.rl.advantage import build_batch, group_advantages, is_useless, overlong_penalty
from midstream.rl.types import RolloutGroup
from test_rl_types import rollout


def test_advantages_are_the_formula() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.25]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert group_advantages(rewards) == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards])


def test_advantages_do_not_depend_on_the_order_of_the_rewards() -> None:
    rewards = [0.1, 0.2, 0.3, 0.7]
    expected = dict(zip(rewards, group_advantages(rewards), strict=True))
    for order in itertools.permutations(rewards):
        assert group_advantages(order) == [expected[r] for r in order]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7])
def test_equal_rewards_are_useless_and_give_exact_zeros(value: float) -> None:
    assert is_useless([value] * 7)
    assert group_advantages([value] * 7) == [0.0] * 7
    assert not is_useless([value, value + 1])


def test_overlong_penalty_has_its_three_parts() -> None:
    points = [(0, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (20, -1.0)]
    assert [overlong_penalty(n, 16, 4) for n, _ in points] == [p for _, p in points]
    assert overlong_penalty(14, 16, 4, factor=0.5) == -0.25
    assert overlong_penalty(16, 16, 0) == 0.0


def groups() -> list[RolloutGroup]:
    return [RolloutGroup(g, [rollout(g, k, length=1 + (g + k) % 3) for k in range(3)]) for g in (4, 7, 9)]


@pytest.mark.parametrize("limit", [1, 4, 5, 8, 1000])
def test_packing_keeps_order_and_limit(limit: int) -> None:
    micro_batches = build_batch(groups(), limit)
    flat = [r for m in micro_batches for r in m.rollouts]
    assert [(r.group, r.index) for r in flat] == [(g, k) for g in (4, 7, 9) for k in range(3)]
    for micro_batch in micro_batches:
        cost = sum(len(p) + sum(len(c) for c in cs) for p, cs in micro_batch.sequences())
        assert cost <= limit or len(micro_batch.rollouts) == 1
        assert len(micro_batch.advantages) == len(micro_batch.rollouts)
    if limit == 1000:
        assert len(micro_batches) == 1
