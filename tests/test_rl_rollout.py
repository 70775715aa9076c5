"""The engine thread and the two sources of groups, against a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from fakes_rl import FakeEngineClient, LetterTokenizer, SuccessorTask
from midstream.errors import Conflict, EngineDead, MidstreamError, TimedOut
from midstream.rl.engine_thread import EngineThread
from midstream.rl.env import Completion, Problem
from midstream.rl.rollout import GroupSource, RolloutWorker, SyncRollouts
from midstream.rl.sampler import Sampler
from midstream.rl.types import derive_seed
from midstream.types import RequestOutput, WeightVersion, child_seed
from test_rl_trainer import config


class MixedReward(SuccessorTask):
    """Every group is useful: what is paid depends on the length, and then on nothing that could tie."""

    def __init__(self) -> None:
        super().__init__(LetterTokenizer(), 0)
        self.count = 0

    async def reward(self, problem: Problem, completion: Completion) -> float:
        self.count += 1
        return float(self.count)


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    thread = EngineThread()
    yield thread
    thread.close()


def sampler(client: FakeEngineClient, task: SuccessorTask | None = None, **values: Any) -> Sampler:
    client.version = WeightVersion(1, "0")
    values = {"groups_per_step": 2, "samples_per_group": 3, "max_staleness": 0, "seed": 5, **values}
    return Sampler(client, task or MixedReward(), config(**values))  # type: ignore[arg-type]


def source(kind: str, rollouts: Sampler, engine: EngineThread) -> GroupSource:
    return (SyncRollouts if kind == "sync" else RolloutWorker)(rollouts, engine)


def test_a_group_is_one_request_with_its_own_seed(engine: EngineThread) -> None:
    rollouts = sampler(FakeEngineClient())
    group = engine.run(rollouts.group(7), 5.0, "group")
    assert [r.index for r in group.rollouts] == [0, 1, 2]
    assert [r.seed for r in group.rollouts] == [child_seed(derive_seed(5, "group", 7), k) for k in range(3)]
    assert group.rollouts[0].prompt_token_ids == rollouts.task.problem("train", 7).prompt_token_ids
    again = engine.run(rollouts.group(7), 5.0, "group")
    assert [r.output_token_ids for r in again.rollouts] == [r.output_token_ids for r in group.rollouts]


def test_evaluation_has_seeds_of_its_own(engine: EngineThread) -> None:
    rollouts = sampler(FakeEngineClient())
    problems = [rollouts.task.problem("heldout", i) for i in range(4)]
    sampled = engine.run(rollouts.evaluate(problems, 1.0, "eval"), 5.0, "evaluation")
    assert [r.seed for r in sampled] == [derive_seed(5, "eval", i) for i in range(4)]
    assert [r.prompt_token_ids for r in sampled] == [p.prompt_token_ids for p in problems]
    assert all(r.reward >= 1.0 and r.params.temperature == 1.0 for r in sampled)
    greedy = engine.run(rollouts.evaluate(problems, 0.0, "greedy"), 5.0, "evaluation")
    assert all(p < 0.0 for r in greedy for p in r.logprobs), "the raw one: the processed one is always 0"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_steps_follow_each_other(engine: EngineThread, kind: str) -> None:
    client = FakeEngineClient()
    groups = source(kind, sampler(client), engine)
    for step in range(3):
        taken = groups.take(5.0)
        assert taken.step == step and [g.index for g in taken.groups] == [2 * step, 2 * step + 1]
        client.version = WeightVersion(step + 2, str(step + 1))
        groups.release(step)
    groups.close()


def test_without_a_release_there_is_no_next_step(engine: EngineThread) -> None:
    client = FakeEngineClient()
    groups = source("async", sampler(client), engine)
    groups.take(5.0)
    with pytest.raises(TimedOut, match="step 1 has 0 of 2 useful groups"):
        groups.take(0.05)
    assert client.requests == ["group-0", "group-1"]
    groups.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_engine_that_dies_is_heard_of_in_take(engine: EngineThread, kind: str) -> None:
    class Dies(FakeEngineClient):
        async def generate_one(self, *args: Any, **kwargs: Any) -> RequestOutput:
            raise EngineDead("the engine process ended")

    groups = source(kind, sampler(Dies()), engine)
    with pytest.raises(EngineDead):
        groups.take(5.0)
    groups.close()


def test_an_error_from_outside_is_heard_of_in_take(engine: EngineThread) -> None:
    groups = source("async", sampler(FakeEngineClient()), engine)
    groups.take(5.0)
    groups.fail(MidstreamError("the update failed"))
    with pytest.raises(MidstreamError, match="the update failed"):
        groups.take(5.0)
    groups.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_request_that_never_ends_is_a_time_out(engine: EngineThread, kind: str) -> None:
    client = FakeEngineClient()

    async def hold(request: str, position: int) -> None:
        await asyncio.Event().wait()

    client.hold = hold
    groups = source(kind, sampler(client, group_timeout_s=0.05), engine)
    with pytest.raises(TimedOut, match="group-[01] was not generated and scored within 0.05 s"):
        groups.take(5.0)
    groups.close()
    assert client.running == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_run_that_has_nothing_to_learn_from_says_so(
    engine: EngineThread, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Learns(MixedReward):
        """All rewards are equal until the 200th group."""

        async def reward(self, problem: Problem, completion: Completion) -> float:
            return 0.5 if problem.index < 200 else await super().reward(problem, completion)

    groups = source(kind, sampler(FakeEngineClient(), Learns()), engine)
    assert len(groups.take(20.0).groups) == 2
    groups.close()
    said = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in said] == ["64", "128"]
    assert all(
        "groups in a row" in text and "equal (last: 0.5)" in text and "dynamic_sampling=false" in text for text in said
    )


def test_closing_ends_what_is_in_flight(engine: EngineThread) -> None:
    client = FakeEngineClient()
    held = asyncio.Event()

    async def hold(request: str, position: int) -> None:
        if request != "group-1":
            await held.wait()

    client.hold = hold
    worker = RolloutWorker(sampler(client, max_staleness=1), engine)
    with pytest.raises(TimedOut, match="3 in flight .lowest 0."):
        worker.take(0.2)
    assert [g.index for g in worker.close()] == [1]
    assert client.running == 0


def test_the_engine_thread_has_time_limits_and_closes_once() -> None:
    thread = EngineThread()
    cancelled = []

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(TimedOut, match="a wait did not end within 0.01 s"):
        thread.run(for_ever(), 0.01, "a wait")

    async def from_inside() -> None:
        thread.run(asyncio.sleep(0), 1.0, "a call")

    with pytest.raises(Conflict, match="wait for itself"):
        thread.run(from_inside(), 1.0, "outer")
    thread.submit(for_ever())
    thread.close()
    thread.close()
    assert cancelled == [True, True]
    with pytest.raises(Conflict, match="closed"):
        thread.run(for_ever(), 1.0, "late")
