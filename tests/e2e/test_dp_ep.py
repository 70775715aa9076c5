"""Data parallel with expert parallel, with real processes: pauses, updates and requests in any order.

Each round does a few random things at once, waits for events only, and then looks: every call came back in time, every
request ended once, all ranks have made the same number of steps at every pause, and every token's log-probability is,
bit for bit, what one rank computes under the version that made it.
"""

from __future__ import annotations

import asyncio
import pathlib
import random
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import config_of, random_weights, write_checkpoint
from cores import Teacher
from midstream.errors import EnginePaused, MidstreamError, PauseCancelled
from midstream.models.config import ModelConfig
from midstream.serving.async_llm import AsyncLLM
from midstream.types import RequestOutput, SamplingParams

torch.set_num_threads(1)

VARIANT = "qwen3-moe"
LIMIT_S = 5.0
"""For every call but a pause of mode wait, which may also take what it lets end."""
SAMPLING: dict[str, Any] = {"ignore_eos": True, "detokenize": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    """Three versions of one tiny model."""
    at = tmp_path_factory.mktemp("moe")
    return [write_checkpoint(at / f"w{seed}", VARIANT, seed) for seed in range(3)]


class Group:
    """An engine of several ranks under random use, and the books that are kept of it."""

    def __init__(self, llm: AsyncLLM, models: list[pathlib.Path], seed: int) -> None:
        self.llm, self.models, self.rng = llm, models, random.Random(seed)
        self.served = {0: 0}
        """Commit number → which of the models."""
        self.ended: list[RequestOutput] = []
        self.num_requests = self.num_aborted = self.num_refused = 0
        self.is_paused = False

    async def within(self, call: Coroutine[Any, Any, dict[str, Any]], limit_s: float = LIMIT_S) -> dict[str, Any]:
        start = time.monotonic()
        try:
            return await asyncio.wait_for(call, limit_s + 10.0)
        finally:
            taken = time.monotonic() - start
            assert taken < limit_s, f"a call took {taken:.1f} s"

    # -- what may happen

    async def request(self) -> None:
        """To one rank, or to any; some clients leave in the middle."""
        self.num_requests += 1
        name, rng = f"r{self.num_requests}", self.rng
        prompt = [rng.randrange(2, 150) for _ in range(rng.randrange(1, 40))]
        length, seed, n = rng.randrange(1, 40), rng.randrange(99), rng.choice((1, 1, 2))
        params = SamplingParams(max_tokens=length, seed=seed, n=n, **SAMPLING)
        session = rng.choice((None, "a", "b"))
        leaves_after = rng.choice((None, None, None, 3))
        ends = 0
        try:
            async for output in self.llm.generate(prompt, params, name, session=session):
                if output.finished:
                    ends += 1
                    self.ended.append(output)
                elif leaves_after is not None and len(output.outputs[0].token_ids) >= leaves_after:
                    return
        except EnginePaused:
            self.num_refused += 1
            return
        assert ends == 1

    async def pause(self) -> None:
        mode, clear = self.rng.choice(("keep", "abort", "wait")), self.rng.random() < 0.7
        try:
            found = await self.within(self.llm.pause_generation(mode, clear), LIMIT_S * (2 if mode == "wait" else 1))
        except PauseCancelled:
            return
        assert found["paused"]
        steps = await self.steps()
        assert len(set(steps)) == 1, steps

    async def steps(self) -> list[int]:
        status = await self.within(self.llm.status())
        return [rank["num_steps"] for rank in status["ranks"]]

    async def resume(self) -> None:
        await self.within(self.llm.resume_generation())

    async def update(self) -> None:
        which = self.rng.randrange(len(self.models))
        try:
            found = await self.within(self.llm.update_weights({"weight_dir": str(self.models[which])}))
        except MidstreamError as error:
            assert error.status == 409, error  # another one is open, or the pause it was held for ended
            return
        assert self.served.setdefault(found["number"], which) == which

    async def abort(self) -> None:
        await self.within(self.llm.abort_requests([f"r{self.num_requests}"]))

    # -- a round

    async def round(self) -> None:
        """A few of them at once, in random order; then let all come to its end."""
        rng = self.rng
        todo = [self.request() for _ in range(rng.randrange(0, 5))]
        calls = [self.pause, self.resume, self.resume, self.update, self.abort]
        todo += [rng.choice(calls)() for _ in range(rng.randrange(1, 5))]
        rng.shuffle(todo)
        tasks = []
        for one in todo:
            tasks.append(asyncio.ensure_future(one))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        while pending := [task for task in tasks if not task.done()]:
            await self.resume()  # what a pause holds, and a wait that waits for it
            await asyncio.wait(pending, timeout=0.05)
        await asyncio.gather(*tasks)

    def check(self) -> int:
        """Every token, against one rank. Those made on KV of another version are counted apart."""
        config = ModelConfig.from_hf(config_of(VARIANT))
        worker = SimpleNamespace(model_config=config, dtype=torch.float32)
        like = SimpleNamespace(core=SimpleNamespace(worker=worker), config=SimpleNamespace(block_size=16))
        weights = [random_weights(VARIANT, seed) for seed in range(len(self.models))]
        teacher = Teacher(like, {number: weights[which] for number, which in self.served.items()})  # type: ignore[arg-type]
        whole = [output for output in self.ended if all(c.kv_versions is None for c in output.outputs)]
        return teacher.check(whole, SamplingParams(**SAMPLING))


async def use(models: list[pathlib.Path], size: int, rounds: int, seed: int, **options: Any) -> tuple[Group, int]:
    defaults: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_threads": 1}
    many = {"data_parallel_size": size, "enable_expert_parallel": True, "dp_timeout_s": 20.0}
    async with AsyncLLM(str(models[0]), dtype="float32", **defaults, **many, **options) as llm:
        group = Group(llm, models, seed)
        for _ in range(rounds):
            await group.round()
        await llm.pause_generation("keep")  # else the last wave may go on, up to its next vote
        status = await llm.status()
        assert (status["running"], status["waiting"]) == (0, 0)
        assert len({rank["num_steps"] for rank in status["ranks"]}) == 1
    return group, group.check()


def run(coroutine: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, limit_s))


@pytest.mark.parametrize("vote", ["step", "interval"])
def test_two_ranks(models: list[pathlib.Path], vote: str) -> None:
    group, checked = run(use(models, 2, 30, 1, dp_vote=vote, dp_sync_interval=8), 90)
    assert checked > 300 and len(group.served) > 5, (checked, group.served)


@pytest.mark.slow
@pytest.mark.parametrize("vote", ["step", "interval"])
def test_four_ranks(models: list[pathlib.Path], vote: str) -> None:
    group, checked = run(use(models, 4, 300, 2, dp_vote=vote), 900)
    assert checked > 6000 and len(group.served) > 20, (checked, group.served)
