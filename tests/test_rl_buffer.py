"""The buffer's two rules, by enumeration of every order in which groups can finish."""

from __future__ import annotations

import copy
import itertools
import random

import pytest

from midstream.rl.buffer import RolloutBuffer
from midstream.rl.types import Rollout, RolloutGroup
from midstream.types import WeightVersionSpan


def group(g: int, *, useful: bool, version: int) -> RolloutGroup:
    """A group whose oldest token was made under ``version``."""
    spans = [WeightVersionSpan(str(version), version, 0, 1)]
    return RolloutGroup(g, [Rollout(g, k, [0], [0], [-1.0], spans, 0, "stop", float(useful and k)) for k in range(2)])


def synchronous(useful: list[bool], steps: int, size: int) -> list[list[int]]:
    """The algorithm max_staleness 0 has to equal: sample ``size`` groups, wait for all, refill the useless ones."""
    batches, g = [], 0
    for _ in range(steps):
        batch: list[int] = []
        while len(batch) < size:
            wanted = range(g, g + size - len(batch))
            g = wanted.stop
            batch += [x for x in wanted if useful[x]]
        batches.append(batch)
    return batches


class Explorer:
    """Walks through every order of {resolve any group in flight, take, release} and checks each state."""

    def __init__(self, useful: list[bool], steps: int, size: int, staleness: int) -> None:
        self.useful, self.steps, self.size, self.staleness = useful, steps, size, staleness
        self.seen: set[object] = set()
        self.ends: set[tuple[tuple[int, ...], ...]] = set()
        self.oldest = 0

    def run(self) -> None:
        buffer = RolloutBuffer(self.size, self.staleness, last_step=self.steps)
        self.explore(buffer, {}, ())

    def explore(self, buffer: RolloutBuffer, born: dict[int, int], taken: tuple[tuple[int, ...], ...]) -> None:
        while buffer.can_launch:
            born = born | {buffer.next_group: buffer.released_steps}
            buffer.launch()
            assert buffer.num_slots <= (self.staleness + 1) * self.size
        in_flight = frozenset(buffer._in_flight)
        state = (in_flight, tuple(sorted(born.items())), taken, buffer.released_steps)
        if state in self.seen:
            return
        self.seen.add(state)
        if buffer.released_steps == self.steps:
            assert not in_flight and not buffer.leftovers(), "work was done that no step needed"
            self.ends.add(taken)
            return
        moved = False
        for g in in_flight:
            after = copy.deepcopy(buffer)
            # The worst case: a token made by the very weights the engine held when the group was launched.
            assert after.resolve(group(g, useful=self.useful[g], version=born[g])) == self.useful[g]
            self.explore(after, born, taken)
            moved = True
        after = copy.deepcopy(buffer)
        batch = after.take()  # asserts the staleness of every group
        if batch is not None:
            indices = tuple(x.index for x in batch.groups)
            assert list(indices) == sorted(indices) and len(indices) == self.size
            self.oldest = max(self.oldest, *(batch.step - x.oldest_version for x in batch.groups))
            assert [x.index for x in batch.useless] == [
                g for g in range(taken[-1][-1] + 1 if taken else 0, indices[-1]) if not self.useful[g]
            ]
            self.explore(after, born, (*taken, indices))
            moved = True
        if buffer.released_steps < buffer.next_step:
            after = copy.deepcopy(buffer)
            after.release(buffer.released_steps)
            self.explore(after, born, taken)
            moved = True
        assert moved, f"nobody can move: {buffer.describe()}"


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("pattern", list(itertools.product([True, False], repeat=4)))
def test_every_order_of_completion_trains_on_the_same_groups(staleness: int, pattern: tuple[bool, ...]) -> None:
    """All orders, and all staleness bounds, consume the useful groups in ascending g: the synchronous sequence."""
    useful = [*pattern, *[True] * 20]
    explorer = Explorer(useful, steps=2, size=2, staleness=staleness)
    explorer.run()
    assert explorer.ends == {tuple(map(tuple, synchronous(useful, 2, 2)))}
    assert explorer.oldest == min(staleness, 1)  # the bound is reached, not only kept


def test_three_steps_of_one_group_reach_staleness_two() -> None:
    explorer = Explorer([True, False, True, True, True, True], steps=4, size=1, staleness=2)
    explorer.run()
    assert explorer.ends == {((0,), (2,), (3,), (4,))}
    assert explorer.oldest == 2


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_long_random_run_is_the_synchronous_sequence(staleness: int) -> None:
    rng = random.Random(staleness)
    useful = [rng.random() < 0.6 for _ in range(2000)]
    buffer = RolloutBuffer(4, staleness, last_step=60)
    born: dict[int, int] = {}
    batches: list[list[int]] = []
    while buffer.released_steps < 60:
        while buffer.can_launch:
            born[buffer.next_group] = buffer.released_steps
            buffer.launch()
        behind = buffer.released_steps < buffer.next_step
        moves = ["resolve"] * bool(buffer._in_flight) + ["take"] + ["release"] * behind
        move = rng.choice(moves)
        if move == "resolve":
            g = rng.choice(sorted(buffer._in_flight))
            buffer.resolve(group(g, useful=useful[g], version=born[g]))
        elif move == "release":
            buffer.release(buffer.released_steps)
        elif (batch := buffer.take()) is not None:
            batches.append([x.index for x in batch.groups])
    assert batches == synchronous(useful, 60, 4)


def test_a_slot_is_freed_only_by_the_commit() -> None:
    buffer = RolloutBuffer(2, 0)
    for g in (0, 1):
        assert buffer.launch() == g
        buffer.resolve(group(g, useful=True, version=0))
    assert not buffer.can_launch
    assert buffer.take() is not None
    assert not buffer.can_launch  # the step may be done, but the engine does not hold its weights yet
    buffer.release(0)
    assert buffer.launch() == 2


def test_a_slow_group_is_waited_for() -> None:
    buffer = RolloutBuffer(1, 2)
    for _ in range(3):
        buffer.launch()
    buffer.resolve(group(1, useful=True, version=0))
    buffer.resolve(group(2, useful=True, version=0))
    assert buffer.take() is None
    buffer.resolve(group(0, useful=False, version=0))
    taken = buffer.take()
    assert taken is not None and [x.index for x in taken.groups] == [1] and [x.index for x in taken.useless] == [0]
    assert taken.next_group == 2


def test_too_stale_a_group_is_caught() -> None:
    """Tokens older than the launch rule allows can only come from a broken engine; the assertion sees them."""
    buffer = RolloutBuffer(1, 0, next_group=5, next_step=3)
    buffer.launch()
    buffer.resolve(group(5, useful=True, version=2))
    with pytest.raises(AssertionError, match="staleness 1 is not within 0..0"):
        buffer.take()


def test_without_dynamic_sampling_every_group_counts() -> None:
    buffer = RolloutBuffer(1, 0, dynamic_sampling=False)
    buffer.launch()
    assert buffer.resolve(group(0, useful=False, version=0))
    assert buffer.take() is not None


def test_nothing_is_launched_that_no_step_needs() -> None:
    buffer = RolloutBuffer(2, 3, last_step=1)
    assert [buffer.launch() for _ in range(2)] == [0, 1]
    assert not buffer.can_launch


def test_calls_out_of_order_are_refused() -> None:
    buffer = RolloutBuffer(1, 0)
    with pytest.raises(AssertionError, match="step 0"):
        buffer.release(0)
    buffer.launch()
    with pytest.raises(AssertionError, match="no free slot"):
        buffer.launch()
    buffer.resolve(group(0, useful=True, version=0))
    with pytest.raises(KeyError):
        buffer.resolve(group(0, useful=True, version=0))
    assert "1 of 1 useful" in buffer.describe()
