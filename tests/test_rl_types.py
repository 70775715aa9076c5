from __future__ import annotations

from dataclasses import replace

import pytest

from midstream.errors import InvalidInput
from midstream.rl.types import MicroBatch, Rollout, RolloutGroup, derive_seed
from midstream.types import MAX_SEED, RoutedExperts, WeightVersionSpan


def rollout(
    group: int = 0, index: int = 0, length: int = 3, spans: list[tuple[str, int, int]] | None = None
) -> Rollout:
    spans = spans if spans is not None else [("0", 0, length)]
    return Rollout(
        group=group,
        index=index,
        prompt_token_ids=[1, 2],
        output_token_ids=list(range(length)),
        logprobs=[-0.5] * length,
        spans=[WeightVersionSpan(label, i, start, end) for i, (label, start, end) in enumerate(spans)],
        seed=0,
        finish_reason="stop",
        reward=1.0,
    )


def episode(spans: list[tuple[str, int, int]], length: int = 7, count: int | None = None) -> Rollout:
    """So many tokens, of which ``count`` (by default: those in the spans) have a logprob."""
    found = [WeightVersionSpan(label, int(label), start, end) for label, start, end in spans]
    count = sum(end - start for _, start, end in spans) if count is None else count
    return replace(rollout(length=length), logprobs=[-0.5] * count, spans=found)


def test_versions_are_read_from_the_spans() -> None:
    r = rollout(length=5, spans=[("3", 0, 2), ("4", 2, 3), ("6", 3, 5)])
    assert r.policy_versions == [3, 3, 4, 6, 6]
    assert RolloutGroup(0, [rollout(spans=[("5", 0, 3)]), r]).oldest_version == 3
    assert r.spans_versions and not rollout().spans_versions


@pytest.mark.parametrize(
    "spans", [[("0", 0, 2)], [("0", 0, 1), ("1", 2, 3)], [("0", 0, 2), ("1", 1, 3)], [], [("0", 0, 4)]]
)
def test_every_token_has_exactly_one_version(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(InvalidInput, match="malformed"):
        rollout(length=3, spans=spans)


def test_tokens_between_two_spans_are_the_environments() -> None:
    turns = [("3", 0, 2), ("3", 4, 5), ("4", 5, 7)]
    r = episode(turns)
    assert r.sampled == [0, 1, 4, 5, 6] and r.policy_versions == [3, 3, 3, 4, 4] and r.spans_versions
    assert not episode(turns[:2], length=5).spans_versions, "a turn is no version"
    for spans, count in ((turns, 7), (turns, 4), (turns[:2], 3), (turns[1:], 3), ([("3", 0, 3), *turns[1:]][::-1], 6)):
        with pytest.raises(InvalidInput, match="malformed"):
            episode(spans, count=count)


def test_a_foreign_label_is_an_error_that_says_so() -> None:
    with pytest.raises(InvalidInput, match="'mine'"):
        _ = rollout(spans=[("mine", 0, 3)]).policy_versions


def test_seeds_are_a_function_of_run_purpose_and_index() -> None:
    seeds = {derive_seed(run, purpose, i) for purpose in ("group", "eval") for run in range(20) for i in range(50)}
    assert len(seeds) == 2 * 20 * 50
    assert all(0 <= s <= MAX_SEED for s in seeds)
    assert derive_seed(7, "group", 3) == derive_seed(7, "group", 3)
    assert derive_seed(0, "group", 0) == 2730335260483587038  # pinned: an old run must stay reproducible


def test_neighbours_of_a_group_share_their_prompt() -> None:
    batch = MicroBatch([rollout(0, 0), rollout(0, 1), rollout(1, 0)], [0.0, 0.0, 0.0])
    assert [(prompt, len(completions)) for prompt, completions in batch.sequences()] == [([1, 2], 2), ([1, 2], 1)]


def test_a_prompt_is_shared_where_the_same_experts_served_it() -> None:
    """Its experts are of the weights that computed it last, so neighbours that ended at different times may differ."""

    def one(group: int, index: int, first: int | None) -> Rollout:
        routes = None if first is None else RoutedExperts(0, 1, 1, bytearray([first, 0, 0, 0, index, 0]))
        return replace(rollout(group, index, length=2), routes=routes)

    plain = MicroBatch([one(0, 0, None), one(0, 1, None), one(1, 0, None)], [1.0] * 3)
    assert plain.sequences() == [([1, 2], [[0, 1], [0, 1]]), ([1, 2], [[0, 1]])] and plain.routes() is None
    rollouts = [one(0, 0, 5), one(0, 1, 5), one(0, 2, 6), one(0, 3, None), one(1, 0, 6)]
    batch = MicroBatch(rollouts, [1.0] * 5)
    assert [len(completions) for _, completions in batch.sequences()] == [2, 1, 1, 1]
    assert batch.routes() == [[r.routes for r in of] for of in (rollouts[:2], *([r] for r in rollouts[2:]))]
