"""Requests to an AsyncLLM from a test: run, read to the end, or waited for up to a token."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from midstream.serving.async_llm import AsyncLLM
from midstream.types import RequestOutput, SamplingParams

LONG = SamplingParams(max_tokens=480, seed=3, ignore_eos=True, detokenize=False)
SHORT = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, detokenize=False)
LIMIT_S = 20.0


def run(coroutine: Coroutine[Any, Any, Any], limit_s: float = 60.0) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, limit_s))


async def collect(llm: AsyncLLM, prompt: list[int], params: SamplingParams = SHORT, **kwargs: Any) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params, **kwargs)]
    assert outputs and outputs[-1].finished
    return outputs[-1]


async def tokens_of(llm: AsyncLLM, name: str, count: int) -> None:
    """Until the request ``name``, which a task reads, has at least ``count`` tokens."""
    async with asyncio.timeout(LIMIT_S):
        while name not in llm._streams:
            await asyncio.sleep(0)  # its task has not come so far
        stream, grew = llm._streams[name], asyncio.Event()

        def told(_: RequestOutput) -> None:
            stream.news.set()
            grew.set()

        stream.on_news = told
        try:
            while len(stream.builder.output.outputs[0].token_ids) < count:
                assert not stream.builder.output.finished and stream.error is None, f"{name} is over"
                grew.clear()
                await grew.wait()
        finally:
            stream.on_news = None
