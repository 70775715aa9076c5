"""What a pause costs a lockstep group: steps and milliseconds, idle and busy, for each way to vote.

    python -m bench --only data_parallel

The tiny Qwen3-MoE of the recipes, two ranks that share its experts. ``idle``: nothing is asked of the group; counted
are the steps that it made for the pause, all of them empty. ``busy``: one rank has 8 requests; counted are the steps,
with a batch or without, that ended after the pause was sent, so the one that was under way is the first. (Counted from
a status that was asked for just before, and is answered with the outputs of a step that it does not count.) Medians of
a number of pauses, each a while after the last.
"""

from __future__ import annotations

import asyncio
import pathlib
import random
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.machine import figure
from midstream import AsyncLLM, SamplingParams

MODEL = pathlib.Path(__file__).parent.parent / "examples" / "recipes" / "reverse_moe"
PAUSES = 15
LIMIT_S = 120.0
VOTES: list[tuple[str, dict[str, Any]]] = [
    ("every step", {"dp_vote": "step"}),
    ("every 16 steps", {"dp_vote": "interval", "dp_sync_interval": 16}),
    ("every 32 steps", {"dp_vote": "interval", "dp_sync_interval": 32}),
]


async def pauses(llm: AsyncLLM, uncounted: int) -> list[tuple[int, float]]:
    """(steps, milliseconds) of each."""
    rng, found = random.Random(0), []
    for _ in range(PAUSES):
        await asyncio.sleep(rng.random() * 0.05)
        before = (await llm.status())["num_steps"]
        sent = time.monotonic()
        await llm.pause_generation("keep", clear_cache=False)
        took = time.monotonic() - sent
        found.append(((await llm.status())["num_steps"] - before - uncounted, took * 1e3))
        await llm.resume_generation()
    return found


async def measure(options: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    many = {"data_parallel_size": 2, "enable_expert_parallel": True, "num_threads": 1}
    async with AsyncLLM(str(MODEL), num_blocks=1024, max_num_seqs=8, **many, **options) as llm:
        idle = await pauses(llm, 0)
        endless = SamplingParams(n=8, max_tokens=500, ignore_eos=True, detokenize=False)

        async def work() -> None:
            while True:
                async for _ in llm.generate([5, 6, 7], endless, session="one"):
                    pass

        working = asyncio.ensure_future(work())
        await asyncio.sleep(0.5)
        busy = await pauses(llm, 1)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return {"idle": idle, "busy": busy}


def figures() -> Iterator[dict[str, Any]]:
    for vote, options in VOTES:
        found = asyncio.run(asyncio.wait_for(measure(options), LIMIT_S))
        for state, of in found.items():
            steps, times = zip(*of, strict=True)
            asked: dict[str, Any] = {"at_most": 1} if state == "idle" or vote == "every step" else {}
            yield figure(
                f"steps for a pause of two ranks, {state}, votes before {vote}",
                median(steps),
                "steps",
                **asked,
                worst=max(steps),
                pause_ms=round(median(times), 2),
                worst_ms=round(max(times), 2),
            )
